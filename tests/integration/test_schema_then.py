"""Reads of an earlier time by the columns that the shard had then."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import urlopen

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql.types import StructType

import persist
from persist import Client, InvalidUsage, Shard, Token, WriteHandle, WriteSettings
from persist.client.write import by_token
from persist.core import commands as c
from persist.core.ids import mint
from persist.core.transitions.context import SOUND
from persist.parts.schema_changes import AddColumn, DropColumn, MoveColumn, RenameColumn, WidenColumn, apply_changes
from rpc.cli.program import main
from tests.support.embedded import client_of
from tests.support.location import memory_location
from tests.support.served import Served
from tests.support.without_jvm import planned, read, rows_of, source, write

SCHEMA = pa.schema([("id", pa.int64()), ("state", pa.string()), ("n", pa.int32()), ("note", pa.string())])
FIRST = {"id": 1, "state": "new", "n": 1, "note": "x"}


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with closing(persist.connect(f"persist://{tmp_path / 'data'}")) as client:
        yield client


@pytest.fixture
def shard(client: Client) -> Shard:
    """A row at each of the times 0, 1 and 2, and changes of the columns between them."""
    shard = client.create_shard("orders", SCHEMA, key=["id"])
    shard.insert([FIRST])
    shard.alter(RenameColumn("state", "status"), AddColumn("city", pa.string(), default="Bonn"))
    shard.insert([{"id": 2, "status": "old", "n": 2, "note": "y", "city": "Kiel"}])
    shard.widen_column("n", pa.int64())
    shard.alter(DropColumn("note"), MoveColumn("city"), RenameColumn("id", "key"), AddColumn("state", pa.float64()))
    shard.insert([{"key": 3, "status": "new", "n": 2**40, "city": "Ulm", "state": 0.5}])
    return shard


def then(shard: Shard, as_of: int | None = None, **more: Any) -> pa.Table:
    return shard.snapshot(as_of, schema="then", **more).to_arrow(expand=True)


def test_a_read_shows_the_columns_of_then_with_their_names_places_and_types(shard: Shard) -> None:
    first, second, third = (then(shard, time) for time in range(3))
    assert first.schema == pa.schema([("id", pa.int64()), ("state", pa.string()), ("n", pa.int32())])
    assert first.to_pylist() == [{"id": 1, "state": "new", "n": 1}]
    assert second.schema.names == ["id", "status", "n", "city"]
    assert second.schema.field("n").type == pa.int32()
    assert second.to_pylist()[1] == {"id": 2, "status": "old", "n": 2, "city": "Kiel"}
    assert third.schema.names == ["city", "key", "status", "n", "state"]
    assert third.equals(shard.snapshot().to_arrow(expand=True))


def test_the_columns_of_today_are_shown_unless_those_of_then_are_asked_for(shard: Shard) -> None:
    expected = [{"city": "Bonn", "key": 1, "status": "new", "n": 1, "state": None}]
    assert shard.snapshot(0).to_arrow(expand=True).to_pylist() == expected
    assert shard.snapshot(0, schema="now").to_arrow(expand=True).to_pylist() == expected
    for wrong in ("old", None, 1):
        with pytest.raises(InvalidUsage, match=r"it is 'now', for the columns of today, or 'then'"):
            shard.snapshot(0, schema=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("before", [lambda shard: None, lambda shard: shard.optimize()], ids=["as written", "merged"])
def test_filters_keys_and_limits_go_by_the_columns_of_then(shard: Shard, before: Callable[[Shard], object]) -> None:
    before(shard)
    assert then(shard, 1, where="status = 'old' AND n = 2").num_rows == 1
    assert then(shard, 0, where="state = 'new'", columns=["n"]).to_pylist() == [{"n": 1}]
    assert then(shard, 1, columns=["status", "id"]).to_pylist() == [
        {"status": "new", "id": 1}, {"status": "old", "id": 2},
    ]  # fmt: skip
    assert then(shard, 1, start_key=2)["id"].to_pylist() == [2]
    assert then(shard, 1, where="id = 1")["id"].to_pylist() == [1]
    assert then(shard, 1, limit=1).num_rows == 1
    for name in ("city", "key", "status"):
        with pytest.raises(InvalidUsage, match=name):
            then(shard, 0, columns=[name])
    with shard.snapshot(1, schema="then", num_splits=3) as found:
        assert found.schema.arrow.names == ["id", "status", "n", "city"]
        assert sum(table.num_rows for table in found.batches()) == 2


def test_of_a_time_without_rows_the_columns_are_shown_too(client: Client) -> None:
    shard = client.create_shard("s", SCHEMA, key=["id"])
    shard.drop_column("note")
    assert then(shard).schema.names == ["id", "state", "n"]
    shard.insert([{"id": 1}])
    shard.rename_column("n", "m")
    assert then(shard, -1).schema.names == ["id", "state", "n"]
    assert then(shard, 0, where="n > 7").schema.names == ["id", "state", "n"]


def test_every_way_to_widen_goes_back(client: Client) -> None:
    kinds = pa.schema(
        [
            ("id", pa.int64()), ("f", pa.float32()), ("d", pa.decimal128(5, 2)), ("day", pa.date32()),
            ("at", pa.date32()), ("in", pa.list_(pa.struct([("a", pa.int8())]))),
        ]
    )  # fmt: skip
    wider = {
        "f": pa.float64(), "d": pa.decimal128(20, 4), "day": pa.timestamp("us"), "at": pa.timestamp("ms"),
        "in": pa.list_(pa.struct([("a", pa.int64()), ("b", pa.string())])),
    }  # fmt: skip
    shard = client.create_shard("s", kinds, key=["id"])
    day = dt.date(2024, 2, 29)
    row = {"id": 1, "f": 0.1, "d": Decimal("1.25"), "day": day, "at": day, "in": [{"a": 1}, None]}
    shard.insert([row, {"id": 2}])
    before = shard.snapshot().to_arrow()
    for name, kind in wider.items():
        shard.widen_column(name, kind)
    shard.insert([{"id": 3, "f": 1e300, "in": [{"a": 2**40, "b": "x"}]}])
    assert shard.snapshot(0, schema="then").to_arrow().equals(before)
    shard.optimize()
    assert shard.snapshot(0, schema="then").to_arrow().equals(before)


def test_rows_and_columns_that_were_replaced_together(client: Client, tmp_path: Path) -> None:
    shard = client.create_shard("orders", SCHEMA, key=["id"])
    shard.insert([FIRST])
    frame = pa.table({"id": [2], "n": pa.array([2**40], pa.int64())})
    write(f"persist://{tmp_path / 'data'}", "orders", frame, overwrite=True, overwriteSchema="true")
    shard.refresh_schema()
    assert then(shard, 0).to_pylist() == [{"id": 1, "n": 1}]
    assert then(shard, 0).schema.field("n").type == pa.int32()
    assert then(shard, 1).to_pylist() == [{"id": 2, "n": 2**40}], "the time of the commit that brought them"


def test_tags_wall_clocks_and_clones(client: Client, shard: Shard) -> None:
    shard.tag("before", 0)
    assert shard.snapshot(tag="before", schema="then").to_arrow(expand=True).schema.names == ["id", "state", "n"]
    copy = client.clone("orders", "copy")
    assert then(copy, 1).equals(then(shard, 1))


def test_http_shows_the_columns_of_then() -> None:
    with Served(memory_location()) as served:
        shard = served.client.create_shard("orders", SCHEMA, key=["id"])
        shard.insert([FIRST])
        shard.rename_column("state", "status")

        def get(**more: str) -> tuple[int, bytes]:
            said = urlencode({"as_of": "0", "format": "ndjson", **more})
            try:
                with urlopen(f"{served.url}/v1/shards/orders/snapshot?{said}") as answer:
                    return answer.status, answer.read()
            except HTTPError as error:
                return error.code, error.read()

        assert json.loads(get(schema="then", where="state = 'new'")[1]) == {**FIRST, "__diff": 1}
        assert b"status" in get()[1]
        assert get(schema="then", where="status = 'new'")[0] == 400
        assert b"parameter schema is 'old'; it is 'now'" in get(schema="old")[1]
        with closing(persist.connect(served.url)) as client:
            assert then(client.shard("orders"), 0).to_pylist() == [FIRST]


def test_cat_and_export_take_the_columns_of_then(shard: Shard, tmp_path: Path, capsys: Any) -> None:
    at = ["--dir", str(tmp_path / "data")]
    assert main(["cat", "orders", "--as-of", "0", "--schema", "then", "--format", "ndjson", *at]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": 1, "state": "new", "n": 1}
    out = tmp_path / "out.parquet"
    assert main(["export", "orders", str(out), "--as-of", "1", "--schema", "then", *at]) == 0
    assert pq.read_table(out).schema.names == ["id", "status", "n", "city"]


def test_spark_shows_the_columns_of_then(shard: Shard, tmp_path: Path) -> None:
    url = f"persist://{tmp_path / 'data'}"
    assert read(url, "orders", schemaAsOf="then", versionAsOf=0) == [{"id": 1, "state": "new", "n": 1}]
    assert read(url, "orders", schemaAsOf="then", asOf=1, columns="status", where="n = 2") == [{"status": "old"}]
    assert read(url, "orders", schemaAsOf="then") == read(url, "orders")
    assert read(url, "orders", schemaAsOf="now", asOf=0)[0]["status"] == "new"
    assert read(url, "orders", schemaAsOf="then", asOf=-1) == []
    shard.tag("first", 0)
    assert read(url, "orders", schemaAsOf="THEN", tag="first")[0]["state"] == "new"
    with pytest.raises(InvalidUsage, match=r"'schemaAsOf' is .*; it must be one of now, then"):
        read(url, "orders", schemaAsOf="0")
    with pytest.raises(InvalidUsage, match="'schemaAsOf' does not apply to readChangeFeed"):
        read(url, "orders", schemaAsOf="then", readChangeFeed="true")
    with pytest.raises(InvalidUsage, match="'schemaAsOf' does not apply to a streaming read"):
        source(url, "orders", schemaAsOf="then").streamReader(StructType()).initialOffset()


def test_spark_tasks_go_on_after_their_lease_by_the_columns_of_then(shard: Shard, tmp_path: Path) -> None:
    """They plan their split anew, when the columns may have changed once more."""
    url = f"persist://{tmp_path / 'data'}"
    reader, partitions = planned(url, "orders", schemaAsOf="then", asOf=1)
    shard.rename_column("status", "state_of_it")
    shard._transport.apply("orders", c.ExpireReader(partitions[0].value.reader))
    assert rows_of(reader, partitions)[1] == {"id": 2, "status": "old", "n": 2, "city": "Kiel"}


def test_a_data_frame_of_spark_whose_tag_was_moved_is_loaded_again(shard: Shard, tmp_path: Path) -> None:
    """Its names may mean other columns at another time."""
    shard.tag("at", 0)
    found = source(f"persist://{tmp_path / 'data'}", "orders", schemaAsOf="then", tag="at", columns="n")
    reader = found.reader(found.schema())
    assert shard.untag("at")
    shard.tag("at", 1)
    with pytest.raises(InvalidUsage, match=r"reads a time whose columns differ: call load\(\) again"):
        reader.partitions()


def test_rows_of_a_newer_schema_never_join_a_time_of_before() -> None:
    """Inserts of one commit share a time. Beyond a change of the columns they do not: then would be two schemas."""
    location = memory_location()
    with closing(client_of(location)) as client:
        shard = client.create_shard("s", SCHEMA, key=["id"])
        shard.insert([FIRST])
        wider = apply_changes(shard.schema, [WidenColumn("n", pa.int64())])
        with closing(shard.open_writer()) as writer:
            old, same = (writer.stage_for_one_commit([{**FIRST, "id": number}], None) for number in (2, 3))
            later = WriteHandle(shard._transport, "s", lambda: (2, wider), WriteSettings())
            new = later.stage_for_one_commit([{**FIRST, "id": 4, "n": 2**40}], None)
            tokens = [mint(Token, shard._transport.ids) for _ in range(3)]
            commands: list[c.Command] = [
                by_token(lambda w, t, runs=runs: c.Insert(w, t, runs), token)  # type: ignore[misc]
                for runs, token in zip((old, same, new), tokens, strict=True)
            ]
            commands.insert(2, c.EvolveSchema(1, wider.to_record()))
            machine, work, answers = location.machine("s"), [], []
            for command in commands:
                machine.submit(command, work.append, answers.append, SOUND)
            work[0]()
        shard.refresh_schema()
        assert [one.lower.element for one in answers if isinstance(one, c.Appended)] == [1, 1, 2]
        assert then(shard, 1)["n"].type == pa.int32()
        assert then(shard, 1)["id"].to_pylist() == [1, 2, 3]
        assert then(shard, 2)["n"].to_pylist() == [1, 1, 1, 2**40]
