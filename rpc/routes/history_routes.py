"""Routes of history: wall clocks, settings, commit history, tags, retention policies and stream cuts."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from fastapi import Query, Request
from starlette.responses import Response

from persist.client.commit_info import entry_json, entry_shown, read_place
from persist.client.history_api import ShardTag, settings_json, tag_json
from persist.client.optimistic_loop import RETRIES_MAX
from persist.client.row_retention import (
    RowRetention,
)
from persist.client.shard import Shard
from persist.client.stream_cuts import (
    ASKED_AT_ONCE,
    SHARDS_MAX,
    TEXT_CHARS_MAX,
    TRUNCATED_AT_ONCE,
    Cut,
    CutRequest,
    TruncationRequest,
    take,
    truncate,
)
from persist.client.timestamps import datetime_text, instant_of, instant_text, read_instant, resolved
from persist.core import commands as c
from persist.core.audit_log import PAGE_MAX
from persist.core.commands import MAINTAIN, MANAGE, READ, WRITE
from persist.core.errors import InvalidUsage, NotReadable
from persist.core.ids import check_shard_name
from persist.core.named_holds import check_tag_name
from persist.core.shard_settings import MARK_EVERY_MS, ShardSettings, history_ms
from persist.formats.http_messages import RECORD, result_to_json
from persist.formats.records import encoded
from rpc.app_state import WAIT_S_MAX, principal_of, service_of, shard_of
from rpc.audit import MANY
from rpc.auth import Principal
from rpc.route_table import Router
from rpc.routes.parameters import (
    IF_MATCH,
    At,
    Frontier,
    JsonBody,
    asking_for,
    caller_of,
    frontier,
    json_body,
    json_response,
    read_as,
    version_of,
    with_shard,
    worked,
)

# Wall clocks, settings of a shard, and its history.


router = Router(prefix="/v1/shards", tags=["history"])
SETTINGS_BYTES_MAX = 64 * 1024


class _SettingsBody(JsonBody):
    history: Any
    mark_every_ms: int = MARK_EVERY_MS


@router.on("GET", "/{name}/time-at", (READ,), summary="Which times were complete by a wall clock")
async def time_at(
    request: Request,
    timestamp: Annotated[str, Query(description="With its zone (RFC 3339).", max_length=64)],
    wait: Annotated[float, Query(ge=0, le=3600, description="Seconds to wait if it is to come.")] = 0.0,
) -> Response:
    """`frontier`: every time before it was complete; it is the same for ever. `as_of` is the latest of them."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    when = read_instant("parameter timestamp", timestamp)
    wait_s = min(wait, WAIT_S_MAX)
    found = await service.work.run(partial(resolved, service.transport, name, when, wait_s, wait_s))
    upper = found.upper.element
    as_of = {} if upper is None or upper == 0 else {"as_of": upper - 1}
    return json_response({"frontier": found.upper.to_json(), **as_of, "timestamp": instant_text(found.at_ms)})


@router.on("GET", "/{name}/timestamp-of", (READ,), summary="From which wall clock on a time is shown")
async def timestamp_of(request: Request, time: Annotated[int, Query(ge=0)]) -> Response:
    """`timestamp` is null where that is not known."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    shown = await service.work.run(instant_of, service.transport, name, time, service.handles.read.retry_s)
    return json_response({"time": time, "timestamp": datetime_text(shown)})


@router.on("GET", "/{name}/settings", (READ,), summary="The settings of a shard")
async def settings(request: Request) -> Response:
    service, name = service_of(request), check_shard_name(shard_of(request))
    return _settings((await service.state(name)).settings)


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
    """What is left out has its default. 409 where the settings have another version than If-Match says."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    version = version_of(request)
    body = await service.json(request, SETTINGS_BYTES_MAX, read_as(_SettingsBody))
    kept_ms, every_ms = history_ms(body.history), body.mark_every_ms
    known = (await service.state(name)).settings
    # Settings of that version have that policy of rows; of another version the command is refused.
    wanted = c.SetSettings(version, kept_ms, every_ms, known.rows)
    found = await service.apply(name, wanted, caller_of(request))
    assert isinstance(found, c.SettingsAre)
    return _settings(found.settings)


@router.on(
    "POST",
    "/{name}/forget",
    (MANAGE,),
    audit="forget history",
    summary="Let history before a time be forgotten now, as far as readers allow",
)
async def forget(request: Request, before: Frontier) -> Response:
    service, name = service_of(request), check_shard_name(shard_of(request))
    command = c.ForgetHistory(frontier(before, "before"))
    return json_response(result_to_json(await service.apply(name, command, caller_of(request))))


@router.on(
    "GET", "/{name}/history", (READ,), summary="What was done to a shard: an entry for each command that changed it"
)
async def history(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX, description="At most so many entries.")] = 100,
    before: Annotated[
        str | None,
        Query(description="Go on before this place: `following` of the page before.", examples=["7.0"], max_length=32),
    ] = None,
    maintenance: Annotated[bool, Query(description="Also merges, collections, and what was forgotten by age.")] = False,
) -> Response:
    """Newest first. `following` is null where there are no more; a page that ends early tells where it goes on."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    place = read_place("parameter before", before)
    page = await service.work.run(service.location.history_page, name, place, limit, maintenance)
    if request.headers.get("accept") == RECORD:
        return Response(encoded(page), media_type=RECORD)
    following = None if page.following is None else f"{page.following.seqno}.{page.following.number}"
    return json_response(
        {"entries": [entry_json(entry_shown(entry)) for entry in page.entries], "following": following}
    )


def _settings(found: ShardSettings) -> Response:
    return json_response(settings_json(found), {"etag": f'"{found.version}"'})


# Tags: times of a shard that stay readable although since has passed them.


@router.on("GET", "/{name}/tags", (READ,), summary="The tags of a shard")
async def tags(request: Request) -> Response:
    service, name = service_of(request), check_shard_name(shard_of(request))
    found = (await service.state(name)).tags
    return json_response({"tags": [tag_json(ShardTag.of(tag, found[tag])) for tag in sorted(found)]})


@router.on("GET", "/{name}/tags/{tag}", (READ,), summary="One tag")
async def one(request: Request, tag: str) -> Response:
    """410 where there is no such tag."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    found = (await service.state(name)).tags.get(check_tag_name(tag))
    if found is None:
        raise NotReadable(f"shard {name!r} has no tag {tag!r}", as_of=None, tag=tag)
    return json_response(tag_json(ShardTag.of(tag, found)))


@router.on(
    "PUT",
    "/{name}/tags/{tag}",
    (MANAGE,),
    audit="set tag",
    summary="Keep a time readable under a name, when since passes it too",
)
async def put(
    request: Request,
    tag: str,
    at: At,
    keep: Annotated[str | None, Query(description="For so long, as `400d`; else for ever.", max_length=32)] = None,
) -> Response:
    """A tag that is there keeps its time, and gets this `keep`. 409 where it is at another time."""
    return json_response(tag_json(await with_shard(request, lambda shard: shard.tag(tag, at, keep=keep))))


@router.on(
    "DELETE", "/{name}/tags/{tag}", (MANAGE,), audit="remove tag", summary="Take a tag away: its time may be forgotten"
)
async def delete(request: Request, tag: str) -> Response:
    """`removed` tells whether it was there. Repeating it is safe."""
    return json_response({"tag": tag, "removed": await with_shard(request, lambda shard: shard.untag(tag))})


# Policies of rows: which rows a shard keeps, what holds its policy back, and running it now.


BODY_BYTES_MAX = 64 * 1024
_EXAMPLE = {"age": "90d", "bytes": "500GiB", "cut_every": "1d", "consumers": ["billing"], "consumers_max_age": "120d"}


@router.on("GET", "/{name}/retention", (READ,), summary="Which rows a shard keeps, and what holds its policy back")
async def show(request: Request) -> Response:
    """`policy` is null where all rows are kept. `held_by` has a sentence for everything that holds it back."""
    return _policy_json(await with_shard(request, Shard.retention))


@router.on(
    "PUT",
    "/{name}/retention",
    (MANAGE,),
    audit="retention",
    audits_body=True,
    summary="Say which rows a shard keeps",
    openapi_extra=json_body(None, [IF_MATCH], example=_EXAMPLE),
)
async def configure_retention(
    request: Request,
    confirm: Annotated[bool, Query(description="Also if more than half of the rows go at once.")] = False,
) -> Response:
    """`null` keeps all rows. 409 where the settings have another version than If-Match says."""
    service, version = service_of(request), version_of(request)
    policy = await service.json(request, BODY_BYTES_MAX, _policy_of)
    with service.snapshots:  # to see how much would go
        asked = partial(Shard.retain, policy=policy, confirm=confirm, expected_version=version)
        return _policy_json(await with_shard(request, asked))


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
    return await worked(request, lambda shard: shard.run_retention(dry_run=dry_run))


def _policy_of(wanted: Any) -> dict[str, Any] | None:
    """The policy of a body. Raises InvalidUsage."""
    if wanted is not None and not isinstance(wanted, dict):
        raise InvalidUsage('the body must be a JSON object such as {"age": "90d"}, or null to keep all rows')
    return wanted


def _policy_json(found: RowRetention) -> Response:
    headers = {"etag": f'"{found.version}"'}
    return json_response(found.to_json(), headers)


# Cuts: a frontier for each of many shards, and truncating all of them by it.


cuts_router = Router(prefix="/v1", tags=["history"])


class _Cut(JsonBody):
    """Of which shards: `shards` or `prefix`; by what: `at` (RFC 3339), `cursors`, or neither."""

    shards: Annotated[tuple[str, ...], msgspec.Meta(max_length=SHARDS_MAX)] | None = None
    prefix: str | None = None
    at: str | None = None
    cursors: tuple[str, ...] = ()


_CUT = {"v": 1, "location": "…", "epoch": 1, "taken_ms": 0, "kind": "upper", "shards": {"orders": [7]}, "crc": 0}


@cuts_router.on(
    "POST",
    "/cuts",
    (READ,),
    summary="A frontier for each of many shards, by which they can be truncated",
    openapi_extra=json_body(_Cut, example={"prefix": "eu/", "at": "2030-01-01T12:00:00Z"}),
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
    work = partial(truncate, asking, given, service.handles, TruncationRequest(dry_run, retries))
    service.snapshots.take(TRUNCATED_AT_ONCE)  # each takes as much memory as one
    try:
        found = await service.work.run(work)
    finally:
        service.snapshots.give_back(TRUNCATED_AT_ONCE)
    return json_response(found.to_json())


def _require(principal: Principal, given: Cut) -> None:
    for name in given.shards:
        principal.require(WRITE, name)


def _asked(wanted: Any) -> CutRequest:
    """What a body asks for. Raises InvalidUsage."""
    body = read_as(_Cut)(wanted)
    at = None if body.at is None else read_instant("at", body.at)
    asked = CutRequest(body.shards, body.prefix, at, body.cursors)
    asked.check()
    return asked
