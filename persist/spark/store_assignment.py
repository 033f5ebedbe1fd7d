"""Store assignment: columns of a DataFrame to columns of a shard, and literal values to column types."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from itertools import chain, starmap
from typing import Any

import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as t
from pyspark.sql.types import StructType

from persist.client.schema_api import SchemaEvolution
from persist.core.errors import InvalidUsage
from persist.core.shard_view import ShardView
from persist.parts import ShardSchema, current_schema
from persist.parts.python_values import column_of
from persist.parts.schema_changes import AddColumn, Change, WidenColumn, apply_changes, check_added, check_kept
from persist.parts.schema_evolution import check_evolution, evolution_error, widening_error, widens_days
from persist.spark import executors
from persist.spark.options import Target, WriteOptions
from persist.spark.spark_schemas import inner_types, spark_type, stored_schema

# Assigned values and merge keys are cast to the types of the shard's columns without loss, or are an error.
#
# If the types decide, planning the job raises the error. Otherwise the expression raises it for each value that the
# cast would change, whatever the ANSI mode.

REFUSES = "persist refuses: "  # marks an error of a Spark expression as InvalidUsage
SET, KEYS = "the assigned value", "a key of the source"  # in an error
_WHOLE: Mapping[type[t.DataType], tuple[int, int]] = {  # bits, and decimal digits of the largest value
    t.ByteType: (8, 3),
    t.ShortType: (16, 5),
    t.IntegerType: (32, 10),
    t.LongType: (64, 19),
}
_FLOATS: Mapping[type[t.DataType], tuple[int, int]] = {  # bits of integers, and decimal digits, that are exact
    t.FloatType: (24, 6),
    t.DoubleType: (53, 15),
}
_TEXTS = (t.StringType, t.CharType, t.VarcharType, t.BinaryType)
_TIMES = (t.TimestampType, t.TimestampNTZType)


def literal(field: pa.Field, value: object) -> Column:
    """A Python value as a literal of the type of the column. Raises InvalidUsage if it does not fit."""
    kind, to = field.type, spark_type(field.name, field.type)
    [scalar] = column_of(field.name, [value], kind)
    if isinstance(to, t.DateType):
        value = scalar.as_py()
    elif isinstance(to, t.TimestampNTZType) and isinstance(value, dt.datetime):
        value = value.isoformat(" ")  # a datetime literal would be in the session's time zone
    return F.lit(value).cast(to)


def default_literal(field: pa.Field, value: pa.Scalar) -> Column:
    """The default of the column, or a value in it, as a literal of its type."""
    kind = field.type
    if not value.is_valid or not pa.types.is_nested(kind):
        return literal(field, value.as_py())
    if pa.types.is_struct(kind):
        inner = zip(kind.fields, value.values(), strict=True)
        return F.struct(*(default_literal(part, item).alias(part.name) for part, item in inner))
    if pa.types.is_map(kind):
        parts = kind.key_field, kind.item_field
        entries = (zip(parts, entry.values(), strict=True) for entry in value.values)
        whole = F.create_map(*starmap(default_literal, chain.from_iterable(entries)))
    else:
        whole = F.array(*(default_literal(kind.value_field, item) for item in value.values))
    return whole.cast(spark_type(field.name, kind))


def store_cast(what: str, value: Column, kind: t.DataType, to: t.DataType, field: pa.Field) -> Column:
    """The value of type `kind` cast to the type of the column. Raises InvalidUsage if no value of that type fits.

    `what` names the value in errors. The expression raises an error when it evaluates to a value that does not fit.
    """
    fits = _fits(kind, to)
    prefix = f"column {field.name!r} is {to.simpleString()}, and {what} is "
    if fits is False:
        raise InvalidUsage(f"{prefix}{kind.simpleString()}: cast it first")
    unsigned = pa.types.is_unsigned_integer(field.type)
    if isinstance(kind, t.NullType) or (fits and not unsigned):
        return value.cast(to)
    maximum = Decimal(2**field.type.bit_width - 1) if unsigned else None

    def checked(column: Column) -> Column:
        exact = F.lit(True) if fits else _is_exact(column, kind, to)
        if maximum is not None:
            exact = exact & (column.isNull() | column.try_cast(t.DecimalType(38, 0)).between(0, maximum))
        message = F.concat(F.lit(f"{REFUSES}{prefix}"), column.cast("string"), F.lit(": round it or cast it first"))
        return F.when(F.coalesce(exact, F.lit(False)), column.try_cast(to)).otherwise(F.raise_error(message).cast(to))

    return F.transform(F.array(value), checked)[0]  # evaluates the value once: it may not be deterministic


def identity(key: Column, kind: t.DataType) -> list[Column]:
    """Columns that are equal for two keys if and only if the keys are equal in a shard, where `-0.0` is not `0.0`.

    Spark joins and groups `-0.0` and `0.0` as equal.
    """
    if isinstance(kind, tuple(_FLOATS)):
        return [key.cast("string")]
    return [key, key.cast("string")] if _has_floats(kind) else [key]


def _has_floats(kind: t.DataType) -> bool:
    return isinstance(kind, tuple(_FLOATS)) or any(map(_has_floats, inner_types(kind)))


def _fits(kind: t.DataType, to: t.DataType) -> bool | None:
    """Whether every value of type `kind` fits type `to`; None: it depends on the value."""
    if kind == to or isinstance(kind, t.NullType):
        return True
    inner, outer = inner_types(kind), inner_types(to)
    if inner and outer:
        alike = type(kind) is type(to) and _names(kind) == _names(to)
        return alike and all(_fits(source, target) for source, target in zip(inner, outer, strict=True))
    if isinstance(kind, _TEXTS) and isinstance(to, _TEXTS):
        return True
    if isinstance(kind, t.DateType):
        return isinstance(to, _TIMES)
    if isinstance(kind, t.DayTimeIntervalType):
        return isinstance(to, t.DayTimeIntervalType)
    if isinstance(kind, t.TimeType) and isinstance(to, t.TimeType):
        return kind.precision <= to.precision or None
    return _number_fits(kind, to)


def _names(kind: t.DataType) -> list[str]:
    return kind.names if isinstance(kind, t.StructType) else []


def _number_fits(kind: t.DataType, to: t.DataType) -> bool | None:
    """As `_fits`, for numbers; False if one of the types is not a number."""
    if not isinstance(kind, t.NumericType) or not isinstance(to, t.NumericType):
        return False
    whole, floats = _WHOLE.get(type(kind)), _FLOATS.get(type(to))
    if isinstance(to, t.DecimalType):
        after = to.precision - to.scale
        if isinstance(kind, t.DecimalType):
            return (kind.scale <= to.scale and kind.precision - kind.scale <= after) or None
        return (whole is not None and whole[1] <= after) or None
    if isinstance(kind, t.DecimalType):
        return (floats is not None and kind.precision <= floats[1]) or None
    if whole:
        return whole[0] <= (floats or _WHOLE[type(to)])[0] or None
    return (floats is not None and _FLOATS[type(kind)][0] <= floats[0]) or None


def _is_exact(value: Column, kind: t.DataType, to: t.DataType) -> Column:
    """Whether casting the value to `to` and back gives the same value; true for null."""
    there = value.try_cast(to)
    back: Any = there.try_cast(kind)
    floats, others = _FLOATS.get(type(kind)), _FLOATS.get(type(to))
    if type(kind) in _WHOLE and others:  # beyond these bounds casts may round or saturate
        return value.isNull() | value.between(-(2 ** others[0]), 2 ** others[0])
    if isinstance(kind, t.DecimalType) and isinstance(to, t.FloatType):
        back = there.cast("string").try_cast(kind)  # by the shortest digits of the float
    exact = back.eqNullSafe(value)
    if floats and type(to) in _WHOLE:
        exact = exact & (value.isNull() | (value < F.lit(float(2 ** (_WHOLE[type(to)][0] - 1)))))
    return exact


# Column resolution: the columns of a written DataFrame in the schema of the shard, and schema evolution.


def resolve_names(schema: StructType, options: WriteOptions, shard: ShardSchema, name: str) -> dict[str, str]:
    """The shard's names of the DataFrame columns that have another name there. As in Spark, case does not matter.

    Raises InvalidUsage if a name is ambiguous.
    """
    renamed = {column: name_in_shard for column, name_in_shard in options.renames.items() if column is not None}
    for column in schema.names:
        if column in renamed or column == options.delete_column or column in shard.arrow.names:
            continue
        alike = [known for known in shard.arrow.names if known.lower() == column.lower()]
        if len(alike) > 1:
            raise InvalidUsage(
                f"the DataFrame has the column {column!r}, and shard {name!r} has {' and '.join(map(repr, alike))}: "
                "rename it to one of them"
            )
        if alike:
            renamed[column] = alike[0]
    return renamed


def can_be_absent(shard: ShardSchema, column: str) -> bool:
    """Whether a write may omit this column of the shard."""
    return column not in shard.key and (column in shard.defaults or shard.arrow.field(column).nullable)


def merge_schema(schema: StructType, options: WriteOptions, shard: ShardSchema, name: str) -> ShardSchema:
    """The schema of the shard with the new columns and wider types of the DataFrame. Changes nothing.

    Raises InvalidUsage if that is not possible, or if rows of these types could not be written.
    """
    fields = _stored_fields(schema, options, shard, name)
    changes = list(_changes(fields, shard))
    if not changes:
        return shard
    merged = apply_changes(shard, changes)
    merged.conform(fields.empty_table(), 0)
    return merged


def overwrite_schema(schema: StructType, options: WriteOptions, shard: ShardSchema, name: str) -> ShardSchema:
    """The schema of the shard after its columns are replaced by those of the DataFrame. Changes nothing.

    A column is kept if its name and its Spark type are the same, and widened if that is possible. Otherwise it is
    dropped, and a new column of its name is added. Raises InvalidUsage if the key would change, or if something
    requires a dropped column.
    """
    stored = _stored_fields(schema, options, shard, name)
    _check_key_stays(stored, shard, name)
    fields, ids, following = [], [], shard.details.next_id or len(shard.arrow) + 1
    for field in stored:
        kept = _kept_field(field, shard)
        fields.append(kept or field)
        ids.append(following if kept is None else shard.id_of[field.name])
        following += kept is None
    arrow = pa.schema(fields)
    if arrow.equals(shard.arrow) and tuple(ids) == shard.ids:
        return shard
    defaults = tuple(default for default in shard.details.defaults if default[0] in ids)
    details = replace(shard.details, ids=tuple(ids), next_id=following, defaults=defaults)
    overwritten, plain = ShardSchema(arrow, shard.key, details), ShardSchema(arrow, shard.key)
    if shard.is_plain and evolution_error(shard, plain) is None:  # a plain schema needs no newer storage format
        overwritten = plain
    check_evolution(shard, overwritten)
    check_added(shard, overwritten)
    check_kept(shard, overwritten)
    return overwritten


def evolve(target: Target, view: ShardView, planned: ShardSchema) -> None:
    """Evolve the schema of the shard to `planned`. Raises SchemaMismatch if it has changed since the view."""
    handles, transport = target.connection.handles, executors.one_shard(target, view.shard_id)
    change = SchemaEvolution(transport, target.shard, view.schema_id, handles.read, handles.write.retry_s)
    change.run(current_schema(view.schemas)[1], planned)


def _stored_fields(schema: StructType, options: WriteOptions, shard: ShardSchema, name: str) -> pa.Schema:
    """The stored columns of the DataFrame, with the names and types of the shard."""
    names = resolve_names(schema, options, shard, name)
    stored = stored_schema(schema, options.unstored_columns)
    return pa.schema([field.with_name(names.get(field.name, field.name)) for field in stored])


def _check_key_stays(given: pa.Schema, shard: ShardSchema, name: str) -> None:
    for column in shard.key:
        if column not in given.names:
            raise InvalidUsage(
                f"the DataFrame lacks {column!r}, a key column of shard {name!r}: overwriteSchema keeps the key; give "
                "the column, or write another shard"
            )
        kind = shard.arrow.field(column).type
        if not _is_same(column, kind, given.field(column).type):
            raise InvalidUsage(
                f"key column {column!r} of shard {name!r} is {kind}, not {given.field(column).type}: overwriteSchema "
                "keeps the key; cast the column, or write another shard"
            )


def _kept_field(field: pa.Field, shard: ShardSchema) -> pa.Field | None:
    """The column of the shard that is kept for a column of the DataFrame, possibly widened; None: it is replaced."""
    if field.name not in shard.arrow.names:
        return None
    known = shard.arrow.field(field.name)
    if _is_same(field.name, known.type, field.type):
        return known
    if widens_days(known.type, field.type):  # that would read the old rows
        return None
    return known.with_type(field.type) if widening_error(known.type, field.type) is None else None


def _is_same(column: str, known: pa.DataType, given: pa.DataType) -> bool:
    """Whether the type of a shard's column and that of a DataFrame are the same Spark type."""
    try:
        return bool(known == given or spark_type(column, known) == spark_type(column, given))
    except InvalidUsage:  # Spark has no such type
        return False


def _changes(given: pa.Schema, shard: ShardSchema) -> Iterator[Change]:
    """The changes that add what the shard lacks. Raises InvalidUsage for former column names, ignoring case."""
    former = {old.lower(): old for old, _ in shard.former}
    for field in given:
        if field.name not in shard.arrow.names:
            if field.name.lower() in former:  # an old job would split its column in two
                raise shard.no_column(former[field.name.lower()], "mergeSchema adds no column by a former name: ")
            yield AddColumn(field.name, field.type)
            continue
        kind = shard.arrow.field(field.name).type
        if field.name not in shard.key and kind != field.type and widening_error(kind, field.type) is None:
            yield WidenColumn(field.name, field.type)
