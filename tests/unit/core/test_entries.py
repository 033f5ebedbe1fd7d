"""Entries are mappings like any other, whatever came before; only what they cost differs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from persist.core.frontier import Antichain
from persist.core.ids import ReaderId, SeqNo
from persist.core.persistent_map import CHANGES_MIN, Entries, difference, watched, with_changes
from persist.core.record import replace
from persist.core.state import LeasedReader
from persist.core.transitions import expire_lapsed
from persist.formats.state_frames import decode_state, encode_state
from tests.support.shard import Shard

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


READER = LeasedReader(Antichain(0), SeqNo(1), 0, 1_000, "test")
readers = st.dictionaries(st.integers(0, 5).map("r{}".format), st.integers(0, 4), max_size=3)


@given(readers, st.lists(st.tuples(readers, st.lists(keys.map("r{}".format), max_size=3), st.booleans()), max_size=12))
def test_the_least_seqno_that_readers_hold_is_exact_whenever_somebody_asks(first: dict, steps: list) -> None:
    state = replace(Shard().state, seqno=SeqNo(9), leased_readers=watched({k: _at(n) for k, n in first.items()}))
    for changed, deleted, asks in steps:
        gone = set(deleted) - set(changed)
        found = with_changes(state.leased_readers, {k: _at(n) for k, n in changed.items()}, gone)
        state = replace(state, leased_readers=found)
        if asks:
            assert state.seqno_since == min((reader.seqno for reader in found.plain().values()), default=9)


def _at(seqno: int) -> LeasedReader:
    return replace(READER, seqno=SeqNo(seqno))


class _Counted(dict):
    """A dict that counts how often all of it was looked at."""

    looks = 0

    def __iter__(self):
        self.looks += 1
        return super().__iter__()

    def keys(self):
        self.looks += 1
        return super().keys()


def test_leases_that_were_read_from_bytes_are_not_looked_at_by_every_commit() -> None:
    leases = {ReaderId(f"r{n:032x}"): replace(READER, heartbeat_ms=n) for n in range(5)}
    read = decode_state(encode_state(replace(Shard().state, leased_readers=leases)))
    assert read.leased_readers == leases
    assert isinstance(read.leased_readers, Entries)

    counted = _Counted(leases)
    state = replace(read, leased_readers=watched(counted))
    for now_ms in range(999):
        assert expire_lapsed(state, now_ms) is state
        assert state.seqno_since == 1
    assert 1 <= counted.looks <= 3
    assert set(expire_lapsed(state, 1_002).leased_readers) == {ReaderId(f"r{n:032x}") for n in range(2, 5)}
