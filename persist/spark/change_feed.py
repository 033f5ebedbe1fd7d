"""The change feed between two times as splits, and pre- and post-images of updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil
from os import cpu_count

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from persist.client.contents_diff import changes_at, load_full_view, retractions, runs_in_interval, runs_of
from persist.client.row_reader import expand_rows, first_negative
from persist.client.snapshot import ReadLease, ReadSettings, check_held, leased_blobs, part_reader, with_renewal
from persist.client.timestamps import TIMESTAMP, load_clock_stretches
from persist.client.transport import OneShard, Transport
from persist.core.batch import HollowBatch, Part, Run
from persist.core.errors import InvalidUsage
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.ids import ReaderId, SeqNo, ShardId
from persist.core.shard_view import ShardView
from persist.core.state import SchemaRecord
from persist.core.truncations_and_drops import Drops, RowDrop, contents, drops_within, taken_away
from persist.parts import ALL_KEYS, DIFF, TIME, KeyRange, PartReader, ShardSchema, current_schema, overlapping_runs
from persist.parts.filter_eval import Filter
from persist.parts.key_encoding import key_groups, key_schema
from persist.parts.key_splits import plan_within
from persist.spark import executors
from persist.spark.executors import check_same_columns, hold_again, recover_lease, unreadable_as_expired
from persist.spark.options import ReadOptions, Target
from persist.spark.spark_schemas import Renamed, arrow_schema, batches, spark_schema, with_original_names

# Pre- and post-images of updates.
#
# A key was updated if, at one time, one row of it was removed and one was inserted, with equal multiplicities. All
# other changes of a key (of several rows, or of unequal multiplicities) are deletions and insertions. Changes at
# different times are never paired.

INSERT, DELETE, PREIMAGE, POSTIMAGE = "insert", "delete", "update_preimage", "update_postimage"
HELD_ROWS_MAX = 1_000_000  # changes of one key in one read
Flags = npt.NDArray[np.bool_]


def change_types(diffs: npt.NDArray[np.int64], updates: Flags | None = None) -> pa.Array:
    """The `_change_type` of each change, by its multiplicity and whether it is half of an update."""
    if updates is None:
        updates = np.zeros(len(diffs), np.bool_)
    numbers = (diffs > 0).astype(np.int8) + 2 * updates.astype(np.int8)
    names = pa.array([DELETE, INSERT, PREIMAGE, POSTIMAGE])
    return pa.DictionaryArray.from_arrays(pa.array(numbers), names).cast(pa.string())


def mark_updates(rows: pa.Table, schema: ShardSchema) -> Flags:
    """Whether each change is half of an update. `rows` must have all changes of a key at a time."""
    if not len(rows):
        return np.zeros(0, np.bool_)
    keys, times = key_groups(rows, key_schema(schema)), rows.column(TIME).to_numpy()
    diffs = rows.column(DIFF).to_numpy()
    order = np.lexsort((diffs, times, keys))
    keys, times, diffs = keys[order], times[order], diffs[order]
    begins = np.ones(len(rows), np.bool_)
    begins[1:] = (keys[1:] != keys[:-1]) | (times[1:] != times[:-1])
    starts = np.flatnonzero(begins)
    pairs = starts[np.diff(np.append(starts, len(rows))) == 2]
    pairs = pairs[(diffs[pairs] < 0) & (diffs[pairs] == -diffs[pairs + 1])]
    is_update = np.zeros(len(rows), np.bool_)
    is_update[order[pairs]] = is_update[order[pairs + 1]] = True
    return is_update


def by_whole_keys(tables: Iterator[pa.Table], schema: ShardSchema, shard: str) -> Iterator[pa.Table]:
    """The rows of `tables`, whose keys ascend, regrouped so that all changes of a key are in one table.

    Buffers the changes of one key. Raises InvalidUsage if a key has more than HELD_ROWS_MAX changes.
    """
    keyed = key_schema(schema)
    held: list[pa.Table] = []
    for table in tables:
        if not len(table):
            continue
        whole = pa.concat_tables([*held, table])
        keys = key_groups(whole, keyed)
        is_last = keys == keys.max()
        if not is_last.all():
            yield whole.filter(pa.array(~is_last))
        held = [whole.filter(pa.array(is_last))]
        if len(held[0]) > HELD_ROWS_MAX:
            key = held[0].select(list(keyed.key)).slice(0, 1).to_pylist()[0]
            raise InvalidUsage(
                f"shard {shard!r}: key {key!r} has more than {HELD_ROWS_MAX} changes in one read, the limit of "
                "changeImages; read fewer times at once, or leave changeImages out"
            )
    yield from held


# The updates of an interval of times, as splits that any executor can read.

CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP = "_change_type", "_commit_version", "_commit_timestamp"
CHANGE_COLUMNS = (CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP)
CHANGE_FIELD_NAMES = (*CHANGE_COLUMNS, TIME, DIFF)
CHANGE_FIELDS = tuple(map(pa.field, CHANGE_FIELD_NAMES, (pa.string(), pa.int64(), TIMESTAMP, pa.int64(), pa.int64())))
SPLIT_BYTES = 32 * 1024 * 1024  # encoded bytes of a partition, if the number of partitions is not given
SMALL_BYTES = 1024 * 1024  # a read of fewer encoded bytes is one partition
_MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1}


@dataclass(frozen=True)
class Interval:
    """The times `[lower, upper)` of the keys in the range `keys`.

    With `snapshot`, the contents as of `lower` come first, as changes at `lower`.
    """

    lower: int
    upper: Antichain
    snapshot: bool
    keys: KeyRange = ALL_KEYS

    @property
    def held(self) -> Antichain:
        """The latest since at which the interval is still distinguishable from earlier times."""
        return Antichain(self.lower if self.snapshot else max(self.lower - 1, 0))

    def drops(self, view: ShardView) -> Drops:
        first = self.lower + 1 if self.snapshot else self.lower
        return drops_within(view.drops, first, self.upper.element)


@dataclass(frozen=True)
class FeedSplit:
    """One key range of an interval, with all that an executor needs to read it."""

    shard: str
    interval: Interval
    key_range: KeyRange
    parts: tuple[Part, ...]
    schemas: Mapping[int, SchemaRecord]
    reader: ReaderId
    seqno: SeqNo
    settings: ReadSettings
    columns: tuple[str, ...]
    shard_id: ShardId
    renamed: Renamed = ()  # the columns of a stream, and their current names
    dropped: tuple[tuple[RowDrop, tuple[Run, ...]], ...] = ()  # drops of the interval, and the runs that each removed

    def read(self, transport: Transport, wanted: Filter | None = None) -> Iterator[pa.Table]:
        """The consolidated updates: the columns, `__time` and `__diff`.

        Raises Expired (the lease has expired), UnknownShard (the shard was dropped), Corruption.
        """
        reader, lease = self._open(transport, wanted)
        removed = (
            table
            for drop, runs in self.dropped
            for table in retractions(reader, runs, drop, self.key_range, self.columns)
        )
        for table in with_renewal(chain(self._read_written(reader, self.interval), removed), lease):
            yield table if wanted is None else wanted.apply(table)

    def read_in_turn(self, transport: Transport, wanted: Filter | None = None) -> Iterator[Iterator[pa.Table]]:
        """The same, in stretches of consecutive times. Keys ascend from table to table within a stretch.

        Rows that a drop removed and equal rows that were inserted at its time cancel out. Raises as `read`.
        """
        reader, lease = self._open(transport, wanted)
        written = [Run((part,)) for part in self.parts]
        rest = self.interval
        stretches: list[Iterator[pa.Table]] = []
        for drop, runs in self.dropped:
            if rest.snapshot or rest.lower < drop.at:
                stretches.append(self._read_written(reader, replace(rest, upper=Antichain(drop.at))))
            inserted = runs_in_interval(written, drop.at - 1, drop.at)
            stretches.append(changes_at(reader, runs, inserted, drop, self.key_range, self.columns))
            rest = Interval(drop.at + 1, rest.upper, False, rest.keys)
        if Antichain(rest.lower) < rest.upper:
            stretches.append(self._read_written(reader, rest))
        for stretch in stretches:
            yield (table if wanted is None else wanted.apply(table) for table in with_renewal(stretch, lease))

    def _open(self, transport: Transport, wanted: Filter | None) -> tuple[PartReader, ReadLease]:
        """The reader of the parts, and the lease on them. Raises Expired."""
        transport = OneShard(transport, self.shard_id)
        lease = ReadLease(transport, self.shard, self.reader, self.settings, self.seqno)
        lease.check()
        return part_reader(transport, self, self.settings, None if wanted is None else wanted.may_match)[1], lease

    def _read_written(self, reader: PartReader, interval: Interval) -> Iterator[pa.Table]:
        return reader.read_updates(
            self.parts,
            Antichain(0 if interval.snapshot else interval.lower),
            interval.upper,
            since=interval.lower if interval.snapshot else None,
            key_range=self.key_range,
            columns=self.columns,
        )


def overlapping_batches(batches: Iterable[HollowBatch], interval: Interval) -> list[HollowBatch]:
    lower = Antichain(0 if interval.snapshot else interval.lower)
    return [b for b in batches if lower < b.desc.upper and b.desc.lower < interval.upper and b.runs]


def partitions_for(size: int) -> int:
    """The number of partitions for `size` encoded bytes: one per core of this machine, or one per `SPLIT_BYTES`."""
    return 1 if size < SMALL_BYTES else max(cpu_count() or 1, ceil(size / SPLIT_BYTES))


def plan_changes(
    target: Target, options: ReadOptions, view: ShardView, interval: Interval, lease: ReadLease, names: Iterable[str]
) -> list[FeedSplit]:
    """The splits of the interval, disjoint in key space; none if nothing was written in it."""
    transport = executors.transport(target.connection)
    settings = target.connection.handles.read
    schema, parts_reader = part_reader(transport, view, settings)
    shown = schema.columns(name for name in names if name not in CHANGE_FIELD_NAMES)
    to_read = (*shown, *(name for name in schema.key if name not in shown))  # errors name the key
    chosen = replace(options.selection, columns=to_read).on(schema)
    columns, wanted = chosen.read or (), chosen.key_range.meet(interval.keys)
    if wanted.is_empty:
        return []
    runs, dropped = select_runs(OneShard(transport, view.shard_id), parts_reader, view, interval, wanted, lease)
    all_runs = (*runs, *(run for _, removed in dropped for run in removed))
    if not all_runs:
        return []
    count = options.partitions or partitions_for(sum(part.size for run in all_runs for part in run.parts))
    with leased_blobs(lease):
        key_ranges = plan_within(all_runs, count, schema, parts_reader, wanted)
    return [
        FeedSplit(
            shard=target.shard,
            interval=interval,
            key_range=key_range,
            parts=_parts(runs, key_range),
            schemas=view.schemas,
            reader=lease.reader,
            seqno=lease.seqno,
            settings=settings,
            columns=columns,
            shard_id=view.shard_id,
            dropped=tuple((drop, overlapping_runs(removed, key_range)) for drop, removed in dropped),
        )
        for key_range in key_ranges
    ]


def renew_feed_split(target: Target, split: FeedSplit) -> FeedSplit:
    """The split with current parts and a new lease. Raises Expired if its times are not readable now, UnknownShard."""
    interval, wanted = split.interval, split.key_range
    first = interval.held.element or 0
    held = hold_again(target, split.shard_id, first)
    with unreadable_as_expired(target, first):
        check_held(held.view, first)  # a hold on this time alone does not cover later ones
    check_same_columns(target, split.columns, split.schemas, held.view.schemas)
    reader = part_reader(held.transport, held.view, split.settings)[1]
    runs, dropped = select_runs(
        OneShard(held.transport, split.shard_id), reader, held.view, interval, wanted, held.lease
    )
    return replace(
        split,
        parts=_parts(runs, wanted),
        dropped=tuple(dropped),
        schemas=held.view.schemas,
        reader=held.lease.reader,
        seqno=held.lease.seqno,
    )


def select_runs(
    transport: OneShard, reader: PartReader, view: ShardView, interval: Interval, wanted: KeyRange, lease: ReadLease
) -> tuple[tuple[Run, ...], list[tuple[RowDrop, tuple[Run, ...]]]]:
    """The runs of the interval and those that each of its drops removed, limited to the key range."""
    held: tuple[Run, ...] = tuple(run for b in overlapping_batches(view.batches, interval) for run in b.runs)
    if interval.snapshot:
        held = contents(held, view.drops, interval.lower)

    def overlapping(runs: Iterable[Run]) -> tuple[Run, ...]:
        return overlapping_runs(reader.expanded(runs, wanted), wanted)

    with leased_blobs(lease):
        return overlapping(held), [
            (drop, overlapping(removed)) for drop, removed in _removed_by_drops(transport, view, interval)
        ]


def _parts(runs: Iterable[Run], key_range: KeyRange) -> tuple[Part, ...]:
    return tuple(part for run in overlapping_runs(runs, key_range) for part in run.parts)


def _removed_by_drops(
    transport: Transport, view: ShardView, interval: Interval
) -> Iterator[tuple[RowDrop, tuple[Run, ...]]]:
    """The drops of the interval and the runs that each removed, which may be from before the interval.

    Raises Expired if the hold on the interval has expired.
    """
    drops = interval.drops(view)
    if not drops:
        return
    whole = load_full_view(transport, view.name, view)
    for drop in drops:
        check_held(whole, drop.at - 1)
        yield drop, taken_away(runs_of(whole), whole.drops, drop)


def changes_schema(view: ShardView, options: ReadOptions) -> StructType:
    """The schema of a change feed without a user-specified schema."""
    schema = current_schema(view.schemas)[1]
    names = schema.columns(options.columns)
    for name in set(names).intersection(CHANGE_COLUMNS):
        raise InvalidUsage(
            f"shard {view.name!r} has a column {name!r}, which is also a column of the change feed; exclude it with "
            "option 'columns', or read the changes between two times with readDiff"
        )
    return spark_schema([*(schema.arrow.field(name) for name in names), *CHANGE_FIELDS])


def check_change_columns(schema: StructType, options: ReadOptions) -> None:
    """Raise InvalidUsage if the schema of a change feed has rows but no column that distinguishes deletions.

    With `changeImages` the schema must have `_change_type`.
    """
    if options.images and CHANGE_TYPE not in schema.names:
        raise InvalidUsage(
            f"the schema given to readChangeFeed lacks {CHANGE_TYPE}, the column in which changeImages marks updates; "
            "add it to the schema, or leave changeImages out"
        )
    if not options.changes or {CHANGE_TYPE, DIFF} & set(schema.names) or set(schema.names) <= set(CHANGE_FIELD_NAMES):
        return
    raise InvalidUsage(
        f"the schema given to readChangeFeed has neither {CHANGE_TYPE} nor {DIFF}, which distinguish removed rows from "
        "added rows; add one of them to the schema"
    )


def read_changes(
    target: Target, options: ReadOptions, schema: StructType, split: FeedSplit
) -> Iterator[pa.RecordBatch]:
    """The rows of a split for Spark: changes, or, without a change feed, the inserted rows."""
    wanted = options.selection.on(current_schema(split.schemas)[1]).filter
    transport = executors.transport(target.connection)

    def read(feed: FeedSplit) -> Iterator[pa.Table]:
        return _with_images(feed, transport, wanted) if options.images else feed.read(transport, wanted)

    tables = recover_lease(read(split), lambda: read(renew_feed_split(target, split)))
    rows: Iterator[pa.Table]
    if options.changes:
        is_dated = options.time_unit is None and COMMIT_TIMESTAMP in schema.names
        rows = _with_change_columns(tables, options.time_unit, split, transport if is_dated else None)
    else:
        rows = _insertions(tables, split, options)
    target_schema = arrow_schema(schema)
    return batches(with_original_names(rows, split.renamed, target_schema), target_schema, options.batch_rows)


def _with_images(split: FeedSplit, transport: Transport, wanted: Filter | None) -> Iterator[pa.Table]:
    """The rows of a split with their `_change_type`, which distinguishes updates."""
    schema = current_schema(split.schemas)[1]
    for tables in split.read_in_turn(transport, wanted):
        for table in by_whole_keys(tables, schema, split.shard):
            types = change_types(table.column(DIFF).to_numpy(), mark_updates(table, schema))
            yield table.append_column(CHANGE_FIELDS[0], types)


def _with_change_columns(
    tables: Iterator[pa.Table], time_unit: str | None, split: FeedSplit, transport: Transport | None
) -> Iterator[pa.Table]:
    """The updates with Spark's columns of changes beside `__time` and `__diff`.

    `_change_type` is derived from `__diff` unless the table has it already. `_commit_timestamp` is the time in
    `time_unit`, else the wall clock that `transport` knows for it; null without both.
    """
    dates = None
    for table in tables:
        if CHANGE_TYPE not in table.column_names:
            table = table.append_column(CHANGE_FIELDS[0], change_types(table.column(DIFF).to_numpy()))
        times = table.column(TIME)
        timestamps = pa.nulls(len(table), TIMESTAMP)
        if time_unit is not None:
            try:
                timestamps = pc.multiply_checked(times, _MICROSECONDS[time_unit]).cast(TIMESTAMP)
            except pa.ArrowInvalid as error:
                raise InvalidUsage(f"option 'timeUnit' is {time_unit!r}: a time in it is no instant") from error
        elif transport is not None:
            if dates is None:
                end = split.interval.upper.element
                last, retry_s = TIME_MAX if end is None else end - 1, split.settings.retry_s
                own = OneShard(transport, split.shard_id)  # after the lease was checked, which keeps the clocks known
                dates = load_clock_stretches(own, split.shard, split.interval.lower, last, retry_s)
            timestamps = dates.of(times)
        yield table.append_column(CHANGE_FIELDS[1], times).append_column(CHANGE_FIELDS[2], timestamps)


def _insertions(tables: Iterator[pa.Table], split: FeedSplit, options: ReadOptions) -> Iterator[pa.Table]:
    for table in tables:
        row = first_negative(table)
        if row is not None:
            retraction = table.slice(row, 1).to_pylist()[0]
            raise InvalidUsage(
                f"shard {split.shard!r} retracts a row at time {retraction[TIME]}: {retraction!r:.300}; a stream of "
                "rows cannot show it, so read changes: option('readChangeFeed', 'true')"
            )
        yield from expand_rows(table, options.batch_rows)
