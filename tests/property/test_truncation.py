"""Truncations by cuts that slide over equal rows, as plain dicts say: none takes a row twice, none takes a young one.

On the stack of `test_drops`: retractions, drops, restores, merges, collections, tags, moves of since.
"""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from tests.property.test_drops import Dropped
from tests.property.test_tags import TAG_STEPS
from tests.support.examples import examples

# Few rows that are equal, and come again.
EQUAL = st.lists(
    st.tuples(st.sampled_from(["k0", "k1"]), st.just(0), st.integers(0, 2), st.sampled_from([1, 1, 2, -1])), max_size=4
)
STEPS = st.one_of(
    st.tuples(st.just("append"), EQUAL),
    st.tuples(st.just("insert"), EQUAL),
    st.tuples(st.just("truncate"), st.integers(0, 50)),
    st.tuples(st.just("truncate"), st.integers(0, 50)),
    st.tuples(st.just("truncate"), st.integers(0, 50)),
    st.tuples(st.just("drop"), st.integers(0, 50)),
    st.tuples(st.just("restore"), st.integers(0, 50)),
    st.tuples(st.just("merge"), st.booleans()),
    TAG_STEPS,
)
ONE = ("append", [("k0", 0, 0, 1)])


@examples(3)
@given(st.booleans(), st.lists(STEPS, min_size=2, max_size=14))
@example(True, [ONE, ("truncate", 1), ONE, ("truncate", 3), ONE, ("truncate", 6)])
@example(
    False, [ONE, ONE, ("tag", 1), ("tag", 4), ("truncate", 1), ONE, ("pass_by", 9), ("merge", True), ("truncate", 1)]
)
@example(True, [ONE, ("drop", 1), ONE, ("restore", 1), ("truncate", 2), ("truncate", 3)])
@example(False, [("append", []), ("append", [("k0", 0, 0, 1), ("k0", 0, 0, -1)]), ("drop", 9)])
def test_what_was_there_before_the_cut_and_still_is_goes(inline: bool, steps: list[tuple[str, object]]) -> None:
    played = Dropped(inline)
    for step, argument in steps:
        played.play(step, argument)
    played.truncate(0)
    played.merge(idle=True)
    played.check()
    played.settle(None)
    played.merge(idle=True)
    played.check()
