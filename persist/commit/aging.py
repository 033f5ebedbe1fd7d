"""Moves a shard's own hold on since as its history gets older, and lets tags and dropped rows go.

By maintenance, and by the upkeep of embedded programs.

Where a shard keeps no history, since follows the latest time as far as readers allow.
"""

from __future__ import annotations

from persist.commit.place import Committer
from persist.commit.system import Clock
from persist.core import commands as c
from persist.core.recorded import EntryFile
from persist.core.state import State, held_since, latest_time
from persist.core.transitions.dropping import forgettable
from persist.core.transitions.recording import is_outlived

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
    settings = state.settings
    if not settings.version or settings.history_ms is None or state.since.is_empty:
        return False
    return _moves(state) or bool(state.entry_files and settings.history_ms)


def _moves(state: State) -> bool:
    """Whether since, or what holds it, may move."""
    latest = latest_time(state)
    if not state.settings.history_ms:
        return state.since < held_since(state, latest)
    return state.history_hold < latest or state.since < held_since(state)


def _may_go(file: EntryFile, before_ms: int) -> bool:
    """Whether the commit history has a file that is old enough, or of which no checked clock was told yet."""
    return not file.until_ms or is_outlived(file, before_ms)


def age(machine: Committer, clock: Clock) -> c.HistoryMoved | None:
    """Forget what is older than the shard's history; None: there is nothing to forget. Repeating it is safe.

    Raises Unavailable where the clocks of the committer and of the blob store do not agree: by one alone nothing goes.
    """
    state = machine.state()
    before_ms = max(0, clock.now_ms() - (state.settings.history_ms or 0))
    if not is_aging(state) or not (_moves(state) or any(_may_go(file, before_ms) for file in state.entry_files)):
        return None
    moved = machine.apply(c.AgeHistory(before_ms))
    assert isinstance(moved, c.HistoryMoved)
    return moved


def tags_in_s(state: State, clock: Clock) -> float | None:
    """In how many seconds the first tag was kept for long enough; at most 0: now. None: there is no such tag."""
    ends = [tag.until_ms for tag in state.tags.values() if tag.until_ms is not None]
    return (min(ends) - clock.now_ms()) / 1000 if ends else None


def forget_dropped(machine: Committer) -> None:
    """Take what drops took away out of the State, where nobody can read it any more. Repeating it is safe."""
    if forgettable(machine.state()):
        machine.apply(c.ForgetDropped())


def forget_tags(machine: Committer, clock: Clock) -> None:
    """Let the tags go that were kept for long enough. Repeating it is safe. Raises Unavailable as `age` does."""
    due_s = tags_in_s(machine.state(), clock)
    if due_s is not None and due_s <= 0:
        machine.apply(c.ForgetTags())
