"""A location opened for inspection: both stores refuse writes; and patterns of shard names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from fnmatch import translate
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from blob import Blob, BlobMisconfigured, BlobNotFound, BlobNotWritable, open_blob
from blob.interface import SignedPut, Unfinished
from blob.metrics import ForwardingBlob
from consensus import Consensus, ConsensusMisconfigured, ConsensusNotWritable, open_consensus
from consensus.interface import Wanted
from consensus.metrics import ForwardingConsensus
from persist.attributes.node_store import NodeCache
from persist.commit.location import MARKER, MARKER_VERSION, Location, all_names, read_marker, url_path
from persist.commit.location_identity import COPY_KEY, ID_KEY, LOG_KEY, Identity, epoch_key, epochs_in, read_format
from persist.commit.state_loader import Versions
from persist.commit.system import Clock, SystemClock, SystemIds
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
from persist.formats.store_errors import translated
from persist.inspect.documents import JsonRecord

# A location that is opened to be looked at: both stores are wrapped so that a write raises, and nothing is made.
#
# Opening a location binds its stores, marks its directory, and makes a table. None of this happens here. What is wrong
# with how the stores belong together is a finding, and what is there is shown all the same.


TWO_LOCATIONS = "the two stores belong to two locations"
CACHE_BYTES_MAX = 16 * 1024 * 1024  # nodes of attribute indexes
_NOTHING = LocationBinding("", 0, "")
T = TypeVar("T")


class ReadOnlyBlob(ForwardingBlob):
    """A blob store to which nothing is written, whoever tries. `refusal` makes the error, by what was asked for."""

    def __init__(self, inner: Blob, refusal: Callable[[str], Exception]) -> None:
        super().__init__(inner)
        self._refusal = refusal

    def put(self, key: str, data: bytes | memoryview) -> None:
        raise self._refusal("writing a blob")

    def delete(self, keys: Sequence[str]) -> None:
        raise self._refusal("deleting blobs")

    def abandon(self, found: Sequence[Unfinished]) -> None:
        raise self._refusal("deleting blobs")

    def check(self) -> None:
        """Whether it can be listed. No probe is written."""
        next(iter(self.list("")), None)

    def presign_put(self, key: str, expires_s: int) -> SignedPut | None:
        return None


def read_only(blob: Blob) -> ReadOnlyBlob:
    """The store, to be looked at: a write raises BlobNotWritable."""
    return ReadOnlyBlob(blob, lambda what: BlobNotWritable(f"{blob.url} was opened to be looked at: no {what}"))


class LookedConsensus(ForwardingConsensus):
    """A consensus store to which nothing is written, whoever tries."""

    def compare_and_set(self, key: str, seqno: int, data: bytes, after: bytes = b"") -> bool:
        self._refuse()

    def begin(self, key: str, seqno: int, data: bytes) -> bool:
        self._refuse()

    def truncate(self, key: str, seqno: int) -> int:
        self._refuse()

    def scrub(self) -> str:
        self._refuse()

    def check(self) -> None:
        """Whether it can be listed. No probe is written."""
        self.keys("", "", 1)

    def subscribe(self, callback: Callable[[str], None], wanted: Wanted | None = None) -> Callable[[], None] | None:
        return None

    def _refuse(self) -> NoReturn:
        raise ConsensusNotWritable(f"{self.url} was opened to be looked at: nothing is written")


class LookedIdentity(Identity):
    """Binds nothing, and refuses nothing but writes."""

    def check(self) -> LocationBinding:
        return _NOTHING

    def binding(self) -> LocationBinding:
        return _NOTHING

    def check_writable(self) -> NoReturn:
        raise ReadOnly("this location was opened to be looked at: nothing is written", home=[], region="")

    def confirm(self) -> None:
        """What the log lacks is told as it is, whoever has taken over."""


class LookedVersions(Versions):
    """Switches no format version on."""

    @property
    def format_version(self) -> int:
        return read_format(self.blob, self.build)


class ReadOnlyLocation:
    """Both stores of a location, to be looked at. Thread-safe. Closing it closes what `opened` for it.

    `problems` are findings of the location as a whole, such as a marker that is missing. Who looks may see shards whose
    names begin with one of `prefixes` alone (None given: all).
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
        self.blob = read_only(blob)
        self.consensus = LookedConsensus(consensus)
        self.clock = clock or SystemClock()
        self.build = build
        self.problems = Faults()
        self.prefixes = tuple(prefixes)
        self._owns = owns
        ids = SystemIds()
        identity = LookedIdentity(self.blob, self.consensus, ids, self.clock, build)
        self.versions = LookedVersions(self.blob, self.consensus, ids, build, identity)
        self.nodes = NodeCache(CACHE_BYTES_MAX)

    def names(self, prefix: str = "", *, with_dropped: bool = True) -> Iterator[str]:
        """Names of shards that begin so, ascending. Raises Unavailable, Corruption (the store itself is damaged)."""
        with translated():
            yield from all_names(partial(self._page, with_dropped), prefix)

    def shown_name(self, name: str) -> str:
        """The name of a shard that another one tells of; its id for who may not see it."""
        return name if not self.prefixes or name.startswith(self.prefixes) else str(shard_id_of(name))

    def _page(self, with_dropped: bool, prefix: str, after: str, limit: int) -> list[str]:
        return self.consensus.keys(prefix, after, limit, with_dropped)

    def close(self) -> None:
        if self._owns:
            self.blob.close()
            self.consensus.close()


def look_at_stores(blob_url: str, consensus_url: str) -> ReadOnlyLocation:
    """Open the two stores to look at them. Raises InvalidUsage: a URL is wrong; Unavailable: a store is not there."""
    with ExitStack() as opened, translated():
        blob = _there(blob_url, lambda: open_blob(blob_url, makes=False))
        opened.callback(blob.close)
        consensus = _there(consensus_url, lambda: open_consensus(consensus_url, reads_only=True))
        opened.callback(consensus.close)
        opened.pop_all()
    return ReadOnlyLocation(blob, consensus)


def look_at_directory(path: Path) -> ReadOnlyLocation:
    """As `look_at_stores`, of the location in a directory. Raises InvalidUsage where there is none."""
    at = url_path(path)
    if not path.is_dir():
        raise InvalidUsage(f"{path} does not exist; give --dir, or --blob and --consensus")
    marker, blob, log = path / MARKER, path / "blob", path / "consensus.db"
    if not any(map(_is_there, (marker, blob, log))):
        raise InvalidUsage(f"{path} is not a persist location: it has neither {MARKER}, nor blobs, nor a log")
    look = look_at_stores(f"file://{at}/blob", f"sqlite:///{at}/consensus.db")
    if (wrong := _wrong_marker(marker)) is not None:
        look.problems.note(FaultKind.BLOB, wrong)
    return look


def look_into(location: Location, prefixes: Sequence[str] = ()) -> ReadOnlyLocation:
    """The stores of a location that a server has open, for who may see names with these prefixes (none: all).

    Raises InvalidUsage: it shows a copy, which has no logs.
    """
    if location.is_copy:
        raise InvalidUsage("this server shows a copy of a blob store, which has no logs: ask a server at home")
    clock, build = location.clock, location.settings.build
    return ReadOnlyLocation(location.blob, location.consensus, clock=clock, build=build, owns=False, prefixes=prefixes)


def _there(url: str, opens: Callable[[], T]) -> T:
    """What is opened. Raises Unavailable where a directory or a file is not there, InvalidUsage as opening does."""
    try:
        return opens()
    except (BlobMisconfigured, ConsensusMisconfigured) as error:
        if str(error).endswith("does not exist"):
            raise Unavailable(str(error)) from error
        raise


def _is_there(path: Path) -> bool:
    with suppress(OSError):
        return path.exists()
    return False


def _wrong_marker(marker: Path) -> str | None:
    """What is wrong with the file that marks a directory. Raises UpgradeNeeded."""
    try:
        found = read_marker(marker)
    except FileNotFoundError:
        return f"{MARKER} is not there: no program opens this directory as a location"
    except OSError as error:
        return f"{MARKER} cannot be read: {error.strerror}"
    except ValueError:
        return f"{MARKER} is damaged: it is no JSON"
    version = found.get("version") if isinstance(found, dict) else None
    if type(version) is int and version > MARKER_VERSION:
        raise UpgradeNeeded(f"the location has format {version}; this persist knows {MARKER_VERSION}: upgrade it")
    return None if version == MARKER_VERSION else f"{MARKER} is damaged: it tells no format"


class LocationSummary(JsonRecord, frozen=True):
    """A location: its id, its epoch, and its format version. None: that is not known."""

    id: str | None
    epoch: int | None
    format_version: int | None


def location_summary(look: ReadOnlyLocation, faults: Faults) -> LocationSummary:
    """What both stores tell of the location. What does not fit together is noted. Raises Unavailable."""
    faults.take(look.problems)
    note = partial(faults.note, FaultKind.BLOB)
    version: int | None = None
    try:
        version = look.versions.format_version
    except UpgradeNeeded as error:
        note(error.message)
    with translated():
        entry = look.consensus.head(LOG_KEY)
        epochs = epochs_in(look.blob)
        named = _read(look, ID_KEY)
        is_copy = look.blob.stat(COPY_KEY) is not None
    if is_copy:
        note("the blob store is a copy of another one, as its blob copy-of tells")
    binding: LocationBinding | None = None
    try:
        binding = None if entry is None else decode_binding(entry.data, look.build)
    except PersistError as error:
        note(f"the binding in the log: {error.message}")
    if entry is None and (epochs or next(look.names(), None) is not None):
        note("the consensus store has no binding: it is not the one of this blob store, or has lost all")
    if binding is not None:
        _compare(look, binding, epochs, note)
    location_id = (
        binding.location_id if binding is not None else None if named is None else named.decode("ascii", "replace")
    )
    epoch = binding.epoch if binding is not None else epochs[-1] if epochs else None
    return LocationSummary(location_id, epoch, version)


def _compare(look: ReadOnlyLocation, binding: LocationBinding, epochs: list[int], note: Callable[..., None]) -> None:
    key = epoch_key(binding.epoch)
    with translated():
        held = _read(look, key)
    try:
        if held is None:
            note(f"the blob store has no binding of epoch {binding.epoch}, which the log has", key)
        elif decode_binding(held, look.build) != binding:
            note(f"{TWO_LOCATIONS}: give two that belong together", key)
    except Corruption as error:
        note(f"the binding in the blob store: {error.message}", key)
    if epochs and epochs[-1] > binding.epoch:
        note(f"the blob store has epoch {epochs[-1]}, and the log {binding.epoch}: another home has taken over")


def _read(look: ReadOnlyLocation, key: str) -> bytes | None:
    try:
        return look.blob.get(key)
    except BlobNotFound:
        return None


# Patterns of shard names.


PATTERN_CHARS_MAX = 256
_CHOICE = re.compile(r"\[[^]]*\]")
_LITERAL = re.compile(r"[A-Za-z0-9._/-]*")


def prefix_of(pattern: str) -> str:
    """What every name begins with that the pattern matches. Raises InvalidUsage: it is none.

    `*` stands for any characters, slashes too, `?` for one, and `[ab]` for one of these.
    """
    is_wrong = re.search(r"[^A-Za-z0-9._/*?\[\]!-]", pattern) or "!" in _CHOICE.sub("", pattern)
    if is_wrong or not 0 < len(pattern) <= PATTERN_CHARS_MAX:
        raise InvalidUsage(f"{pattern!r:.60} is no pattern of names; give a name, or one with * and ?, as 'eu/*'")
    found = _LITERAL.match(pattern)
    return "" if found is None else found[0]


def matching(look: ReadOnlyLocation, pattern: str | None, *, with_dropped: bool = True) -> Iterator[str]:
    """The names that a pattern matches (None: all that who looks may see), ascending. Raises InvalidUsage."""
    if pattern is None:
        found = dict.fromkeys(n for p in look.prefixes for n in look.names(p, with_dropped=with_dropped))
        yield from sorted(found) if look.prefixes else look.names(with_dropped=with_dropped)
        return
    matches = re.compile(translate(pattern)).match
    yield from (name for name in look.names(prefix_of(pattern), with_dropped=with_dropped) if matches(name))


def check_named(look: ReadOnlyLocation, name: str) -> None:
    """Raises UnknownShard."""
    if not any(found == name for found in look.names(name)):
        raise UnknownShard(f"there is no shard {name!r} here; `persist shards` lists them")
