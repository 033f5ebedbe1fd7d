"""Python values as Arrow columns without loss: values that Arrow alone would truncate are refused. And the way back."""

from __future__ import annotations

import datetime as dt
import re
from base64 import b64decode, b64encode
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from decimal import Context, Decimal, InvalidOperation
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from persist.core.errors import InvalidUsage, shown
from persist.parts.column_types import family
from persist.parts.exact_numbers import floats_of_numbers
from persist.parts.shard_schema import ShardSchema
from persist.parts.text_values import from_text as values_from_text
from persist.parts.text_values import is_textual
from persist.parts.value_order import is_bytes

KEYS_MAX = 100_000  # of one request: each is converted on its own

_USUAL = {  # the types whose values fit a column of this family exactly, or are refused by Arrow
    "integer": int,
    "timestamp": dt.datetime,
    "instant": dt.datetime,
    "date": dt.date,
    "time": dt.time,
    "duration": dt.timedelta,
}
_COUNTED = ("timestamp", "instant", "date", "time", "duration")
_WHOLE = re.compile(r"[+-]?[0-9]+\Z")
_JSON_NATIVE = ("boolean", "integer", "float")
_FLOAT_WORDS = ("NaN", "Infinity", "-Infinity")  # text in JSON
_FLOATS = {float, int, type(None)}
_INT64_MAX = 2**63 - 1
_EXACT = (pa.Scalar, np.datetime64, np.timedelta64)  # Arrow accepts these in the column's own type only


def column_of(name: str, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """A column of these values. Raises InvalidUsage, naming the column, if one does not fit or would change.

    In a column of timestamps without zone a date is its midnight: the column may have been widened from dates.
    """
    if family(kind) == "timestamp":
        values = [dt.datetime(v.year, v.month, v.day) if type(v) is dt.date else v for v in values]  # noqa: DTZ001
    try:
        column = pa.array(values, kind)
        _check(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidUsage(f"column {name!r} does not fit {kind}: {error}") from error
    return column


def parse_key(schema: ShardSchema, values: Sequence[Any], *, from_text: bool = False) -> tuple[Any, ...]:
    """The Arrow scalars of a key, or of its first columns, from Python values.

    Text is accepted for types that JSON writes as text, such as times and decimals, in the form of JSON; with
    `from_text`, as in a URL, also for numbers and booleans. Raises InvalidUsage, naming the column, if a value does not
    fit or would change: a truncated key would select another row.
    """
    return tuple(
        parse_key_value(schema, name, value, from_text) for name, value in zip(schema.key, values, strict=False)
    )


def parse_key_value(schema: ShardSchema, name: str, value: Any, from_text: bool = False) -> pa.Scalar:
    """One value of a key, as `parse_key`."""
    kind = schema.arrow.field(name).type
    what = family(kind)
    if isinstance(value, str) and not from_text and what in _JSON_NATIVE and value not in _FLOAT_WORDS:
        wanted = "true or false" if what == "boolean" else "a number"
        raise InvalidUsage(f"{shown(value)} is text, not {kind}, the type of key column {name!r}: give {wanted}")
    if pa.types.is_floating(kind) and isinstance(value, (str, int, float, Decimal)):
        return _parse_number(name, value, kind)
    if isinstance(value, str) and not is_text(kind):
        if what == "integer" and not _WHOLE.match(value):  # Arrow reads 0x10 as 16
            raise InvalidUsage(f"{shown(value)} is not a value of {kind}, the type of {name!r}")
        return _parse_text(name, value, kind)
    return column_of(name, [value], kind)[0]


def decode_json_keys(schema: ShardSchema, keys: Any) -> Any:
    """Keys from JSON, with base64 text decoded for columns of bytes, as values for `parse_key`.

    What is not a list of keys is returned unchanged. Raises InvalidUsage, without the value.
    """
    if not isinstance(keys, list):
        return keys
    if len(keys) > KEYS_MAX:
        raise InvalidUsage(f"there are {len(keys)} keys; give at most {KEYS_MAX} at once")
    in_bytes = [family(schema.arrow.field(name).type) == "binary" for name in schema.key]

    def decode(value: object, is_bytes: bool) -> object:
        if not is_bytes or not isinstance(value, str):
            return value
        try:
            data = b64decode(value, validate=True)
        except ValueError:
            data = b""
        if b64encode(data).decode() != value:
            raise InvalidUsage("a key has a value that its key column cannot hold: bytes are written in base64")
        return data

    def decode_key(key: object) -> object:
        if not isinstance(key, list):
            return decode(key, in_bytes == [True])
        decoded = [decode(value, is_bytes) for value, is_bytes in zip(key, in_bytes, strict=False)]
        return decoded + key[len(in_bytes) :]

    return [decode_key(key) for key in keys]


def _parse_text(name: str, value: str, kind: pa.DataType) -> pa.Scalar:
    try:
        texts = pa.array([value], pa.string())
        is_row_text = is_textual(kind) and family(kind) != "binary"  # text stands for its own bytes
        return (values_from_text(texts, kind) if is_row_text else texts.cast(kind))[0]
    except (pa.ArrowException, ValueError) as error:
        reason = "" if isinstance(error, pa.ArrowException) else f": {error}"
        raise InvalidUsage(f"{shown(value)} is not a value of {kind}, the type of {name!r}{reason}") from error


def _parse_number(name: str, value: str | int | float | Decimal, kind: pa.DataType) -> pa.Scalar:
    """A floating point number that equals `value` when it is rounded to as many digits: 0.1, but not 2**53 + 1."""
    try:
        text = str(value)  # refused by Python for integers of thousands of digits
        number = _parse_text(name, text, kind)
        wanted, kept = Decimal(text), Decimal(float(number.as_py()))
    except (InvalidOperation, ValueError) as error:
        raise InvalidUsage(f"{shown(value)} is not a value of {kind}, the type of {name!r}") from error
    if wanted.is_finite():
        digits = "".join(map(str, wanted.as_tuple().digits)).strip("0")
        rounded = Context(prec=max(1, len(digits))).create_decimal(kept) if kept.is_finite() else kept
        if rounded != wanted:
            raise InvalidUsage(f"column {name!r} does not fit {kind}: {shown(value)} would become {kept}")
    return number


def is_text(kind: Any) -> bool:
    """Whether values of that type are text or bytes of any length."""
    return is_bytes(kind) or kind in (pa.string_view(), pa.binary_view())


def _check(values: Sequence[Any], kind: Any) -> None:
    """Raise ValueError or an error of Arrow if `pa.array(values, kind)` would lose information."""
    types = pa.types
    if types.is_struct(kind):
        _check_structs(values, kind)
    elif types.is_map(kind):
        pairs = pa.list_(pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)]))
        _check([tuple(value.items()) if isinstance(value, dict) else value for value in values], pairs)
    elif types.is_nested(kind):
        if odd := next((value for value in values if isinstance(value, (str, bytes))), None):
            raise ValueError(f"{shown(odd)} is no list")  # Arrow would make one of its characters
        _check(list(chain.from_iterable(value for value in values if value is not None)), kind.value_type)
    elif types.is_floating(kind):
        if not set(map(type, values)) <= _FLOATS:
            if (large := next((v for v in values if isinstance(v, np.uint64) and v > _INT64_MAX), None)) is not None:
                raise ValueError(f"{large} would be rounded")  # Arrow would read it as a negative number
            values = [None if isinstance(value, pa.Scalar) else value for value in values]
        if kind.bit_width < 64:
            floats_of_numbers(values, kind)
    elif (what := family(kind)) in _USUAL:
        if not set(map(type, values)) <= {_USUAL[what], type(None)}:
            for value in values:
                _check_unusual(value, kind, what)
            values = [None if isinstance(value, _EXACT) else value for value in values]
        if what in ("timestamp", "instant", "time"):
            _check_zones(values, kind)
        if what != "integer" and getattr(kind, "unit", None) in ("s", "ms"):
            fine = pa.time64("us") if what == "time" else pa.duration("us")
            pa.array(values, fine if what in ("time", "duration") else pa.timestamp("us", kind.tz)).cast(kind)


def _check_structs(values: Sequence[Any], kind: pa.StructType) -> None:
    names = kind.names
    rows = [
        dict(zip(names, row, strict=True)) if isinstance(row, tuple) else dict(row) for row in values if row is not None
    ]
    for name in sorted({name for row in rows for name in row} - set(names), key=shown):
        raise ValueError(f"the struct has no field {shown(name)}; its fields are {names}")
    for name, field in zip(names, kind, strict=True):
        _check([row.get(name) for row in rows], field.type)


def _check_zones(values: Sequence[Any], kind: pa.DataType) -> None:
    """Refuse naive datetimes for a column of instants, which Arrow reads as UTC, and aware ones for other columns."""
    zone = getattr(kind, "tz", None)
    for value in values:
        if isinstance(value, (dt.datetime, dt.time)) and (value.tzinfo is None) != (zone is None):
            has, remedy = ("no zone", "give one") if zone else ("a zone", "leave it out")
            raise ValueError(f"{shown(value)} has {has}: {remedy}")


def _check_unusual(value: Any, kind: pa.DataType, what: str) -> None:
    if isinstance(value, np.datetime64) and what not in ("timestamp", "instant"):
        raise ValueError(f"{value!r} is a point in time")  # of which Arrow would take the count
    if value is None or isinstance(value, _EXACT):
        return
    if hasattr(value, "__int__"):
        if what in _COUNTED:  # its meaning would depend on the unit of the column
            raise ValueError(f"{shown(value)} is a number; give a datetime, date, time or timedelta")
        kept = value == int(value)
    elif pa.types.is_date(kind):
        kept = not isinstance(value, dt.datetime) or (value.time() == dt.time() and not getattr(value, "nanosecond", 0))
    else:  # pandas' times have nanoseconds
        kept = kind.unit == "ns" or not getattr(value, "nanosecond", getattr(value, "nanoseconds", 0))
    if not kept:
        raise ValueError(f"{shown(value)} would be truncated")


def find_differing_row(rows: Sequence[tuple[AbstractSet[str], bool]]) -> tuple[int, str] | None:
    """The number of the first row whose columns differ from those of the first one, and such a column.

    Each row is given as its columns, and whether it is a deletion: a deletion may lack columns.
    """
    first = next((names for names, is_deletion in rows if not is_deletion), rows[0][0] if rows else frozenset())
    for number, (names, is_deletion) in enumerate(rows):
        if others := (names - first if is_deletion else names ^ first):
            return number, min(others, key=shown)
    return None


def shown_values(column: pa.ChunkedArray) -> list[Any]:
    """The values for people. Those that Python cannot hold, such as nanoseconds and far years, come as text."""
    try:
        if not (pa.types.is_time64(column.type) and column.type.unit == "ns"):  # Python would drop nanoseconds silently
            return list(column.to_pylist())
    except (OverflowError, ValueError):
        pass
    try:
        return list(column.cast(pa.string()).to_pylist())
    except pa.ArrowException:
        return [f"a value of {column.type}"] * len(column)
