"""Logs in a SQLite file: WAL, synchronous=FULL, safe between processes of one machine; and read-only access."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from blob.private_files import make_file
from consensus.errors import (
    ConsensusDamaged,
    ConsensusError,
    ConsensusIndeterminate,
    ConsensusMisconfigured,
    ConsensusNotWritable,
    ConsensusUnavailable,
)
from consensus.interface import Consensus, Wanted, check_process
from consensus.notify import Notifier
from consensus.sql import POOL_SIZE, POOL_TIMEOUT_S, TABLE, Compiled, Kind, SqlConsensus, bind
from consensus.turns import FileTurns, Turn

# Logs in a SQLite file: WAL, synchronous=FULL, safe between threads and processes of one machine.


BUSY_TIMEOUT_MS = 30_000
"""How long a statement waits for another process's write lock before it is Unavailable."""

POLL_INTERVAL_S = 0.005
"""How often a subscribed store looks for other processes' commits; one look costs about 10 microseconds."""

IDLE_POLL_INTERVAL_S = 0.1
"""How often it looks while no key is followed: only so that few rows are new once one is."""

WAL_TRIES_MAX = 100
"""How often turning on the write-ahead log is tried, 10 ms apart. A try may wait for a lock: see `_use_wal`."""

ALONE_TIMEOUT_S = 0.1
"""How long one try to have the file alone waits for others, on a full disk."""

VACUUM_BYTES_MAX = 1024**3
"""A larger file is not written anew for a receipt: writers would wait for too long."""

MOVED_ROWS_MAX = 10_000
"""New rows read per look; more are read by the next one."""

EMPTIED = (
    "{0} is empty, and SQLite would delete the write-ahead log beside it, so it is not opened: copy that log away, and "
    "restore a backup"
)

_log = logging.getLogger(__name__)

# Failures after which nothing was written. Everything else during a write may have reached the log.
_DEFINITE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_TOOBIG,
}
# The file is not what we wrote. A damaged first page gives SQLITE_NOTADB; a damaged schema gives SQLITE_ERROR,
# since our statements never change.
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_NO_ROOM = {sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_FULL}
_MISCONFIGURED = {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_AUTH,
    sqlite3.SQLITE_READONLY,
}


class SqliteConsensus(SqlConsensus):
    """One file. Writers of this process queue on a lock, which is far fairer than SQLite's sleeping retries."""

    def __init__(self, path: str, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> None:
        self._path = os.path.abspath(path)
        self._write_lock = threading.Lock()
        self._writer: Any = None  # guarded by the lock
        self._turns = FileTurns(f"{self._path}-turns")
        self._poll_stop = threading.Event()
        self._poller: threading.Thread | None = None
        self._followers = 0
        self._follow_lock = threading.Lock()
        self._followed = threading.Event()  # set while somebody follows a key, and when polling ends
        engine = sa.create_engine(
            "sqlite://",
            creator=lambda: _open(self._path, busy_timeout_ms / 1000),
            poolclass=sa.pool.QueuePool,
            pool_size=POOL_SIZE,
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT_S,
            pool_reset_on_return=None,
            pool_use_lifo=True,
        )
        sa.event.listen(engine, "checkin", _let_go)
        super().__init__(engine, Notifier("consensus-sqlite", started=self._start_polling, stopped=self._stop_polling))

    @classmethod
    def from_url(cls, url: sa.URL) -> SqliteConsensus:
        if not url.database or url.database == ":memory:":
            raise ConsensusMisconfigured("sqlite: needs a file, as in sqlite:////var/lib/persist.db; or use mem:")
        if url.query or url.host:
            raise ConsensusMisconfigured("sqlite: takes a path only, as in sqlite:////var/lib/persist.db")
        return cls(url.database)

    @property
    def url(self) -> str:
        return f"sqlite:///{self._path}"

    def _translate(self, error: Exception, kind: Kind) -> Exception:
        if isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError)):  # the store was closed meanwhile
            return ConsensusUnavailable(f"{self.url} did not carry out a {kind}: {error}")
        if not isinstance(error, (sqlite3.Error, UnicodeError)):
            return error
        code = (getattr(error, "sqlite_errorcode", None) or sqlite3.SQLITE_ERROR) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return ConsensusNotWritable(f"{self.url} did not carry out a {kind}, the disk is full: {error}")
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN) and _is_read_only(self._path):
            return ConsensusNotWritable(f"{self.url} did not carry out a {kind}, its file system is read-only: {error}")
        if code in _DAMAGED:
            return ConsensusDamaged(f"{self.url} is damaged, or not a database of persist; restore a backup: {error}")
        if kind == "setup" and code == sqlite3.SQLITE_BUSY and not _size(self._path):
            return ConsensusUnavailable(
                f"{self.url} is empty, and another process holds it: it was truncated, perhaps; end that process and "
                "restore a backup"
            )
        if kind == "setup" and code in _MISCONFIGURED:
            return ConsensusMisconfigured(f"the database file of {self.url} cannot be used: {error}")
        if kind == "write" and code not in _DEFINITE:
            return ConsensusIndeterminate(f"{self.url} failed while writing: {error}")
        return ConsensusUnavailable(f"{self.url} did not carry out a {kind}: {error}")

    def _create_table(self, connection: Any) -> None:
        exists = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
        if not connection.execute(exists, (TABLE.name,)).fetchone():
            ddl = sa.schema.CreateTable(TABLE, if_not_exists=True)
            connection.execute(str(ddl.compile(dialect=self._engine.dialect)))

    def _probe(self) -> None:
        with self._connection("setup") as connection:
            mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
            if connection.passing:
                raise ConsensusNotWritable(f"{self.url} cannot be written: its disk is full or read-only")
            if mode != "wal":
                raise ConsensusMisconfigured(f"{self.url} cannot keep a write-ahead log ({mode}); use a local disk")
            # Takes and gives back the write lock: fails at once on a file that may not be written.
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")

    def _write(self, compiled: Any, values: Any) -> int:
        # On a connection that is kept for writing: taking one from the pool each time is a tenth of a commit.
        check_process(self._pid, self.url)
        text, parameters = bind(compiled, values)
        with self._write_lock:
            pooled = self._writer or self._pooled_connection()
            try:
                count: int = pooled.driver_connection.execute(text, parameters).rowcount
            except Exception as error:
                self._writer = None
                pooled.invalidate()
                raise self._translate(error, "write") from error
            if pooled.driver_connection.passing:
                self._writer = None
                pooled.close()
            else:
                self._writer = pooled
            return count

    def turn(self, key: str, wait_s: float) -> AbstractContextManager[Turn]:
        return self._turns.turn(key, wait_s)

    def _committed(self, key: str) -> None:
        self._notifier.publish((key,))

    def scrub(self) -> str:
        """The file is written anew, then the write-ahead log is emptied. Writers wait for it meanwhile.

        Entries were overwritten as they were deleted. But SQLite overwrites no copy of an entry that stays behind in a
        page when it balances its tree: only VACUUM does.
        """
        with self._connection("write") as connection:
            pages, page_bytes = (connection.execute(f"PRAGMA {n}").fetchone()[0] for n in ("page_count", "page_size"))
            if pages * page_bytes > VACUUM_BYTES_MAX:
                return f"{self._path} is too large to be written anew by the way: run VACUUM when nobody writes"
            try:
                connection.execute("VACUUM")
            except sqlite3.OperationalError as error:  # the disk is full, or others hold the file
                return f"{self._path} could not be written anew ({error}): run VACUUM when nobody writes"
            is_busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if not is_busy:
            return ""
        return (
            f"readers kept {self._path}-wal from being emptied: run PRAGMA wal_checkpoint(TRUNCATE) when they are done"
        )

    def close(self) -> None:
        with self._write_lock:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()
        self._turns.close()
        super().close()
        self._stop_polling()

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        leave = self.follow("") if wanted is None else None  # who wants every key follows all
        unsubscribe = super().subscribe(callback, wanted)

        def stop() -> None:
            if unsubscribe is not None:
                unsubscribe()
            if leave is not None:
                leave()

        return stop

    def follow(self, key: str) -> Callable[[], None]:
        """Poll often until the function that is returned is called, which may be called twice."""
        with self._follow_lock:
            self._followers += 1
            self._followed.set()
        left = False

        def leave() -> None:
            nonlocal left
            with self._follow_lock:
                if left:
                    return
                left = True
                self._followers -= 1
                if not self._followers and not self._poll_stop.is_set():
                    self._followed.clear()

        return leave

    def _start_polling(self) -> None:
        with self._follow_lock:
            self._poll_stop = threading.Event()
            if not self._followers:
                self._followed.clear()
        self._poller = threading.Thread(
            target=self._poll, args=(self._poll_stop,), name="consensus-sqlite-poll", daemon=True
        )
        self._poller.start()

    def _stop_polling(self) -> None:
        with self._follow_lock:
            self._poll_stop.set()
            self._followed.set()  # so that an idle poller ends at once
        poller, self._poller = self._poller, None
        if poller is not None and poller is not threading.current_thread():
            poller.join()

    def _poll(self, stop: threading.Event) -> None:
        """Publish keys that other connections and processes moved.

        `PRAGMA data_version` changes when another connection commits. The newest row of the table is some
        key's head, heads are never deleted, so rowids only grow and "rows above the last one" are the new ones.
        """
        while not stop.is_set():
            try:
                with self._connection("read") as connection:
                    if not connection.passing:
                        self._poll_connection(connection, stop)
                stop.wait(1.0)
            except ConsensusError as error:
                _log.warning("watching %s for commits failed, trying again: %s", self.url, error)
                stop.wait(1.0)

    def _poll_connection(self, connection: sqlite3.Connection, stop: threading.Event) -> None:
        version: int | None = None
        last = connection.execute("SELECT coalesce(max(rowid), 0) FROM consensus_log").fetchone()[0]
        while not stop.wait(POLL_INTERVAL_S if self._followers else 0):
            if not self._followers:  # look all the same, so that few rows are new once a key is followed
                self._followed.wait(IDLE_POLL_INTERVAL_S)
            if stop.is_set():
                return
            now = connection.execute("PRAGMA data_version").fetchone()[0]
            if now == version:
                continue
            version = now
            moved = "SELECT rowid, key FROM consensus_log WHERE rowid > ? ORDER BY rowid LIMIT ?"
            rows = connection.execute(moved, (last, MOVED_ROWS_MAX)).fetchall()
            if rows:
                last = rows[-1][0]
                self._notifier.publish({row[1] for row in rows})
            elif connection.execute("SELECT coalesce(max(rowid), 0) FROM consensus_log").fetchone()[0] < last:
                last, version = 0, None  # VACUUM may number rows anew: any of them may have moved
            if len(rows) == MOVED_ROWS_MAX:
                version = None


class _Connection(sqlite3.Connection):
    """A connection that knows whether it is a `passing` one: opened for one call and closed after it."""

    passing = False


def _open(path: str, timeout_s: float) -> _Connection:
    # Who makes a file writes it before its log, so a log without a file was written by who lost the file.
    if _size(f"{path}-wal") and not _size(path):
        raise ConsensusDamaged(EMPTIED.format(f"sqlite:///{path}"))
    make_file(path)  # SQLite gives its side files the rights of the file
    if _is_read_only(path) and not os.path.exists(f"{path}-shm") and not _size(f"{path}-wal"):
        # Without its side files SQLite opens a file on a read-only disk only if it is told that nobody can write it.
        connection = _connection(f"file:{quote(path)}?immutable=1", timeout_s)
        connection.passing = True
        return connection
    connection = _connection(f"file:{quote(path)}", timeout_s)
    try:
        _use_wal(connection, timeout_s)
    except sqlite3.Error as error:  # one that stays open keeps its locks, and the next one waits for them
        connection.close()
        if error.sqlite_errorcode not in _NO_ROOM:
            raise
        return _open_alone(path)
    return connection


def _open_alone(path: str) -> _Connection:
    """On a disk without room for the index that processes share. SQLite alone keeps it in memory and needs none.

    So a full disk can be read, and what frees space can run. It keeps all others out, so it is for one call. While it
    is opened it keeps every lock that it has got. Two of them would wait for one another, so each soon gives up.
    """
    for tries in range(WAL_TRIES_MAX):
        connection = _connection(f"file:{quote(path)}", ALONE_TIMEOUT_S)
        connection.passing = True
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("PRAGMA journal_mode = WAL")
            return connection
        except sqlite3.Error as error:
            connection.close()
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or tries == WAL_TRIES_MAX - 1:
                raise
        threading.Event().wait(0.01 * (1 + (threading.get_ident() // 4096 + tries) % 5))
    raise AssertionError("the last try returns or raises")


def _connection(url: str, timeout_s: float) -> _Connection:
    return sqlite3.connect(url, timeout_s, uri=True, check_same_thread=False, isolation_level=None, factory=_Connection)


def _use_wal(connection: sqlite3.Connection, timeout_s: float) -> None:
    # Turning on WAL needs the file alone for a moment and does not wait for it; its holder is doing the same. Where it
    # does wait, all tries together wait as long as one may.
    deadline = time.monotonic() + max(timeout_s, WAL_TRIES_MAX * 0.01)
    for tries in range(WAL_TRIES_MAX):
        try:
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA secure_delete = ON")  # what is deleted is overwritten with zeros
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            is_over = tries == WAL_TRIES_MAX - 1 or time.monotonic() >= deadline
            if error.sqlite_errorcode in _NO_ROOM or is_over:
                raise
        threading.Event().wait(0.01)


def _is_read_only(path: str) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.statvfs(os.path.dirname(path)).f_flag & os.ST_RDONLY)
    return False


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0


def _let_go(connection: _Connection | None, record: Any) -> None:
    """A connection goes back to the pool: a passing one is closed instead."""
    if connection is not None and connection.passing:
        record.invalidate()


# Logs in a SQLite file, for who only looks: nothing is written, beside the file neither.
#
# SQLite keeps what was committed last in a write-ahead log beside the file, and processes share an index of that. Where
# the index is there it is opened for reading, and a connection serves one call. Where nothing lies beside the file
# nobody has it open, so it is read as one that cannot change. A process that opens it meanwhile is noticed, and the
# call is made again. Where the log lies there without its index, as in a copy of files, a copy of both is read. So is
# one with a rollback journal, which a crash has left: SQLite would carry it out, or read past it.
#
# SQLite deletes the log, or the journal, of a file that is empty, also where it opens it for reading. They may be the
# last that there is of it, so such a file is not opened.


TRIES_MAX = 100
"""How often a call is made anew because the file was opened, or written, meanwhile."""

BUSY_TIMEOUT_S = 30.0
"""How long a call waits for who has the file alone for a moment."""

COPY_BYTES_MAX = 4 * 1024**3
"""A larger file is not copied to be looked at."""

LOG, INDEX, JOURNAL = "-wal", "-shm", "-journal"
"""What SQLite keeps beside the file."""


@dataclass(frozen=True, slots=True)
class _Stamp:
    """What changes when the file is opened by another process, or written. Sizes are None where nothing is."""

    changed_ns: int = 0
    inode: int = 0
    size: int | None = None
    log: int | None = None
    index: int | None = None
    journal: int | None = None

    @property
    def is_shared(self) -> bool:
        """Whether SQLite itself keeps readers and writers apart."""
        return self.index is not None

    @property
    def is_copied(self) -> bool:
        return not self.is_shared and bool(self.log or self.journal)

    def same_file(self, other: _Stamp) -> bool:
        return _of_file(self) == _of_file(other)


def _of_file(stamp: _Stamp) -> tuple[int | None, ...]:
    return stamp.changed_ns, stamp.inode, stamp.size, stamp.is_shared, bool(stamp.log), stamp.journal


class ReadingSqlite(SqliteConsensus):
    """One file, which is not written. ConsensusMisconfigured: it is not there."""

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        self._lock = threading.Lock()
        self._copied: tuple[_Stamp, str] | None = None  # a directory with a copy of the file; guarded by the lock
        if not os.path.exists(self._path):
            raise ConsensusMisconfigured(f"{self.url} does not exist")
        self._stamp()
        SqlConsensus.__init__(self, sa.create_engine("sqlite://"), Notifier("consensus-sqlite-reading"))
        self._is_set_up = True

    def subscribe(self, callback: Any, wanted: Wanted | None = None) -> None:
        return None

    def turn(self, key: str, wait_s: float) -> AbstractContextManager[Turn]:
        return Consensus.turn(self, key, wait_s)  # nobody commits here: no file is made for turns

    def check(self) -> None:
        """Whether it can be read."""
        self.keys("", "", 1)

    def close(self) -> None:
        SqlConsensus.close(self)
        with self._lock:
            self._forget_copy()

    def _read(self, compiled: Compiled, values: Mapping[str, Any]) -> list[Any]:
        check_process(self._pid, self.url)
        text, parameters = bind(compiled, values)
        for _ in range(TRIES_MAX):
            before = self._stamp()
            try:
                with contextlib.closing(self._opened(before)) as connection:
                    rows: list[Any] = connection.execute(text, parameters).fetchall()
            except Exception as error:
                if not self._stamp().same_file(before):
                    continue
                raise self._translate(error, "read") from error
            if before.is_shared or self._stamp().same_file(before):
                return rows
        raise ConsensusUnavailable(f"{self.url} changed during each of {TRIES_MAX} reads; look again")

    def _write(self, compiled: Compiled, values: Any) -> int:
        raise ConsensusUnavailable(f"{self.url} was opened to be looked at: nothing is written")

    def _create(self, values: Mapping[str, Any]) -> bool:
        raise ConsensusUnavailable(f"{self.url} was opened to be looked at: nothing is written")

    def _translate(self, error: Exception, kind: Kind) -> Exception:
        if isinstance(error, sqlite3.OperationalError) and not os.path.isfile(self._path):
            return ConsensusMisconfigured(f"{self.url} does not exist")
        return super()._translate(error, kind)

    def _stamp(self) -> _Stamp:
        """How the file and what lies beside it are now. Raises ConsensusUnavailable: one of them is no file.

        Sides come first: who makes the file writes it before its log.
        """
        sides = [self._found(end) for end in (LOG, INDEX, JOURNAL)]
        found = self._found("")
        sizes = [None if side is None else side.st_size for side in sides]
        return _Stamp(*((0, 0, None) if found is None else (found.st_mtime_ns, found.st_ino, found.st_size)), *sizes)

    def _found(self, end: str) -> os.stat_result | None:
        try:
            found = os.stat(f"{self._path}{end}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ConsensusUnavailable(f"{self.url}{end} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise ConsensusUnavailable(f"{self.url}{end} is no regular file, so it is not opened")
        return found

    def _opened(self, now: _Stamp) -> sqlite3.Connection:
        """A connection for one call."""
        if not now.size and now.log:
            raise ConsensusDamaged(EMPTIED.format(self.url))
        if not now.size and now.journal:
            raise ConsensusUnavailable(
                f"{self.url} is empty beside a rollback journal: a program makes it just now, or it was truncated"
            )
        if now.is_copied:
            return _connected(self._copy(now), "mode=rw")
        return _connected(self._path, "mode=ro&readonly_shm=1" if now.is_shared else "mode=ro&immutable=1")

    def _copy(self, now: _Stamp) -> str:
        """A copy of the file with its log and journal, made once: nobody has them open."""
        with self._lock:
            if self._copied is not None and not self._copied[0].same_file(now):
                self._forget_copy()
            if self._copied is None:
                if (now.size or 0) + (now.log or 0) + (now.journal or 0) > COPY_BYTES_MAX:
                    raise ConsensusUnavailable(
                        f"{self.url} lacks the index of its write-ahead log, and is too large to be copied: open it "
                        "with `persist shards` once"
                    )
                self._copied = now, self._copied_to_temporary()
            return os.path.join(self._copied[1], "log.db")

    def _copied_to_temporary(self) -> str:
        copied = None
        try:
            copied = tempfile.mkdtemp(prefix="persist-look-")
            for end in ("", LOG, JOURNAL):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(f"{self._path}{end}", os.path.join(copied, f"log.db{end}"))
        except OSError as error:
            if copied is not None:
                shutil.rmtree(copied, ignore_errors=True)
            raise ConsensusUnavailable(
                f"{self.url} must be copied to be looked at, and that failed: {error.strerror or error}; set TMPDIR to "
                "a directory with room"
            ) from error
        return copied

    def _forget_copy(self) -> None:
        copied, self._copied = self._copied, None
        if copied is not None:
            shutil.rmtree(copied[1], ignore_errors=True)


def _connected(path: str, options: str) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(path)}?{options}", BUSY_TIMEOUT_S, uri=True, isolation_level=None)
