"""Time-outs of handles: a view of a handle, each call of which has a deadline.

The view is the same handle: it shares all that the handle knows, such as writers that it has registered. Its class is
that of the handle with each public method bounded, so a method that is added to a handle is bounded too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from typing import Any, Self, TypeVar

from persist.client.arguments import NUMBER_MAX, checked
from persist.client.deadlines import Deadline, current, within
from persist.core.errors import InvalidUsage, shown

UNBOUNDED = frozenset({"with_timeout", "new_token", "metrics"})  # they ask nobody
INNER = ("_send", "_update_attributes", "_edit")  # what properties and the handles that these give ask by
HANDLES_MAX = 64  # classes of handles
_T = TypeVar("_T")
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
        """The same handle, each call of which ends within so many seconds. So do calls of the handles that it gives.

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
