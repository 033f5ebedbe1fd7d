"""Columns of shards by their numbers: which schema of a shard's life rows have, and the same rows by another one.

Names are moved by changes of the columns, and numbers never are. So whoever brings rows from one shard to another goes
by numbers: those of both shards are the same where one was made with the schema of the other, and followed it since.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from persist.client.listen import Listen
from persist.client.read_api import listen_of, selection_of
from persist.client.shard import Shard
from persist.core import commands as c
from persist.core.errors import InvalidUsage
from persist.core.shard_view import ShardView
from persist.parts.constraint_checks import without_constraints as without_constraints
from persist.parts.schema_evolution import (
    Migration,
    current_for_names,
    follow_by_name,
    moved_names,
    newest,
    valid_schemas,
)
from persist.parts.schema_evolution import current_schema as current_schema
from persist.parts.shard_schema import PLAIN
from persist.parts.shard_schema import ShardSchema as ShardSchema


def with_constraints_of(schema: ShardSchema, other: ShardSchema) -> ShardSchema:
    """The columns of `schema`, and what `other` asks of rows."""
    asked = other.details
    if (asked.unique, asked.not_null, asked.checks) == (PLAIN.unique, PLAIN.not_null, PLAIN.checks):
        return without_constraints(schema)
    return schema.with_details(unique=asked.unique, not_null=asked.not_null, checks=asked.checks)


def alike(one: ShardSchema, other: ShardSchema) -> bool:
    """Whether shards have the same columns now: numbers, names, types, places, key and defaults."""
    if one.ids != other.ids or one.key != other.key or not one.arrow.equals(other.arrow):
        return False
    return one.details.default_of == other.details.default_of


def same(one: ShardSchema, other: ShardSchema) -> bool:
    """Whether schemas of one life are the same: a plain one says no numbers, and is never one that says some."""
    return one.is_plain == other.is_plain and alike(one, other)


def first_schema(shard: Shard) -> tuple[int, ShardSchema]:
    """The id of the schema with which the shard was made, and that schema, with the numbers as they are known now."""
    schemas = valid_schemas(shard.view().schemas)
    first = min(schemas)
    return first, schemas[first]


def taken_name(shard: Shard, before: int, known: ShardSchema) -> tuple[str, str] | None:
    """A name that was one column's by the schema of the id `before`, and is another's by `known`; with what became of

    the column. None: there is no such name.
    """
    named = valid_schemas(shard.view().schemas).get(before, known)
    return next((one for one in moved_names(named, known, named.arrow.names) if one[0] in known.id_of), None)


def own_handle(shard: Shard) -> Shard:
    """Another handle of the shard, which knows what that one knows now. What one of them learns the other does not."""
    with shard._lock:
        made = copy(shard)
    made._lock, made._idle_writers = threading.Lock(), []
    return made


def learnt(shard: Shard, number: int, known: ShardSchema) -> tuple[int, ShardSchema] | None:
    """The schema that the shard has by now, which the handle learns then; None: its columns are called as before.

    `number` and `known`: the one by which a caller named columns. Raises InvalidUsage where one of the names is another
    column's by now: the handle learns nothing then. And what every call may.
    """
    view = shard.view()
    schemas = valid_schemas(view.schemas)
    last, current = newest(schemas)
    if set(known.arrow.names) == set(current.arrow.names):
        return None
    current_for_names(schemas, number)
    shard._changed(view.schema_id, (last, current))
    return last, current


class NamedColumns:
    """The columns that a selection over like shards names: those that one of them calls so when this is made."""

    def __init__(self, shard: Shard, whose: str, **selected: Any) -> None:
        """`whose`: what selects, in messages. Raises what every call may, and InvalidUsage."""
        self._selection = selection_of(selected.pop("where", None), selected.pop("columns", None), **selected)
        self._shard = shard
        self._whose = whose
        self.schema_id = current_schema(shard.view().schemas)[0]

    def listen(self, shard: Shard, as_of: int, until: int | None, purpose: str) -> Listen:
        """A listener of one of these shards, whatever its handle knows. Raises as `Shard.listen`."""
        return listen_of(shard, as_of, until, self._selection, purpose)

    def check(self, other: Shard, schema_id: int) -> None:
        """Raise InvalidUsage where a name means another column by now, or by that schema of another shard."""
        schemas = valid_schemas(self._shard.view().schemas)
        current = newest(schemas)[1]
        wanted = self._selection.on(current)
        wanted.check_names(schemas.get(self.schema_id, current), self._whose)
        schema = valid_schemas(other.view().schemas)[schema_id]
        for name in wanted.names if not (schema.is_plain and current.is_plain) else ():
            if schema.id_of.get(name) != current.id_of.get(name):
                raise InvalidUsage(
                    f"column {name!r}, by which {self._whose} selects, is another one in shard {other.name!r} than in "
                    f"{self._shard.name!r}: change the columns of both alike (Shard.alter)"
                )


def known_by(shard: Shard) -> tuple[int, ShardSchema]:
    """The id of the schema that the handle knows, and the schema: both of one moment."""
    return shard._current_schema()


def evolve(shard: Shard, view: ShardView, schema: ShardSchema) -> None:
    """Give the shard these columns, worked out from those of the view.

    Raises SchemaMismatch where others changed them since, whatever the handle has learnt meanwhile; InvalidUsage.
    """
    known = current_schema(view.schemas)[1]
    shard._send(c.EvolveSchema(view.schema_id, follow_by_name(known, schema).to_record()))
    shard.refresh_schema()


@dataclass(frozen=True)
class Life:
    """The schemas that a shard has had, oldest first: as they were written, and with the numbers that followed."""

    written: tuple[ShardSchema, ...]
    numbered: tuple[ShardSchema, ...]

    @classmethod
    def of(cls, shard: Shard) -> Life:
        """As of now. Raises what every call may."""
        records = shard.view().schemas
        sound = valid_schemas(records)
        written = tuple(ShardSchema.from_record(records[number]) for number in sorted(sound))
        return cls(written, tuple(sound[number] for number in sorted(sound)))

    def place(self, schema: ShardSchema) -> int | None:
        """The last place in this life where the columns were these; None: they never were."""
        plain = [at for at, known in enumerate(self.written) if known.is_plain]
        if schema.is_plain and plain:
            found = [at for at in plain if alike(schema, self.written[at])]
        else:  # where all are plain, numbers are those of the last one
            begin = len(plain) - 1 if len(plain) == len(self.written) else 0
            found = [at for at in range(begin, len(self.written)) if alike(schema, self.numbered[at])]
        return found[-1] if found else None

    def following(self, place: int, target: int) -> ShardSchema:
        """What comes after `place` on the way to `target`: plain schemas first, since numbers follow from the last."""
        plain = [at for at in range(place + 1, target + 1) if self.written[at].is_plain]
        return self.written[plain[-1] if plain else target]

    def moved(self, rows: pa.Table, begin: int, end: int) -> pa.Table:
        """Rows by the schema at one place, with `__time` and `__diff`, as rows by a later one."""
        if begin == end:
            return rows
        return Migration(self.numbered[begin], self.numbered[end]).rows(rows)


def check_alike(whose: str, schemas: Mapping[str, ShardSchema]) -> None:
    """Raise InvalidUsage unless these shards, by their names, have the same columns now."""
    first = next(iter(schemas))
    for name, schema in schemas.items():
        if not alike(schema, schemas[first]):
            raise InvalidUsage(
                f"{whose}: shards {first!r} and {name!r} have different schemas, in names or numbers of columns; "
                "change both alike (Shard.alter), or make one with the schema of the other (create_shard(name, "
                "other.schema, key))"
            )
