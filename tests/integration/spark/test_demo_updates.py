"""The demo's PySpark job turns flights into updates that add up to what the flights are at each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from examples.flights.data import COLUMNS, END, MONTHS, ROWS, Expected, checksum, minute
from examples.flights.jobs import DIFF, TIME, add_up, read_updates
from tests.integration.flights_sample import CSV

pytestmark = pytest.mark.spark


@pytest.fixture
def updates(spark: Any, tmp_path: Path) -> Any:
    (tmp_path / "flights.csv").write_bytes(CSV)
    return read_updates(spark, str(tmp_path / "flights.csv"))


def test_updates_add_up_to_the_flights_of_each_time(updates: Any) -> None:
    rows = [row.asDict() for row in updates.collect()]
    expected = Expected(CSV)
    times = {row[TIME] for row in rows}
    for as_of in sorted(times | {time - 1 for time in times if time} | {minute(2013, 3, 1), END - 1}):
        happened = [{**row, "__diff": row[DIFF]} for row in rows if row[TIME] <= as_of]
        fields = pa.schema([*COLUMNS, pa.field("__diff", pa.int64())])
        contents = add_up(ROWS.empty_table(), pa.Table.from_pylist(happened, fields))
        assert checksum(contents) == checksum(expected.contents(as_of))


def test_updates_fall_into_the_months_in_which_they_happen(updates: Any) -> None:
    months = [sum(lower <= row[TIME] < upper for row in updates.collect()) for lower, upper in MONTHS]
    assert months == Expected(CSV).updates_by_month()
