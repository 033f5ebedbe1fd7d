"""A write job: its settings, what its tasks stage, and the one commit that publishes it."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from persist.client.commit_info import HistoryEntry, info_bytes
from persist.client.connect import Client
from persist.client.idempotency import send
from persist.client.schema_api import ALTER_TRIES
from persist.client.transport import OneShard
from persist.client.write import WriteHandle
from persist.core.attribute import AttributeUpdate, named_key
from persist.core.audit_log import NOBODY, Caller
from persist.core.batch import Run
from persist.core.commands import RESTORE, AttributeValues, ReadAttributes
from persist.core.errors import (
    AttributeMismatch,
    Indeterminate,
    InvalidUsage,
    SchemaMismatch,
    UnknownShard,
    UpperMismatch,
)
from persist.core.frontier import frontier
from persist.core.ids import ShardId, Token, WriterId, incarnation_of, mint
from persist.core.phases import outlived
from persist.core.shard_view import ShardView
from persist.core.state import SchemaRecord
from persist.parts import DIFF, TIME, ShardSchema, current_schema
from persist.spark import executors, upsert
from persist.spark.change_feed import CHANGE_COLUMNS
from persist.spark.options import SchemaMode, Target, WriteOptions, listed
from persist.spark.spark_schemas import check_collations, stored_schema
from persist.spark.store_assignment import can_be_absent, evolve, merged, named_as, overwritten
from persist.spark.upsert import lasting

# What the commit history is told of a write by Spark, besides what the caller says: application, job and user.
#
# Only tasks know them: whoever commits is a process of its own that Spark tells nothing. So tasks send it along.


TEXT_MAX = 200  # characters of each
_PROPERTIES = {
    "application": "spark.app.id",
    "job": "spark.job.description",
    "group": "spark.jobGroup.id",
    "execution": "spark.sql.execution.id",
    "query": "sql.streaming.queryId",
}


def task_tells() -> dict[str, str]:
    """What this task knows of its application; empty outside of a task."""
    context = TaskContext.get()
    if context is None:
        return {}
    found = {name: context.getLocalProperty(known) for name, known in _PROPERTIES.items()}
    return {name: value[:TEXT_MAX] for name, value in (found | {"user": _user()}).items() if value}


def options_tell(options: WriteOptions) -> dict[str, str]:
    """What the options of a write say of itself, by which it is found again."""
    found = {} if options.write_id is None else {"write": options.write_id}
    return found if options.txn is None else found | transaction_told(options.txn)


def transaction_told(txn: tuple[str, int]) -> dict[str, str]:
    """What the commit history tells of a transaction."""
    return {"txnAppId": txn[0][:TEXT_MAX], "txnVersion": str(txn[1])}


def caller(purpose: str, told: Mapping[str, str], info: bytes) -> Caller:
    """Who writes. What Spark tells stands under `spark`, unless `info` has that itself, or there is no room for it."""
    if told:
        both = {"spark": dict(told), **(json.loads(info) if info else {})}
        with suppress(InvalidUsage):
            return Caller(purpose=purpose, info=info_bytes("option 'info'", both))
    return Caller(purpose=purpose, info=info)


def _user() -> str:
    """The user of the process that runs the task."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run under a number without a name
        return str(os.getuid())


# A write job: its plain settings, what its tasks stage, and the one commit that publishes it.
#
# Executors stage parts straight in the blob store; the driver publishes them once. A task's retry or twin leaves at
# most parts that nobody names, which the orphan sweep takes.


Runs = tuple[Run, ...]
Attributes = tuple[AttributeUpdate, ...]
REPLACE_NOTHING, REPLACE_KEYS, REPLACE_ALL = "nothing", "keys", "all"


@dataclass(frozen=True)
class StagedTask(WriterCommitMessage):
    """What one task staged: runs, with inline rows in them.

    `claims` are runs of the keys that the task replaces, and `left` those of them whose old rows it has not retracted;
    `base` is what it saw of the shard, `query` the streaming query.
    """

    shard_id: ShardId
    runs: Runs
    claims: Runs
    base: upsert.Base | None = None
    query: str | None = None
    told: Mapping[str, str] = field(default_factory=dict)  # of the application
    left: Runs = ()


def staged(messages: Sequence[WriterCommitMessage | None]) -> list[StagedTask]:
    return [message for message in messages if isinstance(message, StagedTask)]


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
    base: upsert.Base | None
    shard_id: ShardId
    is_taken: bool = False  # its transaction was committed before: nothing is left to do
    names: tuple[tuple[str, str], ...] = ()  # of the DataFrame's columns that the shard calls otherwise, with those
    before: upsert.Before | None = None  # the columns that those of this job take the place of; None: they stay

    @classmethod
    def open(cls, target: Target, options: WriteOptions, schema: StructType, overwrite: bool) -> Job:
        """Find the shard, or create it from the DataFrame's schema; check that the columns fit.

        A transaction that was committed before is nothing but skipped, whatever the shard is like by now.
        """
        if overwrite and options.rewrites:
            raise InvalidUsage("option 'rewrites' means nothing with mode 'overwrite', which replaces everything")
        if overwrite and (options.upsert or options.time_column or options.restores is not None or options.moves_upper):
            raise InvalidUsage("mode 'overwrite' replaces everything at a time of its own; use mode 'append' instead")
        replaces = REPLACE_ALL if overwrite else REPLACE_KEYS if options.upsert else REPLACE_NOTHING
        if options.schema is SchemaMode.OVERWRITE and not overwrite:
            raise InvalidUsage("option 'overwriteSchema' needs mode 'overwrite': columns go only where all rows do")
        _check_roles(schema, options)
        transport = executors.transport(target.connection)
        view = _found_or_created(target, options, schema)
        taken = options.txn is not None and is_committed(target, view.shard_id, progress_of(options.txn))
        if not taken and options.schema is not SchemaMode.OVERWRITE:
            view = _fitting(target, options, schema, view)
        schema_id, current = current_schema(view.schemas)
        names = named_as(schema, options, current, target.shard)
        record, before = view.schemas[schema_id], None
        if options.schema is SchemaMode.OVERWRITE and not taken:
            planned = overwritten(schema, options, current, target.shard)
            _check_columns(schema, planned, options, target.shard, names)
            if planned != current:
                before = upsert.Before(schema_id, record, view.schema_id)
                schema_id, record = view.schema_id + 1, planned.to_record()
        base = None if taken else _base(target, view, options, replaces)
        writer, token = mint(WriterId, transport.ids), mint(Token, transport.ids)
        about = (schema_id, record, base, view.shard_id, taken, tuple(names.items()), before)
        return cls(target, options, replaces, writer, token, *about)

    @property
    def schema(self) -> ShardSchema:
        return ShardSchema.from_record(self.record)

    @property
    def transport(self) -> OneShard:
        return executors.one_shard(self.target, self.shard_id)

    def handle(self, caller: Caller = NOBODY) -> WriteHandle:
        """The job's writer, in this process."""
        known = (self.schema_id, self.schema)
        settings = self.target.connection.handles.write
        return WriteHandle(self.transport, self.target.shard, lambda: known, settings, self.writer, caller)

    def stage(self, batches: Iterable[pa.RecordBatch], query: str | None = None) -> StagedTask:
        """Write a task's rows as parts that nobody sees yet."""
        executors.freeze_loaded()
        rows = self._renamed(batches)
        if self.is_taken:
            for _ in rows:  # Spark's worker wants its input to be read
                pass
            return StagedTask(self.shard_id, (), (), None, query, task_tells())
        if self.replaces != REPLACE_KEYS:
            handle = self.handle()
            options = self.options
            names_it = self.replaces == REPLACE_ALL or options.restores is not None or options.rewrites is not None
            time = None if names_it else options.first_time  # else the commit names it
            runs = handle.stage_for_one_commit(rows, time, by_rows=False)
            if self.before is None:  # of columns that are to come nobody can tell yet
                runs = handle.receipted(runs)
            return StagedTask(self.shard_id, runs, (), self.base, query, task_tells())
        assert self.base is not None
        handle = self.handle()
        did = self._replacement(self.base, handle).stage_upsert(rows, self.options.delete_column)
        runs, told = handle.receipted(did.runs), task_tells()
        return StagedTask(self.shard_id, runs, did.claims, self.base, query, told, did.left)

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
        attributes = (
            () if progress is None else (AttributeUpdate.replace_if_greater(named_key(progress[0]), progress[1]),)
        )
        try:
            if any(message.shard_id != self.shard_id for message in done):  # inline rows do not tell whose they are
                raise UnknownShard(outlived(self.target.shard))
            if (
                progress is not None and not streams and is_committed(self.target, self.shard_id, progress)
            ):  # before anything else is looked at
                return False
            follows = progress is not None and streams and self._follows(*progress)
            caller = self._caller(done, streams)
            if self.options.rewrites:
                runs = lasting(self.target, runs, self.schema)
            self._commit(done, runs, attributes, caller, streams=streams)
            if runs or any(message.claims for message in done):
                return True
            if follows:  # no commit has told it
                executors.shared_writer(self.target, self.shard_id, caller).update_attributes(attributes)
            elif attributes and not streams and not self._commits_without_rows:
                self.handle(caller).update_attributes(attributes, token=self.token)
        except AttributeMismatch:
            return False
        except UpperMismatch:
            if progress is None or not is_committed(
                self.target, self.shard_id, progress
            ):  # another try of it may have landed meanwhile
                raise
            return False
        except Indeterminate as error:
            # A number as high is there already. It never becomes less, so what is still under way cannot land.
            if error.details.get("refused") != AttributeMismatch.kind:
                raise
            return False
        finally:
            self.release(messages)
        return True

    @property
    def _commits_without_rows(self) -> bool:
        """Whether a job without rows changes the shard all the same."""
        names_upper = self.options.first_time is not None and self.replaces == REPLACE_NOTHING
        return self.replaces == REPLACE_ALL or (names_upper and not self.options.rewrites)

    def _commit(
        self, done: Sequence[StagedTask], runs: Runs, attributes: Attributes, caller: Caller, *, streams: bool
    ) -> None:
        """The one commit; none where there is nothing to do."""
        if self.replaces != REPLACE_NOTHING:
            self._replace(done, runs, attributes, caller, retire=streams)
        elif self.options.restores is not None:
            assert self.options.expected_upper is not None
            if runs:  # where nothing differs nothing is committed
                restores, expected = self.options.restores, self.options.expected_upper
                self.handle(caller).commit_rewrite(runs, expected, operation=RESTORE, token=self.token, undoes=restores)
        elif self.options.append is not None:
            self.handle(caller).commit_append(runs, *self.options.append, token=self.token)
        elif self.options.rewrites is not None:
            if runs:
                verb, before = self.options.rewrites, self.options.expected_upper
                self.handle(caller).commit_rewrite(
                    runs, before, operation=verb, token=self.token, attributes=attributes
                )
        elif self.options.conditional is not None:
            expected, upper = self.options.conditional
            self.handle(caller).commit_compare_and_append(
                runs, expected, upper, token=self.token, attributes=attributes
            )
        elif runs and streams:
            executors.shared_writer(self.target, self.shard_id, caller).commit_insert(runs, attributes=attributes)
        elif runs:
            self.handle(caller).commit_insert(runs, token=self.token, attributes=attributes)

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
        self, done: Sequence[StagedTask], runs: Runs, attributes: Attributes, caller: Caller, *, retire: bool
    ) -> None:
        base = next((message.base for message in done if message.base is not None), self.base)
        assert base is not None
        claims = tuple(run for message in done for run in message.claims)
        if self.replaces == REPLACE_KEYS and not claims:
            return
        replaced = None if self.replaces == REPLACE_ALL else claims
        handle = self.handle(caller)
        verb = "overwrite" if replaced is None else "upsert"
        commit = upsert.ReplacementCommit(verb, self.token, attributes, self.options.expected_upper is not None)
        left = tuple(run for message in done for run in message.left)
        try:
            self._replacement(base, handle).publish(runs, replaced, left, commit)
        finally:
            if retire:
                handle.close()

    def _caller(self, done: Sequence[StagedTask], streams: bool) -> Caller:
        """What the commit history is told of the job."""
        told = next((message.told for message in done if message.told), {})
        told = {**told, **options_tell(self.options)}
        return caller("spark stream" if streams else "spark job", told, self.options.info)

    def _replacement(self, base: upsert.Base, handle: WriteHandle) -> upsert.Replacement:
        return upsert.Replacement(self.target, base, handle, self.schema, self.before)

    def _renamed(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches with the time and diff columns under the names that a shard gives them."""
        renames = dict(self.names)
        for batch in batches:
            yield batch.rename_columns([renames.get(name, name) for name in batch.schema.names])


def progress_of(txn: tuple[str, int]) -> tuple[str, int]:
    """The name and the number by which a shard knows a transaction of an application."""
    return f"spark application {txn[0]}", txn[1]


def is_committed(target: Target, shard: ShardId, progress: tuple[str, int]) -> bool:
    """Whether the work of this name and number, or a later number, was committed. Once true, it stays true."""
    key = named_key(progress[0])
    retry_s = target.connection.handles.write.retry_s
    attributes = send(executors.one_shard(target, shard), target.shard, ReadAttributes((key,)), retry_s)
    assert isinstance(attributes, AttributeValues)
    value = attributes.values[key]
    return value is not None and value >= progress[1]


def _base(target: Target, view: ShardView, options: WriteOptions, replaces: str) -> upsert.Base | None:
    """What a job that replaces rows goes by. Raises UpperMismatch where others wrote after what its user has read."""
    if replaces == REPLACE_NOTHING:
        return None
    _check_upper(target, view, options)
    return upsert.Base.take(target, view)


def _check_upper(target: Target, view: ShardView, options: WriteOptions) -> None:
    expected = options.expected_upper
    if expected is not None and view.upper != frontier(expected):
        raise UpperMismatch(
            f"shard {target.shard!r} has upper {view.upper}, not the expected [{expected}]: somebody wrote after what "
            "you have read; read it again and decide anew",
            expected=[expected],
            actual=view.upper.to_json(),
        )


def _fitting(target: Target, options: WriteOptions, schema: StructType, view: ShardView) -> ShardView:
    """The shard with columns that take the DataFrame's: by `mergeSchema` it gets those that it lacks, by one commit.

    Raises InvalidUsage and UpperMismatch, and changes nothing then: a write that cannot land leaves no column behind.
    """
    for _ in range(ALTER_TRIES):
        current = current_schema(view.schemas)[1]
        planned = merged(schema, options, current, target.shard) if options.schema is SchemaMode.MERGE else current
        _check_columns(schema, planned, options, target.shard, named_as(schema, options, planned, target.shard))
        if planned == current:
            return view
        _check_upper(target, view, options)
        with suppress(SchemaMismatch):  # others change them too: what is planned goes by theirs
            evolve(target, view, planned)
        view = executors.view_of(target)
    raise SchemaMismatch(f"the columns of shard {target.shard!r} are changed all the time; write the DataFrame again")


def _found_or_created(target: Target, options: WriteOptions, schema: StructType) -> ShardView:
    try:
        view = executors.view_of(target)
    except UnknownShard as error:
        if options.restores is not None:
            raise UnknownShard(f"shard {target.shard!r} does not exist, so it cannot be restored") from error
        if options.first_time:
            raise UpperMismatch(
                f"shard {target.shard!r} does not exist: when it is created its upper is [0], not the expected "
                f"[{options.first_time}]; begin at 0, or let the service choose the time",
                expected=[options.first_time],
                actual=[0],
            ) from error
        if options.key is None:
            raise InvalidUsage(
                f"shard {target.shard!r} does not exist; to create it from the DataFrame, name its key columns: "
                "option('key', 'id')"
            ) from None
        _check_new(schema, target.shard)
        apart = [n for n in (TIME, DIFF, options.time_column, options.diff_column, options.delete_column) if n]
        client = Client(executors.transport(target.connection), target.connection.handles)
        client.create_shard(
            target.shard,
            stored_schema(schema, apart),
            options.key,
            history=options.history,
            unique=bool(options.constraints.unique),
            checks={check.name: check.where for check in options.constraints.checks or ()},
        )
        return executors.view_of(target)
    return view


def _check_new(schema: StructType, shard: str) -> None:
    """Whether a change feed of a new shard could show the columns beside its own."""
    for name in schema.names:
        if name in CHANGE_COLUMNS:
            raise InvalidUsage(
                f"shard {shard!r} cannot have a column {name!r}: a change feed has one of that name; drop it, or give "
                f"it another name: df.withColumnRenamed({name!r}, ...)"
            )


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
    if TIME in schema.names and options.time_column != TIME:
        raise InvalidUsage(
            f"the DataFrame has a column {TIME}, the name of times: rows with times need options expectedUpper and "
            f"newUpper, or appendLower and appendUpper, and timeColumn={TIME}; or drop the column"
        )
    if DIFF in schema.names and options.diff_column != DIFF and options.restores is None:
        raise InvalidUsage(
            f"the DataFrame has a column {DIFF}, the name of how often a row occurs: if it is that, give "
            f"diffColumn={DIFF}; or drop the column"
        )
    if options.restores is not None and DIFF not in given:
        raise InvalidUsage(
            f"rows with restoreTo need the column {DIFF}, as readDiff gives it: it tells what is added and what goes"
        )


def _check_columns(
    schema: StructType, shard: ShardSchema, options: WriteOptions, name: str, names: Mapping[str, str]
) -> None:
    """Whether the DataFrame's columns are the shard's, with times and diffs where they are allowed."""
    if options.key is not None and options.key != shard.key:
        raise InvalidUsage(f"shard {name!r} has the key ({listed(shard.key)}), not ({listed(options.key)})")
    check_collations(schema)
    given = [names.get(column, column) for column in schema.names if column != options.delete_column]
    if len(set(given)) != len(given):
        raise InvalidUsage(f"two columns of the DataFrame are one of shard {name!r}: {listed(given)}; drop one")
    unknown = [column for column in given if column not in (*shard.arrow.names, TIME, DIFF)]
    missing = [column for column in shard.arrow.names if column not in given]
    if unknown and unknown[0] in CHANGE_COLUMNS:
        raise InvalidUsage(
            f"the DataFrame has the column {unknown[0]!r} of a change feed, which no shard has; drop it. To write what "
            f"a feed tells, give diffColumn={DIFF}"
        )
    if unknown:
        if unknown[0] in dict(shard.former):
            raise shard.no_column(unknown[0])
        raise InvalidUsage(f"shard {name!r} has no column {unknown[0]!r}; its columns are {listed(shard.arrow.names)}")
    needed = [column for column in missing if not can_be_absent(shard, column)]
    if needed:
        raise InvalidUsage(f"the DataFrame lacks the column {needed[0]!r} of shard {name!r}")
    if missing and options.upsert:
        raise InvalidUsage(
            f"the DataFrame lacks the column {missing[0]!r} of shard {name!r}: an upsert writes whole rows, and would "
            "take away what others wrote there; give all columns"
        )


# A write job of a DataFrame to a shard, from whatever thread.


FORMAT = "persist"


def save(spark: SparkSession, df: DataFrame, mode: str, shard: str, options: Mapping[str, str]) -> None:
    """Run the job in that session. Raises what Spark raises of it.

    Spark 4 looks for the format of a write in the active session of the thread, and a thread that a program began has
    none: DATA_SOURCE_NOT_FOUND. PySpark makes a session active where it makes a DataFrame, and nowhere else.
    """
    if SparkSession.getActiveSession() is None:
        spark.createDataFrame([], "nothing int")
    df.write.format(FORMAT).mode(mode).options(**options).save(shard)


# What a write of a `ShardTable` came to.


@dataclass(frozen=True)
class Written:
    """What became of a write.

    `time` is where its rows are (None: it wrote none, or that is not known any more), `rows` and `retractions` are what
    the commit history tells of it. `skipped`: its transaction was committed before, and so it wrote nothing now; the
    others are of that commit, where the commit history has it still.
    """

    time: int | None
    rows: int = 0
    retractions: int | None = 0
    skipped: bool = False

    @classmethod
    def of(cls, entry: HistoryEntry | None, *, skipped: bool = False) -> Written:
        """As the entry of the commit history tells; None: there is none."""
        if entry is None:
            return cls(None, skipped=skipped)
        return cls(None if entry.lower == entry.upper else entry.lower, entry.rows, entry.retractions, skipped)
