"""Which machines a location keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.commit.location import EVICTIONS_TRIED_MAX, Location
from persist.core.errors import UnknownShard
from persist.core.state import initial_state
from tests.support.location import InlineBackground
from tests.support.shard import SCHEMA


@pytest.fixture
def location_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Location]:
    def opened(machines_max: int) -> Location:
        monkeypatch.setattr("persist.commit.location.MACHINES_MAX", machines_max)
        return Location(MemoryBlob(), MemoryConsensus(), background=InlineBackground())

    return opened


def create(location: Location, *names: str) -> None:
    for name in names:
        location.machine(name).create(initial_state(name, SCHEMA, 0))


def kept(location: Location) -> set[str]:
    return {machine.name for machine in location.machines()}


def test_what_was_not_used_for_longest_goes_first(location_of: Callable[[int], Location]) -> None:
    location = location_of(3)
    create(location, "a", "b", "c")
    location.machine("a")
    create(location, "d")
    assert kept(location) == {"a", "c", "d"}


def test_names_without_a_shard_do_not_push_shards_out(location_of: Callable[[int], Location]) -> None:
    """A machine was kept for whatever name was asked for: unknown ones filled the cache."""
    location = location_of(40)
    shards = [f"s{number}" for number in range(38)]
    create(location, *shards)
    for number in range(100):
        with pytest.raises(UnknownShard):
            location.machine(f"unknown{number % 60}").refresh()
    assert kept(location) >= set(shards)
    assert len(kept(location)) <= 40


def test_what_somebody_watches_stays_and_goes_when_nobody_does(location_of: Callable[[int], Location]) -> None:
    location = location_of(3)
    names = [f"s{number}" for number in range(2 * EVICTIONS_TRIED_MAX)]
    create(location, *names[:3])
    stops = [location.machine(name).watch(lambda _: None) for name in names[:3]]
    machines = [location.machine(name) for name in names[:3]]
    for name in names[3:]:
        create(location, name)
        stops.append(location.machine(name).watch(lambda _: None))
    assert kept(location) == set(names)
    assert [location.machine(name) for name in names[:3]] == machines
    for stop in stops:
        stop()
    create(location, "a", "b", "c")
    assert kept(location) == {"a", "b", "c"}
