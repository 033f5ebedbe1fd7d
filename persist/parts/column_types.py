"""The types that columns may have, conversion of rows to them, non-null nested types, and exact decimal text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import InvalidUsage

# Types that allow no null somewhere within them, such as a field of a struct that is always there.
#
# A null struct hides what its fields have. Arrow keeps something there, often a null, and its Parquet writer refuses
# that though no reader can see it. So what is hidden is made whole before it is written.


def has_required_children(kind: pa.DataType) -> bool:
    """Whether something within values of this type may not be null."""
    if pa.types.is_map(kind):
        return (
            not kind.item_field.nullable
            or has_required_children(kind.key_type)
            or has_required_children(kind.item_type)
        )
    if not pa.types.is_nested(kind):
        return False
    fields = [kind.field(index) for index in range(kind.num_fields)]
    return any(not field.nullable or has_required_children(field.type) for field in fields)


def has_forbidden_null(column: Any, field: pa.Field) -> bool:
    """Whether the values hold a null, at any depth, where their type allows none. What a null hides does not count."""
    if not field.nullable and column.null_count:
        return True
    if not has_required_children(field.type):
        return False
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return any(_is_stray_within(chunk.drop_null() if chunk.null_count else chunk) for chunk in chunks)


def _is_stray_within(present: pa.Array) -> bool:
    kind = present.type
    if pa.types.is_map(kind):
        keys, items = _entries(present).flatten().flatten()
        return has_forbidden_null(keys, kind.key_field) or has_forbidden_null(items, kind.item_field)
    if pa.types.is_struct(kind):
        return any(has_forbidden_null(child, kind.field(index)) for index, child in enumerate(present.flatten()))
    return has_forbidden_null(present.flatten(), kind.value_field)


def fill_hidden_nulls(table: pa.Table) -> pa.Table:
    """The same rows, with something that is no null in each place that may have none and that a null hides."""
    for index, field in enumerate(table.schema):
        if has_required_children(field.type):
            chunks = [_whole(chunk) for chunk in table.column(index).chunks]
            table = table.set_column(index, field, pa.chunked_array(chunks, field.type))
    return table


def _whole(column: pa.Array) -> pa.Array:
    kind, types = column.type, pa.types
    if not has_required_children(kind):
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


# The types that columns have: which a shard can store, what fits them, and how rows that come are brought into them.
#
# No value is lost on the way: what would be is refused.


NESTING_MAX = 30  # of types in types; Arrow writes no more than 64, of which a map takes two
FAMILIES_MAX = 1_000  # types of which is remembered what they hold
_DAY_MS = 86_400_000
_DAYS_MAX = 2**31 - 1  # Parquet has dates as days of 32 bits


def check_input_types(fields: Iterable[pa.Field]) -> None:
    """Raise InvalidUsage where a column of rows that somebody sends has a type that no shard can store, nor nulls.

    Before anything else is done with them: Arrow reads beyond its tables where a decimal says a scale of millions.
    """
    for field in fields:
        _check_given(field.name, field.type, NESTING_MAX)


def _check_given(name: str, kind: Any, levels: int) -> None:
    types = pa.types
    if types.is_null(kind):
        return
    if types.is_dictionary(kind):
        _check_given(name, kind.value_type, levels)
    elif types.is_struct(kind) or types.is_map(kind) or _is_list(kind):
        for child in _children(kind):
            if levels <= 0:
                raise InvalidUsage(f"column {name!r} is nested more than {NESTING_MAX} levels deep; flatten it")
            _check_given(name, child.type, levels - 1)
    else:
        stored_type(name, kind)


@lru_cache(FAMILIES_MAX)
def plain_type(kind: Any) -> Any:
    """The type of the same values without dictionaries, run ends, views and extension types. Raises TypeError: a union.

    Views become large strings, binaries and lists; an extension type its storage.
    """
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return pa.bool_() if isinstance(kind, pa.Bool8Type) else plain_type(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return plain_type(kind.value_type)
    if kind == pa.string_view():
        return pa.large_string()
    if kind == pa.binary_view():
        return pa.large_binary()
    if types.is_union(kind):
        raise TypeError(f"{kind} is a union, which no shard can store")
    return _with_inner(kind, plain_type)


def _with_inner(kind: Any, change: Callable[[Any], Any]) -> Any:
    """The type with `change` made to the types directly within it; lists that are views become lists."""
    types = pa.types
    if types.is_map(kind):
        key, item = (field.with_type(change(field.type)) for field in (kind.key_field, kind.item_field))
        return pa.map_(key, item, kind.keys_sorted)
    if types.is_struct(kind):
        return pa.struct([field.with_type(change(field.type)) for field in _children(kind)])
    if _is_list(kind) or _is_list_view(kind):
        item = kind.value_field.with_type(change(kind.value_type))
        if types.is_fixed_size_list(kind):
            return pa.list_(item, kind.list_size)
        return pa.list_(item) if types.is_list(kind) or types.is_list_view(kind) else pa.large_list(item)
    return kind


@lru_cache(FAMILIES_MAX)
def wide_type(kind: Any) -> Any:
    """One type for all plain types of the same values: large strings, binaries and lists, of which all may be null."""
    types = pa.types
    if types.is_string(kind) or types.is_binary(kind):
        return pa.large_string() if types.is_string(kind) else pa.large_binary()
    if types.is_map(kind):
        return pa.map_(wide_type(kind.key_type), wide_type(kind.item_type))
    if types.is_struct(kind):
        return pa.struct([pa.field(field.name, wide_type(field.type)) for field in _children(kind)])
    if types.is_fixed_size_list(kind):
        return pa.list_(wide_type(kind.value_type), kind.list_size)
    return pa.large_list(wide_type(kind.value_type)) if _is_list(kind) else kind


@lru_cache(FAMILIES_MAX)
def without_half_floats(kind: Any) -> Any:
    """The type with float in the place of each half float: it holds the same values, and DuckDB reads it."""
    return pa.float32() if pa.types.is_float16(kind) else _with_inner(kind, without_half_floats)


def without_empty_chunks(column: Any) -> Any:
    """The column without chunks of no rows: of an empty slice that came by its C interface Arrow joins no others."""
    if not isinstance(column, pa.ChunkedArray) or column.num_chunks == 1:
        return column
    return pa.chunked_array([chunk for chunk in column.chunks if len(chunk)], column.type)


def to_plain(column: Any) -> Any:
    """The column in its `plain_type`, with the same chunks. Raises TypeError and errors of Arrow."""
    kind = plain_type(column.type)
    if kind == column.type:
        return column
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([_to_plain(chunk, kind) for chunk in column.chunks], kind)
    return _to_plain(column, kind)


def _to_plain(array: pa.Array, kind: Any) -> pa.Array:
    """Arrow's cast cannot do all of it: not dictionaries of views or lists, and of list views it makes broken lists."""
    own, types = array.type, pa.types
    if own == kind:
        return array
    if isinstance(own, pa.BaseExtensionType):
        return array.cast(kind) if isinstance(own, pa.Bool8Type) else _to_plain(array.storage, kind)
    if types.is_dictionary(own):
        return _to_plain(array.dictionary, kind).take(array.indices)
    if types.is_run_end_encoded(own):
        ends = np.asarray(array.run_ends)
        runs = np.searchsorted(ends, np.arange(array.offset, array.offset + len(array)), side="right")
        return _to_plain(array.values, kind).take(pa.array(runs))
    if types.is_struct(own):
        children = [_to_plain(array.field(place), field.type) for place, field in enumerate(_children(kind))]
        return pa.StructArray.from_arrays(children, fields=list(_children(kind)), mask=array.is_null())
    if types.is_fixed_size_list(own):
        values = array.values.slice(array.offset * own.list_size, len(array) * own.list_size)
        return pa.FixedSizeListArray.from_arrays(_to_plain(values, kind.value_type), type=kind, mask=array.is_null())
    if types.is_map(own) or _is_list(own) or _is_list_view(own):
        return _lists_to_plain(array, kind)
    return array.cast(kind)


def _lists_to_plain(array: pa.Array, kind: Any) -> pa.Array:
    own, is_missing = array.type, array.is_null()
    if _is_list_view(own):
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        values, offsets = array.flatten(), np.concatenate([[0], np.cumsum(lengths)])
    else:
        values, offsets = (None if pa.types.is_map(own) else array.values), array.offsets.to_numpy()
    ends = pa.array(offsets, pa.int64() if pa.types.is_large_list(kind) else pa.int32())  # a copy, which takes a mask
    if pa.types.is_map(own):
        keys, items = _to_plain(array.keys, kind.key_type), _to_plain(array.items, kind.item_type)
        return pa.MapArray.from_arrays(ends, keys, items, type=kind, mask=is_missing)
    build = pa.LargeListArray if pa.types.is_large_list(kind) else pa.ListArray
    return build.from_arrays(ends, _to_plain(values, kind.value_type), type=kind, mask=is_missing)


def empty_column(column: Any, field: pa.Field) -> pa.Array:
    if not _castable(column.type, field.type):
        raise InvalidUsage(f"column {field.name!r} is {column.type}, not {field.type}")
    return pa.array([], field.type)


def as_type(column: Any, kind: Any) -> Any:
    """The column in a type, with its names of list items: Parquet says `element`, and Arrow deems that equal."""
    is_same = column.type == kind and (not pa.types.is_nested(kind) or str(column.type) == str(kind))
    return column if is_same else column.cast(kind)


def conform_column(column: Any, field: pa.Field) -> Any:
    """`column` as `field.type`, value for value. Raises InvalidUsage: it has another type, or would lose something."""
    if column.type != field.type:
        if not _castable(column.type, field.type):
            raise InvalidUsage(f"column {field.name!r} is {column.type}, not {field.type}; cast it first")
        try:
            column = to_plain(column)
            cast = column.cast(field.type)
            exact = _round_trips(column, cast)
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise InvalidUsage(f"column {field.name!r} does not fit {field.type}: {error}") from error
        if not exact:
            raise InvalidUsage(f"column {field.name!r} loses precision as {field.type}; round it first")
        column = cast
    column = as_type(column, field.type)
    if not field.nullable and column.null_count:
        raise InvalidUsage(f"column {field.name!r} holds {column.null_count} nulls but does not allow them")
    check_nested_nulls(column, field)
    check_storable(column, field)
    return column


def check_nested_nulls(column: Any, field: pa.Field) -> None:
    """Raise InvalidUsage where a value has a null within it that its type does not allow."""
    if has_forbidden_null(column, field):
        raise InvalidUsage(
            f"column {field.name!r} has a null where {field.type} allows none; give a whole value, or let the column "
            "take nulls there by widen_column"
        )


def check_storable(column: Any, field: pa.Field) -> None:
    """Refuse what Parquet cannot hold: dates with a time of day or beyond 32 bits, seconds beyond milliseconds."""
    kind = field.type
    if not has_parquet_limits(kind):
        return
    if pa.types.is_nested(kind):
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            for child in visible_children(chunk):
                check_storable(child, pa.field(field.name, child.type))
    if pa.types.is_date64(kind):
        days = column.cast(pa.int64())
        whole = pc.multiply(pc.divide(days, _DAY_MS), _DAY_MS)
        if pc.any(pc.not_equal(days, whole)).as_py():
            raise InvalidUsage(f"column {field.name!r} is date64 but holds times of day; use timestamp('ms')")
        least, most = pc.min_max(days).as_py().values()
        if least is not None and (least < -(_DAYS_MAX + 1) * _DAY_MS or most > _DAYS_MAX * _DAY_MS):
            raise InvalidUsage(f"column {field.name!r} holds a day beyond 32 bits, which wraps in Parquet")
    if pa.types.is_timestamp(kind) and kind.unit == "s":
        try:
            column.cast(pa.timestamp("ms", kind.tz))
        except pa.ArrowInvalid as error:
            raise InvalidUsage(f"column {field.name!r} does not fit timestamp('ms'): {error}") from error


def has_parquet_limits(kind: pa.DataType) -> bool:
    """Whether Parquet does not hold every value of this type, or of one within it."""
    if pa.types.is_nested(kind):
        return any(has_parquet_limits(one.type) for one in _children(kind))
    return bool(pa.types.is_date64(kind) or (pa.types.is_timestamp(kind) and kind.unit == "s"))


def visible_children(column: pa.Array) -> list[pa.Array]:
    """The values one level within a nested column, without those that a null hides; for a map its pairs."""
    if pa.types.is_struct(column.type):
        return list(column.flatten())
    return [map_pairs(column).flatten() if pa.types.is_map(column.type) else column.flatten()]


def map_pairs(column: pa.MapArray) -> pa.ListArray:
    """A map as lists of structs with `key` and `value`."""
    pair = pa.struct([pa.field("key", column.type.key_type, False), pa.field("value", column.type.item_type)])
    return column.cast(pa.list_(pair))


def _round_trips(column: Any, cast: Any) -> bool:
    """Whether no float changed its value, nor a whole number as a half (what a safe cast does not refuse)."""
    kind = column.type
    half = pa.types.is_float16(cast.type) and pa.types.is_integer(kind)
    if not (half or (pa.types.is_floating(kind) and pa.types.is_floating(cast.type))):
        return True
    plain = column.cast(pa.float64() if half else kind)
    same = pc.or_(pc.equal(cast.cast(plain.type), plain), pc.is_nan(plain))
    return bool(pc.all(same).as_py() in (True, None))


@lru_cache(FAMILIES_MAX)
def family(kind: Any) -> str | None:
    """The kind of thing that a flat type holds; None for a type that no shard can store."""
    types = pa.types
    if types.is_string(kind) or types.is_large_string(kind) or kind == pa.string_view():
        return "string"
    if types.is_binary(kind) or types.is_large_binary(kind) or kind == pa.binary_view():
        return "binary"
    if types.is_timestamp(kind):
        return "timestamp" if kind.tz is None else "instant"
    tests = {
        "binary": types.is_fixed_size_binary,
        "boolean": types.is_boolean,
        "integer": types.is_integer,
        "float": types.is_floating,
        "decimal": types.is_decimal,
        "date": types.is_date,
        "time": types.is_time,
        "duration": types.is_duration,
    }
    return next((name for name, test in tests.items() if test(kind)), None)


_WIDENINGS = {
    ("integer", "float"),
    ("integer", "decimal"),
    ("string", "binary"),
    ("binary", "string"),
    ("date", "timestamp"),  # midnight: what a writer gives who knows the column from before it was widened
}


def _castable(source: Any, target: Any) -> bool:
    """Whether a cast keeps the meaning; whether it keeps every value is checked on the values."""
    types = pa.types
    if source == target or types.is_null(source):
        return True
    if isinstance(source, pa.BaseExtensionType):  # the bytes of a UUID are no text
        plain = plain_type(source)
        return _castable(plain, target) and (types.is_nested(plain) or family(plain) == family(target))
    if types.is_dictionary(source) or types.is_run_end_encoded(source):
        return _castable(source.value_type, target)
    if types.is_map(source) or types.is_map(target):
        return (
            types.is_map(source)
            and types.is_map(target)
            and _castable_child(source.key_type, target.key_type)
            and _castable_child(source.item_type, target.item_type)
        )
    if (_is_list(source) or _is_list_view(source)) and _is_list(target):
        sizes = {kind.list_size for kind in (source, target) if types.is_fixed_size_list(kind)}
        return len(sizes) <= 1 and _castable_child(source.value_type, target.value_type)
    if types.is_struct(source) and types.is_struct(target):
        return [f.name for f in source] == [f.name for f in target] and all(
            _castable_child(s.type, t.type) for s, t in zip(source, target, strict=True)
        )
    if types.is_decimal(source) and types.is_integer(target):
        return bool(source.scale == 0)  # whole numbers, as Spark has those of 64 bits without a sign
    pair = (family(source), family(target))
    return (pair[0] is not None and pair[0] == pair[1]) or pair in _WIDENINGS


def _castable_child(source: Any, target: Any) -> bool:
    """Inside nested columns nothing narrows to a float: the loss could not be told cheaply."""
    types = pa.types
    narrows = types.is_floating(source) and types.is_floating(target) and source.bit_width > target.bit_width
    half = types.is_float16(target) and types.is_integer(source)
    return not narrows and not half and _castable(source, target)


def _is_list(kind: Any) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_list_view(kind: Any) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _children(kind: Any) -> Iterator[Any]:
    for index in range(kind.num_fields):
        yield kind.field(index)


def stored_type(name: str, kind: Any, levels: int = NESTING_MAX) -> Any:
    """The type that a column is stored as: itself, dictionaries decoded and views made large. Raises InvalidUsage.

    At most `levels` of types may lie in it.
    """
    types, inner = pa.types, levels - 1
    if levels < 0:
        raise InvalidUsage(f"column {name!r} is nested more than {NESTING_MAX} levels deep; flatten it")
    if kind == pa.string_view():
        return pa.large_string()
    if kind == pa.binary_view():
        return pa.large_binary()
    if types.is_dictionary(kind):
        return stored_type(name, kind.value_type, inner)
    if types.is_map(kind):
        key, item = stored_type(name, kind.key_type, inner), stored_type(name, kind.item_type, inner)
        return pa.map_(key, pa.field(kind.item_field.name, item, kind.item_field.nullable))
    if types.is_struct(kind):
        if kind.num_fields == 0:
            raise InvalidUsage(f"column {name!r} is a struct without fields, which Parquet cannot hold")
        return pa.struct([pa.field(f.name, stored_type(name, f.type, inner), f.nullable) for f in _children(kind)])
    if _is_list(kind):
        item = pa.field(kind.value_field.name, stored_type(name, kind.value_type, inner), kind.value_field.nullable)
        if types.is_fixed_size_list(kind):
            if kind.list_size == 0:
                raise InvalidUsage(f"column {name!r} is a list of size 0, which Parquet cannot hold")
            return pa.list_(item, kind.list_size)
        return pa.large_list(item) if types.is_large_list(kind) else pa.list_(item)
    if types.is_fixed_size_binary(kind) and kind.byte_width == 0:
        raise InvalidUsage(f"column {name!r} is a binary of width 0, which Parquet cannot hold")
    if types.is_decimal(kind) and not 0 <= kind.scale <= kind.precision:
        raise InvalidUsage(f"column {name!r} is {kind}, a scale that Parquet cannot hold")
    if family(kind) is None:
        raise InvalidUsage(f"column {name!r} has type {kind}, which a shard cannot store; cast it first")
    return kind
