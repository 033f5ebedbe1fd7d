"""The native read: the same rows through Spark's vectorised Parquet reader, its eligibility, plan and leases."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
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

# Eligibility: why Spark's Parquet reader cannot return exactly the rows of a read, as a sentence.
#
# These reasons are for native="auto". With native="always", Spark SQL consolidates the parts that need it.

AUTO, ALWAYS, NEVER = "auto", "always", "never"
PARTS_MAX = 10_000  # files of a plan: Spark requests the status of each when it plans
_OF_PYTHON = ("numPartitions", "batchRows", "memoryBytes")
_V1 = "spark.sql.sources.useV1SourceList"
_GLOBS = frozenset("{}[]*?\\")  # in a path, Spark treats these as a pattern


def checked_choice(native: object) -> str:
    """`native` if it is one of AUTO, ALWAYS and NEVER. Raises InvalidUsage."""
    if native in (AUTO, ALWAYS, NEVER):
        return str(native)
    raise InvalidUsage(f"native is {shown(native)}; it must be {AUTO!r}, {ALWAYS!r} or {NEVER!r}")


def has_jvm(spark: Any) -> bool:
    """Whether the session has a JVM, unlike one of Spark Connect."""
    return getattr(spark, "_jvm", None) is not None


def why_not_session(spark: Any, options: Options, *, shows_copy: bool) -> str | None:
    """Why the session or the options exclude a native read, or None."""
    for name in _OF_PYTHON:
        if options.has(name):
            return f"option {name!r} is for format('persist')"
    if not has_jvm(spark):
        return "this session has no JVM of its own, which shows how long the files are in use"
    return "a copy may lose files while they are read" if shows_copy else None


def why_not_sources(spark: Any) -> str | None:
    """Why the session does not use Spark's V1 Parquet source, or None.

    The V2 source may take the row count from the wrong column of older files that have fewer columns, and `Holds`
    cannot find the files of its plans.
    """
    if "parquet" in spark.conf.get(_V1, "parquet").lower().split(","):
        return None
    return f"{_V1} of this session excludes parquet, and Spark's V2 source may count wrongly"


def why_not_schema(schema: ShardSchema) -> str | None:
    """Which column Spark's Parquet reader reads or filters differently than the shard, or None."""
    shown_as = arrow_schema(spark_schema(schema.arrow))
    lowered: set[str] = set()
    for field in schema.arrow:
        if not _is_read_alike(field.type, shown_as.field(field.name).type):
            return f"column {field.name!r} is {field.type}, which Spark's Parquet reader reads differently"
        if (twin := _twin_within(field.type)) is not None:
            return f"column {field.name!r} is {field.type}: its field {twin!r} differs from another field only in case"
        if pa.types.is_struct(field.type) and has_floats(field.type):
            return f"column {field.name!r} is {field.type}: filters on floats within it would miss NaN and -0.0"
        if field.name.lower() in lowered:
            return f"column {field.name!r} differs from another column only in case"
        lowered.add(field.name.lower())
    return None


def why_not_schemas(schemas: Mapping[int, ShardSchema], parts: Iterable[Part]) -> str | None:
    """Why files of older schemas cannot be read by their column names, or None."""
    current = schemas[max(schemas)]
    first = min((part.schema_id for part in parts if part.rows), default=max(schemas))
    if all(Migration(old, current).is_by_name for number, old in schemas.items() if number >= first):
        return None
    return "some files were written before columns were renamed, dropped, widened or added with a default"


def why_not_root(spark: Any, root: str, *, is_given: bool) -> str | None:
    """Why executors might not find files below this URL, or None."""
    if _GLOBS.intersection(root):
        return f"Spark would treat {root!r} as a pattern"
    if urlsplit(root).scheme == "file" and not is_given and not spark.sparkContext.master.startswith("local"):
        return f"{root!r} is on this machine, and executors may be on others; give root if they can read it too"
    return None


def why_not_parts(parts: Iterable[Part], as_of: int) -> str | None:
    """Why parts with rows by `as_of` need consolidation or filtering, or None."""
    for number, part in enumerate(part for part in parts if part.rows and part.time_min <= as_of):
        if number == PARTS_MAX:
            return f"there are more than {PARTS_MAX} files"
        if part.is_inline:
            return "some rows are inline"
        if part.time_max > as_of:
            return "some files also have later times"
        if part.diff_min < 1 and part.bundle is None:
            return "some files have deletions"
    return None


def why_not_reachable(spark: Any, root: str, part: Part) -> str | None:
    """Why Hadoop, as configured here, does not find the file of a part, or finds another one; None: it finds it."""
    name = f"{root}/{part.key}"
    try:
        path = spark._jvm.org.apache.hadoop.fs.Path(name)
        size = path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf()).getFileStatus(path).getLen()
    except (Py4JError, PySparkException) as error:
        return f"Spark cannot read {name!r}: {str(error).splitlines()[0]}"
    return None if size == part.size else f"Spark finds another file at {name!r}"


def root_of(url: str) -> str:
    """The URL at which Hadoop finds the blobs. Raises InvalidUsage if there is none."""
    parts = urlsplit(url)
    if parts.scheme == "file":
        return f"file://{unquote(parts.path)}".rstrip("/")
    if parts.scheme in ("s3", "s3a", "gs", "abfs", "abfss", "hdfs"):
        scheme = "s3a" if parts.scheme == "s3" else parts.scheme
        return f"{scheme}://{parts.netloc}{parts.path}".rstrip("/")
    raise InvalidUsage(f"Spark cannot read the blob store {url!r}; use format('persist')")


def _is_read_alike(stored: Any, shown_as: Any) -> bool:
    large = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}
    is_same = bool(large.get(stored, stored) == shown_as)
    return is_same and not pa.types.is_time(stored) and not pa.types.is_duration(stored)


def _twin_within(kind: Any) -> str | None:
    """A nested field, at any depth, whose name differs from that of a sibling only in case; None if there is none."""
    if not pa.types.is_nested(kind):
        return None
    inner = [kind.field(number) for number in range(kind.num_fields)]
    lowered = [field.name.lower() for field in inner]
    twin = next((field.name for field in inner if lowered.count(field.name.lower()) > 1), None)
    return twin or next((name for field in inner if (name := _twin_within(field.type)) is not None), None)


# Holds of native reads: each lease is renewed while a Spark plan reads the files, and then expires.
#
# Spark does not report that a plan is no longer used. But a DataFrame over the files, any DataFrame derived from it, a
# view and a cache refer to the same JVM object, which lists the files. After the JVM has collected that object, only an
# RDD or an iterator may still read the files. The lease is not renewed from then on.

log = logging.getLogger("persist.spark")
HOLDS_MAX = 256  # native reads of one process that are held at once
HELD_MAX_S = 86_400.0  # even if the JVM does not collect the plan
RENEWALS_S_MIN = 0.05  # between two renewals, however short the lease
IsGone = Callable[[], bool]


@dataclass(frozen=True)
class _Hold:
    lease: ReadLease
    lease_s: float
    are_gone: Sequence[IsGone]  # of each list of files
    until_s: float


class Holds:
    """The leases of the native reads of a process. A thread renews them while there are any. Thread-safe."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._lock = threading.Lock()
        self._held: list[_Hold] = []
        self._is_watched = False

    @property
    def is_full(self) -> bool:
        return len(self._held) >= HOLDS_MAX

    def keep(self, lease: ReadLease, lease_s: float, are_gone: Sequence[IsGone]) -> None:
        """Renew a lease of `lease_s` seconds until all of `are_gone` return true, but at most for HELD_MAX_S.

        If there are HOLDS_MAX leases already, it is not renewed.
        """
        with self._lock:
            if self.is_full:
                log.warning(
                    "persist: %d native reads are held already; the lease of this one expires in %g s",
                    HOLDS_MAX,
                    lease_s,
                )
                return
            self._held.append(_Hold(lease, lease_s, are_gone, self._monotonic() + HELD_MAX_S))
            starts, self._is_watched = not self._is_watched, True
        if starts:
            threading.Thread(target=self._watch, name="persist-native-holds", daemon=True).start()

    def renew_due(self) -> float | None:
        """Renew the leases in use and drop the others. Returns the seconds until the next renewal; None: no lease.

        The next call retries a lease that could not be renewed. A lease that has expired is logged and dropped.
        """
        for hold in tuple(self._held):
            if not self._is_kept(hold):
                with self._lock:
                    self._held.remove(hold)
        with self._lock:
            if not self._held:
                self._is_watched = False
                return None
            return max(RENEWALS_S_MIN, min(hold.lease_s for hold in self._held) / (2 * LEASE_RENEWED_AFTER))

    def _is_kept(self, hold: _Hold) -> bool:
        if self._monotonic() >= hold.until_s or all(is_gone() for is_gone in hold.are_gone):
            return False
        try:
            hold.lease.keep()
        except Expired as error:
            log.warning(
                "persist: the lease of a native read has expired, and its files may be deleted: %s", error.message
            )
            return False
        except PersistError:  # two thirds of the lease are left: the next call retries
            pass
        return True

    def _watch(self) -> None:
        while (pause_s := self.renew_due()) is not None:
            time.sleep(pause_s)


def holds() -> Holds:
    return _holds(os.getpid())


@lru_cache(maxsize=1)
def _holds(pid: int) -> Holds:
    """Keyed by process: a forked child must not renew its parent's leases."""
    return Holds()


def file_lists(spark: Any, frame: DataFrame) -> list[IsGone]:
    """For each file list of the plan of a DataFrame, whether the JVM has collected it."""
    leaves = frame._jdf.queryExecution().analyzed().collectLeaves()
    relations = (leaves.apply(number) for number in range(leaves.size()))
    return [
        _gone(spark._jvm.java.lang.ref.WeakReference(leaf.relation().location()))
        for leaf in relations
        if leaf.getClass().getSimpleName() == "LogicalRelation"
    ]


def _gone(reference: Any) -> IsGone:
    def is_gone() -> bool:
        try:
            return bool(reference.refersTo(None))
        except (Py4JError, OSError):  # the JVM has ended
            return True

    return is_gone


# Plans over parts, through Spark's Parquet reader. Parts that no other part overlaps are consolidated; Spark SQL
# consolidates the others.

COPIES_MAX = 2**31 - 16  # of a row: the maximum length of a Spark array
_TIME_AND_DIFF = (pa.field(TIME, pa.int64()), pa.field(DIFF, pa.int64()))
_READS = {  # override the session: omit and change no rows, and raise an error for corrupt bytes
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
    "mergeSchema": "false",
    "recursiveFileLookup": "true",
    "datetimeRebaseMode": "CORRECTED",
    "parquet.page.verify-checksum.enabled": "true",
}


class NativeRead:
    """A native read of a shard as of a held time: DataFrames with the shard's columns and repeated rows."""

    def __init__(self, spark: SparkSession, transport: Transport, held: Held, options: Options) -> None:
        self._spark: Any = spark
        self._transport = transport
        self._held = held
        self._options = options
        self._schemas = valid_schemas(held.view.schemas)
        self._schema = self._schemas[max(self._schemas)]

    def frame(self, native: str, root: str | None = None) -> DataFrame | None:
        """The DataFrame, whose files are held while it exists; None: read it by `format("persist")`.

        Raises InvalidUsage if `native` is "always" and a native read is impossible, and what reading footers may.
        """
        if native == NEVER:
            return None
        spark, held = self._spark, self._held
        parts = [part for run in held.runs for part in run.parts]
        why_not = why_not_sources(spark) or why_not_schema(self._schema) or why_not_schemas(self._schemas, parts)
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
                frame = self._plan(consolidated, others, below)
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
            why_not = why_not_reachable(self._spark, below, consolidated[0])
        return why_not

    # --- the plan

    @cached_property
    def _shown(self) -> StructType:
        return spark_schema(self._schema.arrow)

    @cached_property
    def _full(self) -> StructType:
        return StructType([*self._shown.fields, *spark_schema(_TIME_AND_DIFF).fields])

    def _plan(self, consolidated: Sequence[Part], others: Sequence[Part], root: str) -> DataFrame:
        """The rows of consolidated parts, and of other parts after consolidation, below the URL `root`.

        Raises InvalidUsage if Spark would consolidate them differently than the shard: it groups 0.0 and -0.0 together,
        and cannot group by maps.
        """
        for field in self._schema.arrow if others else ():
            if pa.types.is_nested(field.type) or pa.types.is_floating(field.type):
                raise InvalidUsage(
                    f"column {field.name!r} is {field.type}, which Spark groups differently than the shard, and some "
                    "parts must be consolidated; compact the shard, or use format('persist')"
                )
        frames = []
        for group in _alike(consolidated):
            frame = self._files(group, root)
            are_single = all(part.diff_min == part.diff_max == 1 for part in group)  # no diffs have to be read
            frames.append(frame.select(*self._columns()) if are_single else self._repeated(frame))
        if others:
            frames.append(self._consolidated(others, root))
        return reduce(DataFrame.unionAll, frames) if frames else self._spark.createDataFrame([], self._shown)

    def _files(self, parts: Sequence[Part], root: str) -> DataFrame:
        """The rows as of the time of Parquet parts with the same filters on times."""
        paths = [f"{root}/{part.key}" for part in parts]
        frame: DataFrame = self._spark.read.options(**_READS).schema(self._full).parquet(*paths)
        first, as_of = parts[0], self._held.as_of
        if first.time is not None:  # the commit set the time, so the file has none
            return frame
        if first.clip is not None:
            frame = frame.where(F.col(TIME) >= first.clip)
        if any(part.time_max > as_of for part in parts):
            frame = frame.where(F.col(TIME) <= as_of)
        return frame

    def _consolidated(self, parts: Sequence[Part], root: str) -> DataFrame:
        frames = [self._files(group, root) for group in _alike([part for part in parts if not part.is_inline])]
        inline = [part for part in parts if part.is_inline]
        if inline:
            rows = pa.concat_tables(map(self._inline, inline))
            frames.append(self._spark.createDataFrame(rows, self._full))
        columns = [F.col(quoted(name)) for name in self._shown.names]
        summed = (
            reduce(DataFrame.unionAll, frames).groupBy(*columns).agg(F.sum(DIFF).alias(DIFF)).where(F.col(DIFF) != 0)
        )
        return self._repeated(summed)

    def _inline(self, part: Part) -> pa.Table:
        rows = Migration(self._schemas[part.schema_id], self._schema).rows(decode_inline(part, self._schemas))
        if part.time is None:
            if part.clip is not None:
                rows = rows.filter(pc.greater_equal(rows.column(TIME), part.clip))
            rows = rows.filter(pc.less_equal(rows.column(TIME), self._held.as_of))
        return cast(rows, arrow_schema(self._full))

    def _repeated(self, frame: DataFrame) -> DataFrame:
        message = F.concat(
            F.lit("a row has the multiplicity "),
            F.col(DIFF).cast("string"),
            F.lit(f", which is negative or more than {COPIES_MAX}; read it with multiplicity=column"),
        )
        copies = F.when(
            (F.col(DIFF) < 0) | (F.col(DIFF) > COPIES_MAX), F.raise_error(message).cast("array<int>")
        ).otherwise(F.array_repeat(F.lit(1), F.col(DIFF).cast("int")))
        columns = self._columns()
        return frame.select(*columns, F.explode(copies).alias("__copy")).select(*map(quoted, self._shown.names))

    def _columns(self) -> list[Column]:
        """The columns, with floats wrapped so that Spark does not push filters on them down to the files.

        A pushed filter would use statistics without NaN, which Spark orders above all numbers, and dictionaries in
        which -0.0 and 0.0 differ, which Spark treats as equal: rows would be missing.
        """
        columns = []
        for field in self._shown.fields:
            column = F.col(quoted(field.name))
            if isinstance(field.dataType, (FloatType, DoubleType)):
                column = F.nanvl(column, column).alias(field.name)
            columns.append(column)
        return columns


def _alike(parts: Iterable[Part]) -> list[list[Part]]:
    """Parquet parts, grouped by their filters on times."""
    groups: dict[tuple[bool, int | None], list[Part]] = {}
    for part in parts:
        groups.setdefault((part.time is None, part.clip), []).append(part)
    return list(groups.values())
