"""Two builds serve one location at its format version; once it is raised, the older one refuses and harms nothing."""

from __future__ import annotations

import pytest

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.commit.committer import Machine
from persist.commit.location import Location
from persist.commit.location_identity import raise_format, read_format
from persist.core import commands as c
from persist.core.errors import UpgradeNeeded
from persist.core.frontier import Antichain
from persist.core.record import replace
from persist.core.state import State, initial_state
from persist.formats.state_frames import Build, format_of
from tests.support.location import AscendingIds, memory_location
from tests.support.shard import NAME, SCHEMA

OLD = Build()
NEXT = Build(formats=(1, 2), features=frozenset({"colours"}))


class World:
    """One location that processes of this build and of the next one serve."""

    def __init__(self) -> None:
        self.blob, self.consensus = MemoryBlob("mem:"), MemoryConsensus("mem:")
        self.processes = 0

    def process(self, build: Build) -> Location:
        self.processes += 1
        return memory_location(blob=self.blob, consensus=self.consensus, ids=AscendingIds(self.processes), build=build)

    def formats(self) -> list[int]:
        """The format version of every entry of the log."""
        return [format_of(entry.data) for entry in self.consensus.scan(NAME, 1, 100)]


@pytest.fixture
def world() -> World:
    return World()


def first(location: Location, *features: str) -> State:
    return replace(initial_state(NAME, SCHEMA, location.clock.now_ms()), features=features)


def advance(machine: Machine, time: int) -> None:
    machine.apply(c.AdvanceUpper(Antichain(time)))


def test_until_it_is_raised_both_builds_serve_a_location(world: World) -> None:
    ours, theirs = (world.process(build).machine(NAME) for build in (OLD, NEXT))
    ours.create(first(world.process(OLD)))
    for time in range(1, 7):
        advance((ours, theirs)[time % 2], time)
    assert ours.refresh() == theirs.refresh()
    assert set(world.formats()) == {1}


def test_once_it_is_raised_the_older_build_stops_and_writes_nothing(world: World) -> None:
    ours = world.process(OLD)
    ours.machine(NAME).create(first(ours))
    assert raise_format(world.blob, NEXT) == (1, 2)
    advance(world.process(NEXT).machine(NAME), 1)
    assert world.formats() == [1, 2]
    for process in (ours, world.process(OLD)):
        with pytest.raises(UpgradeNeeded, match="format version 2; this version reads format version 1:"):
            advance(process.machine(NAME), 2)
    assert world.formats() == [1, 2]


def test_an_older_build_that_starts_after_it_was_raised_writes_nothing(world: World) -> None:
    ours = world.process(OLD)
    ours.machine(NAME).create(first(ours))
    raise_format(world.blob, NEXT)
    late = world.process(OLD)
    assert late.machine(NAME).state().upper == Antichain(0)  # what is there it can read
    with pytest.raises(UpgradeNeeded, match="this location has format version 2"):
        advance(late.machine(NAME), 1)
    with pytest.raises(UpgradeNeeded):
        late.machine("other").create(first(late))
    assert world.formats() == [1]
    assert world.consensus.keys("", "", 10) == [NAME]


def test_a_running_process_writes_the_new_version_once_it_has_seen_it(world: World) -> None:
    old, early = world.process(OLD), world.process(NEXT)
    old.machine(NAME).create(first(old))
    advance(early.machine(NAME), 1)
    raise_format(world.blob, NEXT)
    advance(early.machine(NAME), 2)  # it has read the version before it was raised
    advance(world.process(NEXT).machine(NAME), 3)
    advance(early.machine(NAME), 4)
    assert world.formats() == [1, 1, 1, 2, 2]


def test_raising_goes_through_every_version_and_may_be_repeated(world: World) -> None:
    later = Build(formats=(1, 2, 3, 4))
    world.blob.put("format/2", b"")  # another administrator is at it
    assert raise_format(world.blob, later) == (2, 4)
    assert raise_format(world.blob, later) == (4, 4)
    assert read_format(world.blob, later) == 4
    with pytest.raises(UpgradeNeeded):
        raise_format(world.blob, NEXT)


def test_a_new_location_has_the_newest_version_of_the_build_that_creates_it(world: World) -> None:
    ours = world.process(NEXT)
    ours.machine(NAME).create(first(ours, "colours"))
    assert world.formats() == [2]
    with pytest.raises(UpgradeNeeded):
        world.process(OLD).machine(NAME).state()


def test_a_build_that_does_not_know_a_feature_of_the_state_stops(world: World) -> None:
    world.process(NEXT).machine(NAME).create(first(world.process(NEXT), "colours"))
    assert world.process(NEXT).machine(NAME).refresh().features == ("colours",)
    with pytest.raises(UpgradeNeeded):
        advance(world.process(Build(formats=(1, 2))).machine(NAME), 1)
    assert world.formats() == [2]
