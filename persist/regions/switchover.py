"""Planned switchover to a copy without loss, and the demotion of an old home to a copy."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

from blob import Blob
from persist.commit.location import Location
from persist.commit.location_identity import COPY_KEY, ID_KEY, LOG_KEY, Identity, epoch_key, epochs_in
from persist.commit.state_loader import Versions
from persist.copies.recovery import (
    Recovered,
    RecoveryRequest,
    begin_anew,
    ended,
    fence,
    hold_epoch,
    mark_of,
    marked,
    plan,
    publish_heads,
    take_back,
)
from persist.core import commands as c
from persist.core.blob_keys import CATALOGUES, JOURNALS, belongs_to, is_rollup_key, shard_of
from persist.core.errors import Conflict, Corruption, InvalidUsage, Unavailable
from persist.core.ids import LocationBinding
from persist.formats.state_frames import decode_binding, encode_binding
from persist.formats.store_errors import translated
from persist.regions.divergence import diverged
from persist.regions.failover import PREFIX, Note, Promotion, check_copy, promotion_to
from persist.regions.replication import DELETED_AT_ONCE, Replicator

# A planned switch: a copy becomes home, and nothing is lost.
#
# The order makes it safe to be killed anywhere, and to be repeated: the mark in the new consensus store, which names
# the epoch; the epoch in home's blob store, which ends the making of shards there; a last commit of every shard, which
# hands it over, so that nothing comes after it in its log; what was committed until then, and that commit, in home's
# blob store; all of it in the copy; then the logs begin anew there. Until the new stores are bound it can be undone.


AT_ONCE = 8  # shards that are handed over at a time
NAMED_MAX = 5  # shards that one message names
ARRIVES_S = 600.0  # for so long the copy may take to have all
LOOK_S = 1.0

Told = Callable[[str], object]  # a sentence for each step


@dataclass(frozen=True, slots=True)
class Switch:
    """From `home` to `copy`, whose consensus store is empty; `region` becomes home of region `of`.

    `replicator` brings the copy up to date. None: the store does that itself. `least`: the new epoch is above it.
    """

    home: Location
    copy: Location
    region: str
    of: str
    replicator: Replicator | None
    least: int = 0

    def run(self, told: Told = lambda step: None, sleep: Callable[[float], object] = time.sleep) -> Recovered:
        """Switch; what went on. Repeating it after an error goes on.

        Raises InvalidUsage (the stores do not fit; nothing was changed), Conflict (another one takes over), Corruption
        (something of a shard is missing), Unavailable (a store does not answer, or the copy did not get all in time).
        Where it fails, and is not to be repeated, `undo` lets home go on.
        """
        if (done := ended(self.copy)) is not None:
            return done
        self._check()
        mark = mark_of(self.copy.consensus, self.copy.settings.build)
        if mark is not None and mark.has_begun:  # by an earlier run, which has seen all arrive
            told(f"the copy goes on becoming home of epoch {mark.binding.epoch}")
            binding = mark.binding
        else:
            binding = self._handed_over(told, sleep)
        return begin_anew(
            self.copy,
            RecoveryRequest(handed_over=binding, least=self.least, note=Note(self.copy, self.region, self.of)),
        )

    def _handed_over(self, told: Told, sleep: Callable[[float], object]) -> LocationBinding:
        """Every shard ends at home, and the copy has all of it; the mark to whose epoch they are handed over."""
        self._check_last()
        epoch = plan(self.copy, fenced=(self.home.blob,), least=self.least).epoch
        told("the copy is brought up to date, while home goes on")
        self._replicate()
        binding = marked(self.copy, epoch)
        fence(self.home.blob, binding)
        told(f"home ends: no shard is made there any more, and each is handed over to epoch {binding.epoch}")
        ending = as_owner(self.home, binding)
        names = list(ending.all_names())
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="persist-switch") as pool:
            list(pool.map(lambda name: _hand_over(ending, name, binding.epoch), names))
        publish_heads(ending, names)
        told(f"{len(names)} shards are handed over; the copy gets what was written last")
        self._arrived(frozenset(names), binding.epoch, sleep)
        return binding

    def undo(self, told: Told = lambda step: None) -> int:
        """Let home go on, where the copy has not become home; the shards that were taken back. Repeating it is safe.

        Home goes on under a new epoch, above that of the switch, and the copy gets it as well. So no epoch is ever
        taken away, none means two things, and nobody makes a home of what was taken back.
        Raises InvalidUsage: the stores do not fit. Conflict: the copy, or another one, has become home. Unavailable.
        """
        self._check()
        build = self.copy.settings.build
        mark = mark_of(self.copy.consensus, build)
        if mark is None:
            raise InvalidUsage(f"no switch to {self.copy.consensus.url} was begun: there is nothing to undo")
        ending, is_behind = mark.binding.epoch, self.home.identity.check().epoch <= mark.binding.epoch
        if is_behind and not mark.is_taken_back:
            hold_epoch(self.home.blob, mark.binding)  # or the switch was killed before it
        with translated():
            switched = decode_binding(self.home.blob.get(epoch_key(ending)), build)
        goes_on = LocationBinding(switched.location_id, ending + 1, _pair_after(switched))
        if is_behind:
            _check_epochs(self.home.blob, ending, goes_on)
        take_back(self.copy.consensus, mark, build)
        told(f"the copy is no home any more; home goes on at epoch {goes_on.epoch}, and takes its shards back")
        for binding in (switched, goes_on):
            hold_epoch(self.copy.blob, binding)
        if is_behind:
            _raise_to(self.home, goes_on)
        taken = 0
        for name in list(self.home.all_names()):
            machine = self.home.new_machine(name)
            if machine.refresh().handed_over == ending:
                machine.apply(c.HandOver(ending, 0))
                taken += 1
        return taken

    def _check(self) -> None:
        """That the copy is one of this home, and home can hand over."""
        bound = self.home.identity.check()
        if check_copy(self.copy).decode("ascii", "replace") != bound.location_id:
            raise InvalidUsage(f"{self.copy.blob.url} is no copy of {self.home.blob.url}")
        if self.home.blob.url == self.copy.blob.url:
            raise InvalidUsage("a switch needs two blob stores: home's, and the copy")

    def _check_last(self) -> None:
        """That no other home has taken over, and no switch to another copy is under way."""
        epoch = self.home.identity.check().epoch
        mark = mark_of(self.copy.consensus, self.copy.settings.build)
        if mark is not None and not mark.is_taken_back:
            epoch = max(epoch, mark.binding.epoch)
        with translated():
            last = epochs_in(self.home.blob)[-1]
        if last > epoch:
            raise Conflict(
                f"{self.home.blob.url} is at epoch {last}: another home has taken over, or a switch to another copy "
                "(or its --undo) has not ended: repeat that one first"
            )

    def _replicate(self) -> None:
        if self.replicator is not None:
            self.replicator.round(whole=True, deletes=False)

    def _arrived(self, names: frozenset[str], epoch: int, sleep: Callable[[float], object]) -> None:
        """Wait until the copy has every shard as it was handed over."""
        lacking = names
        for _ in range(int(ARRIVES_S / LOOK_S)):
            self._replicate()
            found = plan(self.copy)
            lacking = names - {one.name for one in found.shards if one.is_whole and one.handed_over == epoch}
            if not lacking:
                return
            sleep(LOOK_S)
        raise Unavailable(
            f"in {ARRIVES_S:.0f} s the copy did not get all that home has handed over "
            f"({', '.join(sorted(lacking)[:NAMED_MAX])}): repeat the switch, or take it back by --undo"
        )


class _Owner(Identity):
    """That of who hands over: the one process that still commits at home, under the binding that takes over."""

    def __init__(self, location: Location, binding: LocationBinding) -> None:
        build = location.settings.build
        super().__init__(location.blob, location.consensus, location.ids, location.clock, build)
        self._taker = binding

    def check_writable(self) -> None:
        own, key = self.check().epoch, epoch_key(self._taker.epoch)
        with translated():
            last = epochs_in(self._blob)[-1]
            if last == own:  # home has taken itself back
                return
            if last != self._taker.epoch or self._blob.get(key) != encode_binding(self._taker):
                raise Conflict(f"another consensus store has taken over {self._blob.url}, or the switch was undone")

    def confirm(self) -> None:
        self.check_writable()


def _pair_after(switched: LocationBinding) -> str:
    """The pair under which home goes on after this one: always the same, so that an undo can be repeated."""
    return hashlib.sha256(f"{switched.pair}/undone".encode()).hexdigest()[:32]


def _check_epochs(blob: Blob, ending: int, goes_on: LocationBinding) -> None:
    """That home's blob store has no epoch beyond that of the switch, but for the one under which it goes on itself."""
    with translated():
        last = epochs_in(blob)[-1]
        is_own = last == goes_on.epoch and blob.get(epoch_key(last)) == encode_binding(goes_on)
    if last > ending and not is_own:
        raise Conflict(f"another consensus store has taken over {blob.url} at epoch {last}: home cannot go on")


def _raise_to(home: Location, binding: LocationBinding) -> None:
    """Home is at this epoch from now on, in both stores."""
    hold_epoch(home.blob, binding)
    with translated():
        entry = home.consensus.head(LOG_KEY)
        assert entry is not None
        home.consensus.compare_and_set(LOG_KEY, entry.seqno + 1, encode_binding(binding))
    home.identity.look()
    if home.identity.check() != binding:
        raise Conflict(f"another process raises the epoch of {home.blob.url} too; look, then retry")


def as_owner(home: Location, binding: LocationBinding) -> Location:
    """Home as who hands it over sees it. It is the same location, and is closed as that."""
    identity = _Owner(home, binding)
    home.identity = identity
    home.versions = Versions(home.blob, home.consensus, home.ids, home.settings.build, identity)
    return home


def _hand_over(home: Location, name: str, epoch: int) -> None:
    """The last commit of the shard at home, and its State as a rollup, so that the copy needs no more than that."""
    machine = home.new_machine(name)  # one of the cache commits as who does not hand over
    machine.apply(c.HandOver(0, epoch))
    home.versions.write_rollup(machine.refresh())


# An old home becomes a copy of the new one: it ends, what it alone has goes, and it is marked as a copy.
#
# Then `persist region replicate` brings what the new home has, and deletes what it does not have.


def demote(
    old: Location,
    new: Blob,
    promotion: Promotion,
    *,
    drop_diverged: bool = False,
) -> int:
    """Make the blob store of the old home a copy of the new one's; how many blobs were deleted.

    The old home ends first, and then it is looked what it has. Repeating it is safe. `drop_diverged`: also where the
    old home has something that the new one does not have, and that is lost by this. Raises Conflict (it has, or it has
    taken over itself since), InvalidUsage (they are homes of two locations, or both are the new home: nothing was
    written), Unavailable.
    """
    with translated():
        if old.blob.get(ID_KEY) != new.get(ID_KEY):
            raise InvalidUsage(f"{old.blob.url} is of another location than {new.url}")
        if new.stat(COPY_KEY) is not None:
            raise InvalidUsage(f"{new.url} is a copy itself: give the blob store of the new home")
        _check_demoted_epochs(old.blob, new)
    _check_not_itself(old, new, promotion)
    _fence(old.blob, new)
    if not _is_marked(old.blob):
        if not drop_diverged:
            _check_nothing_alone(old, promotion)
        _end(old, new)
        if not drop_diverged:  # what came until it had ended
            _check_nothing_alone(old, promotion)
    with translated():
        if not _is_marked(old.blob):
            old.blob.put(COPY_KEY, new.get(ID_KEY))
        there = {stat.key for prefix in ("s", PREFIX) for stat in new.list(prefix)}
        gone = [stat.key for prefix in (JOURNALS, CATALOGUES) for stat in old.blob.list(prefix)]
        gone += [stat.key for stat in old.blob.list("s") if _is_own_rollup(stat.key) and stat.key not in there]
        gone += [stat.key for stat in old.blob.list(PREFIX) if stat.key not in there]
        for start in range(0, len(gone), DELETED_AT_ONCE):
            old.blob.delete(gone[start : start + DELETED_AT_ONCE])
    return len(gone)


def _check_nothing_alone(old: Location, promotion: Promotion) -> None:
    names = [found.name for found in diverged(old, promotion)]
    if names:
        more = ", …" if len(names) > NAMED_MAX else ""
        raise Conflict(
            f"the old home has something of {len(names)} shards that the new one does not have: "
            f"{', '.join(names[:NAMED_MAX])}{more}. `persist region salvage` writes it to files; then --drop-diverged. "
            "It only reads from now on"
        )


def _end(old: Location, new: Blob) -> None:
    """Let nothing be acknowledged by the old home from now on, so that what is looked for after it is all there is.

    Processes see the new epochs some time after they are there. So each log gets a last commit, after which it takes
    no other.
    """
    with translated():
        binding = decode_binding(new.get(epoch_key(epochs_in(new)[-1])), old.settings.build)
    ending = as_owner(old, binding)
    for name in list(ending.all_names()):
        with suppress(Corruption):  # nobody can load it, so nobody commits to it; whoever looks is told
            machine = ending.new_machine(name)  # one of the cache commits as who does not hand over
            if not machine.refresh().handed_over:
                machine.apply(c.HandOver(0, binding.epoch))


def _check_demoted_epochs(old: Blob, new: Blob) -> None:
    """That the old home has no epoch of its own, which the new one does not have."""
    known, own = epochs_in(new), epochs_in(old)
    if own and own[-1] > known[-1]:
        raise Conflict(f"{old.url} has an epoch {own[-1]}, which {new.url} does not have: it has taken over since")
    for epoch in set(known) & set(own):
        if old.get(epoch_key(epoch)) != new.get(epoch_key(epoch)):
            raise Conflict(f"{old.url} has an epoch {epoch} of its own: it has taken over as well")


def _check_not_itself(old: Location, new: Blob, promotion: Promotion) -> None:
    """That it is not the new home that is to end, by whichever URL and with whichever consensus store it is given.

    Where the promotion was noted is its home, or a copy of it. A copy has a mark.
    """
    epoch = old.identity.check().epoch
    with translated():
        last = epochs_in(new)[-1]
        is_one = old.blob.url == new.url or epoch >= last
        if not is_one and not _is_marked(old.blob):
            is_one = promotion_to(old.blob, promotion.epoch) == replace(promotion, earlier=())
    if is_one:
        raise InvalidUsage(
            f"{old.blob.url} is the new home itself, of epoch {last}: give the old home, and the blob store of the new "
            "one as --of"
        )


def _fence(old: Blob, new: Blob) -> None:
    """Bring the epochs of the new home to the old one, which ends it, if it has not ended yet."""
    with translated():
        for epoch in sorted(set(epochs_in(new)) - set(epochs_in(old))):
            old.put(epoch_key(epoch), new.get(epoch_key(epoch)))


def _is_marked(blob: Blob) -> bool:
    with translated():
        return blob.stat(COPY_KEY) is not None


def _is_own_rollup(key: str) -> bool:
    return belongs_to(key, shard_of(key)) and is_rollup_key(key)
