"""How the columns of a DataFrame that is written belong to those of a shard, and what they add to them."""

from __future__ import annotations

from collections.abc import Iterator

from pyspark.sql.types import StructType

from persist.client.connect import Client
from persist.core.errors import InvalidUsage
from persist.core.view import ShardView
from persist.parts import DIFF, TIME, ShardSchema, current_schema
from persist.parts.altering import AddColumn, Change, WidenColumn
from persist.parts.evolution import widening_error
from persist.spark import executors
from persist.spark.options import Target, WriteOptions
from persist.spark.schemas import stored_schema


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


def with_merged(target: Target, options: WriteOptions, schema: StructType, view: ShardView) -> ShardView:
    """The shard after it has got what the DataFrame's columns have more, by one commit. Raises InvalidUsage."""
    current = current_schema(view.schemas)[1]
    changes = list(_changes(schema, options, current, target.shard))
    if not changes:
        return view
    client = Client(executors.transport(target.connection), target.connection.handles)
    client.shard(target.shard).alter(*changes)
    return executors.view_of(target)


def _changes(schema: StructType, options: WriteOptions, shard: ShardSchema, name: str) -> Iterator[Change]:
    apart = [n for n in (TIME, DIFF, options.time_column, options.diff_column, options.delete_column) if n]
    names = named_as(schema, options, shard, name)
    for field in stored_schema(schema, apart):
        column = names.get(field.name, field.name)
        if column not in shard.arrow.names:
            yield AddColumn(column, field.type)
            continue
        kind = shard.arrow.field(column).type
        if column not in shard.key and kind != field.type and widening_error(kind, field.type) is None:
            yield WidenColumn(column, field.type)
