"""Reads of a simulated process that share leases, in runs with seeds of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from persist.client.lease_pool import LeasePool
from tests.simulation.world import SimClock

SHARED_FROM = 40_000  # seeds from here on, so that those before it mean what they meant
LOOK_S = 0.3  # simulated; leases last for three seconds
COMMITS_HELD_MAX = 3


class SimPool(LeasePool):
    """The shared leases of a simulated process, at whose end nothing is given back."""

    def __init__(self, clock: SimClock) -> None:
        super().__init__(clock)
        self._at_exit.cancel()


def shared_lease_leaves_its_users() -> AbstractContextManager[Any]:
    """A shared lease is given back at every look, whatever is read by it."""
    real = LeasePool.tend

    def tend(self: LeasePool) -> bool:
        with self._changed:
            leases = [shared.lease for known in self._known.values() for shared in known.shared]
        for lease in leases:
            lease.close()
        return real(self)

    return patch.object(LeasePool, "tend", tend)


BROKEN = (shared_lease_leaves_its_users,)
