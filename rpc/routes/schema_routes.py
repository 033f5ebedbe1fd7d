"""Routes of schemas: changes of columns, and constraints."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import Request
from msgspec import UNSET
from starlette.responses import Response

from persist.client.shard import Shard
from persist.codecs.schema_json import EXAMPLE, read_changes, write_schema
from persist.core.commands import MANAGE, READ
from persist.core.errors import InvalidUsage
from persist.parts import ShardSchema, current_schema
from persist.parts.constraint_checks import constraints_json
from persist.parts.schema_changes import Change
from rpc.app_state import service_of, shard_of
from rpc.route import Router
from rpc.routes.parameters import (
    JsonBody,
    body_reader,
    json_body,
    json_response,
    run_on_shard,
)

router = Router(prefix="/v1", tags=["shards"])

# Columns.

CHANGES_BYTES_MAX = 1024 * 1024


class _Columns(JsonBody):
    changes: list[Any]


@router.on(
    "POST /shards/{name}/schema",
    (MANAGE,),
    "Change the columns of a shard, by one commit",
    audit="evolve schema",
    audits_body=True,
    openapi_extra=json_body(_Columns, example={"changes": EXAMPLE}),
)
async def alter(request: Request) -> Response:
    """The changes are applied in order, all or none. `fields` are the resulting columns."""
    changes = await service_of(request).json(request, CHANGES_BYTES_MAX, _changes)

    def work(shard: Shard) -> dict[str, Any]:
        shard.alter(*changes)
        view = shard.view()
        return {"schema_id": view.schema_id, "fields": write_schema(view.schemas)}

    return json_response(await run_on_shard(request, work))


def _changes(body: Any) -> list[Change]:
    return read_changes(body_reader(_Columns)(body).changes)


# Constraints.


class _Constraints(JsonBody):
    """Omitted ones are unchanged."""

    unique: Any = UNSET
    not_null: Any = UNSET
    checks: Any = UNSET


_EXAMPLE = {"unique": True, "not_null": ["amount"], "checks": {"positive": "amount > 0"}}


@router.on("GET /shards/{name}/constraints", (READ,), "The constraints of a shard")
async def constraints(request: Request) -> Response:
    state = await service_of(request).state(shard_of(request))
    return _constraints_response(current_schema(state.schemas)[1])


@router.on(
    "PUT /shards/{name}/constraints",
    (MANAGE,),
    "Change the constraints of a shard",
    audit="set constraints",
    audits_body=True,
    openapi_extra=json_body(_Constraints, example=_EXAMPLE),
)
async def change(request: Request) -> Response:
    """Omitted constraints are unchanged. 400 if existing rows violate the new ones: nothing is changed then."""
    constraints = await service_of(request).json(request, CHANGES_BYTES_MAX, _read_constraints)
    return _constraints_response(await run_on_shard(request, lambda shard: shard.set_constraints(**constraints)))


def _read_constraints(body: Any) -> dict[str, Any]:
    """The constraints in a body. Raises InvalidUsage."""
    constraints: dict[str, Any] = msgspec.to_builtins(body_reader(_Constraints)(body))
    if not constraints:
        raise InvalidUsage('the body must be a JSON object such as {"unique": true}')
    return constraints


def _constraints_response(schema: ShardSchema) -> Response:
    return json_response(constraints_json(schema))
