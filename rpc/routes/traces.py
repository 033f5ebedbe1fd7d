"""What shards are made of and how they move, for those who look: served from the cached States, and cheap to follow."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Any

from fastapi import Query, Request
from starlette.responses import Response

from persist.client.bulk import AT_ONCE, PAGE_MAX
from persist.client.cutting import each
from persist.client.embedded import view_state
from persist.core.commands import ADMIN, MANAGE, READ
from persist.core.errors import UnknownShard
from persist.core.ids import check_shard_name
from persist.core.phases import dropped, outlived
from persist.core.state import State
from persist.core.view import ViewRequest
from rpc.doors import still_allowed
from rpc.listen_frames import EVENTS, HEARTBEAT_S
from rpc.route import Router
from rpc.routes.listen import with_error
from rpc.routes.shards import BATCHES_ON_THE_LOOP_MAX
from rpc.service import Service, principal_of, service_of, shard_of
from rpc.streaming import HeldStream
from rpc.traces import activity_json, trace_json

router = Router(prefix="/v1", tags=["look"])
PAUSE_S = 0.5  # between two events of a stream at least
SHARE = 0.01  # of a processor that the events of one stream take at most: a long trace is told less often
_CACHED = ViewRequest(min_seqno=1, with_batches=False)
_FRESH = ViewRequest(with_batches=False)

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The trace; with `Accept: text/event-stream` an event `trace` for each version, some left out.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            EVENTS: {"schema": {"type": "string"}, "example": 'event: trace\ndata: {"shard": "orders"}\n\n'},
        },
    }
}


@router.on(
    "GET",
    "/shards/{name}/trace",
    (READ,),
    summary="Batches, merges under way, who holds since, recent commits",
    response_class=Response,
    responses=_RESPONSES,
)
async def trace(request: Request) -> Response:
    """With `Accept: text/event-stream` it goes on, with an event `trace` whenever the shard has moved, at most two a
    second. It costs the stores what a listener that waits costs, and writes nothing.

    What readers and cursors are called is told to the scopes `manage` and `admin`. A stream that fails ends with an
    event `error`.
    """
    service, name = service_of(request), check_shard_name(shard_of(request))
    tells_names = not {MANAGE, ADMIN}.isdisjoint(principal_of(request).scopes)
    if EVENTS not in request.headers.get("accept", ""):
        state = await service.watcher.state(name, _FRESH)
        _check_there(state)
        return Response(await _told(service, state, tells_names), media_type="application/json")
    _check_there(await service.watcher.state(name, _FRESH))
    async with AsyncExitStack() as held:
        held.enter_context(service.listeners)
        events = _events(service, name, tells_names)
        return HeldStream(
            with_error(await held.enter_async_context(aclosing(events)), EVENTS, still_allowed(request)),
            held.pop_all(),
            media_type=EVENTS,
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )


@router.on("GET", "/activity", (READ,), summary="Shards in a line each: sizes, frontiers, and what was written last")
async def activity(
    request: Request,
    prefix: Annotated[str, Query(max_length=260)] = "",
    after: Annotated[str, Query(max_length=260, description="The last name of the page before.")] = "",
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = PAGE_MAX,
    cached: Annotated[
        bool, Query(description="What this server knows already will do; the store is not asked.")
    ] = False,
) -> dict[str, Any]:
    """Ascending by name. `following` is what `after` of the next page is; null where there are no more."""
    service = service_of(request)
    principal_of(request).require_prefix(prefix)
    names = await service.work.run(service.location.names, prefix, after, limit)
    told = await service.work.run(each, lambda name: _activity(service, name, cached), names, AT_ONCE)
    following = names[-1] if len(names) == limit else None
    return {"shards": [one for one in told if one is not None], "following": following}


def _activity(service: Service, name: str, cached: bool) -> dict[str, Any] | None:
    """None: it was dropped since it was listed."""
    try:
        state = view_state(service.location, name, _CACHED if cached else _FRESH)
    except UnknownShard:
        return None
    return None if state.is_closed else activity_json(state)


def _check_there(state: State) -> None:
    if state.is_closed:
        raise UnknownShard(dropped(state.name))


async def _told(service: Service, state: State, tells_names: bool) -> bytes:
    def told() -> bytes:
        return json.dumps(trace_json(state, tells_names=tells_names), separators=(",", ":")).encode()

    holds = len(state.leased_readers) + len(state.critical_readers) + len(state.tags)
    is_long = len(state.trace.batches) + holds > BATCHES_ON_THE_LOOP_MAX
    return await service.work.run(told) if is_long else told()


async def _events(service: Service, name: str, tells_names: bool) -> AsyncGenerator[bytes]:
    """An event for a version of the shard, then a pause, then one for whatever version it has by then."""
    watcher, monotonic = service.watcher, service.location.clock.monotonic
    shard, told = None, 0
    with watcher.watch(name) as watch:
        while not watcher.stopping.is_set():
            state = watch.machine.cached
            if state is None:
                state = await service.work.run(watch.machine.refresh)
            shard = shard or state.shard_id
            if state.shard_id != shard:
                raise UnknownShard(outlived(name))
            _check_there(state)
            if state.seqno <= told:
                if not await watch.wait(HEARTBEAT_S):
                    yield b": nothing new\n\n"
                continue
            started = monotonic()
            event = b"event: trace\ndata: " + await _told(service, state, tells_names) + b"\n\n"
            told, pause_s = int(state.seqno), max(PAUSE_S, (monotonic() - started) / SHARE)
            yield event
            while pause_s > 0 and not watcher.stopping.is_set():
                await _rest(watcher.stopping, min(pause_s, HEARTBEAT_S))
                pause_s -= HEARTBEAT_S
                if pause_s > 0:
                    yield b": resting\n\n"


async def _rest(stopping: asyncio.Event, seconds: float) -> None:
    """Wait so long, or until the server stops."""
    try:
        async with asyncio.timeout(seconds):
            await stopping.wait()
    except TimeoutError:
        return
