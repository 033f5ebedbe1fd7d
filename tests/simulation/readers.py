"""Readers, checked against the truth: snapshots, listeners, holds, and those who let history be forgotten."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pyarrow as pa

from persist.client.shard import CriticalReaderHandle, Shard
from persist.core.erasure_progress import erased_from
from persist.core.errors import (
    Corruption,
    Expired,
    NotReadable,
    OpaqueMismatch,
    Overloaded,
    Unavailable,
)
from persist.core.frontier import Antichain
from tests.simulation.fencing import FenceOp
from tests.simulation.history import Read
from tests.simulation.host import (
    COPIES,
    EXTRAS,
    MAIN,
    WEATHER,
    Host,
    expect_damage,
    join_value,
    lived,
    me,
)
from tests.simulation.oracle import Contents, Value, expect
from tests.simulation.sharing import SHARED_FROM
from tests.simulation.writers import observed_upper

STAYS = 0.8  # of the splits of runs that share leases


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
        expect(reader is None or reader in truth.lapsed, "leased", f"{error.message} But it is registered.")
    except NotReadable as error:
        since = max(truth.state.since, erased_from(truth.state))
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
        as_of = some_time(host, name)
        with reading(host, name, as_of):
            read_once(host, shard, as_of, pause_s=host.random.choice((0.0, 0.05, 1.5)))
        host.sleep(0.6)


def some_time(host: Host, name: str) -> int | None:
    state = host.run.truth(name).state
    if host.random.random() < 0.4 or state.upper.element is None or state.since.element is None:
        return None if state.upper.element else 0
    return host.random.randint(max(0, state.since.element - 1), state.upper.element + 1)


def read_once(host: Host, shard: Shard, as_of: int | datetime | None, pause_s: float) -> int:
    """A whole snapshot, split by split, checked against the truth; the time that it shows."""
    splits = host.random.choice((1, 1, 2, 3))
    with _snapshot(shard, as_of, splits) as snapshot:
        found: Contents = {}
        for split in snapshot.splits:
            # A split that goes elsewhere takes the lease with it: where leases are shared, most are read here.
            stays = host.run.seed >= SHARED_FROM and host.random.random() < STAYS
            travelled = split if stays else pickle.loads(pickle.dumps(split))
            for table in travelled.read(host.transport):
                gather(found, table, snapshot.as_of)
                host.sleep(pause_s)
    truth = host.run.truth(lived(shard))
    expected = truth.contents(snapshot.as_of)
    host.run.history.reads.append(Read(lived(shard), snapshot.as_of, me(host), frozenset(found.items())))
    host.run.path("snapshot read")
    upper = truth.state.upper
    expect(not upper.less_equal(snapshot.as_of), "complete", f"read as of {snapshot.as_of} with upper {upper}")
    expect(found == expected, "definite", _difference(f"{shard.name} as of {snapshot.as_of}", found, expected))
    as_of_found: int = snapshot.as_of
    return as_of_found


@contextmanager
def _snapshot(shard: Shard, as_of: int | datetime | None, splits: int) -> Iterator[Any]:
    """A snapshot that is closed on the way out, unless closing fails: then its lease lapses."""
    snapshot = shard.snapshot(as_of, num_splits=splits, wait_s=3.0)
    try:
        yield snapshot
    finally:
        try:
            snapshot.close()
        except (*WEATHER, Corruption):
            pass


def gather(found: Contents, table: pa.Table, as_of: int) -> None:
    """Add what a read shows. No row comes twice, and none with multiplicity 0."""
    for key, value, diff in zip(*keys_and_values(table), table.column("__diff").to_pylist(), strict=True):
        expect((key, value) not in found, "consolidated", f"row {(key, value)} comes twice as of {as_of}")
        expect(diff != 0, "consolidated", f"row {(key, value)} comes with multiplicity 0")
        found[key, value] = diff


def keys_and_values(table: pa.Table) -> tuple[list[str], list[Value]]:
    """What the oracle knows of rows."""
    names = [name for name in EXTRAS if name in table.column_names]
    values: list[Value] = table.column("v").to_pylist()
    if names:
        none = [None] * table.num_rows
        extras = [table.column(name).to_pylist() if name in names else none for name in EXTRAS]
        values = [join_value(columns) for columns in zip(values, *extras, strict=True)]
    return table.column("k").to_pylist(), values


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
        as_of = some_time(host, name)
        with reading(host, name, as_of):
            _listen(host, shard, as_of)
        host.sleep(0.5)


def _listen(host: Host, shard: Shard, as_of: int | None) -> None:
    truth = host.run.truth(shard.name)
    with _snapshot(shard, as_of, 1) as snapshot:
        start = snapshot.as_of
        listen = None
        with reading(host, shard.name, start):  # the snapshot's lease may have lapsed, and its time be forgotten
            listen = shard.listen(start)
    if listen is None:
        return
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
                times, diffs = (event.updates.column(name).to_pylist() for name in ("__time", "__diff"))
                for key, value, time, diff in zip(*keys_and_values(event.updates), times, diffs, strict=True):
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
    handle: CriticalReaderHandle | None = None
    while host.work():
        try:
            if handle is None:
                handle = _held(host, shard, cursor)
            _forget(host, shard, handle)
            host.run.path("downgraded")
        except WEATHER:
            handle = None
        except OpaqueMismatch:
            host.run.path("fenced")
            handle = None
        except Corruption:
            expect_damage(host)
            handle = None
        host.sleep(0.7)


def _held(host: Host, shard: Shard, cursor: str) -> CriticalReaderHandle:
    op = FenceOp(f"{shard.name}/{cursor}", me(host), host.run.oracle.tick())
    handle = shard.critical_reader(cursor)
    op.seen, op.returned = handle.opaque, host.run.oracle.tick()
    host.run.history.fences.append(op)
    return handle


def _forget(host: Host, shard: Shard, handle: CriticalReaderHandle) -> None:
    run = host.run
    upper = observed_upper(host, shard) or 0
    to = max(0, upper - host.random.choice((1, 2, 5, 10)))
    before = run.truth(shard.name).state.since
    run.numbers += 1
    op = FenceOp(f"{shard.name}/{handle.cursor}", me(host), run.oracle.tick(), expected=handle.opaque)
    op.new = f"{op.who} {run.numbers}"
    run.history.fences.append(op)
    try:
        moved = handle.downgrade_since(max(to, handle.since.element or 0), opaque=op.new)
        op.answer = "ok"
    except (Unavailable, Overloaded):
        op.answer = "refused"
        raise
    except OpaqueMismatch as error:
        op.answer, op.seen = "refused", error.details["actual"]
        raise
    finally:
        op.returned = run.oracle.tick()
    expect(before <= moved, "monotone", f"since went from {before} back to {moved}")
