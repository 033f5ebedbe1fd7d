"""Spark's plans over a shard whose parts lie in bundles: they carry the parts of their own keys."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

import persist
from persist.client.embedded import EmbeddedTransport
from persist.client.snapshot import ReadLease
from persist.commit.location import LocationSettings
from persist.core.frontier import Antichain
from persist.core.shard_view import ViewRequest
from persist.core.state import Policy
from persist.spark import change_feed, executors, planning
from persist.spark.options import Options, ReadOptions, Target
from tests.support.waiting import wait_until

SETTINGS = LocationSettings(policy=Policy(inline_part_bytes_max=0, plain_parts_max=2, bundle_parts_max=4))
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

    splits = planning.plan_snapshot(target, wanted, ("id",))
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
    splits = planning.plan_snapshot(Target.of(options), ReadOptions.of(options), ("id",))
    carried = [[part for run in split.runs for part in run.parts] for split in splits]
    assert len(splits) == 5
    assert all(part.bundle is None for parts in carried for part in parts)
    assert sum(map(len, carried)) <= PARTS + len(splits)
