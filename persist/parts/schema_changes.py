"""Changes of a shard's columns by name, the rules for new schemas, and values computed from other columns."""

from __future__ import annotations

import pickle
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import InvalidUsage, shown
from persist.parts.column_types import conform_column, has_forbidden_null, stored_type
from persist.parts.constraint_checks import are_stricter, check_compiles, constraints_differ
from persist.parts.memory_size import row_bytes
from persist.parts.predicate import columns_of, parse
from persist.parts.python_values import column_of
from persist.parts.row_stats import digest_of_rows
from persist.parts.schema_evolution import check_evolution
from persist.parts.shard_schema import DEFAULT_BYTES_MAX, DIFF, TIME, ShardSchema, encode_value

CHANGES_MAX = 1_000
FIELDS_MAX = 10_000  # of columns and all fields within them
NAME_CHARS_MAX = 255
RESERVED = frozenset({TIME, DIFF, "_change_type", "_commit_version", "_commit_timestamp"})  # readers add them to rows
SCHEMA_BYTES_MAX = 1024 * 1024
FIXED_ROW_BYTES_MAX = 256 * 1024  # that every row takes, whatever its values are
PICKLED = 5  # the pickle protocol for digests, which must be the same in every process
DIGEST_BYTES = 16

Value: TypeAlias = Any  # a value, or a `pyarrow.compute.Expression` over the columns of the row


@dataclass(frozen=True)
class AddColumn:
    """Add a value column after another one (None: last). `default` is its value in rows without it."""

    name: str
    type: pa.DataType
    nullable: bool = True
    default: Any = None
    after: str | None = None


@dataclass(frozen=True)
class RenameColumn:
    """Rename the column `name` to `to`."""

    name: str
    to: str


@dataclass(frozen=True)
class DropColumn:
    """Drop a value column with all its values."""

    name: str


@dataclass(frozen=True)
class MoveColumn:
    """Move a column after another one (None: first)."""

    name: str
    after: str | None = None


@dataclass(frozen=True)
class WidenColumn:
    """Change the type of a column to one that can hold all of its values."""

    name: str
    type: pa.DataType


@dataclass(frozen=True)
class RelaxColumn:
    """Allow nulls in a column."""

    name: str


Change: TypeAlias = AddColumn | RenameColumn | DropColumn | MoveColumn | WidenColumn | RelaxColumn


def apply_changes(schema: ShardSchema, changes: Sequence[Change]) -> ShardSchema:
    """The schema after these changes, in their order.

    A plain schema stays plain if only nullable columns are added. Raises InvalidUsage, naming the column, if a change
    is not possible.
    """
    if not 0 < len(changes) <= CHANGES_MAX:
        raise InvalidUsage(f"there are {len(changes)} changes of the schema; give between 1 and {CHANGES_MAX}")
    only_adds = all(isinstance(change, AddColumn) and change.nullable and change.default is None for change in changes)
    editor = _SchemaEditor(schema)
    for change in changes:
        editor.apply(change)
    changed = editor.schema()
    if only_adds and schema.is_plain:
        changed = ShardSchema(changed.arrow, changed.key)
    check_evolution(schema, changed)
    return changed


class _SchemaEditor:
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

    def apply(self, change: Change) -> None:
        if not isinstance(change, Change):
            raise InvalidUsage(
                f"a change of the schema is an AddColumn, RenameColumn or similar, not {shown(change)}; use one of "
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
                    f"column {change.name!r} is a key column, which cannot be dropped; create another shard"
                )
            del self._fields[number]
        elif isinstance(change, MoveColumn):
            self._place(self._number(change.name), change.after)
        elif isinstance(change, WidenColumn):
            number = self._number(change.name)
            self._fields[number] = self._fields[number].with_type(_checked_type(change.name, change.type))
        else:
            number = self._number(change.name)
            if number in self._before.details.not_null:
                raise InvalidUsage(f"a constraint forbids nulls in {change.name!r}: change it with set_constraints")
            self._fields[number] = self._fields[number].with_nullable(True)

    def _add(self, change: AddColumn) -> None:
        self._check_free(change.name)
        if not isinstance(change.nullable, bool):
            raise InvalidUsage(f"nullable of column {change.name!r} is True or False, not {shown(change.nullable)}")
        kind = _checked_type(change.name, change.type)
        number, self._next = self._next, self._next + 1
        self._fields[number] = pa.field(change.name, kind, change.nullable)
        if change.default is not None:
            data = encode_value(column_of(change.name, [change.default], kind)[0])
            if len(data) > DEFAULT_BYTES_MAX:
                raise InvalidUsage(
                    f"the default of column {change.name!r} takes {len(data)} bytes as an Arrow stream; the limit is "
                    f"{DEFAULT_BYTES_MAX}: use a shorter one"
                )
            self._defaults[number] = data
        elif not change.nullable:
            raise InvalidUsage(f"column {change.name!r} is new, so it must allow nulls or have a default")
        if change.after is not None:
            self._place(number, change.after)

    def _place(self, number: int, after: str | None) -> None:
        moved = self._fields[number]
        target = None if after is None else self._number(after)
        if target == number:
            raise InvalidUsage(f"column {moved.name!r} cannot be moved after itself; name another column")
        del self._fields[number]
        rest = list(self._fields.items())
        at = 0 if target is None else 1 + list(self._fields).index(target)
        self._fields = dict([*rest[:at], (number, moved), *rest[at:]])

    def _number(self, name: str) -> int:
        for number, field in self._fields.items():
            if field.name == name:
                return number
        if not isinstance(name, str):
            raise InvalidUsage(f"the name of a column is a text, not {shown(name)}")
        raise self._before.no_column(name)

    def _check_free(self, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidUsage(f"the name of a column is a text that is not empty, not {shown(name)}")
        if any(unicodedata.category(char) == "Cs" for char in name):
            raise InvalidUsage(f"the column name {shown(name)} has an unpaired surrogate; leave it out")
        if any(field.name == name for field in self._fields.values()):
            raise InvalidUsage(f"there is a column {name!r} already; use another name")


def _checked_type(name: str, kind: object) -> Any:
    if not isinstance(kind, pa.DataType):
        raise InvalidUsage(f"the type of column {name!r} is an Arrow type such as pa.int64(), not {shown(kind)}")
    return stored_type(name, kind)


def compute_column(name: str, value: Value, kind: pa.DataType, rows: pa.Table) -> pa.ChunkedArray:
    """The values of the column `name` for the rows, of its type. Raises InvalidUsage if one does not fit."""
    if not isinstance(value, pc.Expression):
        whole = _single(name, value, kind).take(pa.array(np.zeros(len(rows), np.int64)))
        return pa.chunked_array([whole], kind)
    return conform_column(_project(name, value, rows), pa.field(name, kind))


def value_digest(name: str, value: Value, kind: pa.DataType | None = None) -> str:
    """A digest of a value of a column, or of an expression. Raises InvalidUsage if the value does not fit.

    `repr` is not sufficient: it truncates long lists and omits the types of numbers.
    """
    if isinstance(value, pc.Expression):
        return blake2b(pickle.dumps(value, protocol=PICKLED), digest_size=DIGEST_BYTES).hexdigest()
    column = pa.array([value]) if kind is None else _single(name, value, kind)
    return str(digest_of_rows(with_diffs(pa.table({name: column}))))


def with_diffs(rows: pa.Table) -> pa.Table:
    """The rows with multiplicity 1."""
    return rows.append_column(
        pa.field(DIFF, pa.int64(), nullable=False), pa.repeat(pa.scalar(1, pa.int64()), len(rows))
    )


def _single(name: str, value: Any, kind: pa.DataType) -> pa.Array:
    """A Python value or an Arrow scalar as a column of one row."""
    if isinstance(value, pa.Scalar):
        return conform_column(pa.repeat(value, 1), pa.field(name, kind))
    return column_of(name, [value], kind)


def evaluate_condition(condition: pc.Expression, rows: pa.Table) -> pa.ChunkedArray:
    """For each row whether the condition is true, rather than false or null. Raises InvalidUsage."""
    truth = _project("condition", condition, rows)
    if not pa.types.is_boolean(truth.type):
        raise InvalidUsage(f"the condition {condition!s:.200} is {truth.type}, not boolean")
    return truth.fill_null(False)


def _project(name: str, value: pc.Expression, rows: pa.Table) -> pa.ChunkedArray:
    # Imported here, because it imports pandas if that is installed, which is a third of the start time of a command.
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


# The following rules are newer than some shards. They apply to new schemas only: an existing shard stays readable and
# writable whatever its schema is.


def check_new(schema: ShardSchema) -> None:
    """Raise InvalidUsage unless a shard may begin with the schema."""
    _check_fields(list(schema.arrow))
    _check_sizes(schema)
    check_compiles(schema)


def check_added(before: ShardSchema, after: ShardSchema) -> None:
    """Raise InvalidUsage unless the columns and names that `after` adds to `before` are allowed."""
    for field in after.arrow:
        was = _earlier(before, after, field.name)
        if was is None or was.name != field.name:
            _check_fields([field])
        elif not any(_unreadable_lists(was)):  # it may have become nullable, or have got fields
            _check_fixed_lists(field)
    _check_defaults(before, after)
    if after.arrow != before.arrow:
        _check_sizes(after)


def _earlier(before: ShardSchema, after: ShardSchema, name: str) -> pa.Field | None:
    """The column of `before` that is `name` afterwards; None: it is new, even if a dropped column had that name."""
    was = (name if name in before.id_of else None) if after.is_plain else before.name_of.get(after.id_of[name])
    return None if was is None else before.arrow.field(was)


def _check_defaults(before: ShardSchema, after: ShardSchema) -> None:
    """Raise InvalidUsage if a new column has a default with nulls where its type allows none: no file can hold it."""
    if after.is_plain:
        return
    for name, default in after.defaults.items():
        is_new = after.id_of[name] not in before.name_of
        if is_new and has_forbidden_null(pa.repeat(default, 1), after.arrow.field(name)):
            raise InvalidUsage(
                f"the default of column {name!r} has a null where {after.arrow.field(name).type} allows none; give a "
                "whole value"
            )


def check_kept(before: ShardSchema, after: ShardSchema) -> None:
    """Raise InvalidUsage if a change of columns also changes constraints, or makes a check invalid.

    Constraints of a single column are dropped with it.
    """
    if constraints_differ(after, before):
        raise InvalidUsage("the columns and the constraints of a shard must be changed separately: use set_constraints")
    _check_named(before, after)
    try:
        check_compiles(after)
    except InvalidUsage as error:
        raise InvalidUsage(f"{error.message}; remove the check first, or set it again") from error


def _check_named(before: ShardSchema, after: ShardSchema) -> None:
    """Raise InvalidUsage if a name in a check belongs to another column afterwards, or to none.

    A check refers to columns by their names. Between plain schemas names do not move.
    """
    if after.is_plain:
        return
    for check in after.details.checks:
        for name in columns_of(parse(check.where)):
            if name in before.id_of and after.id_of.get(name) != before.id_of[name]:
                raise InvalidUsage(
                    f"the check {check.name!r} refers to column {name!r}: remove it first, and set it again with the "
                    "new name"
                )


def frees_names(before: ShardSchema, after: ShardSchema) -> bool:
    """Whether a name of a column belongs to another column afterwards, or to none."""
    return not after.is_plain and any(after.id_of.get(name) != number for name, number in before.id_of.items())


def check_policy(before: ShardSchema, after: ShardSchema, column: str | None) -> None:
    """Raise InvalidUsage if the column of a row policy (None: no policy) is dropped or renamed."""
    if column is None or column not in before.id_of or after.is_plain:
        return
    if after.name_of.get(before.id_of[column]) != column:
        raise InvalidUsage(f"a row policy uses column {column!r}: change the policy first, or keep the column")


def differ_in_constraints(before: ShardSchema, after: ShardSchema) -> bool:
    """Whether the schemas differ in constraints only."""
    none: dict[str, Any] = {"unique": False, "not_null": (), "checks": ()}
    return constraints_differ(after, before) and after.with_details(**none) == before.with_details(**none)


def check_constrained(before: ShardSchema, after: ShardSchema, *, is_verified: bool) -> None:
    """Raise InvalidUsage unless constraints may change in this way. `is_verified`: the contents satisfy them."""
    if are_stricter(after, before) and not is_verified:
        raise InvalidUsage(
            "stricter constraints need the upper at which the contents were verified: use set_constraints"
        )
    check_compiles(after)


def _check_fields(columns: list[pa.Field]) -> None:
    for column in columns:
        _check_fixed_lists(column)
        for field in _all(column):
            _check_name(field.name, column.name, is_column=field is column)
            names = [field.type.field(index).name for index in range(field.type.num_fields)]
            if pa.types.is_struct(field.type) and len(set(names)) < len(names):
                repeated = next(name for name in names if names.count(name) > 1)
                raise InvalidUsage(f"column {column.name!r:.100} has two struct fields {repeated!r:.100}; rename one")
            if pa.types.is_timestamp(field.type) and field.type.tz is not None:
                _check_zone(field.type, column.name)


def _check_fixed_lists(column: pa.Field) -> None:
    for field in _unreadable_lists(column):
        raise InvalidUsage(
            f"column {column.name!r:.100} has a struct that may be null, whose field {field.name!r:.100} is a list of "
            "fixed size without null, which cannot be read from Parquet: let the field be null, or make it a list"
        )


def _unreadable_lists(field: pa.Field, is_hidden: bool = False) -> Iterator[pa.Field]:
    """The required lists of fixed size within structs that may be null.

    In Parquet they are empty below a null, and Arrow then fails: "Expected all lists to be of size". Below a list, a
    map or another list of fixed size there is no null that hides them. `is_hidden`: a struct around it may be null.
    """
    may_hide = pa.types.is_struct(field.type) and (field.nullable or is_hidden)
    for index in range(field.type.num_fields):
        child = field.type.field(index)
        if may_hide and not child.nullable and pa.types.is_fixed_size_list(child.type):
            yield child
        yield from _unreadable_lists(child, may_hide)


def _check_sizes(schema: ShardSchema) -> None:
    count = sum(1 for column in schema.arrow for _ in _all(column))
    if count > FIELDS_MAX:
        raise InvalidUsage(f"the schema has {count} fields at all depths; a shard has at most {FIELDS_MAX}")
    nbytes = len(schema.to_record().arrow)
    if nbytes > SCHEMA_BYTES_MAX:
        raise InvalidUsage(
            f"the schema takes {nbytes} bytes; the limit is {SCHEMA_BYTES_MAX}: use shorter names or fewer columns"
        )
    fixed = row_bytes(schema.arrow)
    if fixed > FIXED_ROW_BYTES_MAX:
        raise InvalidUsage(
            f"every row of these columns takes at least {fixed} bytes; the limit is {FIXED_ROW_BYTES_MAX}: use binary "
            "or list instead of types of fixed size"
        )


def _all(field: pa.Field) -> Iterator[pa.Field]:
    """A field and all fields within it, whose depth is limited already."""
    yield field
    for index in range(field.type.num_fields):
        yield from _all(field.type.field(index))


def _check_name(name: str, column: str, *, is_column: bool) -> None:
    if is_column and name.lower() in RESERVED:
        raise InvalidUsage(f"column name {name!r} is reserved: readers add a column of that name; use another one")
    what = "a column name" if is_column else f"a name within column {column!r:.100}"
    if is_column and not name:
        raise InvalidUsage("a column has an empty name, which no predicate can mention; give it a name")
    if len(name) > NAME_CHARS_MAX:
        raise InvalidUsage(f"{what} has {len(name)} characters; the limit is {NAME_CHARS_MAX}")
    if any(unicodedata.category(char) in ("Cc", "Cs") for char in name):
        raise InvalidUsage(f"{what}, {name!r:.300}, has a control character; leave it out")


def _check_zone(kind: pa.DataType, column: str) -> None:
    """Refuse a time zone that Arrow does not know: computing its days would fail later."""
    try:
        pc.hour(pa.array([0], kind))
    except (pa.ArrowException, ValueError) as error:
        raise InvalidUsage(
            f"column {column!r:.100} is {str(kind)!r:.100}, whose time zone is unknown; use an IANA name, such as UTC "
            "or Europe/Berlin"
        ) from error
