"""Rows as callers give them, as one table: for those who may have to send them again."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from persist.client.shard import Shard
from persist.client.write import Updates, as_updates
from persist.core.errors import InvalidUsage

TIME = "__time"


def one_table(updates: Updates, shard: Shard, who: str) -> pa.Table:
    """The rows with the columns of the shard and `__diff`, without times.

    Raises InvalidUsage (an iterator, rows with `__time`, rows that do not fit).
    """
    try:
        return _table(updates, shard, who)
    except InvalidUsage:
        if set(shard.schema.arrow.names) == set(shard.refresh_schema().arrow.names):
            raise
        return _table(updates, shard, who)  # the shard has other columns by now


def _table(updates: Updates, shard: Shard, who: str) -> pa.Table:
    found: Any = as_updates(updates, shard.schema)
    if isinstance(found, pa.RecordBatchReader):
        found = found.read_all()
    if not isinstance(found, (pa.Table, pa.RecordBatch)):
        raise InvalidUsage(f"{who} takes the rows of a write as one table, not as an iterator")
    if TIME in found.schema.names:
        raise InvalidUsage(f"{who} takes no {TIME}: the time is chosen for it")
    return shard.schema.conform(found, 0).drop_columns([TIME])
