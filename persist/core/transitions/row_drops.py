"""Transitions of row drops: whether rows before a cut may be dropped, and how they leave the State."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from persist.core.batch import HollowBatch, Part, Run, batch_of, parts_of, trace_of
from persist.core.erasure_progress import pending_erasures, pending_runs
from persist.core.errors import Conflict, InvalidUsage, NotReadable, UpperMismatch
from persist.core.frontier import Antichain
from persist.core.persistent_map import with_changes
from persist.core.readable_times import cut_times, earliest_readable, is_kept
from persist.core.record import replace
from persist.core.shard_settings import KeptCut
from persist.core.state import State
from persist.core.truncations_and_drops import (
    begins,
    check_droppable,
    check_not_erasing,
    clipped,
    floor_at,
    known_rows,
    pending_drop,
)


def drops_rows(state: State, cut: int) -> bool:
    """Whether a drop before `cut` would remove rows, judging by parts. Raises InvalidUsage, NotReadable."""
    if cut < 1 or state.upper.less_equal(cut - 1):
        raise InvalidUsage(
            f"a time before {cut} of shard {state.name!r} is not complete: its upper is {state.upper}; give an earlier "
            "cut"
        )
    if cut <= state.truncated.before:
        return False
    floor = max(state.floor, floor_at(state.drops, cut if state.upper.element is None else state.upper.element))
    if cut <= floor:
        raise InvalidUsage(
            f"rows of shard {state.name!r} before {floor} were dropped already, and restored rows were written by the "
            "restore, after the cut; truncate with mode 'retract'"
        )
    if not is_kept(state, cut - 1) and (state.since.is_empty or cut - 1 not in cut_times(state)):
        raise NotReadable(
            f"shard {state.name!r} is readable from {state.since} on: rows written before {cut} can no longer be "
            "distinguished from later ones",
            as_of=[cut - 1],
            since=state.since.to_json(),
        )
    erasures = pending_erasures(state)
    check_not_erasing(state.name, state.upper, pending_runs(erasures), sorted(erasures))
    check_droppable(state.name, state.trace.batches, state.drops, cut)
    return any(begins(part) < cut and part.time_max >= floor for part in state.trace.parts())


def without_pending(state: State, upper: Antichain | None = None) -> State:
    """The State without its pending drop, which no read shows yet. `upper`: that of the State that is committed."""
    waiting = pending_drop(state.drops, upper or state.upper)
    if waiting is None:
        return state
    truncations = tuple(one for one in state.truncations if one.at != waiting.at or one.before != waiting.cut)
    state, progress = replace(state, drops=state.drops[:-1], truncations=truncations), state.retention
    if progress.upper == waiting.cut:  # a policy asked for it, and has not removed those rows: its next cut does
        progress = replace(progress, upper=state.truncated.before, removed=None)
    return replace(state, retention=progress)


def without_undue(state: State, runs: Iterable[Run], upper: Antichain | None = None) -> State:
    """The State for rows at `upper` (None: at the next time): if they have retractions, a pending drop is withdrawn.

    The retracted rows may be from before its cut, and would get a negative multiplicity.
    """
    return without_pending(state, upper) if any(part.diff_min < 0 for part in parts_of(runs)) else state


def is_waiting(state: State, cut: int) -> bool:
    """Whether rows from before `cut` are removed by the pending drop, and no earlier truncation removed them."""
    return dropped_before(state) >= cut > without_pending(state).truncated.before


def check_still_dropped(state: State, cut: int, at: Antichain) -> None:
    """Raise Conflict if the drop before `cut`, which was pending at `at`, was withdrawn, and no other came that far.

    A drop that became effective stays in the State, even after a restore. Merges move the times of parts, so parts do
    not show it.
    """
    if not state.is_closed and max(dropped_before(state), state.truncated.before) < cut:
        raise Conflict(
            f"the truncation of shard {state.name!r} before {cut} was withdrawn: at time {at}, where it was pending, "
            "rows are retracted perhaps from before the cut. Nothing was truncated; choose a cut after that time, and "
            "another token",
            before=cut,
            at=at.to_json(),
        )


def check_not_withdrawn(state: State, cut: int) -> None:
    """Raise UpperMismatch if the pending drop before `cut`, assumed by a look-up of unique keys, was withdrawn. 0:
    none.
    """
    if dropped_before(state) < cut:
        raise UpperMismatch(
            f"a truncation of shard {state.name!r} before {cut} was withdrawn since unique keys were looked up; "
            "nothing was written: look them up again",
            expected=state.upper.to_json(),
            actual=state.upper.to_json(),
            stays=False,
            withdrawn=cut,
        )


def without_cuts(state: State, cut: int) -> Mapping[int, KeptCut]:
    """The cuts of the policy after a drop before `cut`, without those at or before it, which have nothing to remove.

    Each of them would keep the time before it readable, and so the dropped files.
    """
    gone = [at_ms for at_ms, known in state.cuts.items() if known.upper <= cut]
    return with_changes(state.cuts, {}, gone) if gone else state.cuts


def dropped_before(state: State) -> int:
    """The cut of the last drop; 0: none. A policy needs no cut at or before it."""
    return max(state.floor, state.drops[-1].cut if state.drops else 0)


def forgettable(state: State) -> int:
    """The number of drops, from the first on, that no readable time precedes. A pending one may still be withdrawn."""
    earliest, upper = earliest_readable(state), state.upper
    return sum(1 for drop in state.drops if not earliest < Antichain(drop.at) and not upper.less_equal(drop.at))


def without_dropped(state: State) -> State:
    """The State without dropped rows that are not readable any more.

    Claims of merges that read the changed parts end, since their outputs would bring the rows back. The rows leave the
    counts of the State, so they are added to those that truncations removed. A clipped part has no count until it is
    merged.
    """
    count = forgettable(state)
    if not count:
        return state
    floor = state.drops[count - 1].cut
    batches = tuple(_above(batch, floor) for batch in state.trace.batches)
    changed = {
        part.id
        for old, new in zip(state.trace.batches, batches, strict=True)
        if old is not new
        for part in old.parts()
        if begins(part) < floor
    }
    claims = {key: claim for key, claim in state.claims.items() if changed.isdisjoint(claim.inputs)}
    trace = state.trace if not changed else trace_of(batches)
    removed = known_rows(state.trace.parts()) - known_rows(trace.parts())
    state = _with_removed(state, removed)
    return replace(state, trace=trace, claims=claims, drops=state.drops[count:], floor=floor)


def recounted(state: State, taken: Iterable[Part], outputs: Iterable[Part]) -> State:
    """The State after merging parts that a drop has clipped, with the number of written rows unchanged."""
    inputs = tuple(taken)
    if not state.floor or all(part.diff_sum is not None for part in inputs):
        return state
    return _with_removed(state, known_rows(inputs) - known_rows(outputs))


def _with_removed(state: State, more: int) -> State:
    """The State with `more` rows added to those that truncations removed, unless all truncations were undone."""
    if not more or not state.truncations:
        return state
    last = state.truncations[-1]
    return replace(state, truncations=(*state.truncations[:-1], replace(last, removed=last.removed + more)))


def brings_back(state: State, outputs: tuple[Run, ...]) -> bool:
    """Whether the outputs of a merge contain rows that were removed by drops since it was begun."""
    return state.floor > 0 and any(begins(part) < state.floor for part in parts_of(outputs))


def _above(batch: HollowBatch, floor: int) -> HollowBatch:
    """The batch without rows before `floor`; the same object where it has none."""
    if all(begins(part) >= floor for part in batch.parts()):
        return batch
    return batch_of(batch.desc, clipped(batch.runs, floor))
