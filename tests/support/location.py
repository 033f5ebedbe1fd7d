"""Locations in memory with clocks and ids that tests control."""

from __future__ import annotations

import threading
from collections.abc import Callable

from blob import Blob
from blob.memory_blobs import MemoryBlob
from compactor.on_demand import maintain
from consensus import Consensus
from consensus.memory_logs import MemoryConsensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.lease_pool import LeasePool
from persist.client.shard import HandleSettings
from persist.commit.location import Location, LocationSettings
from persist.core.state import Policy
from persist.formats.state_frames import THIS_BUILD, Build

EAGER = Policy(rollup_every=32, inline_batches=16)
"""Upkeep has something to do after fewer commits than by default."""


class UntendedPool(LeasePool):
    """Shared leases that are looked at by hand, whenever the clock has moved."""

    def _start_thread(self) -> None:
        return


class TestClock:
    """Time that stands still until it is moved; sleeping moves it."""

    __test__ = False

    def __init__(self, now_ms: int = 1_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic(self) -> float:
        return self._now_ms / 1000

    def uptime(self) -> float:
        return self._now_ms / 1000

    def sleep(self, seconds: float) -> None:
        self.advance_ms(max(1, int(seconds * 1000)))

    def advance_ms(self, ms: int) -> None:
        self._now_ms += ms


class InlineBackground:
    """Runs work at once, in the caller."""

    def submit(self, work: Callable[[], None]) -> bool:
        work()
        return True

    def close(self) -> None:
        return


class AscendingIds:
    """Ids that count up, as those of version 7 do; `origin` tells processes apart."""

    def __init__(self, origin: int = 0) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._origin = origin

    def uuid7(self) -> str:
        with self._lock:
            self._count += 1
            return f"{self._count:024x}{self._origin:08x}"


def memory_location(
    *,
    blob: Blob | None = None,
    consensus: Consensus | None = None,
    clock: TestClock | None = None,
    ids: AscendingIds | None = None,
    policy: Policy | None = None,
    small_merges: bool = True,
    build: Build = THIS_BUILD,
    shows_no_copy: bool = False,
    compares_clock: bool = False,
) -> Location:
    """A location over memory stores (or those given) that checks every invariant at every commit.

    The clocks of memory stores and of tests are not the same, so by default nothing is told by wall clocks there.
    """
    return Location(
        blob if blob is not None else MemoryBlob("mem:"),
        consensus if consensus is not None else MemoryConsensus("mem:"),
        settings=LocationSettings(
            policy or EAGER,
            check_all=True,
            small_merges=small_merges,
            build=build,
            compares_clock=compares_clock,
            shows_no_copy=shows_no_copy,
        ),
        clock=clock or TestClock(),
        ids=ids or AscendingIds(),
        background=InlineBackground(),
    )


def client_of(location: Location, handles: HandleSettings | None = None) -> Client:
    """A client in the process of the location, which can ask for maintenance."""
    return Client(EmbeddedTransport(location, maintain), handles or HandleSettings())
