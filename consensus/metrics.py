"""Decorators of a consensus store: one that forwards every call, and one that measures every call."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from blob.metrics import Meter, Observe
from consensus.advisory_locks import Turn
from consensus.interface import Consensus, Entry, Wanted


class ForwardingConsensus(Consensus):
    """Forwards every call to `inner`. A decorator overrides the calls that it changes."""

    def __init__(self, inner: Consensus) -> None:
        self._inner = inner

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def value_bytes_max(self) -> int:
        return self._inner.value_bytes_max

    def head(self, key: str) -> Entry | None:
        return self._inner.head(key)

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        return self._inner.compare_and_set(key, seqno, data, after)

    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        return self._inner.begin(key, seqno, data)

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        return self._inner.scan(key, from_seqno, limit)

    def truncate(self, key: str, seqno: int) -> int:
        return self._inner.truncate(key, seqno)

    def keys(self, prefix: str = "", after: str = "", limit: int = 1000, with_ended: bool = True) -> list[str]:
        return self._inner.keys(prefix, after, limit, with_ended)

    def scrub(self) -> str:
        return self._inner.scrub()

    def turn(self, key: str, wait_s: float) -> AbstractContextManager[Turn]:
        return self._inner.turn(key, wait_s)

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        return self._inner.subscribe(callback, wanted)

    def follow(self, key: str) -> Callable[[], None]:
        return self._inner.follow(key)


class MeteredConsensus(ForwardingConsensus):
    """`inner`, with every call observed. The outcome of a lost compare-and-set is `lost`. `clock` is monotonic."""

    def __init__(self, inner: Consensus, observe: Observe, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(inner)
        self._meter = Meter(observe, clock)

    def head(self, key: str) -> Entry | None:
        return self._meter.measured("head", lambda: self._inner.head(key), lambda e: len(e.data) if e else 0)

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        return self._measure_append(
            "compare_and_set", data, lambda: self._inner.compare_and_set(key, seqno, data, after)
        )

    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        return self._measure_append("begin", data, lambda: self._inner.begin(key, seqno, data))

    def _measure_append(self, operation: str, data: bytes, call: Callable[[], bool]) -> bool:
        return self._meter.measured(operation, call, lambda _: len(data), lambda won: "ok" if won else "lost")

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        return self._meter.measured(
            "scan", lambda: self._inner.scan(key, from_seqno, limit), lambda entries: sum(len(e.data) for e in entries)
        )

    def truncate(self, key: str, seqno: int) -> int:
        return self._meter.measured("truncate", lambda: self._inner.truncate(key, seqno), lambda _: 0)

    def keys(self, prefix: str = "", after: str = "", limit: int = 1000, with_ended: bool = True) -> list[str]:
        return self._meter.measured("keys", lambda: self._inner.keys(prefix, after, limit, with_ended), lambda _: 0)
