"""The native read: the same rows as `format("persist")`, through Spark's own vectorised Parquet reader.

Parts that no other part overlaps are consolidated already and are read as they are, with full column pruning and filter
pushdown; only the others are consolidated, with Spark SQL. For shards whose parts Spark can reach by a path.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import StructType

from persist.client.snapshot import Tagged, holding, leased_blobs
from persist.core.batch import Part, Run
from persist.core.errors import InvalidUsage
from persist.core.ids import PartId
from persist.core.tags import check_tag_name
from persist.parts import ALL_KEYS, DIFF, TIME, ShardSchema, current_schema, decode_inline, sound_schemas
from persist.parts.consolidate import Times
from persist.parts.files import Files
from persist.parts.stretches import overlapping, stretches
from persist.spark import executors
from persist.spark.options import Options, Target
from persist.spark.schemas import arrow_schema, cast, spark_schema

HOLD_S = 3600.0
WAIT_S = 60.0
COPIES_MAX = 2**31 - 16  # of one row: as long as an array of Spark's can be
_BESIDE = (pa.field(TIME, pa.int64()), pa.field(DIFF, pa.int64()))


def table(
    spark: SparkSession,
    shard: str,
    *,
    as_of: int | None = None,
    tag: str | None = None,
    hold_s: float = HOLD_S,
    root: str | None = None,
    **options: str,
) -> DataFrame:
    """The contents of a shard as of a time (None: the latest complete one) or a tag, each row as often as it occurs.

    `options` are those of `format("persist")` that say where shards are (`url="persist:///dir"`). The files stay
    readable for `hold_s` seconds (at most a day); later Spark fails on a missing file, it never leaves rows out. `root`
    is the URL by which executors reach the blob store, where it is not the one that this process uses.

    Raises InvalidUsage when the store has no path or the shard has columns that Spark cannot read from its files:
    `format("persist")` reads those.
    """
    if as_of is not None and tag is not None:
        raise InvalidUsage("as_of and tag are both given; give one of them")
    at = as_of if tag is None else Tagged(check_tag_name(tag))
    named = Target.of(Options({**options, "path": shard}))
    executors.check_there(named)
    target = named.at(writes=False)
    settings = replace(target.connection.handles.read, lease_ms=int(hold_s * 1000))
    transport = executors.transport(target.connection)
    view = executors.view_of(target)
    _, schema = current_schema(view.schemas)
    plan = _Plan(spark, schema, _root(root or str(transport.blob.url)))
    if at is None and view.upper.element == 0:
        return plan.empty()
    with holding(transport, target.shard, at, "spark native read", WAIT_S, settings) as held:
        schemas = sound_schemas(held.view.schemas)
        with leased_blobs(held.lease):
            straight, others = classify(held.runs, held.as_of, Files(transport.blob, schemas))
        return plan.frame(held.as_of, straight, others, schemas)


def classify(runs: Iterable[Run], as_of: int, files: Files) -> tuple[list[Part], list[Part]]:
    """The parts whose rows come out as they are, and those of which some have to be added up."""
    times = Times.snapshot(as_of)
    straight: list[Part] = []
    others: list[Part] = []
    for items in overlapping(runs, times, ALL_KEYS, files):
        merged: dict[PartId, Part] = {}
        for stretch in stretches(items, None, times, ALL_KEYS, files):
            if not stretch.is_straight or stretch.folds:
                merged.update((piece.item.part.id, piece.item.part) for piece in stretch.pieces if piece.item)
        others.extend(merged.values())
        straight.extend(item.part for item in items if item.part.id not in merged)
    return straight, others


class _Plan:
    """Frames over parts, in the shard's columns and `__diff`."""

    def __init__(self, spark: SparkSession, schema: ShardSchema, root: str) -> None:
        self._spark = spark
        self._root = root
        self._shown = spark_schema(schema.arrow)
        self._names = schema.arrow.names
        self._full = StructType([*self._shown.fields, *spark_schema(_BESIDE).fields])
        self._schema = schema
        _check_readable(schema, arrow_schema(self._shown))

    def empty(self) -> DataFrame:
        return self._spark.createDataFrame([], self._shown)

    def frame(
        self, as_of: int, straight: Sequence[Part], others: Sequence[Part], schemas: dict[int, ShardSchema]
    ) -> DataFrame:
        if others:
            _check_groupable(self._schema)
        found = [self._expanded(self._files(parts, as_of), parts) for parts in _alike(straight)]
        if others:
            found.append(self._consolidated(others, as_of, schemas))
        return reduce(DataFrame.unionAll, found) if found else self.empty()

    def _files(self, parts: Sequence[Part], as_of: int) -> DataFrame:
        """Rows of Parquet parts that are alike in how their times count, up to `as_of`."""
        paths = [f"{self._root}/{part.key}" for part in parts]
        reader = self._spark.read.option("ignoreMissingFiles", "false").option("recursiveFileLookup", "true")
        frame = reader.schema(self._full).parquet(*paths)
        first = parts[0]
        if first.clip is not None:
            frame = frame.where(F.col(TIME) >= first.clip)
        if first.time is None and any(part.time_max > as_of for part in parts):
            frame = frame.where(F.col(TIME) <= as_of)
        return frame

    def _consolidated(self, parts: Sequence[Part], as_of: int, schemas: dict[int, ShardSchema]) -> DataFrame:
        frames = [self._files(group, as_of) for group in _alike([part for part in parts if not part.is_inline])]
        inline = [part for part in parts if part.is_inline]
        if inline:
            rows = pa.concat_tables([self._inline(part, as_of, schemas) for part in inline])
            frames.append(self._spark.createDataFrame(rows, self._full))
        columns = [F.col(_quoted(name)) for name in self._names]
        both = reduce(DataFrame.unionAll, frames)
        summed = both.groupBy(*columns).agg(F.sum(DIFF).alias(DIFF)).where(F.col(DIFF) != 0)
        return self._times(summed)

    def _inline(self, part: Part, as_of: int, schemas: dict[int, ShardSchema]) -> pa.Table:
        rows = self._schema.migrate(decode_inline(part, schemas))
        times = rows.column(TIME)
        if part.clip is not None:
            rows = rows.filter(pc.greater_equal(times, part.clip))
        if part.time is None:
            rows = rows.filter(pc.less_equal(rows.column(TIME), as_of))
        return cast(rows, arrow_schema(self._full))

    def _expanded(self, frame: DataFrame, parts: Sequence[Part]) -> DataFrame:
        """Each row as often as its diff says; without looking at diffs where all are 1."""
        if all(part.diff_min == part.diff_max == 1 for part in parts):
            return frame.select(*[F.col(_quoted(name)) for name in self._names])
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
        columns = [F.col(_quoted(name)) for name in self._names]
        return frame.select(*columns, F.explode(copies).alias("__copy")).select(*columns)


def _alike(parts: Iterable[Part]) -> list[list[Part]]:
    """Parquet parts in groups with the same filters on times."""
    groups: dict[tuple[bool, int | None], list[Part]] = {}
    for part in parts:
        groups.setdefault((part.time is None, part.clip), []).append(part)
    return list(groups.values())


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _root(url: str) -> str:
    """The URL under which Hadoop finds the blobs. Raises InvalidUsage where there is none."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return f"file://{unquote(parts.path)}".rstrip("/")
    if parts.scheme in ("s3", "s3a"):
        return f"s3a://{parts.netloc}{parts.path}".rstrip("/")
    if parts.scheme in ("gs", "abfs", "abfss", "hdfs"):
        return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
    raise InvalidUsage(f"the blob store {url!r} has no path that Spark could read; use format('persist')")


def _check_readable(schema: ShardSchema, shown: pa.Schema) -> None:
    """Whether Spark reads the columns from the files as the shard does."""
    for field in schema.arrow:
        if not _equals(field.type, shown.field(field.name).type):
            raise InvalidUsage(
                f"column {field.name!r} is {field.type}, which Spark's Parquet reader does not read as the shard does; "
                "use format('persist')"
            )


def _check_groupable(schema: ShardSchema) -> None:
    """Spark takes 0.0 and -0.0 for one value when it groups, and does not group maps; a shard tells them apart."""
    for field in schema.arrow:
        if pa.types.is_nested(field.type) or pa.types.is_floating(field.type):
            raise InvalidUsage(
                f"column {field.name!r} is {field.type}, by which Spark does not group as the shard does, and some of "
                "its parts must be consolidated; compact the shard, or use format('persist')"
            )


def _equals(stored: Any, shown: Any) -> bool:
    large = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    return (
        bool(large.get(stored, stored) == shown) and not pa.types.is_time(stored) and not pa.types.is_duration(stored)
    )
