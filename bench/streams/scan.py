"""Filtered queries of DuckDB over a scan, and over the same files by its own reader.

    python -m bench.streams.scan [--rows 10_000_000] [--rounds 3]

The bar is over a shard of one run, whose files have its rows as they are: all queries together, each the median of its
rounds, taken in turns. What is printed beside it has no bar: each query by itself; the same through the dataset of
pyarrow alone (`FROM scan`); and a shard with history, of which DuckDB's reader would give wrong rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

import persist
from bench.bars import bar, interleaved, median
from bench.streams.alone import run

ROWS = 10_000_000
BAR = 0.7
CHANGED = 10  # rows that the history changes, so far apart that each file has one
KINDS = pa.schema(
    [
        ("id", pa.int64()),
        ("amount", pa.float64()),
        ("country", pa.string()),
        ("n", pa.int32()),
        ("moment", pa.timestamp("us", "UTC")),
    ]
)
COUNTRIES = ["DE", "FR", "IT", "PT", "US"]
QUERIES = {
    "a hundredth, by a number": "SELECT sum(amount), count(*) FROM source WHERE n < 10",
    "half, by a number": "SELECT sum(amount), count(*) FROM source WHERE n >= 500",
    "a fifth, by a text": "SELECT count(*), max(id), sum(amount) FROM source WHERE country = 'PT'",
    "a hundredth, by a float": "SELECT count(*), max(id) FROM source WHERE amount > 990",
    "half, by a time in order": "SELECT sum(n) FROM source WHERE moment >= timestamptz '1970-02-27 20:53:20Z'",
    "a twentieth, by the key": "SELECT count(*), sum(amount) FROM source WHERE id BETWEEN 4000000 AND 4499999",
    "rows of a thousandth": "SELECT * FROM source WHERE n = 7",
}


def measure(root: Path, rounds: int, *, rows: int = ROWS) -> bool:
    """In the empty directory `root`, the median of so many rounds. Whether all bars hold."""
    with persist.connect(f"persist://{root}/data") as client, duckdb.connect() as connection:
        shard = client.create_shard("orders", KINDS, ["id"])
        shard.insert(made(rows))
        files = [str(path) for path in sorted((root / "data").rglob("*.parquet"))]
        own = connection.read_parquet(files).project(", ".join(KINDS.names))
        with shard.scan() as scan:
            wrong = sum(answer(scan.duckdb(connection), query) != answer(own, query) for query in QUERIES.values())
            ratio = compared("one run", own, scan.duckdb(connection), rounds)
            compared("one run, by the dataset alone", own, connection.from_arrow(scan), rounds)
        change(shard, rows)
        with shard.scan() as scan:
            compared("with history", own, scan.duckdb(connection), rounds)
    held = [
        bar("wrong answers of DuckDB over a scan", wrong, "<= 0"),
        bar(f"DuckDB over a scan of {rows / 1e6:g} M rows / over the same files, speed", ratio, f">= {BAR}"),
    ]
    return all(held)


def made(rows: int) -> pa.Table:
    rng = np.random.default_rng(7)
    moments = pa.array(np.arange(rows) * 1_000_000).cast(KINDS.field("moment").type)
    columns = {
        "id": np.arange(rows),
        "amount": rng.random(rows) * 1000,
        "country": pa.array(COUNTRIES).take(pa.array(rng.integers(0, len(COUNTRIES), rows))),
        "n": rng.integers(0, 1000, rows).astype(np.int32),
        "moment": moments,
    }
    return pa.table(columns, schema=KINDS)


def change(shard: persist.Shard, rows: int) -> None:
    """Some rows change, all over the keys."""
    numbers = range(0, rows, max(1, rows // CHANGED))
    with shard.scan() as scan:
        old = scan.to_table(filter=pa.compute.field("id").isin(list(numbers)))
    place = old.schema.get_field_index("n")
    new = old.set_column(place, KINDS.field(place), pa.array([7] * len(old), pa.int32()))
    gone = old.append_column("__diff", pa.array([-1] * len(old), pa.int64()))
    come = new.append_column("__diff", pa.array([1] * len(new), pa.int64()))
    shard.insert(pa.concat_tables([gone, come]))


def answer(source: Any, query: str) -> list[Any]:
    """What a query says of a relation; sums of floats to nine digits, since threads add in any order."""
    found = source.query("source", query).fetchall()
    return sorted(tuple(f"{value:.9g}" if isinstance(value, float) else str(value) for value in row) for row in found)


def compared(what: str, own: Any, ours: Any, rounds: int) -> float:
    """How fast all queries together are over `ours`, where over `own` they are 1."""
    totals = [0.0, 0.0]
    for name, query in QUERIES.items():
        works: list[Callable[[], object]] = [
            partial(lambda source, text: source.query("source", text).fetchall(), source, query)
            for source in (own, ours)
        ]
        for work in works:
            work()  # the first of each opens files
        files_s, scan_s = map(median, interleaved(rounds, *works))
        totals = [totals[0] + files_s, totals[1] + scan_s]
        print(
            f"{what}: {name}: files {files_s * 1e3:.0f} ms, scan {scan_s * 1e3:.0f} ms, {files_s / scan_s:.2f}",
            flush=True,
        )
    print(f"{what}: all: files {totals[0]:.2f} s, scan {totals[1]:.2f} s, {totals[0] / totals[1]:.2f}", flush=True)
    return totals[0] / totals[1]


if __name__ == "__main__":
    sys.exit(run(measure, __doc__, ROWS))
