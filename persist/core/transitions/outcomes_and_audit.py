"""Transitions of the commit history and of remembered token outcomes, and of the files with older ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from persist.core import commands as c
from persist.core.audit_log import (
    AGE,
    BUNDLE,
    CLONE,
    COLLECT,
    ENDED,
    ENDED_MAX,
    FUTURE_MS_MAX,
    MAINTENANCE,
    MERGE,
    NOBODY,
    RETIRED,
    RETIRED_PER_COMMIT_MAX,
    Caller,
    CommandEntry,
    Committed,
    TokenOutcome,
    born_ms,
    is_about,
    key_of,
    purpose_of,
)
from persist.core.batch import Part, parts_of
from persist.core.blob_keys import belongs_to
from persist.core.erasure import Erasure
from persist.core.erasure_progress import pending_erasures, pending_runs
from persist.core.errors import InvalidUsage, OutcomeForgotten, Overloaded, TokenReused
from persist.core.frontier import EMPTY, MINIMUM, Antichain
from persist.core.ids import SeqNo, Token, WriterId, writer_of
from persist.core.persistent_map import with_changes
from persist.core.record import replace
from persist.core.spill import ENTRIES, FILES_MAX, OUTCOMES, SpillKind
from persist.core.state import Policy, State, WriterState
from persist.core.state_diff import trace_between
from persist.core.transitions.context import RETRY_SOON_S, SOUND, Context, Verdict
from persist.core.transitions.row_drops import check_still_dropped
from persist.core.truncations_and_drops import pending_drop

_WRITING: Mapping[type[c.Command], str] = {
    c.Insert: "insert",
    c.Append: "append",
    c.CompareAndAppend: "compare_and_append",
    c.Rewrite: "rewrite",  # replaced by its own operation
    c.AdvanceUpper: "advance_upper",
    c.UpdateAttributes: "update_attributes",
}
_MENDING: Mapping[type[c.Command], str] = {c.MergeResult: MERGE, c.BundleParts: BUNDLE, c.ReplacePart: "repair"}
_OTHERS: Mapping[type[c.Command], str] = {
    c.Recreate: "create",
    c.BeginClone: CLONE,
    c.HandOver: "hand_over",
    c.EvolveSchema: "evolve_schema",
    c.SetSettings: "set_settings",
    c.ForgetHistory: "forget",
    c.ForgetOutlived: AGE,
    c.RemoveRollups: COLLECT,
    c.SetTag: "tag",
    c.RemoveTag: "untag",
    c.TakeCuts: AGE,
    c.NoteLooked: AGE,
    c.NoteRewritten: AGE,
    c.ProveErasure: "erased",
}
OPERATIONS: Mapping[type[c.Command], str] = {**_WRITING, **_MENDING, **_OTHERS}
_WRITTEN = ("trace", "attributes", "schemas", "drops", "erasures")  # fields of a State: a write changed one of them
ENTRIES_KEPT_MAX = 256  # commits whose entries a State without retention of history holds
INFO_KEPT_BYTES = 64 * 1024  # of callers' texts in them


def entry_of(
    before: State, after: State, command: c.Command, result: c.Result, caller: Caller = NOBODY, verdict: Verdict = SOUND
) -> CommandEntry | None:
    """The commit history's entry for the command that led from one State to the other; None: it has none.

    A write that changed neither rows nor times nor attributes, and that left nothing pending, has none, so a retry
    makes no second entry. What pending erasures added with the command is in `settled_entries`.
    """
    if isinstance(command, c.TakeCuts) and after.cuts is before.cuts and after.tags is before.tags:
        return None
    kind, known_caller = type(command), caller if caller != NOBODY else None
    operation = OPERATIONS.get(kind)
    if operation is None:
        return None
    if kind in _WRITING:
        if isinstance(command, c.Rewrite):
            operation, target = command.operation, c.target_of(command)
            if target is not None:
                known_caller = replace(caller, purpose=purpose_of(operation, target, caller.purpose))
        if all(getattr(after, name) is getattr(before, name) for name in _WRITTEN):
            return None
        lower, upper = before.upper, after.upper
        if lower == upper and isinstance(result, c.Appended):  # rows joined a batch of the same commit
            lower, upper = result.lower, result.upper
        erased = list(parts_of(pending_runs(_effective_erasures(before, after))))
        rows = after.event_count - before.event_count - sum(part.updates for part in erased)
        size = after.byte_count - before.byte_count - sum(part.size for part in erased)
        added = _added(before, command) if after.trace is not before.trace else ()
        return CommandEntry(operation, lower, upper, rows, size, _retractions(added), known_caller)
    if kind in _MENDING:
        change = trace_between(before.trace, after.trace)
        if change is None or not change.batches:
            return None
        batches = change.batches
        rows, size = sum(batch.rows for batch in batches), sum(batch.size for batch in batches)
        parts = [part for batch in batches for part in batch.parts()]
        lower, upper = batches[0].desc.lower, batches[-1].desc.upper
        return CommandEntry(operation, lower, upper, rows, size, _retractions(parts), known_caller)
    if kind in (c.ForgetHistory, c.ForgetOutlived):
        return CommandEntry(operation, before.since, after.since, caller=known_caller)
    if verdict.constrains:
        operation = "set_constraints"
    if kind is c.HandOver and not after.handed_over:
        operation = "take_back"
    upper = MINIMUM if kind is c.Recreate else after.upper
    return CommandEntry(operation, upper, upper, caller=known_caller)


def settled_entries(before: State, after: State, recent: Sequence[CommandEntry]) -> list[CommandEntry]:
    """The entries of a pending drop and of pending erasures that a write made effective at the upper of `before`.

    Their callers are those of the entries that they had while they were pending, in `before` or in `recent`, those of
    the same commit. If such an entry is in a file already, its caller is unknown.
    """
    at = before.upper
    drop = pending_drop(before.drops, at)
    if drop is not None and (drop not in after.drops or after.upper.less_equal(drop.at)):
        drop = None
    erasures = _effective_erasures(before, after)
    if at.element is None or (drop is None and not erasures):
        return []
    earlier = (entry for seqno in sorted(before.entries) for entry in before.entries[seqno].entries)
    asked = [entry for entry in (*earlier, *recent) if entry.lower == entry.upper == at]

    upper = Antichain(at.element + 1)

    def settled(operation: str, target: int | str, parts: Sequence[Part] = ()) -> CommandEntry:
        caller = next((entry.caller for entry in reversed(asked) if is_about(entry, operation, target)), None)
        caller = caller or Caller(purpose=purpose_of(operation, target, ""))
        rows, size = sum(part.updates for part in parts), sum(part.size for part in parts)
        return CommandEntry(operation, at, upper, rows, size, _retractions(parts), caller)

    entries = [settled(c.DROP_BEFORE, drop.cut)] if drop is not None else []
    for key, erasure in erasures.items():
        entries.append(settled(c.ERASE, key, list(parts_of(pending_runs({key: erasure})))))
    return entries


def _effective_erasures(before: State, after: State) -> Mapping[str, Erasure]:
    """The pending erasures of `before` that have retracted their rows in `after`, by id."""
    if after.erasures is before.erasures:
        return {}
    known = after.erasures
    return {key: one for key, one in pending_erasures(before).items() if key in known and known[key].pending is None}


def is_maintenance(entry: CommandEntry) -> bool:
    return entry.operation in MAINTENANCE


def recorded(state: State, entries: Iterable[CommandEntry]) -> State:
    """The State with the entries of the commit that makes it. Without retention only the newest entries are kept."""
    recorded_entries = tuple(entries)
    if not recorded_entries:
        return state
    commit = Committed(state.walltime_ms, recorded_entries)
    kept = with_changes(state.entries, {state.seqno: commit})
    state = replace(state, entries=kept, info_bytes=state.info_bytes + commit.info_bytes)
    is_much = len(kept) >= ENTRIES_KEPT_MAX or state.info_bytes >= INFO_KEPT_BYTES
    if state.settings.keeps_history or not is_much:
        return state
    ascending, info_bytes = sorted(kept), state.info_bytes
    gone: list[SeqNo] = []
    for seqno in ascending[:-1]:
        if 2 * (len(kept) - len(gone)) <= ENTRIES_KEPT_MAX and 2 * info_bytes <= INFO_KEPT_BYTES:
            break
        gone.append(seqno)
        info_bytes -= kept[seqno].info_bytes
    return replace(state, entries=with_changes(kept, {}, gone), info_bytes=info_bytes)


def cut(state: State, below: SeqNo) -> State:
    """The State whose entries begin where its log does, if it has no retention of history."""
    if state.settings.keeps_history:
        return state
    gone = [seqno for seqno in state.entries if seqno < below]
    info_bytes = state.info_bytes - sum(state.entries[seqno].info_bytes for seqno in gone)
    return replace(state, entries=with_changes(state.entries, {}, gone), info_bytes=info_bytes) if gone else state


def _added(before: State, command: Any) -> Iterable[Part]:
    """The parts that a write added, without those that the State had already."""
    covered: Antichain = before.upper if isinstance(command, c.Append) else MINIMUM
    parts = (part for run in getattr(command, "runs", ()) for part in run.parts)
    return [
        part if covered.less_equal(part.time_min) else replace(part, diff_sum=None)  # the State has its beginning
        for part in parts
        if covered.less_equal(part.time_max)
    ]


def _retractions(parts: Iterable[Part]) -> int | None:
    """The number of rows with a negative multiplicity; None if bounds and sums do not determine it."""
    count = 0
    for part in parts:
        if part.diff_min >= 0:
            continue
        if part.diff_sum is None:
            return None
        if part.diff_max < 0:
            count += part.rows
        elif part.diff_min == -1 and part.diff_max == 1:
            count += (part.rows - part.diff_sum) // 2
        else:
            return None
    return count


# Transitions of outcomes: the answers to retries with a caller's token.


OUTCOMES_MAX = 20_000_000  # of a shard; more throttle writers (Overloaded)


def is_alone(command: c.WriterCommand) -> bool:
    """Whether the command has a caller's token, which is remembered without a registered writer."""
    return command.writer == writer_of(command.token)


def is_of_the_future(command: c.Command, now_ms: int) -> bool:
    """Whether the command's token was minted so long after `now_ms` that one of the two clocks is wrong."""
    if not isinstance(command, c.WriterCommand) or not is_alone(command):
        return False
    born = born_ms(key_of(command.token))
    return born is not None and born > now_ms + FUTURE_MS_MAX


def outcome_of(state: State, key: str, context: Context) -> TokenOutcome | None:
    """The outcome with this id, in the State or in its files."""
    return state.outcomes.get(key) or context.remembered.get(key)


def answered(state: State, command: c.WriterCommand, context: Context) -> c.Appended | None:
    """The first answer to the command; None: it is new. Raises TokenReused, OutcomeForgotten.

    Raises Conflict if it is a drop that waited, and was withdrawn.
    """
    known = outcome_of(state, key_of(command.token), context)
    if known is None:
        _check_known(state, command.token, context)
        return None
    if known.digest == ENDED:
        raise _forgotten(state, command.token, context)
    if known.digest and command.digest and known.digest != command.digest:
        raise _reused(state, command.token)
    if not known.waited:
        return c.Appended(known.lower, known.upper)
    if isinstance(command, c.Rewrite) and command.tombstone is not None:
        check_still_dropped(state, command.tombstone.element or 0, known.lower)
    return c.Appended(known.lower, known.lower)


def with_outcome(state: State, command: c.WriterCommand, result: c.Appended, context: Context) -> State:
    """The State that remembers the answer to the command. Raises Overloaded if there is no room."""
    check_outcome_room(state, context.policy)
    outcome = TokenOutcome(result.lower, result.upper, command.digest, context.lease_now_ms)
    return replace(state, outcomes=with_changes(state.outcomes, {key_of(command.token): outcome}))


def check_outcome_room(state: State, policy: Policy) -> None:
    """Raise Overloaded if the State cannot remember one more outcome."""
    check_room(state, OUTCOMES, policy)
    kept = len(state.outcomes) + sum(file.count for file in state.files_of(OUTCOMES))
    if kept >= OUTCOMES_MAX:
        raise Overloaded(
            f"shard {state.name!r} remembers {kept} tokens; use fewer, or none for writes that are not retried",
            retry_after_s=RETRY_SOON_S,
        )


def is_retired(state: State, writer: WriterId, context: Context) -> bool:
    """Whether the writer was registered before and may have written, so that its id is never registered again."""
    born = born_ms(key_of(writer))
    return outcome_of(state, key_of(writer), context) is not None or (born is not None and born <= state.forgotten_ms)


def of_ended_life(state: State, store_ms: int, context: Context) -> dict[str, TokenOutcome]:
    """The outcomes that the next life of the name inherits: those of tokens minted later than the store's time.

    The clocks of their clients are ahead, mostly by seconds. At most `ENDED_MAX`, those that are the least ahead. They
    stay in the State, so they are fewer than half of a flush threshold.
    """
    kept_max = min(ENDED_MAX, context.policy.overlay_flush_at // 4)
    ahead = ((born, key) for key in state.outcomes if (born := born_ms(key)) is not None and born > store_ms)
    return {key: TokenOutcome(EMPTY, EMPTY, ENDED, context.lease_now_ms) for _, key in sorted(ahead)[:kept_max]}


def retired(state: State, writers: Iterable[WriterId], now_ms: int) -> State:
    """The State without these writers, whose ids are remembered so that they are not registered again."""
    gone = list(writers)[:RETIRED_PER_COMMIT_MAX]
    if not gone:
        return state
    kept: dict[str, TokenOutcome] = {}
    for writer in gone:
        last = state.writers.get(writer, WriterState(0, 0))  # perhaps it was never registered
        kept[key_of(writer)] = TokenOutcome(last.lower, last.upper, RETIRED, now_ms)
    outcomes = with_changes(state.outcomes, kept)
    return replace(state, writers=with_changes(state.writers, {}, gone), outcomes=outcomes)


def _check_known(state: State, token: Token, context: Context) -> None:
    """Refuse a minted token whose outcome is forgotten, or would be forgotten too early."""
    born = born_ms(key_of(token))
    if born is None:
        return
    if born <= state.forgotten_ms:
        raise _forgotten(state, token, context)
    if born > max(context.now_ms, state.walltime_ms, context.lease_now_ms, context.store_ms) + FUTURE_MS_MAX:
        raise OutcomeForgotten(
            f"token {token} was minted in the future of shard {state.name!r}, so its outcome would be forgotten too "
            "early; set the clock of the machine that mints it, or of this server, then write with a new token",
            born_ms=born,
        )


def _reused(state: State, token: Token) -> TokenReused:
    """The error of a token whose digest differs. After a change of columns the same rows have another digest."""
    landed = f"a write with token {token} has landed on shard {state.name!r} already: another command or other rows"
    if len(state.schemas) > 1:
        return TokenReused(
            f"{landed}, or the same rows before the columns changed: check the shard's history before you write them "
            "again, and use a new token for another write"
        )
    return TokenReused(f"{landed}; use a new token for each write")


def _forgotten(state: State, token: Token, context: Context) -> OutcomeForgotten:
    return OutcomeForgotten(
        f"the outcome of token {token} on shard {state.name!r} is no longer known: it is older than "
        f"{OUTCOME_KEPT_MS // 3_600_000} hours, or than a drop of the shard; check the shard, then write with a new "
        "token",
        born_ms=born_ms(key_of(token)),
    )


# Transitions of files: recent outcomes and entries move from the State to a file, and expired files are removed.


OUTCOME_KEPT_MS = 7 * 24 * 3600 * 1000  # minimum retention of the outcome of a token
COMMIT_WEIGHT = 2  # the entries of a commit count as so many outcomes
INFO_WEIGHT_BYTES = 64  # plus one for so many bytes of callers' texts


def waiting_size(state: State, kind: SpillKind) -> int:
    """The size of the overlay of this kind, in outcomes; entries count if the shard retains history."""
    if kind == OUTCOMES:
        return len(state.outcomes)
    if not state.settings.keeps_history:
        return 0
    return COMMIT_WEIGHT * len(state.entries) + state.info_bytes // INFO_WEIGHT_BYTES


def is_flush_due(state: State, kind: SpillKind, policy: Policy, *, in_turn: bool) -> bool:
    """Whether the overlay of this kind has reached the flush threshold, or half of it with `in_turn`."""
    least = policy.overlay_turn_at if in_turn else policy.overlay_flush_at
    return waiting_size(state, kind) >= least and not state.is_closed


def kept_until(state: State, kind: SpillKind) -> tuple[int, int | None]:
    """The newest time in the State of the clock that ages files of this kind, and their retention, in ms.

    Time 0: no clock was checked yet. The seal may be of a point long ago. None: unlimited.
    """
    if kind == OUTCOMES:
        return state.lease_now_ms, OUTCOME_KEPT_MS
    files = state.files_of(ENTRIES)
    return max([state.seal.sealed_ms, *(file.until_ms for file in files[-1:])]), state.settings.history_ms


def check_room(state: State, kind: SpillKind, policy: Policy) -> None:
    """Raise Overloaded if the overlay of this kind is full. Maintenance is never refused for that."""
    if waiting_size(state, kind) >= policy.overlay_max:
        raise Overloaded(
            f"shard {state.name!r} has {len(getattr(state, kind))} recent {kind} that wait to be written to a blob",
            retry_after_s=RETRY_SOON_S,
        )


def to_flush(state: State, kind: SpillKind) -> Mapping[Any, Any]:
    """The entries that may move to a file, by key. Outcomes of an ended life stay: the next drop inherits them."""
    if kind == OUTCOMES:
        return {key: outcome for key, outcome in state.outcomes.items() if outcome.digest != ENDED}
    return state.entries if state.settings.keeps_history else {}


def flush(state: State, command: c.Flush, context: Context) -> tuple[State, c.Flushed]:
    """Move recent entries to a file, iff all its sources are unchanged."""
    kind, file, files = command.kind, command.file, state.files_of(command.kind)
    if any(known.key == file.key for known in files):  # a retry
        return state, c.Flushed(True)
    if not belongs_to(file.key, state.shard_id):
        raise InvalidUsage(f"spill file {file.key!r} does not belong to shard {state.name!r}")
    first, recent = len(files) - len(command.merged), to_flush(state, kind)
    is_there = tuple(known.key for known in files[max(first, 0) :]) == command.merged
    if not is_there or not all(key in recent for key in command.flushed) or context.may_be_swept(state, file.key):
        return state, c.Flushed(False)  # nothing moves; the next flush writes it again
    kept = with_changes(getattr(state, kind), {}, command.flushed)
    now_ms = context.lease_now_ms if kind == OUTCOMES else context.checked_ms or 0
    files = (*files[:first], replace(file, begun_ms=file.begun_ms or now_ms, until_ms=now_ms))
    if kind == OUTCOMES:
        return replace(state, outcomes=kept, spilled=with_changes(state.spilled, {kind: files})), c.Flushed(True)
    if any(seqno <= file.last for seqno in kept):
        return state, c.Flushed(False)  # the history would be out of order
    info_bytes = sum(commit.info_bytes for commit in kept.values())
    spilled = with_changes(state.spilled, {kind: files[-FILES_MAX:]})
    return replace(state, entries=kept, info_bytes=info_bytes, spilled=spilled), c.Flushed(True)


def without_entries(state: State) -> State:
    return replace(state, entries={}, info_bytes=0, spilled=with_changes(state.spilled, {}, [ENTRIES]))


def without_old_entries(state: State, before_ms: int, checked_ms: int) -> State:
    """The State without files whose entries are all older than `before_ms`. Both clocks are checked ones.

    A file without a checked time gets the present one. The same State object if nothing changes.
    """
    known = state.files_of(ENTRIES)
    files = tuple(
        file if file.until_ms else replace(file, begun_ms=file.begun_ms or checked_ms, until_ms=checked_ms)
        for file in known
        if not file.is_outlived(before_ms)
    )
    return state if files == known else replace(state, spilled=with_changes(state.spilled, {ENTRIES: files}))


def without_old_outcomes(state: State, now_ms: int, checked_ms: int | None) -> State:
    """The State without files whose outcomes have all expired. `now_ms` is of the lease clock.

    Minted tokens as old as those in them are refused from then on, since they may have landed. A token from the future
    would block all tokens until its time, so a checked clock bounds it; without one, all files are kept. A token that
    was minted later, by a wrong clock, is forgotten as a free-form one is.
    """
    files, before_ms = state.files_of(OUTCOMES), now_ms - OUTCOME_KEPT_MS
    born = [file.last for file in files if file.is_outlived(before_ms)]
    if checked_ms is None or not born:
        return state
    kept = tuple(file for file in files if not file.is_outlived(before_ms))
    forgotten_ms = max(state.forgotten_ms, min(max(born), checked_ms))
    return replace(state, spilled=with_changes(state.spilled, {OUTCOMES: kept}), forgotten_ms=forgotten_ms)
