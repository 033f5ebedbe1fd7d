"""What is known of rows without looking at them again: their bounds, their sums, and whether some are twins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist.parts.columns import Mask, one_chunk
from persist.parts.consolidate import join, twins
from persist.parts.picking import is_constant
from persist.parts.schema import DIFF, TIME, ShardSchema

TWINS_SHARE = 4  # of the rows of a row group at most one in so many is told to be a twin of the row before
_NUMBER = np.dtype("<u2")  # of a row: a row group has at most 65,536
FEW_ROWS = 64  # of which bounds and sums are taken in Python: calls of numpy take longer


@dataclass(frozen=True, slots=True)
class Known:
    """What the index tells of the rows of a row group, so that a read knows whether it must add some of them up.

    `pairs`: two of them share key and value. `joins`: the first one shares key and value with the last row of the row
    group before, in the same part. The bounds are inclusive.
    """

    pairs: bool
    joins: bool
    time_min: int
    time_max: int
    diff_min: int
    diff_max: int

    def as_told(self) -> list[int]:
        """As the index has it."""
        return [int(value) for value in astuple(self)]


def known_of(told: Sequence[int]) -> Known:
    """As it was told. Raises ValueError or TypeError where it is not what `as_told` gives."""
    pairs, joins, *bounds = told
    time_min, time_max, diff_min, diff_max = (int(bound) for bound in bounds)
    return Known(bool(pairs), bool(joins), time_min, time_max, diff_min, diff_max)


def firsts_of(data: bytes, rows: int) -> Mask:
    """Which of the rows begin a group that shares key and value, by the bytes that `Teller` made for the others.

    Raises ValueError where they are none.
    """
    numbers = np.frombuffer(data, _NUMBER)
    if len(numbers) and not (numbers[0] > 0 and numbers[-1] < rows and (numbers[1:] > numbers[:-1]).all()):
        raise ValueError("twins are not numbers of rows in order")
    found = np.ones(rows, np.bool_)
    found[numbers] = False
    return found


@dataclass(slots=True)
class Stats:
    """Bounds of the rows seen; zeros before the first."""

    seen: bool = False
    time_min: int = 0
    time_max: int = 0
    diff_min: int = 0
    diff_max: int = 0
    diff_sum: int = 0

    def add(self, rows: Any) -> None:
        if rows.num_rows <= FEW_ROWS:
            times, diffs = rows.column(TIME).to_pylist(), rows.column(DIFF).to_pylist()
            self._widen(min(times), max(times), min(diffs), max(diffs))
            self.diff_sum += sum(diffs)
            return
        times, diffs = one_chunk(rows.column(TIME)).to_numpy(), one_chunk(rows.column(DIFF)).to_numpy()
        low, high = _span(diffs)
        self._widen(*_span(times), low, high)
        if low == high:  # most rows are there once
            self.diff_sum += low * len(diffs)
        elif max(abs(low), abs(high)) * len(diffs) < 2**63:
            self.diff_sum += int(diffs.sum())
        else:
            self.diff_sum += (int((diffs >> 32).sum()) << 32) + int((diffs & 0xFFFFFFFF).sum())

    def _widen(self, first: int, last: int, low: int, high: int) -> None:
        self.time_min = min(self.time_min, first) if self.seen else first
        self.time_max = max(self.time_max, last) if self.seen else last
        self.diff_min = min(self.diff_min, low) if self.seen else low
        self.diff_max = max(self.diff_max, high) if self.seen else high
        self.seen = True

    @property
    def known_sum(self) -> int | None:
        """The sum of the diffs, or None where it takes more than 64 bits: a record holds no such number."""
        return self.diff_sum if -(2**63) <= self.diff_sum < 2**63 else None


def _span(numbers: npt.NDArray[np.int64]) -> tuple[int, int]:
    """The least and the greatest of them (at least one)."""
    if is_constant(numbers):
        return int(numbers[0]), int(numbers[0])
    return int(numbers.min()), int(numbers.max())


class Teller:
    """Finds what is `Known` of the row groups of one part, which it is shown in their order."""

    def __init__(self, schema: ShardSchema) -> None:
        self._schema = schema
        self._last: pa.Table | None = None  # the last row of the row group before

    def told(self, rows: pa.Table) -> tuple[Known, bytes]:
        """Of the next row group: consolidated rows in order, at least one.

        The bytes are the numbers of the rows that share key and value with the row before, two bytes each; b"" where
        there are none, or too many to be told.
        """
        stats = Stats()
        stats.add(rows)
        joins = self._last is not None and bool(twins(join([self._last, rows.slice(0, 1)]), self._schema).any())
        self._last = rows.slice(len(rows) - 1)
        found = np.zeros(0, np.int64)
        if stats.time_min < stats.time_max:  # at one time, rows that share key and value would have been added up
            found = np.flatnonzero(twins(rows, self._schema))
        known = Known(len(found) > 0, joins, stats.time_min, stats.time_max, stats.diff_min, stats.diff_max)
        return known, found.astype(_NUMBER).tobytes() if len(found) * TWINS_SHARE <= len(rows) else b""
