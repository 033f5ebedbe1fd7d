"""Reading runs: one engine for snapshots, listens and compaction.

Runs are planned into stretches of the key space (`persist.parts.stretches`). Row groups whose rows are consolidated
already are read straight through, only the columns asked for; everything else goes through the streaming merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.core.antichain import Antichain
from persist.core.batch import Part, Run
from persist.core.errors import InvalidUsage
from persist.parts.ahead import in_order
from persist.parts.bundles import expanded
from persist.parts.codec import RowGroup, at_part_time, at_time
from persist.parts.columns import Mask, one_chunk
from persist.parts.consolidate import Times, folded, join, merge, negated
from persist.parts.files import BlobReads, Files, Keeps, PartFile
from persist.parts.keycodec import ALL_KEYS, KeyRange, SortedKeys, clip_rows
from persist.parts.merge import Cursor, merge_cursors
from persist.parts.schema import DIFF, TIME, ShardSchema, as_type
from persist.parts.stretches import Item, Loose, Piece, Stretch, bounds_of, is_settled, overlapping, stretches

DECODERS = 2  # tables that are fetched and decoded at the same time where a part is read straight through
FETCHERS = 2  # pieces of a part that are fetched ahead where the caller decodes them batch by batch
MEMORY_BYTES = 512 * 1024 * 1024
STREAM_BYTES_MAX = 64 * 1024 * 1024  # memory of one table of a part that is read straight through
LOOSE_BYTES_MAX = 8 * 1024 * 1024  # encoded bytes of small blobs that are taken into memory, to lie among large ones
LOOSE_SHARE = 64  # and of the memory of the read: rows take several times their encoded bytes


class PartReader:
    """Reads parts of any of `schemas` as rows of the schema `current`. Not thread-safe: one per thread.

    A read holds about `memory_bytes` of memory.

    Row groups of which `keeps` says no are left out: it must look at columns of the user's only, and say no only where
    none of their values is wanted, so that all updates of a row are kept or none.

    A part that is gone raises the blob store's BlobNotFound; bytes that contradict their checksums Corruption.
    """

    def __init__(
        self,
        blob: BlobReads,
        schemas: Mapping[int, ShardSchema],
        current: ShardSchema,
        *,
        use_threads: bool = True,
        keeps: Keeps | None = None,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        self._files = Files(blob, schemas, keeps)
        self._decoders = DECODERS if use_threads else 1
        self._memory_bytes = memory_bytes
        self.schema = current

    def read_range(
        self,
        runs: Iterable[Run],
        *,
        as_of: int | None = None,
        since: int | None = None,
        key_range: KeyRange = ALL_KEYS,
        columns: Sequence[str] | None = None,
        batch_rows: int | None = None,
    ) -> Iterator[pa.Table]:
        """The rows of `key_range` of all runs, consolidated and in key order, table by table.

        With `as_of` a snapshot: the rows with `time <= as_of`; tables have `columns` (None: all; in the order
        given) and `__diff`, and at least one row. Without it a compaction: times before `since` become `since`,
        and tables have `__time` as well. Rows are consolidated as whole updates, before columns are left out.

        `batch_rows` is for a caller that passes rows on as they come, one of several on the machine: parts that are
        read straight through are decoded on the caller's thread, at most so many rows at a time, and fetched ahead.
        """
        if as_of is not None and since is not None:
            raise InvalidUsage("a read is as of a time or advances to a since, not both")
        times = Times(advance=since) if as_of is None else Times.snapshot(as_of)
        return self._read(runs, times, key_range, columns, batch_rows)

    def read_merged(
        self, runs: Iterable[Run], since: int, kept: tuple[int, ...] = (), key_range: KeyRange = ALL_KEYS
    ) -> Iterator[pa.Table]:
        """As `read_range` with `since`, but the times `kept` (ascending, all before `since`) stay readable too.

        A time before `since` becomes the least of `kept` at or beyond it, if there is one.
        """
        return self._read(runs, Times(advance=since, kept=kept), key_range, None)

    def read_updates(
        self,
        parts: Iterable[Part],
        lower: Antichain,
        upper: Antichain,
        *,
        since: int | None = None,
        key_range: KeyRange = ALL_KEYS,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.Table]:
        """The updates of the parts at times in `[lower, upper)`, each at its own time, consolidated.

        With `since`, times before it become `since`.

        Tables have `columns` (None: all), `__time` and `__diff`, and at least one row. One table's keys come before
        the next one's; inside a table rows are ordered by time, then by key and value.
        """
        if lower.element is None:
            return iter(())
        upto = None if upper.element is None else upper.element - 1
        runs = [Run((part,)) for part in parts]
        times = Times(after=lower.element - 1, upto=upto, advance=since)
        return (_by_time(table) for table in self._read(runs, times, key_range, columns))

    def read_changes(
        self,
        runs: Iterable[Run],
        after: int,
        upto: int,
        *,
        key_range: KeyRange = ALL_KEYS,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.Table]:
        """What the contents as of `upto` have more than those as of `after`: the updates between them, added up.

        Only row groups that have times between the two are read. Tables have `columns` (None: all) and `__diff`, which
        is negative where they have less, and at least one row; they come in key order.
        """
        names = [*self.schema.columns(columns), DIFF]
        return self._stretches(runs, Times(after=after, upto=upto, advance=upto), key_range, names, None)

    def read_changes_at(
        self,
        runs: Iterable[Run],
        after: int,
        upto: int,
        times: Sequence[int],
        key_range: KeyRange = ALL_KEYS,
    ) -> tuple[Iterator[pa.Table], Iterator[pa.Table]]:
        """As `read_changes`, of all columns: the updates at these times (ascending) and those at all others.

        The parts must tell each of the times from the one before it, and from what came after. Each of the two reads
        the parts by itself.
        """
        named = pa.array(times, pa.int64())
        marks = sorted({mark for time in times for mark in (time - 1, time) if after < mark < upto})
        apart = Times(after=after, upto=upto, advance=upto, kept=tuple(marks))
        names = [*self.schema.columns(None), TIME, DIFF]

        def read(are_named: bool) -> Iterator[pa.Table]:
            for table in self._stretches(runs, apart, key_range, names, None):
                is_named = pc.is_in(table.column(TIME), value_set=named)
                yield table.filter(is_named if are_named else pc.invert(is_named))

        return self._folded(read(True)), self._folded(read(False))

    def _folded(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """Rows that come in key order, added up whatever their times."""
        cursor = Cursor.of_tables(map(self._at_one_time, tables), self._files, self.schema, settled=False)
        return merge_cursors([cursor], self.schema, [*self.schema.columns(None), DIFF], self._memory_bytes)

    def difference(
        self, earlier: Iterator[pa.Table], later: Iterator[pa.Table], columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        """What rows have more than others: both with all columns and `__diff`, consolidated and in key order.

        Tables are as those of `read_changes`.
        """
        signed = (map(negated, earlier), later)
        cursors = [Cursor.of_tables(map(self._at_one_time, some), self._files, self.schema) for some in signed]
        return merge_cursors(cursors, self.schema, [*self.schema.columns(columns), DIFF], self._memory_bytes)

    def _at_one_time(self, table: pa.Table) -> pa.Table:
        times = pa.repeat(pa.scalar(0, pa.int64()), len(table))
        columns = [times if name == TIME else table.column(name) for name in self.schema.updates_schema.names]
        return pa.Table.from_arrays(columns, schema=self.schema.updates_schema)

    def expanded(self, runs: Iterable[Run], key_range: KeyRange = ALL_KEYS) -> tuple[Run, ...]:
        """The runs without bundles: what these list stands in their place, where it may have keys of the range.

        Raises what reading does. Reads expand by themselves; who plans several of them on the same runs does it once.
        """
        wanted = lambda part: key_range.overlaps(part.key_lower, part.key_upper)  # noqa: E731
        return tuple(expanded(runs, self._files.blob, wanted))

    def row_groups(self, part: Part) -> Sequence[RowGroup]:
        """The row groups of a Parquet part, from its footer."""
        return self._files.open(part).groups

    def _read(
        self,
        runs: Iterable[Run],
        times: Times,
        key_range: KeyRange,
        columns: Sequence[str] | None,
        batch_rows: int | None = None,
    ) -> Iterator[pa.Table]:
        # A snapshot is as of one time, which its reader knows; changes have theirs, even where all are at one time.
        is_snapshot = times.after is None and times.upto is not None and times.upto == times.advance
        names = [*self.schema.columns(columns), *([DIFF] if is_snapshot else [TIME, DIFF])]
        return self._stretches(runs, times, key_range, names, batch_rows)

    def _stretches(
        self,
        runs: Iterable[Run],
        times: Times,
        key_range: KeyRange,
        names: list[str],
        batch_rows: int | None,
    ) -> Iterator[pa.Table]:
        limit = max(1, min(STREAM_BYTES_MAX, self._memory_bytes // 4))
        for items in overlapping(runs, times, key_range, self._files):
            loose, others = self._loose(items, times, key_range)
            for stretch in stretches(others, loose, times, key_range, self._files):
                if stretch.part is None:
                    cursors = self._cursors(stretch, times, key_range)
                    large = any(not self._files.is_small(item.part) for item in others)
                    threaded = large and self._decoders > 1
                    yield from merge_cursors(cursors, self.schema, names, self._memory_bytes, threaded=threaded)
                    continue
                file = self._files.open(stretch.part)
                plain = _Straight(file, stretch, self.schema, times, key_range, names)
                if batch_rows is None:
                    yield from plain.tables(limit, self._decoders)
                else:
                    yield from plain.batches(limit, batch_rows)

    def _loose(self, items: Sequence[Item], times: Times, key_range: KeyRange) -> tuple[Loose | None, list[Item]]:
        """The rows of inline parts, and of small blobs among large ones, in memory; and the parts that are not there.

        Blobs of at most `LOOSE_BYTES_MAX` bytes together are taken.
        """
        large = [item for item in items if not item.part.is_inline]
        tables = [self._whole(self._files.inline(item.part), item.part) for item in items if item.part.is_inline]
        if any(not self._files.is_small(item.part) for item in large):
            left = min(LOOSE_BYTES_MAX, self._memory_bytes // LOOSE_SHARE)
            for item in sorted(large, key=lambda item: item.part.size):
                left -= item.part.size
                if left < 0 or not self._files.is_small(item.part):
                    break
                file = self._files.open(item.part)
                wanted = list(file.wanted(key_range))
                tables.append(self._whole(file.read(wanted, self.schema.updates_schema.names), item.part))
                large.remove(item)
        rows = merge([join(tables)], self.schema, times) if tables else None
        if rows is not None and len(rows):
            rows = clip_rows(rows, SortedKeys(rows, self.schema.key), key_range)
            return Loose(rows, self.schema.key), large
        return None, large

    def _cursors(self, stretch: Stretch, times: Times, key_range: KeyRange) -> list[Cursor]:
        """One cursor for each run's sorted parts, and one for all rows in memory together."""
        runs: dict[int, list[Piece]] = {}
        rows = []
        for piece in sorted(stretch.pieces, key=lambda piece: piece.place):
            if piece.item is not None:
                runs.setdefault(piece.item.run, []).append(piece)
            elif piece.rows is not None:
                rows.append(piece.rows)
        cursors = [self._cursor(pieces, times, key_range) for pieces in runs.values()]
        if rows:
            cursors.append(Cursor.of_table(join(rows), self._files, self.schema, settled=True))
        return cursors

    def _cursor(self, pieces: Sequence[Piece], times: Times, key_range: KeyRange) -> Cursor:
        """Over pieces of one run, in their order."""
        parts: list[tuple[Part, list[int] | None]] = []
        for piece in pieces:
            assert piece.item is not None
            part, group = piece.item.part, piece.group
            if group is None:
                parts.append((part, None))
            elif parts and parts[-1][0] is part and (groups := parts[-1][1]) is not None:
                groups.append(group)
            else:
                parts.append((part, [group]))
        # A key may straddle two parts, so the times of all of them count together.
        first, last = min(part.time_min for part, _ in parts), max(part.time_max for part, _ in parts)
        # A time that the commit chose may have made rows equal that differed in their times.
        chosen = any(part.time is not None for part, _ in parts)
        settled = (not chosen and not times.merges(first, last)) or is_settled(pieces)
        return Cursor(
            parts, self._files, self.schema, key_range, lambda t, p: self._prepare(t, p, times), settled=settled
        )

    def _prepare(self, table: pa.Table, part: Part, times: Times) -> pa.Table:
        """Whole rows of a part as rows of the current schema, at the times that the read gives them."""
        table = self._whole(table, part)
        time = _only_time(part, times)
        return times.apply(table) if time is None else at_time(table, time)

    def _whole(self, table: pa.Table, part: Part) -> pa.Table:
        """Whole rows of a part as rows of the current schema, at the times that they were committed with."""
        table = self.schema.migrate(table)
        table = at_part_time(table, part)
        if part.clip is not None:
            table = table.filter(pc.greater_equal(table.column(TIME), part.clip))
        return table


class _Straight:
    """Row groups that nothing overlaps and that need no consolidation: only the columns asked for are read."""

    def __init__(
        self,
        file: PartFile,
        stretch: Stretch,
        schema: ShardSchema,
        times: Times,
        key_range: KeyRange,
        names: Sequence[str],
    ) -> None:
        part = file.part
        self._file = file
        groups = stretch.groups
        self._groups = list(file.wanted(key_range)) if groups is None else groups
        self._folds = stretch.folds
        self._schema = schema
        self._times = times
        self._range = key_range
        self._names = list(names)
        span, diffs = bounds_of(file, self._groups)
        self._filters = not times.keeps_all(*span) or part.clip is not None
        time, diff = _constants(span, diffs, times)
        self._constants: dict[str, int] = {}
        if time is not None and not self._filters:
            self._constants[TIME] = time
        if diff is not None and not self._folds:
            self._constants[DIFF] = diff
        self._needs_time = self._filters or (self._folds and TIME not in self._constants)
        self._stored = frozenset(file.schema.updates_schema.names)
        self._schemas = {edge: pa.schema(self._fields(edge)) for edge in (False, True)}
        self._filled: dict[str, pa.Array] = {}  # of each constant column: the longest yet, for slices of it

    def tables(self, limit: int, decoders: int) -> Iterator[pa.Table]:
        """The rows in large tables, decoded on `decoders` threads, which hold about `limit` bytes together."""

        def read(piece: tuple[list[int], bool]) -> pa.Table:
            groups, edge = piece
            table = self._file.read(groups, self._columns(edge))
            return self._finished(table, edge, self._file.firsts(groups) if self._folds else None)

        pieces = _batches(self._file, self._groups, self._range, max(1, limit // decoders))
        for table in in_order(read, pieces, decoders):
            if len(table):
                yield table

    def batches(self, limit: int, rows: int) -> Iterator[pa.Table]:
        """The rows in tables of at most `rows` rows, decoded by the caller, their encoded bytes fetched ahead."""

        def fetch(piece: tuple[list[int], bool]) -> tuple[list[int], bool, Any]:
            groups, edge = piece
            return groups, edge, self._file.source(groups, self._columns(edge))

        if self._folds:  # rows that become one may lie in two batches
            for table in self.tables(limit, 1):
                yield from (table.slice(start, rows) for start in range(0, len(table), rows))
            return
        fetchers = 1 if self._file.is_whole else FETCHERS
        pieces = _batches(self._file, self._groups, self._range, max(1, limit // FETCHERS))
        for groups, edge, source in in_order(fetch, pieces, fetchers):
            for batch in self._file.batches(groups, self._columns(edge), rows, source):
                table = self._finished(batch, edge)
                if len(table):
                    yield table

    def _fields(self, edge: bool) -> list[pa.Field]:
        """What is needed of every row: the columns asked for, and those by which rows are left out."""
        wanted = {*self._names, *(self._schema.key if edge else ()), *([TIME] if self._needs_time else ())}
        return [field for field in self._schema.updates_schema if field.name in wanted]

    def _columns(self, edge: bool) -> list[str]:
        return [field.name for field in self._fields(edge) if field.name not in self._constants]

    def _finished(self, table: pa.Table, edge: bool, firsts: Mask | None = None) -> pa.Table:
        """The rows that are wanted of what was read: at the times of the read, within the key range."""
        clip = self._file.part.clip
        table = self._complete(table, self._schemas[edge])
        if firsts is not None:
            table = folded(table, firsts, self._times, clip)
        else:
            if clip is not None:
                table = table.filter(pc.greater_equal(table.column(TIME), clip))
            if TIME in table.column_names and TIME not in self._constants:
                table = self._times.apply(table)
        if edge:
            table = clip_rows(table, SortedKeys(table, self._schema.key), self._range)
        return table if table.column_names == self._names else table.select(self._names)

    def _complete(self, table: pa.Table, target: pa.Schema) -> pa.Table:
        """The columns read, in the current schema, with columns that are the same in every row filled in."""
        arrays = []
        for field in target:
            if field.name in self._constants:
                arrays.append(self._constant(field.name, len(table)))
            elif field.name in self._stored:
                arrays.append(as_type(table.column(field.name), field.type))
            else:
                arrays.append(pa.nulls(len(table), field.type))
        return pa.Table.from_arrays(arrays, schema=target)

    def _constant(self, name: str, rows: int) -> pa.Array:
        filled = self._filled.get(name)
        if filled is None or len(filled) < rows:
            filled = pa.repeat(pa.scalar(self._constants[name], pa.int64()), rows)
            self._filled[name] = filled
        return filled.slice(0, rows)


def _only_time(part: Part, times: Times) -> int | None:
    """The time that a read gives all rows of the part, where it keeps all of them, so that it need not know theirs."""
    if times.advance is None or part.time_max > times.advance or part.clip is not None:
        return None
    time = times.moved(part.time_max)
    return time if time == times.moved(part.time_min) and times.keeps_all(part.time_min, part.time_max) else None


def _by_time(table: pa.Table) -> pa.Table:
    times = one_chunk(table.column(TIME)).to_numpy()
    if (times[1:] >= times[:-1]).all():
        return table
    return table.take(pa.array(np.argsort(times, kind="stable")))


def _constants(span: tuple[int, int], diffs: tuple[int, int], times: Times) -> tuple[int | None, int | None]:
    """The time that every row gets and the diff that every row has, where there is only one."""
    low, high = (times.moved(time) for time in span)
    return (low if low == high else None), (diffs[0] if diffs[0] == diffs[1] else None)


def _batches(
    file: PartFile, groups: Sequence[int], key_range: KeyRange, limit: int
) -> Iterator[tuple[list[int], bool]]:
    """Row groups to read together, and whether they stick out of the key range."""
    taken: list[int] = []
    size = 0
    for number in groups:
        group = file.groups[number]
        edge = not key_range.covers(group.key_lower, group.key_upper)
        if taken and (edge or size + group.nbytes > limit):
            yield taken, False
            taken, size = [], 0
        if edge:
            yield [number], True
            continue
        taken.append(number)
        size += group.nbytes
    if taken:
        yield taken, False
