"""What merges do to the times below since that tags keep, and what a tag costs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.core import merge_plan
from persist.core.merge_plan import plan
from persist.core.readable_times import kept_below
from persist.parts import ALL_KEYS, PartReader, current_schema, valid_schemas
from persist.parts.consolidate import Times
from tests.property.test_changes import TINY
from tests.support.examples import examples
from tests.support.maintained import NAME, Row, World


@examples(20)
@given(st.lists(st.integers(0, 30)), st.integers(0, 30), st.frozensets(st.integers(0, 30)), st.integers(0, 35))
def test_a_time_goes_to_the_least_kept_time_at_or_beyond_it(
    times: list[int], since: int, points: frozenset[int], readable: int
) -> None:
    kept = tuple(sorted(point for point in points if point < since))
    moves = Times(advance=since, kept=kept)
    wanted = [t if t >= since else min((p for p in kept if p >= t), default=since) for t in times]
    assert [moves.advanced(time) for time in times] == wanted
    assert moves.advance_all(np.array(times, np.int64)).tolist() == wanted
    if readable >= since or readable in kept:
        assert [t <= readable for t in times] == [t <= readable for t in wanted]


# --- what a tag costs


def merged_rows(world: World) -> int:
    """Rows that are kept once maintenance has nothing left to do, with every batch merged into one."""
    world.settle()
    state = world.state()
    _, schema = current_schema(state.schemas)
    runs = [run for batch in state.trace.batches for run in batch.runs]
    reader = PartReader(world.blob, valid_schemas(state.schemas), schema)
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


def test_a_large_batch_is_merged_anew_when_half_of_its_tags_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep their rows until it is merged with others, which may be never."""
    world = updated(keys=20, rounds=40, changed=20)
    for time in (10, 20, 30):
        world.shard.tag(f"t{time}", time)
    world.forget_before(39)
    world.settle()
    [batch] = [batch for batch in world.state().trace.batches if batch.runs]
    assert batch.desc.kept == (10, 20, 30)
    assert batch.rows == 20 + 3 * 40
    monkeypatch.setattr(merge_plan, "WORKER_FEW_ROWS", 0)

    def due() -> int:
        return len(plan(world.state(), TINY.policy, now_ms=0))

    assert due() == 0
    world.shard.untag("t10")
    assert due() == 0
    world.shard.untag("t30")
    assert due() == 1
    world.worker(settings=TINY).run(NAME)
    assert world.state().trace.rows == 20 + 40
    assert due() == 0
    assert world.contents(20) == world.expected(20)
