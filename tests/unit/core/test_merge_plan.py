"""The planner: few batches, little rewriting, whatever is appended; and nothing that another is at work on."""

from __future__ import annotations

import math
from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.core import commands as c
from persist.core import merge_plan
from persist.core.batch import Description, HollowBatch, Part, Run, batch_of, trace_of
from persist.core.frontier import EMPTY, MINIMUM, Antichain
from persist.core.merge_plan import (
    INLINE_FLUSH_BYTES,
    LEFT_BATCHES_MAX,
    LOOKED_AT_MAX,
    SMALL_ROWS,
    MergePolicy,
    count_newest,
    garbage_due,
    is_small,
    plan,
)
from persist.core.named_holds import Tag
from persist.core.record import replace
from persist.core.state import Claim, State
from tests.support.examples import examples, thinned
from tests.support.shard import Shard, make_part

POLICY = MergePolicy()


class Shape:
    """A State of which only the sizes of batches matter, and the rows that were written for them."""

    def __init__(self) -> None:
        self.state: State = Shard().state
        self.appended = 0
        self.rewritten = 0
        self.parts = 0

    def part(self, rows: int, **fields: object) -> Part:
        self.parts += 1
        return replace(make_part(self.parts, rows=rows), **fields)  # type: ignore[arg-type]

    def append(self, *runs: int, **fields: object) -> None:
        """One batch with runs of so many rows, at one time."""
        upper = self.state.upper.element
        assert upper is not None
        held = tuple(Run((self.part(rows, **{"time_min": upper, "time_max": upper, **fields}),)) for rows in runs)
        desc = Description(Antichain(upper), Antichain(upper + 1), Antichain(0))
        self.state = replace(self.state, trace=trace_of((*self.state.trace.batches, batch_of(desc, held))))
        self.appended += sum(runs)

    def merge(self, spec: c.MergeSpec, rows: int | None = None, **fields: object) -> None:
        found = self.state.trace.covering(frozenset(spec.inputs))
        assert found is not None
        first, count = found
        batches = self.state.trace.batches[first : first + count]
        assert [part.id for batch in batches for part in batch.parts()] == list(spec.inputs)
        desc = Description(batches[0].desc.lower, batches[-1].desc.upper, spec.since)
        output = self.part(spec.rows if rows is None else rows, **fields)
        trace = self.state.trace.splice(first, count, [batch_of(desc, (Run((output,)),))])
        self.state = replace(self.state, trace=trace)
        self.rewritten += spec.rows

    def settle(self, *, idle: bool = False) -> None:
        while specs := self.plan(idle=idle):
            self.merge(specs[0])

    def plan(self, *, idle: bool = False) -> list[c.MergeSpec]:
        specs = plan(self.state, POLICY, now_ms=0, idle=idle)
        named = [part for spec in specs for part in spec.inputs]
        assert len(set(named)) == len(named), "a plan names a part once"
        return specs

    @property
    def batches(self) -> int:
        return sum(1 for batch in self.state.trace.batches if batch.rows)


def log_of(rows: int, base: float) -> float:
    return math.log(max(rows, 2), base)


@pytest.mark.parametrize("rows", thinned([1, 100, 10_000], 3))
def test_equal_appends_leave_few_batches_and_are_rewritten_a_logarithm_of_times(rows: int) -> None:
    shape = Shape()
    most = 0
    for _ in range(3_000):
        shape.append(rows)
        shape.settle()
        most = max(most, shape.batches)
    assert most <= 40
    assert shape.rewritten / shape.appended <= log_of(3_000, 4) + 1


@examples(0.6)
@given(st.lists(st.integers(0, 17).map(lambda bits: 2**bits), min_size=1, max_size=150), st.booleans())
def test_appends_of_any_sizes_leave_a_logarithm_of_batches(sizes: list[int], idle: bool) -> None:
    shape = Shape()
    for rows in sizes:
        shape.append(rows)
        shape.settle(idle=idle)
        bound = max(POLICY.batches_soft, log_of(shape.appended, 4 / 3) + 4)
        assert shape.batches <= bound
    # Every rewriting lets the smaller runs grow: by a quarter at the least, by `fan_in` in the common case.
    assert shape.rewritten / shape.appended <= log_of(shape.appended, 5 / 4) + 2


def test_the_longest_due_stretch_is_merged_at_once() -> None:
    shape = Shape()
    for rows in (1_000_000, 50_000, 50_000, 50_000, 50_000, 100, 100):
        shape.append(rows)
    [spec] = shape.plan()
    assert (spec.lower, spec.upper, spec.rows) == (Antichain(1), Antichain(7), 200_200)


def test_a_batch_of_many_runs_is_merged_by_itself() -> None:
    shape = Shape()
    shape.append(100_000)
    shape.append(*[20_000] * 4)
    [spec] = shape.plan()
    assert spec.rows == 80_000


def test_a_shard_at_rest_is_brought_to_a_few_batches_and_then_left_alone() -> None:
    shape = Shape()
    for rows in (1_000_000, 400_000, 100_000, 30_000, 9_000, 9_000, 50):
        shape.append(rows)
    assert shape.plan() == []
    shape.settle(idle=True)
    sizes = [batch.rows for batch in shape.state.trace.batches]
    assert all(sum(sizes[i:]) < 2 * size for i, size in enumerate(sizes))
    assert shape.plan(idle=True) == []


def test_inline_rows_leave_the_state_when_there_are_many_of_them() -> None:
    shape = Shape()
    shape.append(1_000_000)
    size = INLINE_FLUSH_BYTES // 2
    for rows in (300_000, 50_000, 10_000):
        shape.append(rows, key=None, data=bytes(size), size=size)
    [spec] = shape.plan()
    assert spec.rows == 360_000
    shape.merge(spec)
    assert shape.state.trace.inline_bytes == 0


def test_updates_that_cancel_are_collapsed_before_they_double_the_shard() -> None:
    shape = Shape()
    shape.append(1_000)
    shape.state = replace(shape.state, since=Antichain(10_000))
    most = 0
    for _ in range(500):
        shape.append(200, diff_min=-1, diff_sum=0)
        most = max(most, shape.state.trace.rows)
        while specs := shape.plan():
            whole = specs[0].lower == Antichain(0)
            shape.merge(specs[0], rows=1_000 if whole else min(specs[0].rows, 2_000), diff_sum=1_000 if whole else 0)
    assert most <= 3_000
    assert shape.rewritten <= 6 * shape.appended


def test_wrong_estimates_of_what_cancels_do_not_make_it_merge_for_ever() -> None:
    shape = Shape()
    shape.state = replace(shape.state, since=Antichain(10_000))
    for _ in range(400):
        shape.append(100, diff_min=-1, diff_sum=0)  # half insertions, half retractions, of which nothing cancels
        while specs := shape.plan():
            shape.merge(specs[0], diff_min=-1, diff_sum=0)
    assert shape.rewritten / shape.appended <= log_of(shape.appended, 1.5) + 2


def test_history_that_since_has_passed_is_collapsed_at_most_once_per_halving() -> None:
    shape = Shape()
    shape.append(100_000, time_min=0, time_max=1_024, diff_min=-1, diff_sum=1_000)
    shape.append(10)
    merges = 0
    for since in range(1, 1_200):
        shape.state = replace(shape.state, since=Antichain(since))
        for spec in shape.plan():
            merges += 1
            shape.merge(spec, time_min=since, time_max=max(1_024, since), diff_sum=1_000)
    assert 1 <= merges <= 12


def test_a_shard_that_keeps_its_history_by_age_is_little_more_than_that() -> None:
    """It was more than twice that: since passes a part of a batch at a time, and never the whole."""
    shape = Shape()
    shape.state = replace(shape.state, settings=replace(shape.state.settings, version=1, history_ms=1_000))
    live, each, kept = 25_000, 2_000, 42
    shape.append(live, diff_sum=live)
    worst = 0.0
    for time in range(1, 300):
        shape.state = replace(shape.state, since=Antichain(max(0, time - kept)))
        shape.append(each, diff_min=-1, diff_sum=0)
        while specs := shape.plan():
            spec, whole = specs[0], specs[0].lower == MINIMUM
            first, last = spec.lower.element or 0, (spec.upper.element or 0) - 1
            at_most = live + max(0, last - (time - kept)) * each if whole else spec.rows
            left = min(spec.rows, at_most)
            shape.merge(spec, left, diff_min=-1, diff_sum=live if whole else 0, time_min=first, time_max=last)
        worst = max(worst, shape.state.trace.rows / (live + kept * each))
    assert worst <= 1.5
    assert shape.rewritten <= 7 * shape.appended


def test_history_that_does_not_cancel_after_all_is_merged_a_bounded_number_of_times() -> None:
    shape = Shape()
    shape.state = replace(shape.state, settings=replace(shape.state.settings, version=1, history_ms=1_000))
    for time in range(300):
        shape.state = replace(shape.state, since=Antichain(max(0, time - 10)))
        shape.append(1_000, diff_min=-1, diff_sum=0)  # half insertions, half retractions, of which nothing cancels
        while specs := shape.plan():
            last = (specs[0].upper.element or 0) - 1
            shape.merge(specs[0], diff_min=-1, diff_sum=0, time_min=min(last, time - 10), time_max=last)
    assert shape.rewritten / shape.appended <= 2 * log_of(shape.appended, 1.3)


# --- what tags keep apart


def tagged(state: State, *times: int) -> State:
    return replace(state, tags={f"t{number}": Tag(time) for number, time in enumerate(times)})


@pytest.mark.parametrize(("times", "due"), [
    ((), True), ((1,), True),
    ((1, 2), False),  # with three times told apart, 3,000 of the 4,000 rows may be left
    ((1, 1), True),  # two names of one time
    ((1, 4), True),  # since is that time
    ((1, 5), True),  # since has not passed it, and neither this stretch
    ((1, 3), True),  # no row of the stretch is later: all that is left is there once at that time
    ((0, 1, 2, 3), False),
])  # fmt: skip
def test_what_would_be_left_is_counted_once_more_for_each_time_that_tags_keep_apart(
    times: tuple[int, ...], due: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_plan, "GARBAGE_PERCENT", 200)
    shape = Shape()
    for _ in range(4):
        shape.append(1_000, diff_min=-1, diff_sum=250)
    state = replace(shape.state, since=Antichain(4))
    stretch = garbage_due(tagged(state, *times), frozenset())
    assert len(stretch) == (4 if due else 0)


def one_batch(rows: int, diff_sum: int, first: int, last: int, *, upper: int = 1_000) -> Shape:
    """A shard whose rows are all in the batch `[0, upper)`, at times in `[first, last]`, and since is `last`."""
    shape = Shape()
    run = Run((shape.part(rows, diff_min=-1, diff_sum=diff_sum, time_min=first, time_max=last),))
    whole = batch_of(Description(MINIMUM, Antichain(upper), MINIMUM), (run,))
    shape.state = replace(shape.state, trace=trace_of((whole,)), since=Antichain(last))
    return shape


@pytest.mark.parametrize(("times", "due"), [((), 1), ((200,), 1), ((200, 400), 0), ((200, 900), 1), ((200, 999), 1)])
def test_a_large_batch_is_not_rewritten_for_history_that_tags_keep(times: tuple[int, ...], due: int) -> None:
    shape = one_batch(100_000, 20_000, 0, 900)
    shape.state = tagged(shape.state, *times)
    assert len(shape.plan()) == due


@pytest.mark.parametrize(("times", "due"), [((), 1), ((200,), 0), ((900,), 1)])
def test_rows_that_tags_keep_are_not_taken_for_history_that_is_too_old(times: tuple[int, ...], due: int) -> None:
    """It would be merged each time that since moves, for nothing."""
    shape = one_batch(45_000, 25_000, 200, 900)
    settings = replace(shape.state.settings, version=1, history_ms=1_000)
    shape.state = replace(tagged(shape.state, *times), settings=settings)
    assert len(shape.plan()) == due


def test_parts_of_an_older_schema_are_rewritten_once() -> None:
    shape = Shape()
    shape.append(1_000_000)
    shape.append(10_000)
    shape.state = replace(shape.state, schemas={**shape.state.schemas, 2: shape.state.schemas[1]})
    specs = shape.plan()
    assert [spec.rows for spec in specs] == [1_000_000, 10_000]
    for spec in specs:
        shape.merge(spec, schema_id=2)
    assert shape.plan() == []


def test_what_another_is_at_work_on_is_left_alone_and_what_it_abandoned_is_taken_up() -> None:
    shape = Shape()
    for _ in range(12):
        shape.append(100_000)
    spec = c.MergeSpec(
        tuple(part.id for batch in shape.state.trace.batches[2:8] for part in batch.parts()),
        Antichain(2), Antichain(8), Antichain(0), 600_000, 0,
    )  # fmt: skip
    claim = Claim("other", 0, 1_000, inputs=spec.inputs, done=(shape.part(50),), resume_key=b"m")
    shape.state = replace(shape.state, claims={spec.claim_key: claim})
    assert [r.lower for r in plan(shape.state, POLICY, now_ms=500)] == [Antichain(8)]
    assert [spec.claim_key for spec in plan(shape.state, POLICY, now_ms=1_001)] == [spec.claim_key, "merge:[8]"]


def test_nothing_is_planned_for_a_shard_that_is_closed() -> None:
    shape = Shape()
    for _ in range(20):
        shape.append(100)
    closed = HollowBatch(Description(shape.state.upper, EMPTY, MINIMUM), (), 0)
    shape.state = replace(shape.state, since=EMPTY, trace=shape.state.trace.push(closed))
    assert shape.plan() == []


def test_a_shard_that_is_closed_to_reads_is_merged_to_its_latest_time() -> None:
    """Nobody can tell its times apart, and writers go on: as long as it was not merged, appends were refused."""
    shape = Shape()
    for _ in range(20):
        shape.append(100)
    shape.state = replace(shape.state, since=EMPTY)
    assert [spec.since for spec in shape.plan()] == [Antichain(19)]


# --- beside writers that do their small merges themselves


def beside(shape: Shape, *, idle: bool = False) -> list[c.MergeSpec]:
    return plan(shape.state, POLICY.beside_writers(), now_ms=0, idle=idle)


def test_the_newest_small_batches_are_left_to_whoever_commits() -> None:
    shape = Shape()
    for _ in range(LEFT_BATCHES_MAX):
        shape.append(100)
    assert shape.plan()
    assert beside(shape) == []
    assert beside(shape, idle=True), "nobody commits any more"


def test_small_batches_that_nobody_merges_are_the_workers_after_all() -> None:
    """Writers that live for one append have no time to merge."""
    shape = Shape()
    for _ in range(LEFT_BATCHES_MAX + 1):
        shape.append(100)
    assert beside(shape)


def test_larger_batches_and_what_lies_before_them_are_the_workers() -> None:
    shape = Shape()
    for _ in range(8):
        shape.append(100)
    for _ in range(4):
        shape.append(SMALL_ROWS + 1)
    for _ in range(8):
        shape.append(100)
    newest = {part.id for batch in shape.state.trace.batches[-8:] for part in batch.parts()}
    specs = beside(shape)
    assert specs
    assert all(newest.isdisjoint(spec.inputs) for spec in specs)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(-2, 3)), max_size=12),
    st.integers(0, 50),
    st.sets(st.integers(1, 12), max_size=3),
)
def test_garbage_is_looked_for_in_what_since_has_passed_and_nobody_is_at_work_on(
    shapes: list[tuple[int, int, int]], since: int, numbers: set[int]
) -> None:
    """As told by a look at every batch. Of each: its rows, how many times it spans beyond one, and its diffs."""
    held, upper, part = [], 0, 0
    for rows, more, diff in shapes:
        lower, upper = upper, upper + 1 + more
        desc = Description(Antichain(lower), Antichain(upper), Antichain(0))
        part += rows > 0
        fields = {"time_min": lower, "time_max": upper - 1, "diff_sum": rows * diff}
        runs = (Run((replace(make_part(part, rows=rows), **fields),)),) if rows else ()  # type: ignore[arg-type]
        held.append(batch_of(desc, runs))
    taken = {make_part(number).id for number in numbers}
    state = replace(Shard().state, trace=trace_of(held), since=Antichain(since))
    found = garbage_due(state, taken)

    ids = [batch.desc for batch in held]
    if found:
        assert ids[ids.index(found[0].desc) :][: len(found)] == [batch.desc for batch in found], "neighbours"
    passed = [b for b in held if b.desc.lower.element <= since and all(p.time_max <= since for p in b.parts())]  # type: ignore[operator]
    assert passed == held[: len(passed)]
    newest: list[HollowBatch] = []
    for batch in reversed(passed[-LOOKED_AT_MAX:]):
        if any(one.id in taken for one in batch.parts()):
            break
        newest.insert(0, batch)
    assert list(found) in ([], newest)


CHANGES = st.lists(st.sampled_from(["small", "empty", "large", "merge", "unseen"]), max_size=20)


@given(CHANGES)
@examples(1)
def test_the_newest_small_batches_are_counted_as_from_the_beginning(changes: list[str]) -> None:
    """Whatever is appended or merged, also where several changes come between two looks."""
    shape, seen, count = Shape(), trace_of(()), 0
    for change in changes:
        batches = shape.state.trace.batches
        if change in ("small", "empty", "large"):
            shape.append(*{"small": (1,), "empty": (), "large": (SMALL_ROWS + 1,)}[change])
        elif change == "merge" and len(batches) > 1:
            desc = Description(batches[-2].desc.lower, batches[-1].desc.upper, Antichain(0))
            merged = batch_of(desc, (Run((shape.part(2),)),))
            shape.state = replace(shape.state, trace=shape.state.trace.splice(len(batches) - 2, 2, [merged]))
        if change == "unseen":
            shape.append(1)
            continue
        trace = shape.state.trace
        if (difference := seen.difference(trace)) is not None:
            count = count_newest(trace, difference, count, is_small, with_rows=True)
            seen = trace
        assert count == sum(1 for batch in takewhile(is_small, reversed(trace.batches)) if batch.runs)
