"""How builds are broken on purpose: a patch for one run, and what several of the mutations need."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import persist.client.write
import persist.core.transitions
from persist.commit.log_writer import LogWriter
from persist.core import commands as c
from persist.core.errors import Indeterminate
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions import rewrites
from tests.simulation.host import WEATHER

Broken = AbstractContextManager[Any]
RETRY_AFTER_S = 0.1


@contextmanager
def every(*broken: Broken) -> Iterator[None]:
    with ExitStack() as stack:
        for each in broken:
            stack.enter_context(each)
        yield


def transition(kind: type[Any], broken: Callable[[State, Any, Any], Any]) -> Broken:
    """Commands of the kind do something else."""
    return patch.dict(persist.core.transitions._TRANSITIONS, {kind: broken})


def ignores_the_upper(operation: str) -> Broken:
    """Rewrites of this operation land though another write came since they looked."""
    real = rewrites.rewrite

    def rewrite(state: State, command: c.Rewrite, context: Any) -> Any:
        if command.operation == operation and command.as_of != c.NEVER:  # that asks only whether it has landed
            command = replace(command, expected_upper=state.upper, as_of=(state.upper.element or 0) - 1)
        return real(state, command, context)

    return transition(c.Rewrite, rewrite)


def outcomes_stay_unread() -> Broken:
    """The committer settles nothing. Else it settles nearly every unknown outcome before anybody has to retry."""

    def is_ours(self: LogWriter, *_: Any) -> bool:
        raise Indeterminate("the outcome of a commit stays unread")

    return patch.object(LogWriter, "is_ours", is_ours)


def resent_as(other: Callable[[Any, str, Any], Any]) -> Broken:
    """Writers send `other(transport, name, command)` where they should send the command again."""

    def send(transport: Any, name: str, command: Any, retry_s: float, *caller: Any) -> Any:
        deadline = transport.clock.monotonic() + retry_s
        while True:
            try:
                return transport.apply(name, command, *caller)
            except WEATHER:
                if transport.clock.monotonic() > deadline:
                    raise
                transport.clock.sleep(RETRY_AFTER_S)
                command = other(transport, name, command)

    return every(patch.object(persist.client.write, "send", send), outcomes_stay_unread())


__all__ = ["Broken", "every", "outcomes_stay_unread", "resent_as", "transition"]
