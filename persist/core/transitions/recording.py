"""The commit history: which entry a command leaves, and how entries move from the State to files and are forgotten."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from persist.core import commands as c
from persist.core.antichain import MINIMUM, Antichain
from persist.core.batch import Part
from persist.core.entries import with_changes
from persist.core.errors import InvalidUsage, Overloaded
from persist.core.ids import SeqNo
from persist.core.keys import belongs_to
from persist.core.record import replace
from persist.core.recorded import (
    AGE,
    BUNDLE,
    CLONE,
    COLLECT,
    FILES_MAX,
    MAINTENANCE,
    MERGE,
    NOBODY,
    Caller,
    Committed,
    Entry,
    EntryFile,
    purpose_of,
)
from persist.core.state import Policy, State
from persist.core.state_diff import trace_between
from persist.core.transitions.context import RETRY_SOON_S, Context

_WRITING: Mapping[type[c.Command], str] = {
    c.Insert: "insert",
    c.Append: "append",
    c.CompareAndAppend: "compare_and_append",
    c.Restore: "restore",
    c.Truncate: "truncate",
    c.DropBefore: "drop_before",
    c.Erase: "erase",
    c.RetractAged: "truncate",
    c.Edit: "edit",  # its verb is told
    c.Reshape: "edit",
    c.AdvanceUpper: "advance_upper",
    c.UpdateAttributes: "update_attributes",
}
_MENDING: Mapping[type[c.Command], str] = {c.MergeResult: MERGE, c.BundleParts: BUNDLE, c.ReplacePart: "repair"}
_OTHERS: Mapping[type[c.Command], str] = {
    c.Recreate: "create",
    c.BeginClone: CLONE,
    c.HandOver: "hand_over",
    c.TakeBack: "take_back",
    c.EvolveSchema: "evolve_schema",
    c.Constrain: "set_constraints",
    c.SetSettings: "set_settings",
    c.ForgetHistory: "forget",
    c.AgeHistory: AGE,
    c.RemoveRollups: COLLECT,
    c.SetTag: "tag",
    c.RemoveTag: "untag",
    c.ForgetTags: AGE,
    c.ForgetDropped: AGE,
    c.TakeCut: AGE,
    c.PassCut: AGE,
    c.NoteLooked: AGE,
    c.SetRungs: AGE,
    c.NoteRewritten: AGE,
    c.ProveErasure: "erased",
}
OPERATIONS: Mapping[type[c.Command], str] = {**_WRITING, **_MENDING, **_OTHERS}
ENTRIES_KEPT_MAX = 256  # commits whose entries a State without a history of its own holds
INFO_OVERLAY_MAX = 1024 * 1024  # bytes; more than this slow writers down (Overloaded)
URGENT = 2  # times as many entries as make a file due do not wait for its turn


def entry_of(
    before: State, after: State, command: c.Command, result: c.Result, caller: Caller = NOBODY
) -> Entry | None:
    """What the command that led from one State to the other leaves in the commit history; None: nothing.

    A write that changed neither rows nor times nor attributes leaves nothing, so a retry that is answered as before
    makes no second entry.
    """
    sets_no_tag = isinstance(command, c.SetRungs) and after.tags is before.tags
    if sets_no_tag or (isinstance(result, c.CutKept) and not result.changed):
        return None
    kind, said = type(command), caller if caller != NOBODY else None
    operation = OPERATIONS.get(kind)
    if operation is None:
        return None
    if kind in _WRITING:
        operation = command.verb if isinstance(command, c.Editing) else operation
        if isinstance(command, (c.Restore, c.Truncate, c.DropBefore)):
            point = command.as_of if isinstance(command, c.Restore) else command.as_of + 1
            said = replace(caller, purpose=purpose_of(operation, point, caller.purpose))
        changed = (after.trace, after.attributes, after.schemas)
        if all(
            now is then for now, then in zip(changed, (before.trace, before.attributes, before.schemas), strict=True)
        ):
            return None
        lower, upper = before.upper, after.upper
        if lower == upper and isinstance(result, c.Appended):  # rows joined a batch of the same commit
            lower, upper = result.lower, result.upper
        rows, size = after.event_count - before.event_count, after.byte_count - before.byte_count
        return Entry(operation, lower, upper, rows, size, _retractions(_added(before, command)), said)
    if kind in _MENDING:
        change = trace_between(before.trace, after.trace)
        if change is None or not change.batches:
            return None
        batches = change.batches
        rows, size = sum(batch.rows for batch in batches), sum(batch.size for batch in batches)
        parts = [part for batch in batches for part in batch.parts()]
        lower, upper = batches[0].desc.lower, batches[-1].desc.upper
        return Entry(operation, lower, upper, rows, size, _retractions(parts), said)
    if kind in (c.ForgetHistory, c.AgeHistory):
        return Entry(operation, before.since, after.since, caller=said)
    upper = MINIMUM if kind is c.Recreate else after.upper
    return Entry(operation, upper, upper, caller=said)


def check_room(state: State, policy: Policy) -> None:
    """Raises Overloaded where too many entries wait for their blob. Maintenance is never refused for that."""
    is_full = len(state.entries) >= policy.entries_overlay_max or state.info_bytes >= INFO_OVERLAY_MAX
    if is_full and state.settings.keeps_history:
        raise Overloaded(
            f"shard {state.name!r} has the entries of {len(state.entries)} commits that wait to be written to a blob",
            retry_after_s=RETRY_SOON_S,
        )


def is_maintenance(entry: Entry) -> bool:
    return entry.operation in MAINTENANCE


def recorded(state: State, entries: Iterable[Entry], policy: Policy) -> State:
    """The State with the entries of the commit that makes it. Without a history of its own it keeps the newest only."""
    told = tuple(entries)
    if not told:
        return state
    commit = Committed(state.walltime_ms, told)
    kept = with_changes(state.entries, {state.seqno: commit})
    state = replace(state, entries=kept, info_bytes=state.info_bytes + commit.info_bytes)
    is_much = len(kept) >= ENTRIES_KEPT_MAX or state.info_bytes >= policy.info_flush_at
    if state.settings.keeps_history or not is_much:
        return state
    ascending, info_bytes = sorted(kept), state.info_bytes
    gone: list[SeqNo] = []
    for seqno in ascending[:-1]:
        if 2 * (len(kept) - len(gone)) <= ENTRIES_KEPT_MAX and 2 * info_bytes <= policy.info_flush_at:
            break
        gone.append(seqno)
        info_bytes -= kept[seqno].info_bytes
    return replace(state, entries=with_changes(kept, {}, gone), info_bytes=info_bytes)


def flush_is_due(state: State, policy: Policy) -> bool:
    """Whether entries of the State should be moved to a file."""
    return state.settings.keeps_history and _is_much(state, policy, 1)


def flush_is_urgent(state: State, policy: Policy) -> bool:
    """Whether they are so many that nothing else comes before that."""
    return state.settings.keeps_history and _is_much(state, policy, URGENT)


def flush(state: State, command: c.FlushEntries, context: Context) -> tuple[State, c.Flushed]:
    """Move entries from the State to a file, iff all that it holds is still where it was."""
    file, files = command.file, state.entry_files
    if any(known.key == file.key for known in files):  # a retry
        return state, c.Flushed(True)
    if not belongs_to(file.key, state.shard_id):
        raise InvalidUsage(f"entry file {file.key!r} does not belong to shard {state.name!r}")
    kept, merged = files[: len(files) - len(command.merged)], files[len(files) - len(command.merged) :]
    is_known = command.last in state.entries and command.first == min(state.entries)
    if not is_known or tuple(known.key for known in merged) != command.merged:
        return state, c.Flushed(False)
    if not state.settings.keeps_history or context.may_be_swept(state, file.key):
        return state, c.Flushed(False)  # the entries stay where they are
    checked_ms = context.checked_ms or 0
    file = replace(file, begun_ms=file.begun_ms or checked_ms, until_ms=checked_ms)
    gone = [seqno for seqno in state.entries if seqno <= command.last]
    info_bytes = state.info_bytes
    if info_bytes:
        info_bytes -= sum(state.entries[seqno].info_bytes for seqno in gone)
    entries = with_changes(state.entries, {}, gone)
    files = (*kept, file)[-FILES_MAX:]
    return replace(state, entries=entries, entry_files=files, info_bytes=info_bytes), c.Flushed(True)


def without_outlived(state: State, before_ms: int, checked_ms: int) -> State:
    """The State without the files of which all entries are older than `before_ms`. Both clocks are checked ones.

    A file of which no checked clock was told yet is kept from now on. The same State object where nothing changes.
    """
    files = tuple(
        file if file.until_ms else replace(file, begun_ms=file.begun_ms or checked_ms, until_ms=checked_ms)
        for file in state.entry_files
        if not is_outlived(file, before_ms)
    )
    return state if files == state.entry_files else replace(state, entry_files=files)


def is_outlived(file: EntryFile, before_ms: int) -> bool:
    """Whether all entries of the file are older than this checked clock."""
    return 0 < file.until_ms < before_ms


def cut(state: State, below: SeqNo) -> State:
    """The State whose entries begin where its log does, if it keeps no history of its own."""
    if state.settings.keeps_history:
        return state
    gone = [seqno for seqno in state.entries if seqno < below]
    info_bytes = state.info_bytes - sum(state.entries[seqno].info_bytes for seqno in gone)
    return replace(state, entries=with_changes(state.entries, {}, gone), info_bytes=info_bytes) if gone else state


def _is_much(state: State, policy: Policy, times: int) -> bool:
    entries, info_bytes = times * policy.entries_flush_at, times * policy.info_flush_at
    return len(state.entries) >= entries or state.info_bytes >= info_bytes


def _added(before: State, command: Any) -> Iterable[Part]:
    """The parts that a write brought, without those that the State had already."""
    covered: Antichain = before.upper if isinstance(command, c.Append) else MINIMUM
    parts = (part for run in getattr(command, "runs", ()) for part in run.parts)
    return [_clipped(part, covered) for part in parts if covered.less_equal(part.time_max)]


def _clipped(part: Part, covered: Antichain) -> Part:
    """A part of which the State has the beginning tells the sum of its diffs no more."""
    return part if covered.less_equal(part.time_min) else replace(part, diff_sum=None)


def _retractions(parts: Iterable[Part]) -> int | None:
    """How many of the rows have a negative multiplicity. None where bounds and sums do not tell."""
    found = 0
    for part in parts:
        if part.diff_min >= 0:
            continue
        if part.diff_sum is None:
            return None
        if part.diff_max < 0:
            found += part.rows
        elif part.diff_min == -1 and part.diff_max == 1:
            found += (part.rows - part.diff_sum) // 2
        else:
            return None
    return found
