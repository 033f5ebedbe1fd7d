"""Maintenance: compaction against DuckDB, a hundred thousand small appends, and a shard that is updated for ever.

    python -m bench.maintenance [--rows 10000000] [--appends 100000] [--updates 1000000] [--soak 600] [--quick]
                                [--only compaction appends updates soak]

Compaction runs in a process of its own, so that its peak memory is its own, in turns with DuckDB. Small appends are
written once without and once with a `persist maintain run` process beside, in turns of slices, so that a drifting
machine slows both alike. `--quick` is a tenth of everything or less.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.bars import bar, median, percentile
from bench.consolidation import SCHEMA as WIDE
from bench.consolidation import duckdb_compact, updates
from bench.maintenance_soak import bench_soak
from compactor.engine import EngineSettings, use_system_allocator
from compactor.worker import Worker, WorkerSettings
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.client.snapshot import ReadSettings, part_reader
from persist.commit.location import Location, open_location
from persist.core.blob_keys import is_rollup_key
from persist.core.state import State

MIB = 1024 * 1024
BUDGET = 1024 * MIB
NAME = "bench"
SMALL = pa.schema([("k", pa.string()), ("v", pa.int64()), ("s", pa.string())])
SLICE = 500  # appends of one kind before the other has its turn
QUIET_S = 600.0  # at most, until maintenance is done
BATCHES_MAX = 150  # twice those that make a merge due, and what comes while commits wait for one
STILL_S = 20.0  # without a commit and without a merge under way


@contextmanager
def opened(directory: Path) -> Iterator[tuple[Location, Client]]:
    location = open_location(f"persist://{directory}")
    client = Client(EmbeddedTransport(location))
    try:
        yield location, client
    finally:
        client.close()


# --- compaction against DuckDB


def merge_child(directory: Path) -> None:
    """Compact the shard in this process, as `persist maintain run` does; prints seconds and peak memory."""
    use_system_allocator()
    with opened(directory) as (location, _):
        engine = EngineSettings(memory_bytes=BUDGET, threads=2)  # DuckDB has two as well
        worker = Worker(location, WorkerSettings(engine=engine))
        start = time.perf_counter()
        [request] = worker.due(NAME, idle=True)
        worker.merge(NAME, request)
        print_measured(time.perf_counter() - start)


def duckdb_child(directory: Path) -> None:
    """DuckDB's COPY of the same files; prints seconds and peak memory."""
    with opened(directory) as (location, _):
        state = location.machine(NAME).state()
        runs = [run for batch in state.trace.batches for run in batch.runs]
    start = time.perf_counter()
    duckdb_compact(directory / "blob", runs, state.since.element or 0)
    print_measured(time.perf_counter() - start)


def print_measured(seconds: float) -> None:
    status = Path("/proc/self/status").read_text().split()
    print(json.dumps({"seconds": seconds, "peak_mib": int(status[status.index("VmHWM:") + 1]) / 1024}))


def in_child(name: str, directory: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.maintenance", "--child", name, "--directory", str(directory)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def bench_compaction(directory: Path, arguments: argparse.Namespace) -> list[bool]:
    ours, theirs, peaks = [], [], []
    for turn in range(arguments.rounds):
        place = directory / f"compaction-{turn}"
        with opened(place) as (_, client):
            shard = client.create_shard(NAME, WIDE.arrow, WIDE.key)
            for batch in range(arguments.batches):
                table = updates(arguments.rows // arguments.batches, batch, arguments.rows * 2 // 5)
                shard.compare_and_append(table, batch, batch + 1)
            shard.downgrade_since(arguments.batches - 1)
        theirs.append(in_child("duckdb", place)["seconds"])
        measured = in_child("merge", place)
        ours.append(measured["seconds"])
        peaks.append(measured["peak_mib"])
    ratio = median(theirs) / median(ours)
    print(f"compaction of {arguments.rows} updates: {median(ours):.2f} s, DuckDB {median(theirs):.2f} s")
    return [
        bar("compaction, times the speed of DuckDB", ratio, ">= 1.2"),
        bar("compaction, peak MiB", max(peaks), f"<= {BUDGET // MIB + 300}"),
    ]


# --- small appends


@dataclass
class Watched:
    """What was seen of one shard while it was written."""

    seconds: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    most: list[int] = field(default_factory=list)  # rows of the batches when they were most
    appended: int = 0

    def append(self, shard: Shard, table: pa.Table, location: Location) -> None:
        start = time.perf_counter()
        shard.insert(table)
        self.seconds.append(time.perf_counter() - start)
        self.appended += table.num_rows
        state = location.machine(NAME).state()
        held = [batch.rows for batch in state.trace.batches if batch.runs]
        self.batches.append(len(held))
        if len(held) == max(self.batches, default=0):
            self.most = held
        self.rows.append(state.trace.rows)


@contextmanager
def maintained(directory: Path) -> Iterator[dict[str, Any]]:
    """A compactor and collector process beside, as a server starts it. Its figures are there when it has ended."""
    command = [sys.executable, "-m", "rpc.cli", "maintain", "run", "--dir", str(directory), "--nice", "5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    process.stderr.readline()
    figures: dict[str, Any] = {}
    try:
        yield figures
    finally:
        process.terminate()
        _, log = process.communicate()
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    figures.update(next(line for line in lines if line["message"] == "ended"))


def small_rows(number: int) -> pa.Table:
    keys = [f"{(number * 7919 + row * 104_729) % 10_000_019:016d}" for row in range(100)]
    return pa.table({"k": keys, "v": list(range(100)), "s": [f"value of row {row:016d} of 100" for row in range(100)]})


def bench_appends(directory: Path, arguments: argparse.Namespace) -> list[bool]:
    alone, beside = Watched(), Watched()
    with (
        opened(directory / "alone") as (quiet, quiet_client),
        opened(directory / "beside") as (busy, busy_client),
        maintained(directory / "beside") as figures,
    ):
        quiet_shard = quiet_client.create_shard(NAME, SMALL, ["k"])
        busy_shard = busy_client.create_shard(NAME, SMALL, ["k"])
        for start in range(0, arguments.appends, SLICE):
            count = min(SLICE, arguments.appends - start)
            if start % (10 * SLICE) == 0:  # all along, enough to know its p99, and few enough for what nobody merges
                for number in range(start, start + count):
                    alone.append(quiet_shard, small_rows(number), quiet)
            for number in range(start, start + count):
                beside.append(busy_shard, small_rows(number), busy)
        state = settled(busy)
        upkeep = vars(busy.machine(NAME).metrics)
        space = stored_bytes(busy, state) / consolidated_bytes(directory, busy, state)
    written = state.byte_count  # by the writer
    amplification = (written + upkeep["upkeep_bytes"] + figures["bytes_written"]) / written
    applied, refused = figures["merges_applied"], figures["merges_refused"]
    print(
        f"{arguments.appends} appends: p50 {1000 * median(beside.seconds):.2f} ms, "
        f"p99 alone {1000 * percentile(alone.seconds, 0.99):.2f} ms, "
        f"maintained {1000 * percentile(beside.seconds, 0.99):.2f} ms; batches p50 {median(beside.batches):.0f}, "
        f"p99 {percentile(beside.batches, 0.99)}, at rest {len(state.trace.batches)}"
    )
    print(f"rows of the batches when they were most: {beside.most}")
    print(f"upkeep {upkeep}; workers: {applied} merges applied, {refused} refused")
    p99 = percentile(beside.seconds, 0.99) / percentile(alone.seconds, 0.99)
    return [
        bar("small appends, most batches in state", max(beside.batches), f"<= {BATCHES_MAX}"),
        bar("small appends, write amplification", amplification, "<= 8"),
        bar("small appends, space at rest against consolidated", space, "<= 1.3"),
        bar("small appends, writer's p99 against no maintenance", p99, "<= 2"),
    ]


def settled(location: Location) -> State:
    """The State once nobody has anything to do any more."""
    machine = location.machine(NAME)
    deadline = time.monotonic() + QUIET_S
    state, since = machine.refresh(), time.monotonic()
    while time.monotonic() < deadline and time.monotonic() - since < STILL_S:
        time.sleep(0.5)
        seqno, state = state.seqno, machine.refresh()
        if state.seqno != seqno or state.claims:  # a large merge commits nothing for a while
            since = time.monotonic()
    return state


def stored_bytes(location: Location, state: State) -> int:
    """Bytes of rows that are kept: all parts in the blob store, named or not, and the inline ones."""
    blobs = sum(stat.size for stat in location.blob.list(f"{state.shard_id}/") if not is_rollup_key(stat.key))
    return blobs + state.trace.inline_bytes


def consolidated_bytes(directory: Path, location: Location, state: State) -> int:
    """What the same updates take as one run, merged by hand: at the times that the shard still tells apart."""
    with opened(directory / "consolidated") as (_, client):
        schema, reader = part_reader(EmbeddedTransport(location), state, ReadSettings())
        shard = client.create_shard(NAME, schema.arrow, schema.key)
        held = [run for batch in state.trace.batches for run in batch.runs]
        runs = shard.open_writer().stage(reader.read_range(held, since=state.since.element), 0)
    return sum(part.size for run in runs for part in run.parts)


# --- updates


def bench_updates(directory: Path, arguments: argparse.Namespace) -> list[bool]:
    """1,000 keys updated for ever, 100 at a time, since following upper."""
    keys, step = 1_000, 100
    seen = Watched()
    with (
        opened(directory / "updates") as (location, client),
        maintained(directory / "updates"),
    ):
        shard = client.create_shard(NAME, SMALL, ["k"])
        shard.insert(fresh_rows(keys))
        values = [0] * keys
        for number in range(arguments.updates // step):
            taken = [(number * step + n) % keys for n in range(step)]
            table = changes(taken, values)
            for key in taken:
                values[key] += 1
            seen.append(shard, table, location)
            if number % 5 == 4:
                shard.downgrade_since(number)
        settled(location)
    print(f"{arguments.updates} updates: rows p50 {median(seen.rows):.0f}, p99 {percentile(seen.rows, 0.99)}")
    return [bar("updates, most rows against live rows", max(seen.rows) / keys, "<= 3")]


def fresh_rows(keys: int) -> pa.Table:
    return pa.table({"k": [f"{key:016d}" for key in range(keys)], "v": [0] * keys, "s": [f"value {0:026d}"] * keys})


def changes(keys: list[int], values: list[int]) -> pa.Table:
    """Every key's old row retracted, its new one inserted."""
    rows = [(key, values[key] + new, 1 if new else -1) for key in keys for new in (0, 1)]
    return pa.table(
        {
            "k": [f"{key:016d}" for key, _, _ in rows],
            "v": [value for _, value, _ in rows],
            "s": [f"value {value:026d}" for _, value, _ in rows],
            "__diff": [diff for _, _, diff in rows],
        }
    )


BENCHES: dict[str, Callable[[Path, argparse.Namespace], list[bool]]] = {
    "compaction": bench_compaction,
    "appends": bench_appends,
    "updates": bench_updates,
    "soak": lambda directory, arguments: bench_soak(directory, arguments.soak),
}
QUICK = {"rows": 1_000_000, "rounds": 1, "appends": 5_000, "updates": 50_000, "soak": 20.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--appends", type=int, default=100_000)
    parser.add_argument("--updates", type=int, default=1_000_000)
    parser.add_argument("--soak", type=float, default=600.0, help="seconds of the soak (600)")
    parser.add_argument("--quick", action="store_true", help="small sizes; what is given beside it is ignored")
    parser.add_argument("--only", nargs="*", choices=list(BENCHES), default=list(BENCHES))
    parser.add_argument("--child", choices=["merge", "duckdb"])
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        vars(arguments).update(QUICK)
    if arguments.child:
        {"merge": merge_child, "duckdb": duckdb_child}[arguments.child](arguments.directory)
        return
    results: list[bool] = []
    with tempfile.TemporaryDirectory() as name:
        for bench in arguments.only:
            results += BENCHES[bench](Path(name), arguments)
    print(f"{sum(results)} of {len(results)} bars hold")


if __name__ == "__main__":
    main()
