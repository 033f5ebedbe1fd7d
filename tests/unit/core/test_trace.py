"""A trace keeps its sums, fuses emptiness, and finds batches by the ids of their parts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from persist.core.batch import EMPTY_TRACE, Description, HollowBatch, Trace, batch_of, trace_of
from persist.core.frontier import EMPTY, Antichain
from tests.support.shard import make_part, make_run
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
