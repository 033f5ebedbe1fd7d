"""Limits of connections: their number in total, per address and per token, their speed, and their idle time.

One sweep over all connections every `SWEEP_S` checks all times, instead of a timer for each request. A request body or
a response has a minimum speed and a grace period: slower seconds use it up, faster ones restore it.

A process may be suspended for long, and does not see what clients sent and read meanwhile. So time that passes between
two late sweeps is not counted against clients.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from persist.core.errors import Overloaded, PersistError, Unavailable
from persist.formats.exposition import COUNTER, Family, Labelled
from rpc.concurrency_limits import decrease
from rpc.settings import Limits

REFUSED_MAX = 256  # excess connections that receive an error response; further ones are closed at once
ADDRESS_PERCENT = 75  # of the connections, for one address (IPv6: one /64 network)
TOKEN_PERCENT = 75  # of the connections, for one token
ANSWERS_BYTES_MAX = 128 * 1024 * 1024  # of all responses that clients have not read yet
SWEEP_S = 1.0
QUIET_S = 1.0  # a connection that is idle for this long is closed if a new one needs room
CROWDED = 0.9  # of the limit: from here on the sweep looks for idle connections
LOOKED_AT_MAX = 2_000  # connections checked in one turn of the event loop
SWEEPS_PASSED_MAX = 2  # sweeps' worth of time counted between two readings of the clock at most
RETRY_AFTER_S = 1.0


class LimitedConnection(Protocol):
    """A connection, as the sweep sees it."""

    owner: str | None  # the token of its requests; None: none yet

    def check(self, now: float, passed_s: float) -> int:
        """Close it if it is too slow; else return the bytes of responses that its client has not read."""

    def quiet_since(self) -> float | None:
        """When the last request was answered; None: a request or a body is in progress."""

    def end(self) -> None:
        """Close it without a response."""


class Pace:
    """Enforces a minimum speed: `grace_s` seconds of standstill fail it, and every `per_s` bytes restore one."""

    __slots__ = ("behind_s",)

    def __init__(self) -> None:
        self.behind_s = 0.0

    def is_too_slow(self, moved: int, passed_s: float, per_s: int, grace_s: float) -> bool:
        """Count the bytes that moved in the last `passed_s` seconds."""
        self.behind_s = max(0.0, self.behind_s + passed_s - moved / per_s)
        return self.behind_s > grace_s


class ConnectionBounds:
    """All connections of a server. Used from the event loop's thread."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.connections_max = limits.connections_max
        self.address_max = max(1, limits.connections_max * ADDRESS_PERCENT // 100)
        self._token_max = max(1, limits.connections_max * TOKEN_PERCENT // 100)
        self.now = 0.0  # counted seconds, as of the last sweep or new connection
        self.head_bytes = 0  # of requests whose headers are not complete
        self.cut: Counter[str] = Counter()  # connections closed or refused, by reason
        self._open: dict[LimitedConnection, str] = {}  # with their addresses
        self._addresses: Counter[str] = Counter()
        self._owners: Counter[str] = Counter()
        self._refused: set[LimitedConnection] = set()
        self._quiet: list[LimitedConnection] = []  # idle ones, the first to close last
        self._is_sweeping = False
        self._swept = 0.0  # `now` of the last sweep
        self._clock_s = 0.0  # of the loop's clock

    @property
    def connections(self) -> int:
        return len(self._open)

    def limit_to(self, files_max: int) -> None:
        """Lower the limit to `files_max`, the number of connections that this process can open."""
        if files_max < self.connections_max:
            self.address_max = max(1, self.address_max * files_max // self.connections_max)
            self.connections_max = files_max

    def enter(
        self, connection: LimitedConnection, host: str | None, loop: asyncio.AbstractEventLoop
    ) -> PersistError | None:
        """Register a new connection; returns the error for its requests if it is refused. May close an idle one."""
        self._pass(loop)
        if not self._is_sweeping:
            self._is_sweeping, self._swept = True, self.now
            loop.call_later(SWEEP_S, self._sweep, loop, [])
        address = network_of(host)
        error: PersistError | None = None
        if self._addresses[address] >= self.address_max:
            error = Overloaded(
                f"the address {address} has {self.address_max} connections, which is the limit; close some",
                retry_after_s=RETRY_AFTER_S,
            )
            self.cut["address"] += 1
        elif self._is_full() and not self._make_room():
            error = Unavailable("the server has too many connections; retry, or use another server")
            self.cut["full"] += 1
        self._open[connection] = address
        self._addresses[address] += 1
        if error is not None:
            self._refused.add(connection)
            if len(self._refused) > REFUSED_MAX:
                connection.end()
        return error

    def leave(self, connection: LimitedConnection) -> None:
        """Unregister a closed connection. Idempotent."""
        address = self._open.pop(connection, None)
        if address is None:
            return
        self._refused.discard(connection)
        decrease(self._addresses, address)
        if connection.owner is not None:
            decrease(self._owners, connection.owner)

    def assign_owner(self, connection: LimitedConnection, owner: str) -> None:
        """Assign the connection to a token. Raises Overloaded if the token has too many."""
        if connection.owner == owner or connection not in self._open:
            return
        if self._owners[owner] >= self._token_max:
            self.cut["token"] += 1
            raise Overloaded(
                f"the token {owner!r} has {self._token_max} connections, which is the limit; close some",
                retry_after_s=RETRY_AFTER_S,
            )
        if connection.owner is not None:
            decrease(self._owners, connection.owner)
        connection.owner = owner
        self._owners[owner] += 1

    def _is_full(self) -> bool:
        return len(self._open) - len(self._refused) >= self.connections_max

    def families(self) -> Iterator[Family]:
        cut: list[Labelled] = [((why,), count) for why, count in list(self.cut.items())]
        yield Family("persist_connections_cut_total", COUNTER, "Connections closed or refused by us", ("why",), cut)

    def _make_room(self) -> bool:
        """Close an idle connection; returns whether there was one."""
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
        """Advance `now`, except by time during which this process was suspended."""
        clock_s = loop.time()
        self.now += min(clock_s - self._clock_s, SWEEP_S * SWEEPS_PASSED_MAX)
        self._clock_s = clock_s

    def _sweep(
        self, loop: asyncio.AbstractEventLoop, rest: list[LimitedConnection], passed_s: float = 0.0, held: int = 0
    ) -> None:
        """Check all connections, some in each turn of the loop: `rest` remains, `held` bytes were found so far."""
        self._pass(loop)
        if not rest:
            if not self._open:
                self._is_sweeping = False  # the next connection restarts it
                self._quiet.clear()
                return
            passed_s, self._swept = self.now - self._swept, self.now
            rest = list(self._open)
        for connection in rest[-LOOKED_AT_MAX:]:
            if connection in self._open:
                held += connection.check(self.now, passed_s)
                if held > ANSWERS_BYTES_MAX:
                    self.cut["answers"] += 1
                    held -= connection.check(self.now, 0.0)
                    connection.end()
        del rest[-LOOKED_AT_MAX:]
        if rest:
            loop.call_soon(self._sweep, loop, rest, passed_s, held)
            return
        self._find_quiet()
        loop.call_later(SWEEP_S, self._sweep, loop, [])

    def _find_quiet(self) -> None:
        """Find idle connections to close if there is no room: those without a token first, then the longest idle."""
        self._quiet = []
        if len(self._open) < self.connections_max * CROWDED:
            return
        quiet = [(c.owner is not None, since, c) for c in self._open if (since := c.quiet_since()) is not None]
        quiet.sort(key=lambda entry: entry[:2], reverse=True)
        self._quiet = [connection for _, _, connection in quiet]


def network_of(host: str | None) -> str:
    """What counts as one address: for IPv6 the /64 network, which belongs to one customer."""
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
