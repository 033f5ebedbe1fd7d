"""Order-preserving bytes of key tuples, for part bounds and split boundaries; rows by their keys.

A key column contributes 0x00 if it is null, else 0x01 and its value: numbers and times as big-endian words, fixed
binaries as they are, strings and binaries with 0x00 escaped as 0x00 0xff and terminated by 0x00 0x00. The columns are
concatenated in key order. The bytes of two keys compare as parts are sorted (`persist.parts.value_order`).

A bound need not be a whole key: a lower bound may end after some columns or have a shortened last string, and an upper
bound longer than `BOUND_BYTES_MAX` is the successor of its prefix and cannot be decoded.

Keys are compared like values of a shard: null equals null, NaN equals NaN, and -0.0 differs from 0.0.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import Corruption, InvalidUsage
from persist.parts.column_types import family
from persist.parts.consolidate import Ints, consolidate, join, sort_groups
from persist.parts.python_values import shown_values
from persist.parts.shard_schema import DIFF, ShardSchema
from persist.parts.value_order import END, ESCAPE, NULL, VALID, ColumnOrder, column_order, one_chunk

BOUND_BYTES_MAX = 256
ABSENT = -1  # the index of a row that has none of the keys


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys whose encoding is in `[lower, upper)`; None: unbounded on that side."""

    lower: bytes | None = None
    upper: bytes | None = None

    @property
    def is_empty(self) -> bool:
        return self.lower is not None and self.upper is not None and self.upper <= self.lower

    def overlaps(self, lower: bytes, upper: bytes | None) -> bool:
        """Whether a key within the part bounds `[lower, upper]` (both inclusive) may be in the range."""
        if self.is_empty or (self.upper is not None and lower >= self.upper):
            return False
        return self.lower is None or upper is None or upper >= self.lower

    def covers(self, lower: bytes, upper: bytes | None) -> bool:
        """Whether every key within the part bounds `[lower, upper]` is in the range."""
        if self.upper is not None and (upper is None or upper >= self.upper):
            return False
        return self.lower is None or lower >= self.lower

    def meet(self, other: KeyRange) -> KeyRange:
        """The keys that are in both ranges."""
        lower = max((bound for bound in (self.lower, other.lower) if bound is not None), default=None)
        upper = min((bound for bound in (self.upper, other.upper) if bound is not None), default=None)
        return KeyRange(lower, upper)


ALL_KEYS = KeyRange()


class SortedKeys:
    """The encoded keys of a table's rows, each encoded on access."""

    def __init__(self, table: pa.Table, key: tuple[str, ...]) -> None:
        self._arrays = [one_chunk(table.column(name)) for name in key]
        self._rows = len(table)

    @cached_property
    def _columns(self) -> list[ColumnOrder]:
        return [column_order(array) for array in self._arrays]

    @cached_property
    def last(self) -> bytes:
        """The key of the last row, for which the others are not read."""
        return b"".join(column_order(array.slice(self._rows - 1)).encode(0) for array in self._arrays)

    def __getitem__(self, row: int) -> bytes:
        return b"".join(column.encode(row) for column in self._columns)

    def __len__(self) -> int:
        return self._rows

    def bisect(self, bound: bytes, start: int = 0) -> int:
        """The first row, at or after `start`, whose key is not below `bound`; the rows are in key order."""
        return bisect_left(self, bound, start)


def clip_rows(table: pa.Table, keys: SortedKeys, key_range: KeyRange) -> pa.Table:
    """The rows of a key-ordered table whose keys are in the range."""
    if not len(table):
        return table
    start = 0 if key_range.lower is None or key_range.lower <= keys[0] else keys.bisect(key_range.lower)
    upper = key_range.upper
    end = len(table) if upper is None or keys.last < upper else keys.bisect(upper, start)
    return table if end - start == len(table) else table.slice(start, end - start)


def encode_key(schema: ShardSchema, values: Mapping[str, Any] | tuple[Any, ...]) -> bytes:
    """The bytes of a key, or of its first columns, from Python values or Arrow scalars in key order.

    Raises InvalidUsage if a value does not fit its column.
    """
    if isinstance(values, Mapping):
        values = tuple(values[name] for name in schema.key)
    pieces = []
    for name, value in zip(schema.key, values, strict=False):
        kind = schema.arrow.field(name).type
        try:
            array = pa.repeat(value, 1).cast(kind) if isinstance(value, pa.Scalar) else pa.array([value], kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InvalidUsage(f"{value!r} is not a value of key column {name!r} ({kind}): {error}") from error
        pieces.append(column_order(array).encode(0))
    return b"".join(pieces)


def lower_bound(encoded: bytes, schema: ShardSchema) -> bytes:
    """`encoded` or, if it is too long, a decodable bound below it of at most `BOUND_BYTES_MAX` bytes."""
    if len(encoded) <= BOUND_BYTES_MAX:
        return encoded
    position = 0
    for name in schema.key:
        kind = schema.arrow.field(name).type
        value, end = _read_value(encoded, position, kind)
        if end > BOUND_BYTES_MAX:
            return encoded[:position] + _shorten(value, kind, BOUND_BYTES_MAX - position)
        position = end
    return encoded


def upper_bound(encoded: bytes) -> bytes | None:
    """`encoded` or, if it is too long, at most `BOUND_BYTES_MAX` bytes above every key with the same prefix."""
    return encoded if len(encoded) <= BOUND_BYTES_MAX else successor(encoded[:BOUND_BYTES_MAX])


def successor(prefix: bytes) -> bytes | None:
    """The least bytes above everything that starts with `prefix`; None if there are none."""
    trimmed = prefix.rstrip(b"\xff")
    return trimmed[:-1] + bytes([trimmed[-1] + 1]) if trimmed else None


def decode_key(bound: bytes, schema: ShardSchema) -> tuple[Any, ...]:
    """The Arrow scalars that `bound` encodes, of all or the first key columns. Raises Corruption."""
    values = []
    position = 0
    try:
        for name in schema.key:
            if position == len(bound):
                break
            kind = schema.arrow.field(name).type
            raw, position = _read_value(bound, position, kind)
            values.append(_decode_scalar(raw, kind))
    except (IndexError, ValueError, pa.ArrowException) as error:
        raise Corruption(f"key bound {bound.hex()} cannot be decoded: {error}") from error
    if position != len(bound):
        raise Corruption(f"key bound {bound.hex()} has bytes after its last column")
    return tuple(values)


def _width(kind: Any) -> int | None:
    """Bytes of a value of fixed width; None for strings and binaries of variable length."""
    if pa.types.is_boolean(kind):
        return 1
    if pa.types.is_fixed_size_binary(kind):
        return int(kind.byte_width)
    if pa.types.is_decimal(kind) or pa.types.is_primitive(kind):
        return int(kind.bit_width // 8)
    return None


def _read_value(encoded: bytes, position: int, kind: Any) -> tuple[bytes | None, int]:
    """The raw bytes of the value at `position`, and the position of the next one."""
    mark = encoded[position : position + 1]
    position += 1
    if mark == NULL:
        return None, position
    if mark != VALID:
        raise ValueError(f"no value starts at byte {position - 1}")
    width = _width(kind)
    if width is not None:
        raw = encoded[position : position + width]
        if pa.types.is_fixed_size_binary(kind):
            raw = raw.ljust(width, b"\x00")  # a shortened bound
        if len(raw) != width:
            raise ValueError("the last value is incomplete")
        return raw, min(position + width, len(encoded))
    end = position
    while encoded[end : end + 2] != END:
        end = encoded.index(b"\x00", end)
        if encoded[end : end + 2] == ESCAPE:
            end += 2
        elif encoded[end : end + 2] != END:
            raise ValueError("a string is not terminated")
    return encoded[position:end].replace(ESCAPE, b"\x00"), end + 2


def _shorten(value: bytes | None, kind: Any, room: int) -> bytes:
    """The encoding of the longest prefix of `value` that fits into `room` bytes."""
    if value is None or room < 4 or (_width(kind) is not None and not pa.types.is_fixed_size_binary(kind)):
        return b""
    if pa.types.is_fixed_size_binary(kind):
        return VALID + value[: room - 1]
    text = family(kind) == "string"
    raw = value[: room - 3]
    while True:
        if text:
            raw = raw.decode("utf-8", "ignore").encode()  # without an incomplete character at the end
        shortened = VALID + raw.replace(b"\x00", ESCAPE) + END
        if len(shortened) <= room:
            return shortened
        raw = raw[:-1]


def _decode_scalar(raw: bytes | None, kind: Any) -> Any:
    if raw is None:
        return pa.scalar(None, kind)
    if _width(kind) is None or pa.types.is_fixed_size_binary(kind):
        return pa.array([raw], pa.binary()).cast(kind)[0]
    if pa.types.is_boolean(kind):
        return pa.scalar(raw != b"\x00", kind)
    width = len(raw)
    number = int.from_bytes(raw, "big")
    sign = 1 << (width * 8 - 1)
    if pa.types.is_floating(kind):
        number = number ^ sign if number & sign else number ^ (2 * sign - 1)
    elif not pa.types.is_unsigned_integer(kind):
        number ^= sign
    buffers = [None, pa.py_buffer(number.to_bytes(width, "little"))]
    return pa.Array.from_buffers(kind, 1, buffers)[0]


def key_schema(schema: ShardSchema, names: Sequence[str] | None = None) -> ShardSchema:
    """A schema of the key columns only, or of the columns `names` in their place. Raises InvalidUsage."""
    chosen = schema.key if names is None else tuple(names)
    for name in chosen:
        if name not in schema.arrow.names:
            raise InvalidUsage(f"the shard has no column {name!r}; its columns are {', '.join(schema.arrow.names)}")
    return ShardSchema(pa.schema([schema.arrow.field(name) for name in chosen]), chosen)


def keys_of(rows: pa.Table, keyed: ShardSchema) -> pa.Table:
    """The keys of the rows with `__diff` 1, in the order of the rows. Raises InvalidUsage."""
    return keyed.conform(rows.select(list(keyed.key)), 0)


def distinct_keys(rows: pa.Table, keyed: ShardSchema) -> pa.Table:
    """The distinct keys of the rows in order; `__diff` is the number of rows with the key."""
    return consolidate([keys_of(rows, keyed)], keyed)


def unique_keys(rows: pa.Table, keyed: ShardSchema, what: str) -> pa.Table:
    """The keys of the rows in order. Raises InvalidUsage, naming the operation `what`, if one occurs twice."""
    keys = distinct_keys(rows, keyed)
    check_unique(keys, keyed, what)
    return keys


def check_unique(keys: pa.Table, keyed: ShardSchema, what: str) -> None:
    """Raise InvalidUsage if one of the distinct keys occurred more than once."""
    repeated = pc.index(pc.greater(keys.column(DIFF), 1), True).as_py()
    if repeated >= 0:
        key = {name: shown_values(keys.column(name).slice(repeated, 1))[0] for name in keyed.key}
        raise InvalidUsage(
            f"key {key!r} occurs more than once; {what} takes one row per key: drop the duplicates first"
        )


def match_keys(rows: pa.Table, keys: pa.Table, keyed: ShardSchema) -> Ints:
    """For each row the index of the last of `keys` that equals its key, or `ABSENT`."""
    if not len(rows) or not len(keys):
        return np.full(len(rows), ABSENT, np.int64)
    groups = _groups([keys_of(rows, keyed), keys_of(keys, keyed)], keyed)
    index = np.full(int(groups.max()) + 1, ABSENT, np.int64)
    index[groups[len(rows) :]] = np.arange(len(keys), dtype=np.int64)
    return index[groups[: len(rows)]]


def semi_join(rows: pa.Table, keys: pa.Table, keyed: ShardSchema) -> pa.Table:
    """The rows whose key is among `keys`."""
    return rows.filter(pa.array(match_keys(rows, keys, keyed) != ABSENT))


def first_of_key(rows: pa.Table, keyed: ShardSchema) -> npt.NDArray[np.bool_]:
    """Which rows are the first ones of their key."""
    is_first = np.zeros(len(rows), np.bool_)
    if len(rows):
        _, index = np.unique(key_groups(rows, keyed), return_index=True)
        is_first[index] = True
    return is_first


def key_groups(rows: pa.Table, keyed: ShardSchema) -> Ints:
    """A number for each row, from 0 on, equal for equal keys."""
    return _groups([keys_of(rows, keyed)], keyed) if len(rows) else np.zeros(0, np.int64)


def _groups(tables: Sequence[pa.Table], keyed: ShardSchema) -> Ints:
    """A number for each row of the tables, equal for equal keys."""
    order, starts = sort_groups(join(tables), keyed)
    sorted_groups: Ints = np.cumsum(starts, dtype=np.int64) - 1
    if order is None:
        return sorted_groups
    groups = np.empty(len(sorted_groups), np.int64)
    groups[order] = sorted_groups
    return groups


@dataclass(frozen=True, slots=True)
class KeyPoints(KeyRange):
    """The key range from the first to the last of some sorted keys, reduced to these keys.

    Parts and row groups that cannot have one of them are not read. The rows that are read may have other keys, too, and
    not all updates of those.
    """

    keys: SortedKeys | None = None

    @classmethod
    def of(cls, keys: pa.Table, keyed: ShardSchema) -> KeyPoints:
        """From sorted keys, at least one."""
        ordered = SortedKeys(keys, keyed.key)
        return cls(ordered[0], ordered.last + b"\x00", ordered)

    def overlaps(self, lower: bytes, upper: bytes | None) -> bool:
        """Whether one of the keys may be within the part bounds `[lower, upper]` (both inclusive)."""
        if self.keys is None or not KeyRange.overlaps(self, lower, upper):
            return False
        place = self.keys.bisect(lower)
        return place < len(self.keys) and (upper is None or self.keys[place] <= upper)
