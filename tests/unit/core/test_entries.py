"""Entries are mappings like any other, whatever came before; only what they cost differs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from persist.core.entries import CHANGES_MIN, Entries, difference, with_changes

keys = st.integers(0, 60)
dicts = st.dictionaries(keys, st.none() | st.integers(0, 3))
changes = st.lists(st.tuples(dicts, st.lists(keys, max_size=5)), max_size=12)


@given(dicts, changes)
def test_it_is_the_dict_that_the_same_changes_make(first: dict[int, int | None], steps: list) -> None:
    expected, found = dict(first), first
    for changed, deleted in steps:
        gone = [key for key in deleted if key not in changed]
        before, was = found, dict(expected)
        found = with_changes(found, changed, gone)
        expected.update(changed)
        for key in gone:
            expected.pop(key, None)
        assert dict(found) == expected == found
        assert found.plain() == expected
        assert list(found.plain()) == list(found)
        assert dict(found.items()) == expected
        assert list(found.values()) == [expected[key] for key in found]
        assert len(found) == len(expected)
        assert dict(before) == was
        assert all(
            (key in found) == (key in expected) and found.get(key, 9) == expected.get(key, 9) for key in range(61)
        )


@given(dicts, changes, dicts)
def test_a_difference_leads_from_one_to_the_other(first: dict[int, int | None], steps: list, last: dict) -> None:
    versions = [first, last]
    for changed, deleted in steps:
        versions.insert(-1, with_changes(versions[-2], changed, set(deleted) - set(changed)))
    for before in versions:
        for after in versions:
            changed, deleted = difference(before, after)
            assert with_changes(before, changed, deleted) == after
            assert (changed, deleted) == ({}, ()) or before != after


def test_a_change_shares_what_is_there_and_now_and_then_folds_it() -> None:
    found: Entries[int, int] = with_changes(dict.fromkeys(range(10_000), 0), {})
    folded = 0
    for step in range(1_000):
        found = with_changes(found, {step: 1})
        folded += not found._changes
        assert len(found._changes) <= CHANGES_MIN + 100
    assert 5 < folded < 12
