"""Wall clocks as callers write them, the times they name, the latest complete time, and the schema at a time."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist.client.idempotency import send, send_for
from persist.client.transport import Transport
from persist.core import commands as c
from persist.core.clock_index import MARKS_PAGE_MAX
from persist.core.errors import InvalidUsage, NotComplete, NotReadable, shown
from persist.core.frontier import TIME_MAX, frontier
from persist.core.shard_settings import history_ms
from persist.core.shard_view import ShardView
from persist.parts.scan_spec import schema_at
from persist.parts.schema_evolution import valid_schemas

BEFORE_ALL = -1  # as of it a shard has no rows; `as_of + 1` is the upper that it has then, as for every other time


class NothingWritten(NotReadable):
    """No time is complete yet, and none was forgotten."""


def latest(view: ShardView) -> int:
    """The last complete time of a shard. Raises NotReadable if no time is readable any more.

    Raises NothingWritten: no time is complete yet.
    """
    if view.since.is_empty:
        raise NotReadable(f"shard {view.name!r} was closed to reads", as_of=None, since=view.since.to_json())
    if view.upper.element == 0:
        kind = NothingWritten if view.since.element == 0 else NotReadable
        raise kind(
            f"shard {view.name!r} has no complete time yet: nothing was written", as_of=None, since=view.since.to_json()
        )
    if view.upper < view.since:
        raise NotReadable(
            f"shard {view.name!r} has since {view.since}, beyond its upper {view.upper}: nothing can be read until "
            "a write reaches it",
            as_of=None,
            since=view.since.to_json(),
        )
    last = TIME_MAX if view.upper.element is None else view.upper.element - 1
    return max(last, view.since.element or 0)


def latest_of(view: ShardView) -> int:
    """The latest complete time of a view; -1: nothing was written."""
    return (view.upper.element or 0) - 1


def check_readable(name: str, view: ShardView) -> None:
    """Raise NotReadable if the contents as of the latest complete time were forgotten: no edit can read them."""
    last = (view.upper.element or 0) - 1
    if last >= 0 and not view.since.less_equal(last):
        closed, later = "it is closed to reads for ever", "it can be read again after the next write"
        rest = closed if view.since.is_empty else later
        raise NotReadable(
            f"shard {name!r} has forgotten the contents as of {last}, its latest complete time: its since is "
            f"{view.since}; nothing was changed: {rest}",
            as_of=last,
            since=view.since.to_json(),
        )


# Wall clocks as callers write them, and the times of a shard that they name.
#
# An instant needs a zone, and is kept as milliseconds since 1970, UTC. Finer parts are dropped: instants are rounded
# down to a grid anyway (a second, unless the shard says otherwise).

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)
INSTANT_MAX = (datetime.max.replace(tzinfo=UTC) - EPOCH) // MILLISECOND  # the last one that can be shown in UTC
TIME_DIGITS_MAX = 19
POLL_S = 1.0  # the longest pause while waiting for an instant
_RFC3339 = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?([Zz]|[+-]\d{2}:\d{2})")


def instant_ms(what: str, value: datetime) -> int:
    """The instant in milliseconds since 1970. Raises InvalidUsage if it has no zone, or is not in 1970 to 9999."""
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidUsage(
            f"{what} is {value.isoformat()}, without a zone; give one, as datetime(2026, 11, 20, 12, tzinfo=UTC)"
        )
    at_ms = (value - EPOCH) // MILLISECOND
    if not 0 <= at_ms <= INSTANT_MAX:
        raise InvalidUsage(f"{what} is {value.isoformat()}; it must be an instant from 1970 to 9999, UTC")
    return at_ms


def read_instant(what: str, text: str) -> datetime:
    """Parse an instant in RFC 3339, as `2026-11-20T12:00:00Z`. Raises InvalidUsage."""
    try:
        if not _RFC3339.fullmatch(text):
            raise ValueError
        instant = datetime.fromisoformat(text.upper())
        instant_ms(what, instant)
    except ValueError:
        raise InvalidUsage(
            f"{what} is {text!r:.100}; it must be an instant with its zone, such as 2026-11-20T12:00:00Z"
        ) from None
    return instant


def read_point(what: str, text: str) -> int | datetime:
    """Parse a time or an instant, as `416` or `2026-11-20T12:00:00Z`; -1 is before all times. Raises InvalidUsage."""
    if text == str(BEFORE_ALL):
        return BEFORE_ALL
    if text.isdecimal() and text.isascii() and len(text) <= TIME_DIGITS_MAX:
        return int(text)
    try:
        return read_instant(what, text)
    except InvalidUsage:
        raise InvalidUsage(
            f"{what} is {text!r:.100}; it must be a time such as 416, or an instant with its zone, such as "
            "2026-11-20T12:00:00Z"
        ) from None


def to_datetime(at_ms: int) -> datetime:
    """Convert milliseconds since 1970 to a datetime in UTC."""
    return EPOCH + at_ms * MILLISECOND


def instant_text(at_ms: int) -> str:
    """Format milliseconds since 1970 in RFC 3339, UTC."""
    return to_datetime(at_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def datetime_text(at: datetime | None) -> str | None:
    """Format a datetime with its zone in RFC 3339, UTC; None stays None."""
    return None if at is None else instant_text(instant_ms("the wall clock", at))


def record_json(record: Any) -> dict[str, Any]:
    """The fields of a dataclass as JSON: frontiers as `[7]` or `[]`, wall clocks in RFC 3339, tuples as lists."""
    return {field.name: _json_value(getattr(record, field.name)) for field in fields(record)}


def _json_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return datetime_text(value)
    if isinstance(value, tuple):
        return [_json_value(item) for item in value]
    return value.to_json() if hasattr(value, "to_json") else value


def retention_ms(kept: timedelta | str, what: str = "history", *, takes_none: bool = True) -> int | None:
    """Convert a duration of history to milliseconds; None: for ever. Raises InvalidUsage naming `what`.

    Without `takes_none` a duration of zero is refused, too.
    """
    if not isinstance(kept, timedelta):
        return history_ms(kept, what, takes_none=takes_none)
    if timedelta(0) < kept < MILLISECOND:
        none = ", or timedelta(0) to keep none" if takes_none else ""
        raise InvalidUsage(f"{what} is {kept!r}; it must be at least a millisecond{none}")
    return history_ms(f"{kept // MILLISECOND}ms", what, takes_none=takes_none, takes_zero=takes_none)


def period_ms(period: object, what: str, such_as: str = "90d") -> int:
    """Convert a timedelta, or text such as `90d`, to milliseconds. Raises InvalidUsage naming `what`."""
    text = f"{period // MILLISECOND}ms" if isinstance(period, timedelta) else period
    try:
        duration_ms = history_ms(text, what)
    except InvalidUsage:
        duration_ms = None
    if not duration_ms:
        raise InvalidUsage(f"{what} is {shown(period)}; it must be an age such as {such_as!r} (ms, s, m, h, d or w)")
    return duration_ms


def resolve_time(transport: Transport, name: str, at: datetime, wait_s: float, retry_s: float) -> c.TimeResolved:
    """The state of the shard at a wall clock. Waits until the instant has passed, for at most `wait_s`.

    Raises InvalidUsage, NotReadable (it is not known), NotComplete (it has not passed), Unavailable (clocks disagree).
    """
    at_ms = instant_ms("the wall clock", at)
    deadline = transport.clock.monotonic() + wait_s
    while True:
        answer = send(transport, name, c.ResolveTime(at_ms), retry_s)
        if isinstance(answer, c.TimeResolved):
            return answer
        assert isinstance(answer, c.TimeToCome)
        left = deadline - transport.clock.monotonic()
        if left <= 0:
            raise NotComplete(
                f"{instant_text(at_ms)} is not over yet for shard {name!r}, where it is {instant_text(answer.now_ms)}; "
                "wait longer, or use an earlier instant",
                at_ms=at_ms,
                now_ms=answer.now_ms,
            )
        transport.clock.sleep(max(0.001, min((at_ms - answer.now_ms) / 1000, left, POLL_S)))


def as_of_at(name: str, resolution: c.TimeResolved) -> int:
    """The latest complete time at that wall clock. Raises NotReadable if nothing was written by then."""
    if resolution.upper.element == 0:
        raise NotReadable(
            f"nothing was written to shard {name!r} by {instant_text(resolution.at_ms)}; use a later instant",
            as_of=None,
            since=[0],  # an empty time cannot be forgotten
        )
    return TIME_MAX if resolution.upper.element is None else resolution.upper.element - 1


TIMESTAMP = pa.timestamp("us", "UTC")
STRETCHES_MAX = 2_000_000  # 32 MB; with a mark each second, the times of 23 days
PAGE = MARKS_PAGE_MAX  # stretches per request
MICROSECONDS = 1_000  # in a millisecond
_CLOSED = TIME_MAX + 1  # beyond every time


@dataclass(frozen=True)
class ClockStretches:
    """Consecutive stretches of times that each have one wall clock.

    The times in `[uppers[n - 1], uppers[n])` are shown from `instants_ms[n]` on. Times before the first upper or beyond
    the last one have no known wall clock.
    """

    uppers: npt.NDArray[np.int64]
    instants_ms: npt.NDArray[np.int64]

    def of(self, times: pa.ChunkedArray) -> pa.Array:
        """The wall clock of each time, which must not be null; null if it is not known."""
        places = np.searchsorted(self.uppers, times.to_numpy(), side="right")
        known = (places > 0) & (places < len(self.uppers))
        instants_ms = np.zeros(len(places), np.int64)
        instants_ms[known] = self.instants_ms[places[known]]
        return pa.array(instants_ms * MICROSECONDS, mask=~known).cast(TIMESTAMP)

    def of_time(self, time: int) -> datetime | None:
        """The wall clock of one time; None if it is not known."""
        place = int(np.searchsorted(self.uppers, time, side="right"))
        return to_datetime(int(self.instants_ms[place])) if 0 < place < len(self.uppers) else None


def load_clock_stretches(transport: Transport, name: str, first: int, last: int, retry_s: float) -> ClockStretches:
    """The wall clocks of the times from `first` to `last`: a request for each 4,096 stretches, at least one.

    They never change, as long as `first` is kept. Raises NotReadable (it was forgotten), InvalidUsage (it is not
    complete, or there are too many of them), and what `send` raises.
    """
    pages: list[npt.NDArray[np.int64]] = []  # pairs of an upper and an instant, newest first
    following: int | None = last
    while following is not None:
        page = send_for(c.MarksShown, transport, name, c.TimesShown(first, following, PAGE), retry_s)
        pairs = [(_CLOSED if mark.upper.element is None else mark.upper.element, mark.at_ms) for mark in page.marks]
        pages.append(np.array(pairs, np.int64).reshape(-1, 2))
        following = page.following
        if sum(map(len, pages)) > STRETCHES_MAX:
            raise InvalidUsage(
                f"the times from {first} to {last} of shard {name!r} have more than {STRETCHES_MAX} wall clocks; ask "
                "for fewer times at once"
            )
    marks = np.unique(np.concatenate(pages), axis=0)  # a page begins with the last mark of the one before it
    return ClockStretches(marks[:, 0], marks[:, 1])


def instant_of(transport: Transport, name: str, time: int, retry_s: float) -> datetime | None:
    """The wall clock from which a time is shown; None if it is not known. Raises as `load_clock_stretches`."""
    frontier(time)  # raises InvalidUsage unless it is a time
    return load_clock_stretches(transport, name, time, time, retry_s).of_time(time)


def schema_id_at(view: ShardView, as_of: int) -> int:
    """The id of the newest schema of the shard when a complete time was written. It never changes."""
    return schema_at(valid_schemas(view.schemas), view.schema_times, as_of)
