"""The checks that need histories only: each passes what may happen, and refuses the smallest thing that must not."""

from __future__ import annotations

import pytest

from persist.core.attribute import AttributeUpdate, named_key
from tests.simulation.attributed import AttributeTruth
from tests.simulation.fencing import FenceOp, check_fenced
from tests.simulation.history import Read, check_ascending, check_definite, check_dropped, check_linearisable
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
