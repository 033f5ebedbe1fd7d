"""Leases: the constants of their rules, and removing holders whose leases lapsed, which never moves since.

They are judged by the lease clock of the State, which no wall clock moves (docs/design/0005-leases-and-clocks.md).
Every commit removes lapsed leases. A transition also removes them before it refuses a command or holds since back
because of a lease, in case no commit has happened since they lapsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from persist.core import commands as c
from persist.core.errors import InvalidUsage
from persist.core.ids import ReaderId
from persist.core.persistent_map import Entries, with_changes
from persist.core.record import replace
from persist.core.state import Leased, LeasedReader, State
from persist.core.transitions.context import Context
from persist.core.transitions.outcomes_and_audit import retired, without_old_outcomes

HEARTBEAT_EVERY = 4  # a heartbeat within lease / 4 of the last one changes nothing, to keep the log small
# A lapsed claim keeps the progress of its merge for the next owner. After this many leases it is dropped.
CLAIM_KEPT_LEASES = 10

_K = TypeVar("_K")
_L = TypeVar("_L", bound=Leased)


def without_lapsed_readers(state: State, now_ms: int) -> State:
    """The State without lapsed readers; the same object if there are none."""
    gone = _lapsed(state.leased_readers, now_ms)
    return replace(state, leased_readers=with_changes(state.leased_readers, {}, gone)) if gone else state


def without_lapsed_writers(state: State, now_ms: int) -> State:
    """The State without lapsed writers; the same object if there are none."""
    gone = _lapsed(state.writers, now_ms)
    return retired(state, gone, now_ms) if gone else state


def _lapsed(entries: Mapping[_K, _L], now_ms: int) -> list[_K]:
    """The keys of lapsed leases. They are checked one by one only if one may have lapsed."""
    due = entries.due if isinstance(entries, Entries) else None
    if due is not None and due >= now_ms:
        return []
    gone = [key for key, entry in entries.items() if entry.lapsed(now_ms)]
    if isinstance(entries, Entries) and not gone:
        entries.due = min((entry.lapses_ms for entry in entries.values()), default=None)
    return gone


def expire_lapsed(state: State, now_ms: int, checked_ms: int | None = None) -> State:
    """The State without lapsed readers and writers, claims that lapsed long ago, and files of old outcomes.

    A claim that lapsed recently is kept, with its progress, for the next owner. Without a checked clock all outcomes
    are kept.
    """
    state = without_lapsed_writers(without_lapsed_readers(state, now_ms), now_ms)
    state = without_old_outcomes(state, now_ms, checked_ms)
    kept = {k: claim for k, claim in state.claims.items() if not claim.lapsed(now_ms, CLAIM_KEPT_LEASES)}
    return state if len(kept) == len(state.claims) else replace(state, claims=kept)


def forget_lapsed(state: State, command: c.ForgetLapsed, context: Context) -> tuple[State, c.SweptBefore]:
    """Always a new State object, and so always a commit."""
    silent = command.silent
    readers = [k for k, reader in silent.leased_readers.items() if state.leased_readers.get(k) == reader]
    writers = [k for k, writer in silent.writers.items() if state.writers.get(k) == writer]
    claims = {k: claim for k, claim in state.claims.items() if silent.claims.get(k) != claim}
    swept_before_ms = max(state.swept_before_ms, min(command.staged_before_ms, context.now_ms))
    state = replace(
        state,
        leased_readers=with_changes(state.leased_readers, {}, readers),
        claims=claims,
        swept_before_ms=swept_before_ms,
    )
    state = retired(state, writers, context.lease_now_ms)
    return expire_lapsed(state, context.lease_now_ms, context.checked_ms), c.SweptBefore(swept_before_ms)


def check_lease(what: str, lease_ms: int) -> None:
    """Raise InvalidUsage if the lease of a reader, a writer or a claim is too short or too long."""
    if not 0 < lease_ms <= c.LEASE_MS_MAX:
        raise InvalidUsage(f"{what} lease {lease_ms} ms is outside (0, {c.LEASE_MS_MAX}]")


def is_fresh(reader: ReaderId, known: LeasedReader, context: Context) -> bool:
    """Whether the lease of a reader was renewed so recently that a heartbeat changes nothing.

    The lease clock does not show that: it may be far behind. So this committer must have observed, a short while ago,
    that the lease was not renewed yet. If it has not, the heartbeat is committed.
    """
    soon_ms = known.lease_ms // HEARTBEAT_EVERY
    if context.lease_clock_ms is None:
        return context.now_ms - known.heartbeat_ms < soon_ms
    return any(
        renewed.age_ms < soon_ms and renewed.state.leased_readers.get(reader) != known for renewed in context.renewed
    )


def heartbeat_ms(known: Leased, context: Context) -> int:
    """The heartbeat of a lease that is renewed now. It always differs from the last one, so that it is visible."""
    if context.lease_clock_ms is None:
        return context.now_ms
    return max(context.lease_clock_ms, known.heartbeat_ms + 1)


def with_lease_clock(state: State, now_ms: int) -> State:
    """The State whose lease clock begins at `now_ms`. Heartbeats beyond it came from a clock that was ahead."""
    changed: dict[str, Any] = {}
    for name in ("writers", "leased_readers", "claims"):
        entries = getattr(state, name)
        ahead = {k: replace(e, heartbeat_ms=now_ms) for k, e in entries.items() if e.heartbeat_ms > now_ms}
        if ahead:
            changed[name] = {**entries, **ahead}
    return replace(state, **changed) if changed else state
