"""Rows as callers give them, as one table: for those who may have to send them again."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from persist.client.columns import ShardSchema
from persist.client.shard import Shard
from persist.client.write import Updates, as_updates, reusable
from persist.core.errors import InvalidUsage

TIME = "__time"


def one_table(updates: Updates, shard: Shard, who: str) -> pa.Table:
    """The rows with the columns of the shard and `__diff`, without times.

    Raises InvalidUsage (an iterator, rows with `__time`, rows that do not fit).
    """
    rows = held(updates)
    try:
        return table_by(shard.schema, rows, who)
    except InvalidUsage:
        if set(shard.schema.arrow.names) == set(shard.refresh_schema().arrow.names):
            raise
        return table_by(shard.schema, rows, who)  # the shard has other columns by now


def held(updates: Updates) -> Updates:
    """Rows that can be looked at twice: a stream of Arrow is read into memory, which can be done once."""
    return reusable(updates) if hasattr(updates, "__arrow_c_stream__") else updates


def table_by(schema: ShardSchema, updates: Updates, who: str) -> pa.Table:
    """The rows with the columns of a schema and `__diff`, without times. Raises as `one_table`."""
    found: Any = as_updates(updates, schema)
    if not isinstance(found, (pa.Table, pa.RecordBatch)):
        raise InvalidUsage(f"{who} takes the rows of a write as one table, not as an iterator")
    if TIME in found.schema.names:
        raise InvalidUsage(f"{who} takes no {TIME}: the time is chosen for it")
    return schema.conform(found, 0).drop_columns([TIME])
