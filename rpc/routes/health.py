"""Is the server alive, can it serve, and how does it do?"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import Request
from starlette.responses import Response

from persist.core.commands import ADMIN, READ
from persist.core.errors import Overloaded, PersistError, Unavailable
from rpc.auth import Principal
from rpc.metrics import CONTENT_TYPE
from rpc.route import Router
from rpc.service import principal_of, service_of

router = Router(tags=["health"])
_log = logging.getLogger("persist.rpc")


@router.on("GET", "/healthz", None, summary="The process answers")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.on("GET", "/readyz", None, summary="Both stores answer", responses={503: {"description": "A store does not"}})
async def readyz(request: Request) -> dict[str, Any]:
    """Where there are tokens, only `admin` on all shards is told where the stores are, and what is wrong with one.

    Others may be told what was found a second ago.
    """
    service, tells_all = service_of(request), _tells_all(principal_of(request))
    try:
        unwritable = await (service.work.run(service.location.check) if tells_all else service.readiness.told())
    except Overloaded:  # the server itself has too much to do: nothing is known of the stores
        raise
    except PersistError as error:
        if tells_all:
            raise
        _log.warning("a store does not answer", extra={"why": error.message})
        raise Unavailable("a store does not answer; the server's log says which") from None
    status = {"status": "read-only" if unwritable else "ok"}
    if not tells_all:
        return status
    stores = {"blob": service.location.blob.url, "consensus": service.location.consensus.url}
    return {**status, **({"why": unwritable} if unwritable else {}), **stores}


def _tells_all(principal: Principal) -> bool:
    return ADMIN in principal.scopes and principal.is_unlimited


@router.on("GET", "/metrics", (READ,), summary="Counters in Prometheus' text format", response_class=Response)
async def metrics(request: Request) -> Response:
    """Of shards that the token does not see there is nothing. A token for some shards sees of tokens itself alone."""
    service, principal = service_of(request), principal_of(request)
    return Response(await service.work.run(service.metrics.text, principal), media_type=CONTENT_TYPE)
