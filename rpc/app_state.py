"""State shared by the routes: the opened location, thread pools, watcher, tokens, limits and readiness."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import Any, TypeVar

from starlette.requests import Request

from compactor.on_demand import maintain
from persist.client.embedded import EmbeddedTransport
from persist.client.lease_pool import LeasePool
from persist.client.shard import HandleSettings
from persist.client.snapshot import ReadSettings
from persist.client.transport import waits_for_holds
from persist.client.write import WriteSettings
from persist.codecs.decode_limits import Allowance
from persist.codecs.json_rows import decode_body
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import Forbidden, ReadOnly, UnknownShard
from persist.core.ids import check_shard_name, family_of, shard_id_of
from persist.core.shard_phases import dropped
from persist.core.shard_view import ViewRequest
from persist.core.state import State
from persist.formats.exposition import Family
from persist.formats.http_messages import validate_command
from persist.regions.region_index import region_of
from rpc.audit import BODY_BYTES_MAX, BODY_KEY, Audit
from rpc.auth import Principal, Tokens
from rpc.change_streams import Listeners
from rpc.concurrency_limits import CommandTurns, Slots, TokenLeases, Work, share
from rpc.http_protocol import ConnectionBounds
from rpc.metrics import ServerMetrics
from rpc.post_batching import PostGroups, ThinWriters
from rpc.prefix_usage import PrefixUsage
from rpc.quotas import Quotas, quota_file_of
from rpc.request_body import Body, check_declared
from rpc.settings import ServerSettings
from rpc.shard_watcher import WAITS_MAX, ShardWatcher

READINESS_CACHE_S = 1.0


class Readiness:
    """Caches the readiness check, which writes to both stores, for callers without a token. For one event loop.

    `check_stores` returns the reasons why a store cannot be written.
    """

    def __init__(self, check_stores: Callable[[], Awaitable[list[str]]], monotonic: Callable[[], float]) -> None:
        self._check_stores = check_stores
        self._monotonic = monotonic
        self._last: asyncio.Task[tuple[list[str], float]] | None = None

    async def check(self) -> list[str]:
        """The result of a check that is at most `READINESS_CACHE_S` old or running. Raises what that check raised.

        Failures are not cached.
        """
        last = self._last
        if last is None or (last.done() and (last.cancelled() or last.exception() or self._is_old(last.result()[1]))):
            last = self._last = asyncio.get_running_loop().create_task(self._run())
        return (await asyncio.shield(last))[0]

    async def _run(self) -> tuple[list[str], float]:
        return await self._check_stores(), self._monotonic()

    def _is_old(self, checked_s: float) -> bool:
        return self._monotonic() - checked_s >= READINESS_CACHE_S


T = TypeVar("T")
JSON_AT_ONCE_BYTES_MAX = 16 * 1024  # of a body that is parsed on the event loop
THIN_WRITER_LEASE_MS = 600_000
THIN_RETRY_S = 15.0  # how long the server retries on behalf of a thin client before it answers 429 or 503
SHARD_IDS_MAX = 200_000
WAIT_S_MAX = 60.0  # of one request
STREAMS_SHARE_PERCENT = 75  # of listen streams that one caller may have
SNAPSHOT_MEMORY_BYTES = 32 * 1024 * 1024  # for consolidation in one streamed snapshot
METRIC_SHARDS_MAX = 1_000  # shards with their own gauges
TOKEN_SHARD_LEASES_MAX = 1_000  # leased readers of one token on one shard, at this server
TOKEN_LEASES_MAX = 20_000  # leased readers of one token on all shards, at this server


class Service:
    """The resources of one server. Closing it does not close the location."""

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
        self.usage = PrefixUsage(location)
        self.quotas = Quotas(quota_file_of(settings, location.clock.monotonic), location.clock, self.usage)
        self.audit = Audit(settings.tokens_file is not None)
        self.metrics = ServerMetrics(location, self._pools, METRIC_SHARDS_MAX, self._families)
        self.handles = HandleSettings(
            write=WriteSettings(lease_ms=THIN_WRITER_LEASE_MS, retry_s=THIN_RETRY_S),
            read=ReadSettings(
                retry_s=THIN_RETRY_S, memory_bytes=SNAPSHOT_MEMORY_BYTES, bound=location.versions.bound.in_pieces()
            ),
        )
        self.writers = ThinWriters(self.transport, self.handles.write)
        self.posts = PostGroups(self.writers, self.allowance, settings.limits.rows_max)
        self.shard_ids = ShardIds(location)
        self.listening = Listeners(self.transport, location, self.work, self.watcher)
        snapshots, listeners = settings.limits.snapshots_max, settings.limits.listeners_max
        self.snapshots = Slots(snapshots, "many snapshots under way", share(snapshots))
        self.listeners = Slots(listeners, "many listeners", share(listeners, STREAMS_SHARE_PERCENT))
        if settings.tokens_file is not None:
            self.tokens = Tokens(
                settings.tokens_file, now_s=lambda: location.clock.now_ms() / 1000, own=settings.maintenance_token
            )
            self.leases = TokenLeases(TOKEN_SHARD_LEASES_MAX, TOKEN_LEASES_MAX, now_s=location.clock.monotonic)

    def _pools(self) -> dict[str, tuple[int, int]]:
        """By name, the current use and the limit of every bounded resource, for /metrics."""
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
            "lead_threads": work.leads,
        }
        return {
            **{name: (slot.taken, slot.most) for name, slot in slots.items()},
            "connections": (self.bounds.connections, self.bounds.connections_max),
            "waits": (self.watcher.waiting, WAITS_MAX),
            "io_threads": (min(work.io_queued.taken, limits.io_threads), limits.io_threads),
        }

    def allowance(self) -> Allowance:
        """A context manager that bounds the decoded size of the rows of one request."""
        return Allowance(self.work.decoded, self.limits.decoded_bytes_max)

    def _families(self, principal: Principal) -> Iterator[Family]:
        """Metrics of connections, quotas and the audit log that the principal may see."""
        yield from self.bounds.families()
        yield from self.quotas.families(principal)
        yield from self.audit.families()

    @asynccontextmanager
    async def body(self, request: Request, bytes_max: int) -> AsyncIterator[bytes]:
        """The body of a request, counted against the limits until the context ends. Raises BodyTooLarge, Overloaded."""
        check_declared(request.headers.get("content-length", ""), bytes_max)
        body = Body(self.work)
        try:
            data = await body.read(request.receive, bytes_max)
            request.scope[BODY_KEY] = data if len(data) <= BODY_BYTES_MAX else None
            yield data
        finally:
            body.release()

    async def json(self, request: Request, bytes_max: int, read: Callable[[Any], T]) -> T:
        """The result of `read` for a JSON body. Large bodies are parsed on another thread.

        Raises BodyTooLarge, Overloaded, InvalidUsage, and what `read` raises.
        """

        def parse(data: bytes) -> T:
            with self.allowance() as allowed:
                return read(decode_body(data, allowed.spend))

        async with self.body(request, bytes_max) as data:
            return parse(data) if len(data) <= JSON_AT_ONCE_BYTES_MAX else await self.work.run(parse, data)

    def check_home(self, name: str) -> None:
        """Raises ReadOnly if a new shard of this name belongs to another region.

        A server that is home of a region decides by the name; others look the region up in the index.
        """
        region = region_of(name)
        if not region or region == self.settings.region:
            return
        entry = None if self.index is None else self.index.now().regions.get(region)
        if entry is None and (self.settings.read_only or not self.settings.region):
            return
        urls = entry.write if entry is not None else ()
        raise ReadOnly(
            f"shard {name!r} belongs to region {region!r}: create it there, at {', '.join(urls) or 'its servers'}",
            home=list(urls),
            region=region,
        )

    def stop(self) -> None:
        """End all waits and streams, so that the server can close."""
        self.watcher.stop()
        self.listening.leases.stop()

    async def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        """Validate and commit one command. The commit history records `caller`."""
        command = validate_command(command)
        await self.give_back(name, command)
        return await self.work.apply(self.location.machine(name), command, caller)

    async def state(self, name: str) -> State:
        """The current State of a shard. Raises UnknownShard if it was dropped."""
        state = await self.watcher.state(name, ViewRequest(with_batches=False))
        if state.is_closed:
            raise UnknownShard(dropped(name))
        return state

    async def give_back(self, name: str, command: c.Command) -> None:
        """Release unused leases of the server's own reads before a command that waits for holds."""
        if self.transport.leases is not None and waits_for_holds(command):
            await self.work.run(self.transport.leases.let_go, name)

    def close(self) -> None:
        self.stop()
        if self.transport.leases is not None:
            self.transport.leases.close()
        self.work.close()
        self.usage.close()


class ShardIds:
    """Maps the shard id at the start of a blob key back to the shard's name, for tokens limited to prefixes.

    Ids of all incarnations of a name share its family.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._names: OrderedDict[str, str] = OrderedDict()

    def learn(self, name: str) -> None:
        self._names[family_of(shard_id_of(name))] = name
        if len(self._names) > SHARD_IDS_MAX:
            self._names.popitem(last=False)

    def known(self, shard_id: str) -> str | None:
        """The name of the shard if this server has seen it."""
        return self._names.get(family_of(shard_id))

    def find(self, shard_id: str, principal: Principal) -> None:
        """Raises Forbidden unless the principal may access the shard of that id. Blocking: may list names."""
        if principal.is_unlimited:
            return
        name = self.known(shard_id)
        if name is None:
            for prefix in principal.prefixes:
                name = name or self._search(shard_id, prefix)
        if name is None or not principal.sees(name):
            raise Forbidden(f"the token {principal.name!r} does not grant access to the shard of this blob")

    def _search(self, shard_id: str, prefix: str) -> str | None:
        for name in islice(self._location.all_names(prefix), SHARD_IDS_MAX):
            self.learn(name)
            if family_of(shard_id_of(name)) == family_of(shard_id):
                return name
        return None


def service_of(request: Request) -> Service:
    service: Any = request.scope["persist.service"]
    assert isinstance(service, Service)
    return service


def principal_of(request: Request) -> Principal:
    principal: Any = request.scope["persist.principal"]
    assert isinstance(principal, Principal)
    return principal


def shard_of(request: Request) -> str:
    """The shard's name in the path, as `rpc.routes.table` resolved it. Raises InvalidUsage if it is not a name."""
    return check_shard_name(request.scope["persist.shard"])
