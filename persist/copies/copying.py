"""The blobs of a State are brought to a location, each read with a check of its checksum. What is there stays."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from persist.commit.location import Location
from persist.copies.backup_store import Sums
from persist.copies.carried import Renaming
from persist.core.keys import shard_of
from persist.formats.store_errors import translated

Read = Callable[[str, int, int], bytes]  # a blob by its key, which must have this size and CRC-32


@dataclass(frozen=True, slots=True)
class Copying:
    """Brings blobs to `location`. `read` gives them; `told` hears how many bytes each put has written."""

    location: Location
    read: Read
    told: Callable[[int], object]

    def copied(self, sums: Sums, renaming: Renaming | None, pool: Executor) -> int:
        """Copy the blobs that are not there yet, and the bundles as they are renamed; how many bytes."""
        shard = renaming.shard_id if renaming is not None else next(map(shard_of, sums), None)
        with translated():
            there = {stat.key: stat.size for stat in self.location.blob.list(f"{shard}/")} if sums else {}
        goes = {key: key if renaming is None else renaming.key(key) for key in sums}
        bundles = {} if renaming is None else renaming.bundles
        lacking = [k for k, key in goes.items() if key not in bundles and there.get(key) != sums[k][0]]
        sent = sum(pool.map(lambda key: self._put(goes[key], self.read(key, *sums[key])), lacking))
        return sent + sum(self._put(key, data) for key, data in bundles.items() if key not in there)

    def _put(self, key: str, data: bytes) -> int:
        with translated():
            self.location.blob.put(key, data)
        self.told(len(data))
        return len(data)
