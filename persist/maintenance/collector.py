"""The garbage collector: deletes blobs that no live version of a shard names, and truncates its log.

One epoch, for a horizon H that is the newest rollup at or before every reader's hold:

1. the blobs that the state diffs up to H remove are deleted from the blob store; the parts of a bundle are deleted
   before the bundle, so that the next collector finds them after a crash;
2. the log is truncated to begin at H, where there is a rollup;
3. the rollups before H are removed from the State; a later epoch deletes their blobs.

This is safe because keys are single-use: a blob that left the State at or before H is in no version from H on, and no
earlier version is held or can be loaded. Every step may be repeated, or done by several collectors at once; a collector
that dies between two steps leaves work that the next one finds. Blobs are deleted before the log entries that name
them, so none is forgotten. Before each batch of deletions the identities of both stores are confirmed, because a blob
may belong to another location.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from blob import BlobNotFound
from persist.commit.blob_tasks import keys_in
from persist.commit.clocks_and_ids import StoreClock, probed
from persist.commit.committer import Committer, CommitterOf
from persist.commit.location import Location
from persist.commit.state_loader import check_replayed, rolled_up
from persist.core import commands as c
from persist.core.blob_keys import is_bundle_key, is_diff_key, is_loan_key, is_rollup_key, shard_of
from persist.core.errors import Corruption, PersistError, Unavailable, UnknownShard
from persist.core.ids import SeqNo, family_of, incarnation_of
from persist.core.named_holds import compact, is_foreign
from persist.core.state import ROLLUP_LEAST, State
from persist.formats.store_errors import translated
from persist.maintenance.clones_and_loans import Lending, LoanLists
from persist.maintenance.expiry import Silence, forget_outlived

log = logging.getLogger("persist.gc")

SCAN_LIMIT = 1_000
HOUR_MS = 3_600_000
DELETE_BATCH = 500  # blobs that one request deletes
ENTRIES_PER_STEP = 10  # log entries that cost as much as one step of finalising a dropped shard
ENTRIES_MAX = 10_000  # log entries of one epoch, up to the first rollup beyond them
BACKGROUND_ENTRIES_MAX = 1_000
DELETE_THREADS = 8
STAGED_MS_MAX = 12 * HOUR_MS  # how long a blob may wait for its commit, or a loan for its clone; sweeps wait longer
UNTAKEN_MS = STAGED_MS_MAX + HOUR_MS  # the age at which a loan without a clone is ended


@dataclass(frozen=True, slots=True)
class GcReport:
    """The result of one run. `done`: another run would find nothing to do for now."""

    deleted: int = 0
    truncated: int = 0
    done: bool = True


class Collector:
    """Collects shards of a location. There is no state between runs; any number may run at the same time.

    `count` increments counters: `count(gc_runs=1)`. `in_background`: beside the commits of an embedded program. Then
    epochs are short, one thread deletes, and no rollups are made, because committers make enough of them.
    """

    def __init__(
        self,
        location: Location,
        *,
        count: Callable[..., None] = lambda **counts: None,
        committer_of: CommitterOf | None = None,
        in_background: bool = False,
    ) -> None:
        self.count = count
        self._location = location
        self._committer_of = committer_of or location.machine
        self._versions = location.versions
        self._lists = LoanLists(location.blob)
        self._lending = Lending(location, self._committer_of, self._lists, UNTAKEN_MS)
        self._in_background = in_background
        self._entries_max = BACKGROUND_ENTRIES_MAX if in_background else ENTRIES_MAX
        self._rollup_after = ROLLUP_LEAST
        self._silence = Silence(location, StoreClock(location.blob, location.clock, location.ids))

    def run(self, name: str) -> GcReport:
        """Run one epoch of a shard, and finalise it if it was dropped. Commits nothing if there is nothing to do.

        Raises the errors of the stores (a retry is safe), and Corruption if a rollup that the log needs is missing.
        """
        machine = self._committer_of(name)
        state = machine.refresh()
        if state.is_closed and not state.tombstone:
            state = self._finalise(machine, state)
        with translated():
            entries = self._location.consensus.scan(name, 1, 1)
        if not entries:
            raise Corruption(f"the log of shard {name!r} has vanished from the consensus store")
        first = SeqNo(entries[0].seqno)
        if state.tombstone:
            report = self._clear_tombstone(machine, state, first)
            self._lending.run(machine)
            return report
        try:
            state = self._silence.forget(machine, state)
            if self._wants_rollup(state):
                state = self._roll_up(machine, state)
        except Unavailable as error:  # a full disk: nothing can be written until something is deleted
            if self._horizon(state, first) == first:
                raise
            log.warning("gc continues without writing", extra={"shard": name, "why": str(error)})
        report = self._epoch(machine, state, first, self._horizon(state, first))
        self._lending.run(machine)
        self.count(gc_runs=1)
        return report

    # --- one epoch

    def _epoch(self, machine: Committer, state: State, first: SeqNo, horizon: SeqNo) -> GcReport:
        deleted = truncated = 0
        if first < horizon:
            if not self._has_rollup(machine, state, first, horizon):
                return GcReport(done=False)
            deleted = self._delete_gone(machine, first, horizon)
            self._location.identity.confirm()
            machine.refresh()  # raises HistoryLost if the log was replaced
            with translated():
                truncated = self._location.consensus.truncate(machine.name, int(horizon))
            self.count(gc_entries_truncated=truncated)
        removes = min([*state.rollups, *state.long_diffs], default=horizon) < horizon
        if removes:
            machine.apply(c.RemoveRollups(horizon))
        if deleted or truncated:
            log.info("gc", extra={"shard": machine.name, "deleted": deleted, "truncated": truncated})
        return GcReport(deleted, truncated, done=not truncated and not removes)

    def _horizon(self, state: State, first: SeqNo) -> SeqNo:
        """The newest rollup that readers' holds allow, at most `_entries_max` entries after `first`; else `first`.

        If all of them are further on, the nearest is taken, so that every epoch makes progress.
        """
        allowed = sorted(seqno for seqno in state.rollups if first < seqno <= state.seqno_since)
        near = [seqno for seqno in allowed if seqno <= first + self._entries_max]
        return near[-1] if near else allowed[0] if allowed else first

    def _has_rollup(self, machine: Committer, state: State, first: SeqNo, seqno: SeqNo) -> bool:
        """Whether the rollup at which the log will begin exists; False if another collector was faster.

        It is read and compared with the State that the log yields from its present first rollup. Raises Corruption if
        they differ, or if the State names a missing rollup: then the log must not be truncated.
        """
        key = state.rollups[seqno].key
        if check_replayed(self._versions, state, first, seqno):
            return True
        if seqno in machine.refresh().rollups:
            raise Corruption(f"rollup {key} of shard {state.name!r} is missing: its log is not truncated")
        return False

    def _delete_gone(self, machine: Committer, first: SeqNo, last: SeqNo) -> int:
        """Delete the blobs that the state diffs in `[first, last]` remove; returns the number of blobs.

        The parts of bundles are deleted before the bundles, and the blobs of returned loans before their lists. Lent
        blobs, and blobs of other shards, are kept.
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

        def plain_blobs() -> Iterator[str]:
            for key in self._unnamed(machine, gone()):
                if is_bundle_key(key):
                    bundles.append(key)
                elif is_loan_key(key):
                    lists.append(key)
                else:
                    yield key

        deleted = self._delete(plain_blobs())
        if bundles:
            parts = self._listed(machine, [key for key in bundles if key not in emptied])
            deleted += self._delete(self._unnamed(machine, parts))
            deleted += self._delete(iter(bundles))
        return deleted + self._delete_returned(machine, lists, last)

    def _delete_returned(self, machine: Committer, lists: Sequence[str], last: SeqNo) -> int:
        """Delete the blobs of returned loans that no version after `last` needs, then their lists; returns the number.

        A missing list was completed before. A damaged list and its blobs are left to the orphan sweep, and so are all
        lists if a bundle that is needed cannot be read.
        """
        deleted = 0
        for list_key in lists:
            try:
                keys = self._lists.keys(list_key)
                needed = self._needed_after(machine, last)
            except BlobNotFound:
                continue
            except Corruption as error:
                fields = {"shard": machine.name, "blob": list_key, "why": str(error)}
                log.error("the blobs of a returned loan are not deleted", extra=fields)
                continue
            unneeded = (key for key in keys if compact(key) not in needed)
            deleted += self._delete(self._unnamed(machine, unneeded)) + self._delete(iter([list_key]))
        return deleted

    def _needed_after(self, machine: Committer, last: SeqNo) -> frozenset[bytes]:
        """The ids of the blobs that a version after `last` names, including the parts of bundles."""
        state = machine.refresh()
        named = set(state.blob_keys())
        gone = {key for change in self._versions.whole_diffs(machine.name, last) for key in change.gone}
        own = [key for key in named | gone if not is_foreign(key, state.shard_id)]
        for bundle in filter(is_bundle_key, sorted(own)):
            try:
                own += keys_in(self._location.blob, bundle)
            except BlobNotFound as error:
                if machine.refresh().trace.names(bundle):
                    raise Corruption(f"bundle {bundle} of shard {machine.name!r} is missing") from error
        return frozenset(map(compact, own))

    def _unnamed(self, machine: Committer, keys: Iterable[str]) -> Iterator[str]:
        """The removed `keys` without those that the State names (which is an error), that are lent, or borrowed.

        The State is read first and may change meanwhile: a removed key never comes back, and only blobs that a version
        after the horizon names can be lent later.
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
        """The parts of these bundles. A missing bundle was collected before, after its parts.

        The parts of a damaged bundle are left to the orphan sweep.
        """
        for bundle in bundles:
            try:
                parts = keys_in(self._location.blob, bundle)
            except BlobNotFound:
                continue
            except Corruption as error:
                log.error("damaged bundle", extra={"shard": machine.name, "blob": bundle, "why": str(error)})
                continue
            yield from parts

    def _delete(self, keys: Iterator[str]) -> int:
        """Delete blobs, several batches in parallel, and return their number when all are deleted."""
        threads, deleted = 1 if self._in_background else DELETE_THREADS, 0
        batches = iter(lambda: list(islice(keys, DELETE_BATCH)), [])
        with ThreadPoolExecutor(threads, thread_name_prefix="persist-gc") as pool:
            while wave := list(islice(batches, threads)):  # a single batch needs no thread
                deleted += sum((map if len(wave) == 1 else pool.map)(self._delete_batch, wave))
        return deleted

    def _delete_batch(self, keys: Sequence[str]) -> int:
        self._location.identity.confirm()
        with translated():
            self._location.blob.delete(keys)
        self.count(gc_blobs_deleted=len(keys))
        return len(keys)

    # --- rollups

    def _wants_rollup(self, state: State) -> bool:
        """Whether a new rollup would allow more deletions: blobs left the State since the newest one.

        A single rollup does not count: every epoch removes one, and an idle shard must come to rest.
        """
        newest = max(state.rollups)
        if state.seqno_since <= newest or self._in_background:
            return False
        if state.seqno - newest >= self._rollup_after:
            return True
        recent = self._versions.diffs(state.name, SeqNo(newest + 1), self._rollup_after)
        gone = [key for change in recent for key in self._versions.whole(state.name, change).gone]
        return sum(map(is_rollup_key, gone)) > 1 or not all(map(is_rollup_key, gone))

    def _roll_up(self, machine: Committer, state: State) -> State:
        if rolled_up(self._versions, state, machine.apply):
            self.count(gc_rollups_made=1)
        return machine.state()

    # --- the end of a shard

    def _finalise(self, machine: Committer, state: State) -> State:
        """The State after a bounded number of finalising steps, or of the next incarnation if that has begun."""
        # Probes the store's clock now: with an older time, tokens minted since then would seem to be from the future.
        finalise = c.Finalise(shard=state.shard_id, store_ms=probed(self._location.blob, self._location.ids))
        for _ in range(max(1, self._entries_max // ENTRIES_PER_STEP)):
            try:
                result = machine.apply(finalise)
            except UnknownShard:
                return machine.refresh()
            assert isinstance(result, c.Finalised)
            if result.done:
                self.count(shards_finalised=1)
                break
        return machine.state()

    def _clear_tombstone(self, machine: Committer, state: State, first: SeqNo) -> GcReport:
        """Reduce a tombstone to one rollup and the log from it on, and delete all other blobs. No new ones appear.

        Its blobs are listed once, before its log is truncated, so a truncated tombstone costs no further listings. The
        next incarnation may begin meanwhile; then ordinary epochs collect the rest.
        """
        rollup = self._last_rollup(state)
        if rollup is None or state.seqno - rollup >= self._rollup_after:  # ending loans extend its log
            state = self._roll_up(machine, state)
            rollup = max(state.rollups)
            if not state.tombstone:
                return GcReport(done=False)
        deleted = truncated = 0
        if first < rollup:
            if not self._has_rollup(machine, state, first, rollup):
                return GcReport(done=False)
            with translated():
                listing = self._location.blob.list(family_of(state.shard_id))
                unneeded = self._unneeded((stat.key for stat in listing), state)
                deleted = self._delete(self._lists.not_held(machine, state, unneeded))
                truncated = self._location.consensus.truncate(machine.name, int(rollup))
            self.count(gc_entries_truncated=truncated)
        if len(state.rollups) > 1 or min(state.long_diffs, default=rollup) < rollup:
            machine.apply(c.RemoveRollups(rollup))
            if not machine.refresh().tombstone:
                return GcReport(deleted, truncated, done=False)
        return GcReport(deleted + self._delete_removed(machine, state), truncated)

    def _delete_removed(self, machine: Committer, tombstone: State) -> int:
        """Delete the remaining blobs that the live state diffs remove, rollups of a tombstone, and then lists."""
        state = machine.refresh()
        named = frozenset(state.blob_keys())
        gone = (key for change in self._versions.whole_diffs(machine.name, SeqNo(0)) for key in change.gone)
        own = (key for key in gone if key not in named and not is_foreign(key, state.shard_id))
        with translated():
            existing = [
                key for key in self._lists.not_held(machine, state, own) if self._location.blob.stat(key) is not None
            ]
        deleted = self._delete(key for key in existing if not is_loan_key(key))
        return deleted + self._delete_returned(machine, list(filter(is_loan_key, existing)), tombstone.seqno)

    def _unneeded(self, keys: Iterator[str], state: State) -> Iterator[str]:
        """The blobs that a tombstone does not need, without those of the next incarnation.

        Another process may be about to commit an unnamed rollup, long state diff or list. So these are deleted only if
        they left the State; the orphan sweep deletes the others.
        """
        named = frozenset(state.blob_keys())
        gone = {key for change in self._versions.whole_diffs(state.name, SeqNo(0)) for key in change.gone}
        for key in keys:
            is_ended = incarnation_of(state.name, shard_of(key)) <= state.incarnation
            may_be_committed = is_rollup_key(key) or is_diff_key(key) or is_loan_key(key)
            if is_ended and key not in named and (key in gone or not may_be_committed):
                yield key

    def _last_rollup(self, state: State) -> SeqNo | None:
        """The seqno of the newest rollup if it contains the tombstone, else None."""
        newest = max(state.rollups)
        if any(change.tombstone is not None for change in self._versions.whole_diffs(state.name, newest)):
            return None
        return newest


def collect_in_background(location: Location) -> Callable[[str], object]:
    """The maintenance of a shard by an embedded program: forget expired history and tags, then collect."""
    collector = Collector(location, in_background=True)

    def collect(name: str) -> None:
        try:
            forget_outlived(location.machine(name), location.clock)
        except PersistError as error:  # the clocks disagree now: retried later
            location.sight.storms.corrupted(name, error, "forgetting expired history")
        collector.run(name)

    return collect
