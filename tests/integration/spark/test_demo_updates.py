"""The demo's PySpark job turns flights into updates that add up to what the flights are at each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from examples.flights.dataset import COLUMNS, END, checksum, minute
from examples.flights.expected import Expected
from examples.flights.listener import Contents
from examples.flights.updates import DIFF, TIME, read_flights, updates_of
from examples.flights.writer import updates_by_month
from tests.integration.flights_sample import CSV

pytestmark = pytest.mark.spark


@pytest.fixture
def updates(spark: Any, tmp_path: Path) -> Any:
    (tmp_path / "flights.csv").write_bytes(CSV)
    return updates_of(read_flights(spark, str(tmp_path / "flights.csv")))


def test_updates_add_up_to_the_flights_of_each_time(updates: Any) -> None:
    rows = [row.asDict() for row in updates.collect()]
    expected = Expected(CSV)
    times = {row[TIME] for row in rows}
    for as_of in sorted(times | {time - 1 for time in times if time} | {minute(2013, 3, 1), END - 1}):
        contents = Contents()
        happened = [{**row, "__diff": row[DIFF]} for row in rows if row[TIME] <= as_of]
        fields = pa.schema([*COLUMNS, pa.field("__diff", pa.int64())])
        contents.add(pa.Table.from_pylist(happened, fields))
        assert checksum(contents.fold()) == checksum(expected.contents(as_of))


def test_updates_fall_into_the_months_in_which_they_happen(updates: Any) -> None:
    assert updates_by_month(updates) == Expected(CSV).updates_by_month()
