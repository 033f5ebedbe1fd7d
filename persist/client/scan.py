"""Scans: a shard as of a time for other engines, which read of it what a query needs, as often as they like."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from types import TracebackType
from typing import Any, NoReturn, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs

from persist.client.arguments import checked
from persist.client.expanding import expanded, first_negative
from persist.client.holding_on import Hold
from persist.client.scan_duckdb import relation
from persist.client.scan_polars import lazy_frame
from persist.client.scanning import HeldRows
from persist.client.snapshot import Held
from persist.core.errors import InvalidUsage
from persist.parts import DIFF, Selection, overlapping, sound_schemas
from persist.parts.expressions import MayMatch, Shown, matching, needed
from persist.parts.files import Keeps
from persist.parts.reader import Finish
from persist.parts.then import selected

BATCH_ROWS = 131_072  # of a batch that an engine is given, at most
INSTEAD = "a scan is read by scanner(), to_table() or to_reader()"
_HOW = frozenset(  # of pyarrow's own datasets: how files are read, which is for the shard to say
    ("batch_readahead", "fragment_readahead", "fragment_scan_options", "use_threads", "cache_metadata", "memory_pool")
)


def scanned(held: Held, selection: Selection, timestamp: datetime | None) -> Scan:
    """What is selected of a time that is held, which the scan holds from here on. Raises InvalidUsage."""
    wanted = selected(sound_schemas(held.view.schemas), selection)
    if wanted.columns == ():
        raise InvalidUsage("columns is empty; a scan shows at least one column, or None for all")
    runs = overlapping(held.runs, wanted.key_range) if wanted.is_narrow else held.runs
    return Scan(HeldRows(held, Hold(held.lease, held.settings.lease_ms), selection, runs), timestamp)


class Scan(ds.FileSystemDataset):  # DuckDB and Polars ask only what is a dataset of pyarrow for some rows and columns
    """The contents of a shard as of a time for another engine; `Shard.scan` gives one.

    It is a dataset of pyarrow: DuckDB and Polars read only the columns that a query needs, and only row groups that may
    have rows that match. Each row comes as often as it is there. However often it is read, and whatever is written
    meanwhile, the rows are the same, in bounded memory.

    Its time is held until it is closed, or nobody refers to it any more. Reading may raise Expired (it is closed, or
    the hold was lost), NegativeMultiplicity (a row was taken away more often than added), Unavailable (retrying is
    safe) and Corruption. An engine may show them as errors of its own, with the same message.
    """

    def __init__(self, rows: HeldRows, timestamp: datetime | None = None, matched: Any = None) -> None:
        # What asks pyarrow's own code for rows, behind the methods below, finds a file that is never there. Without it
        # there would be no rows, and nobody would be told.
        files, kind = pyarrow.fs.LocalFileSystem(), ds.ParquetFileFormat()
        super().__init__([kind.make_fragment(INSTEAD, files)], rows.kinds, kind, files)
        self._rows = rows
        self._matched = matched
        self.timestamp = timestamp

    def __repr__(self) -> str:
        state = ", closed" if self._rows.hold.is_closed else ""
        return f"Scan({self.shard!r}, as_of={self.as_of}, columns={self.schema.names}{state})"

    @property
    def shard(self) -> str:
        """The name of the shard."""
        return self._rows.held.view.name

    @property
    def as_of(self) -> int:
        """The time."""
        return self._rows.held.as_of

    # --- reading

    def scanner(self, columns: Shown = None, filter: Any = None, batch_size: int = BATCH_ROWS, **how: Any) -> Any:
        """A scanner of pyarrow, as engines ask for it. It is read once; the scan gives as many as are wanted.

        Args:
            columns: names, or expressions by names; None is all.
            filter: a `pyarrow.compute.Expression`: only rows for which it is true. Floats are compared as Arrow does:
                NaN is equal to nothing, nor less or more than a number.
            batch_size: the most rows of a batch.
            how: what a dataset of pyarrow takes beside them; it changes nothing here.
        Raises: InvalidUsage (no such column, an expression that does not fit, or an unknown argument).
        """
        checked("batch_size", batch_size, int)
        unknown = sorted(how.keys() - _HOW)
        if unknown:
            raise InvalidUsage(f"a scan takes no argument {unknown[0]!r}; it takes columns, filter and batch_size")
        if batch_size < 1:
            raise InvalidUsage(f"batch_size is {batch_size}; it must be at least 1")
        wanted = self._and(filter)
        shown, read = needed(self.schema, columns, wanted)
        if not shown:  # rows without columns have no number: one column is read, and left out at the end
            shown = self.schema.names[:1]
            read = [name for name in self.schema.names if name in (*shown, *read)]
        kinds = pa.schema([self.schema.field(name) for name in shown])
        batches = pa.RecordBatchReader.from_batches(kinds, self._batches(shown, read, wanted, batch_size))
        names = kinds.names if columns is None else columns
        return ds.Scanner.from_batches(batches, columns=names, batch_size=batch_size)

    def to_reader(self, columns: Shown = None, filter: Any = None) -> pa.RecordBatchReader:
        """The rows as a stream, in key order. Arguments and errors are those of `scanner`."""
        return self.scanner(columns, filter).to_reader()

    def to_batches(self, columns: Shown = None, filter: Any = None, **how: Any) -> Iterator[pa.RecordBatch]:
        """The rows batch by batch. Arguments and errors are those of `scanner`."""
        return iter(self.scanner(columns, filter, **how).to_reader())

    def to_table(self, columns: Shown = None, filter: Any = None, **how: Any) -> pa.Table:
        """All rows in memory. Arguments and errors are those of `scanner`."""
        return self.scanner(columns, filter, **how).to_reader().read_all()

    def count_rows(self, filter: Any = None, **how: Any) -> int:
        """How many rows there are for which the filter is true. Arguments and errors are those of `scanner`."""
        wanted = self._and(filter)
        _, read = needed(self.schema, (), wanted)
        total = 0
        for table in self._tables([], read, wanted):
            if first_negative(table) is not None:
                next(expanded(table))  # which says so
            total += pc.sum(table.column(DIFF)).as_py()
        return total

    def filter(self, expression: Any) -> Scan:
        """The rows for which an expression of Arrow's is true, as a scan. Raises what `scanner` does."""
        wanted = self._and(expression)
        needed(self.schema, None, wanted)
        return Scan(self._rows, self.timestamp, wanted)

    def duckdb(self, connection: Any = None) -> Any:
        """The rows as a DuckDB relation, read when it is asked for its result.

        DuckDB reads by itself the files that have their rows as they are, where they lie on this machine; all other
        rows come from here. So does everything after `filter`, or where the scan has `where` or bounds of keys.

        Args:
            connection: a connection of DuckDB's; None is its default one.
        Raises: InvalidUsage (there is no DuckDB, or a column has half floats), and what reading may.
        """
        rows = self._rows if self._matched is None else None
        return relation(self, rows, lambda left: Scan(left, self.timestamp), connection)

    def polars(self) -> Any:
        """The rows as a Polars LazyFrame, which reads what it needs whenever it is collected.

        Rows are left out by the rules of Polars, to which NaN is more than all numbers.
        Raises: InvalidUsage (there is no Polars).
        """
        return lazy_frame(self.schema, self._tables_for)

    def __arrow_c_schema__(self) -> Any:
        return self.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.to_reader().__arrow_c_stream__(requested_schema)

    # --- its time

    def keep(self) -> None:
        """Renew the hold; it does so by itself. Raises Expired: it is gone."""
        self._rows.check()

    def close(self) -> None:
        """Give the time back: nobody can read the scan any more, nor those made from it. Repeating it is safe."""
        self._rows.hold.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- what other datasets can

    def get_fragments(self, filter: Any = None) -> NoReturn:
        """A scan has no files of its own. Raises InvalidUsage."""
        raise InvalidUsage(f"a scan has no fragments; {INSTEAD}")

    def replace_schema(self, schema: Any) -> NoReturn:
        """A scan has the columns that it was made with, and is no part of a union. Raises InvalidUsage."""
        raise InvalidUsage(
            "a scan keeps its columns, and is no part of a union of datasets; call shard.scan(columns=...) for other "
            "columns, or put tables together: pyarrow.concat_tables([scan.to_table(), ...])"
        )

    def sort_by(self, sorting: Any, **how: Any) -> NoReturn:
        """Rows are sorted as a table, or by an engine. Raises InvalidUsage."""
        raise _as_table("sort_by")

    def join(self, right_dataset: Any, keys: Any, *args: Any, **how: Any) -> NoReturn:
        """Rows are joined as a table, or by an engine. Raises InvalidUsage."""
        raise _as_table("join")

    def join_asof(self, right_dataset: Any, on: Any, by: Any, tolerance: Any, **how: Any) -> NoReturn:
        """Rows are joined as a table, or by an engine. Raises InvalidUsage."""
        raise _as_table("join_asof")

    def __reduce__(self) -> NoReturn:
        raise InvalidUsage("a scan lives in its process; call shard.scan(as_of=...) in the other one")

    # --- how

    def _and(self, filter: Any) -> Any:
        checked("filter", filter, pc.Expression, type(None))
        if self._matched is None or filter is None:
            return self._matched if filter is None else filter
        return self._matched & filter

    def _tables(self, shown: list[str], read: list[str], wanted: Any) -> Iterator[pa.Table]:
        """What is shown of rows that match, each with its `__diff`."""

        def finish(table: pa.Table) -> pa.Table:
            return matching(table, wanted).select([*shown, DIFF])

        if wanted is None:
            return self._rows.tables(read)
        return self._rows.tables(read, MayMatch(wanted, self.schema), finish)

    def _batches(self, shown: list[str], read: list[str], wanted: Any, rows: int) -> Iterator[pa.RecordBatch]:
        for table in self._tables(shown, read, wanted):
            for piece in expanded(table):
                yield from piece.to_batches(rows)

    def _tables_for(self, names: list[str], may: Keeps | None, finish: Finish | None) -> Iterator[pa.Table]:
        """For an engine that tells by itself which row groups it wants, and which of their rows."""
        read, wanted = names, self._matched

        def both(table: pa.Table) -> pa.Table:
            found = matching(table, wanted).select([*names, DIFF])
            return found if finish is None else finish(found)

        if wanted is not None:
            _, read = needed(self.schema, names, wanted)
        for table in self._rows.tables(read, may, finish if wanted is None else both):
            yield from expanded(table)


def _as_table(verb: str) -> InvalidUsage:
    return InvalidUsage(
        f"a scan is read in key order, and has no {verb}; call scan.to_table().{verb}(...), or let an engine do it: "
        "scan.duckdb(), scan.polars()"
    )
