"""Numbers from text and from Python without loss: decimals and floats that would change are refused.

Arrow's own conversion of text to decimals is not exact: it takes the leading digits of a number that has more digits
than the type, and an exponent far beyond its table of powers aborts the process.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

EXPONENT_MAX = 1_000
DECIMAL_CHARS_MAX = 1_000
_PLAIN = r"^[+-]?0*(?P<whole>[0-9]*)(?:\.(?P<part>[0-9]*))?$"  # without an exponent
_INFINITY = r"(?i)^[+-]?inf(inity)?$"
_NOT_ZERO = r"^[+-]?[0.]*[1-9]"
_WHOLE = re.compile(r"[+-]?[0-9]+")
_EXACT_MAX = {16: 2**11, 32: 2**24, 64: 2**53}  # every integer up to it is a float of so many bits


def parse_decimals(texts: pa.Array, kind: Any) -> pa.Array:
    """Texts as decimals of `kind`. Raises ValueError if one is not a number or does not fit."""
    digits = pc.extract_regex(texts, _PLAIN)
    whole, part = (pc.binary_length(digits.field(index)) for index in range(2))
    has_digit = pc.match_substring_regex(texts, "[0-9]")
    fits = pc.and_(pc.less_equal(whole, kind.precision - kind.scale), pc.less_equal(part, max(0, kind.scale)))
    is_read = pc.and_(pc.and_(fits, has_digit), pc.is_valid(digits))
    if kind.scale >= 0 and texts.null_count == len(texts) - (pc.sum(is_read).as_py() or 0):
        return texts.cast(kind)
    return pa.array([None if text is None else _decimal(text, kind) for text in texts.to_pylist()], kind)


def _decimal(text: str, kind: Any) -> Decimal:
    """The number that one text writes, with as many digits as its type has."""
    if len(text) > DECIMAL_CHARS_MAX:
        raise ValueError(f"a decimal has more than {DECIMAL_CHARS_MAX} characters")
    try:
        number = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"{text!r} is not a number") from error
    if not number.is_finite() or "_" in text or not text.isascii() or text != text.strip():
        raise ValueError(f"{text!r} is not a value of {kind}")
    sign, digits, exponent = number.as_tuple()
    significant = "".join(map(str, digits)).lstrip("0")
    kept = significant.rstrip("0")
    least = int(exponent) + len(significant) - len(kept)  # the exponent of the last digit that is not zero
    if not kept:
        return Decimal(0)
    if least < -kind.scale or len(kept) + least > kind.precision - kind.scale:
        raise ValueError(f"{text[:100]!r} does not fit {kind}")
    return Decimal((sign, tuple(map(int, kept)), least))


def parse_exact(text: str) -> Decimal:
    """A JSON number as it is written. Raises ValueError if no column type has its exponent."""
    number = Decimal(text)
    if number.is_finite() and abs(number.adjusted()) >= EXPONENT_MAX:
        raise ValueError("a number has an exponent of a thousand or more")
    return number


def _parse_integer(text: str) -> int | Decimal:
    return Decimal(text) if text == "-0" else int(text)


# Arguments of `json.loads` for values of keys: all digits and the sign of `-0` are kept.
EXACT_NUMBERS: Mapping[str, Any] = {"parse_float": parse_exact, "parse_int": _parse_integer}


def is_whole(text: str) -> bool:
    """Whether a number is written as an integer. A floating point column takes only those that it holds exactly."""
    return _WHOLE.fullmatch(text) is not None


def floats_of_text(text: pa.Array, kind: pa.DataType) -> pa.Array:
    """Strings as numbers of a floating point type.

    Raises ValueError if one is not a number, is too large, becomes zero, or is an integer that would be rounded, unless
    it is the shortest text of the float, as Arrow writes 810751296 as 810751300.
    """
    numbers = text.cast(pa.float64())
    zeros = text.filter(pc.equal(numbers, 0))
    if len(lost := zeros.filter(pc.match_substring_regex(zeros, _NOT_ZERO))):
        raise ValueError(underflow_text(lost[0].as_py(), kind))
    is_word = pc.match_substring_regex(text, _INFINITY)
    floats = _narrow(numbers, kind, pc.and_(pc.is_inf(numbers), is_word))
    is_large = pc.fill_null(pc.greater_equal(pc.abs(floats.cast(pa.float64())), _EXACT_MAX[kind.bit_width]), False)
    is_large = pc.and_not(is_large, pc.fill_null(pc.equal(floats.cast(text.type), text), False))
    if pc.any(is_large).as_py():
        for cell, value in zip(text.filter(is_large).to_pylist(), floats.filter(is_large).to_pylist(), strict=True):
            if is_whole(cell):
                _check_integer(int(cell), value, kind)
    return floats


def floats_of_numbers(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Python's numbers, and JSON's words for NaN and the infinities. Raises as `floats_of_text`."""
    numbers = pa.array([float(v) if type(v) in (str, int) else v for v in values], pa.float64())
    floats = _narrow(numbers, kind, pc.is_inf(numbers))
    if int in set(map(type, values)):
        for value, kept in zip(values, floats.to_pylist(), strict=True):
            if type(value) is int:
                _check_integer(value, kept, kind)
    return floats


def underflows(number: str) -> bool:
    """Whether a number that is not zero as it is written is zero as a double."""
    return re.match(_NOT_ZERO, number) is not None and float(number) == 0


def underflow_text(number: object, kind: pa.DataType) -> str:
    """The error message for a number that would become zero."""
    return f"{str(number)[:40]} would become 0 as {kind}: write 0, or use a column of text"


def _check_integer(number: int, kept: float, kind: pa.DataType) -> None:
    if number != kept:
        raise ValueError(f"{str(number)[:100]} would be rounded to {kept!r} as {kind}")


def _narrow(numbers: pa.Array, kind: pa.DataType, is_infinite: pa.Array) -> pa.Array:
    """Doubles as another floating point type. Raises ValueError if a number becomes infinite or zero."""
    floats = numbers.cast(kind)
    if pc.any(pc.and_not(pc.is_inf(floats), is_infinite)).as_py():
        raise ValueError(f"a number is too large for {kind}")
    if pc.any(are_lost := pc.and_(pc.equal(floats.cast(pa.float64()), 0), pc.not_equal(numbers, 0))).as_py():
        raise ValueError(underflow_text(numbers.filter(are_lost)[0].as_py(), kind))
    return floats
