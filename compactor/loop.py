"""Running maintenance: which shard is looked at when, by how many threads, and how it stops.

A shard is looked at once when the loop begins, whenever it moves (the consensus store's push channel says so), and
again after the time that a task asked for. Shards that do not move cost nothing. Without a push channel, and as a
safety net with one, all shards are looked at every so often.
"""

from __future__ import annotations

import fnmatch
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from persist.commit.durations import Durations
from persist.commit.location import Location
from persist.commit.storms import REASON_MAX
from persist.core.errors import Corruption, PersistError, UnknownShard

log = logging.getLogger("persist.maintenance")

FAILED_AGAIN_S = 5.0

# Looks at one shard; the seconds after which it wants to look again though nothing moves (None: not before it moves).
Task = Callable[[str], float | None]


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """`patterns` are shell patterns of shard names. `rescan_s`: how often all shards are looked at in any case."""

    patterns: tuple[str, ...] = ("*",)
    concurrency: int = 2
    interval_s: float = 0.05
    rescan_s: float = 600.0
    rescan_without_push_s: float = 5.0


@dataclass
class _Shard:
    """When to look next (None: when it moves), and how many threads are at it."""

    due_s: float | None = None
    running: int = 0


@dataclass
class _Schedule:
    shards: dict[str, _Shard] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def want(self, name: str, at_s: float) -> None:
        with self.lock:
            shard = self.shards.setdefault(name, _Shard())
            shard.due_s = at_s if shard.due_s is None else min(shard.due_s, at_s)

    def take(self, now_s: float, most: int, per_shard: int) -> list[str]:
        """Shards that are due, those that waited longest first; each counts as running until `done`."""
        with self.lock:
            due = [
                (shard.due_s, name)
                for name, shard in self.shards.items()
                if shard.due_s is not None and shard.due_s <= now_s and shard.running < per_shard
            ]
            names = [name for _, name in sorted(due)[:most]]
            for name in names:
                self.shards[name].due_s = None
                self.shards[name].running += 1
            return names

    def done(self, name: str) -> None:
        with self.lock:
            shard = self.shards[name]
            shard.running -= 1
            if shard.due_s is None and not shard.running:
                del self.shards[name]  # nothing to do for it

    def idle_s(self, now_s: float) -> float | None:
        """Seconds until something is due; None when nothing is."""
        with self.lock:
            due = [shard.due_s for shard in self.shards.values() if shard.due_s is not None]
        return max(0.0, min(due) - now_s) if due else None


class Loop:
    """Keeps `task` running over the shards of a location until it is told to stop.

    `per_shard` threads may be at one shard at a time, so that small merges go on while a large one runs.
    """

    def __init__(
        self, location: Location, task: Task, settings: LoopSettings | None = None, *, per_shard: int = 1
    ) -> None:
        self._location = location
        self._task = task
        self._settings = settings or LoopSettings()
        self._per_shard = per_shard
        self._schedule = _Schedule()
        self._wake = threading.Event()
        self._stop = threading.Event()
        self.failures = 0
        self.running = 0
        self.looks = Durations()  # by what came of them
        self.round_ms = 0  # when the shards were listed last, by the wall clock

    @property
    def concurrency(self) -> int:
        return self._settings.concurrency

    @property
    def waiting(self) -> int:
        """Shards that are looked at now, or later without another move."""
        return len(self._schedule.shards)

    def stop(self) -> None:
        """Make `run` finish what is under way and return. From any thread; a signal handler must not call it."""
        self._stop.set()
        self._wake.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def names(self) -> Iterator[str]:
        """The shards that match the patterns."""
        return filter(self._matches, self._location.all_names())

    def once(self) -> int:
        """Look at every shard once; how many could not be maintained."""
        before = self.failures
        with ThreadPoolExecutor(self._settings.concurrency, thread_name_prefix="persist-maintain") as pool:
            for _ in pool.map(lambda name: None if self.stopping else self._attempt(name), self.names()):
                if self.stopping:
                    break
        return self.failures - before

    def run(self) -> None:
        """Look at shards as they move, until `stop`. Errors of one shard are logged and keep no other waiting."""
        clock = self._location.clock
        unsubscribe = self._location.consensus.subscribe(self._moved)
        rescan_s = self._settings.rescan_without_push_s if unsubscribe is None else self._settings.rescan_s
        rescanned: float | None = None
        pool = ThreadPoolExecutor(self._settings.concurrency, thread_name_prefix="persist-maintain")
        running: set[Future[None]] = set()
        try:
            while not self.stopping:
                self._wake.clear()
                now = clock.monotonic()
                if rescanned is None or now - rescanned >= rescan_s:
                    rescanned = now if self._rescan(now) else now - rescan_s + FAILED_AGAIN_S
                running = {future for future in running if not future.done()}
                self.running = len(running)
                room = self._settings.concurrency - len(running)
                for name in self._schedule.take(now, room, self._per_shard) if room else ():
                    future = pool.submit(self._look, name)
                    future.add_done_callback(lambda _: self._wake.set())
                    running.add(future)
                    self.running = len(running)
                self._pause(now, rescanned + rescan_s, len(running) < self._settings.concurrency)
        finally:
            if unsubscribe is not None:
                unsubscribe()
            pool.shutdown(wait=True, cancel_futures=True)

    def _pause(self, now_s: float, rescan_at_s: float, has_room: bool) -> None:
        """Sleep until something may be due."""
        wait = rescan_at_s - now_s
        due = self._schedule.idle_s(now_s) if has_room else None
        if due is not None:
            wait = min(wait, max(due, self._settings.interval_s))
        self._wake.wait(max(0.0, wait))
        if not self.stopping:
            self._stop.wait(self._settings.interval_s)  # moves come in bursts: let them gather

    def _rescan(self, now_s: float) -> bool:
        try:
            for name in self.names():
                self._schedule.want(name, now_s)
        except PersistError as error:
            log.warning("cannot list the shards: %s", error)
            return False
        self.round_ms = self._location.clock.now_ms()
        return True

    def _moved(self, name: str) -> None:
        if self._matches(name):
            self._schedule.want(name, self._location.clock.monotonic())
            self._wake.set()

    def _matches(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._settings.patterns)

    def _look(self, name: str) -> None:
        try:
            again = self._attempt(name)
            if again is not None:
                self._schedule.want(name, self._location.clock.monotonic() + again)
        finally:
            self._schedule.done(name)

    def _attempt(self, name: str) -> float | None:
        clock = self._location.clock
        begun_s, outcome = clock.monotonic(), "failed"
        try:
            again = self._task(name)
            outcome = "ok"
            return again
        except UnknownShard:
            outcome = "ok"
            return None
        except PersistError as error:
            self.failures += 1
            level = logging.WARNING
            if isinstance(error, Corruption):
                level = logging.ERROR
                self._location.sight.storms.count_corruption()
            fields = {"shard": name, "kind": error.kind, "reason": str(error)[:REASON_MAX]}
            log.log(level, "maintenance of a shard failed", extra=fields)
        except Exception:
            self.failures += 1
            log.exception("maintenance of a shard failed", extra={"shard": name})
        finally:
            self.looks.observe((outcome,), clock.monotonic() - begun_s)
        return FAILED_AGAIN_S


def in_turn(tasks: Sequence[Task]) -> Task:
    """One task that does all of `tasks`, even when one fails; it looks again when the first of them wants to."""

    def all_of_them(name: str) -> float | None:
        waits: list[float] = []
        failed: PersistError | None = None
        for task in tasks:
            try:
                wait = task(name)
            except PersistError as error:
                failed = failed if isinstance(failed, Corruption) else error  # only one of them can be raised
                continue
            if wait is not None:
                waits.append(wait)
        if failed is not None:
            raise failed
        return min(waits, default=None)

    return all_of_them
