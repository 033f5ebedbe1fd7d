"""The options of `format("persist")`: names, where each is allowed, and their values as Python objects."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from typing import Any

from persist.client.commit_info import read_info
from persist.client.connect import Connection
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

# The options of `format("persist")` by their names: where each is allowed, and their values as they are written.
#
# Spark hands options over as text with case-insensitive names. An option that nobody knows, or that means nothing where
# it was given, is refused: a misspelt option must not silently read or write something else.


METADATA = ("history", "parts", "readers", "cursors", "schemas", "detail")
LOCATION = ("url", "blob", "consensus", "token", "caFile", "certificateFile", "timeoutSeconds", "path", "shard")
TUNING = ("numPartitions", "batchRows", "memoryBytes", "leaseSeconds")
READ = (*LOCATION, "columns", "where", "startKey", "endKey", "keyPrefix", *TUNING, "readChangeFeed")
BATCH_READ = (*READ, "readDiff", "waitSeconds")
STREAM_READ = (
    *READ, "startingVersion", "startingTimestamp", "startingOffsets", "cursor", "maxRowsPerTrigger",
    "maxBytesPerTrigger", "failOnDataLoss", "endingOffsets", "endingTimestamp", "minRowsPerTrigger", "maxTriggerDelay",
)  # fmt: skip
OF_FEEDS = ("timeUnit", "changeImages")
WRITE = (*LOCATION, "key", "diffColumn", "partBytes", "info")
CREATING_WRITE = (*WRITE, "timeColumn", "history", "mergeSchema", "unique", "checks")
UPSERTING_WRITE = (*CREATING_WRITE, "envelope", "deleteColumn")
SNAPSHOT, FEED, DIFFERENCE = "a snapshot", "readChangeFeed", "readDiff"
STREAM, STREAM_FEED = "a streaming read", "a streaming read of changes"
BATCH_WRITE, STREAM_WRITE = "a batch write", "a streaming write"
APPEND, RESTORED = "a write with appendLower", "a write with restoreTo"
TABLE, RESTORE = "a table", "a restore"
ALLOWED: Mapping[str, tuple[str, ...]] = {
    SNAPSHOT: (*BATCH_READ, "asOf", "versionAsOf", "timestampAsOf", "tag", "multiplicity", "schemaAsOf"),
    FEED: (*BATCH_READ, *OF_FEEDS, "startingVersion", "endingVersion", "startingTimestamp", "endingTimestamp"),
    DIFFERENCE: (*LOCATION, "columns", *TUNING, "readDiff", "waitSeconds", "start", "end", "other"),
    "metadata=history": (*LOCATION, "metadata", "historyLimit", "maintenance"),
    **{f"metadata={kind}": (*LOCATION, "metadata") for kind in METADATA[1:]},
    STREAM: STREAM_READ,
    STREAM_FEED: (*STREAM_READ, *OF_FEEDS),
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
_REFUSED = {
    "location": "CREATE TABLE ... USING persist loses its options; write CREATE TEMPORARY VIEW ... USING persist",
}
_UNITS = {"": 1, "b": 1, "k": 1024, "m": 1024**2, "g": 1024**3}


class Options:
    """Options by their names, whatever the case; every getter raises InvalidUsage naming the option."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._values = {name.lower(): value for name, value in given.items()}
        for name in self._values:
            if name in _REFUSED:
                raise InvalidUsage(f"option {name!r} is not supported: {_REFUSED[name]}")
            if name == "paths":
                raise InvalidUsage("one load reads one shard: give one name, and union the DataFrames of several")
            if name not in _KNOWN:
                raise InvalidUsage(f"option {name!r} is unknown; known are {', '.join(sorted(_KNOWN.values()))}")

    def check(self, use: str, *others: str) -> None:
        """Refuse options that mean nothing for these uses, keys of `ALLOWED`. Errors name the first one."""
        allowed = {name.lower() for one in (use, *others) for name in ALLOWED[one]}
        for name in self._values:
            if name not in allowed:
                uses = ", ".join(one for one, names in ALLOWED.items() if _KNOWN[name] in names)
                raise InvalidUsage(f"option {_KNOWN[name]!r} means nothing for {use}; it is for {uses}")

    @property
    def batch_read(self) -> str:
        """What a batch read shows, a key of `ALLOWED`."""
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
        """One of the choices; the first by default."""
        value = self._values.get(name.lower(), choices[0]).lower()
        if value not in choices:
            raise InvalidUsage(f"option {name!r} is one of {', '.join(choices)}, not {value!r}")
        return value

    def integer(self, name: str, least: int, most: int) -> int | None:
        """A whole number in `[least, most]`, or None when it is not given."""
        value = self._values.get(name.lower())
        if value is None:
            return None
        try:
            number = int(value)
        except ValueError:
            raise InvalidUsage(f"option {name!r} is a whole number, not {value!r}") from None
        if not least <= number <= most:
            raise InvalidUsage(f"option {name!r} is {number}, outside [{least}, {most}]")
        return number

    def size(self, name: str) -> int | None:
        """Bytes, written 1000, 64k, 64m or 1g; None when it is not given."""
        value = self._values.get(name.lower())
        if value is None:
            return None
        digits = value.strip().lower().rstrip("bkmg")
        unit = value.strip().lower()[len(digits) :].removesuffix("b") if digits else "?"
        if not digits.isdigit() or unit not in _UNITS or int(digits) == 0:
            raise InvalidUsage(f"option {name!r} is a size such as 1000, 64k, 64m or 1g, not {value!r}")
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
            raise InvalidUsage(f"option {name!r} is a number of seconds in (0, 86400], not {value!r}")
        return number

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name.lower(), str(default)).lower()
        if value not in ("true", "false"):
            raise InvalidUsage(f"option {name!r} is true or false, not {value!r}")
        return value == "true"

    def names(self, name: str) -> tuple[str, ...] | None:
        """Column names, separated by commas or as a JSON list; None when not given."""
        value = self._values.get(name.lower())
        if value is None:
            return None
        if value.lstrip().startswith("["):
            names = self._json(name, value, list)
        else:
            names = [part.strip() for part in value.split(",")]
        if not names or not all(isinstance(part, str) and part for part in names):
            raise InvalidUsage(f"option {name!r} lists column names, not {value!r}")
        return tuple(names)

    def values(self, name: str) -> tuple[Any, ...] | None:
        """Values of the first key columns: a JSON list, or text that is the value of the first one."""
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
            found = json.loads(value, object_pairs_hook=named_once)
        except (ValueError, RecursionError) as error:
            raise InvalidUsage(f"option {name!r} is not valid JSON: {error}") from None
        if not isinstance(found, kind):
            raise InvalidUsage(f"option {name!r} must be a JSON {kind.__name__}, not {value!r}")
        return found


# What the options of `format("persist")` mean for a read or a write, as Python objects.


BATCH_ROWS = 16_384  # rows of one Arrow batch handed to Spark; fewer cost Python time, more bring nothing
BATCH_ROWS_MAX = 1_000_000
PARTITIONS_MAX = 100_000
HISTORY_ROWS = 1_000  # of the commit history, unless more are asked for
HISTORY_ROWS_MAX = 10_000_000
WAIT_S = 60.0
WRITE_ID_CHARS_MAX = 64
_NO_SHARD = (
    "no shard was named: give it as load('name') or option 'shard'. In SQL, CREATE TABLE ... USING persist loses its "
    "options; write CREATE TEMPORARY VIEW v USING persist OPTIONS (...), or SELECT ... FROM t WITH (...)"
)
_NO_LOCATION = (
    "no location was given: option 'url' (persist:///directory or http://host), or both 'blob' and 'consensus'. "
    "In SQL, CREATE TABLE ... USING persist loses its options; write CREATE TEMPORARY VIEW ... USING persist OPTIONS"
)

NO_CONSTRAINTS = ConstraintChange()


@dataclass(frozen=True)
class Target:
    """Which shard, and how to reach it: plain settings that travel to executors."""

    connection: Connection
    shard: str

    @classmethod
    def of(cls, options: Options) -> Target:
        path, shard = options.text("path"), options.text("shard")
        if path and shard and path != shard:
            raise InvalidUsage(f"two shards were named, {path!r} and {shard!r}; give one")
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
        """The same shard, by the servers at which it is read, or written (`writes`). See `Connection.at`."""
        return replace(self, connection=self.connection.at(self.shard, writes=writes))


@dataclass(frozen=True)
class ReadOptions:
    """What every read takes. `partitions` None: by the size of the data.

    `selection`: the rows and keys that are wanted, of all columns. `as_of` None: the latest time. `starting` and
    `ending`: where a change feed begins and ends, both inclusive. Planning makes times of wall clocks.
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
    images: bool = False  # of changes: those that are updates are told as such

    @classmethod
    def of(cls, options: Options, *, streams: bool = False) -> ReadOptions:
        """`streams`: what says where a stream starts is in `StreamOptions`. Raises InvalidUsage."""
        one_of(options, "asOf", "versionAsOf", "timestampAsOf", "tag")
        one_of(options, "startingVersion", "startingTimestamp")
        one_of(options, "endingVersion", "endingTimestamp")
        name = "versionAsOf" if options.has("versionAsOf") else "asOf"
        latest = (options.text(name) or "latest").lower() == "latest"
        if not streams and (options.text("startingVersion") or "").strip().lower() == "latest":
            raise InvalidUsage(
                "startingVersion=latest is for streams: a batch read has nothing after the latest time; give a time, "
                "such as that of the change that you have seen last, plus 1"
            )
        return cls(
            columns=options.names("columns"),
            selection=_selection(options),
            partitions=options.integer("numPartitions", 1, PARTITIONS_MAX),
            batch_rows=options.integer("batchRows", 1, BATCH_ROWS_MAX) or BATCH_ROWS,
            as_of=_latest_or_named(options) if latest else options.integer(name, BEFORE_ALL, TIME_MAX),
            with_diff=options.choice("multiplicity", ("expand", "column")) == "column",
            wait_s=options.seconds("waitSeconds", WAIT_S),
            changes=options.flag("readChangeFeed"),
            starting=None if streams else _point_of(options, "starting"),
            ending=_point_of(options, "ending"),
            time_unit=options.text("timeUnit") and options.choice("timeUnit", ("s", "ms", "us")),
            images=options.flag("changeImages"),
        )


def _selection(options: Options) -> Selection:
    called = ("option 'startKey'", "option 'endKey'", "option 'keyPrefix'", "")
    return Selection(
        options.text("where"),
        options.values("startKey"),
        options.values("endKey"),
        options.values("keyPrefix"),
        called=called,
        then=options.choice("schemaAsOf", (NOW, THEN)) == THEN,
        from_text=True,
    )


def _latest_or_named(options: Options) -> Tagged | datetime | None:
    """The tag or the wall clock that a read names; None: it is of the latest time."""
    tag = options.text("tag")
    return instant_of(options, "timestampAsOf") if tag is None else Tagged(check_tag_name(tag))


def _point_of(options: Options, which: str) -> int | datetime | None:
    """The time or the wall clock of `startingVersion` and `startingTimestamp`, or of those of the end."""
    when = instant_of(options, f"{which}Timestamp")
    return version_of(options, f"{which}Version") if when is None else when


class SchemaMode(Enum):
    """What a write does to the columns of the shard."""

    KEEP = "keep"
    MERGE = "merge"  # the shard gets the columns and wider types that the DataFrame has more
    OVERWRITE = "overwrite"  # the shard gets the columns of the DataFrame, in the place of its own


REWRITES = {"false": None, "true": "update", "update": "update", "delete": "delete", "merge_into": "merge_into"}
"""The verb in the commit history, for each value of the option."""


@dataclass(frozen=True)
class WriteOptions:
    """What every write takes. The service chooses the time unless `conditional` or `append` is given.

    `conditional` is the upper that the shard must have, and the one that it has after the write. `append` is the
    interval of rows that replicated writers write, of which the shard may have the beginning already.
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
    constraints: ConstraintChange = NO_CONSTRAINTS  # of such a shard
    info: bytes = b""  # what the commit history is to tell
    write_id: str | None = None  # by which the commit history tells this write from others
    restores: int | None = None  # the time to which the rows, which are changes, lead back
    schema: SchemaMode = SchemaMode.KEEP
    rewrites: str | None = None  # the verb by which the rows change what was read; none is written where they cancel

    @property
    def expected_upper(self) -> int | None:
        """The upper that the shard must have; None: any."""
        return None if self.conditional is None else self.conditional[0]

    @property
    def moves_upper(self) -> bool:
        """Whether the write names the upper that comes after it, other than the next time."""
        if self.conditional is None:
            return self.append is not None
        expected, upper = self.conditional
        return upper != Antichain(expected + 1)

    @property
    def first_time(self) -> int | None:
        """The time of rows that have none of their own; None: the service chooses it."""
        return self.expected_upper if self.append is None else self.append[0]

    @property
    def renames(self) -> dict[str | None, str]:
        """What a shard calls the columns of times and diffs."""
        return {self.time_column: TIME, self.diff_column: DIFF}

    @classmethod
    def of(cls, options: Options) -> WriteOptions:
        time_column, diff_column = options.text("timeColumn"), options.text("diffColumn")
        expected, append = _expected_upper(options), _append_interval(options)
        upper = _new_upper(options, "newUpper")
        upsert = options.choice("envelope", ("none", "upsert")) == "upsert"
        if expected is None and upper is not None:
            raise InvalidUsage("option 'newUpper' needs 'expectedUpper'; without both the service chooses the time")
        if upsert and (upper is not None or time_column or diff_column):
            raise InvalidUsage("envelope=upsert works out times and diffs itself; leave the other options out")
        if expected is not None and upper is None:
            if time_column is not None:
                raise InvalidUsage("option 'timeColumn' needs 'newUpper': every time lies in [expectedUpper, newUpper)")
            upper = Antichain(expected + 1)
        if time_column is not None and expected is None and append is None:
            raise InvalidUsage(
                "option 'timeColumn' needs 'expectedUpper' and 'newUpper', or 'appendLower' and 'appendUpper', between "
                "which its times lie"
            )
        if options.has("txnAppId") != options.has("txnVersion"):
            raise InvalidUsage("options 'txnAppId' and 'txnVersion' go together")
        restores = version_of(options, "restoreTo")
        if restores is not None and expected is None:
            raise InvalidUsage("option 'restoreTo' needs 'expectedUpper', up to which the rows lead back")
        rewrites = options.choice("rewrites", tuple(REWRITES))
        follows = expected is not None and upper == Antichain(expected + 1)
        if rewrites != "false" and (diff_column is None or upsert or not follows):
            raise InvalidUsage("option 'rewrites' needs 'readTime' and 'diffColumn': the rows change what was read")
        version = options.integer("txnVersion", 0, 2**63 - 1)
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
            constraints=_constraints(options),
            info=read_info("option 'info'", options.text("info") or "{}") if options.has("info") else b"",
            restores=restores,
            rewrites=REWRITES[rewrites],
            schema=_schema_mode(options),
            write_id=_write_id(options),
        )


def _schema_mode(options: Options) -> SchemaMode:
    merges, overwrites = options.flag("mergeSchema"), options.flag("overwriteSchema")
    if merges and overwrites:
        raise InvalidUsage(
            "give one of 'overwriteSchema' and 'mergeSchema': one replaces the columns, one adds to them"
        )
    return SchemaMode.MERGE if merges else SchemaMode.OVERWRITE if overwrites else SchemaMode.KEEP


def _constraints(options: Options) -> ConstraintChange:
    checks = options.mapping("checks") if options.has("checks") else {}
    return ConstraintChange.of(options.flag("unique"), None, checks)


@dataclass(frozen=True)
class MetadataOptions:
    """Which metadata of a shard is read, one of `METADATA`, and how much of its commit history."""

    kind: str
    limit: int
    maintenance: bool

    @classmethod
    def of(cls, options: Options) -> MetadataOptions:
        limit = options.integer("historyLimit", 1, HISTORY_ROWS_MAX) or HISTORY_ROWS
        return cls(options.choice("metadata", METADATA), limit, options.flag("maintenance"))


@dataclass(frozen=True)
class DiffOptions:
    """Between which times what changed is read: times, or instants. `end` None: the latest complete time.

    `other` is the shard whose contents at `end` are compared; None is the one that is read.
    """

    start: int | datetime
    end: int | datetime | None
    other: str | None
    read: ReadOptions

    @classmethod
    def of(cls, options: Options) -> DiffOptions:
        start, end, other = (options.text(name) for name in ("start", "end", "other"))
        if start is None:
            raise InvalidUsage("readDiff needs option 'start', the time or the instant that is compared with")
        return cls(
            read_point("option 'start'", start),
            None if end is None else read_point("option 'end'", end),
            None if other is None else check_shard_name(other),
            ReadOptions.of(options),
        )


def one_of(options: Options, *names: str) -> None:
    """Raises InvalidUsage where more than one of them is given."""
    given = [name for name in names if options.has(name)]
    if len(given) > 1:
        raise InvalidUsage(f"options {given[0]!r} and {given[1]!r} mean the same; give one")


def instant_of(options: Options, name: str) -> datetime | None:
    """The wall clock that an option names; None where it is not given. Raises InvalidUsage."""
    text = options.text(name)
    return None if text is None else read_instant(f"option {name!r}", text)


def _write_id(options: Options) -> str | None:
    found = options.text("writeId")
    if found is not None and not 0 < len(found) <= WRITE_ID_CHARS_MAX:
        raise InvalidUsage(f"option 'writeId' has {len(found)} characters; it may have 1 to {WRITE_ID_CHARS_MAX}")
    return found


def _expected_upper(options: Options) -> int | None:
    """The upper that a write asks for: right after `readTime`, where that is given."""
    one_of(options, "expectedUpper", "readTime")
    at = options.integer("readTime", BEFORE_ALL, TIME_MAX)
    if at is None:
        return version_of(options, "expectedUpper")
    if at >= TIME_MAX:
        raise InvalidUsage(f"option 'readTime' is {at}; no write comes after it")
    return at + 1


def _new_upper(options: Options, name: str) -> Antichain | None:
    """The upper that an option names, a time or `closed`; None where it is not given. Raises InvalidUsage."""
    if (options.text(name) or "").lower() in ("closed", "[]"):
        return EMPTY
    time = version_of(options, name)
    return None if time is None else Antichain(time)


def _append_interval(options: Options) -> tuple[int, Antichain] | None:
    """The interval of a replicated append; None: it is no such write. Raises InvalidUsage."""
    lower, upper = version_of(options, "appendLower"), _new_upper(options, "appendUpper")
    if lower is None and upper is None:
        return None
    if lower is None or upper is None:
        raise InvalidUsage("options 'appendLower' and 'appendUpper' go together: the rows lie between them")
    return lower, upper


def version_of(options: Options, name: str) -> int | None:
    """The time that an option names; None where it is not given. Raises InvalidUsage."""
    return options.integer(name, 0, TIME_MAX)


def listed(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


# What the options of a streaming read mean, besides those that every read takes.


MAX_DELAY_S = 15 * 60.0  # that rows wait for more where nobody says how long


@dataclass(frozen=True)
class StreamOptions:
    """What a streaming read takes besides `ReadOptions`. `starting`: "earliest", "latest", a time, or an instant.

    `ending`: what lies before this time, before this instant, or before the "latest" when the query starts; None: it
    does not end. A micro-batch waits for `min_rows`, for at most `max_delay_s`.
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
                "startingOffsets=latest needs option 'cursor', a name under which the shard remembers what latest was: "
                "Spark asks more than once, and rows written in between would be lost"
            )
        max_rows = options.integer("maxRowsPerTrigger", 1, 2**63 - 1)
        max_bytes = options.size("maxBytesPerTrigger")
        if max_rows is not None and max_bytes is not None:
            raise InvalidUsage("give maxRowsPerTrigger or maxBytesPerTrigger, not both")
        min_rows, max_delay_s = _least(options, max_rows)
        return cls(
            starting,
            cursor or None,
            max_rows,
            max_bytes,
            options.flag("failOnDataLoss", True),
            _ending(options, starting),
            min_rows,
            max_delay_s,
        )


def _least(options: Options, max_rows: int | None) -> tuple[int | None, float]:
    """How many rows a micro-batch waits for, and how long in seconds."""
    least = options.integer("minRowsPerTrigger", 1, 2**63 - 1)
    delay = options.text("maxTriggerDelay")
    if least is None and delay is not None:
        raise InvalidUsage("option 'maxTriggerDelay' needs 'minRowsPerTrigger', the rows that are waited for")
    if least is not None and max_rows is not None and least > max_rows:
        raise InvalidUsage(f"minRowsPerTrigger is {least}, more than maxRowsPerTrigger, {max_rows}; give fewer")
    return least, MAX_DELAY_S if delay is None else period_ms(delay, "option 'maxTriggerDelay'", "15m") / 1000


def _starting(options: Options) -> str | int | datetime:
    for given in ("startingVersion", "startingTimestamp"):
        one_of(options, "startingOffsets", given)
    when = instant_of(options, "startingTimestamp")
    if when is not None:
        return when
    name = "startingVersion" if options.has("startingVersion") else "startingOffsets"
    return _point(options, name, "earliest", ("earliest", "latest"))


def _ending(options: Options, starting: str | int | datetime) -> str | int | datetime | None:
    one_of(options, "endingOffsets", "endingTimestamp")
    when = instant_of(options, "endingTimestamp")
    if when is not None:
        if isinstance(starting, datetime) and when < starting:
            raise InvalidUsage("endingTimestamp lies before startingTimestamp; give a later one")
        return when
    if not options.has("endingOffsets"):
        return None
    ending = _point(options, "endingOffsets", "", ("latest",))
    if isinstance(ending, int) and isinstance(starting, int) and ending < starting:
        raise InvalidUsage(f"endingOffsets is {ending}, before startingOffsets, {starting}; give a later one")
    return ending


def _point(options: Options, name: str, default: str, words: tuple[str, ...]) -> str | int:
    """A time, or one of the words."""
    value = (options.text(name) or default).strip()
    if value.lower() in words:
        return value.lower()
    if value.startswith("{"):
        time = options.mapping(name).get("time")
        if type(time) is int and 0 <= time <= TIME_MAX:
            return time
        raise InvalidUsage(f'option {name!r} is {", ".join(words)}, a time or {{"time": 7}}, not {value!r}')
    return version_of(options, name) or 0
