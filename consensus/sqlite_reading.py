"""Logs in a SQLite file, for who only looks: nothing is written, beside the file neither.

SQLite keeps what was committed last in a write-ahead log beside the file, and processes share an index of that. Where
the index is there it is opened for reading, and a connection serves one call. Where nothing lies beside the file nobody
has it open, so it is read as one that cannot change. A process that opens it meanwhile is noticed, and the call is
made again. Where the log lies there without its index, as in a copy of files, a copy of both is read. So is one with a
rollback journal, which a crash has left: SQLite would carry it out, or read past it.

SQLite deletes the log, or the journal, of a file that is empty, also where it opens it for reading. They may be the
last that there is of it, so such a file is not opened.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import stat
import tempfile
import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from consensus.errors import ConsensusDamaged, ConsensusMisconfigured, ConsensusUnavailable
from consensus.interface import Consensus, Wanted, check_process
from consensus.notify import Notifier
from consensus.sql import Compiled, Kind, SqlConsensus, bind
from consensus.sqlite import EMPTIED, SqliteConsensus
from consensus.turns import Turn

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
