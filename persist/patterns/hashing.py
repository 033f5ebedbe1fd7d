"""The hash by which rows are routed: the same in every process and version, for ever.

It is called `HASH`, and that name is kept with the routes. A value is a number first: integers, dates, times and
booleans by their value, so that a wider type routes alike; texts and binaries as the sum of (byte at i + 1) / BASE^i;
null as one of its own. The finisher of SplitMix64 then mixes the numbers of the columns, one after the other. All is
modulo 2^64, and nothing here protects from who looks for values that go to one shard.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from persist.core.errors import InvalidUsage

HASH = "poly-splitmix-64/1"
Hashes: TypeAlias = npt.NDArray[np.uint64]
MODULUS = 2**64
STEP = 0x9E3779B97F4A7C15  # what is added before a number is mixed
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BASE = 0x100000001B3  # of the polynomial; odd, so that it has an inverse
NULL = 0x6E756C6C


def hashes_of(rows: pa.Table, by: tuple[str, ...]) -> Hashes:
    """The hash of each row by these columns. Raises InvalidUsage (a column is missing, or of a type without a hash)."""
    found = np.zeros(len(rows), np.uint64)
    for name in by:
        if name not in rows.schema.names:
            raise InvalidUsage(f"rows have no column {name!r}, by which they are routed")
        found = _mixed(found + _numbers(name, rows.column(name).combine_chunks()) + np.uint64(STEP))
    return found


def check_type(name: str, kind: pa.DataType) -> None:
    """Raise InvalidUsage unless rows can be routed by a column of this type."""
    whole = types.is_integer(kind) or types.is_boolean(kind) or types.is_date(kind) or types.is_timestamp(kind)
    if not whole and not _is_text(kind):
        raise InvalidUsage(
            f"column {name!r} is {kind}, by which no row is routed; take one of integers, texts, binaries, dates, "
            "timestamps or booleans"
        )


def _is_text(kind: pa.DataType) -> bool:
    kinds = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary, types.is_fixed_size_binary)
    return any(check(kind) for check in kinds)


def _numbers(name: str, values: pa.Array) -> Hashes:
    check_type(name, values.type)
    if _is_text(values.type):
        found = _of_texts(values)
    elif types.is_unsigned_integer(values.type):
        found = pc.fill_null(values.cast(pa.uint64()), 0).to_numpy(zero_copy_only=False)
    else:
        small = values.type.bit_width <= 32 and not types.is_integer(values.type)  # dates and booleans
        numbers = values.cast(pa.int32()).cast(pa.int64()) if small else values.cast(pa.int64())
        found = pc.fill_null(numbers, 0).to_numpy(zero_copy_only=False).view(np.uint64)
    return np.where(values.is_null().to_numpy(zero_copy_only=False), np.uint64(NULL), found)


def _of_texts(values: pa.Array) -> Hashes:
    """The polynomial of the bytes of each value, by differences of the sums up to its ends."""
    whole = pc.fill_null(values.cast(pa.large_binary()), b"")
    whole = whole if isinstance(whole, pa.Array) else whole.combine_chunks()
    _, offsets, data = whole.buffers()
    ends = np.frombuffer(offsets, np.int64)[whole.offset : whole.offset + len(whole) + 1]
    first, last = int(ends[0]), int(ends[-1])
    content = np.frombuffer(data, np.uint8)[first:last] if last > first else np.zeros(0, np.uint8)
    inverse, powers = pow(BASE, -1, MODULUS), np.ones(last - first + 1, np.uint64)
    powers[1:] = inverse
    powers = np.multiply.accumulate(powers)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum((content.astype(np.uint64) + np.uint64(1)) * powers[:-1])])
    places = ends - first
    upwards = np.full(last - first + 1, BASE, np.uint64)
    upwards[0] = 1
    upwards = np.multiply.accumulate(upwards)
    found: Hashes = (sums[places[1:]] - sums[places[:-1]]) * upwards[places[:-1]]
    return found


def _mixed(numbers: Hashes) -> Hashes:
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(FIRST)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(SECOND)
    return numbers ^ (numbers >> np.uint64(31))
