"""Attributes: the paper's two tables on the same work, ten million on one shard, and pipelined writers.

python -m bench.attributes                         everything (the tables at full size take most of the time)
python -m bench.attributes tables --batches 1000   one row of each table
python -m bench.attributes tables --attributes 100000
python -m bench.attributes tables --keys random    keys as UUIDs are, values up to a million
python -m bench.attributes many --attributes 1000000
python -m bench.attributes pipelined
"""

from __future__ import annotations

import argparse
import random
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from bench.bars import bar, interleaved, median
from blob.memory_blobs import MemoryBlob
from persist.attributes.attribute_index import AttributeIndex
from persist.attributes.btree import TreeFlush
from persist.attributes.node_codec import DEFAULT_SHAPE, Node, Update
from persist.attributes.node_store import NodeCache
from persist.client.client import Client, connect
from persist.commit.clocks_and_ids import SystemIds
from persist.core.attribute import KEY_BYTES, NO_INDEX, AttributeKey, AttributeUpdate, attribute_key
from persist.core.batch import EMPTY_TRACE
from persist.core.frontier import MINIMUM
from persist.core.ids import SeqNo, shard_id_of
from persist.core.record import replace
from persist.core.state import Policy, SchemaRecord, State
from persist.core.transitions import Context, step

PAPER = {  # MB: (sorted insert none, progressive, random update none, progressive)
    10: (3991, 115, 32990, 72),
    100: (416, 97, 29402, 103),
    1000: (60, 54, 17083, 91),
}
LOAD_BATCH = 1_000
VALUES_TO = 1_000_000  # of random ones: three bytes
MB = 1_000_000
OF_PAPER = 0.6  # what the index may take of the paper's size
KINDS_OF_KEYS = ("counted", "random")
SCHEMA = pa.schema([("writer", pa.string()), ("number", pa.int64())])


# --- the tables


def keys_of(count: int) -> list[bytes]:
    return [(number << 32).to_bytes(KEY_BYTES, "big") for number in range(count)]


def random_keys_of(count: int) -> list[bytes]:
    """As UUIDs are: no two of them have anything in common but what so many of them in order must have."""
    generator = random.Random(0)
    return sorted({generator.randbytes(KEY_BYTES) for _ in range(count)})


def batches(keys: Sequence[bytes], size: int, value: Callable[[], int]) -> Iterator[list[Update]]:
    for first in range(0, len(keys), size):
        yield [(key, value()) for key in sorted(keys[first : first + size])]


class Stored:
    """The index in a store, as a shard has it: chunks that the State does not name any more are deleted."""

    def __init__(self) -> None:
        self.blob = MemoryBlob()
        self.index = AttributeIndex(self.blob, SystemIds(), NodeCache(1 << 30))
        name = "bench"
        schemas = {1: SchemaRecord(b"", ("k",))}
        self.state = State(name, shard_id_of(name), SeqNo(1), 0, MINIMUM, EMPTY_TRACE, schemas)

    def flush(self, updates: list[Update]) -> None:
        before = self.state.attribute_chunks
        command = self.index.flushed(self.state, updates)
        self.state, _ = step(self.state, command, Context(0, Policy()))
        after = self.state.attribute_chunks
        self.blob.delete([chunk.key for first, chunk in before.items() if first not in after])

    @property
    def size(self) -> int:
        """Bytes that the store holds."""
        return sum(chunk.length for chunk in self.state.attribute_chunks.values())


class Measured:
    """The index without progressive compaction: tens of gigabytes, so only what lives is kept, and bytes are counted.

    As in the paper, its size is all that was ever written.
    """

    def __init__(self) -> None:
        self.root = NO_INDEX
        self.end = 0
        self._nodes: dict[int, Node] = {}

    def flush(self, updates: list[Update]) -> None:
        root = TreeFlush(self.root, self, self, DEFAULT_SHAPE, compact=False).run(updates)
        self.root = replace(root, end=self.end)

    @property
    def size(self) -> int:
        return self.end

    def read(self, offset: int, length: int) -> Node:
        return self._nodes[offset]

    def forget(self, offset: int) -> None:
        del self._nodes[offset]

    def write(self, node: Node) -> tuple[int, int]:
        offset, length = self.end, len(node.encode(self.end))
        self._nodes[offset] = node
        self.end += length
        return offset, length


def measure(index: Stored | Measured, count: int, batch: int, at_random: bool, keys: str) -> tuple[float, float]:
    """Size in MB after the work, and the largest on the way."""
    generator = random.Random(3)
    order = keys_of(count) if keys == "counted" else random_keys_of(count)
    value = (lambda: 2) if keys == "counted" else (lambda: generator.randrange(VALUES_TO))
    if at_random:
        for updates in batches(order, LOAD_BATCH, value):
            index.flush(updates)
        random.Random(1).shuffle(order)
    largest = 0
    for updates in batches(order, batch, value):
        index.flush(updates)
        largest = max(largest, index.size)
    return index.size / MB, largest / MB


def tables(count: int, sizes: Sequence[int], kinds: Sequence[str], keys: str, with_none: bool) -> None:
    full = count == 1_000_000
    for at_random in [kind == "random" for kind in kinds]:
        work = "random update" if at_random else "sorted insert"
        print(f"\n{work} of {count:,} attributes, {keys} keys: index size in MB (the paper's)", flush=True)
        for batch in sizes:
            theirs = PAPER[batch][2:] if at_random else PAPER[batch][:2]
            began = time.perf_counter()
            ours, largest = measure(Stored(), count, batch, at_random, keys)
            print(
                f"batch {batch:5}: progressive {ours:9,.1f} ({theirs[1]:,}), at most {largest:.1f} on the way",
                flush=True,
            )
            if full:
                bar(f"{work.replace(' ', '_')}_{batch}_{keys}_mb", ours, f"<= {OF_PAPER * theirs[1]:.1f}")
            if with_none:
                grown, _ = measure(Measured(), count, batch, at_random, keys)
                print(f"batch {batch:5}: none        {grown:9,.0f} ({theirs[0]:,})", flush=True)
            print(f"             in {time.perf_counter() - began:.0f} s", flush=True)


# --- ten million


def fill(client: Client, name: str, count: int) -> None:
    """Give the shard `count` attributes, all in its index."""
    location = client.transport.location  # type: ignore[attr-defined]
    machine = location.machine(name)
    index = AttributeIndex(location.blob, location.ids, location.nodes)
    for updates in batches(keys_of(count), 100_000, lambda: 1):
        machine.apply(replace(index.flushed(machine.refresh(), updates), flushed={}))


def many(count: int, rounds: int) -> None:
    print(f"\n{count:,} attributes on one shard", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        url = f"persist://{directory}/location"
        with connect(url) as client:
            for name in ("without", "with"):
                client.create_shard(name, SCHEMA, ["writer"], history="none")
            began = time.perf_counter()
            fill(client, "with", count)
            root = client.transport.location.machine("with").state().attribute_root  # type: ignore[attr-defined]
            stored = sum(file.stat().st_size for file in Path(directory).rglob("*.nodes"))
            print(f"filled in {time.perf_counter() - began:.0f} s: {root.count:,} attributes, height {root.height}, "
                  f"{stored / MB:.0f} MB")  # fmt: skip

        def opened(name: str) -> Callable[[], None]:
            def work() -> None:
                with connect(url) as fresh:
                    fresh.shard(name)

            return work

        without, with_them = interleaved(rounds, opened("without"), opened("with"))
        bar("open_ratio", median(with_them) / median(without), "<= 1.3")
        with connect(url) as client:
            appends(client, count, rounds * 10)
            reads(client, count)


def appends(client: Client, count: int, rounds: int) -> None:
    plain, shard = client.shard("without").open_writer(), client.shard("with").open_writer()
    rows = pa.Table.from_pylist([{"writer": "w", "number": 1}] * 100, schema=SCHEMA)
    generator = random.Random(2)

    def conditional() -> None:
        key = (generator.randrange(count) << 32).to_bytes(KEY_BYTES, "big")
        shard.insert(rows, attributes=AttributeUpdate.accumulate(key, 1))

    # Both shards get as many appends, so that they stay alike in all but their attributes.
    works = (lambda: plain.insert(rows), lambda: shard.insert(rows), lambda: plain.insert(rows), conditional)
    samples = [[second * 1e3 for second in taken] for taken in interleaved(rounds, *works)]
    without, with_them, changing = median(samples[0] + samples[2]), median(samples[1]), median(samples[3])
    print(f"append of 100 rows, p50 ms: {without:.2f} without attributes, {with_them:.2f} with, "
          f"{changing:.2f} when it changes one of them at random")  # fmt: skip
    bar("append_p50_ratio", with_them / without, "<= 1.3")
    bar("append_changing_an_attribute_p50_ratio", changing / without, "<= 1.3")


def reads(client: Client, count: int) -> None:
    location = client.transport.location  # type: ignore[attr-defined]
    state = location.machine("with").state()
    generator = random.Random(3)

    def key() -> AttributeKey:
        return attribute_key((generator.randrange(count) << 32).to_bytes(KEY_BYTES, "big"))

    cold = NodeCache()
    AttributeIndex(location.blob, location.ids, cold).lookup(state, [key()])
    bar("cold_lookup_blob_reads", cold.reads, "<= 3")
    cache = NodeCache()
    index = AttributeIndex(location.blob, location.ids, cache)
    for _ in range(500):
        index.lookup(state, [key()])
    most = 0
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(5_000):
        before = cache.reads
        index.lookup(state, [key()])
        most = max(most, cache.reads - before)
    grown_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) / 1000
    bar("warm_lookup_blob_reads_max", most, "<= 1")
    print(f"cache {cache.bytes_held / MB:.0f} MB of {cache.bytes_max / MB:.0f}; the process grew by {grown_mb:.0f} MB")
    bar("cache_mb", cache.bytes_held / MB, f"<= {cache.bytes_max / MB:.1f}")


# --- pipelined writers


def pipelined(writers: int, appends_each: int) -> None:
    print(f"\n{writers} writers of one-row appends on one shard, embedded", flush=True)
    rates = []
    for waiting in (True, False):
        with tempfile.TemporaryDirectory() as directory, connect(f"persist://{directory}/location") as client:
            shard = client.create_shard("events", SCHEMA, ["writer"], history="none")
            each = max(1, appends_each // 10) if waiting else appends_each

            def write(number: int) -> None:
                with shard.pipelined_writer(f"w{number}") as writer:  # noqa: B023 joined below
                    for append in range(each):  # noqa: B023
                        writer.append([{"writer": f"w{number}", "number": append + 1}])
                        if waiting:  # noqa: B023
                            writer.flush()

            threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
            began = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rates.append(writers * each / (time.perf_counter() - began))
            landed = shard.attributes.get("00000000000000000000000000000001")
            if landed != writers * each:
                raise AssertionError(f"{landed} events landed, not {writers * each}")
    print(f"appends a second: {rates[0]:,.0f} waiting for each answer, {rates[1]:,.0f} pipelined")
    bar("pipelined_over_waiting", rates[1] / rates[0], ">= 5")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("all", "tables", "many", "pipelined"), default="all")
    parser.add_argument("--attributes", type=int, help="instead of 1,000,000 in the tables and 10,000,000 on a shard")
    parser.add_argument("--batches", type=int, nargs="+", choices=sorted(PAPER), default=sorted(PAPER))
    parser.add_argument("--kinds", nargs="+", choices=("sorted", "random"), default=("sorted", "random"))
    parser.add_argument("--keys", nargs="+", choices=KINDS_OF_KEYS, default=KINDS_OF_KEYS, help="of the tables")
    parser.add_argument("--none", action="store_true", help="the tables without progressive compaction too: for hours")
    parser.add_argument("--rounds", type=int, default=30, help="of opening; ten times as many appends")
    parser.add_argument("--writers", type=int, default=16)
    parser.add_argument("--appends", type=int, default=1_000, help="of each pipelined writer")
    args = parser.parse_args()
    if args.part in ("all", "tables"):
        for keys in args.keys:
            tables(args.attributes or 1_000_000, args.batches, args.kinds, keys, args.none)
    if args.part in ("all", "many"):
        many(args.attributes or 10_000_000, args.rounds)
    if args.part in ("all", "pipelined"):
        pipelined(args.writers, args.appends)


if __name__ == "__main__":
    main()
