"""A truncation by a drop, beside a plain commit of one row, in a shard of 1,000 parts. `bench/history.py` runs it.

The two take turns, each drop with a later cut. What they read and write in the blob store is counted.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from bench.bars import bar, interleaved, median
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.location import Location, LocationSettings, open_location

NAME = "dropped"
SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
PARTS = 1_000
TURNS = 30  # at most as many drops as a shard keeps apart


def make(shard: Shard) -> None:
    """Parts that are blobs of their own, in a batch each."""
    for number in range(PARTS):
        writer = shard.open_writer()
        runs = writer.stage([{"k": f"k{number:05}", "v": number}], number)
        writer.commit_compare_and_append(runs, number, number + 1)
        writer.close()


def blob_reads(location: Location) -> int:
    totals = location.store_calls.totals().items()
    return sum(calls for (store, verb, _), (calls, _, _) in totals if store == "blob" and verb.startswith("get"))


def bench_drop(directory: Path) -> None:
    """The bars, of a shard that is made in `directory`."""
    settings = LocationSettings(small_merges=False, metered=True)
    location = open_location(f"persist://{directory}", settings=settings)
    with Client(EmbeddedTransport(location)) as client:
        shard = client.create_shard(NAME, SCHEMA, ["k"])
        make(shard)
        assert len(list(location.machine(NAME).refresh().trace.parts())) == PARTS
        cut, reads = 0, 0

        def insert() -> None:
            shard.insert([{"k": "new", "v": 1}])

        def drop() -> None:
            nonlocal cut, reads
            cut, before = cut + PARTS // TURNS, blob_reads(location)
            assert shard.truncate(cut, mode="drop").changed
            reads += blob_reads(location) - before

        plain, dropped = interleaved(TURNS, insert, drop)
        print(f"a commit of one row {median(plain) * 1e3:.2f} ms, a drop {median(dropped) * 1e3:.2f} ms")
        bar("drop-1000-parts", median(dropped) / median(plain), "<= 3")
        bar("drop-1000-parts, blob reads", reads, "<= 0")
