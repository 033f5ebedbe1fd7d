"""Rows in and out, for clients without access to the blob store: posts, snapshots, counts, and listen streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Annotated, Any, TypeVar

import pyarrow as pa
from fastapi import Query, Request
from starlette.responses import Response

from persist.client.client import Client
from persist.client.read_api import counted, snapshot_of
from persist.client.row_reader import Rows, expand_rows
from persist.client.shard import Shard
from persist.client.snapshot import Snapshot, Tagged
from persist.client.timestamps import as_of_at, instant_ms, instant_text, resolve_time
from persist.codecs import rows
from persist.core import commands as c
from persist.core import frontier as antichain
from persist.core.commands import MANAGE, READ
from persist.core.errors import InvalidUsage, PersistError, UnknownShard
from persist.core.frontier import Antichain
from persist.core.ids import ShardId, parse, shard_id_of
from persist.core.shard_phases import dropped
from persist.core.shard_view import SeenVersion, ViewRequest
from persist.formats.http_messages import result_to_json
from persist.parts import EVERYTHING
from rpc.app_state import WAIT_S_MAX, Service, principal_of, service_of, shard_of
from rpc.change_streams import HeldStream, Stepped
from rpc.command_endpoint import InsertKind, Posted, check_upper, post
from rpc.errors import status_of
from rpc.listen_frames import EVENTS, FRAMES, ID_LENGTH_MAX, sse_error
from rpc.route import Router
from rpc.routes.parameters import (
    After,
    AsOfOrTag,
    Format,
    Frontier,
    IdempotencyToken,
    Limited,
    Selecting,
    authorization_check,
    caller_of,
    frontier,
    json_response,
    read_seen,
    resolve_selection,
    rows_body,
    token_of,
)

router = Router(prefix="/v1/shards", tags=["rows"])
R = TypeVar("R", bound=Rows)

_ROWS_BODY = rows_body("Rows. A column `__time` has times, a column `__diff` multiplicities (default 1).")


@router.write("insert", "Append rows at the next time, which the service picks", direct=True, openapi_extra=_ROWS_BODY)
async def insert(request: Request, form: Format = None, token: IdempotencyToken = None) -> Response:
    return await _posted(request, form, token, _INSERT)


@router.write(
    "append",
    "Append definite rows of which the shard may have a beginning already",
    closes_by="upper",
    direct=True,
    openapi_extra=_ROWS_BODY,
)
async def append(
    request: Request, lower: Frontier, upper: Frontier, form: Format = None, token: IdempotencyToken = None
) -> Response:
    since, until = frontier(lower, "lower"), frontier(upper, "upper")
    check_upper(principal_of(request), until)
    kind = InsertKind(since.element, lambda writer, token, runs: c.Append(writer, token, since, until, runs))
    return await _posted(request, form, token, kind)


@router.write(
    "compare-and-append",
    "Append rows if the shard's upper is the expected one",
    closes_by="new_upper",
    direct=True,
    openapi_extra=_ROWS_BODY,
)
async def compare_and_append(
    request: Request,
    expected_upper: Frontier,
    new_upper: Frontier,
    form: Format = None,
    token: IdempotencyToken = None,
) -> Response:
    lower, upper = frontier(expected_upper, "expected_upper"), frontier(new_upper, "new_upper")
    check_upper(principal_of(request), upper)
    kind = InsertKind(lower.element, lambda writer, token, runs: c.CompareAndAppend(writer, token, lower, upper, runs))
    return await _posted(request, form, token, kind)


_INSERT = InsertKind(None, lambda writer, token, runs: c.Insert(writer, token, runs), is_joined=True)


async def _posted(request: Request, form: str | None, token: str | None, kind: InsertKind) -> Response:
    format_name = rows.format_of(request.headers.get("content-type"), form)
    retry_token, caller, principal = token_of(request, token), caller_of(request), principal_of(request)
    posted = Posted(shard_of(request), format_name, kind, retry_token, caller, principal)
    return json_response(result_to_json(await post(service_of(request), request, posted)))


_COUNT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The time, and the number of rows as of it.",
        "content": {"application/json": {"schema": {"type": "object"}, "example": {"as_of": 7, "count": 2}}},
    }
}


@router.on(
    "GET /{name}/snapshot", (READ,), "The exact contents as of a time, with multiplicities", response_class=Response
)
async def snapshot(
    request: Request,
    as_of: AsOfOrTag,
    wanted: Limited,
    form: Format = None,
    expand: Annotated[bool, Query(description="Repeat rows instead of a column __diff.")] = False,
    wait: Annotated[float, Query(ge=0, le=WAIT_S_MAX, description="Maximum seconds to wait for `as_of`.")] = 10.0,
) -> Response:
    """Streamed in key order.

    The header `persist-as-of` has the time, `persist-timestamp` the wall clock of the request. Before the first write
    the time is -1, as of which every shard is empty. `limit` counts each row by its multiplicity. A stream that breaks
    off is incomplete.
    """
    service, name = service_of(request), shard_of(request)
    format_name = rows.format_of(request.headers.get("accept"), form)

    def headers(opened: Snapshot) -> dict[str, str]:
        return {"persist-as-of": str(opened.as_of), **timestamp_header("persist-timestamp", opened.timestamp)}

    def opening() -> Snapshot:
        shard, at, (selection, limit) = open_shard(service, name), _at(as_of), wanted
        return snapshot_of(shard, at, resolve_selection(selection, shard.schema), limit, wait, "http snapshot")

    return await streamed(service, opening, headers, format_name, expand)


@router.on("GET /{name}/count", (READ,), "The number of rows as of a time", responses=_COUNT)
async def count(
    request: Request,
    as_of: AsOfOrTag,
    selection: Selecting,
    wait: Annotated[float, Query(ge=0, le=WAIT_S_MAX, description="Maximum seconds to wait for `as_of`.")] = 10.0,
) -> Response:
    """The sum of `__diff`: each row counts by its multiplicity. `columns` has no effect, but must be valid."""
    service, name = service_of(request), shard_of(request)

    def work() -> dict[str, int]:
        shard = open_shard(service, name)
        opened, rows = counted(shard, _at(as_of), resolve_selection(selection, shard.schema), wait)
        return {"as_of": opened.as_of, "count": rows}

    with service.snapshots:
        return json_response(await service.work.run(work))


async def streamed(
    service: Service, opening: Callable[[], R], headers: Callable[[R], dict[str, str]], form: str, expand: bool = False
) -> Response:
    """The rows that `opening` opens, as a stream that holds them until it ends."""
    async with AsyncExitStack() as held:
        held.enter_context(service.snapshots)
        opened = await service.work.run(opening)
        pieces = Stepped(service.work, _pieces(opened, form, expand))
        held.push_async_callback(pieces.close)
        first = await pieces.next()
        return HeldStream(
            pieces.rest(first), held.pop_all(), media_type=rows.MEDIA_TYPES[form], headers=headers(opened)
        )


def timestamp_header(name: str, at: datetime | None) -> dict[str, str]:
    """The header with the wall clock that named the time, if one did."""
    return {} if at is None else {name: instant_text(instant_ms("timestamp", at))}


def open_shard(service: Service, name: str) -> Shard:
    """A handle of the server itself. Raises UnknownShard."""
    return Client(service.transport, service.handles).shard(name)


def _at(at: int | datetime | str | None) -> int | datetime | Tagged | None:
    """`at`, as a tag if it is a text."""
    return Tagged(at) if isinstance(at, str) else at


def _pieces(held: Rows, form: str, expand: bool) -> Generator[bytes]:
    """The encoded rows. Releases the lease when it ends or is closed."""
    empty = held.empty()

    def tables() -> Iterator[pa.Table]:
        for table in held.batches():
            visible = table.select(empty.schema.names)
            yield from expand_rows(visible) if expand else (visible,)

    with held:
        yield from rows.write(tables(), empty.drop_columns(["__diff"]) if expand else empty, form)


# Listen streams.

listen_router = Router(prefix="/v1/shards", tags=["listen"])

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

    `shard` is its incarnation; None: a new stream, of the current incarnation. `names` is the id of the schema whose
    column names select its updates; None: the current one.
    """

    frontier: Antichain
    seen: SeenVersion | None = None
    shard: ShardId | None = None
    names: int | None = None


@listen_router.on(
    "GET /{name}/listen",
    (READ,),
    "Every update after a time, as it is committed",
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
        wanted = replace(selection, known=start.names)
        selection = await service.work.run(lambda: resolve_selection(wanted, open_shard(service, name).schema))
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


async def _after_of(service: Service, name: str, when: datetime) -> int | None:
    """The last time that was complete at a wall clock; None: nothing was written by then."""
    resolution = await service.work.run(partial(resolve_time, service.transport, name, when, 0.0, 0.0))
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
    time, *rest = resumed[: ID_LENGTH_MAX + 1].split(".", 4)
    seen = read_seen(".".join(rest[:2]), "Last-Event-ID") if rest else None
    shard = parse(ShardId, rest[2]) if len(rest) >= 3 else shard_id_of(name)
    names = rest[3] if len(rest) == 4 else "0"
    if not (names.isascii() and names.isdecimal()):
        raise InvalidUsage(f"the header Last-Event-ID is {resumed!r:.100}, which no stream of this server sent")
    return _Place(frontier(time[:50], "Last-Event-ID"), seen, shard, int(names) or None)
