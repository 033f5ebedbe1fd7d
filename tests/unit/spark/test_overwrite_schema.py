"""Mode overwrite with `overwriteSchema`: columns and rows are replaced together, by one commit, or neither is."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

from persist.client.client import Client
from persist.client.shard import Shard
from persist.core import commands as c
from persist.core.errors import InvalidUsage, SchemaMismatch
from persist.parts.schema_changes import AddColumn, WidenColumn
from persist.spark import executors
from tests.support.late import LateTransport
from tests.support.location import memory_location
from tests.support.served import Served
from tests.support.without_jvm import read, source, write, writer

SCHEMA = pa.schema([("id", pa.int64()), ("state", pa.string()), ("n", pa.int32()), ("note", pa.string())])
ROWS = [{"id": 1, "state": "new", "n": 1, "note": "x"}, {"id": 2, "state": "old", "n": 2, "note": "y"}]
FRAME = pa.table({"n": pa.array([2**40], pa.int64()), "id": [7], "city": ["Bonn"], "state": pa.array([5], pa.int32())})
AFTER = [{"n": 2**40, "id": 7, "city": "Bonn", "state": 5}]


@pytest.fixture
def shard(client: Client) -> Shard:
    shard = client.create_shard("orders", SCHEMA, key=["id"])
    shard.insert(ROWS)
    return shard


def overwrite(url: str, *tables: pa.Table, **options: Any) -> None:
    write(url, "orders", *tables, overwrite=True, **{"overwriteSchema": "true", **options})


def columns(shard: Shard) -> list[str]:
    return list(shard.refresh_schema().arrow.names)


def rows(shard: Shard, as_of: int | None = None) -> list[dict[str, Any]]:
    shard.refresh_schema()
    return list(shard.snapshot(as_of).to_arrow(expand=True).to_pylist())


def test_columns_and_rows_are_those_of_the_data_frame_afterwards(shard: Shard, url: str) -> None:
    before = shard.schema.id_of
    overwrite(url, FRAME)
    assert rows(shard) == read(url, "orders") == AFTER
    after = shard.schema
    assert after.arrow.equals(pa.schema([*FRAME.schema]))
    assert after.key == ("id",)
    assert after.id_of["n"] == before["n"], "it was widened"
    assert after.id_of["id"] == before["id"]
    assert {after.id_of["state"], after.id_of["city"]}.isdisjoint(before.values()), "these are other columns"


def test_it_is_one_commit(shard: Shard, url: str) -> None:
    upper = shard.upper().element
    assert upper is not None
    overwrite(url, FRAME)
    assert shard.upper().element == upper + 1
    entry = shard.history(limit=1)[0]
    assert (entry.operation, entry.lower, entry.upper) == ("overwrite", upper, upper + 1)
    assert "evolve_schema" not in {one.operation for one in shard.history(limit=50)}


def test_rows_of_before_are_there_as_of_then_in_the_columns_that_went_on(shard: Shard, url: str) -> None:
    then = shard.upper().element
    assert then is not None
    overwrite(url, FRAME)
    assert rows(shard, then - 1) == [{"n": n, "id": n, "city": None, "state": None} for n in (1, 2)]


def test_columns_that_are_the_same_for_spark_stay_as_they_are(client: Client, url: str) -> None:
    """What Spark has read from a shard and writes back changes no column."""
    kinds = pa.schema(
        [
            ("id", pa.uint32()),
            ("small", pa.uint8()),
            ("at", pa.timestamp("ms")),
            ("text", pa.large_string()),
            pa.field("must", pa.int64(), nullable=False),
        ]
    )
    shard = client.create_shard("orders", kinds, key=["id"])
    shard.insert(pa.table({"id": [1], "small": [2], "at": [3], "text": ["x"], "must": [4]}).cast(kinds))
    again = pa.table(
        {
            "id": pa.array([9], pa.int64()),
            "small": pa.array([8], pa.int16()),
            "at": pa.array([7000], pa.timestamp("us")),
            "text": ["y"],
            "must": [4],
        }
    )
    overwrite(url, again)
    assert shard.refresh_schema().arrow == kinds
    assert len(shard.view().schemas) == 1, "no schema was made"
    assert rows(shard)[0]["id"] == 9


def test_where_columns_are_only_added_any_level_will_do(shard: Shard, url: str) -> None:
    more = pa.table({"id": [3], "state": ["new"], "n": pa.array([3], pa.int32()), "note": ["z"], "city": ["Bonn"]})
    overwrite(url, more)
    assert shard.refresh_schema().is_plain
    assert rows(shard) == more.to_pylist()


def test_the_history_tells_of_columns_that_changed_where_there_was_no_row(client: Client, url: str) -> None:
    shard = client.create_shard("orders", SCHEMA, key=["id"])
    overwrite(url, FRAME.slice(0, 0))
    assert columns(shard) == FRAME.schema.names
    assert shard.upper().element == 0
    assert shard.history(limit=1)[0].operation == "overwrite"


@pytest.mark.parametrize(("frame", "options", "error"), [
    ({"n": [1]}, {}, r"lacks 'id', a key column of shard 'orders': overwriteSchema keeps the key"),
    ({"id": ["a"]}, {}, r"key column 'id' of shard 'orders' is int64, not string: overwriteSchema keeps the key"),
    ({"id": pa.array([1], pa.int32())}, {}, "key column 'id' of shard 'orders' is int64, not int32"),
    ({"id": [1], "n": [1]}, {"key": "n"}, r"has the key \('id'\), not \('n'\)"),
    ({"id": [1], "_change_type": ["x"]}, {}, "is reserved"),
    ({"id": [1]}, {"mergeSchema": "true"}, "'overwriteSchema' and 'mergeSchema' are exclusive"),
])  # fmt: skip
def test_what_cannot_be_is_refused_and_changes_nothing(
    shard: Shard, url: str, frame: dict[str, Any], options: dict[str, str], error: str
) -> None:
    before = shard.view().seqno
    with pytest.raises(InvalidUsage, match=error):
        overwrite(url, pa.table(frame), **options)
    assert shard.view().seqno == before


def test_other_modes_and_streams_refuse_the_option(shard: Shard, url: str) -> None:
    with pytest.raises(InvalidUsage, match="'overwriteSchema' needs mode 'overwrite'"):
        write(url, "orders", FRAME, overwriteSchema="true")
    with pytest.raises(InvalidUsage, match="'overwriteSchema' does not apply to a streaming write"):
        source(url, "orders", overwriteSchema="true").streamWriter(StructType(), True)
    assert rows(shard) == ROWS


def test_what_asks_for_a_column_keeps_it_from_going(shard: Shard, url: str) -> None:
    shard.set_constraints(checks={"positive": "n > 0"})
    with pytest.raises(InvalidUsage, match="'positive' refers to column 'n': remove it first"):
        overwrite(url, pa.table({"id": [1]}))
    with pytest.raises(InvalidUsage, match="'positive'"):
        overwrite(url, pa.table({"id": [1], "n": pa.array([-1], pa.int32())}))
    assert rows(shard) == ROWS
    overwrite(url, pa.table({"id": [1], "n": pa.array([1], pa.int32())}))
    assert rows(shard) == [{"id": 1, "n": 1}]
    assert [check.name for check in shard.schema.details.checks] == ["positive"]


def test_a_policy_of_rows_keeps_its_column(client: Client, url: str) -> None:
    shard = client.create_shard("orders", pa.schema([("id", pa.int64()), ("at", pa.timestamp("us"))]), key=["id"])
    shard.retain({"column": "at", "column_age": "10d"})
    with pytest.raises(InvalidUsage, match="a row policy uses column 'at'"):
        overwrite(url, pa.table({"id": [1]}))
    assert columns(shard) == ["id", "at"]
    assert shard.upper().element == 0


def test_a_job_that_ends_before_its_commit_has_changed_nothing(shard: Shard, url: str) -> None:
    job = writer(url, "orders", FRAME.schema, overwrite=True, overwriteSchema="true")
    job.write(iter(FRAME.to_batches()))
    job.abort([])
    assert columns(shard) == SCHEMA.names
    assert rows(shard) == ROWS
    overwrite(url, FRAME)
    assert rows(shard) == AFTER


def test_a_commit_that_is_repeated_is_told_that_it_has_landed(shard: Shard, url: str) -> None:
    job = writer(url, "orders", FRAME.schema, overwrite=True, overwriteSchema="true")
    messages = [job.write(iter(FRAME.to_batches()))]
    job.commit(messages)
    shard.refresh_schema()
    shard.insert([{"n": 1, "id": 8}])
    job.commit(messages)
    assert len(rows(shard)) == 2


def test_a_commit_without_an_answer_changes_columns_and_rows_or_neither(
    shard: Shard, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At no moment are the columns changed and the rows not."""
    job = writer(url, "orders", FRAME.schema, overwrite=True, overwriteSchema="true")
    messages = [job.write(iter(FRAME.to_batches()))]
    late = LateTransport(executors.transport(job._job.target.connection))
    monkeypatch.setattr(executors, "transport", lambda connection: late)
    seen: list[Any] = []
    late.hold(c.Rewrite, lambda: seen.append((columns(shard), rows(shard))))
    job.commit(messages)  # the first try went unanswered
    assert seen == [(SCHEMA.names, ROWS)]
    assert rows(shard) == AFTER
    late.deliver()
    assert rows(shard) == AFTER
    assert columns(shard) == FRAME.schema.names


@pytest.mark.parametrize("change", [AddColumn("more", pa.int64()), WidenColumn("n", pa.int64())])
def test_where_others_change_the_columns_meanwhile_it_is_refused(shard: Shard, url: str, change: Any) -> None:
    job = writer(url, "orders", FRAME.schema, overwrite=True, overwriteSchema="true")
    messages = [job.write(iter(FRAME.to_batches()))]
    shard.alter(change)
    before = rows(shard)
    with pytest.raises(SchemaMismatch, match="has schema 2, not the expected 1"):
        job.commit(messages)
    assert rows(shard) == before
    overwrite(url, FRAME)
    assert rows(shard) == AFTER


def test_rows_that_were_written_by_names_of_before_are_read_by_the_new_columns(shard: Shard, url: str) -> None:
    """A writer of before goes on: what it gives to columns that went is not kept."""
    with closing(shard.open_writer()) as before:
        overwrite(url, FRAME)
        before.insert([{"id": 9, "state": "text", "n": 9, "note": "z"}])
    assert rows(shard)[-1] == {"n": 9, "id": 9, "city": None, "state": None}


def test_columns_change_by_a_server_too_and_again_and_again() -> None:
    with Served(memory_location()) as served:
        shard = served.client.create_shard("orders", SCHEMA, key=["id"])
        shard.insert(ROWS)
        overwrite(served.url, FRAME)
        assert rows(shard) == read(served.url, "orders") == AFTER
        overwrite(served.url, *[pa.table({"id": [number], "state": ["x" * 100_000]}) for number in range(3)])
        assert [row["id"] for row in rows(shard)] == [0, 1, 2]
        shard.optimize()
        assert [row["id"] for row in read(served.url, "orders")] == [0, 1, 2]
        assert [row["id"] for row in rows(shard, 0)] == [1, 2]


def test_constraints_of_the_shard_stay(client: Client, url: str) -> None:
    shard = client.create_shard("orders", SCHEMA, key=["id"], unique=True)
    shard.set_constraints(not_null=["n", "state"])
    overwrite(url, FRAME)
    details = shard.refresh_schema().details
    assert details.unique
    assert [shard.schema.name_of[number] for number in details.not_null] == ["n"], "that of a column went with it"
