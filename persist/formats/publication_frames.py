"""Journals of publications and catalogues <-> durable bytes."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping

import msgspec

from persist.core.blob_keys import Journal
from persist.core.errors import Corruption
from persist.formats.records import decoded, encoded
from persist.formats.state_frames import FIRST_FORMAT, THIS_BUILD, Build, frame, unframe

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
    body = json.dumps(dict(sorted(shards.items())), separators=(",", ":"))
    return f'{{"version":1,"crc32":{zlib.crc32(body.encode())},"shards":{body}}}\n'.encode()


def decode_catalogue(data: bytes) -> dict[str, str]:
    """Read a catalogue. Raises Corruption."""
    try:
        found = json.loads(data)
        shards = {str(name): str(shard_id) for name, shard_id in found["shards"].items()}
        crc32 = found["crc32"]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Corruption(f"a catalogue of {len(data)} bytes does not make sense: {error}") from error
    if crc32 != zlib.crc32(json.dumps(dict(sorted(shards.items())), separators=(",", ":")).encode()):
        raise Corruption(f"a catalogue of {len(data)} bytes fails its checksum")
    return shards
