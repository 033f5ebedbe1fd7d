"""What a shard was, in Spark: changes between two times or two shards as a DataFrame, and the restore as a job."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import types as t
from pyspark.sql.types import StructType

from persist import InvalidUsage, NotReadable, UnknownShard, UpperMismatch
from persist.spark import restore
from persist.spark.source import PersistDataSource

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])
ROWS = 2_000


@pytest.fixture
def shard(client: Any) -> Any:
    """Many keys at time 0; at 1 some go, some come, one changes; at 2 one that came goes again."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": f"k{n:04}", "n": n} for n in range(ROWS)])
    gone = [{"k": f"k{n:04}", "n": n, "__diff": -1} for n in range(0, ROWS, 4)]
    shard.insert([*gone, {"k": "k0001", "n": 1, "__diff": -1}, {"k": "k0001", "n": 100}, {"k": "new", "n": 7}])
    shard.insert([{"k": "new", "n": 7, "__diff": -1}, {"k": "twice", "n": 8, "__diff": 2}])
    return shard


def rows(found: Any) -> list[tuple[Any, ...]]:
    """The rows of a DataFrame, or of changes read without Spark."""
    listed = found.to_arrow().to_pylist() if hasattr(found, "to_arrow") else [r.asDict() for r in found.collect()]
    return sorted((row["k"], row["n"], row["__diff"]) for row in listed)


def test_changes_between_two_times_are_those_of_the_shard_split_by_key_range(shard: Any, load: Any) -> None:
    forth = load("orders", readDiff="true", start="0", numPartitions=4)
    assert forth.columns == ["k", "n", "__diff"]
    assert rows(forth) == rows(shard.changes(0))
    ranges: dict[int, list[str]] = {}
    for row in forth.selectExpr("k", "spark_partition_id() split").collect():
        ranges.setdefault(row.split, []).append(row.k)
    filled = sorted((min(keys), max(keys)) for keys in ranges.values())
    assert len(filled) > 1
    assert all(one[1] < two[0] for one, two in pairwise(filled))
    back = load("orders", readDiff="true", start="2", end="1")
    assert rows(back) == [("new", 7, 1), ("twice", 8, -2)]
    assert load("orders", readDiff="true", start="1", end="1").count() == 0
    assert load("orders", readDiff="true", start="0", columns="n").columns == ["n", "__diff"]
    only = load("orders", schema="__diff bigint", readDiff="true", start="1")
    assert sorted(row[0] for row in only.collect()) == [-1, 2]


def test_changes_between_two_shards_are_those_of_the_shards(client: Any, shard: Any, load: Any) -> None:
    copy = client.create_shard("copy", SCHEMA, ["k"])
    copy.insert([{"k": "k0001", "n": 1}, {"k": "k0003", "n": 3}, {"k": "other", "n": 9, "__diff": 3}])
    found = load("orders", readDiff="true", start="2", other="copy", numPartitions=3)
    assert rows(found) == rows(shard.changes(2, other=copy))
    assert ("k0001", 1, 1) in rows(found)
    assert ("k0001", 100, -1) in rows(found)


def test_changes_and_restore_take_wall_clocks(spark: Any, client: Any, url: str, load: Any) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": "a", "n": 1}])
    then = shard.timestamp_of(0)
    shard.time_at(then, wait_s=10)
    shard.insert([{"k": "b", "n": 2}])
    assert rows(load("orders", readDiff="true", start=then.isoformat())) == [("b", 2, 1)]
    restore(spark, "orders", then, url=url)
    assert shard.snapshot().to_arrow().to_pylist() == [{"k": "a", "n": 1, "__diff": 1}]


def test_a_restore_is_one_commit_of_a_job_and_is_undone_by_another(spark: Any, shard: Any, url: str) -> None:
    was, now = shard.snapshot(0).to_arrow(), shard.snapshot(2).to_arrow()
    restore(spark, "orders", 0, url=url, numPartitions="3", info='{"ticket": 4711}')
    assert shard.upper().element == 4
    assert shard.snapshot().to_arrow().equals(was)
    told = shard.history(1)[0]
    assert (told.operation, told.lower, told.upper) == ("restore", 3, 4)
    assert told.info["ticket"] == 4711
    assert told.info["spark"]["application"] == spark.sparkContext.applicationId
    restore(spark, "orders", 0, url=url)
    assert shard.upper().element == 4, "nothing differs, so nothing is committed"
    restore(spark, "orders", 2, url=url)
    assert shard.snapshot().to_arrow().equals(now)


def test_a_restore_that_another_write_overtakes_changes_nothing(shard: Any, load: Any, save: Any) -> None:
    changes = load("orders", readDiff="true", start="2", end="0")
    shard.insert([{"k": "meanwhile", "n": 1}])
    before = shard.snapshot().to_arrow()
    with pytest.raises(PySparkException, match=r"has upper \[4\], not the expected \[3\]"):
        save(changes, "orders", restoreTo=0, expectedUpper=3)
    assert shard.snapshot().to_arrow().equals(before)


def test_a_restore_that_cannot_be_is_refused_by_the_driver(spark: Any, shard: Any, url: str) -> None:
    with pytest.raises(UnknownShard):
        restore(spark, "nowhere", 0, url=url)
    with pytest.raises(NotReadable, match="nothing was written"):
        restore(spark, "orders", datetime(2020, 1, 1, tzinfo=UTC), url=url)
    with pytest.raises(InvalidUsage, match="option 'envelope' does not apply to a restore"):
        restore(spark, "orders", 0, url=url, envelope="upsert")
    shard.forget(2)
    with pytest.raises(PySparkException, match="NotReadable"):
        restore(spark, "orders", 0, url=url)
    assert shard.upper().element == 3
    shard.advance_upper(None)
    with pytest.raises(UpperMismatch, match="is closed: nothing can be restored"):
        restore(spark, "orders", 2, url=url)


def source(url: str, **options: str) -> PersistDataSource:
    return PersistDataSource({"url": url, **options})


def columns(ddl: str) -> StructType:
    kinds = {"string": t.StringType(), "bigint": t.LongType()}
    return StructType([t.StructField(name, kinds[kind]) for name, kind in map(str.split, ddl.split(","))])


def test_changes_whose_sign_nobody_would_see_are_refused(shard: Any, url: str) -> None:
    """Rows that were removed looked as if they had been added."""
    between = source(url, path="orders", readDiff="true", start="0")
    with pytest.raises(InvalidUsage, match="lacks the column __diff"):
        between.reader(columns("k string, n bigint"))
    between.reader(columns("k string, __diff bigint"))
    feed = source(url, path="orders", readChangeFeed="true")
    for without in ("k string", "n bigint, __time bigint", "k string, _commit_version bigint"):
        with pytest.raises(InvalidUsage, match="neither _change_type nor __diff"):
            feed.reader(columns(without))
        with pytest.raises(InvalidUsage, match="neither _change_type nor __diff"):
            feed.streamReader(columns(without)).initialOffset()
    for enough in ("k string, _change_type string", "k string, __diff bigint", "__time bigint"):
        feed.reader(columns(enough))
    source(url, path="orders").reader(columns("k string"))


def test_a_shard_of_whole_numbers_without_a_sign_is_restored(client: Any, url: str) -> None:
    """Spark has none of 64 bits: they pass through it as decimals."""
    most = 2**64 - 1
    shard = client.create_shard("wide", pa.schema([("k", pa.uint64()), ("more", pa.list_(pa.uint64()))]), ["k"])
    shard.insert([{"k": most, "more": [0, most]}, {"k": 7, "more": None}])
    before = shard.snapshot().to_arrow()
    shard.insert([{"k": most, "more": [0, most], "__diff": -1}, {"k": 8, "more": []}])
    back = source(url, path="wide", readDiff="true", start="1", end="0")
    shown = back.schema()
    assert [field.dataType.simpleString() for field in shown] == ["decimal(20,0)", "array<decimal(20,0)>", "bigint"]
    reader, writer = back.reader(shown), source(url, path="wide", restoreTo="0", expectedUpper="2").writer(shown, False)
    writer.commit([writer.write(reader.read(partition)) for partition in reader.partitions()])
    assert shard.snapshot().to_arrow().equals(before)


def test_a_write_to_a_new_name_that_is_refused_creates_no_shard(client: Any, shard: Any, url: str) -> None:
    given = {"url": url, "path": "nowhere", "key": "k"}
    with pytest.raises(UnknownShard, match="'nowhere' does not exist, so it cannot be restored"):
        source(**given, restoreTo="0", expectedUpper="1").writer(columns("k string, __diff bigint"), False)
    with pytest.raises(UpperMismatch, match="'nowhere' does not exist") as raised:
        source(**given, expectedUpper="3").writer(columns("k string"), False)
    assert raised.value.details == {"expected": [3], "actual": [0]}
    assert client.shards() == ["orders"]
    with pytest.raises(InvalidUsage, match="rows with restoreTo need the column __diff"):
        source(url, path="orders", restoreTo="0", expectedUpper="3").writer(columns("k string, n bigint"), False)
    source(**given, expectedUpper="0").writer(columns("k string"), False)
    assert sorted(client.shards()) == ["nowhere", "orders"]
