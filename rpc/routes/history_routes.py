"""Routes of history: wall clocks, settings, commit history, tags, retention policies and stream cuts."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import Query, Request
from starlette.responses import Response

from persist.client.commit_info import entry_json, read_place, to_history_entry
from persist.client.history_api import ShardTag, settings_json, tag_json
from persist.client.optimistic_loop import RETRIES_MAX
from persist.client.row_retention import RowRetention
from persist.client.shard import Shard
from persist.client.stream_cuts import (
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
from persist.client.timestamps import datetime_text, instant_of, instant_text, read_instant, resolve_time
from persist.core import commands as c
from persist.core.audit_log import PAGE_MAX
from persist.core.commands import MAINTAIN, MANAGE, READ, WRITE
from persist.core.errors import InvalidUsage, NotReadable
from persist.core.named_holds import check_tag_name
from persist.core.shard_settings import MARK_EVERY_MS, ShardSettings, history_ms
from persist.formats.http_messages import RECORD
from persist.formats.records import encoded
from rpc.app_state import WAIT_S_MAX, principal_of, service_of, shard_of
from rpc.audit import SHARDS_KEY
from rpc.route_table import Router
from rpc.routes.parameters import (
    IF_MATCH,
    At,
    Frontier,
    JsonBody,
    body_reader,
    caller_of,
    commit,
    frontier,
    json_body,
    json_response,
    run_long,
    run_on_shard,
    transport_for,
    version_of,
)

# Wall clocks, settings, and commit history.


router = Router(prefix="/v1/shards", tags=["history"])
SETTINGS_BYTES_MAX = 64 * 1024


class _SettingsBody(JsonBody):
    history: Any
    mark_every_ms: int = MARK_EVERY_MS


@router.on("GET", "/{name}/time-at", (READ,), summary="The times that were complete at a wall clock")
async def time_at(
    request: Request,
    timestamp: Annotated[str, Query(description="With a time zone (RFC 3339).", max_length=64)],
    wait: Annotated[float, Query(ge=0, le=3600, description="Maximum seconds to wait for a future one.")] = 0.0,
) -> Response:
    """All times before `frontier` were complete; the answer never changes. `as_of` is the latest of them."""
    service, name = service_of(request), shard_of(request)
    instant = read_instant("parameter timestamp", timestamp)
    wait_s = min(wait, WAIT_S_MAX)
    resolution = await service.work.run(partial(resolve_time, service.transport, name, instant, wait_s, wait_s))
    upper = resolution.upper.element
    as_of = {} if upper is None or upper == 0 else {"as_of": upper - 1}
    return json_response({"frontier": resolution.upper.to_json(), **as_of, "timestamp": instant_text(resolution.at_ms)})


@router.on("GET", "/{name}/timestamp-of", (READ,), summary="The wall clock at which a time became readable")
async def timestamp_of(request: Request, time: Annotated[int, Query(ge=0)]) -> Response:
    """`timestamp` is null if it is unknown."""
    service, name = service_of(request), shard_of(request)
    instant = await service.work.run(instant_of, service.transport, name, time, service.handles.read.retry_s)
    return json_response({"time": time, "timestamp": datetime_text(instant)})


@router.on("GET", "/{name}/settings", (READ,), summary="The settings of a shard")
async def settings(request: Request) -> Response:
    return _settings_response((await service_of(request).state(shard_of(request))).settings)


@router.on(
    "PUT",
    "/{name}/settings",
    (MANAGE,),
    audit="settings",
    audits_body=True,
    summary="Change the settings of a shard",
    openapi_extra=json_body(_SettingsBody, [IF_MATCH], example={"history": "30d", "mark_every_ms": 1000}),
)
async def configure(request: Request) -> Response:
    """Omitted settings get their defaults. 409 if the current version is not that of If-Match."""
    service, name = service_of(request), shard_of(request)
    version = version_of(request)
    body = await service.json(request, SETTINGS_BYTES_MAX, body_reader(_SettingsBody))
    rows = (await service.state(name)).settings.rows  # unchanged, as the command checks the version
    command = c.SetSettings(version, history_ms(body.history), body.mark_every_ms, rows)
    result = await service.apply(name, command, caller_of(request))
    assert isinstance(result, c.SettingsAre)
    return _settings_response(result.settings)


@router.on(
    "POST",
    "/{name}/forget",
    (MANAGE,),
    audit="forget history",
    summary="Forget history before a time now, as far as readers allow",
)
async def forget(request: Request, before: Frontier) -> Response:
    return await commit(request, c.ForgetHistory(frontier(before, "before")))


@router.on(
    "GET", "/{name}/history", (READ,), summary="Commit history: an entry for each command that changed the shard"
)
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


def _settings_response(settings: ShardSettings) -> Response:
    return json_response(settings_json(settings), {"etag": f'"{settings.version}"'})


# Tags: times that stay readable when since passes them.


@router.on("GET", "/{name}/tags", (READ,), summary="The tags of a shard")
async def tags(request: Request) -> Response:
    named = (await service_of(request).state(shard_of(request))).tags
    return json_response({"tags": [tag_json(ShardTag.of(tag, named[tag])) for tag in sorted(named)]})


@router.on("GET", "/{name}/tags/{tag}", (READ,), summary="One tag")
async def show_tag(request: Request, tag: str) -> Response:
    """410 if there is no such tag."""
    name = shard_of(request)
    named = (await service_of(request).state(name)).tags.get(check_tag_name(tag))
    if named is None:
        raise NotReadable(f"shard {name!r} has no tag {tag!r}", as_of=None, tag=tag)
    return json_response(tag_json(ShardTag.of(tag, named)))


@router.on(
    "PUT",
    "/{name}/tags/{tag}",
    (MANAGE,),
    audit="set tag",
    summary="Keep a time readable under a name, even when since passes it",
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


@router.on("DELETE", "/{name}/tags/{tag}", (MANAGE,), audit="remove tag", summary="Delete a tag")
async def delete(request: Request, tag: str) -> Response:
    """`removed` says whether it existed. Repeating the request is safe."""
    return json_response({"tag": tag, "removed": await run_on_shard(request, lambda shard: shard.untag(tag))})


# Retention policies: their settings, what delays them, and running them now.


BODY_BYTES_MAX = 64 * 1024
_EXAMPLE = {"age": "90d", "bytes": "500GiB", "cut_every": "1d", "consumers": ["billing"], "consumers_max_age": "120d"}


@router.on("GET", "/{name}/retention", (READ,), summary="The retention policy, and what delays it")
async def show(request: Request) -> Response:
    """`policy` is null if all rows are kept. `held_by` has a sentence for everything that delays it."""
    return _policy_response(await run_on_shard(request, Shard.retention))


@router.on(
    "PUT",
    "/{name}/retention",
    (MANAGE,),
    audit="retention",
    audits_body=True,
    summary="Set the retention policy",
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


@router.on(
    "POST",
    "/{name}/retention/run",
    (MANAGE, MAINTAIN),
    audit="run retention",
    summary="Apply the retention policy now",
)
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
    "POST",
    "/cuts",
    (READ,),
    summary="Take a stream cut: a frontier for each of many shards",
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
    "POST",
    "/truncate",
    (WRITE,),
    audit="truncate",
    audits_body=True,
    summary="Truncate every shard of a cut",
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
