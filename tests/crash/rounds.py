"""Rounds of torment over two stores, then everything that must be true afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from blob import Blob, BlobStat, open_blob
from blob.metrics import ForwardingBlob
from compactor.orphans import Sweeper
from compactor.worker import Worker
from consensus import open_consensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.clocks_and_ids import PREFIX, SystemClock
from persist.commit.location import Location, LocationSettings
from persist.core.blob_keys import shard_prefix
from persist.core.ids import SeqNo
from persist.maintenance.collector import Collector, GcReport
from tests.crash.actor import SHARD
from tests.crash.arena import Arena
from tests.crash.clocks import WRONG_MS_MAX
from tests.crash.journal import Account
from tests.crash.small import POLICY, WORKER
from tests.simulation.oracle import expect
from tests.support.location import InlineBackground, client_of

HOUR_MS = 3_600_000
LAPSED_MS = HOUR_MS  # beyond every lease
SWEPT_MS = WRONG_MS_MAX + 25 * HOUR_MS  # beyond the age at which orphans are swept that a clock ahead has left
EXTRA_ROUNDS_MAX = 100  # on a slow machine it takes longer until everything was tried
SETTLE_COMMITS_MAX = 10_000
SETTLED_LOG_MAX = 4 * POLICY.rollup_every
SETTLED_ROLLUPS_MAX = 2
SETTLED_BATCHES_MAX = 16


class LaterClock(SystemClock):
    """The clocks of a machine for which time goes by at once: so it has watched how the leases of the dead lapse."""

    def __init__(self) -> None:
        self._ahead_ms = 0

    def pass_ms(self, ms: int) -> None:
        self._ahead_ms += ms

    def now_ms(self) -> int:
        return super().now_ms() + self._ahead_ms

    def monotonic(self) -> float:
        return super().monotonic() + self._ahead_ms / 1000

    def uptime(self) -> float:
        return super().uptime() + self._ahead_ms / 1000


class LaterBlob(ForwardingBlob):
    """A store whose clock agrees with that of the machine: what is put now is so much younger than what was there."""

    def __init__(self, inner: Blob, clock: LaterClock) -> None:
        super().__init__(inner)
        self._clock = clock

    def list(self, prefix: str) -> Iterator[BlobStat]:
        ahead_ms = self._clock.now_ms() - SystemClock().now_ms() if prefix == PREFIX else 0
        for stat in super().list(prefix):
            yield replace(stat, modified_ms=stat.modified_ms + ahead_ms)


def run_rounds(directory: Path, blob: str, consensus: str, rounds: int, seed: int = 1) -> str:
    """Torment, then check; what was done and seen, in a few lines. Raises Violation."""
    with Arena(directory, blob, consensus, seed) as arena:
        arena.start()
        for _ in range(rounds):
            arena.torment()
        extra = 0
        while lacks := arena.lacks(rounds):
            expect(extra < EXTRA_ROUNDS_MAX, "vacuity", f"never, in {rounds + extra} rounds: {lacks}")
            arena.torment()
            extra += 1
    account = Account.read(arena.journal)
    account.check()
    held = _held(blob, consensus)
    account.check_held(held)
    settle(blob, consensus)
    expect(_held(blob, consensus) == held, "definite", "maintenance at rest changed what the shard holds")
    _check_that_clients_stay(arena.struck)
    counted = ("ok", "refused", "unknown", "read", "listened", "view", "expired", "token")
    seen = ", ".join(f"{what} {account.counts[what]}" for what in counted)
    struck = ", ".join(f"{what} {count}" for what, count in sorted(arena.struck.items()))
    return f"{rounds} + {extra} rounds; writes and reads: {seen}\nstruck: {struck}"


def settle(blob: str, consensus: str) -> None:
    """Maintenance of a shard whose users are all dead: it comes to rest, small, and without orphans."""
    clock = LaterClock()
    with client_of(location := _location(blob, consensus, clock)):
        location.machine(SHARD).refresh()
        clock.pass_ms(LAPSED_MS)
        worker, collector = Worker(location, WORKER), Collector(location)
        machine = location.machine(SHARD)
        first, before, report = machine.refresh().seqno, None, GcReport(done=False)
        while machine.state().seqno != before:  # everything happens in this thread: no commit, so nothing is left to do
            before = machine.state().seqno
            expect(before - first < SETTLE_COMMITS_MAX, "liveness", f"no end after {before - first} commits")
            worker.run(SHARD, idle=True)
            report = collector.run(SHARD)
        state = machine.refresh()
        expect(report.done and not state.claims, "liveness", f"at rest, but {report} and merges: {state.claims}")
        entries = len(location.versions.diffs(SHARD, SeqNo(1), 1_000))
        batches = sum(1 for batch in state.trace.batches if batch.runs)
        expect(entries <= SETTLED_LOG_MAX, "bounded", f"the log at rest has {entries} entries")
        expect(len(state.rollups) <= SETTLED_ROLLUPS_MAX, "bounded", f"{len(state.rollups)} rollups at rest")
        expect(batches <= SETTLED_BATCHES_MAX, "bounded", f"{batches} batches at rest")
    clock.pass_ms(SWEPT_MS)
    with client_of(location := _location(blob, consensus, clock)):
        Sweeper(location).sweep(SHARD)
        state = location.machine(SHARD).refresh()
        named = set(state.blob_keys())
        known = named | {key for change in location.versions.diffs(SHARD, SeqNo(1), 1_000) for key in change.gone}
        stored = {stat.key for stat in location.blob.list(shard_prefix(state.shard_id))}
        expect(named <= stored, "reachable", f"named but not there: {sorted(named - stored)[:3]}")
        expect(stored <= known, "swept", f"orphans survive the sweep: {sorted(stored - known)[:3]}")


def _location(blob: str, consensus: str, clock: LaterClock) -> Location:
    return Location(
        LaterBlob(open_blob(blob), clock),
        open_consensus(consensus),
        settings=LocationSettings(policy=POLICY),
        clock=clock,
        background=InlineBackground(),
    )


def _held(blob: str, consensus: str) -> Counter[str]:
    """Rows by write, as of the last time."""
    with Client(EmbeddedTransport(_location(blob, consensus, LaterClock()))) as client:
        table = client.shard(SHARD).snapshot(num_splits=3).to_arrow()
    expect(set(table.column("__diff").to_pylist()) <= {1}, "atomic", "rows are there more than once")
    return Counter(table.column("who").to_pylist())


def _check_that_clients_stay(struck: Counter[str]) -> None:
    gave_up = [
        what for what in struck if what.endswith("gave up") and what.split()[0] in ("writer", "reader", "listener")
    ]
    expect(not gave_up, "broken", f"clients ended by themselves: {gave_up}")
