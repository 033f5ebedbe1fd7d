"""Exact replacement of rows, by key or all of them, under concurrent writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.contents_diff import drop_retractions, load_full_view, may_replace_all, try_drop
from persist.client.optimistic_edit import find_landed_edit
from persist.client.snapshot import Held, ReadLease, check_held, leased_blobs, part_reader, with_renewal
from persist.client.transport import OneShard
from persist.client.write import WriteHandle
from persist.core import commands as c
from persist.core.attribute import AttributeUpdate
from persist.core.batch import Run, diff_sum_of
from persist.core.errors import Conflict, Expired, InvalidUsage, UpperMismatch
from persist.core.frontier import EMPTY, Antichain
from persist.core.ids import ReaderId, SeqNo, ShardId, Token
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import SchemaRecord
from persist.core.truncations_and_drops import drops_within
from persist.formats.store_errors import translated
from persist.parts import ALL_KEYS, TIME, KeyRange, PartReader, ShardSchema
from persist.parts.consolidate import join, negated
from persist.parts.key_encoding import KeyPoints, check_unique, distinct_keys, key_schema, semi_join, unique_keys
from persist.parts.part_files import WHOLE_BYTES_MAX
from persist.spark import executors
from persist.spark.options import Target
from persist.spark.spark_schemas import grouped

Runs = tuple[Run, ...]


def without_cancelled(target: Target, runs: Runs, schema: ShardSchema) -> Runs:
    """The runs, or none if all of their rows cancel out. They are the runs that one job has staged, for one time.

    They are read up to the first row that remains, and not at all if the sum of their multiplicities shows that one
    does. Raises what reading parts may.
    """
    parts = [part for run in runs for part in run.parts]
    if len(parts) < 2 or diff_sum_of(parts):  # a single part is consolidated
        return runs
    # Referred to until all is read: the end of a transport ends its blob store.
    transport, memory = executors.transport(target.connection), target.connection.handles.read.memory_bytes
    reader = PartReader(transport.blob, {part.schema_id: schema for part in parts}, schema, memory_bytes=memory)
    with translated():
        return runs if any(map(len, reader.read_range(runs))) else ()


# Replacement of rows by key (`envelope=upsert`) or of all rows (mode overwrite), exact under concurrent writes.
#
# A job fixes a base: the shard's upper when it starts. Tasks stage the new rows. The rows that their keys had at the
# base are retracted, from the snapshot as of the base. The commit requires that the upper is still the base. If others
# have written meanwhile, the commit also retracts what they wrote to the keys of the job, and retries. After the commit
# each key therefore has exactly the rows of the job, which replace what others wrote before the commit.
#
# Who retracts the old rows depends on the keys. If the keys of a task are dense, the task reads a few rows per key and
# retracts them. If they are sparse, several tasks would read the same row groups; the commit then retracts the rows of
# all these keys together and reads each row group once.
#
# The keys that a job replaces are staged as parts too (claims: the key columns alone). No State refers to them. They
# let the commit find duplicate keys and the old rows in bounded memory.
#
# An overwrite removes all rows by metadata if possible, by a drop in the same commit, without reading them. Otherwise
# the commit reads and retracts them. With `overwriteSchema` the same commit also replaces the columns.

CLAIMS_SCHEMA = 1  # claims are only read with their own schema
CHUNK_BYTES = 32 * 1024 * 1024  # of the rows that a task replaces at a time
DENSE_ROWS = 8  # per key that a task reads to retract; beyond that the commit retracts
KEYS_AT_ONCE = 1_000_000  # whose old rows the commit reads in one pass
TRIES_MAX = 1_000  # lost races; each means that another writer made progress


@dataclass(frozen=True)
class ReplacementCommit:
    """How a replacement is committed. `alone`: only if nothing was committed since the base."""

    operation: str  # in the commit history
    token: Token
    attributes: tuple[AttributeUpdate, ...] = ()
    alone: bool = False


@dataclass(frozen=True)
class Base:
    """The shard when a job starts: its upper, and a lease that keeps the history around it readable."""

    upper: int
    reader: ReaderId
    seqno: SeqNo
    shard_id: ShardId

    @classmethod
    def take(cls, target: Target, view: ShardView) -> Base:
        """Take the lease. Raises InvalidUsage if the shard is closed to writes."""
        if view.upper.element is None:
            raise InvalidUsage(f"shard {target.shard!r} is closed, so its rows cannot be replaced")
        transport = executors.one_shard(target, view.shard_id)
        held = Antichain(max(view.upper.element - 1, view.since.element or 0))
        lease = ReadLease.open(transport, target.shard, held, "spark replace", target.connection.handles.read)
        return cls(view.upper.element, lease.reader, lease.seqno, view.shard_id)

    def transport(self, target: Target) -> OneShard:
        """The transport of this process to the shard of the job. It raises UnknownShard once that shard is dropped."""
        return executors.one_shard(target, self.shard_id)

    def lease(self, target: Target) -> ReadLease:
        settings = target.connection.handles.read
        return ReadLease(self.transport(target), target.shard, self.reader, settings, self.seqno)

    def held(self, target: Target) -> Held | None:
        """The contents as of the base; None if nothing was written before it. Raises what requesting a view may."""
        if self.upper == 0:
            return None
        transport, settings = self.transport(target), target.connection.handles.read
        view = transport.view(target.shard, ViewRequest())
        return Held(transport, self.upper - 1, view, self.lease(target), settings)


def _read_rows(held: Held | None, key_range: KeyRange) -> Iterator[pa.Table]:
    """The rows in key order: all columns and `__diff`. Raises what reading a split may."""
    if held is not None:
        yield from held.split(key_range, held.runs, None).read(held.transport)


def _count_candidates(held: Held | None, keys: KeyPoints) -> int:
    """The number of rows in the row groups that may have one of the keys. Reads footers of large parts."""
    if held is None:
        return 0
    _, reader = part_reader(held.transport, held.view, held.settings)
    rows = 0
    with leased_blobs(held.lease):
        for part in (part for run in reader.expanded(held.runs, keys) for part in run.parts):
            if not keys.overlaps(part.key_lower, part.key_upper):
                continue
            if part.is_inline or part.size <= WHOLE_BYTES_MAX:
                rows += part.rows
                continue
            groups = reader.row_groups(part)
            rows += sum(group.rows for group in groups if keys.overlaps(group.key_lower, group.key_upper))
    return rows


@dataclass(frozen=True)
class ReplacedSchema:
    """The schema that a job replaces with the rows, its id, and the newest schema id, which the commit expects.

    Retractions of the old rows have this schema.
    """

    schema_id: int
    record: SchemaRecord
    newest_id: int


@dataclass(frozen=True)
class Replacement:
    """Replaces rows of a shard, in a task or in the commit: the job's base, its writer, and the schema of its rows.

    With `replaced_schema`, the commit of the rows also makes `schema` the schema of the shard.
    """

    target: Target
    base: Base
    handle: WriteHandle
    schema: ShardSchema
    replaced_schema: ReplacedSchema | None = None

    def stage_upsert(self, batches: Iterable[pa.RecordBatch], delete_column: str | None) -> tuple[Runs, Runs, Runs]:
        """Stage new rows and, if their keys are dense, the retractions of the rows that they replace.

        Rows whose `delete_column` is true (not null) only delete their key. Returns the rows, the claims, and the
        claims whose old rows the commit must retract.
        """
        runs: list[Run] = []
        claims: list[Run] = []
        left: list[Run] = []
        keyed = key_schema(self.schema)
        for rows, deleted in _chunks(batches, delete_column, self.schema):
            keys = unique_keys(rows, keyed, "an upsert")
            claim = self._handle(CLAIMS_SCHEMA, keyed).stage_for_one_commit(keys, 0, by_rows=False)
            claims.extend(claim)
            pieces = [rows.filter(pc.invert(deleted))]
            points, held = KeyPoints.of(keys, keyed), self.base.held(self.target)
            if _count_candidates(held, points) <= DENSE_ROWS * len(keys):
                pieces += [_negated(semi_join(old, keys, keyed)) for old in _read_rows(held, points)]
            else:
                left.extend(claim)
            runs.extend(self.handle.stage_for_one_commit(pieces, None, by_rows=False))
        return tuple(runs), tuple(claims), tuple(left)

    def publish(self, runs: Runs, claims: Runs | None, left: Runs, commit: ReplacementCommit) -> None:
        """Commit `runs` with retractions: of the whole shard (`claims` None), or of the claimed keys.

        `left` are the claims whose rows as of the base no task has retracted. With `commit.alone` it raises
        UpperMismatch if anything was committed since the base.

        Raises InvalidUsage if a key is claimed twice, AttributeMismatch if a condition fails, Conflict if others won
        all of `TRIES_MAX` races or rows were erased since the base, Expired if the base's lease has expired,
        UnknownShard if the shard was dropped. Nothing is changed then. The base is not released.
        """
        try:
            self._publish(runs, claims, left, commit)
        except (Expired, Conflict):
            # If an earlier attempt landed, its hold was released, and rows may have been erased since.
            if find_landed_edit(self.handle, commit.operation, commit.token) is None:
                raise

    def _publish(self, runs: Runs, claims: Runs | None, left: Runs, commit: ReplacementCommit) -> None:
        target, lease = self.target, self.base.lease(self.target)
        if claims is None:
            if self._commit_with_drop(runs, commit):
                return
            lease.check()
            whole = map(_negated, _read_rows(self.base.held(target), ALL_KEYS))
            runs = (*runs, *self._retracting.stage_for_one_commit(whole, None, by_rows=False))
        else:
            self._check_claims(claims)
            lease.check()
            runs = without_cancelled(target, (*runs, *self._retract_left(left)), self.schema)
        seen = self.base.upper
        if commit.alone:
            self._commit(runs, Antichain(seen), commit)
            return
        for _ in range(TRIES_MAX):
            view = self.base.transport(target).view(target.shard, ViewRequest(with_batches=False))
            upper = view.upper.element
            if upper is None:
                raise InvalidUsage(f"shard {target.shard!r} was closed, so its rows cannot be replaced")
            if upper > seen:
                self._check_erased(view, seen)
                runs = (*runs, *self._retract_between(lease, claims, seen, upper))
                runs = runs if claims is None else without_cancelled(target, runs, self.schema)
                seen = upper
            try:
                self._commit(runs, Antichain(seen), commit)
            except UpperMismatch:
                lease.keep()
                continue
            return
        raise Conflict(f"others wrote to shard {target.shard!r} before each of {TRIES_MAX} attempts; run the job again")

    def _commit(self, runs: Runs, expected: Antichain, commit: ReplacementCommit, *, drops: bool = False) -> c.Appended:
        """One attempt. Raises UpperMismatch if the upper is not the expected one."""
        replaced = self.replaced_schema
        return self.handle.commit_rewrite(
            runs,
            expected,
            operation=commit.operation,
            token=commit.token,
            attributes=commit.attributes,
            schema=None if replaced is None else c.SchemaChange(replaced.newest_id, self.schema.to_record()),
            tombstone=EMPTY if drops else None,
        )

    @property
    def _retracting(self) -> WriteHandle:
        """The writer of retractions, in the schema of the old rows."""
        if self.replaced_schema is None:
            return self.handle
        return self._handle(self.replaced_schema.schema_id, ShardSchema.from_record(self.replaced_schema.record))

    def _handle(self, schema_id: int, schema: ShardSchema) -> WriteHandle:
        """The job's writer, for rows of another schema."""
        settings = self.target.connection.handles.write
        known = schema_id, schema
        return WriteHandle(self.handle.transport, self.target.shard, lambda: known, settings, self.handle.writer_id)

    def _commit_with_drop(self, runs: Runs, commit: ReplacementCommit) -> bool:
        """Commit the rows together with a drop of all old rows. False: a drop is not possible in this shard.

        Raises Conflict if rows were erased since the base, because the job may write them again.
        """
        seen = self.base.upper
        for _ in range(TRIES_MAX):
            view = self.base.transport(self.target).view(self.target.shard, ViewRequest(with_batches=False))
            if not may_replace_all(view):
                return False
            if view.upper.element != seen and not commit.alone:
                self._check_erased(view, self.base.upper)
                seen = view.upper.element or 0
            try:
                return try_drop(partial(self._commit, runs, Antichain(seen), commit, drops=True)) is not None
            except UpperMismatch:
                if commit.alone:
                    raise
        return False

    def _retract_left(self, left: Runs) -> Runs:
        """Stage the retractions of the rows as of the base with these keys. Reads each row group once."""
        keyed = key_schema(self.schema)
        runs: list[Run] = []
        held = self.base.held(self.target) if left else None
        for keys in map(join, grouped(self._claim_reader().read_range(left), len, KEYS_AT_ONCE)) if left else ():
            points = KeyPoints.of(keys, keyed)
            retractions = (_negated(semi_join(old, keys, keyed)) for old in _read_rows(held, points))
            runs.extend(self.handle.stage_for_one_commit(retractions, None, by_rows=False))
        return tuple(runs)

    def _check_erased(self, view: ShardView, lower: int) -> None:
        """Raise Conflict if an erasure is pending, or happened at `lower` or later.

        Retracting what an erasure wrote would write the erased rows again, possibly after its certificate was issued.
        """
        if view.erasing or Antichain(lower) <= view.erased:
            raise Conflict(
                f"rows of shard {self.target.shard!r} were erased since this job started, so nothing was changed; run "
                "the job again"
            )

    def _claim_reader(self) -> PartReader:
        claimed, memory = key_schema(self.schema), self.target.connection.handles.read.memory_bytes
        # The handle keeps its transport open.
        return PartReader(self.handle.transport.blob, {CLAIMS_SCHEMA: claimed}, claimed, memory_bytes=memory)

    def _check_claims(self, claims: Runs) -> None:
        """Raise InvalidUsage if two tasks (or chunks) claim the same key. A single part has unique keys."""
        if sum(len(run.parts) for run in claims) < 2:
            return
        with translated():
            for piece in self._claim_reader().read_range(claims):
                check_unique(piece, key_schema(self.schema), "an upsert")

    def _retract_between(self, lease: ReadLease, claims: Runs | None, lower: int, upper: int) -> Runs:
        """Stage the retractions of the updates at times in `[lower, upper)`, of the claimed keys only."""
        transport = self.base.transport(self.target)
        view = transport.view(self.target.shard, ViewRequest(lower=Antichain(lower)))
        check_held(view, max(lower - 1, 0))
        _, reader = part_reader(transport, view, self.target.connection.handles.read)
        start, end = Antichain(lower), Antichain(upper)
        batches = [b for b in view.batches if start < b.desc.upper and b.desc.lower < end]
        parts = [part for batch in batches for part in batch.parts()]
        updates = reader.read_updates(parts, start, end)
        if drops := drops_within(view.drops, lower, upper):  # the retractions of a drop are not stored
            updates = chain(
                updates, drop_retractions(reader, load_full_view(transport, self.target.shard, view), drops)
            )
        pieces = with_renewal(updates, lease)
        negated_rows = (_negated(rows) for piece in pieces for rows in self._claimed(piece, claims))
        return self._retracting.stage_for_one_commit(negated_rows, None, by_rows=False)

    def _claimed(self, rows: pa.Table, claims: Runs | None) -> Iterator[pa.Table]:
        """Those of the rows that the job replaces."""
        if claims is None:
            yield rows
            return
        keyed = key_schema(self.schema)
        span = KeyPoints.of(distinct_keys(rows, keyed), keyed)
        for claimed in self._claim_reader().read_range(claims, since=0, key_range=span):
            yield semi_join(rows, claimed, keyed)


def _negated(rows: pa.Table) -> pa.Table:
    """The rows with negated diffs and without times, which the commit sets."""
    return negated(rows.drop_columns([TIME]) if TIME in rows.schema.names else rows)


def _chunks(
    batches: Iterable[pa.RecordBatch], delete_column: str | None, schema: ShardSchema
) -> Iterator[tuple[pa.Table, pa.ChunkedArray]]:
    """The conformed rows in chunks of about `CHUNK_BYTES`, and whether each row is a deletion."""
    rows = (batch for batch in batches if batch.num_rows)
    for chunk in grouped(rows, lambda batch: int(batch.nbytes), CHUNK_BYTES):
        table = pa.Table.from_batches(chunk)
        deleted = pa.chunked_array([pa.repeat(pa.scalar(False), len(table))])
        if delete_column is not None:
            column = table.column(delete_column)
            if not pa.types.is_boolean(column.type):
                raise InvalidUsage(f"option 'deleteColumn' names {delete_column!r}: {column.type}, not boolean")
            deleted = column.fill_null(False)
            table = table.drop_columns([delete_column])
        yield schema.conform(table, 0).drop_columns([TIME]), deleted
