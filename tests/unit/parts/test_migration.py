"""Rows of older schemas, read by a later one: whatever is read straight, merged or sorted anew, they are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blob.memory_blobs import MemoryBlob
from persist.core.batch import Run
from persist.core.blob_keys import COMPACTOR
from persist.core.errors import Corruption
from persist.core.frontier import Antichain
from persist.core.ids import WriterId, mint
from persist.parts import DIFF, TIME, PartReader, PartSink, PartWriter, ShardSchema, plan_splits, stage
from persist.parts import codec as codec_module
from persist.parts import part_files as files_module
from persist.parts import run_merge as merge_module
from persist.parts.consolidate import Times, consolidate, merge
from persist.parts.filter_eval import Filter
from persist.parts.schema_changes import AddColumn, DropColumn, MoveColumn, RenameColumn, WidenColumn, apply_changes
from persist.parts.schema_evolution import Migration
from tests.support.examples import examples
from tests.unit.parts.strategies import SHARD, CountingIds, joined

FIRST = ShardSchema(
    pa.schema([("k", pa.int8()), ("a", pa.int8()), ("b", pa.string()), ("c", pa.float32())]), ("k",)
).with_details()
LATER = {
    "dropped first": apply_changes(FIRST, [DropColumn("a")]),
    "dropped in the middle": apply_changes(FIRST, [DropColumn("b")]),
    "dropped last": apply_changes(FIRST, [DropColumn("c")]),
    "dropped all": apply_changes(FIRST, [DropColumn("a"), DropColumn("b"), DropColumn("c")]),
    "dropped and added again": apply_changes(FIRST, [DropColumn("a"), AddColumn("a", pa.int8(), default=3)]),
    "names swapped": apply_changes(FIRST, [RenameColumn("a", "x"), RenameColumn("b", "a"), RenameColumn("x", "b")]),
    "moved": apply_changes(FIRST, [MoveColumn("c"), MoveColumn("k", "b")]),
    "widened": apply_changes(FIRST, [WidenColumn("a", pa.int64()), WidenColumn("c", pa.float64())]),
    "added first": apply_changes(FIRST, [AddColumn("d", pa.list_(pa.int8()), False, [1], "k"), MoveColumn("d")]),
    "everything": apply_changes(
        FIRST, [RenameColumn("k", "key"), DropColumn("b"), AddColumn("b", pa.string(), default="x"),
                WidenColumn("a", pa.int32()), MoveColumn("c")],
    ),
}  # fmt: skip
each_change = pytest.mark.parametrize("later", LATER.values(), ids=LATER)
BUDGETS = st.sampled_from([1, 3000, 1 << 20])
ROWS = st.lists(
    st.tuples(
        st.integers(0, 2), st.sampled_from([None, 0, 1, 2]), st.sampled_from([None, "", "a", "b"]),
        st.sampled_from([-0.0, 0.0, 1.0]), st.integers(0, 4), st.sampled_from([-1, 1, 1, 2]),
    ),
    max_size=24,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which a few rows meet every path."""
    monkeypatch.setattr(codec_module, "ROW_GROUP_ROWS", 3)
    monkeypatch.setattr(files_module, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(merge_module, "BATCH_ROWS_MIN", 1)
    monkeypatch.setattr(merge_module, "SORTED_PIECE_BYTES", 1)


def table_of(rows: Sequence[tuple[Any, ...]], schema: ShardSchema = FIRST) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * len(schema.updates_schema)
    fields = schema.updates_schema
    return pa.Table.from_arrays([pa.array(c, f.type) for c, f in zip(columns, fields, strict=True)], schema=fields)


class Stored:
    """Parts of the first schema: what a merge wrote, a writer's blob, and inline rows."""

    def __init__(self, merged: pa.Table, blob: pa.Table, inline: pa.Table) -> None:
        self.blob, ids = MemoryBlob(), CountingIds()
        writer = PartWriter(PartSink(FIRST, 1, self.blob, SHARD, COMPACTOR, ids), 1 << 20)
        parts = [*writer.write(consolidate([merged], FIRST)), *writer.finish()]
        sink = PartSink(FIRST, 1, self.blob, SHARD, mint(WriterId, ids), ids)
        self.runs = [
            *([Run(tuple(parts))] if parts else []),
            *stage(blob, sink, default_time=0, inline_bytes_max=0),
            *stage(inline, sink, default_time=0, inline_bytes_max=1 << 16),
        ]
        self.rows = [merged, blob, inline]

    def reader(self, later: ShardSchema, budget: int, where: Filter | None = None) -> PartReader:
        keeps = None if where is None else where.may_match
        return PartReader(self.blob, {1: FIRST, 2: later}, later, memory_bytes=budget, keeps=keeps)

    def expected(self, later: ShardSchema, since: int = 0, upto: int | None = None) -> pa.Table:
        rows = [Migration(FIRST, later).rows(table) for table in self.rows]
        return merge(rows, later, Times(upto=upto, advance=since))


@each_change
@examples(0.5)
@given(ROWS, ROWS, ROWS, BUDGETS, st.integers(0, 4))
def test_rows_are_read_as_if_they_had_been_written_so(
    later: ShardSchema, merged: Any, blob: Any, inline: Any, budget: int, at: int
) -> None:
    stored = Stored(table_of(merged), table_of(blob), table_of(inline))
    reader = stored.reader(later, budget)
    ranges = plan_splits(stored.runs, 2, later, reader)
    fields = later.updates_schema

    shown = stored.expected(later, at, at).drop_columns(["__time"])
    found = [table for one in ranges for table in reader.read_range(stored.runs, as_of=at, key_range=one)]
    assert repr(joined(found, shown.schema).to_pylist()) == repr(shown.to_pylist())

    whole = stored.expected(later, at)
    found = [table for one in ranges for table in reader.read_merged(stored.runs, at, key_range=one)]
    assert repr(joined(found, fields).to_pylist()) == repr(whole.to_pylist())

    parts = [part for run in stored.runs for part in run.parts]
    found = list(reader.read_updates(parts, Antichain(1), Antichain(4)))
    again = consolidate([joined(found, fields)], later)
    wanted = consolidate([t.filter(pa.compute.field("__time") >= 1) for t in [stored.expected(later, 0, 3)]], later)
    assert repr(again.to_pylist()) == repr(wanted.to_pylist())

    name = later.arrow.names[-1]
    narrow = joined(reader.read_range(stored.runs, as_of=at, columns=[name]), shown.select([name, "__diff"]).schema)
    assert repr(narrow.to_pylist()) == repr(shown.select([name, "__diff"]).to_pylist())


@each_change
@examples(0.5)
@given(ROWS, ROWS, st.sampled_from(["a = 1", "a = 3", "a IS NULL", "b = 'x'", "b = 'a'", "a > 1", "b LIKE 'a%'"]))
def test_no_row_group_is_left_out_that_has_rows_which_match(
    later: ShardSchema, merged: Any, blob: Any, where: str
) -> None:
    names = {"a", "b"} & set(later.arrow.names)
    kinds = {name: str(later.arrow.field(name).type) for name in names}
    column = where[0]
    if column not in names or (kinds[column] == "string") != ("'" in where or "NULL" in where):
        return
    wanted = Filter.of(where, later)
    stored = Stored(table_of(merged), table_of(blob), table_of([]))
    shown = stored.expected(later, 4, 4).drop_columns(["__time"])
    found = joined(stored.reader(later, 1 << 20, wanted).read_range(stored.runs, as_of=4), shown.schema)
    assert repr(wanted.apply(found).to_pylist()) == repr(wanted.apply(shown).to_pylist())


@pytest.mark.parametrize(("later", "is_by_name"), [
    (apply_changes(FIRST, [AddColumn("d", pa.int8()), MoveColumn("d")]), True),
    (LATER["moved"], True),
    (LATER["dropped last"], False),  # rows may have become the same
    (LATER["dropped and added again"], False),
    (LATER["names swapped"], False),
    (LATER["widened"], False),
    (LATER["added first"], False),  # it has a default
    (apply_changes(FIRST, [RenameColumn("a", "x"), AddColumn("a", pa.int8())]), False),
])  # fmt: skip
def test_other_tools_may_read_columns_by_their_names_where_these_tell_enough(
    later: ShardSchema, is_by_name: bool
) -> None:
    assert Migration(FIRST, later).is_by_name == is_by_name


def test_a_key_with_more_rows_than_memory_holds_is_sorted_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows have one key, and the column by which they were sorted is gone."""
    monkeypatch.setattr(codec_module, "ROW_GROUP_ROWS", 200)
    rows = table_of([(1, number % 100, f"{number * 7919 % 1000:04}", 0.0, number % 3, 1) for number in range(2000)])
    stored, later = Stored(rows, rows, table_of([])), LATER["dropped first"]
    pieces = []
    piece = merge_module._SpillFile
    monkeypatch.setattr(merge_module, "_SpillFile", lambda rows: pieces.append(piece(rows)) or pieces[-1])
    tables = list(stored.reader(later, 200_000).read_merged(stored.runs, 1))
    assert joined(tables, later.updates_schema).equals(stored.expected(later, 1))
    assert len(pieces) > 2
    assert all(one._file.closed for one in pieces)
    assert max(table.nbytes for table in tables) < 200_000


def test_a_part_that_lacks_a_column_of_its_schema_is_damaged() -> None:
    """Such as one with a forged footer, whose checksum is right."""
    rows = pa.table({"k": pa.array([1], pa.int8()), TIME: [0], DIFF: [1]})
    with pytest.raises(Corruption):
        Migration(FIRST, LATER["widened"]).rows(rows)
