"""What the shards under a prefix hold, all together: counted in the background, and counted up by what is admitted.

A count is as old as the last look, of which there is one every `EVERY_S` seconds at most. A look reads the names of all
shards, takes the States that this process has anyway, and reads those of at most `READS_MAX` others, the ones first
that were looked at longest ago. What other servers have admitted since is not in it.
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
SHARDS_MAX = 200_000  # that are counted under one prefix
READS_MAX = 500  # of States that are not in memory, in one look
_log = logging.getLogger("persist.rpc")
Held = Counter[str]  # by the name of a quota


def held_by(state: State) -> Held:
    """What one shard holds."""
    return Counter(shards=1, bytes=sum(part.size for part in state.trace.parts()))


class Tally:
    """Sums over the shards of each prefix that is watched. Thread-safe.

    Without `threaded`, somebody else calls `look`.
    """

    def __init__(self, location: Location, *, threaded: bool = True) -> None:
        self._location = location
        self._threaded = threaded
        self._lock = threading.Lock()
        self._prefixes: frozenset[str] = frozenset()
        self._known: dict[str, tuple[int, Held]] = {}  # by the shard's name: at which seqno, and what it held
        self._sums: dict[str, Held] = {}
        self._admitted: dict[str, Held] = {}  # since the last look
        self._made: set[str] = set()  # shards that were admitted since
        self._looks = 0  # that were begun
        self._ended = threading.Event()
        self._due = threading.Event()
        self._thread: threading.Thread | None = None
        self._turn = 0
        self._looked: dict[str, int] = {}  # at which look a State was read that is not in memory
        self.failed = 0

    def watch(self, prefixes: Iterable[str]) -> None:
        """Count under these prefixes from now on; "" is every shard."""
        wanted = frozenset(prefixes)
        with self._lock:
            is_new = not wanted <= self._prefixes
            self._prefixes = wanted
            if self._threaded and wanted and self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(target=self._run, name="persist-tally", daemon=True)
                self._thread.start()
        if is_new:
            self._due.set()

    def used(self, prefix: str, quota: str) -> int:
        """How much is there, as far as it is known."""
        with self._lock:
            return self._sums.get(prefix, _NOTHING)[quota] + self._admitted.get(prefix, _NOTHING)[quota]

    def has(self, name: str) -> bool:
        """Whether the shard is known to be there."""
        with self._lock:
            if name in self._known or name in self._made:
                return True
        state = self._location.machine(name).cached
        return state is not None and not state.is_closed

    def admit(self, name: str, quota: str, count: int) -> int:
        """Count what is about to be added to a shard. The number is for `take_back`."""
        with self._lock:
            if quota == "shards":
                self._made.add(name)
            for prefix in within(name, self._prefixes):
                self._admitted.setdefault(prefix, Counter())[quota] += count
            return self._looks

    def take_back(self, name: str, quota: str, count: int, looks: int) -> None:
        """It was not added after all. Once a look has seen that by itself, there is nothing to take back."""
        with self._lock:
            if looks != self._looks:
                return
            if quota == "shards":
                self._made.discard(name)
            for prefix in within(name, self._prefixes & self._admitted.keys()):
                self._admitted[prefix][quota] -= count

    def look(self) -> None:
        """Count anew. Where that cannot be done, what was known stays."""
        with self._lock:
            prefixes = self._prefixes
            admitted, made, self._admitted, self._made = self._admitted, self._made, {}, set()
            self._looks += 1
        try:
            self._count(prefixes)
        except PersistError as error:
            self.failed += 1
            _log.warning("what shards hold cannot be counted", extra={"why": str(error)[:200]})
            with self._lock:  # it was not seen by any look
                self._made |= made
                for prefix, held in admitted.items():
                    self._admitted.setdefault(prefix, Counter()).update(held)

    def close(self) -> None:
        self._ended.set()
        self._due.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            self._due.clear()
            self.look()
            self._due.wait(EVERY_S)

    def _count(self, prefixes: frozenset[str]) -> None:
        names = sorted(set(self._names(prefixes)))
        cached = {machine.name: machine.cached for machine in self._location.machines()}
        known, unread = {}, []
        for name in names:
            found, state = self._known.get(name), cached.get(name)
            if state is not None and not state.is_closed:
                is_same = found is not None and found[0] == state.seqno
                known[name] = found if is_same and found else (state.seqno, held_by(state))
            else:
                known[name] = found or (-1, Counter(shards=1))
                unread.append(name)
        unread.sort(key=lambda name: self._looked.get(name, -1))
        self._turn += 1
        self._looked = {name: turn for name, turn in self._looked.items() if name in known}
        for name in unread[:READS_MAX]:
            if self._ended.is_set():
                return
            self._looked[name] = self._turn
            try:
                state = self._location.new_machine(name).refresh()
            except UnknownShard:  # it is gone since its name was listed
                del known[name]
                continue
            known[name] = (state.seqno, Counter() if state.is_closed else held_by(state))
        sums: dict[str, Held] = {prefix: Counter() for prefix in prefixes}
        for name, (_, held) in known.items():
            for prefix in within(name, prefixes):
                sums[prefix].update(held)
        with self._lock:
            self._known, self._sums = known, sums

    def _names(self, prefixes: frozenset[str]) -> Iterable[str]:
        """The names under these prefixes; those of a prefix that lies under another one are listed once."""
        for prefix in prefixes:
            if not any(other != prefix and prefix.startswith(other) for other in prefixes):
                every = self._location.all_names(prefix, with_dropped=False)
                yield from islice(every, SHARDS_MAX)


_NOTHING: Held = Counter()


def within(name: str, prefixes: Set[str]) -> list[str]:
    """Which of these prefixes the name begins with. Costs the length of the name, not the number of prefixes."""
    return [name[:end] for end in range(len(name) + 1) if name[:end] in prefixes]
