"""Truncations: as plain dicts say. On the stack of `test_model`: retractions, merges, collections, moves of since."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tests.property.test_model import STEPS, Played
from tests.support.examples import examples


class Truncating(Played):
    """Truncates now and then, before any time that can be read, and remembers how far as the shard is to."""

    cut = 0

    def truncate(self, choice: int) -> None:
        if self.upper == 0:
            return
        before = self.since + 1 + choice % (self.upper - self.since)
        then, held = self.world.expected(before - 1), self.world.expected(self.upper - 1)
        gone = {row: min(then[row], held[row]) for row in then if then[row] > 0 and held[row] > 0}
        if before <= self.cut:
            gone = {}
        tried = self.world.shard.truncate(before, dry_run=True)
        done = self.world.shard.truncate(before)
        assert tried.removed == done.removed == sum(gone.values())
        assert done.changed == bool(gone)
        if gone:
            assert done.lower.element == self.upper
            self.world.rows += [(key, value, self.upper, -count) for (key, value), count in gone.items()]
            self.upper, self.cut = self.upper + 1, before
        assert self.world.contents(self.upper - 1) == Counter(self.world.expected(self.upper - 1))
        assert not self.world.shard.truncate(before).changed


@examples(2)
@given(
    st.booleans(),
    st.lists(st.one_of(STEPS, st.tuples(st.just("truncate"), st.integers(0, 50))), min_size=2, max_size=10),
)
def test_what_was_there_before_the_cut_and_still_is_goes(inline: bool, steps: list[tuple[str, object]]) -> None:
    played = Truncating(inline)
    for step, argument in steps:
        played.play(step, argument)
    played.truncate(0)
    played.merge(idle=True)
    played.check()
