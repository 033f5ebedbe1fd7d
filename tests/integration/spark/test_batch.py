"""Snapshots and appends through `format("persist")`, what they must obey, and what the commit history tells of them."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException

from persist.core.commands import ExpireReader

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64()), ("x", pa.float64())])


def test_a_dataframe_becomes_a_shard_and_comes_back(spark: Any, client: Any, load: Any, save: Any) -> None:
    frame = spark.range(1000).selectExpr("concat('k', id) k", "id n", "id / 7 x").repartition(3)
    save(frame, "orders", key="k")
    assert client.shard("orders").schema.key == ("k",)
    assert sorted(load("orders").collect()) == sorted(frame.collect())


def test_change_data_goes_in_with_its_times_and_diffs(spark: Any, client: Any, load: Any, save: Any) -> None:
    rows = [("a", 1, 10, 1), ("a", 1, 12, -1), ("a", 2, 12, 1), ("b", 5, 15, 2)]
    frame = spark.createDataFrame(rows, "k string, n bigint, at int, change int")
    options = {"key": "k", "timeColumn": "at", "diffColumn": "change", "expectedUpper": 0, "newUpper": 20}
    save(frame, "orders", **options)
    assert load("orders", asOf=11).collect() == [("a", 1)]
    assert sorted(load("orders", asOf=19).collect()) == [("a", 2), ("b", 5), ("b", 5)]
    counted = load("orders", asOf=19, multiplicity="column")
    assert counted.columns == ["k", "n", "__diff"]
    assert sorted(counted.collect()) == [("a", 2, 1), ("b", 5, 2)]


@pytest.mark.proof
def test_a_schema_may_widen_but_not_lose(client: Any, load: Any) -> None:
    shard = client.create_shard("orders", pa.schema([("k", pa.int32()), ("n", pa.int64())]), ["k"])
    shard.insert([{"k": 1, "n": 2**40}])
    assert load("orders", "n decimal(20,0), k bigint").collect()[0].asDict() == {"n": 2**40, "k": 1}
    with pytest.raises(PySparkException, match="column 'n' does not fit int32"):
        load("orders", "n int").collect()


@pytest.mark.proof
def test_key_ranges_and_prefixes_prune_rows(client: Any, load: Any) -> None:
    schema = pa.schema([("k", pa.string()), ("m", pa.int32()), ("n", pa.int64())])
    shard = client.create_shard("orders", schema, ["k", "m"])
    shard.insert([{"k": k, "m": m, "n": 0} for k in ("a", "ab", "abc", "b") for m in (1, 2)])

    def keys(**options: Any) -> list[tuple[str, int]]:
        return [(row.k, row.m) for row in load("orders", **options).collect()]

    assert keys(startKey="ab", endKey="b") == [("ab", 1), ("ab", 2), ("abc", 1), ("abc", 2)]
    assert keys(startKey='["ab", 2]', endKey='["abc", 2]') == [("ab", 2), ("abc", 1)]
    assert keys(keyPrefix="ab") == [("ab", 1), ("ab", 2), ("abc", 1), ("abc", 2)]
    assert keys(keyPrefix='["ab", 2]') == [("ab", 2)]
    assert keys(keyPrefix='["ab", 2]', startKey="b") == []


@pytest.mark.proof
@pytest.mark.parametrize("splits", [1, 2, 7, 32])
def test_a_snapshot_of_many_batches_equals_spark_s_group_by(spark: Any, client: Any, load: Any, splits: int) -> None:
    """200 batches, two rows in three retracted somewhere, sizes on both sides of the inline limit."""
    rng = random.Random(7)
    shard = client.create_shard("orders", pa.schema([("k", pa.string()), ("n", pa.int64())]), ["k"])
    live: list[tuple[str, int]] = []
    updates = []
    for at in range(200):
        rows = []
        for _ in range(rng.choice([1, 40, 400])):
            if live and rng.random() < 0.45:
                row, diff = live.pop(rng.randrange(len(live))), -1
            else:
                row, diff = (f"k{rng.randrange(500):03d}", rng.randrange(3)), 1
                live.append(row)
            rows.append({"k": row[0], "n": row[1], "__time": at, "__diff": diff})
        updates += rows
        shard.compare_and_append(rows, at, at + 1)
    as_of = 150
    raw = spark.createDataFrame(pa.Table.from_pylist(updates)).where(f"__time <= {as_of}")
    expected = raw.groupBy("k", "n").sum("__diff").where("`sum(__diff)` != 0").collect()
    df = load("orders", asOf=as_of, numPartitions=splits)
    assert df.rdd.getNumPartitions() <= splits
    read = Counter((row.k, row.n) for row in df.collect())
    assert read == {(row.k, row.n): row[2] for row in expected}
    by_split = df.selectExpr("k", "spark_partition_id() p").distinct().groupBy("k").count().where("count > 1")
    assert by_split.collect() == []


@pytest.mark.proof
def test_a_task_that_is_tried_again_writes_once(spark: Any, client: Any, load: Any, save: Any, tmp_path: Any) -> None:
    marker = str(tmp_path / "failed")

    def fail_once(rows: Any) -> Any:
        import os

        for i, row in enumerate(rows):
            if i == 500 and not os.path.exists(marker):
                open(marker, "w").close()
                raise OSError("the first attempt dies in the middle")
            yield row

    rdd = spark.sparkContext.parallelize([(f"k{i}", i) for i in range(2000)], 2).mapPartitions(fail_once)
    save(spark.createDataFrame(rdd, "k string, n bigint"), "orders", key="k")
    assert load("orders").selectExpr("count(*) c", "sum(n) s").collect() == [(2000, 1999000)]


@pytest.mark.proof
def test_wall_clocks_name_times(client: Any, load: Any) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shown = []
    for number, key in enumerate("ab"):
        shard.insert([{"k": key}])
        shown.append(shard.timestamp_of(number))
        shard.time_at(shown[-1], wait_s=10)
    first, second = (when.isoformat() for when in shown)

    def keys(**options: str) -> list[str]:
        return sorted(row.k for row in load("orders", **options).collect())

    assert keys(timestampAsOf=first) == ["a"]
    assert keys(timestampAsOf=second) == ["a", "b"]
    assert keys(readChangeFeed="true", startingTimestamp=first) == ["b"]
    assert keys(readChangeFeed="true", endingTimestamp=first) == ["a"]
    assert keys(readChangeFeed="true", startingTimestamp=first, endingTimestamp=first) == []


def test_a_bad_read_option_is_one_clear_sentence(client: Any, load: Any) -> None:
    """Each option has its row in `unit/spark/test_option_rules.py`."""
    client.create_shard("orders", SCHEMA, ["k"]).insert([{"k": "a"}])
    with pytest.raises(PySparkException, match="option 'nonsense' is unknown"):
        load("orders", nonsense="1").collect()


def test_a_bad_write_writes_nothing(spark: Any, client: Any, save: Any) -> None:
    frame = spark.createDataFrame([], "k string, n interval year")
    with pytest.raises(PySparkException, match=r"column 'n' is interval year.*which a shard cannot store"):
        save(frame, "orders", key="k")
    assert client.shards() == []


def test_a_view_and_a_cache_outlive_their_lease(spark: Any, client: Any, load: Any, url: str) -> None:
    """They were told Expired for ever."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": "a", "n": 1, "x": 1.0}])
    frame = load("orders")
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW lasting USING persist OPTIONS (url '{url}', path 'orders')")
    seen = spark.sql("SELECT k FROM lasting")
    cached = load("orders").cache()
    assert [frame.count(), seen.count(), cached.count()] == [1, 1, 1]
    shard.insert([{"k": "b", "n": 1, "x": 1.0}])
    for reader in client.transport.location.machine("orders").refresh().leased_readers:
        client.transport.apply("orders", ExpireReader(reader))
    cached.unpersist()
    assert [frame.count(), seen.count(), cached.count()] == [1, 1, 1]
    assert load("orders").count() == 2


ROW = "id bigint, n bigint"


def test_an_upsert_and_an_append_obey_checks_and_unique_keys(spark: Any, client: Any, load: Any, save: Any) -> None:
    options = {"key": "id", "unique": "true", "checks": json.dumps({"positive": "n > 0"})}
    save(spark.createDataFrame([(1, 1), (2, 2)], ROW), "orders", **options)
    details = client.shard("orders").schema.details
    assert (details.unique, [check.name for check in details.checks]) == (True, ["positive"])
    with pytest.raises(Exception, match=r"constraint 'positive' refuses 1 row for which 'n > 0' is false.*Keys: 3"):
        save(spark.createDataFrame([(3, 0)], ROW), "orders")
    save(spark.createDataFrame([(1, 5), (3, 3)], ROW), "orders", envelope="upsert")
    assert sorted(load("orders").collect()) == [(1, 5), (2, 2), (3, 3)]
    with pytest.raises(Exception, match=r"key .* occurs more than once"):
        save(spark.createDataFrame([(4, 4), (4, 5)], ROW), "orders", envelope="upsert")
    save(spark.createDataFrame([(1, 6)], ROW), "orders")  # an append does not look keys up
    [broken] = client.shard("orders").broken_constraints()
    assert (broken.constraint, broken.keys) == ("unique", [(1,)])
    [detail] = load("orders", metadata="detail").collect()
    assert (detail.unique, detail.not_null, detail.checks) == (True, [], {"positive": "n > 0"})


def test_a_write_tells_of_its_application_and_what_it_is_told(spark: Any, client: Any, load: Any, save: Any) -> None:
    spark.sparkContext.setJobGroup("nightly", "nightly load")
    try:
        save(spark.range(3).selectExpr("concat('k', id) k", "id n"), "orders", key="k", info='{"ticket": 4711}')
        save(spark.range(1).selectExpr("concat('k', id) k", "id + 100 n"), "orders", envelope="upsert")
    finally:
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)
        spark.sparkContext.setLocalProperty("spark.job.description", None)
    upsert, append, created = client.shard("orders").history()
    assert (append.operation, append.rows, append.purpose) == ("insert", 3, "spark job")
    assert append.info["ticket"] == 4711
    told = append.info["spark"]
    assert told["application"] == spark.sparkContext.applicationId
    assert (told["job"], told["group"]) == ("nightly load", "nightly")
    assert told["user"]
    assert (upsert.operation, upsert.rows, upsert.retractions) == ("upsert", 2, 1)
    assert upsert.info.keys() == {"spark"}
    assert created.operation == "create"

    frame = load("orders", metadata="history")
    assert [(row.operation, row.rows, row.lower, row.upper) for row in frame.collect()] == [
        ("upsert", 2, 1, 2),
        ("insert", 3, 0, 1),
        ("create", 0, 0, 0),
    ]
    [row] = load("orders", metadata="history", historyLimit=1, maintenance="true").select("info", "seqno").collect()
    assert json.loads(row.info) == upsert.info
    assert row.seqno == upsert.seqno
