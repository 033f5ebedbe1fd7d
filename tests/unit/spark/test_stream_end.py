"""The end of a stream: a shard that was closed to writes is read to its last time, and then no further."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import persist
from persist.client.shard import Shard
from persist.core.errors import Conflict
from persist.spark import executors
from persist.spark.change_feed import changes_schema
from persist.spark.options import Options, ReadOptions, StreamOptions, Target
from persist.spark.stream import StreamReader

EVERYTHING = ReadAllAvailable()
CLOSED = pytest.mark.parametrize("rows", [[{"k": "z", "n": 9, "__time": 5}], []], ids=["with rows", "without rows"])


@pytest.fixture
def shard(url: str) -> Iterator[Shard]:
    with persist.connect(url) as client:
        schema = pa.schema([("k", pa.string()), ("n", pa.int64())])
        shard = client.create_shard("orders", schema, ["k"], history="none")  # so that since goes by the cursor
        for n in range(2):
            shard.insert([{"k": "a", "n": n}])
        yield shard


def close(shard: Shard, rows: list[dict[str, object]]) -> None:
    shard.open_writer().compare_and_append(rows, 2, None)


def reader(url: str, starting: str = "0") -> StreamReader:
    given = {"url": url, "path": "orders", "readChangeFeed": "true", "cursor": "job", "startingOffsets": starting}
    options = Options(given)
    target, read = Target.of(options), ReadOptions.of(options)
    return StreamReader(target, read, StreamOptions.of(options), changes_schema(executors.view_of(target), read))


def read_on(stream: StreamReader, start: dict[str, object]) -> tuple[dict[str, object], int]:
    """One micro-batch, committed: where it ends and how many rows it has."""
    end = stream.latestOffset(start, EVERYTHING)
    rows = sum(batch.num_rows for part in stream.partitions(start, end) for batch in stream.read(part))
    stream.commit(end)
    return end, rows


def test_a_stream_with_a_cursor_ends_with_its_shard(url: str, shard: Shard) -> None:
    """The last micro-batch failed at its commit, for ever: the cursor would have closed the shard to reads."""
    stream = reader(url)
    end, rows = read_on(stream, stream.initialOffset())
    assert rows == 2
    close(shard, [{"k": "z", "n": 9, "__time": 5}])
    end, rows = read_on(stream, end)
    assert (end["frontier"], rows) == ([], 1)
    stream.stop()
    assert shard.critical_reader("job").since.element == 5
    assert shard.snapshot().to_arrow().num_rows == 3


@CLOSED
def test_a_stream_at_the_end_of_its_shard_finds_nothing_more(
    url: str, shard: Shard, rows: list[dict[str, object]]
) -> None:
    close(shard, rows)
    first = reader(url)
    end, read = read_on(first, first.initialOffset())
    assert read == 2 + len(rows)
    first.stop()
    later = reader(url)
    assert later.initialOffset() == end
    assert read_on(later, end) == (end, 0)
    later.stop()
    assert shard.snapshot().to_arrow().num_rows == 2 + len(rows)


@CLOSED
def test_a_stream_can_begin_at_the_end_of_a_closed_shard(url: str, shard: Shard, rows: list[dict[str, object]]) -> None:
    close(shard, rows)
    for _ in range(2):
        stream = reader(url, "latest")
        start = stream.initialOffset()
        assert start["frontier"] == []
        assert read_on(stream, start) == (start, 0)
        stream.stop()
    assert shard.since().element == (5 if rows else 1)


def test_a_late_commit_does_not_take_a_cursor_back_from_the_end(url: str, shard: Shard) -> None:
    stream = reader(url)
    before, _ = read_on(stream, stream.initialOffset())
    close(shard, [])
    late = {**before, "frontier": [2]}
    end = {**before, "frontier": []}
    stream.commit(end)
    stream.commit(late)
    stream.stop()
    assert reader(url).initialOffset() == end


def test_a_cursor_at_the_end_holds_the_shard_against_a_drop_by_its_name(url: str, shard: Shard) -> None:
    close(shard, [{"k": "z", "n": 9, "__time": 5}])
    stream = reader(url)
    read_on(stream, stream.initialOffset())
    stream.stop()
    with pytest.raises(Conflict, match="job"):
        shard.drop()
    shard.critical_reader("job").expire()
    shard.drop()
