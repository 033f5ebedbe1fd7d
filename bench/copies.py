"""What it costs to know that a location is whole, to have a copy of it, and to get it back.

    python -m bench.copies [--shards 10] [--parts 1000] [--mib 512] [--rounds 5] [--only verify backup writers clones]

`verify`: shards x parts blobs in files and SQLite, beside listing and stat'ing the same blobs by hand, alternating.
`backup`, `restore`: --mib MiB in parts of 16 MiB, beside a plain copy of the same files by the same stores' clients,
with as many threads; each into a directory of its own, alternating. The instant that a backup waits for is left out by
`--consistent upper`. `incremental`: bytes sent by a second backup, as a part of those written since the first.
`writers`: the paired median of inserts of 100 rows while a backup of another process sends 20 MiB a second, and
without; and their requests. The first insert after the hold was taken, which meets its commit, is counted apart.
`clones`: a clone of a shard of --parts parts: its commits, bytes of parts that it reads or writes, and its time beside
that of a commit of one row, alternating. The shard is opened before, as that of the commits is.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.synchronize import Event

import numpy as np
import pyarrow as pa

from bench.bars import bar, interleaved, median, timed
from blob import open_blob
from blob.metrics import ForwardingBlob
from consensus import open_consensus
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.location import Location, LocationSettings, open_location
from persist.copies.backup_creation import UPPER, BackupRequest, back_up
from persist.copies.backup_restore import RestoreRequest, restore, select_backup
from persist.copies.backup_store import BackupStore
from persist.copies.verify import Depth, verify_shards
from persist.core.state import Policy

SCHEMA = pa.schema([("id", pa.int64())])
STAGED = LocationSettings(policy=Policy(inline_part_bytes_max=0))
METERED = LocationSettings(metered=True)
PART_ROWS = 2**20  # of random int64, twice: 16 MiB
AT_ONCE = 4
RATE = 20 * 2**20
PAIRS = 300
TURNS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shards", type=int, default=10)
    parser.add_argument("--parts", type=int, default=1_000)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=["verify", "backup", "writers", "clones"])
    args = parser.parse_args()
    for name in args.only:
        with tempfile.TemporaryDirectory() as directory:
            {"verify": verifying, "backup": copying, "writers": writing, "clones": cloning}[name](directory, args)


def verifying(directory: str, args: argparse.Namespace) -> None:
    location = open_location(f"persist://{directory}/data", settings=STAGED)
    client = Client(EmbeddedTransport(location))
    for number in range(args.shards):
        writer = client.create_shard(f"s{number:03}", SCHEMA, ["id"]).open_writer()
        staged = [writer.stage([{"id": row}], None) for row in range(args.parts)]
        writer.commit_insert(tuple(run for runs in staged for run in runs))

    assert len(list(location.blob.list(""))) >= args.shards * args.parts

    def verify() -> None:
        found = list(verify_shards(location, location.all_names("", with_dropped=False), Depth()))
        assert len(found) == args.shards
        assert all(shard.is_sound for shard in found)

    def by_hand() -> None:
        """Each blob is listed, and looked at."""
        assert None not in [location.blob.stat(stat.key) for stat in location.blob.list("")]

    ours, others = interleaved(args.rounds, verify, by_hand)
    print(f"verify {median(ours):.3f} s, by hand {median(others):.3f} s")
    ratio = median([other / own for own, other in zip(ours, others, strict=True)])
    bar(f"verify-{args.shards * args.parts}-blobs", ratio, ">= 0.8")
    location.close()


def copying(directory: str, args: argparse.Namespace) -> None:
    location = open_location(f"persist://{directory}/data", settings=STAGED)
    client = Client(EmbeddedTransport(location))
    schema = pa.schema([("id", pa.int64()), ("v", pa.int64())])
    shard = client.create_shard("large", schema, ["id"])
    random = np.random.default_rng(7)

    def insert() -> None:
        columns = [np.sort(random.integers(0, 2**62, PART_ROWS)), random.integers(0, 2**62, PART_ROWS)]
        shard.insert(pa.table(dict(zip(("id", "v"), columns, strict=True))))

    for _ in range(args.mib // 16):
        insert()
    places = map(str, itertools.count())
    kept = [f"file://{directory}/backups-{next(places)}" for _ in range(args.rounds)]
    fresh, targets = iter(kept), iter(kept)
    wanted = BackupRequest(consistent=UPPER, at_once=AT_ONCE)

    def backup() -> None:
        made = back_up(location, stored(location, next(fresh)), wanted)
        assert made.sent == made.size > args.mib * 0.8 * 2**20

    def back() -> None:
        target = open_location(f"persist://{directory}/back-{next(places)}", settings=STAGED)
        found = stored(location, next(targets))
        restore(found, select_backup(found, None, None), target, RestoreRequest(at_once=AT_ONCE))
        target.close()

    def plain() -> None:
        """The same blobs by the same clients: get, put."""
        target = open_blob(f"file://{directory}/plain-{next(places)}")
        keys = [stat.key for stat in location.blob.list("s")]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda key: target.put(key, location.blob.get(key)), keys))

    for name, work in (("backup", backup), ("restore", back)):
        ours, others = interleaved(args.rounds, work, plain)
        print(f"{name} {median(ours):.2f} s, plain copy {median(others):.2f} s, {args.mib} MiB")
        ratio = median([other / own for own, other in zip(ours, others, strict=True)])
        bar(f"{name}-beside-a-plain-copy", ratio, ">= 0.8")
    before = {stat.key for stat in location.blob.list("s")}
    insert()
    made = back_up(location, stored(location, kept[0]), wanted)
    written = sum(stat.size for stat in location.blob.list("s") if stat.key not in before)
    print(f"a second backup sent {made.sent} bytes; {written} were written since the first")
    bar("incremental-bytes-sent", made.sent / written, "<= 1")
    location.close()


def stored(location: Location, url: str) -> BackupStore:
    return BackupStore(open_blob(url), location.clock, location.ids)


def writing(directory: str, args: argparse.Namespace) -> None:
    """Blocks of inserts with a backup and without one, in turns; the shard that is large is backed up."""
    location = open_location(f"persist://{directory}/data", settings=STAGED)
    client = Client(EmbeddedTransport(location))
    large = client.create_shard("large", pa.schema([("id", pa.int64()), ("v", pa.int64())]), ["id"])
    values = np.arange(PART_ROWS)
    for number in range(args.mib // 16):
        large.insert(pa.table({"id": values + number * PART_ROWS, "v": values * 7_919 % 1_000_003}))
    writer_side = open_location(f"persist://{directory}/data", settings=METERED)
    small = Client(EmbeddedTransport(writer_side)).create_shard("small", SCHEMA, ["id"])
    block = args.rounds * PAIRS // TURNS
    quiet, busy, once, requests = [], [], [], [0, 0]
    blocks(writer_side, small, block)
    for turn in range(TURNS):
        samples, count = blocks(writer_side, small, block)
        quiet.append(median(samples))
        requests[0] += count
        with backing_up(directory, turn):
            once.append(blocks(writer_side, small, 1)[1])
            samples, count = blocks(writer_side, small, block)
        busy.append(median(samples))
        requests[1] += count
    print(f"p50 of an insert {median(quiet) * 1e3:.2f} ms, beside a backup {median(busy) * 1e3:.2f} ms")
    print(f"the first insert after a hold was taken: {median(once):.0f} requests")
    bar("writers-p50-beside-a-backup", median([b / q for q, b in zip(quiet, busy, strict=True)]), "<= 1.15")
    bar("writers-requests-beside-a-backup", requests[1] / requests[0], "<= 1")
    writer_side.close()
    location.close()


@contextmanager
def backing_up(directory: str, turn: int) -> Iterator[None]:
    """Another process makes a backup, which is sending blobs by now."""
    spawned = multiprocessing.get_context("spawn")
    sending = spawned.Event()
    process = spawned.Process(target=back_up_slowly, args=(directory, turn, sending))
    process.start()
    sending.wait()
    yield
    process.terminate()
    process.join()


def back_up_slowly(directory: str, turn: int, sending: Event) -> None:
    location = open_location(f"persist://{directory}/data")
    wanted = BackupRequest(consistent=UPPER, rate=RATE, at_once=1)
    back_up(location, stored(location, f"file://{directory}/backups-{turn}"), wanted, lambda progress: sending.set())


def blocks(location: Location, shard: Shard, count: int) -> tuple[list[float], int]:
    """Seconds of each insert of 100 rows, and the requests that all of them made of the stores."""
    rows = pa.table({"id": np.arange(100)})
    calls = calls_of(location)
    samples = [timed(lambda: shard.insert(rows)) for _ in range(count)]
    return samples, calls_of(location) - calls


def calls_of(location: Location) -> int:
    return sum(calls for calls, _, _ in location.store_calls.totals().values())


def cloning(directory: str, args: argparse.Namespace) -> None:
    for name in ("blob", "data"):
        os.mkdir(f"{directory}/{name}")
    blob = DataCounted(open_blob(f"file://{directory}/blob"))
    consensus = open_consensus(f"sqlite:///{directory}/log.db")
    # These parts are tiny; merges of such come later, by themselves.
    settings = LocationSettings(policy=STAGED.policy, small_merges=False, metered=True)
    location = Location(blob, consensus, settings=settings)
    client = Client(EmbeddedTransport(location))
    writer = client.create_shard("large", SCHEMA, ["id"], history="forever").open_writer()
    staged = [writer.stage([{"id": row}], None) for row in range(args.parts)]
    writer.commit_insert(tuple(run for runs in staged for run in runs))
    small = client.create_shard("small", SCHEMA, ["id"])
    rows = pa.table({"id": [1]})
    names = map("clone-{}".format, itertools.count())
    commits: list[int] = []
    data: list[int] = []

    def clone() -> None:
        before, blob.data = commits_of(location), 0
        client.clone("large", next(names))
        commits.append(commits_of(location) - before)
        data.append(blob.data)

    for work in (clone, lambda: small.insert(rows)):
        work()
    clones, plain = interleaved(10 * args.rounds, clone, lambda: small.insert(rows))
    print(f"commits of the clones: {sorted(commits)}")
    print(f"a clone of {args.parts} parts {median(clones) * 1e3:.2f} ms, a commit {median(plain) * 1e3:.2f} ms")
    bar(f"clone-{args.parts}-parts commits", max(commits), "<= 3")
    bar(f"clone-{args.parts}-parts data bytes", max(data), "<= 0")
    ratio = median([own / other for own, other in zip(clones, plain, strict=True)])
    bar(f"clone-{args.parts}-parts beside-a-commit", ratio, "<= 3")
    location.close()


class DataCounted(ForwardingBlob):
    """Counts the bytes of parts that are read or written."""

    data = 0

    def put(self, key: str, data: bytes | memoryview) -> None:
        super().put(key, data)
        self.data += len(data) if key.endswith(".parquet") else 0

    def get(self, key: str) -> bytes:
        found = super().get(key)
        self.data += len(found) if key.endswith(".parquet") else 0
        return found

    def get_range(self, key: str, start: int, length: int) -> bytes:
        found = super().get_range(key, start, length)
        self.data += len(found) if key.endswith(".parquet") else 0
        return found


def commits_of(location: Location) -> int:
    """Log entries that were written."""
    written = ("compare_and_set", "begin")
    totals = location.store_calls.totals()
    return sum(calls for (_, verb, outcome), (calls, _, _) in totals.items() if verb in written and outcome == "ok")


if __name__ == "__main__":
    main()
