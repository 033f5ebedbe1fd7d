"""An old home becomes a copy of the new one: it ends, what it alone has goes, and it is marked as a copy.

Then `persist replicate` brings what the new home has, and deletes what it does not have.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

from blob import Blob
from persist.commit.identity import COPY_KEY, ID_KEY, epoch_key, epochs_in
from persist.commit.location import Location
from persist.core import commands as c
from persist.core.errors import Conflict, Corruption, InvalidUsage
from persist.core.keys import belongs_to, is_rollup_key, shard_of
from persist.core.publications import CATALOGUES, JOURNALS
from persist.formats.state_frames import decode_binding
from persist.formats.store_errors import translated
from persist.regions.promotion import PREFIX, Promotion, promotion_to
from persist.regions.salvaging import diverged
from persist.regions.switching import as_owner

DELETED_AT_ONCE = 500
NAMED_MAX = 5  # shards that one message names


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
        _check_epochs(old.blob, new)
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
            f"{', '.join(names[:NAMED_MAX])}{more}. `persist salvage` writes it to files; then --drop-diverged. It "
            "only reads from now on"
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
                machine.apply(c.HandOver(binding.epoch))


def _check_epochs(old: Blob, new: Blob) -> None:
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
