"""The asynchronous handles. A line for each method gives it its types; one without a line is there all the same."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, ClassVar

from persist.aio.handles import AsyncHandle, asks, opens, steps
from persist.aio.threads import THREADS, Threads
from persist.attributes import Attributes
from persist.client.changes import Changes
from persist.client.connect import Client
from persist.client.connect import connect as connect_here
from persist.client.critical import CriticalReaderHandle
from persist.client.listen import Listen, ListenEvent
from persist.client.merging import Merge
from persist.client.pipelined import PipelinedWriter
from persist.client.shard import Shard
from persist.client.snapshot import ReadLease, Snapshot
from persist.client.subscribe import Subscription
from persist.client.write import WriteHandle
from persist.core.errors import InvalidUsage, Overloaded, Unavailable
from persist.core.shard_settings import ShardSettings

LISTEN_WAIT_S = 5.0  # one wait of a listener; then another one has its thread


class AsyncAttributes(AsyncHandle[Attributes]):
    """As `persist.Attributes`."""

    below: ClassVar[type[Any]] = Attributes

    get = asks(Attributes.get)
    get_many = asks(Attributes.get_many)
    scan = steps(Attributes.scan)
    update = asks(Attributes.update)


class AsyncSnapshot(AsyncHandle[Snapshot]):
    """As `persist.Snapshot`: `await shard.snapshot().to_arrow()`, or `async with shard.snapshot() as snapshot`."""

    below: ClassVar[type[Any]] = Snapshot

    batches = steps(Snapshot.batches)
    close = asks(Snapshot.close)
    empty = asks(Snapshot.empty)
    keep = asks(Snapshot.keep)
    to_arrow = asks(Snapshot.to_arrow)
    to_duckdb = asks(Snapshot.to_duckdb)
    to_pandas = asks(Snapshot.to_pandas)
    to_polars = asks(Snapshot.to_polars)


class AsyncChanges(AsyncHandle[Changes]):
    """As `persist.Changes`."""

    below: ClassVar[type[Any]] = Changes

    batches = steps(Changes.batches)
    close = asks(Changes.close)
    empty = asks(Changes.empty)
    keep = asks(Changes.keep)
    to_arrow = asks(Changes.to_arrow)
    to_duckdb = asks(Changes.to_duckdb)
    to_pandas = asks(Changes.to_pandas)
    to_polars = asks(Changes.to_polars)


class AsyncReadLease(AsyncHandle[ReadLease]):
    """As `persist.ReadLease`."""

    below: ClassVar[type[Any]] = ReadLease

    check = asks(ReadLease.check)
    close = asks(ReadLease.close)
    downgrade = asks(ReadLease.downgrade)
    keep = asks(ReadLease.keep)
    renew = asks(ReadLease.renew)


class AsyncCriticalReader(AsyncHandle[CriticalReaderHandle]):
    """As `persist.CriticalReaderHandle`."""

    below: ClassVar[type[Any]] = CriticalReaderHandle

    downgrade_since = asks(CriticalReaderHandle.downgrade_since)
    expire = asks(CriticalReaderHandle.expire)


class AsyncWriter(AsyncHandle[WriteHandle]):
    """As `persist.WriteHandle`."""

    below: ClassVar[type[Any]] = WriteHandle

    advance_upper = asks(WriteHandle.advance_upper)
    append = asks(WriteHandle.append)
    close = asks(WriteHandle.close)
    compare_and_append = asks(WriteHandle.compare_and_append)
    insert = asks(WriteHandle.insert)
    update_attributes = asks(WriteHandle.update_attributes)


class AsyncPipelinedWriter(AsyncHandle[PipelinedWriter]):
    """As `persist.PipelinedWriter`. `async with` flushes it, but where it is left by an error."""

    below: ClassVar[type[Any]] = PipelinedWriter

    abandon = asks(PipelinedWriter.abandon)
    append = asks(PipelinedWriter.append)
    close = asks(PipelinedWriter.close)
    flush = asks(PipelinedWriter.flush)

    async def _end(self, kind: type[BaseException] | None) -> None:
        await (self.close() if kind is None else self.abandon())


class AsyncListen(AsyncHandle[Listen]):
    """As `persist.Listen`: `async for event in shard.listen(0)`. One task at a time goes on with it.

    Its hold is given back at its end, when the loop is left, and when it is closed. A task that is cancelled while it
    waits loses no event, and leaves the hold: another loop goes on. Use it in an `async with` to give the hold back
    then.
    """

    below: ClassVar[type[Any]] = Listen

    def __init__(self, threads: Threads, opener: Callable[[], Any]) -> None:
        super().__init__(threads, opener)
        self._step: Future[ListenEvent | None] | None = None
        self._events: Any = None  # what `Listen.next_events` has begun to give

    async def __aiter__(self) -> AsyncGenerator[ListenEvent, None]:
        listen = await self._ready()
        try:
            while self._step is not None or self._events is not None or not listen.done:
                event = await self._next(listen)
                if event is not None:
                    yield event
            await self.close()
        except GeneratorExit:
            await self.close()
            raise
        except (Unavailable, Overloaded):  # nothing is lost: another loop goes on from there
            raise
        except Exception:
            await self.close()
            raise

    next_events = steps(Listen.next_events, waits=True)

    async def close(self) -> None:
        """Give the hold back, after the wait that is under way, if there is one. Repeating it is safe."""
        if not self._is_open:
            return
        step, listen = self._step, await self._ready()
        if step is not None and not step.done():
            step.add_done_callback(lambda _: listen.close())
            return
        await self._threads.run(listen.close)

    async def _end(self, kind: type[BaseException] | None) -> None:
        await self.close()

    async def _next(self, listen: Listen) -> ListenEvent | None:
        """The next event; None where none came for a while. Cancelled, it is there for the next call."""
        if self._step is None:
            self._step = self._threads.submit(partial(self._take, listen), waits=True)
        step = self._step
        try:
            event = await asyncio.shield(asyncio.wrap_future(step))
        except Exception:
            self._step = None
            raise
        self._step = None  # and not where this task was cancelled: then nobody has the event yet
        return event

    def _take(self, listen: Listen) -> ListenEvent | None:
        """On a thread: the next event, or None."""
        if self._events is None:
            self._events = listen.next_events(LISTEN_WAIT_S)
        try:
            event: ListenEvent | None = next(self._events, None)
        except BaseException:
            self._events = None
            raise
        if event is None:
            self._events = None
        return event


class AsyncSubscription(AsyncListen):
    """As `persist.Subscription`: `async for event in shard.subscribe()`, as `AsyncListen` says."""

    below: ClassVar[type[Any]] = Subscription


class AsyncMerge(AsyncHandle[Merge]):
    """As `persist.Merge`: `await shard.merge(rows).when_matched_update().execute()`."""

    below: ClassVar[type[Any]] = Merge

    execute = asks(Merge.execute)

    def when_matched_delete(self, *args: Any, **options: Any) -> AsyncMerge:
        """As `persist.Merge.when_matched_delete`."""
        return self._with("when_matched_delete", *args, **options)

    def when_matched_update(self, *args: Any, **options: Any) -> AsyncMerge:
        """As `persist.Merge.when_matched_update`."""
        return self._with("when_matched_update", *args, **options)

    def when_not_matched_by_source_delete(self, *args: Any, **options: Any) -> AsyncMerge:
        """As `persist.Merge.when_not_matched_by_source_delete`."""
        return self._with("when_not_matched_by_source_delete", *args, **options)

    def when_not_matched_by_source_update(self, *args: Any, **options: Any) -> AsyncMerge:
        """As `persist.Merge.when_not_matched_by_source_update`."""
        return self._with("when_not_matched_by_source_update", *args, **options)

    def when_not_matched_insert(self, *args: Any, **options: Any) -> AsyncMerge:
        """As `persist.Merge.when_not_matched_insert`."""
        return self._with("when_not_matched_insert", *args, **options)

    def _with(self, clause: str, *args: Any, **options: Any) -> AsyncMerge:
        async def opener() -> Merge:
            found: Merge = getattr(await self._ready(), clause)(*args, **options)
            return found

        return AsyncMerge(self._threads, opener)


class AsyncShard(AsyncHandle[Shard]):
    """As `persist.Shard`, whose methods are awaited. `settings`, a property there, is a method here."""

    below: ClassVar[type[Any]] = Shard

    @property
    def attributes(self) -> AsyncAttributes:
        """The shard's attributes: read them, or change them without rows."""

        async def opener() -> Attributes:
            return (await self._ready()).attributes

        return AsyncAttributes(self._threads, opener)

    async def settings(self) -> ShardSettings:
        """The shard's settings as of now. Raises what every call may."""
        shard = await self._ready()
        return await self._threads.run(lambda: shard.settings)

    advance_upper = asks(Shard.advance_upper)
    append = asks(Shard.append)
    broken_constraints = asks(Shard.broken_constraints)
    changes = opens(Shard.changes, AsyncChanges)
    close = asks(Shard.close)
    compare_and_append = asks(Shard.compare_and_append)
    configure = asks(Shard.configure)
    count = asks(Shard.count)
    critical_reader = opens(Shard.critical_reader, AsyncCriticalReader)
    delete = asks(Shard.delete)
    downgrade_since = asks(Shard.downgrade_since)
    drop = asks(Shard.drop)
    erase = asks(Shard.erase)
    erasures = asks(Shard.erasures)
    evolve_schema = asks(Shard.evolve_schema)
    alter = asks(Shard.alter)
    add_column = asks(Shard.add_column)
    rename_column = asks(Shard.rename_column)
    drop_column = asks(Shard.drop_column)
    move_column = asks(Shard.move_column)
    widen_column = asks(Shard.widen_column)
    allow_nulls = asks(Shard.allow_nulls)
    forget = asks(Shard.forget)
    get = asks(Shard.get)
    head = asks(Shard.head)
    history = asks(Shard.history)
    insert = asks(Shard.insert)
    listen = opens(Shard.listen, AsyncListen)
    merge = opens(Shard.merge, AsyncMerge)
    open_reader = opens(Shard.open_reader, AsyncReadLease)
    open_writer = opens(Shard.open_writer, AsyncWriter)
    overwrite = asks(Shard.overwrite)
    pipelined_writer = opens(Shard.pipelined_writer, AsyncPipelinedWriter)
    refresh_schema = asks(Shard.refresh_schema)
    replace_where = asks(Shard.replace_where)
    restore = asks(Shard.restore)
    retain = asks(Shard.retain)
    retention = asks(Shard.retention)
    run_retention = asks(Shard.run_retention)
    scan = asks(Shard.scan)
    set_constraints = asks(Shard.set_constraints)
    since = asks(Shard.since)
    snapshot = opens(Shard.snapshot, AsyncSnapshot)
    subscribe = opens(Shard.subscribe, AsyncSubscription)
    tag = asks(Shard.tag)
    tags = asks(Shard.tags)
    time_at = asks(Shard.time_at)
    timestamp_of = asks(Shard.timestamp_of)
    truncate = asks(Shard.truncate)
    optimize = asks(Shard.optimize)
    vacuum = asks(Shard.vacuum)
    untag = asks(Shard.untag)
    update = asks(Shard.update)
    upper = asks(Shard.upper)
    upsert = asks(Shard.upsert)
    view = asks(Shard.view)

    def with_timeout(self, timeout_s: float) -> AsyncShard:
        """As `persist.Shard.with_timeout`."""

        async def opener() -> Shard:
            return (await self._ready()).with_timeout(timeout_s)

        return AsyncShard(self._threads, opener)


class AsyncClient(AsyncHandle[Client]):
    """As `persist.Client`, whose methods are awaited. `close` ends its threads, too."""

    below: ClassVar[type[Any]] = Client

    clone = opens(Client.clone, AsyncShard)
    create_shard = opens(Client.create_shard, AsyncShard)
    cut = asks(Client.cut)
    drop_shards = asks(Client.drop_shards)
    metrics = asks(Client.metrics)
    new_token = asks(Client.new_token)
    shard = opens(Client.shard, AsyncShard)
    shards = asks(Client.shards)
    summaries = steps(Client.summaries)
    truncate = asks(Client.truncate)

    async def close(self) -> None:
        """As `persist.Client.close`; then its threads end, once what they do has ended. Raises nothing."""
        if self._is_open and self._opener is not _refused:
            client, self._opener = await self._ready(), _refused
            await self._threads.run(client.close)
        self._threads.close()

    async def _end(self, kind: type[BaseException] | None) -> None:
        await self.close()

    def with_timeout(self, timeout_s: float) -> AsyncClient:
        """As `persist.Client.with_timeout`: the same client, with the same threads."""

        async def opener() -> Client:
            return (await self._ready()).with_timeout(timeout_s)

        return AsyncClient(self._threads, opener)


async def _refused() -> Any:
    raise InvalidUsage("this client was closed; connect anew")


def connect(url: str | None = None, *, threads: int = THREADS, **settings: Any) -> AsyncClient:
    """An asynchronous client of the shards at a place: `client = await persist.aio.connect(url)`, or `async with`.

    Args:
        url: as `persist.connect` says.
        threads: so many calls run at once, in [1, 1024]; others wait for their turn.
        settings: as `persist.connect` says.
    Raises: InvalidUsage (`threads` is no such number), and when it is awaited what `persist.connect` does.
    """
    pool = Threads(threads)

    async def opener() -> Client:
        try:
            return await pool.open(partial(connect_here, url, **settings))
        except BaseException:
            pool.close()
            raise

    return AsyncClient(pool, opener)
