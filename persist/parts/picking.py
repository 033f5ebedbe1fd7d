"""Rows taken out of a column in another order, without looking at each value where all are of one kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

ROWS_MIN = 1024  # below it the calls take longer than the values
LENGTH_MAX = 64  # of texts; longer ones are copied as fast one by one
SAMPLED = 16 * 1024  # rows by which it is told whether a column has few texts
FEW_SHARE = 8  # of the sample: with fewer texts than one in so many rows, the column is taken to have few


def picked(values: pa.Array, rows: pa.Array) -> pa.Array:
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
        if _are_few(values):
            return _of_few(values, rows)
    return values.take(rows)


def is_constant(values: npt.NDArray[Any]) -> bool:
    """Whether all values, of whole numbers, are the same; none are."""
    if len(values) < ROWS_MIN:
        return values.tobytes() == values[:1].tobytes() * len(values)
    return bool(values[0] == values[-1] and (values == values[0]).all())


def _are_few(values: pa.Array) -> bool:
    """Whether a sample of the texts, from all over the column, has few that differ."""
    step = len(values) // SAMPLED
    if step < 2:
        return False
    sample = values.take(pa.array(np.arange(0, step * SAMPLED, step)))
    return bool(pc.count_distinct(sample).as_py() * FEW_SHARE <= SAMPLED)


def _of_few(values: pa.Array, rows: pa.Array) -> pa.Array:
    """Texts of which many rows have the same, by their numbers: these stay in the processor's caches, texts do not."""
    told = values.dictionary_encode()
    return told.dictionary.take(told.indices.take(rows))


def _of_one_length(values: pa.Array, start: int, length: int, rows: pa.Array) -> pa.Array:
    """Texts of that many bytes each, which lie one after the other from `start` on."""
    each = np.frombuffer(values.buffers()[2], np.dtype((np.void, length)), len(values), start)
    ends = np.arange(len(rows) + 1, dtype=np.int32) * np.int32(length)
    data = each[rows.to_numpy()]
    return pa.Array.from_buffers(values.type, len(rows), [None, pa.py_buffer(ends), pa.py_buffer(data)])
