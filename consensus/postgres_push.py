"""PostgreSQL's NOTIFY and LISTEN as the push channel, each on a connection and a thread of its own.

Which key is told on which channel is in `postgres_channels`.

NOTIFY inside the compare-and-set would take a lock over the whole database until its commit is on disk, and
so end group commit between shards. Told separately, in batches, without waiting for the disk, it costs the
writer nothing; what a crash loses is only a hint.
"""

from __future__ import annotations

import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import psycopg

from consensus.postgres_channels import LINGER_S, OLD_CHANNEL, OLD_LOOK_S, OLDER, Followed, channel_of

PENDING_KEYS_MAX = 10_000
"""Keys waiting to be announced; more are dropped, which the contract allows."""

ANNOUNCE_INTERVAL_S = 0.005
"""Least time between two announcements, so that a burst of commits becomes one statement."""

RECONNECT_S = 0.5
"""Pause before a broken push connection is opened again."""

_log = logging.getLogger(__name__)

Connect = Callable[[], "psycopg.Connection[Any]"]


class Announcer:
    """Tells the listeners of the database which keys moved. `older`: names of sessions of builds with one channel."""

    def __init__(self, connect: Connect, older: list[str]) -> None:
        self._connect = connect
        self._older = older
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
        looked_s, are_older = float("-inf"), True
        while True:
            with self._changed:
                while not self._pending and not self._stop.is_set():
                    self._changed.wait()
                if self._stop.is_set():
                    return
                keys, self._pending = list(self._pending), {}
            if time.monotonic() - looked_s >= OLD_LOOK_S:
                looked_s = time.monotonic()
                are_older = bool(connection.execute(OLDER, (self._older,)).fetchone()[0])  # type: ignore[index]
            channels = [channel_of(key) for key in keys]
            if are_older:
                channels, keys = [*channels, *[OLD_CHANNEL] * len(keys)], keys * 2
            connection.execute(
                "SELECT pg_notify(channel, key) FROM unnest(%s::text[], %s::text[]) AS moved(channel, key)",
                (channels, keys),
            )
            self._stop.wait(ANNOUNCE_INTERVAL_S)


class Listener:
    """Calls `publish` with the keys that others announce, of those on the channels of `followed`, until it is closed.

    When it begins to listen to a channel it publishes the keys of it that are followed: they may have moved unheard.
    What older builds announce it hears in any case.
    """

    def __init__(self, connect: Connect, publish: Callable[[Iterable[str]], None], followed: Followed) -> None:
        self._connect = connect
        self._publish = publish
        self._followed = followed
        self._stop = threading.Event()
        self._woken, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        followed.changed = self._poke
        self._thread = threading.Thread(target=self._run, name="consensus-postgres-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._poke()
        if self._thread is not threading.current_thread():
            self._thread.join()
            self._followed.changed = lambda: None
            self._wake.close()
            self._woken.close()

    def _poke(self) -> None:
        with suppress(OSError):  # so many wait already that it will wake, or it is closed
            self._wake.send(b"x")

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                with self._connect() as connection:
                    self._listen(connection)
            except psycopg.Error as error:
                _log.info("listening for moved keys failed, trying again: %s", error)
                self._stop.wait(RECONNECT_S)

    def _listen(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute(f"LISTEN {OLD_CHANNEL}")
        listening: frozenset[str] = frozenset()
        with selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._stop.is_set():
                listening = self._listened(connection, listening)
                for notice in connection.notifies(timeout=0):
                    self._publish((notice.payload,))
                selector.select(LINGER_S)
                with suppress(BlockingIOError):
                    self._woken.recv(4096)

    def _listened(self, connection: psycopg.Connection[Any], listening: frozenset[str]) -> frozenset[str]:
        """Listen to the channels that are wanted now, and to no others; these channels."""
        wanted = self._followed.wanted(listening, time.monotonic())
        changes = [f"LISTEN {name}" for name in sorted(wanted - listening)]
        changes += [f"UNLISTEN {name}" for name in sorted(listening - wanted)]
        if changes:
            connection.execute("; ".join(changes))
            self._publish(self._followed.keys_of(wanted - listening))
        return wanted
