"""The digest of rows follows the rows, not their order nor how they are cut, sliced, padded or added up."""

from __future__ import annotations

import decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.parts.row_stats import MODULUS, digest_of_rows

COLUMNS = {
    "n": pa.array([1, None, 3, 4, 5, 5], pa.int64()),
    "f": pa.array([1.5, float("nan"), None, -0.0, 0.0, 1.0], pa.float32()),
    "b": pa.array([True, None, False, True, True, False]),
    "s": pa.array(["a", "", None, "bc", "é", "x" * 50]),
    "x": pa.array([b"abc", None, b"abd", b"\0bc", b"ab\0", b"abc"], pa.binary(3)),
    "v": pa.array([[1, 2], None, [2, 1], [None, 1], [1, None], [1, 2]], pa.list_(pa.int16(), 2)),
    "w": pa.array([[["a"], []], [[], ["a"]], [["a"]], [], None, [[None], ["a"]]], pa.list_(pa.list_(pa.string()))),
    "z": pa.array([b"a", b"", None, b"bc", b"\0", b"y" * 50], pa.large_binary()),
    "d": pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("2.25"), None, None, None], pa.decimal128(9, 2)),
    "t": pa.array([1_900_000_000, None, None, None, None, 0], pa.timestamp("us")),
    "l": pa.array([[1], [], None, [None, 2], [3, 4], [5]], pa.list_(pa.int64())),
    "r": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "y"}, {"a": 2, "b": None}, None, {"a": 1, "b": "z"}]),
    "m": pa.array([[("k", 1)], None, [], [("k", 2)], None, None], pa.map_(pa.string(), pa.int64())),
    "e": pa.array([None, None, None, None, "late", None]),
}
TABLE = pa.table(COLUMNS)
ROWS = len(TABLE)


def digest(table: pa.Table, counts: list[int] | None = None) -> int:
    return digest_of_rows(table.append_column("__diff", pa.array(counts or [1] * len(table), pa.int64())))


@given(st.permutations(range(ROWS)), st.integers(0, ROWS))
def test_it_knows_of_no_order_and_no_cuts(order: list[int], cut: int) -> None:
    mixed = TABLE.take(order)
    first, second = mixed.slice(0, cut), mixed.slice(cut)
    assert digest(mixed) == digest(TABLE)
    assert (digest(first) + digest(second)) % MODULUS == digest(TABLE)
    assert digest(pa.concat_tables([first, second])) == digest(TABLE)


@pytest.mark.parametrize("name", COLUMNS)
def test_it_tells_any_two_values_apart(name: str) -> None:
    column = TABLE.select([name])
    apart = {repr(value.as_py()): digest(column.slice(place, 1)) for place, value in enumerate(column.column(0))}
    assert len(set(apart.values())) == len(apart)


@given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
def test_text_is_told_by_all_its_bytes_and_its_end(first: str, second: str, third: str) -> None:
    alone = {text: digest(pa.table({"s": [text]})) for text in (first, second, third)}
    assert len(set(alone.values())) == len(alone)
    assert digest(pa.table({"s": [first, second, third]})) == sum(alone[t] for t in (first, second, third)) % MODULUS


def test_values_count_for_their_row_and_their_column() -> None:
    tables = [{"a": [1, 2], "b": [1, 2]}, {"a": [1, 2], "b": [2, 1]}, {"a": [1, 2], "c": [1, 2]}, {"a": [1, 1]}]
    assert len({digest(pa.table(table)) for table in tables}) == len(tables)


def test_equal_rows_may_be_added_up() -> None:
    twice = pa.concat_tables([TABLE, TABLE.slice(1, 2)])
    assert digest(twice) == digest(TABLE, [1, 2, 2, *[1] * (ROWS - 3)])
    assert digest(twice) != digest(TABLE)
    assert digest(pa.concat_tables([TABLE, TABLE]), [1] * ROWS + [-1] * ROWS) == 0


def test_what_lies_under_a_null_does_not_count() -> None:
    values, valid = pa.py_buffer(b"\1\2\3"), pa.py_buffer(b"\5")
    one = pa.Array.from_buffers(pa.int8(), 3, [valid, values])
    assert digest(pa.table({"n": one})) == digest(pa.table({"n": pa.array([1, None, 3], pa.int8())}))


def test_a_column_without_values_does_not_count() -> None:
    assert digest(TABLE) == digest(TABLE.append_column("new", pa.nulls(ROWS, pa.string())))
    assert digest(TABLE) != digest(TABLE.append_column("new", pa.array(["x"] * ROWS)))


@pytest.mark.parametrize("kind", [pa.float16(), pa.float32(), pa.float64()], ids=str)
def test_every_nan_is_the_same_value(kind: pa.DataType) -> None:
    """What a processor makes of 0/0 has other bits than the one that JSON is read to."""
    width = kind.bit_width // 8
    ones = {2: "fffe", 4: "ffc00000", 8: "fff8000000000000"}[width]
    computed = pa.Array.from_buffers(kind, 1, [None, pa.py_buffer(bytes.fromhex(ones)[::-1])])
    read = pa.array([np.float16("nan") if width == 2 else float("nan")], kind)
    assert computed.buffers()[1].to_pybytes()[:width] != read.buffers()[1].to_pybytes()[:width]
    for wrap in (lambda a: a, lambda a: pa.ListArray.from_arrays([0, 1], a)):
        assert digest(pa.table({"f": wrap(computed)})) == digest(pa.table({"f": wrap(read)}))
    zeros = [pa.table({"f": pa.array([np.float16(zero) if width == 2 else zero], kind)}) for zero in (0.0, -0.0)]
    assert digest(zeros[0]) != digest(zeros[1])
