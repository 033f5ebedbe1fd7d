"""The State of one shard in this process: waiters for its progress, and the observed leases by a monotonic clock."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import NamedTuple

from persist.commit.clocks_and_ids import Clock
from persist.commit.state_loader import Versions
from persist.core.errors import Corruption, HistoryLost, PersistError, ReadOnly, UnknownShard
from persist.core.shard_view import SeenVersion
from persist.core.state import State
from persist.core.transitions.context import Renewed

# How far one commit may advance the lease clock. A lease of the default length that is renewed after a third of it has
# more time left, so one jump of a broken monotonic clock ends no lease that is renewed.
LEASE_STEP_MS_MAX = 600_000
LOOK_BACK_S = 30.0  # heartbeats that come more often need no commit


class LeaseWatch:
    """Observes one shard. Thread-safe.

    It answers two questions. For how long, at least, has the newest State been committed? The lease clock may advance
    by that. How long ago, at most, was a lease renewed? A heartbeat soon after another one need not be committed. Wall
    clocks of different machines are never compared, so a wrong one cannot end a lease.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: State | None = None
        self._seen_s = 0.0  # when the newest State was seen first
        self._looks: tuple[_Look, ...] = ()  # the last two, newest first, at least LOOK_BACK_S apart

    def saw(self, state: State, asked_s: float, seen_s: float) -> None:
        """Note that `state` was the newest one when it was requested (`asked_s`), and arrived at `seen_s`."""
        with self._lock:
            if self._newest is not None and self._newest.shard_id != state.shard_id:
                self._newest, self._looks = None, ()
            if self._newest is None or state.seqno > self._newest.seqno:
                self._newest, self._seen_s = state, seen_s
            if not self._looks or asked_s - self._looks[0].asked_s >= LOOK_BACK_S:
                self._looks = (_Look(state, asked_s, self._clock.now_ms()), *self._looks[:1])

    def now_ms(self, base: State) -> int:
        """The lease clock of a commit on `base`: it advances by the time for which this process has observed `base`.

        The time since an older State does not count: a lease that was renewed since then was not observed for so long.
        """
        if not base.lease_clock_ms:
            return base.walltime_ms
        return base.lease_clock_ms + min(int(self.watched_s(base) * 1000), LEASE_STEP_MS_MAX)

    def watched_s(self, base: State) -> float:
        """Seconds for which this process has known `base` as the newest State."""
        with self._lock:
            newest, seen_s = self._newest, self._seen_s
        if newest is None or newest.seqno != base.seqno or newest.shard_id != base.shard_id:
            return 0.0
        return max(0.0, self._clock.monotonic() - seen_s)

    def renewed(self) -> tuple[Renewed, ...]:
        """Observed States with their age: a lease that differs from one of them was renewed after it."""
        with self._lock:
            looks = self._looks
        return tuple(Renewed(look.state, self._age_ms(look)) for look in looks)

    def _age_ms(self, look: _Look) -> int:
        """The larger age of both clocks: the monotonic one may have paused, the wall clock may have been set."""
        passed_ms = int((self._clock.monotonic() - look.asked_s) * 1000) + 1
        return max(passed_ms, abs(self._clock.now_ms() - look.walltime_ms))


class _Look(NamedTuple):
    """A State that was the newest one at `asked_s`."""

    state: State
    asked_s: float
    walltime_ms: int


class CachedState:
    """The cached State of the shard `name`. Thread-safe.

    The cached State only moves forward: when this process commits, when a caller requests the current State, and when a
    push channel or a poll finds a newer one.

    If the log turns out not to be the one that led to the cached State, every later call for this shard in this process
    fails with HistoryLost: a reader of lost rows must not receive other rows in their place, and it is not known which
    readers have read them. Other shards and other processes continue.
    """

    def __init__(self, name: str, versions: Versions, clock: Clock) -> None:
        self.name = name
        self._versions = versions
        self._clock = clock
        self._lock = threading.Lock()  # guards all below; never held across I/O
        self._refresh_lock = threading.Lock()  # so that many waiters share one read
        self._moved = threading.Condition(self._lock)
        self._leases = LeaseWatch(clock)
        self._state: State | None = None
        self._lost: HistoryLost | None = None
        self._check_open: Callable[[], None] = lambda: None
        self._waiting = 0
        self._watchers: list[Callable[[State], None]] = []
        self._unfollow: Callable[[], None] | None = None

    def state(self) -> State:
        """The cached State, loaded if necessary. May be stale; `refresh` is not. Raises UnknownShard."""
        return self._state or self.refresh()

    @property
    def cached(self) -> State | None:
        """The cached State, or None if there is none yet. Never blocks."""
        return self._state

    def refresh(self) -> State:
        """The current State: it includes every commit that was acknowledged before this call.

        HistoryLost: the log has lost commits that this process has read. Every later call raises it too.
        """
        with self._refresh_lock:
            if self._lost is not None:
                raise HistoryLost(self._lost.message)
            cached, asked_s = self._state, self._clock.monotonic()
            try:
                state = self._versions.load(self.name) if cached is None else self._versions.catch_up(cached)
            except HistoryLost as error:
                self._lose(error)
                raise
            except (Corruption, ReadOnly):  # ReadOnly: its log ends before what was copied into its store
                self._versions.identity.check_no_copy()
                raise
            if state is None:
                raise UnknownShard(f"there is no shard {self.name!r} here; create it first")
            self._leases.saw(state, asked_s, self._clock.monotonic())
            return self.publish(state)

    def check_seen(self, state: State, seen: SeenVersion | None) -> None:
        """Raise HistoryLost if the caller has read a State, `seen`, that is not in the history of `state`.

        A version whose log entry was truncated cannot be compared.
        """
        if seen is None or seen == SeenVersion(state.seqno, state.commit_id):
            return
        if state.seqno <= seen.seqno:  # perhaps this process does not know it yet
            state = self.refresh()
        commit_id = self._versions.commit_at(self.name, seen.seqno) if state.seqno >= seen.seqno else ""
        if commit_id is not None and commit_id != seen.commit_id:
            raise HistoryLost(
                f"a listener of shard {self.name!r} has read v{seen.seqno}, which is no longer in the log: the "
                "consensus store has lost commits. Rows that were delivered last may be lost; listen again to continue "
                "without them"
            )

    def lease_now_ms(self, state: State) -> int:
        """The lease clock now, in ms: as far as this process has observed the State."""
        if not state.lease_clock_ms:  # no commit yet
            return max(self._clock.now_ms(), state.walltime_ms)
        return self._leases.now_ms(state)

    def unmoved_s(self, state: State) -> float:
        """Seconds for which this process has known that State as the newest one."""
        return self._leases.watched_s(state)

    def refresh_quietly(self) -> None:
        """As `refresh`, for push channels. Errors are ignored: polling finds them."""
        with contextlib.suppress(PersistError):
            self.refresh()

    def publish(self, state: State) -> State:
        """Cache `state` unless a newer one is cached; return the cached State."""
        with self._lock:
            if self._lost is not None:
                raise HistoryLost(self._lost.message)
            cached = self._state
            if cached is not None and cached.seqno >= state.seqno:
                return cached
            self._state = state
            self._moved.notify_all()
            watchers = tuple(self._watchers)
        self._versions.note(state)
        for watcher in watchers:
            watcher(state)
        return state

    def end_waits(self, check_open: Callable[[], None]) -> None:
        """Have `wait_for` raise what `check_open` does. Commits under way are not affected."""
        with self._lock:
            self._check_open = check_open
            self._moved.notify_all()

    def _lose(self, error: HistoryLost) -> None:
        """Drop the cached State, and wake all waiters, which then raise the error."""
        with self._lock:
            last, self._state, self._lost = self._state, None, error
            self._moved.notify_all()
            watchers = tuple(self._watchers)
        for watcher in watchers:
            if last is not None:
                watcher(last)

    @property
    def is_watched(self) -> bool:
        """Whether any caller in this process waits for the shard to change."""
        return self._waiting > 0 or bool(self._watchers)

    def _follow(self) -> None:
        """Subscribe to the shard while callers wait for it. Called under the lock, after each change of the waiters."""
        if self.is_watched and self._unfollow is None:
            self._unfollow = self._versions.consensus.follow(self.name)
        elif not self.is_watched and self._unfollow is not None:
            self._unfollow()
            self._unfollow = None

    def watch(self, callback: Callable[[State], None]) -> Callable[[], None]:
        """Call `callback(state)`, on any thread, after each change of the cached State; the result stops it."""
        with self._lock:
            self._watchers.append(callback)
            self._follow()

        def stop() -> None:
            with self._lock:
                if callback in self._watchers:
                    self._watchers.remove(callback)
                    self._follow()

        return stop

    def wait_for(self, ready: Callable[[State], bool], timeout_s: float, poll_s: float) -> State:
        """The State once `ready(state)` is true, or the current one after `timeout_s`.

        Commits of this process wake the waiter at once. Those of other processes are found by a read every `poll_s`, or
        sooner if a push channel calls `refresh`. Raises the error of `check_open`.
        """
        deadline = self._clock.monotonic() + timeout_s
        with self._lock:
            self._waiting += 1
            self._follow()
        try:
            state = self.refresh()
            while not ready(state) and (left := deadline - self._clock.monotonic()) > 0:
                with self._lock:
                    self._check_open()
                    if self._state is state:
                        self._moved.wait(min(left, poll_s))
                        self._check_open()
                    moved = self._state is not state
                state = self.state() if moved else self.refresh()
            return state
        finally:
            with self._lock:
                self._waiting -= 1
                self._follow()
