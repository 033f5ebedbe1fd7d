"""What many clients, many shards and many writers cost: the second half of `bench.kernel`.

    python -m bench.kernel_load [--before CHECKOUT] [--rounds 3] [--shards 10000] [--writers 64] [--seconds 60]

Clients are 100 processes that read one shard by 100 readers each, while their clock passes a lease in a moment.
Requests are counted at stores in memory. Writers are rich clients of one server, whose blobs lie in files, and on S3
behind a proxy that takes 30 ms for a request. With `--before`, another checkout is measured in turns with this one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

import persist
from bench.bars import bar, median
from bench.service import KEY, run_writers
from bench.service_peers import table
from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.commit.location import Location
from persist.core.ids import SeqNo

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = pa.schema([("id", pa.int64())])
CLIENTS, READERS = 100, 100
QUARTERS = 4  # of a lease that pass
LEASE_MS = 900_000
TURNS = 2  # times that each shard is read
COMMITS_MAX, REQUESTS_MAX, INSERTS_MIN = 1, 1, 0.9


def commits_of_clients() -> float:
    """Commits that each client makes for its readers in a quarter of a lease."""
    from tests.support.clocks import World
    from tests.support.location import UntendedPool

    world = World()
    writer = world.machine()
    shard = writer.client.create_shard("orders", SCHEMA, ["id"])
    shard.insert([{"id": 0}])
    clients = []
    for _ in range(CLIENTS):
        client = world.machine().client
        transport: Any = client.transport
        transport.leases = UntendedPool(transport.location.clock)
        clients.append((client.shard("orders"), transport.leases))
    for quarter in range(QUARTERS):
        for mine, pool in clients:
            for snapshot in [mine.snapshot() for _ in range(READERS)]:
                snapshot.to_arrow()
            pool.tend()
        world.pass_ms(LEASE_MS // QUARTERS)
        shard.insert([{"id": quarter + 1}])
    versions = writer.location.versions
    changes = versions.diffs("orders", SeqNo(1), 10 * CLIENTS * QUARTERS)
    assert changes[0].seqno == 1, "the log was shortened"
    return sum(one.leased_readers is not None for one in changes) / (CLIENTS * QUARTERS)


def requests_of_shards(count: int) -> float:
    """Requests to both stores by a process that reads so many shards in turns, for one read."""
    blob, consensus = MemoryBlob("mem:"), MemoryConsensus()
    with Client(EmbeddedTransport(Location(blob, consensus))) as client:
        for number in range(count):
            client.create_shard(f"shard-{number}", SCHEMA, ["id"]).insert([{"id": number}])
    counts = [0]
    with Client(EmbeddedTransport(Location(_counting(blob, counts), _counting(consensus, counts)))) as client:
        for _ in range(TURNS):
            for number in range(count):
                assert client.shard(f"shard-{number}").snapshot().to_arrow().num_rows == 1
        return counts[0] / (TURNS * count)


def _counting(store: Any, counts: list[int]) -> Any:
    """The store, whose calls are counted."""

    class Counting(type(store)):  # type: ignore[misc]
        def __init__(self) -> None:
            self.__dict__ = store.__dict__

        def __getattribute__(self, name: str) -> Any:
            found = super().__getattribute__(name)
            if callable(found) and not name.startswith("_"):
                counts[0] += 1
            return found

    return Counting()


def inserts(store: str, writers: int, seconds: float) -> tuple[float, int]:
    """Inserts of 100 rows a second by so many processes through one server, and how many of their calls failed."""
    with tempfile.TemporaryDirectory() as folder, _server(store, Path(folder)) as url:
        with persist.connect(url) as client:
            client.create_shard("one", table().schema, KEY, history="none")
        began = time.monotonic()
        ran = run_writers(url, writers, seconds)
        rate = len(ran.latencies) / (time.monotonic() - began)
        with persist.connect(url) as client:
            rows = pa.compute.sum(client.shard("one").snapshot().to_arrow()["__diff"]).as_py()
        return rate, ran.errors + abs(rows - 100 * len(ran.latencies))


@contextmanager
def _server(store: str, folder: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "rpc.cli", "serve", "--port", "0"]
    if store == "files":
        with _serving([*command, "--dir", str(folder / "location")]) as url:
            yield url
        return
    from bench.speed.far_s3 import APPEND_RATE, BUCKET, REQUEST_S, served
    from tests.services.far_proxy import far

    folder.chmod(0o755)
    with (
        served(folder) as place,
        far(place.server.port, request_s=REQUEST_S, bytes_per_s=APPEND_RATE) as endpoint,
    ):
        where = ["--blob", f"s3://{BUCKET}/one?endpoint={endpoint}", "--consensus", f"sqlite:///{folder}/log.db"]
        with _serving([*command, *where]) as url:
            yield url


@contextmanager
def _serving(command: list[str]) -> Iterator[str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().decode().strip()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def once(options: argparse.Namespace) -> dict[str, float]:
    """The figures that are compared with another checkout."""
    found = {"requests of a read": requests_of_shards(options.shards)}
    for store in options.stores.split(","):
        found[f"inserts/s on {store}"], lost = inserts(store, options.writers, options.seconds)
        found[f"errors on {store}"] = lost
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, help="a checkout to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--writers", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--stores", default="files,s3")
    parser.add_argument("--once", action="store_true", help="print the figures of one round as JSON")
    options = parser.parse_args()
    if options.once:
        print(json.dumps(once(options)))
        return
    bar("commits of a client in a quarter of a lease", commits_of_clients(), f"<= {COMMITS_MAX}")
    from bench.bars import elsewhere  # another checkout, which runs the above alone, may not have it

    checkouts = [ROOT] + ([options.before.resolve()] if options.before else [])
    measured: list[list[dict[str, float]]] = [[] for _ in checkouts]
    for _ in range(options.rounds):
        for mine, checkout in zip(measured, checkouts, strict=True):
            mine.append(elsewhere(checkout, __file__, *sys.argv[1:]))
            print(checkout.name, mine[-1], flush=True)
    for name in measured[0][0]:
        now, *before = [median([one[name] for one in mine]) for mine in measured]
        if name.startswith("errors"):
            bar(name, max(one[name] for one in measured[0]), "<= 0")
        for one in before:
            if not name.startswith("errors"):
                want = f"<= {REQUESTS_MAX}" if name.startswith("requests") else f">= {INSERTS_MIN}"
                bar(f"{name}, to before", now / one, want)


if __name__ == "__main__":
    main()
