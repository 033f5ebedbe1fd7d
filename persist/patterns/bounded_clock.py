"""How far a wall clock is followed: it never leads further than some milliseconds beyond what the stores confirm."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Protocol

from persist.client.shard import Shard
from persist.core.errors import InvalidUsage, NotReadable, Unavailable

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
CONFIRM_S = 1.0  # for so long the stores are asked about a clock


class WallClock(Protocol):
    """Where time comes from; tests pass their own."""

    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since 1970."""
        ...

    def monotonic(self) -> float:
        """Seconds from some fixed point; never goes back."""
        ...

    def sleep(self, seconds: float) -> None: ...


LOOK_AHEAD_MS = 60_000  # how far a wall clock may lead beyond what the stores' clocks confirm
ASK_AGAIN_S = 10.0  # after a clock was not confirmed, for so long it is not followed, and nobody is asked


class BoundedClock:
    """A wall clock as far as it may be followed: at most `LOOK_AHEAD_MS` beyond the clocks of the stores.

    `confirmed` says whether an instant has been. It is asked about half of that before now; what it says holds for the
    time that passes by the monotonic clock. A clock that is not confirmed is not followed: times count on from the last
    one. So a wrong clock costs a question at times, and leads nobody astray.
    """

    def __init__(self, clock: WallClock, confirmed: Callable[[int], bool]) -> None:
        self._clock = clock
        self._confirmed = confirmed
        self._last: tuple[int, float] | None = None  # an instant that has been, and when that was known
        self._refused_s: float | None = None  # when it was not confirmed

    @property
    def is_followed(self) -> bool:
        """Whether the clock was confirmed when that was asked last."""
        return self._last is not None and self._refused_s is None

    def time(self, least: int) -> int:
        """The time by the clock, or `least` where that is later or the clock is not confirmed."""
        now = self._clock.now_ms()
        return now if now > least and (self._is_near(now) or self._asks(now)) else least

    def _is_near(self, now: int) -> bool:
        if self._last is None:
            return False
        been_ms, then_s = self._last
        return now <= been_ms + int((self._clock.monotonic() - then_s) * 1000) + LOOK_AHEAD_MS

    def _asks(self, now: int) -> bool:
        now_s = self._clock.monotonic()
        if self._refused_s is not None and now_s - self._refused_s < ASK_AGAIN_S:
            return False
        asked = max(0, now - LOOK_AHEAD_MS // 2)
        if not self._confirmed(asked):
            self._refused_s = now_s
            return False
        self._last, self._refused_s = (asked, now_s), None
        return True


def confirmed_by(shard: Shard) -> Callable[[int], bool]:
    """Whether the clocks of the stores of `shard` say that an instant, in milliseconds since 1970, has been."""

    def confirmed(at_ms: int) -> bool:
        try:
            shard.with_timeout(CONFIRM_S).time_at(EPOCH + timedelta(milliseconds=at_ms))
        except (Unavailable, NotReadable, InvalidUsage, OverflowError):
            return False
        return True

    return confirmed
