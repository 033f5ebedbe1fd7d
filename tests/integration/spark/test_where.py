"""`where` keeps exactly the rows that Spark's own filter keeps, or is rejected."""

from __future__ import annotations

import datetime as dt
import decimal
import random
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from persist import InvalidUsage, ShardSchema
from persist.parts.filter_eval import Filter
from persist.spark.batch_io import SnapshotReader
from persist.spark.options import Options, ReadOptions, Target
from persist.spark.spark_schemas import spark_schema
from tests.support.examples import size

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([
    ("id", pa.int64()), ("s", pa.string()), ("i", pa.int32()), ("tiny", pa.int8()), ("f", pa.float64()),
    ("r", pa.float32()), ("d", pa.decimal128(10, 2)), ("b", pa.bool_()), ("day", pa.date32()),
    ("at", pa.timestamp("us", "UTC")), ("local", pa.timestamp("us")),
])  # fmt: skip
FLOATS = [0.0, -0.0, 1.5, -2.25, 0.1, 16777216.0, float("inf"), float("-inf"), float("nan")]
TEXTS = ["", "a", "ab", "abc", "b", "ß", "日本", "z%", "it's"]
EPOCH = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)


def rows(rng: random.Random, count: int) -> list[dict[str, Any]]:
    def maybe(value: Any) -> Any:
        return None if rng.random() < 0.15 else value

    return [
        {
            "id": n,
            "s": maybe(rng.choice(TEXTS)),
            "i": maybe(rng.randrange(-3, 4)),
            "tiny": maybe(rng.choice([-128, -1, 0, 1, 127])),
            "f": maybe(rng.choice(FLOATS)),
            "r": maybe(rng.choice(FLOATS)),
            "d": maybe(decimal.Decimal(rng.randrange(-300, 300)) / 100),
            "b": maybe(rng.random() < 0.5),
            "day": maybe(dt.date(2024, 1, 1 + rng.randrange(5))),
            "at": maybe(EPOCH + dt.timedelta(seconds=rng.randrange(5))),
            "local": maybe((EPOCH + dt.timedelta(seconds=rng.randrange(5))).replace(tzinfo=None)),
        }
        for n in range(count)
    ]


def literal(rng: random.Random, column: str) -> str:
    if rng.random() < 0.04:
        return "NULL"
    return {
        "id": lambda: str(rng.randrange(-5, 300)),
        "s": lambda: "'{}'".format(rng.choice(TEXTS).replace("'", "''")),
        "i": lambda: str(rng.choice([-3, 0, 2, 99, 2**31, -(2**40)])),
        "tiny": lambda: str(rng.choice([-128, 0, 127, 300])),
        "f": lambda: rng.choice(["0", "1.5", "-2.25", "0.1", "1e3", "-1"]),
        "r": lambda: rng.choice(["0", "1.5", "-2.25", "0.1", "1e3", "16777216"]),
        "d": lambda: rng.choice(["0", "1.25", "-0.01", "2.999", "3"]),
        "b": lambda: rng.choice(["TRUE", "false"]),
        "day": lambda: f"DATE '2024-01-0{rng.randrange(1, 7)}'",
        "at": lambda: (
            rng.choice([f"TIMESTAMP '2024-01-01{blank}00:00:0{n}Z'" for n in range(5) for blank in " T"])
            if rng.random() < 0.7
            else "TIMESTAMP '2024-01-01 05:30:02+05:30'"
        ),
        "local": lambda: f"TIMESTAMP_NTZ '2024-01-01{rng.choice(' T')}00:00:0{rng.randrange(6)}'",
    }[column]()


def predicate(rng: random.Random, depth: int = 0) -> str:
    roll = rng.random()
    if depth < 3 and roll < 0.35:
        return f"({predicate(rng, depth + 1)}) {rng.choice(['AND', 'OR'])} ({predicate(rng, depth + 1)})"
    if depth < 3 and roll < 0.45:
        return f"NOT ({predicate(rng, depth + 1)})"
    column = rng.choice(SCHEMA.names)
    form = rng.randrange(7)
    if form == 0:
        return f"{column} IS {rng.choice(['', 'NOT '])}NULL"
    if form == 1:
        values = ", ".join(literal(rng, column) for _ in range(rng.randrange(1, 4)))
        return f"{column} {rng.choice(['', 'NOT '])}IN ({values})"
    if form == 2:
        return f"{column} {rng.choice(['', 'not '])}between {literal(rng, column)} and {literal(rng, column)}"
    if form == 3 and column == "s":
        return f"s {rng.choice(['', 'NOT '])}LIKE '{rng.choice(['a%', 'ab%', '%', 'b', 'ß%'])}'"
    if form == 4 and column == "b":
        return "b"
    if form == 5:
        return f"{literal(rng, column)} {rng.choice(['=', '<', '>='])} `{column}`"
    return f"{column} {rng.choice(['=', '==', '<>', '!=', '<', '<=', '>', '>=', '<=>'])} {literal(rng, column)}"


def kept(url: str, where: str, key: str) -> list[int]:
    """The ids that a read keeps: planned and read as Spark does it, in this process."""
    given = Options({"url": url, "path": key, "where": where, "numPartitions": "3"})
    reader = SnapshotReader(Target.of(given), ReadOptions.of(given), spark_schema([SCHEMA.field("id")]))
    return sorted(n for p in reader.partitions() for batch in reader.read(p) for n in batch.column(0).to_pylist())


@pytest.mark.smoke
@pytest.mark.proof
@pytest.mark.parametrize("key", ["id", "s", "i", "f", "day"])
def test_random_predicates_keep_what_spark_keeps(spark: Any, client: Any, url: str, key: str) -> None:
    rng = random.Random(key)
    table = rows(rng, 240)
    shard = client.create_shard(key, SCHEMA, [key, *([] if key == "id" else ["id"])])
    for start in range(0, 240, 40):
        shard.insert(pa.Table.from_pylist(table[start : start + 40], schema=SCHEMA))
    predicates = [predicate(rng) for _ in range(size(10, 200))]
    frame = spark.read.format("persist").option("url", url).load(key)
    truths = frame.selectExpr("id", *[f"coalesce(({p}), false) p{n}" for n, p in enumerate(predicates)]).collect()
    for n, where in enumerate(predicates):
        assert kept(url, where, key) == sorted(row.id for row in truths if row[n + 1]), where


def test_a_predicate_reaches_the_shard_through_spark(client: Any, load: Any) -> None:
    shard = client.create_shard("orders", SCHEMA, ["s", "id"])
    shard.insert(pa.Table.from_pylist(rows(random.Random(1), 100), schema=SCHEMA))
    where = "s LIKE 'a%' AND (i > 0 OR f >= 1.5)"
    expected = sorted(row.id for row in load("orders").where(where).collect())
    assert expected
    assert sorted(row.id for row in load("orders", "id bigint", where=where).collect()) == expected
    changes = load("orders", where=where, readChangeFeed="true")
    assert sorted(row.id for row in changes.collect()) == expected


def test_row_groups_that_cannot_match_are_left_out_and_no_others() -> None:
    rng = random.Random(5)
    table = pa.Table.from_pylist(sorted(rows(rng, 400), key=lambda row: (row["i"] or 0, row["s"] or "")), schema=SCHEMA)
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=20)
    file = pq.ParquetFile(pa.BufferReader(sink.getvalue()))
    left_out = 0
    for _ in range(300):
        wanted = Filter.of(predicate(rng), ShardSchema(SCHEMA, ("id",)))
        for number in range(file.num_row_groups):
            if not wanted.may_match(dict(_statistics(file.metadata.row_group(number)))):
                assert len(wanted.apply(file.read_row_group(number))) == 0
                left_out += 1
    assert left_out > 100


def _statistics(group: Any) -> Iterator[tuple[str, Any]]:
    for position in range(group.num_columns):
        column = group.column(position)
        if column.statistics is not None:
            yield column.path_in_schema, column.statistics


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("nope = 1", "where names 'nope', which the shard does not have"),
        ("i =", "has 'the end' instead of a literal"),
        ("i = 1 i", "has 'i' instead of AND, OR or the end"),
        ("i = 1.5", "cannot compare column 'i', which is int32, with decimal '1.5' exactly"),
        ("i = '1'", "cannot compare column 'i', which is int32, with string '1' exactly"),
        ("s = 1", "cannot compare column 's', which is string, with integer '1' exactly"),
        ("s LIKE '%a'", "supports only LIKE 'prefix%'"),
        ("s LIKE 'a_b%'", "supports only LIKE 'prefix%'"),
        ("upper(s) = 'A'", r"has '\(' instead of AND, OR or the end"),
        ("i + 1 = 2", "has a syntax error at"),
        ("at > TIMESTAMP '2024-01-01 00:00:00'", "cannot compare column 'at'"),
        ("day = DATE '2024-02-30'", "does not fit column 'day'"),
        ("d = 1234567890123456789012345678901234567890", "does not fit column 'd'"),
        ("i", "cannot use a condition on column 'i', which is int32"),
        ("f = 9007199254740993", "cannot compare column 'f'"),
    ],
)
def test_what_is_not_exact_is_rejected_in_a_sentence(where: str, message: str) -> None:
    with pytest.raises(InvalidUsage, match=message):
        Filter.of(where, ShardSchema(SCHEMA, ("id",)))


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1e99999999", "0." + "1" * 39, "1" * 39 + ".5"])
def test_a_number_that_spark_has_no_literal_for_is_rejected(number: str) -> None:
    """`f < 1e400` was taken, as if the number was infinite; Spark rejects it."""
    for column in ("f", "r", "d"):
        with pytest.raises(InvalidUsage, match="where has the number"):
            Filter.of(f"{column} < {number}", ShardSchema(SCHEMA, ("id",)))
