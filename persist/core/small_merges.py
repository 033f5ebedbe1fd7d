"""Which small merges a committer does itself: from a State to the adjacent batches of each. Pure.

The newest batches of a shard, as far as they are small (`is_small`), are merged by whoever commits; larger ones, and
what lies before them, are left to the workers of maintenance, and these leave the small ones to the committer. A commit
of the process that commits anyway joins its group, while another process has to win races against a busy writer.

`taken` are ids of parts that somebody is at work on already.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from persist.core.batch import HollowBatch, diff_sum_of
from persist.core.state import Policy, State
from persist.core.trace import Trace

SMALL_ROWS = 32_768  # batches beyond either of these are the workers'
SMALL_BYTES = 4 * 1024 * 1024
FAN_IN = 4  # batches are merged into one this much larger: a small row is rewritten log4 times
INLINE_ROOM_PART = 4  # inline rows are moved to a blob when they take this part of their room
INLINE_BATCHES = 16  # or when so many of the newest batches hold nothing else
INLINE_BATCHES_MAX = 24  # with so many a commit takes them along, if that comes before the background is done
BATCHES_MAX = 30  # with so many in all, a commit also takes along the merge of small ones that is due
BATCHES_URGENT = 32  # or, while merges are under way, the inline ones that came since, once they are FAN_IN
LARGE_BATCHES_MAX = 16  # with more large ones no worker is there to merge them, and haste would be in vain
GARBAGE_ROWS = 32_768  # a shard with more rows is left to the workers
GARBAGE_PERCENT = 150  # rows in percent of what would be left, beyond which they are collapsed
GARBAGE_PERCENT_MAX = 180  # as INLINE_BATCHES_MAX
LOOKED_AT_MAX = 256  # newest batches


def is_small(batch: HollowBatch) -> bool:
    return batch.rows <= SMALL_ROWS and batch.size <= SMALL_BYTES


def claimed(state: State) -> frozenset[str]:
    """The parts on which workers are at work."""
    claims = state.claims.values()
    return frozenset(part for claim in claims if not claim.lapsed(state.walltime_ms) for part in claim.inputs)


def inline_due(trace: Trace, policy: Policy, taken: Set[str]) -> Sequence[HollowBatch]:
    """Batches whose inline rows should leave the State, because they are many or take much of their room."""
    newest = _newest_inline(trace.batches, taken)
    if _with_rows(newest) >= INLINE_BATCHES:
        return newest
    if trace.inline_bytes * INLINE_ROOM_PART >= policy.inline_shard_bytes_max:
        return inline_stretch(trace.batches, taken)
    return ()


def inline_overdue(trace: Trace, taken: Set[str]) -> Sequence[HollowBatch]:
    """As `inline_due`, when it can wait no longer."""
    if len(trace.batches) < INLINE_BATCHES_MAX:  # every commit asks, and fewer cannot hold so many
        return ()
    looked_at = trace.batches[-LOOKED_AT_MAX:]
    newest = _newest_inline(trace.batches, taken)
    if _with_rows(newest) >= FAN_IN and _are_urgently_many(looked_at):
        return newest
    # All of them count, also those that a merge under way has taken: it may take its time.
    inline = sum(1 for batch in looked_at if batch.runs and _is_inline(batch))
    return newest if inline >= INLINE_BATCHES_MAX else ()


def tier_overdue(trace: Trace, taken: Set[str]) -> Sequence[HollowBatch]:
    """As `tier_due`, when it can wait no longer."""
    if len(trace.batches) < BATCHES_MAX or _with_rows(trace.batches[-LOOKED_AT_MAX:]) < BATCHES_MAX:
        return ()
    return tier_due(trace, taken)


def tier_due(trace: Trace, taken: Set[str]) -> Sequence[HollowBatch]:
    """The longest stretch of small batches before the newest inline ones that is FAN_IN times its largest batch."""
    batches = trace.batches
    end = len(batches) - len(_newest_inline(batches, frozenset()))
    rows = largest = 0
    due = end
    for index in range(end - 1, max(-1, end - 1 - LOOKED_AT_MAX), -1):
        batch = batches[index]
        if not is_small(batch) or _is_taken(batch, taken):
            break
        rows += batch.rows
        largest = max(largest, batch.rows)
        if batch.rows and rows >= FAN_IN * largest:
            due = index
    return batches[due:end]


def garbage_due(state: State, taken: Set[str], percent: int = GARBAGE_PERCENT) -> Sequence[HollowBatch]:
    """The newest batches that since has wholly passed, when most of their rows would cancel out.

    What would be left is estimated by the sum of the diffs. The estimate may be wrong, so the rows must also have grown
    by half since the largest batch was written; that bounds the work in any case.
    """
    trace, since = state.trace, state.since.element
    if since is None or trace.rows > GARBAGE_ROWS:
        return ()
    end = len(trace.batches)
    while end and _is_beyond(trace.batches[end - 1], since):
        end -= 1
    first = end
    while first and end - first < LOOKED_AT_MAX and not _is_taken(trace.batches[first - 1], taken):
        first -= 1
    stretch = trace.batches[first:end]
    rows, largest = sum(batch.rows for batch in stretch), max((batch.rows for batch in stretch), default=0)
    if rows < 2 or (rows - largest) * 2 < largest:
        return ()
    left = diff_sum_of(part for batch in stretch for part in batch.parts())
    return stretch if left is not None and rows * 100 >= max(1, abs(left)) * percent else ()


def inline_stretch(batches: Sequence[HollowBatch], taken: Set[str] = frozenset()) -> Sequence[HollowBatch]:
    """Adjacent batches that hold inline rows only (or none), the stretch with the most bytes."""
    best = (0, 0, 0)  # bytes, first, end
    first = size = 0
    for index, batch in enumerate(batches):
        if _is_inline(batch) and not _is_taken(batch, taken):
            size += batch.inline_size
            best = max(best, (size, first, index + 1))
        else:
            first, size = index + 1, 0
    return batches[best[1] : best[2]]


def _newest_inline(batches: Sequence[HollowBatch], taken: Set[str]) -> Sequence[HollowBatch]:
    first = len(batches)
    while first and len(batches) - first < LOOKED_AT_MAX:
        batch = batches[first - 1]
        if not _is_inline(batch) or _is_taken(batch, taken):
            break
        first -= 1
    return batches[first:]


def _is_inline(batch: HollowBatch) -> bool:
    """Whether a batch holds inline rows only (or none)."""
    for run in batch.runs:  # asked some forty times a commit: loops cost a third of generators
        for part in run.parts:
            if part.data is None:
                return False
    return True


def _is_beyond(batch: HollowBatch, since: int) -> bool:
    """Whether a batch has rows that since has not passed (or could have had, if it has none)."""
    lower = batch.desc.lower.element
    return (lower is not None and lower > since) or any(part.time_max > since for part in batch.parts())


def _are_urgently_many(batches: Sequence[HollowBatch]) -> bool:
    if _with_rows(batches) < BATCHES_URGENT:
        return False
    return sum(1 for batch in batches if not is_small(batch)) <= LARGE_BATCHES_MAX


def _with_rows(batches: Sequence[HollowBatch]) -> int:
    return sum(1 for batch in batches if batch.runs)


def _is_taken(batch: HollowBatch, taken: Set[str]) -> bool:
    return bool(taken) and any(part.id in taken for part in batch.parts())


__all__ = [
    "GARBAGE_PERCENT_MAX",
    "INLINE_ROOM_PART",
    "SMALL_BYTES",
    "SMALL_ROWS",
    "claimed",
    "garbage_due",
    "inline_due",
    "inline_overdue",
    "inline_stretch",
    "is_small",
    "tier_due",
    "tier_overdue",
]
