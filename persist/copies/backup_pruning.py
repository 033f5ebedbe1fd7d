"""Pruning: backups that are too many or too old go, then the blobs that no other backup names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from persist.copies.backup_creation import ending
from persist.copies.backup_store import BLOBS, PRUNING, Backup, BackupStore, Run, Unread, own_keys
from persist.core.errors import Corruption, InvalidUsage, UpgradeNeeded
from persist.formats.store_errors import translated

DELETED_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Kept:
    """Which backups stay: the newest `last`, those that are younger than `within_ms`, and the newest one always.

    `damaged`: those go of which the manifest is damaged; where nothing else is said all others stay.
    """

    last: int | None = None
    within_ms: int | None = None
    damaged: bool = False

    def check(self) -> None:
        """Raises InvalidUsage where it says nothing."""
        if self.last is None and self.within_ms is None and not self.damaged:
            raise InvalidUsage("say which backups stay: how many of the newest, or of which age")
        if self.last is not None and self.last < 1:
            raise InvalidUsage(f"last is {self.last}; it must be at least 1")

    def of(self, backups: Sequence[Backup], now_ms: int) -> list[Backup]:
        """Those that stay, of all backups, the oldest first."""
        if self.last is None and self.within_ms is None:
            return list(backups)
        newest = {backup.id for backup in backups[-max(1, self.last or 0) :]}
        within_ms = self.within_ms
        return [
            backup
            for backup in backups
            if backup.id in newest or (within_ms is not None and now_ms - backup.taken_ms < within_ms)
        ]


@dataclass(frozen=True, slots=True)
class Pruned:
    """What a pruning came to: `backups` went, and `blobs` of `size` bytes that no other one names."""

    backups: tuple[str, ...]
    blobs: int
    size: int


def prune(store: BackupStore, kept: Kept, *, dry_run: bool = False) -> Pruned:
    """Delete backups, and what only they need. `dry_run`: tell what would go.

    What killed runs have left goes too. Nothing is deleted that a backup names that stays: where one of these cannot be
    read, nothing is deleted at all (Corruption). Repeating it is safe. Raises Conflict: a backup is under way.
    """
    kept.check()
    store.open(None)
    if dry_run:
        return _pruned(store, kept, None)
    with ending(store.run(PRUNING)) as run:
        return _pruned(store, kept, run)


def _pruned(store: BackupStore, kept: Kept, run: Run | None) -> Pruned:
    """Without a run nothing is deleted."""
    listed = store.listed()
    damaged = _let_go(listed.unread, kept)
    stay = kept.of(listed.backups, store.clock.now_ms())
    going = [backup for backup in listed.backups if backup not in stay]
    named: set[str] = set()
    for backup in stay:
        for shard in backup.shards:
            named.update(store.sums(shard))
            if run is not None:
                run.beat()
    if run is not None:
        for backup in going:  # its manifest first: what is left without one is no backup, and goes below
            for key in own_keys(backup):
                store.delete([key])
    blobs = size = 0
    unnamed = (stat for stat in store.blob.list(BLOBS) if stat.key.removeprefix(BLOBS) not in named)
    own = {key for backup in stay for key in own_keys(backup)}
    left = (stat for stat in store.blob.list("backups/") if stat.key not in own)
    with translated():
        while some := list(islice(unnamed, DELETED_AT_ONCE)):
            blobs, size = blobs + len(some), size + sum(stat.size for stat in some)
            if run is not None:
                run.beat()
                store.blob.delete([stat.key for stat in some])
        while run is not None and (some := list(islice(left, DELETED_AT_ONCE))):
            run.beat()
            store.blob.delete([stat.key for stat in some])
    return Pruned((*damaged, *(backup.id for backup in going)), blobs, size)


def _let_go(unread: Sequence[Unread], kept: Kept) -> list[str]:
    """The damaged ones, whose files go with all that no backup has. Raises Corruption, UpgradeNeeded: they stay."""
    for one in unread:
        if isinstance(one.why, UpgradeNeeded):
            raise one.why
        if not kept.damaged:
            raise Corruption(
                f"{one.why.message}: nothing is deleted, since nobody can say what it names. `persist backup prune "
                "--damaged` lets such backups go"
            )
    return [one.id for one in unread]
