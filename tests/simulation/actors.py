"""What goes on in the simulated processes: each actor is production code and a record of what it was told."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from blob import Blob
from persist import commands as c
from persist.antichain import EMPTY, Antichain
from persist.client import Client
from persist.embedded import EmbeddedTransport
from persist.errors import (
    Conflict,
    Corruption,
    Expired,
    Indeterminate,
    InvalidUsage,
    NotReadable,
    Overloaded,
    PersistError,
    Unavailable,
    UpperMismatch,
)
from persist.handles import HandleSettings, Shard
from persist.ids import Token
from persist.location import Location, LocationSettings
from persist.machine import MachineSettings
from persist.reading import ReadSettings
from persist.state import Policy
from persist.transport import ShardView, ViewRequest
from persist.writing import WriteHandle, WriteSettings
from tests.simulation.history import History, Read
from tests.simulation.oracle import Contents, Oracle, ShardTruth, Update, Write, expect
from tests.simulation.world import Process, SimBackground, SimBlob, SimClock, SimConsensus, SimIds, World

MAIN = "main"  # compare-and-append, insert and advance
COPIES = "copies"  # replicated writers of definite data
SCHEMA = pa.schema([pa.field("k", pa.string()), pa.field("v", pa.int64())])
KEYS = "abcdefgh"
READ_LEASE_MS = 3_000
WRITE_LEASE_MS = 6_000
PART_BYTES = 4_096
OPS_A_STRETCH = 8
STAGED_MS_MAX = 30_000

POLICY = Policy(
    inline_part_bytes_max=700,
    inline_shard_bytes_max=3_000,
    rollup_every=8,
    batches_max=400,
    staged_ms_max=STAGED_MS_MAX,
)
HANDLES = HandleSettings(
    write=WriteSettings(lease_ms=WRITE_LEASE_MS, retry_s=4.0, part_bytes_target=PART_BYTES),
    read=ReadSettings(lease_ms=READ_LEASE_MS, retry_s=4.0, memory_bytes=64 * 1024),
)
# What may go wrong without any promise being broken; InvalidUsage and Conflict are looked at where they arise.
WEATHER = (Unavailable, Overloaded, Indeterminate)


class RecordingTransport:
    """The embedded transport; the oracle hears of every command before it is sent."""

    def __init__(self, inner: EmbeddedTransport, run: Run) -> None:
        self.inner = inner
        self._run = run

    @property
    def blob(self) -> Blob:
        return self.inner.blob

    @property
    def clock(self) -> Any:
        return self.inner.clock

    @property
    def ids(self) -> Any:
        return self.inner.ids

    @property
    def policy(self) -> Policy:
        return self.inner.policy

    def create(self, name: str, schema: Any) -> ShardView:
        return self.inner.create(name, schema)

    def names(self, prefix: str, after: str, limit: int) -> list[str]:
        return self.inner.names(prefix, after, limit)

    def apply(self, name: str, command: c.Command) -> c.Result:
        task = self._run.world.scheduler.current
        token = getattr(command, "token", None)
        if token is not None and task is not None:
            self._run.oracle.writes[str(token)] = task.local["write"]
            task.local["token"] = token
        truth = self._run.oracle.shards[name]
        if isinstance(command, (c.DowngradeSince, c.CompareAndDowngradeSince)):
            truth.since_asked = max(truth.since_asked, command.since)
        if isinstance(command, c.Drop):
            truth.since_asked = EMPTY
        return self.inner.apply(name, command)

    def view(self, name: str, request: ViewRequest) -> ShardView:
        return self.inner.view(name, request)

    def close(self) -> None:
        return


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
    stretches_left: int = 20  # how often the run is prolonged until every fault has struck
    stopping: bool = False  # no new reads and writes
    over: bool = False  # no maintenance either
    asleep: int = 0  # processes that hibernate
    boots: int = 0
    numbers: int = 0

    def truth(self, shard: str) -> ShardTruth:
        return self.oracle.shards[shard]

    def path(self, name: str) -> None:
        self.oracle.paths[name] += 1


class Host:
    """One incarnation of a process: its location, its client, its own randomness."""

    def __init__(self, run: Run, process: Process) -> None:
        run.boots += 1
        process.incarnation += 1
        process.alive = True
        world = run.world
        self.run = run
        self.process = process
        self.random = random.Random(f"{run.seed} {process.name} {process.incarnation}")
        self.clock = SimClock(world.scheduler, process)
        self.ids = SimIds(self.clock, self.random.getrandbits(64))
        self.location = Location(
            SimBlob(world),
            SimConsensus(world, process, run.push),
            settings=LocationSettings(policy=POLICY, machine=MachineSettings(retry_s=1.5)),
            clock=self.clock,
            ids=self.ids,
            background=SimBackground(world, process),
        )
        if not run.push:
            self.location.poll_s = 0.5
        self.transport = RecordingTransport(EmbeddedTransport(self.location), run)
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
            except WEATHER:
                self.sleep(0.5)
            except Corruption:
                expect_damage(self)
                self.sleep(0.5)


def expect_damage(host: Host) -> None:
    damaged = {"flip", "truncate"} & set(host.run.world.fired())
    expect(bool(damaged), "corruption", "bytes that nobody damaged were called corrupt")
    host.run.path("damage noticed")


# --- writers


def rows(host: Host, lower: int, upper: int) -> list[Update]:
    """Random updates with times in `[lower, upper)`; now and then enough of them for several parts."""
    many = host.random.random() < 0.1
    count = host.random.randrange(60, 160) if many else host.random.randrange(0, 6)
    pick = host.random
    values = 1_000 if many else 4
    return [
        (pick.choice(KEYS), pick.randrange(values), pick.randrange(lower, upper), pick.choice((1, 1, 1, 2, -1)))
        for _ in range(count)
    ]


def as_table(updates: list[Update], timed: bool = True) -> pa.Table:
    keys, values, times, diffs = (list(x) for x in zip(*updates, strict=True)) if updates else ([], [], [], [])
    columns = {
        "k": pa.array(keys, pa.string()),
        "v": pa.array(values, pa.int64()),
        "__time": pa.array(times, pa.int64()),
        "__diff": pa.array(diffs, pa.int64()),
    }
    if not timed:
        columns.pop("__time")
    return pa.table(columns)


@contextmanager
def attempted(host: Host, write: Write) -> Iterator[None]:
    """Record one write: what was asked for, and what the caller was told."""
    run = host.run
    task = run.world.scheduler.current
    assert task is not None
    run.numbers += 1
    write.number = run.numbers
    write.invoked = run.oracle.tick()
    task.local["write"] = write
    run.history.writes.append(write)
    run.oracle.note(f"{write.who} #{write.number} {write.kind} [{write.lower},{write.upper}) {len(write.updates)} rows")
    try:
        yield
    except UpperMismatch as error:
        write.answer = "refused"
        actual = error.details["actual"]
        write.actual = actual[0] if actual else None
        run.path("upper mismatch")
    except (Unavailable, Overloaded):
        write.answer = "refused"
        run.path("write unavailable")
    except Indeterminate:
        write.answer = "unknown"
        run.path("write unknown")
    except Expired:
        write.answer = "unknown"
        run.path("write expired")
    except Corruption:
        expect_damage(host)
        write.answer = "unknown"
    write.returned = run.oracle.tick()
    run.oracle.note(f"{write.who} #{write.number} -> {write.answer} {write.told or write.actual or ''}")


def told(write: Write, result: c.Appended) -> None:
    write.answer = "ok"
    write.told = (result.lower.element, result.upper.element)


def retried(host: Host, write: Write, again: Callable[[Token], c.Appended]) -> None:
    """Ask again with the same token, as callers may who were told "unknown"."""
    task = host.run.world.scheduler.current
    assert task is not None
    token = task.local.get("token")
    if token is None or host.run.oracle.writes.get(str(token)) is not write:
        return
    for _ in range(3):
        if write.answer != "unknown":
            return
        host.sleep(1.0)
        try:
            told(write, again(token))
            host.run.path("retry answered")
        except UpperMismatch as error:
            # Refused now, and never to land: so it did not land before either.
            actual = error.details["actual"]
            write.answer, write.actual = "refused", actual[0] if actual else None
            host.run.path("retry refused")
        except WEATHER:
            continue
        except Expired:
            host.run.path("retry expired")
            return
        except Corruption:
            expect_damage(host)
        finally:
            write.returned = host.run.oracle.tick()


def cas_writer(host: Host) -> None:
    """Reads the upper (or trusts what it remembers) and appends there."""
    shard = host.open(MAIN)
    writer = shard.open_writer()
    upper: int | None = None
    who = _me(host)
    while host.work():
        if host.random.random() < 0.1:
            writer = _reopened(host, shard, writer)
        if upper is None or host.random.random() < 0.6:
            seen = observed_upper(host, shard)
            if seen is None:
                continue
            upper = seen
        new_upper = upper + host.random.choice((1, 1, 2, 5))
        write = Write(0, "compare_and_append", who, MAIN, rows(host, upper, new_upper), upper, new_upper)
        low, high, table = upper, new_upper, as_table(write.updates)
        with attempted(host, write):
            runs = writer.stage(table, low)
            told(write, writer.commit_compare_and_append(runs, low, high))
        if write.answer == "unknown" and host.random.random() < 0.7:
            retried(
                host, write, lambda t, w=writer, r=runs, a=low, b=high: w.commit_compare_and_append(r, a, b, token=t)
            )
        if write.answer == "unknown":
            writer = shard.open_writer()
        upper = write.told[1] if write.answer == "ok" and write.told else write.actual
        host.sleep(host.random.choice((0.0, 0.3)))


def inserter(host: Host) -> None:
    shard = host.open(MAIN)
    writer = shard.open_writer()
    who = _me(host)
    while host.work():
        write = Write(0, "insert", who, MAIN, [(k, v, 0, d) for k, v, _, d in rows(host, 0, 1)])
        if not write.updates:
            continue
        table = as_table(write.updates, timed=False)
        with attempted(host, write):
            runs = writer.stage(table, None)
            told(write, writer.commit_insert(runs))
        if write.answer == "unknown" and host.random.random() < 0.7:
            retried(host, write, lambda t, w=writer, r=runs: w.commit_insert(r, token=t))
        if write.answer == "unknown":
            writer = shard.open_writer()
        host.sleep(host.random.choice((0.0, 0.3)))


def advancer(host: Host) -> None:
    """Declares times complete without data."""
    shard = host.open(MAIN)
    while host.work():
        seen = observed_upper(host, shard)
        if seen is not None:
            write = Write(0, "advance", _me(host), MAIN, [], seen, seen + host.random.randrange(0, 3))
            with attempted(host, write):
                told(write, shard.advance_upper(write.upper))
        host.sleep(1.0)


def definite_rows(seed: int, time: int) -> list[Update]:
    """What every replica writes at `time`."""
    pick = random.Random(seed * 1_000_003 + time)
    count = 60 if pick.random() < 0.1 else pick.randrange(3)
    return [(pick.choice(KEYS), pick.randrange(5), time, pick.choice((1, 1, -1))) for _ in range(count)]


def replica(host: Host) -> None:
    """One of several writers of the same definite data, each at its own pace and with its own cuts."""
    shard = host.open(COPIES)
    writer = shard.open_writer()
    who = _me(host)
    lower = 0
    while host.work():
        if host.random.random() < 0.2:
            lower = observed_upper(host, shard) or lower
        upper = lower + host.random.choice((1, 2, 3, 6))
        updates = [u for time in range(lower, upper) for u in definite_rows(host.run.seed, time)]
        write = Write(0, "append", who, COPIES, updates, lower, upper)
        with attempted(host, write):
            told(write, writer.append(as_table(updates), lower, upper))
        if write.answer == "ok":
            lower = upper - host.random.choice((0, 0, 0, 1))
        elif write.answer == "unknown":
            writer = shard.open_writer()
        host.sleep(0.4)


def observed_upper(host: Host, shard: Shard) -> int | None:
    """The shard's upper, recorded as a read of the register that it is."""
    invoked = host.run.oracle.tick()
    try:
        seen = shard.upper()
    except WEATHER:
        host.sleep(0.3)
        return None
    except Corruption:
        expect_damage(host)
        return None
    host.run.history.uppers.append((shard.name, _me(host), invoked, host.run.oracle.tick(), seen.element))
    return seen.element


def _reopened(host: Host, shard: Shard, writer: WriteHandle) -> WriteHandle:
    try:
        writer.close()
    except WEATHER:
        host.run.path("writer not closed")
    except Corruption:
        expect_damage(host)
    return shard.open_writer()


# --- readers


@contextmanager
def reading(host: Host, name: str, as_of: int | None) -> Iterator[None]:
    """What may end a read: the weather, a lapsed lease, history that was forgotten. Nothing else."""
    truth = host.run.truth(name)
    try:
        yield
    except WEATHER:
        host.run.path("read failed")
        host.sleep(0.3)
    except Expired as error:
        host.run.path("read expired")
        reader = next((r for r in truth.state.leased_readers if r in error.message), None)
        expect(reader is None, "leased", f"{error.message} But it is registered.")
    except NotReadable as error:
        since = truth.state.since
        expect(as_of is not None, "latest", f"a read of the latest time is never too early: {error.message}")
        assert as_of is not None
        expect(not since.less_equal(as_of), "readable", f"as of {as_of} was refused with since {since}")
        host.run.path("read too early")
    except Corruption:
        expect_damage(host)


def snapshot_reader(host: Host) -> None:
    """Reads random times in random splits, slowly, and compares."""
    name = host.random.choice((MAIN, MAIN, COPIES))
    shard = host.open(name)
    while host.work():
        as_of = _some_time(host, name)
        with reading(host, name, as_of):
            read_once(host, shard, as_of, pause_s=host.random.choice((0.0, 0.05, 1.5)))
        host.sleep(0.6)


def _some_time(host: Host, name: str) -> int | None:
    state = host.run.truth(name).state
    if host.random.random() < 0.4 or state.upper.element is None or state.since.element is None:
        return None if state.upper.element else 0
    return host.random.randint(max(0, state.since.element - 1), state.upper.element + 1)


def read_once(host: Host, shard: Shard, as_of: int | None, pause_s: float) -> Contents | None:
    """A whole snapshot, split by split, checked against the truth; None when its time does not come."""
    splits = host.random.choice((1, 1, 2, 3))
    with _snapshot(shard, as_of, splits) as snapshot:
        found: Contents = {}
        for split in snapshot.splits:
            travelled = pickle.loads(pickle.dumps(split))
            for table in travelled.read(host.transport):
                _gather(found, table, snapshot.as_of)
                host.sleep(pause_s)
    truth = host.run.truth(shard.name)
    expected = truth.contents(snapshot.as_of)
    host.run.history.reads.append(Read(shard.name, snapshot.as_of, _me(host), frozenset(found.items())))
    host.run.path("snapshot read")
    upper = truth.state.upper
    expect(not upper.less_equal(snapshot.as_of), "complete", f"read as of {snapshot.as_of} with upper {upper}")
    expect(found == expected, "definite", _difference(f"{shard.name} as of {snapshot.as_of}", found, expected))
    return found


@contextmanager
def _snapshot(shard: Shard, as_of: int | None, splits: int) -> Iterator[Any]:
    """A snapshot that is closed on the way out, unless closing fails: then its lease lapses."""
    snapshot = shard.snapshot(as_of, num_splits=splits, wait_s=3.0)
    try:
        yield snapshot
    finally:
        try:
            snapshot.close()
        except (*WEATHER, Corruption):
            pass


def _gather(found: Contents, table: pa.Table, as_of: int) -> None:
    columns = [table.column(name).to_pylist() for name in ("k", "v", "__diff")]
    for key, value, diff in zip(*columns, strict=True):
        expect((key, value) not in found, "consolidated", f"row {(key, value)} comes twice as of {as_of}")
        expect(diff != 0, "consolidated", f"row {(key, value)} comes with multiplicity 0")
        found[key, value] = diff


def _difference(what: str, found: dict[Any, int], expected: dict[Any, int]) -> str:
    extra = {k: v for k, v in found.items() if expected.get(k) != v}
    missing = {k: v for k, v in expected.items() if found.get(k) != v}
    return f"{what}: {len(found)} rows, expected {len(expected)}; wrong {_few(extra)}, right {_few(missing)}"


def _few(rows: dict[Any, int]) -> str:
    return str(dict(list(rows.items())[:4]))


def listener(host: Host) -> None:
    """A snapshot, then every update after it: without gap, without overlap."""
    name = host.random.choice((MAIN, MAIN, COPIES))
    shard = host.open(name)
    while host.work():
        as_of = _some_time(host, name)
        with reading(host, name, as_of):
            _listen(host, shard, as_of)
        host.sleep(0.5)


def _listen(host: Host, shard: Shard, as_of: int | None) -> None:
    truth = host.run.truth(shard.name)
    with _snapshot(shard, as_of, 1) as snapshot:
        start = snapshot.as_of
        listen = shard.listen(start)
    for _ in range(host.random.randrange(2, 12)):
        if host.run.stopping:
            break
        before = at = listen.frontier.element
        assert before is not None
        found: dict[tuple[str, int, int], int] = {}
        partial: dict[tuple[str, int, int], int] = {}
        try:
            for event in listen.next_events(host.random.choice((0.2, 1.0, 5.0))):
                expect(event.lower.element == at, "listen", f"an event begins at {event.lower}, not {at}")
                columns = [event.updates.column(n).to_pylist() for n in ("k", "v", "__time", "__diff")]
                for key, value, time, diff in zip(*columns, strict=True):
                    partial[key, value, time] = partial.get((key, value, time), 0) + diff
                if event.upper != event.lower:
                    found.update(partial)
                    partial, at = {}, event.upper.element
                host.sleep(host.random.choice((0.0, 0.1, 1.0)))
        except WEATHER:
            host.run.path("listen failed")  # what came of an unfinished step counts for nothing: it comes again
        expect(listen.frontier.element == at, "listen", f"events end at {at}, the frontier is {listen.frontier}")
        after = listen.frontier.element
        assert after is not None
        if after != before:
            host.run.path("listen step")
        expected = truth.between(before, after)
        found = {row: diff for row, diff in found.items() if diff}
        expect(found == expected, "listen", _difference(f"{shard.name} in [{before}, {after})", found, expected))
        host.sleep(host.random.choice((0.1, 0.1, 2.5)))
    if host.random.random() < 0.7:
        listen.close()


def holder(host: Host) -> None:
    """Takes a hold on since, keeps it for a while, moves it, and gives it up or just forgets it."""
    name = host.random.choice((MAIN, COPIES))
    shard = host.open(name)
    while host.work():
        with reading(host, name, None if host.run.truth(name).state.upper.element == 0 else 0):
            lease = shard.open_reader(purpose="holder")
            for _ in range(host.random.randrange(5)):
                host.sleep(host.random.choice((0.5, 4.0)))
                lease.keep()
                view = shard.view()
                if host.random.random() < 0.5 and view.upper.element:
                    to = host.random.randint(0, view.upper.element)
                    lease.downgrade(max(lease.since, Antichain(to)), max(lease.seqno, view.seqno))
            if host.random.random() < 0.5:
                lease.close()
        host.sleep(0.5)


def forgetter(host: Host) -> None:
    """Moves a critical reader on, so that history may be forgotten; sometimes fenced by another."""
    name = host.random.choice((MAIN, MAIN, COPIES))
    shard = host.open(name)
    cursor = host.random.choice(("one", "one", "two"))
    opaque = f"{host.process.name}.{host.process.incarnation}"
    handle = None
    while host.work():
        try:
            if handle is None:
                handle = shard.critical_reader(cursor)
            view = shard.view()
            upper = view.upper.element or 0
            to = max(0, upper - host.random.choice((1, 2, 5, 10)))
            before = host.run.truth(name).state.since
            moved = handle.downgrade_since(max(to, handle.since.element or 0), opaque=opaque)
            expect(before <= moved, "monotone", f"since went from {before} back to {moved}")
            host.run.path("downgraded")
        except WEATHER:
            handle = None
        except Conflict:
            host.run.path("fenced")
            handle = None
        except Expired:
            handle = None
        except Corruption:
            expect_damage(host)
            handle = None
        host.sleep(0.7)


def _me(host: Host) -> str:
    task = host.run.world.scheduler.current
    assert task is not None
    return f"{task.name}/{host.process.incarnation}"


ROLES: dict[str, Callable[[Host], None]] = {
    "cas_writer": cas_writer,
    "inserter": inserter,
    "advancer": advancer,
    "replica": replica,
    "snapshot_reader": snapshot_reader,
    "listener": listener,
    "holder": holder,
    "forgetter": forgetter,
}

__all__ = [
    "COPIES",
    "HANDLES",
    "MAIN",
    "POLICY",
    "ROLES",
    "SCHEMA",
    "Host",
    "InvalidUsage",
    "PersistError",
    "RecordingTransport",
    "Run",
    "definite_rows",
    "expect_damage",
    "read_once",
    "replace",
]
