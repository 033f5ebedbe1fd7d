"""Which server to ask: rendezvous hashing over those that answer.

Every client with the same list sends a shard to the same server, so that its commits meet in one queue. A server that
does not answer is passed over, and tried again by one request at a time until it answers; then its shards come back.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from functools import lru_cache

from persist.client.server_url import normal as normal
from persist.commit.system import Clock
from persist.core.errors import InvalidUsage

RETRY_DOWN_S = 0.5
TRY_S = 30.0  # a try that has told nothing for so long is given up, and another one begins
ORDERS_KEPT_MAX = 20_000
SERVERS_MAX = 256


class Servers:
    """The servers of one client, by their base URLs. Thread-safe."""

    def __init__(self, urls: Sequence[str], clock: Clock) -> None:
        self.urls = tuple(dict.fromkeys(normal(url) for url in urls))
        if not 0 < len(self.urls) <= SERVERS_MAX:
            raise InvalidUsage(f"give 1 to {SERVERS_MAX} servers, not {len(self.urls)}")
        self._clock = clock
        self._lock = threading.Lock()
        self._down: dict[str, float] = {}  # server -> when to try it again
        self._ordered = lru_cache(ORDERS_KEPT_MAX)(self._rendezvous)

    def order(self, name: str) -> tuple[str, ...]:
        """The servers to ask about a shard, best first; those that are down come last."""
        ordered = self._ordered(name)
        if not self._down:
            return ordered
        up: list[str] = []
        down: list[str] = []
        now = self._clock.monotonic()
        with self._lock:
            for server in ordered:
                until = self._down.get(server)
                if until is None:
                    up.append(server)
                elif now >= until and not up:
                    self._down[server] = now + TRY_S  # this request tries it, others pass it over
                    up.append(server)
                else:
                    down.append(server)
        return (*up, *down)

    def failed(self, server: str) -> None:
        """It did not answer."""
        with self._lock:
            self._down[server] = self._clock.monotonic() + RETRY_DOWN_S

    def worked(self, server: str) -> None:
        """It answered."""
        if server in self._down:
            with self._lock:
                self._down.pop(server, None)

    def _rendezvous(self, name: str) -> tuple[str, ...]:
        return rendezvous(self.urls, name)


def rendezvous(urls: Sequence[str], name: str) -> tuple[str, ...]:
    """The servers by descending weight for `name`: taking one away moves only its own shards."""
    return tuple(sorted(urls, key=lambda url: hashlib.sha256(f"{url}\0{name}".encode()).digest(), reverse=True))
