"""Consolidation: sort updates by (key, value, time), sum the diffs of equal ones, drop the zeros.

The engine makes only a permutation, group boundaries and sums, from order-preserving words (`columns`); the
rows themselves are then taken from the Arrow columns, so that any type passes through unharmed. Rows are
refined column by column: after each word only rows that still tie with a neighbour are looked at again, and
where these are in order already (sorted runs, distinct keys) nothing is sorted. Why not a query engine:
`docs/design/0004-consolidation-and-reads.md`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import InvalidUsage
from persist.parts.row_sort import ROWS_MIN, has_sorted_runs, is_constant, sort_packed, sort_words, take_rows
from persist.parts.shard_schema import DIFF, TIME, ShardSchema
from persist.parts.sort_words import ColumnOrder, Mask, Rows, Words, column_order, is_bytes, one_chunk

Ints = npt.NDArray[np.int64]
FEW = 1 << 16  # numbers that lie so close together are ordered by counting
SAMPLED = 1024  # rows of which it is looked first whether they are alike


@dataclass(frozen=True, slots=True)
class Times:
    """What a read does to times: keep rows with `after < time <= upto`, then move times up to `advance`.

    A time moves to the least of the times `kept` (ascending, all before `advance`) at or beyond it, if there is one.
    """

    after: int | None = None
    upto: int | None = None
    advance: int | None = None
    kept: tuple[int, ...] = ()

    @classmethod
    def snapshot(cls, as_of: int) -> Times:
        return cls(upto=as_of, advance=as_of)

    def hides(self, time_min: int, time_max: int) -> bool:
        """Whether no row of times in `[time_min, time_max]` is kept."""
        return (self.after is not None and time_max <= self.after) or (self.upto is not None and time_min > self.upto)

    def keeps_all(self, time_min: int, time_max: int) -> bool:
        return (self.after is None or time_min > self.after) and (self.upto is None or time_max <= self.upto)

    def merges(self, time_min: int, time_max: int) -> bool:
        """Whether two times of `[time_min, time_max]` may become one."""
        return self.advance is not None and time_min < time_max and time_min < self.advance

    def moved(self, time: int) -> int:
        """Where a time comes to lie."""
        if self.advance is None or time >= self.advance:
            return time
        index = bisect_left(self.kept, time)
        return self.kept[index] if index < len(self.kept) else self.advance

    def all_moved(self, times: Ints) -> Ints:
        """Where these times come to lie. Equal ones stay equal, and their order stays."""
        if self.advance is None:
            return times
        if not self.kept:
            return np.maximum(times, self.advance)
        points = np.array([*self.kept, self.advance], np.int64)
        targets = points[np.minimum(np.searchsorted(points, times), len(points) - 1)]
        return np.where(times < self.advance, targets, times)

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows that are kept, with their times moved up; their order stays."""
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
            index = table.schema.get_field_index(TIME)
            moved = self.all_moved(one_chunk(times).to_numpy())
            table = table.set_column(index, table.schema.field(TIME), pa.array(moved))
        return table


def consolidate(
    tables: Sequence[pa.Table],
    schema: ShardSchema,
    *,
    since: int | None = None,
    upper_as_of: int | None = None,
    kept: tuple[int, ...] = (),
) -> pa.Table:
    """The updates of `tables` (in `updates_schema`), consolidated and sorted by (key, value, time).

    Rows later than `upper_as_of` are left out; times before `since` become the least time of `kept` at or beyond them,
    or `since`. Sorted inputs are faster. Raises InvalidUsage when a sum of diffs leaves int64.
    """
    return merge(tables, schema, Times(upto=upper_as_of, advance=since, kept=kept))


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
    """The rows of all tables, one chunk a column."""
    joined = pa.concat_tables(tables) if len(tables) > 1 else tables[0]
    columns = [one_chunk(chunked) for chunked in joined.columns]
    fields = [field.with_type(array.type) for field, array in zip(joined.schema, columns, strict=True)]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def negated(rows: pa.Table) -> pa.Table:
    """The rows with their diffs negated: what takes them away."""
    index = rows.schema.get_field_index(DIFF)
    return rows.set_column(index, rows.schema.field(DIFF), pc.negate_checked(rows.column(DIFF)))


def at_time(rows: pa.Table, time: int) -> pa.Table:
    """The rows as updates at this time, whether they have times or not."""
    field, times = pa.field(TIME, pa.int64(), nullable=False), pa.repeat(pa.scalar(time, pa.int64()), len(rows))
    if (place := rows.schema.get_field_index(TIME)) >= 0:
        return rows.set_column(place, field, times)
    return rows.add_column(rows.schema.get_field_index(DIFF), field, times)


def sort_groups(table: pa.Table, schema: ShardSchema) -> tuple[Rows | None, Mask]:
    """The rows in (key, value, time) order, and where in that order a new (key, value, time) starts.

    The order is None when the rows have it already.
    """
    return _refine((one_chunk(table.column(name)) for name in (*schema.key, *schema.value, TIME)), len(table))


def find_twins(table: pa.Table, schema: ShardSchema) -> Mask:
    """Which rows share key and value with the row before, whatever their times. The rows are in order."""
    _, starts = _refine((one_chunk(table.column(name)) for name in schema.order), len(table))
    return ~starts


def sum_groups(table: pa.Table, perm: Rows | None, starts: Mask, names: Sequence[str] | None = None) -> pa.Table:
    """One row for each group, with the sum of its diffs, without those of sum zero; its columns `names` (None: all)."""
    rows, sums = sum_diffs(perm, starts, one_chunk(table.column(DIFF)).to_numpy())
    names = table.column_names if names is None else list(names)
    if perm is None and len(rows) == len(table):
        return table.select(names)
    taken = pa.array(rows)
    columns = [pa.array(sums) if name == DIFF else take_rows(one_chunk(table.column(name)), taken) for name in names]
    return pa.Table.from_arrays(columns, schema=table.select(names).schema)


def sum_diffs(perm: Rows | None, starts: Mask, diffs: Ints) -> tuple[Ints, Ints]:
    """One row of each group, in order, and the sum of the group's diffs, without those of sum zero."""
    ordered = diffs if perm is None else (diffs[: len(perm)] if is_constant(diffs) else diffs[perm])
    if bool(starts.all()):
        rows, sums = (np.arange(len(ordered), dtype=np.int64) if perm is None else perm), ordered
    else:
        firsts = np.flatnonzero(starts)
        rows, sums = (firsts if perm is None else perm[firsts]), _sums(ordered, firsts)
    nonzero = sums != 0
    return (rows, sums) if nonzero.all() else (rows[nonzero], sums[nonzero])


def fold_twins(table: pa.Table, firsts: Mask, times: Times, clip: int | None) -> pa.Table:
    """The kept updates of rows in order, at the times of the read, added up without a look at their keys and values.

    `firsts` are the rows that do not share key and value with the row before. The table has `__diff`, and `__time`
    unless the read keeps all rows and gives them one time. `clip`: rows before it are left out.
    """
    if TIME in table.column_names:
        table, firsts = _at_times(table, firsts, times, clip)
    is_alike = ~firsts
    is_alike[:-1] |= ~firsts[1:]
    alike = np.flatnonzero(is_alike)  # the twins, and the rows before the first of them
    if not len(alike):
        return table
    diffs: Ints = one_chunk(table.column(DIFF)).to_numpy().copy()
    rows, sums = sum_diffs(None, firsts[alike], diffs[alike])
    left = alike[rows]
    diffs[left] = sums
    is_left = ~is_alike
    is_left[left] = True
    index = table.schema.get_field_index(DIFF)
    table = table.set_column(index, table.schema.field(DIFF), pa.array(diffs))
    return table.filter(pa.array(is_left))


def _at_times(table: pa.Table, firsts: Mask, times: Times, clip: int | None) -> tuple[pa.Table, Mask]:
    """The kept rows at the times of the read, and which do not share key, value and that time with the row before."""
    stamps: Ints = one_chunk(table.column(TIME)).to_numpy()
    keep = np.ones(len(table), np.bool_)
    if times.after is not None:
        keep &= stamps > times.after
    if times.upto is not None:
        keep &= stamps <= times.upto
    if clip is not None:
        keep &= stamps >= clip
    groups = np.cumsum(firsts)[keep]
    table, stamps = table.filter(pa.array(keep)), stamps[keep]
    if times.advance is not None:
        stamps = times.all_moved(stamps)
        index = table.schema.get_field_index(TIME)
        table = table.set_column(index, table.schema.field(TIME), pa.array(stamps))
    fresh = np.ones(len(table), np.bool_)
    fresh[1:] = (groups[1:] != groups[:-1]) | (stamps[1:] != stamps[:-1])
    return table, fresh


def _refine(arrays: Iterator[pa.Array], count: int) -> tuple[Rows | None, Mask]:
    """Sort `count` rows by the columns in turn; see the module's note."""
    perm: Rows | None = None
    starts = np.zeros(count, dtype=np.bool_)
    starts[:1] = True
    if count < 2:
        return None, starts
    tied: Rows | None = None  # positions that share their group with a neighbour; None: all of them
    left: Iterator[tuple[pa.Array, ColumnOrder | None, int]] = ((array, None, 0) for array in arrays)
    if count >= ROWS_MIN:
        found = sort_packed(map(column_order, arrays), count)
        perm, starts, tied = found.perm, found.starts, _still_tied(found.starts, None)
        if not len(tied):
            return perm, starts
        tied = tied if len(tied) < count else None
        if found.last is not None:
            left = chain([(None, found.last, found.level)], left)
    for array, order, level in left:
        while True:
            rows = perm if tied is None else (tied if perm is None else perm[tied])
            if order is None:
                if _are_alike(array, rows, starts, tied):
                    break
                order = column_order(array)
            words = order.word(level, rows)
            if words is None:
                break
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


def _are_alike(array: pa.Array, rows: Rows | None, starts: Mask, tied: Rows | None) -> bool:
    """Whether each of the rows has the value of the one before it in its group, as far as that is told at once.

    Of texts that is sooner compared than put in order. Where some differ in a sample of them, nothing is told.
    """
    if tied is None or len(tied) < SAMPLED or not is_bytes(array.type) or array.null_count:
        return False

    def differ(first: int, end: int) -> bool:
        places = tied[first:end]
        values = array.take(pa.array(places if rows is None else rows[first:end]))
        equal = pc.equal(values.slice(1), values.slice(0, len(values) - 1)).to_numpy(zero_copy_only=False)
        return not bool((equal | starts[places[1:]]).all())

    return not differ(0, SAMPLED) and not differ(SAMPLED - 1, len(tied))


def _sort_within(words: Words, starts: Mask) -> Rows | None:
    """An order that sorts `words` inside each group; None when they are sorted already. Equal ones come in any order.

    A number that also holds the row's place is sorted by itself where there is room for it, which is the fastest.
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
        return np.argsort(packed, kind="stable" if has_sorted_runs(packed) else None)
    return _placed(packed, place)


def stable_order(numbers: Ints) -> Rows | None:
    """The order that sorts numbers, in which equal ones stay as they are; None where they are sorted."""
    if (numbers[1:] >= numbers[:-1]).all():
        return None
    low, place = int(numbers.min()), (len(numbers) - 1).bit_length()
    span = int(numbers.max()) - low
    if span < FEW:  # so many are counted, not compared
        return np.argsort((numbers - low).astype(np.uint16), kind="stable")
    if span.bit_length() + place > 63:
        return np.argsort(numbers, kind="stable")
    return _placed((numbers - low).view(np.uint64), place)


def _placed(words: Words, place: int) -> Rows:
    """The order that sorts words, in which equal ones stay as they are. `place` bits hold any of their places.

    Each word is sorted with its place below it, for which it has room. Changes them in place.
    """
    words <<= np.uint64(place)
    words |= np.arange(len(words), dtype=np.uint64)
    sort_words(words)
    words &= np.uint64((1 << place) - 1)
    found: Rows = words.view(np.int64)
    return found


def _still_tied(starts: Mask, tied: Rows | None) -> Rows:
    """The positions whose group has more than one row."""
    inner = starts if tied is None else starts[tied]
    alone = inner.copy()
    alone[:-1] &= inner[1:]
    positions = np.flatnonzero(~alone)
    return positions if tied is None else tied[positions]


def _sums(diffs: Ints, firsts: Rows) -> Ints:
    """The sum of each group's diffs. Raises InvalidUsage when one leaves int64."""
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
