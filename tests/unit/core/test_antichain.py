"""Frontiers are totally ordered, with the closed one greatest; meet and join are its lattice."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.core.errors import InvalidUsage
from persist.core.frontier import EMPTY, MINIMUM, TIME_MAX, Antichain, frontier, join, meet
from tests.unit.core.strategies import antichains, times


@given(antichains, antichains, antichains)
def test_the_order_is_total(a: Antichain, b: Antichain, c: Antichain) -> None:
    assert (a < b) + (a == b) + (b < a) == 1
    assert (a <= b) == (not b < a)
    if a <= b and b <= c:
        assert a <= c


@given(antichains)
def test_the_bounds(a: Antichain) -> None:
    assert MINIMUM <= a <= EMPTY


@given(antichains, antichains, antichains)
def test_the_lattice(a: Antichain, b: Antichain, c: Antichain) -> None:
    assert meet([a, b]) == meet([b, a])
    assert meet([a, meet([b, c])]) == meet([meet([a, b]), c]) == meet([a, b, c])
    assert join(a, b) == join(b, a)
    assert join(a, join(b, c)) == join(join(a, b), c)
    assert meet([a, join(a, b)]) == a == join(a, meet([a, b]))
    assert meet([a, a]) == a == join(a, a)


@given(st.lists(antichains))
def test_a_meet_is_the_greatest_lower_bound(held: list[Antichain]) -> None:
    lowest = meet(held)
    assert all(lowest <= a for a in held)
    assert lowest in held if held else lowest == EMPTY


@given(antichains, antichains, times)
def test_passing_a_frontier_agrees_with_the_order(a: Antichain, b: Antichain, time: int) -> None:
    assert a.less_equal(time) == (a <= Antichain(time))
    if a <= b and b.less_equal(time):
        assert a.less_equal(time)
    assert not EMPTY.less_equal(time)


@given(antichains)
def test_json_round_trip(a: Antichain) -> None:
    assert Antichain.from_json(a.to_json()) == a
    assert str(a) == str(a.to_json())
    assert frontier(a) is a
    assert frontier(a.element) == a


def test_the_last_time_can_be_passed_without_closing() -> None:
    assert Antichain(TIME_MAX + 1) < EMPTY
    assert not Antichain(TIME_MAX + 1).less_equal(TIME_MAX)


@pytest.mark.parametrize("element", [-1, TIME_MAX + 2, True, 1.0, "1"])
def test_what_is_no_time(element: object) -> None:
    with pytest.raises(InvalidUsage):
        frontier(element)  # type: ignore[arg-type]
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert([element], Antichain)


@pytest.mark.parametrize("value", [None, 7, "[7]", [7, 8], [None], ["7"], {}, [[7]], [7.0], (7,)])
def test_what_is_no_frontier(value: object) -> None:
    with pytest.raises(InvalidUsage):
        Antichain.from_json(value)


def test_a_frontier_of_no_time_is_no_frontier() -> None:
    with pytest.raises(InvalidUsage):
        frontier(Antichain(-1))
