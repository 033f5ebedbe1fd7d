"""The native read: the same rows through Spark's vectorised Parquet reader, its eligibility, plan and leases."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from typing import Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DoubleType, FloatType, StructType

from persist.client.read_leases import LEASE_RENEWED_AFTER, ReadLease
from persist.client.snapshot import Held, leased_blobs
from persist.client.timestamps import BEFORE_ALL
from persist.client.transport import Transport
from persist.core.batch import Part
from persist.core.errors import Expired, InvalidUsage, PersistError, shown
from persist.parts import DIFF, TIME, ShardSchema, decode_inline, valid_schemas
from persist.parts.filter_eval import has_floats
from persist.parts.part_files import PartFiles
from persist.parts.read_plan import classify
from persist.parts.schema_evolution import Migration
from persist.spark.options import Options
from persist.spark.spark_schemas import arrow_schema, cast, quoted, spark_schema

# Whether Spark's own Parquet reader gives exactly the rows of a read, and can: why not, as a sentence.
#
# What is said here is about a read that Spark chooses by itself. Who asks for the native read gets more: Spark SQL then
# adds up what has to be added up.


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
    and a plan of theirs does not tell `Holds` which files it reads.
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
        if pa.types.is_struct(field.type) and has_floats(field.type):
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


# Holds of native reads: each is renewed for as long as a plan of Spark reads the files, and then lapses.
#
# Spark never says that it has finished with a plan. But a DataFrame that reads the files, one that was derived from it,
# a view or a cache refers to one object of the JVM that lists them. When the JVM has collected that, only an RDD or an
# iterator can still read them, which refer to no such object. So from then on the hold is renewed no more, and lapses.


log = logging.getLogger("persist.spark")
HOLDS_MAX = 256  # reads of one process that are kept at the same time
HELD_MAX_S = 86_400.0  # however long the JVM takes to collect a plan
LOOKS_S_MIN = 0.05  # between two looks, however short a lease is
IsGone = Callable[[], bool]


@dataclass(frozen=True)
class _Hold:
    lease: ReadLease
    lease_s: float
    are_gone: Sequence[IsGone]  # of each list of files
    until_s: float


class Holds:
    """The leases of the native reads of one process, which a thread renews while there are some. Thread-safe."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._held: list[_Hold] = []
        self._is_watched = False

    @property
    def is_full(self) -> bool:
        return len(self._held) >= HOLDS_MAX

    def keep(self, lease: ReadLease, lease_s: float, are_gone: Sequence[IsGone]) -> None:
        """Keep a lease of so many seconds until all of `are_gone` say so, at most HELD_MAX_S; then it lapses by itself.

        Beyond HOLDS_MAX it is not kept.
        """
        with self._lock:
            if self.is_full:
                log.warning("persist: %d native reads are held already; this one lapses in %g s", HOLDS_MAX, lease_s)
                return
            self._held.append(_Hold(lease, lease_s, are_gone, self._monotonic() + HELD_MAX_S))
            starts, self._is_watched = not self._is_watched, True
        if starts:
            threading.Thread(target=self._watch, name="persist-native-holds", daemon=True).start()

    def look(self) -> float | None:
        """Renew what is still read and let go of the rest. Returns: seconds until the next look; None: none is needed.

        A lease that could not be renewed is tried again by the next look; one that has lapsed is told and left.
        """
        for hold in tuple(self._held):
            if not self._is_kept(hold):
                with self._lock:
                    self._held.remove(hold)
        with self._lock:
            if not self._held:
                self._is_watched = False
                return None
            return max(LOOKS_S_MIN, min(hold.lease_s for hold in self._held) / (2 * LEASE_RENEWED_AFTER))

    def _is_kept(self, hold: _Hold) -> bool:
        if self._monotonic() >= hold.until_s or all(is_gone() for is_gone in hold.are_gone):
            return False
        try:
            hold.lease.keep()
        except Expired as error:
            log.warning("persist: a native read is not held any more, and may not find its files: %s", error.message)
            return False
        except PersistError:  # the lease has two thirds left: the next look tries again
            pass
        return True

    def _watch(self) -> None:
        while (pause_s := self.look()) is not None:
            time.sleep(pause_s)


def holds() -> Holds:
    """Those of this process."""
    return _holds(os.getpid())


@lru_cache(maxsize=1)
def _holds(pid: int) -> Holds:
    """By process: a forked child must not go on with what its parent keeps."""
    return Holds()


def file_lists(spark: Any, frame: DataFrame) -> list[IsGone]:
    """Whether the JVM has collected each list of files that the plan of a frame reads."""
    leaves = frame._jdf.queryExecution().analyzed().collectLeaves()
    found = (leaves.apply(number) for number in range(leaves.size()))
    return [
        _gone(spark._jvm.java.lang.ref.WeakReference(leaf.relation().location()))
        for leaf in found
        if leaf.getClass().getSimpleName() == "LogicalRelation"
    ]


def _gone(reference: Any) -> IsGone:
    def is_gone() -> bool:
        try:
            return bool(reference.refersTo(None))
        except (Py4JError, OSError):  # the JVM has ended
            return True

    return is_gone


# DataFrames over parts, through Spark's own Parquet reader.
#
# Parts that no other part overlaps are consolidated already and are read as they are; the others are consolidated with
# Spark SQL.


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


def _check_groupable(schema: ShardSchema) -> None:
    """Spark takes 0.0 and -0.0 for one value when it groups, and does not group maps; a shard tells them apart."""
    for field in schema.arrow:
        if pa.types.is_nested(field.type) or pa.types.is_floating(field.type):
            raise InvalidUsage(
                f"column {field.name!r} is {field.type}, by which Spark does not group as the shard does, and some of "
                "its parts must be consolidated; compact the shard, or use format('persist')"
            )


# The native read of a time that is held: whether it is possible, its plan, and the hold on its files.


class NativeRead:
    """A time of a shard that is held, as Spark's own reader would read it."""

    def __init__(self, spark: SparkSession, transport: Transport, held: Held, options: Options) -> None:
        self._spark: Any = spark
        self._transport = transport
        self._held = held
        self._options = options
        self._schemas = valid_schemas(held.view.schemas)
        self._schema = self._schemas[max(self._schemas)]

    def frame(self, native: str, root: str | None = None) -> DataFrame | None:
        """The DataFrame, with its files held for as long as it is there; None: read it by `format("persist")`.

        Raises InvalidUsage where `native` is "always" and Spark does not read it, and what reading footers may.
        """
        if native == NEVER:
            return None
        spark, held = self._spark, self._held
        parts = [part for run in held.runs for part in run.parts]
        why_not = why_not_sources(spark) or why_not_schema(self._schema) or why_not_life(self._schemas, parts)
        if native == ALWAYS and why_not is not None:
            raise InvalidUsage(f"{why_not}; use format('persist')")
        if native == AUTO:
            shows_copy = self._transport.shows_copy
            why_not = why_not_session(spark, self._options, shows_copy=shows_copy) or why_not
            why_not = why_not or self._why_not_before(root, parts)
        if why_not is None:
            below = root or root_of(str(self._transport.blob.url))
            with leased_blobs(held.lease):
                files = PartFiles(self._transport.blob, self._schemas)
                consolidated, others = classify(held.runs, held.as_of, files)
            why_not = self._why_not_these(consolidated, others, below) if native == AUTO else None
            if why_not is None:
                frame = NativePlan(spark, self._schema, below).frame(held.as_of, consolidated, others, self._schemas)
                if has_jvm(spark):
                    holds().keep(held.lease, held.settings.lease_ms / 1000, file_lists(spark, frame))
                return frame
        log.info("persist: shard %r is read by format('persist'): %s", held.view.name, why_not)
        return None

    def _why_not_before(self, root: str | None, parts: Sequence[Part]) -> str | None:
        """The reasons that are known before any file is opened."""
        if self._held.as_of == BEFORE_ALL:
            return "nothing was written by then"
        if holds().is_full:
            return "too many native reads are held"
        try:
            below = root or root_of(str(self._transport.blob.url))
        except InvalidUsage as error:
            return error.message
        why_not = why_not_root(self._spark, below, is_given=root is not None)
        return why_not or why_not_parts(parts, self._held.as_of)

    def _why_not_these(self, consolidated: Sequence[Part], others: Sequence[Part], below: str) -> str | None:
        """The reasons that the parts give once they are classified."""
        if others:
            return "some files have rows in common"
        why_not = why_not_parts(consolidated, self._held.as_of)
        if why_not is None and consolidated:
            why_not = why_not_reached(self._spark, below, consolidated[0])
        return why_not
