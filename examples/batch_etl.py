"""Batch ETL: raw readings in, a daily summary out, replaced as a whole each time; old results stay readable.

python -m examples.batch_etl persist:///tmp/etl
"""

from __future__ import annotations

import sys
from typing import Any

DAYS = 3
READINGS_A_DAY = 1000


def run(spark: Any, url: str) -> list[tuple[int, int, int]]:
    """Append readings day by day and summarise after each; `(day, readings, sum)` of the last summary."""
    for day in range(DAYS):
        readings = spark.range(READINGS_A_DAY).selectExpr(
            "concat('sensor', id % 10) sensor", f"{day} day", "id number", "id % 7 value"
        )
        append = readings.write.format("persist").mode("append").options(url=url, key="sensor,day,number")
        append.options(txnAppId="daily load", txnVersion=day).save("readings")  # a rerun of a day is skipped

        snapshot = spark.read.format("persist").options(url=url).load("readings")
        summary = snapshot.groupBy("day").agg({"number": "count", "value": "sum"})
        summary = summary.selectExpr("day", "`count(number)` readings", "`sum(value)` total")
        summary.write.format("persist").mode("overwrite").options(url=url, key="day").save("summary")
    last = spark.read.format("persist").options(url=url).load("summary")
    return sorted((row.day, row.readings, row.total) for row in last.collect())


if __name__ == "__main__":
    from examples.session import local_session

    for line in run(local_session("batch etl"), sys.argv[1]):
        print(*line)
