"""Merges on Spark executors give what merges in one process give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from compactor.engine import EngineSettings
from compactor.spark_engine import SparkEngine
from compactor.worker import Worker, WorkerSettings
from persist import connect

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
SETTINGS = EngineSettings(memory_bytes=64 << 20, part_bytes_target=5_000)


@pytest.mark.smoke
@pytest.mark.proof
def test_a_merge_on_executors_changes_nothing_that_can_be_seen(spark: Any, tmp_path: Path) -> None:
    with connect(f"persist://{tmp_path}/x") as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        for time in range(6):
            keys = [f"k{n:07d}" for n in range(20_000)]
            retracted = {"__diff": pa.array([-1] * len(keys))} if time else {}
            table = pa.table({"k": keys, "v": [time] * len(keys)})
            if retracted:
                old = pa.table({"k": keys, "v": [time - 1] * len(keys), **retracted})
                table = pa.concat_tables([table.append_column("__diff", pa.array([1] * len(keys))), old])
            shard.compare_and_append(table, time, time + 1)
        assert shard.forget(5).element == 5
        before = shard.snapshot(5).to_arrow()
        location = client.transport.location  # type: ignore[attr-defined]
        engine = SparkEngine(spark, location.blob, SETTINGS)
        worker = Worker(location, replace(WorkerSettings(), engine=SETTINGS), engine=engine)
        assert worker.run("orders", idle=True) >= 1
        [batch] = location.machine("orders").refresh().trace.batches
        assert batch.rows == 20_000
        assert batch.part_count > 1
        assert shard.snapshot(5).to_arrow().equals(before)
