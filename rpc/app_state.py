"""What the routes share: the opened location, pools, watcher, tokens; and readiness."""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from starlette.requests import Request

from compactor.embedded import maintain
from persist.client.embedded import EmbeddedTransport
from persist.client.lease_pool import LeasePool
from persist.client.server_writer import Names, ThinWriter
from persist.client.shard import HandleSettings
from persist.client.snapshot import ReadSettings
from persist.client.transport import waits_for_holds
from persist.client.write import WriteSettings
from persist.codecs.allowance import Allowance
from persist.codecs.json_rows import decode_body
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import ConstraintViolated, Forbidden, ReadOnly, SchemaMismatch, UnknownShard
from persist.core.ids import ShardId, family_of, shard_id_of
from persist.core.phases import dropped
from persist.core.shard_view import ViewRequest
from persist.core.state import State
from persist.formats.exposition import Family
from persist.formats.http_messages import validate_command
from persist.parts import current_schema
from persist.regions.region_index import region_of
from rpc.audit import BODY, BODY_BYTES_MAX, Audit
from rpc.auth import Principal, Tokens
from rpc.change_streams import Listeners
from rpc.concurrency_limits import CommandTurns, Slots, TokenLeases, Work, share
from rpc.connection_limits import ConnectionBounds
from rpc.metrics import ServerMetrics
from rpc.post_groups import PostGroups
from rpc.prefix_usage import Tally
from rpc.quota_file import quota_file_of
from rpc.quotas import Quotas
from rpc.request_body import Body, check_declared
from rpc.settings import ServerSettings
from rpc.shard_watcher import WAITS_MAX, ShardWatcher

# Whether both stores answer, asked for by strangers: each look writes to the stores, so one look answers many.


KEPT_S = 1.0  # for so long what was found is told again


class Readiness:
    """`look` asks both stores, and returns what is wrong with one that cannot be written. Belongs to one event loop."""

    def __init__(self, look: Callable[[], Awaitable[list[str]]], monotonic: Callable[[], float]) -> None:
        self._look = look
        self._monotonic = monotonic
        self._under_way: asyncio.Task[list[str]] | None = None
        self._found: list[str] | None = None
        self._found_s = 0.0

    async def told(self) -> list[str]:
        """What a look has found that is at most `KEPT_S` seconds old, or that is under way. Raises what it raised.

        A failure is told to those who wait for it, and to nobody who comes later.
        """
        if self._found is not None and self._monotonic() - self._found_s < KEPT_S:
            return self._found
        if self._under_way is None:
            self._under_way = asyncio.get_running_loop().create_task(self._looked())
            self._under_way.add_done_callback(self._ended)
        return await asyncio.shield(self._under_way)

    async def _looked(self) -> list[str]:
        self._found = await self._look()
        self._found_s = self._monotonic()
        return self._found

    def _ended(self, look: asyncio.Task[list[str]]) -> None:
        self._under_way = None
        if not look.cancelled():
            look.exception()  # whoever asked may be gone, and nobody need hear of it then


# What the routes share: the opened location, the pools, the watcher, the tokens, and the limits.


T = TypeVar("T")
JSON_AT_ONCE_BYTES_MAX = 16 * 1024  # of a body that is read on the event loop
THIN_WRITER_LEASE_MS = 600_000
THIN_RETRY_S = 15.0  # how long the server retries for a thin client before it answers 429 or 503
THIN_WRITERS_IDLE_MAX = 1_000
SCHEMAS_MAX = 10_000
SHARD_IDS_MAX = 200_000
WAIT_S_MAX = 60.0  # longest wait of one request
STREAMS_SHARE_PERCENT = 75  # of listen streams, that one caller may have
SNAPSHOT_MEMORY_BYTES = 32 * 1024 * 1024  # what a snapshot that is streamed holds while it consolidates
METRIC_SHARDS_MAX = 1_000  # shards with gauges of their own
TOKEN_SHARD_LEASES_MAX = 1_000  # leased readers of one token on one shard, at this server
TOKEN_LEASES_MAX = 20_000  # leased readers of one token on all shards, at this server


class Service:
    """Everything that a server holds. Closing it does not close the location."""

    def __init__(self, location: Location, settings: ServerSettings, proof: str) -> None:
        self.location = location
        self.settings = settings
        self.limits = settings.limits
        self.proof = proof
        self.transport = EmbeddedTransport(location, maintain)
        self.transport.leases = None if location.is_copy else LeasePool(location.clock)
        self.work = Work(settings.limits, settings.linger_ms / 1000)
        self.readiness = Readiness(partial(self.work.run, location.check), location.clock.monotonic)
        self.watcher = ShardWatcher(location, self.work)
        self.tokens: Tokens | None = None
        self.leases: TokenLeases | None = None
        self.index = settings.open_index(location.clock)
        self.bounds = ConnectionBounds(settings.limits)
        self.tally = Tally(location)
        self.quotas = Quotas(quota_file_of(settings, location.clock.monotonic), location.clock, self.tally)
        self.audit = Audit(settings.tokens_file is not None)
        self.metrics = ServerMetrics(location, self._pools, METRIC_SHARDS_MAX, self._families)
        self.handles = HandleSettings(
            write=WriteSettings(lease_ms=THIN_WRITER_LEASE_MS, retry_s=THIN_RETRY_S),
            read=ReadSettings(
                retry_s=THIN_RETRY_S,
                memory_bytes=SNAPSHOT_MEMORY_BYTES,
                bound=location.versions.bound.in_pieces(),
            ),
        )
        self.writers = ThinWriters(self.transport, self.handles.write)
        self.posts = PostGroups(self.writers, self.allowance, settings.limits.rows_max)
        self.shard_ids = ShardIds(location)
        self.listening = Listeners(self.transport, location, self.work, self.watcher)
        limits = settings.limits
        snapshots, listeners = limits.snapshots_max, limits.listeners_max
        self.snapshots = Slots(snapshots, "many snapshots under way", share(snapshots))
        self.listeners = Slots(listeners, "many listeners", share(listeners, STREAMS_SHARE_PERCENT))
        if settings.tokens_file is not None:
            self.tokens = Tokens(
                settings.tokens_file, now_s=lambda: location.clock.now_ms() / 1000, own=settings.maintenance_token
            )
            self.leases = TokenLeases(TOKEN_SHARD_LEASES_MAX, TOKEN_LEASES_MAX, now_s=location.clock.monotonic)

    def _pools(self) -> dict[str, tuple[int, int]]:
        """What is in use at this moment of all that has a limit, and the limits, for /metrics."""
        limits, work = self.limits, self.work
        slots: dict[str, Slots | CommandTurns] = {
            "commands": work.commands,
            "io_queue": work.io_queued,
            "decoded_bytes": work.decoded,
            "body_bytes": work.body_bytes,
            "spool_bytes": work.spooled,
            "worked_bytes": work.worked,
            "download_bytes": work.downloads,
            "listeners": self.listeners,
            "snapshots": self.snapshots,
        }
        return {
            **{name: (slot.taken, slot.most) for name, slot in slots.items()},
            "connections": (self.bounds.connections, self.bounds.connections_max),
            "waits": (self.watcher.waiting, WAITS_MAX),
            "lead_threads": (min(work.leads, work.lead_threads), work.lead_threads),
            "io_threads": (min(work.io_queued.taken, limits.io_threads), limits.io_threads),
        }

    def allowance(self) -> Allowance:
        """What the rows of one request may decode to, for a `with`."""
        return Allowance(self.work.decoded, self.limits.decoded_bytes_max)

    def _families(self, principal: Principal) -> Iterator[Family]:
        """Of connections, quotas and the audit, as far as the caller may know."""
        yield from self.bounds.families()
        yield from self.quotas.families(principal)
        yield from self.audit.families()

    @asynccontextmanager
    async def body(self, request: Request, bytes_max: int) -> AsyncIterator[bytes]:
        """The body of a request, counted while it is worked on. Raises BodyTooLarge, Overloaded."""
        check_declared(request.headers.get("content-length", ""), bytes_max)
        body = Body(self.work)
        try:
            data = await body.read(request.receive, bytes_max)
            request.scope[BODY] = data if len(data) <= BODY_BYTES_MAX else None
            yield data
        finally:
            body.release()

    async def json(self, request: Request, bytes_max: int, read: Callable[[Any], T]) -> T:
        """What `read` makes of a body in JSON, whose objects are counted: of a large one on another thread.

        Raises BodyTooLarge, Overloaded, InvalidUsage, and as `read` does.
        """

        def work(data: bytes) -> T:
            with self.allowance() as allowed:
                return read(decode_body(data, allowed.spend))

        async with self.body(request, bytes_max) as data:
            return work(data) if len(data) <= JSON_AT_ONCE_BYTES_MAX else await self.work.run(work, data)

    def check_home(self, name: str) -> None:
        """Raises ReadOnly where the shard is at home in another region: it is made there.

        Its name tells, where this server is home of a region; elsewhere the index does. A read-only one makes none.
        """
        region = region_of(name)
        if not region or region == self.settings.region:
            return
        found = None if self.index is None else self.index.now().regions.get(region)
        if found is None and (self.settings.read_only or not self.settings.region):
            return
        home = found.write if found is not None else ()
        raise ReadOnly(
            f"shard {name!r} is at home in region {region!r}: make it there, at {', '.join(home) or 'home'}",
            home=list(home),
            region=region,
        )

    def stop(self) -> None:
        """Let waits and streams end, so that the server can close."""
        self.watcher.stop()
        self.listening.leases.stop()

    async def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        """Validate and commit one command, as `caller` in the commit history."""
        command = validate_command(command)
        await self.give_back(name, command)
        return await self.work.apply(self.location.machine(name), command, caller)

    async def state(self, name: str) -> State:
        """The State of a shard as of now. Raises UnknownShard where it was dropped."""
        state = await self.watcher.state(name, ViewRequest(with_batches=False))
        if state.is_closed:
            raise UnknownShard(dropped(name))
        return state

    async def give_back(self, name: str, command: c.Command) -> None:
        """Give back unused leases of the server's own reads where the command waits for holds."""
        if self.transport.leases is not None and waits_for_holds(command):
            await self.work.run(self.transport.leases.let_go, name)

    def close(self) -> None:
        self.stop()
        if self.transport.leases is not None:
            self.transport.leases.close()
        self.work.close()
        self.tally.close()


class ThinWriters:
    """Writers for clients that post rows. An idle writer is used again, a bounded number is kept. Thread-safe."""

    def __init__(self, transport: EmbeddedTransport, settings: WriteSettings) -> None:
        self._transport = transport
        self._settings = settings
        self._lock = threading.Lock()
        self._idle: OrderedDict[ShardId, list[ThinWriter]] = OrderedDict()
        self._idle_count = 0
        self._names: OrderedDict[tuple[ShardId, int], Names] = OrderedDict()

    def names(self, state: State) -> Names:
        """What the names of columns mean in this State. Raises Corruption: no schema of it can be read."""
        key = (state.shard_id, state.schema_id)
        with self._lock:
            found = self._names.get(key)
        if found is None:
            found = Names(state.shard_id, *current_schema(state.schemas), state.schema_id)
            with self._lock:
                self._names[key] = found
                if len(self._names) > SCHEMAS_MAX:
                    self._names.popitem(last=False)
        return found

    @contextmanager
    def writer(self, name: str, names: Names, caller: Caller = NOBODY) -> Iterator[ThinWriter]:
        """A writer that nobody else uses meanwhile; it writes for this caller. After an error it is left to lapse."""
        handle = self.take(name, names, caller)
        try:
            yield handle
        except (ConstraintViolated, SchemaMismatch):  # nothing happened: those that are often refused use one writer
            self.give_back(handle)
            raise
        self.give_back(handle)

    def take(self, name: str, names: Names, caller: Caller = NOBODY) -> ThinWriter:
        """A writer of rows that were read by these names, to be given back, or left to lapse."""
        with self._lock:
            handles = self._idle.get(names.shard)
            handle = handles.pop() if handles else None
            self._idle_count -= handle is not None
        handle = handle or ThinWriter(self._transport, name, names, self._settings)
        handle.caller, handle.names = caller, names
        return handle

    def give_back(self, handle: ThinWriter) -> None:
        """Let others use a writer that `take` gave, and that has no call under way."""
        shard = handle.names.shard
        with self._lock:
            self._idle.setdefault(shard, []).append(handle)
            self._idle.move_to_end(shard)
            self._idle_count += 1
            while self._idle_count > THIN_WRITERS_IDLE_MAX:
                oldest = next(iter(self._idle))
                self._idle[oldest].pop()
                self._idle_count -= 1
                if not self._idle[oldest]:
                    del self._idle[oldest]


class ShardIds:
    """From the shard id that begins a blob's key back to the shard's name, for tokens that are limited to prefixes.

    All lives of a name are its: they are kept by what their ids begin with.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._names: OrderedDict[str, str] = OrderedDict()

    def learn(self, name: str) -> None:
        self._names[family_of(shard_id_of(name))] = name
        if len(self._names) > SHARD_IDS_MAX:
            self._names.popitem(last=False)

    def known(self, shard_id: str) -> str | None:
        """The name of that shard, as far as it is known here."""
        return self._names.get(family_of(shard_id))

    def find(self, shard_id: str, principal: Principal) -> None:
        """Raises Forbidden unless the principal sees the shard of that id. Blocking: may list names."""
        if principal.is_unlimited:
            return
        name = self._names.get(family_of(shard_id))
        if name is None:
            for prefix in principal.prefixes:
                name = name or self._search(shard_id, prefix)
        if name is None or not principal.sees(name):
            raise Forbidden(f"the token {principal.name!r} is not good for the shard of this blob")

    def _search(self, shard_id: str, prefix: str) -> str | None:
        for name in islice(self._location.all_names(prefix), SHARD_IDS_MAX):
            self.learn(name)
            if family_of(shard_id_of(name)) == family_of(shard_id):
                return name
        return None


def service_of(request: Request) -> Service:
    found: Any = request.scope["persist.service"]
    assert isinstance(found, Service)
    return found


def principal_of(request: Request) -> Principal:
    found: Any = request.scope["persist.principal"]
    assert isinstance(found, Principal)
    return found


def shard_of(request: Request) -> str:
    """The shard's name in the path, as `rpc.routes.table` found it."""
    name: str = request.scope["persist.shard"]
    return name
