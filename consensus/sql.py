"""Logs in one table of SQLite or PostgreSQL, through SQLAlchemy Core.

SQLAlchemy owns the engine, the pool and the dialects. Each statement is built once with Core and compiled
once per dialect; a call then takes a pooled driver connection in autocommit mode and runs the compiled text,
which costs almost nothing over the raw driver (an explicit transaction takes 50 % longer).

Live entries of a key are contiguous. So "the head is n - 1" is the same as "n - 1 exists and n does not":
a compare-and-set is one INSERT ... SELECT from entry n - 1, and the primary key (key, seqno) arbitrates.
"""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import SQLAlchemyError

from blob import ESCAPES, is_ambiguous, without_secrets
from blob.interface import check_process
from consensus.interface import (
    ENDED,
    HIDDEN,
    Consensus,
    ConsensusDamaged,
    ConsensusMisconfigured,
    ConsensusUnavailable,
    ConsensusUsage,
    Entry,
    Wanted,
    check_append,
    check_key,
    check_listing,
    check_scan,
    check_seqno,
)
from consensus.notify import Notifier

VALUE_BYTES_MAX = 16 * 2**20  # Longest value. Both databases allow more, but a longer value belongs in the blob store.
TRUNCATE_BATCH = 5_000  # entries that one DELETE removes, to avoid a long transaction for a long log
POOL_SIZE = 16  # open connections per store; further threads wait for one
POOL_TIMEOUT_S = 30.0  # how long a thread waits for a pooled connection before the call is Unavailable

Kind = Literal["read", "write", "setup"]

TABLE = sa.Table(
    "consensus_log",
    sa.MetaData(),
    # Keys are ordered by bytes, not by the locale of the database.
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
        # The lock keeps entry n - 1, and so n, from being truncated during this statement: without it a statement
        # that takes as long as two commits and a truncation could insert n a second time.
        previous = sa.select(*new).where(mine, seqno == sa.bindparam("previous", type_=sa.BigInteger))
        previous = previous.with_for_update(read=True, key_share=True)
        beginning = sa.func.substr(data, 1, sa.bindparam("after_length", type_=sa.Integer))
        same_beginning = previous.where(beginning == sa.bindparam("after", type_=sa.LargeBinary))
        no_log = sa.select(*new).where(~sa.exists().where(mine))
        columns = ["key", "seqno", "data"]
        self.append = self._compile(insert(TABLE).from_select(columns, previous).on_conflict_do_nothing())
        self.append_after = self._compile(insert(TABLE).from_select(columns, same_beginning).on_conflict_do_nothing())
        self.create = self._compile(insert(TABLE).from_select(columns, no_log).on_conflict_do_nothing())
        self.head = self._compile(sa.select(seqno, data).where(mine).order_by(seqno.desc()).limit(1))
        self.head_seqno = self._compile(sa.select(sa.func.max(seqno)).where(mine))
        at_least = seqno >= sa.bindparam("from_seqno", type_=sa.BigInteger)
        limit = sa.bindparam("limit", type_=sa.Integer)
        self.scan = self._compile(sa.select(seqno, data).where(mine, at_least).order_by(seqno).limit(limit))
        older = sa.select(seqno).where(mine, seqno < sa.bindparam("before", type_=sa.BigInteger))
        # Locked in order: never holds n while it waits for n - 1, which `append` locks first.
        older = older.order_by(seqno).limit(limit).with_for_update()
        of_key = key == sa.bindparam("new_key", type_=sa.Text)
        self.truncate = self._compile(sa.delete(TABLE).where(of_key, seqno.in_(older)))
        self.keys = self._compile(_select_keys(limit))
        self.keys_not_ended = self._compile(_select_keys(limit, with_ended=False))

    def _compile(self, statement: Any) -> Compiled:
        compiled = statement.compile(dialect=self._dialect)
        return str(compiled), {name: value for name, value in compiled.params.items() if value is not None}


Compiled = tuple[str, Mapping[str, Any]]  # the text, and the parameters with fixed values


def _select_keys(limit: sa.BindParameter[int], with_ended: bool = True) -> Any:
    """Skip from key to key in the primary key: the cost depends on the number of keys, not of entries."""
    key = TABLE.c.key
    end = sa.bindparam("end", type_=sa.Text)
    first = sa.select(sa.func.min(key).label("key")).where(
        key > sa.bindparam("after", type_=sa.Text), key >= sa.bindparam("start", type_=sa.Text), key < end
    )
    keys = first.cte("keys", recursive=True)
    following = sa.select(sa.func.min(key)).where(key > keys.c.key, key < end).scalar_subquery()
    keys = keys.union_all(sa.select(following).where(keys.c.key.is_not(None)))
    listed = sa.select(keys.c.key).where(keys.c.key.is_not(None)).limit(limit)
    if with_ended:
        return listed
    head = sa.select(sa.func.substr(TABLE.c.data, 1, len(ENDED))).where(key == keys.c.key)
    head = head.order_by(TABLE.c.seqno.desc()).limit(1)
    return listed.where(head.scalar_subquery() != sa.literal(ENDED, sa.LargeBinary))


def bind(compiled: Compiled, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The text and the parameters by name."""
    text, fixed = compiled
    return text, {**fixed, **values}


class SqlConsensus(Consensus):
    """The common part of SQLite and PostgreSQL. A subclass creates the engine and translates the driver's errors."""

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
        check_append(key, seqno, data, VALUE_BYTES_MAX)
        if seqno == 1:
            return not after and self.begin(key, seqno, data)
        values: dict[str, Any] = {"key": key, "new_key": key, "seqno": seqno, "previous": seqno - 1, "data": data}
        self._set_up()
        if after:
            values |= {"after_length": len(after), "after": after}
        statement = self._statements.append_after if after else self._statements.append
        won = self._write(statement, values) == 1
        if won:
            self._publish(key)
        return won

    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        check_append(key, seqno, data, VALUE_BYTES_MAX)
        self._set_up()
        won = self._create({"key": key, "new_key": key, "seqno": seqno, "data": data})
        if won:
            self._publish(key)
        return won

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        check_scan(key, from_seqno, limit)
        values = {"key": key, "from_seqno": from_seqno, "limit": limit}
        return [self._entry(row) for row in self._read(self._statements.scan, values)]

    def truncate(self, key: str, seqno: int) -> int:
        check_key(key)
        check_seqno(seqno)
        # The head never moves back, so reading it first is as good as reading it in the transaction.
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
        check_listing(prefix, after, limit)
        values = {"start": prefix, "end": prefix + HIDDEN, "after": after, "limit": limit}
        statement = self._statements.keys if with_ended else self._statements.keys_not_ended
        return [row[0] for row in self._read(statement, values)]

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        self._set_up()
        unfollow = self.follow("") if wanted is None else None  # every key
        unsubscribe = self._notifier.subscribe(callback, wanted)

        def stop() -> None:
            unsubscribe()
            if unfollow is not None:
                unfollow()

        return stop

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
        """Create the table on a driver connection, unless it exists."""

    @abstractmethod
    def _probe(self) -> None:
        """Raise ConsensusMisconfigured if the database cannot be written durably."""

    def _publish(self, key: str) -> None:
        self._notifier.publish((key,))

    def _entry(self, row: Any) -> Entry:
        # SQLite stores a type with each value, and damage can change it.
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

    @contextmanager
    def _connection(self, kind: Kind) -> Iterator[Any]:
        """A pooled driver connection in autocommit mode. After a failure it is dropped instead of reused."""
        check_process(self._pid, self.url, ConsensusUsage)
        pooled = self._pooled_connection()
        connection = pooled.driver_connection
        try:
            token = self._begin_call(connection)
        except Exception as error:  # the connection is already dead; nothing was sent
            pooled.invalidate()
            raise self._translate(error, "read") from error
        try:
            yield connection
        except BaseException as error:
            self._end_call(token)
            pooled.invalidate()
            if isinstance(error, Exception):
                raise self._translate(error, kind) from error
            raise
        self._end_call(token)
        pooled.close()

    def _pooled_connection(self) -> Any:
        try:
            return self._engine.raw_connection()
        except Exception as error:
            raise self._translate_connect(error) from error

    def _begin_call(self, connection: Any) -> int:
        """Called before each call on `connection`; the result is passed to `_end_call`."""
        return 0

    def _end_call(self, token: int) -> None:
        """Called after each call."""

    def _translate_connect(self, error: Exception) -> Exception:
        if isinstance(error, sa.exc.TimeoutError):
            return ConsensusUnavailable(
                f"no free connection to {self.url} within {POOL_TIMEOUT_S:.0f} s; fewer threads or a larger pool"
            )
        if isinstance(error, sa.exc.InvalidRequestError):  # the pool gives up: new connections died at once, repeatedly
            return ConsensusUnavailable(f"connections to {self.url} break as soon as they are opened")
        original = getattr(error, "orig", None)
        return self._translate(original if isinstance(original, Exception) else error, "setup")


def parsed_url(url: str) -> sa.URL:
    """The parts of a `sqlite:` or `postgresql:` URL. ConsensusMisconfigured if it cannot be understood."""
    if not url.lower().startswith("sqlite:") and (is_ambiguous(url) or "#" in url):
        raise ConsensusMisconfigured(f"consensus location {without_secrets(url)!r}: {ESCAPES}")
    try:
        return sa.make_url(url.replace("postgres://", "postgresql://", 1))
    except (SQLAlchemyError, ValueError):  # whose message may quote a part of a password
        raise ConsensusMisconfigured("the consensus URL cannot be understood; see docs/operations.md#stores") from None
