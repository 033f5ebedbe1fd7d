"""Spill files: outcomes of tokens, or entries of the commit history, as a sorted run.

A file consists of blocks, each a separately compressed frame, and an index, which is a frame too. A block contains
pairs of a key and the MessagePack of a record, ascending by key; all keys of a file have the same length. The index has
the first key and the end of each block. So a lookup reads one block, and a page of a long history two or three.

The id of an outcome is stored with its last eight bytes first, because these are random even if the others are a time.
So its first four bytes are almost unique: the index of a file of outcomes contains those of all ids, and a lookup of a
missing id usually reads no block.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from persist.core.audit_log import Committed, TokenOutcome
from persist.core.errors import Corruption
from persist.core.ids import SeqNo
from persist.core.record import Record
from persist.core.spill import ENTRIES, OUTCOMES, SpillKind
from persist.formats.records import decoded, encoded
from persist.formats.state_frames import NEWEST_FORMAT, THIS_BUILD, Build, frame, unframe

KIND_BLOCK = b"H"
KIND_INDEX = b"I"
BLOCK_BYTES_MAX = 64 * 1024 * 1024  # of an uncompressed block
PREFIX_BYTES = 4

Pair = tuple[bytes, bytes]  # key and value


@dataclass(frozen=True, eq=False)
class RunLayout:
    """The layout of one kind. `to_key` converts its key in the State to that in a run, and `from_key` back.

    `key_bytes` is the length of keys; a block ends once its values have `block_bytes`; `compression` is zlib's level.
    `is_random`: the first bytes of keys distinguish them.
    """

    key_bytes: int
    to_key: Callable[[Any], bytes]
    from_key: Callable[[bytes], Any]
    decoder: msgspec.msgpack.Decoder[Any]
    block_bytes: int
    compression: int
    is_random: bool

    def pair(self, key: str | SeqNo, value: Record) -> Pair:
        return self.to_key(key), encoded(value)

    def value(self, data: bytes) -> Any:
        """Decode the record of a pair. Raises Corruption, UpgradeNeeded."""
        return decoded(self.decoder, data, "value of a spill file", Corruption)


LAYOUTS: Mapping[SpillKind, RunLayout] = {
    OUTCOMES: RunLayout(
        key_bytes=16,
        to_key=lambda key: bytes.fromhex(key[16:] + key[:16]),
        from_key=lambda key: (key[8:] + key[:8]).hex(),
        decoder=msgspec.msgpack.Decoder(TokenOutcome),
        block_bytes=1_536,  # lookups read one outcome
        compression=0,  # outcomes are mostly random
        is_random=True,
    ),
    ENTRIES: RunLayout(
        key_bytes=8,
        to_key=lambda seqno: int(seqno).to_bytes(8),
        from_key=lambda key: SeqNo(int.from_bytes(key)),
        decoder=msgspec.msgpack.Decoder(Committed),
        block_bytes=32 * 1024,  # read sequentially
        compression=1,  # entries are similar, so higher levels cost much and gain nothing
        is_random=False,
    ),
}


class Block(Record, frozen=True):
    """Pairs of a run, ascending by key."""

    pairs: tuple[Pair, ...]


class BlockIndex(Record, frozen=True):
    """The first keys of all blocks, their ends in the file (u64), and the prefixes of all keys (u32), if any.

    Integers are little-endian.
    """

    firsts: memoryview
    ends: memoryview
    prefixes: memoryview


_BLOCK = msgspec.msgpack.Decoder(Block)
_INDEX = msgspec.msgpack.Decoder(BlockIndex)


class RunIndex:
    """The index of a file, decoded from its bytes from `index_at` on. Raises Corruption, UpgradeNeeded.

    `size` is its memory in bytes.
    """

    def __init__(self, data: bytes, layout: RunLayout, index_at: int, build: Build = THIS_BUILD) -> None:
        index = decoded(_INDEX, unframe(KIND_INDEX, data, "index of a spill file", build), "index", Corruption)
        try:
            self._firsts: npt.NDArray[Any] = np.frombuffer(index.firsts, f"S{layout.key_bytes}")
            self._ends = np.frombuffer(index.ends, "<u8")
            self._prefixes = np.frombuffer(index.prefixes, "<u4")
        except ValueError as error:
            raise Corruption(f"the index of a spill file is not valid: {error}") from error
        if not len(self._ends) == len(self._firsts) > 0 or int(self._ends[-1]) != index_at:
            raise Corruption("the index of a spill file does not match its blocks")
        self._build = build
        self.size = len(index.firsts) + len(index.ends) + len(index.prefixes)

    def __len__(self) -> int:
        return len(self._firsts)

    def may_hold(self, key: bytes) -> bool:
        """False if there are prefixes and that of `key` is not among them."""
        prefix = np.uint32(int.from_bytes(key[:PREFIX_BYTES]))
        at = int(np.searchsorted(self._prefixes, prefix))
        return not len(self._prefixes) or (at < len(self._prefixes) and self._prefixes[at] == prefix)

    def block_of(self, key: bytes) -> int:
        """The number of the block that may contain this key; -1 if the key is before all of them."""
        return int(np.searchsorted(self._firsts, np.bytes_(key), "right")) - 1

    def place(self, number: int) -> tuple[int, int]:
        """The offset of this block in the file, and its length."""
        start = int(self._ends[number - 1]) if number else 0
        return start, int(self._ends[number]) - start

    def pairs(self, number: int, data: bytes) -> tuple[Pair, ...]:
        """The content of this block, ascending by key, from its bytes. Raises Corruption, UpgradeNeeded."""
        decompressor = zlib.decompressobj()
        try:
            block = decompressor.decompress(data, BLOCK_BYTES_MAX)
        except zlib.error as error:
            raise Corruption(f"a block of {len(data)} bytes of a spill file cannot be read: {error}") from error
        if not decompressor.eof:
            raise Corruption(f"a block of {len(data)} bytes of a spill file is truncated or too large")
        body = unframe(KIND_BLOCK, block, "block of a spill file", self._build)
        pairs = decoded(_BLOCK, body, "block of a spill file", Corruption).pairs
        if not pairs or pairs[0][0].rstrip(b"\0") != self._firsts[number]:  # numpy strips trailing zeros
            raise Corruption("a block of a spill file does not begin with the key in its index")
        return pairs


def encode_run(pairs: Sequence[Pair], layout: RunLayout, version: int = NEWEST_FORMAT) -> tuple[bytes, int]:
    """The bytes of a file with these pairs, ascending by key and at least one, and the offset of its index."""
    block_numbers = np.cumsum([len(value) for _, value in pairs]) // layout.block_bytes
    cuts = [0, *(np.flatnonzero(np.diff(block_numbers)) + 1).tolist(), len(pairs)]
    frames = (frame(KIND_BLOCK, encoded(Block(tuple(pairs[a:b]))), version) for a, b in pairwise(cuts))
    blocks = [zlib.compress(block, layout.compression) for block in frames]
    index = BlockIndex(
        memoryview(b"".join(pairs[first][0] for first in cuts[:-1])),
        memoryview(np.cumsum([len(block) for block in blocks]).astype("<u8").tobytes()),
        memoryview(_prefixes(pairs) if layout.is_random else b""),
    )
    content = b"".join(blocks)
    return content + frame(KIND_INDEX, encoded(index), version), len(content)


def _prefixes(pairs: Sequence[Pair]) -> bytes:
    return np.frombuffer(b"".join(key[:PREFIX_BYTES] for key, _ in pairs), ">u4").astype("<u4").tobytes()


def decode_run(data: bytes, layout: RunLayout, index_at: int) -> Iterator[Pair]:
    """All pairs of a file, ascending. Raises Corruption, UpgradeNeeded."""
    index = RunIndex(data[index_at:], layout, index_at)
    for number in range(len(index)):
        start, length = index.place(number)
        yield from index.pairs(number, data[start : start + length])
