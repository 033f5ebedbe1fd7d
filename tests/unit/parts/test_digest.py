"""The digest of rows follows the rows, not how they are cut, sliced or padded."""

from __future__ import annotations

import decimal
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.parts.digest import RowsDigest

COLUMNS = {
    "n": pa.array([1, None, 3, 4, 5, 5], pa.int64()),
    "f": pa.array([1.5, float("nan"), None, -0.0, 0.0, 1.0], pa.float32()),
    "b": pa.array([True, None, False, True, True, False]),
    "s": pa.array(["a", "", None, "bc", "é", "x" * 50]),
    "z": pa.array([b"a", b"", None, b"bc", b"\0", b"y" * 50], pa.large_binary()),
    "d": pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("2.25"), None, None, None], pa.decimal128(9, 2)),
    "t": pa.array([1_900_000_000, None, None, None, None, 0], pa.timestamp("us")),
    "l": pa.array([[1], [], None, [None, 2], [3, 4], [5]], pa.list_(pa.int64())),
    "r": pa.array([{"a": 1, "b": "x"}, None, {"a": None, "b": "y"}, {"a": 2, "b": None}, None, {"a": 1, "b": "z"}]),
    "m": pa.array([[("k", 1)], None, [], [("k", 2)], None, None], pa.map_(pa.string(), pa.int64())),
    "e": pa.array([None, None, None, None, "late", None]),
}
TABLE = pa.table(COLUMNS)


def digest(*tables: pa.Table) -> bytes:
    found = RowsDigest()
    for table in tables:
        found.update(table)
    return found.digest()


@given(st.lists(st.integers(0, 6), max_size=4))
def test_it_does_not_know_of_cuts(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), 6]
    pieces = [TABLE.slice(a, b - a) for a, b in pairwise(bounds)]
    assert digest(*pieces) == digest(TABLE) == digest(pa.concat_tables(pieces))


@pytest.mark.parametrize("name", COLUMNS)
def test_it_tells_any_two_rows_apart(name: str) -> None:
    column = TABLE.select([name])
    seen = {digest(column)}
    for first in range(6):
        for second in range(first):
            order = list(range(6))
            order[first], order[second] = second, first
            if column.column(0)[first] != column.column(0)[second]:
                seen.add(digest(column.take(order)))
        seen.add(digest(column.slice(first)))
    assert len(seen) >= 8


def test_what_lies_under_a_null_does_not_count() -> None:
    values, valid = pa.py_buffer(b"\1\2\3"), pa.py_buffer(b"\5")
    one = pa.Array.from_buffers(pa.int8(), 3, [valid, values])
    assert digest(pa.table({"n": one})) == digest(pa.table({"n": pa.array([1, None, 3], pa.int8())}))


def test_a_column_without_values_does_not_count() -> None:
    assert digest(TABLE) == digest(TABLE.append_column("new", pa.nulls(6, pa.string())))
    assert digest(TABLE) != digest(TABLE.append_column("new", pa.array(["x"] * 6)))
