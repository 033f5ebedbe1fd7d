"""A column of days becomes one of moments in microseconds, where every day that it has or had has room there."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import persist
from persist.client.client import Client
from persist.client.shard import Shard
from persist.core import commands as c
from persist.core.errors import InvalidUsage, SchemaMismatch, UpperMismatch
from persist.core.frontier import Antichain
from persist.parts.schema_changes import WidenColumn, apply_changes
from tests.support.location import memory_location
from tests.support.served import Served
from tests.support.without_jvm import read, write

SCHEMA = pa.schema([("id", pa.int64()), ("day", pa.date32())])
US = pa.timestamp("us")
DAY = dt.date(2024, 2, 29)
MIDNIGHT = dt.datetime(2024, 2, 29)  # noqa: DTZ001 - a day has no zone
LAST, FIRST = 106_751_991, -106_751_991  # the days that microseconds of 64 bits have room for


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"persist://{tmp_path / 'data'}"


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with closing(persist.connect(url)) as client:
        yield client


@pytest.fixture
def shard(client: Client) -> Shard:
    shard = client.create_shard("orders", SCHEMA, key=["id"])
    shard.insert([{"id": 1, "day": DAY}, {"id": 2, "day": None}])
    return shard


def days(*numbers: int, first: int = 10) -> pa.Table:
    """Rows with these days since 1970, which no `datetime.date` holds where they are far."""
    column = pa.array(numbers, pa.int32()).cast(pa.date32())
    return pa.table({"id": pa.array(range(first, first + len(numbers)), pa.int64()), "day": column})


def rows(shard: Shard, as_of: int | None = None, where: str | None = None) -> list[dict[str, Any]]:
    return list(shard.snapshot(as_of, where=where).to_arrow(expand=True).to_pylist())


def test_days_are_midnights_afterwards_at_all_times(shard: Shard) -> None:
    shard.widen_column("day", US)
    assert shard.schema.arrow.field("day").type == US
    noon = MIDNIGHT.replace(hour=12)
    shard.insert([{"id": 3, "day": noon}])
    before = [{"id": 1, "day": MIDNIGHT}, {"id": 2, "day": None}]
    assert rows(shard, 0) == before
    assert rows(shard) == [*before, {"id": 3, "day": noon}]
    shard.optimize()
    assert rows(shard) == [*before, {"id": 3, "day": noon}]


def test_filters_and_statistics_go_by_moments(shard: Shard) -> None:
    """Files of before have statistics of days."""
    shard.insert(pa.table({"id": range(100, 50_100), "day": pa.array(range(50_000), pa.int32()).cast(pa.date32())}))
    shard.widen_column("day", US)
    shard.insert([{"id": 3, "day": MIDNIGHT.replace(hour=12)}])
    midnight, noon = "TIMESTAMP_NTZ '2024-02-29 00:00:00'", "TIMESTAMP_NTZ '2024-02-29 12:00:00'"
    found = (MIDNIGHT.date() - dt.date(1970, 1, 1)).days + 100
    assert [row["id"] for row in rows(shard, where=f"day = {midnight}")] == [1, found]
    assert [row["id"] for row in rows(shard, where=f"day >= {midnight} AND day <= {noon}")] == [1, 3, found]
    assert len(rows(shard, where=f"day < {midnight}")) == found - 100
    assert [row["id"] for row in rows(shard, where="day IS NULL")] == [2]


def test_rows_stay_in_order_and_are_the_same_rows(shard: Shard) -> None:
    """What was written as a day is taken away as a midnight, also before files are rewritten."""
    shard.widen_column("day", US)
    shard.insert([{"id": 1, "day": MIDNIGHT, "__diff": -1}, {"id": 1, "day": MIDNIGHT.replace(second=1)}])
    assert rows(shard) == [{"id": 1, "day": MIDNIGHT.replace(second=1)}, {"id": 2, "day": None}]


@pytest.mark.parametrize("number", [LAST, FIRST])
def test_the_farthest_days_that_have_room_stay(shard: Shard, number: int) -> None:
    shard.insert(days(number))
    shard.widen_column("day", US)
    table = shard.snapshot().to_arrow()
    assert table["day"].cast(pa.int64()).to_pylist()[-1] == number * 86_400_000_000


@pytest.mark.parametrize("number", [LAST + 1, FIRST - 1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("count", [1, 40_000])
def test_a_day_without_room_is_refused_and_nothing_changes(shard: Shard, number: int, count: int) -> None:
    """Inline, and in a file."""
    shard.insert(days(*range(count), number))
    seqno = shard.view().seqno
    with pytest.raises(InvalidUsage, match=r"column 'day' of shard 'orders' has, or had, a day .* timestamp\[ms\]"):
        shard.widen_column("day", US)
    assert shard.refresh_schema().arrow == SCHEMA
    assert len(shard.view().schemas) == 1
    assert shard.view().seqno >= seqno
    shard.widen_column("day", pa.timestamp("ms"))
    assert shard.snapshot().to_arrow()["day"].cast(pa.int64()).to_pylist()[-1] == number * 86_400_000


def test_so_is_one_that_was_taken_away(shard: Shard) -> None:
    """Earlier times still show it, and merges read it."""
    far = days(LAST + 1)
    shard.insert(far)
    shard.insert(far.append_column("__diff", pa.array([-1])))
    with pytest.raises(InvalidUsage, match="has, or had, a day"):
        shard.widen_column("day", US)


def test_a_default_is_a_day_too(client: Client) -> None:
    shard = client.create_shard("orders", pa.schema([("id", pa.int64())]), key=["id"])
    shard.insert([{"id": 1}])
    shard.add_column("day", pa.date32(), default=DAY)
    shard.widen_column("day", US)
    assert rows(shard) == [{"id": 1, "day": MIDNIGHT}]


def test_writers_of_before_go_on_and_bring_no_far_day(client: Client, shard: Shard) -> None:
    before = client.shard("orders")
    staged = shard.open_writer()
    runs = staged.stage(days(LAST + 1), None)
    shard.widen_column("day", US)
    before.insert([{"id": 3, "day": DAY}])
    assert rows(shard)[-1] == {"id": 3, "day": MIDNIGHT}
    with pytest.raises(InvalidUsage, match="day"):
        client.shard("orders").insert(days(LAST + 1))
    with pytest.raises(SchemaMismatch, match="stage the rows again"):
        staged.commit_insert(runs)
    assert len(rows(shard)) == 3


def test_who_writes_while_the_days_are_looked_at_makes_it_look_again(
    shard: Shard, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    rival = client.shard("orders")
    given = [days(1), days(LAST + 1, first=20)]
    original = shard._transport.apply

    def apply(name: str, command: c.Command, *more: Any) -> Any:
        if isinstance(command, c.EvolveSchema) and given:
            rival.insert(given.pop(0))
        return original(name, command, *more)

    monkeypatch.setattr(shard._transport, "apply", apply)
    with pytest.raises(InvalidUsage, match="has, or had, a day"):
        shard.widen_column("day", US)
    assert given == []
    assert shard.refresh_schema().arrow == SCHEMA


def test_a_server_takes_no_such_change_that_was_not_looked_at(shard: Shard) -> None:
    with Served(memory_location()) as served, persist.connect(served.url) as far:
        for transport_of in (served.client, far):
            known = transport_of.create_shard(f"s{id(transport_of)}", SCHEMA, key=["id"])
            known.insert([{"id": 1, "day": DAY}])
            after = apply_changes(known.schema, [WidenColumn("day", US)]).to_record()
            with pytest.raises(InvalidUsage, match="checked for range"):
                known._transport.apply(known.name, c.EvolveSchema(1, after))
            with pytest.raises(UpperMismatch):
                known._transport.apply(known.name, c.EvolveSchema(1, after, Antichain(0)))
            known.widen_column("day", US)
            assert rows(known) == [{"id": 1, "day": MIDNIGHT}]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        (pa.timestamp("us", "UTC"), "and a date has no zone"),
        (pa.timestamp("ns"), "only widening is possible"),
        (pa.timestamp("s"), "only widening is possible"),
    ],
)
def test_other_moments_are_refused(shard: Shard, kind: pa.DataType, why: str) -> None:
    with pytest.raises(InvalidUsage, match=why):
        shard.widen_column("day", kind)


def test_a_key_column_and_days_within_values_are_refused(client: Client) -> None:
    kinds = pa.schema([("day", pa.date32()), ("in", pa.list_(pa.date32()))])
    shard = client.create_shard("orders", kinds, key=["day"])
    with pytest.raises(InvalidUsage, match="key column 'day' changes from date32"):
        shard.widen_column("day", US)
    with pytest.raises(InvalidUsage, match="only widening is possible"):
        shard.widen_column("in", pa.list_(US))


def test_spark_widens_days_by_merge_schema(shard: Shard, url: str) -> None:
    noon = MIDNIGHT.replace(hour=12)
    frame = pa.table({"id": [3], "day": pa.array([noon], US)})
    write(url, "orders", frame, mergeSchema="true")
    assert read(url, "orders") == [
        {"id": 1, "day": MIDNIGHT}, {"id": 2, "day": None}, {"id": 3, "day": noon},
    ]  # fmt: skip
    write(url, "orders", days(LAST + 1).slice(0, 0), mergeSchema="true")  # a job that knows days goes on
    assert shard.refresh_schema().arrow.field("day").type == US


def test_spark_widens_no_far_day(shard: Shard, url: str) -> None:
    shard.insert(days(LAST + 1))
    frame = pa.table({"id": [3], "day": pa.array([MIDNIGHT], US)})
    with pytest.raises(InvalidUsage, match="has, or had, a day"):
        write(url, "orders", frame, mergeSchema="true")
    assert shard.refresh_schema().arrow == SCHEMA
    write(url, "orders", frame, overwrite=True, overwriteSchema="true")  # another column of the name
    assert shard.refresh_schema().arrow.field("day").type == US
    assert rows(shard) == [{"id": 3, "day": MIDNIGHT}]
    assert {row["day"] for row in rows(shard, 1)} == {None}
