"""Iterators whose next items are computed on other threads while the caller uses the current ones.

The threads are not daemons: a thread that is inside Arrow while the interpreter exits would abort the process. They end
when the main thread ends, even if the iterator was not closed.
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

_POLL_S = 0.1  # within which a thread notices that its caller has stopped


class _Producer(Generic[T]):
    """Computes items on its own thread, up to `depth` in advance and one more in progress."""

    def __init__(self, items: Iterable[T], depth: int) -> None:
        self._items = items
        self._ready: queue.Queue[tuple[bool, T | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="persist-ahead")
        self._thread.start()

    def items(self) -> Iterator[T]:
        """The items in order, then the error that ended them, if any."""
        while True:
            more, item, error = self._ready.get()
            if error is not None:
                raise error
            if not more:
                return
            yield item  # type: ignore[misc]
            item = None  # do not keep it alive while waiting for the next one

    def stop(self) -> None:
        """Start no further item."""
        self._stopped.set()

    def close(self) -> None:
        """Start no further item, and wait for the one in progress."""
        self.stop()
        self._thread.join()

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(True, item, None):
                    return
        except BaseException as error:  # every error is passed to the caller
            self._put(False, None, error)
        else:
            self._put(False, None, None)

    def _put(self, more: bool, item: T | None, error: BaseException | None) -> bool:
        while not self._stopped.is_set() and threading.main_thread().is_alive():
            try:
                self._ready.put((more, item, error), timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False


def read_ahead(items: Iterable[T], depth: int = 1) -> Iterator[T]:
    """The items in order, up to `depth` of them computed in advance (and one more in progress).

    An error that `items` raises is raised here, after the items before it. Closing the iterator ends the thread once
    the item in progress is done; only that thread uses `items`.
    """
    producer = _Producer(items, depth)
    try:
        yield from producer.items()
    finally:
        producer.close()


def prefetch_each(sources: Iterable[Iterable[T]], at_once: int) -> Iterator[T]:
    """The items of all sources, one source after the other, while `at_once` sources are read concurrently.

    Each source is consumed by its own thread, one item in advance and one in progress. Errors: as `read_ahead`.
    """
    producers: deque[_Producer[T]] = deque()
    waiting = iter(sources)
    try:
        while True:
            producers.extend(_Producer(source, 1) for source in islice(waiting, at_once - len(producers)))
            if not producers:
                return
            yield from producers[0].items()
            producers.popleft().close()
    finally:
        for producer in producers:
            producer.stop()
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
