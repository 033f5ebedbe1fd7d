"""`make demo`: the flights of 2013 through PySpark into a shard and back, every figure compared with the CSV.

    python -m examples.flights              in a temporary directory
    python -m examples.flights --dir PATH   in a directory that stays, or with other options of `persist serve`

Exit code 0 only if all figures are equal.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from statistics import median
from typing import Any

import persist
from examples.flights import data, jobs
from examples.flights.data import BOARD_TIMES, END, FORGOTTEN, MONTHS, checksum, moment
from examples.session import local_session
from persist.core.errors import NotReadable

KILL_FROM = 6  # the server is killed in July, or later if July is written too fast
KILL_AT = 0.4  # of the time that a month took so far
WAIT_S = 180.0  # for one step
DIFFERENCES_SHOWN = 20
LOG_SHOWN_BYTES = 3_000
EXIT_DIFFERENT, EXIT_FAILED = 1, 2


class Checks:
    """Counts comparisons, and collects those that differ."""

    def __init__(self) -> None:
        self.compared = 0
        self.differences: list[str] = []

    def equal(self, what: str, actual: Any, expected: Any) -> None:
        """Compare two values, or all values of two dictionaries."""
        if isinstance(expected, dict):
            for key in sorted(actual.keys() | expected.keys()):
                self.equal(f"{what}, {key}", actual.get(key), expected.get(key))
            return
        self.compared += 1
        if actual != expected:
            self.differences.append(f"{what}: {actual!s:.80}, expected {expected!s:.80}")


class Server:
    """`persist serve` on a loopback port that stays the same after a restart."""

    def __init__(self, stores: list[str]) -> None:
        self._command = [sys.executable, "-m", "rpc.cli", "serve", "--host=127.0.0.1", "--log-level=warning", *stores]
        self._port = "0"
        self.start()

    def start(self) -> None:
        """Start the server, and wait until it prints its URL. Raises RuntimeError if it ends instead."""
        command = [*self._command, f"--port={self._port}"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        if not self.url:
            raise RuntimeError("the server did not start")
        self._port = self.url.rpartition(":")[2]

    def stop(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.wait(WAIT_S)


@contextmanager
def quiet(log: Path) -> Iterator[None]:
    """Send the standard error of this process and its children to a file; print its end if the work fails."""
    errors = os.dup(2)
    with log.open("wb") as file:
        os.dup2(file.fileno(), 2)
    try:
        yield
    except Exception:
        os.write(errors, log.read_bytes()[-LOG_SHOWN_BYTES:])
        raise
    finally:
        os.dup2(errors, 2)


@contextmanager
def step(name: str) -> Iterator[list[str]]:
    """Print a line with the duration when a step ends; the caller appends what else to print."""
    notes: list[str] = []
    began = time.monotonic()
    yield notes
    print(f"{name:44}{time.monotonic() - began:6.1f} s  {', '.join(notes)}".rstrip(), flush=True)


class Demo:
    """One run; `run` has the steps in order."""

    def __init__(self, server: Server, cores: int, csv: Path) -> None:
        self.server, self.cores, self.csv, self.checks = server, cores, csv, Checks()
        self.pool = ThreadPool(2)  # its threads do not keep a failed run alive

    def run(self) -> Checks:
        with step("Read the CSV, compute what is right") as notes:
            self.csv.write_bytes(csv := data.flights_csv())
            self.expected = data.Expected(csv)
            self.sums = {as_of: checksum(self.expected.contents(as_of)) for as_of in (*BOARD_TIMES, END - 1)}
            notes.append(f"{self.expected.flights:,} flights")
        with persist.connect(self.server.url) as client:
            taken = client.shards("flights")
            name = next(n for n in ("flights", *(f"flights-{k}" for k in range(2, 1000))) if n not in taken)
            self.shard = client.create_shard(name, data.COLUMNS, data.KEY)
            hold = self.shard.critical_reader("flights-demo")  # the whole year stays readable
            follower = self.pool.apply_async(jobs.follow, (self.server.url, name))
            with step("Start Spark"):
                self.spark = local_session("flights", self.cores, tries=4)
            self._write()
            self._compare_follower(follower)
            self._undo_a_mistake()
            self._compare_boards(BOARD_TIMES)
            before = self._maintain()
            self._compare_snapshots(BOARD_TIMES)
            self._forget(hold)
            after = self._maintain(before)
            self.checks.equal("compaction removes forgotten history", after < before, True)
            kept = [as_of for as_of in BOARD_TIMES if as_of >= FORGOTTEN]
            self._compare_snapshots(kept)
            self._compare_boards(kept)
        self.spark.stop()
        return self.checks

    def _write(self) -> None:
        """Write month by month, and once kill the server in the middle of a month."""
        with step("Flights to updates with PySpark") as notes:
            updates = jobs.read_updates(self.spark, str(self.csv)).persist()
            self.checks.equal("updates, by PySpark", updates.count(), sum(counts := self.expected.updates_by_month()))
            notes.append(f"{sum(counts):,} updates")
        seconds: list[float] = []
        was_killed = False
        for number, month in enumerate(MONTHS):
            with step(f"Write {moment(month[0])[:7]}") as notes:
                began = time.monotonic()
                killing = None
                if number >= KILL_FROM and not was_killed:
                    killing = self.pool.apply_async(self._kill_within, (month, KILL_AT * median(seconds)))
                jobs.write_month(updates, self.server.url, self.shard.name, month)
                if killing is not None and (killed := killing.get(WAIT_S)):
                    was_killed = True
                    notes.append(killed)
                seconds.append(time.monotonic() - began)
                notes.append(f"{counts[number]:,} updates")
            self._compare_snapshots([as_of for as_of in BOARD_TIMES if month[0] <= as_of < month[1]])
        if not was_killed:
            raise RuntimeError("every month was written too fast for the server to be killed in the middle of one")

    def _kill_within(self, month: tuple[int, int], wait_s: float) -> str:
        """Kill the server after a while unless the month is complete, and start it again. Returns a note about it."""
        time.sleep(wait_s)
        before = self.shard.upper()
        if before == persist.Antichain(month[1]):
            return ""
        self.server.stop(signal.SIGKILL)
        began = time.monotonic()
        self.server.start()
        down_s = time.monotonic() - began
        self.checks.equal("complete times before kill -9 are complete after it", before <= self.shard.upper(), True)
        self._compare_snapshots([max(as_of for as_of in BOARD_TIMES if as_of < month[0])])
        return f"kill -9 of the server, back after {down_s:.1f} s"

    def _compare_follower(self, follower: AsyncResult[tuple[Any, int]]) -> None:
        with step("The listener catches up") as notes:
            rows, updates = follower.get(WAIT_S)
            self.checks.equal("contents of the listener", checksum(rows), self.sums[END - 1])
            self.checks.equal("updates of the listener", updates, sum(self.expected.updates_by_month()))
            notes.append(f"{updates:,} updates")

    def _undo_a_mistake(self) -> None:
        """Write December twice, and restore; the history shows both commits."""
        with step("A month written twice, undone by a restore") as notes:
            twice = self.shard.changes(MONTHS[-1][0] - 1, END - 1).to_arrow()
            self.shard.compare_and_append(twice, END, END + 1, info={"month": "December, again"})
            is_wrong = checksum(self.shard.snapshot().to_arrow()) != self.sums[END - 1]
            self.checks.equal("the mistake is visible", is_wrong, True)
            restored = self.shard.restore(END - 1)
            self.checks.equal("rows after the restore", checksum(self.shard.snapshot().to_arrow()), self.sums[END - 1])
            self.checks.equal("changes since then", self.shard.changes(END - 1).to_arrow().num_rows, 0)
            last, mistake = [e for e in self.shard.history(20) if e.operation in ("compare_and_append", "restore")][:2]
            self.checks.equal("the last commit", last.operation, "restore")
            self.checks.equal("the information of the one before", mistake.info, {"month": "December, again"})
            notes.append(f"{restored.added:,} rows added, {restored.removed:,} removed")

    def _compare_boards(self, times: Sequence[int]) -> None:
        for as_of in times:
            with step(f"Board of {moment(as_of)} by PySpark") as notes:
                splits, figures = jobs.read_board(self.spark, self.server.url, self.shard.name, as_of, self.cores)
                self.checks.equal(f"splits of the board {moment(as_of)}", splits, self.cores)
                self.checks.equal(f"board {moment(as_of)}", figures, self.expected.figures(as_of))
                notes.append(f"{sum(n for (_, _, number), n in figures.items() if number == 0):,} flights")

    def _compare_snapshots(self, times: Sequence[int]) -> None:
        for as_of in times:
            with step(f"Snapshot of {moment(as_of)}") as notes:
                rows = self.shard.snapshot(as_of, num_splits=self.cores, wait_s=WAIT_S).to_arrow()
                self.checks.equal(f"all rows as of {moment(as_of)}", checksum(rows), self.sums[as_of])
                notes.append(f"{rows.num_rows:,} rows")

    def _maintain(self, most: float = math.inf) -> int:
        """Do now what maintenance does automatically, until the shard stores fewer than `most` updates."""
        with step("Compact, and collect garbage") as notes:
            end = time.monotonic() + WAIT_S
            while (merged := self.shard.optimize()).after.updates >= most and time.monotonic() < end:
                time.sleep(1.0)  # the server's own maintenance is at work on the shard
            collected = self.shard.vacuum()
            notes.append(f"{merged.after.batches} batches, {merged.after.updates:,} updates")
            notes.append(f"{merged.after.bytes / 2**20:.1f} MiB, {collected.blobs} blobs deleted")
        return merged.after.updates

    def _forget(self, hold: persist.CriticalReaderHandle) -> None:
        """Forget history once the leases of Spark's reads have lapsed; earlier times are then refused."""
        with step(f"Forget history before {moment(FORGOTTEN)[:10]}"):
            hold.downgrade_since(FORGOTTEN)
            end = time.monotonic() + WAIT_S
            while (since := self.shard.forget(FORGOTTEN).element) != FORGOTTEN and time.monotonic() < end:
                time.sleep(1.0)
            self.checks.equal("since", since, FORGOTTEN)
            for as_of in BOARD_TIMES:
                try:
                    self.shard.snapshot(as_of).close()
                    is_refused = False
                except NotReadable:
                    is_refused = True
                self.checks.equal(f"{moment(as_of)} is refused", is_refused, as_of < FORGOTTEN)


def main() -> int:
    text = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser(prog="make demo", description=__doc__, formatter_class=text)
    parser.add_argument("--cores", type=int, default=os.cpu_count() or 1, help="parallel tasks of Spark, and splits")
    parser.add_argument("--timeout", type=int, default=900, metavar="S", help="bound of the whole run")
    arguments, stores = parser.parse_known_args()
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        print("the demo needs Java 17 for PySpark (on Debian: openjdk-17-jre-headless)", file=sys.stderr)
        return EXIT_FAILED
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"the demo took longer than --timeout {arguments.timeout}"))
    signal.alarm(arguments.timeout)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="persist-demo-") as scratch, quiet(Path(scratch) / "log.txt"):
        server = Server(stores or [f"--dir={scratch}/shards"])
        try:
            checks = Demo(server, arguments.cores, Path(scratch) / "flights.csv").run()
        finally:
            server.stop()
    for difference in checks.differences[:DIFFERENCES_SHOWN]:
        print(f"DIFFERS {difference}")
    what = f"{len(checks.differences):,} of {checks.compared:,} figures differ from"
    what = what if checks.differences else f"all {checks.compared:,} figures are equal to"
    print(f"\n{what} those computed from the CSV, in {time.monotonic() - began:.0f} s")
    return EXIT_DIFFERENT if checks.differences else 0


if __name__ == "__main__":
    sys.exit(main())
