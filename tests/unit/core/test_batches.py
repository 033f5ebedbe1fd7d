"""A sequence of batches is as a tuple of them, whatever it was made from, and shares what did not change."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.core.batch import BLOCK_MAX, Batches, Description, HollowBatch, Trace, batches_of, common_end, common_start
from persist.core.frontier import Antichain

CHANGES = st.lists(
    st.tuples(st.sampled_from(["more", "last", "splice"]), st.randoms(use_true_random=False)), max_size=12
)
SIZES = st.integers(0, 3 * BLOCK_MAX)


def some(count: int, rows: int = 0) -> list[HollowBatch]:
    return [HollowBatch(Description(Antichain(n), Antichain(n + 1), Antichain(0)), (), rows + n) for n in range(count)]


def check_alike(held: Batches, plain: Sequence[HollowBatch]) -> None:
    assert (len(held), list(held), list(reversed(held))) == (len(plain), list(plain), list(reversed(plain)))
    assert held == tuple(plain)
    assert hash(held) == hash(tuple(plain))
    for at in (-len(plain), -1, 0, len(plain) // 2, len(plain) - 1):
        if plain:
            assert held[at] is plain[at]
    for first in (0, 1, BLOCK_MAX - 1, BLOCK_MAX, -3):
        for end in (None, 0, 2, BLOCK_MAX + 1, -1):
            assert held[first:end] == tuple(plain[first:end])


@given(SIZES, CHANGES)
def test_it_is_as_a_tuple_after_any_changes(size: int, changes: list[tuple[str, object]]) -> None:
    plain = some(size)
    held = batches_of(plain)
    for number, (kind, random) in enumerate(changes):
        new = some(1, rows=1_000 * (number + 1))[0]
        if kind == "more":
            plain, held = [*plain, new], held.with_more(new)
        elif kind == "last" and plain:
            plain, held = [*plain[:-1], new], held.with_last(new)
        elif kind == "splice":
            first = random.randint(0, len(plain))  # type: ignore[attr-defined]
            count = random.randint(0, min(len(plain) - first, 2 * BLOCK_MAX))  # type: ignore[attr-defined]
            came = some(random.randint(0, 3), rows=5_000 + number)  # type: ignore[attr-defined]
            plain = [*plain[:first], *came, *plain[first + count :]]
            held = held.spliced(first, count, came)
    check_alike(held, plain)


@given(SIZES, SIZES, st.integers(0, 5), st.booleans())
def test_what_two_have_in_common_is_found_whether_they_share_it_or_not(
    before: int, after: int, between: int, shares: bool
) -> None:
    start, end, middle = some(before), some(after, rows=10_000), some(between, rows=20_000)
    old = batches_of([*start, *end])
    new = old.spliced(before, 0, middle) if shares else batches_of([*some(before), *middle, *some(after, rows=10_000)])
    assert common_start(old, new) == (before if between else before + after)
    assert common_end(old, new, after) == after
    change = Trace(old, 0, 0).difference(Trace(new, 0, 0))
    assert change == ((before, 0, tuple(middle)) if between else None)


def test_a_change_shares_the_blocks_that_it_does_not_touch() -> None:
    held = batches_of(some(10 * BLOCK_MAX))
    later = held.with_more(some(1)[0]).spliced(3 * BLOCK_MAX + 1, 5, some(1))
    shared = {id(block) for block in held._all_blocks()} & {id(block) for block in later._all_blocks()}
    assert len(shared) == 9


def test_many_small_splices_leave_few_blocks() -> None:
    held = batches_of(some(10 * BLOCK_MAX))
    while len(held) > 20:
        held = held.spliced(len(held) // 2, 4, some(1))
    assert len(held._all_blocks()) < 8


def test_a_batch_that_is_not_there_is_no_item() -> None:
    held = batches_of(some(3))
    for at in (3, -4):
        with pytest.raises(IndexError, match="there are 3 batches"):
            held[at]


def test_two_that_are_cut_into_blocks_otherwise_are_equal() -> None:
    """A short block of one that the other has more of ended the comparison there."""
    plain = some(2 * BLOCK_MAX + 3)
    cut = batches_of(plain[BLOCK_MAX - 1 :]).spliced(0, 0, plain[: BLOCK_MAX - 1])
    short = batches_of(some(BLOCK_MAX + 1)).spliced(1, 0, ()).spliced(0, BLOCK_MAX + 1, plain[:1])
    for batch in plain[1:]:
        short = short.with_more(batch)
    uneven = batches_of(plain).spliced(0, BLOCK_MAX - 1, plain[: BLOCK_MAX - 1]).spliced(5, 3, plain[5:8])
    for held in (cut, short, uneven):
        assert held == batches_of(plain) == held
        assert common_start(held, batches_of(plain)) == common_start(batches_of(plain), held) == len(plain)
        assert common_end(held, batches_of(plain), len(plain)) == len(plain)
