"""Whether a backup can be restored: it is opened as a location of its own, and checked as `persist check` does."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace

from blob import BlobNotFound
from persist.copies.backup_restore import opened
from persist.copies.backup_store import BLOBS, Backup, BackupStore, ShardBackup
from persist.copies.shard_checks import Fault, Kind
from persist.copies.throttled_blob import PacedBlob
from persist.copies.verify import How, verified
from persist.core.errors import Corruption
from persist.formats.store_errors import translated_but_missing


def checked_backup(store: BackupStore, backup: Backup, how: How) -> Iterator[tuple[ShardBackup, tuple[Fault, ...]]]:
    """Each shard of the backup, and what is wrong with it. Writes nothing.

    Its State can be read, its batches tile, every blob that it names is there with its size. With `deep` every byte is
    read and compared with its checksum, and every row decoded.
    """
    how.check()
    how = replace(how, alone=True)  # what it had borrowed is in the backup, whoever has lent it
    for shard in backup.shards:
        found: list[Fault] = []
        try:
            sums = store.sums(shard)
            with opened(store, backup, [shard.name]) as location:
                for result in verified(location, [shard.name], how):
                    found.extend(result.faults)
            known = {fault.key for fault in found}
            if how.deep:
                found.extend(fault for fault in _bytes(store, shard, sums, how) if fault.key not in known)
        except Corruption as error:
            found.append(Fault(shard.name, Kind.LOG, error.message))
        yield shard, tuple(dict.fromkeys(found))


def _bytes(store: BackupStore, shard: ShardBackup, sums: dict[str, tuple[int, int]], how: How) -> Iterator[Fault]:
    """The blobs that are not parts, whose bytes nothing else has read."""
    blob = store.blob if how.rate is None else PacedBlob(store.blob, how.rate, store.clock)
    for key, (size, crc) in sums.items():
        if key.endswith(".parquet"):
            continue
        try:
            with translated_but_missing():
                data = blob.get(BLOBS + key)
        except BlobNotFound:
            yield Fault(shard.name, Kind.MISSING, f"the blob {key} is not there", key)
            continue
        if (len(data), zlib.crc32(data)) != (size, crc):
            yield Fault(shard.name, Kind.BLOB, f"the blob {key} is damaged: its checksum differs", key)
