"""A trace keeps its sums, fuses emptiness, and finds batches by the ids of their parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.core.batch import (
    BLOCK_MAX,
    EMPTY_TRACE,
    Batches,
    Description,
    HollowBatch,
    Trace,
    batch_of,
    batches_of,
    common_end,
    common_start,
    trace_of,
)
from persist.core.errors import Corruption
from persist.core.frontier import EMPTY, Antichain
from persist.core.invariants import check_batches_replaced, check_state
from persist.core.record import replace
from persist.core.state import State
from tests.support.shard import Shard, make_part, make_run
from tests.unit.core.strategies import traces


@given(traces())
def test_pushing_one_by_one_equals_building_at_once(trace: Trace) -> None:
    pushed = EMPTY_TRACE
    for batch in trace.batches:
        pushed = pushed.push(batch)
    assert (pushed.upper, pushed.rows, pushed.inline_bytes) == (trace.upper, trace.rows, trace.inline_bytes)
    assert list(pushed.parts()) == list(trace.parts())
    assert pushed.blob_keys == trace.blob_keys
    assert all(a.runs or b.runs for a, b in zip(pushed.batches, pushed.batches[1:], strict=False))


@given(traces(), st.data())
def test_splicing_keeps_the_sums(trace: Trace, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, len(trace.batches)))
    count = data.draw(st.integers(0, len(trace.batches) - first))
    other = data.draw(traces(first_part=100))
    spliced = trace.splice(first, count, other.batches)
    assert spliced.batches == (*trace.batches[:first], *other.batches, *trace.batches[first + count :])
    assert spliced == trace_of(spliced.batches)
    assert spliced.rows == sum(part.rows for part in spliced.parts())
    assert spliced.inline_bytes == sum(len(part.data) for part in spliced.parts() if part.data is not None)


@given(traces(), st.data())
def test_covering_finds_the_batches_that_hold_the_parts(trace: Trace, data: st.DataObject) -> None:
    held = [part.id for part in trace.parts()]
    wanted = frozenset(data.draw(st.sets(st.sampled_from(held), min_size=1))) if held else frozenset({"p?"})
    holders = [i for i, batch in enumerate(trace.batches) if wanted & {part.id for part in batch.parts()}]
    if held:
        assert trace.covering(wanted) == (holders[0], holders[-1] - holders[0] + 1)
    assert trace.covering(wanted | {"p-gone"}) is None


@given(traces(), st.integers(0, 40).map(Antichain) | st.just(EMPTY))
def test_what_reaches_beyond_a_time_is_at_the_end(trace: Trace, lower: Antichain) -> None:
    assert trace.beyond(lower) == tuple(batch for batch in trace.batches if lower < batch.desc.upper)


def test_the_upper_of_nothing_is_zero() -> None:
    assert EMPTY_TRACE.upper == Antichain(0)
    assert EMPTY_TRACE.covering(frozenset()) is None


def test_a_batch_counts_what_it_holds() -> None:
    desc = Description(Antichain(0), EMPTY, Antichain(0))
    batch = batch_of(desc, (make_run(make_part(1, rows=3), make_part(2, rows=4, inline=10)),))
    assert (batch.rows, batch.part_count, batch.size, batch.inline_size, batch.diff_sum) == (7, 2, 1010, 10, 7)
    assert len(list(batch.blob_keys())) == 1
    assert not desc.is_empty_interval
    assert HollowBatch(Description(EMPTY, EMPTY, EMPTY), (), 0).desc.is_empty_interval


# --- a sequence of batches is as a tuple of them, whatever it was made from, and shares what did not chan

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


# --- what is checked where batches are replaced finds what the whole check finds, and looks at no other b

COUNT = 6


def batch(lower: int, upper: int, *numbers: int, since: int = 0, rows: int = 1) -> HollowBatch:
    desc = Description(Antichain(lower), Antichain(upper), Antichain(since))
    return batch_of(desc, tuple(make_run(make_part(n, rows=rows, times=(lower, lower), inline=7)) for n in numbers))


@pytest.fixture
def base() -> State:
    return replace(Shard().state, trace=trace_of(batch(n, n + 1, n) for n in range(COUNT)))


def spliced(base: State, *came: HollowBatch) -> State:
    """The State in which these stand for the batches of `[2, 4)`."""
    return replace(base, trace=base.trace.splice(2, 2, came))


def test_a_merge_of_two_batches_is_sound(base: State) -> None:
    check_batches_replaced(base, spliced(base, batch(2, 4, 20)))
    check_batches_replaced(base, replace(base, trace=base.trace.push(batch(COUNT, COUNT + 1, 30))))


BAD: dict[str, Callable[[State], State]] = {
    "do not tile: .* follows .2.": lambda base: spliced(base, batch(3, 4, 20)),
    "do not tile: .* follows .3.": lambda base: spliced(base, batch(2, 3, 20)),
    "do not tile": lambda base: spliced(base),
    "do not tile: .2.* follows .3.": lambda base: replace(base, trace=base.trace.splice(3, 0, (batch(2, 3, 20),))),
    "beyond the since": lambda base: spliced(base, batch(2, 4, 20, since=3)),
    "occurs twice": lambda base: spliced(base, batch(2, 4, 5)),
    "has no rows": lambda base: spliced(base, batch(2, 4, 20, rows=0)),
    "miscounted": lambda base: replace(base, trace=Trace(spliced(base, batch(2, 4, 20)).trace.batches, 1, COUNT - 1)),
    "has dropped rows": lambda base: replace(spliced(base, batch(2, 4, 20)), floor=1),
}


@pytest.mark.parametrize("said", BAD)
def test_what_the_whole_check_refuses_is_refused(base: State, said: str) -> None:
    bad = BAD[said](base)
    with pytest.raises(Corruption, match=said):
        check_batches_replaced(base, bad)
    with pytest.raises(Corruption):
        check_state(bad)


@pytest.mark.parametrize("changes", [{"receipt": b"x"}, {"given": 7}, {"rows_digest": 7}], ids=str)
def test_what_only_a_command_needs_is_in_no_state(base: State, changes: dict[str, object]) -> None:
    part = replace(make_part(20, times=(2, 2), inline=7), **changes)
    assert part.as_durable() == make_part(20, times=(2, 2), inline=7)
    with pytest.raises(Corruption, match="only a command needs"):
        check_state(spliced(base, batch_of(batch(2, 4, 20).desc, (make_run(part),))))
