"""What a Python process of Spark keeps open, and recovery of reads whose lease has lapsed."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

import pyarrow as pa
from pyspark import TaskContext

from blob import without_secrets
from persist.client.connect import Connection
from persist.client.contents_diff import ChangesSplit as PastSplit
from persist.client.contents_diff import HeldInterval, PairSplit
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.client.snapshot import Held, SnapshotSplit, check_held, holding, leased_blobs, part_reader
from persist.client.transport import OneShard, Transport
from persist.client.write import WriteHandle
from persist.commit import location
from persist.core.audit_log import Caller
from persist.core.errors import Expired, InvalidUsage, NotReadable, UnknownShard
from persist.core.ids import ShardId
from persist.core.phases import dropped
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import SchemaRecord
from persist.parts import KeyRange, ShardSchema, current_schema, overlapping_runs
from persist.spark.options import WAIT_S, Target
from persist.spark.spark_schemas import check_means, names_in

# What one Python process of Spark keeps open: transports to shards, opened where they are used, never pickled.


TRANSPORTS_MAX = 8  # locations that one worker process keeps open
WRITERS_MAX = 64  # shards for which one worker process keeps a writer


def transport(connection: Connection) -> Transport:
    """The transport of this process for the connection. Workers are reused, so it serves many tasks."""
    return _opened(connection, os.getpid())


def one_shard(target: Target, shard: ShardId | None = None) -> OneShard:
    """The transport of this process to one life of the target's name; None: the one of now.

    Raises UnknownShard there, also where it was dropped.
    """
    return OneShard(transport(target.connection), shard or view_of(target).shard_id)


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
    opened = one_shard(target, shard)

    def schema() -> tuple[int, ShardSchema]:
        return current_schema(view_of(target).schemas)

    return WriteHandle(opened, target.shard, schema, target.connection.handles.write)


def open_shard(target: Target, view: ShardView) -> Shard:
    """The shard of the view as a `Shard` of the Python client, by the transport of this process."""
    return Shard(transport(target.connection), target.shard, view, target.connection.handles)


def view_of(target: Target) -> ShardView:
    """Frontiers and schemas of the shard as of now. Raises UnknownShard (also where it was dropped)."""
    try:
        view = transport(target.connection).view(target.shard, ViewRequest(with_batches=False))
    except UnknownShard as error:
        raise UnknownShard(f"{error.message} (looked at {place(target.connection)})", **error.details) from error
    if view.is_dropped:
        raise UnknownShard(dropped(target.shard))
    return view


# Reads of plans whose lease has lapsed: DataFrames, views and caches live longer than what was held for them.
#
# A time that can still be read shows the same rows for ever. So whoever finds the lease of its split gone holds the
# time anew, once a process for all splits of a plan, and reads its own range of keys from what lies there now.


HOLDS_MAX = 64  # times of shards that one process holds anew
Schemas = Mapping[int, SchemaRecord]


def outliving(pieces: Iterator[pa.Table], anew: Callable[[], Iterator[pa.Table]]) -> Iterator[pa.Table]:
    """The pieces of a split, or, where its lease is gone before the first one, those that `anew` reads.

    Raises Expired (the time was forgotten, or the lease lapsed between two pieces: a task that is tried again reads).
    """
    try:
        first = next(pieces, None)
    except Expired:
        pieces = anew()
        first = next(pieces, None)
    if first is None:
        return
    yield first
    try:
        yield from pieces
    except Expired as error:
        raise Expired(
            f"{error.message}. This task took longer than leaseSeconds between two batches of rows; Spark tries it "
            "again from the beginning where it may. Give a longer leaseSeconds if it does not come through"
        ) from error


def check_same(target: Target, names: Iterable[str] | None, planned: Schemas, now: Schemas) -> None:
    """Raise InvalidUsage where a column of a plan (None: all) is called otherwise by now: it goes by its names."""
    number, schema = current_schema(planned)
    whose = f"which this DataFrame of shard {target.shard!r} has or selects by"
    remedy = "its lease has lapsed, so load() again"
    check_means(schema.arrow.names if names is None else names, number, now, whose, remedy)


def snapshot_again(target: Target, split: SnapshotSplit) -> SnapshotSplit:
    """The split with parts and a lease as of now. Raises Expired where its time was forgotten, UnknownShard."""
    held = held_again(target, split.shard_id, split.as_of)
    names = None if split.columns is None else (*split.columns, *names_in(split.where))
    if split.schema_id is None:  # the names of then stay what they are
        check_same(target, names, split.schemas, held.view.schemas)
    with leased_blobs(held.lease):
        reader = part_reader(held.transport, held.view, split.settings)[1]
        runs = overlapping_runs(reader.expanded(held.runs, split.key_range), split.key_range)
    seqno, reader_id = held.lease.seqno, held.lease.reader
    return replace(split, runs=runs, schemas=held.view.schemas, reader=reader_id, seqno=seqno)


def past_again(target: Target, split: PastSplit | PairSplit) -> PastSplit | PairSplit:
    """The same for what changed between two times, or between two shards."""
    if isinstance(split, PairSplit):
        sides = (split.earlier, split.later)
        earlier, later = (snapshot_again(replace(target, shard=side.shard), side) for side in sides)
        return replace(split, earlier=earlier, later=later)
    low, high = sorted((split.start, split.as_of))
    held = held_again(target, split.shard_id, low)
    check_same(target, split.columns, split.schemas, held.view.schemas)
    if held.lease.is_point:
        with forgotten(target, high):
            check_held(held.view, high)
    [found] = HeldInterval(held, split.start, split.as_of).splits(1, split.columns)
    return carrying(replace(found, key_range=split.key_range), split.key_range)


def carrying(split: PastSplit, wanted: KeyRange) -> PastSplit:
    """The split with only those parts that may have keys of the range."""
    return replace(split, runs=overlapping_runs(split.runs, wanted), gone=overlapping_runs(split.gone, wanted))


def held_again(target: Target, shard: ShardId | None, at: int) -> Held:
    """A hold on a time of the shard, or on history from there on, that this process keeps.

    Raises Expired where the time was forgotten, UnknownShard where the shard was dropped.
    """
    return _kept(target, shard or view_of(target).shard_id, at, os.getpid()).held()


class _Kept:
    """One hold for all splits of a plan that this process reads; opened when it is asked for, and when it lapsed."""

    def __init__(self, target: Target, shard: ShardId, at: int) -> None:
        self._target = target
        self._shard = shard
        self._at = at
        self._lock = threading.Lock()
        self._held: Held | None = None

    def held(self) -> Held:
        with self._lock:
            if self._held is not None:
                try:
                    self._held.lease.check()
                except Expired:
                    self._held = None
            if self._held is None:
                self._held = self._opened()
            return self._held

    def _opened(self) -> Held:
        target, settings = self._target, self._target.connection.handles.read
        shard = one_shard(target, self._shard)
        with (
            forgotten(target, self._at),
            hold_time(shard, target.shard, self._at, "spark read again", WAIT_S, settings) as held,
        ):
            return held


@lru_cache(maxsize=HOLDS_MAX)
def _kept(target: Target, shard: ShardId, at: int, pid: int) -> _Kept:
    """By process: a forked child must not go on with its parent's connections."""
    return _Kept(target, shard, at)


@contextmanager
def forgotten(target: Target, at: int) -> Iterator[None]:
    """What says that a time was forgotten, as Expired, with what the user of a DataFrame can do."""
    try:
        yield
    except (NotReadable, Expired) as error:
        raise Expired(
            f"this DataFrame of shard {target.shard!r} as of {at} has outlived its lease, and the time was forgotten "
            f"meanwhile ({error.message}): load() again; a longer leaseSeconds, a tag or more history keep it readable"
        ) from error
