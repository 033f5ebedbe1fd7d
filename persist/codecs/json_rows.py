"""Reading and writing rows as JSON, in the form shared by NDJSON, server-sent events and nested cells of CSV.

Every value of a shard survives a round trip: integers of any size, NaN and the infinities as strings, bytes as base64
at every depth, times and decimals as text (`persist.parts.text_values`), maps as lists of pairs. msgspec reads, checks
and writes the JSON; this module converts between rows and columns, one column at a time at every depth.
"""

from __future__ import annotations

import csv
import json
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate, chain, islice
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import UNSET, UnsetType
from msgspec.structs import astuple

from persist.core.errors import InvalidUsage
from persist.formats.http_messages import named_once
from persist.parts.column_types import build_lists, family, map_pairs
from persist.parts.exact_numbers import EXACT_NUMBERS, floats_of_numbers, underflow_text, underflows
from persist.parts.memory_size import fixed_bytes
from persist.parts.python_values import find_differing_row
from persist.parts.text_values import from_text, is_textual, to_text

BLOCK_BYTES = 256 * 1024  # of NDJSON that is decoded at a time
OBJECTS_BYTES = 32 * 1024 * 1024  # of Python objects at a time, unless one line takes more
_VALUE_BYTES, _LIST_BYTES, _OBJECT_BYTES, _FIELD_BYTES = 64, 88, 64, 16
Spend = Callable[[int], None]
"""Called with a number of bytes before they are allocated; raises if the limit is exceeded."""
DECODERS_MAX = 256
_FLAT: dict[str | None, Any] = {"string": str, "binary": bytes, "boolean": bool, "integer": int}
_FLOAT = int | float | Literal["NaN", "Infinity", "-Infinity"]
_BLANKS = b" \t\r\n"
BOM = b"\xef\xbb\xbf"
UNREADABLE = (
    pa.ArrowException, msgspec.MsgspecError, csv.Error, OSError, ValueError, OverflowError, KeyError, TypeError,
    RecursionError,
)  # fmt: skip
_TRUNCATED = "Input data was truncated"
_SURROGATE = "surrogate pair"
_ESCAPE = re.compile(  # of JSON; the group is an unpaired surrogate
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.", re.DOTALL
)
_NOT_ZERO = re.compile(r"Expected `float` <= 0\.0(.*)", re.DOTALL)  # of an integer that may be -0.0
_FRACTION = re.compile(r"Expected `int \| (?:float \| )?str[^`]*`, got `float`(.*)", re.DOTALL)
_GAP = re.compile(r"\s*")
_ZEROS = b"0" * 200  # with fewer zeros and an exponent of two digits no number underflows
_SUSPECT = (  # each begins with a literal, for which `re` searches quickly
    re.compile(rb"-0(?![0-9.eE])"),
    re.compile(rb"e-0*[1-9][0-9]{2}"),
    re.compile(rb"E-0*[1-9][0-9]{2}"),
)
_TEXT_OR_NUMBER = re.compile(rb'"(?:[^"\\]|\\.)*+"?|-?[0-9]++(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?', re.DOTALL)
_TEXT = re.compile(rb'"(?:[^"\\]|\\.)*+"(\s*+:)?', re.DOTALL)  # the group: it is a name
_SPELLED = str.maketrans({'"': "\uf022", "\\": "\uf05c"})  # characters that msgspec takes in no name, for private ones
_ZERO_OF_INTEGERS = Annotated[float, msgspec.Meta(ge=0, le=0)]
_NAMED = msgspec.json.Decoder(dict[str, msgspec.Raw])
_encoder = msgspec.json.Encoder()
encode = _encoder.encode


# --- out


def ndjson(table: pa.Table) -> bytes:
    """Rows as JSON objects, one per line."""
    return b"".join(_encoder.encode_lines(_rows(batch)) for batch in table.to_batches())


def to_json_rows(table: pa.Table) -> list[dict[str, Any]]:
    """Rows as objects for `encode`."""
    return list(chain.from_iterable(map(_rows, table.to_batches())))


def to_json_values(column: pa.Array) -> list[Any]:
    """A column's values as objects for `encode`."""
    kind, types = column.type, pa.types
    if types.is_map(kind):

        def pair_values(pairs: pa.Array) -> list[Any]:
            return list(zip(*map(to_json_values, pairs.flatten()), strict=True))

        return _list_values(map_pairs(column), pair_values)
    if types.is_struct(kind):
        rows = _dicts(kind.names, column.flatten())
        return [row if is_there else None for row, is_there in zip(rows, column.is_valid().to_pylist(), strict=True)]
    if types.is_nested(kind):
        return _list_values(column, to_json_values)
    if is_textual(kind) and family(kind) != "binary":
        column = to_text(column)
    if types.is_floating(kind):
        column = column.cast(pa.float64())
    values: list[Any] = column.to_pylist()
    if types.is_floating(kind) and pc.all(pc.is_finite(column)).as_py() is False:
        named = {float("inf"): "Infinity", float("-inf"): "-Infinity"}
        return ["NaN" if value != value else named.get(value, value) for value in values]
    return values


def _list_values(column: pa.Array, convert: Callable[[pa.Array], list[Any]]) -> list[Any]:
    """Lists; `convert` is applied to the elements of all rows together."""
    elements = iter(convert(column.flatten()))
    return [None if size is None else list(islice(elements, size)) for size in pc.list_value_length(column).to_pylist()]


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    return _dicts(batch.schema.names, batch.columns)


def _dicts(names: Sequence[str], columns: Sequence[pa.Array]) -> list[dict[str, Any]]:
    if len(set(names)) < len(names):
        raise InvalidUsage(f"two fields have the same name, which JSON cannot express: {names}; use Arrow or Parquet")
    return [dict(zip(names, row, strict=True)) for row in zip(*map(to_json_values, columns), strict=True)]


# --- in


@contextmanager
def clear_errors(text: bytes = b"") -> Iterator[None]:
    """Replace msgspec's errors about this text that users would not understand by ValueError."""
    try:
        yield
    except msgspec.DecodeError as error:
        message = str(error)
        halves = (match[1] for match in _ESCAPE.finditer(text) if match[1])
        if (message == _TRUNCATED or _SURROGATE in message) and (half := next(halves, None)) is not None:
            raise ValueError(
                f"a text has {half.decode()}, half of a surrogate pair, which is not a character: write both halves or "
                "leave it out"
            ) from error
        if message == _TRUNCATED:
            raise ValueError("the JSON is not complete: a text, list or object is not closed") from error
        if (fraction := _FRACTION.match(message)) is not None:
            raise ValueError(f'a decimal with a point is written as text, as in "12.50"{fraction[1]}') from error
        if (not_whole := _NOT_ZERO.match(message)) is not None:
            raise ValueError(f"Expected `int`, got `float`{not_whole[1]}") from error
        raise


def keep_zeros(text: bytes) -> bytes:
    """JSON with `-0.0` instead of `-0`, whose sign msgspec loses. Raises ValueError if a number underflows to zero.

    A text without either, as most are, is returned as the same object.
    """
    if _ZEROS in text or any(pattern.search(text) for pattern in _SUSPECT):
        return _TEXT_OR_NUMBER.sub(_keep_zero, text)
    return text


def _keep_zero(match: re.Match[bytes]) -> bytes:
    token = match[0]
    if token == b"-0":
        return b"-0.0"
    if token[:1] != b'"' and underflows(token.decode()):
        raise ValueError(underflow_text(token.decode(), pa.float64()))
    return token


def _spell_names(text: bytes, fields: Iterable[pa.Field]) -> bytes:
    """JSON with the names that msgspec takes. A text without names that need it is returned as the same object."""
    return _TEXT.sub(_spell_name, text) if b"\\" in text and _has_odd_names(fields) else text


def _has_odd_names(fields: Iterable[pa.Field]) -> bool:
    """Whether a name at any depth has a quote or a backslash."""
    return any(
        field.name != field.name.translate(_SPELLED)
        or _has_odd_names(field.type.field(index) for index in range(field.type.num_fields))
        for field in fields
    )


def _spell_name(match: re.Match[bytes]) -> bytes:
    end = match[1]
    if end is None or b"\\" not in match[0]:
        return match[0]
    name = json.loads(match[0][: -len(end)], strict=False)
    return encode(name.translate(_SPELLED)) + end


class Absence(NamedTuple):
    """What happens to a column that a row omits: it has its default, or is null, unless it is `required`."""

    defaults: Mapping[str, pa.Scalar] = {}
    required: tuple[str, ...] = ()


def read_ndjson(
    data: bytes,
    schema: pa.Schema,
    rows_max: int,
    spend: Spend | None = None,
    absence: Absence = Absence(),  # noqa: B008
    *,
    has_minus_zero: bool = False,
) -> pa.Table:
    """Lines of JSON objects as a table of `schema`.

    `has_minus_zero`: accept `-0.0` as an integer, as in the output of `keep_zeros`.

    Raises InvalidUsage beyond `rows_max` rows, ValueError or an error of msgspec or Arrow if a line is invalid, and
    the errors of `spend`.
    """
    batches, count = [], 0
    for lines in _blocks(data, _widest(schema), spend):
        raw = _spell_names(lines, schema)
        block, columns = keep_zeros(raw), _Columns(spend)
        decoder = _decoder(schema, has_minus_zero or block is not raw, absence.required)
        with clear_errors(block):
            rows = decoder.decode_lines(block)
        count += len(rows)
        if count > rows_max:
            raise InvalidUsage(f"the body holds more than {rows_max} rows; send at most {rows_max} at once")
        batches.append(
            pa.RecordBatch.from_arrays(columns.children(rows, list(schema), absence.defaults), schema=schema)
        )
        check_names(block, columns.names)
    return pa.Table.from_batches(batches, schema)


def read_each(
    texts: Sequence[bytes], schema: pa.Schema, rows_max: int, spend: Spend, absence: Absence
) -> tuple[list[pa.Array], list[int], list[int | None]]:
    """NDJSON of several writers: the user's columns of `schema`, the multiplicities, and the row count of each text.

    `schema` is flat; its last two columns are the times and multiplicities. A count of None: the rows of the text are
    left out, because they are invalid or too many, contain a time, or contain a null where none is allowed. Raises as
    `read_ndjson` if an error cannot be attributed to one text.
    """
    bodies = [_cells(text, schema, rows_max, absence.required) for text in texts]
    columns = _transpose(bodies, len(schema))
    if refused := _refused_rows(columns, schema, absence.defaults):
        ends = list(accumulate(len(cells or ()) for cells in bodies))
        for number in {bisect_right(ends, row) for row in refused}:
            bodies[number] = None
        columns = _transpose(bodies, len(schema))
    *values, _, diffs = columns
    arrays = _Columns(spend).of_values(values, list(schema)[:-2], absence.defaults)
    filled = [1] * len(diffs) if _are_absent(diffs) else [1 if diff in (UNSET, None) else diff for diff in diffs]
    return arrays, filled, [None if cells is None else len(cells) for cells in bodies]


_Values: TypeAlias = tuple[Any, ...]


def _transpose(bodies: Sequence[list[_Values] | None], width: int) -> list[_Values]:
    """The values of each column, of all rows."""
    cells = list(chain.from_iterable(rows for rows in bodies if rows is not None))
    return list(zip(*cells, strict=True)) if cells else [()] * width


def _are_absent(values: _Values) -> bool:
    return values.count(UNSET) + values.count(None) == len(values)


def _refused_rows(columns: Sequence[_Values], schema: pa.Schema, defaults: Mapping[str, pa.Scalar]) -> set[int]:
    """The rows that contain a time, or a null where none is allowed."""
    times = columns[-2]
    refused: set[int] = set()
    if not _are_absent(times):
        refused.update(row for row, value in enumerate(times) if value is not UNSET and value is not None)
    for field, values in zip(list(schema)[:-2], columns, strict=False):
        if not field.nullable and (None in values or (UNSET in values and field.name not in defaults)):
            refused.update(row for row, value in enumerate(values) if value is None or value is UNSET)
    return refused


def _cells(text: bytes, schema: pa.Schema, rows_max: int, required: tuple[str, ...]) -> list[_Values] | None:
    """The values of each line of a text; None if it is invalid or has more lines."""
    try:
        raw = _spell_names(text, schema)
        block = keep_zeros(raw)
        cells = list(map(astuple, _decoder(schema, block is not raw, required).decode_lines(block)))
        values = list(chain.from_iterable(cells))
        check_names(block, len(values) - values.count(UNSET))
    except (InvalidUsage, *UNREADABLE):
        return None
    return None if len(cells) > rows_max else cells


def names_given(data: bytes, delete_column: str | None, spend: Spend | None = None) -> tuple[str, ...]:
    """The names that every line of JSON objects has, without the delete column; none without lines.

    Raises InvalidUsage if two lines have different names, ValueError or an error of msgspec if one is invalid, and the
    errors of `spend`.
    """
    rows: list[tuple[frozenset[str], bool]] = []
    distinct: dict[tuple[frozenset[str], bool], tuple[frozenset[str], bool]] = {}  # most lines have the same names
    has_delete_column = delete_column is None
    for block in _blocks(data, 0, spend):
        with clear_errors(block):
            lines = _NAMED.decode_lines(block)
        for line in lines:
            has_delete_column = has_delete_column or delete_column in line
            row = frozenset(line.keys() - {delete_column}), bytes(line.get(delete_column or "", b"")) == b"true"
            if row not in distinct and spend is not None:
                spend(_OBJECT_BYTES * (2 + len(line)))
            rows.append(distinct.setdefault(row, row))
    if rows and not has_delete_column:
        raise InvalidUsage(f"column {delete_column!r}, which marks the deletions, is absent from the rows")
    if (differing := find_differing_row(rows)) is not None:
        raise InvalidUsage(
            f"row {differing[0]} differs from others in whether it has column {differing[1]!r}; give all rows the same "
            "columns, with null for missing values, or name the columns of the rows with columns="
        )
    return tuple(next((names for names, is_deletion in rows if not is_deletion), rows[0][0] if rows else ()))


def names_of_lines(lines: bytes) -> list[frozenset[str]]:
    """The names that each line of JSON objects has. Raises ValueError or an error of msgspec if one is invalid."""
    with clear_errors(lines):
        return [frozenset(line) for line in _NAMED.decode_lines(lines)]


def select_fields(lines: bytes, names: Collection[str]) -> bytes:
    """Lines of JSON objects with only those of their fields that have these names. Raises as `read_ndjson`."""
    with clear_errors(lines):
        rows = _NAMED.decode_lines(lines)
    check_names(lines, sum(map(len, rows)))
    return _encoder.encode_lines({name: row[name] for name in row.keys() & names} for row in rows)


def read_cells(cells: pa.Array, field: pa.Field, spend: Spend | None = None) -> pa.Array:
    """Strings that hold JSON as values of a column. Raises the errors of `spend`."""
    decoder, widest = msgspec.json.Decoder(_type(field)), _widest([field])
    chunks = []
    for block in _cell_blocks(cells):
        texts, columns = block.to_pylist(), _Columns(spend)
        if _has_odd_names([field]):
            texts = [None if text is None else _spell_names(text.encode(), [field]).decode() for text in texts]
        joined = "\n".join(filter(None, texts)).encode()
        if keep_zeros(joined) is not joined:
            decoder = msgspec.json.Decoder(_type(field, True))
            texts = [None if text is None else keep_zeros(text.encode()) for text in texts]
        if spend is not None and (taken := objects_bytes(joined, widest)) > OBJECTS_BYTES:
            spend(taken)
        with clear_errors(joined):
            values = [None if text is None else decoder.decode(text) for text in texts]
        chunks.append(columns.column(values, field.type))
        check_names(joined, columns.names)
    return pa.concat_arrays(chunks) if chunks else pa.array([], field.type)


def _cell_blocks(cells: pa.Array) -> Iterator[pa.Array]:
    """The cells in blocks of about BLOCK_BYTES."""
    ends = pc.cumulative_sum(pc.cast(pc.fill_null(pc.binary_length(cells), 0), pa.int64()))
    start, bytes_before = 0, 0
    while start < len(cells):
        past = pc.index(pc.greater(ends[start:], bytes_before + BLOCK_BYTES), True).as_py()
        end = len(cells) if past < 0 else start + past + 1
        yield cells[start:end]
        start, bytes_before = end, ends[end - 1].as_py()


def _blocks(data: bytes, widest: int, spend: Spend | None) -> Iterator[bytes]:
    """Whole lines, about BLOCK_BYTES at a time, and fewer if their objects would take too much memory.

    The memory of a single line that exceeds this is spent.
    """
    start = 0
    while start < len(data):
        end = data.find(b"\n", start + BLOCK_BYTES) + 1 or len(data)
        yield from _halve(data[start:end], widest, spend)
        start = end


def _halve(block: bytes, widest: int, spend: Spend | None) -> Iterator[bytes]:
    if spend is None or (taken := objects_bytes(block, widest)) <= OBJECTS_BYTES:
        yield block
        return
    middle = block.find(b"\n", len(block) // 2) + 1 or block.rfind(b"\n", 0, len(block) - 1) + 1
    if 0 < middle < len(block):
        yield from _halve(block[:middle], widest, spend)
        yield from _halve(block[middle:], widest, spend)
    else:
        spend(taken)
        yield block


def objects_bytes(text: bytes, widest: int = 0) -> int:
    """A lower bound of the memory of the Python objects of a JSON text, if objects have at most `widest` fields."""
    values = (text.count(b",") + 1) * _VALUE_BYTES + text.count(b"[") * _LIST_BYTES
    return len(text) + values + text.count(b"{") * (_OBJECT_BYTES + widest * _FIELD_BYTES)


def _widest(fields: pa.Schema | Sequence[pa.Field]) -> int:
    """The largest number of fields that an object has at any depth."""
    most = len(fields)
    for field in fields:
        inner = [field.type.field(index) for index in range(field.type.num_fields)]
        most = max(most, _widest(inner) if inner else 0)
    return most


@lru_cache(DECODERS_MAX)
def _decoder(schema: pa.Schema, has_minus_zero: bool, required: tuple[str, ...]) -> msgspec.json.Decoder[Any]:
    """A decoder of rows of the schema."""
    return msgspec.json.Decoder(_struct([field.with_nullable(True) for field in schema], has_minus_zero, required))


def _struct(fields: Sequence[pa.Field], has_minus_zero: bool, required: tuple[str, ...] = ()) -> Any:
    """The type of objects that have these fields and no others. Nullable fields may be omitted, but for `required`."""
    names = {f"f{number}": field.name.translate(_SPELLED) for number, field in enumerate(fields)}
    kinds = [
        (name, _type(field, has_minus_zero) | UnsetType, UNSET)
        if field.nullable and field.name not in required
        else (name, _type(field, has_minus_zero))
        for name, field in zip(names, fields, strict=True)
    ]
    return msgspec.defstruct("Row", kinds, rename=names, forbid_unknown_fields=True, kw_only=True, gc=False)


def _type(field: pa.Field, has_minus_zero: bool = False) -> Any:
    """The type with which msgspec checks values of a field; with `has_minus_zero`, `-0.0` is an integer, too."""
    kind, types = field.type, pa.types

    def inner(child: pa.Field) -> Any:
        return _type(child, has_minus_zero)

    if types.is_map(kind):
        form: Any = list[tuple[inner(kind.key_field.with_nullable(False)), inner(kind.item_field)]]  # type: ignore[misc]
    elif types.is_struct(kind):
        form = _struct(list(kind), has_minus_zero)
    elif types.is_nested(kind):
        form = list[inner(kind.value_field)]  # type: ignore[misc]
        if types.is_fixed_size_list(kind):
            form = Annotated[form, msgspec.Meta(min_length=kind.list_size, max_length=kind.list_size)]
    else:
        form = _FLOAT if types.is_floating(kind) else _FLAT.get(family(kind), str)
        if types.is_decimal(kind):  # integers of any size are exact; fractions are written as text
            form = int | str
        if has_minus_zero and (types.is_decimal(kind) or types.is_integer(kind)):
            form = form | _ZERO_OF_INTEGERS
    return form | None if field.nullable else form


class _OutOfRange(ValueError):
    """A number that its type cannot hold."""


class _Columns:
    """Converts decoded values to columns, and counts the names of the decoded objects."""

    def __init__(self, spend: Spend | None = None) -> None:
        self.names = 0
        self._spend = spend

    def children(
        self, rows: Sequence[Any], fields: Sequence[pa.Field], defaults: Mapping[str, pa.Scalar] | None = None
    ) -> list[pa.Array]:
        """A column for each field of the objects; None is an object without fields."""
        blank = (UNSET,) * len(fields)
        cells = [blank if row is None else astuple(row) for row in rows]
        return self.of_values(list(zip(*cells, strict=True)) if cells else [()] * len(fields), fields, defaults)

    def of_values(
        self,
        columns: Sequence[tuple[Any, ...]],
        fields: Sequence[pa.Field],
        defaults: Mapping[str, pa.Scalar] | None = None,
    ) -> list[pa.Array]:
        """A column for each field, from its values in all rows; UNSET stands for an omitted one."""
        arrays = [self._child(values, field) for values, field in zip(columns, fields, strict=True)]
        if not defaults:
            return arrays
        return [
            _with_default(array, values, defaults.get(field.name))
            for array, values, field in zip(arrays, columns, fields, strict=True)
        ]

    def _child(self, values: tuple[Any, ...], field: pa.Field) -> pa.Array:
        missing = values.count(UNSET)
        self.names += len(values) - missing
        if missing == len(values):
            self._count(missing, field.type)
            return pa.nulls(missing, field.type)
        try:
            return self.column([None if v is UNSET else v for v in values] if missing else values, field.type)
        except _OutOfRange as error:
            raise _OutOfRange(f"column {field.name!r}: {error}") from error

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
            return build_lists(
                kind, ends, [self.column(keys, kind.key_type), self.column(items, kind.item_type)], empty
            )
        return build_lists(kind, ends, [self.column(flat, kind.value_type)], empty)

    def _count(self, values: int, kind: pa.DataType) -> None:
        if self._spend is not None:
            self._spend(values * fixed_bytes(kind))  # texts are not longer than the body


def check_names(text: bytes, names: int) -> None:
    """Refuse objects in `text` with a repeated name, of which msgspec keeps the last value. `names` were decoded.

    JSON has at most as many names as quotes before colons. Only if there are more than `names`, it is parsed again.
    """
    if text.count(b":") > names and text.translate(None, _BLANKS).count(b'":') > names:
        decoder, whole, place = json.JSONDecoder(object_pairs_hook=named_once), text.decode().strip(), 0
        while place < len(whole):
            place = _GAP.match(whole, decoder.raw_decode(whole, place)[1]).end()  # type: ignore[union-attr]


def _with_default(column: pa.Array, values: Sequence[Any], default: pa.Scalar | None) -> pa.Array:
    """The column, with its default where an object omits it."""
    if default is None or UNSET not in values:
        return column
    return pc.if_else(pa.array([value is UNSET for value in values]), default, column)


def _flat(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_floating(kind):
        return floats_of_numbers(values, kind)
    if is_textual(kind) and family(kind) != "binary":
        texts = [str(int(value)) if type(value) in (int, float) else value for value in values]
        return from_text(pa.array(texts, pa.string()), kind)
    try:
        return pa.array(values, kind)
    except (OverflowError, pa.ArrowInvalid) as error:
        if not pa.types.is_integer(kind):
            raise
        low = -(2 ** (kind.bit_width - 1)) if pa.types.is_signed_integer(kind) else 0
        beyond = (value for value in values if value is not None and not low <= value < low + 2**kind.bit_width)
        raise _OutOfRange(f"{next(beyond)} does not fit {kind}") from error


def decode_body(data: bytes, spend: Spend | None = None, *, is_exact: bool = False) -> Any:
    """The JSON of a body. Raises InvalidUsage, also for NaN and for numbers outside the range of doubles.

    `-0` is a float, which keeps its sign. `is_exact`: numbers are read with `EXACT_NUMBERS`, for keys. `spend` is
    called with the memory of its objects.
    """
    if spend is not None:
        spend(objects_bytes(data))
    numbers = EXACT_NUMBERS if is_exact else {"parse_float": _parse_float, "parse_int": signed_zero}
    try:
        return json.loads(data, object_pairs_hook=named_once, parse_constant=_refuse_constant, **numbers)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"the body cannot be read as JSON: {error}") from error


def rows_of_json(
    objects: list[Any],
    schema: pa.Schema,
    spend: Spend | None = None,
    absence: Absence = Absence(),  # noqa: B008
) -> pa.Table:
    """Rows from objects that `decode_body` returned. Raises as `read_ndjson`."""
    return read_ndjson(b"\n".join(map(encode, objects)), schema, len(objects), spend, absence, has_minus_zero=True)


def signed_zero(text: str) -> int | float:
    """A JSON integer; `-0` is a float, which keeps its sign. Raises ValueError if it is too long."""
    return -0.0 if text == "-0" else int(text)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON: write it as a text, {encode(text).decode()}")


def _parse_float(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:40]} is larger than any double")
    if number == 0 and underflows(text):
        raise ValueError(underflow_text(text, pa.float64()))
    return number
