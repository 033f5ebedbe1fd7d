"""Flights -> updates, with PySpark. The package's docstring says what each update means."""

from __future__ import annotations

from typing import Any

from examples.flights.dataset import COLUMNS, IN_THE_AIR, LANDED, LOST_MINUTES, PLAN_MINUTES, SCHEDULED, UNIX_MINUTE_0

TIME, DIFF = "minute_of_year", "change"
DELAYS = ("dep_delay", "arr_delay")
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
    departs = scheduled.cast("int")
    departed = departs + f.col("dep_delay")  # null of a cancelled flight
    landed = departed + f.col("air_time")  # null of a flight that never arrived
    changes = [
        _change(SCHEDULED, f.greatest(departs - PLAN_MINUTES, f.lit(0)), +1),
        _change(SCHEDULED, f.coalesce(departed, departs), -1),
        _change(IN_THE_AIR, departed, +1),
        _change(IN_THE_AIR, f.coalesce(landed, departed + LOST_MINUTES), -1),
        _change(LANDED, landed, +1),
    ]
    same = [name for name in COLUMNS.names if name in flights.columns and name not in DELAYS]
    found = flights.select(departs.alias("departs"), *same, f.inline(f.array(*changes)))
    return found.where(f.col(TIME).isNotNull()).select(*COLUMNS.names, TIME, DIFF)


def _change(status: str, time: Any, diff: int) -> Any:
    """One update of a flight: its status and the delays that are known by then. Null time: it does not happen."""
    from pyspark.sql import functions as f

    nothing = f.lit(None).cast("int")
    return f.struct(
        f.lit(status).alias("status"),
        (nothing if status == SCHEDULED else f.col("dep_delay")).alias("dep_delay"),
        (f.col("arr_delay") if status == LANDED else nothing).alias("arr_delay"),
        time.cast("bigint").alias(TIME),
        f.lit(diff).cast("bigint").alias(DIFF),
    )
