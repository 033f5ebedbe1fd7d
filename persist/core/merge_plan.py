"""Which merges of a shard are due: from a State to stretches of adjacent batches. Pure.

There are two planners with the same rules. A *committer* merges the newest batches while they are small (`is_small`):
`garbage_due`, `inline_due` and `tier_due`. Its merges are committed in the groups of the writing process, while
another process would have to win races against a busy writer. A *worker* of maintenance merges everything else: `plan`.
It leaves the newest small batches to the committer as long as there are few of them (`left_batches_max`).

- Tiers: a stretch is due if its rows are at least `FAN_IN` times those of its largest member. So every rewritten row
  moves to a run that much larger, and is rewritten at most a logarithm of times. The committer counts whole batches as
  members. The worker counts runs, so that a batch of many runs is merged on its own.
- Garbage: a stretch that since has wholly passed is compacted if most of its rows would cancel out. The rest is
  estimated by the sum of the diffs. The estimate may be wrong, so the rows must also have grown by a part of the
  largest member since it was written, which bounds the work in any case.
- Inline rows are moved to a blob when they are many or take much of their room in the State.
- Claims: parts that another worker is merging (`taken`, their ids) are left alone. A plan names parts by id, so it
  cannot conflict with writers.

An erasure takes precedence: everything written up to its time is merged into one batch.

The worker has four more rules, each of which rewrites a row a bounded number of times. If too many batches are left
that are not due, the youngest are merged with one that they outweigh, which leaves a logarithm of them whatever their
sizes. A batch whose history since has passed is compacted. A batch of an older schema is rewritten in the current one.
If a shard retains its history by age, the oldest batches are compacted as their history expires.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby, takewhile

from persist.core.batch import HollowBatch, Part, Trace, batch_of, diff_sum_of
from persist.core.commands import MergeSpec
from persist.core.erasure_progress import stretch, to_rewrite
from persist.core.frontier import Antichain
from persist.core.readable_times import cut_times, kept_below, named_times
from persist.core.state import Policy, State

FAN_IN = 4

# --- the committer's policy
SMALL_ROWS = 32_768  # a batch beyond either of these two is left to the workers
SMALL_BYTES = 4 * 1024 * 1024
BEHIND = 2  # merges are behind with this multiple of `Policy.inline_batches` of small batches
BEHIND_ROOM_PART = 4  # or if no more than this part of the room for inline rows is left
INLINE_ROOM_PART = 2  # inline rows are moved to a blob when they take this part of their room
GARBAGE_ROWS = 32_768  # a shard with more rows is left to the workers
GARBAGE_PERCENT = 150  # rows, in percent of those that a merge would leave, beyond which they are compacted
GARBAGE_GROWTH = 2  # the rows must also have grown by this part of the largest member, for workers too
SPECS_MAX = 64  # merges of one plan
LOOKED_AT_MAX = 256  # newest batches

# --- the worker's policy; a shard at rest is not being written, and is compacted closer to its minimum size
LEFT_BATCHES_MAX = 128  # with more small batches, committers do not keep up, or are too short-lived to merge
WORKER_FEW_ROWS = 16_384  # a smaller stretch waits for more batches, and a smaller batch keeps its history
INLINE_FLUSH_BYTES = 256 * 1024  # a shard with more inline rows than this has them merged into blobs
WORKER_GARBAGE_PERCENT = 200  # without history: all rows in percent of those that a merge may leave
WORKER_AGED_PERCENT = 20  # with history: rows that it no longer needs, in percent of the others
REST_FAN_IN = 2
REST_GARBAGE_PERCENT = 120
REST_GARBAGE_GROWTH = 8
REST_AGED_PERCENT = 10


@dataclass(frozen=True, slots=True)
class MergePolicy:
    """The thresholds of a worker."""

    fan_in: int = FAN_IN  # twice that below `WORKER_FEW_ROWS`, where the commit costs more than the rows
    batches_soft: int = 24  # with more batches than this the youngest are merged with one that they outweigh
    left_batches_max: int = 0  # the newest small batches that are left to the committer

    def beside_writers(self) -> MergePolicy:
        """This policy for a shard whose writers do small merges themselves."""
        return replace(self, left_batches_max=LEFT_BATCHES_MAX, batches_soft=self.batches_soft // 2)


# --- shared by both planners


def is_small(batch: HollowBatch) -> bool:
    return batch.rows <= SMALL_ROWS and batch.size <= SMALL_BYTES


def claimed(state: State, now_ms: int | None = None) -> frozenset[str]:
    """The parts in live claims at `now_ms` of the lease clock (default: when the State was committed)."""
    now_ms = state.lease_now_ms if now_ms is None else now_ms
    return frozenset(part for claim in state.claims.values() if not claim.lapsed(now_ms) for part in claim.inputs)


def _is_taken(batch: HollowBatch, taken: Set[str]) -> bool:
    return any(part.id in taken for part in batch.parts())


def _with_rows(batches: Sequence[HollowBatch]) -> int:
    return sum(1 for batch in batches if batch.runs)


def _passed(batches: Sequence[HollowBatch], since: Antichain) -> int:
    """The number of batches, from the first on, that since has wholly passed: all their rows may share one time."""
    if since.element is None:
        return 0
    end = bisect_right(batches, since.element, key=_begin)
    while end and _is_beyond(batches[end - 1], since.element):
        end -= 1
    return end


def _begin(batch: HollowBatch) -> int:
    assert batch.desc.lower.element is not None, "nothing comes after []"
    return batch.desc.lower.element


def _is_beyond(batch: HollowBatch, since: int) -> bool:
    """Whether a batch has rows that since has not passed (or could have had, if it has none)."""
    lower = batch.desc.lower.element
    return (lower is not None and lower > since) or any(part.time_max > since for part in batch.parts())


def _is_garbage(state: State, batches: Sequence[HollowBatch], largest: int, percent: int, growth: int) -> bool:
    """Whether most of the rows would cancel out, and enough of them were added after the largest member was written."""
    rows = sum(batch.rows for batch in batches)
    if rows < 2 or (rows - largest) * growth < largest:
        return False
    left = diff_sum_of(part for batch in batches for part in batch.parts())
    if left is None or rows * 100 < max(1, abs(left)) * percent:
        return False
    return rows * 100 >= max(1, abs(left)) * percent * (
        1 + _tagged(state, batches[0].desc.lower, batches[-1].desc.upper)
    )


def _tagged(state: State, lower: Antichain, upper: Antichain) -> int:
    """The number of times in `[lower, upper)` that tags, cuts and drops keep distinct from later ones.

    A merge may have to keep the remaining rows once more for each of them.
    """
    times = named_times(state) | cut_times(state) | {drop.cut - 1 for drop in state.drops}
    within = (time for time in times if lower.less_equal(time) and not upper.less_equal(time + 1))
    return sum(1 for time in within if not state.merge_since.less_equal(time))


# --- the committer


def garbage_due(state: State, taken: Set[str]) -> Sequence[HollowBatch]:
    """The newest batches that since has wholly passed, if most of their rows would cancel out."""
    trace = state.trace
    if trace.rows > GARBAGE_ROWS:
        return ()
    end = _passed(trace.batches, state.merge_since)
    stretch = trace.batches[max(0, end - LOOKED_AT_MAX) : end]
    if taken:
        free = sum(1 for _ in takewhile(lambda batch: not _is_taken(batch, taken), reversed(stretch)))
        stretch = stretch[len(stretch) - free :]
    largest = max((batch.rows for batch in stretch), default=0)
    return stretch if _is_garbage(state, stretch, largest, GARBAGE_PERCENT, GARBAGE_GROWTH) else ()


def inline_due(trace: Trace, policy: Policy, taken: Set[str], inline: int) -> Sequence[HollowBatch]:
    """Batches whose inline rows should leave the State, because they are many or take much of their room.

    `inline` is how many of the newest hold inline rows only, as `count_newest` says.
    """
    if inline >= policy.inline_batches:
        newest = _newest_inline(trace.batches, taken)
        if _with_rows(newest) >= policy.inline_batches:
            return newest
    if trace.inline_bytes * INLINE_ROOM_PART >= policy.inline_shard_bytes_max:
        return inline_stretch(trace, taken)
    return ()


def is_behind(trace: Trace, policy: Policy, small: int) -> bool:
    """Whether small batches are twice as many as inline ones that make a merge due, or inline rows have little room.

    `small` is how many of the newest batches are small and have rows, as `count_newest` says.
    """
    if trace.inline_bytes * BEHIND_ROOM_PART >= policy.inline_shard_bytes_max * (BEHIND_ROOM_PART - 1):
        return True
    return small >= min(BEHIND * policy.inline_batches, LOOKED_AT_MAX)


def count_newest(
    trace: Trace,
    change: tuple[int, int, Sequence[HollowBatch]],
    known: int,
    belongs: Callable[[HollowBatch], bool],
    *,
    with_rows: bool = False,
) -> int:
    """How many of the newest batches belong, up to the first that does not; LOOKED_AT_MAX: so many, or more.

    `with_rows` counts only those of them that have rows. `change` leads to this trace from one of which the number was
    `known` (`Trace.difference`): where batches were only added, as by nearly every commit, no other is looked at.
    """
    first, count, came = change
    is_longer = not count and first + len(came) == len(trace.batches)
    looked_at = came if is_longer else trace.batches[-LOOKED_AT_MAX:]
    newest = list(takewhile(belongs, reversed(looked_at)))
    number = _with_rows(newest) if with_rows else len(newest)
    if is_longer and len(newest) == len(came):
        number += known
    return min(number, LOOKED_AT_MAX)


def tier_due(trace: Trace, taken: Set[str], inline: int) -> Sequence[HollowBatch]:
    """The longest stretch of small batches before the newest inline ones that is FAN_IN times its largest batch."""
    batches = trace.batches
    due = end = len(batches) - inline
    rows = largest = 0
    first = max(0, end - LOOKED_AT_MAX)
    for index, batch in zip(range(end - 1, first - 1, -1), reversed(batches[first:end]), strict=True):
        if not is_small(batch) or _is_taken(batch, taken):
            break
        rows += batch.rows
        largest = max(largest, batch.rows)
        if batch.rows and rows >= FAN_IN * largest:
            due = index
    return batches[due:end]


def inline_stretch(trace: Trace, taken: Set[str]) -> Sequence[HollowBatch]:
    """Adjacent batches that hold inline rows only (or none): the stretch with the most bytes, or the newest such.

    The search begins with the newest batch, and ends once all inline bytes are found.
    """
    best: list[HollowBatch] = []
    stretch: list[HollowBatch] = []
    most = size = 0
    left = trace.inline_bytes
    for batch in reversed(trace.batches):
        if not is_inline(batch) or _is_taken(batch, taken):
            if left <= 0:
                break
            stretch, size = [], 0
        else:
            stretch.append(batch)
            size += batch.inline_size
            if size > most:
                best, most = stretch, size
        left -= batch.inline_size
    return tuple(reversed(best))


def inline_rows_from(trace: Trace, upper: Antichain) -> Sequence[HollowBatch]:
    """The batches from this time on, reduced to runs whose parts are all inline."""
    came = takewhile(lambda batch: upper <= batch.desc.lower, reversed(trace.batches))
    inline = [(batch, tuple(run for run in batch.runs if all(part.is_inline for part in run.parts))) for batch in came]
    return [batch_of(batch.desc, runs) for batch, runs in reversed(inline) if runs]


def _newest_inline(batches: Sequence[HollowBatch], taken: Set[str]) -> Sequence[HollowBatch]:
    count = 0
    for batch in reversed(batches):
        if count == LOOKED_AT_MAX or not is_inline(batch) or (taken and _is_taken(batch, taken)):
            break
        count += 1
    return batches[len(batches) - count :]


def is_inline(batch: HollowBatch) -> bool:
    """Whether a batch holds inline rows only (or none)."""
    for run in batch.runs:  # called for each new batch: loops cost a third of generators
        for part in run.parts:
            if part.data is None:
                return False
    return True


# --- the worker


def plan(state: State, policy: MergePolicy, *, now_ms: int, idle: bool = False) -> list[MergeSpec]:
    """The merges that are due, none of them overlapping, in the order in which they should be done.

    `now_ms` is of the lease clock. `idle`: the shard was not written for a while. Abandoned merges come first.
    """
    if state.tombstone or state.merge_since.is_empty:
        return []
    if idle:
        policy = replace(policy, fan_in=REST_FAN_IN, left_batches_max=0)
    taken = set(claimed(state, now_ms))
    specs = []
    for spec in _abandoned(state, now_ms):
        if taken.isdisjoint(spec.inputs):
            taken.update(spec.inputs)
            specs.append(spec)
    batches = state.trace.batches
    if (at := to_rewrite(state)) is not None:
        whole = stretch(state, at)
        parts = [part.id for batch in whole for part in batch.parts()]
        if taken.isdisjoint(parts):  # otherwise later: no other merge begins there meanwhile
            specs.append(_spec(state, whole))
        taken.update(parts)
    batches = batches[: len(batches) - _left_to_committer(batches, policy.left_batches_max)]
    for is_taken, segment in groupby(batches, lambda batch: _is_taken(batch, taken)):
        if not is_taken:
            specs += _plan_segment(state, tuple(segment), policy, idle)
    return specs[:SPECS_MAX]


def _abandoned(state: State, now_ms: int) -> Iterator[MergeSpec]:
    """Merges whose worker is gone but whose partial output is kept with their claim."""
    for key, claim in state.claims.items():
        if not claim.done or not claim.lapsed(now_ms):
            continue
        held = frozenset(claim.inputs)
        if (span := state.trace.covering(held)) is None:
            continue
        batches = state.trace.batches[span[0] : span[0] + span[1]]
        spec = _spec(state, batches, [p for b in batches for p in b.parts() if p.id in held])
        if key == spec.claim_key:
            yield spec


def _left_to_committer(batches: Sequence[HollowBatch], most: int) -> int:
    """The number of the newest batches, empty ones included, that are left to the committer; 0 if it is too large."""
    count = with_rows = 0
    for batch in reversed(batches):
        if not is_small(batch):
            break
        count += 1
        with_rows += bool(batch.runs)
        if with_rows > most:
            return 0
    return count


def _plan_segment(state: State, batches: Sequence[HollowBatch], policy: MergePolicy, idle: bool) -> Iterator[MergeSpec]:
    """The merges that are due in a stretch of batches that no worker is merging."""
    largest = [max((run.longest for run in batch.runs), default=0) for batch in batches]
    stretches = _garbage(state, batches, largest, policy, idle)
    stretches = stretches or list(_due(batches, largest, (0, len(batches)), policy, idle))
    stretches = stretches or _outweighed(batches, policy)
    # Smaller ones first: they end soon, and reduce the number of batches.
    for first, end in sorted(stretches, key=lambda s: sum(batch.rows for batch in batches[s[0] : s[1]])):
        yield _spec(state, batches[first:end])
    used = {index for first, end in stretches for index in range(first, end)}
    if state.trace.inline_bytes > INLINE_FLUSH_BYTES:
        inline = [index not in used and batch.inline_size > 0 for index, batch in enumerate(batches)]
        for is_inline, group in groupby(range(len(batches)), inline.__getitem__):
            if is_inline:
                indexes = list(group)
                used.update(indexes)
                yield _spec(state, batches[indexes[0] : indexes[-1] + 1])
    for index, batch in enumerate(batches):
        if index in used or not batch.rows:
            continue
        old_schema = any(p.schema_id != state.schema_id for p in batch.parts())
        has_few = _are_few(batch.rows, idle)
        if old_schema or (not has_few and (_has_history(batch, state) or _has_untagged(batch, state))):
            yield _spec(state, [batch])


def _garbage(
    state: State, batches: Sequence[HollowBatch], largest: Sequence[int], policy: MergePolicy, idle: bool
) -> list[tuple[int, int]]:
    if state.settings.history_ms and (aged := _aged(state, batches, idle)):
        return [(0, aged)]
    end = _passed(batches, state.merge_since)
    if sum(batch.run_count for batch in batches[:end]) < policy.fan_in:
        return []
    percent, growth = (REST_GARBAGE_PERCENT, REST_GARBAGE_GROWTH) if idle else (WORKER_GARBAGE_PERCENT, GARBAGE_GROWTH)
    garbage = _is_garbage(state, batches[:end], max(largest[:end]), percent, growth)
    return [(0, end)] if garbage else []


def _aged(state: State, batches: Sequence[HollowBatch], idle: bool) -> int:
    """The number of the first batches to merge because their history has expired, in a shard with history by age.

    Since then passes a batch in parts, and seldom as a whole. What it has passed is estimated as if the rows of a batch
    were spread evenly over its times. A wrong estimate does not lead to endless merges: after a merge no row remains
    that since has newly passed, and each such row cancels itself and at most one other.
    """
    since, whole = state.merge_since.element, state.trace.batches
    rows, settled, kept, anew, left = state.trace.rows, 0, 0, 0.0, 0.0
    if since is None or _are_few(rows, idle) or batches[0] is not whole[0]:
        return 0
    for index, batch in enumerate(batches):
        low, high, diffs = _earliest(batch), max((part.time_max for part in batch.parts()), default=0), batch.diff_sum
        if low > since or diffs is None:
            break
        passed = 1.0 if high <= since else (since - low) / (high - low)
        if not index:  # an earlier merge brought these to the time `low`
            kept = max(0, min(abs(diffs) * _tagged(state, batch.desc.lower, batch.desc.upper), batch.rows - abs(diffs)))
            settled, left = (batch.rows if high <= low else abs(diffs) + kept), diffs
            anew = passed * (batch.rows - settled)
        else:
            anew += passed * batch.rows
            left += passed * diffs
        gone = min(settled + anew - abs(left) - kept, 2 * anew)
        if gone * 100 >= (REST_AGED_PERCENT if idle else WORKER_AGED_PERCENT) * (rows - gone):
            return index + 1
    return 0


def _are_few(rows: int, idle: bool) -> bool:
    """Whether merging these rows costs less than the commit; a shard at rest is merged all the same."""
    return rows < WORKER_FEW_ROWS and not idle


def _earliest(batch: HollowBatch) -> int:
    """The earliest time that a batch keeps distinct from others."""
    return max(batch.desc.lower.element or 0, batch.desc.since.element or 0)


def _due(
    batches: Sequence[HollowBatch], largest: Sequence[int], within: tuple[int, int], policy: MergePolicy, idle: bool
) -> Iterator[tuple[int, int]]:
    """The longest stretches `[first, end)` that are due, none overlapping.

    No due stretch contains the largest run of one that is not due, so the search continues on either side of that run.
    Its rows are a fixed part of all, so the search ends after a logarithm of steps.
    """
    first, end = within
    if sum(batch.run_count for batch in batches[first:end]) <= 1:
        return
    rows = sum(batch.rows for batch in batches[first:end])
    at = max(range(first, end), key=largest.__getitem__)
    if rows >= policy.fan_in * (2 if _are_few(rows, idle) else 1) * largest[at]:
        yield within
        return
    yield from _due(batches, largest, (first, at), policy, idle)
    yield from _due(batches, largest, (at + 1, end), policy, idle)


def _outweighed(batches: Sequence[HollowBatch], policy: MergePolicy) -> list[tuple[int, int]]:
    """With too many batches: the longest stretch up to the youngest whose first batch the others outweigh.

    They outweigh it if they have `fan_in` times its rows.
    """
    if sum(1 for batch in batches if batch.rows) <= policy.batches_soft:
        return []
    rows, due = 0, len(batches)
    for index in range(len(batches) - 1, -1, -1):
        rows += batches[index].rows
        if batches[index].rows and rows >= policy.fan_in * batches[index].rows:
            due = index
    return [(due, len(batches))] if due < len(batches) else []


def _has_history(batch: HollowBatch, state: State) -> bool:
    """Whether since has passed at least half of the times that a batch keeps distinct, and much of it may cancel.

    Each such merge halves the rest, so a batch is rewritten for this at most 63 times.
    """
    since, low = state.merge_since, _earliest(batch)
    high = max(part.time_max for part in batch.parts())
    if since.element is None or high <= low or (min(since.element, high) - low) * 2 < high - low:
        return False
    return _may_cancel(batch, state)


def _has_untagged(batch: HollowBatch, state: State) -> bool:
    """Whether half of the times that the last merge of this batch kept distinct are not needed, and much may cancel.

    Each such merge halves these times, so a tag causes few of them.
    """
    if not batch.desc.kept:
        return False
    still = set(kept_below(state, state.merge_since))
    return 2 * sum(1 for time in batch.desc.kept if time not in still) >= len(batch.desc.kept) and _may_cancel(
        batch, state
    )


def _may_cancel(batch: HollowBatch, state: State) -> bool:
    """Whether, by the sum of the diffs, at least half of the rows would cancel out."""
    left = batch.diff_sum
    return left is None or batch.rows >= 2 * abs(left) * (1 + _tagged(state, batch.desc.lower, batch.desc.upper))


def _spec(state: State, batches: Sequence[HollowBatch], parts: Sequence[Part] | None = None) -> MergeSpec:
    """The merge of these parts (default: all) of adjacent batches, without empty batches at the ends."""
    held = [batch for batch in batches if batch.runs]
    parts = [part for batch in held for part in batch.parts()] if parts is None else parts
    return MergeSpec(
        inputs=tuple(part.id for part in parts),
        lower=held[0].desc.lower,
        upper=held[-1].desc.upper,
        since=state.merge_since,
        rows=sum(part.rows for part in parts),
        size=sum(part.size for part in parts),
    )
