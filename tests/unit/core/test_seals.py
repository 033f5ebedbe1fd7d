"""The seal of a commit: it moves where a point of the grid is settled, and costs nothing in between."""

from __future__ import annotations

import pytest

from persist.core.clock_index import NEWBORN, UNSEALED, Mark, Seal, lowered, passed_by, sealed_by
from persist.core.frontier import Antichain

EVERY_MS = 1_000
DAY_MS = 86_400_000
SEALED = Seal(10_200, Mark(10_000, Antichain(3)))


@pytest.mark.parametrize("checked_ms", [9_000, 10_199, 10_200, 10_201, 10_999])
def test_a_stamp_before_the_next_point_leaves_the_seal_as_it_is(checked_ms: int) -> None:
    assert sealed_by(SEALED, Antichain(4), checked_ms, EVERY_MS) is SEALED


@pytest.mark.parametrize("checked_ms", [11_000, 11_700, 99_999])
def test_the_first_stamp_beyond_a_point_settles_it_with_the_upper_before_the_commit(checked_ms: int) -> None:
    found = sealed_by(SEALED, Antichain(4), checked_ms, EVERY_MS)
    assert found == Seal(checked_ms, Mark(11_000, Antichain(4)))
    assert sealed_by(SEALED, Antichain(3), checked_ms, EVERY_MS) == Seal(checked_ms, SEALED.last)


def test_the_first_stamps_of_old_and_of_new_shards() -> None:
    assert sealed_by(UNSEALED, Antichain(4), 10_200, EVERY_MS) == Seal(10_200)
    assert sealed_by(NEWBORN, Antichain(0), 10_200, EVERY_MS) == Seal(10_200, NEWBORN.last)


def test_what_is_settled_is_told_at_every_instant_up_to_the_next_point() -> None:
    """The seal is that of the first stamp, and what is known reaches as far as with each of the later ones."""
    assert SEALED.known_ms(EVERY_MS) == Seal(10_999, SEALED.last).known_ms(EVERY_MS) == 10_999


@pytest.mark.parametrize("checked_ms", [10_100, 10_700])
def test_rows_without_a_checked_stamp_show_from_the_next_point_on(checked_ms: int) -> None:
    passed = passed_by(SEALED, Antichain(5))
    dated = sealed_by(passed, Antichain(9), checked_ms, EVERY_MS)
    assert dated == SEALED, "they had come by then"
    assert sealed_by(dated, Antichain(9), 11_500, EVERY_MS).last == Mark(11_000, Antichain(9))
    assert sealed_by(passed, Antichain(9), 11_500, EVERY_MS).last == Mark(11_000, Antichain(5))


def test_beyond_a_repair_instants_are_settled_although_the_grid_is_coarser_now() -> None:
    """What was lowered from is no point of the new grid. A stamp beyond it settles what lies before the next point."""
    repaired = lowered(Seal(50_200, Mark(10_000, Antichain(3))), 20_000, EVERY_MS)
    assert (repaired.sealed_ms, repaired.floor_ms) == (20_000, 50_999)
    found = sealed_by(repaired, Antichain(4), 60_000, DAY_MS)
    assert (found.sealed_ms, found.last) == (60_000, repaired.last)
    assert found.known_ms(DAY_MS) == DAY_MS - 1
    assert sealed_by(found, Antichain(5), 70_000, DAY_MS) is found
