"""Rows in HTTP bodies: reading and writing Arrow IPC streams, Parquet, NDJSON and CSV."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet

from persist.codecs.csv_rows import csv_options, read_header, scan_csv, values_of_cells, write_csv
from persist.codecs.decode_limits import SMALL_BYTES, Allowance
from persist.codecs.json_rows import BOM, UNREADABLE, Absence, names_given, ndjson, read_ndjson
from persist.codecs.json_rows import read_each as read_json_each
from persist.codecs.parquet_files import read_bounded
from persist.core.errors import InvalidUsage
from persist.formats.http_messages import ARROW_STREAM
from persist.parts import DIFF, TIME, ShardSchema
from persist.parts.column_types import as_schema, check_input_types
from persist.parts.ipc_guard import check_schema, declared_sizes
from persist.parts.memory_size import is_surely_within, row_bytes, working_bytes
from persist.parts.value_order import one_chunk
from persist.parts.writer import UNASSIGNED_TIME

PARQUET = "application/vnd.apache.parquet"
NDJSON = "application/x-ndjson"
CSV = "text/csv"
MEDIA_TYPES = {"arrow": ARROW_STREAM, "parquet": PARQUET, "ndjson": NDJSON, "csv": CSV}
_ALIASES = {
    "application/vnd.apache.arrow.stream": "arrow",
    "application/vnd.apache.parquet": "parquet",
    "application/x-parquet": "parquet",
    "application/x-ndjson": "ndjson",
    "application/jsonl": "ndjson",
    "application/json": "ndjson",
    "text/csv": "csv",
}
_END_OF_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_NO_TIME = pa.scalar(UNASSIGNED_TIME, pa.int64())
DICTIONARIES_MAX = 1_000  # messages of an Arrow stream with a dictionary or a delta of one
NODE_BYTES = 512  # of the Arrow and Python objects of one column of one batch, besides its values


def format_of(media_type: str | None, chosen: str | None) -> str:
    """The format of a `format` parameter, else of a Content-Type or Accept header; arrow without either."""
    if chosen is not None:
        if chosen not in MEDIA_TYPES:
            raise InvalidUsage(f"format is {chosen!r}; it must be one of {', '.join(MEDIA_TYPES)}")
        return chosen
    for part in (media_type or "").split(","):
        name = _ALIASES.get(part.partition(";")[0].strip().lower())
        if name is not None:
            return name
    if media_type and not media_type.startswith(("*/*", "application/x-www-form-urlencoded", "application/octet")):
        raise InvalidUsage(f"the media type of rows is one of {', '.join(_ALIASES)}, not {media_type}")
    return "arrow"


def read(data: bytes, form: str, schema: ShardSchema, rows_max: int, allowed: Allowance | None = None) -> pa.Table:
    """The rows of a body. `allowed` limits their memory, including that of the cast to the shard's types.

    Raises InvalidUsage if the rows are invalid or more than `rows_max`; BodyTooLarge, Overloaded.
    """
    bound = _Bound(rows_max, allowed or Allowance())
    reader: Callable[[bytes, ShardSchema, _Bound], pa.Table] = {
        "arrow": _read_arrow,
        "parquet": _read_parquet,
        "ndjson": _read_ndjson,
        "csv": _read_csv,
    }[form]
    try:
        table = reader(data, schema, bound)
        bound.check_rows(table.num_rows)
        if not is_surely_within(table, schema.row_bytes, SMALL_BYTES):
            bound.allowed.reach(working_bytes(table, schema.updates_schema))
    except UNREADABLE as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        for name, _ in schema.former:
            if f"unknown field `{name}`" in reason:
                raise schema.no_column(name) from error
        raise InvalidUsage(f"the body cannot be read as {form}: {reason}; nothing was written") from error
    return table


def read_each(
    bodies: Sequence[bytes], schema: ShardSchema, rows_max: int, allowed: Allowance
) -> tuple[pa.Table, list[int | None]]:
    """The rows of the NDJSON bodies of several inserts, concatenated, and the row count of each body.

    The rows are in `updates_schema`, without times. `schema` is flat, and each body small. A count of None: the body's
    rows are left out, and `read` or the insert reports its error. Raises InvalidUsage if an error cannot be attributed
    to one body; BodyTooLarge, Overloaded.
    """
    texts = [data.removeprefix(BOM) for data in bodies]
    wanted = schema.updates_schema
    try:
        allowed.spend(sum(map(len, texts)))
        columns, diffs, counts = read_json_each(
            texts, wanted, rows_max, allowed.spend, Absence(schema.defaults, schema.required)
        )
        times = pa.repeat(_NO_TIME, len(diffs))
        table = pa.Table.from_arrays([*columns, times, pa.array(diffs, pa.int64())], schema=wanted)
        table.validate(full=True)
        if not is_surely_within(table, schema.row_bytes, SMALL_BYTES):
            allowed.reach(working_bytes(table, wanted))
    except UNREADABLE as error:
        raise InvalidUsage(f"one of the bodies cannot be read: {error}") from error
    schema.check_values(table)
    return table, counts


@dataclass(frozen=True, slots=True)
class _Bound:
    """The limits of the rows of a body."""

    rows_max: int
    allowed: Allowance

    def check_rows(self, count: int) -> None:
        if count > self.rows_max:
            raise InvalidUsage(f"the body holds {count} rows; send at most {self.rows_max} at once")


def read_names(
    data: bytes, form: str, delete_column: str | None, allowed: Allowance | None = None
) -> tuple[str, ...] | None:
    """The columns of the rows of an NDJSON body; None for the forms that carry a schema.

    Raises InvalidUsage, BodyTooLarge.
    """
    if form != "ndjson":
        return None
    try:
        return names_given(data.removeprefix(BOM), delete_column, None if allowed is None else allowed.spend)
    except UNREADABLE as error:
        raise InvalidUsage(f"the body cannot be read as ndjson: {error}; nothing was written") from error


def _read_arrow(data: bytes, _schema: ShardSchema, bound: _Bound) -> pa.Table:
    if not data.endswith(_END_OF_STREAM):  # Arrow itself accepts a stream that is cut between two messages
        raise InvalidUsage(
            "the body was read as Arrow but has no end-of-stream marker: it was cut off, or has another format, which "
            "its Content-Type must name, such as application/x-ndjson; nothing was written"
        )
    check_schema(data)
    _check_declared(data, bound)
    source = pa.BufferReader(data)
    with pa.ipc.open_stream(source) as reader:
        check_input_types(reader.schema)
        table = reader.read_all()
    if source.tell() < len(data):
        raise InvalidUsage("the body has data after the end of its Arrow stream: send one stream; nothing was written")
    table.validate(full=True)
    return table


def _check_declared(data: bytes, bound: _Bound) -> None:
    """Count the memory that a stream declares, before Arrow allocates it."""
    for declared in declared_sizes(data):
        bound.check_rows(declared.rows)
        bound.allowed.reach(declared.bytes + declared.nodes * NODE_BYTES)
        if declared.dictionaries > DICTIONARIES_MAX:
            raise InvalidUsage(f"the body has more than {DICTIONARIES_MAX} messages with dictionaries; send one")


def _read_parquet(data: bytes, _schema: ShardSchema, bound: _Bound) -> pa.Table:
    table = read_bounded(data, bound.allowed)
    table.validate(full=True)
    return table


def _read_ndjson(data: bytes, schema: ShardSchema, bound: _Bound) -> pa.Table:
    """The multiplicity defaults to 1. The column of times is dropped if no row has a time."""
    data = data.removeprefix(BOM)
    bound.allowed.spend(len(data))  # for the texts that are copied from it
    absence = Absence(schema.defaults, schema.required)
    table = read_ndjson(data, schema.updates_schema, bound.rows_max, bound.allowed.spend, absence)
    if table.column(TIME).null_count == table.num_rows:
        table = table.drop_columns([TIME])
    index = table.schema.get_field_index(DIFF)
    return table.set_column(index, DIFF, pa.compute.fill_null(table.column(DIFF), 1))


def _read_csv(data: bytes, schema: ShardSchema, bound: _Bound) -> pa.Table:
    """Only an unquoted empty cell is null."""
    names = read_header(data)
    fields = {field.name: field for field in schema.updates_schema}
    unknown = [name for name in names if name not in fields]
    if unknown:
        raise schema.no_column(unknown[0])
    wanted, scan = [fields[name] for name in names], scan_csv(data)
    bound.allowed.reach(scan.lines * row_bytes(pa.schema(wanted)) + 2 * len(data))  # parsed cells, and texts
    parse, convert = csv_options(names, wanted, scan.has_hex)
    read = pa.csv.ReadOptions(block_size=len(data) or 1)  # one block: a cell must not span two
    table = pa.csv.read_csv(io.BytesIO(data), read, parse, convert)
    columns = [values_of_cells(one_chunk(table.column(name)), fields[name], bound.allowed.spend) for name in names]
    return pa.Table.from_arrays(columns, names=names)


def write(tables: Iterator[pa.Table], empty: pa.Table, form: str) -> Iterator[bytes]:
    """The tables, all with the columns of `empty`, as one stream of that format, chunk by chunk."""
    if form == "ndjson":
        yield from map(ndjson, tables)
    elif form == "csv":
        first = next(tables, empty)  # before the header, so that a read error does not look like an empty table
        yield write_csv(first, is_first=True)
        yield from map(write_csv, tables)
    else:
        sink = io.BytesIO()
        with _writer(pa.PythonFile(sink, mode="w"), empty.schema, form) as writer:
            for table in tables:
                writer.write_table(as_schema(table, empty.schema))
                yield _drain(sink)
        yield _drain(sink)


def _writer(sink: pa.PythonFile, schema: pa.Schema, form: str) -> Any:
    if form == "arrow":
        return pa.ipc.new_stream(sink, schema)
    return pa.parquet.ParquetWriter(sink, schema, compression="zstd")


def _drain(sink: io.BytesIO) -> bytes:
    data = sink.getvalue()
    sink.seek(0)
    sink.truncate()
    return data
