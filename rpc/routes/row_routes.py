"""Rows in and out, for clients without Arrow and access to the blob store: posts, snapshots and counts."""

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
from persist.core.commands import READ
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
    expand: Annotated[bool, Query(description="Repeat rows instead of a column __diff.")] = False,
    wait: Annotated[float, Query(ge=0, le=3600, description="Maximum seconds to wait for `as_of`.")] = 10.0,
) -> Response:
    """Streamed in key order.

    The header `persist-as-of` has the time, `persist-timestamp` the wall clock of the request. Before the first write
    the time is -1, as of which every shard is empty. `limit` counts each row by its multiplicity. A stream that breaks
    off is incomplete.
    """
    service, name = service_of(request), shard_of(request)
    format_name = rows.format_of(request.headers.get("accept"), form)
    wait_s = min(wait, WAIT_S_MAX)

    def headers(opened: Snapshot) -> dict[str, str]:
        return {"persist-as-of": str(opened.as_of), **timestamp_header("persist-timestamp", opened.timestamp)}

    def opening() -> Snapshot:
        shard, at, (selection, limit) = open_shard(service, name), _at(as_of), wanted
        return snapshot_of(shard, at, resolve_selection(selection, shard.schema), limit, wait_s, "http snapshot")

    return await streamed(service, opening, headers, format_name, expand)


@router.on("GET", "/{name}/count", (READ,), summary="The number of rows as of a time", responses=_COUNT)
async def count(
    request: Request,
    as_of: AsOfOrTag,
    selection: Selecting,
    wait: Annotated[float, Query(ge=0, le=3600, description="Maximum seconds to wait for `as_of`.")] = 10.0,
) -> Response:
    """The sum of `__diff`: each row counts by its multiplicity. `columns` has no effect, but must be valid."""
    service, name = service_of(request), shard_of(request)
    wait_s = min(wait, WAIT_S_MAX)

    def work() -> dict[str, int]:
        shard = open_shard(service, name)
        opened, rows = counted(shard, _at(as_of), resolve_selection(selection, shard.schema), wait_s)
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
            yield from expanded(visible) if expand else (visible,)

    with held:
        yield from rows.write(tables(), empty.drop_columns(["__diff"]) if expand else empty, form)
