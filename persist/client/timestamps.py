"""Wall clocks as callers write them, the times they name, the latest complete time, and the schema of a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist.client.idempotency import send
from persist.client.transport import Transport
from persist.core import commands as c
from persist.core.clock_index import MARKS_PAGE_MAX
from persist.core.errors import InvalidUsage, NotComplete, NotReadable, shown
from persist.core.frontier import TIME_MAX, frontier
from persist.core.shard_settings import history_ms
from persist.core.shard_view import ShardView
from persist.parts.scan_spec import schema_at
from persist.parts.schema_evolution import valid_schemas

# The latest complete time of a shard, and what it is where nothing was written yet.


BEFORE_ALL = -1  # as of it a shard has no rows; `as_of + 1` is the upper that it has then, as of every other time


class NothingWritten(NotReadable):
    """No time is complete yet, and none was forgotten."""


def latest(view: ShardView) -> int:
    """The last complete time of a shard. Raises NotReadable when no time is readable any more.

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
            "somebody writes that far",
            as_of=None,
            since=view.since.to_json(),
        )
    last = TIME_MAX if view.upper.element is None else view.upper.element - 1
    return max(last, view.since.element or 0)


# Wall clocks as callers write them, and which time of a shard they name.
#
# An instant is told with its zone, and kept as milliseconds since 1970, UTC. What is finer is left out: instants are
# rounded down to a grid anyway (a second, unless the shard says otherwise).


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MILLISECOND = timedelta(milliseconds=1)
INSTANT_MAX = (datetime.max.replace(tzinfo=UTC) - EPOCH) // MILLISECOND  # that can be shown in UTC
TIME_DIGITS_MAX = 19
ASKED_AGAIN_S = 1.0  # while an instant is not over yet
_RFC3339 = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}(:\d{2}(\.\d{1,9})?)?([Zz]|[+-]\d{2}:\d{2})")


def instant_ms(what: str, value: datetime) -> int:
    """The instant in milliseconds since 1970. Raises InvalidUsage where it has no zone, or is not in 1970 to 9999."""
    if value.tzinfo is None or value.utcoffset() is None:
        raise InvalidUsage(
            f"{what} is {value.isoformat()}, without a zone; give one, as datetime(2026, 11, 20, 12, tzinfo=UTC)"
        )
    found = (value - EPOCH) // MILLISECOND
    if not 0 <= found <= INSTANT_MAX:
        raise InvalidUsage(f"{what} is {value.isoformat()}; it must be an instant from 1970 to 9999, UTC")
    return found


def read_instant(what: str, text: str) -> datetime:
    """The instant that a text in RFC 3339 tells, as `2026-11-20T12:00:00Z`. Raises InvalidUsage."""
    try:
        if not _RFC3339.fullmatch(text):
            raise ValueError
        found = datetime.fromisoformat(text.upper())
        instant_ms(what, found)
    except ValueError:
        raise InvalidUsage(
            f"{what} is {text!r:.100}; it must be an instant with its zone, such as 2026-11-20T12:00:00Z"
        ) from None
    return found


def read_point(what: str, text: str) -> int | datetime:
    """The time or the instant that a text tells, as `416` or `2026-11-20T12:00:00Z`; -1 is before all times.

    Raises InvalidUsage.
    """
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


def shown_instant(at_ms: int) -> datetime:
    """The instant, in UTC."""
    return EPOCH + at_ms * MILLISECOND


def instant_text(at_ms: int) -> str:
    """The instant in RFC 3339, UTC."""
    return shown_instant(at_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def datetime_text(at: datetime | None) -> str | None:
    """The same of a datetime with its zone; None stays None."""
    return None if at is None else instant_text(instant_ms("the wall clock", at))


def kept_ms(kept: timedelta | str, what: str = "history", *, takes_none: bool = True) -> int | None:
    """For how long is meant, in milliseconds; None: for ever. Raises InvalidUsage naming `what`.

    Without `takes_none` an age of nothing is refused too.
    """
    if not isinstance(kept, timedelta):
        return history_ms(kept, what, takes_none=takes_none)
    if timedelta(0) < kept < MILLISECOND:
        none = ", or timedelta(0) to keep none" if takes_none else ""
        raise InvalidUsage(f"{what} is {kept!r}; it must be at least a millisecond{none}")
    return history_ms(f"{kept // MILLISECOND}ms", what, takes_none=takes_none)


def period_ms(given: object, what: str, such_as: str = "90d") -> int:
    """A timedelta, or a text such as `90d`, in milliseconds. Raises InvalidUsage naming `what`: it is no such thing."""
    text = f"{given // MILLISECOND}ms" if isinstance(given, timedelta) else given
    try:
        found = history_ms(text, what)
    except InvalidUsage:
        found = None
    if not found:
        raise InvalidUsage(f"{what} is {shown(given)}; it must be an age such as {such_as!r} (ms, s, m, h, d or w)")
    return found


def resolved(transport: Transport, name: str, at: datetime, wait_s: float, retry_s: float) -> c.TimeResolved:
    """What the shard had by that wall clock. Waits until it is over, for at most `wait_s`.

    Raises InvalidUsage, NotReadable (it is not known), NotComplete (it is not over), Unavailable (clocks do not agree).
    """
    at_ms = instant_ms("the wall clock", at)
    deadline = transport.clock.monotonic() + wait_s
    while True:
        found = send(transport, name, c.ResolveTime(at_ms), retry_s)
        if isinstance(found, c.TimeResolved):
            return found
        assert isinstance(found, c.TimeToCome)
        left = deadline - transport.clock.monotonic()
        if left <= 0:
            raise NotComplete(
                f"{instant_text(at_ms)} is not over yet for shard {name!r}, where it is {instant_text(found.now_ms)}; "
                "wait longer, or take an earlier instant",
                at_ms=at_ms,
                now_ms=found.now_ms,
            )
        transport.clock.sleep(max(0.001, min((at_ms - found.now_ms) / 1000, left, ASKED_AGAIN_S)))


def as_of_at(name: str, found: c.TimeResolved) -> int:
    """The latest time that was complete by that wall clock. Raises NotReadable where nothing was written by then."""
    if found.upper.element == 0:
        raise NotReadable(
            f"nothing was written to shard {name!r} by {instant_text(found.at_ms)}; take a later instant",
            as_of=None,
            since=[0],  # nobody can have forgotten what was not there
        )
    return TIME_MAX if found.upper.element is None else found.upper.element - 1


# Dating: from which wall clock on each of many times of a shard is shown, for a whole column of times at once.


TIMESTAMP = pa.timestamp("us", "UTC")
STRETCHES_MAX = 2_000_000  # 32 MB; with a mark each second, the times of 23 days
PAGE = MARKS_PAGE_MAX  # stretches that one request asks for
MICROSECONDS = 1_000  # in a millisecond
_CLOSED = TIME_MAX + 1  # beyond every time


@dataclass(frozen=True)
class ClockStretches:
    """Stretches of times that have one wall clock each, ascending.

    The times from `uppers[n - 1]` up to before `uppers[n]` are shown from `instants_ms[n]` on. What lies before the
    first upper or beyond the last one is not known.
    """

    uppers: npt.NDArray[np.int64]
    instants_ms: npt.NDArray[np.int64]

    def of(self, times: pa.ChunkedArray) -> pa.Array:
        """The wall clock of each time, which must not be null; null where it is not known."""
        places = np.searchsorted(self.uppers, times.to_numpy(), side="right")
        known = (places > 0) & (places < len(self.uppers))
        found = np.zeros(len(places), np.int64)
        found[known] = self.instants_ms[places[known]]
        return pa.array(found * MICROSECONDS, mask=~known).cast(TIMESTAMP)

    def of_time(self, time: int) -> datetime | None:
        """The wall clock of one time; None where it is not known."""
        place = int(np.searchsorted(self.uppers, time, side="right"))
        return shown_instant(int(self.instants_ms[place])) if 0 < place < len(self.uppers) else None


def dates_of(transport: Transport, name: str, first: int, last: int, retry_s: float) -> ClockStretches:
    """The wall clocks of the times from `first` to `last`: a request for each 4,096 stretches, at least one.

    They are the same whenever and wherever this is asked, as long as `first` is kept. Raises NotReadable (it was
    forgotten), InvalidUsage (it is not complete, or there are too many of them), and what `send` raises.
    """
    pages: list[npt.NDArray[np.int64]] = []  # pairs of an upper and an instant, newest first
    following: int | None = last
    while following is not None:
        page = send(transport, name, c.TimesShown(first, following, PAGE), retry_s)
        assert isinstance(page, c.MarksShown)
        pairs = [(_CLOSED if one.upper.element is None else one.upper.element, one.at_ms) for one in page.marks]
        pages.append(np.array(pairs, np.int64).reshape(-1, 2))
        following = page.following
        if sum(map(len, pages)) > STRETCHES_MAX:
            raise InvalidUsage(
                f"the times from {first} to {last} of shard {name!r} have more than {STRETCHES_MAX} wall clocks; ask "
                "for fewer times at once"
            )
    told = np.unique(np.concatenate(pages), axis=0)  # a page begins with the mark at which the one before it ended
    return ClockStretches(told[:, 0], told[:, 1])


def instant_of(transport: Transport, name: str, time: int, retry_s: float) -> datetime | None:
    """From which wall clock on a time is shown; None where that is not known. Raises what `dates_of` raises."""
    frontier(time)  # raises InvalidUsage where it is no time
    return dates_of(transport, name, time, time, retry_s).of_time(time)


# Which schema a shard had as of a time.


def schema_then(view: ShardView, as_of: int) -> int:
    """The id of the newest schema that the shard had when a time was written that is complete. It never changes."""
    return schema_at(valid_schemas(view.schemas), view.schema_times, as_of)
