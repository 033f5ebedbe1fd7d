"""Transitions of history: the settings, the hold on since that follows from them, and tags."""

from __future__ import annotations

from functools import partial

from persist.core import commands as c
from persist.core.clock_index import with_grid
from persist.core.erasure_progress import erased_from
from persist.core.errors import Conflict, InvalidUsage, NotReadable, Unavailable
from persist.core.frontier import EMPTY, MINIMUM, TIME_MAX, Antichain
from persist.core.named_holds import KEEP_MS_MAX, TAGS_MAX, Tag, check_tag_name
from persist.core.persistent_map import with_changes
from persist.core.readable_times import held_since, is_kept, latest_time
from persist.core.record import replace
from persist.core.shard_settings import DROP, ShardSettings
from persist.core.spill import ENTRIES
from persist.core.state import State
from persist.core.transitions.context import Context
from persist.core.transitions.lease_expiry import without_lapsed_readers
from persist.core.transitions.outcomes_and_audit import without_old_entries
from persist.core.transitions.row_drops import without_dropped
from persist.core.transitions.wall_clocks import checked, mark_at, sealing


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
    sealed = sealing(state, before_ms, context)
    try:
        upper = mark_at(sealed, before_ms, context).upper
    except NotReadable:  # the upper at that instant is unknown: a later instant moves since
        return state
    if upper == MINIMUM:
        return state
    hold = Antichain(TIME_MAX if upper.element is None else upper.element - 1)
    if hold <= state.history_hold:
        return with_since(state, context)  # a reader that held since back may have gone
    return with_since(replace(sealed, history_hold=hold), context)


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
        return with_since(state, context)  # a reader that held more may have gone
    return with_since(state, context, before)


def with_since(state: State, context: Context, *more: Antichain, may_close: bool = False) -> State:
    """The State whose since follows the live holds, and `more`, now.

    It is unchanged if it would close the shard to reads, unless it `may_close` it, and if it would drop the shard,
    which only a drop may do.
    """
    live = without_lapsed_readers(state, context.lease_now_ms)
    since = max(state.since, held_since(live, *more))
    if since == state.since or (since.is_empty and (not may_close or state.upper.is_empty)):
        return state
    return replace(live, since=since)


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
