"""Rows as a table for people: columns as wide as what is in them, cut to the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pyarrow as pa

from persist.cli.screen import Screen, padded, plain, width_of
from persist.codecs.csv_rows import cells_of

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
