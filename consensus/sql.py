"""Logs in one table of SQLite or PostgreSQL, through SQLAlchemy Core.

SQLAlchemy owns the engine, the pool and the dialects. Each statement is built once with Core and compiled
once per dialect; a call then takes a pooled driver connection in autocommit mode and runs the compiled text,
which costs next to nothing over the raw driver (an explicit transaction adds half again).

Live entries of a key are contiguous. So "the head is n - 1" is the same as "n - 1 exists and n does not":
a compare-and-set is one INSERT ... SELECT from entry n - 1, and the primary key (key, seqno) arbitrates.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from blob import ESCAPES, is_ambiguous, without_secrets
from consensus.errors import ConsensusDamaged, ConsensusMisconfigured, ConsensusUnavailable, ConsensusUsage
from consensus.interface import (
    ENDED,
    HIDDEN,
    Consensus,
    Entry,
    Wanted,
    check_key,
    check_limit,
    check_prefix,
    check_process,
    check_seqno,
    check_value,
)
from consensus.notify import Notifier

VALUE_BYTES_MAX = 16 * 2**20
"""Longest value. Both databases take more; beyond this a value belongs in the blob store."""

TRUNCATE_BATCH = 5_000
"""Entries that one DELETE removes, so that a long log does not make one long transaction."""

POOL_SIZE = 16
"""Open connections a store keeps at most; further threads wait for one."""

POOL_TIMEOUT_S = 30.0
"""How long a thread waits for a pooled connection before the call is Unavailable."""

Kind = Literal["read", "write", "setup"]

TABLE = sa.Table(
    "consensus_log",
    sa.MetaData(),
    # Bytes, not the language of the database's owner, decide the order of keys.
    sa.Column("key", sa.Text().with_variant(sa.Text(collation="C"), "postgresql"), nullable=False),
    sa.Column("seqno", sa.BigInteger, nullable=False),
    sa.Column("data", sa.LargeBinary, nullable=False),
    sa.PrimaryKeyConstraint("key", "seqno", name="consensus_log_pkey"),
)


class Statements:
    """Every statement of a store, built with Core and compiled for one dialect."""

    def __init__(self, dialect: sa.Dialect) -> None:
        self._dialect = dialect
        insert = postgresql.insert if dialect.name == "postgresql" else sqlite.insert
        key, seqno, data = TABLE.c.key, TABLE.c.seqno, TABLE.c.data
        new: list[Any] = [sa.bindparam("new_key", type_=sa.Text), sa.bindparam("seqno", type_=sa.BigInteger)]
        new.append(sa.bindparam("data", type_=sa.LargeBinary))
        mine = key == sa.bindparam("key", type_=sa.Text)
        # The lock keeps entry n - 1, and with it n, from being truncated away under this statement:
        # without it a statement as slow as two commits and a truncation could insert n a second time.
        previous = sa.select(*new).where(mine, seqno == sa.bindparam("previous", type_=sa.BigInteger))
        previous = previous.with_for_update(read=True, key_share=True)
        begins = sa.func.substr(data, 1, sa.bindparam("begins", type_=sa.Integer))
        alike = previous.where(begins == sa.bindparam("after", type_=sa.LargeBinary))
        empty = sa.select(*new).where(~sa.exists().where(mine))
        columns = ["key", "seqno", "data"]
        self.append = self._compile(insert(TABLE).from_select(columns, previous).on_conflict_do_nothing())
        self.append_after = self._compile(insert(TABLE).from_select(columns, alike).on_conflict_do_nothing())
        self.create = self._compile(insert(TABLE).from_select(columns, empty).on_conflict_do_nothing())
        self.head = self._compile(sa.select(seqno, data).where(mine).order_by(seqno.desc()).limit(1))
        self.count = self._compile(sa.select(sa.func.count()).select_from(TABLE).where(mine))
        self.head_seqno = self._compile(sa.select(sa.func.max(seqno)).where(mine))
        at_least = seqno >= sa.bindparam("from_seqno", type_=sa.BigInteger)
        limit = sa.bindparam("limit", type_=sa.Integer)
        self.scan = self._compile(sa.select(seqno, data).where(mine, at_least).order_by(seqno).limit(limit))
        older = sa.select(seqno).where(mine, seqno < sa.bindparam("before", type_=sa.BigInteger))
        # Locked in order, so that it never holds n while it waits for n - 1, which `append` locks first.
        older = older.order_by(seqno).limit(limit).with_for_update()
        of_key = key == sa.bindparam("new_key", type_=sa.Text)
        self.truncate = self._compile(sa.delete(TABLE).where(of_key, seqno.in_(older)))
        self.keys = self._compile(_distinct_keys(limit))
        self.keys_not_ended = self._compile(_distinct_keys(limit, with_ended=False))

    def _compile(self, statement: Any) -> tuple[str, tuple[str, ...] | None, Mapping[str, Any]]:
        compiled = statement.compile(dialect=self._dialect)
        order = tuple(compiled.positiontup) if compiled.positional else None
        fixed = {name: value for name, value in compiled.params.items() if value is not None}
        return str(compiled), order, fixed


Compiled = tuple[str, "tuple[str, ...] | None", Mapping[str, Any]]


def _distinct_keys(limit: sa.BindParameter[int], with_ended: bool = True) -> Any:
    """Hop from key to key in the primary key: the cost follows the keys passed, not the entries they have."""
    key = TABLE.c.key
    end = sa.bindparam("end", type_=sa.Text)
    first = sa.select(sa.func.min(key).label("key")).where(
        key > sa.bindparam("after", type_=sa.Text), key >= sa.bindparam("start", type_=sa.Text), key < end
    )
    found = first.cte("found", recursive=True)
    following = sa.select(sa.func.min(key)).where(key > found.c.key, key < end).scalar_subquery()
    found = found.union_all(sa.select(following).where(found.c.key.is_not(None)))
    listed = sa.select(found.c.key).where(found.c.key.is_not(None)).limit(limit)
    if with_ended:
        return listed
    head = sa.select(sa.func.substr(TABLE.c.data, 1, len(ENDED))).where(key == found.c.key)
    head = head.order_by(TABLE.c.seqno.desc()).limit(1)
    return listed.where(head.scalar_subquery() != sa.literal(ENDED, sa.LargeBinary))


def bind(compiled: Compiled, values: Mapping[str, Any]) -> tuple[str, Any]:
    """The text and the parameters as the driver wants them: by position or by name."""
    text, order, fixed = compiled
    if order is None:
        return text, {**fixed, **values}
    return text, tuple(values[name] if name in values else fixed[name] for name in order)


class SqlConsensus(Consensus):
    """What SQLite and PostgreSQL share. A subclass makes the engine and sorts the driver's errors."""

    def __init__(self, engine: sa.Engine, notifier: Notifier) -> None:
        self._engine = engine
        self._pid = os.getpid()
        self._statements = Statements(engine.dialect)
        self._notifier = notifier
        self._setup_lock = threading.Lock()
        self._is_set_up = False

    @property
    def value_bytes_max(self) -> int:
        return VALUE_BYTES_MAX

    def head(self, key: str) -> Entry | None:
        rows = self._read(self._statements.head, {"key": check_key(key)})
        return self._entry(rows[0]) if rows else None

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        check_key(key)
        check_seqno(seqno)
        check_value(key, data, VALUE_BYTES_MAX)
        if seqno == 1:
            return not after and self.begin(key, seqno, data)
        values = {"key": key, "new_key": key, "seqno": seqno, "previous": seqno - 1, "data": data}
        self._set_up()
        if after:
            won = self._write(self._statements.append_after, {**values, "begins": len(after), "after": after}) == 1
        else:
            won = self._write(self._statements.append, values) == 1
        if won:
            self._committed(key)
        return won

    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        check_key(key)
        check_seqno(seqno)
        check_value(key, data, VALUE_BYTES_MAX)
        self._set_up()
        won = self._create({"key": key, "new_key": key, "seqno": seqno, "data": data})
        if won:
            self._committed(key)
        return won

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        check_seqno(from_seqno, 0)
        values = {"key": check_key(key), "from_seqno": from_seqno, "limit": check_limit(limit)}
        return [self._entry(row) for row in self._read(self._statements.scan, values)]

    def truncate(self, key: str, seqno: int) -> int:
        check_key(key)
        check_seqno(seqno)
        # The head never moves back, so looking first is as good as looking inside the transaction.
        head = self._read(self._statements.head_seqno, {"key": key})[0][0] or 0
        if seqno > head:
            raise ConsensusUsage(f"cannot truncate {key} to seqno {seqno}: its head is {head}")
        total = 0
        values = {"key": key, "new_key": key, "before": seqno, "limit": TRUNCATE_BATCH}
        while True:
            deleted = self._write(self._statements.truncate, values)
            total += deleted
            if deleted < TRUNCATE_BATCH:
                return total

    def keys(self, prefix: str = "", after: str = "", limit: int = 1000, with_ended: bool = True) -> list[str]:
        # HIDDEN sorts after everything a listed key may hold, so [prefix, prefix + HIDDEN) is exactly the prefix.
        values = {"start": check_prefix(prefix), "end": prefix + HIDDEN, "after": check_prefix(after)}
        wanted = self._statements.keys if with_ended else self._statements.keys_not_ended
        return [row[0] for row in self._read(wanted, {**values, "limit": check_limit(limit)})]

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        self._set_up()
        return self._notifier.subscribe(callback, wanted)

    def close(self) -> None:
        self._notifier.close()
        self._engine.dispose()

    def check(self) -> None:
        self._set_up()
        self._probe()

    @abstractmethod
    def _translate(self, error: Exception, kind: Kind) -> Exception:
        """The error to raise instead of the driver's `error`."""

    @abstractmethod
    def _create_table(self, connection: Any) -> None:
        """Make the table on a driver connection, unless it exists."""

    @abstractmethod
    def _probe(self) -> None:
        """Refuse, with ConsensusMisconfigured, a database that cannot be written durably."""

    @abstractmethod
    def _committed(self, key: str) -> None:
        """Tell the subscribers that `key` moved."""

    def _entry(self, row: Any) -> Entry:
        # SQLite keeps a type with each value, and damage can change it.
        seqno, data = row
        if type(seqno) is not int or type(data) is not bytes:
            raise ConsensusDamaged(f"{self.url} is damaged: an entry is not a number and bytes; restore a backup")
        return Entry(seqno, data)

    def _create(self, values: Mapping[str, Any]) -> bool:
        return self._write(self._statements.create, values) == 1

    def _set_up(self) -> None:
        if self._is_set_up:
            return
        with self._setup_lock:
            if not self._is_set_up:
                with self._connection("setup") as connection:
                    self._create_table(connection)
                self._is_set_up = True

    def _read(self, compiled: Compiled, values: Mapping[str, Any]) -> list[Any]:
        self._set_up()
        text, parameters = bind(compiled, values)
        with self._connection("read") as connection:
            rows: list[Any] = connection.execute(text, parameters).fetchall()
            return rows

    def _write(self, compiled: Compiled, values: Mapping[str, Any]) -> int:
        text, parameters = bind(compiled, values)
        with self._connection("write") as connection:
            count: int = connection.execute(text, parameters).rowcount
            return count

    def _connection(self, kind: Kind) -> _Lease:
        """A pooled driver connection in autocommit mode. It is dropped, not reused, after any failure."""
        check_process(self._pid, self.url)
        return _Lease(self, kind)

    def _pooled_connection(self) -> Any:
        """A connection from the pool."""
        try:
            return self._engine.raw_connection()
        except Exception as error:
            raise self._translate_connect(error) from error

    def _began(self, connection: Any) -> int:
        """A call on `connection` begins; what this returns is handed to `_ended`."""
        return 0

    def _ended(self, token: int) -> None:
        """The call that began as `token` is over."""

    def _translate_connect(self, error: Exception) -> Exception:
        if isinstance(error, sa.exc.TimeoutError):
            return ConsensusUnavailable(
                f"no free connection to {self.url} within {POOL_TIMEOUT_S:.0f} s; fewer threads or a larger pool"
            )
        if isinstance(error, sa.exc.InvalidRequestError):  # the pool gives up: what it opened anew died at once, again
            return ConsensusUnavailable(f"connections to {self.url} break as soon as they are opened")
        original = getattr(error, "orig", None)
        return self._translate(original if isinstance(original, Exception) else error, "setup")


class _Lease:
    """A connection for the length of a `with`; a plain class, because it is on the path of every call."""

    __slots__ = ("_kind", "_pooled", "_store", "_token")

    def __init__(self, store: SqlConsensus, kind: Kind) -> None:
        self._store = store
        self._kind: Kind = kind

    def __enter__(self) -> Any:
        self._pooled = self._store._pooled_connection()
        connection = self._pooled.driver_connection
        try:
            self._token = self._store._began(connection)
        except Exception as error:
            # The connection is dead already; nothing was sent on it.
            self._pooled.invalidate()
            raise self._store._translate(error, "read") from error
        return connection

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        self._store._ended(self._token)
        if error is None:
            self._pooled.close()
            return
        self._pooled.invalidate()
        if isinstance(error, Exception):
            raise self._store._translate(error, self._kind) from error


def parsed_url(url: str) -> sa.URL:
    """The parts of a `sqlite:` or `postgresql:` URL. ConsensusMisconfigured if it cannot be understood."""
    if not url.lower().startswith("sqlite:") and (is_ambiguous(url) or "#" in url):
        raise ConsensusMisconfigured(f"consensus location {without_secrets(url)!r}: {ESCAPES}")
    try:
        return sa.make_url(url.replace("postgres://", "postgresql://", 1))
    except (SQLAlchemyError, ValueError):  # which may quote a part of a password
        raise ConsensusMisconfigured("the consensus URL cannot be understood; see docs/operations.md#stores") from None
