"""Holding a time for a small read, together with others where reads come often: see `sharing.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from persist.client.arguments import checked, checked_wait
from persist.client.sharing import Kind, LeasePool, Shared
from persist.client.snapshot import Held, ReadLease, ReadSettings, Tagged, holding, latest, wait_for_upper
from persist.client.transport import OneShard, Transport
from persist.core.antichain import TIME_MAX, Antichain
from persist.core.errors import Expired, NotReadable, Unavailable
from persist.core.view import ViewRequest

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
