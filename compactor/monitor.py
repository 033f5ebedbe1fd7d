"""A door for monitors: `/metrics` and `/healthz` of a process that serves nothing else."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from socket import AF_INET6, socket
from typing import Any

from persist.core.errors import InvalidUsage
from persist.formats.exposition import CONTENT_TYPE

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
