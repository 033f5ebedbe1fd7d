"""Wall clocks as callers write them, and which time of a shard they name.

An instant is told with its zone, and kept as milliseconds since 1970, UTC. What is finer is left out: instants are
rounded down to a grid anyway (a second, unless the shard says otherwise).
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from persist.client.complete import BEFORE_ALL
from persist.client.retry import send
from persist.client.transport import Transport
from persist.core import commands as c
from persist.core.antichain import TIME_MAX
from persist.core.errors import InvalidUsage, NotComplete, NotReadable, shown
from persist.core.shard_settings import history_ms

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
