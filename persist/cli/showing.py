"""How commands show rows: a table in a terminal, else NDJSON, or as they are told."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from persist.cli import screen as terminal
from persist.cli.screen import Screen, harmless, plain
from persist.cli.table import table_lines
from persist.client.arguments import columns_of
from persist.client.expanding import expanded
from persist.client.reading import NOW, THEN
from persist.client.snapshot import Snapshot
from persist.codecs import rows
from persist.codecs.json_rows import ndjson
from persist.core.errors import InvalidUsage
from persist.parts import DIFF, TIME

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
    terminal.add_arguments(parser)


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
