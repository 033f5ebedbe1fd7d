"""A shard is handed over to another home of its location, and taken back where nothing came of that home."""

from __future__ import annotations

from persist.core import commands as c
from persist.core.errors import Conflict, ReadOnly
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions.context import HANDOVERS_LEVEL, Context

HANDING = (c.HandOver, c.TakeBack)


def hand_over(state: State, command: c.HandOver, context: Context) -> tuple[State, c.Done]:
    context.check_level("hand-overs", HANDOVERS_LEVEL)
    _check(state, command.epoch)
    return (state if state.handed_over else replace(state, handed_over=command.epoch)), c.Done()


def take_back(state: State, command: c.TakeBack, context: Context) -> tuple[State, c.Done]:
    _check(state, command.epoch)
    return (replace(state, handed_over=0) if state.handed_over else state), c.Done()


def check_here(state: State) -> None:
    """Raises ReadOnly where the shard goes on elsewhere."""
    if state.handed_over:
        raise ReadOnly(
            f"shard {state.name!r} goes on at another home of its location, of epoch {state.handed_over}: write there",
            home=[],
            region="",
        )


def _check(state: State, epoch: int) -> None:
    if state.handed_over not in (0, epoch):
        raise Conflict(f"shard {state.name!r} was handed over to the home of epoch {state.handed_over}, not {epoch}")
