"""Routes that delete by age or for good: retention policies, erasures, and cuts, by which many shards are truncated."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import Query, Request
from starlette.responses import Response

from persist.client.embedded import erased_before
from persist.client.erasure_api import ErasureStatus
from persist.client.many_shards import (
    ASKED_AT_ONCE,
    SHARDS_MAX,
    TEXT_CHARS_MAX,
    TRUNCATED_AT_ONCE,
    Cut,
    CutRequest,
    TruncationRequest,
    take_cut,
    truncate_by_cut,
)
from persist.client.optimistic_loop import RETRIES_MAX
from persist.client.row_retention import RowRetention
from persist.client.shard import Shard
from persist.client.timestamps import read_instant
from persist.core.commands import ADMIN, MAINTAIN, MANAGE, READ, WRITE
from persist.core.errors import InvalidUsage
from persist.core.frontier import TIME_MAX
from persist.formats.http_messages import named_once
from persist.parts.exact_numbers import EXACT_NUMBERS
from persist.parts.python_values import decode_json_keys
from rpc.app_state import principal_of, service_of, shard_of
from rpc.audit import SHARDS_KEY
from rpc.route import Router
from rpc.routes.parameters import (
    IF_MATCH,
    IdempotencyToken,
    JsonBody,
    body_reader,
    json_body,
    json_response,
    run_long,
    run_on_shard,
    run_with_body,
    token_of,
    transport_for,
    version_of,
)

router = Router(prefix="/v1/shards", tags=["history"])

# Retention policies: their settings, what delays them, and running them now.


BODY_BYTES_MAX = 64 * 1024
_EXAMPLE = {"age": "90d", "bytes": "500GiB", "cut_every": "1d", "consumers": ["billing"], "consumers_max_age": "120d"}


@router.on("GET /{name}/retention", (READ,), "The retention policy, and what delays it")
async def show(request: Request) -> Response:
    """`policy` is null if all rows are kept. `held_by` has a sentence for everything that delays it."""
    return _policy_response(await run_on_shard(request, Shard.retention))


@router.on(
    "PUT /{name}/retention",
    (MANAGE,),
    "Set the retention policy",
    audit="retention",
    audits_body=True,
    openapi_extra=json_body(None, [IF_MATCH], example=_EXAMPLE),
)
async def configure_retention(
    request: Request,
    confirm: Annotated[bool, Query(description="Also if more than half of the rows are deleted at once.")] = False,
) -> Response:
    """`null` keeps all rows. 409 if the current version of the settings is not that of If-Match."""
    service, version = service_of(request), version_of(request)
    policy = await service.json(request, BODY_BYTES_MAX, _policy_of)
    with service.snapshots:  # it reads rows to see how many would be deleted
        retain = partial(Shard.retain, policy=policy, confirm=confirm, expected_version=version)
        return _policy_response(await run_on_shard(request, retain))


@router.on("POST /{name}/retention/run", (MANAGE, MAINTAIN), "Apply the retention policy now", audit="run retention")
async def run(
    request: Request,
    dry_run: Annotated[bool, Query(description="Only report what would be deleted by existing cuts.")] = False,
) -> Response:
    """Maintenance does this regularly. `truncated` is null if nothing is due. Repeating the request is safe."""
    return await run_long(request, lambda shard: shard.run_retention(dry_run=dry_run))


def _policy_of(body: Any) -> dict[str, Any] | None:
    """The policy in a body. Raises InvalidUsage."""
    if body is not None and not isinstance(body, dict):
        raise InvalidUsage('the body must be a JSON object such as {"age": "90d"}, or null to keep all rows')
    return body


def _policy_response(retention: RowRetention) -> Response:
    return json_response(retention.to_json(), {"etag": f'"{retention.version}"'})


# Erasures: rows that are deleted from the history too, their progress, and their certificates.

ERASURE_BYTES_MAX = 1024 * 1024


class _Erasure(JsonBody):
    """The rows: `keys` or `where`; or `gone`, those that were retracted or truncated before."""

    keys: Any = None
    where: str | None = None
    gone: bool = False
    deadline: str | None = None
    reason: str = ""
    tags: bool = False
    force: bool = False


_ERASURE_EXAMPLE = {"keys": [["ann"]], "deadline": "30d", "reason": "dsr-4711"}


@router.on(
    "POST /{name}/erasures",
    (ADMIN,),
    "Erase rows, including their history",
    audit="erase",
    frees=True,
    openapi_extra=json_body(_Erasure, example=_ERASURE_EXAMPLE),
)
async def erase(request: Request, token: IdempotencyToken = None) -> Response:
    """`keys` or `where` select the rows; `gone`: those retracted or truncated before. The answer has the `id`.

    In a shard that is fed by `append` it is `pending` until the writer's next commit; `force` takes a time.
    """
    retry_token = token_of(request, token)

    def work(shard: Shard, data: bytes) -> ErasureStatus:
        body = _read_erasure(data)
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

    return await run_with_body(request, ERASURE_BYTES_MAX, work)


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


def _read_erasure(data: bytes) -> _Erasure:
    """The request in a body. Raises InvalidUsage, which does not quote it, because it may hold personal data."""
    try:
        value = json.loads(data, object_pairs_hook=named_once, **EXACT_NUMBERS)
    except (ValueError, RecursionError):
        raise InvalidUsage("the body is not valid JSON") from None
    return body_reader(_Erasure)(value)


# Stream cuts: a frontier for each of many shards, by which all of them can be truncated.

cuts_router = Router(prefix="/v1", tags=["history"])


class _Cut(JsonBody):
    """The shards: `shards` or `prefix`; the frontiers: by `at` (RFC 3339), `cursors`, or the uppers."""

    shards: Annotated[tuple[str, ...], msgspec.Meta(max_length=SHARDS_MAX)] | None = None
    prefix: str | None = None
    at: str | None = None
    cursors: tuple[str, ...] = ()


_CUT = {"v": 1, "location": "…", "epoch": 1, "taken_ms": 0, "kind": "upper", "shards": {"orders": [7]}, "crc": 0}


@cuts_router.on(
    "POST /cuts",
    (READ,),
    "Take a stream cut: a frontier for each of many shards",
    openapi_extra=json_body(_Cut, example={"prefix": "eu/", "at": "2030-01-01T12:00:00Z"}),
)
async def cut(request: Request) -> Response:
    """Changes nothing. Pass `shards` or `prefix`; then `at` (RFC 3339), or `cursors`, or neither for the uppers."""
    service, principal = service_of(request), principal_of(request)
    wanted = await service.json(request, TEXT_CHARS_MAX, _cut_request)
    for name in wanted.names or ():
        principal.require(READ, name)
    if wanted.prefix is not None:
        principal.require_prefix(wanted.prefix)
    cut = await service.work.run(partial(take_cut, service.transport, wanted, service.handles, ASKED_AT_ONCE))
    return Response(cut.to_json(), media_type="application/json")


@cuts_router.on(
    "POST /truncate",
    (WRITE,),
    "Truncate every shard of a cut",
    audit="truncate",
    audits_body=True,
    openapi_extra=json_body(None, example=_CUT),
)
async def truncate_all(
    request: Request,
    dry_run: Annotated[bool, Query(description="Report how many rows would be deleted, and change nothing.")] = False,
    retries: Annotated[int, Query(ge=0, le=RETRIES_MAX, description="Retries after concurrent writes.")] = 0,
) -> Response:
    """The body is the cut. The answer has an outcome for each shard; if `complete` is false, repeat the request.

    Refused as a whole, before anything is written, unless the token may write to every shard of the cut.
    """
    service, principal = service_of(request), principal_of(request)
    cut = await service.json(request, TEXT_CHARS_MAX, Cut.of)
    for name in cut.shards:
        principal.require(WRITE, name)
    request.scope[SHARDS_KEY] = [] if dry_run else sorted(cut.shards)
    options = TruncationRequest(dry_run, retries)
    service.snapshots.take(TRUNCATED_AT_ONCE)  # each takes as much memory as one
    try:
        work = partial(truncate_by_cut, transport_for(request), cut, service.handles, options)
        result = await service.work.run(work)
    finally:
        service.snapshots.give_back(TRUNCATED_AT_ONCE)
    return json_response(result.to_json())


def _cut_request(value: Any) -> CutRequest:
    """The request in a body. Raises InvalidUsage."""
    body = body_reader(_Cut)(value)
    at = None if body.at is None else read_instant("at", body.at)
    wanted = CutRequest(body.shards, body.prefix, at, body.cursors)
    wanted.check()
    return wanted
