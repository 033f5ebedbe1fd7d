"""A log may lose its newest entries under running processes, and grow again otherwise: histories are never mixed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pyarrow as pa
import pytest

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.client.embedded import EmbeddedTransport
from persist.client.listen import Listen
from persist.client.shard import Shard
from persist.commit.committer import Machine
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.errors import Corruption, HistoryLost
from persist.core.frontier import Antichain
from persist.core.ids import SeqNo
from persist.core.record import replace
from persist.core.shard_view import SeenVersion
from persist.core.state import initial_state
from persist.core.state_diff import apply, diff
from persist.formats.state_frames import THIS_BUILD, Build
from tests.support.location import AscendingIds, client_of, memory_location
from tests.support.shard import NAME as STEPPED
from tests.support.shard import SCHEMA as RECORD

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
NAME, OTHER = "orders", "others"


class FailingOver(MemoryConsensus):
    """A store whose replica lacks the newest entries."""

    def lose(self, name: str, entries: int) -> None:
        with self._lock:
            for _ in range(entries):
                del self._logs[name][self._heads[name]]
                self._heads[name] -= 1


class Stores:
    def __init__(self, build: Build = THIS_BUILD) -> None:
        self.blob, self.log, self.build, self.opened = MemoryBlob("mem:"), FailingOver("mem:"), build, 0

    def open(self) -> Location:
        self.opened += 1
        return memory_location(blob=self.blob, consensus=self.log, ids=AscendingIds(self.opened), build=self.build)

    def shard(self, name: str = NAME) -> Shard:
        return client_of(self.open()).create_shard(name, SCHEMA, ["id"])


def insert(shard: Shard, *ids: int) -> None:
    for number in ids:
        shard.insert([{"id": number, "v": "x"}])


def ids(shard: Shard) -> list[int]:
    return sorted(row["id"] for row in shard.snapshot().to_arrow().to_pylist())


@pytest.fixture
def stores() -> Stores:
    return Stores()


CALLS: list[Callable[[Shard], object]] = [
    lambda shard: shard.upper(),
    lambda shard: shard.snapshot().to_arrow(),
    lambda shard: insert(shard, 500),
    lambda shard: shard.listen(None).__enter__(),
    lambda shard: shard.drop(force=True),
]


@pytest.mark.parametrize("call", CALLS, ids=["upper", "snapshot", "insert", "listen", "drop"])
@pytest.mark.parametrize("others_wrote", [0, 6], ids=["shorter", "longer"])
def test_a_process_that_read_what_was_lost_is_told_and_makes_nothing_worse(
    stores: Stores, call: Callable[[Shard], object], others_wrote: int
) -> None:
    ours = stores.shard()
    insert(ours, *range(5))
    fresh, survivors = Stores(stores.build), stores.log
    stores.log.lose(NAME, 2)
    fresh.blob, fresh.log = stores.blob, survivors
    fresh.opened = 100
    theirs = fresh.shard()
    before = ids(theirs)
    insert(theirs, *range(100, 100 + others_wrote))
    head = stores.log.head(NAME)
    if others_wrote:
        for _ in range(2):
            with pytest.raises(Corruption, match="restart this process"):
                call(ours)
        assert stores.log.head(NAME) == head
    assert ids(theirs) == sorted([*before, *range(100, 100 + others_wrote)])
    assert ids(fresh.shard()) == ids(theirs)


def test_a_commit_on_a_log_that_has_grown_to_the_same_length_is_not_taken(stores: Stores) -> None:
    """Such a commit would have been the next one of a history that never was: the shard was corrupt for everybody."""
    shard = stores.shard()
    insert(shard, *range(5))
    cached = stores.log.head(NAME)
    assert cached is not None
    stores.log.lose(NAME, 2)
    theirs = stores.open().machine(NAME)
    for time in range(100, 102):
        theirs.apply(c.AdvanceUpper(Antichain(time)))
    head = stores.log.head(NAME)
    assert head is not None
    assert head.seqno == cached.seqno
    with pytest.raises(HistoryLost, match="another commit there"):
        insert(shard, 500)
    assert stores.log.head(NAME) == head
    assert stores.shard().upper() == Antichain(101)


def test_no_other_shard_is_harmed(stores: Stores) -> None:
    location = stores.open()
    client = client_of(location)
    lost, sound = (client.create_shard(name, SCHEMA, ["id"]) for name in (NAME, OTHER))
    for shard in (lost, sound):
        insert(shard, *range(5))
    stores.log.lose(NAME, 2)
    with pytest.raises(HistoryLost):
        lost.upper()
    insert(sound, 5)
    assert ids(sound) == [0, 1, 2, 3, 4, 5]


def test_a_listener_hears_of_it_instead_of_mixed_rows(stores: Stores) -> None:
    ours = stores.shard()
    insert(ours, *range(5))
    with ours.listen(None) as listen:
        heard = [row["id"] for event in listen.next_events(0) for row in event.updates.to_pylist()]
        assert heard == [0, 1, 2, 3, 4]
        stores.log.lose(NAME, 2)
        insert(stores.shard(), *range(100, 106))
        with pytest.raises(Corruption):
            list(listen.next_events(0))
        with pytest.raises(Corruption):
            list(listen.next_events(0))


def test_a_listener_that_comes_to_another_server_hears_that_the_log_is_shorter() -> None:
    stores = Stores()
    ours = stores.shard()
    insert(ours, *range(5))
    with ours.listen(None) as listen:
        list(listen.next_events(0))
        stores.log.lose(NAME, 5)
        listen._transport = EmbeddedTransport(stores.open())
        with pytest.raises(HistoryLost, match="listen again"):
            list(listen.next_events(0))


def a_listener_of_lost_rows(stores: Stores) -> Listen:
    """It has read what is lost, and the log has grown beyond it since. It goes on in another process."""
    ours = stores.shard()
    insert(ours, *range(3))
    listen = ours.listen(None)
    insert(ours, *range(3, 8))
    heard = [row["id"] for event in listen.next_events(0) for row in event.updates.to_pylist()]
    assert heard == [0, 1, 2, 3, 4, 5, 6, 7]
    stores.log.lose(NAME, 3)
    insert(stores.shard(), *range(100, 106))
    return listen


def test_a_listener_that_comes_to_another_process_hears_of_a_log_that_has_grown_otherwise(stores: Stores) -> None:
    """It was given rows of two histories."""
    listen = a_listener_of_lost_rows(stores)
    listen._transport = EmbeddedTransport(stores.open())
    for _ in range(2):
        with pytest.raises(HistoryLost, match="listen again"):
            list(listen.next_events(0))
    anew = stores.shard()
    assert ids(anew)[-6:] == list(range(100, 106)), "the shard itself goes on"


def test_a_listener_comes_to_another_process_and_goes_on_where_nothing_is_lost(stores: Stores) -> None:
    ours = stores.shard()
    insert(ours, *range(3))
    others = stores.open()
    theirs = client_of(others).shard(NAME)
    with ours.listen(None) as listen:
        list(listen.next_events(0))
        insert(ours, *range(3, 50))
        listen._transport = EmbeddedTransport(others)
        found = [row["id"] for event in listen.next_events(0) for row in event.updates.to_pylist()]
        insert(theirs, 50)
        late = stores.open()  # it has loaded the shard from a later rollup, and asks the log
        listen._transport = EmbeddedTransport(late)
        found += [row["id"] for event in listen.next_events(0) for row in event.updates.to_pylist()]
        assert found == [*range(3, 51)]


def test_what_a_listener_has_read_here_costs_no_further_call(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    location = stores.open()
    shard = client_of(location).create_shard(NAME, SCHEMA, ["id"])
    machine = location.machine(NAME)
    insert(shard, 1)
    before = machine.state()
    insert(shard, 2)
    monkeypatch.setattr(stores.log, "scan", lambda *given: pytest.fail("the log was read"))
    for state in (before, machine.state()):
        machine.check_seen(machine.state(), SeenVersion(state.seqno, state.commit_id))


def test_what_the_log_does_not_tell_any_more_cannot_be_compared(stores: Stores) -> None:
    ours = stores.shard()
    insert(ours, *range(40))
    stores.log.truncate(NAME, 20)
    machine = stores.open().machine(NAME)
    machine.check_seen(machine.state(), SeenVersion(SeqNo(5), "0" * 32))
    with pytest.raises(HistoryLost):
        machine.check_seen(machine.state(), SeenVersion(SeqNo(25), "0" * 32))


def test_who_waits_is_woken_and_told(stores: Stores) -> None:
    location = stores.open()
    shard = client_of(location).create_shard(NAME, SCHEMA, ["id"])
    insert(shard, *range(5))
    machine = location.machine(NAME)
    told: list[object] = []
    stop = machine.watch(told.append)
    stores.log.lose(NAME, 2)
    with pytest.raises(HistoryLost):
        machine.wait_for(lambda state: state.seqno > 100, 5.0, 0.1)
    assert len(told) == 1
    assert machine.cached is None
    stop()


def test_a_state_diff_names_its_parent() -> None:
    old = replace(initial_state(STEPPED, RECORD, 0), commit_id="a")
    new = replace(old, seqno=old.seqno + 1, commit_id="b")
    change = diff(old, new, "b")
    assert (change.commit_id, change.parent_id) == ("b", "a")
    assert apply(change, old) == new
    with pytest.raises(Corruption, match="a lost history"):
        apply(change, replace(old, commit_id="another"))


def test_a_machine_that_has_lost_its_history_creates_nothing(stores: Stores) -> None:
    location = stores.open()
    shard = client_of(location).create_shard(NAME, SCHEMA, ["id"])
    insert(shard, *range(5))
    machine: Machine = location.machine(NAME)
    stores.log.lose(NAME, 2)
    with pytest.raises(HistoryLost):
        machine.refresh()
    with pytest.raises(HistoryLost):
        machine.create(initial_state(NAME, RECORD, 0))
    with pytest.raises(HistoryLost):
        machine.apply(c.AdvanceUpper(Antichain(100)))


@pytest.mark.parametrize("meanwhile", [lambda machine: machine.refresh(), lambda machine: machine.state()])
def test_a_commit_under_way_does_not_land_on_a_history_that_another_thread_reads(
    stores: Stores, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[Machine], object]
) -> None:
    """The reader's look at the end of the log was taken for the State on which the commit was planned."""
    insert(stores.shard(), *range(5))
    machine = stores.open().machine(NAME)
    length, planned = machine.refresh().seqno, machine._planned

    def fail_over() -> Shard:
        stores.log.lose(NAME, 2)
        others = Stores(stores.build)
        others.blob, others.log, others.opened = stores.blob, stores.log, 100
        theirs = others.shard()
        while machine._versions.consensus.head(NAME).seqno < length:  # type: ignore[union-attr]
            insert(theirs, 100)
        return theirs

    def interleaved(*arguments: object) -> object:
        commit = planned(*arguments)  # type: ignore[arg-type]
        monkeypatch.undo()
        theirs.append(fail_over())
        with contextlib.suppress(HistoryLost):
            meanwhile(machine)
        return commit

    theirs: list[Shard] = []
    monkeypatch.setattr(machine, "_planned", interleaved)
    with pytest.raises(HistoryLost):
        machine.apply(c.AdvanceUpper(Antichain(1_000)))
    head = stores.log.head(NAME)
    assert head is not None
    assert head.seqno == length, "a commit landed on a history that its process had never read"
    assert ids(theirs[0])
    assert ids(stores.shard()) == ids(theirs[0])


@pytest.mark.parametrize("is_told", [True, False], ids=["was told", "is not told yet"])
def test_a_process_that_read_a_shard_creates_no_other_where_the_whole_log_is_lost(
    stores: Stores, is_told: bool
) -> None:
    """It was refused only after its entry was in the log: so it wrote to the shard that it had lost."""
    client = client_of(stores.open())
    shard = client.create_shard(NAME, SCHEMA, ["id"])
    stores.log.lose(NAME, stores.log._heads[NAME])
    del stores.log._heads[NAME]
    if is_told:
        with pytest.raises(HistoryLost):
            shard.upper()
    for _ in range(2):
        with pytest.raises(HistoryLost):
            client.create_shard(NAME, SCHEMA, ["id"])
        assert stores.log.head(NAME) is None
    insert(stores.shard(), 1)  # who has not read it goes on
