"""Python's values as Arrow columns, value for value: where Arrow alone would cut one short, it is refused."""

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
import pyarrow.compute as pc

from persist.core.errors import InvalidUsage
from persist.parts.column_types import family, parse_decimals
from persist.parts.shard_schema import ShardSchema

KEYS_MAX = 100_000  # of one request: each is looked at by itself

_USUAL = {  # the types whose values fit a column of this family as they are, or are refused by Arrow
    "integer": int,
    "timestamp": dt.datetime,
    "instant": dt.datetime,
    "date": dt.date,
    "time": dt.time,
    "duration": dt.timedelta,
}
_COUNTED = ("timestamp", "instant", "date", "time", "duration")
_WHOLE = re.compile(r"[+-]?[0-9]+\Z")
_OWN_FORMS = ("boolean", "integer", "float")  # of which JSON has values that are no text
_FLOAT_WORDS = ("NaN", "Infinity", "-Infinity")  # which JSON has as text only
_EXACT = (pa.Scalar, np.datetime64, np.timedelta64)  # Arrow takes these in the column's own type only


def column_of(name: str, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """A column of these values. Raises InvalidUsage, naming the column, where one does not fit or would change.

    A day is its midnight, where moments have no zone: who knows the column from before it was widened gives days.
    """
    if family(kind) == "timestamp":
        values = [dt.datetime(one.year, one.month, one.day) if type(one) is dt.date else one for one in values]  # noqa: DTZ001
    try:
        column = pa.array(values, kind)
        _check(values, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidUsage(f"column {name!r} does not fit {kind}: {error}") from error
    return column


def parse_key(schema: ShardSchema, values: Sequence[Any], *, from_text: bool = False) -> tuple[Any, ...]:
    """The Arrow scalars of a key, or of its first columns, that a caller gives as Python values.

    Text stands for a value of a type that JSON writes as text, such as a date or a decimal; with `from_text`, as in a
    URL, also for a number or a boolean. Raises InvalidUsage, naming the column, where a value does not fit or would
    change: a key that is cut off to its type would mean another row.
    """
    return tuple(
        parse_key_value(schema, name, value, from_text) for name, value in zip(schema.key, values, strict=False)
    )


def parse_key_value(schema: ShardSchema, name: str, value: Any, from_text: bool = False) -> pa.Scalar:
    """One value of a key, as `parse_key`."""
    kind = schema.arrow.field(name).type
    what = family(kind)
    if isinstance(value, str) and not from_text and what in _OWN_FORMS and value not in _FLOAT_WORDS:
        wanted = "true or false" if what == "boolean" else "a number"
        raise InvalidUsage(f"{value!r} is text and is no {kind}, the type of key column {name!r}: give {wanted}")
    if pa.types.is_floating(kind) and isinstance(value, (str, int, float, Decimal)):
        return _of_number(name, value, kind)
    if isinstance(value, str) and not is_text(kind):
        if what == "integer" and not _WHOLE.match(value):  # Arrow takes 0x10 for 16
            raise InvalidUsage(f"{value!r} is no {kind}, the type of {name!r}")
        return _of_text(name, value, kind)
    return column_of(name, [value], kind)[0]


def decode_json_keys(schema: ShardSchema, keys: Any) -> Any:
    """Keys as JSON has them, where text stands for bytes in base64, as values for `parse_key`.

    What has another form than a list of keys is left for who reads it next. Raises InvalidUsage, without the value.
    """
    if not isinstance(keys, list):
        return keys
    if len(keys) > KEYS_MAX:
        raise InvalidUsage(f"there are {len(keys)} keys; give at most {KEYS_MAX} at once")
    in_bytes = [family(schema.arrow.field(name).type) == "binary" for name in schema.key]

    def value(given: object, is_bytes: bool) -> object:
        if not is_bytes or not isinstance(given, str):
            return given
        try:
            found = b64decode(given, validate=True)
        except ValueError:
            found = b""
        if b64encode(found).decode() != given:
            raise InvalidUsage("a key has a value that its key column cannot hold: bytes are written in base64")
        return found

    def one(key: object) -> object:
        if isinstance(key, list):
            return [value(given, is_bytes) for given, is_bytes in zip(key, in_bytes, strict=False)] + key[
                len(in_bytes) :
            ]
        return value(key, in_bytes == [True])

    return [one(key) for key in keys]


def _of_text(name: str, value: str, kind: pa.DataType) -> pa.Scalar:
    try:
        text = pa.scalar(value)
        if pa.types.is_decimal(kind):
            return parse_decimals(text, kind)
        return text.cast(kind)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidUsage(f"{value!r} is no {kind}, the type of {name!r}") from error


def _of_number(name: str, value: str | int | float | Decimal, kind: pa.DataType) -> pa.Scalar:
    """A floating point number that is `value` when it is written with as many digits: 0.1, but not 2**53 + 1."""
    found = _of_text(name, str(value), kind)
    try:
        wanted, kept = Decimal(str(value)), Decimal(float(found.as_py()))
    except InvalidOperation as error:
        raise InvalidUsage(f"{value!r} is no {kind}, the type of {name!r}") from error
    if wanted.is_finite():
        digits = "".join(map(str, wanted.as_tuple().digits)).strip("0")
        shown = Context(prec=max(1, len(digits))).create_decimal(kept) if kept.is_finite() else kept
        if shown != wanted:
            raise InvalidUsage(f"column {name!r} does not fit {kind}: {value!r} would become {kept}")
    return found


def is_text(kind: Any) -> bool:
    """Whether values of that type are text or bytes of any length."""
    types = pa.types
    return any(
        (types.is_string(kind), types.is_large_string(kind), types.is_binary(kind), types.is_large_binary(kind))
    ) or kind in (pa.string_view(), pa.binary_view())


def _check(values: Sequence[Any], kind: Any) -> None:
    """Raises ValueError or an error of Arrow where `pa.array(values, kind)` would lose something."""
    types = pa.types
    if types.is_struct(kind):
        _check_structs(values, kind)
    elif types.is_map(kind):
        pairs = pa.list_(pa.struct([pa.field("key", kind.key_type), pa.field("value", kind.item_type)]))
        _check([tuple(value.items()) if isinstance(value, dict) else value for value in values], pairs)
    elif types.is_nested(kind):
        _check(list(chain.from_iterable(value for value in values if value is not None)), kind.value_type)
    elif types.is_floating(kind):
        _check_floats(values, kind)
    elif (what := family(kind)) in _USUAL:
        if not set(map(type, values)) <= {_USUAL[what], type(None)}:
            for value in values:
                _check_unusual(value, kind, what)
            values = [None if isinstance(value, _EXACT) else value for value in values]
        if types.is_timestamp(kind):
            _check_zones(values, kind)
        if what != "integer" and getattr(kind, "unit", None) in ("s", "ms"):
            fine = pa.time64("us") if what == "time" else pa.duration("us")
            pa.array(values, fine if what in ("time", "duration") else pa.timestamp("us", kind.tz)).cast(kind)


def _check_structs(values: Sequence[Any], kind: pa.StructType) -> None:
    names = kind.names
    rows = [
        dict(zip(names, row, strict=True)) if isinstance(row, tuple) else dict(row) for row in values if row is not None
    ]
    for name in sorted({name for row in rows for name in row} - set(names), key=str):
        raise ValueError(f"it has no field {name!r}; its fields are {names}")
    for name, field in zip(names, kind, strict=True):
        _check([row.get(name) for row in rows], field.type)


def _check_floats(values: Sequence[Any], kind: pa.DataType) -> None:
    """Refuse what becomes infinite or zero, and whole numbers that halves would round."""
    if kind.bit_width == 64:
        return
    wide = pa.array(values, pa.float64())
    narrow = wide.cast(kind)
    if pc.any(pc.and_(pc.is_inf(narrow), pc.is_finite(wide))).as_py():
        raise ValueError("a number is too large")
    if pc.any(pc.and_(pc.equal(narrow.cast(pa.float64()), 0), pc.not_equal(wide, 0))).as_py():
        raise ValueError("a number would become 0: give 0")
    if int in set(map(type, values)):
        for value, found in zip(values, narrow.to_pylist(), strict=True):
            if type(value) is int and value != found:
                raise ValueError(f"{value} would become {found}")


def _check_zones(values: Sequence[Any], kind: pa.DataType) -> None:
    """Refuse wall clocks of no zone for a column of instants, which Arrow takes for UTC, and the other way round."""
    for value in values:
        if isinstance(value, dt.datetime) and (value.tzinfo is None) != (kind.tz is None):
            has, remedy = ("no zone", "give one") if kind.tz else ("a zone", "leave it out")
            raise ValueError(f"{value!r} has {has}: {remedy}")


def _check_unusual(value: Any, kind: pa.DataType, what: str) -> None:
    if value is None or isinstance(value, _EXACT):
        return
    if hasattr(value, "__int__"):
        if what in _COUNTED:  # the same number means another one in other units
            raise ValueError(f"{value!r} is a number; give a datetime, date, time or timedelta")
        kept = value == int(value)
    elif pa.types.is_date(kind):
        kept = not isinstance(value, dt.datetime) or value.time() == dt.time()
    else:  # pandas' times have nanoseconds
        kept = kind.unit == "ns" or not getattr(value, "nanosecond", getattr(value, "nanoseconds", 0))
    if not kept:
        raise ValueError(f"{value!r} would be cut short")


def find_differing_row(rows: Sequence[tuple[AbstractSet[str], bool]]) -> tuple[int, str] | None:
    """The first row, by its number, that has other columns than the first one, and such a column.

    Each comes with its columns, and whether it only takes its key away: then it may lack some.
    """
    first = next((names for names, is_gone in rows if not is_gone), rows[0][0] if rows else frozenset())
    for number, (names, is_gone) in enumerate(rows):
        if others := (names - first if is_gone else names ^ first):
            return number, min(others, key=str)
    return None
