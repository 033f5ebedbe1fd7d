"""Making a backup: a hold on every shard, one wall clock for all of them, then what the store lacks is sent.

A shard is copied as of the last version that had the upper it had by that wall clock. Its hold keeps the log from there
on and all that these versions name, whoever merges and collects meanwhile. So writers go on, and nothing waits.
"""

from __future__ import annotations

import math
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice

from blob import BlobNotFound
from persist.client.arguments import checked
from persist.client.embedded import EmbeddedTransport
from persist.client.snapshot import ReadLease, ReadSettings
from persist.client.stream_cuts import check_at_once
from persist.client.timestamps import instant_text, resolved, shown_instant
from persist.commit.location import Location
from persist.copies.backup_store import (
    BLOBS,
    RUNNING,
    Backup,
    BackupStore,
    ShardBackup,
    Stored,
    StoreRun,
    Sums,
    list_key,
    state_key,
)
from persist.copies.state_rewrite import UNKNOWN, Renaming, blobs_of, carried
from persist.copies.throttled_blob import PacedBlob, check_rate
from persist.core.clock_index import point_after
from persist.core.errors import Corruption, InvalidUsage, PersistError, Unavailable, UnknownShard
from persist.core.frontier import Antichain
from persist.core.ids import check_shard_name
from persist.core.record import replace
from persist.core.state import State
from persist.formats.state_frames import encode_state
from persist.formats.store_errors import translated_but_missing

SHARDS_MAX = 100_000  # of one backup
GRID_MS_MAX = 60_000  # for so long a backup waits at most until the wall clock that it shows is over
SETTLES_S = 600.0  # clocks may be so far apart that it takes longer
KEPT_EVERY_S = 30.0  # how often holds are renewed, and a run says that it goes on
LEASE = ReadSettings(lease_ms=900_000)
PURPOSE = "backup"
TIMESTAMP, UPPER = "timestamp", "upper"


@dataclass(frozen=True, slots=True)
class Progress:
    """What was done so far: of `shards` shards `shards_done`, `blobs` sent, of `sent` bytes."""

    shards: int
    shards_done: int = 0
    blobs: int = 0
    sent: int = 0


Told = Callable[[Progress], object]


@dataclass(frozen=True, slots=True)
class BackupRequest:
    """Which backup: of the shards `names`, or of all whose names begin with `prefix`.

    `consistent`: `timestamp`, all show one wall clock; `upper`, each shows its own latest version. `rate`: read at most
    so many bytes a second of the location (None: as fast as it goes). `at_once`: shards at a time, and blobs.
    """

    names: tuple[str, ...] = ()
    prefix: str = ""
    consistent: str = TIMESTAMP
    rate: int | None = None
    at_once: int = 4

    def check(self) -> None:
        """Raises InvalidUsage where that makes no sense."""
        checked("prefix", self.prefix, str)
        if self.names and self.prefix:
            raise InvalidUsage("give the names of shards, or a prefix of names, not both")
        for name in self.names:
            check_shard_name(name)
        if self.consistent not in (TIMESTAMP, UPPER):
            raise InvalidUsage(f"consistent is {self.consistent!r:.100}; it must be '{TIMESTAMP}' or '{UPPER}'")
        check_rate(self.rate)
        check_at_once(self.at_once)


def back_up(
    location: Location, store: BackupStore, wanted: BackupRequest, told: Told = lambda progress: None
) -> Backup:
    """Make a backup of shards of the location. The store has it once this returns, and not before.

    Repeating it after an error is safe: what was sent is not sent again. Raises InvalidUsage, UnknownShard (a name is
    none), Conflict (the store is pruned now), Corruption (a blob of a shard is missing or damaged), Unavailable.
    """
    wanted.check()
    binding = location.identity.check()
    store.open(binding.location_id)
    with store.run(RUNNING) as run:
        return _Making(location, store, wanted, told, run).made(binding.location_id, binding.epoch)


@dataclass(frozen=True, slots=True)
class _Hold:
    """A hold on a shard, and how the shard was once it was taken."""

    name: str
    lease: ReadLease
    upper: Antichain
    incarnation: int
    walltime_ms: int
    mark_every_ms: int


@dataclass
class _Making:
    location: Location
    store: BackupStore
    wanted: BackupRequest
    told: Told
    run: StoreRun
    holds: dict[str, _Hold] = field(default_factory=dict)
    earlier: Backup | None = None
    progress: Progress = field(default_factory=lambda: Progress(0))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.transport = EmbeddedTransport(self.location)
        self.blob = PacedBlob(self.location.blob, self.wanted.rate, self.location.clock)
        # Two pools: a shard that waits for its blobs must not take their place.
        self.of_shards, self.of_blobs = (
            ThreadPoolExecutor(self.wanted.at_once, thread_name_prefix=f"persist-backup-{what}")
            for what in ("shards", "blobs")
        )

    def made(self, location_id: str, epoch: int) -> Backup:
        names = self._names()
        taken_ms = self.location.clock.now_ms()
        backup_id = f"{datetime.fromtimestamp(taken_ms / 1000, UTC):%Y%m%dT%H%M%SZ}-{self.location.ids.uuid7()[-8:]}"
        self.progress = Progress(len(names))
        self.earlier = next(reversed(self.store.listed().backups), None)
        try:
            with self._keeping():
                for _ in self.of_shards.map(self._hold, names):
                    pass
                held = [self.holds[name] for name in names if name in self.holds]
                self.progress = Progress(len(held))
                at_ms = self._instant(held) if self.wanted.consistent == TIMESTAMP else None
                copied = self.of_shards.map(lambda hold: self._copied(backup_id, hold, at_ms), held)
                shards = [shard for shard in copied if shard is not None]
                self.run.beat()
        finally:
            for pool in (self.of_blobs, self.of_shards):  # no shard goes on where another one has failed
                pool.shutdown(cancel_futures=True)
            for hold in self.holds.values():
                hold.lease.close()
        if not shards:
            raise InvalidUsage("there is no shard to back up: a backup needs one at least")
        version = self.location.versions.format_version
        backup = Backup(backup_id, location_id, epoch, version, taken_ms, at_ms, tuple(shards))
        self.store.put_backup(backup)
        return backup

    def _names(self) -> list[str]:
        if self.wanted.names:
            return sorted(set(self.wanted.names))
        known = self.location.all_names(self.wanted.prefix, with_dropped=False)
        names = list(islice(known, SHARDS_MAX + 1))
        if len(names) > SHARDS_MAX:
            raise InvalidUsage(f"a backup has at most {SHARDS_MAX} shards; make several, of longer prefixes")
        return names

    def _hold(self, name: str) -> None:
        """Take a hold on the shard; none where it went since it was listed."""
        try:
            lease = ReadLease.open(self.transport, name, None, PURPOSE, LEASE)
        except UnknownShard:
            if self.wanted.names:
                raise
            return
        s = self.location.machine(name).state()
        hold = _Hold(name, lease, s.upper, s.incarnation, s.walltime_ms, s.settings.mark_every_ms)
        with self.lock:
            self.holds[name] = hold

    def _instant(self, held: Iterable[_Hold]) -> int:
        """The wall clock that all shards show: on the grid of each, and beyond all that their holds begin with."""
        now_ms, every_ms = self.location.clock.now_ms(), 1
        for hold in held:
            now_ms, every_ms = max(now_ms, hold.walltime_ms), math.lcm(every_ms, hold.mark_every_ms)
            if every_ms > GRID_MS_MAX:
                raise InvalidUsage(
                    f"shard {hold.name!r} tells wall clocks by {hold.mark_every_ms} ms. With those of the others there "
                    f"is no common one within {GRID_MS_MAX // 1000} s: back them up apart, or each by its latest "
                    "version (--consistent upper)"
                )
        return point_after(now_ms, every_ms)

    def _copied(self, backup_id: str, hold: _Hold, at_ms: int | None) -> ShardBackup | None:
        """Send what is lacking of one shard. None: it was dropped meanwhile, and is left out."""
        try:
            found = self._sent(backup_id, self._state(hold, at_ms))
        except (BlobNotFound, PersistError) as error:
            if self._is_dropped(hold):
                return None
            if isinstance(error, BlobNotFound):
                hold.lease.check()  # Expired, where it has lapsed
                raise Corruption(
                    f"a blob that shard {hold.name!r} names is missing ({error}); `persist check` finds which are"
                ) from error
            raise
        hold.lease.close()
        with self.lock:
            del self.holds[hold.name]
        self._tell(shards_done=1)
        return found

    def _is_dropped(self, hold: _Hold) -> bool:
        state = self.location.versions.load(hold.name)
        return not self.wanted.names and (state is None or state.is_closed or state.incarnation != hold.incarnation)

    def _state(self, hold: _Hold, at_ms: int | None) -> State:
        name, upper = hold.name, hold.upper
        if at_ms is not None:
            upper = resolved(self.transport, name, shown_instant(at_ms), SETTLES_S, LEASE.retry_s).upper
            if upper < hold.upper:
                raise Unavailable(
                    f"shard {name!r} had {hold.upper} before {instant_text(at_ms)}, by which it should have {upper}: "
                    "clocks do not agree; look at them, then make the backup again"
                )
        return self.location.versions.before(name, hold.lease.seqno, lambda later: upper < later.upper)

    def _sent(self, backup_id: str, state: State) -> ShardBackup:
        """Send the blobs of this State that are not there yet, then the State itself."""
        ids, version = self.location.ids, self.location.versions.format_version
        goes = replace(carried(state, ids.uuid7()), loans={}, borrowed={})  # the copy has all of its blobs to itself
        with translated_but_missing():
            lies = blobs_of(goes, self.location.blob)
            renaming = Renaming.own(state, version, self.blob.get)  # what a clone has borrowed is copied as its own
            goes = renaming.state(goes) if state.borrowed else goes
        lent = {renaming.key(key): key for key in lies} if state.borrowed else {key: key for key in lies}
        named = {key: lies[old] for key, old in lent.items()}
        made = renaming.bundles
        named |= {key: (len(data), zlib.crc32(data)) for key, data in made.items()}
        shard = str(state.shard_id)
        there = self.store.held(f"{shard}/") if named else {}
        known = self._known(state.name)
        lacking = [key for key in named if key not in there or (key not in known and UNKNOWN in named[key])]
        sums: Sums = {key: known.get(key, named[key]) for key in named}
        sent = 0
        for key, (size, crc) in self.of_blobs.map(
            lambda key: (key, self._send(lent[key], key, made.get(key), named[key], key in there)), lacking
        ):
            sums[key] = size, crc
            sent += 0 if key in there else size
        for key, size in there.items():
            if key in sums and sums[key][0] != size:
                raise Corruption(
                    f"{BLOBS}{key} in {self.store.blob.url} has {size} bytes, not {sums[key][0]}: delete it"
                )
        listed = self.store.put_sums(list_key(backup_id, shard), sums)
        held: Stored = self.store.put(state_key(backup_id, shard), encode_state(goes, version))
        total = sum(size for size, _ in sums.values())
        since, upper = state.since.to_json(), state.upper.to_json()
        return ShardBackup(state.name, shard, int(goes.seqno), since, upper, held, listed, len(sums), total, sent)

    def _known(self, name: str) -> Sums:
        """The blobs of the shard in the backup before this one."""
        before = None if self.earlier is None else self.earlier.shard(name)
        return {} if before is None else self.store.sums(before)

    def _send(self, lies: str, key: str, made: bytes | None, told: tuple[int, int], is_there: bool) -> tuple[int, int]:
        """Copy one blob, or only look at it where it is there; its size and CRC-32. `made`: its bytes."""
        with translated_but_missing():
            data = self.blob.get(lies) if made is None else made
        found = len(data), zlib.crc32(data)
        if any(said not in (UNKNOWN, is_) for said, is_ in zip(told, found, strict=True)):
            raise Corruption(f"the blob {key} is damaged: its checksum differs; `persist check` says what can be done")
        if not is_there:
            self.store.put(BLOBS + key, data)
            self._tell(blobs=1, sent=len(data))
        return found

    def _tell(self, shards_done: int = 0, blobs: int = 0, sent: int = 0) -> None:
        with self.lock:
            p = self.progress
            self.progress = Progress(p.shards, p.shards_done + shards_done, p.blobs + blobs, p.sent + sent)
        self.told(self.progress)

    @contextmanager
    def _keeping(self) -> Iterator[None]:
        """Renew the holds in the background, and say that the run goes on."""
        ended = threading.Event()

        def keep() -> None:
            while not ended.wait(KEPT_EVERY_S):
                with self.lock:
                    keeps = [self.run.beat, *(hold.lease.keep for hold in self.holds.values())]
                for one in keeps:
                    with suppress(PersistError):  # found by who copies: a blob is gone, or the run stood still
                        one()

        keeper = threading.Thread(target=keep, name="persist-backup-keeper", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            ended.set()
            keeper.join()
