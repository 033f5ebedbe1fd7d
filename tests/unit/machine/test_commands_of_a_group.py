"""Commands that are committed together, and what an insert shares with those before it."""

from __future__ import annotations

from persist.core import commands as c
from persist.core.attribute import AttributeUpdate
from persist.core.batch import Run
from persist.core.errors import AttributeMismatch
from persist.core.frontier import EMPTY, Antichain
from persist.core.ids import Token, WriterId
from persist.core.record import replace
from tests.support.shard import Shard, make_part, make_run, numbered

KEY = "ab" * 16


def by(number: int) -> tuple[WriterId, Token]:
    return WriterId(numbered("w", number)), Token(numbered("i", number))


def at(lower: int, upper: int) -> c.Appended:
    return c.Appended(Antichain(lower), Antichain(upper))


def rows(number: int, time: int = 0, diff: int = 1) -> tuple[Run, ...]:
    part = make_part(number, times=(time, time), diff_sum=diff, inline=10)
    return (make_run(replace(part, diff_min=diff, diff_max=diff)),)


def test_an_insert_does_not_share_the_time_of_another_write_after_one_without_rows() -> None:
    shard = Shard()
    shard.commit(c.Insert(*by(1), rows(1)))
    noted = c.Insert(*by(2), (), (AttributeUpdate.replace(KEY, 7),))
    appended = c.CompareAndAppend(*by(3), Antichain(1), Antichain(2), rows(3, 1))
    assert shard.commit(noted, appended, c.Insert(*by(4), rows(4))) == [at(1, 1), at(1, 2), at(2, 3)]


def test_inserts_after_one_without_rows_share_a_time() -> None:
    shard = Shard()
    noted = c.Insert(*by(1), (), (AttributeUpdate.replace(KEY, 7),))
    assert shard.commit(noted, c.Insert(*by(2), rows(2)), c.Insert(*by(3), rows(3))) == [at(0, 0), at(0, 1), at(0, 1)]


def fed_with_a_pending_drop() -> Shard:
    shard = Shard()
    shard.commit(c.Append(*by(1), Antichain(0), Antichain(2), rows(1)))
    drop = c.Rewrite(*by(2), EMPTY, 1, c.DROP_BEFORE, tombstone=Antichain(1))
    assert shard.commit(drop) == [at(2, 2)]
    assert shard.state.drops
    return shard


def test_a_retraction_that_joins_an_insert_withdraws_the_pending_drop() -> None:
    """The retracted row may be one that the drop removes."""
    shard = fed_with_a_pending_drop()
    assert shard.commit(c.Insert(*by(3), rows(3)), c.Insert(*by(4), rows(4, diff=-1))) == [at(2, 3), at(2, 3)]
    assert shard.state.drops == ()


def test_a_pending_drop_stays_where_rows_are_only_added() -> None:
    shard = fed_with_a_pending_drop()
    shard.commit(c.Insert(*by(3), rows(3)), c.Insert(*by(4), rows(4)))
    assert len(shard.state.drops) == 1


def test_an_append_of_an_empty_interval_changes_its_attributes_or_says_why_not() -> None:
    shard = Shard()
    shard.commit(c.Append(*by(1), Antichain(0), Antichain(1), rows(1)))
    one = (AttributeUpdate.replace(KEY, 7),)
    assert shard.commit(c.Append(*by(2), Antichain(1), Antichain(1), (), one)) == [at(1, 1)]
    assert [*shard.state.attributes.values()] == [7]
    other = (AttributeUpdate.replace_if_equals(KEY, 8, 99),)
    (refused,) = shard.commit(c.Append(*by(3), Antichain(1), Antichain(1), (), other))
    assert isinstance(refused, AttributeMismatch)


def test_an_insert_of_unique_keys_ends_that_a_shard_is_fed_by_append() -> None:
    shard = Shard()
    shard.commit(c.Append(*by(1), Antichain(0), Antichain(1), rows(1)))
    assert shard.state.retention.appended
    shard.commit(c.Rewrite(*by(2), Antichain(1), 0, c.INSERT, rows(2), cut=0))
    assert not shard.state.retention.appended


def test_an_insert_does_not_join_the_time_of_an_earlier_commit_after_a_retry() -> None:
    shard = Shard()
    first = c.Insert(*by(1), rows(1))
    assert shard.commit(first) == [at(0, 1)]
    assert shard.commit(first, c.Insert(*by(2), rows(2))) == [at(0, 1), at(1, 2)]


def test_inserts_share_a_time_only_if_nothing_changed_the_shard_between_them() -> None:
    """What came between may rest on the rows of the first, as the end of a pending drop does."""
    shard = Shard()
    between = c.UpdateAttributes(*by(5), (AttributeUpdate.replace(KEY, 7),))
    assert shard.commit(c.Insert(*by(1), rows(1)), c.Insert(*by(2), rows(2))) == [at(0, 1), at(0, 1)]
    first, _, second = shard.commit(c.Insert(*by(3), rows(3)), between, c.Insert(*by(4), rows(4)))
    assert (first, second) == (at(1, 2), at(2, 3))
