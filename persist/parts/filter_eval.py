"""Evaluation of filters, exactly on rows and conservatively on key ranges and row groups; Arrow expressions."""

from __future__ import annotations

import datetime as dt
import decimal
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs

from persist.core.batch import Part, Run
from persist.core.errors import Corruption, InvalidUsage
from persist.core.record import replace
from persist.parts import predicate as p
from persist.parts.column_types import family
from persist.parts.key_encoding import ALL_KEYS, BOUND_BYTES_MAX, KeyRange, decode_key, encode_key, successor
from persist.parts.part_files import RowGroupFilter
from persist.parts.shard_schema import ShardSchema

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
FLOAT_EXACT, DOUBLE_EXACT = 2**24, 2**53
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}\Z")
_EPOCH = dt.datetime(1970, 1, 1)  # noqa: DTZ001 - a zone is added if needed
_DIGITS = {"s": -6, "ms": -3, "us": 0, "ns": 3}  # decimal digits of a unit relative to microseconds
_LOCAL = re.compile(r"\d{4}-\d{2}-\d{2}[ T]\d{2}:\d{2}:\d{2}(\.\d{1,6})?\Z")
_OFFSET = re.compile(r"(.*?)(Z|[+-]\d{2}:\d{2})\Z")
_COMPARE = {
    "=": pc.equal,
    "<>": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
_INVALID_BOUND = (pa.ArrowException, TypeError, ValueError, OverflowError)  # raised if a bound does not fit its column
_BY_POSITION = "FieldPath"  # how Arrow prints a column that an expression refers to by position
_IN = "is_in("
_NOT = "invert("
_ROW = "__row"

Projection: TypeAlias = Sequence[str] | Mapping[str, Any] | None  # names, or expressions by names; None: all


@dataclass(frozen=True)
class Filter:
    """A validated predicate over the columns of a shard: Spark evaluates every comparison in the same way."""

    predicate: p.Predicate
    schema: ShardSchema

    @classmethod
    def of(cls, text: str, schema: ShardSchema, sides: tuple[str, ...] = ()) -> Filter:
        """`sides`: see `parse`. Raises InvalidUsage naming the column or comparison that is not supported."""
        parsed = p.parse(text, sides)
        for name in p.columns_of(parsed):
            if name not in schema.arrow.names:
                if any(name == old for old, _ in schema.former):
                    raise schema.no_column(name, "where: ")
                raise InvalidUsage(
                    f"where names {name!r}, which the shard does not have; it has {', '.join(schema.arrow.names)}"
                )
        checked = cls(parsed, schema)
        checked.apply(schema.arrow.empty_table())
        return checked

    @property
    def columns(self) -> list[str]:
        return p.columns_of(self.predicate)

    def apply(self, table: pa.Table) -> pa.Table:
        """The rows for which the predicate is true."""
        return table.filter(self.truth(table))

    def truth(self, table: pa.Table) -> pa.ChunkedArray:
        """For each row whether the predicate is true, false or null."""
        return self._rows(self.predicate, table)

    def key_range(self) -> KeyRange:
        """A range that contains all matching keys, and possibly others."""
        conjuncts = p.conjuncts(self.predicate)
        prefix: tuple[Any, ...] = ()
        wanted = ALL_KEYS
        for name in self.schema.key:
            kind = self.schema.arrow.field(name).type
            if not _is_ordered(kind):
                break
            leaves = (node for node in conjuncts if not isinstance(node, (p.Not, p.And, p.Or)) and node.column == name)
            exact = None
            for low, high in filter(None, (_bounds(node, kind) for node in leaves)):
                lower = None if low is None else self._encode((*prefix, low))
                upper = None if high is None else successor(self._encode((*prefix, high), kind))
                wanted = wanted.meet(KeyRange(lower, upper))
                exact = low if low is not None and low == high and not isinstance(high, _Prefix) else exact
            if exact is None:
                break
            prefix = (*prefix, exact)
        return wanted

    def may_match(self, statistics: dict[str, Any]) -> bool:
        """Whether a row group with these column statistics (Parquet's) may have a matching row."""
        return self._may(self.predicate, statistics)

    def _encode(self, values: tuple[Any, ...], kind: Any = None) -> bytes:
        last = values[-1]
        if isinstance(last, _Prefix):
            return encode_key(self.schema, (*values[:-1], last.text))[: -len(b"\x00\x00")]
        return encode_key(self.schema, values)

    def _rows(self, node: p.Predicate, table: pa.Table) -> Any:
        if isinstance(node, p.Not):
            return pc.invert(self._rows(node.operand, table))
        if isinstance(node, (p.And, p.Or)):
            join = pc.and_kleene if isinstance(node, p.And) else pc.or_kleene
            return reduce(join, (self._rows(operand, table) for operand in node.operands))
        column = table.column(node.column)
        if isinstance(node, p.CompareColumns):
            return _compare_columns(node, column, table.column(node.other))
        if isinstance(node, p.IsNull):
            return pc.is_null(column)
        if isinstance(node, p.Truth):
            _require(pa.types.is_boolean(column.type), node.column, column.type, "a condition")
            return column
        if isinstance(node, p.StartsWith):
            _require(family(column.type) == "string", node.column, column.type, "LIKE")
            return pc.starts_with(column, node.prefix)
        if isinstance(node, p.In):
            return reduce(pc.or_kleene, (_compare(node.column, column, "=", value) for value in node.values))
        return _compare(node.column, column, node.op, node.value)

    def _may(self, node: p.Predicate, statistics: dict[str, Any]) -> bool:
        if isinstance(node, p.And):
            return all(self._may(operand, statistics) for operand in node.operands)
        if isinstance(node, p.Or):
            return any(self._may(operand, statistics) for operand in node.operands)
        if isinstance(node, p.Not):
            return True
        kind = self.schema.arrow.field(node.column).type
        of_column = statistics.get(node.column)
        bounds = _bounds(node, kind) if _is_ordered(kind) else None
        if bounds is None or of_column is None or not of_column.has_min_max:
            return True
        low, high = bounds
        try:
            least, most = of_column.min, of_column.max
        except (ValueError, OverflowError):  # Python has no date of that year
            return True
        if low is not None and most < (low.text if isinstance(low, _Prefix) else low):
            return False
        if isinstance(high, _Prefix):
            return not least[: len(high.text)] > high.text
        return high is None or not least > high


@dataclass(frozen=True)
class _Prefix:
    """All texts that start with `text`."""

    text: str


def _is_ordered(kind: Any) -> bool:
    """Whether a type has the same order here, in key bytes and in Parquet statistics."""
    return bool(pa.types.is_signed_integer(kind) or family(kind) == "string" or kind == pa.date32())


def _bounds(node: p.Predicate, kind: Any) -> tuple[Any, Any] | None:
    """Inclusive bounds `(low, high)` of the values for which the node is true; None: unknown."""
    if isinstance(node, p.StartsWith):
        return _Prefix(node.prefix), _Prefix(node.prefix)
    if isinstance(node, p.In):
        values = [_literal_value(value, kind) for value in node.values if value.kind != "null"]
        return (min(values), max(values)) if values and None not in values else None
    if not isinstance(node, p.Compare) or node.op == "<>" or node.value.kind == "null":
        return None
    value = _literal_value(node.value, kind)
    if value is None:
        return None
    return (None if node.op in ("<", "<=") else value), (None if node.op in (">", ">=") else value)


def _literal_value(literal: p.Literal, kind: Any) -> Any:
    """The literal as a Python value of an ordered type; None if it is not a value of it."""
    if literal.kind == "integer" and pa.types.is_signed_integer(kind):
        number = int(literal.text)
        half = 2 ** (kind.bit_width - 1)
        return number if -half <= number < half else None
    if literal.kind == "string" and family(kind) == "string":
        return literal.text
    if literal.kind == "date" and kind == pa.date32():
        return dt.date.fromisoformat(literal.text)
    return None


def _require(holds: bool, name: str, kind: Any, what: str) -> None:
    if not holds:
        raise InvalidUsage(f"where cannot use {what} on column {name!r}, which is {kind}")


def _compare(name: str, column: Any, op: str, literal: p.Literal) -> Any:
    """The three-valued truth of `column op literal`, as in Spark."""
    if literal.kind == "null":
        if op == "<=>":
            return pc.is_null(column)
        return pa.chunked_array([pa.nulls(len(column), pa.bool_())])
    column, value, is_float = _comparable(name, column, literal)
    truth = _COMPARE["=" if op == "<=>" else op](column, value)
    if is_float and op in (">", ">="):
        truth = pc.or_kleene(truth, pc.is_nan(column))
    return pc.fill_null(truth, False) if op == "<=>" else truth


def _compare_columns(node: p.CompareColumns, first: Any, second: Any) -> Any:
    """The three-valued truth of `first op second`, as in Spark. Raises InvalidUsage if they have no common type."""
    kind = _common_type(first.type, second.type)
    try:
        left, right = (column if kind is None else column.cast(kind) for column in (first, second))
    except pa.ArrowException:
        kind = None
    if kind is None:
        raise InvalidUsage(
            f"where cannot compare column {node.column!r}, which is {first.type}, with {node.other!r}, which is "
            f"{second.type}, exactly: cast one of them first"
        )
    if node.op == "<=>":
        return pc.or_(pc.and_(pc.is_null(left), pc.is_null(right)), pc.fill_null(_equal(left, right), False))
    if node.op in ("=", "<>"):
        equal = _equal(left, right)
        return equal if node.op == "=" else pc.invert(equal)
    less = _less(left, right) if node.op[0] == "<" else _less(right, left)
    return pc.or_kleene(less, _equal(left, right)) if node.op.endswith("=") else less


def _equal(left: Any, right: Any) -> Any:
    equal = pc.equal(left, right)
    if not pa.types.is_floating(left.type):
        return equal
    return pc.or_kleene(equal, pc.and_(pc.is_nan(left), pc.is_nan(right)))


def _less(left: Any, right: Any) -> Any:
    less = pc.less(left, right)
    if not pa.types.is_floating(left.type):
        return less
    return pc.or_kleene(less, pc.and_(pc.invert(pc.is_nan(left)), pc.is_nan(right)))


def _common_type(first: Any, second: Any) -> Any:
    """The type in which values of both types are compared without loss, if any."""
    types, kinds = pa.types, (first, second)
    if all(types.is_integer(kind) and kind != pa.uint64() for kind in kinds):
        return pa.int64()
    if all(map(types.is_floating, kinds)):
        return pa.float64()
    if all(family(kind) == "string" for kind in kinds):
        return pa.large_string()
    if all(map(types.is_date, kinds)):
        return pa.date32()
    if all(map(types.is_decimal, kinds)):
        whole, scale = max(kind.precision - kind.scale for kind in kinds), max(kind.scale for kind in kinds)
        return pa.decimal128(whole + scale, scale) if whole + scale <= p.DECIMAL_DIGITS_MAX else None
    if all(map(types.is_timestamp, kinds)) and (first.tz is None) == (second.tz is None):
        return pa.timestamp(max(first.unit, second.unit, key=list(_DIGITS).index), first.tz)
    is_other = types.is_boolean(first) or types.is_time(first) or types.is_binary(first) or first == pa.uint64()
    return first if is_other and first == second else None


def _comparable(name: str, column: Any, literal: p.Literal) -> tuple[Any, Any, bool]:
    """Both sides in a common type without loss, and whether it is a float. Raises InvalidUsage if there is none."""
    kind = column.type
    types = pa.types
    try:
        if types.is_integer(kind) and kind != pa.uint64() and literal.kind == "integer":
            number = int(literal.text)
            if INT64_MIN <= number <= INT64_MAX:
                return column.cast(pa.int64()), pa.scalar(number, pa.int64()), False
        if types.is_floating(kind) and literal.kind in ("integer", "decimal", "double"):
            exact = DOUBLE_EXACT if types.is_float64(kind) else FLOAT_EXACT
            if literal.kind != "integer" or abs(int(literal.text)) <= exact:
                return column.cast(pa.float64()), pa.scalar(float(literal.text), pa.float64()), True
        if types.is_decimal(kind) and literal.kind in ("integer", "decimal"):
            return (*_as_decimals(column, decimal.Decimal(literal.text)), False)
        if family(kind) == "string" and literal.kind == "string":
            return column.cast(pa.large_string()), pa.scalar(literal.text, pa.large_string()), False
        if types.is_boolean(kind) and literal.kind == "boolean":
            return column, pa.scalar(literal.text == "TRUE"), False
        if types.is_date(kind) and literal.kind == "date" and _DATE.match(literal.text):
            return column.cast(pa.date32()), pa.scalar(dt.date.fromisoformat(literal.text)), False
        if types.is_timestamp(kind) and literal.kind == ("local" if kind.tz is None else "instant"):
            moment = _parse_moment(literal)
            if moment is not None:
                return (*_as_instants(column, moment), False)
    except (pa.ArrowException, ValueError, OverflowError, decimal.DecimalException) as error:
        why = "" if isinstance(error, pa.ArrowException) else f": {error}"  # Arrow's message contains stored values
        raise InvalidUsage(f"where: {literal.text!r} does not fit column {name!r}{why}") from error
    raise InvalidUsage(
        f"where cannot compare column {name!r}, which is {kind}, with {literal.kind} {literal.text!r} exactly"
        f"{_remedy(kind)}"
    )


def _remedy(kind: Any) -> str:
    """A hint how to write literals of this type."""
    types = pa.types
    if types.is_date(kind):
        return ": write DATE '2024-01-31'"
    if types.is_timestamp(kind) and kind.tz is None:
        return ": write TIMESTAMP_NTZ '2024-01-31 12:00:00'"
    if types.is_timestamp(kind):
        return ": write TIMESTAMP '2024-01-31 12:00:00Z', with its zone"
    return ": write a text in single quotes" if family(kind) == "string" else ""


def _as_decimals(column: Any, value: decimal.Decimal) -> tuple[Any, Any]:
    """Both sides in a common decimal type."""
    digits, exponent = value.as_tuple().digits, -int(value.as_tuple().exponent)
    scale = max(column.type.scale, exponent)
    whole = max(column.type.precision - column.type.scale, len(digits) - exponent)
    if whole + scale > p.DECIMAL_DIGITS_MAX:
        raise ValueError(f"more than {p.DECIMAL_DIGITS_MAX} digits")
    common = pa.decimal128(max(1, whole + scale), scale)
    return column.cast(common), pa.scalar(value, common)


def _as_instants(column: Any, moment: dt.datetime) -> tuple[Any, Any]:
    """Both sides as integers of the column's unit, or as decimals if the literal is more precise."""
    micros = (moment - _EPOCH.replace(tzinfo=moment.tzinfo and dt.UTC)) // dt.timedelta(microseconds=1)
    counts = column.cast(pa.int64())
    exact = decimal.Decimal(micros).scaleb(_DIGITS[column.type.unit])
    if exact == exact.to_integral_value() and INT64_MIN <= exact <= INT64_MAX:
        return counts, pa.scalar(int(exact), pa.int64())
    return _as_decimals(counts.cast(pa.decimal128(19)), exact)  # int64 has 19 digits at most


def _parse_moment(literal: p.Literal) -> dt.datetime | None:
    if literal.kind == "local":
        return dt.datetime.fromisoformat(literal.text) if _LOCAL.match(literal.text) else None
    match = _OFFSET.match(literal.text)
    if match is None or not _LOCAL.match(match.group(1)):
        return None
    return dt.datetime.fromisoformat(literal.text)


# Arrow expressions, made by other engines, are opaque here: Arrow itself evaluates them. For row groups it uses the
# known facts about a column: its values are between two bounds, or null. Unknown columns (floats, whose bounds exclude
# NaN, and nested columns) may have any value.


def required_columns(schema: pa.Schema, shown: Projection, expression: Any) -> tuple[list[str], list[str]]:
    """The columns that the projection needs, and those that projection and filter need.

    Raises InvalidUsage if a column is unknown or Arrow does not support a comparison.
    """
    rows = ds.InMemoryDataset(schema.empty_table())
    try:
        rows.scanner(columns=shown if isinstance(shown, Mapping | None) else list(shown), filter=expression)
    except (pa.ArrowException, TypeError, KeyError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise InvalidUsage(f"columns or filter do not fit the columns {', '.join(schema.names)}: {why}") from error
    if shown is None:
        return schema.names, schema.names
    projected = list(shown.values()) if isinstance(shown, Mapping) else [pc.field(name) for name in shown]
    for_shown = [name for name in schema.names if any(_needs(schema, column, name) for column in projected)]
    if expression is None:
        return for_shown, for_shown
    return for_shown, [name for name in schema.names if name in for_shown or _needs(schema, expression, name)]


def _needs(schema: pa.Schema, expression: Any, name: str) -> bool:
    """Whether an expression depends on a column, or may depend on it."""
    text = str(expression)
    if _BY_POSITION in text:
        return True
    if name not in text:
        return False
    without = ds.InMemoryDataset(schema.remove(schema.get_field_index(name)).empty_table())
    try:
        without.scanner(columns={"_": expression})
    except pa.ArrowException:
        return True
    return False


def filter_rows(table: pa.Table, expression: Any) -> pa.Table:
    """The rows of a table for which an expression is true.

    For SQL engines 0.0 equals -0.0, also in `IN (0.0, 1.0)`. Arrow compares members of a set by their bits.
    """
    text = str(expression)
    if not any(has_floats(field.type) for field in table.schema) or _IN not in text or _NOT in text:
        return table.filter(expression)
    numbered = table.append_column(_ROW, pa.array(np.arange(len(table))))
    matches = [_with_zeros(numbered, zero).filter(expression).column(_ROW).to_numpy() for zero in (0.0, -0.0)]
    return table.take(pa.array(np.union1d(*matches)))


def has_floats(kind: Any) -> bool:
    """Whether values have floats that an expression can access, which excludes those in lists and maps."""
    if pa.types.is_struct(kind):
        return any(has_floats(kind.field(number).type) for number in range(kind.num_fields))
    return bool(pa.types.is_floating(kind))


def _with_zeros(table: pa.Table, zero: float) -> pa.Table:
    """The same rows, with 0.0 and -0.0 replaced by `zero`."""
    for place, field in enumerate(table.schema):
        if has_floats(field.type):
            chunks = [_replace_zeros(chunk, zero) for chunk in table.column(place).chunks]
            table = table.set_column(place, field, pa.chunked_array(chunks, field.type))
    return table


def _replace_zeros(values: pa.Array, zero: float) -> pa.Array:
    kind = values.type
    if pa.types.is_struct(kind):
        inner = [_replace_zeros(values.field(number), zero) for number in range(kind.num_fields)]
        return pa.StructArray.from_arrays(inner, fields=list(kind), mask=values.is_null())
    if not pa.types.is_floating(kind):
        return values
    return pc.if_else(pc.equal(values, pa.scalar(0.0, kind)), pa.scalar(zero, kind), values)


class ExpressionPruner:
    """Whether rows with given statistics may match an expression over the columns of a schema.

    False only if no row matches, by Arrow's rules. A `persist.parts.part_files.RowGroupFilter`. Thread-safe.
    """

    def __init__(self, expression: Any, schema: pa.Schema) -> None:
        self._expression = expression
        self._schema = schema
        self._format = ds.ParquetFileFormat()
        self._files = pyarrow.fs.LocalFileSystem()

    def __call__(self, statistics: dict[str, Any]) -> bool:
        columns = (field for field in self._schema if field.name in statistics and has_exact_statistics(field.type))
        known = [fact for field in columns if (fact := _fact(field, statistics[field.name])) is not None]
        if not known:
            return True
        # Arrow prunes files of a dataset by known facts without opening them: this file does not exist.
        file = self._format.make_fragment("rows", self._files, partition_expression=reduce(and_, known))
        rows = ds.FileSystemDataset([file], self._schema, self._format, self._files)
        try:
            return any(True for _ in rows.get_fragments(filter=self._expression))
        except pa.ArrowException:  # if the expression is invalid for these rows, reading them reports it
            return True


class KeyStatistics:
    """The bounds of the first key column of a part, in the form of Parquet's statistics."""

    has_min_max = True
    has_null_count = True
    null_count = 0

    def __init__(self, least: pa.Scalar, most: pa.Scalar) -> None:
        self.min = least
        self.max = most


def prune_runs(runs: Iterable[Run], schema: ShardSchema, keeps: RowGroupFilter) -> Iterator[Run]:
    """The runs without the parts that cannot have matching rows, by their key bounds."""
    for run in runs:
        parts = tuple(part for part in run.parts if keeps(_part_bounds(part, schema)))
        if parts:
            yield run if len(parts) == len(run.parts) else replace(run, parts=parts)


def has_exact_statistics(kind: Any) -> bool:
    """Whether Parquet's statistics of a type have Arrow's order and cover all values."""
    types = pa.types
    if types.is_timestamp(kind):
        return bool(kind.unit != "ns")  # Python's datetime has no nanoseconds
    is_text = types.is_string(kind) or types.is_large_string(kind)
    return bool(types.is_signed_integer(kind) or is_text or types.is_date32(kind) or types.is_decimal128(kind))


def _fact(field: pa.Field, statistics: Any) -> Any:
    """An expression that is true for each value of a column; None: nothing is known."""
    column = pc.field(field.name)
    if not statistics.has_null_count:
        return None
    try:
        if not statistics.has_min_max:
            return column.is_null() if statistics.num_values == 0 and statistics.null_count else None
        least, most = (_scalar(value, field.type) for value in (statistics.min, statistics.max))
    except _INVALID_BOUND:
        return None
    if not statistics.null_count:
        return (column >= least) & (column <= most)
    return ((column >= least) | column.is_null()) & ((column <= most) | column.is_null())  # the form that Arrow uses


def _scalar(value: Any, kind: Any) -> pa.Scalar:
    return value.cast(kind) if isinstance(value, pa.Scalar) else pa.scalar(value, kind)


def _part_bounds(part: Part, schema: ShardSchema) -> dict[str, Any]:
    """The statistics of the first key column of a part; empty if a bound is not a key or begins with null."""
    if part.key_upper is None or max(len(part.key_lower), len(part.key_upper)) >= BOUND_BYTES_MAX:
        return {}
    try:
        bounds: Sequence[tuple[Any, ...]] = [decode_key(bound, schema) for bound in (part.key_lower, part.key_upper)]
    except Corruption:
        return {}
    if not all(bounds) or not all(values[0].is_valid for values in bounds):
        return {}
    return {schema.key[0]: KeyStatistics(bounds[0][0], bounds[1][0])}
