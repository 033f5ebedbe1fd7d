"""Counting what is under way at once against a limit. What is taken is given back by a `with`, however it ends."""

from __future__ import annotations

import threading

from persist.core.errors import Overloaded

RETRY_AFTER_S = 0.1


class Slots:
    """`taken` of `most` are in use; `what` is what there are too many of. Used from the event loop's thread."""

    def __init__(self, most: int, what: str) -> None:
        self.taken = 0
        self.most = most
        self._what = what

    def take(self, count: int = 1) -> None:
        """Raises Overloaded beyond the limit; then nothing was taken."""
        if self.taken + count > self.most:
            raise Overloaded(f"the server has too {self._what}; slow down", retry_after_s=RETRY_AFTER_S)
        self.taken += count

    def give_back(self, count: int = 1) -> None:
        self.taken -= count

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.give_back()


class SharedSlots(Slots):
    """The same, used from any thread."""

    def __init__(self, most: int, what: str) -> None:
        super().__init__(most, what)
        self._lock = threading.Lock()

    def take(self, count: int = 1) -> None:
        with self._lock:
            super().take(count)

    def give_back(self, count: int = 1) -> None:
        with self._lock:
            super().give_back(count)
