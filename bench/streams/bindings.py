"""What minting a binding takes, beside an append of the same rows; and opening bindings of a long time.

python -m bench.streams.bindings [--mints 1000] [--partitions 4] [--bindings 1000000]

Both write to shards of one directory, in turns. The clock is this machine's, as a minter's is. `--bindings`: so many,
one a second, of one partition, lie in a shard that was merged; then it is opened, and asked for times.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa

import persist
from bench.bars import bar, interleaved, median, timed
from persist.bindings import Bindings
from persist.commit.clocks_and_ids import SystemClock
from persist.sources.reclock import KEY, SCHEMA

MINTS = 1_000
PARTITIONS = 4
BINDINGS = 1_000_000
CHUNK = 1_000_000
WHOLE_EVERY = 4_096
SECOND_MS = 1_000
OPENINGS = 5
ASKED = 10_000  # positions at once


def measure(root: Path, rounds: int) -> bool:
    """In the empty directory `root`: in each round MINTS of both. Whether the bar holds."""
    held = minting(root / "minting", rounds * MINTS, PARTITIONS)
    opening(root / "opening", BINDINGS)
    return held


def minting(root: Path, mints: int, partitions: int) -> bool:
    """Bindings and appends of the same rows in turns."""
    names = [f"p{number}" for number in range(partitions)]
    with persist.connect(f"persist://{root}") as client:
        plain = client.create_shard("plain", SCHEMA, list(KEY), history="forever").open_writer()
        bindings = Bindings.open(client, "bindings", clock=SystemClock())
        count = iter(range(mints))
        upper = iter(range(mints))

        def mint() -> None:
            at = next(count)
            bindings.get_binding(dict.fromkeys(names, at))

        def append() -> None:
            at = next(upper)
            columns = [names, [at] * partitions, [at] * partitions, [False] * partitions]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
            plain.append(pa.Table.from_arrays(arrays, schema=SCHEMA), at, at + 1)

        minted, appended = (median(samples) for samples in interleaved(mints, mint, append))
        assert bindings.heads == dict.fromkeys(names, mints - 1)
    print(
        f"a binding of {partitions} partitions: {minted * 1e3:.2f} ms; an append of its rows: {appended * 1e3:.2f} ms"
    )
    return bar("minting a binding / an append of the same rows, p50", minted / appended, "<= 1.2")


def opening(root: Path, count: int) -> None:
    """Open many bindings, and ask for times of old ones."""
    with persist.connect(f"persist://{root}") as client:
        shard = Bindings.open(client, "bindings").shard
        for start in range(0, count, CHUNK):
            at = np.arange(start, min(start + CHUNK, count))
            columns = [np.full(len(at), "p0"), 10 * at, SECOND_MS * at, at % WHOLE_EVERY == 0]
            rows = pa.Table.from_arrays([pa.array(column) for column in columns], schema=SCHEMA)
            upper = SECOND_MS * (int(at[-1]) + 1)
            shard.append(rows.append_column("__time", rows.column("time")), SECOND_MS * start, upper)
        shard.optimize()
    opened, asked, chosen = [], [], random.Random(1)
    for _ in range(OPENINGS):
        with persist.connect(f"persist://{root}") as client:
            client.shard("bindings").upper()
            opened.append(timed(lambda: Bindings.open(client, "bindings")))
            bindings = Bindings.open(client, "bindings")
            first = chosen.randrange(max(1, 10 * count - ASKED))
            positions = np.arange(first, first + ASKED)
            asked.append(timed(lambda: bindings.times_of("p0", positions)))  # noqa: B023 - called at once
    print(f"{count:,} bindings: opened in {median(opened) * 1e3:.0f} ms", end="; ")
    print(f"times of {ASKED:,} old positions in {median(asked) * 1e3:.0f} ms")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mints", type=int, default=MINTS)
    parser.add_argument("--partitions", type=int, default=PARTITIONS)
    parser.add_argument("--bindings", type=int, default=BINDINGS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-bindings-") as root:
        held = minting(Path(root) / "minting", arguments.mints, arguments.partitions)
        opening(Path(root) / "opening", arguments.bindings)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
