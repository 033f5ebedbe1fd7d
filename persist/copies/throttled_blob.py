"""Rate limits: a throttle, and a blob store that is read through one."""

from __future__ import annotations

import threading
from collections.abc import Callable

from blob import Blob
from blob.metrics import ForwardingBlob
from persist.commit.clocks_and_ids import Clock
from persist.core.errors import InvalidUsage, Unavailable
from persist.core.shard_settings import bytes_of

RATE_MIN = 1_024  # bytes a second
BURST_S = 1.0  # after an idle time, so many seconds' worth of bytes pass at once


def check_rate(rate: int | None) -> None:
    """Raise InvalidUsage if the rate, in bytes a second, is too low. None: unlimited."""
    if rate is not None and rate < RATE_MIN:
        raise InvalidUsage(f"rate is {rate} bytes a second; it must be at least {RATE_MIN}")


def read_rate(text: str | None, option: str = "--rate") -> int | None:
    """Parse a rate option such as `50MiB`. Raises InvalidUsage."""
    try:
        rate = None if text is None else bytes_of(text)
    except InvalidUsage:
        rate = 0
    if rate == 0:
        raise InvalidUsage(f"{option} is {text!r:.100}; it must be bytes a second, such as 50MiB")
    return rate


class Throttle:
    """Limits bytes to `rate` a second (None: unlimited). Thread-safe. Setting `stop` ends all waits."""

    def __init__(self, rate: int | None, clock: Clock, stop: threading.Event | None = None) -> None:
        self._rate = rate
        self._clock = clock
        self._stop = stop
        self._lock = threading.Lock()
        self._free_s = 0.0 if rate is None else clock.monotonic()  # when all bytes so far are accounted for

    def spend(self, size: int) -> None:
        """Wait until so many bytes are within the rate."""
        if self._rate is None:
            return
        with self._lock:
            now_s = self._clock.monotonic()
            self._free_s = max(self._free_s, now_s - BURST_S) + size / self._rate
            wait_s = self._free_s - now_s
        if wait_s > 0:
            (self._clock.sleep if self._stop is None else self._stop.wait)(wait_s)


class PacedBlob(ForwardingBlob):
    """A blob store whose reads, by all threads together, are limited to `rate` bytes a second (None: unlimited).

    Writes are not limited. After `stop` is set, reads fail, and waits end. `count` is called with the bytes of a read.
    """

    def __init__(
        self,
        inner: Blob,
        rate: int | None,
        clock: Clock,
        stop: threading.Event | None = None,
        count: Callable[[int], object] = lambda size: None,
    ) -> None:
        super().__init__(inner)
        self._throttle = Throttle(rate, clock, stop)
        self._stop = stop
        self._count = count

    def get(self, key: str) -> bytes:
        self._check()
        data = super().get(key)
        self._count(len(data))
        self._throttle.spend(len(data))
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self._throttle.spend(length)
        self._check()
        data = super().get_range(key, start, length)
        self._count(len(data))
        return data

    def _check(self) -> None:
        if self._stop is not None and self._stop.is_set():
            raise Unavailable("this process is stopping")
