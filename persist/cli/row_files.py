"""Files of rows to import: CSV, Parquet, NDJSON and Arrow, read in bounded pieces."""

from __future__ import annotations

import csv
import hashlib
import mmap
import os
import re
import select
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet

from persist.cli.inference import JsonValues, Texts
from persist.cli.schema import storable
from persist.codecs.csv_rows import BadQuote, CsvScan, check_quotes, csv_options, values_of_cells
from persist.codecs.json_rows import BOM, UNREADABLE, Absence, names_of_lines, read_ndjson, select_fields
from persist.codecs.parquet_files import check_single_file, open_parquet
from persist.core.errors import InvalidUsage
from persist.parts import DIFF, TIME, ShardSchema
from persist.parts.value_order import one_chunk

# Nesting depth of JSON by its brackets: Arrow's parser has no bound, and a deep value crashes the process.

DEPTH_MAX = 100  # columns of shards have far fewer levels
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # an unclosed one extends to the end
_OPEN, _CLOSE, _MARKS = b"[{", b"]}", b"[{]}\n"
_OTHERS = bytes(set(range(256)) - set(_MARKS))
_STEPS = np.zeros(256, np.int8)
_STEPS[list(_OPEN)], _STEPS[list(_CLOSE)] = 1, -1


def too_deep(data: bytes) -> int | None:
    """The line, from 1, on which JSON is first nested deeper than DEPTH_MAX; None: nowhere.

    The depth carries over from line to line, since parsers accept an object that continues on the next line. What
    follows an unmatched bracket does not matter, since no parser reads that far.
    """
    marks = _STRING.sub(b"", data).translate(None, _OTHERS)
    depths = np.cumsum(_STEPS[np.frombuffer(marks, np.uint8)], dtype=np.int64)
    deep = np.flatnonzero(depths > DEPTH_MAX)
    return marks.count(b"\n", 0, int(deep[0])) + 1 if len(deep) else None


# Rows by piece, and the place of a bad row.

FORMATS = ("csv", "parquet", "ndjson", "arrow")
STDIN = "-"
FILES_MAX = 10_000
CHUNK_BYTES = 1024 * 1024
SIGNAL_S = 1.0  # after which a signal is noticed at the latest
CSV_BLOCK_BYTES = 8 * 1024 * 1024  # also the largest size of a CSV row
LINE_BYTES_MAX = 64 * 1024 * 1024  # of NDJSON
BATCH_ROWS = 64 * 1024
REASON_CHARS_MAX = 300
_EXTENSIONS = {
    ".csv": "csv", ".parquet": "parquet", ".pq": "parquet", ".ndjson": "ndjson", ".jsonl": "ndjson", ".json": "ndjson",
    ".arrow": "arrow", ".arrows": "arrow", ".ipc": "arrow",
}  # fmt: skip
_FILE_MARK, _CONTINUES = b"ARROW1", b"\xff\xff\xff\xff"
_FILE_MARK_BYTES = 8  # with its padding
_FILE_END_BYTES = 4 + len(_FILE_MARK)  # the length of the footer, and the mark again
_STREAM_END = _CONTINUES + b"\x00\x00\x00\x00"
_CSV_ERROR = re.compile(
    r"(?:In CSV column #(?P<column>\d+): )?(?:CSV parse error: )?(?:Row #(?P<row>\d+): )?(?P<why>.*)"
)
_IN_BLOCK = re.compile(r" - at `\$\[\d*\]\.?([^`]*)`")
_CONVERSION = re.compile(r"CSV conversion error to (?P<type>.*?): (?P<reason>.*)")
Report = Callable[[str, int, int], object]  # called with the name of a file, and its bytes read so far and in total


def form_of(name: str, requested: str | None) -> str:
    """The format of a file: the requested one, or by its name. Raises InvalidUsage."""
    if requested is not None:
        return requested
    if name == STDIN:
        raise InvalidUsage(f"give the format of standard input: --format {'|'.join(FORMATS)}")
    form = _EXTENSIONS.get(Path(name).suffix.lower())
    if form is None:
        raise InvalidUsage(f"the name {name!r:.200} does not determine its format: give --format {'|'.join(FORMATS)}")
    return form


@dataclass(frozen=True)
class RowPiece:
    """Rows of a file. `place` returns the place of the row with an index: `line 7`, or `row 7` in binary formats."""

    table: pa.Table
    place: Callable[[int], str]


class BadRow(Exception):
    """A row that cannot be read: its `place`, as in RowPiece, and the reason."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")


@dataclass(frozen=True)
class RowSource:
    """A file of rows. `argument` is how it was given, `name` its name in messages.

    `path` is where its bytes are, `digest` their SHA-256.
    """

    argument: str
    name: str
    path: str
    form: str
    size: int
    digest: str
    names: tuple[str, ...] | None  # its columns; None: they may differ from line to line
    nulls: tuple[str, ...] = ()  # CSV cells that are null, besides the empty one
    scan: CsvScan = field(default_factory=CsvScan, repr=False)  # of the bytes of CSV
    stamp: tuple[int, int, int] | None = None  # of the file when the digest was computed
    show: Report = lambda name, done, size: None

    def report(self, done: int) -> None:
        self.show(self.name, done, self.size)

    def pieces(self, schema: ShardSchema, wanted: Sequence[str] | None) -> Iterator[RowPiece]:
        """Read the rows as the columns of the shard; `wanted` None: all columns.

        Memory is bounded for files of any size. Raises InvalidUsage, which names the file and the line.
        """
        read = {"csv": _csv, "parquet": _parquet, "ndjson": _ndjson, "arrow": _arrow}[self.form]
        with self._reading(f"it cannot be read as {self.form}"):
            yield from read(self, schema, wanted)

    def same_names(self) -> tuple[str, ...]:
        """The columns of every NDJSON line; none without lines. Raises InvalidUsage if two lines differ."""
        with self._reading(f"it cannot be read as {self.form}"):
            return _same_names(self)

    def inferred(self) -> pa.Schema:
        """Infer the columns of a new shard for these rows. Raises InvalidUsage."""
        read = {"csv": _csv_schema, "parquet": _parquet_schema, "ndjson": _ndjson_schema, "arrow": _arrow_schema}
        with self._reading("its columns cannot be inferred"):
            schema = read[self.form](self)
        return storable(pa.schema([field for field in schema if field.name not in (TIME, DIFF)]))

    def check_typed(self) -> None:
        """Raise InvalidUsage if this is CSV without rows: its columns have no types yet."""
        if self.form == "csv" and not any(len(batch) for _, batch in _csv_batches(self, _csv_texts(self))):
            raise self.refused("it has no rows, from which the types of new columns follow: use create --schema")

    @contextmanager
    def _reading(self, default: str) -> Iterator[None]:
        """Turn read errors into InvalidUsage, with the line or else `default`; also if the file has changed."""
        try:
            yield
        except BadRow as error:
            raise self.refused(str(error)) from error
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self.refused(f"{default}: {_error_text(error)}") from error
        if _stamp(self.path) != self.stamp:
            raise self.refused("it was changed while it was being read")

    def refused(self, reason: str) -> InvalidUsage:
        """An error about the file."""
        return InvalidUsage(f"{self.name}, {reason}; nothing of it was written")


@contextmanager
def opened(
    names: Sequence[str], form: str | None, nulls: Sequence[str] = (), show: Report = lambda name, done, size: None
) -> Iterator[list[RowSource]]:
    """Open the files, and validate each before any is imported. Data from pipes is spooled to disk.

    `nulls` are CSV cells that are null if they are not quoted. Raises InvalidUsage: a file does not exist, or is not of
    its format.
    """
    if len(names) > FILES_MAX:
        raise InvalidUsage(f"{len(names)} files are too many: give at most {FILES_MAX} at once")
    if names.count(STDIN) > 1:
        raise InvalidUsage("standard input is given twice")
    forms = [form_of(name, form) for name in names]
    if nulls and set(forms) != {"csv"}:
        raise InvalidUsage("--null only applies to CSV; the other formats have nulls of their own")
    with ExitStack() as stack:
        yield [_open(name, form, tuple(nulls), show, stack) for name, form in zip(names, forms, strict=True)]


def _open(name: str, form: str, nulls: tuple[str, ...], show: Report, stack: ExitStack) -> RowSource:
    shown = "standard input" if name == STDIN else name
    try:
        path = name
        if name == STDIN:
            path = _spooled(sys.stdin.buffer, stack)
        elif not stat.S_ISREG(os.stat(name).st_mode):
            if os.path.isdir(name):
                raise InvalidUsage(f"{name!r} is a directory: name the files in it")
            with open(name, "rb") as pipe:
                path = _spooled(pipe, stack)
        stamp, digest, size, scan = _stamp(path), hashlib.sha256(), 0, CsvScan()
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                digest.update(chunk)
                size += len(chunk)
                if form == "csv":
                    scan.feed(chunk)
    except OSError as error:
        raise InvalidUsage(f"{shown} cannot be read: {error.strerror or error}") from error
    source = RowSource(name, shown, path, form, size, digest.hexdigest(), None, nulls, scan, stamp, show)
    try:
        names = _names(source)
    except (pa.ArrowException, OSError, ValueError, csv.Error) as error:
        raise source.refused(f"it cannot be read as {form}: {_error_text(error)}") from error
    return replace(source, names=names)


def _spooled(pipe: BinaryIO, stack: ExitStack) -> str:
    file = tempfile.NamedTemporaryFile(prefix="persist-import-")  # noqa: SIM115 - it is closed with the others
    stack.enter_context(file)
    while chunk := _next_of(pipe):
        file.write(chunk)
    file.flush()
    return file.name


def _next_of(pipe: BinaryIO) -> bytes:
    """What comes next; empty at the end. Python sees a signal that arrives just before a read only after the read."""
    while not select.select([pipe], [], [], SIGNAL_S)[0]:
        pass
    return os.read(pipe.fileno(), CHUNK_BYTES)


def _stamp(path: str) -> tuple[int, int, int]:
    status = os.stat(path)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _names(source: RowSource) -> tuple[str, ...] | None:
    if source.form == "ndjson":
        return None
    if source.form == "csv":
        with open(source.path, encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file), [])
        if not names:
            raise ValueError("it is empty, without even a line of column names")
    else:
        names = (_parquet_schema if source.form == "parquet" else _arrow_schema)(source).names
    if len(set(names)) < len(names):
        raise ValueError(f"a column occurs twice in {names}")
    return tuple(names)


def _error_text(error: Exception) -> str:
    """The message of an error on one line. Positions in a block, which msgspec reports, become names of columns."""
    text = _IN_BLOCK.sub(lambda match: f" in column {match[1]!r}" if match[1] else "", str(error))
    return " ".join(text.split())[:REASON_CHARS_MAX] or type(error).__name__


def first_bad(count: int, read: Callable[[int], object]) -> int:
    """Find the first bad one of `count` rows by bisection; `read(n)` fails if one of the first n rows is bad."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        try:
            read(middle)
            low = middle
        except (InvalidUsage, *UNREADABLE):
            high = middle
    return low


# --- CSV


def _csv_texts(source: RowSource) -> list[pa.Field]:
    """The columns as texts: every cell as it is written."""
    return [pa.field(name, pa.string()) for name in source.names or ()]


def _csv_schema(source: RowSource) -> pa.Schema:
    """Columns whose types hold every cell exactly."""
    fields = _csv_texts(source)
    types = {field.name: Texts.of_cells() for field in fields}
    for _, batch in _csv_batches(source, fields):
        for name, column in types.items():
            column.add(batch.column(name))
    return pa.schema([(name, column.kind()) for name, column in types.items()])


def _csv(source: RowSource, schema: ShardSchema, wanted: Sequence[str] | None) -> Iterator[RowPiece]:
    names = (source.names or ()) if wanted is None else wanted
    fields = [field for field in schema.updates_schema if field.name in names]
    for done, batch in _csv_batches(source, fields):
        columns = [_values(source, batch.column(field.name), field, done) for field in fields]
        table = pa.Table.from_arrays(columns, names=[field.name for field in fields])
        yield RowPiece(table, partial(_csv_place, source, done))


def _csv_batches(source: RowSource, fields: Sequence[pa.Field]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Read these columns as cells for `values_of_cells`, with the number of rows before each batch."""
    parse, convert = csv_options(source.names or (), fields, source.scan.has_hex, source.nulls)
    read = pa.csv.ReadOptions(block_size=CSV_BLOCK_BYTES, use_threads=False)  # threads would lose row numbers in errors
    _check_quotes(source)
    done = read_bytes = 0
    with pa.OSFile(source.path) as file:
        reader = None
        while True:
            try:
                if reader is None:
                    reader = pa.csv.open_csv(file, read, parse, convert)
                batch = reader.read_next_batch()
            except StopIteration:
                return
            except pa.ArrowException as error:
                raise _csv_refused(source, fields, error) from error
            read_bytes += CSV_BLOCK_BYTES  # one batch a block; the position of the file is ahead of it
            source.report(min(read_bytes, source.size))
            yield done, batch
            done += batch.num_rows


def _csv_place(source: RowSource, before: int, index: int) -> str:
    return f"line {_line_of(source, before + index + 2)}"


def _values(source: RowSource, cells: pa.Array, its: pa.Field, before: int) -> pa.Array:
    cells = one_chunk(cells)
    try:
        return values_of_cells(cells, its)
    except UNREADABLE as error:
        bad = first_bad(len(cells), lambda count: values_of_cells(cells.slice(0, count), its))
        raise BadRow(_csv_place(source, before, bad), _error_text(error)) from error


def _csv_refused(source: RowSource, fields: Sequence[pa.Field], error: pa.ArrowException) -> BadRow | InvalidUsage:
    """Turn an Arrow error into one with the line and the name of the column."""
    text = _error_text(error)
    if "straddl" in text:
        return source.refused(f"it has a row of more than {CSV_BLOCK_BYTES} bytes, or an unclosed quote")
    match = _CSV_ERROR.match(text)
    if match is None or match["row"] is None:
        return source.refused(f"it cannot be read as csv: {text}")
    reason = match["why"]
    if match["column"] is not None:
        conversion, number, names = _CONVERSION.match(reason), int(match["column"]), source.names or ()
        if conversion is not None:
            reason = f"{conversion['reason']} for {conversion['type']}"
        reason = f"column {names[number] if number < len(names) else fields[-1].name!r}: {reason}"
    return BadRow(f"line {_line_of(source, int(match['row']))}", reason)


def _check_quotes(source: RowSource) -> None:
    """Raise BadRow if a quote is not closed, or text follows a closing one."""
    if source.scan.is_regular:
        return
    with open(source.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            check_quotes(data)
        except BadQuote as error:
            raise BadRow(f"line {error.line}", error.problem) from error


def _line_of(source: RowSource, record: int) -> int:
    """The line on which a record begins; record 1 is the header."""
    is_skipping, number, line = len(source.names or ()) > 1, 0, 1
    with open(source.path, encoding="utf-8", errors="replace", newline="") as file, suppress(csv.Error):
        reader = csv.reader(file)
        for cells in reader:
            number += bool(cells) or not is_skipping
            if number == record:
                return line
            line = reader.line_num + 1
    return record


# --- NDJSON


def _ndjson_schema(source: RowSource) -> pa.Schema:
    """Columns whose types hold every value exactly."""
    values = JsonValues()
    for line, block in _line_blocks(source):
        if (deep := too_deep(block)) is not None:
            raise BadRow(f"line {line + deep - 1}", f"it is nested more than {DEPTH_MAX} levels deep; flatten it")
        before = deepcopy(values)
        try:
            values.add_lines(block)
        except UNREADABLE as error:
            raise BadRow(_bad_line(block, line, partial(_add_to_copy, before)), _error_text(error)) from error
    kind = values.kind()
    if not pa.types.is_struct(kind):
        raise ValueError("it has no line")
    return pa.schema(list(kind))


def _add_to_copy(before: JsonValues, lines: bytes) -> None:
    deepcopy(before).add_lines(lines)


def _same_names(source: RowSource) -> tuple[str, ...]:
    first: frozenset[str] | None = None
    for line, block in _line_blocks(source):
        try:
            names_by_line = names_of_lines(block)
        except UNREADABLE as error:
            raise BadRow(_bad_line(block, line, names_of_lines), _error_text(error)) from error
        for index, names in enumerate(names_by_line):
            first = names if first is None else first
            if names != first:
                raise BadRow(
                    _line_place(block, line, index),
                    f"it differs from the first line in whether it has column {min(names ^ first)!r}; give the same "
                    "columns in all lines of an upsert, null where null is meant, or select the columns by --columns",
                )
    return tuple(first or ())


def _ndjson(source: RowSource, schema: ShardSchema, wanted: Sequence[str] | None) -> Iterator[RowPiece]:
    for line, block in _line_blocks(source):
        yield RowPiece(_lines(block, schema, wanted, line), partial(_line_place, block, line))


def _line_blocks(source: RowSource) -> Iterator[tuple[int, bytes]]:
    """Read blocks of whole lines, about CHUNK_BYTES each, with the numbers of their first lines."""
    line, done, rest = 1, 0, b""
    with open(source.path, "rb") as file:
        if file.read(len(BOM)) != BOM:
            file.seek(0)
        while chunk := file.read(CHUNK_BYTES):
            end = chunk.rfind(b"\n") + 1
            if end:
                block, rest = rest + chunk[:end], chunk[end:]
                yield line, block
                line += block.count(b"\n")
                done += len(block)
                source.report(done)
            else:
                rest += chunk
            if len(rest) > LINE_BYTES_MAX:
                raise ValueError(f"it has a line of more than {LINE_BYTES_MAX} bytes")
        if rest:
            yield line, rest
            source.report(done + len(rest))


def _lines(block: bytes, schema: ShardSchema, wanted: Sequence[str] | None, first: int) -> pa.Table:
    """The rows of a block of lines whose first line has number `first`: the `wanted` columns, and `__diff`."""
    most, fields, required = block.count(b"\n") + 1, schema.updates_schema, schema.required
    if wanted is not None:
        fields = pa.schema([field for field in fields if field.name in wanted or field.name == DIFF])
        required = tuple(name for name in required if name in wanted)

    def read(lines: bytes) -> pa.Table:
        chosen = lines if wanted is None else select_fields(lines, fields.names)
        return read_ndjson(chosen, fields, most, absence=Absence(schema.defaults, required))

    try:
        table = read(block)
    except UNREADABLE as error:
        raise BadRow(_bad_line(block, first, read), _error_text(error)) from error
    for name in {TIME, DIFF} & set(table.column_names):
        if table.column(name).null_count == len(table):
            table = table.drop_columns([name])
    if DIFF in table.column_names:
        table = table.set_column(table.schema.get_field_index(DIFF), DIFF, pc.fill_null(table.column(DIFF), 1))
    return table


def _bad_line(block: bytes, first: int, read: Callable[[bytes], object]) -> str:
    """The place of the first line that `read` fails on, in a block whose first line has number `first`."""
    lines = [line + b"\n" for line in block.split(b"\n")]
    bad = first_bad(len(lines), lambda count: read(b"".join(lines[:count])))
    return f"line {first + bad}"


def _line_place(block: bytes, first: int, index: int) -> str:
    """The place of the row with an index in a block of lines; blank lines hold no row."""
    full = [number for number, line in enumerate(block.split(b"\n")) if line.strip()]
    return f"line {first + (full[index] if index < len(full) else index)}"


# --- Parquet and Arrow


def _parquet_schema(source: RowSource) -> pa.Schema:
    with open_parquet(source.path) as file:
        return file.schema_arrow


def _parquet(source: RowSource, schema: ShardSchema, wanted: Sequence[str] | None) -> Iterator[RowPiece]:
    with open_parquet(source.path) as file:
        chosen = None if wanted is None or any("." in name for name in wanted) else list(wanted)
        yield from _numbered(source, file.iter_batches(BATCH_ROWS, columns=chosen), wanted, file.metadata.num_rows)


def _arrow_schema(source: RowSource) -> pa.Schema:
    with open(source.path, "rb") as file:
        is_file = file.read(len(_FILE_MARK)) == _FILE_MARK
    with pa.OSFile(source.path) as data, (pa.ipc.open_file if is_file else pa.ipc.open_stream)(data) as reader:
        return reader.schema


def _arrow(source: RowSource, schema: ShardSchema, wanted: Sequence[str] | None) -> Iterator[RowPiece]:
    with open(source.path, "rb") as file:
        start = file.read(len(_FILE_MARK))
        is_file = start == _FILE_MARK
        file.seek(-min(source.size, len(_STREAM_END)), os.SEEK_END)
        is_whole = is_file or file.read() == _STREAM_END
    if not is_whole and start[: len(_CONTINUES)] != _CONTINUES:
        is_whole = _is_complete_legacy_stream(source.path)
    if not is_whole:
        raise ValueError("it does not end with the end-of-stream marker: it was truncated")
    with pa.OSFile(source.path) as data:
        if is_file:
            with pa.ipc.open_file(data) as reader:
                if not reader.num_record_batches and _has_batches(source.path):
                    raise ValueError("it is damaged: its footer lists no batches, but it has some")
                with pa.memory_map(source.path) as mapped:  # a footer's offsets count from the start of its own file
                    check_single_file("Arrow", mapped.read_buffer(), _FILE_MARK, pa.ipc.open_file)
                batches = (_validated(reader.get_batch(number)) for number in range(reader.num_record_batches))
                yield from _numbered(source, batches, wanted, 0)
        else:
            with pa.ipc.open_stream(data) as stream:
                yield from _numbered(source, map(_validated, stream), wanted, 0)
            if data.tell() < data.size():
                raise ValueError("data follows the end of its stream: give each stream in a file of its own")


def _validated(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch. Raises an error of Arrow if it is damaged: Arrow reads values of damaged offsets out of bounds."""
    batch.validate(full=True)
    return batch


def _has_batches(path: str) -> bool:
    """Whether an Arrow file contains a batch, regardless of its footer."""
    with pa.memory_map(path) as data:
        data.seek(data.size() - _FILE_END_BYTES)
        footer = int.from_bytes(data.read(4), "little")
        data.seek(_FILE_MARK_BYTES)
        body = data.read_buffer(max(0, data.size() - _FILE_MARK_BYTES - footer - _FILE_END_BYTES))
        try:
            with pa.ipc.open_stream(body) as stream:
                return next(iter(stream), None) is not None
        except (pa.ArrowException, OSError):  # Polars writes the schema without its length
            return any(_is_batch(body.slice(reader.start())) for reader in re.finditer(_CONTINUES, memoryview(body)))


def _is_batch(data: pa.Buffer) -> bool:
    try:
        return bool(pa.ipc.read_message(data).type == "record batch")
    except (pa.ArrowException, OSError, EOFError):
        return False


def _is_complete_legacy_stream(path: str) -> bool:
    """Whether a stream of Arrow before 0.15 is complete: its end marker is four zero bytes, like padding."""
    with pa.OSFile(path) as data:
        messages, at = pa.ipc.MessageReader.open_stream(data), 0
        with suppress(StopIteration):
            while True:
                messages.read_next_message()
                at = data.tell()
        return bool(at < data.tell() == data.size())


def _numbered(
    source: RowSource, batches: Iterator[pa.RecordBatch], wanted: Sequence[str] | None, rows_all: int
) -> Iterator[RowPiece]:
    """Number the rows of batches. Progress is by rows, if their total is known."""
    done = 0
    for batch in batches:
        table = pa.table(batch)
        if wanted is not None:
            table = table.select([name for name in table.column_names if name in wanted])

        def place(index: int, before: int = done) -> str:
            return f"row {before + index + 1}"

        yield RowPiece(table, place)
        done += len(table)
        if rows_all:
            source.report(source.size * done // rows_all)
