"""Deadlines of calls, and handles whose calls have one."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import lru_cache, wraps
from typing import Any, Protocol, Self, TypeVar

from blob import Blob, BlobStat, BlobUnavailable, Unfinished
from blob.interface import SignedPut
from blob.metrics import ForwardingBlob
from persist.client.arguments import NUMBER_MAX, checked
from persist.core.errors import Indeterminate, InvalidUsage, Unavailable, shown

# Deadlines: by when a call has to be answered, whatever it is made of.
#
# A call of a handle with a time-out (`persist.client.deadlines`) begins a deadline. What it is made of asks here how
# long it may still take: commands and their retries, requests to servers, reads and writes of blobs. The deadline goes
# with the call as a context variable does, so each call of each thread has its own.


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


# Time-outs of handles: a view of a handle, each call of which has a deadline.
#
# The view is the same handle: it shares all that the handle knows, such as writers that it has registered. Its class is
# that of the handle with each public method bounded, so a method that is added to a handle is bounded too.


UNBOUNDED = frozenset({"with_timeout", "new_token", "metrics"})  # they ask nobody
INNER = ("_send", "_details", "_update_attributes", "_edit")  # what properties and the handles that these give ask by
HANDLES_MAX = 64  # classes of handles
_END = object()


def checked_timeout(value: object) -> float:
    """Raise InvalidUsage unless this is a time-out: seconds, more than none."""
    checked("timeout_s", value, int, float)
    if not isinstance(value, (int, float)) or not 0 < value <= NUMBER_MAX:
        raise InvalidUsage(f"timeout_s is {shown(value)}; it must be a number of seconds, more than 0")
    return float(value)


class Timeable:
    """The base of handles."""

    def with_timeout(self, timeout_s: float) -> Self:
        """A view of this handle whose calls end within `timeout_s` seconds; handles that it returns inherit that.

        A call that is not answered in time raises Unavailable where it did not happen and never will, and
        Indeterminate where it may have happened, or may yet: repeat it with its token. Waiting that a call was asked
        for counts (`wait_s`), but for that of a listener, of which each step may take so much longer than it waits.

        Args:
            timeout_s: seconds, more than 0.
        Raises: InvalidUsage (`timeout_s` is no such number).
        """
        return timed(self, checked_timeout(timeout_s))


def timed(handle: _T, timeout_s: float) -> _T:
    """The handle with this time-out; anything that is no handle as it is."""
    if not isinstance(handle, Timeable):
        return handle
    kind = type(handle)
    view: Any = object.__new__(_bounded_class(kind.__mro__[1] if "_timeout_s" in vars(kind) else kind))
    object.__setattr__(view, "__dict__", vars(handle))
    object.__setattr__(view, "_timeout_s", timeout_s)
    found: _T = view
    return found


@lru_cache(maxsize=HANDLES_MAX)
def _bounded_class(kind: type[Any]) -> type[Any]:
    members: dict[str, Any] = {"__slots__": ("_timeout_s",), "__module__": kind.__module__, "__doc__": kind.__doc__}
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        is_asked = not name.startswith("_") or name in INNER
        if is_asked and name not in UNBOUNDED and inspect.isfunction(method):
            members[name] = _stepped(method) if inspect.isgeneratorfunction(method) else _called(method)
    made = type(kind.__name__, (kind,), members)
    made.__qualname__ = kind.__qualname__
    return made


def _called(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def called(self: Any, *args: Any, **options: Any) -> Any:
        if current() is not None:  # a part of another call, whose deadline counts
            return method(self, *args, **options)
        with within(_deadline(self)):
            found = method(self, *args, **options)
        return timed(found, self._timeout_s)

    return called


def _stepped(method: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Of an iterator each step has the deadline, and what the caller does between two of them takes none of it."""
    signature = inspect.signature(method)
    waits = "timeout_s" in signature.parameters

    @wraps(method)
    def stepped(self: Any, *args: Any, **options: Any) -> Iterator[Any]:
        steps = method(self, *args, **options)
        if current() is not None:
            yield from steps
            return
        waited = signature.bind(self, *args, **options).arguments.get("timeout_s") if waits else 0.0
        more_s = max(0.0, waited) if isinstance(waited, (int, float)) else 0.0
        deadline = _deadline(self)
        try:
            while True:
                deadline.begin(more_s)
                with within(deadline):
                    step = next(steps, _END)
                if step is _END:
                    return
                more_s = 0.0
                yield step
        finally:
            steps.close()  # type: ignore[attr-defined]

    return stepped


def _deadline(handle: Any) -> Deadline:
    transport = getattr(handle, "_transport", None) or handle.transport
    return Deadline(handle._timeout_s, transport.clock)
