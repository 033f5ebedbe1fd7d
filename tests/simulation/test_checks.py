"""The checks that need histories only: each passes what may happen, and refuses the smallest thing that must not."""

from __future__ import annotations

import pytest

from persist.core.attribute import AttributeUpdate, named_key
from persist.core.frontier import Antichain
from persist.core.record import replace
from persist.core.shard_settings import ShardSettings
from persist.core.state import State, blank_state
from tests.simulation.attributed import AttributeTruth
from tests.simulation.fencing import FenceOp, check_fenced
from tests.simulation.history import (
    Read,
    check_ascending,
    check_configured,
    check_definite,
    check_dropped,
    check_linearisable,
)
from tests.simulation.instants import InstantTruth, Made
from tests.simulation.oracle import Violation, Write

KEY = named_key("key")


def write(number: int, kind: str, span: tuple[int, int], told: tuple[int, int] | None, **fields: object) -> Write:
    answer = "ok" if told else "refused"
    return Write(number, kind, "w", "s", [], invoked=span[0], returned=span[1], answer=answer, told=told, **fields)  # type: ignore[arg-type]


def test_a_since_that_falls_is_refused() -> None:
    check_ascending([("s", "a", 1, 4, 7), ("s", "b", 2, 3, 5)])  # at the same time: either may come first
    check_ascending([("s", "a", 1, 2, 7), ("s", "b", 3, 4, None)])
    with pytest.raises(Violation, match="monotone"):
        check_ascending([("s", "a", 1, 2, 7), ("s", "b", 3, 4, 6)])
    with pytest.raises(Violation, match="monotone"):
        check_ascending([("s", "a", 1, 2, None), ("s", "b", 3, 4, 6)])


def test_reads_of_one_time_that_differ_are_refused() -> None:
    one, other = frozenset({(("k", 1), 1)}), frozenset({(("k", 1), 2)})
    check_definite([Read("s", 1, "a", one), Read("s", 2, "b", other), Read("s", 1, "b", one)])
    with pytest.raises(Violation, match="definite"):
        check_definite([Read("s", 1, "a", one), Read("s", 1, "b", other)])


def test_intervals_that_overlap_and_uppers_that_fall_are_refused() -> None:
    first = write(1, "compare_and_append", (1, 2), (0, 3))
    check_linearisable([first, write(2, "compare_and_append", (1, 5), (3, 4))], [])
    with pytest.raises(Violation, match="linearisable"):
        check_linearisable([first, write(2, "compare_and_append", (1, 5), (2, 4))], [])
    with pytest.raises(Violation, match="linearisable"):
        check_linearisable([first], [("s", "a", 3, 4, 0)])
    with pytest.raises(Violation, match="nobody made"):
        check_linearisable([first], [("s", "a", 3, 4, 9)])


def test_a_write_after_a_drop_is_refused() -> None:
    check_dropped([write(1, "insert", (1, 9), (0, 1))], {"s": 5})
    with pytest.raises(Violation, match="dropped"):
        check_dropped([write(1, "insert", (6, 9), (0, 1))], {"s": 5})


def test_a_cursor_that_two_move_on_from_one_token_is_refused() -> None:
    first = FenceOp("c", "a", 1, 2, "", "a1", "ok")
    check_fenced([first, FenceOp("c", "b", 3, 4, "a1", "b1", "ok"), FenceOp("c", "a", 5, 6, seen="b1")])
    check_fenced([first, FenceOp("c", "b", 3, 4, "a1", "b1", None), FenceOp("c", "a", 5, 6, seen="b1")])
    with pytest.raises(Violation, match="both moved"):
        check_fenced([first, FenceOp("c", "b", 1, 4, "", "b1", "ok")])
    with pytest.raises(Violation, match="was refused, but moved"):
        check_fenced([first, FenceOp("c", "b", 3, 4, "a1", "b1", "refused"), FenceOp("c", "a", 5, 6, seen="b1")])
    with pytest.raises(Violation, match="after the token"):
        check_fenced([first, FenceOp("c", "b", 3, 4, seen="")])
    with pytest.raises(Violation, match="which nobody made"):
        check_fenced([first, FenceOp("c", "b", 3, 4, seen="b7")])


def test_attributes_follow_from_some_order_of_the_commands_of_a_commit() -> None:
    truth = AttributeTruth()
    add = (AttributeUpdate.accumulate(KEY, 2),)
    swap = (AttributeUpdate.replace_if_equals(KEY, 9, 2),)
    truth.land([swap, add], {KEY: 9}, tick=5)
    truth.check([(KEY, None)], 1, 5)
    truth.check([(KEY, 2), (KEY, 9)], 4, 6)
    for wrong in (None, 2):
        with pytest.raises(Violation, match="attribute"):
            truth.check([(KEY, wrong)], 6, 7)
    with pytest.raises(Violation, match="cannot have led"):
        truth.land([swap], {KEY: 9}, tick=8)


def test_a_version_of_settings_that_two_made_is_refused() -> None:
    short, long = ShardSettings(1_000, version=2), ShardSettings(9_000, version=2)
    check_configured([("s", "a", short), ("s", "b", short), ("other", "b", long)])
    with pytest.raises(Violation, match="settings"):
        check_configured([("s", "a", short), ("s", "b", long)])


def instants(off_ms: int = 0) -> InstantTruth:
    """Upper 5 came at 10,000 ms, and 7 at 20,000 ms; the grid is a second."""
    truth = InstantTruth(off_ms=lambda: off_ms, grids_ms={1_000})
    truth.made += [Made(9_900, 10_000, 5, dated=True), Made(19_900, 20_000, 7, dated=True)]
    return truth


def test_an_instant_that_is_answered_in_two_ways_is_refused() -> None:
    truth = instants(off_ms=5_000)
    truth.answered(16_000, Antichain(5), "a")
    with pytest.raises(Violation, match="and was 5 for a"):
        truth.answered(16_000, Antichain(7), "b")
    truth.answers[16_500] = (0, "c")
    with pytest.raises(Violation, match="an earlier instant is 5"):
        truth.check()


def test_an_answer_is_held_against_what_had_come_by_then_as_far_as_clocks_may_be_off() -> None:
    instants().answered(15_000, Antichain(5), "a")
    instants(off_ms=5_000).answered(15_000, Antichain(7), "a")
    with pytest.raises(Violation, match="only 5 had come"):
        instants().answered(15_000, Antichain(7), "a")
    instants().answered(11_000, Antichain(0), "a")
    instants(off_ms=5_000).answered(15_000, Antichain(0), "a")
    with pytest.raises(Violation, match="5 was there before"):
        instants().answered(15_000, Antichain(0), "a")


def test_an_instant_is_forgotten_only_with_its_history() -> None:
    instants().refused(15_000, Antichain(5), "a")
    with pytest.raises(Violation, match="is not known"):
        instants().refused(15_000, Antichain(4), "a")


def test_a_time_that_is_not_shown_from_the_instant_that_was_told_is_refused() -> None:
    truth = instants()
    truth.answered(15_000, Antichain(5), "a")
    truth.shown.append((4, 11_000))
    truth.check()
    truth.shown.append((4, 16_000))
    with pytest.raises(Violation, match="time 4 is shown from 16000 ms on"):
        truth.check()


def test_since_that_passes_what_the_settings_keep_is_refused() -> None:
    def state(since: int, history_ms: int | None, version: int = 1) -> State:
        settings = ShardSettings(history_ms, version=version)
        return replace(blank_state("s"), since=Antichain(since), settings=settings)

    instants().committed(state(0, 5_000), state(4, 5_000), 15_100, 0)
    with pytest.raises(Violation, match="policy"):
        instants().committed(state(0, 5_000), state(5, 5_000), 15_100, 0)
    with pytest.raises(Violation, match="policy"):
        instants().committed(state(0, None), state(1, None), 90_000, 0)
    by_hand = instants()
    by_hand.asked = 3
    by_hand.committed(state(0, None), state(3, None), 90_000, 0)
    with pytest.raises(Violation, match="settings"):
        instants().committed(state(0, 5_000, 2), state(0, None, 2), 90_000, 0)
