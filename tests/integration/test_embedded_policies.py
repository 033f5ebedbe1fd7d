"""Embedded programs run policies of rows and ladders of tags, and collect what nobody needs, as they commit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from unittest.mock import patch

import pyarrow as pa
import pytest

import persist
from compactor.on_demand import maintain
from persist.client import row_retention
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.location import Location, LocationSettings
from persist.core.ids import SeqNo, family_of, shard_id_of
from persist.core.state import ROLLUP_LEAST, Policy
from persist.maintenance.collector import collect_in_background
from tests.support.clocks import DAY_MS, HOUR_MS, START_MS, Ids, World
from tests.support.clocks import Clock as MachineClock
from tests.support.location import InlineBackground
from tests.support.waiting import WAIT_S, wait_until

SCHEMA = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])


@pytest.fixture
def world() -> World:
    found = World()
    found.true_ms = START_MS // DAY_MS * DAY_MS
    return found


def program(world: World, *, collects: bool = True) -> Client:
    """An embedded program whose upkeep is done at once."""
    clock = MachineClock(world, 0)
    settings = LocationSettings(world.policy, check_all=True, collects=collect_in_background if collects else None)
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


# --- its location stays small by itself: 100 live rows had 193 blobs and 1,725 log entries


VALUES = pa.schema([("k", pa.int64()), ("v", pa.string())])
SINCE_EVERY = 50
INSERTS = 1_200
LIVE_ROWS = 100
BLOBS_MAX = 20  # 26 if nothing is collected
ENTRIES_MAX = 450
assert Policy().rollup_every < INSERTS - ENTRIES_MAX // 4
ROLLUP = ROLLUP_LEAST  # commits that bring LARGE rows, after which one is due
LARGE = "x" * 20_000


def location_of(client: persist.Client) -> Location:
    assert isinstance(client.transport, EmbeddedTransport)
    return client.transport.location


def kept(client: persist.Client) -> tuple[int, int]:
    """Blobs and log entries."""
    location = location_of(client)
    blobs = sum(1 for _ in location.blob.list(family_of(shard_id_of("orders"))))
    return blobs, len(location.versions.diffs("orders", SeqNo(1), 10_000))


def small(client: persist.Client) -> Callable[[], bool]:
    def holds() -> bool:
        blobs, entries = kept(client)
        return blobs < BLOBS_MAX and entries < ENTRIES_MAX

    return holds


def insert_and_replace(shard: persist.Shard) -> None:
    """Row by row: `LIVE_ROWS` are left, the others were taken away again."""
    for number in range(INSERTS):
        key = number % LIVE_ROWS
        rows = [{"k": key, "v": f"value {number}", "__diff": 1}]
        if number >= LIVE_ROWS:
            rows.append({"k": key, "v": f"value {number - LIVE_ROWS}", "__diff": -1})
        shard.insert(rows)
        if number % SINCE_EVERY == SINCE_EVERY - 1:
            shard.downgrade_since(number)


def test_a_program_that_only_writes_keeps_its_location_small(tmp_path: Path) -> None:
    with persist.connect(f"persist://{tmp_path}/data") as client:
        shard = client.create_shard("orders", VALUES, ["k"])
        insert_and_replace(shard)
        wait_until(small(client), "the background has let go what nobody needs")
        assert shard.snapshot().to_arrow().num_rows == LIVE_ROWS


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    with persist.connect(f"persist://{tmp_path}/data", collect=False) as client:
        shard = client.create_shard("orders", VALUES, ["k"])
        for number in range(3 * ROLLUP):
            shard.insert([{"k": number, "v": LARGE}])
        assert kept(client)[1] > 3 * ROLLUP


def test_a_dropped_shard_is_deleted_by_who_dropped_it(tmp_path: Path) -> None:
    with persist.connect(f"persist://{tmp_path}/data") as client:
        shard = client.create_shard("orders", VALUES, ["k"])
        for _ in range(3):
            shard.insert(pa.table({"k": range(5_000), "v": ["before"] * 5_000}))
        assert kept(client)[0] > 1
        shard.drop()
        wait_until(lambda: kept(client)[0] == 1, "the blobs of what was dropped are gone")


def test_collections_keep_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that deletes slowly: commits go on meanwhile."""
    with persist.connect(f"persist://{tmp_path}/data") as client:
        shard = client.create_shard("orders", VALUES, ["k"])
        location = location_of(client)
        begun, may_end, ended = threading.Event(), threading.Event(), threading.Event()
        real = location.consensus.truncate

        def truncate(key: str, seqno: int) -> int:
            begun.set()
            may_end.wait(WAIT_S)
            ended.set()
            return real(key, seqno)

        monkeypatch.setattr(location.consensus, "truncate", truncate)
        try:
            for number in range(5 * ROLLUP):
                shard.insert([{"k": number, "v": LARGE}])
                assert number < 3 * ROLLUP or begun.wait(WAIT_S)
            assert shard.upper().element == 5 * ROLLUP
            assert not ended.is_set(), "commits waited until it ended"
        finally:
            may_end.set()
