"""A stream that begins with the contents of a large shard: in ten micro-batches, and in one.

    python -m bench.streams.backfill [--rows 10_000_000] [--rounds 3]

Both read the same shard into a sink that does nothing, from the start of the query to its end. Its rows came in no
order by two tasks, so that its files have keys in common: there each cut lies within a row group of every file, which
both micro-batches decode. Then it is merged, as maintenance does it. The bound on rows is a tenth of all, and what a
bound that is never passed needs above it: cuts lie at keys that indexes name.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import persist
from bench.bars import bar, median, timed
from bench.spark import Bench
from bench.streams.alone import run

ROWS = 10_000_000
BATCHES = 10
SLACK = 1.05  # of the bound, above a tenth of the rows
SHARD = "backfilled"


def measure(root: Path, rounds: int, *, rows: int = ROWS) -> bool:
    """In the empty directory `root`, the median of so many rounds. Whether all bars hold."""
    bench = Bench(root, rows, rounds)
    try:
        bench.make_input()
        bench.append("shuffled", SHARD)
        held = backfill(bench, ", files with keys in common")
        with persist.connect(bench.url) as client:
            print(client.shard(SHARD).optimize(), flush=True)
        return backfill(bench, "") and held
    finally:
        bench.close()


def backfill(bench: Bench, what: str) -> bool:
    """Print times and bars of the shard as it is now, which is `what`. Whether all bars hold."""
    bound = int(bench.rows / BATCHES * SLACK)
    whole_s: list[float] = []
    cut_s: list[float] = []
    largest, fewest = 0, bench.rows
    read: list[int] = []
    for number in range(bench.rounds + 1):
        for samples, limit in ((whole_s, None), (cut_s, bound)):
            found: list[int] = []
            seconds = timed(partial(streamed, bench, limit, found))
            read.append(sum(found))
            if limit is not None:
                largest, fewest = max(largest, *found), min(fewest, len(found))
            if number:  # the first of each warms Spark up
                samples.append(seconds)
    ours, one = median(cut_s), median(whole_s)
    print(f"backfill of {bench.rows} rows{what}: one batch {one:.2f} s, {fewest} batches {ours:.2f} s", flush=True)
    held = [
        bar(f"wrong figures of rows read{what}", sum(figure != bench.rows for figure in read), "<= 0"),
        bar(f"batches of the backfill{what}", fewest, f">= {BATCHES}"),
        bar(f"backfill of {bench.rows / 1e6:g} M rows in ten batches / one batch{what}", ours / one, "<= 1.5"),
        bar(f"largest batch / bound{what}", largest / bound, "<= 1"),
    ]
    return all(held)


def streamed(bench: Bench, rows_max: int | None, found: list[int]) -> None:
    """A stream that reads the whole shard and ends; `found` gets the rows of each micro-batch."""
    options = {"url": bench.url} if rows_max is None else {"url": bench.url, "maxRowsPerTrigger": str(rows_max)}
    frame = bench.spark.readStream.format("persist").options(**options).load(SHARD)
    with tempfile.TemporaryDirectory(dir=bench.directory) as checkpoint:
        writer = frame.writeStream.format("noop").option("checkpointLocation", checkpoint)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        found += [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]


if __name__ == "__main__":
    sys.exit(run(measure, __doc__, ROWS))
