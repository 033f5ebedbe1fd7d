"""Reclocking: a definite mapping of source positions to times, minted by any number of rivals, kept in a shard."""

from __future__ import annotations

import operator
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist.client.arguments import checked, checked_wait
from persist.client.connect import Client
from persist.client.listen import Listen
from persist.client.shard import Shard
from persist.core.errors import (
    Conflict,
    Corruption,
    Expired,
    Indeterminate,
    InvalidUsage,
    NotComplete,
    NotReadable,
    Unavailable,
    UpperMismatch,
    shown,
)
from persist.core.frontier import TIME_MAX
from persist.patterns.internal_shards import BoundedClock, Closing, OwnColumns, WallClock, confirmed_by, whole_events

# Positions in a source, as callers give them: checks, and what a binding is.


POSITION_MAX = 2**63 - 1  # the last int64
PARTITIONS_MAX = 10_000  # of one source
PARTITION_CHARS_MAX = 1_024
ONLY = ""  # the partition of a source that has just one
BEFORE_ALL = -1  # the position before the first one

Positions: TypeAlias = Mapping[str, int] | int
Column: TypeAlias = Any  # an Arrow or NumPy array of integers, or a list
Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Binding:
    """Every record at one of these positions, or before it, has a time of at most `time`. That never changes.

    `positions`: of each partition that was asked for, the last position with such a time.
    """

    positions: dict[str, int]
    time: int


def checked_positions(given: Positions) -> dict[str, int]:
    """The positions by partition; a number alone is that of the only partition, which is called "".

    Raises InvalidUsage (no partition, too many, a name that is none, a position that is no int64 from 0 on).
    """
    if not isinstance(given, Mapping):
        given = {ONLY: given}
    if not given:
        raise InvalidUsage("positions are empty; give the position of at least one partition")
    if len(given) > PARTITIONS_MAX:
        raise InvalidUsage(f"positions name {len(given)} partitions; a source has at most {PARTITIONS_MAX}")
    return {checked_partition(name): checked_position(name, position) for name, position in given.items()}


def checked_partition(name: object) -> str:
    """Raise InvalidUsage unless this can be the name of a partition."""
    if not isinstance(name, str) or len(name) > PARTITION_CHARS_MAX:
        raise InvalidUsage(f"partition {shown(name)} is no text of at most {PARTITION_CHARS_MAX} characters")
    if any("\ud800" <= char <= "\udfff" for char in name):
        raise InvalidUsage(f"partition {name!a:.100} is no Unicode text, since it has half a surrogate pair")
    return name


def checked_position(partition: str, value: object) -> int:
    """Raise InvalidUsage unless this is a position: an integer in [0, POSITION_MAX]."""
    try:
        if isinstance(value, bool):
            raise TypeError
        position = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidUsage(
            f"the position of partition {partition!r:.100} is {shown(value)}; it must be an int"
        ) from None
    if not 0 <= position <= POSITION_MAX:
        raise InvalidUsage(
            f"the position of partition {partition!r:.100} is {shown(position)}; it must be in [0, {POSITION_MAX}]"
        )
    return position


def checked_column(given: Column) -> Numbers:
    """A column of positions as int64. Raises InvalidUsage (not integers, a null, or one outside [0, POSITION_MAX])."""
    try:
        column = given if isinstance(given, (pa.Array, pa.ChunkedArray)) else pa.array(given)
        if len(column) == 0:
            return np.zeros(0, np.int64)
        if not pa.types.is_integer(column.type):
            raise InvalidUsage(f"a column of positions is {column.type}; it must have integers")
        if column.null_count:
            raise InvalidUsage(f"a column of positions has {column.null_count} nulls; leave these records out")
        found: Numbers = column.cast(pa.int64()).to_numpy().astype(np.int64, copy=False)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidUsage(f"a column of positions has values that are no int64: {error}") from error
    if found.min() < 0:
        raise InvalidUsage(f"a column of positions has {int(found.min())}; positions are in [0, {POSITION_MAX}]")
    return found


# What a process knows of bindings, in memory. Pure.
#
# The newest bindings are known, from some time on. Of each partition `floor` is where it stood then: which time a
# position up to it has, only the shard tells.


NOT_BOUND = -1  # in a column of times
_INT64 = "q"


@dataclass(slots=True)
class Tail:
    """The newest bindings of one partition, ascending both ways: positions in `(floor, head]`."""

    floor: int = BEFORE_ALL
    positions: array[int] = field(default_factory=lambda: array(_INT64))
    times: array[int] = field(default_factory=lambda: array(_INT64))

    @property
    def head(self) -> int:
        """The last position that is bound; BEFORE_ALL where none is."""
        return self.positions[-1] if self.positions else self.floor

    def at(self, time: int) -> int:
        """The last position that is bound to a time of at most `time`, if that is not before what is known."""
        count = bisect_right(self.times, time)
        return self.positions[count - 1] if count else self.floor

    def time_of(self, position: int) -> int:
        """The time of a position in `(floor, head]`."""
        return self.times[bisect_left(self.positions, position)]

    def times_of(self, positions: Numbers) -> Numbers:
        """The times of positions beyond `floor`; NOT_BOUND beyond `head`."""
        return times_by(np.array(self.positions, np.int64), np.array(self.times, np.int64), positions)

    def add(self, position: int, time: int) -> None:
        """One more binding, unless the position is bound already (a whole mint tells it again)."""
        if position > self.head:
            self.positions.append(position)
            self.times.append(time)

    def forget(self, time: int) -> None:
        """Forget the bindings up to that time."""
        count = bisect_right(self.times, time)
        if count:
            self.floor = self.positions[count - 1]
            del self.positions[:count], self.times[:count]


def times_by(bound: Numbers, times: Numbers, positions: Numbers) -> Numbers:
    """The time of each position, by the ascending positions `bound` to `times`; NOT_BOUND beyond the last one."""
    places = np.searchsorted(bound, positions, side="left")
    return np.append(times, NOT_BOUND)[places]


class KnownBindings:
    """Every binding with a time in `[since, upper)`, and where each partition stood before `since`."""

    def __init__(self) -> None:
        self.since = 0
        self.upper = 0
        self.rows = 0  # in the tails
        self.unsaved = 0  # rows since the last whole mint: a mint that is not whole adds to them
        self.tails: dict[str, Tail] = {}

    def __repr__(self) -> str:
        return f"Known([{self.since}, {self.upper}), {len(self.tails)} partitions, {self.rows} bindings)"

    def begin(self, time: int, heads: Mapping[str, int]) -> None:
        """Begin with a whole mint at `time`, which tells where every partition stood then."""
        self.since = time + 1
        self.upper = max(self.upper, self.since)
        self.tails = {partition: Tail(floor=position) for partition, position in heads.items()}

    def head(self, partition: str) -> int:
        """The last position of the partition that is bound; BEFORE_ALL where none is."""
        tail = self.tails.get(partition)
        return BEFORE_ALL if tail is None else tail.head

    def heads(self) -> dict[str, int]:
        """The same of every partition."""
        return {partition: tail.head for partition, tail in self.tails.items()}

    def add(self, rows: Iterable[tuple[str, int, int]], whole: bool) -> None:
        """More bindings (partition, position, time), in order of their times. `whole`: the last mint of them was."""
        before = self.rows
        for partition, position, time in rows:
            tail = self.tails.setdefault(partition, Tail())
            count = len(tail.times)
            tail.add(position, time)
            self.rows += len(tail.times) - count
        self.unsaved = 0 if whole else self.unsaved + self.rows - before

    def reach(self, upper: int) -> None:
        """Every time before `upper` is complete."""
        self.upper = max(self.upper, upper)

    def trim(self, rows_max: int) -> None:
        """Forget the older half of the times once there are more than `rows_max` bindings."""
        if self.rows <= rows_max:
            return
        times = np.concatenate([np.array(tail.times, np.int64) for tail in self.tails.values()])
        middle = int(np.median(times))
        for tail in self.tails.values():
            tail.forget(middle)
        self.since = max(self.since, middle + 1)
        self.rows = sum(len(tail.times) for tail in self.tails.values())

    def at(self, time: int) -> dict[str, int]:
        """Where each partition stood at `time`, which is not before `since - 1`."""
        found = {partition: tail.at(time) for partition, tail in self.tails.items()}
        return {partition: position for partition, position in found.items() if position != BEFORE_ALL}

    def not_covered(self, positions: Mapping[str, int]) -> dict[str, int]:
        """Those of the positions that are not bound yet."""
        return {partition: at for partition, at in positions.items() if at > self.head(partition)}

    def past(self, positions: Mapping[str, int]) -> dict[str, int]:
        """Those of the positions of whose time only the shard tells."""
        return {
            partition: at
            for partition, at in positions.items()
            if partition in self.tails and at <= self.tails[partition].floor
        }

    def covering(self, positions: Mapping[str, int]) -> Binding:
        """The first binding that covers all of them, which are bound, none of them in the past."""
        time = max(self.tails[partition].time_of(position) for partition, position in positions.items())
        return Binding({partition: self.tails[partition].at(time) for partition in positions}, time)


# Bindings as rows of a shard: the columns, and reads that touch few of them.
#
# A row `(partition, position, time, whole)` is written at the time `time`. A mint has a row for each partition that it
# moves. A **whole** one has a row for every partition there is, so whoever reads from it on knows where each stands; in
# it a partition that has not moved repeats its position, which binds nothing new. No row is ever taken away, so what is
# read does not depend on how much history the shard keeps.


PARTITION, POSITION, TIME, WHOLE = "partition", "position", "time", "whole"
SCHEMA = pa.schema(
    [
        pa.field(PARTITION, pa.string(), nullable=False),
        pa.field(POSITION, pa.int64(), nullable=False),
        pa.field(TIME, pa.int64(), nullable=False),
        pa.field(WHOLE, pa.bool_(), nullable=False),
    ]
)
KEY = (PARTITION, POSITION)
WINDOW = 2**14  # times; the first look back
WINDOW_GROWS = 4  # times as long is each further look back


def rows_of(positions: dict[str, int], time: int, *, whole: bool) -> pa.Table:
    """The rows of one mint."""
    count = len(positions)
    columns = [
        pa.array(positions, pa.string()),
        pa.array(positions.values(), pa.int64()),
        pa.repeat(pa.scalar(time, pa.int64()), count),
        pa.repeat(whole, count),
    ]
    return pa.Table.from_arrays(columns, schema=SCHEMA)


def in_time(rows: pa.Table) -> list[tuple[str, int, int]]:
    """The rows as (partition, position, time), by time. They are few: of mints, not of records."""
    ordered = rows.select([PARTITION, POSITION, TIME]).sort_by([(TIME, "ascending"), (POSITION, "ascending")])
    return list(zip(*(column.to_pylist() for column in ordered.columns), strict=True))


def since_a_whole_mint(own: OwnColumns, time: int) -> tuple[int, dict[str, int], pa.Table] | None:
    """The last whole mint up to `time`: its time, where every partition stood then, and the rows that came after it.

    None where there is no binding up to `time`. Looks back further and further, so it reads a few times as many rows
    as were written since that mint. Raises Corruption (there are bindings, and the first ones are gone).
    """
    start, window, rows = time + 1, WINDOW, SCHEMA.empty_table()
    while start > 0:
        start, window = max(0, time + 1 - window), window * WINDOW_GROWS
        rows = _between(own, start, time)
        whole = rows.filter(rows.column(WHOLE))
        if len(whole):
            at = pc.max(whole.column(TIME)).as_py()
            heads = whole.filter(pc.equal(whole.column(TIME), at))
            later = rows.filter(pc.greater(rows.column(TIME), at))
            stands = zip(heads.column(PARTITION).to_pylist(), heads.column(POSITION).to_pylist(), strict=True)
            return at, dict(stands), later
    if len(rows):
        raise Corruption(
            f"shard {own.shard.name!r} has bindings up to time {time}, and the first ones are gone: somebody has taken "
            "rows away; restore it to a time before that (Shard.restore)"
        )
    return None


def _between(own: OwnColumns, start: int, time: int) -> pa.Table:
    where = f"{TIME} >= {start} AND {TIME} <= {time}"
    with own.told(), own.shard.snapshot(where=where, purpose="bindings") as found:
        own.check(found.schema)
        return found.to_arrow().select(SCHEMA.names)


def times_in_the_past(own: OwnColumns, partition: str, positions: Numbers) -> Numbers:
    """The times of positions, none of them beyond the last that is bound: by reading the bindings around them."""
    found = np.full(len(positions), NOT_BOUND, np.int64)
    with (
        own.told(),
        own.shard.snapshot(
            start_key=(partition, int(positions.min())),
            key_prefix=(partition,),
            columns=[POSITION, TIME],
            purpose="bindings",
        ) as snapshot,
    ):
        own.check(snapshot.schema)
        for rows in snapshot.batches():
            missing = found == NOT_BOUND
            found[missing] = _times_by_rows(rows, positions[missing])
            if not (found == NOT_BOUND).any():  # what covers the last one may lie beyond it, and was read by now
                break
    return found


def _times_by_rows(rows: pa.Table, positions: Numbers) -> Numbers:
    """The times by some adjacent rows of one partition. Of rows with one position the earliest counts."""
    ordered = rows.sort_by([(POSITION, "ascending"), (TIME, "ascending")])
    bound, times = (ordered.column(name).to_numpy() for name in (POSITION, TIME))
    return times_by(bound, times, positions)


# Bindings: a definite remap of positions in a source to times, minted by any number of rivals.


TRIES_MAX = 100  # of a mint: each failure is a rival's mint
WAIT_S = 60.0  # for a mint of a rival


class Bindings(Closing):
    """Which time each position of a source has: once bound, for ever. `Bindings.open` gives one. Thread-safe.

    Times strictly grow from binding to binding. Any number of processes open the bindings of one shard, and each sees
    what the others have minted. Calls of one object take turns. Beside what its docstring names every call may raise
    Unavailable, Overloaded, Unauthorized, Forbidden and UnknownShard. Repeating a call is always safe: what is bound
    already is answered, and not bound again.
    """

    WHOLE_EVERY_ROWS: ClassVar[int] = 4_096
    """A mint is whole once so many rows were written since the last whole one, or four for each partition."""

    KNOWN_ROWS_MAX: ClassVar[int] = 1_000_000
    """Bindings that are kept in memory; of older ones the shard is asked."""

    def __init__(self, shard: Shard, clock: WallClock | None) -> None:
        self.shard = shard
        self._own = OwnColumns(shard, "bindings")
        self._own.check(shard.schema)
        self._lock = threading.Lock()
        self._writer = shard.open_writer(purpose="bindings")
        self._listen: Listen | None = None
        self._known = KnownBindings()
        self._clock = None if clock is None else BoundedClock(clock, confirmed_by(shard))
        self._load()

    @classmethod
    def open(cls, client: Client, shard: str, *, clock: WallClock | None = None) -> Self:
        """The bindings that the shard called `shard` keeps. It is made if it is not there.

        Args:
            client: by which it is reached.
            shard: its name. It holds bindings alone, and keeps history for ever.
            clock: times are its milliseconds since 1970, as far as the stores confirm them; None: times count up
                from 0.
        Raises: ShardExists (a shard of that name has other columns), InvalidUsage (it has a policy of rows, which
            would take bindings away, or its columns have other names by now), Corruption (somebody has taken bindings
            away).
        """
        checked("client", client, Client)
        found = OwnColumns.open(client, shard, "bindings", SCHEMA, KEY).shard
        if found.settings.rows is not None:
            raise InvalidUsage(
                f"shard {shard!r} has a policy of rows, which takes bindings away; end it (Shard.retain)"
            )
        return cls(found, clock)

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

    # --- how, with the lock held

    def _minted(self, moved: dict[str, int], upper: int = 0) -> bool:
        """Try to bind these positions, or just let time go on; False where a rival was quicker, who is learnt of."""
        known = self._known
        count = len(known.tails.keys() | moved.keys())
        if count > PARTITIONS_MAX:
            raise InvalidUsage(f"the source would have {count} partitions; it has at most {PARTITIONS_MAX}")
        time = known.upper if self._clock is None else self._clock.time(known.upper)
        time = max(time, upper - 1)
        least = max(self.WHOLE_EVERY_ROWS, 4 * count)
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
        known.trim(self.KNOWN_ROWS_MAX)
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

    def _read(self, time: int) -> KnownBindings | None:
        """What the shard tells of the bindings up to `time`, from the last whole mint before it on."""
        found = since_a_whole_mint(self._own, time)
        if found is None:
            return None
        begin, heads, later = found
        known = KnownBindings()
        known.begin(begin, heads)
        known.add(in_time(later), whole=False)
        return known

    def _load(self) -> None:
        """Begin anew with what the shard tells now."""
        upper = self.shard.upper().element
        if upper is None:
            raise Conflict(f"shard {self.shard.name!r} of bindings is closed: nothing can be bound any more")
        self._known = (self._read(upper - 1) if upper else None) or KnownBindings()
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
        self._known.trim(self.KNOWN_ROWS_MAX)
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
