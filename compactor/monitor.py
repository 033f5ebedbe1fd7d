"""A door for monitors: `/metrics` and `/healthz` of a process of maintenance, and what they tell."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from socket import AF_INET6, socket
from typing import Any

import persist
from compactor.loop import Loop
from compactor.metering import MaintenanceMetrics, ShardFigures
from persist.client.location_metrics import newest, of_location, of_shards, own_pools
from persist.client.transport import Transport
from persist.commit.location import Location
from persist.core.errors import InvalidUsage
from persist.formats.exposition import CONTENT_TYPE, COUNTER, GAUGE, Family, Labelled, one
from persist.telemetry.metrics import of_process, pools

REQUEST_S = 5.0  # in which a client sends something, or takes something; who is slower is cut off
REQUESTS_MAX = 32  # at a time; further connections are closed
log = logging.getLogger("persist.maintenance")


class Monitor:
    """Answers on a thread of its own until it is closed. `text` makes what `/metrics` tells.

    There are no tokens: bind it to this machine, or to a network of monitors. Raises InvalidUsage where the address
    cannot be had.
    """

    def __init__(self, host: str, port: int, text: Callable[[], bytes]) -> None:
        class Handler(_Handler):
            timeout = REQUEST_S
            told = staticmethod(text)

        room = threading.BoundedSemaphore(REQUESTS_MAX)

        class Server(ThreadingHTTPServer):
            address_family = AF_INET6 if _is_v6(host) else ThreadingHTTPServer.address_family

            def process_request(self, request: Any, client_address: Any) -> None:
                if room.acquire(blocking=False):
                    super().process_request(request, client_address)
                else:
                    self.shutdown_request(request)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    room.release()

            def handle_error(self, request: Any, client_address: Any) -> None:
                log.info("a monitor went away")

            def server_bind(self) -> None:  # that of the library asks the name service who this is
                self.socket.bind(self.server_address)
                self.server_address = self.socket.getsockname()
                self.server_name, self.server_port = host, self.server_address[1]

        try:
            self._server = Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise InvalidUsage(
                f"metrics cannot be told at {host}:{port}: {error}; give another --metrics-port"
            ) from error
        found: socket = self._server.socket
        shown = f"[{host}]" if _is_v6(host) else host
        self.url = f"http://{shown}:{found.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="persist-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more requests. Those under way end with the process at the latest."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    told: Callable[[], bytes]
    server_version = "persist"
    sys_version = ""

    def do_GET(self) -> None:  # the library finds it by this name
        path = self.path.partition("?")[0]
        if path == "/healthz":
            self._answer(200, "application/json", b'{"status": "ok"}')
        elif path != "/metrics":
            self._answer(404, "text/plain; charset=utf-8", b"there are /metrics and /healthz\n")
        else:
            try:
                text = self.told()
            except Exception:  # a bug: maintenance goes on
                log.exception("the metrics cannot be told")
                self._answer(500, "text/plain; charset=utf-8", b"the metrics cannot be told; the log has the reason\n")
                return
            self._answer(200, CONTENT_TYPE, text)

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Nothing: a monitor asks every few seconds."""

    def _answer(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _is_v6(host: str) -> bool:
    try:
        return ip_address(host).version == 6
    except ValueError:
        return False


# What a process of maintenance tells who watches it; under the names of a server where they mean the same.


SHARDS_MAX = 1_000  # with series of their own
COUNTED = {
    "bytes_read": "Bytes that merges read",
    "bytes_written": "Bytes that merges wrote",
    "merges_applied": "Merges that took the place of their inputs",
    "merges_refused": "Merges refused: an input or the claim was gone",
    "merges_failed": "Merges that a store did not let end; tried again later",
    "merges_resumed": "Merges taken over with what another worker had written",
    "chunks_saved": "Pieces of merges that were saved on the way",
    "crowded_keys": "Keys with more than one row that merges met in shards with unique keys",
    "claims_refused": "Claims that another worker had",
    "gc_runs": "Rounds of garbage collection",
    "gc_blobs_deleted": "Blobs deleted by it",
    "gc_entries_truncated": "Entries of logs deleted by it",
    "gc_rollups_made": "Rollups made by it",
    "gc_failed": "Rounds that failed; tried again later",
    "orphans_found": "Orphans found by the sweep",
    "orphans_deleted": "Orphans deleted by it",
    "orphan_bytes": "Bytes of orphans found",
    "shards_finalised": "Dropped shards of which nothing is left",
    "retention_cuts": "Instants kept for policies of rows",
    "retention_runs": "Truncations by policies of rows",
    "retention_rows": "Rows that went by them, as far as that is known",
    "retention_overran": "Truncations that passed a consumer",
    "retention_failed": "Runs of policies that failed; tried again later",
}
VERIFIED = {
    "verify_runs": "Samples that were verified",
    "verify_findings": "Faults that were found in samples",
    "verify_bytes": "Bytes that were read for samples",
}


def of_maintenance(
    location: Location, loop: Loop, metrics: MaintenanceMetrics, transport: Transport | None = None
) -> Iterator[Family]:
    """All of one process. `transport`: by which it commits through a server, if it does."""
    yield from of_location(location)
    if transport is not None:
        named = {family.name: family for family in transport.families() if family.name.startswith("persist_client_")}
        yield from named.values()
    with metrics.lock:
        counters = {field.name: getattr(metrics.counters, field.name) for field in fields(metrics.counters)}
        shards = [(name, figures) for name, figures in metrics.shards.items()][-SHARDS_MAX:]
    for name, text in COUNTED.items():
        yield one(f"persist_maintenance_{name}_total", COUNTER, text, counters[name])
    for name, text in VERIFIED.items():
        yield one(f"persist_{name}_total", COUNTER, text, counters[name])
    text = "When the last sample was verified, in seconds since 1970 (0: none was)"
    yield one("persist_verify_timestamp_seconds", GAUGE, text, metrics.verified_ms / 1000)
    yield one("persist_maintenance_failures_total", COUNTER, "Looks at a shard that failed", loop.failures)
    yield loop.looks.family("persist_maintenance_look_seconds", "Seconds that a look at a shard took", ("outcome",))
    text = "When the shards were listed last, in seconds since 1970 (0: never)"
    yield one("persist_maintenance_round_timestamp_seconds", GAUGE, text, loop.round_ms / 1000)
    yield one("persist_maintenance_shards_waiting", GAUGE, "Shards that are looked at now or later", loop.waiting)
    yield from pools({**own_pools(location), "maintenance_threads": (loop.running, loop.concurrency)})
    yield from of_process(persist.__version__)
    yield from _of_merges(shards)
    yield from of_shards(location, newest(location.machines(), SHARDS_MAX))


def _of_merges(shards: list[tuple[str, ShardFigures]]) -> Iterator[Family]:
    ingested: list[Labelled] = [((name,), figures.ingested) for name, figures in shards]
    written: list[Labelled] = [((name,), figures.written) for name, figures in shards]
    amplified: list[Labelled] = [((name,), figures.write_amplification) for name, figures in shards]
    kept: list[Labelled] = [((name,), figures.space_amplification) for name, figures in shards]
    labels = ("shard",)
    yield Family(
        "persist_shard_ingested_bytes_total", COUNTER, "Bytes of inputs that no merge had written", labels, ingested
    )
    yield Family("persist_shard_merged_bytes_total", COUNTER, "Bytes that merges of the shard wrote", labels, written)
    text = "Bytes written, by writers and by merges, for each byte of writers"
    yield Family("persist_shard_write_amplification", GAUGE, text, labels, amplified)
    text = "Rows kept for each row that full consolidation would leave"
    yield Family("persist_shard_space_amplification", GAUGE, text, labels, kept)
