"""Merge: match the rows of a source with those of a shard, and apply clauses to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.attributes.attribute_handle import AttributeUpdates
from persist.client import dml_plans
from persist.client.arguments import checked, checked_sets
from persist.client.commit_info import Info
from persist.client.dml_plans import BoundVerb, Contents, Plan, RowSet
from persist.client.optimistic_edit import Edited
from persist.client.write import Updates, as_updates, column_of_rows
from persist.core.errors import InvalidUsage, shown
from persist.parts import DIFF, ShardSchema, negated
from persist.parts.column_types import check_nesting, conform_column, to_plain, wide_type, without_empty_chunks
from persist.parts.filter_eval import Filter
from persist.parts.key_encoding import ABSENT, distinct_keys, key_groups, key_schema, match_keys
from persist.parts.predicate import Compare, CompareColumns, In, columns_of, leaves, parse
from persist.parts.row_stats import digest_of_rows
from persist.parts.schema_changes import Value, compute_column, evaluate_condition, value_digest, with_diffs
from persist.parts.value_order import Mask

SIDES = "source", "target"
SOURCE, TARGET = (f"{side}." for side in SIDES)
_REFERENCE = re.compile(r"(source|target)\.(\w+)")
TYPE_OF_LITERAL: Mapping[str, pa.DataType] = {
    "integer": pa.int64(),
    "decimal": pa.decimal128(38, 10),
    "double": pa.float64(),
    "boolean": pa.bool_(),
    "date": pa.date32(),
    "instant": pa.timestamp("us", "UTC"),
    "local": pa.timestamp("us"),
}
"""By the kind of a literal: the type of a column of nulls that is compared with it."""
ROW = "row number"  # the column that numbers the rows of a join
CLAUSES_MAX = 100

MATCHED: Final = "matched"
NOT_MATCHED: Final = "not matched"
NOT_MATCHED_BY_SOURCE: Final = "not matched by source"
Condition: TypeAlias = Any  # a text, an expression, or None


def source(column: str) -> pc.Expression:
    """The value of a column of the source, by its name `column`, in clauses of `Shard.merge`. Raises InvalidUsage."""
    checked("column", column, str)
    return pc.field(SOURCE + column)


def target(column: str) -> pc.Expression:
    """The value of a column of the shard, by its name `column`, in clauses of `Shard.merge`. Raises InvalidUsage."""
    checked("column", column, str)
    return pc.field(TARGET + column)


@dataclass(frozen=True)
class Clause:
    """What to do with the rows of one kind (`of`) for which the condition is true. `sets` None: delete them."""

    of: str
    condition: Condition
    sets: Mapping[str, Value] | None

    def to_question(self, schema: ShardSchema) -> list[object]:
        """Its representation in a digest."""
        kinds = schema.arrow
        sets = None
        if self.sets is not None:
            sets = {name: value_digest(name, value, kinds.field(name).type) for name, value in self.sets.items()}
        condition = self.condition
        return [
            self.of,
            value_digest("condition", condition) if isinstance(condition, pc.Expression) else condition,
            sets,
        ]


def _values(given: Mapping[str, Any]) -> dict[str, Value]:
    """The values of a clause by column. Raises InvalidUsage for one that is meant as a column, but is text."""
    sets = checked_sets("what a clause sets", given)
    for name, value in sets.items():
        if isinstance(value, str) and (reference := _REFERENCE.fullmatch(value)):
            of, column = reference.groups()
            raise InvalidUsage(
                f"column {name!r} is set to the text {value!r}: write persist.{of}({column!r}) for the value of that "
                f"column, or pa.scalar({value!r}) for the text"
            )
    return sets


Runner: TypeAlias = "Callable[[Plan, int | None, str | None, AttributeUpdates, Info | None], Edited]"


@dataclass(frozen=True)
class Merge:
    """A merge under construction. Each method returns one with another clause; `execute` runs it.

    For each kind of rows the first clause whose `condition` is true applies (None: it is true for all). Rows without
    one stay unchanged. A condition is text as in the Spark option `where`, with `source.column` and `target.column`,
    which it may compare with each other (`source.seq > target.seq`), or an expression of `persist.source("column")` and
    `persist.target("column")`. Values are Python values, or such expressions; the text `source.column` as a value is
    refused. Each method raises InvalidUsage for an invalid argument.
    """

    _run: Runner
    _source: Updates
    _on: tuple[str, ...] | None
    _clauses: tuple[Clause, ...] = ()

    def when_matched_update(self, set: Mapping[str, Any] | None = None, condition: Condition = None) -> Merge:  # noqa: A002
        """Set new values in a row that has a match.

        `set` has a value for each of these columns; None: those of the source, in all columns that both have. Key
        columns keep theirs. `execute` raises InvalidUsage if the shard has no such column, or it is of the key.
        """
        return self._with(Clause(MATCHED, condition, {} if set is None else _values(set)))

    def when_matched_delete(self, condition: Condition = None) -> Merge:
        """Delete a row that has a match."""
        return self._with(Clause(MATCHED, condition, None))

    def when_not_matched_insert(self, values: Mapping[str, Any] | None = None, condition: Condition = None) -> Merge:
        """Insert a row of the source that has no match.

        `values` has a value for each of these columns, others have their default, or null; None: those of the source.
        The condition is by columns of the source.
        """
        return self._with(Clause(NOT_MATCHED, condition, {} if values is None else _values(values)))

    def when_not_matched_by_source_update(self, set: Mapping[str, Any], condition: Condition = None) -> Merge:  # noqa: A002
        """Set new values in a row of the shard that has no match in the source. The whole shard is read.

        `set` has a value for each of these columns, by columns of the target.
        """
        return self._with(Clause(NOT_MATCHED_BY_SOURCE, condition, _values(set)))

    def when_not_matched_by_source_delete(self, condition: Condition = None) -> Merge:
        """Delete a row of the shard that has no match in the source. The whole shard is read."""
        return self._with(Clause(NOT_MATCHED_BY_SOURCE, condition, None))

    def execute(
        self,
        *,
        read_time: int | None = None,
        token: str | None = None,
        attributes: AttributeUpdates = (),
        info: Info | None = None,
    ) -> Edited:
        """Run it in one commit, or none if nothing changes. Arguments and result are those of `Shard.upsert`.

        Raises: InvalidUsage (no clauses, two rows of the source match one row, or a value does not fit), and what
            `Shard.upsert` raises.
        """
        if not self._clauses:
            raise InvalidUsage("a merge needs a clause, such as when_matched_update()")
        return self._run(MergePlan(self._source, self._on, self._clauses), read_time, token, attributes, info)

    def _with(self, clause: Clause) -> Merge:
        if len(self._clauses) == CLAUSES_MAX:
            raise InvalidUsage(f"a merge has at most {CLAUSES_MAX} clauses")
        if clause.condition is not None and not isinstance(clause.condition, (str, pc.Expression)):
            raise InvalidUsage(f"condition is {shown(clause.condition)}; it must be text or an expression")
        return replace(self, _clauses=(*self._clauses, clause))


@dataclass(frozen=True)
class MergePlan:
    """The plan of a merge."""

    rows: Updates
    on: tuple[str, ...] | None
    clauses: tuple[Clause, ...]

    verb: ClassVar[str] = "merge_into"

    def bound(self, schema: ShardSchema) -> BoundVerb:
        if self.on == ():
            raise InvalidUsage("on is empty; name the columns by which rows match, or leave it out for the key columns")
        keyed = key_schema(schema, self.on)
        columns = dml_plans.names_given(self.rows, schema)
        for name in keyed.key:
            if name not in columns:
                raise InvalidUsage(f"column {name!r}, by which rows match, is absent from the source")
        table = _table(self.rows, schema, columns)
        if any(clause.of != NOT_MATCHED and clause.sets == {} for clause in self.clauses):
            dml_plans.check_alike(self.rows, "a merge that updates rows without `set`")
        clauses = tuple(_completed(clause, table.schema.names, schema) for clause in self.clauses)
        is_whole = any(clause.of == NOT_MATCHED_BY_SOURCE for clause in clauses)
        row_set = dml_plans.ALL if is_whole else dml_plans.with_keys(distinct_keys(table, keyed), keyed, schema)
        clause_values = [clause.to_question(schema) for clause in clauses]
        cast = _typed(table, schema, lambda column: column.cast(wide_type(column.type)))  # whatever the types of values
        question = [list(keyed.key), sorted(table.schema.names), str(digest_of_rows(with_diffs(cast))), clause_values]
        run = _BoundMerge(schema, row_set, keyed, table, clauses)
        run.check()
        names = table.schema.names
        return BoundVerb(schema, row_set, question, run.updates, source_names=names)


def _table(rows: Updates, schema: ShardSchema, source_columns: Sequence[str]) -> pa.Table:
    """The source. Python values of columns that the shard also has are converted to its types."""
    if dml_plans.is_dicts(rows) and rows:
        names = [name for name in source_columns if name in schema.arrow.names]
        names += [name for name in source_columns if name not in schema.arrow.names]
        table = pa.table({name: _column(name, rows, schema) for name in names})
        return _plain(table)
    if isinstance(rows, list) and not rows:
        return dml_plans.nullable(schema.arrow).empty_table()
    tables = [_plain(table) for table in dml_plans.tables_of(as_updates(rows, schema))]
    if not tables:
        return dml_plans.nullable(schema.arrow).empty_table()
    names = tables[0].schema.names
    for table in tables:
        if odd := set(names) ^ set(table.schema.names):
            raise InvalidUsage(f"only some batches of the source have column {min(odd)!r}; use the same in all of them")
    if any(table.schema != tables[0].schema for table in tables):
        tables = [_typed(table.select(names), schema, lambda column: column) for table in tables]
    try:
        return pa.concat_tables(tables, promote_options="default")
    except pa.ArrowException as error:
        raise InvalidUsage(f"the batches of the source have columns of different types: {error}") from error


def _typed(table: pa.Table, schema: ShardSchema, cast: Callable[[pa.ChunkedArray], pa.ChunkedArray]) -> pa.Table:
    """The rows with the types of the shard in columns that it also has, if the values fit; `cast` is for the others."""
    columns = {}
    for name, column in zip(table.schema.names, table.columns, strict=True):
        conformed = None
        if name in schema.arrow.names:
            with suppress(InvalidUsage):
                conformed = conform_column(column, schema.arrow.field(name).with_nullable(True))
        columns[name] = cast(column) if conformed is None else conformed
    return pa.table(columns)


def _plain(table: pa.Table) -> pa.Table:
    """The rows of a source without types that only some frames have, such as dictionaries and views."""
    columns = {}
    for field, column in zip(table.schema, table.columns, strict=True):
        if field.name in columns:
            raise InvalidUsage(f"the source has the column {field.name!r} twice; rename one of them")
        check_nesting(field.name, field.type)
        try:
            columns[field.name] = to_plain(without_empty_chunks(column))
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise InvalidUsage(f"column {field.name!r} of the source cannot be read: {error}; drop it") from error
    return pa.table(columns)


def _column(name: str, rows: list[dict[str, Any]], schema: ShardSchema) -> pa.Array:
    """Values of a column, as in an insert if the shard has the column, else in their own type."""
    if name in schema.arrow.names:
        return column_of_rows(name, rows, schema)
    return own_values(name, [row.get(name) for row in rows])


def own_values(name: str, values: list[Any]) -> pa.Array:
    """Values of a column that the shard does not have, in their own type. Raises InvalidUsage."""
    try:
        return pa.array(values)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise InvalidUsage(f"column {name!r} of the source has values of no single type: {error}") from error


def _completed(clause: Clause, source_columns: Sequence[str], schema: ShardSchema) -> Clause:
    """The clause with all columns that it sets. Raises InvalidUsage if the shard has no such column, or it is a key."""
    if clause.sets is None:
        return clause
    sets = dict(clause.sets)
    is_insert = clause.of == NOT_MATCHED
    if not sets:
        sets = {n: source(n) for n in schema.arrow.names if n in source_columns and (is_insert or n not in schema.key)}
    for name in schema.columns(sets):
        if name in schema.key and not is_insert:
            raise InvalidUsage(f"column {name!r} is of the key, which a merge does not change: delete and insert")
    return replace(clause, sets=sets)


@dataclass(frozen=True)
class _BoundMerge:
    """A merge into the rows of a shard, by the columns of `keyed`."""

    schema: ShardSchema
    row_set: RowSet
    keyed: ShardSchema
    source: pa.Table
    clauses: tuple[Clause, ...]

    def check(self) -> None:
        """Raise InvalidUsage if a clause fits no row, even if there are none."""
        ours, theirs = _prefixed(self.schema.arrow.empty_table(), TARGET), _prefixed(self.source.slice(0, 0), SOURCE)
        sides = {MATCHED: _beside(ours, theirs), NOT_MATCHED: theirs, NOT_MATCHED_BY_SOURCE: ours}
        for clause in self.clauses:
            self._truths(clause.condition, sides[clause.of])
            for name, value in (clause.sets or {}).items():
                compute_column(name, value, self.schema.arrow.field(name).type, sides[clause.of])

    def updates(self, contents: Contents) -> Iterator[pa.Table]:
        groups = key_groups(self.source, self.keyed)
        is_met = np.zeros(int(groups.max()) + 1 if len(groups) else 0, np.bool_)
        is_twice = np.bincount(groups, minlength=len(is_met)) > 1
        prefixed = _prefixed(self.source, SOURCE)
        for old in self.row_set.rows(contents):
            indexes = match_keys(old, self.source, self.keyed)
            is_hit = indexes != ABSENT
            met = groups[indexes[is_hit]]
            if self._of(MATCHED) and is_twice[met].any():
                raise InvalidUsage("two rows of the source match one row of the shard; a merge takes one at most")
            is_met[met] = True
            rows, theirs = old.filter(pa.array(is_hit)), prefixed.take(pa.array(indexes[is_hit]))
            yield from self._changed(rows, _beside(_prefixed(rows, TARGET), theirs), self._of(MATCHED))
            rest = old.filter(pa.array(~is_hit))  # empty unless rows without a match are read, too
            yield from self._changed(rest, _prefixed(rest, TARGET), self._of(NOT_MATCHED_BY_SOURCE))
        left = prefixed.filter(pa.array(~is_met[groups]))
        for clause, is_chosen in self._chosen(left, self._of(NOT_MATCHED)):
            rows, sets = left.filter(is_chosen), clause.sets or {}
            columns = {n: compute_column(n, sets[n], self.schema.arrow.field(n).type, rows) for n in sets}
            yield dml_plans.filled(pa.table(columns), self.schema)

    def _of(self, kind: str) -> tuple[Clause, ...]:
        return tuple(clause for clause in self.clauses if clause.of == kind)

    def _changed(self, rows: pa.Table, both: pa.Table, clauses: Sequence[Clause]) -> Iterator[pa.Table]:
        """The changes that the clauses make to rows of the shard; `both` has the columns of their expressions."""
        for clause, is_chosen in self._chosen(both, clauses):
            chosen = rows.filter(is_chosen)
            if clause.sets is None:
                yield negated(chosen)
            else:
                fresh = dml_plans.with_values(chosen, clause.sets, self.schema, both.filter(is_chosen))
                yield from dml_plans.changed(chosen, fresh, self.schema)

    def _chosen(self, both: pa.Table, clauses: Sequence[Clause]) -> Iterator[tuple[Clause, pa.Array]]:
        """Each clause with the rows for which it is the first match, if any."""
        is_left: Mask = np.ones(len(both), np.bool_)
        for clause in clauses:
            is_chosen = is_left & self._truths(clause.condition, both)
            is_left &= ~is_chosen
            if is_chosen.any():
                yield clause, pa.array(is_chosen)

    def _truths(self, condition: Condition, both: pa.Table) -> Mask:
        if condition is None:
            return np.ones(len(both), np.bool_)
        if isinstance(condition, str):
            numbered = _condition_columns(condition, both)
            is_true: Mask = np.zeros(len(both), np.bool_)
            chosen = Filter.of(condition, ShardSchema(numbered.schema, (ROW,)), SIDES).apply(numbered)
            is_true[chosen.column(ROW).to_numpy()] = True
            return is_true
        return np.asarray(evaluate_condition(condition, both).to_numpy(), np.bool_)


def _prefixed(rows: pa.Table, prefix: str) -> pa.Table:
    if DIFF in rows.schema.names:
        rows = rows.drop_columns([DIFF])
    return rows.rename_columns([prefix + name for name in rows.schema.names])


def _beside(left: pa.Table, right: pa.Table) -> pa.Table:
    return pa.Table.from_arrays([*left.columns, *right.columns], names=[*left.schema.names, *right.schema.names])


def _condition_columns(condition: str, both: pa.Table) -> pa.Table:
    """The number of each row, and the columns that the condition names.

    A column without any known value has the type of the column or literal that it is compared with, or is text.
    """
    parsed = parse(condition, SIDES)
    if unknown := sorted(set(columns_of(parsed)) - set(both.schema.names)):
        raise InvalidUsage(f"the condition names {unknown[0]!r}; known here are {', '.join(both.schema.names)}")
    kinds = {name: both.schema.field(name).type for name in columns_of(parsed) if name in both.schema.names}
    pairs = [(leaf.column, leaf.other) for leaf in leaves(parsed) if isinstance(leaf, CompareColumns)]
    partners = dict([*pairs, *((right, left) for left, right in pairs)])
    literals = {leaf.column: leaf.value.kind for leaf in leaves(parsed) if isinstance(leaf, Compare)}
    literals |= {leaf.column: leaf.values[0].kind for leaf in leaves(parsed) if isinstance(leaf, In)}
    numbered = pa.table({ROW: pa.array(np.arange(len(both)))})
    for name, kind in kinds.items():
        column = both.column(name)
        if pa.types.is_null(kind):
            like = kinds.get(partners.get(name, name), kind)
            column = column.cast(
                TYPE_OF_LITERAL.get(literals.get(name, ""), pa.string()) if pa.types.is_null(like) else like
            )
        numbered = numbered.append_column(name, column)
    return numbered
