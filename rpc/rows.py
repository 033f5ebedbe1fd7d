"""Rows in bodies: Arrow IPC streams, Parquet, NDJSON and CSV, in and out."""

from __future__ import annotations

import base64
import csv
import io
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from persist.core.errors import InvalidUsage
from persist.formats.http_messages import ARROW_STREAM
from persist.parts import DIFF, TIME, ShardSchema

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
_UNREADABLE = (pa.ArrowException, OSError, ValueError, OverflowError, KeyError, TypeError)
_JSON_BLOCK_BYTES = 1 << 20


def format_of(media_type: str | None, chosen: str | None) -> str:
    """The format that a `format` parameter or else a Content-Type or Accept header names; arrow without either."""
    if chosen is not None:
        if chosen not in MEDIA_TYPES:
            raise InvalidUsage(f"format is {chosen!r}; it must be one of {', '.join(MEDIA_TYPES)}")
        return chosen
    for one in (media_type or "").split(","):
        name = _ALIASES.get(one.partition(";")[0].strip().lower())
        if name is not None:
            return name
    if media_type and not media_type.startswith(("*/*", "application/x-www-form-urlencoded", "application/octet")):
        raise InvalidUsage(f"rows travel as one of {', '.join(_ALIASES)}, not as {media_type}")
    return "arrow"


def read(data: bytes, form: str, schema: ShardSchema, rows_max: int) -> pa.Table:
    """The rows of a body. Raises InvalidUsage when they cannot be read, or are more than `rows_max`."""
    reader: Callable[[bytes, ShardSchema], pa.Table] = {
        "arrow": _read_arrow,
        "parquet": _read_parquet,
        "ndjson": _read_ndjson,
        "csv": _read_csv,
    }[form]
    try:
        table = reader(data, schema)
    except _UNREADABLE as error:
        said = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidUsage(f"the body cannot be read as {form}: {said}; nothing was written") from error
    if table.num_rows > rows_max:
        raise InvalidUsage(f"the body holds {table.num_rows} rows; send at most {rows_max} at once")
    return table


def _read_arrow(data: bytes, _schema: ShardSchema) -> pa.Table:
    if not data.endswith(_END_OF_STREAM):  # Arrow itself takes a stream that ends between two messages for whole
        raise InvalidUsage("the Arrow stream does not end with its end-of-stream mark: it was cut; nothing was written")
    with pa.ipc.open_stream(pa.py_buffer(data)) as reader:
        table = reader.read_all()
    table.validate(full=True)
    return table


def _read_parquet(data: bytes, _schema: ShardSchema) -> pa.Table:
    return pa.parquet.read_table(pa.BufferReader(data), partitioning=None)


def _read_ndjson(data: bytes, schema: ShardSchema) -> pa.Table:
    if not data.strip():
        return schema.arrow.empty_table()
    if not data.lstrip().startswith(b"{"):
        raise InvalidUsage("NDJSON rows are objects, one on each line")
    fields = list(schema.updates_schema)
    text = [pa.field(f.name, _as_json(f.type)) for f in fields]
    options = pa.json.ParseOptions(explicit_schema=pa.schema(text), unexpected_field_behavior="error")
    longest = max(_JSON_BLOCK_BYTES, len(max(data.split(b"\n"), key=len)) + 2)
    block = pa.json.ReadOptions(use_threads=False, block_size=longest)
    table = pa.json.read_json(io.BytesIO(data), read_options=block, parse_options=options)
    return _without_blanks(_from_text(table, fields))


def _without_blanks(table: pa.Table) -> pa.Table:
    """Rows that give no multiplicity have 1; a column of times that no row gives is absent."""
    if table.column(TIME).null_count == table.num_rows:
        table = table.drop_columns([TIME])
    index = table.schema.get_field_index(DIFF)
    return table.set_column(index, DIFF, pa.compute.fill_null(table.column(DIFF), 1))


def _as_json(kind: pa.DataType) -> pa.DataType:
    """The type in which a column is read from text; bytes are written as base64."""
    return pa.string() if _is_binary(kind) or pa.types.is_decimal(kind) else kind


def _is_binary(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
        or types.is_binary_view(kind)
    )


def _from_text(table: pa.Table, fields: Sequence[pa.Field]) -> pa.Table:
    columns = []
    kept = [field for field in fields if field.name in table.schema.names]
    for field in kept:
        column = table.column(field.name)
        if _is_binary(field.type):
            values = [None if v is None else base64.b64decode(v, validate=True) for v in column.to_pylist()]
            column = pa.chunked_array([pa.array(values, pa.binary())]).cast(field.type)
        elif column.type != field.type:
            column = column.cast(field.type)
        columns.append(column)
    return pa.Table.from_arrays(columns, names=[field.name for field in kept])


def _read_csv(data: bytes, schema: ShardSchema) -> pa.Table:
    head = data.split(b"\n", 1)[0].decode("utf-8")
    names = next(csv.reader([head.rstrip("\r")]), [])
    known = {field.name: field for field in schema.updates_schema}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidUsage(f"the shard has no column {unknown[0]!r}; its columns are {schema.arrow.names}")
    types = {name: _as_json(known[name].type) for name in names}
    options = pa.csv.ConvertOptions(column_types=types, strings_can_be_null=True, quoted_strings_can_be_null=False)
    parse = pa.csv.ParseOptions(newlines_in_values=True)
    table = pa.csv.read_csv(io.BytesIO(data), convert_options=options, parse_options=parse)
    return _from_text(table, [known[name] for name in names])


class _Chunks(io.RawIOBase):
    """A sink that keeps what was written until it is taken."""

    def __init__(self) -> None:
        self._written: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        taken = bytes(data)
        self._written.append(taken)
        return len(taken)

    def take(self) -> bytes:
        data, self._written = b"".join(self._written), []
        return data


def write(tables: Iterator[pa.Table], empty: pa.Table, form: str) -> Iterator[bytes]:
    """The tables, all with the columns of `empty`, as one stream of that format, piece by piece."""
    if form == "ndjson":
        yield from (ndjson(table) for table in tables)
        return
    sink = _Chunks()
    with _writer(sink, empty.schema, form) as writer:
        for table in tables:
            writer.write_table(table.cast(empty.schema))
            yield sink.take()
    yield sink.take()


def _writer(sink: _Chunks, schema: pa.Schema, form: str) -> Any:
    if form == "arrow":
        return pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), schema)
    if form == "parquet":
        return pa.parquet.ParquetWriter(pa.PythonFile(sink, mode="w"), schema, compression="zstd")
    return _CsvWriter(sink, schema)


class _CsvWriter:
    """As Arrow's writers; columns without a CSV form are written as JSON text."""

    def __init__(self, sink: _Chunks, schema: pa.Schema) -> None:
        self._sink = sink
        self._schema = schema

    def __enter__(self) -> _CsvWriter:
        pa.csv.write_csv(_csv_ready(self._schema.empty_table()), self._sink)
        return self

    def __exit__(self, *_: object) -> None:
        return

    def write_table(self, table: pa.Table) -> None:
        options = pa.csv.WriteOptions(include_header=False)
        pa.csv.write_csv(_csv_ready(table), self._sink, options)


def _csv_ready(table: pa.Table) -> pa.Table:
    for index, field in enumerate(table.schema):
        if pa.types.is_nested(field.type) or _is_binary(field.type):
            values = [None if v is None else _text(v) for v in table.column(index).to_pylist()]
            table = table.set_column(index, field.name, pa.array(values, pa.string()))
    return table


def _text(value: Any) -> str:
    found = _jsonable(value)
    return found if isinstance(found, str) else json.dumps(found, default=_jsonable)


def ndjson(table: pa.Table) -> bytes:
    """Rows as JSON objects, one on each line: bytes as base64, times and decimals as text."""
    return b"".join(
        json.dumps(row, default=_jsonable, ensure_ascii=False).encode() + b"\n" for row in table.to_pylist()
    )


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, (dict, list, int, float, bool)):
        return value
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
