"""The threads of an asynchronous client: what it asks runs there, a bounded number at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from persist.client.arguments import checked
from persist.core.errors import InvalidUsage, Overloaded, shown

THREADS = 32  # calls at once
THREADS_MAX = 1_024
LISTENERS = 256  # waits of listeners at once; of more, each has its turn
CALLS_MAX = 10_000  # calls under way and waiting for a thread
RETRY_AFTER_S = 0.1
_T = TypeVar("_T")


class Threads:
    """Two pools: one for calls, one for waiting, so that those who wait keep nobody from asking."""

    def __init__(self, threads: int = THREADS) -> None:
        checked("threads", threads, int)
        if not 1 <= threads <= THREADS_MAX:
            raise InvalidUsage(f"threads is {shown(threads)}; it must be in [1, {THREADS_MAX}]")
        self._calls = ThreadPoolExecutor(threads, thread_name_prefix="persist-aio")
        self._waits = ThreadPoolExecutor(LISTENERS, thread_name_prefix="persist-aio-wait")
        self._under_way = 0

    def submit(self, work: Callable[[], _T], *, waits: bool = False) -> Future[_T]:
        """Begin the work on a thread. Raises Overloaded (too many calls wait), InvalidUsage (the client is closed)."""
        if self._under_way >= CALLS_MAX:
            raise Overloaded(
                f"this client has {CALLS_MAX} calls under way; wait for some of them", retry_after_s=RETRY_AFTER_S
            )
        try:
            future = (self._waits if waits else self._calls).submit(work)
        except RuntimeError as error:
            raise InvalidUsage("this client was closed; connect anew") from error
        return future

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
        self._calls.shutdown(wait=False, cancel_futures=True)
        self._waits.shutdown(wait=False, cancel_futures=True)


def _close_what_came(future: Future[Any]) -> None:
    if future.cancelled() or future.exception() is not None:
        return
    close = getattr(future.result(), "close", None)
    if close is not None:
        with suppress(Exception):  # nobody is there to hear of it
            close()
