"""A location whose stores are replaced under running processes, one operation at a time, by a seed.

Two faults, which the other runs do not know, since there what was acknowledged is never lost:

- a regressed log: the log of one shard loses its newest entries, as after a failover to a replica that lacked them;
- swapped stores: the blob store of a process becomes that of another location, and the process sweeps it.

The checker knows which rows may be lost: those of the entries that went. Its checks: `mixed` (a process that has seen
a lost row is given nothing more of that shard), `worse` (whoever starts afterwards reads all that was not lost),
`others` (the other location loses no blob), `told` (InvalidUsage only where stores were swapped).
"""

from __future__ import annotations

import random
from collections import Counter

import pyarrow as pa

from blob import Blob
from blob.memory_blobs import MemoryBlob
from blob.metrics import ForwardingBlob
from compactor.orphans import Sweeper, SweepSettings
from consensus import HIDDEN
from consensus.memory_logs import MemoryConsensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.listen import Listen
from persist.client.shard import Shard
from persist.commit.location_identity import CONFIRM_EVERY_S
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.blob_keys import rollup_seqno, rollups_prefix
from persist.core.errors import Corruption, Expired, HistoryLost, InvalidUsage, NotReadable
from persist.core.ids import shard_id_of
from persist.core.state import Policy
from persist.formats.state_frames import decode_diff
from persist.maintenance.collector import Collector
from tests.simulation.oracle_errors import expect
from tests.support.location import AscendingIds, TestClock, memory_location

MAIN, OTHER, THEIRS = "main", "other", "theirs"  # the last one is in the other location only
SCHEMA = pa.schema([("id", pa.int64())])
OPERATIONS = 120
PROCESSES = 3
LOST_MAX = 5  # entries
HOUR_MS = 3_600_000
SWEEP = SweepSettings(age_ms=48 * HOUR_MS)
POLICY = Policy(inline_part_bytes_max=0, rollup_every=8)
Rows = frozenset[int]


class Log(MemoryConsensus):
    """A log that may lose its newest entries, and knows what rows each entry brought."""

    def __init__(self) -> None:
        super().__init__("mem:")
        self.rows_of: dict[str, int] = {}  # by token
        self.landed: dict[str, dict[int, list[int]]] = {}  # by shard and seqno
        self.lost: set[int] = set()

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        won = super().compare_and_set(key, seqno, data, after)
        if won and not key.startswith(HIDDEN):
            writers = decode_diff(data).writers
            tokens = [str(entry.token) for entry in (writers.set.values() if writers else ())]
            known = {row for rows in self.landed.get(key, {}).values() for row in rows}
            rows = [self.rows_of[token] for token in tokens if token in self.rows_of]
            self.landed.setdefault(key, {})[seqno] = [row for row in rows if row not in known]
        return won

    def lose(self, key: str, entries: int) -> None:
        """Lose so many of the newest entries, but none on which a collection relied.

        That is the one that names the rollup at which the log begins: the rollups before it may be gone. Where it is
        lost, whoever starts is told that a rollup is missing.
        """
        with self._lock:
            for _ in range(entries):
                seqno = self._heads[key]
                first = min(self._logs[key])
                if seqno == first or decode_diff(self._logs[key][seqno - 1]).rollup_seqno < first:
                    return
                del self._logs[key][seqno]
                self._heads[key] -= 1
                self.lost.update(self.landed[key].pop(seqno, ()))

    def truth(self, key: str) -> Rows:
        return frozenset(row for rows in self.landed.get(key, {}).values() for row in rows)


class Exchangeable(ForwardingBlob):
    """The blob store as one process reaches it."""

    def become(self, other: Blob) -> None:
        self._inner = other


class Noting(EmbeddedTransport):
    """Tells the log which row each insert brings."""

    log: Log
    row = 0

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        if isinstance(command, c.Insert):
            self.log.rows_of[str(command.token)] = self.row
        return super().apply(name, command, caller)


class Process:
    """One process: its location, what it has been given of each shard, and what it was told."""

    def __init__(self, site: Site, number: int) -> None:
        self.blob = Exchangeable(site.blob)
        self.location = memory_location(
            blob=self.blob, consensus=site.log, clock=site.clock, ids=AscendingIds(number), policy=POLICY
        )
        self.transport = Noting(self.location)
        self.transport.log = site.log
        client = Client(self.transport)
        self.shards: dict[str, Shard] = {name: client.create_shard(name, SCHEMA, ["id"]) for name in (MAIN, OTHER)}
        self.seen: dict[str, set[int]] = {MAIN: set(), OTHER: set()}
        self.listen: Listen | None = None
        self.is_swapped = False


class Site:
    """One location: its stores, and the processes that have it open."""

    def __init__(self, first: int) -> None:
        self.blob: Blob = MemoryBlob("mem:", now_ms=lambda: self.clock.now_ms())
        self.log, self.clock = Log(), TestClock(HOUR_MS)
        self.made = first
        self.rows = 0
        self.processes = [self.start() for _ in range(PROCESSES)]

    def start(self) -> Process:
        """A new process. Where the log has lost what the blob store has seen, an operator goes on without that."""
        self.made += 1
        try:
            return Process(self, self.made)
        except Corruption as error:
            expect("has lost commits" in error.message, "worse", error.message)
        for name in (MAIN, OTHER):
            head = self.log.head(name)
            listed = self.blob.list(rollups_prefix(shard_id_of(name)))
            self.blob.delete([stat.key for stat in listed if head and rollup_seqno(stat.key) > head.seqno])
        return Process(self, self.made)

    def rest(self) -> None:
        """Time enough passes that leases lapse and orphans are old."""
        self.clock.advance_ms(60 * HOUR_MS)


def run(seed: int) -> Counter[str]:
    """One run; how often each thing happened. Raises Violation."""
    pick = random.Random(f"failover {seed}")
    site, neighbour = Site(0), Site(1_000)
    Client(neighbour.processes[0].transport).create_shard(THEIRS, SCHEMA, ["id"])
    neighbour.rest()
    theirs = {stat.key for stat in neighbour.blob.list("s")}
    seen: Counter[str] = Counter()
    for _ in range(OPERATIONS):
        process = pick.choice(site.processes)
        fate = pick.choices(
            ("insert", "read", "listen", "maintain", "regress", "swap", "rest"), (30, 12, 12, 8, 2, 1, 2)
        )[0]
        seen[fate] += 1
        if fate == "regress":
            site.log.lose(MAIN, 1 + pick.randrange(LOST_MAX))
        elif fate == "swap":
            process.blob.become(neighbour.blob)
            process.is_swapped = True
            site.clock.advance_ms(int(CONFIRM_EVERY_S * 1000))  # for so long nobody compares again
        elif fate == "rest":
            site.rest()
        else:
            try:
                _act(site, process, fate, pick.choice((MAIN, MAIN, OTHER)))
            except HistoryLost:
                seen["told of lost history"] += 1
                site.processes[site.processes.index(process)] = site.start()
            except InvalidUsage as error:
                expect(process.is_swapped, "told", f"nothing was exchanged: {error}")
                seen["told of swapped stores"] += 1
                site.processes[site.processes.index(process)] = site.start()
            except (Expired, NotReadable):
                process.listen = None
            except Corruption as error:
                expect(_is_astray(site, process), "told", f"nothing was lost: {error}")
                seen["told of corruption"] += 1
                site.processes[site.processes.index(process)] = site.start()
    gone = theirs - {stat.key for stat in neighbour.blob.list("s")}
    expect(not gone, "others", f"the other location has lost {sorted(gone)}")
    _check(site)
    return seen


def _act(site: Site, process: Process, fate: str, name: str) -> None:
    shard, given = process.shards[name], process.seen[name]
    if process.is_swapped:
        Sweeper(process.location, SWEEP).sweep_unborn()
        return
    if fate == "maintain":
        Collector(process.location).run(name)
        Sweeper(process.location, SWEEP).sweep(name)
        return
    cached = process.location.machine(name).cached
    if cached is not None and process.listen is None and site.log.scan(name, 0, 1)[0].seqno > cached.seqno:
        given.clear()  # collected beyond what it has read (docs/design/0007-identity-and-recovery.md)
    had_lost = bool(given & site.log.lost)
    if fate == "insert":
        site.rows += 1
        process.transport.row = site.rows
        shard.insert(pa.table({"id": [site.rows]}))
        rows = {site.rows}
    elif fate == "read":
        rows = set(shard.snapshot().to_arrow().column("id").to_pylist()) if shard.upper().element else set()
        truth = site.log.truth(name)
        expect(rows == truth, "mixed", f"a snapshot shows {sorted(rows ^ truth)} too few or too many")
    else:
        name, shard, given = MAIN, process.shards[MAIN], process.seen[MAIN]
        had_lost = bool(given & site.log.lost)
        process.listen = process.listen or shard.listen(None)
        rows = {row for event in process.listen.next_events(0) for row in event.updates.column("id").to_pylist()}
    mixed = had_lost and rows and not _is_astray(site, process)  # astray: it is still in the history that was lost
    expect(not mixed, "mixed", f"a process that was given lost rows of {name} is given {sorted(rows)}")
    given |= rows


def _is_astray(site: Site, process: Process) -> bool:
    """Whether the newest State of the shard that the process knows is not, or no more, in the log."""
    state = process.location.machine(MAIN).cached
    return state is None or all(
        decode_diff(entry.data).commit_id != state.commit_id for entry in site.log.scan(MAIN, int(state.seqno), 1)
    )


def _check(site: Site) -> None:
    shards = site.start().shards
    for name in (MAIN, OTHER):
        shard = shards[name]
        found = shard.snapshot().to_arrow().column("id").to_pylist() if shard.upper().element else []
        expect(set(found) == site.log.truth(name), "worse", f"{name} has {len(found)} rows at the end")
        expect(len(found) == len(set(found)), "worse", f"{name} has rows twice")
