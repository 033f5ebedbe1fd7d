"""What one Python process of Spark keeps open: transports to shards, opened where they are used, never pickled."""

from __future__ import annotations

import gc
import os
import sys
import weakref
from dataclasses import replace
from functools import lru_cache

import pyarrow as pa
from pyspark import TaskContext

from blob import without_secrets
from persist.client.connect import Connection
from persist.client.embedded import EmbeddedTransport
from persist.client.transport import OneShard, Transport
from persist.client.write import WriteHandle
from persist.commit import location
from persist.core.errors import InvalidUsage, UnknownShard
from persist.core.ids import ShardId
from persist.core.phases import dropped
from persist.core.recorded import Caller
from persist.core.view import ShardView, ViewRequest
from persist.parts import ShardSchema, current_schema
from persist.spark.options import Target

TRANSPORTS_MAX = 8  # locations that one worker process keeps open
WRITERS_MAX = 64  # shards for which one worker process keeps a writer


def transport(connection: Connection) -> Transport:
    """The transport of this process for the connection. Workers are reused, so it serves many tasks."""
    return _opened(connection, os.getpid())


def check_there(target: Target) -> None:
    """Raises UnknownShard where the target names a directory that holds no shards: opening it would make it.

    So a read of a mistyped directory leaves nothing behind.
    """
    connection = target.connection
    url = connection.url or ""
    try:
        if url.partition(":")[0].lower() == "persist":
            location.check_location(url)
        elif connection.blob and connection.consensus:
            location.check_there(connection.blob)
            location.check_there(connection.consensus)
    except InvalidUsage as error:
        raise UnknownShard(
            f"there is no shard {target.shard!r}, nor any other, at {place(connection)} ({error.message}): look at the "
            "options that say where shards are. A write with option 'key' makes a new place"
        ) from error


def place(connection: Connection) -> str:
    """Where the connection leads, without secrets."""
    return " and ".join(without_secrets(one) for one in (connection.url, connection.blob, connection.consensus) if one)


@lru_cache(maxsize=TRANSPORTS_MAX)
def _opened(connection: Connection, pid: int) -> Transport:
    """By process, too: a forked child must not go on with its parent's connections."""
    _settle(pid, writes=False)
    if TaskContext.get() is not None:  # the driver has reached the servers: they are there, or start again
        connection = replace(connection, connect_s=max(connection.connect_s, connection.request_s))
    opened = connection.transport()
    if isinstance(opened, EmbeddedTransport):  # its threads go on until it is closed; what was evicted nobody closes
        weakref.finalize(opened, opened.location.close).atexit = False
    return opened


def settle_to_write() -> None:
    """As `transport` does, for a task that writes: PySpark makes an Arrow array of its result, which loads pandas."""
    _settle(os.getpid(), writes=True)


@lru_cache(maxsize=2)
def _settle(pid: int, writes: bool) -> None:
    """Keep what is loaded by now out of garbage collections, where PySpark makes one after every task.

    That is a worker that its daemon forked; looking at every module again takes some 50 ms of a core each time.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None or spec.name != "pyspark.daemon":
        return
    if writes:
        pa.array([b""])  # loads pandas if it is installed
    gc.collect()
    gc.freeze()


def kept_writer(target: Target, shard: ShardId, caller: Caller) -> WriteHandle:
    """The writer of this process for the shard, registered once for all micro-batches that it commits.

    It lapses when the process ends. For commits that something else than the writer's record makes safe to repeat.
    """
    kept = _kept_writer(target, shard, os.getpid())
    kept.caller = caller
    return kept


@lru_cache(maxsize=WRITERS_MAX)
def _kept_writer(target: Target, shard: ShardId, pid: int) -> WriteHandle:
    opened = OneShard(transport(target.connection), shard)

    def schema() -> tuple[int, ShardSchema]:
        return current_schema(view_of(target).schemas)

    return WriteHandle(opened, target.shard, schema, target.connection.handles.write)


def view_of(target: Target) -> ShardView:
    """Frontiers and schemas of the shard as of now. Raises UnknownShard (also where it was dropped)."""
    try:
        view = transport(target.connection).view(target.shard, ViewRequest(with_batches=False))
    except UnknownShard as error:
        raise UnknownShard(f"{error.message} (looked at {place(target.connection)})", **error.details) from error
    if view.is_dropped:
        raise UnknownShard(dropped(target.shard))
    return view
