"""What the simulation is fed with: costs that are measured on this machine, by few writers on one server.

The CPU of an insert is told by the kernel for the server, the store and the client. Which part of the server's is
upkeep, and which the commit, is measured inside one process over stores in memory, where every piece can be timed. The
rest of the server's CPU is its edge: one half is counted before the commit, the other after it.
"""

from __future__ import annotations

import math
import os
import random
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg

from bench.bars import median
from bench.model.machines import Host, Interpreter, Neighbour, Simulation
from bench.model.real import TABLE, Measured, run, servers
from bench.model.service import Costs, Duty, Ran, Server, Stores, Writers
from bench.speed.flat_shards import NAME, Grown
from consensus import open_consensus
from consensus.postgres import channel_of
from persist.core import commands as c
from persist.core.batch import Run
from persist.core.errors import PersistError
from persist.core.ids import PartId, Token, mint
from persist.core.record import replace as fields
from persist.core.transitions.context import SOUND
from tests.services.postgres import Postgres

TRACED = 2_048  # inserts whose upkeep is taken down: some rollups, and merges of merges
FLUSHES = 300
HEARD, HEARD_WAIT_S = 2_000, 5.0
FLUSH_BYTES = 8_192  # a page of PostgreSQL's log
GROUP = 16
GROUPS = 40
CORES = os.cpu_count() or 1
SEED = 7
BLOBS_PER_S = 1e6  # of a directory: no limit of its own


@dataclass(frozen=True)
class Calibrated:
    """`costs` of an insert, and what hearing of the move of a shard costs that a server does not follow (`heard_s`).

    `log_bytes` and `blob_bytes` are written by insert.
    """

    costs: Costs
    heard_s: float
    log_bytes: float
    blob_bytes: float
    lone: Measured
    few: Measured


def calibrated(root: Path, postgres: Postgres, seconds: float, few: int) -> Calibrated:
    """Measure with one server, a lone writer and then a few."""
    inside, log_bytes, blob_bytes = _inside()
    with servers(root, postgres, 1) as running:
        lone = run(running, postgres, 1, seconds, "lone")
        loaded = run(running, postgres, few, seconds, "few")
    inserts = len(loaded.latencies)
    kernel_s = loaded.kernel_s[0] / inserts
    own_s = loaded.servers_s[0] / inserts - kernel_s
    edge_s = max(0.0, own_s - inside.commit_s - inside.command_s - inside.upkeep_s)
    costs = replace(
        inside,
        client_s=loaded.client_s / inserts,
        front_s=edge_s / 2,
        answer_s=edge_s / 2,
        store_s=loaded.store_s / inserts / inside.commits,
        flush_s=flush_s(root),
        kernel_s=kernel_s,
        blob_s=lone.put_s,
    )
    unhindered = predicted(costs, 1, 1, seconds, neighbours(lone))
    costs = replace(costs, handover_s=max(0.0, lone.p50_s - unhindered.p50_s))
    return Calibrated(costs, heard_s(postgres), log_bytes, blob_bytes, lone, loaded)


def heard_s(postgres: Postgres) -> float:
    """CPU of a process that is told of a commit on a channel to which it listens, of a key that it does not follow."""
    with closing(open_consensus(postgres.url())) as store, psycopg.connect(postgres.url(), autocommit=True) as other:
        store.check()
        heard = threading.Event()
        unsubscribe = store.subscribe(lambda _: heard.set(), lambda _: not heard.is_set())
        unfollow = store.follow(NAME)
        heard.wait(HEARD_WAIT_S)  # it listens, and wants to hear no more

        def told_s(channel: str) -> float:
            start = time.process_time()
            for _ in range(HEARD):
                other.execute("SELECT pg_notify(%s, %s)", (channel, NAME))
            return (time.process_time() - start) / HEARD

        found = max(0.0, told_s(channel_of(NAME)) - told_s("nobody_listens"))
        unfollow()
        if unsubscribe is not None:
            unsubscribe()
    return found


def neighbours(measured: Measured) -> float:
    """Cores that others on the machine kept busy during a run."""
    return measured.neighbours_s / measured.seconds


def flush_s(root: Path) -> float:
    """The median of one flush of a page, after the other."""
    path = root / "flushes"
    took = []
    with path.open("wb") as file:
        for _ in range(FLUSHES):
            file.write(b"x" * FLUSH_BYTES)
            file.flush()
            start = time.perf_counter()
            os.fdatasync(file.fileno())
            took.append(time.perf_counter() - start)
    path.unlink()
    return median(took)


def _duties(grown: Grown) -> list[Duty]:
    """Do the background work that waits, and take it down."""
    found = []
    while grown.background.works:
        work, puts, sets = grown.background.works.popleft(), grown.blobs.count, grown.logs.count
        start = time.thread_time()
        work()
        cpu_s = time.thread_time() - start
        found.append(Duty(cpu_s, grown.blobs.count - puts, grown.logs.count - sets))
    return found


def _inside() -> tuple[Costs, float, float]:
    """What a commit and its upkeep cost in one process, everything else being 0; bytes in the log and in blobs."""
    grown = Grown(collects=False)
    logs, blobs, trace, commits = grown.logs.bytes, grown.blobs.bytes, [], []
    for _ in range(TRACED):
        commits.append(grown.insert(TABLE))
        trace.append(_duties(grown))
    log_bytes, blob_bytes = (grown.logs.bytes - logs) / TRACED, (grown.blobs.bytes - blobs) / TRACED
    one_s, group_s = median(commits), median([_group_s(grown) for _ in range(GROUPS)])
    command_s = min(one_s, max(0.0, (group_s - one_s) / (GROUP - 1)))
    costs = Costs(0.0, 0.0, one_s - command_s, command_s, 0.0, tuple(trace), 0.0, 0.0, 0.0, 0.0, 0.0)
    return costs, log_bytes, blob_bytes


def _group_s(grown: Grown) -> float:
    """CPU of one commit of so many inserts."""
    grown.insert(TABLE)
    machine, like, ids = grown.location.machine(NAME), grown.transport.last, grown.location.ids
    assert isinstance(like, c.Insert)
    [part] = like.runs[0].parts
    leads: list[Callable[[], None]] = []
    answers: list[object] = []
    start = time.thread_time()
    for _ in range(GROUP):
        runs = (Run((fields(part, id=mint(PartId, ids)),)),)
        machine.submit(c.Insert(like.writer, mint(Token, ids), runs), leads.append, answers.append, SOUND)
    for lead in leads:
        lead()
    took_s = time.thread_time() - start
    refused = [answer for answer in answers if isinstance(answer, PersistError)]
    assert len(answers) == GROUP
    assert not refused, refused[0]
    grown.background.drain()
    return took_s


def predicted(costs: Costs, servers: int, writers: int, seconds: float, others: float) -> Ran:
    """The same run as `bench.model.real.run` makes, simulated: everything takes turns on the cores of one machine."""
    simulation, rng = Simulation(), random.Random(SEED)
    host = Host(simulation, CORES)
    for _ in range(math.ceil(others)):
        Neighbour(simulation, host, others / math.ceil(others))
    stores = Stores(simulation, costs, host, 0.0, costs.blob_s, BLOBS_PER_S)
    all_servers = [Server(simulation, costs, host, stores, rng) for _ in range(servers)]
    client, half_s = Interpreter(host), costs.handover_s / 2
    crowd = Writers(simulation, rng)

    def insert(writer: int, then: Callable[[], None]) -> None:
        def answered() -> None:
            simulation.after(half_s, lambda: client.work(costs.client_s, then))

        simulation.after(half_s, lambda: all_servers[writer % servers].insert(writer, answered))

    crowd.begin(writers, insert, 0.01)
    warm_s = 1.0
    simulation.run(warm_s)
    crowd.latencies.clear()
    busy_s = host.busy_s
    simulation.run(warm_s + seconds)
    used = {"cores": (host.busy_s - busy_s) / seconds / CORES}
    return Ran(seconds, len(crowd.latencies), crowd.latencies, stores.sets, stores.blobs.requests, used)
