"""A write job: its plain settings, what its tasks stage, and the one commit that publishes it.

Executors stage parts straight in the blob store; the driver publishes them once. A task's retry or twin leaves at most
parts that nobody names, which the orphan sweep takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from persist.client.connect import Client
from persist.client.transport import OneShard
from persist.client.write import WriteHandle
from persist.core.antichain import EMPTY, frontier
from persist.core.attribute import AttributeUpdate, named_key
from persist.core.batch import Run
from persist.core.commands import AttributeValues, ReadAttributes
from persist.core.errors import AttributeMismatch, Indeterminate, InvalidUsage, UnknownShard, UpperMismatch
from persist.core.ids import ShardId, Token, WriterId, incarnation_of, mint
from persist.core.phases import outlived
from persist.core.recorded import NOBODY, Caller
from persist.core.state import SchemaRecord
from persist.core.view import ShardView
from persist.parts import DIFF, TIME, ShardSchema, current_schema
from persist.spark import executors, replacing, telling
from persist.spark.options import Target, WriteOptions, listed
from persist.spark.schemas import stored_schema

Runs = tuple[Run, ...]
REPLACE_NOTHING, REPLACE_KEYS, REPLACE_ALL = "nothing", "keys", "all"


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What one task staged: runs, with inline rows in them.

    `claims` are runs of the keys that the task replaces, `base` what it saw of the shard, `query` the streaming query.
    """

    shard_id: ShardId
    runs: Runs
    claims: Runs
    base: replacing.Base | None = None
    query: str | None = None
    told: Mapping[str, str] = field(default_factory=dict)  # of the application


def staged(messages: Sequence[WriterCommitMessage | None]) -> list[Staged]:
    return [message for message in messages if isinstance(message, Staged)]


@dataclass(frozen=True)
class Job:
    """One job's plain settings, the same in every task and, where Spark keeps the writer, in the commit."""

    target: Target
    options: WriteOptions
    replaces: str
    writer: WriterId
    token: Token
    schema_id: int
    record: SchemaRecord
    base: replacing.Base | None
    shard_id: ShardId

    @classmethod
    def open(cls, target: Target, options: WriteOptions, schema: StructType, overwrite: bool) -> Job:
        """Find the shard, or create it from the DataFrame's schema; check that the columns fit."""
        if overwrite and (options.upsert or options.expected_upper is not None):
            raise InvalidUsage("mode 'overwrite' replaces everything at a time of its own; use mode 'append' instead")
        replaces = REPLACE_ALL if overwrite else REPLACE_KEYS if options.upsert else REPLACE_NOTHING
        _check_roles(schema, options)
        transport = executors.transport(target.connection)
        view = _found_or_created(target, options, schema)
        schema_id, current = current_schema(view.schemas)
        _check_columns(schema, current, options, target.shard)
        base = None if replaces == REPLACE_NOTHING else replacing.Base.take(target, view)
        writer, token = mint(WriterId, transport.ids), mint(Token, transport.ids)
        return cls(target, options, replaces, writer, token, schema_id, view.schemas[schema_id], base, view.shard_id)

    @property
    def schema(self) -> ShardSchema:
        return ShardSchema.from_record(self.record)

    @property
    def transport(self) -> OneShard:
        return OneShard(executors.transport(self.target.connection), self.shard_id)

    def handle(self, caller: Caller = NOBODY) -> WriteHandle:
        """The job's writer, in this process."""
        known = (self.schema_id, self.schema)
        settings = self.target.connection.handles.write
        return WriteHandle(self.transport, self.target.shard, lambda: known, settings, self.writer, caller)

    def stage(self, batches: Iterable[pa.RecordBatch], query: str | None = None) -> Staged:
        """Write a task's rows as parts that nobody sees yet."""
        executors.settle_to_write()
        rows = self._renamed(batches)
        if self.replaces != REPLACE_KEYS:
            handle = self.handle()
            time = self.options.expected_upper if self.options.restores is None else None  # the commit names it
            runs = handle.stage_for_one_commit(rows, time)
            return Staged(self.shard_id, handle.receipted(runs), (), self.base, query, telling.task_tells())
        assert self.base is not None
        handle = self.handle()
        runs, claims = self._replacement(self.base, handle).stage_upsert(rows, self.options.delete_column)
        return Staged(self.shard_id, handle.receipted(runs), claims, self.base, query, telling.task_tells())

    def publish(
        self, messages: Sequence[WriterCommitMessage | None], progress: tuple[str, int] | None, *, streams: bool = False
    ) -> bool:
        """Commit what the tasks staged, once; False when the progress says that it was committed before.

        `progress` is a name and a number that grows: both are kept with the shard, and change with the data.
        Where it `streams` the progress alone, not a writer's record, recognises a second try: so micro-batches share
        one writer, and one that is this job's own is retired. However it ends, the job holds nothing of the shard then.
        """
        done = staged(messages)
        runs = tuple(run for message in done for run in message.runs)
        attributes = () if progress is None else (progress_update(*progress),)
        try:
            if any(message.shard_id != self.shard_id for message in done):  # inline rows do not tell whose they are
                raise UnknownShard(outlived(self.target.shard))
            follows = progress is not None and streams and self._follows(*progress)
            caller = self._caller(done, streams)
            if self.replaces != REPLACE_NOTHING:
                self._replace(done, runs, attributes, caller, retire=streams)
            elif self.options.restores is not None:
                self._restore(runs, self.options.restores, caller)
            elif self.options.expected_upper is not None:
                upper = EMPTY if self.options.closes else frontier(self.options.new_upper)
                self.handle(caller).commit_compare_and_append(
                    runs, self.options.expected_upper, upper, token=self.token, attributes=attributes
                )
            elif runs and streams:
                executors.kept_writer(self.target, self.shard_id, caller).commit_insert(runs, attributes=attributes)
            elif runs:
                self.handle(caller).commit_insert(runs, token=self.token, attributes=attributes)
            if follows and not runs and not any(message.claims for message in done):  # no commit has told it
                executors.kept_writer(self.target, self.shard_id, caller).update_attributes(attributes)
        except AttributeMismatch:
            return False
        except Indeterminate as error:
            # A number as high is there already. It never becomes less, so what is still under way cannot land.
            if error.details.get("refused") != AttributeMismatch.kind:
                raise
            return False
        finally:
            self.release(messages)
        return True

    def release(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Give back what the job and the tasks that sent these messages hold of the shard. Repeating it is safe.

        These are two holds where Spark commits a micro-batch by another writer than the one that it sent to the tasks.
        A commit that is still under way needs neither. A hold of which no message tells lapses. Raises nothing.
        """
        for base in {self.base, *(message.base for message in staged(messages))}:
            if base is not None:
                base.lease(self.target).close()

    def _follows(self, name: str, number: int) -> bool:
        """Whether micro-batches have to follow one another here: in the later lives of a name.

        Raises UnknownShard if this one follows those that an earlier shard of this name took. What it replaces as a
        whole may follow anything.
        """
        if incarnation_of(self.target.shard, self.shard_id) == 0 or self.replaces == REPLACE_ALL:
            return False
        if number > 0:
            key = named_key(name)
            found = self.transport.apply(self.target.shard, ReadAttributes((key,)))
            assert isinstance(found, AttributeValues)
            if found.values[key] is None:
                raise UnknownShard(
                    f"micro-batch {number} is the first of its streaming query that shard {self.target.shard!r} sees: "
                    "the earlier ones went to another shard of this name, which was dropped. Begin with a new "
                    "checkpoint, or write to another shard"
                )
        return True

    def _replace(
        self,
        done: Sequence[Staged],
        runs: Runs,
        attributes: tuple[AttributeUpdate, ...],
        caller: Caller,
        *,
        retire: bool,
    ) -> None:
        base = next((message.base for message in done if message.base is not None), self.base)
        assert base is not None
        claims = tuple(run for message in done for run in message.claims)
        if self.replaces == REPLACE_KEYS and not claims:
            return
        replaced = None if self.replaces == REPLACE_ALL else claims
        handle = self.handle(caller)
        try:
            self._replacement(base, handle).publish(runs, replaced, self.token, attributes)
        finally:
            if retire:
                handle.close()

    def _restore(self, runs: Runs, as_of: int, caller: Caller) -> None:
        """Where nothing differs nothing is committed."""
        expected = self.options.expected_upper
        assert expected is not None
        if runs:
            self.handle(caller).commit_restore(runs, as_of, expected, token=self.token)

    def _caller(self, done: Sequence[Staged], streams: bool) -> Caller:
        """What the commit history is told of the job."""
        told = next((message.told for message in done if message.told), {})
        return telling.caller("spark stream" if streams else "spark job", told, self.options.info)

    def _replacement(self, base: replacing.Base, handle: WriteHandle) -> replacing.Replacement:
        return replacing.Replacement(self.target, base, handle, self.schema)

    def _renamed(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches with the time and diff columns under the names that a shard gives them."""
        renames = self.options.renames
        for batch in batches:
            yield batch.rename_columns([renames.get(name, name) for name in batch.schema.names])


def progress_update(name: str, number: int) -> AttributeUpdate:
    """The condition by which a numbered piece of work is committed at most once, in order."""
    return AttributeUpdate.replace_if_greater(named_key(name), number)


def _found_or_created(target: Target, options: WriteOptions, schema: StructType) -> ShardView:
    try:
        view = executors.view_of(target)
    except UnknownShard as error:
        if options.restores is not None:
            raise UnknownShard(f"shard {target.shard!r} does not exist, so it cannot be restored") from error
        if options.expected_upper:
            raise UpperMismatch(
                f"shard {target.shard!r} does not exist: when it is created its upper is [0], not the expected "
                f"[{options.expected_upper}]; give expectedUpper=0, or leave it out",
                expected=[options.expected_upper],
                actual=[0],
            ) from error
        if options.key is None:
            raise InvalidUsage(
                f"shard {target.shard!r} does not exist; to create it from the DataFrame, name its key columns: "
                "option('key', 'id')"
            ) from None
        apart = [n for n in (TIME, DIFF, options.time_column, options.diff_column, options.delete_column) if n]
        client = Client(executors.transport(target.connection), target.connection.handles)
        client.create_shard(target.shard, stored_schema(schema, apart), options.key, history=options.history)
        return executors.view_of(target)
    found = current_schema(view.schemas)[1].key
    if options.key is not None and options.key != found:
        raise InvalidUsage(f"shard {target.shard!r} has the key ({listed(found)}), not ({listed(options.key)})")
    return view


def _renamed(schema: StructType, options: WriteOptions) -> list[str]:
    """The DataFrame's columns as a shard names them."""
    return [options.renames.get(column, column) for column in schema.names if column != options.delete_column]


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
    given = _renamed(schema, options)
    if len(set(given)) != len(given):
        raise InvalidUsage(f"a column occurs twice in {given}")
    if options.restores is not None and DIFF not in given:
        raise InvalidUsage(
            f"rows with restoreTo need the column {DIFF}, as readChanges gives it: it tells what is added and what goes"
        )
    if TIME in given and options.expected_upper is None:
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
