"""Sorting by one packed word a row gives what sorting word after word gives."""

from __future__ import annotations

import importlib
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.parts import ShardSchema, consolidate, row_sort
from persist.parts.row_sort import LEVELS_MAX, ROWS_MIN, packed
from persist.parts.sort_words import column
from tests.support.examples import examples
from tests.unit.parts.strategies import ALL, KEYED, arrays, canonical, plain, updates

ENGINE = importlib.import_module("persist.parts.consolidate")  # the package has a function of that name


def both_ways(tables: Sequence[pa.Table], schema: ShardSchema) -> tuple[pa.Table, pa.Table]:
    """The rows consolidated with packed words, and without them, however few they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ENGINE, "ROWS_MIN", 2)
        first = consolidate(tables, schema)
        patch.setattr(ENGINE, "ROWS_MIN", 2**62)
        return first, consolidate(tables, schema)


@given(st.lists(updates(), max_size=4))
def test_updates_come_in_the_same_order(tables: list[pa.Table]) -> None:
    first, second = both_ways(tables, KEYED)
    assert first.equals(second)


@pytest.mark.parametrize("kind", ALL, ids=str)
@examples(0.4)
@given(data=st.data())
def test_every_type_comes_in_the_same_order(kind: Any, data: st.DataObject) -> None:
    schema = ShardSchema(pa.schema([("k", pa.int8()), ("v", kind)]), ("k",))
    values = data.draw(arrays(kind, 2))
    keys = data.draw(st.lists(st.integers(-2, 2), min_size=len(values), max_size=len(values)))
    first, second = both_ways([schema.conform(pa.table({"k": pa.array(keys, pa.int8()), "v": values}), 0)], schema)
    assert first.drop_columns(["v"]).equals(second.drop_columns(["v"]))
    assert [canonical(plain(value)) for value in first["v"]] == [canonical(plain(value)) for value in second["v"]]


@given(
    st.lists(
        st.binary(max_size=12)
        | st.binary(max_size=4).map(lambda end: b"x" * 8 * LEVELS_MAX + end)
        | st.sampled_from([b"x" * 290, b"x" * 290 + b"\0", b"x" * 289]),
        min_size=2,
        max_size=12,
    )
)
def test_long_strings_come_in_the_order_of_their_bytes(values: list[bytes]) -> None:
    schema = ShardSchema(pa.schema([("k", pa.binary())]), ("k",))
    first, second = both_ways([schema.conform(pa.table({"k": pa.array(values, pa.binary())}), 0)], schema)
    assert first["k"].to_pylist() == second["k"].to_pylist() == sorted(set(values))


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-9, 9), min_size=2, max_size=40))
def test_numbers_of_any_size_tie_only_where_they_are_not_told_apart(values: list[int]) -> None:
    found = packed(iter([column(pa.array(values, pa.int64()))]), len(values))
    order = range(len(values)) if found.perm is None else found.perm.tolist()
    ordered = [values[row] for row in order]
    assert sorted(order) == list(range(len(values)))
    heads = [ordered[row] for row in np.flatnonzero(found.starts)]
    assert heads == sorted(set(heads))  # a group begins with another value than the one before
    if found.level:
        assert ordered == sorted(values)
        assert len(heads) == len(set(values))


@pytest.mark.parametrize("many", [ROWS_MIN, 70_000])
def test_many_rows_of_texts_and_numbers(many: int) -> None:
    chance = random.Random(many)
    keys = [f"customer/{chance.randrange(many):08}" for _ in range(many)]
    values = [chance.choice((-(2**62), 0, 7, chance.randrange(2**62))) for _ in range(many)]
    schema = ShardSchema(pa.schema([("k", pa.string()), ("v", pa.int64())]), ("k",))
    rows = schema.conform(pa.table({"k": keys, "v": values}), 0)
    found = consolidate([rows], schema)
    assert list(zip(found["k"].to_pylist(), found["v"].to_pylist(), strict=True)) == sorted(
        set(zip(keys, values, strict=True))
    )
    assert consolidate([found], schema).equals(found)


def test_rows_in_order_stay_as_they_are() -> None:
    values = pa.array(range(ROWS_MIN), pa.int32())
    found = packed(iter([column(values)]), len(values))
    assert found.perm is None
    assert found.starts.all()


def test_values_that_are_all_alike_are_one_group() -> None:
    found = packed(iter([column(pa.array([5] * ROWS_MIN))]), ROWS_MIN)
    assert found.perm is None
    assert found.starts.tolist() == [True] + [False] * (ROWS_MIN - 1)


def test_no_column_is_looked_at_that_is_not_needed() -> None:
    asked = []

    def columns() -> Any:
        for name, values in (("k", range(ROWS_MIN)), ("v", range(ROWS_MIN))):
            asked.append(name)
            yield column(pa.array(values))

    packed(columns(), ROWS_MIN)
    assert asked == ["k"]


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=6), max_size=6), st.integers(1, 6))
def test_words_are_sorted_whether_they_lie_in_runs_or_not(runs: list[list[int]], each: int) -> None:
    given_words = [word for run in runs for word in sorted(run)]
    words = np.array(given_words, np.uint64)
    falls = sum(later < earlier for earlier, later in pairwise(given_words))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_sort, "RUN_ROWS_MIN", each)
        assert row_sort.lies_in_runs(words) == (falls * each < len(words))
        row_sort.sort_words(words)
    assert words.tolist() == sorted(given_words)
