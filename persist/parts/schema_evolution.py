"""Which schema may follow which, and how rows of an earlier schema are read by a later one."""

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

# Which schema may follow which: the rules of a schema's life, and the chain of the schemas that a shard has had.
#
# Columns are told by their ids. A plain schema says none: those of plain schemas follow by name from the last plain
# one, of which all before it are a part. Between plain schemas only nullable value columns are added, as ever.


CHAINS_KEPT_MAX = 256  # that were resolved, in a process


def check_evolution(old: ShardSchema, new: ShardSchema) -> None:
    """Raises InvalidUsage, saying why, unless a shard can go on with `new` after `old`."""
    error = evolution_error(old, new)
    if error is not None:
        raise InvalidUsage(f"the schema cannot evolve so: {error}")


def follow_by_name(old: ShardSchema, new: ShardSchema) -> ShardSchema:
    """What follows `old` where somebody gives a plain schema: columns of a name are the same, others are added.

    Raises InvalidUsage unless nullable value columns are added and nothing else is changed.
    """
    if not new.is_plain or old.is_plain:
        check_evolution(old, new)
        return new
    error = _plain_error(old, new)
    if error is not None:
        raise InvalidUsage(f"the schema cannot evolve so: {error}")
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
                "it says no ids, which the columns have since they were changed by name; open the shard with a newer "
                "client, and change its columns by add_column and the like"
            )
        return _plain_error(old, new)
    return _key_error(old, new) or _kept_error(old, new) or _added_error(old, new)


def widening_error(old: Any, new: Any) -> str | None:
    """Why values of type `old` cannot be read as `new`; None: each of them can, and their order stays.

    Where days become microseconds (`widened_days`), that is known once somebody has looked at the values.
    """
    if old == new or _widens(old, new) or widens_days(old, new):
        return None
    zone = ", and a day is no moment before a zone is chosen" if pa.types.is_date32(old) and _has_zone(new) else ""
    return f"changes from {old} to {new}{zone}"


def widens_days(old: Any, new: Any) -> bool:
    """Whether days become moments in microseconds: a day beyond the year 294246 has no room there."""
    return bool(pa.types.is_date32(old) and new == pa.timestamp("us"))


def widened_days(old: ShardSchema, new: ShardSchema) -> dict[str, str]:
    """The columns whose days become moments in microseconds, by their names in `old`, with those in `new`."""
    if new.is_plain:
        return {}
    return {
        name: new.name_of[number]
        for name, number in old.id_of.items()
        if number in new.name_of and widens_days(old.arrow.field(name).type, new.arrow.field(new.name_of[number]).type)
    }


def _has_zone(kind: Any) -> bool:
    return pa.types.is_timestamp(kind) and kind.tz is not None


def _plain_error(old: ShardSchema, new: ShardSchema) -> str | None:
    if old.key != new.key:
        return f"the key is {list(old.key)} for ever, not {list(new.key)}"
    names = set(new.arrow.names)
    for field in old.arrow:
        if field.name not in names:
            return f"column {field.name!r} is gone; keep it"
        if new.arrow.field(field.name) != field:
            return f"column {field.name!r} changes from {field.type} to {new.arrow.field(field.name).type}"
    before = set(old.arrow.names)
    for field in new.arrow:
        if field.name not in before and not field.nullable:
            return f"column {field.name!r} is new, so it must allow nulls"
    if [name for name in new.arrow.names if name in before] != old.arrow.names:
        return "the columns change their order; add new ones without moving old ones"
    return None


def _key_error(old: ShardSchema, new: ShardSchema) -> str | None:
    before, after = [old.id_of[name] for name in old.key], [new.id_of[name] for name in new.key]
    if before != after:
        return f"the key is {list(old.key)} for ever, with other names at most, not {list(new.key)}"
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
                f"key column {now.name!r} changes from {was.type} to {now.type}; rows lie in the order of encoded "
                "keys, which would be others"
            )
        if was.nullable and not now.nullable:
            return f"column {now.name!r} allows nulls, which rows may hold; keep it so"
        if old.details.default_of.get(number) != new.details.default_of.get(number):
            return f"the default of column {now.name!r} is fixed since the column was added; add another column"
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
    if types.is_signed_integer(old) and types.is_signed_integer(new):
        return bool(old.bit_width <= new.bit_width)
    if types.is_unsigned_integer(old) and types.is_unsigned_integer(new):
        return bool(old.bit_width <= new.bit_width)
    if types.is_floating(old) and types.is_floating(new):
        return bool(old.bit_width <= new.bit_width)
    if types.is_decimal(old) and types.is_decimal(new):
        wider = new.bit_width >= old.bit_width and new.scale >= old.scale
        return bool(wider and new.precision - new.scale >= old.precision - old.scale)
    if types.is_date32(old) and types.is_timestamp(new):
        return new.tz is None and new.unit == "ms"  # in microseconds far days have no room: see `widened_days`
    return _grows(old, new)


def _grows(old: Any, new: Any) -> bool:
    """Whether a nested type holds what the old one did: structs get fields that may be null, what is in it widens."""
    types = pa.types
    if types.is_struct(old) and types.is_struct(new):
        names = [field.name for field in old]
        after = [field.name for field in new]
        if len(set(after)) < len(after) or [name for name in after if name in names] != names:
            return False
        return all(_fits(old.field(field.name), field) if field.name in names else field.nullable for field in new)
    if types.is_map(old) and types.is_map(new):
        return bool(old.key_type == new.key_type) and _fits(old.item_field, new.item_field)
    for is_one in (types.is_list, types.is_large_list, types.is_fixed_size_list):
        if is_one(old) and is_one(new):
            sizes = {kind.list_size for kind in (old, new) if types.is_fixed_size_list(kind)}
            return len(sizes) <= 1 and _fits(old.value_field, new.value_field)
    return False


def _fits(old: pa.Field, new: pa.Field) -> bool:
    return (new.nullable or not old.nullable) and (old.type == new.type or _widens(old.type, new.type))


def _same_key_bytes(old: Any, new: Any) -> bool:
    """Whether a value has the same bytes in an encoded key as before."""
    if old == new:
        return True
    return bool(
        pa.types.is_decimal(old)
        and pa.types.is_decimal(new)
        and old.scale == new.scale
        and old.bit_width == new.bit_width
    )


def renames(known: ShardSchema, other: ShardSchema) -> dict[str, str | None]:
    """What another schema of the chain calls each column of `known` (None: it lacks it), `__time` and `__diff`.

    Where one of them is plain, its ids are places, which say nothing about the other: columns keep their names there.
    """
    if known.is_plain or other.is_plain:
        names = {name: name if name in other.id_of else None for name in known.id_of}
    else:
        names = {name: other.name_of.get(number) for name, number in known.id_of.items()}
    return names | {TIME: TIME, DIFF: DIFF}


def moved_names(known: ShardSchema, current: ShardSchema, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Those of the `names` that do not mean the column of `known` any more, each with what became of that column."""
    called = renames(known, current)
    for name in names:
        now = called.get(name, name)
        if now != name:
            yield name, "was dropped" if now is None else f"is called {now!r} now"


def check_names(known: ShardSchema, current: ShardSchema, names: Iterable[str] | None = None) -> None:
    """Raise InvalidUsage where a name that is known from an earlier schema of the chain means another column by now.

    For a caller who says columns by their names, or by these `names` alone: none is taken for another one.
    """
    for name, became in moved_names(known, current, known.arrow.names if names is None else names):
        if name in current.id_of:
            raise InvalidUsage(
                f"column {name!r}, as this handle knows it, {became}, and another column has its name; nothing was "
                "done: call refresh_schema() (a writer: open it anew), and name the columns as they are now"
            )


def current_for_names(
    sound: Mapping[int, ShardSchema], known: int | None, names: Iterable[str] | None = None
) -> ShardSchema:
    """The current schema of the chain, for a caller who names columns as the schema of the id `known` does.

    None: as the current one does. Raises InvalidUsage as `check_names`.
    """
    last, current = newest(sound)
    if known is not None and known != last:
        check_names(sound.get(known, current), current, names)
    return current


# --- the chain


def valid_schemas(records: Mapping[int, SchemaRecord]) -> dict[int, ShardSchema]:
    """The schemas by which rows are written and read, by id ascending: the last one is the current one.

    A schema that cannot be read, or that does not fit the one before it, is left out: an older build let any writer
    register it, and rows of it cannot be read beside the others. Raises Corruption: no schema can be read.
    """
    return dict(_chain(tuple(sorted(records.items()))))


@lru_cache(CHAINS_KEPT_MAX)
def _chain(records: tuple[tuple[int, SchemaRecord], ...]) -> Mapping[int, ShardSchema]:
    """See `valid_schemas`. Every commit and every read asks for the schemas of its shard, which hardly ever change."""
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
    return _numbered(sound)


def _numbered(sound: Mapping[int, ShardSchema]) -> dict[int, ShardSchema]:
    """The chain with ids in its plain schemas too, which come first."""
    plain = [schema for schema in sound.values() if schema.is_plain]
    if not plain:
        return _with_former_names(dict(sound))
    ids = plain[-1].id_of
    following = len(ids) + 1
    found = {
        number: schema.with_details(ids=tuple(ids[name] for name in schema.arrow.names), next_id=following)
        if schema.is_plain
        else schema
        for number, schema in sound.items()
    }
    return _with_former_names(found)


def _with_former_names(sound: dict[int, ShardSchema]) -> dict[int, ShardSchema]:
    """The current schema knows what columns were called before."""
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
    """The id of the last schema that is sound, and the schema. Raises Corruption: no schema can be read."""
    return newest(valid_schemas(records))


def newest(sound: Mapping[int, ShardSchema]) -> tuple[int, ShardSchema]:
    """The current one of `valid_schemas`, and its id."""
    last = max(sound)
    return last, sound[last]


def check_first(record: SchemaRecord) -> ShardSchema:
    """The schema, with which a shard can begin. Raises InvalidUsage: none can."""
    try:
        return ShardSchema.from_record(record)
    except Corruption as error:
        raise InvalidUsage(f"{error.message}; nothing was changed") from error


def check_next(record: SchemaRecord, known: Mapping[int, SchemaRecord]) -> tuple[ShardSchema, ShardSchema]:
    """The current one of the schemas `known` and this one. Raises InvalidUsage unless a shard can evolve to it."""
    new, current = check_first(record), current_schema(known)[1]
    check_evolution(current, new)
    return current, new


# How rows that were written by one schema of a shard are read by a later one.
#
# Columns are told by their ids, so that a new name or another place changes nothing. What rows lack is the default of
# the column, or null. Where a later schema lacks a value column, rows of the older one `coarsen`: some that differed
# are the same now, and they do not lie in the order of the later schema but by their keys.


class Migration:
    """From rows of `old` to rows of `new`, which follows it in the life of one shard."""

    def __init__(self, old: ShardSchema, new: ShardSchema) -> None:
        self.old = old
        self.new = new

    @cached_property
    def sources(self) -> dict[str, str]:
        """The columns of `new` that `old` has, and what these are called there, `__time` and `__diff` with them."""
        if self.old.is_plain or self.new.is_plain:
            found = {name: name for name in self.new.arrow.names if name in self.old.id_of}
        else:
            before = self.old.name_of
            found = {name: before[number] for name, number in self.new.id_of.items() if number in before}
        return {**found, TIME: TIME, DIFF: DIFF}

    @cached_property
    def coarsens(self) -> bool:
        """Whether rows may become the same that were not."""
        return len(self.sources) - 2 < len(self.old.arrow)

    def names(self, columns: Iterable[str]) -> list[str]:
        """What these columns of `new` are called in `old`, those that it has."""
        return [self.sources[name] for name in columns if name in self.sources]

    def column(self, rows: pa.Table, field: pa.Field) -> Any:
        """A column of `new`, of rows of `old` that have at least what `names` says of it."""
        source = self.sources.get(field.name)
        if source is not None:
            try:
                return as_type(rows.column(source), field.type)
            except KeyError as error:
                raise Corruption(f"a part has no column {source!r}, which its schema has") from error
        return self.new.defaulted(field.name, len(rows))

    def rows(self, table: pa.Table) -> pa.Table:
        """Rows of `old` with all its columns, as rows of `new`."""
        target = self.new.updates_schema
        if self._keeps_names and table.schema.equals(target, check_metadata=True):
            return table
        return pa.Table.from_arrays([self.column(table, field) for field in target], schema=target)

    @cached_property
    def is_by_name(self) -> bool:
        """Whether any tool reads the columns of `new` by their names: what is not there is null."""
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
        """Whether each column of `new` is that of the same name in `old`."""
        is_whole = len(self.sources) == len(self.new.updates_schema)
        return is_whole and all(name == source for name, source in self.sources.items())
