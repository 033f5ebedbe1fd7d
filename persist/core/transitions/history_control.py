"""Transitions of history: wall clocks, settings, tags, and the expiry of leases."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

from persist.core import commands as c
from persist.core.clock_index import Mark, lowered, passed_by, sealed_by, with_grid
from persist.core.erasure_progress import erased_from
from persist.core.errors import Conflict, InvalidUsage, NotReadable, Unavailable
from persist.core.frontier import EMPTY, MINIMUM, TIME_MAX, Antichain
from persist.core.ids import ReaderId
from persist.core.named_holds import KEEP_MS_MAX, TAGS_MAX, Tag, check_tag_name
from persist.core.persistent_map import Entries, with_changes
from persist.core.record import replace
from persist.core.shard_settings import DROP, ShardSettings
from persist.core.spill import ENTRIES
from persist.core.state import Leased, LeasedReader, Policy, State, held_since, is_kept, latest_time
from persist.core.transitions.audit_recording import retired
from persist.core.transitions.context import Context
from persist.core.transitions.spill_flush import without_old_entries, without_old_outcomes
from persist.core.transitions.tombstones import without_dropped

# Leases: the constants of their rules, and removing holders whose leases lapsed, which never moves since on its own.
#
# They are judged by the lease clock of the State, which no wall clock moves (docs/design/0005-leases-and-clocks.md).
# Every commit removes lapsed leases. A transition also removes them before it refuses a command or holds since back
# because of a lease, in case no commit has happened since they lapsed.


HEARTBEAT_EVERY = 4  # a heartbeat within lease / 4 of the last one changes nothing, to keep the log small
# A lapsed claim keeps the progress of its merge for the next owner. After this many leases it is dropped.
CLAIM_KEPT_LEASES = 10

_K = TypeVar("_K")
_L = TypeVar("_L", bound=Leased)


def without_lapsed_readers(state: State, now_ms: int) -> State:
    """The State without lapsed readers; the same object if there are none."""
    gone = _lapsed(state.leased_readers, now_ms)
    return replace(state, leased_readers=with_changes(state.leased_readers, {}, gone)) if gone else state


def without_lapsed_writers(state: State, now_ms: int) -> State:
    """The State without lapsed writers; the same object if there are none."""
    gone = _lapsed(state.writers, now_ms)
    return retired(state, gone, now_ms) if gone else state


def _lapsed(entries: Mapping[_K, _L], now_ms: int) -> list[_K]:
    """The keys of lapsed leases. They are checked one by one only if one may have lapsed."""
    due = entries.due if isinstance(entries, Entries) else None
    if due is not None and due >= now_ms:
        return []
    gone = [key for key, entry in entries.items() if entry.lapsed(now_ms)]
    if isinstance(entries, Entries) and not gone:
        entries.due = min((entry.lapses_ms for entry in entries.values()), default=None)
    return gone


def expire_lapsed(state: State, now_ms: int, checked_ms: int | None = None) -> State:
    """The State without lapsed readers and writers, claims that lapsed long ago, and files of old outcomes.

    A claim that lapsed recently is kept, with its progress, for the next owner. Without a checked clock all outcomes
    are kept.
    """
    state = without_lapsed_writers(without_lapsed_readers(state, now_ms), now_ms)
    state = without_old_outcomes(state, now_ms, checked_ms)
    kept = {k: claim for k, claim in state.claims.items() if not claim.lapsed(now_ms, CLAIM_KEPT_LEASES)}
    return state if len(kept) == len(state.claims) else replace(state, claims=kept)


def forget_lapsed(state: State, command: c.ForgetLapsed, context: Context) -> tuple[State, c.SweptBefore]:
    """Always a new State object, and so always a commit."""
    silent = command.silent
    readers = [k for k, reader in silent.leased_readers.items() if state.leased_readers.get(k) == reader]
    writers = [k for k, writer in silent.writers.items() if state.writers.get(k) == writer]
    claims = {k: claim for k, claim in state.claims.items() if silent.claims.get(k) != claim}
    swept_before_ms = max(state.swept_before_ms, min(command.staged_before_ms, context.now_ms))
    state = replace(
        state,
        leased_readers=with_changes(state.leased_readers, {}, readers),
        claims=claims,
        swept_before_ms=swept_before_ms,
    )
    state = retired(state, writers, context.lease_now_ms)
    return expire_lapsed(state, context.lease_now_ms, context.checked_ms), c.SweptBefore(swept_before_ms)


def check_lease(what: str, lease_ms: int) -> None:
    """Raise InvalidUsage if the lease of a reader, a writer or a claim is too short or too long."""
    if not 0 < lease_ms <= c.LEASE_MS_MAX:
        raise InvalidUsage(f"{what} lease {lease_ms} ms is outside (0, {c.LEASE_MS_MAX}]")


def is_fresh(reader: ReaderId, known: LeasedReader, context: Context) -> bool:
    """Whether the lease of a reader was renewed so recently that a heartbeat changes nothing.

    The lease clock does not show that: it may be far behind. So this committer must have observed, a short while ago,
    that the lease was not renewed yet. If it has not, the heartbeat is committed.
    """
    soon_ms = known.lease_ms // HEARTBEAT_EVERY
    if context.lease_clock_ms is None:
        return context.now_ms - known.heartbeat_ms < soon_ms
    return any(
        renewed.age_ms < soon_ms and renewed.state.leased_readers.get(reader) != known for renewed in context.renewed
    )


def heartbeat_ms(known: Leased, context: Context) -> int:
    """The heartbeat of a lease that is renewed now. It always differs from the last one, so that it is visible."""
    if context.lease_clock_ms is None:
        return context.now_ms
    return max(context.lease_clock_ms, known.heartbeat_ms + 1)


def with_lease_clock(state: State, now_ms: int) -> State:
    """The State whose lease clock begins at `now_ms`. Heartbeats beyond it came from a clock that was ahead."""
    found: dict[str, Any] = {}
    for name in ("writers", "leased_readers", "claims"):
        entries = getattr(state, name)
        ahead = {k: replace(e, heartbeat_ms=now_ms) for k, e in entries.items() if e.heartbeat_ms > now_ms}
        if ahead:
            found[name] = {**entries, **ahead}
    return replace(state, **found) if found else state


# Transitions of history: the mapping from wall clocks to times, the settings, and the shard's own hold on since.


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


# --- wall clock to time, and back


def resolve_time(state: State, command: c.ResolveTime, context: Context) -> tuple[State, c.TimeResolved | c.TimeToCome]:
    """Answer from the sealed instant; if it is open, this commit seals it."""
    if context.checked_ms is not None and _is_open(state, command.at_ms) and command.at_ms > context.checked_ms:
        return state, c.TimeToCome(context.checked_ms)
    state = _sealing(state, command.at_ms, context)
    mark = _mark_at(state, command.at_ms, context)
    return state, c.TimeResolved(mark.upper, state.seal.point_ms(command.at_ms, state.settings.mark_every_ms))


def upper_at(state: State, at_ms: int, context: Context) -> tuple[State, Antichain]:
    """The State in which the instant is sealed, and the upper by then. Raises NotReadable, Unavailable."""
    sealed = _sealing(state, at_ms, context)
    return sealed, _mark_at(sealed, at_ms, context).upper


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
        _check_indexed(state, context)
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
    """Whether the instant has no answer yet."""
    return at_ms > state.seal.known_ms(state.settings.mark_every_ms) and state.seal.repair_of(at_ms) is None


def _sealing(state: State, at_ms: int, context: Context) -> State:
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


def _mark_at(state: State, at_ms: int, context: Context) -> Mark:
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
    _check_indexed(state, context)
    return context.indexed.marks[at_ms]


def _first_ms(state: State, context: Context) -> int:
    """The first known instant: that of the oldest mark, which may be in the index."""
    if context.indexed.first_ms is not None:
        return context.indexed.first_ms
    known = [*state.marks, *([state.seal.last.at_ms] if state.seal.last is not None else [])]
    return min(known, default=state.seal.next_ms(state.settings.mark_every_ms))


def _check_indexed(state: State, context: Context) -> None:
    if state.attribute_root.height and context.indexed.flushes != state.attribute_root.flushes:
        raise RuntimeError(f"the marks of shard {state.name!r} were read in an index that is not the State's")


# --- settings, and the hold that follows from them


def set_settings(state: State, command: c.SetSettings, context: Context) -> tuple[State, c.SettingsAre]:
    """Since is unchanged: maintenance forgets history that a shorter retention no longer covers."""
    known = state.settings
    wanted = ShardSettings(command.history_ms, command.mark_every_ms, command.expected_version + 1, command.rows)
    wanted.check()
    if known == wanted:  # a retry
        return state, c.SettingsAre(known)
    if command.expected_version != known.version:
        raise Conflict(
            f"the settings of shard {state.name!r} have version {known.version}, not the expected "
            f"{command.expected_version}; read them anew",
            expected=command.expected_version,
            actual=known.version,
        )
    hold = state.history_hold
    if not wanted.keeps_history or state.since.is_empty:
        hold = EMPTY
    elif hold.is_empty:
        hold = state.since
    seal = state.seal
    if wanted.mark_every_ms != known.mark_every_ms:
        seal = with_grid(seal, known.mark_every_ms)
    # Dropped rows are not visible as of the cuts any more, so a policy that retracts begins with new cuts.
    dropped = known.rows is not None and known.rows.mode == DROP and (wanted.rows is None or wanted.rows.mode != DROP)
    cuts = {} if wanted.rows is None or dropped else state.cuts
    spilled = state.spilled if wanted.keeps_history else with_changes(state.spilled, {}, [ENTRIES])
    following = replace(state, settings=wanted, history_hold=hold, seal=seal, spilled=spilled, cuts=cuts)
    return following, c.SettingsAre(wanted)


def forget_outlived(state: State, command: c.ForgetOutlived, context: Context) -> tuple[State, c.HistoryMoved]:
    """Dropped rows are removed last, since the earlier steps may end the readable times before their drop.

    A step that needs a checked clock is skipped without one; the others are applied all the same.
    """
    following, unchecked = state, None
    for without in (partial(_aged, before_ms=command.before_ms), _without_outlived_tags):
        try:
            following = without(following, context=context)
        except Unavailable as error:
            unchecked = error
    following = without_dropped(following)
    if unchecked is not None and following is state:
        raise unchecked
    return following, c.HistoryMoved(following.history_hold, following.since)


def _aged(state: State, before_ms: int | None, context: Context) -> State:
    settings = state.settings
    if before_ms is None:
        return state
    if not settings.version or settings.history_ms is None or state.since.is_empty:
        return state
    if not settings.history_ms:
        return forgotten(state, latest_time(state), context)
    if before_ms > checked(context, state) - settings.history_ms:  # the clock was set, or the settings changed
        return state
    state = without_old_entries(state, before_ms, checked(context, state))
    sealed = _sealing(state, before_ms, context)
    try:
        upper = _mark_at(sealed, before_ms, context).upper
    except NotReadable:  # the upper at that instant is unknown: a later instant moves since
        return state
    if upper == MINIMUM:
        return state
    hold = Antichain(TIME_MAX if upper.element is None else upper.element - 1)
    if hold <= state.history_hold:
        return _with_since(state, context)  # a reader that held since back may have gone
    return _with_since(replace(sealed, history_hold=hold), context)


def forget_history(state: State, command: c.ForgetHistory, context: Context) -> tuple[State, c.HistoryMoved]:
    check_forgettable(state, command.before)
    state = forgotten(state, command.before, context)
    return state, c.HistoryMoved(state.history_hold, state.since)


def check_forgettable(state: State, before: Antichain) -> None:
    """Raise InvalidUsage if history before that time cannot be forgotten by request."""
    if before.is_empty:
        raise InvalidUsage(f"forgetting all of shard {state.name!r} is what drop does; give a time")
    if latest_time(state) < before:
        raise InvalidUsage(
            f"{before} is beyond the latest complete time of shard {state.name!r}, whose upper is {state.upper}: "
            "nothing could be read; give an earlier time"
        )


def forgotten(state: State, before: Antichain, context: Context) -> State:
    """The State whose own hold does not cover history before `before`."""
    if state.since.is_empty:
        return state
    if state.settings.keeps_history:
        if state.history_hold < before:
            state = replace(state, history_hold=before)
        return _with_since(state, context)  # a reader that held more may have gone
    return _with_since(state, context, before)


def _with_since(state: State, context: Context, *more: Antichain) -> State:
    """The State whose since follows the live holds. Only readers and a drop close the shard to reads."""
    live = without_lapsed_readers(state, context.lease_now_ms)
    since = max(state.since, held_since(live, *more))
    if since != state.since and not since.is_empty:
        state = replace(live, since=since)
    return state


# Transitions of tags: single times that stay readable after since has passed them.


def set_tag(state: State, command: c.SetTag, context: Context) -> tuple[State, c.TagsAre]:
    """A merge under way advances to a since not beyond the shard's, so it preserves every time that may be tagged."""
    name, time = check_tag_name(command.tag), command.time
    known = state.tags.get(name)
    if known is not None and known.time != time:
        raise Conflict(
            f"shard {state.name!r} has a tag {name!r} already, at the time {known.time}; remove it, or use another "
            "name",
            expected=time,
            actual=known.time,
        )
    if known is None:
        _check_new(state, name, time)
    if command.keep_ms is not None and not 0 < command.keep_ms <= KEEP_MS_MAX:
        raise InvalidUsage(f"a tag is kept for {command.keep_ms} ms; it must be in [1, {KEEP_MS_MAX}], or for ever")
    until_ms = None if command.keep_ms is None else checked(context, state) + command.keep_ms
    tag = Tag(time, until_ms)
    if tag != known:
        state = replace(state, tags=with_changes(state.tags, {name: tag}))
    return state, c.TagsAre({name: tag})


def remove_tag(state: State, command: c.RemoveTag, context: Context) -> tuple[State, c.TagRemoved]:
    known = state.tags.get(check_tag_name(command.tag))
    if known is None:
        return state, c.TagRemoved(None)
    return replace(state, tags=with_changes(state.tags, {}, (command.tag,))), c.TagRemoved(known)


def _without_outlived_tags(state: State, context: Context) -> State:
    """The State without expired tags. It needs a checked clock, so that a wrong one loses no tag."""
    lapsed = [n for n, tag in state.tags.items() if tag.until_ms is not None and tag.until_ms <= context.now_ms]
    if not lapsed:
        return state
    checked(context, state)
    return replace(state, tags=with_changes(state.tags, {}, lapsed))


def named(state: State, name: str) -> Tag:
    """The tag of this name. Raises NotReadable if there is none."""
    known = state.tags.get(check_tag_name(name))
    if known is None:
        raise NotReadable(
            f"shard {state.name!r} has no tag {name!r}: it was never set, was removed, or has expired",
            as_of=None,
            since=state.since.to_json(),
            tag=name,
        )
    return known


def _check_new(state: State, name: str, time: int) -> None:
    if time > TIME_MAX or state.upper.less_equal(time):
        raise InvalidUsage(
            f"time {time} of shard {state.name!r} is not complete yet: its upper is {state.upper}; tag an earlier one"
        )
    if Antichain(time) < (erased := erased_from(state)):
        raise NotReadable(
            f"rows of shard {state.name!r} were erased at {erased}: the time {time} can no longer be tagged",
            as_of=[time],
            since=erased.to_json(),
        )
    if not is_kept(state, time):
        raise NotReadable(
            f"shard {state.name!r} is readable from {state.since} on: the time {time} can no longer be tagged",
            as_of=[time],
            since=state.since.to_json(),
        )
    if len(state.tags) >= TAGS_MAX:
        raise InvalidUsage(f"shard {state.name!r} has {len(state.tags)} tags, which is the maximum; remove one first")
