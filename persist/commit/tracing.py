"""What spans are asked for; `persist.commit.otel` makes them with OpenTelemetry, where it is switched on.

Without a tracer nothing of this is called, and no library of it is imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from blob import optional
from persist.core.errors import InvalidUsage

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
    module: Any = optional("persist.commit.otel", "traces", "persist-shards[otel]", InvalidUsage)
    made: Tracer = module.exporting(service) if service else module.OtelTracer()
    return made
