"""Small pieces of the commands of rows: texts of schemas, widths of tables, places of bad rows."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.cli.row_files import first_bad, form_of, opened
from persist.cli.schema import read_columns, storable
from persist.cli.terminal import CELL_WIDTH_MIN, GAP, Screen, cut, fitted, padded, plain, table_lines, width_of
from persist.core.errors import InvalidUsage
from persist.parts import ShardSchema

# --- schemas


@pytest.mark.parametrize(("text", "kind"), [
    ("x int64", pa.int64()),
    ("x timestamp[us, UTC]", pa.timestamp("us", "UTC")),
    ("x timestamp[us, tz=Europe/Lisbon]", pa.timestamp("us", "Europe/Lisbon")),
    ("x decimal128(10, 2)", pa.decimal128(10, 2)),
    ("x list<timestamp[ms, UTC]>", pa.list_(pa.timestamp("ms", "UTC"))),
    ("x fixed_size_binary[4]", pa.binary(4)),
    ("x binary(16)", pa.binary(16)),
    ("x numeric(10,2)", pa.decimal128(10, 2)),
    ("x BIGINT", pa.int64()),
    ("x varchar", pa.string()),
    ("x text", pa.string()),
    ("x double precision", pa.float64()),
    ("x date", pa.date32()),
])  # fmt: skip
def test_a_type_is_written_as_arrow_prints_it(text: str, kind: pa.DataType) -> None:
    assert read_columns(text) == pa.schema([("x", kind)])
    assert read_columns(f"{text} NOT NULL, y  bool") == pa.schema([pa.field("x", kind, False), ("y", pa.bool_())])


FLAT = st.sampled_from(
    [
        pa.int64(), pa.uint8(), pa.float16(), pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.large_string(),
        pa.binary(), pa.large_binary(), pa.binary(16), pa.date32(), pa.date64(), pa.time32("ms"), pa.time64("ns"),
        pa.timestamp("us"), pa.timestamp("ns", "Europe/Lisbon"), pa.timestamp("s", "+02:00"), pa.duration("us"),
        pa.decimal32(5, 2), pa.decimal64(12, 0), pa.decimal128(38, 10), pa.decimal256(76, 5),
    ]
)  # fmt: skip
NAMES = st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=5) | st.just("a b")


def fields(kinds: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.Field]:
    return st.builds(pa.field, NAMES, kinds, st.booleans())


def deeper(kinds: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    items = st.builds(pa.field, st.sampled_from(["item", "element"]), kinds, st.booleans())
    return st.one_of(
        st.builds(pa.list_, items),
        st.builds(pa.large_list, items),
        st.builds(pa.list_, items, st.integers(1, 300)),
        st.lists(fields(kinds), min_size=1, max_size=3, unique_by=lambda field: field.name).map(pa.struct),
        st.builds(pa.map_, kinds, kinds, st.booleans()),
    )


@given(st.recursive(FLAT, deeper, max_leaves=4), st.booleans())
def test_every_type_that_is_printed_is_read(kind: pa.DataType, is_nullable: bool) -> None:
    found = read_columns(f"x {kind}{'' if is_nullable else ' not null'}")
    assert str(found.field("x").type) == str(kind)
    assert found == pa.schema([pa.field("x", kind, is_nullable)])


@pytest.mark.parametrize(
    "text", ["timestamp", "TIMESTAMPTZ", "varchar(20)", "decimal", "uuid", "struct", "list", "map"]
)
def test_a_name_that_means_several_types_is_answered_with_one(text: str) -> None:
    with pytest.raises(InvalidUsage, match="write ") as error:
        read_columns(f"x {text}")
    assert "known column type" not in str(error.value)


def test_columns_stand_on_lines_too_with_remarks_and_quoted_names() -> None:
    assert read_columns('\n# what it is\n"a, b" string\nc int8,\n') == pa.schema(
        [("a, b", pa.string()), ("c", pa.int8())]
    )


@pytest.mark.parametrize("text", [
    "", "#", "x", "x not null", "int64", "x int65", '"x int64', "x int64 y", "x list<int64", "x struct<int64>",
    "x struct<>", "x map<string>", "x list<int64>[2]", "x fixed_size_list<int64>", "x binary(0x1)",
])  # fmt: skip
def test_what_is_no_column_is_refused(text: str) -> None:
    with pytest.raises(InvalidUsage):
        read_columns(text)


def test_what_arrow_guesses_becomes_what_a_shard_can_keep() -> None:
    found = pa.schema([("n", pa.null()), ("s", pa.timestamp("s")), ("l", pa.list_(pa.null())), ("i", pa.int64())])
    kept = [("n", pa.string()), ("s", pa.timestamp("us")), ("l", pa.list_(pa.string())), ("i", pa.int64())]
    assert storable(found) == pa.schema(kept)


# --- tables


@given(st.lists(st.integers(1, 300), min_size=1, max_size=12), st.integers(1, 200))
def test_a_table_is_never_wider_than_the_terminal(natural: list[int], width: int) -> None:
    widths = fitted(natural, width)
    assert sum(widths) + len(GAP) * (len(widths) - 1) <= width
    assert len(widths) >= 1
    assert all(found <= wanted for found, wanted in zip(widths, natural, strict=False))
    if len(widths) > 1:
        assert all(found >= min(wanted, CELL_WIDTH_MIN) for found, wanted in zip(widths, natural, strict=False))


@given(st.text(max_size=30), st.integers(1, 20))
def test_a_cell_takes_the_columns_that_it_is_given(text: str, width: int) -> None:
    assert width_of(padded(plain(text), width)) == width
    assert width_of(cut(plain(text), width)) <= width


@given(st.text(st.characters(categories=["Cc"])))
def test_no_control_character_reaches_a_terminal(text: str) -> None:
    assert plain(text).isprintable()


def test_rows_after_those_by_which_widths_are_chosen_are_cut_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("persist.cli.terminal.MEASURED_ROWS", 2)
    tables = [pa.table({"a": ["x", "yy"]}), pa.table({"a": ["zzzzzz", None]})]
    assert list(table_lines(iter(tables), tables[0].slice(0, 0), Screen())) == ["a", "x", "yy", "z…", "n…"]


def test_nested_values_and_bytes_are_shown_as_csv_has_them() -> None:
    table = pa.table({"b": [b"\x00\xff"], "l": [[1, 2]], "d": [1.5], "t": pa.array([0], pa.timestamp("s", "UTC"))})
    shown = list(table_lines(iter([table]), table.slice(0, 0), Screen()))
    assert shown == ["b     l        d  t", "AP8=  [1,2]  1.5  1970-01-01T00:00:00Z"]


# --- files


@given(st.integers(1, 1_000), st.data())
def test_the_first_bad_row_is_found(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, count - 1))

    def read(first: int) -> None:
        if first > bad:
            raise ValueError

    assert first_bad(count, read) == bad


@pytest.mark.parametrize(
    ("name", "form"),
    [("a.CSV", "csv"), ("b.jsonl", "ndjson"), ("c.pq", "parquet"), ("d.arrow", "arrow"), ("../x.y/e.ndjson", "ndjson")],
)
def test_the_name_of_a_file_tells_its_format(name: str, form: str) -> None:
    assert form_of(name, None) == form
    assert form_of(name, "parquet") == "parquet"


@pytest.mark.parametrize("is_old", [False, True])
def test_a_stream_of_arrow_is_whole_or_cut_in_the_form_of_before_015_too(tmp_path: Path, is_old: bool) -> None:
    table, path = pa.table({"a": [1, 2, 3], "b": ["x", "y", None]}), tmp_path / "f.arrow"

    def stream(batches: int) -> bytes:
        sink = io.BytesIO()
        options = pa.ipc.IpcWriteOptions(use_legacy_format=is_old)
        with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
            for _ in range(batches):
                writer.write_table(table)
        return sink.getvalue()

    data, end = stream(2), 4 if is_old else 8
    first, second, third = (len(stream(batches)) - end for batches in range(3))

    def rows() -> int:
        with opened([str(path)], None) as [source]:
            pieces = source.pieces(ShardSchema(table.schema, ("a",)), None)
            return sum(len(piece.table) for piece in pieces)

    path.write_bytes(data)
    assert rows() == 6
    for size in (first, second, second + 3, third - 1, third, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(InvalidUsage):
            rows()


def test_an_arrow_file_whose_footer_names_no_batch_is_damaged(tmp_path: Path) -> None:
    table, mark, files = pa.table({"a": [1, 2, 3]}), b"\xff\xff\xff\xff\x00\x00\x00\x00", []
    for batches in (1, 0):
        sink = io.BytesIO()
        with pa.ipc.new_file(sink, table.schema) as writer:
            for _ in range(batches):
                writer.write_table(table)
        files.append(sink.getvalue())
    full, without = files
    at = without.index(mark)
    body = full[at : full.index(mark, at)]
    path = tmp_path / "f.arrow"
    hidden = without[:at] + body + without[at:]
    contents = [(without, True), (without[:at] + without[at + len(mark) :], True), (hidden, False)]
    contents += [(one[:8] + one[16:], is_sound) for one, is_sound in contents]  # as Polars writes it: no length there
    for content, is_sound in contents:
        path.write_bytes(content)
        with opened([str(path)], None) as [source]:
            pieces = source.pieces(ShardSchema(table.schema, ("a",)), None)
            if is_sound:
                assert list(pieces) == []
            else:
                with pytest.raises(InvalidUsage):
                    list(pieces)


_STORED = pa.array([b"0123456789abcdef", None], pa.binary(16))
_UUIDS = pa.ExtensionArray.from_storage(pa.uuid(), _STORED)
_JSON = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', None]))
_FLAGS = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None], pa.int8()))
_PAIRS = pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2))


@pytest.mark.parametrize(("given", "stored"), [
    (_UUIDS, _STORED),
    (_JSON, pa.array(['{"a": 1}', None])),
    (_FLAGS, pa.array([True, None])),
    (pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int32(), [2]), _PAIRS), _PAIRS),
    (pa.ListArray.from_arrays([0, 1, 2], _UUIDS), pa.ListArray.from_arrays([0, 1, 2], _STORED)),
    (pa.RunEndEncodedArray.from_arrays([1, 2], pa.array([7, None])), pa.array([7, None])),
    (pa.array([["a"], None], pa.list_view(pa.string_view())), pa.array([["a"], None], pa.list_(pa.large_string()))),
], ids=["uuid", "json", "bool8", "tensor", "list of uuid", "run ends", "list view"])  # fmt: skip
def test_a_new_shard_stores_what_holds_the_values_of_a_column(
    tmp_path: Path, given: pa.Array, stored: pa.Array
) -> None:
    """`import --create` refused extension types, which no shell can cast."""
    path, table = tmp_path / "f.arrow", pa.table({"id": [1, 2], "x": given})
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)
    with opened([str(path)], None) as [source]:
        schema = ShardSchema(source.inferred(), ("id",))
        rows = pa.concat_tables(schema.conform(piece.table, 0) for piece in source.pieces(schema, None))
    assert rows["x"].combine_chunks().equals(stored)


def test_half_a_pair_of_surrogates_is_not_called_truncated(tmp_path: Path) -> None:
    path = tmp_path / "f.ndjson"
    path.write_bytes(b'{"id": 1, "x": "\\ud800"}\n')
    with (
        opened([str(path)], None) as [source],
        pytest.raises(InvalidUsage, match=r"line 1: a text has .*half of a surrogate pair"),
    ):
        source.inferred()


@pytest.mark.parametrize("new", [pa.ipc.new_file, pa.ipc.new_stream])
def test_damaged_offsets_of_an_arrow_file_are_refused(tmp_path: Path, new: Callable[..., Any]) -> None:
    """Converting such values read out of bounds, and could end the process."""
    table, sink = pa.table({"a": [[1, 2, 3], [4, 5], [6, 7, 8, 9]]}), io.BytesIO()
    with new(sink, table.schema) as writer:
        writer.write_table(table)
    sound, damaged = (struct.pack("<4i", 0, 3, 5, end) for end in (9, 2**29))
    path = tmp_path / "f.arrow"
    path.write_bytes(sink.getvalue().replace(sound, damaged))
    with opened([str(path)], None) as [source], pytest.raises(InvalidUsage, match="cannot be read as arrow"):
        list(source.pieces(ShardSchema(table.schema.append(pa.field("k", pa.int64())), ("k",)), None))
