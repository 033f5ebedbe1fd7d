"""The phases of a shard, and which commands are legal in each. `transitions.step` asks `check` before every command.

A shard is live until its upper or its since becomes `[]`. It is dropped when both are, which only `Drop` brings about:
it needs a scope that writers and readers lack. `Finalise` then takes it to its tombstone. No phase comes back in one
life of the name: `Recreate` begins the next life, as another shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from persist.core import commands as c
from persist.core.errors import InvalidUsage, ShardExists, UnknownShard, UpperMismatch
from persist.core.state import State


class Phase(Enum):
    """`value` is how documents call it."""

    LIVE = "live"
    CLOSED_TO_WRITES = "closed to writes"  # upper is []: no time is left to write at
    CLOSED_TO_READS = "closed to reads"  # since is []: all history may be forgotten
    DROPPED = "dropped"  # both
    TOMBSTONE = "tombstone"  # nothing is left but the name, which may be used again


EVER = frozenset(Phase)
BEFORE_TOMBSTONE = EVER - {Phase.TOMBSTONE}
BEFORE_DROP = BEFORE_TOMBSTONE - {Phase.DROPPED}

# What these give back is gone after a drop, and they say so. That holds in the next life of the name too.
GIVING_BACK = (c.ExpireReader, c.ExpireWriter, c.ExpireCriticalReader)

# A command that is not named here is legal in every phase before the drop.
PHASES: Mapping[type[c.Command], frozenset[Phase]] = {
    c.Insert: frozenset({Phase.LIVE, Phase.CLOSED_TO_READS}),
    c.Rewrite: frozenset({Phase.LIVE, Phase.CLOSED_TO_READS}),
    c.Finalise: frozenset({Phase.DROPPED, Phase.TOMBSTONE}),
    c.Recreate: frozenset({Phase.TOMBSTONE}),
    c.BeginClone: frozenset({Phase.TOMBSTONE}),
    c.Drop: EVER,
    # What was begun before the drop may end.
    c.FlushAttributes: BEFORE_TOMBSTONE,
    c.HoldClaim: BEFORE_TOMBSTONE,
    c.MergeResult: BEFORE_TOMBSTONE,
    # A tombstone keeps its one rollup, and everything may be given up again.
    c.AddRollup: EVER,
    c.RemoveRollups: EVER,
    c.ReleaseClaim: EVER,
    c.ForgetLapsed: EVER,
    # Loans outlive what was lent, and the life of the name.
    c.LendOn: EVER,
    c.ShrinkLoan: EVER,
    c.EndLoan: EVER,
    c.Returned: EVER,
    # What there is goes on elsewhere in the phase that it is in.
    c.HandOver: EVER,
    c.TakeBack: EVER,
    **dict.fromkeys(GIVING_BACK, EVER),
}


def dropped(name: str) -> str:
    """What is said to who asks for a dropped shard."""
    return f"shard {name!r} was dropped; create it anew to use its name again"


def outlived(name: str) -> str:
    """What is said to who holds something of an earlier life of the name."""
    return f"shard {name!r} was dropped, and its name belongs to another one now; open it anew"


def only_drop(name: str) -> str:
    """What is said to who would close the other frontier of a shard too."""
    return f"shard {name!r} would be closed both to writes and to reads by this, which only a drop does; drop it"


def phases_of(command: type[c.Command]) -> frozenset[Phase]:
    """The phases in which a command is legal."""
    return PHASES.get(command, BEFORE_DROP)


def phase_of(state: State) -> Phase:
    if state.tombstone:
        return Phase.TOMBSTONE
    if state.upper.is_empty:
        return Phase.DROPPED if state.since.is_empty else Phase.CLOSED_TO_WRITES
    return Phase.CLOSED_TO_READS if state.since.is_empty else Phase.LIVE


def check(state: State, command: c.Command, phase: Phase) -> None:
    """Refuse a command that is not legal in the phase of the State.

    Raises UnknownShard after a drop, UpperMismatch where the shard is closed to what takes its next time, InvalidUsage
    otherwise.
    """
    if phase in phases_of(type(command)):
        return
    if phase in (Phase.DROPPED, Phase.TOMBSTONE) and not isinstance(command, (c.Recreate, c.BeginClone)):
        raise UnknownShard(dropped(state.name))
    if isinstance(command, (c.Insert, c.Rewrite)):
        raise UpperMismatch(
            f"shard {state.name!r} is closed: its upper is {state.upper}", expected=None, actual=state.upper.to_json()
        )
    if isinstance(command, (c.Recreate, c.BeginClone)):
        raise ShardExists(f"shard {state.name!r} exists; drop it before its name can be used again")
    raise InvalidUsage(
        f"shard {state.name!r} has upper {state.upper} and since {state.since}; drop it before it can be finalised"
    )


def check_end(before: State, after: State, command: c.Command) -> None:
    """Raises InvalidUsage where a command other than `Drop` has closed a shard to both writes and reads."""
    if after.is_closed and not before.is_closed and not isinstance(command, c.Drop):
        raise InvalidUsage(only_drop(before.name))
