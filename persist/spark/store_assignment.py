"""Store assignment: columns of a DataFrame to columns of a shard, and literal values to column types."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
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

# Values that verbs set, and keys that they match by, as what the columns of a shard hold: value for value, or refused.
#
# Where the types decide, that is when Spark plans the job. Where values do, the expression refuses each that would be
# cut short, whatever ANSI mode says.


REFUSES = "persist refuses: "  # how an expression that Spark evaluates raises InvalidUsage
SET, KEYS = "what is set", "a key of the source"  # whose value does not fit, in an error
_WHOLE: Mapping[type[t.DataType], tuple[int, int]] = {  # bits, and digits that hold every value
    t.ByteType: (8, 3),
    t.ShortType: (16, 5),
    t.IntegerType: (32, 10),
    t.LongType: (64, 19),
}
_FLOATS: Mapping[type[t.DataType], tuple[int, int]] = {  # bits of whole numbers, and digits, that are kept
    t.FloatType: (24, 6),
    t.DoubleType: (53, 15),
}
_TEXTS = (t.StringType, t.CharType, t.VarcharType, t.BinaryType)
_TIMES = (t.TimestampType, t.TimestampNTZType)


def literal(field: pa.Field, value: object) -> Column:
    """A value of Python for a column. Raises InvalidUsage, naming the column, where it does not fit."""
    kind, to = field.type, spark_type(field.name, field.type)
    [scalar] = column_of(field.name, [value], kind)
    if isinstance(to, t.DateType):
        value = scalar.as_py()
    elif isinstance(to, t.TimestampNTZType) and isinstance(value, dt.datetime):
        value = value.isoformat(" ")  # as a time it would be one of the session's zone
    return F.lit(value).cast(to)


def fitted(values: Mapping[str, Column], rows: DataFrame, types: t.StructType, schema: pa.Schema) -> dict[str, Column]:
    """The values, expressions over `rows`, as the columns of these names hold them. Raises InvalidUsage."""
    kinds = rows.select(*(value.alias(name) for name, value in values.items())).schema
    return {
        name: fit(SET, value, kinds[name].dataType, types[name].dataType, schema.field(name))
        for name, value in values.items()
    }


def fit(what: str, value: Column, kind: t.DataType, to: t.DataType, field: pa.Field) -> Column:
    """The value of type `kind` as the column has it. Raises InvalidUsage where the types say that it cannot fit.

    `what` is set, as an error says. A value that does not fit is refused when the expression is evaluated.
    """
    fits = _fits(kind, to)
    told = f"column {field.name!r} is {to.simpleString()}, and {what} is "
    if fits is False:
        raise InvalidUsage(f"{told}{kind.simpleString()}: cast it first")
    unsigned = pa.types.is_unsigned_integer(field.type)
    if isinstance(kind, t.NullType) or (fits and not unsigned):
        return value.cast(to)
    most = Decimal(2**field.type.bit_width - 1) if unsigned else None

    def checked(one: Column) -> Column:
        exact = F.lit(True) if fits else _is_exact(one, kind, to)
        if most is not None:
            exact = exact & (one.isNull() | one.try_cast(t.DecimalType(38, 0)).between(0, most))
        wrong = F.concat(F.lit(f"{REFUSES}{told}"), one.cast("string"), F.lit(": round it or cast it first"))
        return F.when(F.coalesce(exact, F.lit(False)), one.try_cast(to)).otherwise(F.raise_error(wrong).cast(to))

    return F.transform(F.array(value), checked)[0]  # evaluated once: it may give another value each time


def identity(key: Column, kind: t.DataType) -> list[Column]:
    """What is equal for two keys if and only if a shard has them for one: `-0.0` is another one than `0.0`.

    Spark has these two for one wherever it joins or groups by a float.
    """
    if isinstance(kind, tuple(_FLOATS)):
        return [key.cast("string")]
    return [key, key.cast("string")] if _has_floats(kind) else [key]


def _has_floats(kind: t.DataType) -> bool:
    return isinstance(kind, tuple(_FLOATS)) or any(map(_has_floats, inner_types(kind)))


def _fits(kind: t.DataType, to: t.DataType) -> bool | None:
    """Whether every value of a type fits the other one; None: it depends on the value."""
    if kind == to or isinstance(kind, t.NullType):
        return True
    inner, outer = inner_types(kind), inner_types(to)
    if inner and outer:
        alike = type(kind) is type(to) and _names(kind) == _names(to)
        return alike and all(_fits(one, other) for one, other in zip(inner, outer, strict=True))
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
    """As `_fits`, of numbers; False where one of the types is none."""
    whole, other = _WHOLE.get(type(kind)), _WHOLE.get(type(to))
    floats, others = _FLOATS.get(type(kind)), _FLOATS.get(type(to))
    if whole and other:
        return whole[0] <= other[0] or None
    if whole and others:
        return whole[0] <= others[0] or None
    if whole and isinstance(to, t.DecimalType):
        return whole[1] <= to.precision - to.scale or None
    if floats and others:
        return floats[0] <= others[0] or None
    if floats and (other or isinstance(to, t.DecimalType)):
        return None
    if isinstance(kind, t.DecimalType):
        if isinstance(to, t.DecimalType):
            before, after = kind.precision - kind.scale, to.precision - to.scale
            return (kind.scale <= to.scale and before <= after) or None
        if others:
            return kind.precision <= others[1] or None
        return None if other else False
    return False


def _is_exact(one: Column, kind: t.DataType, to: t.DataType) -> Column:
    """Whether the value becomes itself again where it is cast there and back; null does."""
    found = one.try_cast(to)
    back: Any = found.try_cast(kind)
    floats, others = _FLOATS.get(type(kind)), _FLOATS.get(type(to))
    if type(kind) in _WHOLE and others:  # beyond these bounds casts may round, and to the largest value at that
        return one.isNull() | one.between(-(2 ** others[0]), 2 ** others[0])
    if isinstance(kind, t.DecimalType) and isinstance(to, t.FloatType):
        back = found.cast("string").try_cast(kind)  # by the digits that the float shows
    exact = back.eqNullSafe(one)
    if floats and type(to) in _WHOLE:
        exact = exact & (one.isNull() | (one < F.lit(float(2 ** (_WHOLE[type(to)][0] - 1)))))
    return exact


# How the columns of a DataFrame that is written belong to those of a shard, and what they add to them.


def named_as(schema: StructType, options: WriteOptions, shard: ShardSchema, name: str) -> dict[str, str]:
    """What the shard calls the columns of the DataFrame that are not called so: as Spark, whatever the case.

    Raises InvalidUsage where several columns of the shard may be meant.
    """
    taken, found = set(shard.arrow.names), {**options.renames}
    given = [column for column in schema.names if column != options.delete_column and column not in found]
    known: dict[str, list[str]] = {}
    for column in shard.arrow.names:
        known.setdefault(column.lower(), []).append(column)
    renamed: dict[str, str] = {str(column): to for column, to in found.items() if column is not None}
    for column in given:
        alike = [] if column in taken else known.get(column.lower(), [])
        if len(alike) > 1:
            raise InvalidUsage(
                f"the DataFrame has the column {column!r}, and shard {name!r} has {' and '.join(map(repr, alike))}: "
                "rename it to the one that is meant"
            )
        if alike:
            renamed[column] = alike[0]
    return renamed


def can_be_absent(shard: ShardSchema, column: str) -> bool:
    """Whether rows may come without this column of the shard."""
    return column not in shard.key and (column in shard.defaults or shard.arrow.field(column).nullable)


def merged(schema: StructType, options: WriteOptions, shard: ShardSchema, name: str) -> ShardSchema:
    """The columns of the shard with what those of the DataFrame have more. Nothing is changed yet.

    Raises InvalidUsage where they cannot be so, or rows of these types could not be written then.
    """
    given = _given(schema, options, shard, name)
    changes = list(_changes(given, shard))
    if not changes:
        return shard
    found = apply_changes(shard, changes)
    found.conform(given.empty_table(), 0)
    return found


def overwritten(schema: StructType, options: WriteOptions, shard: ShardSchema, name: str) -> ShardSchema:
    """The columns of the shard as they are once those of the DataFrame are in their place. Nothing is changed yet.

    A column stays where its name does and its type holds the same for Spark; it widens where that is possible.
    Otherwise it goes, and another one of its name comes. Raises InvalidUsage where the key would be another one, or
    something else asks for a column that goes.
    """
    given = _given(schema, options, shard, name)
    _check_key_stays(given, shard, name)
    fields, ids, following = [], [], shard.details.next_id or len(shard.arrow) + 1
    for field in given:
        kept = _kept(field, shard)
        fields.append(kept or field)
        ids.append(following if kept is None else shard.id_of[field.name])
        following += kept is None
    arrow = pa.schema(fields)
    if arrow.equals(shard.arrow) and tuple(ids) == shard.ids:
        return shard
    defaults = tuple(one for one in shard.details.defaults if one[0] in ids)
    found = ShardSchema(arrow, shard.key, replace(shard.details, ids=tuple(ids), next_id=following, defaults=defaults))
    plain = ShardSchema(arrow, shard.key)
    if shard.is_plain and evolution_error(shard, plain) is None:  # which needs no level
        found = plain
    check_evolution(shard, found)
    check_added(shard, found)
    check_kept(shard, found)
    return found


def evolve(target: Target, view: ShardView, planned: ShardSchema) -> None:
    """Give the shard the columns as planned for the view. Raises SchemaMismatch: others changed them since the view."""
    handles, one = target.connection.handles, executors.one_shard(target, view.shard_id)
    change = SchemaEvolution(one, target.shard, view.schema_id, handles.read, handles.write.retry_s)
    change.run(current_schema(view.schemas)[1], planned)


def _given(schema: StructType, options: WriteOptions, shard: ShardSchema, name: str) -> pa.Schema:
    """The columns of the DataFrame that are those of rows, as the shard calls and stores them."""
    names = named_as(schema, options, shard, name)
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


def _kept(field: pa.Field, shard: ShardSchema) -> pa.Field | None:
    """The column of the shard that a column of the DataFrame goes on as, wider perhaps; None: there is none."""
    if field.name not in shard.arrow.names:
        return None
    known = shard.arrow.field(field.name)
    if _is_same(field.name, known.type, field.type):
        return known
    if widens_days(known.type, field.type):  # that takes a look at the rows that are to go
        return None
    return known.with_type(field.type) if widening_error(known.type, field.type) is None else None


def _is_same(column: str, known: pa.DataType, given: pa.DataType) -> bool:
    """Whether the type of a shard's column is for Spark the one that a DataFrame brings."""
    try:
        return bool(known == given or spark_type(column, known) == spark_type(column, given))
    except InvalidUsage:  # Spark cannot hold what the shard has
        return False


def _changes(given: pa.Schema, shard: ShardSchema) -> Iterator[Change]:
    """What the shard lacks. Raises InvalidUsage for a name, in any case, of a column that was renamed or dropped."""
    former = {old.lower(): old for old, _ in shard.former}
    for field in given:
        if field.name not in shard.arrow.names:
            if field.name.lower() in former:  # a job from before would split its column
                raise shard.no_column(former[field.name.lower()], "mergeSchema adds no column by a former name: ")
            yield AddColumn(field.name, field.type)
            continue
        kind = shard.arrow.field(field.name).type
        if field.name not in shard.key and kind != field.type and widening_error(kind, field.type) is None:
            yield WidenColumn(field.name, field.type)
