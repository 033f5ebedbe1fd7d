"""MERGE, UPDATE and DELETE as Spark jobs over the rows of a shard as of a time.

A job computes deletions (`__diff` below 0) and insertions, for a merge by a join. It commits them on the condition that
nothing was committed after that time, so it is atomic and serializable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeAlias

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from persist.client.commit_info import Info
from persist.core.errors import InvalidUsage, shown
from persist.parts import DIFF, ShardSchema
from persist.spark.options import listed
from persist.spark.spark_schemas import quoted
from persist.spark.store_assignment import (
    KEYS,
    REFUSES,
    SET,
    can_be_absent,
    default_literal,
    identity,
    literal,
    store_cast,
)
from persist.spark.write_job import Written

Condition: TypeAlias = str | Column | None  # SQL or a Column; None: always true
Values = Mapping[str, Any]  # by column: SQL as text, a Column, or a literal value
RETRIES = 10
UPDATE, DELETE, INSERT = "update", "delete", "insert"
MATCHED, OF_SOURCE, OF_TARGET = "matched", "not matched", "not matched by source"
_HELPERS = "__persist_"
_IN_SOURCE, _IN_TARGET, _COPIES, _CLAUSE = (_HELPERS + name for name in ("in_source", "in_target", "copies", "clause"))
_KEY = _HELPERS + "key"


@dataclass(frozen=True)
class MergeClause:
    """A WHEN clause: the action on rows of one kind if the condition holds. `values` by column; None for deletions."""

    rows: str
    action: str
    values: Mapping[str, Column] | None = None
    condition: Condition = None


@dataclass(frozen=True)
class TableMerge:
    """A builder of a merge: `ShardTable.merge` creates it, and `execute` runs it.

    The first clause of a row whose condition is true applies; null is not true. Clauses refer to columns as `target.x`
    and `source.x`. A string is SQL; any other value that is not a Column is a literal.
    """

    run: Callable[..., Written]  # `ShardTable.rewritten`
    name: str
    source: DataFrame
    on: tuple[str, ...]
    schema: ShardSchema
    clauses: tuple[MergeClause, ...] = ()

    def when_matched_update(self, set: Values | None = None, condition: Condition = None) -> TableMerge:  # noqa: A002
        """Update rows of the shard that a row of the source matches.

        Args:
            set: the new values by column, except key columns; None: every column that the merge does not match by gets
                its value in the source. Each value must fit its column without loss.
            condition: which of these rows; None: all.
        Raises: InvalidUsage (no such column, a key column, or one that the source lacks).
        """
        others = [name for name in self.schema.arrow.names if name not in (*self.schema.key, *self.on)]
        values = self._from_source(others) if set is None else set
        return self._with(MergeClause(MATCHED, UPDATE, _checked(self.schema, values), condition))

    def when_matched_delete(self, condition: Condition = None) -> TableMerge:
        """Delete rows of the shard that a row of the source matches. `condition`: which of these rows; None: all."""
        return self._with(MergeClause(MATCHED, DELETE, None, condition))

    def when_not_matched_insert(self, values: Values | None = None, condition: Condition = None) -> TableMerge:
        """Insert a row for each row of the source that matches no row of the shard.

        Args:
            values: by column; omitted columns have their default, or null. None: the values of the source.
            condition: which of these rows; None: all.
        Raises: InvalidUsage (no such column, or the source lacks one of the key, or one that allows no nulls).
        """
        if values is None:
            alike = {name.lower() for name in self.source.columns}
            names = (n for n in self.schema.arrow.names if n.lower() in alike or not can_be_absent(self.schema, n))
            values = self._from_source(list(names))
        given = _checked(self.schema, values, with_key=True)
        omitted = {name: value for name, value in self.schema.defaults.items() if name not in given}
        defaults = {name: default_literal(self.schema.arrow.field(name), value) for name, value in omitted.items()}
        return self._with(MergeClause(OF_SOURCE, INSERT, {**given, **defaults}, condition))

    def when_not_matched_by_source_update(self, set: Values, condition: Condition = None) -> TableMerge:  # noqa: A002
        """Update rows of the shard that no row of the source matches.

        Args:
            set: the new values by column, except key columns.
            condition: which of these rows; None: all.
        Raises: InvalidUsage (no such column, or a key column).
        """
        return self._with(MergeClause(OF_TARGET, UPDATE, _checked(self.schema, set), condition))

    def when_not_matched_by_source_delete(self, condition: Condition = None) -> TableMerge:
        """Delete rows of the shard that no row of the source matches. `condition`: which of these rows; None: all."""
        return self._with(MergeClause(OF_TARGET, DELETE, None, condition))

    def execute(self, *, retries: int = RETRIES, info: Info | None = None) -> Written:
        """Run the merge as one commit. Each attempt reads the source again: cache it if it is not deterministic.

        Args:
            retries: how often to retry after another writer has committed in the meantime.
            info: as for `Shard.insert`.
        Returns: the result; its `time` is None if nothing changed, because nothing was committed then.
        Raises: InvalidUsage (there is no clause, two rows of the source match one row, or a value or a key of the
            source does not fit its column; nothing was written), UpperMismatch (others wrote before each attempt;
            nothing was written), and what writes may.
        """
        if not self.clauses:
            raise InvalidUsage("the merge has no clause; add one, for example when_matched_update()")
        return self.run(self.changes, retries=retries, info=info)

    def changes(self, target: DataFrame) -> DataFrame:
        """The changes of the merge to rows of the shard with their multiplicities: the columns and `__diff`."""
        joined, types = self._joined(target), _types(self.schema, target)
        clauses = [_cast_clause(clause, joined, types, self.schema) for clause in self.clauses]
        chosen = joined.select("*", self._clause().alias(_CLAUSE)).where(F.col(_CLAUSE).isNotNull())
        changes = reduce(
            lambda cases, numbered: cases.when(F.col(_CLAUSE) == numbered[0], _changes(numbered[1], types)),
            enumerate(clauses),
            F.when(F.lit(False), F.array(_old(types))),
        )
        return chosen.select(F.explode(changes).alias("row")).select("row.*")

    def _joined(self, target: DataFrame) -> DataFrame:
        kinds = {name: target.schema[name].dataType for name in self.on}
        aliases = {name: _KEY + str(number) for number, name in enumerate(self.on)}
        keys = (
            store_cast(
                KEYS, F.col(quoted(name)), self.source.schema[name].dataType, kind, self.schema.arrow.field(name)
            )
            for name, kind in kinds.items()
        )
        source = self.source.select("*", F.lit(True).alias(_IN_SOURCE), *map(Column.alias, keys, aliases.values()))
        keys_of_source = [key for name, kind in kinds.items() for key in identity(F.col(aliases[name]), kind)]
        copies = F.count(F.lit(1)).over(Window.partitionBy(*keys_of_source))
        source = source.withColumn(_COPIES, copies).alias("source")
        target = target.withColumn(_IN_TARGET, F.lit(True)).alias("target")
        rows = {clause.rows for clause in self.clauses}
        how = {(False, False): "inner", (True, False): "left", (False, True): "right", (True, True): "full"}
        pairs = (
            source_key.eqNullSafe(target_key)
            for name, kind in kinds.items()
            for source_key, target_key in zip(
                identity(_of("source", aliases[name]), kind), identity(_of("target", name), kind), strict=True
            )
        )
        return source.join(target, reduce(Column.__and__, pairs), how[OF_SOURCE in rows, OF_TARGET in rows])

    def _clause(self) -> Column:
        """The number of the clause that applies to a row of the join; null: none."""
        in_source, in_target = (F.col(name).isNotNull() for name in (_IN_SOURCE, _IN_TARGET))
        matched = in_source & in_target
        kinds = {MATCHED: matched, OF_SOURCE: ~in_target, OF_TARGET: ~in_source}
        duplicate = (
            f"{REFUSES}two rows of the source have the same {listed(self.on)}, and both match a row of shard "
            f"{self.name!r}; drop the duplicates first"
        )
        applies = F.when(matched & (F.col(_COPIES) > 1), F.raise_error(F.lit(duplicate)).cast("int"))
        for number, clause in enumerate(self.clauses):
            holds = kinds[clause.rows]
            if clause.condition is not None:
                holds = holds & as_condition(clause.condition)
            applies = applies.when(holds, F.lit(number))
        return applies

    def _from_source(self, names: list[str]) -> Values:
        missing = [name for name in names if name not in self.source.columns]
        if missing:
            raise InvalidUsage(
                f"the source lacks the column {missing[0]!r} of shard {self.name!r}; give the values of the columns"
            )
        return {name: _of("source", name) for name in names}

    def _with(self, clause: MergeClause) -> TableMerge:
        return replace(self, clauses=(*self.clauses, clause))


def begin_merge(
    run: Callable[..., Written], shard: str, source: DataFrame, on: tuple[str, ...] | None, schema: ShardSchema
) -> TableMerge:
    """A merge without clauses. Raises InvalidUsage if the source lacks a column, or has one twice."""
    names = schema.key if on is None else on
    if not names:
        raise InvalidUsage("'on' is empty; leave it out to match by the shard's key")
    for name in names:
        if name not in schema.arrow.names:
            raise InvalidUsage(f"shard {shard!r} has no column {name!r} to match by")
        if name not in source.columns:
            raise InvalidUsage(f"the source lacks the column {name!r}, by which rows are matched")
    for name in source.columns:
        if source.columns.count(name) > 1 or name.startswith(_HELPERS):
            raise InvalidUsage(f"the source has the column {name!r} twice, or its name is reserved; rename it")
    return TableMerge(run, shard, source, names, schema)


def update_changes(schema: ShardSchema, values: Values) -> Callable[[DataFrame], DataFrame]:
    """The function that computes the changes of an update to rows of the shard. Raises InvalidUsage."""
    clause = MergeClause(OF_TARGET, UPDATE, _checked(schema, values))

    def changes(target: DataFrame) -> DataFrame:
        rows, types = target.alias("target"), _types(schema, target)
        changed = _changes(_cast_clause(clause, rows, types, schema), types)
        return rows.select(F.explode(changed).alias("row")).select("row.*")

    return changes


def delete_changes(target: DataFrame) -> DataFrame:
    return target.withColumn(DIFF, -F.col(DIFF))


def as_condition(condition: str | Column) -> Column:
    """The condition as a Column. Raises InvalidUsage if it is neither SQL nor a Column."""
    if isinstance(condition, str):
        return F.expr(condition)
    if not isinstance(condition, Column):
        raise InvalidUsage(f"the condition is {shown(condition)}; it must be SQL or a Column")
    return condition


def _types(schema: ShardSchema, target: DataFrame) -> StructType:
    """The current Spark types of the columns: a type may have been widened since the schema was read."""
    return StructType([target.schema[name] for name in schema.arrow.names])


def _cast_clause(clause: MergeClause, rows: DataFrame, types: StructType, schema: ShardSchema) -> MergeClause:
    """The clause with its values, expressions over `rows`, cast to the types of the columns. Raises InvalidUsage."""
    if clause.values is None:
        return clause
    kinds = rows.select(*(value.alias(name) for name, value in clause.values.items())).schema
    values = {
        name: store_cast(SET, value, kinds[name].dataType, types[name].dataType, schema.arrow.field(name))
        for name, value in clause.values.items()
    }
    return replace(clause, values=values)


def _of(side: str, name: str) -> Column:
    return F.col(f"{side}.{quoted(name)}")


def _changes(clause: MergeClause, types: StructType) -> Column:
    """The changes that a clause makes to a row, as an array."""
    if clause.action == DELETE:
        return F.array(_old(types))
    assert clause.values is not None
    values = clause.values
    if clause.action == INSERT:
        inserted = {field.name: values.get(field.name, F.lit(None).cast(field.dataType)) for field in types}
        return F.array(_row(types, inserted, F.lit(1)))
    updated = {name: values[name] if name in values else _of("target", name) for name in types.names}
    return F.array(_old(types), _row(types, updated, _of("target", DIFF)))


def _old(types: StructType) -> Column:
    return _row(types, {name: _of("target", name) for name in types.names}, -_of("target", DIFF))


def _row(types: StructType, values: Mapping[str, Column], diff: Column) -> Column:
    columns = [values[name].alias(name) for name in types.names]
    return F.struct(*columns, diff.cast("bigint").alias(DIFF))


def _checked(schema: ShardSchema, values: object, *, with_key: bool = False) -> dict[str, Column]:
    if not isinstance(values, Mapping) or not values:
        raise InvalidUsage(
            f"the values are {shown(values)}; they must be a dict by column, such as {{'n': 'source.n'}}"
        )
    for name in values:
        if name not in schema.arrow.names:
            raise InvalidUsage(f"the shard has no column {name!r}; its columns are {listed(schema.arrow.names)}")
        if name in schema.key and not with_key:
            raise InvalidUsage(
                f"{name!r} is a key column, which an update cannot change; delete the row and insert another"
            )
    return {name: _value(schema.arrow.field(name), value) for name, value in values.items()}


def _value(field: Any, value: Any) -> Column:
    if isinstance(value, str):
        return F.expr(value)
    return value if isinstance(value, Column) else literal(field, value)
