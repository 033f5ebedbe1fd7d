"""Values for which JSON and CSV have no native form, as text and back: times, durations, decimals, bytes.

The text is exact: `from_text(to_text(column), column.type)` is the column. `docs/http.md` lists the forms.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode

import pyarrow as pa
import pyarrow.compute as pc

from persist.parts.column_types import family
from persist.parts.exact_numbers import parse_decimals

_TEXTUAL = frozenset({"binary", "decimal", "date", "time", "timestamp", "instant", "duration"})
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_ISO = r"^(\d{4}-|\d\d:)"  # ISO 8601 has years from 0 to 9999
_ISO_MIN = -9_223_372_036_000_000_000  # Arrow cannot read nanoseconds before the first whole second
_COUNTED = r"^@-?\d+$"  # other values are counts of their unit, since 1970 if they are points in time
_ZONE_ERROR = re.compile(
    r"Failed to parse string: '(?P<text>.*)' as .*expected (?P<no>no )?(?:a )?zone offset", re.DOTALL
)
_DURATION = r"^(?P<minus>-?)PT(?P<whole>\d+)(?:\.(?P<part>\d+))?S$"


def is_textual(kind: pa.DataType) -> bool:
    """Whether values of this type travel as text."""
    return family(kind) in _TEXTUAL


def to_text(column: pa.Array) -> pa.Array:
    """A column of a textual type as strings."""
    what = family(column.type)
    if what == "binary":
        return pa.array([None if v is None else b64encode(v).decode() for v in column.to_pylist()], pa.string())
    if what == "decimal":
        return column.cast(pa.string())
    if what == "duration":
        return _duration_to_text(column)
    plain = column.view(pa.timestamp(column.type.unit)) if what == "instant" else column
    iso = pc.replace_substring(plain.cast(pa.string()), " ", "T")
    end = "Z" if what == "instant" else ""
    counts = _counts(column)
    is_iso = pc.and_(pc.match_substring_regex(iso, _ISO), pc.greater_equal(counts, _ISO_MIN))
    counted = pc.binary_join_element_wise("@", counts.cast(pa.string()), "")
    return pc.if_else(is_iso, pc.binary_join_element_wise(iso, end, ""), counted)


def from_text(text: pa.Array, kind: pa.DataType) -> pa.Array:
    """Strings as values of `kind`. Raises ValueError if one is invalid or not exact."""
    what = family(kind)
    if what == "binary":
        values = [None if v is None else b64decode(v, validate=True) for v in text.to_pylist()]
        return pa.array(values, kind)
    if what == "decimal":
        return parse_decimals(text, kind)
    is_counted = pc.match_substring_regex(text, _COUNTED)
    iso = _from_iso(pc.if_else(is_counted, None, text), kind)
    if not pc.any(is_counted).as_py():
        return iso
    counts = pc.if_else(is_counted, pc.utf8_slice_codeunits(text, 1), None)
    values = pc.coalesce(iso, counts.cast(_counts(iso).type).view(kind))
    values.validate(full=True)  # not every count is a value: a time of day is within the day
    return values


def _from_iso(text: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_duration(kind):
        return _duration_from_text(text, kind)
    if pa.types.is_time(kind):  # Arrow parses points in time but not times of day
        moments = pc.binary_join_element_wise("1970-01-01T", text, "").cast(pa.timestamp(kind.unit))
        return moments.cast(kind)
    try:
        return text.cast(kind)
    except pa.ArrowInvalid as error:
        raise _zone_error(error, kind) from error


def _zone_error(error: Exception, kind: pa.DataType) -> Exception:
    """Arrow's error, with a remedy for users of a shard if it is about a time zone."""
    match = _ZONE_ERROR.match(str(error))
    if match is None:
        return error
    text = match["text"][:100]
    if match["no"] is None and (not re.match(_ISO, text) or re.search(r"(Z|[+-]\d\d:?\d\d)$", text)):
        return ValueError(f"{text!r} is not a value of {kind}: write it as 2024-01-31T12:00:00Z")
    if match["no"] is None:
        return ValueError(f"{text!r} has no zone, and {kind} needs one: write an offset, as in 2024-01-31T12:00:00Z")
    return ValueError(f"{text!r} has a zone, and {kind} has none: leave it out")


def _counts(column: pa.Array) -> pa.Array:
    """The integers that represent times and durations."""
    return column.view(pa.int32() if column.type.bit_width == 32 else pa.int64())


def _duration_to_text(column: pa.Array) -> pa.Array:
    """`-PT1.500S`: seconds, with as many decimals as the unit has."""
    digits = _DIGITS[column.type.unit]
    count, second = _counts(column), 10**digits
    whole = pc.divide(count, second)
    part = pc.subtract(count, pc.multiply(whole, second))
    start = pc.if_else(pc.less(count, 0), "-PT", "PT")
    seconds, decimals = (pc.utf8_ltrim(number.cast(pa.string()), "-") for number in (whole, part))
    if not digits:
        return pc.binary_join_element_wise(start, seconds, "S", "")
    return pc.binary_join_element_wise(start, seconds, ".", pc.utf8_lpad(decimals, digits, "0"), "S", "")


def _duration_from_text(text: pa.Array, kind: pa.DataType) -> pa.Array:
    digits = _DIGITS[kind.unit]
    matches = pc.extract_regex(text, _DURATION)
    part = pc.struct_field(matches, "part")
    if matches.null_count > text.null_count or pc.any(pc.greater(pc.utf8_length(part), digits)).as_py():
        raise ValueError(f"a duration is PT and seconds with at most {digits} decimals and S, as in -PT1.5S")
    minus = pc.struct_field(matches, "minus")
    whole = pc.binary_join_element_wise(minus, pc.struct_field(matches, "whole"), "").cast(pa.int64())
    rest = pc.binary_join_element_wise(minus, "0", pc.utf8_rpad(part, digits, "0"), "").cast(pa.int64())
    return pc.add_checked(pc.multiply_checked(whole, 10**digits), rest).view(kind)
