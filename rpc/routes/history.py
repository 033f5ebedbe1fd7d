"""Wall clocks, settings of a shard, and its history."""

from __future__ import annotations

import json
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request
from starlette.responses import Response

from persist.client.telling import entry_json, entry_shown, read_place
from persist.client.wall_clock import instant_text, read_instant, resolved
from persist.core import commands as c
from persist.core.commands import MANAGE, READ
from persist.core.ids import check_shard_name
from persist.core.recorded import PAGE_MAX
from persist.core.shard_settings import MARK_EVERY_MS, ShardSettings, history_ms, history_text
from persist.formats.http_messages import RECORD, result_to_json
from persist.formats.records import encoded
from rpc.route import Router
from rpc.routes.parameters import IF_MATCH, Frontier, JsonBody, caller_of, frontier, read_as, version_of
from rpc.service import WAIT_S_MAX, service_of, shard_of

router = Router(prefix="/v1/shards", tags=["history"])
SETTINGS_BYTES_MAX = 64 * 1024

_SETTINGS_BODY: dict[str, Any] = {
    "parameters": [IF_MATCH],
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"type": "object"}, "example": {"history": "30d", "mark_every_ms": 1000}}
        },
    },
}


class _Settings(JsonBody):
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
    return _json({"frontier": found.upper.to_json(), **as_of, "timestamp": instant_text(found.at_ms)})


@router.on("GET", "/{name}/timestamp-of", (READ,), summary="From which wall clock on a time is shown")
async def timestamp_of(request: Request, time: Annotated[int, Query(ge=0)]) -> Response:
    """`timestamp` is null where that is not known."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    found = await service.apply(name, c.TimeShown(time))
    assert isinstance(found, c.ShownFrom)
    return _json({"time": time, "timestamp": None if found.at_ms is None else instant_text(found.at_ms)})


@router.on("GET", "/{name}/settings", (READ,), summary="The settings of a shard")
async def settings(request: Request) -> Response:
    service, name = service_of(request), check_shard_name(shard_of(request))
    found = await service.apply(name, c.ReadShardSettings())
    assert isinstance(found, c.SettingsAre)
    return _settings(found.settings)


@router.on(
    "PUT",
    "/{name}/settings",
    (MANAGE,),
    audit="settings",
    audits_body=True,
    summary="Change the settings of a shard",
    openapi_extra=_SETTINGS_BODY,
)
async def configure(request: Request) -> Response:
    """What is left out has its default. 409 where the settings have another version than If-Match says."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    version = version_of(request)
    body = await service.json(request, SETTINGS_BYTES_MAX, read_as(_Settings))
    kept_ms, every_ms = history_ms(body.history), body.mark_every_ms
    known = await service.apply(name, c.ReadShardSettings())
    assert isinstance(known, c.SettingsAre)
    # Settings of that version have that policy of rows; of another version the command is refused.
    wanted = c.SetSettings(version, kept_ms, every_ms, known.settings.rows)
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
    return _json(result_to_json(await service.apply(name, command, caller_of(request))))


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
    return _json({"entries": [entry_json(entry_shown(told)) for told in page.told], "following": following})


def _settings(found: ShardSettings) -> Response:
    history = history_text(found.history_ms) if found.version else None
    shown = {"history": history, "mark_every_ms": found.mark_every_ms, "version": found.version}
    return _json(shown, {"etag": f'"{found.version}"'})


def _json(value: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(value, separators=(",", ":")), media_type="application/json", headers=headers)
