"""Batch reads (one Spark partition per split), batch writes (append, upsert, overwrite), and restore."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
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
from persist.client.snapshot import ReadLease, SnapshotSplit, check_held, wait_for_upper
from persist.client.timestamps import BEFORE_ALL
from persist.core.errors import InvalidUsage
from persist.core.frontier import frontier
from persist.core.ids import check_shard_name
from persist.core.shard_view import ShardView, ViewRequest
from persist.parts import DIFF, TIME, ShardSchema, current_schema, overlapping_runs, valid_schemas
from persist.parts.scan_spec import schema_shown
from persist.spark import executors, planning
from persist.spark.change_feed import FeedSplit, Interval, plan_changes, read_changes
from persist.spark.executors import carrying, outliving, past_again, snapshot_again
from persist.spark.options import RESTORE, DiffOptions, Options, ReadOptions, Target, WriteOptions
from persist.spark.spark_schemas import MULTIPLICITY, KnownSchema, arrow_schema, batches, names_in, spark_schema
from persist.spark.write_job import FORMAT, Job, progress_of, save

# Snapshot reads: one Spark partition for each split, disjoint in key space and consolidated.
#
# There is deliberately no `pushFilters`: PySpark keeps one plan for a `load()` and would give filtered rows to a user
# of the DataFrame without that filter. Columns are pruned by the schema of the read, rows by options.


class SplitReader(DataSourceReader):
    """Reads the columns of `schema`, split by split. Which times are read is fixed when Spark plans the load.

    `known` is the schema of the shard by which `schema` was chosen; None: the user has given `schema`. Leases are not
    closed: Spark plans once and may read the plan again and again, so they lapse when they are not renewed.
    """

    def __init__(
        self, target: Target, options: ReadOptions, schema: StructType, known: KnownSchema | None = None
    ) -> None:
        self._target = target
        self._options = options
        self._schema = schema
        self._known = known

    def partitions(self) -> Sequence[InputPartition]:
        """One for each split; one without a value where there are no rows."""
        return [InputPartition(split) for split in self._splits()] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return iter(()) if partition.value is None else self._batches(partition.value)

    @abstractmethod
    def _splits(self) -> Sequence[SnapshotSplit | FeedSplit | ChangesSplit | PairSplit]: ...

    @abstractmethod
    def _batches(self, split: Any) -> Iterator[pa.RecordBatch]: ...


class SnapshotReader(SplitReader):
    """Reads a shard as of one time."""

    def __init__(
        self, target: Target, options: ReadOptions, schema: StructType, known: KnownSchema | None = None
    ) -> None:
        super().__init__(target, options, schema, known)
        if options.with_diff and DIFF not in schema.names:
            raise InvalidUsage(f"multiplicity=column needs a column {DIFF} in the schema given to the read")

    def _splits(self) -> list[SnapshotSplit]:
        options = replace(self._options, as_of=planning.as_of(self._target, self._options))  # resolved once
        schema = planning.shown(self._target, options)[1]
        columns = schema.columns(name for name in self._schema.names if name not in (TIME, DIFF))
        splits = planning.plan_snapshot(self._target, options, columns)
        for split in splits[:1]:
            self._check(split, columns)
        return splits

    def _check(self, split: SnapshotSplit, columns: tuple[str, ...]) -> None:
        """Raise InvalidUsage where a name may mean another column than where the DataFrame was loaded."""
        if not self._options.selection.then:
            planning.check_names(self._target, (*columns, *names_in(self._options.selection.where)), self._known, split)
        elif self._known is not None and split.schema_id != self._known.number:
            raise InvalidUsage(
                f"this DataFrame of shard {self._target.shard!r} shows another time by now, which has other columns: "
                "load() again"
            )

    def _batches(self, split: SnapshotSplit) -> Iterator[pa.RecordBatch]:
        rows = self._rows(self._pieces(split), split)
        return batches(rows, arrow_schema(self._schema), self._options.batch_rows)

    def _pieces(self, split: SnapshotSplit) -> Iterator[pa.Table]:
        transport, batch_rows = executors.transport(self._target.connection), self._options.batch_rows
        return outliving(
            split.read(transport, batch_rows),
            lambda: snapshot_again(self._target, split).read(transport, batch_rows),
        )

    def _rows(self, tables: Iterator[pa.Table], split: SnapshotSplit) -> Iterator[pa.Table]:
        for table in tables:
            if DIFF in self._schema.names:
                yield table
                continue
            if first_negative(table) is not None:
                raise self._negative(split)
            yield from expand_rows(table, self._options.batch_rows)

    def _negative(self, split: SnapshotSplit) -> InvalidUsage:
        """The error that names the key: read again, since the key need not be among the columns."""
        schema = schema_shown(valid_schemas(split.schemas), split.schema_id)
        for table in self._pieces(replace(split, columns=schema.key)):
            row = first_negative(table)
            if row is not None:
                found = table.slice(row, 1).to_pylist()[0]
                key = {name: found[name] for name in schema.key}
                return InvalidUsage(
                    f"shard {split.shard!r} has a row of key {key!r} with the negative multiplicity {found[DIFF]} "
                    f"as of {split.as_of}; read it with multiplicity=column"
                )
        return InvalidUsage(f"shard {split.shard!r} has negative multiplicities; read it with multiplicity=column")


class ChangesReader(SplitReader):
    """The change feed of `[startingVersion, endingVersion]`, both inclusive, fixed when Spark plans the load.

    So are startingTimestamp and endingTimestamp, rounded down to the shard's grid. Without a start the contents as of
    the shard's since come first, as changes at that time.
    """

    def _splits(self) -> list[FeedSplit]:
        target = self._target
        options = self._options
        starting, ending = planning.bounds_of_feed(target, options)
        view = executors.view_of(target)
        lower = (view.since.element or 0) if starting is None else starting
        upper = view.upper if ending is None else frontier(ending + 1)
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
            planning.check_names(target, names, self._known, view)
            splits = plan_changes(target, options, view, interval, lease, self._schema.names)
        except BaseException:
            lease.close()
            raise
        return splits

    def _batches(self, split: FeedSplit) -> Iterator[pa.RecordBatch]:
        return read_changes(self._target, self._options, self._schema, split)


class DiffReader(SplitReader):
    """Reads what is there more (`__diff` above 0) or less at `end` than at `start`."""

    def __init__(
        self, target: Target, options: DiffOptions, schema: StructType, known: KnownSchema | None = None
    ) -> None:
        super().__init__(target, options.read, schema, known)
        self._between = options
        if DIFF not in schema.names:
            raise InvalidUsage(
                f"the schema given to readDiff lacks the column {DIFF}, without which rows that were removed look as "
                "if they had been added; name it too"
            )

    def _splits(self) -> list[ChangesSplit | PairSplit]:
        splits = self._changes().splits
        for split in splits[:1]:
            planned = split.earlier if isinstance(split, PairSplit) else split
            assert isinstance(planned, SnapshotSplit)
            planning.check_names(self._target, self._schema.names, self._known, planned)
        return [split for split in map(_carrying, splits) if split is not None]

    def _batches(self, split: ChangesSplit | PairSplit) -> Iterator[pa.RecordBatch]:
        target, transport = self._target, executors.transport(self._target.connection)
        tables = outliving(split.read(transport), lambda: past_again(target, split).read(transport))
        return batches(tables, arrow_schema(self._schema), self._options.batch_rows)

    def _changes(self) -> Changes:
        target, options, read = self._target, self._between, self._options
        settings = target.connection.handles.read
        one, limits = executors.one_shard(target), (read.wait_s, settings.retry_s)
        columns = tuple(name for name in self._schema.names if name != DIFF)
        asked = DiffRequest(read.partitions or planning.partitions_for, columns, read.wait_s, "spark changes")
        first = NamedTime.of("option 'start'", options.start, one, target.shard, limits, BEFORE_ALL)
        if options.other in (None, target.shard):
            last = NamedTime.of("option 'end'", options.end, one, target.shard, limits, BEFORE_ALL)
            return changes_of(one, target.shard, first, last, asked, settings)
        other = replace(target, shard=check_shard_name(options.other))
        two = executors.one_shard(other)
        last = NamedTime.of("option 'end'", options.end, two, other.shard, limits, BEFORE_ALL)
        return changes_between((one, target.shard, first), (two, other.shard, last), asked, settings)


def _carrying(split: object) -> ChangesSplit | PairSplit | None:
    """The split with only those parts that it reads. None: there are no keys in it."""
    if isinstance(split, PairSplit):
        if split.earlier.key_range.is_empty:
            return None
        sides = (split.earlier, split.later)
        earlier, later = (replace(side, runs=overlapping_runs(side.runs, side.key_range)) for side in sides)
        return replace(split, earlier=earlier, later=later)
    assert isinstance(split, ChangesSplit)
    if split.key_range.is_empty:
        return None
    return carrying(split, split.key_range)


def snapshot_schema(schema: ShardSchema, options: ReadOptions) -> StructType:
    """The columns that a snapshot read shows when it is given no schema."""
    names = schema.columns(options.columns)
    fields = [schema.arrow.field(name) for name in names]
    return spark_schema([*fields, MULTIPLICITY] if options.with_diff else fields)


def diff_schema(view: ShardView, options: DiffOptions) -> StructType:
    """The columns that changes show when they are given no schema."""
    schema = current_schema(view.schemas)[1]
    return spark_schema([*(schema.arrow.field(name) for name in schema.columns(options.read.columns)), MULTIPLICITY])


# Batch writes: append, replace by key (`envelope=upsert`), and overwrite; each is one commit.
#
# The token of the commit is fixed when Spark makes the writer, so whatever is retried, the job is published once.


log = logging.getLogger("persist.spark")


class BatchWriter(DataSourceArrowWriter):
    """Made once for a job: the same settings serve its tasks and its commit."""

    def __init__(self, target: Target, options: WriteOptions, schema: StructType, overwrite: bool = False) -> None:
        self._job = Job.open(target, options, schema, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._job.stage(iterator)

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Publish. The writer is left to lapse: its record tells a commit that is tried again that it happened."""
        txn = self._job.options.txn
        if not self._job.publish(messages, None if txn is None else progress_of(txn)) and txn is not None:
            log.warning(
                "persist: a write to shard %r was skipped: transaction %d of %r, or a later one, was committed before",
                self._job.target.shard,
                txn[1],
                txn[0],
            )

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Hold nothing any more. Spark calls this also after a commit whose outcome it does not know: that may land.

        Staged parts are orphans.
        """
        self._job.release(messages)


# A restore: a read of what leads back to a time, and a write of it.


_OF_READS = ("numpartitions", "memorybytes", "leaseseconds")


def restore(spark: SparkSession, shard: str, as_of: int | datetime, **options: str) -> None:
    """Make the contents of a shard again what they were as of a time, or a wall clock with its zone, as a Spark job.

    Tasks read and stage what differs, key range by key range. The driver publishes it in one commit at the next time,
    where the upper is still the one that was compared with. Where nothing differs nothing is committed. `options` are
    those of `format("persist")` that say where shards are, and `info`, `numPartitions`, `memoryBytes`, `partBytes`,
    `leaseSeconds`.

    Raises InvalidUsage, NotReadable and UpperMismatch as `Shard.restore` says, what fails within the job as Spark's own
    error. Nothing is changed then, unless the error says that the outcome is unknown: it is safe to run it again.
    """
    given = Options({**options, "path": shard})
    given.check(RESTORE)
    named = Target.of(given)
    executors.check_there(named)
    target = named.at(writes=True)
    one, settings = executors.one_shard(target), target.connection.handles.read
    to = NamedTime.of("as_of", as_of, one, shard, (0.0, settings.retry_s)).time
    view = executors.view_of(target)
    upper = check_complete(shard, to, view)
    reads = {name: value for name, value in options.items() if name.lower() not in ("info", "partbytes")}
    reads |= {"readDiff": "true", "start": str(upper - 1), "end": str(to)}
    writes = {name: value for name, value in options.items() if name.lower() not in _OF_READS}
    writes |= {"restoreTo": str(to), "expectedUpper": str(upper)}
    changes = spark.read.format(FORMAT).options(**reads).load(shard)
    save(spark, changes, "append", shard, writes)
