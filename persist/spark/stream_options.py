"""What the options of a streaming read mean, besides those that every read takes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from persist.client.wall_clock import period_ms
from persist.core.antichain import TIME_MAX
from persist.core.errors import InvalidUsage
from persist.spark.option_names import Options
from persist.spark.options import instant_of, one_of, version_of

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
