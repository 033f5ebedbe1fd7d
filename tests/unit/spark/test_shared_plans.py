"""Small loads that come often, as a dashboard makes them: they share leases, and every plan can be read."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import LongType, StructField, StructType

import persist
from persist.client.embedded import EmbeddedTransport
from persist.client.lease_pool import PLANS_S, LeaseKind
from persist.client.snapshot import ReadLease
from persist.commit.location import LocationSettings
from persist.core.frontier import Antichain
from persist.core.shard_view import ViewRequest
from persist.core.state import Policy, State
from persist.spark import change_feed, executors
from persist.spark.batch_io import SnapshotReader, plan_snapshot
from persist.spark.options import Options, ReadOptions, Target
from tests.support.location import TestClock, UntendedPool
from tests.support.waiting import wait_until

SCHEMA = StructType([StructField("id", LongType())])
LOADS = 200
LEASE_S = 900


class Dashboard:
    def __init__(self, directory: Path) -> None:
        options = Options({"url": f"persist://{directory}", "path": "orders"})
        self.target = Target.of(options)
        self.transport = executors.transport(self.target.connection)
        self.clock = TestClock()  # stands still: a minute is not over, however slow the machine
        self.pool = UntendedPool(self.clock)
        self.transport.leases = self.pool  # type: ignore[attr-defined]
        self.reader = SnapshotReader(self.target, ReadOptions.of(options), SCHEMA)
        self.client = persist.connect(f"persist://{directory}")
        self.shard = self.client.create_shard("orders", pa.schema([("id", pa.int64())]), ["id"])

    def load(self) -> InputPartition:
        (found,) = self.reader.partitions()
        return found

    def rows(self, partition: InputPartition) -> int:
        return sum(batch.num_rows for batch in self.reader.read(partition))

    @property
    def state(self) -> State:
        return self.transport.location.machine("orders").refresh()  # type: ignore[attr-defined, no-any-return]


def test_many_loads_leave_a_few_readers_and_few_commits(tmp_path: Path) -> None:
    board = Dashboard(tmp_path)
    board.shard.insert([{"id": 1}])
    before = board.state.seqno
    for _ in range(LOADS):
        board.load()
    assert len(board.state.leased_readers) == 1
    assert board.state.seqno - before == 1
    board.client.close()


def test_each_load_shows_the_latest_rows_and_can_be_read_again_and_elsewhere(tmp_path: Path) -> None:
    board = Dashboard(tmp_path)
    plans = []
    for number in range(1, 20):
        board.shard.insert([{"id": number}])
        plans.append(pickle.loads(pickle.dumps(board.load())))
    assert [board.rows(plan) for plan in plans] == list(range(1, 20))
    assert [board.rows(plan) for plan in plans] == list(range(1, 20))
    assert len({plan.value.reader for plan in plans}) == 1
    board.client.close()


def test_a_plan_keeps_what_it_needs_whatever_is_forgotten_and_whichever_loads_came_before(tmp_path: Path) -> None:
    board = Dashboard(tmp_path)
    board.shard.insert([{"id": 1}])
    plan = board.load()
    for number in range(2, 6):
        board.shard.insert([{"id": number}])
        board.load()
    board.shard.downgrade_since(4)
    assert board.rows(plan) == 1
    assert board.shard.since() <= persist.Antichain(plan.value.as_of)
    board.client.close()


def test_after_its_time_a_lease_takes_no_new_plans_and_is_not_given_back(tmp_path: Path) -> None:
    board = Dashboard(tmp_path)
    board.shard.insert([{"id": 1}])
    first = board.load()
    board.clock.sleep(PLANS_S)
    board.pool.tend()
    second = board.load()
    assert first.value.reader != second.value.reader
    assert {first.value.reader, second.value.reader} <= set(board.state.leased_readers), "who reads it renews it"
    board.pool.close()
    assert board.rows(first) == board.rows(second) == 1
    board.client.close()


@pytest.mark.parametrize(("lease_s", "takes_s"), [(900, 60.0), (30, 2.0), (2, 2 / 15)])
def test_of_a_plan_no_more_than_a_fifteenth_of_its_lease_has_passed(lease_s: int, takes_s: float) -> None:
    kind = LeaseKind("orders", persist.core.ids.ShardId("s"), "spark snapshot", lease_s * 1000, is_plan=True)
    assert kind.takes_s == pytest.approx(takes_s)


def test_a_load_that_fails_leaves_no_hold(tmp_path: Path) -> None:
    board = Dashboard(tmp_path)
    board.shard.insert([{"id": 1}])
    options = Options({"url": f"persist://{tmp_path}", "path": "orders", "where": "no_such = 1"})
    bad = SnapshotReader(board.target, ReadOptions.of(options), SCHEMA)
    with pytest.raises(persist.InvalidUsage):
        bad.partitions()
    board.pool.let_go("orders")
    assert board.state.leased_readers == {}
    board.client.close()


# --- spark's plans over a shard whose parts lie in bundles: they carry the parts of their own keys

SETTINGS = LocationSettings(policy=Policy(inline_part_bytes_max=0, plain_parts_max=1))
PARTS, ROWS = 20, 10


def bundled(folder: Path) -> None:
    """A shard with one batch of parts of ten keys each."""
    with persist.connect(f"persist://{folder}", location=SETTINGS) as client:
        assert isinstance(client.transport, EmbeddedTransport)
        writer = client.create_shard("orders", pa.schema([("id", pa.int64())]), ["id"]).open_writer()
        staged = [writer.stage([{"id": n * ROWS + k} for k in range(ROWS)], None) for n in range(PARTS)]
        writer.commit_insert(tuple(run for runs in staged for run in runs))
        machine = client.transport.location.machine("orders")
        wait_until(lambda: all(part.bundle for part in machine.refresh().trace.parts()), "the parts are bundled")


def test_a_plan_of_few_keys_carries_their_parts(tmp_path: Path) -> None:
    bundled(tmp_path)
    options = Options({"url": f"persist://{tmp_path}", "path": "orders", "startKey": "[55]", "endKey": "[75]"})
    target, wanted = Target.of(options), ReadOptions.of(options)
    transport = executors.transport(target.connection)

    splits = plan_snapshot(target, wanted, ("id",))
    parts = {part.id: part for split in splits for run in split.runs for part in run.parts}
    assert [part.bundle for part in parts.values()] == [None] * 3
    rows = pa.concat_tables(table for split in splits for table in split.read(transport))
    assert rows.column("id").to_pylist() == list(range(55, 75))

    view = transport.view("orders", ViewRequest())
    lease = ReadLease.open(transport, "orders", Antichain(0), "test", target.connection.handles.read)
    interval = change_feed.Interval(0, Antichain(1), snapshot=False)
    partitions = change_feed.plan_changes(target, wanted, view, interval, lease, ["id"])
    assert {part.id for one in partitions for part in one.parts} == set(parts)
    found = pa.concat_tables(table for one in partitions for table in one.read(transport))
    assert sorted(found.column("id").to_pylist()) == list(range(55, 75))


def test_each_split_of_a_plan_of_all_keys_carries_only_its_own_parts(tmp_path: Path) -> None:
    bundled(tmp_path)
    options = Options({"url": f"persist://{tmp_path}", "path": "orders", "numPartitions": "5"})
    splits = plan_snapshot(Target.of(options), ReadOptions.of(options), ("id",))
    carried = [[part for run in split.runs for part in run.parts] for split in splits]
    assert len(splits) == 5
    assert all(part.bundle is None for parts in carried for part in parts)
    assert sum(map(len, carried)) <= PARTS + len(splits)
