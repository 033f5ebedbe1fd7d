"""Whether both stores answer, asked for by strangers: each look writes to the stores, so one look answers many."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

KEPT_S = 1.0  # for so long what was found is told again


class Readiness:
    """`look` asks both stores, and returns what is wrong with one that cannot be written. Belongs to one event loop."""

    def __init__(self, look: Callable[[], Awaitable[list[str]]], monotonic: Callable[[], float]) -> None:
        self._look = look
        self._monotonic = monotonic
        self._under_way: asyncio.Task[list[str]] | None = None
        self._found: list[str] | None = None
        self._found_s = 0.0

    async def told(self) -> list[str]:
        """What a look has found that is at most `KEPT_S` seconds old, or that is under way. Raises what it raised.

        A failure is told to those who wait for it, and to nobody who comes later.
        """
        if self._found is not None and self._monotonic() - self._found_s < KEPT_S:
            return self._found
        if self._under_way is None:
            self._under_way = asyncio.get_running_loop().create_task(self._looked())
            self._under_way.add_done_callback(self._ended)
        return await asyncio.shield(self._under_way)

    async def _looked(self) -> list[str]:
        self._found = await self._look()
        self._found_s = self._monotonic()
        return self._found

    def _ended(self, look: asyncio.Task[list[str]]) -> None:
        self._under_way = None
        if not look.cancelled():
            look.exception()  # whoever asked may be gone, and nobody need hear of it then
