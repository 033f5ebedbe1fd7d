"""Logs in PostgreSQL: one statement per compare-and-set, READ COMMITTED; the primary key arbitrates.

NOTIFY and LISTEN are the push channel, each on a connection and a thread of its own. PostgreSQL wakes a listener for
each message on its channels, so each key has one of `CHANNELS` channels, and a process listens to those of the keys
that it follows. NOTIFY inside the compare-and-set would take a lock over the whole database until its commit is on
disk, and so prevent group commit between shards. Sent separately, in batches, without waiting for the disk, it costs
the writer nothing; a crash loses only hints.
"""

from __future__ import annotations

import logging
import re
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any
from zlib import crc32

import psycopg
import sqlalchemy as sa

from consensus.advisory_locks import Watchdog
from consensus.interface import (
    ConsensusDamaged,
    ConsensusIndeterminate,
    ConsensusMisconfigured,
    ConsensusNotWritable,
    ConsensusUnavailable,
)
from consensus.notify import Notifier, Once
from consensus.sql import POOL_SIZE, POOL_TIMEOUT_S, TABLE, Compiled, Kind, SqlConsensus, bind

# A process that follows ten keys is notified of one in 26 of all other keys. PostgreSQL scans a list of channels.
CHANNELS = 256
LINGER_S = 60.0  # how long a process listens to a channel after its last follower left, because followers come and go


def channel_of(key: str) -> str:
    """The channel of a key. It must not change between versions."""
    return f"consensus_moved_{crc32(key.encode()) % CHANNELS:03d}"


ALL_CHANNELS = frozenset(f"consensus_moved_{number:03d}" for number in range(CHANNELS))


class FollowedKeys:
    """The keys that are followed in this process, and so the channels to listen to. Thread-safe.

    `changed` is called, without the lock, when a further channel is needed.
    """

    def __init__(self) -> None:
        self.changed: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._keys: Counter[str] = Counter()
        self._channels: Counter[str] = Counter()
        self._unused_since_s: dict[str, float] = {}  # channels without followers, and when that was noticed

    def follow(self, key: str) -> Callable[[], None]:
        """Follow a key, or every one (""), until the returned function is called, which may be called twice."""
        keys, channels = ([key], {channel_of(key)}) if key else ([], ALL_CHANNELS)
        with self._lock:
            is_new = not channels <= self._channels.keys()
            self._keys.update(keys)
            self._channels.update(channels)
        if is_new:
            self.changed()
        return Once(lambda: self._unfollow(keys, channels))

    def wanted(self, listening: Iterable[str], now_s: float) -> frozenset[str]:
        """The channels to listen to next, given those listened to now: with followers, or with recent followers."""
        with self._lock:
            used = frozenset(self._channels)
            unused = [channel for channel in listening if channel not in used]
            self._unused_since_s = {channel: self._unused_since_s.get(channel, now_s) for channel in unused}
            return used | {channel for channel, since_s in self._unused_since_s.items() if now_s - since_s < LINGER_S}

    def keys_of(self, channels: Iterable[str]) -> list[str]:
        """The followed keys whose channel is one of `channels`."""
        among = frozenset(channels)
        with self._lock:
            return [key for key in self._keys if channel_of(key) in among]

    def _unfollow(self, keys: Iterable[str], channels: Iterable[str]) -> None:
        with self._lock:
            for counter, names in ((self._keys, keys), (self._channels, channels)):
                counter.subtract(names)
                for name in names:
                    if not counter[name]:
                        del counter[name]


PENDING_KEYS_MAX = 10_000  # keys that wait to be announced; further keys are dropped, which the interface allows
ANNOUNCE_INTERVAL_S = 0.005  # least time between two announcements, so that a burst of commits becomes one statement
RECONNECT_S = 0.5  # pause before a broken push connection is reopened

_log = logging.getLogger(__name__)

Connect = Callable[[], "psycopg.Connection[Any]"]


def _use_until_stopped(
    connect: Connect, use: Callable[[psycopg.Connection[Any]], None], stop: threading.Event, doing: str
) -> None:
    """Call `use` with a connection, and again with a new one if that fails, until `stop` is set."""
    while not stop.is_set():
        try:
            with connect() as connection:
                use(connection)
        except psycopg.Error as error:
            _log.info("%s moved keys failed, retrying: %s", doing, error)
            stop.wait(RECONNECT_S)


class Announcer:
    """Notifies the listeners of the database of moved keys."""

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
        _use_until_stopped(self._connect, self._send, self._stop, "announcing")

    def _send(self, connection: psycopg.Connection[Any]) -> None:
        connection.execute("SET synchronous_commit = off")
        while True:
            with self._changed:
                while not self._pending and not self._stop.is_set():
                    self._changed.wait()
                if self._stop.is_set():
                    return
                keys, self._pending = list(self._pending), {}
            connection.execute(
                "SELECT pg_notify(channel, key) FROM unnest(%s::text[], %s::text[]) AS moved(channel, key)",
                ([channel_of(key) for key in keys], keys),
            )
            self._stop.wait(ANNOUNCE_INTERVAL_S)


class Listener:
    """Calls `publish` with the announced keys on the channels of `followed`, until it is closed.

    When it begins to listen to a channel it publishes the followed keys of the channel: they may have moved before.
    """

    def __init__(self, connect: Connect, publish: Callable[[Iterable[str]], None], followed: FollowedKeys) -> None:
        self._connect = connect
        self._publish = publish
        self._followed = followed
        self._stop = threading.Event()
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_writer.setblocking(False)
        self._wake_reader.setblocking(False)
        followed.changed = self._wake
        self._thread = threading.Thread(target=self._run, name="consensus-postgres-listen", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join()
            self._followed.changed = lambda: None
            self._wake_writer.close()
            self._wake_reader.close()

    def _wake(self) -> None:
        with suppress(OSError):  # the buffer is full, so it will wake, or it is closed
            self._wake_writer.send(b"x")

    def _run(self) -> None:
        _use_until_stopped(self._connect, self._listen, self._stop, "listening for")

    def _listen(self, connection: psycopg.Connection[Any]) -> None:
        listening: frozenset[str] = frozenset()
        with selectors.DefaultSelector() as selector:
            selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.register(self._wake_reader, selectors.EVENT_READ)
            while not self._stop.is_set():
                listening = self._change_channels(connection, listening)
                for notice in connection.notifies(timeout=0):
                    self._publish((notice.payload,))
                selector.select(LINGER_S)
                with suppress(BlockingIOError):
                    self._wake_reader.recv(4096)

    def _change_channels(self, connection: psycopg.Connection[Any], listening: frozenset[str]) -> frozenset[str]:
        """Listen to exactly the channels that are wanted now, and return them."""
        wanted = self._followed.wanted(listening, time.monotonic())
        changes = [f"LISTEN {name}" for name in sorted(wanted - listening)]
        changes += [f"UNLISTEN {name}" for name in sorted(listening - wanted)]
        if changes:
            connection.execute("; ".join(changes))
            self._publish(self._followed.keys_of(wanted - listening))
        return wanted


CONNECT_TIMEOUT_S = 5  # to open a connection, before the call is Unavailable. The minimum of libpq is 2.

STATEMENT_TIMEOUT_S = 10.0
"""How long the server works on a statement before it rolls back, which is definite. After 1.5 times as long the client
breaks the connection, which is not."""

READ_ATTEMPTS_MAX = 2  # reads on a dead connection (the server was restarted) are retried once on a new one
# Held until the transaction ends: without it two that begin one log at different seqnos would both be first.
LOCK_KEY = "SELECT pg_advisory_xact_lock(hashtext(%(key)s))"

DURABLE = (
    "SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit')"
    " WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, false)"
)
"""Run on each connection: acknowledged commits are on disk, also on a synchronous standby, regardless of the settings
of the server, the database, the user or the URL."""


# Messages when a connection is refused permanently. libpq has no SQLSTATE for these. Other failures (starting up, too
# many connections, no response) may be temporary.
_REFUSED = (
    (r"authentication failed|no password supplied", "the password or user"),
    (r"no pg_hba\.conf entry", "the server's access rules (pg_hba.conf) or sslmode"),
    (r"does not support SSL|SSL error|certificate|sslmode", "sslmode and the certificates"),
    (r'role ".*" does not exist|is not permitted to log in', "the user"),
    (r'database ".*" does not exist|permission denied for database', "the database name"),
    (r"Name or service not known|could not translate host name|failed to resolve host", "the host name"),
    (r"invalid connection option|invalid URI query parameter|unrecognized configuration parameter", "the options"),
)

# After these the server has rolled the statement back: 40xxx rolled back, 53xxx out of a resource, 55P03 lock timeout,
# 57014 cancelled, 25006 read-only, 42xxx syntax error or access violation, 54xxx too large.
_DEFINITE_STATES = ("40", "53", "55P03", "57014", "25", "42", "54", "22", "23")
_NOT_WRITABLE_STATES = ("53100", "25006")  # the disk is full; read-only
_DAMAGED_STATES = ("XX001", "XX002")  # data_corrupted, index_corrupted
_MISCONFIGURED_STATES = ("42501", "3F000", "3D000", "28", "25006")


class PostgresConsensus(SqlConsensus):
    """One database. The query of `url` is passed to libpq (`sslmode`, `options`, …)."""

    _server_options = ""  # further options of every connection

    def __init__(
        self,
        url: sa.URL,
        *,
        connect_timeout_s: int = CONNECT_TIMEOUT_S,
        statement_timeout_s: float = STATEMENT_TIMEOUT_S,
    ) -> None:
        self._location = url.set(drivername="postgresql+psycopg", query={})
        options = f"-c statement_timeout={int(statement_timeout_s * 1000)}{self._server_options}"
        url_options = url.query.get("options")
        self._connect_args: dict[str, Any] = {
            "application_name": "persist",
            "connect_timeout": connect_timeout_s,
            "keepalives_idle": 30,
            "tcp_user_timeout": int(statement_timeout_s * 1500),
            **url.query,
            "options": f"{options} {url_options}" if isinstance(url_options, str) else options,
        }
        engine = sa.create_engine(
            self._location,
            connect_args=self._connect_args,
            isolation_level="AUTOCOMMIT",
            pool_size=POOL_SIZE,
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT_S,
            pool_reset_on_return=None,
            pool_use_lifo=True,
        )
        sa.event.listen(engine, "connect", self._on_connect)
        sa.event.listen(engine, "checkout", self._on_checkout)
        self._pool_is_suspect = False
        self._watchdog = Watchdog(statement_timeout_s * 1.5)
        self._announcer = Announcer(self._connect)
        self._followed = FollowedKeys()
        super().__init__(engine, Notifier("consensus-postgres", self._listen))

    @classmethod
    def from_url(cls, url: sa.URL) -> PostgresConsensus:
        if not url.host and "host" not in url.query:
            raise ConsensusMisconfigured(
                "postgresql: needs a host, as in postgresql://user:password@host:5432/database"
            )
        if not url.database:
            raise ConsensusMisconfigured("postgresql: needs a database, as in postgresql://user:password@host/database")
        return cls(url)

    @property
    def url(self) -> str:
        user = f"{self._location.username}@" if self._location.username else ""
        port = f":{self._location.port}" if self._location.port else ""
        return f"postgresql://{user}{self._location.host or ''}{port}/{self._location.database}"

    def scrub(self) -> str:
        return (
            f"PostgreSQL keeps deleted rows until it rewrites the table: run VACUUM FULL {TABLE.name}, and wait until "
            "its write-ahead log and log archive are recycled"
        )

    def close(self) -> None:
        super().close()
        self._announcer.close()
        self._watchdog.close()

    def follow(self, key: str) -> Callable[[], None]:
        return self._followed.follow(key)

    def _read(self, compiled: Compiled, values: Mapping[str, Any]) -> list[Any]:
        for attempt in range(1, READ_ATTEMPTS_MAX + 1):
            try:
                return super()._read(compiled, values)
            except ConsensusUnavailable as error:
                if attempt == READ_ATTEMPTS_MAX or not _is_disconnect(error.__cause__):
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _create(self, values: Mapping[str, Any]) -> bool:
        """Insert the first entry. There is no previous entry to lock, so an advisory lock serializes first entries."""
        with self._connection("write") as connection, connection.transaction():
            connection.execute(LOCK_KEY, values)
            return bool(connection.execute(*bind(self._statements.create, values)).rowcount == 1)

    def _begin_call(self, connection: Any) -> int:
        return self._watchdog.watch(connection.pgconn.socket)

    def _end_call(self, token: int) -> None:
        self._watchdog.release(token)

    def _on_connect(self, connection: Any, _record: Any) -> None:
        try:
            connection.execute(DURABLE)
        except BaseException:
            connection.close()
            raise

    def _on_checkout(self, _connection: Any, _record: Any, _proxy: Any) -> None:
        """Replace every pooled connection after a dead one: a restart of the server ends them all."""
        if self._pool_is_suspect:
            self._pool_is_suspect = False
            raise sa.exc.InvalidatePoolError("a connection of this pool was dead")

    def _translate(self, error: Exception, kind: Kind) -> Exception:
        if not isinstance(error, psycopg.Error):
            return error
        if _is_disconnect(error):
            self._pool_is_suspect = True
        state = error.sqlstate or ""
        reason = str(error).strip().partition("\n")[0]
        if state in _DAMAGED_STATES:
            return ConsensusDamaged(f"the database of {self.url} is damaged; restore a backup: {reason}")
        if kind == "setup" and (state.startswith(_MISCONFIGURED_STATES) or _refused_setting(reason)):
            setting = _refused_setting(reason) or "the user's rights or the server's read-only state"
            return ConsensusMisconfigured(f"{self.url} refuses to work; check {setting}: {reason}")
        if kind == "write" and not state.startswith(_DEFINITE_STATES):
            return ConsensusIndeterminate(f"{self.url} failed while writing: {reason}")
        if kind == "write" and state in _NOT_WRITABLE_STATES:
            return ConsensusNotWritable(f"{self.url} cannot be written: {reason}")
        return ConsensusUnavailable(f"{self.url} failed a {kind}: {reason}")

    def _create_table(self, connection: Any) -> None:
        if connection.execute("SELECT to_regclass(%s)", (TABLE.name,)).fetchone()[0] is not None:
            return
        try:
            connection.execute(str(sa.schema.CreateTable(TABLE).compile(dialect=self._engine.dialect)))
        except (psycopg.errors.DuplicateTable, psycopg.errors.DuplicateObject, psycopg.errors.UniqueViolation):
            # Another process created it concurrently.
            return

    def _probe(self) -> None:
        query = (
            "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::bool,"
            " current_setting('fsync'),"
            " has_table_privilege(%s, 'SELECT') AND has_table_privilege(%s, 'INSERT')"
            " AND has_table_privilege(%s, 'UPDATE') AND has_table_privilege(%s, 'DELETE')"
        )
        with self._connection("setup") as connection:
            read_only, fsync, allowed = connection.execute(query, (TABLE.name,) * 4).fetchone()
        if read_only:
            raise ConsensusMisconfigured(
                f"{self.url} is a read-only replica or is set read-only; name the primary's host"
            )
        if not allowed:
            raise ConsensusMisconfigured(
                f"the user of {self.url} needs SELECT, INSERT, UPDATE and DELETE on the table {TABLE.name}"
            )
        if fsync == "off":
            _log.warning("%s has fsync = off: a crash of its machine may lose acknowledged commits", self.url)

    def _publish(self, key: str) -> None:
        super()._publish(key)
        self._announcer.announce(key)

    def _connect(self) -> psycopg.Connection[Any]:
        """A connection outside the pool, for the push channel."""
        arguments = self._engine.dialect.create_connect_args(self._location)[1]
        arguments.update(self._connect_args)
        return psycopg.connect(**arguments, autocommit=True)

    def _listen(self) -> Callable[[], None]:
        return Listener(self._connect, self._notifier.publish, self._followed).close


class ReadingPostgres(PostgresConsensus):
    """Reads only: every transaction is read-only, and the right to SELECT suffices. It creates no table."""

    _server_options = " -c default_transaction_read_only=on"

    def _create_table(self, connection: Any) -> None:
        if connection.execute("SELECT to_regclass(%s)", (TABLE.name,)).fetchone()[0] is None:
            raise ConsensusMisconfigured(f"{self.url} has no table {TABLE.name}: it is not a location of persist")


def _is_disconnect(error: BaseException | None) -> bool:
    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return False
    state = error.sqlstate or ""
    return not state or state.startswith(("08", "57P"))


def _refused_setting(reason: str) -> str | None:
    return next((setting for pattern, setting in _REFUSED if re.search(pattern, reason)), None)
