"""What connections may take of a server: how many there are, whose, how much they send, and how long they take.

All times are kept by one sweep over the connections, once in `SWEEP_S`, not by a timer for each request. A body, or an
answer, has a least speed and a grace: each second that it is slower than that counts, and what comes faster makes good.

A process can stand still for long: it was stopped, or its machine was. What its clients sent and took meanwhile it has
not seen when it goes on. So time in which nobody looked counts for nobody.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from persist.core.errors import Overloaded, PersistError, Unavailable
from persist.formats.exposition import COUNTER, Family, Labelled
from rpc.settings import Limits

REFUSED_MAX = 256  # connections beyond the limits that are still told so; more are closed at once
ADDRESS_PERCENT = 75  # of the connections, that one address may have (IPv6: one /64 network)
TOKEN_PERCENT = 75  # of the connections, that one token may have
ANSWERS_BYTES_MAX = 128 * 1024 * 1024  # of all answers that clients have not taken yet
SWEEP_S = 1.0  # how often connections are looked at
QUIET_S = 1.0  # a connection that has done nothing for so long makes room for a new one where there is none
CROWDED = 0.9  # of the connections that may be open: from then on the sweep looks for such
LOOKED_AT_MAX = 2_000  # connections in one turn of the event loop
SWEEPS_PASSED_MAX = 2  # as much time at most counts between two looks at the clock, however late the second one is
RETRY_AFTER_S = 1.0


class Bounded(Protocol):
    """A connection, as the sweep sees it."""

    owner: str | None  # the token whose requests came on it; None: nobody's yet

    def look(self, now: float, passed_s: float) -> int:
        """Close it if it takes too long; else the bytes of answers that its client has not taken."""

    def quiet_since(self) -> float | None:
        """Since when no request was whole and unanswered, nor a body under way; None: one is."""

    def end(self) -> None:
        """Close it without a word."""


class Pace:
    """A least speed: `grace_s` seconds of standing still end it, and each `per_s` bytes make good one."""

    __slots__ = ("behind_s",)

    def __init__(self) -> None:
        self.behind_s = 0.0

    def is_too_slow(self, moved: int, passed_s: float, per_s: int, grace_s: float) -> bool:
        """Count what has moved within the last `passed_s` seconds."""
        self.behind_s = max(0.0, self.behind_s + passed_s - moved / per_s)
        return self.behind_s > grace_s


class ConnectionBounds:
    """All connections of a server. Used from the event loop's thread."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.connections_max = limits.connections_max
        self.address_max = max(1, limits.connections_max * ADDRESS_PERCENT // 100)
        self._token_max = max(1, limits.connections_max * TOKEN_PERCENT // 100)
        self.now = 0.0  # seconds that have counted, as of the last sweep or the last new connection
        self.head_bytes = 0  # of requests whose headers are not complete
        self.cut: Counter[str] = Counter()  # connections closed, or refused, by why
        self._open: dict[Bounded, str] = {}  # with the address of each
        self._addresses: Counter[str] = Counter()
        self._owners: Counter[str] = Counter()
        self._refused: set[Bounded] = set()
        self._quiet: list[Bounded] = []  # that could make room, the best ones last
        self._is_sweeping = False
        self._swept = 0.0  # `now` of the last sweep
        self._looked = 0.0  # at the loop's clock

    @property
    def connections(self) -> int:
        return len(self._open)

    def limited(self, files_max: int) -> None:
        """Take fewer connections, where this process can have no more than `files_max` of them."""
        if files_max < self.connections_max:
            self.address_max = max(1, self.address_max * files_max // self.connections_max)
            self.connections_max = files_max

    def enter(self, connection: Bounded, host: str | None, loop: asyncio.AbstractEventLoop) -> PersistError | None:
        """Count a new connection; the error with which its requests are to be refused. May end it, or a quiet one."""
        self._pass(loop)
        if not self._is_sweeping:
            self._is_sweeping, self._swept = True, self.now
            loop.call_later(SWEEP_S, self._sweep, loop, [])
        address = network_of(host)
        error: PersistError | None = None
        if self._addresses[address] >= self.address_max:
            error = Overloaded(
                f"the address {address} has {self.address_max} connections here, which is the most; close some",
                retry_after_s=RETRY_AFTER_S,
            )
            self.cut["address"] += 1
        elif self._is_full() and not self._make_room():
            error = Unavailable("this server has too many connections; try again, or another server")
            self.cut["full"] += 1
        self._open[connection] = address
        self._addresses[address] += 1
        if error is not None:
            self._refused.add(connection)
            if len(self._refused) > REFUSED_MAX:
                connection.end()
        return error

    def leave(self, connection: Bounded) -> None:
        """A connection has ended. Does nothing the second time."""
        address = self._open.pop(connection, None)
        if address is None:
            return
        self._refused.discard(connection)
        _less(self._addresses, address)
        if connection.owner is not None:
            _less(self._owners, connection.owner)

    def belong(self, connection: Bounded, owner: str) -> None:
        """From now on the connection is this token's. Raises Overloaded: it has too many."""
        if connection.owner == owner or connection not in self._open:
            return
        if self._owners[owner] >= self._token_max:
            self.cut["token"] += 1
            raise Overloaded(
                f"the token {owner!r} has {self._token_max} connections here, which is the most; close some",
                retry_after_s=RETRY_AFTER_S,
            )
        if connection.owner is not None:
            _less(self._owners, connection.owner)
        connection.owner = owner
        self._owners[owner] += 1

    def _is_full(self) -> bool:
        return len(self._open) - len(self._refused) >= self.connections_max

    def families(self) -> Iterator[Family]:
        cut: list[Labelled] = [((why,), count) for why, count in list(self.cut.items())]
        yield Family("persist_connections_cut_total", COUNTER, "Connections closed or refused by us", ("why",), cut)

    def _make_room(self) -> bool:
        """End a connection that has been quiet; whether there was one."""
        while self._quiet:
            connection = self._quiet.pop()
            since = connection.quiet_since()
            if connection in self._open and since is not None and self.now - since >= QUIET_S:
                self.cut["quiet"] += 1
                connection.end()
                self.leave(connection)
                return True
        return False

    def _pass(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let time go on, but not by what went by while this process stood still."""
        looked = loop.time()
        self.now += min(looked - self._looked, SWEEP_S * SWEEPS_PASSED_MAX)
        self._looked = looked

    def _sweep(
        self, loop: asyncio.AbstractEventLoop, rest: list[Bounded], passed_s: float = 0.0, held: int = 0
    ) -> None:
        """Look at all connections, some in each turn of the loop. `rest` are left of this round, `held` bytes found."""
        self._pass(loop)
        if not rest:
            if not self._open:
                self._is_sweeping = False  # the next connection begins it again
                self._quiet.clear()
                return
            passed_s, self._swept = self.now - self._swept, self.now
            rest = list(self._open)
        for connection in rest[-LOOKED_AT_MAX:]:
            if connection in self._open:
                held += connection.look(self.now, passed_s)
                if held > ANSWERS_BYTES_MAX:
                    self.cut["answers"] += 1
                    held -= connection.look(self.now, 0.0)
                    connection.end()
        del rest[-LOOKED_AT_MAX:]
        if rest:
            loop.call_soon(self._sweep, loop, rest, passed_s, held)
            return
        self._find_quiet()
        loop.call_later(SWEEP_S, self._sweep, loop, [])

    def _find_quiet(self) -> None:
        """Whom to end first where there is no room: who has shown no token, and of these who is quiet the longest."""
        self._quiet = []
        if len(self._open) < self.connections_max * CROWDED:
            return
        found = [(one.owner is not None, since, one) for one in self._open if (since := one.quiet_since()) is not None]
        found.sort(key=lambda one: one[:2], reverse=True)
        self._quiet = [one for _, _, one in found]


def network_of(host: str | None) -> str:
    """What counts as one address: of IPv6 the /64 network, which one customer has as a whole."""
    if host is None:
        return "unknown"
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((address, 64), strict=False))


def _less(counts: Counter[str], name: str) -> None:
    counts[name] -= 1
    if counts[name] <= 0:
        del counts[name]
