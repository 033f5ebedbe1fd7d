"""What a State tells of its structure, as JSON."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from persist.core.audit_log import CommandEntry, Committed
from persist.core.batch import Description, HollowBatch, Run, batch_of, trace_of
from persist.core.frontier import Antichain, frontier
from persist.core.ids import CriticalReaderId, ReaderId, SeqNo
from persist.core.named_holds import Tag
from persist.core.record import replace
from persist.core.state import Claim, CriticalReader, LeasedReader, State, initial_state
from rpc.routes.inspection_routes import (
    BATCHES_MAX,
    HOLDS_MAX,
    NAMES_MAX,
    RECENT_MAX,
    activity_json,
    level_of,
    trace_json,
)
from tests.support.shard import NAME, SCHEMA, make_part, numbered


def batch(number: int, *, rows: int = 1, inline: int | None = None) -> HollowBatch:
    """The batch of the times `[number, number + 1)`."""
    desc = Description(frontier(number), frontier(number + 1), frontier(0))
    return batch_of(desc, (Run((make_part(number + 1, rows=rows, times=(number, number), inline=inline),)),))


def state(*batches: HollowBatch, **changed: object) -> State:
    made = initial_state(NAME, SCHEMA, 1_000)
    return replace(made, trace=trace_of(batches), **changed)


def test_a_new_shard_has_no_batches_and_its_creation_is_told() -> None:
    told = trace_json(state(), with_names=True)
    assert (told["since"], told["upper"], told["batches"], told["merges"]) == ([0], [0], [], [])
    assert [one["operation"] for one in told["recent"]] == ["create"]


def test_a_batch_tells_its_times_and_sizes_and_no_key() -> None:
    told = trace_json(state(batch(0, rows=70), batch(1, inline=10)), with_names=False)
    large, small = told["batches"]
    assert large == {
        "lower": [0], "upper": [1], "since": [0], "batches": 1, "runs": 1, "parts": 1, "rows": 70, "bytes": 1000,
        "inline_bytes": 0, "level": 3, "merging": False,
    }  # fmt: skip
    assert (small["inline_bytes"], small["bytes"], told["bytes"], told["rows"]) == (10, 10, 1010, 71)
    assert make_part(1).id not in json.dumps(told)


@given(st.integers(1, 10**12))
def test_a_level_holds_four_times_what_the_one_below_holds(rows: int) -> None:
    assert 4 ** level_of(rows) <= rows < 4 ** (level_of(rows) + 1)


@given(st.integers(0, 3 * BATCHES_MAX))
def test_a_long_trace_is_told_in_few_stretches_that_tile_it(count: int) -> None:
    told = trace_json(state(*map(batch, range(count))), with_names=False)
    stretches = told["batches"]
    assert len(stretches) <= BATCHES_MAX
    assert sum(one["batches"] for one in stretches) == told["batch_count"] == count
    assert sum(one["rows"] for one in stretches) == told["rows"]
    edges = [one["lower"] for one in stretches] + [one["upper"] for one in stretches[-1:]]
    assert all(one["upper"] == after for one, after in zip(stretches, edges[1:], strict=True))


def test_a_merge_under_way_tells_what_it_reads_and_how_far_it_is_and_not_who_does_it() -> None:
    held = [batch(number, rows=10) for number in range(4)]
    inputs = tuple(part.id for one in held[1:3] for part in one.parts())
    claim = Claim("host-7:4711", 0, 60_000, inputs, (make_part(9, rows=12),))
    told = trace_json(state(*held, claims={"merge:1": claim}), with_names=True)
    assert [one["merging"] for one in told["batches"]] == [False, True, True, False]
    [merge] = told["merges"]
    assert (merge["lower"], merge["upper"], merge["batches"], merge["rows"]) == ([1], [3], 2, 20)
    assert (merge["done_parts"], merge["done_rows"], merge["done_bytes"]) == (1, 12, 1000)
    assert "host-7" not in json.dumps(told)


def test_a_merge_whose_inputs_have_left_has_no_place() -> None:
    told = trace_json(state(batch(0), claims={"merge:1": Claim("me", 0, 1, ("p" + "0" * 32,))}), with_names=True)
    assert [(one["lower"], one["batches"]) for one in told["merges"]] == [(None, 0)]


def held(**changed: object) -> State:
    readers = {ReaderId(numbered("r", n)): LeasedReader(frontier(3), SeqNo(1), 0, 60_000, f"job {n}") for n in range(5)}
    cursors = {CriticalReaderId(numbered("c", 1)): CriticalReader(frontier(1), "opaque-word", "billing")}
    tags = {"eom": Tag(2, None)}
    return state(*map(batch, range(9)), leased_readers=readers, critical_readers=cursors, tags=tags, **changed)


def test_holds_are_told_by_their_times_and_those_of_one_time_together() -> None:
    told = trace_json(held(), with_names=True)
    by_kind = {one["kind"]: one for one in told["holds"]}
    assert [one["since"] for one in told["holds"]] == sorted(one["since"] for one in told["holds"])
    assert (by_kind["cursor"]["names"], by_kind["cursor"]["lapses_in_s"]) == (["billing"], None)
    assert (by_kind["reader"]["count"], len(by_kind["reader"]["names"])) == (5, NAMES_MAX)
    assert by_kind["tag"]["since"] == [2]
    assert (told["readers"], told["cursors"], told["tags"]) == (5, 1, 1)


def test_who_may_not_know_the_names_of_readers_is_told_all_else() -> None:
    told = trace_json(held(), with_names=False)
    text = json.dumps(told)
    assert "job" not in text
    assert "billing" not in text
    assert {one["kind"] for one in told["holds"]} >= {"cursor", "reader", "tag"}


def test_no_id_and_no_fence_of_a_hold_is_ever_told() -> None:
    text = json.dumps(trace_json(held(), with_names=True))
    for secret in ("opaque-word", numbered("r", 1), numbered("c", 1)):
        assert secret not in text


def test_the_holds_that_are_told_are_the_earliest_ones() -> None:
    readers = {
        ReaderId(numbered("r", n)): LeasedReader(frontier(n), SeqNo(1), 0, 60_000, "") for n in range(3 * HOLDS_MAX)
    }
    told = trace_json(state(leased_readers=readers, history_hold=Antichain(None)), with_names=True)
    assert [one["since"] for one in told["holds"]] == [[n] for n in range(HOLDS_MAX)]


def test_the_newest_commands_are_told_first_and_activity_leaves_out_upkeep() -> None:
    write, merge = (
        CommandEntry("insert", frontier(0), frontier(1), 5, 50),
        CommandEntry("merge", frontier(0), frontier(9), 7, 70),
    )
    entries = {SeqNo(n): Committed(n, (write, merge)) for n in range(1, 200)}
    found = state(batch(0), entries=entries)
    told = trace_json(found, with_names=False)["recent"]
    assert len(told) == RECENT_MAX
    assert [(one["seqno"], one["operation"]) for one in told[:3]] == [(199, "merge"), (199, "insert"), (198, "merge")]
    line = activity_json(found)
    assert line["recent"][-1] == [199, 5, 50]
    assert all(rows == 5 for _, rows, _ in line["recent"])


def test_a_closed_shard_has_no_times_left() -> None:
    closed = state(HollowBatch(Description(frontier(0), Antichain(None), frontier(0)), (), 0), since=Antichain(None))
    told = trace_json(closed, with_names=False)
    assert (told["since"], told["upper"], told["batches"][0]["upper"]) == ([], [], [])
