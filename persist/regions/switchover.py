"""Planned switchover to a copy without loss, and the demotion of an old home to a copy."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from blob import Blob
from persist.commit.location import Location
from persist.commit.location_identity import COPY_KEY, ID_KEY, LOG_KEY, Identity, epoch_key, epochs_in
from persist.commit.state_loader import Versions
from persist.copies.recovery import (
    Recovered,
    RecoveryRequest,
    fence,
    find_ended_recovery,
    mark_recovery,
    plan,
    publish_heads,
    read_mark,
    revoke_mark,
    run_recovery,
    write_epoch,
)
from persist.copies.shard_facts import first_names
from persist.core import commands as c
from persist.core.blob_keys import CATALOGUES, JOURNALS, belongs_to, is_rollup_key, shard_of
from persist.core.errors import Conflict, Corruption, InvalidUsage, Unavailable
from persist.core.ids import LocationBinding
from persist.formats.state_frames import decode_binding, encode_binding
from persist.formats.store_errors import translated
from persist.regions.divergence import find_diverged
from persist.regions.failover import PREFIX, Promotion, check_copy, promotion_to, record_promotion
from persist.regions.replication import DELETED_AT_ONCE, Replicator

# Planned switchover: a copy becomes home, and nothing is lost.
#
# The order of steps makes it safe to kill and repeat: the mark in the new consensus store, which names the epoch; the
# epoch in home's blob store, which ends the creation of shards there; a last commit of every shard, which hands it
# over, so that nothing follows it in its log; publication of all commits up to that one in home's blob store;
# replication to the copy; then the logs begin there. Until the new stores are bound the switchover can be undone.

AT_ONCE = 8  # shards that are handed over concurrently
ARRIVES_S = 600.0  # the longest wait for the copy
POLL_S = 1.0

ReportStep = Callable[[str], object]  # called with a sentence for each step


@dataclass(frozen=True, slots=True)
class Switch:
    """From `home` to `copy`, whose consensus store is empty; `region` becomes home of region `of`.

    `replicator` updates the copy. None: the store replicates itself. `least`: the new epoch is above it.
    """

    home: Location
    copy: Location
    region: str
    of: str
    replicator: Replicator | None
    least: int = 0

    def run(self, report: ReportStep = lambda step: None, sleep: Callable[[float], object] = time.sleep) -> Recovered:
        """Switch over. Repeating it after an error continues it.

        Raises InvalidUsage (the stores do not match; nothing was changed), Conflict (another home takes over),
        Corruption (a shard is incomplete), Unavailable (a store does not answer, or the copy was not updated in time).
        If it fails, and is not repeated, `undo` reopens home.
        """
        if (recovered := find_ended_recovery(self.copy)) is not None:
            return recovered
        self._check()
        mark = read_mark(self.copy.consensus, self.copy.settings.build)
        if mark is not None and mark.has_begun:  # by an earlier run, after everything had arrived
            report(f"continuing: the copy becomes home of epoch {mark.binding.epoch}")
            binding = mark.binding
        else:
            binding = self._hand_over_all(report, sleep)
        note = partial(record_promotion, self.copy, self.region, self.of)
        return run_recovery(self.copy, RecoveryRequest(handed_over=binding, least=self.least, note=note))

    def _hand_over_all(self, report: ReportStep, sleep: Callable[[float], object]) -> LocationBinding:
        """Hand over every shard at home, and wait until the copy is complete; returns the mark of the new epoch."""
        self._check_last()
        epoch = plan(self.copy, RecoveryRequest(fenced=(self.home.blob,), least=self.least)).epoch
        report("updating the copy, while home continues")
        self._replicate()
        binding = mark_recovery(self.copy, epoch)
        fence(self.home.blob, binding)
        report(f"home stops creating shards, and hands each over to epoch {binding.epoch}")
        owner = as_owner(self.home, binding)
        names = list(owner.all_names())
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="persist-switch") as pool:
            list(pool.map(lambda name: _hand_over(owner, name, binding.epoch), names))
        publish_heads(owner, names)
        report(f"{len(names)} shards are handed over; waiting until the copy has the last writes")
        self._wait_until_arrived(frozenset(names), binding.epoch, sleep)
        return binding

    def undo(self, report: ReportStep = lambda step: None) -> int:
        """Reopen home, unless the copy has become home; returns the number of shards taken back. Safe to repeat.

        Home continues under a new epoch, above that of the switchover, which is written to the copy as well. So no
        epoch is ever removed or ambiguous, and what was undone cannot become a home.
        Raises InvalidUsage: the stores do not match. Conflict: the copy, or another one, has become home. Unavailable.
        """
        self._check()
        build = self.copy.settings.build
        mark = read_mark(self.copy.consensus, build)
        if mark is None:
            raise InvalidUsage(f"no switchover to {self.copy.consensus.url} was begun: there is nothing to undo")
        ending, is_behind = mark.binding.epoch, self.home.identity.check().epoch <= mark.binding.epoch
        if is_behind and not mark.is_revoked:
            write_epoch(self.home.blob, mark.binding)  # or the switchover was killed before it
        with translated():
            switched = decode_binding(self.home.blob.get(epoch_key(ending)), build)
        pair = hashlib.sha256(f"{switched.pair}/undone".encode()).hexdigest()[:32]  # the same if undo is repeated
        successor = LocationBinding(switched.location_id, ending + 1, pair)
        if is_behind:
            _check_epochs(self.home.blob, ending, successor)
        revoke_mark(self.copy.consensus, mark, build)
        report(f"the copy does not become home; home continues at epoch {successor.epoch}, and takes its shards back")
        for binding in (switched, successor):
            write_epoch(self.copy.blob, binding)
        if is_behind:
            _raise_to(self.home, successor)
        count = 0
        for name in list(self.home.all_names()):
            machine = self.home.new_machine(name)
            if machine.refresh().handed_over == ending:
                machine.apply(c.HandOver(ending, 0))
                count += 1
        return count

    def _check(self) -> None:
        """Check that the copy is one of this home, and home can hand over."""
        bound = self.home.identity.check()
        if check_copy(self.copy).decode("ascii", "replace") != bound.location_id:
            raise InvalidUsage(f"{self.copy.blob.url} is not a copy of {self.home.blob.url}")
        if self.home.blob.url == self.copy.blob.url:
            raise InvalidUsage("a switchover needs two blob stores: home's, and the copy")

    def _check_last(self) -> None:
        """Check that no other home has taken over, and no switchover to another copy is in progress."""
        epoch = self.home.identity.check().epoch
        mark = read_mark(self.copy.consensus, self.copy.settings.build)
        if mark is not None and not mark.is_revoked:
            epoch = max(epoch, mark.binding.epoch)
        with translated():
            last = epochs_in(self.home.blob)[-1]
        if last > epoch:
            raise Conflict(
                f"{self.home.blob.url} is at epoch {last}: another home has taken over, or a switchover to another "
                "copy (or its --undo) is incomplete: repeat that one first"
            )

    def _replicate(self) -> None:
        if self.replicator is not None:
            self.replicator.round(whole=True, deletes=False)

    def _wait_until_arrived(self, names: frozenset[str], epoch: int, sleep: Callable[[float], object]) -> None:
        """Wait until the copy has every shard as it was handed over."""
        lacking = names
        for _ in range(int(ARRIVES_S / POLL_S)):
            self._replicate()
            preview = plan(self.copy)
            lacking = names - {shard.name for shard in preview.shards if shard.is_whole and shard.handed_over == epoch}
            if not lacking:
                return
            sleep(POLL_S)
        raise Unavailable(
            f"the copy was not complete within {ARRIVES_S:.0f} s after home had handed over "
            f"({first_names(sorted(lacking))}): repeat the switchover, or undo it by --undo"
        )


class _HandOverIdentity(Identity):
    """The identity of the one process that still commits at home, under the binding that takes over."""

    def __init__(self, location: Location, binding: LocationBinding) -> None:
        build = location.settings.build
        super().__init__(location.blob, location.consensus, location.ids, location.clock, build)
        self._successor = binding

    def check_writable(self) -> None:
        own, key = self.check().epoch, epoch_key(self._successor.epoch)
        with translated():
            last = epochs_in(self._blob)[-1]
            if last == own:  # home was reopened
                return
            if last != self._successor.epoch or self._blob.get(key) != encode_binding(self._successor):
                raise Conflict(f"another consensus store has taken over {self._blob.url}, or the switchover was undone")

    def confirm(self) -> None:
        self.check_writable()


def _check_epochs(blob: Blob, ending: int, successor: LocationBinding) -> None:
    """Check that home's blob store has no later epoch than that of the switchover, except its own successor."""
    with translated():
        last = epochs_in(blob)[-1]
        is_own = last == successor.epoch and blob.get(epoch_key(last)) == encode_binding(successor)
    if last > ending and not is_own:
        raise Conflict(f"another consensus store has taken over {blob.url} at epoch {last}: home cannot continue")


def _raise_to(home: Location, binding: LocationBinding) -> None:
    """Raise home to this epoch, in both stores."""
    write_epoch(home.blob, binding)
    with translated():
        entry = home.consensus.head(LOG_KEY)
        assert entry is not None
        home.consensus.compare_and_set(LOG_KEY, entry.seqno + 1, encode_binding(binding))
    home.identity.check_home()
    if home.identity.check() != binding:
        raise Conflict(f"another process raises the epoch of {home.blob.url} too; check, then retry")


def as_owner(home: Location, binding: LocationBinding) -> Location:
    """Home with the identity that may hand over. It is the same location, and is closed as such."""
    identity = _HandOverIdentity(home, binding)
    home.identity = identity
    home.versions = Versions(home.blob, home.consensus, home.ids, home.settings.build, identity)
    return home


def _hand_over(home: Location, name: str, epoch: int) -> None:
    """Commit the handover of the shard at home, and write its State as a rollup, so that the copy needs only that."""
    machine = home.new_machine(name)  # a cached one commits with another identity
    machine.apply(c.HandOver(0, epoch))
    home.versions.write_rollup(machine.refresh())


# Demotion: an old home becomes a copy of the new one. It ends, what only it has is deleted, and it is marked as a copy.
#
# Then `persist region replicate` copies what the new home has, and deletes what it does not have.


def demote(old: Location, new: Blob, promotion: Promotion, *, drop_diverged: bool = False) -> int:
    """Make the blob store of the old home a copy of the new one's; returns the number of deleted blobs.

    The old home is ended first, and then checked. Safe to repeat. `drop_diverged`: also if it has updates that the new
    home lacks, which are lost. Raises Conflict (it has such updates, or has taken over itself since), InvalidUsage
    (they are homes of two locations, or both are the new home: nothing was written), Unavailable.
    """
    with translated():
        if old.blob.get(ID_KEY) != new.get(ID_KEY):
            raise InvalidUsage(f"{old.blob.url} has another location than {new.url}")
        if new.stat(COPY_KEY) is not None:
            raise InvalidUsage(f"{new.url} is a copy itself: give the blob store of the new home")
        _check_demoted_epochs(old.blob, new)
    _check_not_itself(old, new, promotion)
    with translated():  # the epochs of the new home fence the old one
        for epoch in sorted(set(epochs_in(new)) - set(epochs_in(old.blob))):
            old.blob.put(epoch_key(epoch), new.get(epoch_key(epoch)))
    if not _is_marked(old.blob):
        if not drop_diverged:
            _check_nothing_alone(old, promotion)
        _end_home(old, new)
        if not drop_diverged:  # again, including what came until it had ended
            _check_nothing_alone(old, promotion)
    with translated():
        if not _is_marked(old.blob):
            old.blob.put(COPY_KEY, new.get(ID_KEY))
        keys_of_new = {stat.key for prefix in ("s", PREFIX) for stat in new.list(prefix)}
        keys_to_delete = [stat.key for prefix in (JOURNALS, CATALOGUES) for stat in old.blob.list(prefix)]
        keys_to_delete += [
            stat.key for stat in old.blob.list("s") if _is_own_rollup(stat.key) and stat.key not in keys_of_new
        ]
        keys_to_delete += [stat.key for stat in old.blob.list(PREFIX) if stat.key not in keys_of_new]
        for start in range(0, len(keys_to_delete), DELETED_AT_ONCE):
            old.blob.delete(keys_to_delete[start : start + DELETED_AT_ONCE])
    return len(keys_to_delete)


def _check_nothing_alone(old: Location, promotion: Promotion) -> None:
    names = [shard.name for shard in find_diverged(old, promotion)]
    if names:
        raise Conflict(
            f"the old home has updates of {len(names)} shards that the new one lacks: "
            f"{first_names(names)}. `persist region salvage` writes them to files; then use "
            "--drop-diverged. The old home is read-only from now on"
        )


def _end_home(old: Location, new: Blob) -> None:
    """Stop the old home from acknowledging anything, so that a later check finds all that it has.

    Processes see new epochs with a delay. So each log gets a last commit, after which it takes no other.
    """
    with translated():
        binding = decode_binding(new.get(epoch_key(epochs_in(new)[-1])), old.settings.build)
    owner = as_owner(old, binding)
    for name in list(owner.all_names()):
        with suppress(Corruption):  # it cannot be loaded, so that nothing commits to it
            machine = owner.new_machine(name)  # a cached one commits with another identity
            if not machine.refresh().handed_over:
                machine.apply(c.HandOver(0, binding.epoch))


def _check_demoted_epochs(old: Blob, new: Blob) -> None:
    """Check that the old home has no epoch that the new one lacks."""
    known, own = epochs_in(new), epochs_in(old)
    if own and own[-1] > known[-1]:
        raise Conflict(f"{old.url} has epoch {own[-1]}, which {new.url} does not have: it has taken over since")
    for epoch in set(known) & set(own):
        if old.get(epoch_key(epoch)) != new.get(epoch_key(epoch)):
            raise Conflict(f"{old.url} has an epoch {epoch} of its own: it has taken over as well")


def _check_not_itself(old: Location, new: Blob, promotion: Promotion) -> None:
    """Check that the old home is not the new one under another URL or with another consensus store.

    The store with the record of the promotion is its home, or a copy of it, which has a mark.
    """
    epoch = old.identity.check().epoch
    with translated():
        last = epochs_in(new)[-1]
        is_same = old.blob.url == new.url or epoch >= last
        if not is_same and not _is_marked(old.blob):
            is_same = promotion_to(old.blob, promotion.epoch) == replace(promotion, earlier=())
    if is_same:
        raise InvalidUsage(
            f"{old.blob.url} is the new home itself, of epoch {last}: give the old home, and the blob store of the new "
            "one as --of"
        )


def _is_marked(blob: Blob) -> bool:
    with translated():
        return blob.stat(COPY_KEY) is not None


def _is_own_rollup(key: str) -> bool:
    return belongs_to(key, shard_of(key)) and is_rollup_key(key)
