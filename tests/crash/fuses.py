"""Stores whose process kills itself with SIGKILL at a named point of its n-th call."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import Self

from blob.interface import Blob, BlobStat
from consensus.interface import Consensus, Entry

POINTS = (
    "put.before",
    "put.after",
    "get.after",
    "set.before",
    "set.after",
    "delete.before",
    "delete.after",
    "truncate.before",
    "truncate.after",
)
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


class FusedBlob(Blob):
    """A blob store whose caller may die before or after a call."""

    def __init__(self, inner: Blob, fuse: Fuse) -> None:
        self._inner = inner
        self._fuse = fuse

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._fuse("put.before")
        self._inner.put(key, data)
        self._fuse("put.after")

    def get(self, key: str) -> bytes:
        found = self._inner.get(key)
        self._fuse("get.after")
        return found

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._inner.get_range(key, start, length)

    def stat(self, key: str) -> BlobStat | None:
        return self._inner.stat(key)

    def delete(self, keys: Sequence[str]) -> None:
        self._fuse("delete.before")
        self._inner.delete(keys)
        self._fuse("delete.after")

    def list(self, prefix: str) -> Iterator[BlobStat]:
        return self._inner.list(prefix)

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


class FusedConsensus(Consensus):
    """A consensus store whose caller may die before or after a call."""

    def __init__(self, inner: Consensus, fuse: Fuse) -> None:
        self._inner = inner
        self._fuse = fuse

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def value_bytes_max(self) -> int:
        return self._inner.value_bytes_max

    def head(self, key: str) -> Entry | None:
        return self._inner.head(key)

    def compare_and_set(self, key: str, seqno: int, data: bytes) -> bool:
        self._fuse("set.before")
        won = self._inner.compare_and_set(key, seqno, data)
        self._fuse("set.after")
        return won

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        return self._inner.scan(key, from_seqno, limit)

    def truncate(self, key: str, seqno: int) -> int:
        self._fuse("truncate.before")
        deleted = self._inner.truncate(key, seqno)
        self._fuse("truncate.after")
        return deleted

    def keys(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[str]:
        return self._inner.keys(prefix, after, limit)

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()

    def subscribe(self, callback: Callable[[str], None]) -> Callable[[], None] | None:
        return self._inner.subscribe(callback)


__all__ = ["NEVER", "POINTS", "Fuse", "FusedBlob", "FusedConsensus"]
