"""Moves a shard's own hold on since as its history gets older. By maintenance, and by the upkeep of embedded programs.

Where a shard keeps no history, since follows the latest time as far as readers allow.
"""

from __future__ import annotations

from persist.commit.place import Committer
from persist.commit.system import Clock
from persist.core import commands as c
from persist.core.state import State, held_since, latest_time

STEPS = 100  # since follows the clock in steps of this part of the history
STEP_S_MIN = 1.0
STEP_S_MAX = 600.0
WITHOUT_HISTORY_S = 5.0  # since of a shard that keeps none moves at most so often


def step_s(state: State) -> float:
    """How often, at most, the hold of the shard is moved: so far behind its settings since may be."""
    history_ms = state.settings.history_ms or 0
    return max(STEP_S_MIN, min(STEP_S_MAX, history_ms / 1000 / STEPS)) if history_ms else WITHOUT_HISTORY_S


def is_aging(state: State) -> bool:
    """Whether there is something that time, or the end of a reader, lets the shard forget."""
    settings, latest = state.settings, latest_time(state)
    if not settings.version or settings.history_ms is None or state.since.is_empty:
        return False
    if not settings.history_ms:
        return state.since < held_since(state, latest)
    return state.history_hold < latest or state.since < held_since(state)


def age(machine: Committer, clock: Clock) -> c.HistoryMoved | None:
    """Forget what is older than the shard's history; None: there is nothing to forget. Repeating it is safe.

    Raises Unavailable where the clocks of the committer and of the blob store do not agree: by one alone nothing goes.
    """
    state = machine.state()
    if not is_aging(state):
        return None
    moved = machine.apply(c.AgeHistory(max(0, clock.now_ms() - (state.settings.history_ms or 0))))
    assert isinstance(moved, c.HistoryMoved)
    return moved
