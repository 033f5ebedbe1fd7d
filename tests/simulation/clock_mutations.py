"""Builds that are broken on purpose: mistakes with clocks, leases and ages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import persist.client.listen
import persist.client.snapshot
import persist.core.transitions.reader_holds
from compactor import orphans
from compactor.orphans import Sweeper
from persist.commit.cached_state import LeaseWatch
from persist.commit.clocks_and_ids import OFFSET_MS_MAX, CheckedClock, _Compared, probed
from persist.core import commands as c
from persist.core.errors import PersistError
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions import lease_expiry
from persist.core.transitions.lease_expiry import HEARTBEAT_EVERY
from tests.simulation.breaking import Broken, every, transition


def leases_by_wall_clock() -> Broken:
    """The lease clock goes on as the committer's wall clock does."""
    return patch.object(LeaseWatch, "now_ms", lambda self, base: max(base.lease_clock_ms, self._clock.now_ms()))


def leases_by_an_older_state() -> Broken:
    """Whoever has watched any State for long lets the lease clock jump by that, over what was renewed since."""
    real = LeaseWatch.saw

    def saw(self: LeaseWatch, state: State, asked_s: float, seen_s: float) -> None:
        real(self, state, asked_s, seen_s)
        ahead_ms = state.lease_clock_ms - int(seen_s * 1000)
        if state.lease_clock_ms:
            self.__dict__["best"] = max(ahead_ms, self.__dict__.get("best", ahead_ms))

    def now_ms(self: LeaseWatch, base: State) -> int:
        best = self.__dict__.get("best", 0) + int(self._clock.monotonic() * 1000)
        return max(base.lease_clock_ms or base.walltime_ms, best)

    return every(patch.object(LeaseWatch, "saw", saw), patch.object(LeaseWatch, "now_ms", now_ms))


def heartbeats_by_the_lease_clock() -> Broken:
    """A heartbeat changes nothing where the lease clock, which may be far behind, says that the last one is recent."""

    def is_fresh(reader: Any, known: Any, context: Any) -> bool:
        fresh: bool = context.lease_now_ms - known.heartbeat_ms < known.lease_ms // HEARTBEAT_EVERY
        return fresh

    return patch.object(persist.core.transitions.reader_holds, "is_fresh", is_fresh)


def sweep_by_its_own_clock() -> Broken:
    """What the sweeper's own clock calls old is swept."""

    def age(self: Sweeper) -> Any:
        return orphans._Age(max(0, self._location.clock.now_ms() - self._settings.age_ms), 2**62)

    return patch.object(Sweeper, "_age", age)


def frontier_not_committed() -> Broken:
    """The sweep deletes what commits may still name: it is told that they refuse it, and they do not."""
    real = lease_expiry.forget_lapsed

    def forget_lapsed(state: State, command: c.ForgetLapsed, context: Any) -> Any:
        following, _ = real(state, replace(command, staged_before_ms=0), context)
        return following, c.SweptBefore(command.staged_before_ms)

    return transition(c.ForgetLapsed, forget_lapsed)


def lost_holds_unnoticed() -> Broken:
    """Who listens or waits for a snapshot does not look whether since has passed what he holds."""
    return every(
        patch.object(persist.client.listen, "check_held", lambda view, as_of: None),
        patch.object(persist.client.snapshot, "check_held", lambda view, as_of: None),
    )


def clock_compared_at_one_side() -> Broken:
    """A clock that was wild before it was compared, and was set right meanwhile, settles instants."""

    def compare(self: CheckedClock) -> None:
        before_ms, at_s = self._clock.now_ms(), self._clock.monotonic()
        with suppress(PersistError):
            store_ms = probed(self._blob, self._ids)
            agreed = self._clock.now_ms() - OFFSET_MS_MAX <= store_ms <= before_ms + OFFSET_MS_MAX
            self._compared = _Compared(before_ms, at_s, agreed)

    return patch.object(CheckedClock, "compare", compare)


BROKEN: tuple[Callable[[], Broken], ...] = (
    leases_by_wall_clock,
    leases_by_an_older_state,
    heartbeats_by_the_lease_clock,
    sweep_by_its_own_clock,
    frontier_not_committed,
    lost_holds_unnoticed,
    clock_compared_at_one_side,
)
