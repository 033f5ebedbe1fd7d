"""What was found in promotions, switches and old homes: each test is a fault that was there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from blob import Blob, BlobStat
from blob.memory_blobs import MemoryBlob
from blob.metrics import ForwardingBlob
from consensus import Consensus
from consensus.memory_logs import MemoryConsensus
from persist import AttributeUpdate, Conflict, InvalidUsage, ReadOnly, Unavailable
from persist.commit.location import Location
from persist.commit.location_identity import COPY_KEY, EPOCHS
from persist.copies.recovery import RecoveryRequest
from persist.core.ids import shard_id_of
from persist.core.state import Policy
from persist.maintenance.journal_writer import PublishSettings
from persist.regions import switchover
from persist.regions.divergence import Diverged, find_diverged, salvage
from persist.regions.failover import OldHome, Promotion, last_promotion, promote, record_new_home
from persist.regions.region_index import RegionIndex, write_index
from persist.regions.replication import ReplicateSettings, Replicator
from persist.regions.switchover import Switch, demote
from tests.integration import test_erasure
from tests.support.clones import SCHEMA, ClockedIds, Shards
from tests.support.embedded import client_of
from tests.support.examples import thinned
from tests.support.location import memory_location
from tests.support.markers import in_memory, marker, uncompressed, where
from tests.support.regions import POLICY, Row, publish


class Dies(BaseException):
    """A process is killed here."""


class Region:
    """A copy of home's blob store, and the consensus store that is to be."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.blob: Blob = MemoryBlob(name, now_ms=world.home.clock.now_ms)
        self.consensus: Consensus = MemoryConsensus(f"mem:{name}")

    def process(self, *, blob: Blob | None = None, consensus: Consensus | None = None) -> Location:
        world, clock = self.world, self.world.home.clock
        world.processes += 1
        return memory_location(
            blob=blob or self.blob,
            consensus=consensus or self.consensus,
            clock=clock,
            ids=ClockedIds(clock, 5_000 + world.processes),
            policy=POLICY,
            small_merges=False,
        )

    def replicate(self, source: Blob | None = None) -> Replicator:
        """Bring over all that home has."""
        replicator = self.replicator(source)
        replicator.round(whole=True)
        return replicator

    def replicator(self, source: Blob | None = None) -> Replicator:
        return Replicator(source or self.world.home.blob, self.blob, self.world.home.clock, ReplicateSettings())

    def promote(self, home: OldHome | None = None, location: Location | None = None) -> Any:
        return promote(location or self.process(), "us", "eu", home or OldHome(is_lost=True), RecoveryRequest())

    def switch(self, home: Location, replicator: Replicator | None = None, **stores: Any) -> Switch:
        return Switch(home, self.process(**stores), "us", "eu", replicator)

    def rows(self, name: str) -> set[Row]:
        return rows(self.process(), name)

    def insert(self, name: str, k: str, v: int) -> None:
        insert(self.process(), name, k, v)

    def publish(self) -> None:
        self.world.publish(self.process())

    @property
    def promotion(self) -> Promotion:
        """The last one, which made this region home."""
        found = last_promotion(self.blob)
        assert found is not None
        return found


class World:
    """A home with shards, and regions that are copies of it."""

    def __init__(self) -> None:
        self.home = Shards(policy=POLICY)
        self.processes = 0
        self.us, self.ap = Region(self, "us"), Region(self, "ap")

    def begin(self, **shards: int) -> None:
        """Shards with so many inserts, which us has."""
        for name, inserts in shards.items():
            self.home.create(name, inserts)
        self.publish()
        self.us.replicate()

    def publish(self, location: Location | None = None) -> None:
        """What maintenance does until all is published."""
        self.home.clock.advance_ms(6_000)
        publish(location or self.home.process(), PublishSettings(every_s=5.0))

    def sleep(self, seconds: float) -> None:
        self.home.clock.sleep(seconds)

    def killed_switch(self, monkeypatch: pytest.MonkeyPatch, region: Region, sleep: Callable[[float], object]) -> None:
        """A switch that is killed when all is handed over, and the copy has it."""

        def dies(location: object, how: object) -> None:
            raise Dies

        replicator = None if sleep != self.sleep else region.replicator()
        with monkeypatch.context() as patch:
            patch.setattr(switchover, "run_recovery", dies)
            with suppress(Dies):
                region.switch(self.home.process(), replicator).run(sleep=sleep)


@pytest.fixture
def world() -> World:
    return World()


def rows(location: Location, name: str) -> set[Row]:
    table = client_of(location).shard(name).snapshot().to_arrow()
    return set(zip(table["k"].to_pylist(), table["v"].to_pylist(), strict=True))


def insert(location: Location, name: str, k: str, v: int) -> None:
    client_of(location).shard(name).insert([{"k": k, "v": v}])


def mirror(source: Blob, copy: Blob) -> None:
    """The store's own replication: every key, both ways of change."""
    here, there = {stat.key for stat in source.list("")}, {stat.key for stat in copy.list("")}
    for key in sorted(here - there):
        copy.put(key, source.get(key))
    copy.delete(sorted(there - here))


@contextmanager
def killed_at(monkeypatch: pytest.MonkeyPatch, steps: int) -> Iterator[None]:
    """What is done here dies before it changes a store for the `steps`th time."""
    left = steps

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if not left:
                raise Dies
            return real(*given, **named)

        return call

    with monkeypatch.context() as patch, suppress(Dies):
        for store, names in ((MemoryBlob, ("put", "delete")), (MemoryConsensus, ("compare_and_set", "begin"))):
            for name in names:
                patch.setattr(store, name, dying(getattr(store, name)))
        yield


# --- a switch that was undone


def test_a_switch_after_an_undone_one_loses_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the hand-over of the first try, which the copy still showed, for its own."""
    home, us = world.home, world.us

    def sleep(seconds: float) -> None:
        home.clock.advance_ms(int(seconds * 1000))
        mirror(home.blob, us.blob)

    home.create("a", 3)
    world.publish()
    mirror(home.blob, us.blob)
    world.killed_switch(monkeypatch, us, sleep)
    assert us.switch(home.process()).undo() == 1
    home.clock.advance_ms(60_000)  # nothing of this has come to the copy
    for _ in range(5):
        home.write("a")
    world.publish()
    assert us.switch(home.process()).run(sleep=sleep).epoch == 4, "never an epoch that was given before"
    assert us.rows("a") == home.rows["a"]


def test_what_was_undone_becomes_no_home(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by the run that goes on beside the undo, nor by one that comes later, while home goes on."""
    home, us = world.home, world.us
    world.begin(a=3)
    whole = switchover.run_recovery

    def undone_meanwhile(location: Location, how: RecoveryRequest) -> Any:
        us.switch(home.process()).undo()
        return whole(location, how)

    with monkeypatch.context() as patch:
        patch.setattr(switchover, "run_recovery", undone_meanwhile)
        with pytest.raises(Conflict):
            us.switch(home.process(), us.replicator()).run(sleep=world.sleep)
    assert not us.consensus.keys("", "", 1)
    home.clock.advance_ms(11_000)
    home.write("a")  # home goes on
    us.switch(home.process(), us.replicator()).run(sleep=world.sleep)
    with pytest.raises(Conflict, match="begun as home"):
        us.switch(home.process()).undo()
    assert us.rows("a") == home.rows["a"]


@pytest.mark.parametrize("steps", thinned(range(1, 12), 3))
def test_an_undo_is_killed_anywhere_and_repeated(world: World, monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    home, us = world.home, world.us
    world.begin(a=3, b=3)
    world.killed_switch(monkeypatch, us, world.sleep)
    with killed_at(monkeypatch, steps):
        us.switch(home.process()).undo()
    us.switch(home.process()).undo()
    home.clock.advance_ms(11_000)
    for name in "ab":
        home.write(name)
    assert us.switch(home.process(), us.replicator()).run(sleep=world.sleep).epoch == 4
    assert [us.rows(name) for name in "ab"] == [home.rows[name] for name in "ab"]


def test_a_switch_is_refused_while_another_one_is_under_way(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    home, us, ap = world.home, world.us, world.ap
    world.begin(a=3)
    ap.replicate()
    world.killed_switch(monkeypatch, us, world.sleep)
    with pytest.raises(Conflict, match="repeat that one first"):
        ap.switch(home.process(), ap.replicator()).run(sleep=world.sleep)
    assert us.switch(home.process(), us.replicator()).run(sleep=world.sleep).epoch == 2


def test_an_undo_lifts_no_fence_of_another_home(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a switch that lost its epoch to a promotion there is nothing to be taken back: home stays fenced."""
    home, us, ap = world.home, world.us, world.ap
    world.begin(a=3)
    ap.replicate()
    with monkeypatch.context() as patch, suppress(Dies):
        patch.setattr(switchover, "fence", lambda blob, binding: (_ for _ in ()).throw(Dies))
        us.switch(home.process(), us.replicator()).run(sleep=world.sleep)
    ap.promote(OldHome(blob=home.blob))
    for _ in range(2):
        with pytest.raises(Conflict, match="another consensus store has taken over"):
            us.switch(home.process()).undo()
    with pytest.raises(ReadOnly):
        insert(home.process(), "a", "late", 1)


# --- killed, and repeated


@pytest.mark.parametrize("steps", thinned(range(1, 15), 3))
def test_nothing_is_copied_over_a_promotion_that_is_killed(
    world: World, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """Killed after the binding it stayed marked as a copy, and `persist region replicate` deleted its blobs."""
    home, us = world.home, world.us
    world.begin(a=3, b=2)
    with killed_at(monkeypatch, steps):
        us.promote(OldHome(blob=home.blob))
    us.promote(OldHome(blob=home.blob))
    us.insert("a", "at the new home", 1)
    us.publish()
    before = {stat.key for stat in us.blob.list("")}
    replicator = us.replicator()
    for _ in range(3):
        with pytest.raises(InvalidUsage, match="was not made by"):
            replicator.round(whole=True)
        home.clock.advance_ms(301_000)
    assert before <= {stat.key for stat in us.blob.list("")}
    assert us.rows("a") == home.rows["a"] | {("at the new home", 1)}
    assert us.blob.stat(COPY_KEY) is None


@pytest.mark.parametrize("steps", thinned(range(1, 40, 3), 3))
def test_the_next_run_of_a_killed_switch_deletes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """The second run took rollups that the first had begun for blobs that home had deleted."""
    home, us = world.home, world.us
    world.begin(a=3, b=3)

    def slow(step: str) -> None:
        home.clock.advance_ms(301_000)  # each step takes five minutes

    with killed_at(monkeypatch, steps):
        us.switch(home.process(), us.replicator()).run(sleep=world.sleep)
    before = {stat.key for stat in us.blob.list("s")}
    us.switch(home.process(), us.replicator()).run(slow, sleep=world.sleep)
    assert before <= {stat.key for stat in us.blob.list("s")}
    assert [us.rows(name) for name in "ab"] == [home.rows[name] for name in "ab"]


def test_the_same_command_goes_on_once_it_has_ended(world: World, tmp_path: Path) -> None:
    """Killed before the index was set, it was refused: the index stayed with the old home."""
    home, us, ap = world.home, world.us, world.ap
    world.begin(a=3)
    us.promote()
    again = us.promote()
    assert (again.epoch, again.had_ended) == (2, True)
    assert us.switch(home.process()).run().had_ended
    us.publish()
    ap.replicate(us.blob)
    assert ap.switch(us.process(), ap.replicator(us.blob)).run(sleep=world.sleep).epoch == 3
    with pytest.raises(Conflict, match="at epoch 3 since"):
        us.promote()
    index = str(tmp_path / "regions.json")
    write_index(index, RegionIndex({}))
    record_new_home(index, "eu", ("http://ap:1",), 3)
    with pytest.raises(Conflict, match="read-only"):
        record_new_home(index, "eu", ("http://us:1",), 2)


# --- what only the old home has


def told_of(world: World, region: Region, directory: Path | None = None) -> dict[str, Diverged]:
    """What salvage tells of the old home against the one in this region."""
    old, promotion = world.home.process(), region.promotion
    found = find_diverged(old, promotion) if directory is None else salvage(old, promotion, directory)
    return {one.name: one for one in found}


def in_files(found: Diverged) -> set[Row]:
    table = pq.read_table(found.file)
    return set(zip(table["k"].to_pylist(), table["v"].to_pylist(), strict=True))


@pytest.mark.parametrize("second", ["promoted", "switched"])
def test_a_second_home_hides_nothing_of_the_first_one(world: World, tmp_path: Path, second: str) -> None:
    """Notes were not copied, the last one alone was read, and its seqnos were compared with those of another epoch."""
    home, us, ap = world.home, world.us, world.ap
    world.begin(a=3)
    for _ in range(4):
        home.write("a")  # acknowledged there alone
    us.promote()
    us.insert("a", "at us", 1)
    us.publish()
    ap.replicate(us.blob)
    if second == "promoted":
        us.insert("a", "at us alone", 2)
        ap.promote()
    else:
        ap.switch(us.process(), ap.replicator(us.blob)).run(sleep=world.sleep)
    found = told_of(world, ap, tmp_path / "files")["a"]
    assert in_files(found) == home.rows["a"] - ap.rows("a")
    with pytest.raises(Conflict, match="has updates of 1 shards"):
        demote(home.process(), ap.blob, ap.promotion)
    told = list(find_diverged(us.process(), ap.promotion))
    assert [one.name for one in told] == (["a"] if second == "promoted" else [])


def columns(home: Shards) -> None:
    home.client.shard("a").evolve_schema(pa.schema([*SCHEMA, pa.field("added", pa.int64())]))
    home.merge("a")
    home.settle()


def attribute(home: Shards) -> None:
    home.client.shard("a").open_writer().update_attributes([AttributeUpdate.replace("ab" * 16, 1)])


CHANGES: dict[str, Callable[[Shards], object]] = {
    "a critical reader": lambda home: home.client.shard("a").critical_reader("other", "acknowledged"),
    "a column, and then merges": columns,
    "history that was forgotten": lambda home: home.merge("a"),
    "a tag": lambda home: home.client.shard("a").tag("mine", 0),
    "a setting": lambda home: home.client.shard("a").configure(history="7d"),
    "an attribute": attribute,
    "a row": lambda home: home.write("a"),
}
NONE: dict[str, Callable[[Shards], object]] = {
    "collections": lambda home: home.settle(),
    "readers": lambda home: home.contents("a"),
    "nothing": lambda home: None,
}


@pytest.mark.parametrize("change", [*CHANGES, *NONE])
def test_what_was_acknowledged_besides_rows_is_told(world: World, change: str) -> None:
    """A critical reader leaves no entry in the commit history, and without a history of its own a shard keeps few."""
    home, us = world.home, world.us
    world.begin(a=6)
    us.promote()
    {**CHANGES, **NONE}[change](home)
    told = told_of(world, us)
    assert list(told) == (["a"] if change in CHANGES else [])
    if change in CHANGES:
        assert told["a"].commits > 0
        assert told["a"].to_json()["commits"] == told["a"].commits


def test_what_was_handed_over_and_did_not_arrive_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A promotion of the copy goes on under the epoch of the switch: what it lacks counts all the same."""
    home, us = world.home, world.us
    world.begin(a=3)
    home.write("a")
    with monkeypatch.context() as patch, suppress(Dies):
        patch.setattr(Switch, "_wait_until_arrived", lambda switch, names, epoch, sleep: (_ for _ in ()).throw(Dies))
        us.switch(home.process(), None).run(sleep=world.sleep)
    us.promote()
    found = told_of(world, us, tmp_path / "files")["a"]
    assert in_files(found) == home.rows["a"] - us.rows("a")


def test_a_long_name_and_a_damaged_shard_hide_no_other_shard(world: World, tmp_path: Path) -> None:
    """The file's name was too long for a file system, and the shards after it were not told."""
    home, us = world.home, world.us
    long = "eu" + "x" * 125 + "/" + "y" * 128
    world.begin(**{"a": 1, long: 2, "z": 1})
    for name in ("a", long, "z"):
        home.write(name)
    us.promote()
    home.blob.delete([stat.key for stat in home.blob.list(shard_id_of("a"))])
    told = told_of(world, us, tmp_path / "files")
    assert "cannot be read" in told["a"].why
    assert [in_files(told[name]) for name in (long, "z")] == [home.rows[name] - us.rows(name) for name in (long, "z")]


# --- an old home becomes a copy


class Between(ForwardingBlob):
    """Does something when the epochs are listed."""

    def __init__(self, inner: Blob, then: Callable[[], None]) -> None:
        super().__init__(inner)
        self.then = then

    def list(self, prefix: str) -> Iterator[BlobStat]:
        if prefix == EPOCHS:
            then, self.then = self.then, lambda: None
            then()
        return super().list(prefix)


def test_what_comes_while_a_home_is_demoted_is_not_dropped_unseen(world: World) -> None:
    """It was looked what the home has alone before the home was stopped."""
    home, us = world.home, world.us
    world.begin(a=3)
    us.promote()
    server = home.process()  # it has not seen that another home is there
    rows(server, "a")
    promotion = us.promotion
    new = Between(us.blob, lambda: insert(server, "a", "acknowledged", 77))
    with pytest.raises(Conflict, match="has updates of 1 shards"):
        demote(home.process(), new, promotion)
    assert ("acknowledged", 77) in rows(home.process(), "a"), "it is read until it is demoted"
    with pytest.raises(Conflict):
        demote(home.process(), us.blob, promotion)
    demote(home.process(), us.blob, promotion, drop_diverged=True)
    with pytest.raises(ReadOnly):
        insert(server, "a", "late", 1)


def test_a_demotion_that_was_killed_looks_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    home, us = world.home, world.us
    world.begin(a=3)
    us.promote()
    promotion = us.promotion
    for steps in range(2, 6):
        with killed_at(monkeypatch, steps):
            demote(home.process(), us.blob, promotion)
        with suppress(ReadOnly):
            insert(home.process(), "a", f"late {steps}", steps)
    state = home.state("a")
    assert (state.handed_over, state.event_count) == (2, 3)
    demote(home.process(), us.blob, promotion)
    assert home.blob.stat(COPY_KEY) is not None


@pytest.mark.parametrize("has_looked", [True, False])
def test_a_running_home_whose_store_becomes_a_copy_says_so(world: World, has_looked: bool) -> None:
    """Its readers were told Corruption once blobs went, ReadOnly before that, and it was ready."""
    home, us = world.home, world.us
    world.begin(a=3, b=3)
    us.promote()
    server = memory_location(
        blob=home.blob, consensus=home.consensus, clock=home.clock, policy=POLICY, shows_no_copy=True
    )
    client = client_of(server)
    opened = client.shard("a")
    assert rows(server, "a") == home.rows["a"]
    promotion = us.promotion
    demote(home.process(), us.blob, promotion)
    replicator = Replicator(us.blob, home.blob, home.clock, ReplicateSettings(keep_s=0.0))
    for _ in range(2):
        replicator.round(whole=True)
        home.clock.advance_ms(6_000)
    if has_looked:  # in the background
        server.identity.check_home()
    for read in (opened.snapshot, lambda: client.shard("b").snapshot(), lambda: next(iter(opened.listen(None)))):
        with pytest.raises(Unavailable, match=r"^this store is a copy now: .* serve it by `persist serve --read-only"):
            read()
    with pytest.raises(Unavailable, match="this store is a copy now"):
        server.check()
    with pytest.raises(ReadOnly):
        opened.insert([{"k": "late", "v": 1}])


# --- what a receipt says


@pytest.mark.parametrize("how", ["promoted", "switched"])
def test_a_receipt_is_given_anew_by_the_home_that_was_a_copy(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The copy keeps for a while what home has deleted: the new home said `erased`, and its store had the rows."""
    uncompressed(monkeypatch)
    world = test_erasure.World(policy=Policy())
    machine = world.machine()
    shard = machine.client.create_shard(test_erasure.NAME, test_erasure.SCHEMA, ["id"], history="7d")
    secret = marker()
    test_erasure.padded(shard, secret, "b")
    copy, log = MemoryBlob("us", now_ms=lambda: world.true_ms), MemoryConsensus("mem:us")

    def published() -> None:
        world.pass_ms(6_000)
        publish(world.machine().location, PublishSettings(every_s=5.0))

    published()
    replicator = Replicator(world.blob, copy, machine.clock, ReplicateSettings())
    replicator.round(whole=True)
    told = shard.erase(keys=[secret])
    test_erasure.Maintenance(machine).run()
    assert shard.erased(told.id).done
    published()
    replicator.round(whole=True)
    old = world.machine().location
    world.blob, world.consensus = copy, log  # whose machines are of the new home from now on
    new = world.machine().location
    if how == "switched":
        mover = Replicator(old.blob, copy, machine.clock, ReplicateSettings())
        Switch(old, new, "us", "eu", mover).run(sleep=lambda seconds: world.pass_ms(int(seconds * 1000)))
    else:
        promote(new, "us", "eu", OldHome(is_lost=True), RecoveryRequest())
    assert where(in_memory(copy, log), secret), "or there is nothing to be seen"
    there = world.machine()
    found = there.client.shard(test_erasure.NAME)
    assert not found.erased(told.id).done
    for _ in range(3):
        world.pass_ms(24 * 3_600_000)
        test_erasure.Maintenance(there).run()
    assert found.erased(told.id).done
    assert where(in_memory(copy, log), secret) == []
