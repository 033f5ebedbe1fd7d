"""What Spark's processes share: connections, and types that come back."""

from __future__ import annotations

import datetime as dt
import decimal
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext

from persist.client.client import Connection
from persist.core.errors import InvalidUsage
from persist.parts import DIFF, ShardSchema
from persist.spark.executors import TRANSPORTS_MAX, transport
from persist.spark.spark_schemas import arrow_schema, cast, spark_schema

NOON = dt.datetime(2024, 2, 29, 12, tzinfo=dt.UTC)
KINDS: list[tuple[Any, list[Any]]] = [
    (pa.bool_(), [True, False]),
    *[(kind, [-(2 ** (kind.bit_width - 1)), -1]) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())],
    *[(kind, [0, 2**kind.bit_width - 1]) for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())],
    *[(kind, [0.5, -1.0]) for kind in (pa.float16(), pa.float32(), pa.float64())],
    *[(kind, ["", "\u00fc"]) for kind in (pa.string(), pa.large_string())],
    *[(kind, [b"ab", b"\xff\x00"]) for kind in (pa.binary(), pa.large_binary(), pa.binary(2))],
    *[(kind, [dt.date(1999, 12, 31)]) for kind in (pa.date32(), pa.date64())],
    *[(pa.timestamp(unit, "UTC"), [NOON]) for unit in ("s", "ms", "us", "ns")],
    *[(pa.timestamp(unit), [NOON.replace(tzinfo=None)]) for unit in ("s", "ms", "us", "ns")],
    *[(pa.duration(unit), [dt.timedelta(days=-3)]) for unit in ("s", "ms", "us", "ns")],
    *[(kind, [dt.time(1, 2, 3)]) for kind in (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))],
    *[(kind, [decimal.Decimal("1.50")]) for kind in (pa.decimal128(9, 2), pa.decimal128(38, 2), pa.decimal256(38, 2))],
    *[(kind(pa.uint64()), [[2**64 - 1, None], []]) for kind in (pa.list_, pa.large_list)],
    (pa.list_(pa.uint64(), 2), [[1, 2**64 - 1]]),
    (pa.struct([("a", pa.uint64()), ("b", pa.string())]), [{"a": 2**64 - 1, "b": "x"}, {"a": None, "b": None}]),
    (pa.map_(pa.string(), pa.uint64()), [[("a", 2**64 - 1)], []]),
]


@pytest.mark.parametrize(("kind", "values"), KINDS, ids=[str(kind) for kind, _ in KINDS])
def test_what_spark_shows_comes_back_as_it_was(kind: Any, values: list[Any]) -> None:
    schema = ShardSchema(pa.schema([pa.field("k", pa.int64()), pa.field("v", kind)]), ("k",))
    stored = pa.table({"k": range(len(values) + 1), "v": pa.array([*values, None], kind)}, schema=schema.arrow)
    shown = cast(stored, arrow_schema(spark_schema(schema.arrow)))
    assert schema.conform(shown, 0).select(["k", "v"]).equals(stored)
    empty = schema.conform(shown.slice(0, 0), 0)
    assert (len(empty), empty.schema.field("v").type, DIFF in empty.schema.names) == (0, kind, True)


@pytest.mark.parametrize("value", [decimal.Decimal(2**64), decimal.Decimal(-1)])
def test_a_whole_number_that_does_not_fit_is_refused(value: decimal.Decimal) -> None:
    schema = ShardSchema(pa.schema([pa.field("v", pa.uint64())]), ("v",))
    with pytest.raises(InvalidUsage, match="column 'v' does not fit uint64"):
        schema.conform(pa.table({"v": pa.array([value], pa.decimal128(20, 0))}), 0)


def test_decimals_with_a_fraction_are_no_whole_numbers() -> None:
    schema = ShardSchema(pa.schema([pa.field("v", pa.uint64())]), ("v",))
    with pytest.raises(InvalidUsage, match="cast it first"):
        schema.conform(pa.table({"v": pa.array([decimal.Decimal("1.0")], pa.decimal128(20, 1))}), 0)


# --- what one python process of spark keeps open, and what it lets go


def test_a_location_that_was_not_used_for_long_is_closed(tmp_path: Path) -> None:
    """Its threads went on, and asked its log for news 200 times a second, for as long as the process lived."""
    for number in range(TRANSPORTS_MAX):  # what other tests have opened is closed by then
        transport(Connection(f"persist://{tmp_path}/{number}"))
    open_now = threading.active_count()
    for number in range(2 * TRANSPORTS_MAX):
        transport(Connection(f"persist://{tmp_path}/later{number}"))
    assert threading.active_count() <= open_now


@pytest.mark.parametrize(("is_task", "connect_s"), [(False, 5.0), (True, 60.0)])
def test_a_task_waits_longer_for_a_server_than_the_driver_does(
    is_task: bool, connect_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver tells a wrong URL soon. A task knows that the URL is right: its server may be starting again."""
    opened: list[Connection] = []
    monkeypatch.setattr(Connection, "transport", lambda connection: opened.append(connection))
    monkeypatch.setattr(TaskContext, "get", lambda: object() if is_task else None)
    transport(Connection("http://127.0.0.1:1", token=f"is a task: {is_task}"))
    assert [one.connect_s for one in opened] == [connect_s]


def test_a_location_that_is_still_held_stays_open(tmp_path: Path) -> None:
    held = transport(Connection(f"persist://{tmp_path}/held"))
    for number in range(3 * TRANSPORTS_MAX):
        transport(Connection(f"persist://{tmp_path}/{number}"))
    assert list(held.names("", "", 10)) == []
