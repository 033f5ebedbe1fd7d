"""Leases that small reads of one process share, so that reads cost the shard no commits of their own.

A lease takes two commits, and each State carries all that are held. Where reads of a shard come often, those that a
shared lease covers use it: reads as of its time or later, planned from its State or a later one. It takes new readers
for a short while only, so that history and blobs are held hardly longer than by leases of their own
(docs/design/0024-shared-leases.md).
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from persist.client import deadlines
from persist.client.deadlines import Deadline
from persist.commit.system import Clock, OwnProcess
from persist.core.errors import Expired
from persist.core.ids import ReaderId, SeqNo, ShardId

BUSY_READS = 8  # so many leases of its own each kind of read has in BUSY_S seconds; what comes on top is shared
BUSY_S = 10.0
TAKES_S = 10.0  # a shared lease takes new readers for so long
PLANS_S = 60.0  # the same, of plans, which nobody gives back: it lapses when nobody reads them any more
PARTS_OF_LEASE = 15  # but never longer than such a part of the lease, of which so much may have passed for a new reader
KEPT_S = 2.0  # it is given back so long after its last reader, if nobody comes
KINDS_MAX = 1_000  # kinds of reads of which it is known how often they come
OPEN_MAX = 4  # shared leases of one kind that take readers at once: for reads as of several times
OPENING_S = 1.0  # how long a read waits while another one takes the lease; then it takes one of its own
TRIES = 3  # how often a shared lease may turn out to have lapsed; then a read takes one of its own
EXIT_S = 1.0  # how long the end of the process may take to give leases back


class Lease(Protocol):
    """A leased reader, as `persist.client.snapshot.ReadLease` is."""

    reader: ReaderId
    seqno: SeqNo

    def check(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Kind:
    """Reads that may share a lease: of one shard, for one purpose, with leases of one length."""

    name: str
    shard: ShardId
    purpose: str
    lease_ms: int
    is_plan: bool = False  # what is read elsewhere: nobody tells when it ends

    @property
    def takes_s(self) -> float:
        return min(PLANS_S if self.is_plan else TAKES_S, self.lease_ms / 1000 / PARTS_OF_LEASE)


@dataclass(eq=False)
class Shared:
    """A lease that several use: it holds `since` and later times, and States from its own on."""

    lease: Lease
    since: int
    opened_s: float
    users: int = 0
    idle_s: float = 0.0  # since when nobody uses it, where nobody does
    is_left: bool = False  # to those who use it: it takes no more, and the last of them closes it


@dataclass(eq=False)
class _Known:
    """What is known of one kind of read."""

    came_s: deque[float] = field(default_factory=lambda: deque(maxlen=BUSY_READS))
    shared: list[Shared] = field(default_factory=list)
    opening: threading.Lock = field(default_factory=threading.Lock)


class LeasePool:
    """The shared leases of one transport. Thread-safe. In a fork it does nothing: leases belong to the parent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._process = OwnProcess("this client")
        self._changed = threading.Condition()
        self._known: OrderedDict[Kind, _Known] = OrderedDict()
        self._tends = False
        self._closed = False
        self._at_exit = partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def is_busy(self, kind: Kind) -> bool:
        """Count a read. Whether reads of its kind come so often that they are to share; plans always are."""
        if self._process.is_left or self._closed:
            return False
        now = self._clock.monotonic()
        with self._changed:
            came = self._of(kind).came_s
            is_busy = kind.is_plan or (len(came) == BUSY_READS and now - came[0] < BUSY_S)
            came.append(now)
            return is_busy

    def take(self, kind: Kind, as_of: int, open_lease: Callable[[], Lease]) -> Shared | None:
        """A lease that covers `as_of`, with one user more; None: let the read take one of its own.

        Raises what `open_lease` does, which takes a new one at `as_of`.
        """
        with self._changed:
            known = self._of(kind)
        for _ in range(TRIES):
            found = self._covering(kind, known, as_of)
            if found is None:
                return self._opened(kind, known, as_of, open_lease)
            try:
                found.lease.check()
                return found
            except Expired:  # this machine was suspended
                self._forget(known, found)
            except BaseException:
                self.give_back(found)
                raise
        return None

    def give_back(self, shared: Shared) -> None:
        """One user less. The last one leaves it to the next, for a moment."""
        if self._process.is_left:
            return
        with self._changed:
            shared.users -= 1
            shared.idle_s = self._clock.monotonic()
            self._changed.notify_all()
            ended = shared.is_left and not shared.users
        if ended:
            shared.lease.close()

    def let_go(self, name: str) -> None:
        """Give back what nobody uses of this shard now: something is asked that waits for holds."""
        if not self._process.is_left:
            self._end(lambda kind, shared: kind.name == name and not shared.users)

    def tend(self) -> float | None:
        """Give back what nobody has used for a while. In how many seconds to look again; None: nothing is shared."""
        now = self._clock.monotonic()
        self._end(lambda kind, shared: now >= self._due_s(kind, shared))
        with self._changed:
            due = [self._due_s(kind, shared) for kind, known in self._known.items() for shared in known.shared]
            return max(0.0, min(due) - now) if due else None

    def close(self) -> None:
        """Give back what nobody uses. What somebody still uses is given back when they are done. Raises nothing."""
        if self._process.is_left:
            return
        atexit.unregister(self._at_exit)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._end(lambda kind, shared: True)

    def _of(self, kind: Kind) -> _Known:
        known = self._known.get(kind)
        if known is None:
            for other in [other for other, idle in self._known.items() if not idle.shared]:
                if len(self._known) < KINDS_MAX:
                    break
                del self._known[other]
            known = self._known[kind] = _Known()
        self._known.move_to_end(kind)
        return known

    def _opened(self, kind: Kind, known: _Known, as_of: int, open_lease: Callable[[], Lease]) -> Shared | None:
        """A new one, or one that another read has opened meanwhile."""
        if not known.opening.acquire(timeout=deadlines.at_most(OPENING_S)):
            return None
        try:
            found = self._covering(kind, known, as_of)
            if found is not None:
                return found
            with self._changed:
                if sum(self._takes(kind, shared) for shared in known.shared) >= OPEN_MAX:
                    return None
            opened_s = self._clock.monotonic()
            made = Shared(open_lease(), as_of, opened_s, users=1)
            with self._changed:
                made.is_left = self._closed
                if not self._closed:
                    self._of(kind).shared.append(made)
                    self._changed.notify_all()
                    self._begin_to_tend()
            return made
        finally:
            known.opening.release()

    def _covering(self, kind: Kind, known: _Known, as_of: int) -> Shared | None:
        """The latest that covers the time, with one user more."""
        with self._changed:
            fit = [one for one in known.shared if one.since <= as_of and self._takes(kind, one)]
            found = max(fit, key=lambda one: one.since, default=None)
            if found is not None:
                found.users += 1
            return found

    def _forget(self, known: _Known, shared: Shared) -> None:
        with self._changed, suppress(ValueError):
            known.shared.remove(shared)

    def _takes(self, kind: Kind, shared: Shared) -> bool:
        return self._clock.monotonic() - shared.opened_s < kind.takes_s

    def _due_s(self, kind: Kind, shared: Shared) -> float:
        """When to give it back, or to leave it to those who use it, as it takes no more readers then."""
        full_s = shared.opened_s + kind.takes_s
        return full_s if shared.users else min(shared.idle_s + KEPT_S, max(full_s, shared.idle_s))

    def _end(self, is_due: Callable[[Kind, Shared], bool]) -> None:
        ended = []
        with self._changed:
            for kind, known in self._known.items():
                due = [shared for shared in known.shared if is_due(kind, shared)]
                known.shared = [shared for shared in known.shared if shared not in due]
                for shared in due:
                    shared.is_left = True
                ended += [shared for shared in due if not shared.users]  # of a plan nobody tells: it lapses
        for shared in ended:
            shared.lease.close()

    def _begin_to_tend(self) -> None:
        if not self._tends:
            self._tends = True
            threading.Thread(target=self._tend_all, name="persist-leases", daemon=True).start()

    def _tend_all(self) -> None:
        """Runs for as long as anything is shared."""
        while True:
            wait_s = None
            with suppress(Exception):  # the stores were closed meanwhile: the leases lapse
                wait_s = self.tend()
            with self._changed:
                if not any(known.shared for known in self._known.values()):
                    self._tends = False
                    return
                self._changed.wait(KEPT_S if wait_s is None else wait_s)


def _close_at_exit(pool: weakref.ref[LeasePool]) -> None:
    found = pool()
    if found is not None:
        with suppress(Exception), deadlines.within(Deadline(EXIT_S, found._clock)):
            found.close()
