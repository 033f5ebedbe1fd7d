"""A small but complete blob provider, as docs/internals.md describes them: blobs in a table of a SQLite file."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from blob import Blob, BlobExists, BlobMisconfigured, BlobNotFound, BlobStat, BlobUnavailable
from blob.interface import check_key, check_prefix, check_range

PAGE = 500


class TableBlob(Blob):
    """Blobs in the table `blobs` of the SQLite file `path`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS blobs "
                "(key TEXT PRIMARY KEY, data BLOB NOT NULL, modified_ms INTEGER NOT NULL)"
            )
        except sqlite3.Error as error:
            raise BlobMisconfigured(f"the file {path} cannot be used as a blob store: {error}") from error

    @property
    def url(self) -> str:
        return f"table:{self._path}"

    def put(self, key: str, data: bytes | memoryview) -> None:
        row = (check_key(key), bytes(data), time.time_ns() // 1_000_000)
        # The primary key excludes that a key is written twice.
        inserted = self._run("INSERT INTO blobs VALUES (?, ?, ?) ON CONFLICT DO NOTHING", row).rowcount
        if not inserted and self.get(key) != row[1]:
            raise BlobExists(f"blob {key} exists with other bytes; keys are single-use")

    def get(self, key: str) -> bytes:
        row = self._run("SELECT data FROM blobs WHERE key = ?", (check_key(key),)).fetchone()
        if row is None:
            raise BlobNotFound(f"no blob {key} in {self.url}")
        return bytes(row[0])

    def get_range(self, key: str, start: int, length: int) -> bytes:
        check_range(start, length)
        data = self.get(key)
        if start + length > len(data):
            raise BlobNotFound(f"blob {key} ends at byte {len(data)}, before {start + length}")
        return data[start : start + length]

    def stat(self, key: str) -> BlobStat | None:
        query = "SELECT key, length(data), modified_ms FROM blobs WHERE key = ?"
        row = self._run(query, (check_key(key),)).fetchone()
        return None if row is None else BlobStat(*row)

    def delete(self, keys: Sequence[str]) -> None:
        checked = [check_key(key) for key in keys]
        for start in range(0, len(checked), PAGE):
            page = checked[start : start + PAGE]
            self._run(f"DELETE FROM blobs WHERE key IN ({', '.join('?' * len(page))})", tuple(page))

    def list(self, prefix: str) -> Iterator[BlobStat]:
        check_prefix(prefix)
        return self._pages(prefix)

    def check(self) -> None:
        self.put("check", b"check")
        self.delete(["check"])

    def close(self) -> None:
        self._db.close()

    def _pages(self, prefix: str) -> Iterator[BlobStat]:
        # "\x7f" sorts after everything a key may hold.
        query = (
            "SELECT key, length(data), modified_ms FROM blobs WHERE key >= ? AND key > ? AND key < ? "
            "ORDER BY key LIMIT ?"
        )
        after = ""
        while rows := self._run(query, (prefix, after, prefix + "\x7f", PAGE)).fetchall():
            yield from (BlobStat(*row) for row in rows)
            after = rows[-1][0]

    def _run(self, statement: str, values: tuple[Any, ...]) -> sqlite3.Cursor:
        with self._lock:
            try:
                return self._db.execute(statement, values)
            except sqlite3.Error as error:
                raise BlobUnavailable(f"{self.url} did not carry out a call: {error}") from error
