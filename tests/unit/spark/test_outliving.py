"""A DataFrame, view or cache that outlives its lease: the same rows while its time can be read, else one sentence."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import LongType, StringType, StructField, StructType

from persist.client.embedded import EmbeddedTransport
from persist.core import commands as c
from persist.core.errors import Expired, UnknownShard
from persist.spark import executors
from persist.spark.batch_io import ChangesReader, DiffReader, SnapshotReader
from persist.spark.options import Options, ReadOptions, Target
from tests.support.maintained import NAME, World
from tests.support.without_jvm import rows_of

TARGET = Target.of(Options({"url": "persist:///nowhere", "path": NAME}))
COLUMNS = StructType([StructField("k", StringType()), StructField("v", LongType())])
AS_OF = 5
FEED = ("_change_type", StringType()), ("__time", LongType()), ("__diff", LongType())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A shard of nine times in stores of memory, with a clock that the test moves, which Spark's classes read."""
    world = World()
    world.append_many(9, 30)
    opened = EmbeddedTransport(world.process())
    monkeypatch.setattr(executors, "transport", lambda connection: opened)
    executors._shared_hold.cache_clear()
    yield world
    executors._shared_hold.cache_clear()


def snapshot(**options: str) -> SnapshotReader:
    return SnapshotReader(TARGET, ReadOptions.of(Options({"asOf": str(AS_OF), **options})), COLUMNS)


def feed(**options: str) -> ChangesReader:
    schema = StructType([*COLUMNS, *(StructField(name, kind) for name, kind in FEED)])
    given = Options({"readChangeFeed": "true", "startingVersion": "4", "endingVersion": "6", **options})
    return ChangesReader(TARGET, ReadOptions.of(given), schema)


def between(**options: str) -> DiffReader:
    given = ReadOptions.of(Options({"readDiff": "true", "start": "3", "end": "6", **options}))
    return DiffReader(TARGET, given, StructType([*COLUMNS, StructField("__diff", LongType())]))


READERS = [
    pytest.param(lambda: snapshot(numPartitions="3"), AS_OF, id="snapshot"),
    pytest.param(lambda: snapshot(where="v > 2000 AND k < 'k3'", numPartitions="2"), AS_OF, id="snapshot, where"),
    pytest.param(lambda: snapshot(startKey="k2", endKey="k4"), AS_OF, id="snapshot, range of keys"),
    pytest.param(lambda: feed(numPartitions="3"), 3, id="change feed"),
    pytest.param(lambda: between(numPartitions="3"), 3, id="changes"),
    pytest.param(lambda: between(start="6", end="3"), 3, id="changes back"),
]


def counted(reader: DataSourceReader, partitions: Any) -> Counter[tuple[Any, ...]]:
    """The rows, as executors find them: partitions come to them in pickles."""
    return Counter(tuple(row.values()) for row in rows_of(reader, pickle.loads(pickle.dumps(partitions))))


@pytest.mark.parametrize(("made", "since"), READERS)
def test_a_plan_that_outlives_its_lease_shows_the_same_rows(world: World, made: Any, since: int) -> None:
    """It was told Expired for ever, though the time could be read."""
    reader = made()
    partitions = reader.partitions()
    before = counted(reader, partitions)
    assert before
    world.forget_before(since)
    named = world.named()
    world.append_many(3, 30)
    world.settle()
    assert not named & world.blobs(), "what the plan names was merged and deleted"
    assert counted(reader, partitions) == before
    world.settle()  # that lease lapses too
    assert counted(reader, partitions) == before


@pytest.mark.parametrize("made", [snapshot, feed, between], ids=["snapshot", "change feed", "changes"])
def test_a_plan_whose_time_was_forgotten_says_what_to_do(world: World, made: Any) -> None:
    reader = made()
    partitions = reader.partitions()
    world.settle()
    world.forget_before(8)
    with pytest.raises(Expired, match=r"has expired, and time \d+ is no longer readable .*: call load\(\) again"):
        counted(reader, partitions)


def test_a_change_feed_is_not_read_again_from_a_tag_alone(world: World) -> None:
    """The tag keeps one time, not what came after it."""
    reader = feed()
    partitions = reader.partitions()
    world.shard.tag("kept", at=3)
    world.settle()
    world.forget_before(8)
    with pytest.raises(Expired, match="is no longer readable"):
        counted(reader, partitions)
    assert counted(snapshot(asOf="3"), snapshot(asOf="3").partitions())


def test_a_tag_keeps_a_dataframe_readable_after_its_lease(world: World) -> None:
    reader = snapshot()
    partitions = reader.partitions()
    before = counted(reader, partitions)
    world.shard.tag("kept", at=AS_OF)
    world.forget_before(8)
    world.settle()
    assert counted(reader, partitions) == before


def test_a_plan_of_a_dropped_shard_says_so_after_its_lease_too(world: World) -> None:
    reader = snapshot()
    partitions = reader.partitions()
    world.settle()
    world.shard.drop(force=True)
    with pytest.raises(UnknownShard, match="was dropped"):
        counted(reader, partitions)


def test_one_process_takes_one_hold_for_all_splits_of_a_plan(world: World) -> None:
    reader = snapshot(numPartitions="4")
    partitions = reader.partitions()
    assert len(partitions) > 1
    world.settle()
    assert not world.state().leased_readers
    counted(reader, partitions)
    counted(reader, partitions)
    assert [one.purpose for one in world.state().leased_readers.values()] == ["spark read again"]


def test_what_a_lease_loses_between_two_pieces_is_an_error_and_no_row_comes_twice(world: World) -> None:
    """The task that Spark tries again reads all of it."""
    reader = snapshot(batchRows="1")
    [partition] = reader.partitions()
    split = partition.value
    pieces = executors.recover_lease(iter([1, 2]), lambda: iter([1, 2]))  # type: ignore[list-item]
    assert list(pieces) == [1, 2]

    def lapses() -> Iterator[Any]:
        yield 1
        raise Expired("gone")

    with pytest.raises(Expired, match=r"gone\. This task took longer than leaseSeconds between two batches"):
        list(executors.recover_lease(lapses(), lambda: iter([1, 2])))  # type: ignore[list-item]
    executors.transport(TARGET.connection).apply(NAME, c.ExpireReader(split.reader))
    assert len(rows_of(reader, [partition])) == sum(world.expected(AS_OF).values())
