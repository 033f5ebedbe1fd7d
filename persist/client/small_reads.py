"""Small reads: without a lease, or by a lease that reads of one process share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from blob import BlobNotFound
from persist.client.arguments import checked, checked_wait
from persist.client.lease_pool import Kind, LeasePool, Shared
from persist.client.row_reader import limited, part_reader
from persist.client.snapshot import (
    FEW_BATCH_ROWS,
    FEW_MEMORY_BYTES,
    Held,
    ReadLease,
    ReadSettings,
    Tagged,
    holding,
    wait_for_upper,
)
from persist.client.timestamps import BEFORE_ALL, NothingWritten, latest
from persist.client.transport import OneShard, Transport
from persist.core.errors import Corruption, Expired, NotReadable, Unavailable
from persist.core.frontier import TIME_MAX, Antichain
from persist.core.shard_view import ViewRequest
from persist.core.truncation import contents
from persist.formats.store_errors import translated_but_missing
from persist.parts import TIME, Selection, sound_schemas
from persist.parts.scan_spec import selected

# Holding a time for a small read, together with others where reads come often: see `lease_pool.py`.


AsOf = int | Tagged | None


@dataclass(frozen=True, slots=True)
class Read:
    """What is read: a shard as of a time (None: the latest complete one), which may have to be waited for."""

    name: str
    as_of: AsOf
    purpose: str
    wait_s: float


class LentLease(ReadLease):
    """A shared lease as one of its users has it. Closing it gives it back to the others; it never moves."""

    def __init__(self, own: OneShard, name: str, settings: ReadSettings, pool: LeasePool, shared: Shared) -> None:
        super().__init__(own, name, shared.lease.reader, settings, shared.lease.seqno)
        self.since = Antichain(shared.since)
        self._renewed_s = own.clock.monotonic()  # it was taken or renewed for this user
        self._pool = pool
        self._shared = shared

    def close(self) -> None:
        """Give it back to those who share it. Repeating it is safe. Raises nothing."""
        if not self._closed:
            self._closed = True
            self._pool.give_back(self._shared)


@contextmanager
def holding_together(
    transport: Transport, name: str, as_of: AsOf, purpose: str, wait_s: float, settings: ReadSettings
) -> Iterator[Held]:
    """As `snapshot.holding`, for a read on this process that is over soon: where such reads come often they share.

    It takes a lease of its own for a time that is not the latest complete one: whether new readers may hold that is
    for the shard to say, which may have rows to erase. Raises what `holding` does.
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
    pool, name, as_of = transport.leases, read.name, read.as_of
    kind = Kind(name, transport.shard, read.purpose, settings.lease_ms, is_plan)
    is_time = type(as_of) is int and 0 <= as_of <= TIME_MAX
    if pool is None or not (as_of is None or is_time) or not pool.is_busy(kind):
        return None
    try:
        newest = latest(transport.view(name, ViewRequest(with_batches=False)))
        at = as_of if isinstance(as_of, int) else newest
        if at < newest:
            return None
        shared = pool.take(kind, at, lambda: ReadLease.open(transport, name, Antichain(at), read.purpose, settings))
    except NotReadable:  # since has passed the time meanwhile, or there is none: say so as ever
        return None
    except Unavailable as error:
        if error.is_unwritable:  # it is read without a hold
            return None
        raise
    if shared is None:
        return None
    lease = LentLease(transport, name, settings, pool, shared)
    try:
        return Held(transport, at, wait_for_upper(transport, name, at, lease, read.wait_s), lease, settings)
    except Expired:  # it lapsed in this moment
        lease.close()
        return None
    except BaseException:
        lease.close()
        raise


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
        return selected(sound_schemas(view.schemas), selection).no_updates().drop_columns([TIME])
    if as_of == BEFORE_ALL or not view.since.less_equal(as_of) or view.upper.less_equal(as_of):
        return None
    wanted = selected(sound_schemas(view.schemas), selection)
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
