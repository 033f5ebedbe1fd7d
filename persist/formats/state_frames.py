"""States, state diffs, bundles, bindings and publications <-> durable bytes.

A frame is: magic (4 bytes), kind (1), format version (1), CRC-32 of kind, version and body (u32, little-endian), body.
The body is the State, the state diff, what a bundle lists or the binding as MessagePack. Every frame is verified when
it is read: what does not verify is Corruption, what verifies but comes from a newer build is UpgradeNeeded.

A build knows one format version or several. All builds that serve a location write the format version of that location
(`persist.commit.location_identity`), so that they can read each other.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from consensus import ENDED
from persist.core.batch import Listing
from persist.core.blob_keys import Journal
from persist.core.errors import Corruption, UpgradeNeeded
from persist.core.ids import LocationBinding
from persist.core.named_holds import LentKeys
from persist.core.state import State, remembering
from persist.core.state_diff import StateDiff
from persist.formats.records import decoded, encoded, json_crc

MAGIC = b"PSST"
KIND_DIFF = b"D"
KIND_LAST = b"E"  # a state diff after which the shard is dropped: listings of the log see it without decoding
KIND_ROLLUP = b"R"
KIND_BINDING = b"B"
KIND_BUNDLE = b"P"
KIND_LOAN = b"L"  # the keys of blobs that are lent

_FORMAT_AT = 5
_HEADER = struct.Struct("<4scBI")
HEAD_BYTES = _HEADER.size  # by which one frame is told from another: its checksum is in it
_STATE = msgspec.msgpack.Decoder(State)
_DIFF = msgspec.msgpack.Decoder(StateDiff)
_BINDING = msgspec.msgpack.Decoder(LocationBinding)
_LISTING = msgspec.msgpack.Decoder(Listing)
_LENT = msgspec.msgpack.Decoder(LentKeys)


@dataclass(frozen=True, eq=False)
class Build:
    """What a build reads and writes: format versions, ascending, and the features that a State may name."""

    formats: tuple[int, ...] = (1,)
    features: frozenset[str] = frozenset()

    @property
    def newest(self) -> int:
        return self.formats[-1]

    @property
    def known(self) -> str:
        return ", ".join(f"format version {version}" for version in self.formats)


THIS_BUILD = Build()
FIRST_FORMAT = 1  # of a location in which no later one was switched on
NEWEST_FORMAT = THIS_BUILD.newest  # of a new location


def encode_diff(change: StateDiff, version: int = NEWEST_FORMAT, *, ends: bool = False) -> bytes:
    """The durable bytes of a state diff. `ends`: the shard is dropped after it."""
    return frame(KIND_LAST if ends else KIND_DIFF, encoded(change), version)


def decode_diff(data: bytes, build: Build = THIS_BUILD) -> StateDiff:
    """Read a state diff. Raises Corruption when the bytes are not one, UpgradeNeeded when a newer build wrote it."""
    kind = KIND_LAST if data.startswith(ENDED) else KIND_DIFF
    change = decoded(_DIFF, unframe(kind, data, "state diff", build), "state diff", Corruption)
    _check_features(change.features or (), "state diff", build)
    return change


def encode_state(state: State, version: int = NEWEST_FORMAT) -> bytes:
    """The durable bytes of a whole State: a rollup."""
    return frame(KIND_ROLLUP, encoded(state), version)


def decode_state(data: bytes, build: Build = THIS_BUILD) -> State:
    """Read a rollup. Raises Corruption when the bytes are not one, UpgradeNeeded when a newer build wrote it."""
    state = decoded(_STATE, unframe(KIND_ROLLUP, data, "rollup", build), "rollup", Corruption)
    _check_features(state.features, "rollup", build)
    return remembering(state)


def encode_listing(listing: Listing, version: int = NEWEST_FORMAT) -> bytes:
    """The durable bytes of what a bundle lists."""
    return frame(KIND_BUNDLE, encoded(listing), version)


def decode_listing(data: bytes, build: Build = THIS_BUILD) -> Listing:
    """Read a bundle. Raises Corruption when the bytes are not one, UpgradeNeeded when a newer build wrote it."""
    return decoded(_LISTING, unframe(KIND_BUNDLE, data, "bundle", build), "bundle", Corruption)


def encode_lent(lent: LentKeys, version: int = NEWEST_FORMAT) -> bytes:
    """The durable bytes of a list of blobs that are lent."""
    return frame(KIND_LOAN, encoded(lent), version)


def decode_lent(data: bytes, build: Build = THIS_BUILD) -> LentKeys:
    """Read such a list. Raises Corruption when the bytes are none, UpgradeNeeded when a newer build wrote it."""
    return decoded(_LENT, unframe(KIND_LOAN, data, "list of lent blobs", build), "list of lent blobs", Corruption)


def encode_binding(binding: LocationBinding) -> bytes:
    """The durable bytes of a binding. They have the first format version, so that every build can read them."""
    return frame(KIND_BINDING, encoded(binding), FIRST_FORMAT)


def decode_binding(data: bytes, build: Build = THIS_BUILD) -> LocationBinding:
    """Read a binding. Raises Corruption when the bytes are not one, UpgradeNeeded when a newer build wrote it."""
    return decoded(_BINDING, unframe(KIND_BINDING, data, "binding", build), "binding", Corruption)


def format_of(data: bytes) -> int:
    """The format version of a frame that was read before."""
    return data[_FORMAT_AT]


def frame(kind: bytes, body: bytes, version: int) -> bytes:
    """The frame around a body."""
    return _HEADER.pack(MAGIC, kind, version, _checksum(kind, version, body)) + body


def unframe(kind: bytes, data: bytes, what: str, build: Build) -> memoryview:
    """The body of a frame. Raises Corruption when the bytes are not one, UpgradeNeeded for an unknown version."""
    if len(data) < _HEADER.size:
        raise Corruption(f"a {what} has only {len(data)} bytes")
    magic, found_kind, version, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC or found_kind != kind:
        raise Corruption(f"the bytes are no {what}: they begin with {data[:5]!r}")
    body = memoryview(data)[_HEADER.size :]
    if _checksum(kind, version, body) != checksum:
        raise Corruption(f"a {what} of {len(data)} bytes fails its checksum or is cut short")
    if version not in build.formats:
        raise UpgradeNeeded(f"a {what} has format version {version}; this persist knows {build.known}: upgrade it")
    return body


def _checksum(kind: bytes, version: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(kind + bytes([version])))


def _check_features(features: Iterable[str], what: str, build: Build) -> None:
    unknown = [name for name in features if name not in build.features]
    if unknown:
        raise UpgradeNeeded(f"a {what} needs {', '.join(unknown)}, which this persist does not know: upgrade it")


# Journals of publications and catalogues <-> durable bytes.

KIND_JOURNAL = b"J"
_JOURNAL = msgspec.msgpack.Decoder(Journal)


def encode_journal(journal: Journal) -> bytes:
    """The durable bytes of a journal. It has the first format version; its entries have their own."""
    return frame(KIND_JOURNAL, encoded(journal), FIRST_FORMAT)


def decode_journal(data: bytes, build: Build = THIS_BUILD) -> Journal:
    """Read a journal. Raises Corruption when the bytes are not one, UpgradeNeeded when a newer build wrote it."""
    return decoded(_JOURNAL, unframe(KIND_JOURNAL, data, "journal", build), "journal", Corruption)


def encode_catalogue(shards: Mapping[str, str]) -> bytes:
    """The durable bytes of a catalogue: the id of each shard by its name, "" where the shard was dropped."""
    document = {"version": 1, "crc32": json_crc(shards), "shards": dict(sorted(shards.items()))}
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def decode_catalogue(data: bytes) -> dict[str, str]:
    """Read a catalogue. Raises Corruption."""
    try:
        found = json.loads(data)
        shards = {str(name): str(shard_id) for name, shard_id in found["shards"].items()}
        crc32 = found["crc32"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Corruption(f"a catalogue of {len(data)} bytes does not make sense: {error}") from error
    if crc32 != json_crc(shards):
        raise Corruption(f"a catalogue of {len(data)} bytes fails its checksum")
    return shards
