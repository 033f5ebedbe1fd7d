"""PostgreSQL's NOTIFY and LISTEN as the push channel, each on a connection and a thread of its own.

NOTIFY inside the compare-and-set would take a lock over the whole database until its commit is on disk, and
so end group commit between shards. Told separately, in batches, without waiting for the disk, it costs the
writer nothing; what a crash loses is only a hint.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any

import psycopg

CHANNEL = "consensus_moved"

PENDING_KEYS_MAX = 10_000
"""Keys waiting to be announced; more are dropped, which the contract allows."""

ANNOUNCE_INTERVAL_S = 0.005
"""Least time between two announcements, so that a burst of commits becomes one statement."""

RECONNECT_S = 0.5
"""Pause before a broken push connection is opened again."""

POLL_S = 0.2
"""How often the listener looks whether it is to end."""

_log = logging.getLogger(__name__)

Connect = Callable[[], "psycopg.Connection[Any]"]


class Announcer:
    """Tells every listener of the database which keys moved."""

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._changed = threading.Condition()
        self._pending: dict[str, None] = {}
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def announce(self, key: str) -> None:
        with self._changed:
            if len(self._pending) < PENDING_KEYS_MAX:
                self._pending[key] = None
            if self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="consensus-postgres-notify", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._stop.set()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._connect() as connection:
                    connection.execute("SET synchronous_commit = off")
                    self._send(connection)
            except psycopg.Error as error:
                _log.info("announcing moved keys failed, trying again: %s", error)
                self._stop.wait(RECONNECT_S)

    def _send(self, connection: psycopg.Connection[Any]) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._stop.is_set():
                    self._changed.wait()
                if self._stop.is_set():
                    return
                keys, self._pending = list(self._pending), {}
            connection.execute("SELECT pg_notify(%s, key) FROM unnest(%s::text[]) AS key", (CHANNEL, keys))
            self._stop.wait(ANNOUNCE_INTERVAL_S)


class Listener:
    """Calls `publish` with the keys that others announce, until it is closed."""

    def __init__(self, connect: Connect, publish: Callable[[Iterable[str]], None]) -> None:
        self._connect = connect
        self._publish = publish
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="consensus-postgres-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._connect() as connection:
                    connection.execute(f"LISTEN {CHANNEL}")
                    while not self._stop.is_set():
                        for notice in connection.notifies(timeout=POLL_S):
                            self._publish((notice.payload,))
            except psycopg.Error as error:
                _log.info("listening for moved keys failed, trying again: %s", error)
                self._stop.wait(RECONNECT_S)
