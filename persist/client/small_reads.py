"""Reads on this process: by a lease that they share, or, of few rows, without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from blob import BlobNotFound
from persist.client.arguments import checked, checked_wait
from persist.client.lease_pool import Kind, LeasePool, Point, Use
from persist.client.row_reader import limited, part_reader
from persist.client.snapshot import (
    FEW_BATCH_ROWS,
    FEW_MEMORY_BYTES,
    Held,
    ReadLease,
    ReadSettings,
    Tagged,
    check_lease,
    holding,
    lease_point,
)
from persist.client.timestamps import BEFORE_ALL, NothingWritten, latest
from persist.client.transport import OneShard, Transport
from persist.core.errors import Corruption, Expired, NotReadable, Unavailable, UpgradeNeeded
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.truncation import contents
from persist.formats.store_errors import translated_but_missing
from persist.parts import TIME, Selection, valid_schemas
from persist.parts.scan_spec import resolve_selection

# Holding a time for a read, together with the others of this process: see `lease_pool.py`.

AsOf = int | Tagged | None
TRIES = 3  # how often a shared lease may turn out to be gone, or another read take one; then a read takes its own


@dataclass(frozen=True, slots=True)
class Read:
    """What is read: a shard as of a time (None: the latest complete one), which may have to be waited for."""

    name: str
    as_of: AsOf
    purpose: str
    wait_s: float


class LentLease(ReadLease):
    """A shared lease as one of its users has it. Closing it gives it back to the others; it never moves."""

    def __init__(self, own: OneShard, name: str, settings: ReadSettings, pool: LeasePool, use: Use) -> None:
        super().__init__(own, name, use.shared.lease.reader, settings, use.seqno)
        self.since = Antichain(use.as_of)
        self.is_point = use.shared.point is not None
        self._pool = pool
        self._use = use

    def keep(self) -> None:
        self._pool.is_read(self._use)
        self._use.shared.lease.keep()

    def renew(self) -> None:
        self._pool.is_read(self._use)
        self._use.shared.lease.renew()

    def check(self) -> None:
        self._pool.is_read(self._use)
        self._use.shared.lease.check()

    def outlive(self) -> None:
        self._pool.leave(self._use.shared)

    def release(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.release(self._use)

    def close(self) -> None:
        """Give it back to those who share it. Repeating it is safe. Raises nothing."""
        if not self._closed:
            self._closed = True
            self._pool.give_back(self._use)


@contextmanager
def holding_together(
    transport: Transport, name: str, as_of: AsOf, purpose: str, wait_s: float, settings: ReadSettings
) -> Iterator[Held]:
    """As `snapshot.holding`, for a read on this process, by a lease that its reads share. Raises what `holding` does.

    It takes a lease of its own where it has to wait for the time, or new readers may not hold it.
    """
    with _holding(transport, Read(name, as_of, purpose, wait_s), settings, is_plan=False) as held:
        yield held


@contextmanager
def holding_for_plans(
    transport: Transport, name: str, as_of: AsOf, purpose: str, wait_s: float, settings: ReadSettings
) -> Iterator[Held]:
    """As `holding_together`, for what is read elsewhere, at any time: the lease is never given back, and lapses."""
    with _holding(transport, Read(name, as_of, purpose, wait_s), settings, is_plan=True) as held:
        yield held


@contextmanager
def _holding(transport: Transport, read: Read, settings: ReadSettings, *, is_plan: bool) -> Iterator[Held]:
    checked_wait("wait_s", read.wait_s)
    checked("purpose", read.purpose, str)
    held = _shared(transport, read, settings, is_plan) if isinstance(transport, OneShard) else None
    if held is None:
        with holding(transport, read.name, read.as_of, read.purpose, read.wait_s, settings) as own:
            yield own
        return
    try:
        yield held
    except BaseException:
        held.lease.close()
        raise


def _shared(transport: OneShard, read: Read, settings: ReadSettings, is_plan: bool) -> Held | None:
    """A time that is held by a shared lease; None: the read has to take one of its own."""
    pool, as_of = transport.leases, read.as_of
    is_time = type(as_of) is int and 0 <= as_of <= TIME_MAX
    if pool is None or not (as_of is None or is_time or isinstance(as_of, Tagged)):
        return None
    kind = Kind(read.name, transport.shard, read.purpose, settings.lease_ms, is_plan)
    for _ in range(TRIES):
        try:
            held = _Joining(transport, read, settings, pool, kind).held()
        except (NotReadable, UpgradeNeeded):  # say so as ever, or hold it as ever
            return None
        except Unavailable as error:
            if error.is_unwritable:  # it is read without a hold
                return None
            raise
        if held is not None:
            return held
    return None


@dataclass(frozen=True, slots=True)
class _Joining:
    """One try to read by a shared lease."""

    transport: OneShard
    read: Read
    settings: ReadSettings
    pool: LeasePool
    kind: Kind

    def held(self) -> Held | None:
        """None: the lease is gone, or another read took one; look again. Raises NotReadable: not by a shared lease."""
        name, as_of = self.read.name, self.read.as_of
        tag = as_of.name if isinstance(as_of, Tagged) else ""
        use = self.pool.take(self.kind, tag if isinstance(as_of, Tagged) else as_of)
        try:
            reader = use.shared.lease.reader if use is not None else None
            view = self.transport.view(name, ViewRequest(reader=reader, tag=tag))
            at, may_join = _time(view, as_of)
            if use is not None and _covers(view, use, at) and may_join:
                self.pool.joined(use, at, view.seqno, was_named=as_of is not None)
                return self._lent(use, at, view)
            is_gone = use is not None and (view.reader is None or use.shared.point is not None)
            opened = self._opened(view, at, use if is_gone else None, tag)
        except BaseException:
            if use is not None:
                self.pool.give_back(use)
            raise
        if use is not None:
            self.pool.give_back(use)
        return opened

    def _lent(self, use: Use, at: int, view: ShardView) -> Held | None:
        lease = LentLease(self.transport, self.read.name, self.settings, self.pool, use)
        try:
            lease.keep()
            return Held(self.transport, at, view, lease, self.settings)
        except Expired:  # it lapsed, as of a process that was suspended
            self.pool.leave(use.shared)
            lease.close()
            return None
        except BaseException:
            lease.close()
            raise

    def _opened(self, view: ShardView, at: int, instead: Use | None, tag: str) -> Held | None:
        """By a new shared lease at this time, or on this time alone where the shard's history begins later."""
        name, settings = self.read.name, self.settings
        point = Point(at, tag) if tag or not view.since.less_equal(at) else None
        if point is not None and self.kind.is_plan:
            return None

        def opened() -> ReadLease:
            if point is None:
                return ReadLease.open(self.transport, name, Antichain(at), self.read.purpose, settings)
            return lease_point(self.transport, name, at, self.read.purpose, settings, must_hold=True)

        use = self.pool.open(self.kind, at, point, instead.shared if instead is not None else None, opened)
        if use is None:
            return None
        lease = LentLease(self.transport, name, settings, self.pool, use)
        try:
            if lease.seqno > view.seqno:
                view = self.transport.view(name, ViewRequest(min_seqno=lease.seqno))
            check_lease(view, at, lease)
            self.pool.joined(use, at, view.seqno, was_named=self.read.as_of is not None)
            lease.seqno = view.seqno
            return Held(self.transport, at, view, lease, settings)
        except BaseException:
            lease.close()
            raise


def _time(view: ShardView, as_of: AsOf) -> tuple[int, bool]:
    """The time that is read, and whether a new reader may hold it as this view shows the shard.

    Raises NotReadable: it is not complete, or there is no such tag; NothingWritten.
    """
    if isinstance(as_of, Tagged):
        if view.tagged is None:
            raise NotReadable(f"shard {view.name!r} has no tag {as_of.name!r}")
        return view.tagged, True
    at = latest(view) if as_of is None else as_of
    if view.upper.less_equal(at):
        raise NotReadable(f"shard {view.name!r} is not complete as of {at}")
    return at, view.erased.less_equal(at)


def _covers(view: ShardView, use: Use, at: int) -> bool:
    """Whether the shared lease is in the State of the view, and holds the time and that State."""
    found, point = view.reader, use.shared.point
    if found is None or found.seqno > view.seqno or found.point != (point is not None):
        return False
    return found.since == Antichain(at) if found.point else found.since.less_equal(at)


# Reads of few rows, which are over at once: without a hold, so that nothing is written for them.
#
# A view is one State of the shard, and a part never changes. So the rows are exact where all parts are there still.
# Where one of them is gone, maintenance was quicker: then nothing is given, and the caller reads again, with a hold.


def rows_at_once(
    transport: Transport, name: str, at: int | None, selection: Selection, limit: int, settings: ReadSettings
) -> pa.Table | None:
    """The first rows of what is selected as of a time (None: the latest complete one): the columns and `__diff`.

    None: it cannot be told without a hold, or without waiting. Raises InvalidUsage, UnknownShard, Unavailable.
    """
    view = transport.view(name, ViewRequest())
    try:
        as_of = latest(view) if at is None else at
    except NothingWritten:
        as_of = BEFORE_ALL
    except NotReadable:
        return None
    if as_of == BEFORE_ALL and view.since.less_equal(0):
        return resolve_selection(valid_schemas(view.schemas), selection).no_updates().drop_columns([TIME])
    if as_of == BEFORE_ALL or not view.since.less_equal(as_of) or view.upper.less_equal(as_of):
        return None
    wanted = resolve_selection(valid_schemas(view.schemas), selection)
    few = ReadSettings(memory_bytes=min(settings.memory_bytes, FEW_MEMORY_BYTES), bound=settings.bound)
    _, reader = part_reader(transport, view, few, wanted.keeps)
    runs = contents((run for batch in view.batches for run in batch.runs), view.drops, as_of)
    pieces = reader.read_range(
        runs,
        as_of=as_of,
        key_range=wanted.key_range,
        columns=wanted.read,
        batch_rows=max(1, min(limit, FEW_BATCH_ROWS)),
    )
    try:
        with translated_but_missing():
            found = list(limited(filter(len, map(wanted.apply, pieces)), limit))
    except (BlobNotFound, Corruption):  # with a hold it is told what is wrong
        return None
    return pa.concat_tables([wanted.no_updates().drop_columns([TIME]), *found])
