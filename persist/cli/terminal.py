"""What a terminal shows: width, colours, tables of rows, progress bars. Control sequences in values are escaped."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TextIO

import pyarrow as pa

from blob import without_secrets
from persist.client.arguments import columns_of
from persist.client.row_reader import expand_rows
from persist.client.snapshot import Snapshot
from persist.codecs import rows
from persist.codecs.csv_rows import to_cells
from persist.codecs.json_rows import ndjson
from persist.core.errors import InvalidUsage
from persist.parts import DIFF, TIME

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_WIDE = ("W", "F")
_BOLD, _DIM, _RED, _GREEN = ("1", "2", "31", "32")
NO_COLOUR = ("--no-colour", "--no-color")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(*NO_COLOUR, dest="no_colour", action="store_true", help="no colours; the same as NO_COLOR=1")


@dataclass(frozen=True)
class Screen:
    """The properties of an output stream. `width` is in columns; None: lines are not cut."""

    is_terminal: bool = False
    colours: bool = False
    width: int | None = None

    @classmethod
    def of(cls, out: TextIO, no_colour: bool = False) -> Screen:
        """Inspect a stream and the environment. Only a terminal has colours, unless NO_COLOR is set."""
        is_terminal = out.isatty()
        plain = no_colour or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        width = shutil.get_terminal_size((0, 0)).columns if is_terminal else 0
        return cls(is_terminal, is_terminal and not plain, width or None)

    def paint(self, colour: str, text: str) -> str:
        return f"\033[{colour}m{text}\033[0m" if self.colours and text else text


def complain(command: str, message: str, arguments: Sequence[str] = ()) -> None:
    """Print an error on standard error, in one line."""
    screen = Screen.of(sys.stderr, any(name in arguments for name in NO_COLOUR))
    print(f"{screen.paint(_RED, command)}: {plain(without_secrets_of(arguments, message))}", file=sys.stderr)


def texts_of(arguments: argparse.Namespace) -> list[str]:
    """Return the strings among the arguments, for `complain`."""
    groups = (value if isinstance(value, list) else [value] for value in vars(arguments).values())
    return [value for group in groups for value in group if isinstance(value, str)]


def without_secrets_of(arguments: Sequence[str], message: str) -> str:
    """Redact the secrets of every argument that is a URL, or contains one, wherever the message quotes it."""
    for word in arguments:
        for url in {word, word.partition("=")[2]}:
            if "://" in url:
                for quoted in (url, repr(url)[1:-1]):
                    message = message.replace(quoted, without_secrets(quoted))
    return message


def plain(text: str) -> str:
    """Replace control characters, which could move the cursor or worse, by escapes such as `\\x1b`."""
    return _CONTROL.sub(lambda values: repr(values.group())[1:-1], text)


def print_line(text: str, out: TextIO | None = None) -> None:
    """Print a line that is not JSON, on standard output by default. Every command prints such lines by this.

    Control characters are escaped also if the output is not a terminal: it may be shown in one later.
    """
    print(plain(text), file=out)


def width_of(text: str) -> int:
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in _WIDE else 1 for c in text)


def cut(text: str, width: int) -> str:
    """Shorten a text to at most `width` columns; a shortened text ends in `…`."""
    if width_of(text) <= width:
        return text
    kept, used = [], 1
    for char in text:
        used += width_of(char)
        if used > width:
            break
        kept.append(char)
    return "".join(kept) + "…"


def padded(text: str, width: int, *, right: bool = False) -> str:
    """Return the text in exactly `width` columns, cut or padded; `right`: aligned to the right."""
    shown = cut(text, width)
    blanks = " " * (width - width_of(shown))
    return blanks + shown if right else shown + blanks


# Rows as a table: columns are as wide as their cells, cut to the terminal.

MEASURED_ROWS = 1_000  # that decide the widths of columns
SHOWN_ROWS = 1_000  # that are formatted at a time
CELL_WIDTH_MAX = 200
CELL_WIDTH_MIN = 6  # columns are not narrowed further; columns that still do not fit are omitted, from the last
GAP = "  "
NULL = "null"


def table_lines(tables: Iterator[pa.Table], empty: pa.Table, screen: Screen) -> Iterator[str]:
    """Format rows as a table with the columns of `empty`: a header, then a line for each row.

    The first MEASURED_ROWS rows decide the widths and are held in memory. A last line names the omitted columns.
    """
    first, tables = _measured(tables)
    names = [plain(name) for name in empty.schema.names]
    columns = _texts(pa.concat_tables([empty.schema.empty_table(), *first]).combine_chunks())
    natural = [max(map(width_of, (name, *column))) for name, column in zip(names, columns, strict=True)]
    widths = fitted(natural, screen.width)
    kinds, types = empty.schema.types, pa.types
    right = [types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) for kind in kinds]
    header = [padded(name, width, right=r) for name, width, r in zip(names, widths, right, strict=False)]
    yield screen.paint(_BOLD, GAP.join(header).rstrip())
    for table in chain(first, tables):
        for start in range(0, len(table), SHOWN_ROWS):
            shown = _texts(table.slice(start, SHOWN_ROWS).select(range(len(widths))))
            cells = []
            for column, width, is_right in zip(shown, widths, right, strict=False):
                texts = ((text, padded(text, width, right=is_right)) for text in column)
                cells.append([screen.paint(_DIM, shown) if text == NULL else shown for text, shown in texts])
            for row in zip(*cells, strict=True):
                yield GAP.join(row).rstrip()
    if len(widths) < len(names):
        yield screen.paint(_DIM, f"(not shown: {', '.join(names[len(widths) :])})")


def fitted(natural: list[int], width: int | None) -> list[int]:
    """Fit column widths into a terminal of `width` columns: narrow the widest ones, then omit the last ones."""
    widths = [min(each, CELL_WIDTH_MAX) for each in natural]
    if width is None:
        return widths
    while len(widths) > 1 and sum(min(each, CELL_WIDTH_MIN) for each in widths) + len(GAP) * (len(widths) - 1) > width:
        widths.pop()
    left = width - len(GAP) * (len(widths) - 1)
    most = max(widths, default=0)
    while most > CELL_WIDTH_MIN and sum(min(each, most) for each in widths) > left:
        most -= 1
    return [max(1, min(each, most, width)) for each in widths]


def _measured(tables: Iterator[pa.Table]) -> tuple[list[pa.Table], Iterator[pa.Table]]:
    """Split the tables into those with the first MEASURED_ROWS rows, and the rest."""
    first: list[pa.Table] = []
    rows = 0
    while rows < MEASURED_ROWS and (table := next(tables, None)) is not None:
        head, rest = table.slice(0, MEASURED_ROWS - rows), table.slice(MEASURED_ROWS - rows)
        first.append(head)
        rows += len(head)
        if len(rest):
            tables = chain([rest], tables)
    return first, tables


def _texts(table: pa.Table) -> list[list[str]]:
    """Return the texts of the cells, column by column."""
    columns = []
    for column in table.columns:
        texts: list[str | None] = []
        for chunk in column.chunks:
            cells = to_cells(chunk)
            texts += (cells if pa.types.is_string(cells.type) else cells.cast(pa.string())).to_pylist()
        columns.append([NULL if text is None else plain(text) for text in texts])
    return columns


# How commands print rows: as a table in a terminal, else as NDJSON, or in the format that is given.

TABLE, NDJSON = "table", "ndjson"
TEXTS = (TABLE, NDJSON, "csv")
FORMATS = (*TEXTS, "parquet", "arrow")
AS_OF = "a time, or an instant: 2026-11-20T12:00:00Z; default: the latest"
_FORMS = {NDJSON: lambda char: f"\\u{ord(char):04x}", "csv": plain}  # of control characters, for a terminal
CHANGED_ROWS = 10_000  # of changes that are formatted at a time


def add_selection(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--where", metavar="PREDICATE", help='only rows that match it: "amount > 10"')
    parser.add_argument("--columns", metavar="A,B", help="only these columns")


def add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=FORMATS, help=f"default: {TABLE} in a terminal, else {NDJSON}")
    add_arguments(parser)


def columns(arguments: argparse.Namespace) -> list[str] | None:
    """The columns that --columns lists; None: all. Raises InvalidUsage for an empty list."""
    names = columns_of(arguments.columns)
    if names == []:
        raise InvalidUsage("--columns names no column")
    return names


@dataclass(frozen=True)
class Output:
    """Standard output, and the format of rows in it."""

    form: str
    screen: Screen

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Output:
        """Read the arguments of `add_format`. Raises InvalidUsage: a binary format would go to a terminal."""
        screen = Screen.of(sys.stdout, arguments.no_colour)
        form = arguments.format or (TABLE if screen.is_terminal else NDJSON)
        if screen.is_terminal and form not in TEXTS:
            raise InvalidUsage(f"--format {form} is binary: redirect it, or use `persist export`")
        return cls(form, screen)

    def show(self, snapshot: Snapshot) -> None:
        """Print the rows of a snapshot, each as often as its diff says. Raises what reading raises."""
        counted, escape = CountedRows(snapshot), _FORMS.get(self.form, plain)
        if self.form != TABLE:
            for data in rows.write(iter(counted), counted.empty, self.form):
                if self.screen.is_terminal:  # control characters other than ends of lines and tabs are escaped
                    text = data.decode().replace("\r\n", "\n")
                    sys.stdout.write(_CONTROL.sub(lambda c: c[0] if c[0] in "\n\t" else escape(c[0]), text))
                else:
                    sys.stdout.buffer.write(data)
        else:
            for line in table_lines(iter(counted), counted.empty, self.screen):
                print(line)
            if self.screen.is_terminal:
                print(self.screen.paint(_DIM, f"({counted.summary()})"))
        sys.stdout.flush()


class CountedRows:
    """The rows of a snapshot, each as often as its diff says, and how many were iterated over. Iterable once."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.empty = snapshot.empty().drop_columns([DIFF])
        self.count = 0

    def __iter__(self) -> Iterator[pa.Table]:
        for table in self._snapshot.batches():
            for piece in expand_rows(table):
                self.count += len(piece)
                yield piece

    def summary(self) -> str:
        """Such as `1,024 rows, as of 416`."""
        return f"{self.count:,} row{'' if self.count == 1 else 's'}, as of {self._snapshot.as_of}"


def show_changes(table: pa.Table, screen: Screen) -> None:
    """Print rows with `__diff`, and perhaps `__time`: as NDJSON, or in a terminal with + and -, green and red."""
    for start in range(0, len(table), CHANGED_ROWS):
        piece = table.slice(start, CHANGED_ROWS)
        if not screen.is_terminal:
            sys.stdout.buffer.write(ndjson(piece))
            continue
        for line in _signed(piece, screen):
            print(line)
    sys.stdout.flush()


def _signed(table: pa.Table, screen: Screen) -> Iterator[str]:
    """Format each row as a line: its time, + or -, and how often it occurs."""
    extra = [name for name in (TIME, DIFF) if name in table.column_names]
    lines = ndjson(table.drop_columns(extra)).decode().split("\n")[:-1]  # a text may have other ends of lines
    times = table.column(TIME).to_pylist() if TIME in extra else [None] * len(table)
    for line, time, diff in zip(lines, times, table.column(DIFF).to_pylist(), strict=True):
        at = "" if time is None else screen.paint(_DIM, f"{time:>6} ")
        often = "" if abs(diff) == 1 else f"  ({abs(diff)} times)"
        sign, colour = ("+", _GREEN) if diff > 0 else ("-", _RED)
        yield at + screen.paint(colour, f"{sign} {plain(line)}{often}")


# Progress of one activity, on one line.

WIDTH = 24
MIB = 1024 * 1024
LINE_MAX = 100


class ProgressBar:
    """Shows the activity that progressed last; several threads may report. Clears its line when one completes.

    It is shown only in a terminal.
    """

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._is_terminal = out.isatty()
        self._lock = threading.Lock()
        self._is_shown = False

    def __call__(self, name: str, done: int, total: int) -> None:
        """Report that `done` of `total` bytes of the shard or file `name` have been read."""
        share = 1.0 if total <= 0 else min(1.0, done / total)
        filled = round(share * WIDTH)
        line = (
            f"{plain(name[-40:])} [{'#' * filled}{'.' * (WIDTH - filled)}] {done / MIB:,.1f} of {total / MIB:,.1f} MiB"
        )
        with self._lock:
            if share < 1 and self._is_terminal:
                self._out.write("\r" + line[:LINE_MAX].ljust(LINE_MAX))
                self._out.flush()
                self._is_shown = True
            else:
                self._clear()

    def clear(self) -> None:
        """Clear the line, if it is shown, before other output."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self._is_shown:
            self._out.write("\r" + " " * LINE_MAX + "\r")
            self._out.flush()
            self._is_shown = False
