"""The phases of a shard, and which commands are legal in each. `transitions.step` asks `check` before every command.

A shard is live until its upper or its since becomes `[]`. It is dropped when both are, by `Drop` or by writers and
readers alone. `Finalise` then takes it to its tombstone. No phase comes back.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from persist.core import commands as c
from persist.core.errors import InvalidUsage, UnknownShard, UpperMismatch
from persist.core.state import State


class Phase(Enum):
    """`value` is how documents call it."""

    LIVE = "live"
    CLOSED_TO_WRITES = "closed to writes"  # upper is []: no time is left to write at
    CLOSED_TO_READS = "closed to reads"  # since is []: all history may be forgotten
    DROPPED = "dropped"  # both
    TOMBSTONE = "tombstone"  # the name is never used again


EVER = frozenset(Phase)
BEFORE_TOMBSTONE = EVER - {Phase.TOMBSTONE}

# A command that is not named here is legal in every phase before the tombstone.
PHASES: Mapping[type[c.Command], frozenset[Phase]] = {
    c.Insert: frozenset({Phase.LIVE, Phase.CLOSED_TO_READS}),
    c.Finalise: frozenset({Phase.DROPPED, Phase.TOMBSTONE}),
    # A tombstone keeps its one rollup, and everything may be given up again.
    c.AddRollup: EVER,
    c.RemoveRollups: EVER,
    c.TakeClaim: EVER,
    c.ReleaseClaim: EVER,
    c.ForgetLapsed: EVER,
    c.ExpireReader: EVER,
    c.ExpireWriter: EVER,
}


def phases_of(command: type[c.Command]) -> frozenset[Phase]:
    """The phases in which a command is legal."""
    return PHASES.get(command, BEFORE_TOMBSTONE)


def phase_of(state: State) -> Phase:
    if state.tombstone:
        return Phase.TOMBSTONE
    if state.upper.is_empty:
        return Phase.DROPPED if state.since.is_empty else Phase.CLOSED_TO_WRITES
    return Phase.CLOSED_TO_READS if state.since.is_empty else Phase.LIVE


def check(state: State, command: c.Command, phase: Phase) -> None:
    """Refuse a command that is not legal in the phase of the State.

    Raises UnknownShard on a tombstone, UpperMismatch where the shard is closed to an insert, InvalidUsage otherwise.
    """
    if phase in phases_of(type(command)):
        return
    if phase is Phase.TOMBSTONE:
        raise UnknownShard(f"shard {state.name!r} was dropped; its name is not used again")
    if isinstance(command, c.Insert):
        raise UpperMismatch(
            f"shard {state.name!r} is closed: its upper is {state.upper}", expected=None, actual=state.upper.to_json()
        )
    raise InvalidUsage(
        f"shard {state.name!r} has upper {state.upper} and since {state.since}; drop it before it can be finalised"
    )
