"""Rows against the constraints of their shard, by whoever stages them: a column operation for each constraint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from persist.core.errors import ConstraintViolated, InvalidUsage
from persist.parts.constraints import not_null
from persist.parts.described import Check
from persist.parts.pruning import Filter
from persist.parts.schema import DIFF, SCHEMAS_KEPT_MAX, ShardSchema
from persist.parts.unique import KEYS_SHOWN_MAX, keys_shown

KEY_CHARS_MAX = 200  # that a message shows of a key
UNIQUE = "unique"  # what that constraint is called where one is named


@dataclass(frozen=True)
class Broken:
    """Rows that break a constraint: what it is called, how they break it, and they themselves."""

    constraint: str
    how: str
    rows: pa.Table


def check_rows(rows: pa.Table, schema: ShardSchema) -> None:
    """Raise ConstraintViolated where a row that is added breaks a check, or has a null where none may be.

    `rows` are updates in `updates_schema`. Rows that are taken away pass, so that bad ones can be taken away. Whether
    keys are unique is not told by rows alone.
    """
    for broken in breaking(rows, schema):
        count = len(broken.rows)
        raise violation(
            f"constraint {broken.constraint!r} refuses {counted(count, 'row')} {broken.how}; nothing was written: mend "
            "what is wrong, or change the constraint",
            broken.constraint,
            keys_shown(broken.rows.select(list(schema.key)).slice(0, KEYS_SHOWN_MAX)),
            count,
        )


def breaking(rows: pa.Table, schema: ShardSchema) -> Iterator[Broken]:
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
            yield Broken(f"not null: {name}", f"with a null in column {name!r}", nulls)
    for check, found in _filters(schema):
        truth = found.truth(added)
        if not pc.all(truth, skip_nulls=True, min_count=0).as_py():  # false only where one is false: null passes
            bad = added.filter(pc.invert(pc.fill_null(truth, True)))
            yield Broken(check.name, f"for which {check.where!r:.200} is false", bad)


def check_sound(schema: ShardSchema) -> None:
    """Raise InvalidUsage unless every check is about columns that are there, which can be compared so."""
    list(_compiled(schema))


def violation(what: str, constraint: str, keys: list[tuple[Any, ...]], count: int) -> ConstraintViolated:
    """The error of so many rows or keys, of which the first keys are given."""
    return ConstraintViolated(
        f"{what}. Keys: {listed(keys, count)}", constraint=constraint, count=count, keys=told(keys)
    )


def counted(count: int, what: str) -> str:
    """So many, for a sentence."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def listed(keys: list[tuple[Any, ...]], count: int) -> str:
    """The first keys, for a sentence."""
    shown = ", ".join(f"{key[0] if len(key) == 1 else key!r}"[:KEY_CHARS_MAX] for key in keys)
    return f"{shown} and {count - len(keys)} more" if count > len(keys) else shown


def told(keys: list[tuple[Any, ...]]) -> list[list[Any]]:
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
