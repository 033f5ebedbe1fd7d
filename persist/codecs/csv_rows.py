"""Reading and writing rows as CSV, strictly by RFC 4180.

Arrow's parser alone accepts text after a closing quote as part of the cell, reads `0x10` as 16 and `1e400` as infinity.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from persist.codecs.json_rows import BOM, UNREADABLE, Spend, encode, read_cells, to_json_values
from persist.parts.exact_numbers import floats_of_text
from persist.parts.text_values import from_text, is_textual, to_text

HEADER_BYTES_MAX = 1024 * 1024
SLICE_BYTES = 1024 * 1024  # that are scanned at a time
NULL_CELLS = ("",)  # unquoted
_QUOTE, _LF, _CR, _COMMA = b'"\n\r,'
_BESIDE = np.zeros(256, np.bool_)  # allowed before an opening quote and after a closing one
_BESIDE[[_QUOTE, _COMMA, _LF, _CR]] = True
_QUOTED = rb'"(?:[^"]++|"")*+"'
_CELLS = re.compile(rb'(?>[^",\r\n][^,\r\n]*+|' + _QUOTED + rb"(?![^,\r\n])|[,\r\n]++){1,10000}+")
_QUOTED_CELL = re.compile(_QUOTED)
_HEX_MARKS = (b"0x", b"0X")
_HEX = r"^[+-]?0[xX]"


class CsvScan:
    """Scans the bytes of a CSV text piece by piece, to decide how it must be read."""

    def __init__(self, counts_lines: bool = False) -> None:
        self.has_hex = False  # possibly: `0x` occurs somewhere
        self.lines = 0  # line ends outside of quotes, if they are counted
        self._counts_lines = counts_lines
        self._is_regular = True
        self._is_open = 0
        self._last = b""
        self._ends = [0, 0]

    @property
    def is_regular(self) -> bool:
        """Whether every quote opens or closes a cell or is doubled within one; if not, `check_quotes` decides."""
        return self._is_regular and not self._is_open

    def feed(self, data: bytes) -> None:
        self.has_hex = self.has_hex or any(mark in self._last[-1:] + data[:1] or mark in data for mark in _HEX_MARKS)
        piece = np.frombuffer(data, np.uint8)
        places = np.flatnonzero(piece == _QUOTE) if b'"' in data else np.empty(0, np.int64)
        if self._is_regular:
            self._check_ends(data, piece, places)
        if self._counts_lines:
            self._count_lines(data, piece, places)
        self._is_open = (self._is_open + len(places)) % 2
        self._last = data[-1:] or self._last

    def _count_lines(self, data: bytes, piece: Any, places: Any) -> None:
        for index, end in enumerate((_LF, _CR)):
            if not len(places) and not self._is_open:
                self._ends[index] += data.count(end)
            elif end in data:
                at = np.flatnonzero(piece == end)
                self._ends[index] += int(((np.searchsorted(places, at) + self._is_open) % 2 == 0).sum())
        self.lines = max(self._ends)

    def _check_ends(self, data: bytes, piece: Any, places: Any) -> None:
        """Check the bytes before opening quotes and after closing ones."""
        before = self._last[-1] if self._last else _LF
        if before == _QUOTE and not self._is_open and len(data) and not _BESIDE[data[0]]:
            self._is_regular = False
        elif len(places):
            start = len(BOM) if not self._last and data.startswith(BOM) else 0
            opening, closing = places[self._is_open :: 2], places[1 - self._is_open :: 2]
            left = np.where(opening > start, piece[opening - 1], _LF if start else before)
            right = piece[closing[closing + 1 < len(piece)] + 1]
            self._is_regular = bool(_BESIDE[left].all() and _BESIDE[right].all())


def check_quotes(data: Any) -> None:
    """Raise BadQuote, with the line, if a quote is not closed or text follows a closing quote.

    `data` is bytes or a memory-mapped file.
    """
    place = len(BOM) if data[: len(BOM)] == BOM else 0
    while cells := _CELLS.match(data, place):
        place = cells.end()
    if place < len(data):
        whole = _QUOTED_CELL.match(data, place)
        problem = "a quote is not closed" if whole is None else "text follows a closing quote"
        starts = range(0, place, SLICE_BYTES)
        line = 1 + sum(data[start : min(start + SLICE_BYTES, place)].count(b"\n") for start in starts)
        raise BadQuote(line, problem)


class BadQuote(ValueError):
    """A misplaced or unclosed quote on this line."""

    def __init__(self, line: int, problem: str) -> None:
        super().__init__(f"line {line}: {problem}")
        self.line = line
        self.problem = problem


def scan_csv(data: bytes) -> CsvScan:
    """Scan a whole CSV text. Raises BadQuote."""
    scan = CsvScan(counts_lines=True)
    for start in range(0, len(data), SLICE_BYTES):
        scan.feed(data[start : start + SLICE_BYTES])
    if not scan.is_regular:
        check_quotes(data)
    return scan


def read_header(data: bytes) -> list[str]:
    """The column names in the first line. Raises ValueError if one occurs twice."""
    head = io.BytesIO(data[:HEADER_BYTES_MAX])
    names = next(csv.reader(io.TextIOWrapper(head, "utf-8-sig", newline="")), [])
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise ValueError(f"column {repeated[0]!r} occurs twice in the first line; column names must be unique")
    return names


def csv_options(
    names: Sequence[str], fields: Sequence[pa.Field], has_hex: bool, nulls: Sequence[str] = ()
) -> tuple[pa.csv.ParseOptions, pa.csv.ConvertOptions]:
    """Arrow's options to read `fields` of a CSV text with columns `names`, for `values_of_cells`."""
    # If there is only one column, an empty line is a null.
    parse = pa.csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=len(names) > 1)
    convert = pa.csv.ConvertOptions(
        column_types={field.name: _cell_type(field.type, has_hex) for field in fields},
        include_columns=[] if len(fields) == len(names) else [field.name for field in fields],
        null_values=[*NULL_CELLS, *nulls],
        strings_can_be_null=True,
        quoted_strings_can_be_null=False,
    )
    return parse, convert


def _cell_type(kind: pa.DataType, has_hex: bool) -> pa.DataType:
    """The type with which Arrow reads the cells of a column."""
    types = pa.types
    if is_textual(kind) or types.is_nested(kind) or types.is_floating(kind) or (has_hex and types.is_integer(kind)):
        return pa.string()
    return kind


def values_of_cells(cells: pa.Array, field: pa.Field, spend: Spend | None = None) -> pa.Array:
    """Convert the cells of a column, read with `csv_options`, to its type. Raises ValueError naming the column.

    `spend` is called with the bytes of nested values before they are allocated.
    """
    kind = field.type
    try:
        if pa.types.is_nested(kind):
            return read_cells(cells, field, spend)
        if is_textual(kind):
            return from_text(cells, kind)
        if pa.types.is_floating(kind):
            return floats_of_text(pc.ascii_trim(cells, " \t"), kind)
        if pa.types.is_integer(kind) and cells.type != kind:
            return _integers(pc.ascii_trim(cells, " \t"), kind)
        return cells
    except UNREADABLE as error:
        raise ValueError(f"column {field.name!r}: {error}") from error


def _integers(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    if pc.any(is_hex := pc.match_substring_regex(texts, _HEX)).as_py():
        raise ValueError(
            f"{texts.filter(is_hex)[0].as_py()!r:.100} is not a value of {kind}: only decimal digits are read"
        )
    return texts.cast(kind)


def write_csv(table: pa.Table, is_first: bool = False) -> bytes:
    """Rows as CSV, with the header if `is_first`. Columns without a CSV form are text, nested ones JSON."""
    sink = io.BytesIO()
    cells = [[to_cells(chunk) for chunk in column.chunks] for column in table.columns]
    columns = [pa.chunked_array(chunks, None if chunks else pa.string()) for chunks in cells]
    pa.csv.write_csv(pa.table(columns, table.schema.names), sink, pa.csv.WriteOptions(include_header=is_first))
    return sink.getvalue()


def to_cells(column: pa.Array) -> pa.Array:
    """A column in a type that Arrow writes as CSV; other types are converted to text."""
    if pa.types.is_nested(column.type):
        return pa.array(
            [None if value is None else encode(value).decode() for value in to_json_values(column)], pa.string()
        )
    return to_text(column) if is_textual(column.type) else column
