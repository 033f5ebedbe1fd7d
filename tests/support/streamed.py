"""Streams of a shard in memory stores: micro-batch by micro-batch, through the very class that Spark calls."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from persist.parts import current_schema
from persist.spark import executors
from persist.spark.batch_io import snapshot_schema
from persist.spark.change_feed import changes_schema
from persist.spark.offsets import Offset
from persist.spark.options import Options, ReadOptions, StreamOptions, Target
from persist.spark.stream import StreamReader
from tests.support.maintained import NAME, World

FEED = {"readChangeFeed": "true"}
Change = tuple[str, int, int, int]  # key, value, time, diff


def opened(world: World, patch: pytest.MonkeyPatch, **options: Any) -> StreamReader:
    """A reader of the shard of a world, as a query that starts has it. Where it reads is patched in."""
    patch.setattr(executors, "transport", lambda connection: world.client.transport)
    given = {name: str(value) for name, value in options.items()}
    found = Options({"url": "persist:///nowhere", "path": NAME, **given})
    found.check("a streaming read")
    target, read = Target.of(found), ReadOptions.of(found, streams=True)
    schema = (
        changes_schema(executors.view_of(target), read)
        if read.changes
        else snapshot_schema(current_schema(executors.view_of(target).schemas)[1], read)
    )
    return StreamReader(target, read, StreamOptions.of(found), schema)


def rows_between(reader: StreamReader, start: Offset, end: Offset) -> list[dict[str, Any]]:
    """The rows of one micro-batch, partition by partition."""
    parts = reader.partitions(start, end)
    return [row for part in parts for batch in reader.read(part) for row in batch.to_pylist()]


def changes_between(reader: StreamReader, start: Offset, end: Offset) -> list[Change]:
    return [(row["k"], row["v"], row["__time"], row["__diff"]) for row in rows_between(reader, start, end)]


def expected(rows: list[Change], as_of: int | None, first: int, upper: int) -> Counter[Change]:
    """What a stream shows of some updates: the contents as of a time, at that time, and what came in `[first, upper)`.

    Without a time there are no contents.
    """
    contents: Counter[tuple[str, int]] = Counter()
    changes: Counter[tuple[str, int, int]] = Counter()
    for key, value, time, diff in rows:
        if as_of is not None and time <= as_of:
            contents[key, value] += diff
        elif first <= time < upper:
            changes[key, value, time] += diff
    held = [(key, value, as_of or 0, diff) for (key, value), diff in contents.items() if diff]
    came = [(key, value, time, diff) for (key, value, time), diff in changes.items() if diff]
    return Counter([*held, *came])
