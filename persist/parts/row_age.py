"""The age of rows by one of their columns: which rows are old enough, and when the next ones will be.

A value is an instant: a timestamp (UTC if it has no zone), a date (the end of its day in UTC), or an integer count of a
unit since 1970. Nulls have no age.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import InvalidUsage
from persist.parts.shard_schema import ShardSchema

DAY = "day"
DAY_MS = 24 * 3_600_000
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
_WORD_BITS = 32  # of integers that can hold seconds; other units need 64
_PER_MS = {"us": 1_000, "ns": 1_000_000}
_STORED = {"milliseconds": "ms", "microseconds": "us", "nanoseconds": "ns"}  # names of the units in Parquet


@dataclass(frozen=True)
class AgeColumn:
    """A column of instants. `unit` is s, ms, us, ns or day; `is_number`: they are plain integers."""

    name: str
    unit: str
    is_number: bool = False

    @classmethod
    def of(cls, schema: ShardSchema, name: str, unit: str) -> AgeColumn:
        """A column of a shard. `unit` is that of integers, "" for timestamps and dates.

        Raises InvalidUsage if the shard has no such column or its values are not instants.
        """
        (name,) = schema.columns((name,))
        kind = schema.arrow.field(name).type
        if pa.types.is_integer(kind):
            if not unit:
                raise InvalidUsage(f"column {name!r} is {kind}; give its unit with column_unit: s, ms, us or ns")
            if kind.bit_width < (_WORD_BITS if unit == "s" else 2 * _WORD_BITS):
                raise InvalidUsage(f"column {name!r} is {kind}, which cannot hold {unit} since 1970")
            return cls(name, unit, True)
        if unit:
            raise InvalidUsage(f"column_unit is for a column of integers, and column {name!r} is {kind}")
        if pa.types.is_timestamp(kind):
            return cls(name, kind.unit)
        if pa.types.is_date(kind):
            return cls(name, DAY)
        raise InvalidUsage(
            f"column {name!r} is {kind}, which is not an instant; use a timestamp, a date or an integer column"
        )

    def values(self, table: pa.Table) -> pa.ChunkedArray:
        """The values as integers of the unit."""
        column = table.column(self.name)
        if self.unit == DAY:
            column = column.cast(pa.date32()).cast(pa.int32())
        return column if column.type == pa.uint64() else column.cast(pa.int64())

    def below(self, old_ms: int) -> int:
        """Values below this one are over at the instant `old_ms`, in milliseconds since 1970."""
        if self.unit == "s":
            return -(-old_ms // 1_000)
        if self.unit == DAY:
            return old_ms // DAY_MS
        return old_ms * _PER_MS.get(self.unit, 1)

    def over_ms(self, value: int, unit: str | None = None) -> int:
        """The first instant, in milliseconds, at which a value (of `unit`, or of the column's unit) is over."""
        unit = self.unit if unit is None else unit
        if unit == DAY:
            return (value + 1) * DAY_MS
        return value * 1_000 + 1 if unit == "s" else value // _PER_MS.get(unit, 1) + 1

    def least(self, statistics: Any) -> tuple[bool, int | None]:
        """Whether the statistics of a row group are usable, and when its least value is over (None: all are null).

        Parquet stores timestamps of seconds in milliseconds and dates in days.
        """
        if statistics is None:
            return False, None
        if not statistics.has_min_max:
            return statistics.has_null_count and statistics.num_values == 0, None
        if self.is_number:
            return True, self.over_ms(int(statistics.min))
        unit = DAY if self.unit == DAY else _STORED.get(json.loads(statistics.logical_type.to_json()).get("timeUnit"))
        return (False, None) if unit is None else (True, self.over_ms(int(statistics.min_raw), unit))


class AgeFilter:
    """Keeps rows that are over at the instant `old_ms`, and records when the next ones will be. Thread-safe.

    `next_ms` is the first instant at which a row that was not kept is over (None: no row is left). For row groups that
    were not read it derives from their statistics, so it may be too early but never too late.
    """

    def __init__(self, column: AgeColumn, old_ms: int) -> None:
        self.next_ms: int | None = None
        self._column = column
        self._old_ms = old_ms
        self._lock = threading.Lock()

    def keeps(self, statistics: dict[str, Any]) -> bool:
        """Whether a row group with these column statistics (Parquet's) may have a row that is old enough."""
        is_known, over_ms = self._column.least(statistics.get(self._column.name))
        if not is_known or (over_ms is not None and over_ms <= self._old_ms):
            return True
        self._note(over_ms)
        return False

    def rows(self, table: pa.Table) -> pa.Table:
        """The rows that are old enough."""
        values = self._column.values(table)
        low, high = (0, 2**64 - 1) if values.type == pa.uint64() else (INT64_MIN, INT64_MAX)
        below = min(max(self._column.below(self._old_ms), low), high)
        is_old = pc.fill_null(pc.less(values, pa.scalar(below, values.type)), False)
        least = pc.min(values.filter(pc.invert(is_old))).as_py()
        if least is not None:
            self._note(self._column.over_ms(least))
        return table.filter(is_old)

    def first_ms(self, table: pa.Table) -> int | None:
        """The first instant at which one of the rows is over, if any."""
        least = pc.min(self._column.values(table)).as_py()
        return None if least is None else self._column.over_ms(least)

    def _note(self, over_ms: int | None) -> None:
        with self._lock:
            if over_ms is not None and (self.next_ms is None or over_ms < self.next_ms):
                self.next_ms = over_ms
