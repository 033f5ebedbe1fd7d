"""Looking at shards and stores through a server: the answers of `persist inspect`, by the same functions."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Annotated

from fastapi import Depends, Query, Request
from starlette.responses import Response

from persist.core.commands import ADMIN
from persist.core.errors import InvalidUsage
from persist.core.ids import check_shard_name
from persist.core.keys import shard_of as shard_of_key
from persist.inspect import queries
from persist.inspect.looking import look_into
from persist.inspect.part_file import SHOWN_MAX
from persist.inspect.queries import OF_LOCATION, OF_ONE
from persist.inspect.shard_patterns import prefix_of
from rpc.auth import Principal
from rpc.route import Router
from rpc.service import Service, principal_of, service_of, shard_of
from rpc.streaming import HeldStream, Stepped

router = Router(prefix="/v1", tags=["inspect"])
PIECE_CHARS = 256 * 1024  # that are sent together

_Keys = Annotated[bool, Query(description="Show keys of rows, which are data; else hashes of them.")]


@router.on("GET", "/inspect/{what}", (ADMIN,), summary="The shards of a location and what takes room, or one part")
async def of_location(
    request: Request,
    what: str,
    pattern: Annotated[str, Query(description="Names that match, such as eu/*.", max_length=256)] = "",
    key: Annotated[str, Query(description="Of part: the key of its blob.", max_length=512)] = "",
    keys: _Keys = False,
    rows: Annotated[int, Query(description="Of part: show its first updates, which are data.", ge=0, le=SHOWN_MAX)] = 0,
) -> Response:
    """`what` is usage or part. The document is that of `persist inspect WHAT --json`."""
    service, principal = service_of(request), principal_of(request)
    if what not in OF_LOCATION:
        raise InvalidUsage(f"{what!r:.60} cannot be inspected here; give one of {', '.join(OF_LOCATION)}")
    if what == "part":
        await service.work.run(service.shard_ids.find, shard_of_key(key), principal)
    elif pattern:
        principal.require_prefix(prefix_of(pattern))
    query = queries.Query(what, key if what == "part" else pattern, keys=keys, rows=rows)
    return await _answer(service, principal, query)


@dataclass(frozen=True, slots=True)
class _Within:
    """Which versions, times and keys are asked for; "": not given."""

    at: str
    timestamp: str
    first: str
    last: str
    as_of: str
    lower: str
    upper: str


def _within(  # noqa: PLR0913 - a query parameter each
    at: Annotated[str, Query(description="Of state: a version, such as 12.", max_length=20)] = "",
    timestamp: Annotated[str, Query(description="Of state: with its zone (RFC 3339).", max_length=64)] = "",
    first: Annotated[
        str,
        Query(alias="from", description="Of log, state: from this version on.", max_length=20),
    ] = "",
    last: Annotated[str, Query(alias="to", description="Of log: the last version.", max_length=20)] = "",
    as_of: Annotated[str, Query(description="Of digest: a complete time.", max_length=20)] = "",
    lower: Annotated[str, Query(description="Of attributes: from this key on.", max_length=64)] = "",
    upper: Annotated[str, Query(description="Of attributes: up to this key.", max_length=64)] = "",
) -> _Within:
    return _Within(at, timestamp, first, last, as_of, lower, upper)


@router.on(
    "GET",
    "/shards/{name}/inspect/{what}",
    (ADMIN,),
    summary="One shard: its State, log, parts, holders, attributes, contents",
)
async def of_shard(
    request: Request,
    what: str,
    within: Annotated[_Within, Depends(_within)],
    keys: _Keys = False,
    whole: Annotated[bool, Query(description="Of state: all of it, not its summary alone.")] = False,
    follow: Annotated[bool, Query(description="Of log: from a version that may be still to come.")] = False,
) -> Response:
    """`what` is a subcommand of `persist inspect`. The document is that of its `--json`; of log, a line an entry."""
    service, principal, name = service_of(request), principal_of(request), check_shard_name(shard_of(request))
    if what not in OF_ONE:
        raise InvalidUsage(f"{what!r:.60} cannot be inspected; give one of {', '.join(OF_ONE)}")
    query = queries.Query(what, name, **asdict(within), keys=keys, whole=whole, follow=follow)
    return await _answer(service, principal, query)


async def _answer(service: Service, principal: Principal, query: queries.Query) -> Response:
    """What is wrong with the question is told before the answer begins; it counts as a snapshot while it is sent."""
    async with AsyncExitStack() as stack:
        stack.enter_context(service.snapshots)
        document = await service.work.run(
            lambda: queries.answer(look_into(service.location, principal.prefixes), query)
        )
        stepped = Stepped(service.work, _pieces(document.pieces()))
        stack.push_async_callback(stepped.close)
        first = await stepped.next()
        media_type = "application/x-ndjson" if document.lines else "application/json"
        return HeldStream(stepped.rest(first), stack.pop_all(), media_type=media_type, headers={})


def _pieces(texts: Generator[str]) -> Generator[bytes]:
    """The texts in pieces of a good size."""
    held: list[str] = []
    size = 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size >= PIECE_CHARS:
            yield "".join(held).encode()
            held, size = [], 0
    yield "".join(held).encode()
