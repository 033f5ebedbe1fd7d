"""One process of a crash test: `python -m tests.crash.actor ROLE JOURNAL SEED POINT CONNECTION...`.

It writes what it attempts and what it is told to its journal, a line each, before and after. At a named point of its
n-th call of a store it kills itself with SIGKILL; the test kills it at random moments besides.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from blob import open_blob
from blob.interface import Blob, BlobStat
from compactor.engine import EngineSettings
from compactor.gc import Collector, GcSettings
from compactor.merge import MergePolicy
from compactor.worker import Worker, WorkerSettings
from consensus import open_consensus
from consensus.interface import Consensus, Entry
from persist.client import Client, connect
from persist.embedded import EmbeddedTransport
from persist.errors import Conflict, Expired, Indeterminate, Overloaded, PersistError, Unavailable
from persist.handles import HandleSettings
from persist.location import Location, LocationSettings
from persist.machine import MachineSettings
from persist.reading import ReadSettings
from persist.state import Policy
from persist.writing import WriteSettings

SHARD = "crash"
SCHEMA = pa.schema([pa.field("who", pa.string()), pa.field("n", pa.int64())])
POLICY = Policy(inline_part_bytes_max=600, inline_shard_bytes_max=4_000, rollup_every=8)
HANDLES = HandleSettings(
    write=WriteSettings(lease_ms=30_000, retry_s=5.0), read=ReadSettings(lease_ms=10_000, retry_s=5.0)
)
POINTS = ("put.before", "put.after", "set.before", "set.after", "delete.before", "delete.after", "truncate.after")


class Fuse:
    """Kills this process at the `calls`-th time that `point` is reached."""

    def __init__(self, point: str, calls: int) -> None:
        self._point = point
        self._left = calls

    def __call__(self, point: str) -> None:
        if point == self._point:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class FusedBlob(Blob):
    """A blob store whose caller may die before or after a call."""

    def __init__(self, inner: Blob, fuse: Fuse) -> None:
        self._inner = inner
        self._fuse = fuse

    @property
    def url(self) -> str:
        return self._inner.url

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._fuse("put.before")
        self._inner.put(key, data)
        self._fuse("put.after")

    def get(self, key: str) -> bytes:
        return self._inner.get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        return self._inner.get_range(key, start, length)

    def stat(self, key: str) -> BlobStat | None:
        return self._inner.stat(key)

    def delete(self, keys: Sequence[str]) -> None:
        self._fuse("delete.before")
        self._inner.delete(keys)
        self._fuse("delete.after")

    def list(self, prefix: str) -> Iterator[BlobStat]:
        return self._inner.list(prefix)

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()


class FusedConsensus(Consensus):
    """A consensus store whose caller may die before or after a call."""

    def __init__(self, inner: Consensus, fuse: Fuse) -> None:
        self._inner = inner
        self._fuse = fuse

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def value_bytes_max(self) -> int:
        return self._inner.value_bytes_max

    def head(self, key: str) -> Entry | None:
        return self._inner.head(key)

    def compare_and_set(self, key: str, seqno: int, data: bytes) -> bool:
        self._fuse("set.before")
        won = self._inner.compare_and_set(key, seqno, data)
        self._fuse("set.after")
        return won

    def scan(self, key: str, from_seqno: int, limit: int) -> list[Entry]:
        return self._inner.scan(key, from_seqno, limit)

    def truncate(self, key: str, seqno: int) -> int:
        deleted = self._inner.truncate(key, seqno)
        self._fuse("truncate.after")
        return deleted

    def keys(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[str]:
        return self._inner.keys(prefix, after, limit)

    def check(self) -> None:
        self._inner.check()

    def close(self) -> None:
        self._inner.close()

    def subscribe(self, callback: Callable[[str], None]) -> Callable[[], None] | None:
        return self._inner.subscribe(callback)


def location_of(blob_url: str, consensus_url: str, fuse: Fuse) -> Location:
    settings = LocationSettings(policy=POLICY, machine=MachineSettings(retry_s=3.0))
    return Location(
        FusedBlob(open_blob(blob_url), fuse), FusedConsensus(open_consensus(consensus_url), fuse), settings=settings
    )


class Journal:
    """Lines that survive the process: each is one write to a file opened for appending."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def say(self, **line: Any) -> None:
        os.write(self._file, (json.dumps(line) + "\n").encode())


def write(client: Client, journal: Journal, seed: int) -> None:
    """Inserts and compare-and-appends; every write holds rows that no other has."""
    shard = client.create_shard(SHARD, SCHEMA, ["who"])
    pick = random.Random(seed)
    number = 0
    while True:
        number += 1
        count = pick.choice((1, 1, 2, 80))
        name = f"{seed}.{number}"
        rows = pa.table({"who": [name] * count, "n": list(range(count))})
        journal.say(write=name, rows=count)
        try:
            if pick.random() < 0.5:
                told = shard.insert(rows)
            else:
                upper = shard.upper()
                told = shard.compare_and_append(rows, upper, (upper.element or 0) + pick.choice((1, 3)))
            journal.say(ok=name, at=[told.lower.element, told.upper.element])
        except (Unavailable, Overloaded, Conflict):
            journal.say(refused=name)
        except (Indeterminate, Expired):
            journal.say(unknown=name)


def read(client: Client, journal: Journal, seed: int) -> None:
    """Snapshots of random times, in splits."""
    shard = client.create_shard(SHARD, SCHEMA, ["who"])
    pick = random.Random(seed)
    while True:
        try:
            view = shard.view()
            upper, since = view.upper.element or 0, view.since.element or 0
            if upper > since:
                as_of = pick.randrange(since, upper)
                table = shard.snapshot(as_of, num_splits=pick.choice((1, 3)), wait_s=5.0).to_arrow()
                journal.say(read=as_of, rows=sorted(map(list, zip(*table.to_pydict().values(), strict=True))))
            if pick.random() < 0.1 and upper > 20:
                shard.downgrade_since(max(since, upper - 20))
        except (Unavailable, Overloaded, Indeterminate, Expired):
            journal.say(weather=True)
        except PersistError as error:
            if error.kind != "not_readable":
                journal.say(broken=repr(error))
        time.sleep(0.02)


def maintain(location: Location, journal: Journal, role: str) -> None:
    """A compaction worker or a collector."""
    engine = EngineSettings(memory_bytes=1 << 22, part_bytes_target=1 << 14, chunk_bytes=1 << 12)
    policy = MergePolicy(fan_in=2, fan_in_small=2, batches_soft=4, inline_flush_bytes=2_000)
    worker = Worker(location, WorkerSettings(policy=policy, engine=engine, lease_ms=2_000, idle_ms=500))
    collector = Collector(location, GcSettings(rollup_after=8, delete_batch=4))
    while True:
        try:
            if role == "compactor":
                worker.run(SHARD, merges_max=5)
            else:
                collector.run(SHARD)
        except PersistError as error:
            if error.kind not in ("unavailable", "indeterminate", "overloaded", "unknown_shard"):
                journal.say(broken=repr(error))
        time.sleep(0.05)


def main() -> None:
    role, journal_path, seed, point, *connection = sys.argv[1:]
    journal = Journal(journal_path)
    name, _, calls = point.partition(":")
    fuse = Fuse(name, int(calls or 0))
    if len(connection) == 1:
        client = connect(connection[0], handles=HANDLES)
    else:
        location = location_of(connection[0], connection[1], fuse)
        if role in ("compactor", "collector"):
            maintain(location, journal, role)
        client = Client(EmbeddedTransport(location), HANDLES)
    {"writer": write, "reader": read}[role](client, journal, int(seed))


if __name__ == "__main__":
    main()
