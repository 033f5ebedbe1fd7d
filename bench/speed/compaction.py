"""Compaction beside DuckDB's COPY of the same files, in the same memory.

    python -m bench.speed.compaction [--rows 10000000] [--batches 64] [--rounds 3] [--directory DIR]

Sorted batches whose keys overlap, a third of whose diffs retract, become one run: updates are grouped by all columns,
added up, those of sum zero dropped, sorted, written as Parquet with zstd. Each has two threads and 1 GiB, and runs in
a process of its own, so that its peak of memory is its own, on a fresh copy of the shard. Rounds alternate, and a ratio
is that of the medians.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from bench.bars import bar, median
from bench.consolidation import SCHEMA, updates
from bench.maintenance import BUDGET, MIB, NAME, in_child, opened

ROWS = 10_000_000  # of fewer DuckDB holds all in its memory
BATCHES = 64
OF_DUCKDB, OURS = "duckdb", "merge"


def measure(root: Path, rounds: int) -> None:
    """Make the shard below `root`, compact copies of it, and print the figures and the bars."""
    measure_compaction(root, rounds, ROWS, BATCHES)


def measure_compaction(root: Path, rounds: int, rows: int, batches: int) -> None:
    made, copy = root / "made", root / "copy"
    with opened(made) as (_, client):
        shard = client.create_shard(NAME, SCHEMA.arrow, SCHEMA.key)
        for batch in range(batches):
            shard.compare_and_append(updates(rows // batches, batch, rows * 2 // 5), batch, batch + 1)
        shard.downgrade_since(batches - 1)
    found: dict[str, list[dict[str, float]]] = {OF_DUCKDB: [], OURS: []}
    for _ in range(rounds):
        for name, samples in found.items():
            shutil.copytree(made, copy)
            samples.append(in_child(name, copy))
            shutil.rmtree(copy)
    seconds = {name: median([sample["seconds"] for sample in samples]) for name, samples in found.items()}
    peaks = {name: max(sample["peak_mib"] for sample in samples) for name, samples in found.items()}
    print(f"\ncompaction of {rows:,} updates in {batches} batches")
    for name in found:
        print(f"{name:8} {seconds[name]:6.2f} s {rows / seconds[name] / 1e6:6.2f} M rows/s, peak {peaks[name]:.0f} MiB")
    bar("compaction: times the speed of DuckDB's COPY", seconds[OF_DUCKDB] / seconds[OURS], ">= 2")
    bar("compaction: peak MiB", peaks[OURS], f"<= {BUDGET // MIB + 300}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--batches", type=int, default=BATCHES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, help="for the shards, instead of a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as name:
        measure_compaction(Path(name), arguments.rounds, arguments.rows, arguments.batches)


if __name__ == "__main__":
    main()
