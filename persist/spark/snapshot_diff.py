"""What a shard was: the changes between two times or two shards as a DataFrame, and its restore as a job.

The driver takes the leases and plans the splits. Executors read them: each is a range of keys, consolidated by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from persist.client.contents_diff import (
    Changes,
    ChangesSplit,
    DiffRequest,
    Named,
    PairSplit,
    changes_between,
    changes_of,
)
from persist.client.rewrites import check_complete
from persist.client.snapshot import SnapshotSplit
from persist.client.transport import OneShard
from persist.core.errors import InvalidUsage
from persist.core.ids import check_shard_name
from persist.core.shard_view import ShardView
from persist.parts import DIFF, current_schema
from persist.spark import executors, planning
from persist.spark.executors import carrying, lighter, outliving, past_again
from persist.spark.options import Options, PastOptions, Target
from persist.spark.spark_schemas import Known, arrow_schema, batches, spark_schema
from persist.spark.write_job import FORMAT, save

_OF_READS = ("numpartitions", "memorybytes", "leaseseconds")
MULTIPLICITY = pa.field(DIFF, pa.int64())


class PastPartition(InputPartition):
    """A key range of the changes, with everything that an executor needs to read it."""

    def __init__(self, split: ChangesSplit | PairSplit) -> None:
        super().__init__(split)
        self.split = split


class PastReader(DataSourceReader):
    """What is there more (`__diff` above 0) or less at `end` than at `start`. Both are fixed when Spark plans the load.

    The leases are not closed: Spark plans once and may read the plan again and again, so they lapse when nobody reads.
    """

    def __init__(self, target: Target, options: PastOptions, schema: StructType, known: Known | None = None) -> None:
        self._target = target
        self._options = options
        self._schema = schema
        self._known = known  # by which `schema` was told; None: somebody has given it
        if DIFF not in schema.names:
            raise InvalidUsage(
                f"the schema given to readChanges lacks the column {DIFF}, without which rows that were removed look "
                "as if they had been added; name it too"
            )

    def partitions(self) -> Sequence[InputPartition]:
        splits = self._changes().splits
        for split in splits[:1]:
            planned = split.earlier if isinstance(split, PairSplit) else split
            assert isinstance(planned, SnapshotSplit)
            planning.check_names(self._target, self._schema.names, self._known, planned)
        return [PastPartition(one) for one in map(_carrying, splits) if one] or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, PastPartition):
            return iter(())
        target, split, transport = self._target, partition.split, executors.transport(self._target.connection)
        tables = outliving(split.read(transport), lambda: past_again(target, split).read(transport))
        return batches(tables, arrow_schema(self._schema), self._options.read.batch_rows)

    def _changes(self) -> Changes:
        target, options = self._target, self._options
        settings, read = target.connection.handles.read, options.read
        one, limits = _opened(target), (read.wait_s, settings.retry_s)
        columns = tuple(name for name in self._schema.names if name != DIFF)
        asked = DiffRequest(read.partitions or planning.partitions_for, columns, read.wait_s, "spark changes")
        first = Named.of_read("option 'start'", options.start, one, target.shard, limits)
        if options.other in (None, target.shard):
            last = Named.of_read("option 'end'", options.end, one, target.shard, limits)
            return changes_of(one, target.shard, first, last, asked, settings)
        other = replace(target, shard=check_shard_name(options.other))
        two = _opened(other)
        last = Named.of_read("option 'end'", options.end, two, other.shard, limits)
        return changes_between((one, target.shard, first), (two, other.shard, last), asked, settings)


def changes_schema(view: ShardView, options: PastOptions) -> StructType:
    """The columns that changes show when they are given no schema."""
    schema = current_schema(view.schemas)[1]
    return spark_schema([*(schema.arrow.field(name) for name in schema.columns(options.read.columns)), MULTIPLICITY])


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
    given.check("a restore")
    named = Target.of(given)
    executors.check_there(named)
    target = named.at(writes=True)
    one, settings = _opened(target), target.connection.handles.read
    to = Named.of("as_of", as_of, one, shard, (0.0, settings.retry_s)).time
    view = executors.view_of(target)
    upper = check_complete(shard, to, view)
    reads = {name: value for name, value in options.items() if name.lower() not in ("info", "partbytes")}
    reads |= {"readChanges": "true", "start": str(upper - 1), "end": str(to)}
    writes = {name: value for name, value in options.items() if name.lower() not in _OF_READS}
    writes |= {"restoreTo": str(to), "expectedUpper": str(upper)}
    changes = spark.read.format(FORMAT).options(**reads).load(shard)
    save(spark, changes, "append", shard, writes)


def _opened(target: Target) -> OneShard:
    return OneShard(executors.transport(target.connection), executors.view_of(target).shard_id)


def _carrying(split: object) -> ChangesSplit | PairSplit | None:
    """The split with only those parts that it reads. None: there are no keys in it."""
    if isinstance(split, PairSplit):
        earlier, later = (lighter(side, side.key_range) for side in (split.earlier, split.later))
        return None if earlier.key_range.is_empty else replace(split, earlier=earlier, later=later)
    assert isinstance(split, ChangesSplit)
    if split.key_range.is_empty:
        return None
    return carrying(split, split.key_range)
