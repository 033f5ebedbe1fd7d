"""Logs in PostgreSQL: one statement per compare-and-set, and NOTIFY and LISTEN as the push channel."""

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

from consensus.errors import (
    ConsensusDamaged,
    ConsensusIndeterminate,
    ConsensusMisconfigured,
    ConsensusNotWritable,
    ConsensusUnavailable,
)
from consensus.interface import Wanted
from consensus.notify import Notifier
from consensus.sql import POOL_SIZE, POOL_TIMEOUT_S, TABLE, Compiled, Kind, SqlConsensus, bind
from consensus.turns import Watchdog

# On which of PostgreSQL's channels a key is told, and to which of them a process listens.
#
# PostgreSQL wakes a listener for each message on its channels. With one channel for all keys every process hears of
# every commit of all others. So a key has one of `CHANNELS` channels, and a process listens to those of the keys that
# somebody follows there. Older builds know the one channel `OLD_CHANNEL` only.


CHANNELS = 256
"""Who follows ten keys hears of one in 26 of all others. PostgreSQL looks through a list of those it listens to."""

OLD_CHANNEL = "consensus_moved"
"""On which older builds tell every key, and the only one that they listen to."""

LINGER_S = 60.0
"""How long a process goes on listening to a channel that nobody follows any more: waits come and go."""

OLD_LOOK_S = 10.0
"""How often who announces looks whether older builds are there."""

_MARK = " (channels)"
_NAME_MAX = 63  # bytes of an application_name that PostgreSQL keeps
_DEFAULT_NAME = "persist"

OLDER = (
    "SELECT EXISTS (SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND application_name = ANY(%s))"
)


def channel_of(key: str) -> str:
    """The channel on which a key is told. Every build must find the same."""
    return f"{OLD_CHANNEL}_{crc32(key.encode()) % CHANNELS:03d}"


ALL_CHANNELS = frozenset(f"{OLD_CHANNEL}_{number:03d}" for number in range(CHANNELS))


def application_name(given: str | None) -> str:
    """The name under which this build connects: with a mark, by which it is told from older ones."""
    return (given or _DEFAULT_NAME)[: _NAME_MAX - len(_MARK)] + _MARK


def older_names(given: str | None) -> list[str]:
    """The names under which older builds connect: by default, and with the same options."""
    return sorted({_DEFAULT_NAME, (given or _DEFAULT_NAME)[:_NAME_MAX]})


class FollowedKeys:
    """The keys that somebody in this process follows, and so the channels to listen to. Thread-safe.

    `changed` is called, without the lock, when a channel is wanted that was not.
    """

    def __init__(self) -> None:
        self.changed: Callable[[], None] = lambda: None
        self._lock = threading.Lock()
        self._keys: Counter[str] = Counter()
        self._channels: Counter[str] = Counter()
        self._all = 0
        self._left_s: dict[str, float] = {}  # channels that nobody follows any more, and when that was noticed

    def follow(self, key: str) -> Callable[[], None]:
        """Follow one key until the function that is returned is called, which may be called twice."""
        channel = channel_of(key)
        with self._lock:
            self._keys[key] += 1
            self._channels[channel] += 1
            is_new = self._channels[channel] == 1
        if is_new:
            self.changed()
        return _Once(lambda: self._leave(key, channel))

    def follow_all(self) -> Callable[[], None]:
        """Follow every key, as `follow` does one."""
        with self._lock:
            self._all += 1
        self.changed()
        return _Once(self._leave_all)

    def wanted(self, listening: Iterable[str], now_s: float) -> frozenset[str]:
        """The channels to listen to, of one who listens to these: those that are followed, or were a moment ago."""
        with self._lock:
            used = ALL_CHANNELS if self._all else frozenset(self._channels)
            unused = [channel for channel in listening if channel not in used and channel in ALL_CHANNELS]
            self._left_s = {channel: self._left_s.get(channel, now_s) for channel in unused}
            return used | {channel for channel, left_s in self._left_s.items() if now_s - left_s < LINGER_S}

    def keys_of(self, channels: Iterable[str]) -> list[str]:
        """The keys that are followed, of those that are told on these channels."""
        among = frozenset(channels)
        with self._lock:
            return [key for key in self._keys if channel_of(key) in among]

    def _leave(self, key: str, channel: str) -> None:
        with self._lock:
            for counter, name in ((self._keys, key), (self._channels, channel)):
                counter[name] -= 1
                if not counter[name]:
                    del counter[name]

    def _leave_all(self) -> None:
        with self._lock:
            self._all -= 1


class _Once:
    """Calls a function the first time only."""

    def __init__(self, ending: Callable[[], None]) -> None:
        self._ending: Callable[[], None] | None = ending
        self._lock = threading.Lock()

    def __call__(self) -> None:
        with self._lock:
            ending, self._ending = self._ending, None
        if ending is not None:
            ending()


# PostgreSQL's NOTIFY and LISTEN as the push channel, each on a connection and a thread of its own.
#
# Which key is told on which channel is in `postgres_channels`.
#
# NOTIFY inside the compare-and-set would take a lock over the whole database until its commit is on disk, and so end
# group commit between shards. Told separately, in batches, without waiting for the disk, it costs the writer nothing;
# what a crash loses is only a hint.


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

    def __init__(self, connect: Connect, publish: Callable[[Iterable[str]], None], followed: FollowedKeys) -> None:
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


# Logs in PostgreSQL: one statement per compare-and-set, READ COMMITTED, the primary key arbitrates.


CONNECT_TIMEOUT_S = 5
"""How long opening a connection may take before the call is Unavailable. libpq's least is 2."""

STATEMENT_TIMEOUT_S = 10.0
"""How long the server works on a statement; then it is undone, which is definite. Half as much again later the
client breaks the connection, which is not."""

READ_ATTEMPTS_MAX = 2
"""Reads on a connection that turns out dead (the server was restarted) are tried once more on a fresh one."""

TURN = "SELECT pg_advisory_xact_lock(hashtext(%(key)s))"
"""Held until the transaction ends: without it two that begin one log at different seqnos would both be first."""

DURABLE = (
    "SELECT set_config('synchronous_commit', CASE current_setting('synchronous_commit')"
    " WHEN 'remote_apply' THEN 'remote_apply' ELSE 'on' END, false)"
)
"""Of each connection: what is acknowledged is on the disk, and on that of a synchronous standby, whatever the server,
the database, the user or the options of the URL are set to, now or later."""


# What is said when a connection is refused for good. libpq gives no SQLSTATE for these, only the words; all
# else (starting up, too many connections, no answer) may be over in a moment.
_REFUSED = (
    (r"authentication failed|no password supplied", "the password or user"),
    (r"no pg_hba\.conf entry", "the server's access rules (pg_hba.conf) or sslmode"),
    (r"does not support SSL|SSL error|certificate|sslmode", "sslmode and the certificates"),
    (r'role ".*" does not exist|is not permitted to log in', "the user"),
    (r'database ".*" does not exist|permission denied for database', "the database name"),
    (r"Name or service not known|could not translate host name|failed to resolve host", "the host name"),
    (r"invalid connection option|invalid URI query parameter|unrecognized configuration parameter", "the options"),
)

# After these the server has undone the statement: 40xxx rolled back, 53xxx out of something, 55P03 lock
# timeout, 57014 cancelled, 25006 read-only, 42xxx not understood or not allowed, 54xxx too large.
_DEFINITE_STATES = ("40", "53", "55P03", "57014", "25", "42", "54", "22", "23")
_NOT_WRITABLE_STATES = ("53100", "25006")  # the disk is full; read-only
_DAMAGED_STATES = ("XX001", "XX002")  # data_corrupted, index_corrupted
_MISCONFIGURED_STATES = ("42501", "3F000", "3D000", "28", "25006")


class PostgresConsensus(SqlConsensus):
    """One database. `url` is what SQLAlchemy parsed; its query goes to libpq (`sslmode`, `options`, …)."""

    _more_options = ""  # of every connection

    def __init__(
        self,
        url: sa.URL,
        *,
        pool_size: int = POOL_SIZE,
        connect_timeout_s: int = CONNECT_TIMEOUT_S,
        statement_timeout_s: float = STATEMENT_TIMEOUT_S,
    ) -> None:
        self._location = url.set(drivername="postgresql+psycopg")
        options = f"-c statement_timeout={int(statement_timeout_s * 1000)}{self._more_options}"
        asked = url.query.get("options")
        self._connect_args: dict[str, Any] = {
            "connect_timeout": connect_timeout_s,
            "options": f"{options} {asked}" if isinstance(asked, str) else options,
            "keepalives_idle": 30,
            "tcp_user_timeout": int(statement_timeout_s * 1500),
        }
        self._connect_args.update({k: v for k, v in url.query.items() if k != "options"})
        named = self._connect_args.get("application_name")
        self._connect_args["application_name"] = application_name(named)
        self._location = self._location.set(query={})
        engine = sa.create_engine(
            self._location,
            connect_args=self._connect_args,
            isolation_level="AUTOCOMMIT",
            pool_size=pool_size,
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT_S,
            pool_reset_on_return=None,
            pool_use_lifo=True,
        )
        sa.event.listen(engine, "connect", self._connected)
        sa.event.listen(engine, "checkout", self._checked_out)
        self._suspect = False
        self._watchdog = Watchdog(statement_timeout_s * 1.5)
        self._announcer = Announcer(self._connect, older_names(named))
        self._followed = FollowedKeys()
        self._listener: Listener | None = None
        self._listener_lock = threading.Lock()
        super().__init__(
            engine, Notifier("consensus-postgres", started=self._start_listening, stopped=self._stop_listening)
        )

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
            f"PostgreSQL keeps deleted rows until it rewrites the table: run VACUUM FULL {TABLE.name}, and let its "
            "write-ahead log and its archive of that go on"
        )

    def close(self) -> None:
        super().close()
        self._announcer.close()
        self._stop_listening()
        self._watchdog.close()

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        self._set_up()
        leave = self._followed.follow_all() if wanted is None else None
        unsubscribe = self._notifier.subscribe(callback, wanted)

        def stop() -> None:
            unsubscribe()
            if leave is not None:
                leave()

        return stop

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
        """The first entry. There is no entry before it to lock, so those who begin this log take turns. Look again
        before the commit: an older build takes no turn, and `1, 2` of it may have come and been truncated to 2."""
        create, count = bind(self._statements.create, values), bind(self._statements.count, values)
        won: bool = False
        with self._connection("write") as connection, connection.transaction() as transaction:
            connection.execute(TURN, values)
            won = bool(connection.execute(*create).rowcount == 1)
            if won and connection.execute(*count).fetchone()[0] != 1:
                won = False
                raise psycopg.Rollback(transaction)
        return won

    def _began(self, connection: Any) -> int:
        return self._watchdog.watch(connection.pgconn.socket)

    def _ended(self, token: int) -> None:
        self._watchdog.release(token)

    def _connected(self, connection: Any, _record: Any) -> None:
        try:
            connection.execute(DURABLE)
        except BaseException:
            connection.close()
            raise

    def _checked_out(self, _connection: Any, _record: Any, _proxy: Any) -> None:
        """Replace every pooled connection after one was found dead: a restarted server has ended them all."""
        if self._suspect:
            self._suspect = False
            raise sa.exc.InvalidatePoolError("a connection of this pool was found dead")

    def _translate(self, error: Exception, kind: Kind) -> Exception:
        if not isinstance(error, psycopg.Error):
            return error
        if _is_disconnect(error):
            # The others in the pool are most likely as dead as this one.
            self._suspect = True
        state = error.sqlstate or ""
        said = str(error).strip().partition("\n")[0]
        if state in _DAMAGED_STATES:
            return ConsensusDamaged(f"the database of {self.url} is damaged; restore a backup: {said}")
        if kind == "setup" and (state.startswith(_MISCONFIGURED_STATES) or _refused_setting(said)):
            setting = _refused_setting(said) or "the user's rights or the server's read-only state"
            return ConsensusMisconfigured(f"{self.url} refuses to work; check {setting}: {said}")
        if kind == "write" and not state.startswith(_DEFINITE_STATES):
            return ConsensusIndeterminate(f"{self.url} failed while writing: {said}")
        if kind == "write" and state in _NOT_WRITABLE_STATES:
            return ConsensusNotWritable(f"{self.url} cannot be written: {said}")
        return ConsensusUnavailable(f"{self.url} did not carry out a {kind}: {said}")

    def _create_table(self, connection: Any) -> None:
        if connection.execute("SELECT to_regclass(%s)", (TABLE.name,)).fetchone()[0] is not None:
            return
        try:
            connection.execute(str(sa.schema.CreateTable(TABLE).compile(dialect=self._engine.dialect)))
        except (psycopg.errors.DuplicateTable, psycopg.errors.DuplicateObject, psycopg.errors.UniqueViolation):
            # Another process made it at the same moment.
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

    def _committed(self, key: str) -> None:
        self._notifier.publish((key,))
        self._announcer.announce(key)

    def _connect(self) -> psycopg.Connection[Any]:
        """A connection outside the pool, for the push channel."""
        arguments = self._engine.dialect.create_connect_args(self._location)[1]
        arguments.update(self._connect_args)
        return psycopg.connect(**arguments, autocommit=True)

    def _start_listening(self) -> None:
        with self._listener_lock:
            self._listener = Listener(self._connect, self._notifier.publish, self._followed)

    def _stop_listening(self) -> None:
        with self._listener_lock:
            listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()


class ReadingPostgres(PostgresConsensus):
    """Reads only: every transaction is read-only, and the right to SELECT is enough. It makes no table."""

    _more_options = " -c default_transaction_read_only=on"

    def _create_table(self, connection: Any) -> None:
        if connection.execute("SELECT to_regclass(%s)", (TABLE.name,)).fetchone()[0] is None:
            raise ConsensusMisconfigured(f"{self.url} has no table {TABLE.name}: nothing of persist is there")


def _is_disconnect(error: BaseException | None) -> bool:
    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return False
    state = error.sqlstate or ""
    return not state or state.startswith(("08", "57P"))


def _refused_setting(said: str) -> str | None:
    return next((setting for words, setting in _REFUSED if re.search(words, said)), None)
