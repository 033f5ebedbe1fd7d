"""Ends calls that hang: a driver that waits for ever is freed by shutting its socket down.

libpq has no client-side limit on a query, and a frozen server still acknowledges packets. So each call is
registered here, and one thread breaks the connection of whatever is overdue; the driver then fails at once.
"""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from contextlib import suppress


class Watchdog:
    """Breaks sockets that are watched for longer than `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._ids = itertools.count()
        self._watched: dict[int, tuple[float, int]] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, descriptor: int) -> int:
        """Break the socket `descriptor` unless `release` is called in time with what this returns.

        The socket must stay open until then.
        """
        token = next(self._ids)
        with self._lock:
            self._watched[token] = (time.monotonic() + self._timeout_s, descriptor)
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="consensus-watchdog", daemon=True)
                self._thread.start()
        return token

    def release(self, token: int) -> None:
        with self._lock:
            del self._watched[token]

    def close(self) -> None:
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(min(1.0, self._timeout_s / 4)):
            now = time.monotonic()
            # Under the lock, so that the descriptor cannot have been closed and given to something else.
            with self._lock:
                for deadline, descriptor in self._watched.values():
                    if now > deadline:
                        _break(descriptor)


def _break(descriptor: int) -> None:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as copy:
        copy.shutdown(socket.SHUT_RDWR)
