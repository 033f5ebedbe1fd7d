"""Row groups that are read straight: nothing overlaps them, and they need no consolidation.

Only the columns asked for are read. What is decoded together is one piece; pieces do not depend on one another, so
that the reader makes several at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from persist.parts.ahead import in_order
from persist.parts.columns import Mask
from persist.parts.consolidate import Times, folded
from persist.parts.files import PartFile
from persist.parts.keycodec import KeyRange, SortedKeys, clip_rows
from persist.parts.migration import Migration
from persist.parts.schema import DIFF, TIME, ShardSchema
from persist.parts.stretches import Stretch, bounds_of

FETCH_BYTES = 8 * 1024 * 1024  # about so many encoded bytes by one request, if row groups allow it
FETCH_BYTES_MIN = 2 * 1024 * 1024  # below which a request is not worth its way to a far store
FETCHERS = 2  # pieces of a part that are fetched ahead where the caller decodes them batch by batch

Piece: TypeAlias = Callable[[], pa.Table]  # makes the rows of some row groups


class Filled:
    """Tables with columns whose values are all the same, which are slices of the longest one of each yet."""

    def __init__(self) -> None:
        self._longest: dict[str, tuple[int, pa.Array]] = {}

    def completed(self, table: pa.Table, target: pa.Schema, same: Mapping[str, int], migration: Migration) -> pa.Table:
        """The columns of `target`: those that are the `same` in all rows, and the others as they are read."""
        arrays = [
            self._of(field.name, same[field.name], len(table)) if field.name in same else migration.column(table, field)
            for field in target
        ]
        return pa.Table.from_arrays(arrays, schema=target)

    def _of(self, name: str, value: int, rows: int) -> pa.Array:
        held, filled = self._longest.get(name, (value, None))
        if filled is None or held != value or len(filled) < rows:
            filled = pa.repeat(pa.scalar(value, pa.int64()), rows)
            self._longest[name] = (value, filled)
        return filled.slice(0, rows)


class Straight:
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
        self._migration = file.migration
        self._schemas = {edge: pa.schema(self._fields(edge)) for edge in (False, True)}
        self._filled = Filled()

    def pieces(self, limit: int, readers: int) -> Iterator[Piece]:
        """What makes the rows, in tables of about `limit` bytes, at least one row group; some may be without rows.

        They may be called on any threads, of which there are `readers`.
        """

        def read(groups: list[int], edge: bool) -> pa.Table:
            table = self._file.read(groups, self._columns(edge))
            return self._finished(table, edge, self._file.firsts(groups) if self._folds else None)

        for groups, edge in self._together(limit, readers):
            yield partial(read, groups, edge)

    def batches(self, limit: int, rows: int) -> Iterator[pa.Table]:
        """The rows in tables of at most `rows` rows, decoded by the caller, their encoded bytes fetched ahead."""

        def fetch(piece: tuple[list[int], bool]) -> tuple[list[int], bool, Any]:
            groups, edge = piece
            return groups, edge, self._file.source(groups, self._columns(edge))

        if self._folds:  # rows that become one may lie in two batches
            for piece in self.pieces(limit, 1):
                table = piece()
                yield from (table.slice(start, rows) for start in range(0, len(table), rows))
            return
        fetchers = 1 if self._file.is_whole else FETCHERS
        pieces = self._together(max(1, limit // FETCHERS), FETCHERS)
        for groups, edge, source in in_order(fetch, pieces, fetchers):
            for batch in self._file.batches(groups, self._columns(edge), rows, source):
                table = self._finished(batch, edge)
                if len(table):
                    yield table

    def _together(self, limit: int, readers: int) -> Iterator[tuple[list[int], bool]]:
        """As `_batches`, for so many readers of which each holds a piece of about `limit` bytes."""
        sizes = self._file.encoded_bytes(self._groups, self._columns(False))
        return _batches(self._file, self._groups, self._range, limit, sizes, readers)

    def _fields(self, edge: bool) -> list[pa.Field]:
        """What is needed of every row: the columns asked for, and those by which rows are left out."""
        wanted = {*self._names, *(self._schema.key if edge else ()), *([TIME] if self._needs_time else ())}
        return [field for field in self._schema.updates_schema if field.name in wanted]

    def _columns(self, edge: bool) -> list[str]:
        return self._migration.names(field.name for field in self._fields(edge) if field.name not in self._constants)

    def _finished(self, table: pa.Table, edge: bool, firsts: Mask | None = None) -> pa.Table:
        """The rows that are wanted of what was read: at the times of the read, within the key range."""
        clip = self._file.part.clip
        table = self._filled.completed(table, self._schemas[edge], self._constants, self._migration)
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


def _constants(span: tuple[int, int], diffs: tuple[int, int], times: Times) -> tuple[int | None, int | None]:
    """The time that every row gets and the diff that every row has, where there is only one."""
    low, high = (times.moved(time) for time in span)
    return (low if low == high else None), (diffs[0] if diffs[0] == diffs[1] else None)


def _batches(
    file: PartFile, groups: Sequence[int], key_range: KeyRange, limit: int, sizes: Sequence[int], readers: int
) -> Iterator[tuple[list[int], bool]]:
    """Row groups to read together, and whether they stick out of the key range.

    They take at most about `limit` bytes of memory. `sizes` are their encoded bytes: a part that is worth it is cut so
    that all `readers` have some.
    """
    left = sum(sizes)
    fetched_max = max(FETCH_BYTES_MIN, min(FETCH_BYTES, left // readers))
    taken: list[int] = []
    memory, fetched = 0, 0
    for number, size in zip(groups, sizes, strict=True):
        group = file.groups[number]
        edge = not key_range.covers(group.key_lower, group.key_upper)
        is_enough = fetched + size // 2 > fetched_max and left >= FETCH_BYTES_MIN // 2
        left -= size
        if taken and (edge or memory + group.nbytes > limit or is_enough):
            yield taken, False
            taken, memory, fetched = [], 0, 0
        if edge:
            yield [number], True
            continue
        taken.append(number)
        memory += group.nbytes
        fetched += size
    if taken:
        yield taken, False
