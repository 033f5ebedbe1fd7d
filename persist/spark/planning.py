"""Planning a read: the key range that options ask for, a lease, and splits that can be read anywhere."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from persist.client.idempotency import send
from persist.client.small_reads import hold_shared
from persist.client.snapshot import ReadLease, SnapshotSplit, Tagged, hold_time, leased_blobs
from persist.client.timestamps import BEFORE_ALL, as_of_at, instant_ms, instant_of, resolve_time, schema_id_at
from persist.core.batch import Run
from persist.core.commands import ResolveTime, TimeResolved
from persist.core.errors import NotReadable, Unavailable, UpgradeNeeded
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.shard_view import ShardView
from persist.parts import KeyRange, Selected, ShardSchema, current_schema, plan_within, valid_schemas
from persist.parts.reader import PartReader
from persist.parts.scan_spec import schema_shown
from persist.spark import executors
from persist.spark.options import ReadOptions, Target
from persist.spark.spark_schemas import KnownSchema, check_means

SPLIT_BYTES = 32 * 1024 * 1024  # encoded bytes that one partition reads when nobody says how many there should be
SMALL_BYTES = 1024 * 1024  # a read of fewer encoded bytes is one partition


def as_of(target: Target, options: ReadOptions) -> int | Tagged | None:
    """The time or the tag that a read names. That of a wall clock is the same whenever Spark plans the read again."""
    at = options.as_of
    return as_of_at(target.shard, _resolved(target, options, at)) if isinstance(at, datetime) else at


def bounds_of_feed(target: Target, options: ReadOptions) -> tuple[int | None, int | None]:
    """The times by which a change feed begins and ends, both inclusive; those of wall clocks are always the same.

    It begins with what came at or after its start, and ends with what was there by its end.
    """
    first, last = options.starting, options.ending
    if isinstance(first, datetime):
        first = _upper_time(_resolved(target, options, first))
    if isinstance(last, datetime):
        last = _upper_time(_resolved(target, options, last)) - 1
    return first, last


def upper_at(target: Target, options: ReadOptions, when: datetime) -> Antichain:
    """The upper that the shard had by a wall clock, which is waited for."""
    return _resolved(target, options, when).upper


def upper_by(target: Target, when: datetime) -> Antichain | None:
    """The same without waiting; None: the wall clock is to come yet, and all that was written by now is before it."""
    settings = target.connection.handles.read
    at_ms = instant_ms("the wall clock", when)
    found = send(executors.transport(target.connection), target.shard, ResolveTime(at_ms), settings.retry_s)
    return found.upper if isinstance(found, TimeResolved) else None


def seconds_since(target: Target, time: int) -> float | None:
    """How long ago the shard first showed a time, by the clock of this process; None where no wall clock is known.

    It is asked once: a report is not worth waiting for.
    """
    transport = executors.transport(target.connection)
    try:
        shown = instant_of(transport, target.shard, time, retry_s=0)
    except (NotReadable, Unavailable, UpgradeNeeded):
        return None
    return None if shown is None else max(0.0, (transport.clock.now_ms() - instant_ms("it", shown)) / 1000)


def _resolved(target: Target, options: ReadOptions, when: datetime) -> TimeResolved:
    retry_s = target.connection.handles.read.retry_s
    return resolve_time(executors.transport(target.connection), target.shard, when, options.wait_s, retry_s)


def _upper_time(found: TimeResolved) -> int:
    return TIME_MAX if found.upper.element is None else found.upper.element


def shown(target: Target, options: ReadOptions) -> tuple[int, ShardSchema]:
    """The columns by which a snapshot is shown, and the id of their schema.

    Raises what a read may.
    """
    view = executors.view_of(target)
    if not options.selection.then:
        return current_schema(view.schemas)
    one, settings = executors.one_shard(target, view.shard_id), target.connection.handles.read
    is_empty = options.as_of is None and view.upper.element == 0
    at = BEFORE_ALL if is_empty else as_of(target, options)
    with hold_time(one, target.shard, at, "spark schema", options.wait_s, settings) as held:
        try:
            number = schema_id_at(held.view, held.as_of)
            return number, schema_shown(valid_schemas(held.view.schemas), number)
        finally:
            held.lease.close()


def plan_snapshot(target: Target, options: ReadOptions, columns: tuple[str, ...]) -> list[SnapshotSplit]:
    """The splits of a snapshot, held by a lease that executors renew; none where nothing was written by then.

    The lease is not closed: Spark plans once and may read the plan again and again, so it lapses when nobody reads.
    Plans of this process within a minute share one.
    """
    at, view = as_of(target, options), executors.view_of(target)
    if at is None and view.upper.element == 0:
        return []
    one, settings = executors.one_shard(target, view.shard_id), target.connection.handles.read
    with hold_shared(one, target.shard, at, "spark snapshot", options.wait_s, settings, is_plan=True) as held:
        selection = replace(options.selection, columns=columns)
        found = list(held.splits(selection, lambda size: options.partitions or partitions_for(size), is_light=True))
        if held.as_of != BEFORE_ALL:
            return found
        held.lease.close()  # it has no rows, for ever
        return []


def split_ranges(
    runs: tuple[Run, ...],
    partitions: int | None,
    schema: ShardSchema,
    reader: PartReader,
    wanted: KeyRange,
    lease: ReadLease,
) -> list[KeyRange]:
    """Disjoint key ranges that cover `wanted`, balanced by bytes; as many as asked for, or as the size suggests.

    Reads footers of the runs, which `lease` holds. Raises what `leased_blobs` says.
    """
    count = partitions or partitions_for(sum(part.size for run in runs for part in run.parts))
    with leased_blobs(lease):
        return plan_within(runs, count, schema, reader, wanted)


def partitions_for(size: int) -> int:
    """Partitions for `size` encoded bytes: one a core of this machine, more when that is too much for each."""
    if size < SMALL_BYTES:
        return 1
    return max(os.cpu_count() or 1, math.ceil(size / SPLIT_BYTES))


def check_names(
    target: Target, names: Iterable[str], known: KnownSchema | None, planned: SnapshotSplit | ShardView
) -> None:
    """Raise InvalidUsage where names of a DataFrame mean other columns where it is planned than where it was loaded."""
    if known is not None and planned.shard_id == known.shard:
        whose = f"which this DataFrame of shard {target.shard!r} has or selects by"
        remedy = "load() again; a select() after load() does not leave a column out of this"
        check_means(names, known.number, planned.schemas, whose, remedy)


def selected(schema: ShardSchema, options: ReadOptions, columns: tuple[str, ...]) -> Selected:
    """What the options select, of these columns."""
    return replace(options.selection, columns=columns).on(schema)
