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
from persist.commit.location import Location
from persist.commit.system import Clock
from persist.core import commands as c
from persist.core.errors import Expired, NotReadable, PersistError, Unavailable, UnknownShard
from persist.core.frontier import Antichain
from persist.core.ids import ReaderId, SeqNo

# Holds at home for those who read in a region: as long as the link is up, home keeps what they still need.
#
# A server of a region keeps one leased reader at home for each shard that somebody reads here; lists of readers show it
# as `region:us`. It stands at the earliest version, and time, that anybody here holds, and moves as they move on. Where
# the region is gone, its leases lapse as any reader's do. A hold counts from the version that home had when it was
# taken: who reads an earlier one here may be told Expired yet.


log = logging.getLogger("persist.regions")

SHARDS_MAX = 10_000  # that are held at a time
READERS_MAX = 100_000  # that are remembered, of all shards together
IDLE_S = 600.0  # for so long a shard is held after the last who read it
PER_ROUND_MAX = 500  # shards of which one round asks home
SILENT_MAX = 3  # shards in a row for which home did not answer, after which a round ends
PURPOSE = "region:"  # what holds of regions are called, before the name of the region
LEASE = ReadSettings(lease_ms=900_000, retry_s=0.0)


@dataclass(frozen=True, slots=True)
class _Reader:
    since: Antichain
    seqno: SeqNo
    until_s: float


@dataclass
class _Held:
    """A shard that is read here. `used_s`: when somebody last asked. `turn`: its last turn; 0: it had none."""

    readers: dict[ReaderId, _Reader] = field(default_factory=dict)
    lease: ReadLease | None = None
    used_s: float = 0.0
    turn: int = 0


class HomeHolds:
    """Thread-safe. `home` opens the way to home, when it is first needed; `shown` tells the State that is shown."""

    def __init__(
        self,
        region: str,
        home: Callable[[], Transport],
        shown: Callable[[str], tuple[Antichain, SeqNo] | None],
        clock: Clock,
    ) -> None:
        self.failed: PersistError | None = None  # why the last round could not reach home
        self._purpose = PURPOSE + region
        self._home = home
        self._shown = shown
        self._clock = clock
        self._transport: Transport | None = None
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._readers = 0
        self._turns = 0

    # --- what readers here do

    def took(self, name: str, command: c.RegisterReader, since: Antichain, seqno: SeqNo) -> None:
        """Somebody here begins to read at this time and version."""
        self._note(name, command.reader, _Reader(since, seqno, self._clock.monotonic() + command.lease_ms / 1000))

    def kept(self, name: str, command: c.DowngradeSince) -> None:
        """Somebody goes on; perhaps one who began at another server of the region."""
        until_s = self._clock.monotonic() + LEASE.lease_ms / 1000
        with self._lock:
            held = self._held.get(name)
            known = None if held is None else held.readers.get(command.reader)
        since = known.since if known is not None else Antichain(0)
        seqno = known.seqno if known is not None else command.seqno
        if command.since is not None:
            since, seqno = max(since, command.since), max(seqno, command.seqno)
        self._note(name, command.reader, _Reader(since, seqno, until_s))

    def gave_back(self, name: str, reader: ReaderId) -> None:
        """Somebody has ended."""
        with self._lock:
            held = self._held.get(name)
            if held is not None and held.readers.pop(reader, None) is not None:
                self._readers -= 1

    def _note(self, name: str, reader: ReaderId, found: _Reader) -> None:
        with self._lock:
            held = self._held.get(name)
            if held is None:
                if len(self._held) >= SHARDS_MAX:
                    return
                held = self._held[name] = _Held()
            held.used_s = self._clock.monotonic()
            if reader not in held.readers:
                if self._readers >= READERS_MAX:
                    return
                self._readers += 1
            held.readers[reader] = found

    # --- what is held at home

    @property
    def count(self) -> int:
        """How many shards are held at home now."""
        with self._lock:
            return sum(held.lease is not None for held in self._held.values())

    def round(self) -> None:
        """Take, keep, move and give back holds at home, as readers here need them. Raises nothing.

        Shards have their turns one after the other. What goes wrong with one harms no other. Only where home does not
        answer for several in a row the round ends; the next one begins with the others.
        """
        with self._lock:
            names = nsmallest(PER_ROUND_MAX, self._held, key=lambda name: self._held[name].turn)
        failed: PersistError | None = None
        try:
            if names and self._transport is None:
                self._transport = self._home()
            silent = 0
            for name in names:
                try:
                    self._look_after(name)
                    silent = 0
                except UnknownShard:  # dropped there; here that is not known yet, and nothing can be held
                    silent = 0
                except PersistError as error:
                    failed = error
                    silent = silent + 1 if isinstance(error, Unavailable) else 0
                    if silent >= SILENT_MAX:
                        break
        except PersistError as error:
            failed = error
        if failed is not None and self.failed is None:
            log.warning("something is not held at home: %s", failed)
        self.failed = failed

    def close(self) -> None:
        """Give everything back."""
        with self._lock:
            leases = [held.lease for held in self._held.values() if held.lease is not None]
            self._held.clear()
        for lease in leases:
            lease.close()
        if self._transport is not None:
            self._transport.close()

    def _look_after(self, name: str) -> None:
        now_s = self._clock.monotonic()
        with self._lock:
            held = self._held.get(name)
            if held is None:  # closed meanwhile
                return
            self._turns += 1
            held.turn = self._turns
            lapsed = [reader for reader, known in held.readers.items() if known.until_s < now_s]
            for reader in lapsed:
                del held.readers[reader]
            self._readers -= len(lapsed)
            readers, lease = list(held.readers.values()), held.lease
            is_idle = not readers and now_s - held.used_s > IDLE_S
            if is_idle:
                del self._held[name]
        if is_idle:
            if lease is not None:
                lease.close()
            return
        shown = self._shown(name)
        sinces = [reader.since for reader in readers] + ([shown[0]] if shown is not None else [])
        seqnos = [reader.seqno for reader in readers] + ([shown[1]] if shown is not None else [])
        if lease is None:
            held.lease = self._taken(name, min(sinces, default=None))
            return
        try:
            self._moved(lease, min(sinces, default=lease.since), min(seqnos, default=lease.seqno))
        except Expired:  # home has not heard of us for so long: what is needed is held from now on
            held.lease = self._taken(name, min(sinces, default=None))
        except UnknownShard:
            held.lease = None
            raise

    def _taken(self, name: str, since: Antichain | None) -> ReadLease:
        assert self._transport is not None
        try:
            return ReadLease.open(self._transport, name, since, self._purpose, LEASE)
        except NotReadable:  # home has forgotten that time already
            return ReadLease.open(self._transport, name, None, self._purpose, LEASE)

    def _moved(self, lease: ReadLease, since: Antichain, seqno: SeqNo) -> None:
        """Move the hold forward, never back; else only renew it. Home's since stays, whatever our token may do."""
        if since > lease.since or seqno > lease.seqno:
            lease.move_alone(max(since, lease.since), max(seqno, lease.seqno))
        else:
            lease.keep()


# What regions hold at home: shown with its age, and let go by an operator.
#
# A region holds by leased readers that are called after it (`remote_holds.py`). Who still reads there is told Expired
# once home has deleted what it needs, never fewer rows.


@dataclass(frozen=True, slots=True)
class RegionHold:
    """A hold of `region` on a shard: `since`, and version `seqno`, of a shard that is at `upper`.

    `silent_s`: for so long, at least, home has not heard of it, as far as commits tell; `lapses_s`: in so long it ends.
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
        """As the command prints it."""
        told: dict[str, Any] = {"shard": self.shard, "region": self.region, "reader": str(self.reader)}
        told |= {"since": self.since.to_json(), "upper": self.upper.to_json(), "version": self.seqno}
        return {**told, "silent_seconds": self.silent_s, "lapses_in_seconds": self.lapses_s}


def held_by_regions(location: Location, region: str | None = None) -> Iterator[RegionHold]:
    """What regions, or this one, hold of the shards here, by name. Writes nothing. Raises Unavailable."""
    for name in location.all_names(with_dropped=False):
        machine = location.machine(name)
        try:
            state = machine.refresh()
        except UnknownShard:  # dropped meanwhile
            continue
        now_ms = machine.lease_now_ms(state)
        for reader, held in sorted(state.leased_readers.items()):
            if not held.purpose.startswith(PURPOSE) or region not in (None, held.purpose.removeprefix(PURPOSE)):
                continue
            silent_s, lapses_s = (now_ms - held.heartbeat_ms) / 1000, (held.lapses_ms - now_ms) / 1000
            yield RegionHold(
                name, held.purpose.removeprefix(PURPOSE), reader, held.since, state.upper, int(held.seqno),
                max(0.0, silent_s), max(0.0, lapses_s),
            )  # fmt: skip


def let_go(location: Location, region: str) -> list[RegionHold]:
    """End every hold of this region; what it held. A region that is alive takes them anew when it reads next.

    Repeating it is safe. Raises Unavailable, ReadOnly (another home has taken over).
    """
    found = list(held_by_regions(location, region))
    for hold in found:
        location.machine(hold.shard).apply(c.ExpireReader(hold.reader))
    return found
