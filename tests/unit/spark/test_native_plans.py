"""Which parts Spark's native read takes as they are."""

from __future__ import annotations

import pytest

from persist.core.batch import Run
from persist.parts import codec as codec_module
from persist.parts import part_files as files_module
from persist.parts.part_files import Files
from persist.parts.read_plan import classify
from tests.unit.parts.strategies import Shard
from tests.unit.parts.test_straight import SCHEMA, compacted, numbered, table_of

ROWS = [(float(n), "value", n % 7, 1) for n in range(100)]
GONE = [(3.0, "value", 8, -1)]


def classified(shard: Shard, runs: list[Run], as_of: int) -> tuple[int, int]:
    """How many parts are read as they are, and how many are added up."""
    straight, others = classify(runs, as_of, Files(shard.blob, {1: SCHEMA}))
    return len(straight), len(others)


@pytest.fixture
def shard(monkeypatch: pytest.MonkeyPatch) -> Shard:
    monkeypatch.setattr(codec_module, "ROW_GROUP_ROWS", 10)
    monkeypatch.setattr(files_module, "WHOLE_BYTES_MAX", 0)
    return Shard(SCHEMA)


def test_a_merged_part_of_many_times_is_read_as_it_is(shard: Shard) -> None:
    assert classified(shard, compacted(shard, numbered(100, 7)), 9) == (1, 0)


def test_a_merged_part_with_rows_that_cancel_is_added_up_where_the_read_sees_both(shard: Shard) -> None:
    runs = compacted(shard, table_of([*ROWS, *GONE]))
    assert classified(shard, runs, 9) == (0, 1)


def test_parts_that_nothing_on_top_overlaps_are_still_read_as_they_are(shard: Shard) -> None:
    runs = compacted(shard, table_of(ROWS), target=1)
    parts = len(runs[0].parts)
    runs = [*runs, *shard.stage(table_of(GONE))]
    assert parts > 2
    assert classified(shard, runs, 9) == (parts - 1, 2)


def test_a_staged_part_of_many_times_tells_nothing_and_is_added_up(shard: Shard) -> None:
    assert classified(shard, list(shard.stage(table_of(ROWS))), 9) == (0, 1)
