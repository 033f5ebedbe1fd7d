"""Counting what is under way at once against limits: of all, and of each caller.

What is taken is given back by a `with`, however it ends. All of it is used from the event loop's thread,
except for `SharedSlots`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextvars import ContextVar

from persist.core.errors import Overloaded

RETRY_AFTER_S = 0.1
SHARE_PERCENT = 50  # of what is bounded, that one token or address may have
CALLER: ContextVar[str] = ContextVar("persist.caller", default="")
"""For whom the current task works: a token, or without tokens an address. Empty: the server, or this machine's own
processes where nobody has a token; for these there is no share, only the whole."""


def share(most: int, percent: int = SHARE_PERCENT) -> int:
    """How much of `most` one caller may have: always something."""
    return max(1, most * percent // 100)


class Slots:
    """`taken` of `most` are in use, at most `share` by one caller; `what` is what there are too many of."""

    def __init__(self, most: int, what: str, share: int | None = None) -> None:
        self.taken = 0
        self.most = most
        self._share = most if share is None else share
        self._what = what
        self._by_caller: dict[str, int] = {}  # of those who have some

    def take(self, count: int = 1) -> None:
        """Raises Overloaded beyond the limit; then nothing was taken."""
        caller = CALLER.get()
        if self.taken + count > self.most:
            raise Overloaded(f"the server has too {self._what}; slow down", retry_after_s=RETRY_AFTER_S)
        if caller:
            mine = self._by_caller.get(caller, 0) + count
            if mine > self._share and mine > count:
                raise Overloaded(
                    f"{caller} has too {self._what}: one caller gets {self._share} of {self.most}; slow down",
                    retry_after_s=RETRY_AFTER_S,
                )
            self._by_caller[caller] = mine
        self.taken += count

    def give_back(self, count: int = 1) -> None:
        self.taken -= count
        caller = CALLER.get()
        if caller:
            _less(self._by_caller, caller, count)

    def __enter__(self) -> None:
        self.take()

    def __exit__(self, *_: object) -> None:
        self.give_back()


class SharedSlots(Slots):
    """The same, used from any thread."""

    def __init__(self, most: int, what: str, share: int | None = None) -> None:
        super().__init__(most, what, share)
        self._lock = threading.Lock()

    def take(self, count: int = 1) -> None:
        with self._lock:
            super().take(count)

    def give_back(self, count: int = 1) -> None:
        with self._lock:
            super().give_back(count)


class Turns:
    """As Slots, but who finds no room waits: callers are served in turn, what one asks for in order.

    More than `most`, or than a share, gets its turn when nothing else is held: of all, or by that caller.
    """

    def __init__(self, most: int, share: int) -> None:
        self.taken = 0
        self.most = most
        self._share = share
        self._by_caller: dict[str, int] = {}
        self._waiting: OrderedDict[str, deque[tuple[int, asyncio.Future[None]]]] = OrderedDict()

    @contextlib.asynccontextmanager
    async def turn(self, count: int = 1) -> AsyncIterator[None]:
        await self.take(count)
        try:
            yield
        finally:
            self.give_back(count)

    async def take(self, count: int = 1) -> None:
        caller = CALLER.get()
        if not self._waiting and not self._is_full(count) and not self._has_enough(caller, count):
            self._grant(caller, count)
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (count, waiter)
        self._waiting.setdefault(caller, deque()).append(entry)
        self._admit()  # those who wait may all have their share, and this caller not
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give_back(count)
            else:
                self._forget(caller, entry)
                self._admit()
            raise

    def give_back(self, count: int = 1) -> None:
        self.taken -= count
        _less(self._by_caller, CALLER.get(), count)
        self._admit()

    def _is_full(self, count: int) -> bool:
        return bool(self.taken) and self.taken + count > self.most

    def _has_enough(self, caller: str, count: int) -> bool:
        if not caller:
            return False
        mine = self._by_caller.get(caller, 0)
        return bool(mine) and mine + count > self._share

    def _grant(self, caller: str, count: int) -> None:
        self.taken += count
        self._by_caller[caller] = self._by_caller.get(caller, 0) + count

    def _admit(self) -> None:
        """Let those go whose turn it is. Who needs more than there is holds up the rest, or would never get it."""
        passed = 0  # callers in a row of whom nobody can go now
        while passed < len(self._waiting):
            caller, queue = next(iter(self._waiting.items()))
            count, waiter = queue[0]
            is_waiting = not waiter.done()  # else it is being cancelled
            if is_waiting and not self._has_enough(caller, count) and self._is_full(count):
                return
            self._waiting.move_to_end(caller)
            if is_waiting and self._has_enough(caller, count):
                passed += 1
                continue
            passed = 0
            self._forget(caller, (count, waiter))
            if is_waiting:
                self._grant(caller, count)
                waiter.set_result(None)

    def _forget(self, caller: str, entry: tuple[int, asyncio.Future[None]]) -> None:
        queue = self._waiting.get(caller)
        if queue is not None and entry in queue:
            queue.remove(entry)
            if not queue:
                del self._waiting[caller]


def _less(counts: dict[str, int], caller: str, count: int) -> None:
    left = counts.get(caller, 0) - count
    if left > 0:
        counts[caller] = left
    else:
        counts.pop(caller, None)
