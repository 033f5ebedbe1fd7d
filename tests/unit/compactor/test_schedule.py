"""Shards that are due come by a heap, and all the others in turn: a bounded number of them in a second."""

from __future__ import annotations

import pytest

from compactor.loop import FAILED_AGAIN_S, NAMES_PAGE, STALE_MIN, Loop, NameScan, Schedule
from persist.core.errors import Unavailable
from tests.support.location import memory_location


def names_of(count: int) -> list[str]:
    return [f"s{n:05d}" for n in range(count)]


class Names:
    """A location that lists these names, and how many pages of them were read."""

    def __init__(self, names: list[str]) -> None:
        self.names, self.pages, self.fails = names, 0, False

    def __call__(self, after: str, limit: int) -> list[str]:
        if self.fails:
            raise Unavailable("the store is away")
        self.pages += 1
        return [name for name in self.names if name > after][:limit]


def test_those_that_waited_longest_come_first_and_only_when_they_are_due() -> None:
    schedule = Schedule()
    for name, at_s in (("b", 2.0), ("a", 1.0), ("c", 9.0), ("a", 5.0)):
        schedule.want(name, at_s)
    assert schedule.idle_s(0.5) == 0.5
    assert schedule.take(3.0, 1, 1) == ["a"]
    assert schedule.take(3.0, 5, 1) == ["b"]
    assert schedule.idle_s(3.0) == 6.0
    for name in ("a", "b"):
        schedule.end_visit(name)
    assert len(schedule) == 1


def test_one_at_which_enough_are_at_work_comes_when_one_of_them_has_ended() -> None:
    schedule = Schedule()
    schedule.want("a", 1.0)
    assert schedule.take(1.0, 5, 1) == ["a"]
    schedule.want("a", 1.0)
    assert schedule.take(2.0, 5, 1) == []
    assert schedule.idle_s(2.0) is None
    schedule.end_visit("a")
    assert schedule.take(2.0, 5, 1) == ["a"]
    schedule.want("a", 3.0)
    assert schedule.take(3.0, 5, 2) == ["a"]


def test_an_earlier_time_replaces_a_later_one_and_the_heap_stays_small() -> None:
    schedule = Schedule()
    for at_s in range(10 * STALE_MIN, 0, -1):
        schedule.want("a", float(at_s))
    assert len(schedule._heap) <= STALE_MIN + 2
    assert schedule.take(1.0, 5, 1) == ["a"]
    schedule.end_visit("a")
    assert schedule.take(1e9, 5, 1) == []


def drawn(scan: NameScan, now_s: float) -> list[str]:
    return [name for name, _ in scan.draw(now_s)]


def test_the_first_round_is_as_fast_as_it_is_asked_for() -> None:
    scan = NameScan(Names(names_of(2_500)), lambda _: True, 600.0, 5.0)
    found: list[tuple[str, float]] = []
    while page := scan.draw(0.0):
        found += page
    assert found == [(name, 0.0) for name in names_of(2_500)]
    assert scan.next_s == 600.0


def test_a_later_round_gives_so_many_a_second_and_goes_on_for_longer_than_its_period() -> None:
    names = Names(names_of(NAMES_PAGE + 100))
    scan = NameScan(names, lambda _: True, 10.0, 5.0)
    assert len(scan.draw(0.0)) + len(scan.draw(0.0)) == len(names.names)
    found = scan.draw(10.0)
    assert scan.next_s == 10.0 + NAMES_PAGE / 5
    found += scan.draw(scan.next_s)
    assert [name for name, _ in found] == names.names
    assert [at_s for _, at_s in found] == pytest.approx([10.0 + number / 5 for number in range(len(found))])
    assert scan.next_s == pytest.approx(10.0 + len(names.names) / 5)
    assert names.pages == 4


def test_a_round_without_a_pace_begins_when_its_time_has_come() -> None:
    scan = NameScan(Names(names_of(3)), lambda _: True, 5.0, None)
    assert (drawn(scan, 0.0), drawn(scan, 4.9), drawn(scan, 5.0)) == (names_of(3), [], names_of(3))


def test_names_that_are_not_wanted_cost_a_page_at_a_time() -> None:
    names = Names(names_of(3 * NAMES_PAGE))
    last = names.names[-1]
    scan = NameScan(names, lambda name: name == last, 600.0, 5.0)
    found = [drawn(scan, 0.0) for _ in range(4)]
    assert (found, names.pages) == ([[], [], [last], []], 4)


def test_a_round_goes_on_where_the_names_could_not_be_read() -> None:
    names = Names(names_of(2 * NAMES_PAGE))
    scan = NameScan(names, lambda _: True, 600.0, None)
    assert len(scan.draw(0.0)) == NAMES_PAGE
    names.fails = True
    with pytest.raises(Unavailable):
        scan.draw(1.0)
    names.fails = False
    assert scan.draw(2.0) == []
    assert drawn(scan, 1.0 + FAILED_AGAIN_S) == names_of(2 * NAMES_PAGE)[NAMES_PAGE:]


@pytest.mark.parametrize("room", [1, 2, 5])
def test_shards_that_move_all_the_time_keep_none_at_rest_from_being_looked_at(room: int) -> None:
    """There are more of them than can be looked at, and all of them are due again at once."""
    location = memory_location()
    loop = Loop(location, lambda _: None, concurrency=room)
    scan = NameScan(Names(names_of(20)), lambda _: True, 600.0, 5.0)
    found: list[str] = []
    for now in range(200):
        for busy in range(room + 3):
            loop._schedule.want(f"busy{busy}", float(now))
        looked = loop._due(scan, float(now), room)
        assert len(looked) == room
        found += looked
        for name in looked:
            loop._schedule.end_visit(name)
    assert set(names_of(20)) <= set(found)
    assert sum(name.startswith("busy") for name in found) > len(found) / 2
    location.close()


def test_a_long_visit_does_not_hold_up_the_scan() -> None:
    location = memory_location()
    loop = Loop(location, lambda _: None, concurrency=30)
    scan = NameScan(Names(names_of(20)), lambda _: True, 5.0, None)
    assert sorted(loop._due(scan, 0.0, 30)) == names_of(20)
    long, *others = names_of(20)
    for now in (10.0, 20.0, 30.0):
        for name in others:
            loop._schedule.end_visit(name)
        assert sorted(loop._due(scan, now, 30)) == others, f"{long} is still visited"
    location.close()
