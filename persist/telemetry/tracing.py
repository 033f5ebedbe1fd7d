"""The interface of tracers, and the request that the current work belongs to.

`persist.telemetry.otel` implements it with OpenTelemetry. Without a tracer there are no spans and no such imports. The
id of the request is a context variable.
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
"""The position of a span in its trace, specific to the tracer, for child spans and links."""

TRACEPARENT = "traceparent"
TRACEPARENT_CHARS_MAX = 128


class TraceSpan(Protocol):
    """An active span."""

    def tell(self, name: str, value: str | int) -> None:
        """Set an attribute."""
        ...

    def failed(self, kind: str, reason: str) -> None:
        """Mark the operation of the span as failed."""
        ...


class Tracer(Protocol):
    """Makes spans. Thread-safe."""

    def current(self) -> Place | None:
        """The place of the active span in this thread or task, or None."""
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
        """A span that is the current one during a `with`.

        It is a child of the span at `below`, or of the current span. `kind`: `client`, `server` or `internal`.
        """
        ...

    def passed(self, name: str, seconds: float, attributes: Mapping[str, str | int], *, failed: str = "") -> None:
        """Record a child of the current span that has just ended after `seconds`."""
        ...

    def traceparent(self) -> str:
        """The current place as a W3C `traceparent`; "" if there is none."""
        ...

    def place_of(self, traceparent: str) -> Place | None:
        """The place in the `traceparent` of a caller, or None if it is not valid."""
        ...


def open_tracer(service: str = "") -> Tracer:
    """A tracer by OpenTelemetry: of the provider of this program, or (with `service`) of a provider of its own.

    Raises InvalidUsage if the library is not installed.
    """
    module: Any = optional("persist.telemetry.otel", "traces", "persist-shards[otel]", InvalidUsage)
    tracer: Tracer = module.exporting(service) if service else module.OtelTracer()
    return tracer


class Request:
    """A request of a client. Its id is "" until one is assigned, at the latest when it is sent to a server."""

    __slots__ = ("id",)

    def __init__(self, request_id: str = "") -> None:
        self.id = request_id

    def named(self, ids: IdSource) -> str:
        """Its id, assigned now if there is none."""
        if not self.id:
            self.id = ids.uuid7()
        return self.id


_CURRENT: ContextVar[Request | None] = ContextVar("persist_request", default=None)


def request_id() -> str:
    """The id of the current request; "" if there is none."""
    request = _CURRENT.get()
    return "" if request is None else request.id


def begin_request(new_id: str) -> None:
    """Make the rest of this task, including its work on other threads, part of the request `new_id`."""
    _CURRENT.set(Request(new_id))


class Requesting:
    """Enters the current request, or a new one for the duration of a `with`."""

    __slots__ = ("_token",)

    def __init__(self) -> None:
        self._token: Token[Request | None] | None = None

    def __enter__(self) -> Request:
        request = _CURRENT.get()
        if request is None:
            request = Request()
            self._token = _CURRENT.set(request)
        return request

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._token is not None:
            _CURRENT.reset(self._token)
