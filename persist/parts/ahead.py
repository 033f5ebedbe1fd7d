"""Working ahead: the next items are made on another thread while the caller uses the last ones."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

_POLL_S = 0.1  # how soon a thread whose caller has gone away notices


def ahead(items: Iterable[T], depth: int = 1) -> Iterator[T]:
    """The items in order, up to `depth` of them made in advance (and one more under way).

    An error that `items` raises is raised here, after the items before it. Closing the iterator ends the thread
    once the item under way is done; `items` is used by that thread alone.
    """
    made: queue.Queue[tuple[bool, T | None, BaseException | None]] = queue.Queue(maxsize=depth)
    gone = threading.Event()

    def put(more: bool, item: T | None, error: BaseException | None) -> bool:
        while not gone.is_set():
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

    thread = threading.Thread(target=work, name="persist-ahead", daemon=True)
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
