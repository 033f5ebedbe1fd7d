"""Columns of a shard that change while a DataFrame or a stream goes on: it never shows or selects by another column."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

import persist
from persist.client.embedded import EmbeddedTransport
from persist.client.shard import Shard
from persist.core.errors import InvalidUsage
from persist.parts.schema_changes import AddColumn, DropColumn, RenameColumn
from persist.spark import PersistDataSource, executors
from tests.support.maintained import World
from tests.support.streamed import opened, rows_between
from tests.support.without_jvm import rows_of

Alters = Callable[[Shard], object]


def swap(shard: Shard) -> None:
    shard.alter(RenameColumn("v", "other"), RenameColumn("w", "v"), RenameColumn("other", "w"))


def reuse(shard: Shard) -> None:
    shard.alter(DropColumn("v"), AddColumn("v", pa.int64(), default=7))


def rename(shard: Shard) -> None:
    shard.rename_column("v", "x")


def drop(shard: Shard) -> None:
    shard.drop_column("v")


CHANGES = pytest.mark.parametrize("change", [swap, reuse, rename, drop])


@pytest.fixture
def world() -> World:
    world = World()
    world.shard.add_column("w", pa.int64(), default=-1)
    world.shard.insert([{"k": f"a{n}", "v": n, "w": 100} for n in range(10)])
    return world


@CHANGES
def test_a_stream_ends_where_a_name_by_which_it_selects_means_another_column(
    world: World, monkeypatch: pytest.MonkeyPatch, change: Alters
) -> None:
    """It went on by the name, and showed rows by the values of the other column."""
    stream = opened(world, monkeypatch, where="v > 5")
    start = stream.initialOffset()
    at = stream.latestOffset(start, stream.getDefaultReadLimit())
    assert [row["v"] for row in rows_between(stream, start, at)] == [6, 7, 8, 9]
    change(world.shard)
    world.shard.insert([{"k": "b"}])
    for planned in (
        lambda: stream.latestOffset(at, stream.getDefaultReadLimit()),
        lambda: stream.partitions(start, at),
    ):
        with pytest.raises(InvalidUsage, match=r"column 'v', by which this stream .* selects, .* restart the query"):
            planned()


@pytest.mark.parametrize(("where", "count"), [("w > 5", 10), (None, 10), ("k >= 'a5'", 5)])
def test_a_stream_that_selects_by_other_columns_goes_on(
    world: World, monkeypatch: pytest.MonkeyPatch, where: str | None, count: int
) -> None:
    stream = opened(world, monkeypatch, **({} if where is None else {"where": where}))
    start = stream.initialOffset()
    stream.latestOffset(start, stream.getDefaultReadLimit())
    rename(world.shard)
    end = stream.latestOffset(start, stream.getDefaultReadLimit())
    found = rows_between(stream, start, end)
    assert [row["v"] for row in found] == list(range(10 - count, 10))


# --- between load() and the plan, which Spark makes when rows are asked for


@pytest.fixture
def shard(tmp_path: Any) -> Iterator[Shard]:
    with persist.connect(f"persist://{tmp_path}/data") as client:
        columns = pa.schema([("k", pa.string()), ("v", pa.int64()), ("w", pa.int64())])
        found = client.create_shard("orders", columns, ["k"])
        for time in range(3):
            found.insert([{"k": f"a{time}", "v": time, "w": 100}])
        yield found


def loaded(tmp_path: Any, **options: str) -> tuple[PersistDataSource, Any]:
    """As Spark has it: the data source comes out of a pickle that was made after it had told the columns."""
    source = PersistDataSource({"url": f"persist://{tmp_path}/data", "path": "orders", **options})
    schema = source.schema()
    return pickle.loads(pickle.dumps(source)), schema


READS = pytest.mark.parametrize(
    "options",
    [{}, {"where": "v > 0"}, {"columns": "k,v"}, {"readChangeFeed": "true"}, {"readDiff": "true", "start": "0"}],
    ids=str,
)
READS_AND_CHANGES = pytest.mark.parametrize(
    ("options", "change"),
    [
        *[({}, change) for change in (swap, reuse, rename, drop)],
        ({"where": "v > 0"}, reuse),
        ({"columns": "k,v"}, swap),
        ({"readChangeFeed": "true"}, rename),
        ({"readDiff": "true", "start": "0"}, swap),
    ],
)


@READS_AND_CHANGES
def test_a_dataframe_is_loaded_again_where_a_name_of_it_means_another_column(
    shard: Shard, tmp_path: Any, options: dict[str, str], change: Alters
) -> None:
    """It showed the values of another column, where that had got the name before the first rows were asked for."""
    source, schema = loaded(tmp_path, **options)
    change(shard)
    with pytest.raises(InvalidUsage, match=r"column 'v'"):
        source.reader(schema).partitions()


@READS
def test_a_dataframe_goes_on_where_other_columns_change(shard: Shard, tmp_path: Any, options: dict[str, str]) -> None:
    source, schema = loaded(tmp_path, **{"columns": "k,v", **options})
    before = source.reader(schema)
    expected = list(rows_of(before, before.partitions()))
    shard.alter(DropColumn("w"), AddColumn("w", pa.int64(), default=7), AddColumn("more", pa.string()))
    reader = source.reader(schema)
    assert list(rows_of(reader, reader.partitions())) == expected


def test_a_stream_shows_the_columns_by_which_it_was_loaded(shard: Shard, tmp_path: Any) -> None:
    source, schema = loaded(tmp_path)
    swap(shard)
    stream = source.streamReader(schema)
    start = stream.initialOffset()
    end = stream.latestOffset(start, stream.getDefaultReadLimit())  # type: ignore[call-arg]
    assert [(row["v"], row["w"]) for row in rows_between(stream, start, end)] == [(0, 100), (1, 100), (2, 100)]  # type: ignore[arg-type]


# --- after the lease of a plan


@READS_AND_CHANGES
def test_a_plan_that_has_outlived_its_lease_is_not_read_by_names_of_before(
    world: World, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], change: Alters
) -> None:
    """It was read anew by the names of then, and showed the values of another column."""
    transport = EmbeddedTransport(world.process())
    monkeypatch.setattr(executors, "transport", lambda connection: transport)
    monkeypatch.setattr(executors, "check_location_exists", lambda target: None)
    executors._shared_hold.cache_clear()
    world.shard.insert([{"k": "b", "v": 3, "w": 5}])
    source = PersistDataSource({"url": "persist:///nowhere", "path": "orders", **options})
    reader = source.reader(source.schema())
    partitions = reader.partitions()
    assert list(rows_of(reader, partitions))
    change(world.shard)
    assert list(rows_of(reader, partitions)), "what it names is held"
    world.settle()
    with pytest.raises(InvalidUsage, match=r"column 'v', .* its lease has expired, so call load\(\) again"):
        list(rows_of(reader, partitions))
    executors._shared_hold.cache_clear()
