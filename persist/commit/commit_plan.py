"""Planning one commit: from a State and a group of commands to a Commit, a value. Pure.

There is no I/O here, no clock and no randomness. If a plan needs the blob store it yields a task, which is a value too,
and continues with the command that results from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence

from msgspec import Struct

from persist.core import commands as c
from persist.core import invariants, state_diff
from persist.core.audit_log import NOBODY, Caller, CommandEntry
from persist.core.batch import HollowBatch, parts_of
from persist.core.bundles import moves
from persist.core.errors import Overloaded, PersistError
from persist.core.frontier import MINIMUM
from persist.core.ids import SeqNo
from persist.core.merge_plan import inline_rows_from
from persist.core.record import replace
from persist.core.spill import ENTRIES, SpillKind
from persist.core.state import State
from persist.core.state_diff import StateDiff
from persist.core.transitions import Context, expire_lapsed, step
from persist.core.transitions.context import SOUND, UNCHECKED, Verdict
from persist.core.transitions.lease_expiry import with_lease_clock
from persist.core.transitions.outcomes_and_audit import check_room, entry_of, recorded, settled_entries
from persist.core.transitions.part_admission import departed
from persist.core.transitions.wall_clocks import stamped

GROUP_ROOM_PART = 4  # a group that fills this part of the room for inline rows writes them to a blob


class AppendCount(Struct, frozen=True):
    """A task: count the rows of an append that begins before the upper of `state`. Results in the command.

    Each of its parts that begins before the upper has, as `given`, the number of its updates from the upper on.
    """

    state: State
    command: c.Append


class BatchMerge(Struct, frozen=True):
    """A task: merge these adjacent batches of `state`, which may lack some of their runs, into one part.

    Results in a MergeResult.
    """

    state: State
    batches: Sequence[HollowBatch]

    @property
    def inputs(self) -> frozenset[str]:
        return frozenset(part.id for batch in self.batches for part in batch.parts())


class BundleUp(Struct, frozen=True):
    """A task of upkeep: write parts of this batch to bundles. Ends in a BundleParts."""

    state: State
    batch: HollowBatch


class RollUp(Struct, frozen=True):
    """A task of upkeep: write this State as a rollup. Ends in an AddRollup."""

    state: State


class FlushIndex(Struct, frozen=True):
    """A task of upkeep: write the recent attributes of the newest State to their index. Ends in a FlushAttributes."""


class FlushRecent(Struct, frozen=True):
    """A task of upkeep: write recent outcomes, or entries, of the newest State to a file. Ends in a Flush."""

    kind: SpillKind


Outcome = c.Result | BaseException  # what a command came to
Supply = c.Command | Exception | None  # the result of a task; None: there was nothing to do


class PlanInput(Struct, frozen=True):
    """The inputs of a plan besides the State and the commands.

    `context` is that of the commands; the plan sets their verdicts and the base. Its `lease_clock_ms` is the new value
    of the lease clock; None: leases are judged by walltimes. `check_all` checks every invariant. `verdicts` and
    `callers` are those of the commands, in order. `unread` maps the index of a command to the error with which the
    attribute index or the files could not be read.
    """

    context: Context
    commit_id: str
    check_all: bool = False
    verdicts: Sequence[Verdict] = ()
    unread: Mapping[int, PersistError] = {}
    callers: Sequence[Caller] = ()


class Commit(Struct, frozen=True):
    """A planned commit.

    `diff` leads from the base to `following`; None: no command changed anything, and `following` is the base itself.
    `outcomes` has one outcome per command, in order. `upkeep` is the State from which duties are derived once the
    commit is done, if any. `commands` are the commands as planned: planning again on another base begins with these, so
    that rows are not counted twice.
    """

    diff: StateDiff | None
    following: State
    outcomes: Sequence[Outcome]
    upkeep: State | None
    commands: Sequence[c.Command]


Task = AppendCount | BatchMerge
Planning = Generator[Task, Supply, Commit]


def plan_commit(base: State, group: Sequence[c.Command], given: PlanInput) -> Planning:
    """The commit of these commands on `base`, each applied to the State that the one before it left.

    Yields tasks for the blob store, is sent their results, and returns the Commit. Most plans have no task. If the
    State has no room for the inline rows of the group, or they are many, they are written to one blob. If the blob
    store fails, commands for whose rows there is no room are refused, with the error of the store if there is one.
    """
    commands = list(group)
    clock, walltime_ms = given.context.lease_clock_ms, given.context.now_ms
    now_ms = max(walltime_ms, base.walltime_ms) if clock is None else walltime_ms
    context = replace(given.context, now_ms=now_ms, base_upper=base.upper)
    policy, checked_ms = context.policy, context.checked_ms
    begun = base if clock is None or base.lease_clock_ms else with_lease_clock(base, clock)
    room, held = policy.inline_shard_bytes_max, base.trace.inline_bytes
    wanted = held + sum(map(_inline_bytes, commands))
    roomy = context if wanted <= room else replace(context, policy=replace(policy, inline_shard_bytes_max=wanted))
    state, outcomes, entries = yield from _stepped(begun, commands, given, roomy)
    added = state.trace.inline_bytes - held
    if added > 0 and (state.trace.inline_bytes > room or added * GROUP_ROOM_PART >= room):
        merge = yield BatchMerge(state, inline_rows_from(state.trace, begun.upper))
        if isinstance(merge, c.MergeResult):
            with contextlib.suppress(PersistError):
                state, _ = step(state, merge, replace(context, verdict=SOUND))
        if state.trace.inline_bytes > max(room, held):
            state, outcomes, entries = yield from _stepped(begun, commands, given, context)
            if isinstance(merge, PersistError):
                outcomes = [merge if isinstance(outcome, Overloaded) else outcome for outcome in outcomes]
    if state is begun:
        refused = any(isinstance(outcome, Overloaded) for outcome in outcomes)  # until upkeep has made room
        return Commit(None, base, outcomes, base if refused else None, commands)
    made = {"seqno": SeqNo(base.seqno + 1), "walltime_ms": walltime_ms, "commit_id": given.commit_id}
    following = expire_lapsed(state, context.lease_now_ms, checked_ms)
    following = replace(following, lease_clock_ms=clock or 0, **made)
    before = base.upper
    if following.incarnation != base.incarnation:  # a life begins with the upper of the State of a clone, if it is one
        before = next((command.state.upper for command in commands if isinstance(command, c.BeginClone)), MINIMUM)
    following = stamped(following, before, checked_ms, policy)
    following = recorded(following, entries)
    gone = state_diff.gone_between(base, following)
    following = departed(following, gone)
    moved = moves(base, following, commands)
    invariants.check_step(base, following)
    if given.check_all:
        invariants.check_state(following)
    else:
        invariants.check_batches_replaced(base, following)
    change = state_diff.diff(base, following, given.commit_id, moved.gone(gone), moved.emptied)
    if given.check_all:
        invariants.check_diff(change, base, following)
    return Commit(change, following, outcomes, following, commands)


def with_long_diff(commit: Commit, key: str) -> Commit:
    """The same commit, with its state diff in the blob of this key because it is too long for the log.

    Nothing is planned again: the commit differs only in that its State names the blob.
    """
    assert commit.diff is not None
    state = commit.following
    following = replace(state, long_diffs={**state.long_diffs, state.seqno: key})
    return replace(commit, diff=state_diff.in_blob(commit.diff, key), following=following, upkeep=following)


def supplied(planning: Planning, supply: Callable[[Task], Supply]) -> Commit:
    """The Commit, with every task of the plan run by `supply`."""
    done: Supply = None
    while True:
        try:
            task = planning.send(done)
        except StopIteration as end:
            commit: Commit = end.value
            return commit
        done = supply(task)


def _stepped(
    base: State, commands: list[c.Command], given: PlanInput, context: Context
) -> Generator[AppendCount, Supply, tuple[State, list[Outcome], list[CommandEntry]]]:
    """The State after all commands, their outcomes, and their entries in the commit history.

    A command whose rows were counted replaces the original in `commands`.
    """
    state = base
    outcomes: list[Outcome] = []
    entries: list[CommandEntry] = []
    callers = given.callers or [NOBODY] * len(commands)
    verdicts = given.verdicts or [UNCHECKED] * len(commands)
    for index, command in enumerate(commands):
        if index in given.unread:
            outcomes.append(given.unread[index])
            continue
        if verdicts[index] is not context.verdict:
            context = replace(context, verdict=verdicts[index])
        try:
            if isinstance(command, c.Append) and command.lower < state.upper < command.upper:
                commands[index] = command = _done((yield AppendCount(state, command)))
            following, result = step(state, command, context)
            entry, settled = None, []
            if following is not state:
                entry = entry_of(state, following, command, result, callers[index], context.verdict)
            if entry is not None and isinstance(command, (c.WriteCommand, c.AdvanceUpper)):
                settled = settled_entries(state, following, entries)
            if entry is not None and isinstance(command, c.WriteCommand):
                check_room(state, ENTRIES, context.policy)
        except Exception as error:  # even a bug affects only the command that triggers it
            outcomes.append(error)
            continue
        outcomes.append(result)
        if entry is not None:
            settled.append(entry)
            if any(one.operation == c.ERASE and one.lower < one.upper for one in settled):
                # An erasure also removes the callers' texts of earlier entries, in this commit too.
                entries.clear()
            entries += settled
        if following is not state:
            inserted = result if isinstance(command, c.Insert) and isinstance(result, c.Appended) else None
            has_time = inserted is not None and inserted.lower < inserted.upper  # one without rows takes none
            context = replace(context, inserted_at=inserted.lower.element if inserted and has_time else None)
        state = following
    return state, outcomes, entries


def _done(supply: Supply) -> c.Command:
    """The command that resulted from a task. Raises its error."""
    if isinstance(supply, Exception):
        raise supply from None
    assert supply is not None
    return supply


def _inline_bytes(command: c.Command) -> int:
    runs = getattr(command, "runs", ())
    return sum(part.size for part in parts_of(runs) if part.is_inline)
