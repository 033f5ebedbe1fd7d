"""The garbage collector: deletes blobs that no live version of a shard names, and truncates its log.

One epoch, for a horizon H that is the newest rollup at or before every reader's hold:

1. what the state diffs up to H say is gone is deleted from the blob store;
   What a bundle lists goes before the bundle, so that whoever comes after a crash finds it;
2. the log is truncated, so that it begins at H, where a rollup lies;
3. the rollups before H are taken out of the State; their blobs are gone by that state diff, and fall to a later epoch.

Safe, because keys are single-use: what left the State at or before H is in no version from H on, and nobody holds or
can load an earlier one. Every step may be repeated, or done by several collectors at once; a collector that dies
between two steps leaves work that the next one finds. Blobs go before the log entries that name them: so nothing is
forgotten. Before a batch of blobs is deleted, the two stores are compared once more: a blob may belong to another
location.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from blob import BlobNotFound
from persist.commit.blob_tasks import keys_in
from persist.commit.location import Location
from persist.commit.machine import Committer, CommitterOf, Place
from persist.commit.state_loader import check_replayed, rolled_up
from persist.commit.system import StoreClock, probed
from persist.core import commands as c
from persist.core.blob_keys import is_bundle_key, is_diff_key, is_loan_key, is_rollup_key, shard_of
from persist.core.errors import Corruption, PersistError, Unavailable, UnknownShard
from persist.core.ids import SeqNo, family_of, incarnation_of
from persist.core.named_holds import compact, is_foreign
from persist.core.state import ROLLUP_LEAST, State
from persist.formats.store_errors import translated, translated_but_missing
from persist.maintenance.clone_refs import Lending, LoanLists
from persist.maintenance.expiry import Silence, forget_outlived

log = logging.getLogger("persist.gc")

SCAN_LIMIT = 1_000
HOUR_MS = 3_600_000
DELETE_BATCH = 500  # blobs that one request deletes
ENTRIES_PER_STEP = 10  # log entries cost a collection as much as one step towards the tombstone of a dropped shard
STAGED_MS_MAX = 12 * HOUR_MS  # so long a blob may wait for its commit, or a loan for its clone; sweeps wait longer


@dataclass(frozen=True, slots=True)
class GcSettings:
    """`entries_max` bounds one epoch (to the first rollup beyond it), in log entries.

    A rollup is made when the newest one is `rollup_after` entries old, or earlier where data waits to be deleted; not
    where `makes_rollups` says that whoever commits makes enough of them. A loan that no clone took is ended once it is
    `untaken_ms` old.
    """

    entries_max: int = 10_000
    rollup_after: int = ROLLUP_LEAST
    delete_threads: int = 8
    makes_rollups: bool = True
    untaken_ms: int = STAGED_MS_MAX + HOUR_MS

    @property
    def finalise_steps_max(self) -> int:
        """Commits of one run that take a dropped shard towards its tombstone."""
        return max(1, self.entries_max // ENTRIES_PER_STEP)


COLLECTS = GcSettings(entries_max=1_000, delete_threads=1, makes_rollups=False)


@dataclass(frozen=True, slots=True)
class GcReport:
    """What one run did. `done` says that a further run would find nothing to do for now."""

    deleted: int = 0
    truncated: int = 0
    done: bool = True


class Counts(Protocol):
    """Hears what a collector did."""

    def add(self, **counts: int) -> None:
        """Count: `add(gc_runs=1)`."""
        ...


class Uncounted:
    """Nobody wants to know."""

    def add(self, **counts: int) -> None:
        return


class Collector:
    """Collects shards of a location. Stateless between runs; any number may work at once."""

    def __init__(
        self,
        location: Place,
        settings: GcSettings | None = None,
        *,
        metrics: Counts | None = None,
        committer_of: CommitterOf | None = None,
    ) -> None:
        self.settings = settings or GcSettings()
        self.metrics = metrics or Uncounted()
        self._location = location
        self._committer_of = committer_of or location.machine
        self._versions = location.versions
        self._lists = LoanLists(location.blob)
        self._lending = Lending(location, self._committer_of, self._lists, self.settings.untaken_ms)
        self._silence = Silence(location, StoreClock(location.blob, location.clock, location.ids))

    def run(self, name: str) -> GcReport:
        """One epoch of one shard; for a dropped shard also its end. Commits nothing where there is nothing to do.

        Raises what the stores raise (repeating is safe), and Corruption when a rollup that the log needs is missing.
        """
        machine = self._committer_of(name)
        state = machine.refresh()
        if state.is_closed and not state.tombstone:
            state = self._finalise(machine, state)
        first = self._first_live(name)
        if state.tombstone:
            report = self._clear_tombstone(machine, state, first)
            self._lending.run(machine)
            return report
        try:
            state = self._silence.forget(machine, state)
            if self._wants_rollup(state):
                state = self._roll_up(machine, state)
        except Unavailable as error:  # on a full disk nothing can be written until something is deleted
            if self._horizon(state, first) == first:
                raise
            log.warning("gc deletes what it can without writing", extra={"shard": name, "why": str(error)})
        report = self._epoch(machine, state, first, self._horizon(state, first))
        self._lending.run(machine)
        self.metrics.add(gc_runs=1)
        return report

    # --- one epoch

    def _epoch(self, machine: Committer, state: State, first: SeqNo, horizon: SeqNo) -> GcReport:
        deleted = truncated = 0
        if first < horizon:
            if not self._has_rollup(machine, state, first, horizon):
                return GcReport(done=False)
            deleted = self._delete_gone(machine, first, horizon)
            self._location.identity.confirm()
            machine.refresh()  # raises HistoryLost where the log is another one by now
            with translated():
                truncated = self._location.consensus.truncate(machine.name, int(horizon))
            self.metrics.add(gc_entries_truncated=truncated)
        removes = min([*state.rollups, *state.long_diffs], default=horizon) < horizon
        if removes:
            machine.apply(c.RemoveRollups(horizon))
        if deleted or truncated:
            log.info("gc", extra={"shard": machine.name, "deleted": deleted, "truncated": truncated})
        return GcReport(deleted, truncated, done=not truncated and not removes)

    def _horizon(self, state: State, first: SeqNo) -> SeqNo:
        """The newest rollup that no reader's hold forbids, at most `entries_max` entries on; `first` without one.

        Of rollups further on the nearest is taken: every epoch gets somewhere.
        """
        allowed = sorted(seqno for seqno in state.rollups if first < seqno <= state.seqno_since)
        near = [seqno for seqno in allowed if seqno <= first + self.settings.entries_max]
        return near[-1] if near else allowed[0] if allowed else first

    def _first_live(self, name: str) -> SeqNo:
        with translated():
            entries = self._location.consensus.scan(name, 1, 1)
        if not entries:
            raise Corruption(f"the log of shard {name!r} has vanished from the consensus store")
        return SeqNo(entries[0].seqno)

    def _has_rollup(self, machine: Committer, state: State, first: SeqNo, seqno: SeqNo) -> bool:
        """Whether the rollup at which the log is to begin is there; False when another collector has gone further.

        It is read back, and compared with what the log makes of the one at which that begins now. Raises Corruption
        when they differ, or the State names one that is gone: then the log must stay as it is.
        """
        key = state.rollups[seqno].key
        if check_replayed(self._versions, state, first, seqno):
            return True
        if seqno in machine.refresh().rollups:
            raise Corruption(f"rollup {key} of shard {state.name!r} is missing: its log is left as it is")
        return False

    def _delete_gone(self, machine: Committer, first: SeqNo, last: SeqNo) -> int:
        """Delete what the state diffs in `[first, last]` say is gone; how many blobs.

        What bundles among it list goes before these, and so does what lists among it have lent. What is lent stays,
        and what belongs to others does.
        """
        bundles: list[str] = []
        lists: list[str] = []
        emptied: set[str] = set()

        def gone() -> Iterator[str]:
            for change in self._versions.whole_diffs(machine.name, SeqNo(first - 1)):
                if change.seqno > last:
                    return
                emptied.update(change.emptied)
                yield from change.gone

        def others() -> Iterator[str]:
            for key in self._unnamed(machine, gone()):
                if is_bundle_key(key):
                    bundles.append(key)
                elif is_loan_key(key):
                    lists.append(key)
                else:
                    yield key

        deleted = self._delete(others())
        if bundles:
            listed = self._listed(machine, [key for key in bundles if key not in emptied])
            deleted += self._delete(self._unnamed(machine, listed))
            deleted += self._delete(iter(bundles))
        return deleted + self._delete_returned(machine, lists, last)

    def _delete_returned(self, machine: Committer, lists: Sequence[str], last: SeqNo) -> int:
        """Delete what these lists had lent and no version after `last` needs, then the lists; how many blobs.

        A list that is gone was done with before. One that cannot be read tells nothing: what it lent, and it itself,
        is left to the orphan sweep. So is all of them, where nobody knows what a bundle lists.
        """
        deleted = 0
        for list_key in lists:
            try:
                keys = self._lists.keys(list_key)
                needed = self._needed_after(machine, last)
            except BlobNotFound:
                continue
            except Corruption as error:
                log.error("what was lent is left", extra={"shard": machine.name, "blob": list_key, "why": str(error)})
                continue
            unneeded = (key for key in keys if compact(key) not in needed)
            deleted += self._delete(self._unnamed(machine, unneeded)) + self._delete(iter([list_key]))
        return deleted

    def _needed_after(self, machine: Committer, last: SeqNo) -> frozenset[bytes]:
        """The ids of the blobs that a version after `last` names, also by what bundles list."""
        state = machine.refresh()
        named = set(state.blob_keys())
        gone = {key for change in self._versions.whole_diffs(machine.name, last) for key in change.gone}
        own = [key for key in named | gone if not is_foreign(key, state.shard_id)]
        for bundle in filter(is_bundle_key, sorted(own)):
            try:
                with translated_but_missing():
                    own += keys_in(self._location.blob, bundle)
            except BlobNotFound as error:
                if machine.refresh().trace.names(bundle):
                    raise Corruption(f"bundle {bundle} of shard {machine.name!r} is missing") from error
        return frozenset(map(compact, own))

    def _unnamed(self, machine: Committer, keys: Iterable[str]) -> Iterator[str]:
        """What is gone, without what the State names (nothing, if all is well), what is lent, and what was borrowed.

        The State is read first; that it moves on meanwhile is no harm: no key that was gone comes back, and only what
        a version after the horizon names is lent later.
        """
        state = machine.refresh()
        named = frozenset(state.blob_keys())

        def unnamed() -> Iterator[str]:
            for key in keys:
                if is_foreign(key, state.shard_id):
                    continue
                if key in named:
                    log.error("gone but named", extra={"shard": machine.name, "blob": key})
                else:
                    yield key

        return self._lists.not_held(machine, state, unnamed())

    def _listed(self, machine: Committer, bundles: Iterable[str]) -> Iterator[str]:
        """The parts that these bundles list. One that is gone was collected before, after its parts.

        One that is damaged tells nothing: its parts are left to the orphan sweep.
        """
        for bundle in bundles:
            try:
                with translated_but_missing():
                    listed = keys_in(self._location.blob, bundle)
            except BlobNotFound:
                continue
            except Corruption as error:
                log.error("damaged bundle", extra={"shard": machine.name, "blob": bundle, "why": str(error)})
                continue
            yield from listed

    def _delete(self, keys: Iterator[str]) -> int:
        """Delete blobs, several batches at a time; how many. Returns only when all are gone."""
        size, threads = DELETE_BATCH, self.settings.delete_threads
        deleted = 0
        if threads == 1:
            while batch := list(islice(keys, size)):
                deleted += self._delete_batch(batch)
            return deleted
        first = list(islice(keys, size))
        if len(first) < size:
            return self._delete_batch(first) if first else 0
        with ThreadPoolExecutor(threads, thread_name_prefix="persist-gc") as pool:
            deleted += self._delete_batch(first)
            while batches := [b for _ in range(threads) if (b := list(islice(keys, size)))]:
                deleted += sum(pool.map(self._delete_batch, batches))
        return deleted

    def _delete_batch(self, keys: Sequence[str]) -> int:
        self._location.identity.confirm()
        with translated():
            self._location.blob.delete(keys)
        self.metrics.add(gc_blobs_deleted=len(keys))
        return len(keys)

    # --- rollups

    def _wants_rollup(self, state: State) -> bool:
        """Whether a rollup now would let more go: something left the State since the newest one.

        One rollup does not count: every epoch leaves the one before, and an idle shard must come to rest.
        """
        newest = max(state.rollups)
        if state.seqno_since <= newest or not self.settings.makes_rollups:
            return False
        if state.seqno - newest >= self.settings.rollup_after:
            return True
        recent = self._versions.diffs(state.name, SeqNo(newest + 1), self.settings.rollup_after)
        gone = [key for change in recent for key in self._versions.whole(state.name, change).gone]
        return sum(map(is_rollup_key, gone)) > 1 or not all(map(is_rollup_key, gone))

    def _roll_up(self, machine: Committer, state: State) -> State:
        if rolled_up(self._versions, state, machine.apply):
            self.metrics.add(gc_rollups_made=1)
        return machine.state()

    # --- the end of a shard

    def _finalise(self, machine: Committer, state: State) -> State:
        """The State after bounded steps towards the tombstone, or of the next life of the name, if that has begun."""
        # Not the time of a minute ago: tokens that were born since then would be taken for ones from the future.
        finalise = c.Finalise(shard=state.shard_id, store_ms=probed(self._location.blob, self._location.ids))
        for _ in range(self.settings.finalise_steps_max):
            try:
                result = machine.apply(finalise)
            except UnknownShard:
                return machine.refresh()
            assert isinstance(result, c.Finalised)
            if result.done:
                self.metrics.add(shards_finalised=1)
                break
        return machine.state()

    def _clear_tombstone(self, machine: Committer, state: State, first: SeqNo) -> GcReport:
        """A tombstone keeps one rollup, the log from it on, and no other blob. Nobody can name new ones.

        Its blobs are listed once, before its log is cut: a tombstone whose log is cut costs no listing ever again. The
        next life of the name may begin meanwhile. Then the ordinary epochs go on with what is left.
        """
        kept = self._last_rollup(state)
        if kept is None or state.seqno - kept >= self.settings.rollup_after:  # loans that end make its log longer
            state = self._roll_up(machine, state)
            kept = max(state.rollups)
            if not state.tombstone:
                return GcReport(done=False)
        deleted = truncated = 0
        if first < kept:
            if not self._has_rollup(machine, state, first, kept):
                return GcReport(done=False)
            with translated():
                listed = self._location.blob.list(family_of(state.shard_id))
                unneeded = self._unneeded((stat.key for stat in listed), state)
                deleted = self._delete(self._lists.not_held(machine, state, unneeded))
                truncated = self._location.consensus.truncate(machine.name, int(kept))
            self.metrics.add(gc_entries_truncated=truncated)
        if len(state.rollups) > 1 or min(state.long_diffs, default=kept) < kept:
            machine.apply(c.RemoveRollups(kept))
            if not machine.refresh().tombstone:
                return GcReport(deleted, truncated, done=False)
        return GcReport(deleted + self._delete_left_behind(machine, state), truncated)

    def _delete_left_behind(self, machine: Committer, state: State) -> int:
        """Delete what is there still though the live state diffs say that it is gone; lists come last."""
        left = list(self._left_behind(machine, SeqNo(0)))
        deleted = self._delete(key for key in left if not is_loan_key(key))
        return deleted + self._delete_returned(machine, list(filter(is_loan_key, left)), state.seqno)

    def _left_behind(self, machine: Committer, seqno: SeqNo) -> Iterator[str]:
        """Blobs that are there still though the live state diffs say that they are gone: rollups of a tombstone."""
        state = machine.refresh()
        named = frozenset(state.blob_keys())
        gone = (key for change in self._versions.whole_diffs(machine.name, seqno) for key in change.gone)
        own = (key for key in gone if key not in named and not is_foreign(key, state.shard_id))
        for key in self._lists.not_held(machine, state, own):
            with translated():
                if self._location.blob.stat(key) is not None:
                    yield key

    def _unneeded(self, keys: Iterator[str], state: State) -> Iterator[str]:
        """What a tombstone does not need.

        Another collector may be about to name a rollup that nothing names yet. So may the next life of the name, by an
        older build: a long state diff with the id of this life; and a clone a list. So of these only those go that left
        the State. The orphan sweep takes the others. The next life of the name may have begun: its blobs stay.
        """
        named = frozenset(state.blob_keys())
        gone = {key for change in self._versions.whole_diffs(state.name, SeqNo(0)) for key in change.gone}
        for key in keys:
            ended = incarnation_of(state.name, shard_of(key)) <= state.incarnation
            if ended and key not in named and (key in gone or not _is_of_nobody_yet(key)):
                yield key

    def _last_rollup(self, state: State) -> SeqNo | None:
        """The seqno of the newest rollup if that holds the tombstone already, so no later state diff sets it."""
        newest = max(state.rollups)
        if any(change.tombstone is not None for change in self._versions.whole_diffs(state.name, newest)):
            return None
        return newest


def _is_of_nobody_yet(key: str) -> bool:
    """Whether somebody may be about to have a tombstone name the blob."""
    return is_rollup_key(key) or is_diff_key(key) or is_loan_key(key)


def collect_in_background(location: Location) -> Callable[[str], object]:
    """What an embedded program does for a shard besides its commits: forget what is old, then collect."""
    collector = Collector(location, COLLECTS)

    def collect(name: str) -> None:
        try:
            forget_outlived(location.machine(name), location.clock)
        except PersistError as error:  # no clock can be trusted now: later
            location.sight.storms.corrupted(name, error, "forgetting what is old")
        collector.run(name)

    return collect
