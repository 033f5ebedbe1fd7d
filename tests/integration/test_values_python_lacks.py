"""Values that Arrow stores and Python has no object for: they are read, compared, merged and named without it."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from starlette.testclient import TestClient

from persist import ConstraintViolated, InvalidUsage
from rpc.app import create_app
from tests.support.asking import typed
from tests.support.location import client_of, memory_location

NOON_NS = 43_200_123_456_789


def test_a_merge_over_http_keeps_nanoseconds() -> None:
    location = memory_location()
    client, http = client_of(location), typed(TestClient(create_app(location), base_url="http://127.0.0.1"))
    shard = client.create_shard("t", pa.schema([("at", pa.time64("ns")), ("n", pa.int64())]), ["at"])
    shard.insert(pa.table({"at": pa.array([NOON_NS // 1000 * 1000, NOON_NS], pa.time64("ns")), "n": [1, 2]}))
    clauses = [{"when": "matched", "then": "update"}, {"when": "not matched", "then": "insert"}]
    body = {"rows": [{"at": "12:00:00.123456789", "n": 99}], "clauses": clauses}
    with http:
        assert http.post("/v1/shards/t/merge", json=body).status_code == 200
    table = shard.snapshot().to_arrow()
    assert (table["at"].cast(pa.int64()).to_pylist(), table["n"].to_pylist()) == (
        [NOON_NS // 1000 * 1000, NOON_NS],
        [1, 99],
    )


FAR = {
    "day": pa.array([2**31 - 1], pa.date32()),
    "instant": pa.array([10**14], pa.timestamp("s")),
    "length": pa.array([2**62], pa.duration("s")),
}


@pytest.mark.parametrize("what", FAR)
def test_a_key_that_occurs_twice_is_refused_by_name(what: str) -> None:
    key = FAR[what]
    shard = client_of(memory_location()).create_shard("t", pa.schema([("k", key.type)]), ["k"], unique=True)
    with pytest.raises(ConstraintViolated):
        shard.insert(pa.table({"k": pa.concat_arrays([key, key])}))
    with pytest.raises(InvalidUsage, match="more than once"):
        shard.upsert(pa.table({"k": pa.concat_arrays([key, key])}))
    shard.insert(pa.table({"k": key}))
    with pytest.raises(InvalidUsage, match="to_arrow"):
        shard.head()


def test_days_beyond_the_years_of_python_are_selected() -> None:
    shard = client_of(memory_location()).create_shard("t", pa.schema([("id", pa.int64()), ("d", pa.date32())]), ["id"])
    days = pa.array([number * 100 - 2_000_000 for number in range(50_000)], pa.int32())
    shard.insert(pa.table({"id": range(50_000), "d": days.cast(pa.date32())}))
    assert shard.count("d >= DATE '2024-01-31'") == sum(day >= 19_753 for day in days.to_pylist())


def test_a_nanosecond_of_a_day_is_not_dropped() -> None:
    shard = client_of(memory_location()).create_shard("t", pa.schema([("d", pa.date32())]), ["d"])
    with pytest.raises(InvalidUsage, match="truncated"):
        shard.insert([{"d": pd.Timestamp("2024-01-01 00:00:00.000000001")}])


def test_columns_of_limited_types_are_merged() -> None:
    """A file has days of 32 bits for date64, which the check of a merge could not read: it was refused for ever."""
    schema = pa.schema([("k", pa.date64()), ("at", pa.timestamp("s")), ("days", pa.list_(pa.date64()))])
    shard = client_of(memory_location(small_merges=False)).create_shard("t", schema, ["k"])
    days = [dt.date(1969, 12, day) for day in range(25, 32)]
    for day in days:
        shard.insert([{"k": day, "at": dt.datetime(day.year, 1, day.day), "days": [day, None]}])  # noqa: DTZ001
    shard.optimize()
    table = shard.snapshot().to_arrow()
    assert (table["k"].to_pylist(), table["days"].to_pylist()) == (days, [[day, None] for day in days])


def test_a_frame_of_arrow_types_has_days_beyond_the_years_of_python() -> None:
    table = pa.table({"day": FAR["day"], "length": FAR["length"]})
    shard = client_of(memory_location()).create_shard("t", table.schema, ["day"])
    shard.insert(table.to_pandas(types_mapper=pd.ArrowDtype))
    assert shard.snapshot().to_arrow().select(["day", "length"]).equals(table)


@pytest.mark.parametrize(
    ("kind", "fits", "too_large"),
    [
        (pa.duration("s"), 90, 2**62),
        (pa.timestamp("s"), 90, None),
        (pa.timestamp("us", "+05:30"), 90_000_000, None),
        (pa.list_(pa.duration("s")), [90], [2**62]),
        (pa.decimal256(50, 2), Decimal("1.25"), Decimal(10**40)),
    ],
    ids=str,
)
def test_polars_has_the_same_values_or_says_that_it_has_no_type_for_one(
    kind: pa.DataType, fits: Any, too_large: Any
) -> None:
    shard = client_of(memory_location()).create_shard("t", pa.schema([("id", pa.int64()), ("v", kind)]), ["id"])
    shard.insert(pa.table({"id": [1], "v": pa.array([fits], kind)}))
    [shown] = shard.snapshot().to_polars()["v"].to_list()
    assert shown == shard.snapshot().to_arrow()["v"].to_pylist()[0]
    with shard.scan() as scan:
        assert scan.polars().collect()["v"].to_list() == [shown]
    if too_large is not None:
        shard.insert(pa.table({"id": [2], "v": pa.array([too_large], kind)}))
        with pytest.raises(InvalidUsage, match="Polars cannot hold"):
            shard.snapshot().to_polars()
