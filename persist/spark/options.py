"""The options of `format("persist")`: names, where each is allowed, and their values as Python objects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from persist.client.client import Connection
from persist.client.commit_info import read_info
from persist.client.read_api import NOW, THEN
from persist.client.shard import HandleSettings
from persist.client.snapshot import ReadSettings, Tagged
from persist.client.timestamps import BEFORE_ALL, period_ms, read_instant, read_point
from persist.client.write import WriteSettings
from persist.core.errors import InvalidUsage
from persist.core.frontier import EMPTY, TIME_MAX, Antichain
from persist.core.ids import check_shard_name
from persist.core.named_holds import check_tag_name
from persist.formats.http_messages import named_once
from persist.parts import DIFF, TIME, Selection
from persist.parts.constraint_checks import ConstraintChange
from persist.parts.exact_numbers import EXACT_NUMBERS
from persist.parts.scan_spec import read_values

# Spark passes options as text with case-insensitive names. An unknown option, or one that does not apply to the use, is
# an error: a misspelt option must not silently read or write something else.

METADATA = ("history", "parts", "readers", "cursors", "schemas", "detail")
LOCATION = ("url", "blob", "consensus", "token", "caFile", "certificateFile", "timeoutSeconds", "path", "shard")
TUNING = ("numPartitions", "batchRows", "memoryBytes", "leaseSeconds")
READ = (*LOCATION, "columns", "where", "startKey", "endKey", "keyPrefix", *TUNING, "readChangeFeed")
BATCH_READ = (*READ, "readDiff", "waitSeconds")
STREAM_READ = (
    *READ, "startingVersion", "startingTimestamp", "startingOffsets", "cursor", "maxRowsPerTrigger",
    "maxBytesPerTrigger", "failOnDataLoss", "endingOffsets", "endingTimestamp", "minRowsPerTrigger", "maxTriggerDelay",
)  # fmt: skip
FEED_ONLY = ("timeUnit", "changeImages")
WRITE = (*LOCATION, "key", "diffColumn", "partBytes", "info")
CREATING_WRITE = (*WRITE, "timeColumn", "history", "mergeSchema", "unique", "checks")
UPSERTING_WRITE = (*CREATING_WRITE, "envelope", "deleteColumn")
OF_READS = ("numpartitions", "memorybytes", "leaseseconds", "batchrows")  # a write does not have them
OF_WRITES = ("partbytes", "info")  # a read does not have them
SNAPSHOT, FEED, DIFFERENCE = "a snapshot", "readChangeFeed", "readDiff"
STREAM, STREAM_FEED = "a streaming read", "a streaming read of changes"
BATCH_WRITE, STREAM_WRITE = "a batch write", "a streaming write"
APPEND, RESTORED = "a write with appendLower", "a write with restoreTo"
TABLE, RESTORE = "a table", "a restore"
ALLOWED: Mapping[str, tuple[str, ...]] = {
    SNAPSHOT: (*BATCH_READ, "asOf", "versionAsOf", "timestampAsOf", "tag", "multiplicity", "schemaAsOf"),
    FEED: (*BATCH_READ, *FEED_ONLY, "startingVersion", "endingVersion", "startingTimestamp", "endingTimestamp"),
    DIFFERENCE: (*LOCATION, "columns", *TUNING, "readDiff", "waitSeconds", "start", "end", "other"),
    "metadata=history": (*LOCATION, "metadata", "historyLimit", "maintenance"),
    **{f"metadata={kind}": (*LOCATION, "metadata") for kind in METADATA[1:]},
    STREAM: STREAM_READ,
    STREAM_FEED: (*STREAM_READ, *FEED_ONLY),
    BATCH_WRITE: (
        *UPSERTING_WRITE, "expectedUpper", "readTime", "newUpper", "txnAppId", "txnVersion", "writeId", "rewrites",
        "overwriteSchema",
    ),
    APPEND: (*CREATING_WRITE, "writeId", "appendLower", "appendUpper"),
    RESTORED: (*WRITE, "expectedUpper", "readTime", "writeId", "restoreTo"),
    STREAM_WRITE: (*UPSERTING_WRITE, "checkpointLocation", "queryName"),  # Spark passes the last two
    TABLE: (*LOCATION, *TUNING, "partBytes"),
    RESTORE: (*LOCATION, "info", "numPartitions", "memoryBytes", "partBytes", "leaseSeconds"),
}  # fmt: skip
_KNOWN = {name.lower(): name for names in ALLOWED.values() for name in names}
_UNSUPPORTED = {
    "location": "Spark drops the options of CREATE TABLE ... USING persist; use CREATE TEMPORARY VIEW instead",
    "paths": "a load reads one shard: give one name, and union the DataFrames of several shards",
}
_UNITS = {"": 1, "b": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


class Options:
    """Options by case-insensitive name. Every getter raises InvalidUsage, naming the option."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._values = {name.lower(): value for name, value in given.items()}
        for name in self._values:
            if name in _UNSUPPORTED:
                raise InvalidUsage(f"option {name!r} is not supported: {_UNSUPPORTED[name]}")
            if name not in _KNOWN:
                raise InvalidUsage(f"option {name!r} is unknown; known are {', '.join(sorted(_KNOWN.values()))}")

    def check(self, use: str, *others: str) -> None:
        """Raise InvalidUsage if an option applies to none of these uses, keys of `ALLOWED`. Errors name `use`."""
        allowed = {name.lower() for allowed_use in (use, *others) for name in ALLOWED[allowed_use]}
        for name in self._values:
            if name not in allowed:
                if use == APPEND and name in ("txnappid", "txnversion"):
                    raise InvalidUsage(f"option {_KNOWN[name]!r} is not needed with appendLower: leave it out")
                uses = ", ".join(known_use for known_use, names in ALLOWED.items() if _KNOWN[name] in names)
                raise InvalidUsage(f"option {_KNOWN[name]!r} does not apply to {use}; it applies to {uses}")

    @property
    def batch_read(self) -> str:
        """The kind of batch read, a key of `ALLOWED`."""
        if self.has("metadata"):
            return f"metadata={self.choice('metadata', METADATA)}"
        if self.flag("readDiff"):
            return DIFFERENCE
        return FEED if self.flag("readChangeFeed") else SNAPSHOT

    @property
    def streaming_read(self) -> str:
        return STREAM_FEED if self.flag("readChangeFeed") else STREAM

    @property
    def batch_write(self) -> str:
        if self.has("restoreTo"):
            return RESTORED
        return APPEND if self.has("appendLower") or self.has("appendUpper") else BATCH_WRITE

    def has(self, name: str) -> bool:
        return name.lower() in self._values

    def text(self, name: str) -> str | None:
        return self._values.get(name.lower())

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of the choices; by default the first."""
        value = self._values.get(name.lower(), choices[0]).lower()
        if value not in choices:
            raise InvalidUsage(f"option {name!r} is {value!r}; it must be one of {', '.join(choices)}")
        return value

    def integer(self, name: str, minimum: int, maximum: int) -> int | None:
        """A whole number in `[minimum, maximum]`, both inclusive; None if not given."""
        value = self._values.get(name.lower())
        if value is None:
            return None
        try:
            number = int(value)
        except ValueError:
            raise InvalidUsage(f"option {name!r} is {value!r}; it must be a whole number") from None
        if not minimum <= number <= maximum:
            raise InvalidUsage(f"option {name!r} is {number}; it must be in [{minimum}, {maximum}]")
        return number

    def size(self, name: str) -> int | None:
        """A number of bytes, such as 1000, 64k, 64m or 1g; None if not given."""
        value = self._values.get(name.lower())
        if value is None:
            return None
        digits = value.strip().lower().rstrip("bkmg")
        unit = value.strip().lower()[len(digits) :].removesuffix("b") if digits else "?"
        if not digits.isdecimal() or unit not in _UNITS or int(digits) == 0:
            raise InvalidUsage(f"option {name!r} is {value!r}; it must be a size such as 1000, 64k, 64m or 1g")
        return int(digits) * _UNITS[unit]

    def seconds(self, name: str, default: float) -> float:
        value = self._values.get(name.lower())
        if value is None:
            return default
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not 0 < number <= 86_400:
            raise InvalidUsage(f"option {name!r} is {value!r}; it must be a number of seconds in (0, 86400]")
        return number

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name.lower(), str(default)).lower()
        if value not in ("true", "false"):
            raise InvalidUsage(f"option {name!r} is {value!r}; it must be true or false")
        return value == "true"

    def names(self, name: str) -> tuple[str, ...] | None:
        """Column names, separated by commas or as a JSON list; None if not given."""
        value = self._values.get(name.lower())
        if value is None:
            return None
        if value.lstrip().startswith("["):
            names = self._json(name, value, list)
        else:
            names = [part.strip() for part in value.split(",")]
        if not names or not all(isinstance(part, str) and part for part in names):
            raise InvalidUsage(f"option {name!r} is {value!r}; it must be a list of column names")
        return tuple(names)

    def values(self, name: str) -> tuple[Any, ...] | None:
        """Values of the first key columns: a JSON list, or the text of the first value; None if not given."""
        value = self._values.get(name.lower())
        if value is None:
            return None
        return read_values(
            f"option {name!r}", value, lambda text: json.loads(text, object_pairs_hook=named_once, **EXACT_NUMBERS)
        )

    def mapping(self, name: str) -> dict[str, Any]:
        return dict(self._json(name, self._values[name.lower()], dict))

    def _json(self, name: str, value: str, kind: type) -> Any:
        try:
            parsed = json.loads(value, object_pairs_hook=named_once)
        except (ValueError, RecursionError) as error:
            raise InvalidUsage(f"option {name!r} is not valid JSON: {error}") from None
        if not isinstance(parsed, kind):
            raise InvalidUsage(f"option {name!r} must be a JSON {kind.__name__}, not {value!r}")
        return parsed


# The options as Python objects.

BATCH_ROWS = 16_384  # rows of an Arrow batch for Spark; smaller batches cost Python time, larger ones gain nothing
BATCH_ROWS_MAX = 1_000_000
PARTITIONS_MAX = 100_000
HISTORY_ROWS = 1_000  # of the commit history, by default
HISTORY_ROWS_MAX = 10_000_000
WAIT_S = 60.0
WRITE_ID_CHARS_MAX = 64
_NO_SHARD = (
    "no shard is named: give it as load('name') or option 'shard'. In SQL, Spark drops the options of CREATE TABLE ... "
    "USING persist; use CREATE TEMPORARY VIEW v USING persist OPTIONS (...), or SELECT ... FROM t WITH (...)"
)
_NO_LOCATION = (
    "no location is given: set option 'url' (persist:///directory or http://host), or both 'blob' and 'consensus'. "
    "In SQL, Spark drops the options of CREATE TABLE ... USING persist; use CREATE TEMPORARY VIEW ... OPTIONS (...)"
)


@dataclass(frozen=True)
class Target:
    """A shard and how to connect to it: plain settings, which Spark pickles to executors."""

    connection: Connection
    shard: str

    @classmethod
    def of(cls, options: Options) -> Target:
        path, shard = options.text("path"), options.text("shard")
        if path and shard and path != shard:
            raise InvalidUsage(f"two shards are named, {path!r} and {shard!r}; name one")
        url, blob, consensus = (options.text(name) for name in ("url", "blob", "consensus"))
        if not url and not (blob and consensus):
            raise InvalidUsage(_NO_LOCATION)
        if not path and not shard:
            raise InvalidUsage(_NO_SHARD)
        lease_ms = int(options.seconds("leaseSeconds", ReadSettings().lease_ms / 1000) * 1000)
        read = ReadSettings(lease_ms=lease_ms, memory_bytes=options.size("memoryBytes") or ReadSettings().memory_bytes)
        write = WriteSettings(part_bytes_target=options.size("partBytes") or WriteSettings().part_bytes_target)
        connection = Connection(
            url,
            blob,
            consensus,
            token=options.text("token"),
            ca_file=options.text("caFile"),
            certificate_file=options.text("certificateFile"),
            timeout_s=options.seconds("timeoutSeconds", 60.0),
            handles=HandleSettings(write=write, read=read),
        )
        return cls(connection, check_shard_name(shard or path))

    def at(self, *, writes: bool) -> Target:
        """The same shard at the servers for its reads, or for its writes (`writes`). See `Connection.at`."""
        return replace(self, connection=self.connection.at(self.shard, writes=writes))


@dataclass(frozen=True)
class ReadOptions:
    """The options of every read. `partitions` None: by the size of the data.

    `selection` selects rows and key ranges, of all columns. `as_of` None: the latest time. `starting` and `ending` are
    the bounds of a change feed, both inclusive, or the two times that readDiff compares; `ending` None: the latest
    complete time. `other` is the shard whose contents at `ending` are compared; None: the shard that is read. Planning
    resolves wall clocks to times.
    """

    columns: tuple[str, ...] | None
    selection: Selection
    partitions: int | None
    batch_rows: int
    as_of: int | Tagged | datetime | None
    with_diff: bool
    wait_s: float
    changes: bool
    starting: int | datetime | None
    ending: int | datetime | None
    time_unit: str | None
    images: bool = False  # whether changes distinguish pre- and post-images of updates
    other: str | None = None

    @classmethod
    def of(cls, options: Options, *, streams: bool = False) -> ReadOptions:
        """With `streams`, `StreamOptions` has the start. Raises InvalidUsage."""
        check_exclusive(options, "asOf", "versionAsOf", "timestampAsOf", "tag")
        check_exclusive(options, "startingVersion", "startingTimestamp")
        check_exclusive(options, "endingVersion", "endingTimestamp")
        name = "versionAsOf" if options.has("versionAsOf") else "asOf"
        latest = (options.text(name) or "latest").lower() == "latest"
        tag = options.text("tag")
        tagged = instant_of(options, "timestampAsOf") if tag is None else Tagged(check_tag_name(tag))
        if not streams and (options.text("startingVersion") or "").strip().lower() == "latest":
            raise InvalidUsage(
                "startingVersion=latest is for streams: a batch read finds nothing after the latest time; give a time, "
                "for example one more than that of the last change that you have read"
            )
        starting, ending = _diff_bounds(options) if options.flag("readDiff") else _feed_bounds(options, streams)
        other = options.text("other")
        return cls(
            columns=options.names("columns"),
            selection=_selection(options),
            partitions=options.integer("numPartitions", 1, PARTITIONS_MAX),
            batch_rows=options.integer("batchRows", 1, BATCH_ROWS_MAX) or BATCH_ROWS,
            as_of=tagged if latest else options.integer(name, BEFORE_ALL, TIME_MAX),
            with_diff=options.choice("multiplicity", ("expand", "column")) == "column",
            wait_s=options.seconds("waitSeconds", WAIT_S),
            changes=options.flag("readChangeFeed"),
            starting=starting,
            ending=ending,
            time_unit=options.text("timeUnit") and options.choice("timeUnit", ("s", "ms", "us")),
            images=options.flag("changeImages"),
            other=None if other is None else check_shard_name(other),
        )


def _selection(options: Options) -> Selection:
    start, end, prefix = (options.values(name) for name in ("startKey", "endKey", "keyPrefix"))
    labels = ("option 'startKey'", "option 'endKey'", "option 'keyPrefix'", "")
    then = options.choice("schemaAsOf", (NOW, THEN)) == THEN
    return Selection(options.text("where"), start, end, prefix, called=labels, then=then, from_text=True)


def _diff_bounds(options: Options) -> tuple[int | datetime, int | datetime | None]:
    """The times or wall clocks of `start` and `end`."""
    start, end = options.text("start"), options.text("end")
    if start is None:
        raise InvalidUsage("readDiff needs option 'start', a time or a wall clock")
    return read_point("option 'start'", start), None if end is None else read_point("option 'end'", end)


def _feed_bounds(options: Options, streams: bool) -> tuple[int | datetime | None, int | datetime | None]:
    return None if streams else _feed_bound(options, "starting"), _feed_bound(options, "ending")


def _feed_bound(options: Options, which: str) -> int | datetime | None:
    """The time or the wall clock of `startingVersion` and `startingTimestamp`, or of their `ending` counterparts."""
    instant = instant_of(options, f"{which}Timestamp")
    return version_of(options, f"{which}Version") if instant is None else instant


REWRITES = {"false": None, "true": "update", "update": "update", "delete": "delete", "merge_into": "merge_into"}
"""The operation in the commit history, by the value of the option."""


@dataclass(frozen=True)
class WriteOptions:
    """The options of every write. The service chooses the time unless `conditional` or `append` is given.

    `conditional` is the expected upper and the new upper of the shard. `append` is the half-open interval of a
    replicated append, whose beginning the shard may have already. `evolves`: add the new columns and wider types of the
    DataFrame to the shard ("merge"), or replace the columns of the shard ("overwrite").
    """

    key: tuple[str, ...] | None
    time_column: str | None
    diff_column: str | None
    upsert: bool
    delete_column: str | None
    conditional: tuple[int, Antichain] | None
    append: tuple[int, Antichain] | None = None
    txn: tuple[str, int] | None = None
    history: str | None = None  # of a shard that the write creates
    constraints: ConstraintChange = field(default_factory=ConstraintChange)  # of a shard that the write creates
    info: bytes = b""  # the user's entry in the commit history
    write_id: str | None = None  # identifies this write in the commit history
    restores: int | None = None  # the time that the rows, which are changes, restore
    evolves: Literal["merge", "overwrite"] | None = None
    rewrites: str | None = None  # the operation whose changes the rows are; changes that cancel out are not committed

    @property
    def expected_upper(self) -> int | None:
        """The required upper of the shard; None: any."""
        return None if self.conditional is None else self.conditional[0]

    @property
    def moves_upper(self) -> bool:
        """Whether the write sets an upper other than the next time."""
        if self.conditional is None:
            return self.append is not None
        expected, upper = self.conditional
        return upper != Antichain(expected + 1)

    @property
    def first_time(self) -> int | None:
        """The time of rows without a time column; None: the service chooses it."""
        return self.expected_upper if self.append is None else self.append[0]

    @property
    def renames(self) -> dict[str | None, str]:
        """The names in a shard of the time and diff columns."""
        return {self.time_column: TIME, self.diff_column: DIFF}

    @property
    def unstored_columns(self) -> list[str]:
        """The columns of a DataFrame that are not columns of the shard."""
        return [name for name in (TIME, DIFF, self.time_column, self.diff_column, self.delete_column) if name]

    @classmethod
    def of(cls, options: Options) -> WriteOptions:
        time_column, diff_column = options.text("timeColumn"), options.text("diffColumn")
        expected, append = _expected_upper(options), _append_interval(options)
        upper = _new_upper(options, "newUpper")
        upsert = options.choice("envelope", ("none", "upsert")) == "upsert"
        if expected is None and upper is not None:
            raise InvalidUsage("option 'newUpper' needs 'expectedUpper'; without both the service chooses the time")
        if upsert and (upper is not None or time_column or diff_column):
            raise InvalidUsage(
                "envelope=upsert sets times and diffs itself; leave timeColumn, diffColumn and newUpper out"
            )
        if expected is not None and upper is None:
            if time_column is not None:
                raise InvalidUsage("option 'timeColumn' needs 'newUpper': times must be in [expectedUpper, newUpper)")
            upper = Antichain(expected + 1)
        if time_column is not None and expected is None and append is None:
            raise InvalidUsage(
                "option 'timeColumn' needs 'expectedUpper' and 'newUpper', or 'appendLower' and 'appendUpper', the "
                "bounds of its times"
            )
        if options.has("txnAppId") != options.has("txnVersion"):
            raise InvalidUsage("options 'txnAppId' and 'txnVersion' must be given together")
        restores = version_of(options, "restoreTo")
        if restores is not None and expected is None:
            raise InvalidUsage("option 'restoreTo' needs 'expectedUpper', the upper from which the rows were computed")
        rewrites = options.choice("rewrites", tuple(REWRITES))
        follows = expected is not None and upper == Antichain(expected + 1)
        if rewrites != "false" and (diff_column is None or upsert or not follows):
            raise InvalidUsage(
                "option 'rewrites' needs 'readTime' and 'diffColumn': the rows are changes to what was read"
            )
        version, write_id = options.integer("txnVersion", 0, 2**63 - 1), options.text("writeId")
        if write_id is not None and not 0 < len(write_id) <= WRITE_ID_CHARS_MAX:
            raise InvalidUsage(f"option 'writeId' has {len(write_id)} characters, not 1 to {WRITE_ID_CHARS_MAX}")
        checks = options.mapping("checks") if options.has("checks") else {}
        merges, overwrites = options.flag("mergeSchema"), options.flag("overwriteSchema")
        if merges and overwrites:
            raise InvalidUsage(
                "options 'overwriteSchema' and 'mergeSchema' are exclusive: one replaces the columns, one adds to them"
            )
        if options.has("deleteColumn") and not upsert:
            raise InvalidUsage("option 'deleteColumn' needs envelope=upsert")
        return cls(
            key=options.names("key"),
            time_column=time_column,
            diff_column=diff_column,
            upsert=upsert,
            delete_column=options.text("deleteColumn"),
            conditional=None if expected is None or upper is None else (expected, upper),
            append=append,
            txn=None if version is None else (options.text("txnAppId") or "", version),
            history=options.text("history"),
            constraints=ConstraintChange.of(options.flag("unique"), None, checks),
            info=read_info("option 'info'", options.text("info") or "{}") if options.has("info") else b"",
            restores=restores,
            rewrites=REWRITES[rewrites],
            evolves="merge" if merges else "overwrite" if overwrites else None,
            write_id=write_id,
        )


def check_exclusive(options: Options, *names: str) -> None:
    """Raise InvalidUsage if more than one of the options is given."""
    given = [name for name in names if options.has(name)]
    if len(given) > 1:
        raise InvalidUsage(f"options {given[0]!r} and {given[1]!r} are exclusive; give one")


def instant_of(options: Options, name: str) -> datetime | None:
    """The wall clock of an option; None if not given. Raises InvalidUsage."""
    text = options.text(name)
    return None if text is None else read_instant(f"option {name!r}", text)


def _expected_upper(options: Options) -> int | None:
    """The upper that a write requires: `expectedUpper`, or the time after `readTime`."""
    check_exclusive(options, "expectedUpper", "readTime")
    read_time = options.integer("readTime", BEFORE_ALL, TIME_MAX)
    if read_time is None:
        return version_of(options, "expectedUpper")
    if read_time >= TIME_MAX:
        raise InvalidUsage(f"option 'readTime' is {read_time}; no write can follow it")
    return read_time + 1


def _new_upper(options: Options, name: str) -> Antichain | None:
    """The upper of an option, a time or `closed`; None if not given. Raises InvalidUsage."""
    if (options.text(name) or "").lower() in ("closed", "[]"):
        return EMPTY
    time = version_of(options, name)
    return None if time is None else Antichain(time)


def _append_interval(options: Options) -> tuple[int, Antichain] | None:
    """The half-open interval of a replicated append; None for other writes. Raises InvalidUsage."""
    lower, upper = version_of(options, "appendLower"), _new_upper(options, "appendUpper")
    if lower is None and upper is None:
        return None
    if lower is None or upper is None:
        raise InvalidUsage(
            "options 'appendLower' and 'appendUpper' must be given together: they bound the times of the rows"
        )
    return lower, upper


def version_of(options: Options, name: str) -> int | None:
    """The time of an option; None if not given. Raises InvalidUsage."""
    return options.integer(name, 0, TIME_MAX)


def listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


MAX_DELAY_S = 15 * 60.0  # the default of maxTriggerDelay


@dataclass(frozen=True)
class StreamOptions:
    """The options of a streaming read besides `ReadOptions`.

    `starting` is "earliest", "latest", a time, or a wall clock. `ending` is the exclusive end: a time, a wall clock, or
    "latest", the upper when the query starts; None: the stream does not end. A micro-batch waits for `min_rows`, but no
    longer than `max_delay_s`.
    """

    starting: str | int | datetime
    cursor: str | None
    max_rows: int | None
    max_bytes: int | None
    fail_on_data_loss: bool
    ending: str | int | datetime | None = None
    min_rows: int | None = None
    max_delay_s: float = MAX_DELAY_S

    @classmethod
    def of(cls, options: Options) -> StreamOptions:
        starting = _starting(options)
        cursor = options.text("cursor")
        if starting == "latest" and not cursor:
            raise InvalidUsage(
                "startingOffsets=latest needs option 'cursor', a name under which the shard stores the initial offset: "
                "Spark asks for it more than once, and rows written in between would be lost"
            )
        max_rows = options.integer("maxRowsPerTrigger", 1, 2**63 - 1)
        max_bytes = options.size("maxBytesPerTrigger")
        if max_rows is not None and max_bytes is not None:
            raise InvalidUsage("options 'maxRowsPerTrigger' and 'maxBytesPerTrigger' are exclusive; give one")
        min_rows, delay = options.integer("minRowsPerTrigger", 1, 2**63 - 1), options.text("maxTriggerDelay")
        if min_rows is None and delay is not None:
            raise InvalidUsage("option 'maxTriggerDelay' needs 'minRowsPerTrigger'")
        if min_rows is not None and max_rows is not None and min_rows > max_rows:
            raise InvalidUsage(f"minRowsPerTrigger is {min_rows}, more than maxRowsPerTrigger, {max_rows}; reduce it")
        max_delay_s = MAX_DELAY_S if delay is None else period_ms(delay, "option 'maxTriggerDelay'", "15m") / 1000
        fails, ending = options.flag("failOnDataLoss", True), _ending(options, starting)
        return cls(starting, cursor or None, max_rows, max_bytes, fails, ending, min_rows, max_delay_s)


def _starting(options: Options) -> str | int | datetime:
    for given in ("startingVersion", "startingTimestamp"):
        check_exclusive(options, "startingOffsets", given)
    instant = instant_of(options, "startingTimestamp")
    if instant is not None:
        return instant
    name = "startingVersion" if options.has("startingVersion") else "startingOffsets"
    return _point(options, name, "earliest", ("earliest", "latest"))


def _ending(options: Options, starting: str | int | datetime) -> str | int | datetime | None:
    check_exclusive(options, "endingOffsets", "endingTimestamp")
    instant = instant_of(options, "endingTimestamp")
    if instant is not None:
        if isinstance(starting, datetime) and instant < starting:
            raise InvalidUsage("endingTimestamp is before startingTimestamp; give a later one")
        return instant
    if not options.has("endingOffsets"):
        return None
    ending = _point(options, "endingOffsets", "", ("latest",))
    if isinstance(ending, int) and isinstance(starting, int) and ending < starting:
        raise InvalidUsage(f"endingOffsets is {ending}, before startingOffsets, {starting}; give a later one")
    return ending


def _point(options: Options, name: str, default: str, keywords: tuple[str, ...]) -> str | int:
    """A time, or one of the keywords."""
    value = (options.text(name) or default).strip()
    if value.lower() in keywords:
        return value.lower()
    if value.startswith("{"):
        time = options.mapping(name).get("time")
        if type(time) is int and 0 <= time <= TIME_MAX:
            return time
        raise InvalidUsage(f'option {name!r} is {value!r}; it must be {", ".join(keywords)}, a time or {{"time": 7}}')
    return version_of(options, name) or 0
