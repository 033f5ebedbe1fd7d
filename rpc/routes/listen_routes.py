"""Streams of updates: every update after a time, once and in order, pushed as it is committed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Annotated, Any

from fastapi import Query, Request
from starlette.responses import Response

from persist.client.connect import Client
from persist.client.timestamps import as_of_at, resolved
from persist.core import frontier as antichain
from persist.core.commands import MANAGE, READ
from persist.core.errors import InvalidUsage, PersistError, UnknownShard
from persist.core.frontier import Antichain
from persist.core.ids import ShardId, check_shard_name, parse, shard_id_of
from persist.core.phases import dropped
from persist.core.shard_view import SeenVersion, ViewRequest
from persist.parts import EVERYTHING, Selection
from rpc.app_state import Service, principal_of, service_of, shard_of
from rpc.change_streams import HeldStream
from rpc.errors import status_of
from rpc.listen_frames import EVENTS, FRAMES, ID_LENGTH_MAX, sse_error
from rpc.route_table import Router
from rpc.routes.parameters import After, Selecting, frontier, on_shard, read_seen, still_allowed

router = Router(prefix="/v1/shards", tags=["listen"])

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A stream that ends when `until` is reached, the shard is closed, or the server stops.",
        "content": {
            FRAMES: {"schema": {"type": "string", "format": "binary"}},
            EVENTS: {
                "schema": {"type": "string"},
                "example": 'event: updates\nid: 8.17.0192….s2c4…\ndata: {"lower": [7], "upper": [8], "rows": []}\n\n',
            },
        },
    },
    204: {"description": "The header Last-Event-ID names the end of a closed shard: no more will come."},
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a stream is to begin: a frontier, and, in a stream that goes on, what was read of which shard until then.

    `shard` is None for who begins, who takes whichever shard has the name.
    """

    frontier: Antichain
    seen: SeenVersion | None = None
    shard: ShardId | None = None


@router.on(
    "GET",
    "/{name}/listen",
    (READ,),
    summary="Every update after a time, as it comes",
    response_class=Response,
    responses=_RESPONSES,
)
async def listen(
    request: Request,
    after: After,
    selection: Selecting,
    until: Annotated[str, Query(max_length=32, description="End when all before this time was sent.")] = "[]",
    moves_since: Annotated[
        bool, Query(description="Whether since may follow it, if its token has the scope `manage`.")
    ] = True,
) -> Response:
    """Server-sent events with `Accept: text/event-stream` (rows as JSON), else frames with Arrow IPC.

    With `where`, `columns`, `start_key`, `end_key`, `key_prefix` or `key`: only such updates, and progress as ever. To
    resume, give the same ones.

    With `timestamp`: every update after what was there by that wall clock. The header `persist-after` tells the time.
    Resume with the header Last-Event-ID, or with `after` = the last event's upper - 1. An id is good for the shard that
    gave it: 404 (`unknown_shard`) where that was dropped, also where its name belongs to another one now. The shard's
    since follows a listener only if its token has the scope `manage`, and not with `moves_since=false`. A stream of
    events that fails ends with an event `error`.
    """
    service, name = service_of(request), check_shard_name(shard_of(request))
    principal = principal_of(request)
    moves = moves_since and service.tokens is not None and MANAGE in principal.scopes
    form = EVENTS if EVENTS in request.headers.get("accept", "") else FRAMES
    told, time = {}, after if not isinstance(after, datetime) else None
    if isinstance(after, datetime) and "last-event-id" not in request.headers:
        time = await _after_of(service, name, after)
        told = {"persist-after": "" if time is None else str(time)}
    start = _start(request, name, time)
    if start.shard is not None and await _is_at_the_end(service, name, start):
        return Response(status_code=204)  # by which a browser's EventSource knows not to come again
    if selection != EVERYTHING:
        selection = await service.work.run(partial(_selected, service, name, selection))
    async with AsyncExitStack() as held:
        held.enter_context(service.listeners)
        hold = await held.enter_async_context(service.listening.leases.hold(name, start.frontier, moves))
        _check_shard(name, start, hold.shard)
        frames = service.listening.stream(name, hold, start.frontier, frontier(until, "until"), form, selection)
        return HeldStream(
            with_error(await held.enter_async_context(aclosing(frames)), form, still_allowed(request)),
            held.pop_all(),
            media_type=form,
            headers={"cache-control": "no-store", "x-accel-buffering": "no", **told},
        )


def _selected(service: Service, name: str, selection: Selection) -> Selection:
    return on_shard(selection, Client(service.transport, service.handles).shard(name).schema)


async def _after_of(service: Service, name: str, when: datetime) -> int | None:
    """The last time that was complete by a wall clock; None: nothing was written by then."""
    found = await service.work.run(partial(resolved, service.transport, name, when, 0.0, 0.0))
    return None if found.upper.element == 0 else as_of_at(name, found)


async def with_error(frames: AsyncIterator[bytes], form: str, check: Callable[[], None]) -> AsyncIterator[bytes]:
    """The frames, and where they fail the reason, in a form that can tell it. Then the stream is cut off.

    So it is where the token is good no more: `check` is asked before each frame.
    """
    try:
        async for data in frames:
            check()
            yield data
    except PersistError as error:
        if form == EVENTS:
            yield sse_error(error, status_of(error))
        raise


async def _is_at_the_end(service: Service, name: str, start: _Place) -> bool:
    """Whether a stream that goes on has been given all of its shard, which is closed. Raises where it cannot go on."""
    state = await service.watcher.state(name, ViewRequest(min_seqno=1, with_batches=False))
    if state.shard_id != start.shard or start.frontier.is_empty:  # perhaps this process has not heard of it yet
        state = await service.work.run(service.location.machine(name).refresh)
    if state.is_closed:
        raise UnknownShard(dropped(name))
    _check_shard(name, start, state.shard_id)
    await service.work.run(service.location.machine(name).check_seen, state, start.seen)
    if start.frontier.is_empty and not state.upper.is_empty:
        raise InvalidUsage(f"the header Last-Event-ID names the end of shard {name!r}, which is not closed")
    return start.frontier.is_empty


def _check_shard(name: str, start: _Place, shard: ShardId) -> None:
    """UnknownShard: the stream is of another shard than the one that has the name."""
    if start.shard not in (None, shard):
        raise UnknownShard(
            f"the header Last-Event-ID is of an earlier shard {name!r}, which was dropped; the name belongs to another "
            "one now. Listen without the header to read that"
        )


def _start(request: Request, name: str, after: int | None) -> _Place:
    """What the parameters and the header Last-Event-ID ask for. Ids without a shard are of the first one of the name:
    they were given before names could be used again.
    """
    resumed = request.headers.get("last-event-id")
    if resumed is None:
        return _Place(antichain.frontier(0 if after is None else after + 1))
    time, *rest = resumed[: ID_LENGTH_MAX + 1].split(".", 3)
    seen = read_seen(".".join(rest[:2]), "Last-Event-ID") if rest else None
    shard = parse(ShardId, rest[2]) if len(rest) == 3 else shard_id_of(name)
    return _Place(frontier(time[:50], "Last-Event-ID"), seen, shard)
