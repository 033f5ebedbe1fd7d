"""Holds of listen streams: one leased reader serves many listeners of a shard, and is moved seldom.

So thousands of idle listeners cost next to nothing: a lease is renewed when a third of it has passed, and moves forward
at most `MOVES_PER_LEASE` times in its length, however often its listeners take updates.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from persist.commit.location import Location
from persist.core import commands as c
from persist.core.errors import Expired, Indeterminate, PersistError, Unavailable, UnknownShard
from persist.core.frontier import Antichain
from persist.core.ids import ReaderId, SeqNo, ShardId, mint
from rpc.concurrency_limits import CALLER, Work

LEASE_MS = 3_600_000
MOVES_PER_LEASE = 60
RENEWALS_PER_LEASE = 3


@dataclass
class _Lease:
    """One leased reader of a shard, the frontiers of its listeners, and the States that they read from now.

    `moves_since`: whether the shard's since follows it.
    """

    shard: ShardId
    moves_since: bool
    reader: ReaderId
    since: Antichain
    renewed_s: float
    frontiers: dict[int, Antichain] = field(default_factory=dict)
    reading: dict[int, SeqNo] = field(default_factory=dict)
    lost: PersistError | None = None


class StreamHold:
    """A listener's share of a lease: what lies at or beyond its frontier stays, whatever maintenance does."""

    def __init__(self, number: int, lease: _Lease) -> None:
        self._number = number
        self._lease = lease

    @property
    def shard(self) -> ShardId:
        """The life of the shard's name that it holds."""
        return self._lease.shard

    @contextlib.contextmanager
    def reading(self, seqno: SeqNo) -> Iterator[None]:
        """Hold the files of the State at `seqno` for the length of a `with`. Raises Expired: the lease has lapsed."""
        if self._lease.lost is not None:
            raise self._lease.lost
        self._lease.reading[self._number] = seqno
        try:
            yield
        finally:
            self._lease.reading.pop(self._number, None)

    def move(self, frontier: Antichain) -> None:
        """The listener has been given everything before `frontier`."""
        self._lease.frontiers[self._number] = frontier


class StreamLeases:
    """The leases of all listen streams of one server. Used from the event loop's thread."""

    def __init__(self, location: Location, work: Work) -> None:
        self._location = location
        self._work = work
        self._by_name: dict[str, list[_Lease]] = {}
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}
        self._numbers = itertools.count()
        self._keeper: asyncio.Task[None] | None = None

    @contextlib.asynccontextmanager
    async def hold(self, name: str, frontier: Antichain, moves_since: bool = False) -> AsyncIterator[StreamHold]:
        """Hold what a listener at `frontier` needs. `moves_since`: the shard's since follows it, if nothing else holds.

        Raises NotReadable when it is gone already, UnknownShard.
        """
        number = next(self._numbers)
        lease = await self._lease_for(name, frontier, number, moves_since)
        try:
            yield StreamHold(number, lease)
        finally:
            del lease.frontiers[number]
            if not lease.frontiers:
                await asyncio.shield(self._expire(name, lease))

    def stop(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()

    async def _lease_for(self, name: str, frontier: Antichain, number: int, moves_since: bool) -> _Lease:
        since = _since(frontier)
        machine = self._location.machine(name)
        cached = machine.cached
        shard = (cached if cached is not None else await self._work.run(machine.refresh)).shard_id
        async with self._locked(name):
            for lease in self._by_name.get(name, ()):
                fits = lease.shard == shard and lease.moves_since == moves_since
                if lease.lost is None and fits and lease.since <= since:
                    lease.frontiers[number] = frontier
                    return lease
            reader, started = mint(ReaderId, self._location.ids), self._now()
            try:
                await self._apply(name, c.RegisterReader(reader, since, LEASE_MS, "http listen", shard=shard))
            except UnknownShard:
                if (known := machine.cached) is None or known.shard_id == shard:
                    raise
                raise Unavailable(f"shard {name!r} was dropped and created anew just now; listen again") from None
            except Indeterminate as error:  # a hold that was taken after all lapses by itself
                raise Unavailable(f"shard {name!r} cannot be listened to now: no answer came; listen again") from error
            lease = _Lease(shard, moves_since, reader, since, started, {number: frontier})
            self._by_name.setdefault(name, []).append(lease)
            if self._keeper is None:
                self._keeper = asyncio.get_running_loop().create_task(self._keep())
            return lease

    async def _expire(self, name: str, lease: _Lease) -> None:
        """Give a lease up, unless somebody has joined it meanwhile."""
        async with self._locked(name):
            leases = self._by_name.get(name, [])
            if lease.frontiers or lease not in leases:
                return
            leases.remove(lease)
            if not leases:
                del self._by_name[name]
            with contextlib.suppress(PersistError):  # then it lapses by itself
                await self._apply(name, c.ExpireReader(lease.reader, shard=lease.shard))

    @contextlib.asynccontextmanager
    async def _locked(self, name: str) -> AsyncIterator[None]:
        """One at a time for each shard; the lock lives while anybody wants it."""
        lock, users = self._locks.get(name, (asyncio.Lock(), 0))
        self._locks[name] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            lock, users = self._locks[name]
            if users == 1:
                del self._locks[name]
            else:
                self._locks[name] = lock, users - 1

    async def _keep(self) -> None:
        """Renew and move leases for as long as there are any."""
        CALLER.set("")  # this is for all who listen, not for the one who came first
        while self._by_name:
            await asyncio.sleep(LEASE_MS / 1000 / MOVES_PER_LEASE)
            for name, leases in list(self._by_name.items()):
                for lease in list(leases):
                    await self._renew(name, lease)
        self._keeper = None

    async def _renew(self, name: str, lease: _Lease) -> None:
        state = self._location.machine(name).cached
        since = _since(min(lease.frontiers.values(), default=lease.since))
        due = self._now() - lease.renewed_s > LEASE_MS / 1000 / RENEWALS_PER_LEASE
        if state is None or not (due or lease.since < since):
            return
        seqno = min([*lease.reading.values(), state.seqno])
        started, before = self._now(), lease.since
        lease.since = max(since, before)  # a listener that joins meanwhile must not count on what is given up now
        try:
            move = c.DowngradeSince if lease.moves_since else c.MoveHold
            await self._apply(name, move(lease.reader, lease.since, seqno, shard=lease.shard))
            lease.renewed_s = started
        except (Expired, UnknownShard) as error:
            lease.lost = error
        except PersistError:
            return  # the next round tries again

    async def _apply(self, name: str, command: c.Command) -> c.Result:
        return await self._work.apply(self._location.machine(name), command)

    def _now(self) -> float:
        return self._location.clock.monotonic()


def _since(frontier: Antichain) -> Antichain:
    """The hold by which everything at or beyond `frontier` can be told apart: the time just before it."""
    return frontier if frontier.element is None else Antichain(max(frontier.element - 1, 0))
