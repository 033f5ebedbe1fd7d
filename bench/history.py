"""History: what it costs that a shard keeps its past.

    python -m bench.history [--only append resolve days restore drop straight] [--rows 10000000] [--times 64]
                            [--rounds 5] [--marks 1000000] [--directory DIR]

`append`, `resolve` and `days`: see `bench/marks.py`; `restore`: see `bench/undo.py`; `drop`: see
`bench/drop.py`.

`straight`: a compacted shard whose history is kept is read as a whole, one column of it, and all of it with eight
batches of one percent each on top, a third of their updates retractions. Then these are merged in as well, so that rows
and what takes them away lie side by side, and it is read again. Beside each read, in turns with it, pyarrow reads the
same columns of the same files. A shard that is in `--directory` already is read as far as it was made.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bench.bars import bar, interleaved, median
from bench.drop import bench_drop
from bench.maintenance import opened
from bench.marks import bench_append, bench_days, bench_resolve, whole
from bench.undo import SCHEMA, bench_restore, rows_of
from compactor.engine import EngineSettings
from compactor.worker import WorkerSettings
from persist.client.client import Client
from persist.commit.location import Location

KINDS = ["append", "resolve", "days", "restore", "drop", "straight"]
NAME = "straight"
ON_TOP = 8
PERCENT = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=KINDS, choices=KINDS)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--times", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--marks", type=int, default=1_000_000)
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if "append" in arguments.only:
            bench_append(Path(folder))
        if "resolve" in arguments.only:
            bench_resolve(arguments.marks)
        if "days" in arguments.only:
            bench_days()
        if "restore" in arguments.only:
            bench_restore(arguments.directory or Path(folder) / "restore")
        if "drop" in arguments.only:
            bench_drop(Path(folder) / "drop")
        if "straight" in arguments.only:
            bench_straight(arguments.directory or Path(folder) / "straight", arguments)


def make(location: Location, client: Client, rows: int, times: int) -> None:
    """So many rows at so many times, compacted, their history kept; ids are even."""
    shard = client.create_shard(NAME, SCHEMA, ["k"])
    ids = np.random.default_rng(1).permutation(rows) * 2
    for time, some in enumerate(np.array_split(ids, times)):
        shard.compare_and_append(pa.table(rows_of(some, 0)), time, time + 1)
    whole(location, NAME, WorkerSettings(engine=EngineSettings(threads=2)))


def put_on_top(client: Client, rows: int, first: int) -> None:
    """Batches of one percent each, at the times from `first` on: a third new rows, the others replace rows."""
    shard, each = client.shard(NAME), rows // PERCENT // 3
    ids = np.random.default_rng(2).permutation(rows)[: 2 * ON_TOP * each] * 2
    for number in range(ON_TOP):
        replaced, near = ids[2 * number * each :][:each], ids[(2 * number + 1) * each :][:each]
        kinds = [(replaced, 0, -1), (replaced, 1, 1), (near + 1, 0, 1)]
        updates = [
            pa.table({**rows_of(some, version), "__diff": pa.array(np.full(len(some), diff))})
            for some, version, diff in kinds
        ]
        shard.compare_and_append(pa.concat_tables(updates), first + number, first + number + 1)


def files_of(location: Location, directory: Path) -> list[str]:
    state = location.machine(NAME).refresh()
    return [str(directory / "blob" / str(part.key)) for batch in state.trace.batches for part in batch.parts()]


def compared(client: Client, files: Sequence[str], columns: list[str] | None, rounds: int) -> float:
    """How fast a read is, as a share of the speed at which pyarrow reads the files. Prints both."""
    shard, found = client.shard(NAME), [0, 0]

    def ours() -> None:
        found[0] = len(shard.snapshot(columns=columns).to_arrow())

    def theirs() -> None:
        found[1] = len(pq.read_table(files, columns=columns or SCHEMA.names))

    ours()
    theirs()
    seconds = [median(some) for some in interleaved(rounds, ours, theirs)]
    speed = [rows / each / 1e6 for rows, each in zip(found, seconds, strict=True)]
    print(
        f"{columns or 'all columns'}, {len(files)} files: {speed[0]:.1f} M rows/s, pyarrow {speed[1]:.1f}", flush=True
    )
    return seconds[1] / seconds[0]


def bench_straight(directory: Path, arguments: argparse.Namespace) -> None:
    rows, times, rounds = arguments.rows, arguments.times, arguments.rounds
    with opened(directory) as (location, client):
        upper = client.shard(NAME).upper().element or 0 if NAME in client.shards() else 0
        if not upper:
            make(location, client, rows, times)
        files = files_of(location, directory)
        if upper <= times:
            bar("to_arrow to read_table", compared(client, files, None, rounds), ">= 0.7")
            bar("one column to read_table", compared(client, files, ["v"], rounds), ">= 0.5")
            put_on_top(client, rows, times)
            files = files_of(location, directory)
        if len(files) > ON_TOP:
            bar("eight batches on top to read_table", compared(client, files, None, rounds), ">= 0.4")
            whole(location, NAME, WorkerSettings(engine=EngineSettings(threads=2)))
        print("merged, with the rows that were replaced and what took them away:")
        files = files_of(location, directory)
        compared(client, files, None, rounds)
        compared(client, files, ["v"], rounds)


if __name__ == "__main__":
    main()
