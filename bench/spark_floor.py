"""The plainest Python data sources: what PySpark itself costs when a source yields, or a sink writes, Parquet files.

`floor_read` yields the Arrow batches of the Parquet files in its option `files`; `floor_write` writes what it gets as
Parquet files like those of a shard (zstd, the same row groups, `__time` and `__diff` beside the user's columns).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import to_arrow_schema

BATCH_ROWS = 16_384
GROUP_ROWS = 64 * 1024
FILE_ROWS = 1_000_000


class FloorSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "floor"

    def reader(self, schema: Any) -> DataSourceReader:
        return FloorReader(json.loads(self.options["files"]), schema)

    def writer(self, schema: Any, overwrite: bool) -> DataSourceArrowWriter:
        return FloorWriter(self.options["directory"])


class FloorReader(DataSourceReader):
    def __init__(self, groups: list[list[str]], schema: Any) -> None:
        self._groups = groups
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(files) for files in self._groups]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        target = to_arrow_schema(self._schema, timezone="UTC")
        for file in partition.value:
            source = pq.ParquetFile(file)
            for batch in source.iter_batches(BATCH_ROWS, columns=target.names):
                yield pa.RecordBatch.from_arrays(batch.columns, schema=target)


class FloorWriter(DataSourceArrowWriter):
    def __init__(self, directory: str) -> None:
        self._directory = directory

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        writer: Any = None
        rows = 0
        pending: list[pa.RecordBatch] = []
        held = 0
        for batch in iterator:
            ones = pa.repeat(pa.scalar(1, pa.int64()), batch.num_rows)
            full = batch.append_column("__time", ones).append_column("__diff", ones)
            pending.append(full)
            held += full.num_rows
            if held < GROUP_ROWS:
                continue
            writer = writer or self._open(full.schema)
            writer.write_table(pa.Table.from_batches(pending), row_group_size=GROUP_ROWS)
            rows += held
            pending, held = [], 0
            if rows >= FILE_ROWS:
                writer.close()
                writer, rows = None, 0
        if pending:
            writer = writer or self._open(pending[0].schema)
            writer.write_table(pa.Table.from_batches(pending), row_group_size=GROUP_ROWS)
        if writer is not None:
            writer.close()
        return WriterCommitMessage()

    def _open(self, schema: pa.Schema) -> Any:
        return pq.ParquetWriter(Path(self._directory) / f"{uuid.uuid4()}.parquet", schema, compression="zstd")

    def commit(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        return

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        return
