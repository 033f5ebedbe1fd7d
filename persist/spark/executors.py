"""What one Python process of Spark keeps open: transports to shards, opened where they are used, never pickled."""

from __future__ import annotations

import os
from functools import lru_cache

from persist.client import Connection
from persist.errors import InvalidUsage
from persist.parts import ShardSchema
from persist.spark.options import Target
from persist.transport import ShardView, Transport, ViewRequest

TRANSPORTS_MAX = 8  # locations that one worker process keeps open


def transport(connection: Connection) -> Transport:
    """The transport of this process for the connection. Workers are reused, so it serves many tasks."""
    return _opened(connection, os.getpid())


@lru_cache(maxsize=TRANSPORTS_MAX)
def _opened(connection: Connection, pid: int) -> Transport:
    """By process, too: a forked child must not go on with its parent's connections."""
    return connection.transport()


def view_of(target: Target) -> ShardView:
    """Frontiers and schemas of the shard as of now. Raises UnknownShard."""
    return transport(target.connection).view(target.shard, ViewRequest(with_batches=False))


def current_schema(view: ShardView) -> ShardSchema:
    return ShardSchema.from_record(view.schemas[view.schema_id])


def checked_columns(schema: ShardSchema, names: tuple[str, ...] | list[str]) -> tuple[str, ...]:
    """Columns of the shard. Raises InvalidUsage naming the first that it has not, or that occurs twice."""
    for name in names:
        if name not in schema.arrow.names:
            raise InvalidUsage(f"the shard has no column {name!r}; its columns are {', '.join(schema.arrow.names)}")
    if len(set(names)) != len(names):
        raise InvalidUsage(f"a column is named twice in {list(names)}")
    return tuple(names)
