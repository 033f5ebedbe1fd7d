"""Marks in the index of attributes: found by instant and by time, left out of scans, and gone with their history."""

from __future__ import annotations

from itertools import pairwise

import pytest

from blob.memory_blobs import MemoryBlob
from persist.attributes.attribute_index import OUTLIVED_MAX, AttributeIndex
from persist.attributes.node_store import NodeCache
from persist.core import commands as c
from persist.core.attribute import MARKS_FROM, AttributeKey, AttributeUpdate
from persist.core.clock_index import Mark, Seal
from persist.core.errors import InvalidUsage, NotReadable, PersistError
from persist.core.frontier import Antichain
from persist.core.ids import Token, WriterId
from persist.core.record import replace
from persist.core.state import State
from tests.support.location import AscendingIds
from tests.support.shard import Shard, numbered

MARKS = 10_000
EVERY_MS = 1_000


@pytest.fixture
def index() -> AttributeIndex:
    return AttributeIndex(MemoryBlob("mem:"), AscendingIds(), NodeCache(10_000_000))


@pytest.fixture
def shard(index: AttributeIndex) -> Shard:
    """Ten thousand marks, at each second one; the newest ten are not in the index yet."""
    shard = Shard()
    shard.one(c.AdvanceUpper(Antichain(MARKS)))
    marks = {number * EVERY_MS: Antichain(number) for number in range(1, MARKS - 9)}
    newest = Mark(MARKS * EVERY_MS, Antichain(MARKS))
    shard.state = replace(shard.state, marks=marks, seal=Seal(newest.at_ms, newest))
    shard.one(index.flush(shard.state))
    recent = {number * EVERY_MS: Antichain(number) for number in range(MARKS - 9, MARKS)}
    shard.state = replace(shard.state, marks=recent)
    assert shard.state.attribute_root.count == MARKS - 10
    return shard


def resolved(index: AttributeIndex, state: State, at_ms: int) -> Mark | None:
    return index.indexed(state, [c.ResolveTime(at_ms)]).marks[at_ms]


def test_the_newest_mark_at_or_before_an_instant_is_found(index: AttributeIndex, shard: Shard) -> None:
    for number in (1, 2, 500, 4_096, MARKS - 10):
        for beyond in (0, 1, 999):
            found = resolved(index, shard.state, number * EVERY_MS + beyond)
            assert found == Mark(number * EVERY_MS, Antichain(number))
    assert resolved(index, shard.state, 999) is None


def test_the_first_mark_beyond_a_time_is_found(index: AttributeIndex, shard: Shard) -> None:
    for time in (0, 1, 499, 4_096, MARKS - 12):
        found = index.indexed(shard.state, [c.TimesShown(time, time)]).spans[time, time]
        assert found[0] == Mark((time + 1) * EVERY_MS, Antichain(time + 1))
    time = MARKS - 5
    assert index.indexed(shard.state, [c.TimesShown(time, time)]).spans[time, time][0].upper <= Antichain(time)


def test_when_many_times_were_written_is_told_page_by_page(index: AttributeIndex, shard: Shard) -> None:
    """In pages of every size, the same as when each time is asked for by itself."""
    for first, last, limit in ((0, MARKS, 4_096), (4_000, 4_009, 2), (MARKS - 15, MARKS - 1, 3), (7, 7, 2)):
        shown: dict[int, int] = {}
        following: int | None = last
        while following is not None:
            command = c.TimesShown(first, following, limit)
            shard.indexed = index.indexed(shard.state, [command])
            page = shard.one(command)
            assert isinstance(page, c.MarksShown)
            assert len(page.marks) <= limit
            for newer, older in pairwise(page.marks):
                assert newer.upper > older.upper
                span = range(older.upper.element or 0, newer.upper.element or 0)
                shown |= {time: newer.at_ms for time in span if first <= time <= following}
            assert page.following is None or page.following < following
            following = page.following
        known = range(max(first, 1), min(last, MARKS - 1) + 1)  # nobody knows what came before the first mark
        assert shown == {time: (time + 1) * EVERY_MS for time in known}


def test_marks_are_no_attributes(index: AttributeIndex, shard: Shard) -> None:
    mine = AttributeKey("fe" * 16)
    update = AttributeUpdate.replace(mine, 7)
    shard.one(c.UpdateAttributes(WriterId(numbered("w", 1)), Token(numbered("i", 1)), (update,)))
    shard.one(index.flush(shard.state))
    page = index.page(shard.state, AttributeKey("0" * 32), None, 100)
    assert (page.values, page.following) == ({mine: 7}, None)
    with pytest.raises(InvalidUsage, match="is maintained by the shard"):
        shard.one(
            c.UpdateAttributes(
                WriterId(numbered("w", 1)), Token(numbered("i", 2)), (AttributeUpdate.replace(MARKS_FROM, 1),)
            )
        )


def test_marks_whose_history_is_forgotten_leave_in_bounded_steps(index: AttributeIndex, shard: Shard) -> None:
    since = 9_000
    shard.state = replace(shard.state, since=Antichain(since))
    before = shard.state.attribute_root.count
    shard.one(index.flush(shard.state))
    gone = before + 9 - shard.state.attribute_root.count
    assert gone == OUTLIVED_MAX
    for _ in range(3):
        shard.one(index.flush(shard.state))
    assert shard.state.attribute_root.count <= MARKS - since + 3
    for number in range(since, MARKS):
        assert resolved(index, shard.state, number * EVERY_MS) == Mark(number * EVERY_MS, Antichain(number))


def test_a_refusal_names_the_first_instant_that_is_known(index: AttributeIndex, shard: Shard) -> None:
    """Also where the oldest mark lies in the index; so asking for that one is answered."""
    shard.is_stamped = shard.is_checked = True
    shard.now_ms = (MARKS + 2) * EVERY_MS

    def asked(at_ms: int) -> c.Result | PersistError:
        shard.indexed = index.indexed(shard.state, [c.ResolveTime(at_ms)])
        return shard.commit(c.ResolveTime(at_ms))[0]

    refused = asked(EVERY_MS - 1)
    assert isinstance(refused, NotReadable)
    assert refused.details["first_ms"] == EVERY_MS
    assert "knows wall clocks from 1000 ms" in refused.message
    assert asked(EVERY_MS) == c.TimeResolved(Antichain(1), EVERY_MS)
    shard.state = replace(shard.state, since=Antichain(9_000))
    for _ in range(4):
        shard.one(index.flush(shard.state))
    refused = asked(EVERY_MS)
    assert isinstance(refused, NotReadable)
    first_ms = refused.details["first_ms"]
    assert isinstance(asked(first_ms), c.TimeResolved)
    assert isinstance(asked(first_ms - 1), NotReadable)


def test_where_no_mark_is_in_the_index_the_first_instant_is_that_of_the_state(index: AttributeIndex) -> None:
    """Attributes may be there alone."""
    shard = Shard()
    writer = WriterId(numbered("w", 1))
    update = AttributeUpdate.replace(AttributeKey("fe" * 16), 7)
    shard.one(c.UpdateAttributes(writer, Token(numbered("i", 1)), (update,)))
    shard.one(index.flush(shard.state))
    newest = Mark(9_000, Antichain(1))
    shard.state = replace(shard.state, seal=Seal(9_500, newest))
    shard.indexed = index.indexed(shard.state, [c.ResolveTime(8_999)])
    [refused] = shard.commit(c.ResolveTime(8_999))
    assert isinstance(refused, NotReadable)
    assert refused.details["first_ms"] == 9_000


def test_attributes_that_go_to_the_index_before_the_first_mark_does(index: AttributeIndex) -> None:
    """The mark of a new shard lies at instant 0, before which there is nothing to look for."""
    shard = Shard()
    writer = WriterId(numbered("w", 1))
    for number, marks in ((1, {}), (2, {0: Antichain(0)}), (3, {})):
        update = AttributeUpdate.replace(AttributeKey("fe" * 16), number)
        shard.one(c.UpdateAttributes(writer, Token(numbered("i", number)), (update,)))
        shard.one(c.AdvanceUpper(Antichain(number)))
        newest = Mark(number * EVERY_MS, Antichain(number))
        shard.state = replace(shard.state, marks=marks, seal=Seal(newest.at_ms, newest), since=Antichain(number - 1))
        span = (number - 1, number - 1)
        marks = index.indexed(shard.state, [c.TimesShown(*span)]).spans.get(span, ())
        assert all(mark.upper <= Antichain(number - 1) for mark in marks)
        shard.one(index.flush(shard.state))
        assert shard.state.marks == {}
