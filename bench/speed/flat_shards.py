"""Shards that have grown in one way, for `bench.speed.flatness`: over stores in memory, without waiting for years.

A State is made as it would be after such a life, and committed as the first of its shard. What only its blobs hold
(rows, lists of parts) is not there: no cost that is measured reads it. Commits ever made and history are real commits.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable

import pyarrow as pa

from blob.memory_blobs import MemoryBlob
from consensus.interface import HIDDEN
from consensus.memory_logs import MemoryConsensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location, LocationSettings
from persist.core import commands as c
from persist.core.attribute import AttributeUpdate
from persist.core.audit_log import NOBODY, Caller
from persist.core.batch import FORMAT_BUNDLE, FORMAT_PARQUET, Bundle, Description, HollowBatch, Part, Run, trace_of
from persist.core.blob_keys import bundle_key, part_key
from persist.core.frontier import Antichain, frontier
from persist.core.ids import CriticalReaderId, PartId, ReaderId, SeqNo, ShardId, Token, WriterId, mint
from persist.core.record import replace
from persist.core.state import CriticalReader, LeasedReader, State, WriterState, initial_state
from persist.maintenance.collector import collect_in_background

NAME = "grown"
ROWS = pa.table({"k": [f"{n:016d}" for n in range(10)], "v": list(range(10))})
LEASE_MS = 24 * 3600 * 1000
LARGE_ROWS, LARGE_BYTES = 1_000_000, 100 * 2**20  # of a part: beyond what committers merge
BUNDLE_PARTS = 4_096
SETTLING_COMMITS = 80
ATTRIBUTES_A_COMMAND = 1_000
VALUE_BYTES_MAX = 2**30  # the first log entry holds all of a State that took years to grow

Grow = Callable[[State, int], State]


class SimulatedLogs(MemoryConsensus):
    """Logs in memory, listed as a database lists them: by an index, a page at a time. It counts the bytes written.

    `crowd` puts shards there that nobody writes: all of them share one log entry.
    """

    def __init__(self) -> None:
        super().__init__(value_bytes_max=VALUE_BYTES_MAX)
        self.bytes = self.count = 0
        self._sorted: list[str] = []

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        won = super().compare_and_set(key, seqno, data, after)
        if won:
            self.bytes += len(data)
            self.count += 1
            if seqno == 1 and key < HIDDEN:
                insort(self._sorted, key)
        return won

    def keys(self, prefix: str = "", after: str = "", limit: int = 1000, with_ended: bool = True) -> list[str]:
        first = max(bisect_left(self._sorted, prefix), bisect_right(self._sorted, after))
        return [key for key in self._sorted[first : first + limit] if key.startswith(prefix)]

    def crowd(self, names: list[str], like: str) -> None:
        log = self._logs[like]
        for name in names:
            self._logs[name] = log
            self._heads[name] = self._heads[like]
        self._sorted = sorted({*self._sorted, *names})


class CountingBlob(MemoryBlob):
    """Blobs in memory, with the bytes that were put."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.count = 0

    def put(self, key: str, data: bytes | memoryview) -> None:
        super().put(key, data)
        self.bytes += len(data)
        self.count += 1


class Waiting:
    """Background work that waits until it is asked for, so that its cost is told apart from that of commits."""

    def __init__(self) -> None:
        self.works: deque[Callable[[], None]] = deque()

    def submit(self, work: Callable[[], None]) -> bool:
        self.works.append(work)
        return True

    def drain(self) -> None:
        while self.works:
            self.works.popleft()()

    def close(self) -> None:
        self.works.clear()


class TimedTransport(EmbeddedTransport):
    """It tells how much CPU its last command took: without the encoding of rows, which is the client's."""

    took_s = 0.0
    last: c.Command | None = None

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY, by_names: bool = False) -> c.Result:
        start = time.thread_time()
        result = super().apply(name, command, caller, by_names)
        self.took_s, self.last = time.thread_time() - start, command
        return result


class Grown:
    """A location with the shard `NAME`, which has grown to `size` by `grow`, a writer of it, and one who follows it.

    With `commits` it grows by so many inserts instead. It is opened anew after that, as by a server that was started
    again: what a process only knows since it made it is not known. `collects`: as embedded programs, and not servers.
    """

    def __init__(
        self,
        grow: Grow | None = None,
        size: int = 0,
        *,
        history: str = "none",
        commits: int = 0,
        collects: bool = True,
        background: Callable[[], Waiting] = Waiting,
    ) -> None:
        self.logs, self.blobs = SimulatedLogs(), CountingBlob()
        self._collects, self._waiting = collects, background
        self._open()
        if grow is None:
            self.client.create_shard(NAME, ROWS.schema, ["k"], history=history)
            self.reopen()
        else:
            self._create(grow, size, history)
            self.reopen()
        for _ in range(commits):
            self.insert()
            self.background.drain()
        self.settle()

    def _open(self) -> None:
        self.background = self._waiting()
        self.location = Location(
            self.blobs,
            self.logs,
            settings=LocationSettings(collects=collect_in_background if self._collects else None),
            background=self.background,
        )
        self.transport = TimedTransport(self.location)
        self.client = Client(self.transport)
        self.follower = Location(self.blobs, self.logs, background=Waiting()).machine(NAME)

    def reopen(self) -> None:
        self._open()
        self.writer = self.client.shard(NAME).open_writer()

    def _create(self, grow: Grow, size: int, history: str) -> None:
        model = self.client.create_shard("model", ROWS.schema, ["k"], history=history)
        like = self.location.machine(model.name).state()
        fresh = initial_state(NAME, like.schemas[1], self.location.clock.now_ms(), like.settings)
        self.location.machine(NAME).create(grow(fresh, size))

    def settle(self) -> None:
        """Do what the first commits ask for: the first rollup, the first merges."""
        for _ in range(SETTLING_COMMITS):
            self.insert()
            self.background.drain()
        self.follower.refresh()

    def insert(self, rows: pa.Table = ROWS) -> float:
        """CPU seconds of one insert, from the command on."""
        self.writer.insert(rows)
        return self.transport.took_s

    @property
    def bytes(self) -> int:
        """That both stores took."""
        return self.logs.bytes + self.blobs.bytes

    def check(self) -> None:
        """Nothing of the upkeep has failed, so that none of it is missing in the figures."""
        failed = self.location.counted().upkeep_failed
        assert not failed, f"{failed} pieces of upkeep failed"


# --- the ways to grow


def with_batches(state: State, size: int) -> State:
    """So many batches that nobody has merged, each of one large part."""
    batches = (_batch(number, Run((_part(state.shard_id, number, LARGE_ROWS, LARGE_BYTES),))) for number in range(size))
    return replace(state, trace=trace_of(batches))


def with_parts(state: State, size: int) -> State:
    """One batch of so many parts of 100 MiB, in bundles as a Spark job or a merge leaves them."""
    parts = tuple(_bundle(state.shard_id, number) for number in range(-(-size // BUNDLE_PARTS)))
    return replace(state, trace=trace_of([_batch(0, Run(parts))]))


def with_writers(state: State, size: int) -> State:
    now_ms = state.walltime_ms
    return replace(state, writers={WriterId(_id("w", n)): _writer(now_ms, n) for n in range(size)})


def with_readers(state: State, size: int) -> State:
    now_ms = state.walltime_ms
    reader = LeasedReader(Antichain(0), SeqNo(1), now_ms, LEASE_MS, "flatness")
    return replace(state, leased_readers={ReaderId(_id("r", n)): reader for n in range(size)})


def with_cursors(state: State, size: int) -> State:
    cursor = CriticalReader(Antichain(0), "token", "flatness", SeqNo(1))
    return replace(state, critical_readers={CriticalReaderId(_id("c", n)): cursor for n in range(size)})


def with_schemas(state: State, size: int) -> State:
    first = state.schemas[1]
    return replace(state, schemas=dict.fromkeys(range(1, size + 1), first))


def with_attributes(size: int) -> Grown:
    """They are written by commands, and flushed to their index as these ask for it."""
    grown = Grown()
    machine = grown.location.machine(NAME)
    writer = mint(WriterId, grown.location.ids)
    for first in range(0, size, ATTRIBUTES_A_COMMAND):
        numbers = range(first, min(size, first + ATTRIBUTES_A_COMMAND))
        updates = tuple(AttributeUpdate.replace((n + 1).to_bytes(16, "little"), n) for n in numbers)
        machine.apply(c.UpdateAttributes(writer, mint(Token, grown.location.ids), updates))
        grown.background.drain()
    grown.settle()
    return grown


def _id(letter: str, number: int) -> str:
    """As clients mint them: random in their last digits."""
    return f"{letter}{number:012x}7{number * 0x9E3779B97F4A7C15 % 16**19:019x}"


def _writer(now_ms: int, number: int) -> WriterState:
    return WriterState(now_ms, LEASE_MS, Token(_id("i", number)), frontier(0), frontier(1))


def _batch(number: int, run: Run) -> HollowBatch:
    desc = Description(frontier(number), frontier(number + 1), frontier(0))
    return HollowBatch(desc, (run,), sum(part.rows for part in run.parts))


def _part(shard: ShardId, number: int, rows: int, size: int) -> Part:
    part_id = PartId(_id("p", number))
    return Part(
        id=part_id,
        key=part_key(shard, WriterId(_id("w", 0)), part_id),
        data=None,
        format=FORMAT_PARQUET,
        schema_id=1,
        rows=rows,
        size=size,
        checksum=number,
        footer_size=1_000,
        footer_checksum=number,
        key_lower=b"\x01%016d" % number,
        key_upper=b"\x01%016d" % (number + 1),
        time=number,
        time_min=number,
        time_max=number,
        diff_min=1,
        diff_max=1,
        diff_sum=rows,
        sorted=True,
    )


def _bundle(shard: ShardId, number: int) -> Part:
    """As `persist.core.bundles.bundle_of` makes it of so many parts."""
    part = _part(shard, number, BUNDLE_PARTS * LARGE_ROWS, BUNDLE_PARTS * LARGE_BYTES)
    key = bundle_key(shard, WriterId(_id("w", 0)), part.id)
    bundle = Bundle(BUNDLE_PARTS, 1, BUNDLE_PARTS * LARGE_ROWS, BUNDLE_PARTS * 300)
    return replace(part, key=key, format=FORMAT_BUNDLE, footer_size=0, time=None, time_min=0, time_max=0, bundle=bundle)


__all__ = [
    "NAME",
    "Grown",
    "with_attributes",
    "with_batches",
    "with_cursors",
    "with_parts",
    "with_readers",
    "with_schemas",
    "with_writers",
]
