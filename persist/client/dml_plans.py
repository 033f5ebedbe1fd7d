"""Plans of upsert, delete, update, replace_where and overwrite: what they read of the contents and make of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Protocol, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.client.snapshot import Held, kept, part_reader
from persist.client.write import Updates, as_updates
from persist.core.batch import Run
from persist.core.errors import InvalidUsage, shown
from persist.core.frontier import Antichain
from persist.core.shard_view import ShardView
from persist.core.truncation import pending_drop
from persist.parts import ALL_KEYS, DIFF, TIME, KeyRange, ShardSchema, consolidate, current_schema, negated
from persist.parts.consolidate import join
from persist.parts.constraint_checks import KEYS_SHOWN_MAX, UNIQUE, count_text, duplicate_keys, key_tuples, violation
from persist.parts.filter_eval import Filter
from persist.parts.key_encoding import (
    ABSENT,
    KeyPoints,
    SortedKeys,
    check_unique,
    distinct_keys,
    first_of_key,
    key_schema,
    match_keys,
    semi_join,
    unique_keys,
)
from persist.parts.part_files import RowGroupFilter
from persist.parts.python_values import find_differing_row, parse_key
from persist.parts.row_stats import digest_of_rows, numbers_of_rows
from persist.parts.schema_changes import Value, compute_column, value_digest, with_diffs
from persist.parts.schema_evolution import current_for_names, valid_schemas

# What a verb is to its commit: a plan, which is bound to the schema of a shard and reads some of its contents.


@dataclass(frozen=True)
class Contents:
    """What a plan reads: a shard as of a time. `held` None: nothing was ever written to it.

    `following`: `rows` are read from these runs, as of this time, and not from those of `held`.
    """

    schema: ShardSchema
    held: Held | None
    time: int
    following: tuple[tuple[Run, ...], int] | None = None

    def for_next_commit(self, *, retracts: bool) -> tuple[Contents, int]:
        """What the rows of the next commit meet, which makes what is pending effective; and the cut of a truncation.

        `retracts`: that commit takes rows away, so that a pending truncation is withdrawn. A cut of 0: there is none.
        """
        if self.held is None or self.held.view.upper != Antichain(self.time + 1):
            return self, 0
        waiting = None if retracts else pending_drop(self.held.view.drops, self.held.view.upper)
        cut = 0 if waiting is None else waiting.cut
        return replace(self, following=self.held.with_pending(cut)), cut

    def rows(self, key_range: KeyRange = ALL_KEYS, keeps: RowGroupFilter | None = None) -> Iterator[pa.Table]:
        """The rows of a key range in key order, with `__diff`. `keeps` is as `PartReader` says. Raises as a read."""
        if self.held is None:
            return
        _, reader = part_reader(self.held.transport, self.held.view, self.held.settings, keeps)
        runs, time = self.following or (self.held.runs, self.time)
        yield from kept(reader.read_range(runs, as_of=time, key_range=key_range), self.held.lease)

    def changes(
        self, after: int, key_range: KeyRange = ALL_KEYS, keeps: RowGroupFilter | None = None
    ) -> Iterator[pa.Table]:
        """What was added and removed since the time `after`, as rows with `__diff`."""
        if self.held is None:
            return
        _, reader = part_reader(self.held.transport, self.held.view, self.held.settings, keeps)
        found = reader.read_changes(self.held.runs, after, self.time, key_range=key_range)
        yield from kept(found, self.held.lease)


@dataclass(frozen=True)
class Those:
    """Some rows of a shard: which are read for them, and which of those that were read they are."""

    key_range: KeyRange
    keeps: RowGroupFilter | None
    pick: Callable[[pa.Table], pa.Table]

    def rows(self, contents: Contents) -> Iterator[pa.Table]:
        """They as of the time of the contents."""
        if self.key_range.is_empty:
            return
        for table in contents.rows(self.key_range, self.keeps):
            if len(found := self.pick(table)):
                yield found

    def concern(self, contents: Contents, after: int) -> bool:
        """Whether one of them was added or taken away since the time `after`."""
        if self.key_range.is_empty:
            return False
        return any(len(self.pick(table)) for table in contents.changes(after, self.key_range, self.keeps))


ALL = Those(ALL_KEYS, None, lambda table: table)
NONE = Those(KeyRange(b"", b""), None, lambda table: table.slice(0, 0))


def matching(where: str, schema: ShardSchema) -> Those:
    """The rows for which a predicate is true. Raises InvalidUsage."""
    found = Filter.of(where, schema)
    return Those(found.key_range(), found.may_match, found.apply)


def with_keys(keys: pa.Table, keyed: ShardSchema, schema: ShardSchema) -> Those:
    """The rows whose columns `keyed.key` have the values of one of the sorted `keys`."""
    if not len(keys):
        return NONE
    span: KeyRange = KeyPoints.of(keys, keyed) if keyed.key == schema.key else ALL_KEYS
    return Those(span, None, partial(semi_join, keys=keys, keyed=keyed))


class Plan(Protocol):
    """What one verb does to a shard."""

    verb: ClassVar[str]

    def bound(self, schema: ShardSchema) -> BoundVerb:
        """For a shard with this schema. Raises InvalidUsage where it does not fit."""
        ...


@dataclass(frozen=True)
class BoundVerb(ABC):
    """A plan for a shard with this schema: what was given is read by it once.

    `those` are the rows of the shard that it reads. `question` is what was asked for, as JSON: a token stands for it.
    `replacement` has the rows that stand in the place of all that is there, whatever that is; None: it is no such verb.
    """

    schema: ShardSchema
    those: Those
    question: Sequence[object]
    replacement: pa.Table | None = None

    @property
    def may_crowd(self) -> bool:
        """Whether a key may come to have more rows than it had, so that unique keys have to be looked up."""
        return True

    @property
    def source_names(self) -> Sequence[str]:
        """Columns of a source which may have others than the shard has."""
        return ()

    @property
    def cut(self) -> int:
        """The pending truncation by which what was worked out last goes, as `CompareAndAppend` says; 0: none."""
        return 0

    @abstractmethod
    def updates(self, contents: Contents) -> Iterator[pa.Table]:
        """The rows that are added and taken away, by their `__diff`. Raises InvalidUsage."""

    def concerns(self, contents: Contents, after: int) -> bool:
        """Whether what was changed since the time `after` may change what `updates` gave then."""
        return self.those.concern(contents, after)


class GainedKeys:
    """The keys that get rows by some changes. Of each row that is changed it holds the key and a number.

    Keys are looked at with their rows: one that is taken away without being there makes no room for another one. Where
    a key loses a row and gets one, it is looked at as well: the one that it loses need not have been there.
    """

    def __init__(self, schema: ShardSchema) -> None:
        self._schema = schema
        self._keyed = key_schema(schema)
        self._number = "number of " + " ".join(schema.key)  # which is the name of none of them
        numbered = self._keyed.arrow.append(pa.field(self._number, pa.uint64(), nullable=False))
        self._lines = ShardSchema(numbered, schema.key)
        self._changed: list[pa.Table] = []

    def of(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """The changes, whose keys are noted as they pass."""
        for rows in tables:
            self._changed.append(self._numbered(rows))
            yield rows

    def rows(self) -> Those:
        """The rows of a shard that have one of the keys."""
        return with_keys(self._gained(), self._keyed, self._schema)

    def check(self, contents: Contents, *, are_changed: bool) -> None:
        """Raise ConstraintViolated where one of the keys has more than one row.

        `are_changed`: the contents have the changes; otherwise these come to them.
        """
        gained = self._gained()
        if not len(gained):
            return
        found = [self._numbered(rows) for rows in with_keys(gained, self._keyed, self._schema).rows(contents)]
        if not are_changed:
            found += [semi_join(rows, gained, self._keyed) for rows in self._changed]
        check_uncrowded(consolidate(found, self._lines), self._lines)

    def _gained(self) -> pa.Table:
        self._changed = [consolidate(self._changed, self._lines)]
        return distinct_keys(self._changed[0].filter(pc.greater(self._changed[0].column(DIFF), 0)), self._keyed)

    def _numbered(self, rows: pa.Table) -> pa.Table:
        """The keys of the rows, each with a number that stands for the row: rows may be large."""
        rows = self._schema.conform(rows, 0)
        numbers = pa.array(numbers_of_rows(rows.drop_columns([TIME])))
        return self._lines.conform(rows.select([*self._keyed.key, DIFF]).append_column(self._number, numbers), 0)


@dataclass(frozen=True, kw_only=True)
class Guarded(BoundVerb):
    """What a plan does to a shard whose keys are unique: refused where a key would have more than one row.

    `gained` has the keys that get rows by what was worked out last.
    """

    inner: BoundVerb
    gained: list[GainedKeys]

    @classmethod
    def of(cls, inner: BoundVerb) -> Guarded:
        """Raises ConstraintViolated where rows that stand in the place of all that is there have a key twice."""
        if inner.replacement is not None:
            keyed = key_schema(inner.schema)
            check_uncrowded(distinct_keys(inner.replacement, keyed), keyed)
        return cls(inner.schema, inner.those, inner.question, inner.replacement, inner=inner, gained=[])

    def updates(self, contents: Contents) -> Iterator[pa.Table]:
        self.gained[:] = [GainedKeys(self.schema)]
        yield from self.gained[0].of(self.inner.updates(contents))
        self.gained[0].check(contents, are_changed=False)

    def concerns(self, contents: Contents, after: int) -> bool:
        if self.inner.concerns(contents, after):
            return True
        return any(keys.rows().concern(contents, after) for keys in self.gained)


def check_uncrowded(rows: pa.Table, schema: ShardSchema) -> None:
    """Raise ConstraintViolated where a key has more than one of these rows, which would be all of it, at some time."""
    keys = duplicate_keys(rows, schema)
    if len(keys):
        raise violation(
            f"constraint {UNIQUE!r}: {count_text(len(keys), 'key')} would have more than one row; nothing was written: "
            "upsert the rows, or take away the old ones in the same write",
            UNIQUE,
            key_tuples(keys.slice(0, KEYS_SHOWN_MAX)),
            len(keys),
        )


class VerbBinding:
    """A plan as it is for the schema that a shard has, which may change between two looks at it.

    `known` is the id of the schema by whose names the caller has said what is to happen.
    """

    def __init__(self, plan: Plan, known: int) -> None:
        self.verb = plan.verb
        self._plan = plan
        self._known = known
        self._found: tuple[int, BoundVerb] | None = None

    @property
    def cut(self) -> int:
        """As `BoundVerb.cut`, of the plan as it was bound last."""
        return 0 if self._found is None else self._found[1].cut

    def to(self, view: ShardView) -> BoundVerb:
        """The plan for this view. Raises InvalidUsage where it does not fit, or a name means another column by now."""
        number, schema = current_schema(view.schemas)
        if self._found is None or self._found[0] != number:
            schemas = valid_schemas(view.schemas)
            known = schemas.get(self._known, current_for_names(schemas, self._known))
            bound = self._plan.bound(schema)
            for name in bound.source_names:
                if name not in schema.id_of and known.id_of.get(name) in schema.name_of:
                    raise schema.no_column(name)
            is_guarded = schema.details.unique and bound.may_crowd
            self._found = number, Guarded.of(bound) if is_guarded else bound
        return self._found[1]


# What verbs make of the contents of a shard: `upsert`, `delete`, `update`, `replace_where`, `overwrite`.
#
# `merging` has the plan of `merge`. Rows that come out as they were cancel out, and are not written.


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
    if (found := find_differing_row(has)) is not None:
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

    def bound(self, schema: ShardSchema) -> BoundVerb:
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
        columns = zip(*(parse_key(keyed, key) for key in wanted), strict=True)
        arrays = [pa.array(values, field.type) for values, field in zip(columns, keyed.arrow, strict=True)]
        return distinct_keys(pa.Table.from_arrays(arrays, schema=nullable(keyed.arrow)), keyed)


class _Delete(BoundVerb):
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

    def bound(self, schema: ShardSchema) -> BoundVerb:
        schema.columns(self.sets)
        with_values(schema.arrow.empty_table(), self.sets, schema)  # refuses what fits no row, whether there are any
        those = ALL if self.where is None else matching(self.where, schema)
        kinds = schema.arrow
        question = [
            self.where,
            {name: value_digest(name, one, kinds.field(name).type) for name, one in self.sets.items()},
        ]
        return _Update(schema, those, question, sets=self.sets)


@dataclass(frozen=True, kw_only=True)
class _Update(BoundVerb):
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

    def bound(self, schema: ShardSchema) -> BoundVerb:
        fresh, those = with_diffs(whole_rows(self.rows, schema)), matching(self.where, schema)
        if len(those.pick(fresh)) < len(fresh):
            raise InvalidUsage("rows were given for which `where` is not true; they would not be replaced next time")
        return _Replace(schema, those, [self.where, str(digest_of_rows(fresh))], fresh=fresh)


@dataclass(frozen=True)
class Overwrite:
    """Everything goes, and `rows` come."""

    rows: Updates

    verb: ClassVar[str] = "overwrite"

    def bound(self, schema: ShardSchema) -> BoundVerb:
        fresh = with_diffs(whole_rows(self.rows, schema))
        return _Replace(schema, ALL, [str(digest_of_rows(fresh))], fresh, fresh=fresh)


@dataclass(frozen=True, kw_only=True)
class _Replace(BoundVerb):
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

    def bound(self, schema: ShardSchema) -> BoundVerb:
        rows, gone = self._given(schema)
        keyed = key_schema(schema)
        keys = unique_keys(pa.concat_tables([rows.select(list(schema.key)), gone]), keyed, "an upsert")
        question = [
            sorted(rows.schema.names),
            str(digest_of_rows(with_diffs(rows))),
            str(digest_of_rows(with_diffs(gone))),
        ]
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
class _Upsert(BoundVerb):
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
            found = match_keys(old, rows, keyed)
            fresh = found[first_of_key(old, keyed) & (found != ABSENT)]
            fresh = fresh[is_left[fresh]]
            is_left[fresh] = False
            taken = rows.take(pa.array(fresh))
            if not is_whole:
                taken = _completed(taken, old, keyed, schema)
            yield from changed(old, with_diffs(taken), schema)
        yield filled(rows.filter(pa.array(is_left)), schema)


def _check_one_row(old: pa.Table, met: pa.Table, keyed: ShardSchema) -> pa.Table:
    """The last key of the rows. Raises InvalidUsage where a key has more than one row: which keeps its values?"""
    rows = old.select([*keyed.key, DIFF])
    times = pc.abs(rows.column(DIFF))  # a row that is there less than no times is one more
    rows = rows.set_column(len(keyed.key), rows.schema.field(DIFF), times)
    keys = consolidate([keyed.conform(rows, 0), *([met] if len(met) else ())], keyed)
    check_unique(keys, keyed, "an upsert of some of the columns")
    return keys.slice(len(keys) - 1)


def _completed(rows: pa.Table, old: pa.Table, keyed: ShardSchema, schema: ShardSchema) -> pa.Table:
    """The rows with the columns that they lack, as the old rows of their keys have them."""
    there = old.take(pa.array(match_keys(rows, old, keyed)))
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
    return with_diffs(pa.Table.from_arrays(columns, schema=nullable(schema.arrow)))


def with_values(rows: pa.Table, sets: Mapping[str, Value], schema: ShardSchema, of: pa.Table | None = None) -> pa.Table:
    """The rows with new values in the columns that `sets` names, computed from them (or from `of`, row by row)."""
    source = rows if of is None else of
    for name, value in sets.items():
        field = schema.arrow.field(name)
        column = compute_column(name, value, field.type, source)
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
