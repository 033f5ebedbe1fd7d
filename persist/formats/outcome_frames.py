"""Outcomes of tokens <-> the bytes of a file: sorted, so that one is found without reading the others.

A file is: magic (4 bytes), version (1), nothing (3), count (u64), CRC-32 of the prefixes (u32), CRC-32 of the header
so far (u32); then for each outcome the first four bytes of its id (u32); then the outcomes, 61 bytes each. All numbers
are little-endian but for ids. An id is written with its last eight bytes first, since those are random also where the
others are a time: so the prefixes tell ids apart, and the place of a prefix is the place of its outcome. Each outcome
ends with the CRC-32 of its other bytes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from persist.core.dedup import TokenOutcome
from persist.core.errors import Corruption, UpgradeNeeded
from persist.core.frontier import Antichain

MAGIC = b"PSOC"
VERSION = 1
_HEAD = struct.Struct("<4sB3xQI")
_CRC = struct.Struct("<I")
_BODY = struct.Struct("<16sB16sqqq")
HEADER_BYTES = _HEAD.size + _CRC.size
OUTCOME_BYTES = _BODY.size + _CRC.size
PREFIX_BYTES = 4
_ROWS = np.dtype([("order", ">u8"), ("rest", f"V{OUTCOME_BYTES - 8}")])
_CLOSED = -1  # stands for the frontier `[]`

Prefixes = npt.NDArray[np.uint32]


def encode(outcomes: Mapping[str, TokenOutcome], files: Iterable[bytes] = ()) -> bytes:
    """The bytes of a file with these outcomes, by id, and those of the files. Raises Corruption when one is damaged."""
    bodies = [_encoded(key, outcome) for key, outcome in outcomes.items()]
    for data in files:
        count = len(read_prefixes(data))
        body = data[HEADER_BYTES + count * PREFIX_BYTES :]
        if sum(1 for _ in decode(body)) != count:
            raise Corruption(f"a file of {count} outcomes of {len(data)} bytes is cut short")
        bodies.append(body)
    rows = np.frombuffer(b"".join(bodies), _ROWS)
    rows = rows[np.argsort(rows["order"], kind="stable")]
    prefixes = (rows["order"] >> np.uint64(32)).astype("<u4").tobytes()
    head = _HEAD.pack(MAGIC, VERSION, len(rows), zlib.crc32(prefixes))
    return head + _CRC.pack(zlib.crc32(head)) + prefixes + rows.tobytes()


def read_prefixes(data: bytes) -> Prefixes:
    """The prefixes, of a file or of its beginning. Raises Corruption, UpgradeNeeded."""
    if len(data) < HEADER_BYTES or data[:4] != MAGIC or zlib.crc32(data[: _HEAD.size]) != _crc_at(data, _HEAD.size):
        raise Corruption(f"a file of outcomes of {len(data)} bytes has no sound header")
    _, version, count, checksum = _HEAD.unpack_from(data)
    if version != VERSION:
        raise UpgradeNeeded(f"a file of outcomes has version {version}; this persist knows {VERSION}: upgrade it")
    found = data[HEADER_BYTES : HEADER_BYTES + count * PREFIX_BYTES]
    if len(found) != count * PREFIX_BYTES or zlib.crc32(found) != checksum:
        raise Corruption(f"a file of {count} outcomes fails its checksum or is cut short")
    return np.frombuffer(found, "<u4")


def places(prefixes: Prefixes, key: str) -> tuple[int, int]:
    """Where in the file the outcome of this id may be: offset and length in bytes; 0 bytes: nowhere."""
    prefix = np.uint32(int(key[16:24], 16))
    first, last = (int(np.searchsorted(prefixes, prefix, side)) for side in ("left", "right"))
    start = HEADER_BYTES + len(prefixes) * PREFIX_BYTES
    return start + first * OUTCOME_BYTES, (last - first) * OUTCOME_BYTES


def decode(data: bytes) -> Iterator[tuple[str, TokenOutcome]]:
    """Ids and outcomes of a piece of a file. Raises Corruption."""
    if len(data) % OUTCOME_BYTES:
        raise Corruption(f"{len(data)} bytes of a file of outcomes are no whole outcomes")
    for at in range(0, len(data), OUTCOME_BYTES):
        if zlib.crc32(data[at : at + _BODY.size]) != _crc_at(data, at + _BODY.size):
            raise Corruption("an outcome in a file of outcomes fails its checksum")
        raw, length, digest, lower, upper, at_ms = _BODY.unpack_from(data, at)
        yield (raw[8:] + raw[:8]).hex(), TokenOutcome(_frontier(lower), _frontier(upper), digest[:length], at_ms)


def _encoded(key: str, outcome: TokenOutcome) -> bytes:
    raw = bytes.fromhex(key)
    lower, upper = (_CLOSED if f.element is None else f.element for f in (outcome.lower, outcome.upper))
    digest = outcome.digest
    body = _BODY.pack(raw[8:] + raw[:8], len(digest), digest, lower, upper, outcome.at_ms)
    return body + _CRC.pack(zlib.crc32(body))


def _frontier(element: int) -> Antichain:
    return Antichain(None if element == _CLOSED else element)


def _crc_at(data: bytes, at: int) -> int:
    found: int = _CRC.unpack_from(data, at)[0]
    return found
