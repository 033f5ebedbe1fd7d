"""The table of all routes, and shard names in their paths."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from rpc.route import SHARD, Route, Router, Table
from rpc.routes import (
    blob_routes,
    dml_routes,
    history_routes,
    inspection_routes,
    retention_routes,
    row_routes,
    server_routes,
    shard_routes,
)

ROUTERS: tuple[Router, ...] = (
    server_routes.router,
    server_routes.location_router,
    shard_routes.router,
    retention_routes.cuts_router,
    history_routes.router,
    retention_routes.router,
    dml_routes.router,
    server_routes.regions_router,
    shard_routes.maintenance_router,
    inspection_routes.router,
    inspection_routes.check_router,
    row_routes.router,
    row_routes.listen_router,
    inspection_routes.statistics_router,
    blob_routes.router,
    server_routes.console_router,
)


async def _by_fastapi() -> None:
    raise AssertionError("FastAPI itself answers")


OPENAPI = Route("GET", "/openapi.json", _by_fastapi, None, "openapi.json")
TABLE = Table([*(route for router in ROUTERS for route in router.table), OPENAPI])


# Shard names in paths. A name may contain one slash, so paths are parsed here.
#
# After `/v1/shards/`, the last segment is a verb if it is one of `VERBS` and follows a name; the rest is the name. The
# verbs of `OF_ONE` are followed by the name of an item, and `PAIRS` are verbs of two words. All of them follow from the
# table of routes. `eu/orders/insert` is the verb insert on `eu/orders`; `eu/listen` is the verb listen on `eu`. A shard
# with the name `eu/listen` is written `eu%2Flisten`: an encoded slash always belongs to the name.

PREFIX = SHARD.removesuffix("{name}")
_BELOW = [
    route.path.removeprefix(SHARD + "/").split("/") for route in TABLE.routes if route.path.startswith(SHARD + "/")
]
VERBS = frozenset(verb for verb, *more in _BELOW if not more)
OF_ONE = frozenset(verb for verb, *more in _BELOW if more and more[0].startswith("{"))
PAIRS = frozenset((verb, more[0]) for verb, *more in _BELOW if more and not more[0].startswith("{"))
# Replaces the slash of a name for the router. No name contains it.
_JOINT = ":"


def split(raw: str) -> tuple[str, str] | None:
    """(name, verb or "") of a percent-encoded path; None: it is not a path of a shard."""
    if not raw.startswith(PREFIX):
        return None
    segments = raw[len(PREFIX) :].split("/")
    verb = ""
    if len(segments) > 2 and (segments[-2] in OF_ONE or tuple(segments[-2:]) in PAIRS):
        verb = "/".join(segments[-2:])
        del segments[-2:]
    elif len(segments) > 1 and segments[-1] in VERBS:
        verb = segments.pop()
    name = unquote("/".join(segments))
    return (name, verb) if name else None


def resolve(scope: dict[str, Any]) -> tuple[str, str] | None:
    """(name, verb) of a request to a shard; rewrites the path in its scope so that the name is one segment."""
    raw: bytes | None = scope.get("raw_path")
    path = scope["path"] if raw is None else raw.partition(b"?")[0].decode("latin-1")
    shard = split(path)
    if shard is not None:
        name, verb = shard
        scope["persist.shard"] = name
        scope["path"] = PREFIX + name.replace("/", _JOINT) + (f"/{verb}" if verb else "")
    elif scope["path"].startswith(PREFIX):  # after decoding, as `/v1/shards%2Ft`: not a path of a shard
        scope["path"] = path
    return shard
