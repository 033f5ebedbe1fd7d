"""Working ahead: the next items are made on other threads while the caller uses the last ones.

The threads are no daemons: one that is inside Arrow while the interpreter exits would abort the process. So they
end by themselves when the main thread has ended, even if nobody closed the iterator.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")

_POLL_S = 0.1  # how soon a thread whose caller has gone away notices


def ahead(items: Iterable[T], depth: int = 1) -> Iterator[T]:
    """The items in order, up to `depth` of them made in advance (and one more under way).

    An error that `items` raises is raised here, after the items before it. Closing the iterator ends the thread
    once the item under way is done; `items` is used by that thread alone.
    """
    made: queue.Queue[tuple[bool, T | None, BaseException | None]] = queue.Queue(maxsize=depth)
    gone = threading.Event()

    def put(more: bool, item: T | None, error: BaseException | None) -> bool:
        while not gone.is_set() and threading.main_thread().is_alive():
            try:
                made.put((more, item, error), timeout=_POLL_S)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for item in items:
                if not put(True, item, None):
                    return
        except BaseException as error:  # handed over to the caller, whatever it is
            put(False, None, error)
        else:
            put(False, None, None)

    thread = threading.Thread(target=work, name="persist-ahead")
    thread.start()
    try:
        while True:
            more, item, error = made.get()
            if error is not None:
                raise error
            if not more:
                return
            yield item  # type: ignore[misc]
            item = None  # do not keep it alive while the next one is awaited
    finally:
        gone.set()
        thread.join()


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


def in_order(work: Callable[[S], T], items: Iterable[S], workers: int) -> Iterator[T]:
    """`work` of each item, in order, at most `workers` of them made at the same time or waiting to be taken."""
    if workers == 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="persist-read") as pool:
        made: deque[Future[T]] = deque()
        try:
            for item in items:
                made.append(pool.submit(work, item))
                if len(made) == workers:
                    yield made.popleft().result()
            while made:
                yield made.popleft().result()
        finally:
            for future in made:
                future.cancel()
