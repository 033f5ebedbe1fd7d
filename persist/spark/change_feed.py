"""The change feed between two times as splits, and pre- and post-images of updates."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import StructType

from persist.client.contents_diff import changes_at, load_full_view, retractions, runs_in_interval, runs_of
from persist.client.row_reader import expand_rows, first_negative
from persist.client.snapshot import ReadLease, ReadSettings, check_held, leased_blobs, part_reader, with_renewal
from persist.client.timestamps import TIMESTAMP, ClockStretches, load_clock_stretches
from persist.client.transport import OneShard, Transport
from persist.core.batch import HollowBatch, Part, Run
from persist.core.errors import InvalidUsage
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.ids import ReaderId, SeqNo, ShardId
from persist.core.shard_view import ShardView
from persist.core.state import SchemaRecord
from persist.core.truncation import Drops, RowDrop, contents, drops_within, taken_away
from persist.parts import ALL_KEYS, DIFF, TIME, KeyRange, PartReader, ShardSchema, current_schema, overlapping_runs
from persist.parts.filter_eval import Filter
from persist.parts.key_encoding import key_groups, key_schema
from persist.spark import executors, planning
from persist.spark.executors import check_same, forgotten, held_again, outliving
from persist.spark.options import ReadOptions, Target
from persist.spark.spark_schemas import Renamed, arrow_schema, as_began, batches, spark_schema

# Changes of which those that are updates are told as such: the row before, and the row after.
#
# A key that at one time lost one row and got one row, each as often as the other, was updated. What a key lost and got
# otherwise (several rows, or one row more often than the other) are deletions and insertions, and changes at two times
# never belong together.


INSERT, DELETE, PREIMAGE, POSTIMAGE = "insert", "delete", "update_preimage", "update_postimage"
HELD_ROWS_MAX = 1_000_000  # changes of one key that one read takes
Flags = npt.NDArray[np.bool_]


def kinds(diffs: npt.NDArray[np.int64], updates: Flags | None = None) -> pa.Array:
    """What each change is, by its multiplicity, and whether it is half of an update."""
    came = diffs > 0
    if updates is None:
        updates = np.zeros(len(diffs), np.bool_)
    numbers = came.astype(np.int8) + 2 * updates.astype(np.int8)
    names = pa.array([DELETE, INSERT, PREIMAGE, POSTIMAGE])
    return pa.DictionaryArray.from_arrays(pa.array(numbers), names).cast(pa.string())


def updates(rows: pa.Table, schema: ShardSchema) -> Flags:
    """Which of the changes are halves of updates. All changes of a key at a time are among the rows."""
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
    found = np.zeros(len(rows), np.bool_)
    found[order[pairs]] = found[order[pairs + 1]] = True
    return found


def by_whole_keys(tables: Iterator[pa.Table], schema: ShardSchema, shard: str) -> Iterator[pa.Table]:
    """The same rows, table by table, so that all changes of a key are in one table. Keys ascend from table to table.

    What is held back are the changes of one key. Raises InvalidUsage where these are more than HELD_ROWS_MAX.
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
                f"shard {shard!r}: key {key!r} has more than {HELD_ROWS_MAX} changes in one read, too many to tell "
                "updates by; read fewer times at once, or leave changeImages out"
            )
    yield from held


# Changes: what was written to a shard in an interval of times, as splits that can be read anywhere.


CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP = "_change_type", "_commit_version", "_commit_timestamp"
CHANGE_FIELDS = (
    pa.field(CHANGE_TYPE, pa.string()),
    pa.field(COMMIT_VERSION, pa.int64()),
    pa.field(COMMIT_TIMESTAMP, TIMESTAMP),
    pa.field(TIME, pa.int64()),
    pa.field(DIFF, pa.int64()),
)
CHANGE_COLUMNS = (CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP)
MADE_UP = tuple(field.name for field in CHANGE_FIELDS)
_MICROSECONDS = {"s": 1_000_000, "ms": 1_000, "us": 1}


@dataclass(frozen=True)
class Interval:
    """The times `[lower, upper)`. With `snapshot` the contents as of `lower` come first, as changes at `lower`.

    Of all that only the `keys`.
    """

    lower: int
    upper: Antichain
    snapshot: bool
    keys: KeyRange = ALL_KEYS

    @property
    def held(self) -> Antichain:
        """The since at which the interval can still be told apart from what came before."""
        return Antichain(self.lower if self.snapshot else max(self.lower - 1, 0))

    def drops(self, view: ShardView) -> Drops:
        """The drops of the shard that are changes within the interval."""
        first = self.lower + 1 if self.snapshot else self.lower
        return drops_within(view.drops, first, self.upper.element)


@dataclass(frozen=True)
class FeedSplit:
    """One key range of an interval: all that is needed to read it elsewhere."""

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
    renamed: Renamed = ()  # columns of a stream, whose names are fixed when it begins
    dropped: tuple[tuple[RowDrop, tuple[Run, ...]], ...] = ()  # drops of the interval, and the runs of what each took

    def read(self, transport: Transport, wanted: Filter | None = None) -> Iterator[pa.Table]:
        """The updates, consolidated: the columns, `__time` and `__diff`.

        Raises Expired (the lease lapsed), UnknownShard (the shard was dropped), Corruption.
        """
        reader, lease = self._open(transport, wanted)
        gone = (
            table
            for drop, runs in self.dropped
            for table in retractions(reader, runs, drop, self.key_range, self.columns)
        )
        for table in with_renewal(chain(self._written(reader, self.interval), gone), lease):
            yield table if wanted is None else wanted.apply(table)

    def read_in_turn(self, transport: Transport, wanted: Filter | None = None) -> Iterator[Iterator[pa.Table]]:
        """The same in stretches of times: within each of them the keys ascend from table to table.

        What a drop took away and what came at its time cancel out where they are equal. Raises as `read`.
        """
        reader, lease = self._open(transport, wanted)
        came = [Run((part,)) for part in self.parts]
        rest = self.interval
        stretches: list[Iterator[pa.Table]] = []
        for drop, runs in self.dropped:
            if rest.snapshot or rest.lower < drop.at:
                stretches.append(self._written(reader, replace(rest, upper=Antichain(drop.at))))
            at = runs_in_interval(came, drop.at - 1, drop.at)
            stretches.append(changes_at(reader, runs, at, drop, self.key_range, self.columns))
            rest = Interval(drop.at + 1, rest.upper, False, rest.keys)
        if Antichain(rest.lower) < rest.upper:
            stretches.append(self._written(reader, rest))
        for stretch in stretches:
            yield (table if wanted is None else wanted.apply(table) for table in with_renewal(stretch, lease))

    def _open(self, transport: Transport, wanted: Filter | None) -> tuple[PartReader, ReadLease]:
        """The reader of the parts, and the lease on them. Raises Expired."""
        transport = OneShard(transport, self.shard_id)
        lease = ReadLease(transport, self.shard, self.reader, self.settings, self.seqno)
        lease.check()
        return part_reader(transport, self, self.settings, None if wanted is None else wanted.may_match)[1], lease

    def _written(self, reader: PartReader, interval: Interval) -> Iterator[pa.Table]:
        """What was written in the interval."""
        return reader.read_updates(
            self.parts,
            Antichain(0 if interval.snapshot else interval.lower),
            interval.upper,
            since=interval.lower if interval.snapshot else None,
            key_range=self.key_range,
            columns=self.columns,
        )

    def dates(self, transport: Transport) -> ClockStretches:
        """The wall clocks of the times in the interval. Raises what `dates_of` says."""
        interval = self.interval
        last = TIME_MAX if interval.upper.element is None else interval.upper.element - 1
        one = OneShard(transport, self.shard_id)
        return load_clock_stretches(one, self.shard, interval.lower, last, self.settings.retry_s)


def overlapping_batches(held: Iterable[HollowBatch], interval: Interval) -> list[HollowBatch]:
    lower = Antichain(0 if interval.snapshot else interval.lower)
    return [b for b in held if lower < b.desc.upper and b.desc.lower < interval.upper and b.runs]


def plan_changes(
    target: Target, options: ReadOptions, view: ShardView, interval: Interval, lease: ReadLease, names: Iterable[str]
) -> list[FeedSplit]:
    """The interval in splits that are disjoint in key space; none when nothing was written in it."""
    transport = executors.transport(target.connection)
    settings = target.connection.handles.read
    schema, parts_reader = part_reader(transport, view, settings)
    chosen = planning.selected(schema, options, columns_read(schema, names))
    columns, wanted = chosen.read or (), chosen.key_range.meet(interval.keys)
    if wanted.is_empty:
        return []
    runs, dropped = found_runs(OneShard(transport, view.shard_id), parts_reader, view, interval, wanted, lease)
    every = (*runs, *(run for _, some in dropped for run in some))
    if not every:
        return []
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
        for key_range in planning.split_ranges(every, options.partitions, schema, parts_reader, wanted, lease)
    ]


def changes_again(target: Target, split: FeedSplit) -> FeedSplit:
    """The split with parts and a lease as of now. Raises Expired where history was forgotten, UnknownShard."""
    interval, wanted = split.interval, split.key_range
    first = interval.held.element or 0
    held = held_again(target, split.shard_id, first)
    with forgotten(target, first):
        check_held(held.view, first)  # a hold on this time alone says nothing of later ones
    check_same(target, split.columns, split.schemas, held.view.schemas)
    reader = part_reader(held.transport, held.view, split.settings)[1]
    runs, dropped = found_runs(
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


def found_runs(
    transport: OneShard, reader: PartReader, view: ShardView, interval: Interval, wanted: KeyRange, lease: ReadLease
) -> tuple[tuple[Run, ...], list[tuple[RowDrop, tuple[Run, ...]]]]:
    """What may have keys of the range: of the interval, and of what its drops took away."""
    held: tuple[Run, ...] = tuple(run for b in overlapping_batches(view.batches, interval) for run in b.runs)
    if interval.snapshot:
        held = contents(held, view.drops, interval.lower)

    def found(some: Iterable[Run]) -> tuple[Run, ...]:
        return overlapping_runs(reader.expanded(some, wanted), wanted)

    with leased_blobs(lease):
        return found(held), [(drop, found(some)) for drop, some in _dropped(transport, view, interval)]


def _parts(runs: Iterable[Run], key_range: KeyRange) -> tuple[Part, ...]:
    return tuple(part for run in overlapping_runs(runs, key_range) for part in run.parts)


def _dropped(transport: Transport, view: ShardView, interval: Interval) -> Iterator[tuple[RowDrop, tuple[Run, ...]]]:
    """The drops of the interval, and what each took away, which lies before the interval too.

    Raises Expired: the hold on the interval is gone.
    """
    drops = interval.drops(view)
    if not drops:
        return
    whole = load_full_view(transport, view.name, view)
    for drop in drops:
        check_held(whole, drop.at - 1)
        yield drop, taken_away(runs_of(whole), whole.drops, drop)


def columns_read(schema: ShardSchema, names: Iterable[str]) -> tuple[str, ...]:
    """The columns to read for a result of these names: those, and the key, which errors name."""
    shown = schema.columns(name for name in names if name not in MADE_UP)
    return (*shown, *(name for name in schema.key if name not in shown))


def changes_schema(view: ShardView, options: ReadOptions) -> StructType:
    """The columns that a change feed shows when it is given no schema."""
    schema = current_schema(view.schemas)[1]
    names = schema.columns(options.columns)
    for name in set(names).intersection(CHANGE_COLUMNS):
        raise InvalidUsage(
            f"shard {view.name!r} has a column {name!r}, and so has a change feed; leave that of the shard out with "
            "option 'columns', or read what changed between two times with readDiff"
        )
    return spark_schema([*(schema.arrow.field(name) for name in names), *CHANGE_FIELDS])


def check_signs(schema: StructType, options: ReadOptions) -> None:
    """Raises InvalidUsage where rows of a change feed would be shown, and nothing would tell which of them went.

    Nor may updates be asked for that no column tells.
    """
    if options.images and CHANGE_TYPE not in schema.names:
        raise InvalidUsage(
            f"the schema given to readChangeFeed lacks {CHANGE_TYPE}, the column by which changeImages tells updates; "
            "name it too, or leave changeImages out"
        )
    if not options.changes or {CHANGE_TYPE, DIFF} & set(schema.names) or set(schema.names) <= set(MADE_UP):
        return
    raise InvalidUsage(
        f"the schema given to readChangeFeed has neither {CHANGE_TYPE} nor {DIFF}, without which rows that were "
        "removed look as if they had been added; name one of them too"
    )


def read_changes(
    target: Target, options: ReadOptions, schema: StructType, split: FeedSplit
) -> Iterator[pa.RecordBatch]:
    """A split's rows for Spark: as changes, or, without a change feed, the rows that were added."""
    wanted = options.selection.on(current_schema(split.schemas)[1]).filter
    transport = executors.transport(target.connection)

    def read(one: FeedSplit) -> Iterator[pa.Table]:
        return _with_images(one, transport, wanted) if options.images else one.read(transport, wanted)

    tables = outliving(read(split), lambda: read(changes_again(target, split)))
    rows: Iterator[pa.Table]
    if options.changes:
        is_dated = options.time_unit is None and COMMIT_TIMESTAMP in schema.names
        rows = _changes(tables, options.time_unit, split, transport if is_dated else None)
    else:
        rows = _added(tables, split, options)
    target_schema = arrow_schema(schema)
    return batches(as_began(rows, split.renamed, target_schema), target_schema, options.batch_rows)


def _with_images(split: FeedSplit, transport: Transport, wanted: Filter | None) -> Iterator[pa.Table]:
    """What is read of a split, with a column that tells what each change is."""
    schema = current_schema(split.schemas)[1]
    for tables in split.read_in_turn(transport, wanted):
        for table in by_whole_keys(tables, schema, split.shard):
            told = kinds(table.column(DIFF).to_numpy(), updates(table, schema))
            yield table.append_column(CHANGE_FIELDS[0], told)


def _changes(
    tables: Iterator[pa.Table], time_unit: str | None, split: FeedSplit, transport: Transport | None
) -> Iterator[pa.Table]:
    """The updates with Spark's columns of changes beside `__time` and `__diff`.

    `_change_type` is derived from `__diff` unless the table has it already. `_commit_timestamp` is the time in
    `time_unit`, else the wall clock that `transport` knows for it; null without both.
    """
    dates = None
    for table in tables:
        if CHANGE_TYPE not in table.column_names:
            table = table.append_column(CHANGE_FIELDS[0], kinds(table.column(DIFF).to_numpy()))
        times = table.column(TIME)
        timestamps = pa.nulls(len(table), TIMESTAMP)
        if time_unit is not None:
            timestamps = pc.multiply_checked(times, _MICROSECONDS[time_unit]).cast(TIMESTAMP)
        elif transport is not None:
            if dates is None:
                dates = split.dates(transport)  # after the lease was checked, which keeps them known
            timestamps = dates.of(times)
        yield table.append_column(CHANGE_FIELDS[1], times).append_column(CHANGE_FIELDS[2], timestamps)


def _added(tables: Iterator[pa.Table], split: FeedSplit, options: ReadOptions) -> Iterator[pa.Table]:
    for table in tables:
        row = first_negative(table)
        if row is not None:
            found = table.slice(row, 1).to_pylist()[0]
            raise InvalidUsage(
                f"shard {split.shard!r} retracts a row at time {found[TIME]}: {found!r:.300}; a stream of rows cannot "
                "show it, so read changes: option('readChangeFeed', 'true')"
            )
        yield from expand_rows(table, options.batch_rows)
