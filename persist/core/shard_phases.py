"""The phases of a shard, and the commands that are legal in each. `transitions.step` calls `check` for every command.

A shard is live until its upper or its since becomes `[]`. It is dropped when both are, which only `Drop` causes: it
needs a scope that writers and readers lack. `Finalise` then takes it to its tombstone. A phase never returns in one
life of the name: `Recreate` begins the next life, as another shard.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from persist.core import commands as c
from persist.core.errors import InvalidUsage, ShardExists, UnknownShard, UpperMismatch
from persist.core.state import State


class Phase(Enum):
    """`value` is its name in documents."""

    LIVE = "live"
    CLOSED_TO_WRITES = "closed to writes"  # upper is []: there is no further time to write at
    CLOSED_TO_READS = "closed to reads"  # since is []: all history may be forgotten
    DROPPED = "dropped"  # both
    TOMBSTONE = "tombstone"  # only the name is left, which may be used again


EVER = frozenset(Phase)
BEFORE_TOMBSTONE = EVER - {Phase.TOMBSTONE}
BEFORE_DROP = BEFORE_TOMBSTONE - {Phase.DROPPED}

# After a drop, and in the next life of the name, these are answered as if they had happened: their holds are gone.
GIVING_BACK = (c.ExpireReader, c.ExpireWriter, c.ExpireCriticalReader)

# A command without an entry is legal in every phase before the drop.
PHASES: Mapping[type[c.Command], frozenset[Phase]] = {
    c.Insert: frozenset({Phase.LIVE, Phase.CLOSED_TO_READS}),
    c.Rewrite: frozenset({Phase.LIVE, Phase.CLOSED_TO_READS}),
    c.Finalise: frozenset({Phase.DROPPED, Phase.TOMBSTONE}),
    c.Recreate: frozenset({Phase.TOMBSTONE}),
    c.BeginClone: frozenset({Phase.TOMBSTONE}),
    c.Drop: EVER,
    # Work that was begun before the drop may be completed.
    c.FlushAttributes: BEFORE_TOMBSTONE,
    c.HoldClaim: BEFORE_TOMBSTONE,
    c.MergeResult: BEFORE_TOMBSTONE,
    # A tombstone keeps one rollup, and everything may be released again.
    c.AddRollup: EVER,
    c.RemoveRollups: EVER,
    c.ReleaseClaim: EVER,
    c.ForgetLapsed: EVER,
    # Loans outlive the lent parts and the life of the name.
    c.LendOn: EVER,
    c.ShrinkLoan: EVER,
    c.EndLoan: EVER,
    c.Returned: EVER,
    # A shard keeps its phase at another home.
    c.HandOver: EVER,
    **dict.fromkeys(GIVING_BACK, EVER),
}


def dropped(name: str) -> str:
    return f"shard {name!r} was dropped; create it again to use its name"


def outlived(name: str) -> str:
    """The message of an error about an earlier life of the name."""
    return f"shard {name!r} was dropped, and its name belongs to another shard now; open it again"


def only_drop(name: str) -> str:
    """The message of an error of a command that would close the second frontier of a shard."""
    return f"shard {name!r} would be closed both to writes and to reads by this, which only a drop does; drop it"


def phases_of(command: type[c.Command]) -> frozenset[Phase]:
    return PHASES.get(command, BEFORE_DROP)


def phase_of(state: State) -> Phase:
    if state.tombstone:
        return Phase.TOMBSTONE
    if state.upper.is_empty:
        return Phase.DROPPED if state.since.is_empty else Phase.CLOSED_TO_WRITES
    return Phase.CLOSED_TO_READS if state.since.is_empty else Phase.LIVE


def check(state: State, command: c.Command, phase: Phase) -> None:
    """Refuse a command that is not legal in the phase of the State.

    Raises UnknownShard after a drop, UpperMismatch if the command needs a next time and there is none, InvalidUsage
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
    """Raise InvalidUsage if a command other than `Drop` has closed the shard to both writes and reads."""
    if after.is_closed and not before.is_closed and not isinstance(command, c.Drop):
        raise InvalidUsage(only_drop(before.name))
