"""What nobody can measure on one machine: named, with its source. And what the model answers about such a world."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.cost import DAY_S, Prices
from bench.model.machines import Host, Limited, Simulation
from bench.model.measured import Calibrated
from bench.model.service import Costs, Ran, Server, Stores, Writers
from consensus.postgres import CHANNELS
from persist.core.state import Policy

SEED = 11
WARM_S, RUN_S = 0.6, 1.0
PACED = 0.6  # of the most that is possible, where writers pause between inserts
FASTER = 4  # times, where the model asks what would come next if servers were faster
GIB = 2**30
LIVE_ENTRIES = 2 * Policy().rollup_every  # of a log, at most, where collection keeps up


@dataclass(frozen=True)
class World:
    """`limit_per_s`: compare-and-sets that the store of logs takes in all; None: as many as its cores and disk do.

    `network_s` is a round trip to it, `flush_s` one flush of its disk, `blob_s` and `blobs_per_s` are S3's.
    `log_bytes_max` is how much it may hold; None: as its disk has room. `followed` shards are followed at each server:
    it hears of all that are told on their channels, of which there are `channels`.
    """

    name: str
    shards: int = 1_000_000
    writers: int = 10_000
    servers: int = 100
    server_cores: int = 2
    store_cores: int = 32
    network_s: float = 0.0005
    flush_s: float = 0.001
    limit_per_s: float | None = None
    blob_s: float = 0.03
    blobs_per_s: float = 3_500.0
    log_bytes_max: float | None = None
    followed: int = 10
    channels: int = CHANNELS

    @property
    def heard(self) -> float:
        """The part of all commits of which a server hears."""
        return 1 - (1 - 1 / self.channels) ** self.followed


POSTGRES = World("PostgreSQL and S3")
ETCD = World("etcd and S3", limit_per_s=30_000.0, log_bytes_max=8 * GIB, channels=1)
SOURCES = (
    ("followed", "10", "an assumption: shards that somebody waits for, at each server"),
    ("store_cores", "32", "an assumption: one large database server; its CPU by compare-and-set is measured"),
    ("network_s", "0.5 ms", "an assumption: a round trip between zones of one region"),
    ("flush_s", "1 ms", "an assumption: a cloud volume; etcd's page on performance: SSDs often lower than 1 ms"),
    (
        "blob_s",
        "30 ms",
        "an assumption, as in the project's bench of S3; AWS speaks of 100 to 200 ms for small objects",
    ),
    ("blobs_per_s", "3,500", "AWS, 'Optimizing Amazon S3 performance': PUTs by partitioned prefix; one is assumed"),
    ("limit_per_s", "30,000", "etcd.io, 'Performance': more than 30,000 requests a second under heavy load"),
    ("log_bytes_max", "8 GiB", "etcd.io, 'System limits': the suggested most for a database"),
)


@dataclass(frozen=True)
class Answer:
    """What a world does when its writers never pause (`most`), and at PACED of that (`paced`).

    `hearing` is the part of the servers' work that is hearing of what the others commit.
    """

    what: str
    hearing: float
    most: Ran
    paced: Ran

    @property
    def bottleneck(self) -> str:
        return max(self.most.used, key=self.most.used.__getitem__)


def answers(world: World, calibrated: Calibrated) -> list[Answer]:
    """As it is, and as it would be with each bottleneck gone that was found before."""
    costs, heard_s = calibrated.costs, calibrated.heard_s * world.heard
    found = [_answer("as it is", world, costs, heard_s)]
    found.append(_answer("if a server heard only of shards that somebody follows there", world, costs, 0.0))
    fast = _faster(costs, FASTER)
    found.append(_answer(f"and servers {FASTER} times as fast", world, fast, 0.0))
    many = replace(world, blobs_per_s=world.blobs_per_s * 16)
    found.append(_answer("and a bucket that S3 has split into 16 partitions", many, fast, 0.0))
    return found


def _faster(costs: Costs, times: int) -> Costs:
    names = ("front_s", "commit_s", "command_s", "answer_s", "kernel_s")
    duties = tuple(tuple(replace(one, cpu_s=one.cpu_s / times) for one in duties) for duties in costs.duties)
    return replace(costs, duties=duties, **{name: getattr(costs, name) / times for name in names})


def _answer(what: str, world: World, costs: Costs, heard_s: float) -> Answer:
    most = ran(world, costs, heard_s, 0.0)
    heard = _heard_s(world, costs, heard_s)
    return Answer(
        what, heard / (heard + costs.server_s), most, ran(world, costs, heard_s, world.writers / (PACED * most.per_s))
    )


def _heard_s(world: World, costs: Costs, heard_s: float) -> float:
    """By insert: while a server makes one, each of the others makes as many commits, of which it hears."""
    return heard_s * costs.commits * (world.servers - 1)


def ran(world: World, costs: Costs, heard_s: float, every_s: float) -> Ran:
    """Each writer inserts into shards at random, one after the other, or one `every_s` seconds on average."""
    simulation, rng = Simulation(), random.Random(SEED)
    costs = replace(costs, flush_s=world.flush_s, front_s=costs.front_s + _heard_s(world, costs, heard_s))
    store = Host(simulation, world.store_cores)
    stores = Stores(simulation, costs, store, world.network_s, world.blob_s, world.blobs_per_s)
    if world.limit_per_s is not None:
        stores.limit = Limited(simulation, world.flush_s, world.limit_per_s)
    hosts = [Host(simulation, world.server_cores) for _ in range(world.servers)]
    servers = [Server(simulation, costs, host, stores, rng) for host in hosts]
    crowd = Writers(simulation, rng, every_s)

    def insert(writer: int, then: Callable[[], None]) -> None:
        del writer  # any of them may write to any shard
        shard = rng.randrange(world.shards)
        simulation.after(world.network_s / 2, lambda: servers[shard % world.servers].insert(shard, then))

    crowd.begin(world.writers, insert, max(every_s, 0.1))
    warm_s = WARM_S + every_s

    def busy() -> tuple[float, ...]:
        interpreters = sum(server.interpreter.busy_s for server in servers) / world.servers
        cores = sum(host.busy_s for host in hosts) / world.servers / world.server_cores
        log_s = store.busy_s / world.store_cores if stores.limit is None else stores.limit.busy_s
        return interpreters, cores, log_s, stores.blobs.busy_s, stores.sets, stores.blobs.requests

    simulation.run(warm_s)
    before = busy()
    crowd.latencies.clear()
    simulation.run(warm_s + RUN_S)
    server, cores, log, blobs, sets, puts = (b - a for a, b in zip(before, busy(), strict=True))
    used = {"servers": server, "cores of servers": cores, "log store": log, "PUTs to S3": blobs}
    used = {name: seconds / RUN_S for name, seconds in used.items()}
    return Ran(RUN_S, len(crowd.latencies), crowd.latencies, round(sets), round(puts), used)


@dataclass(frozen=True)
class Bill:
    """US dollars of a day: PUTs, and a month's storage of what the day has written."""

    puts: float
    kept: float

    @property
    def total(self) -> float:
        return self.puts + self.kept


def bill(found: Ran, calibrated: Calibrated, prices: Prices) -> Bill:
    """Of a day at this rate. All that was put is kept, also what a merge has replaced: it is the most."""
    days = DAY_S / found.seconds
    size = int(found.inserts * days * calibrated.blob_bytes)
    return Bill(prices.requests("put", round(found.puts * days)), prices.month(size))


def log_bytes(world: World, calibrated: Calibrated) -> float:
    """That the logs of all shards take at most."""
    return world.shards * LIVE_ENTRIES * calibrated.log_bytes
