"""The progress of an erasure as a State shows it: what it waits for, and whether a part can contain its rows. Pure.

Rows that were retracted at or before a time `at` are gone once everything written up to `at` is one batch that was
merged to a since at or beyond it, with no earlier time kept distinct: there each insertion has met its retraction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from persist.core.batch import HollowBatch, Run
from persist.core.erasure import Erasure, Wait
from persist.core.frontier import Antichain
from persist.core.readable_times import kept_below
from persist.core.state import Claim, LeasedReader, State

WAITS_SHOWN_MAX = 100  # of one erasure in one answer


def erased_at(state: State) -> int:
    """The time of the last erasure; 0: none. Earlier contents must neither stay readable nor come back."""
    return max((erasure.at for erasure in state.erasures.values() if erasure.pending is None), default=0)


def pending_erasures(state: State) -> Mapping[str, Erasure]:
    """The erasures that become effective with the next commit of the writer, by id."""
    return {key: erasure for key, erasure in state.erasures.items() if erasure.pending is not None}


def pending_runs(erasures: Mapping[str, Erasure]) -> tuple[Run, ...]:
    """The retractions of pending erasures at the next time."""
    return tuple(run for one in erasures.values() if one.pending is not None for run in one.pending.runs)


def under_way(state: State) -> Mapping[str, Erasure]:
    """The erasures that have retracted their rows and have no proof yet, by id."""
    return {key: one for key, one in state.erasures.items() if one.proof is None and one.pending is None}


def erased_from(state: State) -> Antichain:
    """The first time that new readers may hold: that of the last unfinished erasure; [0] without one.

    Readers that hold an earlier time keep it. New ones are refused: the erasure would never complete.
    """
    return Antichain(max((erasure.at for erasure in under_way(state).values()), default=0))


def stretch(state: State, at: int) -> Sequence[HollowBatch]:
    """The first batches, up to the last that may hold rows of times up to `at`."""
    batches = state.trace.batches
    end = len(batches)
    while end and not batches[end - 1].desc.lower.less_equal(at):
        end -= 1
    return batches[:end]


def is_rewritten(state: State, at: int) -> bool:
    """Whether neither a part of the State nor a merge under way can contain a row that was gone by the time `at`."""
    return is_merged(state, at) and not any(True for _ in _stale(state))


def is_merged(state: State, at: int) -> bool:
    """Whether everything written up to `at` is one batch in which each insertion has met its retraction.

    False if not everything up to `at` was written yet: later States may contain more.
    """
    if state.upper.less_equal(at):
        return False
    held = [batch for batch in stretch(state, at) if batch.runs]
    if len(held) != 1:
        return not held
    return Antichain(at) <= held[0].desc.since and all(time >= at for time in held[0].desc.kept)


def may_rewrite(state: State, at: int) -> bool:
    """Whether no time before `at` is readable, so that a merge cancels insertions and their retractions."""
    return Antichain(at) <= state.merge_since and not any(time < at for time in kept_below(state, state.merge_since))


def to_rewrite(state: State) -> int | None:
    """The time up to which everything has to be merged into one batch for an erasure; None: no merge is needed.

    It is needed until the erasure is proved: a batch that was empty when it was rewritten may have been joined to later
    rows.
    """
    wanted = [erasure.at for erasure in under_way(state).values()]
    mergeable = [at for at in wanted if may_rewrite(state, at) and not is_merged(state, at)]
    return max(mergeable, default=None)


def waits(state: State, at: int) -> tuple[Wait, ...]:
    """What keeps times before `at` readable, or old rows in the State; at most WAITS_SHOWN_MAX, by name."""
    waits: list[Wait] = []
    if state.since < Antichain(at) and not state.since.is_empty:
        waits += _readers(state, at)
        if not waits or (not state.history_hold.is_empty and state.history_hold < Antichain(at)):
            waits.append(Wait("history", "since", state.since.element))
    waits += _leased(state, lambda reader: reader.point and reader.since < Antichain(at))
    waits += [Wait("tag", name, tag.time, tag.until_ms) for name, tag in state.tags.items() if tag.time < at]
    waits += [Wait("merge", claim.owner, None, claim.lapses_ms) for claim in _stale(state)]
    if not waits and not is_rewritten(state, at):
        waits.append(Wait("merge", "compactor"))
    return tuple(sorted(waits, key=lambda wait: (wait.kind, wait.name)))[:WAITS_SHOWN_MAX]


def states_held(state: State, rewritten: int) -> tuple[Wait, ...]:
    """Readers that hold States from before `rewritten`, so that their log entries and blobs stay."""
    held = _leased(state, lambda reader: reader.seqno < rewritten)
    return tuple(sorted(held, key=lambda wait: wait.name))[:WAITS_SHOWN_MAX]


def lent_before(state: State, erasure: Erasure) -> tuple[Wait, ...]:
    """Loans that may retain a blob with rows of an erasure: to clones, and from the owners of its borrowed blobs."""
    until = erasure.rewritten_ms
    borrowers = {loan.borrower for loan in state.loans.values() if not until or loan.begun_ms <= until}
    return tuple(Wait("loan", name) for name in sorted(borrowers | set(state.borrowed.values())))[:WAITS_SHOWN_MAX]


def _readers(state: State, at: int) -> list[Wait]:
    cursors = [
        Wait("cursor", critical.purpose or str(name), critical.since.element)
        for name, critical in state.critical_readers.items()
        if critical.since < Antichain(at)
    ]
    return _leased(state, lambda reader: not reader.point and reader.since < Antichain(at)) + cursors


def _leased(state: State, holds: Callable[[LeasedReader], bool]) -> list[Wait]:
    return [
        Wait("reader", reader.purpose or str(key), reader.since.element, reader.lapses_ms)
        for key, reader in state.leased_readers.items()
        if holds(reader)
    ]


def _stale(state: State) -> Iterator[Claim]:
    """Claims on merges that can never be applied since an input is gone; their outputs may contain old rows."""
    for claim in state.claims.values():
        if not all(state.trace.holds(part) for part in claim.inputs):
            yield claim


def gone_at(state: State, before: int) -> int:
    """The time by which the rows before `before` were gone, by a truncation before that time or a later one.

    A truncation without rows to remove took no time: they were gone at the latest time before it.
    """
    truncation = next((one for one in state.truncations if 0 < before <= one.before), None)
    if truncation is None:
        return max(before - 1, 0)
    return truncation.at if truncation.wrote or not truncation.seen else truncation.at - 1
