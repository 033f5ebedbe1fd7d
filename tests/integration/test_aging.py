"""History gets older: since follows the clock, also where nobody reads or writes, and never passes the policy."""

from __future__ import annotations

import pyarrow as pa
import pytest

from compactor.tasks import history_task
from persist.client.shard import Shard
from persist.core.errors import Unavailable
from persist.core.frontier import Antichain
from persist.maintenance.expiry import forget_outlived, step_s
from tests.support.clocks import DAY_MS, HOUR_MS, Machine, World

NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64())])


def created(machine: Machine, history: str) -> Shard:
    return machine.client.create_shard(NAME, SCHEMA, ["id"], history=history)


def insert_every_hour(world: World, shard: Shard, hours: int) -> None:
    for number in range(hours):
        shard.insert([{"id": number}])
        world.pass_ms(HOUR_MS)


def aged(machine: Machine) -> Antichain:
    """Since, after maintenance had its turn."""
    forget_outlived(machine.location.machine(NAME), machine.clock)
    return machine.shard(NAME).since()


def test_maintenance_comes_again_in_steps_and_rests_once_nothing_is_left(world: World, machine: Machine) -> None:
    shard = created(machine, "1h")
    insert_every_hour(world, shard, 3)
    task = history_task(machine.location, machine.location.machine)
    state = machine.location.machine(NAME).state()
    assert step_s(state) == 36
    assert task(NAME) == 36
    seqno = machine.location.machine(NAME).state().seqno
    assert task(NAME) == 36, "it is not due yet"
    assert machine.location.machine(NAME).state().seqno == seqno
    world.pass_ms(HOUR_MS)
    task(NAME)
    assert shard.since() == Antichain(2)
    world.pass_ms(HOUR_MS)
    assert task(NAME) is None


def test_one_commit_forgets_history_tags_and_dropped_rows(world: World, machine: Machine) -> None:
    """Only by what it forgets before them no readable time comes before the drop."""
    shard = created(machine, "1h")
    insert_every_hour(world, shard, 2)
    shard.tag("first", 0, keep="1m")
    shard.truncate(1, mode="drop")
    insert_every_hour(world, shard, 3)
    committer = machine.location.machine(NAME)
    before = committer.state()
    assert forget_outlived(committer, machine.clock)
    after = committer.state()
    assert (after.seqno, after.tags, after.drops, after.floor) == (before.seqno + 1, {}, (), 1)
    assert not forget_outlived(committer, machine.clock, ages=False)
    assert committer.state() is after


def test_what_needs_no_clock_is_forgotten_while_a_tag_waits_for_one(world: World, machine: Machine) -> None:
    shard = created(machine, "none")
    insert_every_hour(world, shard, 3)
    shard.tag("first", 0, keep="1m")
    world.pass_ms(HOUR_MS)
    world.store_off_ms = -DAY_MS
    unsure = world.machine()
    assert aged(unsure) == Antichain(2)
    with pytest.raises(Unavailable, match="do not agree"):
        aged(unsure)
    assert unsure.location.machine(NAME).state().tags
    world.store_off_ms = 0
    aged(world.machine())
    assert not machine.location.machine(NAME).refresh().tags


def test_a_clock_that_is_set_back_while_history_gets_older_is_no_error(world: World, machine: Machine) -> None:
    """Nor are settings that another process has changed meanwhile: the next turn of maintenance moves since."""
    shard = created(machine, "1d")
    insert_every_hour(world, shard, 30)
    before_the_clock_was_set = world.machine(off_ms=HOUR_MS).clock
    forget_outlived(machine.location.machine(NAME), before_the_clock_was_set)
    assert shard.since() == Antichain(0)
    assert aged(machine) == Antichain(5)
