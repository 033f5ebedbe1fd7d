"""The memory of rows in their plain form: dictionaries decoded, views resolved, nulls filled in.

A few bytes of Arrow can represent many: four million rows may refer to one text of a megabyte, and a list of nulls
takes no space. This is computed before such rows are cast. The columns must be valid (`validate(full=True)`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_Sizes = npt.NDArray[np.int64]
OFFSET_BYTES = 8  # of the offset of a text or list
COMPARED_BYTES = 128  # of a value that are compared word by word; longer values are copied to be compared
NESTED_COPIES, FLAT_COPIES = 3, 2
SORTED_ROW_BYTES = 40  # of a row besides its values: time and multiplicity, unsorted and sorted, and its position
SLICE_ROWS = 256 * 1024  # that are summed at a time
TYPES_MAX = 1_000  # that are cached


@lru_cache(TYPES_MAX)
def fixed_bytes(kind: Any) -> int:
    """The bytes that every value of this type takes, even a null."""
    types = pa.types
    if types.is_fixed_size_list(kind):
        return int(kind.list_size) * fixed_bytes(kind.value_type)
    if types.is_struct(kind):
        return sum(fixed_bytes(kind.field(index).type) for index in range(kind.num_fields))
    if types.is_dictionary(kind):
        return fixed_bytes(kind.value_type)
    if types.is_null(kind):
        return 0
    return int(kind.bit_width + 7) // 8 if _is_flat(kind) else OFFSET_BYTES


def row_bytes(schema: pa.Schema) -> int:
    """The least bytes of a row of these columns, as `fixed_bytes` counts them."""
    return sum(fixed_bytes(field.type) for field in schema)


def is_surely_within(table: pa.Table, each_bytes: int, most: int) -> bool:
    """Whether a quick estimate proves that `working_bytes` is at most `most`. `each_bytes` are the `row_bytes`."""
    if not all(_is_flat(field.type) or field.type in (pa.string(), pa.binary()) for field in table.schema):
        return False
    each = SORTED_ROW_BYTES + FLAT_COPIES * (each_bytes + OFFSET_BYTES * table.num_columns)
    return bool(each * table.num_rows + 2 * FLAT_COPIES * table.get_total_buffer_size() <= most)


def working_bytes(table: pa.Table, schema: pa.Schema) -> int:
    """The memory that the rows take while they are sorted and written, with the types of `schema`.

    They are held unsorted and sorted. Nested values are also copied to be compared, and the longest value to be
    written.
    """
    total: int = SORTED_ROW_BYTES * table.num_rows
    for name, column in zip(table.schema.names, table.columns, strict=True):
        place = schema.get_field_index(name)
        kind = schema.field(place).type if place >= 0 else column.type
        own: int = sum(column_bytes(chunk, kind) for chunk in column.chunks)
        if pa.types.is_nested(kind):
            total += NESTED_COPIES * own
        else:
            longest = _longest(column, kind)
            total += FLAT_COPIES * (own if longest <= COMPARED_BYTES else own + longest)
    return total


def _longest(column: pa.ChunkedArray, kind: Any) -> int:
    """The bytes of the longest value of a flat column."""
    if _is_flat(kind):
        return fixed_bytes(kind)
    if pa.types.is_dictionary(column.type):
        column = pa.chunked_array([chunk.dictionary for chunk in column.chunks], column.type.value_type)
    most = (int(np.max(_sizes(part), initial=0)) for chunk in column.chunks for part in _slices(chunk))
    return max(0, max(most, default=0) - OFFSET_BYTES)


def column_bytes(column: pa.Array, kind: Any) -> int:
    """The bytes of all values of a column with the type `kind`. This takes little memory itself."""
    own, types = column.type, pa.types
    least = len(column) * fixed_bytes(kind)
    if types.is_dictionary(own):
        values = _sizes(column.dictionary)
        indexes = (pc.fill_null(part.indices, 0).to_numpy(zero_copy_only=False) for part in _slices(column))
        return max(least, sum(int(values[index].sum()) for index in indexes) if len(values) else 0)
    if types.is_struct(own):
        kinds = _kinds(own, kind)
        return sum(column_bytes(column.field(index), child) for index, child in enumerate(kinds))
    if types.is_map(own):
        start, end = column.offsets[0].as_py(), column.offsets[-1].as_py()
        keys, items = (kind.key_type, kind.item_type) if types.is_map(kind) else (own.key_type, own.item_type)
        inner = column_bytes(column.keys[start:end], keys) + column_bytes(column.items[start:end], items)
        return least + inner
    if types.is_fixed_size_list(own):
        start, end = column.offset * own.list_size, (column.offset + len(column)) * own.list_size
        return max(least, column_bytes(column.values[start:end], _element(own, kind)))
    if types.is_list(own) or types.is_large_list(own):
        values = column.values[column.offsets[0].as_py() : column.offsets[-1].as_py()]
        return least + column_bytes(values, _element(own, kind))
    if _is_flat(own) or types.is_null(own):
        return max(least, len(column) * fixed_bytes(own))
    return max(least, sum(int(_sizes(part).sum()) for part in _slices(column)))


def _slices(column: pa.Array) -> Iterator[pa.Array]:
    return (column[start : start + SLICE_ROWS] for start in range(0, len(column), SLICE_ROWS))


def _sizes(column: pa.Array) -> _Sizes:
    """The bytes of each value of a flat column."""
    kind, types = column.type, pa.types
    if kind == pa.string_view() or kind == pa.binary_view():
        return _view_lengths(column) + OFFSET_BYTES
    if types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind) or types.is_large_binary(kind):
        lengths: _Sizes = pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False).astype(np.int64)
        return lengths + OFFSET_BYTES
    return np.full(len(column), fixed_bytes(kind), np.int64)


def _view_lengths(column: pa.Array) -> _Sizes:
    """The lengths of texts in views of 16 bytes, each of which begins with its length."""
    views = column.buffers()[1]
    if not len(column) or views is None:
        return np.zeros(len(column), np.int64)
    lengths = np.frombuffer(views, np.int32, 4 * (column.offset + len(column))).reshape(-1, 4)[column.offset :, 0]
    return np.where(column.is_valid().to_numpy(zero_copy_only=False), lengths.astype(np.int64), 0)


def _kinds(own: Any, kind: Any) -> list[Any]:
    """The target types of the fields of a struct, if the other type is a struct with as many fields."""
    other = kind if pa.types.is_struct(kind) and kind.num_fields == own.num_fields else own
    return [other.field(index).type for index in range(own.num_fields)]


def _element(own: Any, kind: Any) -> Any:
    types = pa.types
    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return kind.value_type if is_list else own.value_type


def _is_flat(kind: Any) -> bool:
    """Whether all values of the type have the same size, in one buffer."""
    types = pa.types
    return bool(types.is_primitive(kind) or types.is_fixed_size_binary(kind) or types.is_decimal(kind))


def compact_buffers(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Copy the rows to buffers without other data.

    The buffers of a slice also hold its neighbours, and the IPC format pads a buffer to 64 bytes with the data that
    follows: bytes of rows that are not in the part, which an erasure would not find.
    """
    if all(map(_is_compact, batch.columns)):
        return batch
    return batch.take(pa.array(np.arange(batch.num_rows)))


def _is_compact(column: pa.Array) -> bool:
    """Whether the buffers hold these values only. Arrow's `nbytes` does not include the last offset of texts."""
    kind, types, size = column.type, pa.types, column.get_total_buffer_size()
    end = 4 if types.is_string(kind) or types.is_binary(kind) else 0
    is_full = types.is_integer(kind) and size * 8 == len(column) * kind.bit_width  # faster, for most columns
    return bool(is_full or size == column.nbytes + end)
