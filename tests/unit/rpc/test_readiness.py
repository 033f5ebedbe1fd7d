"""One look at the stores answers many."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from persist.core.errors import Unavailable
from rpc.app_state import READINESS_CACHE_S, Readiness


class Stores:
    """Two stores that answer once `answers` is set. `wrong`: what is wrong with them; an error is raised."""

    def __init__(self) -> None:
        self.looks = 0
        self.now_s = 100.0
        self.wrong: list[str] | Exception = []
        self.answers = asyncio.Event()
        self.answers.set()

    async def look(self) -> list[str]:
        self.looks += 1
        await self.answers.wait()
        if isinstance(self.wrong, Exception):
            raise self.wrong
        return self.wrong


def told(story: Callable[[Stores, Readiness], object]) -> None:
    async def run() -> None:
        stores = Stores()
        await story(stores, Readiness(stores.look, lambda: stores.now_s))  # type: ignore[misc]

    asyncio.run(run())


def test_many_who_ask_at_once_are_answered_by_one_look() -> None:
    async def story(stores: Stores, readiness: Readiness) -> None:
        stores.answers.clear()
        asking = [asyncio.ensure_future(readiness.check()) for _ in range(50)]
        await asyncio.sleep(0)
        stores.answers.set()
        assert await asyncio.gather(*asking) == [[]] * 50
        assert stores.looks == 1

    told(story)


def test_what_was_found_is_told_for_a_second() -> None:
    async def story(stores: Stores, readiness: Readiness) -> None:
        await readiness.check()
        stores.wrong = ["the disk is full"]
        stores.now_s += READINESS_CACHE_S / 2
        assert await readiness.check() == []
        stores.now_s += READINESS_CACHE_S / 2
        assert await readiness.check() == ["the disk is full"]
        assert stores.looks == 2

    told(story)


def test_a_failure_is_told_to_those_who_wait_and_not_kept() -> None:
    async def story(stores: Stores, readiness: Readiness) -> None:
        stores.answers.clear()
        stores.wrong = Unavailable("the log store does not answer")
        asking = [asyncio.ensure_future(readiness.check()) for _ in range(3)]
        await asyncio.sleep(0)
        stores.answers.set()
        found = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(one) for one in found] == [Unavailable] * 3
        stores.wrong = []
        assert await readiness.check() == []
        assert stores.looks == 2

    told(story)


def test_who_goes_away_ends_no_look_of_others() -> None:
    async def story(stores: Stores, readiness: Readiness) -> None:
        stores.answers.clear()
        first, second = (asyncio.ensure_future(readiness.check()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        stores.answers.set()
        assert await second == []
        assert stores.looks == 1

    told(story)
