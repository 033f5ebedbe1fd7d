"""Leases: the constants of their rules, and forgetting the holders of leases that lapsed. That alone never moves since.

Every commit drops the leases that have lapsed. Before a transition refuses a command or holds since back because of a
lease, it drops the lapsed ones too, so that this also works when no commit has happened since they lapsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from persist.core import commands as c
from persist.core.entries import Entries, with_changes
from persist.core.record import replace
from persist.core.state import Leased, State
from persist.core.transitions.context import Context

HEARTBEAT_EVERY = 4  # a heartbeat within lease / 4 of the last one changes nothing: heartbeats must not grow the log
# A lapsed claim keeps the progress of its merge for the next owner. After this many leases it is dropped.
CLAIM_KEPT_LEASES = 10

_K = TypeVar("_K")
_L = TypeVar("_L", bound=Leased)


def without_lapsed_readers(state: State, now_ms: int) -> State:
    """The same State object when no reader's lease lapsed."""
    gone = _lapsed(state.leased_readers, now_ms)
    return replace(state, leased_readers=with_changes(state.leased_readers, {}, gone)) if gone else state


def without_lapsed_writers(state: State, now_ms: int) -> State:
    """The same State object when no writer's lease lapsed."""
    gone = _lapsed(state.writers, now_ms)
    return replace(state, writers=with_changes(state.writers, {}, gone)) if gone else state


def _lapsed(entries: Mapping[_K, _L], now_ms: int) -> list[_K]:
    """The keys of leases that lapsed. They are looked at one by one only when one of them may have."""
    due = entries.due if isinstance(entries, Entries) else None
    if due is not None and due >= now_ms:
        return []
    gone = [key for key, entry in entries.items() if entry.lapsed(now_ms)]
    if isinstance(entries, Entries) and not gone:
        entries.due = min((entry.lapses_ms for entry in entries.values()), default=None)
    return gone


def expire_lapsed(state: State, now_ms: int) -> State:
    """Forget readers and writers whose leases lapsed, and claims that lapsed long ago.

    A claim that only just lapsed is kept, with its progress, for the next owner.
    """
    state = without_lapsed_writers(without_lapsed_readers(state, now_ms), now_ms)
    kept = {k: claim for k, claim in state.claims.items() if not claim.lapsed(now_ms, CLAIM_KEPT_LEASES)}
    return state if len(kept) == len(state.claims) else replace(state, claims=kept)


def forget_lapsed(state: State, command: c.ForgetLapsed, context: Context) -> tuple[State, c.Done]:
    """Always a new State object, and so always a commit."""
    return replace(expire_lapsed(state, context.now_ms)), c.Done()
