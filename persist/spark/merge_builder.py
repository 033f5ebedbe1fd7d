"""Merges, updates and deletions as Spark jobs: rows of the shard as of a time, and what is to become of them.

They are a join that yields what goes (`__diff` below 0) and what comes. It is written on the condition that nobody has
written after that time, so that a merge is as if it had happened in one moment.
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
from persist.core.errors import InvalidUsage
from persist.parts import DIFF, ShardSchema
from persist.spark.options import listed
from persist.spark.spark_schemas import quoted
from persist.spark.store_assignment import KEYS, REFUSES, fit, fitted, identity, literal
from persist.spark.write_job import Written

Condition: TypeAlias = str | Column | None  # SQL, or an expression of columns; None: always
Values = Mapping[str, Any]  # of columns: SQL as text, an expression of columns, or any other value as it is
RETRIES = 10
UPDATE, DELETE, INSERT = "update", "delete", "insert"
MATCHED, OF_SOURCE, OF_TARGET = "matched", "not matched", "not matched by source"
_HELPERS = "__persist_"
_IN_SOURCE, _IN_TARGET, _COPIES, _CLAUSE = (_HELPERS + name for name in ("in_source", "in_target", "copies", "clause"))
_KEY = _HELPERS + "key"


@dataclass(frozen=True)
class MergeClause:
    """What becomes of rows of one kind where the condition holds: `values` by column, None where rows go."""

    rows: str
    verb: str
    values: Mapping[str, Column] | None = None
    condition: Condition = None


@dataclass(frozen=True)
class TableMerge:
    """A merge that is being put together; `ShardTable.merge` begins one, and `execute` runs it.

    Of the clauses for a row the first one whose condition holds applies; a condition that is null does not hold. They
    name columns `target.x` and `source.x`. A text is SQL; another value that is no Column is a literal.
    """

    run: Callable[..., Written]  # `ShardTable.rewritten`
    name: str
    source: DataFrame
    on: tuple[str, ...]
    schema: ShardSchema
    clauses: tuple[MergeClause, ...] = ()

    def when_matched_update(self, set: Values | None = None, condition: Condition = None) -> TableMerge:  # noqa: A002
        """Change rows of the shard that a row of the source matches.

        Args:
            set: the new values by column, not of key columns; None: every other column has its value in the source.
                Each must fit its column value for value.
            condition: when; None is always.
        Raises: InvalidUsage (no such column, a key column, or one that the source lacks).
        """
        values = self._from_source(self._values_of_source) if set is None else set
        return self._with(MergeClause(MATCHED, UPDATE, _checked(self.schema, values), condition))

    def when_matched_delete(self, condition: Condition = None) -> TableMerge:
        """Take away rows of the shard that a row of the source matches. `condition`: when; None is always."""
        return self._with(MergeClause(MATCHED, DELETE, None, condition))

    def when_not_matched_insert(self, values: Values | None = None, condition: Condition = None) -> TableMerge:
        """Add a row for each row of the source that matches none of the shard.

        Args:
            values: by column; those that are left out are null. None: those of the source.
            condition: when; None is always.
        Raises: InvalidUsage (no such column, or one that the source lacks).
        """
        every = self._from_source(self.schema.arrow.names) if values is None else values
        return self._with(MergeClause(OF_SOURCE, INSERT, _checked(self.schema, every, with_key=True), condition))

    def when_not_matched_by_source_update(self, set: Values, condition: Condition = None) -> TableMerge:  # noqa: A002
        """Change rows of the shard that no row of the source matches.

        Args:
            set: the new values by column, not of key columns.
            condition: when; None is always.
        Raises: InvalidUsage (no such column, or a key column).
        """
        return self._with(MergeClause(OF_TARGET, UPDATE, _checked(self.schema, set), condition))

    def when_not_matched_by_source_delete(self, condition: Condition = None) -> TableMerge:
        """Take away rows of the shard that no row of the source matches. `condition`: when; None is always."""
        return self._with(MergeClause(OF_TARGET, DELETE, None, condition))

    def execute(self, *, retries: int = RETRIES, info: Info | None = None) -> Written:
        """Run it as one commit. The source is read anew by each try: cache it where it is not the same each time.

        Args:
            retries: how often to begin anew because somebody else has written meanwhile.
            info: as `Shard.insert` says.
        Returns: where it landed; its `time` is None where nothing changed, so that nothing was committed.
        Raises: InvalidUsage (there is no clause, two rows of the source match one row, or a value or a key of the
            source does not fit its column; nothing was written), UpperMismatch (others wrote before each try; nothing
            was written), and what writes may.
        """
        if not self.clauses:
            raise InvalidUsage("the merge has no clause, so nothing would happen; say what, as when_matched_update()")
        return self.run(self.changes, retries=retries, info=info)

    def changes(self, target: DataFrame) -> DataFrame:
        """What the merge writes: the columns and `__diff`, of rows of the shard with their multiplicities."""
        joined, types = self._joined(target), _types(self.schema, target)
        clauses = [_fitted(clause, joined, types, self.schema) for clause in self.clauses]
        chosen = joined.select("*", self._clause().alias(_CLAUSE)).where(F.col(_CLAUSE).isNotNull())
        changes = reduce(
            lambda found, numbered: found.when(F.col(_CLAUSE) == numbered[0], _changes(numbered[1], types)),
            enumerate(clauses),
            F.when(F.lit(False), F.array(_old(types))),
        )
        return chosen.select(F.explode(changes).alias("row")).select("row.*")

    def _joined(self, target: DataFrame) -> DataFrame:
        kinds = {name: target.schema[name].dataType for name in self.on}
        given = {name: _KEY + str(number) for number, name in enumerate(self.on)}
        keys = (
            fit(KEYS, F.col(quoted(name)), self.source.schema[name].dataType, kind, self.schema.arrow.field(name))
            for name, kind in kinds.items()
        )
        source = self.source.select("*", F.lit(True).alias(_IN_SOURCE), *map(Column.alias, keys, given.values()))
        same = [one for name, kind in kinds.items() for one in identity(F.col(given[name]), kind)]
        copies = F.count(F.lit(1)).over(Window.partitionBy(*same))
        source = source.withColumn(_COPIES, copies).alias("source")
        theirs = target.withColumn(_IN_TARGET, F.lit(True)).alias("target")
        rows = {clause.rows for clause in self.clauses}
        how = {(False, False): "inner", (True, False): "left", (False, True): "right", (True, True): "full"}
        pairs = (
            one.eqNullSafe(other)
            for name, kind in kinds.items()
            for one, other in zip(
                identity(_of("source", given[name]), kind), identity(_of("target", name), kind), strict=True
            )
        )
        return source.join(theirs, reduce(Column.__and__, pairs), how[OF_SOURCE in rows, OF_TARGET in rows])

    def _clause(self) -> Column:
        """Which clause applies to a row of the join, by its number; null: none."""
        in_source, in_target = (F.col(name).isNotNull() for name in (_IN_SOURCE, _IN_TARGET))
        matched = in_source & in_target
        kinds = {MATCHED: matched, OF_SOURCE: ~in_target, OF_TARGET: ~in_source}
        twice = (
            f"{REFUSES}two rows of the source have the same {listed(self.on)}, and both match a row of shard "
            f"{self.name!r}; drop the duplicates first"
        )
        found = F.when(matched & (F.col(_COPIES) > 1), F.raise_error(F.lit(twice)).cast("int"))
        for number, clause in enumerate(self.clauses):
            holds = kinds[clause.rows]
            if clause.condition is not None:
                holds = holds & as_condition(clause.condition)
            found = found.when(holds, F.lit(number))
        return found

    @property
    def _values_of_source(self) -> list[str]:
        return [name for name in self.schema.arrow.names if name not in (*self.schema.key, *self.on)]

    def _from_source(self, names: list[str]) -> Values:
        missing = [name for name in names if name not in self.source.columns]
        if missing:
            raise InvalidUsage(
                f"the source lacks the column {missing[0]!r} of shard {self.name!r}; say what the columns are"
            )
        return {name: _of("source", name) for name in names}

    def _with(self, clause: MergeClause) -> TableMerge:
        return replace(self, clauses=(*self.clauses, clause))


def begun(
    run: Callable[..., Written], shard: str, source: DataFrame, on: tuple[str, ...] | None, schema: ShardSchema
) -> TableMerge:
    """A merge without clauses. Raises InvalidUsage where the source does not fit."""
    names = schema.key if on is None else on
    if not names:
        raise InvalidUsage("on names no column; leave it out for the shard's key")
    for name in names:
        if name not in schema.arrow.names:
            raise InvalidUsage(f"shard {shard!r} has no column {name!r} to match by")
        if name not in source.columns:
            raise InvalidUsage(f"the source lacks the column {name!r}, by which rows are matched")
    for name in source.columns:
        if source.columns.count(name) > 1 or name.startswith(_HELPERS):
            raise InvalidUsage(f"the source has the column {name!r} twice, or keeps its name from a merge; rename it")
    return TableMerge(run, shard, source, names, schema)


def updated(schema: ShardSchema, values: Values) -> Callable[[DataFrame], DataFrame]:
    """What an update writes of rows of the shard. Raises InvalidUsage."""
    clause = MergeClause(OF_TARGET, UPDATE, _checked(schema, values))

    def changes(target: DataFrame) -> DataFrame:
        rows, types = target.alias("target"), _types(schema, target)
        changed = _changes(_fitted(clause, rows, types, schema), types)
        return rows.select(F.explode(changed).alias("row")).select("row.*")

    return changes


def deleted(target: DataFrame) -> DataFrame:
    """What a deletion writes of rows of the shard."""
    return target.withColumn(DIFF, -F.col(DIFF))


def as_condition(condition: str | Column) -> Column:
    """Raises InvalidUsage where it is neither SQL nor an expression."""
    if isinstance(condition, str):
        return F.expr(condition)
    if not isinstance(condition, Column):
        raise InvalidUsage(f"a condition is SQL, or an expression of columns, not {condition!r:.100}")
    return condition


def _types(schema: ShardSchema, target: DataFrame) -> StructType:
    """The columns as Spark reads them now: a type may have become wider since the schema was looked at."""
    return StructType([target.schema[name] for name in schema.arrow.names])


def _fitted(clause: MergeClause, rows: DataFrame, types: StructType, schema: ShardSchema) -> MergeClause:
    """The clause with values of the types that the columns have. Raises InvalidUsage."""
    if clause.values is None:
        return clause
    return replace(clause, values=fitted(clause.values, rows, types, schema.arrow))


def _of(side: str, name: str) -> Column:
    return F.col(f"{side}.{quoted(name)}")


def _changes(clause: MergeClause, types: StructType) -> Column:
    """The rows that a clause writes, as an array."""
    if clause.verb == DELETE:
        return F.array(_old(types))
    assert clause.values is not None
    given = clause.values
    if clause.verb == INSERT:
        whole = {one.name: given.get(one.name, F.lit(None).cast(one.dataType)) for one in types}
        return F.array(_row(types, whole, F.lit(1)))
    kept = {name: given[name] if name in given else _of("target", name) for name in types.names}
    return F.array(_old(types), _row(types, kept, _of("target", DIFF)))


def _old(types: StructType) -> Column:
    return _row(types, {name: _of("target", name) for name in types.names}, -_of("target", DIFF))


def _row(types: StructType, values: Mapping[str, Column], times: Column) -> Column:
    columns = [values[name].alias(name) for name in types.names]
    return F.struct(*columns, times.cast("bigint").alias(DIFF))


def _checked(schema: ShardSchema, values: object, *, with_key: bool = False) -> dict[str, Column]:
    if not isinstance(values, Mapping) or not values:
        raise InvalidUsage(f"values are {values!r:.100}; they must be a dict of columns, such as {{'n': 'source.n'}}")
    for name in values:
        if name not in schema.arrow.names:
            raise InvalidUsage(f"the shard has no column {name!r}; its columns are {listed(schema.arrow.names)}")
        if name in schema.key and not with_key:
            raise InvalidUsage(f"{name!r} is a key column, which no update changes; delete the row and insert another")
    return {name: _value(schema.arrow.field(name), value) for name, value in values.items()}


def _value(field: Any, value: Any) -> Column:
    if isinstance(value, str):
        return F.expr(value)
    return value if isinstance(value, Column) else literal(field, value)
