"""Transitions of attributes: several updates at once, all or nothing, alone or together with an append."""

from __future__ import annotations

from collections.abc import Sequence

from persist.core import commands as c
from persist.core.attribute import (
    BYTE_COUNT,
    EVENT_COUNT,
    AttributeKey,
    AttributeUpdate,
    check_updates,
    is_core_key,
    updated,
)
from persist.core.blob_keys import belongs_to
from persist.core.clock_index import mark_key
from persist.core.errors import InvalidUsage, Overloaded
from persist.core.persistent_map import with_changes
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions.context import RETRY_SOON_S, Context, IndexPage

UPDATES_MAX = 1_000  # of one command
_NO_PAGE = IndexPage({}, None)


def value_of(state: State, key: AttributeKey, context: Context) -> int | None:
    """The attribute's value in this State; None if it is unset."""
    if key in state.attributes:
        return state.attributes[key]
    if is_core_key(key):
        return {EVENT_COUNT: state.event_count, BYTE_COUNT: state.byte_count}.get(key)
    if not state.attribute_root.height:
        return None
    context.check_indexed(state)
    return context.indexed.values[key]


def with_updates(state: State, updates: Sequence[AttributeUpdate], context: Context) -> State:
    """The State after the updates. Raises AttributeMismatch if a condition fails."""
    if not updates:
        return state
    if len(updates) > UPDATES_MAX:
        raise InvalidUsage(f"a command updates {len(updates)} attributes; at most {UPDATES_MAX} at once")
    check_updates(updates)
    changed = updated(updates, lambda key: value_of(state, key, context))
    attributes = with_changes(state.attributes, changed)
    if len(attributes) > max(context.policy.overlay_max, len(state.attributes)):
        raise Overloaded(
            f"shard {state.name!r} has {len(state.attributes)} attributes that wait to be written to its index",
            retry_after_s=RETRY_SOON_S,
        )
    return replace(state, attributes=attributes)


def read(state: State, command: c.ReadAttributes, context: Context) -> tuple[State, c.AttributeValues]:
    if len(command.keys) > UPDATES_MAX:
        raise InvalidUsage(f"a command reads {len(command.keys)} attributes; at most {UPDATES_MAX} at once")
    return state, c.AttributeValues({key: value_of(state, key, context) for key in command.keys})


def scan(state: State, command: c.ScanAttributes, context: Context) -> tuple[State, c.AttributeValues]:
    if command.limit <= 0:
        raise InvalidUsage(f"a scan of attributes needs a limit of at least 1, not {command.limit}")
    page = _NO_PAGE
    if state.attribute_root.height:
        context.check_indexed(state)
        page = context.indexed.pages[command.lower, command.upper]
    end = page.following or command.upper  # up to which the index was read
    recent = {k: v for k, v in state.attributes.items() if command.lower <= k and (end is None or k < end)}
    merged = {**page.values, **recent}
    keys = sorted(key for key, value in merged.items() if value is not None)
    limit = min(command.limit, UPDATES_MAX)
    following = keys[limit] if len(keys) > limit else page.following
    return state, c.AttributeValues({key: merged[key] for key in keys[:limit]}, following)


def flush(state: State, command: c.FlushAttributes, context: Context) -> tuple[State, c.Flushed]:
    """Move values from the State to the index, iff the index is the one from which the flush began."""
    root = command.root
    if root == state.attribute_root:  # a retry, or another flush with the same root
        return state, c.Flushed(all(state.attribute_chunks.get(k) == chunk for k, chunk in command.chunks.items()))
    if command.expected != state.attribute_root:
        return state, c.Flushed(False)
    if root.flushes != command.expected.flushes + 1 or root.end < command.expected.end:
        raise InvalidUsage(f"a flush of the attributes of shard {state.name!r} does not follow the one before it")
    for chunk in command.chunks.values():
        if not belongs_to(chunk.key, state.shard_id):
            raise InvalidUsage(f"chunk key {chunk.key!r} does not belong to shard {state.name!r}")
        if context.may_be_swept(state, chunk.key):
            return state, c.Flushed(False)  # the values stay in the State for the next flush
    known = {**state.attribute_chunks, **command.chunks}
    live = {first: chunk for first, chunk in known.items() if first + chunk.length > root.lowest}
    kept = {
        key: value
        for key, value in state.attributes.items()
        if key not in command.flushed or command.flushed[key] != value  # changed since: it covers what was flushed
    }
    marks = with_changes(state.marks, {}, [at_ms for at_ms in state.marks if mark_key(at_ms) in command.flushed])
    following = replace(state, attributes=kept, marks=marks, attribute_root=root, attribute_chunks=live)
    return following, c.Flushed(True)
