"""The figures of a board, and where two computations of them differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from examples.flights.dataset import LANDED, STATUSES

# (carrier, status) -> flights, sum of dep_delay, sum of arr_delay (minutes), sum of departs * flight
Figures = dict[tuple[str, str], tuple[int, int, int, int]]
NAMES = ("flights", "minutes of departure delay", "minutes of arrival delay", "sum of departs * flight")
NOTHING = (0, 0, 0, 0)


@dataclass(frozen=True)
class Board:
    """The board as one computation has it."""

    scheduled: int
    in_the_air: int
    landed: int

    @classmethod
    def of(cls, figures: Figures) -> Board:
        counts = dict.fromkeys(STATUSES, 0)
        for (_, status), (flights, *_) in figures.items():
            counts[status] += flights
        return cls(*(counts[status] for status in STATUSES))


def figures_of(rows: Iterable[Sequence[Any]]) -> Figures:
    """From rows of carrier, status and the four figures."""
    found: Figures = {}
    for carrier, status, flights, dep_delay, arr_delay, marks in rows:
        found[str(carrier), str(status)] = (int(flights), int(dep_delay or 0), int(arr_delay or 0), int(marks))
    return found


def mean_arrival_delay(figures: Figures) -> dict[str, tuple[int, float]]:
    """Carrier -> flights that have landed, minutes by which they were late on average."""
    return {carrier: (n, late / n) for (carrier, status), (n, _, late, _) in figures.items() if status == LANDED}


def differences(what: str, shard: Figures, csv: Figures) -> list[str]:
    """One sentence for each figure that differs."""
    found = []
    for carrier, status in sorted(shard.keys() | csv.keys()):
        ours, theirs = shard.get((carrier, status), NOTHING), csv.get((carrier, status), NOTHING)
        for name, one, other in zip(NAMES, ours, theirs, strict=True):
            if one != other:
                found.append(f"{what}, {carrier} {status}, {name}: {one:,} in the shard, {other:,} by the CSV")
    return found


class Checks:
    """Counts what was compared and keeps what differed."""

    def __init__(self) -> None:
        self.compared = 0
        self.failed: list[str] = []

    def equal(self, what: str, ours: object, theirs: object) -> None:
        self.compared += 1
        if ours != theirs:
            self.failed.append(f"{what}: {_short(ours)}, expected {_short(theirs)}")

    def figures(self, what: str, shard: Figures, csv: Figures) -> None:
        self.compared += len(NAMES) * len(shard.keys() | csv.keys())
        self.failed.extend(differences(what, shard, csv))


def _short(value: object) -> str:
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


__all__ = ["Board", "Checks", "Figures", "differences", "figures_of", "mean_arrival_delay"]
