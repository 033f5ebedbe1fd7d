"""Which schema may follow which, the chain of the schemas of a shard, and reading rows of earlier schemas.

Columns are identified by their ids, so that renaming or moving a column changes nothing. A plain schema has no ids:
plain schemas come first in the chain, and their columns are matched by name with the last plain schema. Between plain
schemas only nullable value columns are added.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

import pyarrow as pa

from persist.core.errors import Corruption, InvalidUsage, PersistError
from persist.core.state import SchemaRecord
from persist.parts.column_types import as_type
from persist.parts.shard_schema import DIFF, TIME, ShardSchema

CHAINS_KEPT_MAX = 256  # resolved chains that a process caches


def check_evolution(old: ShardSchema, new: ShardSchema) -> None:
    """Raise InvalidUsage, with the reason, unless a shard can evolve from `old` to `new`."""
    _raise(evolution_error(old, new))


def _raise(error: str | None) -> None:
    if error is not None:
        raise InvalidUsage(f"the schema cannot evolve in this way: {error}")


def follow_by_name(old: ShardSchema, new: ShardSchema) -> ShardSchema:
    """The successor of `old` from a plain schema: columns of the same name are kept, others are added.

    Raises InvalidUsage unless nullable value columns are added and nothing else is changed.
    """
    if not new.is_plain or old.is_plain:
        check_evolution(old, new)
        return new
    _raise(_plain_error(old, new))
    ids, following = [], old.details.next_id
    for name in new.arrow.names:
        ids.append(old.id_of.get(name, following))
        following += name not in old.id_of
    return replace(new, details=replace(old.details, ids=tuple(ids), next_id=following))


def evolution_error(old: ShardSchema, new: ShardSchema) -> str | None:
    """Why `new` cannot follow `old`; None: it can."""
    if new.is_plain:
        if not old.is_plain:
            return (
                "it has no column ids, which the shard has since its columns were changed by name; open the shard with "
                "a newer client, and change its columns with add_column and similar methods"
            )
        return _plain_error(old, new)
    before, after = [old.id_of[name] for name in old.key], [new.id_of[name] for name in new.key]
    if before != after:
        return f"the key is fixed to {list(old.key)} and can only be renamed, not {list(new.key)}"
    return _kept_error(old, new) or _added_error(old, new)


def widening_error(old: Any, new: Any) -> str | None:
    """Why values of type `old` cannot be read as `new`; None: all of them can, in the same order.

    If days become microseconds (`widened_days`), the values must be checked as well.
    """
    if old == new or _widens(old, new) or widens_days(old, new):
        return None
    has_zone = pa.types.is_timestamp(new) and new.tz is not None
    zone = ", and a date has no zone" if pa.types.is_date32(old) and has_zone else ""
    return f"changes from {old} to {new}{zone}"


def widens_days(old: Any, new: Any) -> bool:
    """Whether days become timestamps in microseconds, which cannot hold days after the year 294246."""
    return bool(pa.types.is_date32(old) and new == pa.timestamp("us"))


def widened_days(old: ShardSchema, new: ShardSchema) -> dict[str, str]:
    """The columns whose days become timestamps in microseconds: their names in `old`, with those in `new`."""
    if new.is_plain:
        return {}
    return {
        name: new.name_of[number]
        for name, number in old.id_of.items()
        if number in new.name_of and widens_days(old.arrow.field(name).type, new.arrow.field(new.name_of[number]).type)
    }


def _plain_error(old: ShardSchema, new: ShardSchema) -> str | None:
    if old.key != new.key:
        return f"the key is fixed to {list(old.key)}, not {list(new.key)}"
    names = set(new.arrow.names)
    for field in old.arrow:
        if field.name not in names:
            return f"column {field.name!r} is missing; keep it"
        if new.arrow.field(field.name) != field:
            return f"column {field.name!r} changes from {field.type} to {new.arrow.field(field.name).type}"
    before = set(old.arrow.names)
    for field in new.arrow:
        if field.name not in before and not field.nullable:
            return f"column {field.name!r} is new, so it must allow nulls"
    if [name for name in new.arrow.names if name in before] != old.arrow.names:
        return "the order of the columns changes; add new ones without moving old ones"
    return None


def _kept_error(old: ShardSchema, new: ShardSchema) -> str | None:
    for number, name in old.name_of.items():
        if number not in new.name_of:
            continue
        was, now = old.arrow.field(name), new.arrow.field(new.name_of[number])
        error = widening_error(was.type, now.type)
        if error is not None:
            return f"column {now.name!r} {error}; only widening is possible: rewrite the rows into a new column"
        if name in old.key and not _same_key_bytes(was.type, now.type):
            return (
                f"key column {now.name!r} changes from {was.type} to {now.type}; rows are sorted by encoded keys, "
                "which would change"
            )
        if was.nullable and not now.nullable:
            return f"column {now.name!r} allows nulls, which rows may hold; keep it nullable"
        if old.details.default_of.get(number) != new.details.default_of.get(number):
            return f"the default of column {now.name!r} cannot be changed; add another column"
    return None


def _added_error(old: ShardSchema, new: ShardSchema) -> str | None:
    for name, number in new.id_of.items():
        if number in old.name_of:
            continue
        if number < _next_id(old):
            return f"column {name!r} has the id {number}, which another column had; take the next one"
        if not new.arrow.field(name).nullable and name not in new.defaults:
            return f"column {name!r} is new, so it must allow nulls or have a default"
    if new.details.next_id < _next_id(old):
        return f"the next id is {new.details.next_id}, though {_next_id(old)} was next before"
    return None


def _next_id(schema: ShardSchema) -> int:
    return schema.details.next_id or len(schema.arrow) + 1


def _widens(old: Any, new: Any) -> bool:
    types = pa.types
    for is_kind in (types.is_signed_integer, types.is_unsigned_integer, types.is_floating):
        if is_kind(old) and is_kind(new):
            return bool(old.bit_width <= new.bit_width)
    if types.is_decimal(old) and types.is_decimal(new):
        wider = new.bit_width >= old.bit_width and new.scale >= old.scale
        return bool(wider and new.precision - new.scale >= old.precision - old.scale)
    if types.is_date32(old) and types.is_timestamp(new):
        return new.tz is None and new.unit == "ms"  # microseconds cannot hold all days: see `widened_days`
    return _widens_nested(old, new)


def _widens_nested(old: Any, new: Any) -> bool:
    """Whether a nested type can hold all values of the old one: structs may get nullable fields, children widen."""
    types = pa.types
    if types.is_struct(old) and types.is_struct(new):
        names = [field.name for field in old]
        after = [field.name for field in new]
        if len(set(after)) < len(after) or [name for name in after if name in names] != names:
            return False
        return all(_fits(old.field(field.name), field) if field.name in names else field.nullable for field in new)
    if types.is_map(old) and types.is_map(new):
        return bool(old.key_type == new.key_type) and _fits(old.item_field, new.item_field)
    for is_kind in (types.is_list, types.is_large_list, types.is_fixed_size_list):
        if is_kind(old) and is_kind(new):
            sizes = {kind.list_size for kind in (old, new) if types.is_fixed_size_list(kind)}
            return len(sizes) <= 1 and _fits(old.value_field, new.value_field)
    return False


def _fits(old: pa.Field, new: pa.Field) -> bool:
    return (new.nullable or not old.nullable) and (old.type == new.type or _widens(old.type, new.type))


def _same_key_bytes(old: Any, new: Any) -> bool:
    """Whether a value has the same bytes in an encoded key as before."""
    is_decimal = pa.types.is_decimal(old) and pa.types.is_decimal(new)
    return bool(old == new or (is_decimal and old.scale == new.scale and old.bit_width == new.bit_width))


def renames(known: ShardSchema, other: ShardSchema) -> dict[str, str | None]:
    """The names in `other` of the columns of `known` (None: it lacks the column), and of `__time` and `__diff`."""
    names = {old: new for new, old in Migration(known, other).sources.items()}
    return {name: names.get(name) for name in (*known.arrow.names, TIME, DIFF)}


def moved_names(known: ShardSchema, current: ShardSchema, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The `names` that no longer denote the column of `known`, each with what happened to that column."""
    new_names = renames(known, current)
    for name in names:
        now = new_names.get(name, name)
        if now != name:
            yield name, "was dropped" if now is None else f"is called {now!r} now"


def check_names(known: ShardSchema, current: ShardSchema, names: Iterable[str] | None = None) -> None:
    """Raise InvalidUsage if a name (of `names`, or of all columns of `known`) now belongs to another column.

    This protects callers that know the columns by the names of an earlier schema.
    """
    for name, became in moved_names(known, current, known.arrow.names if names is None else names):
        if name in current.id_of:
            raise InvalidUsage(
                f"column {name!r}, as this handle knows it, {became}, and another column has its name; nothing was "
                "done: call refresh_schema() (reopen a writer), and use the current column names"
            )


def current_for_names(
    sound: Mapping[int, ShardSchema], known: int | None, names: Iterable[str] | None = None
) -> ShardSchema:
    """The current schema of the chain, for a caller that uses the column names of the schema with the id `known`.

    None: the current names. Raises InvalidUsage as `check_names`.
    """
    last, current = newest(sound)
    if known is not None and known != last:
        check_names(sound.get(known, current), current, names)
    return current


# --- the chain


def valid_schemas(records: Mapping[int, SchemaRecord]) -> dict[int, ShardSchema]:
    """The schemas with which rows are written and read, by ascending id: the last one is the current one.

    A schema that cannot be read, or that is not compatible with its predecessor, is left out: older versions let any
    writer register it. Raises Corruption if no schema can be read.
    """
    return dict(_chain(tuple(sorted(records.items()))))


@lru_cache(CHAINS_KEPT_MAX)
def _chain(records: tuple[tuple[int, SchemaRecord], ...]) -> Mapping[int, ShardSchema]:
    """See `valid_schemas`. Every commit and every read needs the schemas of its shard, which rarely change."""
    sound: dict[int, ShardSchema] = {}
    last: ShardSchema | None = None
    unread: PersistError | None = None
    for number, record in records:
        try:
            schema = ShardSchema.from_record(record)
        except PersistError as error:
            unread = unread or error
            continue
        if last is None or evolution_error(last, schema) is None:
            sound[number] = last = schema
    if last is None:
        raise unread or Corruption("the shard has no schema")
    if last.is_plain:
        return sound
    return _with_former_names(_with_ids(sound))


def _with_ids(sound: dict[int, ShardSchema]) -> dict[int, ShardSchema]:
    """The chain with ids also in its plain schemas, which come first."""
    plain = [schema for schema in sound.values() if schema.is_plain]
    if not plain:
        return sound
    ids = plain[-1].id_of
    following = len(ids) + 1
    return {
        number: schema.with_details(ids=tuple(ids[name] for name in schema.arrow.names), next_id=following)
        if schema.is_plain
        else schema
        for number, schema in sound.items()
    }


def _with_former_names(sound: dict[int, ShardSchema]) -> dict[int, ShardSchema]:
    """Record the former names of columns in the current schema."""
    last, current = newest(sound)
    former = {
        name: current.name_of.get(column)
        for schema in sound.values()
        for name, column in schema.id_of.items()
        if name not in current.id_of
    }
    if former:
        sound[last] = replace(current, former=tuple(former.items()))
    return sound


def current_schema(records: Mapping[int, SchemaRecord]) -> tuple[int, ShardSchema]:
    """The current schema and its id. Raises Corruption if no schema can be read."""
    return newest(valid_schemas(records))


def newest(sound: Mapping[int, ShardSchema]) -> tuple[int, ShardSchema]:
    """The last one of `valid_schemas`, and its id."""
    last = max(sound)
    return last, sound[last]


def check_first(record: SchemaRecord) -> ShardSchema:
    """The schema, if a shard can begin with it; else raises InvalidUsage."""
    try:
        return ShardSchema.from_record(record)
    except Corruption as error:
        raise InvalidUsage(f"{error.message}; nothing was changed") from error


def check_next(record: SchemaRecord, known: Mapping[int, SchemaRecord]) -> tuple[ShardSchema, ShardSchema]:
    """The current one of the schemas `known`, and this one. Raises InvalidUsage unless a shard can evolve to it."""
    new, current = check_first(record), current_schema(known)[1]
    check_evolution(current, new)
    return current, new


class Migration:
    """Converts rows of `old` to `new`, a later schema of the same shard.

    Missing columns have their default, or are null. If a value column was dropped, rows of the older schema `coarsen`:
    rows that differed may become equal, and they are sorted by key only.
    """

    def __init__(self, old: ShardSchema, new: ShardSchema) -> None:
        self.old = old
        self.new = new

    @cached_property
    def sources(self) -> dict[str, str]:
        """The columns of `new` that `old` has, with their names in `old`; also `__time` and `__diff`.

        If one of the schemas is plain, its ids are positions, so columns are matched by name.
        """
        if self.old.is_plain or self.new.is_plain:
            sources = {name: name for name in self.new.arrow.names if name in self.old.id_of}
        else:
            before = self.old.name_of
            sources = {name: before[number] for name, number in self.new.id_of.items() if number in before}
        return {**sources, TIME: TIME, DIFF: DIFF}

    @cached_property
    def coarsens(self) -> bool:
        """Whether different rows may become equal."""
        return len(self.sources) - 2 < len(self.old.arrow)

    def names(self, columns: Iterable[str]) -> list[str]:
        """The names in `old` of these columns of `new`, without those that it lacks."""
        return [self.sources[name] for name in columns if name in self.sources]

    def column(self, rows: pa.Table, field: pa.Field) -> Any:
        """A column of `new`, from rows of `old` with at least the columns that `names` returns for it."""
        source = self.sources.get(field.name)
        if source is not None:
            try:
                return as_type(rows.column(source), field.type)
            except KeyError as error:
                raise Corruption(f"a part lacks the column {source!r} of its schema") from error
        return self.new.defaulted(field.name, len(rows))

    def rows(self, table: pa.Table) -> pa.Table:
        """Convert rows of `old`, with all its columns, to `new`."""
        target = self.new.updates_schema
        if self._keeps_names and table.schema.equals(target, check_metadata=True):
            return table
        return pa.Table.from_arrays([self.column(table, field) for field in target], schema=target)

    @cached_property
    def is_by_name(self) -> bool:
        """Whether any Parquet reader gets the columns of `new` by their names: missing columns are null."""
        if self.coarsens or not all(name == source for name, source in self.sources.items()):
            return False
        absent = [name for name in self.new.arrow.names if name not in self.sources]
        if any(name in self.old.id_of or name in self.new.defaults for name in absent):
            return False
        return all(
            self.old.arrow.field(name).type == self.new.arrow.field(name).type
            for name in self.sources
            if name in self.new.id_of
        )

    @cached_property
    def _keeps_names(self) -> bool:
        """Whether each column of `new` has the same name in `old`."""
        is_whole = len(self.sources) == len(self.new.updates_schema)
        return is_whole and all(name == source for name, source in self.sources.items())
