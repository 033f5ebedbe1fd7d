"""Rows repeated as often as they are there: against a plain list, and where the counts are absurd."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.client import row_reader
from persist.client.row_reader import EXPANDED_ROWS_MAX, PIECE_BYTES, expand_rows
from persist.core.errors import InvalidUsage, NegativeMultiplicity


def table(*diffs: int) -> pa.Table:
    return pa.table({"id": pa.array(range(len(diffs)), pa.int64()), "__diff": pa.array(diffs, pa.int64())})


@given(st.lists(st.integers(0, 5), max_size=20), st.integers(1, 7))
def test_each_row_is_there_as_often_as_its_diff_says(diffs: list[int], rows_max: int) -> None:
    pieces = list(expand_rows(table(*diffs), rows_max))
    told = pa.concat_tables(pieces)
    assert told.column_names == ["id"]
    assert told.column("id").to_pylist() == [row for row, diff in enumerate(diffs) for _ in range(diff)]
    assert set(diffs) <= {1} or all(len(piece) <= rows_max for piece in pieces)


@pytest.mark.parametrize("diffs", [
    (EXPANDED_ROWS_MAX + 1,), (EXPANDED_ROWS_MAX, 1), (3, 2**63 - 1, 2**63 - 1),
    (2**63 - 1, 2**63 - 1, 5),  # their sum, taken in 64 bits, is 3
])  # fmt: skip
def test_more_rows_than_fit_are_refused_whatever_their_sum_wraps_to(diffs: tuple[int, ...]) -> None:
    with pytest.raises(InvalidUsage, match=f"more than {EXPANDED_ROWS_MAX} rows would be repeated"):
        list(expand_rows(table(*diffs)))


def test_a_negative_row_is_told_without_its_values() -> None:
    sentence = "1 of 2 rows, retracted more often than added, cannot be shown: it is there -2 times"
    with pytest.raises(NegativeMultiplicity, match=sentence) as refused:
        list(expand_rows(pa.table({"v": ["ann", "bob"], "__diff": [1, -2]})))
    assert "bob" not in f"{refused.value} {refused.value.details}"
    assert refused.value.details == {"rows": 1}
    with pytest.raises(InvalidUsage, match="rows would be repeated") as refused_too:
        list(expand_rows(pa.table({"v": ["ann"], "__diff": [2**40]})))
    assert "ann" not in f"{refused_too.value} {refused_too.value.details}"


def test_no_piece_holds_much_more_than_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_reader, "PIECE_BYTES", PIECE_BYTES // 1024)
    wide = pa.table({"v": ["x" * 4096] * 3, "__diff": [40, 0, 2]})
    pieces = list(expand_rows(wide))
    assert sum(len(piece) for piece in pieces) == 42
    assert max(piece.nbytes for piece in pieces) <= PIECE_BYTES // 1024 * 2


def test_nothing_is_one_empty_piece() -> None:
    assert [len(piece) for piece in expand_rows(table())] == [0]
    assert [len(piece) for piece in expand_rows(table(0))] == [0]


def test_one_large_row_among_small_ones_makes_no_large_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a table were taken for equally large: the large one was repeated as often as small ones fit."""
    monkeypatch.setattr(row_reader, "PIECE_BYTES", 16 * 1024)
    rows = pa.table({"v": ["x" * 8192] + ["a"] * 5000, "__diff": [1000] + [1] * 5000})
    pieces = list(expand_rows(rows))
    assert sum(len(piece) for piece in pieces) == 6000
    assert max(piece.nbytes for piece in pieces) <= 32 * 1024
    assert pa.concat_tables(pieces).column("v").to_pylist() == ["x" * 8192] * 1000 + ["a"] * 5000
