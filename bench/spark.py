"""`format("persist")` against the plainest Python data sources, in one run on local[2].

python -m bench.spark                       everything, 10 million rows
python -m bench.spark --rows 1000000 --only read,write
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import persist
from bench.bars import bar, interleaved, median

MEMORY_MIB = 1024
SAMPLE_S = 0.1
PARTS = ("write", "read", "stream", "kill")
DDL = "k string, n bigint, v string"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=lambda text: int(text.replace("_", "")), default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {','.join(PARTS)}")
    parser.add_argument("--directory", help="where to work; default a temporary directory")
    args = parser.parse_args()
    wanted = args.only.split(",")
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        bench = Bench(Path(directory), args.rows, args.rounds)
        try:
            held = []
            if "write" in wanted or "read" in wanted:
                bench.make_input()
                held += bench.write(timed="write" in wanted)
            if "read" in wanted:
                held += bench.read()
            if "stream" in wanted:
                held += bench.stream()
            if "kill" in wanted:
                held += bench.kill(args.kills)
        finally:
            bench.close()
    return 0 if all(held) else 1


class Bench:
    def __init__(self, directory: Path, rows: int, rounds: int) -> None:
        self.directory = directory
        self.rows = rows
        self.rounds = rounds
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ["PYTHONPATH"] = os.getcwd()
        self.server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "rpc.cli",
                "serve",
                "--no-maintenance",
                "--dir",
                str(directory / "shards"),
                "--port",
                "0",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.server.stdout is not None
        self.url = self.server.stdout.readline().strip().split()[-1]
        self.spark = self._session()
        self.peaks = Peaks(self.server.pid)

    def _session(self) -> Any:
        from pyspark.sql import SparkSession

        from bench.spark_floor import FloorSource

        options = {
            "spark.ui.enabled": "false",
            "spark.ui.showConsoleProgress": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.driver.memory": "2g",
            "spark.python.unix.domain.socket.enabled": "true",  # as docs/spark.md advises
            "spark.sql.warehouse.dir": str(self.directory / "warehouse"),
        }
        builder = SparkSession.builder.master("local[2]").appName("persist bench")
        for name, value in options.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        spark.dataSource.register(FloorSource)
        return spark

    def close(self) -> None:
        self.peaks.stop()
        self.spark.stop()
        self.server.terminate()
        self.server.wait(30)

    def make_input(self) -> None:
        """Rows in key order, and the same rows in the order of a hash."""
        ids = self.spark.range(0, self.rows, 1, 2)
        rows = ids.selectExpr("format_string('k%010d', id) k", "id * 7 n", "concat('value ', id % 1000) v")
        rows.write.parquet(str(self.directory / "sorted"))
        rows.repartition(2).write.parquet(str(self.directory / "shuffled"))

    def frame(self, order: str) -> Any:
        return self.spark.read.schema(DDL).parquet(str(self.directory / order))

    # --- writing

    def write(self, timed: bool) -> list[bool]:
        held = []
        if not timed or not self.rounds:
            self.append("sorted", "kept")
            return self.memory("write")
        for order in ("sorted", "shuffled"):
            names = iter(f"{order}-{n}" for n in range(1000))
            self.floor_write(order)  # both are warm before the clock starts
            self.append(order, "kept" if order == "sorted" else next(names))

            def append(order: str = order, names: Any = names) -> None:
                self.append(order, next(names))

            def floor(order: str = order) -> None:
                self.floor_write(order)

            ours, floor_s = (median(s) for s in interleaved(self.rounds, append, floor))
            print(f"write {order}: {ours:.2f} s, plainest sink {floor_s:.2f} s, {self.rows / ours / 1e6:.2f} M rows/s")
            held.append(bar(f"spark_write_{order}_speed_ratio", floor_s / ours, ">= 0.8"))
        return held + self.memory("write")

    def memory(self, what: str) -> list[bool]:
        """The largest resident sets so far."""
        return [
            bar(f"spark_{what}_worker_rss_mib", self.peaks.worker_mib, f"<= {MEMORY_MIB}"),
            bar(f"spark_{what}_server_rss_mib", self.peaks.server_mib, f"<= {MEMORY_MIB}"),
        ]

    def append(self, order: str, shard: str) -> None:
        self.frame(order).write.format("persist").mode("append").options(url=self.url, key="k").save(shard)

    def floor_write(self, order: str) -> None:
        target = self.directory / "floor"
        target.mkdir()
        self.frame(order).write.format("floor").mode("append").option("directory", str(target)).save()
        shutil.rmtree(target)

    # --- reading

    def read(self) -> list[bool]:
        with persist.connect(self.url) as client:
            snapshot = client.shard("kept").snapshot(purpose="bench")
            blobs = self.directory / "shards" / "blob"
            keys = [part.key for run in snapshot.splits[0].runs for part in run.parts if part.key]
            files = [str(blobs / key) for key in keys]
            total = self.load(DDL).selectExpr("count(*)", "sum(n)", "count(distinct k)").collect()[0]
            expected = (self.rows, 7 * self.rows * (self.rows - 1) // 2, self.rows)
            held = [
                bar("spark_read_back_wrong_figures", sum(a != b for a, b in zip(total, expected, strict=True)), "<= 0")
            ]
            if not self.rounds:
                snapshot.close()
                return held + self.memory("read")
            held += self.compare("read", lambda: noop(self.load(DDL)), lambda: noop(self.floor_load(files, DDL)), 0.8)
            one = "n bigint"
            held += self.compare(
                "read_one_column", lambda: noop(self.load(one)), lambda: noop(self.floor_load(files, one)), 0.8
            )
            held += self.compare(
                "native_read", lambda: noop(self.native()), lambda: noop(self.spark.read.parquet(*files)), 0.85
            )
            snapshot.close()
        return held + self.memory("read")

    def native(self) -> Any:
        from persist.spark import table

        return table(self.spark, "kept", url=self.url, native="always")

    def compare(self, name: str, ours: Callable[[], None], floor: Callable[[], None], want: float) -> list[bool]:
        ours()
        floor()
        ours_s, floor_s = (median(samples) for samples in interleaved(self.rounds, ours, floor))
        print(f"{name}: {ours_s:.2f} s, floor {floor_s:.2f} s, {self.rows / ours_s / 1e6:.2f} M rows/s")
        return [bar(f"spark_{name}_speed_ratio", floor_s / ours_s, f">= {want}")]

    def load(self, schema: str) -> Any:
        return self.spark.read.format("persist").schema(schema).options(url=self.url, numPartitions=2).load("kept")

    def floor_load(self, files: list[str], schema: str) -> Any:
        groups = json.dumps([files[: len(files) // 2], files[len(files) // 2 :]])
        return self.spark.read.format("floor").schema(schema).option("files", groups).load()

    # --- streaming

    def stream(self) -> list[bool]:
        with persist.connect(self.url) as client:
            schema = persist_schema()
            shard = client.create_shard("feed", schema, ["k"])
            batches = 30
            for n in range(batches):
                shard.insert([{"k": f"k{n}-{i}", "n": i, "v": "x"} for i in range(1000)])

        def copy(sink: str) -> float:
            feed = self.spark.readStream.format("persist").options(url=self.url, maxRowsPerTrigger=1000).load("feed")
            to_shard = {"url": self.url, "key": "k"}
            return self.micro_batches(feed, lambda w: w.format("persist").options(**to_shard).start(sink), batches)

        def floor() -> float:
            rate = self.spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 1000).load()
            return self.micro_batches(rate, lambda w: w.format("noop").start(), batches)

        copy("warm")
        floor()
        samples = [(copy(f"sink-{n}"), floor()) for n in range(max(1, self.rounds))]
        for ours, noop_ms in samples:
            print(f"micro-batch: shard to shard {ours:.0f} ms, rate to noop {noop_ms:.0f} ms")
        return [bar("spark_micro_batch_extra_ms", median([ours - noop_ms for ours, noop_ms in samples]), "<= 150")]

    def kill(self, kills: int) -> list[bool]:
        """The streaming example, killed at random moments of source and sink: rows lost and rows doubled."""
        from examples import streaming

        checkpoints = self.directory / "killed"
        command = [sys.executable, "-m", "examples.streaming", self.url, str(checkpoints), "--no-feed"]

        def committed() -> int:
            """The last batch in Spark's commit log, of which it keeps the newest hundred."""
            logged = (checkpoints / "copy" / "commits").glob("*")
            return max((int(file.name) for file in logged if file.name.isdigit()), default=-1)

        moments = random.Random(kills)
        hits = 0
        with persist.connect(self.url) as client:
            for _ in range(2 * kills):  # a query that ended before its moment came does not count
                streaming.feed(client, 10)
                before = committed()
                child = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
                while child.poll() is None and committed() == before:
                    time.sleep(0.02)
                time.sleep(moments.random() * 3)
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
                    hits += 1
                if hits == kills:
                    break
            subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
            rows = {
                name: client.shard(name).snapshot().to_arrow(expand=True).to_pylist()
                for name in ("orders", "copied", "totals")
            }
        orders, copied = (Counter(row["number"] for row in rows[name]) for name in ("orders", "copied"))
        totals: Counter[str] = Counter()
        for row in rows["orders"]:
            totals[row["customer"]] += row["amount"]
        found = {row["customer"]: row["total"] for row in rows["totals"]}
        return [
            bar("spark_kills_of_a_running_query", hits, f">= {kills}"),
            bar("spark_kills_rows_lost", (orders - copied).total(), "<= 0"),
            bar("spark_kills_rows_doubled", (copied - orders).total(), "<= 0"),
            bar("spark_kills_wrong_totals", sum(found.get(key) != total for key, total in totals.items()), "<= 0"),
        ]

    def micro_batches(self, frame: Any, start: Callable[[Any], Any], batches: int) -> float:
        """Median milliseconds of a micro-batch, the first few left out."""
        checkpoint = tempfile.mkdtemp(dir=self.directory)
        query = start(frame.writeStream.option("checkpointLocation", checkpoint).trigger(processingTime="0 seconds"))
        progress: dict[int, float] = {}
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and len(progress) < batches:
            for p in query.recentProgress:
                if p["numInputRows"]:
                    progress[p["batchId"]] = p["durationMs"]["triggerExecution"]
            time.sleep(0.2)
        query.stop()
        return median([ms for batch, ms in sorted(progress.items())[5:]])


class Peaks:
    """The largest resident sets seen of Spark's Python processes and of the server, from /proc, by a thread."""

    def __init__(self, server_pid: int) -> None:
        self.worker_mib = 0.0
        self.server_mib = 0.0
        self._server = server_pid
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(SAMPLE_S):
            self.server_mib = max(self.server_mib, _resident_mib(self._server))
            for pid in _descendants(os.getpid()):
                if "pyspark" in _command(pid):
                    self.worker_mib = max(self.worker_mib, _resident_mib(pid))


def _command(pid: int) -> str:
    try:
        line = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return ""
    return b" ".join(line).decode(errors="replace") if b"python" in line[0] else ""


def _resident_mib(pid: int) -> float:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def _descendants(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except (OSError, IndexError):
                continue
    found = {root}
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return sorted(found)
        found |= more


def persist_schema() -> Any:
    import pyarrow as pa

    return pa.schema([("k", pa.string()), ("n", pa.int64()), ("v", pa.string())])


def noop(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


if __name__ == "__main__":
    sys.exit(main())
