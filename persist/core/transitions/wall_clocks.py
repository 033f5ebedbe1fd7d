"""Transitions of the mapping from wall clocks to times, and back."""

from __future__ import annotations

from persist.core import commands as c
from persist.core.clock_index import Mark, lowered, passed_by, sealed_by
from persist.core.errors import InvalidUsage, NotReadable, Unavailable
from persist.core.frontier import Antichain
from persist.core.persistent_map import with_changes
from persist.core.record import replace
from persist.core.state import Policy, State
from persist.core.transitions.context import Context

MARKS_OVERLAY_MAX = 10_000  # with so many unflushed marks, no instant is sealed
SPOILT_MS = 3_600_000  # a seal so far ahead of a checked clock was made by a wrong one


def stamped(state: State, base_upper: Antichain, checked_ms: int | None, policy: Policy) -> State:
    """The State with the seal of the commit that makes it. `base_upper` is that of the State before the commit.

    The same State object if the seal does not change. With too many unflushed marks no clock counts as checked, so
    instants are sealed later. A tombstone has no index and no seal.
    """
    if state.tombstone:
        return state
    seal, every_ms = state.seal, state.settings.mark_every_ms
    if checked_ms is not None and len(state.marks) < MARKS_OVERLAY_MAX:
        following = sealed_by(seal, base_upper, checked_ms, every_ms)
    elif state.upper != base_upper:
        following = passed_by(seal, base_upper)
    else:
        return state
    if following is seal:
        return state
    if seal.last is None or seal.last is following.last:
        return replace(state, seal=following)
    return replace(state, seal=following, marks=with_changes(state.marks, {seal.last.at_ms: seal.last.upper}))


def resolve_time(state: State, command: c.ResolveTime, context: Context) -> tuple[State, c.TimeResolved | c.TimeToCome]:
    """Answer from the sealed instant; if it is open, this commit seals it."""
    if context.checked_ms is not None and _is_open(state, command.at_ms) and command.at_ms > context.checked_ms:
        return state, c.TimeToCome(context.checked_ms)
    state = sealing(state, command.at_ms, context)
    mark = mark_at(state, command.at_ms, context)
    return state, c.TimeResolved(mark.upper, state.seal.point_ms(command.at_ms, state.settings.mark_every_ms))


def upper_at(state: State, at_ms: int, context: Context) -> tuple[State, Antichain]:
    """The State in which the instant is sealed, and the upper by then. Raises NotReadable, Unavailable."""
    sealed = sealing(state, at_ms, context)
    return sealed, mark_at(sealed, at_ms, context).upper


def times_shown(state: State, command: c.TimesShown, context: Context) -> tuple[State, c.MarksShown]:
    """A time is visible from the first mark beyond it, which may be the next one.

    Commits with unchecked clocks are dated by a checked one.
    """
    first, last = command.first, command.last
    if state.upper.less_equal(first):
        raise InvalidUsage(f"time {first} of shard {state.name!r} is not complete yet; its upper is {state.upper}")
    if not state.since.less_equal(first):
        raise NotReadable(
            f"shard {state.name!r} is readable from {state.since} on; when {first} was written is forgotten",
            as_of=first,
            since=state.since.to_json(),
        )
    if state.seal.passed is not None and context.checked_ms is not None and not state.handed_over:
        state = stamped(state, _base_upper(state, context), context.checked_ms, context.policy)
    marks, is_complete = _newest_first(state), True
    if marks and not marks[-1].upper.less_equal(first) and state.attribute_root.height:
        context.check_indexed(state)
        older = context.indexed.spans[first, last][: command.limit]
        marks += older
        is_complete = len(older) < command.limit  # the index has no more
    begin = max((place for place, mark in enumerate(marks) if not mark.upper.less_equal(last)), default=0)
    end = next((place + 1 for place, mark in enumerate(marks) if mark.upper.less_equal(first)), None)
    page = marks[begin:end][: command.limit]
    if begin + len(page) == (len(marks) if end is None else end) and (is_complete or end is not None):
        return state, c.MarksShown(tuple(page), None)
    rest = page[-1].upper.element
    assert rest is not None  # only the newest mark can be of a closed shard
    return state, c.MarksShown(tuple(page), rest - 1)


def lower_seal(state: State, command: c.LowerSeal, context: Context) -> tuple[State, c.SealLowered]:
    checked_ms = checked(context, state)
    if state.seal.sealed_ms <= checked_ms + SPOILT_MS:
        return state, c.SealLowered(state.seal.sealed_ms, None)
    seal = lowered(state.seal, checked_ms, state.settings.mark_every_ms)
    repaired = replace(_with_cuts_until(state, checked_ms), seal=seal)
    return repaired, c.SealLowered(checked_ms, seal.repairs[-1][1])


def _with_cuts_until(state: State, checked_ms: int) -> State:
    """The State whose row policy continues from there: cuts and looks of later instants would block further ones."""
    known = state.retention
    looked = replace(known.looked, at_ms=min(known.looked.at_ms, checked_ms))
    done = replace(known, cut_ms=min(known.cut_ms, checked_ms), at_ms=min(known.at_ms, checked_ms), looked=looked)
    to_come = [at_ms for at_ms in state.cuts if at_ms > checked_ms]
    return replace(state, cuts=with_changes(state.cuts, {}, to_come), retention=done)


def _newest_first(state: State) -> list[Mark]:
    """The marks in the State, and the one that the next checked commit will make; newest first."""
    seal = state.seal
    if seal.last is None:
        return []
    marks = [seal.last, *(Mark(at_ms, upper) for at_ms, upper in sorted(state.marks.items(), reverse=True))]
    upper = state.upper if seal.passed is None else seal.passed
    if seal.last.upper < upper:
        marks.insert(0, Mark(seal.next_ms(state.settings.mark_every_ms), upper))
    return marks


def _is_open(state: State, at_ms: int) -> bool:
    return at_ms > state.seal.known_ms(state.settings.mark_every_ms) and state.seal.repair_of(at_ms) is None


def sealing(state: State, at_ms: int, context: Context) -> State:
    """The State in which the instant is sealed. Raises Unavailable if it cannot be sealed now."""
    if not _is_open(state, at_ms):
        return state
    checked_ms = checked(context, state)
    sealed = stamped(state, _base_upper(state, context), checked_ms, context.policy)
    if at_ms > sealed.seal.known_ms(state.settings.mark_every_ms):
        raise Unavailable(
            f"shard {state.name!r} has {len(state.marks)} marks that wait to be written to its index; retry"
        )
    return sealed


def _base_upper(state: State, context: Context) -> Antichain:
    return state.upper if context.base_upper is None else context.base_upper


def checked(context: Context, state: State) -> int:
    if context.checked_ms is None:
        raise Unavailable(
            f"the clock of this machine and that of the blob store do not agree, or cannot be compared, so shard "
            f"{state.name!r} is not sealed beyond {state.seal.sealed_ms} ms (UTC, since 1970); set the clock, or retry"
        )
    return context.checked_ms


def mark_at(state: State, at_ms: int, context: Context) -> Mark:
    """The mark that answers for a sealed instant. Raises NotReadable."""
    mark = _newest_mark(state, at_ms, context)
    repair, every_ms = state.seal.repair_of(at_ms), state.settings.mark_every_ms
    if repair is not None and (mark is None or mark.at_ms != state.seal.point_ms(at_ms, every_ms)):
        raise NotReadable(
            f"{at_ms} ms (UTC, since 1970) of shard {state.name!r} was sealed by a wrong clock, whose repair left "
            f"instants after {repair[0]} ms and up to {repair[1]} ms without an answer; use another instant",
            as_of=None,
            since=state.since.to_json(),
            lowered_to_ms=repair[0],
            lowered_from_ms=repair[1],
        )
    if mark is None:
        first_ms = _first_ms(state, context)
        raise NotReadable(
            f"shard {state.name!r} knows wall clocks from {first_ms} ms (UTC, since 1970) on, not {at_ms} ms",
            as_of=None,
            since=state.since.to_json(),
            first_ms=first_ms,
        )
    return mark


def _newest_mark(state: State, at_ms: int, context: Context) -> Mark | None:
    last = state.seal.last
    if last is not None and last.at_ms <= at_ms:
        return last
    recent = max((at for at in state.marks if at <= at_ms), default=None)
    if recent is not None:
        return Mark(recent, state.marks[recent])
    if not state.attribute_root.height:
        return None
    context.check_indexed(state)
    return context.indexed.marks[at_ms]


def _first_ms(state: State, context: Context) -> int:
    """The first known instant: that of the oldest mark, which may be in the index."""
    if context.indexed.first_ms is not None:
        return context.indexed.first_ms
    known = [*state.marks, *([state.seal.last.at_ms] if state.seal.last is not None else [])]
    return min(known, default=state.seal.next_ms(state.settings.mark_every_ms))
