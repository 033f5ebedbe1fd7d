"""What an evaluation of pipelines on Spark found: a test for each finding. What Spark calls is called without a JVM."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import types as t
from pyspark.sql.streaming.datasource import ReadAllAvailable

from persist.client.client import Client
from persist.core.errors import InvalidUsage, UpperMismatch
from persist.parts.schema_changes import AddColumn, DropColumn, RenameColumn
from persist.parts.shard_schema import COLUMNS_MAX
from persist.spark import write_job
from tests.support.without_jvm import read, rows_of, source, write

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int32())])


@pytest.mark.parametrize("name", ["__time", "__DIFF", "_change_type", "_Commit_Version", "_commit_timestamp"])
def test_a6_names_that_readers_add_to_rows_are_refused_whoever_makes_the_column(client: Client, name: str) -> None:
    """The change feed of such a shard showed two columns of one name."""
    with pytest.raises(InvalidUsage, match="is reserved"):
        client.create_shard("bad", pa.schema([*SCHEMA, (name, pa.string())]), ["k"])
    shard = client.create_shard("orders", SCHEMA, ["k"])
    for change in (
        lambda: shard.add_column(name, pa.int64()),
        lambda: shard.rename_column("n", name),
        lambda: shard.evolve_schema(pa.schema([*SCHEMA, (name, pa.int64())])),
    ):
        with pytest.raises(InvalidUsage, match="is reserved"):
            change()
    assert shard.refresh_schema().arrow == SCHEMA


def test_b9_writers_from_before_a_column_was_added_go_on(client: Client, url: str) -> None:
    """Every existing writer failed from then on: "the DataFrame lacks the column 'm'"."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    before = client.shard("orders")
    shard.add_column("m", pa.int64())
    shard.add_column("state", pa.string(), nullable=False, default="new")
    old = pa.table({"k": ["a"], "n": pa.array([1], pa.int32())})
    write(url, "orders", old)  # Spark
    before.insert(old)  # Python, by a handle from before
    client.shard("orders").insert(old)  # and by one that knows the columns
    assert read(url, "orders") == [{"k": "a", "n": 1, "m": None, "state": "new"}] * 3
    with pytest.raises(InvalidUsage, match=r"lacks the column 'm' .* an upsert replaces whole rows"):
        write(url, "orders", old, envelope="upsert")
    with pytest.raises(InvalidUsage, match="lacks the column 'k'"):
        write(url, "orders", old.drop_columns(["k"]))


def test_b9_a_frame_brings_its_columns_and_wider_types_by_merge_schema(client: Client, url: str) -> None:
    client.create_shard("orders", SCHEMA, ["k"])
    write(url, "orders", pa.table({"k": ["a"], "n": pa.array([1], pa.int32())}))
    wider = pa.table({"K": ["b"], "n": [2**40], "city": ["Bonn"]})
    with pytest.raises(InvalidUsage, match="has no column 'city'"):
        write(url, "orders", wider)
    write(url, "orders", wider, mergeSchema="true")
    assert read(url, "orders") == [{"k": "a", "n": 1, "city": None}, {"k": "b", "n": 2**40, "city": "Bonn"}]


@pytest.mark.parametrize(("frame", "options", "error"), [
    ({"k": ["a"], "ghost": [1]}, {"readTime": 0}, UpperMismatch),
    ({"k": ["a"], "n": ["x"], "ghost": [1]}, {}, InvalidUsage),
    ({"kk": ["a"], "ghost": [1]}, {}, InvalidUsage),
    ({"k": ["a"], "ghost": [1]}, {"envelope": "upsert"}, InvalidUsage),
    ({"k": ["a"], "ghost": [1]}, {"key": "n"}, InvalidUsage),
    ({"k": ["a"], "ghost": [1]}, {"txnAppId": "job", "txnVersion": 5}, None),
], ids=["readTime", "type", "no key", "upsert lacks a column", "another key", "skipped"])  # fmt: skip
def test_d_merge_schema_changes_no_column_for_a_write_that_does_not_land(
    client: Client, url: str, frame: dict[str, Any], options: dict[str, Any], error: type[Exception] | None
) -> None:
    """Such writes left their columns behind."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    given = pa.table({"k": ["a", "b"], "n": pa.array([1, 2], pa.int32())})
    write(url, "orders", given)
    write(url, "orders", given, txnAppId="job", txnVersion=5)
    with nullcontext() if error is None else pytest.raises(error):
        write(url, "orders", pa.table(frame), mergeSchema="true", **options)
    assert shard.refresh_schema().arrow == SCHEMA
    assert shard.count() == 4


def test_e_merge_schema_adds_no_column_by_a_former_name(client: Client, url: str) -> None:
    """A job from before a column was renamed made a second column of the old name, and split the data."""
    shard = client.create_shard("orders", pa.schema([*SCHEMA, ("s", pa.string()), ("gone", pa.string())]), ["k"])
    shard.alter(RenameColumn("s", "status"), DropColumn("gone"))
    for name, remedy in {"s": "is called 'status' now", "S": "is called 'status' now", "gone": "was dropped"}.items():
        with pytest.raises(InvalidUsage, match=f"mergeSchema adds no column by a former name: .*{remedy}"):
            write(url, "orders", pa.table({"k": ["a"], name: ["x"]}), mergeSchema="true")
    assert shard.refresh_schema().arrow.names == ["k", "n", "status"]
    shard.add_column("s", pa.string())  # by hand it can be had again
    write(url, "orders", pa.table({"k": ["a"], "s": ["x"], "more": [1]}), mergeSchema="true")
    assert read(url, "orders") == [{"k": "a", "n": None, "status": None, "s": "x", "more": 1}]


def test_merge_schema_goes_by_what_others_add_meanwhile(
    client: Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    evolve = write_job.evolve

    def late(*args: Any) -> None:
        monkeypatch.setattr(write_job, "evolve", evolve)
        shard.add_column("city", pa.string())
        evolve(*args)

    monkeypatch.setattr(write_job, "evolve", late)
    write(url, "orders", pa.table({"k": ["a"], "city": ["Bonn"], "m": [1]}), mergeSchema="true")
    assert read(url, "orders") == [{"k": "a", "n": None, "city": "Bonn", "m": 1}]


def test_names_are_those_of_the_shard_whatever_their_case_unless_two_are_meant(client: Client, url: str) -> None:
    client.create_shard("orders", pa.schema([*SCHEMA, ("N", pa.int32())]), ["k"])
    one = pa.array([1], pa.int32())
    write(url, "orders", pa.table({"K": ["a"], "N": one, "n": pa.array([2], pa.int32())}))
    assert read(url, "orders") == [{"k": "a", "n": 2, "N": 1}]
    client.create_shard("pairs", pa.schema([("k", pa.string()), ("ab", pa.int32()), ("aB", pa.int32())]), ["k"])
    with pytest.raises(InvalidUsage, match="'AB', and shard 'pairs' has 'ab' and 'aB'"):
        write(url, "pairs", pa.table({"k": ["a"], "AB": one}))
    with pytest.raises(InvalidUsage, match="two columns of the DataFrame match one"):
        write(url, "orders", pa.table({"K": ["a"], "k": ["a"], "n": one}))


def test_a_stream_goes_on_with_the_columns_with_which_it_began(client: Client, url: str) -> None:
    """A renamed column is followed, a dropped one is null from then on, an added one is left out."""
    columns = pa.schema([*SCHEMA, ("s", pa.string()), ("t", pa.string())])
    shard = client.create_shard("orders", columns, ["k"])
    shard.insert([{"k": "a", "n": 1, "s": "s", "t": "t"}])
    given = source(url, "orders")
    reader = given.streamReader(given.schema())
    first = reader.initialOffset()
    second = reader.latestOffset(first, ReadAllAvailable())
    shard.insert([{"k": "b", "n": 2, "s": "s", "t": "t"}])
    shard.alter(
        RenameColumn("k", "key"), DropColumn("n"), AddColumn("n", pa.string()),
        RenameColumn("s", "x"), RenameColumn("t", "s"), RenameColumn("x", "t"),
    )  # fmt: skip
    shard.insert([{"key": "c", "n": "new", "s": "was t", "t": "was s"}])
    third = reader.latestOffset(second, ReadAllAvailable())
    found = [rows_of(reader, reader.partitions(*step)) for step in ((first, second), (second, third))]
    assert found == [
        [{"k": "a", "n": None, "s": "s", "t": "t"}],
        [{"k": "b", "n": None, "s": "s", "t": "t"}, {"k": "c", "n": None, "s": "was s", "t": "was t"}],
    ]
    reader.stop()
    again = source(url, "orders")
    assert again.schema().names == ["key", "t", "s", "n"]


def test_b13_a_shard_has_at_most_2000_columns_with_its_key(client: Client, url: str) -> None:
    def columns(count: int) -> dict[str, Any]:
        return {f"c{number}": pa.array([number], pa.int32()) for number in range(count)}

    with pytest.raises(InvalidUsage, match="a shard has at most 2000 columns, not 2001"):
        write(url, "wide", pa.table(columns(COLUMNS_MAX + 1)), key="c0")
    write(url, "wide", pa.table(columns(COLUMNS_MAX)), key="c0")
    with pytest.raises(InvalidUsage, match="at most 2000 columns"):
        client.shard("wide").add_column("more", pa.int32())


@pytest.mark.parametrize("kind", [
    t.StringType("UTF8_LCASE"),
    t.ArrayType(t.StringType("UNICODE")),
    t.StructType([t.StructField("x", t.MapType(t.StringType("UTF8_LCASE"), t.LongType()))]),
], ids=["text", "list", "nested"])  # fmt: skip
def test_b15_collations_are_refused_where_they_would_be_lost(client: Client, url: str, kind: t.DataType) -> None:
    """A key of UTF8_LCASE was stored as plain text: 'A' and 'a' became two keys."""
    schema = t.StructType([t.StructField("k", t.StringType()), t.StructField("v", kind)])
    with pytest.raises(InvalidUsage, match=r"column 'v' has the collation U.*, but a shard compares strings by bytes"):
        source(url, "new", key="k").writer(schema, False)
    client.create_shard("there", pa.schema([("k", pa.string()), ("v", pa.string())]), ["k"])
    with pytest.raises(InvalidUsage, match="has the collation"):
        source(url, "there").writer(schema, False)
