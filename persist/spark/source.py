"""The Python data source `format("persist")`."""

from __future__ import annotations

from collections.abc import MutableMapping

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from persist.core.errors import PersistError
from persist.parts import current_schema
from persist.spark import batch_io, executors, metadata
from persist.spark.change_feed import changes_schema, check_change_columns
from persist.spark.options import (
    DIFFERENCE,
    METADATA,
    STREAM_WRITE,
    Options,
    ReadOptions,
    StreamOptions,
    Target,
    WriteOptions,
)
from persist.spark.spark_schemas import KnownSchema
from persist.spark.stream import RefusedStream, StreamReader, StreamWriter


class PersistDataSource(DataSource):
    """Shards as DataFrames. Spark finds it through `pyspark_persist`, or by `spark.dataSource.register(...)`.

    An instance holds its options and the id of the schema that it returned. Spark pickles it to planners and executors,
    which open stores where they read and write.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = dict(options)
        self._known: KnownSchema | None = None  # of the schema that `schema` returned

    @classmethod
    def name(cls) -> str:
        return "persist"

    def schema(self) -> StructType:
        options = Options(self._given)
        use = options.batch_read
        options.check(use, options.streaming_read)  # Spark does not pass the kind of read
        if options.has("metadata"):
            return metadata.SCHEMAS[options.choice("metadata", METADATA)]
        target = _near(options)
        view = executors.view_of(target)
        self._known = KnownSchema.of(view)
        if use == DIFFERENCE:
            return batch_io.diff_schema(view, ReadOptions.of(options))
        read = ReadOptions.of(options, streams=True)
        if read.changes:
            return changes_schema(view, read)
        shown = current_schema(view.schemas)[1]
        if read.selection.then:
            schema_id, shown = batch_io.schema_of_read(target, read)
            self._known = KnownSchema(view.shard_id, schema_id)
        return batch_io.snapshot_schema(shown, read)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = Options(self._given)
        use = options.batch_read
        options.check(use)
        target = _near(options)
        if options.has("metadata"):
            return metadata.MetadataReader(target, options, schema)
        if use == DIFFERENCE:
            return batch_io.DiffReader(target, ReadOptions.of(options), schema, self._known)
        read = ReadOptions.of(options)
        check_change_columns(schema, read)
        reader = batch_io.ChangesReader if read.changes else batch_io.SnapshotReader
        return reader(target, read, schema, self._known)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        try:
            options = Options(self._given)
            options.check(options.streaming_read)
            read = ReadOptions.of(options, streams=True)
            check_change_columns(schema, read)
            return StreamReader(_near(options), read, StreamOptions.of(options), schema, self._known)
        except PersistError as error:  # Spark replaces errors raised here by one of its own
            return RefusedStream(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        options = Options(self._given)
        options.check(options.batch_write)
        return batch_io.BatchWriter(_home(options), WriteOptions.of(options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        options = Options(self._given)
        options.check(STREAM_WRITE)
        return StreamWriter(_home(options), WriteOptions.of(options), schema, overwrite)


def _near(options: Options) -> Target:
    """The target of reads, which may be in another region."""
    target = Target.of(options)
    executors.check_location_exists(target)
    return target.at(writes=False)


def _home(options: Options) -> Target:
    """The target of writes, at the shard's home."""
    target = Target.of(options)
    if not options.has("key"):  # a write without a key creates no shard
        executors.check_location_exists(target)
    return target.at(writes=True)
