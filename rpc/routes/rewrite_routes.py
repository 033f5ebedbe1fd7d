"""Routes of restore, differences between times, and erasure."""

from __future__ import annotations

import json
from datetime import datetime
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from starlette.responses import Response

from persist.client.arguments import columns_of, read_attributes
from persist.client.contents_diff import Changes
from persist.client.embedded import erased_before
from persist.client.erasure_api import ErasureStatus
from persist.client.optimistic_loop import RETRIES_MAX
from persist.client.rewrites import RETRACT, mode_of
from persist.client.shard import Shard
from persist.client.timestamps import read_point
from persist.codecs import rows
from persist.core.commands import ADMIN, READ, WRITE
from persist.core.errors import InvalidUsage
from persist.core.frontier import TIME_MAX
from persist.core.ids import check_shard_name
from persist.formats.http_messages import named_once
from persist.parts.column_types import EXACT_NUMBERS
from persist.parts.python_values import decode_json_keys
from rpc.app_state import WAIT_S_MAX, principal_of, service_of, shard_of
from rpc.route_table import Router
from rpc.routes.parameters import (
    AsOf,
    Format,
    IdempotencyToken,
    JsonBody,
    json_body,
    json_response,
    read_as,
    token_of,
    with_shard,
    worked,
    worked_with_body,
)
from rpc.routes.row_routes import open_shard, streamed, timestamp_header

# What a shard was: the changes between two of its times, making it again what it was, and truncating it.


router = Router(prefix="/v1/shards", tags=["history"])


def _points(
    start: Annotated[str, Query(description="A time, or a wall clock with its zone (RFC 3339).", max_length=64)],
    end: Annotated[str | None, Query(description="The same; else the latest complete time.", max_length=64)] = None,
) -> tuple[int | datetime, int | datetime | None]:
    return read_point("parameter start", start), None if end is None else read_point("parameter end", end)


Points = Annotated[tuple[int | datetime, int | datetime | None], Depends(_points)]


@router.on(
    "GET", "/{name}/changes", (READ,), summary="What was added and removed between two times", response_class=Response
)
async def changes(
    request: Request,
    points: Points,
    other: Annotated[str | None, Query(description="The shard that is compared at `end`; else this.")] = None,
    columns: Annotated[str | None, Query(description="Names with commas; else all.")] = None,
    form: Format = None,
    wait: Annotated[float, Query(ge=0, le=3600, description="Seconds to wait for the times at most.")] = 10.0,
) -> Response:
    """Streamed in key order, with `__diff`: how often a row is there at `end` more than at `start`.

    The headers `persist-start` and `persist-end` tell the times, `persist-start-timestamp` and `persist-end-timestamp`
    the wall clocks that named them. A stream that breaks off is not whole.
    """
    service, name = service_of(request), check_shard_name(shard_of(request))
    for read in {name, name if other is None else check_shard_name(other)}:
        principal_of(request).require(READ, read)
    chosen, wait_s = rows.format_of(request.headers.get("accept"), form), min(wait, WAIT_S_MAX)

    def opening() -> Changes:
        shard, later = open_shard(service, name), None if other is None else open_shard(service, other)
        return shard.changes(*points, other=later, columns=columns_of(columns), wait_s=wait_s)

    return await streamed(service, opening, _headers, chosen)


@router.on(
    "POST", "/{name}/restore", (WRITE,), audit="restore", summary="Make the contents again what they were at a time"
)
async def restore(
    request: Request,
    as_of: AsOf,
    attributes: Annotated[
        str | None,
        Query(
            description="Attributes that are set in the same commit, as a JSON object; null unsets. Others are kept.",
            examples=['{"position": 416}'],
            max_length=64 * 1024,
        ),
    ] = None,
    retries: Annotated[int, Query(ge=0, le=RETRIES_MAX, description="How often, if others write meanwhile.")] = 0,
    token: IdempotencyToken = None,
) -> Response:
    """`lower` and `upper` are equal where no row differed. 409: others wrote meanwhile, and nothing was changed."""
    if as_of is None:
        raise InvalidUsage("give the time to restore, as as_of or as timestamp")
    given = token_of(request, token)
    service = service_of(request)
    service.quotas.room_for(principal_of(request), shard_of(request))
    changes = () if attributes is None else read_attributes("parameter attributes", attributes)
    return await worked(request, lambda shard: shard.restore(as_of, token=given, retries=retries, attributes=changes))


@router.on(
    "POST",
    "/{name}/truncate",
    (WRITE,),
    audit="truncate",
    summary="Take away what was there before a time and still is",
)
async def truncate(  # noqa: PLR0913 - a query parameter each
    request: Request,
    before: Annotated[str, Query(description="A time, or a wall clock with its zone (RFC 3339).", max_length=64)],
    mode: Annotated[str, Query(description="`retract`, or `drop`: no row is read.", max_length=16)] = RETRACT,
    dry_run: Annotated[bool, Query(description="Tell how many rows would go, and change nothing.")] = False,
    retries: Annotated[int, Query(ge=0, le=RETRIES_MAX, description="How often, if others write meanwhile.")] = 0,
    force: Annotated[bool, Query(description="Take a time at once in a shard that is fed by append.")] = False,
    token: IdempotencyToken = None,
) -> Response:
    """`lower` and `upper` are equal where nothing was taken away. 409: others wrote meanwhile; nothing was changed."""
    cut, given = read_point("parameter before", before), token_of(request, token)
    how = mode_of(mode)
    return await worked(
        request, lambda shard: shard.truncate(cut, mode=how, dry_run=dry_run, token=given, retries=retries, force=force)
    )


def _headers(found: Changes) -> dict[str, str]:
    return {
        "persist-start": str(found.start),
        "persist-end": str(found.end),
        **timestamp_header("persist-start-timestamp", found.start_timestamp),
        **timestamp_header("persist-end-timestamp", found.end_timestamp),
    }


# Erasures: rows that are taken away for good, how far that is, and the receipt.


BODY_BYTES_MAX = 1024 * 1024


class _Erasure(JsonBody):
    """Which rows: `keys` or `where`; or `gone`, those that were retracted or truncated before."""

    keys: Any = None
    where: str | None = None
    gone: bool = False
    deadline: str | None = None
    reason: str = ""
    tags: bool = False
    force: bool = False


_EXAMPLE = {"keys": [["ann"]], "deadline": "30d", "reason": "dsr-4711"}


@router.on(
    "POST",
    "/{name}/erasures",
    (ADMIN,),
    audit="erase",
    frees=True,
    summary="Take rows away for good",
    openapi_extra=json_body(_Erasure, example=_EXAMPLE),
)
async def erase(request: Request, token: IdempotencyToken = None) -> Response:
    """`keys` or `where` say which; `gone`: what was retracted or truncated before. The answer has its `id`.

    In a shard that is fed by `append` it is `pending` until the next commit of the writer; `force` takes a time.
    """
    given = token_of(request, token)

    def work(shard: Shard, data: bytes) -> ErasureStatus:
        wanted = _read(data)
        return shard.erase(
            keys=decode_json_keys(shard.schema, wanted.keys),
            where=wanted.where,
            deadline=wanted.deadline,
            reason=wanted.reason,
            tags=wanted.tags,
            force=wanted.force,
            token=given,
        )

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
        return json_response(await service.work.run(partial(erased_before, service.location, name, before)))
    found = await with_shard(request, Shard.erasures)
    return json_response({"erasures": [status.to_json() for status in found.values()]})


@router.on(
    "GET", "/{name}/erasures/{erasure}", (ADMIN,), summary="How far one erasure is: the receipt, once nothing is left"
)
async def one(request: Request, erasure: str) -> Response:
    found = await with_shard(request, lambda shard: shard.erased(erasure))
    return json_response(found.to_json())


def _read(data: bytes) -> _Erasure:
    """The question of a body. Raises InvalidUsage, which does not repeat it."""
    try:
        value = json.loads(data, object_pairs_hook=named_once, **EXACT_NUMBERS)
    except (ValueError, RecursionError):
        raise InvalidUsage("the body cannot be read as JSON") from None
    wanted = read_as(_Erasure)(value)
    if wanted.gone != (wanted.keys is None and wanted.where is None):
        raise InvalidUsage("give keys or where; or, to retract no row and let what went before go for good, gone: true")
    return wanted
