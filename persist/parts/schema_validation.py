"""What a schema must be beyond what a shard can hold, before a shard begins with it or evolves to it.

These rules came later than shards did. So they are asked of what is new, and never of a shard that is there: it stays
readable and writable whatever its schema is.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import InvalidUsage
from persist.parts.column_types import has_stray_null
from persist.parts.constraint_checks import ask_more, check_sound, differ
from persist.parts.memory_size import row_bytes
from persist.parts.predicate import columns_of, parse
from persist.parts.shard_schema import DIFF, TIME, ShardSchema

FIELDS_MAX = 10_000  # of columns and of all that is within them
NAME_CHARS_MAX = 255
RESERVED = frozenset({TIME, DIFF, "_change_type", "_commit_version", "_commit_timestamp"})  # readers add them to rows
SCHEMA_BYTES_MAX = 1024 * 1024
FIXED_ROW_BYTES_MAX = 256 * 1024  # that every row takes, whatever is in it


def check_new(schema: ShardSchema) -> None:
    """Raise InvalidUsage unless a shard may begin with the schema."""
    _check_fields(list(schema.arrow))
    _check_sizes(schema)
    check_sound(schema)


def check_added(before: ShardSchema, after: ShardSchema) -> None:
    """Raise InvalidUsage unless a shard may get the columns, and the names, that `after` has and `before` has not."""
    fresh = [field for field in after.arrow if field.name not in before.arrow.names]
    _check_fields(fresh)
    _check_defaults(before, after)
    if fresh or after.arrow != before.arrow:
        _check_sizes(after)


def _check_defaults(before: ShardSchema, after: ShardSchema) -> None:
    """Raise InvalidUsage where a new column has a default with nulls where its type allows none: no file holds it."""
    if after.is_plain:
        return
    for name, default in after.defaults.items():
        is_new = after.id_of[name] not in before.name_of
        if is_new and has_stray_null(pa.repeat(default, 1), after.arrow.field(name)):
            raise InvalidUsage(
                f"the default of column {name!r} has a null where {after.arrow.field(name).type} allows none; give a "
                "whole value"
            )


def check_kept(before: ShardSchema, after: ShardSchema) -> None:
    """Raise InvalidUsage where columns change in a way that changes what is asked of rows, or makes a check senseless.

    What is asked of one column alone goes with it.
    """
    if differ(after, before):
        raise InvalidUsage("the columns and the constraints of a shard change one after the other: use set_constraints")
    _check_named(before, after)
    try:
        check_sound(after)
    except InvalidUsage as error:
        raise InvalidUsage(f"{error.message}; take the check away first, or set it anew") from error


def _check_named(before: ShardSchema, after: ShardSchema) -> None:
    """Raise InvalidUsage where a name in a check is another column's afterwards, or no column's: swapped, or dropped.

    A check knows columns by their names alone. Where both schemas are plain, a name stays with its column.
    """
    if after.is_plain:
        return
    for check in after.details.checks:
        for name in columns_of(parse(check.where)):
            if name in before.id_of and after.id_of.get(name) != before.id_of[name]:
                raise InvalidUsage(
                    f"the check {check.name!r} names column {name!r}: take it away first, and set it anew by the new "
                    "name"
                )


def takes_names(before: ShardSchema, after: ShardSchema) -> bool:
    """Whether a name that a column has before is no column's afterwards, or another one's."""
    return not after.is_plain and any(after.id_of.get(name) != number for name, number in before.id_of.items())


def check_policy(before: ShardSchema, after: ShardSchema, column: str | None) -> None:
    """Raise InvalidUsage where the column by which a policy of rows goes (None: by none) is dropped or renamed."""
    if column is None or column not in before.id_of or after.is_plain:
        return
    if after.name_of.get(before.id_of[column]) != column:
        raise InvalidUsage(f"a policy of rows goes by column {column!r}: change the policy first, or leave the column")


def check_constrained(before: ShardSchema, after: ShardSchema, *, is_looked_at: bool) -> None:
    """Raise InvalidUsage unless the schemas differ in constraints alone, and the contents were looked at for more."""
    if after.with_details(unique=False, not_null=(), checks=()) != before.with_details(
        unique=False, not_null=(), checks=()
    ) or not after.arrow.equals(before.arrow):
        raise InvalidUsage("the constraints of a shard change without its columns: change those by evolve_schema")
    if ask_more(after, before) and not is_looked_at:
        raise InvalidUsage(
            "constraints that ask more than before need the upper of which the contents were looked at: use "
            "set_constraints"
        )
    check_sound(after)


def _check_fields(columns: list[pa.Field]) -> None:
    for column in columns:
        for field in _all(column):
            _check_name(field.name, column.name, is_column=field is column)
            if pa.types.is_struct(field.type):
                _check_twins(field, column.name)
            if pa.types.is_timestamp(field.type) and field.type.tz is not None:
                _check_zone(field.type, column.name)


def _check_sizes(schema: ShardSchema) -> None:
    count = sum(1 for column in schema.arrow for _ in _all(column))
    if count > FIELDS_MAX:
        raise InvalidUsage(f"the schema has {count} fields at all depths; a shard has at most {FIELDS_MAX}")
    nbytes = len(schema.to_record().arrow)
    if nbytes > SCHEMA_BYTES_MAX:
        raise InvalidUsage(
            f"the schema is too large, it takes {nbytes} bytes and at most {SCHEMA_BYTES_MAX} are kept; make names "
            "shorter or columns fewer"
        )
    fixed = row_bytes(schema.arrow)
    if fixed > FIXED_ROW_BYTES_MAX:
        raise InvalidUsage(
            f"a row of these columns takes {fixed} bytes whatever is in it; at most {FIXED_ROW_BYTES_MAX} are taken: "
            "use binary or list for what has a fixed size"
        )


def _all(field: pa.Field) -> Iterator[pa.Field]:
    """A field and all that is within it. Its depth is bounded by then."""
    yield field
    for index in range(field.type.num_fields):
        yield from _all(field.type.field(index))


def _check_name(name: str, column: str, *, is_column: bool) -> None:
    if is_column and name.lower() in RESERVED:
        raise InvalidUsage(f"column name {name!r} is reserved: readers add a column of that name; take another one")
    what = "a column name" if is_column else f"a name within column {column!r:.100}"
    if len(name) > NAME_CHARS_MAX:
        raise InvalidUsage(f"{what} has {len(name)} characters; at most {NAME_CHARS_MAX} are taken")
    if any(unicodedata.category(one) in ("Cc", "Cs") for one in name):
        raise InvalidUsage(f"{what}, {name!r:.300}, has a control character; leave it out")


def _check_twins(field: pa.Field, column: str) -> None:
    names = [field.type.field(index).name for index in range(field.type.num_fields)]
    if len(set(names)) < len(names):
        twin = next(name for name in names if names.count(name) > 1)
        raise InvalidUsage(f"within column {column!r:.100} two fields of a struct are called {twin!r:.100}; rename one")


def _check_zone(kind: pa.DataType, column: str) -> None:
    """Refuse a time zone that Arrow does not find: it would be missed by the first reader who wants its days."""
    try:
        pc.hour(pa.array([0], kind))
    except (pa.ArrowException, ValueError) as error:
        raise InvalidUsage(
            f"column {column!r:.100} is {str(kind)!r:.100}, of which the time zone is not known; use one of the IANA "
            "names, such as UTC or Europe/Berlin"
        ) from error
