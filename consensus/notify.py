"""Delivers "this key may have moved" to the subscribers of a store, from one background thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from consensus.interface import HIDDEN, Wanted

PENDING_KEYS_MAX = 100_000  # keys that wait for slow subscribers; further keys are dropped, which the interface allows

_log = logging.getLogger(__name__)


class Once:
    """Calls a function the first time that it is called, and does nothing after that. Thread-safe."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function: Callable[[], None] | None = function
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            function, self._function = self._function, None
        if function is not None:
            function()


class Notifier:
    """A set of moved keys, drained by a thread that runs while there are subscribers.

    `listen`, if any, is called for the first subscriber and starts to call `publish` for changes by other processes; it
    returns a function that ends that, which is called for the last subscriber.
    """

    def __init__(self, name: str, listen: Callable[[], Callable[[], None]] | None = None) -> None:
        self._name = name
        self._listen = listen
        self._end_listening: Callable[[], None] | None = None
        self._lifecycle_lock = threading.Lock()  # held while the thread starts or ends
        self._changed = threading.Condition()
        self._pending: dict[str, None] = {}
        self._callbacks: dict[int, tuple[Callable[[str], None], Wanted]] = {}
        self._next_id = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def publish(self, keys: Iterable[str]) -> None:
        """Notify subscribers that these keys may have moved, except hidden keys. Never blocks, never fails."""
        filters = [wanted for _, wanted in tuple(self._callbacks.values())]  # a copy instead of taking the lock
        visible = (key for key in keys if not key.startswith(HIDDEN))
        keys = [key for key in visible if any(wanted(key) for wanted in filters)]
        if not keys:
            return
        with self._changed:
            for key in keys:
                if len(self._pending) < PENDING_KEYS_MAX:
                    self._pending[key] = None
            self._changed.notify()

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None]:
        with self._lifecycle_lock:
            with self._changed:
                subscription = self._next_id
                self._next_id += 1
                self._callbacks[subscription] = callback, wanted or (lambda _key: True)
                first = self._thread is None and not self._closed
                if first:
                    self._thread = threading.Thread(target=self._run, name=f"{self._name}-notify", daemon=True)
                    self._thread.start()
            if first and self._listen is not None:
                self._end_listening = self._listen()
        return lambda: self._unsubscribe(subscription)

    def close(self) -> None:
        """End the thread and all notifications."""
        with self._lifecycle_lock:
            with self._changed:
                self._closed = True
                self._callbacks.clear()
            self._end()

    def _unsubscribe(self, subscription: int) -> None:
        with self._lifecycle_lock:
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
        end_listening, self._end_listening = self._end_listening, None
        if end_listening is not None:
            end_listening()
        if thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        current = threading.current_thread()
        while True:
            with self._changed:
                while not self._pending and self._thread is current:
                    self._changed.wait()
                if self._thread is not current:
                    return
                keys, self._pending = list(self._pending), {}
                subscribers = list(self._callbacks.values())
            for key in keys:
                for callback, wanted in subscribers:
                    try:
                        if wanted(key):
                            callback(key)
                    except Exception:
                        _log.exception("a subscriber of %s failed on key %s", self._name, key)
