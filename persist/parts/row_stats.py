"""Statistics of rows (bounds, sums, twins), and their order-independent digest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from persist.core.record import Record
from persist.parts.consolidate import find_twins, join
from persist.parts.shard_schema import DIFF, TIME, ShardSchema
from persist.parts.value_order import Mask, one_chunk

# Twins are rows with the same key and value as the row before. Without a list of them a read of one column of a shard
# with history takes eight times as long, and a read of all columns twice as long.
TWINS_SHARE = 4  # twins are listed if they are at most this fraction of a row group
_NUMBER = np.dtype("<u2")  # of a row: a row group has at most 65,536
FEW_ROWS = 64  # up to which bounds and sums are faster in Python than in numpy

# A digest is a sum of one number per row times its multiplicity. It does not depend on the order of the rows, on how
# they are divided into tables and parts, or on whether equal ones were summed; the digests of the parts of a command
# add up to that of all its rows. It detects an idempotency token that is reused with other rows. It does not resist an
# adversary who looks for collisions.
PIECE_BYTES = 4 * 1024 * 1024  # of rows that are hashed together: this takes about ten times as much memory
MODULUS = 2**64
_STEP, _FIRST, _SECOND = (np.uint64(n) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_WORD = 8
Numbers: TypeAlias = npt.NDArray[np.uint64]  # one per value; sums and products wrap around


class KnownRows(Record, frozen=True):
    """Statistics in the index about the rows of a row group, which tell a read whether it must sum some of them.

    `pairs`: it has twins. `joins`: its first row is a twin of the last row of the row group before, in the same part.
    Both are 0 or 1. The bounds are inclusive.
    """

    pairs: int | bool
    joins: int | bool
    time_min: int
    time_max: int
    diff_min: int
    diff_max: int


def decode_twins(data: bytes | memoryview, rows: int) -> Mask:
    """Which rows differ from the row before in key or value, from the twins that `KnownRowsCollector` encoded.

    Raises ValueError if the bytes are invalid.
    """
    numbers = np.frombuffer(data, _NUMBER)
    if len(numbers) and not (numbers[0] > 0 and numbers[-1] < rows and (numbers[1:] > numbers[:-1]).all()):
        raise ValueError("twins are not ascending row numbers")
    firsts = np.ones(rows, np.bool_)
    firsts[numbers] = False
    return firsts


@dataclass(slots=True)
class Stats:
    """Bounds and sums of the rows added so far; zeros before the first."""

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
        low, high = int(diffs.min()), int(diffs.max())
        self._widen(int(times.min()), int(times.max()), low, high)
        if max(abs(low), abs(high)) * len(diffs) < 2**63:
            self.diff_sum += int(diffs.sum())
        else:
            self.diff_sum += (int((diffs >> 32).sum()) << 32) + int((diffs & 0xFFFFFFFF).sum())

    def _widen(self, first: int, last: int, low: int, high: int) -> None:
        self.time_min = min(self.time_min, first) if self.seen else first
        self.time_max = max(self.time_max, last) if self.seen else last
        self.diff_min = min(self.diff_min, low) if self.seen else low
        self.diff_max = max(self.diff_max, high) if self.seen else high
        self.seen = True

    def of_part(self) -> dict[str, Any]:
        """The fields of a Part; the sum of the diffs is None if it exceeds 64 bits, which a record cannot hold."""
        return {
            "time_min": self.time_min, "time_max": self.time_max, "diff_min": self.diff_min, "diff_max": self.diff_max,
            "diff_sum": self.diff_sum if -(2**63) <= self.diff_sum < 2**63 else None,
        }  # fmt: skip


class KnownRowsCollector:
    """Computes the `KnownRows` of the row groups of one part, in their order."""

    def __init__(self, schema: ShardSchema) -> None:
        self._schema = schema
        self._last: pa.Table | None = None  # the last row of the row group before

    def describe(self, rows: pa.Table) -> tuple[KnownRows, bytes]:
        """The statistics and the twins of the next row group: consolidated rows in order, at least one.

        The bytes are the numbers of the twins, two bytes each; b"" if there are none or too many to be listed.
        """
        stats = Stats()
        stats.add(rows)
        joins = self._last is not None and bool(find_twins(join([self._last, rows.slice(0, 1)]), self._schema).any())
        self._last = rows.slice(len(rows) - 1)
        twins = np.zeros(0, np.int64)
        if stats.time_min < stats.time_max:  # consolidated rows of one time have no twins
            twins = np.flatnonzero(find_twins(rows, self._schema))
        bounds = stats.time_min, stats.time_max, stats.diff_min, stats.diff_max
        known = KnownRows(int(len(twins) > 0), int(joins), *bounds)
        return known, twins.astype(_NUMBER).tobytes() if len(twins) * TWINS_SHARE <= len(rows) else b""


def digest_of_rows(rows: pa.Table) -> int:
    """The digest, in [0, MODULUS). Nulls do not contribute, so that adding a column does not change it."""
    diffs = one_chunk(rows.column(DIFF)).to_numpy().view(np.uint64)
    return int((numbers_of_rows(rows) * diffs).sum())


def numbers_of_rows(rows: pa.Table) -> Numbers:
    """A hash of each row, over all its columns but `__diff`. Nulls do not contribute, as in the digest."""
    step = max(1, len(rows) * PIECE_BYTES // max(1, rows.nbytes))
    pieces = [_hash_rows(rows.slice(start, step)) for start in range(0, len(rows), step)]
    return np.concatenate([np.zeros(0, np.uint64), *pieces])


def _hash_rows(rows: pa.Table) -> Numbers:
    hashes = np.zeros(len(rows), np.uint64)
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if field.name != DIFF:
            seed = hashlib.blake2b(f"{field.name}: {field.type}".encode("utf-8", "surrogatepass"), digest_size=_WORD)
            hashes += _hash_values(column.combine_chunks(), int.from_bytes(seed.digest()))
    return _mix(hashes + _STEP)


def _hash_values(values: pa.Array, seed: int) -> Numbers:
    """A hash of each value; 0 for a null."""
    if values.null_count == len(values):
        return np.zeros(len(values), np.uint64)
    hashes = _mix(_to_numbers(values) + np.uint64(seed % MODULUS))
    if values.null_count:
        hashes[values.is_null().to_numpy(zero_copy_only=False)] = 0
    return hashes


def _to_numbers(values: pa.Array) -> Numbers:
    """A number for each value, to be mixed; undefined for a null."""
    kind = values.type
    if types.is_struct(kind):
        return _hash_children(values.flatten(), len(values))
    if types.is_fixed_size_list(kind):
        ends = np.arange(len(values) + 1, dtype=np.int64) * kind.list_size
        return _hash_lists([values.values.slice(values.offset * kind.list_size, int(ends[-1]))], ends)
    if types.is_map(kind) or types.is_list(kind) or types.is_large_list(kind):
        ends = values.offsets.to_numpy().astype(np.int64)
        first, count = int(ends[0]), int(ends[-1] - ends[0])
        children = [values.keys, values.items] if types.is_map(kind) else [values.values]
        return _hash_lists([child.slice(first, count) for child in children], ends - first)
    if types.is_boolean(kind):
        values = pc.cast(values, pa.uint8())
    elif not (types.is_primitive(kind) or types.is_decimal(kind) or types.is_fixed_size_binary(kind)):
        return _hash_texts(values)
    width = values.type.bit_width // 8
    data = np.frombuffer(values.buffers()[1], np.uint8)[values.offset * width : (values.offset + len(values)) * width]
    if types.is_floating(kind):  # all NaNs are equal
        numbers = data.view(f"f{width}")
        data = np.where(np.isnan(numbers), numbers.dtype.type(np.nan), numbers).view(np.uint8)
    if width in (1, 2, 4, _WORD):
        return data.view(f"u{width}").astype(np.uint64)
    return _hash_slices(data, np.arange(len(values) + 1, dtype=np.int64) * width)


def _hash_children(children: list[pa.Array], count: int) -> Numbers:
    """The sum of the hashes of the children at each position."""
    hashes = np.zeros(count, np.uint64)
    for place, child in enumerate(children, 1):
        hashes += _hash_values(child, place * int(_STEP))
    return hashes


def _hash_lists(children: list[pa.Array], ends: npt.NDArray[np.int64]) -> Numbers:
    """A hash of each list, whose items in the children are between one of the `ends` and the next."""
    lengths = np.diff(ends)
    places = np.arange(int(ends[-1])) - np.repeat(ends[:-1], lengths)
    return _sum_mixed(_hash_children(children, int(ends[-1])), places, ends)


def _hash_texts(values: pa.Array) -> Numbers:
    """A hash of each string or binary."""
    _, ends, data = values.buffers()
    is_wide = types.is_large_string(values.type) or types.is_large_binary(values.type)
    offsets = np.frombuffer(ends, np.int64 if is_wide else np.int32)[values.offset : values.offset + len(values) + 1]
    chars = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    return _hash_slices(chars[offsets[0] : offsets[-1]], (offsets - offsets[0]).astype(np.int64))


def _hash_slices(data: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]) -> Numbers:
    """A hash of each slice of the data between one of the `ends` and the next, eight bytes at a time."""
    padded = np.concatenate([data, np.zeros(_WORD, np.uint8)])
    words: Numbers = np.ndarray((len(data) + 1,), np.dtype("<u8"), padded.data, strides=(1,))  # one at every byte
    lengths = np.diff(ends)
    counts = (lengths + _WORD - 1) // _WORD
    word_ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    places = np.arange(int(word_ends[-1])) - np.repeat(word_ends[:-1], counts)
    own = words[np.repeat(ends[:-1], counts) + places * _WORD]
    surplus = np.maximum(_WORD - (np.repeat(lengths, counts) - places * _WORD), 0)  # bytes after the slice
    own &= np.uint64(MODULUS - 1) >> (surplus * 8).astype(np.uint64)
    return _sum_mixed(own, places, word_ends) + lengths.astype(np.uint64)


def _sum_mixed(items: Numbers, places: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Numbers:
    """The sums of the items between one of the `ends` and the next, each mixed with its place, plus their count."""
    mixed = _mix(items + (places + 1).astype(np.uint64) * _STEP)
    upto = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed)])
    sums: Numbers = upto[ends[1:]] - upto[ends[:-1]] + np.diff(ends).astype(np.uint64)
    return sums


def _mix(numbers: Numbers) -> Numbers:
    """Mix the bits of each number (the finalizer of SplitMix64), in place."""
    numbers ^= numbers >> np.uint64(30)
    numbers *= _FIRST
    numbers ^= numbers >> np.uint64(27)
    numbers *= _SECOND
    numbers ^= numbers >> np.uint64(31)
    return numbers
