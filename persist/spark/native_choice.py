"""Whether Spark's own Parquet reader gives exactly the rows of a read, and can: why not, as a sentence.

What is said here is about a read that Spark chooses by itself. Who asks for the native read gets more: Spark SQL then
adds up what has to be added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from persist.core.batch import Part
from persist.core.errors import InvalidUsage, shown
from persist.parts import ShardSchema
from persist.parts.migration import Migration
from persist.spark.options import Options
from persist.spark.schemas import arrow_schema, spark_schema

AUTO, ALWAYS, NEVER = "auto", "always", "never"
PARTS_MAX = 10_000  # files of one plan: Spark asks the store for each of them when it plans
_OF_PYTHON = ("numPartitions", "batchRows", "memoryBytes")
_V1 = "spark.sql.sources.useV1SourceList"
_GLOBS = frozenset("{}[]*?\\")  # Spark takes a path that has one of these for a pattern


def checked_choice(native: object) -> str:
    """One of AUTO, ALWAYS and NEVER. Raises InvalidUsage."""
    if native in (AUTO, ALWAYS, NEVER):
        return str(native)
    raise InvalidUsage(f"native is {shown(native)}; it is {AUTO!r}, {ALWAYS!r} or {NEVER!r}")


def has_jvm(spark: Any) -> bool:
    """Whether the session's JVM can be asked: it cannot by Spark Connect."""
    return getattr(spark, "_jvm", None) is not None


def why_not_session(spark: Any, options: Options, *, shows_copy: bool) -> str | None:
    """What stands against it in the session and the options, whatever the shard holds."""
    for name in _OF_PYTHON:
        if options.has(name):
            return f"option {name!r} is for format('persist')"
    if not has_jvm(spark):
        return "this session has no JVM of its own, which would tell how long the files are read"
    return "a copy may lose files while they are read" if shows_copy else None


def why_not_sources(spark: Any) -> str | None:
    """Why the session reads no Parquet as is wanted here.

    Spark's newer sources may count the values of a column by its place in a file, where older files have fewer columns;
    and a plan of theirs does not tell `native_holds` which files it reads.
    """
    if "parquet" in spark.conf.get(_V1, "parquet").lower().split(","):
        return None
    return f"{_V1} of this session leaves out parquet, and Spark's newer sources may count wrongly"


def why_not_schema(schema: ShardSchema) -> str | None:
    """Which column Spark's Parquet reader does not read, or filter, as the shard does."""
    shown_as = arrow_schema(spark_schema(schema.arrow))
    lowered: set[str] = set()
    for field in schema.arrow:
        if not _is_read_alike(field.type, shown_as.field(field.name).type):
            return (
                f"column {field.name!r} is {field.type}, which Spark's Parquet reader does not read as the shard does"
            )
        if (twin := _twin_within(field.type)) is not None:
            return f"column {field.name!r} is {field.type}: {twin!r} within it differs from another one in case only"
        if _floats_within(field.type):
            return f"column {field.name!r} is {field.type}: filters on floats within it would miss NaN and -0.0"
        if field.name.lower() in lowered:
            return f"column {field.name!r} differs from another one in case only"
        lowered.add(field.name.lower())
    return None


def why_not_life(schemas: Mapping[int, ShardSchema], parts: Iterable[Part]) -> str | None:
    """Why files that were written by older schemas are not read by the names of their columns."""
    current = schemas[max(schemas)]
    first = min((part.schema_id for part in parts if part.rows), default=max(schemas))
    if all(Migration(old, current).is_by_name for number, old in schemas.items() if number >= first):
        return None
    return "some files were written before columns were renamed, dropped, widened or added with a default"


def why_not_root(spark: Any, root: str, *, is_given: bool) -> str | None:
    """Why executors might not find files below this URL."""
    if _GLOBS.intersection(root):
        return f"Spark would take {root!r} for a pattern"
    if urlsplit(root).scheme == "file" and not is_given and not spark.sparkContext.master.startswith("local"):
        return f"{root!r} is of this machine, and executors may be on others; give root if they see it too"
    return None


def why_not_parts(parts: Iterable[Part], as_of: int) -> str | None:
    """Which of the parts that have rows by `as_of` are not read as they are."""
    for number, part in enumerate(part for part in parts if part.rows and part.time_min <= as_of):
        if number == PARTS_MAX:
            return f"there are more than {PARTS_MAX} files"
        if part.is_inline:
            return "some rows are in no file yet"
        if part.time_max > as_of:
            return "some files hold later times as well"
        if part.diff_min < 1 and part.bundle is None:
            return "some files hold rows that were taken away"
    return None


def why_not_reached(spark: Any, root: str, part: Part) -> str | None:
    """Why Hadoop, as it is configured here, does not find the file of a part; None: it does, and it is that file."""
    name = f"{root}/{part.key}"
    try:
        path = spark._jvm.org.apache.hadoop.fs.Path(name)
        found = path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()).getFileStatus(path).getLen()
    except (Py4JError, PySparkException) as error:
        return f"Spark does not reach {name!r}: {str(error).splitlines()[0]}"
    return None if found == part.size else f"Spark finds another file at {name!r}"


def root_of(url: str) -> str:
    """The URL under which Hadoop finds the blobs. Raises InvalidUsage where there is none."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return f"file://{unquote(parts.path)}".rstrip("/")
    if parts.scheme in ("s3", "s3a"):
        return f"s3a://{parts.netloc}{parts.path}".rstrip("/")
    if parts.scheme in ("gs", "abfs", "abfss", "hdfs"):
        return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/")
    raise InvalidUsage(f"the blob store {url!r} has no path that Spark could read; use format('persist')")


def _is_read_alike(stored: Any, shown_as: Any) -> bool:
    large = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    is_same = bool(large.get(stored, stored) == shown_as)
    return is_same and not pa.types.is_time(stored) and not pa.types.is_duration(stored)


def _twin_within(kind: Any) -> str | None:
    """A field at any depth of a value that differs from another one beside it in case only; None: there is none."""
    if not pa.types.is_nested(kind):
        return None
    inner = [kind.field(number) for number in range(kind.num_fields)]
    lowered = [field.name.lower() for field in inner]
    twin = next((field.name for field in inner if lowered.count(field.name.lower()) > 1), None)
    return twin or next((found for field in inner if (found := _twin_within(field.type)) is not None), None)


def _floats_within(kind: Any) -> bool:
    """Whether a filter of Spark's may look at a float inside a value. Those of lists and maps reach no file."""
    if not pa.types.is_struct(kind):
        return False
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    return any(pa.types.is_floating(one) or _floats_within(one) for one in inner)
