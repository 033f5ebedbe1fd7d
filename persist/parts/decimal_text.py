"""Decimals written as texts: Arrow's own reading of them is not exact, and may end the process.

It ends where an exponent is far beyond all that it has powers of. Where a number has more digits than the type it takes
what is left of them for the number, without a word.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

EXPONENT_MAX = 1_000
CHARS_MAX = 1_000  # of a text
_PLAIN = r"^[+-]?0*(?P<whole>[0-9]*)(?:\.(?P<part>[0-9]*))?$"  # without an exponent


def decimals(texts: Any, kind: Any) -> Any:
    """An array of texts, or a scalar, as decimals of `kind`. Raises ValueError where one is none, or does not fit."""
    if isinstance(texts, pa.Scalar):
        return decimals(pa.array([texts.as_py()], pa.string()), kind)[0]
    digits = pc.extract_regex(texts, _PLAIN)
    whole, part = (pc.binary_length(digits.field(index)) for index in range(2))
    has_digit = pc.match_substring_regex(texts, "[0-9]")
    fits = pc.and_(pc.less_equal(whole, kind.precision - kind.scale), pc.less_equal(part, max(0, kind.scale)))
    is_read = pc.and_(pc.and_(fits, has_digit), pc.is_valid(digits))
    if kind.scale >= 0 and texts.null_count == len(texts) - (pc.sum(is_read).as_py() or 0):
        return texts.cast(kind)
    return pa.array([None if text is None else _decimal(text, kind) for text in texts.to_pylist()], kind)


def _decimal(text: str, kind: Any) -> Decimal:
    """The number of one text, in as many digits as its type has."""
    if len(text) > CHARS_MAX:
        raise ValueError(f"a decimal is written with more than {CHARS_MAX} characters")
    try:
        found = Decimal(text)
    except InvalidOperation as error:
        raise ValueError(f"{text!r} is no number") from error
    if not found.is_finite() or "_" in text or not text.isascii() or text != text.strip():
        raise ValueError(f"{text!r} is no number that {kind} can have")
    sign, digits, exponent = found.as_tuple()
    shown = "".join(map(str, digits)).lstrip("0")
    kept = shown.rstrip("0")
    least = int(exponent) + len(shown) - len(kept)  # the exponent of the last digit that is not zero
    if not kept:
        return Decimal(0)
    if least < -kind.scale or len(kept) + least > kind.precision - kind.scale:
        raise ValueError(f"{text[:100]!r} does not fit {kind}")
    return Decimal((sign, tuple(map(int, kept)), least))


def exact(text: str) -> Decimal:
    """A number of JSON as it is written. Raises ValueError where its exponent is one that no column can have."""
    found = Decimal(text)
    if found.is_finite() and abs(found.adjusted()) >= EXPONENT_MAX:
        raise ValueError("a number has an exponent of a thousand or more")
    return found


def _whole(text: str) -> int | Decimal:
    return Decimal(text) if text == "-0" else int(text)


EXACT_NUMBERS: Mapping[str, Any] = {"parse_float": exact, "parse_int": _whole}
"""Arguments of `json.loads` for values of keys: no digit is lost, nor the sign of `-0`."""
