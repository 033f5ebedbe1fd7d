"""Changes of a shard's columns by name, the schema they lead to, and values computed from other columns."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import InvalidUsage, shown
from persist.parts.column_types import conform_column, stored
from persist.parts.python_values import column_of
from persist.parts.row_stats import digest_of_rows
from persist.parts.schema_evolution import check_evolution
from persist.parts.shard_schema import DEFAULT_BYTES_MAX, DIFF, ShardSchema, encode_value

# Changes of a shard's columns by name, and the schema that they lead to.


CHANGES_MAX = 1_000


@dataclass(frozen=True)
class AddColumn:
    """A new value column, after another one (None: last). `default`: what rows have that are written without it."""

    name: str
    type: pa.DataType
    nullable: bool = True
    default: Any = None
    after: str | None = None


@dataclass(frozen=True)
class RenameColumn:
    """The column `name` is called `to` from here on."""

    name: str
    to: str


@dataclass(frozen=True)
class DropColumn:
    """A value column goes, with all its values."""

    name: str


@dataclass(frozen=True)
class MoveColumn:
    """A column is shown after another one (None: first)."""

    name: str
    after: str | None = None


@dataclass(frozen=True)
class WidenColumn:
    """A column gets a type that holds all that it held before."""

    name: str
    type: pa.DataType


@dataclass(frozen=True)
class RelaxColumn:
    """A column may hold nulls from here on."""

    name: str


Change: TypeAlias = AddColumn | RenameColumn | DropColumn | MoveColumn | WidenColumn | RelaxColumn


def altered(schema: ShardSchema, changes: Sequence[Change]) -> ShardSchema:
    """The schema after these changes, made one after the other.

    Where nullable columns are added and nothing else, a plain schema stays plain. Raises InvalidUsage where a change
    cannot be made; it names the column.
    """
    if not 0 < len(changes) <= CHANGES_MAX:
        raise InvalidUsage(f"there are {len(changes)} changes of the schema; give between 1 and {CHANGES_MAX}")
    only_adds = all(isinstance(one, AddColumn) and one.nullable and one.default is None for one in changes)
    work = _Work(schema)
    for change in changes:
        work.make(change)
    found = work.schema()
    if only_adds and schema.is_plain:
        found = ShardSchema(found.arrow, found.key)
    check_evolution(schema, found)
    return found


class _Work:
    """The columns of a schema while they are changed."""

    def __init__(self, schema: ShardSchema) -> None:
        self._before = schema
        self._fields = dict(zip(schema.ids, schema.arrow, strict=True))  # in their order
        self._key = [schema.id_of[name] for name in schema.key]
        self._next = schema.details.next_id or len(schema.arrow) + 1
        self._defaults = dict(schema.details.defaults)

    def schema(self) -> ShardSchema:
        details = replace(
            self._before.details,
            ids=tuple(self._fields),
            next_id=self._next,
            defaults=tuple((number, data) for number, data in self._defaults.items() if number in self._fields),
        )
        names = tuple(self._fields[number].name for number in self._key)
        return ShardSchema(pa.schema(list(self._fields.values())), names, details)

    def make(self, change: Change) -> None:
        if not isinstance(change, Change):
            raise InvalidUsage(
                f"a change of the schema is an AddColumn, RenameColumn or the like, not {shown(change)}; take one of "
                "persist.parts.schema_changes"
            )
        if isinstance(change, AddColumn):
            self._add(change)
        elif isinstance(change, RenameColumn):
            number = self._number(change.name)
            self._check_free(change.to)
            self._fields[number] = self._fields[number].with_name(change.to)
        elif isinstance(change, DropColumn):
            number = self._number(change.name)
            if number in self._key:
                raise InvalidUsage(
                    f"column {change.name!r} is a key column, which cannot be dropped; make another shard"
                )
            del self._fields[number]
        elif isinstance(change, MoveColumn):
            self._place(self._number(change.name), change.after, is_first=change.after is None)
        elif isinstance(change, WidenColumn):
            number = self._number(change.name)
            self._fields[number] = self._fields[number].with_type(_stored(change.name, change.type))
        else:
            number = self._number(change.name)
            if number in self._before.details.not_null:
                raise InvalidUsage(f"a constraint keeps nulls out of {change.name!r}: change it by set_constraints")
            self._fields[number] = self._fields[number].with_nullable(True)

    def _add(self, change: AddColumn) -> None:
        self._check_free(change.name)
        if not isinstance(change.nullable, bool):
            raise InvalidUsage(f"nullable of column {change.name!r} is True or False, not {shown(change.nullable)}")
        kind = _stored(change.name, change.type)
        number, self._next = self._next, self._next + 1
        self._fields[number] = pa.field(change.name, kind, change.nullable)
        if change.default is not None:
            data = encode_value(column_of(change.name, [change.default], kind)[0])
            if len(data) > DEFAULT_BYTES_MAX:
                raise InvalidUsage(
                    f"the default of column {change.name!r} takes {len(data)} bytes, and at most {DEFAULT_BYTES_MAX} "
                    "are kept; take a shorter one"
                )
            self._defaults[number] = data
        elif not change.nullable:
            raise InvalidUsage(f"column {change.name!r} is new, so it must allow nulls or have a default")
        if change.after is not None:
            self._place(number, change.after, is_first=False)

    def _place(self, number: int, after: str | None, *, is_first: bool) -> None:
        moved = self._fields[number]
        target = None if is_first or after is None else self._number(after)
        if target == number:
            raise InvalidUsage(f"column {moved.name!r} cannot stand after itself; name another column")
        rest = [(one, field) for one, field in self._fields.items() if one != number]
        at = 0 if target is None else next(place for place, (one, _) in enumerate(rest, start=1) if one == target)
        self._fields = dict([*rest[:at], (number, moved), *rest[at:]])

    def _number(self, name: str) -> int:
        for number, field in self._fields.items():
            if field.name == name:
                return number
        if not isinstance(name, str):
            raise InvalidUsage(f"a column is named by a text, not by {shown(name)}")
        raise self._before.no_column(name)

    def _check_free(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidUsage(f"a column is named by a text that is not empty, not by {shown(name)}")
        if not _is_unicode(name):
            raise InvalidUsage(f"the column name {shown(name)} is no Unicode text: it has half of a pair; leave it out")
        if any(field.name == name for field in self._fields.values()):
            raise InvalidUsage(f"there is a column {name!r} already; take another name")


def _stored(name: str, kind: object) -> Any:
    if not isinstance(kind, pa.DataType):
        raise InvalidUsage(f"the type of column {name!r} is an Arrow type such as pa.int64(), not {shown(kind)}")
    return stored(name, kind)


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


# Values of columns that are computed from other columns of the same rows.


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
    return str(digest_of_rows(with_diffs(pa.table({name: column}))))


def with_diffs(rows: pa.Table) -> pa.Table:
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
