"""The spans that are asked for, and of which request the work under way is a part.

`persist.telemetry.otel` makes spans with OpenTelemetry, where it is switched on. Without a tracer none is asked for,
and no library of it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Protocol

from blob import optional
from persist.core.errors import InvalidUsage
from persist.core.ids import IdSource

Place = Any
"""Where a span is in its trace, as the tracer knows it: what others are hung below, or linked to."""

TRACEPARENT = "traceparent"
TRACEPARENT_CHARS_MAX = 128


class TraceSpan(Protocol):
    """A span under way."""

    def tell(self, name: str, value: str | int) -> None:
        """Give it an attribute."""
        ...

    def failed(self, kind: str, reason: str) -> None:
        """What it stands for went wrong."""
        ...


class Tracer(Protocol):
    """Makes spans. Thread-safe."""

    def current(self) -> Place | None:
        """The place of the span under way in this thread or task; None: there is none."""
        ...

    def span(
        self,
        name: str,
        attributes: Mapping[str, str | int],
        *,
        kind: str = "internal",
        below: Place | None = None,
        links: Sequence[Place] = (),
    ) -> AbstractContextManager[TraceSpan]:
        """A span for the length of a `with`, during which it is the current one.

        It hangs below the place `below`, else below the current span. `kind`: `client`, `server` or `internal`.
        """
        ...

    def passed(self, name: str, seconds: float, attributes: Mapping[str, str | int], *, failed: str = "") -> None:
        """A span below the current one that has ended just now, and took so long."""
        ...

    def traceparent(self) -> str:
        """The current place as a W3C `traceparent`; "" if there is none."""
        ...

    def place_of(self, traceparent: str) -> Place | None:
        """The place that a caller tells; None: it cannot be read."""
        ...


def open_tracer(service: str = "") -> Tracer:
    """A tracer by OpenTelemetry: of the provider that this program has set, or (`service`) of one of its own.

    Raises InvalidUsage where the library is not installed.
    """
    module: Any = optional("persist.telemetry.otel", "traces", "persist-shards[otel]", InvalidUsage)
    made: Tracer = module.exporting(service) if service else module.OtelTracer()
    return made


# The id of a request goes with the work as a context variable does.


class Request:
    """One request, by whoever asks. It has an id ("": none) once it was given one, or was sent to a server."""

    __slots__ = ("id",)

    def __init__(self, request_id: str = "") -> None:
        self.id = request_id

    def named(self, ids: IdSource) -> str:
        """Its id, which is made now if there is none."""
        if not self.id:
            self.id = ids.uuid7()
        return self.id


_CURRENT: ContextVar[Request | None] = ContextVar("persist_request", default=None)


def request_id() -> str:
    """The id of the request that the work under way is for; "" if there is none."""
    found = _CURRENT.get()
    return "" if found is None else found.id


def begin_request(found: str) -> None:
    """The rest of this task, and what it has done on other threads, is for the request of this id."""
    _CURRENT.set(Request(found))


class Requesting:
    """For the length of a `with`: the request under way, else a new one."""

    __slots__ = ("_token",)

    def __init__(self) -> None:
        self._token: Token[Request | None] | None = None

    def __enter__(self) -> Request:
        found = _CURRENT.get()
        if found is None:
            found = Request()
            self._token = _CURRENT.set(found)
        return found

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._token is not None:
            _CURRENT.reset(self._token)
