"""`persist.spark.table`: the rows of the data source, through Spark's own Parquet reader."""

from __future__ import annotations

import gc
import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

import persist.spark
from persist import InvalidUsage
from persist.spark import ShardTable
from persist.spark.parquet_scan import holds
from tests.support.examples import seeds

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64()), ("v", pa.string())])


def rows_of(frame: Any) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row) for row in frame.collect())


@pytest.mark.smoke
@pytest.mark.proof
@pytest.mark.parametrize("seed", seeds(4, few=1))
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
        expected = rows_of(load("orders", asOf=as_of))
        for native in ("auto", "always"):
            assert rows_of(persist.spark.table(spark, "orders", as_of=as_of, url=url, native=native)) == expected


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
def test_what_spark_would_read_otherwise_is_refused(spark: Any, client: Any, url: str) -> None:
    client.create_shard("orders", pa.schema([("k", pa.string()), ("n", pa.uint64())]), ["k"]).insert([{"k": "a"}])
    with pytest.raises(InvalidUsage, match=r"column 'n' is uint64.*use format\('persist'\)"):
        persist.spark.table(spark, "orders", url=url, native="always")


@pytest.mark.proof
def test_a_negative_multiplicity_is_an_error(spark: Any, client: Any, url: str) -> None:
    client.create_shard("orders", SCHEMA, ["k"]).insert([{"k": "a", "__diff": -2}])
    with pytest.raises(Exception, match="a row has the multiplicity -2"):
        persist.spark.table(spark, "orders", url=url, native="always").collect()


def is_native(frame: Any) -> bool:
    return "FileScan parquet" in frame._jdf.queryExecution().executedPlan().toString()


def filled(client: Any, rows: list[dict[str, Any]], schema: pa.Schema = SCHEMA) -> Any:
    """A shard with the rows in one file: they are too many to lie in the log."""
    shard = client.create_shard("orders", schema, ["k"])
    shard.insert(rows)
    return shard


def many(start: int = 0, **columns: Any) -> list[dict[str, Any]]:
    return [{"k": f"k{n:05d}", "n": n, "v": "x" * 50, **columns} for n in range(start, start + 2000)]


def of_inline_rows(client: Any) -> None:
    filled(client, many()).insert([{"k": "z", "n": 1, "v": "z"}])


def of_common_keys(client: Any) -> None:
    filled(client, many()).insert(many(1000))


def of_later_times(client: Any) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.compare_and_append([{**row, "__time": row["n"] % 2, "__diff": 1} for row in many()], 0, 2)


def of_retractions(client: Any) -> None:
    """Somebody else's keys: nothing has to be added up, but the read is an error, which names the key."""
    filled(client, many()).insert(many(5000, __diff=-1))


def of_unsigned(client: Any) -> None:
    filled(client, many(), pa.schema([("k", pa.string()), ("n", pa.uint32()), ("v", pa.string())]))


def of_floats_within(client: Any) -> None:
    schema = pa.schema([("k", pa.string()), ("n", pa.struct([("x", pa.float64())])), ("v", pa.string())])
    filled(client, [{**row, "n": {"x": 1.0}} for row in many()], schema)


def of_twins_within(client: Any) -> None:
    twins = pa.list_(pa.struct([("a", pa.int64()), ("A", pa.int64())]))
    schema = pa.schema([("k", pa.string()), ("n", twins), ("v", pa.string())])
    filled(client, [{**row, "n": [{"a": 1, "A": 2}]} for row in many()], schema)


def of_plain_files(client: Any) -> None:
    filled(client, many()).insert(many(5000))


NOT_CHOSEN: list[tuple[Any, dict[str, Any]]] = [
    *((make, {}) for make in (of_inline_rows, of_common_keys, of_retractions, of_unsigned)),
    *((make, {}) for make in (of_floats_within, of_twins_within)),
    (of_later_times, {"as_of": 0}),
    *((of_plain_files, {name: value}) for name, value in (("numPartitions", "2"), ("root", "file:///nowhere"))),
    (of_plain_files, {"native": "never"}),
]


@pytest.mark.parametrize(("make", "given"), NOT_CHOSEN)
def test_spark_itself_reads_only_what_it_reads_alike(
    spark: Any, client: Any, url: str, make: Any, given: dict[str, Any]
) -> None:
    make(client)
    frame = persist.spark.table(spark, "orders", url=url, **given)
    assert not is_native(frame)
    if make is of_retractions:
        with pytest.raises(Exception, match=r"has a row of key \{'k': 'k05000'\} with the negative multiplicity -1"):
            frame.collect()


def test_files_that_need_no_merging_are_read_by_spark_itself(spark: Any, client: Any, load: Any, url: str) -> None:
    of_plain_files(client)
    for given in ({}, {"as_of": 0}, {"native": "always"}):
        assert is_native(persist.spark.table(spark, "orders", url=url, **given))
    assert rows_of(persist.spark.table(spark, "orders", url=url, as_of=0)) == rows_of(load("orders", asOf=0))


def test_a_table_is_read_by_spark_itself_where_that_is_exact(spark: Any, client: Any, load: Any, url: str) -> None:
    of_plain_files(client)
    table = ShardTable.for_name(spark, "orders", url=url)
    found, as_of = table.read(where="n < 5 AND v LIKE 'x%'", columns=["n", "k"])
    assert is_native(found)
    assert as_of == 1
    assert rows_of(found) == Counter((n, f"k{n:05d}") for n in range(5))
    assert not is_native(table.df(native="never"))
    assert not is_native(ShardTable.for_name(spark, "orders", url=url, batchRows=100).df())
    with pytest.raises(InvalidUsage, match="native is 'yes'; it must be 'auto', 'always' or 'never'"):
        table.read(native="yes")


def test_a_place_that_spark_would_take_for_a_pattern_is_not_read_by_it(spark: Any, tmp_path: Any) -> None:
    url = f"persist://{tmp_path}/[a]"
    with persist.connect(url) as client:
        filled(client, many())
    frame = persist.spark.table(spark, "orders", url=url)
    assert not is_native(frame)
    assert frame.count() == 2000


def test_filters_on_floats_find_nan_and_negative_zero(spark: Any, client: Any, load: Any, url: str) -> None:
    """Bounds in files leave NaN out, which is more than any number to Spark, and dictionaries tell -0.0 from 0.0."""
    schema = pa.schema([("k", pa.string()), ("x", pa.float64()), ("y", pa.float32())])
    odd = [1.0, 2.0, float("nan"), -0.0, None]
    filled(client, [{"k": f"{n:060d}", "x": odd[n % 5], "y": odd[n % 5]} for n in range(2000)], schema)
    frame = persist.spark.table(spark, "orders", url=url)
    assert is_native(frame)
    assert frame.dtypes == load("orders").dtypes
    for where in ("x > 5", "x = 0.0D", "y > 5", "y IN (0.0F, 7.0F)"):
        assert frame.where(where).count() == load("orders").where(where).count() == 400, where


def test_bytes_that_rotted_fail_a_native_read(spark: Any, client: Any, url: str, tmp_path: Any) -> None:
    filled(client, [{"k": f"k{n * 7919:012d}", "n": n * 104_729, "v": f"{n * n}"} for n in range(5000)])
    [file] = (tmp_path / "shards" / "blob").rglob("*.parquet")
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 0xFF
    frame = persist.spark.table(spark, "orders", url=url)
    assert is_native(frame)
    file.chmod(0o644)
    file.write_bytes(data)
    with pytest.raises(Exception, match="FAILED_READ_FILE"):
        frame.collect()


def collected(spark: Any, kept: int) -> bool:
    """Whether no more than so many holds are renewed, once the JVM has collected what it can."""
    for _ in range(20):
        gc.collect()
        spark._jvm.System.gc()
        holds().renew_due()
        if len(holds()._held) <= kept:
            return True
    return False


def test_the_files_are_held_for_as_long_as_a_plan_reads_them(spark: Any, client: Any, url: str) -> None:
    """After that an RDD may read on, until the hold lapses."""
    of_plain_files(client)

    def readers() -> int:
        return int(spark.read.format("persist").options(url=url, metadata="readers").load("orders").count())

    collected(spark, 0)
    others = len(holds()._held)  # of other tests, which something may still refer to
    frame = persist.spark.table(spark, "orders", url=url)
    derived = frame.where("n > 7").select("k")
    del frame
    assert not collected(spark, others)
    assert readers() == 1
    rdd = derived.rdd
    del derived
    assert collected(spark, others)
    assert readers() == 1, "it lapses by itself"
    assert rdd.count() == 3992


def test_a_session_that_has_files_counted_by_spark_is_given_exact_counts(spark: Any, client: Any, url: str) -> None:
    """Its newer sources take counts of a column by its place, which is another one in older files."""
    shard = client.create_shard("orders", pa.schema([("k", pa.string()), ("v", pa.string())]), ["k"])
    shard.insert([{"k": f"a{n:05d}", "v": "x" * 50} for n in range(2000)])
    shard.evolve_schema(pa.schema([("k", pa.string()), ("w", pa.int64()), ("v", pa.string())]))
    shard.insert([{"k": f"b{n:05d}", "v": "x" * 50, "w": n} for n in range(2000)])
    said = {"spark.sql.sources.useV1SourceList": "", "spark.sql.parquet.aggregatePushdown": "true"}
    before = {name: spark.conf.get(name) for name in said}
    try:
        for name, value in said.items():
            spark.conf.set(name, value)
        assert persist.spark.table(spark, "orders", url=url).selectExpr("count(w)").collect() == [(2000,)]
        with pytest.raises(InvalidUsage, match="excludes parquet"):
            persist.spark.table(spark, "orders", url=url, native="always")
    finally:
        for name, value in before.items():
            spark.conf.set(name, value)
