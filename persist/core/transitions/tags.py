"""Transitions of tags: single times that stay readable although since has passed them."""

from __future__ import annotations

from persist.core import commands as c
from persist.core.antichain import TIME_MAX, Antichain
from persist.core.entries import with_changes
from persist.core.erasing import erased_from
from persist.core.errors import Conflict, InvalidUsage, NotReadable
from persist.core.record import replace
from persist.core.state import State, is_kept
from persist.core.tags import KEEP_MS_MAX, TAGS_MAX, Tag, check_tag_name
from persist.core.transitions.context import Context
from persist.core.transitions.history import checked


def set_tag(state: State, command: c.SetTag, context: Context) -> tuple[State, c.TagsAre]:
    """A merge under way goes to a since that is not beyond the shard's, so it keeps whatever may be tagged now."""
    name, time = check_tag_name(command.tag), command.time
    known = state.tags.get(name)
    if known is not None and known.time != time:
        raise Conflict(
            f"shard {state.name!r} has a tag {name!r} already, at the time {known.time}; take it away, or take another "
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


def read_tags(state: State, command: c.ReadTags, context: Context) -> tuple[State, c.TagsAre]:
    return state, c.TagsAre(dict(state.tags))


def forget_tags(state: State, command: c.ForgetTags, context: Context) -> tuple[State, c.TagsAre]:
    """By a checked clock, as history is forgotten: a wrong one loses no tag."""
    if not any(tag.until_ms is not None for tag in state.tags.values()):
        return state, c.TagsAre(dict(state.tags))
    now_ms = checked(context, state)
    lapsed = [name for name, tag in state.tags.items() if tag.until_ms is not None and tag.until_ms <= now_ms]
    if lapsed:
        state = replace(state, tags=with_changes(state.tags, {}, lapsed))
    return state, c.TagsAre(dict(state.tags))


def named(state: State, name: str) -> Tag:
    """The tag of this name. Raises NotReadable where there is none."""
    known = state.tags.get(check_tag_name(name))
    if known is None:
        raise NotReadable(
            f"shard {state.name!r} has no tag {name!r}: it was never set, or taken away, or was kept long enough",
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
        raise InvalidUsage(f"shard {state.name!r} has {len(state.tags)} tags, which is the most; take one away first")
