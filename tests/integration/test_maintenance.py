"""Maintenance as processes: the commands, the memory budget, and writers that are slowed but never failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from persist import connect
from tests.support.forked import ran

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
MIB = 1024 * 1024


def rows(number: int, count: int = 50) -> pa.Table:
    return pa.table({"k": [f"k{(number * 31 + n) % 500}" for n in range(count)], "v": [number] * count})


def test_once_compacts_collects_and_ends(tmp_path: Path) -> None:
    with connect(f"persist://{tmp_path}/x") as client:
        shard = client.create_shard("orders", SCHEMA, ["k"])
        other = client.create_shard("other", SCHEMA, ["k"])
        for number in range(10):  # fewer than upkeep merges by itself
            shard.insert(rows(number))
            other.insert(rows(number))
        before = shard.snapshot().to_arrow()
        done = ran("maintain", "run", "--dir", f"{tmp_path}/x", "--once", "--shards", "ord*")
        assert done.returncode == 0, done.stderr
        figures = json.loads(done.stdout)
        assert figures["merges_applied"] >= 1
        assert list(figures["shards"]) == ["orders"]
        location = client.transport.location  # type: ignore[attr-defined]
        assert len(location.machine("orders").refresh().trace.batches) == 1
        assert len(location.machine("other").refresh().trace.batches) == 10
        assert shard.snapshot().to_arrow().equals(before)
        collected = ran("maintain", "gc", "--dir", f"{tmp_path}/x", "--once")
        assert collected.returncode == 0, collected.stderr
        swept = ran("maintain", "sweep", "--dir", f"{tmp_path}/x", "--dry-run")
        assert swept.returncode == 0, swept.stderr
        assert json.loads(swept.stdout)["orphans_deleted"] == 0


MERGE_ALONE = """
import sys
from pathlib import Path
from compactor.engine import EngineSettings
from compactor.engine import use_system_allocator
from compactor.worker import Worker, WorkerSettings
from persist.commit.location import open_location
use_system_allocator()
location = open_location(sys.argv[1])
budget = int(sys.argv[2])

def peak():  # not ru_maxrss: that one remembers what the process was before it became this program
    status = Path("/proc/self/status").read_text().split()
    return int(status[status.index("VmHWM:") + 1])

before = peak()
engine = EngineSettings(memory_bytes=budget, part_bytes_target=budget // 8)
applied = Worker(location, WorkerSettings(engine=engine)).run("wide", idle=True)
print(applied, (peak() - before) * 1024)
location.close()
"""


@pytest.mark.proof
def test_a_merge_of_twenty_times_its_budget_stays_within_it(tmp_path: Path) -> None:
    """Measured in a process of its own: what it takes beyond what it had when it began."""
    budget = 24 * MIB
    generator = np.random.default_rng(1)
    schema = pa.schema([("k", pa.int64()), ("noise", pa.binary(64))])
    total = 0
    with connect(f"persist://{tmp_path}/x") as client:
        shard = client.create_shard("wide", schema, ["k"])
        number = 0
        while total < 20 * budget:
            keys = generator.integers(0, 1 << 40, 400_000)
            noise = pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(64), len(keys), [None, pa.py_buffer(generator.bytes(64 * len(keys)))]
            )
            table = pa.table({"k": keys, "noise": noise})
            shard.insert(table)
            total += table.nbytes
            number += len(keys)
        url = f"persist://{tmp_path}/x"
        done = subprocess.run(
            [sys.executable, "-c", MERGE_ALONE, url, str(budget)], capture_output=True, text=True, check=True
        )
        applied, grown = map(int, done.stdout.split())
        assert applied >= 1
        # Beyond the budget: Arrow's own buffers, and one encoded row group (5 MiB here) for each of the runs.
        assert 0 < grown <= budget + 300 * MIB < total, f"{grown / MIB:.0f} MiB for {total / MIB:.0f} MiB of rows"
        [batch] = client.transport.location.machine("wide").refresh().trace.batches  # type: ignore[attr-defined]
        assert batch.rows == number
        assert len(batch.runs) == 1
