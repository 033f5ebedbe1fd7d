"""Restores and truncations: what they read and hold, beside a snapshot of the same shard. `bench/history.py` runs it.

A shard of 1,000 batches is merged, its history kept, so that every row group has rows of every time. A snapshot reads
it, the last batch is undone, the later half is undone, the first quarter is truncated: each in a process of its own, so
that the peak of memory is its.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bench.bars import bar
from bench.maintenance import opened
from bench.marks import whole
from compactor.engine import EngineSettings
from compactor.worker import WorkerSettings
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.location import LocationSettings, open_location

NAME = "restored"
SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64()), ("s", pa.string())])
BATCHES = 1_000
ROWS = 5_000_000


def rows_of(ids: np.ndarray, version: int) -> dict[str, pa.Array]:
    """A 16-byte key, a number and a string for each id; rows of another version have other numbers."""
    value = (ids * 7919 + version) % 1_000_003
    return {
        "k": pc.binary_join_element_wise("key-", pc.utf8_lpad(pa.array(ids).cast(pa.string()), 12, "0"), ""),
        "v": pa.array(value),
        "s": pc.binary_join_element_wise("value-of-the-key-", pa.array(value).cast(pa.string()), ""),
    }


def make(directory: Path) -> None:
    with opened(directory) as (location, client):
        shard = client.create_shard(NAME, SCHEMA, ["k"])
        ids = np.random.default_rng(1).permutation(ROWS)
        for number, some in enumerate(np.array_split(ids, BATCHES)):
            shard.compare_and_append(pa.table(rows_of(some, 0)), number, number + 1)
    with opened(directory) as (location, client):  # the merges of the one before have ended
        whole(location, NAME, WorkerSettings(engine=EngineSettings(threads=2)))
        assert len(location.machine(NAME).refresh().trace.batches) == 1, "all of it is one batch"


def snapshot(shard: Shard) -> int:
    return sum(len(table) for table in shard.snapshot(BATCHES - 1).batches())


def undo(shard: Shard, as_of: int) -> int:
    return shard.restore(as_of).removed or 0


WORKS: dict[str, Callable[[Shard], int]] = {
    "snapshot": snapshot,
    "undo one": lambda shard: undo(shard, BATCHES - 2),
    "undo half": lambda shard: undo(shard, BATCHES // 2 - 1),
    "truncate a quarter": lambda shard: shard.truncate(BATCHES // 4).removed or 0,
}


def child(name: str, directory: Path) -> None:
    """Do one of the works, and print what it took."""
    location = open_location(f"persist://{directory}", settings=LocationSettings(metered=True))
    with Client(EmbeddedTransport(location)) as client:
        shard, start = client.shard(NAME), time.perf_counter()
        rows = WORKS[name](shard)
        seconds = time.perf_counter() - start
        totals = location.store_calls.totals().items()
        read = sum(moved for (store, verb, _), (_, _, moved) in totals if store == "blob" and verb.startswith("get"))
    status = Path("/proc/self/status").read_text().split()
    peak = int(status[status.index("VmHWM:") + 1]) / 1024
    print(json.dumps({"rows": rows, "seconds": seconds, "read": read, "peak_mib": peak}))


def bench_restore(directory: Path) -> None:
    """The bars; the shard is in `directory`, made there if it is not."""
    if not directory.exists():
        make(directory)
    found = {}
    for name in WORKS:
        command = [sys.executable, "-m", "bench.undo", name, str(directory)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found[name] = one = json.loads(done.stdout.splitlines()[-1])
        read = one["read"] / 1e6
        print(
            f"{name}: {one['rows']:,} rows, {one['seconds']:.1f} s, {read:.0f} MB read, peak {one['peak_mib']:.0f} MiB"
        )
    for name in ("undo one", "undo half"):
        bar(f"{name}: bytes read to those of a snapshot", found[name]["read"] / found["snapshot"]["read"], "<= 2")
    for name in ("undo one", "undo half", "truncate a quarter"):
        bar(f"{name}: peak MiB", found[name]["peak_mib"], "<= 400")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=list(WORKS))
    parser.add_argument("directory", type=Path)
    given = parser.parse_args()
    child(given.work, given.directory)
