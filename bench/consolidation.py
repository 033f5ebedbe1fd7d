"""Consolidation: compacting sorted batches against DuckDB, and reading the compacted shard against pyarrow.

    python -m bench.consolidation [--rows 10000000] [--batches 64] [--rounds 3]

Every measured run is a process of its own, so that its peak memory is its own; rounds are interleaved.
"""

from __future__ import annotations

import argparse
import json
import pickle
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq

from bench.bars import bar, median
from blob.file import FileBlob
from persist.core.batch import Part, Run
from persist.core.ids import WriterId, mint, shard_id_of
from persist.parts import PartReader, PartSink, PartWriter, ShardSchema, read_ahead, stage

MIB = 1024 * 1024
MEMORY_BYTES = 1024 * MIB
SHARD = shard_id_of("bench")
SCHEMA = ShardSchema(pa.schema([("k", pa.string()), ("v", pa.int64()), ("s", pa.string())]), ("k",))


class Ids:
    """Fresh ids."""

    def uuid7(self) -> str:
        return secrets.token_hex(16)


def updates(rows: int, batch: int, keys: int) -> pa.Table:
    """One batch: 16-byte keys, a number, a string that follows from both; a third of the diffs retract."""
    rng = np.random.default_rng(batch)
    key = rng.integers(0, keys, rows)
    value = (key * 7919 + rng.integers(0, 2, rows)) % 1_000_003
    return pa.table(
        {
            "k": pc.binary_join_element_wise("key-", pc.utf8_lpad(pa.array(key).cast(pa.string()), 12, "0"), ""),
            "v": pa.array(value),
            "s": pc.binary_join_element_wise("value-of-the-key-", pa.array(value).cast(pa.string()), ""),
            "__time": pa.array(np.full(rows, batch)),
            "__diff": pa.array(rng.choice(np.array([1, 1, -1]), rows)),
        }
    )


def sink(directory: Path) -> PartSink:
    ids = Ids()
    return PartSink(SCHEMA, 1, FileBlob(directory), SHARD, mint(WriterId, ids), ids)


def write_batches(directory: Path, rows: int, batches: int) -> list[Run]:
    """The batches as sorted parts, one run each."""
    runs: list[Run] = []
    for batch in range(batches):
        table = updates(rows // batches, batch, rows * 2 // 5)
        runs += stage(table, sink(directory), default_time=batch, inline_bytes_max=0)
    return runs


def compact(directory: Path, runs: list[Run], since: int) -> list[Part]:
    writer = PartWriter(sink(directory))
    reader = PartReader(FileBlob(directory), {1: SCHEMA}, SCHEMA, memory_bytes=MEMORY_BYTES)
    parts: list[Part] = []
    for table in read_ahead(reader.read_range(runs, since=since)):
        parts += writer.write(table)
    return parts + writer.finish()


def duckdb_compact(directory: Path, runs: list[Run], since: int) -> None:
    files = [str(directory / str(part.key)) for run in runs for part in run.parts]
    connection = duckdb.connect()
    connection.execute("SET threads = 2")
    connection.execute("SET memory_limit = '1GiB'")
    connection.execute(f"SET temp_directory = '{directory / 'spill'}'")
    connection.execute(
        f"COPY (SELECT k, v, s, greatest(__time, {since}) AS __time, sum(__diff)::BIGINT AS __diff "
        f"FROM read_parquet({files}) GROUP BY ALL HAVING sum(__diff) <> 0 ORDER BY ALL) "
        f"TO '{directory / 'out.parquet'}' (FORMAT parquet, COMPRESSION zstd)"
    )


def read_ours(directory: Path, run: Run, as_of: int) -> int:
    """Every row of the shard in memory at once, as the plain reader has it."""
    reader = PartReader(FileBlob(directory), {1: SCHEMA}, SCHEMA)
    return len(pa.concat_tables(reader.read_range([run], as_of=as_of)))


def read_plain(directory: Path, run: Run, columns: list[str]) -> int:
    return len(pa.concat_tables(pq.read_table(directory / str(part.key), columns=columns) for part in run.parts))


def child(work: Callable[[], object]) -> None:
    """Run the work and print its seconds, seconds of processor and peak memory."""
    start, start_cpu = time.perf_counter(), time.process_time()
    work()
    seconds, cpu = time.perf_counter() - start, time.process_time() - start_cpu
    # Not ru_maxrss: that one remembers what the process was before it became this program.
    status = Path("/proc/self/status").read_text().split()
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak_mib": int(status[status.index("VmHWM:") + 1]) / 1024}))


def measured(name: str, directory: Path) -> dict[str, float]:
    """Seconds and peak memory of one work in a fresh process."""
    command = [sys.executable, "-m", "bench.consolidation", "--child", name, "--directory", str(directory)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def works(directory: Path) -> dict[str, Callable[[], object]]:
    plan = pickle.loads((directory / "plan.pickle").read_bytes())
    runs, since, run = plan["runs"], plan["since"], plan["compacted"]
    return {
        "ours": lambda: compact(directory, runs, since),
        "duckdb": lambda: duckdb_compact(directory, runs, since),
        "read": lambda: read_ours(directory, run, since),
        "pyarrow": lambda: read_plain(directory, run, ["k", "v", "s", "__diff"]),
    }


def rounds(count: int, directory: Path, names: tuple[str, ...]) -> Iterator[tuple[str, list[dict[str, float]]]]:
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(count):
        for name in names:
            samples[name].append(measured(name, directory))
    yield from samples.items()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batches", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child")
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        child(works(arguments.directory)[arguments.child])
        return
    with tempfile.TemporaryDirectory() as name:
        run_all(Path(name), arguments)


def run_all(directory: Path, arguments: argparse.Namespace) -> None:
    runs = write_batches(directory, arguments.rows, arguments.batches)
    parts = compact(directory, runs, arguments.batches)
    plan = {"runs": runs, "since": arguments.batches, "compacted": Run(tuple(parts))}
    (directory / "plan.pickle").write_bytes(pickle.dumps(plan))
    print(f"{arguments.rows} updates in {len(runs)} batches -> {sum(part.rows for part in parts)} rows")
    seconds, peaks = {}, {}
    for names in (("ours", "duckdb"), ("read", "pyarrow")):
        for what, samples in rounds(arguments.rounds, directory, names):
            seconds[what] = median([sample["seconds"] for sample in samples])
            peaks[what] = max(sample["peak_mib"] for sample in samples)
            cpu = median([sample["cpu"] for sample in samples])
            rate = arguments.rows / seconds[what] / 1e6
            print(f"{what:10s} {seconds[what]:6.2f} s ({cpu:.2f} s CPU) {rate:6.2f} M/s, peak {peaks[what]:.0f} MiB")
    bar("compaction, times DuckDB's speed", seconds["duckdb"] / seconds["ours"], ">= 1.2")
    bar("compaction, peak MiB beyond 1 GiB", peaks["ours"] - 1024, "<= 300")
    bar("compacted read, times pyarrow's speed", seconds["pyarrow"] / seconds["read"], ">= 0.8")


if __name__ == "__main__":
    main()
