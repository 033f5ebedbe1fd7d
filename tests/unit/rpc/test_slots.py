"""What one caller may have of a whole, and who goes next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from persist.core.errors import Overloaded
from rpc.concurrency_limits import CALLER, CommandTurns, Slots


def test_one_caller_has_a_share_and_the_server_itself_the_whole() -> None:
    slots = Slots(4, "many things", share=2)
    CALLER.set("a")
    slots.take(2)
    with pytest.raises(Overloaded, match="a has too many things: one caller gets 2 of 4"):
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
