"""`persist.spark.table`: the rows of the data source, through Spark's own Parquet reader."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

import persist.spark
from persist.core.errors import InvalidUsage

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64()), ("v", pa.string())])


def rows_of(frame: Any) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row) for row in frame.collect())


@pytest.mark.proof
@pytest.mark.parametrize("seed", range(4))
def test_random_shards_read_alike(spark: Any, client: Any, load: Any, url: str, seed: int) -> None:
    """Large and small batches, with and without overlaps, retractions and several times."""
    rng = random.Random(seed)
    shard = client.create_shard("orders", SCHEMA, ["k"])
    live: list[dict[str, Any]] = []
    for time in range(0, 12, 2):
        updates = []
        count = rng.choice([3, 40, 4000])
        base = rng.choice([0, 100_000 * time])
        for n in range(count):
            if live and rng.random() < 0.3:
                updates.append({**live.pop(rng.randrange(len(live))), "__diff": -1, "__time": time + 1})
                continue
            row = {"k": f"k{base + rng.randrange(3000):07d}", "n": n % 5, "v": f"{rng.random()}" if n % 9 else None}
            live.append(row)
            updates.append({**row, "__diff": 1, "__time": time})
        if rng.random() < 0.3 and count > 100:
            shard.insert([{**{k: u[k] for k in ("k", "n", "v")}, "__diff": u["__diff"]} for u in updates])
            shard.advance_upper(time + 2)
        else:
            shard.compare_and_append(updates, time, time + 2)
    for as_of in (11, 6, 0):
        assert rows_of(persist.spark.table(spark, "orders", as_of=as_of, url=url)) == rows_of(
            load("orders", asOf=as_of)
        )


def test_multiplicities_are_expanded(spark: Any, client: Any, load: Any, url: str) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": f"k{n:05d}", "n": n, "v": "x" * 50, "__diff": 1 + n % 3} for n in range(3000)])
    assert rows_of(persist.spark.table(spark, "orders", url=url)) == rows_of(load("orders"))


@pytest.mark.proof
def test_filters_and_columns_reach_the_files(spark: Any, client: Any, url: str) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": f"k{n:05d}", "n": n, "v": f"{n}" * 20} for n in range(5000)])
    frame = persist.spark.table(spark, "orders", url=url).where("k = 'k00007'").select("n")
    assert frame.collect() == [(7,)]
    plan = frame._jdf.queryExecution().executedPlan().toString()
    assert "EqualTo(k,k00007)" in plan
    assert "ReadSchema: struct<k:string,n:bigint>" in plan


@pytest.mark.proof
def test_a_shard_without_writes_is_empty(spark: Any, client: Any, url: str) -> None:
    client.create_shard("orders", SCHEMA, ["k"])
    assert persist.spark.table(spark, "orders", url=url).collect() == []


@pytest.mark.proof
def test_what_spark_would_read_otherwise_is_refused(spark: Any, client: Any, url: str) -> None:
    client.create_shard("orders", pa.schema([("k", pa.string()), ("n", pa.uint64())]), ["k"]).insert([{"k": "a"}])
    with pytest.raises(InvalidUsage, match=r"column 'n' is uint64.*use format\('persist'\)"):
        persist.spark.table(spark, "orders", url=url)


@pytest.mark.proof
def test_a_negative_multiplicity_is_an_error(spark: Any, client: Any, url: str) -> None:
    client.create_shard("orders", SCHEMA, ["k"]).insert([{"k": "a", "__diff": -2}])
    with pytest.raises(Exception, match="a row has the multiplicity -2"):
        persist.spark.table(spark, "orders", url=url).collect()
