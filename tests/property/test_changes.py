"""Changes between two times and two shards, and restores: as plain dicts say.

On the stack of `test_model`: appends of all kinds, retractions, merges, collections, downgrades of since.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from persist.client.contents_diff import Changes
from tests.property.test_model import STEPS, Played
from tests.support.examples import examples
from tests.support.maintained import SCHEMA

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


@examples(2)
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


@examples(1.5)
@given(
    st.booleans(),
    st.lists(st.one_of(STEPS, st.tuples(st.just("restore"), st.integers(0, 50))), min_size=2, max_size=10),
)
def test_after_a_restore_the_contents_are_those_of_then(inline: bool, steps: list[tuple[str, object]]) -> None:
    played = Restoring(inline)
    for step, argument in steps:
        played.play(step, argument)
    played.restore(0)
    played.merge(idle=True)
    played.check()


@examples(2)
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
