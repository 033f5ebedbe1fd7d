"""Arrow expressions that another engine has made: which columns they need, which rows match, which row groups may.

What an expression says is not looked at: Arrow itself is asked. Of row groups it tells by what is known of a column:
all its values lie between two bounds, or are null. Where nothing is known of a column (floats, whose bounds leave out
NaN; columns within others), whatever it holds may match.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from persist.parts.files import Keeps
from persist.parts.keycodec import BOUND_BYTES_MAX, decode_key
from persist.parts.schema import ShardSchema

_NO_VALUE = (pa.ArrowException, TypeError, ValueError, OverflowError)  # what a bound that does not fit its column gives

_BY_NUMBER = "FieldPath"  # how Arrow writes a column that an expression takes by its place
_IN = "is_in("
_NOT = "invert("
_ROW = "__row"

Shown: TypeAlias = Sequence[str] | Mapping[str, Any] | None  # names, or expressions by names; None: all


def needed(kinds: pa.Schema, shown: Shown, expression: Any) -> tuple[list[str], list[str]]:
    """The columns that are needed to show these, and those that are needed to tell which rows match as well.

    Raises InvalidUsage where there is no such column, or Arrow does not compare so.
    """
    rows = ds.InMemoryDataset(kinds.empty_table())
    try:
        rows.scanner(columns=shown if isinstance(shown, Mapping | None) else list(shown), filter=expression)
    except (pa.ArrowException, TypeError, KeyError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise InvalidUsage(f"columns or filter do not fit the columns {', '.join(kinds.names)}: {why}") from error
    if shown is None:
        return kinds.names, kinds.names
    by_name = list(shown.values()) if isinstance(shown, Mapping) else [pc.field(name) for name in shown]
    for_shown = [name for name in kinds.names if any(_needs(kinds, one, name) for one in by_name)]
    if expression is None:
        return for_shown, for_shown
    return for_shown, [name for name in kinds.names if name in for_shown or _needs(kinds, expression, name)]


def _needs(kinds: pa.Schema, expression: Any, name: str) -> bool:
    """Whether an expression looks at a column. Where it is not told, it does."""
    text = str(expression)
    if _BY_NUMBER in text:
        return True
    if name not in text:
        return False
    without = ds.InMemoryDataset(kinds.remove(kinds.get_field_index(name)).empty_table())
    try:
        without.scanner(columns={"_": expression})
    except pa.ArrowException:
        return True
    return False


def matching(table: pa.Table, expression: Any) -> pa.Table:
    """The rows of a table for which an expression is true.

    To engines of SQL 0.0 is -0.0, also in `IN (0.0, 1.0)`. Arrow looks for members of a set by their bits.
    """
    text = str(expression)
    if not any(_has_floats(field.type) for field in table.schema) or _IN not in text or _NOT in text:
        return table.filter(expression)
    numbered = table.append_column(_ROW, pa.array(np.arange(len(table))))
    found = [_with_zeros(numbered, zero).filter(expression).column(_ROW).to_numpy() for zero in (0.0, -0.0)]
    return table.take(pa.array(np.union1d(*found)))


def _has_floats(kind: Any) -> bool:
    """Whether a value has floats that an expression may look at: those of lists and maps it does not."""
    if pa.types.is_struct(kind):
        return any(_has_floats(kind.field(number).type) for number in range(kind.num_fields))
    return bool(pa.types.is_floating(kind))


def _with_zeros(table: pa.Table, zero: float) -> pa.Table:
    """The same rows, with this zero for either of the two."""
    for place, field in enumerate(table.schema):
        if _has_floats(field.type):
            chunks = [_zeroed(chunk, zero) for chunk in table.column(place).chunks]
            table = table.set_column(place, field, pa.chunked_array(chunks, field.type))
    return table


def _zeroed(values: pa.Array, zero: float) -> pa.Array:
    kind = values.type
    if pa.types.is_struct(kind):
        fields = [kind.field(number) for number in range(kind.num_fields)]
        inner = [_zeroed(values.field(number), zero) for number in range(kind.num_fields)]
        return pa.StructArray.from_arrays(inner, fields=fields, mask=values.is_null())
    if not pa.types.is_floating(kind):
        return values
    return pc.if_else(pc.equal(values, pa.scalar(0.0, kind)), pa.scalar(zero, kind), values)


class MayMatch:
    """Whether rows of which these statistics tell may match an expression over the columns `kinds`.

    It says no only where no row does, by the rules of Arrow. It is a `persist.parts.files.Keeps`. Thread-safe.
    """

    def __init__(self, expression: Any, kinds: pa.Schema) -> None:
        self._expression = expression
        self._kinds = kinds
        self._format = ds.ParquetFileFormat()
        self._files = pyarrow.fs.LocalFileSystem()

    def __call__(self, statistics: dict[str, Any]) -> bool:
        told = ((field, statistics.get(field.name)) for field in self._kinds if is_bounded(field.type))
        known = [found for field, one in told if one is not None and (found := _known(field, one)) is not None]
        if not known:
            return True
        # Arrow leaves out files of a dataset by what is known of them, and opens none: this one is never there.
        file = self._format.make_fragment("rows", self._files, partition_expression=reduce(and_, known))
        rows = ds.FileSystemDataset([file], self._kinds, self._format, self._files)
        try:
            return any(True for _ in rows.get_fragments(filter=self._expression))
        except pa.ArrowException:  # it fails on these rows, or does not: who reads them is told
            return True


class Bounds:
    """What the bounds of a part tell of its first key column, in the form of Parquet's statistics."""

    has_min_max = True
    has_null_count = True
    null_count = 0

    def __init__(self, least: pa.Scalar, most: pa.Scalar) -> None:
        self.min = least
        self.max = most


def may_match(runs: Iterable[Run], schema: ShardSchema, keeps: Keeps) -> Iterator[Run]:
    """The runs without the parts that cannot have rows that are kept, by the bounds of their keys alone."""
    for run in runs:
        parts = tuple(part for part in run.parts if keeps(_bounds(part, schema)))
        if parts:
            yield run if len(parts) == len(run.parts) else replace(run, parts=parts)


def is_bounded(kind: Any) -> bool:
    """Types whose order is the same for Arrow and in the statistics of Parquet, of which these leave nothing out."""
    types = pa.types
    if types.is_timestamp(kind):
        return bool(kind.unit != "ns")  # which Python's own times cannot tell
    is_text = types.is_string(kind) or types.is_large_string(kind)
    return bool(types.is_signed_integer(kind) or is_text or types.is_date32(kind) or types.is_decimal128(kind))


def _known(field: pa.Field, statistics: Any) -> Any:
    """What holds for each value of a column; None: nothing is known."""
    column = pc.field(field.name)
    if not statistics.has_null_count:
        return None
    try:
        if not statistics.has_min_max:
            return column.is_null() if statistics.num_values == 0 and statistics.null_count else None
        least, most = (_scalar(value, field.type) for value in (statistics.min, statistics.max))
    except _NO_VALUE:
        return None
    if not statistics.null_count:
        return (column >= least) & (column <= most)
    return ((column >= least) | column.is_null()) & ((column <= most) | column.is_null())  # each by itself, for Arrow


def _scalar(value: Any, kind: Any) -> pa.Scalar:
    return value.cast(kind) if isinstance(value, pa.Scalar) else pa.scalar(value, kind)


def _bounds(part: Part, schema: ShardSchema) -> dict[str, Any]:
    """What is known of the first key column of a part: nothing where a bound is no key, or begins with null."""
    if part.key_upper is None or max(len(part.key_lower), len(part.key_upper)) >= BOUND_BYTES_MAX:
        return {}
    try:
        bounds: Sequence[tuple[Any, ...]] = [decode_key(bound, schema) for bound in (part.key_lower, part.key_upper)]
    except Corruption:
        return {}
    if not all(bounds) or not all(values[0].is_valid for values in bounds):
        return {}
    return {schema.key[0]: Bounds(bounds[0][0], bounds[1][0])}
