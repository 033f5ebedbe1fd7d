"""Rows repeated as often as they are there, in pieces that are bounded whatever a `__diff` says."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist.core.errors import InvalidUsage, NegativeMultiplicity

EXPANDED_ROWS_MAX = 2**31 - 1  # rows that one table may become
PIECE_ROWS = 64 * 1024
PIECE_BYTES = 16 * 1024 * 1024  # of a piece, unless one row has more


def multiplicities(table: pa.Table) -> npt.NDArray[np.int64]:
    """`__diff` for NumPy, which looks through a small batch ten times faster than a call of Arrow's."""
    found: npt.NDArray[np.int64] = table.column("__diff").to_numpy()
    return found


def first_negative(table: pa.Table) -> int | None:
    """The index of the first row that was taken away more often than it was added."""
    negative = multiplicities(table) < 0
    return int(negative.argmax()) if negative.any() else None


def expanded(table: pa.Table, rows_max: int = PIECE_ROWS) -> Iterator[pa.Table]:
    """Each row as often as its `__diff` says, without that column: one table after another, at least one.

    Pieces have at most `rows_max` rows, unless all rows are there once. Raises NegativeMultiplicity, and InvalidUsage
    beyond EXPANDED_ROWS_MAX rows.
    """
    counts = multiplicities(table)
    rows = table.drop_columns(["__diff"])
    if (counts == 1).all():
        yield rows
        return
    _check(table, rows, counts)
    if counts.any():
        yield from _pieces(rows, counts, rows_max)
    else:
        yield rows.slice(0, 0)


def _pieces(rows: pa.Table, counts: npt.NDArray[np.int64], rows_max: int) -> Iterator[pa.Table]:
    """The repeated rows. Where rows are large they are told apart, so that no piece is larger than it may be."""
    total = int(counts.sum())
    if not total:
        return
    nbytes = max(rows.nbytes, 1)
    if total <= rows_max and int(counts.max()) * nbytes <= PIECE_BYTES:
        yield rows.take(pa.array(np.repeat(np.arange(len(counts)), counts)))
    elif len(counts) == 1:
        most = max(1, min(rows_max, PIECE_BYTES // nbytes))
        for start in range(0, total, most):
            yield rows.take(pa.array(np.zeros(min(most, total - start), np.int64)))
    else:
        half = len(counts) // 2
        yield from _pieces(rows.slice(0, half), counts[:half], rows_max)
        yield from _pieces(rows.slice(half), counts[half:], rows_max)


def limited(tables: Iterator[pa.Table], limit: int | None) -> Iterator[pa.Table]:
    """The first rows, together as many as `limit` says (None: all), each counted as often as `__diff` says.

    Of the last row only so many are given. A row that was taken away more often than added counts as often as it is
    missing. No more tables are taken than these rows need.
    """
    if limit is None:
        yield from tables
        return
    left = limit
    while left > 0 and (table := next(tables, None)) is not None:
        counts = multiplicities(table)
        # Counts are capped first, so that their sum cannot wrap around.
        ends = np.cumsum(np.minimum(np.abs(np.maximum(counts, -left)), left))
        last = int(np.searchsorted(ends, left))
        if last == len(ends):
            left -= int(ends[-1]) if len(ends) else 0
            yield table
            continue
        over = int(ends[last]) - left
        found, kept = table.slice(0, last + 1), counts[: last + 1].copy()
        kept[last] = np.sign(kept[last]) * (min(abs(int(kept[last])), left) - over)
        place = found.column_names.index("__diff")
        yield found.set_column(place, found.schema.field(place), pa.array(kept))
        return


def _check(table: pa.Table, rows: pa.Table, counts: npt.NDArray[np.int64]) -> None:
    """The sum of the counts is taken in floating point, where it cannot wrap around."""
    negative = first_negative(table)
    if negative is not None:
        missing = int((counts < 0).sum())
        raise NegativeMultiplicity(
            f"{missing} of {len(counts)} rows, taken away more often than added, cannot be shown: "
            f"{'it' if missing == 1 else 'the first'} is there {counts[negative]} times; insert what is missing, or "
            "read with to_arrow(), or expand=false over HTTP, which give each row its __diff",
            rows=missing,
        )
    if counts.sum(dtype=np.float64) > EXPANDED_ROWS_MAX:
        most = int(np.argmax(counts))
        raise InvalidUsage(
            f"more than {EXPANDED_ROWS_MAX} rows would be repeated, one of them {counts[most]} times; read with "
            "to_arrow(), or expand=false over HTTP, which give each row its __diff"
        )
