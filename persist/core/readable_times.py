"""Which times of a shard are readable: from since on, and the single times that tags, cuts and readers keep. Pure.

Merges move a time that since has passed to the least kept time at or beyond it, or to since. So what accumulates up to
a kept time stays what it was, and a tag costs what changed since then, not a copy.
"""

from __future__ import annotations

from persist.core.frontier import EMPTY, TIME_MAX, Antichain, meet
from persist.core.shard_settings import DROP
from persist.core.state import State
from persist.core.truncations_and_drops import Truncations


def held_since(state: State, *more: Antichain) -> Antichain:
    """The meet of the holds of all readers, the shard's own history and `more`; the current since without holds.

    A leased hold beyond the latest complete time counts as that time: its reader waits for future times, or used a
    wrong unit, and must not take what exists from other readers. A lease at `[]` holds nothing, so it cannot close the
    shard to reads. Critical readers can, regardless of the history setting, unless a tag or a reader keeps a single
    time, which is not readable in a closed shard.
    """
    leased = (r.since for r in state.leased_readers.values() if not r.since.is_empty and not r.point)
    holds = [_reached(since, state.upper) for since in leased]
    holds += [r.since for r in state.critical_readers.values()]
    if holds and meet(holds).is_empty and not state.tags and not any(r.point for r in state.leased_readers.values()):
        return EMPTY
    since = meet([*holds, *(hold for hold in (state.history_hold, *more) if not hold.is_empty)])
    return state.since if since.is_empty else since


def kept_below(state: State, since: Antichain) -> tuple[int, ...]:
    """The times before `since` that a merge of this State keeps distinct, ascending. There may be more than 1,000.

    They are the times of tags and before cuts (also those of a policy that drops), those of readers that hold a single
    time, the last times before the cuts of drops, and those at which truncations wrote retractions, with the times
    before these. None is ever added before the shard's since, so a merge may use a later State than the one from which
    it took since. In a shard that is closed to reads only drops count: the dropped rows still have to be removed.
    """
    if since.element is None:
        return ()
    kept = {drop.cut - 1 for drop in state.drops}
    if not state.since.is_empty:
        kept |= _points(state) | cut_times(state)
        wrote = (truncation.at for truncation in visible_truncations(state) if truncation.wrote)
        kept.update(time for at in wrote for time in (at - 1, at))
    return tuple(sorted(time for time in kept if time < since.element))


def visible_truncations(state: State) -> Truncations:
    """The truncations that a readable time precedes. A later truncation needs them to find which rows are gone."""
    if not state.truncations:  # every view calls this, and the rest looks at all readers
        return ()
    earliest = earliest_readable(state)
    return tuple(truncation for truncation in state.truncations if earliest < Antichain(truncation.at))


def named_times(state: State) -> set[int]:
    """The times that tags keep readable, and those before cuts.

    The cuts of a policy that drops are not readable, although merges keep their times distinct: otherwise its future
    cuts would retain everything that was dropped.
    """
    policy = state.settings.rows
    tagged = {tag.time for tag in state.tags.values()}
    return tagged if policy is not None and policy.mode == DROP else tagged | cut_times(state)


def cut_times(state: State) -> set[int]:
    """The times before the cuts of the row policy, which merges keep distinct."""
    return {cut.upper - 1 for cut in state.cuts.values()}


def is_kept(state: State, time: int) -> bool:
    """Whether history allows an exact read as of this time: it is at or beyond since, or it is kept."""
    return state.since.less_equal(time) or (not state.since.is_empty and time in _points(state))


def earliest_readable(state: State) -> Antichain:
    """The first readable time; `[]` if the shard is closed to reads."""
    if state.since.is_empty:
        return EMPTY
    return meet([state.since, *map(Antichain, _points(state))])


def _points(state: State) -> set[int]:
    """The single times that tags, cuts and readers keep."""
    times = named_times(state)
    times.update(r.since.element for r in state.leased_readers.values() if r.point and r.since.element is not None)
    return times


def latest_time(state: State) -> Antichain:
    """The latest complete time; [0] if there is none."""
    upper = state.upper.element
    return Antichain(TIME_MAX if upper is None else max(upper - 1, 0))


def _reached(hold: Antichain, upper: Antichain) -> Antichain:
    if hold.element is None or upper.element is None:
        return hold
    return Antichain(min(hold.element, max(upper.element - 1, 0)))
