"""Routes that examine shards and stores: inspection, findings, and live statistics."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Generator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import replace
from heapq import nlargest
from itertools import islice
from typing import Annotated, Any, NamedTuple

from fastapi import Depends, Query, Request
from starlette.responses import Response

from persist.check.check_runner import run_check
from persist.check.findings import AGES, FREE, CheckThresholds, read_limits
from persist.check.location_checks import ExternalState, server_facts
from persist.client.embedded import view_state
from persist.client.many_shards import ASKED_AT_ONCE, PAGE_MAX, map_names
from persist.client.timestamps import instant_text
from persist.core.audit_log import MAINTENANCE, CommandEntry, Committed
from persist.core.batch import HollowBatch
from persist.core.blob_keys import shard_of as shard_of_key
from persist.core.commands import ADMIN, MANAGE, READ
from persist.core.errors import InvalidUsage, UnknownShard
from persist.core.frontier import Antichain
from persist.core.ids import SeqNo
from persist.core.shard_view import ViewRequest
from persist.core.state import Claim, State
from persist.inspect import queries
from persist.inspect.part_listing import SHOWN_MAX
from persist.inspect.queries import OF_LOCATION, OF_ONE
from persist.inspect.readonly_location import prefix_of, readonly_view
from rpc.app_state import Service, principal_of, service_of, shard_of
from rpc.auth import Principal, tokens_for_check
from rpc.change_streams import HeldStream, Stepped, check_incarnation
from rpc.listen_frames import EVENTS, HEARTBEAT_S
from rpc.route import Router
from rpc.routes.row_routes import event_stream
from rpc.routes.shard_routes import BATCHES_ON_THE_LOOP_MAX

# The answers of `persist inspect`, by the same functions.


router = Router(prefix="/v1", tags=["inspect"])
PIECE_CHARS = 256 * 1024  # sent at a time

_Keys = Annotated[bool, Query(description="Show keys of rows, which are data; default: their hashes.")]


@router.on("GET /inspect/{what}", (ADMIN,), "The shards of a location with their sizes, or one part")
async def of_location(
    request: Request,
    what: str,
    pattern: Annotated[str, Query(description="Pattern of names, such as eu/*.", max_length=256)] = "",
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


def _within(  # noqa: PLR0913 - a query parameter each
    at: Annotated[str, Query(description="Of state: a version, such as 12.", max_length=20)] = "",
    timestamp: Annotated[str, Query(description="Of state: with a time zone (RFC 3339).", max_length=64)] = "",
    first: Annotated[str, Query(alias="from", description="Of log, state: the first version.", max_length=20)] = "",
    last: Annotated[str, Query(alias="to", description="Of log: the last version.", max_length=20)] = "",
    as_of: Annotated[str, Query(description="Of digest: a complete time.", max_length=20)] = "",
    lower: Annotated[str, Query(description="Of attributes: the first key.", max_length=64)] = "",
    upper: Annotated[str, Query(description="Of attributes: the last key.", max_length=64)] = "",
) -> dict[str, Any]:
    """The fields of a query that select versions, times and keys; "": not given."""
    versions = {"at": at, "timestamp": timestamp, "first": first, "last": last}
    return {**versions, "as_of": as_of, "lower": lower, "upper": upper}


@router.on(
    "GET /shards/{name}/inspect/{what}", (ADMIN,), "One shard: its State, log, parts, holders, attributes, or digest"
)
async def of_shard(
    request: Request,
    what: str,
    within: Annotated[dict[str, Any], Depends(_within)],
    keys: _Keys = False,
    whole: Annotated[bool, Query(description="Of state: all of it instead of a summary.")] = False,
    follow: Annotated[bool, Query(description="Of log: `from` may be a future version.")] = False,
) -> Response:
    """`what` is a subcommand of `persist inspect`. The document is that of its `--json`; for log, a line per entry."""
    service, principal, name = service_of(request), principal_of(request), shard_of(request)
    if what not in OF_ONE:
        raise InvalidUsage(f"{what!r:.60} cannot be inspected; give one of {', '.join(OF_ONE)}")
    query = queries.Query(what, name, **within, keys=keys, whole=whole, follow=follow)
    return await _answer(service, principal, query)


async def _answer(service: Service, principal: Principal, query: queries.Query) -> Response:
    """Errors of the query are raised before the response begins. It counts as a snapshot while it is sent."""
    async with AsyncExitStack() as stack:
        stack.enter_context(service.snapshots)
        document = await service.work.run(
            lambda: queries.answer(readonly_view(service.location, principal.prefixes), query)
        )
        stepped = Stepped(service.work, _pieces(document.pieces()))
        stack.push_async_callback(stepped.close)
        first = await stepped.next()
        media_type = "application/x-ndjson" if document.lines else "application/json"
        return HeldStream(stepped.rest(first), stack.pop_all(), media_type=media_type, headers={})


def _pieces(texts: Generator[str]) -> Generator[bytes]:
    """The texts in larger pieces."""
    buffer: list[str] = []
    size = 0
    for text in texts:
        buffer.append(text)
        size += len(text)
        if size >= PIECE_CHARS:
            yield "".join(buffer).encode()
            buffer, size = [], 0
    yield "".join(buffer).encode()


# The findings of `persist check --quick`, with those of the server.

check_router = Router(prefix="/v1", tags=["check"])


def _limits(
    held: Annotated[str, Query(description=AGES["held"], max_length=32)] = "",
    behind: Annotated[str, Query(description=AGES["behind"], max_length=32)] = "",
    token_age: Annotated[str, Query(description=AGES["token_age"], max_length=32)] = "",
    free: Annotated[str, Query(description=FREE, max_length=32)] = "",
) -> CheckThresholds:
    return read_limits(held, behind, "", token_age, free)


@check_router.on("GET /check", (ADMIN,), "Findings about the location and its shards, with remedies")
async def check(
    request: Request,
    limits: Annotated[CheckThresholds, Depends(_limits)],
    pattern: Annotated[str, Query(description="Pattern of shard names, such as eu/*.", max_length=256)] = "",
) -> Response:
    """The document is that of `persist check --quick --json`; docs/check.md has a paragraph for each `id` of a finding.

    The server adds its own findings: lost races, failed store calls, its clock, tokens that expire. A token that covers
    only some prefixes does not see those about other tokens, disks and calls. It counts as a snapshot while it runs.
    """
    service, principal = service_of(request), principal_of(request)
    principal.require_prefix(prefix_of(pattern) if pattern else "")
    with service.snapshots:
        text = await service.work.run(_check, service, principal, pattern, limits)
    return Response(text, media_type="application/json")


def _check(service: Service, principal: Principal, pattern: str, limits: CheckThresholds) -> str:
    """What the server knows counts: everything for a principal that covers all shards, else what concerns shards."""
    look, served = readonly_view(service.location, principal.prefixes), server_facts(service.location)
    if not principal.is_unlimited:
        limits, known = replace(limits, free_percent=0), ExternalState(served=replace(served, calls={}))
    else:
        tokens = tokens_for_check({} if service.tokens is None else service.tokens.known())
        known = ExternalState(tokens=tokens, served=served)
    return run_check(look, pattern or None, limits, known).text()


# Live statistics, served from cached States.

statistics_router = Router(prefix="/v1", tags=["look"])
PAUSE_S = 0.5  # the shortest time between two events of a stream
SHARE = 0.01  # of a processor for the events of one stream: a long trace is sent less often
_CACHED = ViewRequest(min_seqno=1, with_batches=False)
_FRESH = ViewRequest(with_batches=False)

_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The trace; with `Accept: text/event-stream` an event `trace` for most versions.",
        "content": {
            "application/json": {"schema": {"type": "object"}},
            EVENTS: {"schema": {"type": "string"}, "example": 'event: trace\ndata: {"shard": "orders"}\n\n'},
        },
    }
}


@statistics_router.on(
    "GET /shards/{name}/trace",
    (READ,),
    "Batches, merges in progress, holds on since, recent commits",
    response_class=Response,
    responses=_RESPONSES,
)
async def trace(request: Request) -> Response:
    """With `Accept: text/event-stream` an event `trace` is sent whenever the shard advances, at most two a second. The
    stream costs the stores as much as an idle listener, and writes nothing.

    The names of readers and cursors need the scope `manage` or `admin`. A stream that fails ends with an event `error`.
    """
    service, name = service_of(request), shard_of(request)
    with_names = not {MANAGE, ADMIN}.isdisjoint(principal_of(request).scopes)
    state = await service.state(name)
    if EVENTS not in request.headers.get("accept", ""):
        return Response(await _trace(service, state, with_names), media_type="application/json")
    async with AsyncExitStack() as held:
        held.enter_context(service.listeners)
        events = await held.enter_async_context(aclosing(_events(service, name, with_names)))
        return event_stream(request, held, events, EVENTS)


@statistics_router.on("GET /activity", (READ,), "Shards with their sizes, frontiers and latest writes")
async def activity(
    request: Request,
    prefix: Annotated[str, Query(max_length=260)] = "",
    after: Annotated[str, Query(max_length=260, description="The last name of the previous page.")] = "",
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = PAGE_MAX,
    cached: Annotated[bool, Query(description="Use what this server has cached, without reading the store.")] = False,
) -> dict[str, Any]:
    """Ascending by name. `following` is the `after` of the next page; null at the end."""
    service = service_of(request)
    principal_of(request).require_prefix(prefix)
    names = await service.work.run(service.location.names, prefix, after, limit)
    entries = await service.work.run(map_names, lambda name: _activity(service, name, cached), names, ASKED_AT_ONCE)
    following = names[-1] if len(names) == limit else None
    return {"shards": [entry for entry in entries if entry is not None], "following": following}


def _activity(service: Service, name: str, cached: bool) -> dict[str, Any] | None:
    """None: it was dropped after it was listed."""
    try:
        state = view_state(service.location, name, _CACHED if cached else _FRESH)
    except UnknownShard:
        return None
    return None if state.is_closed else activity_json(state)


async def _trace(service: Service, state: State, with_names: bool) -> bytes:
    def encode() -> bytes:
        return json.dumps(trace_json(state, with_names=with_names), separators=(",", ":")).encode()

    holds = len(state.leased_readers) + len(state.critical_readers) + len(state.tags)
    is_long = len(state.trace.batches) + holds > BATCHES_ON_THE_LOOP_MAX
    return await service.work.run(encode) if is_long else encode()


async def _events(service: Service, name: str, with_names: bool) -> AsyncGenerator[bytes]:
    """An event for the current version of the shard, then a pause, and so on."""
    watcher, monotonic = service.watcher, service.location.clock.monotonic
    shard, sent = None, 0
    with watcher.watch(name) as watch:
        while not watcher.stopping.is_set():
            state = watch.machine.cached
            if state is None:
                state = await service.work.run(watch.machine.refresh)
            shard = shard or state.shard_id
            check_incarnation(state, name, shard)
            if state.seqno <= sent:
                if not await watch.wait(HEARTBEAT_S):
                    yield b": nothing new\n\n"
                continue
            started = monotonic()
            event = b"event: trace\ndata: " + await _trace(service, state, with_names) + b"\n\n"
            sent, pause_s = int(state.seqno), max(PAUSE_S, (monotonic() - started) / SHARE)
            yield event
            while pause_s > 0 and not watcher.stopping.is_set():
                with suppress(TimeoutError):
                    async with asyncio.timeout(min(pause_s, HEARTBEAT_S)):
                        await watcher.stopping.wait()
                pause_s -= HEARTBEAT_S
                if pause_s > 0:
                    yield b": resting\n\n"


# The structure of a shard by its State, as JSON: batches, merges in progress, holds on since, recent commits. It has
# sizes, times and counts, but no rows, no keys of rows, and no ids that authorise a command. All lists are bounded.

BATCHES_MAX = 512  # entries for batches: in a longer trace an entry covers several neighbours
MERGES_MAX = 64
HOLDS_MAX = 100  # the earliest ones
NAMES_MAX = 3  # of holds on the same time
RECENT_MAX = 64  # commands, the newest
ACTIVITY_MAX = 32  # commits with rows, the newest
NAME_CHARS_MAX = 200


class ShardHold(NamedTuple):
    """What holds `since`, or keeps one time readable. `lapses_in_s` None: it does not lapse."""

    kind: str
    since: Antichain
    name: str
    lapses_in_s: float | None = None


def trace_json(state: State, *, with_names: bool) -> dict[str, Any]:
    """One version of a shard. `with_names`: include the names of readers and cursors, which other users chose."""
    batches = state.trace.batches
    claims = [claim for _, claim in sorted(state.claims.items())]
    claimed = frozenset(part for claim in claims for part in claim.inputs)
    return {
        "shard": state.name,
        **_size_json(state),
        "inline_bytes": state.trace.inline_bytes,
        "batch_count": len(batches),
        "batches": [_stretch_json(stretch, claimed) for stretch in _stretches(batches)],
        "merges": [_merge_json(state, claim) for claim in islice(claims, MERGES_MAX)],
        "holds": _holds_json(state, with_names),
        "readers": len(state.leased_readers),
        "cursors": len(state.critical_readers),
        "writers": len(state.writers),
        "tags": len(state.tags),
        "history_ms": state.settings.history_ms,
        "recent": [_entry_json(*entry) for entry in _recent(state, RECENT_MAX)],
    }


def _size_json(state: State) -> dict[str, Any]:
    """The version, its frontiers, and its size."""
    return {
        "seqno": int(state.seqno),
        "at": instant_text(state.walltime_ms),
        "since": state.since.to_json(),
        "upper": state.upper.to_json(),
        "rows": state.trace.rows,
        "bytes": sum(batch.size for batch in state.trace.batches),
    }


def activity_json(state: State) -> dict[str, Any]:
    """A short summary of a shard: its size, and its latest writes, each `[milliseconds since 1970, rows, bytes]`."""
    written = [commit for commit in _recent(state, ACTIVITY_MAX, maintenance=False) if commit[2].rows]
    return {
        "name": state.name,
        **_size_json(state),
        "batches": len(state.trace.batches),
        "recent": [[at_ms, entry.rows, entry.size] for _, at_ms, entry in reversed(written)],
    }


def level_of(rows: int) -> int:
    """The tier of a batch: level k holds 4^k to 4^(k+1) - 1 updates, since four batches of a tier are merged."""
    return max(rows.bit_length() - 1, 0) // 2


def _stretches(batches: Sequence[HollowBatch]) -> Iterator[Sequence[HollowBatch]]:
    """The batches in at most BATCHES_MAX groups of neighbours."""
    size = -(-len(batches) // BATCHES_MAX) or 1
    for first in range(0, len(batches), size):
        yield batches[first : first + size]


def _stretch_json(batches: Sequence[HollowBatch], claimed: frozenset[str]) -> dict[str, Any]:
    rows = sum(batch.rows for batch in batches)
    return {
        "lower": batches[0].desc.lower.to_json(),
        "upper": batches[-1].desc.upper.to_json(),
        "since": batches[-1].desc.since.to_json(),
        "batches": len(batches),
        "runs": sum(batch.run_count for batch in batches),
        "parts": sum(batch.part_count for batch in batches),
        "rows": rows,
        "bytes": sum(batch.size for batch in batches),
        "inline_bytes": sum(batch.inline_size for batch in batches),
        "level": level_of(rows),
        "merging": bool(claimed) and any(part.id in claimed for batch in batches for part in batch.parts()),
    }


def _merge_json(state: State, claim: Claim) -> dict[str, Any]:
    """A merge in progress. `lower` and `upper` None: its inputs are no longer in the trace."""
    inputs = frozenset(claim.inputs)
    place = state.trace.covering(inputs)
    batches = [] if place is None else state.trace.batches[place[0] : place[0] + place[1]]
    return {
        "lower": batches[0].desc.lower.to_json() if batches else None,
        "upper": batches[-1].desc.upper.to_json() if batches else None,
        "batches": len(batches),
        "inputs": len(inputs),
        "rows": sum(batch.rows for batch in batches),
        "done_parts": len(claim.done),
        "done_rows": sum(part.rows for part in claim.done),
        "done_bytes": sum(part.size for part in claim.done),
    }


# Holds on since.


def _holds(state: State) -> Iterator[ShardHold]:
    if not state.history_hold.is_empty:
        yield ShardHold("history", state.history_hold, "")
    for cursor in state.critical_readers.values():
        yield ShardHold("cursor", cursor.since, cursor.purpose)
    for reader in state.leased_readers.values():
        if not reader.since.is_empty:
            left_s = (reader.lapses_ms - state.lease_now_ms) / 1000
            yield ShardHold("point" if reader.point else "reader", reader.since, reader.purpose, left_s)
    for name, tag in state.tags.items():
        yield ShardHold("tag", Antichain(tag.time), name)


def _holds_json(state: State, with_names: bool) -> list[dict[str, Any]]:
    """Holds of the same kind on the same time share an entry; the earliest times come first."""
    grouped: dict[tuple[str, Antichain], list[ShardHold]] = defaultdict(list)
    for hold in _holds(state):
        grouped[hold.kind, hold.since].append(hold)
    ordered = sorted(grouped.items(), key=lambda item: (item[0][1].is_empty, item[0][1].element or 0, item[0][0]))
    entries = []
    for (kind, since), holds in ordered[:HOLDS_MAX]:
        lapsing = [hold.lapses_in_s for hold in holds if hold.lapses_in_s is not None]
        names = {hold.name[:NAME_CHARS_MAX] for hold in holds if hold.name and (with_names or kind == "tag")}
        entry = {"kind": kind, "since": since.to_json(), "count": len(holds), "names": sorted(names)[:NAMES_MAX]}
        entries.append({**entry, "lapses_in_s": round(max(lapsing), 3) if lapsing else None})
    return entries


# Recent commands.


def _recent(state: State, most: int, *, maintenance: bool = True) -> list[tuple[SeqNo, int, CommandEntry]]:
    """The newest commands in the State itself, newest first."""
    newest: Iterable[tuple[SeqNo, Committed]] = nlargest(most, state.entries.items(), key=lambda item: int(item[0]))
    commands = (
        (seqno, commit.at_ms, entry)
        for seqno, commit in newest
        for entry in reversed(commit.entries)
        if maintenance or entry.operation not in MAINTENANCE
    )
    return list(islice(commands, most))


def _entry_json(seqno: SeqNo, at_ms: int, entry: CommandEntry) -> dict[str, Any]:
    return {
        "seqno": int(seqno),
        "at_ms": at_ms,
        "operation": entry.operation,
        "lower": entry.lower.to_json(),
        "upper": entry.upper.to_json(),
        "rows": entry.rows,
        "bytes": entry.size,
    }
