"""Keys that are to be unique: which keys have more than one row at some time.

A row is there as often as its diffs say, and what is there less than no times is no row. So a key is crowded where its
rows, each as often as it is there, are more than one.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist.core.drops import Drops, RowDrop
from persist.parts.columns import Mask, one_chunk
from persist.parts.consolidate import Ints, consolidate, join, twins
from persist.parts.keyed import distinct_keys, key_schema
from persist.parts.schema import DIFF, TIME, ShardSchema

KEYS_SHOWN_MAX = 10  # of those that a constraint refuses, or that an examination finds
KEY_ROWS_MAX = 1 << 20  # updates of one key that are held; one with more is not looked at as a whole


def crowded(rows: pa.Table, schema: ShardSchema) -> pa.Table:
    """The keys that have more than one row at some time: the key columns, in order, each key once.

    `rows` are updates in `updates_schema`, in any order: all that there are of their keys.
    """
    return _crowded(consolidate([rows], schema), schema, key_schema(schema))


def _crowded(rows: pa.Table, schema: ShardSchema, keyed: ShardSchema) -> pa.Table:
    """As `crowded`, of consolidated rows."""
    firsts, diffs = ~twins(rows, keyed), _ints(rows, DIFF)
    keys = np.cumsum(firsts) - 1
    sizes = np.bincount(keys) if len(keys) else keys
    may_be = sizes[keys] > 1  # hardly any key has two updates: only those are looked at closely
    may_be |= diffs > 1
    few = rows.filter(pa.array(may_be))
    if not len(few):
        return few.select(list(schema.key))
    starts = ~twins(few, keyed)
    is_crowded = _most(few, starts, ~twins(few, schema)) > 1
    return few.filter(pa.array(starts)).filter(pa.array(is_crowded)).select(list(schema.key))


def _crowded_by_then(rows: pa.Table, schema: ShardSchema, keyed: ShardSchema, drops: Drops) -> pa.Table:
    """As `_crowded`, of rows that count until a drop has taken them away."""
    times, found = _ints(rows, TIME), []
    lives = zip((RowDrop(0, 0), *drops), (*(drop.at for drop in drops), None), strict=True)
    for drop, end in lives:
        is_there = times >= drop.cut if end is None else (times >= drop.cut) & (times < end)
        if is_there.any():
            found.append(_crowded(rows.filter(pa.array(is_there)), schema, keyed))
    return distinct_keys(join(found), keyed).select(list(schema.key))


def _most(rows: pa.Table, keys: Mask, lines: Mask) -> Ints:
    """How many rows each key has at most, at one time.

    `keys` and `lines` tell which of the consolidated updates are the first ones of their key, and of their row.
    """
    diffs, times = _ints(rows, DIFF), _ints(rows, TIME)
    there = np.maximum(_running(diffs, lines), 0)
    before = np.where(lines, 0, np.roll(there, 1))
    gains = there - before
    numbers = np.cumsum(keys)
    if times.min() < times.max():
        order = np.lexsort((times, numbers))
        gains, times = gains[order], times[order]
    counts = _running(gains, keys)
    ends = np.ones(len(counts), np.bool_)  # what happens at one time happens at once
    ends[:-1] = keys[1:] | (times[1:] != times[:-1])
    most: Ints = np.maximum.reduceat(np.where(ends, counts, 0), np.flatnonzero(keys))
    return most


def _running(numbers: Ints, firsts: Mask) -> Ints:
    """Their sums up to each of them, from the first of its group on."""
    sums: Ints = np.cumsum(numbers)
    starts = np.flatnonzero(firsts)
    begun: Ints = sums[starts] - numbers[starts]
    found: Ints = sums - begun[np.cumsum(firsts) - 1]
    return found


def _ints(rows: pa.Table, name: str) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = one_chunk(rows.column(name)).to_numpy()
    return found


class Crowds:
    """Counts the keys with more than one row at some time, of updates that come in the order of their keys.

    It holds one table and the updates of one key. Where these are more than `KEY_ROWS_MAX` only what came first of
    them is looked at.
    """

    def __init__(self, schema: ShardSchema, drops: Drops = ()) -> None:
        """`drops` of the shard, which have taken rows away without an update that says so."""
        self._schema = schema
        self._drops = drops
        self._held: list[pa.Table] = []  # of the last key that was seen
        self._is_told = False  # that key needs no more looks
        self.count = 0
        self.keys: list[tuple[Any, ...]] = []  # the first of them, in order

    @cached_property
    def _keyed(self) -> ShardSchema:
        return key_schema(self._schema)

    def add(self, rows: pa.Table) -> None:
        """The next consolidated rows, in `updates_schema`."""
        if not len(rows):
            return
        firsts = ~twins(join([*self._held[-1:], rows]), self._keyed)
        if self._held:
            firsts = firsts[len(self._held[-1]) :]
        starts = np.flatnonzero(firsts)
        if not len(starts):  # all of them are of the key that was seen last
            self._hold(rows)
            return
        self._tell(rows.slice(0, int(starts[0])))
        self._count(rows.slice(int(starts[0]), int(starts[-1] - starts[0])))
        self._held, self._is_told = [], False
        self._hold(rows.slice(int(starts[-1])))

    def finish(self) -> Crowds:
        """No more rows come. Returns itself."""
        self._tell(None)
        self._held = []
        return self

    def _hold(self, rows: pa.Table) -> None:
        if not self._is_told:
            self._held.append(rows)
        if not self._is_told and sum(map(len, self._held)) > KEY_ROWS_MAX:
            self._tell(None)
            self._held, self._is_told = [rows.slice(len(rows) - 1)], True

    def _tell(self, rest: pa.Table | None) -> None:
        """The last key is complete, with the `rest` of its rows."""
        pieces = [*self._held, *([rest] if rest is not None and len(rest) else ())]
        if pieces and not self._is_told:
            self._count(consolidate(pieces, self._schema))

    def _count(self, rows: pa.Table) -> None:
        if not len(rows):
            return
        found = _crowded(rows, self._schema, self._keyed)
        if self._drops and len(found):  # perhaps by rows that were there one after the other
            found = _crowded_by_then(rows, self._schema, self._keyed, self._drops)
        self.count += len(found)
        self.keys += keys_shown(found.slice(0, KEYS_SHOWN_MAX - len(self.keys)))


def keys_shown(keys: pa.Table) -> list[tuple[Any, ...]]:
    """The keys as tuples of Python values."""
    columns = [column.to_pylist() for column in keys.columns]
    return list(zip(*columns, strict=True))
