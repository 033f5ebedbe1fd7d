"""Streams of updates: every update after a time, once and in order, pushed when it is committed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
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
from persist.core.ids import ShardId, parse, shard_id_of
from persist.core.phases import dropped
from persist.core.shard_view import SeenVersion, ViewRequest
from persist.parts import EVERYTHING, Selection
from rpc.app_state import Service, principal_of, service_of, shard_of
from rpc.change_streams import HeldStream
from rpc.errors import status_of
from rpc.listen_frames import EVENTS, FRAMES, ID_LENGTH_MAX, sse_error
from rpc.route_table import Router
from rpc.routes.parameters import After, Selecting, authorization_check, frontier, read_seen, resolve_selection

router = Router(prefix="/v1/shards", tags=["listen"])

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A stream that ends at `until`, when the shard is closed, or when the server stops.",
        "content": {
            FRAMES: {"schema": {"type": "string", "format": "binary"}},
            EVENTS: {
                "schema": {"type": "string"},
                "example": 'event: updates\nid: 8.17.0192….s2c4…\ndata: {"lower": [7], "upper": [8], "rows": []}\n\n',
            },
        },
    },
    204: {"description": "The header Last-Event-ID is of the end of a closed shard: there are no more updates."},
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a stream begins: a frontier, and for a resumed stream what was read until then.

    `shard` is its incarnation; None: a new stream, for whichever shard has the name.
    """

    frontier: Antichain
    seen: SeenVersion | None = None
    shard: ShardId | None = None


@router.on(
    "GET",
    "/{name}/listen",
    (READ,),
    summary="Every update after a time, as it is committed",
    response_class=Response,
    responses=_RESPONSES,
)
async def listen(
    request: Request,
    after: After,
    selection: Selecting,
    until: Annotated[str, Query(max_length=32, description="End when everything before this time was sent.")] = "[]",
    moves_since: Annotated[
        bool, Query(description="Whether since follows the listener, which needs the scope `manage`.")
    ] = True,
) -> Response:
    """Server-sent events with `Accept: text/event-stream` (rows as JSON), else frames with Arrow IPC.

    `where`, `columns`, `start_key`, `end_key`, `key_prefix` and `key` select updates; progress is always sent. Pass the
    same ones to resume.

    With `timestamp`: every update after that wall clock; the header `persist-after` has the time. Resume with the
    header Last-Event-ID, or with `after` = the last event's upper - 1. An id belongs to one shard: 404
    (`unknown_shard`) if that was dropped, even if the name belongs to another one now. The shard's since follows a
    listener if its token has the scope `manage`, except with `moves_since=false`. A stream of events that fails ends
    with an event `error`.
    """
    service, name = service_of(request), shard_of(request)
    moves = moves_since and service.tokens is not None and MANAGE in principal_of(request).scopes
    form = EVENTS if EVENTS in request.headers.get("accept", "") else FRAMES
    headers, time = {}, after if not isinstance(after, datetime) else None
    if isinstance(after, datetime) and "last-event-id" not in request.headers:
        time = await _after_of(service, name, after)
        headers = {"persist-after": "" if time is None else str(time)}
    start = _start(request, name, time)
    if start.shard is not None and await _is_at_the_end(service, name, start):
        return Response(status_code=204)  # a browser's EventSource then stops reconnecting
    if selection != EVERYTHING:
        selection = await service.work.run(partial(_selected, service, name, selection))
    async with AsyncExitStack() as held:
        held.enter_context(service.listeners)
        hold = await held.enter_async_context(service.listening.leases.hold(name, start.frontier, moves))
        _check_shard(name, start, hold.shard)
        frames = service.listening.stream(name, hold, start.frontier, frontier(until, "until"), form, selection)
        return event_stream(request, held, await held.enter_async_context(aclosing(frames)), form, headers)


def event_stream(
    request: Request,
    held: AsyncExitStack,
    frames: AsyncIterator[bytes],
    form: str,
    headers: Mapping[str, str] | None = None,
) -> HeldStream:
    """A response of these frames that holds `held` until it ends."""
    return HeldStream(
        _with_error(frames, form, authorization_check(request)),
        held.pop_all(),
        media_type=form,
        headers={"cache-control": "no-store", "x-accel-buffering": "no", **(headers or {})},
    )


def _selected(service: Service, name: str, selection: Selection) -> Selection:
    return resolve_selection(selection, Client(service.transport, service.handles).shard(name).schema)


async def _after_of(service: Service, name: str, when: datetime) -> int | None:
    """The last time that was complete at a wall clock; None: nothing was written by then."""
    resolution = await service.work.run(partial(resolved, service.transport, name, when, 0.0, 0.0))
    return None if resolution.upper.element == 0 else as_of_at(name, resolution)


async def _with_error(frames: AsyncIterator[bytes], form: str, check: Callable[[], None]) -> AsyncIterator[bytes]:
    """The frames; if they fail, the error if the form can express it, and the stream is cut off.

    `check` is called before each frame, and raises once the token is no longer valid.
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
    """Whether a resumed stream has received all of its shard, which is closed. Raises if it cannot be resumed."""
    state = await service.watcher.state(name, ViewRequest(min_seqno=1, with_batches=False))
    if state.shard_id != start.shard or start.frontier.is_empty:  # the cached State may be too old
        state = await service.work.run(service.location.machine(name).refresh)
    if state.is_closed:
        raise UnknownShard(dropped(name))
    _check_shard(name, start, state.shard_id)
    await service.work.run(service.location.machine(name).check_seen, state, start.seen)
    if start.frontier.is_empty and not state.upper.is_empty:
        raise InvalidUsage(f"the header Last-Event-ID is of the end of shard {name!r}, which is not closed")
    return start.frontier.is_empty


def _check_shard(name: str, start: _Place, shard: ShardId) -> None:
    """Raises UnknownShard if the stream is of another shard than the one that has the name now."""
    if start.shard not in (None, shard):
        raise UnknownShard(
            f"the header Last-Event-ID is of an earlier shard {name!r}, which was dropped; the name belongs to another "
            "one now. Listen without the header to read that"
        )


def _start(request: Request, name: str, after: int | None) -> _Place:
    """The place in the header Last-Event-ID, else in the parameters. An id without a shard is of the first incarnation:
    it was issued before names could be reused.
    """
    resumed = request.headers.get("last-event-id")
    if resumed is None:
        return _Place(antichain.frontier(0 if after is None else after + 1))
    time, *rest = resumed[: ID_LENGTH_MAX + 1].split(".", 3)
    seen = read_seen(".".join(rest[:2]), "Last-Event-ID") if rest else None
    shard = parse(ShardId, rest[2]) if len(rest) == 3 else shard_id_of(name)
    return _Place(frontier(time[:50], "Last-Event-ID"), seen, shard)
