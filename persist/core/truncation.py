"""To which time a shard is truncated, and tombstones that remove rows older than a cut without reading them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from persist.core.batch import HollowBatch, Part, Run
from persist.core.errors import InvalidUsage
from persist.core.frontier import Antichain
from persist.core.record import Record, replace

# What a shard was truncated to: before which time it lets no row come that was to go. Pure.


TRUNCATIONS_MAX = 1_000  # of a shard, that something readable still tells apart


class Truncation(Record, frozen=True):
    """At the time `at` the rows were taken away that were there before the time `before` and still were. 0: none were.

    It makes a truncation to the same time, or to an earlier one, change nothing when it comes again. `removed` rows
    went by it and by those before it. `wrote`: there are retractions of it at the time `at`; otherwise nothing was to
    be taken away, or a drop did it. What goes was worked out where the upper was `seen`; since then rows were only
    added (0: a drop).
    """

    before: int = 0
    at: int = 0
    removed: int = 0
    wrote: bool = False
    seen: int = 0


NOT_TRUNCATED = Truncation()
Truncations = tuple[Truncation, ...]  # `before` and `at` ascend


def owned_by_appenders(name: str, upper: object) -> InvalidUsage:
    """Why a shard that is fed by `append` is not changed by verbs that read it first."""
    return InvalidUsage(
        f"shard {name!r} is fed by append, whose writer owns the times: this would take the time {upper}, and what is "
        "appended there would be refused; let the writer append the changes, or stop it and insert from then on"
    )


def with_truncation(known: Truncations, new: Truncation, earliest: int) -> Truncations:
    """With one more. Of those that no time before is readable, which begins at `earliest`, only the last one stays."""
    passed = [old for old in known if old.at <= earliest]
    return (*passed[-1:], *(old for old in known if old.at > earliest), new)


def until(known: Truncations, as_of: int) -> Truncations:
    """Those that a restore to a time leaves: what came after it is undone."""
    return tuple(old for old in known if old.at <= as_of)


# Drops: at a time `at` the rows go that were written before a time `cut`, without a row that says so. Pure.
#
# What a shard held as of a time are the updates from a floor up to that time. The floor is the cut of the latest drop
# at or before that time. Whoever reads contents asks `contents` for the runs that he may read.


DROPS_MAX = 1_000  # of a shard, that something readable still tells apart


class RowDrop(Record, frozen=True):
    """Rows with times before `cut` are not there from the time `at` on. They are there as of every time before `at`."""

    cut: int
    at: int


Drops = tuple[RowDrop, ...]  # both fields ascend


def floor_at(drops: Sequence[RowDrop], time: int) -> int:
    """The time before which no update counts for the contents as of `time`; 0: all count."""
    return max((drop.cut for drop in drops if drop.at <= time), default=0)


def pending_drop(drops: Sequence[RowDrop], upper: Antichain) -> RowDrop | None:
    """The drop that becomes effective at the next time, once a writer completes it; None: none waits."""
    last = drops[-1] if drops else None
    return last if last is not None and upper.less_equal(last.at) else None


def contents(runs: Iterable[Run], drops: Sequence[RowDrop], as_of: int) -> tuple[Run, ...]:
    """The runs from which the contents as of a time are read: without what was dropped by then."""
    return clipped(runs, floor_at(drops, as_of))


def taken_away(runs: Iterable[Run], drops: Sequence[RowDrop], drop: RowDrop) -> tuple[Run, ...]:
    """The runs whose updates before `drop.cut` are what that drop took away: without what earlier ones had taken."""
    return runs_until(contents(runs, drops, drop.at - 1), drop.cut)


def runs_until(runs: Iterable[Run], time: int) -> tuple[Run, ...]:
    """The runs with those parts that may have updates before `time`."""
    kept = (tuple(part for part in run.parts if part.time_min < time) for run in runs)
    return tuple(Run(parts) for parts in kept if parts)


def drops_within(drops: Iterable[RowDrop], lower: int, upper: int | None) -> Drops:
    """The drops at times in `[lower, upper)`; None: without end."""
    return tuple(drop for drop in drops if lower <= drop.at and (upper is None or drop.at < upper))


def clipped(runs: Iterable[Run], floor: int) -> tuple[Run, ...]:
    """The runs without the rows before `floor`: parts wholly before it go, parts across it are clipped."""
    if not floor:
        return tuple(runs)
    kept = (tuple(clip(part, floor) for part in run.parts if part.time_max >= floor) for run in runs)
    return tuple(Run(parts) for parts in kept if parts)


def clip(part: Part, floor: int) -> Part:
    """The part without rows before `floor`. A bundle keeps its bounds: whoever opens it clips what it lists."""
    if part.bundle is not None:
        return part if begins(part) >= floor else replace(part, clip=floor, diff_sum=None)
    return part if part.time_min >= floor else replace(part, clip=floor, time_min=floor, diff_sum=None)


def known_rows(parts: Iterable[Part]) -> int:
    """The sum of the diffs of those parts that tell theirs."""
    return sum(part.diff_sum for part in parts if part.diff_sum is not None)


def begins(part: Part) -> int:
    """The time before which the part has no update that shows."""
    return part.time_min if part.clip is None else max(part.clip, part.time_min)


def check_not_erasing(name: str, upper: Antichain, retracting: Sequence[Run], erasures: Sequence[str] = ()) -> None:
    """Raises InvalidUsage where the next time retracts erased rows: a drop at that time takes them away as well.

    `erasures` are the ids of those that are pending, as far as they are known.
    """
    if retracting:
        least = (upper.element or 0) + 1
        which = f", {erasures[0]}," if erasures else ""
        raise InvalidUsage(
            f"shard {name!r} has a pending erasure{which} which retracts rows at time {upper}, with the next commit of "
            f"its writer; truncate after that commit, before {least} or a later time",
            erasures=list(erasures),
            least=least,
        )


def check_droppable(name: str, batches: Iterable[HollowBatch], drops: Sequence[RowDrop], cut: int) -> None:
    """Raises InvalidUsage where one more drop is too many, or could leave a row there less than no times.

    Of a part across the cut only its least multiplicity is known, so one before the cut counts too.
    """
    later = [part for batch in batches for part in batch.parts() if part.diff_min < 0 and part.time_max >= cut]
    if later:
        least = max(part.time_max for part in later) + 1
        raise InvalidUsage(
            f"part {later[0].id} of shard {name!r}, with times from {later[0].time_min} to {later[0].time_max}, "
            f"may take away rows, at {cut} or later, that were there before: a drop would make them negative; "
            f"truncate before {least} or a later time, or, where the shard is not fed by append, with mode 'retract'",
            before=cut,
            least=least,
        )
    if len(drops) >= DROPS_MAX:
        raise InvalidUsage(
            f"shard {name!r} has {len(drops)} drops that readable times still tell apart, which is the most; forget "
            "history first, or truncate with mode 'retract'"
        )
