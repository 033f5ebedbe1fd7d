"""The FastAPI application over one location, and the process that serves it: socket, uvicorn, graceful shutdown."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import uvicorn
from fastapi import Depends, FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

import persist
from blob import BlobNotWritable
from persist.client import transport
from persist.commit.location import Location
from persist.core.errors import InvalidUsage
from persist.formats.store_errors import translated
from rpc import errors
from rpc.app_state import Service
from rpc.http_protocol import ConnectionBounds, JoiningProtocol
from rpc.middleware import RequestMiddleware
from rpc.routes import server_routes
from rpc.routes.parameters import check_allowed, check_query
from rpc.routes.table import ROUTERS
from rpc.settings import ServerSettings
from rpc.tls import TlsContext

_log = logging.getLogger("persist.rpc")
DESCRIPTION = "Durable, definite time-varying collections. Errors are application/problem+json (RFC 9457)."


class _App(FastAPI):
    """Passes requests to `outermost` before all other layers, which hot routes bypass."""

    outermost: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.outermost(scope, receive, send)


def _proof(location: Location) -> str:
    """The proof by which clients recognise the blob store. Empty if it is not writable, so that they use our routes."""
    try:
        if location.is_copy:
            return transport.proof(location.blob)
        return transport.ensure(location.blob, location.ids)
    except BlobNotWritable:
        return ""


def create_app(location: Location, settings: ServerSettings | None = None) -> FastAPI:
    """The service over an opened location. The caller closes the location after the app has shut down.

    Raises InvalidUsage or Unavailable if a store does not work.
    """
    settings = settings or ServerSettings()
    for unwritable in location.check():
        _log.warning("a store cannot be written; reads continue", extra={"why": unwritable})
    with translated():
        proof = _proof(location)
    service = Service(location, settings, proof)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = _App(
        title="persist",
        version=persist.__version__,
        description=DESCRIPTION,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
    )
    app.state.service = service
    app.outermost = RequestMiddleware(super(_App, app).__call__, service)
    errors.install(app)
    for router in ROUTERS:
        checks = [Depends(check_allowed)]
        if router is not server_routes.router:
            checks.append(Depends(check_query))
        app.include_router(router, dependencies=checks)
    return app


# The server process.

BACKLOG = 4096
SWITCH_INTERVAL_S = 0.0005  # the longest wait of the event loop for background Python code; the default is 5 ms
M_MMAP_THRESHOLD = -3  # of mallopt(3)
MAPPED_BYTES_MIN = 512 * 1024
FILES_RESERVED = 512  # of the files that this process may open: for stores, spooled bodies, and refusals


class _Server(uvicorn.Server):
    """Ends waits and streams first, so that only work in progress delays the shutdown."""

    service: Service

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.stop()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: connections wait for the server from now on instead of being refused."""
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
    """The URL for clients on this machine."""
    scheme = "https" if settings.tls_certificate else "http"
    host = settings.host.strip("[]")
    host = f"[{host}]" if ":" in host else host
    return f"{scheme}://{host}:{listener.getsockname()[1]}"


def local_url_of(listener: socket.socket, settings: ServerSettings) -> str:
    """The URL for a process on this machine, also if the server listens on every address."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    host = settings.host.strip("[]")
    return url_of(listener, replace(settings, host=everywhere.get(host, host)))


def _return_freed_memory() -> None:
    """Return large blocks of freed memory to the system.

    glibc keeps freed memory per thread, which adds up to several times the memory in use in a server with many threads.
    Arrow's own allocators do the same, so the command makes Arrow use glibc's.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)


def _raise_file_limit(bounds: ConnectionBounds) -> None:
    """Raise this process's limit of open files as far as allowed, and lower the connection limit to fit.

    Without a free file a new connection would be reset instead of refused.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY or soft != resource.RLIM_INFINITY:
        wanted = bounds.connections_max + FILES_RESERVED
        most = wanted if hard == resource.RLIM_INFINITY else hard
        if soft < most:
            with contextlib.suppress(ValueError, OSError):  # the system may have a lower limit
                resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft < wanted:
            bounds.limit_to(max(1, soft - min(FILES_RESERVED, soft // 2)))
            counts = {"connections_max": bounds.connections_max, "files": soft}
            _log.info("fewer connections than connections_max: raise the limit of open files", extra=counts)


def serve(location: Location, settings: ServerSettings, listener: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGTERM or SIGINT; then answer accepted requests for at most `shutdown_s` seconds, and return.

    Raises InvalidUsage or Unavailable if a store does not work. Call it from the main thread. From before `ready` is
    called, SIGTERM stops the server instead of killing this process, which has child processes to stop.
    """
    app = create_app(location, settings)
    service: Service = app.state.service
    _raise_file_limit(service.bounds)
    _return_freed_memory()
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
    server = _Server(config)
    server.service = service

    def end(_number: int, _frame: object) -> None:
        server.should_exit = True

    # uvicorn has its own handler while it runs, and raises the signal again when it is done.
    signal.signal(signal.SIGTERM, end)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        ready()
        server.run(sockets=[listener])
    finally:
        sys.setswitchinterval(interval_s)
