"""A table in WAL mode: a front end writes to a log, and rival replicas, each a task of Spark, apply it to the table.

    python -m examples.wal_table persist:///tmp/wal

The first attempt of each replica is killed in the middle. Spark starts another one, which goes on where the table is.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

import persist
from persist.sources.wal import FrontEnd, Replica

REPLICAS = 2
CUSTOMERS = 10
STEPS = 5  # writes of a day


def write_a_day(spark: Any, url: str, day: int) -> None:
    """What a DataFrame holds becomes writes to the log, of which each lands once, also when this is run again."""
    with persist.connect(url) as client:
        schema = pa.schema([("customer", pa.int64()), ("spent", pa.int64())])
        log = client.create_shard("spending-log", schema, ["customer"], history="forever")
        front = FrontEnd(log, "front")
        for step in range(day * STEPS, (day + 1) * STEPS):
            if step == front.acknowledged:  # else it is in the log already
                spent = spark.range(CUSTOMERS).selectExpr("id AS customer", f"(id + 1) * {step} AS spent").toArrow()
                gone = spark.range(CUSTOMERS).selectExpr("id AS customer", f"(id + 1) * {step - 1} AS spent").toArrow()
                leaves = gone.append_column("__diff", pa.array([-1] * len(gone), pa.int64()))
                comes = spent.append_column("__diff", pa.array([1] * len(spent), pa.int64()))
                front.write(pa.concat_tables([leaves, comes]) if step else comes)


def replicate(url: str, upper: int) -> None:
    """Apply the log to the table until that is complete before `upper`. The first attempt of a task dies on the way."""
    from pyspark import TaskContext

    task = TaskContext.get()
    with persist.connect(url) as client, Replica.open(client, "spending-log", "spending", history="forever") as replica:
        while (client.shard("spending").upper().element or 0) < upper:
            replica.step(1.0)
            if task is not None and task.attemptNumber() == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def run(spark: Any, url: str, days: int = 2) -> list[tuple[int, int, int]]:
    """The customers, what they spent, and as of when: of the table at the end of each day."""
    spendings: list[tuple[int, int, int]] = []
    for day in range(days):
        write_a_day(spark, url, day)
        upper = (day + 1) * STEPS

        def apply(_: Iterable[int], upper: int = upper) -> None:
            replicate(url, upper)

        spark.sparkContext.parallelize(range(REPLICAS), REPLICAS).foreachPartition(apply)
        read = spark.read.format("persist").options(url=url, asOf=upper - 1)
        assert sorted(read.load("spending").collect()) == sorted(read.load("spending-log").collect())
        spent = read.load("spending").orderBy("customer")
        spendings += [(row.customer, row.spent, upper - 1) for row in spent.collect()]
    return spendings


if __name__ == "__main__":
    from examples.session import local_session

    for customer, spent, time in run(local_session("wal table", tries=4), sys.argv[1]):
        print(f"customer {customer} has spent {spent} as of time {time}")
