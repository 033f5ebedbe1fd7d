"""Creation of a backup: a hold on every shard, one wall clock for all, then the blobs that the store lacks.

A shard is backed up as of the last version with the upper it had by that wall clock. Its hold retains the log from
there on and all blobs that these versions name, while merges and collections continue. Writers are not blocked.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice

from blob import BlobNotFound
from persist.client.arguments import checked
from persist.client.client import Client
from persist.client.embedded import EmbeddedTransport
from persist.client.many_shards import check_at_once
from persist.client.snapshot import ReadLease, ReadSettings
from persist.client.timestamps import instant_text, resolve_time, to_datetime
from persist.commit.location import Location
from persist.copies.backup_store import (
    BLOBS,
    RUNNING,
    Backup,
    BackupStore,
    ShardBackup,
    StoreRun,
    Sums,
    list_key,
    size_and_crc,
    state_key,
)
from persist.copies.state_rewrite import UNKNOWN, Renaming, blobs_of, to_carried
from persist.copies.throttled_blob import PacedBlob, check_rate
from persist.core.clock_index import point_after
from persist.core.errors import Corruption, InvalidUsage, PersistError, Unavailable, UnknownShard, shown
from persist.core.frontier import Antichain
from persist.core.ids import check_shard_name
from persist.core.record import replace
from persist.core.state import State
from persist.formats.state_frames import encode_state
from persist.formats.store_errors import translated_but_missing

SHARDS_MAX = 100_000  # of one backup
GRID_MS_MAX = 60_000  # the longest wait until the wall clock of a backup has passed
SETTLES_S = 600.0  # the longest wait for clocks that differ
KEPT_EVERY_S = 30.0  # interval of renewing holds and the marker of the run
LEASE = ReadSettings(lease_ms=900_000)
PURPOSE = "backup"
TIMESTAMP, UPPER = "timestamp", "upper"


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress so far: `shards_done` of `shards` shards, `blobs` sent, with `sent` bytes in total."""

    shards: int
    shards_done: int = 0
    blobs: int = 0
    sent: int = 0


ReportProgress = Callable[[Progress], object]


class ProgressCounter:
    """Adds up progress and reports it. Thread-safe."""

    def __init__(self, shards: int, report: ReportProgress) -> None:
        self._progress = Progress(shards)
        self._report = report
        self._lock = threading.Lock()

    def add(self, shards_done: int = 0, blobs: int = 0, sent: int = 0) -> None:
        with self._lock:
            p = self._progress
            self._progress = Progress(p.shards, p.shards_done + shards_done, p.blobs + blobs, p.sent + sent)
        self._report(self._progress)


@dataclass(frozen=True, slots=True)
class BackupRequest:
    """A backup of the shards `names`, or of all whose names begin with `prefix`.

    `consistent`: `timestamp`, all show one wall clock; `upper`, each shows its own latest version. `rate`: read at most
    so many bytes a second from the location (None: unlimited). `at_once`: concurrent shards, and blobs.
    """

    names: tuple[str, ...] = ()
    prefix: str = ""
    consistent: str = TIMESTAMP
    rate: int | None = None
    at_once: int = 4

    def check(self) -> None:
        """Raises InvalidUsage if a value is invalid."""
        checked("prefix", self.prefix, str)
        if self.names and self.prefix:
            raise InvalidUsage("give the names of shards, or a prefix of names, not both")
        for name in self.names:
            check_shard_name(name)
        if self.consistent not in (TIMESTAMP, UPPER):
            raise InvalidUsage(f"consistent is {shown(self.consistent)}; it must be '{TIMESTAMP}' or '{UPPER}'")
        check_rate(self.rate)
        check_at_once(self.at_once)


def back_up(
    location: Location, store: BackupStore, request: BackupRequest, report: ReportProgress = lambda progress: None
) -> Backup:
    """Back up shards of the location. The backup exists once this returns, and not before.

    Safe to repeat after an error: blobs that were sent are not sent again. Raises InvalidUsage, UnknownShard (a name
    does not exist), Conflict (the store is being pruned), Corruption (a blob is missing or damaged), Unavailable.
    """
    request.check()
    binding = location.identity.check()
    check_shards(location, request)
    store.open(binding.location_id)
    with store.run(RUNNING) as run:
        return _BackupRun(location, store, request, report, run).make(binding.location_id, binding.epoch)


def check_shards(location: Location, request: BackupRequest) -> None:
    """Raise UnknownShard if a named shard does not exist, and InvalidUsage if there is none at all."""
    client = Client(EmbeddedTransport(location))
    for name in request.names:
        client.shard(name)
    if not request.names and next(iter(location.all_names(request.prefix, with_dropped=False)), None) is None:
        raise InvalidUsage("there is no shard to back up")


@dataclass(frozen=True, slots=True)
class _Hold:
    """A hold on a shard, and the state of the shard when it was taken."""

    name: str
    lease: ReadLease
    upper: Antichain
    incarnation: int
    walltime_ms: int
    mark_every_ms: int


@dataclass
class _BackupRun:
    location: Location
    store: BackupStore
    request: BackupRequest
    report: ReportProgress
    run: StoreRun
    holds: dict[str, _Hold] = field(default_factory=dict)
    earlier: Backup | None = None
    counter: ProgressCounter = field(init=False)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.transport = EmbeddedTransport(self.location)
        self.blob = PacedBlob(self.location.blob, self.request.rate, self.location.clock)
        # Two pools: shards that wait for their blobs must not occupy the threads of these blobs.
        self.of_shards = ThreadPoolExecutor(self.request.at_once, thread_name_prefix="persist-backup-shards")
        self.of_blobs = ThreadPoolExecutor(self.request.at_once, thread_name_prefix="persist-backup-blobs")

    def make(self, location_id: str, epoch: int) -> Backup:
        names = sorted(set(self.request.names))
        if not names:
            known = self.location.all_names(self.request.prefix, with_dropped=False)
            names = list(islice(known, SHARDS_MAX + 1))
        if len(names) > SHARDS_MAX:
            raise InvalidUsage(f"a backup has at most {SHARDS_MAX} shards; make several, with longer prefixes")
        taken_ms = self.location.clock.now_ms()
        backup_id = f"{datetime.fromtimestamp(taken_ms / 1000, UTC):%Y%m%dT%H%M%SZ}-{self.location.ids.uuid7()[-8:]}"
        self.earlier = next(reversed(self.store.listed().backups), None)
        try:
            with self._renewing_holds():
                list(self.of_shards.map(self._hold, names))
                holds = [self.holds[name] for name in names if name in self.holds]
                self.counter = ProgressCounter(len(holds), self.report)
                at_ms = self._instant(holds) if self.request.consistent == TIMESTAMP else None
                copied = self.of_shards.map(lambda hold: self._back_up_shard(backup_id, hold, at_ms), holds)
                shards = [shard for shard in copied if shard is not None]
                self.run.beat()
        finally:
            for pool in (self.of_blobs, self.of_shards):  # after a failure the other shards are not continued
                pool.shutdown(cancel_futures=True)
            for hold in self.holds.values():
                hold.lease.close()
        if not shards:
            raise InvalidUsage("there is no shard to back up")
        version = self.location.versions.format_version
        backup = Backup(backup_id, location_id, epoch, version, taken_ms, at_ms, tuple(shards))
        self.store.put_backup(backup)
        return backup

    def _hold(self, name: str) -> None:
        """Take a hold on the shard, unless it was dropped since it was listed."""
        try:
            lease = ReadLease.open(self.transport, name, None, PURPOSE, LEASE)
        except UnknownShard:
            if self.request.names:
                raise
            return
        state = self.location.machine(name).state()
        hold = _Hold(name, lease, state.upper, state.incarnation, state.walltime_ms, state.settings.mark_every_ms)
        with self.lock:
            self.holds[name] = hold

    def _instant(self, holds: Iterable[_Hold]) -> int:
        """A wall clock that all shards can show: on the grid of each, and after the versions of all holds."""
        now_ms, every_ms = self.location.clock.now_ms(), 1
        for hold in holds:
            now_ms, every_ms = max(now_ms, hold.walltime_ms), math.lcm(every_ms, hold.mark_every_ms)
            if every_ms > GRID_MS_MAX:
                raise InvalidUsage(
                    f"shard {hold.name!r} records wall clocks every {hold.mark_every_ms} ms. No instant within "
                    f"{GRID_MS_MAX // 1000} s is common to all shards: back them up separately, or each as of its "
                    "latest version (--consistent upper)"
                )
        return point_after(now_ms, every_ms)

    def _back_up_shard(self, backup_id: str, hold: _Hold, at_ms: int | None) -> ShardBackup | None:
        """Send the missing blobs of one shard. None: it was dropped meanwhile, and is omitted."""
        try:
            shard_backup = self._send_shard(backup_id, self._state(hold, at_ms))
        except (BlobNotFound, PersistError) as error:
            now = self.location.versions.load(hold.name)
            is_dropped = now is None or now.is_closed or now.incarnation != hold.incarnation
            if is_dropped and not self.request.names:
                return None
            if isinstance(error, BlobNotFound):
                hold.lease.check()  # raises Expired if it has lapsed
                what = f"a blob that shard {hold.name!r} names is missing ({error})"
                raise Corruption(f"{what}; see `persist check`") from error
            raise
        hold.lease.close()
        with self.lock:
            del self.holds[hold.name]
        self.counter.add(shards_done=1)
        return shard_backup

    def _state(self, hold: _Hold, at_ms: int | None) -> State:
        name, upper = hold.name, hold.upper
        if at_ms is not None:
            upper = resolve_time(self.transport, name, to_datetime(at_ms), SETTLES_S, LEASE.retry_s).upper
            if upper < hold.upper:
                raise Unavailable(
                    f"shard {name!r} had {hold.upper} before {instant_text(at_ms)}, when it should have had {upper}: "
                    "clocks differ; synchronize them, then make the backup again"
                )

        def is_later(state: State) -> bool:  # a closed shard that was dropped since has the same upper
            return upper < state.upper or (hold.incarnation, False) != (state.incarnation, state.is_closed)

        return self.location.versions.before(name, hold.lease.seqno, is_later)

    def _send_shard(self, backup_id: str, state: State) -> ShardBackup:
        """Send the blobs of this State that are not stored yet, then the State itself."""
        ids, version = self.location.ids, self.location.versions.format_version
        carried = replace(to_carried(state, ids.uuid7()), loans={}, borrowed={})  # the copy has blobs of its own
        with translated_but_missing():
            source_sums = blobs_of(carried, self.location.blob)
            renaming = Renaming(state.name, version, self.blob.get, state)
            carried = renaming.state(carried) if state.borrowed else carried
        bundles = renaming.bundles
        sources = {renaming.key(key) if state.borrowed else key: key for key in source_sums}
        expected = {key: source_sums[source] for key, source in sources.items()}
        expected |= {key: size_and_crc(data) for key, data in bundles.items()}
        shard = str(state.shard_id)
        stored = self.store.held(f"{shard}/") if expected else {}
        earlier = None if self.earlier is None else self.earlier.shard(state.name)
        known = {} if earlier is None else self.store.sums(earlier)
        to_send = [key for key in expected if key not in stored or (key not in known and UNKNOWN in expected[key])]
        sums: Sums = {key: known.get(key, expected[key]) for key in expected}
        sent = 0

        def send(key: str) -> tuple[str, tuple[int, int]]:
            return key, self._send(sources[key], key, bundles.get(key), expected[key], key in stored)

        for key, (size, crc) in self.of_blobs.map(send, to_send):
            sums[key] = size, crc
            sent += 0 if key in stored else size
        for key, size in stored.items():
            if key in sums and sums[key][0] != size:
                raise Corruption(f"{BLOBS}{key} in {self.store.blob.url} has {size} bytes, not {sums[key][0]}")
        list_file = self.store.put_sums(list_key(backup_id, shard), sums)
        state_file = self.store.put(state_key(backup_id, shard), encode_state(carried, version))
        total = sum(size for size, _ in sums.values())
        since, upper = state.since.to_json(), state.upper.to_json()
        return ShardBackup(
            state.name, shard, int(carried.seqno), since, upper, state_file, list_file, len(sums), total, sent
        )

    def _send(
        self, source: str, key: str, data: bytes | None, expected: tuple[int, int], is_stored: bool
    ) -> tuple[int, int]:
        """Copy one blob, unless it is stored already; returns its size and CRC-32. `data`: its bytes if known."""
        if data is None:
            with translated_but_missing():
                data = self.blob.get(source)
        actual = size_and_crc(data)
        if any(value not in (UNKNOWN, measured) for value, measured in zip(expected, actual, strict=True)):
            raise Corruption(f"the blob {key} is damaged: its checksum differs; `persist check` has remedies")
        if not is_stored:
            self.store.put(BLOBS + key, data)
            self.counter.add(blobs=1, sent=len(data))
        return actual

    @contextmanager
    def _renewing_holds(self) -> Iterator[None]:
        """Renew the holds, and the marker of the run, in the background."""
        stop = threading.Event()

        def renew() -> None:
            while not stop.wait(KEPT_EVERY_S):
                with self.lock:
                    actions = [self.run.beat, *(hold.lease.keep for hold in self.holds.values())]
                for action in actions:
                    with suppress(PersistError):  # the main thread notices that a blob is missing, or the run expired
                        action()

        keeper = threading.Thread(target=renew, name="persist-backup-keeper", daemon=True)
        keeper.start()
        try:
            yield
        finally:
            stop.set()
            keeper.join()
