"""The State of one shard in this process: waiters for its progress, and the observed leases by a monotonic clock."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from persist.commit.state_loader import Versions
from persist.commit.system import Clock
from persist.core.errors import Corruption, HistoryLost, PersistError, ReadOnly, UnknownShard
from persist.core.shard_view import SeenVersion
from persist.core.state import State
from persist.core.transitions.context import Renewed

# What one process has watched of a shard's leases, by its own monotonic clock.
#
# Two things are asked of it. How long ago was the newest State committed, at least? So far the lease clock may go on.
# How long ago was a lease renewed, at most? A heartbeat that comes soon after another one need not be committed. No
# wall clock is compared with another machine's, so none that is wrong can end a lease.


# What one commit may take from every lease. A lease of the default length that is renewed after a third has more left,
# so one jump of a broken monotonic clock ends none that is kept.
LEASE_STEP_MS_MAX = 600_000
LOOK_BACK_S = 30.0  # heartbeats that come more often need no commit


class LeaseWatch:
    """Watches one shard. Thread-safe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._newest: State | None = None
        self._seen_s = 0.0  # when the newest State was seen first
        self._looks: tuple[_Look, ...] = ()  # the last two, newest first, at least LOOK_BACK_S apart

    def saw(self, state: State, asked_s: float, seen_s: float) -> None:
        """`state` was the newest one when it was asked for, and was here at `seen_s`."""
        with self._lock:
            if self._newest is not None and self._newest.shard_id != state.shard_id:
                self._newest, self._looks = None, ()
            if self._newest is None or state.seqno > self._newest.seqno:
                self._newest, self._seen_s = state, seen_s
            if not self._looks or asked_s - self._looks[0].asked_s >= LOOK_BACK_S:
                self._looks = (_Look(state, asked_s, self._clock.now_ms()), *self._looks[:1])

    def now_ms(self, base: State) -> int:
        """The lease clock as far as it may go on from `base`: by the time for which this process has watched it.

        Never by what an older State would allow: a lease that was renewed since then has not been watched for so long.
        """
        if not base.lease_clock_ms:
            return base.walltime_ms
        return base.lease_clock_ms + min(int(self.watched_s(base) * 1000), LEASE_STEP_MS_MAX)

    def watched_s(self, base: State) -> float:
        """For how long this process has known `base` as the newest State."""
        with self._lock:
            newest, seen_s = self._newest, self._seen_s
        if newest is None or newest.seqno != base.seqno or newest.shard_id != base.shard_id:
            return 0.0
        return max(0.0, self._clock.monotonic() - seen_s)

    def renewed(self) -> tuple[Renewed, ...]:
        """What is known of renewals: each lease that differs from one of these States was renewed after it."""
        with self._lock:
            looks = self._looks
        return tuple(Renewed(look.state, self._age_ms(look)) for look in looks)

    def _age_ms(self, look: _Look) -> int:
        """By whichever clock says more: the monotonic one may have stood still, the wall clock may have been set."""
        passed_ms = int((self._clock.monotonic() - look.asked_s) * 1000) + 1
        return max(passed_ms, abs(self._clock.now_ms() - look.walltime_ms))


class _Look:
    """A State that was the newest one at `asked_s`."""

    __slots__ = ("asked_s", "state", "walltime_ms")

    def __init__(self, state: State, asked_s: float, walltime_ms: int) -> None:
        self.state = state
        self.asked_s = asked_s
        self.walltime_ms = walltime_ms


# The State of one shard as this process knows it, and those who wait for it to move.
#
# The cached State only ever moves forward. It moves when this process commits, when somebody asks for the State as of
# now, and when a push channel or a poll has news.
#
# Where the log turns out not to be the one that led to the cached State, that is the end of the shard in this process:
# everybody who asks is told so from then on. Whoever has read the lost rows must not be given others in their place,
# and nobody here can tell who has. Other shards, and other processes, go on.


class CachedState:
    """The cached State of the shard `name`. Thread-safe."""

    def __init__(self, name: str, versions: Versions, clock: Clock) -> None:
        self.name = name
        self._versions = versions
        self._clock = clock
        self._lock = threading.Lock()  # guards all below; never held across I/O
        self._refresh_lock = threading.Lock()  # so that many waiters make one read
        self._moved = threading.Condition(self._lock)
        self._leases = LeaseWatch(clock)
        self._state: State | None = None
        self._lost: HistoryLost | None = None
        self._waiting = 0
        self._watchers: list[Callable[[State], None]] = []
        self._unfollow: Callable[[], None] | None = None

    def state(self) -> State:
        """The cached State, loaded if there is none. May be stale; `refresh` is not. UnknownShard if there is none."""
        return self._state or self.refresh()

    @property
    def cached(self) -> State | None:
        """The cached State, or None if there is none yet. Never blocks."""
        return self._state

    def refresh(self) -> State:
        """The State as of now: every commit that was acknowledged before this call is in it.

        HistoryLost: the log has lost commits that were read here. Every later call raises it too.
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
                self._versions.check_no_copy()
                raise
            if state is None:
                raise UnknownShard(f"there is no shard {self.name!r} here; create it first")
            self._leases.saw(state, asked_s, self._clock.monotonic())
            return self.publish(state)

    def check_seen(self, state: State, seen: SeenVersion | None) -> None:
        """HistoryLost: the caller has read a State that did not lead to `state`, which was read here after that.

        What the log does not tell any more cannot be compared.
        """
        if seen is None or seen == SeenVersion(state.seqno, state.commit_id):
            return
        if state.seqno <= seen.seqno:  # perhaps this process has not heard of it yet
            state = self.refresh()
        found = self._versions.commit_at(self.name, seen.seqno) if state.seqno >= seen.seqno else ""
        if found is not None and found != seen.commit_id:
            raise HistoryLost(
                f"who listens to shard {self.name!r} has read v{seen.seqno}, which is not in the log any more: the "
                "consensus store has lost commits. What was given last may be lost; listen anew to go on without it"
            )

    def lease_now_ms(self, state: State) -> int:
        """The time by which the leases of a State are judged now: by what this process has watched of it."""
        if not state.lease_clock_ms:  # no commit yet
            return max(self._clock.now_ms(), state.walltime_ms)
        return self._leases.now_ms(state)

    def unmoved_s(self, state: State) -> float:
        """For how long this process has known that State as the newest one."""
        return self._leases.watched_s(state)

    def refresh_quietly(self) -> None:
        """As `refresh`, for push channels: when it fails, polling finds out."""
        with contextlib.suppress(PersistError):
            self.refresh()

    def publish(self, state: State) -> State:
        """Make `state` the cached one unless a newer one is; the one that is cached then."""
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

    def _lose(self, error: HistoryLost) -> None:
        """Let go of the cached State, and wake everybody who waits, to hear why."""
        with self._lock:
            last, self._state, self._lost = self._state, None, error
            self._moved.notify_all()
            watchers = tuple(self._watchers)
        for watcher in watchers:
            if last is not None:
                watcher(last)

    @property
    def is_watched(self) -> bool:
        """Whether anybody here waits for the shard to move."""
        return self._waiting > 0 or bool(self._watchers)

    def _follow(self) -> None:
        """Have the store tell of the shard while somebody waits for it. Under the lock, after each change of that."""
        if self.is_watched and self._unfollow is None:
            self._unfollow = self._versions.consensus.follow(self.name)
        elif not self.is_watched and self._unfollow is not None:
            self._unfollow()
            self._unfollow = None

    def watch(self, callback: Callable[[State], None]) -> Callable[[], None]:
        """Call `callback(state)` after every move of the cached State, from any thread; returns the way to stop."""
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
        """The State once `ready(state)`, or as it is after `timeout_s`.

        Commits of this process wake the waiter at once. Others' commits are found by reading every `poll_s`, or sooner
        if a push channel calls `refresh`.
        """
        deadline = self._clock.monotonic() + timeout_s
        with self._lock:
            self._waiting += 1
            self._follow()
        try:
            state = self.refresh()
            while not ready(state) and (left := deadline - self._clock.monotonic()) > 0:
                with self._lock:
                    if self._state is state:
                        self._moved.wait(min(left, poll_s))
                    moved = self._state is not state
                state = self.state() if moved else self.refresh()
            return state
        finally:
            with self._lock:
                self._waiting -= 1
                self._follow()
