"""Ingestion of a source: minting of bindings, and writing records at the times that bindings give them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.client.arguments import NUMBER_MAX, check_numbers, checked
from persist.client.schema_lineage import ShardSchema, known_by, own_handle, taken_name
from persist.client.shard import Shard
from persist.client.write import Pinned
from persist.core.errors import Conflict, InvalidUsage, Overloaded, PersistError, SchemaMismatch, Unavailable, shown
from persist.patterns.internal_shards import Stepping, WallClock, whole_events
from persist.patterns.reclock import (
    BEFORE_ALL,
    PARTITION,
    POSITION,
    TIME,
    Binding,
    Bindings,
    Numbers,
    checked_column,
    checked_positions,
    times_by,
)
from persist.patterns.sequenced_append import TIME as ROW_TIME
from persist.patterns.sequenced_append import FeedPosition

# Ingesting a source: records get the times that bindings give them, and go to a shard, each once.
#
# All that an ingester knows is in the two shards. What it writes follows from the bindings and the source alone, so
# rivals write the same rows, and `append` takes them once, whoever is killed when.


SCHEMAS_TRIED_MAX = 10  # by which one batch is written, where the shard gets stricter constraints each time


class Source(Protocol):
    """What is ingested. Reading a range of positions again gives the same records, for as long as they may be asked."""

    def watermarks(self) -> Mapping[str, int]:
        """The last position of each partition that can be read now."""
        ...

    def read(self, partition: str, after: int, upto: int) -> Iterable[pa.Table]:
        """The records with positions in `(after, upto]` (`after` -1: from the beginning), in pieces.

        A piece has the columns of the shard, or those that are not null there, and one with the positions. It may have
        `__diff`. Not every position needs to have a record, and one may have several.
        """
        ...


@dataclass(frozen=True, slots=True)
class IngestSettings:
    """A batch takes bindings together up to `positions_max` positions; one binding may be more. `position`: the column
    of records that has the position; it is written where the shard has such a column."""

    positions_max: int = 100_000
    position: str = "position"

    def __post_init__(self) -> None:
        check_numbers(self)
        checked("position", self.position, str)


Moves = dict[str, tuple[Numbers, Numbers]]  # of each partition the positions that are bound, ascending, and their times


class Ingester(Stepping):
    """Writes the records of a source into a shard, at their times. Not thread-safe: rivals have one each.

    The shard is fed by ingesters of these bindings alone. An attribute of it says how far they have come. A step writes
    the records of the bindings that are new. Where an insert, an erasure or a recovery has taken a time of the shard,
    the records of that time come at the first one that is free, and the bindings go on from there. A step raises
    InvalidUsage (the source gives what does not fit: nothing of that batch was written), Conflict (the shard is closed,
    or others have appended to it: see `rebind`), NotReadable (the shard of bindings has forgotten history), and
    whatever the source raises.
    """

    def __init__(
        self, bindings: Bindings, source: Source, shard: Shard, settings: IngestSettings | None = None
    ) -> None:
        """It goes on from where `shard` stands.

        Raises: InvalidUsage (the arguments are others), and what every call may.
        """
        checked("bindings", bindings, Bindings)
        checked("shard", shard, Shard)
        checked("settings", settings, IngestSettings, type(None))
        self._bindings = bindings
        self._source = source
        self._shard = shard
        self._own = own_handle(shard)  # which learns of constraints; that of the caller learns nothing here
        self._settings = settings or IngestSettings()
        self._columns = known_by(shard)  # by whose names the source gives records
        self._writer = shard.open_writer(purpose=f"ingesting by {bindings.shard.name}"[:256])
        self._stands: dict[str, int] = {}
        self._fed = FeedPosition(shard)

    def __repr__(self) -> str:
        return f"Ingester({self._bindings.shard.name!r} -> {self._shard.name!r}, upper={self.upper})"

    # --- how

    def _step(self, wait_s: float) -> bool:
        if self._listen is None:
            self._fed.load()
            self._let_go_on(self.upper)
            self._stands = self._bindings.upto(self.upper - 1, wait_s=wait_s)
            self._listen = self._bindings.listen(self.upper - 1)
        went_on = False
        for bound, upper in whole_events(self._listen, wait_s):
            if upper.element is None:
                raise Conflict(f"shard {self._bindings.shard.name!r} of bindings is closed: nothing more is bound")
            self._write(moves_of(bound), upper.element)
            self._let_go_on(upper.element)
            went_on = True
        return went_on

    def _let_go_on(self, upper: int) -> None:
        """Let what is bound from now on have a time that is free in the shard. These have come to `upper`."""
        if upper < self._fed.upper and self._bindings.refresh() < self._fed.upper:
            self._bindings.advance(self._fed.upper)

    def _write(self, moves: Moves, upper: int) -> None:
        """The records of these bindings, batch by batch, and then no more before `upper`."""
        for end in ends_of_batches(moves, self._stands, self._settings.positions_max, upper):
            self._fed.refresh()  # where a rival was quicker the source need not be read
            self._append(moves, end)
            self._stand(moves)

    def _stand(self, moves: Moves) -> None:
        """Learn from bindings where each partition stands now."""
        for partition, (positions, times) in moves.items():
            if past := int(np.searchsorted(times, self.upper)):
                self._stands[partition] = int(positions[past - 1])

    def _append(self, moves: Moves, end: int) -> None:
        def rows() -> Pinned | None:
            self._stand(moves)
            batch = {partition: _within(move, self.upper, end) for partition, move in moves.items()}
            number, known = self._columns_now()
            found = self._records({name: move for name, move in batch.items() if len(move[0])}, known)
            return Pinned(found, number, known) if any(len(move[0]) for move in batch.values()) else None

        for left in range(SCHEMAS_TRIED_MAX, 0, -1):
            try:
                self._fed.append(self._writer, end, rows)
                return
            except SchemaMismatch:  # constraints got stricter: the records are looked at by them
                if left == 1:
                    raise
                self._own.refresh_schema()

    def _columns_now(self) -> tuple[int, ShardSchema]:
        """The columns as a handle knows them. Raises InvalidUsage: the source names one as another is called now."""
        number, known = max(map(known_by, (self._shard, self._own)), key=lambda one: one[0])
        if number != self._columns[0]:
            taken = taken_name(self._shard, self._columns[0], known)
            if taken is not None:
                raise InvalidUsage(
                    f"column {taken[0]!r} of shard {self._shard.name!r} {taken[1]}, and another column has its name: "
                    "let the source give records by the names of now, then make another ingester"
                )
            self._columns = number, known
        return self._columns

    def _records(self, batch: Moves, known: ShardSchema) -> Iterator[pa.Table]:
        for partition, (bound, times) in batch.items():
            after, last = self._stands.get(partition, BEFORE_ALL), int(bound[-1])
            if last <= after:  # a whole mint told again where it stands
                continue
            for records in self._source.read(partition, after, last):
                timed = self._timed(records, partition, (after, last), bound, times)
                is_kept = self._settings.position in known.arrow.names
                yield timed if is_kept else timed.drop_columns([self._settings.position])

    def _timed(
        self, records: pa.Table, partition: str, between: tuple[int, int], bound: Numbers, times: Numbers
    ) -> pa.Table:
        """The records with their times. Raises InvalidUsage (one has a position that was not asked for)."""
        name = self._settings.position
        if name not in records.schema.names:
            raise InvalidUsage(f"records of partition {partition!r:.100} have no column {name!r} of positions")
        positions = checked_column(records.column(name))
        if len(positions) and not between[0] < positions.min() <= positions.max() <= between[1]:
            raise InvalidUsage(
                f"the source gave records of partition {partition!r:.100} with positions in [{positions.min()}, "
                f"{positions.max()}], where it was asked for those after {between[0]} up to {between[1]}"
            )
        timed = records.append_column(ROW_TIME, pa.array(times_by(bound, times, positions), pa.int64()))
        return self._fed.placed(timed)


def moves_of(bound: pa.Table) -> Moves:
    """Rows of bindings by partition. A loop over partitions, not over bindings."""
    ordered = bound.sort_by([(TIME, "ascending"), (POSITION, "ascending")])
    names = pc.unique(ordered.column(PARTITION))
    found: Moves = {}
    for name in names:
        mine = ordered.filter(pc.equal(ordered.column(PARTITION), name))
        found[name.as_py()] = mine.column(POSITION).to_numpy(), mine.column(TIME).to_numpy()
    return found


def ends_of_batches(moves: Moves, stands: Mapping[str, int], positions_max: int, upper: int) -> list[int]:
    """Before which times batches end: each has at most `positions_max` positions, or one time alone. Ends at `upper`.

    A batch ends where a binding does, so that no time is in two of them.
    """
    if not moves:
        return [upper]
    steps = [np.diff(positions, prepend=stands.get(name, BEFORE_ALL)) for name, (positions, _) in moves.items()]
    times, places = np.unique(np.concatenate([times for _, times in moves.values()]), return_inverse=True)
    moved = np.bincount(places, np.concatenate(steps).astype(np.float64))  # roughly is enough
    passed = np.cumsum(moved)
    ends, start = [], 0
    while start < len(times):
        before = passed[start - 1] if start else 0.0
        start = max(start + 1, int(np.searchsorted(passed, before + positions_max, side="right")))
        ends.append(int(times[start - 1]) + 1)
    ends[-1] = upper
    return ends


def _within(move: tuple[Numbers, Numbers], lower: int, upper: int) -> tuple[Numbers, Numbers]:
    positions, times = move
    start, end = np.searchsorted(times, [lower, upper])
    return positions[start:end], times[start:end]


# A minter: binds what is new in a source, at an interval.


Watermarks = Callable[[], Mapping[str, int]]


class Minter:
    """Follows the high watermarks of a source: what is new there gets a time, at most once an interval.

    Any number of minters may follow one source, in any number of processes. Each position is bound once.
    """

    def __init__(
        self,
        bindings: Bindings,
        watermarks: Watermarks,
        *,
        positions_max: int | None = None,
        advances: bool = False,
    ) -> None:
        """Nothing is asked before the first `tick`.

        Args:
            bindings: where they are bound.
            watermarks: gives the last position of each partition that can be read now; partitions without a record may
                be left out.
            positions_max: a binding moves each partition by at most so many positions: a long backlog becomes several
                times, each of which is ingested as one batch. None: all at once.
            advances: whether time goes on where nothing is new, by one commit a tick: readers who wait for a time
                then see that nothing came.
        Raises: InvalidUsage (`positions_max` is no positive integer).
        """
        checked("bindings", bindings, Bindings)
        checked("positions_max", positions_max, int, type(None))
        if positions_max is not None and not 0 < positions_max <= NUMBER_MAX:
            raise InvalidUsage(f"positions_max is {shown(positions_max)}; it must be in [1, {NUMBER_MAX}] or None")
        checked("advances", advances, bool)
        self._bindings = bindings
        self._watermarks = watermarks
        self._positions_max = positions_max
        self._advances = advances
        self.last_error: PersistError | None = None  # what the last ticks of `run` that failed were told

    def tick(self) -> list[Binding]:
        """Bind what is new; the bindings, in order. None are minted where a rival has bound all that.

        Raises: InvalidUsage (the watermarks are no positions), and what `Bindings.get_binding` may; whatever the
            watermarks raise. Repeating it is safe.
        """
        found = self._watermarks()
        wanted = checked_positions(found) if found else {}
        minted = []
        while step := self._step(wanted):
            minted.append(self._bindings.get_binding(step))
        if not minted and self._advances:
            self._bindings.advance()
        return minted

    def run(self, until: Callable[[], bool], clock: WallClock, interval_s: float = 1.0) -> None:
        """Tick at each interval until `until` says so. What a store does not answer is tried again at the next one.

        Raises: InvalidUsage (`interval_s` is no positive number), and what `tick` may, but for Unavailable and
            Overloaded.
        """
        checked("interval_s", interval_s, int, float)
        if not 0 < interval_s <= NUMBER_MAX:
            raise InvalidUsage(f"interval_s is {shown(interval_s)}; it must be a positive number of seconds")
        while not until():
            begun = clock.monotonic()
            try:
                self.tick()
            except (Unavailable, Overloaded) as error:
                self.last_error = error
            clock.sleep(max(0.0, interval_s - (clock.monotonic() - begun)))

    def _step(self, wanted: dict[str, int]) -> dict[str, int]:
        """The positions of the next binding; none where all is bound."""
        heads = self._bindings.heads
        new = {partition: at for partition, at in wanted.items() if at > heads.get(partition, BEFORE_ALL)}
        if self._positions_max is None:
            return new
        most = self._positions_max
        return {partition: min(at, heads.get(partition, BEFORE_ALL) + most) for partition, at in new.items()}
