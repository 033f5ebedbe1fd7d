"""Changes of which those that are updates are told as such: the row before, and the row after.

A key that at one time lost one row and got one row, each as often as the other, was updated. What a key lost and got
otherwise (several rows, or one row more often than the other) are deletions and insertions, and changes at two times
never belong together.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist.core.errors import InvalidUsage
from persist.parts import DIFF, TIME, ShardSchema
from persist.parts.keyed import groups_of, key_schema

INSERT, DELETE, PREIMAGE, POSTIMAGE = "insert", "delete", "update_preimage", "update_postimage"
HELD_ROWS_MAX = 1_000_000  # changes of one key that one read takes
Flags = npt.NDArray[np.bool_]


def kinds(diffs: npt.NDArray[np.int64], updates: Flags | None = None) -> pa.Array:
    """What each change is, by its multiplicity, and whether it is half of an update."""
    came = diffs > 0
    if updates is None:
        updates = np.zeros(len(diffs), np.bool_)
    numbers = came.astype(np.int8) + 2 * updates.astype(np.int8)
    names = pa.array([DELETE, INSERT, PREIMAGE, POSTIMAGE])
    return pa.DictionaryArray.from_arrays(pa.array(numbers), names).cast(pa.string())


def updates(rows: pa.Table, schema: ShardSchema) -> Flags:
    """Which of the changes are halves of updates. All changes of a key at a time are among the rows."""
    if not len(rows):
        return np.zeros(0, np.bool_)
    keys, times = groups_of(rows, key_schema(schema)), rows.column(TIME).to_numpy()
    diffs = rows.column(DIFF).to_numpy()
    order = np.lexsort((diffs, times, keys))
    keys, times, diffs = keys[order], times[order], diffs[order]
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = (keys[1:] != keys[:-1]) | (times[1:] != times[:-1])
    starts = np.flatnonzero(begins)
    pairs = starts[np.diff(np.append(starts, len(rows))) == 2]
    pairs = pairs[(diffs[pairs] < 0) & (diffs[pairs] == -diffs[pairs + 1])]
    found = np.zeros(len(rows), np.bool_)
    found[order[pairs]] = found[order[pairs + 1]] = True
    return found


def by_whole_keys(tables: Iterator[pa.Table], schema: ShardSchema, shard: str) -> Iterator[pa.Table]:
    """The same rows, table by table, so that all changes of a key are in one table. Keys ascend from table to table.

    What is held back are the changes of one key. Raises InvalidUsage where these are more than HELD_ROWS_MAX.
    """
    keyed = key_schema(schema)
    held: list[pa.Table] = []
    for table in tables:
        if not len(table):
            continue
        whole = pa.concat_tables([*held, table])
        keys = groups_of(whole, keyed)
        is_last = keys == keys.max()
        if not is_last.all():
            yield whole.filter(pa.array(~is_last))
        held = [whole.filter(pa.array(is_last))]
        if len(held[0]) > HELD_ROWS_MAX:
            key = held[0].select(list(keyed.key)).slice(0, 1).to_pylist()[0]
            raise InvalidUsage(
                f"shard {shard!r}: key {key!r} has more than {HELD_ROWS_MAX} changes in one read, too many to tell "
                "updates by; read fewer times at once, or leave changeImages out"
            )
    yield from held
