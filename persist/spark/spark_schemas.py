"""Spark types and a shard's Arrow types, and the fixed columns of a stream or DataFrame over an evolving shard."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import pyarrow as pa
from pyspark.errors import PySparkTypeError
from pyspark.sql import types as t
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_schema

from persist.core.errors import InvalidUsage
from persist.core.ids import ShardId
from persist.core.shard_view import ShardView
from persist.core.state import SchemaRecord
from persist.parts import DIFF, newest, valid_schemas
from persist.parts.predicate import columns_of, parse
from persist.parts.schema_evolution import moved_names

_Item = TypeVar("_Item")
MULTIPLICITY = pa.field(DIFF, pa.int64())
DECIMAL_DIGITS_MAX = 38  # of Spark
_BINARY = "UTF8_BINARY"  # the collation that compares strings byte by byte
_WIDER: Mapping[pa.DataType, t.DataType] = {  # types that Spark lacks
    pa.uint8(): t.ShortType(),
    pa.uint16(): t.IntegerType(),
    pa.uint32(): t.LongType(),
    pa.uint64(): t.DecimalType(20, 0),
    pa.float16(): t.FloatType(),
    pa.string_view(): t.StringType(),
    pa.binary_view(): t.BinaryType(),
    pa.date64(): t.DateType(),
    pa.time32("s"): t.TimeType(6),
    pa.time32("ms"): t.TimeType(6),
}
_UNSTORABLE = (t.YearMonthIntervalType, t.CalendarIntervalType, t.VariantType, t.NullType, t.UserDefinedType)


def spark_type(name: str, kind: Any) -> t.DataType:
    """The Spark type that holds every value of an Arrow type. Raises InvalidUsage naming the column."""
    types = pa.types
    if kind in _WIDER:
        return _WIDER[kind]
    if types.is_map(kind):
        return t.MapType(spark_type(name, kind.key_type), spark_type(name, kind.item_type), True)
    if types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return t.StructType([t.StructField(f.name, spark_type(name, f.type), True) for f in fields])
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return t.ArrayType(spark_type(name, kind.value_type), True)
    is_decimal = types.is_decimal(kind)
    is_like_sparks = not is_decimal or (kind.precision <= DECIMAL_DIGITS_MAX and 0 <= kind.scale <= kind.precision)
    with suppress(PySparkTypeError):
        if is_like_sparks and not types.is_null(kind) and not types.is_dictionary(kind):
            return from_arrow_type(kind)
    raise InvalidUsage(f"column {name!r} is {kind}, which Spark has no type for; leave it out with option 'columns'")


def quoted(name: str) -> str:
    """The name as a quoted SQL identifier."""
    return "`" + name.replace("`", "``") + "`"


def spark_schema(fields: Iterable[Any]) -> t.StructType:
    """The Spark schema of Arrow fields. Every column is nullable, as with files."""
    return t.StructType([t.StructField(f.name, spark_type(f.name, f.type), True) for f in fields])


def arrow_schema(schema: t.StructType) -> pa.Schema:
    """The exact Arrow schema that Spark expects of the batches of a read with this schema."""
    return to_arrow_schema(schema, timezone="UTC")


def stored_schema(schema: t.StructType, without: Sequence[str]) -> pa.Schema:
    """The columns of a new shard for a DataFrame: all are nullable, and timestamps with a time zone are in UTC."""
    check_collations(schema)
    fields = []
    for spark in schema.fields:
        if spark.name in without:
            continue
        _check_storable(spark.name, spark.dataType)
        fields.append(t.StructField(spark.name, spark.dataType))
    return to_arrow_schema(t.StructType(fields).toNullable(), timezone="UTC")


def inner_types(kind: t.DataType) -> list[t.DataType]:
    """The types of the elements or fields of an array, a map or a struct; empty for other types."""
    if isinstance(kind, t.ArrayType):
        return [kind.elementType]
    if isinstance(kind, t.MapType):
        return [kind.keyType, kind.valueType]
    return [field.dataType for field in kind.fields] if isinstance(kind, t.StructType) else []


def check_collations(schema: t.StructType) -> None:
    """Raise InvalidUsage if a string column has a collation, because a shard compares strings by their bytes."""
    for field in schema.fields:
        if (collation := _collation(field.dataType)) is not None:
            raise InvalidUsage(
                f"column {field.name!r} has the collation {collation}, but a shard compares strings by bytes; write "
                f"collate({field.name}, 'UTF8_BINARY') instead, or a normalized column such as lower({field.name})"
            )


def _collation(kind: t.DataType) -> str | None:
    """The collation of strings in the type; None: they compare byte by byte."""
    if isinstance(kind, t.StringType):
        collation = str(getattr(kind, "collation", _BINARY))
        return None if collation == _BINARY else collation
    return next(filter(None, map(_collation, inner_types(kind))), None)


def _check_storable(name: str, kind: t.DataType) -> None:
    if isinstance(kind, _UNSTORABLE) or type(kind).__name__ in ("GeometryType", "GeographyType"):
        raise InvalidUsage(f"column {name!r} is {kind.simpleString()}, which a shard cannot store; cast it first")
    for inner in inner_types(kind):
        _check_storable(name, inner)


def cast(table: pa.Table, target: pa.Schema) -> pa.Table:
    """The columns of `target` in its order and exact types. Raises InvalidUsage if a value does not fit."""
    columns = []
    for field in target:
        column = table.column(field.name)
        if column.type != field.type:
            try:
                column = column.cast(field.type)
            except (pa.ArrowException, ValueError) as error:
                raise InvalidUsage(f"column {field.name!r} does not fit {field.type}: {error}") from error
        if not field.nullable and column.null_count:
            raise InvalidUsage(f"column {field.name!r} holds nulls, but the schema given to the read allows none")
        columns.append(column)
    return pa.Table.from_arrays(columns, schema=target)


def batches(tables: Iterable[pa.Table], target: pa.Schema, rows: int) -> Iterator[pa.RecordBatch]:
    """The rows of the tables as batches of `target`, of at most `rows` rows; small tables are combined."""
    for group in grouped((cast(table, target) for table in tables), len, rows):
        table = group[0] if len(group) == 1 else pa.concat_tables(group).combine_chunks()
        yield from table.to_batches(max_chunksize=rows)


def grouped(items: Iterable[_Item], size_of: Callable[[_Item], int], size_min: int) -> Iterator[list[_Item]]:
    """Consecutive items in groups of a total size of at least `size_min`; the last group may be smaller."""
    group: list[_Item] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= size_min:
            yield group
            group, size = [], 0
    if size:
        yield group


# The columns of a stream or a DataFrame are fixed when it starts, while those of the shard may change.
#
# A stream follows columns by their ids: a renamed column continues, a dropped one is null from then on, and added ones
# are left out until the query restarts. A stream fails if a filter names a column whose name now refers to another
# one. A DataFrame fails for any such name, because it is easily loaded again.

Renamed = tuple[tuple[str, str | None], ...]  # names of a stream's columns, and their current names


@dataclass(frozen=True)
class KnownSchema:
    """The shard schema from which the columns of a DataFrame were derived."""

    shard: ShardId
    number: int

    @classmethod
    def of(cls, view: ShardView) -> KnownSchema:
        return cls(view.shard_id, newest(valid_schemas(view.schemas))[0])


def names_in(where: str | None) -> list[str]:
    """The columns that a predicate names."""
    return [] if where is None else columns_of(parse(where))


def check_means(
    names: Iterable[str], schema_id: int, schemas: Mapping[int, SchemaRecord], use: str, remedy: str
) -> None:
    """Raise InvalidUsage if a name refers to another column now than in the schema `schema_id`, or to none."""
    sound = valid_schemas(schemas)
    current = newest(sound)[1]
    for name, became in moved_names(sound.get(schema_id, current), current, names):
        raise InvalidUsage(f"column {name!r}, {use}, {became}: {remedy} and use the current column names")


def current_names(names: Iterable[str], schema_id: int | None, schemas: Mapping[int, SchemaRecord]) -> Renamed:
    """The current names of the columns of schema `schema_id` (None: dropped), without names that it lacks."""
    sound = valid_schemas(schemas)
    current = newest(sound)[1]
    if current.is_plain or schema_id not in sound:
        return ()
    old = sound[schema_id]
    return tuple((name, current.name_of.get(old.id_of[name])) for name in names if name in old.id_of)


def columns_now(names: Iterable[str], renamed: Renamed) -> list[str]:
    """The current columns to read for a result with these names."""
    now = dict(renamed)
    return [column for name in names if (column := now.get(name, name)) is not None]


def with_original_names(tables: Iterator[pa.Table], renamed: Renamed, target: pa.Schema) -> Iterator[pa.Table]:
    """The tables with the columns of `target`, by the names that they had when the stream started."""
    if all(name == now for name, now in renamed):
        yield from tables
        return
    now = dict(renamed)
    for table in tables:
        columns = []
        for field in target:
            source = now.get(field.name, field.name)
            columns.append(pa.nulls(len(table), field.type) if source is None else table.column(source))
        yield pa.Table.from_arrays(columns, names=target.names)
