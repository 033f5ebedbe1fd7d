"""Routes of history: wall clocks, commits, tags, differences between times, restore and truncation."""

from __future__ import annotations

from datetime import datetime
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from starlette.responses import Response

from persist.client.arguments import columns_of, read_attributes
from persist.client.commit_info import entry_json, read_place, to_history_entry
from persist.client.contents_diff import Changes
from persist.client.history_api import ShardTag, tag_json
from persist.client.optimistic_loop import RETRIES_MAX
from persist.client.restore_and_truncate import RETRACT, mode_of
from persist.client.timestamps import datetime_text, instant_of, instant_text, read_instant, read_point, resolve_time
from persist.codecs import rows
from persist.core import commands as c
from persist.core.audit_log import PAGE_MAX
from persist.core.commands import MANAGE, READ, WRITE
from persist.core.errors import InvalidUsage, NotReadable
from persist.core.frontier import TIME_MAX
from persist.core.ids import check_shard_name
from persist.core.named_holds import check_tag_name
from persist.formats.http_messages import RECORD
from persist.formats.records import encoded
from rpc.app_state import WAIT_S_MAX, principal_of, service_of, shard_of
from rpc.route import Router
from rpc.routes.parameters import (
    AsOf,
    At,
    Format,
    Frontier,
    IdempotencyToken,
    commit,
    frontier,
    json_response,
    run_long,
    run_on_shard,
    token_of,
)
from rpc.routes.row_routes import open_shard, streamed, timestamp_header

# Wall clocks and commit history.


router = Router(prefix="/v1/shards", tags=["history"])


@router.on("GET /{name}/time-at", (READ,), "The times that were complete at a wall clock")
async def time_at(
    request: Request,
    timestamp: Annotated[str, Query(description="With a time zone (RFC 3339).", max_length=64)],
    wait: Annotated[float, Query(ge=0, le=WAIT_S_MAX, description="Maximum seconds to wait for a future one.")] = 0.0,
) -> Response:
    """All times before `frontier` were complete; the answer never changes. `as_of` is the latest of them."""
    service, name = service_of(request), shard_of(request)
    instant = read_instant("parameter timestamp", timestamp)
    resolution = await service.work.run(partial(resolve_time, service.transport, name, instant, wait, wait))
    upper = resolution.upper.element
    as_of = {} if upper is None or upper == 0 else {"as_of": upper - 1}
    return json_response({"frontier": resolution.upper.to_json(), **as_of, "timestamp": instant_text(resolution.at_ms)})


@router.on("GET /{name}/timestamp-of", (READ,), "The wall clock at which a time became readable")
async def timestamp_of(request: Request, time: Annotated[int, Query(ge=0, le=TIME_MAX)]) -> Response:
    """`timestamp` is null if it is unknown."""
    service, name = service_of(request), shard_of(request)
    instant = await service.work.run(instant_of, service.transport, name, time, service.handles.read.retry_s)
    return json_response({"time": time, "timestamp": datetime_text(instant)})


@router.on(
    "POST /{name}/forget",
    (MANAGE,),
    "Forget history before a time now, as far as readers allow",
    audit="forget history",
)
async def forget(request: Request, before: Frontier) -> Response:
    return await commit(request, c.ForgetHistory(frontier(before, "before")))


@router.on("GET /{name}/history", (READ,), "Commit history: an entry for each command that changed the shard")
async def history(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX, description="Maximum number of entries.")] = 100,
    before: Annotated[
        str | None,
        Query(
            description="Continue from this place: `following` of the previous page.", examples=["7.0"], max_length=32
        ),
    ] = None,
    maintenance: Annotated[bool, Query(description="Include merges, collections, and expiry of history.")] = False,
) -> Response:
    """Newest first. `following` is null at the end; a shorter page may have more."""
    service, name = service_of(request), shard_of(request)
    place = read_place("parameter before", before)
    page = await service.work.run(service.location.history_page, name, place, limit, maintenance)
    if request.headers.get("accept") == RECORD:
        return Response(encoded(page), media_type=RECORD)
    following = None if page.following is None else f"{page.following.seqno}.{page.following.number}"
    return json_response(
        {"entries": [entry_json(to_history_entry(entry)) for entry in page.entries], "following": following}
    )


# Tags: times that stay readable when since passes them.


@router.on("GET /{name}/tags", (READ,), "The tags of a shard")
async def tags(request: Request) -> Response:
    named = (await service_of(request).state(shard_of(request))).tags
    return json_response({"tags": [tag_json(ShardTag.of(tag, named[tag])) for tag in sorted(named)]})


@router.on("GET /{name}/tags/{tag}", (READ,), "One tag")
async def show_tag(request: Request, tag: str) -> Response:
    """410 if there is no such tag."""
    name = shard_of(request)
    named = (await service_of(request).state(name)).tags.get(check_tag_name(tag))
    if named is None:
        raise NotReadable(f"shard {name!r} has no tag {tag!r}", as_of=None, tag=tag)
    return json_response(tag_json(ShardTag.of(tag, named)))


@router.on(
    "PUT /{name}/tags/{tag}", (MANAGE,), "Keep a time readable under a name, even when since passes it", audit="set tag"
)
async def put(
    request: Request,
    tag: str,
    at: At,
    keep: Annotated[
        str | None, Query(description="For how long, such as `400d`; default: forever.", max_length=32)
    ] = None,
) -> Response:
    """An existing tag keeps its time, and gets this `keep`. 409 if it has another time."""
    return json_response(tag_json(await run_on_shard(request, lambda shard: shard.tag(tag, at, keep=keep))))


@router.on("DELETE /{name}/tags/{tag}", (MANAGE,), "Delete a tag", audit="remove tag")
async def delete(request: Request, tag: str) -> Response:
    """`removed` says whether it existed. Repeating the request is safe."""
    return json_response({"tag": tag, "removed": await run_on_shard(request, lambda shard: shard.untag(tag))})


# Differences, restore and truncation.

Retries = Annotated[int, Query(ge=0, le=RETRIES_MAX, description="Retries after concurrent writes.")]


def _points(
    start: Annotated[str, Query(description="A time, or a wall clock with a time zone (RFC 3339).", max_length=64)],
    end: Annotated[str | None, Query(description="Likewise; default: the latest complete time.", max_length=64)] = None,
) -> tuple[int | datetime, int | datetime | None]:
    return read_point("parameter start", start), None if end is None else read_point("parameter end", end)


Points = Annotated[tuple[int | datetime, int | datetime | None], Depends(_points)]


@router.on("GET /{name}/changes", (READ,), "The difference between two times", response_class=Response)
async def changes(
    request: Request,
    points: Points,
    other: Annotated[str | None, Query(description="A shard to compare with at `end`; default: this one.")] = None,
    columns: Annotated[str | None, Query(description="Names of columns, comma-separated; default: all.")] = None,
    form: Format = None,
    wait: Annotated[float, Query(ge=0, le=WAIT_S_MAX, description="Maximum seconds to wait for the times.")] = 10.0,
) -> Response:
    """Streamed in key order; `__diff` is the multiplicity of a row at `end` minus that at `start`.

    The headers `persist-start` and `persist-end` have the times, `persist-start-timestamp` and `persist-end-timestamp`
    the wall clocks of the request. A stream that breaks off is incomplete.
    """
    service, name = service_of(request), shard_of(request)
    for compared in {name, name if other is None else check_shard_name(other)}:
        principal_of(request).require(READ, compared)
    format_name = rows.format_of(request.headers.get("accept"), form)

    def opening() -> Changes:
        shard, later = open_shard(service, name), None if other is None else open_shard(service, other)
        return shard.changes(*points, other=later, columns=columns_of(columns), wait_s=wait)

    def headers(opened: Changes) -> dict[str, str]:
        return {
            "persist-start": str(opened.start),
            "persist-end": str(opened.end),
            **timestamp_header("persist-start-timestamp", opened.start_timestamp),
            **timestamp_header("persist-end-timestamp", opened.end_timestamp),
        }

    return await streamed(service, opening, headers, format_name)


@router.on("POST /{name}/restore", (WRITE,), "Restore the contents of an earlier time", audit="restore")
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


@router.on("POST /{name}/truncate", (WRITE,), "Delete the rows written before a time", audit="truncate")
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
