"""The data source `persist`: what Spark makes for `format("persist")`."""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceWriter
from pyspark.sql.types import StructType

from persist.errors import InvalidUsage
from persist.spark.batch_read import SnapshotReader, snapshot_schema
from persist.spark.batch_write import BatchWriter
from persist.spark.options import Options, ReadOptions, Target, WriteOptions


class PersistDataSource(DataSource):
    """Shards as DataFrames. Found by Spark through `pyspark_persist`, or `spark.dataSource.register(...)`.

    An instance holds only its options: Spark pickles it to executors, which open stores where they read and write.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = dict(options)

    @classmethod
    def name(cls) -> str:
        return "persist"

    def schema(self) -> StructType:
        options = Options(self._given)
        return snapshot_schema(Target.of(options), ReadOptions.of(options))

    def reader(self, schema: StructType) -> DataSourceReader:
        options = Options(self._given)
        options.check("a batch read")
        return SnapshotReader(Target.of(options), ReadOptions.of(options), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        options = Options(self._given)
        options.check("a batch write")
        if overwrite:
            raise InvalidUsage("mode 'overwrite' is not supported; use mode 'append'")
        return BatchWriter(Target.of(options), WriteOptions.of(options), schema)
