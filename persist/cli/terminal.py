"""What a terminal shows: width, colours, tables of rows, progress; safe against control sequences."""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import threading
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TextIO

import pyarrow as pa

from blob import without_secrets
from persist.client.arguments import columns_of
from persist.client.read_api import NOW, THEN
from persist.client.row_reader import expanded
from persist.client.snapshot import Snapshot
from persist.codecs import rows
from persist.codecs.csv_rows import cells_of
from persist.codecs.json_rows import ndjson
from persist.core.errors import InvalidUsage
from persist.parts import DIFF, TIME

# What a terminal shows: colours, how wide it is, and texts that cannot take it over.


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_WIDE = ("W", "F")
_BOLD, _DIM, _RED, _GREEN = ("1", "2", "31", "32")
NO_COLOUR = ("--no-colour", "--no-color")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --no-colour."""
    parser.add_argument(*NO_COLOUR, dest="no_colour", action="store_true", help="no colours; NO_COLOR says the same")


@dataclass(frozen=True)
class Screen:
    """Where output goes. `width` is in columns of a terminal; None: lines are not cut."""

    is_terminal: bool = False
    colours: bool = False
    width: int | None = None

    @classmethod
    def of(cls, out: TextIO, no_colour: bool = False) -> Screen:
        """What a stream is, by itself and by the environment. Only a terminal has colours, unless NO_COLOR is set."""
        is_terminal = out.isatty()
        plain = no_colour or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        width = shutil.get_terminal_size((0, 0)).columns if is_terminal else 0
        return cls(is_terminal, is_terminal and not plain, width or None)

    def bold(self, text: str) -> str:
        return self._in(_BOLD, text)

    def dim(self, text: str) -> str:
        return self._in(_DIM, text)

    def red(self, text: str) -> str:
        return self._in(_RED, text)

    def green(self, text: str) -> str:
        return self._in(_GREEN, text)

    def _in(self, colour: str, text: str) -> str:
        return f"\033[{colour}m{text}\033[0m" if self.colours and text else text


def complain(command: str, message: str, arguments: Sequence[str] = ()) -> None:
    """Say on standard error, in one line, what went wrong."""
    screen = Screen.of(sys.stderr, any(name in arguments for name in NO_COLOUR))
    print(f"{screen.red(command)}: {plain(without_secrets_of(arguments, message))}", file=sys.stderr)


def texts_of(arguments: argparse.Namespace) -> list[str]:
    """What was given, for `complain`."""
    found = (one if isinstance(one, list) else [one] for one in vars(arguments).values())
    return [one for some in found for one in some if isinstance(one, str)]


def without_secrets_of(arguments: Sequence[str], message: str) -> str:
    """The message with each argument that is a URL, or holds one, without its secrets, wherever it was given."""
    for word in arguments:
        for url in {word, word.partition("=")[2]}:
            if "://" in url:
                for said in (url, repr(url)[1:-1]):
                    message = message.replace(said, without_secrets(said))
    return message


def plain(text: str) -> str:
    """The text with characters that would move the cursor, or do worse, as escapes such as `\\x1b`."""
    return _CONTROL.sub(lambda found: repr(found.group())[1:-1], text)


def harmless(text: str, form: Callable[[str], str]) -> str:
    """The text of many lines with characters that would move the cursor elsewhere as `form` writes them."""
    return _CONTROL.sub(lambda found: found.group() if found.group() in "\n\r\t" else form(found.group()), text)


def width_of(text: str) -> int:
    """How many columns of a terminal a text takes."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in _WIDE else 1 for c in text)


def cut(text: str, width: int) -> str:
    """The text in at most so many columns; what is cut ends in `…`."""
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
    """The text in exactly so many columns, cut or with blanks; `right`: at their right end."""
    found = cut(text, width)
    blanks = " " * (width - width_of(found))
    return blanks + found if right else found + blanks


# Rows as a table for people: columns as wide as what is in them, cut to the terminal.


MEASURED_ROWS = 1_000  # by which the widths of columns are chosen
SHOWN_ROWS = 1_000  # that become text at a time
CELL_WIDTH_MAX = 200
CELL_WIDTH_MIN = 6  # columns are not made narrower; where they do not fit then, the last ones are left out
GAP = "  "
NULL = "null"


def table_lines(tables: Iterator[pa.Table], empty: pa.Table, screen: Screen) -> Iterator[str]:
    """The lines of a table of these rows, all with the columns of `empty`: the header, and a line for each row.

    Widths are those of the first MEASURED_ROWS rows, which are held. A last line tells of columns that are left out.
    """
    first, tables = _measured(tables)
    names = [plain(name) for name in empty.schema.names]
    columns = _texts(pa.concat_tables([empty.schema.empty_table(), *first]).combine_chunks())
    natural = [max(map(width_of, (name, *column))) for name, column in zip(names, columns, strict=True)]
    widths = fitted(natural, screen.width)
    right = [_is_number(field.type) for field in empty.schema]
    header = [padded(name, width, right=r) for name, width, r in zip(names, widths, right, strict=False)]
    yield screen.bold(GAP.join(header).rstrip())
    for table in chain(first, tables):
        for start in range(0, len(table), SHOWN_ROWS):
            shown = _texts(table.slice(start, SHOWN_ROWS).select(range(len(widths))))
            cells = (
                [_cell(text, width, is_right, screen) for text in column]
                for column, width, is_right in zip(shown, widths, right, strict=False)
            )
            for row in zip(*cells, strict=True):
                yield GAP.join(row).rstrip()
    if len(widths) < len(names):
        yield screen.dim(f"(not shown: {', '.join(names[len(widths) :])})")


def fitted(natural: list[int], width: int | None) -> list[int]:
    """The widths of columns in so many columns of a terminal; the widest are made narrower, the last ones left out."""
    widths = [min(one, CELL_WIDTH_MAX) for one in natural]
    if width is None:
        return widths
    while len(widths) > 1 and sum(min(one, CELL_WIDTH_MIN) for one in widths) + len(GAP) * (len(widths) - 1) > width:
        widths.pop()
    left = width - len(GAP) * (len(widths) - 1)
    most = max(widths, default=0)
    while most > CELL_WIDTH_MIN and sum(min(one, most) for one in widths) > left:
        most -= 1
    return [max(1, min(one, most, width)) for one in widths]


def _measured(tables: Iterator[pa.Table]) -> tuple[list[pa.Table], Iterator[pa.Table]]:
    """The tables with the first rows, and the others."""
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
    """The cells of each column."""
    found = []
    for column in table.columns:
        texts: list[str | None] = []
        for chunk in column.chunks:
            cells = cells_of(chunk)
            texts += (cells if pa.types.is_string(cells.type) else cells.cast(pa.string())).to_pylist()
        found.append([NULL if text is None else plain(text) for text in texts])
    return found


def _cell(text: str, width: int, is_right: bool, screen: Screen) -> str:
    shown = padded(text, width, right=is_right)
    return screen.dim(shown) if text == NULL else shown


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


# How commands show rows: a table in a terminal, else NDJSON, or as they are told.


TABLE, NDJSON = "table", "ndjson"
TEXTS = (TABLE, NDJSON, "csv")
FORMATS = (*TEXTS, "parquet", "arrow")
AS_OF = "a time, or an instant: 2026-11-20T12:00:00Z; else the latest"
_FORMS = {NDJSON: lambda char: f"\\u{ord(char):04x}", "csv": plain}  # of control characters, for a terminal
CHANGED_ROWS = 10_000  # of changes that become text at a time


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add --where and --columns."""
    parser.add_argument("--where", metavar="PREDICATE", help='only rows for which it is true: "amount > 10"')
    parser.add_argument("--columns", metavar="A,B", help="which columns; else all")


def add_schema(parser: argparse.ArgumentParser) -> None:
    """Add --schema."""
    told = f"{NOW}: the columns of today; {THEN}: those that the shard had as of the time"
    parser.add_argument("--schema", choices=(NOW, THEN), default=NOW, help=told)


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add --format and --no-colour."""
    parser.add_argument("--format", choices=FORMATS, help=f"{TABLE} in a terminal, else {NDJSON}, unless it is given")
    add_arguments(parser)


def columns(arguments: argparse.Namespace) -> list[str] | None:
    """The columns that --columns lists; None: all. Raises InvalidUsage where it lists none."""
    found = columns_of(arguments.columns)
    if found == []:
        raise InvalidUsage("--columns names none")
    return found


@dataclass(frozen=True)
class Output:
    """Standard output, and in which form rows go there."""

    form: str
    screen: Screen

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Output:
        """As the arguments of `add_format` say. Raises InvalidUsage where bytes would go to a terminal."""
        screen = Screen.of(sys.stdout, arguments.no_colour)
        form = arguments.format or (TABLE if screen.is_terminal else NDJSON)
        if screen.is_terminal and form not in TEXTS:
            raise InvalidUsage(f"--format {form} is no text for a terminal: redirect it, or use `persist export`")
        return cls(form, screen)

    def show(self, snapshot: Snapshot) -> None:
        """The rows of a snapshot, each as often as it is there. Raises what reading does."""
        pieces = (piece for table in snapshot.batches() for piece in expanded(table))
        empty = snapshot.empty().drop_columns([DIFF])
        if self.form != TABLE:
            for data in rows.write(pieces, empty, self.form):
                if self.screen.is_terminal:
                    sys.stdout.write(harmless(data.decode(), _FORMS[self.form]))
                else:
                    sys.stdout.buffer.write(data)
            sys.stdout.flush()
            return
        count = 0

        def counted() -> Iterator[pa.Table]:
            nonlocal count
            for piece in pieces:
                count += len(piece)
                yield piece

        for line in table_lines(counted(), empty, self.screen):
            print(line)
        if self.screen.is_terminal:
            shown = f"{count:,} row{'' if count == 1 else 's'}, as of {snapshot.as_of}"
            print(self.screen.dim(f"({shown})"))
        sys.stdout.flush()


def show_changes(table: pa.Table, screen: Screen) -> None:
    """Rows with `__diff`, and perhaps `__time`: as NDJSON, or in a terminal with + and -, in green and red."""
    for start in range(0, len(table), CHANGED_ROWS):
        piece = table.slice(start, CHANGED_ROWS)
        if not screen.is_terminal:
            sys.stdout.buffer.write(ndjson(piece))
            continue
        for line in _signed(piece, screen):
            print(line)
    sys.stdout.flush()


def _signed(table: pa.Table, screen: Screen) -> Iterator[str]:
    """A line for each row: its time, whether it comes or goes, and how often."""
    told = [name for name in (TIME, DIFF) if name in table.column_names]
    lines = ndjson(table.drop_columns(told)).decode().splitlines()
    times = table.column(TIME).to_pylist() if TIME in told else [None] * len(table)
    for line, time, diff in zip(lines, times, table.column(DIFF).to_pylist(), strict=True):
        at = "" if time is None else screen.dim(f"{time:>6} ")
        often = "" if abs(diff) == 1 else f"  ({abs(diff)} times)"
        paint = screen.green if diff > 0 else screen.red
        yield at + paint(f"{'+' if diff > 0 else '-'} {plain(line)}{often}")


# One line in a terminal that says how far something is: a merge of a shard, a file that is imported.


WIDTH = 24
MIB = 1024 * 1024
LINE_MAX = 100


class ProgressBar:
    """Shows the latest thing that moved; several threads may report. Clears its line when one is done."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._lock = threading.Lock()
        self._is_shown = False

    def __call__(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes that are read, for a shard or a file called `what`."""
        share = 1.0 if total <= 0 else min(1.0, done / total)
        filled = round(share * WIDTH)
        line = f"{what[-40:]} [{'#' * filled}{'.' * (WIDTH - filled)}] {done / MIB:,.1f} of {total / MIB:,.1f} MiB"
        with self._lock:
            if share < 1:
                self._out.write("\r" + line[:LINE_MAX].ljust(LINE_MAX))
                self._out.flush()
                self._is_shown = True
            else:
                self._clear()

    def clear(self) -> None:
        """Take the line away, if one is there: something else is to be said."""
        with self._lock:
            self._clear()

    def _clear(self) -> None:
        if self._is_shown:
            self._out.write("\r" + " " * LINE_MAX + "\r")
            self._out.flush()
            self._is_shown = False
