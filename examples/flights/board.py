"""The second PySpark job: the board and the delays by carrier, as of several minutes of the year.

    python -m examples.flights.board --url http://127.0.0.1:8787 --shard flights --cores 2

It waits for lines on stdin: each is a JSON list of times, which it answers with one event per time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from examples.flights.processes import emit
from examples.flights.spark import session

# How long a plan of Spark's holds its snapshot after the last read: short, so that GC is not kept waiting. Where
# starting Python for the first read takes longer than that, the board is planned once more.
LEASES_S = (30, 300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--url", "--shard", "--scratch"):
        parser.add_argument(name, required=True)
    parser.add_argument("--cores", type=int, required=True)
    arguments = parser.parse_args()
    spark = session("flights: board", arguments.cores, arguments.scratch)
    emit("started")
    for line in sys.stdin:
        for as_of in json.loads(line):
            _look(spark, arguments, int(as_of))
    spark.stop()


def _look(spark: Any, arguments: argparse.Namespace, as_of: int) -> None:
    began = time.monotonic()
    for lease_s in LEASES_S:
        try:
            splits, rows = _figures(spark, arguments, as_of, lease_s)
            break
        except Exception as error:  # Spark wraps ours in several of its own
            if lease_s == LEASES_S[-1] or "persist.core.errors.Expired" not in str(error):
                raise
    emit("board", as_of=as_of, splits=splits, figures=rows, seconds=time.monotonic() - began)


def _figures(spark: Any, arguments: argparse.Namespace, as_of: int, lease_s: int) -> tuple[int, list[list[Any]]]:
    """The splits of a snapshot, and by carrier and status the four figures of `examples.flights.figures`."""
    from pyspark.sql import functions as f

    reader = spark.read.format("persist").option("url", arguments.url).option("asOf", as_of)
    reader = reader.option("numPartitions", arguments.cores).option("leaseSeconds", lease_s)
    flights = reader.load(arguments.shard)
    marks = f.sum(f.col("departs").cast("bigint") * f.col("flight"))
    figures = flights.groupBy("carrier", "status").agg(f.count("*"), f.sum("dep_delay"), f.sum("arr_delay"), marks)
    rows = [list(row) for row in figures.collect()]
    return flights.rdd.getNumPartitions(), rows


if __name__ == "__main__":
    main()
