"""Maintenance of one shard because somebody asks for it. A server's own maintenance does both anyway."""

from __future__ import annotations

import json
from functools import partial

from fastapi import Request
from starlette.responses import Response

from persist.client.maintaining import OPTIMIZE, VACUUM
from persist.core.commands import MAINTAIN
from persist.core.ids import check_shard_name
from rpc.route import Router
from rpc.service import service_of, shard_of

router = Router(prefix="/v1/shards", tags=["maintenance"])


@router.on("POST", "/{name}/optimize", (MAINTAIN,), audit="optimize", summary="Merge now what is worth it")
async def optimize(request: Request) -> Response:
    """A few merges, by this server; no row is changed. Ask again while `more` is true."""
    return await _maintained(request, OPTIMIZE)


@router.on("POST", "/{name}/vacuum", (MAINTAIN,), audit="vacuum", summary="Delete now what nobody can read any more")
async def vacuum(request: Request) -> Response:
    """Blobs and entries of the log; nothing that history keeps, or a reader holds. Ask again while `more` is true."""
    return await _maintained(request, VACUUM)


async def _maintained(request: Request, verb: str) -> Response:
    service, name = service_of(request), check_shard_name(shard_of(request))
    with service.snapshots:  # a merge takes as much memory as one
        found = await service.work.run(partial(service.transport.maintain, name, verb))
    return Response(json.dumps(found), media_type="application/json")
