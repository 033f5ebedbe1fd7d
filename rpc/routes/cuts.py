"""Cuts: a frontier for each of many shards, and truncating all of them by it."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import Query, Request
from starlette.responses import Response

from persist.client.cut import SHARDS_MAX, TEXT_CHARS_MAX, Cut
from persist.client.cutting import ASKED_AT_ONCE, TRUNCATED_AT_ONCE, Asked, Wanted, take, truncate
from persist.client.rewriting import RETRIES_MAX
from persist.client.wall_clock import read_instant
from persist.core.commands import READ, WRITE
from rpc.audited import MANY
from rpc.auth import Principal
from rpc.route import Router
from rpc.routes.parameters import JsonBody, asking_for, read_as
from rpc.service import principal_of, service_of

router = Router(prefix="/v1", tags=["history"])


class _Cut(JsonBody):
    """Of which shards: `shards` or `prefix`; by what: `at` (RFC 3339), `cursors`, or neither."""

    shards: Annotated[tuple[str, ...], msgspec.Meta(max_length=SHARDS_MAX)] | None = None
    prefix: str | None = None
    at: str | None = None
    cursors: tuple[str, ...] = ()


def _body(example: object) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}, "example": example}}
    return {"requestBody": {"required": True, "content": content}}


_ASKED = _body({"prefix": "eu/", "at": "2030-01-01T12:00:00Z"})
_CUT = _body({"v": 1, "location": "…", "epoch": 1, "taken_ms": 0, "kind": "upper", "shards": {"orders": [7]}, "crc": 0})


@router.on(
    "POST",
    "/cuts",
    (READ,),
    summary="A frontier for each of many shards, by which they can be truncated",
    openapi_extra=_ASKED,
)
async def cut(request: Request) -> Response:
    """Changes nothing. Give `shards` or `prefix`; then `at` (RFC 3339), or `cursors`, or neither for the uppers."""
    service, principal = service_of(request), principal_of(request)
    asked = await service.json(request, TEXT_CHARS_MAX, _asked)
    for name in asked.names or ():
        principal.require(READ, name)
    if asked.prefix is not None:
        principal.require_prefix(asked.prefix)
    found = await service.work.run(partial(take, service.transport, asked, service.handles, ASKED_AT_ONCE))
    return Response(found.to_json(), media_type="application/json")


@router.on(
    "POST",
    "/truncate",
    (WRITE,),
    audit="truncate",
    audits_body=True,
    summary="Truncate every shard of a cut",
    openapi_extra=_CUT,
)
async def truncate_all(
    request: Request,
    dry_run: Annotated[bool, Query(description="Tell how many rows would go, and change nothing.")] = False,
    retries: Annotated[int, Query(ge=0, le=RETRIES_MAX, description="How often, if others write meanwhile.")] = 0,
) -> Response:
    """The body is the cut. An outcome for each shard; where `complete` is false, the same again does the rest.

    Refused as a whole, before anything is written, unless the token may write to every shard of the cut.
    """
    service, principal = service_of(request), principal_of(request)
    given = await service.json(request, TEXT_CHARS_MAX, Cut.of)
    _require(principal, given)
    request.scope[MANY] = [] if dry_run else sorted(given.shards)
    asking = asking_for(request)
    work = partial(truncate, asking, given, service.handles, Wanted(dry_run, retries))
    service.snapshots.take(TRUNCATED_AT_ONCE)  # each takes as much memory as one
    try:
        found = await service.work.run(work)
    finally:
        service.snapshots.give_back(TRUNCATED_AT_ONCE)
    return Response(json.dumps(found.to_json(), separators=(",", ":")), media_type="application/json")


def _require(principal: Principal, given: Cut) -> None:
    for name in given.shards:
        principal.require(WRITE, name)


def _asked(wanted: Any) -> Asked:
    """What a body asks for. Raises InvalidUsage."""
    body = read_as(_Cut)(wanted)
    at = None if body.at is None else read_instant("at", body.at)
    asked = Asked(body.shards, body.prefix, at, body.cursors)
    asked.check()
    return asked
