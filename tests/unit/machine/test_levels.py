"""Two builds serve one location at its level; once it is raised, the older one stops instead of doing harm."""

from __future__ import annotations

from pathlib import Path

import pytest
from persist.commit.levels import raise_level, read_level

from blob.memory import MemoryBlob
from compactor.orphans import Sweeper, SweepSettings
from consensus.memory import MemoryConsensus
from persist.attributes.nodes import PACKED, PLAIN
from persist.cli.__main__ import main
from persist.commit.location import Location
from persist.commit.machine import Machine
from persist.core import commands as c
from persist.core.antichain import Antichain
from persist.core.attribute import AttributeKey, AttributeUpdate
from persist.core.errors import InvalidUsage, UpgradeNeeded
from persist.core.ids import Token, WriterId, mint, token_of_key, writer_of
from persist.core.record import replace
from persist.core.state import Policy, State, initial_state
from persist.formats.state_frames import Build, level_of
from tests.support.clocks import HOUR_MS
from tests.support.clocks import World as Timed
from tests.support.location import AscendingIds, memory_location
from tests.support.shard import NAME, SCHEMA

OLD = Build(levels=(2,))
NEXT = Build(levels=(2, 3), features={"colours": 3})


class World:
    """One location that processes of this build and of the next one serve."""

    def __init__(self) -> None:
        self.blob, self.consensus = MemoryBlob("mem:"), MemoryConsensus("mem:")
        self.processes = 0

    def process(self, build: Build) -> Location:
        self.processes += 1
        return memory_location(blob=self.blob, consensus=self.consensus, ids=AscendingIds(self.processes), build=build)

    def levels(self) -> list[int]:
        """The level of every entry of the log."""
        return [level_of(entry.data) for entry in self.consensus.scan(NAME, 1, 100)]


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
    assert set(world.levels()) == {2}


def test_once_it_is_raised_the_older_build_stops_and_writes_nothing(world: World) -> None:
    ours = world.process(OLD)
    ours.machine(NAME).create(first(ours))
    assert raise_level(world.blob, NEXT) == (2, 3)
    advance(world.process(NEXT).machine(NAME), 1)
    assert world.levels() == [2, 3]
    for process in (ours, world.process(OLD)):
        with pytest.raises(UpgradeNeeded, match="level 3; this persist knows level 2: upgrade it"):
            advance(process.machine(NAME), 2)
    assert world.levels() == [2, 3]


def test_an_older_build_that_starts_after_it_was_raised_writes_nothing(world: World) -> None:
    ours = world.process(OLD)
    ours.machine(NAME).create(first(ours))
    raise_level(world.blob, NEXT)
    late = world.process(OLD)
    assert late.machine(NAME).state().upper == Antichain(0)  # what is there it can read
    with pytest.raises(UpgradeNeeded, match="this location has level 3"):
        advance(late.machine(NAME), 1)
    with pytest.raises(UpgradeNeeded):
        late.machine("other").create(first(late))
    assert world.levels() == [2]
    assert world.consensus.keys("", "", 10) == [NAME]


def test_a_running_process_writes_the_new_level_once_it_has_seen_it(world: World) -> None:
    old, early = world.process(OLD), world.process(NEXT)
    old.machine(NAME).create(first(old))
    advance(early.machine(NAME), 1)
    raise_level(world.blob, NEXT)
    advance(early.machine(NAME), 2)  # it has read the level before it was raised
    advance(world.process(NEXT).machine(NAME), 3)
    advance(early.machine(NAME), 4)
    assert world.levels() == [2, 2, 2, 3, 3]


def test_nothing_that_level_2_does_not_hold_is_carried_over_into_level_3() -> None:
    """A process kept outcomes, and a file of them, that no log named. Its later commits named the file, then swept."""
    world = Timed(OLD, Policy(outcomes_flush_at=20, outcomes_overlay_max=40))
    first = world.machine().location.machine(NAME)
    first.create(initial_state(NAME, SCHEMA, world.true_ms))
    world.build = NEXT
    ours, theirs = world.machine().location, world.machine().location
    machine = ours.machine(NAME)
    for _ in range(25):
        world.pass_ms(1000)
        writer = mint(WriterId, ours.ids)
        machine.apply(c.RegisterWriter(writer, 60_000))
        machine.apply(c.UpdateAttributes(writer, mint(Token, ours.ids), ()))
        machine.apply(c.ExpireWriter(writer))
    assert machine.cached == theirs.machine(NAME).refresh()
    flushed = [stat.key for stat in ours.blob.list("") if stat.key.endswith(".outcomes")]
    assert flushed == []
    world.pass_ms(30 * HOUR_MS)
    raise_level(ours.blob, NEXT)
    restarted = world.machine().location
    advance(restarted.machine(NAME), 1)
    Sweeper(restarted, SweepSettings()).sweep(NAME)
    for number in range(60):
        world.pass_ms(1000)
        token = token_of_key(f"{number}")
        (ours, theirs)[number % 2].machine(NAME).apply(c.UpdateAttributes(writer_of(token), token, ()))
    state = world.machine().location.machine(NAME).refresh()
    assert state.outcome_files
    assert all(ours.blob.stat(key) is not None for key in state.blob_keys())
    assert machine.refresh() == state


def test_a_feature_waits_for_its_level_and_stops_builds_that_do_not_know_it(world: World) -> None:
    old, location = world.process(OLD), world.process(NEXT)
    old.machine("other").create(replace(first(old), name="other"))
    with pytest.raises(InvalidUsage, match="colours needs level 3, and this location has level 2: run `persist upg"):
        location.machine(NAME).create(first(location, "colours"))
    assert world.consensus.keys("", "", 10) == ["other"]
    raise_level(world.blob, NEXT)
    location = world.process(NEXT)
    location.machine(NAME).create(first(location, "colours"))
    assert location.machine(NAME).refresh().features == ("colours",)
    forgetful = world.process(Build(levels=(2, 3)))
    with pytest.raises(UpgradeNeeded, match="needs colours, which this persist does not know"):
        advance(forgetful.machine(NAME), 1)
    assert world.levels() == [3]


def test_raising_goes_through_every_level_and_may_be_repeated(world: World) -> None:
    later = Build(levels=(2, 3, 4, 5, 6, 7))
    world.blob.put("level/3", b"")  # another administrator is at it
    assert raise_level(world.blob, later) == (3, 7)
    assert raise_level(world.blob, later) == (7, 7)
    assert read_level(world.blob, later) == 7
    with pytest.raises(UpgradeNeeded):
        raise_level(world.blob, NEXT)


def test_a_new_location_has_the_newest_level_of_the_build_that_first_uses_it(world: World) -> None:
    ours = world.process(NEXT)
    ours.machine(NAME).create(first(ours, "colours"))
    assert world.levels() == [3]
    with pytest.raises(UpgradeNeeded):
        world.process(OLD).machine(NAME).state()


def test_the_command_says_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ["upgrade", "--dir", str(tmp_path)]
    assert main(where) == 0
    assert capsys.readouterr().out == "level 2 raised to 6\n"
    assert main(where) == 0
    assert capsys.readouterr().out == "level 6: nothing to do\n"
    monkeypatch.setattr("persist.cli.upgrade.THIS_BUILD", OLD)
    assert main(where) == 1
    assert "this location has level 6; this persist knows level 2: upgrade it" in capsys.readouterr().err


def test_the_attribute_index_is_packed_once_the_location_is_raised() -> None:
    """Both builds read each other's nodes until then; what lies there is read afterwards."""
    before = Build(levels=(2, 3, 4, 5))
    world = Timed(before, Policy(attributes_flush_at=10))
    first = world.machine().location.machine(NAME)
    first.create(initial_state(NAME, SCHEMA, world.true_ms))
    world.build = Build(levels=(2, 3, 4, 5, 6))
    ours = world.machine().location
    assert ours.versions.level == 5

    def change(machine: Machine, first: int) -> set[int]:
        """Change a flush's worth of attributes; the versions of all nodes that the shard then names."""
        token = token_of_key(f"{first}")
        updates = tuple(
            AttributeUpdate.replace(number.to_bytes(16, "big"), first)
            for number in range(first << 64, (first << 64) + 12)
        )
        machine.apply(c.UpdateAttributes(writer_of(token), token, updates))
        assert not machine.state().attributes
        chunks = machine.state().attribute_chunks.values()
        return {ours.blob.get(chunk.key)[1] for chunk in chunks}

    assert change(ours.machine(NAME), 100) == {PLAIN}
    assert change(first, 200) == {PLAIN}
    raise_level(ours.blob, world.build)
    raised = world.machine().location.machine(NAME)
    assert PACKED in change(raised, 300)
    keys = tuple(AttributeKey(number.to_bytes(16, "big").hex()) for number in (100 << 64, 200 << 64, (300 << 64) + 11))
    answer = raised.apply(c.ReadAttributes(keys))
    assert isinstance(answer, c.AttributeValues)
    assert list(answer.values.values()) == [100, 200, 300]
    with pytest.raises(UpgradeNeeded):
        first.refresh()
