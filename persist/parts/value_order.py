"""One definite total order over the values of every column type, as unsigned words and as bytes.

The order depends on the values only, not on their batch: nulls first; booleans, numbers and times by value (floats in
IEEE total order, so -0.0 sorts before 0.0 and differs from it; all NaNs are equal and sort last); strings and binaries
by their bytes; lists, structs and maps element by element (see `_nested`). Sorting, grouping, key bounds and cuts of
runs all use it.

A column has the order in two forms: `word(level, rows)` returns uint64 words to compare level by level (for
`persist.parts.consolidate`), `encode(row)` returns the bytes of one row (`persist.parts.key_encoding`). Both derive
from the same words, so they are consistent.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Words = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

NULL = b"\x00"
VALID = b"\x01"
ESCAPE = b"\x00\xff"
END = b"\x00\x00"

_SIGN64 = np.uint64(1 << 63)
_GATHERED_BYTES = 1024 * 1024
_LEVELS_MAX = 16  # words of a string that are compared one by one; the tail is ranked
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class FixedColumn:
    """Values of a fixed number of words, the most significant one first."""

    def __init__(self, words: list[Words], width: int, valid: Mask | None) -> None:
        if valid is not None:
            words = [np.where(valid, word, np.uint64(0)) for word in words]
        self._levels = words if valid is None else [valid.astype(np.uint64), *words]
        self._words = words
        self._width = width
        self._valid = valid

    def word(self, level: int, rows: Rows | None) -> Words | None:
        """The words of `rows` (None: all rows) at `level`; None if there is no further level."""
        if level >= len(self._levels):
            return None
        word = self._levels[level]
        return word if rows is None else word[rows]

    def encode(self, row: int) -> bytes:
        """The row's value as self-delimiting bytes in the same order."""
        if self._valid is not None and not self._valid[row]:
            return NULL
        return VALID + b"".join(int(word[row]).to_bytes(8, "big") for word in self._words)[-self._width :]


def _terminate(raw: bytes) -> bytes:
    return VALID + raw.replace(b"\x00", ESCAPE) + END


class Width(NamedTuple):
    """Contiguous byte strings of one width: `rows` of them, from number `first` on."""

    width: int
    first: int
    rows: int


class BytesColumn:
    """Byte strings: `data[ends[row]:ends[row + 1]]`, or of a fixed `Width`."""

    def __init__(self, data: npt.NDArray[np.uint8], ends: npt.NDArray[Any] | Width, valid: Mask | None) -> None:
        self._data = data if len(data) >= 8 else np.concatenate([data, np.zeros(8, np.uint8)])
        # The word that starts at every position of the data, in native byte order.
        self._at = np.ndarray((len(self._data) - 7,), dtype=np.uint64, buffer=self._data, strides=(1,))
        self._ends = ends
        self._valid = valid

    @cached_property
    def _offsets(self) -> Rows:
        if isinstance(self._ends, Width):
            return (np.arange(self._ends.rows, dtype=np.int64) + self._ends.first) * self._ends.width
        return self._ends[:-1].astype(np.int64)

    @cached_property
    def _lengths(self) -> Rows:
        ends = self._ends
        if isinstance(ends, Width):
            lengths = np.full(ends.rows, ends.width, np.int64)
        else:
            lengths = (ends[1:] - ends[:-1]).astype(np.int64)
        return lengths if self._valid is None else np.where(self._valid, lengths, 0)

    @cached_property
    def _length_max(self) -> int:
        return int(self._lengths.max(initial=0))

    @cached_property
    def _length_min(self) -> int:
        return int(self._lengths.min()) if len(self._lengths) else 0

    def word(self, level: int, rows: Rows | None) -> Words | None:
        if self._valid is not None:
            if level == 0:
                return (self._valid if rows is None else self._valid[rows]).astype(np.uint64)
            level -= 1
        levels = (self._length_max + 7) // 8
        if level < min(levels, _LEVELS_MAX):
            return self._piece(level * 8, rows)
        if level == levels or (levels > _LEVELS_MAX and level == _LEVELS_MAX + 1):
            if self._length_min == self._length_max:
                return None
            return (self._lengths if rows is None else self._lengths[rows]).astype(np.uint64)
        if levels > _LEVELS_MAX and level == _LEVELS_MAX:
            return self._tail_rank(_LEVELS_MAX * 8, rows)
        return None

    def encode(self, row: int) -> bytes:
        if self._valid is not None and not self._valid[row]:
            return NULL
        if isinstance(self._ends, Width):
            start = (self._ends.first + row) * self._ends.width
            return VALID + self._data[start : start + self._ends.width].tobytes()
        return _terminate(self._data[int(self._ends[row]) : int(self._ends[row + 1])].tobytes())

    def _piece(self, skip: int, rows: Rows | None) -> Words:
        """Eight bytes from `skip` on, zeros past the end of the value."""
        length = self._length_max
        if rows is None and self._valid is None and self._length_min == length >= 8:
            over = max(0, skip + 8 - length)  # bytes beyond the value: take the word that ends with it
            first = int(self._offsets[0]) + skip - over  # values of one length are contiguous
            words = _big_endian(self._at[first::length][: len(self._offsets)].copy())
            return words << np.uint64(8 * over) if over else words
        starts = (self._offsets if rows is None else self._offsets[rows]) + skip
        last = len(self._at) - 1
        if len(starts) and int(starts.max()) > last:
            late = np.flatnonzero(starts > last)  # only the last few
            shift = np.minimum((starts[late] - last) * 8, 63).astype(np.uint64)
            starts[late] = last
            words = _big_endian(self._at[starts])
            words[late] <<= shift
        else:
            words = _big_endian(self._at[starts])
        if skip + 8 <= self._length_min:
            return words
        lengths = self._lengths if rows is None else self._lengths[rows]
        beyond = np.clip(8 * (skip + 8) - 8 * lengths, 0, 64).view(np.uint64)  # bits after the value
        words >>= beyond
        words <<= beyond
        return words

    def _tail_rank(self, skip: int, rows: Rows | None) -> Words:
        """The dense rank, among `rows`, of the bytes after the first `skip` ones (few rows are still tied)."""
        offsets = self._offsets if rows is None else self._offsets[rows]
        lengths = np.maximum((self._lengths if rows is None else self._lengths[rows]) - skip, 0)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        data, shifts = np.empty(int(ends[-1]), np.uint8), offsets + skip - ends[:-1]
        for start in range(0, len(data), _GATHERED_BYTES):  # in blocks: the index of a byte takes eight bytes
            places = np.arange(start, min(start + _GATHERED_BYTES, len(data)))
            data[start : start + len(places)] = self._data[places + shifts[np.searchsorted(ends, places, "right") - 1]]
        tails = pa.LargeBinaryArray.from_buffers(
            pa.large_binary(), len(lengths), [None, pa.py_buffer(ends), pa.py_buffer(data)]
        )
        return pc.rank(tails, tiebreaker="dense").to_numpy()  # type: ignore[no-any-return]


ColumnOrder: TypeAlias = FixedColumn | BytesColumn


def column_order(array: pa.Array) -> ColumnOrder:
    """The order of the values of an array of any type that a shard can store."""
    kind = array.type
    valid = None if array.null_count == 0 else array.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_nested(kind):
        return _bytes_column(_encode_nested(array), None)
    if pa.types.is_boolean(kind):
        return FixedColumn([array.cast(pa.uint8()).fill_null(0).to_numpy().astype(np.uint64)], 1, valid)
    if pa.types.is_decimal(kind):
        return FixedColumn(_decimal_words(array), kind.bit_width // 8, valid)
    if pa.types.is_primitive(kind):
        return FixedColumn([_primitive_word(array)], kind.bit_width // 8, valid)
    return _bytes_column(array, valid)


def extremes(array: pa.Array, counts: Sequence[int]) -> list[tuple[bytes, bytes]]:
    """The least and the greatest of each of `counts` consecutive values (at least one), encoded."""
    spans = list(pairwise(accumulate(counts, initial=0)))
    if array.null_count == 0 and is_bytes(array.type):  # Python also compares texts by code points, like their bytes
        values = array.to_pylist()
        bounds = ((min(values[start:end]), max(values[start:end])) for start, end in spans)
        return [(_terminate(_as_bytes(low)), _terminate(_as_bytes(high))) for low, high in bounds]
    order = column_order(array)
    if isinstance(order, FixedColumn) and order.word(1, None) is None and (words := order.word(0, None)) is not None:
        places = (
            (start + int(words[start:end].argmin()), start + int(words[start:end].argmax())) for start, end in spans
        )
        return [(order.encode(low), order.encode(high)) for low, high in places]
    if len(spans) > 1:
        return [extremes(array[start:end], [end - start])[0] for start, end in spans]
    return [(order.encode(_extreme(order, np.min)), order.encode(_extreme(order, np.max)))]


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _extreme(order: ColumnOrder, best: Callable[[Words], np.uint64]) -> int:
    """A row with the least or the greatest value: `best` is the minimum or maximum of words."""
    rows: Rows | None = None
    level = 0
    while (rows is None or len(rows) > 1) and (words := order.word(level, rows)) is not None:
        places = np.flatnonzero(words == best(words))
        rows = places if rows is None else rows[places]
        level += 1
    return 0 if rows is None else int(rows[0])


def is_bytes(kind: pa.DataType) -> bool:
    """Whether values are byte strings of variable length, which Arrow orders in the same way."""
    return kind in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())


def one_chunk(values: pa.ChunkedArray | pa.Array) -> pa.Array:
    """The values as one array, with 64-bit offsets if 32-bit ones would overflow."""
    if isinstance(values, pa.Array):
        return values
    if values.num_chunks == 1:
        return values.chunk(0)
    joined = values.combine_chunks()
    if isinstance(joined, pa.ChunkedArray):
        if joined.num_chunks == 1:
            return joined.chunk(0)
        large = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(joined.type, joined.type)
        return pa.concat_arrays(joined.cast(large).chunks)
    return joined


def _bytes_column(array: pa.Array, valid: Mask | None) -> BytesColumn:
    kind = array.type
    if pa.types.is_fixed_size_binary(kind):
        data = _values(array.buffers()[1], np.uint8, 0, None)
        return BytesColumn(data, Width(kind.byte_width, array.offset, len(array)), valid)
    wide = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    ends = _values(array.buffers()[1], np.int64 if wide else np.int32, array.offset, len(array) + 1)
    return BytesColumn(_values(array.buffers()[2], np.uint8, 0, None), ends, valid)


def _big_endian(words: Words) -> Words:
    """Make the first byte of each word the most significant one, in place."""
    return words.byteswap(inplace=True) if sys.byteorder == "little" else words


def _values(buffer: pa.Buffer | None, dtype: Any, offset: int, count: int | None) -> npt.NDArray[Any]:
    size = np.dtype(dtype).itemsize
    if buffer is None or buffer.size < (offset + (count or 0)) * size:
        return np.zeros(count or 0, dtype)
    if count is None:
        count = buffer.size // size - offset
    return np.frombuffer(buffer, dtype, count, offset * size)


def _primitive_word(array: pa.Array) -> Words:
    """Integers, floats, dates, times, timestamps, durations and narrow decimals as words in their order."""
    kind = array.type
    width = kind.bit_width // 8
    bits = _values(array.buffers()[1], _UNSIGNED[width], array.offset, len(array))
    if pa.types.is_unsigned_integer(kind):
        return bits.astype(np.uint64)
    sign = bits.dtype.type(1 << (width * 8 - 1))
    if pa.types.is_floating(kind):
        is_nan = np.isnan(bits.view(f"f{width}"))
        ordered = np.where(bits & sign, ~bits, bits ^ sign)
        return np.where(is_nan, bits.dtype.type(2 ** (width * 8) - 1), ordered).astype(np.uint64)
    words: Words = (bits ^ sign).astype(np.uint64)
    return words


def _decimal_words(array: pa.Array) -> list[Words]:
    width = array.type.bit_width // 8
    if width <= 8:
        return [_primitive_word(array)]
    count = width // 8
    limbs = _values(array.buffers()[1], np.uint64, array.offset * count, len(array) * count)
    table = limbs.reshape(len(array), count)
    return [table[:, count - 1] ^ _SIGN64, *(table[:, index].copy() for index in range(count - 2, -1, -1))]


# --- nested columns

_NESTED_END = b"\x00"  # below both marks: a list sorts before its extensions
_NESTED_NULL = b"\x01"
_NESTED_VALID = b"\x02"
_BINARY = pa.large_binary()


def _encode_nested(array: pa.Array) -> pa.Array:
    """Lists, structs and maps: a `large_binary` array without nulls, each row of `array` as order-preserving bytes.

    The conversion is column by column, not row by row. Every value becomes self-delimiting bytes in the order of the
    values: null first, then element by element, a list before its extensions. A list's bytes are its elements' bytes
    between two marks, so they are built by composing offsets.
    """
    kind = array.type
    if pa.types.is_struct(kind):
        parts = [_encode_nested(child) for child in array.flatten()]
        return _mark(array, _join(*parts))
    if pa.types.is_map(kind):
        entries = _join(_encode_nested(array.keys), _encode_nested(array.items))
        return _encode_list(array, entries, array.offsets.to_numpy().astype(np.int64))
    if pa.types.is_fixed_size_list(kind):
        starts = (np.arange(len(array) + 1, dtype=np.int64) + array.offset) * kind.list_size
        return _encode_list(array, _encode_nested(array.values), starts)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _encode_list(array, _encode_nested(array.values), array.offsets.to_numpy().astype(np.int64))
    return _encode_flat(array)


def _encode_list(array: pa.Array, elements: pa.Array, starts: npt.NDArray[np.int64]) -> pa.Array:
    ends = np.frombuffer(elements.buffers()[1], np.int64, len(elements) + 1, elements.offset * 8)
    bodies = _large_binary(ends[starts], elements.buffers()[2])
    return _mark(array, _join(bodies, pa.scalar(_NESTED_END, _BINARY)))


def _encode_flat(array: pa.Array) -> pa.Array:
    order = column_order(array)
    if isinstance(order, BytesColumn):
        kind = array.type
        if pa.types.is_string(kind):
            array = array.cast(pa.large_string())
        values = array.cast(_BINARY)
        if pc.any(pc.match_substring(values, b"\x00")).as_py():
            values = pc.replace_substring(values, b"\x00", b"\x00\xff")
        return _mark(array, _join(values.fill_null(b""), pa.scalar(b"\x00\x00", _BINARY)))
    words = []
    level = 1 if array.null_count else 0
    while (word := order.word(level, None)) is not None:
        words.append(word)
        level += 1
    table = np.stack(words, axis=1).astype(">u8")
    width = table.shape[1] * 8
    ends = np.arange(len(array) + 1, dtype=np.int64) * width
    return _mark(array, _large_binary(ends, pa.py_buffer(table.tobytes())))


def _mark(array: pa.Array, bodies: pa.Array) -> pa.Array:
    marked = _join(pa.scalar(_NESTED_VALID, _BINARY), bodies)
    if array.null_count == 0:
        return marked
    return pc.if_else(array.is_valid(), marked, pa.scalar(_NESTED_NULL, _BINARY))


def _join(*parts: Any) -> pa.Array:
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", _BINARY))


def _large_binary(ends: npt.NDArray[np.int64], data: pa.Buffer | None) -> pa.Array:
    return pa.LargeBinaryArray.from_buffers(
        _BINARY, len(ends) - 1, [None, pa.py_buffer(np.ascontiguousarray(ends)), data or pa.py_buffer(b"")]
    )
