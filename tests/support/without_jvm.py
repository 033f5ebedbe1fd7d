"""The very classes that Spark calls, called without a JVM: reads and writes of `format("persist")` in one process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader
from pyspark.sql.types import StructType

from persist.spark import PersistDataSource
from persist.spark.batch_io import BatchWriter
from persist.spark.spark_schemas import spark_schema


def source(url: str, shard: str, **options: Any) -> PersistDataSource:
    """As Spark makes it of options, whose values are text."""
    return PersistDataSource({"url": url, "path": shard, **{name: str(value) for name, value in options.items()}})


def planned(url: str, shard: str, schema: StructType | None = None, **options: Any) -> tuple[DataSourceReader, Any]:
    """A reader and its partitions, as Spark keeps them for a DataFrame."""
    found = source(url, shard, **options)
    reader = found.reader(schema or found.schema())
    return reader, reader.partitions()


def rows_of(reader: DataSourceReader, partitions: Iterable[Any]) -> list[dict[str, Any]]:
    """What the partitions give, task by task."""
    return [row for one in partitions for batch in reader.read(one) for row in batch.to_pylist()]  # type: ignore[union-attr]


def read(url: str, shard: str, schema: StructType | None = None, **options: Any) -> list[dict[str, Any]]:
    """The rows of a batch read."""
    return rows_of(*planned(url, shard, schema, **options))


def writer(url: str, shard: str, schema: pa.Schema, *, overwrite: bool = False, **options: Any) -> BatchWriter:
    """The writer of a job, as Spark makes it before any task."""
    found = source(url, shard, **options).writer(spark_schema(schema), overwrite)
    assert isinstance(found, BatchWriter)
    return found


def write(url: str, shard: str, *tables: pa.Table, overwrite: bool = False, **options: Any) -> BatchWriter:
    """A job with a task for each table."""
    job = writer(url, shard, tables[0].schema, overwrite=overwrite, **options)
    job.commit([job.write(iter(table.to_batches())) for table in tables])
    return job
