"""Rows as JSON, in and out: the one form of NDJSON, of server-sent events, and of nested cells in CSV.

Every value that a shard can hold comes back as it was: whole numbers of any size, NaN and the infinities as strings,
bytes as base64 at every depth, times and decimals as text (`text_values.py`), maps as lists of pairs. msgspec reads,
checks and writes the JSON; here columns are made of rows and rows of columns, one column at a time at every depth.
"""

from __future__ import annotations

import csv
import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, chain, islice
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET, UnsetType
from msgspec.structs import astuple

from persist.codecs.text_values import floats_of_numbers, from_text, is_textual, to_text, underflow_text, underflows
from persist.core.errors import InvalidUsage
from persist.formats.http_messages import named_once
from persist.parts.column_types import EXACT_NUMBERS, family
from persist.parts.memory_size import fixed_bytes
from persist.parts.python_values import find_differing_row

BLOCK_BYTES = 256 * 1024  # of NDJSON that is read at once
OBJECTS_BYTES = 32 * 1024 * 1024  # what Python's objects take at once, unless one line has more
_VALUE_BYTES, _LIST_BYTES, _OBJECT_BYTES, _FIELD_BYTES = 64, 88, 64, 16
Spend = Callable[[int], None]
"""Is told bytes before memory is taken for them, and raises where they are too many."""
DECODERS_MAX = 256
_FLAT: dict[str | None, Any] = {"string": str, "binary": bytes, "boolean": bool, "integer": int}
_FLOAT = int | float | Literal["NaN", "Infinity", "-Infinity"]
_BLANKS = b" \t\r\n"
BOM = b"\xef\xbb\xbf"  # by which some programs begin text
UNREADABLE = (
    pa.ArrowException, msgspec.MsgspecError, csv.Error, OSError, ValueError, OverflowError, KeyError, TypeError,
    RecursionError,
)  # fmt: skip
_TRUNCATED = "Input data was truncated"
_SURROGATE = "surrogate pair"
_ESCAPE = re.compile(  # of JSON; the group is half of a surrogate pair
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
_FRACTION = re.compile(r"Expected `int \| (?:float \| )?str[^`]*`, got `float`(.*)", re.DOTALL)
_GAP = re.compile(r"\s*")
_ZEROS = b"0" * 200  # with fewer of them, and an exponent of two digits, no number becomes zero
_SUSPECT = (  # each begins with bytes that `re` searches for quickly
    re.compile(rb"-0(?![0-9.eE])"),
    re.compile(rb"e-0*[1-9][0-9]{2}"),
    re.compile(rb"E-0*[1-9][0-9]{2}"),
)
_TEXT_OR_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*+"?|-?[0-9]++(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?', re.DOTALL)
_ZERO_OF_INTEGERS = Annotated[float, msgspec.Meta(ge=0, le=0)]
_NAMED = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()
encode = _encoder.encode


# --- out


def ndjson(table: pa.Table) -> bytes:
    """Rows as JSON objects, one on each line."""
    return b"".join(_encoder.encode_lines(_rows(batch)) for batch in table.to_batches())


def to_json_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as what `encode` writes."""
    return list(chain.from_iterable(map(_rows, table.to_batches())))


def to_json_values(column: pa.Array) -> list[Any]:
    """A column's values as what `encode` writes."""
    kind, types = column.type, pa.types
    if types.is_map(kind):
        entries = pa.list_(pa.struct([pa.field("key", kind.key_type, False), pa.field("value", kind.item_type)]))
        return _plain_lists(
            column.cast(entries), lambda pairs: list(zip(*map(to_json_values, pairs.flatten()), strict=True))
        )
    if types.is_struct(kind):
        rows = _dicts(kind.names, column.flatten())
        return [row if is_there else None for row, is_there in zip(rows, column.is_valid().to_pylist(), strict=True)]
    if types.is_nested(kind):
        return _plain_lists(column, to_json_values)
    if is_textual(kind) and family(kind) != "binary":
        column = to_text(column)
    if types.is_floating(kind):
        column = column.cast(pa.float64())
    values: list[Any] = column.to_pylist()
    if types.is_floating(kind) and pc.all(pc.is_finite(column)).as_py() is False:
        named = {float("inf"): "Infinity", float("-inf"): "-Infinity"}
        return ["NaN" if value != value else named.get(value, value) for value in values]
    return values


def _plain_lists(column: pa.Array, elements: Callable[[pa.Array], list[Any]]) -> list[Any]:
    """Lists; `elements` makes those of all rows together plain."""
    found = iter(elements(column.flatten()))
    return [None if size is None else list(islice(found, size)) for size in pc.list_value_length(column).to_pylist()]


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    return _dicts(batch.schema.names, batch.columns)


def _dicts(names: Sequence[str], columns: Sequence[pa.Array]) -> list[dict[str, Any]]:
    if len(set(names)) < len(names):
        raise InvalidUsage(f"two fields have one name, which JSON cannot tell apart: {names}; take Arrow or Parquet")
    return [dict(zip(names, row, strict=True)) for row in zip(*map(to_json_values, columns), strict=True)]


# --- in


@contextmanager
def clear_errors(text: bytes = b"") -> Iterator[None]:
    """Say in words of the caller's what msgspec says of this text. Raises ValueError in the place of such errors."""
    try:
        yield
    except msgspec.DecodeError as error:
        said = str(error)
        halves = (match[1] for match in _ESCAPE.finditer(text) if match[1])
        if (said == _TRUNCATED or _SURROGATE in said) and (half := next(halves, None)) is not None:
            raise ValueError(
                f"a text has {half.decode()}, half of a surrogate pair, which is no character: write both halves, or "
                "leave it out"
            ) from error
        if said == _TRUNCATED:
            raise ValueError("its JSON is not complete: a text, list or object is not closed") from error
        if (fraction := _FRACTION.match(said)) is not None:
            raise ValueError(f'a decimal with a point is written as text, as in "12.50"{fraction[1]}') from error
        raise


def keep_zeros(text: bytes) -> bytes:
    """JSON with `-0.0` for `-0`, whose sign msgspec loses. Raises ValueError at a number that becomes zero as a double.

    A text without either, as most are, is the same object.
    """
    if _ZEROS in text or any(pattern.search(text) for pattern in _SUSPECT):
        return _TEXT_OR_NUMBER.sub(_kept_zero, text)
    return text


def _kept_zero(match: re.Match[bytes]) -> bytes:
    token = match[0]
    if token == b"-0":
        return b"-0.0"
    if token[:1] != b'"' and underflows(token.decode()):
        raise ValueError(underflow_text(token.decode(), pa.float64()))
    return token


def read_ndjson(
    data: bytes,
    schema: pa.Schema,
    rows_max: int,
    spend: Spend | None = None,
    defaults: Mapping[str, pa.Scalar] | None = None,
    *,
    has_minus_zero: bool = False,
) -> pa.Table:
    """Lines of JSON objects as a table of `schema`. What a line leaves out has its default, or is null.

    `has_minus_zero`: `-0.0` may be a whole number, as in what `keep_zeros` gives.

    Raises InvalidUsage beyond `rows_max` rows, ValueError or an error of msgspec or Arrow where a line cannot be read,
    and what `spend` does.
    """
    batches, count = [], 0
    for given in _blocks(data, _widest(schema), spend):
        block, columns = keep_zeros(given), _Columns(spend)
        form = _form(schema, has_minus_zero or block is not given)
        with clear_errors(block):
            rows = form.decoder.decode_lines(block)
        count += len(rows)
        if count > rows_max:
            raise InvalidUsage(f"the body holds more than {rows_max} rows; send at most {rows_max} at once")
        batches.append(pa.RecordBatch.from_arrays(columns.children(rows, form.fields, defaults), schema=schema))
        columns.check_names(block)
    return pa.Table.from_batches(batches, schema)


def read_each(
    texts: Sequence[bytes],
    schema: pa.Schema,
    rows_max: int,
    spend: Spend,
    defaults: Mapping[str, pa.Scalar],
) -> tuple[list[pa.Array], list[int], list[int | None]]:
    """Lines of several writers: columns of `schema`, which is flat, the multiplicities, and the rows of each text.

    The last two columns of the schema are those of times and multiplicities; they are not among the first ones that are
    given back. None: the rows of the text are left out, since they cannot be read, or are too many, or give a time or a
    null where none may be. Raises what `read_ndjson` does where it cannot be told of which text.
    """
    found = [_cells(text, schema, rows_max) for text in texts]
    columns = _transposed(found, len(schema))
    if wrong := _refused(columns, schema, defaults):
        ends = list(accumulate(len(cells or ()) for cells in found))
        for place in {bisect_right(ends, row) for row in wrong}:
            found[place] = None
        columns = _transposed(found, len(schema))
    *values, _, diffs = columns
    fields = list(schema)[:-2]
    arrays = _Columns(spend).of_values(values, fields, defaults)
    given = [1] * len(diffs) if _are_absent(diffs) else [1 if one in (UNSET, None) else one for one in diffs]
    return arrays, given, [None if cells is None else len(cells) for cells in found]


_Values: TypeAlias = tuple[Any, ...]


def _transposed(found: Sequence[list[_Values] | None], width: int) -> list[_Values]:
    """The values of each column, of all rows."""
    cells = list(chain.from_iterable(rows for rows in found if rows is not None))
    return list(zip(*cells, strict=True)) if cells else [()] * width


def _are_absent(values: _Values) -> bool:
    return values.count(UNSET) + values.count(None) == len(values)


def _refused(columns: Sequence[_Values], schema: pa.Schema, defaults: Mapping[str, pa.Scalar]) -> set[int]:
    """The rows that give a time, or have a null where none may be."""
    times = columns[-2]
    found: set[int] = set()
    if not _are_absent(times):
        found.update(row for row, value in enumerate(times) if value is not UNSET and value is not None)
    for field, values in zip(list(schema)[:-2], columns, strict=False):
        if not field.nullable and (None in values or (UNSET in values and field.name not in defaults)):
            found.update(row for row, value in enumerate(values) if value is None or value is UNSET)
    return found


def _cells(text: bytes, schema: pa.Schema, rows_max: int) -> list[_Values] | None:
    """The values of each line of a text; None: it cannot be read, or has more lines."""
    try:
        block = keep_zeros(text)
        cells = list(map(astuple, _form(schema, block is not text).decoder.decode_lines(block)))
        values = list(chain.from_iterable(cells))
        check_names(block, len(values) - values.count(UNSET))
    except (InvalidUsage, *UNREADABLE):
        return None
    return None if len(cells) > rows_max else cells


def names_given(data: bytes, delete_column: str | None, spend: Spend | None = None) -> tuple[str, ...]:
    """The names that every line of JSON objects gives, but for the delete column; none without lines.

    Raises InvalidUsage where two lines give other names, ValueError or an error of msgspec where one cannot be read,
    and what `spend` does.
    """
    told: list[tuple[frozenset[str], bool]] = []
    kept: dict[tuple[frozenset[str], bool], tuple[frozenset[str], bool]] = {}  # most lines give the same ones
    is_told = delete_column is None
    for block in _blocks(data, 0, spend):
        with clear_errors(block):
            lines = _NAMED.decode_lines(block)
        for line in lines:
            is_told = is_told or delete_column in line
            one = frozenset(line.keys() - {delete_column}), bytes(line.get(delete_column or "", b"")) == b"true"
            if one not in kept and spend is not None:
                spend(_OBJECT_BYTES * (2 + len(line)))
            told.append(kept.setdefault(one, one))
    if told and not is_told:
        raise InvalidUsage(f"column {delete_column!r} is absent from the rows; it says which of them only go")
    if (found := find_differing_row(told)) is not None:
        raise InvalidUsage(
            f"row {found[0]} differs from others in whether it has column {found[1]!r}; give all of them the same "
            "ones, null where null is meant, or say with columns= which the rows give"
        )
    return tuple(next((names for names, is_gone in told if not is_gone), told[0][0] if told else ()))


def names_of_lines(lines: bytes) -> list[frozenset[str]]:
    """The names that each line of JSON objects gives. Raises ValueError or an error of msgspec: one cannot be read."""
    with clear_errors(lines):
        return [frozenset(line) for line in _NAMED.decode_lines(lines)]


def read_cells(cells: pa.Array, field: pa.Field, spend: Spend | None = None) -> pa.Array:
    """Strings that hold JSON as values of a column. Raises what `spend` does."""
    decoder, widest = msgspec.json.Decoder(_type(field)), _widest([field])
    chunks = []
    for some in _cell_blocks(cells):
        texts, columns = some.to_pylist(), _Columns(spend)
        joined = "\n".join(filter(None, texts)).encode()
        if keep_zeros(joined) is not joined:
            decoder = msgspec.json.Decoder(_type(field, True))
            texts = [None if text is None else keep_zeros(text.encode()) for text in texts]
        if spend is not None and (taken := objects_bytes(joined, widest)) > OBJECTS_BYTES:
            spend(taken)
        with clear_errors(joined):
            values = [None if text is None else decoder.decode(text) for text in texts]
        chunks.append(columns.column(values, field.type))
        columns.check_names(joined)
    return pa.concat_arrays(chunks) if chunks else pa.array([], field.type)


def _cell_blocks(cells: pa.Array) -> Iterator[pa.Array]:
    """The cells, some at a time: about BLOCK_BYTES of them."""
    ends = pc.cumulative_sum(pc.cast(pc.fill_null(pc.binary_length(cells), 0), pa.int64()))
    start, bytes_before = 0, 0
    while start < len(cells):
        past = pc.index(pc.greater(ends[start:], bytes_before + BLOCK_BYTES), True).as_py()
        end = len(cells) if past < 0 else start + past + 1
        yield cells[start:end]
        start, bytes_before = end, ends[end - 1].as_py()


def _blocks(data: bytes, widest: int, spend: Spend | None) -> Iterator[bytes]:
    """Whole lines, about BLOCK_BYTES at a time, and fewer where their objects would take too much memory.

    What one line takes beyond that is spent.
    """
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + BLOCK_BYTES) + 1 or len(data)
        yield from _halved(data[start:end], widest, spend)
        start = end


def _halved(block: bytes, widest: int, spend: Spend | None) -> Iterator[bytes]:
    if spend is None or (taken := objects_bytes(block, widest)) <= OBJECTS_BYTES:
        yield block
        return
    middle = block.find(b"\n", len(block) // 2) + 1 or block.rfind(b"\n", 0, len(block) - 1) + 1
    if 0 < middle < len(block):
        yield from _halved(block[:middle], widest, spend)
        yield from _halved(block[middle:], widest, spend)
    else:
        spend(taken)
        yield block


def objects_bytes(text: bytes, widest: int = 0) -> int:
    """At least what Python's objects take of JSON, in which an object of a known type has `widest` fields or fewer."""
    values = (text.count(b",") + 1) * _VALUE_BYTES + text.count(b"[") * _LIST_BYTES
    return len(text) + values + text.count(b"{") * (_OBJECT_BYTES + widest * _FIELD_BYTES)


def _widest(fields: pa.Schema | Sequence[pa.Field]) -> int:
    """The most fields that an object has for rows or values of these, at any depth."""
    most = len(fields)
    for field in fields:
        inner = [field.type.field(index) for index in range(field.type.num_fields)]
        most = max(most, _widest(inner) if inner else 0)
    return most


@dataclass(frozen=True, slots=True)
class _Form:
    """How lines of JSON are read by a schema."""

    decoder: msgspec.json.Decoder[Any]
    fields: Sequence[pa.Field]


@lru_cache(DECODERS_MAX)
def _form(schema: pa.Schema, has_minus_zero: bool) -> _Form:
    decoder = msgspec.json.Decoder(_struct([field.with_nullable(True) for field in schema], has_minus_zero))
    return _Form(decoder, list(schema))


def _struct(fields: Sequence[pa.Field], has_minus_zero: bool) -> Any:
    """The objects that have these fields, and no others. Fields that may be null may also be left out."""
    names = {f"f{number}": field.name for number, field in enumerate(fields)}
    kinds = [
        (name, _type(field, has_minus_zero) | UnsetType, UNSET)
        if field.nullable
        else (name, _type(field, has_minus_zero))
        for name, field in zip(names, fields, strict=True)
    ]
    return msgspec.defstruct("Row", kinds, rename=names, forbid_unknown_fields=True, kw_only=True, gc=False)


def _type(field: pa.Field, has_minus_zero: bool = False) -> Any:
    """What JSON gives for values of a field, as msgspec checks it; `-0.0` of `keep_zeros` is a whole number too."""
    kind, types = field.type, pa.types

    def inner(one: pa.Field) -> Any:
        return _type(one, has_minus_zero)

    if types.is_map(kind):
        found: Any = list[tuple[inner(kind.key_field.with_nullable(False)), inner(kind.item_field)]]  # type: ignore[misc]
    elif types.is_struct(kind):
        found = _struct(list(kind), has_minus_zero)
    elif types.is_nested(kind):
        found = list[inner(kind.value_field)]  # type: ignore[misc]
        if types.is_fixed_size_list(kind):
            found = Annotated[found, msgspec.Meta(min_length=kind.list_size, max_length=kind.list_size)]
    else:
        found = _FLOAT if types.is_floating(kind) else _FLAT.get(family(kind), str)
        if types.is_decimal(kind):  # whole numbers of any size are exact; fractions are written as text
            found = int | str
        if has_minus_zero and (types.is_decimal(kind) or types.is_integer(kind)):
            found = found | _ZERO_OF_INTEGERS
    return found | None if field.nullable else found


class _Columns:
    """Makes columns of decoded values, and counts the names of the objects that it sees."""

    def __init__(self, spend: Spend | None = None) -> None:
        self._names = 0
        self._spend = spend

    def children(
        self, rows: Sequence[Any], fields: Sequence[pa.Field], defaults: Mapping[str, pa.Scalar] | None = None
    ) -> list[pa.Array]:
        """A column for each field of objects; None has none of them."""
        blank = (UNSET,) * len(fields)
        cells = [blank if row is None else astuple(row) for row in rows]
        return self.of_values(list(zip(*cells, strict=True)) if cells else [()] * len(fields), fields, defaults)

    def of_values(
        self,
        columns: Sequence[tuple[Any, ...]],
        fields: Sequence[pa.Field],
        defaults: Mapping[str, pa.Scalar] | None = None,
    ) -> list[pa.Array]:
        """A column for each field, of its values in all rows; UNSET is what a row does not give."""
        found = [self._child(values, field) for values, field in zip(columns, fields, strict=True)]
        if not defaults:
            return found
        return [
            _with_default(column, values, defaults.get(field.name))
            for column, values, field in zip(found, columns, fields, strict=True)
        ]

    def _child(self, values: tuple[Any, ...], field: pa.Field) -> pa.Array:
        missing = values.count(UNSET)
        self._names += len(values) - missing
        if missing == len(values):
            self._count(missing, field.type)
            return pa.nulls(missing, field.type)
        return self.column([None if v is UNSET else v for v in values] if missing else values, field.type)

    def column(self, values: Sequence[Any], kind: pa.DataType) -> pa.Array:
        types = pa.types
        self._count(len(values), kind)
        if not types.is_nested(kind):
            return _flat(values, kind)
        empty = pa.array([value is None for value in values], pa.bool_())
        if types.is_struct(kind):
            return pa.StructArray.from_arrays(self.children(values, list(kind)), fields=list(kind), mask=empty)
        if types.is_fixed_size_list(kind):
            blank = [None] * kind.list_size
            flat = list(chain.from_iterable(blank if value is None else value for value in values))
            return pa.FixedSizeListArray.from_arrays(self.column(flat, kind.value_type), type=kind, mask=empty)
        flat = list(chain.from_iterable(value for value in values if value is not None))
        ends = [0, *accumulate(0 if value is None else len(value) for value in values)]
        if types.is_map(kind):
            keys, items = zip(*flat, strict=True) if flat else ((), ())
            inner = self.column(keys, kind.key_type), self.column(items, kind.item_type)
            return pa.MapArray.from_arrays(pa.array(ends, pa.int32()), *inner, type=kind, mask=empty)
        make, offset = (pa.LargeListArray, pa.int64()) if types.is_large_list(kind) else (pa.ListArray, pa.int32())
        return make.from_arrays(pa.array(ends, offset), self.column(flat, kind.value_type), type=kind, mask=empty)

    def _count(self, values: int, kind: pa.DataType) -> None:
        if self._spend is not None:
            self._spend(values * fixed_bytes(kind))  # texts are no longer than the body

    def check_names(self, text: bytes) -> None:
        check_names(text, self._names)


def check_names(text: bytes, names: int) -> None:
    """Refuse objects in `text` that name something twice: msgspec keeps the last one. They have `names` that were seen.

    No JSON has more names than quotes before colons. Only where it has more than were seen is it read again.
    """
    if text.count(b":") > names and text.translate(None, _BLANKS).count(b'":') > names:
        decoder, whole, place = json.JSONDecoder(object_pairs_hook=named_once), text.decode().strip(), 0
        while place < len(whole):
            place = _GAP.match(whole, decoder.raw_decode(whole, place)[1]).end()  # type: ignore[union-attr]


def _with_default(column: pa.Array, values: Sequence[Any], default: pa.Scalar | None) -> pa.Array:
    """The column, with its default where an object does not have it."""
    if default is None or UNSET not in values:
        return column
    return pc.if_else(pa.array([value is UNSET for value in values]), default, column)


def _flat(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_floating(kind):
        return floats_of_numbers(values, kind)
    if is_textual(kind) and family(kind) != "binary":
        texts = [str(int(value)) if type(value) in (int, float) else value for value in values]
        return from_text(pa.array(texts, pa.string()), kind)
    return pa.array(values, kind)


def decode_body(data: bytes, spend: Spend | None = None, *, is_exact: bool = False) -> Any:
    """What a body has in JSON. Raises InvalidUsage, also at NaN and at a number that no double is near.

    `-0` is a float, which keeps its sign. `is_exact`: numbers are read as `EXACT_NUMBERS` does, for keys. `spend` is
    told what its objects take.
    """
    if spend is not None:
        spend(objects_bytes(data))
    numbers = EXACT_NUMBERS if is_exact else {"parse_float": _finite, "parse_int": signed_zero}
    try:
        return json.loads(data, object_pairs_hook=named_once, parse_constant=_no_json, **numbers)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"the body cannot be read as JSON: {error}") from error


def rows_of_json(given: list[Any], schema: pa.Schema, spend: Spend | None = None) -> pa.Table:
    """Rows of what `decode_body` has read. Raises as `read_ndjson`."""
    return read_ndjson(b"\n".join(map(encode, given)), schema, len(given), spend, has_minus_zero=True)


def signed_zero(text: str) -> int | float:
    """A whole number of JSON; `-0` is a float, which keeps its sign. Raises ValueError: it is too long."""
    return -0.0 if text == "-0" else int(text)


def _no_json(text: str) -> Any:
    raise ValueError(f"{text} is no JSON: it is written as a text, {encode(text).decode()}")


def _finite(text: str) -> float:
    found = float(text)
    if math.isinf(found):
        raise ValueError(f"{text[:40]} is larger than any double")
    if found == 0 and underflows(text):
        raise ValueError(underflow_text(text, pa.float64()))
    return found
