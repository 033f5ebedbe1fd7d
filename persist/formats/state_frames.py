"""Frames: the durable bytes of States, state diffs, bundles, lists of lent blobs, bindings and publications.

A frame is: magic (4 bytes), kind (1), format version (1), CRC-32 of kind, version and body (u32, little-endian), body.
The body is a record as MessagePack. Every frame is verified when it is read: Corruption if that fails, UpgradeNeeded if
a newer version wrote it.

A version of persist reads one or more format versions. All processes that serve a location write the format version of
that location (`persist.commit.location_identity`), so that they can read each other's bytes.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

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
KIND_LAST = b"E"  # a state diff after which the shard is dropped: visible to listings of the log without decoding
KIND_ROLLUP = b"R"
KIND_BINDING = b"B"
KIND_BUNDLE = b"P"
KIND_LOAN = b"L"  # the keys of blobs that are lent
KIND_JOURNAL = b"J"

_FORMAT_AT = 5
_HEADER = struct.Struct("<4scBI")
HEAD_BYTES = _HEADER.size  # enough to distinguish frames, because they include the checksum
_STATE = msgspec.msgpack.Decoder(State)
_DIFF = msgspec.msgpack.Decoder(StateDiff)
_BINDING = msgspec.msgpack.Decoder(LocationBinding)
_LISTING = msgspec.msgpack.Decoder(Listing)
_LENT = msgspec.msgpack.Decoder(LentKeys)
_JOURNAL = msgspec.msgpack.Decoder(Journal)
_T = TypeVar("_T")


@dataclass(frozen=True, eq=False)
class Build:
    """What a version of persist reads and writes: its format versions, ascending, and the known features of States."""

    formats: tuple[int, ...] = (1,)
    features: frozenset[str] = frozenset()

    @property
    def newest(self) -> int:
        return self.formats[-1]

    @property
    def known(self) -> str:
        return ", ".join(f"format version {version}" for version in self.formats)


THIS_BUILD = Build()
FIRST_FORMAT = 1  # of a location before its first upgrade
NEWEST_FORMAT = THIS_BUILD.newest  # of a new location


# The `decode_` functions raise Corruption if the bytes are not valid, and UpgradeNeeded if a newer version wrote them.


def encode_diff(change: StateDiff, version: int = NEWEST_FORMAT, *, ends: bool = False) -> bytes:
    """The durable bytes of a state diff. `ends`: the shard is dropped after it."""
    return frame(KIND_LAST if ends else KIND_DIFF, encoded(change), version)


def decode_diff(data: bytes, build: Build = THIS_BUILD) -> StateDiff:
    kind = KIND_LAST if data.startswith(ENDED) else KIND_DIFF
    change = _decode(_DIFF, kind, data, "state diff", build)
    _check_features(change.features or (), "state diff", build)
    return change


def encode_state(state: State, version: int = NEWEST_FORMAT) -> bytes:
    """The durable bytes of a whole State: a rollup."""
    return frame(KIND_ROLLUP, encoded(state), version)


def decode_state(data: bytes, build: Build = THIS_BUILD) -> State:
    state = _decode(_STATE, KIND_ROLLUP, data, "rollup", build)
    _check_features(state.features, "rollup", build)
    return remembering(state)


def encode_listing(listing: Listing, version: int = NEWEST_FORMAT) -> bytes:
    """The durable bytes of a bundle."""
    return frame(KIND_BUNDLE, encoded(listing), version)


def decode_listing(data: bytes) -> Listing:
    return _decode(_LISTING, KIND_BUNDLE, data, "bundle", THIS_BUILD)


def encode_lent(lent: LentKeys, version: int = NEWEST_FORMAT) -> bytes:
    """The durable bytes of a list of lent blobs."""
    return frame(KIND_LOAN, encoded(lent), version)


def decode_lent(data: bytes) -> LentKeys:
    return _decode(_LENT, KIND_LOAN, data, "list of lent blobs", THIS_BUILD)


def encode_binding(binding: LocationBinding) -> bytes:
    """The durable bytes of a binding, in the first format version, so that every version of persist can read them."""
    return frame(KIND_BINDING, encoded(binding), FIRST_FORMAT)


def decode_binding(data: bytes, build: Build = THIS_BUILD) -> LocationBinding:
    return _decode(_BINDING, KIND_BINDING, data, "binding", build)


def encode_journal(journal: Journal) -> bytes:
    """The durable bytes of a journal, in the first format version; its entries have their own."""
    return frame(KIND_JOURNAL, encoded(journal), FIRST_FORMAT)


def decode_journal(data: bytes, build: Build = THIS_BUILD) -> Journal:
    return _decode(_JOURNAL, KIND_JOURNAL, data, "journal", build)


def format_of(data: bytes) -> int:
    """The format version of a verified frame."""
    return data[_FORMAT_AT]


def frame(kind: bytes, body: bytes, version: int) -> bytes:
    return _HEADER.pack(MAGIC, kind, version, _checksum(kind, version, body)) + body


def unframe(kind: bytes, data: bytes, what: str, build: Build) -> memoryview:
    """The body of a frame. Raises Corruption if the frame is not valid, UpgradeNeeded for an unknown version."""
    if len(data) < _HEADER.size:
        raise Corruption(f"a {what} has only {len(data)} bytes")
    magic, actual_kind, version, checksum = _HEADER.unpack_from(data)
    if magic != MAGIC or actual_kind != kind:
        raise Corruption(f"the bytes are no {what}: they begin with {data[:5]!r}")
    body = memoryview(data)[_HEADER.size :]
    if _checksum(kind, version, body) != checksum:
        raise Corruption(f"a {what} of {len(data)} bytes fails its checksum or is truncated")
    if version not in build.formats:
        raise UpgradeNeeded(f"a {what} has format version {version}; this version reads {build.known}: upgrade persist")
    return body


def _decode(decoder: msgspec.msgpack.Decoder[_T], kind: bytes, data: bytes, what: str, build: Build) -> _T:
    return decoded(decoder, unframe(kind, data, what, build), what, Corruption)


def _checksum(kind: bytes, version: int, body: bytes | memoryview) -> int:
    return zlib.crc32(body, zlib.crc32(kind + bytes([version])))


def _check_features(features: Iterable[str], what: str, build: Build) -> None:
    unknown = [name for name in features if name not in build.features]
    if unknown:
        raise UpgradeNeeded(
            f"a {what} needs {', '.join(unknown)}, which this version does not support: upgrade persist"
        )


def encode_catalogue(shards: Mapping[str, str]) -> bytes:
    """The durable bytes of a catalogue: the id of each shard by its name, "" for a dropped shard."""
    document = {"version": 1, "crc32": json_crc(shards), "shards": dict(sorted(shards.items()))}
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def decode_catalogue(data: bytes) -> dict[str, str]:
    try:
        document = json.loads(data)
        shards = {str(name): str(shard_id) for name, shard_id in document["shards"].items()}
        crc32 = document["crc32"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Corruption(f"a catalogue of {len(data)} bytes is not valid: {error}") from error
    if crc32 != json_crc(shards):
        raise Corruption(f"a catalogue of {len(data)} bytes fails its checksum")
    return shards
