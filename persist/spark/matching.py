"""How the columns of a DataFrame that is written belong to those of a shard, and what they add to them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pyarrow as pa
from pyspark.sql.types import StructType

from persist.client.transport import OneShard
from persist.client.widening import Evolving
from persist.core.errors import InvalidUsage
from persist.core.view import ShardView
from persist.parts import DIFF, TIME, ShardSchema, current_schema
from persist.parts.altering import AddColumn, Change, WidenColumn, altered
from persist.parts.evolution import check_evolution, evolution_error, is_of_days, widening_error
from persist.parts.new_schema import check_added, check_kept
from persist.spark import executors
from persist.spark.options import Target, WriteOptions
from persist.spark.schemas import spark_type, stored_schema


def named_as(schema: StructType, options: WriteOptions, shard: ShardSchema, name: str) -> dict[str, str]:
    """What the shard calls the columns of the DataFrame that are not called so: as Spark, whatever the case.

    Raises InvalidUsage where several columns of the shard may be meant.
    """
    taken, found = set(shard.arrow.names), {**options.renames}
    given = [column for column in schema.names if column != options.delete_column and column not in found]
    known: dict[str, list[str]] = {}
    for column in shard.arrow.names:
        known.setdefault(column.lower(), []).append(column)
    renamed: dict[str, str] = {str(column): to for column, to in found.items() if column is not None}
    for column in given:
        alike = [] if column in taken else known.get(column.lower(), [])
        if len(alike) > 1:
            raise InvalidUsage(
                f"the DataFrame has the column {column!r}, and shard {name!r} has {' and '.join(map(repr, alike))}: "
                "rename it to the one that is meant"
            )
        if alike:
            renamed[column] = alike[0]
    return renamed


def can_be_absent(shard: ShardSchema, column: str) -> bool:
    """Whether rows may come without this column of the shard."""
    return column not in shard.key and (column in shard.defaults or shard.arrow.field(column).nullable)


def merged(schema: StructType, options: WriteOptions, shard: ShardSchema, name: str) -> ShardSchema:
    """The columns of the shard with what those of the DataFrame have more. Nothing is changed yet.

    Raises InvalidUsage where they cannot be so, or rows of these types could not be written then.
    """
    given = _given(schema, options, shard, name)
    changes = list(_changes(given, shard))
    if not changes:
        return shard
    found = altered(shard, changes)
    found.conform(given.empty_table(), 0)
    return found


def overwritten(schema: StructType, options: WriteOptions, shard: ShardSchema, name: str) -> ShardSchema:
    """The columns of the shard as they are once those of the DataFrame are in their place. Nothing is changed yet.

    A column stays where its name does and its type holds the same for Spark; it widens where that is possible.
    Otherwise it goes, and another one of its name comes. Raises InvalidUsage where the key would be another one, or
    something else asks for a column that goes.
    """
    given = _given(schema, options, shard, name)
    _check_key_stays(given, shard, name)
    fields, ids, following = [], [], shard.details.next_id or len(shard.arrow) + 1
    for field in given:
        kept = _kept(field, shard)
        fields.append(kept or field)
        ids.append(following if kept is None else shard.id_of[field.name])
        following += kept is None
    arrow = pa.schema(fields)
    if arrow.equals(shard.arrow) and tuple(ids) == shard.ids:
        return shard
    defaults = tuple(one for one in shard.details.defaults if one[0] in ids)
    found = ShardSchema(arrow, shard.key, replace(shard.details, ids=tuple(ids), next_id=following, defaults=defaults))
    plain = ShardSchema(arrow, shard.key)
    if shard.is_plain and evolution_error(shard, plain) is None:  # which needs no level
        found = plain
    check_evolution(shard, found)
    check_added(shard, found)
    check_kept(shard, found)
    return found


def evolve(target: Target, view: ShardView, planned: ShardSchema) -> None:
    """Give the shard the columns as planned for the view. Raises SchemaMismatch: others changed them since the view."""
    handles, one = target.connection.handles, OneShard(executors.transport(target.connection), view.shard_id)
    change = Evolving(one, target.shard, view.schema_id, handles.read, handles.write.retry_s)
    change.run(current_schema(view.schemas)[1], planned)


def _given(schema: StructType, options: WriteOptions, shard: ShardSchema, name: str) -> pa.Schema:
    """The columns of the DataFrame that are those of rows, as the shard calls and stores them."""
    apart = [n for n in (TIME, DIFF, options.time_column, options.diff_column, options.delete_column) if n]
    names = named_as(schema, options, shard, name)
    return pa.schema([field.with_name(names.get(field.name, field.name)) for field in stored_schema(schema, apart)])


def _check_key_stays(given: pa.Schema, shard: ShardSchema, name: str) -> None:
    for column in shard.key:
        if column not in given.names:
            raise InvalidUsage(
                f"the DataFrame lacks {column!r}, a key column of shard {name!r}: overwriteSchema keeps the key; give "
                "the column, or write another shard"
            )
        kind = shard.arrow.field(column).type
        if not _is_same(column, kind, given.field(column).type):
            raise InvalidUsage(
                f"key column {column!r} of shard {name!r} is {kind}, not {given.field(column).type}: overwriteSchema "
                "keeps the key; cast the column, or write another shard"
            )


def _kept(field: pa.Field, shard: ShardSchema) -> pa.Field | None:
    """The column of the shard that a column of the DataFrame goes on as, wider perhaps; None: there is none."""
    if field.name not in shard.arrow.names:
        return None
    known = shard.arrow.field(field.name)
    if _is_same(field.name, known.type, field.type):
        return known
    if is_of_days(known.type, field.type):  # that takes a look at the rows that are to go
        return None
    return known.with_type(field.type) if widening_error(known.type, field.type) is None else None


def _is_same(column: str, known: pa.DataType, given: pa.DataType) -> bool:
    """Whether the type of a shard's column is for Spark the one that a DataFrame brings."""
    try:
        return bool(known == given or spark_type(column, known) == spark_type(column, given))
    except InvalidUsage:  # Spark cannot hold what the shard has
        return False


def _changes(given: pa.Schema, shard: ShardSchema) -> Iterator[Change]:
    """What the shard lacks. Raises InvalidUsage for a name, in any case, of a column that was renamed or dropped."""
    former = {old.lower(): old for old, _ in shard.former}
    for field in given:
        if field.name not in shard.arrow.names:
            if field.name.lower() in former:  # a job from before would split its column
                raise shard.no_column(former[field.name.lower()], "mergeSchema adds no column by a former name: ")
            yield AddColumn(field.name, field.type)
            continue
        kind = shard.arrow.field(field.name).type
        if field.name not in shard.key and kind != field.type and widening_error(kind, field.type) is None:
            yield WidenColumn(field.name, field.type)
