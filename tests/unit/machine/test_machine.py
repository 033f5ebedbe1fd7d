"""The committer: outcomes are known, refusals are never stale, groups are folded, and nothing is lost to a race."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pyarrow as pa
import pytest

from blob import BlobUnavailable
from blob.memory_blobs import MemoryBlob
from blob.metrics import ForwardingBlob
from compactor.embedded import maintain
from consensus import ConsensusIndeterminate, ConsensusUnavailable, Entry
from consensus.memory_logs import MemoryConsensus
from consensus.metrics import ForwardingConsensus
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.cached_state import LEASE_STEP_MS_MAX
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.errors import Indeterminate, InvalidUsage, Unavailable, UnknownShard, UpperMismatch
from persist.core.frontier import Antichain
from persist.core.ids import Token, WriterId, mint
from persist.core.state import Policy
from tests.support.location import AscendingIds, TestClock, memory_location
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


class Busy:
    """A background that drops all work until told otherwise."""

    def __init__(self) -> None:
        self.busy = True

    def submit(self, work: Callable[[], None]) -> bool:
        if not self.busy:
            work()
        return not self.busy

    def close(self) -> None:
        return


def happens_but_unknown(real: Callable[[], bool]) -> bool:
    real()
    raise ConsensusIndeterminate("the answer was lost")


def does_not_happen_but_unknown(real: Callable[[], bool]) -> bool:
    raise ConsensusIndeterminate("the request was lost")


def does_not_happen(real: Callable[[], bool]) -> bool:
    raise ConsensusUnavailable("nobody answers")


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
    return Client(EmbeddedTransport(location, maintain)).create_shard("orders", SCHEMA, ["id"])


@pytest.mark.parametrize("fault", [happens_but_unknown, does_not_happen_but_unknown, does_not_happen])
def test_a_write_happens_once_whatever_becomes_of_the_answer(consensus: Meddling, shard: Shard, fault: object) -> None:
    shard.insert(rows(1))
    consensus.script = [fault] * 3  # type: ignore[list-item]
    assert shard.insert(rows(2)) == c.Appended(Antichain(1), Antichain(2))
    assert contents(shard) == [1, 2]


def test_a_compare_and_append_that_landed_unknown_does_not_conflict_with_itself(
    consensus: Meddling, shard: Shard
) -> None:
    writer = shard.open_writer()
    writer.advance_upper(3)
    writer.insert(rows(0))
    consensus.script = [happens_but_unknown]
    assert writer.compare_and_append(rows(1), 4, 6).upper == Antichain(6)
    assert contents(shard) == [0, 1]


def test_the_outcome_stays_unknown_only_when_the_store_stays_away(consensus: Meddling, location: Location) -> None:
    shard = Client(EmbeddedTransport(location, maintain)).create_shard("orders", SCHEMA, ["id"])
    machine = location.machine("orders")
    writer, token = WriterId("w" + "0" * 32), Token("i" + "9" * 32)
    machine.apply(c.RegisterWriter(writer, 3_600_000))
    runs = shard.open_writer().stage(rows(7), None)
    consensus.script = [happens_but_unknown] + [does_not_happen] * 1000
    with pytest.raises(Indeterminate):
        machine.apply(c.Insert(writer, token, runs))
    consensus.script = []
    # The same token, through another machine: the answer is that of the first try, and nothing happens twice.
    other = memory_location(consensus=consensus, blob=location.blob, ids=AscendingIds(1)).machine("orders")
    assert other.apply(c.Insert(writer, token, runs)) == c.Appended(Antichain(0), Antichain(1))
    assert contents(shard) == [7]


def test_a_store_that_is_away_makes_the_write_definitely_not_happen(consensus: Meddling, shard: Shard) -> None:
    shard.insert(rows(1))
    consensus.script = [does_not_happen] * 1000
    with pytest.raises(Unavailable):
        shard.insert(rows(2))
    consensus.script = []
    assert contents(shard) == [1]


def test_an_older_token_of_a_writer_is_a_late_duplicate_and_is_refused(location: Location, shard: Shard) -> None:
    machine = location.machine("orders")
    writer = WriterId("w" + "0" * 32)
    machine.apply(c.RegisterWriter(writer, 3_600_000))
    runs = shard.open_writer().stage(rows(1), None)
    machine.apply(c.Insert(writer, Token("i" + "5" * 32), runs))
    with pytest.raises(InvalidUsage, match="tokens ascend"):
        machine.apply(c.Insert(writer, Token("i" + "4" * 32), runs))
    assert contents(shard) == [1]


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


def test_inserts_that_arrive_together_share_one_time_and_one_commit(consensus: Meddling, location: Location) -> None:
    shard = Client(EmbeddedTransport(location, maintain)).create_shard("orders", SCHEMA, ["id"])
    machine, staging = location.machine("orders"), shard.open_writer()
    writers = [WriterId(f"w{number:032x}") for number in range(8)]
    for writer in writers:
        machine.apply(c.RegisterWriter(writer, 60_000))
    commands = [
        c.Insert(writer, mint(Token, location.ids), staging.stage_for_one_commit(rows(n), None))
        for n, writer in enumerate(writers)
    ]
    before = machine.refresh().seqno
    results: list[object] = []

    def meanwhile(real: Callable[[], bool]) -> bool:
        for command in commands[1:]:
            machine.submit(command, lambda lead: lead(), results.append)
        return real()

    consensus.script = [meanwhile]
    assert machine.apply(commands[0]) == c.Appended(Antichain(0), Antichain(1))
    assert results == [c.Appended(Antichain(1), Antichain(2))] * 7
    assert machine.refresh().seqno == before + 2  # the first alone, then the seven that waited for it
    assert contents(shard) == list(range(8))


def test_sixteen_threads_on_two_servers_lose_no_row(consensus: Meddling, location: Location) -> None:
    other = memory_location(consensus=consensus, blob=location.blob, ids=AscendingIds(1))
    clients = [Client(EmbeddedTransport(place, maintain)) for place in (location, other)]
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


def test_inline_rows_beyond_the_budget_go_to_the_blob_store(consensus: Meddling) -> None:
    policy = Policy(inline_part_bytes_max=4096, inline_shard_bytes_max=6000)
    location = memory_location(consensus=consensus, policy=policy)
    location.background = Busy()
    shard = Client(EmbeddedTransport(location, maintain)).create_shard("orders", SCHEMA, ["id"])
    for first in range(0, 1000, 100):
        shard.insert(rows(*range(first, first + 100)))
    state = location.machine("orders").refresh()
    assert state.trace.inline_bytes <= 6000
    assert any(part.key is not None for part in state.trace.parts())
    assert contents(shard) == list(range(1000))


def test_rollups_follow_the_log_and_opening_reads_only_what_came_after(consensus: Meddling) -> None:
    location = memory_location(consensus=consensus, policy=Policy(rollup_every=8))
    shard = Client(EmbeddedTransport(location, maintain)).create_shard("orders", SCHEMA, ["id"])
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
    shard = Client(EmbeddedTransport(location, maintain)).create_shard("orders", SCHEMA, ["id"])
    idle, busy = shard.open_writer(), shard.open_writer()
    idle.insert(rows(1))
    for number in range(8):
        clock.advance_ms(LEASE_STEP_MS_MAX)
        busy.advance_upper(2 + number)
    busy.insert(rows(2))
    assert set(location.machine("orders").refresh().writers) == {busy.writer_id}
    idle.insert(rows(3))
    assert contents(shard) == [1, 2, 3]


def test_a_retry_whose_writer_is_gone_does_not_write_twice(location: Location, shard: Shard) -> None:
    writer = shard.open_writer()
    token = mint(Token, location.ids)
    first = writer.insert(rows(1), token=token)
    location.machine("orders").apply(c.ExpireWriter(writer.writer_id))
    assert writer.insert(rows(1), token=token) == first
    assert contents(shard) == [1]


def test_an_unknown_shard_is_told_in_one_sentence(location: Location) -> None:
    with pytest.raises(UnknownShard, match="there is no shard 'nothing' here; create it first"):
        Client(EmbeddedTransport(location, maintain)).shard("nothing")


def test_two_creators_of_one_shard_end_with_one_shard(consensus: Meddling, location: Location) -> None:
    consensus.script = [happens_but_unknown]
    first = Client(EmbeddedTransport(location, maintain)).create_shard("orders", SCHEMA, ["id"])
    other = Client(EmbeddedTransport(memory_location(consensus=consensus, blob=location.blob, ids=AscendingIds(1))))
    second = other.create_shard("orders", SCHEMA, ["id"])
    first.insert(rows(1))
    second.insert(rows(2))
    assert contents(first) == contents(second) == [1, 2]


def test_a_rollup_that_nobody_had_time_for_is_asked_for_again(consensus: Meddling) -> None:
    location = memory_location(consensus=consensus, policy=Policy(rollup_every=8))
    location.background = busy = Busy()
    shard = Client(EmbeddedTransport(location, maintain)).create_shard("orders", SCHEMA, ["id"])
    for number in range(20):
        shard.insert(rows(number))
    assert list(location.machine("orders").refresh().rollups) == [1]
    busy.busy = False
    shard.insert(rows(20))
    assert max(location.machine("orders").refresh().rollups) > 20


def test_a_group_that_does_not_fit_costs_one_blob_and_not_one_for_each_command(consensus: Meddling) -> None:
    policy = Policy(inline_part_bytes_max=4096, inline_shard_bytes_max=20_000)
    location = memory_location(consensus=consensus, policy=policy)
    location.background = Busy()
    shard = Client(EmbeddedTransport(location, maintain)).create_shard("orders", SCHEMA, ["id"])
    for first in range(0, 4000, 100):
        shard.insert(rows(*range(first, first + 100)))
    state = location.machine("orders").refresh()
    assert location.machine("orders").metrics.spills == 0
    assert state.trace.inline_bytes <= 20_000
    assert 1 <= sum(part.key is not None for part in state.trace.parts()) <= 5
    assert contents(shard) == list(range(4000))


def test_a_group_with_many_inline_rows_leaves_one_blob_in_its_own_commit(consensus: Meddling) -> None:
    policy = Policy(inline_part_bytes_max=4096, inline_shard_bytes_max=20_000)
    location = memory_location(consensus=consensus, policy=policy)
    shard = Client(EmbeddedTransport(location, maintain)).create_shard("orders", SCHEMA, ["id"])
    machine = location.machine("orders")
    leads: list[Callable[[], None]] = []
    answers: list[object] = []
    writers = [WriterId(f"w{number:032x}") for number in range(10)]
    for writer in writers:
        machine.apply(c.RegisterWriter(writer, 60_000))
    for number, writer in enumerate(writers):
        runs = shard.open_writer().stage_for_one_commit(rows(*range(100 * number, 100 * number + 100)), None)
        command = c.Insert(writer, Token(f"i1{number:031x}"), runs)
        machine.submit(command, leads.append, answers.append)
    before = machine.state()
    leads[0]()
    state = machine.state()
    assert answers == [c.Appended(Antichain(0), Antichain(1))] * 10
    assert (state.seqno, machine.metrics.spills) == (before.seqno + 1, 0)
    assert [part.is_inline for part in state.trace.parts()] == [False]
    assert contents(shard) == list(range(1000))


class FullBlob(ForwardingBlob):
    """A blob store that takes nothing while it is full."""

    full = False

    def put(self, key: str, data: bytes | memoryview) -> None:
        if self.full:
            raise BlobUnavailable("no space left")
        super().put(key, data)


def test_rows_that_find_room_nowhere_are_refused_and_cost_nothing_that_is_there(consensus: Meddling) -> None:
    blob = FullBlob(MemoryBlob("mem:"))
    policy = Policy(inline_part_bytes_max=4096, inline_shard_bytes_max=6000)
    location = memory_location(blob=blob, consensus=consensus, policy=policy)
    location.background = Busy()
    shard = Client(EmbeddedTransport(location, maintain)).create_shard("orders", SCHEMA, ["id"])
    machine = location.machine("orders")
    writer = WriterId("w" + "0" * 32)
    machine.apply(c.RegisterWriter(writer, 60_000))
    commands = [
        c.Insert(
            writer,
            Token(f"i1{n:031x}"),
            shard.open_writer().stage_for_one_commit(rows(*range(100 * n, 100 * n + 100)), None),
        )
        for n in range(3)
    ]
    blob.full = True
    machine.apply(commands[0])
    machine.apply(commands[1])
    with pytest.raises(Unavailable):
        machine.apply(commands[2])
    blob.full = False
    machine.apply(commands[2])
    assert contents(shard) == list(range(300))


@pytest.mark.parametrize("lease_ms", [True, 60_000.0])
def test_a_value_of_a_wrong_type_is_refused_before_it_is_in_the_log(
    location: Location, shard: Shard, lease_ms: int
) -> None:
    """Nobody could read the shard any more."""
    with pytest.raises(InvalidUsage, match="a value of a wrong type; nothing was written"):
        location.machine("orders").apply(c.RegisterWriter(mint(WriterId, location.ids), lease_ms))
    shard.insert(rows(1))
    assert contents(Client(EmbeddedTransport(location, maintain)).shard("orders")) == [1]
