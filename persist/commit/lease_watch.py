"""What one process has watched of a shard's leases, by its own monotonic clock.

Two things are asked of it. How long ago was the newest State committed, at least? So far the lease clock may go on.
How long ago was a lease renewed, at most? A heartbeat that comes soon after another one need not be committed. No wall
clock is compared with another machine's, so none that is wrong can end a lease.
"""

from __future__ import annotations

import threading

from persist.commit.system import Clock
from persist.core.state import State
from persist.core.transitions.context import Renewed

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
