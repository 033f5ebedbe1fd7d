"""Whatever is written, merged, collected, forgotten and reopened: contents and their changes are as plain dicts say.

The real stack over memory stores: appends of all kinds, inline and in blobs, retractions, downgrades of since, the
compaction worker, the collector, the sweep, processes that start anew, and restores.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from unittest.mock import patch

from hypothesis import example, given
from hypothesis import strategies as st

from compactor.engine import EngineSettings
from persist.client.contents_diff import Changes
from persist.core import merge_plan
from persist.core.merge_plan import MergePolicy
from persist.core.state import Policy
from tests.support.examples import examples
from tests.support.maintained import LEASE_MS, NAME, SCHEMA, WORKER, Row, World

KEYS = [f"k{n}" for n in range(4)]

# (key, value, time offset, diff); few keys and values, so that much cancels and much is retracted.
UPDATES = st.lists(
    st.tuples(st.sampled_from(KEYS), st.integers(0, 1), st.integers(0, 2), st.sampled_from([1, 1, 2, -1])), max_size=6
)
STEPS = st.one_of(
    st.tuples(st.just("append"), UPDATES),
    st.tuples(st.just("append"), UPDATES),
    st.tuples(st.just("retract"), st.integers(1, 4)),
    st.tuples(st.just("advance"), st.integers(1, 3)),
    st.tuples(st.just("insert"), UPDATES),
    st.tuples(st.just("forget"), st.integers(0, 9)),
    st.tuples(st.just("merge"), st.booleans()),
    st.tuples(st.just("collect"), st.none()),
    st.tuples(st.just("reopen"), st.none()),
    st.tuples(st.just("rest"), st.none()),
)
TINY = replace(
    WORKER,
    policy=MergePolicy(fan_in=2, batches_soft=3),
    engine=EngineSettings(memory_bytes=100_000, part_bytes_target=1_000),
)


class Played:
    """A world whose steps keep the dict in step."""

    def __init__(self, inline: bool) -> None:
        bytes_max = 64 * 1024 if inline else 0
        self.world = World(
            policy=Policy(
                inline_part_bytes_max=bytes_max, inline_shard_bytes_max=4_000, rollup_every=8, inline_batches=16
            )
        )
        self.upper = 0
        self.since = 0

    def play(self, step: str, argument: object) -> None:
        getattr(self, step)(argument)

    def append(self, updates: list[Row]) -> None:
        rows = [(key, value, self.upper + offset, diff) for key, value, offset, diff in updates]
        self.upper += 3
        self.world.append(rows, self.upper)

    def retract(self, count: int) -> None:
        """Take back some of what is there, so that multiplicities return to zero."""
        held = self.world.expected(self.upper)
        rows = [(key, value, self.upper, -diff) for (key, value), diff in sorted(held.items())[:count]]
        self.upper += 1
        self.world.append(rows, self.upper)

    def insert(self, updates: list[Row]) -> None:
        if not updates:
            return
        done = self.world.shard.insert([{"k": k, "v": v, "__diff": d} for k, v, _, d in updates])
        assert done.lower.element == self.upper
        if done.upper == done.lower:  # rows that cancel out before they are written take no time
            assert not any(_sums(updates).values())
            return
        self.world.rows += [(key, value, self.upper, diff) for key, value, _, diff in updates]
        self.upper += 1

    def advance(self, by: int) -> None:
        self.upper += by
        self.world.shard.advance_upper(self.upper)

    def forget(self, by: int) -> None:
        self.since = max(self.since, min(self.since + by, self.upper - 1))
        self.world.forget_before(self.since)

    def merge(self, idle: bool) -> None:
        with patch.object(merge_plan, "INLINE_FLUSH_BYTES", 2_000):
            self.world.worker(settings=TINY).run(NAME, idle=idle)

    def collect(self, _: None) -> None:
        self.world.collector().run(NAME)

    def reopen(self, _: None) -> None:
        self.world.reopen()

    def rest(self, _: None) -> None:
        self.world.clock.advance_ms(20 * LEASE_MS)
        self.world.sweeper().sweep(NAME)

    def check(self) -> None:
        state = self.world.state()
        assert (state.upper.element, state.since.element) == (self.upper, self.since)
        self.world.check_stores()
        fresh = self.world.process()
        for as_of in range(self.since, self.upper):
            assert self.world.contents(as_of, fresh) == self.world.expected(as_of), f"as of {as_of}"


def _sums(updates: list[Row]) -> Counter[tuple[str, int]]:
    sums: Counter[tuple[str, int]] = Counter()
    for key, value, _, diff in updates:
        sums[key, value] += diff
    return sums


Contents = Counter[tuple[str, int]]


def difference(later: Contents, earlier: Contents) -> Contents:
    found = Counter(later)
    found.subtract(earlier)
    return Counter({row: count for row, count in found.items() if count})


def shown(changes: Changes) -> Contents:
    """The rows of the changes, each of which comes once and has its place in the order."""
    table = changes.to_arrow()
    rows = [(row["k"], row["v"], row["__diff"]) for row in table.to_pylist()]
    assert [row[:2] for row in rows] == sorted({row[:2] for row in rows})
    return Counter({(key, value): diff for key, value, diff in rows})


@examples(1, of_a_proof=60)
@given(st.booleans(), st.lists(STEPS, min_size=1, max_size=10), st.integers(1, 3), st.data())
def test_changes_are_the_difference_of_the_contents(
    inline: bool, steps: list[tuple[str, object]], splits: int, data: st.DataObject
) -> None:
    played = Played(inline)
    for step, argument in steps:
        played.play(step, argument)
    world, last = played.world, played.upper - 1
    if last < 0:
        return
    times = st.integers(played.since, last)
    for start, end in [(played.since, last), *data.draw(st.lists(st.tuples(times, times), max_size=4))]:
        found = shown(world.shard.changes(start, end, num_splits=splits))
        assert found == difference(world.expected(end), world.expected(start)), (start, end)


class Restoring(Played):
    """Goes back now and then, to any time that can be read."""

    def restore(self, choice: int) -> None:
        if self.upper == 0:
            return
        as_of = self.since + choice % (self.upper - self.since)
        wanted, held = self.world.expected(as_of), self.world.expected(self.upper - 1)
        back = difference(wanted, held)
        done = self.world.shard.restore(as_of)
        assert done.changed == bool(back)
        assert done.added == sum(diff for diff in back.values() if diff > 0)
        assert done.removed == -sum(diff for diff in back.values() if diff < 0)
        if back:
            assert done.lower.element == self.upper
            self.world.rows += [(key, value, self.upper, diff) for (key, value), diff in back.items()]
            self.upper += 1
        assert self.world.contents(self.upper - 1) == wanted


@examples(1, of_a_proof=300)
@given(
    st.booleans(),
    st.lists(st.one_of(STEPS, st.tuples(st.just("restore"), st.integers(0, 50))), min_size=1, max_size=12),
)
@example(False, [("insert", [("k0", 0, 0, 1), ("k0", 0, 0, -1)])])
def test_after_a_restore_the_contents_are_those_of_then(inline: bool, steps: list[tuple[str, object]]) -> None:
    played = Restoring(inline)
    for step, argument in steps:
        played.play(step, argument)
    played.restore(0)
    played.merge(idle=True)
    played.check()


@examples(1, of_a_proof=60)
@given(st.booleans(), st.lists(STEPS, min_size=1, max_size=6), st.lists(STEPS, min_size=1, max_size=6), st.data())
def test_changes_between_two_shards_are_the_difference_of_their_contents(
    inline: bool, first: list[tuple[str, object]], second: list[tuple[str, object]], data: st.DataObject
) -> None:
    """What one shard held is copied into another; then both go their ways."""
    played = Played(inline)
    for step, argument in first:
        played.play(step, argument)
    if played.upper == 0:
        return
    copy = played.world.client.create_shard("copy", SCHEMA, ["k"])
    copied = played.upper - 1
    copy.compare_and_append(played.world.shard.snapshot(copied).to_arrow(), 0, 1)
    held = played.world.expected(copied)
    for step, argument in second:
        played.play(step, argument)
    copy = played.world.client.shard("copy")
    start = data.draw(st.integers(played.since, played.upper - 1))
    there = shown(played.world.shard.changes(start, 0, other=copy, num_splits=data.draw(st.integers(1, 3))))
    assert there == difference(held, played.world.expected(start))
    back = shown(copy.changes(0, start, other=played.world.shard))
    assert back == difference(played.world.expected(start), held)
