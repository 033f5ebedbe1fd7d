"""Bindings: what is asked wrongly, which clock is followed, and reading them after a long time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from persist.bindings import Binding, Bindings, Minter
from persist.client.client import Client
from persist.core.errors import Corruption, InvalidUsage, ShardExists, Unavailable
from persist.sources import internal_shards, reclock
from persist.sources.reclock import PARTITIONS_MAX, POSITION_MAX
from tests.support.bound import SmallBindings
from tests.support.clocks import HOUR_MS, YEAR_MS, World
from tests.support.location import client_of, memory_location


@pytest.fixture
def client() -> Iterator[Client]:
    with client_of(memory_location()) as client:
        yield client


@pytest.fixture
def bindings(client: Client) -> Bindings:
    return Bindings.open(client, "bindings")


# --- what is not wrong


def test_positions_that_go_back_are_covered_by_what_is_bound(bindings: Bindings) -> None:
    assert bindings.get_binding(9) == Binding({"": 9}, 0)
    assert bindings.get_binding(4) == Binding({"": 9}, 0)
    assert bindings.upper == 1


def test_a_partition_that_was_never_named_begins(bindings: Bindings) -> None:
    bindings.get_binding({"a": 3})
    assert bindings.get_binding({"a": 2, "b": 0}) == Binding({"a": 3, "b": 0}, 1)
    assert bindings.times_of("b", [0]).to_pylist() == [1]
    assert bindings.times_of("c", [0, 1]).to_pylist() == [None, None]


def test_the_last_int64_is_a_position(bindings: Bindings) -> None:
    assert bindings.get_binding({"a": POSITION_MAX}) == Binding({"a": POSITION_MAX}, 0)
    assert bindings.times_of("a", [0, POSITION_MAX]).to_pylist() == [0, 0]


@pytest.mark.parametrize("column", [[], pa.array([], pa.int32()), pa.chunked_array([], pa.int64())])
def test_no_positions_have_no_times(bindings: Bindings, column: Any) -> None:
    bindings.get_binding({"a": 1})
    assert bindings.times_of("a", column).to_pylist() == []


def test_time_goes_on_without_a_position(bindings: Bindings) -> None:
    bindings.get_binding(1)
    assert bindings.advance() == 2
    assert bindings.get_binding(2) == Binding({"": 2}, 2)
    assert bindings.upto(1) == {"": 1}
    assert bindings.upto(-1) == {}


# --- what is: what docs/streaming.md refuses


WRONG_POSITIONS: list[tuple[Any, str]] = [
    ({}, "at least one partition"), ({"a": -1}, "must be in"), (-1, "must be in"),
    ({"a": POSITION_MAX + 1}, "must be in"), ({"a": 1.5}, "must be an int"), ({"a": "1"}, "must be an int"),
    ({"a": None}, "must be an int"), (True, "must be an int"), ({1: 1}, "no text"), ({"a" * 1_025: 1}, "no text"),
    ({"\ud800": 1}, "not valid Unicode"), ({str(n): 1 for n in range(PARTITIONS_MAX + 1)}, "at most 10000"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "said"), WRONG_POSITIONS)
def test_what_is_no_position_is_refused_and_nothing_is_bound(bindings: Bindings, given: Any, said: str) -> None:
    with pytest.raises(InvalidUsage, match=said):
        bindings.get_binding(given)
    assert bindings.upper == 0
    assert bindings.shard.upper().element == 0


def test_a_source_with_too_many_partitions_is_refused_also_over_several_calls(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("persist.sources.reclock.PARTITIONS_MAX", 3)
    bindings.get_binding({"a": 1, "b": 1})
    with pytest.raises(InvalidUsage, match="would have 4 partitions"):
        bindings.get_binding({"c": 1, "d": 1})
    assert bindings.get_binding({"c": 1}).time == 1


WRONG_COLUMNS: list[tuple[Any, str]] = [
    ([-1, 3], "positions are in"),
    ([1.0], "must have integers"),
    (["1"], "must have integers"),
    ([1, None], "1 nulls"),
    ([2**64], "no int64"),
    (pa.array([2**63], pa.uint64()), "no int64"),
    (7, "no int64"),
]


@pytest.mark.parametrize(("given", "said"), WRONG_COLUMNS)
def test_what_is_no_column_of_positions_is_refused(bindings: Bindings, given: Any, said: str) -> None:
    with pytest.raises(InvalidUsage, match=said):
        bindings.times_of("a", given)


@pytest.mark.parametrize("time", [-2, 2**63, 1.5, None, True])
def test_what_is_no_time_is_refused(bindings: Bindings, time: Any) -> None:
    with pytest.raises(InvalidUsage):
        bindings.upto(time)


def test_a_time_that_is_not_complete_has_no_answer_yet(bindings: Bindings) -> None:
    bindings.get_binding(1)
    with pytest.raises(Unavailable, match="wait longer, or mint"):
        bindings.upto(1)


def test_a_shard_of_something_else_holds_no_bindings(client: Client) -> None:
    client.create_shard("orders", pa.schema([("id", pa.int64())]), ["id"])
    with pytest.raises(ShardExists):
        Bindings.open(client, "orders")


def test_a_shard_that_takes_rows_away_holds_no_bindings() -> None:
    client = World().machine().client
    Bindings.open(client, "bindings").shard.retain({"age": "90d"})
    with pytest.raises(InvalidUsage, match="policy of rows"):
        Bindings.open(client, "bindings")


def test_bindings_that_somebody_took_away_are_told(client: Client) -> None:
    bindings = SmallBindings.open(client, "bindings")
    for position in range(3):
        bindings.get_binding(position)
    bindings.shard.delete("whole")
    bindings.shard.insert([{"partition": "", "position": 9, "time": 4, "whole": False}])
    with pytest.raises(Corruption, match="first ones were deleted"):
        Bindings.open(client, "bindings")


@pytest.mark.parametrize("given", [{"positions_max": 0}, {"positions_max": 1.5}, {"advances": 1}])
def test_a_minter_that_cannot_be_is_refused(bindings: Bindings, given: Any) -> None:
    with pytest.raises(InvalidUsage):
        Minter(bindings, dict, **given)


# --- clocks


def at(world: World, bindings: Bindings, position: int) -> int:
    """The time of a new position, from the start of the world."""
    return bindings.get_binding(position).time - world.true_ms


def test_times_follow_a_clock_that_the_stores_confirm() -> None:
    world = World()
    machine = world.machine()
    bindings = Bindings.open(machine.client, "bindings", clock=machine.clock)
    assert not bindings.follows_clock
    for position in range(3):
        world.pass_ms(HOUR_MS)
        assert at(world, bindings, position) == 0
    assert bindings.follows_clock
    assert at(world, bindings, 4) == 1  # two in one millisecond


def test_a_clock_that_is_ahead_harms_nobody() -> None:
    """Its owner counts on from the last time; rivals with true clocks go on with true times."""
    world = World()
    true = world.machine()
    wrong = world.machine(off_ms=YEAR_MS)
    ahead = Bindings.open(true.client, "bindings", clock=wrong.clock)
    right = Bindings.open(true.client, "bindings", clock=true.clock)
    assert at(world, right, 0) == 0
    world.pass_ms(HOUR_MS)
    assert at(world, ahead, 1) == 1 - HOUR_MS
    assert not ahead.follows_clock
    assert at(world, right, 2) == 0


def test_a_clock_that_is_behind_or_jumps_back_never_turns_times_back() -> None:
    world = World()
    machine = world.machine()
    bindings = Bindings.open(machine.client, "bindings", clock=machine.clock)
    assert at(world, bindings, 0) == 0
    machine.clock.off_ms = -HOUR_MS
    assert [at(world, bindings, position) for position in (1, 2)] == [1, 2]


def test_a_clock_that_runs_away_leads_by_no_more_than_the_look_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internal_shards, "LOOK_AHEAD_MS", 10_000)
    world = World()
    true = world.machine()
    runaway = world.machine()
    bindings = Bindings.open(true.client, "bindings", clock=runaway.clock)
    found = []
    for position in range(30):
        world.pass_ms(1_000)
        runaway.clock.off_ms += 1_000  # twice as fast as time
        found.append(at(world, bindings, position))
    assert 0 < max(found) <= 10_000


# --- after a long time


def test_opening_reads_what_came_since_the_last_whole_mint(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = SmallBindings.open(client, "bindings")
    for position in range(60):
        bindings.get_binding({"a": position, "b": 5})
    monkeypatch.setattr(reclock, "WINDOW", 2)
    fresh = SmallBindings.open(client, "bindings")
    assert fresh._known.rows <= 12
    assert fresh.heads == {"a": 59, "b": 5}
    assert bindings._known.rows <= 12
    for one in (bindings, fresh):
        assert one.upto(7) == {"a": 7, "b": 5}
        assert one.times_of("a", range(60)).to_pylist() == list(range(60))
        assert one.times_of("b", [0, 5]).to_pylist() == [0, 0]
        assert one.get_binding({"a": 17, "b": 3}) == Binding({"a": 17, "b": 5}, 17)


def test_an_upkeep_of_the_shard_changes_no_binding(client: Client) -> None:
    bindings = SmallBindings.open(client, "bindings")
    for position in range(100):
        bindings.get_binding({"a": 2 * position})
    bindings.shard.configure(history="none")  # what bindings say does not depend on history
    bindings.shard.optimize()
    bindings.shard.vacuum()
    fresh = SmallBindings.open(client, "bindings")
    assert fresh.times_of("a", range(200)).to_pylist() == [(at + 1) // 2 for at in range(199)] + [None]
