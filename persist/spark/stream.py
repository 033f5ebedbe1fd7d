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

from persist.client.read_leases import CriticalReaderHandle
from persist.client.shard import Shard
from persist.client.snapshot import ReadLease, leased_blobs
from persist.client.transport import OneShard, Transport
from persist.core.errors import Expired, InvalidUsage, NotReadable, OpaqueMismatch, PersistError, UnknownShard
from persist.core.frontier import TIME_MAX, Antichain, frontier
from persist.core.ids import SeqNo, ShardId
from persist.core.shard_view import ShardView, ViewRequest
from persist.parts import current_schema
from persist.parts.key_splits import Limit, Weight
from persist.spark import executors, planning
from persist.spark.change_feed import Interval, plan_changes, read_changes
from persist.spark.offsets import Admission, Offset, Position, between, offset_at, snapshot_offset
from persist.spark.options import ReadOptions, StreamOptions, Target, WriteOptions
from persist.spark.spark_schemas import KnownSchema, check_means, names_in, names_now, wanted_now
from persist.spark.write_job import Job, staged

# The streaming source. A micro-batch is what lies between two offsets (`persist.spark.offsets`).
#
# Spark asks for the initial offset twice for the first batch, and again on a restart when that batch was never
# committed, so it is resolved once: by this object, and durably by the critical reader called `cursor`. The cursor's
# opaque token is the position of the stream, and its hold on since keeps the history that the stream has still to read.


CURSOR_TRIES_MAX = 10
NOT_BEGUN = "not begun"  # the token of a cursor of which nobody has said yet where it is
DOWNGRADES_PER_LEASE = 30  # progress must not grow the shard's log more often than this


class RefusedStream(DataSourceStreamReader):
    """The reader of a stream that cannot begin, because of its options. Says so as soon as Spark asks for anything."""

    def __init__(self, error: PersistError) -> None:
        self._error = error

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._error

    initialOffset = latestOffset = partitions = read = _refuse  # noqa: N815 - Spark's names


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One lives in the driver's planner process for as long as the query runs; executors get copies without state."""

    def __init__(
        self,
        target: Target,
        options: ReadOptions,
        stream: StreamOptions,
        schema: StructType,
        known: KnownSchema | None = None,
    ) -> None:
        """`known`: by which schema of the shard `schema` was told; None: somebody has given it."""
        self._target = target
        self._options = options
        self._stream = stream
        self._schema = schema
        self._known = known
        self._began: int | None = None  # the number of the schema of the shard that its columns are of
        self._initial: Offset | None = None
        self._until: Antichain | None = None  # where a query that reads what is available now ends
        self._ending: Antichain | None = None  # where the options say that the stream ends, once that is known
        self._reached: Offset | None = None  # of the shard, when the latest offset was last asked for
        self._waits_from_s: float | None = None  # when the rows were first seen that are too few for a micro-batch
        self._lease: ReadLease | None = None
        self._downgraded_s = 0.0
        self._planned = SeqNo(0)  # of the State that the last micro-batch was planned from
        self._admission = Admission(target, options)

    def __getstate__(self) -> dict[str, Any]:
        """What executors need: settings. Leases and offsets stay with the driver."""
        return {**self.__dict__, "_lease": None, "_admission": None, "_initial": None}

    # --- offsets

    def initialOffset(self) -> Offset:  # noqa: N802
        if self._initial is None:
            self._initial = self._resolved()
        return self._initial

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        lease, view = self._held_view(start, start)
        at = self._kept_from(view, Position.of(start))
        upper = self._upper(view)
        with leased_blobs(lease):
            found = self._admission.next(view, lease, at, upper, _limit_of(limit))
        if found.end == at or self._waits(view, at, upper):
            self._reached = self._report(view, at, self._admission.behind(view, at))
            return start
        self._reached = self._report(view, found.end, found.behind)
        return replace(found.end, shard=view.shard_id).offset

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._stream.max_rows is not None:
            return ReadMaxRows(self._stream.max_rows)
        if self._stream.max_bytes is not None:
            return ReadMaxBytes(self._stream.max_bytes)
        return ReadAllAvailable()

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """How far the shard is, and how much of it comes after the micro-batch, for progress reports.

        Spark asks right after `latestOffset`, which has just seen it.
        """
        if self._reached is not None:
            return self._reached
        view = executors.view_of(self._target)
        return offset_at(view.upper, view.shard_id)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._until = executors.view_of(self._target).upper

    def commit(self, end: Offset) -> None:
        """Everything before `end` is processed for good: give up what only it needed.

        The cursor moves on. The lease lets go of files, and of history only where there is a cursor: a stream that
        nobody named must not make a shard forget what others may still want to read.
        """
        cursor = self._stream.cursor
        if cursor is not None:
            self._move(cursor, end)
        if self._lease is None:
            return
        clock = executors.transport(self._target.connection).clock
        lease_s = self._target.connection.handles.read.lease_ms / 1000
        if clock.monotonic() - self._downgraded_s >= lease_s / DOWNGRADES_PER_LEASE:
            self._downgraded_s = clock.monotonic()
            since = self._lease.since if cursor is None else max(Position.of(end).held, self._lease.since)
            self._lease.move(since, max(self._planned, self._lease.seqno))

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
        lease, view = self._held_view(start, end)
        self._planned = view.seqno
        complete = position.upper if not position.is_snapshot else intervals[-1].upper
        if view.upper < complete or (position.key is not None and view.upper <= position.upper):
            raise InvalidUsage(
                f"shard {self._target.shard!r} has upper {view.upper}, but the stream was at {complete}: it is "
                "not the shard that the checkpoint belongs to"
            )
        readable = (self._readable(view, interval) for interval in intervals)
        renamed = names_now(self._schema.names, self._began, view.schemas)
        names = wanted_now(self._schema.names, renamed)
        return [
            InputPartition(replace(split, renamed=renamed))
            for interval in readable
            if interval is not None
            for split in plan_changes(self._target, self._options, view, interval, lease, names)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_changes(self._target, self._options, self._schema, partition.value)

    # --- holds

    def _held_view(self, start: Offset, end: Offset) -> tuple[ReadLease, ShardView]:
        """The lease, and what lies after `start`. UnknownShard: `end` is of an earlier shard of this name."""
        position = Position.of(start)
        lower = Antichain(0) if position.is_snapshot else position.upper
        life = end.get("shard")
        transport = executors.transport(self._target.connection)
        if life is not None:
            transport = OneShard(transport, life)
        try:
            lease, view = self._hold(position, transport), transport.view(self._target.shard, ViewRequest(lower=lower))
        except UnknownShard:
            self._check_life(end, executors.view_of(self._target).shard_id)
            raise
        if self._began is None:
            is_told = self._known is not None and self._known.shard == view.shard_id
            self._began = self._known.number if self._known and is_told else current_schema(view.schemas)[0]
        names, whose = names_in(self._options.selection.where), f"by which this stream of shard {view.name!r} selects"
        check_means(names, self._began, view.schemas, whose, "start the query again")
        return lease, view

    def _check_life(self, offset: Offset, shard: ShardId) -> None:
        if offset.get("shard", shard) != shard:
            raise UnknownShard(
                f"the stream's checkpoint is of an earlier shard {self._target.shard!r}, which was dropped; the name "
                "belongs to another one now. Begin with a new checkpoint to read that"
            )

    def _hold(self, start: Position, transport: Transport) -> ReadLease:
        """The lease that keeps what lies after `start` readable while the query runs."""
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

    def _readable(self, view: ShardView, interval: Interval) -> Interval | None:
        """The interval, without what is forgotten already where the stream may go on without it; None: all of it is."""
        if view.since <= interval.held:
            return interval
        if self._stream.fail_on_data_loss or view.since.element is None:
            raise NotReadable(
                f"shard {self._target.shard!r} has forgotten history before {view.since}, which the stream at "
                f"{interval.lower} still needs; give it a cursor, which keeps history, or set failOnDataLoss to false",
                as_of=interval.lower,
                since=view.since.to_json(),
            )
        first = view.since.element + 1
        return Interval(first, interval.upper, False, interval.keys) if Antichain(first) < interval.upper else None

    def _kept_from(self, view: ShardView, start: Position) -> Position:
        """Where the stream goes on: where it is, or, where that is forgotten and may be lost, where history begins."""
        since = view.since.element
        if view.since <= start.held or self._stream.fail_on_data_loss or since is None:
            return start
        return start.with_upper(Antichain(since + 1))

    # --- how far

    def _upper(self, view: ShardView) -> Antichain:
        """Up to where the stream reads now."""
        ends = (view.upper, self._until, self._ends(view))
        return min(end for end in ends if end is not None)

    def _ends(self, view: ShardView) -> Antichain | None:
        """Where the options say that the stream ends; None: nowhere, or at a wall clock that is to come yet."""
        if self._ending is None and self._stream.ending is not None:
            ending = self._stream.ending
            if isinstance(ending, datetime):
                self._ending = planning.upper_by(self._target, ending)
            else:
                self._ending = Antichain(ending) if isinstance(ending, int) else view.upper
        return self._ending

    def _waits(self, view: ShardView, start: Position, upper: Antichain) -> bool:
        """Whether there are too few rows for a micro-batch yet. The rest of a time and the last rows do not wait."""
        least = self._stream.min_rows
        is_last = self._until is not None or upper == self._ending or view.upper.is_empty
        if least is None or is_last or start.key is not None or self._admission.behind(view, start).rows >= least:
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
        """The upper of the shard, and how far a stream at a position is behind it."""
        lag: dict[str, Any] = {"rows": behind.rows, "bytes": round(behind.size)}
        seconds: float | None = 0.0
        if at.upper < view.upper:  # since the first time was committed that is still to come
            assert at.upper.element is not None
            seconds = planning.seconds_since(self._target, at.upper.element)
        if seconds is not None:
            lag["seconds"] = seconds
        return {**offset_at(view.upper, view.shard_id), "behind": lag}

    def _resolved(self) -> Offset:
        """Where the stream begins: where its cursor is, or, for a new one, where the options say."""
        cursor = self._stream.cursor
        if cursor is None:
            return self._wanted()
        view = executors.view_of(self._target)
        shard = executors.open_shard(self._target, view)
        for _ in range(CURSOR_TRIES_MAX):
            if isinstance(self._stream.starting, datetime) and (at := self._cursor_at(shard, cursor)) is not None:
                return at
            wanted = self._wanted()
            handle = CriticalReaderHandle.take(shard, cursor, json.dumps(wanted), since=self._kept_at(wanted))
            if (found := self._held_position(handle)) is not None:
                return found
            history = snapshot_offset(handle.since.element or 0, view.shard_id)
            try:  # since moved between looking and registering: begin where history begins now
                handle.downgrade_since(handle.since, opaque=json.dumps(history))
                if "snapshot" in wanted:
                    return _position(handle)
            except OpaqueMismatch:
                continue
            handle.expire()
        starting = self._stream.starting
        raise NotReadable(
            f"shard {self._target.shard!r} cannot be read from {starting}: its history was forgotten",
            as_of=starting.isoformat() if isinstance(starting, datetime) else starting,
            since=shard.since().to_json(),
        )

    def _cursor_at(self, shard: Shard, cursor: str) -> Offset | None:
        """Where a cursor that is there already is, whatever its instant named. None: the stream has to begin."""
        if not CriticalReaderHandle.is_taken(shard, cursor):
            return None
        handle = CriticalReaderHandle.take(shard, cursor, NOT_BEGUN)
        if handle.opaque == NOT_BEGUN:  # it was given up since, or whoever took it so was cut off
            handle.expire()
            return None
        return self._held_position(handle)

    def _held_position(self, handle: CriticalReaderHandle) -> Offset | None:
        """The cursor's position, with all history that it needs. None: since has passed it."""
        found = _position(handle)
        if not handle.since <= Position.of(found).held:
            return None
        handle.downgrade_since(self._kept_at(found))
        return found

    def _wanted(self) -> Offset:
        starting, view = self._stream.starting, executors.view_of(self._target)
        self._ends(view)  # the latest is what it is when the stream begins
        if isinstance(starting, int):
            return offset_at(frontier(starting), view.shard_id)
        if isinstance(starting, datetime):  # the same however often it is asked, also without a cursor
            return offset_at(planning.upper_at(self._target, self._options, starting), view.shard_id)
        if starting == "latest":
            return offset_at(view.upper, view.shard_id)
        begin, ending = view.since.element or 0, self._ends(view)
        if ending is not None and ending.less_equal(begin) and begin:
            raise NotReadable(
                f"shard {self._target.shard!r} has forgotten history before {view.since}, so nothing is left of what "
                f"comes before {ending}, where the stream is to end; take a later endingOffsets",
                as_of=None,
                since=view.since.to_json(),
            )
        return snapshot_offset(begin, view.shard_id)

    def _move(self, cursor: str, end: Offset) -> None:
        """Move the cursor to `end`, unless it is there or further already."""
        view = executors.view_of(self._target)
        self._check_life(end, view.shard_id)
        shard = executors.open_shard(self._target, view)
        for _ in range(CURSOR_TRIES_MAX):
            handle = shard.critical_reader(cursor, json.dumps(end))
            found = _position(handle)
            position = Position.of(end)
            if not Position.of(found).is_before(position) or position.held < handle.since:
                return
            try:
                handle.downgrade_since(self._kept_at(end), opaque=json.dumps(end))
            except OpaqueMismatch:
                continue
            return

    def _kept_at(self, offset: Offset) -> Antichain:
        """Where a cursor at this offset holds since.

        At the end of a closed shard nothing is left to read. The cursor must not close the shard to reads, so it stays
        at the last time that has rows: the latest contents can be read.
        """
        held = Position.of(offset).held
        if not held.is_empty:
            return held
        last = ViewRequest(lower=Antichain(TIME_MAX + 1))  # only what reaches to the end
        view = executors.transport(self._target.connection).view(self._target.shard, last)
        times = [max((batch.desc.lower.element or 0) - 1, 0) for batch in view.batches]
        times += [part.time_max for batch in view.batches for part in batch.parts()]
        return max(view.since, *map(Antichain, times))


def _position(handle: CriticalReaderHandle) -> Offset:
    try:
        found = json.loads(handle.opaque)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise InvalidUsage(f"the critical reader {handle.cursor!r} is not the cursor of a stream; choose another name")
    return found


def _limit_of(limit: ReadLimit) -> Limit:
    rows = limit.max_rows if isinstance(limit, ReadMaxRows) else None
    return Limit(rows, limit.max_bytes if isinstance(limit, ReadMaxBytes) else None)


# The streaming sink: every micro-batch is published exactly once.
#
# The id of the query and the number of the batch are kept with the shard and change atomically with the data, so a
# batch that is tried again, by this driver, a restarted one or a zombie, is recognised and skipped.


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
