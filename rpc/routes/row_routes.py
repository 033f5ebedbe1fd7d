"""Rows in and out, for clients that hold no Arrow library and no blob store: posts and snapshots."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Annotated, Any, TypeVar

import pyarrow as pa
from fastapi import Query, Request
from starlette.responses import Response

from persist.client.connect import Client
from persist.client.read_api import counted, snapshot_of
from persist.client.row_reader import Rows, expanded
from persist.client.shard import Shard
from persist.client.snapshot import Snapshot, Tagged
from persist.client.timestamps import instant_ms, instant_text
from persist.codecs import rows
from persist.core import commands as c
from persist.core.commands import READ, WRITE
from persist.core.ids import check_shard_name
from persist.formats.http_messages import result_to_json
from rpc.app_state import WAIT_S_MAX, Service, principal_of, service_of, shard_of
from rpc.change_streams import HeldStream, Stepped
from rpc.command_endpoint import InsertKind, Posted, check_upper, post
from rpc.route_table import Router
from rpc.routes.parameters import (
    AsOfOrTag,
    Format,
    Frontier,
    IdempotencyToken,
    Limited,
    Selecting,
    caller_of,
    frontier,
    json_response,
    on_shard,
    rows_body,
    token_of,
)

router = Router(prefix="/v1/shards", tags=["rows"])
R = TypeVar("R", bound=Rows)

_ROWS_BODY = rows_body("Rows. A column `__time` gives times, a column `__diff` multiplicities (1 unless given).")


@router.on(
    "POST",
    "/{name}/insert",
    (WRITE,),
    audit="insert",
    writes=True,
    direct=True,
    summary="Append rows at the next time, which the service picks",
    openapi_extra=_ROWS_BODY,
)
async def insert(request: Request, form: Format = None, token: IdempotencyToken = None) -> Response:
    return await _posted(request, form, token, _INSERT)


@router.on(
    "POST",
    "/{name}/append",
    (WRITE,),
    audit="append",
    closes_by="upper",
    writes=True,
    direct=True,
    summary="Append definite rows of which the shard may have the beginning already",
    openapi_extra=_ROWS_BODY,
)
async def append(
    request: Request,
    lower: Frontier,
    upper: Frontier,
    form: Format = None,
    token: IdempotencyToken = None,
) -> Response:
    return await _posted(request, form, token, _append(request, lower, upper))


@router.on(
    "POST",
    "/{name}/compare-and-append",
    (WRITE,),
    audit="compare-and-append",
    closes_by="new_upper",
    writes=True,
    direct=True,
    summary="Append rows iff the shard's upper is the expected one",
    openapi_extra=_ROWS_BODY,
)
async def compare_and_append(
    request: Request,
    expected_upper: Frontier,
    new_upper: Frontier,
    form: Format = None,
    token: IdempotencyToken = None,
) -> Response:
    kind = _compare_and_append(request, expected_upper, new_upper)
    return await _posted(request, form, token, kind)


_INSERT = InsertKind(None, lambda writer, token, runs: c.Insert(writer, token, runs), is_joined=True)


def _append(request: Request, lower: str, upper: str) -> InsertKind:
    since, until = frontier(lower, "lower"), frontier(upper, "upper")
    check_upper(principal_of(request), until)
    return InsertKind(since.element, lambda writer, token, runs: c.Append(writer, token, since, until, runs))


def _compare_and_append(request: Request, expected_upper: str, new_upper: str) -> InsertKind:
    lower, upper = frontier(expected_upper, "expected_upper"), frontier(new_upper, "new_upper")
    check_upper(principal_of(request), upper)
    return InsertKind(lower.element, lambda writer, token, runs: c.CompareAndAppend(writer, token, lower, upper, runs))


async def _posted(request: Request, form: str | None, token: str | None, kind: InsertKind) -> Response:
    service, name = service_of(request), check_shard_name(shard_of(request))
    chosen = rows.format_of(request.headers.get("content-type"), form)
    posted = Posted(name, chosen, kind, token_of(request, token), caller_of(request), principal_of(request))
    result = await post(service, request, posted)
    return json_response(result_to_json(result))


_COUNT: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The time, and the number of rows as of it.",
        "content": {"application/json": {"schema": {"type": "object"}, "example": {"as_of": 7, "count": 2}}},
    }
}


@router.on(
    "GET",
    "/{name}/snapshot",
    (READ,),
    summary="The exact contents as of a time, with multiplicities",
    response_class=Response,
)
async def snapshot(
    request: Request,
    as_of: AsOfOrTag,
    wanted: Limited,
    form: Format = None,
    expand: Annotated[bool, Query(description="Repeat rows instead of the column __diff.")] = False,
    wait: Annotated[float, Query(ge=0, le=3600, description="Seconds to wait for `as_of` at most.")] = 10.0,
) -> Response:
    """Streamed in key order. The header `persist-as-of` tells the time, `persist-timestamp` the wall clock that named

    it. Where nothing was written yet the time is -1: as of -1 every shard is empty. `limit` counts each row as often as
    it is there. A stream that breaks off is not whole.
    """
    service, name = service_of(request), check_shard_name(shard_of(request))
    chosen = rows.format_of(request.headers.get("accept"), form)
    wait_s = min(wait, WAIT_S_MAX)

    def headers(opened: Snapshot) -> dict[str, str]:
        return {"persist-as-of": str(opened.as_of), **timestamp_header("persist-timestamp", opened.timestamp)}

    def opening() -> Snapshot:
        shard, at, (selection, limit) = open_shard(service, name), _at(as_of), wanted
        return snapshot_of(shard, at, on_shard(selection, shard.schema), limit, wait_s, "http snapshot")

    return await streamed(service, opening, headers, chosen, expand)


@router.on("GET", "/{name}/count", (READ,), summary="How many rows there are as of a time", responses=_COUNT)
async def count(
    request: Request,
    as_of: AsOfOrTag,
    selection: Selecting,
    wait: Annotated[float, Query(ge=0, le=3600, description="Seconds to wait for `as_of` at most.")] = 10.0,
) -> Response:
    """The sum of `__diff`: each row counts as often as it is there. `columns` does not matter, but must be true."""
    service, name = service_of(request), check_shard_name(shard_of(request))
    wait_s = min(wait, WAIT_S_MAX)

    def told() -> dict[str, int]:
        shard = open_shard(service, name)
        found, rows = counted(shard, _at(as_of), on_shard(selection, shard.schema), wait_s)
        return {"as_of": found.as_of, "count": rows}

    with service.snapshots:
        return json_response(await service.work.run(told))


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
            pieces.rest(first),
            held.pop_all(),
            media_type=rows.MEDIA_TYPES[form],
            headers=headers(opened),
        )


def timestamp_header(name: str, at: datetime | None) -> dict[str, str]:
    """The header that tells a wall clock, where one named the time."""
    return {} if at is None else {name: instant_text(instant_ms("timestamp", at))}


def open_shard(service: Service, name: str) -> Shard:
    """A handle of the server's own. Raises UnknownShard."""
    return Client(service.transport, service.handles).shard(name)


def _at(at: int | datetime | str | None) -> int | datetime | Tagged | None:
    """`at` is a tag where it is a text."""
    return Tagged(at) if isinstance(at, str) else at


def _pieces(held: Rows, form: str, expand: bool) -> Generator[bytes]:
    """A generator of bytes that gives the lease up when it ends or is closed."""
    empty = held.empty()

    def tables() -> Iterator[pa.Table]:
        for table in held.batches():
            chosen = table.select(empty.schema.names)
            yield from expanded(chosen) if expand else (chosen,)

    with held:
        yield from rows.write(tables(), empty.drop_columns(["__diff"]) if expand else empty, form)
