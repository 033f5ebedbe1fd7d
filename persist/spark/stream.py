"""The streaming source and sink; every micro-batch is published exactly once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, NoReturn

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from persist.client.idempotency import send
from persist.client.shard import CriticalReaderHandle, Shard
from persist.client.snapshot import ReadLease, leased_blobs
from persist.client.timestamps import instant_ms, instant_of
from persist.client.transport import OneShard, Transport
from persist.core.commands import ResolveTime, TimeResolved
from persist.core.errors import (
    Expired,
    InvalidUsage,
    NotReadable,
    OpaqueMismatch,
    PersistError,
    Unavailable,
    UnknownShard,
    UpgradeNeeded,
)
from persist.core.frontier import TIME_MAX, Antichain, frontier
from persist.core.ids import SeqNo, ShardId
from persist.core.shard_view import ShardView, ViewRequest
from persist.parts import current_schema
from persist.parts.key_splits import Limit, Weight
from persist.spark import executors
from persist.spark.change_feed import Interval, plan_changes, read_changes
from persist.spark.offsets import Admission, Offset, Position, between
from persist.spark.options import ReadOptions, StreamOptions, Target, WriteOptions
from persist.spark.spark_schemas import KnownSchema, check_means, columns_now, current_names, names_in
from persist.spark.write_job import Job, staged

# The streaming source. A micro-batch is the interval between two offsets (`persist.spark.offsets`).
#
# Spark requests the initial offset twice for the first batch, and again on a restart if that batch was not committed.
# It is therefore resolved once: in this object, and durably in the critical reader named `cursor`. The cursor's opaque
# token is the position of the stream, and its hold on since keeps the history that the stream has yet to read.

CURSOR_TRIES_MAX = 10
NOT_BEGUN = "not begun"  # the token of a cursor without a position
DOWNGRADES_PER_LEASE = 30  # bounds the log entries that progress adds


class RefusedStream(DataSourceStreamReader):
    """The reader of a stream whose options are invalid. Every call raises the error."""

    def __init__(self, error: PersistError) -> None:
        self._error = error

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._error

    initialOffset = latestOffset = partitions = read = _refuse  # noqa: N815 - Spark's names


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The streaming source. One instance serves a query in the driver's planner; executors get copies without state."""

    def __init__(
        self,
        target: Target,
        options: ReadOptions,
        stream: StreamOptions,
        schema: StructType,
        known: KnownSchema | None = None,
    ) -> None:
        """`known` identifies the shard schema from which `schema` was derived; None: the user has given `schema`."""
        self._target = target
        self._options = options
        self._stream = stream
        self._schema = schema
        self._known = known
        self._schema_id: int | None = None  # the id of the shard schema that `schema` refers to
        self._initial: Offset | None = None
        self._until: Antichain | None = None  # the end of a query with Trigger.AvailableNow
        self._ending: Antichain | None = None  # the end that the options set, once it is resolved
        self._reported: Offset | None = None  # the report of the last `latestOffset`
        self._waits_from_s: float | None = None  # since when there have been too few rows
        self._lease: ReadLease | None = None
        self._downgraded_s = 0.0
        self._planned = SeqNo(0)  # of the State of the last planned micro-batch
        self._admission = Admission(target, options)

    def __getstate__(self) -> dict[str, Any]:
        """The settings, which executors need. Leases and offsets stay in the driver."""
        return {**self.__dict__, "_lease": None, "_admission": None, "_initial": None}

    # --- offsets

    def initialOffset(self) -> Offset:  # noqa: N802
        if self._initial is None:
            self._initial = self._resolve_start()
        return self._initial

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        lease, view = self._open_view(start, start)
        at = self._skip_forgotten(view, Position.of(start))
        upper = self._upper(view)
        rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        size = limit.max_bytes if isinstance(limit, ReadMaxBytes) else None
        with leased_blobs(lease):
            end, behind = self._admission.next(view, lease, at, upper, Limit(rows, size))
        if end == at or self._waits(view, at, upper):
            self._reported = self._report(view, at, self._admission.behind(view, at))
            return start
        self._reported = self._report(view, end, behind)
        return replace(end, shard=view.shard_id).offset

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._stream.max_rows is not None:
            return ReadMaxRows(self._stream.max_rows)
        if self._stream.max_bytes is not None:
            return ReadMaxBytes(self._stream.max_bytes)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """The upper of the shard and the backlog after the micro-batch, for progress reports.

        Spark calls it right after `latestOffset`, which has computed them.
        """
        if self._reported is not None:
            return self._reported
        view = executors.view_of(self._target)
        return Position(view.upper, shard=view.shard_id).offset

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._until = executors.view_of(self._target).upper

    def commit(self, end: Offset) -> None:
        """Release what only data before `end` needed, because that is processed.

        The cursor advances. The lease releases files, and history only if the stream has a cursor: a stream without one
        must not make a shard discard history that others may still read.
        """
        cursor = self._stream.cursor
        if cursor is not None:
            self._move(cursor, end)
        if self._lease is None:
            return
        transport = executors.transport(self._target.connection)
        lease_s = self._target.connection.handles.read.lease_ms / 1000
        if transport.clock.monotonic() - self._downgraded_s >= lease_s / DOWNGRADES_PER_LEASE:
            self._downgraded_s = transport.clock.monotonic()
            since = self._lease.since if cursor is None else max(Position.of(end).held, self._lease.since)
            seqno = max(self._planned, self._lease.seqno)
            self._lease.move(since, seqno, moves_since=transport.listening_moves_since)

    def stop(self) -> None:
        if self._lease is not None:
            self._lease.close()
            self._lease = None

    # --- data

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        position = Position.of(end)
        intervals = between(Position.of(start), position)
        if not intervals:
            return []
        lease, view = self._open_view(start, end)
        self._planned = view.seqno
        complete = position.upper if not position.is_snapshot else intervals[-1].upper
        if view.upper < complete or (position.key is not None and view.upper <= position.upper):
            raise InvalidUsage(
                f"shard {self._target.shard!r} has upper {view.upper}, but the stream was at {complete}: the "
                "checkpoint belongs to another shard"
            )
        readable = (self._limit_to_readable(view, interval) for interval in intervals)
        renamed = current_names(self._schema.names, self._schema_id, view.schemas)
        names = columns_now(self._schema.names, renamed)
        return [
            InputPartition(replace(split, renamed=renamed))
            for interval in readable
            if interval is not None
            for split in plan_changes(self._target, self._options, view, interval, lease, names)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_changes(self._target, self._options, self._schema, partition.value)

    # --- holds

    def _open_view(self, start: Offset, end: Offset) -> tuple[ReadLease, ShardView]:
        """The lease and the view from `start` on. Raises UnknownShard if `end` is of an earlier shard of the name."""
        position = Position.of(start)
        lower = Antichain(0) if position.is_snapshot else position.upper
        shard_id = end.get("shard")
        transport = executors.transport(self._target.connection)
        if shard_id is not None:
            transport = OneShard(transport, shard_id)
        try:
            lease, view = self._hold(position, transport), transport.view(self._target.shard, ViewRequest(lower=lower))
        except UnknownShard:
            self._check_incarnation(end, executors.view_of(self._target).shard_id)
            raise
        if self._schema_id is None:
            is_known = self._known is not None and self._known.shard == view.shard_id
            self._schema_id = self._known.number if self._known and is_known else current_schema(view.schemas)[0]
        names, use = names_in(self._options.selection.where), f"by which this stream of shard {view.name!r} selects"
        check_means(names, self._schema_id, view.schemas, use, "restart the query")
        return lease, view

    def _check_incarnation(self, offset: Offset, shard: ShardId) -> None:
        if offset.get("shard", shard) != shard:
            raise UnknownShard(
                f"the stream's checkpoint is of an earlier shard {self._target.shard!r}, which was dropped; the "
                "name now belongs to another shard. Start with a new checkpoint to read that shard"
            )

    def _hold(self, start: Position, transport: Transport) -> ReadLease:
        """The lease that keeps the history from `start` on readable while the query runs."""
        if self._lease is not None:
            try:
                self._lease.keep()
            except Expired:
                self._lease = None
        if self._lease is None:
            since: Antichain | None = start.held
            if not self._stream.fail_on_data_loss and since < executors.view_of(self._target).since:
                since = None
            settings = self._target.connection.handles.read
            self._lease = ReadLease.open(transport, self._target.shard, since, "spark stream", settings)
        return self._lease

    def _limit_to_readable(self, view: ShardView, interval: Interval) -> Interval | None:
        """The readable rest of the interval, if the stream may skip the unreadable part; None: there is no rest."""
        if view.since <= interval.held:
            return interval
        if self._stream.fail_on_data_loss or view.since.element is None:
            raise NotReadable(
                f"the history of shard {self._target.shard!r} before {view.since} is no longer readable, and the "
                f"stream at {interval.lower} needs it; use a cursor, which keeps history, or set failOnDataLoss=false",
                as_of=interval.lower,
                since=view.since.to_json(),
            )
        first = view.since.element + 1
        return Interval(first, interval.upper, False, interval.keys) if Antichain(first) < interval.upper else None

    def _skip_forgotten(self, view: ShardView, start: Position) -> Position:
        """The position, or, if that is no longer readable and data loss is allowed, the start of the history."""
        since = view.since.element
        if view.since <= start.held or self._stream.fail_on_data_loss or since is None:
            return start
        return start.with_upper(Antichain(since + 1))

    # --- how far

    def _upper(self, view: ShardView) -> Antichain:
        """The upper up to which the stream reads now."""
        ends = (view.upper, self._until, self._ends(view))
        return min(end for end in ends if end is not None)

    def _ends(self, view: ShardView) -> Antichain | None:
        """The end that the options set; None: none, or a wall clock in the future."""
        if self._ending is None and self._stream.ending is not None:
            ending = self._stream.ending
            if isinstance(ending, datetime):
                self._ending = upper_by(self._target, ending)
            else:
                self._ending = Antichain(ending) if isinstance(ending, int) else view.upper
        return self._ending

    def _waits(self, view: ShardView, start: Position, upper: Antichain) -> bool:
        """Whether to wait for more rows. The rest of a time and the last rows do not wait."""
        min_rows = self._stream.min_rows
        is_last = self._until is not None or upper == self._ending or view.upper.is_empty
        if min_rows is None or is_last or start.key is not None or self._admission.behind(view, start).rows >= min_rows:
            self._waits_from_s = None
            return False
        now_s = executors.transport(self._target.connection).clock.monotonic()
        if self._waits_from_s is None:
            self._waits_from_s = now_s
        if now_s - self._waits_from_s < self._stream.max_delay_s:
            return True
        self._waits_from_s = None
        return False

    def _report(self, view: ShardView, at: Position, behind: Weight) -> Offset:
        """The upper of the shard, and the backlog of a stream at a position."""
        lag: dict[str, Any] = {"rows": behind.rows, "bytes": round(behind.size)}
        seconds: float | None = 0.0
        if at.upper < view.upper:  # since the commit of the first time that is not yet delivered
            assert at.upper.element is not None
            seconds = seconds_since(self._target, at.upper.element)
        if seconds is not None:
            lag["seconds"] = seconds
        return {**Position(view.upper, shard=view.shard_id).offset, "behind": lag}

    def _resolve_start(self) -> Offset:
        """The start of the stream: the position of its cursor, or, for a new cursor, the start that the options set."""
        cursor = self._stream.cursor
        if cursor is None:
            return self._start_by_options()
        view = executors.view_of(self._target)
        shard = executors.open_shard(self._target, view)
        for _ in range(CURSOR_TRIES_MAX):
            if isinstance(self._stream.starting, datetime) and (at := self._cursor_position(shard, cursor)) is not None:
                return at
            start = self._start_by_options()
            handle = CriticalReaderHandle.take(shard, cursor, json.dumps(start), since=self._hold_at(start))
            if (position := self._hold_position(handle)) is not None:
                return position
            history = Position(Antichain(handle.since.element or 0), True, shard=view.shard_id).offset
            try:  # since moved before the registration: start where the history now starts
                handle.downgrade_since(handle.since, opaque=json.dumps(history))
                if "snapshot" in start:
                    return _position(handle)
            except OpaqueMismatch:
                continue
            handle.expire()
        starting = self._stream.starting
        raise NotReadable(
            f"shard {self._target.shard!r} cannot be read from {starting}: that history is no longer readable",
            as_of=starting.isoformat() if isinstance(starting, datetime) else starting,
            since=shard.since().to_json(),
        )

    def _cursor_position(self, shard: Shard, cursor: str) -> Offset | None:
        """The position of an existing cursor, whatever wall clock the options name. None: the stream starts anew."""
        if not CriticalReaderHandle.is_taken(shard, cursor):
            return None
        handle = CriticalReaderHandle.take(shard, cursor, NOT_BEGUN)
        if handle.opaque == NOT_BEGUN:  # it was released since, or its creator was interrupted
            handle.expire()
            return None
        return self._hold_position(handle)

    def _hold_position(self, handle: CriticalReaderHandle) -> Offset | None:
        """The cursor's position, after holding all history that it needs. None: since has passed it."""
        offset = _position(handle)
        if not handle.since <= Position.of(offset).held:
            return None
        handle.downgrade_since(self._hold_at(offset))
        return offset

    def _start_by_options(self) -> Offset:
        starting, view = self._stream.starting, executors.view_of(self._target)
        self._ends(view)  # resolves endingOffsets=latest when the stream starts
        if starting != "earliest":
            upper = frontier(starting) if isinstance(starting, int) else view.upper
            if isinstance(starting, datetime):  # always resolves to the same time, also without a cursor
                upper = executors.resolve_wall_clock(self._target, starting, self._options.wait_s).upper
            return Position(upper, shard=view.shard_id).offset
        begin, ending = view.since.element or 0, self._ends(view)
        if ending is not None and ending.less_equal(begin) and begin:
            raise NotReadable(
                f"the history of shard {self._target.shard!r} before {view.since} is no longer readable, so nothing is "
                f"left to read before {ending}, the end of the stream; set a later endingOffsets",
                as_of=None,
                since=view.since.to_json(),
            )
        return Position(Antichain(begin), True, shard=view.shard_id).offset

    def _move(self, cursor: str, end: Offset) -> None:
        """Advance the cursor to `end`, unless it is there or further already."""
        view = executors.view_of(self._target)
        self._check_incarnation(end, view.shard_id)
        shard = executors.open_shard(self._target, view)
        for _ in range(CURSOR_TRIES_MAX):
            handle = shard.critical_reader(cursor, json.dumps(end))
            position = Position.of(end)
            if not Position.of(_position(handle)).is_before(position) or position.held < handle.since:
                return
            try:
                handle.downgrade_since(self._hold_at(end), opaque=json.dumps(end))
            except OpaqueMismatch:
                continue
            return

    def _hold_at(self, offset: Offset) -> Antichain:
        """The since that a cursor at this offset holds.

        At the end of a closed shard nothing is left to read. The cursor then holds the last time that has rows, so that
        the latest contents stay readable.
        """
        held = Position.of(offset).held
        if not held.is_empty:
            return held
        last = ViewRequest(lower=Antichain(TIME_MAX + 1))  # only batches that reach the end
        view = executors.transport(self._target.connection).view(self._target.shard, last)
        times = [max((batch.desc.lower.element or 0) - 1, 0) for batch in view.batches]
        times += [part.time_max for batch in view.batches for part in batch.parts()]
        return max(view.since, *map(Antichain, times))


def _position(handle: CriticalReaderHandle) -> Offset:
    try:
        offset = json.loads(handle.opaque)
    except ValueError:
        offset = None
    if not isinstance(offset, dict):
        raise InvalidUsage(f"the critical reader {handle.cursor!r} is not the cursor of a stream; choose another name")
    return offset


def upper_by(target: Target, when: datetime) -> Antichain | None:
    """The upper of the shard at a wall clock; None if that is in the future. Does not wait."""
    settings = target.connection.handles.read
    at_ms = instant_ms("the wall clock", when)
    result = send(executors.transport(target.connection), target.shard, ResolveTime(at_ms), settings.retry_s)
    return result.upper if isinstance(result, TimeResolved) else None


def seconds_since(target: Target, time: int) -> float | None:
    """Seconds since the shard first showed a time, by the clock of this process; None if no wall clock is known.

    Does not retry, because it serves progress reports.
    """
    transport = executors.transport(target.connection)
    try:
        instant = instant_of(transport, target.shard, time, retry_s=0)
    except (NotReadable, Unavailable, UpgradeNeeded):
        return None
    return None if instant is None else max(0.0, (transport.clock.now_ms() - instant_ms("it", instant)) / 1000)


# The streaming sink. The query id and the batch number are an attribute of the shard, which changes atomically with the
# data, so that a retry of a batch, by this driver, a restarted one or a zombie, is recognised and skipped.

QUERY_ID = "sql.streaming.queryId"


class StreamWriter(DataSourceStreamArrowWriter):
    """The streaming sink. Spark creates one per batch and another one to commit it; only messages connect them."""

    def __init__(self, target: Target, options: WriteOptions, schema: StructType, overwrite: bool) -> None:
        self._job = Job.open(target, options, schema, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        query = None if context is None else context.getLocalProperty(QUERY_ID)
        if query is None:
            raise InvalidUsage("the task has no streaming query id; write a stream with writeStream")
        return self._job.stage(iterator, query)

    def commit(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        query = next((message.query for message in staged(messages)), None)
        if query is None:
            self._job.release(messages)
            raise InvalidUsage(f"no task of micro-batch {batchId} has a streaming query id")
        self._job.publish(messages, (f"spark query {query}", batchId), streams=True)

    def abort(self, messages: Sequence[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Release the holds. A commit of unknown outcome may still land, and staged parts become orphans."""
        self._job.release(messages)
