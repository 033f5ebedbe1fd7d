"""Routes for blobs, for clients without access to the blob store. Only well-formed keys of parts are accepted."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, Any

from fastapi import Query, Request
from starlette.responses import JSONResponse, Response

from blob import BlobExists, BlobNotFound, BlobStat
from persist.core.blob_keys import belongs_to, is_bundle_key, is_of_maintenance, is_part_key
from persist.core.commands import MAINTAIN, READ, WRITE
from persist.core.errors import Conflict, InvalidUsage, PersistError, Unauthorized
from persist.core.ids import ShardId
from persist.formats.http_messages import BlobMissing
from persist.formats.store_errors import translated, translated_but_missing
from rpc.app_state import Service, principal_of, service_of
from rpc.auth import Principal
from rpc.change_streams import HeldStream
from rpc.errors import problem
from rpc.route import Router

router = Router(prefix="/v1/blobs", tags=["blobs"])
DOWNLOAD_PIECE_BYTES = 4 * 1024 * 1024  # of a part, read and sent at a time
_RANGE = re.compile(r"bytes=(\d{1,15})-(\d{1,15})\Z")
_OCTETS = "application/octet-stream"


@router.on(
    "PUT /{key:path}",
    (WRITE, MAINTAIN),
    "Write a part, all or nothing",
    writes=True,
    status_code=204,
    response_class=Response,
)
async def put(request: Request, key: str) -> Response:
    """Keys are write-once: writing the same bytes again succeeds, other bytes are refused."""
    service = await _checked(request, key, is_part_key(key))
    async with service.body(request, service.limits.blob_bytes_max) as data:
        name = service.shard_ids.known(key.partition("/")[0])
        principal = principal_of(request)
        merges = MAINTAIN in principal.scopes and is_of_maintenance(key)
        if name is not None and not merges:
            service.quotas.count_upload(principal, name, key, len(data))
        await service.work.run(_put, service, key, data)
    return Response(status_code=204)


@router.on("GET /{key:path}", (READ,), "Read a part, or a range of it", response_class=Response)
async def get(
    request: Request,
    key: str,
    presign: Annotated[bool, Query(description="Return presigned URLs for GET and PUT instead.")] = False,
) -> Response:
    service = await _checked(request, key, is_part_key(key) or is_bundle_key(key))
    if presign:
        return await _presigned(request, service, key)
    header = request.headers.get("range")
    span = None if header is None else _span(header)
    async with AsyncExitStack() as held:
        try:
            start, length = span or (0, await service.work.run(_size, service, key))
            piece = min(length, DOWNLOAD_PIECE_BYTES)
            if span is not None and piece < length and await service.work.run(_size, service, key) < start + length:
                raise BlobNotFound(f"blob {key} ends before byte {start + length}")
            await held.enter_async_context(service.work.downloads.turn(piece))
            first = await service.work.run(_get, service, key, start, piece)
        except BlobNotFound as error:
            return problem(BlobMissing(str(error)), 404 if span is None else 416)
        headers = {"content-length": str(length)}
        if span is not None:
            headers["content-range"] = f"bytes {start}-{start + length - 1}/*"
        rest = _pieces(service, key, (start, length), first)
        status = 200 if span is None else 206
        return HeldStream(rest, held.pop_all(), media_type=_OCTETS, headers=headers, status=status)


@router.on("HEAD /{key:path}", (READ,), "Size and time of a part", response_class=Response)
async def head(request: Request, key: str) -> Response:
    service = await _checked(request, key, is_part_key(key) or is_bundle_key(key))
    stat = await service.work.run(_stat, service, key)
    if stat is None:
        return Response(status_code=404)
    headers = {"content-length": str(stat.size), "persist-modified-ms": str(stat.modified_ms)}
    return Response(None, 200, headers, _OCTETS)


async def _presigned(request: Request, service: Service, key: str) -> Response:
    principal, blob = principal_of(request), service.location.blob
    seconds = seconds_of(principal, service.settings.presigned_s, service.location.clock.now_ms())
    may_write = not principal.scopes.isdisjoint((WRITE, MAINTAIN)) and is_part_key(key)

    def sign() -> dict[str, Any]:
        with translated():
            put = blob.presign_put(key, seconds) if may_write else None
            urls = {"expires_s": seconds, "get": blob.presign_get(key, seconds), "put": put and put.url}
        return urls if put is None else {**urls, "put_headers": dict(put.headers)}

    return JSONResponse(await service.work.run(sign))


def seconds_of(principal: Principal, most_s: int, now_ms: int) -> int:
    """The validity of a URL signed for this principal, at most that of its token. Raises Unauthorized."""
    if principal.expires_s is None:
        return most_s
    left_s = math.floor(principal.expires_s - now_ms / 1000)
    if left_s < 1:
        raise Unauthorized(f"the token {principal.name!r} expires within a second; request a new one")
    return min(most_s, left_s)


async def _checked(request: Request, key: str, is_possible: bool) -> Service:
    """Raises InvalidUsage unless it is the key of a part, Forbidden unless the caller may use its shard.

    Bundles can only be read: persist itself writes them.
    """
    service, principal = service_of(request), principal_of(request)
    shard = key.partition("/")[0]
    if not is_possible or not belongs_to(key, ShardId(shard)):
        raise InvalidUsage(f"{key[:200]!r} is not the key of a part")
    if not principal.is_unlimited:
        await service.work.run(service.shard_ids.find, shard, principal)
    return service


def _put(service: Service, key: str, data: bytes) -> None:
    try:
        with translated():
            service.location.blob.put(key, data)
    except PersistError as error:
        if isinstance(error.__cause__, BlobExists):
            raise Conflict(f"blob {key} exists with other bytes; keys are single-use") from error
        raise


async def _pieces(service: Service, key: str, span: tuple[int, int], first: bytes) -> AsyncIterator[bytes]:
    """The bytes of `span`, which begins with `first`; at most one piece is in memory."""
    start, length = span
    ends, at = start + length, start + len(first)
    yield first
    del first
    while at < ends:
        size = min(ends - at, DOWNLOAD_PIECE_BYTES)
        yield await service.work.run(_get, service, key, at, size)
        at += size


def _size(service: Service, key: str) -> int:
    stat = _stat(service, key)
    if stat is None:
        raise BlobNotFound(f"there is no blob {key}")
    return stat.size


def _get(service: Service, key: str, start: int, length: int) -> bytes:
    with translated_but_missing():
        return service.location.blob.get_range(key, start, length)


def _stat(service: Service, key: str) -> BlobStat | None:
    with translated():
        return service.location.blob.stat(key)


def _span(header: str) -> tuple[int, int]:
    match = _RANGE.match(header)
    if not match or int(match[2]) < int(match[1]):
        raise InvalidUsage(f"the header Range is {header[:100]!r}; it must be bytes=first-last")
    first, last = int(match[1]), int(match[2])
    return first, last - first + 1
