"""Expiry: leases of silent holders, history beyond the retention of a shard, tags, and rows of truncations.

Leases of silent holders are found without comparing the clocks of two machines. The lease clock of a State advances
only by what committers observe, so it may be far behind. Two other observations end a lease: this process has watched
it for longer than it lasts without a renewal. Or no process watches for long (maintenance that runs once a night), and
two independent clocks agree that many lease periods have passed: that of this machine, compared with the walltime of a
rollup that already contains the lease as it is now, and that of the blob store, compared with the time at which that
rollup was written.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from persist.commit.clocks_and_ids import Clock, StoreClock
from persist.commit.committer import Committer
from persist.commit.location import Location
from persist.commit.state_loader import rolled_up
from persist.core import commands as c
from persist.core.errors import PersistError
from persist.core.ids import SeqNo
from persist.core.readable_times import held_since, latest_time
from persist.core.spill import ENTRIES
from persist.core.state import Leased, Rollup, State
from persist.core.transitions import expire_lapsed
from persist.core.transitions.lease_expiry import CLAIM_KEPT_LEASES
from persist.core.transitions.row_drops import forgettable
from persist.formats.store_errors import translated

MANY_LEASES = 10  # lease periods that two clocks must agree on
COMPARE_EVERY_S = 3_600.0  # how often clocks are compared for one shard; a running process mostly watches
SHARDS_MAX = 100_000  # watched shards
FORGOTTEN_MAX = 1_000  # leases that one commit forgets
ROLLUPS_MAX = 8  # rollups of a State that are examined
DIFFS_MAX = 100  # state diffs after the newest rollup that are examined

STEPS = 100  # since follows the clock in steps of 1 / STEPS of the history
STEP_S_MIN = 1.0
STEP_S_MAX = 600.0
WITHOUT_HISTORY_S = 5.0  # the step of a shard without history

_KINDS = {"leased_readers": 1, "writers": 1, "claims": CLAIM_KEPT_LEASES}  # leases after which each is forgotten
_Key = tuple[str, str]


class Silence:
    """Watches the leases of shards of a location. Use one thread at a time per shard."""

    def __init__(self, location: Location, store_clock: StoreClock) -> None:
        self._location = location
        self._store_clock = store_clock
        self._watched: dict[str, dict[_Key, tuple[Leased, float]]] = {}  # each lease, and since when it is unchanged
        self._compared_s: dict[str, float] = {}

    def forget(self, machine: Committer, state: State) -> State:
        """The State without lapsed leases; commits only if there are any. `state` is the newest one."""
        lapsed = expire_lapsed(state, self._location.machine(state.name).lease_now_ms(state)) is not state
        silent = dict(islice(self._silent_while_watched(state), FORGOTTEN_MAX))
        if not lapsed and not silent and self._comparison_is_due(state):
            try:
                silent = dict(islice(self._silent_by_two_clocks(state), FORGOTTEN_MAX))
                if not silent and self._needs_rollup(state):
                    rolled_up(self._location.versions, state, machine.apply)
                    return machine.state()
            except PersistError:
                silent = {}  # the clocks are compared again later
        if not lapsed and not silent:
            return state
        by_kind: dict[str, Any] = {kind: {key: silent[of, key] for of, key in silent if of == kind} for kind in _KINDS}
        machine.apply(c.ForgetLapsed(c.LapsedLeases(**by_kind)))
        return machine.state()

    def _silent_while_watched(self, state: State) -> Iterator[tuple[_Key, Leased]]:
        """The leases that were not renewed while this process has watched for longer than they last."""
        now_s = self._location.clock.monotonic()
        before = self._watched.pop(state.name, {})
        watched = {}
        for key, lease in _leases(state):
            known = before.get(key)
            watched[key] = known if known is not None and known[0] == lease else (lease, now_s)
        if watched:
            if len(self._watched) >= SHARDS_MAX:
                self._watched.clear()
            self._watched[state.name] = watched
        for key, (lease, since_s) in watched.items():
            if (now_s - since_s) * 1000 > _KINDS[key[0]] * lease.lease_ms:
                yield key, lease

    def _comparison_is_due(self, state: State) -> bool:
        now_s = self._location.clock.monotonic()
        compared_s = self._compared_s.get(state.name, -COMPARE_EVERY_S)
        if next(_leases(state), None) is None or now_s - compared_s < COMPARE_EVERY_S:
            return False
        if len(self._compared_s) >= SHARDS_MAX:
            self._compared_s.clear()
        self._compared_s[state.name] = now_s
        return True

    def _silent_by_two_clocks(self, state: State) -> Iterator[tuple[_Key, Leased]]:
        """The leases that, by two clocks, were not renewed for MANY_LEASES times as long as they last."""
        leases = dict(_leases(state))
        many_ms = MANY_LEASES * min(lease.lease_ms for lease in leases.values())
        old = self._old_rollup(state, many_ms)
        if old is None:
            return
        earlier, store_age_ms = old
        age_ms = min(store_age_ms, self._location.clock.now_ms() - earlier.walltime_ms)
        for key, lease in _leases(earlier):
            if leases.get(key) == lease and age_ms > MANY_LEASES * lease.lease_ms:
                yield key, lease

    def _old_rollup(self, state: State, least_age_ms: int) -> tuple[State, int] | None:
        """The newest rollup that is older than `least_age_ms` by the store's clock, and its age in ms."""
        old: tuple[Rollup, int] | None = None
        for _, rollup in sorted(state.rollups.items())[:ROLLUPS_MAX]:
            with translated():
                stat = self._location.blob.stat(rollup.key)
            age_ms = 0 if stat is None else self._store_clock.now_ms() - stat.modified_ms
            if age_ms > least_age_ms:
                old = rollup, age_ms
        if old is None:
            return None
        earlier = self._location.versions.read_rollup(old[0].key)
        return None if earlier is None else (earlier, old[1])

    def _needs_rollup(self, state: State) -> bool:
        """Whether a rollup now helps the next comparison: some lease looks old and is not in any rollup yet."""
        idle_ms = self._location.clock.now_ms() - state.walltime_ms
        if not any(idle_ms > MANY_LEASES * lease.lease_ms for _, lease in _leases(state)):
            return False
        newest = max(state.rollups, default=SeqNo(0))
        versions = self._location.versions
        short = versions.diffs(state.name, SeqNo(newest + 1), DIFFS_MAX)
        recent = [versions.whole(state.name, change) for change in short]
        return any((delta := getattr(change, kind)) and delta.set for change in recent for kind in _KINDS)


def _leases(state: State) -> Iterator[tuple[_Key, Leased]]:
    for kind in _KINDS:
        for key, lease in getattr(state, kind).items():
            yield (kind, key), lease


def step_s(state: State) -> float:
    """The least interval, in seconds, at which the shard's own hold on since moves."""
    history_ms = state.settings.history_ms or 0
    return max(STEP_S_MIN, min(STEP_S_MAX, history_ms / 1000 / STEPS)) if history_ms else WITHOUT_HISTORY_S


def is_aging(state: State) -> bool:
    """Whether the shard can forget history as time passes, or when a reader ends."""
    settings = state.settings
    if not settings.version or settings.history_ms is None or state.since.is_empty:
        return False
    return _moves(state) or bool(settings.history_ms and state.files_of(ENTRIES))


def _moves(state: State) -> bool:
    """Whether since, or the shard's own hold on it, may move. Without history since follows the latest time."""
    latest = latest_time(state)
    if not state.settings.history_ms:
        return state.since < held_since(state, latest)
    return state.history_hold < latest or state.since < held_since(state)


def forget_outlived(machine: Committer, clock: Clock, *, ages: bool = True) -> bool:
    """Forget expired history (only if `ages`), expired tags, and rows deleted by truncations.

    Returns whether history was due. Commits at most once; a retry is safe. Raises Unavailable if the clocks of the
    committer and of the blob store disagree.
    """
    state = machine.state()
    before_ms = max(0, clock.now_ms() - (state.settings.history_ms or 0))
    # A file of the commit history is old enough, or its age was not yet determined by a checked clock.
    has_old = any(not file.until_ms or file.is_outlived(before_ms) for file in state.files_of(ENTRIES))
    is_due = ages and is_aging(state) and (_moves(state) or has_old)
    tags_s = tags_in_s(state, clock)
    if is_due or (tags_s is not None and tags_s <= 0) or forgettable(state):
        machine.apply(c.ForgetOutlived(before_ms if is_due else None))
    return is_due


def tags_in_s(state: State, clock: Clock) -> float | None:
    """Seconds until the first tag expires (at most 0: now). None: no tag expires."""
    ends = [tag.until_ms for tag in state.tags.values() if tag.until_ms is not None]
    return (min(ends) - clock.now_ms()) / 1000 if ends else None
