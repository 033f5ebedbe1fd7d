"""Who may come in by which door: the scopes of every route, and the check before each of them.

A route that is not in the table lets nobody in. Those who name shards in their bodies check these by themselves.
What a command needs stands with its class (`persist.core.command`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fastapi import Request

from persist.core.commands import ADMIN, MAINTAIN, MANAGE, READ, WRITE
from persist.core.errors import Forbidden
from persist.core.ids import check_shard_name
from rpc.auth import Principal
from rpc.joining import peer_in
from rpc.service import principal_of, service_of

OPEN = ("GET /healthz", "GET /readyz", "GET /openapi.json")  # to everybody, without a token
PAGES = ("GET /console", "GET /console/", "GET /console/{file}")  # as are the files of the console, which tell nothing
BY_COMMAND = "POST /v1/shards/{name}/commands"  # the command says who may send it

SCOPES_OF_ROUTES: Mapping[str, tuple[str, ...]] = {
    "GET /metrics": (READ,),
    "GET /v1/location": (READ,),
    "GET /v1/regions": (READ,),
    "GET /v1/shards": (READ,),
    "GET /v1/activity": (READ,),
    "POST /v1/cuts": (READ,),
    "GET /v1/shards/{name}": (READ,),
    "GET /v1/shards/{name}/snapshot": (READ,),
    "GET /v1/shards/{name}/count": (READ,),
    "GET /v1/shards/{name}/listen": (READ,),
    "GET /v1/shards/{name}/trace": (READ,),
    "GET /v1/shards/{name}/changes": (READ,),
    "GET /v1/shards/{name}/history": (READ,),
    "GET /v1/shards/{name}/time-at": (READ,),
    "GET /v1/shards/{name}/timestamp-of": (READ,),
    "GET /v1/shards/{name}/settings": (READ,),
    "GET /v1/shards/{name}/retention": (READ,),
    "GET /v1/shards/{name}/tags": (READ,),
    "GET /v1/shards/{name}/constraints": (READ,),
    "GET /v1/shards/{name}/tags/{tag}": (READ,),
    "GET /v1/blobs/{key}": (READ,),
    "HEAD /v1/blobs/{key}": (READ,),
    BY_COMMAND: (READ,),
    "PUT /v1/shards/{name}": (WRITE,),
    "POST /v1/shards/{name}/insert": (WRITE,),
    "POST /v1/shards/{name}/append": (WRITE,),
    "POST /v1/shards/{name}/compare-and-append": (WRITE,),
    "POST /v1/shards/{name}/upsert": (WRITE,),
    "POST /v1/shards/{name}/overwrite": (WRITE,),
    "POST /v1/shards/{name}/replace-where": (WRITE,),
    "POST /v1/shards/{name}/delete": (WRITE,),
    "POST /v1/shards/{name}/update": (WRITE,),
    "POST /v1/shards/{name}/merge": (WRITE,),
    "POST /v1/shards/{name}/restore": (WRITE,),
    "POST /v1/shards/{name}/truncate": (WRITE,),
    "POST /v1/truncate": (WRITE,),
    "POST /v1/clones": (WRITE,),
    "POST /v1/shards/{name}/receipts": (WRITE, MAINTAIN),
    "PUT /v1/blobs/{key}": (WRITE, MAINTAIN),
    "POST /v1/shards/{name}/advance-upper": (MANAGE,),
    "POST /v1/shards/{name}/downgrade-since": (MANAGE,),
    "POST /v1/shards/{name}/forget": (MANAGE,),
    "PUT /v1/shards/{name}/settings": (MANAGE,),
    "POST /v1/shards/{name}/schema": (MANAGE,),
    "PUT /v1/shards/{name}/retention": (MANAGE,),
    "PUT /v1/shards/{name}/constraints": (MANAGE,),
    "POST /v1/shards/{name}/retention/run": (MANAGE, MAINTAIN),
    "PUT /v1/shards/{name}/tags/{tag}": (MANAGE,),
    "DELETE /v1/shards/{name}/tags/{tag}": (MANAGE,),
    "POST /v1/shards/{name}/optimize": (MAINTAIN,),
    "POST /v1/shards/{name}/vacuum": (MAINTAIN,),
    "DELETE /v1/shards/{name}": (ADMIN,),
    "POST /v1/shards:delete": (ADMIN,),
    "POST /v1/shards/{name}/erasures": (ADMIN,),
    "GET /v1/shards/{name}/erasures": (ADMIN,),
    "GET /v1/shards/{name}/erasures/{erasure}": (ADMIN,),
    "GET /v1/shards/{name}/inspect/{what}": (ADMIN,),
    "GET /v1/inspect/{what}": (ADMIN,),
    "GET /v1/doctor": (ADMIN,),
}
"""By method and path: each of the scopes is enough."""


async def allowed(request: Request) -> None:
    """Raises Forbidden unless who asks has a scope of the route, and sees the shard that the path names."""
    door = f"{request.method} {request.scope['route'].path.replace(':path}', '}')}"
    if door not in (*OPEN, *PAGES):
        check_door(principal_of(request), door, request.scope.get("persist.shard"))


def still_allowed(request: Request, scopes: tuple[str, ...]) -> Callable[[], None]:
    """What raises Unauthorized, Forbidden once who asked would not be let in any more, as a token is taken away."""
    tokens, name = service_of(request).tokens, request.scope.get("persist.shard")
    given, peer = request.headers.get("authorization"), peer_in(request.scope)

    def check() -> None:
        if tokens is not None:
            tokens.principal(given, peer).require_any(scopes, name)

    return check


def check_door(principal: Principal, door: str, name: str | None) -> None:
    """Raises Forbidden unless who asks has a scope of this route, and sees the shard of that name."""
    scopes = SCOPES_OF_ROUTES.get(door)
    if scopes is None:
        raise Forbidden(f"{door} is in no table of scopes, and so it is open to nobody")
    principal.require_any(scopes, None if name is None else check_shard_name(name))
