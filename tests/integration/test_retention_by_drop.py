"""Policies of rows that truncate by a drop: what goes, what holds them back, and that counts stay right."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
import pytest

from compactor.worker import Worker
from persist import InvalidUsage, Shard
from persist.core.retention_plan import facts_of
from persist.maintenance.expiry import forget_outlived
from tests.integration.test_retention import NAME, SCHEMA, days, ids, keeper, shard, world
from tests.support.clocks import DAY_MS, HOUR_MS, START_MS, Machine, World

__all__ = ["shard", "world"]

POLICY: dict[str, Any] = {"age": "3d", "cut_every": "1d", "mode": "drop"}


def upkeep(machine: Machine, *, merge: bool = True) -> None:
    """What maintenance does besides running the policy."""
    committer = machine.location.machine(NAME)
    forget_outlived(committer, machine.clock)
    if merge:
        Worker(machine.location).run(NAME, idle=True)


# --- what goes


def test_by_age_it_drops(world: World, machine: Machine, shard: Shard) -> None:
    shard.retain(POLICY)
    days(world, machine, shard, 0, 8)
    assert min(ids(shard)) >= 2
    told = [entry for entry in shard.history(100) if entry.operation in ("truncate", "drop_before")]
    assert {(entry.operation, entry.rows) for entry in told} == {("drop_before", 0)}
    assert told[0].info == {"retention": ["age"]}
    assert shard.retention().removed is None, "a drop counts nothing"
    upkeep(machine)
    assert machine.location.machine(NAME).refresh().floor > 0


def test_a_dry_run_counts(world: World, machine: Machine, shard: Shard) -> None:
    shard.retain(POLICY)
    task = keeper(machine)
    for number in range(5):
        shard.insert([{"id": number}])
        world.pass_ms(DAY_MS)
        if number < 2:
            task(NAME)
    done = shard.run_retention(dry_run=True)
    assert (done.truncated.mode, done.truncated.removed, ids(shard)) == ("drop", 2, [0, 1, 2, 3, 4])
    assert shard.run_retention().truncated is not None
    assert ids(shard) == [2, 3, 4]


# --- what holds it back


def test_where_rows_were_taken_away_nothing_goes_and_it_says_so(world: World, machine: Machine, shard: Shard) -> None:
    shard.retain(POLICY)
    shard.insert([{"id": 1}, {"id": 2}])
    world.pass_ms(DAY_MS)
    task = keeper(machine)
    task(NAME)
    world.pass_ms(2 * DAY_MS)
    shard.insert([{"id": 1, "__diff": -1}])
    world.pass_ms(DAY_MS)
    task(NAME)
    assert ids(shard) == [2]
    told = shard.retention()
    assert (told.due, told.done_before) == (None, 0)
    assert "with mode 'retract'" in told.held_by[0]
    assert "with mode 'retract'" in shard.run_retention().held_by[0]
    before = machine.location.machine(NAME).refresh().seqno
    for _ in range(5):
        world.pass_ms(HOUR_MS)
        task(NAME)
    assert machine.location.machine(NAME).refresh().seqno <= before + 1, "what is refused is not asked for again"
    world.pass_ms(3 * DAY_MS)
    task(NAME)
    assert ids(shard) == [], "a cut after that retraction takes all of it"


def test_too_many_drops_hold_it_back(world: World, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persist.core.truncations_and_drops.DROPS_MAX", 64)
    shard = machine.client.create_shard(NAME, SCHEMA, ["id"], history="forever")
    for number in range(70):
        shard.insert([{"id": number}])
    for number in range(64):
        shard.truncate(number + 1, mode="drop")
    shard.retain({"age": "1d", "cut_every": "1d", "mode": "drop"}, confirm=True)
    task = keeper(machine)
    world.pass_ms(DAY_MS)
    task(NAME)
    world.pass_ms(2 * DAY_MS)
    task(NAME)
    assert ids(shard) == list(range(64, 70))
    assert "has 64 drops" in shard.retention().held_by[0]


# --- counts and cuts


@pytest.mark.parametrize("merged", [False, True])
def test_counts_stay_right_when_a_drop_is_forgotten(world: World, machine: Machine, shard: Shard, merged: bool) -> None:
    """Also where a part across the cut is clipped: it tells no count until it is merged."""
    for number in range(6):
        shard.insert([{"id": 10 * number + at} for at in range(10)])
    if merged:
        Worker(machine.location).run(NAME, idle=True)
    committer = machine.location.machine(NAME)
    assert facts_of(committer.refresh()).came == 60
    shard.truncate(4, mode="drop")
    assert facts_of(committer.refresh()).came == 60
    world.pass_ms(2 * DAY_MS)
    shard.insert([{"id": 99}])
    upkeep(machine, merge=False)
    upkeep(machine)
    shard.insert([{"id": 100}])
    upkeep(machine)
    facts = facts_of(committer.refresh())
    assert committer.refresh().drops == ()
    assert len(ids(shard)) == 22
    assert (facts.rows, facts.came, facts.truncated.removed) == (22, 62, 40)


def test_at_least_so_many_rows_stay_and_it_is_not_late(world: World, machine: Machine, shard: Shard) -> None:
    """A drop leaves the shard when history has passed it. A limit of rows then goes on as before."""
    shard.configure(history="3h")
    shard.retain({"rows": 25, "cut_every": "1h", "mode": "drop"})
    task, kept = keeper(machine), []
    for hour in range(24):
        shard.insert([{"id": 10 * hour + number} for number in range(10)])
        world.pass_ms(HOUR_MS)
        task(NAME)
        upkeep(machine)
        kept.append(len(ids(shard)))
    assert min(kept[3:]) >= 30
    assert max(kept) <= 70
    assert machine.location.machine(NAME).refresh().floor > 0, "drops were forgotten"


def test_cuts_that_are_still_to_come_keep_nothing_dropped(world: World, machine: Machine, shard: Shard) -> None:
    """Each drop would stand for as long as rows live, and 64 of them would hold the policy for ever."""
    shard.retain({"age": "5d", "cut_every": "1d", "mode": "drop"})
    for day in range(16):
        days(world, machine, shard, day, day + 1)
        upkeep(machine, merge=False)
    committer = machine.location.machine(NAME)
    assert len(committer.refresh().drops) <= 2, "as many as history has not passed"
    assert committer.refresh().floor > 5
    assert min(part.time_min for part in committer.refresh().trace.parts()) >= committer.refresh().floor
    assert shard.retention().held_by == ()
    assert shard.run_retention(dry_run=True).held_by == ()
    shard.retain({"age": "5d", "cut_every": "1d"})
    assert shard.retention().cuts == 0, "what was dropped is not there as of these any more"
    before = min(ids(shard))
    days(world, machine, shard, 16, 23)
    assert (before < 18, ids(shard)) == (True, [18, 19, 20, 21, 22])


def test_what_a_restore_brings_back_goes_again(world: World, machine: Machine, shard: Shard) -> None:
    shard.configure(history="30d")
    shard.retain(POLICY)
    days(world, machine, shard, 0, 4)
    dropped_at = machine.location.machine(NAME).refresh().drops[-1].at
    shard.restore(dropped_at - 1)
    assert 0 in ids(shard)
    days(world, machine, shard, 4, 14)
    assert 0 not in ids(shard)


# --- what a drop took away is not counted among the rows that are there: a policy would take more than half unasked


COLUMNS = pa.schema([("id", pa.int64()), ("t", pa.timestamp("us", "UTC"))])
NEW = datetime.fromtimestamp(START_MS / 1000, UTC)
OLD = NEW - timedelta(days=300)


@pytest.mark.parametrize("mode", ["retract", "drop"])
@pytest.mark.parametrize("history", ["forever", "none"])
def test_a_policy_that_takes_more_than_half_needs_confirm(mode: str, history: str) -> None:
    machine = World().machine()
    shard = machine.client.create_shard("orders", COLUMNS, ["id"], history=history)
    for start in range(0, 60, 10):
        shard.insert([{"id": start + number, "t": OLD} for number in range(10)])
    shard.truncate(5, mode=mode)
    shard.insert([{"id": 1_000 + number, "t": NEW} for number in range(8)])
    assert shard.retention().rows in (18, None)
    with pytest.raises(InvalidUsage, match="would remove 10"):
        shard.retain({"column": "t", "column_age": "30d"})
    assert shard.retain({"column": "t", "column_age": "30d"}, confirm=True).policy is not None
