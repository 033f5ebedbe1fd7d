"""Transitions of erasures: one commit retracts the rows and lets history go; maintenance tells how far the rest is.

Where the shard is fed by `append` that commit is the next one of its writer. Until then the State keeps the rows.
"""

from __future__ import annotations

from persist.core import commands as c
from persist.core.antichain import MINIMUM
from persist.core.entries import with_changes
from persist.core.erasing import WAITS_TOLD_MAX, is_rewritten, lent_before, pending_erasures, states_held, waits
from persist.core.erasure import ERASURES_MAX, REASON_CHARS_MAX, Erasure, ErasureRequest, Wait
from persist.core.errors import Conflict, InvalidUsage, Unavailable, UpperMismatch
from persist.core.ids import SeqNo
from persist.core.record import replace
from persist.core.state import State
from persist.core.transitions.context import Context
from persist.core.transitions.writers import keep_pending, let_go, restore


def erase(state: State, command: c.Erase, context: Context) -> tuple[State, c.Appended]:
    """The commit history before it may tell of the rows (what callers said), so it goes as well."""
    if len(command.reason) > REASON_CHARS_MAX:
        raise InvalidUsage(f"the reason has {len(command.reason)} characters; at most {REASON_CHARS_MAX} are kept")
    if state.upper == MINIMUM:
        raise InvalidUsage(f"nothing was written to shard {state.name!r} yet, so there is nothing to erase")
    if command.erasure in state.erasures:
        raise InvalidUsage(f"shard {state.name!r} has an erasure {command.erasure} already; take another id")
    _check_pending(state, command)
    state, pending = _with_room(state), None
    if state.retention.appended and not command.force:
        state, result, runs = keep_pending(state, command, context)
        pending = ErasureRequest(runs, command.tags)
    else:
        state, result = restore(state, command, context)
    at = result.lower.element or 0
    now_ms = context.checked_ms or context.now_ms
    deadline_ms = None if command.deadline_ms is None else now_ms + command.deadline_ms
    erasure = Erasure(at, command.question, now_ms, deadline_ms, command.reason, pending=pending)
    state = replace(state, erasures=with_changes(state.erasures, {command.erasure: erasure}))
    return (state if pending is not None else let_go(state, at, context, tags=command.tags)), result


def _check_pending(state: State, command: c.Erase) -> None:
    """Two erasures that are pending must not take the same row away."""
    if command.expected_upper == state.upper and command.pending != len(pending_erasures(state)):
        raise UpperMismatch(
            f"shard {state.name!r} has other erasures that are pending than rows were worked out with; decide anew",
            expected=command.expected_upper.to_json(),
            actual=state.upper.to_json(),
            stays=False,
        )


def read(state: State, command: c.ReadErasures, context: Context) -> tuple[State, c.ErasuresAre]:
    return state, _told(state, context)


def note_rewritten(state: State, command: c.NoteRewritten, context: Context) -> tuple[State, c.ErasuresAre]:
    known = state.erasures.get(command.erasure)
    if known is None or known.rewritten or not is_rewritten(state, known.at):
        return state, _told(state, context)
    if context.checked_ms is None:  # by a clock that is behind, files would count as younger than they are
        raise Unavailable(
            f"the clock of this machine and that of the blob store do not agree, or cannot be compared, so nobody can "
            f"say which files of shard {state.name!r} are older than its erasure; set the clock, or retry"
        )
    rewritten = SeqNo(state.seqno + 1)
    noted = replace(known, rewritten=rewritten, rewritten_ms=context.checked_ms, doomed=command.doomed)
    return _with(state, command.erasure, noted, context)


def prove(state: State, command: c.ProveErasure, context: Context) -> tuple[State, c.ErasuresAre]:
    """What of it the State itself tells is checked: no rollup or long state diff of before is named any more, and
    no loan may keep a blob of before.
    """
    known = state.erasures.get(command.erasure)
    if known is None or known.proof is not None or not known.rewritten:
        return state, _told(state, context)
    if lent_before(state, known):
        return state, _told(state, context)
    if min([command.proof.horizon, *state.rollups, *state.long_diffs]) < known.rewritten:
        return state, _told(state, context)
    return _with(state, command.erasure, replace(known, proof=command.proof), context)


def _with(state: State, name: str, erasure: Erasure, context: Context) -> tuple[State, c.ErasuresAre]:
    state = replace(state, erasures=with_changes(state.erasures, {name: erasure}))
    return state, _told(state, context)


def _told(state: State, context: Context) -> c.ErasuresAre:
    found: dict[str, tuple[Wait, ...]] = {}
    for name, erasure in state.erasures.items():
        if erasure.pending is not None:
            found[name] = (Wait("writer", "append", erasure.at),)
        elif erasure.proof is None:
            left = states_held(state, erasure.rewritten) if erasure.rewritten else waits(state, erasure.at)
            found[name] = (*left, *lent_before(state, erasure))[:WAITS_TOLD_MAX]
    return c.ErasuresAre(dict(state.erasures), found, context.checked_ms or context.now_ms)


def _with_room(state: State) -> State:
    """The State without the oldest erasure that has ended, where it has as many as it may."""
    if len(state.erasures) < ERASURES_MAX:
        return state
    ended = [(erasure.at, name) for name, erasure in state.erasures.items() if erasure.proof is not None]
    if not ended:
        raise Conflict(  # not Overloaded, which callers repeat: an erasure may wait for a day
            f"shard {state.name!r} has {len(state.erasures)} erasures that have not ended, which is the most: erase "
            "again once one has its receipt (`persist compactor --gc`); `persist erased` tells for what they wait"
        )
    return replace(state, erasures=with_changes(state.erasures, {}, (min(ended)[1],)))
