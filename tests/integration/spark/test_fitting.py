"""What Spark's verbs set, and the keys that they match by: as the columns hold it, value for value, or refused."""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812

from persist import InvalidUsage
from persist.spark import ShardTable
from persist.spark.shard_table import unwrapped
from persist.spark.spark_schemas import spark_type
from persist.spark.store_assignment import SET, store_cast

pytestmark = pytest.mark.spark


@pytest.fixture(params=["true", "false"], ids=["ansi", "no ansi"])
def ansi(spark: Any, request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test runs twice: what does not fit is refused in both modes."""
    before = spark.conf.get("spark.sql.ansi.enabled")
    spark.conf.set("spark.sql.ansi.enabled", request.param)
    yield
    spark.conf.set("spark.sql.ansi.enabled", before)


MONEY = pa.decimal128(10, 2)
LISTS, PAIR = pa.list_(pa.int64()), pa.struct([("a", pa.int64()), ("b", pa.string())])
FITS: list[tuple[pa.DataType, str, object]] = [
    (pa.int64(), "7S", 7),
    (pa.int64(), "7.0D", 7),
    (pa.int64(), "-9223372036854775808D", -(2**63)),
    (pa.int64(), "7.00", 7),
    (pa.int64(), "null", None),
    (pa.int64(), "cast(null as double)", None),
    (pa.int8(), "127L", 127),
    (pa.uint8(), "255", 255),
    (pa.uint64(), "18446744073709551615", 2**64 - 1),
    (pa.float64(), "9007199254740992L", 2.0**53),
    (pa.float64(), "0.1", 0.1),
    (pa.float64(), "double('NaN')", math.nan),
    (pa.float64(), "double('-Infinity')", -math.inf),
    (pa.float32(), "2.5D", 2.5),
    (pa.float32(), "double('NaN')", math.nan),
    (pa.float32(), "cast(0.5 as decimal(38, 18))", 0.5),
    (MONEY, "3", 3),
    (MONEY, "1.2000", Decimal("1.20")),
    (MONEY, "2.5D", Decimal("2.50")),
    (MONEY, "cast(null as decimal(38, 18))", None),
    (pa.string(), "'x' collate UTF8_LCASE", "x"),
    (pa.binary(), "'x'", b"x"),
    (pa.timestamp("us"), "date'2024-05-05'", dt.datetime(2024, 5, 5)),  # noqa: DTZ001
    (pa.duration("us"), "interval '1' hour", dt.timedelta(hours=1)),
    (LISTS, "array(1, null)", [1, None]),
    (LISTS, "array()", []),
    (PAIR, "named_struct('a', 1, 'b', null)", (1, None)),
    (pa.map_(pa.string(), pa.float64()), "map('a', 1.5)", {"a": 1.5}),
]
BY_TYPE: list[tuple[pa.DataType, str, str]] = [
    (pa.int64(), "'abc'", "bigint, and the assigned value is string: cast it first"),
    (pa.int64(), "'7'", "bigint, and the assigned value is string"),
    (pa.int64(), "true", "bigint, and the assigned value is boolean"),
    (pa.int64(), "date'2024-05-05'", "bigint, and the assigned value is date"),
    (pa.bool_(), "1", "boolean, and the assigned value is int"),
    (pa.string(), "7", "string, and the assigned value is int"),
    (pa.date32(), "timestamp'2024-05-05 00:00:00'", "date, and the assigned value is timestamp"),
    (pa.date32(), "'2024-05-05'", "date, and the assigned value is string"),
    (pa.timestamp("us"), "timestamp'2024-05-05 13:00:00'", "timestamp_ntz, and the assigned value is timestamp"),
    (pa.timestamp("us", "UTC"), "timestamp_ntz'2024-05-05 13:00:00'", "timestamp, and the .* value is timestamp_ntz"),
    (pa.timestamp("us", "UTC"), "0", "timestamp, and the assigned value is int"),
    (LISTS, "array(1.5D)", "array<bigint>, and the assigned value is array<double>"),
    (LISTS, "7", "array<bigint>, and the assigned value is int"),
    (PAIR, "named_struct('b', 'x', 'a', 1)", "struct<a:bigint,b:string>, and the .* value is struct<b:string,a:int>"),
    (PAIR, "named_struct('a', 1)", "and the assigned value is struct<a:int>"),
]
BY_VALUE: list[tuple[pa.DataType, str, str]] = [
    (pa.int64(), "2.7D", "bigint, and the assigned value is 2.7: round it or cast it first"),
    (pa.int64(), "2.7", "bigint, and the assigned value is 2.7"),
    (pa.int64(), "9223372036854775808D", "bigint, and the assigned value is 9.22337203685477"),
    (pa.int64(), "double('NaN')", "bigint, and the assigned value is NaN"),
    (pa.int64(), "double('Infinity')", "bigint, and the assigned value is Infinity"),
    (pa.int32(), "cast(2147483648 as float)", "int, and the assigned value is 2.147"),
    (pa.int32(), "2147483648L", "int, and the assigned value is 2147483648"),
    (pa.int8(), "128", "tinyint, and the assigned value is 128"),
    (pa.uint8(), "256", "smallint, and the assigned value is 256"),
    (pa.uint64(), "-1", "decimal.20,0., and the assigned value is -1"),
    (pa.float64(), "9007199254740993L", "double, and the assigned value is 9007199254740993"),
    (pa.float64(), "9223372036854775807L", "double, and the assigned value is 9223372036854775807"),
    (pa.float64(), "12345678901234567.1", "double, and the assigned value is 12345678901234567.1"),
    (pa.float32(), "0.1D", "float, and the assigned value is 0.1"),
    (pa.float32(), "1e300D", "float, and the assigned value is 1.0E300"),
    (pa.float32(), "16777217", "float, and the assigned value is 16777217"),
    (MONEY, "1.2345", "decimal.10,2., and the assigned value is 1.2345"),
    (MONEY, "100000000L", "decimal.10,2., and the assigned value is 100000000"),
    (MONEY, "9.999D", "decimal.10,2., and the assigned value is 9.999"),
    (MONEY, "99999999.999", "decimal.10,2., and the assigned value is 99999999.999"),
    (MONEY, "1e-300D", "decimal.10,2., and the assigned value is 1.0E-300"),
    (MONEY, "double('NaN')", "decimal.10,2., and the assigned value is NaN"),
]


def fitting(spark: Any, *given: tuple[pa.DataType, str]) -> Any:
    """Each value as a column `c` of its type has it, in one row."""
    rows = spark.range(1)
    kinds = rows.select(*[F.expr(value) for _, value in given]).schema.fields
    with unwrapped():
        columns = [
            store_cast(SET, F.expr(value), field.dataType, spark_type("c", kind), pa.field("c", kind)).alias(f"c{n}")
            for n, ((kind, value), field) in enumerate(zip(given, kinds, strict=True))
        ]
        return rows.select(*columns).collect()[0]


@pytest.mark.usefixtures("ansi")
def test_what_fits_is_the_same_value(spark: Any) -> None:
    found = fitting(spark, *[(kind, value) for kind, value, _ in FITS])
    for (kind, value, expected), one in zip(FITS, found, strict=True):
        same = one == expected or (one != one and expected != expected)
        assert same, f"{value} as {kind} is {one!r}"


def test_what_cannot_fit_by_its_type_is_refused_with_the_column(spark: Any) -> None:
    for kind, value, sentence in BY_TYPE:
        with pytest.raises(InvalidUsage, match=f"^column 'c' is .*{sentence}"):
            fitting(spark, (kind, value))


@pytest.mark.usefixtures("ansi")
def test_a_value_that_does_not_fit_is_refused_with_the_column(spark: Any) -> None:
    for kind, value, sentence in BY_VALUE:
        with pytest.raises(InvalidUsage, match=f"^column 'c' is .*{sentence}"):
            fitting(spark, (kind, value))


def test_a_value_that_is_another_one_each_time_is_looked_at_once(spark: Any) -> None:
    """What is checked is what is written, also of `rand()`."""
    given = F.expr("round(rand() * 10) / (1 + round(rand()))")
    column = F.when(F.lit(True), store_cast(SET, F.floor(given * 2).cast("double"), *_double_to_long()))
    assert all(isinstance(row.c, int) for row in spark.range(500).select(column.alias("c")).collect())


def _double_to_long() -> tuple[Any, Any, pa.Field]:
    return spark_type("c", pa.float64()), spark_type("c", pa.int64()), pa.field("c", pa.int64())


# --- a table

COLUMNS = pa.schema([
    ("id", pa.int64()), ("n", pa.int64()), ("p", MONEY), ("d", pa.date32()), ("f", pa.float32()),
    ("t", pa.timestamp("us")), ("s", pa.string()),
])  # fmt: skip
FIRST = {"id": 1, "n": 1, "p": Decimal("1.00"), "d": dt.date(2024, 1, 1), "f": 1.0, "t": None, "s": "x"}


@pytest.fixture
def shard(client: Any) -> Any:
    """One row, at time 0."""
    shard = client.create_shard("orders", COLUMNS, ["id"])
    shard.insert([FIRST])
    return shard


@pytest.fixture
def table(spark: Any, shard: Any, url: str) -> ShardTable:
    return ShardTable.for_name(spark, "orders", url=url)


SETS: list[tuple[dict[str, Any], str]] = [
    ({"n": 2.7}, "column 'n' does not fit int64: 2.7 would be truncated"),
    ({"n": object()}, "column 'n' does not fit int64"),
    ({"p": Decimal("1.2345")}, "column 'p' does not fit decimal128"),
    ({"d": dt.datetime(2024, 5, 5, 13)}, "column 'd' does not fit date32"),  # noqa: DTZ001
    ({"d": "timestamp'2024-05-05 13:00:00'"}, "column 'd' is date, and the assigned value is timestamp"),
    ({"f": 1e300}, "column 'f' does not fit float"),
    ({"s": 7}, "column 's' does not fit string"),
    ({"n": "'abc'"}, "column 'n' is bigint, and the assigned value is string"),
    ({"n": "id + 1.5"}, "column 'n' is bigint, and the assigned value is 2.5: round it or cast it first"),
    ({"p": "n / 3"}, "column 'p' is decimal.10,2., and the assigned value is 0.33333"),
]


def test_an_update_refuses_what_does_not_fit_and_nothing_is_written(shard: Any, table: ShardTable) -> None:
    """2.7 became 2, a timestamp a date, and 1.2345 became 1.23."""
    for values, sentence in SETS:
        with pytest.raises(InvalidUsage, match=f"^{sentence}"):
            table.update("id = 1", values)
    assert (shard.head(), shard.upper().element) == ([FIRST], 1)


def test_an_update_sets_values_of_python_as_they_are(shard: Any, table: ShardTable) -> None:
    sets = {"n": 7.0, "p": 5, "d": dt.datetime(2024, 5, 5), "f": 0.1, "t": dt.datetime(2024, 5, 5, 13), "s": None}  # noqa: DTZ001
    table.update(None, sets)
    [row] = shard.head()
    assert (row["n"], row["p"], row["d"], row["s"]) == (7, Decimal("5.00"), dt.date(2024, 5, 5), None)
    assert row["f"] == pytest.approx(0.1)
    assert row["t"] == sets["t"], "the zone of the session does not matter"


def merges(table: ShardTable, source: Any) -> list[Callable[[], object]]:
    key = {"id": "source.id", "n": "source.n"}
    return [
        lambda: table.merge(source).when_matched_update({"n": "source.n"}).execute(),
        lambda: table.merge(source).when_not_matched_insert(key).execute(),
        lambda: table.merge(source).when_not_matched_by_source_delete().execute(),
    ]


KEYS: list[tuple[str, object, str]] = [
    ("id double", 1.5, "column 'id' is bigint, and a key of the source is 1.5: round it or cast it first"),
    ("id decimal(38, 1)", Decimal("1.5"), "column 'id' is bigint, and a key of the source is 1.5"),
    ("id double", math.nan, "column 'id' is bigint, and a key of the source is NaN"),
    ("id string", "1", "column 'id' is bigint, and a key of the source is string: cast it first"),
]


def test_a_merge_refuses_keys_that_do_not_fit(spark: Any, shard: Any, table: ShardTable) -> None:
    """1.5 matched no row, and was then written as a second row of key 1."""
    for ddl, key, sentence in KEYS:
        for merge in merges(table, spark.createDataFrame([(key, 9)], f"{ddl}, n bigint")):
            with pytest.raises(InvalidUsage, match=f"^{sentence}"):
                merge()
    assert (shard.head(), shard.upper().element) == ([FIRST], 1)


def test_a_merge_refuses_values_that_do_not_fit_where_they_are_set(spark: Any, shard: Any, table: ShardTable) -> None:
    source = spark.createDataFrame([(1, 2.7), (2, 3.0)], "id int, n double")
    with pytest.raises(InvalidUsage, match=r"^column 'n' is bigint, and the assigned value is 2\.7"):
        table.merge(source).when_matched_update({"n": "source.n"}).execute()
    assert shard.upper().element == 1
    merge = table.merge(source).when_matched_update({"n": "source.n"}, "source.n = round(source.n)")
    merge.when_not_matched_insert({"id": "source.id", "n": "source.n"}).execute()
    assert [(row["id"], row["n"]) for row in shard.head()] == [(1, 1), (2, 3)], "the clause of 2.7 did not apply"


# --- keys of floats

FLOATS = pa.schema([("f", pa.float64()), ("v", pa.int64())])


@pytest.mark.parametrize(("source", "zero"), [("f double, v bigint", "-0.0D"), ("f float, v bigint", "float('-0.0')")])
def test_minus_zero_is_a_key_of_its_own_and_so_is_nan(
    spark: Any, client: Any, url: str, source: str, zero: str
) -> None:
    """As for `Shard.merge` and `ShardTable.upsert`: it changed the row of key 0.0."""
    shard = client.create_shard("floats", FLOATS, ["f"])
    shard.insert([{"f": 0.0, "v": 1}, {"f": math.nan, "v": 2}, {"f": None, "v": 3}, {"f": 1.0, "v": 4}])
    table = ShardTable.for_name(spark, "floats", url=url)
    given = spark.createDataFrame([(0.0, 20), (math.nan, 30), (None, 40), (2.0, 50)], source)
    given = given.union(spark.range(1).selectExpr(f"{zero} f", "10L v"))
    merge = table.merge(given).when_matched_update().when_not_matched_insert()
    merge.when_not_matched_by_source_delete().execute()
    found = {str(row["f"]): row["v"] for row in shard.head()}
    assert found == {"-0.0": 10, "0.0": 20, "nan": 30, "None": 40, "2.0": 50}, "two zeros are no duplicates"


def test_minus_zero_in_a_list_that_is_matched_by_is_another_one_too(spark: Any, client: Any, url: str) -> None:
    shard = client.create_shard("lists", pa.schema([("k", pa.int64()), ("l", pa.list_(pa.float64()))]), ["k"])
    shard.insert([{"k": 1, "l": [0.0]}, {"k": 2, "l": [-0.0]}])
    table = ShardTable.for_name(spark, "lists", url=url)
    table.merge(spark.createDataFrame([([-0.0],)], "l array<double>"), on="l").when_matched_delete().execute()
    assert [row["k"] for row in shard.head()] == [1]


# --- nothing changes


def test_verbs_that_change_nothing_take_no_time(spark: Any, shard: Any, table: ShardTable) -> None:
    """They took one, so that everybody's `read_time` was passed."""
    shard.insert([{**FIRST, "id": 2, "s": "y"}])
    source = spark.createDataFrame([(1, 1)], "id bigint, n bigint")
    none = source.where("id = 9")
    for verb in (
        lambda: table.delete("n = 5"),
        lambda: table.update("n = 5", {"n": 6}),
        lambda: table.update("n = 1", {"n": 1, "s": "s"}),
        lambda: table.merge(source).when_matched_update({"n": "source.n"}).execute(),
        lambda: table.merge(none).when_matched_delete().when_not_matched_insert({"id": "source.id"}).execute(),
    ):
        done = verb()
        assert (done.time, done.rows, done.skipped, shard.upper().element) == (None, 0, False, 2)
    assert table.update(None, {"n": "id"}).time == 2, "one of two rows changes"


def test_rows_that_change_places_change_nothing(spark: Any, client: Any, url: str) -> None:
    shard = client.create_shard("places", pa.schema([("k", pa.int64()), ("s", pa.string())]), ["k"])
    shard.insert([{"k": 1, "s": "x"}, {"k": 1, "s": "y"}])
    source = spark.createDataFrame([("x", "y"), ("y", "x")], "s string, other string")
    table = ShardTable.for_name(spark, "places", url=url)
    assert table.merge(source, on="s").when_matched_update({"s": "source.other"}).execute().time is None
    assert shard.upper().element == 1
