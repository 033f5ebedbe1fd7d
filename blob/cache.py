"""An LRU cache of blob bytes, bounded in bytes, and the sizes of recent puts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from blob.errors import BlobMisconfigured, BlobNotFound
from blob.interface import Blob, check_range
from blob.metrics import ForwardingBlob

# An LRU cache of blob bytes, bounded in bytes and shared by threads.
#
# Blobs never change, so nothing is ever stale; only `delete` drops what it deletes. Whole blobs and ranges are kept
# apart, but a range of a cached blob is served from it. Puts do not fill the cache: what a compaction writes is rarely
# read again at once.


ENTRY_OVERHEAD_BYTES = 200
"""What an entry is charged beyond its bytes, so that a million tiny ranges count as what they occupy."""

ENTRY_SHARE_MAX = 4
"""Bytes larger than the cache divided by this are passed through: one blob must not evict all others."""

_Slot = tuple[int, int] | None


class CachedBlob(ForwardingBlob):
    """`inner` behind a cache of at most `bytes_max` bytes. `hits` and `misses` count reads."""

    def __init__(self, inner: Blob, bytes_max: int) -> None:
        if bytes_max < 0:
            raise BlobMisconfigured(f"the cache size must be at least 0 bytes, not {bytes_max}")
        super().__init__(inner)
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, _Slot], bytes] = OrderedDict()
        self._slots: dict[str, set[_Slot]] = {}
        self._bytes = 0
        self.hits = 0
        self.misses = 0

    @property
    def bytes_max(self) -> int:
        return self._bytes_max

    def wrap(self, around: Callable[[Blob], Blob]) -> None:
        """Have what the cache does not answer asked of `around(inner)`. Call it before the cache is used."""
        self._inner = around(self._inner)

    @property
    def cached_bytes(self) -> int:
        """Bytes now charged to the cache, overhead included; never above `bytes_max`."""
        return self._bytes

    def get(self, key: str) -> bytes:
        found = self._find(key, None)
        if found is None:
            found = self._inner.get(key)
            self._keep(key, None, found)
        return found

    def get_range(self, key: str, start: int, length: int) -> bytes:
        found = self._find(key, (start, length))
        if found is None:
            found = self._inner.get_range(key, start, length)
            self._keep(key, (start, length), found)
        return found

    def delete(self, keys: Sequence[str]) -> None:
        try:
            self._inner.delete(keys)
        finally:
            with self._lock:
                for key in keys:
                    for slot in list(self._slots.get(key, ())):
                        self._drop(key, slot)

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
            self._slots.clear()
            self._bytes = 0
        self._inner.close()

    def _find(self, key: str, slot: _Slot) -> bytes | None:
        with self._lock:
            exact = self._entries.get((key, slot))
            found = exact if exact is not None else self._entries.get((key, None))
            if found is None:
                self.misses += 1
                return None
            self.hits += 1
            self._entries.move_to_end((key, slot if exact is not None else None))
        if exact is not None or slot is None:
            return found
        start, length = slot
        check_range(start, length)
        if start + length > len(found):
            raise BlobNotFound(f"blob {key} ends at byte {len(found)}, before {start + length}")
        return found[start : start + length]

    def _keep(self, key: str, slot: _Slot, data: bytes) -> None:
        cost = len(data) + ENTRY_OVERHEAD_BYTES
        if cost > self._bytes_max // ENTRY_SHARE_MAX:
            return
        with self._lock:
            if (key, slot) in self._entries:
                return
            self._entries[(key, slot)] = data
            self._slots.setdefault(key, set()).add(slot)
            self._bytes += cost
            while self._bytes > self._bytes_max:
                self._drop(*next(iter(self._entries)))

    def _drop(self, key: str, slot: _Slot) -> None:
        data = self._entries.pop((key, slot))
        self._bytes -= len(data) + ENTRY_OVERHEAD_BYTES
        slots = self._slots[key]
        slots.discard(slot)
        if not slots:
            del self._slots[key]


# What this process has just put: so many sizes, for so long.


RECENT_S = 60.0
"""How long a put counts: far less than any sweep lets a blob wait for its commit."""

RECENT_MAX = 4_096
"""Puts that are remembered; the oldest one makes room."""


class RecentPuts:
    """Sizes of blobs by key. Thread-safe. `clock` counts seconds from anywhere, and never goes back."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._puts: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def add(self, key: str, size: int) -> None:
        """The store has said that it has these bytes."""
        with self._lock:
            self._puts[key] = (self._clock(), size)
            self._puts.move_to_end(key)
            while len(self._puts) > RECENT_MAX:
                self._puts.popitem(last=False)

    def forget(self, keys: Iterable[str]) -> None:
        """They are about to be deleted."""
        with self._lock:
            for key in keys:
                self._puts.pop(key, None)

    def size(self, key: str) -> int | None:
        """The bytes of a blob that was put within the last `RECENT_S` seconds; None: of no such one."""
        with self._lock:
            at_s, size = self._puts.get(key, (0.0, None))
            return size if size is not None and self._clock() - at_s < RECENT_S else None
