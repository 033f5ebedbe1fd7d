"""Restoring: shards of a backup in a location that has no log of their names; and a backup that is looked at as one.

The blobs come first, each compared with its checksum as it is read. Then the log begins, at the State of the backup, in
one commit: so a shard is there whole, or not at all.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from blob import Blob, BlobNotFound, BlobStat
from blob.memory_blobs import MemoryBlob
from consensus.memory_logs import MemoryConsensus
from persist.client.connect import Client
from persist.client.contents_diff import Named
from persist.client.embedded import EmbeddedTransport
from persist.client.history_api import HandleSettings
from persist.client.optimistic_loop import check_open
from persist.client.rewrites import Restoring
from persist.client.stream_cuts import check_at_once
from persist.client.timestamps import datetime_text, instant_ms
from persist.client.transport import OneShard
from persist.commit.location import Location, LocationSettings
from persist.copies.backup_creation import Progress, Told
from persist.copies.backup_store import BLOBS, Backup, BackupStore, ShardBackup
from persist.copies.shard_facts import NOT_THERE, Fault, FaultKind
from persist.copies.state_rewrite import Renaming, copy_blobs
from persist.copies.throttled_blob import PacedBlob, check_rate
from persist.copies.verify import Depth, verified
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

NAMED_MAX = 5  # names that one message tells


@dataclass(frozen=True, slots=True)
class Choice:
    """Which shards of a backup come back: `names`, or those whose names begin with `prefix`; "" is all of them.

    `as_name`: the only one comes back under this name. `at`: with the contents that they had by this wall clock, where
    the backup has their history. `keeps_policies`: their policies of rows go on at once. Without it they are taken
    away, and somebody sets them again. `rate` and `at_once` are as for a backup. `ahead`: only the blobs are brought,
    and no shard begins, so that a later restore has little to send.
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
        """Raises InvalidUsage where that makes no sense."""
        if self.names and self.prefix:
            raise InvalidUsage("give the names of shards, or a prefix of names, not both")
        if self.ahead and self.at is not None:
            raise InvalidUsage("--ahead brings the blobs of the whole backup: give no wall clock with it")
        if self.as_name is not None:
            check_shard_name(self.as_name)
        if self.at is not None:
            instant_ms("at", self.at)
        check_rate(self.rate)
        check_at_once(self.at_once)


@dataclass(frozen=True, slots=True)
class ShardRestored:
    """A shard that is back, and its upper now. `sent` bytes were copied.

    `policy`: it had a policy of rows, which was taken away. `readers`: critical ones, which hold its history as before.
    `left`: an earlier run has brought it back, and it was written to since; it was left as it is. `upper` None: only
    its blobs were brought, ahead.
    """

    name: str
    upper: list[int] | None
    sent: int
    policy: bool
    readers: tuple[str, ...]
    left: bool


def chosen(store: BackupStore, at: datetime | None, backup_id: str | None) -> Backup:
    """The backup of this id; else the latest one, or the first that shows `at` or a later wall clock.

    Raises InvalidUsage (there is none), Corruption or UpgradeNeeded (the manifest of it, or of a later one).
    """
    if backup_id is not None:
        return store.backup(backup_id)
    listed = store.listed()
    if at is None:
        found = listed.latest
    else:
        at_ms = instant_ms("at", at)
        found = next((one for one in listed.backups if one.at_ms is not None and one.at_ms >= at_ms), None)
    if found is None:
        when = "" if at is None else f" that shows {datetime_text(at)} or a later wall clock"
        raise InvalidUsage(f"{store.blob.url} has no backup{when}; `persist backup list` shows them")
    return found


def restore(
    store: BackupStore, backup: Backup, location: Location, choice: Choice, told: Told = lambda progress: None
) -> list[ShardRestored]:
    """Bring shards of the backup back in a location. Nothing is changed in shards that are there.

    Repeating it after an error goes on: shards that are back already are left as they are. Raises InvalidUsage,
    UnknownShard (the backup has no such shard), Conflict (a name has a log there already), Corruption (something of the
    backup is missing or damaged; shards before it are back), NotReadable (the history does not go back to `at`, or an
    erasure is pending), UpperMismatch (a shard is closed, and cannot go back to `at`).
    """
    choice.check()
    wanted = _wanted(backup, choice)
    location.identity.check()
    if location.versions.format_version < backup.format_version:
        raise UpgradeNeeded(
            f"backup {backup.id} has format version {backup.format_version}, and the location "
            f"{location.versions.format_version}: switch that version on in the location first"
        )
    states = _Restoring(store, location, choice, backup, told)
    states.check_at(wanted)
    states.check_free(wanted)
    with ThreadPoolExecutor(choice.at_once, thread_name_prefix="persist-restore") as pool:
        states.progress = Progress(len(wanted))
        return [states.restored(shard, pool) for shard in wanted]


def _wanted(backup: Backup, choice: Choice) -> list[ShardBackup]:
    known = {shard.name: shard for shard in backup.shards}
    for name in choice.names:
        if name not in known:
            raise UnknownShard(f"backup {backup.id} has no shard {name!r:.300}; `persist backup show` names them")
    names = choice.names or tuple(name for name in known if name.startswith(choice.prefix))
    if not names:
        raise UnknownShard(f"backup {backup.id} has no shard whose name begins with {choice.prefix!r:.300}")
    wanted = [known[name] for name in dict.fromkeys(names)]
    if choice.as_name is not None and len(wanted) > 1:
        raise InvalidUsage(f"{len(wanted)} shards cannot all come back as {choice.as_name!r}; name one of them")
    return wanted


class _Restoring:
    def __init__(self, store: BackupStore, location: Location, choice: Choice, backup: Backup, told: Told) -> None:
        self._store = store
        self._location = location
        self._choice = choice
        self._backup = backup
        shown = choice.at is None or instant_ms("at", choice.at) == backup.at_ms
        self._at = None if shown else choice.at
        self._told = told
        self._blob = PacedBlob(store.blob, choice.rate, location.clock)
        self.progress = Progress(0)

    def check_free(self, wanted: Sequence[ShardBackup]) -> None:
        """Raises Conflict where a name has a log that this restore did not begin."""
        taken = []
        for shard in wanted:
            name = self._choice.as_name or shard.name
            with translated():
                head = self._location.consensus.head(name)
            if head is not None and not self._location.versions.is_begun(replace(self._state(shard), name=name)):
                taken.append(name)
        if taken:
            raise Conflict(
                f"{len(taken)} of these names are, or were, those of other shards in this location: "
                f"{', '.join(taken[:NAMED_MAX])}{', …' if len(taken) > NAMED_MAX else ''}. Restore them into another "
                "location, or leave them out"
            )

    def check_at(self, wanted: Sequence[ShardBackup]) -> None:
        """Raises NotReadable, UpperMismatch or ConstraintViolated where a shard of the backup cannot go back so far."""
        if self._at is None:
            return
        with opened(self._store, self._backup, [shard.name for shard in wanted]) as location:
            client = Client(EmbeddedTransport(location))
            refused: dict[str, NotReadable] = {}
            for shard in wanted:
                try:
                    self._check_goes_back(client, shard.name)
                except NotReadable as error:
                    refused[shard.name] = error
        if refused:
            first = next(iter(refused.values()))
            names = f"{', '.join(list(refused)[:NAMED_MAX])}{', …' if len(refused) > NAMED_MAX else ''}"
            others = "" if len(refused) == len(wanted) else f"; or name the other shards, all but {names}"
            raise NotReadable(first.message + others, **{**first.details, "shards": list(refused)[:NAMED_MAX]})

    def _check_goes_back(self, client: Client, name: str) -> None:
        """Raises also ConstraintViolated: a constraint was set later, which rows of that time break."""
        assert self._at is not None
        client.shard(name).snapshot(self._at).close()
        view = client.transport.view(name, ViewRequest(with_batches=False))
        check_open(name, view, "restored to an earlier time")
        if view.erasing:
            raise NotReadable(
                f"the backup of shard {name!r} has {view.erasing} erasures that are pending, and a time "
                "before them could bring their rows back; restore it without a wall clock, or from a backup "
                "that was made before them",
                as_of=[(view.upper.element or 0) - 1],
                since=view.upper.to_json(),
            )
        one, settings = OneShard(client.transport, view.shard_id), HandleSettings()
        to = Named.of("as_of", self._at, one, name, (0.0, settings.read.retry_s))
        try:
            Restoring.of(one, name, to, settings.write, settings.read).check()
        except ConstraintViolated as error:
            message = f"shard {name!r} of the backup cannot have its rows of that time: {error.message}"
            raise ConstraintViolated(message, **error.details) from error

    def restored(self, shard: ShardBackup, pool: ThreadPoolExecutor) -> ShardRestored:
        """Bring one shard back."""
        kept = self._state(shard)
        state = kept if self._choice.keeps_policies else without_policy(kept)
        policy = state is not kept
        if self._at is not None:
            state = without_feed(state)
        sums = self._store.sums(shard)
        renaming = None
        if self._choice.as_name is not None:
            version = self._location.versions.format_version
            renaming = Renaming(self._choice.as_name, version, lambda key: self._read(key, *sums[key]))
            state = renaming.state(state)
        sent = copy_blobs(self._location, self._read, sums, renaming, pool, self._put)
        if self._choice.ahead:
            self._tell(shards_done=1)
            return ShardRestored(state.name, None, sent, False, (), False)
        if not self._location.versions.begin(state):
            raise Conflict(f"shard {state.name!r} was made in this location meanwhile; it was left as it is")
        gone_back = self._gone_back(state, self._at)
        self._tell(shards_done=1)
        readers = tuple(reader.purpose or key for key, reader in state.critical_readers.items())
        upper = self._location.machine(state.name).refresh().upper.to_json()
        return ShardRestored(state.name, upper, sent, policy, readers, not gone_back)

    def _gone_back(self, state: State, at: datetime | None) -> bool:
        """Give the shard the contents of that wall clock (None: it has them). False: it has been written to already."""
        found = Client(EmbeddedTransport(self._location)).shard(state.name)
        if found.upper() != state.upper:
            return False
        if at is not None:
            found.restore(at)
        return True

    def _state(self, shard: ShardBackup) -> State:
        data = self._store.get(shard.state)
        state = decode_state(data, self._location.settings.build)
        if (state.name, str(state.shard_id), int(state.seqno)) != (shard.name, shard.shard_id, shard.seqno):
            raise Corruption(f"{shard.state.key} holds another State than the manifest says")
        return state

    def _read(self, key: str, size: int, crc: int) -> bytes:
        """A blob of the backup, which must be as it was."""
        with translated():
            data = self._blob.get(BLOBS + key)
        if (len(data), zlib.crc32(data)) != (size, crc):
            raise Corruption(f"{BLOBS}{key} in {self._store.blob.url} is damaged: its checksum differs")
        return data

    def _put(self, size: int) -> None:
        self._tell(blobs=1, sent=size)

    def _tell(self, shards_done: int = 0, blobs: int = 0, sent: int = 0) -> None:
        p = self.progress
        self.progress = Progress(p.shards, p.shards_done + shards_done, p.blobs + blobs, p.sent + sent)
        self._told(self.progress)


class _Shown(MemoryBlob):
    """The blobs of a backup, as those of a location. What is written stays in memory."""

    def __init__(self, blob: Blob) -> None:
        super().__init__("backup")
        self._backup = blob
        self._shows = False

    def show(self) -> None:
        """From now on the blobs of the backup are there."""
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
        found = super().stat(key) or self._backup.stat(BLOBS + key)
        return None if found is None else BlobStat(key, found.size, found.modified_ms)

    def list(self, prefix: str) -> Iterator[BlobStat]:
        own = {stat.key: stat for stat in super().list(prefix)}
        for stat in self._backup.list(BLOBS + prefix) if self._shows else ():
            key = stat.key.removeprefix(BLOBS)
            own[key] = BlobStat(key, stat.size, stat.modified_ms)
        return iter([own[key] for key in sorted(own)])


@contextmanager
def opened(store: BackupStore, backup: Backup, names: Sequence[str]) -> Iterator[Location]:
    """These shards of a backup as a location of their own, in this process's memory: nothing is written to the store.

    Raises Corruption: a State is missing or damaged.
    """
    shown = _Shown(store.blob)
    location = Location(
        shown,
        MemoryConsensus("backup"),
        settings=LocationSettings(compares_clock=False),
        clock=store.clock,
    )
    try:
        location.identity.check()  # binds the two, while both are empty
        shown.show()
        for name in names:
            shard = backup.shard(name)
            assert shard is not None
            location.versions.begin(decode_state(store.get(shard.state), location.settings.build))
        yield location
    finally:
        location.close()


# Whether a backup can be restored: it is opened as a location of its own, and checked as `persist check` does.


def checked_backup(store: BackupStore, backup: Backup, how: Depth) -> Iterator[tuple[ShardBackup, tuple[Fault, ...]]]:
    """Each shard of the backup, and what is wrong with it. Writes nothing.

    Its State can be read, its batches tile, every blob that it names is there with its size. With `deep` every byte is
    read and compared with its checksum, and every row decoded.
    """
    how.check()
    how = dataclasses.replace(how, alone=True)  # what it had borrowed is in the backup, whoever has lent it
    for shard in backup.shards:
        found: list[Fault] = []
        try:
            sums = store.sums(shard)
            with opened(store, backup, [shard.name]) as location:
                for result in verified(location, [shard.name], how):
                    found.extend(result.faults)
            known = {fault.key for fault in found}
            if how.deep:
                found.extend(fault for fault in _byte_faults(store, shard, sums, how) if fault.key not in known)
        except Corruption as error:
            found.append(Fault(shard.name, FaultKind.LOG, error.message))
        yield shard, tuple(dict.fromkeys(found))


def _byte_faults(
    store: BackupStore, shard: ShardBackup, sums: dict[str, tuple[int, int]], how: Depth
) -> Iterator[Fault]:
    """The blobs that are not parts, whose bytes nothing else has read."""
    blob = PacedBlob(store.blob, how.rate, store.clock)
    for key, (size, crc) in sums.items():
        if key.endswith(".parquet"):
            continue
        try:
            with translated_but_missing():
                data = blob.get(BLOBS + key)
        except BlobNotFound:
            yield Fault(shard.name, FaultKind.MISSING, f"the blob {key} {NOT_THERE}", key)
            continue
        if (len(data), zlib.crc32(data)) != (size, crc):
            yield Fault(shard.name, FaultKind.BLOB, f"the blob {key} is damaged: its checksum differs", key)
