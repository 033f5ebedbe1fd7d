"""Sources of time and randomness: interfaces, the real ones, and the clock of the blob store."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from blob import Blob
from persist.core.errors import InvalidUsage, PersistError
from persist.core.ids import IdSource
from persist.formats.store_errors import translated
from persist.telemetry.metrics import Sight

_UPTIME = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))  # macOS counts sleep by the latter
_RANDOM_BITS = 62
_RANDOM_BYTES = 8
_RANDOM_IDS = 128  # whose random bytes are requested at once: each request releases the interpreter to other threads


class Clock(Protocol):
    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since 1970."""

    def monotonic(self) -> float:
        """Seconds from some fixed point; never goes back. It may stand still while the machine is suspended."""

    def uptime(self) -> float:
        """As `monotonic`, but it also counts while the machine is suspended, if the system supports that."""

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
    """A moment by this machine's clocks. The wall clock shows a pause that `uptime_s` has missed.

    A virtual machine may be paused without notice. Once its wall clock is corrected, the pause counts as passed time.
    """

    uptime_s: float
    wall_ms: int

    def passed_s(self, clock: Clock) -> float:
        """Seconds since then, by the clock that shows more. A wall clock that was set back counts as well."""
        return max(clock.uptime() - self.uptime_s, abs(clock.now_ms() - self.wall_ms) / 1000)


def moment(clock: Clock) -> Moment:
    return Moment(clock.uptime(), clock.now_ms())


class OwnProcess:
    """The process that opened an object, and until when. A fork copies its sockets and locks, but not its threads."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._pid = os.getpid()
        self._is_closed = False

    @property
    def is_left(self) -> bool:
        """Whether this is a fork of that process."""
        return os.getpid() != self._pid

    def close(self) -> None:
        """From here on the object is closed."""
        self._is_closed = True

    def check(self) -> None:
        """Raises InvalidUsage: it was closed, or in a fork, where two processes would read each other's answers."""
        if self._is_closed:
            raise InvalidUsage(f"{self._what} was closed; call persist.connect again")
        if self.is_left:
            raise InvalidUsage(
                f"{self._what} was opened before this process was forked from process {self._pid}; call "
                "persist.connect in the child, or start children with the method 'spawn'"
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
            if not self._random or self._pid != os.getpid():  # a child must not use the random bytes of its parent
                data, self._pid = os.urandom(_RANDOM_BYTES * _RANDOM_IDS), os.getpid()
                each = (data[at : at + _RANDOM_BYTES] for at in range(0, len(data), _RANDOM_BYTES))
                self._random = [int.from_bytes(part) >> (8 * _RANDOM_BYTES - _RANDOM_BITS) for part in each]
            random = self._random.pop()
        high = (fine >> 12) << 16 | 0x7000 | (fine & 0xFFF)
        return f"{high:016x}{(0b10 << _RANDOM_BITS) | random:016x}"


class Background(Protocol):
    """Runs work in the background. Losing it is safe."""

    def submit(self, work: Callable[[], None]) -> bool:
        """Run `work` later; False if it was dropped instead."""

    def close(self) -> None: ...


class ThreadBackground:
    """A bounded pool of threads; work beyond `queue_max` is dropped, since a later commit submits it again.

    `taken`: number of work items that are queued or running; `dropped`: number of those dropped.
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


class Publishes(Protocol):
    """Publishes log entries; implemented by `persist.maintenance.journal_writer.Publisher`."""

    def add(self, name: str, entry: bytes) -> None:
        """Queue an entry that is durably in the log of the shard. Never blocks, and calls no store."""

    def close(self) -> None:
        """Publish the queued entries, as far as the store accepts them."""


@dataclass(frozen=True, slots=True)
class System:
    """What a machine needs from its process. `stamps` None: no clock counts as checked.

    `publisher` None: this process publishes nothing. `sight`: metrics, traces and log lines of commits.
    """

    clock: Clock
    ids: IdSource
    background: Background
    stamps: CheckedClock | None = None
    publisher: Publishes | None = None
    sight: Sight = field(default_factory=lambda: Sight(time.monotonic, counts=False))


def jittered(ids: IdSource, seconds: float) -> float:
    """A random time between 0.5 and 1.5 times `seconds`, so that callers that failed together retry apart."""
    return seconds * (0.5 + int(ids.uuid7()[-4:], 16) / 0x10000)


# The blob store's clock.
#
# It confirms the age of a blob before a deletion, decides whether a token is from the future, and confirms a wall clock
# before that seals an instant.


PREFIX = "clock/"  # of the probes: no shard's blobs begin so
KNOWN_FOR_S = 60.0
OFFSET_MS_MAX = 10_000  # difference up to which two clocks agree
COMPARED_EVERY_S = 300.0
COUNTS_FOR_S = 24 * 3600.0  # validity of a comparison
TRIED_EVERY_S = 10.0  # minimum time between failed comparisons
JUMP_MS_MAX = 1_000  # a larger change of the wall clock invalidates the comparison
LEFT_BEHIND_MS = 3_600_000  # an older probe was left by a process that died


class StoreClock:
    """Reads the store's time: puts an empty blob, lists its time of modification, and deletes it. Not thread-safe."""

    def __init__(self, blob: Blob, clock: Clock, ids: IdSource) -> None:
        self._blob = blob
        self._clock = clock
        self._ids = ids
        self._asked_s = 0.0
        self._now_ms: int | None = None

    def now_ms(self) -> int:
        """The store's time in milliseconds since 1970, up to KNOWN_FOR_S old. Raises the errors of the store."""
        now_s = self._clock.monotonic()
        if self._now_ms is None or now_s - self._asked_s > KNOWN_FOR_S:
            self._now_ms, self._asked_s = probed(self._blob, self._ids), now_s
        return self._now_ms


def checked_ms(stamps: CheckedClock | None, now_ms: int) -> int | None:
    """`now_ms` if it may be trusted, else None. In a new process the clocks are compared at once."""
    if stamps is None:
        return None
    if stamps.agrees(now_ms):
        return now_ms
    if stamps.begins() or stamps.is_first_under_way():
        stamps.compare()
    return now_ms if stamps.agrees(now_ms) else None


def probed(blob: Blob, ids: IdSource) -> int:
    """The store's time now, in milliseconds since 1970. Raises the errors of the store."""
    key = f"{PREFIX}{ids.uuid7()}"
    with translated():
        blob.put(key, b"")
        put_times = {stat.key: stat.modified_ms for stat in blob.list(PREFIX)}
        now_ms = put_times[key] if key in put_times else max(put_times.values(), default=0)
        blob.delete([key, *(other for other, put_ms in put_times.items() if put_ms < now_ms - LEFT_BEHIND_MS)])
    return now_ms


@dataclass(frozen=True, slots=True)
class _Compared:
    """When this process compared the two clocks, and whether they agreed."""

    now_ms: int
    at_s: float
    agreed: bool


class CheckedClock:
    """Whether the wall clock of this process may seal instants because the blob store's clock agrees. Thread-safe.

    The first commit of a process waits for the comparison, since a short program has no other commit. After that the
    clocks are compared in the background, every COMPARED_EVERY_S seconds in which there are commits. A wall clock that
    was set since, as the monotonic clock shows, does not count until it is compared again.
    """

    def __init__(self, blob: Blob, clock: Clock, ids: IdSource) -> None:
        self._blob = blob
        self._clock = clock
        self._ids = ids
        self._lock = threading.Lock()
        self._compared: _Compared | None = None
        self._tried_s: float | None = None
        self._ended = False

    def agrees(self, now_ms: int) -> bool:
        """Whether `now_ms`, which this process has just read, may be trusted."""
        compared = self._compared
        if compared is None or not compared.agreed:
            return False
        passed_s = self._clock.monotonic() - compared.at_s
        return passed_s <= COUNTS_FOR_S and abs(now_ms - compared.now_ms - passed_s * 1000) <= JUMP_MS_MAX

    @property
    def agreed(self) -> bool | None:
        """Whether the two clocks agreed at the last comparison. None: not compared yet."""
        compared = self._compared
        return None if compared is None else compared.agreed

    def is_due(self) -> bool:
        """Whether the last comparison is so old that `begins` should be called.

        Cheap. It does not notice that a clock was set: `agrees` does.
        """
        compared = self._compared
        return compared is None or self._clock.monotonic() - compared.at_s >= COMPARED_EVERY_S

    def begins(self) -> bool:
        """Whether it is time to compare. True obliges the caller to call `compare`; others get False for a while."""
        with self._lock:
            now_s, tried_s, compared = self._clock.monotonic(), self._tried_s, self._compared
            if tried_s is not None and now_s - tried_s < TRIED_EVERY_S:
                return False
            is_recent = compared is not None and now_s - compared.at_s < COMPARED_EVERY_S
            if compared is not None and is_recent and (not compared.agreed or self.agrees(self._clock.now_ms())):
                return False
            self._tried_s = now_s
            return True

    def is_first_under_way(self) -> bool:
        """Whether the first comparison of this process has begun and not ended: others may `compare` as well."""
        return self._tried_s is not None and not self._ended

    def compare(self) -> None:
        """Compare the two clocks now. If the store is unavailable, the last comparison stays valid for its time.

        The store's time was read at an unknown moment of the call. So it has to agree with this clock both before and
        after the call: otherwise a process that was stopped meanwhile would mistake its own delay for the store's, and
        a wrong clock that was corrected meanwhile would count as it was before.
        """
        before_ms, at_s = self._clock.now_ms(), self._clock.monotonic()
        try:
            store_ms = probed(self._blob, self._ids)
            agreed = all(abs(store_ms - own_ms) <= OFFSET_MS_MAX for own_ms in (before_ms, self._clock.now_ms()))
            self._compared = _Compared(before_ms, at_s, agreed)
        except PersistError:
            pass
        finally:
            self._ended = True
