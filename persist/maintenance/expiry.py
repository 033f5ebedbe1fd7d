"""Expiry: silent lease holders, and the age at which a shard's own hold on since, its tags and its tombstones end."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from persist.commit.machine import Committer, Place
from persist.commit.state_loader import rolled_up
from persist.commit.system import Clock, StoreClock
from persist.core import commands as c
from persist.core.errors import PersistError
from persist.core.ids import SeqNo
from persist.core.spill import ENTRIES, SpillFile
from persist.core.state import Leased, Rollup, State, held_since, latest_time
from persist.core.transitions import expire_lapsed
from persist.core.transitions.history_control import CLAIM_KEPT_LEASES
from persist.core.transitions.tombstones import forgettable
from persist.formats.store_errors import translated

# Holders of leases that have fallen silent, found without comparing the clocks of two machines.
#
# The lease clock of a State goes on only by what committers watch, so it may be far behind. Two things end a lease all
# the same: this process has watched it for so long, and it was not renewed. Or nobody watches for long (maintenance
# that runs once a night), and two clocks that are set apart agree that many leases have passed: this machine's,
# compared with the walltime of a rollup in which the lease was already as it is now, and the blob store's, compared
# with the time at which that rollup was written.


MANY_LEASES = 10  # that two clocks must agree on
AGREED_EVERY_S = 3_600.0  # clocks are asked so seldom about one shard: a process that lives on watches by itself
SHARDS_MAX = 100_000  # that are watched at a time
NAMED_MAX = 1_000  # leases that one commit forgets
ROLLUPS_MAX = 8  # of a State, that are looked at
DIFFS_MAX = 100  # after the newest rollup, that are looked at

_KINDS = {"leased_readers": 1, "writers": 1, "claims": CLAIM_KEPT_LEASES}  # leases after which each is forgotten
_Key = tuple[str, str]


class Silence:
    """Watches the leases of shards of a location. One thread at a time for each shard."""

    def __init__(self, location: Place, store_clock: StoreClock) -> None:
        self._location = location
        self._store_clock = store_clock
        self._seen: dict[str, dict[_Key, tuple[Leased, float]]] = {}  # each lease as it is, and since when
        self._asked_s: dict[str, float] = {}

    def forget(self, machine: Committer, state: State) -> State:
        """The State without leases that lapsed; commits only if there are any. `state` is the newest one."""
        lapsed = expire_lapsed(state, self._location.machine(state.name).lease_now_ms(state)) is not state
        silent = dict(islice(self._watched(state), NAMED_MAX))
        if not lapsed and not silent and self._is_time_to_ask(state):
            try:
                silent = dict(islice(self._agreed(state), NAMED_MAX))
                if not silent and self._wants_witness(state):
                    rolled_up(self._location.versions, state, machine.apply)
                    return machine.state()
            except PersistError:
                silent = {}  # the clocks are asked again later
        if not lapsed and not silent:
            return state
        machine.apply(c.ForgetLapsed(_as_leases(silent)))
        return machine.state()

    def _watched(self, state: State) -> Iterator[tuple[_Key, Leased]]:
        """The leases that were not renewed while this process has watched for longer than they last."""
        now_s = self._location.clock.monotonic()
        before = self._seen.pop(state.name, {})
        seen = {}
        for key, lease in _leases(state):
            known = before.get(key)
            seen[key] = known if known is not None and known[0] == lease else (lease, now_s)
        if seen:
            if len(self._seen) >= SHARDS_MAX:
                self._seen.clear()
            self._seen[state.name] = seen
        for key, (lease, since_s) in seen.items():
            if (now_s - since_s) * 1000 > _KINDS[key[0]] * lease.lease_ms:
                yield key, lease

    def _is_time_to_ask(self, state: State) -> bool:
        now_s = self._location.clock.monotonic()
        if (
            next(_leases(state), None) is None
            or now_s - self._asked_s.get(state.name, -AGREED_EVERY_S) < AGREED_EVERY_S
        ):
            return False
        if len(self._asked_s) >= SHARDS_MAX:
            self._asked_s.clear()
        self._asked_s[state.name] = now_s
        return True

    def _agreed(self, state: State) -> Iterator[tuple[_Key, Leased]]:
        """The leases of which two clocks agree that they were not renewed for many times as long as they last."""
        leases = dict(_leases(state))
        many_ms = MANY_LEASES * min(lease.lease_ms for lease in leases.values())
        witness = self._old_rollup(state, many_ms)
        if witness is None:
            return
        earlier, by_store_ms = witness
        agreed_ms = min(by_store_ms, self._location.clock.now_ms() - earlier.walltime_ms)
        for key, lease in _leases(earlier):
            if leases.get(key) == lease and agreed_ms > MANY_LEASES * lease.lease_ms:
                yield key, lease

    def _old_rollup(self, state: State, age_ms: int) -> tuple[State, int] | None:
        """The newest rollup that is so old by the store's clock, and how old it is."""
        found: tuple[Rollup, int] | None = None
        for _, rollup in sorted(state.rollups.items())[:ROLLUPS_MAX]:
            with translated():
                stat = self._location.blob.stat(rollup.key)
            old_ms = 0 if stat is None else self._store_clock.now_ms() - stat.modified_ms
            if old_ms > age_ms:
                found = rollup, old_ms
        if found is None:
            return None
        earlier = self._location.versions.read_rollup(found[0].key)
        return None if earlier is None else (earlier, found[1])

    def _wants_witness(self, state: State) -> bool:
        """Whether a rollup now would let the two clocks tell next time: some lease is in none yet, and looks old."""
        idle_ms = self._location.clock.now_ms() - state.walltime_ms
        if not any(idle_ms > MANY_LEASES * lease.lease_ms for _, lease in _leases(state)):
            return False
        newest = max(state.rollups, default=SeqNo(0))
        versions = self._location.versions
        short = versions.diffs(state.name, SeqNo(newest + 1), DIFFS_MAX)
        recent = [versions.whole(state.name, change) for change in short]
        return any((found := getattr(change, kind)) and found.set for change in recent for kind in _KINDS)


def _leases(state: State) -> Iterator[tuple[_Key, Leased]]:
    for kind in _KINDS:
        for key, lease in getattr(state, kind).items():
            yield (kind, key), lease


def _as_leases(found: dict[_Key, Leased]) -> c.LapsedLeases:
    def of(kind: str) -> dict[str, Leased]:
        return {key: lease for (its_kind, key), lease in found.items() if its_kind == kind}

    return c.LapsedLeases(**{kind: of(kind) for kind in _KINDS})  # type: ignore[arg-type]


# Moves a shard's own hold on since as its history gets older, and lets tags and dropped rows go.
#
# By maintenance, and by the upkeep of embedded programs.
#
# Where a shard keeps no history, since follows the latest time as far as readers allow.


STEPS = 100  # since follows the clock in steps of this part of the history
STEP_S_MIN = 1.0
STEP_S_MAX = 600.0
WITHOUT_HISTORY_S = 5.0  # since of a shard that keeps none moves at most so often


def step_s(state: State) -> float:
    """How often, at most, the hold of the shard is moved: so far behind its settings since may be."""
    history_ms = state.settings.history_ms or 0
    return max(STEP_S_MIN, min(STEP_S_MAX, history_ms / 1000 / STEPS)) if history_ms else WITHOUT_HISTORY_S


def is_aging(state: State) -> bool:
    """Whether there is something that time, or the end of a reader, lets the shard forget."""
    settings = state.settings
    if not settings.version or settings.history_ms is None or state.since.is_empty:
        return False
    return _moves(state) or bool(settings.history_ms and state.files_of(ENTRIES))


def _moves(state: State) -> bool:
    """Whether since, or what holds it, may move."""
    latest = latest_time(state)
    if not state.settings.history_ms:
        return state.since < held_since(state, latest)
    return state.history_hold < latest or state.since < held_since(state)


def _may_go(file: SpillFile, before_ms: int) -> bool:
    """Whether the commit history has a file that is old enough, or of which no checked clock was told yet."""
    return not file.until_ms or file.is_outlived(before_ms)


def forget_outlived(machine: Committer, clock: Clock, *, ages: bool = True) -> bool:
    """Forget what is older than the shard's history, tags that were kept long enough, and rows that drops took away.

    Whether history was due, which stays without `ages`. Commits once at most; repeating it is safe. Raises Unavailable
    where the clocks of the committer and of the blob store do not agree: by one alone nothing goes.
    """
    state = machine.state()
    before_ms = max(0, clock.now_ms() - (state.settings.history_ms or 0))
    files = state.files_of(ENTRIES)
    is_due = ages and is_aging(state) and (_moves(state) or any(_may_go(file, before_ms) for file in files))
    tags_s = tags_in_s(state, clock)
    if is_due or (tags_s is not None and tags_s <= 0) or forgettable(state):
        machine.apply(c.ForgetOutlived(before_ms if is_due else None))
    return is_due


def tags_in_s(state: State, clock: Clock) -> float | None:
    """In how many seconds the first tag was kept for long enough; at most 0: now. None: there is no such tag."""
    ends = [tag.until_ms for tag in state.tags.values() if tag.until_ms is not None]
    return (min(ends) - clock.now_ms()) / 1000 if ends else None
