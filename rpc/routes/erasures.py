"""Erasures: rows that are taken away for good, how far that is, and the receipt."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request
from starlette.responses import Response

from persist.client.erase import ErasureStatus, statuses
from persist.client.erased_before import erased_before
from persist.client.shard import Shard
from persist.core import commands as c
from persist.core.antichain import TIME_MAX
from persist.core.commands import ADMIN
from persist.core.errors import InvalidUsage
from persist.core.ids import check_shard_name
from persist.formats.http_messages import named_once
from persist.parts.decimal_text import EXACT_NUMBERS
from persist.parts.given import keys_of_json
from rpc.route import Router
from rpc.routes.parameters import IdempotencyToken, token_of
from rpc.routes.worked import worked_with_body
from rpc.service import Service, service_of, shard_of

router = Router(prefix="/v1/shards", tags=["history"])
BODY_BYTES_MAX = 1024 * 1024
FIELDS = ("keys", "where", "gone", "deadline", "reason", "tags", "force")
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {"type": "object"},
                "example": {"keys": [["ann"]], "deadline": "30d", "reason": "dsr-4711"},
            }
        },
    },
}


@router.on(
    "POST",
    "/{name}/erasures",
    (ADMIN,),
    audit="erase",
    frees=True,
    summary="Take rows away for good",
    openapi_extra=_BODY,
)
async def erase(request: Request, token: IdempotencyToken = None) -> Response:
    """`keys` or `where` say which; `gone`: what was retracted or truncated before. The answer has its `id`.

    In a shard that is fed by `append` it is `pending` until the next commit of the writer; `force` takes a time.
    """
    given = token_of(request, token)

    def work(shard: Shard, data: bytes) -> ErasureStatus:
        wanted = _read(data)
        keys = keys_of_json(shard.schema, wanted.pop("keys", None))
        return shard.erase(**wanted, keys=keys, token=given)

    return await worked_with_body(request, BODY_BYTES_MAX, work)


@router.on(
    "GET",
    "/{name}/erasures",
    (ADMIN,),
    summary="How far erasures are, or what still shows rows that were gone before a time",
)
async def erasures(
    request: Request,
    before: Annotated[
        int | None, Query(ge=0, le=TIME_MAX, description="Rows retracted or truncated before it.")
    ] = None,
) -> Response:
    service, name = service_of(request), check_shard_name(shard_of(request))
    if before is not None:
        return _json(await service.work.run(partial(erased_before, service.location, name, before)))
    found = await _statuses(service, name)
    return _json({"erasures": [status.to_json() for status in found.values()]})


@router.on(
    "GET", "/{name}/erasures/{erasure}", (ADMIN,), summary="How far one erasure is: the receipt, once nothing is left"
)
async def one(request: Request, erasure: str) -> Response:
    service, name = service_of(request), check_shard_name(shard_of(request))
    found = (await _statuses(service, name)).get(erasure)
    if found is None:
        raise InvalidUsage(f"shard {name!r} has no erasure {erasure!r:.80}")
    return _json(found.to_json())


async def _statuses(service: Service, name: str) -> dict[str, ErasureStatus]:
    found = await service.apply(name, c.ReadErasures())
    assert isinstance(found, c.ErasuresAre)
    return statuses(found)


def _read(data: bytes) -> dict[str, Any]:
    """The question of a body. Raises InvalidUsage, which does not repeat it."""
    try:
        wanted = json.loads(data, object_pairs_hook=named_once, **EXACT_NUMBERS)
    except (ValueError, RecursionError):
        raise InvalidUsage("the body cannot be read as JSON") from None
    if not isinstance(wanted, dict):
        raise InvalidUsage('the body must be a JSON object such as {"keys": [["ann"]]}')
    if wanted.keys() - set(FIELDS):
        raise InvalidUsage(f"the body has a field that is none of {', '.join(FIELDS)}")
    gone = wanted.pop("gone", False)
    if not isinstance(gone, bool):
        raise InvalidUsage("gone must be true or false")
    if gone != (wanted.get("keys") is None and wanted.get("where") is None):
        raise InvalidUsage("give keys or where; or, to retract no row and let what went before go for good, gone: true")
    return wanted


def _json(value: dict[str, Any]) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json")
