"""Whatever is written, merged, collected, forgotten, tagged and untagged: each readable time reads as a dict says.

Readable are the times from since on, those of tags, and those that a reader of a tag holds still.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compactor.engine import Chunk, Keep, LocalEngine, MergeJob
from compactor.worker import Worker
from persist.client.snapshot import Snapshot
from persist.core.errors import NotReadable
from persist.core.merge_plan import plan
from persist.core.state import kept_below
from persist.parts import ALL_KEYS, PartReader, current_schema, sound_schemas
from persist.parts.consolidate import Times
from tests.property.test_model import KEYS, TINY, UPDATES, Played
from tests.support.examples import examples
from tests.support.maintained import NAME, Row, World

# Most steps tag a time that since passes at once, so that merges have something to keep.
TAG_STEPS = st.one_of(
    st.tuples(st.just("append"), UPDATES),
    st.tuples(st.just("retract"), st.integers(1, 4)),
    st.tuples(st.just("pass_by"), st.integers(0, 4)),
    st.tuples(st.just("pass_by"), st.integers(0, 4)),
    st.tuples(st.just("untag"), st.integers(0, 9)),
    st.tuples(st.just("open"), st.integers(0, 9)),
    st.tuples(st.just("merge"), st.booleans()),
    st.tuples(st.just("merge_while"), st.lists(st.integers(0, 14), max_size=4)),
    st.tuples(st.sampled_from(["collect", "reopen", "rest"]), st.none()),
)


class Interrupted:
    """An engine that does something else before every chunk that it hands out."""

    def __init__(self, world: World, meanwhile: Callable[[], None]) -> None:
        self._inner = LocalEngine(world.blob, world.user.ids, TINY.engine)
        self._meanwhile = meanwhile

    def merge(self, job: MergeJob, keep: Keep) -> Iterator[Chunk]:
        for chunk in self._inner.merge(job, keep):
            self._meanwhile()
            keep()
            yield chunk


class Tagged(Played):
    def __init__(self, inline: bool) -> None:
        super().__init__(inline)
        self.tags: dict[str, int] = {}
        self.held: list[tuple[Snapshot, int]] = []
        self.made = 0

    def readable(self) -> list[int]:
        return sorted({*range(self.since, self.upper), *self.tags.values()})

    def tag(self, number: int) -> None:
        """Any time that is readable can be tagged; most often one that since will pass soon."""
        if times := self.readable():
            self.made += 1
            name, time = f"t{self.made}", times[min(number, len(times) - 1)]
            assert self.world.shard.tag(name, time).time == time
            self.tags[name] = time

    def pass_by(self, number: int) -> None:
        """Tag a time that is not passed yet, and move since beyond it."""
        self.tag(len(self.readable()) - (self.upper - self.since) + number)
        self.forget(number + 1)

    def untag(self, number: int) -> None:
        if self.tags:
            name = sorted(self.tags)[number % len(self.tags)]
            assert self.world.shard.untag(name)
            del self.tags[name]

    def open(self, number: int) -> None:
        """A snapshot of a tag, which is read in the end, when the tag may be gone."""
        if self.tags:
            name = sorted(self.tags)[number % len(self.tags)]
            self.held.append((self.world.shard.snapshot(tag=name, num_splits=2), self.tags[name]))

    def merge_while(self, numbers: list[int]) -> None:
        """Tags come and go, and since moves, while a worker merges."""
        left = list(numbers)

        def meanwhile() -> None:
            if left:
                number = left.pop()
                (self.tag, self.untag, self.forget, self.pass_by, self.pass_by)[number % 5](number // 5)

        Worker(self.world.process(), TINY, engine=Interrupted(self.world, meanwhile)).run(NAME, idle=True, merges_max=2)

    def rest(self, _: None) -> None:
        for snapshot, _ in self.held:
            snapshot.close()
        self.held.clear()
        super().rest(None)

    def check(self) -> None:
        super().check()
        fresh = self.world.process()
        for name, time in self.tags.items():
            assert self.world.contents(time, fresh) == self.world.expected(time), f"as of tag {name} at {time}"
        for snapshot, time in self.held:
            with snapshot:
                found = [row for table in snapshot.batches() for row in table.to_pylist()]
            assert {(row["k"], row["v"]): row["__diff"] for row in found} == self.world.expected(time)
        kept = {*self.tags.values(), *(time for _, time in self.held)}
        for time in [time for time in range(self.since) if time not in kept][:3]:
            with pytest.raises(NotReadable, match="its history was forgotten"):
                self.world.shard.snapshot(time)


@examples(2)
@given(st.booleans(), st.lists(TAG_STEPS, min_size=4, max_size=12))
def test_every_readable_time_and_every_tag_reads_as_the_model_says(
    inline: bool, steps: list[tuple[str, object]]
) -> None:
    played = Tagged(inline)
    for values in (0, 1):
        played.append([(key, values, offset, 1) for offset, key in enumerate(KEYS[:3])])
    for step, argument in steps:
        played.play(step, argument)
    played.merge(idle=True)
    played.check()


# --- what a merge does to times


@examples(20)
@given(st.lists(st.integers(0, 30)), st.integers(0, 30), st.frozensets(st.integers(0, 30)), st.integers(0, 35))
def test_a_time_goes_to_the_least_kept_time_at_or_beyond_it(
    times: list[int], since: int, points: frozenset[int], readable: int
) -> None:
    kept = tuple(sorted(point for point in points if point < since))
    moves = Times(advance=since, kept=kept)
    wanted = [t if t >= since else min((p for p in kept if p >= t), default=since) for t in times]
    assert [moves.moved(time) for time in times] == wanted
    assert moves.all_moved(np.array(times, np.int64)).tolist() == wanted
    if readable >= since or readable in kept:
        assert [t <= readable for t in times] == [t <= readable for t in wanted]


# --- what a tag costs


def merged_rows(world: World) -> int:
    """Rows that are kept once maintenance has nothing left to do, with every batch merged into one."""
    world.settle()
    state = world.state()
    _, schema = current_schema(state.schemas)
    runs = [run for batch in state.trace.batches for run in batch.runs]
    reader = PartReader(world.blob, sound_schemas(state.schemas), schema)
    since = state.since.element
    assert since is not None
    return sum(len(t) for t in reader.read_merged(runs, since, kept_below(state, state.since), ALL_KEYS))


def wanted_rows(rows: list[Row], since: int, kept: list[int]) -> int:
    """One for each key, value and kept time at which something of them changed."""
    sums: Counter[tuple[str, int, int]] = Counter()
    for key, value, time, diff in rows:
        sums[key, value, min((p for p in [*kept, since] if p >= time), default=time)] += diff
    return sum(1 for total in sums.values() if total)


def updated(keys: int, rounds: int, changed: int) -> World:
    """`rounds` times, `changed` of the keys get a new value."""
    world = World()
    world.append([(f"k{n:03}", 0, 0, 1) for n in range(keys)], 1)
    for time in range(1, rounds):
        old = [(f"k{n:03}", time - 1 if n < changed else 0, time, -1) for n in range(changed)]
        world.append(old + [(f"k{n:03}", time, time, 1) for n in range(changed)], time + 1)
    return world


def test_a_tag_costs_what_changed_and_not_a_copy() -> None:
    world = updated(keys=200, rounds=60, changed=3)
    for time in (9, 19, 29, 39, 49):
        world.shard.tag(f"t{time}", time)
    world.forget_before(59)
    found = merged_rows(world)
    assert found == wanted_rows(world.rows, 59, [9, 19, 29, 39, 49]) == 200 + 5 * 2 * 3
    for time in (9, 29, 59):
        assert world.contents(time) == world.expected(time)


def test_a_tag_that_goes_gives_its_rows_back() -> None:
    world = updated(keys=20, rounds=40, changed=20)
    for time in range(5, 35, 5):
        world.shard.tag(f"t{time}", time)
    world.forget_before(39)
    assert merged_rows(world) == 20 + 6 * 2 * 20
    for time in range(5, 35, 5):
        world.shard.untag(f"t{time}")
    assert merged_rows(world) == 20


def test_a_large_batch_is_merged_anew_when_half_of_its_tags_are_gone() -> None:
    """It would keep their rows until it is merged with others, which may be never."""
    world = updated(keys=20, rounds=40, changed=20)
    for time in (10, 20, 30):
        world.shard.tag(f"t{time}", time)
    world.forget_before(39)
    world.settle()
    [batch] = [batch for batch in world.state().trace.batches if batch.runs]
    assert batch.desc.kept == (10, 20, 30)
    assert batch.rows == 20 + 3 * 40
    policy = replace(TINY.policy, small_rows=0)

    def due() -> int:
        return len(plan(world.state(), policy, now_ms=0))

    assert due() == 0
    world.shard.untag("t10")
    assert due() == 0
    world.shard.untag("t30")
    assert due() == 1
    world.worker(settings=replace(TINY, policy=policy)).run(NAME)
    assert world.state().trace.rows == 20 + 40
    assert due() == 0
    assert world.contents(20) == world.expected(20)
