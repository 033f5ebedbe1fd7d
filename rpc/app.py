"""The app: one FastAPI application over one location."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import Depends, FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

import persist
from blob import BlobNotWritable
from persist.client import transport
from persist.commit.location import Location
from persist.formats.store_errors import translated
from rpc import errors
from rpc.app_state import Service
from rpc.middleware import Edge
from rpc.route_table import declare_path_parameters
from rpc.routes import server_routes
from rpc.routes.parameters import allowed, only_known
from rpc.routes.table import ROUTERS
from rpc.settings import ServerSettings

_log = logging.getLogger("persist.rpc")
DESCRIPTION = "Durable, definite time-varying collections. Errors are application/problem+json (RFC 9457)."


class _App(FastAPI):
    """Enters through the edge, before any other layer: the hot path needs none of them."""

    edge: ASGIApp

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.edge(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        return declare_path_parameters(super().openapi())


def _proof(location: Location) -> str:
    """By which clients know the blob store. Empty on a full disk that has no id yet: then they take our door."""
    try:
        if location.is_copy:
            return transport.proof(location.blob)
        return transport.ensure(location.blob, location.ids)
    except BlobNotWritable:
        return ""


def create_app(location: Location, settings: ServerSettings | None = None) -> FastAPI:
    """The service over an opened location, which stays the caller's to close (after the app has shut down).

    Raises InvalidUsage or Unavailable when a store does not work.
    """
    settings = settings or ServerSettings()
    for unwritable in location.check():
        _log.warning("a store cannot be written: reads go on", extra={"why": unwritable})
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
    app.edge = Edge(super(_App, app).__call__, service)
    errors.install(app)
    for router in ROUTERS:
        checks = [Depends(allowed)] if router is server_routes.router else [Depends(allowed), Depends(only_known)]
        app.include_router(router, dependencies=checks)
    return app
