"""How long things took, counted in buckets: what Prometheus calls a histogram, without its library."""

from __future__ import annotations

import threading
from bisect import bisect_left

from persist.formats.exposition import HISTOGRAM, Family, Spread

BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
SERIES_MAX = 1_000  # of one family; what comes later is counted as OTHER
OTHER = "other"


class Durations:
    """Seconds by the values of labels, at most `SERIES_MAX` of them. Thread-safe.

    `observe` also adds up bytes, where a thing moves some.
    """

    def __init__(self, bounds_s: tuple[float, ...] = BOUNDS_S) -> None:
        self._bounds = bounds_s
        self._lock = threading.Lock()
        self._series: dict[tuple[str, ...], _Series] = {}

    def observe(self, key: tuple[str, ...], seconds: float, nbytes: int = 0) -> None:
        """Count one thing that took so long."""
        place = bisect_left(self._bounds, seconds)
        with self._lock:
            series = self._series.get(key)
            if series is None:
                series = self._made(key)
            series.counts[place] += 1
            series.seconds += seconds
            series.nbytes += nbytes

    def totals(self) -> dict[tuple[str, ...], tuple[int, float, int]]:
        """By labels: how many there were, their seconds, the bytes that they moved."""
        with self._lock:
            return {key: (sum(one.counts), one.seconds, one.nbytes) for key, one in self._series.items()}

    def family(self, name: str, text: str, labels: tuple[str, ...]) -> Family:
        """All of it, as a histogram."""
        with self._lock:
            if not labels:  # its one series is there from the beginning
                self._series.setdefault((), _Series(len(self._bounds) + 1))
            samples = [(key, Spread(self._bounds, tuple(one.counts), one.seconds)) for key, one in self._series.items()]
        return Family(name, HISTOGRAM, text, labels, samples)

    def _made(self, key: tuple[str, ...]) -> _Series:
        if len(self._series) >= SERIES_MAX:
            key = (OTHER,) * len(key)
        found = self._series.get(key)
        if found is None:
            found = self._series[key] = _Series(len(self._bounds) + 1)
        return found


class _Series:
    __slots__ = ("counts", "nbytes", "seconds")

    def __init__(self, buckets: int) -> None:
        self.counts = [0] * buckets
        self.seconds = 0.0
        self.nbytes = 0
