"""A write job: its settings, what its tasks stage, and the one commit that publishes it."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.sql.types import StructType

from persist.client.client import Client
from persist.client.commit_info import HistoryEntry, info_bytes
from persist.client.idempotency import send
from persist.client.schema_api import ALTER_TRIES
from persist.client.write import WriteHandle
from persist.core.attribute import AttributeUpdate, named_key
from persist.core.audit_log import NOBODY, Caller
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
from persist.core.shard_phases import outlived
from persist.core.shard_view import ShardView
from persist.core.state import SchemaRecord
from persist.parts import DIFF, TIME, ShardSchema, current_schema
from persist.spark import executors, upsert
from persist.spark.change_feed import CHANGE_COLUMNS
from persist.spark.options import Target, WriteOptions, listed
from persist.spark.spark_schemas import check_collations, stored_schema
from persist.spark.store_assignment import can_be_absent, evolve, merge_schema, overwrite_schema, resolve_names
from persist.spark.upsert import Runs, without_cancelled

# Commit info: the Spark application, job and user of a write, in the commit history besides the user's `info`.
#
# Only tasks have these properties; the process that commits does not. Tasks therefore send them in their messages.

TEXT_MAX = 200  # characters of each
_PROPERTIES = {
    "application": "spark.app.id",
    "job": "spark.job.description",
    "group": "spark.jobGroup.id",
    "execution": "spark.sql.execution.id",
    "query": "sql.streaming.queryId",
}


def task_properties() -> dict[str, str]:
    """The Spark properties and the user of this task; empty outside of a task."""
    context = TaskContext.get()
    if context is None:
        return {}
    properties = {name: context.getLocalProperty(key) for name, key in _PROPERTIES.items()}
    return {name: value[:TEXT_MAX] for name, value in (properties | {"user": _user()}).items() if value}


def transaction_properties(txn: tuple[str, int]) -> dict[str, str]:
    """The properties of a transaction in the commit history."""
    return {"txnAppId": txn[0][:TEXT_MAX], "txnVersion": str(txn[1])}


def _user() -> str:
    """The user of the process that runs the task."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may run under a user id without a name
        return str(os.getuid())


# Executors stage parts in the blob store; the driver publishes them in one commit. A retried or speculative task leaves
# at most unreferenced parts, which the orphan sweep deletes.

Attributes = tuple[AttributeUpdate, ...]
REPLACE_NOTHING, REPLACE_KEYS, REPLACE_ALL = "nothing", "keys", "all"


@dataclass(frozen=True)
class StagedTask(WriterCommitMessage):
    """What a task staged: `runs`, possibly with inline rows.

    `claims` are runs of the keys that the task replaces, and `left` are those claims whose old rows it has not
    retracted. `base` is the job's base, `query` the streaming query.
    """

    shard_id: ShardId
    runs: Runs
    claims: Runs
    base: upsert.Base | None = None
    query: str | None = None
    properties: Mapping[str, str] = field(default_factory=dict)  # for the commit history
    left: Runs = ()


def staged(messages: Sequence[WriterCommitMessage | None]) -> list[StagedTask]:
    return [message for message in messages if isinstance(message, StagedTask)]


@dataclass(frozen=True)
class Job:
    """The settings of a job, the same in every task and, where Spark keeps the writer, in the commit."""

    target: Target
    options: WriteOptions
    replaces: str
    writer: WriterId
    token: Token
    schema_id: int
    record: SchemaRecord
    base: upsert.Base | None
    shard_id: ShardId
    is_taken: bool = False  # its transaction was committed before, so the job writes nothing
    names: tuple[tuple[str, str], ...] = ()  # DataFrame columns that have another name in the shard, and that name
    replaced_schema: upsert.ReplacedSchema | None = None  # the schema that this job replaces; None: it stays

    @classmethod
    def open(cls, target: Target, options: WriteOptions, schema: StructType, overwrite: bool) -> Job:
        """Find the shard, or create it from the DataFrame's schema, and check the columns.

        A transaction that was committed before is skipped without checking the columns.
        """
        if overwrite and options.rewrites:
            raise InvalidUsage("option 'rewrites' does not apply to mode 'overwrite', which replaces everything")
        if overwrite and (options.upsert or options.time_column or options.restores is not None or options.moves_upper):
            raise InvalidUsage("mode 'overwrite' replaces everything at the next time; use mode 'append' instead")
        replaces = REPLACE_ALL if overwrite else REPLACE_KEYS if options.upsert else REPLACE_NOTHING
        if options.evolves == "overwrite" and not overwrite:
            raise InvalidUsage(
                "option 'overwriteSchema' needs mode 'overwrite': only an overwrite of all rows can replace columns"
            )
        _check_roles(schema, options)
        transport = executors.transport(target.connection)
        view = _find_or_create(target, options, schema)
        taken = options.txn is not None and is_committed(target, view.shard_id, progress_of(options.txn))
        if not taken and options.evolves != "overwrite":
            view = _evolve_to_fit(target, options, schema, view)
        schema_id, current = current_schema(view.schemas)
        names = resolve_names(schema, options, current, target.shard)
        record, replaced_schema = view.schemas[schema_id], None
        if options.evolves == "overwrite" and not taken:
            planned = overwrite_schema(schema, options, current, target.shard)
            _check_columns(schema, planned, options, target.shard, names)
            if planned != current:
                replaced_schema = upsert.ReplacedSchema(schema_id, record, view.schema_id)
                schema_id, record = view.schema_id + 1, planned.to_record()
        base = None
        if not taken and replaces != REPLACE_NOTHING:
            _check_upper(target, view, options)
            base = upsert.Base.take(target, view)
        writer, token = mint(WriterId, transport.ids), mint(Token, transport.ids)
        rest = (schema_id, record, base, view.shard_id, taken, tuple(names.items()), replaced_schema)
        return cls(target, options, replaces, writer, token, *rest)

    @property
    def schema(self) -> ShardSchema:
        return ShardSchema.from_record(self.record)

    def handle(self, caller: Caller = NOBODY) -> WriteHandle:
        """The job's writer, in this process."""
        transport, known = executors.one_shard(self.target, self.shard_id), (self.schema_id, self.schema)
        settings = self.target.connection.handles.write
        return WriteHandle(transport, self.target.shard, lambda: known, settings, self.writer, caller)

    def stage(self, batches: Iterable[pa.RecordBatch], query: str | None = None) -> StagedTask:
        """Write a task's rows as parts that are invisible until the commit."""
        executors.freeze_loaded(os.getpid(), writes=True)
        if self.is_taken:
            for _ in batches:  # Spark's worker requires that its input is read
                pass
            return StagedTask(self.shard_id, (), (), None, query, task_properties())
        renames, options, handle = dict(self.names), self.options, self.handle()
        rows = (batch.rename_columns([renames.get(name, name) for name in batch.schema.names]) for batch in batches)
        claims: Runs = ()
        left: Runs = ()
        if self.replaces == REPLACE_KEYS:
            assert self.base is not None
            runs, claims, left = self._replacement(self.base, handle).stage_upsert(rows, options.delete_column)
        else:
            is_rewrite = self.replaces == REPLACE_ALL or options.restores is not None or options.rewrites is not None
            time = None if is_rewrite else options.first_time  # None: the commit sets it
            runs = handle.stage_for_one_commit(rows, time, by_rows=False)
        if self.replaced_schema is None:  # a new schema cannot be receipted before its commit
            runs = handle.receipted(runs)
        return StagedTask(self.shard_id, runs, claims, self.base, query, task_properties(), left)

    def publish(
        self, messages: Sequence[WriterCommitMessage | None], progress: tuple[str, int] | None, *, streams: bool = False
    ) -> bool:
        """Commit what the tasks staged, once. Returns False if `progress` was committed before.

        `progress` is a name and an increasing number, an attribute of the shard that changes atomically with the data.
        With `streams`, only the progress makes a retry idempotent, not a writer's record: micro-batches share a writer,
        and the job's own writer is retired. The holds of the job are released in any case.
        """
        tasks = staged(messages)
        runs = tuple(run for task in tasks for run in task.runs)
        attributes = (
            () if progress is None else (AttributeUpdate.replace_if_greater(named_key(progress[0]), progress[1]),)
        )
        try:
            if any(task.shard_id != self.shard_id for task in tasks):  # inline rows do not name their shard
                raise UnknownShard(outlived(self.target.shard))
            # A transaction is skipped before any other check.
            if progress is not None and not streams and is_committed(self.target, self.shard_id, progress):
                return False
            follows = progress is not None and streams and self._follows(*progress)
            caller = self._caller(tasks, streams)
            if self.options.rewrites:
                runs = without_cancelled(self.target, runs, self.schema)
            if self._commit(tasks, runs, attributes, caller, streams=streams):
                return True
            if follows:  # no commit has recorded the progress
                executors.shared_writer(self.target, self.shard_id, caller).update_attributes(attributes)
            elif attributes and not streams:
                self.handle(caller).update_attributes(attributes, token=self.token)
        except AttributeMismatch:
            return False
        except UpperMismatch:  # another attempt may have landed meanwhile
            if progress is None or not is_committed(self.target, self.shard_id, progress):
                raise
            return False
        except Indeterminate as error:
            # The attribute has reached this number and never decreases, so a commit in flight cannot land.
            if error.details.get("refused") != AttributeMismatch.kind:
                raise
            return False
        finally:
            self.release(messages)
        return True

    def _commit(
        self, tasks: Sequence[StagedTask], runs: Runs, attributes: Attributes, caller: Caller, *, streams: bool
    ) -> bool:
        """The one commit of the job. False: there is nothing to commit."""
        handle, options, token = self.handle(caller), self.options, self.token
        if self.replaces != REPLACE_NOTHING:
            return self._replace(tasks, runs, attributes, handle, retire=streams)
        if options.append is not None:
            handle.commit_append(runs, *options.append, token=token)
        elif options.conditional is not None and options.restores is None and options.rewrites is None:
            handle.commit_compare_and_append(runs, *options.conditional, token=token, attributes=attributes)
        elif not runs:
            return False
        elif options.conditional is not None:
            expected, operation, undoes = options.expected_upper, options.rewrites or RESTORE, options.restores
            handle.commit_rewrite(
                runs, expected, operation=operation, token=token, attributes=attributes, undoes=undoes
            )
        elif streams:
            executors.shared_writer(self.target, self.shard_id, caller).commit_insert(runs, attributes=attributes)
        else:
            handle.commit_insert(runs, token=token, attributes=attributes)
        return True

    def release(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Release the holds of the job and of the tasks that sent these messages. Idempotent; raises nothing.

        These are two holds if Spark commits a micro-batch with another writer than the one that it sent to the tasks.
        A commit in flight needs neither. A hold that no message names expires.
        """
        for base in {self.base, *(message.base for message in staged(messages))}:
            if base is not None:
                base.lease(self.target).close()

    def _follows(self, name: str, number: int) -> bool:
        """Whether micro-batches must be consecutive: in the second and later incarnations of a name.

        Raises UnknownShard if the preceding micro-batch went to an earlier shard of this name. An overwrite may follow
        any micro-batch.
        """
        if incarnation_of(self.target.shard, self.shard_id) == 0 or self.replaces == REPLACE_ALL:
            return False
        if number > 0 and _last_number(self.target, self.shard_id, name) is None:
            raise UnknownShard(
                f"micro-batch {number} is the first one of its streaming query in shard {self.target.shard!r}: the "
                "earlier ones went to another shard of this name, which was dropped. Start with a new checkpoint, or "
                "write to another shard"
            )
        return True

    def _replace(
        self, tasks: Sequence[StagedTask], runs: Runs, attributes: Attributes, handle: WriteHandle, *, retire: bool
    ) -> bool:
        base = next((task.base for task in tasks if task.base is not None), self.base)
        assert base is not None
        claims = tuple(run for task in tasks for run in task.claims)
        if self.replaces == REPLACE_KEYS and not claims:
            return False
        replaced = None if self.replaces == REPLACE_ALL else claims
        operation = "overwrite" if replaced is None else "upsert"
        commit = upsert.ReplacementCommit(operation, self.token, attributes, self.options.expected_upper is not None)
        left = tuple(run for task in tasks for run in task.left)
        try:
            self._replacement(base, handle).publish(runs, replaced, left, commit)
        finally:
            if retire:
                handle.close()
        return True

    def _caller(self, tasks: Sequence[StagedTask], streams: bool) -> Caller:
        """The caller of the commit, with its properties as `spark`, unless `info` has that key or they do not fit.

        They include the write id and the transaction, by which the history entry is found.
        """
        purpose, info = "spark stream" if streams else "spark job", self.options.info
        properties = {**next((task.properties for task in tasks if task.properties), {})}
        properties |= {} if self.options.write_id is None else {"write": self.options.write_id}
        properties |= {} if self.options.txn is None else transaction_properties(self.options.txn)
        if properties:
            with suppress(InvalidUsage):
                merged_info = {"spark": properties, **(json.loads(info) if info else {})}
                return Caller(purpose=purpose, info=info_bytes("option 'info'", merged_info))
        return Caller(purpose=purpose, info=info)

    def _replacement(self, base: upsert.Base, handle: WriteHandle) -> upsert.Replacement:
        return upsert.Replacement(self.target, base, handle, self.schema, self.replaced_schema)


def progress_of(txn: tuple[str, int]) -> tuple[str, int]:
    """The progress of a transaction: the name of an attribute, and its number."""
    return f"spark application {txn[0]}", txn[1]


def is_committed(target: Target, shard: ShardId, progress: tuple[str, int]) -> bool:
    """Whether the work of this name and number, or a later number, was committed. Once true, it stays true."""
    value = _last_number(target, shard, progress[0])
    return value is not None and value >= progress[1]


def _last_number(target: Target, shard: ShardId, name: str) -> int | None:
    """The number of the last committed work of this name; None: there is none."""
    key, retry_s = named_key(name), target.connection.handles.write.retry_s
    attributes = send(executors.one_shard(target, shard), target.shard, ReadAttributes((key,)), retry_s)
    assert isinstance(attributes, AttributeValues)
    return attributes.values[key]


def _check_upper(target: Target, view: ShardView, options: WriteOptions) -> None:
    """Raise UpperMismatch if others wrote after what the user of the job has read."""
    expected = options.expected_upper
    if expected is not None and view.upper != frontier(expected):
        raise UpperMismatch(
            f"shard {target.shard!r} has upper {view.upper}, not the expected [{expected}]: another writer committed "
            "after your read; read the shard again and recompute the write",
            expected=[expected],
            actual=view.upper.to_json(),
        )


def _evolve_to_fit(target: Target, options: WriteOptions, schema: StructType, view: ShardView) -> ShardView:
    """The shard with columns for all those of the DataFrame: `mergeSchema` adds missing columns in one commit.

    Raises InvalidUsage and UpperMismatch without changing the schema.
    """
    for _ in range(ALTER_TRIES):
        current = current_schema(view.schemas)[1]
        planned = merge_schema(schema, options, current, target.shard) if options.evolves == "merge" else current
        _check_columns(schema, planned, options, target.shard, resolve_names(schema, options, planned, target.shard))
        if planned == current:
            return view
        _check_upper(target, view, options)
        with suppress(SchemaMismatch):  # another writer changed the columns: plan again
            evolve(target, view, planned)
        view = executors.view_of(target)
    raise SchemaMismatch(
        f"others changed the columns of shard {target.shard!r} during each of {ALTER_TRIES} attempts; retry the write"
    )


def _find_or_create(target: Target, options: WriteOptions, schema: StructType) -> ShardView:
    with suppress(UnknownShard):
        return executors.view_of(target)
    if options.restores is not None:
        raise UnknownShard(f"shard {target.shard!r} does not exist, so it cannot be restored")
    if options.first_time:
        raise UpperMismatch(
            f"shard {target.shard!r} does not exist: a new shard has upper [0], not the expected "
            f"[{options.first_time}]; start at 0, or let the service choose the time",
            expected=[options.first_time],
            actual=[0],
        )
    if options.key is None:
        raise InvalidUsage(
            f"shard {target.shard!r} does not exist; to create it from the DataFrame, set its key columns: "
            "option('key', 'id')"
        )
    for name in CHANGE_COLUMNS:
        if name in schema.names:
            raise InvalidUsage(
                f"shard {target.shard!r} cannot have a column {name!r}, which is a column of the change feed; drop it, "
                f"or rename it: df.withColumnRenamed({name!r}, ...)"
            )
    client = Client(executors.transport(target.connection), target.connection.handles)
    client.create_shard(
        target.shard,
        stored_schema(schema, options.unstored_columns),
        options.key,
        history=options.history,
        unique=bool(options.constraints.unique),
        checks={check.name: check.where for check in options.constraints.checks or ()},
    )
    return executors.view_of(target)


def _check_roles(schema: StructType, options: WriteOptions) -> None:
    """Raise InvalidUsage if a column that an option names is missing, before a shard is created."""
    roles = {
        "timeColumn": options.time_column,
        "diffColumn": options.diff_column,
        "deleteColumn": options.delete_column,
    }
    for role, column in roles.items():
        if column is not None and column not in schema.names:
            raise InvalidUsage(f"option {role!r} names {column!r}, which is not a column of the DataFrame")
    given = [options.renames.get(column, column) for column in schema.names if column != options.delete_column]
    if len(set(given)) != len(given):
        raise InvalidUsage(f"a column occurs twice in {given}")
    if TIME in schema.names and options.time_column != TIME:
        raise InvalidUsage(
            f"the DataFrame has a column {TIME}, the name of the time column: rows with times need options "
            f"expectedUpper and newUpper, or appendLower and appendUpper, and timeColumn={TIME}; or drop the column"
        )
    if DIFF in schema.names and options.diff_column != DIFF and options.restores is None:
        raise InvalidUsage(
            f"the DataFrame has a column {DIFF}, the name of the multiplicity column: set diffColumn={DIFF} if it "
            "holds multiplicities; or drop the column"
        )
    if options.restores is not None and DIFF not in given:
        raise InvalidUsage(f"rows with restoreTo need the column {DIFF} of readDiff, the multiplicities of the changes")


def _check_columns(
    schema: StructType, shard: ShardSchema, options: WriteOptions, name: str, names: Mapping[str, str]
) -> None:
    """Raise InvalidUsage unless the DataFrame has the columns of the shard, and times and diffs where allowed."""
    if options.key is not None and options.key != shard.key:
        raise InvalidUsage(f"shard {name!r} has the key ({listed(shard.key)}), not ({listed(options.key)})")
    check_collations(schema)
    given = [names.get(column, column) for column in schema.names if column != options.delete_column]
    if len(set(given)) != len(given):
        raise InvalidUsage(
            f"two columns of the DataFrame match one column of shard {name!r}: {listed(given)}; drop one"
        )
    unknown = [column for column in given if column not in (*shard.arrow.names, TIME, DIFF)]
    missing = [column for column in shard.arrow.names if column not in given]
    if unknown and unknown[0] in CHANGE_COLUMNS:
        raise InvalidUsage(
            f"the DataFrame has the column {unknown[0]!r} of a change feed, which a shard cannot have; drop it. To "
            f"write the changes of a feed, set diffColumn={DIFF}"
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
            f"the DataFrame lacks the column {missing[0]!r} of shard {name!r}: an upsert replaces whole rows, with "
            "the values that others wrote to this column; give all columns"
        )


FORMAT = "persist"


def save(spark: SparkSession, df: DataFrame, mode: str, shard: str, options: Mapping[str, str]) -> None:
    """Run a write job in the session, from any thread. Raises Spark's errors.

    Spark 4 looks up the format in the active session of the thread and raises DATA_SOURCE_NOT_FOUND if it has none, as
    in a new thread. PySpark activates a session only when it creates a DataFrame.
    """
    if SparkSession.getActiveSession() is None:
        spark.createDataFrame([], "nothing int")
    df.write.format(FORMAT).mode(mode).options(**options).save(shard)


@dataclass(frozen=True)
class Written:
    """The result of a write.

    `time` is the time of its rows (None: it wrote none, or its time is no longer known); `rows` and `retractions` are
    the counts in the commit history. `skipped`: the transaction was committed before, so nothing was written now; the
    other fields describe that commit, as long as the commit history has it.
    """

    time: int | None
    rows: int = 0
    retractions: int | None = 0
    skipped: bool = False

    @classmethod
    def of(cls, entry: HistoryEntry | None, *, skipped: bool = False) -> Written:
        """The result that an entry of the commit history describes; None: it has no such entry."""
        if entry is None:
            return cls(None, skipped=skipped)
        return cls(None if entry.lower == entry.upper else entry.lower, entry.rows, entry.retractions, skipped)
