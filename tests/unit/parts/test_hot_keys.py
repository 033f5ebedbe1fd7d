"""Keys whose rows fill several row groups of several parts: what is hidden of one part hides nothing of another."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pyarrow as pa
import pytest

from persist.core.batch import Run
from persist.core.blob_keys import COMPACTOR
from persist.parts import PartSink, PartWriter, ShardSchema, consolidate
from persist.parts import codec as codec_module
from persist.parts import part_files as files_module
from tests.support.examples import thinned
from tests.unit.parts.strategies import SHARD, Shard

SCHEMA = ShardSchema(pa.schema([("k", pa.int8()), ("v", pa.int16())]), ("k",))
Row = tuple[int, int, int, int]  # key, value, time, diff


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups of two rows, in files that are looked into."""
    monkeypatch.setattr(codec_module, "ROW_GROUP_ROWS", 2)
    monkeypatch.setattr(files_module, "WHOLE_BYTES_MAX", 0)


def read(files: Sequence[Sequence[Row]], as_of: int) -> list[tuple[int, int, int]]:
    """What a snapshot of these files gives, in its order."""
    shard = Shard(SCHEMA)
    runs = [merged(shard, table_of(rows)) for rows in files]
    tables = shard.reader().read_range(runs, as_of=as_of)
    return [tuple(row.values()) for table in tables for row in table.to_pylist()]  # type: ignore[misc]


def merged(shard: Shard, table: pa.Table) -> Run:
    """What a merge writes of these rows: it tells of each row group which times it has, and whether it has twins."""
    writer = PartWriter(PartSink(SCHEMA, 1, shard.blob, SHARD, COMPACTOR, shard.ids))
    return Run((*writer.write(consolidate([table], SCHEMA, since=0)), *writer.finish()))


def table_of(rows: Sequence[Row]) -> pa.Table:
    names = SCHEMA.updates_schema.names
    return pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], schema=SCHEMA.updates_schema)


def test_a_row_group_that_is_hidden_does_not_let_its_successor_pass_others() -> None:
    """A snapshot gave a row twice, once there and once taken away: seed 222 of a random model."""
    taken_away = [(0, 0, 5, 1), (0, 1, 5, -1), (0, 2, 5, 1), (0, 3, 5, 1)]
    there = [(0, -5, 9, 1), (0, -4, 9, 1), (0, 1, 4, 1), (0, 4, 4, 1)]
    assert read([taken_away, there], 5) == [(0, 0, 1), (0, 2, 1), (0, 3, 1), (0, 4, 1)]


@pytest.mark.parametrize("seed", thinned(range(60), 5))
def test_rows_of_hot_keys_are_added_up_at_every_time(seed: int) -> None:
    pick = random.Random(seed)
    files: list[list[Row]] = []
    for _ in range(pick.randint(2, 4)):
        times = pick.sample(range(4), 2)
        found = {(pick.randrange(2), pick.randrange(8), pick.choice(times)): pick.choice((-1, 1, 2)) for _ in range(14)}
        files.append([(*where, diff) for where, diff in found.items()])
    for as_of in range(4):
        wanted: Counter[tuple[int, int]] = Counter()
        for key, value, _, diff in (row for rows in files for row in rows if row[2] <= as_of):
            wanted[key, value] += diff
        assert read(files, as_of) == [(*row, diff) for row, diff in sorted(wanted.items()) if diff]
