"""Logs in a SQLite file, for who only looks: nothing is written, beside the file neither.

SQLite keeps what was committed last in a write-ahead log beside the file, and processes share an index of that. Where
the index is there it is opened for reading, and a connection serves one call. Where nothing lies beside the file nobody
has it open, so it is read as one that cannot change. A process that opens it meanwhile is noticed, and the call is
made again. Where the log lies there without its index, as in a copy of files, a copy of both is read.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from consensus.errors import ConsensusMisconfigured, ConsensusUnavailable
from consensus.interface import Wanted, check_process
from consensus.notify import Notifier
from consensus.sql import Compiled, Kind, SqlConsensus, bind
from consensus.sqlite import SqliteConsensus

TRIES_MAX = 100
"""How often a call is made anew because the file was opened, or written, meanwhile."""

BUSY_TIMEOUT_S = 30.0
"""How long a call waits for who has the file alone for a moment."""

COPY_BYTES_MAX = 4 * 1024**3
"""A larger file is not copied to be looked at."""

_Stamp = tuple[int, int, int, bool]


class ReadingSqlite(SqliteConsensus):
    """One file, which is not written. ConsensusMisconfigured: it is not there."""

    def __init__(self, path: str) -> None:
        self._path = os.path.abspath(path)
        self._copied: str | None = None  # a directory with a copy of the file
        if not os.path.isfile(self._path):
            raise ConsensusMisconfigured(f"{self.url} does not exist")
        SqlConsensus.__init__(self, sa.create_engine("sqlite://"), Notifier("consensus-sqlite-reading"))
        self._is_set_up = True

    def subscribe(self, callback: Any, wanted: Wanted | None = None) -> None:
        return None

    def check(self) -> None:
        """Whether it can be read."""
        self.keys("", "", 1)

    def close(self) -> None:
        SqlConsensus.close(self)
        copied, self._copied = self._copied, None
        if copied is not None:
            shutil.rmtree(copied, ignore_errors=True)

    def _read(self, compiled: Compiled, values: Mapping[str, Any]) -> list[Any]:
        check_process(self._pid, self.url)
        text, parameters = bind(compiled, values)
        for _ in range(TRIES_MAX):
            before = self._stamp()
            try:
                with contextlib.closing(self._opened()) as connection:
                    rows: list[Any] = connection.execute(text, parameters).fetchall()
            except Exception as error:
                if self._stamp() != before:
                    continue
                raise self._translate(error, "read") from error
            if before[3] or self._stamp() == before:
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
        """What changes when the file is opened by another process, or written."""
        with contextlib.suppress(OSError):
            found = os.stat(self._path)
            shares = os.path.exists(f"{self._path}-shm") or _has_bytes(f"{self._path}-wal")
            return found.st_mtime_ns, found.st_size, found.st_ino, shares
        return 0, 0, 0, False

    def _opened(self) -> sqlite3.Connection:
        """A connection for one call."""
        if os.path.exists(f"{self._path}-shm"):
            return _connected(self._path, "mode=ro&readonly_shm=1")
        if _has_bytes(f"{self._path}-wal"):
            return _connected(self._copy(), "mode=rw")
        return _connected(self._path, "mode=ro&immutable=1")

    def _copy(self) -> str:
        """A copy of the file and its log, made once: nobody has them open."""
        if self._copied is None:
            sizes = [os.stat(f"{self._path}{end}").st_size for end in ("", "-wal")]
            if sum(sizes) > COPY_BYTES_MAX:
                raise ConsensusUnavailable(
                    f"{self.url} lacks the index of its write-ahead log, and is too large to be copied: open it with "
                    "`persist verify` once"
                )
            copied = tempfile.mkdtemp(prefix="persist-look-")
            for end in ("", "-wal"):
                shutil.copyfile(f"{self._path}{end}", os.path.join(copied, f"log.db{end}"))
            self._copied = copied
        return os.path.join(self._copied, "log.db")


def _connected(path: str, options: str) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{quote(path)}?{options}", BUSY_TIMEOUT_S, uri=True, isolation_level=None)


def _has_bytes(path: str) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size > 0
    return False
