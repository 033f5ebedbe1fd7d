"""Decorators of a blob store: one that forwards every call, and one that measures every call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from blob.interface import Blob, BlobStat, SignedPut, Unfinished


class ForwardingBlob(Blob):
    """Forwards every call to `inner`. A decorator overrides the calls that it changes."""

    def __init__(self, inner: Blob) -> None:
        self._inner = inner

    @property
    def inner(self) -> Blob:
        """The decorated store."""
        return self._inner

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._inner.put(key, data)

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._inner.get_range(key, start, length)

    def stat(self, key: str) -> BlobStat | None:
        return self._inner.stat(key)

    def put_here(self, key: str) -> int | None:
        return self._inner.put_here(key)

    def delete(self, keys: Sequence[str]) -> None:
        self._inner.delete(keys)

    def list(self, prefix: str) -> Iterator[BlobStat]:
        return self._inner.list(prefix)

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        return self._inner.unfinished(prefix)

    def abandon(self, unfinished: Sequence[Unfinished]) -> None:
        self._inner.abandon(unfinished)

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()

    def presign_get(self, key: str, expires_s: int) -> str | None:
        return self._inner.presign_get(key, expires_s)

    def presign_put(self, key: str, expires_s: int) -> SignedPut | None:
        return self._inner.presign_put(key, expires_s)

    def local_path(self, key: str) -> str | None:
        return self._inner.local_path(key)


T = TypeVar("T")

Observe = Callable[[str, str, float, int], None]
"""`observe(operation, outcome, seconds, bytes)`; the outcome is `ok` or the name of the error's class."""


class Meter:
    """Times calls and reports them to `observe`. `clock` is monotonic, in seconds."""

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
        """The result of `call`. `size` and `outcome` compute the bytes and the outcome to report from the result."""
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
    """`inner`, with every call observed. `clock` is monotonic, in seconds."""

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
        """Observed when the listing is exhausted, fails, or is closed early."""
        with self._meter.timed("list"):
            yield from self._inner.list(prefix)
