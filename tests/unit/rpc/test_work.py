"""Commands on the event loop: a caller who goes away disturbs nobody, and none has more than its share."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pyarrow as pa
import pytest

from persist.core import commands as c
from persist.core.errors import Overloaded
from persist.core.frontier import Antichain
from persist.core.shard_view import ViewRequest
from rpc import concurrency_limits as work_module
from rpc.concurrency_limits import CALLER, CommandTurns, Slots, Work, _Answers
from rpc.settings import Limits
from rpc.shard_watcher import ShardWatcher
from tests.support.location import client_of, memory_location

SCHEMA = pa.schema([("id", pa.string())])


def test_a_cancelled_caller_takes_nobody_with_it() -> None:
    location = memory_location()
    client_of(location).create_shard("orders", SCHEMA, ["id"])
    machine = location.machine("orders")

    async def scene() -> list[object]:
        work = Work(Limits())
        calls = [asyncio.ensure_future(work.apply(machine, c.AdvanceUpper(Antichain(n)))) for n in range(1, 21)]
        await asyncio.sleep(0)
        for call in calls[::2]:
            call.cancel()
        results = await asyncio.gather(*calls, return_exceptions=True)
        work.close()
        return list(results)

    results = asyncio.run(scene())
    assert all(isinstance(result, c.Appended) for result in results[1::2])
    assert location.machine("orders").refresh().upper == Antichain(20)
    location.close()


def test_work_beyond_the_limit_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_module, "IO_QUEUE_MAX", 1)

    async def scene() -> None:
        work = Work(Limits())
        first = asyncio.ensure_future(work.run(lambda: 7))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await work.run(lambda: 8)
        assert await first == 7
        assert await work.run(lambda: 9) == 9
        work.close()

    asyncio.run(scene())


def test_a_thousand_waits_need_no_thread_each_and_all_end_with_the_commit() -> None:
    location = memory_location()
    shard = client_of(location).create_shard("orders", SCHEMA, ["id"])

    async def scene() -> set[int | None]:
        work = Work(Limits(io_threads=2))
        watcher = ShardWatcher(location, work)
        request = ViewRequest(past=0, timeout_s=60, min_seqno=1)
        waits = [asyncio.ensure_future(watcher.state("orders", request)) for _ in range(1_000)]
        while watcher.waiting < 1_000:
            await asyncio.sleep(0)
        await work.run(shard.insert, [{"id": "a"}])
        uppers = {state.upper.element for state in await asyncio.gather(*waits)}
        assert watcher.waiting == 0
        watcher.stop()
        work.close()
        return uppers

    assert asyncio.run(scene()) == {1}
    location.close()


def test_stopping_ends_waits_with_what_there_is() -> None:
    location = memory_location()
    client_of(location).create_shard("orders", SCHEMA, ["id"])

    async def scene() -> None:
        work = Work(Limits())
        watcher = ShardWatcher(location, work)
        wait = asyncio.ensure_future(watcher.state("orders", ViewRequest(past=0, timeout_s=3600, min_seqno=1)))
        while watcher.waiting < 1:
            await asyncio.sleep(0)
        watcher.stop()
        assert (await wait).upper == Antichain(0)
        work.close()

    asyncio.run(scene())
    location.close()


def test_outcomes_of_many_threads_reach_all_who_wait() -> None:
    """A group wakes the loop up once: none of it may be left behind, whenever it is given."""

    async def play() -> list[int]:
        loop = asyncio.get_running_loop()
        answers = _Answers(loop)
        waiters = [loop.create_future() for _ in range(2_000)]

        def give(start: int) -> None:
            mine = list(range(start, len(waiters), 8))
            for first in range(0, len(mine), 5):
                for number in mine[first : first + 5]:
                    answers.give(waiters[number], number)  # type: ignore[arg-type]
                answers.wake()

        threads = [threading.Thread(target=give, args=(start,)) for start in range(8)]
        for thread in threads:
            thread.start()
        return await asyncio.wait_for(asyncio.gather(*waiters), 60)

    assert asyncio.run(play()) == list(range(2_000))


# --- what one caller may have of a whole, and who goes next


def test_one_caller_has_a_share_and_the_server_itself_the_whole() -> None:
    slots = Slots(4, "many things", share=2)
    CALLER.set("a")
    slots.take(2)
    with pytest.raises(Overloaded, match="a has too many things: one caller may use 2 of 4"):
        slots.take()
    CALLER.set("b")
    slots.take()
    CALLER.set("")
    slots.take()
    with pytest.raises(Overloaded, match="the server has too many things"):
        slots.take()
    slots.give_back()
    CALLER.set("a")
    slots.give_back(2)
    slots.take()
    assert slots.taken == 2


def test_something_larger_than_a_share_is_taken_by_who_has_nothing() -> None:
    slots = Slots(10, "many bytes", share=5)
    CALLER.set("a")
    slots.take(8)
    with pytest.raises(Overloaded):
        slots.take()


def scene(
    turns: CommandTurns, act: Callable[[Callable[[str, int], asyncio.Task[None]], list[str]], Awaitable[None]]
) -> None:
    async def play() -> None:
        went: list[str] = []

        def ask(caller: str, count: int) -> asyncio.Task[None]:
            async def asking() -> None:
                CALLER.set(caller)
                await turns.take(count)
                went.append(caller)

            return asyncio.ensure_future(asking())

        await act(ask, went)

    asyncio.run(play())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_callers_go_in_turn_and_none_beyond_its_share() -> None:
    turns = CommandTurns(4, share=2)

    async def act(ask: Callable[[str, int], asyncio.Task[None]], went: list[str]) -> None:
        for caller in "aaaabb":
            ask(caller, 1)
        await settle()
        assert went == ["a", "a", "b", "b"]
        CALLER.set("a")
        turns.give_back()
        await settle()
        assert went[4:] == ["a"]

    scene(turns, act)


def test_who_needs_more_than_there_is_goes_alone_and_is_not_passed_for_ever() -> None:
    turns = CommandTurns(4, share=4)

    async def act(ask: Callable[[str, int], asyncio.Task[None]], went: list[str]) -> None:
        ask("a", 2)
        await settle()
        ask("b", 9)
        ask("c", 1)
        await settle()
        assert went == ["a"], "else those who need little would always be first"
        CALLER.set("a")
        turns.give_back(2)
        await settle()
        assert went == ["a", "b"]
        CALLER.set("b")
        turns.give_back(9)
        await settle()
        assert went == ["a", "b", "c"]

    scene(turns, act)


def test_who_gives_up_waiting_leaves_nothing_behind() -> None:
    turns = CommandTurns(1, share=1)

    async def act(ask: Callable[[str, int], asyncio.Task[None]], went: list[str]) -> None:
        ask("a", 1)
        await settle()
        gone, there = ask("b", 1), ask("c", 1)
        await settle()
        gone.cancel()
        CALLER.set("a")
        turns.give_back()
        await settle()
        assert went == ["a", "c"]
        assert there.done()
        CALLER.set("c")
        turns.give_back()
        assert turns.taken == 0

    scene(turns, act)
