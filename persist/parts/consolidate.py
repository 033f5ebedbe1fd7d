"""Consolidation: sort updates by (key, value, time), sum the diffs of equal ones, drop the zeros.

The engine computes only a permutation, group boundaries and sums, from order-preserving words
(`persist.parts.value_order`); the rows themselves are then taken from the Arrow columns, so that values of any type
stay unchanged. Rows are refined column by column: after each word only the rows that are still tied with a neighbour
are compared again, and rows that are in order already (sorted runs, distinct keys) are not sorted. Why this is not
done by a query engine: `docs/design/0004-consolidation-and-reads.md`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import InvalidUsage
from persist.parts.shard_schema import DIFF, TIME, ShardSchema
from persist.parts.value_order import Mask, Rows, Words, column_order, is_bytes, one_chunk

Ints = npt.NDArray[np.int64]
COUNTED_SPAN = 1 << 16  # numbers within such a span are ordered by counting
SAMPLED = 1024  # rows that are compared first, to tell whether all may be equal
RUN_ROWS_MIN = 256  # of ascending stretches, on average, that are merged instead of sorted


@dataclass(frozen=True, slots=True)
class Times:
    """How a read changes times: it keeps rows with `after < time <= upto`, then advances times to `advance`.

    A time before `advance` becomes the least of the times `kept` (ascending, all before `advance`) at or beyond it, or
    `advance` if there is none.
    """

    after: int | None = None
    upto: int | None = None
    advance: int | None = None
    kept: tuple[int, ...] = ()

    @classmethod
    def snapshot(cls, as_of: int) -> Times:
        return cls(upto=as_of, advance=as_of)

    def excludes(self, time_min: int, time_max: int) -> bool:
        """Whether no row with a time in `[time_min, time_max]` is kept."""
        return (self.after is not None and time_max <= self.after) or (self.upto is not None and time_min > self.upto)

    def keeps_all(self, time_min: int, time_max: int) -> bool:
        return (self.after is None or time_min > self.after) and (self.upto is None or time_max <= self.upto)

    def merges(self, time_min: int, time_max: int) -> bool:
        """Whether two times of `[time_min, time_max]` may become equal."""
        return self.advance is not None and time_min < time_max and time_min < self.advance

    def advanced(self, time: int) -> int:
        if self.advance is None or time >= self.advance:
            return time
        index = bisect_left(self.kept, time)
        return self.kept[index] if index < len(self.kept) else self.advance

    def advance_all(self, times: Ints) -> Ints:
        """The advanced times; their order does not change."""
        if self.advance is None:
            return times
        if not self.kept:
            return np.maximum(times, self.advance)
        points = np.array([*self.kept, self.advance], np.int64)
        targets = points[np.minimum(np.searchsorted(points, times), len(points) - 1)]
        return np.where(times < self.advance, targets, times)

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that are kept, with their times advanced; their order does not change."""
        times = table.column(TIME)
        keep = None
        if self.after is not None:
            keep = pc.greater(times, self.after)
        if self.upto is not None:
            below = pc.less_equal(times, self.upto)
            keep = below if keep is None else pc.and_(keep, below)
        if keep is not None and not pc.all(keep).as_py():
            table = table.filter(keep)
            times = table.column(TIME)
        if self.advance is not None and len(table) and pc.min(times).as_py() < self.advance:
            return with_values(table, TIME, pa.array(self.advance_all(one_chunk(times).to_numpy())))
        return table


def consolidate(tables: Sequence[pa.Table], schema: ShardSchema, *, since: int | None = None) -> pa.Table:
    """The updates of `tables` (in `updates_schema`), consolidated and sorted by (key, value, time).

    Times before `since` become `since`. Sorted inputs are faster. Raises InvalidUsage if a sum of diffs exceeds int64.
    """
    return merge(tables, schema, Times(advance=since))


def merge(
    tables: Sequence[pa.Table], schema: ShardSchema, times: Times, names: Sequence[str] | None = None
) -> pa.Table:
    """The kept updates of `tables`, consolidated and sorted by (key, value, time); the columns `names` (None: all)."""
    kept = [table for table in (times.apply(table) for table in tables) if len(table)]
    if not kept:
        empty = schema.updates_schema.empty_table()
        return empty if names is None else empty.select(list(names))
    table = join(kept)
    perm, starts = sort_groups(table, schema)
    return sum_groups(table, perm, starts, names)


def join(tables: Sequence[pa.Table]) -> pa.Table:
    """The rows of all tables, with one chunk per column."""
    joined = pa.concat_tables(tables) if len(tables) > 1 else tables[0]
    columns = [one_chunk(chunked) for chunked in joined.columns]
    fields = [field.with_type(array.type) for field, array in zip(joined.schema, columns, strict=True)]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def with_values(table: pa.Table, name: str, values: Any) -> pa.Table:
    """The table with other values in a column."""
    index = table.schema.get_field_index(name)
    return table.set_column(index, table.schema.field(index), values)


def negated(rows: pa.Table) -> pa.Table:
    """The rows with their diffs negated: the updates that retract them."""
    return with_values(rows, DIFF, pc.negate_checked(rows.column(DIFF)))


def at_time(rows: pa.Table, time: int) -> pa.Table:
    """The rows as updates at this time; a column of times is replaced, or inserted before the diffs."""
    field, times = pa.field(TIME, pa.int64(), nullable=False), pa.repeat(pa.scalar(time, pa.int64()), len(rows))
    if (place := rows.schema.get_field_index(TIME)) >= 0:
        return rows.set_column(place, field, times)
    return rows.add_column(rows.schema.get_field_index(DIFF), field, times)


def sort_groups(table: pa.Table, schema: ShardSchema) -> tuple[Rows | None, Mask]:
    """The (key, value, time) order of the rows, and where in that order a new (key, value, time) starts.

    The order is None if the rows are sorted already.
    """
    return _refine((one_chunk(table.column(name)) for name in (*schema.order, TIME)), len(table))


def find_twins(table: pa.Table, schema: ShardSchema) -> Mask:
    """Which of the sorted rows are twins: rows with the same key and value as the row before, at any times."""
    _, starts = _refine((one_chunk(table.column(name)) for name in schema.order), len(table))
    return ~starts


def sum_groups(table: pa.Table, perm: Rows | None, starts: Mask, names: Sequence[str] | None = None) -> pa.Table:
    """One row per group with the sum of its diffs, without zero sums; its columns `names` (None: all)."""
    rows, sums = sum_diffs(perm, starts, one_chunk(table.column(DIFF)).to_numpy())
    names = table.column_names if names is None else list(names)
    if perm is None and len(rows) == len(table):
        return table.select(names)
    taken = pa.array(rows)
    columns = [pa.array(sums) if name == DIFF else one_chunk(table.column(name)).take(taken) for name in names]
    return pa.Table.from_arrays(columns, schema=table.select(names).schema)


def sum_diffs(perm: Rows | None, starts: Mask, diffs: Ints) -> tuple[Ints, Ints]:
    """One row per group, in order, and the sum of the group's diffs, without zero sums."""
    ordered = diffs if perm is None else diffs[perm]
    if bool(starts.all()):
        rows, sums = (np.arange(len(ordered), dtype=np.int64) if perm is None else perm), ordered
    else:
        firsts = np.flatnonzero(starts)
        rows, sums = (firsts if perm is None else perm[firsts]), _sums(ordered, firsts)
    nonzero = sums != 0
    return (rows, sums) if nonzero.all() else (rows[nonzero], sums[nonzero])


def fold_twins(table: pa.Table, firsts: Mask, times: Times, clip: int | None) -> pa.Table:
    """The kept updates of sorted rows at the times of the read, summed without comparing their keys and values.

    `firsts` are the rows that are not twins. The table has `__diff`, and `__time` unless the read keeps all rows and
    gives them one time. Rows with a time before `clip` are left out.
    """
    if TIME in table.column_names:
        table, firsts = _at_times(table, firsts, times, clip)
    in_group = ~firsts
    in_group[:-1] |= ~firsts[1:]
    grouped = np.flatnonzero(in_group)  # the twins, and the row before the first of them
    if not len(grouped):
        return table
    diffs: Ints = one_chunk(table.column(DIFF)).to_numpy().copy()
    rows, sums = sum_diffs(None, firsts[grouped], diffs[grouped])
    kept = grouped[rows]
    diffs[kept] = sums
    is_kept = ~in_group
    is_kept[kept] = True
    return with_values(table, DIFF, pa.array(diffs)).filter(pa.array(is_kept))


def _at_times(table: pa.Table, firsts: Mask, times: Times, clip: int | None) -> tuple[pa.Table, Mask]:
    """The kept rows at the times of the read, and which differ from the row before in key, value or that time."""
    place = table.num_columns
    numbered = table.append_column("", pa.array(np.cumsum(firsts)))
    if clip is not None:
        numbered = numbered.filter(pc.greater_equal(numbered.column(TIME), clip))
    kept = times.apply(numbered)
    groups, stamps = (one_chunk(kept.column(name)).to_numpy() for name in (place, TIME))
    starts = np.ones(len(kept), np.bool_)
    starts[1:] = (groups[1:] != groups[:-1]) | (stamps[1:] != stamps[:-1])
    return kept.remove_column(place), starts


def _refine(arrays: Iterator[pa.Array], count: int) -> tuple[Rows | None, Mask]:
    """Sort `count` rows by the columns in turn: their order (None: sorted already), and where a new group starts."""
    perm: Rows | None = None
    starts = np.zeros(count, dtype=np.bool_)
    starts[:1] = True
    if count < 2:
        return None, starts
    tied: Rows | None = None  # positions that share their group with a neighbour; None: all of them
    for array in arrays:
        if _are_equal(array, perm, starts, tied):
            continue
        order, level = column_order(array), 0
        while (words := order.word(level, _rows_at(perm, tied))) is not None:
            level += 1
            moved = _sort_within(words, starts if tied is None else starts[tied])
            if moved is not None:
                words = words[moved]
                if perm is None:
                    perm = moved if tied is None else np.arange(count, dtype=np.int64)
                elif tied is None:
                    perm = perm[moved]
                if tied is not None:
                    perm[tied] = perm[tied][moved]
            changed = words[1:] != words[:-1]
            if not changed.any():
                continue
            if tied is None:
                starts[1:] |= changed
            else:
                starts[tied[1:]] |= changed
            tied = _still_tied(starts, tied)
            if not len(tied):
                return perm, starts
    return perm, starts


def _rows_at(perm: Rows | None, tied: Rows | None) -> Rows | None:
    """The rows at the tied positions; None: all rows, in their original order."""
    return perm if tied is None else (tied if perm is None else perm[tied])


def _are_equal(array: pa.Array, perm: Rows | None, starts: Mask, tied: Rows | None) -> bool:
    """Whether each tied row has the value of the row before it in its group; False may also mean unknown.

    Texts are compared faster than they are sorted. The comparison ends with a sample if some rows of it differ.
    """
    if tied is None or len(tied) < SAMPLED or not is_bytes(array.type) or array.null_count:
        return False

    def differ(first: int, end: int) -> bool:
        places = tied[first:end]
        values = array.take(pa.array(_rows_at(perm, places)))
        equal = pc.equal(values.slice(1), values.slice(0, len(values) - 1)).to_numpy(zero_copy_only=False)
        return not bool((equal | starts[places[1:]]).all())

    return not differ(0, SAMPLED) and not differ(SAMPLED - 1, len(tied))


def _sort_within(words: Words, starts: Mask) -> Rows | None:
    """An order that sorts `words` within each group, not stable; None if they are sorted already.

    The number of the group, the word and the row's place are packed into one integer if they fit: sorting integers is
    fastest.
    """
    falls = words[1:] < words[:-1]
    falls &= ~starts[1:]
    if not falls.any():
        return None
    low = words.min()
    bits, place = int(words.max() - low).bit_length(), (len(words) - 1).bit_length()
    last = int(np.count_nonzero(starts)) - 1
    if bits + last.bit_length() > 64:
        first = np.argsort(words, kind="stable")
        return first[np.argsort(np.cumsum(starts)[first], kind="stable")]
    packed = words - low
    if last:
        groups: Words = np.cumsum(starts, dtype=np.uint64)
        groups -= np.uint64(1)
        groups <<= np.uint64(bits)
        packed |= groups
    if bits + last.bit_length() + place > 64:
        return np.argsort(packed, kind="stable" if _has_sorted_runs(packed) else None)
    return _order_by_place(packed, place)


def stable_order(numbers: Ints) -> Rows | None:
    """The order that sorts numbers and is stable; None if they are sorted."""
    if (numbers[1:] >= numbers[:-1]).all():
        return None
    low, place = int(numbers.min()), (len(numbers) - 1).bit_length()
    span = int(numbers.max()) - low
    if span < COUNTED_SPAN:
        return np.argsort((numbers - low).astype(np.uint16), kind="stable")
    if span.bit_length() + place > 63:
        return np.argsort(numbers, kind="stable")
    return _order_by_place((numbers - low).view(np.uint64), place)


def _order_by_place(words: Words, place: int) -> Rows:
    """The stable order of words with `place` free high bits, which hold any place. Changes the words."""
    words <<= np.uint64(place)
    words |= np.arange(len(words), dtype=np.uint64)
    words.sort(kind="stable" if _has_sorted_runs(words) else None)
    words &= np.uint64((1 << place) - 1)
    order: Rows = words.view(np.int64)
    return order


def _has_sorted_runs(words: Words) -> bool:
    """Whether the words consist of ascending stretches of RUN_ROWS_MIN and more on average: merge sort is faster then.

    It is three to five times as fast for some tens of long stretches, and a quarter slower for random words.
    """
    return int(np.count_nonzero(words[1:] < words[:-1])) * RUN_ROWS_MIN < len(words)


def _still_tied(starts: Mask, tied: Rows | None) -> Rows:
    """The positions whose group has more than one row."""
    inner = starts if tied is None else starts[tied]
    alone = inner.copy()
    alone[:-1] &= inner[1:]
    positions = np.flatnonzero(~alone)
    return positions if tied is None else tied[positions]


def _sums(diffs: Ints, firsts: Rows) -> Ints:
    """The sum of each group's diffs. Raises InvalidUsage if one exceeds int64."""
    largest = max(abs(int(diffs.max())), abs(int(diffs.min())))
    longest = int(np.diff(firsts, append=len(diffs)).max())
    sums: Ints = np.add.reduceat(diffs, firsts)
    if largest * longest >= 2**63:
        high = np.add.reduceat(diffs >> 32, firsts)
        low = np.add.reduceat(diffs & 0xFFFFFFFF, firsts)
        total = high + (low >> 32)
        if bool(((total < -(2**31)) | (total >= 2**31)).any()):
            raise InvalidUsage("the diffs of an update sum to a number beyond int64; write smaller diffs")
    return sums
