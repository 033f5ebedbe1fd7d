"""Replacing by key and as a whole: one commit, exact, also against writers that come between."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from persist import InvalidUsage, UnknownShard
from persist.spark import executors
from persist.spark.batch_io import ChangesReader
from persist.spark.change_feed import changes_schema
from persist.spark.options import Options, ReadOptions, Target, WriteOptions
from persist.spark.write_job import Job
from tests.support.examples import size

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])
DDL = "k string, n bigint"


def contents(client: Any, as_of: int | None = None) -> dict[tuple[Any, ...], int]:
    table = client.shard("orders").snapshot(as_of).to_arrow()
    return {(row["k"], row["n"]): row["__diff"] for row in table.to_pylist()}


def test_an_upsert_replaces_the_rows_of_its_keys_and_no_others(spark: Any, client: Any, save: Any) -> None:
    save(spark.createDataFrame([("a", 1), ("b", 1), ("b", 2), ("c", 1)], DDL), "orders", key="k")
    save(spark.createDataFrame([("b", 7), ("c", 1), ("d", 1)], DDL), "orders", envelope="upsert")
    assert contents(client) == {("a", 1): 1, ("b", 7): 1, ("c", 1): 1, ("d", 1): 1}
    assert contents(client, 0) == {("a", 1): 1, ("b", 1): 1, ("b", 2): 1, ("c", 1): 1}


def test_a_delete_column_removes_keys(spark: Any, client: Any, save: Any) -> None:
    save(spark.createDataFrame([("a", 1), ("b", 1)], DDL), "orders", key="k")
    rows = [("a", None, True), ("b", 2, False), ("c", 3, None), ("never", None, True)]
    changes = spark.createDataFrame(rows, DDL + ", gone boolean")
    save(changes, "orders", envelope="upsert", deleteColumn="gone")
    assert contents(client) == {("b", 2): 1, ("c", 3): 1}


def test_null_keys_and_not_a_numbers_are_keys_like_others(client: Any, spark: Any, save: Any) -> None:
    rows = [(None, None, 1), (float("nan"), None, 2), (0.5, "x", 3)]
    frame = spark.createDataFrame(rows, "f double, s string, n bigint")
    save(frame, "orders", key="f,s", envelope="upsert")
    save(frame.selectExpr("f", "s", "n + 10 n"), "orders", envelope="upsert")
    table = client.shard("orders").snapshot().to_arrow(expand=True)
    assert sorted(table.column("n").to_pylist()) == [11, 12, 13]


def test_an_overwrite_is_one_commit_that_replaces_everything(spark: Any, client: Any, save: Any, load: Any) -> None:
    save(spark.createDataFrame([("a", 1), ("b", 1), ("b", 1)], DDL), "orders", key="k")
    save(spark.createDataFrame([("b", 1), ("c", 1)], DDL), "orders", mode="overwrite")
    assert contents(client) == {("b", 1): 1, ("c", 1): 1}
    assert client.shard("orders").upper().element == 2
    save(spark.createDataFrame([], DDL), "orders", mode="overwrite")
    assert load("orders").collect() == []
    assert contents(client, 1) == {("b", 1): 1, ("c", 1): 1}


def job(url: str, frame: Any, overwrite: bool = False, **options: str) -> Job:
    return Job.open(
        Target.of(Options({"url": url, "path": "orders"})), WriteOptions.of(Options(options)), frame.schema, overwrite
    )


def batch(rows: list[tuple[str, int]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"k": [k for k, _ in rows], "n": [n for _, n in rows]}, schema=SCHEMA)


def test_what_others_write_meanwhile_is_replaced_under_the_job_s_keys_only(spark: Any, client: Any, url: str) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": "a", "n": 1}, {"k": "b", "n": 1}])
    mine = job(url, spark.createDataFrame([], DDL), envelope="upsert")
    message = mine.stage([batch([("a", 5), ("x", 5)])])
    shard.insert([{"k": "a", "n": 2}, {"k": "b", "n": 2}, {"k": "x", "n": 1}])
    shard.insert([{"k": "a", "n": 1, "__diff": -1}])
    assert mine.publish([message], None)
    assert contents(client) == {("a", 5): 1, ("b", 1): 1, ("b", 2): 1, ("x", 5): 1}


def test_a_frame_that_is_refused_makes_no_shard(spark: Any, client: Any, url: str) -> None:
    frame = spark.createDataFrame([], "k string, n bigint, d bigint, __diff bigint")
    with pytest.raises(InvalidUsage, match="a column occurs twice"):
        job(url, frame, key="k", diffColumn="d")
    assert client.shards() == []


def test_what_a_task_staged_before_a_drop_goes_to_no_later_shard(spark: Any, client: Any, url: str) -> None:
    """Few rows lie in the message of the task, and the next shard of the name took them."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    message = job(url, spark.createDataFrame([], DDL)).stage([batch([("a", 5)])])
    shard.drop()
    following = client.create_shard("orders", SCHEMA, ["k"])
    with pytest.raises(UnknownShard, match="was dropped, and its name belongs to another shard now"):
        job(url, spark.createDataFrame([], DDL)).publish([message], None)
    assert following.upper().element == 0


@pytest.mark.parametrize("recreated", [False, True], ids=["dropped", "name used again"])
def test_splits_of_a_dropped_shard_say_so(spark: Any, client: Any, url: str, recreated: bool) -> None:
    """They said Expired: neither those of changes nor those that a job replaces knew which shard they were of."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": "a", "n": 1}])
    mine = job(url, spark.createDataFrame([], DDL), overwrite=True)
    options = ReadOptions.of(Options({"readChangeFeed": "true", "startingVersion": "0"}))
    changes = ChangesReader(mine.target, options, changes_schema(executors.view_of(mine.target), options))
    [split] = changes.partitions()
    assert sum(len(rows) for rows in changes.read(split)) == 1
    shard.drop(force=True)
    if recreated:
        client.create_shard("orders", SCHEMA, ["k"]).insert([{"k": "b", "n": 1}])
    for read in (lambda: [mine.base.held(mine.target)], lambda: changes.read(split)):
        with pytest.raises(UnknownShard, match="was dropped"):
            list(read())
    with pytest.raises(UnknownShard, match="was dropped"):
        mine.publish([], None)


def test_an_overwrite_replaces_what_others_wrote_meanwhile_too(spark: Any, client: Any, url: str) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": "a", "n": 1}])
    mine = job(url, spark.createDataFrame([], DDL), overwrite=True)
    message = mine.stage([batch([("a", 5)])])
    shard.insert([{"k": "z", "n": 2}])
    assert mine.publish([message], None)
    assert contents(client) == {("a", 5): 1}


@pytest.mark.smoke
@pytest.mark.proof
def test_random_upserts_and_deletes_equal_a_dict(spark: Any, client: Any, url: str) -> None:
    """Several tasks a job, inserts by others between staging and publishing, keys from a small set."""
    rng = random.Random(11)
    shard = client.create_shard("orders", SCHEMA, ["k"])
    schema = pa.schema([*SCHEMA, ("gone", pa.bool_())])
    frame = spark.createDataFrame([], DDL + ", gone boolean")
    model: Counter[tuple[str, int]] = Counter()
    for _ in range(size(3, 40)):
        mine = job(url, frame, envelope="upsert", deleteColumn="gone")
        keys = rng.sample([f"k{i}" for i in range(30)], rng.randrange(1, 12))
        rows = [(k, rng.randrange(4), rng.random() < 0.3) for k in keys]
        messages = []
        for task in range(3):
            part = rows[task::3]
            columns = list(zip(*part, strict=True)) if part else [(), (), ()]
            arrays = [pa.array(list(c), f.type) for c, f in zip(columns, schema, strict=True)]
            messages.append(mine.stage([pa.RecordBatch.from_arrays(arrays, schema=schema)]))
        for _ in range(rng.randrange(3)):
            other = (f"k{rng.randrange(30)}", rng.randrange(4))
            shard.insert([{"k": other[0], "n": other[1]}])
            model[other] += 1
        assert mine.publish(messages, None)
        for k, n, gone in rows:
            for row in [row for row in model if row[0] == k]:
                del model[row]
            if not gone:
                model[(k, n)] = 1
        assert contents(client) == dict(model)
