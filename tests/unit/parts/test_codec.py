"""Parts as bytes: every type comes back, and no damaged byte is ever read as a row."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from blob.errors import BlobNotFound
from persist.core.batch import Part, Run
from persist.core.errors import Corruption, UpgradeNeeded
from persist.core.ids import PartId, mint
from persist.core.record import replace
from persist.parts import PartReader, ShardSchema, consolidate, decode_inline, encode_inline, encode_key, encode_parquet
from persist.parts import part_files as files_module
from persist.parts.codec import decode_footer
from tests.support.examples import examples, size
from tests.unit.parts.strategies import ALL, KEYED, CountingIds, Shard, arrays, updates

PART = PartId("p" + "0" * 32)


class Bytes:
    """One blob, with the bytes that a test wants it to have."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if start + length > len(self.data):
            raise BlobNotFound(key)
        return self.data[start : start + length]

    def stat(self, key: str) -> Any:
        return type("Stat", (), {"size": len(self.data)})()


def rows_of(kind: Any, values: pa.Array) -> tuple[ShardSchema, pa.Table]:
    schema = ShardSchema(pa.schema([("k", pa.int32()), ("v", kind)]), ("k",))
    return schema, schema.conform(pa.table({"k": pa.array(range(len(values)), pa.int32()), "v": values}), 5)


@pytest.mark.parametrize("kind", [pa.string(), pa.binary(), pa.list_(pa.string()), pa.binary(16)], ids=str)
def test_inline_rows_bring_no_byte_of_their_neighbours(kind: Any) -> None:
    """Simulation, seed 8464: the format fills a buffer up with what lies beyond a slice."""
    values = [b"first..........1", b"the secret row.2", b"last...........3"]
    texts = [value.decode() for value in values]
    held = [[text] for text in texts] if pa.types.is_list(kind) else texts if kind == pa.string() else values
    schema, table = rows_of(kind, pa.array(held, kind))
    for some in (table.slice(0, 1), table.slice(2, 1), table.slice(0, 2)):
        inline = encode_inline(some, schema, 1, PART)
        same(decode_inline(inline, {1: schema}), some)
        assert inline.data is not None
        assert (b"secret" in inline.data) == (some.num_rows == 2)
        assert (b"last" in inline.data) == (some["k"][0].as_py() == 2)


def test_inline_rows_are_all_there_whichever_column_has_chunks() -> None:
    """It was asked of the first column alone, so the rows of every chunk but the first were left out."""
    schema, table = rows_of(pa.string(), pa.array(["a", "b", "c"]))
    for name in table.column_names:
        cut = pa.chunked_array([table[name].chunk(0)[0:1], table[name].chunk(0)[1:1], table[name].chunk(0)[1:]])
        chunked = table.set_column(table.schema.get_field_index(name), table.schema.field(name), cut)
        same(decode_inline(encode_inline(chunked, schema, 1, PART), {1: schema}), table)
        narrow = chunked.set_column(0, "k", chunked["k"].cast(pa.int16()))
        same(decode_inline(encode_inline(narrow, schema, 1, PART), {1: schema}), table)


@pytest.mark.parametrize("kind", ALL, ids=str)
@examples(0.25)
@given(data=st.data())
def test_every_type_comes_back(kind: Any, data: st.DataObject) -> None:
    schema, table = rows_of(kind, data.draw(arrays(kind, 1)))
    inline = encode_inline(table, schema, 1, PART)
    same(decode_inline(inline, {1: schema}), table)
    part, blob = encode_parquet(table, schema, 1, PART, "key")
    assert part.size == len(blob)
    read = pa.concat_tables(PartReader(Bytes(blob), {1: schema}, schema).read_range([Run((part,))], since=0))
    same(read, table)


def same(found: pa.Table, expected: pa.Table) -> None:
    """Equal schemas and values, where NaN equals NaN."""
    assert found.schema == expected.schema
    schema = ShardSchema(expected.drop_columns(["__time", "__diff"]).schema, ("k",))
    both = pa.concat_tables([found, expected])
    assert consolidate([both], schema)["__diff"].to_pylist() == [2] * len(expected)
    assert found["k"].equals(expected["k"])


@given(updates(max_size=20).filter(len))
def test_a_part_says_what_it_holds(table: pa.Table) -> None:
    inline = encode_inline(table, KEYED, 3, PART)
    times, diffs = table["__time"].to_pylist(), table["__diff"].to_pylist()
    assert (inline.rows, inline.schema_id, inline.sorted) == (len(table), 3, False)
    assert (inline.time_min, inline.time_max) == (min(times), max(times))
    assert (inline.diff_min, inline.diff_max, inline.diff_sum) == (min(diffs), max(diffs), sum(diffs))
    keys = [encode_key(KEYED, (row["k"], row["n"])) for row in table.to_pylist()]
    assert inline.key_lower <= min(keys)
    assert inline.key_upper is None or inline.key_upper >= max(keys)


def test_any_parquet_reader_reads_a_part() -> None:
    schema = ShardSchema(pa.schema([("a.b", pa.string()), ("s", pa.struct([("x", pa.int8())]))]), ("a.b",))
    table = schema.conform(pa.table({"a.b": ["x", "y"], "s": [{"x": 1}, None]}), 4)
    _, blob = encode_parquet(table, schema, 1, PART, "key")
    file = pq.ParquetFile(io.BytesIO(blob), page_checksum_verification=True)
    assert file.read().equals(table)
    assert json.loads(file.metadata.metadata[b"persist"]) == {"key": ["a.b"], "value": ["s"], "format": 1}
    assert file.metadata.row_group(0).column(0).statistics.min == "x"


def test_columns_whose_names_hold_dots_are_told_apart() -> None:
    kind = pa.struct([("b", pa.int8())])
    schema = ShardSchema(pa.schema([("a", kind), ("a.b", pa.string()), ("k", pa.int8())]), ("k",))
    table = schema.conform(pa.table({"a": [{"b": 1}], "a.b": ["x"], "k": pa.array([1], pa.int8())}), 0)
    part, blob = encode_parquet(table, schema, 1, PART, "key")
    reader = PartReader(Bytes(blob), {1: schema}, schema)
    for name in schema.arrow.names:
        (found,) = reader.read_range([Run((part,))], as_of=0, columns=[name])
        assert found.column_names == [name, "__diff"]
        assert found[name].equals(table[name])


# --- damage


def damaged() -> tuple[ShardSchema, pa.Table]:
    schema = ShardSchema(pa.schema([("k", pa.string()), ("v", pa.int64())]), ("k",))
    table = pa.table({"k": ["a", "b", "c"], "v": [1, 2, None], "__diff": [1, 2, 1], "__time": [1, 2, 3]})
    return schema, consolidate([schema.conform(table, 0)], schema)


STEP = size(7, 1)  # bytes from one that is damaged to the next


def flips(data: bytes) -> Iterator[bytes]:
    for position in range(0, len(data), STEP):
        for bit in (0x01, 0x80):
            yield data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :]


def cuts(data: bytes) -> Iterator[bytes]:
    for position in range(0, len(data), STEP):
        yield data[:position]
        yield data[:position] + data[position + 1 :]


@pytest.mark.parametrize("damage", [flips, cuts])
def test_an_inline_part_with_any_damage_is_corrupt(damage: Any) -> None:
    schema, table = damaged()
    part = encode_inline(table, schema, 1, PART)
    assert part.data is not None
    for data in damage(part.data):
        with pytest.raises(Corruption):
            decode_inline(replace(part, data=data), {1: schema})


@pytest.mark.parametrize("damage", [flips, cuts])
def test_a_whole_file_with_any_damage_is_corrupt(damage: Any) -> None:
    schema, table = damaged()
    part, blob = encode_parquet(table, schema, 1, PART, "key")
    for data in damage(blob):
        with pytest.raises(Corruption):
            list(PartReader(Bytes(data), {1: schema}, schema).read_range([Run((part,))], since=0))


@pytest.mark.parametrize("columns", [None, ["v"], ["k"], []])
@pytest.mark.parametrize("damage", [flips, cuts])
def test_a_pruned_read_of_damaged_bytes_is_right_or_corrupt(
    monkeypatch: pytest.MonkeyPatch, damage: Any, columns: list[str] | None
) -> None:
    monkeypatch.setattr(files_module, "WHOLE_BYTES_MAX", 0)
    monkeypatch.setattr(files_module, "GAP_BYTES_MAX", 0)
    schema, table = damaged()
    part, blob = encode_parquet(table, schema, 1, PART, "key")

    def read(data: bytes) -> pa.Table:
        pieces = PartReader(Bytes(data), {1: schema}, schema).read_range([Run((part,))], as_of=3, columns=columns)
        return pa.concat_tables(pieces)

    right = read(blob)
    found = 0
    for data in damage(blob):
        try:
            assert read(data).equals(right)
        except Corruption:
            found += 1
    assert found >= part.footer_size // STEP


def test_a_part_that_is_gone_is_not_corrupt() -> None:
    shard = Shard()
    table = KEYED.conform(pa.table({"k": ["a"], "n": pa.array([1], pa.int32()), "v": pa.array([[1]])}), 0)
    part = shard.part(table)
    assert part.key is not None
    shard.blob.delete([part.key])
    with pytest.raises(BlobNotFound):
        list(shard.reader().read_range([Run((part,))], as_of=0))


def test_a_part_of_a_later_version_asks_for_an_upgrade() -> None:
    schema, table = damaged()
    with patch("persist.parts.codec.FORMAT_VERSION", 2):
        part, data = encode_parquet(table, schema, 1, PART, "key")
    with pytest.raises(UpgradeNeeded, match="version 2"):
        decode_footer(part, data[-part.footer_size :])


def test_an_unknown_schema_is_corruption() -> None:
    schema, table = damaged()
    part: Part = encode_inline(table, schema, 9, mint(PartId, CountingIds()))
    with pytest.raises(Corruption, match="schema 9"):
        decode_inline(part, {1: schema})


def test_a_sum_of_diffs_that_leaves_int64_is_not_known() -> None:
    schema = ShardSchema(pa.schema([("k", pa.int8())]), ("k",))
    for diffs, known in (([2**63 - 1, 2**63 - 1, -5], False), ([2**63 - 1, 2**63 - 1, -(2**63)], True)):
        table = schema.conform(pa.table({"k": pa.array([1, 2, 3], pa.int8()), "__diff": diffs}), 0)
        said = sum(diffs) if known else None
        assert encode_inline(table, schema, 1, PART).diff_sum == said
        assert encode_parquet(table, schema, 1, PART, "key")[0].diff_sum == said
