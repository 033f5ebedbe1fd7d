"""Leases that the reads of one process share, so that a read costs the shard no commit.

A process that reads a shard keeps a leased reader there for each purpose. It holds the earliest time that is read or
was read recently, and later times with it. Times that are kept separately, such as those of tags, have leased readers
of their own. A read joins one if a view of the shard shows that it exists and covers the read, so nothing is written
for it; a reader that has been unused for a while is released (docs/design/0005-leases-and-clocks.md).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.util import Finalize
from typing import Protocol

from persist.client import deadlines
from persist.client.deadlines import Deadline
from persist.commit.clocks_and_ids import Clock, OwnProcess
from persist.core.errors import Expired
from persist.core.frontier import Antichain
from persist.core.ids import ReaderId, SeqNo, ShardId

KEPT_S = 60.0  # how long after its last read a shared lease is released
PARTS_OF_LEASE = 4  # it is moved or renewed once in such a part of its length, and kept unused for no longer
COMMITS_HELD_MAX = 256  # or sooner, once a State was read that is so many commits beyond the one that it holds
PERIODS = 6  # the parts of the time that it is kept, for forgetting the times that were read before
PLANS_S = 60.0  # a lease of plans takes new ones for so long, or a fifteenth of its length: it is never released
PLAN_PARTS_OF_LEASE = 15
POINTS_MAX = 64  # leases of one kind that hold a single time
KINDS_MAX = 20_000  # kinds of reads that share at the same time; further ones have their own leases
OPENING_S = 1.0  # how long a read waits while another one takes the lease; then it takes its own
LOOK_S = 5.0  # how often the leases are checked
CLOSE_S = 5.0  # how long closing the client may take to release leases; the others lapse
EXIT_S = 1.0  # the same, at the end of the process


class Lease(Protocol):
    """A leased reader: `persist.client.read_leases.ReadLease`, which is above this module."""

    reader: ReaderId
    seqno: SeqNo

    def keep(self) -> None: ...

    def renew(self) -> None: ...

    def check(self) -> None: ...

    def move(self, since: Antichain, seqno: SeqNo, *, moves_since: bool) -> None: ...

    def close(self) -> None: ...


OpenLease = Callable[[], Lease]


@dataclass(frozen=True, slots=True)
class LeaseKind:
    """Reads that may share a lease: of one shard, for one purpose, with leases of one length."""

    name: str
    shard: ShardId
    purpose: str
    lease_ms: int
    is_plan: bool = False  # read by other processes: the end of the reads is not known

    @property
    def moves_s(self) -> float:
        return self.lease_ms / 1000 / PARTS_OF_LEASE

    @property
    def kept_s(self) -> float:
        return min(KEPT_S, self.moves_s)

    @property
    def takes_s(self) -> float:
        return min(PLANS_S, self.lease_ms / 1000 / PLAN_PARTS_OF_LEASE)


@dataclass(frozen=True, slots=True)
class SinglePoint:
    """A single time that is read: that of a tag, or one that is kept separately."""

    time: int
    tag: str = ""


@dataclass(eq=False)
class SharedLease:
    """A lease that several reads use. It holds `since` and later times, or only its `point`, from `lease.seqno` on."""

    kind: LeaseKind
    lease: Lease
    since: int
    point: SinglePoint | None
    opened_s: float
    moved_s: float
    active_s: float  # when something was last read by it
    seen: SeqNo  # the newest State from which a read was planned
    latest: int  # the latest time that was read
    uses: set[LeaseUse] = field(default_factory=set)
    recent: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=PERIODS + 1))  # period, earliest time
    is_left: bool = False  # it takes no more uses, and the last of them closes it


@dataclass(eq=False)
class LeaseUse:
    """One read by a shared lease: of a time, planned from the State `seqno`. It lapses if it pauses for a lease."""

    shared: SharedLease
    as_of: int
    seqno: SeqNo
    active_s: float
    has_lapsed: bool = False


@dataclass(eq=False)
class _Known:
    """The leases of one kind that take new reads."""

    shared: list[SharedLease] = field(default_factory=list)
    opening: threading.Lock = field(default_factory=threading.Lock)


class LeasePool:
    """The shared leases of one transport. Thread-safe. In a fork it does nothing: leases belong to the parent."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._process = OwnProcess("this client")
        self._changed = threading.Condition()
        self._known: dict[LeaseKind, _Known] = {}
        self._released: deque[LeaseUse] = deque()  # by garbage collections, which may run while a thread holds the lock
        self._tends = False
        self._closed = False
        # Not by `atexit`, which does not run at the end of processes that `multiprocessing` has started.
        self._at_exit = Finalize(self, _close_at_exit, (weakref.ref(self),), exitpriority=0)

    def take(self, kind: LeaseKind, as_of: int | str | None) -> LeaseUse | None:
        """A use of the lease that may cover this time, this tag, or the latest time (None); None: there is none.

        Until `joined` is called with what is read, it holds everything that may be read. A view that is requested from
        now on is no older than the States of which reads were planned before, and its latest time no earlier than
        theirs. A tag may be at any time.
        """
        if self._process.is_left:
            return None
        self._give_back_released()
        with self._changed:
            known = self._known.get(kind)
            usable = [shared for shared in known.shared if self._fits(shared, as_of)] if known is not None else []
            if not usable:
                return None
            shared = next((lease for lease in usable if lease.point is not None), usable[0])
            earliest = shared.latest if as_of is None else shared.since if isinstance(as_of, str) else as_of
            use = LeaseUse(shared, earliest, shared.seen, self._clock.monotonic())
            shared.uses.add(use)
            return use

    def joined(self, use: LeaseUse, as_of: int, seqno: SeqNo, *, was_named: bool) -> None:
        """Set what the read has come to: this time, planned from this State.

        A time that `was_named` may be named again, so it stays held for a while. The next read of the latest time is
        of a later time.
        """
        with self._changed:
            use.as_of, use.seqno = as_of, seqno
            self._read(use)
            if was_named:
                self._remember(use)
            if _is_far(use.shared):
                self._changed.notify_all()

    def open(
        self, kind: LeaseKind, as_of: int, point: SinglePoint | None, instead: SharedLease | None, open_lease: OpenLease
    ) -> LeaseUse | None:
        """A use of a new lease, which `open_lease` takes; `instead` exists and does not cover the time.

        None: another read is taking one at this moment, or has taken one, or there are too many. Raises what
        `open_lease` does.
        """
        if self._process.is_left or self._closed:
            return None
        with self._changed:
            if kind not in self._known and len(self._known) >= KINDS_MAX:
                return None
            opening = self._known.setdefault(kind, _Known()).opening
        if not opening.acquire(timeout=deadlines.at_most(OPENING_S)):
            return None
        try:
            with self._changed:
                others = [shared for shared in self._known.setdefault(kind, _Known()).shared if shared is not instead]
                wanted = point.tag if point is not None and point.tag else as_of
                if any(self._fits(one, wanted) and (one.point is None) == (point is None) for one in others):
                    return None
                if point is not None and sum(one.point is not None for one in others) >= POINTS_MAX:
                    return None
            now = self._clock.monotonic()
            lease = open_lease()
            shared = SharedLease(kind, lease, as_of, point, now, now, now, lease.seqno, as_of)
            use = LeaseUse(shared, as_of, lease.seqno, now)
            shared.uses.add(use)
            with self._changed:
                shared.is_left = self._closed
                if not self._closed:
                    self._known.setdefault(kind, _Known()).shared.append(shared)
                    self._read(use)
                    self._start_thread()
        finally:
            with self._changed:
                self._forget_empty(kind)  # if no lease was taken
            opening.release()
        # The other leases need not cover what the new one covers.
        self._end(lambda one: one is not shared and (one is instead or (one.point, point) == (None, None)), kind)
        return use

    def leave(self, shared: SharedLease) -> None:
        """It takes no more reads, is neither moved nor renewed here, and stays as it is for its current uses.

        It has lapsed, or another process renews it.
        """
        with self._changed:
            self._left(shared.kind, lambda one: one is shared)

    def give_back(self, use: LeaseUse) -> None:
        """The read is over. The lease is kept for the next one for a while."""
        if self._process.is_left:
            return
        shared = use.shared
        with self._changed:
            shared.uses.discard(use)
            shared.active_s = self._clock.monotonic()
            ended = shared.is_left and not shared.uses
        if ended:
            shared.lease.close()

    def release(self, use: LeaseUse) -> None:
        """As `give_back`, for a garbage collection: soon, and without waiting."""
        self._released.append(use)
        if self._closed and not self._process.is_left:  # the thread of the pool has ended
            run_aside(self._give_back_released, EXIT_S)

    def is_read(self, use: LeaseUse) -> None:
        """Called when a read starts or continues. Raises Expired: it has paused for so long that its hold lapsed."""
        if use.has_lapsed:
            raise Expired("the hold of this snapshot is gone: its lease lapsed while nothing was read; take it again")
        use.active_s = use.shared.active_s = self._clock.monotonic()

    def let_go(self, name: str) -> None:
        """Release the unused leases of this shard before a command whose outcome depends on holds."""
        if not self._process.is_left:
            self._give_back_released()
            with self._changed:
                kinds = [kind for kind in self._known if kind.name == name]
            for kind in kinds:
                self._end(lambda shared: not shared.uses, kind)

    def tend(self) -> bool:
        """Release leases that have been unused for a while, and move or renew the others. Whether any lease is left.

        A use that is not read, such as a forgotten open snapshot, is not renewed, and lapses as any lease.
        """
        self._give_back_released()
        now = self._clock.monotonic()
        with self._changed:
            kinds = list(self._known)
        for kind in kinds:
            self._end(partial(_is_over, now), kind)
        due: list[tuple[SharedLease, int, SeqNo]] = []
        with self._changed:
            for shared in [one for kind, known in self._known.items() if not kind.is_plan for one in known.shared]:
                kind = shared.kind
                lapsed = {use for use in shared.uses if now - use.active_s > kind.lease_ms / 1000}
                for use in lapsed:
                    use.has_lapsed = True
                shared.uses -= lapsed
                if now < shared.active_s + kind.kept_s and (_is_far(shared) or now >= shared.moved_s + kind.moves_s):
                    due.append((shared, *self._moved(shared, now)))
        for shared, since, seqno in due:
            try:
                shared.lease.move(Antichain(since), seqno, moves_since=False)
            except Expired:  # this process was suspended; its uses get the error at their next renewal
                self.leave(shared)
            except Exception:
                pass  # its uses renew it, too, and get the error
        with self._changed:
            return bool(self._known)

    def close(self, within_s: float = CLOSE_S) -> None:
        """Release the unused leases as far as possible within so many seconds; the rest lapses.

        Leases in use are released when their last use ends. Raises nothing.
        """
        if self._process.is_left:
            return
        self._at_exit.cancel()
        with deadlines.within(Deadline(within_s, self._clock)):
            self._give_back_released()
            with self._changed:
                self._closed = True
                self._changed.notify_all()
                kinds = list(self._known)
            for kind in kinds:
                self._end(lambda shared: True, kind)

    def _give_back_released(self) -> None:
        while self._released:
            with suppress(IndexError):  # another thread was faster
                self.give_back(self._released.popleft())

    def _fits(self, shared: SharedLease, as_of: int | str | None) -> bool:
        kind = shared.kind
        if kind.is_plan and self._clock.monotonic() - shared.opened_s >= kind.takes_s:
            return False
        if shared.point is not None:
            return as_of == shared.point.tag if isinstance(as_of, str) else as_of == shared.point.time
        return not isinstance(as_of, int) or shared.since <= as_of

    def _read(self, use: LeaseUse) -> None:
        shared = use.shared
        use.active_s = shared.active_s = self._clock.monotonic()
        shared.seen, shared.latest = max(shared.seen, use.seqno), max(shared.latest, use.as_of)

    def _remember(self, use: LeaseUse) -> None:
        """Remember which time was read, for as long as leases are kept."""
        shared, now = use.shared, self._clock.monotonic()
        period = int(now * PERIODS / shared.kind.kept_s)
        if shared.recent and shared.recent[-1][0] == period:
            period, earliest = shared.recent.pop()
            shared.recent.append((period, min(earliest, use.as_of)))
        else:
            shared.recent.append((period, use.as_of))

    def _moved(self, shared: SharedLease, now: float) -> tuple[int, SeqNo]:
        """The new position of a lease: times that are read, or were read recently, stay held. No read joins before."""
        shared.moved_s = now
        begin = int(now * PERIODS / shared.kind.kept_s) - PERIODS
        wanted = [use.as_of for use in shared.uses] + [time for period, time in shared.recent if period >= begin]
        shared.since = max(shared.since, min(wanted, default=shared.latest))
        return shared.since, _needed_from(shared)

    def _end(self, is_over: Callable[[SharedLease], bool], kind: LeaseKind) -> None:
        """Take no more uses of these leases of a kind, and release the unused ones."""
        with self._changed:
            ended = [shared for shared in self._left(kind, is_over) if not shared.uses]  # plans never end their use
        for shared in ended:
            if not deadlines.has_passed():
                shared.lease.close()

    def _left(self, kind: LeaseKind, is_over: Callable[[SharedLease], bool]) -> list[SharedLease]:
        """Mark these leases of a kind as left; those that took new reads up to now. The lock is held."""
        known = self._known.get(kind)
        over = [shared for shared in known.shared if is_over(shared)] if known is not None else []
        for shared in over:
            shared.is_left = True
        if known is not None and over:
            known.shared = [shared for shared in known.shared if not shared.is_left]
            self._forget_empty(kind)
        return over

    def _forget_empty(self, kind: LeaseKind) -> None:
        """Forget a kind without leases. The lock is held."""
        known = self._known.get(kind)
        if known is not None and not known.shared:
            del self._known[kind]

    def _start_thread(self) -> None:
        if not self._tends:
            self._tends = True
            threading.Thread(target=partial(_tend_all, weakref.ref(self)), name="persist-leases", daemon=True).start()


def run_aside(release: Callable[[], None], wait_s: float) -> None:
    """Release something on another thread, and wait for that at most so long. Raises nothing."""
    with suppress(RuntimeError):  # the interpreter ends: no thread can be started
        thread = threading.Thread(target=release, name="persist-release", daemon=True)
        thread.start()
        thread.join(wait_s)


def _needed_from(shared: SharedLease) -> SeqNo:
    """The first State that is still needed."""
    return min((use.seqno for use in shared.uses), default=shared.seen)


def _is_far(shared: SharedLease) -> bool:
    return _needed_from(shared) - shared.lease.seqno >= COMMITS_HELD_MAX


def _is_over(now: float, shared: SharedLease) -> bool:
    """Whether it takes no more reads: it is released then, or left to its uses."""
    if shared.kind.is_plan:
        return now >= shared.opened_s + shared.kind.takes_s
    return not shared.uses and now >= shared.active_s + shared.kind.kept_s


def _tend_all(pool_ref: weakref.ref[LeasePool]) -> None:
    """Runs as long as any lease is shared."""
    while (pool := pool_ref()) is not None:
        tends = True
        with suppress(Exception):  # the stores were closed meanwhile: the leases lapse
            tends = pool.tend()
        with pool._changed:
            if not tends and not pool._known:
                pool._tends = False
                return
            pool._changed.wait(LOOK_S)
        del pool


def _close_at_exit(pool_ref: weakref.ref[LeasePool]) -> None:
    pool = pool_ref()
    if pool is not None:
        with suppress(Exception):
            pool.close(EXIT_S)
