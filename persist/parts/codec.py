"""Parts as bytes: inline parts (Arrow IPC) and Parquet files with their index, with checksums over every byte.

A Parquet part has the layout

    row groups | twins | index | Parquet footer

The index is JSON between the last row group and the Parquet footer, which other Parquet readers ignore. For every row
group it records the number of its rows, their bytes in memory, the encoded keys of the first, the last and some other
rows, and a CRC-32 for every column chunk. For parts that maintenance writes it also has the `KnownRows` of each row
group and the location of its twins. `Part.footer_size` and `footer_checksum` cover index and footer. So a pruned read
verifies exactly what it fetched: the tail by the Part, each column chunk by the index, and a whole file by
`Part.checksum`. Page checksums are written as well, for other tools.
"""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec import UNSET, UnsetType

from persist.core.batch import FORMAT_IPC, FORMAT_PARQUET, Part
from persist.core.errors import Corruption, UpgradeNeeded
from persist.core.ids import PartId
from persist.core.record import Record
from persist.parts.column_types import check_nested_nulls, fill_hidden_nulls
from persist.parts.consolidate import at_time, join
from persist.parts.key_encoding import SortedKeys, lower_bound, successor, upper_bound
from persist.parts.memory_size import compact_buffers
from persist.parts.parquet_guard import CHUNKS_MAX, check_footer, check_metadata, chunk_start, leaves
from persist.parts.row_stats import KnownRows, KnownRowsCollector, Stats
from persist.parts.shard_schema import DIFF, TIME, ShardSchema
from persist.parts.value_order import extremes, is_bytes, one_chunk

MAGIC = b"PRSTIDX1"
HEAD_BYTES = 12  # the magic, and the length of the JSON
FORMAT_VERSION = 1
FOREIGN_BYTES_MAX = 16 * 1024 * 1024  # of the index and footer of an untrusted part
ROW_GROUP_ROWS = 64 * 1024
ROW_GROUP_BYTES = 16 * 1024 * 1024  # in memory; wide rows make smaller row groups
STATISTICS_BYTES = 4096  # of a value, beyond which Parquet keeps no statistics of it
SAMPLES = 16  # keys per row group in the index, for planning splits
_SAMPLE_ROWS = 4096
_DICTIONARY_SHARE = 0.25  # a column whose sample has a lower share of distinct values is dictionary-encoded
DATA_ERRORS = (pa.ArrowException, OSError, EOFError, ValueError, KeyError, IndexError, TypeError, OverflowError)


class ColumnChunk(Record, frozen=True):
    """A column chunk's bytes `[start, start + size)` in the file, and their CRC-32."""

    start: int
    size: int
    checksum: int


class RowGroupEntry(msgspec.Struct, gc=False):
    """The index entry of one row group; keys are hexadecimal."""

    rows: int
    nbytes: int
    lower: str
    samples: list[str]
    upper: str | None
    chunks: list[ColumnChunk]
    known: KnownRows | UnsetType = UNSET
    twins: ColumnChunk | UnsetType = UNSET


class PartIndex(msgspec.Struct):
    has_one_time: bool
    row_groups: list[RowGroupEntry]


class _Version(msgspec.Struct):
    version: Any


_version = msgspec.json.Decoder(_Version)
_index = msgspec.json.Decoder(PartIndex)


def decode_index(part_id: str, tail: bytes, *, is_foreign: bool) -> tuple[PartIndex, bytes]:
    """The index in a part's tail, and the Parquet footer after it. Raises ValueError, UpgradeNeeded.

    An untrusted index has limits, and the types of its values are checked.
    """
    if is_foreign and len(tail) > FOREIGN_BYTES_MAX:
        raise ValueError(f"index and footer take more than {FOREIGN_BYTES_MAX} bytes; write smaller parts")
    if tail[:8] != MAGIC:
        raise ValueError("no index")
    end = HEAD_BYTES + int.from_bytes(tail[8:HEAD_BYTES], "little")
    text = tail[HEAD_BYTES:end]
    try:
        version = _version.decode(text).version
        if version != FORMAT_VERSION:
            raise UpgradeNeeded(f"part {part_id} has version {version!r}; this persist knows {FORMAT_VERSION}")
        index = _index.decode(text)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the index cannot be read: {error}") from error
    if is_foreign and sum(len(group.chunks) for group in index.row_groups) > CHUNKS_MAX:
        raise ValueError(f"there are more than {CHUNKS_MAX} column chunks; write smaller parts")
    return index, tail[end:]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group: keys `[key_lower, key_upper]` as in Part; `nbytes` in memory; chunks in file column order.

    `samples` are lower bounds of the keys of equidistant rows. `known` is None if the index does not record it. `twins`
    are the bytes that list the twins (`KnownRowsCollector`); None if they are not listed.
    """

    rows: int
    nbytes: int
    key_lower: bytes
    key_upper: bytes | None
    samples: tuple[bytes, ...]
    chunks: tuple[ColumnChunk, ...]
    known: KnownRows | None = None
    twins: ColumnChunk | None = None


@dataclass(frozen=True)
class Footer:
    """A verified tail of a Parquet part."""

    metadata: Any
    row_groups: tuple[RowGroup, ...]
    leaves: Mapping[str, tuple[int, ...]]  # top-level column -> positions of its column chunks
    has_one_time: bool  # as written, before the commit assigned a time


def encode_inline(table: pa.Table, schema: ShardSchema, schema_id: int, part_id: PartId) -> Part:
    """An inline part of `table` (at least one row, in `updates_schema`), in the given order."""
    return encode_inline_parts(table, [len(table)], schema, schema_id, [part_id])[0]


def encode_inline_parts(
    table: pa.Table, counts: Sequence[int], schema: ShardSchema, schema_id: int, part_ids: Sequence[PartId]
) -> list[Part]:
    """As `encode_inline`, one part for each of `counts` consecutive rows (at least one)."""
    whole, start, parts = _as_batch(table, schema), 0, []
    if sum(counts) != whole.num_rows:
        raise Corruption(f"{whole.num_rows} rows would be encoded as {sum(counts)}; this is a bug: report it")
    places = pa.array(range(whole.num_rows), pa.int64())
    for count, part_id, bounds in zip(counts, part_ids, _bounds(whole, counts, schema), strict=True):
        batch = compact_buffers(whole) if count == whole.num_rows else whole.take(places.slice(start, count))
        if batch.num_rows != count:
            raise Corruption(f"{count} rows were encoded as {batch.num_rows}; this is a bug: report it")
        parts.append(_inline(batch, bounds, schema_id, part_id, batch.serialize().to_pybytes()))
        start += count
    return parts


def describe_inline(batch: pa.RecordBatch, schema: ShardSchema, part: Part) -> Part:
    """The part that `encode_inline` returns for these rows, with the bytes of `part`."""
    [bounds] = _bounds(batch, [batch.num_rows], schema)
    return _inline(batch, bounds, part.schema_id, part.id, part.data or b"")


def _inline(
    batch: pa.RecordBatch, bounds: tuple[bytes, bytes | None], schema_id: int, part_id: PartId, data: bytes
) -> Part:
    stats = Stats()
    stats.add(batch)
    return Part(
        id=part_id, key=None, data=data, format=FORMAT_IPC, schema_id=schema_id, rows=batch.num_rows, size=len(data),
        checksum=zlib.crc32(data), footer_size=0, footer_checksum=0, key_lower=bounds[0], key_upper=bounds[1],
        sorted=False, time=None, **stats.of_part(),
    )  # fmt: skip


def decode_inline(part: Part, schemas: Mapping[int, ShardSchema]) -> pa.Table:
    """The rows of an inline part in its own schema, times and order as written. Raises Corruption."""
    data = part.data or b""
    schema = schema_of(part, schemas)
    if len(data) != part.size or zlib.crc32(data) != part.checksum:
        raise Corruption(f"inline part {part.id} does not match its checksum", part=str(part.id))
    with decoding(part):
        batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema.updates_schema)
        batch.validate(full=True)  # including offsets, which must not lead out of their buffers
    if batch.num_rows != part.rows:
        raise Corruption(f"inline part {part.id} has {batch.num_rows} rows, not {part.rows}", part=str(part.id))
    return pa.Table.from_batches([batch])


def part_label(part: Part) -> str:
    """A part in a message: its id and its location."""
    return f"inline part {part.id}" if part.key is None else f"part {part.id} (blob {part.key})"


def at_part_time(table: pa.Table, part: Part) -> pa.Table:
    """The rows at the time that the commit assigned to the part, or at their own times if it assigned none."""
    return table if part.time is None else at_time(table, part.time)


def schema_of(part: Part, schemas: Mapping[int, ShardSchema]) -> ShardSchema:
    """The schema that the part was written with. Raises Corruption if it is unknown."""
    if part.schema_id not in schemas:
        raise Corruption(
            f"{part_label(part)} has schema {part.schema_id}, which is not registered or not compatible with its "
            "predecessor",
            part=str(part.id),
        )
    return schemas[part.schema_id]


def encode_parquet(
    table: pa.Table, schema: ShardSchema, schema_id: int, part_id: PartId, key: str
) -> tuple[Part, bytes]:
    """A Parquet part of a consolidated, sorted table (at least one row), and its bytes."""
    encoder = ParquetEncoder(schema)
    encoder.write(table)
    return encoder.finish(schema_id, part_id, key)


class ParquetEncoder:
    """Writes one part, row group by row group. The rows must be consolidated and in order.

    `with_statistics`: record the `KnownRows` of each row group in the index. Only maintenance may do so
    (`persist.parts.part_validation`).
    """

    def __init__(self, schema: ShardSchema, *, with_statistics: bool = False) -> None:
        self._schema = schema
        self._collector = KnownRowsCollector(schema) if with_statistics else None
        self._sink = _Sink()
        self._writer: Any = None
        self._groups: list[tuple[RowGroupEntry, bytes]] = []  # with their twins
        self._bounds: tuple[bytes, bytes | None] | None = None
        self._stats = Stats()

    @property
    def size(self) -> int:
        """Bytes encoded so far."""
        return self._sink.tell()

    def write(self, table: pa.Table) -> None:
        """Write the rows as row groups of at most `ROW_GROUP_ROWS` rows and about `ROW_GROUP_BYTES` bytes."""
        step = row_group_rows(table)
        for start in range(0, len(table), step):
            self._write_group(join([table.slice(start, step)]))

    def _write_group(self, table: pa.Table) -> None:
        schema = self._schema
        if self._writer is None:
            self._writer = _open_writer(self._sink, table, schema)
        keys = SortedKeys(table, schema.key)
        lower = lower_bound(keys[0], schema)
        # Row groups of similar parts are sampled at different places, so that their samples together are finer.
        step = max(1, len(table) // SAMPLES)
        rows = range(zlib.crc32(lower) % step, len(table), step)
        samples = tuple(lower_bound(keys[row], schema) for row in rows)
        known, twins = (None, b"") if self._collector is None else self._collector.describe(table)
        upper = upper_bound(keys[len(table) - 1])
        self._bounds = (lower if self._bounds is None else self._bounds[0]), upper
        entry = RowGroupEntry(
            len(table),
            table.nbytes,
            lower.hex(),
            [sample.hex() for sample in samples],
            None if upper is None else upper.hex(),
            [],
            UNSET if known is None else known,
        )
        self._groups.append((entry, twins))
        self._stats.add(table)
        if table.schema != schema.updates_schema:
            table = table.cast(schema.updates_schema)
        for field in schema.with_required_children:
            check_nested_nulls(table.column(field.name), field)
        if schema.with_required_children:
            table = fill_hidden_nulls(table)
        self._writer.write_table(table, row_group_size=len(table))

    def finish(self, schema_id: int, part_id: PartId, key: str) -> tuple[Part, bytes]:
        """Close the file. Returns the Part and its bytes."""
        if self._writer is None:
            self._writer = _open_writer(self._sink, self._schema.updates_schema.empty_table(), self._schema)
        stats = self._stats
        for entry, twins in self._groups:
            if twins:
                entry.twins = ColumnChunk(self._sink.tell(), len(twins), zlib.crc32(twins))
                self._sink.write(twins)
        body_size = self._sink.tell()
        self._sink.tail = io.BytesIO()
        self._writer.close()
        footer = self._sink.tail.getvalue()
        body = self._sink.getbuffer()
        entries = [entry for entry, _ in self._groups]
        index = _encode_index(_read_metadata(footer), entries, body, stats.time_min == stats.time_max)
        key_lower, key_upper = self._bounds or (b"", b"")
        checksum = zlib.crc32(index + footer, zlib.crc32(body))
        body.release()
        self._sink.tail = None
        self._sink.seek(0, io.SEEK_END)
        self._sink.write(index + footer)
        data = self._sink.getvalue()
        part = Part(
            id=part_id, key=key, data=None, format=FORMAT_PARQUET, schema_id=schema_id,
            rows=sum(entry.rows for entry in entries), size=len(data), checksum=checksum, sorted=True,
            footer_size=len(data) - body_size, footer_checksum=zlib.crc32(index + footer), key_lower=key_lower,
            key_upper=key_upper, time=None, **stats.of_part(),
        )  # fmt: skip
        return part, data


def row_group_rows(table: pa.Table) -> int:
    """The number of rows of a row group, by the mean size of the table's rows."""
    per_row = max(1, table.nbytes // max(1, len(table)))
    return int(max(1, min(ROW_GROUP_ROWS, ROW_GROUP_BYTES // per_row)))


def decode_footer(part: Part, tail: bytes, *, is_foreign: bool = False) -> Footer:
    """Read the last `footer_size` bytes of a part. Raises Corruption; UpgradeNeeded if a newer version wrote it.

    `is_foreign`: the part is untrusted and is checked before Arrow reads it.
    """
    if len(tail) != part.footer_size or zlib.crc32(tail) != part.footer_checksum:
        raise Corruption(f"the footer of {part_label(part)} does not match its checksum", part=str(part.id))
    try:
        index, footer = decode_index(part.id, tail, is_foreign=is_foreign)
        chunks = [len(group.chunks) for group in index.row_groups]
        if is_foreign:
            check_footer(footer[:-8], chunks)
        metadata = _read_metadata(footer)
        if is_foreign:
            check_metadata(footer[:-8], chunks, metadata)
        row_groups = tuple(map(_row_group, index.row_groups))
        arrow = metadata.schema.to_arrow_schema()
        columns = dict(zip(arrow.names, map(tuple, leaves(arrow)), strict=True))
        if TIME not in columns or DIFF not in columns:
            raise ValueError(f"the column {TIME} or {DIFF} is missing")
    except DATA_ERRORS as error:
        raise Corruption(f"the footer of {part_label(part)} cannot be decoded: {error}", part=str(part.id)) from error
    if sum(group.rows for group in row_groups) != part.rows:
        raise Corruption(f"{part_label(part)} does not have the {part.rows} rows it should have", part=str(part.id))
    return Footer(metadata, row_groups, columns, index.has_one_time)


def _row_group(entry: RowGroupEntry) -> RowGroup:
    return RowGroup(
        entry.rows,
        entry.nbytes,
        bytes.fromhex(entry.lower),
        None if entry.upper is None else bytes.fromhex(entry.upper),
        tuple(bytes.fromhex(sample) for sample in entry.samples),
        tuple(entry.chunks),
        None if entry.known is UNSET else entry.known,
        None if entry.twins is UNSET else entry.twins,
    )


def empty_metadata(schema: ShardSchema) -> Any:
    """The Parquet metadata of a part of this schema without rows."""
    _, data = ParquetEncoder(schema).finish(1, PartId(""), "")
    return pq.read_metadata(pa.BufferReader(data))


def decode_row_groups(
    part: Part, footer: Footer, groups: Sequence[int], columns: Sequence[str], source: Any
) -> pa.Table:
    """Columns of some row groups, from a file-like `source` that holds their verified bytes. Raises Corruption.

    Arrow's threads are not used: they may release `source`, a Python object, while the interpreter exits, which aborts
    the process (apache/arrow issues 33975 and 34314). Callers decode in parallel themselves.
    """
    with decoding(part):
        reader, positions = _open_columns(footer, columns, source)
        return reader.read_row_groups(list(groups), column_indices=positions, use_threads=False)


def decode_batches(
    part: Part, footer: Footer, groups: Sequence[int], columns: Sequence[str], source: Any, rows: int
) -> Iterator[pa.RecordBatch]:
    """As `decode_row_groups`, at most `rows` rows at a time."""
    with decoding(part):
        reader, positions = _open_columns(footer, columns, source)
        yield from reader.iter_batches(rows, row_groups=list(groups), column_indices=positions, use_threads=False)


def _open_columns(footer: Footer, columns: Sequence[str], source: Any) -> tuple[Any, list[int]]:
    """A reader, and the positions of the columns: their names may be ambiguous if they contain dots."""
    reader = pq.ParquetFile(source, metadata=footer.metadata, pre_buffer=False).reader
    return reader, [position for name in columns for position in footer.leaves[name]]


@contextmanager
def decoding(part: Part) -> Iterator[None]:
    """Report errors of decoding as Corruption."""
    try:
        yield
    except DATA_ERRORS as error:
        raise Corruption(f"{part_label(part)} cannot be decoded: {error}", part=str(part.id)) from error


def _open_writer(sink: _Sink, first: pa.Table, schema: ShardSchema) -> Any:
    dictionary, encodings = _encodings(first)
    roles = {"key": list(schema.key), "value": list(schema.value), "format": FORMAT_VERSION}
    writer = pq.ParquetWriter(
        pa.PythonFile(sink, mode="w"), schema.updates_schema, version="2.6", compression="zstd", compression_level=1,
        use_dictionary=dictionary, column_encoding=encodings, write_statistics=_with_statistics(first),
        write_page_checksum=True,
    )  # fmt: skip
    writer.add_key_value_metadata({"persist": json.dumps(roles)})
    return writer


def _with_statistics(table: pa.Table) -> list[str] | bool:
    """The columns with statistics: not those with large values, whose bounds Parquet drops after copying them."""
    large = [
        field.name
        for field in table.schema
        if is_bytes(field.type) and (pc.max(pc.binary_length(table.column(field.name))).as_py() or 0) > STATISTICS_BYTES
    ]
    return [name for name in table.schema.names if name not in large] if large else True


def _encodings(table: pa.Table) -> tuple[list[str] | bool, dict[str, str]]:
    """The columns to dictionary-encode, and the encodings of the others, by a sample of the rows."""
    dictionary: list[str] = []
    encodings: dict[str, str] = {}
    step = max(1, len(table) // _SAMPLE_ROWS)
    sample = np.arange(0, len(table), step)
    for field in table.schema:
        kind = field.type
        if pa.types.is_nested(kind) or pa.types.is_boolean(kind):
            continue
        values = one_chunk(table.column(field.name))
        if step > 1:
            values = values.take(pa.array(sample))
        distinct = pc.count_distinct(values, mode="all").as_py()
        if distinct <= max(1, len(sample) * _DICTIONARY_SHARE):
            dictionary.append(field.name)
        elif is_bytes(kind):
            encodings[field.name] = "DELTA_LENGTH_BYTE_ARRAY"
        elif pa.types.is_integer(kind) or pa.types.is_temporal(kind):
            encodings[field.name] = "DELTA_BINARY_PACKED"
    return dictionary or False, encodings


def _encode_index(metadata: Any, entries: Sequence[RowGroupEntry], body: memoryview, has_one_time: bool) -> bytes:
    """The index, with the checksums of the column chunks in the file's body."""
    for number, entry in enumerate(entries):
        row_group = metadata.row_group(number)
        for chunk in map(row_group.column, range(row_group.num_columns)):
            start, size = chunk_start(chunk), chunk.total_compressed_size
            entry.chunks.append(ColumnChunk(start, size, zlib.crc32(body[start : start + size])))
    document = {"version": FORMAT_VERSION, "has_one_time": has_one_time, "row_groups": entries}
    index = msgspec.json.encode(document)
    return MAGIC + len(index).to_bytes(4, "little") + index


def _read_metadata(footer: bytes) -> Any:
    return pq.read_metadata(pa.BufferReader(footer))


class _Sink(io.BytesIO):
    """A file in memory; while `tail` is set, writes go there instead."""

    tail: io.BytesIO | None = None

    def write(self, data: Any) -> int:
        return super().write(data) if self.tail is None else self.tail.write(data)

    def close(self) -> None:
        """Stay open: Arrow closes the file after writing the footer, but the bytes are still needed."""


def _as_batch(table: pa.Table, schema: ShardSchema) -> pa.RecordBatch:
    """All rows as one batch."""
    if not table.schema.equals(schema.updates_schema):
        table = table.cast(schema.updates_schema)
    batches = table.to_batches()
    if len(batches) == 1:
        return batches[0]
    return pa.RecordBatch.from_arrays([one_chunk(column) for column in table.columns], schema=schema.updates_schema)


def _bounds(batch: pa.RecordBatch, counts: Sequence[int], schema: ShardSchema) -> Iterator[tuple[bytes, bytes | None]]:
    """Bounds of each of `counts` unsorted rows: the least and greatest value of the first key column."""
    for lower, upper in extremes(batch.column(schema.key[0]), counts):
        exact = upper if len(schema.key) == 1 else successor(upper)
        yield lower_bound(lower, schema), None if exact is None else upper_bound(exact)
