"""A location: a blob store, a consensus store, and the machines of the shards that live there.

`persist:///path` keeps both in one directory: `persist.json` (marks the directory), `consensus.db`, `blob/`.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, unquote, urlsplit

from blob import Blob, BlobNotWritable, is_ambiguous, open_blob, without_secrets
from blob.blob_urls import may_exist
from blob.cache import CachedBlob
from blob.metrics import MeteredBlob
from blob.private_files import FILE_MODE, make_directories, replace_file
from consensus import Consensus, ConsensusMisconfigured, ConsensusNotWritable, open_consensus
from consensus.memory_logs import MemoryConsensus
from consensus.metrics import MeteredConsensus
from persist.attributes.node_store import CACHE_BYTES_MAX, NodeCache, StaleIndex
from persist.commit.background_duties import Upkeep
from persist.commit.clocks_and_ids import (
    Background,
    CheckedClock,
    Clock,
    OwnProcess,
    Publishes,
    System,
    SystemClock,
    SystemIds,
    ThreadBackground,
)
from persist.commit.committer import Machine
from persist.commit.location_identity import Identity
from persist.commit.spill_files import SpillReader
from persist.commit.state_loader import Versions
from persist.core.audit_log import EntryPlace, HistoryPage
from persist.core.errors import Corruption, InvalidUsage, UnknownShard, UpgradeNeeded
from persist.core.ids import IdSource
from persist.core.shard_phases import dropped
from persist.core.shard_settings import NO_SETTINGS, HistoryDefaults, ShardSettings
from persist.core.state import Policy
from persist.formats.state_frames import THIS_BUILD, Build
from persist.formats.store_errors import translated
from persist.telemetry.metrics import MachineMetrics, Sight, StoreCalls
from persist.telemetry.tracing import Tracer

MARKER = "persist.json"
MARKER_VERSION = 1
MARKER_BYTES_MAX = 64 * 1024
MACHINES_MAX = 20_000  # shards of which one process has the State in memory
UNREAD_PART = 20  # names without a shard take at most this part of the cache
EVICTIONS_TRIED_MAX = 100  # machines considered for eviction when one more is added
NAMES_PAGE = 1_000
POLL_WITH_PUSH_S = 30.0
POLL_WITHOUT_PUSH_S = 0.1


class Publishing(Protocol):
    """How commits are published; implemented by `persist.maintenance.journal_writer.PublishSettings`."""

    def publisher(
        self, blob: Blob, identity: Identity, clock: Clock, ids: IdSource, *, threaded: bool = False
    ) -> Publishes:
        """A publisher of one process. `threaded`: it has a thread of its own; otherwise it runs when it is called."""


class Collecting(Protocol):
    """Background garbage collection; implemented by `persist.maintenance.collector.collect_in_background`."""

    def __call__(self, location: Location, /) -> Callable[[str], object]:
        """A function that collects a shard of the location by its name."""


@dataclass(frozen=True)
class LocationSettings:
    """Settings of the stores that this process opens itself."""

    policy: Policy = field(default_factory=Policy)
    check_all: bool = False  # whether every commit checks every invariant (tests)
    small_merges: bool = True  # whether upkeep merges small batches; a maintenance process merges by its own plan
    build: Build = THIS_BUILD  # what it can read and write
    collects: Collecting | None = None  # after commits that leave garbage; None: maintenance does it
    history: str | None = None  # retention of new shards: `7d`, `none`, …; None: they have no settings
    compares_clock: bool = True  # with the blob store's; otherwise its commits seal no wall clocks
    metered: bool = False  # whether calls to the stores, and commits, are counted and timed
    shows_no_copy: bool = False  # refuses the blob store of an old home that has become a copy of a later one
    publish: Publishing | None = None  # publishes the commits of this process; None: maintenance does it
    tracer: Tracer | None = None  # None: no spans


class Location:
    """Opened stores and a bounded cache of machines. Thread-safe. Closing it closes the stores.

    `is_copy`: whether it is a read-only view of a copy of another location's blob store, which may lack blobs.
    """

    is_copy = False

    def behind_s(self, name: str) -> float | None:
        """Replication lag of this copy for a shard, in seconds. None: this is home."""
        return None

    def __init__(
        self,
        blob: Blob,
        consensus: Consensus,
        *,
        settings: LocationSettings | None = None,
        clock: Clock | None = None,
        ids: IdSource | None = None,
        background: Background | None = None,
    ) -> None:
        self.settings = settings or LocationSettings()
        self._history = None if self.settings.history is None else HistoryDefaults(self.settings.history)
        tracer = self.settings.tracer
        self.store_calls = StoreCalls(tracer)
        self.blob_cache = blob if isinstance(blob, CachedBlob) else None
        if self.settings.metered or tracer is not None:
            observe = self.store_calls.observer("blob")
            if self.blob_cache is None:
                blob = MeteredBlob(blob, observe)
            else:  # a cache hit is no call to the store
                self.blob_cache.wrap(lambda store: MeteredBlob(store, observe))
            consensus = MeteredConsensus(consensus, self.store_calls.observer("consensus"))
        self.blob = blob
        self.consensus = consensus
        self._process = OwnProcess("this client")
        self.clock = clock or SystemClock()
        self.ids = ids or SystemIds()
        self.background = background or ThreadBackground()
        self.sight = Sight(self.clock.monotonic, counts=self.settings.metered, tracer=tracer)
        self.identity = Identity(
            blob, consensus, self.ids, self.clock, self.settings.build, shows_no_copy=self.settings.shows_no_copy
        )
        self.versions = Versions(blob, consensus, self.ids, self.settings.build, self.identity)
        self._stamps = CheckedClock(blob, self.clock, self.ids) if self.settings.compares_clock else None
        self.nodes = NodeCache(CACHE_BYTES_MAX)
        self.publisher: Publishes | None = None
        if self.settings.publish is not None:
            threaded = background is None
            self.publisher = self.settings.publish.publisher(
                blob, self.identity, self.clock, self.ids, threaded=threaded
            )
        self._collect = None if self.settings.collects is None else self.settings.collects(self)
        self._retain: Callable[[str], object] | None = None
        self._retaining = threading.Lock()
        self._lock = threading.Lock()
        self._machines: OrderedDict[str, Machine] = OrderedDict()
        self._evicted = MachineMetrics()  # totals of evicted machines
        self.machines_found = 0
        self.machines_made = 0
        self._unread: OrderedDict[str, None] = OrderedDict()  # names that were new of late
        self._poked: set[str] = set()
        with translated():
            self._unsubscribe = consensus.subscribe(self._moved, self._is_watched)
        self.poll_s = POLL_WITHOUT_PUSH_S if self._unsubscribe is None else POLL_WITH_PUSH_S

    def machine(self, name: str) -> Machine:
        """The machine of the shard, which may not exist yet. Raises InvalidUsage in a fork, and after `close`."""
        with self._lock:
            self._process.check()
            machine = self._machines.get(name)
            if machine is None:
                self.machines_made += 1
                machine = self._machines[name] = self.new_machine(name)
                if self._collect is not None:
                    machine.collect_with(self._collect)
                if self._retain is not None:
                    machine.retain_with(self._retained)
                self._make_room(name)
            else:
                self.machines_found += 1
            self._machines.move_to_end(name)
            return machine

    def new_machine(self, name: str) -> Machine:
        """A machine outside the cache; `machine` returns cached ones."""
        return Machine(
            name,
            self.versions,
            System(self.clock, self.ids, self.background, self._stamps, self.publisher, self.sight),
            upkeep=Upkeep(self.settings.policy, self.settings.small_merges),
            nodes=self.nodes,
            check_all=self.settings.check_all,
        )

    def retain_with(self, retain: Callable[[str], object]) -> None:
        """Call `retain(name)`, which runs row policies, in the background as commits of this process land.

        One shard at a time: for others it is called after a later commit.
        """
        with self._lock:
            self._retain = retain
            for machine in self._machines.values():
                machine.retain_with(self._retained)

    def _retained(self, name: str) -> None:
        if self._retain is not None and self._retaining.acquire(blocking=False):
            try:
                self._retain(name)
            finally:
                self._retaining.release()

    def settings_of_new(self, name: str) -> ShardSettings:
        if self._history is None:
            return NO_SETTINGS
        return self._history.of(name)

    def history_page(self, name: str, before: EntryPlace | None, limit: int, maintenance: bool) -> HistoryPage:
        """At most `limit` entries of the shard's commit history before a place (None: its end), newest first.

        Raises UnknownShard, Corruption (a blob of it is damaged or gone), Unavailable.
        """
        machine, files = self.machine(name), SpillReader(self.blob, self.nodes)
        while True:
            state = machine.refresh()
            if state.is_closed:
                raise UnknownShard(dropped(name))
            try:
                return files.page(state, before, limit, maintenance)
            except StaleIndex as error:
                if machine.refresh().spilled == state.spilled:
                    raise Corruption(f"shard {name!r} has lost a blob of its commit history: {error}") from error

    def _make_room(self, name: str) -> None:
        """Make room for the new machine `name`, under the lock. An evicted machine stays usable: it only caches.

        A watched machine is not evicted, even beyond `MACHINES_MAX`, since notifications reach only cached machines.
        """
        most = MACHINES_MAX
        self._unread[name] = None
        self._unread.move_to_end(name)
        if len(self._unread) > max(1, most // UNREAD_PART):
            machine = self._machines.get(self._unread.popitem(last=False)[0])
            if machine is not None and machine.cached is None and not machine.is_watched:
                self._evict(machine.name)
        for oldest in list(islice(self._machines, min(EVICTIONS_TRIED_MAX, len(self._machines) - 1))):
            if len(self._machines) <= most:
                return
            if self._machines[oldest].is_watched:
                self._machines.move_to_end(oldest)
            else:
                self._evict(oldest)

    def _evict(self, name: str) -> None:
        self._evicted.add(self._machines.pop(name).metrics)

    def machines(self) -> list[Machine]:
        """The machines in the cache now."""
        with self._lock:
            return list(self._machines.values())

    def counted(self) -> MachineMetrics:
        """Totals of all machines, evicted ones included."""
        total = MachineMetrics()
        with self._lock:
            for metrics in (self._evicted, *(machine.metrics for machine in self._machines.values())):
                total.add(metrics)
        return total

    @property
    def clock_agrees(self) -> bool | None:
        """Whether the clocks of this process and of the blob store agreed at the last comparison; None: none yet."""
        return None if self._stamps is None else self._stamps.agreed

    def names(self, prefix: str = "", after: str = "", limit: int = 1000, with_dropped: bool = False) -> list[str]:
        """Names of shards, ascending, beyond `after`; those of dropped shards only if `with_dropped`."""
        self._process.check()
        self.identity.check()
        with translated():
            return self.consensus.keys(prefix, after, limit, with_dropped)

    @property
    def build(self) -> Build:
        return self.settings.build

    def all_names(self, prefix: str = "", with_dropped: bool = True) -> Iterator[str]:
        """Names of all shards that begin with `prefix`, ascending; fetched page by page."""
        return all_names(partial(self.names, with_dropped=with_dropped), prefix)

    def check(self) -> list[str]:
        """Probe both stores, and check that they belong together.

        Return the errors of stores that can be read but not written, for example because a disk is full.
        Raises InvalidUsage naming the wrong setting, or Unavailable.
        """
        unwritable = []
        with translated():
            for check in (self.blob.check, self.consensus.check):
                try:
                    check()
                except (BlobNotWritable, ConsensusNotWritable) as error:
                    unwritable.append(str(error))
        if not unwritable:  # otherwise the binding may have to be written later
            self.identity.check()
        return unwritable

    def close(self) -> None:
        if self._process.is_left:  # everything belongs to the parent process
            return
        if self._unsubscribe is not None:
            self._unsubscribe()
        self.background.close()
        if self.publisher is not None:
            self.publisher.close()
        self._process.close()
        for machine in self.machines():
            machine.end_waits(self._process.check)
        self.blob.close()
        self.consensus.close()

    def _is_watched(self, name: str) -> bool:
        machine = self._machines.get(name)  # without the lock: a new watcher reads the shard after it subscribed
        return machine is not None and machine.is_watched

    def _moved(self, name: str) -> None:
        """The push channel reports that a shard may have changed: read it soon if it is watched here."""
        with self._lock:
            machine = self._machines.get(name)
            if machine is None or name in self._poked or not machine.is_watched:
                return
            self._poked.add(name)

        def refresh() -> None:
            self._poked.discard(name)
            machine.refresh_quietly()

        if not self.background.submit(refresh):  # polling finds it
            self._poked.discard(name)


def all_names(names: Callable[[str, str, int], list[str]], prefix: str) -> Iterator[str]:
    """All names that begin with `prefix`, from `names(prefix, after, limit)`, which returns one page."""
    after = ""
    while page := names(prefix, after, NAMES_PAGE):
        yield from page
        if len(page) < NAMES_PAGE:
            return
        after = page[-1]


def open_location(url: str, *, reads_only: bool = False, **options: object) -> Location:
    """Open `persist:///path`, creating the directory when it is missing or empty, unless `reads_only`."""
    blob_url, consensus_url = directory_urls(url, makes=not reads_only)
    return open_stores(blob_url, consensus_url, reads_only=reads_only, **options)


def open_stores(blob_url: str, consensus_url: str, *, reads_only: bool = False, **options: object) -> Location:
    """Open a location. With `reads_only` no file is created: a consensus store that does not exist is empty."""
    with ExitStack() as opened, translated():
        blob = open_blob(blob_url, makes=not reads_only)
        opened.callback(blob.close)
        consensus = _existing_or_empty(consensus_url) if reads_only else open_consensus(consensus_url)
        opened.callback(consensus.close)
        location = Location(blob, consensus, **options)  # type: ignore[arg-type]
        opened.pop_all()
    return location


def _existing_or_empty(url: str) -> Consensus:
    try:
        open_consensus(url, reads_only=True).close()
    except ConsensusMisconfigured as error:
        if str(error).endswith("does not exist"):
            return MemoryConsensus(url)
        raise
    return open_consensus(url)  # a database without our table is empty, too


def directory_urls(url: str, *, makes: bool = True) -> tuple[str, str]:
    """The blob and the consensus URL of the location `persist:///path`, which is created if it is missing or empty.

    Raises InvalidUsage: the path is something else, or, without `makes`, does not exist.
    """
    parts = urlsplit("" if is_ambiguous(url) else url)
    if parts.scheme != "persist" or parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
        shown = without_secrets(url)
        raise InvalidUsage(f"a directory is named persist:///absolute/path (%3F for ?, %23 for #), not {shown!r}")
    root = Path(unquote(parts.path))
    if makes:
        _mark(root)
    elif not root.is_dir():
        raise InvalidUsage(f"{root} does not exist")
    path = quote(str(root))
    return f"file://{path}/blob", f"sqlite:///{path}/consensus.db"


def check_location(url: str) -> None:
    """Raise InvalidUsage if `persist:///path` is not a location yet: opening it would create one."""
    directory_urls(url, makes=False)
    root = Path(unquote(urlsplit(url).path))
    if not (root / MARKER).exists() and _is_empty(root):
        raise InvalidUsage(f"{root} is empty")


def check_there(url: str) -> None:
    """Raise InvalidUsage if the URL names a directory or a SQLite file that does not exist: opening would create it."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() == "sqlite":
        there = not rest.startswith("///") or Path(unquote(rest.removeprefix("///").partition("?")[0])).exists()
    else:
        with translated():
            there = may_exist(url)
    if not there:
        raise InvalidUsage(f"{without_secrets(url)} does not exist")


def _mark(root: Path) -> None:
    """Check that `root` is a persist location; create one if it is missing or empty."""
    marker = root / MARKER
    try:
        make_directories(root)
        if not marker.exists():
            if not _is_empty(root):
                if marker.exists():  # another process has just made it
                    return
                raise InvalidUsage(f"{root} is not a persist location: it has files but no {MARKER}; use an empty one")
            _write_marker(marker)
        record = read_marker(marker)
    except (NotADirectoryError, FileExistsError) as error:
        raise InvalidUsage(f"{root} is not a directory") from error
    except OSError as error:
        raise InvalidUsage(f"{root} cannot be used: {error.strerror}") from error
    except ValueError as error:
        raise InvalidUsage(f"{marker} is damaged: {error}") from error
    version = record.get("version") if isinstance(record, dict) else None
    if version != MARKER_VERSION:
        raise UpgradeNeeded(
            f"{root} has location format {version!r}; this persist knows {MARKER_VERSION}: upgrade persist"
        )


def read_marker(marker: Path) -> Any:
    """The JSON of the marker file of a location. Raises OSError: it cannot be read, or is no file; ValueError: no JSON.

    The type of the file is checked first: opening a pipe would wait for its writer.
    """
    if not stat.S_ISREG(marker.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(marker))
    with marker.open("rb") as file:
        data = file.read(MARKER_BYTES_MAX + 1)
    if len(data) > MARKER_BYTES_MAX:
        raise ValueError("it is too long")
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def url_path(path: Path) -> str:
    """The path, quoted for a URL. Raises InvalidUsage: it is not UTF-8."""
    try:
        return quote(str(path))
    except UnicodeEncodeError as error:
        raise InvalidUsage(f"the directory {str(path)!a} has a name that is not UTF-8; rename it") from error


def _is_empty(root: Path) -> bool:
    """Whether the directory has no files. A fresh file system has a `lost+found`, and `blob` may be a mount point."""
    for entry in root.iterdir():
        if entry.name == "blob" and entry.is_dir() and _is_empty(entry):
            continue
        if entry.name not in (MARKER, "lost+found") and not entry.name.startswith("."):
            return False
    return True


def _write_marker(marker: Path) -> None:
    fresh = marker.with_name(f".{MARKER}.{os.getpid()}.{threading.get_ident()}")
    with open(fresh, "w", encoding="utf-8", opener=lambda path, flags: os.open(path, flags, FILE_MODE)) as file:
        file.write(json.dumps({"persist": "location", "version": MARKER_VERSION}))
        file.flush()
        os.fsync(file.fileno())
    replace_file(fresh, marker)
