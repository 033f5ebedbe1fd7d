"""Constraints of a shard."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import msgspec
from fastapi import Request
from msgspec import UNSET
from starlette.responses import Response

from persist.client.connect import Client
from persist.client.transport import AsCaller
from persist.core.commands import MANAGE, READ
from persist.core.errors import InvalidUsage
from persist.core.ids import check_shard_name
from persist.parts import ShardSchema
from persist.parts.constraints import constraints_json
from rpc.route import Router
from rpc.routes.parameters import JsonBody, caller_of, read_as
from rpc.service import service_of, shard_of

router = Router(prefix="/v1/shards", tags=["shards"])
BODY_BYTES_MAX = 1024 * 1024  # of 64 checks, each of them as long as it may be


class _Constraints(JsonBody):
    """What is left out stays."""

    unique: Any = UNSET
    not_null: Any = UNSET
    checks: Any = UNSET


_EXAMPLE = {"unique": True, "not_null": ["amount"], "checks": {"positive": "amount > 0"}}
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object"}, "example": _EXAMPLE}},
    }
}


@router.on("GET", "/{name}/constraints", (READ,), summary="What a shard asks of its rows beside their types")
async def constraints(request: Request) -> Response:
    service, name = service_of(request), check_shard_name(shard_of(request))
    shard = await service.work.run(Client(service.transport, service.handles).shard, name)
    return _json(shard.schema)


@router.on(
    "PUT",
    "/{name}/constraints",
    (MANAGE,),
    audit="set constraints",
    audits_body=True,
    summary="Change the constraints of a shard",
    openapi_extra=_BODY,
)
async def change(request: Request) -> Response:
    """What is left out stays. 400 where what the shard holds breaks them: nothing is changed then."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    given = await service.json(request, BODY_BYTES_MAX, _read)
    shard = await service.work.run(Client(AsCaller(service.transport, caller_of(request)), service.handles).shard, name)
    return _json(await service.work.run(partial(shard.set_constraints, **given)))


def _read(wanted: Any) -> dict[str, Any]:
    """The constraints that a body gives. Raises InvalidUsage."""
    given: dict[str, Any] = msgspec.to_builtins(read_as(_Constraints)(wanted))
    if not given:
        raise InvalidUsage('the body must be a JSON object such as {"unique": true}')
    return given


def _json(schema: ShardSchema) -> Response:
    return Response(json.dumps(constraints_json(schema)), media_type="application/json")
