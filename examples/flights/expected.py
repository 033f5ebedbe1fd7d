"""The same answers straight from the CSV, by another way: no Spark, no shard, no updates.

A flight's row at a time is worked out from the flight itself. The clock is another one, too: here times come from the
local calendar (`year`, `month`, `day`, `sched_dep_time`) and the dates at which New York changed its clocks, and the
departure is checked against the clock time `dep_time`; `time_hour` is not used.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from examples.flights.dataset import (
    DAYS,
    END,
    IN_THE_AIR,
    LANDED,
    LOST_MINUTES,
    MONTHS,
    PLAN_MINUTES,
    ROWS,
    SCHEDULED,
    STATUSES,
    minute,
)
from examples.flights.figures import Figures

SUMMER_BEGINS = minute(2013, 3, 10, 2)  # by the clocks of New York, which then went on by an hour,
SUMMER_ENDS = minute(2013, 11, 3, 2)  # and back
DAY = 24 * 60
NEVER = np.iinfo(np.int64).max


class Expected:
    """What the shard must hold. Raises ValueError when the CSV contradicts itself."""

    def __init__(self, csv: bytes) -> None:
        table = pyarrow.csv.read_csv(io.BytesIO(csv))
        self.table = table
        self.flights = table.num_rows
        local = self._minutes_by_the_clock()
        summer = (local >= SUMMER_BEGINS) & (local < SUMMER_ENDS)
        self.departs = local - np.where(summer, 60, 0)
        self.dep_delay, flown = self._numbers("dep_delay")
        self.arr_delay, _ = self._numbers("arr_delay")
        air_time, arrived = self._numbers("air_time")
        self._check_departures(local, flown)
        departed = self.departs + self.dep_delay
        self.departed = np.where(flown, departed, NEVER)
        self.landed = np.where(arrived, departed + air_time, NEVER)
        self.planned = np.maximum(self.departs - PLAN_MINUTES, 0)
        self.plan_ends = np.where(flown, departed, self.departs)
        self.flight_ends = np.where(arrived, self.landed, np.where(flown, departed + LOST_MINUTES, NEVER))
        keys = {"departs": pa.array(self.departs), "carrier": table["carrier"], "flight": table["flight"]}
        if pa.table(keys).group_by(list(keys)).aggregate([]).num_rows != self.flights:
            raise ValueError("two flights have the same key")

    def _numbers(self, name: str) -> tuple[Any, Any]:
        """A column as int64 with 0 where it is unknown, and where it is known."""
        column = self.table[name]
        return column.fill_null(0).to_numpy().astype(np.int64), column.is_valid().to_numpy()

    def _minutes_by_the_clock(self) -> Any:
        month, day, at = (self._numbers(name)[0] for name in ("month", "day", "sched_dep_time"))
        month_begins = np.array([minute(2013, m, 1) for m in range(1, 13)])[month - 1]
        return month_begins + (day - 1) * DAY + at // 100 * 60 + at % 100

    def _check_departures(self, local: Any, flown: Any) -> None:
        """Scheduled time plus delay must be the clock time of departure."""
        at, known = self._numbers("dep_time")
        by_clock = (at // 100 * 60 + at % 100) % DAY
        wrong = np.flatnonzero((known != flown) | (known & (by_clock != (local + self.dep_delay) % DAY)))
        if len(wrong):
            raise ValueError(f"line {int(wrong[0]) + 2} of the CSV: dep_time is not sched_dep_time + dep_delay")

    # --- what holds at a time

    def _in(self, status: str, time: int) -> Any:
        """Which flights are in a status at a time."""
        if status == SCHEDULED:
            return (self.planned <= time) & (time < self.plan_ends)
        if status == IN_THE_AIR:
            return (self.departed <= time) & (time < self.flight_ends)
        return self.landed <= time

    def contents(self, time: int) -> pa.Table:
        """All rows at a time, with the columns of ROWS."""
        pieces = []
        for status in STATUSES:
            chosen = np.flatnonzero(self._in(status, time))
            rows = self.table.take(pa.array(chosen))
            count = len(chosen)
            nothing = pa.nulls(count, pa.int32())
            columns = {
                "departs": pa.array(self.departs[chosen]),
                "status": pa.array([status], pa.string()).take(pa.array(np.zeros(count, np.int64))),
                "dep_delay": nothing if status == SCHEDULED else rows["dep_delay"],
                "arr_delay": rows["arr_delay"] if status == LANDED else nothing,
                "__diff": pa.array(np.ones(count, np.int64)),
            }
            arrays = [columns[f.name] if f.name in columns else rows[f.name] for f in ROWS]
            cast = [array.cast(field.type) for array, field in zip(arrays, ROWS, strict=True)]
            pieces.append(pa.Table.from_arrays(cast, schema=ROWS))
        return pa.concat_tables(pieces)

    def figures(self, time: int) -> Figures:
        """The board at a time, by carrier and status."""
        carriers = self.table["carrier"].combine_chunks().dictionary_encode()
        codes = carriers.indices.to_numpy()
        number = self._numbers("flight")[0]
        found: Figures = {}
        for status in STATUSES:
            here = self._in(status, time)
            delay = np.zeros_like(self.departs) if status == SCHEDULED else self.dep_delay
            late = self.arr_delay if status == LANDED else np.zeros_like(self.departs)
            for code, carrier in enumerate(carriers.dictionary.to_pylist()):
                chosen = here & (codes == code)
                if chosen.any():
                    marks = int((self.departs[chosen] * number[chosen]).sum())
                    found[carrier, status] = (
                        int(chosen.sum()), int(delay[chosen].sum()), int(late[chosen].sum()), marks,
                    )  # fmt: skip
        return found

    # --- what happens over time

    def _happenings(self) -> list[Any]:
        """The times of all updates, one array for each kind."""
        flown, arrived = self.departed != NEVER, self.landed != NEVER
        ends = self.flight_ends[flown]
        return [self.planned, self.plan_ends, self.departed[flown], ends, self.landed[arrived]]

    def updates_by_month(self) -> list[int]:
        """How many updates fall into each of MONTHS."""
        edges = [lower for lower, _ in MONTHS] + [END]
        happened = [int(n) for n in np.histogram(np.concatenate(self._happenings()), edges)[0]]
        if sum(happened) != sum(len(times) for times in self._happenings()):
            raise ValueError("an update falls outside the year of the demo")
        return happened

    def peaks(self) -> list[int]:
        """The most flights in the air at any minute of each day."""
        flown = self.departed != NEVER
        up = np.bincount(self.departed[flown], minlength=END)
        down = np.bincount(self.flight_ends[flown], minlength=END)
        return daily_peaks(up - down)


def daily_peaks(changes: Any) -> list[int]:
    """From the change of a count in each minute to its highest value on each day."""
    held = np.cumsum(changes)[: DAYS * DAY]
    return [int(most) for most in held.reshape(DAYS, DAY).max(axis=1)]


__all__ = ["Expected", "daily_peaks"]
