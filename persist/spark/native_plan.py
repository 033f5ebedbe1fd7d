"""DataFrames over parts, through Spark's own Parquet reader.

Parts that no other part overlaps are consolidated already and are read as they are; the others are consolidated with
Spark SQL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DoubleType, FloatType, StructType

from persist.core.batch import Part
from persist.core.errors import InvalidUsage
from persist.parts import DIFF, TIME, ShardSchema, decode_inline
from persist.parts.migration import Migration
from persist.spark.schemas import arrow_schema, cast, spark_schema

COPIES_MAX = 2**31 - 16  # of one row: as long as an array of Spark's can be
_BESIDE = (pa.field(TIME, pa.int64()), pa.field(DIFF, pa.int64()))
_READS = {  # whatever the session says: no row is left out, none is changed, and bytes that rotted are an error
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
    "mergeSchema": "false",
    "recursiveFileLookup": "true",
    "datetimeRebaseMode": "CORRECTED",
    "parquet.page.verify-checksum.enabled": "true",
}


class NativePlan:
    """Frames over parts below the URL `root`, in the shard's columns, each row as often as it occurs."""

    def __init__(self, spark: SparkSession, schema: ShardSchema, root: str) -> None:
        self._spark = spark
        self._root = root
        self._shown = spark_schema(schema.arrow)
        self._full = StructType([*self._shown.fields, *spark_schema(_BESIDE).fields])
        self._schema = schema

    def frame(
        self, as_of: int, straight: Sequence[Part], others: Sequence[Part], schemas: dict[int, ShardSchema]
    ) -> DataFrame:
        """The rows by `as_of` of parts that are read as they are, and of others, of which some are added up.

        Raises InvalidUsage where Spark cannot add them up as the shard does.
        """
        if others:
            _check_groupable(self._schema)
        found = [self._expanded(self._files(parts, as_of), parts) for parts in _alike(straight)]
        if others:
            found.append(self._consolidated(others, as_of, schemas))
        return reduce(DataFrame.unionAll, found) if found else self._spark.createDataFrame([], self._shown)

    def _files(self, parts: Sequence[Part], as_of: int) -> DataFrame:
        """Rows of Parquet parts that are alike in how their times count, up to `as_of`."""
        paths = [f"{self._root}/{part.key}" for part in parts]
        frame = self._spark.read.options(**_READS).schema(self._full).parquet(*paths)
        first = parts[0]
        if first.time is not None:  # the commit chose the time, which the file does not have
            return frame
        if first.clip is not None:
            frame = frame.where(F.col(TIME) >= first.clip)
        if any(part.time_max > as_of for part in parts):
            frame = frame.where(F.col(TIME) <= as_of)
        return frame

    def _consolidated(self, parts: Sequence[Part], as_of: int, schemas: dict[int, ShardSchema]) -> DataFrame:
        frames = [self._files(group, as_of) for group in _alike([part for part in parts if not part.is_inline])]
        inline = [part for part in parts if part.is_inline]
        if inline:
            rows = pa.concat_tables([self._inline(part, as_of, schemas) for part in inline])
            frames.append(self._spark.createDataFrame(rows, self._full))
        columns = [F.col(quoted(name)) for name in self._shown.names]
        both = reduce(DataFrame.unionAll, frames)
        summed = both.groupBy(*columns).agg(F.sum(DIFF).alias(DIFF)).where(F.col(DIFF) != 0)
        return self._times(summed)

    def _inline(self, part: Part, as_of: int, schemas: dict[int, ShardSchema]) -> pa.Table:
        rows = Migration(schemas[part.schema_id], self._schema).rows(decode_inline(part, schemas))
        if part.time is None:
            times = rows.column(TIME)
            if part.clip is not None:
                rows = rows.filter(pc.greater_equal(times, part.clip))
            rows = rows.filter(pc.less_equal(rows.column(TIME), as_of))
        return cast(rows, arrow_schema(self._full))

    def _expanded(self, frame: DataFrame, parts: Sequence[Part]) -> DataFrame:
        """Each row as often as its diff says; without looking at diffs where all are 1."""
        if all(part.diff_min == part.diff_max == 1 for part in parts):
            return frame.select(*self._columns())
        return self._times(frame)

    def _times(self, frame: DataFrame) -> DataFrame:
        wrong = F.concat(
            F.lit("a row has the multiplicity "),
            F.col(DIFF).cast("string"),
            F.lit(f", which is negative or more than {COPIES_MAX}; read it with multiplicity=column"),
        )
        copies = F.when(
            (F.col(DIFF) < 0) | (F.col(DIFF) > COPIES_MAX), F.raise_error(wrong).cast("array<int>")
        ).otherwise(F.array_repeat(F.lit(1), F.col(DIFF).cast("int")))
        columns = self._columns()
        return frame.select(*columns, F.explode(copies).alias("__copy")).select(*map(quoted, self._shown.names))

    def _columns(self) -> list[Column]:
        """The columns, floats such that no filter on them reaches the files.

        There it would go by bounds that leave out NaN, which is more than all numbers to Spark, and by dictionaries
        that tell -0.0 from 0.0, which Spark does not: rows would be missing.
        """
        columns = []
        for field in self._shown.fields:
            column = F.col(quoted(field.name))
            if isinstance(field.dataType, (FloatType, DoubleType)):
                column = F.nanvl(column, column).alias(field.name)
            columns.append(column)
        return columns


def _alike(parts: Iterable[Part]) -> list[list[Part]]:
    """Parquet parts in groups with the same filters on times."""
    groups: dict[tuple[bool, int | None], list[Part]] = {}
    for part in parts:
        groups.setdefault((part.time is None, part.clip), []).append(part)
    return list(groups.values())


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _check_groupable(schema: ShardSchema) -> None:
    """Spark takes 0.0 and -0.0 for one value when it groups, and does not group maps; a shard tells them apart."""
    for field in schema.arrow:
        if pa.types.is_nested(field.type) or pa.types.is_floating(field.type):
            raise InvalidUsage(
                f"column {field.name!r} is {field.type}, by which Spark does not group as the shard does, and some of "
                "its parts must be consolidated; compact the shard, or use format('persist')"
            )
