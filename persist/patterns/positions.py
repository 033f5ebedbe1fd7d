"""Positions in a source, as callers give them: checks, and what a binding is."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist.core.errors import InvalidUsage, shown

POSITION_MAX = 2**63 - 1  # the last int64
PARTITIONS_MAX = 10_000  # of one source
PARTITION_CHARS_MAX = 1_024
ONLY = ""  # the partition of a source that has just one
BEFORE_ALL = -1  # the position before the first one

Positions: TypeAlias = Mapping[str, int] | int
Column: TypeAlias = Any  # an Arrow or NumPy array of integers, or a list
Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Binding:
    """Every record at one of these positions, or before it, has a time of at most `time`. That never changes.

    `positions`: of each partition that was asked for, the last position with such a time.
    """

    positions: dict[str, int]
    time: int


def checked_positions(given: Positions) -> dict[str, int]:
    """The positions by partition; a number alone is that of the only partition, which is called "".

    Raises InvalidUsage (no partition, too many, a name that is none, a position that is no int64 from 0 on).
    """
    if not isinstance(given, Mapping):
        given = {ONLY: given}
    if not given:
        raise InvalidUsage("positions are empty; give the position of at least one partition")
    if len(given) > PARTITIONS_MAX:
        raise InvalidUsage(f"positions name {len(given)} partitions; a source has at most {PARTITIONS_MAX}")
    return {checked_partition(name): checked_position(name, position) for name, position in given.items()}


def checked_partition(name: object) -> str:
    """Raise InvalidUsage unless this can be the name of a partition."""
    if not isinstance(name, str) or len(name) > PARTITION_CHARS_MAX:
        raise InvalidUsage(f"partition {shown(name)} is no text of at most {PARTITION_CHARS_MAX} characters")
    if any("\ud800" <= char <= "\udfff" for char in name):
        raise InvalidUsage(f"partition {name!a:.100} is no Unicode text, since it has half a surrogate pair")
    return name


def checked_position(partition: str, value: object) -> int:
    """Raise InvalidUsage unless this is a position: an integer in [0, POSITION_MAX]."""
    try:
        if isinstance(value, bool):
            raise TypeError
        position = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidUsage(
            f"the position of partition {partition!r:.100} is {shown(value)}; it must be an int"
        ) from None
    if not 0 <= position <= POSITION_MAX:
        raise InvalidUsage(
            f"the position of partition {partition!r:.100} is {shown(position)}; it must be in [0, {POSITION_MAX}]"
        )
    return position


def checked_column(given: Column) -> Numbers:
    """A column of positions as int64. Raises InvalidUsage (not integers, a null, or one outside [0, POSITION_MAX])."""
    try:
        column = given if isinstance(given, (pa.Array, pa.ChunkedArray)) else pa.array(given)
        if len(column) == 0:
            return np.zeros(0, np.int64)
        if not pa.types.is_integer(column.type):
            raise InvalidUsage(f"a column of positions is {column.type}; it must have integers")
        if column.null_count:
            raise InvalidUsage(f"a column of positions has {column.null_count} nulls; leave these records out")
        found: Numbers = column.cast(pa.int64()).to_numpy().astype(np.int64, copy=False)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidUsage(f"a column of positions has values that are no int64: {error}") from error
    if found.min() < 0:
        raise InvalidUsage(f"a column of positions has {int(found.min())}; positions are in [0, {POSITION_MAX}]")
    return found
