"""One writer over several shards: tasks of Spark append to them, in order by key and once, while their number grows.

    python -m examples.routed persist:///tmp/routed

Each task is a routed writer. Its first attempt is killed in the middle. Spark starts another one, which goes on after
what has landed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable
from typing import Any

import pyarrow as pa

import persist
from persist.sources.partition_map import Routes
from persist.sources.routed import RoutedWriter, read_routed

SCHEMA = pa.schema([("user", pa.string()), ("writer", pa.int64()), ("visit", pa.int64())])
WRITERS = 2
USERS = 5
APPENDS = 4  # of each writer in a round


def shards(client: Any, count: int) -> list[str]:
    names = [f"visits-{number}" for number in range(count)]
    for name in names:
        client.create_shard(name, SCHEMA, ["user"], history="forever")
    return names


def visits(writer: int, number: int) -> list[dict[str, Any]]:
    """The rows of a writer's append: a source that can begin anywhere."""
    return [{"user": f"user {user}", "writer": writer, "visit": number} for user in range(USERS)]


def write(url: str, writer: int, upto: int) -> None:
    """Append what the writer of this name has not appended yet. The first attempt of a task dies on the way."""
    from pyspark import TaskContext

    task = TaskContext.get()
    with persist.connect(url) as client, RoutedWriter(Routes.open(client, "visits"), f"writer {writer}") as routed:
        begun = routed.acknowledged
        for number in range(begun, upto):
            routed.append(visits(writer, number))
            if task is not None and task.attemptNumber() == 0 and number == begun + 1:
                os.kill(os.getpid(), signal.SIGKILL)


def run(spark: Any, url: str, counts: tuple[int, ...] = (2, 3)) -> list[tuple[str, int, int, int]]:
    """In each round the rows go to so many shards. The visits by user, in the order of their appends."""
    with persist.connect(url) as client:
        routes = Routes.open(client, "visits", shards(client, counts[0]), by=["user"])
        for number, count in enumerate(counts):
            routes.change(shards(client, count))

            def append(writers: Iterable[int], upto: int = (number + 1) * APPENDS) -> None:
                for writer in writers:
                    write(url, writer, upto)

            spark.sparkContext.parallelize(range(WRITERS), WRITERS).foreachPartition(append)
        rows = read_routed(routes).to_pylist()
    return [(row["user"], row["writer"], row["visit"], row["__epoch"]) for row in rows]


if __name__ == "__main__":
    from examples.session import local_session

    for user, writer, visit, epoch in run(local_session("routed", tries=4), sys.argv[1]):
        print(f"{user}: visit {writer}.{visit}, in epoch {epoch}")
