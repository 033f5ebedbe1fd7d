"""One command with many receipted parts, as the driver of a Spark job commits it: seconds, and the memory it takes.

    python -m bench.parts [--few 5000] [--many 50000] [--rounds 3] [--only memory,sqlite,postgres,etcd,opening]

The parts are of one row each and their blobs are not written: with receipts, a commit of so many asks for none of them.
Every measurement is a process of its own. Its peak memory is all of the process, the command itself among it.

`opening`: a fresh process opens a shard of `--held` parts over SQLite and files, appends a row and plans a read of few
keys. All modules are imported before.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count as numbers
from pathlib import Path
from typing import Any

import pyarrow as pa

from bench.bars import bar, median, timed
from blob import open_blob
from blob.memory_blobs import MemoryBlob
from consensus import open_consensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.snapshot import ReadSettings, hold_time, part_reader
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.batch import Part, Run
from persist.core.blob_keys import part_key
from persist.core.ids import IdSource, PartId, ShardId, Token, WriterId, mint
from persist.core.record import replace
from persist.core.state import Policy
from persist.parts import KeyRange, ShardSchema, encode_key
from tests.services.etcd import start_etcd
from tests.services.postgres import start_postgres
from tests.support.location import InlineBackground

MIB_MAX = 300
STORES = ("memory", "sqlite", "postgres", "etcd")
OPENING = "opening"
PART_ROWS = 20_000
ROLLUP_EVERY = Policy().rollup_every
INSERTS = 40
FEW = 40  # so few that a State names them itself; of fewer a commit asks whether they are there
SCHEMA = pa.schema([("id", pa.int64())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", type=int, default=5_000)
    parser.add_argument("--many", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join((*STORES, OPENING)), help="with commas")
    parser.add_argument("--held", type=int, default=1_000_000)
    args = parser.parse_args()
    chosen = args.only.split(",")
    if OPENING in chosen:
        opening(args.held, args.many, args.rounds)
    for store in (name for name in chosen if name != OPENING):
        figures: dict[int, list[tuple[float, float]]] = {args.few: [], args.many: []}
        with fresh_urls(store) as url:
            for _ in range(args.rounds):
                for count, found in figures.items():
                    found.append(apart(url(), count))
        seconds = {count: median([s for s, _ in found]) for count, found in figures.items()}
        peak = max(mib for _, mib in figures[args.many])
        print(f"{store}: {args.few} parts {seconds[args.few]:.3f} s, {args.many} parts {seconds[args.many]:.3f} s")
        bar(f"parts-{args.many}-to-{args.few} ({store})", seconds[args.many] / seconds[args.few], "<= 10")
        bar(f"parts-{args.many} MiB ({store})", peak, f"<= {MIB_MAX}")


@contextmanager
def fresh_urls(store: str) -> Iterator[Callable[[], str]]:
    """What gives the URL of an empty consensus store at each call."""
    fresh = numbers()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # PostgreSQL runs as another user
        if store == "memory":
            yield lambda: "mem:"
        elif store == "sqlite":
            yield lambda: f"sqlite:///{folder}/{next(fresh)}.db"
        elif store == "postgres":
            server = start_postgres(Path(folder) / "postgres")
            try:
                yield lambda: server.create_database(f"bench{next(fresh)}")
            finally:
                server.stop()
        else:
            cluster = start_etcd(Path(folder) / "etcd", 1)
            try:
                yield lambda: cluster.url(f"bench{next(fresh)}")
            finally:
                cluster.stop()


def apart(url: str, count: int) -> tuple[float, float]:
    """Seconds of one commit and MiB of its process."""
    found: tuple[float, float] = in_process(measured, url, count)
    return found


def in_process(work: Callable[..., Any], *arguments: Any) -> Any:
    """What the work comes to in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


class Afterwards:
    """A background whose work waits until it is asked for: the seconds are those of the commit, the memory of both."""

    def __init__(self) -> None:
        self._waiting: list[Callable[[], None]] = []

    def submit(self, work: Callable[[], None]) -> bool:
        self._waiting.append(work)
        return True

    def run(self) -> None:
        while self._waiting:
            self._waiting.pop()()

    def close(self) -> None:
        return


def measured(url: str, count: int) -> tuple[float, float]:
    background = Afterwards()
    location = Location(MemoryBlob("mem:"), open_consensus(url), background=background)
    shard = Client(EmbeddedTransport(location)).create_shard("big", pa.schema([("id", pa.int64())]), ["id"])
    [run] = shard.open_writer().stage(pa.table({"id": range(20_000)}), None)
    machine, writer = location.machine("big"), mint(WriterId, location.ids)
    runs = many(run.parts[0], machine.state().shard_id, writer, location.ids, count)
    runs = location.versions.receipts.sign(machine.state().shard_id, runs)
    command = c.Insert(writer, mint(Token, location.ids), runs)
    seconds = timed(lambda: machine.apply(command))
    background.run()
    assert sum(batch.part_count for batch in machine.state().trace.batches) == count
    location.close()
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def opening(held: int, each: int, rounds: int) -> None:
    """Open a shard of so many parts, of which every commit brought `each`, and a small one."""
    with tempfile.TemporaryDirectory() as folder:
        for name, count in (("big", held), ("small", FEW)):
            in_process(grown, folder, name, count, each)
        turns = [[in_process(opened, folder, name) for name in ("big", "small")] for _ in range(rounds)]
    big, small = zip(*turns, strict=True)
    seconds, opens, peaks, inserts = (list(column) for column in zip(*big, strict=True))
    print(f"{held} parts: loaded, appended and planned in {median(seconds):.3f} s, loaded in {median(opens):.3f} s")
    label = "1m" if held == 1_000_000 else str(held)
    bar(f"open-{label}-parts-s", median(seconds), "<= 1")
    bar(f"open-{label}-parts-mib", max(peaks), f"<= {MIB_MAX}")
    bar(f"insert-at-{label}-parts-to-{FEW}", median(inserts) / median([found[3] for found in small]), "<= 1.2")


def at(folder: str) -> Location:
    blob, log = open_blob(f"file://{folder}/blob"), open_consensus(f"sqlite:///{folder}/consensus.db")
    return Location(blob, log, background=InlineBackground())


def grown(folder: str, name: str, count: int, each: int) -> None:
    """Make a shard of parts of 20,000 rows each, whose keys ascend. Nobody reads their blobs, so these are not made."""
    location = at(folder)
    shard = Client(EmbeddedTransport(location)).create_shard(name, SCHEMA, ["id"])
    [run] = shard.open_writer().stage(pa.table({"id": range(PART_ROWS)}), None)
    machine, schema = location.machine(name), ShardSchema(SCHEMA, ("id",))
    for first in range(0, count, each):
        writer = mint(WriterId, location.ids)
        runs = many(run.parts[0], machine.state().shard_id, writer, location.ids, min(each, count - first))
        runs = tuple(Run((_placed(run.parts[0], schema, first + n),)) for n, run in enumerate(runs))
        runs = location.versions.receipts.sign(machine.state().shard_id, runs)
        machine.apply(c.Insert(writer, mint(Token, location.ids), runs))
    for _ in range(ROLLUP_EVERY):  # so that a rollup holds it all, as it does sooner or later
        shard.insert([{"id": 0}])
    assert sum(batch.part_count for batch in machine.state().trace.batches) >= count
    location.close()


def _placed(part: Part, schema: ShardSchema, number: int) -> Part:
    first = number * PART_ROWS
    lower, upper = (encode_key(schema, (key,)) for key in (first, first + PART_ROWS - 1))
    return replace(part, key_lower=lower, key_upper=upper)


def opened(folder: str, name: str) -> tuple[float, float, float, float]:
    """Seconds of all of it, of loading the State alone, MiB of the process, and seconds of one more insert."""
    for module in ("blob.file", "consensus.sql"):  # else opening a store would import it
        importlib.import_module(module)
    begun = time.perf_counter()
    location = at(folder)
    client = Client(EmbeddedTransport(location))
    location.machine(name).refresh()
    loaded = time.perf_counter()
    shard = client.shard(name)
    shard.insert([{"id": 1}])
    with hold_time(client.transport, name, None, "bench", 10.0, ReadSettings()) as held:
        schema, reader = part_reader(client.transport, held.view, ReadSettings())
        narrow = KeyRange(encode_key(schema, (100_000,)), encode_key(schema, (200_000,)))
        runs = reader.expanded(held.runs, narrow)
        found = [part for run in runs for part in run.parts if narrow.overlaps(part.key_lower, part.key_upper)]
        held.lease.close()
    done = time.perf_counter()
    assert found
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    inserts = median([timed(lambda: shard.insert([{"id": 2}])) for _ in range(INSERTS)])
    location.close()
    return done - begun, loaded - begun, peak, inserts


def many(part: Part, shard: ShardId, writer: WriterId, ids: IdSource, count: int) -> tuple[Run, ...]:
    """As many parts like this one, each a run of its own, as tasks stage them."""
    fresh = [mint(PartId, ids) for _ in range(count)]
    return tuple(Run((replace(part, id=name, key=part_key(shard, writer, name), receipt=b""),)) for name in fresh)


if __name__ == "__main__":
    main()
