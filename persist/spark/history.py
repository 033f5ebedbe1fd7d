"""The commit history as a DataFrame, by `readHistory`: a row for each command that changed the shard, newest first."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import LongType, StringType, StructField, StructType, TimestampType

from persist.client.telling import HistoryEntry, entries_told, entry_shown
from persist.client.transport import OneShard
from persist.core.errors import InvalidUsage
from persist.core.recorded import PAGE_MAX
from persist.spark import executors
from persist.spark.options import HistoryOptions, Target
from persist.spark.schemas import arrow_schema

SCHEMA = StructType(
    [
        StructField("place", StringType(), False),
        StructField("seqno", LongType(), False),
        StructField("timestamp", TimestampType(), False),
        StructField("operation", StringType(), False),
        StructField("lower", LongType()),
        StructField("upper", LongType()),
        StructField("rows", LongType(), False),
        StructField("bytes", LongType(), False),
        StructField("retractions", LongType()),
        StructField("purpose", StringType()),
        StructField("who", StringType()),
        StructField("info", StringType()),
    ]
)


def check_columns(what: str, whole: StructType, asked: StructType) -> None:
    """Raises InvalidUsage unless `what`, which has the columns of `whole`, has those that are asked for."""
    known = {field.name: field.dataType for field in whole}
    for field in asked:
        if known.get(field.name) != field.dataType:
            raise InvalidUsage(
                f"{what} has no column {field.name!r} of type {field.dataType.simpleString()}; it has "
                + ", ".join(f"{name} {kind.simpleString()}" for name, kind in known.items())
            )


class HistoryReader(DataSourceReader):
    """Reads it in one task, page by page. What is committed meanwhile is not in it."""

    def __init__(self, target: Target, options: HistoryOptions, schema: StructType) -> None:
        check_columns("readHistory", SCHEMA, schema)
        self._target = target
        self._options = options
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        shard = executors.view_of(self._target).shard_id
        transport = OneShard(executors.transport(self._target.connection), shard)
        left, before = self._options.limit, None
        whole, schema = arrow_schema(SCHEMA), arrow_schema(self._schema)
        while left:
            told = entries_told(transport, self._target.shard, before, min(left, PAGE_MAX), self._options.maintenance)
            if not told:
                return
            rows = [_row(entry_shown(one)) for one in told]
            yield pa.RecordBatch.from_pylist(rows, whole).select(schema.names).cast(schema)
            left, before = left - len(told), told[-1].place


def _row(entry: HistoryEntry) -> dict[str, object]:
    return {
        "place": entry.place,
        "seqno": entry.seqno,
        "timestamp": entry.timestamp,
        "operation": entry.operation,
        "lower": entry.lower,
        "upper": entry.upper,
        "rows": entry.rows,
        "bytes": entry.size,
        "retractions": entry.retractions,
        "purpose": entry.purpose,
        "who": entry.who,
        "info": None if entry.info is None else json.dumps(entry.info, ensure_ascii=False),
    }
