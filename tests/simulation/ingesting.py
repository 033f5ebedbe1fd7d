"""Ingesters in the simulation: a source that is bound and ingested beside erasures and inserts in the same shard.

These runs have seeds of their own. The oracle does not follow their shards. What is checked is the end: each record of
the source is in the shard once, but for those that were erased, whoever took times of it and whoever was killed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pyarrow as pa

from compactor.tasks import Eraser
from compactor.worker import Worker
from persist.bindings import Bindings, Ingester, Minter
from persist.client.client import Client
from persist.client.shard import Shard
from persist.client.write import WriteHandle
from persist.core.errors import Expired, NotReadable, UpperMismatch
from persist.core.ids import Token, mint
from persist.core.transitions import writers
from persist.sources.feed_position import FeedPosition
from tests.simulation.breaking import Broken
from tests.simulation.host import HANDLES, Host, Run, weathered
from tests.simulation.maintenance import WORKER, SmallCollector
from tests.simulation.oracle import expect
from tests.support.location import client_of

INGESTED = range(30_000, 40_000)  # the seeds of these runs, so that all others mean what they meant
FED, TIMES = "fed", "times"
COLUMNS = pa.schema([("position", pa.int64())])
SHARES = (("minter", "ingester", "taker"), ("minter", "ingester", "tender"), ("ingester", "taker"))
LEFT_OUT = ("flip", "truncate", "hibernate", "wild_clock", "held_up")  # what these runs do without
MEANWHILE = (UpperMismatch, NotReadable, Expired)  # others wrote, or erased, or a lease has lapsed


class Records:
    """The source: the record of each position is its number."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def watermarks(self) -> Mapping[str, int]:
        return {"": self._run.last_record} if self._run.last_record >= 0 else {}

    def read(self, partition: str, after: int, upto: int) -> Iterator[pa.Table]:
        yield pa.table({"position": pa.array(range(after + 1, upto + 1), pa.int64())})


def ops_of(seed: int) -> int:
    return random.Random(f"ingested {seed}").randrange(60, 100)


def opened(host: Host) -> tuple[Client, Shard]:
    client = client_of(host.location, HANDLES)
    return client, client.create_shard(FED, COLUMNS, ["position"], history="forever")


def minter(host: Host) -> None:
    """Binds what is new; now and then something is."""
    bindings: Bindings | None = None
    while host.work():
        if host.random.random() < 0.5:
            host.run.last_record += host.random.randint(1, 3)
        with weathered(host, "minter failed"), suppress(Expired):
            bindings = bindings or Bindings.open(opened(host)[0], TIMES)
            if Minter(bindings, Records(host.run).watermarks).tick():
                host.run.path("minted")
        host.sleep(0.4)


def ingester(host: Host) -> None:
    found: Ingester | None = None
    while host.work():
        with weathered(host, "ingester failed"), suppress(Expired):
            found = found or ingester_of(host)
            if found.step():
                host.run.path("ingested")
        host.sleep(0.3)


def ingester_of(host: Host) -> Ingester:
    client, shard = opened(host)
    return Ingester(Bindings.open(client, TIMES), Records(host.run), shard)


def taker(host: Host) -> None:
    """Erases records that are there, at once or with the next commit of an ingester, and inserts rows of his own."""
    while host.work():
        with weathered(host, "taker failed"), suppress(*MEANWHILE):
            _, shard = opened(host)
            _take(host, shard)
        host.sleep(1.0)


def _take(host: Host, shard: Shard) -> None:
    run, pick = host.run, host.random
    if pick.random() < 0.3:
        number = -1 - len(run.taking)
        run.taking[number] = mint(Token, host.ids), False
        ask(shard, number, *run.taking[number])
        return
    if not shard.upper().element:
        return
    there = [row["position"] for row in shard.snapshot().to_arrow().to_pylist()]
    there = [position for position in there if position >= 0 and position not in run.taking]
    if there:
        position = pick.choice(there)
        run.taking[position] = mint(Token, host.ids), pick.random() < 0.4
        run.path(f"erasure {ask(shard, position, *run.taking[position])}")


def ask(shard: Shard, number: int, token: Token, force: bool) -> str:
    """Erase the record of this position, or insert a row whose number is negative. Repeating it is safe."""
    if number < 0:
        shard.insert([{"position": number}], token=token)
        return "insert"
    return shard.erase(keys=[number], token=token, force=force).phase


def tender(host: Host) -> None:
    """Merges, erases for good and collects."""
    collector = SmallCollector(host.location)
    while host.work():
        with weathered(host, "tender failed"), suppress(*MEANWHILE):
            opened(host)
            Worker(host.location, WORKER).run(FED)
            Eraser(host.location, collector).run(FED)
            collector.run(FED)
        host.sleep(1.0)


def check_ingested(host: Host) -> None:
    """Whoever did not hear an answer asks again; what is pending then goes with one more record."""
    run = host.run
    client, shard = opened(host)
    for number, (token, force) in run.taking.items():
        ask(shard, number, token, force)
    run.last_record += 1
    Minter(Bindings.open(client, TIMES), Records(run).watermarks).tick()
    last = ingester_of(host)
    while last.step():
        pass
    found = Counter(row["position"] for row in shard.snapshot().to_arrow(expand=True).to_pylist())
    erased = {number for number in run.taking if number >= 0}
    wanted = Counter({*range(run.last_record + 1), *(number for number in run.taking if number < 0)} - erased)
    lost, more = wanted - found, found - wanted
    expect(not lost and not more, "ingested", f"of the source {dict(lost)} are lost, and {dict(more)} are too many")
    pending = [one.id for one in shard.erasures().values() if one.phase == "pending"]
    expect(not pending, "erased", f"erasures {pending} are pending after a commit of the ingester")
    run.path("all ingested")
    _drop_with_pending(host, client, shard)


def _drop_with_pending(host: Host, client: Client, shard: Shard) -> None:
    """The shard is dropped while an erasure waits for its ingester; its name is free once that is collected."""
    there = [row["position"] for row in shard.snapshot().to_arrow().to_pylist()]
    if there and shard.erase(keys=there[:1]).phase == "pending":
        host.run.path("dropped with a pending erasure")
    shard.drop(force=True)
    SmallCollector(host.location).run(FED)
    again = client.create_shard(FED, COLUMNS, ["position"])
    found = again.upper().element, again.erasures()
    expect(found == (0, {}), "dropped", f"the next life of {FED} has the upper and the erasures {found}")


# --- broken builds


def position_left_behind() -> Broken:
    """The rows are written, and the position of the feed does not move in the same commit."""
    real = WriteHandle.append

    def append(self: WriteHandle, *given: Any, attributes: Any = (), **more: Any) -> Any:
        return real(self, *given, **more)

    return patch.object(WriteHandle, "append", append)


def upper_taken_for_the_feed() -> Broken:
    """Whoever took times of the shard counts as a rival who has written what the feed has there."""
    real = FeedPosition.load

    def load(self: FeedPosition) -> None:
        real(self)
        self.before = max(self.before, self.upper)

    return patch.object(FeedPosition, "load", load)


def pending_erasure_without_rows() -> Broken:
    """The commit of the writer makes an erasure effective, and leaves out what it retracts."""
    return patch.object(writers, "pending_runs", lambda erasures: ())


BROKEN = (position_left_behind, upper_taken_for_the_feed, pending_erasure_without_rows)
