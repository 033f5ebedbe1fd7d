"""How far behind home a region is, and what it costs to have one.

    python -m bench.regions [--seconds 300] [--rows 4000000] [--shards 10000] [--moved 1000]
                            [--only lag publishing reads idle moves]

`lag`: 10 commits a second at home, which publishes every 5 s; `persist region replicate`'s code copies its directory,
each round --delay seconds late; a region looks once a second. From the acknowledgement at home to the time being
readable in the region, 95 of 100 commits.
`publishing`: appends of a program that publishes, beside one that does not, in turns: requests, and CPU of the process.
`reads`: a snapshot of --rows rows in the region, beside the same at home, in turns; both embedded, from files.
`idle`: a region over --shards shards at rest: seconds until names are told and a shard is read, and its requests.
`moves`: a copy of --moved shards becomes home: after a disaster, and as planned, without writes in between.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from bench.bars import bar, interleaved, median, percentile
from blob import open_blob
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.commit.clocks_and_ids import SystemClock
from persist.commit.location import Location, LocationSettings, open_location, open_stores
from persist.copies.recovery import RecoveryRequest
from persist.core.state import Policy
from persist.maintenance.journal_keeper import Published
from persist.maintenance.journal_writer import Publisher, PublishSettings
from persist.regions.failover import OldHome, promote
from persist.regions.replica import ReplicaLocation, open_replica
from persist.regions.replication import ReplicateSettings, Replicator
from persist.regions.switchover import Switch

SCHEMA = pa.schema([("id", pa.int64()), ("v", pa.string())])
PUBLISH = PublishSettings()
EVERY_S = 0.1  # between commits
PAIRS = 20  # of blocks of appends
BLOCK = 100
IDLE_ROUNDS = 30  # seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--delay", type=float, default=1.0)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--moved", type=int, default=1_000)
    parser.add_argument("--only", nargs="*", default=["lag", "publishing", "reads", "idle", "moves"])
    args = parser.parse_args()
    works: dict[str, Callable[[Path, argparse.Namespace], None]] = {
        "lag": lagging, "publishing": publishing, "reads": reading, "idle": idling,
        "moves": moving,
    }  # fmt: skip
    for name in args.only:
        with tempfile.TemporaryDirectory() as directory:
            works[name](Path(directory), args)


def home_at(root: Path, *, publishes: bool = True, policy: Policy | None = None) -> tuple[Location, Client]:
    settings = LocationSettings(publish=PUBLISH if publishes else None, metered=True, policy=policy or Policy())
    location = open_location(f"persist://{root}/home", settings=settings)
    return location, Client(EmbeddedTransport(location))


def replicator_of(root: Path) -> Replicator:
    home, copy = open_blob(f"file://{root}/home/blob"), open_blob(f"file://{root}/copy")
    return Replicator(home, copy, SystemClock(), ReplicateSettings(whole_s=3600.0))


def region_at(root: Path, settings: LocationSettings | None = None) -> tuple[ReplicaLocation, Client]:
    replica = open_replica(f"file://{root}/copy", settings=settings)
    return replica, Client(EmbeddedTransport(replica))


def lagging(root: Path, args: argparse.Namespace) -> None:
    location, client = home_at(root)
    shard = client.create_shard("orders", SCHEMA, ["id"])
    shard.insert([{"id": 0, "v": "first"}])
    maintain(location)
    replicator = replicator_of(root)
    replicator.round(whole=True)
    replica, region = region_at(root)
    replica.watch()
    there = region.shard("orders")
    ends = threading.Event()

    def replicate() -> None:
        while not ends.is_set():
            time.sleep(args.delay)
            replicator.round()

    copying = threading.Thread(target=replicate)
    copying.start()
    acknowledged: list[float] = []
    visible: list[float] = []

    def watch() -> None:
        while len(visible) < len(acknowledged) or not ends.is_set():
            upper = (there.upper().element or 0) - 1  # the first time is not counted
            now_s = time.perf_counter()
            visible.extend([now_s] * (upper - len(visible)))
            time.sleep(0.02)

    watching = threading.Thread(target=watch)
    watching.start()
    begun_s = time.perf_counter()
    while (now_s := time.perf_counter()) - begun_s < args.seconds:
        shard.insert([{"id": len(acknowledged), "v": "x"}])
        acknowledged.append(time.perf_counter())
        time.sleep(max(0.0, EVERY_S - (time.perf_counter() - now_s)))
    deadline_s = time.perf_counter() + 60
    while len(visible) < len(acknowledged) and time.perf_counter() < deadline_s:
        time.sleep(0.1)
    ends.set()
    watching.join()
    copying.join()
    lags = [seen - told for told, seen in zip(acknowledged, visible, strict=True)]
    print(f"{len(lags)} commits, visible after {median(lags):.2f} s, 95% within {percentile(lags, 0.95):.2f} s")
    bound = 1.2 * (PUBLISH.every_s + args.delay) + 0.5
    bar("regions-lag-p95-seconds", percentile(lags, 0.95), f"<= {bound:.2f}")
    replica.close()
    location.close()


def publishing(root: Path, args: argparse.Namespace) -> None:
    shards: list[tuple[Location, Shard]] = []
    for publishes in (True, False):
        location, client = home_at(root / str(publishes), publishes=publishes)
        shards.append((location, client.create_shard("orders", SCHEMA, ["id"])))
    rows = pa.table({"id": range(100), "v": [f"row {number}" for number in range(100)]})

    def append(shard: Shard) -> float:
        begun_s = time.process_time()
        for _ in range(BLOCK):
            shard.insert(rows)
        return time.process_time() - begun_s

    ratios = []
    for _ in range(PAIRS):
        with_it, without = (append(shard) for _, shard in shards)
        ratios.append(with_it / without)
    calls = [requests_of(location) for location, _ in shards]
    print(f"requests of {PAIRS * BLOCK} appends: {calls[0]} with publications, {calls[1]} without")
    bar("regions-publishing-requests-an-append", (calls[0] - calls[1]) / (PAIRS * BLOCK), "<= 0.01")
    bar("regions-publishing-cpu", median(ratios), "<= 1.05")
    for location, _ in shards:
        location.close()


def reading(root: Path, args: argparse.Namespace) -> None:
    location, client = home_at(root)
    shard = client.create_shard("orders", SCHEMA, ["id"])
    for number in range(4):
        ids = range(number * args.rows // 4, (number + 1) * args.rows // 4)
        shard.insert(pa.table({"id": ids, "v": [f"{one * 7919 % 100_003}" for one in ids]}))
    maintain(location)
    replicator_of(root).round(whole=True)
    replica, region = region_at(root)
    there = region.shard("orders")
    assert there.snapshot().to_arrow().num_rows == shard.snapshot().to_arrow().num_rows == args.rows
    ours, homes = interleaved(args.rounds, lambda: there.snapshot().to_arrow(), lambda: shard.snapshot().to_arrow())
    print(f"a snapshot of {args.rows} rows: {median(ours):.3f} s in the region, {median(homes):.3f} s at home")
    bar("regions-snapshot-beside-home", median([h / o for o, h in zip(ours, homes, strict=True)]), ">= 0.95")
    replica.close()
    location.close()


def idling(root: Path, args: argparse.Namespace) -> None:
    small_shards(root, args.shards)

    begun_s = time.perf_counter()
    replica, region = region_at(root, LocationSettings(metered=True))
    names = region.shards()
    rows = region.shard(names[-1]).snapshot().to_arrow().num_rows
    started_s = time.perf_counter() - begun_s
    assert (len(names), rows) == (args.shards, 1)
    replica.watch()
    before = requests_of(replica)
    time.sleep(IDLE_ROUNDS)
    asked = requests_of(replica) - before
    print(f"{args.shards} shards: names and a first read after {started_s:.2f} s, then {asked} requests in 30 s")
    bar(f"regions-start-{args.shards}-shards-seconds", started_s, "<= 5")
    bar(f"regions-idle-{args.shards}-shards-requests-a-second", asked / IDLE_ROUNDS, "<= 1")
    replica.close()


def moving(root: Path, args: argparse.Namespace) -> None:
    for name in ("lost", "moved"):
        small_shards(root / name, args.moved)
    copy = open_stores(f"file://{root}/lost/copy", f"sqlite:///{root}/lost.db")
    begun_s = time.perf_counter()
    promote(copy, "us", "eu", OldHome(is_lost=True), RecoveryRequest())
    promoted_s = time.perf_counter() - begun_s
    copy.close()

    steps: list[float] = []
    home = open_location(f"persist://{root}/moved/home")
    copy = open_stores(f"file://{root}/moved/copy", f"sqlite:///{root}/moved.db")
    switch = Switch(home, copy, "us", "eu", replicator_of(root / "moved"))
    switch.run(lambda step: steps.append(time.perf_counter()))
    paused_s = time.perf_counter() - steps[1]  # from when home ends
    home.close()
    copy.close()
    print(f"{args.moved} shards: home after {promoted_s:.2f} s; as planned without writes for {paused_s:.2f} s")
    bar(f"regions-promote-{args.moved}-shards-seconds", promoted_s, "<= 60")
    bar(f"regions-switch-{args.moved}-shards-pause-seconds", paused_s, "<= 10")


def small_shards(root: Path, shards: int) -> None:
    """A home with so many shards of one row each, and a whole copy of it."""
    root.mkdir(exist_ok=True)
    location, client = home_at(root)
    for number in range(shards):
        client.create_shard(f"s{number:05}", SCHEMA, ["id"]).insert([{"id": number, "v": "x"}])
    location.publisher.publish(now=True) if isinstance(location.publisher, Publisher) else None
    maintain(location)
    replicator_of(root).round(whole=True)
    location.close()


def maintain(location: Location) -> None:
    """Publish all, and the names, as maintenance does."""
    published = Published(location, PUBLISH, at_once=True)
    names = list(location.all_names(with_dropped=True))
    for name in names:
        published.visit(name, location.machine(name).refresh())
    published.flush(now=True)
    published.round(dict.fromkeys(names, False))


def requests_of(location: Location) -> int:
    """Calls to the blob store and to the consensus store so far."""
    return int(sum(calls for calls, _, _ in location.store_calls.totals().values()))


if __name__ == "__main__":
    main()
