"""From which wall clock on many times of a shard are shown, over stores whose clocks the tests move."""

from __future__ import annotations

from datetime import datetime

import pyarrow as pa
import pytest

from persist.client import timestamps
from persist.client.shard import Shard
from persist.client.timestamps import load_clock_stretches
from persist.core.errors import InvalidUsage, NotReadable
from persist.core.frontier import TIME_MAX
from persist.core.state import Policy
from tests.support.clocks import Machine, World

NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64())])
ASK_S = 10.0


@pytest.fixture
def world() -> World:
    return World(policy=Policy(overlay_flush_at=8, rollup_every=4))


@pytest.fixture
def shard(machine: Machine) -> Shard:
    return machine.client.create_shard(NAME, SCHEMA, ["id"], history="7d")


def insert(world: World, shard: Shard, passes_ms: int) -> None:
    shard.insert([{"id": 1}])
    world.pass_ms(passes_ms)


def dated(shard: Shard, first: int, last: int) -> list[datetime | None]:
    """The wall clocks of these times, as a column is told them."""
    times = pa.chunked_array([range(first, last + 1)], pa.int64())
    return load_clock_stretches(shard._transport, NAME, first, last, ASK_S).of(times).to_pylist()


def test_each_time_is_told_the_wall_clock_that_it_is_told_alone(world: World, shard: Shard) -> None:
    for number in range(60):
        insert(world, shard, passes_ms=(0, 300, 700, 2_500)[number % 4])
    alone = [shard.timestamp_of(time) for time in range(60)]
    assert dated(shard, 0, 59) == alone
    assert dated(shard, 17, 23) == alone[17:24]
    assert len(set(alone)) < 60, "some share one"


def test_it_is_the_same_whenever_and_wherever_it_is_asked(world: World, shard: Shard) -> None:
    first: dict[int, datetime | None] = {}
    for number in range(40):
        insert(world, shard, passes_ms=(0, 400, 1_900)[number % 3])
        first[number] = dated(shard, number, number)[0]  # told at once, before its second is over
    world.pass_ms(86_400_000)
    shard.insert([{"id": 2}])
    assert dated(world.machine().shard(NAME), 0, 39) == [first[number] for number in range(40)]
    assert None not in first.values()


def test_a_page_goes_on_where_the_one_before_it_ended(
    world: World, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(30):
        insert(world, shard, passes_ms=1_000)
    whole = dated(shard, 0, 29)
    monkeypatch.setattr(timestamps, "PAGE", 4)
    assert dated(shard, 0, 29) == whole
    assert len(set(whole)) == 30


def test_nobody_knows_what_came_with_clocks_that_are_wrong_until_a_good_clock_asks(world: World, shard: Shard) -> None:
    insert(world, shard, passes_ms=1_000)
    other = world.machine(off_ms=-3_600_000).shard(NAME)
    insert(world, other, passes_ms=1_000)
    assert dated(other, 0, 1)[1] is None
    found = dated(shard, 0, 1)
    assert found[1] is not None
    assert dated(other, 0, 1) == found, "it stays"


def test_what_was_forgotten_is_refused_and_a_closed_shard_is_dated_to_its_end(world: World, shard: Shard) -> None:
    for _ in range(5):
        insert(world, shard, passes_ms=1_000)
    shard.forget(3)
    with pytest.raises(NotReadable, match="when 2 was written is forgotten"):
        dated(shard, 2, 4)
    known = dated(shard, 3, 4)
    shard.advance_upper(None)
    times = pa.chunked_array([[3, 4, TIME_MAX]], pa.int64())
    assert load_clock_stretches(shard._transport, NAME, 3, TIME_MAX, ASK_S).of(times).to_pylist()[:2] == known


def test_too_many_wall_clocks_at_once_are_refused(world: World, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(5):
        insert(world, shard, passes_ms=1_000)
    monkeypatch.setattr(timestamps, "STRETCHES_MAX", 4)
    with pytest.raises(InvalidUsage, match="have more than 4 wall clocks; ask for fewer"):
        dated(shard, 0, 4)
    assert len(dated(shard, 3, 4)) == 2
