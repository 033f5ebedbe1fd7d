"""Traces: from the client through the server and the commit to the stores, in one trace."""

from __future__ import annotations

import importlib.util
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from starlette.testclient import TestClient

import persist
from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist import Antichain, Connection, LocationSettings
from persist.commit.location import Location
from persist.core import commands as c
from persist.telemetry.otel import OtelTracer, exporting
from persist.telemetry.tracing import Tracer
from rpc.app import create_app
from tests.support.embedded import client_of
from tests.support.location import EAGER, InlineBackground
from tests.support.served import Served
from tests.support.waiting import WAIT_S, wait_until

SCHEMA = pa.schema([("id", pa.int64())])
FIELDS = {"fields": [{"name": "id", "type": "int64", "key": True}]}
NDJSON = {"content-type": "application/x-ndjson"}
GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Traced:
    """A tracer whose spans stay in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer: Tracer = OtelTracer(provider)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    def named(self, start: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name.startswith(start)]

    def location(self, consensus: MemoryConsensus | None = None) -> Location:
        settings = LocationSettings(EAGER, tracer=self.tracer)
        log = consensus or MemoryConsensus("mem:")
        return Location(MemoryBlob("mem:"), log, settings=settings, background=InlineBackground())


@pytest.fixture
def traced() -> Traced:
    return Traced()


def told(span: ReadableSpan, name: str) -> Any:
    return (span.attributes or {})[name]


def path(spans: Sequence[ReadableSpan], span: ReadableSpan) -> list[str]:
    """The names of the spans from the root down to this one."""
    by_id = {one.context.span_id: one for one in spans if one.context is not None}
    above = by_id.get(span.parent.span_id) if span.parent is not None else None
    return [*([] if above is None else path(spans, above)), span.name]


def test_one_trace_goes_from_the_client_to_the_stores(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persist.http_client.http_calls.open_tracer", lambda: traced.tracer)
    with (
        closing(traced.location()) as location,
        Served(location) as served,
        persist.connect(served.url, traces=True) as client,
    ):
        shard = client.create_shard("orders", SCHEMA, key=["id"])
        shard.insert([{"id": 0}])
        traced.exporter.clear()
        shard.insert([{"id": 1}])
    (commit,) = traced.named("persist.commit")
    assert path(traced.spans, commit) == ["persist.client POST", "persist.server", "persist.commit"]
    assert told(commit, "persist.shard") == "orders"
    assert (told(commit, "persist.commands"), told(commit, "persist.outcome")) == (1, "committed")
    (write,) = traced.named("persist.consensus.compare_and_set")
    assert path(traced.spans, write)[-2:] == ["persist.commit", "persist.consensus.compare_and_set"]
    assert told(write, "persist.outcome") == "ok"
    traces = {span.context.trace_id for span in traced.spans if span.context is not None}
    assert len(traces) == 1
    (server,) = traced.named("persist.server")
    (asking,) = traced.named("persist.client")
    assert told(server, "persist.request_id") == told(asking, "persist.request_id"), "the logs have the same id"
    assert (told(server, "persist.verb"), told(server, "http.response.status_code")) == ("commands", 200)


def test_a_commit_is_linked_to_the_spans_of_all_commands_of_its_group(traced: Traced) -> None:
    class Held(MemoryConsensus):
        """Its next compare-and-set waits until it is let go."""

        def __init__(self) -> None:
            super().__init__("mem:")
            self.free = threading.Event()
            self.free.set()

        def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
            assert self.free.wait(WAIT_S)
            return super().compare_and_set(key, seqno, data, after)

    log = Held()
    with closing(traced.location(log)) as location:
        client_of(location).create_shard("orders", SCHEMA, key=["id"])
        machine = location.machine("orders")
        log.free.clear()

        def ask(number: int) -> None:
            with traced.tracer.span(f"asker {number}", {}):
                machine.apply(c.AdvanceUpper(Antichain(number)))

        threads = [threading.Thread(target=ask, args=(number,)) for number in (1, 2, 3)]
        for count, thread in enumerate(threads, 1):
            thread.start()
            wait_until(lambda count=count: machine.queued == count, "it is queued")  # type: ignore[misc]
        log.free.set()
        for thread in threads:
            thread.join(WAIT_S)
    askers = {span.name: span.context for span in traced.named("asker")}
    linked = [
        {name for name, place in askers.items() if place is not None and place.span_id in ids}
        for commit in traced.named("persist.commit")
        if (ids := {link.context.span_id for link in commit.links})
    ]
    assert linked == [{"asker 1"}, {"asker 2", "asker 3"}]
    group = next(span for span in traced.named("persist.commit") if len(span.links) == 2)
    assert told(group, "persist.commands") == 2
    first = askers["asker 2"]
    assert group.parent.span_id == first.span_id, "it is a part of the trace of the first one"


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [(GIVEN, True), ("00-0-0-01", False), ("x" * 10_000, False), ("", False), (GIVEN.replace("-0af7", "-zzzz"), False)],
)
def test_a_servers_span_hangs_below_the_traceparent_of_its_caller(traced: Traced, given: str, is_taken: bool) -> None:
    with closing(traced.location()) as location, TestClient(create_app(location), base_url="http://127.0.0.1") as http:
        assert http.put("/v1/shards/orders", json=FIELDS, headers={"traceparent": given}).status_code == 200
    (server,) = traced.named("persist.server")
    assert (server.parent is not None) is is_taken
    if server.parent is not None:
        assert f"{server.parent.trace_id:032x}" == GIVEN.split("-")[1]


def test_what_fails_says_so_and_what_is_refused_does_not(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    with closing(traced.location()) as location:
        app = create_app(location)
        with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as http:
            assert http.get("/v1/shards/nope").status_code == 404
            monkeypatch.setattr(location, "names", broken)
            assert http.get("/v1/shards").status_code == 500
            assert http.get("/healthz").status_code == 200, "probes have no spans"
    refused, failed = traced.named("persist.server")
    assert (refused.status.status_code, failed.status.status_code) == (StatusCode.UNSET, StatusCode.ERROR)
    assert told(failed, "error.type") == "persist_error"


def test_reads_of_parts_hang_below_the_request_that_needs_them(traced: Traced) -> None:
    rows = "\n".join(f'{{"id": {number}}}' for number in range(50_000))
    with closing(traced.location()) as location, TestClient(create_app(location), base_url="http://127.0.0.1") as http:
        http.put("/v1/shards/orders", json=FIELDS)
        assert http.post("/v1/shards/orders/insert", content=rows, headers=NDJSON).status_code == 200
        traced.exporter.clear()
        assert http.get("/v1/shards/orders/snapshot").status_code == 200
    reads = traced.named("persist.blob.get")
    assert reads
    assert all(path(traced.spans, span)[0] == "persist.server" for span in reads)


def test_upkeep_has_a_span_with_the_calls_that_it_makes(traced: Traced) -> None:
    with closing(traced.location()) as location:
        shard = client_of(location).create_shard("orders", SCHEMA, key=["id"])
        for number in range(40):
            shard.insert([{"id": number}])
    duties = traced.named("persist.upkeep")
    assert {told(span, "persist.duty") for span in duties} >= {"rollup"}
    ids = {span.context.span_id for span in duties if span.context is not None}
    assert any(span.parent is not None and span.parent.span_id in ids for span in traced.named("persist.blob.put"))


def test_a_server_exports_by_otlp_unless_the_program_has_a_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = InMemorySpanExporter()
    module = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, module, SimpleNamespace(OTLPSpanExporter=lambda: memory))  # type: ignore[arg-type]
    tracer = exporting("persist")
    with tracer.span("one", {}):
        pass
    provider: Any = tracer._provider
    provider.shutdown()
    (span,) = memory.get_finished_spans()
    assert (span.name, span.resource.attributes["service.name"]) == ("one", "persist")


@pytest.mark.skipif(
    importlib.util.find_spec("opentelemetry.exporter") is not None, reason="the exporter is installed here"
)
@pytest.mark.smoke
@pytest.mark.proof
def test_a_server_without_the_exporter_says_what_to_install(tmp_path: Any) -> None:
    command = [sys.executable, "-m", "rpc.cli", "serve", "--dir", str(tmp_path / "d"), "--port", "0", "--traces"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert 'pip install "persist-shards[otel]"' in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_connection_with_traces_can_be_sent_to_another_process() -> None:
    connection = pickle.loads(pickle.dumps(Connection("http://127.0.0.1:1", traces=True)))
    assert connection.traces
