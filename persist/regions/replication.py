"""Replication of a location's blob store to another store, for stores that do not replicate themselves.

The copy is always readable: blobs of shards arrive first, parts before bundles, then rollups, then publications. What
home deletes is deleted in the copy with a delay, so that its readers have moved on by then. Notes in the copy name the
blobs that wait for this, so that another process deletes them. Existing blobs are not sent again.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from blob import Blob
from blob.interface import BlobStat
from persist.commit.clocks_and_ids import Clock, SystemIds, probed
from persist.commit.location_identity import COPY_KEY, EPOCHS, FORMATS, ID_KEY, epochs_in
from persist.copies.throttled_blob import PacedBlob, check_rate
from persist.core.blob_keys import (
    CATALOGUES,
    JOURNALS,
    belongs_to,
    is_bundle_key,
    is_journal_key,
    is_part_key,
    is_rollup_key,
    shard_of,
)
from persist.core.errors import Conflict, Corruption, InvalidUsage
from persist.core.ids import IdSource, family_of, shard_id_of
from persist.formats.state_frames import decode_journal
from persist.formats.store_errors import read_or_none, translated
from persist.regions.failover import PREFIX

AT_ONCE_MAX = 64
INTERVAL_S_MIN = 0.05
DELETED_AT_ONCE = 500
GONE = "copy-gone/"  # <epoch>/<uuid7>: a note of keys, one a line, that the home had deleted when the note was written
NOTED_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class ReplicateSettings:
    """`whole_s`: interval of comparing the whole stores. `rate`: limit of bytes a second read at home.

    `keep_s`: how long the copy keeps blobs that home has deleted.
    """

    whole_s: float = 60.0
    keep_s: float = 300.0
    rate: int | None = None
    at_once: int = 4

    def check(self) -> None:
        """Raises InvalidUsage if a number is out of range."""
        check_rate(self.rate)
        check_seconds("whole_s", self.whole_s, INTERVAL_S_MIN)
        check_seconds("keep_s", self.keep_s, 0.0)
        if not 1 <= self.at_once <= AT_ONCE_MAX:
            raise InvalidUsage(f"at_once is {self.at_once}; it must be in [1, {AT_ONCE_MAX}]")


def check_seconds(name: str, value: float, least: float) -> None:
    """Raises InvalidUsage if `value` is not between `least` and ten days."""
    if not least <= value <= 10 * 86_400:
        raise InvalidUsage(f"{name} is {value}; it must be in [{least}, 864000] seconds")


@dataclass(frozen=True, slots=True)
class Replicated:
    """The result of one round: `copied` blobs of `size` bytes, `deleted` ones. `waiting`: those to be deleted later."""

    copied: int
    size: int
    deleted: int
    waiting: int


class Replicator:
    """Copies from `home` to `copy`. Run one for each copy; two only duplicate work."""

    def __init__(
        self,
        home: Blob,
        copy: Blob,
        clock: Clock,
        settings: ReplicateSettings | None = None,
        ids: IdSource | None = None,
    ) -> None:
        self.settings = settings or ReplicateSettings()
        self.settings.check()
        self._home = PacedBlob(home, self.settings.rate, clock)
        self._copy = copy
        self._clock = clock
        self._ids = ids or SystemIds()
        self._there: set[str] = set()  # keys in the copy
        self._gone_s: dict[str, float] = {}  # keys in the copy -> since when they are known to be deleted at home
        self._notes: dict[str, frozenset[str]] = {}  # notes in the copy, and the keys that they name
        self._seen: set[str] = set()  # journals that were read
        self._whole_s: float | None = None

    def round(self, *, whole: bool = False, deletes: bool = True) -> Replicated:
        """Copy what was published since the last round; everything (`whole`), or if that is due.

        `deletes`: also delete what home deleted long enough ago.
        Safe to repeat. Raises InvalidUsage (home has no location, or the copy is of another one), Conflict (the copy
        has become home), Corruption (a blob of the copy differs), Unavailable.
        """
        epoch = self._check_pair()
        now_s = self._clock.monotonic()
        if not self._there:  # not listed yet
            with translated():
                stats = {stat.key: stat for stat in self._copy.list("")}
            self._there = {key for key in stats if not key.startswith(GONE)}
            self._read_notes([stat for key, stat in stats.items() if key.startswith(GONE)], epoch, now_s)
        is_whole = whole or self._whole_s is None or now_s - self._whole_s >= self.settings.whole_s
        with translated():
            publications = {stat.key for prefix in (JOURNALS, CATALOGUES) for stat in self._home.list(prefix)}
            fixed = {stat.key for prefix in (EPOCHS, FORMATS, PREFIX) for stat in self._home.list(prefix)} | {ID_KEY}
        prefixes = [""] if is_whole else sorted(self._touched(publications))
        shard_blobs = self._listed(prefixes)  # listed after the publications: everything they need is included
        copied, size = self._bring(fixed, shard_blobs, publications)
        home_keys = fixed | shard_blobs | publications
        self._find_gone(prefixes, home_keys, now_s)
        deleted = self._delete(now_s) if deletes else 0
        if is_whole and deletes:
            self._write_notes(epoch, home_keys)
        if is_whole:
            self._whole_s = now_s
        return Replicated(copied, size, deleted, len(self._gone_s))

    def _check_pair(self) -> int:
        """Check that both are of one location, and the copy has not become home. Returns the last epoch of the home."""
        with translated():
            own, other = read_or_none(self._home, ID_KEY), read_or_none(self._copy, ID_KEY)
            if own is None:
                raise InvalidUsage(f"{self._home.url} has no location: give the blob store of one")
            last, copy_epoch = max(epochs_in(self._home), default=0), max(epochs_in(self._copy), default=0)
            if other == own and copy_epoch > last:
                raise Conflict(f"{self._copy.url} has become home, at epoch {copy_epoch}: it is not overwritten")
            self._check_marked(own, other)
        return last

    def _check_marked(self, own: bytes, other: bytes | None) -> None:
        """Check that the store is a copy, so that a home is never deleted from by mistake. An empty one is marked."""
        marked = read_or_none(self._copy, COPY_KEY)
        if marked is None:
            if (other_blob := next(iter(self._copy.list("")), None)) is not None:
                raise InvalidUsage(
                    f"{self._copy.url} was not made by `persist region replicate`, and is not empty: it has "
                    f"{other_blob.key}. Check that --from and --to are not swapped, and give an empty store"
                )
            self._copy.put(COPY_KEY, own)
        elif marked != own or other not in (None, own):
            raise InvalidUsage(f"{self._copy.url} has another location than {self._home.url}: give an empty store")

    def _touched(self, publications: set[str]) -> set[str]:
        """The key prefixes of the shards in new journals."""
        prefixes: set[str] = set()
        new_journals = {key for key in publications if is_journal_key(key)} - self._seen
        for key in sorted(new_journals):
            data = read_or_none(self._home, key)
            with suppress(Corruption):
                shards = () if data is None else decode_journal(data).shards
                prefixes.update(family_of(shard_id_of(shard.name)) for shard in shards)
        self._seen = {key for key in publications if is_journal_key(key)}
        return prefixes

    def _listed(self, prefixes: Iterable[str]) -> set[str]:
        with translated():
            keys = {stat.key for prefix in prefixes for stat in self._home.list(prefix or "s")}
        return {key for key in keys if belongs_to(key, shard_of(key))}

    def _bring(self, fixed: set[str], shard_blobs: set[str], publications: set[str]) -> tuple[int, int]:
        """Copy missing blobs, stage by stage, the id first; returns their number and bytes."""
        rollups = {key for key in shard_blobs if is_rollup_key(key)}
        bundles = {key for key in shard_blobs if is_bundle_key(key)}
        parts = {key for key in shard_blobs if is_part_key(key)} - bundles
        stages = ({ID_KEY}, fixed, parts, shard_blobs - parts - bundles - rollups, bundles, rollups, publications)
        copied = size = 0
        with ThreadPoolExecutor(self.settings.at_once, thread_name_prefix="persist-replicate") as pool:
            for stage in stages:
                for sent in pool.map(self._carry, sorted(stage - self._there)):
                    copied, size = copied + (sent is not None), size + (sent or 0)
        return copied, size

    def _carry(self, key: str) -> int | None:
        """Copy one blob; returns its size. None: home has deleted it meanwhile."""
        data = read_or_none(self._home, key)
        if data is None:
            return None
        try:
            with translated():
                self._copy.put(key, data)
        except Corruption as error:
            raise Corruption(f"{key} in {self._copy.url} differs from that in {self._home.url}") from error
        self._there.add(key)
        return len(data)

    def _read_notes(self, stats: list[BlobStat], epoch: int, now_s: float) -> None:
        """Read which keys earlier processes found deleted at home, and when, by the clock of the copy's store.

        They had brought the publications that no longer need these keys. The notes of other epochs do not count: what
        has become a copy again may name the keys anew.
        """
        if not stats:
            return
        with translated():
            store_ms = probed(self._copy, self._ids)
        for stat in stats:
            is_current = stat.key.startswith(f"{GONE}{epoch}/")
            data = read_or_none(self._copy, stat.key) if is_current else None
            keys = self._notes[stat.key] = frozenset((data or b"").decode().splitlines())
            since_s = now_s - max(0, store_ms - stat.modified_ms) / 1000
            for key in keys & self._there:
                self._gone_s[key] = min(since_s, self._gone_s.get(key, since_s))

    def _write_notes(self, epoch: int, home_keys: set[str]) -> None:
        """Note the keys that wait to be deleted, and delete notes without such keys, or with keys that came back."""
        waiting = self._gone_s.keys()
        useless = [note for note, keys in self._notes.items() if not keys & waiting or keys & home_keys]
        with translated():
            if useless:
                self._copy.delete(useless)
            for note in useless:
                del self._notes[note]
            fresh = sorted(waiting - frozenset().union(*self._notes.values()))
            for start in range(0, len(fresh), NOTED_AT_ONCE):
                keys = fresh[start : start + NOTED_AT_ONCE]
                note = f"{GONE}{epoch}/{self._ids.uuid7()}"
                self._copy.put(note, "\n".join(keys).encode())
                self._notes[note] = frozenset(keys)

    def _find_gone(self, prefixes: list[str], home_keys: set[str], now_s: float) -> None:
        """Find since when compared keys of the copy are known to be deleted at home."""
        compared = {key for key in self._there - {COPY_KEY} if key.startswith(tuple(prefixes))}
        compared |= {key for key in self._there if key.startswith((JOURNALS, CATALOGUES))}
        for key in compared - home_keys:
            self._gone_s.setdefault(key, now_s)
        for key in self._gone_s.keys() & home_keys:
            del self._gone_s[key]

    def _delete(self, now_s: float) -> int:
        due = sorted(key for key, since_s in self._gone_s.items() if now_s - since_s >= self.settings.keep_s)
        for start in range(0, len(due), DELETED_AT_ONCE):
            window = due[start : start + DELETED_AT_ONCE]
            with translated():
                self._copy.delete(window)
            self._there.difference_update(window)
            for key in window:
                del self._gone_s[key]
        return len(due)
