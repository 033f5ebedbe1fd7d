"""Reads: leases, snapshots and their splits.

A snapshot holds a lease, so that neither compaction nor GC deletes its files; its splits are disjoint in key space and
can be read anywhere: their union is exactly the contents of the shard as of its time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar

import pyarrow as pa

from blob import BlobNotFound
from persist.client import deadlines
from persist.client.arguments import checked, checked_time, checked_wait, html_table
from persist.client.read_leases import Hold, register_lease
from persist.client.read_leases import ReadLease as ReadLease
from persist.client.read_leases import ReadSettings as ReadSettings
from persist.client.row_reader import Rows, expand_rows, limit_rows
from persist.client.row_reader import part_reader as part_reader
from persist.client.timestamps import BEFORE_ALL, schema_id_at
from persist.client.timestamps import latest as latest
from persist.client.transport import OneShard, Transport
from persist.core import commands as c
from persist.core.batch import Run
from persist.core.errors import Corruption, Expired, InvalidUsage, NotComplete, NotReadable, UpgradeNeeded
from persist.core.frontier import Antichain
from persist.core.ids import ReaderId, SeqNo, ShardId, mint
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.state import SchemaRecord
from persist.core.truncations_and_drops import clipped, contents
from persist.formats.store_errors import translate, translated_but_missing
from persist.parts import KeyRange, PartReader, ShardSchema, overlapping_runs, plan_splits, plan_within, valid_schemas
from persist.parts.part_files import WHOLE_BYTES_MAX
from persist.parts.prefetch import prefetch_each
from persist.parts.scan_spec import Selection, schema_shown, select_by_schema

_T = TypeVar("_T")
VIEW_WAIT_S = 30.0  # one wait for the upper; repeated until the caller's deadline
LATEST_TRIES_MAX = 20  # how often since may pass the latest time before a hold on it was taken
SPLITS_AT_ONCE = 4  # that one process reads at the same time; they share the memory of one
FEW_BATCH_ROWS = 16_384  # decoded at a time by a read that ends after so many rows
FEW_MEMORY_BYTES = 16 * 1024 * 1024  # of such a read: it prefetches little


@dataclass(frozen=True, slots=True)
class Tagged:
    """The time of the tag with this name."""

    name: str


@dataclass(frozen=True)
class SnapshotSplit:
    """One key range of a snapshot with everything that is needed to read it elsewhere. Pickle it, or read it here.

    `where` and `limit` are those of the snapshot: this split alone may return as many rows as the limit.
    """

    shard: str
    as_of: int
    key_range: KeyRange
    runs: tuple[Run, ...]
    schemas: Mapping[int, SchemaRecord]
    reader: ReaderId
    seqno: SeqNo
    settings: ReadSettings
    columns: tuple[str, ...] | None = None
    shard_id: ShardId | None = None
    where: str | None = None
    limit: int | None = None
    schema_id: int | None = None  # the schema whose columns are shown; None: the current one
    _hold: Hold | None = field(default=None, compare=False, repr=False)  # of the snapshot, in its process

    def __getstate__(self) -> dict[str, Any]:
        if self._hold is not None:
            self._hold.outlive()
        return {**vars(self), "_hold": None}

    def __repr__(self) -> str:
        return f"SnapshotSplit({self.shard!r}, as_of={self.as_of}, {sum(len(run.parts) for run in self.runs)} parts)"

    def read(self, transport: Transport, batch_rows: int | None = None) -> Iterator[pa.Table]:
        """The rows as of the snapshot, consolidated and in key order, piece by piece; columns and `__diff`.

        `transport` is that of a client, `Client.transport`; `batch_rows` is as `read_range` says. Memory is bounded by
        `settings.memory_bytes`. Raises Expired (the snapshot's lease lapsed), UnknownShard (the shard was dropped),
        Corruption (a part is damaged or missing).
        """
        if self.shard_id is not None:
            transport = OneShard(transport, self.shard_id)
        lease = self._renewed(transport)
        settings = self.settings
        if self.limit is not None:
            batch_rows = min(self.limit, batch_rows or FEW_BATCH_ROWS) or 1
            settings = replace(settings, memory_bytes=min(settings.memory_bytes, FEW_MEMORY_BYTES))
        selection = Selection(self.where, columns=self.columns)
        wanted = select_by_schema(valid_schemas(self.schemas), self.schema_id, selection)
        _, reader = part_reader(transport, self, settings, wanted.keeps)
        pieces = with_renewal(replace(self, columns=wanted.read)._pieces(reader, batch_rows), lease)
        yield from limit_rows(filter(len, map(wanted.apply, pieces)), self.limit)

    def _renewed(self, transport: Transport) -> ReadLease:
        """The lease of the snapshot in this process, or elsewhere one with the same id. Raises Expired."""
        hold = self._hold
        if hold is not None and not hold.is_left:
            if hold.is_closed:
                raise Expired(
                    f"the hold on shard {self.shard!r} as of {self.as_of} is gone: its snapshot was closed, or read to "
                    "its end; take the snapshot again"
                )
            hold.keep()
            return next(lease for lease in hold.leases if lease.reader == self.reader)
        lease = ReadLease(transport, self.shard, self.reader, self.settings, self.seqno)
        lease.renew()
        return lease

    def _pieces(self, reader: PartReader, batch_rows: int | None) -> Iterator[pa.Table]:
        as_of, key_range, columns = self.as_of, self.key_range, self.columns
        return reader.read_range(self.runs, as_of=as_of, key_range=key_range, columns=columns, batch_rows=batch_rows)


@dataclass
class Snapshot(Rows):
    """The contents of a shard as of a time, held by a lease until it is closed (or the lease lapses).

    The lease is also released when nothing refers to the snapshot or one of its splits, unless a split was pickled.

    `timestamp` is the wall clock that named the time, rounded down to the shard's grid; None if a time was given.
    `Shard.snapshot` returns one. Reading it to its end closes it. Reading may raise Expired (the lease lapsed),
    Unavailable (retrying is safe) and Corruption (a part is damaged or missing).
    """

    shard: str
    as_of: int
    schema: ShardSchema
    splits: tuple[SnapshotSplit, ...]
    _transport: Transport
    _lease: Hold
    _closed: bool = field(default=False)
    timestamp: datetime | None = None
    limit: int | None = None

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"Snapshot({self.shard!r}, as_of={self.as_of}, splits={len(self.splits)}{state})"

    def _repr_html_(self) -> str:
        fields = [(field.name, field.type) for field in self.empty().schema]
        return html_table(f"Snapshot of {self.shard} as of {self.as_of}", [*fields, ("splits", len(self.splits))])

    def _tables(self) -> Iterator[pa.Table]:
        large = any(part.size > WHOLE_BYTES_MAX for split in self.splits for run in split.runs for part in run.parts)
        at_once = min(len(self.splits), SPLITS_AT_ONCE) if large else 1  # threads are slower for one small read
        if at_once == 1 or self.limit is not None or deadlines.current() is not None:  # a deadline bounds one thread
            return limit_rows(super()._tables(), self.limit)
        shares = (replace(split, settings=split.settings.shared_by(at_once)) for split in self.splits)
        return prefetch_each((share.read(self._transport) for share in shares), at_once)

    def to_arrow(self, *, expand: bool = False) -> pa.Table:
        """All rows as one table with `__diff`, or, with `expand`, each row repeated `__diff` times.

        Raises: with `expand`, NegativeMultiplicity (a row was retracted more often than added) and InvalidUsage (more
            than 2^31 - 1 rows); and what reading may.
        """
        return pa.concat_tables(expand_rows(self._all())) if expand else self._all()

    def _shown(self) -> pa.Table:
        return self.to_arrow(expand=True)


@dataclass(frozen=True)
class Held:
    """A complete time of a shard, the shard as of then or later, and the lease that holds both."""

    transport: Transport
    as_of: int
    view: ShardView
    lease: ReadLease
    settings: ReadSettings

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs that may have rows as of the time, without what drops removed by then."""
        runs = (run for b in self.view.batches if b.desc.lower.less_equal(self.as_of) for run in b.runs)
        return contents(runs, self.view.drops, self.as_of)

    def with_pending(self, cut: int = 0) -> tuple[tuple[Run, ...], int]:
        """The runs that the rows of the next commit meet, and the time to read them as of.

        If `as_of` is the latest complete time, they are without the rows that pending erasures retract at the next one,
        and without the rows before `cut`, as by a pending truncation.
        """
        retracting = self.view.retracting if self.view.upper == Antichain(self.as_of + 1) else ()
        return (*clipped(self.runs, cut), *retracting), self.as_of + bool(retracting)

    def split(
        self, key_range: KeyRange, runs: tuple[Run, ...], columns: tuple[str, ...] | None, where: str | None = None
    ) -> SnapshotSplit:
        """One key range of it, whose rows are in `runs`; `columns` None: all."""
        view, lease = self.view, self.lease
        return SnapshotSplit(
            shard=view.name,
            as_of=self.as_of,
            key_range=key_range,
            runs=runs,
            schemas=view.schemas,
            reader=lease.reader,
            seqno=lease.seqno,
            settings=self.settings,
            columns=columns,
            shard_id=view.shard_id,
            where=where,
        )

    def splits(
        self, selection: Selection, count: Callable[[int], int], *, is_light: bool = False
    ) -> tuple[SnapshotSplit, ...]:
        """The selection in splits: `count` returns their number for the encoded bytes. Raises InvalidUsage, Expired.

        For a selection of keys, or with `is_light`, each split has only the parts that it reads, and there may be
        fewer, but at least one.
        """
        schema, reader = part_reader(self.transport, self.view, self.settings)
        number = schema_id_at(self.view, self.as_of) if selection.then else None
        wanted, runs = select_by_schema(valid_schemas(self.view.schemas), number, selection), self.runs
        is_light = is_light or wanted.is_narrow
        with leased_blobs(self.lease):
            if is_light:
                runs = overlapping_runs(reader.expanded(runs, wanted.key_range), wanted.key_range)
            splits = count(sum(part.size for run in runs for part in run.parts))
            if is_light:
                ranges = plan_within(runs, splits, schema, reader, wanted.key_range)
            else:
                ranges = plan_splits(runs, splits, schema, reader)
        self.lease.keep()  # a part may be missing because the hold lapsed
        lighter = (overlapping_runs(runs, key_range) if is_light else runs for key_range in ranges)
        return tuple(
            replace(self.split(key_range, own_runs, selection.columns, selection.where), schema_id=number)
            for key_range, own_runs in zip(ranges, lighter, strict=True)
        )

    def snapshot(self, num_splits: int, selection: Selection, limit: int | None = None) -> Snapshot:
        """The selection, at most `limit` rows of it, in splits. Raises InvalidUsage, Expired."""
        splits = self.splits(selection, lambda _: num_splits)
        schema, hold = schema_shown(valid_schemas(self.view.schemas), splits[0].schema_id), Hold(self.lease)
        splits = tuple(replace(split, limit=limit, _hold=hold) for split in splits)
        return Snapshot(self.view.name, self.as_of, schema, splits, self.transport, hold, limit=limit)


@contextmanager
def hold_time(
    transport: Transport, name: str, as_of: int | Tagged | None, purpose: str, wait_s: float, settings: ReadSettings
) -> Iterator[Held]:
    """Take a lease at `as_of` (None: the latest complete time) and wait until it is complete, for at most `wait_s`.

    As of BEFORE_ALL there are no rows, and everything that comes after it is held. The lease outlives the block, unless
    an error ends that. On a store that cannot be written it holds nothing (`ReadLease.is_held`). Raises InvalidUsage,
    NotReadable, NotComplete, Unavailable.
    """
    checked_wait("wait_s", wait_s)
    checked("purpose", purpose, str)
    if as_of is None:

        def open_at(time: int) -> tuple[int, ReadLease]:
            return time, ReadLease.open(transport, name, Antichain(time), purpose, settings, must_hold=False)

        time, lease = at_latest(transport, name, open_at)
    elif isinstance(as_of, Tagged):
        lease = lease_point(transport, name, as_of, purpose, settings)
        time = lease.since.element or 0
    else:
        checked_time("as_of", as_of, BEFORE_ALL)
        time = as_of
        if as_of == BEFORE_ALL:  # a hold on one time alone, such as 0, would not show that nothing was there before
            lease = open_before_all(transport, name, purpose, settings, must_hold=False)
        else:
            lease = _lease_at(transport, name, as_of, purpose, settings)
    try:
        view = wait_for_upper(transport, name, time, lease, wait_s)
        if lease.is_point and not lease.is_held:  # what keeps the time may have gone before the view was read
            lease_point(transport, name, time, purpose, settings)
        yield Held(transport, time, view, lease, settings)
    except BaseException:
        lease.close()
        raise


def open_before_all(
    transport: Transport, name: str, purpose: str, settings: ReadSettings, *, must_hold: bool = True
) -> ReadLease:
    """A hold on everything that comes after BEFORE_ALL. `must_hold` as in `ReadLease.open`. Raises NotReadable."""
    try:
        return ReadLease.open(transport, name, Antichain(0), purpose, settings, must_hold=must_hold)
    except NotReadable as error:
        since = error.details.get("since")
        if since is None:
            raise
        raise NotReadable(
            f"shard {name!r} is readable from {since} on, not as of {BEFORE_ALL}, when it was empty: its history was "
            "forgotten, or rows were erased",
            as_of=[BEFORE_ALL],
            since=since,
        ) from error


def at_latest(transport: Transport, name: str, action: Callable[[int], _T]) -> _T:
    """The result of `action` at the latest complete time, which is retried if since passes that time meanwhile.

    Raises NotReadable, and what `action` raises.
    """
    tries = 0
    while True:
        as_of = latest(transport.view(name, ViewRequest(with_batches=False)))
        try:
            return action(as_of)
        except NotReadable:
            tries += 1
            if tries == LATEST_TRIES_MAX:
                raise


def lease_point(
    transport: Transport, name: str, at: Tagged | int, purpose: str, settings: ReadSettings, *, must_hold: bool = False
) -> ReadLease:
    """A hold on one time only, that of a tag or `at` itself: since does not wait for it. Raises NotReadable.

    `must_hold` as in `ReadLease.open`.
    """
    tag, since = (at.name, None) if isinstance(at, Tagged) else ("", Antichain(at))
    command = c.RegisterReader(mint(ReaderId, transport.ids), since, settings.lease_ms, purpose, point=True, tag=tag)
    return register_lease(transport, name, command, settings, must_hold=must_hold)


def _lease_at(transport: Transport, name: str, as_of: int, purpose: str, settings: ReadSettings) -> ReadLease:
    """A hold on history from this time on; if since has passed it, on this time only. Raises NotReadable."""
    try:
        return ReadLease.open(transport, name, Antichain(as_of), purpose, settings, must_hold=False)
    except NotReadable as error:
        try:
            return lease_point(transport, name, as_of, purpose, settings)
        except (NotReadable, InvalidUsage, UpgradeNeeded):  # the time is not kept, or tags are not supported there
            raise error from None


def wait_for_upper(transport: Transport, name: str, as_of: int, lease: ReadLease, wait_s: float) -> ShardView:
    """The view in which `as_of` is complete, with all batches. Raises NotComplete after `wait_s`, and Expired."""
    deadline = transport.clock.monotonic() + deadlines.at_most(wait_s)
    while True:
        left = max(0.0, deadline - transport.clock.monotonic())
        past = None if as_of == BEFORE_ALL else as_of
        request = ViewRequest(past=past, timeout_s=min(left, VIEW_WAIT_S), min_seqno=lease.seqno)
        view = transport.view(name, request)
        check_lease(view, as_of, lease)
        if not view.upper.less_equal(as_of):
            return view
        if left <= 0:
            raise NotComplete(
                f"shard {name!r} is complete before {view.upper} only, not as of {as_of}; wait longer",
                as_of=as_of,
                upper=view.upper.to_json(),
            )
        lease.keep()


def check_lease(view: ShardView, as_of: int, lease: ReadLease) -> None:
    """As `check_held`; a lease on one time keeps it wherever since is, for as long as it lasts."""
    if lease.is_point and not view.since.is_empty:
        lease.renew()
    else:
        check_held(view, as_of)


def check_held(view: ShardView, as_of: int) -> None:
    """Raise Expired unless reads as of `as_of` are exact in this view, as they are while a hold on that time lasts."""
    if not view.since.less_equal(max(as_of, 0)):  # that the shard was empty as of -1 needs the whole history
        what = "was dropped or closed to reads" if view.since.is_empty else f"has forgotten history before {view.since}"
        raise Expired(
            f"the hold on shard {view.name!r} as of {as_of} is gone: its lease lapsed, and the shard {what}; "
            "take the snapshot, listen or load() again"
        )


@contextmanager
def leased_blobs(lease: ReadLease) -> Iterator[None]:
    """Translate errors of the blob store under a lease.

    A missing blob is Expired if the lease is gone (GC may delete unheld blobs), or if a copy is read; otherwise it is
    Corruption, which names the shard.
    """
    try:
        with translated_but_missing():
            yield
    except BlobNotFound as error:
        if not lease.is_held:
            raise Expired(
                f"shard {lease._name!r}: a blob was deleted while it was read without a hold, since the store cannot "
                "be written; read again"
            ) from error
        lease.check()
        if lease._transport.shows_copy:
            raise Expired(
                f"shard {lease._name!r}: a blob is not in this copy any more, or not yet ({error}); read again"
            ) from error
        raise _in_shard(Corruption(translate(error).message), lease._name) from error
    except Corruption as error:
        raise _in_shard(error, lease._name) from error


def _in_shard(error: Corruption, name: str) -> Corruption:
    if "shard" in error.details:
        return error
    message = f"shard {name!r}: {error.message}; `persist check --deep` finds what cannot be read"
    return Corruption(message, **{**error.details, "shard": name})


def with_renewal(pieces: Iterator[pa.Table], lease: ReadLease) -> Iterator[pa.Table]:
    """The pieces; the lease is renewed between them. Raises what `leased_blobs` says."""
    while True:
        with leased_blobs(lease):
            piece = next(pieces, None)
        if piece is None:
            return
        yield piece
        lease.keep()
