"""Values that verbs set, and keys that they match by, as what the columns of a shard hold: value for value, or refused.

Where the types decide, that is when Spark plans the job. Where values do, the expression refuses each that would be cut
short, whatever ANSI mode says.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import pyarrow as pa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as t

from persist.core.errors import InvalidUsage
from persist.parts.given import column_of
from persist.spark.plainly import REFUSES
from persist.spark.schemas import spark_type

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
    return isinstance(kind, tuple(_FLOATS)) or any(map(_has_floats, _children(kind) or ()))


def _fits(kind: t.DataType, to: t.DataType) -> bool | None:
    """Whether every value of a type fits the other one; None: it depends on the value."""
    if kind == to or isinstance(kind, t.NullType):
        return True
    inner, outer = _children(kind), _children(to)
    if inner is not None and outer is not None:
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


def _children(kind: t.DataType) -> list[t.DataType] | None:
    if isinstance(kind, t.ArrayType):
        return [kind.elementType]
    if isinstance(kind, t.MapType):
        return [kind.keyType, kind.valueType]
    return [field.dataType for field in kind.fields] if isinstance(kind, t.StructType) else None


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
