"""Whether it is to be looked before a commit, and who looks: one at a time, unless one hangs."""

from __future__ import annotations

import math
import threading
from contextlib import suppress

import pytest

from persist.commit import location_identity as module
from persist.commit.location_identity import LOOK_EVERY_S, TRIES_MAX, Looks
from persist.commit.system import moment
from persist.core.errors import InvalidUsage, Unavailable
from tests.support.clocks import Clock, World
from tests.support.location import TestClock

LONG_S = 600.0
EVERY_MS = int(LOOK_EVERY_S * 1000)


class Told:
    """What is looked at. The first look may hang, and the next ones may take time or not tell."""

    def __init__(self) -> None:
        self.clock = TestClock()
        self.looks = Looks(self._look, self.clock)
        self.hangs = threading.Event()
        self.began = threading.Event()
        self.go_on = threading.Event()
        self.takes_ms = 0
        self.error: Exception | None = None
        self.numbers: list[int] = []

    def _look(self, number: int) -> None:
        self.numbers.append(number)
        if self.hangs.is_set():
            self.hangs.clear()
            self.began.set()
            self.go_on.wait(LONG_S)
        self.clock.advance_ms(self.takes_ms)
        if self.error is not None:
            raise self.error

    def _now(self) -> None:
        with suppress(Unavailable):
            self.looks.now()

    def hang(self) -> threading.Thread:
        """A look that is under way until it is to go on."""
        self.hangs.set()
        thread = threading.Thread(target=self._now, daemon=True)
        thread.start()
        assert self.began.wait(LONG_S)
        return thread


@pytest.fixture
def told() -> Told:
    return Told()


def test_it_is_due_until_it_is_looked_and_again_later(told: Told) -> None:
    assert told.looks.is_due
    assert told.looks.silent_s == math.inf
    told.looks.if_due()
    told.looks.if_due()
    assert told.numbers == [1]
    told.clock.advance_ms(EVERY_MS)
    assert told.looks.is_due
    assert told.looks.silent_s == LOOK_EVERY_S


def test_a_look_counts_from_its_beginning(told: Told) -> None:
    """What it was told may be of then."""
    told.takes_ms = EVERY_MS
    told.looks.now()
    assert told.looks.is_due


def test_one_that_could_not_be_told_is_not_asked_again_at_once(told: Told) -> None:
    """Or a link that is down would keep every commit waiting."""
    told.error, told.takes_ms = Unavailable("the link is down"), EVERY_MS // 2
    with pytest.raises(Unavailable):
        told.looks.if_due()
    told.clock.advance_ms(EVERY_MS - 1)
    assert not told.looks.is_due
    assert told.looks.silent_s == math.inf


def test_one_that_took_long_and_could_not_be_told_is_tried_again(told: Told) -> None:
    """The process may have slept in it, and so lost its connections."""
    told.error, told.takes_ms = Unavailable("the link is down"), EVERY_MS
    with pytest.raises(Unavailable):
        told.looks.if_due()
    assert told.numbers == list(range(1, TRIES_MAX + 1))
    assert told.looks.is_due


def test_one_that_found_the_wrong_stores_does_not_count(told: Told) -> None:
    told.looks.now()
    told.error = InvalidUsage("the stores do not belong together")
    for _ in range(2):
        with pytest.raises(InvalidUsage):
            told.looks.now()
        assert told.looks.is_due


def test_who_is_to_look_waits_for_the_look_that_is_under_way(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_WAIT_S", LONG_S)
    first = told.hang()
    second = threading.Thread(target=told.looks.if_due, daemon=True)
    second.start()
    assert told.looks.is_due, "it has not told anything yet"
    told.go_on.set()
    second.join(LONG_S)
    first.join(LONG_S)
    assert told.numbers == [1]


def test_and_looks_himself_where_that_one_began_before_he_slept(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_WAIT_S", LONG_S)
    first = told.hang()
    second = threading.Thread(target=told.looks.if_due, daemon=True)
    second.start()
    told.clock.advance_ms(EVERY_MS)
    told.go_on.set()
    second.join(LONG_S)
    first.join(LONG_S)
    assert told.numbers == [1, 2]


def test_and_where_that_one_hangs(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN_WAIT_S", 0.0)
    first = told.hang()
    told.clock.advance_ms(EVERY_MS)
    told.looks.if_due()
    assert told.numbers == [1, 2]
    told.error = Unavailable("it hung")
    told.go_on.set()
    first.join(LONG_S)
    assert not told.looks.is_due, "the later one tells"


@pytest.mark.parametrize("how", ["suspended", "paused"])
def test_time_passes_while_the_machine_stands_still(how: str) -> None:
    """The monotonic clock tells nothing of it. Of a pause only the wall clock does, once it is set right."""
    machine = World().machine()
    then = moment(machine.clock)
    getattr(machine, how)(60_000)
    assert machine.clock.monotonic() == 0.0
    assert then.passed_s(machine.clock) == 60.0


@pytest.mark.parametrize("off_ms", [60_000, -60_000])
def test_a_wall_clock_that_was_set_counts_as_time_that_passed(off_ms: int) -> None:
    """Nobody can tell how long the machine was stopped: it is looked once more."""
    clock = Clock(World(), 0)
    then = moment(clock)
    clock.off_ms = off_ms
    assert then.passed_s(clock) == 60.0
