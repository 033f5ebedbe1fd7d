"""Policies of rows: which rows a shard keeps, what holds its policy back, and running it now."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from fastapi import Query, Request
from starlette.responses import Response

from persist.client.retaining import Asked, RowRetention, read_policy, read_retention, run_retention, set_policy
from persist.client.transport import OneShard
from persist.core.commands import MAINTAIN, MANAGE, READ
from persist.core.errors import InvalidUsage
from persist.core.ids import check_shard_name
from persist.core.row_policy import RowPolicy
from rpc.route import Router
from rpc.routes.parameters import IF_MATCH, asking_for, version_of
from rpc.service import service_of, shard_of

router = Router(prefix="/v1/shards", tags=["history"])
BODY_BYTES_MAX = 64 * 1024
_T = TypeVar("_T")
_EXAMPLE = {"age": "90d", "bytes": "500GiB", "cut_every": "1d", "consumers": ["billing"], "consumers_max_age": "120d"}
_BODY: dict[str, Any] = {
    "parameters": [IF_MATCH],
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"type": "object", "nullable": True}, "example": _EXAMPLE}},
    },
}


@router.on("GET", "/{name}/retention", (READ,), summary="Which rows a shard keeps, and what holds its policy back")
async def show(request: Request) -> Response:
    """`policy` is null where all rows are kept. `held_by` has a sentence for everything that holds it back."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    return _shown(await _with_shard(request, lambda shard: read_retention(shard, name, service.handles.read.retry_s)))


@router.on(
    "PUT",
    "/{name}/retention",
    (MANAGE,),
    audit="retention",
    audits_body=True,
    summary="Say which rows a shard keeps",
    openapi_extra=_BODY,
)
async def configure(
    request: Request,
    confirm: Annotated[bool, Query(description="Also if more than half of the rows go at once.")] = False,
) -> Response:
    """`null` keeps all rows. 409 where the settings have another version than If-Match says."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    asked = Asked(confirm, version_of(request))
    policy = await service.json(request, BODY_BYTES_MAX, _read)
    with service.snapshots:  # to see how much would go
        return _shown(await _with_shard(request, lambda shard: set_policy(shard, name, policy, service.handles, asked)))


@router.on(
    "POST",
    "/{name}/retention/run",
    (MANAGE, MAINTAIN),
    audit="run retention",
    summary="Do now what the policy of rows asks for",
)
async def run(
    request: Request,
    dry_run: Annotated[bool, Query(description="Only tell what would go, by the cuts that were taken.")] = False,
) -> Response:
    """Maintenance does it anyway. `truncated` is null where nothing is due. Repeating it is safe."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    with service.snapshots:  # it takes as much memory as one
        done = await _with_shard(request, lambda shard: run_retention(shard, name, service.handles, dry_run=dry_run))
    return Response(json.dumps(done.to_json()), media_type="application/json")


async def _with_shard(request: Request, work: Callable[[OneShard], _T]) -> _T:
    """What the work on the shard comes to. Raises UnknownShard."""
    service, name = service_of(request), shard_of(request)
    asking = asking_for(request)

    def done() -> _T:
        return work(OneShard(asking, service.location.machine(name).state().shard_id))

    return await service.work.run(done)


def _read(wanted: Any) -> RowPolicy | None:
    """The policy of a body. Raises InvalidUsage."""
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise InvalidUsage('the body must be a JSON object such as {"age": "90d"}, or null to keep all rows')
    return read_policy(wanted)


def _shown(found: RowRetention) -> Response:
    headers = {"etag": f'"{found.version}"'}
    return Response(json.dumps(found.to_json()), media_type="application/json", headers=headers)
