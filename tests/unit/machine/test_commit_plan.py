"""A plan is a function of the State, the commands and what it is given; what it needs done it says."""

from __future__ import annotations

import pytest

from persist.commit.commit_plan import BatchMerge, Commit, PlanInput, Supply, Task, plan_commit, supplied
from persist.core import commands as c
from persist.core import state_diff
from persist.core.audit_log import NOBODY, Caller
from persist.core.errors import Overloaded, Unavailable
from persist.core.frontier import EMPTY, Antichain
from persist.core.ids import ReaderId, Token, WriterId
from persist.core.record import replace
from persist.core.state import Policy, State
from persist.core.transitions.context import SOUND, Context
from persist.core.truncations_and_drops import RowDrop
from tests.support.shard import Shard, make_part, make_run, numbered

ROOM = 1_000
POLICY = Policy(inline_shard_bytes_max=ROOM, inline_part_bytes_max=600, batches_max=100, inline_batches=16)
WRITER = WriterId(numbered("w", 1))
Tasks = list[BatchMerge]


@pytest.fixture
def base() -> State:
    shard = Shard(POLICY)
    return shard.state


def insert(number: int, *, inline: int | None = 100) -> c.Insert:
    return c.Insert(WRITER, Token(numbered("i", number)), (make_run(make_part(number, inline=inline)),))


def given(now_ms: int = 5, policy: Policy = POLICY) -> PlanInput:
    return PlanInput(Context(now_ms, policy), "commit", True, [SOUND] * 1_000)


def planned(
    base: State, *commands: c.Command, told: PlanInput | None = None, supplies: list[Supply] | None = None
) -> tuple[Commit, Tasks]:
    """The commit, and the tasks that were done for it: with these supplies, then as the worker of blobs does them."""
    tasks: Tasks = []

    def supply(task: Task) -> Supply:
        assert isinstance(task, BatchMerge)
        tasks.append(task)
        return supplies.pop(0) if supplies else done(task)

    return supplied(plan_commit(base, commands, told or given()), supply), tasks


def done(task: BatchMerge) -> c.MergeResult:
    parts = [part for batch in task.batches for part in batch.parts()]
    output = make_part(900 + int(parts[0].id[1:]), rows=len(parts), times=(0, parts[-1].time_max))
    return c.MergeResult(tuple(part.id for part in parts), (make_run(output),), task.state.since)


def test_a_plan_is_a_function_of_its_arguments(base: State) -> None:
    first, _ = planned(base, insert(1), insert(2))
    second, _ = planned(base, insert(1), insert(2))
    assert first == second
    assert first.diff is not None
    assert state_diff.apply(first.diff, base) == first.following
    assert (first.diff.commit_id, first.following.seqno) == ("commit", base.seqno + 1)
    assert first.upkeep is first.following


def test_a_refusal_that_upkeep_ends_asks_for_upkeep(base: State) -> None:
    commit, _ = planned(base, insert(1, inline=None), told=given(policy=Policy(batches_max=0)))
    assert isinstance(commit.outcomes[0], Overloaded)
    assert (commit.diff, commit.upkeep) == (None, base)


def test_the_walltime_is_that_of_the_committer_whatever_stood_there(base: State) -> None:
    """So a State that a wrong clock spoilt is right again after the next commit."""
    later, _ = planned(base, insert(1), told=given(now_ms=50))
    earlier, _ = planned(later.following, insert(2), told=given(now_ms=20))
    assert (later.following.walltime_ms, earlier.following.walltime_ms) == (50, 20)


def test_rows_without_room_go_to_one_blob_for_the_group(base: State) -> None:
    """Those that were there before stay: nobody's commit merges what others wrote."""
    before, _ = planned(base, *[insert(number) for number in range(1, 3)])
    group = [insert(number) for number in range(3, 13)]
    commit, [task] = planned(before.following, *group)
    assert task.inputs == {part.id for command in group for part in command.runs[0].parts}
    kept, blob = commit.following.trace.parts(), list(commit.following.trace.parts())[-1]
    assert [part.is_inline for part in kept] == [True, True, False]
    assert (blob.rows, commit.following.trace.inline_bytes) == (10, 200)
    assert all(isinstance(outcome, c.Appended) for outcome in commit.outcomes)


def test_a_merge_of_earlier_batches_in_the_group_stays_apart(base: State) -> None:
    """Whatever changed before them, only the rows of this group go to its blob."""
    before, _ = planned(base, *[insert(number, inline=None) for number in (1, 2)])
    before, _ = planned(before.following, insert(3, inline=None))
    before, _ = planned(before.following, insert(4))
    earlier = tuple(part.id for part in list(before.following.trace.parts())[:3])
    merge = c.MergeResult(earlier, (make_run(make_part(800, rows=3, times=(0, 1))),), before.following.since)
    commit, [task] = planned(before.following, merge, insert(5, inline=500))
    assert task.inputs == {numbered("p", 5)}
    assert [len(list(batch.parts())) for batch in commit.following.trace.batches] == [1, 1, 1]


def test_a_group_of_many_rows_leaves_them_in_a_blob_although_there_is_room(base: State) -> None:
    few, none = planned(base, insert(1), insert(2))
    many, [task] = planned(base, insert(1), insert(2), insert(3))
    assert (none, len(task.inputs)) == ([], 3)
    assert (few.following.trace.inline_bytes, many.following.trace.inline_bytes) == (200, 0)


def test_rows_in_blobs_stay_as_they_are_beside_inline_ones(base: State) -> None:
    commit, [task] = planned(base, insert(1, inline=600), insert(2, inline=None), insert(3, inline=600))
    assert task.inputs == {numbered("p", 1), numbered("p", 3)}
    [batch] = commit.following.trace.batches
    assert {part.id for part in batch.parts()} == {numbered("p", 2), numbered("p", 901)}


NOT_APPLIED = c.MergeResult((numbered("p", 777),), (), Antichain(0))  # as one whose blob may have been swept


@pytest.mark.parametrize("supply", [None, NOT_APPLIED, Unavailable("away")], ids=["none", "not applied", "away"])
def test_without_that_blob_what_finds_no_room_is_refused(base: State, supply: Supply) -> None:
    group = [insert(number) for number in range(1, 13)]
    commit, tasks = planned(base, *group, supplies=[supply])
    assert len(tasks) == 1
    assert commit.following.trace.inline_bytes == ROOM
    refusal = Unavailable if isinstance(supply, Unavailable) else Overloaded
    assert [type(outcome) for outcome in commit.outcomes] == [c.Appended] * 10 + [refusal] * 2


def test_a_drop_lands_beside_other_commands_of_its_commit(base: State) -> None:
    """Its time is not the upper of the State before: the commit was taken for one that drops what was forgotten."""

    def drop(number: int, as_of: int) -> c.Rewrite:
        return c.Rewrite(WRITER, Token(numbered("i", number)), EMPTY, 0, c.DROP_BEFORE, tombstone=Antichain(as_of + 1))

    commit, _ = planned(
        base, insert(1), drop(2, 0), c.AdvanceUpper(Antichain(4)), insert(3), drop(4, 4), c.ForgetOutlived()
    )
    assert commit.following.drops == (RowDrop(1, 1), RowDrop(5, 5))
    held = c.RegisterReader(ReaderId(numbered("r", 1)), Antichain(0), 60_000)
    moved = c.DowngradeSince(held.reader, Antichain(5), commit.following.seqno)
    settled, _ = planned(commit.following, held, moved, c.ForgetOutlived())
    assert (settled.following.drops, settled.following.floor) == ((), 5)
    assert list(settled.following.trace.parts()) == []


def test_what_callers_said_in_the_commit_of_an_erasure_before_it_goes_too(base: State) -> None:
    """It may name the rows. What came before in the commit history went already."""
    written, _ = planned(base, insert(1))
    before, after = c.SetTag("before", 0), c.SetTag("after", 1)  # the erasure takes the time 1
    new = c.NewErasure(numbered("e", 1))
    erase = c.Rewrite(WRITER, Token(numbered("i", 2)), Antichain(1), 0, c.ERASE, erasure=new)
    told = replace(given(), callers=[Caller(info=b'{"for":"ann"}'), NOBODY, Caller(info=b'{"for":"bob"}')])
    commit, _ = planned(written.following, before, erase, after, told=told)
    [committed] = commit.following.entries.values()
    assert [(entry.operation, entry.caller) for entry in committed.entries] == [
        ("erase", Caller(purpose=f"erasure {new.erasure}")),
        ("tag", Caller(info=b'{"for":"bob"}')),
    ]
    assert commit.following.info_bytes == len(b'{"for":"bob"}')


@pytest.mark.parametrize("together", [False, True])
def test_the_entry_of_an_erasure_that_was_pending_has_the_caller_who_asked(base: State, together: bool) -> None:
    """Also if it was asked for in the commit that makes it effective, after which the earlier history is gone."""

    def append(number: int, time: int) -> c.Append:
        runs = (make_run(make_part(number, times=(time, time), inline=100)),)
        return c.Append(WRITER, Token(numbered("i", number)), Antichain(time), Antichain(time + 1), runs)

    asked = Caller("ann", "cleaning", b'{"for":"ann"}')
    fed, _ = planned(base, append(1, 0), told=replace(given(), callers=[Caller(info=b'{"for":"bob"}')]))
    runs, new = (make_run(make_part(2, inline=100, diff_sum=-1)),), c.NewErasure(numbered("e", 1))
    erase = c.Rewrite(WRITER, Token(numbered("i", 2)), Antichain(1), 0, c.ERASE, runs, erasure=new)
    if together:
        told = replace(given(), callers=[asked, NOBODY])
        commit, _ = planned(fed.following, erase, append(3, 1), told=told)
    else:
        pending, _ = planned(fed.following, erase, told=replace(given(), callers=[asked]))
        assert [len(commit.entries) for commit in pending.following.entries.values()] == [1, 1, 1]
        commit, _ = planned(pending.following, append(3, 1))
    [committed] = commit.following.entries.values()
    asked = replace(asked, purpose=f"cleaning, erasure {new.erasure}")
    assert [(entry.operation, entry.caller, entry.rows, entry.size) for entry in committed.entries] == [
        ("erase", asked, 1, 100),
        ("append", None, 1, 100),
    ]
    assert commit.following.info_bytes == len(asked.info)
