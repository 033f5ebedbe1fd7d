"""What a shard was: the changes between two of its times, making it again what it was, and truncating it."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

from fastapi import Depends, Query, Request
from starlette.responses import Response

from persist.client.arguments import columns_of, read_attributes
from persist.client.changes import Changes
from persist.client.connect import Client
from persist.client.rewriting import RETRIES_MAX
from persist.client.shard import Shard
from persist.client.truncate import RETRACT, mode_of
from persist.client.wall_clock import read_point
from persist.codecs import rows
from persist.core.commands import READ, WRITE
from persist.core.errors import InvalidUsage
from persist.core.ids import check_shard_name
from rpc.route import Router
from rpc.routes.parameters import AsOf, Format, IdempotencyToken, token_of
from rpc.routes.rows import streamed, timestamp_header
from rpc.routes.worked import worked
from rpc.service import WAIT_S_MAX, Service, principal_of, service_of, shard_of

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
        shard, later = _shard(service, name), None if other is None else _shard(service, other)
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


def _shard(service: Service, name: str) -> Shard:
    return Client(service.transport, service.handles).shard(name)


def _headers(found: Changes) -> dict[str, str]:
    return {
        "persist-start": str(found.start),
        "persist-end": str(found.end),
        **timestamp_header("persist-start-timestamp", found.start_timestamp),
        **timestamp_header("persist-end-timestamp", found.end_timestamp),
    }
