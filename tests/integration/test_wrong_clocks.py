"""A clock that is wrong harms nobody but its owner, whatever its error: leases, ages, and what a State remembers."""

from __future__ import annotations

import pyarrow as pa
import pytest

from compactor.orphans import Sweeper
from compactor.worker import IDLE_MS, Worker
from persist import ReadLease, Shard, Token, WriteHandle
from persist.core import commands as c
from persist.core.batch import Run
from persist.core.ids import mint
from persist.core.state import State
from persist.maintenance.collector import Collector
from tests.support.clocks import DAY_MS, HOUR_MS, YEAR_MS, Machine, World
from tests.support.examples import thinned

NAME = "orders"
SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("v", pa.string())])
MINUTE_MS = 60_000
LARGE = pa.table({"id": list(range(5_000)), "v": ["x" * 30] * 5_000})  # beyond what is kept inline
ERRORS_MS = [-50 * YEAR_MS, -40 * DAY_MS, -20 * MINUTE_MS, -13 * HOUR_MS, 13 * HOUR_MS, 20 * MINUTE_MS, 73 * YEAR_MS]
ERRORS_MS += [40 * DAY_MS]

every_error = pytest.mark.parametrize("off_ms", thinned(ERRORS_MS, 2))


@pytest.fixture
def right(world: World) -> Machine:
    machine = world.machine()
    machine.client.create_shard(NAME, SCHEMA, ["id"]).insert(LARGE)
    return machine


def state_of(machine: Machine) -> State:
    return machine.location.machine(NAME).refresh()


def row(number: int, diff: int = 1) -> list[dict[str, object]]:
    return [{"id": number, "v": "x", "__diff": diff}]


def reader(shard: Shard, since: int = 0) -> ReadLease:
    return shard.open_reader(since)


# --- what a State remembers


@every_error
def test_a_spoilt_state_is_right_after_the_next_commit(world: World, right: Machine, off_ms: int) -> None:
    """After one commit by a clock of 2099 every large write was refused for ever, and so were merges and rollups."""
    world.machine(off_ms).shard(NAME).insert(row(1))
    assert state_of(right).walltime_ms == world.true_ms + off_ms
    shard = right.shard(NAME)
    shard.insert(LARGE)
    assert state_of(right).walltime_ms == world.true_ms
    for number in range(40):
        shard.insert(row(number))
    state = state_of(right)
    assert max(state.rollups) > 1, "upkeep names rollups again"
    assert len(state.trace.batches) < 40, "and merges"
    assert Worker(world.machine().location).run(NAME, idle=True) >= 1


@every_error
def test_a_wrong_clock_does_not_make_a_shard_look_busy_for_ever(world: World, right: Machine, off_ms: int) -> None:
    world.machine(off_ms).shard(NAME).insert(row(1))
    world.machine(off_ms).shard(NAME).insert(row(2))
    worker = Worker(right.location)
    state = state_of(right)
    world.pass_ms(IDLE_MS)
    assert worker._is_idle(state)


# --- leases


def test_two_that_commit_in_turn_do_not_keep_a_dead_reader_for_ever(world: World, right: Machine) -> None:
    """Each sees the other's commits only when it commits, so the lease clock hardly moves. A collector watches."""
    lease, other = reader(right.shard(NAME)), world.machine()
    collector = Collector(world.machine().location)
    for minute in range(20):
        collector.run(NAME)
        world.pass_ms(MINUTE_MS // 2)
        right.shard(NAME).insert(row(minute))
        world.pass_ms(MINUTE_MS // 2)
        other.shard(NAME).insert(row(minute))
    assert lease.reader not in state_of(right).leased_readers


# --- leases that nobody watches for long


def nightly(world: World, nights: int = 2, off_ms: int = 0) -> None:
    for _ in range(nights):
        world.pass_ms(DAY_MS)
        Collector(world.machine(off_ms).location).run(NAME)


def test_a_collector_that_runs_once_a_night_ends_dead_leases(world: World, right: Machine) -> None:
    lease = reader(right.shard(NAME))
    nightly(world)
    assert lease.reader not in state_of(right).leased_readers


@pytest.mark.parametrize("off_ms", [40 * DAY_MS, 73 * YEAR_MS])
def test_one_clock_alone_ends_no_lease(world: World, right: Machine, off_ms: int) -> None:
    lease = reader(right.shard(NAME))
    for _ in range(2):  # the collector's own clock is ahead
        world.pass_ms(HOUR_MS)
        Collector(world.machine(off_ms).location).run(NAME)
        world.machine().location.machine(NAME).apply(c.DowngradeSince(lease.reader, None, lease.seqno))
    machine = right.location.machine(NAME)
    machine.apply(c.AddRollup(state_of(right).seqno, *right.location.versions.write_rollup(state_of(right))))
    world.store_off_ms = off_ms  # the store's is
    Collector(world.machine().location).run(NAME)
    lease.check()


# --- ages that guard deletion


def staged(machine: Machine) -> tuple[tuple[WriteHandle, tuple[Run, ...]], str]:
    """A write handle that has staged rows, and the key of their blob."""
    before = {stat.key for stat in machine.world.blob.list("s")}
    handle = machine.shard(NAME).open_writer()
    runs = handle.stage(LARGE, 0)
    [key] = {stat.key for stat in machine.world.blob.list("s")} - before
    machine.location.machine(NAME).apply(c.ExpireWriter(handle.writer_id))
    return (handle, runs), key


@every_error
def test_a_store_with_a_wrong_clock_loses_nothing_young(world: World, right: Machine, off_ms: int) -> None:
    (handle, runs), key = staged(right)
    world.pass_ms(HOUR_MS)
    world.store_off_ms = off_ms
    Sweeper(world.machine().location).sweep(NAME)
    assert world.blob.stat(key) is not None
    handle.commit_insert(runs)


# --- births of tokens


@every_error
def test_a_token_of_now_is_taken_whatever_the_clock_of_the_machine_that_commits_it(world: World, off_ms: int) -> None:
    """One that was behind refused it as a token of the future."""
    right, wrong = world.machine(), world.machine(off_ms)
    shard = wrong.client.create_shard(NAME, SCHEMA, ["id"])  # so the State knows no other clock
    for number in range(3):
        shard.insert(row(number), token=mint(Token, right.location.ids))
