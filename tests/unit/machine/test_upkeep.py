"""Upkeep is told of a State and answers with duties: values, each under way once at a time."""

from __future__ import annotations

from persist.commit.commit_plan import FlushIndex, Merge, RollUp
from persist.commit.upkeep import Duty, Upkeep
from persist.core import commands as c
from persist.core.attribute import AttributeUpdate
from persist.core.ids import SeqNo, Token, WriterId
from persist.core.merge_plan import INLINE_BATCHES
from persist.core.record import replace
from persist.core.state import Policy, Rollup, State
from tests.scripts.verbs import parse_attribute_key
from tests.support.shard import Shard, make_part, make_run, numbered

POLICY = Policy(rollup_every=8, attributes_flush_at=3)
WRITER = WriterId(numbered("w", 1))


def shard_of(batches: int, inline: int | None = 100) -> Shard:
    """A shard with so many batches of one row each, whose newest rollup is that of v1."""
    shard = Shard(POLICY)
    shard.state = replace(shard.state, rollups={SeqNo(1): Rollup("key", 1)})
    shard.one(c.RegisterWriter(WRITER, 60_000))
    for number in range(1, batches + 1):
        runs = (make_run(make_part(number, inline=inline)),)
        shard.one(c.Insert(WRITER, Token(numbered("i", number)), runs))
    return shard


def rolled_up(state: State) -> State:
    return replace(state, rollups={state.seqno: Rollup("key", 1)})


def test_a_young_shard_asks_for_nothing() -> None:
    assert Upkeep(POLICY, merges=True).due(shard_of(3).state) == []


def test_a_rollup_is_asked_for_once_while_it_is_under_way() -> None:
    upkeep, shard = Upkeep(POLICY, merges=False), shard_of(7)
    asked = shard.state
    [duty] = upkeep.due(asked)
    assert duty == Duty("rollup", RollUp(asked))
    shard.one(c.RegisterWriter(WriterId(numbered("w", 2)), 60_000))
    assert upkeep.due(shard.state) == []
    upkeep.ended(duty)
    assert upkeep.due(shard.state) == [Duty("rollup", RollUp(shard.state))]


def test_many_attributes_ask_for_a_flush() -> None:
    upkeep, shard = Upkeep(POLICY, merges=False), shard_of(0)
    for number in range(1, 4):
        assert upkeep.due(shard.state) == []
        update = AttributeUpdate.replace(parse_attribute_key(f"a{number}"), number)
        shard.one(c.UpdateAttributes(WRITER, Token(numbered("i", number)), (update,)))
    assert upkeep.due(shard.state) == [Duty("attributes", FlushIndex())]


def test_many_inline_batches_ask_for_a_merge_of_them() -> None:
    state = rolled_up(shard_of(INLINE_BATCHES).state)
    upkeep = Upkeep(POLICY, merges=True)
    [duty] = upkeep.due(state)
    assert duty == Duty("inline", Merge(state, state.trace.batches), frozenset(p.id for p in state.trace.parts()))
    assert upkeep.merging == duty.inputs
    upkeep.ended(duty)
    assert upkeep.merging == frozenset()


def test_a_process_without_small_merges_is_asked_for_none() -> None:
    assert Upkeep(POLICY, merges=False).due(rolled_up(shard_of(INLINE_BATCHES).state)) == []


def test_what_was_looked_at_is_not_looked_at_again_until_the_batches_change() -> None:
    shard = shard_of(INLINE_BATCHES)
    state = rolled_up(shard.state)
    upkeep = Upkeep(POLICY, merges=True)
    [duty] = upkeep.due(state)
    upkeep.ended(duty)
    assert upkeep.due(state) == []
    shard.state = state
    shard.one(c.Insert(WRITER, Token(numbered("i", 99)), (make_run(make_part(99, inline=100)),)))
    assert [duty.kind for duty in upkeep.due(shard.state)] == ["inline"]


def test_no_two_merges_have_a_part_in_common() -> None:
    """What is under way is left out of the next merge, and a merge of the same kind waits for its end."""
    shard = shard_of(INLINE_BATCHES)
    shard.state = rolled_up(shard.state)
    upkeep = Upkeep(POLICY, merges=True)
    [first] = upkeep.due(shard.state)
    for number in range(100, 100 + INLINE_BATCHES):
        shard.one(c.Insert(WRITER, Token(numbered("i", number)), (make_run(make_part(number, inline=100)),)))
        shard.state = rolled_up(shard.state)
        assert upkeep.due(shard.state) == []
    upkeep.ended(first)
    shard.one(c.Insert(WRITER, Token(numbered("i", 999)), (make_run(make_part(999, inline=100)),)))
    [second] = upkeep.due(shard.state)
    assert len(second.inputs) == 2 * INLINE_BATCHES + 1
