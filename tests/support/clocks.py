"""Machines whose clocks are wrong, over the same stores; true time passes for all of them alike."""

from __future__ import annotations

import random

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.client.shard import Shard
from persist.commit.location import Location, LocationSettings
from persist.core.state import Policy
from persist.formats.state_frames import THIS_BUILD, Build
from tests.support.location import EAGER, InlineBackground, client_of

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
YEAR_MS = 365 * DAY_MS
START_MS = 1_760_000_000_000  # a day in 2025


class World:
    """True time, and two stores. The blob store's clock is off by `store_off_ms`."""

    def __init__(self, build: Build = THIS_BUILD, policy: Policy | None = None) -> None:
        self.true_ms = START_MS
        self.store_off_ms = 0
        self.build = build
        self.policy = policy or EAGER
        self.machines = 0
        self.blob = MemoryBlob("mem:", now_ms=lambda: self.true_ms + self.store_off_ms)
        self.consensus = MemoryConsensus("mem:")

    def pass_ms(self, ms: int) -> None:
        self.true_ms += ms

    def machine(self, off_ms: int = 0) -> Machine:
        """A process that starts now, on a machine whose wall clock is off."""
        self.machines += 1
        return Machine(self, off_ms)


class Clock:
    """The clocks of one machine. While it is suspended its monotonic clock stands still; while it is paused both do."""

    def __init__(self, world: World, off_ms: int) -> None:
        self._world = world
        self.off_ms = off_ms
        self.stood_still_ms = 0
        self.paused_ms = 0

    def now_ms(self) -> int:
        return self._world.true_ms + self.off_ms

    def monotonic(self) -> float:
        return (self._world.true_ms - START_MS - self.stood_still_ms) / 1000

    def uptime(self) -> float:
        return (self._world.true_ms - START_MS - self.paused_ms) / 1000

    def sleep(self, seconds: float) -> None:
        self._world.pass_ms(max(1, int(seconds * 1000)))


class Ids:
    """UUIDs of version 7 by a machine's wall clock."""

    def __init__(self, clock: Clock, seed: int) -> None:
        self._clock = clock
        self._random = random.Random(seed)
        self._last = 0

    def uuid7(self) -> str:
        self._last = max(self._last + 1, self._clock.now_ms() << 12)
        high = (self._last >> 12) << 16 | 0x7000 | (self._last & 0xFFF)
        return f"{high:016x}{0b10 << 62 | self._random.getrandbits(62):016x}"


class Machine:
    """One process: its clocks, its view of the location, a client."""

    def __init__(self, world: World, off_ms: int) -> None:
        self.world = world
        self.clock = Clock(world, off_ms)
        self.location = Location(
            world.blob,
            world.consensus,
            settings=LocationSettings(world.policy, check_all=True, build=world.build),
            clock=self.clock,
            ids=Ids(self.clock, world.machines),
            background=InlineBackground(),
        )
        self.client = client_of(self.location)

    def shard(self, name: str) -> Shard:
        return self.client.shard(name)

    def suspended(self, ms: int) -> None:
        """The machine is suspended while that time passes."""
        self.world.pass_ms(ms)
        self.clock.stood_still_ms += ms

    def paused(self, ms: int) -> None:
        """Who runs the machine stops it while that time passes, and sets its wall clock right after that."""
        self.suspended(ms)
        self.clock.paused_ms += ms
