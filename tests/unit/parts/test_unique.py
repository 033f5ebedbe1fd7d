"""Which keys have more than one row at some time, against the plainest way to find them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from persist.parts import ShardSchema, consolidate
from persist.parts import constraint_checks as module
from persist.parts.constraint_checks import DuplicateKeyCounter, duplicate_keys, key_tuples

SCHEMA = ShardSchema(pa.schema([("key", pa.int64()), ("value", pa.string())]), ("key",))
Update = tuple[int, str, int, int]  # key, value, time, diff

updates = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from("abc"), st.integers(0, 3), st.integers(-2, 2)), max_size=25
)


def table(rows: Sequence[Update]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else ([], [], [], [])
    return pa.table([pa.array(column) for column in columns], schema=SCHEMA.updates_schema)


def crowded_naively(rows: Sequence[Update]) -> list[tuple[int]]:
    found = set()
    for moment in {time for _, _, time, _ in rows}:
        there: Counter[tuple[int, str]] = Counter()
        for key, value, time, diff in rows:
            if time <= moment:
                there[key, value] += diff
        counts: Counter[int] = Counter()
        for (key, _), count in there.items():
            counts[key] += max(count, 0)
        found |= {key for key, count in counts.items() if count > 1}
    return [(key,) for key in sorted(found)]


@given(updates)
def test_the_keys_with_more_than_one_row_at_some_time_are_found_exactly(rows: list[Update]) -> None:
    assert key_tuples(duplicate_keys(table(rows), SCHEMA)) == crowded_naively(rows)


@given(updates, st.lists(st.integers(0, 25), max_size=4))
def test_so_they_are_in_rows_that_come_piece_by_piece(rows: list[Update], cuts: list[int]) -> None:
    whole, crowds = consolidate([table(rows)], SCHEMA), DuplicateKeyCounter(SCHEMA)
    places = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
    for start, end in pairwise(places):
        crowds.add(whole.slice(start, end - start))
    crowds.finish()
    assert (crowds.keys, crowds.count) == (crowded_naively(rows), len(crowded_naively(rows)))


def test_a_key_that_is_replaced_at_one_time_has_one_row_then() -> None:
    assert not len(duplicate_keys(table([(1, "a", 0, 1), (1, "a", 1, -1), (1, "b", 1, 1)]), SCHEMA))


def test_what_was_taken_away_too_often_takes_no_other_row_away() -> None:
    assert key_tuples(duplicate_keys(table([(1, "a", 0, -1), (1, "b", 0, 1), (1, "c", 0, 1)]), SCHEMA)) == [(1,)]


def test_of_many_keys_the_first_are_kept_and_all_are_counted() -> None:
    crowds = DuplicateKeyCounter(SCHEMA)
    for first in range(0, 100, 7):
        crowds.add(table([(key, "a", 0, 2) for key in range(first, min(first + 7, 100))]))
    crowds.finish()
    assert (crowds.count, crowds.keys) == (100, [(key,) for key in range(10)])


def test_a_key_with_more_updates_than_are_held_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEY_ROWS_MAX", 4)
    crowds = DuplicateKeyCounter(SCHEMA)
    for value in "abcdefgh":
        crowds.add(table([(1, value * 2, 0, 1), (1, value * 3, 0, 1)]))
    crowds.add(table([(2, "a", 0, 1)]))
    crowds.finish()
    assert (crowds.count, crowds.keys) == (1, [(1,)])
