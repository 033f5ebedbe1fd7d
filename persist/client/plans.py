"""What verbs make of the contents of a shard: `upsert`, `delete`, `update`, `replace_where`, `overwrite`.

`merging` has the plan of `merge`. Rows that come out as they were cancel out, and are not written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.client.editing import Contents
from persist.client.write import Updates, as_updates
from persist.core.errors import InvalidUsage
from persist.parts import ALL_KEYS, DIFF, TIME, KeyRange, ShardSchema, consolidate, negated
from persist.parts.computing import Value, computed
from persist.parts.digest import digest_of_rows
from persist.parts.files import Keeps
from persist.parts.given import given_key
from persist.parts.keyed import (
    ABSENT,
    KeyPoints,
    check_single,
    distinct_keys,
    firsts,
    key_schema,
    places,
    semi_join,
    single_keys,
)
from persist.parts.pruning import Filter

KEYS_MAX = 1_000_000  # that `delete` names


@dataclass(frozen=True)
class Those:
    """Some rows of a shard: which are read for them, and which of those that were read they are."""

    key_range: KeyRange
    keeps: Keeps | None
    pick: Callable[[pa.Table], pa.Table]

    def rows(self, contents: Contents) -> Iterator[pa.Table]:
        """They as of the time of the contents."""
        for table in contents.rows(self.key_range, self.keeps):
            if len(found := self.pick(table)):
                yield found

    def concern(self, contents: Contents, after: int) -> bool:
        """Whether one of them was added or taken away since the time `after`."""
        return any(len(self.pick(table)) for table in contents.changes(after, self.key_range, self.keeps))


ALL = Those(ALL_KEYS, None, lambda table: table)


def matching(where: str, schema: ShardSchema) -> Those:
    """The rows for which a predicate is true. Raises InvalidUsage."""
    found = Filter.of(where, schema)
    return Those(found.key_range(), found.may_match, found.apply)


def with_keys(keys: pa.Table, keyed: ShardSchema, schema: ShardSchema) -> Those:
    """The rows whose columns `keyed.key` have the values of one of the sorted `keys`, at least one."""
    span: KeyRange = KeyPoints.of(keys, keyed) if keyed.key == schema.key else ALL_KEYS
    return Those(span, None, partial(semi_join, keys=keys, keyed=keyed))


def whole_rows(rows: Updates, schema: ShardSchema) -> pa.Table:
    """As `source_table`, of all columns. Where rows come as dicts, what they leave out is null, as for an insert."""
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        rows = [{**dict.fromkeys(schema.arrow.names), **row} for row in rows]
    return source_table(rows, schema, schema.arrow.names)


def source_table(rows: Updates, schema: ShardSchema, needed: Sequence[str], extra: Sequence[str] = ()) -> pa.Table:
    """The rows of a source, in whatever form, with those of the shard's columns that they give, and `extra` ones.

    They are held in memory. Raises InvalidUsage where one of the columns that are `needed` is absent, or a value does
    not fit its column.
    """
    given = names_given(rows, schema)
    for reserved in (TIME, DIFF):
        if reserved in given:
            raise InvalidUsage(f"the rows have a column {reserved!r}: they say what is to be there, once each; drop it")
    for name in given:
        if name not in schema.arrow.names and name not in extra:
            raise InvalidUsage(f"the shard has no column {name!r}; its columns are {', '.join(schema.arrow.names)}")
    for name in needed:
        if name not in given:
            raise InvalidUsage(f"column {name!r} is absent from the rows")
    fields = [field for field in schema.arrow if field.name in given]
    others = [pa.field(name, pa.bool_()) for name in extra if name in given]
    some = ShardSchema(pa.schema([*fields, *others]), tuple(needed))
    tables = [some.conform(table, 0) for table in _tables(as_updates(rows, some))]
    whole = pa.concat_tables(tables) if tables else some.updates_schema.empty_table()
    return whole.drop_columns([TIME, DIFF])


def names_given(rows: Updates, schema: ShardSchema) -> list[str]:
    """The columns that a source has. A source that can be read only once tells them by its Arrow schema."""
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        found: dict[str, None] = dict.fromkeys(name for row in rows for name in row)
        return list(found) if rows else schema.arrow.names
    if isinstance(rows, list):
        rows = rows[0]
    names = getattr(getattr(rows, "schema", None), "names", None)
    if not isinstance(names, list):
        names = getattr(rows, "columns", None)
    if names is None and hasattr(rows, "__arrow_c_schema__"):
        names = pa.schema(rows).names
    return schema.arrow.names if names is None else [str(name) for name in names]


def _tables(rows: Any) -> Iterator[pa.Table]:
    if isinstance(rows, pa.Table):
        yield rows
        return
    for batch in [rows] if isinstance(rows, pa.RecordBatch) else rows:
        yield pa.table(batch) if isinstance(batch, pa.RecordBatch) else batch


@dataclass(frozen=True)
class Delete:
    """The rows go for which `where` is true, or that have one of the `keys`: tuples in key order, or single values."""

    where: str | None
    keys: Sequence[Any] | None

    verb = "delete"

    def question(self, schema: ShardSchema) -> list[object]:
        keys = None if self.keys is None else str(digest_of_rows(self._keys(schema)))
        return [self.where, keys]

    def updates(self, contents: Contents) -> Iterator[pa.Table]:
        yield from map(negated, self._those(contents.schema).rows(contents))

    def concerns(self, contents: Contents, after: int) -> bool:
        return self._those(contents.schema).concern(contents, after)

    def replacement(self, schema: ShardSchema) -> None:
        return None

    def _those(self, schema: ShardSchema) -> Those:
        if self.where is not None:
            return matching(self.where, schema)
        return with_keys(self._keys(schema), key_schema(schema), schema)

    def _keys(self, schema: ShardSchema) -> pa.Table:
        assert self.keys is not None
        wanted = [key if isinstance(key, (tuple, list)) else (key,) for key in self.keys]
        for key in wanted:
            if len(key) != len(schema.key):
                raise InvalidUsage(f"a key has {len(key)} values; it needs one for each of {', '.join(schema.key)}")
        keyed = key_schema(schema)
        columns = zip(*(given_key(schema, key) for key in wanted), strict=True)
        arrays = [pa.array(values, field.type) for values, field in zip(columns, keyed.arrow, strict=True)]
        return distinct_keys(pa.Table.from_arrays(arrays, schema=nullable(keyed.arrow)), keyed)


def nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])


@dataclass(frozen=True)
class Update:
    """The rows for which `where` is true (None: all) get new values in some columns."""

    where: str | None
    sets: Mapping[str, Value]

    verb = "update"

    def question(self, schema: ShardSchema) -> list[object]:
        return [self.where, {name: repr(value) for name, value in self.sets.items()}]

    def updates(self, contents: Contents) -> Iterator[pa.Table]:
        schema = contents.schema
        for rows in self._those(schema).rows(contents):
            yield from changed(rows, with_values(rows, self.sets, schema), schema)

    def concerns(self, contents: Contents, after: int) -> bool:
        return self._those(contents.schema).concern(contents, after)

    def replacement(self, schema: ShardSchema) -> None:
        return None

    def _those(self, schema: ShardSchema) -> Those:
        schema.columns(self.sets)
        return ALL if self.where is None else matching(self.where, schema)


@dataclass(frozen=True)
class ReplaceWhere:
    """The rows for which `where` is true go, and `rows` come, for all of which it must be true."""

    where: str
    rows: Updates

    verb = "replace_where"

    def question(self, schema: ShardSchema) -> list[object]:
        return [self.where, str(digest_of_rows(counted(whole_rows(self.rows, schema))))]

    def updates(self, contents: Contents) -> Iterator[pa.Table]:
        schema = contents.schema
        fresh = whole_rows(self.rows, schema)
        if len(Filter.of(self.where, schema).apply(fresh)) < len(fresh):
            raise InvalidUsage("rows were given for which `where` is not true; they would not be replaced next time")
        yield from map(negated, matching(self.where, schema).rows(contents))
        yield counted(fresh)

    def concerns(self, contents: Contents, after: int) -> bool:
        return matching(self.where, contents.schema).concern(contents, after)

    def replacement(self, schema: ShardSchema) -> None:
        return None


@dataclass(frozen=True)
class Overwrite:
    """Everything goes, and `rows` come."""

    rows: Updates

    verb = "overwrite"

    def question(self, schema: ShardSchema) -> list[object]:
        return [str(digest_of_rows(self.replacement(schema)))]

    def updates(self, contents: Contents) -> Iterator[pa.Table]:
        yield from map(negated, contents.rows())
        yield self.replacement(contents.schema)

    def concerns(self, contents: Contents, after: int) -> bool:
        return ALL.concern(contents, after)

    def replacement(self, schema: ShardSchema) -> pa.Table:
        return counted(whole_rows(self.rows, schema))


@dataclass(frozen=True)
class Upsert:
    """Each key of `rows` has afterwards the row that was given, and no other.

    Where `rows` lack columns, a key that is there keeps its values in them, and a new one has null. Rows whose
    `delete_column` is true only take their key away.
    """

    rows: Updates
    delete_column: str | None = None

    verb = "upsert"

    def question(self, schema: ShardSchema) -> list[object]:
        rows, gone = self._given(schema)
        return [sorted(rows.schema.names), str(digest_of_rows(counted(rows))), str(digest_of_rows(counted(gone)))]

    def updates(self, contents: Contents) -> Iterator[pa.Table]:
        schema, keyed = contents.schema, key_schema(contents.schema)
        rows, gone = self._given(schema)
        keys = single_keys(pa.concat_tables([rows.select(list(schema.key)), gone]), keyed, "an upsert")
        if not len(keys):
            return
        is_whole = set(rows.schema.names) == set(schema.arrow.names)
        is_left = np.ones(len(rows), np.bool_)  # those whose key was not met yet
        met = keys.slice(0, 0)
        for old in with_keys(keys, keyed, schema).rows(contents):
            if not is_whole:
                met = _check_one_row(old, met, keyed)
            found = places(old, rows, keyed)
            fresh = found[firsts(old, keyed) & (found != ABSENT)]
            fresh = fresh[is_left[fresh]]
            is_left[fresh] = False
            taken = rows.take(pa.array(fresh))
            if not is_whole:
                taken = _completed(taken, old, keyed, schema)
            yield from changed(old, counted(taken), schema)
        yield filled(rows.filter(pa.array(is_left)), schema)

    def concerns(self, contents: Contents, after: int) -> bool:
        keyed = key_schema(contents.schema)
        rows, gone = self._given(contents.schema)
        keys = distinct_keys(pa.concat_tables([rows.select(list(keyed.key)), gone]), keyed)
        return bool(len(keys)) and with_keys(keys, keyed, contents.schema).concern(contents, after)

    def replacement(self, schema: ShardSchema) -> None:
        return None

    def _given(self, schema: ShardSchema) -> tuple[pa.Table, pa.Table]:
        """The rows that come, and the keys that only go."""
        column = self.delete_column
        extra = () if column is None else (column,)
        table = source_table(self.rows, schema, [*schema.key, *extra], extra)
        if column is None:
            return table, table.select(list(schema.key)).slice(0, 0)
        is_gone = table.column(column).fill_null(False)
        table = table.drop_columns([column])
        return table.filter(pc.invert(is_gone)), table.filter(is_gone).select(list(schema.key))


def _check_one_row(old: pa.Table, met: pa.Table, keyed: ShardSchema) -> pa.Table:
    """The last key of the rows. Raises InvalidUsage where a key has more than one row: which keeps its values?"""
    keys = consolidate([keyed.conform(old.select([*keyed.key, DIFF]), 0), *([met] if len(met) else ())], keyed)
    check_single(keys, keyed, "an upsert of some of the columns")
    return keys.slice(len(keys) - 1)


def _completed(rows: pa.Table, old: pa.Table, keyed: ShardSchema, schema: ShardSchema) -> pa.Table:
    """The rows with the columns that they lack, as the old rows of their keys have them."""
    there = old.take(pa.array(places(rows, old, keyed)))
    return pa.table(
        [(rows if name in rows.schema.names else there).column(name) for name in schema.arrow.names],
        schema=nullable(schema.arrow),
    )


def filled(rows: pa.Table, schema: ShardSchema) -> pa.Table:
    """New rows with `__diff` 1, and null in the columns that they lack. Raises InvalidUsage where one takes no null."""
    if not len(rows):
        return schema.updates_schema.empty_table().drop_columns([TIME])
    columns = [
        rows.column(field.name) if field.name in rows.schema.names else pa.nulls(len(rows), field.type)
        for field in schema.arrow
    ]
    for field in schema.arrow:
        if field.name not in rows.schema.names and not field.nullable:
            raise InvalidUsage(f"column {field.name!r} is absent from the rows, and takes no null in a row that is new")
    return counted(pa.Table.from_arrays(columns, schema=nullable(schema.arrow)))


def with_values(rows: pa.Table, sets: Mapping[str, Value], schema: ShardSchema, of: pa.Table | None = None) -> pa.Table:
    """The rows with new values in the columns that `sets` names, computed from them (or from `of`, row by row)."""
    source = rows if of is None else of
    for name, value in sets.items():
        field = schema.arrow.field(name)
        column = computed(name, value, field.type, source)
        if not field.nullable and column.null_count:
            raise InvalidUsage(f"column {name!r} would be null in {column.null_count} rows but does not allow that")
        index = rows.schema.get_field_index(name)
        rows = rows.set_column(index, field.with_nullable(True), column)
    return rows


def changed(old: pa.Table, new: pa.Table, schema: ShardSchema) -> Iterator[pa.Table]:
    """What leads from the old rows to the new ones, both with `__diff`; what is in both is left out."""
    both = consolidate([schema.conform(negated(old), 0), schema.conform(new, 0)], schema)
    if len(both):
        yield both.drop_columns([TIME])


def counted(rows: pa.Table) -> pa.Table:
    """The rows, each there once."""
    return rows.append_column(
        pa.field(DIFF, pa.int64(), nullable=False), pa.repeat(pa.scalar(1, pa.int64()), len(rows))
    )
