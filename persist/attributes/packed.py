"""Columns of fixed width as few bytes: a byte that is the same in all entries is written once.

Keys of one node lie close together, most values and offsets are small, so that most of their bytes are alike. A packed
column of `width` bytes an entry is

    varies   which bytes differ between entries (u16, little-endian, bit `i` for the byte at `i` of an entry)
    same     those that do not, in their order, once
    planes   of each byte that varies, in order: that byte of all entries

Of no entries there is no column. It is read and written byte by byte of the width and never entry by entry.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from persist.core.errors import Corruption

WIDTH_MAX = 16  # bits of `varies`
_VARIES = struct.Struct("<H")


def packed(column: bytes, width: int) -> bytes:
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


def unpacked(data: bytes | memoryview, at: int, entries: int, width: int) -> tuple[bytearray, int]:
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
