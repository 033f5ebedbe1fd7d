"""`ShardTable`: a shard as a table of a Spark session, with reads that tell their time and writes that tell theirs."""

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

from persist.client.arguments import names as tuple_of
from persist.client.commit_info import HistoryEntry, Info, info_bytes
from persist.client.contents_diff import NamedTime
from persist.client.history_api import ShardTag
from persist.client.maintaining import Optimized, Vacuumed
from persist.client.optimistic_loop import RETRIES_MAX
from persist.client.shard import Shard
from persist.client.snapshot import ReadLease, ReadSettings, Tagged, hold_time
from persist.client.timestamps import BEFORE_ALL
from persist.core import errors
from persist.core.errors import InvalidUsage, PersistError, UpperMismatch, shown
from persist.core.named_holds import check_tag_name
from persist.parts import DIFF, ShardSchema, current_schema
from persist.parts.filter_eval import Filter
from persist.spark import batch_io, executors
from persist.spark.merge_builder import RETRIES, Condition, TableMerge, Values, as_condition, begun, deleted, updated
from persist.spark.options import TABLE, WAIT_S, Options, Target
from persist.spark.parquet_scan import AUTO, NEVER, NativeRead, checked_choice
from persist.spark.spark_schemas import MULTIPLICITY, quoted, spark_schema
from persist.spark.store_assignment import REFUSES
from persist.spark.write_job import FORMAT, Written, is_committed, progress_of, save, transaction_properties

HOLD_S = ReadSettings().lease_ms / 1000
HOLD_S_MAX = 86_400.0
ENTRIES_AT_ONCE = 50
ENTRIES_LOOKED_MAX = 1_000  # of the commit history, in which a write is looked for
_KIND = re.compile(r"persist\.core\.errors\.(\w+): (.+)")
_REFUSED = re.compile(re.escape(REFUSES) + r"(.+?)(?: SQLSTATE:|\n|$)")
_UPPERS = re.compile(r"has upper (\[\d*\]), not the expected (\[\d*\])")
_WRITES = ("partbytes",)
_READS = ("leaseseconds", "memorybytes", "numpartitions", "batchrows")


class FixedRead(NamedTuple):
    """A DataFrame, and the time as of which it shows the shard; -1: nothing had been written."""

    df: DataFrame
    as_of: int


class ShardTable:
    """A shard as a table; `for_name` gives one. It holds nothing but settings.

    Spark's own errors stay as they are; those of persist within them are raised as what they are.
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
        """The table of a shard that is there.

        Args:
            spark: the session in which its jobs run.
            name: of the shard.
            options: those of `format("persist")` that say where shards are (`url`, `token`, ...), and `leaseSeconds`,
                `memoryBytes`, `numPartitions`, `batchRows`, `partBytes`.
        Raises: UnknownShard, InvalidUsage (an option means nothing here).
        """
        found = cls(spark, name, {key: str(value) for key, value in options.items() if value is not None})
        executors.view_of(found._near)
        return found

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
        """The contents as of a time that is fixed now, and that time: give it to a write as `read_time`.

        Args:
            as_of: the time; None is the latest complete one, as of -1 the shard is empty. A datetime with its zone is a
                wall clock.
            tag: the name of a tag, in the place of a time.
            where: the rows, as SQL or as an expression of columns. SQL that the option `where` knows is pushed down.
            columns: those to read; None is all.
            native: "auto" is Spark's own Parquet reader where that gives exactly these rows, else `format("persist")`;
                "always" is Spark's own or an error; "never" is `format("persist")`.
        Returns: the DataFrame and its time. A shard to which nothing was written is empty, as of -1.
        Raises: InvalidUsage (no such column or time), NotReadable (the time was forgotten), Unavailable.
        """
        return self._fixed(as_of, tag=tag, where=where, columns=columns, native=checked_choice(native))[0]

    def df(
        self,
        as_of: int | datetime | None = None,
        *,
        tag: str | None = None,
        where: Condition = None,
        columns: Sequence[str] | None = None,
        native: str = AUTO,
    ) -> DataFrame:
        """The DataFrame of `read`, whose time is fixed now. What it takes is as `read` says, and what it Raises."""
        return self.read(as_of, tag=tag, where=where, columns=columns, native=native).df

    def count(self, as_of: int | datetime | None = None, *, where: Condition = None) -> int:
        """How many rows there are, each as often as it occurs. `as_of` and `where`, and what it Raises, as `read`."""
        with unwrapped():
            return int(self.df(as_of, where=where, columns=self._schema().key[:1]).count())

    def head(self, n: int = 10, as_of: int | datetime | None = None) -> list[Row]:
        """Some `n` rows as of a time, `as_of` as `read` says. Raises what `read` raises."""
        with unwrapped():
            return list(self.df(as_of).limit(n).collect())

    def changes(self, start: int | datetime, end: int | datetime | None = None) -> DataFrame:
        """What was added and removed between two times: the columns and `__diff`.

        Args:
            start: the time that is compared with, or a wall clock with its zone; -1 is before the first write.
            end: the same; None is the latest complete time, as of now.
        Raises: InvalidUsage (no such time), NotReadable (it was forgotten), Unavailable.
        """
        first, last = self._time("start", start), self._time("end", end)
        if last is None:
            last = self.read().as_of
        return self._load(readDiff="true", start=str(first), end=str(last))

    # --- what is known of it

    def history(self, limit: int = 1_000, *, maintenance: bool = False) -> DataFrame:
        """What was done to the shard, newest first: at most `limit` entries, also merges with `maintenance`.

        Raises: InvalidUsage (no such limit).
        """
        return self._load(metadata="history", historyLimit=str(limit), maintenance=str(maintenance).lower())

    def detail(self) -> DataFrame:
        """One row of the shard: frontiers, key, columns, how much is stored, settings, tags."""
        return self._load(metadata="detail")

    def parts(self) -> DataFrame:
        """A row for each file, or piece of inline rows."""
        return self._load(metadata="parts")

    def schemas(self) -> DataFrame:
        """A row for each column of each schema that the shard has had."""
        return self._load(metadata="schemas")

    def readers(self) -> DataFrame:
        """A row for each hold that lapses. Its jobs raise InvalidUsage where a server is asked."""
        return self._load(metadata="readers")

    def cursors(self) -> DataFrame:
        """A row for each hold that stays. Its jobs raise InvalidUsage where a server is asked."""
        return self._load(metadata="cursors")

    def written(self, write_id: str) -> Written | None:
        """What became of the write with this option `writeId`: None where the last 1,000 entries have none.

        Args:
            write_id: what the write gave.
        Raises: what every call may.
        """
        entry = self._entry(lambda spark: spark.get("write") == write_id)
        return None if entry is None else Written.of(entry)

    # --- what it was

    def restore(self, as_of: int | datetime) -> None:
        """Make the contents again what they were at `as_of`, a time or a wall clock with its zone, as a Spark job.

        Raises: what `persist.spark.restore` raises; UpperMismatch where others write meanwhile.
        """
        with unwrapped():
            batch_io.restore(self._spark, self.name, as_of, **self._without(("batchrows",)))

    def tag(self, name: str, at: int | datetime | None = None, *, keep: timedelta | str | None = None) -> ShardTag:
        """Keep a time readable. `name`, `at`, `keep` and what it Raises are as `Shard.tag` says."""
        return self._shard().tag(name, at, keep=keep)

    # --- maintenance

    def optimize(self) -> Optimized:
        """Merge now what is worth it, on the driver, or at the server where one is asked. As `Shard.optimize` says."""
        return self._shard().optimize()

    def vacuum(self) -> Vacuumed:
        """Delete now what nobody can read any more. As `Shard.vacuum` says."""
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
            read_time: only if nobody has written after this time, as of which the job has read. None: in any case.
            txn: who writes, and a number that grows: a write that was committed before is skipped.
            info: as `Shard.insert` says.
        Returns: where the rows are.
        Raises: UpperMismatch (somebody wrote after `read_time`; nothing was written), InvalidUsage, and what writes
            may: after Indeterminate run it again with the same `txn`.
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
        """Replace what the keys of a DataFrame have by its rows, one a key.

        Args:
            df: as `append` says.
            read_time: as `append` says. None: also what others wrote while the job ran is replaced.
            delete_column: the name of a boolean column: true removes the key.
            txn: as `append` says.
            info: as `append` says.
        Returns: where the rows are.
        Raises: what `append` raises; InvalidUsage also where a key comes twice.
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
        """Replace everything. `df`, `read_time`, `txn`, `info` and what it Raises are as `append` says.

        Returns: where the rows are.
        """
        return self._write(df, "overwrite", {}, read_time, txn, info)

    def delete(self, where: str | Column, *, retries: int = RETRIES, info: Info | None = None) -> Written:
        """Take away the rows for which a condition is true.

        Args:
            where: SQL, or an expression of columns.
            retries: how often to begin anew because somebody else has written meanwhile.
            info: as `Shard.insert` says.
        Returns: where it landed; its `time` is None where nothing changed, so that nothing was committed.
        Raises: UpperMismatch (others wrote before each try; nothing was changed), InvalidUsage, and what writes may.
        """
        if where is None:
            raise InvalidUsage("where is None; give a condition. To remove all rows: overwrite with none")
        return self._rewritten("delete", deleted, where=where, retries=retries, info=info)

    def update(
        self,
        where: Condition,
        set: Values,  # noqa: A002
        *,
        retries: int = RETRIES,
        info: Info | None = None,
    ) -> Written:
        """Change columns of the rows for which a condition is true.

        Args:
            where: SQL, or an expression of columns; None: of every row.
            set: the new values by column, not of key columns: SQL, an expression of columns, or another value. Each
                must fit its column value for value.
            retries: as `delete` says.
            info: as `delete` says.
        Returns: as `delete` says.
        Raises: what `delete` raises; InvalidUsage also where a value does not fit its column.
        """
        return self._rewritten("update", updated(self._schema(), set), where=where, retries=retries, info=info)

    def merge(self, source: DataFrame, on: str | Sequence[str] | None = None) -> TableMerge:
        """Begin a merge of a DataFrame into the shard: say what is to happen, then `execute` it.

        Args:
            source: the rows that are compared with those of the shard.
            on: the columns by which rows match; None: the key of the shard. Null equals null, NaN equals NaN, and -0.0
                is another value than 0.0. The source's must fit the types of the shard's, value for value.
        Raises: InvalidUsage (one of them lacks such a column).
        """
        if not isinstance(source, DataFrame):
            raise InvalidUsage(f"source is {shown(source)}; it must be a DataFrame")
        names = None if on is None else tuple_of("on", [on] if isinstance(on, str) else on)
        return begun(partial(self._rewritten, "merge_into"), self.name, source, names, self._schema())

    def rewritten(
        self,
        changes: Callable[[DataFrame], DataFrame],
        *,
        where: Condition = None,
        retries: int = RETRIES,
        info: Info | None = None,
    ) -> Written:
        """Write what `changes` makes of the rows, as if it had happened in one moment: by one commit, right after the

        time as of which they were read. Where somebody else has written meanwhile all of it begins anew.

        Args:
            changes: of a DataFrame with the columns and `__diff`, another one with them: what comes (`__diff` above 0)
                and what goes.
            where: which rows it is given, as `read` says.
            retries: as `delete` says.
            info: as `delete` says.
        Returns: as `delete` says. Rows that come and go as often change nothing.
        Raises: what `delete` raises.
        """
        return self._rewritten("update", changes, where=where, retries=retries, info=info)

    def _rewritten(
        self,
        verb: str,
        changes: Callable[[DataFrame], DataFrame],
        *,
        where: Condition = None,
        retries: int,
        info: Info | None,
    ) -> Written:
        """What `rewritten` says; `verb` is what the commit history calls it."""
        if type(retries) is not int or not 0 <= retries <= RETRIES_MAX:
            raise InvalidUsage(f"retries is {shown(retries)}; it must be in [0, {RETRIES_MAX}]")
        for left in range(retries, -1, -1):
            found, lease = self._fixed(None, where=where, rewrites=True)
            try:
                how = {"diffColumn": DIFF, "rewrites": verb}
                return self._write(changes(found.df), "append", how, found.as_of, None, info)
            except UpperMismatch as error:
                if not left:
                    raise UpperMismatch(
                        f"others wrote to shard {self.name!r} while each of {retries + 1} tries ran; nothing was "
                        "changed: run it again, or give more retries",
                        **error.details,
                    ) from error
            finally:
                if lease is not None:
                    lease.close()
        raise AssertionError("the last try returns or raises")

    # --- within

    @property
    def _near(self) -> Target:
        return self._named.at(writes=False)

    def _shard(self) -> Shard:
        """The shard as plain Python has it, where it is written."""
        home = self._named.at(writes=True)
        return executors.open_shard(home, executors.view_of(home))

    def _schema(self) -> ShardSchema:
        return current_schema(executors.view_of(self._near).schemas)[1]

    def _without(self, left_out: tuple[str, ...]) -> dict[str, str]:
        return {name: value for name, value in self._options.items() if name.lower() not in left_out}

    def _load(self, **options: str) -> DataFrame:
        left_out = (*_WRITES, *_READS) if "metadata" in options else _WRITES
        given = {**self._without((*left_out, *options)), **options}
        with unwrapped():
            return self._spark.read.format(FORMAT).options(**given).load(self.name)

    def _time(self, what: str, point: int | datetime | None) -> int | None:
        target = self._near
        one = executors.one_shard(target)
        limits = (WAIT_S, target.connection.handles.read.retry_s)
        return NamedTime.of(what, point, one, self.name, limits, BEFORE_ALL).time

    def _fixed(  # noqa: PLR0913 - what is read, and how, each by its name
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
        """With the lease that holds the time until Spark has planned the read; it lapses by itself.

        What `rewrites` reads rows with their multiplicities, and reads them at home: a copy may be behind.
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
        one = executors.one_shard(target, view.shard_id)
        with hold_time(one, self.name, at, "spark table", WAIT_S, settings) as held:
            given = Options({**self._options, "path": self.name})
            found = NativeRead(self._spark, one, held, given).frame(native, root)
            if found is not None:
                found = found if where is None else found.where(as_condition(where))
                return FixedRead(found.select(*(F.col(quoted(one)) for one in chosen)), held.as_of), None
            options = {"asOf": str(held.as_of)}
            if rewrites:
                options["multiplicity"] = "column"
                if target.connection.url is not None:
                    options["url"] = target.connection.url
            pushed = isinstance(where, str) and _is_known(where, schema)
            if pushed:
                options["where"] = str(where)
            if where is None or pushed:
                return FixedRead(self._load(**options, columns=json.dumps(chosen)), held.as_of), held.lease
            shown = [*chosen, DIFF] if rewrites else chosen
            found = self._load(**options).where(as_condition(where)).select(*(F.col(quoted(one)) for one in shown))
            return FixedRead(found, held.as_of), held.lease

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
        options = {**self._without(_READS), **options, "writeId": write_id}
        if info is not None:
            options["info"] = info_bytes("info", info).decode()
        if read_time is not None:
            options["readTime"] = str(read_time)
        if txn is not None:
            name, number = _checked_txn(txn)
            options |= {"txnAppId": name, "txnVersion": str(number)}
            home = self._named.at(writes=True)
            if is_committed(home, executors.view_of(home).shard_id, progress_of(txn)):
                return self._skipped(name, number)
        with unwrapped():
            save(self._spark, df, mode, self.name, options)
        done = self.written(write_id)
        if done is None and txn is not None:  # another run of it has landed meanwhile
            return self._skipped(*txn)
        return done or Written(None)

    def _skipped(self, name: str, number: int) -> Written:
        wanted = transaction_properties((name, number))
        return Written.of(self._entry(lambda spark: wanted.items() <= spark.items()), skipped=True)

    def _entry(self, is_wanted: Callable[[Mapping[str, Any]], bool]) -> HistoryEntry | None:
        """The newest entry of the commit history of which Spark has told this."""
        shard, last = self._shard(), None
        for _ in range(ENTRIES_LOOKED_MAX // ENTRIES_AT_ONCE):
            page = shard.history(ENTRIES_AT_ONCE, before=last)
            for entry in page:
                spark = (entry.info or {}).get("spark")
                if isinstance(spark, dict) and is_wanted(spark):
                    return entry
            if len(page) < ENTRIES_AT_ONCE:
                return None
            last = page[-1]
        return None


def table(  # noqa: PLR0913 - what is read, and how, each by its name
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
    """The contents of a shard as of a time (None: the latest complete one) or a tag, each row as often as it occurs.

    Args:
        spark: the session.
        shard: its name.
        as_of: the time, which is fixed now.
        tag: the name of a tag, in the place of a time.
        native: "auto" is Spark's own Parquet reader where that gives exactly these rows, else `format("persist")`;
            "always" is Spark's own or an error; "never" is `format("persist")`.
        hold_s: for how many seconds, in (0, 86400], a lease on the files is. It is renewed while a DataFrame reads
            them, and lapses when the last one is gone, or this process ends. Spark fails on a missing file; it never
            leaves rows out.
        root: the URL by which executors reach the blob store, where it is not the one that this process uses.
        options: those of `format("persist")` that say where shards are (`url="persist:///dir"`), and those of a
            `ShardTable`.
    Raises: InvalidUsage (with "always": the store has no path, or Spark reads or groups some column otherwise),
        NotReadable, Unavailable, UnknownShard.
    """
    if not 0 < hold_s <= HOLD_S_MAX:
        raise InvalidUsage(f"hold_s is {hold_s!r}; it must be in (0, {HOLD_S_MAX:g}]")
    read = ShardTable(spark, shard, options)
    return read._fixed(as_of, tag=tag, native=checked_choice(native), root=root, lease_ms=int(hold_s * 1000))[0].df


def _is_known(where: str, schema: ShardSchema) -> bool:
    """Whether the option `where` takes it."""
    try:
        Filter.of(where, schema)
    except InvalidUsage:
        return False
    return True


def _checked_txn(txn: object) -> tuple[str, int]:
    if isinstance(txn, tuple) and len(txn) == 2 and isinstance(txn[0], str) and type(txn[1]) is int:
        return txn
    raise InvalidUsage(f"txn is {shown(txn)}; it must be a name and a number, as ('nightly', 17)")


# Errors of persist that Spark has wrapped in its own, raised as what they are.


@contextmanager
def unwrapped() -> Iterator[None]:
    """Run something of Spark. Raises the error of persist that it ended with, with Spark's as its cause."""
    try:
        yield
    except PersistError:
        raise
    except Exception as error:
        found = unwrapped_error(str(error))
        if found is None:
            raise
        raise found from error


def unwrapped_error(text: str) -> PersistError | None:
    """The error of persist that a traceback ends with; None: there is none."""
    kinds = _KIND.findall(text)
    if not kinds:
        refused = _REFUSED.search(text)
        return None if refused is None else InvalidUsage(refused.group(1))
    name, message = kinds[-1]
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, PersistError)):
        return None
    uppers = _UPPERS.search(message)
    if issubclass(kind, UpperMismatch) and uppers is not None:
        actual, expected = (json.loads(one) for one in uppers.groups())
        return kind(message, expected=expected, actual=actual)
    return kind(message)
