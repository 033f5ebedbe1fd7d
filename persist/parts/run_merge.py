"""The streaming merge of runs: consolidated, key-ordered, within a memory budget.

Every run is read through a cursor that knows below which key all of its rows are loaded. Rows below the least of these
bounds are final, so they are merged and emitted; the cursor with the least bound loads next. Emitted rows are never
sorted again. Only if one key has more rows than the budget holds, the merge cuts within the key, by (key, value, time).
"""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist.core.batch import Part
from persist.parts.consolidate import Times, join, merge, sort_groups, sum_diffs, sum_groups
from persist.parts.key_encoding import KeyRange, SortedKeys, clip_rows
from persist.parts.part_files import PartFile, PartFiles
from persist.parts.prefetch import map_in_order
from persist.parts.read_plan import as_committed
from persist.parts.shard_schema import DIFF, ShardSchema
from persist.parts.value_order import column_order, one_chunk

FEW = 4  # rows are few if the longest input has so many times as many
BATCH_ROWS_MIN = 1024
AHEAD = 2  # tables of the longest cursor that are prefetched with threads
CHUNK_BYTES_MAX = 64 * 1024 * 1024  # that a merge holds loaded at most: more only exceeds the caches
SORTED_PIECE_BYTES = 1024 * 1024  # of sorted rows in a temporary file, which are read back together

Ints: TypeAlias = npt.NDArray[np.int64]
Taken: TypeAlias = list[tuple[pa.Table, bool]]  # rows of each cursor, and whether they are consolidated
Window: TypeAlias = Taken | pa.Table  # rows to be merged, or merged already


def merge_into_sorted(many: pa.Table, few: pa.Table, schema: ShardSchema, names: Sequence[str]) -> pa.Table | None:
    """The columns `names` (`__diff` among them) of the rows of both tables, consolidated and in order.

    Each table is consolidated and in order, and has rows. Only rows of `many` that may equal one of `few` are compared
    as a whole: those with the same word of the key, the first word that differs. All others stay where they are.
    Without this, reading a compacted shard with a few batches on top takes half as long again. None if most rows would
    have to be compared. Raises InvalidUsage if a sum of diffs exceeds int64.
    """
    count = len(many)
    both = join([many, few])
    candidates = _candidates(both, count, schema)
    if candidates is None:
        return None
    first, end = candidates
    starts, lengths = _ranges(first, end)
    if 2 * lengths.sum() > count:
        return None
    alike = _expand(starts, lengths)  # the rows of `many` that share the word with one of `few`
    sources = np.concatenate([alike, np.arange(count, len(both))])
    mixed = both.take(pa.array(sources))
    diffs: Ints = one_chunk(both.column(DIFF)).to_numpy()
    rows, sums = sum_diffs(*sort_groups(mixed, schema), diffs[sources])
    places = np.concatenate([np.repeat(starts, lengths), first])[rows]
    index, where = _insert(count, alike, places, sources[rows])
    diffs = diffs[index]
    diffs[where] = sums
    taken = pa.array(index)
    columns = [
        pa.array(diffs) if name == DIFF else pc.take(one_chunk(both.column(name)), taken, boundscheck=False)
        for name in names
    ]
    return pa.Table.from_arrays(columns, schema=both.select(list(names)).schema)


def _candidates(both: pa.Table, count: int, schema: ShardSchema) -> tuple[Ints, Ints] | None:
    """For each of the few, the range `[first, end)` of the many with the same word; None if all have the same words.

    `both` are the `count` many rows and then the few.
    """
    few = len(both) - count
    first, end = np.zeros(few, np.int64), np.full(few, count, np.int64)
    probes = np.concatenate([[0, count - 1], np.arange(count, len(both))])
    for name in schema.key:
        order = column_order(one_chunk(both.column(name)))
        level = 0
        while (words := order.word(level, probes)) is not None:
            is_open = end > first
            least, greatest, sought = words[0], words[1], words[2:]
            if least != greatest:
                every = order.word(level, None)
                assert every is not None
                base, sought = every[:count], every[count:]
                below = np.searchsorted(base, sought, "left")
                first = np.where(is_open, below, first)
                above = np.searchsorted(base, sought, "right")
                return first, np.maximum(np.where(is_open, above, end), first)
            end[is_open & (sought < least)] = 0
            first[is_open & (sought > least)] = count
            level += 1
    return None


def _ranges(first: Ints, end: Ints) -> tuple[Ints, Ints]:
    """The distinct starts and the lengths of the ranges that are not empty. Ranges with the same start are equal."""
    is_any = end > first
    starts, where = np.unique(first[is_any], return_index=True)
    return starts, (end - first)[is_any][where]


def _expand(starts: Ints, counts: Ints) -> Ints:
    """All numbers of the ranges, in order."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def _insert(count: int, left_out: Ints, places: Ints, others: Ints) -> tuple[Ints, Ints]:
    """The numbers below `count` without those left out, with the others inserted before their places.

    Also the positions of the others in the result.
    """
    is_kept = np.ones(count, np.bool_)
    is_kept[left_out] = False
    kept = np.flatnonzero(is_kept)
    where = places - np.searchsorted(left_out, places) + np.arange(len(places))
    index = np.empty(len(kept) + len(places), np.int64)
    is_old = np.ones(len(index), np.bool_)
    is_old[where] = False
    index[where] = others
    index[is_old] = kept
    return index, where


@dataclass(slots=True)
class _Loaded:
    """Sorted rows of a cursor; those before `start` are taken."""

    rows: pa.Table
    keys: SortedKeys
    last: bytes
    start: int = 0


class Cursor:
    """The rows of one run (or of a table in memory) in key order, loaded in pieces."""

    def __init__(
        self,
        parts: Sequence[tuple[Part, list[int] | None]],
        files: PartFiles,
        schema: ShardSchema,
        key_range: KeyRange,
        times: Times,
        consolidated: bool,
    ) -> None:
        """`parts` are given with the row groups to read; None: those that the read needs.

        Their rows get the times of the read. `consolidated`: they are consolidated then.
        """
        self._parts = list(parts)
        self.rows = sum(part.rows for part, _ in parts)
        self.files = files
        self._schema = schema
        self._range = key_range
        self._times = times
        self._file: PartFile | None = None
        self._groups: list[int] = []
        self._batches: Iterator[pa.Table] | None = None
        self._last: bytes | None = None
        self._ahead: deque[tuple[list[int], Future[pa.Table]]] = deque()  # row groups that other threads read
        self.pool: ThreadPoolExecutor | None = None  # whose threads prefetch the next row groups of a part
        self._loaded: deque[_Loaded] = deque()
        self.nbytes = 0  # of all tables of which some rows are not taken
        self.consolidated = consolidated

    @classmethod
    def of_table(cls, rows: pa.Table, files: PartFiles, schema: ShardSchema) -> Cursor:
        """A cursor over consolidated, sorted rows in memory."""
        cursor = cls([], files, schema, KeyRange(), Times(), True)
        cursor.push(rows)
        return cursor

    @classmethod
    def of_tables(
        cls, tables: Iterator[pa.Table], files: PartFiles, schema: ShardSchema, consolidated: bool = True
    ) -> Cursor:
        """A cursor over tables of sorted rows, which are consolidated if they are `consolidated`."""
        cursor = cls([], files, schema, KeyRange(), Times(), consolidated)
        cursor._batches = tables
        return cursor

    @property
    def is_empty(self) -> bool:
        return not self._loaded

    def bound(self) -> bytes | None:
        """Every row below this key is loaded; None if all rows are."""
        following: bytes | None = None
        if self._batches is not None:
            following = b""
        elif self._file is not None and self._groups:
            following = self._file.groups[self._groups[0]].key_lower
        elif self._parts:
            following = self._parts[0][0].key_lower
        if following is None or self._last is None:
            return following
        return max(following, self._last)

    def load(self, nbytes: int) -> None:
        """Load the next rows, about `nbytes` of memory and at least one batch."""
        if self._batches is not None:
            table = next(self._batches, None)
            if table is None:
                self._batches = None
            else:
                self._push(table if self._file is None else self._convert(table, self._file))
            return
        if self._file is None or not self._groups:
            self._open()
        file = self._file
        if file is None or not self._groups:
            return
        first = file.groups[self._groups[0]]
        if not self._ahead and first.nbytes > 2 * nbytes and first.rows > BATCH_ROWS_MIN:
            rows = max(BATCH_ROWS_MIN, first.rows * nbytes // first.nbytes)
            self._batches = file.batches([self._groups.pop(0)], self._columns(file), rows)
            return
        if self._ahead:
            taken, read = self._ahead.popleft()
            table = read.result()
        else:
            taken = self._following(file, 0, nbytes)
            table = file.read(taken, self._columns(file))
        del self._groups[: len(taken)]
        self._read_ahead(file, nbytes)
        self._push(self._convert(table, file))

    def _read_ahead(self, file: PartFile, nbytes: int) -> None:
        start = sum(len(taken) for taken, _ in self._ahead)
        while self.pool is not None and len(self._ahead) < AHEAD and start < len(self._groups):
            taken = self._following(file, start, nbytes)
            self._ahead.append((taken, self.pool.submit(file.read, taken, self._columns(file))))
            start += len(taken)

    def _following(self, file: PartFile, start: int, nbytes: int) -> list[int]:
        """The row groups to read together, from the one at `start` on: up to `nbytes`, at least one."""
        end, size = start + 1, file.groups[self._groups[start]].nbytes
        while end < len(self._groups) and size + file.groups[self._groups[end]].nbytes <= nbytes:
            size += file.groups[self._groups[end]].nbytes
            end += 1
        return self._groups[start:end]

    def take(self, bound: bytes | None) -> pa.Table | None:
        """Remove the loaded rows whose key is below `bound` (None: all of them) and return them."""
        tables = []
        while self._loaded:
            first = self._loaded[0]
            if bound is not None and first.last >= bound:
                end = first.keys.bisect(bound, first.start)
                if end > first.start:
                    tables.append(first.rows.slice(first.start, end - first.start))
                    first.start = end
                break
            tables.append(first.rows.slice(first.start))
            self.nbytes -= first.rows.nbytes
            self._loaded.popleft()
        return pa.concat_tables(tables) if tables else None

    def drain(self, nbytes: int) -> Iterator[pa.Table]:
        """All rows, about `nbytes` of memory at a time."""
        while self.bound() is not None:
            self.load(nbytes)
            if (rows := self.take(None)) is not None:
                yield rows

    def push(self, rows: pa.Table, keys: SortedKeys | None = None) -> None:
        """Append sorted rows, and their keys, to those that are loaded."""
        if len(rows):
            keys = SortedKeys(rows, self._schema.key) if keys is None else keys
            self._loaded.append(_Loaded(rows, keys, keys.last))
            self.nbytes += rows.nbytes

    def _push(self, rows: pa.Table) -> None:
        if len(rows):
            rows = join([rows])
            keys = SortedKeys(rows, self._schema.key)
            self._last = keys.last
            if self._range.upper is not None and self._last >= self._range.upper:
                self._groups, self._parts, self._batches = [], [], None
                self._ahead.clear()
            clipped = clip_rows(rows, keys, self._range)
            self.push(clipped, keys if len(clipped) == len(rows) else None)

    def _open(self) -> None:
        self._file = None
        while self._parts:
            part, groups = self._parts.pop(0)
            self._file = self.files.open(part)
            self._groups = list(self._file.wanted(self._range)) if groups is None else groups
            if self._groups:
                return

    def _columns(self, file: PartFile) -> list[str]:
        return file.migration.names(self._schema.updates_schema.names)

    def _convert(self, table: pa.Table, file: PartFile) -> pa.Table:
        return self._times.apply(as_committed(file.migration, table, file.part))


def merge_cursors(
    cursors: Sequence[Cursor], schema: ShardSchema, names: Sequence[str], memory_bytes: int, *, threaded: bool = False
) -> Iterator[pa.Table]:
    """The columns `names` of the consolidated rows of all cursors in key order, with about `memory_bytes` of memory.

    `threaded`: merge on another thread while this one loads the next rows.
    """
    limit = max(1, min(CHUNK_BYTES_MAX, memory_bytes // 4))

    def merge_window(window: Window) -> pa.Table:
        return window.select(names) if isinstance(window, pa.Table) else _merge_window(window, schema, names)

    windows = _windows(cursors, schema, limit)
    if not threaded:
        yield from filter(len, map(merge_window, windows))
        return
    with ThreadPoolExecutor(max_workers=AHEAD, thread_name_prefix="persist-read") as pool:
        max(cursors, key=lambda cursor: cursor.rows).pool = pool
        yield from filter(len, map_in_order(merge_window, windows, 1, waiting=1))


def _windows(cursors: Sequence[Cursor], schema: ShardSchema, limit: int) -> Iterator[Window]:
    """The rows of all cursors, key range by key range, with about `limit` bytes of them loaded."""
    share = max(1, limit // max(1, 2 * len(cursors)))
    carry: Cursor | None = None
    active = list(cursors)
    while True:
        laggards = _load(active, limit, share)
        low = laggards[0].bound() if laggards else None
        taken = [(rows, cursor.consolidated) for cursor in active if (rows := cursor.take(low)) is not None]
        if taken:
            yield taken
        elif low is None:
            return
        elif any(cursor.is_empty for cursor in laggards):
            next(cursor for cursor in laggards if cursor.is_empty).load(share)
        else:
            emitted, rest = _cut(active, laggards, low, schema)
            yield emitted
            active = [cursor for cursor in active if cursor is not carry]
            carry = Cursor.of_table(rest, laggards[0].files, schema)
            active.append(carry)
        active = [cursor for cursor in active if not cursor.is_empty or cursor.bound() is not None]


def _load(active: Sequence[Cursor], limit: int, share: int) -> list[Cursor]:
    """Load the next rows of the cursors with the least bounds, until `limit` bytes of rows are loaded.

    Returns the cursors with the least bound afterwards; none if all rows of all cursors are loaded.
    """
    waiting = [(bound, number) for number, cursor in enumerate(active) if (bound := cursor.bound()) is not None]
    heapify(waiting)
    held = sum(cursor.nbytes for cursor in active)
    while waiting and held < limit:
        number = waiting[0][1]
        cursor = active[number]
        held -= cursor.nbytes
        cursor.load(share)
        held += cursor.nbytes
        bound = cursor.bound()
        if bound is None:
            heappop(waiting)
        else:
            heapreplace(waiting, (bound, number))
    return [active[number] for bound, number in waiting if bound == waiting[0][0]]


def _merge_window(window: Taken, schema: ShardSchema, names: Sequence[str]) -> pa.Table:
    """The rows of a window, whose times are those of the read, consolidated."""
    rows, consolidated = max(window, key=lambda taken: len(taken[0]))
    others = [other for other, _ in window if other is not rows]
    if not others and consolidated:
        return rows.select(names)
    if consolidated and FEW * sum(map(len, others)) <= len(rows):
        few = merge(others, schema, Times())
        merged = merge_into_sorted(rows, few, schema, names) if len(few) else rows.select(names)
        if merged is not None:
            return merged
    return merge([rows, *others], schema, Times(), names)


def _cut(
    active: Sequence[Cursor], laggards: Sequence[Cursor], key: bytes, schema: ShardSchema
) -> tuple[pa.Table, pa.Table]:
    """Split the loaded rows of one key into those that are final and the rest, both consolidated.

    Each of the `laggards` has more rows of this key to load, all at or after its last loaded row.
    """
    tables, stops, count = [], [], 0
    for cursor in active:
        rows = cursor.take(key + b"\x00")  # no other key starts with the bytes of a whole key
        if rows is None:
            continue
        tables.append(rows)
        count += len(rows)
        if cursor in laggards:
            stops.append(count - 1)
    table = join(tables)
    perm, starts = sort_groups(table, schema)
    order = np.arange(len(table), dtype=np.int64) if perm is None else perm
    ranks = np.empty(len(table), np.int64)
    ranks[order] = np.arange(len(table))
    first = min(int(ranks[stop]) for stop in stops)
    cut = int(np.flatnonzero(starts[: first + 1])[-1])
    final = table.slice(0, 0) if cut == 0 else sum_groups(table, order[:cut], starts[:cut])
    return final, sum_groups(table, order[cut:], starts[cut:])


def resort(tables: Iterator[pa.Table], files: PartFiles, schema: ShardSchema, limit: int) -> Iterator[pa.Table]:
    """Rows that are sorted by key only, consolidated and in the order of keys, values and times.

    When a column was dropped, the rows of a key are in no order and some become equal, so all rows of a key are sorted
    together. Memory: about `limit` bytes of rows; beyond it, sorted pieces are spilled to temporary files and
    merged.
    """
    buffer = _KeyBuffer(files, schema, limit)
    last = b""
    for table in tables:
        keys = SortedKeys(table, schema.key)
        if not buffer.is_empty and keys[0] > last:
            yield from buffer.drain()
        last = keys.last
        cut = keys.bisect(last)
        if cut:  # the keys of the rows before are complete
            buffer.add(table.slice(0, cut))
            yield from buffer.drain()
        buffer.add(table.slice(cut))
    yield from buffer.drain()


class _KeyBuffer:
    """Rows of keys that are sorted together."""

    def __init__(self, files: PartFiles, schema: ShardSchema, limit: int) -> None:
        self._files = files
        self._schema = schema
        self._limit = limit
        self._tables: list[pa.Table] = []
        self._spilled: list[_SpillFile] = []
        self._nbytes = 0

    @property
    def is_empty(self) -> bool:
        return not self._tables and not self._spilled

    def add(self, table: pa.Table) -> None:
        self._tables.append(table)
        self._nbytes += table.nbytes
        if self._nbytes <= self._limit or len(self._tables) < 2:
            return
        rows = merge(self._tables, self._schema, Times())
        self._tables, self._nbytes = [rows], rows.nbytes
        if self._nbytes > self._limit // 2:
            self._spilled.append(_SpillFile(rows))
            self._tables, self._nbytes = [], 0

    def drain(self) -> Iterator[pa.Table]:
        """Remove all rows; they are returned consolidated and in order."""
        rows = merge(self._tables, self._schema, Times())
        spilled, self._spilled, self._tables, self._nbytes = self._spilled, [], [], 0
        if not spilled:
            if len(rows):
                yield rows
            return
        cursors = [Cursor.of_tables(file.tables(), self._files, self._schema) for file in spilled]
        cursors.append(Cursor.of_table(rows, self._files, self._schema))
        names = self._schema.updates_schema.names
        try:
            yield from merge_cursors(cursors, self._schema, names, self._limit)
        finally:
            for file in spilled:
                file.close()


class _SpillFile:
    """Sorted rows in a temporary file, which is deleted when it is closed or garbage-collected."""

    def __init__(self, rows: pa.Table) -> None:
        self._file: Any = tempfile.TemporaryFile(prefix="persist-sort-")  # noqa: SIM115 - it outlives this call
        step = max(1, len(rows) * SORTED_PIECE_BYTES // max(1, rows.nbytes))
        with pa.ipc.new_stream(self._file, rows.schema) as stream:
            stream.write_table(rows, max_chunksize=step)

    def tables(self) -> Iterator[pa.Table]:
        self._file.seek(0)
        for batch in pa.ipc.open_stream(self._file):
            yield pa.Table.from_batches([batch])

    def close(self) -> None:
        self._file.close()
