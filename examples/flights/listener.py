"""The third process: listens to every update from the beginning, and keeps the contents up to date.

    python -m examples.flights.listener --url http://127.0.0.1:8787 --shard flights

It ends when the year is complete, and tells the checksum of what it holds.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import persist
from examples.flights.dataset import COLUMNS, END, IN_THE_AIR, ROWS, checksum
from examples.flights.expected import daily_peaks
from examples.flights.processes import emit
from persist.client.listen import ListenEvent

FOLD_ROWS = 250_000  # pending updates are summed up when there are this many
PROGRESS_S = 0.5
HEARD_S = 0.1  # between two that are told of when they came


class Contents:
    """A multiset of rows that follows updates."""

    def __init__(self) -> None:
        self._rows = ROWS.empty_table()
        self._pending: list[pa.Table] = []
        self._pending_rows = 0

    def add(self, updates: pa.Table) -> None:
        self._pending.append(updates.select(ROWS.names).cast(ROWS))
        self._pending_rows += updates.num_rows
        if self._pending_rows >= FOLD_ROWS:
            self.fold()

    def fold(self) -> pa.Table:
        """The rows now, with multiplicities; none is zero."""
        table = pa.concat_tables([self._rows, *self._pending])
        summed = table.group_by(COLUMNS.names).aggregate([("__diff", "sum")])
        summed = summed.rename_columns([*COLUMNS.names, "__diff"]).select(ROWS.names)
        self._rows = summed.filter(pc.not_equal(summed["__diff"], 0)).cast(ROWS)
        self._pending, self._pending_rows = [], 0
        return self._rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("--url", "--shard"):
        parser.add_argument(name, required=True)
    arguments = parser.parse_args()
    contents = Contents()
    in_the_air = np.zeros(END, np.int64)
    updates = events = 0
    heard: list[list[float]] = []
    began = told = time.monotonic()
    with persist.connect(arguments.url) as client, client.shard(arguments.shard).listen(None, until=END) as listen:
        emit("listening")
        frontier = 0
        for event in listen:
            _check(event, frontier)
            frontier = event.upper.element or END
            rows = event.updates
            if rows.num_rows:
                contents.add(rows)
                flying = rows.filter(pc.equal(rows["status"], IN_THE_AIR))
                np.add.at(in_the_air, flying["__time"].to_numpy(), flying["__diff"].to_numpy())
            updates += rows.num_rows
            events += 1
            if not heard or time.time() - heard[-1][0] > HEARD_S:
                heard.append([time.time(), frontier])
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                emit("heard", upper=frontier, updates=updates)
    heard.append([time.time(), frontier])
    held = contents.fold()
    emit(
        "done",
        updates=updates,
        events=events,
        rows=held.num_rows,
        checksum=checksum(held),
        peaks=daily_peaks(in_the_air),
        heard=heard,
        seconds=time.monotonic() - began,
    )


def _check(event: ListenEvent, frontier: int) -> None:
    """Events follow each other without gap or overlap, and their times lie where they say."""
    if event.lower.element != frontier:
        raise ValueError(f"an event begins at {event.lower}, but everything before {frontier} was told")
    if event.updates.num_rows:
        span = pc.min_max(event.updates["__time"]).as_py()
        if span["min"] < frontier or (event.lower != event.upper and span["max"] >= (event.upper.element or END)):
            raise ValueError(f"an event of [{event.lower}, {event.upper}) has times {span['min']} to {span['max']}")


if __name__ == "__main__":
    main()
