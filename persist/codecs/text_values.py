"""Values that JSON and CSV have no kind of their own for, as text and back: times, durations, decimals, bytes.

The text is exact: `from_text(to_text(column), column.type)` is the column. `docs/http.md` lists the forms.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc

from persist.parts.column_types import family, parse_decimals

_TEXTUAL = frozenset({"binary", "decimal", "date", "time", "timestamp", "instant", "duration"})
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_ISO = r"^(\d{4}-|\d\d:)"  # what the standard can tell: years from 0 to 9999
_ISO_MIN = -9_223_372_036_000_000_000  # Arrow cannot read nanoseconds before the first whole second
_COUNTED = r"^@-?\d+$"  # other values count their units, since 1970 if they are points in time
_INFINITY = r"(?i)^[+-]?inf(inity)?$"
_ZONE_ERROR = re.compile(
    r"Failed to parse string: '(?P<text>.*)' as .*expected (?P<no>no )?(?:a )?zone offset", re.DOTALL
)
_NOT_ZERO = r"^[+-]?[0.]*[1-9]"
_WHOLE = re.compile(r"[+-]?[0-9]+")
_EXACT_MAX = {16: 2**11, 32: 2**24, 64: 2**53}  # up to which each whole number is a float of so many bits
_DURATION = r"^(?P<minus>-?)PT(?P<whole>\d+)(?:\.(?P<part>\d+))?S$"


def is_textual(kind: pa.DataType) -> bool:
    """Whether values of this type travel as text."""
    return family(kind) in _TEXTUAL


def to_text(column: pa.Array) -> pa.Array:
    """A column of a textual type as strings."""
    found = family(column.type)
    if found == "binary":
        return pa.array([None if v is None else b64encode(v).decode() for v in column.to_pylist()], pa.string())
    if found == "decimal":
        return column.cast(pa.string())
    if found == "duration":
        return _duration_to_text(column)
    plain = column.view(pa.timestamp(column.type.unit)) if found == "instant" else column
    iso = pc.replace_substring(plain.cast(pa.string()), " ", "T")
    end = "Z" if found == "instant" else ""
    counts = _counts(column)
    is_iso = pc.and_(pc.match_substring_regex(iso, _ISO), pc.greater_equal(counts, _ISO_MIN))
    counted = pc.binary_join_element_wise("@", counts.cast(pa.string()), "")
    return pc.if_else(is_iso, pc.binary_join_element_wise(iso, end, ""), counted)


def from_text(text: pa.Array, kind: pa.DataType) -> pa.Array:
    """Strings as values of `kind`. Raises ValueError where one of them is none, or would lose something."""
    found = family(kind)
    if found == "binary":
        values = [None if v is None else b64decode(v, validate=True) for v in text.to_pylist()]
        return pa.array(values, kind)
    if found == "decimal":
        return parse_decimals(text, kind)
    is_counted = pc.match_substring_regex(text, _COUNTED)
    iso = _from_iso(pc.if_else(is_counted, None, text), kind)
    if not pc.any(is_counted).as_py():
        return iso
    counts = pc.if_else(is_counted, pc.utf8_slice_codeunits(text, 1), None)
    return pc.coalesce(iso, counts.cast(_counts(iso).type).view(kind))


def floats_of_text(text: pa.Array, kind: pa.DataType) -> pa.Array:
    """Strings as numbers of a type of floats.

    Raises ValueError where one is none, is too large, becomes zero, or is a whole number that would be rounded.
    """
    numbers = text.cast(pa.float64())
    zeros = text.filter(pc.equal(numbers, 0))
    if len(lost := zeros.filter(pc.match_substring_regex(zeros, _NOT_ZERO))):
        raise ValueError(underflow_text(lost[0].as_py(), kind))
    is_word = pc.match_substring_regex(text, _INFINITY)
    found = _narrowed(numbers, kind, pc.and_(pc.is_inf(numbers), is_word))
    is_large = pc.fill_null(pc.greater_equal(pc.abs(found.cast(pa.float64())), _EXACT_MAX[kind.bit_width]), False)
    if pc.any(is_large).as_py():
        for cell, value in zip(text.filter(is_large).to_pylist(), found.filter(is_large).to_pylist(), strict=True):
            if _WHOLE.fullmatch(cell):
                _check_whole(int(cell), value, kind)
    return found


def floats_of_numbers(values: Sequence[int | float | str | None], kind: pa.DataType) -> pa.Array:
    """Python's numbers, and the words of JSON, as `floats_of_text`."""
    numbers = pa.array([float(v) if type(v) in (str, int) else v for v in values], pa.float64())  # type: ignore[arg-type]
    found = _narrowed(numbers, kind, pc.is_inf(numbers))
    if int in set(map(type, values)):
        for value, kept in zip(values, found.to_pylist(), strict=True):
            if type(value) is int:
                _check_whole(value, kept, kind)
    return found


def underflows(number: str) -> bool:
    """Whether a number that is written so, and is not zero, is zero as a double."""
    return re.match(_NOT_ZERO, number) is not None and float(number) == 0


def underflow_text(number: object, kind: pa.DataType) -> str:
    """The sentence that refuses a number which would become zero."""
    return f"{str(number)[:40]} would become 0 as {kind}: write 0, or keep it in a column of text"


def _check_whole(number: int, kept: float, kind: pa.DataType) -> None:
    if number != kept:
        raise ValueError(f"{str(number)[:100]} would be rounded to {kept!r} as {kind}")


def _narrowed(numbers: pa.Array, kind: pa.DataType, is_infinite: pa.Array) -> pa.Array:
    """Doubles as a type of floats. Raises ValueError where another one than these is infinite, or one becomes zero."""
    found = numbers.cast(kind)
    if pc.any(pc.and_not(pc.is_inf(found), is_infinite)).as_py():
        raise ValueError(f"a number is too large for {kind}")
    if pc.any(are_lost := pc.and_(pc.equal(found.cast(pa.float64()), 0), pc.not_equal(numbers, 0))).as_py():
        raise ValueError(underflow_text(numbers.filter(are_lost)[0].as_py(), kind))
    return found


def _from_iso(text: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_duration(kind):
        return _duration_from_text(text, kind)
    if pa.types.is_time(kind):  # Arrow reads no times of day, but points in time
        moments = pc.binary_join_element_wise("1970-01-01T", text, "").cast(pa.timestamp(kind.unit))
        return moments.cast(kind)
    try:
        return text.cast(kind)
    except pa.ArrowInvalid as error:
        raise _without_hint(error, kind) from error


def _without_hint(error: Exception, kind: pa.DataType) -> Exception:
    """What Arrow says of a text, but for what it tells its own users to do about zones."""
    found = _ZONE_ERROR.match(str(error))
    if found is None:
        return error
    text = found["text"][:100]
    if found["no"] is None and not re.match(_ISO, text):
        return ValueError(f"{text!r} is no {kind}: write it as 2024-01-31T12:00:00Z")
    if found["no"] is None:
        return ValueError(f"{text!r} has no zone, and {kind} needs one: write an offset, as in 2024-01-31T12:00:00Z")
    return ValueError(f"{text!r} has a zone, and {kind} has none: leave it out")


def _counts(column: pa.Array) -> pa.Array:
    """The whole numbers of which times and durations are made."""
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
    found = pc.extract_regex(text, _DURATION)
    part = pc.struct_field(found, "part")
    if found.null_count > text.null_count or pc.any(pc.greater(pc.utf8_length(part), digits)).as_py():
        raise ValueError(f"a duration is PT and seconds with at most {digits} decimals and S, as in -PT1.5S")
    minus = pc.struct_field(found, "minus")
    whole = pc.binary_join_element_wise(minus, pc.struct_field(found, "whole"), "").cast(pa.int64())
    rest = pc.binary_join_element_wise(minus, "0", pc.utf8_rpad(part, digits, "0"), "").cast(pa.int64())
    return pc.add_checked(pc.multiply_checked(whole, 10**digits), rest).view(kind)
