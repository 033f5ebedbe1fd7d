"""Whether the lists of a fixed size in a Parquet column have that size.

Arrow makes them of the levels of the leaves, and where these tell of a null list that has values it ends the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist.parts.page_numbers import Reader

SCHEMAS_MAX = 256  # of which it is remembered which lists they have
Levels = npt.NDArray[np.uint8]


class Fixed(NamedTuple):
    """A list of a fixed size around a leaf: its repetition level, and the definition level from which it has values."""

    repetition: int
    defined: int
    size: int


@lru_cache(SCHEMAS_MAX)
def fixed_lists(schema: pa.Schema) -> list[tuple[Fixed, ...]]:
    """Those around each leaf of the columns, in the order of the leaves."""
    return [found for field in schema for found in _leaves(field, 0, 0, ())]


def _leaves(field: pa.Field, defined: int, repetition: int, around: tuple[Fixed, ...]) -> Iterator[tuple[Fixed, ...]]:
    kind, types = field.type, pa.types
    defined += field.nullable
    if not types.is_nested(kind):
        yield around
        return
    if types.is_struct(kind):
        for child in kind:
            yield from _leaves(child, defined, repetition, around)
        return
    defined, repetition = defined + 1, repetition + 1
    if types.is_fixed_size_list(kind):
        around = (*around, Fixed(repetition, defined, kind.list_size))
    children = (kind.key_field, kind.item_field) if types.is_map(kind) else (kind.value_field,)
    for child in children:
        yield from _leaves(child, defined, repetition, around)


def check_sizes(repetitions: Levels, definitions: Levels, lists: Sequence[Fixed]) -> None:
    """Raise ValueError unless each list has its size, or no value where it is null, by all levels of a leaf."""
    if len(repetitions) != len(definitions) or (len(repetitions) and repetitions[0]):
        raise ValueError("a column begins within a list")
    for one in lists:
        chosen = repetitions <= one.repetition
        starts = np.flatnonzero(repetitions[chosen] < one.repetition)
        counts = np.diff(np.append(starts, np.count_nonzero(chosen)))
        first = definitions[chosen][starts]
        if not (counts == np.where(first >= one.defined, one.size, 1)).all() or (first == one.defined - 1).any():
            raise ValueError(f"a list has not the size {one.size}")
        if (definitions[repetitions == one.repetition] < one.defined).any():
            raise ValueError("a list goes on with what is no value of it")


def unpacked(data: memoryview, count: int, width: int) -> Levels:
    """`count` levels of `width` bits in the hybrid of runs and packed bits. Raises ValueError: there are fewer."""
    if not width:
        return np.zeros(count, np.uint8)
    reader, left, found = Reader(data, 0), count, []
    while left > 0:
        head = reader.varint()
        if head & 1:
            taken = reader.bytes(min((head >> 1) * width, reader.left))
            bits = np.unpackbits(np.frombuffer(taken, np.uint8), bitorder="little")
            whole = bits[: len(bits) // width * width].reshape(-1, width)[:left]
            run = (whole @ (1 << np.arange(width, dtype=np.uint8))).astype(np.uint8)
        else:
            run = np.full(min(head >> 1, left), reader.byte(), np.uint8)
        if not len(run):
            raise ValueError("there are fewer levels than values")
        found.append(run)
        left -= len(run)
    return joined(found)


def joined(levels: Sequence[Levels]) -> Levels:
    """Those of several pages, or runs, one after the other."""
    return np.concatenate([np.zeros(0, np.uint8), *levels])
