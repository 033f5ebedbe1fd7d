"""The threads of an asynchronous client: what it asks runs there, a bounded number at once."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from threading import Condition, Thread
from typing import Any, TypeVar

from persist.client.arguments import checked
from persist.core.errors import InvalidUsage, Overloaded, shown

THREADS = 32  # calls at once
THREADS_MAX = 1_024
LISTENERS = 256  # waits of listeners at once; of more, each has its turn
CALLS_MAX = 10_000  # calls under way and waiting for a thread
RETRY_AFTER_S = 0.1
_T = TypeVar("_T")


class CallPool:
    """At most so many threads, begun as they are needed. They keep no program alive: its end waits for no answer."""

    def __init__(self, threads: int, name: str) -> None:
        self._most, self._name = threads, name
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._moved = Condition()
        self._begun = self._idle = 0
        self._is_closed = False

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """What becomes of the work. Raises InvalidUsage where the pool is closed."""
        future: Future[_T] = Future()
        with self._moved:
            if self._is_closed:
                raise InvalidUsage("this client was closed; connect anew")
            self._waiting.append((future, work))
            if self._idle < len(self._waiting) and self._begun < self._most:
                self._begun += 1
                Thread(target=self._run, name=f"{self._name}-{self._begun}", daemon=True).start()
            else:
                self._moved.notify()
        return future

    def close(self) -> None:
        """End the threads once they are idle. What has not begun never does."""
        with self._moved:
            self._is_closed = True
            left, self._waiting = self._waiting, deque()
            self._moved.notify_all()
        for future, _ in left:
            future.cancel()

    def _run(self) -> None:
        while (taken := self._next()) is not None:
            future, work = taken
            if future.set_running_or_notify_cancel():
                _settle(future, work)
            del taken, future, work  # an idle thread keeps nothing alive, such as the hold of a snapshot

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._moved:
            self._idle += 1
            while not self._waiting and not self._is_closed:
                self._moved.wait()
            self._idle -= 1
            return self._waiting.popleft() if self._waiting else None


def _settle(future: Future[_T], work: Callable[[], _T]) -> None:
    try:
        found = work()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(found)


class Threads:
    """Two pools: one for calls, one for waiting, so that those who wait keep nobody from asking."""

    def __init__(self, threads: int = THREADS) -> None:
        checked("threads", threads, int)
        if not 1 <= threads <= THREADS_MAX:
            raise InvalidUsage(f"threads is {shown(threads)}; it must be in [1, {THREADS_MAX}]")
        self._calls = CallPool(threads, "persist-aio")
        self._waits = CallPool(LISTENERS, "persist-aio-wait")
        self._under_way = 0

    def submit(self, work: Callable[[], _T], *, waits: bool = False) -> Future[_T]:
        """Begin the work on a thread. Raises Overloaded (too many calls wait), InvalidUsage (the client is closed)."""
        if self._under_way >= CALLS_MAX:
            raise Overloaded(
                f"this client has {CALLS_MAX} calls under way; wait for some of them", retry_after_s=RETRY_AFTER_S
            )
        return (self._waits if waits else self._calls).submit(work)

    async def run(self, work: Callable[[], _T], *, waits: bool = False) -> _T:
        """What the work returns. Where its task is cancelled it is given up: it never begins, or goes on unheard."""
        future = self.submit(work, waits=waits)
        self._under_way += 1
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._under_way -= 1

    async def open(self, work: Callable[[], _T]) -> _T:
        """As `run`, for what has to be closed: where the task is cancelled, it is closed when it comes."""
        future = self.submit(work)
        self._under_way += 1
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_close_what_came)
            raise
        finally:
            self._under_way -= 1

    def close(self) -> None:
        """End: calls under way go on unheard, and those that wait never begin. Raises nothing."""
        self._calls.close()
        self._waits.close()


def _close_what_came(future: Future[Any]) -> None:
    if future.cancelled() or future.exception() is not None:
        return
    close = getattr(future.result(), "close", None)
    if close is not None:
        with suppress(Exception):  # nobody is there to hear of it
            close()
