"""Logs in a SQLite file: WAL, synchronous=FULL, safe between threads and processes of one machine.

`ReadingSqlite` reads a file without writing to it or beside it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from blob.interface import check_process
from blob.private_files import make_file
from consensus.advisory_locks import FileTurns, Turn
from consensus.interface import (
    Consensus,
    ConsensusDamaged,
    ConsensusError,
    ConsensusIndeterminate,
    ConsensusMisconfigured,
    ConsensusNotWritable,
    ConsensusUnavailable,
    ConsensusUsage,
    Wanted,
)
from consensus.notify import Notifier, Once
from consensus.sql import POOL_SIZE, POOL_TIMEOUT_S, TABLE, Compiled, Kind, SqlConsensus, bind

BUSY_TIMEOUT_MS = 30_000  # how long a statement waits for the write lock of another process before it is Unavailable
POLL_INTERVAL_S = 0.005  # of polls for commits of other processes; each costs about 10 microseconds
IDLE_POLL_INTERVAL_S = 0.1  # while no key is followed: it keeps the new rows few for the next follower
WAL_TRIES_MAX = 100  # to turn on the write-ahead log, 10 ms apart. A try may wait for a lock: see `_use_wal`.
EXCLUSIVE_TIMEOUT_S = 0.1  # how long one try to lock the file exclusively waits, on a full disk
VACUUM_BYTES_MAX = 1024**3  # a larger file is not vacuumed by `scrub`: writers would wait too long
MOVED_ROWS_MAX = 10_000  # new rows read per poll; the next poll reads further rows
FORK_WAIT_S = 1.0  # how long a fork waits for calls of other threads; a call that waits for a lock of the file is safe

EMPTY_WITH_LOG = (
    "{0} is empty and SQLite would delete its write-ahead log, so it is not opened: save a copy of that log, and "
    "restore a backup"
)

_log = logging.getLogger(__name__)

# Failures after which nothing was written. After any other failure a write may have reached the log.
_DEFINITE = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_TOOBIG,
}
# The file was damaged. A damaged first page gives SQLITE_NOTADB; a damaged schema gives SQLITE_ERROR, because the
# statements never change.
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR}
_NO_ROOM = {sqlite3.SQLITE_IOERR_SHMSIZE, sqlite3.SQLITE_FULL}
_MISCONFIGURED = {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_READONLY}


class _Calls:
    """The calls of SQLite that are under way in this process: a fork waits until there are none.

    SQLite's allocator has a mutex. A child that was forked while another thread held it would wait for ever in its
    first call, also for a connection of its own.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._under_way = 0
        self._forks = 0  # that wait, or are under way

    def __enter__(self) -> None:
        with self._changed:
            while self._forks:
                self._changed.wait()
            self._under_way += 1

    def __exit__(self, *_error: object) -> None:
        with self._changed:
            self._under_way -= 1
            if self._forks:
                self._changed.notify_all()

    def before_fork(self) -> None:
        self._changed.acquire()
        self._forks += 1
        self._changed.wait_for(lambda: not self._under_way, FORK_WAIT_S)

    def after_fork_in_parent(self) -> None:
        self._forks -= 1
        self._changed.notify_all()
        self._changed.release()

    def after_fork_in_child(self) -> None:
        # The threads that were inside, or waited, do not exist here.
        self._changed, self._under_way, self._forks = threading.Condition(), 0, 0


# Of the process, as SQLite's mutex is: a fork cannot know which stores are open.
_calls = _Calls()
os.register_at_fork(
    before=_calls.before_fork,
    after_in_parent=_calls.after_fork_in_parent,
    after_in_child=_calls.after_fork_in_child,
)


class SqliteConsensus(SqlConsensus):
    """One file. Writers of this process queue on a lock, which is fairer than SQLite's retries with sleeps."""

    def __init__(self, path: str, *, busy_timeout_ms: int = BUSY_TIMEOUT_MS) -> None:
        self._path = os.path.abspath(path)
        self._write_lock = threading.Lock()
        self._writer: Any = None  # guarded by the lock
        self._file: tuple[int, int] | None = None  # device and inode of the file, once it is open
        self._turns = FileTurns(f"{self._path}-turns")
        self._poll_stop = threading.Event()
        self._followers = 0
        self._follow_lock = threading.Lock()
        self._followed = threading.Event()  # set while a key is followed, and when polling ends
        engine = sa.create_engine(
            "sqlite://",
            paramstyle="named",
            creator=lambda: self._open_file(busy_timeout_ms / 1000),
            poolclass=sa.pool.QueuePool,
            pool_size=POOL_SIZE,
            max_overflow=0,
            pool_timeout=POOL_TIMEOUT_S,
            pool_reset_on_return=None,
            pool_use_lifo=True,
        )
        sa.event.listen(engine, "checkin", _drop_temporary)
        super().__init__(engine, Notifier("consensus-sqlite", self._start_polling))

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

    def _open_file(self, timeout_s: float) -> _Connection:
        self._check_file()  # before a new, empty file is made where the open one was
        connection = _open(self._path, timeout_s)
        self._file = self._file or _file_at(self._path)
        return connection

    def _check_file(self) -> None:
        """Raise ConsensusUnavailable if another file, or none, is now where the open file was.

        SQLite keeps using the file that it has open, wherever that is now: what it commits would be lost for every
        process that opens the path later.
        """
        if self._file is not None and self._file != _file_at(self._path):
            raise ConsensusUnavailable(
                f"{self.url} was moved, deleted or replaced while it was open, so it is neither read nor written: move "
                "it back, or restart this process to use what is there now"
            )

    def _begin_call(self, connection: Any) -> int:
        self._check_file()
        return super()._begin_call(connection)

    def _translate(self, error: Exception, kind: Kind) -> Exception:
        if isinstance(error, (sqlite3.ProgrammingError, sqlite3.InterfaceError)):  # the store was closed meanwhile
            return ConsensusUnavailable(f"{self.url} failed a {kind}: {error}")
        if not isinstance(error, (sqlite3.Error, UnicodeError)):
            return error
        code = (getattr(error, "sqlite_errorcode", None) or sqlite3.SQLITE_ERROR) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return ConsensusNotWritable(f"{self.url} failed a {kind} because the disk is full: {error}")
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN) and _is_read_only(self._path):
            reason = f"{self.url} failed a {kind} because its file system is read-only: {error}"
            return ConsensusNotWritable(reason, is_read_only=True)
        if kind != "setup" and code == sqlite3.SQLITE_READONLY and not _was_moved(error):
            reason = f"{self.url} failed a {kind} because its file is read-only: {error}"
            return ConsensusNotWritable(reason, is_read_only=True)
        if code in _DAMAGED:
            return ConsensusDamaged(f"{self.url} is damaged, or not a database of persist; restore a backup: {error}")
        if kind == "setup" and code == sqlite3.SQLITE_BUSY and not _size(self._path):
            return ConsensusUnavailable(
                f"{self.url} is empty and locked by another process; if it was truncated, stop that process and "
                "restore a backup"
            )
        if kind == "setup" and code in _MISCONFIGURED:
            return ConsensusMisconfigured(f"the database file of {self.url} cannot be used: {error}")
        if kind == "write" and code not in _DEFINITE:
            return ConsensusIndeterminate(f"{self.url} failed while writing: {error}")
        return ConsensusUnavailable(f"{self.url} failed a {kind}: {error}")

    @contextlib.contextmanager
    def _connection(self, kind: Kind) -> Iterator[Any]:
        with _calls, super()._connection(kind) as connection:
            yield connection

    def _create_table(self, connection: Any) -> None:
        exists = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
        if not connection.execute(exists, (TABLE.name,)).fetchone():
            ddl = sa.schema.CreateTable(TABLE, if_not_exists=True)
            connection.execute(str(ddl.compile(dialect=self._engine.dialect)))

    def _probe(self) -> None:
        with self._connection("setup") as connection:
            mode = connection.execute("PRAGMA journal_mode").fetchone()[0]
            if connection.is_temporary:
                raise ConsensusNotWritable(f"{self.url} cannot be written: its disk is full or read-only")
            if mode != "wal":
                raise ConsensusMisconfigured(f"{self.url} cannot keep a write-ahead log ({mode}); use a local disk")
            # Takes and releases the write lock: fails at once on a file that may not be written.
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")

    def _write(self, compiled: Any, values: Any) -> int:
        # Uses a dedicated connection: taking one from the pool each time costs a tenth of a commit.
        check_process(self._pid, self.url, ConsensusUsage)
        text, parameters = bind(compiled, values)
        with self._write_lock, _calls:
            self._check_file()
            pooled = self._writer or self._pooled_connection()
            try:
                count: int = pooled.driver_connection.execute(text, parameters).rowcount
            except Exception as error:
                self._writer = None
                pooled.invalidate()
                raise self._translate(error, "write") from error
            if pooled.driver_connection.is_temporary:
                self._writer = None
                pooled.close()
            else:
                self._writer = pooled
            return count

    def turn(self, key: str, wait_s: float) -> AbstractContextManager[Turn]:
        return self._turns.turn(key, wait_s)

    def scrub(self) -> str:
        """Vacuum the file and truncate the write-ahead log. Writers wait meanwhile.

        Deleted entries are already overwritten (`secure_delete`), except for the copies that SQLite leaves in pages
        when it balances its tree: only VACUUM removes them.
        """
        with self._connection("write") as connection:
            pages, page_bytes = (connection.execute(f"PRAGMA {n}").fetchone()[0] for n in ("page_count", "page_size"))
            if pages * page_bytes > VACUUM_BYTES_MAX:
                return (
                    f"{self._path} is too large to be vacuumed during operation: run VACUUM while there are no writers"
                )
            try:
                connection.execute("VACUUM")
            except sqlite3.OperationalError as error:  # the disk is full, or another process has locked the file
                return f"{self._path} could not be vacuumed ({error}): run VACUUM while there are no writers"
            is_busy = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if not is_busy:
            return ""
        return f"readers block the truncation of {self._path}-wal: run PRAGMA wal_checkpoint(TRUNCATE) after they end"

    def close(self) -> None:
        with self._write_lock:
            writer, self._writer = self._writer, None
            if writer is not None:
                writer.close()
        self._turns.close()
        self._notifier.close()  # which waits for the poller: not as a call
        with _calls:
            super().close()

    def follow(self, key: str) -> Callable[[], None]:
        """Poll often until the returned function is called, which may be called twice."""
        with self._follow_lock:
            self._followers += 1
            self._followed.set()
        return Once(self._unfollow)

    def _unfollow(self) -> None:
        with self._follow_lock:
            self._followers -= 1
            if not self._followers and not self._poll_stop.is_set():
                self._followed.clear()

    def _start_polling(self) -> Callable[[], None]:
        stop = threading.Event()
        with self._follow_lock:
            self._poll_stop = stop
            if not self._followers:
                self._followed.clear()
        poller = threading.Thread(target=self._poll, args=(stop,), name="consensus-sqlite-poll", daemon=True)
        poller.start()

        def end() -> None:
            with self._follow_lock:
                stop.set()
                self._followed.set()  # so that an idle poller ends at once
            if poller is not threading.current_thread():
                poller.join()

        return end

    def _poll(self, stop: threading.Event) -> None:
        """Publish keys that other connections and processes moved.

        `PRAGMA data_version` changes when another connection commits. The newest row of the table is the head of some
        key and heads are never deleted, so rowids only grow and the rows above the last one are new.
        """
        while not stop.is_set():
            try:
                with contextlib.ExitStack() as taken:
                    with _calls:  # and each poll is a call, not all of them together
                        connection = taken.enter_context(super()._connection("read"))
                    if not connection.is_temporary:
                        self._poll_connection(connection, stop)
            except ConsensusError as error:
                _log.warning("polling %s for commits failed, retrying: %s", self.url, error)
            stop.wait(1.0)

    def _poll_connection(self, connection: sqlite3.Connection, stop: threading.Event) -> None:
        version: int | None = None
        newest = "SELECT coalesce(max(rowid), 0) FROM consensus_log"
        with _calls:
            last = connection.execute(newest).fetchone()[0]
        while not stop.wait(POLL_INTERVAL_S if self._followers else 0):
            if not self._followers:
                self._followed.wait(IDLE_POLL_INTERVAL_S)
            if stop.is_set():
                return
            with _calls:
                newest_version = connection.execute("PRAGMA data_version").fetchone()[0]
                if newest_version == version:
                    continue
                version = newest_version
                moved = "SELECT rowid, key FROM consensus_log WHERE rowid > ? ORDER BY rowid LIMIT ?"
                rows = connection.execute(moved, (last, MOVED_ROWS_MAX)).fetchall()
                if rows:
                    last = rows[-1][0]
                    self._notifier.publish({row[1] for row in rows})
                elif connection.execute(newest).fetchone()[0] < last:
                    last, version = 0, None  # VACUUM may renumber rows: any of them may have moved
                if len(rows) == MOVED_ROWS_MAX:
                    version = None


class _Connection(sqlite3.Connection):
    """A connection. A temporary one is closed after one call instead of returned to the pool."""

    is_temporary = False


def _open(path: str, timeout_s: float) -> _Connection:
    # SQLite writes a new file before its log, so an empty file with a log was truncated.
    if _size(f"{path}-wal") and not _size(path):
        raise ConsensusDamaged(EMPTY_WITH_LOG.format(f"sqlite:///{path}"))
    make_file(path)  # SQLite gives its side files the rights of the file
    if not os.path.exists(f"{path}-shm") and not _size(f"{path}-wal") and _is_read_only(path):
        # Without its side files SQLite opens a file on a read-only disk only as immutable.
        connection = _connect(path, timeout_s, "immutable=1")
        connection.is_temporary = True
        return connection
    connection = _connect(path, timeout_s)
    try:
        _use_wal(connection, timeout_s)
    except sqlite3.Error as error:
        connection.close()  # an open connection would keep its locks
        if error.sqlite_errorcode not in _NO_ROOM:
            raise
        return _open_exclusive(path)
    return connection


def _open_exclusive(path: str) -> _Connection:
    """Open a file on a disk without room for the shared index: with an exclusive lock SQLite keeps it in memory.

    So a full disk can be read, and commands that free space can run. The connection locks out all others, so it is for
    one call. It keeps its locks while it is opened, and two of them would deadlock, so each has a short timeout.
    """
    for tries in range(WAL_TRIES_MAX):
        connection = _connect(path, EXCLUSIVE_TIMEOUT_S)
        connection.is_temporary = True
        try:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
            _set_wal_pragmas(connection)
            return connection
        except sqlite3.Error as error:
            connection.close()
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or tries == WAL_TRIES_MAX - 1:
                raise
        threading.Event().wait(0.01 * (1 + (threading.get_ident() // 4096 + tries) % 5))
    raise AssertionError("unreachable: the last attempt returns or raises")


def _connect(path: str, timeout_s: float, options: str = "") -> _Connection:
    """Open a connection in autocommit mode. `options` is the query of a SQLite URI."""
    url = f"file:{quote(path)}?{options}"
    return sqlite3.connect(url, timeout_s, uri=True, check_same_thread=False, isolation_level=None, factory=_Connection)


def _set_wal_pragmas(connection: sqlite3.Connection) -> None:
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA secure_delete = ON")  # deleted bytes are overwritten with zeros
    connection.execute("PRAGMA journal_mode = WAL")


def _use_wal(connection: sqlite3.Connection, timeout_s: float) -> None:
    # Turning on WAL needs an exclusive lock for a moment and does not wait for it. If it does wait, the limit of one
    # wait applies to all tries together.
    deadline = time.monotonic() + max(timeout_s, WAL_TRIES_MAX * 0.01)
    for tries in range(WAL_TRIES_MAX):
        try:
            _set_wal_pragmas(connection)
            return
        except sqlite3.OperationalError as error:
            is_over = tries == WAL_TRIES_MAX - 1 or time.monotonic() >= deadline
            if error.sqlite_errorcode in _NO_ROOM or is_over:
                raise
        threading.Event().wait(0.01)


def _is_read_only(path: str) -> bool:
    """Whether the file system refuses every write. One that does so after an error (ext4) does not set its flag."""
    directory = os.path.dirname(path)
    try:
        if os.statvfs(directory).f_flag & os.ST_RDONLY:
            return True
        with tempfile.TemporaryFile(dir=directory):
            return False
    except OSError as error:
        return error.errno == errno.EROFS


def _was_moved(error: Exception) -> bool:
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY_DBMOVED


def _file_at(path: str) -> tuple[int, int] | None:
    """Device and inode of the file at this path; None if it cannot be looked up."""
    with contextlib.suppress(OSError):
        file = os.stat(path)
        return file.st_dev, file.st_ino
    return None


def _size(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0


def _drop_temporary(connection: _Connection | None, record: Any) -> None:
    """Close a temporary connection instead of returning it to the pool."""
    if connection is not None and connection.is_temporary:
        record.invalidate()


READ_TRIES_MAX = 100  # how often a read is repeated because the file was opened or written meanwhile
READ_BUSY_TIMEOUT_S = 30.0  # how long a read waits for an exclusive lock
COPY_BYTES_MAX = 4 * 1024**3  # a larger file is not copied for reading
LOG, INDEX, JOURNAL = "-wal", "-shm", "-journal"  # the suffixes of SQLite's side files


@dataclass(frozen=True, slots=True)
class _Stamp:
    """The state of the file and its side files, which changes when the file is opened or written. None: no file."""

    changed_ns: int = 0
    inode: int = 0
    size: int | None = None
    log: int | None = None
    index: int | None = None
    journal: int | None = None

    @property
    def is_shared(self) -> bool:
        """Whether SQLite itself isolates readers from writers."""
        return self.index is not None

    @property
    def needs_copy(self) -> bool:
        return not self.is_shared and bool(self.log or self.journal)

    @property
    def identity(self) -> tuple[int | None, ...]:
        """Equal for two stamps if a copy of the file made at one of them is valid at the other."""
        return self.changed_ns, self.inode, self.size, self.is_shared, bool(self.log), self.journal


class ReadingSqlite(SqliteConsensus):
    """Reads one file and writes neither to it nor beside it. ConsensusMisconfigured if it does not exist.

    SQLite keeps the newest commits in a write-ahead log beside the file, and processes share an index of the log. If
    the index exists it is opened for reading, with one connection per call. If there are no side files no process has
    the file open, so it is read as immutable, and the call is repeated if another process opens it meanwhile. A log
    without its index (as in a copy of files) or a rollback journal (after a crash) is read from a temporary copy,
    because SQLite would apply it, or ignore it.

    An empty file is not opened, because SQLite would delete its log or journal, which may be all that is left of it.
    """

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        self._lock = threading.Lock()
        self._copy: tuple[_Stamp, str] | None = None  # a directory with a copy of the file; guarded by the lock
        if not os.path.exists(self._path):
            raise ConsensusMisconfigured(f"{self.url} does not exist")
        self._stamp()
        SqlConsensus.__init__(
            self, sa.create_engine("sqlite://", paramstyle="named"), Notifier("consensus-sqlite-reading")
        )
        self._is_set_up = True

    def subscribe(self, callback: Any, wanted: Wanted | None = None) -> None:
        return None

    def turn(self, key: str, wait_s: float) -> AbstractContextManager[Turn]:
        return Consensus.turn(self, key, wait_s)  # no commits here, so no file for turns

    def check(self) -> None:
        """Read once."""
        self.keys("", "", 1)

    def close(self) -> None:
        SqlConsensus.close(self)
        with self._lock:
            self._delete_copy()

    def _read(self, compiled: Compiled, values: Mapping[str, Any]) -> list[Any]:
        check_process(self._pid, self.url, ConsensusUsage)
        text, parameters = bind(compiled, values)
        for _ in range(READ_TRIES_MAX):
            before = self._stamp()
            try:
                with _calls, contextlib.closing(self._open_at(before)) as connection:
                    rows: list[Any] = connection.execute(text, parameters).fetchall()
            except Exception as error:
                if self._stamp().identity != before.identity:
                    continue
                raise self._translate(error, "read") from error
            if before.is_shared or self._stamp().identity == before.identity:
                return rows
        raise ConsensusUnavailable(f"{self.url} changed during each of {READ_TRIES_MAX} reads; try again")

    def _write(self, compiled: Compiled, values: Any) -> int:
        raise ConsensusUnavailable(f"{self.url} is open read-only: nothing is written")

    def _translate(self, error: Exception, kind: Kind) -> Exception:
        if isinstance(error, sqlite3.OperationalError) and not os.path.isfile(self._path):
            return ConsensusMisconfigured(f"{self.url} does not exist")
        return super()._translate(error, kind)

    def _stamp(self) -> _Stamp:
        """The current state of the file and its side files. Raises ConsensusUnavailable if one is not a regular file.

        The side files are read first, because SQLite writes a new file before its log.
        """
        sides = [self._stat(suffix) for suffix in (LOG, INDEX, JOURNAL)]
        file = self._stat("")
        sizes = [None if side is None else side.st_size for side in sides]
        return _Stamp(*((0, 0, None) if file is None else (file.st_mtime_ns, file.st_ino, file.st_size)), *sizes)

    def _stat(self, suffix: str) -> os.stat_result | None:
        try:
            file = os.stat(f"{self._path}{suffix}")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ConsensusUnavailable(f"{self.url}{suffix} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(file.st_mode):
            raise ConsensusUnavailable(f"{self.url}{suffix} is not a regular file, so it is not opened")
        return file

    def _open_at(self, now: _Stamp) -> sqlite3.Connection:
        """A connection for one call, for the file as it is `now`."""
        if not now.size and now.log:
            raise ConsensusDamaged(EMPTY_WITH_LOG.format(self.url))
        if not now.size and now.journal:
            raise ConsensusUnavailable(
                f"{self.url} is empty beside a rollback journal: it is being created, or it was truncated"
            )
        if now.needs_copy:
            return _connect(self._copy_at(now), READ_BUSY_TIMEOUT_S, "mode=rw")
        options = "mode=ro&readonly_shm=1" if now.is_shared else "mode=ro&immutable=1"
        return _connect(self._path, READ_BUSY_TIMEOUT_S, options)

    def _copy_at(self, now: _Stamp) -> str:
        """The path of a copy of the file with its log and journal, made once: no process has them open."""
        with self._lock:
            if self._copy is not None and self._copy[0].identity != now.identity:
                self._delete_copy()
            if self._copy is None:
                if (now.size or 0) + (now.log or 0) + (now.journal or 0) > COPY_BYTES_MAX:
                    raise ConsensusUnavailable(
                        f"{self.url} lacks the index of its write-ahead log, and is too large to be copied: open it "
                        "with `persist shards` once"
                    )
                self._copy = now, self._copy_files()
            return os.path.join(self._copy[1], "log.db")

    def _copy_files(self) -> str:
        directory = None
        try:
            directory = tempfile.mkdtemp(prefix="persist-look-")
            for suffix in ("", LOG, JOURNAL):
                with contextlib.suppress(FileNotFoundError):
                    shutil.copyfile(f"{self._path}{suffix}", os.path.join(directory, f"log.db{suffix}"))
        except OSError as error:
            if directory is not None:
                shutil.rmtree(directory, ignore_errors=True)
            raise ConsensusUnavailable(
                f"{self.url} must be copied for reading, which failed: {error.strerror or error}; set TMPDIR to a "
                "directory with free space"
            ) from error
        return directory

    def _delete_copy(self) -> None:
        copy, self._copy = self._copy, None
        if copy is not None:
            shutil.rmtree(copy[1], ignore_errors=True)
