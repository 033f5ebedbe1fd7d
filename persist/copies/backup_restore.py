"""Restore of a backup: shards in a location that has no log with their names; and a backup opened as a location.

The blobs are copied first, each verified by its checksum. Then the log begins with the State of the backup, in one
commit: so a shard is restored completely, or not at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from blob import Blob, BlobNotFound, BlobStat
from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.client.client import Client
from persist.client.contents_diff import NamedTime
from persist.client.embedded import EmbeddedTransport
from persist.client.many_shards import check_at_once
from persist.client.optimistic_loop import check_open
from persist.client.read_leases import HandleSettings
from persist.client.restore_and_truncate import RestoreOperation
from persist.client.timestamps import datetime_text, instant_ms
from persist.client.transport import OneShard
from persist.commit.location import Location, LocationSettings
from persist.copies.backup_creation import ProgressCounter, ReportProgress
from persist.copies.backup_store import BLOBS, Backup, BackupStore, ShardBackup, size_and_crc
from persist.copies.shard_facts import NAMED_MAX, NOT_THERE, Fault, FaultKind, first_names
from persist.copies.state_rewrite import Renaming, copy_blobs
from persist.copies.throttled_blob import PacedBlob, check_rate
from persist.copies.verify import Depth, verify_shards
from persist.core.errors import (
    Conflict,
    ConstraintViolated,
    Corruption,
    InvalidUsage,
    NotReadable,
    UnknownShard,
    UpgradeNeeded,
)
from persist.core.ids import check_shard_name
from persist.core.record import replace
from persist.core.shard_view import ViewRequest
from persist.core.state import State
from persist.core.transitions.lifecycle import without_feed, without_policy
from persist.formats.state_frames import decode_state
from persist.formats.store_errors import translated, translated_but_missing


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """Which shards of a backup are restored: `names`, or those whose names begin with `prefix`; "" is all of them.

    `as_name`: the only shard gets this name. `at`: the contents as of this wall clock, if the backup has their history.
    `keeps_policies`: keep row retention policies, which apply at once; otherwise they are removed, and can be set
    again. `rate` and `at_once` are as for a backup. `ahead`: only copy the blobs and create no shard, so that a later
    restore is short.
    """

    names: tuple[str, ...] = ()
    prefix: str = ""
    as_name: str | None = None
    at: datetime | None = None
    keeps_policies: bool = False
    rate: int | None = None
    at_once: int = 4
    ahead: bool = False

    def check(self) -> None:
        """Raises InvalidUsage if a value is invalid."""
        if self.names and self.prefix:
            raise InvalidUsage("give the names of shards, or a prefix of names, not both")
        if self.ahead and self.at is not None:
            raise InvalidUsage("--ahead copies the blobs of the whole backup: leave out the wall clock")
        if self.as_name is not None:
            check_shard_name(self.as_name)
        if self.at is not None:
            instant_ms("at", self.at)
        check_rate(self.rate)
        check_at_once(self.at_once)


@dataclass(frozen=True, slots=True)
class ShardRestored:
    """A restored shard, and its upper now. `sent` bytes were copied.

    `policy`: its row retention policy was removed. `readers`: critical ones, which hold its history as before. `left`:
    an earlier run had restored it; it was left unchanged, with all that was changed since. `upper` None: only its blobs
    were copied, ahead.
    """

    name: str
    upper: list[int] | None
    sent: int
    policy: bool
    readers: tuple[str, ...]
    left: bool

    @classmethod
    def of(cls, location: Location, state: State, sent: int, *, has_policy: bool, left: bool) -> ShardRestored:
        """For a shard whose log began with `state`."""
        readers = tuple(reader.purpose or key for key, reader in state.critical_readers.items())
        upper = location.machine(state.name).refresh().upper.to_json()
        return cls(state.name, upper, sent, has_policy, readers, left)


def check_format_version(location: Location, what: str, version: int) -> None:
    """Raise UpgradeNeeded if the location has an earlier format version."""
    if location.versions.format_version < version:
        raise UpgradeNeeded(
            f"{what} has format version {version}, and the location {location.versions.format_version}: upgrade the "
            "location first"
        )


def begin_shard(location: Location, state: State) -> None:
    """Begin a log with this State. Raises Conflict: another process has begun one meanwhile."""
    if not location.versions.begin(state):
        raise Conflict(f"shard {state.name!r} was created in this location meanwhile; it was left unchanged")


def select_backup(store: BackupStore, at: datetime | None, backup_id: str | None) -> Backup:
    """The backup with this id; else the latest one, or the first that shows `at` or a later wall clock.

    Raises InvalidUsage (there is none), Corruption or UpgradeNeeded (its manifest, or that of a later backup).
    """
    if backup_id is not None:
        return store.backup(backup_id)
    listed = store.listed()
    if at is None:
        backup = listed.latest
    else:
        at_ms = instant_ms("at", at)
        backup = next((each for each in listed.backups if each.at_ms is not None and each.at_ms >= at_ms), None)
    if backup is None:
        when = "" if at is None else f" that shows {datetime_text(at)} or a later wall clock"
        raise InvalidUsage(f"{store.blob.url} has no backup{when}; `persist backup list` shows them")
    return backup


def restore(
    store: BackupStore,
    backup: Backup,
    location: Location,
    request: RestoreRequest,
    report: ReportProgress = lambda progress: None,
) -> list[ShardRestored]:
    """Restore shards of the backup into a location. Existing shards are not changed.

    Repeating it after an error continues it: shards that are restored already are left unchanged. Raises InvalidUsage,
    UnknownShard (the backup has no such shard), Conflict (a name is in use), Corruption (part of the backup is missing
    or damaged; the shards before it are restored), NotReadable (the history does not reach back to `at`, or an erasure
    is pending), UpperMismatch (a shard is closed, and cannot be restored to `at`).
    """
    return select_shards(store, backup, request).restore(location, report)


def select_shards(store: BackupStore, backup: Backup, request: RestoreRequest) -> RestorePlan:
    """Find the shards in the backup, and check that they can be restored to the wall clock of the request.

    Needs no location, so that a request that is refused does not create one. Raises what `restore` raises for a backup.
    """
    request.check()
    wanted = _wanted(backup, request)
    shows_all = request.at is None or instant_ms("at", request.at) == backup.at_ms
    restore_plan = RestorePlan(store, backup, request, tuple(wanted), None if shows_all else request.at)
    restore_plan.check_at()
    return restore_plan


def _wanted(backup: Backup, request: RestoreRequest) -> list[ShardBackup]:
    shards = {shard.name: shard for shard in backup.shards}
    for name in request.names:
        if name not in shards:
            raise UnknownShard(f"backup {backup.id} has no shard {name!r:.300}; `persist backup show` lists them")
    names = request.names or tuple(name for name in shards if name.startswith(request.prefix))
    if not names:
        raise UnknownShard(f"backup {backup.id} has no shard whose name begins with {request.prefix!r:.300}")
    wanted = [shards[name] for name in dict.fromkeys(names)]
    if request.as_name is not None and len(wanted) > 1:
        raise InvalidUsage(f"{len(wanted)} shards cannot all be restored as {request.as_name!r}; name one of them")
    return wanted


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """The shards `wanted` of a backup. `at`: the wall clock to restore them to; None: the one of the backup."""

    store: BackupStore
    backup: Backup
    request: RestoreRequest
    wanted: tuple[ShardBackup, ...]
    at: datetime | None

    def restore(self, location: Location, report: ReportProgress = lambda progress: None) -> list[ShardRestored]:
        """Restore the shards into a location; see `restore`."""
        location.identity.check()
        check_format_version(location, f"backup {self.backup.id}", self.backup.format_version)
        restoring = _Restore(self, location, report)
        restoring.check_free()
        with ThreadPoolExecutor(self.request.at_once, thread_name_prefix="persist-restore") as pool:
            return [restoring.restore_shard(shard, pool) for shard in self.wanted]

    def check_at(self) -> None:
        """Raise NotReadable, UpperMismatch or ConstraintViolated if a shard cannot be restored to that wall clock."""
        if self.at is None:
            return
        with open_backup(self.store, self.backup, [shard.name for shard in self.wanted]) as location:
            client = Client(EmbeddedTransport(location))
            refused: dict[str, NotReadable] = {}
            for shard in self.wanted:
                try:
                    self._check_goes_back(client, shard.name)
                except NotReadable as error:
                    refused[shard.name] = error
        if refused:
            first = next(iter(refused.values()))
            names = first_names(list(refused))
            others = "" if len(refused) == len(self.wanted) else f"; or restore only the other shards, all but {names}"
            raise NotReadable(first.message + others, **{**first.details, "shards": list(refused)[:NAMED_MAX]})

    def _check_goes_back(self, client: Client, name: str) -> None:
        """Also raises ConstraintViolated: rows of that time violate a constraint that was set later."""
        assert self.at is not None
        client.shard(name).snapshot(self.at).close()
        view = client.transport.view(name, ViewRequest(with_batches=False))
        check_open(name, view, "restored to an earlier time")
        if view.erasing:
            raise NotReadable(
                f"the backup of shard {name!r} has {view.erasing} pending erasures, and an earlier time could "
                "restore their rows; restore it without a wall clock, or from a backup that was made before them",
                as_of=[(view.upper.element or 0) - 1],
                since=view.upper.to_json(),
            )
        transport, settings = OneShard(client.transport, view.shard_id), HandleSettings()
        to = NamedTime.of("as_of", self.at, transport, name, (0.0, settings.read.retry_s))
        try:
            RestoreOperation.of(transport, name, settings, to).check()
        except ConstraintViolated as error:
            message = f"shard {name!r} of the backup cannot have its rows of that time: {error.message}"
            raise ConstraintViolated(message, **error.details) from error


class _Restore:
    def __init__(self, planned: RestorePlan, location: Location, report: ReportProgress) -> None:
        self._plan = planned
        self._location = location
        self._request = planned.request
        self._at = planned.at
        self._blob = PacedBlob(planned.store.blob, planned.request.rate, location.clock)
        self._counter = ProgressCounter(len(planned.wanted), report)
        self._restored_before: set[str] = set()

    def check_free(self) -> None:
        """Raise Conflict if a name has a log that this restore did not begin."""
        names_in_use = []
        for shard in self._plan.wanted:
            name = self._request.as_name or shard.name
            with translated():
                head = self._location.consensus.head(name)
            if head is None:
                continue
            if self._location.versions.is_begun(replace(self._state(shard), name=name)):
                self._restored_before.add(name)
            else:
                names_in_use.append(name)
        if names_in_use:
            raise Conflict(
                f"{len(names_in_use)} of these names are, or were, in use in this location: "
                f"{first_names(names_in_use)}. Restore them into another location, or leave them out"
            )

    def restore_shard(self, shard: ShardBackup, pool: ThreadPoolExecutor) -> ShardRestored:
        original = self._state(shard)
        state = original if self._request.keeps_policies else without_policy(original)
        has_policy = state is not original
        if self._at is not None:
            state = without_feed(state)
        sums = self._plan.store.sums(shard)
        renaming = None
        if self._request.as_name is not None:
            version = self._location.versions.format_version
            renaming = Renaming(self._request.as_name, version, lambda key: self._read(key, *sums[key]))
            state = renaming.state(state)
        count = self._counter.add
        sent = copy_blobs(self._location, self._read, sums, renaming, pool, lambda size: count(blobs=1, sent=size))
        if self._request.ahead:
            self._counter.add(shards_done=1)
            return ShardRestored(state.name, None, sent, False, (), False)
        begin_shard(self._location, state)
        shard_handle = Client(EmbeddedTransport(self._location)).shard(state.name)
        was_written_to = shard_handle.upper() != state.upper  # since an earlier run restored it
        if self._at is not None and not was_written_to:
            shard_handle.restore(self._at)
        is_left = was_written_to or (self._at is None and state.name in self._restored_before)
        self._counter.add(shards_done=1)
        return ShardRestored.of(self._location, state, sent, has_policy=has_policy, left=is_left)

    def _state(self, shard: ShardBackup) -> State:
        data = self._plan.store.get(shard.state)
        state = decode_state(data, self._location.settings.build)
        if (state.name, str(state.shard_id), int(state.seqno)) != (shard.name, shard.shard_id, shard.seqno):
            raise Corruption(f"{shard.state.key} holds another State than the manifest says")
        return state

    def _read(self, key: str, size: int, crc: int) -> bytes:
        """Read a blob of the backup, and verify it."""
        with translated():
            data = self._blob.get(BLOBS + key)
        if size_and_crc(data) != (size, crc):
            raise Corruption(f"{BLOBS}{key} in {self._plan.store.blob.url} is damaged: its checksum differs")
        return data


class _OverlayBlob(MemoryBlob):
    """The blobs of a backup as those of a location. Writes stay in memory."""

    def __init__(self, blob: Blob) -> None:
        super().__init__("backup")
        self._backup = blob
        self._shows = False

    def show(self) -> None:
        """Show the blobs of the backup from now on."""
        self._shows = True

    def get(self, key: str) -> bytes:
        try:
            return super().get(key)
        except BlobNotFound:
            return self._backup.get(BLOBS + key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if super().stat(key) is not None:
            return super().get_range(key, start, length)
        return self._backup.get_range(BLOBS + key, start, length)

    def stat(self, key: str) -> BlobStat | None:
        stat = super().stat(key) or self._backup.stat(BLOBS + key)
        return None if stat is None else BlobStat(key, stat.size, stat.modified_ms)

    def list(self, prefix: str) -> Iterator[BlobStat]:
        own = {stat.key: stat for stat in super().list(prefix)}
        for stat in self._backup.list(BLOBS + prefix) if self._shows else ():
            key = stat.key.removeprefix(BLOBS)
            own[key] = BlobStat(key, stat.size, stat.modified_ms)
        return iter([own[key] for key in sorted(own)])


@contextmanager
def open_backup(store: BackupStore, backup: Backup, names: Sequence[str]) -> Iterator[Location]:
    """Open these shards of a backup as a location in memory. Nothing is written to the store.

    Raises Corruption: a State is missing or damaged.
    """
    shown = _OverlayBlob(store.blob)
    location = Location(
        shown, MemoryConsensus("backup"), settings=LocationSettings(compares_clock=False), clock=store.clock
    )
    try:
        location.identity.check()  # binds the two stores while both are empty
        shown.show()
        for name in names:
            shard = backup.shard(name)
            assert shard is not None
            location.versions.begin(decode_state(store.get(shard.state), location.settings.build))
        yield location
    finally:
        location.close()


# Verification of a backup, as `persist check` does, of a location in memory.


def verify_backup(store: BackupStore, backup: Backup, depth: Depth) -> Iterator[tuple[ShardBackup, tuple[Fault, ...]]]:
    """The shards of the backup with their faults. Writes nothing.

    The State must be readable, its batches must tile, and every blob that it names must exist with its size. With
    `deep` every byte is read and compared with its checksum, and every row is decoded.
    """
    depth.check()
    depth = dataclasses.replace(depth, alone=True)  # borrowed blobs are in the backup, whatever their owner says
    for shard in backup.shards:
        faults: list[Fault] = []
        try:
            sums = store.sums(shard)
            with open_backup(store, backup, [shard.name]) as location:
                faults = [fault for result in verify_shards(location, [shard.name], depth) for fault in result.faults]
            known = {fault.key for fault in faults}
            if depth.deep:
                faults.extend(fault for fault in _byte_faults(store, shard, sums, depth) if fault.key not in known)
        except Corruption as error:
            faults.append(Fault(shard.name, FaultKind.LOG, error.message))
        yield shard, tuple(dict.fromkeys(faults))


def _byte_faults(
    store: BackupStore, shard: ShardBackup, sums: dict[str, tuple[int, int]], depth: Depth
) -> Iterator[Fault]:
    """The blobs that are not parts, whose bytes were not read yet."""
    blob = PacedBlob(store.blob, depth.rate, store.clock)
    for key, (size, crc) in sums.items():
        if key.endswith(".parquet"):
            continue
        try:
            with translated_but_missing():
                data = blob.get(BLOBS + key)
        except BlobNotFound:
            yield Fault(shard.name, FaultKind.MISSING, f"the blob {key} {NOT_THERE}", key)
            continue
        if size_and_crc(data) != (size, crc):
            yield Fault(shard.name, FaultKind.BLOB, f"the blob {key} is damaged: its checksum differs", key)
