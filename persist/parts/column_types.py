"""The types that columns may have, lossless conversion of columns to them, and nested types with required children."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import InvalidUsage

NESTING_MAX = 30  # of types in types; Arrow writes at most 64 levels, of which a map takes two
TYPES_MAX = 1_000  # whose properties are cached
Ints = npt.NDArray[np.int64]
_DAY_MS = 86_400_000
_DAYS_MAX = 2**31 - 1  # Parquet stores dates as days of 32 bits

# Nested types may have children that are not nullable, such as a required field of a struct. A null struct hides the
# values of its fields. Arrow stores some value there, often a null, which its Parquet writer refuses although no reader
# can see it. So hidden nulls are replaced before rows are written.


def has_required_children(kind: pa.DataType) -> bool:
    """Whether values of this type contain children that must not be null."""
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
    """Whether the values contain a null, at any depth, where their type forbids it. Hidden values do not count."""
    if not field.nullable and column.null_count:
        return True
    if not has_required_children(field.type):
        return False
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    return any(_has_forbidden_child(chunk.drop_null() if chunk.null_count else chunk) for chunk in chunks)


def _has_forbidden_child(present: pa.Array) -> bool:
    kind = present.type
    if pa.types.is_map(kind):
        keys, items = map_pairs(present).flatten().flatten()
        return has_forbidden_null(keys, kind.key_field) or has_forbidden_null(items, kind.item_field)
    if pa.types.is_struct(kind):
        return any(has_forbidden_null(child, kind.field(index)) for index, child in enumerate(present.flatten()))
    return has_forbidden_null(present.flatten(), kind.value_field)


def fill_hidden_nulls(table: pa.Table) -> pa.Table:
    """The same rows, in which hidden nulls of required children are replaced by other values."""
    for index, field in enumerate(table.schema):
        if has_required_children(field.type):
            chunks = [_fill_hidden(chunk) for chunk in table.column(index).chunks]
            table = table.set_column(index, field, pa.chunked_array(chunks, field.type))
    return table


def _fill_hidden(column: pa.Array) -> pa.Array:
    kind, types = column.type, pa.types
    if not has_required_children(kind):
        return column
    if types.is_struct(kind):
        if column.null_count:  # a null that Arrow builds hides empty values
            places = pc.if_else(column.is_valid(), pa.array(np.arange(len(column))), len(column))
            column = pa.concat_arrays([column, pa.array([None], kind)]).take(places)
        children = [_fill_hidden(column.field(index)) for index in range(kind.num_fields)]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=column.is_null())
    return _with_values(column, kind, lambda values, _: _fill_hidden(values))


def _with_values(column: pa.Array, kind: Any, convert: Callable[[pa.Array, Any], pa.Array]) -> pa.Array:
    """Lists or maps as `kind`, with `convert` applied to their values (or keys and items) and their new types."""
    types = pa.types
    if types.is_fixed_size_list(kind):
        present = pa.FixedSizeListArray.from_arrays(convert(column.flatten(), kind.value_type), type=kind)
        counted = pc.subtract(pc.cumulative_sum(column.is_valid().cast(pa.int64())), 1)
        return present.take(pc.if_else(column.is_valid(), counted, pa.scalar(None, pa.int64())))
    lists = map_pairs(column) if types.is_map(kind) else column
    values = lists.flatten()
    if types.is_map(kind):
        keys, items = values.flatten()
        children = [convert(keys, kind.key_type), convert(items, kind.item_type)]
    else:
        children = [convert(values, kind.value_type)]
    return build_lists(kind, _list_offsets(lists), children, column.is_null())


def _list_offsets(lists: pa.Array) -> Ints:
    """The offsets of lists whose values are contiguous; a null list is empty."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    return np.concatenate([[0], np.cumsum(lengths)])


def build_lists(kind: Any, offsets: Ints | list[int], children: list[pa.Array], is_missing: pa.Array) -> pa.Array:
    """Lists, or a map from its keys and items, as an array of the type."""
    ends = pa.array(offsets, pa.int64() if pa.types.is_large_list(kind) else pa.int32())  # a copy, which accepts a mask
    is_map, is_large = pa.types.is_map(kind), pa.types.is_large_list(kind)
    build = pa.MapArray if is_map else pa.LargeListArray if is_large else pa.ListArray
    return build.from_arrays(ends, *children, type=kind, mask=is_missing)


def map_pairs(column: pa.MapArray) -> pa.ListArray:
    """A map as lists of structs, its pairs. (Arrow's own cast refuses hidden nulls.)"""
    kind = column.type
    pairs = pa.StructArray.from_arrays([column.keys, column.items], fields=[kind.key_field, kind.item_field])
    offsets = pa.array(column.offsets.to_numpy())  # a copy, because the offsets of a slice accept no mask
    return pa.ListArray.from_arrays(offsets, pairs, mask=column.is_null())


def check_input_types(fields: Iterable[pa.Field]) -> None:
    """Raise InvalidUsage if a column of untrusted rows has a type that a shard cannot store, other than null.

    This must be the first check: Arrow reads out of bounds for a decimal with a scale of millions.
    """
    for field in fields:
        _check_input_type(field.name, field.type, NESTING_MAX)


def _check_input_type(name: str, kind: Any, levels: int) -> None:
    types = pa.types
    if types.is_null(kind):
        return
    if types.is_dictionary(kind):
        _check_input_type(name, kind.value_type, levels)
    elif types.is_struct(kind) or types.is_map(kind) or _is_list(kind):
        for child in _children(kind):
            if levels <= 0:
                raise InvalidUsage(f"column {name!r} is nested more than {NESTING_MAX} levels deep; flatten it")
            _check_input_type(name, child.type, levels - 1)
    else:
        stored_type(name, kind)


def check_nesting(name: str, kind: Any) -> None:
    """Raise InvalidUsage if a type is nested more than NESTING_MAX levels deep, whatever it consists of."""
    level = [kind]
    for _ in range(NESTING_MAX + 1):
        within = [k.value_type for k in level if pa.types.is_dictionary(k)]
        within += [k.storage_type for k in level if isinstance(k, pa.BaseExtensionType)]
        level = within + [child.type for k in level for child in _children(k)]
        if not level:
            return
    raise InvalidUsage(f"column {name!r} is nested more than {NESTING_MAX} levels deep; flatten it")


@lru_cache(TYPES_MAX)
def plain_type(kind: Any) -> Any:
    """The type of the same values without dictionaries, run ends, views and extension types.

    Views become large strings, binaries and lists, an extension type its storage. Raises TypeError for a union.
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
        raise TypeError(f"{kind} is a union, which a shard cannot store")
    return _with_inner(kind, plain_type)


def _with_inner(kind: Any, change: Callable[[Any], Any]) -> Any:
    """The type with `change` applied to the types directly within it; list views become lists."""
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


@lru_cache(TYPES_MAX)
def wide_type(kind: Any) -> Any:
    """One type for all plain types of the same values: large strings, binaries and lists, all nullable."""
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


@lru_cache(TYPES_MAX)
def without_half_floats(kind: Any) -> Any:
    """The type with float instead of each half float: it holds the same values, and DuckDB can read it."""
    return pa.float32() if pa.types.is_float16(kind) else _with_inner(kind, without_half_floats)


@lru_cache(TYPES_MAX)
def polars_type(kind: Any) -> Any:
    """The type in which Polars reads the values: it lacks 256-bit decimals and offsets of half hours.

    It multiplies seconds without a check.
    """
    types = pa.types
    if types.is_decimal(kind) and (kind.bit_width > 128 or kind.scale < 0):
        return pa.decimal128(38, min(max(kind.scale, 0), 38))
    if types.is_duration(kind) and kind.unit == "s":
        return pa.duration("ms")
    if types.is_timestamp(kind):
        is_named = kind.tz is None or kind.tz[:1] not in ("+", "-") or kind.tz.endswith(":00")
        return pa.timestamp("ms" if kind.unit == "s" else kind.unit, kind.tz if is_named else "UTC")
    return _with_inner(kind, polars_type)


def without_empty_chunks(column: Any) -> Any:
    """The column without empty chunks: Arrow cannot join an empty slice that was imported by the C interface."""
    if not isinstance(column, pa.ChunkedArray) or column.num_chunks == 1:
        return column
    return pa.chunked_array([chunk for chunk in column.chunks if len(chunk)], column.type)


def to_plain(column: Any) -> Any:
    """The column in its `plain_type`, with the same chunks. Raises TypeError or an ArrowException."""
    kind = plain_type(column.type)
    if kind == column.type:
        return column
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([_to_plain(chunk, kind) for chunk in column.chunks], kind)
    return _to_plain(column, kind)


def _to_plain(array: pa.Array, kind: Any) -> pa.Array:
    """Arrow's cast fails for dictionaries of views or lists, and returns invalid lists for list views."""
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
    if _is_list_view(array.type):
        offsets, children = _list_offsets(array), [_to_plain(array.flatten(), kind.value_type)]
    elif pa.types.is_map(array.type):
        offsets = array.offsets.to_numpy()
        children = [_to_plain(array.keys, kind.key_type), _to_plain(array.items, kind.item_type)]
    else:
        offsets, children = array.offsets.to_numpy(), [_to_plain(array.values, kind.value_type)]
    return build_lists(kind, offsets, children, array.is_null())


def empty_column(column: Any, field: pa.Field) -> pa.Array:
    """An empty column of the field's type. Raises InvalidUsage if the types are not compatible."""
    if not _castable(column.type, field.type):
        raise InvalidUsage(f"column {field.name!r} is {column.type}, not {field.type}")
    return pa.array([], field.type)


def as_type(column: Any, kind: Any) -> Any:
    """The column in a type, including the names of list items, which Arrow's equality of types ignores."""
    if column.type == kind and (not pa.types.is_nested(kind) or str(column.type) == str(kind)):
        return column
    if not has_required_children(kind) and not _has_decimals(kind):
        return column.cast(kind)
    if isinstance(column, pa.ChunkedArray):
        return pa.chunked_array([_fill_hidden(_rebuilt(chunk, kind)) for chunk in column.chunks], kind)
    return _fill_hidden(_rebuilt(column, kind))


def _has_decimals(kind: Any) -> bool:
    return bool(pa.types.is_decimal(kind)) or any(_has_decimals(child.type) for child in _children(kind))


def as_schema(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with the types of a schema of the same columns, without hidden nulls of required children."""
    columns = [as_type(column, field.type) for column, field in zip(table.columns, schema, strict=True)]
    return fill_hidden_nulls(pa.table(columns, schema=schema))


def _rebuilt(column: pa.Array, kind: Any) -> pa.Array:
    """The column in a type with the same nesting. Arrow's cast refuses nulls of required children below a null."""
    types, own = pa.types, column.type
    if not types.is_nested(kind):
        return _cast_decimals(column, kind) if types.is_decimal(own) and types.is_decimal(kind) else column.cast(kind)
    if types.is_struct(kind):
        children = dict(zip((field.name for field in _children(own)), column.flatten(), strict=True))
        columns = [
            _rebuilt(children[field.name], field.type) if field.name in children else pa.nulls(len(column), field.type)
            for field in _children(kind)
        ]
        return pa.StructArray.from_arrays(columns, fields=list(_children(kind)), mask=column.is_null())
    return _with_values(column, kind, _rebuilt)


def _cast_decimals(column: pa.Array, kind: Any) -> pa.Array:
    """Decimals in another decimal type. Arrow's cast does not notice a value that wraps around in its bits."""
    own = column.type
    digits = kind.precision - kind.scale + own.scale  # of a value that fits
    if digits >= own.precision and kind.bit_width >= own.bit_width:
        return column.cast(kind)
    fitting = column.cast(pa.decimal256(76, own.scale)).cast(pa.decimal256(min(max(digits, 1), 76), own.scale))
    return fitting.cast(pa.decimal256(kind.precision, kind.scale)).cast(kind)


def conform_column(column: Any, field: pa.Field) -> Any:
    """`column` as `field.type`. Raises InvalidUsage if its type is not compatible or a value would change."""
    if column.type != field.type:
        if not _castable(column.type, field.type):
            raise InvalidUsage(f"column {field.name!r} is {column.type}, not {field.type}; cast it first")
        try:
            column = to_plain(column)
            cast = as_type(column, field.type)
            exact = _round_trips(column, cast)
        except (pa.ArrowException, ValueError, TypeError) as error:
            raise InvalidUsage(f"column {field.name!r} does not fit {field.type}: {error}") from error
        if not exact:
            raise InvalidUsage(f"column {field.name!r} loses precision as {field.type}; round it first")
        column = cast
    try:
        column = as_type(column, field.type)
    except pa.ArrowException as error:
        raise InvalidUsage(f"column {field.name!r} does not fit {field.type}: {error}") from error
    if not field.nullable and column.null_count:
        raise InvalidUsage(f"column {field.name!r} holds {column.null_count} nulls but does not allow them")
    check_nested_nulls(column, field)
    check_storable(column, field)
    return column


def check_nested_nulls(column: Any, field: pa.Field) -> None:
    """Raise InvalidUsage if a value contains a null that its type does not allow."""
    if has_forbidden_null(column, field):
        raise InvalidUsage(
            f"column {field.name!r} has a null where {field.type} allows none; give a complete value, or allow nulls "
            "there with widen_column"
        )


def check_storable(column: Any, field: pa.Field) -> None:
    """Raise InvalidUsage for values that Parquet cannot store: dates with a time of day or beyond 32 bits, and
    seconds beyond the range of milliseconds.
    """
    kind = column.type  # rows of a file have its types: a day of 32 bits for date64
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
            raise InvalidUsage(f"column {field.name!r} holds a day beyond 32 bits, which overflows in Parquet")
    if pa.types.is_timestamp(kind) and kind.unit == "s":
        try:
            column.cast(pa.timestamp("ms", kind.tz))
        except pa.ArrowInvalid as error:
            raise InvalidUsage(f"column {field.name!r} does not fit timestamp('ms'): {error}") from error


def has_parquet_limits(kind: pa.DataType) -> bool:
    """Whether Parquet cannot store every value of this type, or of a type within it."""
    if pa.types.is_nested(kind):
        return any(has_parquet_limits(child.type) for child in _children(kind))
    return bool(pa.types.is_date64(kind) or (pa.types.is_timestamp(kind) and kind.unit == "s"))


def visible_children(column: pa.Array) -> list[pa.Array]:
    """The values one level within a nested column, without those that a null hides; for a map its pairs."""
    if pa.types.is_struct(column.type):
        return list(column.flatten())
    return [map_pairs(column).flatten() if pa.types.is_map(column.type) else column.flatten()]


def _round_trips(column: Any, cast: Any) -> bool:
    """Whether no float changed, and no integer as a half float, which a safe cast does not check."""
    kind = column.type
    if kind == cast.type:  # half floats cannot be compared
        return True
    half = pa.types.is_float16(cast.type) and pa.types.is_integer(kind)
    if not (half or (pa.types.is_floating(kind) and pa.types.is_floating(cast.type))):
        return True
    plain = column.cast(pa.float64() if half else kind)
    same = pc.or_(pc.equal(cast.cast(plain.type), plain), pc.is_nan(plain))
    return bool(pc.all(same).as_py() in (True, None))


@lru_cache(TYPES_MAX)
def family(kind: Any) -> str | None:
    """The kind of values of a flat type; None for a type that a shard cannot store."""
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
    ("date", "timestamp"),  # midnight, from writers that use the type of the column before it was widened
}


def _castable(source: Any, target: Any) -> bool:
    """Whether a cast preserves the meaning; whether it preserves each value is checked on the values."""
    types = pa.types
    if source == target or types.is_null(source):
        return True
    if isinstance(source, pa.BaseExtensionType):  # for example, the bytes of a UUID are not text
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
        return bool(source.scale == 0)  # integers, such as unsigned 64-bit ones in Spark
    if types.is_fixed_size_binary(source) and family(target) == "string":
        return False  # numbers such as UUIDs, of which Parquet files do not always say so
    pair = (family(source), family(target))
    return (pair[0] is not None and pair[0] == pair[1]) or pair in _WIDENINGS


def _castable_child(source: Any, target: Any) -> bool:
    """As `_castable` within nested columns, without narrowing to floats: checking it for loss would be expensive."""
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
    """The type with which a column is stored: dictionaries are decoded, and views become large types.

    Raises InvalidUsage if a shard cannot store it, or it is nested more than `levels` deep.
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
            raise InvalidUsage(f"column {name!r} is a struct without fields, which Parquet cannot store")
        return pa.struct([pa.field(f.name, stored_type(name, f.type, inner), f.nullable) for f in _children(kind)])
    if _is_list(kind):
        item = pa.field(kind.value_field.name, stored_type(name, kind.value_type, inner), kind.value_field.nullable)
        if types.is_fixed_size_list(kind):
            if kind.list_size == 0:
                raise InvalidUsage(f"column {name!r} is a list of size 0, which Parquet cannot store")
            return pa.list_(item, kind.list_size)
        return pa.large_list(item) if types.is_large_list(kind) else pa.list_(item)
    if types.is_fixed_size_binary(kind) and kind.byte_width == 0:
        raise InvalidUsage(f"column {name!r} is a binary of width 0, which Parquet cannot store")
    if types.is_decimal(kind) and not 0 <= kind.scale <= kind.precision:
        raise InvalidUsage(f"column {name!r} is {kind}, a scale that Parquet cannot store")
    if family(kind) is None:
        raise InvalidUsage(f"column {name!r} has type {kind}, which a shard cannot store; cast it first")
    return kind
