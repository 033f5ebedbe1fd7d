"""`ShardTable`: reads that tell their time, and merges, updates and deletions that no other writer comes between."""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812

from persist import InvalidUsage, NotReadable, UnknownShard, UpperMismatch
from persist.spark import ShardTable
from persist.spark.shard_table import unwrapped, unwrapped_error
from tests.support.examples import size

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64()), ("s", pa.string())])
ROWS = [("a", 1, "x"), ("b", 2, "x"), ("c", 3, "y"), (None, 4, "y")]
DDL = "k string, n bigint, s string"
Contents = Counter[tuple[Any, ...]]


@pytest.fixture
def shard(client: Any) -> Any:
    """Four keys, null among them, at time 0."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": k, "n": n, "s": s} for k, n, s in ROWS])
    return shard


@pytest.fixture
def table(spark: Any, shard: Any, url: str) -> ShardTable:
    return ShardTable.for_name(spark, "orders", url=url)


def contents(shard: Any) -> Contents:
    found: Contents = Counter()
    for row in shard.snapshot().to_arrow().to_pylist():
        found[row["k"], row["n"], row["s"]] = row["__diff"]
    return found


def upper(shard: Any) -> int:
    return shard.upper().element or 0


def rows(frame: Any) -> list[tuple[Any, ...]]:
    return sorted(map(tuple, frame.collect()), key=str)


def test_the_commit_history_tells_the_verbs_by_their_names(spark: Any, shard: Any, table: ShardTable) -> None:
    table.delete("n = 1")
    table.update("n = 2", {"s": "'z'"})
    source = spark.createDataFrame([("q", 9, "q")], DDL)
    table.merge(source).when_not_matched_insert().execute()
    table.rewritten(lambda df: df.where("n = 4").withColumn("__diff", F.lit(-1).cast("bigint")))
    assert [entry.operation for entry in shard.history(4)] == ["update", "merge_into", "update", "delete"]


def test_a_read_tells_its_time_and_stays_there(spark: Any, shard: Any, table: ShardTable) -> None:
    df, as_of = table.read()
    assert (as_of, df.columns) == (0, ["k", "n", "s"])
    shard.insert([{"k": "z", "n": 9, "s": "z"}])
    assert rows(df) == sorted(ROWS, key=str), "it was fixed when it was made, not when it was first looked at"
    assert (table.count(), table.count(0), table.read().as_of) == (5, 4, 1)
    assert rows(table.df(where="n > 2 AND s = 'y'", columns=["n"])) == [(3,), (4,)]
    assert rows(table.df(where="length(s) = 1 AND n = 9", columns=["k"])) == [("z",)], (
        "Spark filters what persist cannot"
    )
    assert rows(table.df(where=F.col("n") == 9, columns=["k"])) == [("z",)]
    assert len(table.head(2)) == 2
    shard.tag("eom", at=0)
    assert rows(table.df(tag="eom")) == sorted(ROWS, key=str)
    assert rows(table.changes(0)) == [("z", 9, "z", 1)]
    assert rows(table.changes(1, 0)) == [("z", 9, "z", -1)]
    assert repr(table).startswith("ShardTable('orders', persist://")


def test_an_empty_shard_is_read_as_of_minus_1_and_written_on_that_condition(spark: Any, client: Any, url: str) -> None:
    client.create_shard("empty", SCHEMA, ["k"])
    table = ShardTable.for_name(spark, "empty", url=url)
    df, as_of = table.read()
    assert (as_of, df.collect()) == (-1, [])
    assert (table.count(as_of), table.head(as_of=as_of), table.changes(as_of).collect()) == (0, [], [])
    first = spark.createDataFrame([("a", 1, "x")], DDL)
    assert table.merge(first).when_matched_delete().when_not_matched_insert().execute().time == 0
    with pytest.raises(UpperMismatch):
        table.upsert(first, read_time=as_of)
    assert (table.count(), table.count(as_of), table.read(as_of, where="n = 1").df.collect()) == (1, 0, [])
    assert rows(table.changes(as_of)) == [("a", 1, "x", 1)]


def test_of_two_jobs_that_read_add_1_and_upsert_one_wins(shard: Any, table: ShardTable) -> None:
    """The lost update."""
    one, two = table.read(where="k = 'a'"), table.read(where="k = 'a'")
    done = table.upsert(one.df.selectExpr("k", "n + 1 n", "s"), read_time=one.as_of)
    assert (done.time, done.rows, done.retractions, done.skipped) == (1, 2, 1, False)
    with pytest.raises(UpperMismatch, match=r"has upper \[2\], not the expected \[1\]") as raised:
        table.upsert(two.df.selectExpr("k", "n + 1 n", "s"), read_time=two.as_of)
    assert raised.value.details == {"expected": [1], "actual": [2]}
    assert isinstance(raised.value.__cause__, PySparkException)
    assert contents(shard)["a", 2, "x"] == 1
    with pytest.raises(UpperMismatch):
        table.overwrite(two.df, read_time=two.as_of)
    assert (upper(shard), table.count()) == (2, 4)


def test_a_write_tells_where_it_landed_or_that_it_was_skipped(
    spark: Any, shard: Any, table: ShardTable, url: str
) -> None:
    more = spark.createDataFrame([("d", 5, "x")], DDL)
    first = table.append(more, txn=("nightly", 1), info={"ticket": 7})
    assert (first.time, first.rows, first.skipped) == (1, 1, False)
    again = table.append(more, txn=("nightly", 1), read_time=0)
    assert (again.time, again.rows, again.skipped) == (1, 1, True)
    empty = table.append(more.where("n < 0"), txn=("nightly", 3))
    assert (empty.time, empty.rows, empty.skipped) == (None, 0, False)
    late = table.append(more, txn=("nightly", 2))
    assert (late.time, late.skipped) == (None, True), "it never ran, and a later one did"
    assert table.append(more.where("n < 0")).time is None
    assert upper(shard) == 2
    more.write.format("persist").mode("append").options(url=url, writeId="mine").save("orders")
    assert table.written("mine").time == 2
    assert table.written("nobody's") is None
    assert shard.history(1)[0].info["spark"]["write"] == "mine"


def test_a_merge_does_the_first_clause_that_applies(spark: Any, shard: Any, table: ShardTable) -> None:
    source = spark.createDataFrame(
        [("a", 10, "new"), ("b", 0, "new"), ("d", 40, "new"), ("e", -1, "new"), (None, 5, "new")], DDL
    )
    done = (
        table.merge(source)
        .when_matched_delete("source.n = 0")
        .when_matched_update({"n": "target.n + source.n"}, "source.n > 5")
        .when_matched_update()
        .when_not_matched_insert({"k": "source.k", "n": F.col("source.n") * 2}, F.col("source.n") > 0)
        .when_not_matched_by_source_update({"s": F.lit("kept"), "n": None})
        .when_not_matched_by_source_delete()
        .execute(info={"ticket": 7})
    )
    assert contents(shard) == Counter([("a", 11, "x"), ("c", None, "kept"), ("d", 80, None), (None, 5, "new")])
    assert (done.time, upper(shard)) == (1, 2)
    assert shard.history(1)[0].info["ticket"] == 7


def test_a_merge_by_another_column_changes_every_row_that_matches(spark: Any, shard: Any, table: ShardTable) -> None:
    shard.insert([{"k": "a", "n": 1, "s": "x"}])  # now it is there twice
    source = spark.createDataFrame([("x", 7), ("q", 8)], "s string, n bigint")
    table.merge(source, on="s").when_matched_update({"n": "source.n"}).execute()
    assert contents(shard) == {("a", 7, "x"): 2, ("b", 7, "x"): 1, ("c", 3, "y"): 1, (None, 4, "y"): 1}
    table.merge(source, on=["s"]).when_not_matched_by_source_delete().execute()
    assert contents(shard) == {("a", 7, "x"): 2, ("b", 7, "x"): 1}


DEFAULTS: dict[str, tuple[pa.DataType, Any]] = {
    "count": (pa.int32(), 7),
    "price": (pa.decimal128(9, 2), Decimal("1.50")),
    "day": (pa.date32(), dt.date(2024, 5, 5)),
    "instant": (pa.timestamp("us", "UTC"), dt.datetime(2024, 5, 5, 13, tzinfo=dt.UTC)),
    "local": (pa.timestamp("us"), dt.datetime(2024, 5, 5, 13)),  # noqa: DTZ001
    "data": (pa.binary(), b"\x00\xff"),
    "flag": (pa.bool_(), True),
    "numbers": (pa.list_(pa.int64()), [1, None, 3]),
    "place": (pa.struct([("x", pa.int64()), ("tags", pa.list_(pa.string()))]), {"x": 1, "tags": ["a"]}),
    "named": (pa.map_(pa.string(), pa.int64()), [("a", 1), ("b", None)]),
}


def test_a_merge_inserts_the_defaults_of_columns_that_it_does_not_name(spark: Any, shard: Any, url: str) -> None:
    """It inserted nulls, where `Shard.merge` and every other write insert the defaults."""
    for name, (kind, default) in DEFAULTS.items():
        shard.add_column(name, kind, default=default)
    table = ShardTable.for_name(spark, "orders", url=url)
    source = spark.createDataFrame([("p", 5, "x"), ("q", 6, "x")], DDL)
    merge = table.merge(source).when_not_matched_insert({"k": "source.k", "count": "null"}, "source.k = 'p'")
    merge.when_not_matched_insert().execute()
    [[named], [of_source]] = shard.get("p"), shard.get("q")
    defaults = {name: default for name, (_, default) in DEFAULTS.items()}
    assert named == {"k": "p", "n": None, "s": None, **defaults, "count": None}
    assert of_source == {"k": "q", "n": 6, "s": "x", **defaults}


def test_a_source_with_two_rows_that_match_one_is_refused(spark: Any, shard: Any, table: ShardTable) -> None:
    source = spark.createDataFrame([("a", 5, "x"), ("a", 6, "x"), ("new", 1, "x"), ("new", 2, "x")], DDL)
    with pytest.raises(InvalidUsage, match=r"^two rows of the source have the same 'k', and both match a row of shard"):
        table.merge(source).when_matched_update().when_not_matched_insert().execute()
    assert upper(shard) == 1
    table.merge(source.where("k = 'new'")).when_matched_update().when_not_matched_insert().execute()
    assert (contents(shard)["new", 1, "x"], contents(shard)["new", 2, "x"]) == (1, 1), "neither of them matches"


@pytest.mark.smoke
@pytest.mark.proof
def test_random_merges_equal_a_dict(spark: Any, shard: Any, table: ShardTable) -> None:
    """Keys from a small set, every kind of clause, one row a key."""
    rng = random.Random(7)
    model = {k: (n, s) for k, n, s in ROWS}
    for _ in range(size(2, 12)):
        keys = rng.sample([None, *"abcdefgh"], rng.randrange(1, 8))
        source = {k: (rng.randrange(9), rng.choice("xyz")) for k in keys}
        least, drops, adds = rng.randrange(9), rng.random() < 0.5, rng.random() < 0.7
        merge = table.merge(spark.createDataFrame([(k, *row) for k, row in source.items()], DDL))
        merge = merge.when_matched_delete(f"source.n < {least} AND target.s = 'x'")
        merge = merge.when_matched_update({"n": "source.n + target.n"})
        if adds:
            merge = merge.when_not_matched_insert(condition=f"source.n >= {least}")
        if drops:
            merge = merge.when_not_matched_by_source_delete(f"target.n < {least}")
        merge.execute()
        after = dict(model)
        for k, (n, s) in source.items():
            if k in model and n < least and model[k][1] == "x":
                del after[k]
            elif k in model:
                after[k] = (n + model[k][0], model[k][1])
            elif adds and n >= least:
                after[k] = (n, s)
        if drops:
            after = {k: row for k, row in after.items() if k in source or row[0] >= least}
        model = after
        assert contents(shard) == Counter((k, *row) for k, row in model.items())


def test_an_update_and_a_deletion_are_one_commit_each(shard: Any, table: ShardTable) -> None:
    shard.insert([{"k": "a", "n": 1, "s": "x"}])
    done = table.update("n <= 2 AND s = 'x'", {"n": "n * 10", "s": F.lit("up")})
    assert done.time == 2
    assert contents(shard) == {("a", 10, "up"): 2, ("b", 20, "up"): 1, ("c", 3, "y"): 1, (None, 4, "y"): 1}
    table.delete("k IS NULL")
    assert table.delete(F.length("s") == 2).time == 4
    assert contents(shard) == {("c", 3, "y"): 1}
    table.update(None, {"n": 0})
    assert contents(shard) == {("c", 0, "y"): 1}
    table.restore(0)
    assert contents(shard) == Counter(ROWS)


@pytest.fixture
def overtaken(table: ShardTable, shard: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[int]]:
    """`overtaken(3)`: somebody adds a row between the read and the write of the first three tries."""
    whole, tries = ShardTable._write, []

    def times(count: int) -> list[int]:
        def write(self: ShardTable, *arguments: Any) -> Any:
            tries.append(upper(shard))
            if len(tries) <= count:
                shard.insert([{"k": f"other{len(tries)}", "n": 1, "s": "x"}])
            return whole(self, *arguments)

        monkeypatch.setattr(ShardTable, "_write", write)
        return tries

    return times


def test_a_merge_that_is_overtaken_begins_anew(
    shard: Any, table: ShardTable, overtaken: Callable[[int], list[int]]
) -> None:
    tries = overtaken(2)
    table.update("s = 'x'", {"n": "n + 100"})
    assert tries == [1, 2, 3]
    found = contents(shard)
    assert {(k, n) for (k, n, s), count in found.items() if s == "x" and count == 1} == {
        ("a", 101), ("b", 102), ("other1", 101), ("other2", 101),
    }  # fmt: skip
    assert upper(shard) == 4


def test_a_merge_that_is_overtaken_each_time_is_told_so_and_changes_nothing(
    shard: Any, table: ShardTable, overtaken: Callable[[int], list[int]]
) -> None:
    tries = overtaken(9)
    with pytest.raises(UpperMismatch, match="others wrote to shard 'orders' during each of 2 attempts"):
        table.delete("s = 'x'", retries=1)
    assert len(tries) == 2
    assert contents(shard) == Counter([*ROWS, ("other1", 1, "x"), ("other2", 1, "x")])


def test_a_table_that_cannot_be_is_refused(spark: Any, shard: Any, url: str, tmp_path: Any) -> None:
    with pytest.raises(UnknownShard, match="'nowhere'"):
        ShardTable.for_name(spark, "nowhere", url=url)
    with pytest.raises(UnknownShard, match=r"persist://.*typo holds no shards"):
        ShardTable.for_name(spark, "orders", url=f"persist://{tmp_path}/typo")
    with pytest.raises(InvalidUsage, match="option 'asOf' does not apply to a table"):
        ShardTable.for_name(spark, "orders", url=url, asOf=1)
    assert not (tmp_path / "typo").exists()


BAD: list[tuple[Callable[[ShardTable, Any], object], str]] = [
    (lambda t, _: t.read(0, tag="x"), "as_of and tag are both given"),
    (lambda t, _: t.read("x"), "as_of is 'x'"),  # type: ignore[arg-type]
    (lambda t, _: t.read(tag="nobody"), "has no tag 'nobody'"),
    (lambda t, _: t.df(columns=["z"]), "no column 'z'"),
    (lambda t, _: t.df(where=7), "the condition is 7; it must be SQL"),  # type: ignore[arg-type]
    (lambda t, _: t.append([1]), "must be a DataFrame"),  # type: ignore[arg-type]
    (lambda t, s: t.append(s, txn=("a", "1")), "txn is"),  # type: ignore[arg-type]
    (lambda t, s: t.append(s, info=[1]), "info is"),  # type: ignore[arg-type]
    (lambda t, s: t.append(s, read_time=-2), "option 'readTime' is -2"),
    (lambda t, s: t.append(s.drop("k")), "the DataFrame lacks the column 'k'"),
    (lambda t, s: t.upsert(s.withColumn("z", s.n)), "has no column 'z'"),
    (lambda t, s: t.upsert(s.union(s)), "occurs more than once"),
    (lambda t, s: t.upsert(s, delete_column="d"), "names 'd', which is not a column"),
    (lambda t, _: t.delete(None), "where is None"),  # type: ignore[arg-type]
    (lambda t, _: t.update("n = 1", {"k": "'z'"}), "'k' is a key column"),
    (lambda t, _: t.update("n = 1", {}), "must be a dict by column"),
    (lambda t, _: t.update("n = 1", {"z": "1"}), "the shard has no column 'z'"),
    (lambda t, _: t.delete("n = 1", retries=-1), r"retries is -1; it must be in \[0"),
    (lambda t, s: t.merge(s).execute(), "the merge has no clause"),
    (lambda t, _: t.merge([1]), "source is .*; it must be a DataFrame"),  # type: ignore[arg-type]
    (lambda t, s: t.merge(s, on=[]), "'on' is empty"),
    (lambda t, s: t.merge(s, on="z"), "has no column 'z' to match by"),
    (lambda t, s: t.merge(s.drop("k")), "the source lacks the column 'k'"),
    (lambda t, s: t.merge(s.select("*", "n")), "has the column 'n' twice"),
    (lambda t, s: t.merge(s.drop("n")).when_matched_update(), "the source lacks the column 'n'"),
    (lambda t, s: t.merge(s).when_matched_update({"k": "1"}), "'k' is a key column"),
    (lambda t, s: t.merge(s).when_not_matched_by_source_update({"k": "1"}), "'k' is a key column"),
    (lambda t, s: t.merge(s).when_not_matched_insert({"z": "1"}), "no column 'z'"),
]


def test_what_cannot_be_is_refused_and_changes_nothing(spark: Any, shard: Any, table: ShardTable) -> None:
    source = spark.createDataFrame([("a", 5, "x")], DDL)
    for ask, why in BAD:
        with pytest.raises((InvalidUsage, NotReadable), match=why):
            ask(table, source)
        assert (upper(shard), contents(shard)) == (1, Counter(ROWS)), why


def test_errors_of_spark_stay_what_they_are(spark: Any, shard: Any, table: ShardTable) -> None:
    with pytest.raises(PySparkException, match="nope"):
        table.delete("nope = 1 AND length(s) = 1")
    with pytest.raises(PySparkException, match="nope"):
        table.merge(spark.createDataFrame([("a", 5, "x")], DDL)).when_matched_update({"n": "nope"}).execute()
    with pytest.raises(KeyError), unwrapped():
        raise KeyError("x")
    assert unwrapped_error("a.b: persist.core.errors.NoSuchThing: x") is None
    assert upper(shard) == 1
