"""Replication of a location's blob store to another store, for stores that do not do it themselves.

What arrives is always readable: the blobs of shards first, parts before what lists them, then rollups, then
publications, which tell of them. What is deleted at home is deleted there a while later, so that who reads the copy has
gone on by then. There is nothing to be resumed: what is there is not sent again.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from blob import Blob, BlobNotFound
from persist.commit.location_identity import COPY_KEY, EPOCHS, FORMATS, ID_KEY, epochs_in
from persist.commit.system import Clock
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
from persist.core.ids import family_of, shard_id_of
from persist.formats.state_frames import decode_journal
from persist.formats.store_errors import translated, translated_but_missing
from persist.regions.failover import PREFIX

AT_ONCE_MAX = 64
DELETED_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class ReplicateSettings:
    """`every_s`: how often publications are looked for. `whole_s`: how often the whole store is compared.

    `keep_s`: for so long the copy keeps what home has deleted. `rate`: bytes a second that are read at home at most.
    """

    every_s: float = 1.0
    whole_s: float = 60.0
    keep_s: float = 300.0
    rate: int | None = None
    at_once: int = 4

    def check(self) -> None:
        """Raises InvalidUsage where a number makes no sense."""
        check_rate(self.rate)
        for name, least in (("every_s", 0.05), ("whole_s", 0.05), ("keep_s", 0.0)):
            if not least <= getattr(self, name) <= 10 * 86_400:
                raise InvalidUsage(f"{name} is {getattr(self, name)}; it must be in [{least}, 864000] seconds")
        if not 1 <= self.at_once <= AT_ONCE_MAX:
            raise InvalidUsage(f"at_once is {self.at_once}; it must be in [1, {AT_ONCE_MAX}]")


@dataclass(frozen=True, slots=True)
class Replicated:
    """What one round did: `copied` blobs of `size` bytes, `deleted` ones. `waiting`: deleted at home, and kept yet."""

    copied: int
    size: int
    deleted: int
    waiting: int


class Replicator:
    """Copies from `home` to `copy`. One at a time for a copy; two do no harm but work twice."""

    def __init__(self, home: Blob, copy: Blob, clock: Clock, settings: ReplicateSettings | None = None) -> None:
        self.settings = settings or ReplicateSettings()
        self.settings.check()
        self._home = PacedBlob(home, self.settings.rate, clock)
        self._copy = copy
        self._clock = clock
        self._there: set[str] | None = None  # in the copy
        self._gone_s: dict[str, float] = {}  # since when a key of the copy is known to be gone at home
        self._seen: set[str] = set()  # journals that were read
        self._whole_s: float | None = None

    def round(self, *, whole: bool = False, deletes: bool = True) -> Replicated:
        """Bring over what was published since the last round; everything (`whole`), where that is due.

        `deletes`: and delete what home has deleted long ago.
        Repeating it is safe. Raises InvalidUsage (home has no location, or the copy is of another one), Conflict (the
        copy has gone on by itself), Corruption (a blob of the copy differs), Unavailable.
        """
        self._check_pair()
        now_s = self._clock.monotonic()
        if self._there is None:
            with translated():
                self._there = {stat.key for stat in self._copy.list("")}
        is_whole = whole or self._whole_s is None or now_s - self._whole_s >= self.settings.whole_s
        with translated():
            told = {stat.key for prefix in (JOURNALS, CATALOGUES) for stat in self._home.list(prefix)}
            fixed = {stat.key for prefix in (EPOCHS, FORMATS, PREFIX) for stat in self._home.list(prefix)} | {ID_KEY}
        prefixes = [""] if is_whole else sorted(self._touched(told))
        own = self._listed(prefixes)  # after what tells of them: all that it needs is among them
        copied, size = self._bring(fixed, own, told)
        self._note_gone(prefixes, fixed | own | told, now_s)
        deleted = self._delete(now_s) if deletes else 0
        if is_whole:
            self._whole_s = now_s
        return Replicated(copied, size, deleted, len(self._gone_s))

    def _check_pair(self) -> None:
        """That both are of one location, and the copy has not become a home of its own."""
        with translated():
            own, other = self._id_of(self._home), self._id_of(self._copy)
            if own is None:
                raise InvalidUsage(f"{self._home.url} has no location: give the blob store of one")
            last, there = max(epochs_in(self._home), default=0), max(epochs_in(self._copy), default=0)
            if other == own and there > last:
                raise Conflict(f"{self._copy.url} has gone on by itself, at epoch {there}: nothing is copied over it")
            self._check_marked(own, other)

    def _check_marked(self, own: bytes, other: bytes | None) -> None:
        """That the store is a copy, and so nothing is deleted in a home by mistake. One that is empty is marked."""
        try:
            marked = self._copy.get(COPY_KEY)
        except BlobNotFound:
            if (found := next(iter(self._copy.list("")), None)) is not None:
                raise InvalidUsage(
                    f"{self._copy.url} is no copy that `persist region replicate` has made, and not empty: it has "
                    f"{found.key}. Look whether --from and --to are the right way round, and give an empty store"
                ) from None
            self._copy.put(COPY_KEY, own)
            return
        if marked != own or other not in (None, own):
            raise InvalidUsage(f"{self._copy.url} is of another location than {self._home.url}: give an empty store")

    def _id_of(self, blob: Blob) -> bytes | None:
        try:
            return blob.get(ID_KEY)
        except BlobNotFound:
            return None

    def _touched(self, told: set[str]) -> set[str]:
        """What the keys of those shards begin with of which new journals tell."""
        found: set[str] = set()
        fresh = {key for key in told if is_journal_key(key)} - self._seen
        for key in sorted(fresh):
            try:
                with translated_but_missing():
                    journal = decode_journal(self._home.get(key))
            except (BlobNotFound, Corruption):
                continue
            found.update(family_of(shard_id_of(shard.name)) for shard in journal.shards)
        self._seen = {key for key in told if is_journal_key(key)}
        return found

    def _listed(self, prefixes: Iterable[str]) -> set[str]:
        with translated():
            keys = {stat.key for prefix in prefixes for stat in self._home.list(prefix or "s")}
        return {key for key in keys if belongs_to(key, shard_of(key))}

    def _bring(self, fixed: set[str], own: set[str], told: set[str]) -> tuple[int, int]:
        """Copy what is lacking, stage by stage; how many blobs, of how many bytes. The id is first."""
        assert self._there is not None
        rollups = {key for key in own if is_rollup_key(key)}
        bundles = {key for key in own if is_bundle_key(key)}
        parts = {key for key in own if is_part_key(key)} - bundles
        stages = ({ID_KEY}, fixed, parts, own - parts - bundles - rollups, bundles, rollups, told)
        copied = size = 0
        with ThreadPoolExecutor(self.settings.at_once, thread_name_prefix="persist-replicate") as pool:
            for stage in stages:
                for sent in pool.map(self._carry, sorted(stage - self._there)):
                    copied, size = copied + (sent is not None), size + (sent or 0)
        return copied, size

    def _carry(self, key: str) -> int | None:
        """Copy one blob; its bytes. None: home has deleted it meanwhile."""
        try:
            with translated_but_missing():
                data = self._home.get(key)
        except BlobNotFound:
            return None
        try:
            with translated():
                self._copy.put(key, data)
        except Corruption as error:
            raise Corruption(f"{key} in {self._copy.url} differs from that in {self._home.url}") from error
        assert self._there is not None
        self._there.add(key)
        return len(data)

    def _note_gone(self, prefixes: list[str], here: set[str], now_s: float) -> None:
        """Note since when keys of the copy are known to be gone at home, of what was compared."""
        assert self._there is not None
        compared = {key for key in self._there - {COPY_KEY} if key.startswith(tuple(prefixes))}
        compared |= {key for key in self._there if key.startswith((JOURNALS, CATALOGUES))}
        for key in compared - here:
            self._gone_s.setdefault(key, now_s)
        for key in self._gone_s.keys() & here:
            del self._gone_s[key]

    def _delete(self, now_s: float) -> int:
        assert self._there is not None
        due = sorted(key for key, since_s in self._gone_s.items() if now_s - since_s >= self.settings.keep_s)
        for start in range(0, len(due), DELETED_AT_ONCE):
            some = due[start : start + DELETED_AT_ONCE]
            with translated():
                self._copy.delete(some)
            self._there.difference_update(some)
            for key in some:
                del self._gone_s[key]
        return len(due)
