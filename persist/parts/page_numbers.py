"""Numbers in the heads and bodies of Parquet's pages: Thrift's compact protocol, and packed ones.

The format is https://github.com/apache/parquet-format: `parquet.thrift` in Thrift's compact protocol, `Encodings.md`.
What Arrow might read in another way than we do is refused.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

EXACT_VALUES = 256 * 1024  # of which lengths or places are worked out one by one
BLOCK_VALUES = 64 * 1024  # of a block of packed numbers
WIDTH_MAX = 32  # bits of a packed number
# Types of Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 12
Numbers = npt.NDArray[np.int64]


def _bits(data: memoryview, bits: Numbers, width: int | Numbers) -> Numbers:
    """The numbers of `width` bits, up to 32, which begin at some bits of the data."""
    padded = np.frombuffer(bytes(data) + bytes(8), np.uint8)
    words = np.ndarray((len(padded) - 7,), "<u8", padded, strides=(1,))
    found = words[bits >> 3].astype(np.int64) >> (bits & 7)  # the sign fills up bits beyond those that are wanted
    return np.asarray(found & ((np.int64(1) << width) - 1), np.int64)


class Reader:
    """Reads numbers from a place on. Raises IndexError or ValueError at the end of the data."""

    DEPTH_MAX = 8  # of structs in structs

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self.at = at

    def varint(self) -> int:
        found = 0
        for shift in range(0, 70, 7):
            byte = self._data[self.at]
            self.at += 1
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return int(found)
        raise ValueError("a number has more than ten bytes")

    @property
    def left(self) -> int:
        """How many bytes are left."""
        return len(self._data) - self.at

    def byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def bytes(self, count: int) -> memoryview:
        start = self.at
        self._skip(count)
        return self._data[start : start + count]

    def signed(self, bits: int) -> int:
        found = self.varint()
        if found >> bits:
            raise ValueError(f"a number has more than {bits} bits")
        return (found >> 1) ^ -(found & 1)

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """The numbers, flags and structs of a struct of Thrift by the numbers of its fields; None for all else.

        Of a field that comes twice Arrow might take the other one.
        """
        if depth > self.DEPTH_MAX:
            raise ValueError("the head of a page is nested too deep")
        found: dict[int, Any] = {}
        name = 0
        while head := self._data[self.at]:
            self.at += 1
            name = name + (head >> 4) if head >> 4 else self.signed(16)
            if name <= 0 or name >> 15 or name in found:
                raise ValueError(f"the head of a page has a field {name} that is out of place")
            found[name] = self._value(head & 15, depth)
        self.at += 1
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind == _I32:
            return self.signed(32)
        if kind in (_I16, _I64):
            self.signed(64)
        elif kind in (_BYTE, _DOUBLE, _BINARY):
            self._skip(self.varint() if kind == _BINARY else 1 if kind == _BYTE else 8)
        else:
            raise ValueError(f"the head of a page has a field of type {kind}, which the format does not have there")
        return None

    def _skip(self, count: int) -> None:
        if count > self.left:
            raise ValueError("there are fewer bytes than are told")
        self.at += count

    def packed_head(self, most: int) -> tuple[int, int, int, int]:
        """That of numbers in the encoding DELTA_BINARY_PACKED: values of a block, its parts, all values, the first."""
        block, parts, total = self.varint(), self.varint(), self.varint()
        if not 0 < block <= BLOCK_VALUES or block % 128 or not parts or block % (32 * parts):
            raise ValueError(f"numbers are packed in blocks of {block} with {parts} parts")
        if total > min(most, EXACT_VALUES):
            raise ValueError(f"{total} numbers are packed where there may be {min(most, EXACT_VALUES)}")
        return block, parts, total, self.signed(32)

    def packed(self, most: int) -> Numbers:
        """Numbers in the encoding DELTA_BINARY_PACKED, of which there may be `most`; Arrow takes 32 bits of each."""
        block, parts, total, first = self.packed_head(most)
        each, left, origin = block // parts, total - 1, self.at
        least: list[int] = []
        begins: list[int] = []
        widths = bytearray()
        while left > 0:
            least.append(self.signed(32))
            used = bytes(self._data[self.at : self.at + -(-min(left, block) // each)])  # the last parts may be missing
            self._skip(parts)
            begins.append(8 * (self.at - origin))
            widths += used
            self._skip(sum(used) * each // 8)
            left -= block
        wide = np.frombuffer(widths, np.uint8).astype(np.int64)
        if int(wide.max(initial=0)) > WIDTH_MAX:
            raise ValueError("numbers are packed in more than 32 bits")
        blocks, before = np.arange(len(wide)) // parts, (np.cumsum(wide) - wide) * each
        starts = np.array(begins, np.int64)[blocks] + before - before[blocks * parts]
        places = starts[:, None] + np.arange(each) * wide[:, None]
        deltas = _bits(self._data[origin : self.at], places, wide[:, None]) + np.array(least, np.int64)[blocks, None]
        found = first + np.concatenate([[0], np.cumsum(deltas.reshape(-1)[: max(0, total - 1)])])
        return found[:total].astype(np.int32).astype(np.int64)

    def runs(self, most: int, width: int) -> Numbers:
        """Up to `most` numbers of `width` bits in the hybrid of runs and packed bits."""
        if width > WIDTH_MAX:
            raise ValueError("numbers are packed in more than 32 bits")
        starts: list[int] = []
        steps: list[int] = []
        counts: list[int] = []
        left = most
        while left > 0 and self.at < len(self._data):
            head = self.varint()
            is_packed, count = head & 1, (head >> 1) * (8 if head & 1 else 1)
            if not count:
                raise ValueError("a run has no values")
            starts.append(8 * self.at)
            steps.append(width if is_packed else 0)
            counts.append(min(left, count))
            bits = min(left + 7, count) * width if is_packed else width  # the last packed bits may be missing
            self._skip(min((bits + 7) // 8, len(self._data) - self.at))
            left -= count
        each = np.array(counts, np.int64)
        inside = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
        places = np.repeat(np.array(starts, np.int64), each) + inside * np.repeat(np.array(steps, np.int64), each)
        return _bits(self._data[: self.at], places, width)
