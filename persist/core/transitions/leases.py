"""Leases: the constants of their rules, and forgetting the holders of leases that lapsed. That alone never moves since.

They are judged by the lease clock of the State, which no wall clock moves (docs/design/0006-leases-and-clocks.md).
Every commit drops the leases that have lapsed. Before a transition refuses a command or holds since back because of a
lease, it drops the lapsed ones too, so that this also works when no commit has happened since they lapsed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from persist.core import commands as c
from persist.core.entries import Entries, with_changes
from persist.core.record import replace
from persist.core.state import Leased, State
from persist.core.transitions.context import Context
from persist.core.transitions.outcomes import retired

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
    return retired(state, gone, now_ms) if gone else state


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
    silent = command.silent
    readers = [k for k, reader in silent.leased_readers.items() if state.leased_readers.get(k) == reader]
    writers = [k for k, writer in silent.writers.items() if state.writers.get(k) == writer]
    claims = {k: claim for k, claim in state.claims.items() if silent.claims.get(k) != claim}
    state = replace(
        state,
        leased_readers=with_changes(state.leased_readers, {}, readers),
        claims=claims,
    )
    state = retired(state, writers, context.lease_now_ms)
    return expire_lapsed(state, context.lease_now_ms), c.Done()


def is_fresh(known: Leased, before: Callable[[State], Leased | None], context: Context) -> bool:
    """Whether a lease was renewed so lately that a heartbeat changes nothing. `before` finds it in an earlier State.

    The lease clock cannot tell: it may be far behind the time that has passed. So this committer must have seen that
    the lease was not renewed yet, a short while ago. If it does not know, the heartbeat is committed.
    """
    soon_ms = known.lease_ms // HEARTBEAT_EVERY
    if context.lease_clock_ms is None:
        return context.now_ms - known.heartbeat_ms < soon_ms
    return any(renewed.age_ms < soon_ms and before(renewed.state) != known for renewed in context.renewed)


def heartbeat_ms(known: Leased, context: Context) -> int:
    """The heartbeat of a lease that is renewed now. It always differs from the last one, so that others see it."""
    if context.lease_clock_ms is None:
        return context.now_ms
    return max(context.lease_clock_ms, known.heartbeat_ms + 1)


def with_lease_clock(state: State, now_ms: int) -> State:
    """The State whose lease clock begins at `now_ms`. Heartbeats beyond it came from a clock that was ahead."""
    found: dict[str, Any] = {}
    for name in ("writers", "leased_readers", "claims"):
        entries = getattr(state, name)
        ahead = {k: replace(e, heartbeat_ms=now_ms) for k, e in entries.items() if e.heartbeat_ms > now_ms}
        if ahead:
            found[name] = {**entries, **ahead}
    return replace(state, **found) if found else state
