"""Routes of erasure: rows that are deleted from the history too, their progress, and their certificates."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request
from starlette.responses import Response

from persist.client.embedded import erased_before
from persist.client.erasure_api import ErasureStatus
from persist.client.shard import Shard
from persist.core.commands import ADMIN
from persist.core.errors import InvalidUsage
from persist.core.frontier import TIME_MAX
from persist.formats.http_messages import named_once
from persist.parts.exact_numbers import EXACT_NUMBERS
from persist.parts.python_values import decode_json_keys
from rpc.app_state import service_of, shard_of
from rpc.route import Router
from rpc.routes.parameters import (
    IdempotencyToken,
    JsonBody,
    body_reader,
    json_body,
    json_response,
    run_on_shard,
    run_with_body,
    token_of,
)

router = Router(prefix="/v1/shards", tags=["history"])
BODY_BYTES_MAX = 1024 * 1024


class _Erasure(JsonBody):
    """The rows: `keys` or `where`; or `gone`, those that were retracted or truncated before."""

    keys: Any = None
    where: str | None = None
    gone: bool = False
    deadline: str | None = None
    reason: str = ""
    tags: bool = False
    force: bool = False


_EXAMPLE = {"keys": [["ann"]], "deadline": "30d", "reason": "dsr-4711"}


@router.on(
    "POST /{name}/erasures",
    (ADMIN,),
    "Erase rows, including their history",
    audit="erase",
    frees=True,
    openapi_extra=json_body(_Erasure, example=_EXAMPLE),
)
async def erase(request: Request, token: IdempotencyToken = None) -> Response:
    """`keys` or `where` select the rows; `gone`: those retracted or truncated before. The answer has the `id`.

    In a shard that is fed by `append` it is `pending` until the writer's next commit; `force` takes a time.
    """
    retry_token = token_of(request, token)

    def work(shard: Shard, data: bytes) -> ErasureStatus:
        body = _read(data)
        return shard.erase(
            keys=decode_json_keys(shard.schema, body.keys),
            where=body.where,
            gone=body.gone,
            deadline=body.deadline,
            reason=body.reason,
            tags=body.tags,
            force=body.force,
            token=retry_token,
        )

    return await run_with_body(request, BODY_BYTES_MAX, work)


@router.on(
    "GET /{name}/erasures",
    (ADMIN,),
    "The progress of erasures, or what still holds rows that were deleted before a time",
)
async def erasures(
    request: Request,
    before: Annotated[
        int | None, Query(ge=0, le=TIME_MAX, description="Of rows retracted or truncated before it.")
    ] = None,
) -> Response:
    service, name = service_of(request), shard_of(request)
    if before is not None:
        return json_response(await service.work.run(partial(erased_before, service.location, name, before)))
    statuses = await run_on_shard(request, Shard.erasures)
    return json_response({"erasures": [status.to_json() for status in statuses.values()]})


@router.on("GET /{name}/erasures/{erasure}", (ADMIN,), "The progress of an erasure, or its certificate")
async def show_erasure(request: Request, erasure: str) -> Response:
    status = await run_on_shard(request, lambda shard: shard.erased(erasure))
    return json_response(status.to_json())


def _read(data: bytes) -> _Erasure:
    """The request in a body. Raises InvalidUsage, which does not quote it, because it may hold personal data."""
    try:
        value = json.loads(data, object_pairs_hook=named_once, **EXACT_NUMBERS)
    except (ValueError, RecursionError):
        raise InvalidUsage("the body is not valid JSON") from None
    return body_reader(_Erasure)(value)
