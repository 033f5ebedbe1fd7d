"""The asynchronous handles, and `connect()`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from operator import methodcaller
from typing import Any, ClassVar

from persist.aio.handles import THREADS, AsyncHandle, Steps, Threads
from persist.attributes import Attributes
from persist.client.client import Client
from persist.client.client import connect as connect_here
from persist.client.contents_diff import Changes
from persist.client.listen import Listen, ListenEvent, Subscription
from persist.client.merge import Merge
from persist.client.pipelined import PipelinedWriter
from persist.client.shard import CriticalReaderHandle, Shard
from persist.client.snapshot import ReadLease, Snapshot
from persist.client.unique_insert import CheckedWriter
from persist.core.errors import InvalidUsage, Overloaded, Unavailable

LISTEN_WAIT_S = 5.0  # the longest wait of a listener before it gives its thread to another one


class AsyncAttributes(AsyncHandle[Attributes], below=Attributes):
    """As `persist.Attributes`."""


class AsyncSnapshot(AsyncHandle[Snapshot], below=Snapshot):
    """As `persist.Snapshot`: `await shard.snapshot().to_arrow()`, or `async with shard.snapshot() as snapshot`."""


class AsyncChanges(AsyncHandle[Changes], below=Changes):
    """As `persist.Changes`."""


class AsyncReadLease(AsyncHandle[ReadLease], below=ReadLease):
    """As `persist.ReadLease`."""


class AsyncCriticalReader(AsyncHandle[CriticalReaderHandle], below=CriticalReaderHandle):
    """As `persist.CriticalReaderHandle`."""


class AsyncWriter(AsyncHandle[CheckedWriter], below=CheckedWriter):
    """As `persist.WriteHandle`."""


class AsyncPipelinedWriter(AsyncHandle[PipelinedWriter], below=PipelinedWriter):
    """As `persist.PipelinedWriter`. `async with` flushes it at its end, unless an error ends the block."""

    async def _end(self, kind: type[BaseException] | None) -> None:
        await self._ask(methodcaller("close" if kind is None else "abandon"))


class AsyncListen(AsyncHandle[Listen], below=Listen):
    """As `persist.Listen`: `async for event in shard.listen(0)`. Only one task at a time may iterate it.

    Its hold is released at its end, when the loop is left, and when it is closed. A task that is cancelled while it
    waits loses no event and keeps the hold, so another loop can continue. With `async with` the hold is released at
    the end of the block.
    """

    iterators_wait: ClassVar[bool] = True

    def __init__(self, threads: Threads, opener: Callable[[], Any], *, is_view: bool = False) -> None:
        super().__init__(threads, opener, is_view=is_view)
        self._steps: Steps[ListenEvent] | None = None  # a task that is cancelled leaves it to the next one

    async def __aiter__(self) -> AsyncGenerator[ListenEvent, None]:
        listen = await self._ready()
        try:
            while self._is_waiting or not listen.done:
                # Waits end after a while, so that another listener gets the thread.
                async for event in self.next_events(LISTEN_WAIT_S):
                    yield event
            await self.close()
        except GeneratorExit:
            await self.close()
            raise
        except (Unavailable, Overloaded):  # nothing is lost: another loop can continue
            raise
        except Exception:
            await self.close()
            raise

    async def next_events(self, timeout_s: float) -> AsyncGenerator[ListenEvent, None]:
        """As `persist.Listen.next_events`. After a task that was cancelled it begins with what came for that one."""
        if self._is_waiting:
            assert self._steps is not None
            async for event in self._steps:
                yield event
                timeout_s = 0.0  # one came
        self._steps = self._iterate(methodcaller("next_events", timeout_s))
        async for event in self._steps:
            yield event

    @property
    def _is_waiting(self) -> bool:
        """Whether a thread waits for the next event, or has one that was not delivered."""
        return self._steps is not None and self._steps.step is not None

    async def close(self) -> None:
        """Release the hold, also while a wait is under way, whose event is dropped. Repeating it is safe."""
        if self._is_open:
            listen = await self._ready()
            await self._threads.run(listen.close)

    async def _end(self, kind: type[BaseException] | None) -> None:
        await self.close()


class AsyncSubscription(AsyncListen, below=Subscription):
    """As `persist.Subscription`: `async for event in shard.subscribe()`, as `AsyncListen` says."""


class AsyncMerge(AsyncHandle[Merge], below=Merge):
    """As `persist.Merge`: `await shard.merge(rows).when_matched_update().execute()`."""


class AsyncShard(AsyncHandle[Shard], below=Shard):
    """As `persist.Shard`, with awaited methods. `settings`, a property there, is a method here."""


class AsyncClient(AsyncHandle[Client], below=Client):
    """As `persist.Client`, with awaited methods. `close` also ends its threads."""

    async def close(self) -> None:
        """As `persist.Client.close`; then its threads end once their calls have returned. Raises nothing."""
        if self._is_open and self._opener is not _refused:
            client, self._opener = await self._ready(), _refused
            await self._threads.run(client.close)
        self._threads.close()

    async def _end(self, kind: type[BaseException] | None) -> None:
        await self.close()


async def _refused() -> Any:
    raise InvalidUsage("this client was closed; connect anew")


def connect(url: str | None = None, *, threads: int = THREADS, **settings: Any) -> AsyncClient:
    """Open an asynchronous client: `client = await persist.aio.connect(url)`, or `async with`.

    `url` and `settings` are as `persist.connect` says. `threads` is the number of calls that run at once, in [1, 1024];
    others wait for a free thread. Raises InvalidUsage (`threads` is out of range); when awaited, what `persist.connect`
    raises.
    """
    pool = Threads(threads)

    async def opener() -> Client:
        try:
            return await pool.open(partial(connect_here, url, **settings))
        except BaseException:
            pool.close()
            raise

    return AsyncClient(pool, opener)
