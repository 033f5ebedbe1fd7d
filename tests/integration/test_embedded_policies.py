"""Embedded programs run policies of rows and ladders of tags by themselves, as they commit."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pytest

import persist
from compactor.on_demand import maintain
from persist.client import row_retention
from persist.client.client import Client
from persist.client.shard import Shard
from persist.commit.committer import MachineSettings
from persist.commit.location import Location, LocationSettings
from persist.maintenance.collector import collect_in_background
from tests.support.clocks import DAY_MS, HOUR_MS, START_MS, Ids, World
from tests.support.clocks import Clock as MachineClock
from tests.support.location import InlineBackground
from tests.support.waiting import wait_until

SCHEMA = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])


@pytest.fixture
def world() -> World:
    found = World()
    found.true_ms = START_MS // DAY_MS * DAY_MS
    return found


def program(world: World, *, collects: bool = True) -> Client:
    """An embedded program whose upkeep is done at once."""
    clock = MachineClock(world, 0)
    settings = LocationSettings(
        world.policy, MachineSettings(check_all=True), collects=collect_in_background if collects else None
    )
    world.machines += 1
    location = Location(
        world.blob,
        world.consensus,
        settings=settings,
        clock=clock,
        ids=Ids(clock, world.machines),
        background=InlineBackground(),
    )
    return Client(row_retention.maintained_transport(location, maintain))


def live(world: World, shard: Shard, days: int) -> list[int]:
    """Rows of a shard to which one comes each day."""
    for number in range(days):
        shard.insert([{"id": number, "at": None}])
        world.pass_ms(DAY_MS)
    return ids(shard)


def ids(shard: Shard) -> list[int]:
    found: list[int] = shard.snapshot().to_arrow()["id"].to_pylist()
    return found


def test_it_truncates_by_age_and_sets_tags_as_it_commits(world: World) -> None:
    shard = program(world).create_shard("orders", SCHEMA, ["id"], history="1d")
    shard.retain({"age": "3d", "cut_every": "1d", "tags": {"daily": 2}})
    left = live(world, shard, 14)
    assert left[0] >= 14 - 3 - 3 - 2, "rows live for up to twice the age, until the commit after that"
    assert len(shard.tags()) == 2
    assert shard.retention().done_before > 0


def test_it_takes_rows_by_a_column_as_it_commits(world: World) -> None:
    shard = program(world).create_shard("orders", SCHEMA, ["id"], history="1d")
    shard.retain({"column": "at", "column_age": "10d", "cut_every": "1d"})
    old = datetime.fromtimestamp(world.true_ms / 1000, UTC) - timedelta(days=9)
    shard.insert([{"id": 1, "at": old}, {"id": 2, "at": None}])
    assert ids(shard) == [1, 2]
    world.pass_ms(2 * DAY_MS)
    shard.insert([{"id": 3, "at": None}])
    assert ids(shard) == [2, 3]


def test_where_upkeep_is_off_no_policy_runs(world: World) -> None:
    shard = program(world, collects=False).create_shard("orders", SCHEMA, ["id"], history="1d")
    shard.retain({"age": "3d", "cut_every": "1d"})
    assert live(world, shard, 14) == list(range(14))
    shard.run_retention()
    assert shard.retention().cuts > 0, "by hand it does"


def test_it_costs_nothing_without_a_policy_and_little_with_one(world: World) -> None:
    client = program(world)
    plain, kept = (client.create_shard(name, SCHEMA, ["id"], history="1d") for name in ("plain", "kept"))
    kept.retain({"age": "3d", "cut_every": "1h"})
    with patch.object(row_retention, "run_retention", side_effect=row_retention.run_retention) as run:
        for number in range(50):
            plain.insert([{"id": number, "at": None}])
            kept.insert([{"id": number, "at": None}])
            world.pass_ms(HOUR_MS // 100)
        assert run.call_count <= 1, "once for each cut at most"


def test_one_policy_runs_at_a_time(world: World) -> None:
    """The others have their turn with a later commit: so a long truncation leaves room for merges."""
    client = program(world)
    one, other = (client.create_shard(name, SCHEMA, ["id"], history="1d") for name in ("one", "other"))
    ran: list[str] = []

    def run(name: str) -> None:
        ran.append(name)
        if name == "one":
            other.insert([{"id": 1, "at": None}])

    for shard in (one, other):
        shard.retain({"age": "3d"})
    client.transport.location.retain_with(run)  # type: ignore[attr-defined]
    world.pass_ms(DAY_MS)
    one.insert([{"id": 1, "at": None}])
    assert set(ran) == {"one"}
    world.pass_ms(DAY_MS)
    other.insert([{"id": 2, "at": None}])
    assert ran[-1] == "other"


def test_a_directory(tmp_path: Path) -> None:
    long_ago = datetime(2020, 1, 1, tzinfo=UTC)
    with persist.connect(f"persist://{tmp_path}/data") as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        shard.retain({"column": "at", "column_age": "30d"})
        shard.insert([{"id": 1, "at": long_ago}])

        def is_gone() -> bool:
            shard.insert([{"id": 2, "at": None}])
            return 1 not in ids(shard)

        wait_until(is_gone, "the policy runs as the program commits")
    with persist.connect(f"persist://{tmp_path}/other", collect=False) as client:
        shard = client.create_shard("orders", SCHEMA, ["id"])
        shard.retain({"column": "at", "column_age": "30d"})
        shard.insert([{"id": 1, "at": long_ago}])
    with persist.connect(f"persist://{tmp_path}/other", collect=False) as client:
        assert ids(client.shard("orders")) == [1]
