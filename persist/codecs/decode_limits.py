"""Limits on what a request may decode to: bodies are bounded by their decoded size, not by their encoded size."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Protocol

from persist.core.errors import InvalidUsage

SMALL_BYTES = 256 * 1024  # of each request that do not count in the total: large requests never block small ones
LARGE_BYTES = 4 * 1024 * 1024  # of a request, after which freed memory is returned to the system


class BodyTooLarge(InvalidUsage):
    """Details: `bytes_max`."""

    kind = "body_too_large"


class SharedBytes(Protocol):
    """Counts the bytes of all requests together. Thread-safe."""

    def take(self, count: int) -> None:
        """Raises Overloaded beyond the limit; nothing is counted then."""

    def give_back(self, count: int) -> None: ...


class Allowance:
    """The bytes that the rows of one request take, counted in the total of all requests until the `with` block ends.

    Not thread-safe. Without arguments it is unlimited, for trusted rows.
    """

    def __init__(self, total: SharedBytes | None = None, most: int | None = None) -> None:
        self._total = total
        self._most = most
        self.spent = 0
        self._shared = 0

    def spend(self, count: int) -> None:
        """Count bytes before they are allocated. Raises BodyTooLarge or Overloaded; nothing is counted then."""
        if self._most is not None and self.spent + count > self._most:
            raise BodyTooLarge(
                f"the rows of the body take more than {self._most} bytes when they are decoded; send fewer at once",
                bytes_max=self._most,
            )
        more = max(0, self.spent + count - SMALL_BYTES) - self._shared
        if more > 0 and self._total is not None:
            self._total.take(more)
            self._shared += more
        self.spent += count

    @property
    def left(self) -> int | None:
        """How many bytes may still be counted; None: unlimited."""
        return None if self._most is None else self._most - self.spent

    def reach(self, count: int) -> None:
        """Raise the count to `count` bytes in all."""
        if count > self.spent:
            self.spend(count - self.spent)

    def release(self) -> None:
        if self.spent > LARGE_BYTES:
            # Return small freed allocations to the system: decoding JSON leaves 50 MiB in the arena of a thread.
            with contextlib.suppress(OSError, AttributeError):  # only the GNU C library has it
                ctypes.CDLL(None).malloc_trim(0)
        if self._shared and self._total is not None:
            self._total.give_back(self._shared)
        self.spent = self._shared = 0

    def __enter__(self) -> Allowance:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
