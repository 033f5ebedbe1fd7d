"""Shards with internal columns, followers of a feed, and wall clocks that are bounded by the clocks of the stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Protocol, Self

import pyarrow as pa

from persist.client.arguments import checked_wait
from persist.client.client import Client
from persist.client.listen import Listen
from persist.client.schema_lineage import ShardSchema, current_schema, first_schema
from persist.client.shard import Shard
from persist.client.write import PinnedRows, WriteHandle
from persist.core.errors import Expired, InvalidUsage, NotReadable, ShardExists, Unavailable
from persist.core.frontier import Antichain
from persist.sources.feed_position import FeedPosition

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
CONFIRM_S = 1.0  # the timeout of a request that confirms a clock


class WallClock(Protocol):
    """A source of time; tests pass their own."""

    def now_ms(self) -> int:
        """Wall-clock time in milliseconds since 1970."""
        ...

    def monotonic(self) -> float:
        """Monotonic seconds."""
        ...

    def sleep(self, seconds: float) -> None: ...


LOOK_AHEAD_MS = 60_000  # how far a wall clock may be ahead of the clocks of the stores
RETRY_CONFIRM_S = 10.0  # how long a clock that was not confirmed is not followed, without further requests


class BoundedClock:
    """A wall clock that is followed at most `LOOK_AHEAD_MS` beyond the clocks of the stores.

    `has_passed` says whether an instant (ms since 1970) is in the past by the clocks of the stores. It is called for an
    instant half of that bound ago; the result remains valid as the monotonic clock advances. A clock that is not
    confirmed is not followed: times count up from the last one.
    """

    def __init__(self, clock: WallClock, has_passed: Callable[[int], bool]) -> None:
        self._clock = clock
        self._has_passed = has_passed
        self._confirmed: tuple[int, float] | None = None  # an instant that has passed, and when that was known
        self._rejected_s: float | None = None  # when the clock was not confirmed

    @property
    def is_followed(self) -> bool:
        """Whether the last attempt confirmed the clock."""
        return self._confirmed is not None and self._rejected_s is None

    def time(self, least: int) -> int:
        """The time of the clock, or `least` if that is later or the clock is not confirmed."""
        now = self._clock.now_ms()
        return now if now > least and (self._is_within_bound(now) or self._confirm(now)) else least

    def _is_within_bound(self, now: int) -> bool:
        if self._confirmed is None:
            return False
        confirmed_ms, at_s = self._confirmed
        return now <= confirmed_ms + int((self._clock.monotonic() - at_s) * 1000) + LOOK_AHEAD_MS

    def _confirm(self, now: int) -> bool:
        now_s = self._clock.monotonic()
        if self._rejected_s is not None and now_s - self._rejected_s < RETRY_CONFIRM_S:
            return False
        instant_ms = max(0, now - LOOK_AHEAD_MS // 2)
        if not self._has_passed(instant_ms):
            self._rejected_s = now_s
            return False
        self._confirmed, self._rejected_s = (instant_ms, now_s), None
        return True


def bounded_clock(clock: WallClock | None, shard: Shard) -> BoundedClock | None:
    """The clock, bounded by the clocks of the stores of `shard`; None without a clock."""

    def has_passed(at_ms: int) -> bool:
        try:
            shard.with_timeout(CONFIRM_S).time_at(EPOCH + timedelta(milliseconds=at_ms))
        except (Unavailable, NotReadable, InvalidUsage, OverflowError):
            return False
        return True

    return None if clock is None else BoundedClock(clock, has_passed)


class InternalColumns:
    """The columns with which a shard of internal rows, such as bindings or routes, was created. Thread-safe.

    Its columns can be changed like those of any shard. Rows are written with the schema of creation, so every later
    schema reads them correctly; reads by name detect a name that now belongs to another column. `what` is for errors.
    """

    def __init__(self, shard: Shard, what: str) -> None:
        self.shard = shard
        self._what = what
        self.first, self._schema = first_schema(shard)

    @classmethod
    def open(cls, client: Client, name: str, what: str, schema: pa.Schema, key: tuple[str, ...]) -> InternalColumns:
        """Open the shard of that name. If it does not exist it is created with these columns and unlimited history.

        Raises ShardExists (it was created with other columns), and as `check`.
        """
        try:
            columns = cls(client.create_shard(name, schema, list(key), history="forever"), what)
        except ShardExists:  # or its columns were changed since
            columns = cls(client.shard(name), what)
            expected = ShardSchema(schema, key)
            if (columns._schema.arrow, columns._schema.key) != (expected.arrow, expected.key):
                raise
        columns.check(columns.shard.schema)
        return columns

    def rows(self, table: pa.Table) -> PinnedRows:
        """Rows with the original column names, for a writer."""
        return PinnedRows(table, self.first, self._schema)

    def check(self, schema: ShardSchema | None) -> None:
        """Raise InvalidUsage if a column has another name in a schema of the shard (None: unknown)."""
        if schema is None or schema.is_plain:  # the columns of a plain schema were never renamed
            return
        if self._schema.is_plain:  # its column numbers follow from the next schema
            self.first, self._schema = first_schema(self.shard)
        for name, number in self._schema.id_of.items():
            current = schema.name_of.get(number)
            if current == name:
                continue
            problem = "was dropped, so it cannot be used: create another one"
            if current is not None:
                problem = f"is now named {current!r}; rename it to {name!r} (Shard.alter)"
            raise InvalidUsage(f"column {name!r} of shard {self.shard.name!r} of {self._what} {problem}")

    @contextmanager
    def explain_renames(self) -> Iterator[None]:
        """Replace an InvalidUsage that a renamed column causes by the error of `check`, which names the remedy."""
        try:
            yield
        except InvalidUsage:
            self.check(current_schema(self.shard.view().schemas)[1])
            raise


def whole_events(listen: Listen, wait_s: float) -> Iterator[tuple[pa.Table, Antichain]]:
    """The updates before each frontier that is reached, and that frontier; waits at most `wait_s` for the first.

    The pieces of a large commit are combined, because an append contains a whole interval of times. Raises as
    `Listen.next_events`.
    """
    pieces: list[pa.Table] = []
    for event in listen.next_events(wait_s):
        pieces.append(event.updates)
        if event.lower != event.upper:
            yield pa.concat_tables(pieces), event.upper
            pieces = []


class Closeable(ABC):
    """A context manager that closes itself."""

    @abstractmethod
    def close(self) -> None:
        """Release what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FeedFollower(Closeable):
    """Follows a feed by a listen and writes to a shard. `_listen` is None if the listen has to start again."""

    _writer: WriteHandle
    _fed: FeedPosition
    _listen: Listen | None = None

    def step(self, wait_s: float = 0.0) -> bool:
        """Write the new updates of the feed; wait at most `wait_s` seconds for them. Whether there were any.

        A retry is safe after any error. Raises: InvalidUsage (`wait_s` is no number), as documented by the class, and
        as every call.
        """
        checked_wait("wait_s", wait_s)
        try:
            return self._step(wait_s)
        except Expired:  # its lease has lapsed, because `step` was not called for too long
            self._end()
            return self._step(wait_s)
        except BaseException:  # the next step restarts from the state of the shards
            self._end()
            raise

    @property
    def upper(self) -> int:
        """The shard contains the updates of the feed before this time, as far as this object knows. No I/O."""
        return self._fed.before

    def rebind(self) -> None:
        """Continue after others have written to the shard, which `step` rejects (Conflict).

        Their rows are kept. The updates of the feed at the times that they took are written at the first free time.
        Raises: Conflict (the shard is closed), and as every call.
        """
        self._end()
        self._fed.accept()

    def close(self) -> None:
        self._end()
        self._writer.close()

    @abstractmethod
    def _step(self, wait_s: float) -> bool:
        """Run one step; sets `_listen`."""

    def _end(self) -> None:
        if self._listen is not None:
            self._listen.close()
            self._listen = None
