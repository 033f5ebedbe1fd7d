"""Rows of splits under a lease, readers of parts, and rows repeated by their multiplicity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from blob import optional
from persist.client.deadlines import Timeable
from persist.client.read_leases import Hold, ReadSettings
from persist.client.transport import Transport
from persist.core.errors import InvalidUsage, NegativeMultiplicity
from persist.core.state import SchemaRecord
from persist.parts import PartReader, ShardSchema, newest, valid_schemas
from persist.parts.column_types import as_schema, polars_type, without_half_floats
from persist.parts.part_files import RowGroupFilter


def _with_types(table: pa.Table, change: Callable[[pa.DataType], pa.DataType]) -> pa.Table:
    return as_schema(table, pa.schema([field.with_type(change(field.type)) for field in table.schema]))


def polars_frame(polars: Any, table: pa.Table) -> Any:
    """A Polars DataFrame of a table. Raises InvalidUsage if Polars has no type for a value."""
    try:
        return polars.from_arrow(_with_types(table, polars_type))
    except pa.ArrowException as error:
        raise InvalidUsage(f"Polars cannot hold a value: {error}; read the column with Arrow") from error


class Split(Protocol):
    """A key range of rows that can be read anywhere."""

    @property
    def columns(self) -> tuple[str, ...] | None: ...

    def read(self, transport: Transport) -> Iterator[pa.Table]: ...


class Rows(Timeable):
    """The base of results that hold rows."""

    schema: ShardSchema
    splits: Sequence[Split]
    _transport: Transport
    _lease: Hold
    _closed: bool
    _is_entered = False  # used in a `with` block, whose end closes it

    def batches(self) -> Iterator[pa.Table]:
        """All rows, split by split, in key order: the columns, and `__diff`, the multiplicity of each row.

        It is closed after the last one, and when the loop is left, unless that is inside a `with` block of it. Raises
        what reading may; see the class.
        """
        try:
            yield from self._tables()
        except GeneratorExit:  # the loop was left, or the iterator was forgotten
            if not self._is_entered:
                self._closed = True
                self._lease.release()
            raise
        self.close()

    def _tables(self) -> Iterator[pa.Table]:
        for split in self.splits:
            yield from split.read(self._transport)

    def empty(self) -> pa.Table:
        """A table of these columns without rows. Raises nothing."""
        fields = [self.schema.arrow.field(name) for name in self.schema.columns(self.splits[0].columns)]
        return pa.schema([*fields, pa.field("__diff", pa.int64(), nullable=False)]).empty_table()

    def to_pandas(self) -> Any:
        """A pandas DataFrame: of a snapshot, with rows repeated by their multiplicity; of changes, with `__diff`.

        Its types are Arrow's (`pandas.ArrowDtype`), so that nothing is lost: inserted again, it is the same rows.
        Raises what `to_arrow` does, for a snapshot with `expand=True`, and InvalidUsage without pandas.
        """
        pandas = optional("pandas", "to_pandas()", "pandas", InvalidUsage)
        return self._shown().to_pandas(types_mapper=pandas.ArrowDtype)

    def to_polars(self) -> Any:
        """A Polars DataFrame of the same rows as `to_pandas`, in the closest types that Polars has.

        Raises what that does, or InvalidUsage without Polars, or if Polars has no type for a value.
        """
        return polars_frame(optional("polars", "to_polars()", "polars", InvalidUsage), self._shown())

    def to_duckdb(self) -> Any:
        """A DuckDB relation of the same rows as `to_pandas`, half floats as floats.

        Raises what that does, or InvalidUsage without DuckDB.
        """
        duckdb = optional("duckdb", "to_duckdb()", "duckdb", InvalidUsage)
        return duckdb.from_arrow(_with_types(self._shown(), without_half_floats))

    def _shown(self) -> pa.Table:
        """The rows as a data frame shows them."""
        return self._all()

    def _all(self) -> pa.Table:
        with self:
            pieces = list(self.batches())
        return pa.concat_tables(pieces) if pieces else self.empty()

    def keep(self) -> None:
        """Renew the lease; reading renews it automatically. Raises Expired: it is gone."""
        self._lease.keep()

    def close(self) -> None:
        """Release the lease. Repeating it is safe. Raises nothing: if no store answers, it lapses."""
        if not self._closed:
            self._closed = True
            self._lease.close()

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Rows repeated by their multiplicity, in pieces that are bounded whatever a `__diff` says.

EXPANDED_ROWS_MAX = 2**31 - 1  # rows that one table may become
PIECE_ROWS = 64 * 1024
PIECE_BYTES = 16 * 1024 * 1024  # of a piece, unless one row has more


def multiplicities(table: pa.Table) -> npt.NDArray[np.int64]:
    """`__diff` as a NumPy array, which scans a small batch ten times faster than a call of Arrow's."""
    diffs: npt.NDArray[np.int64] = table.column("__diff").to_numpy()
    return diffs


def first_negative(table: pa.Table) -> int | None:
    """The index of the first row that was retracted more often than added."""
    negative = multiplicities(table) < 0
    return int(negative.argmax()) if negative.any() else None


def expand_rows(table: pa.Table, rows_max: int = PIECE_ROWS) -> Iterator[pa.Table]:
    """Each row repeated `__diff` times, without that column: one table after another, at least one.

    Pieces have at most `rows_max` rows, unless all multiplicities are 1. Raises NegativeMultiplicity, and InvalidUsage
    beyond EXPANDED_ROWS_MAX rows.
    """
    counts = multiplicities(table)
    rows = table.drop_columns(["__diff"])
    if (counts == 1).all():
        yield rows
        return
    _check(table, counts)
    if counts.any():
        yield from _pieces(rows, counts, rows_max)
    else:
        yield rows.slice(0, 0)


def _pieces(rows: pa.Table, counts: npt.NDArray[np.int64], rows_max: int) -> Iterator[pa.Table]:
    """The repeated rows. Large rows are split, so that no piece exceeds its bound."""
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


def limit_rows(tables: Iterator[pa.Table], limit: int | None) -> Iterator[pa.Table]:
    """The first rows, at most `limit` of them (None: all), counted with their multiplicity.

    The multiplicity of the last row is reduced to fit. A negative multiplicity counts by its absolute value. No more
    tables are read than these rows need.
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
        first, kept = table.slice(0, last + 1), counts[: last + 1].copy()
        kept[last] = np.sign(kept[last]) * (min(abs(int(kept[last])), left) - over)
        place = first.column_names.index("__diff")
        yield first.set_column(place, first.schema.field(place), pa.array(kept))
        return


def _check(table: pa.Table, counts: npt.NDArray[np.int64]) -> None:
    """Raise unless the rows can be repeated. Counts are summed in floating point, which cannot wrap around."""
    negative = first_negative(table)
    if negative is not None:
        missing = int((counts < 0).sum())
        raise NegativeMultiplicity(
            f"{missing} of {len(counts)} rows, retracted more often than added, cannot be shown: "
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


class _Schemas(Protocol):
    """A view, or a split of one."""

    @property
    def schemas(self) -> Mapping[int, SchemaRecord]: ...


def part_reader(
    transport: Transport, of: _Schemas, settings: ReadSettings, keeps: RowGroupFilter | None = None
) -> tuple[ShardSchema, PartReader]:
    """The current schema of a view or split, and a reader of parts of any of its sound schemas."""
    sound = valid_schemas(of.schemas)
    _, current = newest(sound)
    memory, bound = settings.memory_bytes, settings.bound
    return current, PartReader(transport.blob, sound, current, keeps=keeps, memory_bytes=memory, bound=bound)
