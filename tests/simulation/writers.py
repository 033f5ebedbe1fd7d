"""Writers: what they try, what they are told, and what they do when the outcome is unknown."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from persist.client.shard import Shard
from persist.client.write import WriteHandle
from persist.core import commands as c
from persist.core.errors import (
    AttributeMismatch,
    Corruption,
    Expired,
    Indeterminate,
    InvalidUsage,
    OutcomeForgotten,
    Overloaded,
    Unavailable,
    UpperMismatch,
)
from persist.core.ids import Token, mint, token_of_key
from tests.simulation.host import (
    COPIES,
    EXTRAS,
    KEYS,
    MAIN,
    WEATHER,
    Host,
    expect_damage,
    expect_damaged_part,
    expect_wrong_clock,
    extras_of,
    lived,
    me,
    split_value,
)
from tests.simulation.oracle import Update, Write


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


def as_table(updates: list[Update], timed: bool = True, extras: Sequence[str] = ()) -> pa.Table:
    """The updates as rows; `extras` are the columns that the schema has beyond the first ones."""
    keys, values, times, diffs = (list(x) for x in zip(*updates, strict=True)) if updates else ([], [], [], [])
    columns = {
        "k": pa.array(keys, pa.string()),
        "v": pa.array([split_value(value)[0] for value in values], pa.int64()),
        **{
            name: pa.array([split_value(value)[EXTRAS.index(name) + 1] for value in values], pa.int64())
            for name in extras
        },
        "__time": pa.array(times, pa.int64()),
        "__diff": pa.array(diffs, pa.int64()),
    }
    if not timed:
        columns.pop("__time")
    return pa.table(columns)


@contextmanager
def attempted(host: Host, write: Write) -> Iterator[Token | None]:
    """Record one write: what was asked for, and what the caller was told. Gives the token to send, if any."""
    run = host.run
    task = run.world.scheduler.current
    assert task is not None
    run.numbers += 1
    write.number = run.numbers
    write.invoked = run.oracle.tick()
    task.local["write"] = write
    given = task.local["given"] = _token(host)
    run.history.writes.append(write)
    run.oracle.note(f"{write.who} #{write.number} {write.kind} [{write.lower},{write.upper}) {len(write.updates)} rows")
    try:
        yield given
    except UpperMismatch as error:
        write.answer = "refused"
        actual = error.details["actual"]
        write.actual = actual[0] if actual else None
        run.path("upper mismatch")
    except AttributeMismatch as error:
        _mismatched(host, write, error)
    except (Unavailable, Overloaded):
        write.answer = "refused"
        run.path("write unavailable")
    except Indeterminate:
        write.answer = "unknown"
        run.path("write unknown")
    except Expired:
        write.answer = "unknown"
        run.path("write expired")
    except OutcomeForgotten:
        expect_wrong_clock(host)
        write.answer = "refused"
    except Corruption:
        expect_damage(host)
        write.answer = "unknown"
    except InvalidUsage as error:
        expect_damaged_part(host, error)
        write.answer = "refused"
    write.returned = run.oracle.tick()
    run.oracle.note(f"{write.who} #{write.number} -> {write.answer} {write.told or write.actual or ''}")


def _mismatched(host: Host, write: Write, error: AttributeMismatch) -> None:
    """Refused; the values that it carries were those of the attributes."""
    run = host.run
    run.truth(write.shard).attributes.check(error.details["actual"].items(), write.invoked, run.oracle.tick())
    write.answer = "refused"
    run.path("attribute mismatch")


def told(write: Write, result: c.Appended | None) -> None:
    """An answer; None: it tells no interval."""
    write.answer = "ok"
    if result is not None:
        write.told = (result.lower.element, result.upper.element)


def _token(host: Host) -> Token | None:
    """A token that persist minted, or one that stands for a free-form key, or none: then no caller can ask again."""
    kind = host.random.randrange(3)
    if kind == 0:
        return None
    return mint(Token, host.ids) if kind == 1 else token_of_key(host.ids.uuid7())


def retried(host: Host, write: Write, again: Callable[[Token], c.Appended | None]) -> None:
    """Ask again with the same token, as callers may who were told "unknown"."""
    task = host.run.world.scheduler.current
    assert task is not None
    token = task.local["given"]
    if token is None:
        return
    for _ in range(3):
        if write.answer != "unknown":
            return
        host.sleep(1.0)
        try:
            told(write, again(token))
            host.run.path("retry answered")
        except UpperMismatch as error:
            # What is refused so now has not landed before either. While the upper is not reached, the first call may.
            actual = error.details["actual"]
            write.actual = actual[0] if actual else None
            write.answer = "unknown" if write.actual is not None and write.actual < write.lower else "refused"
            host.run.path("retry refused")
        except AttributeMismatch as error:
            _mismatched(host, write, error)
            write.answer = "unknown"  # the value may come back, and what is under way of the first call may land
        except WEATHER:
            continue
        except Expired:
            host.run.path("retry expired")
            return
        except OutcomeForgotten:  # what has landed would be answered
            expect_wrong_clock(host)
            write.answer = "refused"
        except Corruption:
            expect_damage(host)
        except InvalidUsage as error:
            expect_damaged_part(host, error)
        finally:
            write.returned = host.run.oracle.tick()


def cas_writer(host: Host) -> None:
    """Reads the upper (or trusts what it remembers) and appends there."""
    shard = host.open(MAIN)
    extras = extras_of(shard)
    writer = shard.open_writer()
    upper: int | None = None
    who = me(host)
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
        low, high, table = upper, new_upper, as_table(write.updates, extras=extras)
        with attempted(host, write) as token:
            runs = writer.stage(table, low)
            told(write, writer.commit_compare_and_append(runs, low, high, token=token))
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
    extras = extras_of(shard)
    writer = shard.open_writer()
    who = me(host)
    while host.work():
        write = Write(0, "insert", who, MAIN, [(k, v, 0, d) for k, v, _, d in rows(host, 0, 1)])
        if not write.updates:
            continue
        table = as_table(write.updates, timed=False, extras=extras)
        with attempted(host, write) as token:
            told(write, writer.insert(table, token=token))
        if write.answer == "unknown" and host.random.random() < 0.7:  # on any handle, with rows staged anew
            retried(host, write, lambda t, rows=table: shard.insert(rows, token=t))
        if write.answer == "unknown":
            writer = shard.open_writer()
        host.sleep(host.random.choice((0.0, 0.3)))


def advancer(host: Host) -> None:
    """Declares times complete without data."""
    shard = host.open(MAIN)
    while host.work():
        seen = observed_upper(host, shard)
        if seen is not None:
            write = Write(0, "advance", me(host), MAIN, [], seen, seen + host.random.randrange(0, 3))
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
    who = me(host)
    lower = 0
    while host.work():
        if host.random.random() < 0.2:
            lower = observed_upper(host, shard) or lower
        upper = lower + host.random.choice((1, 2, 3, 6))
        updates = [u for time in range(lower, upper) for u in definite_rows(host.run.seed, time)]
        write = Write(0, "append", who, COPIES, updates, lower, upper)
        with attempted(host, write) as token:
            told(write, writer.append(as_table(updates), lower, upper, token=token))
        if write.answer == "ok":
            lower = upper - host.random.choice((0, 0, 0, 1))
        elif write.answer == "unknown":
            writer = shard.open_writer()
        host.sleep(0.4)


def observed_upper(host: Host, shard: Shard) -> int | None:
    """The shard's upper, recorded with its since as the reads of registers that they are."""
    invoked = host.run.oracle.tick()
    try:
        view = shard.view()
    except WEATHER:
        host.sleep(0.3)
        return None
    except Corruption:
        expect_damage(host)
        return None
    span = lived(shard), me(host), invoked, host.run.oracle.tick()
    host.run.history.uppers.append((*span, view.upper.element))
    host.run.history.sinces.append((*span, view.since.element))
    return view.upper.element


def _reopened(host: Host, shard: Shard, writer: WriteHandle) -> WriteHandle:
    try:
        writer.close()
    except WEATHER:
        host.run.path("writer not closed")
    except Corruption:
        expect_damage(host)
    return shard.open_writer()
