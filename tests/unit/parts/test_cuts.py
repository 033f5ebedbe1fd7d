"""Cuts: keys before which there are at most so many rows, told by indexes or counted. Beside a count of the rows."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from persist.parts import KeyRange, ShardSchema, codec, encode_key
from persist.parts.codec import RowGroup
from persist.parts.key_splits import Limit, count_cuts, find_cut, split_row_group
from tests.unit.parts.strategies import Shard

SCHEMA = ShardSchema(pa.schema([("k", pa.int64()), ("v", pa.int64())]), ("k",))
KEYS = st.lists(st.integers(0, 60) | st.integers(0, 5), min_size=1, max_size=120)


def encoded(key: int) -> bytes:
    return encode_key(SCHEMA, (key,))


def table_of(keys: list[int]) -> pa.Table:
    return SCHEMA.conform(pa.table({"k": pa.array(sorted(keys), pa.int64()), "v": np.arange(len(keys))}), 0)


def within(keys: list[int], lower: bytes, upper: bytes | None) -> int:
    return sum(lower <= encoded(key) and (upper is None or encoded(key) < upper) for key in keys)


@example([[0] * 3 + [1] * 30 + [2, 3, 3, 4, 4, 5]], 2, 6)  # a row of the key of a sample is before that sample
@given(st.lists(KEYS, min_size=1, max_size=4), st.integers(0, 61), st.integers(1, 100))
def test_an_index_never_tells_of_fewer_rows_than_there_are(parts: list[list[int]], start: int, limit: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "ROW_GROUP_ROWS", 48)
        shard = Shard(SCHEMA)
        runs = [run for keys in parts for run in shard.stage(table_of(keys))]
        lower = encoded(start)
        found = find_cut(runs, shard.reader(), KeyRange(lower, None), Limit(rows=limit))
        every = [key for keys in parts for key in keys]
        if found.is_stuck:
            assert found.key is None or found.key > lower
            return
        assert within(every, lower, found.key) <= found.within.rows <= limit
        rest = 0 if found.key is None else within(every, found.key, None)
        assert rest <= found.left.rows
        assert found.key is None or found.key > lower


def test_rows_counted_before_the_first_sample_may_come_after_the_cut() -> None:
    """The first sample was the first row: five rows came after the cut, and four were told."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "ROW_GROUP_ROWS", 48)
        shard = Shard(SCHEMA)
        found = find_cut(shard.stage(table_of([0] * 24 + [1] * 5)), shard.reader(), KeyRange(), Limit(rows=28))
    assert (found.key, found.is_stuck) == (encoded(1), False)
    assert found.left.rows >= 5


@given(KEYS, st.integers(1, 30), st.lists(st.integers(1, 119), max_size=4))
def test_cuts_that_are_counted_are_full_and_never_within_a_key(keys: list[int], limit: int, places: list[int]) -> None:
    whole = table_of(keys)
    ends = [0, *sorted({min(place, len(keys)) for place in places}), len(keys)]
    tables = (whole.slice(a, b - a) for a, b in pairwise(ends))
    cuts = [cut for some in count_cuts(tables, SCHEMA, limit) for cut in some]
    lower = b""
    for cut in cuts:
        inside = [key for key in keys if lower <= encoded(key) < cut]
        first = [key for key in keys if encoded(key) == cut]
        assert len(inside) <= limit or len(set(inside)) == 1
        assert first, "a cut is a key that is there"
        assert len(inside) + len(first) > limit, "one key more is too many"
        lower = cut


def test_rows_count_as_often_as_a_column_says_and_what_is_below_zero_does_not() -> None:
    rows = table_of([1, 2, 3, 4]).set_column(3, "__diff", pa.array([3, -5, 2**62, 1]))
    assert list(count_cuts(iter([rows]), SCHEMA, 3, "__diff")) == [[encoded(3), encoded(4)]]


def group(rows: int, samples: list[int], lower: int, upper: int) -> RowGroup:
    return RowGroup(rows, rows, encoded(lower), encoded(upper), tuple(map(encoded, samples)), ())


def test_the_pieces_of_a_row_group_are_what_its_index_tells() -> None:
    regular = group(160, list(range(5, 160, 10)), 0, 159)
    pieces = list(split_row_group(regular, None))
    assert sum(rows for _, rows in pieces) == 160
    assert {rows for _, rows in pieces} <= {0, 10}
    assert next(split_row_group(regular, encoded(100))) == (encoded(95), 10), "what lies before is left out"
    assert list(split_row_group(regular, encoded(160))) == []
    assert list(split_row_group(group(1000, [1, 2], 0, 9), None)) == [(encoded(0), 1000)], "it tells something else"


def test_a_part_that_is_gone_counts_as_a_whole() -> None:
    shard = Shard(SCHEMA)
    [run] = shard.stage(table_of(list(range(500))))
    for part in run.parts:
        if part.key is not None:
            shard.blob.delete([part.key])
    found = find_cut([run], shard.reader(), KeyRange(), Limit(rows=100))
    assert (found.is_stuck, found.left.rows) == (True, 500)
