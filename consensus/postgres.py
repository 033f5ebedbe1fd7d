"""Logs in PostgreSQL: one statement per compare-and-set, READ COMMITTED, the primary key arbitrates."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

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
from consensus.postgres_channels import Followed, application_name, older_names
from consensus.postgres_push import Announcer, Listener
from consensus.sql import POOL_SIZE, POOL_TIMEOUT_S, TABLE, Compiled, Kind, SqlConsensus, bind
from consensus.watchdog import Watchdog

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

_log = logging.getLogger(__name__)

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
        self._followed = Followed()
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
