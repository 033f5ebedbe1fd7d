"""The history of the sample: wall clocks, settings, policies, cuts, truncations, drops, erasures, and entries.

Its processes have a clock that can be set, on which the blob store agrees: hours pass at once, and clocks can be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa

from blob import Blob, BlobStat, open_blob
from blob.metrics import ForwardingBlob
from compactor.tasks import Eraser
from compactor.worker import Worker
from consensus import open_consensus
from consensus.metrics import ForwardingConsensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.client.transport import AsCaller
from persist.commit.clocks_and_ids import SystemClock
from persist.commit.location import Location, LocationSettings, directory_urls
from persist.core import commands as c
from persist.core.audit_log import Caller
from persist.core.state import Policy
from persist.maintenance.collector import Collector
from tests.support.clocks import Ids
from tests.support.location import InlineBackground

HOUR_MS = 3_600_000
BEGIN_MS = -40 * 24 * HOUR_MS  # before the time at which the sample is made: it must not lie in the future
ROWS = pa.schema([pa.field("k", pa.string()), pa.field("v", pa.int64())])
POLICY = Policy(overlay_flush_at=8)
LEFT = "what a database may keep"


class ShiftedClock(SystemClock):
    """The clock of this machine, off by `off_ms`."""

    off_ms = BEGIN_MS

    def now_ms(self) -> int:
        return super().now_ms() + self.off_ms

    def monotonic(self) -> float:
        return super().monotonic() + (self.off_ms - BEGIN_MS) / 1000

    def uptime(self) -> float:
        return super().uptime() + (self.off_ms - BEGIN_MS) / 1000


class ShiftedBlob(ForwardingBlob):
    """Its clock is that of the process, or off from it by `apart_ms`."""

    apart_ms = 0

    def __init__(self, inner: Blob, clock: ShiftedClock) -> None:
        super().__init__(inner)
        self._clock = clock

    def list(self, prefix: str) -> Iterator[BlobStat]:
        for stat in super().list(prefix):
            yield replace(stat, modified_ms=stat.modified_ms + self._clock.off_ms + self.apart_ms)


class Untidy(ForwardingConsensus):
    """As a database that keeps something of what was deleted."""

    def scrub(self) -> str:
        super().scrub()
        return LEFT


@dataclass
class Past:
    """Processes of a location in the past, one after the other: each begins where the one before ended."""

    directory: Path
    off_ms: int = BEGIN_MS

    @contextmanager
    def process(self, apart_ms: int = 0) -> Iterator[Process]:
        blob_url, consensus_url = directory_urls(f"persist://{self.directory}")
        clock = ShiftedClock()
        clock.off_ms = self.off_ms
        blob = ShiftedBlob(open_blob(blob_url), clock)
        blob.apart_ms = apart_ms
        location = Location(
            blob,
            Untidy(open_consensus(consensus_url)),
            settings=LocationSettings(POLICY, check_all=True),
            clock=clock,
            ids=Ids(clock, abs(clock.off_ms)),  # type: ignore[arg-type]  # it asks for the time only
            background=InlineBackground(),
        )
        with closing(location):
            yield Process(location, clock)
        self.off_ms = clock.off_ms


@dataclass(frozen=True)
class Process:
    location: Location
    clock: ShiftedClock

    @property
    def client(self) -> Client:
        who = Caller("ann", "", b"")
        return Client(AsCaller(EmbeddedTransport(self.location), who))

    def create(self, name: str, history: str) -> Shard:
        return self.client.create_shard(name, ROWS, ["k"], history=history)

    def passes(self, ms: int) -> None:
        self.clock.off_ms += ms

    def inserts(self, shard: Shard, keys: Sequence[str], every_ms: int = 2_000) -> None:
        for number, key in enumerate(keys):
            gone = [{"k": keys[number - 1], "v": 0, "__diff": -1}] if number % 3 == 2 else []
            shard.insert([{"k": key, "v": 0}, *gone], info={"load": number})
            self.passes(every_ms)

    def maintains(self, name: str, rounds: int = 4) -> None:
        collector = Collector(self.location)
        for _ in range(rounds):
            Worker(self.location).run(name, idle=True)
            Eraser(self.location, collector).run(name)
            collector.run(name)
            self.passes(6 * HOUR_MS)


def kept(past: Past) -> None:
    """Marks in the index and in the State, files of entries, settings of every kind, cuts, and a ladder of tags."""
    with past.process() as process:
        shard = process.create("kept", "forever")
        shard.configure(history="4000d", mark_every=timedelta(seconds=2))
        process.inserts(shard, [f"k{number}" for number in range(14)])
        shard.critical_reader("job").downgrade_since(2)
        policy: dict[str, Any] = {"age": "4000d", "rows": 10**9, "bytes": "1TiB", "cut_every": "5d"}
        policy |= {"consumers": ["job"], "consumers_max_age": "4000d", "tags": {"hourly": 3, "daily": 2, "monthly": 1}}
        shard.retain(policy)
        for _ in range(3):
            process.passes(HOUR_MS)
            process.inserts(shard, ["later"])
            shard.run_retention()


def truncated(past: Past) -> None:
    """Rows that a truncation took away, rows that a policy took away, and rows that a drop took away."""
    with past.process() as process:
        shard = process.create("truncated", "forever")
        process.inserts(shard, "abcdef")
        shard.truncate(3)
        shard = process.create("thrown", "forever")
        process.inserts(shard, "ab")
        shard.truncate(2, mode="drop")
        shard.insert([{"k": "later", "v": 1}])
        shard.forget(2)
        process.location.machine("thrown").apply(c.ForgetOutlived())
        shard = process.create("overrun", "forever")
        shard.critical_reader("slow").downgrade_since(0)
        shard.retain({"age": "2s", "cut_every": "1s", "consumers": ["slow"], "consumers_max_age": "4s"})
        process.inserts(shard, "ab")
        for _ in range(6):
            shard.run_retention()
            process.passes(2_000)
        shard.retain({"age": "4000d", "cut_every": "5d", "mode": "drop"})
        shard = process.create("another-drop", "forever")
        process.inserts(shard, "ab")
        shard.truncate(2, mode="drop")
        shard = process.create("policed", "forever")
        shard.retain({"rows": 3, "cut_every": "1s"})
        for key in "abcdefgh":
            process.inserts(shard, [key])
            process.passes(2_000)
            shard.run_retention()


def undone(past: Past) -> None:
    """A restore, marks on grids of two widths, and a policy that goes by the value of a column."""
    with past.process() as process:
        shard = process.create("undone", "forever")
        process.inserts(shard, "abc")
        shard.configure(mark_every=timedelta(seconds=5))
        process.inserts(shard, "de")
        shard.restore(1)
        shard = process.create("columned", "forever")
        now_ms = process.clock.now_ms()
        for key, days in (("old", 4), ("waits", 3), ("new", 0)):
            shard.insert([{"k": key, "v": now_ms - days * 24 * HOUR_MS}])
            process.passes(2_000)
        shard.critical_reader("slow").downgrade_since(1)
        wanted = {"column": "v", "column_age": "2d", "column_unit": "ms", "consumers": ["slow"]}
        shard.retain(wanted, confirm=True)
        shard.run_retention()


def erased(past: Past) -> None:
    """An erasure with its receipt, one that waits for a tag, and one that waits for the writer who appends."""
    with past.process() as process:
        shard = process.create("erased", "forever")
        process.inserts(shard, "abc")
        shard.erase(keys=["a"], deadline="30d", reason="dsr-1")
        process.maintains("erased")
        assert [one.phase for one in shard.erasures().values()] == ["erased"]
        process.inserts(shard, "de")
        shard.tag("eom", keep="4000d")
        shard.insert([{"k": "later", "v": 1}])
        shard.erase(where="k = 'd'", reason="dsr-2")
        assert len(shard.erasures()) == 2
        fed = process.create("fed-erased", "forever")
        fed.append([{"k": key, "v": 1} for key in "ab"], 0, 1)
        assert fed.erase(keys=["a"], tags=True, reason="dsr-3").phase == "pending"


def wrong_clocks(past: Past) -> None:
    """A seal by a clock that was days ahead, as the store's was, and its repair; then a clock that nobody checks."""
    with past.process() as process:
        shard = process.create("clocks", "forever")
        process.inserts(shard, "ab")
        process.passes(48 * HOUR_MS)
        process.inserts(shard, "cd")
        process.passes(-48 * HOUR_MS)
    with past.process() as process:
        process.location.machine("clocks").apply(c.LowerSeal())
        process.inserts(process.client.shard("clocks"), "ef")
    with past.process(apart_ms=-HOUR_MS) as process:
        process.client.shard("clocks").insert([{"k": "g", "v": 1}])


CHAPTERS: tuple[Callable[[Past], None], ...] = (kept, truncated, undone, erased, wrong_clocks)


def told(client: Client) -> dict[str, Any]:
    """What a sample tells of itself by the calls of users, but for what maintenance changes."""
    found = {}
    for name in client.shards():
        shard = client.shard(name)
        low, high = shard.since().element or 0, shard.upper().element or 0
        dates = {time: shard.timestamp_of(time) for time in range(low, high)}
        found[name] = {
            "dates": {str(time): None if at is None else at.isoformat() for time, at in dates.items()},
            "settings": repr(shard.settings),
            "tags": {tag: one.time for tag, one in shard.tags().items()},
            "history": [[one.operation, one.who, one.info] for one in shard.history(100)],
            "erasures": [[one.at, one.reason, one.question_sha256] for one in shard.erasures().values()],
        }
    return found
