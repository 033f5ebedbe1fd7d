"""What somebody holds under leases: each is counted until it lapses or is given up."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple


class _Lease(NamedTuple):
    lapses_s: float
    lease_s: float


class Held:
    """Leases by their keys, by a clock that the caller gives (seconds). Not thread-safe."""

    __slots__ = ("_leases",)

    def __init__(self) -> None:
        self._leases: dict[Hashable, _Lease] = {}

    def __len__(self) -> int:
        """How many there are, with those that have lapsed since `forget_lapsed`."""
        return len(self._leases)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._leases

    def take(self, key: Hashable, lease_s: float, now_s: float) -> None:
        """It lapses after so long. Who takes it again for less does not shorten it: the shard may keep the longer."""
        known = self._leases.get(key)
        if known is not None and known.lapses_s > now_s + lease_s:
            return
        self._leases[key] = _Lease(now_s + lease_s, lease_s)

    def renew(self, key: Hashable, now_s: float) -> bool:
        """It lapses later; whether it is there."""
        known = self._leases.get(key)
        if known is None:
            return False
        self.take(key, known.lease_s, now_s)
        return True

    def give_back(self, key: Hashable) -> bool:
        """It is not counted any more; whether it was."""
        return self._leases.pop(key, None) is not None

    def forget_lapsed(self, now_s: float) -> int:
        """How many have lapsed, which are not counted any more."""
        lapsed = [key for key, lease in self._leases.items() if lease.lapses_s <= now_s]
        for key in lapsed:
            del self._leases[key]
        return len(lapsed)
