"""Where backups lie: a blob store of their own, with as many backups as one keeps, which share blobs.

    backup.json                         that this store is for backups, and of which location
    backups/<id>/manifest.json          a backup; written last, so without it there is none
    backups/<id>/<shard>.state          the State of a shard as it is carried: a rollup
    backups/<id>/<shard>.list           the blobs that it names, with size and CRC-32
    blobs/<key>                         a blob of the location, under its own key
    running/<run>/<n>, pruning/<run>/<n>   who makes a backup now, and who prunes; a new one every minute

Blobs of one key are equal, so a backup sends only what is not there. A backup and a pruning must not run beside each
other: the one counts on blobs that the other deletes. Each first says that it runs, then looks for the other, and gives
way. So both may give way, and never do both go on. Who was killed is told by the store's own clock.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from msgspec import Struct, ValidationError, convert, to_builtins

from blob import Blob, BlobExists, BlobNotFound
from persist.commit.system import Clock
from persist.core.blob_keys import belongs_to
from persist.core.errors import Conflict, Corruption, InvalidUsage, UpgradeNeeded
from persist.core.ids import IdSource, ShardId, check_shard_name, family_of, shard_id_of
from persist.formats.store_errors import translated, translated_but_missing

VERSION = 1
MARKER = "backup.json"
BLOBS = "blobs/"
RUNNING, PRUNING = "running", "pruning"
BEAT_S = 60.0  # so often who runs says so
SILENT_MS = 30 * 60_000  # who has not said so for this long was killed
BACKUPS_MAX = 100_000  # that one store can list

Sums = dict[str, tuple[int, int]]  # key -> size, CRC-32
Times = list[int]  # a frontier


class Stored(Struct, frozen=True):
    """A blob of the backup's own."""

    key: str
    size: int
    crc: int


class ShardBackup(Struct, frozen=True):
    """One shard of a backup, as of its version `seqno`: times in `[since, upper)` can be read.

    It names `blobs` blobs of `size` bytes; of these `sent` bytes were sent for this backup.
    """

    name: str
    shard_id: str
    seqno: int
    since: Times
    upper: Times
    state: Stored
    list: Stored
    blobs: int
    size: int
    sent: int


class Backup(Struct, frozen=True):
    """A backup. `at_ms`: the one wall clock that its shards show; None: each shows its own latest version.

    `taken_ms` is when it began, by the clock of who made it. `format_version` is what a location needs to take it.
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
        """Bytes that it names. Several backups share them."""
        return sum(shard.size for shard in self.shards)

    @property
    def sent(self) -> int:
        """Bytes that were sent for it."""
        return sum(shard.sent for shard in self.shards)

    @property
    def shown_ms(self) -> int:
        """The wall clock that it shows, or else when it was taken."""
        return self.taken_ms if self.at_ms is None else self.at_ms

    def shard(self, name: str) -> ShardBackup | None:
        """That of this name, if it has one."""
        return next((shard for shard in self.shards if shard.name == name), None)

    def to_json(self) -> dict[str, Any]:
        """What the manifest says, without its checksum."""
        return {"v": VERSION, **to_builtins(self)}


@dataclass(frozen=True, slots=True)
class Unread:
    """A backup of which the manifest is damaged (Corruption), or of a later version (UpgradeNeeded)."""

    id: str
    why: Corruption | UpgradeNeeded


@dataclass(frozen=True, slots=True)
class Listed:
    """The backups of a store, the oldest first, and those that cannot be told of."""

    backups: tuple[Backup, ...]
    unread: tuple[Unread, ...]

    @property
    def latest(self) -> Backup | None:
        """The latest one. Raises Corruption, UpgradeNeeded: one that cannot be read is later, by its id."""
        last = self.backups[-1] if self.backups else None
        for unread in self.unread:
            if last is None or unread.id > last.id:
                instead = "" if last is None else f". The latest that can be read is {last.id}: give its id"
                raise type(unread.why)(f"{unread.why.message}{instead}")
        return last


class BackupStore:
    """The backups in one blob store. Thread-safe. Raises Unavailable, and Corruption where one is damaged."""

    def __init__(self, blob: Blob, clock: Clock, ids: IdSource) -> None:
        self.blob = blob
        self.clock = clock
        self._ids = ids

    def open(self, location: str | None) -> None:
        """Check that backups may be kept there, of this location (None: of any). Marks a store that is empty.

        Raises InvalidUsage: it is the store of a location, it has backups of another one, or it has something else.
        """
        with translated():
            try:
                found = self._json(MARKER)
            except BlobNotFound:
                self._mark(location)
                return
        if found.get("persist") != "backups":
            raise InvalidUsage(f"{self.blob.url} is no store of backups: its {MARKER} is of something else")
        if type(found.get("version")) is not int or found["version"] > VERSION:
            raise UpgradeNeeded(f"the backups in {self.blob.url} are of a later version than this persist knows")
        if location is not None and found.get("location") != location:
            raise InvalidUsage(
                f"{self.blob.url} has backups of location {found.get('location')}, and this is {location}: give each "
                "location a store, or a prefix, of its own"
            )

    def _mark(self, location: str | None) -> None:
        others = next(iter(self.blob.list("")), None)
        if others is not None:
            raise InvalidUsage(
                f"{self.blob.url} is no store of backups, and not empty: it has {others.key}. Give an empty one, or an "
                "empty prefix"
            )
        if location is None:
            raise InvalidUsage(f"{self.blob.url} has no backups: give the store that `persist backup create` wrote to")
        marker = {"persist": "backups", "version": VERSION, "location": location}
        try:
            self.blob.put(MARKER, _text(marker))
        except BlobExists:
            self.open(location)

    def listed(self) -> Listed:
        """All backups. One that cannot be read hides no other."""
        with translated():
            keys = [stat.key for stat in self.blob.list("backups/") if stat.key.endswith("/manifest.json")]
        if len(keys) > BACKUPS_MAX:
            raise InvalidUsage(f"{self.blob.url} has {len(keys)} backups, and {BACKUPS_MAX} can be listed: prune it")
        found: list[Backup] = []
        unread: list[Unread] = []
        for key in keys:
            try:
                with translated_but_missing():
                    found.append(_backup(self._json(key), key))
            except BlobNotFound:
                continue  # it was pruned since
            except (Corruption, UpgradeNeeded) as error:
                unread.append(Unread(key.split("/")[1], error))
        found.sort(key=lambda backup: (backup.taken_ms, backup.id))
        return Listed(tuple(found), tuple(unread))

    def backup(self, backup_id: str) -> Backup:
        """The backup of this id. Raises InvalidUsage: there is none; Corruption: its manifest is damaged."""
        key = _manifest_key(backup_id)
        try:
            with translated_but_missing():
                found = self._json(key)
        except BlobNotFound:
            raise InvalidUsage(
                f"{self.blob.url} has no backup {backup_id!r:.100}; `persist backup list` shows them"
            ) from None
        return _backup(found, key)

    def put_backup(self, backup: Backup) -> None:
        """Write the manifest: from then on the backup is there."""
        body = backup.to_json()
        self.put(_manifest_key(backup.id), _text({**body, "crc": zlib.crc32(_text(body))}))

    def put(self, key: str, data: bytes) -> Stored:
        """Write a blob of the backup's own."""
        with translated():
            self.blob.put(key, data)
        return Stored(key, len(data), zlib.crc32(data))

    def get(self, stored: Stored) -> bytes:
        """Its bytes, checked. Raises Corruption: it is missing, or damaged."""
        with translated():
            data = self.blob.get(stored.key)
        if (len(data), zlib.crc32(data)) != (stored.size, stored.crc):
            raise Corruption(f"{stored.key} in {self.blob.url} is damaged: its checksum differs")
        return data

    def sums(self, shard: ShardBackup) -> Sums:
        """The blobs that the shard names, with size and CRC-32."""
        try:
            found = {key: (size, crc) for key, size, crc in json.loads(zlib.decompress(self.get(shard.list)))}
            if not all(belongs_to(key, ShardId(shard.shard_id)) for key in found):
                raise ValueError("it names blobs of another shard")
            return found
        except (ValueError, TypeError, zlib.error) as error:
            raise Corruption(f"{shard.list.key} in {self.blob.url} cannot be read: {error}") from error

    def put_sums(self, key: str, sums: Sums) -> Stored:
        """Write them."""
        listed = [[key, size, crc] for key, (size, crc) in sorted(sums.items())]
        return self.put(key, zlib.compress(_text(listed), 1))

    def held(self, prefix: str) -> dict[str, int]:
        """The blobs of a location that are there, of which the keys begin so, with their sizes."""
        with translated():
            return {stat.key.removeprefix(BLOBS): stat.size for stat in self.blob.list(BLOBS + prefix)}

    def delete(self, keys: list[str]) -> None:
        """Delete these blobs, whole keys."""
        with translated():
            self.blob.delete(keys)

    def run(self, kind: str) -> StoreRun:
        """Say that a run of this kind goes on. Raises Conflict: one of the other kind does."""
        run = StoreRun(self, kind, self._ids.uuid7())
        run.beat()
        other = PRUNING if kind == RUNNING else RUNNING
        for found, silent_ms in self.runs(other, run).items():
            if silent_ms <= SILENT_MS:
                run.end()
                what = "a pruning" if other == PRUNING else "a backup"
                raise Conflict(
                    f"{what} of {self.blob.url} is under way ({found}); wait until it ends. One that was killed is "
                    f"passed over after {SILENT_MS // 60_000} minutes"
                )
        return run

    def runs(self, kind: str, of: StoreRun) -> dict[str, int]:
        """The runs of a kind, and for how many milliseconds each has been silent, by the store's clock."""
        found: dict[str, int] = {}
        with translated():
            for stat in self.blob.list(f"{kind}/"):
                name = stat.key.split("/")[1]
                silent_ms = max(0, of.beaten_ms - stat.modified_ms)
                found[name] = min(silent_ms, found.get(name, silent_ms))
        return found

    def _json(self, key: str) -> Mapping[str, Any]:
        try:
            found = json.loads(self.blob.get(key))
        except ValueError as error:
            raise Corruption(f"{key} in {self.blob.url} cannot be read: {error}") from error
        if not isinstance(found, dict):
            raise Corruption(f"{key} in {self.blob.url} is damaged: it is no object")
        return found


class StoreRun:
    """That a backup, or a pruning, goes on. `beat` says so again; `end`, or leaving its context, takes it away."""

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
        """Say that it goes on, if a minute has passed. Raises Conflict: it was silent so long that others went on."""
        clock, now_s = self._store.clock, self._store.clock.monotonic()
        if self._count and now_s - self._beaten_s < BEAT_S:
            return
        if self._count and (now_s - self._beaten_s) * 1000 > SILENT_MS // 2:
            raise Conflict(
                f"this run stood still for {now_s - self._beaten_s:.0f} s; begin it again: it goes on from here"
            )
        self._count += 1
        key = f"{self._prefix}{self._count:06}"
        with translated():
            self._store.blob.put(key, str(clock.now_ms()).encode())
            stat = self._store.blob.stat(key)
        self.beaten_ms = stat.modified_ms if stat is not None else self.beaten_ms
        self._beaten_s = now_s

    def end(self) -> None:
        """It has ended. Repeating it is safe."""
        self._store.delete([f"{self._prefix}{count:06}" for count in range(1, self._count + 1)])


def state_key(backup_id: str, shard: str) -> str:
    return f"backups/{backup_id}/{shard}.state"


def list_key(backup_id: str, shard: str) -> str:
    return f"backups/{backup_id}/{shard}.list"


def own_keys(backup: Backup) -> Iterator[str]:
    """What the backup names besides blobs of the location, its manifest first."""
    yield _manifest_key(backup.id)
    for shard in backup.shards:
        yield shard.state.key
        yield shard.list.key


def _manifest_key(backup_id: str) -> str:
    if not backup_id or "/" in backup_id or not backup_id.isascii() or not backup_id.replace("-", "").isalnum():
        raise InvalidUsage(f"{backup_id!r:.100} is no id of a backup; `persist backup list` shows them")
    return f"backups/{backup_id}/manifest.json"


def _backup(found: Mapping[str, Any], key: str) -> Backup:
    """The backup that a manifest tells. Raises UpgradeNeeded, Corruption."""
    if type(found.get("v")) is int and found["v"] > VERSION:
        raise UpgradeNeeded(f"{key} is of version {found['v']}; this persist knows {VERSION}: upgrade it")
    body = {name: value for name, value in found.items() if name != "crc"}
    if zlib.crc32(_text(body)) != found.get("crc"):
        raise Corruption(f"{key} is damaged: its checksum differs")
    try:
        backup = convert(body, Backup)
        if _manifest_key(backup.id) != key or not all(_is_own(shard, backup.id) for shard in backup.shards):
            raise InvalidUsage("it names what is not its own")
        return backup
    except (ValidationError, InvalidUsage) as error:
        raise Corruption(f"{key} is damaged: {error}") from error


def _is_own(shard: ShardBackup, backup_id: str) -> bool:
    """Whether these are the files of this shard in this backup: a pruning deletes what a manifest names."""
    keys = state_key(backup_id, shard.shard_id), list_key(backup_id, shard.shard_id)
    is_of_name = family_of(shard.shard_id) == family_of(shard_id_of(check_shard_name(shard.name)))
    return is_of_name and (shard.state.key, shard.list.key) == keys


def _text(body: object) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode()


# Pruning: backups that are too many or too old go, then the blobs that no other backup names.


DELETED_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class KeepRule:
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


def prune(store: BackupStore, kept: KeepRule, *, dry_run: bool = False) -> Pruned:
    """Delete backups, and what only they need. `dry_run`: tell what would go.

    What killed runs have left goes too. Nothing is deleted that a backup names that stays: where one of these cannot be
    read, nothing is deleted at all (Corruption). Repeating it is safe. Raises Conflict: a backup is under way.
    """
    kept.check()
    store.open(None)
    if dry_run:
        return _pruned(store, kept, None)
    with store.run(PRUNING) as run:
        return _pruned(store, kept, run)


def _pruned(store: BackupStore, kept: KeepRule, run: StoreRun | None) -> Pruned:
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


def _let_go(unread: Sequence[Unread], kept: KeepRule) -> list[str]:
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
