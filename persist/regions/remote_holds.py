"""Holds at home for readers of a region, and their release by an operator."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest
from typing import Any

from persist.client.snapshot import ReadLease, ReadSettings
from persist.client.transport import Transport
from persist.commit.clocks_and_ids import Clock
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.errors import Expired, NotReadable, PersistError, Unavailable, UnknownShard
from persist.core.frontier import Antichain
from persist.core.ids import ReaderId, SeqNo

# Holds at home for readers in a region: while the link is up, home keeps what they need.
#
# A server of a region has one leased reader at home for each shard that is read here, with the purpose `region:us`. It
# is at the earliest version, and time, of all readers here, and moves with them. If the region is lost, its leases
# lapse like those of any reader. A hold begins at the version that home had when it was taken: readers of earlier
# versions here may still get Expired.

log = logging.getLogger("persist.regions")

SHARDS_MAX = 10_000  # that are held at a time
READERS_MAX = 100_000  # that are remembered, of all shards together
IDLE_S = 600.0  # how long a shard is held after its last read
PER_ROUND_MAX = 500  # shards in one round of requests to home
SILENT_MAX = 3  # consecutive shards without an answer from home, after which a round ends
PURPOSE = "region:"  # prefix of the purpose of holds, before the name of the region
LEASE = ReadSettings(lease_ms=900_000, retry_s=0.0)


@dataclass(frozen=True, slots=True)
class _Reader:
    since: Antichain
    seqno: SeqNo
    until_s: float


@dataclass
class _HeldShard:
    """A shard that is read here. `used_s`: its last read. `turn`: its last turn in a round; 0: it had none."""

    readers: dict[ReaderId, _Reader] = field(default_factory=dict)
    lease: ReadLease | None = None
    used_s: float = 0.0
    turn: int = 0


class HomeHolds:
    """Thread-safe. `home` connects to home when first needed; `shown_version` returns since and seqno of the State."""

    def __init__(
        self,
        region: str,
        home: Callable[[], Transport],
        shown_version: Callable[[str], tuple[Antichain, SeqNo] | None],
        clock: Clock,
    ) -> None:
        self.failed: PersistError | None = None  # why the last round could not reach home
        self._purpose = PURPOSE + region
        self._home = home
        self._shown_version = shown_version
        self._clock = clock
        self._transport: Transport | None = None
        self._lock = threading.Lock()
        self._shards: dict[str, _HeldShard] = {}
        self._readers = 0
        self._turns = 0

    # --- readers here

    def register(self, name: str, command: c.RegisterReader, since: Antichain, seqno: SeqNo) -> None:
        """A reader begins at this time and version."""
        self._note(name, command.reader, _Reader(since, seqno, self._clock.monotonic() + command.lease_ms / 1000))

    def renew(self, name: str, command: c.DowngradeSince) -> None:
        """A reader continues, perhaps from another server of the region."""
        until_s = self._clock.monotonic() + LEASE.lease_ms / 1000
        with self._lock:
            shard = self._shards.get(name)
            hold = None if shard is None else shard.readers.get(command.reader)
        since, seqno = (Antichain(0), command.seqno) if hold is None else (hold.since, hold.seqno)
        if command.since is not None:
            since, seqno = max(since, command.since), max(seqno, command.seqno)
        self._note(name, command.reader, _Reader(since, seqno, until_s))

    def release(self, name: str, reader: ReaderId) -> None:
        """A reader has ended."""
        with self._lock:
            shard = self._shards.get(name)
            if shard is not None and shard.readers.pop(reader, None) is not None:
                self._readers -= 1

    def _note(self, name: str, reader: ReaderId, reader_hold: _Reader) -> None:
        with self._lock:
            shard = self._shards.get(name)
            if shard is None:
                if len(self._shards) >= SHARDS_MAX:
                    return
                shard = self._shards[name] = _HeldShard()
            shard.used_s = self._clock.monotonic()
            if reader not in shard.readers:
                if self._readers >= READERS_MAX:
                    return
                self._readers += 1
            shard.readers[reader] = reader_hold

    # --- holds at home

    @property
    def count(self) -> int:
        """How many shards are held at home now."""
        with self._lock:
            return sum(shard.lease is not None for shard in self._shards.values())

    def round(self) -> None:
        """Take, renew, move and release holds at home, as readers here need them. Raises nothing.

        Shards take turns, and an error of one does not affect the others. But if home does not answer for several in a
        row the round ends; the next one begins with the other shards.
        """
        with self._lock:
            names = nsmallest(PER_ROUND_MAX, self._shards, key=lambda name: self._shards[name].turn)
        failed: PersistError | None = None
        try:
            if names and self._transport is None:
                self._transport = self._home()
            unanswered = 0
            for name in names:
                is_silent = False
                try:
                    self._update_hold(name)
                except UnknownShard:  # dropped at home, which is not known here yet
                    pass
                except PersistError as error:
                    failed, is_silent = error, isinstance(error, Unavailable)
                unanswered = unanswered + 1 if is_silent else 0
                if unanswered >= SILENT_MAX:
                    break
        except PersistError as error:
            failed = error
        if failed is not None and self.failed is None:
            log.warning("a shard is not held at home: %s", failed)
        self.failed = failed

    def close(self) -> None:
        """Release all holds."""
        with self._lock:
            leases = [shard.lease for shard in self._shards.values() if shard.lease is not None]
            self._shards.clear()
        for lease in leases:
            lease.close()
        if self._transport is not None:
            self._transport.close()

    def _update_hold(self, name: str) -> None:
        now_s = self._clock.monotonic()
        with self._lock:
            shard = self._shards.get(name)
            if shard is None:  # closed meanwhile
                return
            self._turns += 1
            shard.turn = self._turns
            lapsed = [reader for reader, hold in shard.readers.items() if hold.until_s < now_s]
            for reader in lapsed:
                del shard.readers[reader]
            self._readers -= len(lapsed)
            readers, lease = list(shard.readers.values()), shard.lease
            is_idle = not readers and now_s - shard.used_s > IDLE_S
            if is_idle:
                del self._shards[name]
        if is_idle:
            if lease is not None:
                lease.close()
            return
        shown_version = self._shown_version(name)
        sinces = [reader.since for reader in readers] + ([shown_version[0]] if shown_version is not None else [])
        seqnos = [reader.seqno for reader in readers] + ([shown_version[1]] if shown_version is not None else [])
        if lease is None:
            shard.lease = self._take_lease(name, min(sinces, default=None))
            return
        try:
            self._move(lease, min(sinces, default=lease.since), min(seqnos, default=lease.seqno))
        except Expired:  # the lease at home has lapsed: hold what is needed from now on
            shard.lease = self._take_lease(name, min(sinces, default=None))
        except UnknownShard:
            shard.lease = None
            raise

    def _take_lease(self, name: str, since: Antichain | None) -> ReadLease:
        assert self._transport is not None
        try:
            return ReadLease.open(self._transport, name, since, self._purpose, LEASE)
        except NotReadable:  # home has forgotten that time already
            return ReadLease.open(self._transport, name, None, self._purpose, LEASE)

    def _move(self, lease: ReadLease, since: Antichain, seqno: SeqNo) -> None:
        """Move the hold forward, never back; otherwise only renew it. It does not move home's since."""
        if since > lease.since or seqno > lease.seqno:
            lease.move(max(since, lease.since), max(seqno, lease.seqno), moves_since=False)
        else:
            lease.keep()


# The holds of regions at their home, and their release by an operator.
#
# A region holds by leased readers with its name in their purpose. After a release its readers get Expired once home has
# deleted what they need, but never wrong rows.


@dataclass(frozen=True, slots=True)
class RegionHold:
    """A hold of `region` on a shard: `since`, and version `seqno`, of a shard that is at `upper`.

    `silent_s`: the minimum time since it was renewed, according to commits; `lapses_s`: in how many seconds it ends.
    """

    shard: str
    region: str
    reader: ReaderId
    since: Antichain
    upper: Antichain
    seqno: int
    silent_s: float
    lapses_s: float

    def to_json(self) -> dict[str, Any]:
        """The output of the command."""
        fields: dict[str, Any] = {"shard": self.shard, "region": self.region, "reader": str(self.reader)}
        fields |= {"since": self.since.to_json(), "upper": self.upper.to_json(), "version": self.seqno}
        return {**fields, "silent_seconds": self.silent_s, "lapses_in_seconds": self.lapses_s}


def list_region_holds(location: Location, region: str | None = None) -> Iterator[RegionHold]:
    """The holds of regions, or of one, on the shards here, by name. Writes nothing. Raises Unavailable."""
    for name in location.all_names(with_dropped=False):
        machine = location.machine(name)
        try:
            state = machine.refresh()
        except UnknownShard:  # dropped meanwhile
            continue
        now_ms = machine.lease_now_ms(state)
        for reader, lease in sorted(state.leased_readers.items()):
            if not lease.purpose.startswith(PURPOSE) or region not in (None, lease.purpose.removeprefix(PURPOSE)):
                continue
            silent_s, lapses_s = (now_ms - lease.heartbeat_ms) / 1000, (lease.lapses_ms - now_ms) / 1000
            yield RegionHold(
                name, lease.purpose.removeprefix(PURPOSE), reader, lease.since, state.upper, int(lease.seqno),
                max(0.0, silent_s), max(0.0, lapses_s),
            )  # fmt: skip


def release_region_holds(location: Location, region: str) -> list[RegionHold]:
    """End every hold of this region; returns them. A live region takes them again when it reads next.

    Safe to repeat. Raises Unavailable, ReadOnly (another home has taken over).
    """
    holds = list(list_region_holds(location, region))
    for hold in holds:
        location.machine(hold.shard).apply(c.ExpireReader(hold.reader))
    return holds
