"""How many leased readers each token has taken through this server: on one shard, and on all of them.

Whoever may only read holds back collection with every lease, and each costs every writer of the shard a little. Another
server counts for itself; one that has just started knows of no earlier leases until they are renewed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from persist.core import commands as c
from persist.core.errors import Indeterminate, Overloaded, PersistError
from persist.core.ids import ReaderId
from persist.core.state import State

RETRY_AFTER_S = 5.0
RENEWED_S = 3600.0  # for so long a lease counts of which only the renewal was seen here
TAKES = frozenset({c.RegisterReader, c.HoldPoint})
RENEWS = frozenset({c.HeartbeatReader, c.MoveHold, c.DowngradeSince})
ABOUT = TAKES | RENEWS | {c.ExpireReader}


def is_gone(state: State | None, there: str, holder: str) -> bool:
    """Whether it is known that a shard has no such reader, or writer, any more."""
    return state is not None and holder not in getattr(state, there)


class _Lease(NamedTuple):
    lapses_s: float
    lease_s: float


class _Leases:
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


@dataclass(slots=True)
class _Taken:
    """The leases of one token, by shard."""

    by_shard: dict[str, _Leases] = field(default_factory=dict)
    count: int = 0


class TokenLeases:
    """Not thread-safe: it belongs to the event loop."""

    def __init__(self, of_shard_max: int, of_all_max: int, now_s: Callable[[], float]) -> None:
        self._of_shard_max = of_shard_max
        self._of_all_max = of_all_max
        self._now_s = now_s
        self._taken: dict[str, _Taken] = {}

    def count(self, token: str) -> int:
        """How many leases of a token are counted."""
        found = self._taken.get(token)
        return 0 if found is None else found.count

    @contextmanager
    def counted(
        self, token: str, shard: str, command: c.Command, known_state: Callable[[], State | None]
    ) -> Iterator[None]:
        """Count what a command, one of `ABOUT`, takes, renews or gives back. Raises Overloaded where it takes too much.

        A lease that was refused is not counted. One that is given up counts for as long as the shard's State, which
        `known_state` tells once the command is done, has it: a command for another life of the shard ends nothing.
        """
        reader: ReaderId = command.reader  # type: ignore[attr-defined]
        known = self._taken.get(token)
        is_new = known is None or reader not in known.by_shard.get(shard, ())
        if isinstance(command, (c.RegisterReader, c.HoldPoint)):
            self._take(token, shard, reader, command.lease_ms / 1000, is_new)
        try:
            yield
        except Indeterminate:
            raise
        except PersistError:
            if is_new:
                self._give_back(token, shard, reader)
            raise
        if type(command) in RENEWS:
            self._renew(token, shard, reader)
        elif isinstance(command, c.ExpireReader) and is_gone(known_state(), "leased_readers", reader):
            self._give_back(token, shard, reader)

    def _take(self, token: str, shard: str, reader: ReaderId, seconds: float, is_new: bool) -> None:
        taken = self._taken.setdefault(token, _Taken())
        if is_new and self._is_full(taken, shard):
            self._forget_lapsed(taken)
            if self._is_full(taken, shard):
                held = len(taken.by_shard.get(shard, ()))
                raise Overloaded(
                    f"the token {token!r} holds {held} leases on shard {shard!r} and {taken.count} in all; close "
                    f"readers, or wait: it may hold {self._of_shard_max} on one shard and {self._of_all_max} in all",
                    retry_after_s=RETRY_AFTER_S,
                )
        taken.count += is_new
        taken.by_shard.setdefault(shard, _Leases()).take(reader, seconds, self._now_s())

    def _is_full(self, taken: _Taken, shard: str) -> bool:
        return taken.count >= self._of_all_max or len(taken.by_shard.get(shard, ())) >= self._of_shard_max

    def _renew(self, token: str, shard: str, reader: ReaderId) -> None:
        taken = self._taken.get(token)
        held = None if taken is None else taken.by_shard.get(shard)
        if held is not None and held.renew(reader, self._now_s()):
            return
        if taken is None or not self._is_full(taken, shard):  # of another server, or of before this one started
            self._take(token, shard, reader, RENEWED_S, True)

    def _give_back(self, token: str, shard: str, reader: ReaderId) -> None:
        taken = self._taken.get(token)
        if taken is None:
            return
        held = taken.by_shard.get(shard)
        if held is not None:
            taken.count -= held.give_back(reader)
            if not held:
                del taken.by_shard[shard]
        if not taken.by_shard:
            del self._taken[token]

    def _forget_lapsed(self, taken: _Taken) -> None:
        now_s = self._now_s()
        for shard, held in list(taken.by_shard.items()):
            taken.count -= held.forget_lapsed(now_s)
            if not held:
                del taken.by_shard[shard]
