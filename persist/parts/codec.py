"""Parts as bytes: inline parts (Arrow IPC) and Parquet files with their index, checksummed over every byte."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from msgspec import UNSET, UnsetType

from persist.core.batch import FORMAT_IPC, FORMAT_PARQUET, Part
from persist.core.errors import Corruption, UpgradeNeeded
from persist.core.ids import IdSource, PartId, mint
from persist.core.state import SchemaRecord
from persist.parts.column_types import check_nested_nulls, fill_hidden_nulls
from persist.parts.consolidate import join
from persist.parts.key_encoding import SortedKeys, lower_bound, successor, upper_bound
from persist.parts.memory_size import compact_buffers
from persist.parts.parquet_guard import CHUNKS_MAX, check_footer, check_metadata, chunk_start, leaves
from persist.parts.row_stats import KnownRows, KnownRowsCollector, Stats, known_of
from persist.parts.shard_schema import DIFF, TIME, ShardSchema
from persist.parts.sort_words import extremes, extremes_each, is_bytes, one_chunk

# The index of a Parquet part as it is written: JSON between the last row group and the Parquet footer.
#
# It may be anybody's: its size is bounded, and each value is compared with its type while it is decoded.


MAGIC = b"PRSTIDX1"
HEAD_BYTES = 12  # the mark, and how long the JSON is
FORMAT_VERSION = 1
FOREIGN_BYTES_MAX = 16 * 1024 * 1024  # of index and footer, where somebody else may have made them

ChunkEntry = tuple[int, int, int]  # where it begins, its bytes, its CRC-32


class RowGroupEntry(msgspec.Struct, gc=False):
    """What the index tells of one row group; keys are hexadecimal."""

    rows: int
    nbytes: int
    lower: str
    samples: list[str]
    upper: str | None
    chunks: list[ChunkEntry]
    known: list[int | bool] | UnsetType = UNSET
    twins: ChunkEntry | UnsetType = UNSET


class PartIndex(msgspec.Struct):
    """An index of this version."""

    has_one_time: bool
    row_groups: list[RowGroupEntry]


class _Version(msgspec.Struct):
    version: Any


_version = msgspec.json.Decoder(_Version)
_index = msgspec.json.Decoder(PartIndex)


def decode_index(part_id: str, tail: bytes, *, is_foreign: bool) -> tuple[PartIndex, bytes]:
    """The index of a part's tail, and the Parquet footer after it. Raises ValueError, UpgradeNeeded."""
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
        told = _index.decode(text)
    except msgspec.MsgspecError as error:
        raise ValueError(f"the index cannot be read: {error}") from error
    if is_foreign and sum(len(group.chunks) for group in told.row_groups) > CHUNKS_MAX:
        raise ValueError(f"there are more than {CHUNKS_MAX} column chunks; write smaller parts")
    return told, tail[end:]


# Parts as bytes: inline parts (Arrow IPC) and Parquet files, with checksums over every byte.
#
# A Parquet part is laid out as
#
#     row groups | twins | index | Parquet footer
#
# The index (JSON, written by us between the last row group and the Parquet footer, where readers of the format look at
# nothing) gives for every row group its rows, its bytes in memory, the encoded keys of its first, its last and some
# rows between, and a CRC-32 for every column chunk. Of parts that maintenance writes it also has the `KnownRows` of
# each row group, and where the twins of each row group are. Builds that know nothing of it pass it over.
# `Part.footer_size`/`footer_checksum` span index and footer. So a pruned read verifies exactly what it fetched: the
# tail by the Part, each column chunk by the index, and a whole file by `Part.checksum`. Page checksums are written as
# well, for other tools.


_T = TypeVar("_T")
ROW_GROUP_ROWS = 64 * 1024
ROW_GROUP_BYTES = 16 * 1024 * 1024  # in memory; wide rows make smaller row groups
STATISTICS_BYTES = 4096  # of a value, beyond which Parquet keeps no statistics of it
SAMPLES = 16  # keys a row group that its index names, for planning splits
_SAMPLE_ROWS = 4096
_DICTIONARY_SHARE = 0.25  # a column whose sample has fewer distinct values than this is dictionary-encoded
DATA_ERRORS = (pa.ArrowException, OSError, EOFError, ValueError, KeyError, IndexError, TypeError, OverflowError)


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """A column chunk's bytes `[start, start + size)` in the file."""

    start: int
    size: int
    checksum: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group: keys `[key_lower, key_upper]` as in Part; `nbytes` in memory; chunks in file column order.

    `samples` are lower bounds of the keys of rows at equal distances. `known` is None if the index does not record it.
    `twins` are the bytes that list the rows with the same key and value as the row before (`KnownRowsCollector`); None
    if the index does not list them.
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
    """A Parquet part's tail, read and verified."""

    metadata: Any
    row_groups: tuple[RowGroup, ...]
    leaves: Mapping[str, tuple[int, ...]]  # top-level column -> positions of its column chunks
    has_one_time: bool  # as written; a time that the commit chose may have made equal what differed


def encode_inline(table: pa.Table, schema: ShardSchema, schema_id: int, part_id: PartId) -> Part:
    """An inline part of `table` (at least one row, in `updates_schema`), in the order given."""
    batch = compact_buffers(_as_batch(table, schema))
    return _encoded(batch, len(table), _bounds(batch, schema), schema_id, part_id)


def encode_inline_parts(
    table: pa.Table, counts: Sequence[int], schema: ShardSchema, schema_id: int, ids: IdSource
) -> list[Part]:
    """As `encode_inline`, of so many rows each (at least one), which follow one another: a part each."""
    whole, start, parts = _as_batch(table, schema), 0, []
    if sum(counts) != whole.num_rows:
        raise Corruption(
            f"{whole.num_rows} rows would be encoded as {sum(counts)}; it is a fault of persist: report it"
        )
    bounds = extremes_each(whole.column(schema.key[0]), counts)
    places = pa.array(range(whole.num_rows), pa.int64())
    for count, (lower, upper) in zip(counts, bounds, strict=True):
        batch = compact_buffers(whole) if count == whole.num_rows else whole.take(places.slice(start, count))
        parts.append(_encoded(batch, count, _bounded(lower, upper, schema), schema_id, mint(PartId, ids)))
        start += count
    return parts


def _encoded(
    batch: pa.RecordBatch, count: int, bounds: tuple[bytes, bytes | None], schema_id: int, part_id: PartId
) -> Part:
    """The part of these rows, of which there have to be so many. They are in buffers of their own."""
    if batch.num_rows != count:
        raise Corruption(f"{count} rows were encoded as {batch.num_rows}; it is a fault of persist: report it")
    return _inline(batch, bounds, schema_id, part_id, batch.serialize().to_pybytes())


def describe_inline(batch: pa.RecordBatch, schema: ShardSchema, part: Part) -> Part:
    """What `encode_inline` would say of these rows in the bytes of `part`."""
    return _inline(batch, _bounds(batch, schema), part.schema_id, part.id, part.data or b"")


def _inline(
    batch: pa.RecordBatch, bounds: tuple[bytes, bytes | None], schema_id: int, part_id: PartId, data: bytes
) -> Part:
    return _part(
        batch, *bounds, part_id, schema_id, key=None, data=data, format=FORMAT_IPC, size=len(data),
        checksum=zlib.crc32(data), footer_size=0, footer_checksum=0, sorted=False,
    )  # fmt: skip


def decode_inline(part: Part, schemas: Mapping[int, ShardSchema]) -> pa.Table:
    """The rows of an inline part in its own schema, times and order as written. Raises Corruption."""
    data = part.data or b""
    schema = schema_of(part, schemas)
    if len(data) != part.size or zlib.crc32(data) != part.checksum:
        raise Corruption(f"inline part {part.id} does not match its checksum", part=str(part.id))
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema.updates_schema)
        batch.validate(full=True)  # offsets too: a reader must not follow one that leads out of the buffer
    except DATA_ERRORS as error:
        raise Corruption(f"inline part {part.id} cannot be decoded: {error}", part=str(part.id)) from error
    if batch.num_rows != part.rows:
        raise Corruption(f"inline part {part.id} has {batch.num_rows} rows, not {part.rows}", part=str(part.id))
    return pa.Table.from_batches([batch])


def part_label(part: Part) -> str:
    """A part in a message: its id, and where it lies."""
    return f"inline part {part.id}" if part.key is None else f"part {part.id} (blob {part.key})"


def at_part_time(table: pa.Table, part: Part) -> pa.Table:
    """The rows at the one time that the commit chose for the part, or at their own where it chose none."""
    return table if part.time is None else at_time(table, part.time)


def at_time(table: pa.Table, time: int) -> pa.Table:
    """The rows, all at one time."""
    index = table.schema.get_field_index(TIME)
    times = pa.repeat(pa.scalar(time, pa.int64()), len(table))
    return table.set_column(index, table.schema.field(TIME), times)


def schema_of(part: Part, schemas: Mapping[int, ShardSchema]) -> ShardSchema:
    """The schema that the part was written with. Raises Corruption when nobody knows it."""
    return _known(part, schemas)


def record_of(part: Part, schemas: Mapping[int, SchemaRecord]) -> SchemaRecord:
    """The record of the schema that the part was written with. Raises Corruption when nobody knows it."""
    return _known(part, schemas)


def _known(part: Part, schemas: Mapping[int, _T]) -> _T:
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
    """Writes one part, row group by row group. The rows must come consolidated and in order.

    With `tells` the index says what is `KnownRows` of each row group. Only maintenance may do so
    (`persist.parts.part_validation`).
    """

    def __init__(self, schema: ShardSchema, *, tells: bool = False) -> None:
        self._schema = schema
        self._teller = KnownRowsCollector(schema) if tells else None
        self._sink = _Sink()
        self._writer: Any = None
        self._groups: list[_Group] = []
        self._stats = Stats()

    @property
    def size(self) -> int:
        """Bytes encoded so far."""
        return self._sink.tell()

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self._groups)

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
        # Row groups of like parts are sampled at different places, so that their samples together are finer.
        step = max(1, len(table) // SAMPLES)
        rows = range(zlib.crc32(lower) % step, len(table), step)
        samples = tuple(lower_bound(keys[row], schema) for row in rows)
        known, twins = (None, b"") if self._teller is None else self._teller.told(table)
        upper = upper_bound(keys[len(table) - 1])
        self._groups.append(_Group(len(table), table.nbytes, lower, upper, samples, known, twins))
        self._stats.add(table)
        if table.schema != schema.updates_schema:
            table = table.cast(schema.updates_schema)
        for field in schema.strict:
            check_nested_nulls(table.column(field.name), field)
        if schema.strict:
            table = fill_hidden_nulls(table)
        self._writer.write_table(table, row_group_size=len(table))

    def finish(self, schema_id: int, part_id: PartId, key: str) -> tuple[Part, bytes]:
        """Close the file; the Part and all its bytes."""
        if self._writer is None:
            self._writer = _open_writer(self._sink, self._schema.updates_schema.empty_table(), self._schema)
        stats = self._stats
        for group in self._groups:
            if group.twins:
                group.twins_start = self._sink.tell()
                self._sink.write(group.twins)
        body_size = self._sink.tell()
        self._sink.tail = io.BytesIO()
        self._writer.close()
        footer = self._sink.tail.getvalue()
        body = self._sink.getbuffer()
        groups = self._groups or [_Group(0, 0, b"", b"", ())]  # bounds of a part without rows
        index = _encode_index(_read_metadata(footer), self._groups, body, stats.time_min == stats.time_max)
        checksum = zlib.crc32(index + footer, zlib.crc32(body))
        body.release()
        self._sink.tail = None
        self._sink.seek(0, io.SEEK_END)
        self._sink.write(index + footer)
        data = self._sink.getvalue()
        part = Part(
            id=part_id, key=key, data=None, format=FORMAT_PARQUET, schema_id=schema_id, rows=self.rows,
            size=len(data), checksum=checksum, footer_size=len(data) - body_size,
            footer_checksum=zlib.crc32(index + footer), key_lower=groups[0].key_lower,
            key_upper=groups[-1].key_upper,
            time=None, time_min=self._stats.time_min, time_max=self._stats.time_max,
            diff_min=self._stats.diff_min, diff_max=self._stats.diff_max, diff_sum=self._stats.known_sum, sorted=True,
        )  # fmt: skip
        return part, data


def row_group_rows(table: pa.Table) -> int:
    """Rows of a row group, by the mean size of the table's rows."""
    per_row = max(1, table.nbytes // max(1, len(table)))
    return int(max(1, min(ROW_GROUP_ROWS, ROW_GROUP_BYTES // per_row)))


def decode_footer(part: Part, tail: bytes, *, is_foreign: bool = False) -> Footer:
    """Read the last `footer_size` bytes of a part. Raises Corruption, UpgradeNeeded when a newer build wrote it.

    `is_foreign`: nobody knows yet who made it, so that it is looked at before Arrow is asked what it says.
    """
    if len(tail) != part.footer_size or zlib.crc32(tail) != part.footer_checksum:
        raise Corruption(f"the footer of {part_label(part)} does not match its checksum", part=str(part.id))
    try:
        told, footer = decode_index(part.id, tail, is_foreign=is_foreign)
        chunks = [len(group.chunks) for group in told.row_groups]
        if is_foreign:
            check_footer(footer[:-8], chunks)
        metadata = _read_metadata(footer)
        if is_foreign:
            check_metadata(footer[:-8], chunks, metadata)
        row_groups = tuple(map(_row_group, told.row_groups))
        arrow = metadata.schema.to_arrow_schema()
        columns = dict(zip(arrow.names, map(tuple, leaves(arrow)), strict=True))
        if TIME not in columns or DIFF not in columns:
            raise ValueError(f"the columns {TIME} and {DIFF} are not both there")
    except DATA_ERRORS as error:
        raise Corruption(f"the footer of {part_label(part)} cannot be decoded: {error}", part=str(part.id)) from error
    if sum(group.rows for group in row_groups) != part.rows:
        raise Corruption(f"{part_label(part)} does not have the {part.rows} rows it should have", part=str(part.id))
    return Footer(metadata, row_groups, columns, told.has_one_time)


def _row_group(told: RowGroupEntry) -> RowGroup:
    return RowGroup(
        told.rows,
        told.nbytes,
        bytes.fromhex(told.lower),
        None if told.upper is None else bytes.fromhex(told.upper),
        tuple(bytes.fromhex(sample) for sample in told.samples),
        tuple(ColumnChunk(*chunk) for chunk in told.chunks),
        None if told.known is UNSET else known_of(told.known),
        None if told.twins is UNSET else ColumnChunk(*told.twins),
    )


def empty_metadata(schema: ShardSchema) -> Any:
    """The Parquet metadata of a part of this schema that has no rows."""
    _, data = ParquetEncoder(schema).finish(1, PartId(""), "")
    return pq.read_metadata(pa.BufferReader(data))


def decode_row_groups(
    part: Part, footer: Footer, groups: Sequence[int], columns: Sequence[str], source: Any
) -> pa.Table:
    """Columns of some row groups, from a file-like `source` that holds their verified bytes. Raises Corruption.

    Never on Arrow's threads: they may let go of `source`, a Python object, when the interpreter has already begun to
    exit, which aborts the process (apache/arrow issues 33975 and 34314). Callers decode in parallel themselves.
    """
    try:
        file = pq.ParquetFile(source, metadata=footer.metadata, pre_buffer=False)
        # By position, because names with dots would be ambiguous.
        positions = [position for name in columns for position in footer.leaves[name]]
        return file.reader.read_row_groups(list(groups), column_indices=positions, use_threads=False)
    except DATA_ERRORS as error:
        raise Corruption(f"{part_label(part)} cannot be decoded: {error}", part=str(part.id)) from error


def decode_batches(
    part: Part, footer: Footer, groups: Sequence[int], columns: Sequence[str], source: Any, rows: int
) -> Iterator[pa.RecordBatch]:
    """Columns of some row groups, at most `rows` rows at a time; as `decode_row_groups` otherwise."""
    try:
        file = pq.ParquetFile(source, metadata=footer.metadata, pre_buffer=False)
        positions = [position for name in columns for position in footer.leaves[name]]
        yield from file.reader.iter_batches(rows, row_groups=list(groups), column_indices=positions, use_threads=False)
    except DATA_ERRORS as error:
        raise Corruption(f"{part_label(part)} cannot be decoded: {error}", part=str(part.id)) from error


def _open_writer(sink: _Sink, first: pa.Table, schema: ShardSchema) -> Any:
    dictionary, encodings = _encodings(first)
    roles = {"key": list(schema.key), "value": list(schema.value), "format": FORMAT_VERSION}
    counted = _counted(first)
    writer = pq.ParquetWriter(
        pa.PythonFile(sink, mode="w"), schema.updates_schema, version="2.6", compression="zstd", compression_level=1,
        use_dictionary=dictionary, column_encoding=encodings, write_statistics=counted, write_page_checksum=True,
    )  # fmt: skip
    writer.add_key_value_metadata({"persist": json.dumps(roles)})
    return writer


def _counted(table: pa.Table) -> list[str] | bool:
    """The columns of which the file has statistics: not those of large values, whose bounds Parquet would drop again.

    It would hold several copies of each meanwhile.
    """
    large = [
        field.name
        for field in table.schema
        if is_bytes(field.type) and (pc.max(pc.binary_length(table.column(field.name))).as_py() or 0) > STATISTICS_BYTES
    ]
    return [name for name in table.schema.names if name not in large] if large else True


def _encodings(table: pa.Table) -> tuple[list[str] | bool, dict[str, str]]:
    """Which columns to dictionary-encode, and how to encode the others, by a sample of the rows."""
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


def _encode_index(metadata: Any, groups: Sequence[_Group], body: memoryview, has_one_time: bool) -> bytes:
    described = []
    for number, group in enumerate(groups):
        row_group = metadata.row_group(number)
        chunks = []
        for position in range(row_group.num_columns):
            chunk = row_group.column(position)
            start, size = chunk_start(chunk), chunk.total_compressed_size
            chunks.append((start, size, zlib.crc32(body[start : start + size])))
        entry: dict[str, Any] = {
            "rows": group.rows,
            "nbytes": group.nbytes,
            "lower": group.key_lower.hex(),
            "samples": [sample.hex() for sample in group.samples],
            "upper": None if group.key_upper is None else group.key_upper.hex(),
            "chunks": chunks,
        }
        if group.known is not None:
            entry["known"] = group.known.as_told()
        if group.twins:
            entry["twins"] = (group.twins_start, len(group.twins), zlib.crc32(group.twins))
        described.append(entry)
    document = {"version": FORMAT_VERSION, "has_one_time": has_one_time, "row_groups": described}
    index = json.dumps(document, separators=(",", ":")).encode()
    return MAGIC + len(index).to_bytes(4, "little") + index


def _read_metadata(footer: bytes) -> Any:
    return pq.read_metadata(pa.BufferReader(footer))


@dataclass(slots=True)
class _Group:
    rows: int
    nbytes: int
    key_lower: bytes
    key_upper: bytes | None
    samples: tuple[bytes, ...]
    known: KnownRows | None = None
    twins: bytes = b""
    twins_start: int = 0


class _Sink(io.BytesIO):
    """A file in memory; while `tail` is set, what is written goes there instead."""

    tail: io.BytesIO | None = None

    def write(self, data: Any) -> int:
        return super().write(data) if self.tail is None else self.tail.write(data)

    def close(self) -> None:
        """Stay open: Arrow closes the file when the footer is written, and the bytes are still needed."""


def _part(batch: Any, lower: bytes, upper: bytes | None, part_id: PartId, schema_id: int, **fields: Any) -> Part:
    stats = Stats()
    stats.add(batch)
    return Part(
        id=part_id, schema_id=schema_id, rows=batch.num_rows, key_lower=lower, key_upper=upper, time=None,
        time_min=stats.time_min, time_max=stats.time_max, diff_min=stats.diff_min, diff_max=stats.diff_max,
        diff_sum=stats.known_sum, **fields,
    )  # fmt: skip


def _as_batch(table: pa.Table, schema: ShardSchema) -> pa.RecordBatch:
    """All rows as one batch, whichever columns have several chunks."""
    if not table.schema.equals(schema.updates_schema):
        table = table.cast(schema.updates_schema)
    batches = table.to_batches()
    if len(batches) == 1:
        return batches[0]
    return pa.RecordBatch.from_arrays([one_chunk(column) for column in table.columns], schema=schema.updates_schema)


def _bounds(batch: pa.RecordBatch, schema: ShardSchema) -> tuple[bytes, bytes | None]:
    """Bounds of unsorted rows: the least and greatest value of the first key column."""
    return _bounded(*extremes(batch.column(schema.key[0])), schema)


def _bounded(lower: bytes, upper: bytes, schema: ShardSchema) -> tuple[bytes, bytes | None]:
    """Bounds of the keys of rows whose first key columns lie between these."""
    exact = upper if len(schema.key) == 1 else successor(upper)
    return lower_bound(lower, schema), None if exact is None else upper_bound(exact)
