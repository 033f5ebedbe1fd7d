"""`ShardTable`: a shard as a table of a Spark session. Reads and writes return the times that they used."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from persist.client.arguments import check_int
from persist.client.arguments import names as tuple_of
from persist.client.commit_info import HistoryEntry, Info, info_bytes
from persist.client.contents_diff import NamedTime
from persist.client.history_api import ShardTag
from persist.client.optimistic_loop import RETRIES_MAX
from persist.client.shard import Optimized, Shard, Vacuumed
from persist.client.snapshot import ReadLease, ReadSettings, Tagged, hold_time
from persist.client.timestamps import BEFORE_ALL
from persist.core import errors
from persist.core.errors import InvalidUsage, PersistError, UpperMismatch, shown
from persist.core.named_holds import check_tag_name
from persist.parts import DIFF, ShardSchema, current_schema
from persist.parts.filter_eval import Filter
from persist.spark import batch_io, executors
from persist.spark.merge_builder import (
    RETRIES,
    Condition,
    TableMerge,
    Values,
    as_condition,
    begin_merge,
    delete_changes,
    update_changes,
)
from persist.spark.options import OF_READS, OF_WRITES, TABLE, WAIT_S, Options, Target
from persist.spark.parquet_scan import AUTO, NEVER, NativeRead, checked_choice
from persist.spark.spark_schemas import MULTIPLICITY, quoted, spark_schema
from persist.spark.store_assignment import REFUSES
from persist.spark.write_job import FORMAT, Written, is_committed, progress_of, save, transaction_properties

HOLD_S = ReadSettings().lease_ms / 1000
HOLD_S_MAX = 86_400.0
ENTRIES_PER_PAGE = 50
ENTRIES_SEARCHED_MAX = 1_000  # of the commit history, to find a write
_ERROR = re.compile(r"persist\.core\.errors\.(\w+): (.+)")
_STORE_ASSIGNMENT = re.compile(re.escape(REFUSES) + r"(.+?)(?: SQLSTATE:|\n|$)")
_UPPERS = re.compile(r"has upper (\[\d*\]), not the expected (\[\d*\])")


class FixedRead(NamedTuple):
    """A DataFrame and the time as of which it reads the shard; -1: nothing had been written."""

    df: DataFrame
    as_of: int


class ShardTable:
    """A shard as a table; `for_name` opens it. It holds only settings.

    Errors of persist that Spark wraps are raised unwrapped; Spark's own errors are raised unchanged.
    """

    def __init__(self, spark: SparkSession, name: str, options: Mapping[str, str]) -> None:
        self.name = name
        self._spark = spark
        self._options = dict(options)
        given = Options({**options, "path": name})
        given.check(TABLE)
        self._named = Target.of(given)
        executors.check_location_exists(self._named)

    @classmethod
    def for_name(cls, spark: SparkSession, name: str, **options: object) -> ShardTable:
        """The table of an existing shard.

        Args:
            spark: the session in which its jobs run.
            name: of the shard.
            options: the options of `format("persist")` for the location (`url`, `token`, ...), and `leaseSeconds`,
                `memoryBytes`, `numPartitions`, `batchRows`, `partBytes`.
        Raises: UnknownShard, InvalidUsage (an option does not apply here).
        """
        table = cls(spark, name, {key: str(value) for key, value in options.items() if value is not None})
        executors.view_of(table._near)
        return table

    def __repr__(self) -> str:
        return f"ShardTable({self.name!r}, {executors.place(self._named.connection)})"

    # --- reading

    def read(
        self,
        as_of: int | datetime | None = None,
        *,
        tag: str | None = None,
        where: Condition = None,
        columns: Sequence[str] | None = None,
        native: str = AUTO,
    ) -> FixedRead:
        """The contents as of a time that is resolved now, and that time, which a write takes as `read_time`.

        Args:
            as_of: the time; None: the latest complete time; -1: before the first write. A datetime with a time zone is
                a wall clock.
            tag: the name of a tag, instead of a time.
            where: selects rows, as SQL or a Column. SQL that the option `where` supports is pushed down.
            columns: the columns to read; None: all.
            native: "auto": Spark's own Parquet reader if it returns exactly these rows, else `format("persist")`;
                "always": Spark's own reader, or an error; "never": `format("persist")`.
        Returns: the DataFrame and its time. A shard to which nothing was written is empty, as of -1.
        Raises: InvalidUsage (no such column or time), NotReadable (the time is no longer readable), Unavailable.
        """
        return self._read_fixed(as_of, tag=tag, where=where, columns=columns, native=checked_choice(native))[0]

    def df(
        self,
        as_of: int | datetime | None = None,
        *,
        tag: str | None = None,
        where: Condition = None,
        columns: Sequence[str] | None = None,
        native: str = AUTO,
    ) -> DataFrame:
        """The DataFrame of `read`, as of a time that is resolved now. Arguments and errors are those of `read`."""
        return self.read(as_of, tag=tag, where=where, columns=columns, native=native).df

    def count(self, as_of: int | datetime | None = None, *, where: Condition = None) -> int:
        """The number of rows, with their multiplicities. `as_of`, `where` and errors are those of `read`."""
        with unwrapped():
            return int(self.df(as_of, where=where, columns=self._schema().key[:1]).count())

    def head(self, n: int = 10, as_of: int | datetime | None = None) -> list[Row]:
        """Any `n` rows as of a time. `as_of` and errors are those of `read`."""
        with unwrapped():
            return list(self.df(as_of).limit(n).collect())

    def changes(self, start: int | datetime, end: int | datetime | None = None) -> DataFrame:
        """The rows that were added and removed between two times: the columns and `__diff`.

        Args:
            start: the earlier time, or a wall clock with its time zone; -1: before the first write.
            end: the later time, likewise; None: the latest complete time now.
        Raises: InvalidUsage (no such time), NotReadable (a time is no longer readable), Unavailable.
        """
        first, last = self._time("start", start), self._time("end", end)
        if last is None:
            last = self.read().as_of
        return self._load(readDiff="true", start=str(first), end=str(last))

    # --- metadata

    def history(self, limit: int = 1_000, *, maintenance: bool = False) -> DataFrame:
        """The commit history, newest first: at most `limit` entries. `maintenance` includes compactions.

        Raises: InvalidUsage (no such limit).
        """
        return self._load(metadata="history", historyLimit=str(limit), maintenance=str(maintenance).lower())

    def detail(self) -> DataFrame:
        """One row: frontiers, key, columns, size, settings and tags of the shard."""
        return self._load(metadata="detail")

    def parts(self) -> DataFrame:
        """A row for each part, in a file or inline."""
        return self._load(metadata="parts")

    def schemas(self) -> DataFrame:
        """A row for each column of each schema that the shard has had."""
        return self._load(metadata="schemas")

    def readers(self) -> DataFrame:
        """A row for each leased reader. Its jobs raise InvalidUsage if the location is a server."""
        return self._load(metadata="readers")

    def cursors(self) -> DataFrame:
        """A row for each critical reader. Its jobs raise InvalidUsage if the location is a server."""
        return self._load(metadata="cursors")

    def written(self, write_id: str) -> Written | None:
        """The result of the write with this option `writeId`; None if the last 1,000 history entries lack it."""
        entry = self._find_entry(lambda spark: spark.get("write") == write_id)
        return None if entry is None else Written.of(entry)

    # --- restore

    def restore(self, as_of: int | datetime) -> None:
        """Restore the contents as of `as_of`, a time or a wall clock with its time zone, by a Spark job.

        Raises: what `persist.spark.restore` raises; UpperMismatch if others write meanwhile.
        """
        with unwrapped():
            batch_io.restore(self._spark, self.name, as_of, **self._options_without(("batchrows",)))

    def tag(self, name: str, at: int | datetime | None = None, *, keep: timedelta | str | None = None) -> ShardTag:
        """Keep a time readable. Arguments and errors are those of `Shard.tag`."""
        return self._shard().tag(name, at, keep=keep)

    # --- maintenance

    def optimize(self) -> Optimized:
        """Compact now, on the driver, or on the server if the location is one. See `Shard.optimize`."""
        return self._shard().optimize()

    def vacuum(self) -> Vacuumed:
        """Delete unreferenced files now. See `Shard.vacuum`."""
        return self._shard().vacuum()

    # --- writing

    def append(
        self,
        df: DataFrame,
        *,
        read_time: int | None = None,
        txn: tuple[str, int] | None = None,
        info: Info | None = None,
    ) -> Written:
        """Add the rows of a DataFrame.

        Args:
            df: has the columns of the shard.
            read_time: the time as of which the job has read; the write fails if anything was committed after it. None:
                no such condition.
            txn: an application id and an increasing version: a write that was committed before is skipped.
            info: as for `Shard.insert`.
        Returns: the result, with the time of the rows.
        Raises: UpperMismatch (another writer committed after `read_time`; nothing was written), InvalidUsage, and what
            writes may: after Indeterminate, retry with the same `txn`.
        """
        return self._write(df, "append", {}, read_time, txn, info)

    def upsert(
        self,
        df: DataFrame,
        *,
        read_time: int | None = None,
        delete_column: str | None = None,
        txn: tuple[str, int] | None = None,
        info: Info | None = None,
    ) -> Written:
        """Replace the rows of the keys of a DataFrame by its rows, one per key. Other arguments are those of `append`.

        Args:
            read_time: as for `append`. None: rows that others wrote while the job ran are replaced, too.
            delete_column: the name of a boolean column: true deletes the key.
        Returns: the result, with the time of the rows.
        Raises: what `append` raises; InvalidUsage also if a key occurs twice.
        """
        options = {"envelope": "upsert"} | ({} if delete_column is None else {"deleteColumn": delete_column})
        return self._write(df, "append", options, read_time, txn, info)

    def overwrite(
        self,
        df: DataFrame,
        *,
        read_time: int | None = None,
        txn: tuple[str, int] | None = None,
        info: Info | None = None,
    ) -> Written:
        """Replace all rows. Arguments, result and errors are those of `append`."""
        return self._write(df, "overwrite", {}, read_time, txn, info)

    def delete(self, where: str | Column, *, retries: int = RETRIES, info: Info | None = None) -> Written:
        """Delete the rows for which a condition is true.

        Args:
            where: SQL or a Column.
            retries: how often to retry after another writer has committed in the meantime.
            info: as for `Shard.insert`.
        Returns: the result; its `time` is None if nothing changed, because nothing was committed then.
        Raises: UpperMismatch (others wrote before each attempt; nothing was changed), InvalidUsage, what writes may.
        """
        if where is None:
            raise InvalidUsage("where is None; give a condition. To delete all rows, overwrite with an empty DataFrame")
        return self._rewritten("delete", delete_changes, where=where, retries=retries, info=info)

    def update(
        self,
        where: Condition,
        set: Values,  # noqa: A002
        *,
        retries: int = RETRIES,
        info: Info | None = None,
    ) -> Written:
        """Update columns of the rows for which a condition is true. Other arguments and the result: as for `delete`.

        Args:
            where: SQL or a Column; None: all rows.
            set: the new values by column, except key columns: SQL, a Column, or a literal. Each value must fit its
                column without loss.
        Raises: what `delete` raises; InvalidUsage also if a value does not fit its column.
        """
        return self._rewritten("update", update_changes(self._schema(), set), where=where, retries=retries, info=info)

    def merge(self, source: DataFrame, on: str | Sequence[str] | None = None) -> TableMerge:
        """Build a merge of a DataFrame into the shard: add clauses, then call `execute`.

        Args:
            source: the rows to merge.
            on: the columns by which rows match; None: the key of the shard. Null equals null, NaN equals NaN, and -0.0
                does not equal 0.0. Their values in the source must fit the types of the shard without loss.
        Raises: InvalidUsage (the source or the shard lacks such a column).
        """
        if not isinstance(source, DataFrame):
            raise InvalidUsage(f"source is {shown(source)}; it must be a DataFrame")
        names = None if on is None else tuple_of("on", [on] if isinstance(on, str) else on)
        return begin_merge(partial(self._rewritten, "merge_into"), self.name, source, names, self._schema())

    def rewritten(
        self,
        changes: Callable[[DataFrame], DataFrame],
        *,
        where: Condition = None,
        retries: int = RETRIES,
        info: Info | None = None,
    ) -> Written:
        """Commit the changes that a function computes from the rows, at the time after the one that was read.

        If another writer has committed meanwhile, the function runs again on the new contents. Other arguments and the
        result are as for `delete`. Changes that cancel out are not committed.

        Args:
            changes: takes a DataFrame of the columns and `__diff`, and returns one of insertions (`__diff` above 0) and
                deletions.
            where: the rows that it takes, as for `read`.
        Raises: what `delete` raises.
        """
        return self._rewritten("update", changes, where=where, retries=retries, info=info)

    def _rewritten(
        self,
        operation: str,
        changes: Callable[[DataFrame], DataFrame],
        *,
        where: Condition = None,
        retries: int,
        info: Info | None,
    ) -> Written:
        """As `rewritten`; `operation` is its name in the commit history."""
        check_int("retries", retries, 0, RETRIES_MAX)
        for left in range(retries, -1, -1):
            fixed, lease = self._read_fixed(None, where=where, rewrites=True)
            try:
                options = {"diffColumn": DIFF, "rewrites": operation}
                return self._write(changes(fixed.df), "append", options, fixed.as_of, None, info)
            except UpperMismatch as error:
                if not left:
                    raise UpperMismatch(
                        f"others wrote to shard {self.name!r} during each of {retries + 1} attempts, so nothing was "
                        "changed; run it again, or increase retries",
                        **error.details,
                    ) from error
            finally:
                if lease is not None:
                    lease.close()
        raise AssertionError("the last attempt returns or raises")

    # --- internal

    @property
    def _near(self) -> Target:
        return self._named.at(writes=False)

    def _shard(self) -> Shard:
        """The shard at its home, as a `Shard` of the Python client."""
        home = self._named.at(writes=True)
        return executors.open_shard(home, executors.view_of(home))

    def _schema(self) -> ShardSchema:
        return current_schema(executors.view_of(self._near).schemas)[1]

    def _options_without(self, names: tuple[str, ...]) -> dict[str, str]:
        return {name: value for name, value in self._options.items() if name.lower() not in names}

    def _load(self, **options: str) -> DataFrame:
        left_out = (*OF_WRITES, *OF_READS) if "metadata" in options else OF_WRITES
        given = {**self._options_without((*left_out, *options)), **options}
        with unwrapped():
            return self._spark.read.format(FORMAT).options(**given).load(self.name)

    def _time(self, what: str, point: int | datetime | None) -> int | None:
        target = self._near
        limits = (WAIT_S, target.connection.handles.read.retry_s)
        return NamedTime.of(what, point, executors.one_shard(target), self.name, limits, BEFORE_ALL).time

    def _read_fixed(  # noqa: PLR0913 - keyword arguments
        self,
        as_of: int | datetime | None,
        *,
        tag: str | None = None,
        where: Condition = None,
        columns: Sequence[str] | None = None,
        native: str = NEVER,
        rewrites: bool = False,
        root: str | None = None,
        lease_ms: int | None = None,
    ) -> tuple[FixedRead, ReadLease | None]:
        """The read, and the lease that holds its time until Spark has planned it; the lease expires on its own.

        With `rewrites`, the rows have `__diff` and are read at the shard's home, because a copy may lag behind.
        """
        if tag is not None and as_of is not None:
            raise InvalidUsage("as_of and tag are both given; give one of them")
        target = self._named.at(writes=True) if rewrites else self._near
        view, settings = executors.view_of(target), target.connection.handles.read
        settings = settings if lease_ms is None else replace(settings, lease_ms=lease_ms)
        schema = current_schema(view.schemas)[1]
        chosen = schema.columns(None if columns is None else tuple_of("columns", columns))
        if as_of is None and tag is None and view.upper.element == 0:
            fields = [schema.arrow.field(name) for name in chosen]
            empty = self._spark.createDataFrame([], spark_schema([*fields, MULTIPLICITY] if rewrites else fields))
            return FixedRead(empty, BEFORE_ALL), None
        at = self._time("as_of", as_of) if tag is None else Tagged(check_tag_name(tag))
        transport = executors.one_shard(target, view.shard_id)
        with hold_time(transport, self.name, at, "spark table", WAIT_S, settings) as held:
            given = Options({**self._options, "path": self.name})
            frame = NativeRead(self._spark, transport, held, given).frame(native, root)
            if frame is not None:
                frame = frame if where is None else frame.where(as_condition(where))
                return FixedRead(frame.select(*(F.col(quoted(name)) for name in chosen)), held.as_of), None
            options = {"asOf": str(held.as_of)}
            if rewrites:
                options["multiplicity"] = "column"
                if target.connection.url is not None:
                    options["url"] = target.connection.url
            pushed = isinstance(where, str) and _is_pushable(where, schema)
            if pushed:
                options["where"] = str(where)
            if where is None or pushed:
                return FixedRead(self._load(**options, columns=json.dumps(chosen)), held.as_of), held.lease
            names = [*chosen, DIFF] if rewrites else chosen
            frame = self._load(**options).where(as_condition(where)).select(*(F.col(quoted(name)) for name in names))
            return FixedRead(frame, held.as_of), held.lease

    def _write(
        self,
        df: DataFrame,
        mode: str,
        options: dict[str, str],
        read_time: int | None,
        txn: tuple[str, int] | None,
        info: Info | None,
    ) -> Written:
        if not isinstance(df, DataFrame):
            raise InvalidUsage(f"df is {shown(df)}; it must be a DataFrame")
        write_id = uuid.uuid4().hex
        options = {**self._options_without(OF_READS), **options, "writeId": write_id}
        if info is not None:
            options["info"] = info_bytes("info", info).decode()
        if read_time is not None:
            options["readTime"] = str(read_time)
        if txn is not None:
            app_id, version = txn if isinstance(txn, tuple) and len(txn) == 2 else (None, None)
            if not isinstance(app_id, str) or type(version) is not int:
                raise InvalidUsage(f"txn is {shown(txn)}; it must be an application id and a version: ('nightly', 17)")
            options |= {"txnAppId": app_id, "txnVersion": str(version)}
            home = self._named.at(writes=True)
            if is_committed(home, executors.view_of(home).shard_id, progress_of(txn)):
                return self._skipped(app_id, version)
        with unwrapped():
            save(self._spark, df, mode, self.name, options)
        written = self.written(write_id)
        if written is None and txn is not None:  # another run of the transaction has landed meanwhile
            return self._skipped(*txn)
        return written or Written(None)

    def _skipped(self, app_id: str, version: int) -> Written:
        properties = transaction_properties((app_id, version))
        return Written.of(self._find_entry(lambda spark: properties.items() <= spark.items()), skipped=True)

    def _find_entry(self, is_wanted: Callable[[Mapping[str, Any]], bool]) -> HistoryEntry | None:
        """The newest entry of the commit history with the wanted Spark properties."""
        shard, last = self._shard(), None
        for _ in range(ENTRIES_SEARCHED_MAX // ENTRIES_PER_PAGE):
            page = shard.history(ENTRIES_PER_PAGE, before=last)
            for entry in page:
                spark = (entry.info or {}).get("spark")
                if isinstance(spark, dict) and is_wanted(spark):
                    return entry
            if len(page) < ENTRIES_PER_PAGE:
                return None
            last = page[-1]
        return None


def table(  # noqa: PLR0913 - keyword arguments
    spark: SparkSession,
    shard: str,
    *,
    as_of: int | None = None,
    tag: str | None = None,
    native: str = AUTO,
    hold_s: float = HOLD_S,
    root: str | None = None,
    **options: str,
) -> DataFrame:
    """The contents of a shard as of a time (None: the latest complete one) or a tag, with their multiplicities.

    Args:
        spark: the session.
        shard: its name.
        as_of: the time, which is resolved now.
        tag: the name of a tag, instead of a time.
        native: "auto": Spark's own Parquet reader if it returns exactly these rows, else `format("persist")`;
            "always": Spark's own reader, or an error; "never": `format("persist")`.
        hold_s: the duration of the lease on the files, in seconds, in (0, 86400]. It is renewed while a DataFrame reads
            them, and expires after the last DataFrame is collected or this process ends. Spark then fails on a missing
            file; it never omits rows.
        root: the URL of the blob store for executors, if it differs from the one that this process uses.
        options: the options of `format("persist")` for the location (`url="persist:///dir"`), and those of a
            `ShardTable`.
    Raises: InvalidUsage (with "always": the store has no path, or Spark reads or groups a column differently),
        NotReadable, Unavailable, UnknownShard.
    """
    if not 0 < hold_s <= HOLD_S_MAX:
        raise InvalidUsage(f"hold_s is {shown(hold_s)}; it must be in (0, {HOLD_S_MAX:g}]")
    read = ShardTable(spark, shard, options)
    return read._read_fixed(as_of, tag=tag, native=checked_choice(native), root=root, lease_ms=int(hold_s * 1000))[0].df


def _is_pushable(where: str, schema: ShardSchema) -> bool:
    """Whether the option `where` supports the predicate."""
    try:
        Filter.of(where, schema)
    except InvalidUsage:
        return False
    return True


@contextmanager
def unwrapped() -> Iterator[None]:
    """Raise the error of persist that a Spark error wraps, with the Spark error as its cause."""
    try:
        yield
    except PersistError:
        raise
    except Exception as error:
        cause = unwrapped_error(str(error))
        if cause is None:
            raise
        raise cause from error


def unwrapped_error(text: str) -> PersistError | None:
    """The last error of persist in a traceback; None if there is none."""
    kinds = _ERROR.findall(text)
    if not kinds:
        refused = _STORE_ASSIGNMENT.search(text)
        return None if refused is None else InvalidUsage(refused.group(1))
    name, message = kinds[-1]
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PersistError)):
        return None
    uppers = _UPPERS.search(message)
    if issubclass(kind, UpperMismatch) and uppers is not None:
        actual, expected = (json.loads(upper) for upper in uppers.groups())
        return kind(message, expected=expected, actual=actual)
    return kind(message)
