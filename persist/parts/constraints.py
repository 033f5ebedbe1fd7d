"""What a shard asks of its rows beside their types: unique keys, columns without nulls, and checks.

They are asked of rows that are added, from the schema on that has them. `constrained` looks at rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from persist.core.errors import InvalidUsage, shown
from persist.parts.described import CHECKS_MAX, Check
from persist.parts.schema import ShardSchema

CHECK_NAME_CHARS_MAX = 128
CHECK_CHARS_MAX = 4_000  # of one predicate
_NAME = re.compile(r"[A-Za-z0-9_.-]+\Z")


@dataclass(frozen=True)
class Constraining:
    """How the constraints of a shard change: each kind as a whole. What is None stays as it is."""

    unique: bool | None = None
    not_null: tuple[str, ...] | None = None
    checks: tuple[Check, ...] | None = None

    @classmethod
    def of(cls, unique: Any = None, not_null: Any = None, checks: Any = None) -> Constraining:
        """Of what a caller gave: `not_null` is a list of columns, `checks` are predicates by their names.

        Raises InvalidUsage where something is none, or there is too much of it.
        """
        if unique is not None and type(unique) is not bool:
            raise InvalidUsage(f"unique is {shown(unique)}; it is true or false")
        return cls(
            unique,
            None if not_null is None else _columns(not_null),
            None if checks is None else _checks(checks),
        )

    def applied(self, schema: ShardSchema) -> ShardSchema:
        """The schema with these constraints. Raises InvalidUsage where it has no such column."""
        changes: dict[str, Any] = {}
        if self.unique is not None:
            changes["unique"] = self.unique
        if self.not_null is not None:
            names = schema.columns(self.not_null)
            # A column of Arrow without nulls never has one, and needs nothing more.
            changes["not_null"] = tuple(sorted(schema.id_of[n] for n in names if schema.arrow.field(n).nullable))
        if self.checks is not None:
            changes["checks"] = self.checks
        if all(getattr(schema.details, name) == value for name, value in changes.items()):
            return schema
        return schema.with_details(**changes)


def ask_more(after: ShardSchema, before: ShardSchema) -> bool:
    """Whether rows may break the constraints of one schema that do not break those of the one before it."""
    new, old = after.details, before.details
    return (
        (new.unique and not old.unique)
        or not set(new.not_null) <= set(old.not_null)
        or not {check.where for check in new.checks} <= {check.where for check in old.checks}
    )


def differ(after: ShardSchema, before: ShardSchema) -> bool:
    """Whether two schemas ask different things, but for what went with a column."""
    new, old = after.details, before.details
    not_null = [number for number in old.not_null if number in after.ids]
    return (new.unique, list(new.not_null), new.checks) != (old.unique, not_null, old.checks)


def without_constraints(schema: ShardSchema) -> ShardSchema:
    """The columns of a schema, with their ids and defaults, and nothing that is asked of rows."""
    return schema if schema.is_plain else schema.with_details(unique=False, not_null=(), checks=())


def not_null(schema: ShardSchema) -> list[str]:
    """The columns that take no null by a constraint, in schema order."""
    return [name for name, number in schema.id_of.items() if number in schema.details.not_null]


def constraints_json(schema: ShardSchema) -> dict[str, Any]:
    """The constraints of a schema as people are shown them: `unique`, `not_null`, and `checks` by their names."""
    return {
        "unique": schema.details.unique,
        "not_null": not_null(schema),
        "checks": {check.name: check.where for check in schema.details.checks},
    }


def _columns(names: Any) -> tuple[str, ...]:
    if isinstance(names, (str, bytes)) or not isinstance(names, Sequence):
        raise InvalidUsage(f"not_null is {shown(names)}; it is a list of columns")
    for name in names:
        if not isinstance(name, str):
            raise InvalidUsage(f"not_null names a column by {shown(name)}, which is no text")
    return tuple(names)


def _checks(given: Any) -> tuple[Check, ...]:
    pairs = given.items() if isinstance(given, Mapping) else given
    if isinstance(pairs, (str, bytes)) or not isinstance(pairs, Iterable):
        raise InvalidUsage(f"checks are {shown(given)}; they are predicates by their names")
    found = tuple(sorted(map(_check, pairs), key=lambda check: check.name))
    if len(found) > CHECKS_MAX:
        raise InvalidUsage(f"there are {len(found)} checks; a shard has at most {CHECKS_MAX}")
    names = [check.name for check in found]
    if twin := next((name for name in names if names.count(name) > 1), None):
        raise InvalidUsage(f"two checks are called {twin!r}; give one of them another name")
    return found


def _check(pair: Any) -> Check:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(one, str) for one in pair):
        raise InvalidUsage(f"a check is a name and a predicate, two texts, not {shown(pair)}")
    name, where = pair
    if len(name) > CHECK_NAME_CHARS_MAX or not _NAME.match(name):
        raise InvalidUsage(
            f"{name!r:.200} is no name of a check: it has 1 to {CHECK_NAME_CHARS_MAX} of A-Z a-z 0-9 . _ -"
        )
    if not 0 < len(where) <= CHECK_CHARS_MAX:
        raise InvalidUsage(f"check {name!r} has a predicate of {len(where)} characters; it has 1 to {CHECK_CHARS_MAX}")
    return Check(name, where)
