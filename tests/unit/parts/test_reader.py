"""Reading: whatever the runs, the splits and the budget, the rows are those of a dict of updates."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.core.batch import Run
from persist.parts import KeyRange, PartReader, ShardSchema, consolidate, encode_key, plan_splits
from persist.parts import codec as codec_module
from persist.parts import parquet_guard as guard_module
from persist.parts import part_files as files_module
from persist.parts import run_merge as merge_module
from tests.unit.parts.strategies import KEYED, Shard, as_dict, joined, naive, updates

SNAPSHOT = pa.schema([*KEYED.arrow, KEYED.updates_schema.field("__diff")])
BATCHES = st.lists(st.tuples(updates(), st.booleans(), st.none() | st.integers(0, 6)), max_size=5)
BUDGETS = st.sampled_from([1, 4000, 1 << 20])


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which a few rows meet every path."""
    monkeypatch.setattr(codec_module, "ROW_GROUP_ROWS", 3)
    monkeypatch.setattr(merge_module, "BATCH_ROWS_MIN", 1)


def staged(batches: Sequence[tuple[pa.Table, bool, int | None]]) -> tuple[Shard, list[Run], list[pa.Table]]:
    """Runs of all kinds (inline, blobs, times chosen at commit), and the rows that they stand for."""
    shard, runs, tables = Shard(), [], []
    for table, inline, chosen in batches:
        for run in shard.stage(table, inline_bytes_max=65536 if inline else 0):
            runs.append(run if chosen is None else Run(tuple(part.at(chosen) for part in run.parts)))
        if chosen is not None:
            times = pa.array(np.full(len(table), chosen), pa.int64())
            table = table.set_column(3, KEYED.updates_schema.field("__time"), times)
        tables.append(table)
    return shard, runs, tables


@given(BATCHES, st.integers(0, 7), BUDGETS)
def test_a_snapshot_is_the_sum_of_all_updates_until_then(batches: Any, as_of: int, budget: int) -> None:
    shard, runs, tables = staged(batches)
    found = joined(shard.reader(memory_bytes=budget).read_range(runs, as_of=as_of), SNAPSHOT)
    assert as_dict(found, as_of) == naive(tables, upto=as_of, advance=as_of)
    assert found["k"].to_pylist() == sorted(found["k"].to_pylist())


@given(BATCHES, st.integers(0, 7), st.integers(1, 9))
def test_the_union_of_any_splits_is_the_whole(batches: Any, as_of: int, count: int) -> None:
    shard, runs, _ = staged(batches)
    reader = shard.reader()
    whole = joined(reader.read_range(runs, as_of=as_of), SNAPSHOT)
    splits = plan_splits(runs, count, KEYED, reader)
    assert len(splits) == count
    assert (splits[0].lower, splits[-1].upper) == (None, None)
    assert [split.upper for split in splits[:-1]] == [split.lower for split in splits[1:]]
    pieces = [piece for split in splits for piece in reader.read_range(runs, as_of=as_of, key_range=split)]
    assert joined(pieces, SNAPSHOT).equals(whole)


@given(BATCHES, st.integers(0, 7), st.sampled_from([["v"], ["n", "k"], [], ["k"]]))
def test_columns_are_left_out_after_consolidation(batches: Any, as_of: int, columns: list[str]) -> None:
    shard, runs, _ = staged(batches)
    reader = shard.reader()
    whole = joined(reader.read_range(runs, as_of=as_of), SNAPSHOT).select([*columns, "__diff"])
    found = joined(reader.read_range(runs, as_of=as_of, columns=columns), whole.schema)
    assert found.to_pylist() == whole.to_pylist()


@given(
    BATCHES,
    st.integers(0, 7),
    st.sampled_from([["v"], ["n", "k"], [], None]),
    st.integers(1, 5),
    st.integers(1, 3),
    st.booleans(),
)
def test_batch_by_batch_the_rows_are_the_same(
    batches: Any, as_of: int, columns: list[str] | None, rows: int, count: int, whole_files: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not whole_files:
            patch.setattr(files_module, "WHOLE_BYTES_MAX", 0)
        shard, runs, _ = staged(batches)
        for key_range in plan_splits(runs, count, KEYED, shard.reader()):
            tables = list(shard.reader().read_range(runs, as_of=as_of, key_range=key_range, columns=columns))
            pieces = list(
                shard.reader().read_range(runs, as_of=as_of, key_range=key_range, columns=columns, batch_rows=rows)
            )
            assert all(map(len, pieces))
            names = [*(KEYED.arrow.names if columns is None else columns), "__diff"]
            schema = pa.schema([SNAPSHOT.field(name) for name in names])
            assert joined(pieces, schema).equals(joined(tables, schema))


def test_a_part_that_is_read_batch_by_batch_gives_small_tables_and_is_fetched_once() -> None:
    schema = ShardSchema(pa.schema([("k", pa.int64())]), ("k",))
    shard = Shard(schema)
    part = shard.part(pa.table({"k": np.arange(100)})).at(7)  # chosen at commit, so its footer is looked at
    blob = Counting(shard.blob)
    reader = PartReader(blob, {1: schema}, schema)
    pieces = list(reader.read_range([Run((part,))], as_of=7, batch_rows=16))
    assert [len(piece) for piece in pieces] == [16] * 6 + [4]
    assert blob.reads == [part.size]


def test_one_key_with_more_rows_than_the_budget_holds() -> None:
    schema = ShardSchema(pa.schema([("k", pa.string()), ("v", pa.int64())]), ("k",))
    shard = Shard(schema)
    tables = [
        schema.conform(pa.table({"k": ["a", *["x"] * 400, "z"], "v": np.arange(402) * step % 97}), step)
        for step in (1, 2, 3, 5)
    ]
    runs = [run for table in tables for run in shard.stage(table)]
    for since in (0, 9):
        pieces = list(shard.reader(memory_bytes=20_000).read_range(runs, since=since))
        assert joined(pieces, schema.updates_schema).equals(consolidate(tables, schema, since=since))
        assert max(len(piece) for piece in pieces) < 402


class Counting:
    """A blob store that remembers what was read."""

    def __init__(self, blob: Any) -> None:
        self._blob = blob
        self.reads: list[int] = []

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.reads.append(length)
        data: bytes = self._blob.get_range(key, start, length)
        return data

    def stat(self, key: str) -> Any:
        return self._blob.stat(key)


def test_a_narrow_read_fetches_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "ROW_GROUP_ROWS", 1000)
    schema = ShardSchema(pa.schema([("k", pa.int64()), ("v", pa.binary()), ("w", pa.int64())]), ("k",))
    shard = Shard(schema)
    chance = np.random.default_rng(1)
    values = pa.array([chance.bytes(800) for _ in range(5000)])
    part = shard.part(pa.table({"k": np.arange(5000), "v": values, "w": np.arange(5000)}))
    blob = Counting(shard.blob)
    reader = PartReader(blob, {1: schema}, schema)
    key_range = KeyRange(encode_key(schema, (2500,)), encode_key(schema, (2600,)))
    found = pa.concat_tables(reader.read_range([Run((part,))], as_of=0, key_range=key_range, columns=["w"]))
    assert found["w"].to_pylist() == list(range(2500, 2600))
    assert len(blob.reads) <= 3
    assert sum(blob.reads) < part.size / 20


@pytest.mark.parametrize("batch_rows", [None, 7])
def test_no_thread_of_arrow_ever_holds_our_files(monkeypatch: pytest.MonkeyPatch, batch_rows: int | None) -> None:
    """Such a thread may outlive the interpreter, which aborts the process when it exits."""
    readers: list[threading.Thread] = []
    read = guard_module.SparseFile.read

    def noted(self: Any, size: int = -1) -> bytes:
        readers.append(threading.current_thread())
        return read(self, size)

    monkeypatch.setattr(files_module, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(guard_module.SparseFile, "read", noted)
    names = [f"c{number}" for number in range(20)]
    schema = ShardSchema(pa.schema([(name, pa.int64()) for name in names]), ("c0",))
    shard = Shard(schema)
    part = shard.part(pa.table({name: np.arange(300) for name in names}))
    reader = PartReader(shard.blob, {1: schema}, schema)
    assert sum(len(piece) for piece in reader.read_range([Run((part,))], as_of=0, batch_rows=batch_rows)) == 300
    assert readers
    assert not [thread for thread in readers if isinstance(thread, threading._DummyThread)]
