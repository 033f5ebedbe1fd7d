"""`changeImages`: changes of which those that are updates are told as such, paired by key at one time."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import pyarrow as pa
import pytest

import persist
from persist.core.errors import InvalidUsage
from persist.parts import ShardSchema
from persist.spark import change_feed, executors
from persist.spark.change_feed import changes_schema
from persist.spark.options import Options, ReadOptions, Target
from persist.spark.source import PersistDataSource
from tests.support.without_jvm import read, rows_of, source

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])
IMAGES = {"readChangeFeed": "true", "changeImages": "true", "startingVersion": "0"}
PRE, POST = "update_preimage", "update_postimage"


@pytest.fixture
def shard(url: str) -> Any:
    with persist.connect(url) as client:
        yield client.create_shard("orders", SCHEMA, ["k"])


def row(key: str, number: int, diff: int = 1) -> dict[str, Any]:
    return {"k": key, "n": number, "__diff": diff}


def told(url: str, **options: Any) -> set[tuple[Any, ...]]:
    found = read(url, "orders", **{**IMAGES, **options})
    rows = [(one["k"], one["n"], one["__time"], one["__diff"], one["_change_type"]) for one in found]
    assert len(rows) == len(set(rows))
    return set(rows)


def test_one_row_that_went_and_one_that_came_are_an_update(shard: Any, url: str) -> None:
    shard.insert([row("a", 1), row("b", 1)])
    shard.insert([row("a", 1, -1), row("a", 2), row("b", 1, -1), row("c", 5)])
    assert told(url, startingVersion=1) == {
        ("a", 1, 1, -1, PRE),
        ("a", 2, 1, 1, POST),
        ("b", 1, 1, -1, "delete"),
        ("c", 5, 1, 1, "insert"),
    }
    plain = {(one["k"], one["_change_type"]) for one in read(url, "orders", readChangeFeed="true", startingVersion=1)}
    assert plain == {("a", "delete"), ("a", "insert"), ("b", "delete"), ("c", "insert")}, "only on request"


def test_changes_at_two_times_are_never_an_update(shard: Any, url: str) -> None:
    shard.insert([row("a", 1)])
    shard.insert([row("a", 1, -1)])
    shard.insert([row("a", 2)])
    assert {kind for *_, kind in told(url)} == {"insert", "delete"}


RULES = [
    ([row("a", 1, -1), row("a", 2)], Counter({PRE: 1, POST: 1})),
    ([row("a", 1, -2), row("a", 2, 2)], Counter({PRE: 1, POST: 1})),
    ([row("a", 1, -2), row("a", 2, 1)], Counter({"delete": 1, "insert": 1})),
    ([row("a", 1, -1), row("a", 2), row("a", 3)], Counter({"delete": 1, "insert": 2})),
    ([row("a", 1, -1), row("a", 2, -1), row("a", 3, 2)], Counter({"delete": 2, "insert": 1})),
    ([row("a", 2), row("a", 3)], Counter({"insert": 2})),
    ([row("a", 1, -1), row("b", 1)], Counter({"delete": 1, "insert": 1})),
]


@pytest.mark.parametrize(("rows", "kinds"), RULES)
def test_which_changes_of_a_key_are_an_update(shard: Any, url: str, rows: Any, kinds: Any) -> None:
    shard.insert([row("a", 1, 2), row("a", 2)])
    shard.insert(rows)
    assert Counter(kind for *_, kind in told(url, startingVersion=1)) == kinds


def test_an_overwrite_updates_the_keys_that_were_there(shard: Any, url: str) -> None:
    """Its deletions were written by nobody. A row that it wrote again as it was did not change."""
    shard.insert([row("a", 1), row("b", 1), row("c", 1)])
    shard.overwrite([{"k": "a", "n": 9}, {"k": "b", "n": 1}, {"k": "d", "n": 4}])
    assert told(url, startingVersion=1) == {
        ("a", 1, 1, -1, PRE),
        ("a", 9, 1, 1, POST),
        ("c", 1, 1, -1, "delete"),
        ("d", 4, 1, 1, "insert"),
    }


def test_only_the_rows_that_the_read_shows_are_paired(shard: Any, url: str) -> None:
    shard.insert([row("a", 1), row("b", 7)])
    shard.insert([row("a", 1, -1), row("a", 9), row("b", 7, -1), row("b", 8)])
    assert told(url, startingVersion=1, where="n > 5") == {
        ("a", 9, 1, 1, "insert"),
        ("b", 7, 1, -1, PRE),
        ("b", 8, 1, 1, POST),
    }
    shown = read(url, "orders", columns="n", **{**IMAGES, "startingVersion": "1"})
    assert Counter(one["_change_type"] for one in shown) == Counter({PRE: 2, POST: 2}), "the key need not be shown"


def test_a_stream_tells_them_as_well(shard: Any, url: str) -> None:
    shard.insert([row(f"k{number}", 0) for number in range(9)])
    shard.insert([row(f"k{number}", 0, -1) for number in range(9)] + [row(f"k{number}", 1) for number in range(9)])
    options = {"readChangeFeed": "true", "changeImages": "true", "startingOffsets": "1", "maxRowsPerTrigger": "5"}
    given = source(url, "orders", **options)
    reader: Any = given.streamReader(given.schema())
    at, found = reader.initialOffset(), []
    while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
        rows = rows_of(reader, reader.partitions(at, end))
        assert len(rows) <= 5
        found += rows
        at = end
    reader.stop()
    assert Counter(one["_change_type"] for one in found) == Counter({PRE: 9, POST: 9})


def test_the_changes_of_a_key_come_together_whatever_tables_they_lie_in() -> None:
    schema = ShardSchema(SCHEMA, ("k",))
    chance = Random(7)
    rows = [
        {"k": f"k{key:02}", "n": value, "__time": time, "__diff": diff}
        for key in range(12)
        for time in range(3)
        for value, diff in chance.choice(([(1, -1), (2, 1)], [(1, 1)], [(1, -1), (2, 1), (3, 1)]))
    ]
    whole = pa.Table.from_pylist(rows, schema.updates_schema)
    places = sorted(chance.sample(range(1, len(rows)), 9))
    tables = [whole.slice(a, b - a) for a, b in zip([0, *places], [*places, len(rows)], strict=True)]
    found = list(change_feed.by_whole_keys(iter(tables), schema, "orders"))
    assert pa.concat_tables(found).equals(whole)
    keys = [set(table.column("k").to_pylist()) for table in found]
    assert sum(map(len, keys)) == 12, "no key is in two tables"
    apart = [flag for table in found for flag in change_feed.mark_updates(table, schema)]
    assert apart == list(change_feed.mark_updates(whole, schema))


def test_a_key_with_too_many_changes_is_refused_with_what_helps(
    shard: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(change_feed, "HELD_ROWS_MAX", 3)
    shard.insert([row("a", number) for number in range(5)])
    with pytest.raises(InvalidUsage, match=r"key {'k': 'a'} has more than 3 changes .* leave changeImages out"):
        read(url, "orders", **IMAGES)


def test_a_schema_without_the_column_that_tells_is_refused(shard: Any, url: str) -> None:
    options = Options({"url": url, "path": "orders", **IMAGES})
    whole = changes_schema(executors.view_of(Target.of(options)), ReadOptions.of(options))
    schema = type(whole)([field for field in whole if field.name != "_change_type"])
    given = PersistDataSource({"url": url, "path": "orders", **IMAGES})
    with pytest.raises(InvalidUsage, match="lacks _change_type, the column in which changeImages marks updates"):
        given.reader(schema)
