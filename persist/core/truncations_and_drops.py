"""The truncations of a shard, and row drops, which remove rows older than a cut without reading them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from persist.core.batch import HollowBatch, Part, Run
from persist.core.errors import InvalidUsage
from persist.core.frontier import Antichain
from persist.core.record import Record, replace

TRUNCATIONS_MAX = 1_000  # of a shard, that a readable time precedes


class Truncation(Record, frozen=True):
    """At the time `at` the remaining rows written before the time `before` were removed. 0: no truncation.

    A repeated truncation to the same time, or to an earlier one, changes nothing. `removed` is the number of rows that
    it and earlier truncations removed. `wrote`: it wrote retractions at the time `at`; otherwise there was nothing to
    remove, or a drop removed it. Its rows were computed at the upper `seen`, after which rows were only added (0: a
    drop).
    """

    before: int = 0
    at: int = 0
    removed: int = 0
    wrote: bool = False
    seen: int = 0


NOT_TRUNCATED = Truncation()
Truncations = tuple[Truncation, ...]  # `before` and `at` ascend


def owned_by_appenders(name: str, upper: object) -> InvalidUsage:
    """The error of verbs that read before they write, in a shard that is fed by `append`."""
    return InvalidUsage(
        f"shard {name!r} is fed by append, whose writer owns the times: this would take the time {upper}, and what is "
        "appended there would be refused; let the writer append the changes, or stop it and insert from then on"
    )


def with_truncation(known: Truncations, new: Truncation, earliest: int) -> Truncations:
    """The truncations with a new one. Of those that no readable time (from `earliest` on) precedes one is kept."""
    passed = [old for old in known if old.at <= earliest]
    return (*passed[-1:], *(old for old in known if old.at > earliest), new)


def until(known: Truncations, as_of: int) -> Truncations:
    """The truncations that a restore to `as_of` keeps: later ones are undone."""
    return tuple(old for old in known if old.at <= as_of)


# Row drops: at a time `at` the rows written before a time `cut` disappear, without retractions. Pure.
#
# The contents of a shard as of a time are the updates from a floor up to that time. The floor is the cut of the latest
# drop at or before that time. Readers apply `contents` to the runs.


DROPS_MAX = 1_000  # of a shard, that a readable time precedes


class RowDrop(Record, frozen=True):
    """Rows with times before `cut` are invisible from the time `at` on, and visible as of every earlier time."""

    cut: int
    at: int


Drops = tuple[RowDrop, ...]  # both fields ascend


def floor_at(drops: Sequence[RowDrop], time: int) -> int:
    """The time before which updates do not count for the contents as of `time`; 0: all count."""
    return max((drop.cut for drop in drops if drop.at <= time), default=0)


def pending_drop(drops: Sequence[RowDrop], upper: Antichain) -> RowDrop | None:
    """The pending drop, which becomes effective once a writer completes the next time; None: there is none."""
    last = drops[-1] if drops else None
    return last if last is not None and upper.less_equal(last.at) else None


def contents(runs: Iterable[Run], drops: Sequence[RowDrop], as_of: int) -> tuple[Run, ...]:
    """The runs from which the contents as of a time are read: without rows dropped by then."""
    return clipped(runs, floor_at(drops, as_of))


def taken_away(runs: Iterable[Run], drops: Sequence[RowDrop], drop: RowDrop) -> tuple[Run, ...]:
    """The runs whose updates before `drop.cut` that drop removed: without those of earlier drops."""
    return runs_until(contents(runs, drops, drop.at - 1), drop.cut)


def runs_until(runs: Iterable[Run], time: int) -> tuple[Run, ...]:
    """The runs with those parts that may have updates before `time`."""
    kept = (tuple(part for part in run.parts if part.time_min < time) for run in runs)
    return tuple(Run(parts) for parts in kept if parts)


def drops_within(drops: Iterable[RowDrop], lower: int, upper: int | None) -> Drops:
    """The drops at times in `[lower, upper)`; None: without end."""
    return tuple(drop for drop in drops if lower <= drop.at and (upper is None or drop.at < upper))


def clipped(runs: Iterable[Run], floor: int) -> tuple[Run, ...]:
    """The runs without rows before `floor`: parts wholly before it are left out, parts across it are clipped."""
    if not floor:
        return tuple(runs)
    kept = (tuple(clip(part, floor) for part in run.parts if part.time_max >= floor) for run in runs)
    return tuple(Run(parts) for parts in kept if parts)


def clip(part: Part, floor: int) -> Part:
    """The part without rows before `floor`. A bundle keeps its bounds: its parts are clipped when it is read."""
    if part.bundle is not None:
        return part if begins(part) >= floor else replace(part, clip=floor, diff_sum=None)
    return part if part.time_min >= floor else replace(part, clip=floor, time_min=floor, diff_sum=None)


def known_rows(parts: Iterable[Part]) -> int:
    """The sum of the diffs of those parts for which it is known."""
    return sum(part.diff_sum for part in parts if part.diff_sum is not None)


def begins(part: Part) -> int:
    """The time before which the part has no visible update."""
    return part.time_min if part.clip is None else max(part.clip, part.time_min)


def last_written(parts: Iterable[Part], drops: Iterable[RowDrop]) -> int:
    """The last time at which rows were written or dropped, as the end of a closed shard; -1: there is none."""
    return max((*(part.time_max for part in parts), *(drop.at for drop in drops)), default=-1)


def check_not_erasing(name: str, upper: Antichain, retracting: Sequence[Run], erasures: Sequence[str] = ()) -> None:
    """Raise InvalidUsage if the next time retracts erased rows, which a drop at that time would remove as well.

    `erasures` are the ids of the pending ones, if they are known.
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
    """Raise InvalidUsage if there are too many drops, or if this one could leave a row with a negative multiplicity.

    For a part across the cut only its least multiplicity is known, so one before the cut counts too.
    """
    later = [part for batch in batches for part in batch.parts() if part.diff_min < 0 and part.time_max >= cut]
    if later:
        least = max(part.time_max for part in later) + 1
        raise InvalidUsage(
            f"part {later[0].id} of shard {name!r}, with times from {later[0].time_min} to {later[0].time_max}, "
            f"may retract, at {cut} or later, rows written before: a drop would make them negative; "
            f"truncate before {least} or a later time, or, where the shard is not fed by append, with mode 'retract'",
            before=cut,
            least=least,
        )
    if len(drops) >= DROPS_MAX:
        raise InvalidUsage(
            f"shard {name!r} has {len(drops)} drops that readable times precede, which is the maximum; forget history "
            "first, or truncate with mode 'retract'"
        )
