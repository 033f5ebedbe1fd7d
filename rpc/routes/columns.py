"""The columns of a shard, changed."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from starlette.responses import Response

from persist.client.shard import Shard
from persist.codecs.alterations import EXAMPLE, read_changes
from persist.codecs.schemas import write_schema
from persist.core.commands import MANAGE
from persist.core.ids import check_shard_name
from persist.core.view import ViewRequest
from persist.parts.altering import Change
from rpc.route import Router
from rpc.routes.parameters import JsonBody, asking_for, read_as
from rpc.service import service_of, shard_of

router = Router(prefix="/v1/shards", tags=["shards"])
BODY_BYTES_MAX = 1024 * 1024


class _Columns(JsonBody):
    changes: list[Any]


_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}, "example": {"changes": EXAMPLE}}},
    }
}


@router.on(
    "POST",
    "/{name}/schema",
    (MANAGE,),
    audit="evolve schema",
    audits_body=True,
    summary="Change the columns of a shard, by one commit",
    openapi_extra=_BODY,
)
async def alter(request: Request) -> Response:
    """The changes are made one after the other, all or none. `fields` are the columns as of then."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    changes = await service.json(request, BODY_BYTES_MAX, _changes)
    asking = asking_for(request)

    def done() -> dict[str, Any]:
        shard = Shard(asking, name, asking.view(name, ViewRequest(with_batches=False)), service.handles)
        shard.alter(*changes)
        view = shard.view()
        return {"schema_id": view.schema_id, "fields": write_schema(view.schemas)}

    return Response(json.dumps(await service.work.run(done)), media_type="application/json")


def _changes(wanted: Any) -> list[Change]:
    return read_changes(read_as(_Columns)(wanted).changes)
