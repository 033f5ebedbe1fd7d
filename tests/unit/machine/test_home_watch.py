"""A home looks whether another one has taken over, and stops once it has, or once it could not look for long."""

from __future__ import annotations

import math
import threading
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pytest

from blob.errors import BlobUnavailable
from blob.memory_blobs import MemoryBlob
from blob.metrics import ForwardingBlob
from consensus import Consensus, ConsensusUnavailable
from consensus import Entry as LogEntry
from consensus.memory_logs import MemoryConsensus
from consensus.metrics import ForwardingConsensus
from persist.client.shard import Shard
from persist.commit import committer
from persist.commit import location_identity as module
from persist.commit.clocks_and_ids import moment
from persist.commit.location import Location
from persist.commit.location_identity import LOOK_EVERY_S, TRIES_MAX, Looks, epoch_key
from persist.core import commands as c
from persist.core.attribute import AttributeUpdate, attribute_key
from persist.core.errors import Indeterminate, InvalidUsage, ReadOnly, Unavailable
from persist.core.ids import LocationBinding, ReaderId, Token, mint, writer_of
from persist.formats.state_frames import encode_binding
from persist.regions.failover import HomeWatch, check_fence
from persist.regions.region_index import IndexFile, RegionEntry, RegionIndex, write_index
from tests.support.clocks import Clock, Machine, World
from tests.support.location import AscendingIds, TestClock, client_of, memory_location

SCHEMA = pa.schema([("id", pa.int64())])
SELF_FENCE_S = 30.0
LONG_S = 600.0
KEY = attribute_key("ab" * 16)
ONE_MORE = AttributeUpdate.accumulate(KEY, 1)
NEW_HOME = "http://us:8787"


class Stores(ForwardingBlob):
    """A blob store that can be down."""

    down = False

    def get(self, key: str) -> bytes:
        if self.down:
            raise BlobUnavailable("it is down")
        return super().get(key)


class Links:
    """An index of another region, as long as the link is up."""

    down = False

    def fetch(self) -> RegionIndex:
        if self.down:
            raise Unavailable("no link")
        return RegionIndex({})


def begun(world: World) -> tuple[Machine, Shard]:
    machine = world.machine()
    return machine, machine.client.create_shard("eu/orders", SCHEMA, ["id"])


class Home:
    def __init__(self, path: Path, fence_s: float = 0.0) -> None:
        self.clock = TestClock()
        self.blob = Stores(MemoryBlob("mem:"))
        self.consensus = MemoryConsensus("mem:")
        self.index = path / "regions.json"
        self.say(0)
        self.location = self.open()
        self.watch = HomeWatch(self.location.identity, "eu", IndexFile(str(self.index)), fence_s)
        self.shard = client_of(self.location).create_shard("eu/orders", SCHEMA, ["id"])

    def open(self) -> Location:
        return memory_location(blob=self.blob, consensus=self.consensus, clock=self.clock)

    def say(self, epoch: int) -> None:
        """The administrator sets the index."""
        write_index(self.index, RegionIndex({"eu": RegionEntry((NEW_HOME,), (), epoch=epoch)}))

    def taken_over(self, epoch: int = 2) -> None:
        """Another consensus store goes on with these blobs."""
        location_id = self.location.identity.check().location_id
        self.blob.put(epoch_key(epoch), encode_binding(LocationBinding(location_id, epoch, "other")))

    def insert(self) -> None:
        self.shard.insert([{"id": 1}])

    def wait(self, seconds: float) -> None:
        self.clock.advance_ms(int(seconds * 1000))


def test_the_index_ends_a_home_of_an_earlier_epoch(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.insert()
    home.say(2)
    home.wait(LOOK_EVERY_S)
    with pytest.raises(ReadOnly, match="at home elsewhere since epoch 2, at http://us:8787") as told:
        home.insert()
    assert told.value.details["home"] == [NEW_HOME]
    with pytest.raises(ReadOnly):
        home.location.identity.confirm()  # and nothing is deleted
    assert home.shard.snapshot().to_arrow().num_rows == 1
    home.say(1)  # it takes that back
    home.wait(LOOK_EVERY_S)
    home.insert()


def test_an_older_index_that_has_a_later_epoch_tells_enough(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.say(2)
    home.watch._index.now()  # type: ignore[union-attr]
    home.index.unlink()
    home.wait(LOOK_EVERY_S)
    with pytest.raises(ReadOnly, match="at home elsewhere since epoch 2"):
        home.insert()


@pytest.mark.parametrize("epoch", [2, 3])  # a promotion that was given up took epoch 2 in the copy alone
def test_a_process_that_slept_looks_before_it_writes(tmp_path: Path, epoch: int) -> None:
    """Nobody looks in the background here, as nobody does while a process is stopped."""
    home = Home(tmp_path)
    home.insert()
    home.taken_over(epoch)
    home.wait(LOOK_EVERY_S)
    with pytest.raises(ReadOnly, match=r"read-only|only reads"):
        home.insert()
    with pytest.raises(ReadOnly, match=r"read-only|only reads"):
        client_of(home.open()).shard("eu/orders").insert([{"id": 2}])


@pytest.mark.parametrize("how", ["suspended", "paused"])
def test_a_machine_that_was_suspended_has_not_been_told_anything_for_so_long(how: str) -> None:
    machine, shard = begun(World())
    links = Links()
    watch = HomeWatch(machine.location.identity, "eu", links, SELF_FENCE_S)  # type: ignore[arg-type]
    watch._look()
    shard.insert([{"id": 1}])
    links.down = True
    getattr(machine, how)(int(SELF_FENCE_S * 1000))
    with pytest.raises(Unavailable, match=r"this process could not check for \d+ s"):
        shard.insert([{"id": 2}])


def test_a_write_waits_for_the_look_that_is_under_way(tmp_path: Path) -> None:
    """The process slept, and its thread wakes first: what that one is about to be told is not known yet."""
    home = Home(tmp_path)
    home.insert()
    home.taken_over()
    home.wait(LOOK_EVERY_S)
    began, go_on = threading.Event(), threading.Event()
    identity = home.location.identity
    entry = identity._entry

    def slowly() -> LogEntry | None:
        found = entry()
        began.set()
        go_on.wait(LONG_S)
        return found

    identity._entry = slowly  # type: ignore[method-assign]
    looking = threading.Thread(target=home.watch._look, daemon=True)
    looking.start()
    assert began.wait(LONG_S)
    refused: list[BaseException] = []

    def write() -> None:
        try:
            home.insert()
        except ReadOnly as error:
            refused.append(error)

    writing = threading.Thread(target=write, daemon=True)
    writing.start()
    go_on.set()
    writing.join(LONG_S)
    looking.join(LONG_S)
    assert len(refused) == 1


def test_who_is_fenced_by_its_store_names_the_new_home_of_the_index(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.taken_over()
    home.wait(LOOK_EVERY_S)
    with pytest.raises(ReadOnly) as told:
        home.insert()
    assert told.value.details == {"home": [], "region": ""}, "the index does not know yet"
    home.say(2)
    home.wait(LOOK_EVERY_S)
    with pytest.raises(ReadOnly, match="or write at http://us:8787") as told:
        home.insert()
    assert told.value.details == {"home": [NEW_HOME], "region": "eu"}


def test_a_shard_that_was_handed_over_names_the_new_home_of_the_index(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.location.machine("eu/orders").apply(c.HandOver(0, 2))
    with pytest.raises(ReadOnly, match=r"epoch 2: write there$") as told:
        home.insert()
    assert told.value.details == {"home": [], "region": ""}, "the index does not know yet"
    home.say(2)
    home.watch._look()
    with pytest.raises(ReadOnly, match=r"write there, at http://us:8787$") as told:
        home.insert()
    assert told.value.details == {"home": [NEW_HOME], "region": "eu"}


def test_who_begins_asks_the_index_before_it_deletes(tmp_path: Path) -> None:
    """A command by hand has no thread that looks: opening the stores is not all."""
    home = Home(tmp_path)
    home.say(2)
    fresh = home.open()
    HomeWatch(fresh.identity, "eu", home.watch._index)
    fresh.identity.check()
    with pytest.raises(ReadOnly, match="at home elsewhere"):
        fresh.identity.confirm()


def test_stores_that_do_not_tell_stop_nobody(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.blob.down = True
    home.wait(10 * SELF_FENCE_S)
    home.insert()


def test_unless_the_home_is_to_stop_by_itself(tmp_path: Path) -> None:
    home = Home(tmp_path, SELF_FENCE_S)
    home.insert()
    home.blob.down = True
    home.wait(SELF_FENCE_S / 2)
    home.insert()
    home.wait(SELF_FENCE_S / 2)
    with pytest.raises(Unavailable, match="whether another home"):
        home.insert()
    home.blob.down = False
    home.wait(LOOK_EVERY_S)
    home.insert()


class Stalls(ForwardingConsensus):
    """A log that takes long: it does not answer for a while, or answers late what it has done at once."""

    def __init__(self, inner: Consensus, clock: TestClock) -> None:
        super().__init__(inner)
        self.clock = clock
        self.away_until_s = 0.0
        self.late_s = 0.0

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        if self.clock.monotonic() < self.away_until_s:
            raise ConsensusUnavailable("it fails over")
        won = super().compare_and_set(key, seqno, data, after)
        self.clock.advance_ms(int(self.late_s * 1000))
        return won


class Stalled:
    """A home that stops by itself, over such a log. From now on its blob store does not tell."""

    def __init__(self, path: Path) -> None:
        self.home = home = Home(path, SELF_FENCE_S)
        home.insert()
        self.log = Stalls(home.consensus, home.clock)
        location = memory_location(blob=home.blob, consensus=self.log, clock=home.clock, ids=AscendingIds(7))
        HomeWatch(location.identity, "eu", IndexFile(str(home.index)), SELF_FENCE_S)
        location.identity.check_home()
        self.token = mint(Token, location.ids)
        self.machine = location.machine("eu/orders")
        self.machine.refresh()
        home.blob.down = True
        self.began_s = home.clock.monotonic()

    def write(self) -> c.Result:
        with patch.object(committer, "RETRY_S", 2 * SELF_FENCE_S):
            return self.machine.apply(c.UpdateAttributes(writer_of(self.token), self.token, (ONE_MORE,)))

    def landed(self) -> bool:
        self.home.blob.down = False
        told = self.home.open().machine("eu/orders").apply(c.ReadAttributes((KEY,)))
        self.home.blob.down = True
        return told == c.AttributeValues({KEY: 1})


def test_a_write_that_waits_for_its_log_ends_with_the_home(tmp_path: Path) -> None:
    """It began while the home could write. Its log is back only after that."""
    stalled = Stalled(tmp_path)
    stalled.log.away_until_s = stalled.began_s + SELF_FENCE_S + 10
    with pytest.raises(Unavailable, match="could not check"):
        stalled.write()
    assert not stalled.landed()


def test_a_write_that_is_answered_after_that_is_not_acknowledged(tmp_path: Path) -> None:
    """It is in the log, and a promotion may not have it. So is what its token says later on."""
    stalled = Stalled(tmp_path)
    stalled.log.late_s = SELF_FENCE_S
    with pytest.raises(Indeterminate, match="may have happened"):
        stalled.write()
    assert stalled.landed()
    stalled.log.late_s = 0.0
    with pytest.raises(Unavailable, match="could not check"):
        stalled.write()
    stalled.home.blob.down = False
    stalled.home.wait(LOOK_EVERY_S)
    assert stalled.write() == c.Done()
    assert stalled.landed(), "once"


def test_a_write_that_landed_before_another_home_is_not_acknowledged_after_it(tmp_path: Path) -> None:
    """The new home may not have it: the caller is sent there, with the same token."""
    stalled = Stalled(tmp_path)
    stalled.home.blob.down = False
    stalled.write()
    stalled.home.taken_over()
    stalled.home.wait(LOOK_EVERY_S)
    with pytest.raises(ReadOnly, match=r"read-only|only reads"):
        stalled.write()


def test_readers_go_on_where_nothing_may_be_written(tmp_path: Path) -> None:
    stalled = Stalled(tmp_path)
    stalled.home.wait(SELF_FENCE_S)
    reader = mint(ReaderId, stalled.home.location.ids)
    assert isinstance(stalled.machine.apply(c.RegisterReader(reader, None, 60_000)), c.ReaderRegistered)


def test_an_index_that_does_not_tell_stops_it_as_well(tmp_path: Path) -> None:
    home = Home(tmp_path, SELF_FENCE_S)
    home.insert()
    home.index.write_text("{}")
    home.wait(SELF_FENCE_S)
    with pytest.raises(Unavailable, match="could not check"):
        home.insert()


def test_who_begins_looks_first(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.index.unlink()
    fresh = home.open()
    HomeWatch(fresh.identity, "eu", home.watch._index, SELF_FENCE_S)
    with pytest.raises(Unavailable, match="could not check"):
        client_of(fresh).shard("eu/orders").insert([{"id": 2}])


def test_a_shard_that_is_made_meanwhile_is_not_acknowledged(tmp_path: Path) -> None:
    """Who takes over lists the shards after the epoch is there: a shard that begins later would be nowhere."""
    home = Home(tmp_path)

    class Slow(ForwardingConsensus):
        def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
            home.taken_over()
            return super().compare_and_set(key, seqno, data, after)

    slow = memory_location(blob=home.blob, consensus=Slow(home.consensus), clock=home.clock)
    with pytest.raises(ReadOnly, match=r"read-only|only reads"):
        client_of(slow).create_shard("eu/late", SCHEMA, ["id"])


@pytest.mark.parametrize("fence_s", [-1.0, 1.0, 19.9, 86_401.0, float("nan")])
def test_a_fence_that_makes_no_sense_is_refused(fence_s: float) -> None:
    with pytest.raises(InvalidUsage, match="self_fence"):
        check_fence(fence_s)


# --- whether it is to be looked before a commit, and who looks: one at a time, unless one hangs

EVERY_MS = int(LOOK_EVERY_S * 1000)


class Told:
    """What is looked at. The first look may hang, and the next ones may take time or not tell."""

    def __init__(self) -> None:
        self.clock = TestClock()
        self.looks = Looks(self._look, self.clock)
        self.hangs = threading.Event()
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.takes_ms = 0
        self.error: Exception | None = None
        self.numbers: list[int] = []

    def _look(self, number: int) -> None:
        self.numbers.append(number)
        if self.hangs.is_set():
            self.hangs.clear()
            self.began.set()
            self.go_on.wait(LONG_S)
        self.clock.advance_ms(self.takes_ms)
        if self.error is not None:
            raise self.error

    def _now(self) -> None:
        with suppress(Unavailable):
            self.looks.now()

    def hang(self) -> threading.Thread:
        """A look that is under way until it is to go on."""
        self.hangs.set()
        thread = threading.Thread(target=self._now, daemon=True)
        thread.start()
        assert self.began.wait(LONG_S)
        return thread


@pytest.fixture
def told() -> Told:
    return Told()


def test_it_is_due_until_it_is_looked_and_again_later(told: Told) -> None:
    assert told.looks.is_due
    assert told.looks.silent_s == math.inf
    told.looks.if_due()
    told.looks.if_due()
    assert told.numbers == [1]
    told.clock.advance_ms(EVERY_MS)
    assert told.looks.is_due
    assert told.looks.silent_s == LOOK_EVERY_S


def test_a_look_counts_from_its_beginning(told: Told) -> None:
    """What it was told may be of then."""
    told.takes_ms = EVERY_MS
    told.looks.now()
    assert told.looks.is_due


def test_one_that_could_not_be_told_is_not_asked_again_at_once(told: Told) -> None:
    """Or a link that is down would keep every commit waiting."""
    told.error, told.takes_ms = Unavailable("the link is down"), EVERY_MS // 2
    with pytest.raises(Unavailable):
        told.looks.if_due()
    told.clock.advance_ms(EVERY_MS - 1)
    assert not told.looks.is_due
    assert told.looks.silent_s == math.inf


def test_one_that_took_long_and_could_not_be_told_is_tried_again(told: Told) -> None:
    """The process may have slept in it, and so lost its connections."""
    told.error, told.takes_ms = Unavailable("the link is down"), EVERY_MS
    with pytest.raises(Unavailable):
        told.looks.if_due()
    assert told.numbers == list(range(1, TRIES_MAX + 1))
    assert told.looks.is_due


def test_one_that_found_the_wrong_stores_does_not_count(told: Told) -> None:
    told.looks.now()
    told.error = InvalidUsage("the stores do not belong together")
    for _ in range(2):
        with pytest.raises(InvalidUsage):
            told.looks.now()
        assert told.looks.is_due


@pytest.mark.parametrize(("slept_ms", "looks"), [(0, [1]), (EVERY_MS, [1, 2])])
def test_who_is_to_look_waits_for_the_look_that_is_under_way_unless_that_began_before_he_slept(
    told: Told, monkeypatch: pytest.MonkeyPatch, slept_ms: int, looks: list[int]
) -> None:
    monkeypatch.setattr(module, "TURN_WAIT_S", LONG_S)
    first = told.hang()
    second = threading.Thread(target=told.looks.if_due, daemon=True)
    second.start()
    assert told.looks.is_due, "it has not told anything yet"
    told.clock.advance_ms(slept_ms)
    told.go_on.set()
    second.join(LONG_S)
    first.join(LONG_S)
    assert told.numbers == looks


def test_and_where_that_one_hangs(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_WAIT_S", 0.0)
    first = told.hang()
    told.clock.advance_ms(EVERY_MS)
    told.looks.if_due()
    assert told.numbers == [1, 2]
    told.error = Unavailable("it hung")
    told.go_on.set()
    first.join(LONG_S)
    assert not told.looks.is_due, "the later one tells"


@pytest.mark.parametrize("how", ["suspended", "paused"])
def test_time_passes_while_the_machine_stands_still(how: str) -> None:
    """The monotonic clock tells nothing of it. Of a pause only the wall clock does, once it is set right."""
    machine = World().machine()
    then = moment(machine.clock)
    getattr(machine, how)(60_000)
    assert machine.clock.monotonic() == 0.0
    assert then.passed_s(machine.clock) == 60.0


@pytest.mark.parametrize("off_ms", [60_000, -60_000])
def test_a_wall_clock_that_was_set_counts_as_time_that_passed(off_ms: int) -> None:
    """Nobody can tell how long the machine was stopped: it is looked once more."""
    clock = Clock(World(), 0)
    then = moment(clock)
    clock.off_ms = off_ms
    assert then.passed_s(clock) == 60.0
