"""Change data capture: inserts, updates and deletes become a table by upserts, and the table tells its changes.

python -m examples.change_capture persist:///tmp/capture
"""

from __future__ import annotations

import sys
from typing import Any

FEED = [
    [("ann", "Oslo", False), ("bob", "Bergen", False), ("eve", "Troms", False)],
    [("bob", "Bodo", False), ("eve", None, True)],
    [("ann", "Narvik", False), ("dan", "Oslo", False)],
]
COLUMNS = "name string, town string, gone boolean"


def run(spark: Any, url: str) -> tuple[list[tuple[str, str]], list[tuple[str, str, str, int]]]:
    """The table at the end, and its changes after the first batch: `(name, town, change, version)`."""
    for number, rows in enumerate(FEED):
        changes = spark.createDataFrame(rows, COLUMNS)
        upsert = changes.write.format("persist").mode("append").options(url=url, key="name", envelope="upsert")
        upsert.options(deleteColumn="gone", txnAppId="capture", txnVersion=number).save("people")

    people = spark.read.format("persist").options(url=url).load("people")
    feed = spark.read.format("persist").options(url=url, readChangeFeed="true", startingVersion="1").load("people")
    changes_read = feed.select("name", "town", "_change_type", "_commit_version")
    return sorted(map(tuple, people.collect())), sorted(map(tuple, changes_read.collect()))


if __name__ == "__main__":
    from examples.session import local_session

    for part in run(local_session("change capture"), sys.argv[1]):
        for line in part:
            print(*line)
