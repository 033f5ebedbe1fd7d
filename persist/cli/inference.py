"""Inference of column types for a new shard, from every cell of a CSV file or every value of an NDJSON file.

A type is chosen only if every cell keeps its value; `docs/shell.md` has the rules. Cells are added block by block,
and the state is a few numbers for each column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import Decimal
from itertools import chain
from typing import Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from persist.codecs.json_rows import check_names, clear_errors, keep_zeros
from persist.parts.exact_numbers import is_whole
from persist.parts.value_order import one_chunk

_PROBED = 16  # cells
_DIGITS_MAX = 15  # decimal digits that survive the conversion to a double and back
_EXPONENT_MAX, _EXPONENT_CHARS_MAX = 250, 5
DECIMAL_DIGITS_MAX = 76
_NUMBER = r"^-?(?P<whole>0|[1-9][0-9]*|)(?:\.(?P<part>[0-9]+))?(?:[eE](?P<exponent>[+-]?[0-9]+))?$"
_MOMENT = r"^\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d(\.\d{1,9})?)?"
_ZONE = r"(Z|[+-]\d\d(:?\d\d)?)"
_TRUTHS = pa.array(["true", "false", "True", "False", "TRUE", "FALSE"])

# The kinds of values that a column may have. `take` adds cells, which are strings without nulls, at least one;
# it is false unless they and all cells before can have this kind. `kind` is the type that holds all cells.


class Candidate(Protocol):
    def take(self, cells: pa.Array) -> bool: ...

    def kind(self) -> pa.DataType: ...


class Integers:
    """Integers without leading zeros or `+`, in the first type that holds all of them."""

    def __init__(self) -> None:
        self._kinds = [pa.int64(), pa.uint64(), pa.decimal128(38, 0), pa.decimal256(76, 0)]

    def take(self, cells: pa.Array) -> bool:
        kinds: list[pa.DataType] = []
        for kind in self._kinds:
            if (kinds and pa.types.is_decimal(kind)) or _is_text_of(cells, kind):  # a decimal holds what others hold
                kinds.append(kind)
        self._kinds = kinds
        return bool(kinds)

    def kind(self) -> pa.DataType:
        return self._kinds[0]


class Doubles:
    """Numbers that are doubles. If `is_text`, trailing zeros of a fraction and `12E3` may be significant text instead
    of notation.
    """

    def __init__(self, is_text: bool) -> None:
        self._is_text = is_text

    def take(self, cells: pa.Array) -> bool:
        numbers = _cast(cells, pa.float64())
        if numbers is None or pc.any(pc.equal(cells, "-0")).as_py():  # which is not an integer
            return False
        is_shortest = pc.and_(pc.equal(numbers.cast(pa.string()), cells), pc.is_finite(numbers))
        return self._take_others(cells.filter(pc.invert(is_shortest)))

    def _take_others(self, cells: pa.Array) -> bool:
        """Take cells that are not the shortest text of a double."""
        parts = pc.extract_regex(cells, _NUMBER)
        if parts.null_count:
            return False
        whole, part, exponent = (pc.struct_field(parts, name) for name in ("whole", "part", "exponent"))
        if self._is_text:
            has_exponent = pc.not_equal(exponent, "")
            # Neither a sign nor a decimal point before it: `12E3`, which may be an identifier.
            is_bare = pc.and_not(pc.equal(part, ""), pc.match_substring_regex(exponent, "^[+-]"))
            zeros = pc.and_(pc.ends_with(part, "0"), pc.not_equal(part, "0"))
            if pc.any(pc.if_else(has_exponent, is_bare, zeros)).as_py():
                return False
        return _are_doubles(cells, whole, part, exponent)

    def kind(self) -> pa.DataType:
        return pa.float64()


class Decimals:
    """Numbers with equally many decimals, and no exponent."""

    def __init__(self) -> None:
        self._scale: int | None = None
        self._digits = 0  # at most, before the decimal point

    def take(self, cells: pa.Array) -> bool:
        lengths = pc.subtract(pc.subtract(pc.binary_length(cells), pc.find_substring(cells, ".")), 1)
        scale = pc.max(lengths).as_py() if self._scale is None else self._scale
        if not pc.all(pc.match_substring_regex(cells, rf"^-?(0|[1-9][0-9]*)?\.[0-9]{{{scale}}}$")).as_py():
            return False
        if pc.any(pc.match_substring_regex(cells, r"^-0?\.0+$")).as_py():
            return False
        self._scale, self._digits = scale, max(self._digits, _length_max(cells) - scale - 1)
        return self._digits + scale <= DECIMAL_DIGITS_MAX

    def kind(self) -> pa.DataType:
        assert self._scale is not None
        is_short = self._digits + self._scale <= 38
        return pa.decimal128(38, self._scale) if is_short else pa.decimal256(DECIMAL_DIGITS_MAX, self._scale)


def _is_text_of(cells: pa.Array, kind: pa.DataType) -> bool:
    """Whether each cell is the text of a value of a type."""
    values = _cast(cells, kind)
    return values is not None and bool(pc.all(pc.equal(values.cast(pa.string()), cells)).as_py())


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


class Truths:
    """`true` and `false`."""

    def take(self, cells: pa.Array) -> bool:
        return bool(pc.all(pc.is_in(cells, _TRUTHS)).as_py())

    def kind(self) -> pa.DataType:
        return pa.bool_()


class DateForms:
    """Dates in ISO 8601."""

    def take(self, cells: pa.Array) -> bool:
        return _is_text_of(cells, pa.date32())

    def kind(self) -> pa.DataType:
        return pa.date32()


class Moments:
    """Timestamps in ISO 8601, with a time zone or without: microseconds, or else nanoseconds."""

    def __init__(self, zone: str | None) -> None:
        self._form = _MOMENT + ("" if zone is None else _ZONE) + "$"
        self._kinds = [pa.timestamp(unit, zone) for unit in ("us", "ns")]

    def take(self, cells: pa.Array) -> bool:
        if not pc.all(pc.match_substring_regex(cells, self._form)).as_py():
            return False
        self._kinds = [kind for kind in self._kinds if _cast(cells, kind) is not None]
        return bool(self._kinds)

    def kind(self) -> pa.DataType:
        return self._kinds[0]


class CellTypes:
    """A column of texts that are all of one of these kinds; the first that remains counts."""

    def __init__(self, *candidates: Candidate) -> None:
        self._left = list(candidates)
        self._is_empty = True

    @classmethod
    def of_cells(cls) -> CellTypes:
        """For CSV, where every value is text."""
        return cls(Integers(), Doubles(is_text=True), Decimals(), Truths(), DateForms(), Moments(None), Moments("UTC"))

    def add(self, cells: pa.Array) -> None:
        if self._left and len(cells := pc.drop_null(one_chunk(cells))):
            self._is_empty = False
            self._left = [candidate for candidate in self._left if candidate.take(cells)]

    def kind(self) -> pa.DataType | None:
        """The type of all cells; None: none of these, or there is no cell."""
        return self._left[0].kind() if self._left and not self._is_empty else None


# --- JSON


class _Fraction(str):
    """A JSON number with a decimal point or an exponent, as it is written."""

    __slots__ = ()


DEPTH_MAX = 100  # columns of shards have far fewer levels
_TOO_DEEP = f"it is nested more than {DEPTH_MAX} levels deep; flatten it"
_decoder = msgspec.json.Decoder(float_hook=_Fraction)
_KINDS = {int: "numbers", _Fraction: "numbers", str: "texts", bool: "truths", list: "lists", dict: "objects"}


class JsonValues:
    """The values at one path in JSON objects."""

    def __init__(self) -> None:
        self._names = 0  # of all objects
        self._what: str | None = None
        self._numbers = CellTypes(Integers(), Doubles(is_text=False))
        self._texts = CellTypes(DateForms(), Moments(None), Moments("UTC"))  # JSON has numbers and booleans of its own
        self._fields: dict[str, JsonValues] = {}
        self._items: list[JsonValues] = []

    def add_lines(self, block: bytes) -> None:
        """Add lines of JSON objects. Raises ValueError if they fit no type, or an error of msgspec."""
        block = keep_zeros(block)
        try:
            with clear_errors(block):
                rows = _decoder.decode_lines(block)
        except RecursionError as error:
            raise ValueError(_TOO_DEEP) from error
        names = self._names_all()
        if not set(map(type, rows)) <= {dict}:
            raise ValueError("a line is not a JSON object")
        self._add(rows, "", 0)
        check_names(block, self._names_all() - names)

    def _add(self, values: Sequence[Any], path: str, depth: int) -> None:
        if depth > DEPTH_MAX:
            raise ValueError(_TOO_DEEP)
        kinds = set(map(type, values)) - {type(None)}
        if not kinds:
            return
        whats = {_KINDS[kind] for kind in kinds} | ({self._what} if self._what else set())
        if len(whats) > 1:
            raise ValueError(f"column {path!r} has {' and '.join(sorted(whats))}, which no type can hold")
        (self._what,) = whats
        values = [value for value in values if value is not None]
        if self._what == "numbers":
            self._numbers.add(pa.array(list(map(str, values)), pa.string()))
            if self._numbers.kind() is None:
                raise ValueError(f"column {path!r} has numbers that no type holds exactly; quote them")
        elif self._what == "texts":
            self._texts.add(pa.array(values, pa.string()))
        elif self._what == "lists":
            self._items = self._items or [JsonValues()]
            self._items[0]._add(list(chain.from_iterable(values)), f"{path}[]", depth + 1)
        elif self._what == "objects":
            self._names += sum(map(len, values))
            for name in dict.fromkeys(chain.from_iterable(values)):
                field = self._fields.setdefault(name, JsonValues())
                field._add([value.get(name) for value in values], f"{path}.{name}" if path else name, depth + 1)

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
        if self._what == "truths":
            return pa.bool_()
        return (self._numbers if self._what == "numbers" else self._texts).kind() or pa.string()
