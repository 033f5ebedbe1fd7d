"""Iterators whose next items are computed on other threads while the caller uses the current ones.

The threads are not daemons: a thread that is inside Arrow while the interpreter exits would abort the process. They end
when the main thread ends, even if the iterator was not closed.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any, Generic, TypeVar

T = TypeVar("T")
S = TypeVar("S")

_END: Any = object()


class _Producer(Generic[T]):
    """Computes items on its own thread, one in advance and one more in progress."""

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="persist-ahead")
        self._ready = deque([self._begin(), self._begin()])

    def items(self) -> Iterator[T]:
        """The items in order, then the error that ended them, if any."""
        while (item := self._ready.popleft().result()) is not _END:
            self._ready.append(self._begin())
            yield item
            del item  # do not keep it alive while waiting for the next one

    def close(self, *, wait: bool = True) -> None:
        """Start no further item, and wait for the one in progress."""
        self._pool.shutdown(wait, cancel_futures=True)

    def _begin(self) -> Future[T]:
        return self._pool.submit(next, self._items, _END)


def read_ahead(items: Iterable[T]) -> Iterator[T]:
    """The items in order, one of them computed in advance (and one more in progress).

    An error that `items` raises is raised here, after the items before it. Closing the iterator ends the thread once
    the item in progress is done; only that thread uses `items`.
    """
    return prefetch_each([items], 1)


def prefetch_each(sources: Iterable[Iterable[T]], at_once: int) -> Iterator[T]:
    """The items of all sources, one source after the other, while `at_once` sources are read concurrently.

    Each source is consumed by its own thread, as in `read_ahead`.
    """
    producers: deque[_Producer[T]] = deque()
    waiting = iter(sources)
    try:
        while True:
            producers.extend(map(_Producer, islice(waiting, at_once - len(producers))))
            if not producers:
                return
            yield from producers[0].items()
            producers.popleft().close()
    finally:
        for producer in producers:
            producer.close(wait=False)
        for producer in producers:
            producer.close()


def map_in_order(work: Callable[[S], T], items: Iterable[S], workers: int, waiting: int = 0) -> Iterator[T]:
    """`work` of each item, in order, by `workers` threads (1 without `waiting`: by the caller's thread).

    At most `workers + waiting` results are in progress or not yet taken. `items` is consumed on the caller's thread.
    """
    if workers == 1 and not waiting:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="persist-read") as pool:
        results: deque[Future[T]] = deque()
        try:
            for item in items:
                results.append(pool.submit(work, item))
                if len(results) == workers + waiting:
                    yield results.popleft().result()
            while results:
                yield results.popleft().result()
        finally:
            for future in results:
                future.cancel()


def cpu_count() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
