"""A simulated process: production code over the simulated world, and a record of every command it sends."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from blob.memory_blobs import MemoryBlob
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import HandleSettings, Shard
from persist.client.snapshot import ReadSettings
from persist.client.transport import ForwardingTransport
from persist.client.write import WriteSettings
from persist.commit.location import Location, LocationSettings
from persist.core import commands as c
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import (
    Corruption,
    Indeterminate,
    InvalidUsage,
    Overloaded,
    PersistError,
    ShardExists,
    Unavailable,
)
from persist.core.frontier import EMPTY
from persist.core.ids import Token
from persist.core.record import replace
from persist.core.state import Policy
from persist.maintenance.collector import collect_in_background
from persist.maintenance.journal_writer import PublishSettings
from tests.simulation.history import History
from tests.simulation.instants import number
from tests.simulation.oracle import Oracle, ShardTruth, Update, Value, Write, expect, is_clone, life_of
from tests.simulation.sharing import SHARED_FROM, SimPool
from tests.simulation.world import LATE_S_MAX, Process, SimBackground, SimBlob, SimClock, SimConsensus, SimIds, World

MAIN = "main"  # compare-and-append, insert and advance
COPIES = "copies"  # replicated writers of definite data
COLLECT_RATE = 0.3  # how many processes collect as they commit, as embedded programs do
DOOMED = "doomed"  # made while everything goes on, and dropped one day
SCHEMA = pa.schema([pa.field("k", pa.string()), pa.field("v", pa.int64())])
KEYS = "abcdefgh"
EXTRAS = ("w1", "w2")  # columns that come one day
READ_LEASE_MS = 3_000
WRITE_LEASE_MS = 6_000
PART_BYTES = 4_096
OPS_A_STRETCH = 8

POLICY = Policy(
    inline_part_bytes_max=700,
    inline_shard_bytes_max=3_000,
    rollup_every=8,
    inline_batches=16,
    batches_max=400,
    overlay_flush_at=8,  # commits: half as many
)
BUNDLING = replace(POLICY, plain_parts_max=0)  # of every other run
HANDLES = HandleSettings(
    write=WriteSettings(lease_ms=WRITE_LEASE_MS, retry_s=4.0, part_bytes_target=PART_BYTES),
    read=ReadSettings(lease_ms=READ_LEASE_MS, retry_s=4.0, memory_bytes=64 * 1024),
)
# What may go wrong without any promise being broken; InvalidUsage and Conflict are looked at where they arise.
WEATHER = (Unavailable, Overloaded, Indeterminate)


class RecordingTransport(ForwardingTransport):
    """The embedded transport; the oracle hears of every command before it is sent.

    Now and then the command is held up, as by a server that is stopped: the caller hears nothing, and it comes later.
    """

    def __init__(self, inner: EmbeddedTransport, run: Run, process: Process) -> None:
        super().__init__(inner)
        self._run = run
        self._process = process

    def apply(self, name: str, command: c.Command, caller: Caller = NOBODY) -> c.Result:
        task = self._run.world.scheduler.current
        token = getattr(command, "token", None)
        if token is not None and task is not None:
            piped = self._run.piped(task.local["pipe"], command) if "pipe" in task.local else None
            self._run.oracle.writes[str(token)] = piped or task.local["write"]
            task.local["token"] = token
            self._run.oracle.sent_ms.setdefault(str(token), self._run.oracle.clock())
        truth = self._run.oracle.shards[name]
        if command.shard not in (None, truth.state.shard_id):  # of a life that has ended
            return self.inner.apply(name, command, caller)
        moves = (c.DowngradeSince, c.CompareAndDowngradeSince)
        if isinstance(command, moves) and getattr(command, "moves_since", True) and command.since is not None:
            truth.since_asked = max(truth.since_asked, command.since)
        if isinstance(command, c.ForgetHistory):
            truth.instants.asked = max(truth.instants.asked, number(command.before))
        if isinstance(command, c.Drop):
            truth.since_asked = EMPTY
        asked_ms = self._run.oracle.clock()
        if isinstance(command, c.RegisterReader):  # where the first try landed another renews nothing
            asked_ms = self._run.oracle.registered.setdefault(command.reader, asked_ms)
        if isinstance(command, c.ExpireReader):
            self._run.oracle.retired.add(command.reader)
        if self._run.world.strikes("held_up"):
            self._run.world.start(self._process, "held up", lambda: self._come_late(name, command, caller))
            raise Indeterminate("the server that has the request is stopped")
        result = self.inner.apply(name, command, caller)
        if isinstance(command, (c.RegisterReader, c.DowngradeSince)):
            self._run.oracle.renewed[command.reader] = asked_ms, READ_LEASE_MS
        return result

    def _come_late(self, name: str, command: c.Command, caller: Caller) -> None:
        scheduler = self._run.world.scheduler
        scheduler.sleep(self._run.world.random.random() * LATE_S_MAX)
        with suppress(PersistError):  # nobody is there to hear it
            self.inner.apply(name, command, caller)


def lived(shard: Shard) -> str:
    """How histories call a shard: one whose name is used again by its name and its life."""
    if shard.name != DOOMED and not is_clone(shard.name):
        return shard.name
    return life_of(shard.name, shard._transport.shard)


def extras_of(shard: Shard) -> tuple[str, ...]:
    """The columns that have come since the shard was made, as its handle knows it."""
    return tuple(name for name in shard.schema.arrow.names if name in EXTRAS)


def split_value(value: Value) -> tuple[int | None, ...]:
    """A value's columns: `v` and every extra one."""
    return value if isinstance(value, tuple) else (value, *(None for _ in EXTRAS))


def join_value(columns: Sequence[int | None]) -> Value:
    """A value of its columns; the number alone where the extra ones are null."""
    value, *extras = columns
    assert value is not None
    return (value, *extras) if any(extra is not None for extra in extras) else value


def piped_rows(pipe: str, number: int) -> list[Update]:
    """The rows of a pipelined writer's append of that number."""
    count = 60 if number % 17 == 0 else 1 + number % 2
    return [(f"{pipe}{number}", value, 0, 1) for value in range(count)]


@dataclass
class Run:
    """One simulated run: its world, what is known of it, and how much is still to be done."""

    world: World
    oracle: Oracle
    history: History
    ops_left: int
    seed: int
    push: bool
    faults: tuple[str, ...] = ()
    kept: str | None = None  # how much history new shards keep; None: they have no settings
    markers: set[str] = field(default_factory=set)  # keys that are written to be erased
    unerased: list[Any] = field(default_factory=list)  # erasures that somebody has begun (`erasing.Begun`)
    last_record: int = -1  # the position of the last record of the source that is ingested (`ingesting.py`)
    taking: dict[int, tuple[Token, bool]] = field(default_factory=dict)  # rows that were erased or inserted there
    unsettled: list[tuple[Write, Token]] = field(default_factory=list)  # restores; anybody may ask for them again
    stretches_left: int = 60  # how often the run is prolonged until every fault has struck
    stopping: bool = False  # no new reads and writes
    over: bool = False  # no maintenance either
    asleep: int = 0  # processes that hibernate
    boots: int = 0
    numbers: int = 0
    roles: tuple[tuple[str, ...], ...] = ()  # of each process
    copy: MemoryBlob = field(default_factory=lambda: MemoryBlob("mem:copy"))  # of some blobs, of any moments
    publishes: PublishSettings | None = None
    clones_named: int = 0  # names that were given to clones
    cloned: set[str] = field(default_factory=set)  # names of which somebody has begun to make a clone
    acknowledged: Counter[str] = field(default_factory=Counter)  # appends, by pipelined writer

    def piped(self, pipe: str, command: c.Command) -> Write:
        """What a command of a pipelined writer writes: the appends between the two numbers that it names."""
        assert isinstance(command, (c.Insert, c.UpdateAttributes))
        write = Write(0, "attributes", pipe, MAIN, [], attributes=command.attributes)
        self.history.writes.append(write)  # its answer is the writer's, not ours: it may have landed
        if isinstance(command, c.Insert):
            number = command.attributes[-1]
            write.kind = "insert"
            write.updates = [
                u for n in range((number.expected or 0) + 1, number.value + 1) for u in piped_rows(pipe, n)
            ]
        return write

    def truth(self, shard: str) -> ShardTruth:
        """What is true of a shard by its name; of a life of a name that is used again (`lived`) also after it."""
        return self.oracle.ended.get(shard) or self.oracle.shards[shard.partition("~")[0]]

    def path(self, name: str) -> None:
        self.oracle.paths[name] += 1


class Host:
    """One incarnation of a process: its location, its client, its own randomness."""

    def __init__(self, run: Run, process: Process) -> None:
        run.boots += 1
        process.incarnation += 1
        process.alive = True
        world = run.world
        policy = POLICY if run.seed % 2 else BUNDLING
        self.run = run
        self.process = process
        self.random = random.Random(f"{run.seed} {process.name} {process.incarnation}")
        self.clock = SimClock(world.scheduler, process)
        self.ids = SimIds(self.clock, self.random.getrandbits(64))
        self.location = Location(
            SimBlob(world),
            SimConsensus(world, process, run.push),
            settings=LocationSettings(
                policy=policy,
                collects=collect_in_background if self.random.random() < COLLECT_RATE else None,
                history=run.kept,
                publish=run.publishes,
            ),
            clock=self.clock,
            ids=self.ids,
            background=SimBackground(world, process),
        )
        if not run.push:
            self.location.poll_s = 0.5
        embedded = EmbeddedTransport(self.location)
        if run.seed >= SHARED_FROM:
            embedded.leases = SimPool(self.clock)
        self.transport = RecordingTransport(embedded, run, process)
        self.client = Client(self.transport, HANDLES)

    def sleep(self, seconds: float) -> None:
        """About that long."""
        self.run.world.scheduler.sleep(seconds * 2 * self.random.random())

    def work(self) -> bool:
        """Whether there is an operation left to do; takes it."""
        run = self.run
        if run.ops_left <= 0 and not run.stopping:
            struck = run.world.fired()
            if run.stretches_left > 0 and not all(struck[fault] for fault in run.faults):
                run.stretches_left -= 1
                run.ops_left += OPS_A_STRETCH
            else:
                run.stopping = True
        run.ops_left -= 1
        return not run.stopping

    def open(self, name: str) -> Shard:
        while True:
            try:
                return self.client.create_shard(name, SCHEMA, ["k"])
            except ShardExists:  # its schema has evolved
                return self._find(name)
            except WEATHER:
                self.sleep(0.5)
            except Corruption:
                expect_damage(self)
                self.sleep(0.5)

    def _find(self, name: str) -> Shard:
        while True:
            try:
                return self.client.shard(name)
            except WEATHER:
                self.sleep(0.5)
            except Corruption:
                expect_damage(self)
                self.sleep(0.5)


def expect_damage(host: Host) -> None:
    damaged = {"flip", "truncate"} & set(host.run.world.fired())
    expect(bool(damaged), "corruption", "bytes that nobody damaged were called corrupt")
    host.run.path("damage noticed")


@contextmanager
def weathered(host: Host, said: str) -> Iterator[None]:
    """What may go wrong without any promise being broken: the weather, which is counted as `said`, and damage."""
    try:
        yield
    except WEATHER:
        host.run.path(said)
    except Corruption:
        expect_damage(host)


def expect_damaged_part(host: Host, error: InvalidUsage) -> None:
    """A part that was staged is refused only where its blob was read damaged: it was staged without a receipt."""
    if type(error) is not InvalidUsage:  # the shard is unknown, which is not of the part
        raise error
    damaged = error.message.endswith("; write its rows again")
    expect(damaged, "usage", f"a command that is right was refused as a mistake: {error.message}")
    expect_damage(host)


def expect_wrong_clock(host: Host) -> None:
    """A token that is new is refused only if a clock was set days ahead, or, by a later life of a name, if one was

    behind: then it seems to be older than the drop of the shard before.
    """
    task, fired = host.run.world.scheduler.current, host.run.world.fired()
    again = task is not None and "~" in task.local["write"].shard
    wrong = "wild_clock" in fired or (again and "clock_jump" in fired)
    expect(wrong, "clocks", "a token was refused by its age, and no clock was wrong")
    host.run.path("token of a wrong clock")


def me(host: Host) -> str:
    """The actor that runs now, and which life of its process it is."""
    task = host.run.world.scheduler.current
    assert task is not None
    return f"{task.name}/{host.process.incarnation}"
