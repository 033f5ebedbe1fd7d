"""The course of the demo, step by step. Each step checks what it can see."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import persist
from examples.flights import store
from examples.flights.dataset import (
    BOARD_TIMES,
    COLUMNS,
    END,
    FORGOTTEN,
    KEY,
    MONTH_NAMES,
    MONTHS,
    checksum,
    flights_csv,
    moment,
)
from examples.flights.expected import Expected
from examples.flights.figures import Board, Checks, figures_of
from examples.flights.processes import Child, Children, Deadline, DemoFailed, Server
from examples.flights.progress import Progress, Step
from examples.flights.report import Outcome
from examples.flights.timeline import COMMIT, EVENT, Timeline, looker
from persist.client.read_leases import CriticalReaderHandle
from persist.client.rewrites import Restored
from persist.client.shard import Shard
from persist.commit.location import Location
from persist.core.errors import NotReadable

START_S = 60.0  # for a server or a listener to be ready
SPARK_START_S = 180.0  # for a Spark session, on a slow machine
STEP_S = 180.0  # for one month, one board, the rest of the listener
MAINTENANCE_S = 120.0
KILL_FROM = 6  # the server is killed in July, or later if July is over too soon
KILL_AT = 0.4  # of the time that a month took so far
LAPSE_S = 120.0  # for leases of finished Spark jobs to lapse
HOLD = "flights-demo"


@dataclass
class Demo:
    """One run. `step_*` methods in the order of `run`."""

    location: Location
    children: Children
    progress: Progress
    deadline: Deadline
    scratch: Path
    cores: int
    found: Outcome = field(default_factory=Outcome)
    checks: Checks = field(default_factory=Checks)

    def run(self) -> Outcome:
        began = time.monotonic()
        self._read_csv()
        server = self._start_server()
        name = store.free_name(self.location, "flights")
        self.timeline = Timeline(looker(self.location, name))
        with persist.connect(server.url) as client, self.timeline:
            shard = client.create_shard(name, COLUMNS, KEY)
            hold = shard.critical_reader(HOLD)  # the listener moves on; all of the year stays readable
            listener = self._start("listener", server, shard, "listening", START_S)
            self._write(server, shard)
            self._hear(listener)
            self._undo(shard)
            board = self._start("board", server, shard, "started", SPARK_START_S, *self._spark_arguments())
            self._boards(board, "Boards through PySpark", BOARD_TIMES)
            self._maintain("Compaction and garbage collection", shard)
            self._snapshots("Snapshots after compaction", shard, BOARD_TIMES)
            self._forget(shard, hold)
            self._maintain("Compaction and GC once more", shard)
            fewer = self.found.stored[-1].updates < self.found.stored[-2].updates
            self.checks.equal("compaction collapses the history that was forgotten", fewer, True)
            kept = tuple(time for time in BOARD_TIMES if time >= FORGOTTEN)
            self._snapshots("Snapshots after forgetting", shard, kept)
            self._refused(shard, tuple(time for time in BOARD_TIMES if time < FORGOTTEN))
            self._boards(board, "Boards through PySpark once more", kept)
            shard.close()
        self.found.timeline = self.timeline.to_json()
        self.found.compared, self.found.failed = self.checks.compared, self.checks.failed
        self.found.seconds = time.monotonic() - began
        return self.found

    # --- before the writes

    def _read_csv(self) -> None:
        with self.progress.step("Reading the CSV, computing what is right", 1 + len(BOARD_TIMES)) as step:
            csv = flights_csv()
            (self.scratch / "flights.csv").write_bytes(csv)
            self.expected = Expected(csv)
            step.advance(1)
            self.sums: dict[int, str] = {}
            for number, as_of in enumerate(BOARD_TIMES, 2):
                self.sums[as_of] = checksum(self.expected.contents(as_of))
                step.advance(number)
            self.found.flights, self.found.cores = self.expected.flights, self.cores
            step.advance(1 + len(BOARD_TIMES), f"{self.expected.flights:,} flights")

    def _start_server(self) -> Server:
        with self.progress.step("Starting persist serve") as step:
            server = Server(self.children, self.deadline.left(START_S))
            step.advance(1, server.url)
        return server

    def _spark_arguments(self) -> tuple[str, ...]:
        return "--cores", str(self.cores), "--scratch", str(self.scratch / "spark")

    def _start(self, what: str, server: Server, shard: Shard, event: str, wait_s: float, *more: str) -> Child:
        with self.progress.step(f"Starting the {what}") as step:
            to = ("--url", server.url, "--shard", shard.name)
            child = self.children.start(what, f"examples.flights.{what}", *to, *more)
            child.expect(event, self.deadline.left(wait_s))
            step.advance(1)
        return child

    # --- writing

    def _write(self, server: Server, shard: Shard) -> None:
        csv = ("--csv", str(self.scratch / "flights.csv"))
        writer = self._start("writer", server, shard, "started", SPARK_START_S, *csv, *self._spark_arguments())
        with self.progress.step("Flights to updates with PySpark") as step:
            counts = writer.expect("ready", self.deadline.left(SPARK_START_S))["updates"]
            self.checks.equal("updates of each month, as PySpark counts them", counts, self.expected.updates_by_month())
            step.advance(1, f"{sum(counts):,} updates")
        with self.progress.step("Writing month by month", len(MONTHS)) as step:
            for number in range(len(MONTHS)):
                writer.expect("begin", self.deadline.left(STEP_S))
                wrote = self._kill_within(number, writer, server, shard, step)
                wrote = wrote or writer.expect("wrote", self.deadline.left(STEP_S))
                self.found.months_s.append(float(wrote["seconds"]))
                self.found.updates += int(wrote["updates"])
                self.timeline.mark(COMMIT, f"{MONTH_NAMES[number]}, {int(wrote['updates']):,} updates")
                step.advance(number + 1, f"{MONTH_NAMES[number]}, {self.found.updates:,} updates")
                for as_of in BOARD_TIMES:
                    if MONTHS[number][0] <= as_of < MONTHS[number][1]:
                        self._snapshot(shard, as_of, "while writing")
            if not self.found.killed_in:
                raise DemoFailed("every month was written too fast for the server to be killed in the middle of one")
        writer.finish(self.deadline.left(STEP_S))
        self.found.stored.append(store.look(self.location, shard.name))

    def _kill_within(
        self, number: int, writer: Child, server: Server, shard: Shard, step: Step
    ) -> dict[str, Any] | None:
        """Once, from KILL_FROM on: kill the server while a month is being written, and start it again.

        The event that the month was written, if it came before the kill.
        """
        if number < KILL_FROM or self.found.killed_in:
            return None
        typical = sorted(self.found.months_s)[len(self.found.months_s) // 2]
        wrote = writer.event(KILL_AT * typical)
        if wrote is not None:
            return wrote
        before = shard.upper()
        server.kill()
        self.timeline.mark(EVENT, f"kill -9 of the server in the middle of {MONTH_NAMES[number]}")
        began = time.monotonic()
        self.found.killed_in = MONTH_NAMES[number]
        server.start(self.deadline.left(START_S))
        self.found.down_s = time.monotonic() - began
        self.timeline.mark(EVENT, "the server is back, and the month is written to its end")
        self.checks.equal("what was complete before kill -9 is complete after it", before <= shard.upper(), True)
        last = max(as_of for as_of in BOARD_TIMES if as_of < MONTHS[number][0])
        self._snapshot(shard, last, "after kill -9")
        step.note(
            f"kill -9 of the server in the middle of {self.found.killed_in}; back after {self.found.down_s:.1f} s"
        )
        return None

    def _hear(self, listener: Child) -> None:
        with self.progress.step("The listener catches up", END) as step:
            while True:
                event = listener.event(self.deadline.left(STEP_S))
                if event is None:
                    raise listener.failed(f"said nothing for {STEP_S:.0f} s")
                if event["event"] == "done":
                    break
                step.advance(int(event["upper"]))
            step.advance(END, f"{event['updates']:,} updates in {event['events']} events")
            contents = self.expected.contents(END - 1)
            self.checks.equal("rows that the listener ends with", event["rows"], contents.num_rows)
            self.checks.equal("contents that the listener ends with", event["checksum"], checksum(contents))
            self.checks.equal(
                "updates that the listener heard", event["updates"], sum(self.expected.updates_by_month())
            )
            peaks = list(event["peaks"])
            for number, (ours, right) in enumerate(zip(peaks, self.expected.peaks(), strict=True)):
                self.checks.equal(f"most in the air on day {number + 1}, as heard", ours, right)
            self.found.peaks = peaks
            self.timeline.heard = list(event["heard"])
            self.timeline.mark(EVENT, "the listener has heard all of the year")
            self.found.listener = {"updates": event["updates"], "seconds": event["seconds"]}
        listener.finish(self.deadline.left(START_S))

    # --- a mistake

    def _undo(self, shard: Shard) -> None:
        """December is written a second time, and taken back by a restore to what was there before."""
        right, december = checksum(self.expected.contents(END - 1)), MONTHS[-1][0]
        with self.progress.step("A bad month, undone by a restore", 3) as step:
            twice = shard.changes(december - 1, END - 1).to_arrow()
            shard.compare_and_append(twice, END, END + 1, info={"month": "December, once more"})
            step.advance(1, f"{twice.num_rows:,} rows of December written twice")
            self.timeline.mark(EVENT, "December is written twice, by mistake")
            wrong = checksum(shard.snapshot().to_arrow()) != right
            self.checks.equal("December twice is seen in the rows", wrong, True)
            step.advance(2)
            done = shard.restore(END - 1)
            self.timeline.mark(EVENT, "a restore takes it back, by one commit")
            updates = sum(abs(diff) for diff in twice["__diff"].to_pylist())
            self.checks.equal("rows that the restore wrote", (done.added or 0) + (done.removed or 0), updates)
            self.checks.equal("all rows after the restore", checksum(shard.snapshot().to_arrow()), right)
            self.checks.equal("changes since then", shard.changes(END - 1).to_arrow().num_rows, 0)
            self._told(shard, step, done)
            step.advance(3, f"{done.added:,} rows back, {done.removed:,} gone, all equal again")

    def _told(self, shard: Shard, step: Step, done: Restored) -> None:
        """The commit history tells both, with who and why."""
        written = [entry for entry in shard.history(20) if entry.operation in ("compare_and_append", "restore")]
        last, before = written[:2]
        for entry in (before, last):
            what = f"{entry.rows:,} rows at [{entry.lower}, {entry.upper})"
            step.note(
                f"{entry.timestamp:%H:%M:%S} v{entry.seqno} {entry.operation}: {what} {entry.info or entry.purpose}"
            )
        self.checks.equal(
            "the last entry of the history", (last.operation, last.lower), ("restore", done.lower.element)
        )
        self.checks.equal("what was said of the one before", before.info, {"month": "December, once more"})

    # --- reading

    def _boards(self, board: Child, name: str, times: tuple[int, ...]) -> None:
        board.tell(json.dumps(times))
        with self.progress.step(name, len(times)) as step:
            for number, as_of in enumerate(times, 1):
                event = board.expect("board", self.deadline.left(STEP_S))
                figures = figures_of(event["figures"])
                self.checks.equal(f"time of the board {moment(as_of)}", event["as_of"], as_of)
                self.checks.equal(f"splits of the board {moment(as_of)}", event["splits"], self.cores)
                self.checks.figures(f"{name}, {moment(as_of)}", figures, self.expected.figures(as_of))
                self.found.boards[as_of] = figures
                self.found.spark_rows += sum(flights for flights, *_ in figures.values())
                self.found.spark_s += event["seconds"]
                self.found.snapshots += 1
                shown = Board.of(figures)
                step.advance(
                    number, f"{shown.scheduled:,} scheduled, {shown.in_the_air} in the air, {shown.landed:,} landed"
                )

    def _snapshots(self, name: str, shard: Shard, times: tuple[int, ...]) -> None:
        with self.progress.step(name, len(times)) as step:
            for number, as_of in enumerate(times, 1):
                self._snapshot(shard, as_of, name.lower())
                step.advance(number, "checksums of all rows equal")

    def _snapshot(self, shard: Shard, as_of: int, when: str) -> None:
        """All rows as of a time through the Arrow client: their checksum must be that of the CSV's."""
        began = time.monotonic()
        rows = shard.snapshot(as_of, num_splits=self.cores, wait_s=self.deadline.left(STEP_S)).to_arrow()
        self.found.client_s += time.monotonic() - began
        self.found.client_rows += rows.num_rows
        self.found.snapshots += 1
        self.checks.equal(f"all rows as of {moment(as_of)}, {when}", checksum(rows), self.sums[as_of])

    # --- maintenance

    def _maintain(self, name: str, shard: Shard) -> None:
        """Both as processes that do what is due and end, beside those that the server runs all the time."""
        self.timeline.mark(EVENT, f"{name.lower()} begins".replace(" gc", " GC"))
        with self.progress.step(name) as step:
            number = len(self.found.stored)
            for command in (("run", "--no-gc"), ("gc",)):
                arguments = ("--once", "--shards", shard.name)
                bound_s = self.deadline.left(MAINTENANCE_S)
                words = ("maintain", *command, *arguments)
                self.children.run(f"{command[0]}-{number}", "rpc.cli", *words, timeout_s=bound_s)
                self._wait_for_claims(shard)
            now = store.look(self.location, shard.name)
            before = self.found.stored[-1]
            self.found.stored.append(now)
            step.advance(1, f"{before.batches} batches to {now.batches}, {before.blobs} blobs to {now.blobs}")
        self.found.maintenance_s.append(step.seconds)

    def _wait_for_claims(self, shard: Shard) -> None:
        """What was due may be under way in the server's own maintenance already: let it finish."""
        end = time.monotonic() + self.deadline.left(MAINTENANCE_S)
        while self.location.machine(shard.name).refresh().claims:
            if time.monotonic() > end:
                raise DemoFailed(f"maintenance of shard {shard.name!r} did not come to rest")
            time.sleep(0.2)

    def _forget(self, shard: Shard, hold: CriticalReaderHandle) -> None:
        """Give up history before FORGOTTEN, once nobody else holds it.

        Leases of Spark's reads lapse by themselves, since Spark never says that it is done with a plan. Until then
        they hold back both since and what GC may delete.
        """
        with self.progress.step(f"Forgetting history before {moment(FORGOTTEN)[:10]}", 100) as step:
            began = time.monotonic()
            while self._is_held(shard):
                waited = time.monotonic() - began
                if waited > self.deadline.left(LAPSE_S):
                    raise DemoFailed(f"a reader still holds the shard after {waited:.0f} s")
                step.advance(int(100 * waited / LAPSE_S), "waiting for the leases of Spark's reads to lapse")
                time.sleep(1.0)
            hold.downgrade_since(FORGOTTEN)
            since = shard.forget(FORGOTTEN)
            self.timeline.mark(EVENT, f"history before {moment(FORGOTTEN)[:10]} is given up")
            self.checks.equal("since, when history was given up", since.element, FORGOTTEN)
            step.advance(100, "the leases of Spark's reads have lapsed")

    def _is_held(self, shard: Shard) -> bool:
        """By the time that judges leases: on a slow machine it is behind this one's wall clock."""
        machine = self.location.machine(shard.name)
        state = machine.refresh()
        now_ms = machine.lease_now_ms(state)
        return any(not reader.lapsed(now_ms) for reader in state.leased_readers.values())

    def _refused(self, shard: Shard, times: tuple[int, ...]) -> None:
        """What was forgotten must be refused, not answered wrongly."""
        for as_of in times:
            try:
                shard.snapshot(as_of).close()
                answer = "a snapshot"
            except NotReadable as error:
                answer = error.kind
            self.checks.equal(f"a read of forgotten history, {moment(as_of)}", answer, NotReadable.kind)


__all__ = ["Demo"]
