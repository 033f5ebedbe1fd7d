"""What is known of rows without reading them again (bounds, sums, duplicates), and their order-independent digest."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from persist.parts.consolidate import find_twins, join
from persist.parts.row_sort import is_constant
from persist.parts.shard_schema import DIFF, TIME, ShardSchema
from persist.parts.sort_words import Mask, one_chunk

# What is known of rows without looking at them again: their bounds, their sums, and whether some are twins.


# Without the names of twins one column of a shard whose history is kept takes eight times as long to read, and all of
# them twice as long (`python -m bench.history --only straight`).
TWINS_SHARE = 4  # of the rows of a row group at most one in so many is told to be a twin of the row before
_NUMBER = np.dtype("<u2")  # of a row: a row group has at most 65,536
FEW_ROWS = 64  # of which bounds and sums are taken in Python: calls of numpy take longer


@dataclass(frozen=True, slots=True)
class KnownRows:
    """What the index tells of the rows of a row group, so that a read knows whether it must add some of them up.

    `pairs`: two of them share key and value. `joins`: the first one shares key and value with the last row of the row
    group before, in the same part. The bounds are inclusive.
    """

    pairs: bool
    joins: bool
    time_min: int
    time_max: int
    diff_min: int
    diff_max: int

    def as_told(self) -> list[int]:
        """As the index has it."""
        return [int(value) for value in astuple(self)]


def known_of(told: Sequence[int]) -> KnownRows:
    """As it was told. Raises ValueError or TypeError where it is not what `as_told` gives."""
    pairs, joins, *bounds = told
    time_min, time_max, diff_min, diff_max = (int(bound) for bound in bounds)
    return KnownRows(bool(pairs), bool(joins), time_min, time_max, diff_min, diff_max)


def decode_twins(data: bytes, rows: int) -> Mask:
    """Which rows differ from the row before in key or value, from the twins that `KnownRowsCollector` encoded.

    Raises ValueError if the bytes are invalid.
    """
    numbers = np.frombuffer(data, _NUMBER)
    if len(numbers) and not (numbers[0] > 0 and numbers[-1] < rows and (numbers[1:] > numbers[:-1]).all()):
        raise ValueError("twins are not numbers of rows in order")
    found = np.ones(rows, np.bool_)
    found[numbers] = False
    return found


@dataclass(slots=True)
class Stats:
    """Bounds of the rows seen; zeros before the first."""

    seen: bool = False
    time_min: int = 0
    time_max: int = 0
    diff_min: int = 0
    diff_max: int = 0
    diff_sum: int = 0

    def add(self, rows: Any) -> None:
        if rows.num_rows <= FEW_ROWS:
            times, diffs = rows.column(TIME).to_pylist(), rows.column(DIFF).to_pylist()
            self._widen(min(times), max(times), min(diffs), max(diffs))
            self.diff_sum += sum(diffs)
            return
        times, diffs = one_chunk(rows.column(TIME)).to_numpy(), one_chunk(rows.column(DIFF)).to_numpy()
        low, high = _span(diffs)
        self._widen(*_span(times), low, high)
        if low == high:  # most rows are there once
            self.diff_sum += low * len(diffs)
        elif max(abs(low), abs(high)) * len(diffs) < 2**63:
            self.diff_sum += int(diffs.sum())
        else:
            self.diff_sum += (int((diffs >> 32).sum()) << 32) + int((diffs & 0xFFFFFFFF).sum())

    def _widen(self, first: int, last: int, low: int, high: int) -> None:
        self.time_min = min(self.time_min, first) if self.seen else first
        self.time_max = max(self.time_max, last) if self.seen else last
        self.diff_min = min(self.diff_min, low) if self.seen else low
        self.diff_max = max(self.diff_max, high) if self.seen else high
        self.seen = True

    @property
    def known_sum(self) -> int | None:
        """The sum of the diffs, or None where it takes more than 64 bits: a record holds no such number."""
        return self.diff_sum if -(2**63) <= self.diff_sum < 2**63 else None


def _span(numbers: npt.NDArray[np.int64]) -> tuple[int, int]:
    """The least and the greatest of them (at least one)."""
    if is_constant(numbers):
        return int(numbers[0]), int(numbers[0])
    return int(numbers.min()), int(numbers.max())


class KnownRowsCollector:
    """Finds what is `KnownRows` of the row groups of one part, which it is shown in their order."""

    def __init__(self, schema: ShardSchema) -> None:
        self._schema = schema
        self._last: pa.Table | None = None  # the last row of the row group before

    def told(self, rows: pa.Table) -> tuple[KnownRows, bytes]:
        """Of the next row group: consolidated rows in order, at least one.

        The bytes are the numbers of the rows that share key and value with the row before, two bytes each; b"" where
        there are none, or too many to be told.
        """
        stats = Stats()
        stats.add(rows)
        joins = self._last is not None and bool(find_twins(join([self._last, rows.slice(0, 1)]), self._schema).any())
        self._last = rows.slice(len(rows) - 1)
        found = np.zeros(0, np.int64)
        if stats.time_min < stats.time_max:  # at one time, rows that share key and value would have been added up
            found = np.flatnonzero(find_twins(rows, self._schema))
        known = KnownRows(len(found) > 0, joins, stats.time_min, stats.time_max, stats.diff_min, stats.diff_max)
        return known, found.astype(_NUMBER).tobytes() if len(found) * TWINS_SHARE <= len(rows) else b""


# A digest of rows: a sum of one number for each row, times how often the row comes.
#
# So it is the same for the same rows in whatever order they come, however they are cut into tables and parts, and
# whether equal ones were added up. The digests of the parts of a command add up to that of all its rows. It tells a
# token that comes with other rows than before. It is no protection against somebody who looks for two inputs with one
# digest.


PIECE_BYTES = 4 * 1024 * 1024  # of rows that are looked at together: about ten times as much memory is needed
MODULUS = 2**64
_STEP, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_WORD = 8
Numbers: TypeAlias = npt.NDArray[np.uint64]  # one for each value; sums and products wrap around


def digest_of_rows(rows: pa.Table) -> int:
    """The digest, in [0, MODULUS). A column in which a row has a null does not count for it: it may be a new one."""
    step = max(1, len(rows) * PIECE_BYTES // max(1, rows.nbytes))
    return sum(_digest(rows.slice(start, step)) for start in range(0, len(rows), step)) % MODULUS


def numbers_of_rows(rows: pa.Table) -> Numbers:
    """A number for each row, of all its columns but `__diff`: the same for equal rows, and for no others by chance.

    A column in which a row has a null does not count for it, as in the digest.
    """
    step = max(1, len(rows) * PIECE_BYTES // max(1, rows.nbytes))
    pieces = [_row_numbers(rows.slice(start, step)) for start in range(0, len(rows), step)]
    return np.concatenate([np.zeros(0, np.uint64), *pieces])


def _digest(rows: pa.Table) -> int:
    times = rows.column(DIFF).to_numpy().view(np.uint64)
    return int((_row_numbers(rows) * times).sum())


def _row_numbers(rows: pa.Table) -> Numbers:
    found = np.zeros(len(rows), np.uint64)
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if field.name != DIFF:
            said = hashlib.blake2b(f"{field.name}: {field.type}".encode("utf-8", "surrogatepass"), digest_size=_WORD)
            found += _numbers(column.combine_chunks(), int.from_bytes(said.digest()))
    return _mixed(found + _STEP)


def _numbers(values: pa.Array, seed: int) -> Numbers:
    """A number for each value; 0 for a null."""
    if values.null_count == len(values):
        return np.zeros(len(values), np.uint64)
    found = _mixed(_raw(values) + np.uint64(seed % MODULUS))
    if values.null_count:
        found[values.is_null().to_numpy(zero_copy_only=False)] = 0
    return found


def _raw(values: pa.Array) -> Numbers:
    """A number for each value, of which the next step makes a random one; anything for a null."""
    kind = values.type
    if types.is_struct(kind):
        return _together(values.flatten(), len(values))
    if types.is_fixed_size_list(kind):
        ends = np.arange(len(values) + 1, dtype=np.int64) * kind.list_size
        return _of_lists([values.values.slice(values.offset * kind.list_size, int(ends[-1]))], ends)
    if types.is_map(kind) or types.is_list(kind) or types.is_large_list(kind):
        ends = values.offsets.to_numpy().astype(np.int64)
        first, count = int(ends[0]), int(ends[-1] - ends[0])
        children = [values.keys, values.items] if types.is_map(kind) else [values.values]
        return _of_lists([child.slice(first, count) for child in children], ends - first)
    if types.is_boolean(kind):
        values = pc.cast(values, pa.uint8())
    elif not (types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind)):
        return _of_texts(values)
    width = values.type.bit_width // 8
    data = np.frombuffer(values.buffers()[1], np.uint8)[values.offset * width : (values.offset + len(values)) * width]
    if types.is_floating(kind):  # every NaN is the same value
        numbers = data.view(f"f{width}")
        data = np.where(np.isnan(numbers), numbers.dtype.type(np.nan), numbers).view(np.uint8)
    if width in (1, 2, 4, _WORD):
        return data.view(f"u{width}").astype(np.uint64)
    return _of_bytes(data, np.arange(len(values) + 1, dtype=np.int64) * width)


def _together(children: list[pa.Array], count: int) -> Numbers:
    """One number for each value, of the numbers of its children at the same place."""
    found = np.zeros(count, np.uint64)
    for place, child in enumerate(children, 1):
        found += _numbers(child, place * int(_STEP))
    return found


def _of_lists(children: list[pa.Array], ends: npt.NDArray[np.int64]) -> Numbers:
    """A number for each list, whose items lie in the children between one of the `ends` and the next."""
    lengths = np.diff(ends)
    places = np.arange(int(ends[-1])) - np.repeat(ends[:-1], lengths)
    return _sums(_together(children, int(ends[-1])), places, ends)


def _of_texts(values: pa.Array) -> Numbers:
    """A number for each string or binary."""
    _, ends, data = values.buffers()
    is_wide = types.is_large_string(values.type) or types.is_large_binary(values.type)
    offsets = np.frombuffer(ends, np.int64 if is_wide else np.int32)[values.offset : values.offset + len(values) + 1]
    chars = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return _of_bytes(chars[offsets[0] : offsets[-1]], (offsets - offsets[0]).astype(np.int64))


def _of_bytes(data: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> Numbers:
    """A number for each piece of the data between one of the `ends` and the next. It takes eight bytes at a time."""
    padded = np.concatenate([data, np.zeros(_WORD, np.uint8)])
    words: Numbers = np.ndarray((len(data) + 1,), np.dtype("<u8"), padded.data, strides=(1,))  # one at every byte
    lengths = np.diff(ends)
    counts = (lengths + _WORD - 1) // _WORD
    word_ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    places = np.arange(int(word_ends[-1])) - np.repeat(word_ends[:-1], counts)
    found = words[np.repeat(ends[:-1], counts) + places * _WORD]
    surplus = np.maximum(_WORD - (np.repeat(lengths, counts) - places * _WORD), 0)  # bytes of what comes after
    found &= np.uint64(MODULUS - 1) >> (surplus * 8).astype(np.uint64)
    return _sums(found, places, word_ends) + lengths.astype(np.uint64)


def _sums(items: Numbers, places: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Numbers:
    """The sums of the items between one of the `ends` and the next, each made random with its place; and how many."""
    mixed = _mixed(items + (places + 1).astype(np.uint64) * _STEP)
    upto = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed)])
    found: Numbers = upto[ends[1:]] - upto[ends[:-1]] + np.diff(ends).astype(np.uint64)
    return found


def _mixed(numbers: Numbers) -> Numbers:
    """Each number as a random one (the last steps of SplitMix64), in place."""
    numbers ^= numbers >> np.uint64(30)
    numbers *= _FIRST
    numbers ^= numbers >> np.uint64(27)
    numbers *= _SECOND
    numbers ^= numbers >> np.uint64(31)
    return numbers
