"""Listen streams: their events, their leases, and streamed responses that hold resources."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from contextlib import AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from weakref import WeakValueDictionary

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from persist.client.listen import Listen, ListenEvent
from persist.client.snapshot import ReadLease, ReadSettings
from persist.client.transport import OneShard, Transport
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.blob_keys import is_of_maintenance
from persist.core.errors import Expired, Indeterminate, PersistError, Unavailable, UnknownShard
from persist.core.frontier import Antichain
from persist.core.ids import ReaderId, SeqNo, ShardId, mint
from persist.core.shard_phases import dropped, outlived
from persist.core.shard_view import SeenVersion
from persist.core.state import State
from persist.parts import EVERYTHING, Selection, current_schema
from rpc.concurrency_limits import CALLER, CommandTurns, Work
from rpc.listen_frames import EVENTS, HEARTBEAT_S, FrameSource, frame, heartbeat, sse
from rpc.shard_watcher import ShardWatcher, is_past

# Each listen stream is one task on the event loop, without a thread.
#
# A step is everything between a listener's frontier and the shard's upper. Small steps are encoded once for all
# listeners at the same frontier. Large ones are encoded piece by piece for each listener, a bounded number at a time. A
# listener that reads too slowly is disconnected, and resumes from the last frontier that it received.


LISTEN_MEMORY_BYTES = 16 * 1024 * 1024  # of a listener, for one event
SHARED_ROWS_MAX = 20_000  # a step with more updates is not shared
SHARED_STEP_BYTES_MAX = 32 * 1024 * 1024  # neither is one with more bytes
SHARED_BYTES_MAX = 64 * 1024 * 1024  # of steps that are cached for listeners that arrive a little later
KEPT_MAX = 40 * 1024 * 1024  # decoded bytes of row groups that a step reads together
LARGE_STEPS_MAX = 4  # in progress at a time, until their listeners have read them
LARGE_STEPS_OF_ONE = 2  # of them, for one caller: a stalled listener occupies one until it is disconnected
_Encode = Callable[[ListenEvent], bytes]
_Step = list[tuple[Antichain, bytes]]
_Form = tuple[str, Selection, int]  # the encoding, the selected updates, and the id of the schema for column names
_Key = tuple[ShardId, _Form, Antichain, Antichain]  # of a step: the shard, the form, and the frontiers around it


class Listeners:
    """All listen streams of one server."""

    def __init__(self, transport: Transport, location: Location, work: Work, watcher: ShardWatcher) -> None:
        self._transport = transport
        self._location = location
        self._work = work
        self._watcher = watcher
        self._settings = ReadSettings(
            lease_ms=LEASE_MS,
            memory_bytes=LISTEN_MEMORY_BYTES,
            bound=replace(location.versions.bound.in_pieces(), kept_max=KEPT_MAX),
        )
        self._shared: OrderedDict[_Key, asyncio.Future[_Step | None]] = OrderedDict()
        self._shared_bytes = 0
        self._large = CommandTurns(LARGE_STEPS_MAX, LARGE_STEPS_OF_ONE)
        self.leases = StreamLeases(location, work)

    async def stream(
        self,
        name: str,
        hold: StreamHold,
        start: Antichain,
        until: Antichain,
        form: str,
        selection: Selection = EVERYTHING,
    ) -> AsyncGenerator[bytes]:
        """The frames of the selected updates from the frontier `start` until `until` or the end of shard or server.

        The selection has the column names of the schema `selection.known`, or of the current one. The first frame is
        sent at once; it contains the id by which to resume.
        """
        frontier, known, loop = start, selection.known, asyncio.get_running_loop()
        due_s = loop.time()  # of the next heartbeat
        with self._watcher.watch(name) as watch:
            while frontier.element is not None and frontier < until and not self._watcher.stopping.is_set():
                state = watch.machine.cached
                if state is None:
                    state = await self._work.run(watch.machine.refresh)
                check_incarnation(state, name, hold.shard)
                known = current_schema(state.schemas)[0] if known is None else known
                if not is_past(state, frontier.element):
                    # The shard may also advance without a time, as by a commit of attributes: that is no news here.
                    if due_s <= loop.time() or not await watch.wait(due_s - loop.time()):
                        yield heartbeat(frontier, form, _source(state, (form, selection, known)))
                        due_s = loop.time() + HEARTBEAT_S
                    continue
                with hold.reading(state.seqno):
                    wanted = form, selection, known
                    async for upper, frame in self._step(state, frontier, min(state.upper, until), wanted):
                        yield frame
                        frontier, due_s = upper, loop.time() + HEARTBEAT_S
                hold.frontier = frontier

    async def _step(
        self, state: State, frontier: Antichain, until: Antichain, form: _Form
    ) -> AsyncIterator[tuple[Antichain, bytes]]:
        """(frontier afterwards, frame) up to exactly `until`, which the State has reached."""
        rows, size, is_staged = 0, 0, False
        for batch in reversed(state.trace.batches):
            if batch.desc.upper <= frontier or rows > SHARED_ROWS_MAX or size > SHARED_STEP_BYTES_MAX:
                break
            rows, size = rows + batch.rows, size + batch.size
            is_staged = is_staged or any(part.key and not is_of_maintenance(part.key) for part in batch.parts())
        if rows <= SHARED_ROWS_MAX and size <= SHARED_STEP_BYTES_MAX:
            step = await self._shared_step(state, frontier, until, form, is_staged)
            if step is not None:
                for item in step:
                    yield item
                return
        async with self._large.turn():
            events = self._events(state, frontier, until, form)
            while (item := await self._work.run(next, events, None)) is not None:
                yield item

    async def _shared_step(
        self, state: State, frontier: Antichain, until: Antichain, form: _Form, is_staged: bool
    ) -> _Step | None:
        """Staged parts (`is_staged`) may hold many rows in few bytes, so such a step waits for its turn."""

        async def encode_step() -> _Step | None:
            async with self._large.turn() if is_staged else nullcontext():
                return await self._work.run(lambda: _bounded(self._events(state, frontier, until, form)))

        key = (state.shard_id, form, frontier, until)
        step = self._shared.get(key)
        if step is None:
            step = asyncio.ensure_future(encode_step())
            self._shared[key] = step
            step.add_done_callback(lambda finished: self._cache(key, finished))
        return await asyncio.shield(step)

    def _cache(self, key: _Key, finished: asyncio.Future[_Step | None]) -> None:
        """Cache a finished shared step within bounds. A failed one is repeated by the next listener."""
        if finished.cancelled() or finished.exception() is not None:
            self._shared.pop(key, None)
            return
        self._shared_bytes += _size(finished)
        while self._shared_bytes > SHARED_BYTES_MAX and self._shared:
            oldest, step = next(iter(self._shared.items()))
            if not step.done():
                return
            del self._shared[oldest]
            self._shared_bytes -= _size(step)

    def _events(
        self, state: State, frontier: Antichain, until: Antichain, form: _Form
    ) -> Iterator[tuple[Antichain, bytes]]:
        """Blocking: what the State in memory, which may be newer by now, holds in `[frontier, until)`, as frames."""
        encode: _Encode = partial(sse if form[0] == EVENTS else frame, source=_source(state, form))
        element = frontier.element
        assert element is not None
        as_of = None if element == 0 else element - 1
        name, transport = state.name, OneShard(self._transport, state.shard_id)
        lease = _ExternalLease(transport, name, ReaderId("r" + "0" * 32), self._settings, SeqNo(1))
        listen = Listen(transport, name, lease, (as_of, until), self._settings, form[1])
        listen.known = form[2]
        for event in listen.next_events(0.0):
            yield event.upper, encode(event)


class _ExternalLease(ReadLease):
    """The lease of a step; the listener's `StreamHold` protects what it reads, so it sends no commands."""

    def _send(self, command: c.Command, retry_s: float | None = None) -> c.Result:
        return c.SinceDowngraded(self.since, self.since)


def check_incarnation(state: State, name: str, shard: ShardId) -> None:
    """Raises UnknownShard if the State is not of the incarnation `shard` of the name, or that was dropped."""
    if state.shard_id != shard:
        raise UnknownShard(outlived(name))
    if state.is_closed:
        raise UnknownShard(dropped(name))


def _source(state: State, form: _Form) -> FrameSource:
    is_named = form[0] == EVENTS and form[1] != EVERYTHING  # other clients keep the names themselves
    return FrameSource(SeenVersion(state.seqno, state.commit_id), state.shard_id, form[2] if is_named else 0)


def _bounded(events: Iterator[tuple[Antichain, bytes]]) -> _Step | None:
    """All items of a step, or None if they are too large to share."""
    step: _Step = []
    left = SHARED_STEP_BYTES_MAX
    for item in events:
        left -= len(item[1])
        if left < 0:
            return None
        step.append(item)
    return step


def _size(step: asyncio.Future[_Step | None]) -> int:
    return sum(len(data) for _, data in step.result() or ()) + 256


# Streamed responses.

PIECE_BYTES = 256 * 1024  # written to a connection at a time


class HeldStream(StreamingResponse):
    """Releases everything on `held` when it ends: complete, aborted, or never started.

    It is sent in pieces of PIECE_BYTES. The connection waits for its client, and disconnects one that is too slow.
    """

    def __init__(
        self,
        content: AsyncIterator[bytes],
        held: AsyncExitStack,
        *,
        media_type: str,
        headers: dict[str, str],
        status: int = 200,
    ) -> None:
        super().__init__(content, status, headers=headers, media_type=media_type)
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def pieces(message: Message) -> None:
            body = message.get("body", b"")
            for start in range(0, len(body) - PIECE_BYTES, PIECE_BYTES):
                piece = body[start : start + PIECE_BYTES]
                await send({"type": message["type"], "body": piece, "more_body": True})
            if len(body) > PIECE_BYTES:
                message = {**message, "body": body[(len(body) - 1) // PIECE_BYTES * PIECE_BYTES :]}
            await send(message)

        async with self._held:
            await super().__call__(scope, receive, pieces)


class Stepped:
    """A blocking generator of bytes, advanced on other threads. Closing it waits for the step in progress."""

    def __init__(self, work: Work, pieces: Generator[bytes]) -> None:
        self._work = work
        self._pieces = pieces
        self._lock = threading.Lock()

    async def next(self) -> bytes | None:
        """The next piece; None at the end."""
        return await self._work.run(self._next)

    async def rest(self, piece: bytes | None) -> AsyncIterator[bytes]:
        while piece is not None:
            if piece:
                yield piece
            piece = await self.next()

    async def close(self) -> None:
        await self._work.run(self._close)

    def _next(self) -> bytes | None:
        with self._lock:
            return next(self._pieces, None)

    def _close(self) -> None:
        with self._lock:
            self._pieces.close()


# Leases of listen streams: one leased reader serves many listeners of a shard, so that thousands of idle listeners cost
# little. A lease is renewed after a third of its length and moves forward at most `MOVES_PER_LEASE` times in it,
# however often its listeners receive updates.

LEASE_MS = 3_600_000
MOVES_PER_LEASE = 60
RENEWALS_PER_LEASE = 3


@dataclass(eq=False)
class _Lease:
    """A leased reader of a shard, and its listeners. `moves_since`: the shard's since follows it."""

    shard: ShardId
    moves_since: bool
    reader: ReaderId
    since: Antichain
    renewed_s: float
    holds: set[StreamHold] = field(default_factory=set)
    lost: PersistError | None = None


class StreamHold:
    """A listener's share of a lease: maintenance keeps everything at or beyond its frontier.

    `frontier`: the listener has received everything before it. `shard` is the incarnation that it holds.
    """

    def __init__(self, lease: _Lease, frontier: Antichain) -> None:
        self.lease = lease
        self.shard = lease.shard
        self.frontier = frontier
        self.seqno: SeqNo | None = None  # of the State that it is reading from
        lease.holds.add(self)

    @contextlib.contextmanager
    def reading(self, seqno: SeqNo) -> Iterator[None]:
        """Protect the blobs of the State at `seqno` until the context ends. Raises Expired if the lease has lapsed."""
        if self.lease.lost is not None:
            raise self.lease.lost
        self.seqno = seqno
        try:
            yield
        finally:
            self.seqno = None


class StreamLeases:
    """The leases of all listen streams of one server. Used from the event loop's thread."""

    def __init__(self, location: Location, work: Work) -> None:
        self._location = location
        self._work = work
        self._by_name: dict[str, list[_Lease]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by shard, while in use
        self._keeper: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def hold(self, name: str, frontier: Antichain, moves_since: bool = False) -> AsyncIterator[StreamHold]:
        """Hold what a listener at `frontier` needs. `moves_since`: since follows it unless something else holds it.

        Raises NotReadable if that is already compacted, and UnknownShard.
        """
        hold = await self._hold(name, frontier, moves_since)
        try:
            yield hold
        finally:
            hold.lease.holds.remove(hold)
            if not hold.lease.holds:
                await asyncio.shield(self._expire(name, hold.lease))

    def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()

    async def _hold(self, name: str, frontier: Antichain, moves_since: bool) -> StreamHold:
        since = _since(frontier)
        machine = self._location.machine(name)
        cached = machine.cached
        shard = (cached if cached is not None else await self._work.run(machine.refresh)).shard_id
        async with self._lock(name):
            for lease in self._by_name.get(name, ()):
                fits = lease.shard == shard and lease.moves_since == moves_since
                if lease.lost is None and fits and lease.since <= since:
                    return StreamHold(lease, frontier)
            reader, started = mint(ReaderId, self._location.ids), self._now()
            try:
                await self._apply(name, c.RegisterReader(reader, since, LEASE_MS, "http listen", shard=shard))
            except UnknownShard:
                if (known := machine.cached) is None or known.shard_id == shard:
                    raise
                raise Unavailable(f"shard {name!r} was dropped and recreated just now; listen again") from None
            except Indeterminate as error:  # if the lease was registered, it lapses
                raise Unavailable(f"cannot listen to shard {name!r} now: no answer came; listen again") from error
            lease = _Lease(shard, moves_since, reader, since, started)
            self._by_name.setdefault(name, []).append(lease)
            if self._keeper is None:
                self._keeper = asyncio.get_running_loop().create_task(self._keep())
            return StreamHold(lease, frontier)

    async def _expire(self, name: str, lease: _Lease) -> None:
        """Give up a lease, unless another listener has joined it."""
        async with self._lock(name):
            leases = self._by_name.get(name, [])
            if lease.holds or lease not in leases:
                return
            leases.remove(lease)
            if not leases:
                del self._by_name[name]
            with contextlib.suppress(PersistError):  # the lease lapses
                await self._apply(name, c.ExpireReader(lease.reader, shard=lease.shard))

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _keep(self) -> None:
        """Renew and move the leases while there are any."""
        CALLER.set("")  # it works for all listeners, not for the first one
        while self._by_name:
            await asyncio.sleep(LEASE_MS / 1000 / MOVES_PER_LEASE)
            for name, leases in list(self._by_name.items()):
                for lease in list(leases):
                    await self._renew(name, lease)
        self._keeper = None

    async def _renew(self, name: str, lease: _Lease) -> None:
        state = self._location.machine(name).cached
        since = _since(min((hold.frontier for hold in lease.holds), default=lease.since))
        due = self._now() - lease.renewed_s > LEASE_MS / 1000 / RENEWALS_PER_LEASE
        if state is None or not (due or lease.since < since):
            return
        seqno = min([*(hold.seqno for hold in lease.holds if hold.seqno is not None), state.seqno])
        started, before = self._now(), lease.since
        lease.since = max(since, before)  # a listener that joins now must not rely on what is given up here
        try:
            command = c.DowngradeSince(lease.reader, lease.since, seqno, lease.moves_since, shard=lease.shard)
            await self._apply(name, command)
            lease.renewed_s = started
        except (Expired, UnknownShard) as error:
            lease.lost = error
        except PersistError:
            return  # the next round tries again

    async def _apply(self, name: str, command: c.Command) -> c.Result:
        return await self._work.apply(self._location.machine(name), command)

    def _now(self) -> float:
        return self._location.clock.monotonic()


def _since(frontier: Antichain) -> Antichain:
    """The since that keeps all times at or beyond `frontier` distinguishable: the time just before it."""
    return frontier if frontier.element is None else Antichain(max(frontier.element - 1, 0))
