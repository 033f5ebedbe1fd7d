"""Constraints of a shard beside column types: unique keys, columns without nulls, checks; and rows against them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import ConstraintViolated, InvalidUsage, shown
from persist.core.truncation import Drops, RowDrop
from persist.parts.consolidate import Ints, consolidate, find_twins, join
from persist.parts.filter_eval import Filter
from persist.parts.key_encoding import distinct_keys, key_schema
from persist.parts.shard_schema import CHECKS_MAX, DIFF, SCHEMAS_KEPT_MAX, TIME, Check, ShardSchema
from persist.parts.sort_words import Mask, one_chunk

# What a shard asks of its rows beside their types: unique keys, columns without nulls, and checks.
#
# They are asked of rows that are added, from the schema on that has them. `constrained` looks at rows.


CHECK_NAME_CHARS_MAX = 128
CHECK_CHARS_MAX = 4_000  # of one predicate
_NAME = re.compile(r"[A-Za-z0-9_.-]+\Z")


@dataclass(frozen=True)
class ConstraintChange:
    """How the constraints of a shard change: each kind as a whole. What is None stays as it is."""

    unique: bool | None = None
    not_null: tuple[str, ...] | None = None
    checks: tuple[Check, ...] | None = None

    @classmethod
    def of(cls, unique: Any = None, not_null: Any = None, checks: Any = None) -> ConstraintChange:
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


def are_stricter(after: ShardSchema, before: ShardSchema) -> bool:
    """Whether rows may break the constraints of one schema that do not break those of the one before it."""
    new, old = after.details, before.details
    return (
        (new.unique and not old.unique)
        or not set(new.not_null) <= set(old.not_null)
        or not {check.where for check in new.checks} <= {check.where for check in old.checks}
    )


def constraints_differ(after: ShardSchema, before: ShardSchema) -> bool:
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


# Keys that are to be unique: which keys have more than one row at some time.
#
# A row is there as often as its diffs say, and what is there less than no times is no row. So a key is crowded where
# its rows, each as often as it is there, are more than one.


KEYS_SHOWN_MAX = 10  # of those that a constraint refuses, or that an examination finds
KEY_ROWS_MAX = 1 << 20  # updates of one key that are held; one with more is not looked at as a whole


def duplicate_keys(rows: pa.Table, schema: ShardSchema) -> pa.Table:
    """The keys that have more than one row at some time: the key columns, in order, each key once.

    `rows` are updates in `updates_schema`, in any order: all that there are of their keys.
    """
    return _crowded(consolidate([rows], schema), schema, key_schema(schema))


def _crowded(rows: pa.Table, schema: ShardSchema, keyed: ShardSchema) -> pa.Table:
    """As `duplicate_keys`, of consolidated rows."""
    firsts, diffs = ~find_twins(rows, keyed), _ints(rows, DIFF)
    keys = np.cumsum(firsts) - 1
    sizes = np.bincount(keys) if len(keys) else keys
    may_be = sizes[keys] > 1  # hardly any key has two updates: only those are looked at closely
    may_be |= diffs > 1
    few = rows.filter(pa.array(may_be))
    if not len(few):
        return few.select(list(schema.key))
    starts = ~find_twins(few, keyed)
    is_crowded = _most(few, starts, ~find_twins(few, schema)) > 1
    return few.filter(pa.array(starts)).filter(pa.array(is_crowded)).select(list(schema.key))


def _crowded_by_then(rows: pa.Table, schema: ShardSchema, keyed: ShardSchema, drops: Drops) -> pa.Table:
    """As `_crowded`, of rows that count until a drop has taken them away."""
    times, found = _ints(rows, TIME), []
    lives = zip((RowDrop(0, 0), *drops), (*(drop.at for drop in drops), None), strict=True)
    for drop, end in lives:
        is_there = times >= drop.cut if end is None else (times >= drop.cut) & (times < end)
        if is_there.any():
            found.append(_crowded(rows.filter(pa.array(is_there)), schema, keyed))
    return distinct_keys(join(found), keyed).select(list(schema.key))


def _most(rows: pa.Table, keys: Mask, lines: Mask) -> Ints:
    """How many rows each key has at most, at one time.

    `keys` and `lines` tell which of the consolidated updates are the first ones of their key, and of their row.
    """
    diffs, times = _ints(rows, DIFF), _ints(rows, TIME)
    there = np.maximum(_running(diffs, lines), 0)
    before = np.where(lines, 0, np.roll(there, 1))
    gains = there - before
    numbers = np.cumsum(keys)
    if times.min() < times.max():
        order = np.lexsort((times, numbers))
        gains, times = gains[order], times[order]
    counts = _running(gains, keys)
    ends = np.ones(len(counts), np.bool_)  # what happens at one time happens at once
    ends[:-1] = keys[1:] | (times[1:] != times[:-1])
    most: Ints = np.maximum.reduceat(np.where(ends, counts, 0), np.flatnonzero(keys))
    return most


def _running(numbers: Ints, firsts: Mask) -> Ints:
    """Their sums up to each of them, from the first of its group on."""
    sums: Ints = np.cumsum(numbers)
    starts = np.flatnonzero(firsts)
    begun: Ints = sums[starts] - numbers[starts]
    found: Ints = sums - begun[np.cumsum(firsts) - 1]
    return found


def _ints(rows: pa.Table, name: str) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = one_chunk(rows.column(name)).to_numpy()
    return found


class DuplicateKeyCounter:
    """Counts the keys with more than one row at some time, of updates that come in the order of their keys.

    It holds one table and the updates of one key. Where these are more than `KEY_ROWS_MAX` only what came first of
    them is looked at.
    """

    def __init__(self, schema: ShardSchema, drops: Drops = ()) -> None:
        """`drops` of the shard, which have taken rows away without an update that says so."""
        self._schema = schema
        self._drops = drops
        self._held: list[pa.Table] = []  # of the last key that was seen
        self._is_told = False  # that key needs no more looks
        self.count = 0
        self.keys: list[tuple[Any, ...]] = []  # the first of them, in order

    @cached_property
    def _keyed(self) -> ShardSchema:
        return key_schema(self._schema)

    def add(self, rows: pa.Table) -> None:
        """The next consolidated rows, in `updates_schema`."""
        if not len(rows):
            return
        firsts = ~find_twins(join([*self._held[-1:], rows]), self._keyed)
        if self._held:
            firsts = firsts[len(self._held[-1]) :]
        starts = np.flatnonzero(firsts)
        if not len(starts):  # all of them are of the key that was seen last
            self._hold(rows)
            return
        self._tell(rows.slice(0, int(starts[0])))
        self._count(rows.slice(int(starts[0]), int(starts[-1] - starts[0])))
        self._held, self._is_told = [], False
        self._hold(rows.slice(int(starts[-1])))

    def finish(self) -> DuplicateKeyCounter:
        """No more rows come. Returns itself."""
        self._tell(None)
        self._held = []
        return self

    def _hold(self, rows: pa.Table) -> None:
        if not self._is_told:
            self._held.append(rows)
        if not self._is_told and sum(map(len, self._held)) > KEY_ROWS_MAX:
            self._tell(None)
            self._held, self._is_told = [rows.slice(len(rows) - 1)], True

    def _tell(self, rest: pa.Table | None) -> None:
        """The last key is complete, with the `rest` of its rows."""
        pieces = [*self._held, *([rest] if rest is not None and len(rest) else ())]
        if pieces and not self._is_told:
            self._count(consolidate(pieces, self._schema))

    def _count(self, rows: pa.Table) -> None:
        if not len(rows):
            return
        found = _crowded(rows, self._schema, self._keyed)
        if self._drops and len(found):  # perhaps by rows that were there one after the other
            found = _crowded_by_then(rows, self._schema, self._keyed, self._drops)
        self.count += len(found)
        self.keys += key_tuples(found.slice(0, KEYS_SHOWN_MAX - len(self.keys)))


def key_tuples(keys: pa.Table) -> list[tuple[Any, ...]]:
    """The keys as tuples of Python values."""
    columns = [column.to_pylist() for column in keys.columns]
    return list(zip(*columns, strict=True))


# Rows against the constraints of their shard, by whoever stages them: a column operation for each constraint.


KEY_CHARS_MAX = 200  # that a message shows of a key
UNIQUE = "unique"  # what that constraint is called where one is named


@dataclass(frozen=True)
class ViolatingRows:
    """Rows that break a constraint: what it is called, how they break it, and they themselves."""

    constraint: str
    how: str
    rows: pa.Table


def check_rows(rows: pa.Table, schema: ShardSchema) -> None:
    """Raise ConstraintViolated where a row that is added breaks a check, or has a null where none may be.

    `rows` are updates in `updates_schema`. Rows that are taken away pass, so that bad ones can be taken away. Whether
    keys are unique is not told by rows alone.
    """
    for broken in violating_rows(rows, schema):
        count = len(broken.rows)
        raise violation(
            f"constraint {broken.constraint!r} refuses {count_text(count, 'row')} {broken.how}; nothing was written: "
            "mend what is wrong, or change the constraint",
            broken.constraint,
            key_tuples(broken.rows.select(list(schema.key)).slice(0, KEYS_SHOWN_MAX)),
            count,
        )


def violating_rows(rows: pa.Table, schema: ShardSchema) -> Iterator[ViolatingRows]:
    """The rows that are added and break a check, or have a null where none may be, for each constraint that is broken.

    `rows` have the columns of the schema and `__diff`.
    """
    asked = schema.details
    if not asked.not_null and not asked.checks:
        return
    added = rows
    if len(rows) and pc.min(rows.column(DIFF)).as_py() <= 0:
        added = rows.filter(pc.greater(rows.column(DIFF), 0))
    for name in not_null(schema):
        if added.column(name).null_count:
            nulls = added.filter(pc.is_null(added.column(name)))
            yield ViolatingRows(f"not null: {name}", f"with a null in column {name!r}", nulls)
    for check, found in _filters(schema):
        truth = found.truth(added)
        if not pc.all(truth, skip_nulls=True, min_count=0).as_py():  # false only where one is false: null passes
            bad = added.filter(pc.invert(pc.fill_null(truth, True)))
            yield ViolatingRows(check.name, f"for which {check.where!r:.200} is false", bad)


def check_compiles(schema: ShardSchema) -> None:
    """Raise InvalidUsage unless every check is about columns that are there, which can be compared so."""
    list(_compiled(schema))


def violation(what: str, constraint: str, keys: list[tuple[Any, ...]], count: int) -> ConstraintViolated:
    """The error of so many rows or keys, of which the first keys are given."""
    return ConstraintViolated(
        f"{what}. Keys: {keys_text(keys, count)}", constraint=constraint, count=count, keys=keys_json(keys)
    )


def count_text(count: int, what: str) -> str:
    """So many, for a sentence."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def keys_text(keys: list[tuple[Any, ...]], count: int) -> str:
    """The first keys, for a sentence."""
    shown = ", ".join(f"{key[0] if len(key) == 1 else key!r}"[:KEY_CHARS_MAX] for key in keys)
    return f"{shown} and {count - len(keys)} more" if count > len(keys) else shown


def keys_json(keys: list[tuple[Any, ...]]) -> list[list[Any]]:
    """The keys as JSON: what JSON has no value for is its text, cut short."""
    return [
        [one if one is None or type(one) in (bool, int) else str(one)[:KEY_CHARS_MAX] for one in key] for key in keys
    ]


@lru_cache(SCHEMAS_KEPT_MAX)
def _filters(schema: ShardSchema) -> tuple[tuple[Check, Filter], ...]:
    """The checks, and what tells of rows whether they obey them."""
    return tuple(_compiled(schema))


def _compiled(schema: ShardSchema) -> Iterator[tuple[Check, Filter]]:
    for check in schema.details.checks:
        try:
            yield check, Filter.of(check.where, schema)
        except InvalidUsage as error:
            raise InvalidUsage(f"check {check.name!r}: {error.message}") from error
