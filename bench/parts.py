"""One command with many receipted parts, as the driver of a Spark job commits it: seconds, and the memory it takes.

    python -m bench.parts [--few 5000] [--many 50000] [--rounds 3] [--only memory,sqlite,postgres,etcd]

The parts are of one row each and their blobs are not written: with receipts, a commit of so many asks for none of them.
Every measurement is a process of its own. Its peak memory is all of the process, the command itself among it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count as numbers
from pathlib import Path

import pyarrow as pa

from bench.bars import bar, median, timed
from blob.memory import MemoryBlob
from consensus import open_consensus
from persist.client.connect import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.batch import Part, Run
from persist.core.ids import IdSource, PartId, ShardId, Token, WriterId, mint
from persist.core.keys import part_key
from persist.core.record import replace
from tests.services.etcd import start_etcd
from tests.services.postgres import start_postgres
from tests.support.location import InlineBackground

MIB_MAX = 300
STORES = ("memory", "sqlite", "postgres", "etcd")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--few", type=int, default=5_000)
    parser.add_argument("--many", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(STORES), help="with commas, of " + ", ".join(STORES))
    args = parser.parse_args()
    for store in args.only.split(","):
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
    """Seconds of one commit and MiB of its process, in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, (url, count))


def measured(url: str, count: int) -> tuple[float, float]:
    location = Location(MemoryBlob("mem:"), open_consensus(url), background=InlineBackground())
    shard = Client(EmbeddedTransport(location)).create_shard("big", pa.schema([("id", pa.int64())]), ["id"])
    [run] = shard.open_writer().stage(pa.table({"id": range(20_000)}), None)
    machine, writer = location.machine("big"), mint(WriterId, location.ids)
    runs = many(run.parts[0], machine.state().shard_id, writer, location.ids, count)
    runs = location.versions.receipts.given(machine.state().shard_id, runs)
    machine.apply(c.RegisterWriter(writer, 60_000))
    command = c.Insert(writer, mint(Token, location.ids), runs)
    seconds = timed(lambda: machine.apply(command))
    assert sum(batch.part_count for batch in machine.state().trace.batches) == count
    location.close()
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def many(part: Part, shard: ShardId, writer: WriterId, ids: IdSource, count: int) -> tuple[Run, ...]:
    """As many parts like this one, each a run of its own, as tasks stage them."""
    fresh = [mint(PartId, ids) for _ in range(count)]
    return tuple(Run((replace(part, id=name, key=part_key(shard, writer, name), receipt=b""),)) for name in fresh)


if __name__ == "__main__":
    main()
