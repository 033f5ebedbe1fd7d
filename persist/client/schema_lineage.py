"""Columns of shards by their ids: the schema history of a shard, and rows converted from one schema to another.

Column names can be moved by schema changes, and ids never are. So code that copies rows from one shard to another maps
columns by their ids, which are the same in both if one shard was created with the schema of the other, and followed it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from persist.client.listen import Listen
from persist.client.read_api import selection_of
from persist.client.shard import Shard
from persist.core import commands as c
from persist.core.errors import InvalidUsage
from persist.core.frontier import frontier
from persist.core.shard_view import ShardView
from persist.parts import newest, valid_schemas
from persist.parts.constraint_checks import without_constraints as without_constraints
from persist.parts.schema_evolution import Migration, current_for_names, follow_by_name, moved_names
from persist.parts.schema_evolution import current_schema as current_schema
from persist.parts.shard_schema import PLAIN
from persist.parts.shard_schema import ShardSchema as ShardSchema


def with_constraints_of(schema: ShardSchema, other: ShardSchema) -> ShardSchema:
    """The columns of `schema`, with the constraints of `other`."""
    wanted = other.details
    if (wanted.unique, wanted.not_null, wanted.checks) == (PLAIN.unique, PLAIN.not_null, PLAIN.checks):
        return without_constraints(schema)
    return schema.with_details(unique=wanted.unique, not_null=wanted.not_null, checks=wanted.checks)


def has_same_columns(schema: ShardSchema, other: ShardSchema) -> bool:
    """Whether shards have the same columns now: ids, names, types, order, key and defaults."""
    if schema.ids != other.ids or schema.key != other.key or not schema.arrow.equals(other.arrow):
        return False
    return schema.details.default_of == other.details.default_of


def is_same_schema(schema: ShardSchema, other: ShardSchema) -> bool:
    """Whether schemas of one shard are the same: a plain one has no ids, and never equals one that has some."""
    return schema.is_plain == other.is_plain and has_same_columns(schema, other)


def first_schema(shard: Shard) -> tuple[int, ShardSchema]:
    """The id of the schema with which the shard was created, and that schema, with the ids as they are known now."""
    schemas = valid_schemas(shard.view().schemas)
    first = min(schemas)
    return first, schemas[first]


def reused_name(shard: Shard, before: int, known: ShardSchema) -> tuple[str, str] | None:
    """A name that was one column's by the schema of the id `before`, and is another's by `known`; and what became of
    the column.

    None: there is no such name.
    """
    before_schema = valid_schemas(shard.view().schemas).get(before, known)
    moves = moved_names(before_schema, known, before_schema.arrow.names)
    return next((move for move in moves if move[0] in known.id_of), None)


def copy_handle(shard: Shard) -> Shard:
    """Another handle of the shard with the same known schema. From then on their schemas are independent."""
    with shard._lock:
        handle = copy(shard)
    handle._lock, handle._idle_writers = threading.Lock(), []
    return handle


def learn_schema(shard: Shard, number: int, known: ShardSchema) -> tuple[int, ShardSchema] | None:
    """The current schema of the shard, which the handle uses from then on; None: its columns have the same names.

    `number` and `known` are the schema whose names a caller used. Raises InvalidUsage if one of the names is another
    column's by now, and then the handle keeps its schema. Also raises what every call may.
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
    """The columns that a selection over shards with the same columns names, fixed when this is created."""

    def __init__(self, shard: Shard, whose: str, **selected: Any) -> None:
        """`whose` names the selecting object in messages. Raises what every call may, and InvalidUsage."""
        self._selection = selection_of(selected.pop("where", None), selected.pop("columns", None), **selected)
        self._shard = shard
        self._whose = whose
        self.schema_id = current_schema(shard.view().schemas)[0]

    def listen(self, shard: Shard, as_of: int, until: int | None, purpose: str) -> Listen:
        """A listener of one of these shards, whatever schema its handle knows. Raises as `Shard.listen`."""
        return shard._listen(as_of, frontier(until), self._selection, purpose)

    def check(self, other: Shard, schema_id: int) -> None:
        """Raise InvalidUsage if a name means another column by now, or by that schema of another shard."""
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


def known_schema(shard: Shard) -> tuple[int, ShardSchema]:
    """The id of the schema that the handle knows, and the schema, read atomically."""
    return shard._current_schema()


def evolve(shard: Shard, view: ShardView, schema: ShardSchema) -> None:
    """Give the shard these columns, which were derived from those of the view.

    Raises SchemaMismatch if others changed them since, whatever schema the handle knows by now; InvalidUsage.
    """
    known = current_schema(view.schemas)[1]
    shard._send(c.EvolveSchema(view.schema_id, follow_by_name(known, schema).to_record()))
    shard.refresh_schema()


@dataclass(frozen=True)
class SchemaHistory:
    """The schemas that a shard has had, oldest first: as they were written, and with the ids that followed."""

    written: tuple[ShardSchema, ...]
    numbered: tuple[ShardSchema, ...]

    @classmethod
    def of(cls, shard: Shard) -> SchemaHistory:
        """As of now. Raises what every call may."""
        records = shard.view().schemas
        sound = valid_schemas(records)
        written = tuple(ShardSchema.from_record(records[number]) for number in sorted(sound))
        return cls(written, tuple(sound[number] for number in sorted(sound)))

    def place(self, schema: ShardSchema) -> int | None:
        """The last place in this history with these columns; None: there is none."""
        plain = [at for at, known in enumerate(self.written) if known.is_plain]
        if schema.is_plain and plain:
            places = [at for at in plain if has_same_columns(schema, self.written[at])]
        else:  # if all are plain, the ids are those of the last one
            begin = len(plain) - 1 if len(plain) == len(self.written) else 0
            places = [at for at in range(begin, len(self.written)) if has_same_columns(schema, self.numbered[at])]
        return places[-1] if places else None

    def following(self, place: int, target: int) -> ShardSchema:
        """The next schema after `place` on the way to `target`: plain ones first, since ids follow from the last."""
        plain = [at for at in range(place + 1, target + 1) if self.written[at].is_plain]
        return self.written[plain[-1] if plain else target]

    def moved(self, rows: pa.Table, begin: int, end: int) -> pa.Table:
        """Convert rows, with `__time` and `__diff`, from the schema at one place to a later one."""
        return rows if begin == end else Migration(self.numbered[begin], self.numbered[end]).rows(rows)


def check_alike(whose: str, schemas: Mapping[str, ShardSchema]) -> None:
    """Raise InvalidUsage unless these shards, by their names, have the same columns now."""
    first = next(iter(schemas))
    for name, schema in schemas.items():
        if not has_same_columns(schema, schemas[first]):
            raise InvalidUsage(
                f"{whose}: shards {first!r} and {name!r} have different schemas, in names or numbers of columns; "
                "change both alike (Shard.alter), or make one with the schema of the other (create_shard(name, "
                "other.schema, key))"
            )
