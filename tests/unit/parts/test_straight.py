"""Reading straight: whatever is read straight and whatever is merged, the rows are those of a dict of updates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace as replaced
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.core.batch import Part, Run
from persist.core.blob_keys import COMPACTOR
from persist.core.errors import InvalidUsage
from persist.core.frontier import Antichain
from persist.core.ids import PartId, mint
from persist.core.record import replace
from persist.parts import PartReader, PartSink, PartWriter, ShardSchema, plan_splits
from persist.parts import codec as codec_module
from persist.parts import part_files as files_module
from persist.parts import read_plan as stretches_module
from persist.parts import row_stats as known_module
from persist.parts import run_merge as merge_module
from persist.parts.codec import encode_parquet
from persist.parts.consolidate import consolidate
from persist.parts.part_files import PartFiles
from persist.parts.part_validation import PartCheck
from persist.parts.row_stats import KnownRows
from persist.parts.run_merge import merge_into_sorted
from persist.parts.schema_evolution import Migration
from tests.unit.parts.strategies import SHARD, Shard, as_dict, joined, naive
from tests.unit.parts.test_reader import Counting

SCHEMA = ShardSchema(pa.schema([("k", pa.float64()), ("v", pa.string())]), ("k",))
WIDER = ShardSchema(pa.schema([("new", pa.int8()), ("k", pa.float64()), ("v", pa.string())]), ("k",))
KEYS = [None, -math.inf, -1.0, -0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0, math.nan]
BUDGETS = st.sampled_from([1, 2000, 1 << 20])


def table_of(rows: Sequence[tuple[Any, ...]]) -> pa.Table:
    columns = list(zip(*rows, strict=True)) or [()] * 4
    fields = SCHEMA.updates_schema
    arrays = [pa.array(list(c), f.type) for c, f in zip(columns, fields, strict=True)]
    return pa.Table.from_arrays(arrays, schema=fields)


@st.composite
def some_updates(draw: st.DrawFn, max_size: int) -> pa.Table:
    """Many of them share keys, few of them values; some cancel."""
    values = st.sampled_from([None, "", "a", "b", "c\0", "d"])
    row = st.tuples(st.sampled_from(KEYS), values, st.integers(0, 6), st.sampled_from([-1, 1, 1, 2]))
    return table_of(draw(st.lists(row, max_size=max_size)))


ON_TOP = st.lists(
    st.tuples(some_updates(6), st.sampled_from(["inline", "blob", "clipped", "chosen"]), st.integers(1, 6)), max_size=3
)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which a few rows meet every path: blobs of three rows a row group are large, and few rows are woven."""
    monkeypatch.setattr(codec_module, "ROW_GROUP_ROWS", 3)
    monkeypatch.setattr(files_module, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(merge_module, "BATCH_ROWS_MIN", 1)
    monkeypatch.setattr(merge_module, "FEW", 1)
    monkeypatch.setattr(known_module, "TWINS_SHARE", 1)


def compacted(shard: Shard, table: pa.Table, since: int = 0, target: int = 1 << 20) -> list[Run]:
    """What a merge writes of these rows, from `since` on."""
    schema = shard.schema
    writer = PartWriter(PartSink(schema, 1, shard.blob, SHARD, COMPACTOR, shard.ids), target)
    parts = [*writer.write(consolidate([table], schema, since=since)), *writer.finish()]
    for part in parts:
        PartCheck(schema).blob(part, shard.blob, whole=True)
    return [Run(tuple(parts))] if parts else []


def built(base: pa.Table, on_top: Any, target: int) -> tuple[Shard, list[Run], list[pa.Table]]:
    """A compacted shard with batches on top of all kinds, and the rows that they stand for."""
    shard = Shard(SCHEMA)
    runs, tables = compacted(shard, base, target=target), [base]
    for table, kind, time in on_top:
        for run in shard.stage(table, inline_bytes_max=65536 if kind == "inline" else 0):
            if kind == "chosen":
                run = Run(tuple(part.at(time) for part in run.parts))
            elif kind == "clipped":
                run = Run(tuple(replace(part, clip=time, diff_sum=None) for part in run.parts))
            runs.append(run)
        times = np.array(table["__time"].to_pylist(), np.int64)
        if kind == "chosen":
            table = table.set_column(2, SCHEMA.updates_schema.field("__time"), pa.array(np.full(len(table), time)))
        elif kind == "clipped":
            table = table.filter(pa.array(times >= time))
        tables.append(table)
    return shard, runs, tables


def listed(table: pa.Table) -> str:
    """Equal for tables with the same rows in the same order, NaN and -0.0 among them."""
    return repr(table.to_pylist())


TARGETS = st.sampled_from([1, 1 << 20])


@given(some_updates(40), ON_TOP, st.integers(0, 7), BUDGETS, TARGETS, st.sampled_from([None, 2]), st.booleans())
def test_a_snapshot_of_a_compacted_shard_is_the_sum_of_its_updates(
    base: pa.Table, on_top: Any, as_of: int, budget: int, target: int, batch_rows: int | None, evolves: bool
) -> None:
    shard, runs, tables = built(base, on_top, target)
    schema = WIDER if evolves else SCHEMA
    reader = PartReader(shard.blob, {1: SCHEMA, 2: WIDER}, schema, memory_bytes=budget)
    pieces = [
        piece
        for key_range in plan_splits(runs, 2, SCHEMA, reader)
        for piece in reader.read_range(runs, as_of=as_of, key_range=key_range, batch_rows=batch_rows)
    ]
    found = joined(pieces, pa.schema([*schema.arrow, SCHEMA.updates_schema.field("__diff")]))
    expected = naive([Migration(SCHEMA, schema).rows(table) for table in tables], upto=as_of, advance=as_of)
    assert as_dict(found, as_of) == expected
    assert listed(consolidate([schema.conform(found, 0)], schema).select(found.column_names)) == listed(found)  # sorted
    pruned = found.select(["v", "__diff"])
    assert listed(joined(reader.read_range(runs, as_of=as_of, columns=["v"]), pruned.schema)) == listed(pruned)


@given(some_updates(40), ON_TOP, st.integers(0, 7), BUDGETS, TARGETS)
def test_a_merge_of_a_compacted_shard_keeps_the_history_from_since_on(
    base: pa.Table, on_top: Any, since: int, budget: int, target: int
) -> None:
    shard, runs, tables = built(base, on_top, target)
    found = joined(shard.reader(memory_bytes=budget).read_range(runs, since=since), SCHEMA.updates_schema)
    assert listed(found) == listed(consolidate(tables, SCHEMA, since=since))


@given(some_updates(40), ON_TOP, st.integers(0, 7), st.integers(0, 7), TARGETS)
def test_the_updates_of_an_interval_come_once_and_at_their_times(
    base: pa.Table, on_top: Any, lower: int, length: int, target: int
) -> None:
    shard, runs, tables = built(base, on_top, target)
    parts = [part for run in runs for part in run.parts]
    pieces = list(shard.reader().read_updates(parts, Antichain(lower), Antichain(lower + length)))
    expected = {u: d for u, d in naive(tables).items() if lower <= u[2][1] < lower + length}
    assert as_dict(joined(pieces, SCHEMA.updates_schema)) == expected


@given(some_updates(40), some_updates(12))
def test_few_rows_woven_into_many_are_the_sum_of_both(base: pa.Table, others: pa.Table) -> None:
    many, few = consolidate([base], SCHEMA), consolidate([others], SCHEMA)
    if len(many) and len(few):
        found = merge_into_sorted(many, few, SCHEMA, SCHEMA.updates_schema.names)
        assert found is None or listed(found) == listed(consolidate([base, others], SCHEMA))


def test_long_keys_that_share_their_beginning_are_woven_too() -> None:
    schema = ShardSchema(pa.schema([("k", pa.string()), ("n", pa.int64())]), ("k", "n"))
    for beginning in ("x" * 8, "x" * 3000):
        keys = [f"{beginning}{number:05d}" for number in range(0, 200, 2)]
        many = schema.conform(pa.table({"k": keys, "n": [1] * 100}), 3)
        few = schema.conform(pa.table({"k": ["", keys[7], keys[7] + "a", "z"], "n": [1] * 4}), 3)
        found = merge_into_sorted(many, few, schema, schema.updates_schema.names)
        assert found is None or found.equals(consolidate([many, few], schema))
        assert found is not None or beginning == "x" * 3000


def numbered(count: int, times: int) -> pa.Table:
    """So many rows of different keys, at so many times."""
    return table_of([(float(n), "value", n % times, 1) for n in range(count)])


def fetched(shard: Shard, runs: Sequence[Run], columns: list[str]) -> tuple[int, int]:
    """The rows of a read as of the last time, and the bytes it fetched."""
    blob = Counting(shard.blob)
    reader = PartReader(blob, {1: SCHEMA}, SCHEMA)
    rows = sum(len(table) for table in reader.read_range(runs, as_of=9, columns=columns))
    return rows, sum(blob.reads)


def test_of_rows_at_many_times_only_the_columns_asked_for_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "ROW_GROUP_ROWS", 1000)
    monkeypatch.setattr(files_module, "GAP_BYTES_MAX", 0)
    shard = Shard(SCHEMA)
    runs = compacted(shard, numbered(5000, 7))
    [part] = runs[0].parts
    rows, nbytes = fetched(shard, runs, ["v"])
    assert (rows, nbytes < part.footer_size + part.size // 10) == (5000, True)


def test_rows_that_cancel_are_left_out_without_a_look_at_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "ROW_GROUP_ROWS", 1000)
    monkeypatch.setattr(files_module, "GAP_BYTES_MAX", 0)
    shard, random = Shard(SCHEMA), np.random.default_rng(1)
    kept = table_of([(float(n), f"value {random.integers(1 << 40)}", n % 7, 1) for n in range(5000)])
    gone = [(row["k"], row["v"], 8, -1) for row in kept.slice(0, 5000).to_pylist()[::50]]
    runs = compacted(shard, pa.concat_tables([kept, table_of(gone)]))
    [part] = runs[0].parts
    rows, nbytes = fetched(shard, runs, ["k"])
    strings = sum(group.chunks[1].size for group in PartFiles(shard.blob, {1: SCHEMA}).open(part).groups)
    assert (rows, nbytes <= part.size - strings) == (4900, True)


def test_one_row_on_top_has_one_row_group_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "ROW_GROUP_ROWS", 100)
    monkeypatch.setattr(files_module, "GAP_BYTES_MAX", 0)
    shard = Shard(SCHEMA)
    runs = compacted(shard, numbered(5000, 7))
    straight = fetched(shard, runs, ["v"])[1]
    top = shard.stage(table_of([(17.0, "value", 8, -1), (4321.5, "between", 8, 1)]), inline_bytes_max=65536)
    rows, nbytes = fetched(shard, [*runs, *top], ["v"])
    assert (rows, nbytes < 2 * straight) == (5000, True)


def test_a_small_blob_among_large_ones_is_cut_like_inline_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_module, "ROW_GROUP_ROWS", 100)
    monkeypatch.setattr(files_module, "GAP_BYTES_MAX", 0)
    shard = Shard(SCHEMA)
    runs = compacted(shard, numbered(5000, 7))
    straight = fetched(shard, runs, ["v"])[1]
    monkeypatch.setattr(files_module, "WHOLE_BYTES_MAX", runs[0].parts[0].size - 1)
    top = shard.stage(table_of([(17.0, "value", 8, -1), (4321.5, "between", 8, 1)]))
    rows, nbytes = fetched(shard, [*runs, *top], ["v"])
    assert (rows, nbytes < 2 * straight + top[0].parts[0].size) == (5000, True)


def test_beyond_the_parts_that_are_looked_into_reads_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches_module, "SPLIT_PARTS_MAX", 2)
    shard, tables = Shard(SCHEMA), [numbered(60, 7), table_of([(n + 0.0, "value", 8, -1) for n in range(0, 60, 7)])]
    runs = [*compacted(shard, tables[0], target=1), *shard.stage(tables[1])]
    found = pa.concat_tables(shard.reader().read_range(runs, as_of=9))
    assert as_dict(found, 9) == naive(tables, advance=9)


Told = tuple[KnownRows | None, bytes]


def file_of(shard: Shard, part: Part, known: Sequence[Told]) -> Part:
    """A copy of the part with an index that tells this of its row groups."""
    table = PartFiles(shard.blob, {1: SCHEMA}).open(part).read(range(len(known)), SCHEMA.updates_schema.names)
    with pytest.MonkeyPatch.context() as patch:
        told = iter(known)
        patch.setattr(codec_module.KnownRowsCollector, "describe", lambda self, rows: next(told))
        encoder = codec_module.ParquetEncoder(SCHEMA, with_statistics=True)
        encoder.write(table)
    part_id = mint(PartId, shard.ids)
    key = (part.key or "").replace(part.id, part_id)
    made, data = encoder.finish(1, part_id, key)
    shard.blob.put(key, data)
    return made


FIRST, SECOND = KnownRows(True, False, 1, 2, -1, 1), KnownRows(False, True, 3, 4, 1, 1)
TWIN = b"\x01\x00"  # row 1


@pytest.fixture
def told() -> tuple[Shard, Part]:
    """A part of two row groups; row 1 shares key and value with row 0, and row 3, which begins a group, with row 2."""
    shard = Shard(SCHEMA)
    rows = [(1.0, "a", 1, 1), (1.0, "a", 2, -1), (2.0, "b", 1, 1), (2.0, "b", 3, 1), (3.0, "c", 4, 1)]
    [run] = compacted(shard, table_of(rows))
    [part] = run.parts
    file = PartFiles(shard.blob, {1: SCHEMA}).open(part)
    assert [group.known for group in file.groups] == [FIRST, SECOND]
    assert file.firsts([0, 1]).tolist() == [True, False, True, True, True]
    PartCheck(SCHEMA).blob(file_of(shard, part, [(FIRST, TWIN), (SECOND, b"")]), shard.blob, whole=True)
    return shard, part


@pytest.mark.parametrize("lie", [
    [(replace(FIRST, pairs=False), TWIN), (SECOND, b"")],
    [(FIRST, TWIN), (replace(SECOND, joins=False), b"")],
    [(FIRST, TWIN), (replace(SECOND, time_max=3), b"")],
    [(FIRST, TWIN), (replace(SECOND, diff_min=0), b"")],
    [(FIRST, TWIN), (None, b"")],
    [(FIRST, b"\x02\x00"), (SECOND, b"")],
    [(FIRST, TWIN), (SECOND, TWIN)],
    [(FIRST, b"\x00\x00"), (SECOND, b"")],
    [(FIRST, b"\x01\x00\x01\x00"), (SECOND, b"")],
    [(FIRST, b"\x07\x00"), (SECOND, b"")],
    [(FIRST, b"\x01"), (SECOND, b"")],
])  # fmt: skip
def test_an_index_that_tells_untruths_is_refused(told: tuple[Shard, Part], lie: list[Told]) -> None:
    shard, part = told
    with pytest.raises(InvalidUsage, match="part p"):
        PartCheck(SCHEMA).blob(file_of(shard, part, lie), shard.blob, whole=True)


def test_bounds_that_are_untrue_are_refused_though_only_times_and_diffs_are_read(told: tuple[Shard, Part]) -> None:
    shard, part = told
    with pytest.raises(InvalidUsage, match="the index of part"):
        PartCheck(SCHEMA).blob(file_of(shard, part, [(replace(FIRST, time_min=0), TWIN), (SECOND, b"")]), shard.blob)


def test_a_read_that_believed_untruths_would_be_wrong(told: tuple[Shard, Part]) -> None:
    """So these tests tell a build that looks at what the index tells from one that does not."""
    shard, part = told
    truth = pa.concat_tables(shard.reader().read_range([Run((part,))], as_of=4)).to_pylist()
    assert [(row["k"], row["__diff"]) for row in truth] == [(2.0, 2), (3.0, 1)]
    for lie in (
        [(replace(FIRST, pairs=False), b""), (replace(SECOND, joins=False), b"")],
        [(FIRST, b"\x02\x00"), (replace(SECOND, joins=False), b"")],
    ):
        run = Run((file_of(shard, part, lie),))
        assert pa.concat_tables(shard.reader().read_range([run], as_of=4)).to_pylist() != truth


def test_what_a_writer_tells_of_its_rows_is_refused_by_the_commit_and_believed_by_no_read() -> None:
    shard = Shard(SCHEMA)
    table = table_of([(1.0, "a", 1, 1), (1.0, "a", 2, -1), (2.0, "b", 1, 1)])
    part = file_of(shard, shard.part(table), [(KnownRows(False, False, 1, 2, -1, 1), b"")])
    with pytest.raises(InvalidUsage, match="which only maintenance may"):
        PartCheck(SCHEMA).blob(part, shard.blob)
    found = pa.concat_tables(shard.reader().read_range([Run((part,))], as_of=5))
    assert found.to_pylist() == [{"k": 2.0, "v": "b", "__diff": 1}]


def test_parts_that_older_builds_wrote_tell_nothing_and_read_the_same() -> None:
    shard = Shard(SCHEMA)
    table = consolidate([numbered(20, 5), table_of([(3.0, "value", 6, -1)])], SCHEMA)
    [told] = compacted(shard, table)
    key = f"{SHARD}/{COMPACTOR}/p{'7' * 32}.parquet"
    untold, data = encode_parquet(table, SCHEMA, 1, told.parts[0].id, key)
    shard.blob.put(key, data)
    both = [pa.concat_tables(shard.reader().read_range([run], as_of=7)) for run in (told, Run((untold,)))]
    assert both[0].equals(both[1])
    assert len(both[0]) == 19


def test_an_index_that_tells_what_cannot_be_is_damage() -> None:
    for told in ([], [0, 0, 1], "known", [0, 0, 1, 1, 1, 1, 1]):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(told, KnownRows)


@pytest.mark.parametrize("memory_bytes", [100_000, 1 << 28])
def test_threads_give_the_rows_of_all_parts_in_the_same_order(memory_bytes: int) -> None:
    """Pieces of several parts are made at the same time, also where only one column is read, and by their times."""
    rows, parts = 60, 5
    shard = Shard(SCHEMA)
    found = [
        shard.part(
            table_of([(float(part * rows + row), f"v{row}", row % 7, 1) for row in range(rows)]), inline_bytes_max=0
        )
        for part in range(parts)
    ]
    maintained = PartWriter(replaced(shard.sink, writer=COMPACTOR), part_bytes_target=1)
    merged = []
    for table in shard.reader().read_range([Run((part,)) for part in found], since=0):
        merged += maintained.write(table)
    run = Run((*merged, *maintained.finish()))
    alone = shard.reader(memory_bytes=memory_bytes)
    threaded = PartReader(shard.blob, {1: SCHEMA}, SCHEMA, use_threads=True, memory_bytes=memory_bytes)
    for columns in (None, ["v"], []):
        read = [
            pa.concat_tables(reader.read_range([run], as_of=6, columns=columns)).combine_chunks()
            for reader in (alone, threaded)
        ]
        assert len(read[1]) == rows * parts
        assert read[1].equals(read[0])
    for table in threaded.read_updates(run.parts, Antichain(2), Antichain(5)):
        times = table.column("__time").to_pylist()
        assert times == sorted(times)
        assert set(times) <= {2, 3, 4}
