"""Measures every call to a blob store and reports it to a function; what becomes of the figures is its affair."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from blob.forwarding import ForwardingBlob
from blob.interface import Blob, BlobStat

T = TypeVar("T")

Observe = Callable[[str, str, float, int], None]
"""`observe(operation, outcome, seconds, bytes)`; the outcome is `ok` or the name of the error's class."""


class Meter:
    """Times calls and tells `observe`. `clock` counts seconds from anywhere."""

    def __init__(self, observe: Observe, clock: Callable[[], float]) -> None:
        self._observe = observe
        self._clock = clock

    def measured(
        self,
        operation: str,
        call: Callable[[], T],
        size: Callable[[T], int],
        outcome: Callable[[T], str] = lambda _: "ok",
    ) -> T:
        """What `call` returns; `size` and `outcome` tell how many bytes that was and what became of it."""
        started = self._clock()
        try:
            result = call()
        except Exception as error:
            self._observe(operation, type(error).__name__, self._clock() - started, 0)
            raise
        self._observe(operation, outcome(result), self._clock() - started, size(result))
        return result

    @contextmanager
    def timed(self, operation: str) -> Iterator[None]:
        started = self._clock()
        outcome = "ok"
        try:
            yield
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            self._observe(operation, outcome, self._clock() - started, 0)


class MeteredBlob(ForwardingBlob):
    """`inner`, with every call observed. `clock` counts seconds from anywhere."""

    def __init__(self, inner: Blob, observe: Observe, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(inner)
        self._meter = Meter(observe, clock)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._meter.measured("put", lambda: self._inner.put(key, data), lambda _: memoryview(data).nbytes)

    def get(self, key: str) -> bytes:
        return self._meter.measured("get", lambda: self._inner.get(key), len)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._meter.measured("get_range", lambda: self._inner.get_range(key, start, length), len)

    def stat(self, key: str) -> BlobStat | None:
        return self._meter.measured("stat", lambda: self._inner.stat(key), lambda _: 0)

    def delete(self, keys: Sequence[str]) -> None:
        self._meter.measured("delete", lambda: self._inner.delete(keys), lambda _: 0)

    def list(self, prefix: str) -> Iterator[BlobStat]:
        """Observed once it has been read to its end (or has failed, or was given up)."""
        with self._meter.timed("list"):
            yield from self._inner.list(prefix)
