"""Weaving few rows into many: the rows of a merge where one input is much the longest, and its rows are settled.

Only rows of it that may be equal to one of the few are compared as a whole. Which these are is told by one word of
their keys, the first in which they differ; all others stay where they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist.parts.columns import column, one_chunk
from persist.parts.consolidate import join, sort_groups, summed
from persist.parts.schema import DIFF, ShardSchema

Ints: TypeAlias = npt.NDArray[np.int64]

FEW = 4  # rows are few where the others are so many times as many


def woven(many: pa.Table, few: pa.Table, schema: ShardSchema, names: Sequence[str]) -> pa.Table | None:
    """The columns `names` (`__diff` among them) of the rows of both tables, consolidated and in order.

    Each of them is consolidated and in order by itself, and has rows. None where most rows would have to be compared.
    Raises InvalidUsage when a sum of diffs leaves int64.
    """
    count = len(many)
    both = join([many, few])
    found = _places(both, count, schema)
    if found is None:
        return None
    first, end = found
    starts, lengths = _ranges(first, end)
    if 2 * lengths.sum() > count:
        return None
    alike = _counted(starts, lengths)  # the rows of the many that share the word with one of the few
    sources = np.concatenate([alike, np.arange(count, len(both))])
    mixed = both.take(pa.array(sources))
    diffs: Ints = one_chunk(both.column(DIFF)).to_numpy()
    rows, sums = summed(*sort_groups(mixed, schema), diffs[sources])
    places = np.concatenate([np.repeat(starts, lengths), first])[rows]
    index, where = _inserted(count, alike, places, sources[rows])
    diffs = diffs[index]
    diffs[where] = sums
    taken = pa.array(index)
    columns = [
        pa.array(diffs) if name == DIFF else pc.take(one_chunk(both.column(name)), taken, boundscheck=False)
        for name in names
    ]
    return pa.Table.from_arrays(columns, schema=both.select(list(names)).schema)


def _places(both: pa.Table, count: int, schema: ShardSchema) -> tuple[Ints, Ints] | None:
    """For each of the few, the first row and the end of the many that share the word with it; None where all do.

    `both` are `count` rows, the many, and then the few.
    """
    few = len(both) - count
    first, end = np.zeros(few, np.int64), np.full(few, count, np.int64)
    probes = np.concatenate([[0, count - 1], np.arange(count, len(both))])
    for name in schema.key:
        order = column(one_chunk(both.column(name)))
        level = 0
        while (words := order.word(level, probes)) is not None:
            is_open = end > first
            least, greatest, sought = words[0], words[1], words[2:]
            if least != greatest:
                every = order.word(level, None)
                assert every is not None
                base, sought = every[:count], every[count:]
                below = np.searchsorted(base, sought, "left")
                is_there = base[np.minimum(below, count - 1)] == sought
                upto = below.copy()
                upto[is_there] = np.searchsorted(base, sought[is_there], "right")
                first = np.where(is_open, below, first)
                return first, np.maximum(np.where(is_open, upto, end), first)
            end[is_open & (sought < least)] = 0
            first[is_open & (sought > least)] = count
            level += 1
    return None


def _ranges(first: Ints, end: Ints) -> tuple[Ints, Ints]:
    """The beginnings and the lengths of the ranges, each of them once, without empty ones."""
    is_any = end > first  # two that begin together, and are not empty, are the same
    starts, where = np.unique(first[is_any], return_index=True)
    return starts, (end - first)[is_any][where]


def _counted(starts: Ints, counts: Ints) -> Ints:
    """All numbers of the ranges, in order."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(counts.sum())


def _inserted(count: int, left_out: Ints, places: Ints, others: Ints) -> tuple[Ints, Ints]:
    """The numbers below `count` without those left out, in order, and the others between them, before their places.

    Also where the others are then.
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
