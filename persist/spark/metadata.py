"""Metadata of a shard as DataFrames of fixed schemas: option `metadata`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import pyarrow as pa
from pyspark.sql import types as t
from pyspark.sql.datasource import DataSourceReader, InputPartition

from persist.client.commit_info import read_entries, to_history_entry
from persist.client.embedded import EmbeddedTransport
from persist.client.snapshot import ReadLease, leased_blobs, part_reader
from persist.core.audit_log import PAGE_MAX
from persist.core.batch import HollowBatch, Part
from persist.core.errors import InvalidUsage
from persist.core.shard_view import ViewRequest
from persist.core.state import State
from persist.parts import current_schema, valid_schemas
from persist.parts.constraint_checks import constraints_json
from persist.spark import executors
from persist.spark.options import HISTORY_ROWS, HISTORY_ROWS_MAX, METADATA, Options, Target
from persist.spark.spark_schemas import arrow_schema, spark_type

Row = dict[str, Any]
_TYPES: Mapping[str, t.DataType] = {
    "STRING": t.StringType(),
    "BIGINT": t.LongType(),
    "DOUBLE": t.DoubleType(),
    "BOOLEAN": t.BooleanType(),
    "BINARY": t.BinaryType(),
    "TIMESTAMP": t.TimestampType(),
    "ARRAY<STRING>": t.ArrayType(t.StringType()),
    "MAP<STRING,STRING>": t.MapType(t.StringType(), t.StringType()),
    "MAP<STRING,BIGINT>": t.MapType(t.StringType(), t.LongType()),
}


def _schema(ddl: str) -> t.StructType:
    """The schema of a DDL string of `_TYPES`. `StructType.fromDDL` needs a session, which workers do not have."""
    columns = [column.split(maxsplit=2) for column in ddl.split(", ")]
    return t.StructType([t.StructField(name, _TYPES[kind], not constraint) for name, kind, *constraint in columns])


SCHEMAS: Mapping[str, t.StructType] = {
    "history": _schema(
        "place STRING NOT NULL, seqno BIGINT NOT NULL, timestamp TIMESTAMP NOT NULL, operation STRING NOT NULL, "
        "lower BIGINT, upper BIGINT, rows BIGINT NOT NULL, bytes BIGINT NOT NULL, retractions BIGINT, "
        "purpose STRING, who STRING, info STRING"
    ),
    "detail": _schema(
        "name STRING, shard_id STRING, seqno BIGINT, since BIGINT, upper BIGINT, key ARRAY<STRING>, "
        "columns ARRAY<STRING>, schema_id BIGINT, batches BIGINT, parts BIGINT, updates BIGINT, bytes BIGINT, "
        "history_ms BIGINT, mark_every_ms BIGINT, tags MAP<STRING,BIGINT>, unique BOOLEAN, "
        "not_null ARRAY<STRING>, checks MAP<STRING,STRING>"
    ),
    "parts": _schema(
        "id STRING, blob STRING, format STRING, schema_id BIGINT, updates BIGINT, bytes BIGINT, lower BIGINT, "
        "upper BIGINT, since BIGINT, run BIGINT, time_min BIGINT, time_max BIGINT, diff_min BIGINT, diff_max BIGINT, "
        "is_sorted BOOLEAN, key_lower BINARY, key_upper BINARY"
    ),
    "schemas": _schema(
        "schema_id BIGINT, is_current BOOLEAN, position BIGINT, column STRING, arrow_type STRING, spark_type STRING, "
        "nullable BOOLEAN, is_key BOOLEAN"
    ),
    "readers": _schema(
        "reader STRING, purpose STRING, since BIGINT, is_point BOOLEAN, seqno BIGINT, lapses_in_s DOUBLE"
    ),
    "cursors": _schema("cursor STRING, reader STRING, since BIGINT, seqno BIGINT"),
}
assert set(SCHEMAS) == set(METADATA)


class MetadataReader(DataSourceReader):
    """Reads one kind of metadata in one task. Commits during a read of the history are not part of it."""

    def __init__(self, target: Target, options: Options, schema: t.StructType) -> None:
        """Raises InvalidUsage if an option is invalid, or this kind of metadata lacks a column of `schema`."""
        self._kind = options.choice("metadata", METADATA)
        self._limit = options.integer("historyLimit", 1, HISTORY_ROWS_MAX) or HISTORY_ROWS
        self._maintenance = options.flag("maintenance")
        known = {field.name: field.dataType for field in SCHEMAS[self._kind]}
        for field in schema:
            if known.get(field.name) != field.dataType:
                raise InvalidUsage(
                    f"metadata={self._kind} has no column {field.name!r} of type {field.dataType.simpleString()}; "
                    "it has " + ", ".join(f"{name} {kind.simpleString()}" for name, kind in known.items())
                )
        self._target = target
        self._schema = schema

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        full, schema = arrow_schema(SCHEMAS[self._kind]), arrow_schema(self._schema)
        for rows in self._history() if self._kind == "history" else [_ROWS[self._kind](self._target)]:
            yield pa.RecordBatch.from_pylist(rows, full).select(schema.names).cast(schema)

    def _history(self) -> Iterator[list[Row]]:
        """A row for each command that changed the shard, newest first, in pages."""
        transport, left, before = executors.one_shard(self._target), self._limit, None
        while left:
            records = read_entries(transport, self._target.shard, before, min(left, PAGE_MAX), self._maintenance)
            if not records:
                return
            rows = []
            for entry in map(to_history_entry, records):
                info = None if entry.info is None else json.dumps(entry.info, ensure_ascii=False)
                rows.append({**asdict(entry), "place": entry.place, "bytes": entry.size, "info": info})
            yield rows
            left, before = left - len(records), records[-1].place


def _detail(target: Target) -> list[Row]:
    view = executors.one_shard(target).view(target.shard, ViewRequest(with_details=True))
    schema_id, schema = current_schema(view.schemas)
    details = view.details
    assert details is not None
    return [
        {
            "name": view.name,
            "shard_id": str(view.shard_id),
            "seqno": int(view.seqno),
            "since": view.since.element,
            "upper": view.upper.element,
            "key": list(schema.key),
            "columns": schema.arrow.names,
            "schema_id": schema_id,
            "batches": len(view.batches),
            "parts": sum(batch.part_count for batch in view.batches),
            "updates": sum(batch.rows for batch in view.batches),
            "bytes": sum(batch.size for batch in view.batches),
            "history_ms": details.settings.history_ms,
            "mark_every_ms": details.settings.mark_every_ms,
            "tags": {name: tag.time for name, tag in details.tags.items()},
            **constraints_json(schema),
        }
    ]


def _parts(target: Target) -> list[Row]:
    """Includes the parts in bundles, which are read under a lease."""
    transport, settings = executors.one_shard(target), target.connection.handles.read
    view = transport.view(target.shard, ViewRequest())
    with ExitStack() as stack:
        if any(part.bundle is not None for batch in view.batches for part in batch.parts()):
            lease = ReadLease.open(transport, target.shard, None, "spark metadata", settings)
            stack.callback(lease.close)
            stack.enter_context(leased_blobs(lease))
            view = transport.view(target.shard, ViewRequest(min_seqno=lease.seqno))
        reader = part_reader(transport, view, settings)[1]
        return [
            _part_row(batch, number, part)
            for batch in view.batches
            for number, run in enumerate(reader.expanded(batch.runs))
            for part in run.parts
        ]


def _part_row(batch: HollowBatch, run: int, part: Part) -> Row:
    return {
        "id": str(part.id),
        "blob": part.key,
        "format": part.format,
        "schema_id": part.schema_id,
        "updates": part.rows,
        "bytes": part.size,
        "lower": batch.desc.lower.element,
        "upper": batch.desc.upper.element,
        "since": batch.desc.since.element,
        "run": run,
        "time_min": part.time_min,
        "time_max": part.time_max,
        "diff_min": part.diff_min,
        "diff_max": part.diff_max,
        "is_sorted": part.sorted,
        "key_lower": part.key_lower,
        "key_upper": part.key_upper,
    }


def _schemas(target: Target) -> list[Row]:
    schemas = valid_schemas(executors.view_of(target).schemas)
    return [
        {
            "schema_id": number,
            "is_current": number == max(schemas),
            "position": position,
            "column": field.name,
            "arrow_type": str(field.type),
            "spark_type": _shown_type(field),
            "nullable": field.nullable,
            "is_key": field.name in schema.key,
        }
        for number, schema in schemas.items()
        for position, field in enumerate(schema.arrow)
    ]


def _shown_type(field: pa.Field) -> str | None:
    try:
        return str(spark_type(field.name, field.type).simpleString())
    except InvalidUsage:  # Spark has no such type
        return None


def _readers(target: Target) -> list[Row]:
    state = _state(target, "readers")
    return [
        {
            "reader": str(key),
            "purpose": reader.purpose,
            "since": reader.since.element,
            "is_point": reader.point,
            "seqno": int(reader.seqno),
            "lapses_in_s": (reader.lapses_ms - state.lease_now_ms) / 1000,
        }
        for key, reader in state.leased_readers.items()
    ]


def _cursors(target: Target) -> list[Row]:
    """Without their opaque tokens, which authorize moving the hold."""
    return [
        {"cursor": reader.purpose, "reader": str(key), "since": reader.since.element, "seqno": int(reader.registered)}
        for key, reader in _state(target, "cursors").critical_readers.items()
    ]


def _state(target: Target, kind: str) -> State:
    """The State of the shard, from the stores. Raises InvalidUsage if the location is a server."""
    transport = executors.transport(target.connection)
    if not isinstance(transport, EmbeddedTransport):
        raise InvalidUsage(
            f"a server does not return the {kind} of a shard; read metadata={kind} from the stores, with url "
            "persist:///directory or with blob and consensus"
        )
    executors.view_of(target)  # raises UnknownShard for a dropped shard
    return transport.location.machine(target.shard).refresh()


_ROWS = {"detail": _detail, "parts": _parts, "schemas": _schemas, "readers": _readers, "cursors": _cursors}
