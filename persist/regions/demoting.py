"""An old home becomes a copy of the new one: what it alone has goes, and it is marked as a copy.

Then `persist replicate` brings what the new home has, and deletes what it does not have.
"""

from __future__ import annotations

from blob import Blob
from persist.commit.identity import COPY_KEY, ID_KEY, epoch_key, epochs_in
from persist.commit.location import Location
from persist.core.errors import Conflict, InvalidUsage
from persist.core.keys import belongs_to, is_rollup_key, shard_of
from persist.core.publications import CATALOGUES, JOURNALS
from persist.formats.store_errors import translated
from persist.regions.promotion import Promotion
from persist.regions.salvaging import diverged

DELETED_AT_ONCE = 500
NAMED_MAX = 5  # shards that one message names


def demote(old: Location, new: Blob, promotion: Promotion, *, drop_diverged: bool = False) -> int:
    """Make the blob store of the old home a copy of the new one's; how many blobs were deleted.

    Repeating it is safe. `drop_diverged`: also where the old home has something that the new one does not have, and
    that is lost by this. Raises Conflict (it has, or it has taken over itself since), InvalidUsage (they are homes of
    two locations), Unavailable.
    """
    with translated():
        if old.blob.get(ID_KEY) != new.get(ID_KEY):
            raise InvalidUsage(f"{old.blob.url} is of another location than {new.url}")
        if new.stat(COPY_KEY) is not None:
            raise InvalidUsage(f"{new.url} is a copy itself: give the blob store of the new home")
    if not drop_diverged and not _is_marked(old.blob):
        names = [found.name for found in diverged(old, promotion)]
        if names:
            more = ", …" if len(names) > NAMED_MAX else ""
            raise Conflict(
                f"the old home has something of {len(names)} shards that the new one does not have: "
                f"{', '.join(names[:NAMED_MAX])}{more}. `persist salvage` writes it to files; then --drop-diverged"
            )
    _fence(old.blob, new)
    with translated():
        if not _is_marked(old.blob):
            old.blob.put(COPY_KEY, new.get(ID_KEY))
        there = {stat.key for stat in new.list("s")}
        gone = [stat.key for prefix in (JOURNALS, CATALOGUES) for stat in old.blob.list(prefix)]
        gone += [stat.key for stat in old.blob.list("s") if _is_own_rollup(stat.key) and stat.key not in there]
        for start in range(0, len(gone), DELETED_AT_ONCE):
            old.blob.delete(gone[start : start + DELETED_AT_ONCE])
    return len(gone)


def _fence(old: Blob, new: Blob) -> None:
    """Bring the epochs of the new home to the old one, which ends it, if it has not ended yet."""
    with translated():
        known, own = epochs_in(new), epochs_in(old)
        if own and own[-1] > known[-1]:
            raise Conflict(f"{old.url} has an epoch {own[-1]}, which {new.url} does not have: it has taken over since")
        for epoch in known:
            data, held = new.get(epoch_key(epoch)), old.get(epoch_key(epoch)) if epoch in own else None
            if held is None:
                old.put(epoch_key(epoch), data)
            elif held != data:
                raise Conflict(f"{old.url} has an epoch {epoch} of its own: it has taken over as well")


def _is_marked(blob: Blob) -> bool:
    with translated():
        return blob.stat(COPY_KEY) is not None


def _is_own_rollup(key: str) -> bool:
    return belongs_to(key, shard_of(key)) and is_rollup_key(key)
