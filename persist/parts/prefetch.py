"""Working ahead: the next items are made on other threads while the caller uses the last ones.

The threads are no daemons: one that is inside Arrow while the interpreter exits would abort the process. So they
end by themselves when the main thread has ended, even if nobody closed the iterator.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")

_POLL_S = 0.1  # how soon a thread whose caller has gone away notices


class _Making(Generic[T]):
    """Items made on a thread of their own from now on, up to `depth` in advance and one more under way."""

    def __init__(self, items: Iterable[T], depth: int) -> None:
        self._items = items
        self._made: queue.Queue[tuple[bool, T | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._gone = threading.Event()
        self._thread = threading.Thread(target=self._work, name="persist-ahead")
        self._thread.start()

    def items(self) -> Iterator[T]:
        """The items in order; after them the error that ended them is raised."""
        while True:
            more, item, error = self._made.get()
            if error is not None:
                raise error
            if not more:
                return
            yield item  # type: ignore[misc]
            item = None  # do not keep it alive while the next one is awaited

    def give_up(self) -> None:
        """Begin no other item."""
        self._gone.set()

    def close(self) -> None:
        """Begin no other item, and wait for the one under way."""
        self.give_up()
        self._thread.join()

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(True, item, None):
                    return
        except BaseException as error:  # handed over to the caller, whatever it is
            self._put(False, None, error)
        else:
            self._put(False, None, None)

    def _put(self, more: bool, item: T | None, error: BaseException | None) -> bool:
        while not self._gone.is_set() and threading.main_thread().is_alive():
            try:
                self._made.put((more, item, error), timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False


def read_ahead(items: Iterable[T], depth: int = 1) -> Iterator[T]:
    """The items in order, up to `depth` of them made in advance (and one more under way).

    An error that `items` raises is raised here, after the items before it. Closing the iterator ends the thread
    once the item under way is done; `items` is used by that thread alone.
    """
    making = _Making(items, depth)
    try:
        yield from making.items()
    finally:
        making.close()


def prefetch_each(sources: Iterable[Iterable[T]], at_once: int) -> Iterator[T]:
    """The items of all sources, one source after the other, while `at_once` sources are read concurrently.

    Each source is consumed by its own thread, one item in advance and one in progress. Errors: as `read_ahead`.
    """
    under_way: deque[_Making[T]] = deque()
    waiting = iter(sources)
    try:
        while True:
            under_way.extend(_Making(source, 1) for source in islice(waiting, at_once - len(under_way)))
            if not under_way:
                return
            yield from under_way[0].items()
            under_way.popleft().close()
    finally:
        for making in under_way:
            making.give_up()
        for making in under_way:
            making.close()


def alongside(work: Callable[[S], T], items: Iterable[S]) -> Iterator[T]:
    """`work` of each item, in order, on another thread, while `items` makes the next one on this thread."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="persist-read") as pool:
        made: Future[T] | None = None
        for item in items:
            if made is not None:
                yield made.result()
            made = pool.submit(work, item)
        if made is not None:
            yield made.result()


def map_in_order(work: Callable[[S], T], items: Iterable[S], workers: int, waiting: int = 0) -> Iterator[T]:
    """`work` of each item, in order, by so many threads; at most `workers` and `waiting` of them are there, together:

    made at the same time, or waiting to be taken. `items` makes the next one on the caller's thread.
    """
    if workers == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="persist-read") as pool:
        made: deque[Future[T]] = deque()
        try:
            for item in items:
                made.append(pool.submit(work, item))
                if len(made) == workers + waiting:
                    yield made.popleft().result()
            while made:
                yield made.popleft().result()
        finally:
            for future in made:
                future.cancel()


def cpu_count() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
