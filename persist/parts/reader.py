"""Reading runs: one engine for snapshots, listens and compaction.

Runs are planned into stretches of the key space (`persist.parts.read_plan`). Row groups whose rows are consolidated
already are read straight through, only the columns asked for; everything else goes through the streaming merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum, auto
from itertools import groupby
from operator import call, itemgetter
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from persist.core.batch import Part, Run
from persist.core.errors import InvalidUsage
from persist.core.frontier import Antichain
from persist.parts.codec import RowGroup, at_part_time
from persist.parts.consolidate import Times, join, merge, negated, stable_order
from persist.parts.key_encoding import ALL_KEYS, KeyRange, SortedKeys, clip_rows
from persist.parts.part_files import BlobReads, DecodeLimit, PartFile, PartFiles, RowGroupFilter
from persist.parts.prefetch import cpu_count, map_in_order
from persist.parts.read_plan import (
    Filled,
    Item,
    MemoryRows,
    PassThrough,
    ReadPiece,
    Stretch,
    are_consolidated,
    expand_bundles,
    overlapping_items,
    stretches,
)
from persist.parts.row_sort import take_rows
from persist.parts.run_merge import Cursor, merge_cursors, read_rows, resort
from persist.parts.schema_evolution import Migration
from persist.parts.shard_schema import DIFF, TIME, ShardSchema
from persist.parts.sort_words import one_chunk

DECODERS_MAX = 8  # threads that fetch and decode what is read straight through: as many as there are cores
DECODERS_BOUND = 2  # of a read that has a bound, whose process has other things to do
MEMORY_BYTES = 512 * 1024 * 1024
STREAM_BYTES_MAX = 64 * 1024 * 1024  # memory of all tables that are read straight ahead of their caller
LOOSE_BYTES_MAX = 8 * 1024 * 1024  # encoded bytes of small blobs that are taken into memory, to lie among large ones
RESORT_SHARE = 16  # of the memory of a read: what a cursor sorts anew holds together
LOOSE_SHARE = 64  # and of the memory of the read: rows take several times their encoded bytes


Finish: TypeAlias = Callable[[pa.Table], pa.Table]


class _Way(Enum):
    """How a stretch is read: straight, in large tables or in small ones; or merged."""

    WHOLE = auto()
    BATCHED = auto()
    MERGED = auto()


class PartReader:
    """Reads parts of any of `schemas` as rows of the schema `current`. Not thread-safe: one per thread.

    A read holds about `memory_bytes` of memory. `bound`: see `PartFiles`. `use_threads`: decode on threads of its own:
    one per core, at most DECODERS_MAX; DECODERS_BOUND with a `bound`.

    Row groups of which `keeps` says no are left out: it must look at columns of the user's only, and say no only where
    none of their values is wanted, so that all updates of a row are kept or none.

    A part that is gone raises the blob store's BlobNotFound; bytes that contradict their checksums Corruption.
    """

    def __init__(  # noqa: PLR0913 - how much it takes, each by its name
        self,
        blob: BlobReads,
        schemas: Mapping[int, ShardSchema],
        current: ShardSchema,
        *,
        use_threads: bool = True,
        keeps: RowGroupFilter | None = None,
        memory_bytes: int = MEMORY_BYTES,
        bound: DecodeLimit | None = None,
    ) -> None:
        self._files = PartFiles(blob, schemas, keeps, bound, current=current)
        decoders = max(2, min(DECODERS_MAX, cpu_count())) if bound is None else DECODERS_BOUND
        self._decoders = decoders if use_threads else 1
        self._memory_bytes = memory_bytes
        self.schema = current

    def read_range(  # noqa: PLR0913 - what is read, and how, each by its name
        self,
        runs: Iterable[Run],
        *,
        as_of: int | None = None,
        since: int | None = None,
        key_range: KeyRange = ALL_KEYS,
        columns: Sequence[str] | None = None,
        batch_rows: int | None = None,
        finish: Finish | None = None,
    ) -> Iterator[pa.Table]:
        """The rows of `key_range` of all runs, consolidated and in key order, table by table.

        With `as_of` a snapshot: the rows with `time <= as_of`; tables have `columns` (None: all; in the order
        given) and `__diff`, and at least one row. Without it a compaction: times before `since` become `since`,
        and tables have `__time` as well. Rows are consolidated as whole updates, before columns are left out.

        `batch_rows` is for a caller that passes rows on as they come, one of several on the machine: parts that are
        read straight through are decoded on the caller's thread, at most so many rows at a time, and fetched ahead.

        `finish` makes of each table what is given in its place, which may be without rows, on the thread that made it.
        """
        if as_of is not None and since is not None:
            raise InvalidUsage("a read is as of a time or advances to a since, not both")
        times = Times(advance=since) if as_of is None else Times.snapshot(as_of)
        return self._read(runs, times, key_range, columns, batch_rows, finish)

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
        return self._read(runs, times, key_range, columns, finish=_by_time)

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
        return self._stretches(runs, Times(after=after, upto=upto, advance=upto), key_range, names)

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
            for table in self._stretches(runs, apart, key_range, names):
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
        return tuple(expand_bundles(runs, self._files.blob, wanted))

    def as_written(self, part: Part, column: str) -> Iterator[Any]:
        """A column of all rows of a part, as they were written, piece by piece; nothing where the part has none such.

        Also of rows that no time shows any more.
        """
        for name in self._files.migration(part).names([column]):
            if part.is_inline:
                yield self._files.inline(part).column(name)
                continue
            file = self._files.open(part)
            for group in range(len(file.groups)):
                yield file.read((group,), (name,)).column(name)

    def row_groups(self, part: Part) -> Sequence[RowGroup]:
        """The row groups of a Parquet part, from its footer."""
        return self._files.open(part).groups

    def row_groups_of(self, parts: Sequence[Part]) -> Iterator[Sequence[RowGroup] | None]:
        """The same of each part, in order, some read at the same time; None where it is damaged or missing."""
        for file in self._files.open_ahead(parts):
            yield None if file is None else file.groups

    def _read(
        self,
        runs: Iterable[Run],
        times: Times,
        key_range: KeyRange,
        columns: Sequence[str] | None,
        batch_rows: int | None = None,
        finish: Finish | None = None,
    ) -> Iterator[pa.Table]:
        # A snapshot is as of one time, which its reader knows; changes have theirs, even where all are at one time.
        is_snapshot = times.after is None and times.upto is not None and times.upto == times.advance
        names = [*self.schema.columns(columns), *([DIFF] if is_snapshot else [TIME, DIFF])]
        return self._stretches(runs, times, key_range, names, batch_rows, finish)

    def _stretches(
        self,
        runs: Iterable[Run],
        times: Times,
        key_range: KeyRange,
        names: list[str],
        batch_rows: int | None = None,
        finish: Finish | None = None,
    ) -> Iterator[pa.Table]:
        """The rows, table by table; what `finish` makes of each table, on the thread that made it."""
        limit = max(1, min(STREAM_BYTES_MAX, self._memory_bytes // 4))

        def ways() -> Iterator[tuple[_Way, Any]]:
            for stretch, is_large in self._planned(runs, times, key_range):
                if stretch.part is None:
                    yield _Way.MERGED, (self._cursors(stretch, times, key_range), is_large)
                    continue
                file = self._files.open(stretch.part)
                plain = PassThrough(file, stretch, self.schema, times, key_range, names)
                rows = batch_rows or self._few(file, limit)
                yield (_Way.WHOLE, plain) if rows is None else (_Way.BATCHED, (plain, rows))

        for way, some in groupby(ways(), itemgetter(0)):
            if way is _Way.WHOLE:  # pieces of all parts that follow one another, so that no thread waits at their ends
                waiting = self._decoders if self._decoders > 1 else 0
                size = max(1, limit // (self._decoders + waiting))
                pieces = (piece for _, plain in some for piece in plain.pieces(size, self._decoders))
                work = call if finish is None else lambda piece: finish(piece())
                yield from filter(len, map_in_order(work, pieces, self._decoders, waiting))
                continue
            for _, (found, how) in some:
                if way is _Way.BATCHED:
                    tables = found.batches(limit, how)
                else:
                    threaded = how and self._decoders > 1
                    tables = merge_cursors(found, self.schema, names, self._memory_bytes, threaded=threaded)
                yield from tables if finish is None else map(finish, tables)

    def _planned(self, runs: Iterable[Run], times: Times, key_range: KeyRange) -> Iterator[tuple[Stretch, bool]]:
        """What is to be read, in key order, and whether a part that it overlaps with is large."""
        for items in overlapping_items(runs, times, key_range, self._files):
            loose, others = self._loose(items, times, key_range)
            is_large = any(not self._files.is_small(item.part) for item in others)
            for stretch in stretches(others, loose, times, key_range, self._files):
                yield stretch, is_large

    def _few(self, file: PartFile, limit: int) -> int | None:
        """As how many rows at a time a part is to be read that may take far more than `limit`; None: as a whole."""
        bound = self._files.bound
        if bound is None or not bound.in_batches or not file.groups:
            return None
        if not self._files.doubts(file.part) and max(group.nbytes for group in file.groups) <= 2 * limit:
            return None
        return max(1, min(group.rows * limit // max(1, group.nbytes) for group in file.groups))

    def _loose(self, items: Sequence[Item], times: Times, key_range: KeyRange) -> tuple[MemoryRows | None, list[Item]]:
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
                names = file.migration.names(self.schema.updates_schema.names)
                tables.append(self._whole(file.read(wanted, names), item.part))
                large.remove(item)
        rows = merge([join(tables)], self.schema, times) if tables else None
        if rows is not None and len(rows):
            rows = clip_rows(rows, SortedKeys(rows, self.schema.key), key_range)
            return MemoryRows(rows, self.schema.key), large
        return None, large

    def _cursors(self, stretch: Stretch, times: Times, key_range: KeyRange) -> list[Cursor]:
        """One cursor for each run's sorted parts, and one for all rows in memory together."""
        runs: dict[int, list[ReadPiece]] = {}
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

    def _cursor(self, pieces: Sequence[ReadPiece], times: Times, key_range: KeyRange) -> Cursor:
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
        settled = (not chosen and not times.merges(first, last)) or are_consolidated(pieces)
        prepare = _AtTimes(self._files, self.schema, times)
        if any(self._files.migration(part).coarsens for part, _ in parts):
            limit = max(1, min(STREAM_BYTES_MAX, self._memory_bytes // RESORT_SHARE))
            rows = read_rows(parts, self._files, self.schema, key_range, prepare, limit)
            return Cursor.of_tables(resort(rows, self._files, self.schema, limit), self._files, self.schema)
        return Cursor(parts, self._files, self.schema, key_range, prepare, settled=settled)

    def _whole(self, table: pa.Table, part: Part) -> pa.Table:
        return _as_committed(self._files.migration(part), table, part)


class _AtTimes:
    """Whole rows of parts, as rows of a schema, at the times that a read gives them: what a cursor does with them.

    Columns that are known to be the same in all rows of a part are not read.
    """

    def __init__(self, files: PartFiles, schema: ShardSchema, times: Times) -> None:
        self._files = files
        self._schema = schema
        self._times = times
        self._filled = Filled()

    def columns(self, part: Part) -> list[str]:
        same = self._same(part)
        wanted = (name for name in self._schema.updates_schema.names if name not in same)
        return self._files.migration(part).names(wanted)

    def rows(self, table: pa.Table, part: Part) -> pa.Table:
        same, migration = self._same(part), self._files.migration(part)
        if TIME not in same:
            return self._times.apply(_as_committed(migration, table, part))
        return self._filled.completed(table, self._schema.updates_schema, same, migration)

    def _same(self, part: Part) -> dict[str, int]:
        """The values of these columns; none where the time is not among them."""
        time = _only_time(part, self._times)
        if time is None:
            return {}
        return {TIME: time} if part.diff_min != part.diff_max else {TIME: time, DIFF: part.diff_min}


def _as_committed(migration: Migration, table: pa.Table, part: Part) -> pa.Table:
    """Whole rows of a part as they are read, at the times that they were committed with."""
    table = at_part_time(migration.rows(table), part)
    return table if part.clip is None else table.filter(pc.greater_equal(table.column(TIME), part.clip))


def _only_time(part: Part, times: Times) -> int | None:
    """The time that a read gives all rows of the part, where it keeps all of them, so that it need not know theirs."""
    if times.advance is None or part.time_max > times.advance or part.clip is not None:
        return None
    time = times.moved(part.time_max)
    return time if time == times.moved(part.time_min) and times.keeps_all(part.time_min, part.time_max) else None


def _by_time(table: pa.Table) -> pa.Table:
    order = stable_order(one_chunk(table.column(TIME)).to_numpy())
    if order is None:
        return table
    rows = pa.array(order)
    columns = [take_rows(one_chunk(column), rows) for column in table.columns]
    if any(column.type != field.type for column, field in zip(columns, table.schema, strict=True)):
        return table.take(rows)  # more text than one array holds
    return pa.Table.from_arrays(columns, schema=table.schema)
