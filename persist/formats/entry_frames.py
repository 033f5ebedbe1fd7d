"""Entries of the commit history <-> the bytes of a file: blocks, each by itself compressed, and an index at the end.

So a page of a long history costs the index and a block or two. When a new file takes in an older one, blocks that are
large enough are copied as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

from persist.core.audit_log import Block, BlockAt, BlockIndex, Committed
from persist.core.errors import Corruption
from persist.core.ids import SeqNo
from persist.formats.state_frames import NEWEST_FORMAT, decode_block, decode_blocks, encode_block, encode_blocks

BLOCK_ENTRIES = 500  # at least so many a full block has, unless they say much
BLOCK_BYTES = 64 * 1024  # or what callers have said in them is so much
BLOCK_BYTES_MAX = 64 * 1024 * 1024  # of one block, before it was compressed
COMPRESSION = 1  # of zlib: entries are much alike, so more would cost much and gain nothing

Commits = list[tuple[SeqNo, Committed]]


class FileWriter:
    """Writes the bytes of one file: `add` commits and whole files, ascending, then `finish`."""

    def __init__(self, version: int = NEWEST_FORMAT) -> None:
        self._version = version
        self._written = bytearray()
        self._blocks: list[BlockAt] = []
        self._open: Commits = []
        self._entries = self._info_bytes = 0

    def add(self, commits: Iterable[tuple[SeqNo, Committed]]) -> None:
        for seqno, commit in commits:
            self._open.append((seqno, commit))
            self._entries += len(commit.entries)
            self._info_bytes += commit.info_bytes
            if self._entries >= BLOCK_ENTRIES or self._info_bytes >= BLOCK_BYTES:
                self._close_block()

    def add_file(self, data: bytes, index_at: int) -> None:
        """All of another file. Raises Corruption."""
        for at in read_index(data[index_at:]).blocks:
            piece = data[at.offset : at.offset + at.length]
            commits = read_block(piece, at)
            if at.entries >= BLOCK_ENTRIES or at.length >= BLOCK_BYTES:
                self._close_block()
                self._append(piece, at.first, at.last, at.entries)
            else:
                self.add(commits)

    def finish(self) -> tuple[bytes, int, tuple[BlockAt, ...]]:
        """The bytes, where the index begins in them, and the blocks."""
        self._close_block()
        index_at = len(self._written)
        index = encode_blocks(BlockIndex(tuple(self._blocks)), self._version)
        return bytes(self._written) + index, index_at, tuple(self._blocks)

    def _close_block(self) -> None:
        if self._open:
            data = zlib.compress(encode_block(Block(tuple(self._open)), self._version), COMPRESSION)
            self._append(data, self._open[0][0], self._open[-1][0], self._entries)
            self._open, self._entries, self._info_bytes = [], 0, 0

    def _append(self, data: bytes, first: SeqNo, last: SeqNo, entries: int) -> None:
        self._blocks.append(BlockAt(first, last, entries, len(self._written), len(data)))
        self._written += data


def read_index(data: bytes) -> BlockIndex:
    """The index of a file, from where it begins. Raises Corruption, UpgradeNeeded."""
    return decode_blocks(data)


def read_block(data: bytes, at: BlockAt) -> Commits:
    """The commits of a block, ascending. Raises Corruption, UpgradeNeeded."""
    inflating = zlib.decompressobj()
    try:
        frame = inflating.decompress(data, BLOCK_BYTES_MAX)
    except zlib.error as error:
        raise Corruption(f"a block of history of {len(data)} bytes cannot be read: {error}") from error
    commits = list(decode_block(frame).commits)
    if not commits or (commits[0][0], commits[-1][0]) != (at.first, at.last):
        raise Corruption(f"a block of history does not hold v{at.first} to v{at.last}, as its index says")
    return commits


def descending(blocks: Iterable[BlockAt], before: SeqNo) -> Iterator[BlockAt]:
    """The blocks with commits up to `before`, newest first."""
    return reversed([at for at in blocks if at.first <= before])
