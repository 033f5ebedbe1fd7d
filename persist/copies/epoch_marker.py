"""The mark in a consensus store that is to be a location's, and shards whose logs are lost."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from blob import Blob, BlobExists
from consensus import HIDDEN, Consensus
from persist.commit.location_identity import LOG_KEY, epoch_key
from persist.commit.state_loader import FIRST
from persist.copies.shard_facts import Readable
from persist.core.blob_keys import belongs_to, is_rollup_key, rollup_seqno, shard_of
from persist.core.errors import Conflict, Corruption
from persist.core.ids import LocationBinding, family_of, shard_id_of
from persist.formats.state_frames import Build, decode_binding, encode_binding
from persist.formats.store_errors import translated

# The mark in a consensus store that is to be a location's: the binding that is to be, and what became of it.
#
# Its log has a mark at each odd seqno: the binding. The even one after it decides: the same binding once more, when the
# logs of shards begin, or one without a pair, where it was taken back. So of who goes on and who takes it back one
# wins, whenever either is killed; and what was taken back never becomes a home under that epoch.


MARK_KEY = HIDDEN + "recovery"


@dataclass(frozen=True, slots=True)
class Mark:
    """The newest entry of the mark's log. `binding.pair` is "" where it was taken back."""

    seqno: int
    binding: LocationBinding

    @property
    def is_taken_back(self) -> bool:
        """Whether nothing becomes of it. Another one may follow, of a later epoch."""
        return not self.binding.pair

    @property
    def has_begun(self) -> bool:
        """Whether logs of shards have begun, or are about to: it cannot be taken back any more."""
        return self.seqno % 2 == 0 and not self.is_taken_back


def mark_of(consensus: Consensus, build: Build) -> Mark | None:
    """The mark that is there. Raises Unavailable, Corruption."""
    with translated():
        entry = consensus.head(MARK_KEY)
    return None if entry is None else Mark(entry.seqno, decode_binding(entry.data, build))


def is_bound(consensus: Consensus, mark: Mark) -> bool:
    """Whether the consensus store is bound as the mark says: that home is there. Raises Unavailable."""
    with translated():
        entry = consensus.head(LOG_KEY)
    return entry is not None and entry.data == encode_binding(mark.binding)


def set_mark(consensus: Consensus, binding: LocationBinding, build: Build) -> None:
    """Mark the store, in which no mark is, or one that was taken back. Raises Conflict: another one was quicker."""
    before = mark_of(consensus, build)
    with translated():
        consensus.compare_and_set(MARK_KEY, 1 if before is None else before.seqno + 1, encode_binding(binding))
    found = mark_of(consensus, build)
    if found is None or found.binding != binding:
        raise Conflict(f"another recovery into {consensus.url} was begun; look, then retry")


def begin_marked(consensus: Consensus, binding: LocationBinding, build: Build) -> None:
    """Decide that logs begin under this binding. Repeating it is safe. Raises Conflict: it was taken back meanwhile."""
    found = mark_of(consensus, build)
    if found is not None and found.binding == binding and not found.has_begun:
        with translated():
            consensus.compare_and_set(MARK_KEY, found.seqno + 1, encode_binding(binding))
        found = mark_of(consensus, build)
    if found is None or found.binding != binding:
        raise Conflict(f"what was begun at {consensus.url} was taken back meanwhile; look, then retry")


def take_back(consensus: Consensus, mark: Mark, build: Build) -> None:
    """Decide that nothing becomes of the mark. Repeating it is safe. Raises Conflict: it has begun as home."""
    if mark.is_taken_back:
        return
    gone = LocationBinding(mark.binding.location_id, mark.binding.epoch, "")
    with translated():
        is_in_use = consensus.head(LOG_KEY) is not None or bool(consensus.keys("", "", 1))
        if not mark.has_begun and not is_in_use:
            consensus.compare_and_set(MARK_KEY, mark.seqno + 1, encode_binding(gone))
    found = mark_of(consensus, build)
    if found is None or found.binding != gone:
        raise Conflict(f"{consensus.url} has begun as home: repeat the switch; it cannot be undone")


def hold_epoch(blob: Blob, binding: LocationBinding) -> None:
    """Write the epoch, once. Repeating it is safe. Raises Conflict: it is of another consensus store."""
    with translated():
        try:
            blob.put(epoch_key(binding.epoch), encode_binding(binding))
        except BlobExists:
            if blob.get(epoch_key(binding.epoch)) != encode_binding(binding):
                raise Conflict(f"another consensus store has taken over {blob.url} at epoch {binding.epoch}") from None


# Shards of which the blob store knows, and the consensus store nothing: their logs are lost, and no listing of names
# shows them.


FAMILIES_MAX = 10_000  # that are looked into: each takes one blob


def lost_logs(place: Readable, known: Collection[str], prefix: str = "") -> Iterator[str]:
    """Names of shards that begin so, that are not `known` to the log, and of which a rollup tells a later version.

    `known` are all names in the log, those of dropped shards too. A rollup of the first version alone is that of a
    shard that was never begun. Who looks may find that such a shard is there by now. One listing of the blob store, and
    one blob for each. Raises Unavailable.
    """
    families = {family_of(shard_id_of(name)) for name in known}
    newest: dict[str, str] = {}
    with translated():
        for stat in place.blob.list(""):
            key = stat.key
            if not is_rollup_key(key) or not belongs_to(key, shard_of(key)):
                continue
            family = family_of(shard_of(key))
            if family in families or rollup_seqno(key) <= FIRST:
                continue
            if family not in newest and len(newest) == FAMILIES_MAX:
                break
            newest[family] = max(newest.get(family, key), key, key=rollup_seqno)
    names = set()
    for family, key in newest.items():
        try:
            state = place.versions.read_rollup(key)
        except Corruption:
            continue  # nobody can tell whose it is
        if state is not None and family_of(state.shard_id) == family and state.name.startswith(prefix):
            names.add(state.name)
    yield from sorted(names)
