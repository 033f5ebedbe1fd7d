"""Small loads that come often, as a dashboard makes them: they share leases, and every plan can be read."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.types import LongType, StructField, StructType

import persist
from persist.client.lease_pool import PLANS_S, Kind, LeasePool
from persist.core.state import State
from persist.spark import executors
from persist.spark.batch_io import SnapshotReader
from persist.spark.options import Options, ReadOptions, Target
from tests.support.location import TestClock

SCHEMA = StructType([StructField("id", LongType())])
LOADS = 200
LEASE_S = 900


class Untended(LeasePool):
    """A pool that is tended by hand."""

    def _begin_to_tend(self) -> None:
        return


class Dashboard:
    def __init__(self, directory: Path) -> None:
        options = Options({"url": f"persist://{directory}", "path": "orders"})
        self.target = Target.of(options)
        self.transport = executors.transport(self.target.connection)
        self.clock = TestClock()  # stands still: a minute is not over, however slow the machine
        self.pool = Untended(self.clock)
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
    kind = Kind("orders", persist.core.ids.ShardId("s"), "spark snapshot", lease_s * 1000, is_plan=True)
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
