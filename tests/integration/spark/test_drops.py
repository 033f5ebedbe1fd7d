"""A truncation by a drop in Spark: no read shows what it took away, and every feed of changes tells of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

import persist.spark
from tests.integration.spark.test_native import rows_of
from tests.integration.spark.test_replacing import DDL, batch, job
from tests.integration.spark.test_streams import contents, pump, stream

__all__ = ["pump", "stream"]

pytestmark = pytest.mark.spark

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64())])
OLD, ROWS = 1_000, 1_500


@pytest.fixture
def shard(client: Any) -> Any:
    """At time 0 and 1 many rows in one part, which lies across the cut; at 2 one more; at 3 the drop; at 4 one more."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    many = [{"k": f"k{n:04}", "n": n, "__time": int(n >= OLD), "__diff": 1} for n in range(ROWS)]
    shard.compare_and_append(many, 0, 2)
    shard.insert([{"k": "a", "n": 1}])
    shard.truncate(1, mode="drop")
    shard.insert([{"k": "b", "n": 1}])
    return shard


def test_no_read_shows_what_was_dropped(spark: Any, shard: Any, load: Any, url: str) -> None:
    assert load("orders").count() == ROWS - OLD + 2
    assert load("orders", asOf=2).count() == ROWS + 1
    assert load("orders", where="k = 'k0007'").count() == 0
    assert load("orders", asOf=2, where="k = 'k0007'").count() == 1
    for as_of in (2, 3):
        native = rows_of(persist.spark.table(spark, "orders", as_of=as_of, url=url))
        assert native == rows_of(load("orders", asOf=as_of))


def test_the_change_feed_tells_of_the_drop_at_its_time(shard: Any, load: Any) -> None:
    feed = load("orders", readChangeFeed="true", startingVersion=2, numPartitions=2).collect()
    assert Counter((row["__time"], row["_change_type"]) for row in feed) == {
        (2, "insert"): 1, (3, "delete"): OLD, (4, "insert"): 1,
    }  # fmt: skip
    assert load("orders", readChangeFeed="true", startingVersion=3, endingVersion=3, where="k < 'k0010'").count() == 10
    assert load("orders", readChangeFeed="true", startingVersion=4).count() == 1


def test_a_stream_of_changes_over_the_drop_makes_a_copy(client: Any, shard: Any, stream: Any, pump: Any) -> None:
    """In parts; `unit/spark/test_cut_streams.py` shows them as a whole."""
    limited = stream(readChangeFeed="true", startingVersion="0", cursor="job", maxRowsPerTrigger=OLD)
    feed = limited.select("k", "n", "__diff")
    progress = pump(feed, "copy", key="k", diffColumn="__diff")
    assert contents(client, "copy") == contents(client, "orders")
    sizes = [told["numInputRows"] for told in progress if told["numInputRows"]]
    assert sum(sizes) == ROWS + OLD + 2
    assert max(sizes) <= OLD
    shard.truncate(3, mode="drop")
    pump(feed, "copy", key="k", diffColumn="__diff")
    assert contents(client, "copy") == contents(client, "orders") == {("b", 1): 1}


@pytest.mark.parametrize("how", [{"envelope": "upsert"}, {"overwrite": True}], ids=["upsert", "overwrite"])
def test_a_drop_while_rows_are_replaced(spark: Any, client: Any, url: str, how: dict[str, Any]) -> None:
    """What the drop took away meanwhile is not taken away a second time by the job."""
    shard = client.create_shard("orders", SCHEMA, ["k"])
    shard.insert([{"k": "a", "n": 1}, {"k": "b", "n": 1}])
    shard.insert([{"k": "c", "n": 1}])
    mine = job(url, spark.createDataFrame([], DDL), **how)
    message = mine.stage([batch([("a", 5), ("x", 5)])])
    assert shard.truncate(1, mode="drop").changed
    shard.insert([{"k": "a", "n": 7}])
    assert mine.publish([message], None)
    left = {("c", 1): 1} if "envelope" in how else {}
    assert contents(client, "orders") == {("a", 5): 1, ("x", 5): 1, **left}
