"""What verbs make of the contents of a shard: `upsert`, `delete`, `update`, `replace_where`, `overwrite`.

`merging` has the plan of `merge`. Rows that come out as they were cancel out, and are not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.client.planned import ALL, Bound, Contents, matching, with_keys
from persist.client.write import Updates, as_updates
from persist.core.errors import InvalidUsage, shown
from persist.parts import DIFF, TIME, ShardSchema, consolidate, negated
from persist.parts.computing import Value, computed, counted, told
from persist.parts.consolidate import join
from persist.parts.digest import digest_of_rows
from persist.parts.given import differing, given_key
from persist.parts.keycodec import SortedKeys
from persist.parts.keyed import (
    ABSENT,
    check_single,
    distinct_keys,
    firsts,
    key_schema,
    places,
    single_keys,
)

KEYS_MAX = 1_000_000  # that `delete` names


def is_dicts(rows: Updates) -> TypeGuard[list[dict[str, Any]]]:
    """Whether the rows come as Python's."""
    return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)


def check_alike(rows: Updates, what: str, delete_column: str | None = None) -> None:
    """Raise InvalidUsage where rows come as dicts of which one lacks a column that another has.

    Null would come for it, where a column that is absent from all keeps its value. Rows that only take their key away
    may lack any.
    """
    if not is_dicts(rows):
        return
    has = [(row.keys() - {delete_column}, bool(row.get(delete_column or ""))) for row in rows]
    if (found := differing(has)) is not None:
        raise InvalidUsage(
            f"row {found[0]} differs from others in whether it has column {found[1]!r}; the rows of {what} have the "
            "same columns: give None where null is meant, or write them apart"
        )


def whole_rows(rows: Updates, schema: ShardSchema) -> pa.Table:
    """As `source_table`, with all columns: what the rows leave out has its default, or is null, as for an insert."""
    if is_dicts(rows):
        blank = dict.fromkeys(name for name in schema.arrow.names if name not in schema.defaults)
        rows = [{**blank, **row} for row in rows]
    given = source_table(rows, schema, schema.key, may_lack=True)
    columns = [
        given.column(name) if name in given.column_names else schema.absent(name, len(given))
        for name in schema.arrow.names
    ]
    return pa.Table.from_arrays(columns, schema=nullable(schema.arrow))


def source_table(
    rows: Updates, schema: ShardSchema, needed: Sequence[str], extra: Sequence[str] = (), *, may_lack: bool = False
) -> pa.Table:
    """The rows of a source, in whatever form, with those of the shard's columns that they give, and `extra` ones.

    They are held in memory. `may_lack`: of several tables some may lack a column that the first one has. Raises
    InvalidUsage where one of the columns that are `needed` is absent, or a value does not fit its column.
    """
    given = names_given(rows, schema)
    for reserved in (TIME, DIFF):
        if reserved in given:
            raise InvalidUsage(f"the rows have a column {reserved!r}: they say what is to be there, once each; drop it")
    for name in given:
        if name not in schema.arrow.names and name not in extra:
            raise schema.no_column(name)
    for name in needed:
        if name not in given:
            raise InvalidUsage(f"column {name!r} is absent from the rows")
    chosen = [name for name in schema.arrow.names if name in given]
    others = [pa.field(name, pa.bool_()) for name in extra if name in given]
    some = schema.some(chosen, [name for name in schema.key if name in given] or needed, others)
    tables = []
    for number, table in enumerate(tables_of(as_updates(rows, some))):
        for name in () if may_lack else chosen:
            if name not in table.column_names:
                raise InvalidUsage(
                    f"table {number} of the rows lacks column {name!r}, which others have; give all the same"
                )
        tables.append(some.conform(table, 0))
    whole = pa.concat_tables(tables) if tables else some.updates_schema.empty_table()
    return whole.drop_columns([TIME, DIFF])


def names_given(rows: Updates, schema: ShardSchema) -> list[str]:
    """The columns that a source has. A source that can be read only once tells them by its Arrow schema."""
    if is_dicts(rows):
        found: dict[str, None] = dict.fromkeys(name for row in rows for name in row)
        for name in found:
            if not isinstance(name, str):
                raise InvalidUsage(f"the rows name a column by {shown(name)}, which is no text")
        return list(found) if rows else schema.arrow.names
    if isinstance(rows, list):
        rows = rows[0]
    names = getattr(getattr(rows, "schema", None), "names", None)
    if not isinstance(names, list):
        names = getattr(rows, "columns", None)
    if names is None and hasattr(rows, "__arrow_c_schema__"):
        names = pa.schema(rows).names
    return schema.arrow.names if names is None else [str(name) for name in names]


def tables_of(rows: Any) -> Iterator[pa.Table]:
    """What `as_updates` gives, table by table. Raises InvalidUsage."""
    for batch in [rows] if isinstance(rows, (pa.Table, pa.RecordBatch)) else rows:
        if not isinstance(batch, (pa.Table, pa.RecordBatch)):
            raise InvalidUsage(f"rows come as dicts, or as tables or batches of Arrow, not as {shown(batch)}")
        yield pa.table(batch) if isinstance(batch, pa.RecordBatch) else batch


@dataclass(frozen=True)
class Delete:
    """The rows go for which `where` is true, or that have one of the `keys`: tuples in key order, or single values."""

    where: str | None
    keys: Sequence[Any] | None

    verb: ClassVar[str] = "delete"

    def bound(self, schema: ShardSchema) -> Bound:
        if self.where is not None:
            return _Delete(schema, matching(self.where, schema), [self.where, None])
        keyed = key_schema(schema)
        keys = self._keys(keyed)
        return _Delete(schema, with_keys(keys, keyed, schema), [None, str(digest_of_rows(keys))])

    def _keys(self, keyed: ShardSchema) -> pa.Table:
        assert self.keys is not None
        wanted = [key if isinstance(key, (tuple, list)) else (key,) for key in self.keys]
        for key in wanted:
            if len(key) != len(keyed.key):
                raise InvalidUsage(f"a key has {len(key)} values; it needs one for each of {', '.join(keyed.key)}")
        columns = zip(*(given_key(keyed, key) for key in wanted), strict=True)
        arrays = [pa.array(values, field.type) for values, field in zip(columns, keyed.arrow, strict=True)]
        return distinct_keys(pa.Table.from_arrays(arrays, schema=nullable(keyed.arrow)), keyed)


class _Delete(Bound):
    @property
    def may_crowd(self) -> bool:
        return False

    def updates(self, contents: Contents) -> Iterator[pa.Table]:
        yield from map(negated, self.those.rows(contents))


@dataclass(frozen=True)
class Update:
    """The rows for which `where` is true (None: all) get new values in some columns."""

    where: str | None
    sets: Mapping[str, Value]

    verb: ClassVar[str] = "update"

    def bound(self, schema: ShardSchema) -> Bound:
        schema.columns(self.sets)
        with_values(schema.arrow.empty_table(), self.sets, schema)  # refuses what fits no row, whether there are any
        those = ALL if self.where is None else matching(self.where, schema)
        kinds = schema.arrow
        question = [self.where, {name: told(name, one, kinds.field(name).type) for name, one in self.sets.items()}]
        return _Update(schema, those, question, sets=self.sets)


@dataclass(frozen=True, kw_only=True)
class _Update(Bound):
    sets: Mapping[str, Value]

    @property
    def may_crowd(self) -> bool:
        return not self.sets.keys().isdisjoint(self.schema.key)

    def updates(self, contents: Contents) -> Iterator[pa.Table]:
        for rows in self.those.rows(contents):
            yield from changed(rows, with_values(rows, self.sets, self.schema), self.schema)


@dataclass(frozen=True)
class ReplaceWhere:
    """The rows for which `where` is true go, and `rows` come, for all of which it must be true."""

    where: str
    rows: Updates

    verb: ClassVar[str] = "replace_where"

    def bound(self, schema: ShardSchema) -> Bound:
        fresh, those = counted(whole_rows(self.rows, schema)), matching(self.where, schema)
        if len(those.pick(fresh)) < len(fresh):
            raise InvalidUsage("rows were given for which `where` is not true; they would not be replaced next time")
        return _Replace(schema, those, [self.where, str(digest_of_rows(fresh))], fresh=fresh)


@dataclass(frozen=True)
class Overwrite:
    """Everything goes, and `rows` come."""

    rows: Updates

    verb: ClassVar[str] = "overwrite"

    def bound(self, schema: ShardSchema) -> Bound:
        fresh = counted(whole_rows(self.rows, schema))
        return _Replace(schema, ALL, [str(digest_of_rows(fresh))], fresh, fresh=fresh)


@dataclass(frozen=True, kw_only=True)
class _Replace(Bound):
    fresh: pa.Table

    def updates(self, contents: Contents) -> Iterator[pa.Table]:
        """Old and new rows side by side, in key order, so that those that stay are left out."""
        schema = self.schema
        fresh = consolidate([schema.conform(self.fresh, 0)], schema).drop_columns([TIME])
        old = fresh.slice(0, 0)
        for table in self.those.rows(contents):
            old = join([old, table.select(fresh.schema.names)])
            keys = SortedKeys(old, schema.key)
            last = keys.last  # more rows of this key may follow
            done, came = keys.bisect(last), SortedKeys(fresh, schema.key).bisect(last)
            yield from changed(old.slice(0, done), fresh.slice(0, came), schema)
            old, fresh = old.slice(done), fresh.slice(came)
        yield from changed(old, fresh, schema)


@dataclass(frozen=True)
class Upsert:
    """Each key of `rows` has afterwards the row that was given, and no other.

    Where `rows` lack columns, a key that is there keeps its values in them, and a new one has null. Rows whose
    `delete_column` is true only take their key away.
    """

    rows: Updates
    delete_column: str | None = None

    verb: ClassVar[str] = "upsert"

    def bound(self, schema: ShardSchema) -> Bound:
        rows, gone = self._given(schema)
        keyed = key_schema(schema)
        keys = single_keys(pa.concat_tables([rows.select(list(schema.key)), gone]), keyed, "an upsert")
        question = [sorted(rows.schema.names), str(digest_of_rows(counted(rows))), str(digest_of_rows(counted(gone)))]
        return _Upsert(schema, with_keys(keys, keyed, schema), question, keyed=keyed, rows=rows)

    def _given(self, schema: ShardSchema) -> tuple[pa.Table, pa.Table]:
        """The rows that come, and the keys that only go."""
        column = self.delete_column
        if column in schema.arrow.names:
            raise InvalidUsage(
                f"delete_column names {column!r}, which is a column of the shard too; give it another name in the rows"
            )
        if is_dicts(self.rows) and not self.rows:
            column = None  # no row names a column
        extra = () if column is None else (column,)
        check_alike(self.rows, "an upsert", column)
        table = source_table(self.rows, schema, [*schema.key, *extra], extra)
        if column is None:
            return table, table.select(list(schema.key)).slice(0, 0)
        is_gone = table.column(column).fill_null(False)
        table = table.drop_columns([column])
        return table.filter(pc.invert(is_gone)), table.filter(is_gone).select(list(schema.key))


@dataclass(frozen=True, kw_only=True)
class _Upsert(Bound):
    keyed: ShardSchema
    rows: pa.Table

    @property
    def may_crowd(self) -> bool:
        return False  # each key has the row that was given, and no other

    def updates(self, contents: Contents) -> Iterator[pa.Table]:
        schema, keyed, rows = self.schema, self.keyed, self.rows
        is_whole = set(rows.schema.names) == set(schema.arrow.names)
        is_left = np.ones(len(rows), np.bool_)  # those whose key was not met yet
        met = keyed.updates_schema.empty_table()
        for old in self.those.rows(contents):
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


def _check_one_row(old: pa.Table, met: pa.Table, keyed: ShardSchema) -> pa.Table:
    """The last key of the rows. Raises InvalidUsage where a key has more than one row: which keeps its values?"""
    rows = old.select([*keyed.key, DIFF])
    times = pc.abs(rows.column(DIFF))  # a row that is there less than no times is one more
    rows = rows.set_column(len(keyed.key), rows.schema.field(DIFF), times)
    keys = consolidate([keyed.conform(rows, 0), *([met] if len(met) else ())], keyed)
    check_single(keys, keyed, "an upsert of some of the columns")
    return keys.slice(len(keys) - 1)


def _completed(rows: pa.Table, old: pa.Table, keyed: ShardSchema, schema: ShardSchema) -> pa.Table:
    """The rows with the columns that they lack, as the old rows of their keys have them."""
    there = old.take(pa.array(places(rows, old, keyed)))
    return pa.table(
        [(rows if name in rows.schema.names else there).column(name) for name in schema.arrow.names],
        schema=nullable(schema.arrow),
    )


def nullable(schema: pa.Schema) -> pa.Schema:
    """The same columns, which may have nulls."""
    return pa.schema([field.with_nullable(True) for field in schema])


def filled(rows: pa.Table, schema: ShardSchema) -> pa.Table:
    """New rows with `__diff` 1, and what they lack: defaults, or null. Raises InvalidUsage where one takes no null."""
    if not len(rows):
        return schema.updates_schema.empty_table().drop_columns([TIME])
    columns = []
    for field in schema.arrow:
        if field.name in rows.schema.names:
            columns.append(rows.column(field.name))
            continue
        if not field.nullable and field.name not in schema.defaults:
            raise InvalidUsage(f"column {field.name!r} is absent from the rows, and takes no null in a row that is new")
        columns.append(schema.defaulted(field.name, len(rows)))
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
