"""Measures every call to a consensus store and reports it to a function."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from consensus.interface import Consensus, Entry

__all__ = ["MeteredConsensus", "Observe"]

T = TypeVar("T")

Observe = Callable[[str, str, float, int], None]
"""`observe(operation, outcome, seconds, bytes)`; the outcome is `ok`, `lost` or the name of the error's class."""


class MeteredConsensus(Consensus):
    """`inner`, with every call observed. `clock` counts seconds from anywhere."""

    def __init__(self, inner: Consensus, observe: Observe, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._inner = inner
        self._observe = observe
        self._clock = clock

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def value_bytes_max(self) -> int:
        return self._inner.value_bytes_max

    def head(self, key: str) -> Entry | None:
        return self._measured("head", lambda: self._inner.head(key), lambda e: len(e.data) if e else 0)

    def compare_and_set(self, key: str, seqno: int, data: bytes) -> bool:
        return self._measured(
            "compare_and_set", lambda: self._inner.compare_and_set(key, seqno, data), lambda _: len(data)
        )

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        return self._measured(
            "scan", lambda: self._inner.scan(key, from_seqno, limit), lambda found: sum(len(e.data) for e in found)
        )

    def truncate(self, key: str, seqno: int) -> int:
        return self._measured("truncate", lambda: self._inner.truncate(key, seqno), lambda _: 0)

    def keys(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[str]:
        return self._measured("keys", lambda: self._inner.keys(prefix, after, limit), lambda _: 0)

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()

    def subscribe(self, callback: Callable[[str], None]) -> Callable[[], None] | None:
        return self._inner.subscribe(callback)

    def _measured(self, operation: str, call: Callable[[], T], size: Callable[[T], int]) -> T:
        started = self._clock()
        try:
            result = call()
        except Exception as error:
            self._observe(operation, type(error).__name__, self._clock() - started, 0)
            raise
        outcome = "lost" if result is False else "ok"
        self._observe(operation, outcome, self._clock() - started, size(result))
        return result
