"""A shard is handed over to another home of its location, and taken back where nothing came of that home."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from persist.core import commands as c
from persist.core.errors import Conflict, ReadOnly
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions.context import Context

HANDING = (c.HandOver, c.TakeBack)
_KEEPING = (c.HeartbeatReader, c.DowngradeSince, c.MoveHold)
HOLDS = (c.RegisterReader, c.HoldPoint, c.ExpireReader, *_KEEPING)
"""What is answered without a commit where the shard was handed over: nothing is forgotten there any more.

After it was taken back, a reader that came meanwhile is told that its hold is gone.
"""


def hand_over(state: State, command: c.HandOver, context: Context) -> tuple[State, c.Done]:
    _check(state, command.epoch)
    return (state if state.handed_over else replace(state, handed_over=command.epoch)), c.Done()


def take_back(state: State, command: c.TakeBack, context: Context) -> tuple[State, c.Done]:
    _check(state, command.epoch)
    return (replace(state, handed_over=0) if state.handed_over else state), c.Done()


def held(state: State, command: Any, held_here: Callable[[], c.Result]) -> c.Result:
    """The answer to a hold at a shard that was handed over. `held_here`: what the shard itself would say."""
    if not isinstance(command, _KEEPING) or command.reader in state.leased_readers:
        return held_here()
    return c.Done() if isinstance(command, c.HeartbeatReader) else c.SinceDowngraded(command.since, state.since)


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
