"""What is checked of the upper before a shard is written to."""

from __future__ import annotations

from persist.core.antichain import FAR_TIME, Antichain
from persist.core.errors import InvalidUsage, UpperMismatch
from persist.core.state import State


def check_upper(state: State, expected: Antichain) -> None:
    if state.upper != expected:
        raise UpperMismatch(
            f"shard {state.name!r} has upper {state.upper}, not the expected {expected}; read it and decide anew",
            expected=expected.to_json(),
            actual=state.upper.to_json(),
        )


def check_near(state: State, upper: Antichain) -> None:
    """A slip of the keyboard would take all times from a shard for ever. One that is there already goes on."""
    if upper.element is not None and upper.element > FAR_TIME and state.upper <= Antichain(FAR_TIME):
        raise InvalidUsage(
            f"the upper {upper} of shard {state.name!r} would be beyond {FAR_TIME}, where no clock counts, and it "
            "never moves back; give it in the unit of the other times, or advance the upper with force"
        )


def no_time_left(state: State) -> UpperMismatch:
    return UpperMismatch(
        f"shard {state.name!r} has no time left: its upper is {state.upper}",
        expected=None,
        actual=state.upper.to_json(),
    )
