"""Bindings: a definite remap of positions in a source to times, minted by any number of rivals."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.client.arguments import check_numbers, checked, checked_wait
from persist.client.connect import Client
from persist.client.listen import Listen
from persist.client.shard import Shard
from persist.core.antichain import TIME_MAX
from persist.core.errors import (
    Conflict,
    Expired,
    Indeterminate,
    InvalidUsage,
    NotComplete,
    NotReadable,
    Unavailable,
    UpperMismatch,
    shown,
)
from persist.patterns.events import whole_events
from persist.patterns.following import Clock, Followed, confirmed_by
from persist.patterns.known import NOT_BOUND, Known
from persist.patterns.own_columns import OwnColumns
from persist.patterns.positions import (
    PARTITIONS_MAX,
    Binding,
    Column,
    Positions,
    checked_column,
    checked_partition,
    checked_positions,
)
from persist.patterns.stored import (
    KEY,
    PARTITION,
    POSITION,
    SCHEMA,
    TIME,
    WHOLE,
    in_time,
    rows_of,
    since_a_whole_mint,
    times_in_the_past,
)

TRIES_MAX = 100  # of a mint: each failure is a rival's mint
WAIT_S = 60.0  # for a mint of a rival


@dataclass(frozen=True, slots=True)
class BindingsSettings:
    """How much is written and kept in memory.

    A mint is whole once `whole_every_rows` rows were written since the last whole one, or four for each partition.
    `known_rows_max`: so many bindings are kept in memory; of older ones the shard is asked.
    """

    whole_every_rows: int = 4_096
    known_rows_max: int = 1_000_000

    def __post_init__(self) -> None:
        check_numbers(self)


class Bindings:
    """Which time each position of a source has: once bound, for ever. `Bindings.open` gives one. Thread-safe.

    Times strictly grow from binding to binding. Any number of processes open the bindings of one shard, and each sees
    what the others have minted. Calls of one object take turns. Beside what its docstring names every call may raise
    Unavailable, Overloaded, Unauthorized, Forbidden and UnknownShard. Repeating a call is always safe: what is bound
    already is answered, and not bound again.
    """

    def __init__(self, shard: Shard, clock: Clock | None, settings: BindingsSettings) -> None:
        self.shard = shard
        self._own = OwnColumns(shard, "bindings")
        self._own.check(shard.schema)
        self._settings = settings
        self._lock = threading.Lock()
        self._writer = shard.open_writer(purpose="bindings")
        self._listen: Listen | None = None
        self._known = Known()
        self._clock = None if clock is None else Followed(clock, confirmed_by(shard))
        self._load()

    @classmethod
    def open(
        cls, client: Client, shard: str, *, clock: Clock | None = None, settings: BindingsSettings | None = None
    ) -> Self:
        """The bindings that the shard called `shard` keeps. It is made if it is not there.

        Args:
            client: by which it is reached.
            shard: its name. It holds bindings alone, and keeps history for ever.
            clock: times are its milliseconds since 1970, as far as the stores confirm them; None: times count up
                from 0.
            settings: bounds.
        Raises: ShardExists (a shard of that name has other columns), InvalidUsage (it has a policy of rows, which
            would take bindings away, or its columns have other names by now), Corruption (somebody has taken bindings
            away).
        """
        checked("client", client, Client)
        checked("settings", settings, BindingsSettings, type(None))
        found = OwnColumns.open(client, shard, "bindings", SCHEMA, KEY).shard
        if found.settings.rows is not None:
            raise InvalidUsage(
                f"shard {shard!r} has a policy of rows, which takes bindings away; end it (Shard.retain)"
            )
        return cls(found, clock, settings or BindingsSettings())

    def __repr__(self) -> str:
        return f"Bindings({self.shard.name!r}, {self._known!r})"

    @property
    def upper(self) -> int:
        """Every time before it is complete, as far as this object knows: no position will be bound to one. No I/O."""
        return self._known.upper

    @property
    def heads(self) -> dict[str, int]:
        """The last position of each partition that is bound, as far as this object knows. No I/O."""
        with self._lock:
            return self._known.heads()

    @property
    def follows_clock(self) -> bool:
        """Whether times follow the clock that was given: the stores have confirmed it when they were asked last."""
        return self._clock is not None and self._clock.is_followed

    # --- asking and minting

    def get_binding(self, positions: Positions) -> Binding:
        """The binding that covers these positions; it is minted where there is none. Repeating it is safe.

        Args:
            positions: a position for each partition, or a number alone for a source that has just one. There are
                records at least up to there. A partition that was never named begins. A position before others that
                are bound already is covered by what is bound.
        Returns: the first binding that covers all of them.
        Raises: InvalidUsage (they are no positions, or the source has more than 10,000 partitions), Unavailable (rivals
            were quicker each of many times: retry).
        """
        asked = checked_positions(positions)
        with self._lock:
            for _ in range(TRIES_MAX):
                moved = self._known.not_covered(asked)
                if not moved or self._minted(moved):
                    return self._covering(asked)
            raise Unavailable(f"rivals minted bindings in shard {self.shard.name!r} at each try; retry")

    def advance(self, upper: int = 0) -> int:
        """Let time go on without a new position: times before the clock, or the next one, become complete.

        Args:
            upper: times before this one become complete as well.
        Returns: the upper afterwards. A rival that is quicker lets it go on as well.
        Raises: InvalidUsage (`upper` is no time).
        """
        checked("upper", upper, int)
        with self._lock:
            self._minted({}, upper)
            return self._known.upper

    def refresh(self, wait_s: float = 0.0) -> int:
        """Learn what rivals have minted since; wait at most `wait_s` for something new. Returns: the upper then.

        Raises: InvalidUsage (`wait_s` is no number).
        """
        checked_wait("wait_s", wait_s)
        with self._lock:
            self._learn(wait_s)
            return self._known.upper

    # --- looking things up

    def upto(self, time: int, *, wait_s: float = 0.0) -> dict[str, int]:
        """Where each partition stands at `time`: records up to there have this time or an earlier one, for ever.

        Args:
            time: from -1 on, where no partition has begun.
            wait_s: seconds to wait until `time` is complete.
        Raises: InvalidUsage (no such time), Unavailable (`time` is not complete: more positions may be bound to it).
        """
        checked("time", time, int)
        if not -1 <= time <= TIME_MAX:
            raise InvalidUsage(f"time is {shown(time)}; it must be in [-1, {TIME_MAX}]")
        checked_wait("wait_s", wait_s)
        with self._lock:
            if time >= self._known.upper:
                self._learn_until(time + 1, wait_s)
            return self._at(time)

    def times_of(self, partition: str, positions: Column) -> pa.Array:
        """The time of each position of one partition.

        Args:
            partition: its name; "" is that of a source that has just one.
            positions: an Arrow or NumPy array of integers, or a list.
        Returns: an int64 array, in the same order; null where a position is not bound yet.
        Raises: InvalidUsage (no such partition can be, or these are no positions).
        """
        checked_partition(partition)
        asked = checked_column(positions)
        with self._lock:
            tail = self._known.tails.get(partition)
            if len(asked) and (tail is None or asked.max() > tail.head):
                self._learn(0.0)
                tail = self._known.tails.get(partition)
            if tail is None or not len(asked):
                return pa.nulls(len(asked), pa.int64())
            found = tail.times_of(asked)
            past = asked <= tail.floor
            if past.any():
                found[past] = times_in_the_past(self._own, partition, asked[past])
        return pa.array(found, pa.int64(), mask=found == NOT_BOUND)

    def listen(self, time: int) -> Listen:
        """The bindings with times after `time` (-1: all of them), in order of time, as rows of the shard.

        Raises: as `Shard.listen`; NotReadable only where the history of the shard was shortened.
        """
        with self._own.told():
            found = self.shard.listen(time, columns=[PARTITION, POSITION, TIME], purpose="bindings")
        found.known = self._own.first  # it ends where the columns get other names
        return found

    def close(self) -> None:
        """Give back what it holds. Raises what every call may."""
        with self._lock:
            self._end_listening()
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    # --- how, with the lock held

    def _minted(self, moved: dict[str, int], upper: int = 0) -> bool:
        """Try to bind these positions, or just let time go on; False where a rival was quicker, who is learnt of."""
        known = self._known
        count = len(known.tails.keys() | moved.keys())
        if count > PARTITIONS_MAX:
            raise InvalidUsage(f"the source would have {count} partitions; it has at most {PARTITIONS_MAX}")
        time = known.upper if self._clock is None else self._clock.time(known.upper)
        time = max(time, upper - 1)
        least = max(self._settings.whole_every_rows, 4 * count)
        whole = bool(moved) and (not known.tails or known.unsaved + len(moved) > least)
        written = {**known.heads(), **moved} if whole else moved
        try:
            rows = self._own.rows(rows_of(written, time, whole=whole))
            self._writer.compare_and_append(rows, known.upper, time + 1)
        except UpperMismatch as error:
            self._learn_until((error.details.get("actual") or [None])[0], WAIT_S)
            return False
        except Indeterminate:  # it may have landed, or may yet; what the shard shows decides, for all of us
            self._learn(0.0)
            return False
        known.add(((partition, position, time) for partition, position in moved.items()), whole)
        known.reach(time + 1)
        known.trim(self._settings.known_rows_max)
        return True

    def _covering(self, asked: dict[str, int]) -> Binding:
        past = self._known.past(asked)
        if not past:
            return self._known.covering(asked)
        times = [times_in_the_past(self._own, name, np.array([at], np.int64))[0] for name, at in past.items()]
        recent = {partition: at for partition, at in asked.items() if partition not in past}
        time = int(max(times))
        if recent:
            time = max(time, self._known.covering(recent).time)
        stand = self._at(time)
        return Binding({partition: stand[partition] for partition in asked}, time)

    def _at(self, time: int) -> dict[str, int]:
        if time >= self._known.since - 1:
            return self._known.at(time)
        known = self._read(time)
        return {} if known is None else known.at(time)

    def _read(self, time: int) -> Known | None:
        """What the shard tells of the bindings up to `time`, from the last whole mint before it on."""
        found = since_a_whole_mint(self._own, time)
        if found is None:
            return None
        begin, heads, later = found
        known = Known()
        known.begin(begin, heads)
        known.add(in_time(later), whole=False)
        return known

    def _load(self) -> None:
        """Begin anew with what the shard tells now."""
        upper = self.shard.upper().element
        if upper is None:
            raise Conflict(f"shard {self.shard.name!r} of bindings is closed: nothing can be bound any more")
        self._known = (self._read(upper - 1) if upper else None) or Known()
        self._known.reach(upper)

    def _learn_until(self, upper: int | None, wait_s: float) -> None:
        """Learn until every time before `upper` is complete. Raises NotComplete (it is not, after `wait_s`)."""
        if upper is None:
            raise Conflict(f"shard {self.shard.name!r} of bindings is closed: nothing can be bound any more")
        before = -1
        while before < self._known.upper < upper:  # each step learns of something, or is the last one
            before = self._known.upper
            self._learn(wait_s)
        if self._known.upper < upper:
            raise NotComplete(
                f"of the bindings in shard {self.shard.name!r} times before {self._known.upper} are complete, not yet "
                f"all before {upper}; wait longer, or mint",
                as_of=upper - 1,
                upper=[self._known.upper],
            )

    def _learn(self, wait_s: float) -> None:
        """Take what has come to the shard, waiting at most so long for the first of it.

        A step may show no more than this process has in memory; one that shows nothing new has asked the log.
        """
        before = self._known.upper
        for _ in range(TRIES_MAX):
            if not self._took_some(0.0):
                break
        if wait_s > 0 and self._known.upper == before:
            self._took_some(wait_s)

    def _took_some(self, wait_s: float) -> bool:
        """One step of the listener; whether anything came."""
        try:
            return self._take(wait_s)
        except Expired:  # it was not asked for so long that its lease has lapsed
            self._end_listening()
            return self._take(wait_s)
        except NotReadable:  # the history of the shard was shortened
            self._end_listening()
            self._load()
            return False
        except InvalidUsage:  # what the listener gave was not taken
            self._end_listening()
            raise

    def _take(self, wait_s: float) -> bool:
        if self._listen is None:
            self._listen = self.shard.listen(self._known.upper - 1, purpose="bindings")
        before = self._listen.frontier
        for updates, upper in whole_events(self._listen, wait_s):
            self._own.check(self._listen.schema)
            self._took(updates, upper.element)
        self._known.trim(self._settings.known_rows_max)
        return self._listen.frontier != before

    def _took(self, updates: pa.Table, upper: int | None) -> None:
        known = self._known
        new = updates.filter(pc.greater_equal(updates.column(TIME), known.upper))  # its own mints are known already
        whole = pc.max(new.filter(new.column(WHOLE)).column(TIME)).as_py()
        rows = in_time(new)
        if whole is not None:
            known.add([row for row in rows if row[2] <= whole], whole=True)
        known.add([row for row in rows if whole is None or row[2] > whole], whole=False)
        known.reach(TIME_MAX if upper is None else upper)

    def _end_listening(self) -> None:
        if self._listen is not None:
            self._listen.close()
            self._listen = None
