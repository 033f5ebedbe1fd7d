"""Delivers "this key may have moved" to subscribers, from one background thread per store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from consensus.interface import HIDDEN, Wanted

PENDING_KEYS_MAX = 100_000
"""Keys waiting for slow subscribers; more are dropped, which the contract allows."""

_log = logging.getLogger(__name__)


def _everything(_key: str) -> bool:
    return True


class Notifier:
    """A set of moved keys, drained by a thread that lives while anybody subscribes.

    `started` and `stopped` are called when the first subscriber comes and the last one goes, so that a
    store listens to its server only while somebody cares.
    """

    def __init__(
        self, name: str, *, started: Callable[[], None] | None = None, stopped: Callable[[], None] | None = None
    ) -> None:
        self._name = name
        self._started = started
        self._stopped = stopped
        self._edge = threading.Lock()
        self._changed = threading.Condition()
        self._pending: dict[str, None] = {}
        self._callbacks: dict[int, tuple[Callable[[str], None], Wanted]] = {}
        self._next_id = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def publish(self, keys: Iterable[str]) -> None:
        """Tell the subscribers that these keys, but for hidden ones, may have moved. Never blocks, never fails."""
        cares = [wanted for _, wanted in tuple(self._callbacks.values())]  # a copy: no lock is worth waiting for here
        listed = (key for key in keys if not key.startswith(HIDDEN))
        keys = [key for key in listed if any(wanted(key) for wanted in cares)]
        if not keys:
            return
        with self._changed:
            for key in keys:
                if len(self._pending) < PENDING_KEYS_MAX:
                    self._pending[key] = None
            self._changed.notify()

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None]:
        with self._edge:
            with self._changed:
                subscription = self._next_id
                self._next_id += 1
                self._callbacks[subscription] = callback, wanted or _everything
                first = self._thread is None and not self._closed
                if first:
                    self._thread = threading.Thread(target=self._run, name=f"{self._name}-notify", daemon=True)
                    self._thread.start()
            if first and self._started is not None:
                self._started()
        return lambda: self._unsubscribe(subscription)

    def close(self) -> None:
        """End the thread; subscribers hear nothing more."""
        with self._edge:
            with self._changed:
                self._closed = True
                self._callbacks.clear()
            self._end()

    def _unsubscribe(self, subscription: int) -> None:
        with self._edge:
            with self._changed:
                self._callbacks.pop(subscription, None)
                last = not self._callbacks
            if last:
                self._end()

    def _end(self) -> None:
        with self._changed:
            thread, self._thread = self._thread, None
            self._pending.clear()
            self._changed.notify_all()
        if thread is None:
            return
        if self._stopped is not None:
            self._stopped()
        if thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        me = threading.current_thread()
        while True:
            with self._changed:
                while not self._pending and self._thread is me:
                    self._changed.wait()
                if self._thread is not me:
                    return
                keys, self._pending = list(self._pending), {}
                subscribed = list(self._callbacks.values())
            for key in keys:
                for callback, wanted in subscribed:
                    try:
                        if wanted(key):
                            callback(key)
                    except Exception:
                        _log.exception("a subscriber of %s failed on key %s", self._name, key)
