"""Plans of upsert, delete, update, replace_where and overwrite: the contents they read, and the updates they make."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol, TypeGuard

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.client.arguments import key_values
from persist.client.snapshot import Held, part_reader, with_renewal
from persist.client.write import Updates, as_updates, names_of
from persist.core.batch import Run
from persist.core.errors import InvalidUsage, shown
from persist.core.frontier import Antichain
from persist.core.shard_view import ShardView
from persist.core.truncations_and_drops import pending_drop
from persist.parts import ALL_KEYS, DIFF, TIME, KeyRange, ShardSchema, consolidate, key_encoding, negated
from persist.parts.consolidate import join
from persist.parts.constraint_checks import KEYS_SHOWN_MAX, UNIQUE, count_text, duplicate_keys, key_tuples, violation
from persist.parts.filter_eval import Filter
from persist.parts.key_encoding import SortedKeys, distinct_keys, key_schema, match_keys, semi_join
from persist.parts.part_files import RowGroupFilter
from persist.parts.python_values import find_differing_row, parse_key
from persist.parts.row_stats import digest_of_rows, numbers_of_rows
from persist.parts.schema_changes import Value, compute_column, value_digest, with_diffs
from persist.parts.schema_evolution import current_for_names, current_schema, valid_schemas


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
        """The contents that the rows of the next commit meet, once pending drops apply, and the cut of a truncation.

        `retracts`: that commit retracts rows, so that a pending truncation is withdrawn. A cut of 0: none is pending.
        """
        if self.held is None or self.held.view.upper != Antichain(self.time + 1):
            return self, 0
        pending = None if retracts else pending_drop(self.held.view.drops, self.held.view.upper)
        cut = 0 if pending is None else pending.cut
        return replace(self, following=self.held.with_pending(cut)), cut

    def rows(self, key_range: KeyRange = ALL_KEYS, keeps: RowGroupFilter | None = None) -> Iterator[pa.Table]:
        """The rows of a key range in key order, with `__diff`. `keeps` is as in `PartReader`. Raises as a read."""
        if self.held is None:
            return
        _, reader = part_reader(self.held.transport, self.held.view, self.held.settings, keeps)
        runs, time = self.following or (self.held.runs, self.time)
        yield from with_renewal(reader.read_range(runs, as_of=time, key_range=key_range), self.held.lease)

    def changes(self, after: int, keys: KeyRange = ALL_KEYS, keeps: RowGroupFilter | None = None) -> Iterator[pa.Table]:
        """What was added and removed since the time `after`, as rows with `__diff`."""
        if self.held is None:
            return
        _, reader = part_reader(self.held.transport, self.held.view, self.held.settings, keeps)
        changes = reader.read_changes(self.held.runs, after, self.time, key_range=keys)
        yield from with_renewal(changes, self.held.lease)


@dataclass(frozen=True)
class RowSet:
    """Some rows of a shard: the key range and row groups to read, and how to pick the rows from them."""

    key_range: KeyRange
    keeps: RowGroupFilter | None
    pick: Callable[[pa.Table], pa.Table]

    def rows(self, contents: Contents) -> Iterator[pa.Table]:
        """The rows as of the time of the contents."""
        if self.key_range.is_empty:
            return
        for table in contents.rows(self.key_range, self.keeps):
            if len(picked := self.pick(table)):
                yield picked

    def changed(self, contents: Contents, after: int) -> bool:
        """Whether one of the rows was added or removed since the time `after`."""
        if self.key_range.is_empty:
            return False
        return any(len(self.pick(table)) for table in contents.changes(after, self.key_range, self.keeps))


ALL = RowSet(ALL_KEYS, None, lambda table: table)
NONE = RowSet(KeyRange(b"", b""), None, lambda table: table.slice(0, 0))


def matching(where: str, schema: ShardSchema) -> RowSet:
    """The rows for which a predicate is true. Raises InvalidUsage."""
    predicate = Filter.of(where, schema)
    return RowSet(predicate.key_range(), predicate.may_match, predicate.apply)


def with_keys(keys: pa.Table, keyed: ShardSchema, schema: ShardSchema) -> RowSet:
    """The rows whose columns `keyed.key` have the values of one of the sorted `keys`."""
    if not len(keys):
        return NONE
    span: KeyRange = key_encoding.KeyPoints.of(keys, keyed) if keyed.key == schema.key else ALL_KEYS
    return RowSet(span, None, partial(semi_join, keys=keys, keyed=keyed))


class Plan(Protocol):
    """An edit verb with its arguments."""

    verb: ClassVar[str]

    def bound(self, schema: ShardSchema) -> BoundVerb:
        """Bind it to a shard with this schema. Raises InvalidUsage if it does not fit."""


@dataclass(frozen=True)
class BoundVerb:
    """A plan bound to the schema of a shard, by which its arguments were read once.

    `row_set` are the rows of the shard that it reads. `question` are its arguments as JSON, which a token stands for.
    `updates` computes the rows to add and remove, by their `__diff`; it raises InvalidUsage.
    `replacement` has the rows that replace the whole contents, whatever these are; None for all other verbs.
    `may_crowd`: a key may gain rows, so that unique keys have to be looked up. `source_names` are the columns of a
    source, which may include columns that the shard does not have. `cuts` ends with the pending truncation that the
    last `updates` took into account, as `CompareAndAppend` says; 0: none. `gained` has the keys that gain rows by the
    last `updates`, if the shard has unique keys.
    """

    schema: ShardSchema
    row_set: RowSet
    question: Sequence[object]
    updates: Callable[[Contents], Iterator[pa.Table]]
    replacement: pa.Table | None = None
    may_crowd: bool = True
    source_names: Sequence[str] = ()
    cuts: list[int] = field(default_factory=lambda: [0])
    gained: Sequence[GainedKeys] = ()

    def concerns(self, contents: Contents, after: int) -> bool:
        """Whether changes since the time `after` may change what `updates` gave then."""
        if self.row_set.changed(contents, after):
            return True
        return any(keys.rows().changed(contents, after) for keys in self.gained)


class GainedKeys:
    """The keys that gain rows by some changes. It holds the key of each changed row, and a number for the row.

    Keys are checked together with their rows: the retraction of an absent row makes no room for another one. A key that
    loses one row and gains another is checked, too, since the lost row may have been absent.
    """

    def __init__(self, schema: ShardSchema) -> None:
        self._schema = schema
        self._keyed = key_schema(schema)
        self._number = "number of " + " ".join(schema.key)  # which is the name of none of them
        numbered = self._keyed.arrow.append(pa.field(self._number, pa.uint64(), nullable=False))
        self._lines = ShardSchema(numbered, schema.key)
        self._changed: list[pa.Table] = []

    def of(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        """Pass the changes on, and note their keys."""
        for rows in tables:
            self._changed.append(self._numbered(rows))
            yield rows

    def rows(self) -> RowSet:
        """The rows of a shard that have one of the keys."""
        return with_keys(self._gained(), self._keyed, self._schema)

    def check(self, contents: Contents, *, are_changed: bool) -> None:
        """Raise ConstraintViolated if one of the keys has more than one row.

        `are_changed`: the contents include the changes; otherwise the changes are added to them.
        """
        gained = self._gained()
        if not len(gained):
            return
        rows = [self._numbered(table) for table in with_keys(gained, self._keyed, self._schema).rows(contents)]
        if not are_changed:
            rows += [semi_join(table, gained, self._keyed) for table in self._changed]
        check_uncrowded(consolidate(rows, self._lines), self._lines)

    def _gained(self) -> pa.Table:
        self._changed = [consolidate(self._changed, self._lines)]
        return distinct_keys(self._changed[0].filter(pc.greater(self._changed[0].column(DIFF), 0)), self._keyed)

    def _numbered(self, rows: pa.Table) -> pa.Table:
        """The keys of the rows, each with a number in place of the row: rows may be large."""
        rows = self._schema.conform(rows, 0)
        numbers = pa.array(numbers_of_rows(rows.drop_columns([TIME])))
        return self._lines.conform(rows.select([*self._keyed.key, DIFF]).append_column(self._number, numbers), 0)


class Count:
    """How many rows are added and removed, and, for shards with unique keys, the keys that gain rows."""

    def __init__(self, gained: GainedKeys | None = None) -> None:
        self.added = self.removed = 0
        self.gained = gained

    def of(self, tables: Iterator[pa.Table]) -> Iterator[pa.RecordBatch]:
        """Pass the rows on, and count them."""
        for table in tables:
            diffs = table.column(DIFF)
            added = pc.sum(pc.max_element_wise(diffs, 0)).as_py() or 0
            self.added += added
            self.removed += added - (pc.sum(diffs).as_py() or 0)
            yield from table.to_batches()

    def read(self, tables: Iterator[pa.Table]) -> None:
        """Count all rows, without passing them on."""
        for _ in self.of(tables):
            pass


def guarded(inner: BoundVerb) -> BoundVerb:
    """The plan for a shard with unique keys: it is refused if a key would have more than one row.

    Raises ConstraintViolated if rows that replace the whole contents have a key twice.
    """
    schema = inner.schema
    if inner.replacement is not None:
        keyed = key_schema(schema)
        check_uncrowded(distinct_keys(inner.replacement, keyed), keyed)
    gained: list[GainedKeys] = []

    def updates(contents: Contents) -> Iterator[pa.Table]:
        gained[:] = [GainedKeys(schema)]
        yield from gained[0].of(inner.updates(contents))
        gained[0].check(contents, are_changed=False)

    return replace(inner, updates=updates, gained=gained)


def check_uncrowded(rows: pa.Table, schema: ShardSchema) -> None:
    """Raise ConstraintViolated if a key has more than one of these rows at some time."""
    keys = duplicate_keys(rows, schema)
    if len(keys):
        raise violation(
            f"constraint {UNIQUE!r}: {count_text(len(keys), 'key')} would have more than one row; nothing was written: "
            "upsert the rows, or remove the old ones in the same write",
            UNIQUE,
            key_tuples(keys.slice(0, KEYS_SHOWN_MAX)),
            len(keys),
        )


class VerbBinding:
    """Binds a plan to the schema of a shard, which may change between two views of it.

    `known` is the id of the schema whose column names the caller used.
    """

    def __init__(self, plan: Plan, known: int) -> None:
        self.verb = plan.verb
        self._plan = plan
        self._known = known
        self._bound: tuple[int, BoundVerb] | None = None

    @property
    def cut(self) -> int:
        """As the last of `BoundVerb.cuts`, of the plan as it was last bound."""
        return 0 if self._bound is None else self._bound[1].cuts[-1]

    def to(self, view: ShardView) -> BoundVerb:
        """The plan for this view. Raises InvalidUsage if it does not fit, or a name means another column by now."""
        number, schema = current_schema(view.schemas)
        if self._bound is None or self._bound[0] != number:
            schemas = valid_schemas(view.schemas)
            known = schemas.get(self._known, current_for_names(schemas, self._known))
            bound = self._plan.bound(schema)
            for name in bound.source_names:
                if name not in schema.id_of and known.id_of.get(name) in schema.name_of:
                    raise schema.no_column(name)
            self._bound = number, guarded(bound) if schema.details.unique and bound.may_crowd else bound
        return self._bound[1]


# The plans of `upsert`, `delete`, `update`, `replace_where` and `overwrite`; `merge.py` has that of `merge`.
#
# Rows that are the same before and after cancel out, and are not written.

KEYS_MAX = 1_000_000  # of one `delete`


def is_dicts(rows: Updates) -> TypeGuard[list[dict[str, Any]]]:
    """Whether the rows are a list of dicts."""
    return isinstance(rows, list) and all(isinstance(row, dict) for row in rows)


def check_alike(rows: Updates, what: str, delete_column: str | None = None) -> None:
    """Raise InvalidUsage if some rows are dicts without a column that others have.

    They would get null, while a column that all rows lack keeps its value. Rows that only delete their key may lack
    any column.
    """
    if not is_dicts(rows):
        return
    has = [(row.keys() - {delete_column}, bool(row.get(delete_column or ""))) for row in rows]
    if (difference := find_differing_row(has)) is not None:
        number, name = difference
        raise InvalidUsage(
            f"row {number} differs from others in whether it has column {shown(name)}; the rows of {what} must have "
            "the same columns: use None for null, or write them separately"
        )


def whole_rows(rows: Updates, schema: ShardSchema) -> pa.Table:
    """As `source_table`, with all columns: absent ones have their default, or null, as for an insert."""
    if is_dicts(rows):
        blank = dict.fromkeys(name for name in schema.arrow.names if name not in schema.defaults)
        rows = [{**blank, **row} for row in rows]
    source = source_table(rows, schema, schema.key, may_lack=True)
    columns = [
        source.column(name) if name in source.column_names else schema.absent(name, len(source))
        for name in schema.arrow.names
    ]
    return pa.Table.from_arrays(columns, schema=nullable(schema.arrow))


def source_table(
    rows: Updates, schema: ShardSchema, needed: Sequence[str], extra: Sequence[str] = (), *, may_lack: bool = False
) -> pa.Table:
    """The rows of a source, in any form, with the columns of the shard that they have, and the `extra` ones.

    They are held in memory. `may_lack`: some of several tables may lack a column that the first one has. Raises
    InvalidUsage if one of the `needed` columns is absent, or a value does not fit its column.
    """
    names = names_given(rows, schema)
    for name in names:
        if name not in schema.arrow.names and name not in extra:
            raise schema.no_column(name)
    for name in needed:
        if name not in names:
            raise InvalidUsage(f"column {name!r} is absent from the rows")
    chosen = [name for name in schema.arrow.names if name in names]
    others = [pa.field(name, pa.bool_()) for name in extra if name in names]
    some = schema.some(chosen, [name for name in schema.key if name in names] or needed, others)
    tables = []
    for number, table in enumerate(tables_of(as_updates(rows, some))):
        for name in () if may_lack else chosen:
            if name not in table.column_names:
                raise InvalidUsage(
                    f"table {number} of the rows lacks column {name!r}, which others have; use the same columns in all"
                )
        tables.append(some.conform(table, 0))
    whole = pa.concat_tables(tables) if tables else some.updates_schema.empty_table()
    return whole.drop_columns([TIME, DIFF])


def names_given(rows: Updates, schema: ShardSchema) -> list[str]:
    """The columns of a source; those of the shard if they are not known in advance, or there are no rows."""
    names = names_of(rows)
    if names is None or (isinstance(rows, list) and not rows):
        names = schema.arrow.names
    for name in names:
        if not isinstance(name, str):
            raise InvalidUsage(f"the rows name a column by {shown(name)}, which is not text")
        if name in (TIME, DIFF):
            raise InvalidUsage(f"the rows have a column {shown(name)}, which this write does not take; drop it")
    return names


def tables_of(rows: Any) -> Iterator[pa.Table]:
    """What `as_updates` gives, table by table. Raises InvalidUsage."""
    for batch in [rows] if isinstance(rows, (pa.Table, pa.RecordBatch)) else rows:
        if not isinstance(batch, (pa.Table, pa.RecordBatch)):
            raise InvalidUsage(f"rows come as dicts, or as tables or batches of Arrow, not as {shown(batch)}")
        yield pa.table(batch) if isinstance(batch, pa.RecordBatch) else batch


@dataclass(frozen=True)
class Delete:
    """Delete the rows that match `where`, or have one of the `keys`: tuples in key order, or single values."""

    where: str | None
    keys: Sequence[Any] | None

    verb: ClassVar[str] = "delete"

    def bound(self, schema: ShardSchema) -> BoundVerb:
        if self.where is not None:
            question, row_set = [self.where, None], matching(self.where, schema)
        else:
            keyed = key_schema(schema)
            keys = self._keys(keyed)
            question, row_set = [None, str(digest_of_rows(keys))], with_keys(keys, keyed, schema)
        return BoundVerb(schema, row_set, question, lambda read: map(negated, row_set.rows(read)), may_crowd=False)

    def _keys(self, keyed: ShardSchema) -> pa.Table:
        assert self.keys is not None
        wanted = [key_values(key) for key in self.keys]
        for key in wanted:
            if len(key) != len(keyed.key):
                raise InvalidUsage(f"a key has {len(key)} values; it needs one for each of {', '.join(keyed.key)}")
        columns = zip(*(parse_key(keyed, key) for key in wanted), strict=True)
        arrays = [pa.array(values, field.type) for values, field in zip(columns, keyed.arrow, strict=True)]
        return distinct_keys(pa.Table.from_arrays(arrays, schema=nullable(keyed.arrow)), keyed)


@dataclass(frozen=True)
class Update:
    """Set new values in some columns of the rows that match `where` (None: all rows)."""

    where: str | None
    sets: Mapping[str, Value]

    verb: ClassVar[str] = "update"

    def bound(self, schema: ShardSchema) -> BoundVerb:
        schema.columns(self.sets)
        with_values(schema.arrow.empty_table(), self.sets, schema)  # refuses values that fit no row, even without rows
        row_set = ALL if self.where is None else matching(self.where, schema)
        types = schema.arrow
        sets = {name: value_digest(name, value, types.field(name).type) for name, value in self.sets.items()}
        sets_key = not self.sets.keys().isdisjoint(schema.key)

        def updates(contents: Contents) -> Iterator[pa.Table]:
            for rows in row_set.rows(contents):
                yield from changed(rows, with_values(rows, self.sets, schema), schema)

        return BoundVerb(schema, row_set, [self.where, sets], updates, may_crowd=sets_key)


@dataclass(frozen=True)
class ReplaceWhere:
    """Replace the rows that match `where` by `rows`, which must all match it."""

    where: str
    rows: Updates

    verb: ClassVar[str] = "replace_where"

    def bound(self, schema: ShardSchema) -> BoundVerb:
        fresh, row_set = with_diffs(whole_rows(self.rows, schema)), matching(self.where, schema)
        if len(row_set.pick(fresh)) < len(fresh):
            raise InvalidUsage("some of the rows do not match `where`; a repeated replace_where would not replace them")
        question = [self.where, str(digest_of_rows(fresh))]
        return BoundVerb(schema, row_set, question, partial(_replaced, schema, row_set, fresh))


@dataclass(frozen=True)
class Overwrite:
    """Replace the whole contents by `rows`."""

    rows: Updates

    verb: ClassVar[str] = "overwrite"

    def bound(self, schema: ShardSchema) -> BoundVerb:
        fresh = with_diffs(whole_rows(self.rows, schema))
        return BoundVerb(schema, ALL, [str(digest_of_rows(fresh))], partial(_replaced, schema, ALL, fresh), fresh)


def _replaced(schema: ShardSchema, row_set: RowSet, fresh: pa.Table, contents: Contents) -> Iterator[pa.Table]:
    """Read old and new rows side by side, in key order, so that unchanged rows are left out."""
    fresh = consolidate([schema.conform(fresh, 0)], schema).drop_columns([TIME])
    old = fresh.slice(0, 0)
    for table in row_set.rows(contents):
        old = join([old, table.select(fresh.schema.names)])
        keys = SortedKeys(old, schema.key)
        last = keys.last  # more rows of this key may follow
        old_end, fresh_end = keys.bisect(last), SortedKeys(fresh, schema.key).bisect(last)
        yield from changed(old.slice(0, old_end), fresh.slice(0, fresh_end), schema)
        old, fresh = old.slice(old_end), fresh.slice(fresh_end)
    yield from changed(old, fresh, schema)


@dataclass(frozen=True)
class Upsert:
    """Each key of `rows` has afterwards the given row and no other.

    If `rows` lack columns, an existing key keeps its values in them, and a new key has their defaults,
    or null. Rows whose `delete_column` is true only delete their key.
    """

    rows: Updates
    delete_column: str | None = None

    verb: ClassVar[str] = "upsert"

    def bound(self, schema: ShardSchema) -> BoundVerb:
        rows, deleted = self._rows_and_deleted_keys(schema)
        keyed = key_schema(schema)
        keys = key_encoding.unique_keys(pa.concat_tables([rows.select(list(schema.key)), deleted]), keyed, "an upsert")
        question = [
            sorted(rows.schema.names),
            str(digest_of_rows(with_diffs(rows))),
            str(digest_of_rows(with_diffs(deleted))),
        ]
        row_set = with_keys(keys, keyed, schema)  # each key has the given row and no other afterwards
        return BoundVerb(schema, row_set, question, partial(_upserted, schema, row_set, keyed, rows), may_crowd=False)

    def _rows_and_deleted_keys(self, schema: ShardSchema) -> tuple[pa.Table, pa.Table]:
        """The rows to put, and the keys that are only deleted."""
        column = self.delete_column
        if column in schema.arrow.names:
            raise InvalidUsage(f"delete_column names {column!r}, a column of the shard; use another name in the rows")
        if is_dicts(self.rows) and not self.rows:
            column = None  # no row names a column
        extra = () if column is None else (column,)
        check_alike(self.rows, "an upsert", column)
        table = source_table(self.rows, schema, [*schema.key, *extra], extra)
        if column is None:
            return table, table.select(list(schema.key)).slice(0, 0)
        is_deleted = table.column(column).fill_null(False)
        table = table.drop_columns([column])
        return table.filter(pc.invert(is_deleted)), table.filter(is_deleted).select(list(schema.key))


def _upserted(
    schema: ShardSchema, row_set: RowSet, keyed: ShardSchema, rows: pa.Table, contents: Contents
) -> Iterator[pa.Table]:
    is_whole = set(rows.schema.names) == set(schema.arrow.names)
    is_left = np.ones(len(rows), np.bool_)  # the rows whose key was not met yet
    met = keyed.updates_schema.empty_table()
    for old in row_set.rows(contents):
        indexes = match_keys(old, rows, keyed)
        replaced = indexes != key_encoding.ABSENT  # keys that are only deleted may have any number of rows
        if not is_whole and replaced.any():
            met = _check_one_row(old.filter(pa.array(replaced)), met, keyed)
        fresh = indexes[key_encoding.first_of_key(old, keyed) & (indexes != key_encoding.ABSENT)]
        fresh = fresh[is_left[fresh]]
        is_left[fresh] = False
        taken = rows.take(pa.array(fresh))
        if not is_whole:
            taken = _completed(taken, old, keyed, schema)
        yield from changed(old, with_diffs(taken), schema)
    yield filled(rows.filter(pa.array(is_left)), schema)


def _check_one_row(old: pa.Table, met: pa.Table, keyed: ShardSchema) -> pa.Table:
    """The last key of the rows. Raises InvalidUsage if a key has several rows: which values to keep is ambiguous."""
    rows = old.select([*keyed.key, DIFF])
    times = pc.abs(rows.column(DIFF))  # a row of negative multiplicity is another row of its key
    rows = rows.set_column(len(keyed.key), rows.schema.field(DIFF), times)
    keys = consolidate([keyed.conform(rows, 0), *([met] if len(met) else ())], keyed)
    key_encoding.check_unique(keys, keyed, "an upsert of some of the columns")
    return keys.slice(len(keys) - 1)


def _completed(rows: pa.Table, old: pa.Table, keyed: ShardSchema, schema: ShardSchema) -> pa.Table:
    """The rows with the columns that they lack, from the old rows of their keys."""
    existing = old.take(pa.array(match_keys(rows, old, keyed)))
    return pa.table(
        [(rows if name in rows.schema.names else existing).column(name) for name in schema.arrow.names],
        schema=nullable(schema.arrow),
    )


def nullable(schema: pa.Schema) -> pa.Schema:
    """The same columns, all nullable."""
    return pa.schema([field.with_nullable(True) for field in schema])


def filled(rows: pa.Table, schema: ShardSchema) -> pa.Table:
    """New rows with `__diff` 1 and all columns: absent ones have their default, or null. Raises InvalidUsage."""
    if not len(rows):
        return schema.updates_schema.empty_table().drop_columns([TIME])
    columns = []
    for column in schema.arrow:
        if column.name in rows.schema.names:
            columns.append(rows.column(column.name))
            continue
        if not column.nullable and column.name not in schema.defaults:
            raise InvalidUsage(f"column {column.name!r} is absent from the rows, and a new row needs a value in it")
        columns.append(schema.defaulted(column.name, len(rows)))
    return with_diffs(pa.Table.from_arrays(columns, schema=nullable(schema.arrow)))


def with_values(rows: pa.Table, sets: Mapping[str, Value], schema: ShardSchema, of: pa.Table | None = None) -> pa.Table:
    """The rows with new values in the columns that `sets` names, computed from them (or from `of`, row by row)."""
    source = rows if of is None else of
    for name, value in sets.items():
        field = schema.arrow.field(name)
        column = compute_column(name, value, field.type, source)
        if not field.nullable and column.null_count:
            raise InvalidUsage(f"column {name!r} would be null in {column.null_count} rows but does not allow that")
        rows = rows.set_column(rows.schema.get_field_index(name), field.with_nullable(True), column)
    return rows


def changed(old: pa.Table, new: pa.Table, schema: ShardSchema) -> Iterator[pa.Table]:
    """The updates that turn the old rows into the new ones, both with `__diff`; unchanged rows are left out."""
    both = consolidate([schema.conform(negated(old), 0), schema.conform(new, 0)], schema)
    if len(both):
        yield both.drop_columns([TIME])
