"""Routes of restore, differences between times, truncation, and erasure."""

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
from persist.parts.exact_numbers import EXACT_NUMBERS
from persist.parts.python_values import decode_json_keys
from rpc.app_state import WAIT_S_MAX, principal_of, service_of, shard_of
from rpc.route_table import Router
from rpc.routes.parameters import (
    AsOf,
    Format,
    IdempotencyToken,
    JsonBody,
    body_reader,
    json_body,
    json_response,
    run_long,
    run_on_shard,
    run_with_body,
    token_of,
)
from rpc.routes.row_routes import open_shard, streamed, timestamp_header

Retries = Annotated[int, Query(ge=0, le=RETRIES_MAX, description="Retries after concurrent writes.")]
router = Router(prefix="/v1/shards", tags=["history"])


def _points(
    start: Annotated[str, Query(description="A time, or a wall clock with a time zone (RFC 3339).", max_length=64)],
    end: Annotated[str | None, Query(description="Likewise; default: the latest complete time.", max_length=64)] = None,
) -> tuple[int | datetime, int | datetime | None]:
    return read_point("parameter start", start), None if end is None else read_point("parameter end", end)


Points = Annotated[tuple[int | datetime, int | datetime | None], Depends(_points)]


@router.on("GET", "/{name}/changes", (READ,), summary="The difference between two times", response_class=Response)
async def changes(
    request: Request,
    points: Points,
    other: Annotated[str | None, Query(description="A shard to compare with at `end`; default: this one.")] = None,
    columns: Annotated[str | None, Query(description="Names of columns, comma-separated; default: all.")] = None,
    form: Format = None,
    wait: Annotated[float, Query(ge=0, le=3600, description="Maximum seconds to wait for the times.")] = 10.0,
) -> Response:
    """Streamed in key order; `__diff` is the multiplicity of a row at `end` minus that at `start`.

    The headers `persist-start` and `persist-end` have the times, `persist-start-timestamp` and `persist-end-timestamp`
    the wall clocks of the request. A stream that breaks off is incomplete.
    """
    service, name = service_of(request), shard_of(request)
    for compared in {name, name if other is None else check_shard_name(other)}:
        principal_of(request).require(READ, compared)
    format_name, wait_s = rows.format_of(request.headers.get("accept"), form), min(wait, WAIT_S_MAX)

    def opening() -> Changes:
        shard, later = open_shard(service, name), None if other is None else open_shard(service, other)
        return shard.changes(*points, other=later, columns=columns_of(columns), wait_s=wait_s)

    return await streamed(service, opening, _headers, format_name)


@router.on("POST", "/{name}/restore", (WRITE,), audit="restore", summary="Restore the contents of an earlier time")
async def restore(
    request: Request,
    as_of: AsOf,
    attributes: Annotated[
        str | None,
        Query(
            description="Attributes to set in the same commit, as a JSON object; null unsets. Others are kept.",
            examples=['{"position": 416}'],
            max_length=64 * 1024,
        ),
    ] = None,
    retries: Retries = 0,
    token: IdempotencyToken = None,
) -> Response:
    """`lower` and `upper` are equal if no row differed. 409: there were concurrent writes, and nothing was changed."""
    if as_of is None:
        raise InvalidUsage("give the time to restore, as as_of or as timestamp")
    retry_token = token_of(request, token)
    service_of(request).quotas.check_room(principal_of(request), shard_of(request))
    changes = () if attributes is None else read_attributes("parameter attributes", attributes)
    return await run_long(
        request, lambda shard: shard.restore(as_of, token=retry_token, retries=retries, attributes=changes)
    )


@router.on("POST", "/{name}/truncate", (WRITE,), audit="truncate", summary="Delete the rows written before a time")
async def truncate(  # noqa: PLR0913 - a query parameter each
    request: Request,
    before: Annotated[str, Query(description="A time, or a wall clock with a time zone (RFC 3339).", max_length=64)],
    mode: Annotated[str, Query(description="`retract`, or `drop`: without reading rows.", max_length=16)] = RETRACT,
    dry_run: Annotated[bool, Query(description="Report how many rows would be deleted, and change nothing.")] = False,
    retries: Retries = 0,
    force: Annotated[bool, Query(description="Take a time at once in a shard that is fed by append.")] = False,
    token: IdempotencyToken = None,
) -> Response:
    """`lower` and `upper` are equal if nothing was deleted. 409: there were concurrent writes; nothing was changed."""
    point, retry_token = read_point("parameter before", before), token_of(request, token)
    options: dict[str, Any] = {"mode": mode_of(mode), "dry_run": dry_run, "retries": retries, "force": force}
    return await run_long(request, lambda shard: shard.truncate(point, token=retry_token, **options))


def _headers(changes: Changes) -> dict[str, str]:
    return {
        "persist-start": str(changes.start),
        "persist-end": str(changes.end),
        **timestamp_header("persist-start-timestamp", changes.start_timestamp),
        **timestamp_header("persist-end-timestamp", changes.end_timestamp),
    }


# Erasures: rows that are deleted from the history too, their progress, and their certificates.


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
    "POST",
    "/{name}/erasures",
    (ADMIN,),
    audit="erase",
    frees=True,
    summary="Erase rows, including their history",
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
            deadline=body.deadline,
            reason=body.reason,
            tags=body.tags,
            force=body.force,
            token=retry_token,
        )

    return await run_with_body(request, BODY_BYTES_MAX, work)


@router.on(
    "GET",
    "/{name}/erasures",
    (ADMIN,),
    summary="The progress of erasures, or what still holds rows that were deleted before a time",
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


@router.on("GET", "/{name}/erasures/{erasure}", (ADMIN,), summary="The progress of an erasure, or its certificate")
async def show_erasure(request: Request, erasure: str) -> Response:
    status = await run_on_shard(request, lambda shard: shard.erased(erasure))
    return json_response(status.to_json())


def _read(data: bytes) -> _Erasure:
    """The request in a body. Raises InvalidUsage, which does not quote it, because it may hold personal data."""
    try:
        value = json.loads(data, object_pairs_hook=named_once, **EXACT_NUMBERS)
    except (ValueError, RecursionError):
        raise InvalidUsage("the body is not valid JSON") from None
    body = body_reader(_Erasure)(value)
    if body.gone != (body.keys is None and body.where is None):
        raise InvalidUsage("give keys or where; or gone: true, to erase what was retracted or truncated before")
    return body
