"""Rows as callers give them, as one table: for those who may have to send them again."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from persist.client.columns import ShardSchema, known_by, learnt
from persist.client.pinned import Pinned
from persist.client.shard import Shard
from persist.client.write import Updates, as_updates, gathered, reusable
from persist.core.errors import InvalidUsage

TIME = "__time"


def one_table(updates: Updates, shard: Shard, who: str) -> Pinned:
    """The rows with the columns of the shard, as the handle knows them, and `__diff`, without times.

    Where they do not fit, and the shard has other columns by now, the handle learns of them. Raises InvalidUsage (an
    iterator, rows with `__time`, rows that do not fit, a name that means another column by now).
    """
    rows, (number, known) = held(updates), known_by(shard)
    try:
        return Pinned(table_by(known, rows, who), number, known)
    except InvalidUsage:
        found = learnt(shard, number, known)
        if found is None:
            raise
        return Pinned(table_by(found[1], rows, who), *found)


def held(updates: Updates) -> Updates:
    """Rows that can be looked at twice: a stream of Arrow is read into memory, which can be done once."""
    is_arrow = hasattr(updates, "__arrow_c_stream__") or hasattr(updates, "__arrow_c_array__")
    return reusable(updates) if is_arrow else gathered(updates)


def table_by(schema: ShardSchema, updates: Updates, who: str) -> pa.Table:
    """The rows with the columns of a schema and `__diff`, without times. Raises as `one_table`."""
    found: Any = as_updates(updates, schema)
    if not isinstance(found, (pa.Table, pa.RecordBatch)):
        raise InvalidUsage(f"{who} takes the rows of a write as one table, not as an iterator")
    if TIME in found.schema.names:
        raise InvalidUsage(f"{who} takes no {TIME}: the time is chosen for it")
    return schema.conform(found, 0).drop_columns([TIME])
