"""Streams of updates: every update after a time, once and in order, pushed as it is committed."""

from __future__ import annotations

from contextlib import AsyncExitStack, aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from persist.core import antichain
from persist.core.antichain import Antichain
from persist.core.commands import READ, WRITE
from persist.core.ids import check_shard_name
from persist.core.view import ViewRequest
from rpc.listen_frames import EVENTS, FRAMES
from rpc.routes.parameters import frontier
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
                "example": 'event: updates\nid: 8\ndata: {"lower": [7], "upper": [8], "rows": [{"id": "a"}]}\n\n',
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

    Resume with `after` = the last event's upper - 1, or with the header Last-Event-ID. The shard's since follows a
    listener only if its token has the scope `write`.
    """
    service, name = service_of(request), check_shard_name(shard_of(request))
    principal = principal_of(request)
    principal.require(READ, name)
    moves_since = service.tokens is not None and WRITE in principal.scopes
    form = EVENTS if EVENTS in request.headers.get("accept", "") else FRAMES
    start = _start(request, after)
    if start.is_empty:
        await service.watcher.state(name, ViewRequest(min_seqno=1, with_batches=False))
        return Response(status_code=204)  # by which a browser's EventSource knows not to come again
    async with AsyncExitStack() as held:
        held.enter_context(service.listeners)
        hold = await held.enter_async_context(service.listening.leases.hold(name, start, moves_since))
        frames = service.listening.stream(name, hold, start, frontier(until, "until"), form)
        return HeldStream(
            await held.enter_async_context(aclosing(frames)),
            held.pop_all(),
            media_type=form,
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
            slow_s=service.limits.slow_listener_s,
        )


def _start(request: Request, after: int | None) -> Antichain:
    """The frontier from which on updates are wanted."""
    resumed = request.headers.get("last-event-id")
    if resumed is not None:
        return frontier(resumed[:50], "Last-Event-ID")
    return antichain.frontier(0 if after is None else after + 1)
