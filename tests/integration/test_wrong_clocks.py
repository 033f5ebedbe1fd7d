"""A clock that is wrong harms nobody but its owner, whatever its error: leases, ages, and what a State remembers."""

from __future__ import annotations

import pyarrow as pa
import pytest

from compactor.orphans import Sweeper
from compactor.worker import Worker
from persist import Expired, OutcomeForgotten, ReadLease, Shard, Token, WriteHandle
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
    world.pass_ms(worker.settings.idle_ms)
    assert worker._is_idle(state)


# --- leases


@every_error
def test_a_wrong_clock_ends_no_lease(world: World, right: Machine, off_ms: int) -> None:
    shard, bad = right.shard(NAME), world.machine(off_ms)
    lease, listener = reader(shard), shard.listen(None)
    inputs = tuple(part.id for part in state_of(right).trace.parts())
    right.location.machine(NAME).apply(c.HoldClaim("merge:[0]", "alice", MINUTE_MS, inputs))
    bad.shard(NAME).insert(row(1))
    bad.location.machine(NAME).apply(c.ForgetLapsed())
    Collector(bad.location).run(NAME)
    assert lease.reader in state_of(right).leased_readers
    taken = bad.location.machine(NAME).apply(c.HoldClaim("merge:[0]", "bob", MINUTE_MS, inputs))
    assert taken == c.Claimed(False, "alice")
    lease.check()
    assert sum(len(event.updates) for event in listener.next_events(0)) == len(LARGE) + 1


def test_one_jump_of_a_monotonic_clock_ends_no_lease_that_is_kept(world: World, right: Machine) -> None:
    lease, broken = reader(right.shard(NAME)), world.machine()
    state_of(broken)
    for _ in range(3):
        broken.clock.stood_still_ms -= DAY_MS
        broken.shard(NAME).insert(row(1))
        world.pass_ms(5 * MINUTE_MS)
        lease.keep()
    lease.check()


def test_a_lease_that_was_renewed_since_is_not_judged_by_an_older_state(world: World, right: Machine) -> None:
    """A process that watched for an hour meets a renewal of a minute ago, by one that had just started."""
    lease = reader(right.shard(NAME))
    watching = world.machine()
    state_of(watching)
    world.pass_ms(14 * MINUTE_MS)
    world.machine().location.machine(NAME).apply(c.DowngradeSince(lease.reader, None, lease.seqno))
    world.pass_ms(2 * MINUTE_MS)
    watching.shard(NAME).insert(row(1))
    assert lease.reader in state_of(right).leased_readers


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
def test_a_sweeper_with_a_wrong_clock_takes_nothing_young(world: World, right: Machine, off_ms: int) -> None:
    (handle, runs), key = staged(right)
    world.pass_ms(11 * HOUR_MS)
    Sweeper(world.machine(off_ms).location).sweep(NAME)
    assert world.blob.stat(key) is not None
    handle.commit_insert(runs)
    assert right.shard(NAME).snapshot().to_arrow().num_rows > 0


@every_error
def test_a_store_with_a_wrong_clock_loses_nothing_young(world: World, right: Machine, off_ms: int) -> None:
    (handle, runs), key = staged(right)
    world.pass_ms(HOUR_MS)
    world.store_off_ms = off_ms
    Sweeper(world.machine().location).sweep(NAME)
    assert world.blob.stat(key) is not None
    handle.commit_insert(runs)


def test_what_was_swept_is_refused_by_every_clock(world: World, right: Machine) -> None:
    slow = world.machine(-YEAR_MS // 2)
    (handle, runs), key = staged(right)
    world.pass_ms(25 * HOUR_MS)
    assert Sweeper(world.machine().location).sweep(NAME).deleted == 1
    assert world.blob.stat(key) is None
    with pytest.raises(Expired, match="stage its rows again"):
        handle.commit_insert(runs)
    other = slow.shard(NAME).open_writer()
    with pytest.raises(Expired, match="stage its rows again"):
        other.commit_insert(runs)


# --- listeners whose hold is gone


def changes(shard: Shard) -> None:
    for old, new in (("", "a"), ("a", "b"), ("b", "c")):
        rows = [{"id": 1, "v": old, "__diff": -1}] if old else []
        shard.insert([*rows, {"id": 1, "v": new, "__diff": 1}])


def move_on(machine: Machine, since: int) -> None:
    """Nobody but a job holds history: since moves on, and what it has passed is merged."""
    machine.shard(NAME).critical_reader("job").downgrade_since(since)
    Worker(machine.location).run(NAME, idle=True)


def test_a_listener_that_was_suspended_says_expired_before_it_gives_anything(world: World, right: Machine) -> None:
    """It was given one row twice, and the changes of another never: its own clock had stood still."""
    sleeper = world.machine()
    listener = sleeper.shard(NAME).listen(None)
    list(listener.next_events(0))
    sleeper.suspended(20 * MINUTE_MS)
    state_of(right)
    for _ in range(2):
        world.pass_ms(10 * MINUTE_MS)
        sleeper.clock.stood_still_ms += 10 * MINUTE_MS
        right.shard(NAME).insert(row(7))
    changes(right.shard(NAME))
    move_on(right, 5)
    with pytest.raises(Expired, match="hold"):
        list(listener.next_events(0))


def test_a_snapshot_that_waited_while_its_shard_was_dropped_says_expired(world: World, right: Machine) -> None:
    class Impatient:
        """Drops the shard while the snapshot waits."""

        def __init__(self) -> None:
            self.inner = right.client.transport

        def __getattr__(self, name: str) -> object:
            return getattr(self.inner, name)

        def view(self, name: str, request: object) -> object:
            right.shard(NAME).drop(force=True)
            return self.inner.view(name, request)  # type: ignore[arg-type]

    shard = right.shard(NAME)
    shard._transport = Impatient()  # type: ignore[assignment]
    with pytest.raises(Expired):
        shard.snapshot(0)


# --- births of tokens


@every_error
def test_a_token_of_now_is_taken_whatever_the_clock_of_the_machine_that_commits_it(world: World, off_ms: int) -> None:
    """One that was behind refused it as a token of the future."""
    right, wrong = world.machine(), world.machine(off_ms)
    shard = wrong.client.create_shard(NAME, SCHEMA, ["id"])  # so the State knows no other clock
    for number in range(3):
        shard.insert(row(number), token=mint(Token, right.location.ids))


def test_a_token_of_the_future_is_refused_by_two_clocks(world: World, right: Machine) -> None:
    with pytest.raises(OutcomeForgotten, match="minted in the future"):
        right.shard(NAME).insert(row(1), token=mint(Token, world.machine(40 * DAY_MS).location.ids))
