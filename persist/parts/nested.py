"""Lists, structs and maps as order-preserving bytes, column by column (never row by row).

Every value becomes self-delimiting bytes whose order is the order of the values: null before any value, then
element by element, a list before its extensions. A list's bytes are its elements' bytes between two marks, so
that they are made by composing offsets, without touching the elements one by one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_END = b"\x00"  # below both marks: a list sorts before its extensions
_NULL = b"\x01"
_VALID = b"\x02"
_BINARY = pa.large_binary()


def encode_nested(array: pa.Array) -> pa.Array:
    """A `large_binary` array without nulls: each row of `array` as order-preserving bytes."""
    kind = array.type
    if pa.types.is_struct(kind):
        parts = [encode_nested(child) for child in array.flatten()]
        return _marked(array, _join(*parts))
    if pa.types.is_map(kind):
        entries = _join(encode_nested(array.keys), encode_nested(array.items))
        return _list(array, entries, _numpy(array.offsets))
    if pa.types.is_fixed_size_list(kind):
        starts = (np.arange(len(array) + 1, dtype=np.int64) + array.offset) * kind.list_size
        return _list(array, encode_nested(array.values), starts)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _list(array, encode_nested(array.values), _numpy(array.offsets))
    return _flat(array)


def _list(array: pa.Array, elements: pa.Array, starts: npt.NDArray[np.int64]) -> pa.Array:
    ends = np.frombuffer(elements.buffers()[1], np.int64, len(elements) + 1, elements.offset * 8)
    bodies = _binary(ends[starts], elements.buffers()[2])
    return _marked(array, _join(bodies, pa.scalar(_END, _BINARY)))


def _flat(array: pa.Array) -> pa.Array:
    from persist.parts.columns import BytesColumn, column

    order = column(array)
    if isinstance(order, BytesColumn):
        kind = array.type
        if pa.types.is_string(kind):
            array = array.cast(pa.large_string())
        values = array.cast(_BINARY)
        if pc.any(pc.match_substring(values, b"\x00")).as_py():
            values = pc.replace_substring(values, b"\x00", b"\x00\xff")
        return _marked(array, _join(values.fill_null(b""), pa.scalar(b"\x00\x00", _BINARY)))
    words = []
    level = 1 if array.null_count else 0
    while (word := order.word(level, None)) is not None:
        words.append(word)
        level += 1
    table = np.stack(words, axis=1).astype(">u8")
    width = table.shape[1] * 8
    ends = np.arange(len(array) + 1, dtype=np.int64) * width
    return _marked(array, _binary(ends, pa.py_buffer(table.tobytes())))


def _marked(array: pa.Array, bodies: pa.Array) -> pa.Array:
    marked = _join(pa.scalar(_VALID, _BINARY), bodies)
    if array.null_count == 0:
        return marked
    return pc.if_else(array.is_valid(), marked, pa.scalar(_NULL, _BINARY))


def _join(*parts: Any) -> pa.Array:
    return pc.binary_join_element_wise(*parts, pa.scalar(b"", _BINARY))


def _binary(ends: npt.NDArray[np.int64], data: pa.Buffer | None) -> pa.Array:
    return pa.LargeBinaryArray.from_buffers(
        _BINARY, len(ends) - 1, [None, pa.py_buffer(np.ascontiguousarray(ends)), data or pa.py_buffer(b"")]
    )


def _numpy(offsets: pa.Array) -> npt.NDArray[np.int64]:
    values: npt.NDArray[np.int64] = offsets.to_numpy().astype(np.int64)
    return values
