"""The committer: outcomes are known, refusals are never stale, groups are folded, and nothing is lost to a race."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext

import pyarrow as pa
import pytest

from blob.memory_blobs import MemoryBlob
from consensus import ConsensusIndeterminate, Entry
from consensus.advisory_locks import Turn
from consensus.memory_logs import MemoryConsensus
from consensus.metrics import ForwardingConsensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.cached_state import LEASE_STEP_MS_MAX
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.blob_keys import is_rollup_key
from persist.core.errors import Expired, InvalidUsage, UpperMismatch
from persist.core.frontier import Antichain
from persist.core.ids import Token, WriterId, mint
from persist.core.state import Policy
from rpc.concurrency_limits import Work
from rpc.settings import Limits
from tests.support.clocks import World
from tests.support.location import AscendingIds, TestClock, client_of, memory_location
from tests.support.shard import first_write
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.int64())])


class Meddling(ForwardingConsensus):
    """A consensus store whose next compare-and-sets go as the test says."""

    def __init__(self) -> None:
        super().__init__(MemoryConsensus("mem:"))
        self.script: list[Callable[[Callable[[], bool]], bool]] = []
        self.reads = 0

    def head(self, key: str) -> Entry | None:
        self.reads += 1
        return self._inner.head(key)

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        def real() -> bool:
            return self._inner.compare_and_set(key, seqno, data, after)

        return self.script.pop(0)(real) if self.script else real()

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        self.reads += 1
        return self._inner.scan(key, from_seqno, limit)


def happens_but_unknown(real: Callable[[], bool]) -> bool:
    real()
    raise ConsensusIndeterminate("the answer was lost")


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


def contents(shard: Shard) -> list[int]:
    return sorted(shard.snapshot().to_arrow(expand=True).column("id").to_pylist())


@pytest.fixture
def consensus() -> Meddling:
    return Meddling()


@pytest.fixture
def location(consensus: Meddling) -> Location:
    return memory_location(consensus=consensus)


@pytest.fixture
def shard(location: Location) -> Shard:
    return client_of(location).create_shard("orders", SCHEMA, ["id"])


def test_a_refusal_is_never_told_from_a_stale_state(consensus: Meddling, location: Location, shard: Shard) -> None:
    elsewhere = Client(EmbeddedTransport(memory_location(consensus=consensus, blob=location.blob, ids=AscendingIds(1))))
    shard.insert(rows(1))
    writer = elsewhere.shard("orders").open_writer()
    writer.compare_and_append(rows(2), 1, 2)
    shard.compare_and_append(rows(3), 2, 3)
    writer.compare_and_append(rows(4), 3, 4)  # its cached State still has upper 2
    with pytest.raises(UpperMismatch) as refused:
        shard.compare_and_append(rows(5), 3, 5)
    assert refused.value.details["actual"] == [4]
    assert contents(shard) == [1, 2, 3, 4]


def test_sixteen_threads_on_two_servers_lose_no_row(consensus: Meddling, location: Location) -> None:
    other = memory_location(consensus=consensus, blob=location.blob, ids=AscendingIds(1))
    clients = [client_of(place) for place in (location, other)]
    clients[0].create_shard("orders", SCHEMA, ["id"])

    def work(number: int) -> None:
        writer = clients[number % 2].shard("orders").open_writer()
        for step in range(20):
            writer.insert(rows(number * 100 + step))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    expected = sorted(n * 100 + step for n in range(16) for step in range(20))
    assert contents(clients[0].shard("orders")) == expected


def test_rollups_follow_the_log_and_opening_reads_only_what_came_after(consensus: Meddling) -> None:
    location = memory_location(consensus=consensus, policy=Policy(rollup_every=8))
    shard = client_of(location).create_shard("orders", SCHEMA, ["id"])
    for number in range(100):
        shard.insert(rows(number))
    state = location.machine("orders").refresh()
    assert state.seqno - max(state.rollups) <= 9
    fresh = memory_location(consensus=consensus, blob=location.blob)
    consensus.reads = 0
    assert fresh.machine("orders").state() == state
    assert consensus.reads == 3  # the binding, one head, one scan


def test_a_writer_that_was_idle_beyond_its_lease_registers_anew(consensus: Meddling) -> None:
    clock = TestClock()
    location = memory_location(consensus=consensus, clock=clock)
    shard = client_of(location).create_shard("orders", SCHEMA, ["id"])
    idle, busy = shard.open_writer(), shard.open_writer()
    idle.insert(rows(1))
    for number in range(8):
        clock.advance_ms(LEASE_STEP_MS_MAX)
        busy.advance_upper(2 + number)
    busy.insert(rows(2))
    assert set(location.machine("orders").refresh().writers) == {busy.writer_id}
    idle.insert(rows(3))
    assert contents(shard) == [1, 2, 3]


def test_two_creators_of_one_shard_end_with_one_shard(consensus: Meddling, location: Location) -> None:
    consensus.script = [happens_but_unknown]
    first = client_of(location).create_shard("orders", SCHEMA, ["id"])
    other = Client(EmbeddedTransport(memory_location(consensus=consensus, blob=location.blob, ids=AscendingIds(1))))
    second = other.create_shard("orders", SCHEMA, ["id"])
    first.insert(rows(1))
    second.insert(rows(2))
    assert contents(first) == contents(second) == [1, 2]


def test_the_first_write_of_a_handle_is_one_commit(location: Location, shard: Shard) -> None:
    machine = location.machine("orders")
    before = machine.refresh().seqno
    writer = shard.open_writer()
    writer.insert(rows(1))
    assert machine.refresh().seqno == before + 1
    assert list(machine.state().writers) == [writer.writer_id]
    writer.insert(rows(2))
    assert machine.refresh().seqno == before + 2


def test_a_first_write_that_comes_after_its_writer_was_closed_is_refused(location: Location, shard: Shard) -> None:
    """The request was held by a proxy, say: its caller was told that the outcome is not known."""
    machine, writer = location.machine("orders"), shard.open_writer()
    late = c.Insert(writer.writer_id, mint(Token, location.ids), writer.stage_for_one_commit(rows(1), None))
    machine.apply(c.ExpireWriter(writer.writer_id))
    with pytest.raises(Expired):
        machine.apply(late)
    assert shard.count() == 0


@pytest.mark.parametrize("lease_ms", [True, 60_000.0])
def test_a_value_of_a_wrong_type_is_refused_before_it_is_in_the_log(
    location: Location, shard: Shard, lease_ms: int
) -> None:
    """Nobody could read the shard any more."""
    with pytest.raises(InvalidUsage, match="not valid"):
        location.machine("orders").apply(first_write(mint(WriterId, location.ids), lease_ms))
    shard.insert(rows(1))
    assert contents(client_of(location).shard("orders")) == [1]


def test_a_race_whose_loser_is_refused_is_counted() -> None:
    """It was counted only where the loser committed something in the end: 33 races looked like one."""
    world = World()
    winner, loser = world.machine(), world.machine()
    winner.client.create_shard("orders", SCHEMA, ["id"])
    ahead, behind = (machine.client.shard("orders") for machine in (winner, loser))
    behind.upper()
    ahead.compare_and_append([{"id": 1}], 0, 1)
    with pytest.raises(UpperMismatch):
        behind.compare_and_append([{"id": 2}], 0, 1)
    assert loser.location.machine("orders").metrics.races_lost == 1


# --- what was slow: each commit, insert or read below cost more than it had to


def test_a_thousand_moves_of_a_frontier_write_the_state_at_most_once() -> None:
    """They cost 31 PUTs of the whole State."""

    class Counting(MemoryBlob):
        puts = 0

        def put(self, key: str, data: bytes | memoryview) -> None:
            self.puts += is_rollup_key(key)
            super().put(key, data)

    blob = Counting("mem:")
    with closing(memory_location(blob=blob, policy=Policy())) as location:
        shard = client_of(location).create_shard("orders", SCHEMA, ["id"])
        blob.puts = 0
        for upper in range(1, 1_001):
            shard.advance_upper(upper)
        assert blob.puts <= 1


def test_what_comes_in_one_turn_of_the_event_loop_is_committed_together() -> None:
    """A commit began with the first command, and found one or two."""
    with closing(memory_location()) as location, closing(Work(Limits())) as work:
        client_of(location).create_shard("orders", SCHEMA, ["id"])
        machine = location.machine("orders")
        before = machine.metrics.commits

        async def moved() -> list[c.Result]:
            return await asyncio.gather(*(work.apply(machine, c.AdvanceUpper(Antichain(n))) for n in range(1, 9)))

        assert asyncio.run(moved()) == [c.Appended(Antichain(n - 1), Antichain(n)) for n in range(1, 9)]
        assert machine.metrics.commits == before + 1


class Queued(MemoryConsensus):
    """A store that tells everybody who wants to commit that others had their turn before."""

    told = Turn.WAITED

    def turn(self, key: str, wait_s: float) -> AbstractContextManager[Turn]:
        return nullcontext(self.told)


def test_who_waited_for_its_turn_plans_on_what_others_have_committed() -> None:
    """Each process planned on what it knew, and lost. 16 of them got 130 commits a second, one of them two."""
    blob, log = MemoryBlob("mem:"), Queued("mem:")
    with closing(Location(blob, log)) as one, closing(Location(blob, log)) as other:
        first = client_of(one).create_shard("orders", SCHEMA, ["id"])
        second = client_of(other).shard("orders")
        for number in range(20):
            first.insert([{"id": number}])
            second.insert([{"id": number}])
        lost = [location.machine("orders").metrics.races_lost for location in (one, other)]
        assert sum(lost) <= 2, "but for those with upkeep, which commits beside them"
        log.told = Turn.NONE  # nobody relies on turns
        for number in range(20):
            first.insert([{"id": number}])
            second.insert([{"id": number}])
        assert sum(first.snapshot().to_arrow()["__diff"].to_pylist()) == 80
