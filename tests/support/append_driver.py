"""A Spark driver that writes the same definite data as its rivals, at its own pace: `URL STEP PARTITIONS`."""

from __future__ import annotations

import sys
from collections import Counter

from examples.session import local_session

SHARD, END, KEYS = "replicated", 12, 20  # the times before END, at each of which each key gets another value


def updates() -> list[tuple[int, int, int, int]]:
    """Key, value, time and diff of every update."""
    come = [(key, t * KEYS + key, t, 1) for t in range(END) for key in range(KEYS)]
    gone = [(key, value, t + 1, -1) for key, value, t, _ in come if t + 1 < END]
    return come + gone


def definite(as_of: int) -> Counter[tuple[int, int]]:
    """How often each row is there at that time."""
    counted: Counter[tuple[int, int]] = Counter()
    for key, value, at, diff in updates():
        counted[key, value] += diff if at <= as_of else 0
    return +counted


def main(url: str, step: int, partitions: int) -> None:
    """Append all of it from the beginning, `step` times with each job, each job in so many tasks."""
    spark = local_session("replica", cores=partitions)
    frame = spark.createDataFrame(updates(), "k int, v bigint, t bigint, change int").repartition(partitions, "v")
    for lower in range(0, END, step):
        upper = min(lower + step, END)
        frame.where(f"t >= {lower} AND t < {upper}").write.format("persist").mode("append").options(
            url=url, key="k", timeColumn="t", diffColumn="change", appendLower=lower, appendUpper=upper
        ).save(SHARD)
    spark.stop()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
