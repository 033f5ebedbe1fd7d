"""Is the server alive, can it serve, and how does it do?"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from rpc.metrics import CONTENT_TYPE
from rpc.service import principal_of, service_of

router = APIRouter(tags=["health"])


@router.get("/healthz", summary="The process answers")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz", summary="Both stores answer", responses={503: {"description": "A store does not"}})
async def readyz(request: Request) -> dict[str, Any]:
    service = service_of(request)
    unwritable = await service.work.run(service.location.check)
    stores = {"blob": service.location.blob.url, "consensus": service.location.consensus.url}
    return {"status": "read-only", "why": unwritable, **stores} if unwritable else {"status": "ok", **stores}


@router.get("/metrics", summary="Counters in Prometheus' text format", response_class=Response)
async def metrics(request: Request) -> Response:
    """Of shards that the token does not see there is nothing. A token for some shards sees of tokens itself alone."""
    service, principal = service_of(request), principal_of(request)
    return Response(await service.work.run(service.metrics.text, principal), media_type=CONTENT_TYPE)
