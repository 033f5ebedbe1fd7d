"""Transports and writers that a Python process of Spark caches, and recovery of reads whose lease has expired."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache

import pyarrow as pa
from pyspark import TaskContext

from blob import without_secrets
from persist.client.client import Connection
from persist.client.contents_diff import ChangesSplit, HeldInterval, PairSplit
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.client.snapshot import Held, SnapshotSplit, check_held, hold_time, leased_blobs, part_reader
from persist.client.timestamps import resolve_time
from persist.client.transport import OneShard, Transport
from persist.client.write import WriteHandle
from persist.commit import location
from persist.core.audit_log import Caller
from persist.core.commands import TimeResolved
from persist.core.errors import Expired, InvalidUsage, NotReadable, UnknownShard
from persist.core.ids import ShardId
from persist.core.shard_phases import dropped
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import SchemaRecord
from persist.parts import current_schema, overlapping_runs
from persist.spark.options import WAIT_S, Target
from persist.spark.spark_schemas import check_means, names_in

# Transports are opened in the process that uses them and are never pickled.

TRANSPORTS_MAX = 8  # locations whose transports a worker process caches
WRITERS_MAX = 64  # shards whose writers a worker process caches


def transport(connection: Connection) -> Transport:
    """The cached transport of this process for the connection. Spark reuses workers, so it serves many tasks."""
    return _opened(connection, os.getpid())


def one_shard(target: Target, shard: ShardId | None = None) -> OneShard:
    """The transport of this process to one incarnation of the target's name; None: the current one.

    Its calls raise UnknownShard once that shard is dropped.
    """
    return OneShard(transport(target.connection), shard or view_of(target).shard_id)


def check_location_exists(target: Target) -> None:
    """Raise UnknownShard if the target names a directory that is not a location, because opening it would create it.

    A read of a mistyped directory therefore creates nothing.
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
            f"shard {target.shard!r} does not exist, because {place(connection)} holds no shards ({error.message}): "
            "check the options of the location. A write with option 'key' creates the location"
        ) from error


def place(connection: Connection) -> str:
    """The URLs of the connection, without secrets."""
    return " and ".join(without_secrets(url) for url in (connection.url, connection.blob, connection.consensus) if url)


@lru_cache(maxsize=TRANSPORTS_MAX)
def _opened(connection: Connection, pid: int) -> Transport:
    """Keyed by process: a forked child must not use its parent's connections."""
    freeze_loaded(pid, writes=False)
    if TaskContext.get() is not None:  # the driver has reached the servers, so a failed connect is a restart
        connection = replace(connection, connect_s=max(connection.connect_s, connection.request_s))
    opened = connection.transport()
    if isinstance(opened, EmbeddedTransport):  # its threads run until it is closed, also after its eviction
        weakref.finalize(opened, opened.location.close).atexit = False
    return opened


@lru_cache(maxsize=2)
def freeze_loaded(pid: int, *, writes: bool) -> None:
    """Exclude what is loaded from garbage collections in a worker, of this process id, that PySpark's daemon forked.

    PySpark collects garbage there after every task; scanning all loaded modules takes some 50 ms of a core each time.
    It converts the result of a task that `writes` to an Arrow array, which loads pandas.
    """
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is None or spec.name != "pyspark.daemon":
        return
    if writes:
        pa.array([b""])  # loads pandas if it is installed
    gc.collect()
    gc.freeze()


def shared_writer(target: Target, shard: ShardId, caller: Caller) -> WriteHandle:
    """The cached writer of this process for the shard, registered once for all micro-batches that it commits.

    It expires after the process ends. Use it only for commits whose retries something other than the writer's record
    makes safe.
    """
    writer = _shared_writer(target, shard, os.getpid())
    writer.caller = caller
    return writer


@lru_cache(maxsize=WRITERS_MAX)
def _shared_writer(target: Target, shard: ShardId, pid: int) -> WriteHandle:
    own, settings = one_shard(target, shard), target.connection.handles.write
    return WriteHandle(own, target.shard, lambda: current_schema(view_of(target).schemas), settings)


def open_shard(target: Target, view: ShardView) -> Shard:
    """The shard of the view as a `Shard` of the Python client, by the transport of this process."""
    return Shard(transport(target.connection), target.shard, view, target.connection.handles)


def view_of(target: Target) -> ShardView:
    """The current frontiers and schemas of the shard. Raises UnknownShard if it does not exist or was dropped."""
    try:
        view = transport(target.connection).view(target.shard, ViewRequest(with_batches=False))
    except UnknownShard as error:
        raise UnknownShard(f"{error.message} (location: {place(target.connection)})", **error.details) from error
    if view.is_dropped:
        raise UnknownShard(dropped(target.shard))
    return view


def resolve_wall_clock(target: Target, when: datetime, wait_s: float) -> TimeResolved:
    """The time of the shard at a wall clock, for which it waits. It always resolves to the same time."""
    retry_s = target.connection.handles.read.retry_s
    return resolve_time(transport(target.connection), target.shard, when, wait_s, retry_s)


# Recovery of reads whose lease has expired: DataFrames, views and caches outlive the leases of their plans.
#
# A readable time shows the same rows for ever. A task that finds the lease of its split expired therefore takes a new
# lease on that time, one per process for all splits of a plan, and reads its key range from the current parts.

HOLDS_MAX = 64  # times of shards that a process holds again at once
Schemas = Mapping[int, SchemaRecord]


def recover_lease(tables: Iterator[pa.Table], read_again: Callable[[], Iterator[pa.Table]]) -> Iterator[pa.Table]:
    """The tables of a split, or those of `read_again` if the lease has expired before the first table.

    Raises Expired if the time is no longer readable, or if the lease expired between two tables; a retried task then
    reads the split.
    """
    try:
        first = next(tables, None)
    except Expired:
        tables = read_again()
        first = next(tables, None)
    if first is None:
        return
    yield first
    try:
        yield from tables
    except Expired as error:
        raise Expired(
            f"{error.message}. This task took longer than leaseSeconds between two batches of rows. Spark retries the "
            "task from its beginning; increase leaseSeconds if the retries fail too"
        ) from error


def check_same_columns(target: Target, names: Iterable[str] | None, planned: Schemas, current: Schemas) -> None:
    """Raise InvalidUsage if a column name of a plan (None: any column) refers to another column now."""
    schema_id, schema = current_schema(planned)
    use = f"which this DataFrame of shard {target.shard!r} has or selects by"
    remedy = "its lease has expired, so call load() again"
    check_means(schema.arrow.names if names is None else names, schema_id, current, use, remedy)


def renew_snapshot_split(target: Target, split: SnapshotSplit) -> SnapshotSplit:
    """The split with current parts and a new lease. Raises Expired if its time is no longer readable, UnknownShard."""
    held = hold_again(target, split.shard_id, split.as_of)
    names = None if split.columns is None else (*split.columns, *names_in(split.where))
    if split.schema_id is None:  # with schemaAsOf=then the names are fixed
        check_same_columns(target, names, split.schemas, held.view.schemas)
    with leased_blobs(held.lease):
        reader = part_reader(held.transport, held.view, split.settings)[1]
        runs = overlapping_runs(reader.expanded(held.runs, split.key_range), split.key_range)
    seqno, reader_id = held.lease.seqno, held.lease.reader
    return replace(split, runs=runs, schemas=held.view.schemas, reader=reader_id, seqno=seqno)


def renew_changes_split(target: Target, split: ChangesSplit | PairSplit) -> ChangesSplit | PairSplit:
    """As `renew_snapshot_split`, for the changes between two times, or between two shards."""
    if isinstance(split, PairSplit):
        sides = (split.earlier, split.later)
        earlier, later = (renew_snapshot_split(replace(target, shard=side.shard), side) for side in sides)
        return replace(split, earlier=earlier, later=later)
    low, high = sorted((split.start, split.as_of))
    held = hold_again(target, split.shard_id, low)
    check_same_columns(target, split.columns, split.schemas, held.view.schemas)
    if held.lease.is_point:
        with unreadable_as_expired(target, high):
            check_held(held.view, high)
    [whole] = HeldInterval(held, split.start, split.as_of).splits(1, split.columns)
    return without_other_parts(replace(whole, key_range=split.key_range))


def without_other_parts(split: ChangesSplit | PairSplit) -> ChangesSplit | PairSplit:
    """The split without the parts that have no keys of its range."""
    if isinstance(split, PairSplit):
        sides = (split.earlier, split.later)
        earlier, later = (replace(side, runs=overlapping_runs(side.runs, side.key_range)) for side in sides)
        return replace(split, earlier=earlier, later=later)
    runs, gone = (overlapping_runs(runs, split.key_range) for runs in (split.runs, split.gone))
    return replace(split, runs=runs, gone=gone)


def hold_again(target: Target, shard: ShardId | None, at: int) -> Held:
    """A cached lease of this process on a time of the shard, or on the history from that time on.

    Raises Expired if the time is no longer readable, UnknownShard if the shard was dropped.
    """
    transport = one_shard(target, shard)
    shared = _shared_hold(target, transport.shard, at, os.getpid())
    with shared.lock:
        with suppress(Expired):
            if shared.held is not None:
                shared.held.lease.check()
                return shared.held
        settings = target.connection.handles.read
        with (
            unreadable_as_expired(target, at),
            hold_time(transport, target.shard, at, "spark read again", WAIT_S, settings) as held,
        ):
            shared.held = held
        return held


@dataclass
class _SharedHold:
    """One lease for all splits of a plan that this process reads. It is opened on first use and again once expired."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    held: Held | None = None


@lru_cache(maxsize=HOLDS_MAX)
def _shared_hold(target: Target, shard: ShardId, at: int, pid: int) -> _SharedHold:
    """Keyed by process: a forked child must not use its parent's connections."""
    return _SharedHold()


@contextmanager
def unreadable_as_expired(target: Target, at: int) -> Iterator[None]:
    """Raise errors about a time that is no longer readable as Expired, with the remedy for the user of a DataFrame."""
    try:
        yield
    except (NotReadable, Expired) as error:
        raise Expired(
            f"the lease of this DataFrame of shard {target.shard!r} has expired, and time {at} is no longer readable "
            f"({error.message}): call load() again; a longer leaseSeconds, a tag or a longer history keep it readable"
        ) from error
