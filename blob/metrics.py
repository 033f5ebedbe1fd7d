"""Measures every call to a blob store and reports it to a function; what becomes of the figures is its affair."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from blob.interface import Blob, BlobStat

__all__ = ["MeteredBlob", "Observe"]

T = TypeVar("T")

Observe = Callable[[str, str, float, int], None]
"""`observe(operation, outcome, seconds, bytes)`; the outcome is `ok` or the name of the error's class."""


class MeteredBlob(Blob):
    """`inner`, with every call observed. `clock` counts seconds from anywhere."""

    def __init__(self, inner: Blob, observe: Observe, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._inner = inner
        self._observe = observe
        self._clock = clock

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._measured("put", lambda: self._inner.put(key, data), lambda _: memoryview(data).nbytes)

    def get(self, key: str) -> bytes:
        return self._measured("get", lambda: self._inner.get(key), len)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._measured("get_range", lambda: self._inner.get_range(key, start, length), len)

    def stat(self, key: str) -> BlobStat | None:
        return self._measured("stat", lambda: self._inner.stat(key), lambda _: 0)

    def delete(self, keys: Sequence[str]) -> None:
        self._measured("delete", lambda: self._inner.delete(keys), lambda _: 0)

    def list(self, prefix: str) -> Iterator[BlobStat]:
        """Observed once it has been read to its end (or has failed, or was given up)."""
        started = self._clock()
        outcome = "ok"
        try:
            yield from self._inner.list(prefix)
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            self._observe("list", outcome, self._clock() - started, 0)

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()

    def presign_get(self, key: str, expires_s: int) -> str | None:
        return self._inner.presign_get(key, expires_s)

    def presign_put(self, key: str, expires_s: int) -> str | None:
        return self._inner.presign_put(key, expires_s)

    def local_path(self, key: str) -> str | None:
        return self._inner.local_path(key)

    def _measured(self, operation: str, call: Callable[[], T], size: Callable[[T], int]) -> T:
        started = self._clock()
        try:
            result = call()
        except Exception as error:
            self._observe(operation, type(error).__name__, self._clock() - started, 0)
            raise
        self._observe(operation, "ok", self._clock() - started, size(result))
        return result
