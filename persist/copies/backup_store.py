"""The store of backups: a blob store of its own with any number of backups, which share blobs.

    backup.json                         marks the store as one for backups, and names the location
    backups/<id>/manifest.json          a backup; written last, so that without it there is none
    backups/<id>/<shard>.state          the State of a shard, as a rollup
    backups/<id>/<shard>.list           the blobs that it names, with size and CRC-32
    blobs/<key>                         a blob of the location, under its own key
    running/<run>/<n>, pruning/<run>/<n>   heartbeats of running backups and prunings, one every minute

Blobs with one key are equal, so that a backup sends only what is missing. A backup and a pruning must not run at the
same time: one relies on blobs that the other deletes. Each first writes its heartbeat, then checks for the other, and
gives up if there is one. So both may give up, but never both proceed. Killed runs are detected by the store's clock.
"""

from __future__ import annotations

import json
import posixpath
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from urllib.parse import unquote, urlsplit

from msgspec import Struct, ValidationError, convert, to_builtins

from blob import Blob, BlobExists, BlobNotFound, without_secrets
from persist.commit.clocks_and_ids import Clock
from persist.core.blob_keys import belongs_to
from persist.core.errors import Conflict, Corruption, InvalidUsage, UpgradeNeeded
from persist.core.ids import IdSource, ShardId, check_shard_name, family_of, shard_id_of
from persist.formats.store_errors import translated, translated_but_missing

VERSION = 1
MARKER = "backup.json"
BLOBS = "blobs/"
RUNNING, PRUNING = "running", "pruning"
BEAT_S = 60.0  # interval of heartbeats
SILENT_MS = 30 * 60_000  # a run without a heartbeat for this long was killed
BACKUPS_MAX = 100_000  # in one store

Sums = dict[str, tuple[int, int]]  # key -> size, CRC-32
Times = list[int]  # a frontier


class StoredFile(Struct, frozen=True):
    """A file of the backup itself."""

    key: str
    size: int
    crc: int


class ShardBackup(Struct, frozen=True):
    """One shard of a backup, as of its version `seqno`; times in `[since, upper)` are readable.

    It names `blobs` blobs of `size` bytes; `sent` bytes of them were sent for this backup.
    """

    name: str
    shard_id: str
    seqno: int
    since: Times
    upper: Times
    state: StoredFile
    list: StoredFile
    blobs: int
    size: int
    sent: int


class Backup(Struct, frozen=True):
    """A backup. `at_ms`: the wall clock that all its shards show; None: each shows its own latest version.

    `taken_ms`: when it began, by the clock of its maker. A location needs `format_version` to restore it.
    """

    id: str
    location: str
    epoch: int
    format_version: int
    taken_ms: int
    at_ms: int | None
    shards: tuple[ShardBackup, ...]

    @property
    def size(self) -> int:
        """The bytes that it names; backups share them."""
        return sum(shard.size for shard in self.shards)

    @property
    def sent(self) -> int:
        """The bytes that were sent for it."""
        return sum(shard.sent for shard in self.shards)

    @property
    def shown_ms(self) -> int:
        """The wall clock that it shows, or else when it began."""
        return self.taken_ms if self.at_ms is None else self.at_ms

    def shard(self, name: str) -> ShardBackup | None:
        return next((shard for shard in self.shards if shard.name == name), None)


@dataclass(frozen=True, slots=True)
class UnreadableBackup:
    """A backup whose manifest is damaged (Corruption), or of a later version (UpgradeNeeded)."""

    id: str
    error: Corruption | UpgradeNeeded


@dataclass(frozen=True, slots=True)
class BackupListing:
    """The backups of a store, oldest first, and those that cannot be read."""

    backups: tuple[Backup, ...]
    unread: tuple[UnreadableBackup, ...]

    @property
    def latest(self) -> Backup | None:
        """The latest backup. Raises Corruption, UpgradeNeeded: by its id an unreadable one is later."""
        last = self.backups[-1] if self.backups else None
        for unread in self.unread:
            if last is None or unread.id > last.id:
                instead = "" if last is None else f". The latest readable one is {last.id}: give its id"
                raise type(unread.error)(f"{unread.error.message}{instead}")
        return last


def check_separate(location: str, backups: str) -> None:
    """Check that a backup would survive its location: both are URLs of blob stores.

    Raises InvalidUsage: the backups would be in memory, or below the location's own blobs, whose sweeps list them.
    """
    if backups[:4].lower() == "mem:":
        raise InvalidUsage(f"{backups} is in memory, so the backup would end with this command: give another store")
    if _folder(backups).startswith(_folder(location)):
        raise InvalidUsage(
            f"{without_secrets(backups)} is in the blob store of the location, {without_secrets(location)}: give the "
            "backups a store, or a prefix, beside it"
        )


def _folder(url: str) -> str:
    """A blob store's URL without its options, with a slash at its end."""
    parts = urlsplit(url)
    host = "" if parts.netloc == "localhost" else parts.netloc
    return f"{parts.scheme}://{host}{posixpath.normpath(unquote(parts.path) or '/')}/"


class BackupStore:
    """The backups in one blob store. Thread-safe. Raises Unavailable, and Corruption if one is damaged."""

    def __init__(self, blob: Blob, clock: Clock, ids: IdSource) -> None:
        self.blob = blob
        self.clock = clock
        self._ids = ids

    def open(self, location: str | None) -> None:
        """Check that the store is for backups of this location (None: of any). An empty store is marked.

        Raises InvalidUsage: it is the store of a location, has backups of another location, or holds other data.
        """
        with translated():
            try:
                marker = self._json(MARKER)
            except BlobNotFound:
                self._mark(location)
                return
        if marker.get("persist") != "backups":
            raise InvalidUsage(f"{self.blob.url} is not a store of backups: its {MARKER} is of another kind")
        if type(marker.get("version")) is not int or marker["version"] > VERSION:
            raise UpgradeNeeded(f"the backups in {self.blob.url} are of a later version than this persist supports")
        if location is not None and marker.get("location") != location:
            raise InvalidUsage(
                f"{self.blob.url} has backups of location {marker.get('location')}, and this is {location}: give each "
                "location a store, or a prefix, of its own"
            )

    def _mark(self, location: str | None) -> None:
        other_blob = next(iter(self.blob.list("")), None)
        if other_blob is not None:
            raise InvalidUsage(
                f"{self.blob.url} is not a store of backups, and not empty: it has {other_blob.key}. Give an empty "
                "one, or an empty prefix"
            )
        if location is None:
            raise InvalidUsage(f"{self.blob.url} has no backups: give the store that `persist backup create` wrote to")
        content = {"persist": "backups", "version": VERSION, "location": location}
        try:
            self.blob.put(MARKER, _text(content))
        except BlobExists:
            self.open(location)

    def listed(self) -> BackupListing:
        """List all backups, including those that cannot be read."""
        with translated():
            keys = [stat.key for stat in self.blob.list("backups/") if stat.key.endswith("/manifest.json")]
        if len(keys) > BACKUPS_MAX:
            raise InvalidUsage(f"{self.blob.url} has {len(keys)} backups, more than {BACKUPS_MAX}: prune it")
        backups: list[Backup] = []
        unreadable: list[UnreadableBackup] = []
        for key in keys:
            try:
                with translated_but_missing():
                    backups.append(_backup(self._json(key), key))
            except BlobNotFound:
                continue  # it was pruned meanwhile
            except (Corruption, UpgradeNeeded) as error:
                unreadable.append(UnreadableBackup(key.split("/")[1], error))
        backups.sort(key=lambda backup: (backup.taken_ms, backup.id))
        return BackupListing(tuple(backups), tuple(unreadable))

    def backup(self, backup_id: str) -> Backup:
        """The backup with this id. Raises InvalidUsage: there is none; Corruption: its manifest is damaged."""
        key = _manifest_key(backup_id)
        try:
            with translated_but_missing():
                manifest = self._json(key)
        except BlobNotFound:
            raise InvalidUsage(f"{self.blob.url} has no backup {backup_id!r:.100}; see `persist backup list`") from None
        return _backup(manifest, key)

    def put_backup(self, backup: Backup) -> None:
        """Write the manifest, which completes the backup."""
        body = {"v": VERSION, **to_builtins(backup)}
        self.put(_manifest_key(backup.id), _text({**body, "crc": zlib.crc32(_text(body))}))

    def put(self, key: str, data: bytes) -> StoredFile:
        """Write a file of the backup itself."""
        with translated():
            self.blob.put(key, data)
        return StoredFile(key, *size_and_crc(data))

    def get(self, stored: StoredFile) -> bytes:
        """Read a file and verify it. Raises Corruption: it is missing or damaged."""
        with translated():
            data = self.blob.get(stored.key)
        if size_and_crc(data) != (stored.size, stored.crc):
            raise Corruption(f"{stored.key} in {self.blob.url} is damaged: its checksum differs")
        return data

    def sums(self, shard: ShardBackup) -> Sums:
        """The blobs that the shard names, with size and CRC-32."""
        try:
            sums = {key: (size, crc) for key, size, crc in json.loads(zlib.decompress(self.get(shard.list)))}
            if not all(belongs_to(key, ShardId(shard.shard_id)) for key in sums):
                raise ValueError("it names blobs of another shard")
            return sums
        except (ValueError, TypeError, zlib.error) as error:
            raise Corruption(f"{shard.list.key} in {self.blob.url} cannot be read: {error}") from error

    def put_sums(self, key: str, sums: Sums) -> StoredFile:
        """Write the list of blobs of a shard."""
        listed = [[key, size, crc] for key, (size, crc) in sorted(sums.items())]
        return self.put(key, zlib.compress(_text(listed), 1))

    def held(self, prefix: str) -> dict[str, int]:
        """The stored blobs of a location with this prefix, and their sizes."""
        with translated():
            return {stat.key.removeprefix(BLOBS): stat.size for stat in self.blob.list(BLOBS + prefix)}

    def delete(self, keys: list[str]) -> None:
        with translated():
            self.blob.delete(keys)

    def run(self, kind: str) -> StoreRun:
        """Start a run of this kind. Raises Conflict: one of the other kind is running."""
        run = StoreRun(self, kind, self._ids.uuid7())
        run.beat()
        other_kind = PRUNING if kind == RUNNING else RUNNING
        for run_name, silent_ms in self.runs(other_kind, run).items():
            if silent_ms <= SILENT_MS:
                run.end()
                what = "a pruning" if other_kind == PRUNING else "a backup"
                raise Conflict(
                    f"{what} of {self.blob.url} is running ({run_name}); wait until it ends. A killed one is ignored "
                    f"after {SILENT_MS // 60_000} minutes"
                )
        return run

    def runs(self, kind: str, run: StoreRun) -> dict[str, int]:
        """The runs of a kind, and how many milliseconds ago each had its last heartbeat, by the store's clock."""
        silent_by_name: dict[str, int] = {}
        with translated():
            for stat in self.blob.list(f"{kind}/"):
                name = stat.key.split("/")[1]
                silent_ms = max(0, run.beaten_ms - stat.modified_ms)
                silent_by_name[name] = min(silent_ms, silent_by_name.get(name, silent_ms))
        return silent_by_name

    def _json(self, key: str) -> Mapping[str, Any]:
        try:
            value = json.loads(self.blob.get(key))
        except ValueError as error:
            raise Corruption(f"{key} in {self.blob.url} cannot be read: {error}") from error
        if not isinstance(value, dict):
            raise Corruption(f"{key} in {self.blob.url} is damaged: it is not an object")
        return value


class StoreRun:
    """A running backup or pruning. `beat` renews it; `end`, or leaving its context, removes it."""

    def __init__(self, store: BackupStore, kind: str, name: str) -> None:
        self._store = store
        self._prefix = f"{kind}/{name}/"
        self._count = 0
        self._beaten_s = 0.0
        self.beaten_ms = 0  # by the store's clock

    def __enter__(self) -> StoreRun:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def beat(self) -> None:
        """Write a heartbeat, if a minute has passed. Raises Conflict: the last one was too long ago."""
        clock, now_s = self._store.clock, self._store.clock.monotonic()
        if self._count and now_s - self._beaten_s < BEAT_S:
            return
        if self._count and (now_s - self._beaten_s) * 1000 > SILENT_MS // 2:
            raise Conflict(f"this run was suspended for {now_s - self._beaten_s:.0f} s; start it again to continue")
        self._count += 1
        key = f"{self._prefix}{self._count:06}"
        with translated():
            self._store.blob.put(key, str(clock.now_ms()).encode())
            stat = self._store.blob.stat(key)
        self.beaten_ms = stat.modified_ms if stat is not None else self.beaten_ms
        self._beaten_s = now_s

    def end(self) -> None:
        """Remove the heartbeats. Safe to repeat."""
        self._store.delete([f"{self._prefix}{count:06}" for count in range(1, self._count + 1)])


def state_key(backup_id: str, shard: str) -> str:
    return f"backups/{backup_id}/{shard}.state"


def list_key(backup_id: str, shard: str) -> str:
    return f"backups/{backup_id}/{shard}.list"


def own_keys(backup: Backup) -> Iterator[str]:
    """The files of the backup itself, its manifest first."""
    yield _manifest_key(backup.id)
    for shard in backup.shards:
        yield shard.state.key
        yield shard.list.key


def _manifest_key(backup_id: str) -> str:
    if not backup_id or "/" in backup_id or not backup_id.isascii() or not backup_id.replace("-", "").isalnum():
        raise InvalidUsage(f"{backup_id!r:.100} is not the id of a backup; `persist backup list` shows them")
    return f"backups/{backup_id}/manifest.json"


def _backup(manifest: Mapping[str, Any], key: str) -> Backup:
    """Decode a manifest. Raises UpgradeNeeded, Corruption."""
    if type(manifest.get("v")) is int and manifest["v"] > VERSION:
        raise UpgradeNeeded(f"{key} has version {manifest['v']}; this persist supports {VERSION}: upgrade persist")
    body = {name: value for name, value in manifest.items() if name != "crc"}
    if zlib.crc32(_text(body)) != manifest.get("crc"):
        raise Corruption(f"{key} is damaged: its checksum differs")
    try:
        backup = convert(body, Backup)
        for shard in backup.shards:  # a pruning deletes what a manifest names
            own_files = state_key(backup.id, shard.shard_id), list_key(backup.id, shard.shard_id)
            is_of_name = family_of(shard.shard_id) == family_of(shard_id_of(check_shard_name(shard.name)))
            if not is_of_name or (shard.state.key, shard.list.key) != own_files:
                raise InvalidUsage("it names files that are not its own")
        if _manifest_key(backup.id) != key:
            raise InvalidUsage("it has the id of another one")
        return backup
    except (ValidationError, InvalidUsage) as error:
        raise Corruption(f"{key} is damaged: {error}") from error


def _text(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


def size_and_crc(data: bytes) -> tuple[int, int]:
    """The size and the CRC-32 of a blob."""
    return len(data), zlib.crc32(data)


# Pruning: backups that are too many or too old are deleted, then the blobs that no other backup names.

DELETED_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class KeepRule:
    """Which backups are kept: the newest `last`, those younger than `within_ms`, and always the newest one.

    `damaged`: backups with a damaged manifest are deleted; without the other options all others are kept.
    """

    last: int | None = None
    within_ms: int | None = None
    damaged: bool = False

    def check(self) -> None:
        """Raises InvalidUsage if it has no option, or `last` is invalid."""
        if self.last is None and self.within_ms is None and not self.damaged:
            raise InvalidUsage("give the backups to keep: --last or --within")
        if self.last is not None and self.last < 1:
            raise InvalidUsage(f"last is {self.last}; it must be at least 1")

    def of(self, backups: Sequence[Backup], now_ms: int) -> list[Backup]:
        """The backups that are kept, given all, oldest first."""
        if self.last is None and self.within_ms is None:
            return list(backups)
        newest = {backup.id for backup in backups[-max(1, self.last or 0) :]}
        if self.within_ms is not None:
            newest |= {backup.id for backup in backups if now_ms - backup.taken_ms < self.within_ms}
        return [backup for backup in backups if backup.id in newest]


@dataclass(frozen=True, slots=True)
class Pruned:
    """The result of a pruning: the deleted `backups`, and `blobs` of `size` bytes that no other one names."""

    backups: tuple[str, ...]
    blobs: int
    size: int


def prune(store: BackupStore, rule: KeepRule, *, dry_run: bool = False) -> Pruned:
    """Delete backups, and blobs that only they need. `dry_run`: only report.

    Remains of killed runs are deleted too. Blobs of kept backups are never deleted: if one of these cannot be read,
    nothing is deleted (Corruption). Safe to repeat. Raises Conflict: a backup is running.
    """
    rule.check()
    store.open(None)
    if dry_run:
        return _pruned(store, rule, None)
    with store.run(PRUNING) as run:
        return _pruned(store, rule, run)


def _pruned(store: BackupStore, rule: KeepRule, run: StoreRun | None) -> Pruned:
    """Prune; without a run nothing is deleted."""
    listed = store.listed()
    for unread in listed.unread:  # damaged ones are deleted below, with all leftover files
        if isinstance(unread.error, UpgradeNeeded):
            raise unread.error
        if not rule.damaged:
            raise Corruption(
                f"{unread.error.message}: nothing is deleted, since the blobs that it names are unknown. `persist "
                "backup prune --damaged` deletes such backups"
            )
    kept = rule.of(listed.backups, store.clock.now_ms())
    expired = [backup for backup in listed.backups if backup not in kept]
    named: set[str] = set()
    for backup in kept:
        for shard in backup.shards:
            named.update(store.sums(shard))
            if run is not None:
                run.beat()
    for backup in expired if run is not None else ():
        for key in own_keys(backup):  # manifests first: files without one belong to no backup, and are deleted below
            store.delete([key])
    blobs = size = 0
    unnamed_blobs = (stat for stat in store.blob.list(BLOBS) if stat.key.removeprefix(BLOBS) not in named)
    own = {key for backup in kept for key in own_keys(backup)}
    leftover_files = (stat for stat in store.blob.list("backups/") if stat.key not in own)
    with translated():
        while window := list(islice(unnamed_blobs, DELETED_AT_ONCE)):
            blobs, size = blobs + len(window), size + sum(stat.size for stat in window)
            if run is not None:
                run.beat()
                store.blob.delete([stat.key for stat in window])
        while run is not None and (window := list(islice(leftover_files, DELETED_AT_ONCE))):
            run.beat()
            store.blob.delete([stat.key for stat in window])
    deleted = [backup.id for backup in listed.unread] + [backup.id for backup in expired]
    return Pruned(tuple(deleted), blobs, size)
