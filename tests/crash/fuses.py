"""Stores whose process kills itself with SIGKILL the n-th time that it comes to a named point."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Self

from blob.interface import Blob
from blob.metrics import ForwardingBlob
from consensus.interface import Consensus
from consensus.metrics import ForwardingConsensus

NEVER = "none:0"


class Fuse:
    """Kills this process at the `calls`-th time that `point` is reached."""

    def __init__(self, point: str, calls: int) -> None:
        self._point = point
        self._left = calls

    @classmethod
    def of(cls, text: str) -> Self:
        """From `point:calls`."""
        point, _, calls = text.partition(":")
        return cls(point, int(calls))

    def __call__(self, point: str) -> None:
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class FusedBlob(ForwardingBlob):
    """A blob store whose caller may die before or after a call."""

    def __init__(self, inner: Blob, fuse: Fuse) -> None:
        super().__init__(inner)
        self._fuse = fuse

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._fuse("put.before")
        self._inner.put(key, data)
        self._fuse("put.after")

    def get(self, key: str) -> bytes:
        found = self._inner.get(key)
        self._fuse("get.after")
        return found

    def delete(self, keys: Sequence[str]) -> None:
        self._fuse("delete.before")
        self._inner.delete(keys)
        self._fuse("delete.after")


class FusedConsensus(ForwardingConsensus):
    """A consensus store whose caller may die before or after a call."""

    def __init__(self, inner: Consensus, fuse: Fuse) -> None:
        super().__init__(inner)
        self._fuse = fuse

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        self._fuse("set.before")
        won = self._inner.compare_and_set(key, seqno, data, after)
        self._fuse("set.after")
        return won

    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        self._fuse("set.before")
        won = self._inner.begin(key, seqno, data)
        self._fuse("set.after")
        return won

    def truncate(self, key: str, seqno: int) -> int:
        self._fuse("truncate.before")
        deleted = self._inner.truncate(key, seqno)
        self._fuse("truncate.after")
        return deleted


__all__ = ["NEVER", "Fuse", "FusedBlob", "FusedConsensus"]
