"""Streams: offsets, admission, cursors, exactly-once from shard to shard."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException, StreamingQueryException

from persist import CriticalReaderHandle, Expired, InvalidUsage, NotReadable, UnknownShard
from persist.core.audit_log import NOBODY
from persist.core.commands import ExpireWriter
from persist.core.ids import critical_reader_id_of
from persist.spark import executors
from persist.spark.options import Options, ReadOptions, StreamOptions, Target, WriteOptions
from persist.spark.spark_schemas import spark_schema
from persist.spark.stream import NOT_BEGUN, StreamReader
from persist.spark.write_job import Job
from tests.support.patience import patiently

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])


@pytest.fixture
def stream(spark: Any, url: str) -> Callable[..., Any]:
    def streamed(shard: str = "orders", **options: Any) -> Any:
        return spark.readStream.format("persist").options(url=url, **options).load(shard)

    return streamed


@pytest.fixture
def pump(url: str, tmp_path: Path) -> Callable[..., Any]:
    """Run the query on everything that is there now, into a shard; returns what it told of its progress."""

    def pumped(
        frame: Any, sink: str, checkpoint: str = "checkpoint", mode: str = "append", **options: Any
    ) -> list[dict[str, Any]]:
        progress: list[dict[str, Any]] = []
        writer = frame.writeStream.format("persist").outputMode(mode).options(url=url, **options)
        writer = writer.option("checkpointLocation", str(tmp_path / checkpoint)).trigger(availableNow=True)

        def run() -> None:
            query = writer.start(sink)
            try:
                query.awaitTermination()
            finally:
                progress.extend(query.recentProgress)

        patiently(run)
        return progress

    return pumped


def contents(client: Any, shard: str) -> Counter[tuple[Any, ...]]:
    table = client.shard(shard).snapshot().to_arrow(expand=True)
    return Counter(tuple(row.values()) for row in table.to_pylist())


def state_of(url: str, shard: str) -> Any:
    door: Any = executors.transport(Target.of(Options({"url": url, "path": shard})).connection)
    return door.location.machine(shard).refresh()


def reader(url: str, **options: str) -> StreamReader:
    given = Options({"url": url, "path": "orders", **options})
    read = ReadOptions.of(given, streams=True)
    return StreamReader(Target.of(given), read, StreamOptions.of(given), spark_schema(SCHEMA))


def test_a_shard_flows_into_another_once(client: Any, stream: Any, pump: Any) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    for n in range(5):
        shard.insert([{"k": f"k{n}", "n": n}])
    pump(stream(), "copy", key="k")
    assert contents(client, "copy") == contents(client, "orders")
    shard.insert([{"k": "later", "n": 9}])
    pump(stream(), "copy")
    assert contents(client, "copy") == contents(client, "orders")
    assert client.shard("copy").upper().element == 2
    pump(stream(), "copy")
    assert client.shard("copy").upper().element == 2


@pytest.mark.parametrize(("cursor", "since"), [({}, 0), ({"cursor": "job"}, 2)], ids=["without", "with a cursor"])
def test_a_stream_without_a_cursor_forgets_nothing(client: Any, url: str, cursor: dict[str, str], since: int) -> None:
    """Of a shard that keeps no history of its own: there since goes by the readers alone."""
    shard = client.create_shard("orders", SCHEMA, ["k"], history="none")
    for n in range(3):
        shard.insert([{"k": f"k{n}", "n": n}])
    held = shard.open_reader(0)  # so that history is there until the stream holds it
    running = reader(url, startingOffsets="0", **cursor)
    start = running.initialOffset()
    end = running.latestOffset(start, running.getDefaultReadLimit())
    held.close()
    assert end["frontier"] == [3]
    running.partitions(start, end)
    running.commit(end)
    assert shard.since().element == since
    running.stop()


@pytest.mark.proof
def test_changes_carry_what_spark_calls_them(client: Any, stream: Any, pump: Any) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": "a", "n": 1}])
    shard.insert([{"k": "a", "n": 1, "__diff": -1}, {"k": "a", "n": 2, "__diff": 2}])
    changes = stream(readChangeFeed="true", startingVersion="0", timeUnit="s")
    columns = ["k", "n", "_change_type", "_commit_version", "_commit_timestamp", "__time", "__diff"]
    assert changes.columns == columns
    told = changes.selectExpr(
        "k", "n", "_change_type kind", "_commit_version version", "unix_seconds(_commit_timestamp) s", "__diff d"
    )
    pump(told, "log", key="k")
    assert contents(client, "log") == Counter(
        {("a", 1, "insert", 0, 0, 1): 1, ("a", 1, "delete", 1, 1, -1): 1, ("a", 2, "insert", 1, 1, 2): 1}
    )


@pytest.mark.proof
def test_the_change_feed_is_there_in_batch_as_well(client: Any, load: Any) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    for n in range(3):
        shard.insert([{"k": "a", "n": n}, {"k": "a", "n": n - 1, "__diff": -1}])
    feed = load("orders", readChangeFeed="true", startingVersion=1, endingVersion=1)
    millis = "unix_millis(_commit_timestamp) ms"
    at = [shard.timestamp_of(time) for time in range(3)]
    ms = [round(when.timestamp() * 1000) for when in at]
    assert sorted(map(tuple, feed.selectExpr("n", "__time", "__diff", millis).collect())) == [
        (0, 1, -1, ms[1]),
        (1, 1, 1, ms[1]),
    ]
    whole = load("orders", readChangeFeed="true", startingVersion=0)
    told = {(row["__time"], row["ms"]) for row in whole.selectExpr("__time", millis).collect()}
    assert told == set(enumerate(ms))
    shard.time_at(at[2], wait_s=10)  # its second is over
    shard.insert([{"k": "b", "n": 9}])
    assert {(row["__time"], row["ms"]) for row in whole.selectExpr("__time", millis).collect()} == told
    named = load("orders", timestampAsOf=at[2].isoformat(), multiplicity="column").collect()
    assert sorted((row.k, row.n) for row in named) == [("a", -1), ("a", 2)], "the wall clock of a change shows it"
    feed = load("orders", schema="_commit_timestamp timestamp", readChangeFeed="true", startingVersion=2)
    assert feed.count() == 3
    assert load("orders", readChangeFeed="true", startingVersion=0, endingVersion=2).count() == 6
    assert load("orders", readChangeFeed="true", startingVersion=7).count() == 0


def test_trap_3_the_initial_offset_is_the_same_however_often_it_is_asked(client: Any, url: str) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": "before", "n": 0}])
    first = reader(url, startingOffsets="latest", cursor="job")
    start = first.initialOffset()
    shard.insert([{"k": "between", "n": 1}])
    assert first.initialOffset() == start == {"v": 1, "frontier": [1], "shard": shard.view().shard_id}
    restarted = reader(url, startingOffsets="latest", cursor="job")
    assert restarted.initialOffset() == start
    assert first.latestOffset(start, first.getDefaultReadLimit()) == {**start, "frontier": [2]}


def test_trap_3_a_stream_begins_at_its_wall_clock_however_often_it_is_asked(client: Any, url: str) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": "before", "n": 0}])
    soon = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
    start = reader(url, startingTimestamp=soon).initialOffset()
    assert start == {"v": 1, "frontier": [1], "shard": shard.view().shard_id}
    shard.insert([{"k": "after", "n": 1}])
    assert reader(url, startingTimestamp=soon).initialOffset() == start
    assert reader(url, startingTimestamp=soon, cursor="job").initialOffset() == start
    assert reader(url, startingTimestamp="2020-01-01T00:00:00Z").initialOffset() == {**start, "frontier": [0]}
    with pytest.raises(InvalidUsage, match="'startingOffsets' and 'startingTimestamp' are exclusive"):
        reader(url, startingTimestamp=soon, startingOffsets="latest")
    with pytest.raises(InvalidUsage, match="must be an instant with its zone"):
        reader(url, startingTimestamp="2020-01-01T00:00:00")


@pytest.mark.proof
def test_a_stream_that_would_begin_beyond_the_upper_makes_no_cursor(client: Any, url: str) -> None:
    """It was refused, and its cursor held since at 0 for ever."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": "a", "n": 1}])
    with pytest.raises(InvalidUsage, match="beyond the upper"):
        reader(url, startingOffsets="1000", readChangeFeed="true", cursor="job").initialOffset()
    shard.drop()


def test_a_cursor_keeps_the_history_that_a_stopped_stream_needs(client: Any, stream: Any, pump: Any) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": "a", "n": 0}])
    changes = {"readChangeFeed": "true", "cursor": "job"}
    pump(stream(**changes).selectExpr("k", "n", "__time t", "__diff d"), "log", key="k")
    for n in range(1, 4):
        shard.insert([{"k": "a", "n": n}, {"k": "a", "n": n - 1, "__diff": -1}])
    shard.downgrade_since(3, "everyone else")
    shard.forget(3)
    assert shard.since().element == 0
    pump(stream(**changes).selectExpr("k", "n", "__time t", "__diff d"), "log", key="k")
    assert contents(client, "log") == Counter(
        {("a", 0, 0, 1): 1, **{("a", n, n, 1): 1 for n in range(1, 4)}, **{("a", n - 1, n, -1): 1 for n in range(1, 4)}}
    )


@pytest.mark.proof
def test_complete_mode_replaces_the_contents_each_time(client: Any, stream: Any, pump: Any) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": "a", "n": 1}, {"k": "b", "n": 2}])
    for extra in (5, 7):
        shard.insert([{"k": "a", "n": extra}])
        counts = stream().groupBy("k").agg({"n": "sum"}).withColumnRenamed("sum(n)", "total")
        pump(counts, "totals", mode="complete", key="k")
    assert contents(client, "totals") == Counter({("a", 13): 1, ("b", 2): 1})
    assert client.shard("totals").upper().element == 2
    client.shard("totals").drop()  # no micro-batch holds it


@pytest.mark.proof
def test_a_stream_of_upserts(client: Any, stream: Any, pump: Any) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    for n in range(3):
        shard.insert([{"k": "a", "n": n}, {"k": f"k{n}", "n": n}])
        pump(stream(), "latest", key="k", envelope="upsert")
    assert contents(client, "latest") == Counter({("a", 2): 1, ("k0", 0): 1, ("k1", 1): 1, ("k2", 2): 1})
    client.shard("latest").drop()  # no micro-batch holds it


@pytest.mark.proof
def test_a_committed_batch_that_is_replayed_is_skipped(client: Any, stream: Any, pump: Any, tmp_path: Path) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    for n in range(3):
        shard.insert([{"k": "a", "n": n}])
        pump(stream(), "copy", key="k")
    before = contents(client, "copy")
    [last] = sorted((tmp_path / "checkpoint" / "commits").glob("2"))
    last.unlink()
    last.with_name(".2.crc").unlink(missing_ok=True)
    pump(stream(), "copy")
    assert contents(client, "copy") == before == contents(client, "orders")
    assert client.shard("copy").upper().element == 3


def test_a_shared_writer_that_lapsed_between_micro_batches_is_replaced(client: Any, url: str) -> None:
    shard = client.create_shard("orders", SCHEMA, ["k"])
    target = Target.of(Options({"url": url, "path": "orders"}))
    for n in range(3):
        writer = executors.shared_writer(target, shard.view().shard_id, NOBODY)
        writer.commit_insert(writer.stage([{"k": "a", "n": n}], None))
        executors.transport(target.connection).apply("orders", ExpireWriter(writer.writer_id))
    assert contents(client, "orders") == Counter({("a", n): 1 for n in range(3)})


def test_an_offset_of_a_dropped_shard_is_refused_by_the_next_one(client: Any, url: str) -> None:
    """The stream went on with the rows of the new shard from where it was in the old one."""
    old = client.create_shard("orders", SCHEMA, ["k"])
    for n in range(3):
        old.insert([{"k": "old", "n": n}])
    running = reader(url, cursor="job")
    start = running.initialOffset()
    end = running.latestOffset(start, running.getDefaultReadLimit())
    assert len(running.partitions(start, end)) == 1
    old.drop(force=True)
    shard = client.create_shard("orders", SCHEMA, ["k"])
    for n in range(5):
        shard.insert([{"k": "new", "n": n}])
    for stream in (running, reader(url, cursor="job")):
        limit = stream.getDefaultReadLimit()
        for use in (
            lambda stream=stream, limit=limit: stream.latestOffset(end, limit),
            lambda stream=stream: stream.partitions(start, end),
            lambda stream=stream: stream.commit(end),
        ):
            with pytest.raises(UnknownShard, match=r"an earlier shard 'orders'.* Start with a new checkpoint"):
                use()
    state = state_of(url, "orders")
    assert not state.critical_readers, "the cursor is not made in the new shard"
    assert not state.leased_readers
    fresh = reader(url, cursor="job").initialOffset()
    assert fresh["shard"] == shard.view().shard_id


def test_an_offset_without_a_shard_is_good_for_whichever_has_the_name(client: Any, url: str) -> None:
    """Checkpoints before level 3 are such."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    for n in range(3):
        shard.insert([{"k": "a", "n": n}])
    stream = reader(url)
    for start in ({"v": 1, "frontier": [1]}, {"v": 1, "snapshot": 0}):
        end = stream.latestOffset(start, stream.getDefaultReadLimit())
        assert end == {"v": 1, "frontier": [3], "shard": shard.view().shard_id}
        assert len(stream.partitions(start, {"v": 1, "frontier": [3]})) == 1
    stream.stop()


def micro_batch(url: str, number: int, rows: list[dict[str, Any]], **options: str) -> None:
    """What the sink does for one micro-batch of the query `q`, without Spark around it."""
    given = Options({"url": url, "path": "orders", **options})
    job = Job.open(Target.of(given), WriteOptions.of(given), spark_schema(SCHEMA), overwrite=False)
    table = pa.Table.from_pylist(rows, SCHEMA)
    job.publish([job.stage(table.to_batches(), "q")], ("spark query q", number), streams=True)


@pytest.mark.parametrize("envelope", [{}, {"envelope": "upsert"}])
def test_a_query_does_not_go_on_in_the_next_shard_of_the_name(client: Any, url: str, envelope: dict[str, str]) -> None:
    """It did, and the next one had the later rows only."""
    client.create_shard("orders", SCHEMA, ["k"])
    micro_batch(url, 3, [{"k": "first", "n": 3}], **envelope)  # the earlier ones were empty
    client.shard("orders").drop(force=True)
    client.create_shard("orders", SCHEMA, ["k"])
    with pytest.raises(UnknownShard, match=r"micro-batch 4 is the first .* Start with a new checkpoint"):
        micro_batch(url, 4, [{"k": "later", "n": 4}], **envelope)
    assert client.shard("orders").upper().element == 0
    micro_batch(url, 0, [], **envelope)
    for _ in range(2):
        micro_batch(url, 1, [{"k": "new", "n": 1}], **envelope)
        micro_batch(url, 2, [], **envelope)
    assert contents(client, "orders") == Counter({("new", 1): 1})


def test_garbage_collection_is_left_alone_outside_of_sparks_workers(client: Any, url: str) -> None:
    frozen = gc.get_freeze_count()  # the tests freeze what they have loaded
    executors.transport(Target.of(Options({"url": url, "path": "orders"})).connection)
    executors.freeze_loaded(os.getpid(), writes=True)
    assert gc.get_freeze_count() == frozen


def test_a_bad_stream_option_is_one_clear_sentence(client: Any, stream: Any, pump: Any) -> None:
    """Each option has its row in `unit/spark/test_cut_streams.py`."""
    client.create_shard("orders", SCHEMA, ["k"]).insert([{"k": "a", "n": 1}])
    with pytest.raises((PySparkException, StreamingQueryException), match="needs option 'cursor'") as told:
        pump(stream(startingOffsets="latest"), "copy", key="k")
    assert "UnboundLocalError" not in str(told.value), "PySpark's own, which hid the sentence"


def test_a_stream_goes_on_when_its_first_mark_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, client: Any, url: str
) -> None:
    """Its cursor says where it is. Only the first start has to know what the instant names."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": "before", "n": 0}])
    soon = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
    start = reader(url, startingTimestamp=soon, cursor="job").initialOffset()

    def forgotten(*_: Any) -> Any:
        raise NotReadable("the mark is forgotten", as_of=None, since=[5])

    monkeypatch.setattr(executors, "resolve_wall_clock", forgotten)
    assert reader(url, startingTimestamp=soon, cursor="job").initialOffset() == start
    with pytest.raises(NotReadable):
        reader(url, startingTimestamp=soon, cursor="another").initialOffset()
    assert list(state_of(url, "orders").critical_readers) == [critical_reader_id_of("job")]


def test_a_cursor_that_is_given_up_meanwhile_is_begun_anew(
    monkeypatch: pytest.MonkeyPatch, client: Any, url: str
) -> None:
    """Also one that was left behind by a start that was cut off in between."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": "before", "n": 0}])
    soon = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
    begun = reader(url, startingTimestamp=soon, cursor="job").initialOffset()
    take, gone = CriticalReaderHandle.take, []

    def after_it_was_given_up(shard: Any, cursor: str, *given: Any, **more: Any) -> Any:
        if not gone:
            gone.append(cursor)
            take(shard, cursor).expire()
        return take(shard, cursor, *given, **more)

    monkeypatch.setattr(CriticalReaderHandle, "take", after_it_was_given_up)
    assert reader(url, startingTimestamp=soon, cursor="job").initialOffset() == begun
    assert gone == ["job"]
    left = take(shard, "cut-off", NOT_BEGUN)
    assert reader(url, startingTimestamp=soon, cursor="cut-off").initialOffset() == begun
    with pytest.raises(Expired):
        left.downgrade_since(0)
