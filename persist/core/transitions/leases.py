"""Leases that lapsed: whoever held one is forgotten. That alone never moves since.

The next commit after a lease lapsed forgets its holder. A transition that is about to refuse, or to hold back since,
because of somebody's lease forgets the lapsed ones first: the dead must stand in nobody's way, commits or no commits.
"""

from __future__ import annotations

from dataclasses import replace

from persist.core.state import State
from persist.core.transitions.maintenance import CLAIM_KEPT_LEASES


def without_lapsed_readers(state: State, now_ms: int) -> State:
    """The same State object when no reader's lease lapsed."""
    kept = {k: reader for k, reader in state.leased_readers.items() if not reader.lapsed(now_ms)}
    return state if len(kept) == len(state.leased_readers) else replace(state, leased_readers=kept)


def without_lapsed_writers(state: State, now_ms: int) -> State:
    """The same State object when no writer's lease lapsed."""
    kept = {k: writer for k, writer in state.writers.items() if not writer.lapsed(now_ms)}
    return state if len(kept) == len(state.writers) else replace(state, writers=kept)


def expire_lapsed(state: State, now_ms: int) -> State:
    """Forget readers and writers whose leases lapsed, and claims that lapsed long ago.

    A claim that only just lapsed is kept, with its progress, for whoever takes it over.
    """
    state = without_lapsed_writers(without_lapsed_readers(state, now_ms), now_ms)
    kept = {k: claim for k, claim in state.claims.items() if not claim.lapsed(now_ms, CLAIM_KEPT_LEASES)}
    return state if len(kept) == len(state.claims) else replace(state, claims=kept)


__all__ = ["expire_lapsed", "without_lapsed_readers", "without_lapsed_writers"]
