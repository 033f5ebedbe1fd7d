"""Whoever commits merges the newest batches while they are small: readers see no difference, writers no error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest

from blob import BlobUnavailable
from blob.memory_blobs import MemoryBlob
from persist.client.shard import Shard
from persist.commit import background_duties
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.errors import Overloaded
from persist.core.ids import Token, mint, writer_of
from persist.core.record import replace
from persist.core.state import Policy, State
from tests.support.location import client_of, memory_location

SCHEMA = pa.schema([("id", pa.string()), ("amount", pa.int64())])
NAME = "orders"
INLINE_BATCHES = 16
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
    return client_of(location).create_shard(NAME, SCHEMA, ["id"])


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


def test_with_nobody_in_the_background_no_commit_merges_what_others_wrote() -> None:
    """The rows beyond their room go to a blob for each commit, and beyond `batches_max` writers are told to wait."""
    location = memory_location(policy=replace(POLICY, inline_shard_bytes_max=4_000, batches_max=60))
    background = location.background = LateBackground()
    shard, machine = shard_of(location), location.machine(NAME)
    for n in range(60):
        shard.insert([{"id": f"k{n}", "amount": n}])
        assert machine.state().trace.inline_bytes <= 4_000
    assert batches_of(machine.state()) == 60
    assert 0 < machine.metrics.spills < 60
    writer, token = shard.open_writer(), mint(Token, location.ids)
    insert = c.Insert(writer_of(token), token, writer.stage([{"id": "k60", "amount": 60}], None), digest=b"x" * 16)
    with pytest.raises(Overloaded):
        machine.apply(insert)
    background.run()
    machine.apply(insert)
    assert batches_of(machine.state()) < 60
    assert len(contents(shard, 60)) == 61


@pytest.mark.parametrize(("bounds", "batches"), [
    ({}, 2 * INLINE_BATCHES),  # so many inline ones
    ({"inline_shard_bytes_max": 4_000}, 9),  # which leave little of their room
    ({"inline_part_bytes_max": 0}, 2 * INLINE_BATCHES),  # so many in blobs
])  # fmt: skip
def test_writers_wait_a_moment_for_merges_that_are_behind(
    monkeypatch: pytest.MonkeyPatch, bounds: dict[str, int], batches: int
) -> None:
    """Threads share one interpreter: a writer in a loop would leave next to none of it to the background."""
    location = memory_location(policy=replace(POLICY, **bounds))
    background = location.background = LateBackground()
    shard, machine = shard_of(location), location.machine(NAME)
    monkeypatch.setattr(background_duties, "GIVE_WAY_S", 600.0)
    for n in range(batches):
        shard.insert([{"id": "k", "amount": n}])
    late = threading.Thread(target=lambda: shard.insert([{"id": "k", "amount": -1}]))
    late.start()
    late.join(0.2)
    assert late.is_alive()
    assert batches_of(machine.state()) == batches
    background.run()
    late.join()
    assert batches_of(machine.state()) < batches
    assert len(contents(shard, batches)) == batches + 1


def test_a_writer_sees_no_error_while_nothing_can_be_merged() -> None:
    blob = FailingBlob("mem:")
    location = memory_location(blob=blob, policy=POLICY)
    shard, machine = shard_of(location), location.machine(NAME)
    blob.away = True
    for n in range(3 * INLINE_BATCHES):
        shard.insert([{"id": "k", "amount": n}])
    assert machine.metrics.upkeep_failed > 0
    blob.away = False
    shard.insert([{"id": "k", "amount": 99}])
    assert batches_of(machine.state()) < INLINE_BATCHES
    assert len(contents(shard, 3 * INLINE_BATCHES)) == 3 * INLINE_BATCHES + 1


def test_what_a_worker_has_claimed_is_left_to_it(location: Location) -> None:
    shard, machine = shard_of(location), location.machine(NAME)
    for n in range(5):
        shard.insert([{"id": "k", "amount": n}])
    inputs = tuple(part.id for part in machine.state().trace.parts())
    taken = machine.apply(c.HoldClaim("merge:0", "somebody", 60_000, inputs))
    assert isinstance(taken, c.Claimed)
    assert taken.granted
    for n in range(INLINE_BATCHES - 1):
        shard.insert([{"id": "k", "amount": n}])
    assert machine.metrics.flushes == 0
    shard.insert([{"id": "k", "amount": n}])
    assert machine.metrics.flushes == 1
    assert machine.state().trace.covering(frozenset(inputs)) == (0, 5)
