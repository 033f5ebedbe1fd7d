"""Running the app: sockets, uvicorn, a shutdown that answers what was accepted."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import uvicorn

from persist.commit.location import Location
from persist.core.errors import InvalidUsage
from rpc.app import create_app
from rpc.app_state import Service
from rpc.connection_limits import ConnectionBounds
from rpc.http_protocol import JoiningProtocol
from rpc.settings import ServerSettings
from rpc.tls import TlsContext

BACKLOG = 4096
SWITCH_INTERVAL_S = 0.0005  # how long the event loop waits for Python code of the background at most; 5 ms otherwise
M_MMAP_THRESHOLD = -3  # of mallopt(3)
MAPPED_BYTES_MIN = 512 * 1024
FILES_RESERVED = 512  # of the files that this process may open: for stores, spooled bodies, and refusals
_log = logging.getLogger("persist.rpc")


class _Server(uvicorn.Server):
    """Ends waits and streams first, so that only real work holds the shutdown up."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._service.stop()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: from now on connections wait for the server instead of being refused."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise InvalidUsage(f"cannot listen on {host} port {port}: {error.strerror or error}") from error
    listener.set_inheritable(True)
    return listener


def url_of(listener: socket.socket, settings: ServerSettings) -> str:
    """The URL by which clients on this machine reach it."""
    scheme = "https" if settings.tls_certificate else "http"
    host = settings.host.strip("[]")
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def local_url_of(listener: socket.socket, settings: ServerSettings) -> str:
    """The URL by which a process on this machine reaches it, also where it listens on every address."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    host = settings.host.strip("[]")
    return url_of(listener, replace(settings, host=everywhere.get(host, host)))


def _give_memory_back() -> None:
    """Have large pieces of memory go back to the system once they are freed.

    glibc keeps what was freed for later, for each thread by itself. In a server with many threads that adds up to
    several times of what is in use. Arrow's own allocators do so, too: the command has it take glibc's.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)


def _fit_files(bounds: ConnectionBounds) -> None:
    """Let this process open as many files as it may, and take no more connections than that.

    Where it had no file left for a new connection, clients would only see it reset.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY or soft != resource.RLIM_INFINITY:
        wanted = bounds.connections_max + FILES_RESERVED
        most = wanted if hard == resource.RLIM_INFINITY else hard
        if soft < most:
            with contextlib.suppress(ValueError, OSError):  # a system may have a lower limit of its own
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < wanted:
            bounds.limited(max(1, soft - min(FILES_RESERVED, soft // 2)))
            told = {"connections_max": bounds.connections_max, "files": soft}
            _log.info("fewer connections than connections_max: raise the limit of open files", extra=told)


def serve(
    location: Location,
    settings: ServerSettings,
    listener: socket.socket,
    ready: Callable[[], None],
) -> None:
    """Serve until SIGTERM or SIGINT; then answer what was accepted, for at most `shutdown_s` seconds, and return.

    Raises InvalidUsage or Unavailable when a store does not work. Call it from the main thread. SIGTERM ends the server
    from before `ready` is called on; from then on it never kills this process, which has children to end.
    """
    app = create_app(location, settings)
    service: Service = app.state.service
    _fit_files(service.bounds)
    _give_memory_back()
    config = uvicorn.Config(
        app,
        http=cast(Any, partial(JoiningProtocol, bounds=service.bounds)),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=settings.shutdown_s,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
    )
    if settings.tls is not None:
        config.load()
        config.ssl = TlsContext(settings.tls, time.time)
    server = _Server(config, service)

    def end(_number: int, _frame: object) -> None:
        server.should_exit = True

    # uvicorn has a handler of its own while it runs, and raises the signal again when it is done.
    signal.signal(signal.SIGTERM, end)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        ready()
        server.run(sockets=[listener])
    finally:
        sys.setswitchinterval(interval_s)
