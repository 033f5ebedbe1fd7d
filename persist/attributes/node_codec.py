"""Nodes of the attribute index as bytes: at most 32 KiB, packed columns of fixed width."""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from persist.core.attribute import KEY_BYTES
from persist.core.errors import Corruption, UpgradeNeeded

# Columns of fixed width as few bytes: a byte that is the same in all entries is written once.
#
# Keys of one node lie close together, most values and offsets are small, so that most of their bytes are alike. A
# packed column of `width` bytes an entry is
#
#     varies   which bytes differ between entries (u16, little-endian, bit `i` for the byte at `i` of an entry)
#     same     those that do not, in their order, once
#     planes   of each byte that varies, in order: that byte of all entries
#
# Of no entries there is no column. It is read and written byte by byte of the width and never entry by entry.


WIDTH_MAX = 16  # bits of `varies`
_VARIES = struct.Struct("<H")


def pack_column(column: bytes, width: int) -> bytes:
    """The column, whose entries have `width` bytes each (at most 16), packed."""
    entries = len(column) // width
    if not entries:
        return b""
    varies, same, planes = 0, bytearray(), []
    for at in range(width):
        plane = column[at::width]
        if plane == plane[:1] * entries:
            same += plane[:1]
        else:
            varies |= 1 << at
            planes.append(plane)
    return b"".join((_VARIES.pack(varies), bytes(same), *planes))


def unpack_column(data: bytes | memoryview, at: int, entries: int, width: int) -> tuple[bytearray, int]:
    """The column of `entries` that begins at `at`, and where it ends. Raises Corruption when it does not fit."""
    if not entries:
        return bytearray(), at
    end = at + packed_bytes(data, at, entries, width)
    if end > len(data):
        raise Corruption("a column of a node of the attribute index goes beyond its end")
    [varies] = _VARIES.unpack_from(data, at)
    at += _VARIES.size
    pattern, moving = bytearray(width), [byte for byte in range(width) if varies >> byte & 1]
    for byte in range(width):
        if not varies >> byte & 1:
            pattern[byte] = data[at]
            at += 1
    column = pattern * entries
    for byte in moving:
        column[byte::width] = data[at : at + entries]
        at += entries
    return column, end


def packed_bytes(data: bytes | memoryview, at: int, entries: int, width: int) -> int:
    """How long the column is that begins at `at`. Raises Corruption when it is none of this width."""
    if not entries:
        return 0
    if len(data) - at < _VARIES.size:
        raise Corruption("a node of the attribute index ends where a column begins")
    [varies] = _VARIES.unpack_from(data, at)
    if varies >> width:
        raise Corruption(f"a column of the attribute index has bytes beyond its width of {width}")
    moving = varies.bit_count()
    return int(_VARIES.size + width - moving + moving * entries)


def packed_bytes_of(data: bytes | memoryview, at: int, entries: int, widths: Sequence[int]) -> int:
    """How long the columns of these widths are that begin at `at`, one after the other."""
    end = at
    for width in widths:
        end += packed_bytes(data, end, entries, width)
    return end - at


# Nodes of the attribute index as bytes: at most 32 KiB, columns of fixed width, checked when they are read.
#
# A node is a header and then its columns, little-endian:
#
#     header   kind (1 byte, L or I), format version (u8), entries (u16), CRC-32 of all but itself (u32), offset (u64)
#     leaf     keys (16 bytes each, ascending), values (int64)
#     index    keys (16 bytes each, ascending: no key of the child or a later one is less), and for each child
#              its offset (u64), the lowest offset of any node of its sub-tree (u64), its length (u16)
#
# A key that is less than an index node's first belongs to its first child. Each column is packed (`pack_column`).
# Instead of the lowest offset, its distance before the child's own offset is written, which is 0 above leaves.


NODE_BYTES_MAX = 32 * 1024
LEAF_ENTRIES_MAX = 1_000
INDEX_ENTRIES_MAX = 960
VALUE_BYTES = 8
VERSION = 1  # of the format
OVERHEAD_BYTES = 500  # of a node's Python objects, for the cache's account

_HEADER = struct.Struct("<cBHIQ")
_REST = struct.Struct("<cBHQ")  # the header without its checksum
_VALUE = struct.Struct("<q")
HEADER_BYTES = _HEADER.size
_LEAF, _INDEX = b"L", b"I"
_CHILD_BYTES = KEY_BYTES + 8 + 8 + 2
_ALL = (1 << 64) - 1
_WIDTHS = {_LEAF: (KEY_BYTES, VALUE_BYTES), _INDEX: (KEY_BYTES, 8, 8, 2)}


@dataclass(frozen=True, slots=True)
class Shape:
    """How large the pieces of an index become. Only tests and benchmarks want others."""

    leaf_entries_max: int = LEAF_ENTRIES_MAX
    index_entries_max: int = INDEX_ENTRIES_MAX
    chunk_bytes_target: int = 8 * 1024 * 1024  # a flush fills one chunk after another: this bounds its memory
    chunks_max: int = 1_000  # that the State names: a flush that comes near moves more leaves
    crowded_moves_max: int = 256  # leaves that one flush moves for that reason


DEFAULT_SHAPE = Shape()

Update = tuple[bytes, int | None]  # key, value (None: delete)
Child = tuple[bytes, int, int, int]  # least key, offset, lowest offset of the sub-tree, length


class Leaf:
    """Keys and values, as two columns."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: bytes, values: bytes) -> None:
        self.keys = keys
        self.values = values

    def __len__(self) -> int:
        return len(self.keys) // KEY_BYTES

    @property
    def size(self) -> int:
        """Bytes that it takes in a cache."""
        return len(self.keys) + len(self.values) + OVERHEAD_BYTES

    @property
    def first(self) -> bytes:
        return self.keys[:KEY_BYTES]

    def get(self, key: bytes) -> int | None:
        at = locate(self.keys, key, 0)
        if self.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] != key:
            return None
        value: int = _VALUE.unpack_from(self.values, at * VALUE_BYTES)[0]
        return value

    def entries(self, start: int = 0) -> Iterable[tuple[bytes, int]]:
        """Keys and values from the position `start` on."""
        keys = self.keys
        values = _column("q", self.values)
        for at in range(start, len(values)):
            yield keys[at * KEY_BYTES : (at + 1) * KEY_BYTES], values[at]

    def updated(self, updates: Sequence[Update]) -> tuple[Leaf, int]:
        """The leaf with `updates` (ascending by key, no key twice) applied, of any length; by how much it grew."""
        if updates and updates[0][0] > self.keys[-KEY_BYTES:] and all(value is not None for _, value in updates):
            added = array("q", (value for _, value in updates if value is not None))  # keys are often inserted in order
            return Leaf(self.keys + b"".join([key for key, _ in updates]), self.values + _little(added).tobytes()), len(
                updates
            )
        keys: list[bytes] = []
        values: list[bytes] = []
        done = 0  # entries copied so far
        for key, value in updates:
            at = locate(self.keys, key, done)
            keys.append(self.keys[done * KEY_BYTES : at * KEY_BYTES])
            values.append(self.values[done * VALUE_BYTES : at * VALUE_BYTES])
            if value is not None:
                keys.append(key)
                values.append(_VALUE.pack(value))
            known = self.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] == key
            done = at + known
        keys.append(self.keys[done * KEY_BYTES :])
        values.append(self.values[done * VALUE_BYTES :])
        leaf = Leaf(b"".join(keys), b"".join(values))
        return leaf, len(leaf) - len(self)

    def split(self, at: Sequence[int]) -> list[Leaf]:
        """The leaf cut before these positions."""
        bounds = [0, *at, len(self)]
        return [
            Leaf(self.keys[a * KEY_BYTES : b * KEY_BYTES], self.values[a * VALUE_BYTES : b * VALUE_BYTES])
            for a, b in pairwise(bounds)
        ]

    def encode(self, offset: int) -> bytes:
        return _encode(_LEAF, len(self), offset, self.keys, self.values)


class NodeIndex:
    """Children by their least keys, as four columns."""

    __slots__ = ("keys", "lengths", "lows", "offsets")

    def __init__(self, keys: bytes, offsets: array[int], lows: array[int], lengths: array[int]) -> None:
        self.keys = keys
        self.offsets = offsets
        self.lows = lows
        self.lengths = lengths

    @classmethod
    def of(cls, children: Sequence[Child]) -> NodeIndex:
        return cls(
            b"".join(child[0] for child in children),
            array("Q", (child[1] for child in children)),
            array("Q", (child[2] for child in children)),
            array("H", (child[3] for child in children)),
        )

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def size(self) -> int:
        """Bytes that it takes in a cache."""
        return len(self) * _CHILD_BYTES + OVERHEAD_BYTES

    @property
    def first(self) -> bytes:
        return self.keys[:KEY_BYTES]

    def key(self, at: int) -> bytes:
        return self.keys[at * KEY_BYTES : (at + 1) * KEY_BYTES]

    def child_of(self, key: bytes) -> int:
        """The position of the child where `key` is if it is anywhere."""
        at = locate(self.keys, key, 0)
        return at if self.key(at) == key else max(at - 1, 0)

    def child(self, at: int) -> Child:
        return self.key(at), self.offsets[at], self.lows[at], self.lengths[at]

    def replaced(self, changes: dict[int, list[Child]]) -> NodeIndex:
        """The node with the children at these positions replaced by none, one or several; of any length."""
        if all(len(children) == 1 for children in changes.values()):
            keys = bytearray(self.keys)
            offsets, lows, lengths = self.offsets[:], self.lows[:], self.lengths[:]
            for at, [child] in changes.items():
                keys[at * KEY_BYTES : (at + 1) * KEY_BYTES] = child[0]
                offsets[at], lows[at], lengths[at] = child[1:]
            return NodeIndex(bytes(keys), offsets, lows, lengths)
        pieces: list[bytes] = []
        offsets, lows, lengths = array("Q"), array("Q"), array("H")
        done = 0
        for at in sorted(changes):
            pieces.append(self.keys[done * KEY_BYTES : at * KEY_BYTES])
            offsets += self.offsets[done:at]
            lows += self.lows[done:at]
            lengths += self.lengths[done:at]
            for key, offset, low, length in changes[at]:
                pieces.append(key)
                offsets.append(offset)
                lows.append(low)
                lengths.append(length)
            done = at + 1
        pieces.append(self.keys[done * KEY_BYTES :])
        offsets += self.offsets[done:]
        lows += self.lows[done:]
        lengths += self.lengths[done:]
        return NodeIndex(b"".join(pieces), offsets, lows, lengths)

    def split(self, at: Sequence[int]) -> list[NodeIndex]:
        """The node cut before these positions."""
        bounds = [0, *at, len(self)]
        return [
            NodeIndex(self.keys[a * KEY_BYTES : b * KEY_BYTES], self.offsets[a:b], self.lows[a:b], self.lengths[a:b])
            for a, b in pairwise(bounds)
        ]

    def encode(self, offset: int) -> bytes:
        lows = _less(self.offsets, self.lows)
        columns = [_little(column).tobytes() for column in (self.offsets, lows, self.lengths)]
        return _encode(_INDEX, len(self), offset, self.keys, *columns)


Node = Leaf | NodeIndex


def locate(keys: bytes, key: bytes, start: int) -> int:
    """The position of the first of the sorted `keys` from `start` on that is not less than `key`."""
    low, high = start, len(keys) // KEY_BYTES
    if high > low and keys[-KEY_BYTES:] < key:  # beyond the last: keys are often inserted in order
        return high
    while low < high:
        middle = (low + high) >> 1
        at = middle * KEY_BYTES
        if keys[at : at + KEY_BYTES] < key:
            low = middle + 1
        else:
            high = middle
    return low


def decode(data: bytes, offset: int) -> Node:
    """Read the node that was written at `offset`. Raises Corruption when the bytes are not it, UpgradeNeeded."""
    if len(data) < HEADER_BYTES:
        raise Corruption(f"a node of the attribute index has only {len(data)} bytes")
    kind, version, entries, checksum, written_at = _HEADER.unpack_from(data)
    body = memoryview(data)[HEADER_BYTES:]
    if (
        kind not in _WIDTHS
        or written_at != offset
        or zlib.crc32(body, zlib.crc32(_REST.pack(kind, version, entries, written_at))) != checksum
    ):
        raise Corruption(f"the node of the attribute index at offset {offset} fails its checksum or is another")
    if version != VERSION:
        raise UpgradeNeeded(f"a node of the attribute index has version {version}; this persist knows {VERSION}")
    if len(body) != packed_bytes_of(body, 0, entries, _WIDTHS[kind]):
        raise Corruption(f"the node of the attribute index at offset {offset} has another length than its columns")
    columns, at = [], 0
    for width in _WIDTHS[kind]:
        column, at = unpack_column(body, at, entries, width)
        columns.append(column)
    if kind == _LEAF:
        return Leaf(bytes(columns[0]), bytes(columns[1]))
    offsets, lows = _column("Q", columns[1]), _column("Q", columns[2])
    return NodeIndex(bytes(columns[0]), offsets, _less(offsets, lows), _column("H", columns[3]))


def check_nodes(data: bytes, first: int) -> None:
    """Check the nodes of a whole chunk, of which the first is at the offset `first`. Raises as `decode`."""
    at = 0
    while at < len(data):
        if len(data) - at < HEADER_BYTES:
            raise Corruption(f"{len(data) - at} bytes at the end of a chunk of the attribute index are no node")
        kind, _, entries, _, _ = _HEADER.unpack_from(data, at)
        body = packed_bytes_of(data, at + HEADER_BYTES, entries, _WIDTHS[kind]) if kind in _WIDTHS else 0
        length = HEADER_BYTES + body
        decode(data[at : at + length], first + at)
        at += length


def _encode(kind: bytes, entries: int, offset: int, *columns: bytes) -> bytes:
    body = b"".join(pack_column(column, width) for column, width in zip(columns, _WIDTHS[kind], strict=True))
    checksum = zlib.crc32(body, zlib.crc32(_REST.pack(kind, VERSION, entries, offset)))
    return _HEADER.pack(kind, VERSION, entries, checksum, offset) + body


def _less(offsets: array[int], others: array[int]) -> array[int]:
    """By how much each of the others lies before the offset, modulo 2**64; of what this gives it is the inverse."""
    nothing = array("Q", bytes(8 * len(offsets)))
    if offsets == others:  # above leaves, which are most
        return nothing
    if others == nothing:
        return offsets[:]
    return array("Q", ((offset - other) & _ALL for offset, other in zip(offsets, others, strict=True)))


def _column(code: str, data: bytes | bytearray | memoryview) -> array[int]:
    column = array(code)
    column.frombytes(data)
    return _little(column)


def _little(column: array[int]) -> array[int]:
    """The column with its bytes in little-endian order, or back."""
    if sys.byteorder == "little":
        return column
    swapped = column[:]
    swapped.byteswap()
    return swapped


assert HEADER_BYTES + LEAF_ENTRIES_MAX * (KEY_BYTES + VALUE_BYTES) <= NODE_BYTES_MAX
assert HEADER_BYTES + INDEX_ENTRIES_MAX * _CHILD_BYTES <= NODE_BYTES_MAX
