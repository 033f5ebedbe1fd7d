"""Whether a caller may ask for a route: the check before each handler, and again while an answer goes on.

Handlers that find names of shards in bodies check these themselves. What a command needs stands with its class
(`persist.core.command`).
"""

from __future__ import annotations

from collections.abc import Callable

from fastapi import Request

from persist.core.errors import Forbidden
from persist.core.ids import check_shard_name
from rpc.joining import peer_in
from rpc.route import BY_COMMAND, ROUTE, Route, route_of
from rpc.service import principal_of, service_of


async def allowed(request: Request) -> None:
    """Raises Forbidden unless the caller has a scope of the route, and sees the shard that the path names."""
    route: Route | None = request.scope[ROUTE]
    if route is None or request.scope["route"].endpoint is not route.handler:
        raise Forbidden(f"{request.method} {request.url.path} is not in the table of routes, and so it is not open")
    check_scopes(route, request)


def check_scopes(route: Route, request: Request) -> None:
    """As `allowed`, for a handler that FastAPI does not call."""
    if route.scopes is not None and route.scopes != BY_COMMAND:
        name = request.scope.get("persist.shard")
        principal_of(request).require_any(route.scopes, None if name is None else check_shard_name(name))


def still_allowed(request: Request) -> Callable[[], None]:
    """What raises Unauthorized, Forbidden once the caller would not be let in any more, as a token is taken away."""
    tokens, name, scopes = service_of(request).tokens, request.scope.get("persist.shard"), route_of(request).scopes
    given, peer = request.headers.get("authorization"), peer_in(request.scope)

    def check() -> None:
        if tokens is not None and scopes is not None:
            tokens.principal(given, peer).require_any(scopes, name)

    return check
