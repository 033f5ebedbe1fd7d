"""Scans: a shard as of a time as a pyarrow dataset, a DuckDB relation or a Polars lazy frame."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NoReturn, Self
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs

from blob import optional
from persist.client.arguments import NUMBER_MAX, check_int, checked
from persist.client.read_leases import Hold
from persist.client.row_reader import expand_rows, first_negative, part_reader, polars_frame
from persist.client.snapshot import Held, leased_blobs, with_renewal
from persist.core.batch import Part, Run
from persist.core.errors import Expired, InvalidUsage
from persist.core.record import replace as changed
from persist.parts import DIFF, Selection, ShardSchema, filter_eval, newest, overlapping_runs, valid_schemas
from persist.parts.column_types import without_half_floats
from persist.parts.filter_eval import Projection, filter_rows, required_columns
from persist.parts.part_files import PartFiles, RowGroupFilter
from persist.parts.read_plan import classify
from persist.parts.reader import Finish
from persist.parts.scan_spec import resolve_selection

FILES_MAX = 10_000  # that another engine reads itself
_GLOBS = frozenset("*?[]{}\\")  # a path with one of these is a pattern to other engines


@dataclass(frozen=True)
class HeldRows:
    """The selected rows of a held time, in `runs`. They can be read repeatedly, on any thread."""

    held: Held
    hold: Hold
    selection: Selection
    runs: tuple[Run, ...]

    @property
    def schema(self) -> ShardSchema:
        return newest(valid_schemas(self.held.view.schemas))[1]

    @property
    def kinds(self) -> pa.Schema:
        """The selected columns."""
        schema = self.schema
        return pa.schema([schema.arrow.field(name) for name in schema.columns(self.selection.columns)])

    def tables(
        self, columns: Sequence[str], may: RowGroupFilter | None = None, finish: Finish | None = None
    ) -> Iterator[pa.Table]:
        """The rows in key order, table by table: `columns` and `__diff`. `may` selects row groups.

        `finish` transforms each table. Raises Expired, and what reading may.
        """
        self.check()
        held, runs = self.held, self.runs
        wanted = replace(self.selection, columns=tuple(columns)).on(self.schema)
        schema, reader = part_reader(held.transport, held.view, held.settings, _both(wanted.keeps, may))
        if may is not None:
            runs = tuple(filter_eval.prune_runs(runs, schema, may))

        def select(table: pa.Table) -> pa.Table:
            selected_rows = wanted.apply(table)
            return selected_rows if finish is None else finish(selected_rows)

        key_range, read = wanted.key_range, wanted.read
        pieces = reader.read_range(runs, as_of=held.as_of, key_range=key_range, columns=read, finish=select)
        for piece in with_renewal(pieces, held.lease):
            if len(piece):
                yield piece
            self.check_open()

    def check(self) -> None:
        """Raises Expired unless the time is still held."""
        self.check_open()
        self.held.lease.keep()

    def check_open(self) -> None:
        if self.hold.is_closed:
            raise Expired(
                f"the scan of shard {self.held.view.name!r} as of {self.held.as_of} is closed; call shard.scan() again"
            )

    def apart(self) -> tuple[list[str], HeldRows]:
        """The paths of files whose rows are exactly rows of the scan, and the rows that are in none of them.

        In such a file no row consolidates with another one, each has multiplicity 1, and the columns are the current
        ones. Raises what reading may.
        """
        self.check()
        held = self.held
        root = _root_of(str(held.transport.blob.url))
        whole = Selection(columns=self.selection.columns)
        if root is None or self.selection != whole:
            return [], self
        schemas = valid_schemas(held.view.schemas)
        newest_id = newest(schemas)[0]
        _, reader = part_reader(held.transport, held.view, held.settings)
        with leased_blobs(held.lease):
            runs = reader.expanded(self.runs)
            straight, _ = classify(runs, held.as_of, PartFiles(held.transport.blob, schemas, current=self.schema))
        plain = [part for part in straight if part.schema_id == newest_id and _is_plain(part, held.as_of)][:FILES_MAX]
        paths = {part.id: os.path.join(root, part.key or "") for part in plain}
        local = {part.id: path for part in plain if _is_local(path := paths[part.id], part.size)}
        rest = (tuple(part for part in run.parts if part.id not in local) for run in runs)
        left = tuple(changed(run, parts=parts) for run, parts in zip(runs, rest, strict=True) if parts)
        return list(local.values()), replace(self, runs=left)


def _both(first: RowGroupFilter | None, second: RowGroupFilter | None) -> RowGroupFilter | None:
    if first is None or second is None:
        return first or second
    return lambda statistics: first(statistics) and second(statistics)


def _is_plain(part: Part, as_of: int) -> bool:
    is_file = not part.is_inline and part.clip is None and part.bundle is None
    return is_file and part.rows > 0 and part.time_max <= as_of and part.diff_min == part.diff_max == 1


def _root_of(url: str) -> str | None:
    """The directory of the blobs; None: they are in no local directory."""
    parts = urlsplit(url)
    path = unquote(parts.path)
    return path if parts.scheme == "file" and not _GLOBS.intersection(path) else None


def _is_local(path: str, size: int) -> bool:
    """Whether the file exists here: a server may have a directory of the same name on another machine."""
    try:
        return os.stat(path).st_size == size
    except OSError:
        return False


log = logging.getLogger("persist.client")


def _is_read_alike(kinds: pa.Schema) -> bool:
    """Whether DuckDB's own reader can be kept from losing rows of these columns.

    It uses bounds in the files, which exclude NaN, and treats NaN as greater than all numbers: `x > 5` would lose the
    rows with NaN. Floats within structs cannot be hidden from it. And it treats A and a as one name.
    """
    lowered = {name.lower() for name in kinds.names}
    return len(lowered) == len(kinds) and not any(
        pa.types.is_struct(field.type) and filter_eval.has_floats(field.type) for field in kinds
    )


def _column(field: pa.Field) -> str:
    """A column of a file; a float by an expression for which the file has no bounds, and which changes no value."""
    name: str = '"' + field.name.replace('"', '""') + '"'
    if not pa.types.is_floating(field.type):
        return name
    return f"CASE WHEN isnan({name}) THEN 'nan' ELSE {name} END AS {name}"


_IS_TRUE = "__is_true"


def _finish(polars: Any, predicate: Any) -> Finish:
    """Filters a table by a predicate before rows are repeated.

    Not all updates of the other rows may have been read, so their multiplicity may seem negative.
    """

    def finish(table: pa.Table) -> pa.Table:
        matches = polars_frame(polars, table).with_columns(predicate.alias(_IS_TRUE)).get_column(_IS_TRUE)
        return table.filter(matches.to_arrow())

    return finish


def _may_match(polars: Any, predicate: Any, kinds: pa.Schema, shown: Any) -> RowGroupFilter | None:
    """Which row groups may have rows for which a predicate of Polars is true; None: any may.

    It uses the "skip predicate" that Polars has for its own readers, which is no public interface: if it is missing or
    has changed, all row groups are read.
    """
    try:
        skips = predicate._skip_batch_predicate(shown)
    except Exception:
        return None
    if skips is None:
        return None
    used = [name for name in predicate.meta.root_names() if name in shown]

    def keeps(statistics: dict[str, Any]) -> bool:
        row: dict[str, Any] = {"len": [None]}
        types: dict[str, Any] = {"len": polars.UInt32}
        for name in used:
            known = statistics.get(name) if filter_eval.has_exact_statistics(kinds.field(name).type) else None
            types |= {f"{name}_min": shown[name], f"{name}_max": shown[name], f"{name}_nc": polars.UInt32}
            try:
                least, most, nulls = _bounds(known)
            except (ValueError, OverflowError):  # a time outside Python's range
                return True
            row |= {f"{name}_min": [least], f"{name}_max": [most], f"{name}_nc": [nulls]}
        try:
            return polars.DataFrame(row, schema=types).select(skips).item() is not True
        except Exception:
            return True

    return keeps


def _bounds(statistics: Any) -> tuple[Any, Any, int | None]:
    """The least and the greatest value, and the number of nulls; None: not known."""
    if statistics is None or not statistics.has_null_count:
        return None, None, None
    if not statistics.has_min_max:
        return None, None, statistics.null_count
    least, most = (v.as_py() if isinstance(v, pa.Scalar) else v for v in (statistics.min, statistics.max))
    return least, most, statistics.null_count


BATCH_ROWS = 131_072  # of a batch that an engine is given, at most
INSTEAD = "a scan is read by scanner(), to_table() or to_reader()"
_HOW = frozenset(  # options of pyarrow's own datasets for reading files, which do not apply here
    ("batch_readahead", "fragment_readahead", "fragment_scan_options", "use_threads", "cache_metadata", "memory_pool")
)


def open_scan(held: Held, selection: Selection, timestamp: datetime | None) -> Scan:
    """A scan of a selection of a held time, which it holds from now on. Raises InvalidUsage."""
    wanted = resolve_selection(valid_schemas(held.view.schemas), selection)
    if wanted.columns == ():
        raise InvalidUsage("columns is empty; a scan shows at least one column, or None for all")
    runs = overlapping_runs(held.runs, wanted.key_range) if wanted.is_narrow else held.runs
    return Scan(HeldRows(held, Hold(held.lease, lease_ms=held.settings.lease_ms), selection, runs), timestamp)


class Scan(ds.FileSystemDataset):  # DuckDB and Polars push projections and filters only into datasets of pyarrow
    """The contents of a shard as of a time for another engine; `Shard.scan` returns one.

    It is a dataset of pyarrow: DuckDB and Polars read only the columns that a query needs, and only row groups that may
    have matching rows. Rows are repeated by their multiplicity. Repeated reads return the same rows, in bounded memory,
    whatever is written meanwhile.

    Its time is held until it is closed, or nothing refers to it any more. Reading may raise Expired (it is closed, or
    the hold was lost), NegativeMultiplicity (a row was retracted more often than added), Unavailable (retrying is safe)
    and Corruption. An engine may show them as errors of its own, with the same message.
    """

    def __init__(self, rows: HeldRows, timestamp: datetime | None = None, matched: Any = None) -> None:
        # If pyarrow's own code bypasses the methods below, it finds a file that does not exist, and raises. Otherwise
        # it would silently return no rows.
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

    def scanner(self, columns: Projection = None, filter: Any = None, batch_size: int = BATCH_ROWS, **how: Any) -> Any:
        """A scanner of pyarrow, as engines request it. It can be read once; the scan makes any number of them.

        Args:
            columns: names, or expressions by names; None is all.
            filter: a `pyarrow.compute.Expression`: only rows for which it is true. Floats are compared as in Arrow: NaN
                is neither equal to, less than, nor greater than anything.
            batch_size: the most rows of a batch.
            how: further options of pyarrow's datasets, which have no effect here.
        Raises: InvalidUsage (no such column, an expression that does not fit, or an unknown argument).
        """
        unknown = sorted(how.keys() - _HOW)
        if unknown:
            raise InvalidUsage(f"a scan takes no argument {unknown[0]!r}; it takes columns, filter and batch_size")
        check_int("batch_size", batch_size, 1, NUMBER_MAX)
        wanted = self._and(filter)
        shown, read = required_columns(self.schema, columns, wanted)
        if not shown:  # rows without columns cannot be counted: one column is read, and left out at the end
            shown = self.schema.names[:1]
            read = [name for name in self.schema.names if name in (*shown, *read)]
        kinds = pa.schema([self.schema.field(name) for name in shown])
        batches = pa.RecordBatchReader.from_batches(kinds, self._batches(shown, read, wanted, batch_size))
        names = kinds.names if columns is None else columns
        return ds.Scanner.from_batches(batches, columns=names, batch_size=batch_size)

    def to_reader(self, columns: Projection = None, filter: Any = None) -> pa.RecordBatchReader:
        """The rows as a stream, in key order. Arguments and errors are those of `scanner`."""
        return self.scanner(columns, filter).to_reader()

    def to_batches(self, columns: Projection = None, filter: Any = None, **how: Any) -> Iterator[pa.RecordBatch]:
        """The rows batch by batch. Arguments and errors are those of `scanner`."""
        return iter(self.scanner(columns, filter, **how).to_reader())

    def to_table(self, columns: Projection = None, filter: Any = None, **how: Any) -> pa.Table:
        """All rows in memory. Arguments and errors are those of `scanner`."""
        return self.scanner(columns, filter, **how).to_reader().read_all()

    def count_rows(self, filter: Any = None, **how: Any) -> int:
        """The number of rows for which the filter is true. Arguments and errors are those of `scanner`."""
        wanted = self._and(filter)
        _, read = required_columns(self.schema, (), wanted)
        total = 0
        for table in self._tables([], read, wanted):
            if first_negative(table) is not None:
                next(expand_rows(table))  # raises NegativeMultiplicity
            total += pc.sum(table.column(DIFF)).as_py()
        return total

    def filter(self, expression: Any) -> Scan:
        """The rows for which an expression of Arrow's is true, as a scan. Raises what `scanner` does."""
        wanted = self._and(expression)
        required_columns(self.schema, None, wanted)
        return Scan(self._rows, self.timestamp, wanted)

    def duckdb(self, connection: Any = None) -> Any:
        """The rows as a DuckDB relation, read when it is asked for its result.

        DuckDB itself reads the files that contain exactly rows of the scan, if they are on this machine; all other rows
        come from here. So does everything after `filter`, or if the scan has `where` or bounds of keys.

        Args:
            connection: a connection of DuckDB's; None is its default one.
        Raises: InvalidUsage (DuckDB is not installed, or a column has half floats), and what reading may.
        """
        duckdb = optional("duckdb", "duckdb()", "duckdb", InvalidUsage)
        where = duckdb if connection is None else connection
        half = [field.name for field in self.schema if without_half_floats(field.type) != field.type]
        if half:
            raise InvalidUsage(
                f"column {half[0]!r} of shard {self.shard!r} has half floats, which DuckDB does not read "
                "from Arrow: leave it out by columns=, or take Snapshot.to_duckdb(), which widens it"
            )
        if self._matched is not None or not _is_read_alike(self.schema):
            return where.from_arrow(self)
        files, left = self._rows.apart()
        # The scan of the rest is used even if it is empty: the relation refers to it, and it holds the files.
        rest = where.from_arrow(Scan(left, self.timestamp))
        if not files:
            return rest
        try:
            table = where.read_parquet(files, hive_partitioning=False).project(", ".join(map(_column, self.schema)))
            if table.types == rest.types:
                return table.union(rest)
            why = "it would show other types than those of the shard"
        except duckdb.Error as error:
            why = str(error).partition("\n")[0]
        log.info("persist: DuckDB does not read the files of shard %r itself: %s", self.shard, why)
        return where.from_arrow(self)

    def polars(self) -> Any:
        """The rows as a Polars LazyFrame, which reads what it needs whenever it is collected.

        Rows are filtered by the rules of Polars, in which NaN is greater than all numbers.
        Raises: InvalidUsage (Polars is not installed).
        """
        polars = optional("polars", "polars()", "polars", InvalidUsage)
        plugins = optional("polars.io.plugins", "polars()", "polars", InvalidUsage)
        kinds, tables = self.schema, self._tables_for
        shown = polars_frame(polars, kinds.empty_table()).schema

        def source(columns: list[str] | None, predicate: Any, rows: int | None, batch: int | None) -> Iterator[Any]:
            """As Polars requests it: of the first `rows` rows those for which the predicate is true."""
            names = kinds.names if columns is None else columns
            used = [] if predicate is None else predicate.meta.root_names()
            read = list(dict.fromkeys([*names, *used])) or kinds.names[:1]
            if rows is None and predicate is not None:
                for table in tables(read, _may_match(polars, predicate, kinds, shown), _finish(polars, predicate)):
                    yield polars_frame(polars, table).select(names)
                return
            for table in tables(read, None, None):
                frame = polars_frame(polars, table)
                if rows is not None:
                    frame = frame.head(rows)
                    rows -= len(frame)
                yield (frame if predicate is None else frame.filter(predicate)).select(names)
                if rows == 0:
                    return

        return plugins.register_io_source(source, schema=shown, is_pure=True)

    def __arrow_c_schema__(self) -> Any:
        return self.schema.__arrow_c_schema__()

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        return self.to_reader().__arrow_c_stream__(requested_schema)

    # --- its time

    def keep(self) -> None:
        """Renew the hold; a thread does so automatically. Raises Expired: it is gone."""
        self._rows.check()

    def close(self) -> None:
        """Release the time: the scan, and those made from it, can no longer be read. Repeating it is safe."""
        self._rows.hold.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- unsupported methods of datasets

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

    # --- implementation

    def _and(self, filter: Any) -> Any:
        checked("filter", filter, pc.Expression, type(None))
        if self._matched is None or filter is None:
            return self._matched if filter is None else filter
        return self._matched & filter

    def _tables(self, shown: list[str], read: list[str], wanted: Any) -> Iterator[pa.Table]:
        """The shown columns of matching rows, with `__diff`."""

        def finish(table: pa.Table) -> pa.Table:
            return filter_rows(table, wanted).select([*shown, DIFF])

        if wanted is None:
            return self._rows.tables(read)
        return self._rows.tables(read, filter_eval.ExpressionPruner(wanted, self.schema), finish)

    def _batches(self, shown: list[str], read: list[str], wanted: Any, rows: int) -> Iterator[pa.RecordBatch]:
        for table in self._tables(shown, read, wanted):
            for piece in expand_rows(table):
                yield from piece.to_batches(rows)

    def _tables_for(self, names: list[str], may: RowGroupFilter | None, finish: Finish | None) -> Iterator[pa.Table]:
        """For an engine that selects row groups and their rows itself."""
        read, wanted = names, self._matched

        def finish_matching(table: pa.Table) -> pa.Table:
            rows = filter_rows(table, wanted).select([*names, DIFF])
            return rows if finish is None else finish(rows)

        if wanted is not None:
            _, read = required_columns(self.schema, names, wanted)
        for table in self._rows.tables(read, may, finish if wanted is None else finish_matching):
            yield from expand_rows(table)


def _as_table(verb: str) -> InvalidUsage:
    return InvalidUsage(
        f"a scan is read in key order, and has no {verb}; call scan.to_table().{verb}(...), or let an engine do it: "
        "scan.duckdb(), scan.polars()"
    )
