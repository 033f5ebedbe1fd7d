"""Reads: snapshots and listens beside pyarrow and DuckDB on the same files.

    python -m bench.speed.reads [--rows 4000000] [--times 64] [--rounds 5] [--only straight merged listen]

`straight`: a shard whose history is kept, written at so many times and compacted into one run. It is read as one table,
streamed by two threads that read a split each, and streamed by one. Beside it pyarrow reads the same columns of the
same files: `pq.read_table` with its threads, and as a stream.

`merged`: eight batches of the same number of rows, whose keys overlap, and a third of which retract. DuckDB groups the
same files by all columns and adds up, with two threads, without an order.

`listen`: all updates of the first shard from the beginning, beside a stream of the snapshot.

Rounds alternate; a ratio is that of the medians; a first round warms the caches and does not count.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from bench.bars import bar, interleaved, median
from bench.consolidation import SCHEMA as WIDE
from bench.consolidation import updates
from bench.history import NAME, files_of, make
from bench.maintenance import opened
from bench.undo import SCHEMA
from persist.client.client import Client
from persist.client.snapshot import SnapshotSplit

ROWS = 4_000_000
TIMES = 64
KINDS = ("straight", "merged", "listen")
MERGED = "merged"
RUNS = 8
THREADS = 2
STREAM_ROWS = 64 * 1024  # of one batch of a stream


def measure(root: Path, rounds: int) -> None:
    """Make the shards below `root`, read them, and print the figures and the bars."""
    measure_reads(root, rounds, ROWS, TIMES, KINDS)


def measure_reads(root: Path, rounds: int, rows: int, times: int, kinds: Sequence[str]) -> None:
    if "straight" in kinds or "listen" in kinds:
        with opened(root / "straight") as (location, client):
            make(location, client, rows, times)
            files = files_of(location, root / "straight")
            if "straight" in kinds:
                read_straight(client, files, rounds)
            if "listen" in kinds:
                read_listen(client, times, rounds)
    if "merged" in kinds:
        with opened(root / "merged") as (location, client):
            shard = client.create_shard(MERGED, WIDE.arrow, WIDE.key)
            for batch in range(RUNS):
                shard.compare_and_append(updates(rows // RUNS, batch, rows * 2 // 5), batch, batch + 1)
            state = location.machine(MERGED).refresh()
            found = [part for held in state.trace.batches for part in held.parts()]
            read_merged(client, [str(root / "merged" / "blob" / str(part.key)) for part in found], rows, rounds)


def shown(rows: int, works: dict[str, Callable[[], int]], rounds: int) -> dict[str, float]:
    """The median seconds of each work, all of which must give so many rows. Prints them."""
    for name, work in works.items():
        found = work()
        if found != rows:
            raise AssertionError(f"{name} gave {found} rows, not {rows}")
    seconds = {name: median(some) for name, some in zip(works, interleaved(rounds, *works.values()), strict=True)}
    for name, taken in seconds.items():
        print(f"{name:36} {1e3 * taken:8.1f} ms {rows / taken / 1e6:7.2f} M rows/s", flush=True)
    return seconds


def counted(tables: Iterator[pa.Table | pa.RecordBatch]) -> int:
    return sum(table.num_rows for table in tables)


def together(works: Sequence[Callable[[], int]]) -> int:
    """What all of them come to, each done by a thread of its own."""
    with ThreadPoolExecutor(len(works)) as pool:
        return sum(future.result() for future in [pool.submit(work) for work in works])


# --- straight


def read_straight(client: Client, files: Sequence[str], rounds: int) -> None:
    shard, names = client.shard(NAME), SCHEMA.names
    rows = sum(pq.read_metadata(file).num_rows for file in files)
    print(f"\n{rows:,} rows, history kept, {len(files)} files")

    def reading(split: SnapshotSplit) -> Callable[[], int]:
        return lambda: counted(split.read(client.transport, STREAM_ROWS))

    def splits() -> int:
        with shard.snapshot(num_splits=THREADS) as found:
            return together([reading(split) for split in found.splits])

    def streamed_by_pyarrow() -> int:
        return sum(counted(pq.ParquetFile(file).iter_batches(STREAM_ROWS, columns=names)) for file in files)

    def by_pyarrow_in_halves() -> int:
        whole = [pq.ParquetFile(file) for file in files]
        groups = [(file, group) for file in whole for group in range(file.metadata.num_row_groups)]
        halves = groups[: len(groups) // 2], groups[len(groups) // 2 :]
        return together([lambda half=half: streamed_groups(half, names) for half in halves])  # type: ignore[misc]

    seconds = shown(
        rows,
        {
            "to_arrow": lambda: len(shard.snapshot().to_arrow()),
            "pq.read_table": lambda: len(pq.read_table(files, columns=names)),
            "stream of two splits, two threads": splits,
            "pyarrow streamed by two threads": by_pyarrow_in_halves,
            "stream, one thread": lambda: counted(shard.snapshot().batches()),
            "pyarrow streamed by one": streamed_by_pyarrow,
            "one column, to_arrow": lambda: len(shard.snapshot(columns=["v"]).to_arrow()),
            "one column, pq.read_table": lambda: len(pq.read_table(files, columns=["v"])),
        },
        rounds,
    )
    floor = seconds["pq.read_table"]
    bar("reads: to_arrow to pq.read_table", floor / seconds["to_arrow"], ">= 0.8")
    bar("reads: two splits streamed to pq.read_table", floor / seconds["stream of two splits, two threads"], ">= 0.9")
    streamed = seconds["pyarrow streamed by two threads"] / seconds["stream of two splits, two threads"]
    print(f"two splits streamed to pyarrow streamed by two threads: {streamed:.2f}")
    column = seconds["one column, pq.read_table"] / seconds["one column, to_arrow"]
    print(f"one column to pq.read_table: {column:.2f}")


def streamed_groups(groups: Sequence[tuple[pq.ParquetFile, int]], names: list[str]) -> int:
    """The rows of row groups, read one after the other on this thread, from files opened anew."""
    found, files = 0, {file: None for file, _ in groups}
    for file in files:
        numbers = [number for one, number in groups if one is file]
        found += counted(file.iter_batches(STREAM_ROWS, row_groups=numbers, columns=names, use_threads=False))
    return found


# --- listens


def read_listen(client: Client, times: int, rounds: int) -> None:
    shard = client.shard(NAME)
    rows = counted(shard.snapshot().batches())

    def listened() -> int:
        return sum(len(event.updates) for event in shard.listen(None, until=times))

    works = {"listen from the beginning": listened, "snapshot, streamed": lambda: counted(shard.snapshot().batches())}
    seconds = shown(rows, works, rounds)
    bar(
        "reads: listen over a backlog to snapshot",
        seconds["snapshot, streamed"] / seconds["listen from the beginning"],
        ">= 0.9",
    )


# --- merging


def read_merged(client: Client, files: Sequence[str], updates_given: int, rounds: int) -> None:
    shard = client.shard(MERGED)
    held = [pq.read_metadata(file).num_rows for file in files]
    print(f"\n{updates_given:,} updates in {len(files)} overlapping runs of {min(held):,} to {max(held):,} rows")

    def by_duckdb() -> int:
        source = f"read_parquet({list(files)})"
        with duckdb.connect() as connection:
            connection.execute(f"SET threads = {THREADS}")
            query = f"SELECT k, v, s, sum(__diff)::BIGINT AS d FROM {source} GROUP BY ALL HAVING d <> 0"
            return len(connection.sql(query).to_arrow_table())

    works = {"merging read": lambda: len(shard.snapshot().to_arrow()), "DuckDB's group-by": by_duckdb}
    seconds = shown(by_duckdb(), works, rounds)
    bar("reads: merged to DuckDB's group-by", seconds["DuckDB's group-by"] / seconds["merging read"], ">= 1.2")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        measure_reads(Path(name), arguments.rounds, arguments.rows, arguments.times, arguments.only)


if __name__ == "__main__":
    main()
