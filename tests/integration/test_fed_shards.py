"""Shards that are fed by `append`: truncations and policies take no time of the writer, other verbs are refused."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Literal

import pyarrow as pa
import pytest

from compactor.tasks import retention_task
from compactor.worker import Worker
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.client.wall_clock import shown_instant
from persist.core.antichain import Antichain
from persist.core.errors import PersistError, UpperMismatch
from persist.core.ids import token_of_key
from tests.support.clocks import DAY_MS, START_MS, Machine, World

NAME = "orders"
SCHEMA = pa.schema([("id", pa.int64())])
MODES = ("retract", "drop")


@pytest.fixture
def world() -> World:
    found = World()
    found.true_ms = START_MS // DAY_MS * DAY_MS
    return found


@pytest.fixture
def machine(world: World) -> Machine:
    return world.machine()


@pytest.fixture
def shard(machine: Machine) -> Shard:
    """Rows 0 to 3 at their times."""
    found = machine.client.create_shard(NAME, SCHEMA, ["id"], history="1d")
    for time in range(4):
        append(found, time)
    return found


def append(shard: Shard, time: int, upper: int | None = None) -> None:
    """One row a time, from this time on, which are their numbers."""
    upper = time + 1 if upper is None else upper
    times = pa.array(range(time, upper), pa.int64())
    shard.append(pa.table({"id": times, "__time": times}), time, upper)


def ids(shard: Shard, as_of: int | None = None) -> list[int]:
    found: list[int] = shard.snapshot(as_of).to_arrow()["id"].to_pylist()
    return found


def events(shard: Shard, as_of: int, until: int) -> list[tuple[int, int, int]]:
    found = [row for event in shard.listen(as_of, until=until) for row in event.updates.to_pylist()]
    return sorted((row["__time"], row["id"], row["__diff"]) for row in found)


@pytest.mark.parametrize("mode", MODES)
def test_a_truncation_waits_for_the_next_commit_of_the_writer(shard: Shard, mode: Literal["retract", "drop"]) -> None:
    done = shard.truncate(2, mode=mode)
    assert (done.pending, done.changed, done.removed, done.mode) == (True, False, None, "drop")
    assert (done.lower, done.upper, shard.upper()) == (Antichain(4), Antichain(4), Antichain(4))
    assert ids(shard) == [0, 1, 2, 3], "no complete time changes"
    assert shard.truncate(1, mode=mode).pending
    append(shard, 4, 6)  # also what reaches over several times
    assert [ids(shard, time) for time in (3, 4, 5)] == [[0, 1, 2, 3], [2, 3, 4], [2, 3, 4, 5]]
    assert events(shard, 3, 6) == [(4, 0, -1), (4, 1, -1), (4, 4, 1), (5, 5, 1)]
    again = shard.truncate(2, mode=mode)
    assert (again.pending, again.changed, again.removed) == (False, False, 0)


def test_merges_and_replicas_show_the_same(world: World, machine: Machine, shard: Shard) -> None:
    shard.truncate(2)
    append(shard, 3, 5)  # another replica, which writes from before on
    world.pass_ms(2 * DAY_MS)
    Worker(machine.location).run(NAME, idle=True)
    other = world.machine().shard(NAME)
    assert ids(other) == ids(shard) == [2, 3, 4]
    append(other, 4, 6)
    assert ids(other) == ids(shard) == [2, 3, 4, 5]


def test_a_later_cut_replaces_one_that_waits(shard: Shard) -> None:
    shard.truncate(1)
    assert shard.truncate(3).pending
    append(shard, 4)
    assert (ids(shard, 3), ids(shard)) == ([0, 1, 2, 3], [3, 4])


def test_it_is_taken_back_where_the_writer_takes_rows_away(shard: Shard) -> None:
    """They may be rows from before the cut, which would be there less than no times. The append is not refused."""
    shard.truncate(2)
    shard.append(pa.table({"id": [1], "__diff": [-1]}), 4, 5)
    assert ids(shard) == [0, 2, 3]
    assert not shard.retention().held_by


def test_a_retry_with_its_token_is_answered_alike(shard: Shard) -> None:
    token = token_of_key("orders-1")
    first = shard.truncate(2, token=token)
    assert first.pending
    assert shard.truncate(2, token=token) == first
    append(shard, 4)
    assert shard.truncate(2, token=token).lower == first.lower
    assert ids(shard) == [2, 3, 4]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("waits", [False, True])
def test_by_force_it_takes_a_time_at_once(shard: Shard, mode: Literal["retract", "drop"], waits: bool) -> None:
    if waits:
        shard.truncate(2, mode=mode)
    done = shard.truncate(2, mode=mode, force=True)
    assert (done.pending, done.lower, done.upper) == (False, Antichain(4), Antichain(5))
    assert (ids(shard, 3), ids(shard)) == ([0, 1, 2, 3], [2, 3])
    with pytest.raises(UpperMismatch):
        append(shard, 4)
    append(shard, 5)
    assert ids(shard) == [2, 3, 5]


def test_an_insert_makes_it_effective_too(shard: Shard) -> None:
    shard.truncate(2)
    assert shard.insert([{"id": 9}]).lower == Antichain(4)
    assert ids(shard) == [2, 3, 9]


def test_a_dry_run_counts_what_would_go(shard: Shard) -> None:
    tried = shard.truncate(2, dry_run=True)
    assert (tried.removed, tried.pending, ids(shard)) == (2, False, [0, 1, 2, 3])
    append(shard, 4)
    assert ids(shard) == [0, 1, 2, 3, 4]


VERBS: list[Callable[[Shard], Any]] = [
    lambda shard: shard.delete(where="id = 1"),
    lambda shard: shard.update({"id": 7}, where="id = 1"),
    lambda shard: shard.upsert([{"id": 1}]),
    lambda shard: shard.merge([{"id": 7}], on=["id"]).when_not_matched_insert().execute(),
    lambda shard: shard.restore(0),
    lambda shard: shard.overwrite([{"id": 1}]),
    lambda shard: shard.replace_where("id = 1", [{"id": 1}]),
]


@pytest.mark.parametrize("verb", VERBS)
def test_verbs_that_work_on_what_is_there_are_refused(machine: Machine, shard: Shard, verb: Any) -> None:
    """They took a time of the writer, and what he appended there was refused or lost."""
    trace = machine.location.machine(NAME).refresh().trace
    with pytest.raises(PersistError) as refused:
        verb(shard)
    assert refused.value.kind == "invalid_usage"
    assert machine.location.machine(NAME).refresh().trace == trace
    append(shard, 4)
    shard.insert([{"id": 9}])  # from here on the service has the times
    verb(shard)
    with pytest.raises(UpperMismatch):
        append(shard, 5)


def test_a_policy_takes_rows_away_and_no_append_is_refused(world: World, machine: Machine, shard: Shard) -> None:
    """A year of days: the oldest row is younger than the age and one cut."""
    said = shard.retain({"age": "7d", "cut_every": "1d"})
    assert any("fed by append" in reason for reason in said.held_by), "it is told at once"
    keep = retention_task(machine.location, EmbeddedTransport(machine.location), None)
    written: dict[int, datetime] = {}
    for time in range(4, 90):
        world.pass_ms(DAY_MS // 2)
        append(shard, time)
        written[time] = shown_instant(world.true_ms)
        world.pass_ms(DAY_MS // 2)
        machine.location.machine(NAME).refresh()
        keep(NAME)
        if time > 14:
            age = shown_instant(world.true_ms) - written[ids(shard)[0]]
            assert 7 <= age.days <= 9, "seven days, one until the next cut, and one until the next commit"
    assert shard.upper() == Antichain(90)


def test_a_column_is_no_way_for_rows_to_go(shard: Shard) -> None:
    said = shard.retain({"column": "id", "column_age": "1d", "column_unit": "s"}, confirm=True)
    assert any("fed by append" in reason for reason in said.held_by)
    assert shard.run_retention().why == ()
