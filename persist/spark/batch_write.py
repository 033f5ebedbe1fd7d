"""Batch writes: executors stage parts straight in the blob store, the driver publishes them once.

The token of the commit is fixed when Spark makes the writer, so whatever is retried, the job is published once. A
task's retry or twin leaves at most parts that nobody names, which the orphan sweep takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from persist import records
from persist.antichain import EMPTY, Antichain
from persist.batch import Run
from persist.client import Client
from persist.errors import InvalidUsage, UnknownShard
from persist.handles import Shard
from persist.ids import Token, WriterId
from persist.parts import DIFF, TIME, ShardSchema
from persist.spark import executors
from persist.spark.options import Target, WriteOptions, listed
from persist.spark.schemas import stored_schema
from persist.state import SchemaRecord
from persist.writing import WriteHandle

Runs = tuple[Run, ...]


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What one task staged: runs as JSON (`persist.records`), with inline rows in them."""

    runs: Any
    rows: int = 0

    @classmethod
    def of(cls, runs: Runs) -> Staged:
        return cls(records.encode(runs, Runs), sum(part.rows for run in runs for part in run.parts))


def staged_runs(messages: Sequence[WriterCommitMessage | None]) -> Runs:
    """The runs of all tasks."""
    found: list[Run] = []
    for message in messages:
        if isinstance(message, Staged):
            found.extend(records.decode(message.runs, Runs))
    return tuple(found)


@dataclass(frozen=True)
class Job:
    """One job's plain settings, the same in every task and in the commit."""

    target: Target
    options: WriteOptions
    writer: WriterId
    token: Token
    schema_id: int
    record: SchemaRecord

    @classmethod
    def open(cls, target: Target, options: WriteOptions, schema: StructType) -> Job:
        """Find the shard, or create it from the DataFrame's schema; check that the columns fit."""
        _check_roles(schema, options)
        door = executors.transport(target.connection)
        shard_schema = _found_or_created(target, options, schema)
        _check_columns(schema, shard_schema, options, target.shard)
        view = executors.view_of(target)
        record = view.schemas[view.schema_id]
        return cls(target, options, WriterId.mint(door.ids), Token.mint(door.ids), view.schema_id, record)

    @property
    def schema(self) -> ShardSchema:
        return ShardSchema.from_record(self.record)

    def handle(self) -> WriteHandle:
        """The job's writer, in this process."""
        known = (self.schema_id, self.schema)
        settings = self.target.connection.handles.write
        door = executors.transport(self.target.connection)
        return WriteHandle(door, self.target.shard, lambda: known, settings, self.writer)

    def stage(self, batches: Iterable[pa.RecordBatch]) -> Runs:
        """Write a task's rows as parts that nobody sees yet."""
        return self.handle().stage(self.renamed(batches), self.options.expected_upper)

    def renamed(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches with the time and diff columns under the names that a shard gives them."""
        renames = {self.options.time_column: TIME, self.options.diff_column: DIFF}
        for batch in batches:
            yield batch.rename_columns([renames.get(name, name) for name in batch.schema.names])

    def shard(self) -> Shard:
        connection = self.target.connection
        return Client(executors.transport(connection), connection.handles).shard(self.target.shard)


class BatchWriter(DataSourceArrowWriter):
    """Append: the service chooses the time, or `[expectedUpper, newUpper)` is compared and appended."""

    def __init__(self, target: Target, options: WriteOptions, schema: StructType) -> None:
        self._job = Job.open(target, options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return Staged.of(self._job.stage(iterator))

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        runs = staged_runs(messages)
        job = self._job
        handle = job.handle()
        expected = job.options.expected_upper
        if expected is not None:
            upper = EMPTY if job.options.closes else Antichain(job.options.new_upper)
            handle.commit_compare_and_append(runs, expected, upper, token=job.token)
        elif runs:
            handle.commit_insert(runs, token=job.token)
        # The writer is left to lapse: its record is what tells a commit that is tried again that it happened.

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Nothing: Spark calls this also after a commit whose outcome it does not know. Staged parts are orphans."""


def _found_or_created(target: Target, options: WriteOptions, schema: StructType) -> ShardSchema:
    try:
        found = executors.current_schema(executors.view_of(target))
    except UnknownShard:
        if options.key is None:
            raise InvalidUsage(
                f"shard {target.shard!r} does not exist; to create it from the DataFrame, name its key columns: "
                "option('key', 'id')"
            ) from None
        apart = [n for n in (TIME, DIFF, options.time_column, options.diff_column, options.delete_column) if n]
        client = Client(executors.transport(target.connection), target.connection.handles)
        return client.create_shard(target.shard, stored_schema(schema, apart), options.key).schema
    if options.key is not None and options.key != found.key:
        raise InvalidUsage(f"shard {target.shard!r} has the key ({listed(found.key)}), not ({listed(options.key)})")
    return found


def _renamed(schema: StructType, options: WriteOptions) -> list[str]:
    """The DataFrame's columns as a shard names them."""
    renames = {options.time_column: TIME, options.diff_column: DIFF}
    return [renames.get(column, column) for column in schema.names if column != options.delete_column]


def _check_roles(schema: StructType, options: WriteOptions) -> None:
    """Whether the columns that options name are there, before a shard is made for them."""
    roles = {
        "timeColumn": options.time_column,
        "diffColumn": options.diff_column,
        "deleteColumn": options.delete_column,
    }
    for role, column in roles.items():
        if column is not None and column not in schema.names:
            raise InvalidUsage(f"option {role!r} names {column!r}, which is not a column of the DataFrame")
    if TIME in _renamed(schema, options) and options.expected_upper is None:
        raise InvalidUsage(f"rows with times need options expectedUpper and newUpper; or drop the column {TIME}")


def _check_columns(schema: StructType, shard: ShardSchema, options: WriteOptions, name: str) -> None:
    """Whether the DataFrame's columns are the shard's, with times and diffs where they are allowed."""
    given = _renamed(schema, options)
    unknown = [column for column in given if column not in (*shard.arrow.names, TIME, DIFF)]
    missing = [column for column in shard.arrow.names if column not in given]
    if unknown:
        raise InvalidUsage(f"shard {name!r} has no column {unknown[0]!r}; its columns are {listed(shard.arrow.names)}")
    if missing:
        raise InvalidUsage(f"the DataFrame lacks the column {missing[0]!r} of shard {name!r}")
    if len(set(given)) != len(given):
        raise InvalidUsage(f"a column occurs twice in {given}")
