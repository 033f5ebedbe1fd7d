"""Where time and randomness come from: interfaces, and the real ones. Simulations pass their own."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from persist.commit.sight import Sight
from persist.core.errors import InvalidUsage
from persist.core.ids import IdSource

_UPTIME = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))  # macOS counts sleep by the latter
_RANDOM_BITS = 62
_RANDOM_BYTES = 8
_RANDOM_IDS = 128  # whose random bytes are asked for at once: asking lets every other thread of the process go first


class Clock(Protocol):
    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since 1970."""
        ...

    def monotonic(self) -> float:
        """Seconds from some fixed point; never goes back. It may stand still while the machine is suspended."""
        ...

    def uptime(self) -> float:
        """As `monotonic`, and it counts also while the machine is suspended, where the system tells that."""
        ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clocks."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    def uptime(self) -> float:
        return time.monotonic() if _UPTIME is None else time.clock_gettime(_UPTIME)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


@dataclass(frozen=True, slots=True)
class Moment:
    """When something was, by this machine's clocks. The wall clock tells of a pause that `uptime_s` has missed.

    A virtual machine may be stopped and not know. Once its wall clock is set right, that counts as time that passed.
    """

    uptime_s: float
    wall_ms: int

    def passed_s(self, clock: Clock) -> float:
        """For how long it has been over, by the clock that says more. A wall clock that was set back counts as well."""
        return max(clock.uptime() - self.uptime_s, abs(clock.now_ms() - self.wall_ms) / 1000)


def moment(clock: Clock) -> Moment:
    """This very moment."""
    return Moment(clock.uptime(), clock.now_ms())


class OwnProcess:
    """The process that opened something. A fork copies its sockets and locks, and leaves its threads behind."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()

    @property
    def is_left(self) -> bool:
        """Whether this is a fork of that process."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises InvalidUsage in a fork: two processes on one socket would read each other's answers."""
        if self.is_left:
            raise InvalidUsage(
                f"{self._what} was opened before this process was forked from process {self._pid}, where it stays; "
                "call persist.connect in the child, or start children with the method 'spawn'"
            )


class SystemIds:
    """UUIDs of version 7 (RFC 9562, method 3: 12 extra bits of time), ascending within a process. Survives a fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = 0
        self._random: list[int] = []
        self._pid = os.getpid()

    def uuid7(self) -> str:
        now = time.time_ns()
        fine = (now // 1_000_000 << 12) | ((now % 1_000_000) * 4096 // 1_000_000)
        with self._lock:
            fine = self._last = max(fine, self._last + 1)
            if not self._random or self._pid != os.getpid():  # a child must not use what its parent will use
                self._random, self._pid = _randoms(), os.getpid()
            random = self._random.pop()
        high = (fine >> 12) << 16 | 0x7000 | (fine & 0xFFF)
        return f"{high:016x}{(0b10 << _RANDOM_BITS) | random:016x}"


def _randoms() -> list[int]:
    data = os.urandom(_RANDOM_BYTES * _RANDOM_IDS)
    places = range(0, len(data), _RANDOM_BYTES)
    return [int.from_bytes(data[at : at + _RANDOM_BYTES]) >> (8 * _RANDOM_BYTES - _RANDOM_BITS) for at in places]


class Background(Protocol):
    """Runs work that nobody waits for. Losing it is safe."""

    def submit(self, work: Callable[[], None]) -> bool:
        """Run `work` some time; False when it was dropped instead."""
        ...

    def close(self) -> None: ...


class ThreadBackground:
    """A bounded pool of threads; work beyond `queue_max` is dropped, since maintenance comes round again.

    `taken`: pieces of work that are queued or run now; `dropped`: those that were dropped.
    """

    def __init__(self, threads: int = 2, queue_max: int = 1000) -> None:
        self.threads = threads
        self.queue_max = queue_max
        self.taken = 0
        self.dropped = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="persist-background")
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], None]) -> bool:
        with self._lock:
            if self.taken >= self.queue_max:
                self.dropped += 1
                return False
            self.taken += 1
        try:
            self._pool.submit(work).add_done_callback(lambda _: self._ended())
        except RuntimeError:  # closed meanwhile
            self._ended()
            return False
        return True

    def _ended(self) -> None:
        with self._lock:
            self.taken -= 1

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


class Stamps(Protocol):
    """Whether the wall clock may be trusted; `persist.commit.store_clock.CheckedClock` is one."""

    def agrees(self, now_ms: int) -> bool:
        """Whether `now_ms`, which this process has just read, may be trusted."""
        ...

    def is_due(self) -> bool:
        """Whether it is time to ask `begins`, as far as the last comparison tells. Costs next to nothing."""
        ...

    def begins(self) -> bool:
        """Whether the caller is to call `compare` now."""
        ...

    def compare(self) -> None:
        """Compare the clocks. Calls the blob store."""
        ...


class Publishes(Protocol):
    """Who publishes what is in the log; `persist.commit.publishing.Publisher` is one."""

    def add(self, name: str, entry: bytes) -> None:
        """This entry of the shard is durably in the log. Never blocks, and calls no store."""
        ...


@dataclass(frozen=True, slots=True)
class System:
    """All that a machine needs of its process. `stamps` None: no clock counts as checked.

    `publisher` None: this process publishes nothing. `sight`: what is told of commits to who watches this process.
    """

    clock: Clock
    ids: IdSource
    background: Background
    stamps: Stamps | None = None
    publisher: Publishes | None = None
    sight: Sight = field(default_factory=lambda: Sight(time.monotonic, counts=False))


def jittered(ids: IdSource, seconds: float) -> float:
    """Between half and one and a half of `seconds`, so that those who failed together do not retry together."""
    return seconds * (0.5 + int(ids.uuid7()[-4:], 16) / 0x10000)
