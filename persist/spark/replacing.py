"""Replacing rows: by key (`envelope=upsert`) or all of them (mode overwrite), exactly, under concurrency too.

A job fixes a base: the shard's upper when it began. Tasks stage the new rows, and the retractions of the rows that
their keys had before the base, worked out from the snapshot; the commit compares the shard's upper with the base. When
others have written meanwhile, it also retracts what they wrote under the keys of the job, and tries again. So after the
commit each key has exactly the rows that the job gave it; what others wrote before the commit is replaced.

Which keys a job replaces is staged as parts too (claims: the key columns alone). Nothing ever names them; they let the
commit find a key that comes twice, and what others wrote, in bounded memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.client.dropped import retracted, whole_view
from persist.client.retry import send
from persist.client.snapshot import Held, ReadLease, ReadSettings, check_held, kept, part_reader
from persist.client.transport import OneShard
from persist.client.write import WriteHandle
from persist.core import commands as c
from persist.core.antichain import Antichain
from persist.core.attribute import AttributeUpdate
from persist.core.batch import Run
from persist.core.drops import drops_within
from persist.core.errors import Conflict, InvalidUsage, UpperMismatch
from persist.core.ids import ReaderId, SeqNo, ShardId, Token
from persist.core.view import ShardView, ViewRequest
from persist.formats.store_errors import translated
from persist.parts import ALL_KEYS, DIFF, TIME, KeyRange, PartReader, ShardSchema, consolidate
from persist.parts.consolidate import join, negated, sort_groups
from persist.parts.keycodec import SortedKeys
from persist.spark import executors
from persist.spark.options import Target

Runs = tuple[Run, ...]
CLAIMS_SCHEMA = 1  # claims are read with their own schema only
CHUNK_BYTES = 32 * 1024 * 1024  # rows that a task replaces at a time
TRIES_MAX = 1_000  # lost races; each means that another writer made progress


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
        transport = OneShard(executors.transport(target.connection), view.shard_id)
        held = Antichain(max(view.upper.element - 1, view.since.element or 0))
        lease = ReadLease.open(transport, target.shard, held, "spark replace", target.connection.handles.read)
        return cls(view.upper.element, lease.reader, lease.seqno, view.shard_id)

    def transport(self, target: Target) -> OneShard:
        """Of this process, to the shard that the job began with. It raises UnknownShard once that was dropped."""
        return OneShard(executors.transport(target.connection), self.shard_id)

    def lease(self, target: Target) -> ReadLease:
        settings = target.connection.handles.read
        return ReadLease(self.transport(target), target.shard, self.reader, settings, self.seqno)

    def before(self, target: Target, key_range: KeyRange) -> Iterator[pa.Table]:
        """The contents at the base, in key order: all columns and `__diff`. Raises what reading a split may."""
        if self.upper == 0:
            return
        transport = self.transport(target)
        view = transport.view(target.shard, ViewRequest())
        held = Held(transport, self.upper - 1, view, self.lease(target), target.connection.handles.read)
        yield from held.split(key_range, held.runs, None).read(transport)


def key_schema(schema: ShardSchema) -> ShardSchema:
    """The key columns alone, as a schema of their own."""
    return ShardSchema(pa.schema([schema.arrow.field(name) for name in schema.key]), schema.key)


@dataclass(frozen=True)
class Replacement:
    """What one process needs to replace rows of a shard: the job's base, its writer, and the shard's schema."""

    target: Target
    base: Base
    handle: WriteHandle
    schema: ShardSchema

    def stage_upsert(self, batches: Iterable[pa.RecordBatch], delete_column: str | None) -> tuple[Runs, Runs]:
        """Stage new rows and the retractions of those that they replace; the runs, and those of the claimed keys.

        Rows whose `delete_column` is true (not null) only remove their key.
        """
        found: list[Run] = []
        claims: list[Run] = []
        for rows, deleted in _chunks(batches, delete_column, self.schema):
            keys = _claims(rows, self.schema)
            claims.extend(self._stage_claims(keys))
            pieces = [rows.filter(pc.invert(deleted))]
            span = _span(keys, self.schema)
            pieces += [_negated(semi_join(old, keys, self.schema)) for old in self.base.before(self.target, span)]
            found.extend(self.handle.stage_for_one_commit(_batches(pieces), None))
        return tuple(found), tuple(claims)

    def publish(
        self,
        runs: Runs,
        claims: Runs | None,
        token: Token,
        attributes: tuple[AttributeUpdate, ...],
        *,
        alone: bool = False,
    ) -> None:
        """Commit `runs` with retractions: of the whole shard (`claims` None), or of what others wrote under them.

        `alone`: only if nobody has written since the base. Else it raises UpperMismatch.

        Raises InvalidUsage when a key is claimed twice, AttributeMismatch when a condition fails, Conflict when others
        won every one of `TRIES_MAX` races or rows were erased since the base, Expired when the base's lease lapsed,
        UnknownShard when the shard was dropped. Nothing is changed then. The base is not given back.
        """
        target, lease = self.target, self.base.lease(self.target)
        if claims is None:
            lease.check()
            retractions = self.handle.stage_for_one_commit(
                _batches(map(_negated, self.base.before(target, ALL_KEYS))), None
            )
            runs = (*runs, *retractions)
        else:
            self._check_claims(claims)
        seen = self.base.upper
        if alone:
            self.handle.commit_compare_and_append(at(runs, seen), seen, seen + 1, token=token, attributes=attributes)
            return
        for _ in range(TRIES_MAX):
            upper = self.base.transport(target).view(target.shard, ViewRequest(with_batches=False)).upper.element
            if upper is None:
                raise InvalidUsage(f"shard {target.shard!r} was closed: nothing in it can be replaced")
            if upper > seen:
                self._check_erased(seen)
                runs = (*runs, *self._retract_between(lease, claims, seen, upper))
                seen = upper
            try:
                self.handle.commit_compare_and_append(
                    at(runs, seen), seen, seen + 1, token=token, attributes=attributes
                )
            except UpperMismatch:
                lease.keep()
                continue
            return
        raise Conflict(f"others wrote to shard {target.shard!r} before each of {TRIES_MAX} tries; run the job again")

    def _check_erased(self, lower: int) -> None:
        """The opposite of what an erasure wrote is its rows: they would be written once more, after its receipt even.

        Raises Conflict where there was one at `lower` or later.
        """
        retry_s = self.target.connection.handles.write.retry_s
        found = send(self.base.transport(self.target), self.target.shard, c.ReadErasures(), retry_s)
        assert isinstance(found, c.ErasuresAre)
        if any(erasure.at >= lower for erasure in found.erasures.values()):
            raise Conflict(
                f"rows of shard {self.target.shard!r} were erased since this job began; nothing was changed: run it "
                "again"
            )

    def _stage_claims(self, keys: pa.Table) -> Runs:
        claimed = key_schema(self.schema)
        staging = WriteHandle(
            self.handle.transport,
            self.target.shard,
            lambda: (CLAIMS_SCHEMA, claimed),
            self.target.connection.handles.write,
            self.handle.writer_id,
        )
        return staging.stage_for_one_commit(keys, 0)

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
                _check_single(piece, self.schema)

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
            updates = chain(updates, retracted(reader, whole_view(transport, self.target.shard, view), drops))
        pieces = kept(updates, lease)
        opposite = (_negated(rows) for piece in pieces for rows in self._claimed(piece, claims))
        return self.handle.stage_for_one_commit(_batches(opposite), None)

    def _claimed(self, rows: pa.Table, claims: Runs | None) -> Iterator[pa.Table]:
        """The rows that the job replaces."""
        if claims is None:
            yield rows
            return
        keys = consolidate([_keys_of(rows, self.schema)], key_schema(self.schema))
        for claimed in self._claim_reader().read_range(claims, since=0, key_range=_span(keys, self.schema)):
            yield semi_join(rows, claimed, self.schema)


def at(runs: Iterable[Run], time: int) -> Runs:
    """The runs with all rows at `time`."""
    return tuple(Run(tuple(part.at(time) for part in run.parts)) for run in runs)


def semi_join(rows: pa.Table, keys: pa.Table, schema: ShardSchema) -> pa.Table:
    """The rows whose key is among `keys`, by the shard's own equality (null is null, NaN is NaN)."""
    if not len(rows) or not len(keys):
        return rows.slice(0, 0)
    both = join([_keys_of(rows, schema), _keys_of(keys, schema)])
    order, starts = sort_groups(both, key_schema(schema))
    groups = np.cumsum(starts) - 1
    if order is not None:
        sorted_groups, groups = groups, np.empty(len(groups), dtype=np.int64)
        groups[order] = sorted_groups
    wanted = np.zeros(int(groups.max()) + 1, dtype=bool)
    wanted[groups[len(rows) :]] = True
    return rows.filter(pa.array(wanted[groups[: len(rows)]]))


def _keys_of(rows: pa.Table, schema: ShardSchema) -> pa.Table:
    """The keys of the rows, each with diff 1."""
    return key_schema(schema).conform(rows.select(list(schema.key)), 0)


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
    pending: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        pending.append(batch)
        size += batch.nbytes
        if size >= CHUNK_BYTES:
            yield _chunk(pending, delete_column, schema)
            pending, size = [], 0
    if pending:
        yield _chunk(pending, delete_column, schema)


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


def _claims(rows: pa.Table, schema: ShardSchema) -> pa.Table:
    """The keys of the rows, sorted. Raises InvalidUsage when one comes twice."""
    keys = consolidate([_keys_of(rows, schema)], key_schema(schema))
    _check_single(keys, schema)
    return keys


def _check_single(keys: pa.Table, schema: ShardSchema) -> None:
    twice = pc.index(pc.greater(keys.column(DIFF), 1), True).as_py()
    if twice >= 0:
        key = keys.select(list(schema.key)).slice(twice, 1).to_pylist()[0]
        raise InvalidUsage(
            f"key {key!r} comes more than once; an upsert takes one row a key: drop the duplicates first"
        )


def _span(keys: pa.Table, schema: ShardSchema) -> KeyRange:
    """The key range from the first of the sorted keys to the last."""
    ordered = SortedKeys(keys, schema.key)
    return KeyRange(ordered[0], ordered[len(ordered) - 1] + b"\x00")
