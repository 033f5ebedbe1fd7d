"""Constraints of a shard: unique keys, columns without nulls, checks; and the validation of rows against them.

Constraints apply to rows that are added, from the schema on that has them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import ConstraintViolated, InvalidUsage, shown
from persist.core.truncations_and_drops import Drops, RowDrop
from persist.parts.consolidate import Ints, consolidate, find_twins, join
from persist.parts.filter_eval import Filter
from persist.parts.key_encoding import distinct_keys, key_schema
from persist.parts.python_values import shown_values
from persist.parts.shard_schema import CHECKS_MAX, DIFF, SCHEMAS_KEPT_MAX, TIME, Check, ShardSchema
from persist.parts.value_order import Mask, one_chunk

CHECK_NAME_CHARS_MAX = 128
CHECK_CHARS_MAX = 4_000  # of one predicate
KEYS_SHOWN_MAX = 10  # of the keys that violate a constraint
KEY_ROWS_MAX = 1 << 20  # updates of one key that are held in memory; of a key with more only the first ones are checked
KEY_CHARS_MAX = 200  # of a key in a message
UNIQUE = "unique"  # the name of that constraint
_NAME = re.compile(r"[A-Za-z0-9_.-]+\Z")


@dataclass(frozen=True)
class ConstraintChange:
    """A change of the constraints of a shard. Each kind is replaced as a whole; None leaves it unchanged."""

    unique: bool | None = None
    not_null: tuple[str, ...] | None = None
    checks: tuple[Check, ...] | None = None

    @classmethod
    def of(cls, unique: Any = None, not_null: Any = None, checks: Any = None) -> ConstraintChange:
        """From a caller's arguments: `not_null` is a list of columns, `checks` are predicates by their names.

        Raises InvalidUsage if an argument is invalid or too large.
        """
        if unique is not None and type(unique) is not bool:
            raise InvalidUsage(f"unique must be true or false, not {shown(unique)}")
        return cls(
            unique,
            None if not_null is None else _parse_columns(not_null),
            None if checks is None else _parse_checks(checks),
        )

    def applied(self, schema: ShardSchema) -> ShardSchema:
        """The schema with these constraints. Raises InvalidUsage if it has no such column."""
        changes: dict[str, Any] = {}
        if self.unique is not None:
            changes["unique"] = self.unique
        if self.not_null is not None:
            names = schema.columns(self.not_null)
            # A column that is not nullable in Arrow needs no constraint.
            changes["not_null"] = tuple(sorted(schema.id_of[n] for n in names if schema.arrow.field(n).nullable))
        if self.checks is not None:
            changes["checks"] = self.checks
        if all(getattr(schema.details, name) == value for name, value in changes.items()):
            return schema
        return schema.with_details(**changes)


def are_stricter(after: ShardSchema, before: ShardSchema) -> bool:
    """Whether rows may violate the constraints of `after` that satisfy those of `before`."""
    new, old = after.details, before.details
    return (
        (new.unique and not old.unique)
        or not set(new.not_null) <= set(old.not_null)
        or not {check.where for check in new.checks} <= {check.where for check in old.checks}
    )


def constraints_differ(after: ShardSchema, before: ShardSchema) -> bool:
    """Whether two schemas have different constraints, ignoring those of dropped columns."""
    new, old = after.details, before.details
    not_null = [number for number in old.not_null if number in after.ids]
    return (new.unique, list(new.not_null), new.checks) != (old.unique, not_null, old.checks)


def without_constraints(schema: ShardSchema) -> ShardSchema:
    """The columns of a schema, with their ids and defaults, without constraints."""
    return schema if schema.is_plain else schema.with_details(unique=False, not_null=(), checks=())


def not_null(schema: ShardSchema) -> list[str]:
    """The columns with a constraint against nulls, in schema order."""
    return [name for name, number in schema.id_of.items() if number in schema.details.not_null]


def constraints_json(schema: ShardSchema) -> dict[str, Any]:
    """The constraints of a schema for users: `unique`, `not_null`, and `checks` by their names."""
    return {
        "unique": schema.details.unique,
        "not_null": not_null(schema),
        "checks": {check.name: check.where for check in schema.details.checks},
    }


def _parse_columns(names: Any) -> tuple[str, ...]:
    if isinstance(names, (str, bytes)) or not isinstance(names, Sequence):
        raise InvalidUsage(f"not_null must be a list of columns, not {shown(names)}")
    for name in names:
        if not isinstance(name, str):
            raise InvalidUsage(f"the columns of not_null are texts, not {shown(name)}")
    return tuple(names)


def _parse_checks(checks: Any) -> tuple[Check, ...]:
    pairs = checks.items() if isinstance(checks, Mapping) else checks
    if isinstance(pairs, (str, bytes)) or not isinstance(pairs, Iterable):
        raise InvalidUsage(f"checks must be predicates by their names, not {shown(checks)}")
    parsed = tuple(sorted(map(_parse_check, pairs), key=lambda check: check.name))
    if len(parsed) > CHECKS_MAX:
        raise InvalidUsage(f"there are {len(parsed)} checks; a shard has at most {CHECKS_MAX}")
    names = [check.name for check in parsed]
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise InvalidUsage(f"two checks are called {repeated!r}; give one of them another name")
    return parsed


def _parse_check(pair: Any) -> Check:
    if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not all(isinstance(item, str) for item in pair):
        raise InvalidUsage(f"a check is a name and a predicate, two texts, not {shown(pair)}")
    name, where = pair
    if len(name) > CHECK_NAME_CHARS_MAX or not _NAME.match(name):
        raise InvalidUsage(
            f"{name!r:.200} is not a valid name of a check: it has 1 to {CHECK_NAME_CHARS_MAX} of A-Z a-z 0-9 . _ -"
        )
    if not 0 < len(where) <= CHECK_CHARS_MAX:
        raise InvalidUsage(f"check {name!r} has a predicate of {len(where)} characters; it has 1 to {CHECK_CHARS_MAX}")
    return Check(name, where)


def duplicate_keys(rows: pa.Table, schema: ShardSchema) -> pa.Table:
    """The keys that have more than one row at some time: the key columns, in order, each key once.

    `rows` are all updates of their keys, in `updates_schema`, in any order. A row counts with its multiplicity at that
    time; a negative multiplicity counts as zero.
    """
    return _duplicates(consolidate([rows], schema), schema, key_schema(schema))


def _duplicates(rows: pa.Table, schema: ShardSchema, keyed: ShardSchema) -> pa.Table:
    """As `duplicate_keys`, of consolidated rows."""
    firsts, diffs = ~find_twins(rows, keyed), _ints(rows, DIFF)
    keys = np.cumsum(firsts) - 1
    sizes = np.bincount(keys) if len(keys) else keys
    candidates = rows.filter(pa.array((sizes[keys] > 1) | (diffs > 1)))  # few keys have two updates
    if not len(candidates):
        return candidates.select(list(schema.key))
    starts = ~find_twins(candidates, keyed)
    is_duplicate = _most_rows(candidates, starts, ~find_twins(candidates, schema)) > 1
    return candidates.filter(pa.array(starts)).filter(pa.array(is_duplicate)).select(list(schema.key))


def _duplicates_with_drops(rows: pa.Table, schema: ShardSchema, keyed: ShardSchema, drops: Drops) -> pa.Table:
    """As `_duplicates`, of rows that count until a drop removes them."""
    times, tables = _ints(rows, TIME), []
    lives = zip((RowDrop(0, 0), *drops), (*(drop.at for drop in drops), None), strict=True)
    for drop, end in lives:
        is_live = times >= drop.cut if end is None else (times >= drop.cut) & (times < end)
        if is_live.any():
            tables.append(_duplicates(rows.filter(pa.array(is_live)), schema, keyed))
    return distinct_keys(join(tables), keyed).select(list(schema.key))


def _most_rows(updates: pa.Table, keys: Mask, rows: Mask) -> Ints:
    """The most rows that each key has at one time.

    `keys` and `rows` are the first of the consolidated updates of each key, and of each row.
    """
    diffs, times = _ints(updates, DIFF), _ints(updates, TIME)
    counts = np.maximum(_running_sums(diffs, rows), 0)
    changes = counts - np.where(rows, 0, np.roll(counts, 1))
    numbers = np.cumsum(keys)
    if times.min() < times.max():
        order = np.lexsort((times, numbers))
        changes, times = changes[order], times[order]
    totals = _running_sums(changes, keys)
    ends = np.ones(len(totals), np.bool_)  # updates of one time take effect together
    ends[:-1] = keys[1:] | (times[1:] != times[:-1])
    most: Ints = np.maximum.reduceat(np.where(ends, totals, 0), np.flatnonzero(keys))
    return most


def _running_sums(numbers: Ints, firsts: Mask) -> Ints:
    """The sums up to each number, from the first of its group on."""
    sums: Ints = np.cumsum(numbers)
    starts = np.flatnonzero(firsts)
    before: Ints = sums[starts] - numbers[starts]
    running: Ints = sums - before[np.cumsum(firsts) - 1]
    return running


def _ints(rows: pa.Table, name: str) -> Ints:
    numbers: Ints = one_chunk(rows.column(name)).to_numpy()
    return numbers


class DuplicateKeyCounter:
    """Counts the keys with more than one row at some time, of updates in the order of their keys.

    It holds one table and the updates of one key. If these are more than `KEY_ROWS_MAX`, only the first ones are
    checked.
    """

    def __init__(self, schema: ShardSchema, drops: Drops = ()) -> None:
        """`drops` of the shard, which have removed rows without updates."""
        self._schema, self._keyed = schema, key_schema(schema)
        self._drops = drops
        self._held: list[pa.Table] = []  # of the last key
        self._is_checked = False  # the last key has been checked
        self.count = 0
        self.keys: list[tuple[Any, ...]] = []  # the first of them, in order

    def add(self, rows: pa.Table) -> None:
        """The next consolidated rows, in `updates_schema`."""
        if not len(rows):
            return
        firsts = ~find_twins(join([*self._held[-1:], rows]), self._keyed)
        if self._held:
            firsts = firsts[len(self._held[-1]) :]
        starts = np.flatnonzero(firsts)
        if not len(starts):  # all rows are of the last key
            self._hold(rows)
            return
        self._check_held(rows.slice(0, int(starts[0])))
        self._count(rows.slice(int(starts[0]), int(starts[-1] - starts[0])))
        self._held, self._is_checked = [], False
        self._hold(rows.slice(int(starts[-1])))

    def finish(self) -> DuplicateKeyCounter:
        """Check the last key. Returns itself."""
        self._check_held(None)
        self._held = []
        return self

    def _hold(self, rows: pa.Table) -> None:
        if not self._is_checked:
            self._held.append(rows)
        if not self._is_checked and sum(map(len, self._held)) > KEY_ROWS_MAX:
            self._check_held(None)
            self._held, self._is_checked = [rows.slice(len(rows) - 1)], True

    def _check_held(self, rest: pa.Table | None) -> None:
        """Check the last key, whose rows are complete with `rest`."""
        pieces = [*self._held, *([rest] if rest is not None and len(rest) else ())]
        if pieces and not self._is_checked:
            self._count(consolidate(pieces, self._schema))

    def _count(self, rows: pa.Table) -> None:
        if not len(rows):
            return
        keys = _duplicates(rows, self._schema, self._keyed)
        if self._drops and len(keys):  # a drop may have separated the rows
            keys = _duplicates_with_drops(rows, self._schema, self._keyed, self._drops)
        self.count += len(keys)
        self.keys += key_tuples(keys.slice(0, KEYS_SHOWN_MAX - len(self.keys)))


def key_tuples(keys: pa.Table) -> list[tuple[Any, ...]]:
    """The keys as tuples of Python values."""
    columns = [shown_values(column) for column in keys.columns]
    return list(zip(*columns, strict=True))


@dataclass(frozen=True)
class ViolatingRows:
    """The name of a violated constraint, a description of the violation, and the rows."""

    constraint: str
    how: str
    rows: pa.Table


def check_rows(rows: pa.Table, schema: ShardSchema) -> None:
    """Raise ConstraintViolated if an added row violates a check, or has a null where none is allowed.

    `rows` are updates in `updates_schema`. Retractions pass, so that invalid rows can be deleted. The uniqueness of
    keys is not checked, since it depends on other rows.
    """
    for violating in violating_rows(rows, schema):
        count = len(violating.rows)
        raise violation(
            f"constraint {violating.constraint!r} refuses {count_text(count, 'row')} {violating.how}; nothing was "
            "written: fix the rows, or change the constraint",
            violating.constraint,
            key_tuples(violating.rows.select(list(schema.key)).slice(0, KEYS_SHOWN_MAX)),
            count,
        )


def violating_rows(rows: pa.Table, schema: ShardSchema) -> Iterator[ViolatingRows]:
    """The added rows that violate a check, or have a null where none is allowed, for each violated constraint.

    `rows` have the columns of the schema and `__diff`.
    """
    if not schema.details.not_null and not schema.details.checks:
        return
    added = rows
    if len(rows) and pc.min(rows.column(DIFF)).as_py() <= 0:
        added = rows.filter(pc.greater(rows.column(DIFF), 0))
    for name in not_null(schema):
        if added.column(name).null_count:
            nulls = added.filter(pc.is_null(added.column(name)))
            yield ViolatingRows(f"not null: {name}", f"with a null in column {name!r}", nulls)
    for check, condition in _filters(schema):
        truth = condition.truth(added)
        if not pc.all(truth, skip_nulls=True, min_count=0).as_py():  # only false violates a check: null passes
            bad = added.filter(pc.invert(pc.fill_null(truth, True)))
            yield ViolatingRows(check.name, f"for which {check.where!r:.200} is false", bad)


def check_compiles(schema: ShardSchema) -> None:
    """Raise InvalidUsage unless the columns of every check exist and can be compared."""
    list(_compile(schema))


def violation(what: str, constraint: str, keys: list[tuple[Any, ...]], count: int) -> ConstraintViolated:
    """The error for `count` rows or keys, with the first keys."""
    return ConstraintViolated(
        f"{what}. Keys: {keys_text(keys, count)}", constraint=constraint, count=count, keys=keys_json(keys)
    )


def count_text(count: int, what: str) -> str:
    """A count with its noun, for a message."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def keys_text(keys: list[tuple[Any, ...]], count: int) -> str:
    """The first keys, for a message."""
    shown = ", ".join(f"{key[0] if len(key) == 1 else key!r}"[:KEY_CHARS_MAX] for key in keys)
    return f"{shown} and {count - len(keys)} more" if count > len(keys) else shown


def keys_json(keys: list[tuple[Any, ...]]) -> list[list[Any]]:
    """The keys as JSON; values without a JSON form are truncated texts."""
    return [[v if v is None or type(v) in (bool, int) else str(v)[:KEY_CHARS_MAX] for v in key] for key in keys]


@lru_cache(SCHEMAS_KEPT_MAX)
def _filters(schema: ShardSchema) -> tuple[tuple[Check, Filter], ...]:
    """The checks and their filters."""
    return tuple(_compile(schema))


def _compile(schema: ShardSchema) -> Iterator[tuple[Check, Filter]]:
    for check in schema.details.checks:
        try:
            yield check, Filter.of(check.where, schema)
        except InvalidUsage as error:
            raise InvalidUsage(f"check {check.name!r}: {error.message}") from error
