"""All routes of the service."""

from __future__ import annotations

from rpc.route import Route, Router, Table
from rpc.routes import (
    blobs,
    check,
    columns,
    console,
    constraints,
    cuts,
    erasures,
    health,
    history,
    inspect,
    listen,
    location,
    maintenance,
    past,
    regions,
    retention,
    rows,
    shards,
    tags,
    traces,
    verbs,
)

ROUTERS: tuple[Router, ...] = (
    health.router,
    location.router,
    shards.router,
    columns.router,
    cuts.router,
    history.router,
    past.router,
    verbs.router,
    tags.router,
    constraints.router,
    regions.router,
    retention.router,
    erasures.router,
    maintenance.router,
    inspect.router,
    check.router,
    rows.router,
    listen.router,
    traces.router,
    blobs.router,
    console.router,
)


async def _by_fastapi() -> None:
    raise AssertionError("FastAPI itself answers")


OPENAPI = Route("GET", "/openapi.json", _by_fastapi, None, "openapi.json")
TABLE = Table([*(route for router in ROUTERS for route in router.table), OPENAPI])
