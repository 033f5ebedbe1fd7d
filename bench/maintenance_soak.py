"""A server that maintains itself while writers and readers are at it for long: nobody may see an error.

One shard is appended to by several writers, another is updated for ever while its since follows. A reader checks all
the time that what a time showed once it shows again.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from bench.bars import bar, percentile
from persist.client.client import Client, connect
from persist.client.shard import Shard

SMALL = pa.schema([("k", pa.string()), ("v", pa.int64()), ("s", pa.string())])
WRITERS = 3
KEYS = 1_000
READ_EVERY_S = 1.0
NAMES = ("commits", "commands", "races_lost", "flushes", "upkeep_refused", "upkeep_failed")


@dataclass
class Seen:
    """What all threads saw."""

    errors: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    reads: int = 0
    stop: threading.Event = field(default_factory=threading.Event)

    def forever(self, work: Callable[[], None]) -> None:
        while not self.stop.is_set():
            try:
                work()
            except Exception as error:  # whatever it is, it counts
                self.errors.append(repr(error))

    def timed(self, work: Callable[[], object]) -> None:
        start = time.perf_counter()
        work()
        self.seconds.append(time.perf_counter() - start)


def bench_soak(directory: Path, seconds: float) -> list[bool]:
    command = [sys.executable, "-m", "rpc.cli", "serve", "--dir", str(directory / "soak"), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert server.stdout is not None
    url = server.stdout.readline().strip()
    seen = Seen()
    try:
        with connect(url) as client:
            rows = soaked(client, seen, seconds)
            table = client.shard("appended").snapshot(columns=["k"]).to_arrow()
        counters = counted(url)
    finally:
        server.terminate()
        _, said = server.communicate()
    kept = pc.sum(table.column("__diff")).as_py()
    print(f"soak of {seconds:.0f} s: {rows} rows in {len(seen.seconds)} writes, {seen.reads} reads; {dict(counters)}")
    print(said.strip(), file=sys.stderr)
    print("\n".join(seen.errors[:5]))
    p50, p99 = (1000 * percentile(seen.seconds, fraction) for fraction in (0.5, 0.99))
    print(f"writers: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    return [
        bar("soak, errors that writers or readers saw", len(seen.errors), "<= 0"),
        bar("soak, rows that are not there or there twice", abs(kept - rows), "<= 0"),
    ]


def soaked(client: Client, seen: Seen, seconds: float) -> int:
    """Run everybody for so long; how many rows were appended."""
    client.create_shard("appended", SMALL, ["k"], history="none")
    updated = client.create_shard("updated", SMALL, ["k"], history="none")
    counts = [0] * WRITERS
    threads = [
        threading.Thread(target=writer, args=(client.shard("appended"), seen, counts, n)) for n in range(WRITERS)
    ]
    threads.append(threading.Thread(target=updater, args=(updated, seen)))
    threads.append(threading.Thread(target=reader, args=(client.shard("appended"), seen)))
    for thread in threads:
        thread.start()
    time.sleep(seconds)
    seen.stop.set()
    for thread in threads:
        thread.join()
    return sum(counts)


def writer(shard: Shard, seen: Seen, counts: list[int], number: int) -> None:
    def insert() -> None:
        first = counts[number]
        keys = [f"{number}-{(first + n) * 7919 % 1_000_003:012d}" for n in range(20)]
        table = pa.table({"k": keys, "v": list(range(20)), "s": ["some value of some length"] * 20})
        seen.timed(lambda: shard.insert(table))
        counts[number] += 20

    seen.forever(insert)


def updater(shard: Shard, seen: Seen) -> None:
    """Replace a hundred rows at a time; since follows."""
    values = [-1] * KEYS
    done = [0]

    def update() -> None:
        keys = [(done[0] * 100 + n) % KEYS for n in range(100)]
        rows = [(key, values[key] + new, 1 if new else -1) for key in keys for new in (0, 1) if new or values[key] >= 0]
        names, numbers, diffs = zip(*rows, strict=True)
        columns = {"k": [f"{key:012d}" for key in names], "v": numbers, "s": ["value"] * len(rows), "__diff": diffs}
        seen.timed(lambda: shard.insert(pa.table(columns)))
        for key in keys:
            values[key] += 1
        done[0] += 1
        if done[0] % 5 == 0:
            shard.downgrade_since(done[0] - 2)

    seen.forever(update)


def reader(shard: Shard, seen: Seen) -> None:
    """A time reads the same at the first and at every later look."""
    known: dict[int, int] = {}

    def look() -> None:
        seen.stop.wait(READ_EVERY_S)
        upper = shard.upper().element
        if not upper:
            return
        known.setdefault(upper - 1, -1)
        for as_of in (upper - 1, next(iter(known))):
            rows = pc.sum(shard.snapshot(as_of, columns=["k"]).to_arrow().column("__diff")).as_py()
            if known.get(as_of, -1) not in (-1, rows):
                raise AssertionError(f"time {as_of} had {known[as_of]} rows and has {rows} now")
            known[as_of] = rows
            seen.reads += 1

    seen.forever(look)


def counted(url: str) -> Counter[str]:
    """Counters of the server's machines."""
    found: Counter[str] = Counter()
    with urllib.request.urlopen(f"{url}/metrics") as answer:
        for line in answer.read().decode().splitlines():
            for name in NAMES:
                if line.startswith(f"persist_{name}_total"):
                    found[name] += int(float(line.rpartition(" ")[2]))
    return found


__all__ = ["bench_soak"]
