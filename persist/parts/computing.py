"""Values of columns that are computed from other columns of the same rows."""

from __future__ import annotations

from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.acero import Declaration, ProjectNodeOptions, TableSourceNodeOptions

from persist.core.errors import InvalidUsage
from persist.parts.given import column_of

Value: TypeAlias = Any  # a value, or a `pyarrow.compute.Expression` over the columns of the row


def computed(name: str, value: Value, kind: pa.DataType, rows: pa.Table) -> pa.ChunkedArray:
    """The values of the column `name`, one for each row, of its type. Raises InvalidUsage where one does not fit it."""
    if not isinstance(value, pc.Expression):
        one = column_of(name, [value], kind)
        return pa.chunked_array([pa.repeat(one[0], len(rows))], kind)
    found = _projected(name, value, rows)
    if found.type == kind:
        return found
    try:
        return found.cast(kind)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidUsage(
            f"column {name!r} is {kind}; what is set is {found.type} and does not fit: {error}"
        ) from error


def truths(condition: pc.Expression, rows: pa.Table) -> pa.ChunkedArray:
    """For each row whether the condition is true; null is not. Raises InvalidUsage."""
    found = _projected("condition", condition, rows)
    if not pa.types.is_boolean(found.type):
        raise InvalidUsage(f"the condition {condition!s:.200} is {found.type}, neither true nor false")
    return found.fill_null(False)


def _projected(name: str, value: pc.Expression, rows: pa.Table) -> pa.ChunkedArray:
    plan = Declaration.from_sequence(
        [
            Declaration("table_source", TableSourceNodeOptions(rows)),
            Declaration("project", ProjectNodeOptions([value], [name])),
        ]
    )
    try:
        return plan.to_table(use_threads=False).column(0)
    except (pa.ArrowException, KeyError, ValueError, TypeError) as error:
        raise InvalidUsage(f"the expression {value!s:.200} cannot be computed: {error}") from error
