"""Batch reads (one Spark partition per split) and batch writes (append, upsert, overwrite; one commit each)."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceReader, InputPartition, WriterCommitMessage
from pyspark.sql.types import StructType

from persist.client.row_reader import expanded, first_negative
from persist.client.snapshot import ReadLease, SnapshotSplit, check_held, wait_for_upper
from persist.client.transport import OneShard
from persist.core.errors import InvalidUsage
from persist.core.frontier import frontier
from persist.core.shard_view import ViewRequest
from persist.parts import DIFF, TIME, ShardSchema, sound_schemas
from persist.parts.scan_spec import shown_by
from persist.spark import executors, planning
from persist.spark.change_feed import ChangesPartition, Interval, plan_changes, read_changes
from persist.spark.executors import outliving, snapshot_again
from persist.spark.options import ReadOptions, Target, WriteOptions
from persist.spark.spark_schemas import Known, arrow_schema, batches, names_in, spark_schema
from persist.spark.write_job import Job, progress_of

# Snapshot reads: one Spark partition for each split, disjoint in key space and consolidated.
#
# There is deliberately no `pushFilters`: PySpark keeps one plan for a `load()` and would give filtered rows to a user
# of the DataFrame without that filter. Columns are pruned by the schema of the read, rows by options.


MULTIPLICITY = pa.field(DIFF, pa.int64())


class SplitPartition(InputPartition):
    """A split of a snapshot, with everything that an executor needs to read it."""

    def __init__(self, split: SnapshotSplit) -> None:
        super().__init__(split)
        self.split = split


class SnapshotReader(DataSourceReader):
    """Reads the columns of `schema` as of one time, which is fixed when Spark plans the load."""

    def __init__(self, target: Target, options: ReadOptions, schema: StructType, known: Known | None = None) -> None:
        self._target = target
        self._options = options
        self._schema = schema
        self._known = known  # by which `schema` was told; None: somebody has given it
        if options.with_diff and DIFF not in schema.names:
            raise InvalidUsage(f"multiplicity=column needs a column {DIFF} in the schema given to the read")

    def partitions(self) -> Sequence[InputPartition]:
        options = planning.with_times(self._target, self._options)
        schema = planning.shown(self._target, options)[1]
        columns = schema.columns(name for name in self._schema.names if name not in (TIME, DIFF))
        splits = planning.plan_snapshot(self._target, options, columns)
        for split in splits[:1]:
            self._check(split, columns)
        return [SplitPartition(split) for split in splits] or [InputPartition(None)]

    def _check(self, split: SnapshotSplit, columns: tuple[str, ...]) -> None:
        """Raise InvalidUsage where a name may mean another column than where the DataFrame was loaded."""
        if not self._options.then:
            planning.check_names(self._target, (*columns, *names_in(self._options.selection.where)), self._known, split)
        elif self._known is not None and split.schema_id != self._known.number:
            raise InvalidUsage(
                f"this DataFrame of shard {self._target.shard!r} shows another time by now, which has other columns: "
                "load() again"
            )

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, SplitPartition):
            return iter(())
        split = partition.split
        rows = self._rows(self._pieces(split), split)
        return batches(rows, arrow_schema(self._schema), self._options.batch_rows)

    def _pieces(self, split: SnapshotSplit) -> Iterator[pa.Table]:
        transport, batch_rows = executors.transport(self._target.connection), self._options.batch_rows

        def anew() -> Iterator[pa.Table]:
            return snapshot_again(self._target, split).read(transport, batch_rows)

        return outliving(split.read(transport, batch_rows), anew)

    def _rows(self, tables: Iterator[pa.Table], split: SnapshotSplit) -> Iterator[pa.Table]:
        for table in tables:
            if DIFF in self._schema.names:
                yield table
                continue
            if first_negative(table) is not None:
                raise self._negative(split)
            yield from expanded(table, self._options.batch_rows)

    def _negative(self, split: SnapshotSplit) -> InvalidUsage:
        """The error that names the key: read again, since the key need not be among the columns."""
        schema = shown_by(sound_schemas(split.schemas), split.schema_id)
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


class ChangesReader(DataSourceReader):
    """The change feed of `[startingVersion, endingVersion]`, both inclusive, fixed when Spark plans the load.

    So are startingTimestamp and endingTimestamp, rounded down to the shard's grid. Without a start the contents as of
    the shard's since come first, as changes at that time.
    """

    def __init__(self, target: Target, options: ReadOptions, schema: StructType, known: Known | None = None) -> None:
        self._target = target
        self._options = options
        self._schema = schema
        self._known = known  # as for a snapshot

    def partitions(self) -> Sequence[InputPartition]:
        target = self._target
        options = planning.with_times(target, self._options)
        view = executors.view_of(target)
        starting, ending = options.starting_version, options.ending_version
        lower = (view.since.element or 0) if starting is None else starting
        upper = view.upper if ending is None else frontier(ending + 1)
        if upper <= frontier(lower):
            return [InputPartition(None)]
        interval = Interval(lower, upper, starting is None)
        transport = OneShard(executors.transport(target.connection), view.shard_id)
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
        return splits or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, ChangesPartition):
            return iter(())
        return read_changes(self._target, self._options, self._schema, partition.split)


def snapshot_schema(schema: ShardSchema, options: ReadOptions) -> StructType:
    """The columns that a snapshot read shows when it is given no schema."""
    names = schema.columns(options.columns)
    fields = [schema.arrow.field(name) for name in names]
    return spark_schema([*fields, MULTIPLICITY] if options.with_diff else fields)


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
