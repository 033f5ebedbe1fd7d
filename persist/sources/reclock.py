"""Reclocking: a definite mapping of source positions to times, minted by any number of rivals, stored in a shard.

A row `(partition, position, time, whole)` is written at the time `time`. A mint has a row for each partition that it
advances. A **whole** mint has a row for every partition, so that reading from it on is enough to know the head of each;
a partition that has not advanced repeats its position, which binds nothing. No row is ever deleted, so reads do not
depend on how much history the shard keeps.
"""

from __future__ import annotations

import operator
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from persist.client.arguments import check_int, checked, checked_wait
from persist.client.client import Client
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
from persist.sources.internal_shards import Closeable, InternalColumns, WallClock, bounded_clock, whole_events

POSITION_MAX = 2**63 - 1  # the last int64
PARTITIONS_MAX = 10_000  # of one source
PARTITION_CHARS_MAX = 1_024
ONLY = ""  # the partition of a source with a single one
BEFORE_ALL = -1  # the position before the first one
NOT_BOUND = -1  # in a column of times
MINT_TRIES_MAX = 100  # a try fails by a mint of a rival
WAIT_S = 60.0  # for a mint of a rival
WINDOW = 2**14  # times that the first read looks back
WINDOW_GROWS = 4  # the factor of each further read
PARTITION, POSITION, TIME, WHOLE = "partition", "position", "time", "whole"
_COLUMNS = {PARTITION: pa.string(), POSITION: pa.int64(), TIME: pa.int64(), WHOLE: pa.bool_()}
SCHEMA = pa.schema([pa.field(name, kind, nullable=False) for name, kind in _COLUMNS.items()])
KEY = (PARTITION, POSITION)
_INT64 = "q"

Positions: TypeAlias = Mapping[str, int] | int
Column: TypeAlias = Any  # an Arrow or NumPy array of integers, or a list
Numbers: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Binding:
    """Every record up to one of these positions has a time of at most `time`. That never changes.

    `positions`: the last position with such a time, for each requested partition.
    """

    positions: dict[str, int]
    time: int


def checked_positions(positions: Positions) -> dict[str, int]:
    """The positions by partition. A single number is the position of the only partition, "".

    Raises InvalidUsage (no partition, too many, an invalid name or position).
    """
    if not isinstance(positions, Mapping):
        positions = {ONLY: positions}
    if not positions:
        raise InvalidUsage("positions are empty; pass the position of at least one partition")
    if len(positions) > PARTITIONS_MAX:
        raise InvalidUsage(f"positions name {len(positions)} partitions; a source has at most {PARTITIONS_MAX}")
    return {checked_partition(name): checked_position(name, position) for name, position in positions.items()}


def checked_partition(name: object) -> str:
    """Raise InvalidUsage unless this is a valid name of a partition."""
    if not isinstance(name, str) or len(name) > PARTITION_CHARS_MAX:
        raise InvalidUsage(f"partition {shown(name)} is no text of at most {PARTITION_CHARS_MAX} characters")
    if any("\ud800" <= char <= "\udfff" for char in name):
        raise InvalidUsage(f"partition {name!a:.100} is not valid Unicode: it contains half a surrogate pair")
    return name


def checked_position(partition: str, value: object) -> int:
    """Raise InvalidUsage unless this is a position: an integer in [0, POSITION_MAX]."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool) and 0 <= operator.index(value) <= POSITION_MAX:
        return operator.index(value)
    raise InvalidUsage(
        f"the position of partition {shown(partition)} is {shown(value)}; it must be an int, and must be in "
        f"[0, {POSITION_MAX}]"
    )


def checked_column(values: Column) -> Numbers:
    """A column of positions as int64. Raises InvalidUsage (not integers, a null, or one outside [0, POSITION_MAX])."""
    try:
        column = values if isinstance(values, (pa.Array, pa.ChunkedArray)) else pa.array(values)
        if len(column) == 0:
            return np.zeros(0, np.int64)
        if not pa.types.is_integer(column.type):
            raise InvalidUsage(f"a column of positions is {column.type}; it must have integers")
        if column.null_count:
            raise InvalidUsage(f"a column of positions has {column.null_count} nulls; omit these records")
        positions: Numbers = column.cast(pa.int64()).to_numpy().astype(np.int64, copy=False)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidUsage(f"a column of positions has values that are no int64: {error}") from error
    if positions.min() < 0:
        raise InvalidUsage(f"a column of positions has {int(positions.min())}; positions are in [0, {POSITION_MAX}]")
    return positions


@dataclass(slots=True)
class Tail:
    """The newest bindings of one partition, with ascending times, for positions in `(floor, head]`.

    The times of positions up to `floor` are only in the shard.
    """

    floor: int = BEFORE_ALL
    positions: array[int] = field(default_factory=lambda: array(_INT64))
    times: array[int] = field(default_factory=lambda: array(_INT64))

    @property
    def head(self) -> int:
        """The last bound position, or BEFORE_ALL."""
        return self.positions[-1] if self.positions else self.floor

    def at(self, time: int) -> int:
        """The last position that is bound to a time of at most `time`; not below `floor`."""
        count = bisect_right(self.times, time)
        return self.positions[count - 1] if count else self.floor

    def times_of(self, positions: Numbers) -> Numbers:
        """The times of positions beyond `floor`; NOT_BOUND beyond `head`."""
        return times_by(np.array(self.positions, np.int64), np.array(self.times, np.int64), positions)

    def add(self, position: int, time: int) -> bool:
        """Add a binding; False: the position is already bound (a whole mint repeats it)."""
        if position <= self.head:
            return False
        self.positions.append(position)
        self.times.append(time)
        return True

    def forget(self, time: int) -> None:
        """Drop the bindings up to that time."""
        count = bisect_right(self.times, time)
        if count:
            self.floor = self.positions[count - 1]
            del self.positions[:count], self.times[:count]


def times_by(bound: Numbers, times: Numbers, positions: Numbers) -> Numbers:
    """The time of each position, by the ascending positions `bound` to `times`; NOT_BOUND beyond the last one."""
    indices = np.searchsorted(bound, positions, side="left")
    return np.append(times, NOT_BOUND)[indices]


class KnownBindings:
    """The bindings in memory: those with a time in `[since, upper)`, and the head of each partition before `since`."""

    def __init__(self) -> None:
        self.since = 0
        self.upper = 0
        self.rows = 0  # in the tails
        self.unsaved = 0  # rows since the last whole mint
        self.tails: dict[str, Tail] = {}

    def begin(self, time: int, heads: Mapping[str, int]) -> None:
        """Begin with a whole mint at `time`, which has the head of every partition."""
        self.since = time + 1
        self.upper = max(self.upper, self.since)
        self.tails = {partition: Tail(floor=position) for partition, position in heads.items()}

    def head(self, partition: str) -> int:
        """The last bound position of the partition, or BEFORE_ALL."""
        tail = self.tails.get(partition)
        return BEFORE_ALL if tail is None else tail.head

    def heads(self) -> dict[str, int]:
        return {partition: tail.head for partition, tail in self.tails.items()}

    def add(self, rows: Iterable[tuple[str, int, int]], whole: bool) -> None:
        """Add bindings (partition, position, time), by ascending time. `whole`: the last mint of them is whole."""
        before = self.rows
        for partition, position, time in rows:
            self.rows += self.tails.setdefault(partition, Tail()).add(position, time)
        self.unsaved = 0 if whole else self.unsaved + self.rows - before

    def reach(self, upper: int) -> None:
        """Record that every time before `upper` is complete."""
        self.upper = max(self.upper, upper)

    def trim(self, rows_max: int) -> None:
        """Drop the older half of the times if there are more than `rows_max` bindings."""
        if self.rows <= rows_max:
            return
        times = np.concatenate([np.array(tail.times, np.int64) for tail in self.tails.values()])
        middle = int(np.median(times))
        for tail in self.tails.values():
            tail.forget(middle)
        self.since = max(self.since, middle + 1)
        self.rows = sum(len(tail.times) for tail in self.tails.values())

    def at(self, time: int) -> dict[str, int]:
        """The head of each partition at `time`, which is not before `since - 1`."""
        heads = {partition: tail.at(time) for partition, tail in self.tails.items()}
        return {partition: position for partition, position in heads.items() if position != BEFORE_ALL}


def rows_of(positions: dict[str, int], time: int, *, whole: bool) -> pa.Table:
    count = len(positions)
    columns = {PARTITION: [*positions], POSITION: [*positions.values()], TIME: [time] * count, WHOLE: [whole] * count}
    return pa.table(columns, schema=SCHEMA)


def in_time(rows: pa.Table) -> list[tuple[str, int, int]]:
    """The rows as (partition, position, time), by time. There are few, because they are mints, not records."""
    ordered = rows.select([PARTITION, POSITION, TIME]).sort_by([(TIME, "ascending"), (POSITION, "ascending")])
    return list(zip(*(column.to_pylist() for column in ordered.columns), strict=True))


def since_a_whole_mint(columns: InternalColumns, time: int) -> tuple[int, dict[str, int], pa.Table] | None:
    """The last whole mint up to `time`: its time, the head of every partition, and the later rows.

    None if there is no binding up to `time`. Looks back in growing windows, so it reads a few times as many rows as
    were written since that mint. Raises Corruption (the first bindings are missing).
    """
    start, window, rows = time + 1, WINDOW, SCHEMA.empty_table()
    while start > 0:
        start, window = max(0, time + 1 - window), window * WINDOW_GROWS
        where = f"{TIME} >= {start} AND {TIME} <= {time}"
        with columns.explain_renames(), columns.shard.snapshot(where=where, purpose="bindings") as snapshot:
            columns.check(snapshot.schema)
            rows = snapshot.to_arrow().select(SCHEMA.names)
        whole = rows.filter(rows.column(WHOLE))
        if len(whole):
            mint_time = pc.max(whole.column(TIME)).as_py()
            mint = whole.filter(pc.equal(whole.column(TIME), mint_time))
            later = rows.filter(pc.greater(rows.column(TIME), mint_time))
            heads = zip(mint.column(PARTITION).to_pylist(), mint.column(POSITION).to_pylist(), strict=True)
            return mint_time, dict(heads), later
    if len(rows):
        raise Corruption(
            f"shard {columns.shard.name!r} has bindings up to time {time}, but the first ones were deleted; restore it "
            "to an earlier time (Shard.restore)"
        )
    return None


def times_in_the_past(columns: InternalColumns, partition: str, positions: Numbers) -> Numbers:
    """Read the times of bound positions from the shard."""
    times = np.full(len(positions), NOT_BOUND, np.int64)
    with (
        columns.explain_renames(),
        columns.shard.snapshot(
            start_key=(partition, int(positions.min())),
            key_prefix=(partition,),
            columns=[POSITION, TIME],
            purpose="bindings",
        ) as snapshot,
    ):
        columns.check(snapshot.schema)
        for rows in snapshot.batches():
            missing = times == NOT_BOUND
            # Of several rows with a position the earliest counts.
            ordered = rows.sort_by([(POSITION, "ascending"), (TIME, "ascending")])
            bound, bound_times = (ordered.column(name).to_numpy() for name in (POSITION, TIME))
            times[missing] = times_by(bound, bound_times, positions[missing])
            if not (times == NOT_BOUND).any():  # the binding of the last one may be beyond it, and was read by now
                break
    return times


class Bindings(Closeable):
    """The permanent times of the positions of a source, returned by `Bindings.open`. Thread-safe.

    Times strictly grow from binding to binding. Any number of processes may open the bindings of one shard, and each
    sees the mints of the others. Calls of one object are serialized. In addition to the documented errors every call
    may raise Unavailable, Overloaded, Unauthorized, Forbidden and UnknownShard. A retry is always safe: a bound
    position is never bound again.
    """

    WHOLE_EVERY_ROWS: ClassVar[int] = 4_096
    """A mint is whole if so many rows were written since the last whole one, or four for each partition."""

    KNOWN_ROWS_MAX: ClassVar[int] = 1_000_000
    """Bindings that are kept in memory; older ones are read from the shard."""

    def __init__(self, shard: Shard, clock: WallClock | None) -> None:
        self.shard = shard
        self._columns = InternalColumns(shard, "bindings")
        self._columns.check(shard.schema)
        self._lock = threading.Lock()
        self._writer = shard.open_writer(purpose="bindings")
        self._listen: Listen | None = None
        self._known = KnownBindings()
        self._clock = bounded_clock(clock, shard)
        self._load()

    @classmethod
    def open(cls, client: Client, shard: str, *, clock: WallClock | None = None) -> Self:
        """The bindings in the shard called `shard`. It is created if it does not exist.

        Args:
            shard: its name. It contains only bindings, and keeps unlimited history.
            clock: times are its milliseconds since 1970, as far as the stores confirm them; None: times count up
                from 0.
        Raises: ShardExists (a shard of that name has other columns), InvalidUsage (it has a retention policy of rows,
            which would delete bindings, or its columns were renamed), Corruption (bindings were deleted).
        """
        checked("client", client, Client)
        opened = InternalColumns.open(client, shard, "bindings", SCHEMA, KEY).shard
        if opened.settings.rows is not None:
            raise InvalidUsage(
                f"shard {shard!r} has a retention policy of rows, which deletes bindings; end it (Shard.retain)"
            )
        return cls(opened, clock)

    def __repr__(self) -> str:
        known = self._known
        partitions, interval = len(known.tails), f"[{known.since}, {known.upper})"
        return f"Bindings({self.shard.name!r}, {interval}, {partitions} partitions, {known.rows} bindings)"

    @property
    def upper(self) -> int:
        """Times before it are complete, as far as this object knows: no position will be bound to them. No I/O."""
        return self._known.upper

    @property
    def heads(self) -> dict[str, int]:
        """The last bound position of each partition, as far as this object knows. No I/O."""
        with self._lock:
            return self._known.heads()

    @property
    def follows_clock(self) -> bool:
        """Whether times follow the clock: it was confirmed by the stores at the last attempt."""
        return self._clock is not None and self._clock.is_followed

    # --- minting

    def get_binding(self, positions: Positions) -> Binding:
        """The binding that covers these positions; minted if there is none. A retry is safe.

        Args:
            positions: a position for each partition, or a single number for a source with one partition. There must be
                records at least up to it. An unknown partition begins. A position before bound ones is already covered.
        Returns: the first binding that covers all of them.
        Raises: InvalidUsage (they are no positions, or the source has more than 10,000 partitions), Unavailable (rivals
            were faster too often: retry).
        """
        requested = checked_positions(positions)
        with self._lock:
            for _ in range(MINT_TRIES_MAX):
                new = {partition: at for partition, at in requested.items() if at > self._known.head(partition)}
                if not new or self._try_mint(new):
                    return self._covering(requested)
            raise Unavailable(f"rivals minted bindings in shard {self.shard.name!r} at each try; retry")

    def advance(self, upper: int = 0) -> int:
        """Advance time without a new position: times before the clock, or the next one, become complete.

        Args:
            upper: times before this one become complete, too.
        Returns: the new upper. A rival that is faster advances it as well.
        Raises: InvalidUsage (`upper` is no time).
        """
        checked("upper", upper, int)
        with self._lock:
            self._try_mint({}, upper)
            return self._known.upper

    def refresh(self, wait_s: float = 0.0) -> int:
        """Learn the mints of rivals; wait at most `wait_s` for one. Returns: the upper.

        Raises: InvalidUsage (`wait_s` is no number).
        """
        checked_wait("wait_s", wait_s)
        with self._lock:
            self._learn(wait_s)
            return self._known.upper

    # --- lookups

    def upto(self, time: int, *, wait_s: float = 0.0) -> dict[str, int]:
        """The head of each partition at `time`: records up to it have this time or an earlier one, permanently.

        Args:
            time: from -1 on, at which no partition has begun.
            wait_s: seconds to wait until `time` is complete.
        Raises: InvalidUsage (no such time), Unavailable (`time` is not complete: more positions may be bound to it).
        """
        check_int("time", time, -1, TIME_MAX)
        checked_wait("wait_s", wait_s)
        with self._lock:
            if time >= self._known.upper:
                self._learn_until(time + 1, wait_s)
            return self._at(time)

    def times_of(self, partition: str, positions: Column) -> pa.Array:
        """The time of each position of one partition.

        Args:
            partition: its name; "" for a source with one partition.
            positions: an Arrow or NumPy array of integers, or a list.
        Returns: an int64 array, in the same order; null for positions that are not bound yet.
        Raises: InvalidUsage (an invalid name of a partition, or these are no positions).
        """
        checked_partition(partition)
        requested = checked_column(positions)
        with self._lock:
            tail = self._known.tails.get(partition)
            if len(requested) and (tail is None or requested.max() > tail.head):
                self._learn(0.0)
                tail = self._known.tails.get(partition)
            if tail is None or not len(requested):
                return pa.nulls(len(requested), pa.int64())
            times = tail.times_of(requested)
            past = requested <= tail.floor
            if past.any():
                times[past] = times_in_the_past(self._columns, partition, requested[past])
        return pa.array(times, pa.int64(), mask=times == NOT_BOUND)

    def listen(self, time: int) -> Listen:
        """The bindings with times after `time` (-1: all of them), in order of time, as rows of the shard.

        Raises: as `Shard.listen`; NotReadable only if the history of the shard was shortened.
        """
        with self._columns.explain_renames():
            listen = self.shard.listen(time, columns=[PARTITION, POSITION, TIME], purpose="bindings")
        listen.known = self._columns.first  # it ends when the columns are renamed
        return listen

    def close(self) -> None:
        with self._lock:
            self._end_listening()
            self._writer.close()

    # --- all of the following with the lock held

    def _try_mint(self, new: dict[str, int], upper: int = 0) -> bool:
        """Try to bind these positions, or only advance time; False if a rival was faster, whose mints are learned."""
        known = self._known
        count = len(known.tails.keys() | new.keys())
        if count > PARTITIONS_MAX:
            raise InvalidUsage(f"the source would have {count} partitions; it has at most {PARTITIONS_MAX}")
        time = known.upper if self._clock is None else self._clock.time(known.upper)
        time = max(time, upper - 1)
        whole_every = max(self.WHOLE_EVERY_ROWS, 4 * count)
        whole = bool(new) and (not known.tails or known.unsaved + len(new) > whole_every)
        written = {**known.heads(), **new} if whole else new
        try:
            rows = self._columns.rows(rows_of(written, time, whole=whole))
            self._writer.compare_and_append(rows, known.upper, time + 1)
        except UpperMismatch as error:
            self._learn_until((error.details.get("actual") or [None])[0], WAIT_S)
            return False
        except Indeterminate:  # it may have landed, or may still land; the shard decides
            self._learn(0.0)
            return False
        known.add(((partition, position, time) for partition, position in new.items()), whole)
        known.reach(time + 1)
        known.trim(self.KNOWN_ROWS_MAX)
        return True

    def _covering(self, requested: dict[str, int]) -> Binding:
        """The first binding that covers all of these bound positions."""
        time = -1
        for partition, position in requested.items():
            tail = self._known.tails[partition]
            if position > tail.floor:
                time = max(time, tail.times[bisect_left(tail.positions, position)])
            else:  # its time is only in the shard
                [past] = times_in_the_past(self._columns, partition, np.array([position], np.int64))
                time = max(time, int(past))
        known = self._known if time >= self._known.since - 1 else self._read(time)
        return Binding({partition: known.tails[partition].at(time) for partition in requested}, time)

    def _at(self, time: int) -> dict[str, int]:
        if time >= self._known.since - 1:
            return self._known.at(time)
        return self._read(time).at(time)

    def _read(self, time: int) -> KnownBindings:
        """The bindings in the shard up to `time`, from the last whole mint on."""
        known = KnownBindings()
        mint = since_a_whole_mint(self._columns, time)
        if mint is not None:
            mint_time, heads, later = mint
            known.begin(mint_time, heads)
            known.add(in_time(later), whole=False)
        return known

    def _load(self) -> None:
        upper = self._check_open(self.shard.upper().element)
        self._known = self._read(upper - 1) if upper else KnownBindings()
        self._known.reach(upper)

    def _check_open(self, upper: int | None) -> int:
        if upper is None:
            raise Conflict(f"shard {self.shard.name!r} of bindings is closed, so nothing can be bound")
        return upper

    def _learn_until(self, upper: int | None, wait_s: float) -> None:
        """Learn until every time before `upper` is complete. Raises NotComplete (it is not, after `wait_s`)."""
        wanted, before = self._check_open(upper), -1
        while before < self._known.upper < wanted:  # stop after a step without progress
            before = self._known.upper
            self._learn(wait_s)
        if self._known.upper < wanted:
            raise NotComplete(
                f"of the bindings in shard {self.shard.name!r} times before {self._known.upper} are complete, but not "
                f"all before {wanted}; wait longer, or mint",
                as_of=wanted - 1,
                upper=[self._known.upper],
            )

    def _learn(self, wait_s: float) -> None:
        """Read new bindings of the shard, waiting at most `wait_s` for the first.

        A step may return only what this process has in memory; a step without progress has read the log.
        """
        before = self._known.upper
        for _ in range(MINT_TRIES_MAX):
            if not self._learn_step(0.0):
                break
        if wait_s > 0 and self._known.upper == before:
            self._learn_step(wait_s)

    def _learn_step(self, wait_s: float) -> bool:
        """Run one step of the listener; whether there was progress."""
        try:
            return self._read_events(wait_s)
        except Expired:  # its lease has lapsed, because there was no call for too long
            self._end_listening()
            return self._read_events(wait_s)
        except NotReadable:  # the history of the shard was shortened
            self._end_listening()
            self._load()
            return False
        except InvalidUsage:  # the events were not processed
            self._end_listening()
            raise

    def _read_events(self, wait_s: float) -> bool:
        if self._listen is None:
            self._listen = self.shard.listen(self._known.upper - 1, purpose="bindings")
        before = self._listen.frontier
        for updates, upper in whole_events(self._listen, wait_s):
            self._columns.check(self._listen.schema)
            self._add_updates(updates, upper.element)
        self._known.trim(self.KNOWN_ROWS_MAX)
        return self._listen.frontier != before

    def _add_updates(self, updates: pa.Table, upper: int | None) -> None:
        known = self._known
        new = updates.filter(pc.greater_equal(updates.column(TIME), known.upper))  # without its own mints
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
