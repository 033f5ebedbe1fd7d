"""Upkeep is told of a State and answers with duties: values, each under way once at a time."""

from __future__ import annotations

import threading
from typing import Any
from unittest.mock import patch

import pytest

from persist.commit import background_duties
from persist.commit.background_duties import ROLLUP_BYTES, ROLLUP_GONE, TURNS_LEFT_MAX, Duty, Upkeep
from persist.commit.commit_plan import BatchMerge, FlushIndex, RollUp
from persist.core import commands as c
from persist.core.attribute import AttributeUpdate
from persist.core.audit_log import CommandEntry, Committed, TokenOutcome
from persist.core.batch import HollowBatch, Run
from persist.core.frontier import MINIMUM
from persist.core.ids import SeqNo, Token, WriterId
from persist.core.merge_plan import count_newest
from persist.core.record import replace
from persist.core.shard_settings import ShardSettings
from persist.core.state import ROLLUP_LEAST, Policy, Rollup, State
from persist.core.transitions.outcomes_and_audit import INFO_WEIGHT_BYTES
from tests.scripts.verbs import parse_attribute_key
from tests.support.shard import Shard, make_part, make_run, numbered

INLINE_BATCHES = 16
POLICY = Policy(rollup_every=8, overlay_flush_at=3, inline_batches=INLINE_BATCHES)
WRITER = WriterId(numbered("w", 1))


def shard_of(batches: int, inline: int | None = 100) -> Shard:
    """A shard with so many batches of one row each, whose newest rollup is that of v1."""
    shard = Shard(POLICY)
    shard.state = replace(shard.state, rollups={SeqNo(1): Rollup("key", 1)})
    for number in range(1, batches + 1):
        runs = (make_run(make_part(number, inline=inline)),)
        shard.one(c.Insert(WRITER, Token(numbered("i", number)), runs))
    return shard


def rolled_up(state: State) -> State:
    return replace(state, rollups={state.seqno: Rollup("key", 1)})


def test_a_young_shard_asks_for_nothing() -> None:
    assert Upkeep(POLICY, merges=True).due(shard_of(3).state) == []


def test_one_look_at_a_time_sees_what_the_one_before_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has committed looks while the next one commits, and looks too."""
    upkeep, earlier, later = Upkeep(POLICY, merges=True), shard_of(3).state, shard_of(5).state
    looks: list[threading.Thread] = []

    def newest(*asked: Any, **options: Any) -> int:
        if not looks:
            looks.append(threading.Thread(target=upkeep.due, args=(later,)))
            looks[0].start()
            looks[0].join(0.2)
            assert looks[0].is_alive()
        return count_newest(*asked, **options)

    monkeypatch.setattr(background_duties, "count_newest", newest)
    upkeep.due(earlier)
    looks[0].join()
    assert upkeep._inline == len(later.trace.batches)


def test_a_rollup_is_asked_for_once_while_it_is_under_way() -> None:
    upkeep, shard = Upkeep(POLICY, merges=False), shard_of(8)
    asked = shard.state
    [duty] = upkeep.due(asked)
    assert duty == Duty("rollup", RollUp(asked))
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
    assert duty == Duty("inline", BatchMerge(state, state.trace.batches), frozenset(p.id for p in state.trace.parts()))
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


# --- turns: a flush in the place of a rollup

KEEPING = ShardSettings(7 * 86_400_000, 1_000, 1)
ENTRY = CommandEntry("insert", MINIMUM, MINIMUM)
OUTCOME = TokenOutcome(MINIMUM, MINIMUM, b"", 0)


def at_version(
    seqno: int, rollup: int, entries: int = 0, outcomes: int = 0, marks: int = 0, info_bytes: int = 0
) -> State:
    """A State that holds so much, whose newest rollup is that of this version."""
    return replace(
        Shard(POLICY).state,
        seqno=SeqNo(seqno),
        settings=KEEPING,
        rollups={SeqNo(rollup): Rollup("key", 1)},
        entries={SeqNo(number): Committed(0, (ENTRY,)) for number in range(seqno - entries + 1, seqno + 1)},
        outcomes={numbered("", number): OUTCOME for number in range(outcomes)},
        marks=dict.fromkeys(range(marks), MINIMUM),
        info_bytes=info_bytes,
    )


def kinds(state: State, upkeep: Upkeep | None = None) -> list[str]:
    upkeep = upkeep or Upkeep(replace(POLICY, overlay_flush_at=40), merges=False)
    duties = upkeep.due(state)
    for duty in duties:
        upkeep.ended(duty)
    return [duty.kind for duty in duties]


@pytest.mark.parametrize(("kind", "few", "half", "full"), [
    ("entries", {"entries": 9}, {"entries": 10}, {"entries": 20}),
    ("entries", {"info_bytes": 20 * INFO_WEIGHT_BYTES - 1}, {"info_bytes": 20 * INFO_WEIGHT_BYTES}, {"entries": 21}),
    ("outcomes", {"outcomes": 19}, {"outcomes": 20}, {"outcomes": 40}),
    ("attributes", {"marks": 19}, {"marks": 20}, {"marks": 40}),
])  # fmt: skip
def test_a_flush_waits_for_the_turn_of_a_rollup_and_takes_its_place(
    kind: str, few: dict[str, int], half: dict[str, int], full: dict[str, int]
) -> None:
    assert kinds(at_version(47, 40, **half)) == [], "its turn has not come"
    assert kinds(at_version(48, 40, **few)) == ["rollup"]
    assert kinds(at_version(48, 40, **half)) == [kind]
    assert kinds(at_version(47, 40, **full)) == [kind], "so much waits for no turn"


def test_after_a_flush_the_next_turn_is_that_of_a_rollup() -> None:
    """Also where files cannot be written."""
    upkeep = Upkeep(replace(POLICY, overlay_flush_at=40), merges=False)
    assert kinds(at_version(48, 40, entries=10), upkeep) == ["entries"]
    assert kinds(at_version(49, 40, entries=11), upkeep) == [], "it was asked for, and may have failed"
    assert kinds(at_version(55, 40), upkeep) == []
    assert kinds(at_version(56, 40, entries=18), upkeep) == ["rollup"]
    assert kinds(at_version(58, 50), upkeep) == ["rollup"]


def test_what_is_not_kept_or_is_closed_is_not_flushed() -> None:
    state = at_version(48, 40, entries=30)
    assert kinds(replace(state, settings=ShardSettings())) == ["rollup"]
    shard = Shard(POLICY)
    shard.one(c.Drop())
    assert (
        kinds(replace(shard.state, entries=state.entries, outcomes={numbered("", n): OUTCOME for n in range(50)})) == []
    )


# --- rollups by what was written

RARE = Policy(rollup_every=100)


def rollups_of(commits: list[tuple[int, int]], others: int = 0, policy: Policy = RARE) -> list[int]:
    """After which of these commits, each of so many bytes and blobs that are gone, rollups were made at once."""
    upkeep, state = Upkeep(policy, merges=False), at_version(1, rollup=1)
    state = replace(state, seqno=SeqNo(1 + others))
    made = []
    for number, (nbytes, gone) in enumerate(commits, 1):
        state = replace(state, seqno=SeqNo(state.seqno + 1))
        upkeep.committed(state.seqno, nbytes, gone)
        for duty in upkeep.due(state):
            assert isinstance(duty.task, RollUp)
            upkeep.ended(duty)
            made.append(number)
            state = replace(state, rollups={state.seqno: Rollup("key", 1)})
    return made


def test_a_rollup_is_due_after_many_commits_that_write_little() -> None:
    assert rollups_of([(1, 0)] * 250) == [100, 200]


def test_a_rollup_is_due_after_fewer_commits_that_write_much() -> None:
    assert rollups_of([(ROLLUP_BYTES // 40, 0)] * 90) == [41, 82]
    assert rollups_of([(ROLLUP_BYTES, 0)] * 70) == [32, 64], "and never after fewer than the least"


def test_a_rollup_is_due_once_there_is_something_to_delete() -> None:
    gone = ROLLUP_GONE // 8  # by every eighth commit
    assert rollups_of([(1, gone if number % 8 == 0 else 0) for number in range(130)]) == [57, 121]


def test_the_commits_of_others_weigh_most() -> None:
    """What they wrote is not known here."""
    assert rollups_of([(1, 0)] * 30, others=ROLLUP_LEAST - 1) == []
    assert rollups_of([(1, 0)] * 30, others=ROLLUP_LEAST) == [1]


def test_what_was_written_before_the_newest_rollup_does_not_count() -> None:
    upkeep, state = Upkeep(RARE, merges=False), at_version(1, rollup=1)
    for seqno in range(2, 61):
        upkeep.committed(SeqNo(seqno), ROLLUP_BYTES, 0)
    late = replace(state, seqno=SeqNo(60), rollups={SeqNo(60 - ROLLUP_LEAST + 1): Rollup("key", 1)})
    assert upkeep.due(late) == []
    earlier = {SeqNo(60 - ROLLUP_LEAST): Rollup("key", 1)}
    assert [duty.kind for duty in upkeep.due(replace(late, rollups=earlier))] == ["rollup"]


def test_upkeep_that_another_process_is_at_is_left_to_it_for_a_while() -> None:
    """That process may have been stopped."""
    upkeep, duty = Upkeep(POLICY, merges=False), Duty("rollup", RollUp(shard_of(1).state))
    assert [upkeep.is_left(duty, is_others=True) for _ in range(TURNS_LEFT_MAX + 1)] == [True] * TURNS_LEFT_MAX + [
        False
    ]
    assert not upkeep.is_left(duty, is_others=False)
    assert upkeep.is_left(duty, is_others=True)


def test_a_large_state_is_written_once_the_log_has_grown_by_as_much() -> None:
    upkeep, state = Upkeep(RARE, merges=False), at_version(1, rollup=1)
    state = replace(state, rollups={SeqNo(1): Rollup("key", 5 * ROLLUP_BYTES)})
    for seqno in range(2, 60):
        upkeep.committed(SeqNo(seqno), ROLLUP_BYTES // 10 + 1, 0)
        found = [duty.kind for duty in upkeep.due(replace(state, seqno=SeqNo(seqno)))]
        assert found == (["rollup"] if seqno == 51 else []), seqno


def test_only_batches_that_came_are_looked_at_for_bundles() -> None:
    policy = replace(POLICY, plain_parts_max=2)
    upkeep, shard, looked = Upkeep(policy, merges=False), Shard(policy), []
    shard.state = replace(shard.state, rollups={SeqNo(1): Rollup("key", 1)})

    def to_bundle(batch: HollowBatch, *_: object) -> tuple[Run, ...]:
        looked.append(batch)
        return batch.runs if batch.part_count > 2 else ()

    def appended(number: int, parts: int) -> list[Duty]:
        runs = tuple(make_run(make_part(10 * number + n)) for n in range(parts))
        shard.one(c.Insert(WRITER, Token(numbered("i", number)), runs))
        return upkeep.due(rolled_up(shard.state))

    with patch("persist.commit.background_duties.to_bundle", to_bundle):
        assert [appended(number, 1) for number in (1, 2, 3)] == [[], [], []]
        assert len(looked) == 3
        [duty] = appended(4, 3)
        assert (duty.kind, duty.inputs) == ("bundles", frozenset(p.id for p in shard.state.trace.batches[-1].parts()))
        upkeep.ended(duty)
        [again] = appended(5, 1)
        assert again.inputs == duty.inputs
        upkeep.ended(again)
        whole = shard.state.trace
        shard.state = replace(shard.state, trace=whole.splice(0, len(whole.batches), [whole.batches[0]]))
        assert upkeep.due(rolled_up(shard.state)) == []
