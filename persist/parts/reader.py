"""Reading runs: one engine for snapshots, listens and compaction.

Reads are planned in stretches of the key space (`persist.parts.read_plan`). Row groups whose rows are consolidated pass
through, and only their requested columns are read; everything else goes through the streaming merge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import call, itemgetter
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from persist.core.batch import Part, Run
from persist.core.errors import InvalidUsage
from persist.core.frontier import Antichain
from persist.parts.codec import RowGroup
from persist.parts.consolidate import Times, at_time, join, merge, negated, stable_order
from persist.parts.key_encoding import ALL_KEYS, KeyRange, SortedKeys, clip_rows
from persist.parts.part_files import BlobReads, DecodeLimit, PartFile, PartFiles, RowGroupFilter
from persist.parts.prefetch import cpu_count, map_in_order
from persist.parts.read_plan import (
    Item,
    MemoryRows,
    PassThrough,
    ReadPiece,
    Stretch,
    are_consolidated,
    as_committed,
    expand_bundles,
    overlapping_items,
    stretches,
)
from persist.parts.run_merge import Cursor, merge_cursors, resort
from persist.parts.shard_schema import DIFF, TIME, ShardSchema
from persist.parts.value_order import one_chunk

DECODERS_MAX = 8  # threads that fetch and decode row groups that pass through: one per core
DECODERS_BOUND = 2  # of a read with a bound, in a process with other work
MEMORY_BYTES = 512 * 1024 * 1024
STREAM_BYTES_MAX = 64 * 1024 * 1024  # of all tables that are prefetched
LOOSE_BYTES_MAX = 8 * 1024 * 1024  # encoded bytes of small blobs that are loaded to be merged into large ones
LOOSE_SHARE = 64  # they take at most this fraction of the read's memory, encoded: rows take several times as much
RESORT_SHARE = 16  # rows that a cursor sorts again take at most this fraction of the read's memory

Finish: TypeAlias = Callable[[pa.Table], pa.Table]


class PartReader:
    """Reads parts of any of `schemas` as rows of the schema `current`. Not thread-safe: one per thread.

    A read holds about `memory_bytes` of memory. `bound`: see `PartFiles`. `use_threads`: decode on threads of its own:
    one per core, at most DECODERS_MAX; DECODERS_BOUND with a `bound`.

    Row groups for which `keeps` is false are left out. It must depend on the user's columns only and be false only if
    no row matches, so that either all updates of a row are kept or none.

    A deleted part raises the blob store's BlobNotFound, bytes that do not match their checksums Corruption.
    """

    def __init__(  # noqa: PLR0913 - its limits, each by its name
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

        With `as_of`, a snapshot: the rows with `time <= as_of`; tables have `columns` (None: all; in the given order)
        and `__diff`, and at least one row. Without it, a compaction: times before `since` become `since`, and tables
        have `__time` as well. Rows are consolidated as whole updates, before columns are left out.

        `batch_rows` is for one of several callers on a machine that forward rows: parts that pass through are decoded
        on the caller's thread, at most so many rows at a time, with their bytes prefetched.

        `finish` converts each table, on the thread that decoded it; the result may be empty.
        """
        if as_of is not None and since is not None:
            raise InvalidUsage("a read has either as_of or since, not both")
        times = Times(advance=since) if as_of is None else Times.snapshot(as_of)
        return self._read(runs, times, key_range, columns, batch_rows, finish)

    def read_merged(
        self, runs: Iterable[Run], since: int, kept: tuple[int, ...] = (), key_range: KeyRange = ALL_KEYS
    ) -> Iterator[pa.Table]:
        """As `read_range` with `since`, but the times `kept` (ascending, all before `since`) stay readable, too.

        A time before `since` becomes the least time of `kept` at or beyond it, or `since` if there is none.
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

        Tables have `columns` (None: all), `__time` and `__diff`, and at least one row. The keys of a table precede
        those of the next one; within a table rows are ordered by time, then by key and value.
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
        """The difference of the contents as of `upto` and as of `after`: the updates between them, consolidated.

        Only row groups with times between the two are read. Tables have `columns` (None: all) and `__diff`, and at
        least one row; they come in key order.
        """
        names = [*self.schema.columns(columns), DIFF]
        return self._stretches(runs, Times(after=after, upto=upto, advance=upto), key_range, names)

    def read_changes_at(
        self, runs: Iterable[Run], after: int, upto: int, times: Sequence[int]
    ) -> tuple[Iterator[pa.Table], Iterator[pa.Table]]:
        """As `read_changes`, of all columns: the updates at these times (ascending) and those at all others.

        The parts must distinguish each of the times from its predecessor and from later times. Each of the two
        iterators reads the parts.
        """
        named = pa.array(times, pa.int64())
        marks = sorted({mark for time in times for mark in (time - 1, time) if after < mark < upto})
        apart = Times(after=after, upto=upto, advance=upto, kept=tuple(marks))
        names = [*self.schema.columns(None), TIME, DIFF]

        def read(are_named: bool) -> Iterator[pa.Table]:
            for table in self._stretches(runs, apart, ALL_KEYS, names):
                is_named = pc.is_in(table.column(TIME), value_set=named)
                yield table.filter(is_named if are_named else pc.invert(is_named))

        return self._sum([read(True)], None, consolidated=False), self._sum([read(False)], None, consolidated=False)

    def difference(
        self, earlier: Iterator[pa.Table], later: Iterator[pa.Table], columns: Sequence[str] | None = None
    ) -> Iterator[pa.Table]:
        """The difference of `later` and `earlier`: both with all columns and `__diff`, consolidated and in key order.

        Tables are as those of `read_changes`.
        """
        return self._sum([map(negated, earlier), later], columns, consolidated=True)

    def _sum(
        self, inputs: Iterable[Iterator[pa.Table]], columns: Sequence[str] | None, *, consolidated: bool
    ) -> Iterator[pa.Table]:
        """Rows in key order, consolidated regardless of their times. `consolidated`: each input is consolidated."""
        order = self.schema.updates_schema.names
        whole = [(at_time(table, 0).select(order) for table in tables) for tables in inputs]
        cursors = [Cursor.of_tables(tables, self._files, self.schema, consolidated) for tables in whole]
        return merge_cursors(cursors, self.schema, [*self.schema.columns(columns), DIFF], self._memory_bytes)

    def expanded(self, runs: Iterable[Run], key_range: KeyRange = ALL_KEYS) -> tuple[Run, ...]:
        """The runs with the contents of bundles that may have keys of the range in their place.

        Reads do this themselves; a caller that plans several reads of the same runs does it once. Raises as a read.
        """
        wanted = lambda part: key_range.overlaps(part.key_lower, part.key_upper)  # noqa: E731
        return tuple(expand_bundles(runs, self._files.blob, wanted))

    def as_written(self, part: Part, column: str) -> Iterator[Any]:
        """A column of all rows of a part as they were written, in pieces; nothing if the part does not have it.

        This includes rows that are visible at no time.
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
        """The row groups of each part, in order, read concurrently; None if the part is damaged or missing."""
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
        # The reader of a snapshot knows its time; changes have theirs, even if all have the same.
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
        """The rows, table by table, converted by `finish` on the thread that decoded them."""
        limit = max(1, min(STREAM_BYTES_MAX, self._memory_bytes // 4))

        def sources() -> Iterator[tuple[bool, Any]]:
            """Row groups that pass through as a whole (True), and the tables of all other stretches."""
            for stretch, is_large in self._plan(runs, times, key_range):
                if stretch.part is None:
                    cursors, threaded = self._cursors(stretch, times, key_range), is_large and self._decoders > 1
                    yield False, merge_cursors(cursors, self.schema, names, self._memory_bytes, threaded=threaded)
                    continue
                file = self._files.open(stretch.part)
                source = PassThrough(file, stretch, self.schema, times, key_range, names)
                rows = batch_rows or self._batch_rows(file, limit)
                yield (True, source) if rows is None else (False, source.batches(limit, rows))

        for is_whole, group in groupby(sources(), itemgetter(0)):
            if is_whole:  # pieces of consecutive parts, so that no thread waits at the end of a part
                waiting = self._decoders if self._decoders > 1 else 0
                size = max(1, limit // (self._decoders + waiting))
                pieces = (piece for _, source in group for piece in source.pieces(size, self._decoders))
                work = call if finish is None else lambda piece: finish(piece())
                yield from filter(len, map_in_order(work, pieces, self._decoders, waiting))
                continue
            for _, tables in group:
                yield from tables if finish is None else map(finish, tables)

    def _plan(self, runs: Iterable[Run], times: Times, key_range: KeyRange) -> Iterator[tuple[Stretch, bool]]:
        """The stretches in key order, and whether a stretch overlaps a large part."""
        for items in overlapping_items(runs, times, key_range, self._files):
            loose, others = self._load_small(items, times, key_range)
            is_large = any(not self._files.is_small(item.part) for item in others)
            for stretch in stretches(others, loose, times, key_range, self._files):
                yield stretch, is_large

    def _batch_rows(self, file: PartFile, limit: int) -> int | None:
        """The rows per batch of a part that may take far more than `limit`; None: it is not read in batches."""
        bound = self._files.bound
        if bound is None or not bound.in_batches or not file.groups:
            return None
        if not self._files.is_unverified(file.part) and max(group.nbytes for group in file.groups) <= 2 * limit:
            return None
        return max(1, min(group.rows * limit // max(1, group.nbytes) for group in file.groups))

    def _load_small(
        self, items: Sequence[Item], times: Times, key_range: KeyRange
    ) -> tuple[MemoryRows | None, list[Item]]:
        """Load the rows of inline parts, and of small blobs next to large ones; also returns the other parts.

        At most `LOOSE_BYTES_MAX` encoded bytes of blobs are loaded.
        """
        others = [item for item in items if not item.part.is_inline]
        inline = (item.part for item in items if item.part.is_inline)
        tables = [as_committed(self._files.migration(part), self._files.inline(part), part) for part in inline]
        if any(not self._files.is_small(item.part) for item in others):
            left = min(LOOSE_BYTES_MAX, self._memory_bytes // LOOSE_SHARE)
            for item in sorted(others, key=lambda item: item.part.size):
                left -= item.part.size
                if left < 0 or not self._files.is_small(item.part):
                    break
                file = self._files.open(item.part)
                wanted = list(file.wanted(key_range))
                names = file.migration.names(self.schema.updates_schema.names)
                tables.append(as_committed(file.migration, file.read(wanted, names), item.part))
                others.remove(item)
        rows = merge([join(tables)], self.schema, times) if tables else None
        if rows is not None and len(rows):
            rows = clip_rows(rows, SortedKeys(rows, self.schema.key), key_range)
            return MemoryRows(rows, self.schema.key), others
        return None, others

    def _cursors(self, stretch: Stretch, times: Times, key_range: KeyRange) -> list[Cursor]:
        """One cursor for each run's sorted parts, and one for all rows in memory."""
        runs: dict[int, list[ReadPiece]] = {}
        rows = []
        for piece in sorted(stretch.pieces, key=lambda piece: piece.place):
            if piece.item is not None:
                runs.setdefault(piece.item.run, []).append(piece)
            elif piece.rows is not None:
                rows.append(piece.rows)
        cursors = [self._cursor(pieces, times, key_range) for pieces in runs.values()]
        if rows:
            cursors.append(Cursor.of_table(join(rows), self._files, self.schema))
        return cursors

    def _cursor(self, pieces: Sequence[ReadPiece], times: Times, key_range: KeyRange) -> Cursor:
        """A cursor over pieces of one run, in their order."""
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
        # A key may be in two parts, so the times of all of them count together.
        first, last = min(part.time_min for part, _ in parts), max(part.time_max for part, _ in parts)
        # If the commit assigned a time, rows that differed in their times may have become equal.
        is_assigned = any(part.time is not None for part, _ in parts)
        consolidated = (not is_assigned and not times.merges(first, last)) or are_consolidated(pieces)
        cursor = Cursor(parts, self._files, self.schema, key_range, times, consolidated)
        if not any(self._files.migration(part).coarsens for part, _ in parts):
            return cursor
        limit = max(1, min(STREAM_BYTES_MAX, self._memory_bytes // RESORT_SHARE))
        tables = resort(cursor.drain(limit), self._files, self.schema, limit)
        return Cursor.of_tables(tables, self._files, self.schema)


def _by_time(table: pa.Table) -> pa.Table:
    order = stable_order(one_chunk(table.column(TIME)).to_numpy())
    return table if order is None else table.take(pa.array(order))
