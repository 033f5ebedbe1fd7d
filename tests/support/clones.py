"""Several shards in memory stores, clones among them, next to plain sets that say what each holds."""

from __future__ import annotations

import pyarrow as pa

from blob.memory_blobs import MemoryBlob
from compactor.orphans import Sweeper, SweepSettings
from compactor.worker import Worker
from consensus.memory_logs import MemoryConsensus
from persist.commit.blob_tasks import keys_in
from persist.commit.location import Location
from persist.core.blob_keys import is_bundle_key, is_rollup_key, shard_of
from persist.core.ids import SeqNo, family_of
from persist.core.state import Policy, State
from persist.maintenance.clones_and_loans import LoanLists
from persist.maintenance.collector import UNTAKEN_MS
from tests.support.crashing import CrashingBlob, CrashingConsensus, Fuse
from tests.support.location import AscendingIds, TestClock, client_of, memory_location
from tests.support.maintained import WORKER, EagerCollector

SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
AGE_MS = UNTAKEN_MS


class ClockedIds(AscendingIds):
    """Ids that tell when they were minted."""

    def __init__(self, clock: TestClock, origin: int) -> None:
        super().__init__(origin)
        self._clock = clock

    def uuid7(self) -> str:
        return f"{self._clock.now_ms():012x}{super().uuid7()[12:]}"


class Shards:
    """The stores, processes that use them, and what each shard is to hold."""

    def __init__(self, *, policy: Policy | None = None) -> None:
        self.clock = TestClock()
        self.blob = MemoryBlob(now_ms=self.clock.now_ms)
        self.consensus = MemoryConsensus()
        self.policy = policy or Policy(inline_part_bytes_max=0, rollup_every=16)
        self.rows: dict[str, set[tuple[str, int]]] = {}
        self._processes = 0
        self.here = self.process()
        self.client = client_of(self.here)

    def process(self, fuse: Fuse | None = None) -> Location:
        """A process of its own over the same stores; it ends when its fuse says so."""
        self._processes += 1
        return memory_location(
            blob=self.blob if fuse is None else CrashingBlob(self.blob, fuse),
            consensus=self.consensus if fuse is None else CrashingConsensus(self.consensus, fuse),
            clock=self.clock,
            ids=ClockedIds(self.clock, self._processes),
            policy=self.policy,
            small_merges=False,
        )

    # --- what users do

    def create(self, name: str, inserts: int = 3) -> None:
        self.client.create_shard(name, SCHEMA, ["k"], history="none")
        self.rows[name] = set()
        for _ in range(inserts):
            self.write(name)

    def write(self, name: str) -> None:
        fresh = {(f"{name}{len(self.rows[name])}", len(self.rows[name]))}
        self.client.shard(name).insert([{"k": k, "v": v} for k, v in fresh])
        self.rows[name] = self.rows[name] | fresh

    def clone(self, source: str, name: str, location: Location | None = None) -> None:
        client = self.client if location is None else client_of(location)
        client.clone(source, name)
        self.rows[name] = set(self.rows[source])

    def drop(self, name: str) -> None:
        self.client.shard(name).drop(force=True)
        del self.rows[name]

    # --- maintenance

    def names(self) -> list[str]:
        return list(self.here.all_names())

    def collect(self, *names: str, fuse: Fuse | None = None) -> None:
        collector = EagerCollector(self.process(fuse))
        for name in names or self.names():
            collector.run(name)

    def merge(self, name: str) -> None:
        """Merge all that there is, at the latest time."""
        shard = self.client.shard(name)
        upper = shard.upper().element
        assert upper is not None
        shard.downgrade_since(max(upper - 1, 0))
        worker = Worker(self.process(), WORKER)
        while worker.run(name, idle=True):
            pass

    def sweep(self) -> None:
        sweeper = Sweeper(self.process(), SweepSettings(AGE_MS))
        for name in self.names():
            sweeper.sweep(name)

    def settle(self) -> None:
        """Until maintenance finds nothing to do: whatever was begun is old by then."""
        for _ in range(3):
            self.clock.advance_ms(AGE_MS + 1)
            before: list[int] = []
            for _ in range(30):
                self.collect()
                heads = [int(self.state(name).seqno) for name in self.names()]
                if heads == before:
                    break
                before = heads
            else:
                raise AssertionError("maintenance finds no end")
            self.sweep()

    # --- looking

    def state(self, name: str) -> State:
        return self.here.machine(name).refresh()

    def contents(self, name: str) -> set[tuple[str, int]]:
        table = client_of(self.process()).shard(name).snapshot().to_arrow()
        return set(zip(table["k"].to_pylist(), table["v"].to_pylist(), strict=True))

    def blobs(self) -> set[str]:
        return {stat.key for stat in self.blob.list("s")}

    def needed(self, live: bool = True) -> set[str]:
        """Every blob that a live version of any shard names, also by bundles; and the lists of loans.

        Or only the newest versions: while a collection is under way, nobody can load those before its horizon.
        """
        found: set[str] = set()
        for name in self.names():
            state = self.state(name)
            found.update(state.blob_keys())
            if state.tombstone or not live:  # nobody loads an earlier version
                continue
            changes = self.here.versions.diffs(name, SeqNo(1), 10_000)
            first = changes[0].seqno
            found.update(key for change in changes if change.seqno > first for key in change.gone)
        for bundle in filter(is_bundle_key, sorted(found)):
            found.update(keys_in(self.blob, bundle) if self.blob.stat(bundle) else ())
        return found

    def lent(self) -> set[str]:
        lists = LoanLists(self.blob)
        loans = [loan for name in self.names() for loan in self.state(name).loans.values()]
        return {key for loan in loans for key in lists.keys(loan.list_key)}

    def check(self) -> None:
        """All that a live version names is there, and every shard reads as it should."""
        assert self.needed(live=False) <= self.blobs()
        for name, rows in self.rows.items():
            assert self.contents(name) == rows, name

    def check_at_rest(self) -> None:
        """Nothing lies about: what is there is named, or lent, of which half is needed at least."""
        self.check()
        needed = self.needed()
        assert not {key for key in needed - self.blobs() if not is_rollup_key(key)}
        lent = self.lent() - needed
        assert self.blobs() - needed <= lent
        for name in self.names():
            family = family_of(self.state(name).shard_id)
            foreign = {key for key in self.state(name).blob_keys() if not key.startswith(family)}
            owners = {family_of(shard_of(key)) for key in foreign}
            assert len(self.state(name).borrowed) == len(owners)
