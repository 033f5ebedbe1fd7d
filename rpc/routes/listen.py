"""Streams of updates: every update after a time, once and in order, pushed as it is committed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from persist.core import antichain
from persist.core.antichain import Antichain
from persist.core.commands import READ, WRITE
from persist.core.errors import PersistError
from persist.core.ids import check_shard_name
from persist.core.view import Seen, ViewRequest
from rpc.errors import status_of
from rpc.listen_frames import EVENTS, FRAMES, sse_error
from rpc.routes.parameters import frontier, read_seen
from rpc.service import principal_of, service_of, shard_of
from rpc.streaming import HeldStream

router = APIRouter(prefix="/v1/shards", tags=["listen"])

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "A stream that ends when `until` is reached, the shard is closed, or the server stops.",
        "content": {
            FRAMES: {"schema": {"type": "string", "format": "binary"}},
            EVENTS: {
                "schema": {"type": "string"},
                "example": 'event: updates\nid: 8.17.0192…\ndata: {"lower": [7], "upper": [8], "rows": []}\n\n',
            },
        },
    },
    204: {"description": "The header Last-Event-ID names the end of a closed shard: no more will come."},
}


@router.get(
    "/{name}/listen", summary="Every update after a time, as it comes", response_class=Response, responses=_RESPONSES
)
async def listen(
    request: Request,
    after: Annotated[int | None, Query(ge=0, description="Updates at later times; else all of them.")] = None,
    until: Annotated[str, Query(max_length=32, description="End when all before this time was sent.")] = "[]",
) -> Response:
    """Server-sent events with `Accept: text/event-stream` (rows as JSON), else frames with Arrow IPC.

    Resume with the header Last-Event-ID, or with `after` = the last event's upper - 1. The shard's since follows a
    listener only if its token has the scope `write`. A stream of events that fails ends with an event `error`.
    """
    service, name = service_of(request), check_shard_name(shard_of(request))
    principal = principal_of(request)
    principal.require(READ, name)
    moves_since = service.tokens is not None and WRITE in principal.scopes
    form = EVENTS if EVENTS in request.headers.get("accept", "") else FRAMES
    start, seen = _start(request, after)
    if start.is_empty or seen is not None:
        state = await service.watcher.state(name, ViewRequest(min_seqno=1, with_batches=False))
        if start.is_empty:
            return Response(status_code=204)  # by which a browser's EventSource knows not to come again
        await service.work.run(service.location.machine(name).check_seen, state, seen)
    async with AsyncExitStack() as held:
        held.enter_context(service.listeners)
        hold = await held.enter_async_context(service.listening.leases.hold(name, start, moves_since))
        frames = service.listening.stream(name, hold, start, frontier(until, "until"), form)
        return HeldStream(
            _with_error(await held.enter_async_context(aclosing(frames)), form),
            held.pop_all(),
            media_type=form,
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
            slow_s=service.limits.slow_listener_s,
        )


async def _with_error(frames: AsyncIterator[bytes], form: str) -> AsyncIterator[bytes]:
    """The frames, and where they fail the reason, in a form that can tell it. Then the stream is cut off."""
    try:
        async for data in frames:
            yield data
    except PersistError as error:
        if form == EVENTS:
            yield sse_error(error, status_of(error))
        raise


def _start(request: Request, after: int | None) -> tuple[Antichain, Seen | None]:
    """The frontier from which on updates are wanted, and what the caller has read before, where it says so."""
    resumed = request.headers.get("last-event-id")
    if resumed is None:
        return antichain.frontier(0 if after is None else after + 1), None
    time, dot, seen = resumed[:100].partition(".")
    return frontier(time[:50], "Last-Event-ID"), read_seen(seen, "Last-Event-ID") if dot else None
