"""Files of rows that are imported: CSV, Parquet, NDJSON and Arrow, in bounded pieces."""

from __future__ import annotations

import csv
import hashlib
import mmap
import os
import re
import shutil
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
from persist.codecs.json_rows import BOM, UNREADABLE, names_of_lines, read_ndjson
from persist.codecs.parquet_files import check_single_file, open_parquet
from persist.core.errors import InvalidUsage
from persist.parts import DIFF, TIME, ShardSchema
from persist.parts.sort_words import one_chunk

# How deep JSON is nested, told by its brackets alone: Arrow's parser has no bound, and ends the process.


DEPTH_MAX = 100  # a column of a shard has far fewer levels
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # one that is not closed goes to the end
_OPEN, _CLOSE, _MARKS = b"[{", b"]}", b"[{]}\n"
_OTHERS = bytes(set(range(256)) - set(_MARKS))
_STEPS = np.zeros(256, np.int8)
_STEPS[list(_OPEN)], _STEPS[list(_CLOSE)] = 1, -1


def too_deep(data: bytes) -> int | None:
    """The line, from 1, on which JSON is nested deeper than DEPTH_MAX first; None: it nowhere is.

    Lines do not begin anew: parsers take an object that goes on in the next line. Where brackets do not match, what
    follows does not count, since no parser comes so far.
    """
    marks = _STRING.sub(b"", data).translate(None, _OTHERS)
    depths = np.cumsum(_STEPS[np.frombuffer(marks, np.uint8)], dtype=np.int64)
    deep = np.flatnonzero(depths > DEPTH_MAX)
    return marks.count(b"\n", 0, int(deep[0])) + 1 if len(deep) else None


# Files of rows that are imported: CSV, Parquet, NDJSON and Arrow, a piece at a time, and where a bad row is.


FORMATS = ("csv", "parquet", "ndjson", "arrow")
STDIN = "-"
FILES_MAX = 10_000
CHUNK_BYTES = 1024 * 1024
CSV_BLOCK_BYTES = 8 * 1024 * 1024  # a row of CSV cannot be longer
LINE_BYTES_MAX = 64 * 1024 * 1024  # of NDJSON
BATCH_ROWS = 64 * 1024
SAID_CHARS_MAX = 300
_EXTENSIONS = {
    ".csv": "csv", ".parquet": "parquet", ".pq": "parquet", ".ndjson": "ndjson", ".jsonl": "ndjson", ".json": "ndjson",
    ".arrow": "arrow", ".arrows": "arrow", ".ipc": "arrow",
}  # fmt: skip
_FILE_MARK, _CONTINUES = b"ARROW1", b"\xff\xff\xff\xff"
_FILE_MARK_BYTES = 8  # with its padding
_FILE_END_BYTES = 4 + len(_FILE_MARK)  # the length of the footer, and the mark again
_STREAM_END = _CONTINUES + b"\x00\x00\x00\x00"
_CSV_ERROR = re.compile(
    r"(?:In CSV column #(?P<column>\d+): )?(?:CSV parse error: )?(?:Row #(?P<row>\d+): )?(?P<said>.*)"
)
_IN_BLOCK = re.compile(r" - at `\$\[\d*\]\.?([^`]*)`")
_CONVERSION = re.compile(r"CSV conversion error to (?P<type>.*?): (?P<said>.*)")
Told = Callable[[int], None]  # of how many bytes were read


def form_of(name: str, given: str | None) -> str:
    """The format of a file, by its name unless it is given. Raises InvalidUsage."""
    if given is not None:
        return given
    if name == STDIN:
        raise InvalidUsage(f"say which rows come from standard input: --format {'|'.join(FORMATS)}")
    found = _EXTENSIONS.get(Path(name).suffix.lower())
    if found is None:
        raise InvalidUsage(f"{name!r:.200} does not tell its format by its name: give --format {'|'.join(FORMATS)}")
    return found


@dataclass(frozen=True)
class RowPiece:
    """Some rows of a file. `place` tells where the row of that index is: `line 7`, or `row 7` where there are none."""

    table: pa.Table
    place: Callable[[int], str]


class BadRow(Exception):
    """A row that cannot be read: `place` as a Piece tells it, and what is wrong."""

    def __init__(self, place: str, said: str) -> None:
        super().__init__(f"{place}: {said}")


@dataclass(frozen=True)
class RowSource:
    """A file of rows. `given` is what the caller calls it, `name` what it is called in sentences.

    `digest` is the SHA-256 of its bytes, `path` where they are.
    """

    given: str
    name: str
    path: str
    form: str
    size: int
    digest: str
    names: tuple[str, ...] | None  # its columns; None: each line tells its own
    nulls: tuple[str, ...] = ()  # cells of CSV that are null, besides the empty one
    scan: CsvScan = field(default_factory=CsvScan, repr=False)  # what its bytes tell, where it is CSV
    stamp: tuple[int, int, int] | None = None  # of the bytes that have the digest

    def pieces(self, schema: ShardSchema, wanted: Sequence[str] | None, told: Told) -> Iterator[RowPiece]:
        """The rows, with values as the shard's columns of that name take them; `wanted` None: all columns.

        Memory stays bounded whatever the size. Raises InvalidUsage, which tells the file and the line.
        """
        read = {"csv": _csv, "parquet": _parquet, "ndjson": _ndjson, "arrow": _arrow}[self.form]
        with self._reading(f"it cannot be read as {self.form}"):
            yield from read(self, schema, wanted, told)

    @property
    def is_inferred_by_all(self) -> bool:
        """Whether `inferred` reads every row, so that each fits what it finds."""
        return self.form == "ndjson" or (self.form == "csv" and not {TIME, DIFF} & set(self.names or ()))

    def same_names(self, told: Told) -> tuple[str, ...]:
        """The columns that every line of NDJSON has; none without lines. Raises InvalidUsage where two lines differ."""
        with self._reading(f"it cannot be read as {self.form}"):
            return _same_names(self, told)

    def inferred(self, told: Told | None = None) -> pa.Schema:
        """The columns that a new shard for these rows has. Raises InvalidUsage."""
        read = {"csv": _csv_schema, "parquet": _parquet_schema, "ndjson": _ndjson_schema, "arrow": _arrow_schema}
        with self._reading("its columns cannot be told"):
            found = read[self.form](self, told or _untold)
        return storable(pa.schema([one for one in found if one.name not in (TIME, DIFF)]))

    @contextmanager
    def _reading(self, otherwise: str) -> Iterator[None]:
        """Errors of reading as InvalidUsage, which tells the line or else `otherwise`; also where the file changed."""
        try:
            yield
        except BadRow as error:
            raise self.refused(str(error)) from error
        except (pa.ArrowException, OSError, ValueError) as error:
            raise self.refused(f"{otherwise}: {_said(error)}") from error
        if _stamp(self.path) != self.stamp:
            raise self.refused("it was changed while it was read")

    def refused(self, said: str) -> InvalidUsage:
        """The error that tells what is wrong with the file."""
        return InvalidUsage(f"{self.name}, {said}; nothing of it was written")


@contextmanager
def opened(names: Sequence[str], form: str | None, nulls: Sequence[str] = ()) -> Iterator[list[RowSource]]:
    """The files, each of which is looked at before any is read. What comes by a pipe is kept on disk meanwhile.

    `nulls` are cells of CSV that are null, if they are not quoted.

    Raises InvalidUsage: there is no such file, or it is none of that format.
    """
    if len(names) > FILES_MAX:
        raise InvalidUsage(f"{len(names)} files are too many: give at most {FILES_MAX} at once")
    if names.count(STDIN) > 1:
        raise InvalidUsage("standard input is given twice")
    forms = [form_of(name, form) for name in names]
    if nulls and set(forms) != {"csv"}:
        raise InvalidUsage("--null tells which cells of CSV are null; the other formats tell it themselves")
    with ExitStack() as kept:
        yield [_opened(name, form, tuple(nulls), kept) for name, form in zip(names, forms, strict=True)]


def _opened(name: str, form: str, nulls: tuple[str, ...], kept: ExitStack) -> RowSource:
    shown = "standard input" if name == STDIN else name
    try:
        path = name
        if name == STDIN:
            path = _spooled(sys.stdin.buffer, kept)
        elif not stat.S_ISREG(os.stat(name).st_mode):
            if os.path.isdir(name):
                raise InvalidUsage(f"{name!r} is a directory: name the files in it")
            with open(name, "rb") as pipe:
                path = _spooled(pipe, kept)
        stamp = _stamp(path)
        size, digest, scan = _looked_at(path, form)
    except OSError as error:
        raise InvalidUsage(f"{shown} cannot be read: {error.strerror or error}") from error
    source = RowSource(name, shown, path, form, size, digest, None, nulls, scan, stamp)
    try:
        names = _names(source)
    except (pa.ArrowException, OSError, ValueError, csv.Error) as error:
        raise source.refused(f"it cannot be read as {form}: {_said(error)}") from error
    return replace(source, names=names)


def _spooled(pipe: BinaryIO, kept: ExitStack) -> str:
    file = tempfile.NamedTemporaryFile(prefix="persist-import-")  # noqa: SIM115 - it is closed with the others
    kept.enter_context(file)
    shutil.copyfileobj(pipe, file, CHUNK_BYTES)
    file.flush()
    return file.name


def _looked_at(path: str, form: str) -> tuple[int, str, CsvScan]:
    """The size, the digest, and what the bytes of CSV tell."""
    digest, size, scan = hashlib.sha256(), 0, CsvScan()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
            if form == "csv":
                scan.feed(chunk)
    return size, digest.hexdigest(), scan


def _stamp(path: str) -> tuple[int, int, int]:
    found = os.stat(path)
    return found.st_ino, found.st_size, found.st_mtime_ns


def _untold(_done: int) -> None:
    """Nobody watches how far it is."""


def _names(source: RowSource) -> tuple[str, ...] | None:
    if source.form == "ndjson":
        return None
    if source.form == "csv":
        with open(source.path, encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file), [])
        if not names:
            raise ValueError("it is empty, and has not even a line of column names")
    else:
        names = (_parquet_schema if source.form == "parquet" else _arrow_schema)(source, _untold).names
    if len(set(names)) < len(names):
        raise ValueError(f"a column occurs twice in {names}")
    return tuple(names)


def _said(error: Exception) -> str:
    """What an error says, on one line; where in a block msgspec was is no matter, but in which column is."""
    text = _IN_BLOCK.sub(lambda found: f" in column {found[1]!r}" if found[1] else "", str(error))
    return " ".join(text.split())[:SAID_CHARS_MAX] or type(error).__name__


def first_bad(count: int, fails: Callable[[int], bool]) -> int:
    """The index of the first of `count` rows that is bad; `fails` tells whether one of the first so many is."""
    low, high = 0, count
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fails(middle) else (middle, high)
    return low


def _cannot(act: Callable[[], object]) -> bool:
    try:
        act()
    except UNREADABLE:
        return True
    return False


# --- CSV


def _csv_schema(source: RowSource, told: Told) -> pa.Schema:
    """Columns whose types lose nothing of any cell."""
    fields = [pa.field(name, pa.string()) for name in source.names or ()]
    types = {field.name: Texts.of_cells() for field in fields}
    for _, batch in _csv_batches(source, fields, told):
        for name, column in types.items():
            column.add(batch.column(name))
    return pa.schema([(name, column.kind()) for name, column in types.items()])


def _csv(source: RowSource, schema: ShardSchema, wanted: Sequence[str] | None, told: Told) -> Iterator[RowPiece]:
    names = (source.names or ()) if wanted is None else wanted
    fields = [one for one in schema.updates_schema if one.name in names]
    for done, batch in _csv_batches(source, fields, told):
        columns = [_values(source, batch.column(one.name), one, done) for one in fields]
        table = pa.Table.from_arrays(columns, names=[one.name for one in fields])
        yield RowPiece(table, partial(_csv_place, source, done))


def _csv_batches(source: RowSource, fields: Sequence[pa.Field], told: Told) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The cells of these columns for `values_of_cells`, and how many rows came before."""
    parse, convert = csv_options(source.names or (), fields, source.scan.has_hex, source.nulls)
    read = pa.csv.ReadOptions(block_size=CSV_BLOCK_BYTES, use_threads=False)  # so that errors tell the row
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
            read_bytes += CSV_BLOCK_BYTES  # a batch is a block; the file itself is read ahead
            told(min(read_bytes, source.size))
            yield done, batch
            done += batch.num_rows


def _csv_place(source: RowSource, before: int, index: int) -> str:
    return f"line {_line_of(source, before + index + 2)}"


def _values(source: RowSource, cells: pa.Array, its: pa.Field, before: int) -> pa.Array:
    cells = one_chunk(cells)
    try:
        return values_of_cells(cells, its)
    except UNREADABLE as error:
        bad = first_bad(len(cells), lambda count: _cannot(lambda: values_of_cells(cells.slice(0, count), its)))
        raise BadRow(f"line {_line_of(source, before + bad + 2)}", _said(error)) from error


def _csv_refused(source: RowSource, fields: Sequence[pa.Field], error: pa.ArrowException) -> BadRow | InvalidUsage:
    """What Arrow says of the CSV, with the line and the name of the column."""
    text = _said(error)
    if "straddl" in text:
        return source.refused(f"it has a row of more than {CSV_BLOCK_BYTES} bytes, or a quote that is not closed")
    found = _CSV_ERROR.match(text)
    if found is None or found["row"] is None:
        return source.refused(f"it cannot be read as csv: {text}")
    said = found["said"]
    if found["column"] is not None:
        conversion, name = _CONVERSION.match(said), _column(source, fields, int(found["column"]))
        if conversion is not None:
            said = f"{conversion['said']} for {conversion['type']}"
        said = f"column {name!r}: {said}"
    return BadRow(f"line {_line_of(source, int(found['row']))}", said)


def _column(source: RowSource, fields: Sequence[pa.Field], number: int) -> str:
    names = source.names or ()
    return names[number] if number < len(names) else fields[-1].name


def _check_quotes(source: RowSource) -> None:
    """Raise BadRow where a quote is not closed, or text follows a closing one."""
    if source.scan.is_regular:
        return
    with open(source.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            check_quotes(data)
        except BadQuote as error:
            raise BadRow(f"line {error.line}", error.said) from error


def _line_of(source: RowSource, record: int) -> int:
    """The line on which the record of this number begins; the first one has the names of the columns."""
    is_skipping, found, line = len(source.names or ()) > 1, 0, 1
    with open(source.path, encoding="utf-8", errors="replace", newline="") as file, suppress(csv.Error):
        reader = csv.reader(file)
        for cells in reader:
            found += bool(cells) or not is_skipping
            if found == record:
                return line
            line = reader.line_num + 1
    return record


# --- NDJSON


def _ndjson_schema(source: RowSource, told: Told) -> pa.Schema:
    """Columns whose types lose nothing of any value."""
    values, line, done = JsonValues(), 1, 0
    for block in _line_blocks(source):
        if (deep := too_deep(block)) is not None:
            raise BadRow(f"line {line + deep - 1}", f"it is nested more than {DEPTH_MAX} levels deep; flatten it")
        before = deepcopy(values)
        try:
            values.add_lines(block)
        except UNREADABLE as error:
            lines = [one + b"\n" for one in block.split(b"\n")]
            bad = first_bad(len(lines), partial(_cannot_add, before, lines))
            raise BadRow(f"line {line + bad}", _said(error)) from error
        line += block.count(b"\n")
        done += len(block)
        told(done)
    kind = values.kind()
    if not pa.types.is_struct(kind):
        raise ValueError("it has no line")
    return pa.schema(list(kind))


def _cannot_add(before: JsonValues, lines: Sequence[bytes], count: int) -> bool:
    return _cannot(lambda: deepcopy(before).add_lines(b"".join(lines[:count])))


def _same_names(source: RowSource, told: Told) -> tuple[str, ...]:
    first: frozenset[str] | None = None
    line, done = 1, 0
    for block in _line_blocks(source):
        try:
            found = names_of_lines(block)
        except UNREADABLE as error:
            raise BadRow(_bad_line(block, line, names_of_lines), _said(error)) from error
        for index, names in enumerate(found):
            first = names if first is None else first
            if names != first:
                raise BadRow(
                    _line_place(block, line, index),
                    f"it differs from the first line in whether it has column {min(names ^ first)!r}; give all lines "
                    "of an upsert the same ones, null where null is meant, or say with --columns which they give",
                )
        line += block.count(b"\n")
        done += len(block)
        told(done)
    return tuple(first or ())


def _ndjson(source: RowSource, schema: ShardSchema, wanted: Sequence[str] | None, told: Told) -> Iterator[RowPiece]:
    line, done = 1, 0
    for block in _line_blocks(source):
        table = _lines(block, schema, line)
        if wanted is not None:
            table = table.select([name for name in table.column_names if name in wanted or name == DIFF])
        done += len(block)
        told(done)
        yield RowPiece(table, partial(_line_place, block, line))
        line += block.count(b"\n")


def _line_blocks(source: RowSource) -> Iterator[bytes]:
    """Whole lines, about CHUNK_BYTES at a time."""
    with open(source.path, "rb") as file:
        if file.read(len(BOM)) != BOM:
            file.seek(0)
        left = b""
        while chunk := file.read(CHUNK_BYTES):
            end = chunk.rfind(b"\n") + 1
            if end:
                yield left + chunk[:end]
                left = chunk[end:]
            else:
                left += chunk
            if len(left) > LINE_BYTES_MAX:
                raise ValueError(f"it has a line of more than {LINE_BYTES_MAX} bytes")
        if left:
            yield left


def _lines(block: bytes, schema: ShardSchema, first: int) -> pa.Table:
    """The rows of a block of lines, of which the first one has this number."""
    most = block.count(b"\n") + 1
    try:
        table = read_ndjson(block, schema.updates_schema, most, defaults=schema.defaults)
    except UNREADABLE as error:
        place = _bad_line(block, first, lambda lines: read_ndjson(lines, schema.updates_schema, most))
        raise BadRow(place, _said(error)) from error
    for name in (TIME, DIFF):
        if table.column(name).null_count == len(table):
            table = table.drop_columns([name])
    if DIFF in table.column_names:
        table = table.set_column(table.schema.get_field_index(DIFF), DIFF, pc.fill_null(table.column(DIFF), 1))
    return table


def _bad_line(block: bytes, first: int, read: Callable[[bytes], object]) -> str:
    """Where the first line is that `read` cannot read, in a block whose first line has this number."""
    lines = [line + b"\n" for line in block.split(b"\n")]
    bad = first_bad(len(lines), lambda count: _cannot(lambda: read(b"".join(lines[:count]))))
    return f"line {first + bad}"


def _line_place(block: bytes, first: int, index: int) -> str:
    """Where the row of this index is in a block of lines: blank ones have none."""
    full = [number for number, line in enumerate(block.split(b"\n")) if line.strip()]
    return f"line {first + (full[index] if index < len(full) else index)}"


# --- Parquet and Arrow


def _parquet_schema(source: RowSource, _told: Told) -> pa.Schema:
    with open_parquet(source.path) as file:
        return file.schema_arrow


def _parquet(source: RowSource, schema: ShardSchema, wanted: Sequence[str] | None, told: Told) -> Iterator[RowPiece]:
    with open_parquet(source.path) as file:
        chosen = None if wanted is None or any("." in name for name in wanted) else list(wanted)
        batches = file.iter_batches(BATCH_ROWS, columns=chosen)
        yield from _numbered(source, batches, wanted, told, file.metadata.num_rows)


def _arrow_schema(source: RowSource, _told: Told) -> pa.Schema:
    with open(source.path, "rb") as file:
        is_file = file.read(len(_FILE_MARK)) == _FILE_MARK
    with pa.OSFile(source.path) as data, (pa.ipc.open_file if is_file else pa.ipc.open_stream)(data) as reader:
        return reader.schema


def _arrow(source: RowSource, schema: ShardSchema, wanted: Sequence[str] | None, told: Told) -> Iterator[RowPiece]:
    with open(source.path, "rb") as file:
        start = file.read(len(_FILE_MARK))
        is_file = start == _FILE_MARK
        file.seek(-min(source.size, len(_STREAM_END)), os.SEEK_END)
        is_whole = is_file or file.read() == _STREAM_END
    if not is_whole and start[: len(_CONTINUES)] != _CONTINUES:
        is_whole = _is_whole_and_old(source.path)
    if not is_whole:
        raise ValueError("it does not end with its end-of-stream mark: it was cut")
    with pa.OSFile(source.path) as data:
        if is_file:
            with pa.ipc.open_file(data) as found:
                if not found.num_record_batches and _has_batches(source.path):
                    raise ValueError("it is damaged: its footer names no batch, but it has some")
                with pa.memory_map(source.path) as whole:  # the last footer counts from its own file's start
                    check_single_file("Arrow", whole.read_buffer(), _FILE_MARK, pa.ipc.open_file)
                batches = (found.get_batch(number) for number in range(found.num_record_batches))
                yield from _numbered(source, batches, wanted, told, 0)
        else:
            with pa.ipc.open_stream(data) as stream:
                yield from _numbered(source, iter(stream), wanted, told, 0)
            if data.tell() < data.size():
                raise ValueError("it goes on after the end of its stream: give each stream by itself")


def _has_batches(path: str) -> bool:
    """Whether an Arrow file has a batch, whatever its footer says."""
    with pa.memory_map(path) as data:
        data.seek(data.size() - _FILE_END_BYTES)
        footer = int.from_bytes(data.read(4), "little")
        data.seek(_FILE_MARK_BYTES)
        body = data.read_buffer(max(0, data.size() - _FILE_MARK_BYTES - footer - _FILE_END_BYTES))
        try:
            with pa.ipc.open_stream(body) as stream:
                return next(iter(stream), None) is not None
        except (pa.ArrowException, OSError):  # Polars writes the schema there without its length
            return any(_is_batch(body.slice(found.start())) for found in re.finditer(_CONTINUES, memoryview(body)))


def _is_batch(data: pa.Buffer) -> bool:
    try:
        return bool(pa.ipc.read_message(data).type == "record batch")
    except (pa.ArrowException, OSError, EOFError):
        return False


def _is_whole_and_old(path: str) -> bool:
    """Whether a stream of before Arrow 0.15, whose end is four zeros as padding may be, has its end."""
    with pa.OSFile(path) as data:
        messages, at = pa.ipc.MessageReader.open_stream(data), 0
        with suppress(StopIteration):
            while True:
                messages.read_next_message()
                at = data.tell()
        return bool(at < data.tell() == data.size())


def _row_place(before: int, index: int) -> str:
    return f"row {before + index + 1}"


def _numbered(
    source: RowSource, batches: Iterator[pa.RecordBatch], wanted: Sequence[str] | None, told: Told, rows_all: int
) -> Iterator[RowPiece]:
    """The batches with their rows counted; how far it is goes by rows, where it is known how many there are."""
    done = 0
    for batch in batches:
        table = pa.table(batch)
        if wanted is not None:
            table = table.select([name for name in table.column_names if name in wanted])
        yield RowPiece(table, partial(_row_place, done))
        done += len(table)
        if rows_all:
            told(source.size * done // rows_all)
