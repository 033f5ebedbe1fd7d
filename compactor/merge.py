"""The planner: from a shard's State and a policy to the merges that are due. Pure, no I/O.

Batches are looked at as a sequence of runs with their rows. A stretch of adjacent batches is *due* when its rows are
at least `fan_in` times those of its largest run: every row that is rewritten lands in a run `fan_in` times larger, so
it is rewritten at most log(rows) times to the base `fan_in`, and equal appends leave at most `fan_in - 1` runs in each
tier. Where sizes come in an order that leaves many batches all the same (small ones scattered between large ones), a
second rule merges what is younger with a batch that it outweighs; it bounds their number by a logarithm in any case.
Three more rules each rewrite a row a bounded number of times: inline rows leave the State, history that since has
passed is collapsed, and parts of an older schema are written in the current one.

A plan never touches what another worker is at work on, nor can it conflict with writers: it names parts by id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from persist.core.batch import HollowBatch, Part
from persist.core.commands import MergeSpec
from persist.core.small_merges import is_small
from persist.core.state import Claim, State

MERGE_CLAIM = "merge:"
LEFT_BATCHES_MAX = 64  # with more of them those who commit do not keep up, or live too briefly to merge


@dataclass(frozen=True, slots=True)
class MergePolicy:
    """What is due. `idle` variants hold while nobody writes: then the shard is brought closer to its least size."""

    fan_in: int = 4
    fan_in_small: int = 8  # where the stretch has fewer than `small_rows` rows: a commit costs more than its rows
    small_rows: int = 16_384
    fan_in_idle: int = 2
    batches_soft: int = 24  # with more batches than this the second rule holds
    inline_flush_bytes: int = 256 * 1024
    garbage_percent: int = 200  # rows in percent of what would be left, beyond which a stretch is collapsed
    garbage_percent_idle: int = 120
    rewrite_old_schemas: bool = True
    specs_max: int = 64
    left_batches_max: int = 0  # so many of the newest small batches are left to whoever commits, unless idle

    def beside_writers(self) -> MergePolicy:
        """This policy where writers do their small merges themselves, as `persist.core.small_merges` says."""
        return replace(self, left_batches_max=LEFT_BATCHES_MAX, batches_soft=self.batches_soft // 2)


@dataclass(frozen=True, slots=True)
class _Unit:
    """One batch as the planner sees it."""

    batch: HollowBatch
    rows: int
    runs: int
    largest: int  # rows of the largest run

    @classmethod
    def of(cls, batch: HollowBatch) -> _Unit:
        rows = [sum(part.rows for part in run.parts) for run in batch.runs]
        return cls(batch, sum(rows), len(rows), max(rows, default=0))


def plan(state: State, policy: MergePolicy, *, now_ms: int, idle: bool = False) -> list[MergeSpec]:
    """The merges that are due, none of them overlapping, in the order in which they should be done.

    `idle` says that nobody has written for a while. Merges that were begun and abandoned come first.
    """
    if state.tombstone or state.since.is_empty:
        return []
    specs = list(_abandoned(state, now_ms))
    taken = {part for spec in specs for part in spec.inputs}
    taken.update(part for claim in _live(state, now_ms) for part in claim.inputs)
    left = 0 if idle else _left_to_writers(state.trace.batches, policy.left_batches_max)
    segments = list(_free_segments(state.trace.batches[: len(state.trace.batches) - left], taken))
    rules = _rules(state, policy, idle)
    for segment in segments:
        specs.extend(_plan_segment(state, segment, rules))
    return specs[: policy.specs_max]


def claim_is_for_merge(key: str) -> bool:
    return key.startswith(MERGE_CLAIM)


def _live(state: State, now_ms: int) -> Iterator[Claim]:
    return (c for k, c in state.claims.items() if claim_is_for_merge(k) and not c.lapsed(now_ms))


def _abandoned(state: State, now_ms: int) -> Iterator[MergeSpec]:
    """Merges whose worker is gone but whose output so far is kept with their claim."""
    busy = {part for claim in _live(state, now_ms) for part in claim.inputs}
    for key, claim in state.claims.items():
        if not claim_is_for_merge(key) or not claim.done or not claim.lapsed(now_ms):
            continue
        found = state.trace.covering(frozenset(claim.inputs))
        if found is None or not busy.isdisjoint(claim.inputs):
            continue
        batches = state.trace.batches[found[0] : found[0] + found[1]]
        if key == f"{MERGE_CLAIM}{batches[0].desc.lower}":
            held = frozenset(claim.inputs)
            yield _spec(state, batches, [p for b in batches for p in b.parts() if p.id in held])
            busy.update(claim.inputs)


def _left_to_writers(batches: Sequence[HollowBatch], most: int) -> int:
    """How many of the newest batches, empty ones among them, are left to whoever commits: none if they are too many."""
    count = with_rows = 0
    for batch in reversed(batches):
        if not is_small(batch):
            break
        count += 1
        with_rows += bool(batch.runs)
        if with_rows > most:
            return 0
    return count


def _free_segments(batches: Sequence[HollowBatch], taken: set[str]) -> Iterator[list[_Unit]]:
    """Stretches of adjacent batches that nobody is at work on."""
    segment: list[_Unit] = []
    for batch in batches:
        if taken and any(part.id in taken for part in batch.parts()):
            if segment:
                yield segment
            segment = []
        else:
            segment.append(_Unit.of(batch))
    if segment:
        yield segment


@dataclass(frozen=True, slots=True)
class _Rules:
    fan_in: int
    fan_in_small: int
    small_rows: int
    batches_soft: int
    garbage_percent: int
    garbage_runs: int
    garbage_growth: int
    history_rows: int
    inline: bool
    old_schemas: bool

    def due(self, rows: int, largest: int) -> bool:
        fan_in = self.fan_in_small if rows < self.small_rows else self.fan_in
        return rows >= fan_in * largest


def _rules(state: State, policy: MergePolicy, idle: bool) -> _Rules:
    return _Rules(
        fan_in=policy.fan_in_idle if idle else policy.fan_in,
        fan_in_small=policy.fan_in_idle if idle else policy.fan_in_small,
        small_rows=policy.small_rows,
        batches_soft=policy.batches_soft,
        garbage_percent=policy.garbage_percent_idle if idle else policy.garbage_percent,
        garbage_runs=2 if idle else policy.fan_in,
        garbage_growth=8 if idle else 2,
        history_rows=0 if idle else policy.small_rows,
        inline=state.trace.inline_bytes > policy.inline_flush_bytes,
        old_schemas=policy.rewrite_old_schemas,
    )


def _plan_segment(state: State, units: list[_Unit], rules: _Rules) -> Iterator[MergeSpec]:
    windows = _garbage_window(state, units, rules)
    if not windows:
        windows = list(_due_windows(units, rules))
    if not windows:
        windows = _outweighed_window(units, rules)
    # Smaller ones first: they are done soon, and they keep the number of batches down.
    for first, end in sorted(windows, key=lambda w: sum(unit.rows for unit in units[w[0] : w[1]])):
        yield _spec_of_units(state, units[first:end])
    used = {index for first, end in windows for index in range(first, end)}
    if rules.inline:
        for first, end in _stretches(i for i, u in enumerate(units) if i not in used and u.batch.inline_size):
            used.update(range(first, end))
            yield _spec_of_units(state, units[first:end])
    for index, unit in enumerate(units):
        if index in used or not unit.rows:
            continue
        if (unit.rows >= rules.history_rows and _has_history(state, unit)) or (
            rules.old_schemas and _has_old_schema(state, unit)
        ):
            yield _spec_of_units(state, [unit])


def _due_windows(units: Sequence[_Unit], rules: _Rules) -> Iterator[tuple[int, int]]:
    """The longest stretches `[first, end)` that are due, none overlapping.

    A due stretch that holds the largest run of another stretch grows to all of that one. So only the nodes of
    the Cartesian tree (each batch with all neighbours no larger than it) have to be looked at, the top ones first.
    """
    sums = [0]
    for unit in units:
        sums.append(sums[-1] + unit.rows)
    before, after = _larger_neighbours(units)
    covered = -1
    for index in sorted(range(len(units)), key=lambda i: (before[i], -after[i])):
        first, end = before[index] + 1, after[index]
        if first < covered:
            continue  # inside one that is taken already
        rows = sums[end] - sums[first]
        if sum(unit.runs for unit in units[first:end]) > 1 and rules.due(rows, units[index].largest):
            yield _trimmed(units, first, end)
            covered = end


def _larger_neighbours(units: Sequence[_Unit]) -> tuple[list[int], list[int]]:
    """For each batch the nearest one on either side with a larger run (ties: the left one counts as larger)."""
    count = len(units)
    before, after = [-1] * count, [count] * count
    stack: list[int] = []
    for index, unit in enumerate(units):
        while stack and units[stack[-1]].largest < unit.largest:
            after[stack.pop()] = index
        before[index] = stack[-1] if stack else -1
        stack.append(index)
    # Of equal ones the first stands for all: its stretch begins before and ends after all of them.
    return before, after


def _trimmed(units: Sequence[_Unit], first: int, end: int) -> tuple[int, int]:
    """Without empty batches at the ends; the merge takes these along by itself."""
    while not units[first].runs:
        first += 1
    while not units[end - 1].runs:
        end -= 1
    return first, end


def _outweighed_window(units: Sequence[_Unit], rules: _Rules) -> list[tuple[int, int]]:
    """Too many batches: the longest stretch up to the youngest whose first batch the others outweigh `fan_in` fold."""
    if sum(1 for unit in units if unit.rows) <= rules.batches_soft:
        return []
    following = 0
    first = -1
    for index in range(len(units) - 1, -1, -1):
        following += units[index].rows
        if units[index].rows and following >= rules.fan_in * units[index].rows:
            first = index
    return [] if first < 0 else [_trimmed(units, first, len(units))]


def _garbage_window(state: State, units: Sequence[_Unit], rules: _Rules) -> list[tuple[int, int]]:
    """The stretch that since has wholly passed, when most of its rows would cancel out.

    What would be left is estimated by the sum of the diffs. The estimate may be wrong, so the stretch must also
    have grown by half (an eighth when idle) since its largest run was written; that bounds the work in any case.
    """
    end = len(units)
    while end and (not units[end - 1].rows or not _passed(state, units[end - 1])):
        end -= 1
    first = end
    while first and _passed(state, units[first - 1]):
        first -= 1
    window = units[first:end]
    rows = sum(unit.rows for unit in window)
    largest = max((unit.largest for unit in window), default=0)
    if sum(unit.runs for unit in window) < rules.garbage_runs or rows - largest < largest // rules.garbage_growth:
        return []
    sums = [unit.batch.diff_sum for unit in window]
    left = max(1, abs(sum(known for known in sums if known is not None)))
    if None in sums or rows * 100 < left * rules.garbage_percent:
        return []
    return [_trimmed(units, first, end)]


def _passed(state: State, unit: _Unit) -> bool:
    """Whether all rows of a batch may be brought to one time."""
    since = state.since.element
    return since is not None and all(part.time_max <= since for part in unit.batch.parts())


def _has_history(state: State, unit: _Unit) -> bool:
    """Whether since has passed at least half of the times that a batch of which much may cancel tells apart.

    Each such merge halves what is left to collapse, so a batch is rewritten for this at most 63 times.
    """
    batch, since = unit.batch, state.since.element
    low = max(batch.desc.lower.element or 0, batch.desc.since.element or 0)
    high = max(part.time_max for part in batch.parts())
    if since is None or high <= low or (min(since, high) - low) * 2 < high - low:
        return False
    left = batch.diff_sum
    return left is None or unit.rows >= 2 * abs(left)


def _has_old_schema(state: State, unit: _Unit) -> bool:
    return any(part.schema_id != state.schema_id for part in unit.batch.parts())


def _stretches(indexes: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Ascending indexes as stretches `[first, end)` of adjacent ones."""
    first = end = -1
    for index in indexes:
        if index == end:
            end += 1
            continue
        if end > first:
            yield first, end
        first, end = index, index + 1
    if end > first:
        yield first, end


def _spec_of_units(state: State, units: Sequence[_Unit]) -> MergeSpec:
    batches = [unit.batch for unit in units]
    return _spec(state, batches, [part for batch in batches for part in batch.parts()])


def _spec(state: State, batches: Sequence[HollowBatch], parts: Sequence[Part]) -> MergeSpec:
    return MergeSpec(
        inputs=tuple(part.id for part in parts),
        lower=batches[0].desc.lower,
        upper=batches[-1].desc.upper,
        since=state.since,
        rows=sum(part.rows for part in parts),
        size=sum(part.size for part in parts),
    )


__all__ = ["LEFT_BATCHES_MAX", "MERGE_CLAIM", "MergePolicy", "claim_is_for_merge", "plan"]
