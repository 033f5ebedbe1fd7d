"""A location opened read-only for inspection, and patterns of shard names."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from fnmatch import translate
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from blob import Blob, BlobMisconfigured, BlobNotWritable, open_blob
from blob.interface import SignedPut, Unfinished
from blob.metrics import ForwardingBlob
from consensus import Consensus, ConsensusMisconfigured, ConsensusNotWritable, open_consensus
from consensus.interface import Wanted
from consensus.metrics import ForwardingConsensus
from persist.attributes.node_store import NodeCache
from persist.commit.clocks_and_ids import Clock, SystemClock, SystemIds
from persist.commit.location import MARKER, MARKER_VERSION, Location, all_names, read_marker, url_path
from persist.commit.location_identity import COPY_KEY, ID_KEY, LOG_KEY, Identity, epoch_key, epochs_in, read_format
from persist.commit.state_loader import Versions
from persist.copies.shard_facts import FaultKind, Faults
from persist.core.errors import (
    Corruption,
    InvalidUsage,
    PersistError,
    ReadOnly,
    Unavailable,
    UnknownShard,
    UpgradeNeeded,
)
from persist.core.ids import LocationBinding, shard_id_of
from persist.formats.state_frames import THIS_BUILD, Build, decode_binding
from persist.formats.store_errors import read_or_none, translated
from persist.inspect.documents import JsonRecord

# A location opened for inspection. Opening a location normally binds its stores, writes a marker into its directory,
# and creates a table; here both stores refuse writes. A mismatch of the stores is a finding, and the rest is shown.

TWO_LOCATIONS = "the two stores belong to two locations"
CACHE_BYTES_MAX = 16 * 1024 * 1024  # nodes of attribute indexes
_NOTHING = LocationBinding("", 0, "")
T = TypeVar("T")


class ReadOnlyBlob(ForwardingBlob):
    """A blob store that refuses all writes. `refusal` makes the error, for a description of the operation."""

    def __init__(self, inner: Blob, refusal: Callable[[str], Exception] | None = None) -> None:
        super().__init__(inner)
        self._refusal = refusal or (lambda what: BlobNotWritable(f"{inner.url} was opened read-only: no {what}"))

    def put(self, key: str, data: bytes | memoryview) -> None:
        raise self._refusal("writing a blob")

    def delete(self, keys: Sequence[str]) -> None:
        raise self._refusal("deleting blobs")

    def abandon(self, unfinished: Sequence[Unfinished]) -> None:
        raise self._refusal("deleting blobs")

    def check(self) -> None:
        """Check that it can be listed. No probe is written."""
        next(iter(self.list("")), None)

    def presign_put(self, key: str, expires_s: int) -> SignedPut | None:
        return None


class ReadOnlyConsensus(ForwardingConsensus):
    """A consensus store that refuses all writes."""

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        self._refuse()

    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        self._refuse()

    def truncate(self, key: str, seqno: int) -> int:
        self._refuse()

    def scrub(self) -> str:
        self._refuse()

    def check(self) -> None:
        """Check that it can be listed. No probe is written."""
        self.keys("", "", 1)

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        return None

    def _refuse(self) -> NoReturn:
        raise ConsensusNotWritable(f"{self.url} was opened read-only: no write")


class ReadOnlyIdentity(Identity):
    """Binds nothing, and refuses only writes."""

    def check(self) -> LocationBinding:
        return _NOTHING

    def binding(self) -> LocationBinding:
        return _NOTHING

    def check_writable(self) -> NoReturn:
        raise ReadOnly("this location was opened read-only for inspection", home=[], region="")

    def confirm(self) -> None:
        """Accepts every log, also of a home that was fenced."""


class ReadOnlyVersions(Versions):
    """Never upgrades the format version."""

    @property
    def format_version(self) -> int:
        return read_format(self.blob, self.build)


class ReadOnlyLocation:
    """Both stores of a location, read-only. Thread-safe. `owns`: closing it closes the stores.

    `problems` are findings about the location as a whole, such as a missing marker. `prefixes`: only shards whose names
    begin with one of them are visible (empty: all).
    """

    def __init__(
        self,
        blob: Blob,
        consensus: Consensus,
        *,
        clock: Clock | None = None,
        build: Build = THIS_BUILD,
        owns: bool = True,
        prefixes: Sequence[str] = (),
    ) -> None:
        self.blob = ReadOnlyBlob(blob)
        self.consensus = ReadOnlyConsensus(consensus)
        self.clock = clock or SystemClock()
        self.build = build
        self.problems = Faults()
        self.prefixes = tuple(prefixes)
        self._owns = owns
        ids = SystemIds()
        identity = ReadOnlyIdentity(self.blob, self.consensus, ids, self.clock, build)
        self.versions = ReadOnlyVersions(self.blob, self.consensus, ids, build, identity)
        self.nodes = NodeCache(CACHE_BYTES_MAX)

    def names(self, prefix: str = "", *, with_dropped: bool = True) -> Iterator[str]:
        """Names of shards with this prefix, ascending. Raises Unavailable, Corruption (the store itself is damaged)."""
        with translated():
            yield from all_names(partial(self.consensus.keys, with_ended=with_dropped), prefix)

    def shown_name(self, name: str) -> str:
        """The name of a shard that another one refers to, or its id if the name is not visible."""
        return name if not self.prefixes or name.startswith(self.prefixes) else str(shard_id_of(name))

    def close(self) -> None:
        if self._owns:
            self.blob.close()
            self.consensus.close()


def open_readonly_stores(blob_url: str, consensus_url: str) -> ReadOnlyLocation:
    """Open two stores read-only. Raises InvalidUsage: a URL is wrong; Unavailable: a store does not exist."""
    with ExitStack() as stack, translated():
        blob = open_existing(lambda: open_blob(blob_url, makes=False))
        stack.callback(blob.close)
        consensus = open_existing(lambda: open_consensus(consensus_url, reads_only=True))
        stack.callback(consensus.close)
        stack.pop_all()
    return ReadOnlyLocation(blob, consensus)


def open_readonly_directory(path: Path) -> ReadOnlyLocation:
    """Open the location in a directory read-only. Raises InvalidUsage if there is none, and as `look_at_stores`."""
    at = url_path(path)
    if not path.is_dir():
        raise InvalidUsage(f"{path} does not exist; give --dir, or --blob and --consensus")
    marker, blob, log = path / MARKER, path / "blob", path / "consensus.db"
    if not any(map(os.path.exists, (marker, blob, log))):
        raise InvalidUsage(f"{path} is not a persist location: it has neither {MARKER}, nor blobs, nor a log")
    location = open_readonly_stores(f"file://{at}/blob", f"sqlite:///{at}/consensus.db")
    if (problem := _marker_problem(marker)) is not None:
        location.problems.note(FaultKind.BLOB, problem)
    return location


def readonly_view(location: Location, prefixes: Sequence[str] = ()) -> ReadOnlyLocation:
    """View the location of a server read-only. `prefixes`: only shards with these prefixes are visible (empty: all).

    Raises InvalidUsage: it is a copy, which has no logs.
    """
    if location.is_copy:
        raise InvalidUsage("this server serves a copy of a blob store, which has no logs: ask a server at home")
    clock, build = location.clock, location.settings.build
    return ReadOnlyLocation(location.blob, location.consensus, clock=clock, build=build, owns=False, prefixes=prefixes)


def open_existing(opens: Callable[[], T]) -> T:
    """Open a store. Raises Unavailable if its directory or file does not exist, and as `opens`."""
    try:
        return opens()
    except (BlobMisconfigured, ConsensusMisconfigured) as error:
        if str(error).endswith("does not exist"):
            raise Unavailable(str(error)) from error
        raise


def _marker_problem(marker: Path) -> str | None:
    """Check the marker file of a directory. Raises UpgradeNeeded."""
    try:
        marker_json = read_marker(marker)
    except FileNotFoundError:
        return f"{MARKER} is missing: no program opens this directory as a location"
    except OSError as error:
        return f"{MARKER} cannot be read: {error.strerror}"
    except ValueError:
        return f"{MARKER} is damaged: it is not JSON"
    version = marker_json.get("version") if isinstance(marker_json, dict) else None
    if type(version) is int and version > MARKER_VERSION:
        raise UpgradeNeeded(
            f"the location has format {version}; this persist supports {MARKER_VERSION}: upgrade persist"
        )
    return None if version == MARKER_VERSION else f"{MARKER} is damaged: it has no format version"


class LocationSummary(JsonRecord, frozen=True):
    """A location: its id, its epoch, and its format version. None: unknown."""

    id: str | None
    epoch: int | None
    format_version: int | None


def location_summary(location: ReadOnlyLocation, faults: Faults) -> LocationSummary:
    """Read the identity of the location from both stores. Mismatches are noted. Raises Unavailable."""
    faults.take(location.problems)
    note = partial(faults.note, FaultKind.BLOB)
    version: int | None = None
    try:
        version = location.versions.format_version
    except UpgradeNeeded as error:
        note(error.message)
    with translated():
        entry = location.consensus.head(LOG_KEY)
        epochs = epochs_in(location.blob)
        id_data = read_or_none(location.blob, ID_KEY)
        is_copy = location.blob.stat(COPY_KEY) is not None
    if is_copy:
        note("the blob store is a copy of another one, according to its blob copy-of")
    binding: LocationBinding | None = None
    try:
        binding = None if entry is None else decode_binding(entry.data, location.build)
    except PersistError as error:
        note(f"the binding in the log: {error.message}")
    if entry is None and (epochs or next(location.names(), None) is not None):
        note("the consensus store has no binding: it belongs to another blob store, or has lost all data")
    if binding is not None:
        _compare(location, binding, epochs, note)
    location_id = (
        binding.location_id if binding is not None else None if id_data is None else id_data.decode("ascii", "replace")
    )
    epoch = binding.epoch if binding is not None else epochs[-1] if epochs else None
    return LocationSummary(location_id, epoch, version)


def _compare(
    location: ReadOnlyLocation, binding: LocationBinding, epochs: list[int], note: Callable[..., None]
) -> None:
    key = epoch_key(binding.epoch)
    data = read_or_none(location.blob, key)
    try:
        if data is None:
            note(f"the blob store has no binding of epoch {binding.epoch}, which is the epoch of the log", key)
        elif decode_binding(data, location.build) != binding:
            note(f"{TWO_LOCATIONS}: give the two stores of one location", key)
    except Corruption as error:
        note(f"the binding in the blob store: {error.message}", key)
    if epochs and epochs[-1] > binding.epoch:
        note(f"the blob store has epoch {epochs[-1]}, and the log {binding.epoch}: another home has taken over")


# Patterns of shard names.


PATTERN_CHARS_MAX = 256
_CHOICE = re.compile(r"\[[^]]*\]")
_LITERAL = re.compile(r"[A-Za-z0-9._/-]*")


def prefix_of(pattern: str) -> str:
    """The longest prefix of all names that match the pattern. Raises InvalidUsage: it is not a pattern.

    `*` matches any characters including slashes, `?` one character, and `[ab]` one of these.
    """
    is_wrong = re.search(r"[^A-Za-z0-9._/*?\[\]!-]", pattern) or "!" in _CHOICE.sub("", pattern)
    if is_wrong or not 0 < len(pattern) <= PATTERN_CHARS_MAX:
        raise InvalidUsage(f"{pattern!r:.60} is not a pattern; give a name, or one with * and ?, such as 'eu/*'")
    names = _LITERAL.match(pattern)
    return "" if names is None else names[0]


def matching(location: ReadOnlyLocation, pattern: str | None, *, with_dropped: bool = True) -> Iterator[str]:
    """The visible names that match a pattern (None: all), ascending. Raises InvalidUsage."""
    if pattern is None:
        names = dict.fromkeys(n for p in location.prefixes for n in location.names(p, with_dropped=with_dropped))
        yield from sorted(names) if location.prefixes else location.names(with_dropped=with_dropped)
        return
    matches = re.compile(translate(pattern)).match
    yield from (name for name in location.names(prefix_of(pattern), with_dropped=with_dropped) if matches(name))


def check_named(location: ReadOnlyLocation, name: str) -> None:
    """Raises UnknownShard."""
    if not any(names == name for names in location.names(name)):
        raise UnknownShard(f"there is no shard {name!r} here; `persist shards` lists them")
