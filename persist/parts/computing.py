"""Values of columns that are computed from other columns of the same rows."""

from __future__ import annotations

import pickle
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import InvalidUsage
from persist.parts.column_types import conform_column
from persist.parts.digest import digest_of_rows
from persist.parts.given import column_of
from persist.parts.schema import DIFF

PICKLED = 5  # the protocol of pickle: that of what is asked is the same in every process
TOLD_BYTES = 16
Value: TypeAlias = Any  # a value, or a `pyarrow.compute.Expression` over the columns of the row


def computed(name: str, value: Value, kind: pa.DataType, rows: pa.Table) -> pa.ChunkedArray:
    """The values of the column `name`, one for each row, of its type. Raises InvalidUsage where one does not fit it."""
    if not isinstance(value, pc.Expression):
        whole = _single(name, value, kind).take(pa.array(np.zeros(len(rows), np.int64)))
        return pa.chunked_array([whole], kind)
    return conform_column(_projected(name, value, rows), pa.field(name, kind))


def told(name: str, value: Value, kind: pa.DataType | None = None) -> str:
    """A digest of a value of a column, or of an expression with all that it has. Raises InvalidUsage: it does not fit.

    `repr` leaves out the middle of long lists, and the types of numbers.
    """
    if isinstance(value, pc.Expression):
        return blake2b(pickle.dumps(value, protocol=PICKLED), digest_size=TOLD_BYTES).hexdigest()
    column = pa.array([value]) if kind is None else _single(name, value, kind)
    return str(digest_of_rows(counted(pa.table({name: column}))))


def counted(rows: pa.Table) -> pa.Table:
    """The rows, each there once."""
    return rows.append_column(
        pa.field(DIFF, pa.int64(), nullable=False), pa.repeat(pa.scalar(1, pa.int64()), len(rows))
    )


def _single(name: str, value: Any, kind: pa.DataType) -> pa.Array:
    """One plain value, or a scalar of Arrow, as a column."""
    if isinstance(value, pa.Scalar):
        return conform_column(pa.repeat(value, 1), pa.field(name, kind))
    return column_of(name, [value], kind)


def truths(condition: pc.Expression, rows: pa.Table) -> pa.ChunkedArray:
    """For each row whether the condition is true; null is not. Raises InvalidUsage."""
    found = _projected("condition", condition, rows)
    if not pa.types.is_boolean(found.type):
        raise InvalidUsage(f"the condition {condition!s:.200} is {found.type}, neither true nor false")
    return found.fill_null(False)


def _projected(name: str, value: pc.Expression, rows: pa.Table) -> pa.ChunkedArray:
    # Loaded where it is used: it loads pandas where that is installed, which is a third of the start of a command.
    from pyarrow.acero import Declaration, ProjectNodeOptions, TableSourceNodeOptions

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
