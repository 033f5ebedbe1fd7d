"""Blobs in this process's memory, for tests and examples. Gone when the process ends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

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

    @property
    def url(self) -> str:
        return f"mem:{self._name}"

    def put(self, key: str, data: bytes | memoryview) -> None:
        check_key(key)
        held = bytes(data)
        with self._lock:
            found = self._blobs.setdefault(key, (held, self._now_ms()))
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
                self._blobs.pop(key, None)

    def list(self, prefix: str) -> Iterator[BlobStat]:
        check_prefix(prefix)
        with self._lock:
            found = [BlobStat(k, len(d), ms) for k, (d, ms) in self._blobs.items() if k.startswith(prefix)]
        return iter(sorted(found, key=lambda stat: stat.key))

    def check(self) -> None:
        if self._blobs is None:
            raise BlobUnavailable("the memory store is closed")

    def close(self) -> None:
        """Keeps the blobs: another holder of the same `mem:name` may still use them."""
