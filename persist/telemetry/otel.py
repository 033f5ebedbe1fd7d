"""Spans by OpenTelemetry. Imported only if traces are enabled, because the library is optional."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, NonRecordingSpan, SpanContext, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation import tracecontext

from blob import optional
from persist.core.errors import InvalidUsage

KINDS = {"client": SpanKind.CLIENT, "server": SpanKind.SERVER, "internal": SpanKind.INTERNAL}
TRACEPARENT_CHARS_MAX = 128
REASON_MAX = 500  # characters of an error message in a span
EXTRA = "persist-shards[otel]"
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"


class OtelSpan:
    """An active span."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def tell(self, name: str, value: str | int) -> None:
        self._span.set_attribute(name, value)

    def failed(self, kind: str, reason: str) -> None:
        """Mark the operation of the span as failed."""
        self._span.set_attribute("error.type", kind)
        self._span.set_status(Status(StatusCode.ERROR, reason[:REASON_MAX]))


class OtelTracer:
    """Makes spans. Thread-safe. `provider` None: the global one of the program.

    A SpanContext is the place of a span in its trace, for child spans and links.
    """

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self._provider = provider
        self._tracer = trace.get_tracer("persist", tracer_provider=provider)
        self._propagator = tracecontext.TraceContextTextMapPropagator()

    def current(self) -> SpanContext | None:
        """The place of the active span in this thread or task, or None."""
        return _place_in(None)

    @contextmanager
    def span(
        self,
        name: str,
        attributes: Mapping[str, str | int],
        *,
        kind: str = "internal",
        below: SpanContext | None = None,
        links: Sequence[SpanContext] = (),
    ) -> Iterator[OtelSpan]:
        """A span that is the current one during a `with`: a child of the span at `below`, or of the current span.

        `kind`: `client`, `server` or `internal`.
        """
        context = None if below is None else trace.set_span_in_context(NonRecordingSpan(below))
        with self._tracer.start_as_current_span(
            name,
            context=context,
            kind=KINDS[kind],
            attributes=dict(attributes),
            links=[Link(place) for place in links],
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            yield OtelSpan(span)

    def passed(self, name: str, seconds: float, attributes: Mapping[str, str | int], *, failed: str = "") -> None:
        """Record a child of the current span that has just ended after `seconds`."""
        ended_ns = time.time_ns()
        span = self._tracer.start_span(
            name, kind=SpanKind.CLIENT, attributes=dict(attributes), start_time=ended_ns - int(seconds * 1e9)
        )
        if failed:
            OtelSpan(span).failed(failed, failed)
        span.end(ended_ns)

    def headers(self) -> dict[str, str]:
        """The current place as the header `traceparent` of W3C; none if there is no span."""
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return carrier

    def place_of(self, traceparent: str) -> SpanContext | None:
        """The place in the `traceparent` of a caller, or None if it is not valid."""
        if len(traceparent) > TRACEPARENT_CHARS_MAX:
            return None
        return _place_in(self._propagator.extract({"traceparent": traceparent}))


def _place_in(context: Context | None) -> SpanContext | None:
    """The place of the span in a context (None: the current one), if it is valid."""
    place = trace.get_current_span(context).get_span_context()
    return place if place.is_valid else None


def exporting(service: str) -> OtelTracer:
    """A tracer for a server process: exports spans by OTLP over HTTP, configured by `OTEL_EXPORTER_OTLP_*`.

    A provider that the program has already set, for example by `opentelemetry-instrument`, has precedence. Raises
    InvalidUsage if the exporter is not installed.
    """
    if isinstance(trace.get_tracer_provider(), TracerProvider):
        return OtelTracer()
    exporter: Any = optional(_EXPORTER, "--traces", EXTRA, InvalidUsage)
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(exporter.OTLPSpanExporter()))
    return OtelTracer(provider)
