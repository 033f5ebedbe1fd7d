"""Opens tracers, and knows the request that the current work belongs to, a context variable."""

from __future__ import annotations

from contextvars import ContextVar, Token
from typing import TYPE_CHECKING, Any, TypeAlias

from blob import optional
from persist.core.errors import InvalidUsage
from persist.core.ids import IdSource

if TYPE_CHECKING:
    from persist.telemetry.otel import OtelSpan, OtelTracer

    TraceSpan: TypeAlias = OtelSpan
    Tracer: TypeAlias = OtelTracer
else:  # OpenTelemetry is optional; without a tracer it is not imported
    TraceSpan = Tracer = Any


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

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _CURRENT.reset(self._token)
