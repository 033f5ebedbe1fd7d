"""Every Spark type that a shard can hold goes in and comes back, through a server, whatever the session's time zone."""

from __future__ import annotations

import datetime as dt
import decimal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from tests.support.server import Server

pytestmark = pytest.mark.spark

DDL = (
    "k string, bt tinyint, st smallint, i int, l bigint, f float, d double, m decimal(20,4), b boolean, x binary, "
    "day date, at timestamp, local timestamp_ntz, span interval day to second, "
    "a array<struct<p:int,q:string>>, mp map<string,array<int>>, s struct<u:decimal(5,1),w:struct<z:timestamp>>"
)
AT = dt.datetime(2024, 2, 29, 23, 59, 59, 123456)  # noqa: DTZ001 - as Spark hands it over
ROW = (
    "key", -128, 32767, -1, 2**62, 1.5, -0.25, decimal.Decimal("1234.5678"), True, bytearray(b"\x00\xff"),
    dt.date(1999, 12, 31), AT, AT, dt.timedelta(days=-3, microseconds=7),
    [(1, "one"), None], {"m": [1, None]}, (decimal.Decimal("9.5"), (AT,)),
)  # fmt: skip
NULLS = ("nulls", *[None] * (len(ROW) - 1))


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The URL of a server of its own."""
    with Server(tmp_path / "shards") as server:
        yield server.url


def test_every_type_round_trips_over_http(spark: Any, served: str) -> None:
    frame = spark.createDataFrame([ROW, NULLS], DDL)
    frame.write.format("persist").mode("append").options(url=served, key="k,bt").save("kinds")
    back = spark.read.format("persist").option("url", served).load("kinds")
    assert back.schema == frame.schema
    assert sorted(back.collect(), key=lambda row: row.k) == sorted(frame.collect(), key=lambda row: row.k)
    with persist.connect(served) as client:
        stored = client.shard("kinds").schema.arrow
        assert stored.field("at").type == pa.timestamp("us", "UTC")
        found = client.shard("kinds").snapshot().to_arrow(expand=True).to_pylist()[0]
        expected = dt.datetime(2024, 2, 29, 23, 59, 59, 123456, tzinfo=dt.UTC)
        assert found["local"] == expected.replace(tzinfo=None)


def test_types_that_spark_lacks_come_as_the_next_wider(client: Any, load: Any) -> None:
    schema = pa.schema([
        ("k", pa.large_string()), ("u8", pa.uint8()), ("u16", pa.uint16()), ("u32", pa.uint32()), ("u64", pa.uint64()),
        ("h", pa.float16()), ("fixed", pa.binary(2)), ("ms", pa.timestamp("ms", "UTC")),
        ("pair", pa.list_(pa.int8(), 2)), ("day", pa.date64()),
    ])  # fmt: skip
    row = ["k", 255, 65535, 2**32 - 1, 2**64 - 1, 0.5, b"ab", dt.datetime(2024, 1, 1, tzinfo=dt.UTC), [1, 2],
           dt.date(2024, 1, 1)]  # fmt: skip
    shard = client.create_shard("kinds", schema, ["k"])
    shard.insert(pa.table([pa.array([v], f.type) for v, f in zip(row, schema, strict=True)], schema=schema))
    frame = load("kinds")
    kinds = [kind for _, kind in frame.dtypes]
    assert " ".join(kinds) == ("string smallint int bigint decimal(20,0) float binary timestamp array<tinyint> date")
    found = frame.drop("ms").collect()[0]
    assert list(found) == [row[0], *row[1:4], decimal.Decimal(row[4]), 0.5, bytearray(b"ab"), [1, 2], row[9]]
    assert frame.selectExpr("unix_seconds(ms)").collect()[0][0] == 1704067200


def test_plain_python_reads_the_same_rows(spark: Any, client: Any, load: Any, save: Any) -> None:
    """Without Spark: Arrow, pandas, Polars and DuckDB show what the data source shows."""
    rows = [("a", 1), ("a", 1), ("b", 2)]
    save(spark.createDataFrame(rows, "k string, n bigint"), "orders", key="k")
    snapshot = client.shard("orders").snapshot
    assert sorted(map(tuple, load("orders").collect())) == rows
    assert [tuple(row.values()) for row in snapshot().to_arrow(expand=True).to_pylist()] == rows
    pytest.importorskip("pandas")
    assert [tuple(row) for row in snapshot().to_pandas().itertuples(index=False)] == rows
    pytest.importorskip("polars")
    assert snapshot().to_polars().rows() == rows
    pytest.importorskip("duckdb")
    assert sorted(snapshot().to_duckdb().fetchall()) == rows
