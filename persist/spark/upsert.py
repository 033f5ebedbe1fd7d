"""Exact replacement of rows, by key or all of them, under concurrent writes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from persist.client.contents_diff import drop_retractions, load_full_view, may_replace_all, try_drop
from persist.client.optimistic_edit import find_landed_edit
from persist.client.snapshot import Held, ReadLease, ReadSettings, check_held, leased_blobs, part_reader, with_renewal
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
from persist.core.truncation import drops_within
from persist.formats.store_errors import translated
from persist.parts import ALL_KEYS, TIME, KeyRange, PartReader, ShardSchema
from persist.parts.consolidate import join, negated
from persist.parts.key_encoding import KeyPoints, check_unique, distinct_keys, key_schema, semi_join, unique_keys
from persist.parts.part_files import WHOLE_BYTES_MAX
from persist.spark import executors
from persist.spark.options import Target
from persist.spark.spark_schemas import grouped

# Whether anything remains of the rows that a job has staged: rows that come and go as often change nothing.


Runs = tuple[Run, ...]


def lasting(target: Target, runs: Runs, schema: ShardSchema) -> Runs:
    """The runs, or none where all of their rows cancel out. They are of one time, and what one job has staged.

    They are read up to the first row that remains; not at all where their multiplicities tell that there is one. Raises
    what reading parts may.
    """
    parts = [part for run in runs for part in run.parts]
    if len(parts) < 2 or diff_sum_of(parts):  # one part alone has what remains of its rows
        return runs
    blob, memory = executors.transport(target.connection).blob, target.connection.handles.read.memory_bytes
    reader = PartReader(blob, {part.schema_id: schema for part in parts}, schema, memory_bytes=memory)
    with translated():
        return runs if any(map(len, reader.read_range(runs))) else ()


# Replacing rows: by key (`envelope=upsert`) or all of them (mode overwrite), exactly, under concurrency too.
#
# A job fixes a base: the shard's upper when it began. Tasks stage the new rows; what their keys had before the base is
# retracted, worked out from the snapshot; the commit compares the shard's upper with the base. When others have written
# meanwhile, it also retracts what they wrote under the keys of the job, and tries again. So after the commit each key
# has exactly the rows that the job gave it; what others wrote before the commit is replaced.
#
# Who retracts what was there before depends on the keys. Where those of a task lie close together, it reads a few rows
# for each: the task does so. Where they are few among many, other tasks would read the same row groups once more: then
# the commit does so for all of these together, and reads each row group once.
#
# Which keys a job replaces is staged as parts too (claims: the key columns alone). Nothing ever names them; they let
# the commit find a key that comes twice, and what was there, in bounded memory.
#
# An overwrite lets all that is there go by metadata, by a drop in the same commit, without a look at it. Where that is
# not possible the commit reads and retracts it. With `overwriteSchema` the columns change by that very commit too.


CLAIMS_SCHEMA = 1  # claims are read with their own schema only
CHUNK_BYTES = 32 * 1024 * 1024  # rows that a task replaces at a time
DENSE_ROWS = 8  # for each key: a task reads no more; where more would be read the commit does it
KEYS_AT_ONCE = 1_000_000  # for which the commit reads what was there
TRIES_MAX = 1_000  # lost races; each means that another writer made progress


@dataclass(frozen=True)
class ReplacementCommit:
    """How a replacement is committed. `alone`: only if nobody has written since the base."""

    verb: str  # as the commit history tells it
    token: Token
    attributes: tuple[AttributeUpdate, ...] = ()
    alone: bool = False


@dataclass(frozen=True)
class Base:
    """The shard as a job found it: its upper, and a lease that keeps what lies before and after it readable."""

    upper: int
    reader: ReaderId
    seqno: SeqNo
    shard_id: ShardId

    @classmethod
    def take(cls, target: Target, view: ShardView) -> Base:
        """Raises InvalidUsage when the shard is closed to writes."""
        if view.upper.element is None:
            raise InvalidUsage(f"shard {target.shard!r} is closed: nothing in it can be replaced")
        transport = executors.one_shard(target, view.shard_id)
        held = Antichain(max(view.upper.element - 1, view.since.element or 0))
        lease = ReadLease.open(transport, target.shard, held, "spark replace", target.connection.handles.read)
        return cls(view.upper.element, lease.reader, lease.seqno, view.shard_id)

    def transport(self, target: Target) -> OneShard:
        """Of this process, to the shard that the job began with. It raises UnknownShard once that was dropped."""
        return executors.one_shard(target, self.shard_id)

    def lease(self, target: Target) -> ReadLease:
        settings = target.connection.handles.read
        return ReadLease(self.transport(target), target.shard, self.reader, settings, self.seqno)

    def held(self, target: Target) -> Held | None:
        """The contents at the base; None: there were none. Raises what asking for a view may."""
        if self.upper == 0:
            return None
        transport, settings = self.transport(target), target.connection.handles.read
        view = transport.view(target.shard, ViewRequest())
        return Held(transport, self.upper - 1, view, self.lease(target), settings)


def _rows_of(held: Held | None, key_range: KeyRange) -> Iterator[pa.Table]:
    """What is there, in key order: all columns and `__diff`. Raises what reading a split may."""
    if held is not None:
        yield from held.split(key_range, held.runs, None).read(held.transport)


def _rows_near(held: Held | None, keys: KeyPoints) -> int:
    """How many rows the row groups have that may have one of the keys. Reads footers of large parts."""
    if held is None:
        return 0
    _, reader = part_reader(held.transport, held.view, held.settings)
    found = 0
    with leased_blobs(held.lease):
        for part in (part for run in reader.expanded(held.runs, keys) for part in run.parts):
            if not keys.overlaps(part.key_lower, part.key_upper):
                continue
            if part.is_inline or part.size <= WHOLE_BYTES_MAX:
                found += part.rows
                continue
            groups = reader.row_groups(part)
            found += sum(group.rows for group in groups if keys.overlaps(group.key_lower, group.key_upper))
    return found


@dataclass(frozen=True)
class Replaced:
    """What a task stages: rows, the keys that it claims, and those of the claims whose old rows it left in place."""

    runs: Runs
    claims: Runs
    left: Runs


@dataclass(frozen=True)
class Before:
    """The columns that a job takes away with the rows: their schema, its id, and the newest id, which must be so still.

    What was there is retracted by them, where it is.
    """

    schema_id: int
    record: SchemaRecord
    newest_id: int


@dataclass(frozen=True)
class Replacement:
    """What one process needs to replace rows of a shard: the job's base, its writer, and the schema of its rows.

    With `before` the shard gets that schema by the commit of the rows.
    """

    target: Target
    base: Base
    handle: WriteHandle
    schema: ShardSchema
    before: Before | None = None

    def stage_upsert(self, batches: Iterable[pa.RecordBatch], delete_column: str | None) -> Replaced:
        """Stage new rows, and the retractions of those that they replace where these lie close together.

        Rows whose `delete_column` is true (not null) only remove their key.
        """
        found: list[Run] = []
        claims: list[Run] = []
        left: list[Run] = []
        keyed = key_schema(self.schema)
        for rows, deleted in _chunks(batches, delete_column, self.schema):
            keys = unique_keys(rows, keyed, "an upsert")
            claim = self._stage_claims(keys)
            claims.extend(claim)
            pieces = [rows.filter(pc.invert(deleted))]
            points, held = KeyPoints.of(keys, keyed), self.base.held(self.target)
            if _rows_near(held, points) <= DENSE_ROWS * len(keys):
                pieces += [_negated(semi_join(old, keys, keyed)) for old in _rows_of(held, points)]
            else:
                left.extend(claim)
            found.extend(self.handle.stage_for_one_commit(_batches(pieces), None, by_rows=False))
        return Replaced(tuple(found), tuple(claims), tuple(left))

    def publish(self, runs: Runs, claims: Runs | None, left: Runs, commit: ReplacementCommit) -> None:
        """Commit `runs` with retractions: of the whole shard (`claims` None), or of what has the keys claimed.

        `left` are the claims whose rows of before the base no task has retracted. With `commit.alone` it raises
        UpperMismatch where somebody has written since the base.

        Raises InvalidUsage when a key is claimed twice, AttributeMismatch when a condition fails, Conflict when others
        won every one of `TRIES_MAX` races or rows were erased since the base, Expired when the base's lease lapsed,
        UnknownShard when the shard was dropped. Nothing is changed then. The base is not given back.
        """
        try:
            self._publish(runs, claims, left, commit)
        except (Expired, Conflict):
            # What has landed is told nothing of what came after it: its hold was given back, and rows may be erased.
            if find_landed_edit(self.handle, commit.verb, commit.token) is None:
                raise

    def _publish(self, runs: Runs, claims: Runs | None, left: Runs, commit: ReplacementCommit) -> None:
        target, lease = self.target, self.base.lease(self.target)
        if claims is None:
            if self._dropped(runs, commit):
                return
            lease.check()
            whole = _batches(map(_negated, _rows_of(self.base.held(target), ALL_KEYS)))
            runs = (*runs, *self._retracting.stage_for_one_commit(whole, None, by_rows=False))
        else:
            self._check_claims(claims)
            lease.check()
            runs = lasting(target, (*runs, *self._retract_before(left)), self.schema)
        seen = self.base.upper
        if commit.alone:
            self._commit(runs, Antichain(seen), commit)
            return
        for _ in range(TRIES_MAX):
            view = self.base.transport(target).view(target.shard, ViewRequest(with_batches=False))
            upper = view.upper.element
            if upper is None:
                raise InvalidUsage(f"shard {target.shard!r} was closed: nothing in it can be replaced")
            if upper > seen:
                self._check_erased(view, seen)
                runs = (*runs, *self._retract_between(lease, claims, seen, upper))
                runs = runs if claims is None else lasting(target, runs, self.schema)
                seen = upper
            try:
                self._commit(runs, Antichain(seen), commit)
            except UpperMismatch:
                lease.keep()
                continue
            return
        raise Conflict(f"others wrote to shard {target.shard!r} before each of {TRIES_MAX} tries; run the job again")

    def _commit(self, runs: Runs, expected: Antichain, commit: ReplacementCommit, *, drops: bool = False) -> c.Appended:
        """One try. Raises UpperMismatch where the upper is not the expected one."""
        before = self.before
        return self.handle.commit_rewrite(
            runs,
            expected,
            operation=commit.verb,
            token=commit.token,
            attributes=commit.attributes,
            schema=None if before is None else c.SchemaChange(before.newest_id, self.schema.to_record()),
            tombstone=EMPTY if drops else None,
        )

    @property
    def _retracting(self) -> WriteHandle:
        """By which rows of before are written: as the shard has them."""
        if self.before is None:
            return self.handle
        return self._handle(self.before.schema_id, ShardSchema.from_record(self.before.record))

    def _handle(self, schema_id: int, schema: ShardSchema) -> WriteHandle:
        """The job's writer, for rows of another schema."""
        settings = self.target.connection.handles.write
        known = schema_id, schema
        return WriteHandle(self.handle.transport, self.target.shard, lambda: known, settings, self.handle.writer_id)

    def _dropped(self, runs: Runs, commit: ReplacementCommit) -> bool:
        """Whether all that was there went by a drop in the commit of the rows. False: that is not possible here.

        Raises Conflict where rows were erased since the base: they may be among those that the job writes.
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

    def _retract_before(self, left: Runs) -> Runs:
        """Stage the opposite of what had these keys before the base. Each row group is read once."""
        keyed = key_schema(self.schema)
        found: list[Run] = []
        held = self.base.held(self.target) if left else None
        for keys in map(join, grouped(self._claim_reader().read_range(left), len, KEYS_AT_ONCE)) if left else ():
            points = KeyPoints.of(keys, keyed)
            opposite = (_negated(semi_join(old, keys, keyed)) for old in _rows_of(held, points))
            found.extend(self.handle.stage_for_one_commit(_batches(opposite), None, by_rows=False))
        return tuple(found)

    def _check_erased(self, view: ShardView, lower: int) -> None:
        """The opposite of what an erasure wrote is its rows: they would be written once more, after its receipt even.

        Raises Conflict where there was one at `lower` or later, or one is pending.
        """
        if view.erasing or Antichain(lower) <= view.erased:
            raise Conflict(
                f"rows of shard {self.target.shard!r} were erased since this job began; nothing was changed: run it "
                "again"
            )

    def _stage_claims(self, keys: pa.Table) -> Runs:
        return self._handle(CLAIMS_SCHEMA, key_schema(self.schema)).stage_for_one_commit(keys, 0, by_rows=False)

    def _claim_reader(self) -> PartReader:
        claimed = key_schema(self.schema)
        blob, memory = executors.transport(self.target.connection).blob, self._settings.memory_bytes
        return PartReader(blob, {CLAIMS_SCHEMA: claimed}, claimed, memory_bytes=memory)

    @property
    def _settings(self) -> ReadSettings:
        return self.target.connection.handles.read

    def _check_claims(self, claims: Runs) -> None:
        """Look for a key that two tasks (or chunks) claim; nothing to look for where their keys cannot meet."""
        if sum(len(run.parts) for run in claims) < 2:
            return
        with translated():
            for piece in self._claim_reader().read_range(claims):
                check_unique(piece, key_schema(self.schema), "an upsert")

    def _retract_between(self, lease: ReadLease, claims: Runs | None, lower: int, upper: int) -> Runs:
        """Stage the opposite of what was written at times in `[lower, upper)`, under the claimed keys only."""
        transport = self.base.transport(self.target)
        view = transport.view(self.target.shard, ViewRequest(lower=Antichain(lower)))
        check_held(view, max(lower - 1, 0))
        _, reader = part_reader(transport, view, self._settings)
        start, end = Antichain(lower), Antichain(upper)
        batches = [b for b in view.batches if start < b.desc.upper and b.desc.lower < end]
        parts = [part for batch in batches for part in batch.parts()]
        updates = reader.read_updates(parts, start, end)
        if drops := drops_within(view.drops, lower, upper):  # what others took away by a drop was not written
            updates = chain(
                updates, drop_retractions(reader, load_full_view(transport, self.target.shard, view), drops)
            )
        pieces = with_renewal(updates, lease)
        opposite = (_negated(rows) for piece in pieces for rows in self._claimed(piece, claims))
        return self._retracting.stage_for_one_commit(_batches(opposite), None, by_rows=False)

    def _claimed(self, rows: pa.Table, claims: Runs | None) -> Iterator[pa.Table]:
        """The rows that the job replaces."""
        if claims is None:
            yield rows
            return
        keyed = key_schema(self.schema)
        span = KeyPoints.of(distinct_keys(rows, keyed), keyed)
        for claimed in self._claim_reader().read_range(claims, since=0, key_range=span):
            yield semi_join(rows, claimed, keyed)


def _negated(rows: pa.Table) -> pa.Table:
    """The rows with their diffs negated and without times: the commit sets them."""
    return negated(rows.drop_columns([TIME]) if TIME in rows.schema.names else rows)


def _batches(tables: Iterable[pa.Table]) -> Iterator[pa.RecordBatch]:
    for table in tables:
        yield from table.to_batches()


def _chunks(
    batches: Iterable[pa.RecordBatch], delete_column: str | None, schema: ShardSchema
) -> Iterator[tuple[pa.Table, pa.ChunkedArray]]:
    """The rows in pieces of about `CHUNK_BYTES`, conformed, and which of them are deletions."""
    rows = (batch for batch in batches if batch.num_rows)
    for chunk in grouped(rows, lambda batch: int(batch.nbytes), CHUNK_BYTES):
        yield _chunk(chunk, delete_column, schema)


def _chunk(
    batches: Sequence[pa.RecordBatch], delete_column: str | None, schema: ShardSchema
) -> tuple[pa.Table, pa.ChunkedArray]:
    table = pa.Table.from_batches(batches)
    deleted = pa.chunked_array([pa.repeat(pa.scalar(False), len(table))])
    if delete_column is not None:
        column = table.column(delete_column)
        if not pa.types.is_boolean(column.type):
            raise InvalidUsage(f"option 'deleteColumn' names {delete_column!r}, which is {column.type}, not boolean")
        deleted = column.fill_null(False)
        table = table.drop_columns([delete_column])
    return schema.conform(table, 0).drop_columns([TIME]), deleted
