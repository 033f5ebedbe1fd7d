"""Token buckets: so much a second, with bursts, by a clock that the caller gives."""

from __future__ import annotations

BURST_S = 5.0  # what was not used for so long may be used at once
DEBT_S_MAX = 3_600.0  # a single request of any size is paid off in an hour


class Bucket:
    """Fills by `rate` a second. It lets everything through while it is not empty, and may so be overdrawn.

    So a request that is larger than a burst is possible, and those after it wait for longer.
    """

    __slots__ = ("_at_s", "_level", "rate")

    def __init__(self, rate: int, now_s: float) -> None:
        self.rate = rate
        self._at_s = now_s
        self._level = rate * BURST_S

    def change(self, rate: int) -> None:
        """Another rate from now on. A debt stays as many seconds long."""
        self._level = self._level * rate / self.rate
        self.rate = rate

    def wait_s(self, now_s: float) -> float:
        """For how long it lets nothing through; 0: it does."""
        self._level = min(self.rate * BURST_S, self._level + self.rate * max(0.0, now_s - self._at_s))
        self._at_s = now_s
        return 0.0 if self._level > 0 else (1.0 - self._level) / self.rate

    def take(self, count: int) -> None:
        """Take what was let through."""
        self._level = max(self._level - count, -self.rate * DEBT_S_MAX)

    def used(self, now_s: float) -> float:
        """What is used of the rate: all of it, or more, where nothing is let through."""
        self.wait_s(now_s)
        return self.rate - self._level / BURST_S
