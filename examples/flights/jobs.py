"""The demo's PySpark jobs, and its listener."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

import persist
from examples.flights import data
from examples.flights.data import COLUMNS, END, IN_THE_AIR, LANDED, ROWS, SCHEDULED, Figures

TIME, DIFF = "minute_of_year", "change"
LEASE_S = 60  # Spark does not say when a plan is no longer used: its hold lapses after this time without a read
FOLD_ROWS = 250_000  # the listener adds up pending updates when it has this many
_CSV = (
    "year INT, month INT, day INT, dep_time INT, sched_dep_time INT, dep_delay INT, arr_time INT, sched_arr_time INT, "
    "arr_delay INT, carrier STRING, flight INT, tailnum STRING, origin STRING, dest STRING, air_time INT, "
    "distance INT, hour INT, minute INT, time_hour TIMESTAMP"
)


def read_updates(spark: Any, csv: str) -> Any:
    """The CSV file as updates: the columns of the shard, TIME and DIFF. `examples.flights` says what each one means."""
    from pyspark.sql import functions as f

    flights = spark.read.csv(csv, header=True, schema=_CSV, nullValue="NA", mode="FAILFAST")
    departs = (f.unix_seconds("time_hour") / 60 - data.UNIX_MINUTE_0 + f.col("minute")).cast("int")
    departed = departs + f.col("dep_delay")  # null: cancelled
    landed = departed + f.col("air_time")  # null: never arrived
    changes = [
        _change(SCHEDULED, f.greatest(departs - data.PLAN_MINUTES, f.lit(0)), +1),
        _change(SCHEDULED, f.coalesce(departed, departs), -1),
        _change(IN_THE_AIR, departed, +1),
        _change(IN_THE_AIR, f.coalesce(landed, departed + data.LOST_MINUTES), -1),
        _change(LANDED, landed, +1),
    ]
    fixed = [name for name in COLUMNS.names if name in flights.columns and not name.endswith("_delay")]
    updates = flights.select(departs.alias("departs"), *fixed, f.inline(f.array(*changes)))
    return updates.where(f.col(TIME).isNotNull()).select(*COLUMNS.names, TIME, DIFF)


def _change(status: str, time: Any, diff: int) -> Any:
    """One update of a flight: its status and the delays that are known by then. A null time: it does not happen."""
    from pyspark.sql import functions as f

    unknown = f.lit(None).cast("int")
    return f.struct(
        f.lit(status).alias("status"),
        (unknown if status == SCHEDULED else f.col("dep_delay")).alias("dep_delay"),
        (f.col("arr_delay") if status == LANDED else unknown).alias("arr_delay"),
        time.cast("bigint").alias(TIME),
        f.lit(diff).cast("bigint").alias(DIFF),
    )


def write_month(updates: Any, url: str, shard: str, month: tuple[int, int]) -> None:
    """Write the updates of `[lower, upper)` by one compare-and-append: all of them at their place, or none."""
    lower, upper = month
    rows = updates.where((updates[TIME] >= lower) & (updates[TIME] < upper))
    writer = rows.write.format("persist").mode("append").options(url=url, key=",".join(data.KEY))
    writer = writer.options(timeColumn=TIME, diffColumn=DIFF)
    writer.options(expectedUpper=lower, newUpper=upper).save(shard)


def read_board(spark: Any, url: str, shard: str, as_of: int, cores: int) -> tuple[int, Figures]:
    """The number of splits of a snapshot, and the figures that Spark computes from it."""
    from pyspark.sql import functions as f

    reader = spark.read.format("persist").options(url=url, asOf=as_of, numPartitions=cores, leaseSeconds=LEASE_S)
    flights = reader.load(shard)
    marks = f.sum(f.col("departs").cast("bigint") * f.col("flight"))
    board = flights.groupBy("carrier", "status").agg(f.count("*"), f.sum("dep_delay"), f.sum("arr_delay"), marks)
    return flights.rdd.getNumPartitions(), data.figures_of([list(row) for row in board.collect()])


def add_up(rows: pa.Table, *updates: pa.Table) -> pa.Table:
    """The contents after more updates: equal rows are added up, and those that add up to zero are gone."""
    table = pa.concat_tables([rows, *(more.select(ROWS.names).cast(ROWS) for more in updates)])
    sums = table.group_by(COLUMNS.names).aggregate([("__diff", "sum")]).rename_columns(ROWS.names)
    return sums.filter(pc.not_equal(sums["__diff"], 0)).cast(ROWS)


def follow(url: str, name: str) -> tuple[pa.Table, int]:
    """Listen to all updates up to END: the contents in the end, and how many updates led to them.

    Raises ValueError if there is a gap or an overlap between two events, or a time outside its event.
    """
    rows, pending, frontier, updates, waiting = ROWS.empty_table(), [], 0, 0, 0
    with persist.connect(url) as client, client.shard(name).listen(None, until=END) as listen:
        for event in listen:
            times = pc.min_max(event.updates["__time"]).as_py()
            following = event.upper.element or END
            if event.lower.element != frontier or not frontier <= (times["min"] or frontier):
                raise ValueError(f"an event of [{event.lower}, {following}) follows {frontier}, with times {times}")
            frontier = following
            updates, waiting = updates + event.updates.num_rows, waiting + event.updates.num_rows
            pending.append(event.updates)
            if waiting >= FOLD_ROWS:
                rows, pending, waiting = add_up(rows, *pending), [], 0
    return add_up(rows, *pending), updates
