"""What a request may decode to: bodies are bounded by what comes out of them, not by what came in."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Protocol

from persist.core.errors import InvalidUsage

SMALL_BYTES = 256 * 1024  # of each request that are not counted in the sum: large ones never keep small ones out
LARGE_BYTES = 4 * 1024 * 1024  # of a request, after which what it took goes back to the system


class BodyTooLarge(InvalidUsage):
    """Details: `bytes_max`."""

    kind = "body_too_large"


class SharedBytes(Protocol):
    """What counts the bytes of all requests together. Thread-safe."""

    def take(self, count: int) -> None:
        """Raises Overloaded beyond the limit; then nothing was taken."""

    def give_back(self, count: int) -> None: ...


class Allowance:
    """The bytes that the rows of one request take, counted against those of all. Give them back with a `with`.

    One thread uses it at a time. Made of nothing it has no bound, for rows of one's own.
    """

    def __init__(self, total: SharedBytes | None = None, most: int | None = None) -> None:
        self._total = total
        self._most = most
        self.spent = 0
        self._shared = 0

    def spend(self, count: int) -> None:
        """Count bytes, before memory is taken for them. Raises BodyTooLarge, or Overloaded; then none were counted."""
        if self._most is not None and self.spent + count > self._most:
            raise BodyTooLarge(
                f"the rows of the body take more than {self._most} bytes once they are decoded; send fewer at once",
                bytes_max=self._most,
            )
        self._share(self.spent + count)
        self.spent += count

    @property
    def left(self) -> int | None:
        """How many bytes may still be counted; None: there is no bound."""
        return None if self._most is None else self._most - self.spent

    def reach(self, count: int) -> None:
        """Count so many bytes in all, as far as they were not counted before."""
        if count > self.spent:
            self.spend(count - self.spent)

    def release(self) -> None:
        if self.spent > LARGE_BYTES:
            _trim()
        if self._shared and self._total is not None:
            self._total.give_back(self._shared)
        self.spent = self._shared = 0

    def _share(self, spent: int) -> None:
        """Count in the sum what is beyond the bytes of a small request."""
        more = max(0, spent - SMALL_BYTES) - self._shared
        if more > 0 and self._total is not None:
            self._total.take(more)
            self._shared += more

    def __enter__(self) -> Allowance:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _trim() -> None:
    """Give small pieces of memory that were freed back to the system: JSON leaves 50 MiB of them with a thread.

    Large pieces go back by themselves, as the server sees to.
    """
    with contextlib.suppress(OSError, AttributeError):  # only the GNU C library has it
        ctypes.CDLL(None).malloc_trim(0)
