"""When shards are looked at: those that moved or asked for it, by a heap of due times, and all the others in turn."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from persist.core.errors import PersistError

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


class Turns:
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
