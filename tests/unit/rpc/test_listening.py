"""Listen streams, in process: each listener gets exactly its own `[after.., until)`, whatever others ask for."""

from __future__ import annotations

import asyncio
import threading
from base64 import b85encode
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from random import Random

import pyarrow as pa
import pytest

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist import AttributeUpdate, named_key
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import HandleSettings, Shard
from persist.client.snapshot import ReadSettings
from persist.commit.location import Location
from persist.core.frontier import EMPTY, Antichain
from persist.core.shard_view import ViewRequest
from persist.parts import codec
from rpc import change_streams as listening_module
from rpc.change_streams import Listeners
from rpc.concurrency_limits import Work
from rpc.listen_frames import EVENTS, FRAMES
from rpc.settings import Limits
from rpc.shard_watcher import ShardWatcher
from tests.support.followed import frames
from tests.support.location import InlineBackground, client_of, memory_location
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.string())])
WIDE = 100_000
Event = tuple[list[int | None], list[str]]


@asynccontextmanager
async def listeners(
    location: Location, limits: Limits | None = None
) -> AsyncIterator[tuple[Listeners, Work, ShardWatcher]]:
    limits = limits or Limits()
    work = Work(limits)
    watcher = ShardWatcher(location, work)
    found = Listeners(EmbeddedTransport(location), location, work, watcher)
    try:
        yield found, work, watcher
    finally:
        watcher.stop()
        found.leases.stop()
        work.close()


def wide(seed: int) -> str:
    """Text that no compression makes much smaller."""
    return b85encode(Random(seed).randbytes(WIDE))[:WIDE].decode()


def shard_of(location: Location, name: str = "orders") -> Shard:
    return client_of(location).create_shard(name, SCHEMA, ["id"])


async def events(listening: Listeners, until: Antichain, name: str = "orders") -> AsyncGenerator[Event]:
    """([lower, upper], ids) of each event from 0 on."""
    async with listening.leases.hold(name, Antichain(0)) as hold:
        async for data in listening.stream(name, hold, Antichain(0), until, FRAMES):
            for frame in frames(iter([data])):
                if (event := frame.event) is not None:
                    yield [event.lower.element, event.upper.element], event.updates.column("id").to_pylist()


async def in_time(coming: AsyncGenerator[Event]) -> Event:
    return await asyncio.wait_for(anext(coming), WAIT_S)


def test_a_step_that_is_shared_ends_where_each_of_its_listeners_ends() -> None:
    """A step was kept under the upper at which it was asked for, and made of a State that had moved on since."""

    async def scenario() -> None:
        location = memory_location()
        shard = shard_of(location)
        shard.compare_and_append([{"id": "a"}], 0, 1)
        async with listeners(location, replace(Limits(), io_threads=1)) as (listening, work, _):
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


def test_commits_without_a_time_hold_up_no_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each began the wait for news anew: a proxy may end a stream that is silent for so long."""
    monkeypatch.setattr(listening_module, "HEARTBEAT_S", 1.0)

    async def scenario() -> None:
        location = memory_location()
        shard = shard_of(location)
        async with listeners(location) as (listening, work, _), listening.leases.hold("orders", Antichain(0)) as hold:

            async def committing() -> None:
                while True:
                    await work.run(shard.attributes.update, AttributeUpdate.replace(named_key("x"), 1))

            commits = asyncio.ensure_future(committing())
            async with aclosing(listening.stream("orders", hold, Antichain(0), EMPTY, FRAMES)) as stream:
                for _ in range(2):
                    data = await asyncio.wait_for(anext(stream), WAIT_S)
                    assert [frame.event for frame in frames(iter([data]))] == [None]
            commits.cancel()

    asyncio.run(scenario())


def test_listeners_and_waits_go_on_where_more_shards_are_watched_than_machines_are_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The machine that a listener looked at was dropped from the cache, and nobody moved it any more."""
    monkeypatch.setattr("persist.commit.location.MACHINES_MAX", 3)

    async def scenario() -> None:
        location = Location(MemoryBlob(), MemoryConsensus(), background=InlineBackground())
        shards = [shard_of(location, f"s{number}") for number in range(6)]
        async with listeners(location) as (listening, _, watcher), AsyncExitStack() as held:
            for shard in shards:
                shard.compare_and_append([{"id": "a"}], 0, 1)
            streams = [
                await held.enter_async_context(aclosing(events(listening, EMPTY, shard.name))) for shard in shards
            ]
            assert [await in_time(stream) for stream in streams] == [([0, 1], ["a"])] * 6
            coming = [asyncio.ensure_future(in_time(stream)) for stream in streams]
            wanted = ViewRequest(past=1, timeout_s=WAIT_S)
            waits = [asyncio.ensure_future(watcher.state(shard.name, wanted)) for shard in shards]
            while watcher.waiting < 12:
                await asyncio.sleep(0)
            for number in range(20):
                location.machine(f"other{number}")
            for shard in shards:
                shard.compare_and_append([{"id": "b"}], 1, 2)
            assert await asyncio.gather(*coming) == [([1, 2], ["b"])] * 6
            assert {state.upper for state in await asyncio.gather(*waits)} == {Antichain(2)}

    asyncio.run(scenario())


@pytest.mark.parametrize("step_bytes_max", [10 * WIDE, 3 * WIDE, 10])
def test_a_step_of_wide_rows_comes_in_bounded_events(step_bytes_max: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps were cut by rows only: a few hundred wide ones took gigabytes."""
    monkeypatch.setattr(listening_module, "SHARED_STEP_BYTES_MAX", step_bytes_max)
    monkeypatch.setattr(listening_module, "LISTEN_MEMORY_BYTES", 11 * WIDE // 5)

    async def scenario() -> None:
        location = memory_location(small_merges=False)
        shard = shard_of(location)
        for number in range(4):
            shard.compare_and_append([{"id": f"{number}{wide(number)}"}], number, number + 1)
        async with listeners(location) as (listening, _, _):
            found = [event async for event in events(listening, Antichain(4))]
        assert [times for times, _ in found] == [[0, 2], [2, 4]]
        assert [[text[0] for text in texts] for _, texts in found] == [["0", "1"], ["2", "3"]]

    asyncio.run(scenario())


def test_a_batch_of_more_bytes_than_an_event_takes_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "ROW_GROUP_BYTES", WIDE)
    location = memory_location()
    client = client_of(location, HandleSettings(read=ReadSettings(memory_bytes=3 * WIDE)))
    shard = client.create_shard("orders", SCHEMA, ["id"])
    shard.compare_and_append([{"id": f"{number:02}{wide(number)}"} for number in range(20)], 0, 1)
    shard.compare_and_append([{"id": "small"}], 1, 2)
    with shard.listen(None, until=2) as listen:
        found = list(listen)
    assert len(found) > 2
    assert all(event.updates.nbytes < 4 * WIDE for event in found)
    assert [str(event.upper) for event in found] == ["[0]"] * (len(found) - 2) + ["[1]", "[2]"]
    texts = [text[:2] for event in found for text in event.updates.column("id").to_pylist()]
    assert texts == [*(f"{number:02}" for number in range(20)), "sm"]


@pytest.mark.parametrize("form", [FRAMES, EVENTS])
def test_who_waits_has_an_id_before_anything_comes(form: str) -> None:
    """A listener that had been given nothing yet went on in the next shard of the name."""

    async def scenario() -> None:
        location = memory_location()
        async with listeners(location) as (listening, _, _), AsyncExitStack() as held:
            shard = shard_of(location)
            hold = await held.enter_async_context(listening.leases.hold("orders", Antichain(0)))
            coming = listening.stream("orders", hold, Antichain(0), EMPTY, form)
            stream = await held.enter_async_context(aclosing(coming))
            data = await asyncio.wait_for(anext(stream), WAIT_S)
            found = data.decode().split("id: ")[1] if form == EVENTS else next(frames(iter([data]))).id
            assert found is not None
            time, _, rest = found.strip().partition(".")
            assert (time, rest.rpartition(".")[2]) == ("0", shard.open_writer().transport.shard)
        location.close()

    asyncio.run(scenario())
