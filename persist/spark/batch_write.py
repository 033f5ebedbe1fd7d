"""Batch writes: append, replace by key (`envelope=upsert`), and overwrite; each is one commit.

The token of the commit is fixed when Spark makes the writer, so whatever is retried, the job is published once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from persist.spark.jobs import Job, progress_of
from persist.spark.options import Target, WriteOptions

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
