"""Transitions of attributes: several updates at once, all or nothing, alone or together with an append."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from persist import commands as c
from persist.attribute import BYTE_COUNT, EVENT_COUNT, AttributeKey, AttributeUpdate, check_updates, updated
from persist.errors import InvalidUsage, Overloaded
from persist.state import State
from persist.transitions.context import Context

OVERLOADED_RETRY_AFTER_S = 0.5


def value_of(state: State, key: AttributeKey) -> int | None:
    """The attribute's value in this State; None when it is unset."""
    if key == EVENT_COUNT:
        return state.event_count
    if key == BYTE_COUNT:
        return state.byte_count
    return state.attributes.get(key)


def with_updates(state: State, updates: Sequence[AttributeUpdate], context: Context) -> State:
    """The State after the updates. Raises AttributeMismatch when a condition fails."""
    if not updates:
        return state
    if len(updates) > context.policy.attribute_updates_max:
        raise InvalidUsage(
            f"a command updates {len(updates)} attributes; at most {context.policy.attribute_updates_max} at once"
        )
    check_updates(updates)
    changed = updated(updates, lambda key: value_of(state, key))
    attributes = {**state.attributes, **changed}
    if len(attributes) > max(context.policy.attributes_overlay_max, len(state.attributes)):
        raise Overloaded(
            f"shard {state.name!r} has {len(state.attributes)} attributes that wait to be written to its index",
            retry_after_s=OVERLOADED_RETRY_AFTER_S,
        )
    return replace(state, attributes=attributes)


def read(state: State, command: c.ReadAttributes, context: Context) -> tuple[State, c.AttributeValues]:
    if len(command.keys) > context.policy.attribute_updates_max:
        raise InvalidUsage(
            f"a command reads {len(command.keys)} attributes; at most {context.policy.attribute_updates_max} at once"
        )
    return state, c.AttributeValues({key: value_of(state, key) for key in command.keys})


def scan(state: State, command: c.ScanAttributes, context: Context) -> tuple[State, c.AttributeValues]:
    if command.limit <= 0:
        raise InvalidUsage(f"a scan of attributes needs a limit of at least 1, not {command.limit}")
    found = {key: value for key, value in state.attributes.items() if _within(key, command) and value is not None}
    first = sorted(found)[: min(command.limit, context.policy.attribute_updates_max)]
    return state, c.AttributeValues({key: found[key] for key in first})


def _within(key: AttributeKey, command: c.ScanAttributes) -> bool:
    return command.lower <= key and (command.upper is None or key < command.upper)
