"""What marks and a policy of history cost: a commit, a question by wall clock, and thirty days of updates.

`append`: one row is inserted into a shard without marks and history and into one with both, 2,000 times each in turns.
`resolve`: a wall clock is asked for over a million marks.
`days`: a shard with seven days of history is updated for thirty days of a clock that the benchmark moves.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bench.bars import bar, median, timed
from blob.memory_blobs import MemoryBlob
from compactor.worker import Worker, WorkerSettings
from consensus.memory_logs import MemoryConsensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.location import Location, LocationSettings, open_location
from persist.core import commands as c
from persist.core.frontier import Antichain
from persist.maintenance.collector import Collector
from persist.maintenance.expiry import forget_outlived
from tests.support.location import InlineBackground, TestClock

APPENDS = 2_000
APPEND_ROUNDS = 9
QUESTIONS = 501
COLLECTED_EVERY = 5_000  # commits: the bench keeps all in memory
SECOND_MS = 1_000
HOUR_MS = 3_600_000
BEGIN_MS = 1_700_000_000_000
DAYS = 30
KEPT_DAYS = 7
COMMITS_A_DAY = 24
ROWS = 100_000
WHOLE_TRIES = 10  # of a merge of all that others may be in the way of
SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("s", pa.string())])


def bench_append(directory: Path) -> None:
    """CPU of the whole process, and calls to both stores; the clock is compared with the store's once beforehand."""
    kinds = {"without": (None, False), "with": ("7d", True)}
    cpu: dict[str, list[float]] = {kind: [] for kind in kinds}
    calls = dict.fromkeys(kinds, 0)
    opened = {
        kind: open_location(
            f"persist://{directory / kind}",
            settings=LocationSettings(history=history, compares_clock=compares, metered=True),
            background=InlineBackground(),
        )
        for kind, (history, compares) in kinds.items()
    }
    clients = {kind: Client(EmbeddedTransport(location)) for kind, location in opened.items()}
    row = pa.table({"k": [1], "v": [2], "s": ["three"]})
    writers = {}
    for kind, client in clients.items():
        writers[kind] = client.create_shard("appended", SCHEMA, ["k"]).open_writer()
        writers[kind].insert(row)
    for number in range(APPEND_ROUNDS):
        for kind in list(kinds) if number % 2 else reversed(kinds):
            before, started = calls_of(opened[kind]), time.process_time()
            for _ in range(APPENDS):
                writers[kind].insert(row)
            cpu[kind].append(time.process_time() - started)
            calls[kind] += calls_of(opened[kind]) - before
    marks = opened["with"].machine("appended").refresh().marks
    print(f"CPU ms an append: {[round(median(some) / APPENDS * 1e3, 4) for some in cpu.values()]}; {len(marks)} marks")
    print(f"calls of stores: {calls}")
    ratios = [after / without for without, after in zip(cpu["without"], cpu["with"], strict=True)]
    bar("append with marks and history, CPU", median(ratios), "<= 1.05")
    bar("append with marks and history, store requests", calls["with"] / calls["without"], "<= 1")
    for client in clients.values():
        client.close()


def calls_of(location: Location) -> int:
    return sum(calls for calls, _, _ in location.store_calls.totals().values())


def faked(history: str) -> tuple[TestClock, MemoryBlob, Location]:
    """A location over memory whose clock, and the store's, the benchmark moves."""
    clock = TestClock(BEGIN_MS)
    blob = MemoryBlob("mem:", now_ms=clock.now_ms)
    settings = LocationSettings(history=history)
    location = Location(blob, MemoryConsensus("mem:"), settings=settings, clock=clock, background=InlineBackground())
    return clock, blob, location


def bench_resolve(marks: int) -> None:
    """A commit a second, one after the other; then instants anywhere among them, in two passes, the second measured."""
    clock, blob, location = faked("forever")
    client, collector = Client(EmbeddedTransport(location)), Collector(location)
    shard, machine = client.create_shard("marked", SCHEMA, ["k"]), location.machine("marked")
    for number in range(1, marks + 1):
        clock.advance_ms(SECOND_MS)
        machine.apply(c.AdvanceUpper(Antichain(number)))
        if number % COLLECTED_EVERY == 0:
            collector.run("marked")
        if number % 100_000 == 0:
            print(f"{number} commits, {nbytes(blob)} bytes of blobs", flush=True)
    asked = np.random.default_rng(1).integers(1, marks - 1, QUESTIONS)
    samples: list[float] = []
    for _ in range(2):
        samples = [timed(lambda n=n: _checked(shard, int(n))) for n in asked]  # type: ignore[misc]
    print(f"{machine.refresh().attribute_root.count} marks in the index; p99 {np.quantile(samples, 0.99) * 1e3:.3f} ms")
    bar(f"resolving a wall clock over {marks} marks, ms", median(samples) * 1e3, "<= 2")
    client.close()


def _checked(shard: Shard, number: int) -> None:
    """The second after commit `number`: it was committed by then, and the next one was not."""
    instant = datetime.fromtimestamp((BEGIN_MS + number * SECOND_MS) / 1000, UTC)
    found = shard.time_at(instant)
    assert found == Antichain(number - 1), (found, number)


def bench_days() -> None:
    """The bytes of the blob store after each day beside those of the live rows and seven days of updates, compacted."""
    clock, blob, location = faked(f"{KEPT_DAYS}d")
    client = Client(EmbeddedTransport(location))
    shard = client.create_shard("daily", SCHEMA, ["k"])
    updates = Updates()
    shard.insert(updates.first())
    worst = 0.0
    for day in range(DAYS):
        for _ in range(COMMITS_A_DAY):
            clock.advance_ms(HOUR_MS)
            shard.insert(updates.following())
            maintain(location, "daily", clock)
        held, live = nbytes(blob), updates.compacted_bytes()
        worst = max(worst, held / live)
        print(f"day {day + 1}: {held} bytes, compacted {live}: {held / live:.2f}, since {shard.since()}", flush=True)
    bar(f"bytes after {DAYS} days to live rows and {KEPT_DAYS} days of updates", worst, "<= 1.6")
    client.close()


def maintain(location: Location, name: str, clock: TestClock) -> None:
    """What `persist maintain run` does, once."""
    forget_outlived(location.machine(name), clock)
    Worker(location).run(name)
    Collector(location).run(name)


def nbytes(blob: MemoryBlob) -> int:
    return sum(stat.size for stat in blob.list(""))


class Updates:
    """Batches that replace one row of a hundred each: what took the old row away, and the new one."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(3)
        self._values = np.arange(ROWS, dtype=np.int64)
        self._batches: list[pa.Table] = []

    def first(self) -> pa.Table:
        return self._made(np.arange(ROWS), 1)

    def following(self) -> pa.Table:
        keys = self._random.choice(ROWS, ROWS // 100, replace=False)
        gone = self._made(keys, -1)
        self._values[keys] += ROWS
        self._batches.append(pa.concat_tables([gone, self._made(keys, 1)]))
        del self._batches[: -KEPT_DAYS * COMMITS_A_DAY]
        return self._batches[-1]

    def compacted_bytes(self) -> int:
        """The bytes of one compacted shard of what was there seven days ago and the updates since."""
        location = faked("forever")[2]
        with Client(EmbeddedTransport(location)) as client:
            shard = client.create_shard("compacted", SCHEMA, ["k"])
            live = self._made(np.arange(ROWS), 1)
            undone = [_negated(batch) for batch in self._batches]
            shard.insert(pa.concat_tables([live, *undone]))
            for batch in self._batches:
                shard.insert(batch)
            whole(location, "compacted")
            state = location.machine("compacted").refresh()
            return sum(part.size for batch in state.trace.batches for part in batch.parts())

    def _made(self, keys: np.ndarray, diff: int) -> pa.Table:
        values = pa.array(self._values[keys])
        texts = pa.array([f"value {value * 7919 % 1_000_003}" for value in self._values[keys].tolist()])
        diffs = pa.array(np.full(len(keys), diff, dtype=np.int64))
        return pa.table({"k": pa.array(keys), "v": values, "s": texts, "__diff": diffs})


def _negated(batch: pa.Table) -> pa.Table:
    index = batch.schema.get_field_index("__diff")
    return batch.set_column(index, "__diff", pc.negate(batch["__diff"]))


def whole(location: Location, name: str, settings: WorkerSettings | None = None) -> None:
    """Merge all of a shard into one, as somebody who has nothing else to do would.

    Merges in the background may win the race for some of its batches: then once more.
    """
    for _ in range(WHOLE_TRIES):
        state = location.machine(name).refresh()
        batches = state.trace.batches
        if len(batches) == 1:
            return
        parts = [part for batch in batches for part in batch.parts()]
        inputs, size = tuple(part.id for part in parts), sum(part.size for part in parts)
        lower, upper = batches[0].desc.lower, batches[-1].desc.upper
        spec = c.MergeSpec(inputs, lower, upper, state.merge_since, state.trace.rows, size)
        Worker(location, settings).merge(name, spec)
    raise AssertionError(f"{name} is still not one batch")
