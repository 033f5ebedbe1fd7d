"""Truncation as users see it, over stores whose clocks the tests move."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

import pyarrow as pa
import pytest

from persist import Antichain, InvalidUsage, NotReadable, Shard, UpperMismatch
from persist.client.idempotency import is_final
from persist.client.timestamps import to_datetime
from persist.core.ids import token_of_key
from persist.core.state import Policy
from persist.core.transitions import rewrites
from tests.support.clocks import Machine, World

NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])


@pytest.fixture
def world() -> World:
    return World(policy=Policy())


@pytest.fixture
def shard(world: World, machine: Machine) -> Shard:
    """At 0 and 1 three rows come; at 2 one goes and another comes; at 3 a row of 0 comes twice more."""
    found = machine.client.create_shard(NAME, SCHEMA, ["id"], history="7d")
    for rows in ([(1, "a", 1), (2, "b", 2)], [(3, "c", 1)], [(1, "a", -1), (4, "d", 1)], [(2, "b", 2)]):
        found.insert([{"id": number, "v": value, "__diff": diff} for number, value, diff in rows])
        world.pass_ms(1_000)
    return found


def rows(shard: Shard, as_of: int | None = None) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in shard.snapshot(as_of).to_arrow().to_pylist()]


def test_what_was_there_before_the_cut_and_still_is_goes(shard: Shard) -> None:
    earlier = [rows(shard, time) for time in range(4)]
    done = shard.truncate(2)
    assert (done.before, done.timestamp, done.removed, done.changed) == (2, None, 3, True)
    assert (done.lower, done.upper) == (Antichain(4), Antichain(5))
    assert rows(shard) == [(2, "b", 2), (4, "d", 1)], "row 1 had gone already, and row 2 was there twice before the cut"
    assert [rows(shard, time) for time in range(4)] == earlier, "reads as of earlier times show what they did"
    with shard.listen(3, until=5) as listen:
        [event] = listen
    assert [tuple(row.values()) for row in event.updates.to_pylist()] == [(2, "b", 4, -2), (3, "c", 4, -1)]


def test_a_dry_run_tells_how_many_and_changes_nothing(machine: Machine, shard: Shard) -> None:
    before = machine.location.machine(NAME).refresh()
    tried = shard.truncate(2, dry_run=True)
    assert (tried.removed, tried.changed, tried.upper) == (3, False, Antichain(4))
    after = machine.location.machine(NAME).refresh()
    assert (after.trace.batches, after.truncated, after.leased_readers, after.writers) == (
        before.trace.batches, before.truncated, {}, before.writers,
    )  # fmt: skip


def test_a_dry_run_tells_what_would_go_now_also_with_a_token_that_has_landed(shard: Shard) -> None:
    token = token_of_key("nightly")
    assert shard.truncate(2, token=token).removed == 3
    tried = shard.truncate(2, token=token, dry_run=True)
    assert (tried.removed, tried.changed) == (0, False)
    assert shard.truncate(2, token=token).removed == 3


def test_truncations_kept_apart_are_bounded(monkeypatch: pytest.MonkeyPatch, machine: Machine, shard: Shard) -> None:
    monkeypatch.setattr(rewrites, "TRUNCATIONS_MAX", 2)
    shard.truncate(1)
    shard.truncate(2)
    before = machine.location.machine(NAME).refresh()
    with pytest.raises(InvalidUsage, match="has 2 truncations that readable times precede, which is the maximum"):
        shard.truncate(3)
    after = machine.location.machine(NAME).refresh()
    assert (after.trace, after.truncations) == (before.trace, before.truncations)
    shard.forget((shard.upper().element or 0) - 1)
    shard.insert([{"id": 5, "v": "e"}])
    assert shard.truncate(shard.upper().element or 0).changed


def test_a_cut_before_all_is_refused_where_nothing_can_be_written(shard: Shard) -> None:
    shard.advance_upper(None)
    for mode in ("retract", "drop"):
        with pytest.raises(UpperMismatch, match="is closed"):
            shard.truncate(0, mode=mode)  # type: ignore[arg-type]


def test_a_wall_clock_means_all_that_was_there_by_then(world: World, shard: Shard) -> None:
    instant = to_datetime((world.true_ms - 2_000) // 1_000 * 1_000)
    done = shard.truncate(instant)
    assert (done.before, done.timestamp, done.removed) == (2, instant, 3)
    assert not shard.truncate(datetime(2001, 1, 1, tzinfo=UTC)).changed, "nothing was there by then"


def test_a_truncation_that_repeats_another_one_is_possible_once_the_time_is_forgotten(shard: Shard) -> None:
    shard.truncate(2)
    shard.forget(4)
    for token in (None, token_of_key("old rows")):
        assert shard.truncate(2, token=token).removed == 0
    assert shard.truncate(2, dry_run=True).removed == 0


def test_an_empty_shard_has_nothing_before_its_first_time(machine: Machine) -> None:
    shard, token = machine.client.create_shard("empty", SCHEMA, ["id"]), token_of_key("old rows")
    modes: list[Literal["retract", "drop"]] = ["retract", "drop"]
    for mode in modes:
        assert shard.truncate(0, mode=mode, dry_run=True).removed == 0
        assert shard.truncate(0, mode=mode).upper == Antichain(0)
    first = shard.truncate(0, token=token)
    shard.insert([{"id": 1, "v": "a"}])
    assert shard.truncate(0, token=token) == first


def test_a_refusal_that_may_not_stay_is_not_told_of_a_try_that_was_not_answered() -> None:
    """Rows that were taken away may be added again. A merge makes nothing of the two, and a late try would land."""
    given = {"expected": [4], "actual": [5]}
    assert is_final(UpperMismatch("a write came between", **given))
    assert not is_final(UpperMismatch("rows may have been taken away since", **given, stays=False))


def test_what_is_wrong_is_refused(machine: Machine, shard: Shard) -> None:
    before = machine.location.machine(NAME).refresh()
    for asked in (
        *({"before": time} for time in (5, -1, "yesterday")),
        *({"before": 2, **more} for more in ({"dry_run": 1}, {"retries": -1}, {"info": "x"})),
    ):
        with pytest.raises(InvalidUsage):
            shard.truncate(**asked)  # type: ignore[arg-type]
    assert machine.location.machine(NAME).refresh() == before


def test_a_cut_whose_history_was_forgotten_is_named_as_it_was_given(shard: Shard) -> None:
    """It named the time before the cut."""
    shard.forget(3)
    for mode in ("retract", "drop"):
        with pytest.raises(NotReadable, match="rows written before 2 can no longer"):
            shard.truncate(2, mode=mode)  # type: ignore[arg-type]
