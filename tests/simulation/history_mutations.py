"""Builds that are broken on purpose: mistakes with wall clocks, marks, settings, and history that gets older."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import persist.commit.commit_plan
import persist.core.transitions.reader_holds
from persist.attributes.attribute_index import Marks
from persist.attributes.btree import entries
from persist.core import commands as c
from persist.core.attribute import AttributeKey
from persist.core.clock_index import Mark, Seal, mark_key, sealed_by
from persist.core.frontier import EMPTY, Antichain
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions import history_control, wall_clocks
from tests.simulation.breaking import Broken, transition


def mark_forgotten_early() -> Broken:
    """With every flush all marks but the newest leave the index, whatever history is kept."""

    def outlived(self: Marks) -> list[AttributeKey]:
        newest = self.newest_at(2**47)
        if newest is None or not newest.at_ms:
            return []
        first = bytes.fromhex(mark_key(newest.at_ms - 1))
        return [
            AttributeKey(key.hex())
            for leaf in entries(self._state.attribute_root, self._reader, first)
            for key, _ in leaf
        ]

    return patch.object(Marks, "outlived", outlived)


def wall_clock_answered_without_a_seal() -> Broken:
    """An instant that is not sealed is told the upper as it is, and nothing is committed for it."""
    real = wall_clocks.resolve_time

    def resolve_time(state: State, command: c.ResolveTime, context: Any) -> Any:
        every_ms = state.settings.mark_every_ms
        if command.at_ms <= state.seal.known_ms(every_ms):
            return real(state, command, context)
        return state, c.TimeResolved(state.upper, state.seal.point_ms(command.at_ms, every_ms))

    return transition(c.ResolveTime, resolve_time)


def mark_moved_later() -> Broken:
    """A mark lies where the commit that makes it is stamped, and not at the first point after the seal."""

    def sealed(seal: Seal, upper: Antichain, checked_ms: int, every_ms: int) -> Seal:
        found = sealed_by(seal, upper, checked_ms, every_ms)
        if found.last is None or found.last is seal.last:
            return found
        return replace(found, last=Mark(found.point_ms(checked_ms, every_ms), found.last.upper))

    return patch.object(wall_clocks, "sealed_by", sealed)


def grid_changed_at_once() -> Broken:
    """A new grid holds from the seal on, though it was told already where the next mark lies."""
    return patch.object(history_control, "with_grid", lambda seal, every_ms: seal)


def mark_with_the_commit_itself() -> Broken:
    """A mark has the upper after the commit that makes it, instead of the one before."""
    real = wall_clocks.stamped

    def stamped(state: State, base_upper: Antichain, *others: Any) -> State:
        return real(state, state.upper, *others)

    return patch.object(persist.commit.commit_plan, "stamped", stamped)


def sealed_by_any_clock() -> Broken:
    """Every clock counts as checked."""
    return patch("persist.commit.committer.checked_ms", lambda stamps, now_ms: now_ms)


def history_aged_by_any_clock() -> Broken:
    """History gets older by the clock of who asks, whatever the blob store says."""
    real = history_control.forget_outlived

    def forget_outlived(state: State, command: c.ForgetOutlived, context: Any) -> Any:
        return real(state, command, replace(context, checked_ms=context.now_ms))

    return transition(c.ForgetOutlived, forget_outlived)


def history_aged_without_its_length() -> Broken:
    """What is older than now is forgotten, and not what is older than the history."""
    real = history_control.forget_outlived

    def forget_outlived(state: State, command: c.ForgetOutlived, context: Any) -> Any:
        if state.settings.history_ms and context.checked_ms is not None:
            latest = max(0, (state.upper.element or 0) - 1)
            if not state.history_hold.is_empty and latest > (state.history_hold.element or 0):
                state = replace(state, history_hold=Antichain(latest))
        return real(state, command, context)

    return transition(c.ForgetOutlived, forget_outlived)


def readers_alone_move_since() -> Broken:
    """The shard's own hold goes where readers go."""
    real = persist.core.transitions.reader_holds.compare_and_downgrade_since

    def downgrade(state: State, command: c.CompareAndDowngradeSince, context: Any) -> Any:
        following, result = real(replace(state, history_hold=EMPTY), command, context)
        return replace(following, history_hold=following.since if state.settings.keeps_history else EMPTY), result

    return transition(c.CompareAndDowngradeSince, downgrade)


def settings_not_compared() -> Broken:
    """Settings are changed whatever their version is."""
    real = history_control.set_settings

    def set_settings(state: State, command: c.SetSettings, context: Any) -> Any:
        known = replace(state.settings, version=command.expected_version)
        return real(replace(state, settings=known), command, context)

    return transition(c.SetSettings, set_settings)


def history_never_ages() -> Broken:
    """Maintenance forgets nothing."""
    real = history_control.forget_outlived
    return transition(
        c.ForgetOutlived, lambda state, command, context: real(state, replace(command, before_ms=None), context)
    )


MEANT_FOR: dict[Callable[[], Broken], str] = {
    mark_forgotten_early: "sealed",
    wall_clock_answered_without_a_seal: "sealed",
    mark_moved_later: "sealed",
    grid_changed_at_once: "sealed",
    mark_with_the_commit_itself: "sealed",
    sealed_by_any_clock: "sealed",
    history_aged_by_any_clock: "policy",
    history_aged_without_its_length: "policy",
    readers_alone_move_since: "policy",
    settings_not_compared: "settings",
    history_never_ages: "policy",
}
