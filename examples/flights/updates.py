"""Flights -> updates, with PySpark. The package's docstring says what each update means."""

from __future__ import annotations

from functools import reduce
from typing import Any

from examples.flights.dataset import COLUMNS, IN_THE_AIR, LANDED, LOST_MINUTES, PLAN_MINUTES, SCHEDULED, UNIX_MINUTE_0

TIME, DIFF = "minute_of_year", "change"
_CSV = (
    "year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay INT, arr_time INT, sched_arr_time INT, "
    "arr_delay INT, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, air_time INT, "
    "distance INT, hour INT, minute INT, time_hour TIMESTAMP"
)


def read_flights(spark: Any, path: str) -> Any:
    """The flights of a CSV file as a DataFrame."""
    return spark.read.csv(path, header=True, schema=_CSV, nullValue="NA", mode="FAILFAST")


def updates_of(flights: Any) -> Any:
    """All updates: the columns of the shard, TIME and DIFF."""
    from pyspark.sql import functions as f

    scheduled = f.unix_seconds("time_hour") / 60 - UNIX_MINUTE_0 + f.col("minute")
    known = (
        flights.withColumn("departs", scheduled.cast("int"))
        .withColumn("departed", f.col("departs") + f.col("dep_delay"))
        .withColumn("landed", f.col("departed") + f.col("air_time"))
    )
    departs, departed, landed = f.col("departs"), f.col("departed"), f.col("landed")
    has_departed, has_landed = departed.isNotNull(), landed.isNotNull()
    changes = [
        _changes(known, SCHEDULED, f.greatest(departs - PLAN_MINUTES, f.lit(0)), +1),
        _changes(known, SCHEDULED, f.coalesce(departed, departs), -1),
        _changes(known.where(has_departed), IN_THE_AIR, departed, +1),
        _changes(known.where(has_departed), IN_THE_AIR, f.coalesce(landed, departed + LOST_MINUTES), -1),
        _changes(known.where(has_landed), LANDED, landed, +1),
    ]
    return reduce(lambda one, other: one.unionAll(other), changes)


def _changes(flights: Any, status: str, time: Any, diff: int) -> Any:
    """One update for each flight: its row in this status, with the delays that are known by then."""
    from pyspark.sql import functions as f

    nothing = f.lit(None).cast("int")
    rows = flights.withColumn("status", f.lit(status)).withColumn(TIME, time.cast("bigint"))
    if status == SCHEDULED:
        rows = rows.withColumn("dep_delay", nothing)
    if status != LANDED:
        rows = rows.withColumn("arr_delay", nothing)
    return rows.withColumn(DIFF, f.lit(diff).cast("bigint")).select(*COLUMNS.names, TIME, DIFF)
