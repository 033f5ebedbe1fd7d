"""The cached State only moves forward, and those who wait for it hear of every move."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from consensus.memory_logs import MemoryConsensus
from persist.commit.cached_state import CachedState
from persist.commit.committer import Machine
from persist.core import commands as c
from persist.core.errors import InvalidUsage, UnknownShard
from persist.core.frontier import Antichain
from persist.core.state import State, initial_state
from tests.support.location import AscendingIds, memory_location
from tests.support.shard import NAME, SCHEMA
from tests.support.waiting import WAIT_S


@pytest.fixture
def machines() -> tuple[Machine, Machine]:
    """Two machines of one shard, in two processes."""
    here = memory_location(consensus=MemoryConsensus())
    there = memory_location(consensus=here.consensus, blob=here.blob, ids=AscendingIds(1))
    here.machine(NAME).create(initial_state(NAME, SCHEMA, 0))
    return here.machine(NAME), there.machine(NAME)


def advance(machine: Machine, upper: int) -> None:
    machine.apply(c.AdvanceUpper(Antichain(upper)))


def is_past(upper: int) -> Callable[[State], bool]:
    return lambda state: not state.upper.less_equal(upper)


def test_the_cached_state_may_be_stale_and_a_refreshed_one_is_not(machines: tuple[Machine, Machine]) -> None:
    here, there = machines
    advance(there, 7)
    assert here.state().upper == Antichain(0)
    assert here.refresh().upper == Antichain(7)
    assert here.state() is here.cached


def test_a_shard_that_does_not_exist_has_no_state() -> None:
    location = memory_location()
    shard = CachedState("nothing", location.versions, location.clock)
    assert shard.cached is None
    with pytest.raises(UnknownShard, match="there is no shard 'nothing' here"):
        shard.refresh()
    shard.refresh_quietly()


def test_an_older_state_does_not_replace_a_newer_one(machines: tuple[Machine, Machine]) -> None:
    here, _ = machines
    older = here.state()
    advance(here, 7)
    assert here.publish(older) is here.state()
    assert here.state().upper == Antichain(7)


def test_watchers_hear_of_every_move_until_they_stop(machines: tuple[Machine, Machine]) -> None:
    here, there = machines
    heard: list[State] = []
    assert not here.is_watched
    stop = here.watch(heard.append)
    assert here.is_watched
    advance(here, 1)
    advance(there, 2)
    here.refresh()
    here.refresh()
    assert [state.upper.element for state in heard] == [1, 2]
    stop()
    stop()
    advance(here, 3)
    assert len(heard) == 2
    assert not here.is_watched


def test_a_waiter_gets_what_is_there_when_its_time_is_over(machines: tuple[Machine, Machine]) -> None:
    here, there = machines
    advance(there, 1)
    assert here.wait_for(is_past(0), 0, 1).upper == Antichain(1)
    assert here.wait_for(is_past(5), 0, 1).upper == Antichain(1)


def test_a_waiter_is_woken_by_commits_of_its_own_process(machines: tuple[Machine, Machine]) -> None:
    here, _ = machines
    found: list[State] = []
    waiting = threading.Event()

    def ready(state: State) -> bool:
        waiting.set()
        return is_past(5)(state)

    waiter = threading.Thread(target=lambda: found.append(here.wait_for(ready, 60, 60)))
    waiter.start()
    assert waiting.wait(WAIT_S)
    advance(here, 3)
    advance(here, 6)
    waiter.join(WAIT_S)
    assert [state.upper for state in found] == [Antichain(6)]


def test_a_wait_that_begins_after_the_end_ends_at_once(machines: tuple[Machine, Machine]) -> None:
    here, _ = machines

    def check_open() -> None:
        raise InvalidUsage("it was closed")

    here.end_waits(check_open)
    with pytest.raises(InvalidUsage, match="closed"):
        here.wait_for(is_past(5), 600, 600)
    advance(here, 1)  # as a commit that is under way
    assert here.state().upper == Antichain(1)


class Following(MemoryConsensus):
    """A store that tells which keys are followed."""

    def __init__(self) -> None:
        super().__init__()
        self.followed: list[str] = []

    def follow(self, key: str) -> Callable[[], None]:
        self.followed.append(key)
        return lambda: self.followed.remove(key)


def test_the_store_is_told_which_shards_are_followed_while_somebody_waits() -> None:
    store = Following()
    machine = memory_location(consensus=store).machine(NAME)
    machine.create(initial_state(NAME, SCHEMA, 0))
    assert store.followed == []
    first, second = machine.watch(lambda _: None), machine.watch(lambda _: None)
    machine.wait_for(lambda _: store.followed == [NAME], 0.0, 1.0)
    first()
    first()
    assert store.followed == [NAME]
    second()
    assert store.followed == []
    machine.wait_for(lambda _: store.followed == [NAME], WAIT_S, 1.0)
    assert store.followed == []
