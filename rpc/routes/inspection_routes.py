"""Routes that look at shards and stores: inspection, findings, and live statistics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from fastapi import Depends, Query, Request
from starlette.responses import Response

from persist.check.check_runner import examined
from persist.check.findings import AGES, FREE, CheckThresholds, read_limits
from persist.check.location_checks import Beside, served_by
from persist.client.embedded import view_state
from persist.client.shard_listing import AT_ONCE, PAGE_MAX
from persist.client.stream_cuts import each
from persist.core.blob_keys import shard_of as shard_of_key
from persist.core.commands import ADMIN, MANAGE, READ
from persist.core.errors import InvalidUsage, UnknownShard
from persist.core.ids import check_shard_name
from persist.core.phases import dropped, outlived
from persist.core.shard_view import ViewRequest
from persist.core.state import State
from persist.inspect import queries
from persist.inspect.part_listing import SHOWN_MAX
from persist.inspect.queries import OF_LOCATION, OF_ONE
from persist.inspect.readonly_location import look_into, prefix_of
from rpc.app_state import Service, principal_of, service_of, shard_of
from rpc.auth import Principal, tokens_seen
from rpc.change_streams import HeldStream, Stepped
from rpc.listen_frames import EVENTS, HEARTBEAT_S
from rpc.route_table import Router
from rpc.routes.listen_routes import with_error
from rpc.routes.parameters import still_allowed
from rpc.routes.shard_routes import BATCHES_ON_THE_LOOP_MAX
from rpc.shard_stats import activity_json, trace_json

# Looking at shards and stores through a server: the answers of `persist inspect`, by the same functions.


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


# The findings of a quick check of a location, with those that the server itself adds.


check_router = Router(prefix="/v1", tags=["check"])


def _limits(
    held: Annotated[str, Query(description=AGES["held"], max_length=32)] = "",
    behind: Annotated[str, Query(description=AGES["behind"], max_length=32)] = "",
    token_age: Annotated[str, Query(description=AGES["token_age"], max_length=32)] = "",
    free: Annotated[str, Query(description=FREE, max_length=32)] = "",
) -> CheckThresholds:
    return read_limits(held, behind, "", token_age, free)


@check_router.on(
    "GET", "/check", (ADMIN,), summary="What is wrong with the location and its shards, why, and what helps"
)
async def check(
    request: Request,
    limits: Annotated[CheckThresholds, Depends(_limits)],
    pattern: Annotated[str, Query(description="Shards whose names match, such as eu/*.", max_length=256)] = "",
) -> Response:
    """The document is that of `persist check --quick --json`; docs/check.md has a paragraph for each `id` of a finding.

    The server adds what it knows: races that it lost, calls to the stores that failed, its clock, tokens that end. A
    token that is good for some prefixes only is told nothing of other tokens, of disks and of calls. It counts as a
    snapshot while it is made.
    """
    service, principal = service_of(request), principal_of(request)
    principal.require_prefix(prefix_of(pattern) if pattern else "")
    with service.snapshots:
        text = await service.work.run(_examined, service, principal, pattern, limits)
    return Response(text, media_type="application/json")


def _examined(service: Service, principal: Principal, pattern: str, limits: CheckThresholds) -> str:
    if not principal.is_unlimited:
        limits = replace(limits, free_percent=0)
    look = look_into(service.location, principal.prefixes)
    return examined(look, pattern or None, limits, _beside(service, principal)).text()


def _beside(service: Service, principal: Principal) -> Beside:
    """What the server knows: all of it for who may see all, else what is of the shards."""
    served = served_by(service.location)
    if not principal.is_unlimited:
        return Beside(served=replace(served, calls={}))
    tokens = tokens_seen([] if service.tokens is None else service.tokens.ending())
    return Beside(tokens=tokens, served=served)


# What shards are made of and how they move, for those who look: served from the cached States, and cheap to follow.


statistics_router = Router(prefix="/v1", tags=["look"])
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


@statistics_router.on(
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
        return Response(await _told(service, await service.state(name), tells_names), media_type="application/json")
    await service.state(name)
    async with AsyncExitStack() as held:
        held.enter_context(service.listeners)
        events = _events(service, name, tells_names)
        return HeldStream(
            with_error(await held.enter_async_context(aclosing(events)), EVENTS, still_allowed(request)),
            held.pop_all(),
            media_type=EVENTS,
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )


@statistics_router.on(
    "GET", "/activity", (READ,), summary="Shards in a line each: sizes, frontiers, and what was written last"
)
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
            if state.is_closed:
                raise UnknownShard(dropped(name))
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
