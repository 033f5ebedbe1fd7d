"""`format("persist")` beside what PySpark itself costs, on local[2]: writes, reads, small jobs, memory.

    python -m bench.speed.spark_jobs [--rows 4000000] [--rounds 3] [--times 64] [--only write,read,small]

`write`: rows in no order, against a sink that writes them as Parquet files as they come. `read`: a shard whose history
of so many times is kept, compacted, against a source that yields the same columns of the same files; the contents are
checked. So are they with one row in ten replaced at the last time, where rows and what takes them away lie side by
side. `small`: jobs over one row against Spark's noop job. Memory is that of the largest Python process of Spark: what a
task buffers does not grow with its rows, so fewer of them say the same as ten million (`--rows 10000000`).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import persist
from bench.bars import bar, interleaved, median
from bench.maintenance import opened
from bench.marks import whole
from bench.spark import DDL, Bench, noop
from compactor.engine import EngineSettings
from compactor.worker import WorkerSettings

ROWS = 4_000_000
TIMES = 64
PART_BYTES = 8 * 1024 * 1024  # of the shards that are read: each of the two tasks has parts of its own
PARTS = ("write", "read", "small")
MEMORY_MIB = 600
EXTRA_MS = 300
HISTORY, REPLACED, SMALL = "history", "replaced", "small"
SMALL_ROUNDS = 5  # times as many as of the large jobs: they are short, and their times vary
SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64()), ("v", pa.string())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: int(text.replace("_", "")), default=ROWS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--directory", type=Path, help="where to work; default a temporary directory")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        measure(Path(folder), args.rounds, rows=args.rows, times=args.times, only=args.only.split(","))


def measure(
    root: Path, rounds: int, *, rows: int = ROWS, times: int = TIMES, only: list[str] | tuple[str, ...] = PARTS
) -> None:
    """Print times and bars of the parts `only`, in the empty directory `root`. Each bar is a median of `rounds`."""
    if "read" in only:
        make_history(root / "shards", rows, times)
    bench = Bench(root, rows, rounds)
    try:
        if "write" in only:
            bench.make_input()
            write(bench)
        if "read" in only:
            read(bench, HISTORY, rows, 0)
            read(bench, REPLACED, rows, rows // 10)
        if "small" in only:
            small(bench)
    finally:
        bench.close()


def make_history(directory: Path, rows: int, times: int) -> None:
    """Two shards of so many rows at so many times, compacted; in the second one the last time replaces some."""
    ids = np.random.default_rng(1).permutation(rows)
    engine = EngineSettings(threads=2, part_bytes_target=PART_BYTES)
    settings = WorkerSettings(engine=engine)
    with opened(directory) as (location, client):
        for name in (HISTORY, REPLACED):
            shard = client.create_shard(name, SCHEMA, ["k"])
            for time, some in enumerate(np.array_split(ids, times)):
                shard.compare_and_append(rows_of(some), time, time + 1)
            if name == REPLACED:
                some = ids[: rows // 10]
                old = rows_of(some).append_column("__diff", pa.repeat(pa.scalar(-1, pa.int64()), len(some)))
                new = rows_of(some, 1).append_column("__diff", pa.repeat(pa.scalar(1, pa.int64()), len(some)))
                shard.compare_and_append(pa.concat_tables([old, new]), times, times + 1)
            while len(location.machine(name).refresh().trace.batches) > 1:  # upkeep merges small ones meanwhile
                whole(location, name, settings)


def rows_of(ids: Any, version: int = 0) -> pa.Table:
    """The rows that `Bench.make_input` makes; those of another version have other numbers."""
    keys = np.char.add("k", np.char.zfill(ids.astype("U10"), 10))
    values = np.char.add("value ", (ids % 1000).astype("U3"))
    return pa.table({"k": pa.array(keys), "n": pa.array(ids * 7 + version), "v": pa.array(values)}, schema=SCHEMA)


def write(bench: Bench) -> None:
    """Rows in no order. Each job writes a shard, or files, of its own."""
    names = iter(f"unsorted-{number}" for number in range(bench.rounds + 1))

    def ours() -> None:
        bench.append("shuffled", next(names))

    def plainest() -> None:
        bench.floor_write("shuffled")

    plainest()
    ours()  # both are warm before the clock starts
    ours_s, plainest_s = (median(found) for found in interleaved(bench.rounds, ours, plainest))
    print(f"unsorted write of {bench.rows} rows: {_rate(bench.rows, ours_s)}, plainest {_rate(bench.rows, plainest_s)}")
    bar("unsorted Spark write / plainest sink", plainest_s / ours_s, ">= 1.0")
    bar(
        f"MiB a worker of the {bench.rows / 1e6:g} M-row job",
        bench.peaks.worker_mib,
        f"<= {MEMORY_MIB}",
    )


def read(bench: Bench, name: str, rows: int, replaced: int) -> None:
    """The current contents, all columns, beside the same columns of the files, which have replaced rows as well."""
    with persist.connect(bench.url) as client, client.shard(name).snapshot(purpose="bench") as snapshot:
        blobs = bench.directory / "shards" / "blob"
        parts = [part for split in snapshot.splits for run in split.runs for part in run.parts if part.key]
        files = list(dict.fromkeys(str(blobs / str(part.key)) for part in parts))

        def load() -> Any:
            options = {"url": bench.url, "numPartitions": "2"}
            return bench.spark.read.format("persist").schema(DDL).options(**options).load(name)

        found = load().selectExpr("count(*)", "sum(n)", "count(distinct k)").collect()[0]
        total = 7 * rows * (rows - 1) // 2 + replaced
        bar(
            f"wrong figures of shard {name!r}",
            sum(a != b for a, b in zip(found, (rows, total, rows), strict=True)),
            "<= 0",
        )
        ours_s, plainest_s = _seconds(bench, lambda: noop(load()), lambda: noop(bench.floor_load(files, DDL)))
        stored = rows + 2 * replaced
        print(f"read of {name}: {_rate(stored, ours_s)} of the files, plainest {_rate(stored, plainest_s)}")
        what = "" if not replaced else ", one row in ten replaced"
        bar(f"Spark read with history{what} / plainest source", plainest_s / ours_s, ">= 0.9")


def small(bench: Bench) -> None:
    """A write and a read of one row; the noop job makes the same row and drops it."""
    spark = bench.spark

    def one() -> Any:
        return spark.range(0, 1, 1, 1).selectExpr("'k' k", "id n", "'v' v")

    def written() -> None:
        one().write.format("persist").mode("append").options(url=bench.url, key="k").save(SMALL)

    def loaded() -> None:
        noop(spark.read.format("persist").options(url=bench.url).load(SMALL))

    def nothing() -> None:
        noop(one())

    for work in (written, loaded, nothing) * 2:
        work()
    rounds = SMALL_ROUNDS * bench.rounds
    write_s, read_s, noop_s = (median(found) for found in interleaved(rounds, written, loaded, nothing))
    print(f"one row: write {write_s * 1e3:.0f} ms, read {read_s * 1e3:.0f} ms, noop {noop_s * 1e3:.0f} ms")
    bar("one-row job minus noop job, ms", (write_s - noop_s) * 1e3, f"<= {EXTRA_MS}")
    bar("one-row read minus noop job, ms", (read_s - noop_s) * 1e3, f"<= {EXTRA_MS}")


def _seconds(bench: Bench, ours: Callable[[], None], plainest: Callable[[], None]) -> tuple[float, float]:
    """Medians of both, in turns, after one of each that does not count."""
    ours()
    plainest()
    first, second = (median(found) for found in interleaved(bench.rounds, ours, plainest))
    return first, second


def _rate(rows: int, seconds: float) -> str:
    return f"{rows / seconds / 1e6:.2f} M rows/s"


if __name__ == "__main__":
    main()
