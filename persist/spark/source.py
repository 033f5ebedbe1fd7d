"""The data source `persist`: what Spark makes for `format("persist")`."""

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
from persist.spark import executors, metadata, planning, snapshot_diff
from persist.spark.batch_io import BatchWriter, ChangesReader, SnapshotReader, snapshot_schema
from persist.spark.change_feed import changes_schema, check_signs
from persist.spark.options import (
    HistoryOptions,
    Options,
    PastOptions,
    ReadOptions,
    StreamOptions,
    Target,
    WriteOptions,
    metadata_of,
)
from persist.spark.spark_schemas import Known
from persist.spark.stream import RefusedStream, StreamReader, StreamWriter


class PersistDataSource(DataSource):
    """Shards as DataFrames. Found by Spark through `pyspark_persist`, or `spark.dataSource.register(...)`.

    An instance holds its options, and which schema it has told: Spark pickles it to its planners and to executors,
    which open stores where they read and write.
    """

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._given = dict(options)
        self._known: Known | None = None  # by which `schema` has told the columns

    @classmethod
    def name(cls) -> str:
        return "persist"

    def schema(self) -> StructType:
        options = Options(self._given)
        if HistoryOptions.of(options) is not None:
            return metadata.SCHEMA
        if (kind := metadata_of(options)) is not None:
            return metadata.SCHEMAS[kind]
        between = PastOptions.of(options)
        read = ReadOptions.of(options, streams=True) if between is None else None  # Spark does not say which read it is
        view = executors.view_of(_near(options))
        self._known = Known.of(view)
        if between is not None:
            return snapshot_diff.changes_schema(view, between)
        assert read is not None
        if read.changes:
            return changes_schema(view, read)
        shown = current_schema(view.schemas)[1]
        if read.then:
            target = _near(options)
            number, shown = planning.shown(target, planning.with_times(target, read))
            self._known = Known(view.shard_id, number)
        return snapshot_schema(shown, read)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = Options(self._given)
        options.check("a batch read")
        if (told := HistoryOptions.of(options)) is not None:
            return metadata.HistoryReader(_near(options), told, schema)
        if (kind := metadata_of(options)) is not None:
            return metadata.MetadataReader(_near(options), kind, schema)
        if (between := PastOptions.of(options)) is not None:
            return snapshot_diff.PastReader(_near(options), between, schema, self._known)
        target, read = _near(options), ReadOptions.of(options)
        check_signs(schema, read)
        reader = ChangesReader if read.changes else SnapshotReader
        return reader(target, read, schema, self._known)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        try:
            options = Options(self._given)
            options.check("a streaming read")
            read = ReadOptions.of(options, streams=True)
            check_signs(schema, read)
            return StreamReader(_near(options), read, StreamOptions.of(options), schema, self._known)
        except PersistError as error:  # Spark hides what is raised here behind an error of its own
            return RefusedStream(error)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        options = Options(self._given)
        options.check("a batch write")
        return BatchWriter(_home(options), WriteOptions.of(options), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        options = Options(self._given)
        options.check("a streaming write")
        return StreamWriter(_home(options), WriteOptions.of(options), schema, overwrite)


def _near(options: Options) -> Target:
    """How the shard is read: it may be of another region."""
    target = Target.of(options)
    executors.check_there(target)
    return target.at(writes=False)


def _home(options: Options) -> Target:
    """How the shard is written."""
    target = Target.of(options)
    if not options.has("key"):  # it makes no shard
        executors.check_there(target)
    return target.at(writes=True)
