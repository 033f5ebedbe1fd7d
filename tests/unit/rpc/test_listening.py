"""Listen streams, in process: each listener gets exactly its own `[after.., until)`, whatever others ask for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import pyarrow as pa

from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.location import Location
from persist.core.antichain import EMPTY, Antichain
from rpc.listen_frames import FRAMES, frames
from rpc.listening import Listeners
from rpc.settings import Limits
from rpc.watching import Watcher
from rpc.work import Work
from tests.support.location import memory_location
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.string())])
Event = tuple[list[int | None], list[str]]


@asynccontextmanager
async def listeners(location: Location, limits: Limits | None = None) -> AsyncIterator[tuple[Listeners, Work]]:
    limits = limits or Limits()
    work = Work(limits)
    watcher = Watcher(location, work)
    found = Listeners(EmbeddedTransport(location), location, work, watcher, limits)
    try:
        yield found, work
    finally:
        watcher.stop()
        found.leases.stop()
        work.close()


def shard_of(location: Location) -> Shard:
    return Client(EmbeddedTransport(location)).create_shard("orders", SCHEMA, ["id"])


async def events(listening: Listeners, until: Antichain) -> AsyncGenerator[Event]:
    """([lower, upper], ids) of each event from 0 on."""
    async with listening.leases.hold("orders", Antichain(0)) as hold:
        async for data in listening.stream("orders", hold, Antichain(0), until, FRAMES):
            for event in frames(iter([data])):
                if event is not None:
                    yield [event.lower.element, event.upper.element], event.updates.column("id").to_pylist()


async def in_time(coming: AsyncGenerator[Event]) -> Event:
    return await asyncio.wait_for(anext(coming), WAIT_S)


def test_a_step_that_is_shared_ends_where_each_of_its_listeners_ends() -> None:
    """A step was kept under the upper at which it was asked for, and made of a State that had moved on since."""

    async def scenario() -> None:
        location = memory_location()
        shard = shard_of(location)
        shard.compare_and_append([{"id": "a"}], 0, 1)
        async with listeners(location, replace(Limits(), io_threads=1)) as (listening, work):
            busy = threading.Event()
            blocking = asyncio.ensure_future(work.run(busy.wait, WAIT_S))
            async with aclosing(events(listening, EMPTY)) as whole:
                first = asyncio.ensure_future(in_time(whole))
                while not listening._shared:
                    await asyncio.sleep(0)
                shard.compare_and_append([{"id": "b"}], 1, 2)
                busy.set()
                await blocking
                assert await first == ([0, 1], ["a"])
                assert await in_time(whole) == ([1, 2], ["b"])
                assert [event async for event in events(listening, Antichain(1))] == [([0, 1], ["a"])]

    asyncio.run(scenario())
