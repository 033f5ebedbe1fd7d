"""Policies of rows by a column: which rows go, what never goes, what holds them back, and what a look costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pytest

from compactor.metering import MaintenanceMetrics
from compactor.worker import Worker
from persist import Antichain, ColumnRun, Conflict, InvalidUsage, Shard, UpperMismatch
from persist.client import column_retention
from persist.core import commands as c
from persist.core.shard_settings import RowPolicy
from persist.parts.row_age import AgeFilter
from tests.integration.test_retention import ids, keeper, world
from tests.support.clocks import DAY_MS, HOUR_MS, Machine, World

__all__ = ["world"]

NAME = "events"
SCHEMA = pa.schema([("id", pa.int64()), ("at", pa.timestamp("us", tz="UTC"))])
POLICY: dict[str, Any] = {"column": "at", "column_age": "10d", "cut_every": "1d"}


@pytest.fixture
def shard(machine: Machine) -> Shard:
    return machine.client.create_shard(NAME, SCHEMA, ["id"], history="30d")


def day(world: World, days: float) -> datetime:
    """A wall clock so many days ago."""
    return datetime.fromtimestamp((world.true_ms - days * DAY_MS) / 1000, UTC)


def rows(world: World, **ages: float | None) -> list[dict[str, Any]]:
    """Rows `r7=3`: with the id 7, three days old; None has no wall clock."""
    return [{"id": int(name[1:]), "at": None if days is None else day(world, days)} for name, days in ages.items()]


def run(shard: Shard) -> ColumnRun:
    """A run of the policy that has looked at the column."""
    found = shard.run_retention().by_column
    assert found is not None
    return found


FAR: list[tuple[Any, str, Any]] = [
    (pa.timestamp("us", tz="UTC"), "", datetime(9999, 12, 31, tzinfo=UTC)),
    (pa.date32(), "", date(9999, 12, 31)),
    (pa.int64(), "s", 2**62),
    (pa.int64(), "ms", 2**63 - 1),
    (pa.uint64(), "s", 2**64 - 1),
]

# --- which rows go


@pytest.mark.parametrize(("kind", "unit", "value"), FAR, ids=[str(kind) for kind, *_ in FAR])
def test_a_value_far_away_never_comes_of_age(world: World, machine: Machine, kind: Any, unit: str, value: Any) -> None:
    """The usual "valid for ever". The first instant at which it is old enough is one that nobody can write."""
    schema = pa.schema([("id", pa.int64()), ("at", kind)])
    shard = machine.client.create_shard("valid", schema, ["id"], history="30d")
    shard.insert([{"id": 1, "at": value}, {"id": 2, "at": None}])
    shard.retain({"column": "at", "column_age": "30d", **({"column_unit": unit} if unit else {})})
    run(shard)
    assert keeper(machine)("valid") is None, "nothing to wait for"
    assert (shard.retention().to_json()["next"], ids(shard)) == (None, [1, 2])
    shard.insert([{"id": 3, "at": value}])
    run(shard)
    assert ids(shard) == [1, 2, 3]


def test_rows_go_by_their_value_whenever_they_came(world: World, machine: Machine, shard: Shard) -> None:
    shard.retain(POLICY)
    shard.insert(rows(world, r1=2, r2=9.5, r3=30, r4=None, r5=-400))
    task, metrics = keeper(machine, counted := MaintenanceMetrics()), counted
    task(NAME)
    assert ids(shard) == [1, 2, 4, 5], "nulls stay, and what lies ahead"
    assert (metrics.counters.retention_runs, metrics.counters.retention_rows) == (1, 1)
    told = shard.retention()
    assert (told.column_removed, told.column_due, told.held_by) == (1, False, ())
    world.pass_ms(DAY_MS)
    task(NAME)
    assert ids(shard) == [1, 4, 5]
    world.pass_ms(20 * DAY_MS)
    task(NAME)
    assert ids(shard) == [4, 5]


def test_it_is_one_commit_that_tells_why_and_can_be_undone(world: World, shard: Shard) -> None:
    shard.retain(POLICY)
    shard.insert(rows(world, r1=20, r2=1, r3=2))
    done = shard.run_retention()
    assert (done.why, done.truncated) == (("column",), None)
    entry = shard.history(1)[0]
    assert (entry.operation, entry.info, entry.rows, entry.retractions) == (
        "truncate", {"retention": ["column"]}, 1, 1,
    )  # fmt: skip
    assert (entry.lower, entry.upper) == (1, 2)
    assert (done.by_column.lower, done.by_column.upper) == (Antichain(1), Antichain(2))
    shard.restore(0)
    assert ids(shard) == [1, 2, 3]
    run(shard)
    assert ids(shard) == [2, 3], "what came back is still old"


KINDS: list[tuple[Any, str, Any]] = [
    (pa.timestamp("s"), "", lambda at: at.replace(tzinfo=None)),
    (pa.timestamp("ns"), "", lambda at: at.replace(tzinfo=None)),
    (pa.timestamp("ms", tz="Europe/Rome"), "", lambda at: at),
    (pa.date32(), "", lambda at: at.date()),
    (pa.int64(), "us", lambda at: int(at.timestamp() * 1_000_000)),
    (pa.uint32(), "s", lambda at: int(at.timestamp())),
]


@pytest.mark.parametrize("in_key", [False, True])
@pytest.mark.parametrize(("kind", "unit", "value"), KINDS, ids=[str(kind) for kind, *_ in KINDS])
def test_kinds_of_columns(world: World, machine: Machine, kind: Any, unit: str, value: Any, in_key: bool) -> None:
    schema = pa.schema([("at", kind), ("id", pa.int64())])
    shard = machine.client.create_shard("kinds", schema, ["at", "id"] if in_key else ["id"], history="1d")
    shard.insert([{"at": value(day(world, age)), "id": n} for n, age in enumerate((9, 9.9, 12, 40))])
    shard.insert([{"at": None, "id": 7}, {"at": value(day(world, 11.5)), "id": 8}])
    Worker(machine.location).run("kinds", idle=True)
    shard.retain({**POLICY, **({"column_unit": unit} if unit else {})})
    assert shard.run_retention().why == ("column",)
    assert sorted(ids(shard)) == [0, 1, 7]


# --- what a look costs


def test_a_shard_at_rest_is_not_read(world: World, machine: Machine, shard: Shard) -> None:
    """A look reads what may be old enough. It is worth one when something was written, or a value comes of age."""
    shard.retain(POLICY)
    shard.insert(rows(world, r1=8, r2=4, r3=None))
    Worker(machine.location).run(NAME, idle=True)
    task, looks, waits, seqnos = keeper(machine), [], [], []
    with patch.object(
        column_retention.ColumnRetention, "run", autospec=True, side_effect=column_retention.ColumnRetention.run
    ) as run:
        for _ in range(20):
            waits.append(task(NAME))
            looks.append(run.call_count)
            seqnos.append(machine.location.machine(NAME).state().seqno)
            if waits[-1] is None:
                break
            world.pass_ms(int(waits[-1] * 1000))
    assert waits[-1] is None, "it is not looked at again before it moves"
    assert ids(shard) == [3]
    assert looks[-1] <= 5, "the first look, one for each value, and one for what each of them wrote"
    assert seqnos[-1] == seqnos[-2]


def test_row_groups_that_are_young_are_not_read(world: World, machine: Machine, shard: Shard) -> None:
    for age in (20, 5, 3):
        count = 3_000
        at = pa.array([day(world, age)] * count, SCHEMA.field("at").type)
        shard.insert(pa.table({"id": pa.array(range(count)), "at": at}))
    shard.retain(POLICY, confirm=True)
    read, real = [], AgeFilter.rows

    def counted(self: AgeFilter, table: pa.Table) -> pa.Table:
        read.append(len(table))
        return real(self, table)

    with patch.object(AgeFilter, "rows", counted):
        run(shard)
    assert sum(read) == 3_000, "of three parts one has old rows"
    left = ids(shard)
    assert len(left) == 6_000


def test_nothing_to_take_commits_nothing_and_is_remembered(world: World, machine: Machine, shard: Shard) -> None:
    shard.retain(POLICY)
    shard.insert(rows(world, r1=1))
    done = run(shard)
    assert (done.changed, done.removed, shard.upper()) == (False, 0, Antichain(1))
    before = machine.location.machine(NAME).refresh().seqno
    assert shard.run_retention().by_column is None
    assert machine.location.machine(NAME).refresh().seqno == before
    assert shard.retention().next == day(world, -9) + timedelta(milliseconds=1)


def test_a_dry_run_and_what_is_told(world: World, machine: Machine, shard: Shard) -> None:
    shard.insert(rows(world, r1=20, r2=1, r3=2))
    shard.retain(POLICY)
    assert shard.retention().column_due
    before = machine.location.machine(NAME).refresh().seqno
    done = shard.run_retention(dry_run=True)
    assert (done.by_column.removed, done.by_column.changed) == (1, False)
    assert machine.location.machine(NAME).refresh().entries[before], "nothing but what the reader holds was committed"
    assert ids(shard) == [1, 2, 3]
    assert shard.retention().column_at is None


# --- consumers


def test_it_never_takes_what_a_consumer_has_not_passed(world: World, machine: Machine, shard: Shard) -> None:
    shard.insert(rows(world, r1=20))
    reader = shard.critical_reader("billing")
    shard.retain({**POLICY, "consumers": ["billing"]}, confirm=True)
    task = keeper(machine)
    task(NAME)
    assert ids(shard) == [1], "it has read nothing"
    assert "consumer 'billing' is at [0]" in shard.retention().held_by[0]
    shard.insert(rows(world, r2=20))
    reader.downgrade_since(1)
    world.pass_ms(DAY_MS)
    task(NAME)
    assert ids(shard) == [2]
    world.pass_ms(DAY_MS)
    assert task(NAME) is None, "nothing to do before the consumer moves"
    reader.downgrade_since(3)
    task(NAME)
    assert (ids(shard), shard.retention().held_by) == ([], ())


def test_an_equal_row_that_a_consumer_has_not_passed_stays(world: World, shard: Shard) -> None:
    """The policy took the one that it had passed. An equal one that comes after that is not that one."""
    old = rows(world, r1=20)
    shard.insert(old)
    reader = shard.critical_reader("billing")
    reader.downgrade_since(1)
    shard.retain({**POLICY, "consumers": ["billing"]}, confirm=True)
    shard.run_retention()
    assert ids(shard) == []
    shard.insert(old)
    shard.run_retention()
    assert ids(shard) == [1]
    shard.insert([{**old[0], "__diff": -1}, *rows(world, r2=20)])
    shard.insert(old)
    shard.run_retention()
    assert ids(shard) == [1, 2]
    reader.downgrade_since(3)
    shard.run_retention()
    assert ids(shard) == [1, 2], "what came at 2 was retracted, and came again at 4"
    reader.downgrade_since(5)
    shard.run_retention()
    assert ids(shard) == []


def test_what_is_much_older_passes_a_consumer_and_is_counted(world: World, machine: Machine, shard: Shard) -> None:
    shard.insert(rows(world, r1=12, r2=40))
    reader = shard.critical_reader("billing")
    reader.downgrade_since(1)
    shard.insert(rows(world, r3=12, r4=40, r5=1))
    shard.retain({**POLICY, "consumers": ["billing"], "consumers_max_age": "30d"}, confirm=True)
    done = shard.run_retention()
    assert (done.by_column.removed, done.passed, ids(shard)) == (3, ("billing",), [3, 5])
    assert "billing" in done.held_by[0]
    assert shard.retention().overran == 1
    world.pass_ms(19 * DAY_MS)
    assert shard.run_retention().passed == ("billing",)
    assert (ids(shard), shard.retention().overran) == ([5], 2), "at 31 days it waits for nobody"
    assert reader.since == Antichain(1)


def test_what_it_has_passed_alone_does_not_count_as_overrun(world: World, shard: Shard) -> None:
    shard.insert(rows(world, r1=40))
    shard.critical_reader("billing").downgrade_since(1)
    shard.insert(rows(world, r2=1))
    shard.retain({**POLICY, "consumers": ["billing"], "consumers_max_age": "30d"}, confirm=True)
    assert shard.run_retention().passed == ()
    assert (ids(shard), shard.retention().overran) == ([2], 0)


def test_without_the_history_that_tells_what_was_passed_rows_wait(world: World, machine: Machine) -> None:
    shard = machine.client.create_shard("plain", SCHEMA, ["id"], history="none")
    shard.insert(rows(world, r1=20))
    reader = shard.critical_reader("billing")
    reader.downgrade_since(1)
    shard.insert(rows(world, r2=20))
    machine.location.machine("plain").apply(c.ForgetOutlived(world.true_ms))
    shard.retain({**POLICY, "consumers": ["billing"]}, confirm=True)
    assert shard.since() == Antichain(1)
    assert shard.run_retention().why == ()
    assert "wait for it" in shard.retention().held_by[0]
    shard.insert(rows(world, r3=1))
    reader.downgrade_since(3)
    machine.location.machine("plain").apply(c.ForgetOutlived(world.true_ms))
    shard.configure(history="7d")
    shard.insert(rows(world, r4=1))
    reader.downgrade_since(4)
    assert shard.run_retention().why == ("column",)
    assert ids(shard) == [3, 4]


# --- who owns the times, and who writes meanwhile


def test_a_shard_that_is_fed_by_append_is_left_alone(world: World, machine: Machine, shard: Shard) -> None:
    shard.append(pa.Table.from_pylist(rows(world, r1=20), SCHEMA), 0, 1)
    shard.retain(POLICY, confirm=True)
    assert shard.run_retention().why == ()
    assert "fed by append" in shard.retention().held_by[0]
    assert ids(shard) == [1]
    assert keeper(machine)(NAME) is None


@contextmanager
def meanwhile(*acts: Callable[[], object]) -> Iterator[None]:
    """These happen, one after the other, each once rows were staged for a commit."""
    real, left = column_retention.ColumnRetention._staged, list(acts)

    def staged(self: Any, *given: Any) -> Any:
        found = real(self, *given)
        if left:
            left.pop(0)()
        return found

    with patch.object(column_retention.ColumnRetention, "_staged", staged):
        yield


def test_what_others_write_meanwhile_is_looked_at_too(world: World, shard: Shard) -> None:
    """Each try adds what came since the last one, so that a shard that is written all the time comes to an end."""
    shard.insert(rows(world, r1=20, r2=20, r3=1))
    shard.retain(POLICY, confirm=True)
    others = [
        rows(world, r4=20, r5=2),
        [{**rows(world, r2=20)[0], "__diff": -1}],
        [{**rows(world, r4=20)[0], "__diff": 2}],
    ]
    with meanwhile(*(partial(shard.insert, one) for one in others)):
        done = run(shard)
    assert (done.removed, ids(shard)) == (4, [3, 5])
    assert [row["__diff"] for row in shard.changes(0).to_arrow().to_pylist()] == [-1, -1, 1]


def test_who_loses_each_time_changes_nothing(world: World, shard: Shard) -> None:
    shard.insert(rows(world, r1=20, r2=1))
    shard.retain(POLICY)
    others = [partial(shard.insert, rows(world, r3=1))] * 6
    with meanwhile(*others), pytest.raises(UpperMismatch, match="each of 6 times"):
        shard.run_retention()
    assert 1 in ids(shard)
    assert shard.retention().column_at is None


def test_a_drop_meanwhile_begins_it_anew(world: World, shard: Shard) -> None:
    """What was staged of a row that a drop took would leave it there less than no times."""
    shard.insert(rows(world, r1=20, r2=1))
    shard.insert(rows(world, r3=20, r4=1))
    shard.retain(POLICY)
    with meanwhile(partial(shard.truncate, 1, mode="drop")):
        done = run(shard)
    assert (done.removed, ids(shard)) == (1, [4])
    assert shard.snapshot().to_arrow()["__diff"].to_pylist() == [1]


def test_nothing_goes_by_a_policy_that_was_taken_away_meanwhile(world: World, shard: Shard) -> None:
    shard.insert(rows(world, r1=20, r2=1))
    shard.retain(POLICY)
    with (
        meanwhile(partial(shard.retain, None)),
        pytest.raises(Conflict, match=r"the row policy of shard .* has changed"),
    ):
        shard.run_retention()
    assert ids(shard) == [1, 2]


def test_beside_a_limit_of_rows_at_least_so_many_stay(world: World, machine: Machine, shard: Shard) -> None:
    shard.retain({**POLICY, "rows": 6, "cut_every": "1h"})
    task, kept = keeper(machine), []
    for hour in range(12):
        number = 10 * hour
        shard.insert(rows(world, **{f"r{number}": 20, f"r{number + 1}": 1, f"r{number + 2}": 1}))
        world.pass_ms(HOUR_MS)
        task(NAME)
        kept.append(len(ids(shard)))
    assert min(kept[3:]) >= 6
    assert max(kept) <= 6 + 6 + 6
    assert shard.retention().done_before > 0


# --- what is refused

REFUSED: list[dict[str, Any]] = [
    *({"column": column, "column_age": "30d"} for column in ("nobody", "name", "number", 7, "", "x" * 1_001)),
    {"column": "number", "column_age": "30d", "column_unit": "h"},
    {"column": "short", "column_age": "30d", "column_unit": "s"},
    *({"column": "at", "column_age": "30d", "column_unit": unit} for unit in ("ms", 1)),
    *({"column": "at", "column_age": age} for age in ("long", "0d", 7)),
    {"column": "at"},
    {"column_age": "30d"},
    {"age": "30d", "column_unit": "ms"},
]
WIDE = pa.schema([*SCHEMA, ("name", pa.string()), ("number", pa.int64()), ("short", pa.int16())])


def test_what_is_refused_of_a_column(machine: Machine) -> None:
    shard = machine.client.create_shard("wide", WIDE, ["id"], history="1d")
    for policy in REFUSED:
        with pytest.raises(InvalidUsage):
            shard.retain(policy)
    assert shard.retention().version == 1


def test_a_column_that_tells_no_wall_clock_holds_it_back(world: World, machine: Machine, shard: Shard) -> None:
    """A policy can be set by its command alone, which looks at no column."""
    shard.insert(rows(world, r1=20))
    for column, told in (("nobody", "no column 'nobody'"), ("id", "column_unit")):
        version = shard.retention().version
        policy = RowPolicy(column=column, column_age_ms=DAY_MS)
        machine.location.machine(NAME).apply(c.SetSettings(version, 30 * DAY_MS, rows=policy))
        assert told in shard.retention().held_by[0]
        assert told in shard.run_retention().held_by[0]
        assert keeper(machine)(NAME) is None, "it is looked at again when something was written"
    assert ids(shard) == [1]
