"""Inference of column types for a new shard, from every cell of a CSV file or every value of an NDJSON file.

A type is chosen only if every cell keeps its value; `docs/shell.md` has the rules. Cells are added block by block,
and the state is a few numbers for each column.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from decimal import Decimal
from itertools import chain
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from persist.codecs.json_rows import check_names, clear_errors, keep_zeros
from persist.parts.exact_numbers import is_whole
from persist.parts.value_order import one_chunk

_PROBED = 16  # cells
_EXACT_MAX = 2**53  # up to which every integer is a double
_DIGITS_MAX = 15  # decimal digits that survive the conversion to a double and back
_EXPONENT_MAX, _EXPONENT_CHARS_MAX = 250, 5
_WHOLE = r"^(0|-?[1-9][0-9]*)$"
_NUMBER = r"^-?(?P<whole>0|[1-9][0-9]*|)(?:\.(?P<part>[0-9]+))?(?:[eE](?P<exponent>[+-]?[0-9]+))?$"
_NS_SECONDS = 2**63 // 10**9 - 1  # which int64 nanoseconds can represent
_MOMENT = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?"
_ZONE = r"(Z|[+-]\d\d(:?\d\d)?)"
_TRUTHS = pa.array(["true", "false", "True", "False", "TRUE", "FALSE"])

# The kinds of values that a column may have. `take` adds cells, which are strings without nulls, at least one;
# it is false unless they and all cells before can have this kind. `kind` is the type that holds all cells, if any.


class Numbers:
    """Numbers. If `is_text`, trailing zeros of a fraction and `12E3` may be significant text instead of notation."""

    def __init__(self, is_text: bool) -> None:
        self._is_text = is_text
        self._low = self._high = 0
        self._is_whole = True  # all cells
        self._is_double = True
        self._has_minus_zero = False
        self._has_exponent = False
        self._decimals: set[int] = set()  # the smallest and the largest number of decimals
        self._digits = 0  # at most, before the decimal point

    def take(self, cells: pa.Array) -> bool:
        for kind in (pa.int64(), pa.uint64()) if self._is_whole else ():
            if (numbers := _same(cells, kind)) is not None:
                low, high = pc.min_max(numbers).as_py().values()
                doubles = numbers.cast(pa.float64(), safe=False).cast(numbers.type, safe=False)
                is_exact = max(-low, high) <= _EXACT_MAX or pc.all(pc.equal(doubles, numbers)).as_py()
                self._add_whole(low, high, is_exact)
                return self.kind() is not None
        if self._is_whole and pc.all(pc.match_substring_regex(cells, _WHOLE)).as_py():
            if _length_max(cells) > 80:
                return False
            integers = list(map(int, cells.to_pylist()))
            self._add_whole(min(integers), max(integers), is_exact=all(map(_is_shortest, map(str, integers))))
            return self.kind() is not None
        return self._take_fractions(cells) and self.kind() is not None

    def kind(self) -> pa.DataType | None:
        if self._is_whole:
            if self._low >= -(2**63) and self._high < 2**63:
                return pa.int64()
            if self._low >= 0 and self._high < 2**64:
                return pa.uint64()
            return _decimal(len(str(max(-self._low, self._high))), 0)
        if self._is_double:
            return pa.float64()
        if not self._is_text:  # rows of JSON represent decimals as strings or integers
            return None
        if self._has_exponent or self._has_minus_zero or len(self._decimals) != 1 or self._decimals == {0}:
            return None
        return _decimal(self._digits, *self._decimals)

    def _add_whole(self, low: int, high: int, is_exact: bool) -> None:
        self._low, self._high = min(self._low, low), max(self._high, high)
        self._is_double = self._is_double and is_exact
        self._digits = max(self._digits, len(str(max(-low, high))))
        self._add_decimals([0])

    def _add_decimals(self, counts: Iterable[int]) -> None:
        both = self._decimals.union(counts)
        self._decimals = {min(both), max(both)} if both else both

    def _take_fractions(self, cells: pa.Array) -> bool:
        if not self._is_double and self._take_decimals(cells):
            return True
        numbers = _cast(cells, pa.float64())
        if numbers is None:
            return False
        is_shortest = pc.and_(pc.equal(numbers.cast(pa.string()), cells), pc.is_finite(numbers))
        is_fraction = self._add_shortest(cells.filter(is_shortest))
        rest = pc.invert(is_shortest)
        if pc.any(rest).as_py():
            more = self._add_others(cells.filter(rest))
            if more is None:
                return False
            is_fraction = is_fraction or more
        if self._is_whole and not is_fraction:  # `-0` is not an integer
            return False
        is_minus_zero = pc.and_(pc.equal(numbers, 0), pc.starts_with(cells, "-"))
        self._has_minus_zero = self._has_minus_zero or bool(pc.any(is_minus_zero).as_py())
        self._is_whole = False
        return True

    def _take_decimals(self, cells: pa.Array) -> bool:
        """Whether all of these cells have as many decimals as those before, and no exponent."""
        if self._is_whole or len(self._decimals) != 1:
            return False
        (count,) = self._decimals
        if not pc.all(pc.match_substring_regex(cells, rf"^-?(0|[1-9][0-9]*)?\.[0-9]{{{count}}}$")).as_py():
            return False
        if pc.any(pc.match_substring_regex(cells, r"^-0?\.0+$")).as_py():
            return False
        self._digits = max(self._digits, _length_max(cells) - count - 1)
        return True

    def _add_shortest(self, cells: pa.Array) -> bool:
        """Add cells in the shortest notation of a double; whether one of them is not an integer."""
        if not len(cells):
            return False
        point, length = pc.find_substring(cells, "."), pc.binary_length(cells)
        has_point = pc.greater_equal(point, 0)
        has_exponent = bool(pc.any(pc.match_substring(cells, "e")).as_py())
        self._has_exponent = self._has_exponent or has_exponent
        counts = pc.if_else(has_point, pc.subtract(pc.subtract(length, point), 1), 0)
        self._add_decimals(pc.min_max(counts).as_py().values())
        self._digits = max(self._digits, pc.max(pc.if_else(has_point, point, length)).as_py())
        return has_exponent or bool(pc.any(has_point).as_py())

    def _add_others(self, cells: pa.Array) -> bool | None:
        """Add other cells; whether one of them is not an integer. None: one is not a number."""
        parts = pc.extract_regex(cells, _NUMBER)
        if parts.null_count:
            return None
        whole, part, exponent = (pc.struct_field(parts, name) for name in ("whole", "part", "exponent"))
        has_exponent = pc.not_equal(exponent, "")
        # Neither a sign nor a decimal point before it: `12E3`, which may be an identifier.
        is_bare = pc.and_not(pc.equal(part, ""), pc.match_substring_regex(exponent, "^[+-]"))
        if self._is_text and pc.any(pc.and_(has_exponent, is_bare)).as_py():
            return None
        zeros = pc.and_(pc.ends_with(part, "0"), pc.not_equal(part, "0"))
        if self._is_text and pc.any(pc.and_not(zeros, has_exponent)).as_py():
            self._is_double = False
        self._is_double = self._is_double and _are_doubles(cells, whole, part, exponent)
        self._has_exponent = self._has_exponent or bool(pc.any(has_exponent).as_py())
        self._add_decimals(pc.min_max(pc.binary_length(part)).as_py().values())
        self._digits = max(self._digits, _length_max(whole))
        return bool(pc.any(pc.or_(has_exponent, pc.not_equal(part, ""))).as_py())


def _same(cells: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """Convert cells to values of a type; None unless each is the text of its value."""
    values = _cast(cells, kind)
    return values if values is not None and pc.all(pc.equal(values.cast(pa.string()), cells)).as_py() else None


def _cast(cells: pa.Array, kind: pa.DataType) -> pa.Array | None:
    """Convert cells to values of a type; None if one has no such value."""
    try:
        if len(cells) > _PROBED:  # Arrow formats an error message for each cell that fails
            cells.slice(0, _PROBED).cast(kind)
        return cells.cast(kind)
    except pa.ArrowInvalid:
        return None


def _are_doubles(cells: pa.Array, whole: pa.Array, part: pa.Array, exponent: pa.Array) -> bool:
    """Whether the shortest text of each double has the same value as its cell."""
    is_short = pc.less_equal(pc.add(pc.binary_length(whole), pc.binary_length(part)), _DIGITS_MAX)
    if _length_max(exponent):
        if _length_max(exponent) > _EXPONENT_CHARS_MAX:
            return False
        powers = pc.utf8_ltrim(pc.if_else(pc.equal(exponent, ""), "0", exponent), "+").cast(pa.int64())
        is_short = pc.and_(is_short, pc.less_equal(pc.abs(powers), _EXPONENT_MAX))
    return all(_is_shortest(cell) for cell in cells.filter(pc.invert(is_short)).to_pylist())


def _is_shortest(cell: str) -> bool:
    """Whether the text of a double has the value of the cell. Reading takes only whole numbers that are exact."""
    value = float(cell)
    if is_whole(cell) and (math.isinf(value) or int(cell) != value):
        return False
    return Decimal(repr(value)) == Decimal(cell)


def _length_max(texts: pa.Array) -> int:
    return pc.max(pc.binary_length(texts)).as_py() or 0


def _decimal(digits: int, scale: int) -> pa.DataType | None:
    if digits + scale <= 38:
        return pa.decimal128(38, scale)
    return pa.decimal256(76, scale) if digits + scale <= 76 else None


class Truths:
    """`true` and `false`."""

    def take(self, cells: pa.Array) -> bool:
        return bool(pc.all(pc.is_in(cells, _TRUTHS)).as_py())

    def kind(self) -> pa.DataType | None:
        return pa.bool_()


class DateForms:
    """Dates in ISO 8601."""

    def take(self, cells: pa.Array) -> bool:
        return _same(cells, pa.date32()) is not None

    def kind(self) -> pa.DataType | None:
        return pa.date32()


class Moments:
    """Timestamps in ISO 8601, with a time zone or without: microseconds, or else nanoseconds."""

    def __init__(self, zone: str | None) -> None:
        self._zone = zone
        self._form = _MOMENT + ("" if zone is None else _ZONE) + "$"
        self._unit, self._seconds = "us", (0, 0)  # of all

    def take(self, cells: pa.Array) -> bool:
        if not pc.all(pc.match_substring_regex(cells, self._form)).as_py():
            return False
        moments = _cast(cells, pa.timestamp(self._unit, self._zone))
        if moments is None:
            if self._unit == "ns":
                return False
            self._unit = "ns"
            return self.take(cells)
        seconds = moments.cast(pa.timestamp("s", self._zone), safe=False).cast(pa.int64())
        low, high = pc.min_max(seconds).as_py().values()
        self._seconds = min(low, self._seconds[0]), max(high, self._seconds[1])
        return self.kind() is not None

    def kind(self) -> pa.DataType | None:
        has_room = self._unit == "us" or max(-self._seconds[0], self._seconds[1]) < _NS_SECONDS
        return pa.timestamp(self._unit, self._zone) if has_room else None


class Texts:
    """A column of texts: a string column, unless all cells are of one of these kinds."""

    def __init__(self, *candidates: Numbers | Truths | DateForms | Moments) -> None:
        self._left = list(candidates)
        self._is_empty = True

    @classmethod
    def of_cells(cls) -> Texts:
        """For CSV, where every value is text."""
        return cls(Numbers(is_text=True), Truths(), DateForms(), Moments(None), Moments("UTC"))

    def add(self, cells: pa.Array) -> None:
        if self._left and len(cells := pc.drop_null(one_chunk(cells))):
            self._is_empty = False
            self._left = [candidate for candidate in self._left if candidate.take(cells)]

    def kind(self) -> pa.DataType:
        return (not self._is_empty and self._left and self._left[0].kind()) or pa.string()


# --- JSON


class _Fraction(str):
    """A JSON number with a decimal point or an exponent, as it is written."""

    __slots__ = ()


_decoder = msgspec.json.Decoder(float_hook=_Fraction)
_KINDS = {int: "numbers", _Fraction: "numbers", str: "texts", bool: "truths", list: "lists", dict: "objects"}


class JsonValues:
    """The values at one path in JSON objects."""

    def __init__(self) -> None:
        self._names = 0  # of all objects
        self._what: str | None = None
        self._numbers = Numbers(is_text=False)
        self._texts = Texts(DateForms(), Moments(None), Moments("UTC"))  # JSON has numbers and booleans of its own
        self._fields: dict[str, JsonValues] = {}
        self._items: list[JsonValues] = []

    def add_lines(self, block: bytes) -> None:
        """Add lines of JSON objects. Raises ValueError if they fit no type, or an error of msgspec."""
        block = keep_zeros(block)
        with clear_errors(block):
            rows = _decoder.decode_lines(block)
        names = self._names_all()
        if not set(map(type, rows)) <= {dict}:
            raise ValueError("a line is not a JSON object")
        self._add(rows, "")
        check_names(block, self._names_all() - names)

    def _add(self, values: Sequence[Any], path: str) -> None:
        kinds = set(map(type, values)) - {type(None)}
        if not kinds:
            return
        whats = {_KINDS[kind] for kind in kinds} | ({self._what} if self._what else set())
        if len(whats) > 1:
            raise ValueError(f"column {path!r} has {' and '.join(sorted(whats))}, which no type can hold")
        (self._what,) = whats
        values = [value for value in values if value is not None]
        if self._what == "numbers":
            if not self._numbers.take(pa.array(list(map(str, values)), pa.string())):
                raise ValueError(f"column {path!r} has numbers that no type holds exactly; quote them")
        elif self._what == "texts":
            self._texts.add(pa.array(values, pa.string()))
        elif self._what == "lists":
            self._items = self._items or [JsonValues()]
            self._items[0]._add(list(chain.from_iterable(values)), f"{path}[]")
        elif self._what == "objects":
            self._names += sum(map(len, values))
            for name in dict.fromkeys(chain.from_iterable(values)):
                field = self._fields.setdefault(name, JsonValues())
                field._add([value.get(name) for value in values], f"{path}.{name}" if path else name)

    def _names_all(self) -> int:
        """How many names all objects have, at every depth."""
        return self._names + sum(values._names_all() for values in [*self._fields.values(), *self._items])

    def kind(self) -> pa.DataType:
        if self._what is None:
            return pa.null()
        if self._what == "lists":
            return pa.list_(self._items[0].kind())
        if self._what == "objects":
            return pa.struct([(name, field.kind()) for name, field in self._fields.items()])
        kinds = {"numbers": self._numbers.kind, "texts": self._texts.kind, "truths": pa.bool_}
        return kinds[self._what]() or pa.null()
