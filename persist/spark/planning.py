"""Planning of reads: resolve times and selections, take a lease, and make splits that any executor can read."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from persist.client.idempotency import send
from persist.client.shared_lease_reads import hold_shared
from persist.client.snapshot import SnapshotSplit, Tagged, hold_time
from persist.client.timestamps import BEFORE_ALL, as_of_at, instant_ms, instant_of, resolve_time, schema_id_at
from persist.core.commands import ResolveTime, TimeResolved
from persist.core.errors import NotReadable, Unavailable, UpgradeNeeded
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.shard_view import ShardView
from persist.parts import ShardSchema, current_schema, valid_schemas
from persist.parts.scan_spec import schema_shown
from persist.spark import executors
from persist.spark.options import ReadOptions, Target
from persist.spark.spark_schemas import KnownSchema, check_means

SPLIT_BYTES = 32 * 1024 * 1024  # encoded bytes of a partition, if the number of partitions is not given
SMALL_BYTES = 1024 * 1024  # a read of fewer encoded bytes is one partition


def as_of(target: Target, options: ReadOptions) -> int | Tagged | None:
    """The time or the tag of a read. A wall clock resolves to the same time whenever Spark plans the read again."""
    at = options.as_of
    return as_of_at(target.shard, _resolve(target, options, at)) if isinstance(at, datetime) else at


def bounds_of_feed(target: Target, options: ReadOptions) -> tuple[int | None, int | None]:
    """The first and the last time of a change feed, both inclusive. A wall clock always resolves to the same time.

    The feed begins with changes committed at or after its start, and ends with those committed by its end.
    """
    first, last = options.starting, options.ending
    if isinstance(first, datetime):
        first = _upper_time(_resolve(target, options, first))
    if isinstance(last, datetime):
        last = _upper_time(_resolve(target, options, last)) - 1
    return first, last


def upper_at(target: Target, options: ReadOptions, when: datetime) -> Antichain:
    """The upper of the shard at a wall clock, for which it waits."""
    return _resolve(target, options, when).upper


def upper_by(target: Target, when: datetime) -> Antichain | None:
    """The upper of the shard at a wall clock; None if that is in the future. Does not wait."""
    settings = target.connection.handles.read
    at_ms = instant_ms("the wall clock", when)
    result = send(executors.transport(target.connection), target.shard, ResolveTime(at_ms), settings.retry_s)
    return result.upper if isinstance(result, TimeResolved) else None


def seconds_since(target: Target, time: int) -> float | None:
    """Seconds since the shard first showed a time, by the clock of this process; None if no wall clock is known.

    Does not retry, because it serves progress reports.
    """
    transport = executors.transport(target.connection)
    try:
        instant = instant_of(transport, target.shard, time, retry_s=0)
    except (NotReadable, Unavailable, UpgradeNeeded):
        return None
    return None if instant is None else max(0.0, (transport.clock.now_ms() - instant_ms("it", instant)) / 1000)


def _resolve(target: Target, options: ReadOptions, when: datetime) -> TimeResolved:
    retry_s = target.connection.handles.read.retry_s
    return resolve_time(executors.transport(target.connection), target.shard, when, options.wait_s, retry_s)


def _upper_time(resolution: TimeResolved) -> int:
    return TIME_MAX if resolution.upper.element is None else resolution.upper.element


def schema_of_read(target: Target, options: ReadOptions) -> tuple[int, ShardSchema]:
    """The schema by which a snapshot read shows rows, and its id. Raises what a read may."""
    view = executors.view_of(target)
    if not options.selection.then:
        return current_schema(view.schemas)
    transport, settings = executors.one_shard(target, view.shard_id), target.connection.handles.read
    is_empty = options.as_of is None and view.upper.element == 0
    at = BEFORE_ALL if is_empty else as_of(target, options)
    with hold_time(transport, target.shard, at, "spark schema", options.wait_s, settings) as held:
        try:
            schema_id = schema_id_at(held.view, held.as_of)
            return schema_id, schema_shown(valid_schemas(held.view.schemas), schema_id)
        finally:
            held.lease.close()


def plan_snapshot(target: Target, options: ReadOptions, columns: tuple[str, ...]) -> list[SnapshotSplit]:
    """The splits of a snapshot, held by a lease that executors renew; none if nothing was written by that time.

    The lease is not closed, because Spark may read a plan any number of times: it expires once no task renews it.
    Plans that this process makes within a minute share a lease.
    """
    at, view = as_of(target, options), executors.view_of(target)
    if at is None and view.upper.element == 0:
        return []
    transport, settings = executors.one_shard(target, view.shard_id), target.connection.handles.read
    with hold_shared(transport, target.shard, at, "spark snapshot", options.wait_s, settings, is_plan=True) as held:
        selection = replace(options.selection, columns=columns)
        splits = list(held.splits(selection, lambda size: options.partitions or partitions_for(size), is_light=True))
        if held.as_of != BEFORE_ALL:
            return splits
        held.lease.close()  # no time before all others ever has rows
        return []


def partitions_for(size: int) -> int:
    """The number of partitions for `size` encoded bytes: one per core of this machine, or one per `SPLIT_BYTES`."""
    if size < SMALL_BYTES:
        return 1
    return max(os.cpu_count() or 1, math.ceil(size / SPLIT_BYTES))


def check_names(
    target: Target, names: Iterable[str], known: KnownSchema | None, planned: SnapshotSplit | ShardView
) -> None:
    """Raise InvalidUsage if a column name of a DataFrame refers to another column than when it was loaded."""
    if known is not None and planned.shard_id == known.shard:
        use = f"which this DataFrame of shard {target.shard!r} has or selects by"
        remedy = "call load() again (a select() after load() does not exclude a column from this check)"
        check_means(names, known.number, planned.schemas, use, remedy)
