"""Whoever commits merges the newest batches while they are small: readers see no difference, writers no error."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from blob import BlobUnavailable
from blob.memory_blobs import MemoryBlob
from compactor.embedded import maintain
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.merge_plan import SMALL_ROWS
from persist.core.state import Policy, State
from tests.support.location import memory_location

SCHEMA = pa.schema([("id", pa.string()), ("amount", pa.int64())])
NAME = "orders"
INLINE_BATCHES, INLINE_BATCHES_MAX = 16, 24
POLICY = Policy(inline_batches=INLINE_BATCHES, rollup_every=32)


class LateBackground:
    """Keeps work until it is asked to do it."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None]) -> bool:
        self.waiting.append(work)
        return True

    def run(self) -> None:
        waiting, self.waiting = self.waiting, []
        for work in waiting:
            work()

    def close(self) -> None:
        return


class FailingBlob(MemoryBlob):
    """A store that takes nothing while `away`."""

    away = False

    def put(self, key: str, data: bytes) -> None:
        if self.away:
            raise BlobUnavailable("away")
        super().put(key, data)


@pytest.fixture
def location() -> Iterator[Location]:
    opened = memory_location(policy=POLICY)
    yield opened
    opened.close()


def shard_of(location: Location) -> Shard:
    return Client(EmbeddedTransport(location, maintain)).create_shard(NAME, SCHEMA, ["id"])


def batches_of(state: State) -> int:
    return sum(1 for batch in state.trace.batches if batch.runs)


def contents(shard: Shard, as_of: int) -> list[dict[str, object]]:
    return shard.snapshot(as_of).to_arrow().to_pylist()


def update(shard: Shard, key: str, old: int | None, new: int) -> None:
    retracted = [] if old is None else [{"id": key, "amount": old, "__diff": -1}]
    shard.insert([*retracted, {"id": key, "amount": new, "__diff": 1}])


def test_inline_rows_leave_the_state_when_they_take_a_good_part_of_their_room(location: Location) -> None:
    shard, machine = shard_of(location), location.machine(NAME)
    while machine.metrics.flushes == 0:
        shard.insert([{"id": "x" * 30_000, "amount": 1}])
        assert machine.state().trace.inline_bytes * 4 < 2 * 1024 * 1024
    assert machine.state().trace.inline_bytes == 0


def test_small_batches_stay_few_and_are_rewritten_a_logarithm_of_times(location: Location) -> None:
    shard, machine = shard_of(location), location.machine(NAME)
    for n in range(400):
        shard.insert([{"id": f"k{n % 7}", "amount": n}])
        assert batches_of(machine.state()) <= INLINE_BATCHES + 3 * 4
    assert machine.metrics.flushes <= 400 / INLINE_BATCHES * 1.5, "mostly one merge for as many appends as it takes"
    assert machine.metrics.reliefs == 0
    assert machine.metrics.upkeep_refused == 0
    for as_of in (0, 11, 12, 200, 399):
        assert len(contents(shard, as_of)) == as_of + 1


def test_a_shard_that_is_updated_for_ever_stays_at_its_live_size(location: Location) -> None:
    shard, machine = shard_of(location), location.machine(NAME)
    for n in range(200):
        key = n % 20
        update(shard, f"k{key}", n - 20 if n >= 20 else None, n)
        if n >= 20:
            shard.downgrade_since(n)
            assert machine.state().trace.rows <= 3 * 20
    assert [row["amount"] for row in contents(shard, 199)] == sorted(range(180, 200), key=lambda n: f"k{n % 20}")


def test_with_nobody_in_the_background_a_commit_merges_itself() -> None:
    location = memory_location(policy=POLICY)
    location.background = LateBackground()
    shard, machine = shard_of(location), location.machine(NAME)
    for n in range(3 * INLINE_BATCHES_MAX):
        update(shard, f"k{n % 5}", n - 5 if n >= 5 else None, n)
        newest = machine.state().trace.batches[-INLINE_BATCHES_MAX - 1 :]
        assert (
            not all(part.is_inline for batch in newest for part in batch.parts()) or len(newest) <= INLINE_BATCHES_MAX
        )
    assert machine.metrics.reliefs > 0
    last = range(3 * INLINE_BATCHES_MAX - 5, 3 * INLINE_BATCHES_MAX)
    assert [row["amount"] for row in contents(shard, last[-1])] == sorted(last, key=lambda n: n % 5)


def test_while_a_merge_takes_its_time_what_comes_after_it_is_merged_by_the_commits() -> None:
    location = memory_location(policy=POLICY)
    location.background = LateBackground()
    shard, machine = shard_of(location), location.machine(NAME)
    sizes = [SMALL_ROWS + 1] * 14 + [20_000] * 3 + [4_000] * 3  # large ones, and small ones that are not due
    for rows in sizes:
        shard.insert(pa.table({"id": [f"k{row}" for row in range(rows)], "amount": [0] * rows}))
    for n in range(100):
        shard.insert([{"id": "k", "amount": n}])
        assert batches_of(machine.state()) <= 40
    assert machine.state().trace.rows == sum(sizes) + 100


def test_a_commit_leaves_a_merge_under_way_to_the_background() -> None:
    """Else the one in the background would be refused, and what it wrote would lie about as an orphan."""
    location, background = memory_location(policy=POLICY), LateBackground()
    location.background = background
    shard, machine = shard_of(location), location.machine(NAME)
    for n in range(INLINE_BATCHES_MAX + 1):
        shard.insert([{"id": "k", "amount": n}])
    assert machine.metrics.reliefs == 1
    background.run()
    assert machine.metrics.flushes == 1, "both are applied: they have no part in common"
    assert machine.metrics.upkeep_refused == 0
    assert len(contents(shard, INLINE_BATCHES_MAX)) == INLINE_BATCHES_MAX + 1


def test_a_writer_sees_no_error_while_nothing_can_be_merged() -> None:
    blob = FailingBlob("mem:")
    location = memory_location(blob=blob, policy=POLICY)
    shard, machine = shard_of(location), location.machine(NAME)
    blob.away = True
    for n in range(2 * INLINE_BATCHES_MAX):
        shard.insert([{"id": "k", "amount": n}])
    assert machine.metrics.upkeep_failed > 0
    blob.away = False
    shard.insert([{"id": "k", "amount": 99}])
    assert batches_of(machine.state()) < INLINE_BATCHES
    assert len(contents(shard, 2 * INLINE_BATCHES_MAX)) == 2 * INLINE_BATCHES_MAX + 1


def test_what_a_worker_has_claimed_is_left_to_it(location: Location) -> None:
    shard, machine = shard_of(location), location.machine(NAME)
    for n in range(5):
        shard.insert([{"id": "k", "amount": n}])
    inputs = tuple(part.id for part in machine.state().trace.parts())
    taken = machine.apply(c.TakeClaim("merge:0", "somebody", 60_000, inputs))
    assert isinstance(taken, c.Claimed)
    assert taken.granted
    for n in range(INLINE_BATCHES - 1):
        shard.insert([{"id": "k", "amount": n}])
    assert machine.metrics.flushes == 0
    shard.insert([{"id": "k", "amount": n}])
    assert machine.metrics.flushes == 1
    assert machine.state().trace.covering(frozenset(inputs)) == (0, 5)
