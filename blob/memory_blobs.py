"""Blobs in this process's memory, for tests and examples. Gone when the process ends."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from blob.errors import BlobExists, BlobNotFound, BlobUnavailable
from blob.interface import Blob, BlobStat, check_key, check_prefix, check_range


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


class MemoryBlob(Blob):
    """A dictionary of blobs. `now_ms` stamps them; a simulation passes its own clock."""

    def __init__(self, name: str = "", *, now_ms: Callable[[], int] = _wall_ms) -> None:
        self._name = name
        self._now_ms = now_ms
        self._lock = threading.Lock()
        self._blobs: dict[str, tuple[bytes, int]] = {}
        self._keys: list[str] = []  # ascending, so that a listing costs what it finds

    @property
    def url(self) -> str:
        return f"mem:{self._name}"

    def put(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)
        held = bytes(data)
        with self._lock:
            found = self._blobs.get(key)
            if found is None:
                found = self._blobs[key] = (held, self._now_ms())
                insort(self._keys, key)
        if found[0] != held:
            raise BlobExists(f"blob {key} exists with other bytes; keys are single-use")

    def get(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            found = self._blobs.get(key)
        if found is None:
            raise BlobNotFound(f"no blob {key} in {self.url}")
        return found[0]

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        data = self.get(key)
        if start + length > len(data):
            raise BlobNotFound(f"blob {key} ends at byte {len(data)}, before {start + length}")
        return data[start : start + length]

    def stat(self, key: str) -> BlobStat | None:
        check_key(key)
        with self._lock:
            found = self._blobs.get(key)
        return None if found is None else BlobStat(key, len(found[0]), found[1])

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
        with self._lock:
            for key in keys:
                if self._blobs.pop(key, None) is not None:
                    del self._keys[bisect_left(self._keys, key)]

    def list(self, prefix: str) -> Iterator[BlobStat]:
        check_prefix(prefix)
        with self._lock:
            beyond = map(self._keys.__getitem__, range(bisect_left(self._keys, prefix), len(self._keys)))
            keys = list(takewhile(lambda key: key.startswith(prefix), beyond))
            return iter([BlobStat(key, len(self._blobs[key][0]), self._blobs[key][1]) for key in keys])

    def check(self) -> None:
        if self._blobs is None:
            raise BlobUnavailable("the memory store is closed")

    def close(self) -> None:
        """Keeps the blobs: another holder of the same `mem:name` may still use them."""
