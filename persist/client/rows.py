"""Rows in splits, held by a lease: what a snapshot and the changes between two times have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import pyarrow as pa

from blob import optional
from persist.client.holding_on import Hold
from persist.client.timed import Timeable
from persist.client.transport import Transport
from persist.core.errors import InvalidUsage
from persist.parts import ShardSchema
from persist.parts.column_types import without_half_floats


class Split(Protocol):
    """A key range of rows that can be read anywhere."""

    @property
    def columns(self) -> tuple[str, ...] | None: ...

    def read(self, transport: Transport) -> Iterator[pa.Table]: ...


class Rows(Timeable):
    """The base of those who hold rows."""

    schema: ShardSchema
    splits: Sequence[Split]
    _transport: Transport
    _lease: Hold
    _closed: bool
    _is_entered = False  # as a context manager, whose end closes it

    def batches(self) -> Iterator[pa.Table]:
        """All rows, split by split, in key order: the columns, and `__diff`, how often each row comes.

        After the last one it is closed, and so it is when the loop is left, unless that is within a `with` of it.
        Raises what reading may; see the class.
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
        """A pandas DataFrame: of a snapshot, with each row as often as it is there; of changes, with `__diff`.

        Its types are Arrow's (`pandas.ArrowDtype`), so that nothing is lost: inserted again, it is the same rows.
        Raises what `to_arrow` does, for a snapshot that with `expand=True`, and InvalidUsage without pandas.
        """
        pandas = optional("pandas", "to_pandas()", "pandas", InvalidUsage)
        return self._shown().to_pandas(types_mapper=pandas.ArrowDtype)

    def to_polars(self) -> Any:
        """A Polars DataFrame of the same rows as `to_pandas`. Raises what that does, or InvalidUsage without Polars."""
        polars = optional("polars", "to_polars()", "polars", InvalidUsage)
        return polars.from_arrow(self._shown())

    def to_duckdb(self) -> Any:
        """A DuckDB relation of the same rows as `to_pandas`, half floats as floats.

        Raises what that does, or InvalidUsage without DuckDB.
        """
        duckdb = optional("duckdb", "to_duckdb()", "duckdb", InvalidUsage)
        shown = self._shown()
        kinds = [field.with_type(without_half_floats(field.type)) for field in shown.schema]
        return duckdb.from_arrow(shown.cast(pa.schema(kinds)))

    def _shown(self) -> pa.Table:
        """The rows as a data frame shows them."""
        return self._all()

    def _all(self) -> pa.Table:
        with self:
            pieces = list(self.batches())
        return pa.concat_tables(pieces) if pieces else self.empty()

    def keep(self) -> None:
        """Renew the lease; reading does it by itself. Raises Expired: it is gone."""
        self._lease.keep()

    def close(self) -> None:
        """Give the lease back. Repeating it is safe. Raises nothing: where nobody answers, it lapses by itself."""
        if not self._closed:
            self._closed = True
            self._lease.close()

    def __enter__(self) -> Self:
        self._is_entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
