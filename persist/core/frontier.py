"""Frontiers of a totally ordered time.

An antichain of a total order has one element `[t]` or none `[]`. As a frontier, `[t]` says "times before t
are passed" and `[]` says "every time is passed" (closed, no more). So `[]` is the greatest frontier.
Times are int64 and not negative. Source: the founding design, section "Jargon" (upper, since).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

from persist.core.errors import InvalidUsage, shown
from persist.core.record import Meta, Record

TIME_MIN = 0
TIME_MAX = 2**63 - 2  # one below int64's last, so that time + 1 always fits
FAR_TIME = 2**62  # times beyond it are mistakes: nanoseconds since 1970 reach it in 2116


class Antichain(Record, frozen=True):
    """A frontier: `element` is its only time, or None for the empty (closed) frontier.

    For untrusted input use `frontier`, which checks it.
    """

    element: Annotated[int, Meta(ge=TIME_MIN, le=TIME_MAX + 1)] | None

    @property
    def is_empty(self) -> bool:
        """Whether no time is left: the frontier of a closed shard."""
        return self.element is None

    def less_equal(self, time: int) -> bool:
        """Whether `time` is at or beyond this frontier (not yet passed by it)."""
        return self.element is not None and self.element <= time

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Antichain):
            return NotImplemented
        if self.element is None:
            return False
        return other.element is None or self.element < other.element

    def __le__(self, other: object) -> bool:
        return not other < self if isinstance(other, Antichain) else NotImplemented

    def __gt__(self, other: object) -> bool:
        return other < self if isinstance(other, Antichain) else NotImplemented

    def __ge__(self, other: object) -> bool:
        return not self < other if isinstance(other, Antichain) else NotImplemented

    def to_json(self) -> list[int]:
        """`[7]`, or `[]` for the empty frontier."""
        return [] if self.element is None else [self.element]

    @classmethod
    def from_json(cls, value: object) -> Antichain:
        """Read `[7]` or `[]`. Raises InvalidUsage on anything else."""
        if isinstance(value, list) and len(value) <= 1 and None not in value:
            return frontier(value[0]) if value else EMPTY
        raise InvalidUsage(f"a frontier is written [time] or [], not {shown(value)}")

    def __str__(self) -> str:
        return str(self.to_json())


EMPTY = Antichain(None)
MINIMUM = Antichain(TIME_MIN)


def last_time(lower: Antichain, upper: Antichain) -> int | None:
    """The last time in `[lower, upper)`, or its first one if it has no end; None: it is empty."""
    if lower == upper or lower.element is None:
        return None
    return lower.element if upper.element is None else upper.element - 1


def frontier(time: int | Antichain | None) -> Antichain:
    """The frontier that a caller means: a time, None for closed, or a frontier as it is. Raises InvalidUsage."""
    element = time.element if isinstance(time, Antichain) else time
    if element is not None and type(element) is not int:
        raise InvalidUsage(f"a frontier holds an integer time, not {shown(element)}")
    if element is not None and not TIME_MIN <= element <= TIME_MAX + 1:
        raise InvalidUsage(f"time {shown(element)} is outside [{TIME_MIN}, {TIME_MAX}]")
    return time if isinstance(time, Antichain) else Antichain(element)


def meet(frontiers: Iterable[Antichain]) -> Antichain:
    """The earliest of the frontiers (their greatest lower bound); of none, the empty frontier."""
    return min(frontiers, default=EMPTY)


def join(left: Antichain, right: Antichain) -> Antichain:
    """The later of two frontiers (their least upper bound)."""
    return max(left, right)
