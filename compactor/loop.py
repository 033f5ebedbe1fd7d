"""Running maintenance: which shard is looked at when, by how many threads, and how it stops.

A shard is looked at once when the loop begins, whenever it moves (the consensus store's push channel says so), and
again after the time that a task asked for. Shards that do not move cost nothing. Without a push channel all shards are
looked at every so often. With one they are too, as a safety net, but only a few in a second.
"""

from __future__ import annotations

import fnmatch
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from compactor.schedule import FAILED_AGAIN_S, Schedule, Turns
from persist.commit.durations import Durations
from persist.commit.location import Location
from persist.commit.storms import REASON_MAX
from persist.core.errors import Corruption, PersistError, UnknownShard

log = logging.getLogger("persist.maintenance")

# Looks at one shard; the seconds after which it wants to look again though nothing moves (None: not before it moves).
Task = Callable[[str], float | None]

# Whether to end. Tasks ask between two pieces of work: what is under way is finished, and no other piece is begun.
Ending = Callable[[], bool]


def never() -> bool:
    """An `Ending` of what nothing ends early."""
    return False


RESCAN_S = 600.0  # how often all shards are looked at in any case, with a push channel
RESCAN_PER_S = 5.0  # it takes longer where there are more shards than this for each second of it
RESCAN_WITHOUT_PUSH_S = 5.0


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """`patterns` are shell patterns of shard names. `concurrency`: how many shards are worked on at once."""

    patterns: tuple[str, ...] = ("*",)
    concurrency: int = 2
    interval_s: float = 0.05


class Loop:
    """Keeps `task` running over the shards of a location until it is told to stop.

    `per_shard` threads may be at one shard at a time, so that small merges go on while a large one runs.
    """

    def __init__(
        self,
        location: Location,
        task: Task,
        settings: LoopSettings | None = None,
        *,
        per_shard: int = 1,
        stop: threading.Event | None = None,
    ) -> None:
        """`stop`: set by `stop`; tasks may ask it too."""
        self._location = location
        self._task = task
        self._settings = settings or LoopSettings()
        self._per_shard = per_shard
        self._schedule = Schedule()
        self._is_owed = False  # the others have left those in turn no room
        self._wake = threading.Event()
        self._stop = stop or threading.Event()
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
        return len(self._schedule)

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
        turns = self._turns(pushed=unsubscribe is not None)
        pool = ThreadPoolExecutor(self._settings.concurrency, thread_name_prefix="persist-maintain")
        running: set[Future[None]] = set()
        try:
            while not self.stopping:
                self._wake.clear()
                now = clock.monotonic()
                running = {future for future in running if not future.done()}
                self.running = len(running)
                for name in self._due(turns, now, self._settings.concurrency - len(running)):
                    future = pool.submit(self._look, name)
                    future.add_done_callback(lambda _: self._wake.set())
                    running.add(future)
                    self.running = len(running)
                self._pause(now, turns.next_s, len(running) < self._settings.concurrency)
        finally:
            if unsubscribe is not None:
                unsubscribe()
            pool.shutdown(wait=True, cancel_futures=True)

    def _pause(self, now_s: float, turn_at_s: float, has_room: bool) -> None:
        """Sleep until something may be due. Without room for it that is when a look has ended."""
        wait: float | None = None
        if has_room:
            due = self._schedule.idle_s(now_s)
            wait = max(0.0, turn_at_s - now_s)
            if due is not None:
                wait = min(wait, max(due, self._settings.interval_s))
        self._wake.wait(wait)
        if not self.stopping:
            self._stop.wait(self._settings.interval_s)  # moves come in bursts: let them gather

    def _turns(self, pushed: bool) -> Turns:
        """All shards, by which those are found that moved without a word."""
        if pushed:
            return Turns(self._listed, self._matches, RESCAN_S, RESCAN_PER_S)
        return Turns(self._listed, self._matches, RESCAN_WITHOUT_PUSH_S, None)

    def _listed(self, after: str, limit: int) -> list[str]:
        page = self._location.names("", after, limit, with_dropped=True)
        self.round_ms = self._location.clock.now_ms()
        return page

    def _due(self, turns: Turns, now_s: float, room: int) -> list[str]:
        """At most so many shards to look at now.

        Those in turn come where the others leave room. Where they leave none, one of them comes every other time: so
        shards that move all the time keep none at rest from being looked at.
        """
        if not room:
            return []
        kept = 1 if self._is_owed and now_s >= turns.next_s else 0
        names = self._schedule.take(now_s, room - kept, self._per_shard)
        self._is_owed = len(names) == room
        if self._is_owed:
            return names
        try:
            in_turn = turns.draw(now_s, room - len(names))
        except PersistError as error:
            log.warning("cannot list the shards: %s", error)
            return names
        for name in in_turn:
            self._schedule.want(name, now_s)
        return names + self._schedule.take(now_s, max(kept, len(in_turn)), self._per_shard)

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


def in_turn(tasks: Sequence[Task], ending: Ending = never) -> Task:
    """One task that does all of `tasks`, even when one fails; it looks again when the first of them wants to."""

    def all_of_them(name: str) -> float | None:
        waits: list[float] = []
        failed: PersistError | None = None
        for task in tasks:
            if ending():
                break
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
