"""Bytes made of samples: the same ones for the same seed and number."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

SIZE_MAX = 256 * 1024
CHANGES_OF = (0, 1, 1, 1, 1, 2, 2, 3, 6)  # how many, each as likely
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 2**63 - 1, 2**64 - 1, 2**62, 1 << 30)
PIECES = (
    b"\x00", b"\xff\xff\xff\xff", b"\xff\xfe", b"\xed\xa0\x80", b"[" * 2000, b"{" * 500, b'"', b"\n", b"\r\n", b",",
    b"NaN", b"Infinity", b"1e400", b"-9223372036854775809", b"99999999999999999999999999", b"null", b"true",
    b'"__diff":9223372036854775807', b'"__time":-1', b'"\\ud800"', b"\\u0000", b"9999-12-31T23:59:60Z", b"@-1", b"PAR1",
    b"ARROW1", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 0\r\n", b"..%2f", b"%00", b"%ff", b" HTTP/1.1",
)  # fmt: skip

Change = Callable[[random.Random, bytearray], None]


def mutated(seed: str, number: int, samples: Sequence[bytes]) -> bytes:
    """The bytes of that number: a sample with a few changes. Every so often a sample as it is."""
    chance = random.Random(f"{seed}:{number}")
    data = bytearray(chance.choice(samples))
    for _ in range(chance.choice(CHANGES_OF)):
        if chance.random() < 0.1:
            _splice(chance, data, chance.choice(samples))
        else:
            chance.choice(CHANGES)(chance, data)
    return bytes(data[:SIZE_MAX])


def _flip(chance: random.Random, data: bytearray) -> None:
    if data:
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def _byte(chance: random.Random, data: bytearray) -> None:
    if data:
        data[chance.randrange(len(data))] = chance.choice((0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256)))


def _cut(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data) + 1)
    del data[at : at + chance.choice((1, 2, 4, 8, 64, len(data)))]


def _number(chance: random.Random, data: bytearray) -> None:
    """A length or an offset, as binary formats have them."""
    size = chance.choice((2, 4, 8))
    if len(data) >= size:
        at = chance.randrange(len(data) - size + 1)
        value = chance.choice(NUMBERS) & ((1 << 8 * size) - 1)
        data[at : at + size] = value.to_bytes(size, chance.choice(("little", "big")))


def _digits(chance: random.Random, data: bytearray) -> None:
    """A number, as texts have them."""
    places = [at for at, one in enumerate(data) if 48 <= one <= 57]
    if places:
        at = chance.choice(places)
        data[at : at + 1] = str(chance.choice(NUMBERS) * chance.choice((1, -1))).encode()


def _piece(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data) + 1)
    data[at:at] = chance.choice(PIECES)


def _repeat(chance: random.Random, data: bytearray) -> None:
    at = chance.randrange(len(data) + 1)
    piece = bytes(data[at : at + chance.choice((1, 4, 16, 256))])
    data[at:at] = piece * chance.choice((1, 2, 50, 1000))
    del data[SIZE_MAX:]


def _swap(chance: random.Random, data: bytearray) -> None:
    size = chance.choice((1, 4, 8, 16))
    if len(data) >= 2 * size:
        one, other = (chance.randrange(len(data) - size + 1) for _ in range(2))
        data[one : one + size], data[other : other + size] = data[other : other + size], data[one : one + size]


def _splice(chance: random.Random, data: bytearray, other: bytes) -> None:
    at, start = chance.randrange(len(data) + 1), chance.randrange(len(other) + 1)
    data[at : at + chance.randrange(64)] = other[start : start + chance.randrange(1024)]


CHANGES: tuple[Change, ...] = (_flip, _flip, _byte, _byte, _cut, _number, _number, _digits, _piece, _repeat, _swap)
