"""The asynchronous handles, and `connect()`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from functools import partial
from operator import methodcaller
from typing import Any, ClassVar

from persist.aio.handles import AsyncHandle
from persist.aio.threads import THREADS, Threads
from persist.attributes import Attributes
from persist.client.connect import Client
from persist.client.connect import connect as connect_here
from persist.client.contents_diff import Changes
from persist.client.listen import Listen, ListenEvent
from persist.client.merge import Merge
from persist.client.pipelined import PipelinedWriter
from persist.client.read_api import Subscription
from persist.client.read_leases import CriticalReaderHandle
from persist.client.shard import Shard
from persist.client.snapshot import ReadLease, Snapshot
from persist.client.unique_insert import CheckedWriter
from persist.core.errors import InvalidUsage, Overloaded, Unavailable

LISTEN_WAIT_S = 5.0  # one wait of a listener; then another one has its thread


class AsyncAttributes(AsyncHandle[Attributes]):
    """As `persist.Attributes`."""

    below: ClassVar[type[Any]] = Attributes


class AsyncSnapshot(AsyncHandle[Snapshot]):
    """As `persist.Snapshot`: `await shard.snapshot().to_arrow()`, or `async with shard.snapshot() as snapshot`."""

    below: ClassVar[type[Any]] = Snapshot


class AsyncChanges(AsyncHandle[Changes]):
    """As `persist.Changes`."""

    below: ClassVar[type[Any]] = Changes


class AsyncReadLease(AsyncHandle[ReadLease]):
    """As `persist.ReadLease`."""

    below: ClassVar[type[Any]] = ReadLease


class AsyncCriticalReader(AsyncHandle[CriticalReaderHandle]):
    """As `persist.CriticalReaderHandle`."""

    below: ClassVar[type[Any]] = CriticalReaderHandle


class AsyncWriter(AsyncHandle[CheckedWriter]):
    """As `persist.WriteHandle`."""

    below: ClassVar[type[Any]] = CheckedWriter


class AsyncPipelinedWriter(AsyncHandle[PipelinedWriter]):
    """As `persist.PipelinedWriter`. `async with` flushes it, but where it is left by an error."""

    below: ClassVar[type[Any]] = PipelinedWriter

    async def _end(self, kind: type[BaseException] | None) -> None:
        await self._ask(methodcaller("close" if kind is None else "abandon"))


class AsyncListen(AsyncHandle[Listen]):
    """As `persist.Listen`: `async for event in shard.listen(0)`. One task at a time goes on with it.

    Its hold is given back at its end, when the loop is left, and when it is closed. A task that is cancelled while it
    waits loses no event, and leaves the hold: another loop goes on. Use it in an `async with` to give the hold back
    then.
    """

    below: ClassVar[type[Any]] = Listen
    iterators_wait: ClassVar[bool] = True

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


class AsyncShard(AsyncHandle[Shard]):
    """As `persist.Shard`, whose methods are awaited. `settings`, a property there, is a method here."""

    below: ClassVar[type[Any]] = Shard


class AsyncClient(AsyncHandle[Client]):
    """As `persist.Client`, whose methods are awaited. `close` ends its threads, too."""

    below: ClassVar[type[Any]] = Client

    async def close(self) -> None:
        """As `persist.Client.close`; then its threads end, once what they do has ended. Raises nothing."""
        if self._is_open and self._opener is not _refused:
            client, self._opener = await self._ready(), _refused
            await self._threads.run(client.close)
        self._threads.close()

    async def _end(self, kind: type[BaseException] | None) -> None:
        await self.close()


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
