"""persist for asyncio: the same handles, awaited; many tasks at once; tasks that are cancelled."""

from __future__ import annotations

import asyncio
import gc
import inspect
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
import persist.aio
from persist.aio.async_client import AsyncClient, AsyncListen, AsyncShard, AsyncSnapshot
from persist.aio.handles import AsyncHandle, Threads
from tests.support import aio_stub
from tests.support.server import url_of
from tests.support.waiting import WAIT_S

SCHEMA = pa.schema([("id", pa.int64())])
TASKS = 30  # more than there are threads
Opening = Callable[[AsyncHandle[Any]], Coroutine[Any, Any, Any]]


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"persist://{tmp_path}/location"


@pytest.fixture(params=["directory", "server"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with url_of(request.param, tmp_path) as url:
        yield url


def on(url: str, work: Callable[[AsyncClient, AsyncShard], Awaitable[object]]) -> None:
    """Run the work on a client and its shard `orders`."""

    async def main() -> None:
        async with persist.aio.connect(url) as client:
            shard = await client.create_shard("orders", SCHEMA, ["id"])
            await asyncio.wait_for(work(client, shard), WAIT_S)

    asyncio.run(main())


def methods(kind: type[Any]) -> list[str]:
    return [name for name in dir(kind) if name[0] != "_" and inspect.isfunction(inspect.getattr_static(kind, name))]


@pytest.mark.parametrize("kind", AsyncHandle.kinds.values(), ids=lambda kind: kind.__name__)
def test_every_public_method_is_there(kind: type[AsyncHandle[Any]]) -> None:
    handle = kind(Threads(1), asyncio.Event().wait)
    missing = [name for name in methods(kind.below) if not callable(getattr(handle, name))]
    assert missing == []
    assert set(methods(kind.below)) <= set(dir(handle))


def test_the_stub_has_the_types_of_the_handles() -> None:
    assert aio_stub.STUB.read_text() == aio_stub.stub(), "run `python -m tests.support.aio_stub`"


def test_rows_are_written_and_read(anywhere: str) -> None:
    async def work(client: AsyncClient, shard: AsyncShard) -> None:
        token = await client.new_token()
        done = await shard.insert([{"id": 1}], token=token)
        assert await shard.insert([{"id": 1}], token=token) == done
        assert (await shard.snapshot().to_arrow())["id"].to_pylist() == [1]
        assert await shard.upper() == persist.Antichain(1)
        assert shard.name == "orders"
        assert (await shard.settings()).version >= 0
        assert await client.shards() == ["orders"]
        assert [one.name async for one in client.summaries()] == ["orders"]
        assert await shard.attributes.get(persist.EVENT_COUNT) == 1
        async with shard.open_writer() as writer:
            await writer.insert([{"id": 2}])
        async with shard.pipelined_writer("p") as piped:
            assert await piped.append([{"id": 3}]) == 1
        async with shard.snapshot() as snapshot:
            assert snapshot.as_of == 2
            assert sum([piece.num_rows async for piece in snapshot.batches()]) == 3
        assert (await shard.changes(0).to_arrow()).num_rows == 2
        with pytest.raises(persist.UpperMismatch):
            await shard.compare_and_append([], 0, 1)

    on(anywhere, work)


def test_methods_of_a_handle_that_was_not_awaited_open_it(url: str) -> None:
    async def work(client: AsyncClient, shard: AsyncShard) -> None:
        await client.shard("orders").insert([{"id": 1}])
        assert (await client.shard("orders").snapshot().to_arrow()).num_rows == 1
        with pytest.raises(persist.UnknownShard):
            await client.shard("nobody")
        with pytest.raises(AttributeError, match="await it first"):
            _ = client.shard("orders").name
        assert repr(client.shard("orders")) == "<async Shard, not open>"

    on(url, work)


def test_many_tasks_at_once_each_write_once_and_read_what_was_acknowledged(url: str) -> None:
    async def work(client: AsyncClient, shard: AsyncShard) -> None:
        async def task(number: int) -> None:
            mine = client.shard("orders") if number % 2 else shard
            await mine.insert([{"id": number}])
            assert number in (await mine.snapshot().to_arrow())["id"].to_pylist()

        await asyncio.gather(*(task(number) for number in range(TASKS)))
        assert sorted((await shard.snapshot().to_arrow())["id"].to_pylist()) == list(range(TASKS))

    on(url, work)


def test_a_listener_gives_every_event_once_while_the_loop_does_other_things(anywhere: str) -> None:
    async def work(client: AsyncClient, shard: AsyncShard) -> None:
        seen: list[int] = []

        async def listen() -> None:
            async for event in shard.listen(None, until=20):
                seen.extend(event.updates["id"].to_pylist())

        listening = [asyncio.create_task(listen()) for _ in range(3)]
        for number in range(20):
            await shard.insert([{"id": number}])
        await asyncio.gather(*listening)
        assert sorted(seen) == sorted(3 * list(range(20)))
        await shard.drop()  # is refused while readers hold it

    on(anywhere, work)


def test_a_listener_whose_task_is_cancelled_loses_no_event(url: str) -> None:
    async def work(client: AsyncClient, shard: AsyncShard) -> None:
        async with shard.listen(None) as listen:
            assert isinstance(listen, AsyncListen)
            seen: list[int] = []

            async def take() -> None:
                async for event in listen:
                    seen.extend(event.updates["id"].to_pylist())

            for number in range(10):
                taking = asyncio.create_task(take())
                await asyncio.sleep(0)
                await shard.insert([{"id": number}])
                taking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await taking
            events = aiter(listen)
            while len(seen) < 10:  # the last one may have come before its task was cancelled
                seen.extend((await anext(events)).updates["id"].to_pylist())
            assert sorted(seen) == list(range(10))
        await asyncio.to_thread(_dropped, url)

    on(url, work)


@pytest.mark.parametrize("then", ["next_events", "a loop"])
def test_a_wait_for_events_that_is_cancelled_loses_none(url: str, then: str) -> None:
    async def work(client: AsyncClient, shard: AsyncShard) -> None:
        async with shard.listen(None) as listen:
            seen: list[int] = []

            async def take(wait_s: float) -> None:
                async for event in listen.next_events(wait_s):
                    seen.extend(event.updates["id"].to_pylist())

            taking = asyncio.create_task(take(WAIT_S))
            while not listen._is_waiting:
                await asyncio.sleep(0.001)
            taking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await taking
            await shard.insert([{"id": 1}])
            await shard.insert([{"id": 2}])
            if then == "a loop":
                events = aiter(listen)
                while len(seen) < 2:
                    seen.extend((await anext(events)).updates["id"].to_pylist())
            else:
                await take(WAIT_S)
            assert seen == [1, 2]

    on(url, work)


def _dropped(url: str) -> None:
    with persist.connect(url) as client:
        client.shard("orders").drop(force=True)


def test_a_write_that_is_cancelled_is_repeated_with_its_token_and_lands_once(url: str) -> None:
    async def work(client: AsyncClient, shard: AsyncShard) -> None:
        for number in range(20):
            token = await client.new_token()
            writing = asyncio.create_task(shard.insert([{"id": number}], token=token))
            for _ in range(number % 4):
                await asyncio.sleep(0)
            writing.cancel()
            with pytest.raises(asyncio.CancelledError):
                await writing
            await shard.insert([{"id": number}], token=token)
        rows = await shard.snapshot().to_arrow()
        assert sorted(rows["id"].to_pylist()) == list(range(20))
        assert set(rows["__diff"].to_pylist()) == {1}

    on(url, work)


def test_a_snapshot_whose_task_is_cancelled_while_it_opens_leaves_no_hold(url: str) -> None:
    async def work(client: AsyncClient, shard: AsyncShard) -> None:
        await shard.insert([{"id": 1}])
        readings = []  # a task keeps the error that cancelled it, and with it what it had opened
        for tries in range(20):
            readings.append(reading := asyncio.create_task(shard.snapshot().__aenter__()))
            for _ in range(tries):
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            if not reading.cancelled():
                await reading.result().close()
        await dropped(shard)

    on(url, work)


@pytest.mark.parametrize("opens", [AsyncHandle.__aenter__, AsyncHandle._ready, AsyncSnapshot.to_arrow])
def test_a_snapshot_whose_task_is_cancelled_once_it_is_open_leaves_no_hold(url: str, opens: Opening) -> None:
    async def work(client: AsyncClient, shard: AsyncShard) -> None:
        await shard.insert([{"id": 1}])
        snapshot = shard.snapshot()
        reading = asyncio.create_task(opens(snapshot))
        while snapshot._opening is None or not snapshot._opening.done():
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert reading.cancelled()
        await dropped(shard)  # while the task and the handle are still referred to
        with pytest.raises(persist.UnknownShard):
            await snapshot.to_arrow()  # which opens it anew

    on(url, work)


async def dropped(shard: AsyncShard) -> None:
    """Drop a shard as soon as the threads have released the holds of reads that were left."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return await shard.drop()
        except persist.Conflict:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.01)


def test_waiting_listeners_keep_nobody_from_writing(url: str) -> None:
    async def work(client: AsyncClient, shard: AsyncShard) -> None:
        async def first(listen: AsyncListen) -> int:
            async for event in listen:
                return event.updates.num_rows
            return 0

        listeners = [shard.listen(None) for _ in range(40)]
        waiting = [asyncio.create_task(first(listen)) for listen in listeners]
        await asyncio.sleep(0)
        await shard.insert([{"id": 1}])
        assert await asyncio.gather(*waiting) == [1] * 40

    on(url, work)


def test_a_read_whose_loop_is_left_holds_nothing(url: str) -> None:
    async def work(client: AsyncClient, shard: AsyncShard) -> None:
        await shard.insert([{"id": 1}])
        snapshot = await shard.snapshot()
        async for _ in snapshot.batches():
            break
        async for _ in shard.changes(-1).batches():
            break
        await shard.snapshot()  # which is forgotten
        gc.collect()
        await dropped(shard)

    on(url, work)


def test_a_time_out_holds_for_awaited_calls_too(url: str) -> None:
    async def work(client: AsyncClient, shard: AsyncShard) -> None:
        await shard.with_timeout(WAIT_S).insert([{"id": 1}])
        with pytest.raises(persist.Unavailable):
            await client.with_timeout(0.2).shard("orders").snapshot(as_of=10)

    on(url, work)


def test_a_closed_client_refuses_and_may_be_closed_again(url: str) -> None:
    async def main() -> None:
        client = await persist.aio.connect(url)
        shard = await client.create_shard("orders", SCHEMA, ["id"])
        await client.close()
        await client.close()
        with pytest.raises(persist.InvalidUsage, match="closed; connect anew"):
            await shard.upper()
        await persist.aio.connect(url).close()

    asyncio.run(main())


def test_a_bad_number_of_threads_is_refused() -> None:
    for threads in (0, 2_000, "4"):
        with pytest.raises(persist.InvalidUsage):
            persist.aio.connect("persist:///nowhere", threads=threads)  # type: ignore[arg-type]


def test_calls_beyond_the_bound_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(persist.aio.handles, "CALLS_MAX", 3)

    async def main() -> None:
        pool = Threads(1)
        held = threading.Event()
        first = asyncio.create_task(pool.run(held.wait))
        others = [asyncio.create_task(pool.run(int)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(persist.Overloaded):
            await pool.run(int)
        held.set()
        await asyncio.gather(first, *others)
        assert await pool.run(int) == 0
        pool.close()

    asyncio.run(main())
