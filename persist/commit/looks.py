"""When a process has looked whether another home has taken over, and who looks now.

Whoever is to commit compares clock readings alone, as long as the last look is recent. Once it is not, he looks, or
waits for who looks already. Time counts also while the machine is suspended: who slept looks before he writes.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from persist.commit.system import Clock, Moment, moment
from persist.core.errors import Unavailable

LOOK_EVERY_S = 10.0  # how long a look lets commits go on
TURN_WAIT_S = 5.0  # so long is waited for another look; then who waits looks as well, since that one may hang
TRIES_MAX = 2  # of who is to commit


class Looks:
    """Thread-safe. `look` is called with the number of the look; of two the later one has the higher number."""

    def __init__(self, look: Callable[[int], object], clock: Clock) -> None:
        self._look = look
        self._clock = clock
        self._turn = threading.Lock()
        self._lock = threading.Lock()
        self._begun = 0
        self._ended = 0  # the last one that has
        self._tried: Moment | None = None  # when it was last looked, whether or not that told
        self._told: Moment | None = None  # when the last look began that told

    @property
    def is_due(self) -> bool:
        """Whether it is to be looked before anything is committed. Compares clock readings."""
        tried = self._tried
        return tried is None or tried.passed_s(self._clock) >= LOOK_EVERY_S

    @property
    def silent_s(self) -> float:
        """For how long nothing has told. Infinite: nothing ever did."""
        told = self._told
        return math.inf if told is None else told.passed_s(self._clock)

    @property
    def has_told(self) -> bool:
        return self._told is not None

    def forget(self) -> None:
        """It is due, and nothing has told."""
        with self._lock:
            self._tried = self._told = None

    def now(self) -> None:
        """Look. Raises what `look` raises."""
        with self.turn():
            self._one()

    def if_due(self) -> None:
        """Look if that is due, or wait for who looks already. Raises what `look` raises, if it was called.

        It is tried again where a look did not tell and took long: this process may have slept meanwhile.
        """
        with self.turn():
            for tries in range(1, TRIES_MAX + 1):
                if not self.is_due:
                    return
                try:
                    self._one()
                except Unavailable:
                    if tries == TRIES_MAX or not self.is_due:
                        raise

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One at a time, unless the one before takes long."""
        has_it = self._turn.acquire(timeout=TURN_WAIT_S)
        try:
            yield
        finally:
            if has_it:
                self._turn.release()

    def told(self, began: Moment) -> None:
        """Something else than a look has told as much, at this moment."""
        with self._lock:
            self._tried = self._told = began

    def _one(self) -> None:
        with self._lock:
            self._begun += 1
            number = self._begun
        began = moment(self._clock)
        try:
            self._look(number)
        except Unavailable:
            # Counts from its end, so that a link that is down keeps nobody waiting. One that took long may have slept.
            took_long = began.passed_s(self._clock) >= LOOK_EVERY_S
            self._end(number, began if took_long else moment(self._clock), None)
            raise
        except BaseException:
            self._end(number, None, None)
            raise
        self._end(number, began, began)

    def _end(self, number: int, tried: Moment | None, told: Moment | None) -> None:
        with self._lock:
            if number < self._ended:  # it hung, and a later one was quicker
                return
            self._ended, self._tried = number, tried
            if told is not None:
                self._told = told
