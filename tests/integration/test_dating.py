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
