"""Shards with persist's own columns, stepwise progress over their events, and how far a wall clock is followed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Protocol, Self

import pyarrow as pa

from persist.client.arguments import checked_wait
from persist.client.connect import Client
from persist.client.listen import Listen
from persist.client.schema_lineage import ShardSchema, current_schema, first_schema
from persist.client.shard import Shard
from persist.client.write import Pinned, WriteHandle
from persist.core.errors import Expired, InvalidUsage, NotReadable, ShardExists, Unavailable
from persist.core.frontier import Antichain
from persist.patterns.sequenced_append import FeedPosition

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
CONFIRM_S = 1.0  # for so long the stores are asked about a clock


class WallClock(Protocol):
    """Where time comes from; tests pass their own."""

    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since 1970."""
        ...

    def monotonic(self) -> float:
        """Seconds from some fixed point; never goes back."""
        ...

    def sleep(self, seconds: float) -> None: ...


LOOK_AHEAD_MS = 60_000  # how far a wall clock may lead beyond what the stores' clocks confirm
ASK_AGAIN_S = 10.0  # after a clock was not confirmed, for so long it is not followed, and nobody is asked


class BoundedClock:
    """A wall clock as far as it may be followed: at most `LOOK_AHEAD_MS` beyond the clocks of the stores.

    `confirmed` says whether an instant has been. It is asked about half of that before now; what it says holds for the
    time that passes by the monotonic clock. A clock that is not confirmed is not followed: times count on from the last
    one. So a wrong clock costs a question at times, and leads nobody astray.
    """

    def __init__(self, clock: WallClock, confirmed: Callable[[int], bool]) -> None:
        self._clock = clock
        self._confirmed = confirmed
        self._last: tuple[int, float] | None = None  # an instant that has been, and when that was known
        self._refused_s: float | None = None  # when it was not confirmed

    @property
    def is_followed(self) -> bool:
        """Whether the clock was confirmed when that was asked last."""
        return self._last is not None and self._refused_s is None

    def time(self, least: int) -> int:
        """The time by the clock, or `least` where that is later or the clock is not confirmed."""
        now = self._clock.now_ms()
        return now if now > least and (self._is_near(now) or self._asks(now)) else least

    def _is_near(self, now: int) -> bool:
        if self._last is None:
            return False
        been_ms, then_s = self._last
        return now <= been_ms + int((self._clock.monotonic() - then_s) * 1000) + LOOK_AHEAD_MS

    def _asks(self, now: int) -> bool:
        now_s = self._clock.monotonic()
        if self._refused_s is not None and now_s - self._refused_s < ASK_AGAIN_S:
            return False
        asked = max(0, now - LOOK_AHEAD_MS // 2)
        if not self._confirmed(asked):
            self._refused_s = now_s
            return False
        self._last, self._refused_s = (asked, now_s), None
        return True


def confirmed_by(shard: Shard) -> Callable[[int], bool]:
    """Whether the clocks of the stores of `shard` say that an instant, in milliseconds since 1970, has been."""

    def confirmed(at_ms: int) -> bool:
        try:
            shard.with_timeout(CONFIRM_S).time_at(EPOCH + timedelta(milliseconds=at_ms))
        except (Unavailable, NotReadable, InvalidUsage, OverflowError):
            return False
        return True

    return confirmed


# Shards whose rows are persist's own, such as bindings and routes: what their columns are, whatever they are called.
#
# Their columns can be changed like those of any shard. Rows are written by the schema with which the shard was made, so
# they are read right by every later one. Who reads them by names is told where a name is another column's by now.


class OwnColumns:
    """The columns with which a shard of `what`, such as "bindings", was made. Thread-safe."""

    def __init__(self, shard: Shard, what: str) -> None:
        """Raises what every call may."""
        self.shard = shard
        self._what = what
        self.first, self._made = first_schema(shard)

    @classmethod
    def open(cls, client: Client, name: str, what: str, schema: pa.Schema, key: tuple[str, ...]) -> OwnColumns:
        """The shard of that name, which is made with these columns, and keeps history for ever, if it is not there.

        Raises ShardExists where it was made with other columns; and as `check`.
        """
        try:
            found = cls(client.create_shard(name, schema, list(key), history="forever"), what)
        except ShardExists:  # or its columns were changed since
            found = cls(client.shard(name), what)
            wanted = ShardSchema(schema, key)
            if (found._made.arrow, found._made.key) != (wanted.arrow, wanted.key):
                raise
        found.check(found.shard.schema)
        return found

    def rows(self, table: pa.Table) -> Pinned:
        """Rows that name the columns as they were called at first, for a writer."""
        return Pinned(table, self.first, self._made)

    def check(self, schema: ShardSchema | None) -> None:
        """Raise InvalidUsage where one of the columns is not called so by a schema of the shard (None: not known)."""
        if schema is None or schema.is_plain:  # the columns of plain ones are added, and never renamed
            return
        if self._made.is_plain:  # its numbers follow from what came after it
            self.first, self._made = first_schema(self.shard)
        for name, number in self._made.id_of.items():
            now = schema.name_of.get(number)
            if now == name:
                continue
            became = "was dropped, which ends it: make another one" if now is None else f"is called {now!r}"
            remedy = "" if now is None else f"; let the columns have their first names again (Shard.alter): {name!r}"
            raise InvalidUsage(f"column {name!r} of shard {self.shard.name!r} of {self._what} {became}{remedy}")

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tell what was refused because of a name as `check` does, which says what to do."""
        try:
            yield
        except InvalidUsage:
            self.check(current_schema(self.shard.view().schemas)[1])
            raise


# What a listener gives, time by time: a commit that comes in pieces is put together.


def whole_events(listen: Listen, wait_s: float) -> Iterator[tuple[pa.Table, Antichain]]:
    """The updates before each frontier that is reached, and that frontier; waits at most so long for the first.

    The pieces of a large commit are held until the last one came, since what is appended is a whole interval of times.
    Raises what `Listen.next_events` does.
    """
    held: list[pa.Table] = []
    for event in listen.next_events(wait_s):
        held.append(event.updates)
        if event.lower != event.upper:
            yield pa.concat_tables(held), event.upper
            held = []


# Going on step by step after a listen, which is begun anew after whatever goes wrong.


class Closing(ABC):
    """What is closed at the end of a `with`."""

    @abstractmethod
    def close(self) -> None:
        """Give back what it holds. Raises what every call may."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Stepping(Closing):
    """Follows a listen and writes what follows from it. `_listen` is None where it has to begin anew."""

    _writer: WriteHandle
    _fed: FeedPosition
    _listen: Listen | None = None

    def step(self, wait_s: float = 0.0) -> bool:
        """Write what is new; wait at most `wait_s` seconds for it. Whether anything was.

        Repeating it is safe, after any error. Raises: InvalidUsage (`wait_s` is no number), what the class says, and
        what every call may.
        """
        checked_wait("wait_s", wait_s)
        try:
            return self._step(wait_s)
        except Expired:  # it was not asked for so long that its lease has lapsed
            self._end()
            return self._step(wait_s)
        except BaseException:  # it begins anew from what the shards tell
            self._end()
            raise

    @property
    def upper(self) -> int:
        """Up to which time of its feed the shard has all, as far as this object knows. No I/O."""
        return self._fed.before

    def rebind(self) -> None:
        """Go on where others have written to the shard, which `step` refuses (Conflict).

        What the feed has at the times that they took is written at the first time that is free. Their rows stay. Of a
        shard that was fed by an older version, what that has left out at times that were taken stays left out.
        Raises: Conflict (the shard is closed), and what every call may.
        """
        self._end()
        self._fed.accept()

    def close(self) -> None:
        """Give back what it holds. Raises what every call may."""
        self._end()
        self._writer.close()

    @abstractmethod
    def _step(self, wait_s: float) -> bool:
        """A step; `_listen` is there afterwards."""

    def _end(self) -> None:
        if self._listen is not None:
            self._listen.close()
            self._listen = None
