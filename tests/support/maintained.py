"""A shard in memory stores that tests write, merge, collect and read, next to a plain dict that says what it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import closing

import pyarrow as pa

from blob.memory_blobs import MemoryBlob
from compactor.engine import EngineSettings
from compactor.orphans import Sweeper, SweepSettings
from compactor.worker import CLAIM_LEASE_MS, Worker, WorkerSettings
from consensus.memory_logs import MemoryConsensus
from persist.client.shard import Shard
from persist.commit.blob_tasks import keys_in
from persist.commit.location import Location
from persist.core.batch import Run
from persist.core.blob_keys import is_bundle_key, shard_prefix
from persist.core.ids import SeqNo
from persist.core.merge_plan import MergePolicy
from persist.core.state import Policy, State
from persist.maintenance.collector import Collector
from tests.support.crashing import CrashingBlob, CrashingConsensus, Fuse
from tests.support.location import AscendingIds, TestClock, client_of, memory_location

NAME = "orders"
SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
UPDATES = pa.schema([*SCHEMA, pa.field("__time", pa.int64()), pa.field("__diff", pa.int64())])
LEASE_MS = CLAIM_LEASE_MS
AGE_MS = 3_600_000

Row = tuple[str, int, int, int]  # key, value, time, diff

# Tiny parts and chunks, so that small tests see many of them.
WORKER = WorkerSettings(
    policy=MergePolicy(fan_in=2, batches_soft=4),
    engine=EngineSettings(memory_bytes=1 << 20, part_bytes_target=1_500),
)
ROLLUP_AFTER = 8  # entries


class EagerCollector(Collector):
    """Makes rollups after few entries, so that small tests see many epochs."""

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._rollup_after = ROLLUP_AFTER


class World:
    """The stores, and processes that use them."""

    def __init__(self, *, policy: Policy | None = None) -> None:
        self.clock = TestClock()
        self.blob = MemoryBlob(now_ms=self.clock.now_ms)
        self.consensus = MemoryConsensus()
        self.policy = policy or Policy(inline_part_bytes_max=0, rollup_every=16)
        self._processes = 0
        self.rows: list[Row] = []
        self.reopen()

    def reopen(self) -> None:
        """The user's process ends and starts anew."""
        self.user = self.process()
        self.client = client_of(self.user)
        self.shard: Shard = self.client.create_shard(NAME, SCHEMA, ["k"])

    def process(self, fuse: Fuse | None = None) -> Location:
        """A process of its own over the same stores; it ends when its fuse says so."""
        self._processes += 1
        return memory_location(
            blob=self.blob if fuse is None else CrashingBlob(self.blob, fuse),
            consensus=self.consensus if fuse is None else CrashingConsensus(self.consensus, fuse),
            clock=self.clock,
            ids=AscendingIds(self._processes),
            policy=self.policy,
            small_merges=False,  # tests say what is merged when
        )

    def worker(self, fuse: Fuse | None = None, settings: WorkerSettings = WORKER) -> Worker:
        return Worker(self.process(fuse), settings)

    def collector(self, fuse: Fuse | None = None) -> Collector:
        return EagerCollector(self.process(fuse))

    def sweeper(self, *, dry_run: bool = False) -> Sweeper:
        return Sweeper(self.process(), SweepSettings(AGE_MS, dry_run))

    # --- writing

    def append(self, rows: Iterable[Row], upper: int) -> None:
        """Append rows (at times from the shard's upper on) and make `upper` the new upper."""
        held = list(rows)
        expected = self.state().upper.element
        names = ("k", "v", "__time", "__diff")
        rows_in_full = [dict(zip(names, row, strict=True)) for row in held]
        self.shard.compare_and_append(pa.Table.from_pylist(rows_in_full, schema=UPDATES), expected, upper)
        self.rows += held

    def append_in_parts(self, count: int, upper: int, *, rows: int = 1, first: int = 0) -> None:
        """Append `count` parts, each a run of its own, with keys that ascend from part to part."""
        expected = self.state().upper.element
        assert expected is not None
        runs: list[Run] = []
        with closing(self.shard.open_writer()) as writer:
            for number in range(first, first + count):
                fresh = [(f"k{number:05}", expected * 1000 + n, expected, 1) for n in range(rows)]
                table = pa.Table.from_pylist([{"k": k, "v": v} for k, v, _, _ in fresh])
                runs += writer.stage_for_one_commit(table, expected)
                self.rows += fresh
            writer.commit_compare_and_append(tuple(runs), expected, upper)

    def append_many(self, count: int, rows: int, *, step: int = 1) -> None:
        """`count` appends of `rows` rows each, every other one of which is retracted by the next append."""
        for _ in range(count):
            time = self.state().upper.element
            assert time is not None
            retracted = [(k, v, time, -d) for k, v, _, d in self.rows[-rows:] if d > 0 and int(k[1:]) % 2]
            fresh = [(f"k{(time * 7 + n) % 50}", time * 1000 + n, time, 1) for n in range(rows)]
            self.append(retracted + fresh, time + step)

    def forget_before(self, since: int) -> None:
        """Move the shard's since."""
        self.shard.downgrade_since(since)

    # --- looking

    def state(self) -> State:
        return self.user.machine(NAME).refresh()

    def expected(self, as_of: int) -> Counter[tuple[str, int]]:
        total: Counter[tuple[str, int]] = Counter()
        for key, value, time, diff in self.rows:
            if time <= as_of:
                total[key, value] += diff
        return Counter({row: count for row, count in total.items() if count})

    def contents(self, as_of: int, location: Location | None = None, splits: int = 2) -> Counter[tuple[str, int]]:
        client = client_of(location or self.process())
        table = client.shard(NAME).snapshot(as_of, num_splits=splits).to_arrow()
        total: Counter[tuple[str, int]] = Counter()
        for key, value, diff in zip(*(table.column(n).to_pylist() for n in ("k", "v", "__diff")), strict=True):
            assert (key, value) not in total, "a snapshot shows a row once"
            total[key, value] = diff
        return total

    def check_reads(self) -> None:
        """The first, the last and a middle readable time read as the model says, in a process that starts now."""
        state = self.state()
        if state.since.element is None:
            return
        upper = state.since.element + 1 if state.upper.element is None else state.upper.element
        fresh = self.process()
        for as_of in {state.since.element, (state.since.element + upper) // 2, upper - 1}:
            assert self.contents(as_of, fresh) == self.expected(as_of), f"as of {as_of}"

    def blobs(self) -> set[str]:
        return {stat.key for stat in self.blob.list(shard_prefix(self.state().shard_id))}

    def named(self) -> set[str]:
        """Every blob that the State names, by itself or by bundles."""
        named = set(self.state().blob_keys())
        return named.union(*(keys_in(self.blob, key) for key in named if is_bundle_key(key)))

    def check_stores(self) -> None:
        """Every blob that the State names is there, and the log begins at a rollup that it names."""
        state = self.state()
        assert self.named() <= self.blobs()
        first = self.consensus.scan(NAME, 1, 1)[0].seqno
        assert SeqNo(first) in state.rollups

    # --- coming to rest

    def settle(self) -> None:
        """Let every lease lapse, then merge, collect and sweep until nothing is left to do."""
        worker, collector = self.worker(), self.collector()
        for _ in range(20):  # maintenance watches how they lapse
            collector.run(NAME)
            self.clock.advance_ms(AGE_MS // 10)
        for _ in range(20):
            merged = worker.run(NAME, idle=True)
            if collector.run(NAME).done and not merged:
                break
        else:
            raise AssertionError("maintenance finds no end")
        self.sweeper().sweep(NAME)
