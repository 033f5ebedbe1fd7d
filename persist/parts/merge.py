"""The streaming merge of runs: consolidated, key-ordered, within a memory budget.

Every run is read through a cursor that knows below which key its rows are all loaded. Rows below the least of
these bounds are final, so they are merged and given out; the cursor that holds the bound loads next. Rows
given out once are never sorted again. Only where one key has more rows than the budget holds, the merge cuts
inside the key, by (key, value, time).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from persist.core.batch import Part
from persist.parts.ahead import alongside
from persist.parts.consolidate import Times, join, merge, pick, sort_groups
from persist.parts.files import Files, PartFile
from persist.parts.keycodec import KeyRange, SortedKeys, clip_rows
from persist.parts.schema import ShardSchema
from persist.parts.weave import FEW, woven

BATCH_ROWS_MIN = 1024
AHEAD = 2  # tables of the longest cursor that are read ahead where there are threads for it
CHUNK_BYTES_MAX = 64 * 1024 * 1024  # what a merge holds loaded at most: more only leaves the caches

Taken: TypeAlias = list[tuple[pa.Table, bool]]  # rows of each cursor, and whether no two of them become one
Window: TypeAlias = Taken | pa.Table  # rows to be merged, or merged already


class Prepare(Protocol):
    """What a cursor reads of parts, and what it makes of it."""

    def columns(self, part: Part) -> list[str]:
        """Those to be read."""
        ...

    def rows(self, table: pa.Table, part: Part) -> pa.Table:
        """Whole rows, in their order, of what was read."""
        ...


@dataclass(slots=True)
class _Loaded:
    """Rows of a cursor, in order; those before `start` are taken."""

    rows: pa.Table
    keys: SortedKeys
    last: bytes
    start: int = 0


class Cursor:
    """The rows of one run (or of a memory table) in key order, loaded piece by piece."""

    def __init__(
        self,
        parts: Sequence[tuple[Part, list[int] | None]],
        files: Files,
        schema: ShardSchema,
        key_range: KeyRange,
        prepare: Prepare | None,
        settled: bool,
    ) -> None:
        """`parts` come with the row groups that are read of them; None: those that the read wants.

        `settled`: no two rows become one. `prepare` is there where there are parts.
        """
        self._parts = list(parts)
        self.rows = sum(part.rows for part, _ in parts)
        self.files = files
        self._schema = schema
        self._range = key_range
        self._prepare = prepare
        self._file: PartFile | None = None
        self._groups: list[int] = []
        self._batches: Iterator[pa.Table] | None = None
        self._last: bytes | None = None
        self._ahead: deque[tuple[list[int], Future[pa.Table]]] = deque()  # row groups that other threads read
        self._pool: ThreadPoolExecutor | None = None
        self._loaded: deque[_Loaded] = deque()
        self.nbytes = 0  # rows that are taken keep their memory until all that were loaded with them are
        self.settled = settled

    @classmethod
    def of_table(cls, rows: pa.Table, files: Files, schema: ShardSchema, settled: bool) -> Cursor:
        """A cursor over consolidated rows that are in memory."""
        cursor = cls([], files, schema, KeyRange(), None, settled)
        cursor.push(rows)
        return cursor

    @classmethod
    def of_tables(cls, tables: Iterator[pa.Table], files: Files, schema: ShardSchema, settled: bool = True) -> Cursor:
        """A cursor over tables of rows that come in order, and are consolidated where they are `settled`."""
        cursor = cls([], files, schema, KeyRange(), None, settled)
        cursor._batches = tables
        return cursor

    @property
    def is_empty(self) -> bool:
        return not self._loaded

    def bound(self) -> bytes | None:
        """Every row below this key is loaded; None when all rows are."""
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
                self._push(table if self._file is None else self._prepared(table, self._file))
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
        self._push(self._prepared(table, file))

    def read_ahead_in(self, pool: ThreadPoolExecutor) -> None:
        """Have the pool's threads read the next row groups of a part, while this thread does something else."""
        self._pool = pool

    def _read_ahead(self, file: PartFile, nbytes: int) -> None:
        start = sum(len(taken) for taken, _ in self._ahead)
        while self._pool is not None and len(self._ahead) < AHEAD and start < len(self._groups):
            taken = self._following(file, start, nbytes)
            self._ahead.append((taken, self._pool.submit(file.read, taken, self._columns(file))))
            start += len(taken)

    def _following(self, file: PartFile, start: int, nbytes: int) -> list[int]:
        """The row groups to be read together, from the one at `start` on: as many as take `nbytes`, at least one."""
        end, size = start + 1, file.groups[self._groups[start]].nbytes
        while end < len(self._groups) and size + file.groups[self._groups[end]].nbytes <= nbytes:
            size += file.groups[self._groups[end]].nbytes
            end += 1
        return self._groups[start:end]

    def take(self, bound: bytes | None) -> pa.Table | None:
        """Take the loaded rows whose key is below `bound` (None: all of them) away from the cursor."""
        found = []
        while self._loaded:
            first = self._loaded[0]
            if bound is not None and first.last >= bound:
                end = first.keys.bisect(bound, first.start)
                if end > first.start:
                    found.append(first.rows.slice(first.start, end - first.start))
                    first.start = end
                break
            found.append(first.rows.slice(first.start))
            self.nbytes -= first.rows.nbytes
            self._loaded.popleft()
        return pa.concat_tables(found) if found else None

    def push(self, rows: pa.Table, keys: SortedKeys | None = None) -> None:
        """Put rows that are in order, and their keys, behind those that are loaded."""
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
        assert self._prepare is not None
        return self._prepare.columns(file.part)

    def _prepared(self, table: pa.Table, file: PartFile) -> pa.Table:
        assert self._prepare is not None
        return self._prepare.rows(table, file.part)


def merge_cursors(
    cursors: Sequence[Cursor], schema: ShardSchema, names: Sequence[str], memory_bytes: int, *, threaded: bool = False
) -> Iterator[pa.Table]:
    """Consolidated rows of all cursors in key order, their columns `names`, holding about `memory_bytes` of memory.

    `threaded`: what is loaded is merged on another thread, while this one loads the next rows.
    """
    limit = max(1, min(CHUNK_BYTES_MAX, memory_bytes // 4))

    def merged(window: Window) -> pa.Table:
        return window.select(names) if isinstance(window, pa.Table) else _merged(window, schema, names)

    windows = _windows(cursors, schema, limit)
    if not threaded:
        yield from filter(len, map(merged, windows))
        return
    with ThreadPoolExecutor(max_workers=AHEAD, thread_name_prefix="persist-read") as pool:
        max(cursors, key=lambda cursor: cursor.rows).read_ahead_in(pool)
        yield from filter(len, alongside(merged, windows))


def _windows(cursors: Sequence[Cursor], schema: ShardSchema, limit: int) -> Iterator[Window]:
    """The rows of all cursors, key range after key range, about `limit` bytes of them loaded."""
    share = max(1, limit // max(1, 2 * len(cursors)))
    carry: Cursor | None = None
    active = list(cursors)
    while True:
        laggards = _load(active, limit, share)
        low = laggards[0].bound() if laggards else None
        taken = [(rows, cursor.settled) for cursor in active if (rows := cursor.take(low)) is not None]
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
            carry = Cursor.of_table(rest, laggards[0].files, schema, settled=True)
            active.append(carry)
        active = [cursor for cursor in active if not cursor.is_empty or cursor.bound() is not None]


def _load(active: Sequence[Cursor], limit: int, share: int) -> list[Cursor]:
    """Load the next rows of the cursors that are furthest behind, until `limit` bytes of rows are loaded.

    The cursors that are furthest behind then: none where all rows of all of them are loaded.
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


def _merged(window: Taken, schema: ShardSchema, names: Sequence[str]) -> pa.Table:
    """Their times are as the read wants them."""
    rows, settled = max(window, key=lambda taken: len(taken[0]))
    others = [other for other, _ in window if other is not rows]
    if not others and settled:
        return rows.select(names)
    if settled and FEW * sum(map(len, others)) <= len(rows):
        few = merge(others, schema, Times())
        found = woven(rows, few, schema, names) if len(few) else rows.select(names)
        if found is not None:
            return found
    return merge([rows, *others], schema, Times(), names)


def _cut(
    active: Sequence[Cursor], laggards: Sequence[Cursor], key: bytes, schema: ShardSchema
) -> tuple[pa.Table, pa.Table]:
    """Split the loaded rows of one key into those that are final and the rest, both consolidated.

    Each laggard still has rows of this key to load, all of them at or after its last loaded row.
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
    ranks = np.empty(len(table), np.int64)
    ranks[np.arange(len(table)) if perm is None else perm] = np.arange(len(table))
    first = min(int(ranks[stop]) for stop in stops)
    cut = int(np.flatnonzero(starts[: first + 1])[-1])
    order = np.arange(len(table), dtype=np.int64) if perm is None else perm
    final = table.slice(0, 0) if cut == 0 else pick(table, order[:cut], starts[:cut])
    return final, pick(table, order[cut:], starts[cut:])
