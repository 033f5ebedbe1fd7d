"""The maintenance loop: when each shard is visited, by how many threads, and how it ends.

A shard is visited when the loop starts, whenever it moves (reported by the push channel of the consensus store), and
after the delay that a task returned. Shards that do not move cost nothing. Without a push channel all shards are
visited periodically. With one they are too, as a safety net, but at a low rate.
"""

from __future__ import annotations

import fnmatch
import heapq
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from persist.commit.location import Location
from persist.core.errors import Corruption, PersistError, UnknownShard
from persist.telemetry.metrics import REASON_MAX, Durations

log = logging.getLogger("persist.maintenance")

# Maintains one shard and returns after how many seconds to visit it again if it does not move (None: not at all).
Task = Callable[[str], float | None]

# Whether to stop. Tasks check it between two pieces of work: the current piece is completed, and no other is started.
Ending = Callable[[], bool]


def never() -> bool:
    """An `Ending` of work that is not stopped early."""
    return False


NAMES_PAGE = 250  # read at once, and visited before the next page is read
STALE_MIN = 64  # stale entries of the heap to tolerate, in addition to one per shard
FAILED_AGAIN_S = 5.0
RESCAN_S = 600.0  # the least duration of a scan of all shards, with a push channel
RESCAN_PER_S = 5.0  # the scan takes longer if it would visit more shards per second than this
RESCAN_WITHOUT_PUSH_S = 5.0
INTERVAL_S = 0.05  # the least pause between two rounds


@dataclass(slots=True)
class _Shard:
    """When the next visit is due (None: when it moves), and how many threads are visiting the shard."""

    due_s: float | None = None
    running: int = 0


class Schedule:
    """Shards with the times of their next visits. Every operation takes logarithmic time. Thread-safe."""

    def __init__(self) -> None:
        self._shards: dict[str, _Shard] = {}
        self._heap: list[tuple[float, str]] = []  # an entry is stale unless it equals the due time of its shard
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._shards)

    def want(self, name: str, at_s: float) -> bool:
        """Schedule a visit of the shard at `at_s`, unless it is due earlier. False: it is being visited now."""
        with self._lock:
            shard = self._shards.setdefault(name, _Shard())
            if shard.due_s is None or at_s < shard.due_s:
                shard.due_s = at_s
                self._push(name, at_s)
            return not shard.running

    def take(self, now_s: float, most: int, per_shard: int) -> list[str]:
        """At most `most` due shards, the longest overdue first; each counts as running until `done`."""
        names: list[str] = []
        with self._lock:
            while len(names) < most and self._heap and self._heap[0][0] <= now_s:
                due_s, name = heapq.heappop(self._heap)
                shard = self._shards.get(name)
                if shard is None or shard.due_s != due_s or shard.running >= per_shard:
                    continue  # `done` reschedules a shard that already has `per_shard` visits
                shard.due_s = None
                shard.running += 1
                names.append(name)
        return names

    def end_visit(self, name: str) -> None:
        with self._lock:
            shard = self._shards[name]
            shard.running -= 1
            if shard.due_s is not None:
                self._push(name, shard.due_s)
            elif not shard.running:
                del self._shards[name]

    def idle_s(self, now_s: float) -> float | None:
        """Seconds until the next visit may be due; None if none is scheduled."""
        with self._lock:
            return max(0.0, self._heap[0][0] - now_s) if self._heap else None

    def _push(self, name: str, due_s: float) -> None:
        heapq.heappush(self._heap, (due_s, name))
        if len(self._heap) > 2 * len(self._shards) + STALE_MIN:
            self._heap = [(shard.due_s, name) for name, shard in self._shards.items() if shard.due_s is not None]
            heapq.heapify(self._heap)


class NameScan:
    """Cycles through all names of a location, page by page: the first time without a limit of the rate.

    After that a scan starts every `period_s`, or when the previous one ends if that takes longer, and plans at most
    `per_s` visits per second (None: no limit). So the cost of an idle location is bounded for any number of shards.
    `list_names` returns a page of names after a name; `matches` selects names.
    """

    def __init__(
        self,
        list_names: Callable[[str, int], list[str]],
        matches: Callable[[str], bool],
        period_s: float,
        per_s: float | None,
    ) -> None:
        self._list_names = list_names
        self._matches = matches
        self._period_s = period_s
        self._gap_s = 1 / per_s if per_s else 0.0
        self._is_first = True
        self._started_s = 0.0  # of the current scan
        self._after = ""  # the last name of the pages so far; "": a scan starts
        self.next_s = float("-inf")  # `draw` returns no names before this

    def draw(self, now_s: float) -> list[tuple[str, float]]:
        """The names of the next page, each with the time at which to visit it; none before `next_s`.

        Raises PersistError if the page cannot be read; it is read again after FAILED_AGAIN_S.
        """
        if now_s < self.next_s:
            return []
        if not self._after:
            self._started_s = now_s
        self.next_s = now_s + FAILED_AGAIN_S
        page = self._list_names(self._after, NAMES_PAGE)
        gap_s = 0.0 if self._is_first else self._gap_s
        visits = [(name, now_s + number * gap_s) for number, name in enumerate(filter(self._matches, page))]
        self.next_s = now_s + max(1, len(visits)) * gap_s  # reading a page counts as one name
        self._after = page[-1] if len(page) == NAMES_PAGE else ""
        if not self._after:
            self.next_s, self._is_first = max(self.next_s, self._started_s + self._period_s), False
        return visits


class BackgroundThread(ABC):
    """A thread that calls `once` every `poll_s` seconds from `start` to `stop`, and logs its exceptions to `log`."""

    def __init__(self, name: str, poll_s: float, log: logging.Logger) -> None:
        self._poll_s = poll_s
        self._log = log
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> None:
        """Return when the current call of `once` has ended, after `timeout_s` seconds at the latest."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    @abstractmethod
    def once(self) -> bool:
        """Do what is due. Whether anything was."""

    def _run(self) -> None:
        while not self._stop.wait(self._poll_s):
            try:
                self.once()
            except Exception:  # a bug, or a store that is already closed: maintenance continues
                if not self._stop.is_set():
                    self._log.exception("the thread %s failed, retrying", self._thread.name)


class Loop:
    """Runs `task` on the shards of a location until it is stopped.

    `patterns` are shell patterns of shard names. `concurrency`: how many visits run in parallel, at most `per_shard` of
    them on the same shard, so that small merges continue while a large one runs.
    """

    def __init__(
        self,
        location: Location,
        task: Task,
        *,
        patterns: tuple[str, ...] = ("*",),
        concurrency: int = 2,
        per_shard: int = 1,
        stop: threading.Event | None = None,
    ) -> None:
        """`stop`: set by `stop`; tasks may check it too."""
        self._location = location
        self._task = task
        self.concurrency = concurrency
        self._patterns = patterns
        self._per_shard = per_shard
        self._schedule = Schedule()
        self._scanned: set[str] = set()  # names of the last page of the scan that are not visited yet
        self._wake = threading.Event()
        self._stop = stop or threading.Event()
        self.failures = 0
        self.running = 0
        self.looks = Durations()  # durations of visits by outcome
        self.round_ms = 0  # when the shards were last listed, wall clock

    @property
    def waiting(self) -> int:
        """Shards that are being visited or have a scheduled visit."""
        return len(self._schedule)

    def stop(self) -> None:
        """Make `run` complete its current work and return. From any thread, but not from a signal handler."""
        self._stop.set()
        self._wake.set()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def names(self) -> Iterator[str]:
        """The shards that match the patterns."""
        return filter(self._matches, self._location.all_names())

    def once(self) -> int:
        """Visit every shard once. Returns the number of failures."""
        before = self.failures
        with ThreadPoolExecutor(self.concurrency, thread_name_prefix="persist-maintain") as pool:
            for _ in pool.map(lambda name: None if self.stopping else self._attempt(name), self.names()):
                if self.stopping:
                    break
        return self.failures - before

    def run(self) -> None:
        """Visit shards as they move, until `stop`. Errors of a shard are logged and do not delay other shards."""
        clock = self._location.clock
        unsubscribe = self._location.consensus.subscribe(self._moved)
        limits = (RESCAN_WITHOUT_PUSH_S, None) if unsubscribe is None else (RESCAN_S, RESCAN_PER_S)
        scan = NameScan(self._list_page, self._matches, *limits)
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="persist-maintain")
        running: set[Future[None]] = set()
        try:
            while not self.stopping:
                self._wake.clear()
                now = clock.monotonic()
                running = {future for future in running if not future.done()}
                self.running = len(running)
                for name in self._due(scan, now, self.concurrency - len(running)):
                    future = pool.submit(self._visit, name)
                    future.add_done_callback(lambda _: self._wake.set())
                    running.add(future)
                    self.running = len(running)
                self._pause(now, scan, len(running) < self.concurrency)
        finally:
            if unsubscribe is not None:
                unsubscribe()
            pool.shutdown(wait=True, cancel_futures=True)

    def _pause(self, now_s: float, scan: NameScan, has_room: bool) -> None:
        """Sleep until a visit may be due or, without a free thread, until a visit ends."""
        waits: list[float] = []
        if has_room:
            due = self._schedule.idle_s(now_s)
            if due is not None:
                waits.append(max(due, INTERVAL_S))
            if not self._scanned:
                waits.append(max(0.0, scan.next_s - now_s))
        self._wake.wait(min(waits, default=None))
        if not self.stopping:
            self._stop.wait(INTERVAL_S)  # moves come in bursts, so collect them

    def _list_page(self, after: str, limit: int) -> list[str]:
        page = self._location.names("", after, limit, with_dropped=True)
        self.round_ms = self._location.clock.now_ms()
        return page

    def _due(self, scan: NameScan, now_s: float, room: int) -> list[str]:
        """At most `room` shards to visit now, the longest overdue first: shards that move do not starve idle ones.

        A page of the scan is read when all names of the previous one were visited. One that was being visited when the
        page was read does not count: its visit may take long.
        """
        if not self._scanned:
            try:
                page = scan.draw(now_s)
            except PersistError as error:
                log.warning("cannot list the shards: %s", error)
                page = []
            self._scanned.update(name for name, at_s in page if self._schedule.want(name, at_s))
        names = self._schedule.take(now_s, room, self._per_shard)
        self._scanned.difference_update(names)
        return names

    def _moved(self, name: str) -> None:
        if self._matches(name):
            self._schedule.want(name, self._location.clock.monotonic())
            self._wake.set()

    def _matches(self, name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)

    def _visit(self, name: str) -> None:
        try:
            delay_s = self._attempt(name)
            if delay_s is not None:
                self._schedule.want(name, self._location.clock.monotonic() + delay_s)
        finally:
            self._schedule.end_visit(name)

    def _attempt(self, name: str) -> float | None:
        clock = self._location.clock
        started_s, outcome = clock.monotonic(), "failed"
        try:
            delay_s = self._task(name)
            outcome = "ok"
            return delay_s
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
            self.looks.observe((outcome,), clock.monotonic() - started_s)
        return FAILED_AGAIN_S


def in_turn(tasks: Sequence[Task], ending: Ending = never) -> Task:
    """One task that runs all of `tasks`, even if one fails, with the least of their delays."""

    def run_all(name: str) -> float | None:
        delays: list[float | None] = []
        failure: PersistError | None = None
        for task in tasks:
            if ending():
                break
            try:
                delays.append(task(name))
            except PersistError as error:
                failure = failure if isinstance(failure, Corruption) else error  # only one of them can be raised
        if failure is not None:
            raise failure
        return soonest(*delays)

    return run_all


def soonest(*delays: float | None) -> float | None:
    """The least of the delays that are not None, or None."""
    return min((delay for delay in delays if delay is not None), default=None)
