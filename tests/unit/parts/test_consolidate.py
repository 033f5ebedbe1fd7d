"""Consolidation against a dict, for every type that a column may have."""

from __future__ import annotations

import importlib
import random
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.core.errors import InvalidUsage
from persist.parts import ShardSchema, consolidate
from persist.parts.consolidate import SAMPLED, Times, merge, stable_order
from tests.support.examples import examples
from tests.unit.parts.strategies import ALL, KEYED, arrays, as_dict, canonical, naive, plain, updates

ENGINE = importlib.import_module("persist.parts.consolidate")  # the package has a function of that name
INT64_MAX = 2**63 - 1


@given(st.lists(updates(), max_size=4), st.integers(0, 7), st.none() | st.integers(0, 7))
def test_sums_like_a_dict(tables: list[pa.Table], since: int, as_of: int | None) -> None:
    found = merge(tables, KEYED, Times(upto=as_of, advance=since))
    assert found.schema == KEYED.updates_schema
    assert as_dict(found) == naive(tables, upto=as_of, advance=since)


@given(st.lists(updates(), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_order_does_not_depend_on_how_rows_arrive(tables: list[pa.Table], chance: random.Random) -> None:
    rows = pa.concat_tables(tables)
    shuffled = rows.take(pa.array(chance.sample(range(len(rows)), len(rows)), pa.int64()))
    once = consolidate(tables, KEYED)
    assert consolidate([shuffled], KEYED).equals(once)
    assert consolidate([once], KEYED).equals(once)


@pytest.mark.parametrize("kind", ALL, ids=str)
@examples(0.3)
@given(data=st.data())
def test_every_type_groups_by_value(kind: Any, data: st.DataObject) -> None:
    schema = ShardSchema(pa.schema([("k", pa.int8()), ("v", kind)]), ("k",))
    values = data.draw(arrays(kind))
    table = schema.conform(pa.table({"k": pa.array([1] * len(values), pa.int8()), "v": values}), 0)
    found = consolidate([table.slice(0, 3), table.slice(3)], schema)
    expected: dict[Any, int] = {}
    for scalar in values:
        value = canonical(plain(scalar))
        expected[value] = expected.get(value, 0) + 1
    counts = {canonical(plain(v)): d.as_py() for v, d in zip(found["v"], found["__diff"], strict=True)}
    assert counts == expected
    assert len(found) == len(expected)


@given(
    st.lists(
        st.binary(max_size=12)
        | st.binary(max_size=4).map(lambda end: b"x" * 8 * 16 + end)
        | st.sampled_from([b"x" * 290, b"x" * 290 + b"\0", b"x" * 289]),
        max_size=12,
    )
)
def test_long_strings_order_by_their_bytes(values: list[bytes]) -> None:
    schema = ShardSchema(pa.schema([("k", pa.binary())]), ("k",))
    found = consolidate([schema.conform(pa.table({"k": pa.array(values, pa.binary())}), 0)], schema)
    assert found["k"].to_pylist() == sorted(set(values))


def test_nan_equals_nan_and_the_zeros_differ() -> None:
    schema = ShardSchema(pa.schema([("k", pa.float64())]), ("k",))
    nan = float("nan")
    found = consolidate([schema.conform(pa.table({"k": [nan, 0.0, -0.0, nan, -nan]}), 0)], schema)
    assert [str(value) for value in found["k"].to_pylist()] == ["-0.0", "0.0", "nan"]
    assert found["__diff"].to_pylist() == [1, 1, 3]


def test_nulls_come_first() -> None:
    schema = ShardSchema(pa.schema([("k", pa.string())]), ("k",))
    found = consolidate([schema.conform(pa.table({"k": ["", None, "a"]}), 0)], schema)
    assert found["k"].to_pylist() == [None, "", "a"]


@pytest.mark.parametrize(
    ("diffs", "total"),
    [([INT64_MAX, 1, -1], INT64_MAX), ([INT64_MAX, 1], None), ([-INT64_MAX - 1, -1], None), ([2**62] * 2, None)],
)
def test_sums_beyond_int64_are_refused(diffs: list[int], total: int | None) -> None:
    schema = ShardSchema(pa.schema([("k", pa.int8())]), ("k",))
    table = schema.conform(
        pa.table({"k": pa.array([1] * len(diffs), pa.int8()), "__diff": pa.array(diffs, pa.int64())}), 0
    )
    if total is None:
        with pytest.raises(InvalidUsage, match="int64"):
            consolidate([table], schema)
    else:
        assert consolidate([table], schema)["__diff"].to_pylist() == [total]


@pytest.mark.parametrize("differs_at", [None, 3, 2 * SAMPLED, 5 * SAMPLED - 1])
def test_many_texts_that_are_alike_are_one_update_each_and_others_are_told_apart(differs_at: int | None) -> None:
    """So many that they are compared with one another before any is put in order."""
    schema = ShardSchema(pa.schema([("k", pa.int64()), ("s", pa.string())]), ("k",))
    count = 5 * SAMPLED
    texts = [f"the text of key {key} is rather long" for key in range(count)]
    others = [text + "." if key == differs_at else text for key, text in enumerate(texts)]
    both = [
        pa.table(
            {"k": range(count), "s": some, "__time": [1] * count, "__diff": [diff] * count},
            schema=schema.updates_schema,
        )
        for some, diff in ((texts, 1), (others, 2))
    ]
    found = consolidate(both, schema)
    if differs_at is None:
        assert found.column("s").to_pylist() == texts
        assert set(found.column("__diff").to_pylist()) == {3}
        return
    apart = found.filter(pc.equal(found.column("k"), differs_at))
    assert apart.select(["s", "__diff"]).to_pylist() == [
        {"s": texts[differs_at], "__diff": 1},
        {"s": others[differs_at], "__diff": 2},
    ]
    assert len(found) == count + 1


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), max_size=50))
def test_a_stable_order_is_that_of_a_stable_sort(numbers: list[int]) -> None:
    values = np.array(numbers, np.int64)
    found = stable_order(values)
    expected = sorted(range(len(numbers)), key=numbers.__getitem__)
    assert (list(range(len(numbers))) if found is None else found.tolist()) == expected


@pytest.mark.parametrize("many", [1024, 70_000])
def test_many_rows_of_texts_and_numbers(many: int) -> None:
    chance = random.Random(many)
    keys = [f"customer/{chance.randrange(many):08}" for _ in range(many + 1)]
    values = [chance.choice((-(2**62), 0, 7, chance.randrange(2**62))) for _ in keys]
    schema = ShardSchema(pa.schema([("k", pa.string()), ("v", pa.int64())]), ("k",))
    rows = schema.conform(pa.table({"k": keys, "v": values}), 0).slice(1)
    found = consolidate([rows], schema)
    assert list(zip(found["k"].to_pylist(), found["v"].to_pylist(), strict=True)) == sorted(
        set(zip(keys[1:], values[1:], strict=True))
    )
    assert consolidate([found], schema).equals(found)


@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=6), max_size=6), st.integers(1, 6))
def test_words_are_sorted_whether_they_lie_in_runs_or_not(runs: list[list[int]], each: int) -> None:
    given_words = [word for run in runs for word in sorted(run)]
    words = np.array(given_words, np.uint64)
    falls = sum(later < earlier for earlier, later in pairwise(given_words))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ENGINE, "RUN_ROWS_MIN", each)
        assert ENGINE._has_sorted_runs(words) == (falls * each < len(words))
