"""EVENT_COUNT and BYTE_COUNT count what was appended: alike inline and as blobs, and without what was dropped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import persist
from persist.client.shard import Shard
from persist.commit.location import LocationSettings
from persist.core.attribute import BYTE_COUNT, EVENT_COUNT
from persist.core.state import Policy

SCHEMA = pa.schema([pa.field("k", pa.string())])
TIMES = 100


@pytest.fixture(params=[64 * 1024, 0], ids=["inline", "blob"])
def shard(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Shard]:
    settings = LocationSettings(policy=Policy(inline_part_bytes_max=request.param))
    with persist.connect(f"persist://{tmp_path}/d", location=settings) as client:
        yield client.create_shard("orders", SCHEMA, ["k"])


@pytest.fixture
def spilling(tmp_path: Path) -> Iterator[Shard]:
    """A shard whose State has no room for inline rows: they arrive inline and go to the blob store."""
    settings = LocationSettings(policy=Policy(inline_shard_bytes_max=1))
    with persist.connect(f"persist://{tmp_path}/d", location=settings) as client:
        yield client.create_shard("orders", SCHEMA, ["k"])


def counts(shard: Shard) -> tuple[int, int]:
    found = shard.attributes.get_many([EVENT_COUNT, BYTE_COUNT])
    return found[EVENT_COUNT] or 0, found[BYTE_COUNT] or 0


def rows(lower: int, upper: int) -> list[dict[str, object]]:
    return [{"k": f"k{time % 7}", "__time": time} for time in range(lower, upper)]


def test_what_a_replica_finds_written_already_is_not_counted(shard: Shard) -> None:
    shard.append(rows(0, 60), 0, 60)
    first = counts(shard)
    assert first[0] == 60
    shard.append(rows(0, 60), 0, 60)
    assert counts(shard) == first, "all of it was there"
    shard.append(rows(0, TIMES), 0, TIMES)
    events, size = counts(shard)
    assert events == TIMES, "of which 60 were there"
    assert first[1] < size < first[1] * 3


def test_equal_updates_count_alike_inline_and_as_a_blob(shard: Shard) -> None:
    shard.insert([{"k": "a"}, {"k": "a", "__diff": -1}, {"k": "b"}, {"k": "b"}])
    assert counts(shard)[0] == 4


def test_updates_that_cancel_out_are_no_updates(shard: Shard) -> None:
    appended = shard.insert([{"k": "a"}, {"k": "a", "__diff": -1}])
    assert appended.lower == appended.upper
    assert counts(shard) == (0, 0)


def test_rows_that_are_spilled_count_as_they_were_given(spilling: Shard) -> None:
    spilling.append([{"k": "a"}, {"k": "b"}, {"k": "b"}], 0, 1)
    assert counts(spilling)[0] == 3
    spilling.append([{"k": "c", "__time": 0}, *rows(1, 11)], 0, 11)
    assert counts(spilling)[0] == 13
