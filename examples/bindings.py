"""Bindings: two rival streaming queries ingest the files of one directory, each line once, at one time for ever.

    python -m examples.bindings persist:///tmp/bindings /tmp/bindings-files

Each rival is a Structured Streaming query over the directory, in a process of its own. Both are killed at random, and
run again. A line has a partition, a position in it, and a word, as a record of a topic has.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import persist
from persist.bindings import Bindings, Ingester

COLUMNS = "partition string, position long, word string"
WORDS = pa.schema([("partition", pa.string()), ("position", pa.int64()), ("word", pa.string())])
PARTITIONS = 2
LINES = 5  # of each partition in a file
KILLS = 2
KILL_WITHIN_S = 2.0  # after one of them has written something
LOOK_S = 0.1
RUNS_MAX = 5  # of a rival that is not killed: Spark may be impatient with a busy machine


class Files:
    """The directory as a source: Spark reads the lines of a range of positions."""

    def __init__(self, spark: Any, directory: str) -> None:
        self._lines = spark.read.schema(COLUMNS).csv(directory)

    def watermarks(self) -> dict[str, int]:
        return dict(self._lines.groupBy("partition").max("position").collect())

    def read(self, partition: str, after: int, upto: int) -> Iterator[pa.Table]:
        lines = self._lines.where(self._lines.partition == partition)
        yield lines.where(lines.position > after).where(lines.position <= upto).toArrow()


def feed(directory: str, files: int) -> None:
    """Add files, one after the other: whoever sees a file sees those before it."""
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    for number in range(len(list(root.glob("*.csv"))), files):
        positions = range(number * LINES, (number + 1) * LINES)
        lines = [f"p{name},{at},word {name}.{at}" for name in range(PARTITIONS) for at in positions]
        (root / ".new").write_text("\n".join(lines) + "\n")
        (root / ".new").rename(root / f"{number:06d}.csv")


def ingest(spark: Any, url: str, directory: str, checkpoint: str) -> None:
    """One rival: for each micro-batch it binds what it has seen, and writes what is bound and not there yet."""
    with persist.connect(url) as client:
        bindings = Bindings.open(client, "words-times")
        words = client.create_shard("words", WORDS, ["partition", "position"], history="forever")

        def seen(batch: Any, _: int) -> None:
            heads = dict(batch.groupBy("partition").max("position").collect())
            if heads:
                bindings.get_binding(heads)
            with Ingester(bindings, Files(spark, directory), words) as ingester:
                while ingester.step():
                    pass

        lines = spark.readStream.schema(COLUMNS).option("maxFilesPerTrigger", 1).csv(directory)
        query = lines.writeStream.foreachBatch(seen).option("checkpointLocation", checkpoint)
        query.trigger(availableNow=True).start().awaitTermination()


def read_lines(url: str) -> list[tuple[str, int, str, int]]:
    """Every line that was ever written, with its time: read from the beginning."""
    with persist.connect(url) as client:
        words = client.shard("words")
        rows = [row for event in words.listen(None, until=words.upper()) for row in event.updates.to_pylist()]
    assert all(row["__diff"] == 1 for row in rows)
    return sorted((row["partition"], row["position"], row["word"], row["__time"]) for row in rows)


def upper(url: str) -> int:
    """How far the lines have come; 0 before the first."""
    with persist.connect(url) as client:
        return (client.shard("words").upper().element or 0) if "words" in client.shards() else 0


def rival(url: str, directory: str, name: str) -> subprocess.Popen[bytes]:
    """A rival in a process group of its own."""
    command = [sys.executable, "-m", "examples.bindings", url, directory, f"{directory}-checkpoints/{name}"]
    return subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)


def to_the_end(url: str, directory: str, name: str) -> None:
    for _ in range(RUNS_MAX):
        if rival(url, directory, name).wait() == 0:
            return
    raise RuntimeError(f"rival {name} has failed {RUNS_MAX} times")


def run(url: str, directory: str, kills: int = KILLS, seed: int = 7) -> list[tuple[str, int, str, int]]:
    """Feed the directory while rivals ingest it and are killed. Every line with its time."""
    chosen = random.Random(seed)
    for kill in range(kills):
        feed(directory, 2 * (kill + 1))
        rivals = [rival(url, directory, name) for name in ("a", "b")]
        written = upper(url)
        while upper(url) == written and any(process.poll() is None for process in rivals):
            time.sleep(LOOK_S)
        time.sleep(chosen.random() * KILL_WITHIN_S)
        for process in rivals:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    feed(directory, 2 * kills + 1)
    to_the_end(url, directory, "a")
    lines = read_lines(url)
    to_the_end(url, directory, "b")
    assert read_lines(url) == lines, "a re-read shows the same lines at the same times"
    return lines


if __name__ == "__main__":
    if len(sys.argv) == 4:
        from examples.session import local_session

        ingest(local_session("bindings"), *sys.argv[1:])
    else:
        lines = run(*sys.argv[1:3])
        times = {line[3] for line in lines}
        print(f"{len(lines)} lines, each once, at {len(times)} times; the first and the last:")
        for line in (lines[0], lines[-1]):
            print(*line)
