"""CRC-32 of bytes of which some pieces are summed up already: these are not gone through again.

Two sums become one by arithmetic on polynomials over GF(2), modulo that of CRC-32, as in zlib's `crc32_combine`.
"""

from __future__ import annotations

import zlib

SUMMED_AGAIN_MAX = 256 * 1024  # bytes of a piece up to which going through them is quicker than the arithmetic
_POLYNOMIAL = 0xEDB88320  # of CRC-32, its bits in reverse: bit 31 is the coefficient of 1
_ONE = 1 << 31
_BYTE = 3  # 2 ** 3 bits


class Checksums:
    """Sums of pieces of a body, and of the body."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._known: dict[int, tuple[int, int]] = {}  # by where a large piece begins: its size and sum

    def of(self, start: int, size: int) -> int:
        """The CRC-32 of the bytes `[start, start + size)`."""
        found = zlib.crc32(self._body[start : start + size])
        if size > SUMMED_AGAIN_MAX:
            self._known[start] = (size, found)
        return found

    def whole(self) -> int:
        """The CRC-32 of the body. Pieces that were asked for are not read again, unless they overlap."""
        at, total = 0, 0
        for start, (size, found) in sorted(self._known.items()):
            if start >= at:
                total = joined(zlib.crc32(self._body[at:start], total), found, size)
                at = start + size
        return zlib.crc32(self._body[at:], total)


def joined(first: int, second: int, second_size: int) -> int:
    """The CRC-32 of two byte strings one after the other, given that of each, and how many bytes the second has."""
    return _product(_shift(second_size), first) ^ second


def _product(a: int, b: int) -> int:
    found = 0
    while a:
        if a & _ONE:
            found ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return found


def _powers() -> tuple[int, ...]:
    """`x ** (2 ** n)` for n in [0, 32): from there on they repeat."""
    found = [_ONE >> 1]
    while len(found) < 32:
        found.append(_product(found[-1], found[-1]))
    return tuple(found)


_POWERS = _powers()


def _shift(size: int) -> int:
    """`x` to the power of the bits of so many bytes."""
    found, place = _ONE, _BYTE
    while size:
        if size & 1:
            found = _product(_POWERS[place % 32], found)
        size >>= 1
        place += 1
    return found
