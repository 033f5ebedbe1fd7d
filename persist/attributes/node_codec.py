"""Nodes of the attribute index as bytes: at most 32 KiB, packed columns of fixed width, checked when they are read.

A node is a header and then its columns, little-endian:

    header   kind (1 byte, L or I), format version (u8), entries (u16), CRC-32 of all but itself (u32), offset (u64)
    leaf     keys (16 bytes each, ascending), values (int64)
    index    keys (16 bytes each, ascending: no key of the child or a later one is less), and for each child
             its offset (u64), the distance of the lowest offset of its sub-tree before it (u64), its length (u16)

A key that is less than an index node's first belongs to its first child.

Keys of one node are close together and most values and offsets are small, so most of their bytes are equal: a byte that
is the same in all entries is written once. A packed column of `width` bytes per entry, empty without entries, is

    varies   which bytes differ between entries (u16, little-endian, bit `i` for the byte at `i` of an entry)
    same     the bytes that do not differ, in order, once
    planes   for each byte that varies, in order: that byte of all entries
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from persist.core.attribute import KEY_BYTES
from persist.core.errors import Corruption, UpgradeNeeded

_VARIES = struct.Struct("<H")
NODE_BYTES_MAX = 32 * 1024
LEAF_ENTRIES_MAX = 1_000
INDEX_ENTRIES_MAX = 960
VALUE_BYTES = 8
VERSION = 1  # of the format
OVERHEAD_BYTES = 500  # of a node's Python objects, for the accounting of the cache

_HEADER = struct.Struct("<cBHIQ")
_REST = struct.Struct("<cBHQ")  # the header without its checksum
_VALUE = struct.Struct("<q")
HEADER_BYTES = _HEADER.size
_LEAF, _INDEX = b"L", b"I"
_CHILD_BYTES = KEY_BYTES + 8 + 8 + 2
_WIDTHS = {_LEAF: (KEY_BYTES, VALUE_BYTES), _INDEX: (KEY_BYTES, 8, 8, 2)}


def pack_column(column: bytes, width: int) -> bytes:
    """Pack the column, whose entries have `width` bytes each (at most 16)."""
    if not column:
        return b""
    planes = np.ascontiguousarray(np.frombuffer(column, np.uint8).reshape(-1, width).T)
    varies = (planes != planes[:, :1]).any(axis=1)
    mask = sum(1 << int(at) for at in np.flatnonzero(varies))
    return b"".join((_VARIES.pack(mask), planes[~varies, 0].tobytes(), planes[varies].tobytes()))


def unpack_column(data: bytes | memoryview, at: int, entries: int, width: int) -> tuple[bytes, int]:
    """The column of `entries` that begins at `at`, and where it ends. Raises Corruption if it does not fit."""
    end = at + packed_bytes(data, at, entries, width)
    if end > len(data):
        raise Corruption("a column of a node of the attribute index extends beyond the node")
    if not entries:
        return b"", at
    [mask] = _VARIES.unpack_from(data, at)
    varies = np.array([mask >> byte & 1 for byte in range(width)], np.bool_)
    packed, same = np.frombuffer(data[at + _VARIES.size : end], np.uint8), width - mask.bit_count()
    table = np.empty((entries, width), np.uint8)
    table[:, ~varies] = packed[:same]
    table[:, varies] = packed[same:].reshape(-1, entries).T
    return table.tobytes(), end


def packed_bytes(data: bytes | memoryview, at: int, entries: int, *widths: int) -> int:
    """The length of the columns of these widths that begin at `at`, one after the other. Raises Corruption."""
    end = at
    for width in widths if entries else ():
        if len(data) - end < _VARIES.size:
            raise Corruption("a node of the attribute index ends where a column begins")
        [varies] = _VARIES.unpack_from(data, end)
        if varies >> width:
            raise Corruption(f"a column of the attribute index has bytes beyond its width of {width}")
        varying = varies.bit_count()
        end += int(_VARIES.size + width - varying + varying * entries)
    return end - at


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of the pieces of an index. Tests and benchmarks use smaller ones."""

    leaf_entries_max: int = LEAF_ENTRIES_MAX
    index_entries_max: int = INDEX_ENTRIES_MAX
    chunk_bytes_target: int = 8 * 1024 * 1024  # a flush writes one chunk after another: this bounds its memory
    chunks_max: int = 1_000  # in the State: a flush that approaches it rewrites more leaves
    crowded_moves_max: int = 256  # leaves that one flush rewrites for that reason


DEFAULT_SHAPE = Shape()

Update = tuple[bytes, int | None]  # key, value (None: delete)
Column = npt.NDArray[Any]  # of an index node, little-endian and unsigned
Child = tuple[bytes, int, int, int]  # least key, offset, lowest offset of the sub-tree, length


class _Keyed:
    """A node's column of sorted keys."""

    __slots__ = ("keys",)

    def __init__(self, keys: bytes) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def first(self) -> bytes:
        return self.keys[:KEY_BYTES]

    def key(self, at: int) -> bytes:
        """The key at a position; empty at the end."""
        return self.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]

    def locate(self, key: bytes, start: int = 0) -> int:
        """The position of the first key from `start` on that is not less than `key`."""
        return bisect_left(range(len(self)), key, start, key=self.key)


class Leaf(_Keyed):
    """Keys and values, as two columns."""

    __slots__ = ("values",)

    def __init__(self, keys: bytes, values: bytes) -> None:
        super().__init__(keys)
        self.values = values

    @property
    def size(self) -> int:
        """Bytes that it takes in a cache."""
        return len(self.keys) + len(self.values) + OVERHEAD_BYTES

    def get(self, key: bytes) -> int | None:
        at = self.locate(key)
        if self.key(at) != key:
            return None
        value: int = _VALUE.unpack_from(self.values, at * VALUE_BYTES)[0]
        return value

    def entries(self) -> Iterable[tuple[bytes, int]]:
        """Keys and values."""
        for at, value in enumerate(np.frombuffer(self.values, "<i8").tolist()):
            yield self.key(at), value

    def updated(self, updates: Sequence[Update]) -> tuple[Leaf, int]:
        """The leaf with `updates` (ascending by key, no key twice) applied, of any length; by how many it grew."""
        keys: list[bytes] = []
        values: list[bytes] = []
        done = 0  # entries copied so far
        for key, value in updates:
            at = self.locate(key, done)
            keys.append(self.keys[done * KEY_BYTES : at * KEY_BYTES])
            values.append(self.values[done * VALUE_BYTES : at * VALUE_BYTES])
            if value is not None:
                keys.append(key)
                values.append(_VALUE.pack(value))
            done = at + (self.key(at) == key)
        keys.append(self.keys[done * KEY_BYTES :])
        values.append(self.values[done * VALUE_BYTES :])
        leaf = Leaf(b"".join(keys), b"".join(values))
        return leaf, len(leaf) - len(self)

    def split(self, at: Sequence[int]) -> list[Leaf]:
        """The leaf split before these positions."""
        bounds = [0, *at, len(self)]
        return [
            Leaf(self.keys[a * KEY_BYTES : b * KEY_BYTES], self.values[a * VALUE_BYTES : b * VALUE_BYTES])
            for a, b in pairwise(bounds)
        ]

    def encode(self, offset: int) -> bytes:
        return _encode(_LEAF, len(self), offset, self.keys, self.values)


class NodeIndex(_Keyed):
    """Children by their least keys, as four columns."""

    __slots__ = ("lengths", "lows", "offsets")

    def __init__(self, keys: bytes, offsets: Column, lows: Column, lengths: Column) -> None:
        super().__init__(keys)
        self.offsets = offsets
        self.lows = lows
        self.lengths = lengths

    @classmethod
    def of(cls, children: Sequence[Child]) -> NodeIndex:
        keys, *columns = zip(*children, strict=True) if children else ((), (), (), ())
        return cls(b"".join(keys), *map(np.array, columns, ("<u8", "<u8", "<u2")))

    @property
    def size(self) -> int:
        """Bytes that it takes in a cache."""
        return len(self) * _CHILD_BYTES + OVERHEAD_BYTES

    def child_of(self, key: bytes) -> int:
        """The position of the child that may hold `key`."""
        at = self.locate(key)
        return at if self.key(at) == key else max(at - 1, 0)

    def child(self, at: int) -> Child:
        return self.key(at), int(self.offsets[at]), int(self.lows[at]), int(self.lengths[at])

    def replaced(self, changes: dict[int, list[Child]]) -> NodeIndex:
        """The node with the children at these positions replaced by none, one or several; of any length."""
        return NodeIndex.of([new for at in range(len(self)) for new in changes.get(at, (self.child(at),))])

    def split(self, at: Sequence[int]) -> list[NodeIndex]:
        """The node split before these positions."""
        bounds = [0, *at, len(self)]
        return [
            NodeIndex(self.keys[a * KEY_BYTES : b * KEY_BYTES], self.offsets[a:b], self.lows[a:b], self.lengths[a:b])
            for a, b in pairwise(bounds)
        ]

    def encode(self, offset: int) -> bytes:
        columns = (self.offsets, self.offsets - self.lows, self.lengths)  # differences modulo 2**64
        return _encode(_INDEX, len(self), offset, self.keys, *(column.tobytes() for column in columns))


Node = Leaf | NodeIndex


def decode(data: bytes, offset: int) -> Node:
    """Read the node that was written at `offset`. Raises Corruption, UpgradeNeeded."""
    if len(data) < HEADER_BYTES:
        raise Corruption(f"a node of the attribute index has only {len(data)} bytes")
    kind, version, entries, checksum, written_at = _HEADER.unpack_from(data)
    body = memoryview(data)[HEADER_BYTES:]
    if (
        kind not in _WIDTHS
        or written_at != offset
        or zlib.crc32(body, zlib.crc32(_REST.pack(kind, version, entries, written_at))) != checksum
    ):
        raise Corruption(f"the node of the attribute index at offset {offset} does not match its checksum or offset")
    if version != VERSION:
        raise UpgradeNeeded(f"a node of the attribute index has version {version}; this persist knows {VERSION}")
    columns, at = [], 0
    for width in _WIDTHS[kind]:
        column, at = unpack_column(body, at, entries, width)
        columns.append(column)
    if at != len(body):
        raise Corruption(f"the node of the attribute index at offset {offset} is longer than its columns")
    if kind == _LEAF:
        return Leaf(columns[0], columns[1])
    offsets, distances, lengths = map(np.frombuffer, columns[1:], ("<u8", "<u8", "<u2"))
    return NodeIndex(columns[0], offsets, offsets - distances, lengths)


def check_nodes(data: bytes, first: int) -> None:
    """Check the nodes of a whole chunk, the first of which is at the offset `first`. Raises as `decode`."""
    at = 0
    while at < len(data):
        if len(data) - at < HEADER_BYTES:
            raise Corruption(f"the last {len(data) - at} bytes of a chunk of the attribute index are not a node")
        kind, _, entries, _, _ = _HEADER.unpack_from(data, at)
        length = HEADER_BYTES + packed_bytes(data, at + HEADER_BYTES, entries, *_WIDTHS.get(kind, ()))
        decode(data[at : at + length], first + at)
        at += length


def _encode(kind: bytes, entries: int, offset: int, *columns: bytes) -> bytes:
    body = b"".join(pack_column(column, width) for column, width in zip(columns, _WIDTHS[kind], strict=True))
    checksum = zlib.crc32(body, zlib.crc32(_REST.pack(kind, VERSION, entries, offset)))
    return _HEADER.pack(kind, VERSION, entries, checksum, offset) + body


assert HEADER_BYTES + LEAF_ENTRIES_MAX * (KEY_BYTES + VALUE_BYTES) <= NODE_BYTES_MAX
assert HEADER_BYTES + INDEX_ENTRIES_MAX * _CHILD_BYTES <= NODE_BYTES_MAX
