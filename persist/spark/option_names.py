"""The options of `format("persist")` by their names: where each is allowed, and their values as they are written.

Spark hands options over as text with case-insensitive names. An option that nobody knows, or that means nothing where
it was given, is refused: a misspelt option must not silently read or write something else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from persist.core.errors import InvalidUsage
from persist.formats.http_messages import named_once
from persist.parts.decimal_text import EXACT_NUMBERS
from persist.parts.selection import read_values

LOCATION = ("url", "blob", "consensus", "token", "caFile", "certificateFile", "timeoutSeconds", "path", "shard")
SELECTS = ("where", "startKey", "endKey", "keyPrefix")
READ = ("columns", *SELECTS, "numPartitions", "batchRows", "memoryBytes", "leaseSeconds")
BATCH_READ = ("asOf", "versionAsOf", "timestampAsOf", "tag", "multiplicity", "waitSeconds", "schemaAsOf")
BATCH_CHANGES = ("startingTimestamp", "endingTimestamp")
CHANGES = ("readChangeFeed", "startingVersion", "endingVersion", "timeUnit", "changeImages")
BATCH_HISTORY = ("readHistory", "historyLimit", "maintenance")
BATCH_PAST = ("readChanges", "start", "end", "other")
STREAM_READ = (
    "readChangeFeed", "startingVersion", "startingTimestamp", "timeUnit", "startingOffsets", "cursor",
    "maxRowsPerTrigger", "maxBytesPerTrigger", "failOnDataLoss", "endingOffsets", "endingTimestamp",
    "minRowsPerTrigger", "maxTriggerDelay", "changeImages",
)  # fmt: skip
WRITE = (
    "key", "timeColumn", "diffColumn", "envelope", "deleteColumn", "partBytes", "history", "info", "mergeSchema",
    "unique", "checks",
)  # fmt: skip
BATCH_WRITE = (
    "expectedUpper", "readTime", "newUpper", "txnAppId", "txnVersion", "restoreTo", "writeId", "rewrites",
    "overwriteSchema", "appendLower", "appendUpper",
)  # fmt: skip
WRITES_OTHERWISE = (
    "appendLower",
    "appendUpper",
    "newUpper",
    "rewrites",
    "txnAppId",
    "txnVersion",
    "timeColumn",
    "envelope",
    "deleteColumn",
    "history",
    "mergeSchema",
    "overwriteSchema",
    "unique",
    "checks",
)
NO_APPEND = (
    "expectedUpper", "readTime", "newUpper", "txnAppId", "txnVersion", "restoreTo", "rewrites", "envelope",
    "deleteColumn", "overwriteSchema",
)  # fmt: skip
RESTORE = ("info", "numPartitions", "memoryBytes", "partBytes", "leaseSeconds")
STREAM_WRITE = ("checkpointLocation", "queryName")  # Spark passes on its own
ALLOWED: Mapping[str, tuple[str, ...]] = {
    "a batch read": (
        *LOCATION,
        *READ,
        *BATCH_READ,
        *CHANGES,
        *BATCH_CHANGES,
        *BATCH_HISTORY,
        *BATCH_PAST,
        "metadata",
    ),
    "a streaming read": (*LOCATION, *READ, *STREAM_READ),
    "a batch write": (*LOCATION, *WRITE, *BATCH_WRITE),
    "a table": (*LOCATION, "numPartitions", "batchRows", "memoryBytes", "leaseSeconds", "partBytes"),
    "a restore": (*LOCATION, *RESTORE),
    "a streaming write": (*LOCATION, *WRITE, *STREAM_WRITE),
}
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

    def check(self, use: str) -> None:
        """Refuse options that mean nothing for this use, a key of `ALLOWED`."""
        allowed = {name.lower() for name in ALLOWED[use]}
        for name in self._values:
            if name not in allowed:
                raise InvalidUsage(f"option {_KNOWN[name]!r} means nothing for {use}; leave it out")

    def has(self, name: str) -> bool:
        return name.lower() in self._values

    def text(self, name: str, default: str | None = None) -> str | None:
        return self._values.get(name.lower(), default)

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
