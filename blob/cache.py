"""An LRU cache of blob bytes, bounded in bytes, and the sizes of recent puts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from blob.errors import BlobMisconfigured
from blob.interface import Blob, check_range, slice_range
from blob.metrics import ForwardingBlob

# Blobs never change, so no entry is ever stale; only `delete` drops entries. Whole blobs and ranges are separate
# entries, but a range of a cached blob is served from it. Puts do not fill the cache, because the output of a
# compaction is rarely read soon.

ENTRY_OVERHEAD_BYTES = 200  # charged per entry, so that a million tiny ranges count for the memory that they occupy
ENTRY_SHARE_MAX = 4  # an entry larger than the cache divided by this is not cached: one blob must not evict all others

_Slot = tuple[int, int] | None


class CachedBlob(ForwardingBlob):
    """`inner` behind a cache of at most `bytes_max` bytes. `hits` and `misses` count reads."""

    def __init__(self, inner: Blob, bytes_max: int) -> None:
        if bytes_max < 0:
            raise BlobMisconfigured(f"the cache size must be at least 0 bytes, not {bytes_max}")
        super().__init__(inner)
        self.bytes_max = bytes_max
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[str, _Slot], bytes] = OrderedDict()
        self._slots: dict[str, set[_Slot]] = {}
        self.cached_bytes = 0  # charged to the cache, overhead included; never above `bytes_max`
        self.hits = 0
        self.misses = 0

    def wrap(self, around: Callable[[Blob], Blob]) -> None:
        """Send cache misses to `around(inner)`. Call it before the cache is used."""
        self._inner = around(self._inner)

    def get(self, key: str) -> bytes:
        data = self._lookup(key, None)
        if data is None:
            data = self._inner.get(key)
            self._insert(key, None, data)
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        data = self._lookup(key, (start, length))
        if data is None:
            data = self._inner.get_range(key, start, length)
            self._insert(key, (start, length), data)
        return data

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
            self.cached_bytes = 0
        self._inner.close()

    def _lookup(self, key: str, slot: _Slot) -> bytes | None:
        with self._lock:
            exact = self._entries.get((key, slot))
            data = exact if exact is not None else self._entries.get((key, None))
            if data is None:
                self.misses += 1
                return None
            self.hits += 1
            self._entries.move_to_end((key, slot if exact is not None else None))
        if exact is not None or slot is None:
            return data
        start, length = slot
        check_range(start, length)
        return slice_range(key, data, start, length)

    def _insert(self, key: str, slot: _Slot, data: bytes) -> None:
        cost = len(data) + ENTRY_OVERHEAD_BYTES
        if cost > self.bytes_max // ENTRY_SHARE_MAX:
            return
        with self._lock:
            if (key, slot) in self._entries:
                return
            self._entries[(key, slot)] = data
            self._slots.setdefault(key, set()).add(slot)
            self.cached_bytes += cost
            while self.cached_bytes > self.bytes_max:
                self._drop(*next(iter(self._entries)))

    def _drop(self, key: str, slot: _Slot) -> None:
        data = self._entries.pop((key, slot))
        self.cached_bytes -= len(data) + ENTRY_OVERHEAD_BYTES
        slots = self._slots[key]
        slots.discard(slot)
        if not slots:
            del self._slots[key]


RECENT_S = 60.0  # how long a put is remembered: far shorter than the orphan sweep waits for the commit of a blob
RECENT_MAX = 4_096  # puts that are remembered; the oldest is dropped first


class RecentPuts:
    """Sizes, by key, of the blobs that this process has just put. Thread-safe. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._puts: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def add(self, key: str, size: int) -> None:
        """Record a put that the store has acknowledged."""
        with self._lock:
            self._puts[key] = (self._clock(), size)
            self._puts.move_to_end(key)
            while len(self._puts) > RECENT_MAX:
                self._puts.popitem(last=False)

    def forget(self, keys: Iterable[str]) -> None:
        """Drop keys that are about to be deleted."""
        with self._lock:
            for key in keys:
                self._puts.pop(key, None)

    def size(self, key: str) -> int | None:
        """The size of a blob that was put within the last `RECENT_S` seconds, else None."""
        with self._lock:
            at_s, size = self._puts.get(key, (0.0, None))
            return size if size is not None and self._clock() - at_s < RECENT_S else None
