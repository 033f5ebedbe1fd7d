"""The HTTP endpoints `/metrics` and `/healthz` of a maintenance process, and its metrics.

A metric that a server also has has the same name there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from http.server import BaseHTTPRequestHandler
from socket import AF_INET6
from socketserver import ThreadingTCPServer
from typing import Any

import persist
from compactor.loop import Loop
from compactor.metering import Counters, MaintenanceMetrics, ShardFigures
from persist.client.embedded import location_families, location_pools, newest, shard_families
from persist.client.transport import Transport
from persist.commit.location import Location
from persist.core.errors import InvalidUsage
from persist.formats.exposition import CONTENT_TYPE, COUNTER, GAUGE, Family, Labelled, single_series
from persist.telemetry.metrics import of_process, pools

REQUEST_S = 5.0  # the timeout of each read from and write to a client
REQUESTS_MAX = 32  # in parallel; further connections are closed
SHARDS_MAX = 1_000  # shards with series of their own
log = logging.getLogger("persist.maintenance")


class Monitor:
    """Serves requests on a thread of its own until it is closed. `text` renders the body of `/metrics`.

    There is no authentication: bind it to the loopback address or to a monitoring network. Raises InvalidUsage if it
    cannot bind to the address.
    """

    def __init__(self, host: str, port: int, text: Callable[[], bytes]) -> None:
        class Handler(_Handler):
            timeout = REQUEST_S
            metrics_text = staticmethod(text)

        slots, is_v6 = threading.BoundedSemaphore(REQUESTS_MAX), ":" in host

        class Server(ThreadingTCPServer):
            address_family = AF_INET6 if is_v6 else ThreadingTCPServer.address_family
            allow_reuse_address = daemon_threads = True

            def process_request(self, request: Any, client_address: Any) -> None:
                if slots.acquire(blocking=False):
                    super().process_request(request, client_address)
                else:
                    self.shutdown_request(request)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    slots.release()

            def handle_error(self, request: Any, client_address: Any) -> None:
                log.info("a monitor disconnected")

        try:
            self._server = Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise InvalidUsage(
                f"metrics cannot be served at {host}:{port}: {error}; set another --metrics-port"
            ) from error
        url_host = f"[{host}]" if is_v6 else host
        self.url = f"http://{url_host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="persist-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more requests. Active ones end with the process at the latest."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    metrics_text: Callable[[], bytes]
    server_version = "persist"
    sys_version = ""

    def do_GET(self) -> None:  # called by the base class
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._respond(200, "application/json", b'{"status": "ok"}')
        elif path != "/metrics":
            self._respond(404, "text/plain; charset=utf-8", b"the paths are /metrics and /healthz\n")
        else:
            try:
                text = self.metrics_text()
            except Exception:  # a bug: maintenance continues
                log.exception("the metrics cannot be rendered")
                self._respond(500, "text/plain; charset=utf-8", b"the metrics cannot be rendered; see the log\n")
                return
            self._respond(200, CONTENT_TYPE, text)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Logs nothing, because a monitor sends a request every few seconds."""

    def _respond(self, status: int, media_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", media_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def of_maintenance(
    location: Location, loop: Loop, metrics: MaintenanceMetrics, transport: Transport | None = None
) -> Iterator[Family]:
    """All metrics of a process. `transport`: of commits through a server, if there is one."""
    yield from location_families(location)
    if transport is not None:
        by_name = {family.name: family for family in transport.families() if family.name.startswith("persist_client_")}
        yield from by_name.values()
    with metrics.lock:
        counters = asdict(metrics.counters)
        shards = list(metrics.shards.items())[-SHARDS_MAX:]
    for counter in fields(Counters):
        prefix = "persist_" if counter.name.startswith("verify_") else "persist_maintenance_"
        yield single_series(f"{prefix}{counter.name}_total", COUNTER, counter.metadata["text"], counters[counter.name])
    text = "When the last sample was verified, in seconds since 1970 (0: never)"
    yield single_series("persist_verify_timestamp_seconds", GAUGE, text, metrics.verified_ms / 1000)
    yield single_series("persist_maintenance_failures_total", COUNTER, "Visits of shards that failed", loop.failures)
    yield loop.looks.family(
        "persist_maintenance_look_seconds", "Durations of visits of shards, in seconds", ("outcome",)
    )
    text = "When the shards were last listed, in seconds since 1970 (0: never)"
    yield single_series("persist_maintenance_round_timestamp_seconds", GAUGE, text, loop.round_ms / 1000)
    yield single_series(
        "persist_maintenance_shards_waiting", GAUGE, "Shards with an active or scheduled visit", loop.waiting
    )
    yield from pools({**location_pools(location), "maintenance_threads": (loop.running, loop.concurrency)})
    yield from of_process(persist.__version__)
    yield from _of_merges(shards)
    yield from shard_families(location, newest(location.machines(), SHARDS_MAX))


def _of_merges(shards: list[tuple[str, ShardFigures]]) -> Iterator[Family]:
    def family(name: str, kind: str, text: str, value: Callable[[ShardFigures], float]) -> Family:
        series: list[Labelled] = [((shard,), value(figures)) for shard, figures in shards]
        return Family(f"persist_shard_{name}", kind, text, ("shard",), series)

    text = "Bytes of merge inputs that were not written by a merge"
    yield family("ingested_bytes_total", COUNTER, text, lambda figures: figures.ingested)
    yield family("merged_bytes_total", COUNTER, "Bytes written by merges of the shard", lambda figures: figures.written)
    text = "Bytes written by writers and merges per byte written by writers"
    yield family("write_amplification", GAUGE, text, lambda figures: figures.write_amplification)
    text = "Rows per row that full consolidation would leave"
    yield family("space_amplification", GAUGE, text, lambda figures: figures.space_amplification)
