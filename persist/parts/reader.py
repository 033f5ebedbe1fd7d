"""Reading runs: one engine for snapshots, listens and compaction.

Runs are planned into stretches of the key space. A stretch with one sorted part whose rows are consolidated
already is read straight through, only the columns asked for; everything else goes through the streaming merge.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.core.antichain import Antichain
from persist.core.batch import Part, Run
from persist.core.errors import InvalidUsage
from persist.parts.ahead import in_order
from persist.parts.bundles import expanded
from persist.parts.codec import RowGroup, at_part_time
from persist.parts.columns import one_chunk
from persist.parts.consolidate import Times, join, merge
from persist.parts.files import BlobReads, Files, Keeps, PartFile
from persist.parts.keycodec import ALL_KEYS, KeyRange, SortedKeys, clip_rows
from persist.parts.merge import Cursor, merge_cursors
from persist.parts.schema import DIFF, TIME, ShardSchema

DECODERS = 2  # tables that are fetched and decoded at the same time where a part is read straight through
FETCHERS = 2  # pieces of a part that are fetched ahead where the caller decodes them batch by batch
MEMORY_BYTES = 512 * 1024 * 1024
STREAM_BYTES_MAX = 64 * 1024 * 1024  # memory of one table of a part that is read straight through


@dataclass(frozen=True, slots=True)
class Item:
    """A part, and the number of its run."""

    run: int
    part: Part


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
        for items in stretches(runs, times, key_range, self._files):
            part = items[0].part
            file = as_it_is(part, times, self._files) if len(items) == 1 else None
            if file is not None:
                plain = _Straight(file, self.schema, times, key_range, names)
                limit = max(1, min(STREAM_BYTES_MAX, self._memory_bytes // 4))
                if batch_rows is None:
                    yield from plain.tables(limit, self._decoders)
                else:
                    yield from plain.batches(limit, batch_rows)
                continue
            for table in merge_cursors(self._cursors(items, times, key_range), self.schema, self._memory_bytes):
                yield table.select(names)

    def _cursors(self, items: Sequence[Item], times: Times, key_range: KeyRange) -> list[Cursor]:
        """One cursor for each run's sorted parts, and one for all inline parts together."""
        runs: dict[int, list[Part]] = {}
        inline = []
        for item in items:
            if item.part.is_inline:
                inline.append(self._whole(self._files.inline(item.part), item.part))
            else:
                runs.setdefault(item.run, []).append(item.part)
        cursors = [
            Cursor(parts, self._files, self.schema, key_range, times, lambda t, p: self._prepare(t, p, times))
            for parts in runs.values()
        ]
        rows = merge([join(inline)], self.schema, times) if inline else None
        if rows is not None and len(rows):
            rows = clip_rows(rows, SortedKeys(rows, self.schema.key), key_range)
            cursors.append(Cursor.of_table(rows, self._files, self.schema, settled=True))
        return cursors

    def _prepare(self, table: pa.Table, part: Part, times: Times) -> pa.Table:
        """Whole rows of a part as rows of the current schema, at the times that the read gives them."""
        return times.apply(self._whole(table, part))

    def _whole(self, table: pa.Table, part: Part) -> pa.Table:
        """Whole rows of a part as rows of the current schema, at the times that they were committed with."""
        table = self.schema.migrate(table)
        table = at_part_time(table, part)
        if part.clip is not None:
            table = table.filter(pc.greater_equal(table.column(TIME), part.clip))
        return table


class _Straight:
    """A part that no other overlaps and that needs no consolidation: only the columns asked for are read."""

    def __init__(
        self, file: PartFile, schema: ShardSchema, times: Times, key_range: KeyRange, names: Sequence[str]
    ) -> None:
        part = file.part
        self._file = file
        self._schema = schema
        self._times = times
        self._range = key_range
        self._names = list(names)
        self._filters = not times.keeps_all(part.time_min, part.time_max) or part.clip is not None
        time, diff = _constants(part, times)
        self._constants: dict[str, int] = {}
        if time is not None and not self._filters:
            self._constants[TIME] = time
        if diff is not None:
            self._constants[DIFF] = diff
        self._stored = frozenset(file.schema.updates_schema.names)
        self._schemas = {edge: pa.schema(self._fields(edge)) for edge in (False, True)}
        self._filled: dict[str, pa.Array] = {}  # of each constant column: the longest yet, for slices of it

    def tables(self, limit: int, decoders: int) -> Iterator[pa.Table]:
        """The rows in large tables, decoded on `decoders` threads, which hold about `limit` bytes together."""

        def read(piece: tuple[list[int], bool]) -> pa.Table:
            groups, edge = piece
            return self._finished(self._file.read(groups, self._columns(edge)), edge)

        for table in in_order(read, _batches(self._file, self._range, max(1, limit // decoders)), decoders):
            if len(table):
                yield table

    def batches(self, limit: int, rows: int) -> Iterator[pa.Table]:
        """The rows in tables of at most `rows` rows, decoded by the caller, their encoded bytes fetched ahead."""

        def fetch(piece: tuple[list[int], bool]) -> tuple[list[int], bool, Any]:
            groups, edge = piece
            return groups, edge, self._file.source(groups, self._columns(edge))

        fetchers = 1 if self._file.is_whole else FETCHERS
        pieces = _batches(self._file, self._range, max(1, limit // FETCHERS))
        for groups, edge, source in in_order(fetch, pieces, fetchers):
            for batch in self._file.batches(groups, self._columns(edge), rows, source):
                table = self._finished(batch, edge)
                if len(table):
                    yield table

    def _fields(self, edge: bool) -> list[pa.Field]:
        """What is needed of every row: the columns asked for, and those by which rows are left out."""
        wanted = {*self._names, *(self._schema.key if edge else ()), *([TIME] if self._filters else ())}
        return [field for field in self._schema.updates_schema if field.name in wanted]

    def _columns(self, edge: bool) -> list[str]:
        return [field.name for field in self._fields(edge) if field.name not in self._constants]

    def _finished(self, table: pa.Table, edge: bool) -> pa.Table:
        """The rows that are wanted of what was read: at the times of the read, within the key range."""
        clip = self._file.part.clip
        table = self._complete(table, self._schemas[edge])
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
                column = table.column(field.name)
                arrays.append(column if column.type == field.type else column.cast(field.type))
            else:
                arrays.append(pa.nulls(len(table), field.type))
        return pa.Table.from_arrays(arrays, schema=target)

    def _constant(self, name: str, rows: int) -> pa.Array:
        filled = self._filled.get(name)
        if filled is None or len(filled) < rows:
            filled = pa.repeat(pa.scalar(self._constants[name], pa.int64()), rows)
            self._filled[name] = filled
        return filled.slice(0, rows)


def _by_time(table: pa.Table) -> pa.Table:
    times = one_chunk(table.column(TIME)).to_numpy()
    if (times[1:] >= times[:-1]).all():
        return table
    return table.take(pa.array(np.argsort(times, kind="stable")))


def _constants(part: Part, times: Times) -> tuple[int | None, int | None]:
    """The time that every row gets and the diff that every row has, where there is only one."""
    advance = -1 if times.advance is None else times.advance
    low, high = max(part.time_min, advance), max(part.time_max, advance)
    return (low if low == high else None), (part.diff_min if part.diff_min == part.diff_max else None)


def as_it_is(part: Part, times: Times, files: Files) -> PartFile | None:
    """The part, open, where its rows come out as they are: it is sorted, and the read merges no two of them."""
    if part.is_inline or not part.sorted or times.merges(part.time_min, part.time_max):
        return None
    file = files.open(part)
    return file if part.time is None or file.has_one_time else None


def stretches(runs: Iterable[Run], times: Times, key_range: KeyRange, files: Files) -> Iterator[list[Item]]:
    """The parts that the read needs, in stretches that do not overlap, in key order. Reads the bundles it needs."""

    def wants(part: Part) -> bool:
        return (
            part.rows > 0
            and key_range.overlaps(part.key_lower, part.key_upper)
            and not times.hides(part.time_min, part.time_max)
            and not (part.clip is not None and part.time_max < part.clip)
        )

    plain = expanded(runs, files.blob, wants)
    items = [Item(number, part) for number, run in enumerate(plain) for part in run.parts if wants(part)]
    items.sort(key=lambda item: item.part.key_lower)
    stretch: list[Item] = []
    end: bytes | None = b""
    for item in items:
        if stretch and end is not None and item.part.key_lower > end:
            yield stretch
            stretch, end = [], b""
        stretch.append(item)
        upper = item.part.key_upper
        end = None if end is None or upper is None else max(end, upper)
    if stretch:
        yield stretch


def _batches(file: PartFile, key_range: KeyRange, limit: int) -> Iterator[tuple[list[int], bool]]:
    """Row groups to read together, and whether they stick out of the key range."""
    taken: list[int] = []
    size = 0
    for number in file.wanted(key_range):
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
