"""Sorting rows by packed words, and taking rows in another order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist.parts.sort_words import ColumnOrder, Mask, Rows, Words

# Sorting by one word a row: what varies of the leading words of rows, side by side, and below it the row's number.
#
# Keys differ in few of their bits: of ten digits as text in forty, of numbers in as many as their span has. These alone
# are put together, in their order, until they can tell all rows apart; the rest of the word is the number of the row.
# So one plain sort of unsigned words, which processors do many at a time, gives the order, and it is stable. Rows that
# still tie are few, and are looked at again word by word (`persist.parts.consolidate`). Without it sorting rows of
# numbers takes a quarter more, and merging eight sorted runs of them six tenths (`python -m bench.consolidation`).


ROWS_MIN = 1024  # below it the calls take longer than the sort
RUN_ROWS_MIN = 256  # of ascending stretches, on average, that are merged rather than sorted anew
LEVELS_MAX = 8  # words of one column that are looked at: what is longer may be dear to compare
_BLOCK_ROWS = 16 * 1024  # that are packed together: they stay in the processor's caches
_BITS = 64
_ALL = 2**_BITS - 1


@dataclass(frozen=True, slots=True)
class Packed:
    """The order by the leading words (None: the rows have it already), and where in it other ones start.

    `level` of the column `last` is the first word that was not compared as a whole. `last` None: there is no column.
    """

    perm: Rows | None
    starts: Mask
    last: ColumnOrder | None
    level: int


@dataclass(frozen=True, slots=True)
class _Piece:
    """The `width` bits that tell words apart: `low` is taken away, `steps` move the rest together, `drop` go."""

    words: Words
    low: int
    width: int
    steps: tuple[tuple[int, int], ...] = ()  # which bits move, and how far down
    drop: int = 0

    def into(self, packed: Words, start: int) -> None:
        """Put them below what `sort_packed` has of these rows already."""
        bits = self.words[start : start + len(packed)] - np.uint64(self.low)
        for moving, far in self.steps:
            moved = bits & np.uint64(moving)
            bits ^= moved
            moved >>= np.uint64(far)
            bits |= moved
        if self.drop:
            bits >>= np.uint64(self.drop)
        packed <<= np.uint64(self.width)
        packed |= bits

    def cut_to(self, width: int) -> _Piece:
        """The leading bits alone."""
        return replace(self, width=width, drop=self.width - width)


def sort_packed(columns: Iterator[ColumnOrder], count: int) -> Packed:
    """Sort `count` rows, at least two, by as many of the leading words as one word holds.

    Takes no more of `columns` than that needs: as soon as the bits could tell all rows apart, rows that tie are few.
    """
    number_bits = (count - 1).bit_length()
    room = _BITS - number_bits
    pieces: list[_Piece] = []
    last: ColumnOrder | None = None
    level = used = 0
    while used < number_bits:
        words = None if last is None or level == LEVELS_MAX else last.word(level, None)
        if words is None:
            if level == LEVELS_MAX or (following := next(columns, None)) is None:
                break
            last, level = following, 0
            continue
        piece = _piece(words)
        if used + piece.width > room:
            pieces.append(piece.cut_to(room - used))
            break
        if piece.width:
            pieces.append(piece)
            used += piece.width
        level += 1
    return Packed(*_sorted(pieces, count, number_bits), last, level)


def _sorted(pieces: Sequence[_Piece], count: int, number_bits: int) -> tuple[Rows | None, Mask]:
    starts = np.zeros(count, np.bool_)
    starts[0] = True
    if not pieces:
        return None, starts
    words = np.empty(count, np.uint64)
    for start in range(0, count, _BLOCK_ROWS):
        block = np.zeros(min(_BLOCK_ROWS, count - start), np.uint64)
        for piece in pieces:
            piece.into(block, start)
        block <<= np.uint64(number_bits)
        block |= np.arange(start, start + len(block), dtype=np.uint64)
        words[start : start + len(block)] = block
    perm: Rows | None = None
    if not (words[1:] > words[:-1]).all():
        sort_words(words)
        perm = (words & np.uint64(2**number_bits - 1)).view(np.int64)
    words >>= np.uint64(number_bits)
    np.not_equal(words[1:], words[:-1], out=starts[1:])
    return perm, starts


def sort_words(words: Words) -> None:
    """Sort them in place. Runs that are merged lie one after the other, each in order: then runs are what is merged."""
    words.sort(kind="stable" if has_sorted_runs(words) else None)


def has_sorted_runs(words: Words) -> bool:
    """Whether the words are ascending stretches of RUN_ROWS_MIN of them and more, so that a sort by merging is faster.

    It is three to five times as fast for some tens of long stretches, and a quarter slower where there is no order.
    """
    return int(np.count_nonzero(words[1:] < words[:-1])) * RUN_ROWS_MIN < len(words)


def _piece(words: Words) -> _Piece:
    """What tells these words apart, in as few bits as it takes."""
    low, high = int(words.min()), int(words.max())
    width = (high - low).bit_length()
    same = int(np.bitwise_and.reduce(words))
    varying = int(np.bitwise_or.reduce(words)) ^ same
    if varying.bit_count() >= width:
        return _Piece(words, low, width)
    return _Piece(words, same, varying.bit_count(), tuple(_together(varying)))


def _together(mask: int) -> Iterator[tuple[int, int]]:
    """The steps that move the bits of a mask down to its lower end, in their order (Hacker's Delight, 7-4)."""
    zeros = ~mask << 1 & _ALL  # those below each bit count how far it moves: one binary digit of that a step
    for far in (1, 2, 4, 8, 16, 32):
        parity = zeros
        for shift in (1, 2, 4, 8, 16, 32):
            parity ^= parity << shift & _ALL
        moving = parity & mask
        if moving:
            yield moving, far
        mask = mask ^ moving | moving >> far
        zeros &= ~parity


# Rows taken out of a column in another order, without looking at each value where all are of one kind. Without it
# sorting rows with keys of one length takes three tenths more (`python -m bench.consolidation`).


LENGTH_MAX = 64  # of texts; longer ones are copied as fast one by one


def take_rows(values: pa.Array, rows: pa.Array) -> pa.Array:
    """The values of these rows (int64, none of them null, all there), in their order."""
    if len(rows) < ROWS_MIN or values.null_count:
        return values.take(rows)
    if pa.types.is_int64(values.type):
        if len(rows) <= len(values) and is_constant(values.to_numpy()):
            return values.slice(0, len(rows))
    elif pa.types.is_string(values.type) or pa.types.is_binary(values.type):
        ends = np.frombuffer(values.buffers()[1], np.int32, len(values) + 1, values.offset * 4)
        length = int(ends[1] - ends[0])
        if 0 < length <= LENGTH_MAX and len(rows) * length < 2**31 and is_constant(np.diff(ends)):
            return _of_one_length(values, int(ends[0]), length, rows)
    return values.take(rows)


def is_constant(values: npt.NDArray[Any]) -> bool:
    """Whether all values, of whole numbers, are the same; none are."""
    if len(values) < ROWS_MIN:
        return values.tobytes() == values[:1].tobytes() * len(values)
    return bool(values[0] == values[-1] and (values == values[0]).all())


def _of_one_length(values: pa.Array, start: int, length: int, rows: pa.Array) -> pa.Array:
    """Texts of that many bytes each, which lie one after the other from `start` on."""
    each = np.frombuffer(values.buffers()[2], np.dtype((np.void, length)), len(values), start)
    ends = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(length)
    data = each[rows.to_numpy()]
    return pa.Array.from_buffers(values.type, len(rows), [None, pa.py_buffer(ends), pa.py_buffer(data)])
