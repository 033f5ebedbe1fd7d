"""Repair: missing or damaged blobs of a shard are restored, each from the copy of it in a store of backups.

A missing blob is restored under its own key: it is named, so it is not collected, and its bytes are the same. A damaged
part gets a new key by one commit; any other damaged blob is overwritten.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass

from blob import BlobNotFound
from persist.commit.location import Location
from persist.copies.backup_store import BLOBS, BackupStore, Sums
from persist.copies.shard_checks import byte_faults
from persist.copies.shard_facts import Fault, NamedPart
from persist.core import commands as c
from persist.core.batch import Part
from persist.core.blob_keys import COMPACTOR, bundle_key, part_key, shard_of
from persist.core.errors import Corruption
from persist.core.ids import PartId, check_shard_name, mint, shard_id_of
from persist.core.record import replace
from persist.core.state import State
from persist.formats.store_errors import translated, translated_but_missing

BACKUPS_TRIED_MAX = 1_000  # the newest ones, whose lists are searched for the checksum of a blob
ROUNDS = 2
PUT, REPLACED, LEFT = "put_back", "replaced", "left"


@dataclass(frozen=True, slots=True)
class RepairedBlob:
    """The result for one fault: `done` is PUT (under its own key), REPLACED (by the blob `by`) or LEFT, and `why`."""

    fault: Fault
    done: str
    by: str = ""
    why: str = ""


def repair_blobs(location: Location, name: str, store: BackupStore, *, dry_run: bool = False) -> Iterator[RepairedBlob]:
    """Restore unreadable blobs that the shard names from backups with a matching checksum.

    A second round follows if a bundle was restored, since parts that it lists may be missing as well. `dry_run`: only
    report. Safe to repeat. Raises UnknownShard, InvalidUsage (backups of another location), Unavailable.
    """
    check_shard_name(name)
    store.open(location.identity.check().location_id)
    repairer = _Repairer(location, name, store, dry_run)
    seen: set[tuple[str, str]] = set()
    for _ in range(ROUNDS):
        bundles = 0
        for fault in byte_faults(location.machine(name).refresh(), location.blob, location.settings.build):
            if (fault.key, fault.what) in seen:
                continue
            seen.add((fault.key, fault.what))
            repaired = repairer.repair(fault)
            bundles += repaired.done != LEFT and fault.named is not None and fault.named.part.bundle is not None
            yield repaired
        if not bundles or dry_run:
            return


class _Repairer:
    def __init__(self, location: Location, name: str, store: BackupStore, dry_run: bool) -> None:
        self._location = location
        self._name = name
        self._store = store
        self._dry_run = dry_run
        self._lists = self._sums_of_backups()
        self._sums: Sums = {}

    def repair(self, fault: Fault) -> RepairedBlob:
        part = None if fault.named is None else fault.named.part
        if part is not None and part.is_inline:
            return RepairedBlob(fault, LEFT, why="its rows are inline in the State; no blob can replace them")
        try:
            if part is None:
                size, crc = self._sum(fault.key)
            else:
                size, crc = part.blob_size, part.checksum
            data = self._read_copy(fault.key, size, crc)
        except BlobNotFound:
            return RepairedBlob(fault, LEFT, why=f"no backup in {self._store.blob.url} has it")
        except Corruption as error:
            return RepairedBlob(fault, LEFT, why=error.message)
        with translated():
            is_there = self._location.blob.stat(fault.key) is not None
        if fault.named is not None and is_there:
            return self._replace(fault, fault.named, data)
        if not self._dry_run:
            self._location.identity.confirm()
            with translated():
                if is_there:  # what is there is damaged
                    self._location.blob.delete([fault.key])
                self._location.blob.put(fault.key, data)
        return RepairedBlob(fault, PUT)

    def _sum(self, key: str) -> tuple[int, int]:
        """Size and CRC-32 of a blob, by the lists of the newest backups. Raises BlobNotFound: no backup has it."""
        while key not in self._sums:
            listed = next(self._lists, None)
            if listed is None:
                raise BlobNotFound(f"no backup has {key}")
            self._sums = {**listed, **self._sums}
        return self._sums[key]

    def _sums_of_backups(self) -> Iterator[Sums]:
        for backup in list(reversed(self._store.listed().backups))[:BACKUPS_TRIED_MAX]:
            shard = backup.shard(self._name)
            if shard is not None:
                yield self._store.sums(shard)

    def _read_copy(self, key: str, size: int, crc: int) -> bytes:
        """The copy, verified. Raises BlobNotFound, Corruption."""
        with translated_but_missing():
            try:
                data = self._store.blob.get(BLOBS + key)
            except BlobNotFound:  # a blob that a clone borrowed is stored under a key of the clone
                data = self._store.blob.get(f"{BLOBS}{shard_id_of(self._name)}{key.removeprefix(shard_of(key))}")
        if (len(data), zlib.crc32(data)) != (size, crc):
            raise Corruption(f"{BLOBS}{key} in {self._store.blob.url} is damaged as well: its checksum differs")
        return data

    def _replace(self, fault: Fault, named: NamedPart, data: bytes) -> RepairedBlob:
        """Put a part under a new key, and commit that key."""
        location = self._location
        if self._dry_run:
            return RepairedBlob(fault, REPLACED)
        replacement = put_anew(location, location.machine(self._name).refresh(), named.part, data)
        location.machine(self._name).apply(replace_part(named, replacement))
        return RepairedBlob(fault, REPLACED, by=replacement.key or "")


def replace_part(named: NamedPart, replacement: Part | None) -> c.ReplacePart:
    """The command that replaces a part, also within its bundle, by `fresh`; None removes it."""
    command = c.ReplacePart(named.part.id, replacement)
    if named.within is None:
        return command
    return replace(command, within=named.within.id, listed=named.listed)


def put_anew(location: Location, state: State, part: Part, data: bytes) -> Part:
    """Put a copy of a part or bundle under a new key; returns the replacement. Raises Unavailable."""
    replacement = mint(PartId, location.ids)
    key = (part_key if part.bundle is None else bundle_key)(state.shard_id, COMPACTOR, replacement)
    with translated():
        location.blob.put(key, data)
    return replace(part, id=replacement, key=key)
