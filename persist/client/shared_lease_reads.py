"""Reads in this process: by a shared lease, or, for few rows, without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pyarrow as pa

from blob import BlobNotFound
from persist.client.arguments import checked, checked_wait
from persist.client.lease_pool import LeaseKind, LeasePool, LeaseUse, SinglePoint
from persist.client.read_leases import ReadLease, ReadSettings
from persist.client.row_reader import limit_rows, part_reader
from persist.client.snapshot import FEW_BATCH_ROWS, FEW_MEMORY_BYTES, Held, Tagged, check_lease, hold_time, lease_point
from persist.client.timestamps import BEFORE_ALL, NothingWritten, latest
from persist.client.transport import OneShard, Transport
from persist.core.errors import Corruption, Expired, NotReadable, Unavailable, UpgradeNeeded
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.truncations_and_drops import contents
from persist.formats.store_errors import translated_but_missing
from persist.parts import TIME, Selection, valid_schemas
from persist.parts.scan_spec import resolve_selection

AsOf = int | Tagged | None
TRIES = 3  # how often a shared lease may be gone, or another read take one; then a read takes its own


class LentLease(ReadLease):
    """A shared lease for one of its users. Closing it returns it to the pool; it never moves."""

    def __init__(self, own: OneShard, name: str, settings: ReadSettings, pool: LeasePool, use: LeaseUse) -> None:
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
        """Return it to the pool. Repeating it is safe. Raises nothing."""
        if not self._closed:
            self._closed = True
            self._pool.give_back(self._use)


@contextmanager
def hold_shared(  # noqa: PLR0913 - as `holding`
    transport: Transport,
    name: str,
    as_of: AsOf,
    purpose: str,
    wait_s: float,
    settings: ReadSettings,
    *,
    is_plan: bool = False,
) -> Iterator[Held]:
    """As `snapshot.hold_time`, for a read in this process, by a lease that its reads share. Raises as `holding`.

    It takes its own lease if it has to wait for the time, or new readers cannot hold the time. `is_plan`: for reads
    elsewhere at any later time; the lease is never released, and lapses.
    """
    checked_wait("wait_s", wait_s)
    checked("purpose", purpose, str)
    held = None
    if isinstance(transport, OneShard):
        held = _shared(
            transport, as_of, LeaseKind(name, transport.shard, purpose, settings.lease_ms, is_plan), settings
        )
    if held is None:
        with hold_time(transport, name, as_of, purpose, wait_s, settings) as own:
            yield own
        return
    try:
        yield held
    except BaseException:
        held.lease.close()
        raise


@contextmanager
def hold_for_block(
    transport: Transport, name: str, as_of: AsOf, purpose: str, settings: ReadSettings
) -> Iterator[Held]:
    """As `hold_shared`, without a wait; the lease is closed at the end of the block."""
    with hold_shared(transport, name, as_of, purpose, 0.0, settings) as held:
        try:
            yield held
        finally:
            held.lease.close()


def _shared(transport: OneShard, as_of: AsOf, kind: LeaseKind, settings: ReadSettings) -> Held | None:
    """A time that a shared lease holds; None: the read has to take its own lease."""
    pool = transport.leases
    is_time = type(as_of) is int and 0 <= as_of <= TIME_MAX
    if pool is None or not (as_of is None or is_time or isinstance(as_of, Tagged)):
        return None
    for _ in range(TRIES):
        try:
            held = _Joining(transport, as_of, settings, pool, kind).held()
        except (NotReadable, UpgradeNeeded):  # the read's own lease raises it, or holds the time
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
    """One try to read a time (None: the latest complete one) by a shared lease."""

    transport: OneShard
    as_of: AsOf
    settings: ReadSettings
    pool: LeasePool
    kind: LeaseKind

    def held(self) -> Held | None:
        """None: the lease is gone, or another read took one; try again. Raises NotReadable: not by a shared lease."""
        as_of = self.as_of
        tag = as_of.name if isinstance(as_of, Tagged) else ""
        use = self.pool.take(self.kind, tag if isinstance(as_of, Tagged) else as_of)
        with ExitStack() as unused:
            if use is not None:
                unused.callback(self.pool.give_back, use)
            reader = use.shared.lease.reader if use is not None else None
            view = self.transport.view(self.kind.name, ViewRequest(reader=reader, tag=tag))
            at, may_join = _time(view, as_of)
            if use is not None and _covers(view, use, at) and may_join:
                self.pool.joined(use, at, view.seqno, was_named=as_of is not None)
                unused.pop_all()
                return self._lent(use, at, view)
            is_gone = use is not None and (view.reader is None or use.shared.point is not None)
            return self._opened(view, at, use if is_gone else None, tag)

    def _lent(self, use: LeaseUse, at: int, view: ShardView) -> Held | None:
        lease = LentLease(self.transport, self.kind.name, self.settings, self.pool, use)
        try:
            lease.keep()
            return Held(self.transport, at, view, lease, self.settings)
        except Expired:  # it lapsed, for example while the process was suspended
            self.pool.leave(use.shared)
            lease.close()
            return None
        except BaseException:
            lease.close()
            raise

    def _opened(self, view: ShardView, at: int, instead: LeaseUse | None, tag: str) -> Held | None:
        """By a new shared lease at this time, or on this single time if the shard's history begins later."""
        name, purpose, settings = self.kind.name, self.kind.purpose, self.settings
        point = SinglePoint(at, tag) if tag or not view.since.less_equal(at) else None
        if point is not None and self.kind.is_plan:
            return None

        def open_lease() -> ReadLease:
            if point is None:
                return ReadLease.open(self.transport, name, Antichain(at), purpose, settings)
            return lease_point(self.transport, name, at, purpose, settings, must_hold=True)

        use = self.pool.open(self.kind, at, point, instead.shared if instead is not None else None, open_lease)
        if use is None:
            return None
        lease = LentLease(self.transport, name, settings, self.pool, use)
        try:
            if lease.seqno > view.seqno:
                view = self.transport.view(name, ViewRequest(min_seqno=lease.seqno))
            check_lease(view, at, lease)
            self.pool.joined(use, at, view.seqno, was_named=self.as_of is not None)
            lease.seqno = view.seqno
            return Held(self.transport, at, view, lease, settings)
        except BaseException:
            lease.close()
            raise


def _time(view: ShardView, as_of: AsOf) -> tuple[int, bool]:
    """The time to read, and whether a new reader may hold it in this view of the shard.

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


def _covers(view: ShardView, use: LeaseUse, at: int) -> bool:
    """Whether the shared lease exists in the State of the view, and holds the time and that State."""
    reader, point = view.reader, use.shared.point
    if reader is None or reader.seqno > view.seqno or reader.point != (point is not None):
        return False
    return reader.since == Antichain(at) if reader.point else reader.since.less_equal(at)


# Short reads of few rows without a hold, so that nothing is written for them.
#
# A view is one State of the shard, and a part never changes. So the rows are exact if all parts still exist. If one is
# gone, maintenance has deleted it: then the caller reads again, with a hold.


def read_unleased(
    transport: Transport, name: str, at: int | None, selection: Selection, limit: int, settings: ReadSettings
) -> pa.Table | None:
    """The first selected rows as of a time (None: the latest complete one): the columns and `__diff`.

    None: it cannot be read without a hold, or without waiting. Raises InvalidUsage, UnknownShard, Unavailable.
    """
    view = transport.view(name, ViewRequest())
    try:
        as_of = latest(view) if at is None else at
    except NothingWritten:
        as_of = BEFORE_ALL
    except NotReadable:
        return None
    since = max(view.since, view.erased)  # from which on new readers may read
    if as_of == BEFORE_ALL and since.less_equal(0):
        return resolve_selection(valid_schemas(view.schemas), selection).no_updates().drop_columns([TIME])
    if as_of == BEFORE_ALL or not since.less_equal(as_of) or view.upper.less_equal(as_of):
        return None
    wanted = resolve_selection(valid_schemas(view.schemas), selection)
    few = ReadSettings(memory_bytes=min(settings.memory_bytes, FEW_MEMORY_BYTES), bound=settings.bound)
    _, reader = part_reader(transport, view, few, wanted.keeps)
    runs = contents((run for batch in view.batches for run in batch.runs), view.drops, as_of)
    key_range, rows = wanted.key_range, max(1, min(limit, FEW_BATCH_ROWS))
    pieces = reader.read_range(runs, as_of=as_of, key_range=key_range, columns=wanted.read, batch_rows=rows)
    try:
        with translated_but_missing():
            tables = list(limit_rows(filter(len, map(wanted.apply, pieces)), limit))
    except (BlobNotFound, Corruption):  # a read with a hold reports what is wrong
        return None
    return pa.concat_tables([wanted.no_updates().drop_columns([TIME]), *tables])
