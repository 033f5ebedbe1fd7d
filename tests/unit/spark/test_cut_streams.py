"""Micro-batches that are cut by keys, and what else says how far a stream reaches and how far it is behind."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

import persist
from persist.core.errors import InvalidUsage, NotReadable
from persist.core.frontier import Antichain
from persist.parts import KeyRange, codec
from persist.spark import stream
from persist.spark.change_feed import Interval
from persist.spark.offsets import Admission, Offset, Position, between
from tests.support.maintained import World
from tests.support.streamed import FEED, changes_between, expected, opened, rows_between
from tests.support.without_jvm import source

ALL = ReadAllAvailable()


@pytest.fixture
def world() -> World:
    return World()


def fill(world: World, rows: int, *, key: str | None = None, diff: int = 1) -> None:
    """One commit of so many rows."""
    time = world.state().upper.element or 0
    world.append([(key or f"k{number:05}", number, time, diff) for number in range(rows)], time + 1)


def sizes(reader: Any, at: Offset, limit: Any = None) -> list[int]:
    """The rows of each micro-batch until nothing more comes."""
    found = []
    while (end := reader.latestOffset(at, limit or reader.getDefaultReadLimit())) != at:
        found.append(len(rows_between(reader, at, end)))
        reader.commit(end)
        at = end
    return found


# --- what was found


def test_b6_the_first_micro_batch_is_cut(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After since had moved, it was all of the contents, whatever `maxRowsPerTrigger` said."""
    for _ in range(2):
        fill(world, 1000)
    world.shard.forget(1)
    reader = opened(world, monkeypatch, maxRowsPerTrigger=50, **FEED)
    start = reader.initialOffset()
    assert start["snapshot"] == 1
    found = sizes(reader, start)
    assert sum(found) == 1000, "each row is there twice, and shown once"
    assert max(found) <= 50


def test_b6_a_large_commit_is_cut(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was one micro-batch."""
    fill(world, 5000)
    reader = opened(world, monkeypatch, maxRowsPerTrigger=50, startingOffsets=0)
    found = sizes(reader, reader.initialOffset())
    assert sum(found) == 5000
    assert max(found) <= 50
    assert len(found) <= 120, "rows are counted where indexes tell too little, so micro-batches are nearly full"


def test_b14_a_hot_key_is_one_partition_and_is_never_cut(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It alone may exceed the bound. The keys around it do not."""
    fill(world, 30)
    fill(world, 300, key="k00010")
    world.shard.forget(1)
    reader = opened(world, monkeypatch, maxRowsPerTrigger=10, numPartitions=8, **FEED)
    at, found = reader.initialOffset(), []
    while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
        parts = [
            [row["k"] for batch in reader.read(part) for row in batch.to_pylist()]
            for part in reader.partitions(at, end)
        ]
        found.append(Counter(key for part in parts for key in part))
        assert all(len({key in part for part in parts if key in part}) <= 1 for key in found[-1])
        at = end
    large = [keys for keys in found if sum(keys.values()) > 10]
    assert large == [Counter({"k00010": 300})] or large == [Counter({"k00010": 301})], "one key and nothing else"


def test_b7_a_stream_with_a_cursor_leaves_others_the_history_that_the_policy_keeps(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Since went with the cursor of one stream, and took time travel away from everybody."""
    shard = world.client.create_shard("kept", pa.schema([("k", pa.string()), ("v", pa.int64())]), ["k"], history="7d")
    for number in range(5):
        shard.insert([{"k": "a", "v": number}])
    reader = opened(world, monkeypatch, path="kept", cursor="job", startingOffsets=0)
    at = reader.initialOffset()
    end = reader.latestOffset(at, ALL)
    rows_between(reader, at, end)
    reader.commit(end)
    reader.stop()
    assert end["frontier"] == [5]
    assert shard.since().element == 0
    assert shard.snapshot(0).to_arrow().num_rows == 1


# --- cuts


def test_a_bound_in_bytes_is_kept_in_proportion_to_rows(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "ROW_GROUP_ROWS", 64)
    fill(world, 1000)
    size = world.state().trace.batches[0].size
    reader = opened(world, monkeypatch, maxBytesPerTrigger=f"{size // 10}b", **FEED)
    found = sizes(reader, reader.initialOffset())
    assert sum(found) == 1000
    assert 10 <= len(found) <= 15
    assert max(found) <= 105


def test_rows_that_are_there_many_times_count_as_often_as_they_are_shown(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(world, 40, diff=5)
    reader = opened(world, monkeypatch, maxRowsPerTrigger=12)
    found = sizes(reader, reader.initialOffset())
    assert (sum(found), max(found)) == (200, 10), "a row more would be 15"
    changes = opened(world, monkeypatch, maxRowsPerTrigger=12, **FEED)
    found = sizes(changes, changes.initialOffset())
    assert (sum(found), max(found) <= 12) == (40, True), "a change is one row, however often"


def test_what_a_drop_takes_away_is_cut_too(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world, 500)
    world.shard.truncate(1, mode="drop")
    reader = opened(world, monkeypatch, maxRowsPerTrigger=60, startingOffsets=1, **FEED)
    found = sizes(reader, reader.initialOffset())
    assert sum(found) == 500
    assert max(found) <= 60


def test_a_key_range_of_the_options_is_what_is_cut(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "ROW_GROUP_ROWS", 64)
    fill(world, 1000)
    reader = opened(world, monkeypatch, maxRowsPerTrigger=40, startKey="k00500", endKey="k00600", **FEED)
    found = sizes(reader, reader.initialOffset())
    assert (sum(found), max(found) <= 40, len(found) <= 5) == (100, True, True)


def test_each_micro_batch_has_as_many_partitions_as_were_asked_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its boundaries were those of all keys, of which a micro-batch has few: it was one task."""
    monkeypatch.setattr(codec, "ROW_GROUP_ROWS", 64)
    fill(world, 4000)
    reader = opened(world, monkeypatch, maxRowsPerTrigger=400, numPartitions=4, **FEED)
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    rows = [sum(batch.num_rows for batch in reader.read(part)) for part in reader.partitions(start, end)]
    assert len(rows) == 4
    assert max(rows) < 2 * min(rows)


def test_no_row_is_read_where_indexes_tell_enough(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "ROW_GROUP_ROWS", 64)
    fill(world, 4000)

    def counted(*_: Any) -> Any:
        raise AssertionError("rows are counted")

    monkeypatch.setattr(Admission, "_count_cut", counted)
    reader = opened(world, monkeypatch, maxRowsPerTrigger=500, **FEED)
    found = sizes(reader, reader.initialOffset())
    assert sum(found) == 4000
    assert len(found) <= 9


def test_without_a_limit_a_stream_goes_on_from_within_a_time_to_the_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        fill(world, 50)
    reader = opened(world, monkeypatch, maxRowsPerTrigger=20, **FEED)
    start = reader.initialOffset()
    middle = reader.latestOffset(start, reader.getDefaultReadLimit())
    end = reader.latestOffset(middle, ALL)
    assert (middle["v"], end["v"], end["frontier"]) == (2, 1, [3])
    found = changes_between(reader, start, middle) + changes_between(reader, middle, end)
    assert Counter(found) == expected(world.rows, 0, 1, 3)
    assert Counter(changes_between(reader, start, end)) == Counter(found)


def test_a_cursor_holds_the_time_until_its_last_key_is_delivered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world, 50)
    fill(world, 50)
    reader = opened(world, monkeypatch, cursor="job", maxRowsPerTrigger=20, startingOffsets=0, **FEED)
    at = reader.initialOffset()
    cuts = 0
    while at.get("frontier") != [2]:
        at = reader.latestOffset(at, reader.getDefaultReadLimit())
        reader.commit(at)
        world.shard.forget(1)
        assert world.shard.critical_reader("job").since.element == (1 if at["frontier"] == [2] else 0)
        cuts += at["v"] == 2
    assert cuts >= 4
    assert opened(world, monkeypatch, cursor="job").initialOffset() == at


def test_a_stream_begins_where_its_cursor_is_within_a_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world, 50)
    options = {"cursor": "job", "maxRowsPerTrigger": 20, **FEED}
    first = opened(world, monkeypatch, **options)
    start = first.initialOffset()
    middle = first.latestOffset(start, first.getDefaultReadLimit())
    first.commit(middle)
    first.stop()
    again = opened(world, monkeypatch, **options)
    assert again.initialOffset() == middle
    again.commit(start)
    assert opened(world, monkeypatch, **options).initialOffset() == middle, "an old commit moves no cursor back"
    rest = sizes(again, middle)
    assert sum(rest) == 50 - len(changes_between(first, start, middle))


def test_history_that_is_gone_within_a_time_fails_or_is_passed_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(4):
        fill(world, 50)
    first = opened(world, monkeypatch, maxRowsPerTrigger=20, **FEED)
    middle = first.latestOffset(first.initialOffset(), first.getDefaultReadLimit())
    first.stop()
    world.shard.forget(2)
    with pytest.raises(NotReadable):
        opened(world, monkeypatch, **FEED).latestOffset(middle, ALL)
    reader = opened(world, monkeypatch, failOnDataLoss="false", maxRowsPerTrigger=20, **FEED)
    found, at = [], middle
    while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
        found += changes_between(reader, at, end)
        at = end
    assert Counter(found) == expected(world.rows, None, 3, 4)


# --- offsets

SHARD = "s0"
OFFSETS = [
    {"v": 1, "frontier": [7], "shard": SHARD},
    {"v": 1, "frontier": []},
    {"v": 1, "snapshot": 4},
    {"v": 2, "snapshot": 4, "key": "AWEAAA==", "shard": SHARD},
    {"v": 2, "frontier": [7], "key": "AWEAAA=="},
]


@pytest.mark.parametrize("offset", OFFSETS)
def test_an_offset_is_written_as_it_was_read(offset: Offset) -> None:
    assert Position.of(offset).offset == offset


@pytest.mark.parametrize("offset", [
    {},
    {"v": 3, "frontier": [7]},
    {"v": 1, "frontier": [7], "snapshot": 4},
    {"v": 1, "frontier": [7], "key": "AWEAAA=="},
    {"v": 2, "frontier": [7]},
    {"v": 2, "frontier": [7], "key": "not base64"},
    {"v": 2, "frontier": [7], "key": ""},
    {"v": 2, "frontier": [7], "key": 7},
    {"v": 2, "frontier": [], "key": "AWEAAA=="},
], ids=str)  # fmt: skip
def test_an_offset_of_another_kind_is_refused(offset: Offset) -> None:
    with pytest.raises(InvalidUsage, match="does not know the offset"):
        Position.of(offset)


def position(time: int, key: bytes | None = None, *, snapshot: bool = False) -> Position:
    return Position(Antichain(time), snapshot, key)


def interval(
    lower: int, upper: int, *, snapshot: bool = False, keys: tuple[bytes | None, bytes | None] = (None, None)
) -> Interval:
    return Interval(lower, Antichain(upper), snapshot, KeyRange(*keys))


BETWEEN = [
    (position(3), position(3), []),
    (position(3), position(7), [interval(3, 7)]),
    (position(3, snapshot=True), position(7), [interval(3, 7, snapshot=True)]),
    (position(3, snapshot=True), position(3, b"m", snapshot=True), [interval(3, 4, snapshot=True, keys=(None, b"m"))]),
    (
        position(3, b"k", snapshot=True),
        position(3, b"m", snapshot=True),
        [interval(3, 4, snapshot=True, keys=(b"k", b"m"))],
    ),
    (position(3, b"k", snapshot=True), position(4), [interval(3, 4, snapshot=True, keys=(b"k", None))]),
    (
        position(3, b"k", snapshot=True),
        position(6, b"m"),
        [interval(3, 4, snapshot=True, keys=(b"k", None)), interval(4, 6), interval(6, 7, keys=(None, b"m"))],
    ),
    (position(3, b"k"), position(3, b"m"), [interval(3, 4, keys=(b"k", b"m"))]),
    (position(3, b"k"), position(4), [interval(3, 4, keys=(b"k", None))]),
    (position(3), position(3, b"m"), [interval(3, 4, keys=(None, b"m"))]),
    (position(3), position(5, b"m"), [interval(3, 5), interval(5, 6, keys=(None, b"m"))]),
    (position(4), position(3), []),
]


@pytest.mark.parametrize(("start", "end", "intervals"), BETWEEN)
def test_what_lies_between_two_offsets(start: Position, end: Position, intervals: list[Interval]) -> None:
    assert between(start, end) == intervals


# --- where a stream ends, and what it waits for


@pytest.mark.parametrize(("options", "rows"), [
    ({"endingOffsets": "2"}, 2),
    ({"endingOffsets": '{"time": 3}'}, 3),
    ({"endingOffsets": "latest"}, 4),
    ({"endingOffsets": "9"}, 5),
    ({"endingOffsets": "2", "startingOffsets": "2"}, 0),
])  # fmt: skip
def test_a_stream_ends_before_its_ending(
    world: World, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], rows: int
) -> None:
    for _ in range(4):
        fill(world, 1)
    reader = opened(world, monkeypatch, maxRowsPerTrigger=1, **options, **FEED)
    start = reader.initialOffset()
    fill(world, 1)  # comes after the latest
    assert sum(sizes(reader, start)) == rows


def test_a_stream_ends_at_a_wall_clock_once_that_is_over(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(4):
        fill(world, 1)
    known: list[Antichain | None] = [None, Antichain(2)]
    monkeypatch.setattr(stream, "upper_by", lambda target, when: known[0])
    later = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    reader = opened(world, monkeypatch, maxRowsPerTrigger=1, endingTimestamp=later, **FEED)
    first = reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    assert first["frontier"] == [1]
    known.pop(0)
    assert sizes(reader, first) == [1]


def test_contents_after_the_ending_are_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(4):
        fill(world, 1)
    world.shard.forget(3)
    with pytest.raises(NotReadable, match=r"nothing is left to read before \[2\]"):
        opened(world, monkeypatch, endingOffsets=2).initialOffset()


def test_a_micro_batch_waits_for_its_least_rows_and_no_longer_than_its_delay(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"minRowsPerTrigger": 10, "maxTriggerDelay": "5m", **FEED}
    reader = opened(world, monkeypatch, startingOffsets=0, **options)
    start = reader.initialOffset()
    assert reader.latestOffset(start, ALL) == start, "there is nothing"
    fill(world, 4)
    assert reader.latestOffset(start, ALL) == start
    world.clock.advance_ms(299_000)
    assert reader.latestOffset(start, ALL) == start
    assert reader.reportLatestOffset()["behind"]["rows"] == 4  # type: ignore[index]
    world.clock.advance_ms(2_000)
    end = reader.latestOffset(start, ALL)
    assert end["frontier"] == [1]
    fill(world, 4)
    assert reader.latestOffset(end, ALL) == end, "the delay begins anew"
    fill(world, 6)
    assert reader.latestOffset(end, ALL)["frontier"] == [3]


def test_what_is_available_now_waits_for_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world, 4)
    reader = opened(world, monkeypatch, startingOffsets=0, minRowsPerTrigger=10, **FEED)
    reader.prepareForTriggerAvailableNow()
    fill(world, 100)
    assert sizes(reader, reader.initialOffset()) == [4]


BAD = [
    ({"startingOffsets": "latest"}, "startingOffsets=latest needs option 'cursor'"),
    ({"startingOffsets": "soon"}, "option 'startingOffsets' is 'soon'; it must be a whole number"),
    ({"startingOffsets": '{"at": 1}'}, "must be earliest, latest, a time or"),
    ({"maxRowsPerTrigger": "0"}, "option 'maxRowsPerTrigger' is 0"),
    ({"maxBytesPerTrigger": "lots"}, "option 'maxBytesPerTrigger' is 'lots'; it must be a size"),
    ({"maxRowsPerTrigger": "1", "maxBytesPerTrigger": "1"}, "are exclusive"),
    ({"asOf": "1"}, "option 'asOf' does not apply to a streaming read"),
    ({"endingOffsets": "earliest"}, "option 'endingOffsets' is 'earliest'; it must be a whole number"),
    ({"endingOffsets": '{"at": 1}'}, "it must be latest, a time or"),
    ({"endingOffsets": "1", "endingTimestamp": "2026-01-01T00:00:00Z"}, "are exclusive; give one"),
    ({"endingOffsets": "1", "startingOffsets": "2"}, "endingOffsets is 1, before startingOffsets, 2"),
    ({"endingTimestamp": "yesterday"}, "option 'endingTimestamp' is 'yesterday'; it must be an instant"),
    (
        {"endingTimestamp": "2026-01-01T00:00:00Z", "startingTimestamp": "2026-01-02T00:00:00Z"},
        "endingTimestamp is before startingTimestamp",
    ),
    ({"endingVersion": "3"}, "option 'endingVersion' does not apply to a streaming read"),
    ({"minRowsPerTrigger": "0"}, r"option 'minRowsPerTrigger' is 0; it must be in \[1, "),
    ({"minRowsPerTrigger": "5", "maxRowsPerTrigger": "4"}, "minRowsPerTrigger is 5, more than maxRowsPerTrigger, 4"),
    ({"minRowsPerTrigger": "5", "maxTriggerDelay": "soon"}, "option 'maxTriggerDelay' is 'soon'; it must be an age"),
    ({"maxTriggerDelay": "5m"}, "option 'maxTriggerDelay' needs 'minRowsPerTrigger'"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD)
def test_a_bad_option_of_a_stream_is_one_clear_sentence(
    world: World, monkeypatch: pytest.MonkeyPatch, options: dict[str, str], sentence: str
) -> None:
    with pytest.raises(InvalidUsage, match=sentence):
        opened(world, monkeypatch, **options)


# --- how far a stream is behind


def test_the_report_tells_how_far_a_stream_is_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "ROW_GROUP_ROWS", 64)
    fill(world, 1000)
    fill(world, 10)
    seconds = iter((9.0, 8.0, 7.0))
    monkeypatch.setattr(stream, "seconds_since", lambda target, time: next(seconds))
    reader = opened(world, monkeypatch, maxRowsPerTrigger=600, **FEED)
    at, told = reader.initialOffset(), []
    while (end := reader.latestOffset(at, reader.getDefaultReadLimit())) != at:
        told.append(reader.reportLatestOffset())
        at = end
    assert [one["frontier"] for one in told if one is not None] == [[2]] * 3
    first, second, last = (one["behind"] for one in told if one is not None)
    assert 410 <= first["rows"] <= 480, "what is left of the contents, by the index, and the second time"
    assert (second["rows"], second["seconds"]) == (10, 8.0)
    assert last == {"rows": 0, "bytes": 0, "seconds": 0.0}
    assert first["bytes"] > second["bytes"] > 0


def test_a_wall_clock_that_is_not_known_is_left_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(world, 1)
    fill(world, 1)
    monkeypatch.setattr(stream, "seconds_since", lambda target, time: None)
    reader = opened(world, monkeypatch, maxRowsPerTrigger=1, startingOffsets=0)
    reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    told = reader.reportLatestOffset()
    assert told is not None
    assert set(told["behind"]) == {"rows", "bytes"}


def test_wall_clocks_are_those_of_the_shard(tmp_path: Path) -> None:
    url = f"persist://{tmp_path}/shards"
    with persist.connect(url) as client:
        shard = client.create_shard("orders", pa.schema([("k", pa.string())]), ["k"])
        for key in ("a", "b"):
            shard.insert([{"k": key}])

    def reader(ending: str) -> Any:
        given = source(url, "orders", maxRowsPerTrigger=1, endingTimestamp=ending)
        return given.streamReader(given.schema())

    tomorrow = reader((datetime.now(UTC) + timedelta(days=1)).isoformat())
    first = tomorrow.latestOffset(tomorrow.initialOffset(), tomorrow.getDefaultReadLimit())
    behind = tomorrow.reportLatestOffset()["behind"]
    assert behind["rows"] == 1
    assert behind["seconds"] >= 0
    assert sizes(tomorrow, first) == [1]
    long_ago = reader("2020-01-01T00:00:00Z")
    assert sizes(long_ago, long_ago.initialOffset()) == []
