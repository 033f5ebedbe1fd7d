"""Stores whose process dies at a chosen I/O step, before the step happens or right after."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from blob import Blob, BlobStat
from blob.metrics import ForwardingBlob
from consensus import Consensus, Entry
from consensus.metrics import ForwardingConsensus

T = TypeVar("T")


class Crash(BaseException):
    """The process is gone: nothing of it runs any more. Not an Exception, so that no handler takes it for an error."""


class Fuse:
    """Counts I/O steps of one process and ends it at step `at` (None: never); `after` says on which side of it."""

    def __init__(self, at: int | None = None, *, after: bool = False) -> None:
        self.at = at
        self.after = after
        self.steps = 0

    def step(self, work: Callable[[], T]) -> T:
        """One I/O step."""
        self.steps += 1
        struck = self.at is not None and self.steps >= self.at
        if struck and not (self.after and self.steps == self.at):
            raise Crash
        result = work()
        if struck:
            raise Crash
        return result


class CrashingBlob(ForwardingBlob):
    """`inner`, used by a process that ends when its fuse says so."""

    def __init__(self, inner: Blob, fuse: Fuse) -> None:
        super().__init__(inner)
        self._fuse = fuse

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._fuse.step(lambda: self._inner.put(key, data))

    def get(self, key: str) -> bytes:
        return self._fuse.step(lambda: self._inner.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._fuse.step(lambda: self._inner.get_range(key, start, length))

    def stat(self, key: str) -> BlobStat | None:
        return self._fuse.step(lambda: self._inner.stat(key))

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:  # a store may stop in the middle
            self._fuse.step(lambda key=key: self._inner.delete([key]))  # type: ignore[misc]

    def list(self, prefix: str) -> Iterator[BlobStat]:
        return iter(self._fuse.step(lambda: list(self._inner.list(prefix))))

    def close(self) -> None:
        return


class CrashingConsensus(ForwardingConsensus):
    """`inner`, used by a process that ends when its fuse says so."""

    def __init__(self, inner: Consensus, fuse: Fuse) -> None:
        super().__init__(inner)
        self._fuse = fuse

    def head(self, key: str) -> Entry | None:
        return self._fuse.step(lambda: self._inner.head(key))

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        return self._fuse.step(lambda: self._inner.compare_and_set(key, seqno, data, after))

    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        return self._fuse.step(lambda: self._inner.begin(key, seqno, data))

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        return self._fuse.step(lambda: self._inner.scan(key, from_seqno, limit))

    def truncate(self, key: str, seqno: int) -> int:
        return self._fuse.step(lambda: self._inner.truncate(key, seqno))

    def keys(self, prefix: str = "", after: str = "", limit: int = 1000, with_ended: bool = True) -> list[str]:
        return self._fuse.step(lambda: self._inner.keys(prefix, after, limit, with_ended))

    def close(self) -> None:
        return
