"""The maintenance loop: when each shard is visited, by how many threads, and how it ends."""

from __future__ import annotations

import fnmatch
import heapq
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from persist.commit.location import Location
from persist.core.errors import Corruption, PersistError, UnknownShard
from persist.telemetry.metrics import REASON_MAX, Durations

# When shards are looked at: those that moved or asked for it, by a heap of due times, and all the others in turn.


NAMES_PAGE = 1000
BURST_S = 1.0  # of looks in turn that are made up for after a pause
STALE_MIN = 64  # entries of the heap that nobody needs any more, beside as many as there are shards
FAILED_AGAIN_S = 5.0


@dataclass(slots=True)
class _Shard:
    """When to look next (None: when it moves), and how many threads are at it."""

    due_s: float | None = None
    running: int = 0


class Schedule:
    """Shards with the time at which each is due. All of it costs the logarithm of how many there are. Thread-safe."""

    def __init__(self) -> None:
        self._shards: dict[str, _Shard] = {}
        self._heap: list[tuple[float, str]] = []  # an entry counts if it is what its shard says
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._shards)

    def want(self, name: str, at_s: float) -> None:
        """Look at the shard at that time, unless it is due before that."""
        with self._lock:
            shard = self._shards.setdefault(name, _Shard())
            if shard.due_s is None or at_s < shard.due_s:
                shard.due_s = at_s
                self._push(name, at_s)

    def take(self, now_s: float, most: int, per_shard: int) -> list[str]:
        """Shards that are due, those that waited longest first; each counts as running until `done`."""
        names: list[str] = []
        with self._lock:
            while len(names) < most and self._heap and self._heap[0][0] <= now_s:
                due_s, name = heapq.heappop(self._heap)
                shard = self._shards.get(name)
                if shard is None or shard.due_s != due_s or shard.running >= per_shard:
                    continue  # `done` puts one on which enough are at work back
                shard.due_s = None
                shard.running += 1
                names.append(name)
        return names

    def done(self, name: str) -> None:
        """One who was at the shard has ended."""
        with self._lock:
            shard = self._shards[name]
            shard.running -= 1
            if shard.due_s is not None:
                self._push(name, shard.due_s)
            elif not shard.running:
                del self._shards[name]  # nothing to do for it

    def idle_s(self, now_s: float) -> float | None:
        """Seconds until one may be due; None when none waits for a time."""
        with self._lock:
            return max(0.0, self._heap[0][0] - now_s) if self._heap else None

    def _push(self, name: str, due_s: float) -> None:
        heapq.heappush(self._heap, (due_s, name))
        if len(self._heap) > 2 * len(self._shards) + STALE_MIN:
            self._heap = [(shard.due_s, name) for name, shard in self._shards.items() if shard.due_s is not None]
            heapq.heapify(self._heap)


class LookTurns:
    """All names of a location in turn, page by page: the first time as fast as they are asked for.

    After that a round begins every `period_s`, or when the one before has ended, if that takes longer. Then there are
    `per_s` names a second at most (None: as many as are asked for). So a location at rest costs no more than that,
    however many shards it has. `listed` gives a page of names after one of them; `is_wanted` says which are given.
    """

    def __init__(
        self,
        listed: Callable[[str, int], list[str]],
        is_wanted: Callable[[str], bool],
        period_s: float,
        per_s: float | None,
    ) -> None:
        self._listed = listed
        self._is_wanted = is_wanted
        self._period_s = period_s
        self._gap_s = 1 / per_s if per_s else 0.0
        self._is_first = True
        self._begun_s: float | None = None  # the round under way
        self._page: deque[str] = deque()
        self._after = ""  # the last name of the pages so far
        self._is_last = False  # no page follows
        self.next_s = float("-inf")  # before this there is none

    def draw(self, now_s: float, most: int) -> list[str]:
        """At most so many names whose turn it is. Reads at most one page. Raises PersistError: it cannot be read.

        Then it goes on there a while later.
        """
        if most <= 0 or now_s < self.next_s:
            return []
        if self._begun_s is None:
            self._begun_s = now_s
        if not self._page and not self._is_last:
            self._read(now_s)
        names: list[str] = []
        while self._page and len(names) < most and now_s >= self.next_s:
            name = self._page.popleft()
            if self._is_wanted(name):
                names.append(name)
                self._wait(now_s)
        if not self._page and self._is_last:
            self.next_s = max(now_s, self._begun_s + self._period_s)
            self._begun_s, self._after, self._is_last, self._is_first = None, "", False, False
        return names

    def _read(self, now_s: float) -> None:
        try:
            page = self._listed(self._after, NAMES_PAGE)
        except PersistError:
            self.next_s = now_s + FAILED_AGAIN_S
            raise
        self._page.extend(page)
        self._is_last = len(page) < NAMES_PAGE
        self._after = page[-1] if page else ""
        if page and not any(map(self._is_wanted, page)):
            self._wait(now_s)  # a page costs something too

    def _wait(self, now_s: float) -> None:
        if self._gap_s and not self._is_first:
            self.next_s = max(self.next_s, now_s - BURST_S) + self._gap_s


# Running maintenance: which shard is looked at when, by how many threads, and how it stops.
#
# A shard is looked at once when the loop begins, whenever it moves (the consensus store's push channel says so), and
# again after the time that a task asked for. Shards that do not move cost nothing. Without a push channel all shards
# are looked at every so often. With one they are too, as a safety net, but only a few in a second.


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
INTERVAL_S = 0.05  # least pause between two rounds


class Loop:
    """Keeps `task` running over the shards of a location until it is told to stop.

    `patterns` are shell patterns of shard names. `concurrency`: how many shards are worked on at once.
    `per_shard` threads may be at one shard at a time, so that small merges go on while a large one runs.
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
        """`stop`: set by `stop`; tasks may ask it too."""
        self._location = location
        self._task = task
        self.concurrency = concurrency
        self._patterns = patterns
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
        with ThreadPoolExecutor(self.concurrency, thread_name_prefix="persist-maintain") as pool:
            for _ in pool.map(lambda name: None if self.stopping else self._attempt(name), self.names()):
                if self.stopping:
                    break
        return self.failures - before

    def run(self) -> None:
        """Look at shards as they move, until `stop`. Errors of one shard are logged and keep no other waiting."""
        clock = self._location.clock
        unsubscribe = self._location.consensus.subscribe(self._moved)
        turns = self._turns(pushed=unsubscribe is not None)
        pool = ThreadPoolExecutor(self.concurrency, thread_name_prefix="persist-maintain")
        running: set[Future[None]] = set()
        try:
            while not self.stopping:
                self._wake.clear()
                now = clock.monotonic()
                running = {future for future in running if not future.done()}
                self.running = len(running)
                for name in self._due(turns, now, self.concurrency - len(running)):
                    future = pool.submit(self._look, name)
                    future.add_done_callback(lambda _: self._wake.set())
                    running.add(future)
                    self.running = len(running)
                self._pause(now, turns.next_s, len(running) < self.concurrency)
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
                wait = min(wait, max(due, INTERVAL_S))
        self._wake.wait(wait)
        if not self.stopping:
            self._stop.wait(INTERVAL_S)  # moves come in bursts: let them gather

    def _turns(self, pushed: bool) -> LookTurns:
        """All shards, by which those are found that moved without a word."""
        if pushed:
            return LookTurns(self._listed, self._matches, RESCAN_S, RESCAN_PER_S)
        return LookTurns(self._listed, self._matches, RESCAN_WITHOUT_PUSH_S, None)

    def _listed(self, after: str, limit: int) -> list[str]:
        page = self._location.names("", after, limit, with_dropped=True)
        self.round_ms = self._location.clock.now_ms()
        return page

    def _due(self, turns: LookTurns, now_s: float, room: int) -> list[str]:
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
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self._patterns)

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
