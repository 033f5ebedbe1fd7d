"""What this process has just put: so many sizes, for so long."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable

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
