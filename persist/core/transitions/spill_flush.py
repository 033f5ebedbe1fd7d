"""Transitions of spill files: flushing recent outcomes and entries to a file, and removing expired files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from persist.core import commands as c
from persist.core.blob_keys import belongs_to
from persist.core.dedup import ENDED
from persist.core.errors import InvalidUsage, Overloaded
from persist.core.persistent_map import with_changes
from persist.core.record import replace
from persist.core.spill import ENTRIES, FILES_MAX, OUTCOMES, SpillKind
from persist.core.state import Policy, State
from persist.core.transitions.context import RETRY_SOON_S, Context

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
    """The State without its commit history."""
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
