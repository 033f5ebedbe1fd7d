"""Batch reads (one Spark partition per split), batch writes (append, upsert, overwrite), and restore."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceReader, InputPartition, WriterCommitMessage
from pyspark.sql.types import StructType

from persist.client.contents_diff import (
    Changes,
    ChangesSplit,
    DiffRequest,
    NamedTime,
    PairSplit,
    changes_between,
    changes_of,
)
from persist.client.optimistic_loop import check_complete
from persist.client.row_reader import expand_rows, first_negative
from persist.client.shared_lease_reads import hold_shared
from persist.client.snapshot import ReadLease, SnapshotSplit, Tagged, check_held, hold_time, wait_for_upper
from persist.client.timestamps import BEFORE_ALL, as_of_at, schema_id_at
from persist.core.errors import InvalidUsage, NotReadable
from persist.core.frontier import TIME_MAX, frontier
from persist.core.shard_view import ShardView, ViewRequest
from persist.parts import DIFF, TIME, ShardSchema, current_schema, valid_schemas
from persist.parts.scan_spec import schema_shown
from persist.spark import executors
from persist.spark.change_feed import FeedSplit, Interval, partitions_for, plan_changes, read_changes
from persist.spark.executors import recover_lease, renew_changes_split, renew_snapshot_split, without_other_parts
from persist.spark.options import OF_READS, OF_WRITES, RESTORE, Options, ReadOptions, Target, WriteOptions
from persist.spark.spark_schemas import (
    MULTIPLICITY,
    KnownSchema,
    arrow_schema,
    batches,
    check_means,
    names_in,
    spark_schema,
)
from persist.spark.write_job import FORMAT, Job, progress_of, save

# A snapshot read has one Spark partition per split. Splits are disjoint in key space and consolidated.
#
# `pushFilters` is not implemented, because PySpark keeps one plan per `load()` and would return filtered rows to a use
# of the DataFrame without that filter. The schema of the read prunes columns, and options select rows.


class SplitReader(DataSourceReader):
    """Reads the columns of `schema`, split by split. Spark's planning of the load fixes the times.

    `known` identifies the shard schema from which `schema` was derived; None: the user has given `schema`. Leases are
    not closed, because Spark may read a plan any number of times: they expire once they are not renewed.
    """

    def __init__(
        self, target: Target, options: ReadOptions, schema: StructType, known: KnownSchema | None = None
    ) -> None:
        self._target = target
        self._options = options
        self._schema = schema
        self._known = known
        if options.with_diff and DIFF not in schema.names:
            raise InvalidUsage(f"multiplicity=column needs a column {DIFF} in the schema given to the read")

    def partitions(self) -> Sequence[InputPartition]:
        """One partition per split, or one without a value if there are no rows."""
        return [InputPartition(split) for split in self._splits()] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return iter(()) if partition.value is None else self._batches(partition.value)

    def _check_names(self, names: Iterable[str], planned: SnapshotSplit | ShardView) -> None:
        """Raise InvalidUsage if a column name of a DataFrame refers to another column than when it was loaded."""
        if self._known is not None and planned.shard_id == self._known.shard:
            use = f"which this DataFrame of shard {self._target.shard!r} has or selects by"
            remedy = "call load() again (a select() after load() does not exclude a column from this check)"
            check_means(names, self._known.number, planned.schemas, use, remedy)

    @abstractmethod
    def _splits(self) -> Sequence[SnapshotSplit | FeedSplit | ChangesSplit | PairSplit]: ...

    @abstractmethod
    def _batches(self, split: Any) -> Iterator[pa.RecordBatch]: ...


class SnapshotReader(SplitReader):
    """Reads a shard as of one time."""

    def _splits(self) -> list[SnapshotSplit]:
        options = replace(self._options, as_of=_as_of(self._target, self._options))  # resolve it only once
        schema = schema_of_read(self._target, options)[1]
        columns = schema.columns(name for name in self._schema.names if name not in (TIME, DIFF))
        splits = plan_snapshot(self._target, options, columns)
        for split in splits[:1]:
            self._check(split, columns)
        return splits

    def _check(self, split: SnapshotSplit, columns: tuple[str, ...]) -> None:
        """Raise InvalidUsage if a column name may refer to another column than when the DataFrame was loaded."""
        if not self._options.selection.then:
            self._check_names((*columns, *names_in(self._options.selection.where)), split)
        elif self._known is not None and split.schema_id != self._known.number:
            raise InvalidUsage(
                f"this DataFrame of shard {self._target.shard!r} now reads a time whose columns differ: "
                "call load() again"
            )

    def _batches(self, split: SnapshotSplit) -> Iterator[pa.RecordBatch]:
        rows = self._rows(self._tables(split), split)
        return batches(rows, arrow_schema(self._schema), self._options.batch_rows)

    def _tables(self, split: SnapshotSplit) -> Iterator[pa.Table]:
        transport, batch_rows = executors.transport(self._target.connection), self._options.batch_rows
        return recover_lease(
            split.read(transport, batch_rows),
            lambda: renew_snapshot_split(self._target, split).read(transport, batch_rows),
        )

    def _rows(self, tables: Iterator[pa.Table], split: SnapshotSplit) -> Iterator[pa.Table]:
        for table in tables:
            if DIFF in self._schema.names:
                yield table
                continue
            if first_negative(table) is not None:
                raise self._negative_multiplicity(split)
            yield from expand_rows(table, self._options.batch_rows)

    def _negative_multiplicity(self, split: SnapshotSplit) -> InvalidUsage:
        """The error that names the key. Reads the split again, because its columns may lack the key."""
        schema = schema_shown(valid_schemas(split.schemas), split.schema_id)
        for table in self._tables(replace(split, columns=schema.key)):
            row = first_negative(table)
            if row is not None:
                negative = table.slice(row, 1).to_pylist()[0]
                key = {name: negative[name] for name in schema.key}
                return InvalidUsage(
                    f"shard {split.shard!r} has a row of key {key!r} with the negative multiplicity {negative[DIFF]} "
                    f"as of {split.as_of}; read it with multiplicity=column"
                )
        return InvalidUsage(f"shard {split.shard!r} has negative multiplicities; read it with multiplicity=column")


def _as_of(target: Target, options: ReadOptions) -> int | Tagged | None:
    """The time or the tag of a read. A wall clock resolves to the same time whenever Spark plans the read again."""
    at = options.as_of
    if isinstance(at, datetime):
        return as_of_at(target.shard, executors.resolve_wall_clock(target, at, options.wait_s))
    return at


def schema_of_read(target: Target, options: ReadOptions) -> tuple[int, ShardSchema]:
    """The schema by which a snapshot read shows rows, and its id. Raises what a read may."""
    view = executors.view_of(target)
    if not options.selection.then:
        return current_schema(view.schemas)
    transport, settings = executors.one_shard(target, view.shard_id), target.connection.handles.read
    is_empty = options.as_of is None and view.upper.element == 0
    at = BEFORE_ALL if is_empty else _as_of(target, options)
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
    at, view = _as_of(target, options), executors.view_of(target)
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


class ChangesReader(SplitReader):
    """Reads the change feed of `[startingVersion, endingVersion]`, both inclusive. Spark's planning fixes the times.

    startingTimestamp and endingTimestamp are rounded down to the shard's clock marks. Without a start, the contents as
    of the shard's since come first, as changes at that time.
    """

    def _splits(self) -> list[FeedSplit]:
        target = self._target
        options = self._options
        starting, ending = _bounds_of_feed(target, options)
        view = executors.view_of(target)
        lower = (view.since.element or 0) if starting is None else starting
        upper = view.upper if ending is None else frontier(ending + 1)
        if starting is None and ending is not None and ending < lower:
            raise NotReadable(
                f"nothing is left to read up to {ending}: shard {target.shard!r} is readable from {view.since} on",
                as_of=[ending],
                since=view.since.to_json(),
            )
        if upper <= frontier(lower):
            return []
        interval = Interval(lower, upper, starting is None)
        transport = executors.one_shard(target, view.shard_id)
        lease = ReadLease.open(transport, target.shard, interval.held, "spark changes", target.connection.handles.read)
        try:
            if ending is None:
                view = transport.view(target.shard, ViewRequest())
            else:
                view = wait_for_upper(transport, target.shard, ending, lease, options.wait_s)
            check_held(view, interval.held.element or 0)
            names = (*self._schema.names, *names_in(options.selection.where))
            self._check_names(names, view)
            splits = plan_changes(target, options, view, interval, lease, self._schema.names)
        except BaseException:
            lease.close()
            raise
        return splits

    def _batches(self, split: FeedSplit) -> Iterator[pa.RecordBatch]:
        return read_changes(self._target, self._options, self._schema, split)


def _bounds_of_feed(target: Target, options: ReadOptions) -> tuple[int | None, int | None]:
    """The first and the last time of a change feed, both inclusive.

    The feed begins with changes committed at or after its start, and ends with those committed by its end.
    """

    def upper_at(when: datetime) -> int:
        upper = executors.resolve_wall_clock(target, when, options.wait_s).upper.element
        return TIME_MAX if upper is None else upper

    first, last = options.starting, options.ending
    first = upper_at(first) if isinstance(first, datetime) else first
    return first, upper_at(last) - 1 if isinstance(last, datetime) else last


class DiffReader(SplitReader):
    """Reads the rows that were added (`__diff` above 0) and removed between `start` and `end`."""

    def __init__(
        self, target: Target, options: ReadOptions, schema: StructType, known: KnownSchema | None = None
    ) -> None:
        super().__init__(target, options, schema, known)
        if DIFF not in schema.names:
            raise InvalidUsage(
                f"the schema given to readDiff lacks the column {DIFF}, which distinguishes removed rows from added "
                "rows; add it to the schema"
            )

    def _splits(self) -> list[ChangesSplit | PairSplit]:
        splits: list[ChangesSplit | PairSplit] = []
        for split in self._changes().splits:
            assert isinstance(split, (ChangesSplit, PairSplit))
            side = split.earlier if isinstance(split, PairSplit) else split
            if not splits:
                self._check_names(self._schema.names, side)
            if not side.key_range.is_empty:
                splits.append(without_other_parts(split))
        return splits

    def _batches(self, split: ChangesSplit | PairSplit) -> Iterator[pa.RecordBatch]:
        target, transport = self._target, executors.transport(self._target.connection)
        tables = recover_lease(split.read(transport), lambda: renew_changes_split(target, split).read(transport))
        return batches(tables, arrow_schema(self._schema), self._options.batch_rows)

    def _changes(self) -> Changes:
        target, read = self._target, self._options
        assert read.starting is not None
        settings = target.connection.handles.read
        transport, limits = executors.one_shard(target), (read.wait_s, settings.retry_s)
        columns = tuple(name for name in self._schema.names if name != DIFF)
        request = DiffRequest(read.partitions or partitions_for, columns, read.wait_s, "spark changes")
        other = read.other or target.shard
        other_transport = transport if other == target.shard else executors.one_shard(replace(target, shard=other))
        start = NamedTime.of("option 'start'", read.starting, transport, target.shard, limits, BEFORE_ALL)
        end = NamedTime.of("option 'end'", read.ending, other_transport, other, limits, BEFORE_ALL)
        if other == target.shard:
            return changes_of(transport, other, start, end, request, settings)
        return changes_between((transport, target.shard, start), (other_transport, other, end), request, settings)


def snapshot_schema(schema: ShardSchema, options: ReadOptions) -> StructType:
    """The schema of a snapshot read without a user-specified schema."""
    names = schema.columns(options.columns)
    fields = [schema.arrow.field(name) for name in names]
    return spark_schema([*fields, MULTIPLICITY] if options.with_diff else fields)


def diff_schema(view: ShardView, options: ReadOptions) -> StructType:
    """The schema of readDiff without a user-specified schema."""
    schema = current_schema(view.schemas)[1]
    return spark_schema([*(schema.arrow.field(name) for name in schema.columns(options.columns)), MULTIPLICITY])


# Batch writes: append, replace by key (`envelope=upsert`), and overwrite; each is one commit.
#
# The token of the commit is fixed when Spark makes the writer, so whatever is retried, the job is published once.

log = logging.getLogger("persist.spark")


class BatchWriter(DataSourceArrowWriter):
    """Created once per job: its tasks and its commit use the same settings."""

    def __init__(self, target: Target, options: WriteOptions, schema: StructType, overwrite: bool = False) -> None:
        self._job = Job.open(target, options, schema, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._job.stage(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish. The writer is left to expire, because its record makes a retry of the commit idempotent."""
        txn = self._job.options.txn
        if not self._job.publish(messages, None if txn is None else progress_of(txn)) and txn is not None:
            log.warning(
                "persist: a write to shard %r was skipped: transaction %d of %r, or a later one, was committed before",
                self._job.target.shard,
                txn[1],
                txn[0],
            )

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Release the holds of the job. Spark also calls this after a commit of unknown outcome, which may still land.

        Staged parts become orphans.
        """
        self._job.release(messages)


# A restore reads the changes back to a time, and writes them.


def restore(spark: SparkSession, shard: str, as_of: int | datetime, **options: str) -> None:
    """Restore the contents of a shard as of a time, or as of a wall clock with its time zone.

    It is a Spark job. Tasks read and stage the differences, each for a key range. The driver publishes them in one
    commit at the next time, on the condition that the upper is still the one that was compared. Without differences
    nothing is committed.
    `options` are the options of `format("persist")` for the location, and `info`, `numPartitions`, `memoryBytes`,
    `partBytes` and `leaseSeconds`.

    Raises InvalidUsage, NotReadable and UpperMismatch as `Shard.restore` does, and Spark's own error for a failure
    within the job. Nothing is changed then, unless the error says that the outcome is unknown. It is safe to retry.
    """
    given = Options({**options, "path": shard})
    given.check(RESTORE)
    named = Target.of(given)
    executors.check_location_exists(named)
    target = named.at(writes=True)
    limits = (0.0, target.connection.handles.read.retry_s)
    to = NamedTime.of("as_of", as_of, executors.one_shard(target), shard, limits).time
    view = executors.view_of(target)
    upper = check_complete(shard, to, view)
    reads = {name: value for name, value in options.items() if name.lower() not in OF_WRITES}
    reads |= {"readDiff": "true", "start": str(upper - 1), "end": str(to)}
    writes = {name: value for name, value in options.items() if name.lower() not in OF_READS}
    writes |= {"restoreTo": str(to), "expectedUpper": str(upper)}
    changes = spark.read.format(FORMAT).options(**reads).load(shard)
    save(spark, changes, "append", shard, writes)
