"""A wall clock that is wrong, in one process: off from the start, and now and then set while the process runs.

Only the product's own wall clock is wrong. Monotonic clocks are right, and so are those of the stores.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Self
from unittest.mock import patch

import persist.commit.clocks_and_ids

MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
RANGES_MS = ((2 * MINUTE_MS, HOUR_MS), (HOUR_MS, DAY_MS), (DAY_MS, 40 * DAY_MS))
WRONG_MS_MAX = 40 * DAY_MS
RIGHT = "0"
WRONG_RATE = 0.6  # of processes
JUMP_RATE = 0.5  # of those whose clock is wrong
JUMPS_AFTER_S = (0.5, 6.0)
AHEAD, BEHIND, JUMPED = "clock ahead", "clock behind", "clock jumped"


def chosen(pick: random.Random) -> str:
    """The clock of a process as an argument: `OFF_MS`, or `OFF_MS,AFTER_S:OFF_MS` for one that is set later."""
    if pick.random() > WRONG_RATE:
        return RIGHT
    if pick.random() > JUMP_RATE:
        return str(_off_ms(pick))
    first = pick.choice((0, _off_ms(pick)))
    return f"{first},{pick.uniform(*JUMPS_AFTER_S):.1f}:{_off_ms(pick)}"


def _off_ms(pick: random.Random) -> int:
    return pick.choice((-1, 1)) * pick.randint(*pick.choice(RANGES_MS))


class WrongTime:
    """Stands in for the module `time` where the product asks for the time. `say` hears what struck, once each."""

    def __init__(self, off_ms: int, jump: tuple[float, int] | None, say: Callable[[str], None]) -> None:
        self._off_ms = off_ms
        self._jump = jump
        self._say = say
        self._started_s = time.monotonic()
        self._said: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, text: str, say: Callable[[str], None]) -> Self:
        """From what `chosen` gives."""
        first, _, then = text.partition(",")
        after_s, _, off_ms = then.partition(":")
        return cls(int(first), (float(after_s), int(off_ms)) if then else None, say)

    def time_ns(self) -> int:
        with self._lock:
            if self._jump is not None and time.monotonic() - self._started_s >= self._jump[0]:
                self._off_ms, self._jump = self._jump[1], None
                self._strike(JUMPED)
            if self._off_ms:
                self._strike(AHEAD if self._off_ms > 0 else BEHIND)
            return time.time_ns() + self._off_ms * 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()

    def clock_gettime(self, clock: int) -> float:
        return time.clock_gettime(clock)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def _strike(self, what: str) -> None:
        if what not in self._said:
            self._said.add(what)
            self._say(what)


def set_clock(text: str, say: Callable[[str], None]) -> None:
    """Give this process that wall clock, for as long as it lives."""
    patch.object(persist.commit.clocks_and_ids, "time", WrongTime.of(text, say)).start()


__all__ = ["AHEAD", "BEHIND", "JUMPED", "RIGHT", "WRONG_MS_MAX", "WrongTime", "chosen", "set_clock"]
