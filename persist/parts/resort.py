"""Rows that lie by their keys, put in the whole order and added up: what is left of rows when a column was dropped.

Rows of one key are in no order then, and some of them are the same. So all rows of a key are looked at together. Where
a key has more of them than memory is meant to hold, they are sorted piece by piece into a temporary file and merged.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from persist.core.batch import Part
from persist.parts.consolidate import Times, merge
from persist.parts.files import Files
from persist.parts.keycodec import KeyRange, SortedKeys, clip_rows
from persist.parts.merge import Cursor, Prepare, merge_cursors
from persist.parts.schema import ShardSchema

ROWS_MIN = 1024  # that are decoded together
PIECE_BYTES = 1024 * 1024  # of a sorted piece in a temporary file, which is read back at once


def rows_of(
    parts: Sequence[tuple[Part, list[int] | None]],
    files: Files,
    schema: ShardSchema,
    key_range: KeyRange,
    prepare: Prepare,
    limit: int,
) -> Iterator[pa.Table]:
    """The rows of parts of one run, in key order, as `prepare` makes them; about `limit` bytes at a time."""
    for part, chosen in parts:
        file = files.open(part)
        columns = prepare.columns(part)
        for group in file.wanted(key_range) if chosen is None else chosen:
            told = file.groups[group]
            rows = max(ROWS_MIN, told.rows * limit // max(1, told.nbytes))
            for batch in file.batches([group], columns, rows):
                table = prepare.rows(batch, part)
                if len(table):
                    table = clip_rows(table, SortedKeys(table, schema.key), key_range)
                if len(table):
                    yield table


def resorted(tables: Iterator[pa.Table], files: Files, schema: ShardSchema, limit: int) -> Iterator[pa.Table]:
    """Rows that come in key order, in the order of keys, values and times, added up; each table with all columns.

    It holds about `limit` bytes of rows.
    """
    held = _Held(files, schema, limit)
    last = b""
    for table in tables:
        keys = SortedKeys(table, schema.key)
        if not held.is_empty and keys[0] > last:
            yield from held.taken()
        last = keys.last
        cut = keys.bisect(last)
        if cut:  # the rows before are of keys that are complete
            held.add(table.slice(0, cut))
            yield from held.taken()
        held.add(table.slice(cut))
    yield from held.taken()


class _Held:
    """Rows of keys that are looked at together."""

    def __init__(self, files: Files, schema: ShardSchema, limit: int) -> None:
        self._files = files
        self._schema = schema
        self._limit = limit
        self._tables: list[pa.Table] = []
        self._pieces: list[_Piece] = []
        self._nbytes = 0

    @property
    def is_empty(self) -> bool:
        return not self._tables and not self._pieces

    def add(self, table: pa.Table) -> None:
        self._tables.append(table)
        self._nbytes += table.nbytes
        if self._nbytes <= self._limit or len(self._tables) < 2:
            return
        rows = merge(self._tables, self._schema, Times())
        self._tables, self._nbytes = [rows], rows.nbytes
        if self._nbytes > self._limit // 2:
            self._pieces.append(_Piece(rows))
            self._tables, self._nbytes = [], 0

    def taken(self) -> Iterator[pa.Table]:
        """All of them, in order and added up; none are held then."""
        rows = merge(self._tables, self._schema, Times())
        pieces, self._pieces, self._tables, self._nbytes = self._pieces, [], [], 0
        if not pieces:
            if len(rows):
                yield rows
            return
        cursors = [Cursor.of_tables(piece.tables(), self._files, self._schema) for piece in pieces]
        cursors.append(Cursor.of_table(rows, self._files, self._schema, settled=True))
        names = self._schema.updates_schema.names
        try:
            yield from merge_cursors(cursors, self._schema, names, self._limit)
        finally:
            for piece in pieces:
                piece.close()


class _Piece:
    """Sorted rows in a temporary file, which goes when it is closed or forgotten."""

    def __init__(self, rows: pa.Table) -> None:
        self._file: Any = tempfile.TemporaryFile(prefix="persist-sort-")  # noqa: SIM115 - it outlives this call
        step = max(1, len(rows) * PIECE_BYTES // max(1, rows.nbytes))
        with pa.ipc.new_stream(self._file, rows.schema) as stream:
            stream.write_table(rows, max_chunksize=step)

    def tables(self) -> Iterator[pa.Table]:
        self._file.seek(0)
        for batch in pa.ipc.open_stream(self._file):
            yield pa.Table.from_batches([batch])

    def close(self) -> None:
        self._file.close()
