"""The bounded thread pools of an asynchronous client."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from threading import BoundedSemaphore, Condition, Thread
from typing import Any, TypeVar

from persist.client.arguments import check_int
from persist.core.errors import InvalidUsage, Overloaded

THREADS = 32  # calls at once
THREADS_MAX = 1_024
LISTENERS = 256  # waits of listeners at once; further ones take turns
CALLS_MAX = 10_000  # calls under way or waiting for a thread
RETRY_AFTER_S = 0.1
_T = TypeVar("_T")


class CallPool:
    """Up to `threads` threads, started on demand. They are daemons: they do not keep the program alive."""

    def __init__(self, threads: int, name: str) -> None:
        self._most, self._name = threads, name
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._moved = Condition()
        self._begun = self._idle = 0
        self._is_closed = False

    def submit(self, work: Callable[[], _T]) -> Future[_T]:
        """A future of the work. Raises InvalidUsage if the pool is closed."""
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
        """End the threads once they are idle. Work that has not started is cancelled."""
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
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del taken, future, work  # an idle thread must not keep objects alive, such as the hold of a snapshot

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        with self._moved:
            self._idle += 1
            while not self._waiting and not self._is_closed:
                self._moved.wait()
            self._idle -= 1
            return self._waiting.popleft() if self._waiting else None


class Threads:
    """Two pools: one for calls and one for waits, so that waiting listeners do not block calls."""

    def __init__(self, threads: int = THREADS) -> None:
        check_int("threads", threads, 1, THREADS_MAX)
        self._calls = CallPool(threads, "persist-aio")
        self._waits = CallPool(LISTENERS, "persist-aio-wait")
        self._free = BoundedSemaphore(CALLS_MAX)

    def submit(self, work: Callable[[], _T], *, waits: bool = False) -> Future[_T]:
        """Start the work on a thread. Raises Overloaded (too many calls wait), InvalidUsage (the client is closed)."""
        if not self._free.acquire(blocking=False):
            raise Overloaded(
                f"this client has {CALLS_MAX} calls under way; wait for some of them", retry_after_s=RETRY_AFTER_S
            )
        try:
            future = (self._waits if waits else self._calls).submit(work)
        except BaseException:
            self._free.release()
            raise
        future.add_done_callback(lambda _: self._free.release())
        return future

    async def run(self, work: Callable[[], _T]) -> _T:
        """What the work returns. If the task is cancelled, the work is not started, or its result is dropped."""
        return await asyncio.wrap_future(self.submit(work))

    async def open(self, work: Callable[[], _T]) -> _T:
        """As `run`, for work that returns a resource: if the task is cancelled, the resource is closed."""
        future = self.submit(work)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_close_result)
            raise

    def close_result(self, future: asyncio.Future[Any]) -> None:
        """Close the unused resource of a future that is done, on a thread. Raises nothing."""
        if _has_result(future):
            with suppress(InvalidUsage, Overloaded):
                self.submit(partial(_close_result, future))

    def close(self) -> None:
        """End: results of calls under way are dropped, and waiting calls never start. Raises nothing."""
        self._calls.close()
        self._waits.close()


def _has_result(future: Future[Any] | asyncio.Future[Any]) -> bool:
    return not future.cancelled() and future.exception() is None


def _close_result(future: Future[Any] | asyncio.Future[Any]) -> None:
    close = getattr(future.result(), "close", None) if _has_result(future) else None
    if close is not None:
        with suppress(Exception):  # the caller is gone
            close()
