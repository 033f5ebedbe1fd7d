"""Mending: blobs of a shard that are missing or damaged are put back, each from the copy of it in a store of backups.

A blob that is missing comes back under its own key: it is named, so it is not collected, and its bytes are those that
it had. A part that is damaged gets a new key, by one commit; any other blob that is damaged is put in its own place.
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

BACKUPS_TRIED_MAX = 1_000  # the newest ones, of which the checksum of a blob is read
ROUNDS = 2
PUT, REPLACED, LEFT = "put_back", "replaced", "left"


@dataclass(frozen=True, slots=True)
class Mended:
    """What became of one fault: `done` is PUT (under its own key), REPLACED (by the blob `by`) or LEFT, and `why`."""

    fault: Fault
    done: str
    by: str = ""
    why: str = ""


def mended(location: Location, name: str, store: BackupStore, *, dry_run: bool = False) -> Iterator[Mended]:
    """Put back what the shard names and cannot be read, as far as the backups have a copy that matches its checksum.

    A second round follows where a bundle came back, since it may list parts that are missing as well. `dry_run`: only
    tell. Repeating it is safe. Raises UnknownShard, InvalidUsage (backups of another location), Unavailable.
    """
    check_shard_name(name)
    store.open(location.identity.check().location_id)
    mending = _Mending(location, name, store, dry_run)
    told: set[tuple[str, str]] = set()
    for _ in range(ROUNDS):
        bundles = 0
        for fault in byte_faults(location.machine(name).refresh(), location.blob, location.settings.build):
            if (fault.key, fault.what) in told:
                continue
            told.add((fault.key, fault.what))
            found = mending.mended(fault)
            bundles += found.done != LEFT and fault.named is not None and fault.named.part.bundle is not None
            yield found
        if not bundles or dry_run:
            return


class _Mending:
    def __init__(self, location: Location, name: str, store: BackupStore, dry_run: bool) -> None:
        self._location = location
        self._name = name
        self._store = store
        self._dry_run = dry_run
        self._lists: Iterator[Sums] | None = None
        self._sums: Sums = {}

    def mended(self, fault: Fault) -> Mended:
        """Mend one fault, if that can be done."""
        part = None if fault.named is None else fault.named.part
        if part is not None and part.is_inline:
            return Mended(fault, LEFT, why="its rows lie in the State itself; no blob can take their place")
        try:
            if part is None:
                size, crc = self._sum(fault.key)
            else:
                size, crc = part.blob_size, part.checksum
            data = self._copy(fault.key, size, crc)
        except BlobNotFound:
            return Mended(fault, LEFT, why=f"no backup in {self._store.blob.url} has it")
        except Corruption as error:
            return Mended(fault, LEFT, why=error.message)
        with translated():
            is_there = self._location.blob.stat(fault.key) is not None
        if fault.named is not None and is_there:
            return self._replaced(fault, fault.named, data)
        if not self._dry_run:
            self._put_back(fault.key, data, is_there)
        return Mended(fault, PUT)

    def _sum(self, key: str) -> tuple[int, int]:
        """Size and CRC-32 of a blob, by the lists of the newest backups. Raises BlobNotFound: none has it."""
        if self._lists is None:
            self._lists = self._of_backups()
        while key not in self._sums:
            listed = next(self._lists, None)
            if listed is None:
                raise BlobNotFound(f"no backup has {key}")
            self._sums = {**listed, **self._sums}
        return self._sums[key]

    def _of_backups(self) -> Iterator[Sums]:
        for backup in list(reversed(self._store.listed().backups))[:BACKUPS_TRIED_MAX]:
            shard = backup.shard(self._name)
            if shard is not None:
                yield self._store.sums(shard)

    def _copy(self, key: str, size: int, crc: int) -> bytes:
        """The copy, compared. Raises BlobNotFound, Corruption."""
        with translated_but_missing():
            try:
                data = self._store.blob.get(BLOBS + key)
            except BlobNotFound:  # what a clone has borrowed is kept under a key of the clone
                data = self._store.blob.get(f"{BLOBS}{shard_id_of(self._name)}{key.removeprefix(shard_of(key))}")
        if (len(data), zlib.crc32(data)) != (size, crc):
            raise Corruption(f"{BLOBS}{key} in {self._store.blob.url} is damaged as well: its checksum differs")
        return data

    def _put_back(self, key: str, data: bytes, is_there: bool) -> None:
        """Put it under its own key. What is there is damaged, and goes."""
        self._location.identity.confirm()
        with translated():
            if is_there:
                self._location.blob.delete([key])
            self._location.blob.put(key, data)

    def _replaced(self, fault: Fault, named: NamedPart, data: bytes) -> Mended:
        """Put it under a new key, and name that in its place."""
        location = self._location
        if self._dry_run:
            return Mended(fault, REPLACED)
        fresh = put_anew(location, location.machine(self._name).refresh(), named.part, data)
        location.machine(self._name).apply(replace_part(named, fresh))
        return Mended(fault, REPLACED, by=fresh.key or "")


def replace_part(named: NamedPart, fresh: Part | None) -> c.ReplacePart:
    """The command that takes a part out, also of its bundle, and names `fresh` in its place."""
    command = c.ReplacePart(named.part.id, fresh)
    if named.within is None:
        return command
    return replace(command, within=named.within.id, listed=named.listed)


def put_anew(location: Location, state: State, part: Part, data: bytes) -> Part:
    """Put a copy of a part, or bundle, under a new key; the part that is to take its place. Raises Unavailable."""
    fresh = mint(PartId, location.ids)
    key = (part_key if part.bundle is None else bundle_key)(state.shard_id, COMPACTOR, fresh)
    with translated():
        location.blob.put(key, data)
    return replace(part, id=fresh, key=key)
