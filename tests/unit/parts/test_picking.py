"""Rows picked out of columns of every type are those that Arrow takes."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.parts import row_sort
from persist.parts.row_sort import is_constant, picked
from tests.unit.parts.strategies import ALL, arrays

MANY = row_sort.ROWS_MIN
COLUMNS = {
    "texts of one length": pa.array([f"k{number:05}" for number in range(MANY)]),
    "bytes of one length": pa.array([b"%06d" % number for number in range(MANY)]),
    "texts of several lengths": pa.array([str(number) for number in range(MANY)]),
    "texts, the last one longer": pa.array(["ab"] * (MANY - 1) + ["abc"]),
    "empty texts": pa.array([""] * MANY),
    "long texts": pa.array([f"{number:0{row_sort.LENGTH_MAX + 1}}" for number in range(MANY)]),
    "large texts": pa.array(["ab"] * MANY, pa.large_string()),
    "a null": pa.array([None, *["ab"] * (MANY - 1)]),
    "one number": pa.array([7] * MANY),
    "numbers": pa.array(range(MANY)),
    "flags": pa.array([True, False] * (MANY // 2)),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("start", [0, 3])
def test_many_rows(name: str, start: int) -> None:
    values = COLUMNS[name].slice(start)
    chance = random.Random(start)
    for count in (MANY, len(values), 2 * MANY):
        rows = pa.array([chance.randrange(len(values)) for _ in range(count)], pa.int64())
        found = picked(values, rows)
        found.validate(full=True)
        assert found.equals(values.take(rows))


@pytest.mark.parametrize("kind", ALL, ids=str)
@given(data=st.data())
def test_few_rows_of_every_type(kind: Any, data: st.DataObject) -> None:
    values = data.draw(arrays(kind, 1))
    rows = pa.array(data.draw(st.lists(st.integers(0, len(values) - 1), max_size=9)), pa.int64())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sort, "ROWS_MIN", 0)
        assert str(picked(values, rows)) == str(values.take(rows))  # a text: no NaN is like another


@pytest.mark.parametrize(("values", "constant"), [([], True), ([1], True), ([1, 1], True), ([1, 2, 1], False)])
def test_what_is_constant(values: list[int], constant: bool) -> None:
    assert is_constant(np.array(values, np.int64)) is constant
