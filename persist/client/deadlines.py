"""Deadlines: by when a call has to be answered, whatever it is made of.

A call of a handle with a time-out (`persist.client.timed`) begins a deadline. What it is made of asks here how long it
may still take: commands and their retries, requests to servers, reads and writes of blobs. The deadline goes with the
call as a context variable does, so each call of each thread has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Protocol, TypeVar

from blob import Blob, BlobStat, BlobUnavailable, Unfinished
from blob.forwarding import ForwardingBlob
from blob.interface import SignedPut
from persist.core.errors import Indeterminate, Unavailable

AT_ONCE_MAX = 256  # operations of one transport on threads of their own; those that were given up count until they end
_T = TypeVar("_T")


class Monotonic(Protocol):
    def monotonic(self) -> float: ...


class Deadline:
    """`timeout_s` seconds from when it was made or begun anew, by a clock."""

    def __init__(self, timeout_s: float, clock: Monotonic) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._ends = 0.0
        self.begin()

    def begin(self, more_s: float = 0.0) -> None:
        """Begin anew: for the next piece of work of the same call. This one may take so much longer."""
        self._ends = self._clock.monotonic() + self.timeout_s + more_s

    def left_s(self) -> float:
        """Seconds that are left, 0 once it has passed."""
        return max(0.0, self._ends - self._clock.monotonic())


_CURRENT: ContextVar[Deadline | None] = ContextVar("persist_deadline", default=None)


def current() -> Deadline | None:
    """The deadline of the call under way; None: it has none."""
    return _CURRENT.get()


@contextmanager
def within(deadline: Deadline | None) -> Iterator[None]:
    """What happens in the block has this deadline."""
    token = _CURRENT.set(deadline)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def at_most(seconds: float) -> float:
    """So many seconds, or what is left of the call under way, if that is less."""
    deadline = _CURRENT.get()
    return seconds if deadline is None else min(seconds, deadline.left_s())


def has_passed() -> bool:
    """Whether the call under way has no time left."""
    deadline = _CURRENT.get()
    return deadline is not None and deadline.left_s() <= 0


def check(what: str) -> None:
    """Raise Unavailable if no time is left: `what` is not asked any more, so it did not happen."""
    deadline = _CURRENT.get()
    if deadline is not None and deadline.left_s() <= 0:
        raise Unavailable(
            f"{what} was not begun: the time-out of {deadline.timeout_s:g} s had passed; it did not happen"
        )


class Patience:
    """Operations that cannot be interrupted, for callers who wait for a bounded time. Thread-safe.

    Where the call under way has a deadline, the operation runs on a thread of its own. If it has not ended in time it
    goes on there, and its caller is told so. A thread that hangs with its store does not keep the process alive.
    """

    def __init__(self, at_once_max: int = AT_ONCE_MAX) -> None:
        self._free = threading.BoundedSemaphore(at_once_max)

    def ask(self, what: str, operation: Callable[[], _T], *, safe: bool = True) -> _T:
        """What `operation` returns or raises.

        Raises Unavailable (in time it was not begun, or it is `safe`: it changes nothing that matters), Indeterminate
        (it is not, and had begun).
        """
        deadline = _CURRENT.get()
        if deadline is None:
            return operation()
        check(what)
        if not self._free.acquire(timeout=deadline.left_s()):
            raise Unavailable(f"{what} was not begun within {deadline.timeout_s:g} s: too many before it hang")
        done = threading.Event()
        results: list[_T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(operation())
            except BaseException as error:
                errors.append(error)
            finally:
                self._free.release()
                done.set()

        context = copy_context()
        try:
            threading.Thread(target=context.run, args=(run,), name="persist-timed", daemon=True).start()
        except BaseException:
            self._free.release()
            raise
        if not done.wait(deadline.left_s()):
            said = f"{what} was not answered within {deadline.timeout_s:g} s"
            if safe:
                raise Unavailable(f"{said}; repeat it, or give it more time")
            raise Indeterminate(f"{said}; it may have happened, or may yet: repeat it with its token")
        if errors:
            raise errors[0]
        return results[0]

    def blob(self, store: Blob) -> Blob:
        """The store, as the call under way may use it, also on threads that help it."""
        deadline = _CURRENT.get()
        return store if deadline is None else _TimedBlob(store, self, deadline)


class _TimedBlob(ForwardingBlob):
    """A blob store whose operations end with a deadline. What was put in vain is an orphan, which nothing names."""

    def __init__(self, store: Blob, patience: Patience, deadline: Deadline) -> None:
        super().__init__(store)
        self._patience = patience
        self._deadline = deadline

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._ask(key, lambda: self._inner.put(key, data))

    def get(self, key: str) -> bytes:
        return self._ask(key, lambda: self._inner.get(key))

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._ask(key, lambda: self._inner.get_range(key, start, length))

    def stat(self, key: str) -> BlobStat | None:
        return self._ask(key, lambda: self._inner.stat(key))

    def delete(self, keys: Sequence[str]) -> None:
        self._ask("of several keys", lambda: self._inner.delete(keys))

    def abandon(self, found: Sequence[Unfinished]) -> None:
        self._ask("of several puts", lambda: self._inner.abandon(found))

    def presign_get(self, key: str, expires_s: int) -> str | None:
        return self._ask(key, lambda: self._inner.presign_get(key, expires_s))

    def presign_put(self, key: str, expires_s: int) -> SignedPut | None:
        return self._ask(key, lambda: self._inner.presign_put(key, expires_s))

    def check(self) -> None:
        self._ask("store", self._inner.check)

    def close(self) -> None:
        """Nothing: the store is borrowed."""

    def _ask(self, key: str, operation: Callable[[], _T]) -> _T:
        with within(self._deadline):
            try:
                return self._patience.ask(f"blob {key}", operation)
            except Unavailable as error:
                raise BlobUnavailable(error.message) from error
