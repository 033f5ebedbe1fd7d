"""Types that allow no null somewhere within them, such as a field of a struct that is always there.

A null struct hides what its fields have. Arrow keeps something there, often a null, and its Parquet writer refuses that
though no reader can see it. So what is hidden is made whole before it is written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def is_strict(kind: pa.DataType) -> bool:
    """Whether something within values of this type may not be null."""
    if pa.types.is_map(kind):
        return not kind.item_field.nullable or is_strict(kind.key_type) or is_strict(kind.item_type)
    if not pa.types.is_nested(kind):
        return False
    fields = [kind.field(index) for index in range(kind.num_fields)]
    return any(not field.nullable or is_strict(field.type) for field in fields)


def has_stray_null(column: Any, field: pa.Field) -> bool:
    """Whether the values hold a null, at any depth, where their type allows none. What a null hides does not count."""
    if not field.nullable and column.null_count:
        return True
    if not is_strict(field.type):
        return False
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return any(_is_stray_within(chunk.drop_null() if chunk.null_count else chunk) for chunk in chunks)


def _is_stray_within(present: pa.Array) -> bool:
    kind = present.type
    if pa.types.is_map(kind):
        keys, items = _entries(present).flatten().flatten()
        return has_stray_null(keys, kind.key_field) or has_stray_null(items, kind.item_field)
    if pa.types.is_struct(kind):
        return any(has_stray_null(child, kind.field(index)) for index, child in enumerate(present.flatten()))
    return has_stray_null(present.flatten(), kind.value_field)


def whole_table(table: pa.Table) -> pa.Table:
    """The same rows, with something that is no null in each place that may have none and that a null hides."""
    for index, field in enumerate(table.schema):
        if is_strict(field.type):
            chunks = [_whole(chunk) for chunk in table.column(index).chunks]
            table = table.set_column(index, field, pa.chunked_array(chunks, field.type))
    return table


def _whole(column: pa.Array) -> pa.Array:
    kind, types = column.type, pa.types
    if not is_strict(kind):
        return column
    if types.is_struct(kind):
        if column.null_count:  # a null that Arrow builds hides empty values
            places = pc.if_else(column.is_valid(), pa.array(np.arange(len(column))), len(column))
            column = pa.concat_arrays([column, pa.array([None], kind)]).take(places)
        children = [_whole(column.field(index)) for index in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=column.is_null())
    if types.is_fixed_size_list(kind):
        present = pa.FixedSizeListArray.from_arrays(_whole(column.flatten()), type=kind)
        counted = pc.subtract(pc.cumulative_sum(column.is_valid().cast(pa.int64())), 1)
        return present.take(pc.if_else(column.is_valid(), counted, pa.scalar(None, pa.int64())))
    lists = _entries(column) if types.is_map(kind) else column
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    wide = pa.int64() if types.is_large_list(kind) else pa.int32()
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), wide)
    if types.is_map(kind):
        keys, items = lists.flatten().flatten()
        return pa.MapArray.from_arrays(offsets, _whole(keys), _whole(items), type=kind, mask=column.is_null())
    build = pa.LargeListArray if types.is_large_list(kind) else pa.ListArray
    return build.from_arrays(offsets, _whole(lists.flatten()), type=kind, mask=column.is_null())


def _entries(column: pa.MapArray) -> pa.ListArray:
    """A map as lists of its pairs. (Arrow's own cast refuses what a null within them hides.)"""
    kind = column.type
    pairs = pa.StructArray.from_arrays([column.keys, column.items], fields=[kind.key_field, kind.item_field])
    offsets = pa.array(column.offsets.to_numpy())  # a copy: those of a slice take no mask
    return pa.ListArray.from_arrays(offsets, pairs, mask=column.is_null())
