"""The contents of a shard by a naive reader, an oracle for tests. It shares no code with `persist.parts.reader`.

It reads each part by itself, as any tool for Parquet would: no index, no pruning, no merge. Each update adds to a
digest that does not depend on the order of rows, nor on how they are cut into parts: the number of a row, times its
diff. So nothing is sorted or grouped, and memory is that of a row group.

See `docs/design/0004-consolidation-and-reads.md`.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from persist.core.batch import Part
from persist.core.truncations_and_drops import RowDrop
from persist.parts import DIFF, TIME, ShardSchema
from persist.parts.part_files import BlobReads
from persist.parts.row_stats import MODULUS, digest_of_rows


@dataclass(slots=True)
class Tally:
    """Rows that were added up: how many, by their diffs, and their digest."""

    rows: int = 0
    digest: int = 0

    def add(self, table: pa.Table) -> None:
        """Add these rows, each as often as its diff says."""
        if table.num_rows:
            self.rows += int(pc.sum(table.column(DIFF).cast(pa.decimal128(38))).as_py() or 0)
            self.digest = (self.digest + digest_of_rows(table)) % MODULUS


@dataclass(slots=True)
class Contents:
    """What a reader finds: the rows as of `as_of`, and all updates with times before `since` brought to it."""

    as_of: int
    since: int
    snapshot: Tally
    updates: Tally

    @classmethod
    def of(cls, as_of: int, since: int) -> Contents:
        """Nothing yet."""
        return cls(as_of, since, Tally(), Tally())


class NaiveReader:
    """Reads parts of any of `schemas` as rows of the schema `current`.

    Errors of the blob store pass through; what cannot be decoded raises what pyarrow raises.
    """

    def __init__(self, blob: BlobReads, schemas: Mapping[int, ShardSchema], current: ShardSchema) -> None:
        self._blob = blob
        self._schemas = schemas
        self._current_schema = current
        self._target = current.updates_schema

    def read(self, parts: Iterable[tuple[Part, int]], drops: Sequence[RowDrop], found: Contents) -> None:
        """Add the rows of these parts, each with the time before which its rows are hidden."""
        floor = max([drop.cut for drop in drops if drop.at <= found.as_of], default=0)
        for part, clip in parts:
            for batch in self._batches(part):
                table = _between(self._current(batch, part), clip, None)
                found.updates.add(_advanced(table, found.since))
                found.snapshot.add(_between(table, floor, found.as_of).drop_columns([TIME]))

    def _batches(self, part: Part) -> Iterator[Any]:
        """The rows as they were written."""
        if part.key is None:
            schema = self._schemas[part.schema_id].updates_schema
            yield pa.ipc.read_record_batch(pa.py_buffer(part.data or b""), schema)
            return
        source = pa.PythonFile(_BlobFile(self._blob, part.key, part.size), mode="r")
        with pq.ParquetFile(source, pre_buffer=False) as file:
            for group in range(file.num_row_groups):  # never on Arrow's threads, as in `persist.parts.codec`
                yield file.read_row_group(group, use_threads=False)

    def _current(self, batch: Any, part: Part) -> pa.Table:
        """The rows in the current schema, at the time that the commit chose, if it did."""
        columns, own = [], self._schemas[part.schema_id]
        for field in self._target:
            at = batch.schema.get_field_index(_name_in(own, self._current_schema, field.name))
            if field.name == TIME and part.time is not None:
                columns.append(pa.repeat(pa.scalar(part.time, field.type), batch.num_rows))
            elif at < 0:
                default = self._current_schema.defaults.get(field.name, pa.scalar(None, field.type))
                columns.append(pa.repeat(default, batch.num_rows))
            else:
                columns.append(batch.column(at).cast(field.type))
        return pa.Table.from_arrays(columns, schema=pa.schema([field.with_nullable(True) for field in self._target]))


def _name_in(own: ShardSchema, current: ShardSchema, name: str) -> str:
    """What a column of the current schema is called in another one; "" where that has it not."""
    if name in (TIME, DIFF) or own.is_plain or current.is_plain:
        return name
    return own.name_of.get(current.id_of[name], "")


def _between(table: pa.Table, first: int, last: int | None) -> pa.Table:
    """The rows with times from `first` to `last`."""
    times = table.column(TIME)
    table = table.filter(pc.greater_equal(times, first))
    return table if last is None else table.filter(pc.less_equal(table.column(TIME), last))


def _advanced(table: pa.Table, since: int) -> pa.Table:
    """The rows with times before `since` brought to it."""
    at = table.schema.get_field_index(TIME)
    times = pc.max_element_wise(table.column(TIME), pa.scalar(since, pa.int64()))
    return table.set_column(at, table.schema.field(TIME), times)


class _BlobFile(io.RawIOBase):
    """A blob as a file that is read where it is asked for."""

    def __init__(self, blob: BlobReads, key: str, size: int) -> None:
        self._blob = blob
        self._key = key
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._position)
        length = left if size < 0 else min(size, left)
        data = self._blob.get_range(self._key, self._position, length) if length else b""
        self._position += len(data)
        return data
