"""Deadlines of calls, and handles with a time-out for each call."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import lru_cache, partial, partialmethod, wraps
from typing import Any, Self, TypeVar

from blob import Blob, BlobUnavailable
from blob.metrics import ForwardingBlob
from persist.client.arguments import NUMBER_MAX, checked
from persist.commit.clocks_and_ids import Clock
from persist.core.errors import Indeterminate, InvalidUsage, Unavailable, shown

# Deadlines: the time by which a call must be answered, whatever steps it consists of.
#
# A call of a handle with a time-out starts a deadline. Its steps ask here how much time is left: commands and their
# retries, requests to servers, reads and writes of blobs. The deadline is a context variable, so each call of each
# thread has its own.

AT_ONCE_MAX = 256  # operations of one transport on own threads; abandoned ones count until they end
_T = TypeVar("_T")


class Deadline:
    """`timeout_s` seconds by a clock, from its creation or its last `begin`."""

    def __init__(self, timeout_s: float, clock: Clock) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._ends = 0.0
        self.begin()

    def begin(self, more_s: float = 0.0) -> None:
        """Restart it for the next step of the same call, which may take `more_s` longer."""
        self._ends = self._clock.monotonic() + self.timeout_s + more_s

    def left_s(self) -> float:
        """The seconds left, 0 once it has passed."""
        return max(0.0, self._ends - self._clock.monotonic())


_CURRENT: ContextVar[Deadline | None] = ContextVar("persist_deadline", default=None)


def current() -> Deadline | None:
    """The deadline of the current call; None: it has none."""
    return _CURRENT.get()


@contextmanager
def within(deadline: Deadline | None) -> Iterator[None]:
    """The block runs with this deadline."""
    token = _CURRENT.set(deadline)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def at_most(seconds: float) -> float:
    """`seconds`, or the time left for the current call if that is less."""
    deadline = _CURRENT.get()
    return seconds if deadline is None else min(seconds, deadline.left_s())


def has_passed() -> bool:
    """Whether the current call has no time left."""
    deadline = _CURRENT.get()
    return deadline is not None and deadline.left_s() <= 0


def check(what: str) -> None:
    """Raise Unavailable if no time is left: `what` is not started, so it did not happen."""
    deadline = _CURRENT.get()
    if deadline is not None and deadline.left_s() <= 0:
        raise Unavailable(
            f"{what} was not begun: the time-out of {deadline.timeout_s:g} s had passed; it did not happen"
        )


class Patience:
    """Runs operations that cannot be interrupted for callers with a deadline. Thread-safe.

    If the current call has a deadline, the operation runs on its own thread. If it does not end in time, it continues
    there and its caller gets an error. A thread that hangs with its store does not keep the process alive.
    """

    def __init__(self, at_once_max: int = AT_ONCE_MAX) -> None:
        self._free = threading.BoundedSemaphore(at_once_max)

    def ask(self, what: str, operation: Callable[[], _T], *, safe: bool = True) -> _T:
        """What `operation` returns or raises.

        Raises Unavailable (it did not start in time, or it is `safe`: it changes nothing that matters), Indeterminate
        (it is not safe, and has started).
        """
        deadline = _CURRENT.get()
        if deadline is None:
            return operation()
        check(what)
        if not self._free.acquire(timeout=deadline.left_s()):
            raise Unavailable(f"{what} was not begun within {deadline.timeout_s:g} s: too many earlier calls hang")
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
            late = f"{what} was not answered within {deadline.timeout_s:g} s"
            if safe:
                raise Unavailable(f"{late}; repeat it, or give it more time")
            raise Indeterminate(f"{late}; it may have happened, or may yet: repeat it with its token")
        if errors:
            raise errors[0]
        return results[0]

    def blob(self, store: Blob) -> Blob:
        """The store bounded by the deadline of the current call, also on threads that help the call."""
        deadline = _CURRENT.get()
        return store if deadline is None else _TimedBlob(store, self, deadline)


class _TimedBlob(ForwardingBlob):
    """A blob store whose operations end with a deadline. A put that is abandoned leaves an orphan."""

    def __init__(self, store: Blob, patience: Patience, deadline: Deadline) -> None:
        super().__init__(store)
        self._patience = patience
        self._deadline = deadline

    def close(self) -> None:
        """Nothing: the store is borrowed."""

    def _ask(self, verb: str, *args: Any) -> Any:
        what = f"{verb} of blob {args[0]}" if args and isinstance(args[0], str) else f"{verb} of a blob store"
        with within(self._deadline):
            try:
                return self._patience.ask(what, partial(getattr(self._inner, verb), *args))
            except Unavailable as error:
                raise BlobUnavailable(error.message) from error


for _verb in ("put", "get", "get_range", "stat", "delete", "abandon", "presign_get", "presign_put", "check"):
    setattr(_TimedBlob, _verb, partialmethod(_TimedBlob._ask, _verb))


# Time-outs of handles: a view of a handle gives each call a deadline.
#
# The view shares the state of the handle, such as the writers that it has registered. Its class is that of the handle
# with each public method bounded, so methods that are added to a handle are bounded too.

UNBOUNDED = frozenset({"with_timeout", "new_token", "metrics"})  # they call no store
INNER = ("_send", "_details", "_update_attributes", "_edit")  # private methods that properties and derived handles call
HANDLES_MAX = 64  # classes of handles
_END = object()


def checked_timeout(value: object) -> float:
    """Convert a time-out to float. Raises InvalidUsage unless it is a positive number of seconds."""
    checked("timeout_s", value, int, float)
    if not isinstance(value, (int, float)) or not 0 < value <= NUMBER_MAX:
        raise InvalidUsage(f"timeout_s is {shown(value)}; it must be a number of seconds, more than 0")
    return float(value)


class Timeable:
    """The base of handles."""

    def with_timeout(self, timeout_s: float) -> Self:
        """The same handle with a time-out for each call, and for the calls of the handles that it returns.

        A call that is not answered within `timeout_s` seconds raises Unavailable if it did not and will not happen, and
        Indeterminate if it may have happened, or may yet: repeat it with its token. A wait that the call asks for
        (`wait_s`) counts, except that of a listener: each of its steps may take the time-out plus its own wait. Raises
        InvalidUsage (`timeout_s` is not a positive number).
        """
        return timed(self, checked_timeout(timeout_s))


def timed(handle: _T, timeout_s: float) -> _T:
    """The handle with this time-out; any other object unchanged."""
    if not isinstance(handle, Timeable):
        return handle
    kind = type(handle)
    view: Any = object.__new__(_bounded_class(kind.__mro__[1] if "_timeout_s" in vars(kind) else kind))
    object.__setattr__(view, "__dict__", vars(handle))
    object.__setattr__(view, "_timeout_s", timeout_s)
    bounded: _T = view
    return bounded


@lru_cache(maxsize=HANDLES_MAX)
def _bounded_class(kind: type[Any]) -> type[Any]:
    members: dict[str, Any] = {"__slots__": ("_timeout_s",), "__module__": kind.__module__, "__doc__": kind.__doc__}
    for name in dir(kind):
        method = inspect.getattr_static(kind, name)
        is_call = not name.startswith("_") or name in INNER
        if is_call and name not in UNBOUNDED and inspect.isfunction(method):
            members[name] = _bounded_iterator(method) if inspect.isgeneratorfunction(method) else _bounded_call(method)
    bounded = type(kind.__name__, (kind,), members)
    bounded.__qualname__ = kind.__qualname__
    return bounded


def _bounded_call(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if current() is not None:  # a step of another call, whose deadline applies
            return method(self, *args, **options)
        with within(_deadline(self)):
            result = method(self, *args, **options)
        return timed(result, self._timeout_s)

    return call


def _bounded_iterator(method: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """Each step of the iterator has the deadline; the caller's time between two steps does not count."""
    signature = inspect.signature(method)
    waits = "timeout_s" in signature.parameters

    @wraps(method)
    def iterate(self: Any, *args: Any, **options: Any) -> Iterator[Any]:
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

    return iterate


def _deadline(handle: Any) -> Deadline:
    return Deadline(handle._timeout_s, (getattr(handle, "_transport", None) or handle.transport).clock)
