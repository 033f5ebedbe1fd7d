"""The first PySpark job: turns flights into updates, and writes them month by month.

    python -m examples.flights.writer --url http://127.0.0.1:8787 --shard flights --csv flights.csv --cores 2

Each month is one `compare_and_append`: it lands whole, at exactly its place, or not at all.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from examples.flights.dataset import KEY, MONTHS
from examples.flights.processes import emit
from examples.flights.spark import session
from examples.flights.updates import DIFF, TIME, read_flights, updates_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--url", "--shard", "--csv", "--scratch"):
        parser.add_argument(name, required=True)
    parser.add_argument("--cores", type=int, required=True)
    arguments = parser.parse_args()
    spark = session("flights: writer", arguments.cores, arguments.scratch)
    emit("started")
    updates = updates_of(read_flights(spark, arguments.csv)).persist()
    counts = updates_by_month(updates)
    emit("ready", updates=counts)
    for number, (lower, upper) in enumerate(MONTHS):
        emit("begin", month=number)
        began = time.monotonic()
        _write(updates, arguments, lower, upper)
        emit("wrote", month=number, updates=counts[number], seconds=time.monotonic() - began)
    spark.stop()


def updates_by_month(updates: Any) -> list[int]:
    """Updates of each month, as Spark counts them."""
    from pyspark.sql import functions as f

    month = sum((f.col(TIME) >= lower).cast("int") for lower, _ in MONTHS) - 1
    found = {row["month"]: row["count"] for row in updates.groupBy(month.alias("month")).count().collect()}
    return [found.get(number, 0) for number in range(len(MONTHS))]


def _write(updates: Any, arguments: argparse.Namespace, lower: int, upper: int) -> None:
    """Write the updates of `[lower, upper)`, expecting that everything before `lower` is there."""
    rows = updates.where((updates[TIME] >= lower) & (updates[TIME] < upper))
    writer = rows.write.format("persist").mode("append").option("url", arguments.url).option("key", ",".join(KEY))
    writer = writer.option("timeColumn", TIME).option("diffColumn", DIFF)
    writer.option("expectedUpper", lower).option("newUpper", upper).save(arguments.shard)


if __name__ == "__main__":
    main()
