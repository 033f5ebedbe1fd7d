"""A clock that may settle instants: the blob store agreed with it, and nobody has set it since."""

from __future__ import annotations

import pytest

from blob.errors import BlobUnavailable
from blob.memory_blobs import MemoryBlob
from persist.commit.clocks_and_ids import COMPARED_EVERY_S, OFFSET_MS_MAX, CheckedClock, checked_ms
from tests.support.clocks import HOUR_MS, Clock, Ids, World


class SettingBlob(MemoryBlob):
    """While something is put, the clock of the machine is set by so much."""

    def __init__(self, world: World) -> None:
        super().__init__("mem:", now_ms=lambda: world.true_ms)
        self.clock, self.set_ms = Clock(world, 0), 0

    def put(self, key: str, data: bytes | memoryview) -> None:
        super().put(key, data)
        self.clock.off_ms += self.set_ms


class SlowBlob(MemoryBlob):
    """Who puts something is stopped for so long before, or after, it is there."""

    def __init__(self, world: World, before_ms: int = 0, after_ms: int = 0) -> None:
        super().__init__("mem:", now_ms=lambda: world.true_ms)
        self._world, self._before_ms, self._after_ms = world, before_ms, after_ms

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._world.pass_ms(self._before_ms)
        super().put(key, data)
        self._world.pass_ms(self._after_ms)


class FailingBlob(MemoryBlob):
    """Nothing can be put."""

    def __init__(self, world: World) -> None:
        super().__init__("mem:", now_ms=lambda: world.true_ms)
        self.puts = 0

    def put(self, key: str, data: bytes | memoryview) -> None:
        self.puts += 1
        raise BlobUnavailable("down")


def agrees(world: World, off_ms: int, blob: SlowBlob) -> bool:
    clock = Clock(world, off_ms)
    checked = CheckedClock(blob, clock, Ids(clock, 1))
    checked.compare()
    return checked.agrees(clock.now_ms())


@pytest.mark.parametrize(
    ("off_ms", "counts"),
    [(0, True), (OFFSET_MS_MAX, True), (-OFFSET_MS_MAX, True), (OFFSET_MS_MAX + 1, False), (-OFFSET_MS_MAX - 1, False)],
)
def test_a_clock_counts_while_the_blob_store_agrees_with_it(off_ms: int, counts: bool) -> None:
    world = World()
    assert agrees(world, off_ms, SlowBlob(world)) is counts


def test_a_clock_that_is_an_hour_off_does_not_count_because_its_process_was_stopped_for_an_hour() -> None:
    world = World()
    assert not agrees(world, HOUR_MS, SlowBlob(world, before_ms=HOUR_MS))
    assert not agrees(world, -HOUR_MS, SlowBlob(world, after_ms=HOUR_MS))
    assert agrees(world, 0, SlowBlob(world, before_ms=4_000, after_ms=4_000))


@pytest.mark.parametrize(("off_ms", "set_ms"), [(HOUR_MS, -HOUR_MS), (-HOUR_MS, HOUR_MS), (0, HOUR_MS), (0, -HOUR_MS)])
def test_a_clock_that_is_set_while_it_is_compared_does_not_count_until_the_next_time(off_ms: int, set_ms: int) -> None:
    blob = SettingBlob(world := World())
    blob.clock.off_ms, blob.set_ms = off_ms, set_ms
    checked = CheckedClock(blob, blob.clock, Ids(Clock(world, 0), 1))
    read_ms = blob.clock.now_ms()
    checked.compare()
    assert not checked.agrees(read_ms)
    assert not checked.agrees(blob.clock.now_ms())
    blob.clock.off_ms, blob.set_ms = 0, 0
    checked.compare()
    assert checked.agrees(blob.clock.now_ms())


def test_a_clock_that_was_set_does_not_count_until_it_is_compared_again() -> None:
    world = World()
    clock = Clock(world, 0)
    checked = CheckedClock(SlowBlob(world), clock, Ids(clock, 1))
    assert checked.begins()
    checked.compare()
    world.pass_ms(60_000)
    assert checked.agrees(clock.now_ms())
    assert not checked.begins()
    clock.off_ms = 5_000
    assert not checked.agrees(clock.now_ms())
    assert checked.begins()
    checked.compare()
    assert checked.agrees(clock.now_ms())
    world.pass_ms(int(COMPARED_EVERY_S * 1000))
    assert checked.begins()


def test_the_first_commits_of_two_shards_both_wait_for_a_comparison() -> None:
    world = World()
    clock = Clock(world, 0)
    checked = CheckedClock(SlowBlob(world), clock, Ids(clock, 1))
    assert checked.begins()  # a commit of another shard, which is about to compare
    assert checked_ms(checked, now_ms := clock.now_ms()) == now_ms


def test_a_failed_comparison_is_not_repeated_by_each_commit() -> None:
    world = World()
    clock, blob = Clock(world, 0), FailingBlob(world)
    checked = CheckedClock(blob, clock, Ids(clock, 1))
    for _ in range(5):
        assert checked_ms(checked, clock.now_ms()) is None
    assert blob.puts == 1
