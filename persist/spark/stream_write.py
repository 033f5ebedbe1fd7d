"""The streaming sink: every micro-batch is published exactly once.

The id of the query and the number of the batch are kept with the shard and change atomically with the data, so a batch
that is tried again, by this driver, a restarted one or a zombie, is recognised and skipped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from persist.core.errors import InvalidUsage
from persist.spark.jobs import Job, staged
from persist.spark.options import Target, WriteOptions

QUERY_ID = "sql.streaming.queryId"


class StreamWriter(DataSourceStreamArrowWriter):
    """Spark makes one for each batch, and another one to commit it: only the messages connect them."""

    def __init__(self, target: Target, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        self._job = Job.open(target, options, schema, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(QUERY_ID)
        if query is None:
            raise InvalidUsage("the task does not know its streaming query; a stream is written with writeStream")
        return self._job.stage(iterator, query)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        query = next((message.query for message in staged(messages)), None)
        if query is None:
            self._job.release(messages)
            raise InvalidUsage(f"no task of micro-batch {batchId} said which streaming query it belongs to")
        self._job.publish(messages, (f"spark query {query}", batchId), streams=True)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Hold nothing any more. The outcome of a commit may be unknown, and staged parts are orphans: both stay."""
        self._job.release(messages)
