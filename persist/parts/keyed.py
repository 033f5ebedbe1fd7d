"""Rows by their keys: which rows have one of some keys, and which parts and row groups may have such rows.

Keys are equal as a shard sees them: null is null, NaN is NaN, and -0.0 is another key than 0.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import InvalidUsage
from persist.parts.consolidate import Ints, consolidate, join, sort_groups
from persist.parts.keycodec import KeyRange, SortedKeys
from persist.parts.schema import DIFF, ShardSchema

ABSENT = -1  # the place of a row that has none of the keys


def key_schema(schema: ShardSchema, names: Sequence[str] | None = None) -> ShardSchema:
    """The key columns alone, or others (`names`) in their place, as a schema of their own. Raises InvalidUsage."""
    chosen = schema.key if names is None else tuple(names)
    for name in chosen:
        if name not in schema.arrow.names:
            raise InvalidUsage(f"the shard has no column {name!r}; its columns are {', '.join(schema.arrow.names)}")
    return ShardSchema(pa.schema([schema.arrow.field(name) for name in chosen]), chosen)


def keys_of(rows: pa.Table, keyed: ShardSchema) -> pa.Table:
    """The keys of the rows, each with `__diff` 1, in the order of the rows. Raises InvalidUsage."""
    return keyed.conform(rows.select(list(keyed.key)), 0)


def distinct_keys(rows: pa.Table, keyed: ShardSchema) -> pa.Table:
    """The keys of the rows in order, each once; `__diff` tells how many rows have it."""
    return consolidate([keys_of(rows, keyed)], keyed)


def single_keys(rows: pa.Table, keyed: ShardSchema, what: str) -> pa.Table:
    """The keys of the rows in order. Raises InvalidUsage where one comes twice; `what` takes one row a key."""
    found = distinct_keys(rows, keyed)
    check_single(found, keyed, what)
    return found


def check_single(keys: pa.Table, keyed: ShardSchema, what: str) -> None:
    """Raise InvalidUsage where one of the sorted keys is there more than once."""
    twice = pc.index(pc.greater(keys.column(DIFF), 1), True).as_py()
    if twice >= 0:
        key = keys.select(list(keyed.key)).slice(twice, 1).to_pylist()[0]
        raise InvalidUsage(f"key {key!r} comes more than once; {what} takes one row a key: drop the duplicates first")


def places(rows: pa.Table, keys: pa.Table, keyed: ShardSchema) -> Ints:
    """For each row the row of `keys` that has its key, or `ABSENT`. Of equal `keys` it is the last one."""
    if not len(rows) or not len(keys):
        return np.full(len(rows), ABSENT, np.int64)
    groups = _groups([keys_of(rows, keyed), keys_of(keys, keyed)], keyed)
    found = np.full(int(groups.max()) + 1, ABSENT, np.int64)
    found[groups[len(rows) :]] = np.arange(len(keys), dtype=np.int64)
    return found[groups[: len(rows)]]


def semi_join(rows: pa.Table, keys: pa.Table, keyed: ShardSchema) -> pa.Table:
    """The rows whose key is among `keys`."""
    return rows.filter(pa.array(places(rows, keys, keyed) != ABSENT))


def firsts(rows: pa.Table, keyed: ShardSchema) -> npt.NDArray[np.bool_]:
    """Which rows are the first ones of their key."""
    found = np.zeros(len(rows), np.bool_)
    if len(rows):
        _, index = np.unique(groups_of(rows, keyed), return_index=True)
        found[index] = True
    return found


def groups_of(rows: pa.Table, keyed: ShardSchema) -> Ints:
    """A number for each row, from 0 on, the same for equal keys."""
    return _groups([keys_of(rows, keyed)], keyed) if len(rows) else np.zeros(0, np.int64)


def _groups(tables: Sequence[pa.Table], keyed: ShardSchema) -> Ints:
    """A number for each row of the tables, the same for equal keys."""
    order, starts = sort_groups(join(tables), keyed)
    groups: Ints = np.cumsum(starts, dtype=np.int64) - 1
    if order is None:
        return groups
    found = np.empty(len(groups), np.int64)
    found[order] = groups
    return found


@dataclass(frozen=True, slots=True)
class KeyPoints(KeyRange):
    """The key range from the first of some sorted keys to the last, of which only these keys are wanted.

    What cannot have one of them is not read: parts, and row groups. What is read may have rows of other keys too, and
    not all of the updates of these.
    """

    keys: SortedKeys | None = None

    @classmethod
    def of(cls, keys: pa.Table, keyed: ShardSchema) -> KeyPoints:
        """Of sorted keys, at least one."""
        ordered = SortedKeys(keys, keyed.key)
        return cls(ordered[0], ordered.last + b"\x00", ordered)

    def overlaps(self, lower: bytes, upper: bytes | None) -> bool:
        """Whether one of the keys may lie within the part bounds `[lower, upper]` (both inclusive)."""
        if self.keys is None or not KeyRange.overlaps(self, lower, upper):
            return False
        place = self.keys.bisect(lower)
        return place < len(self.keys) and (upper is None or self.keys[place] <= upper)
