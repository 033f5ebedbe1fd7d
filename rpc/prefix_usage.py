"""The number of shards and bytes under each prefix: counted in the background, plus what was admitted since.

A count is made at most every `EVERY_S` seconds. It lists all names, uses the States that are in memory, and reads at
most `READS_MAX` others, the least recently read ones first. It does not include what other servers admitted since.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterable, Set
from itertools import islice

from persist.commit.location import Location
from persist.core.errors import PersistError, UnknownShard
from persist.core.state import State

EVERY_S = 30.0
SHARDS_MAX = 200_000  # counted under one prefix
READS_MAX = 500  # of States that are not in memory, in one count
_log = logging.getLogger("persist.rpc")
Usage = Counter[str]  # by the name of a quota


def usage_of(state: State) -> Usage:
    return Counter(shards=1, bytes=sum(part.size for part in state.trace.parts()))


class PrefixUsage:
    """Sums over the shards of each watched prefix. Thread-safe.

    Without `threaded`, the caller calls `refresh`.
    """

    def __init__(self, location: Location, *, threaded: bool = True) -> None:
        self._location = location
        self._threaded = threaded
        self._lock = threading.Lock()
        self._prefixes: frozenset[str] = frozenset()
        self._known: dict[str, tuple[int, Usage]] = {}  # by shard name: the seqno, and the usage at it
        self._sums: dict[str, Usage] = {}
        self._admitted: dict[str, Usage] = {}  # since the last count
        self._created: set[str] = set()  # shards admitted since the last count
        self._counts = 0  # that were begun
        self._ended = threading.Event()
        self._due = threading.Event()
        self._thread: threading.Thread | None = None
        self._turn = 0
        self._read_at: dict[str, int] = {}  # the turn at which a State that is not in memory was read
        self.failed = 0

    def watch(self, prefixes: Iterable[str]) -> None:
        """Count under these prefixes from now on; "" covers every shard."""
        wanted = frozenset(prefixes)
        with self._lock:
            is_new = not wanted <= self._prefixes
            self._prefixes = wanted
            if self._threaded and wanted and self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._run, name="persist-usage", daemon=True)
                self._thread.start()
        if is_new:
            self._due.set()

    def used(self, prefix: str, quota: str) -> int:
        """The known usage under a prefix."""
        with self._lock:
            return self._sums.get(prefix, _NOTHING)[quota] + self._admitted.get(prefix, _NOTHING)[quota]

    def has(self, name: str) -> bool:
        """Whether the shard is known to exist."""
        with self._lock:
            if name in self._known or name in self._created:
                return True
        state = self._location.machine(name).cached
        return state is not None and not state.is_closed

    def admit(self, name: str, quota: str, count: int) -> int:
        """Count what is about to be added to a shard. Returns a number for `take_back`."""
        with self._lock:
            if quota == "shards":
                self._created.add(name)
            for prefix in prefixes_of(name, self._prefixes):
                self._admitted.setdefault(prefix, Counter())[quota] += count
            return self._counts

    def take_back(self, name: str, quota: str, count: int, counts: int) -> None:
        """Undo `admit` for what was not added. A count that was begun since then has not included it."""
        with self._lock:
            if counts != self._counts:
                return
            if quota == "shards":
                self._created.discard(name)
            for prefix in prefixes_of(name, self._prefixes & self._admitted.keys()):
                self._admitted[prefix][quota] -= count

    def refresh(self) -> None:
        """Count again. If that fails, the last count stays."""
        with self._lock:
            prefixes = self._prefixes
            admitted, created, self._admitted, self._created = self._admitted, self._created, {}, set()
            self._counts += 1
        try:
            self._count(prefixes)
        except PersistError as error:
            self.failed += 1
            _log.warning("the usage of prefixes cannot be counted", extra={"why": str(error)[:200]})
            with self._lock:
                self._created |= created
                for prefix, usage in admitted.items():
                    self._admitted.setdefault(prefix, Counter()).update(usage)

    def close(self) -> None:
        self._ended.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._due.clear()
            self.refresh()
            self._due.wait(EVERY_S)

    def _count(self, prefixes: frozenset[str]) -> None:
        names = sorted(set(self._names(prefixes)))
        cached = {machine.name: machine.cached for machine in self._location.machines()}
        known, unread = {}, []
        for name in names:
            before, state = self._known.get(name), cached.get(name)
            if state is not None and not state.is_closed:
                is_same = before is not None and before[0] == state.seqno
                known[name] = before if is_same and before else (state.seqno, usage_of(state))
            else:
                known[name] = before or (-1, Counter(shards=1))
                unread.append(name)
        unread.sort(key=lambda name: self._read_at.get(name, -1))
        self._turn += 1
        self._read_at = {name: turn for name, turn in self._read_at.items() if name in known}
        for name in unread[:READS_MAX]:
            if self._ended.is_set():
                return
            self._read_at[name] = self._turn
            try:
                state = self._location.new_machine(name).refresh()
            except UnknownShard:  # deleted since its name was listed
                del known[name]
                continue
            known[name] = (state.seqno, Counter() if state.is_closed else usage_of(state))
        sums: dict[str, Usage] = {prefix: Counter() for prefix in prefixes}
        for name, (_, usage) in known.items():
            for prefix in prefixes_of(name, prefixes):
                sums[prefix].update(usage)
        with self._lock:
            self._known, self._sums = known, sums

    def _names(self, prefixes: frozenset[str]) -> Iterable[str]:
        """The names under these prefixes; a prefix within another one is skipped."""
        for prefix in prefixes:
            if not any(other != prefix and prefix.startswith(other) for other in prefixes):
                yield from islice(self._location.all_names(prefix, with_dropped=False), SHARDS_MAX)


_NOTHING: Usage = Counter()


def prefixes_of(name: str, prefixes: Set[str]) -> list[str]:
    """The prefixes of a name among these. Takes time by the length of the name, not by the number of prefixes."""
    return [name[:end] for end in range(len(name) + 1) if name[:end] in prefixes]
