"""Ingestion of a source: minting bindings, and writing records at their bound times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from persist.client.arguments import NUMBER_MAX, check_int, checked
from persist.client.schema_lineage import ShardSchema, copy_handle, known_schema, reused_name
from persist.client.shard import Shard
from persist.client.write import PinnedRows
from persist.core.errors import Conflict, InvalidUsage, Overloaded, PersistError, SchemaMismatch, Unavailable, shown
from persist.sources.feed_position import FeedPosition
from persist.sources.internal_shards import FeedFollower, WallClock, whole_events
from persist.sources.reclock import (
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
from persist.sources.sequenced_writer import TIME as ROW_TIME

POSITIONS_MAX = 100_000  # of the bindings that one batch combines; a larger binding is a batch of its own
SCHEMAS_TRIED_MAX = 10  # for one batch, if the constraints of the shard become stricter each time


class Source(Protocol):
    """The records to ingest. Reading a range of positions again must return the same records."""

    def watermarks(self) -> Mapping[str, int]:
        """The last readable position of each partition."""
        ...

    def read(self, partition: str, after: int, upto: int) -> Iterable[pa.Table]:
        """The records with positions in `(after, upto]` (`after` -1: from the beginning), in pieces.

        A piece has the columns of the shard (nullable ones may be omitted), a column `position`, which is written if
        the shard has one, and optionally `__diff`. A position may have no record, or several.
        """
        ...


Moves = dict[str, tuple[Numbers, Numbers]]  # by partition: the bound positions, ascending, and their times


class Ingester(FeedFollower):
    """Writes the records of a source to a shard, at their bound times. Not thread-safe: rivals use one each.

    All of its state is in the two shards: the output depends only on the bindings and the source, so rivals write the
    same rows, and each row is appended once, even if processes are killed. Only ingesters of these bindings may feed
    the shard; an attribute of it stores their progress. A step writes the records of new bindings. If an insert, an
    erasure or a recovery has taken a time of the shard, the records of that time are written at the first free time,
    and later bindings follow it. A step raises InvalidUsage (the records do not fit: nothing of that batch was
    written), Conflict (the shard is closed, or others have appended to it: see `rebind`), NotReadable (the shard of
    bindings has forgotten history), and the errors of the source.
    """

    def __init__(self, bindings: Bindings, source: Source, shard: Shard) -> None:
        """Continue from the position of `shard`.

        Raises: InvalidUsage (an argument is not valid), and as every call.
        """
        checked("bindings", bindings, Bindings)
        checked("shard", shard, Shard)
        self._bindings = bindings
        self._source = source
        self._shard = shard
        self._own = copy_handle(shard)  # learns new constraints; the handle of the caller does not change
        self._columns = known_schema(shard)  # the names in records of the source
        self._writer = shard.open_writer(purpose=f"ingesting by {bindings.shard.name}"[:256])
        self._heads: dict[str, int] = {}
        self._fed = FeedPosition(shard)

    def __repr__(self) -> str:
        return f"Ingester({self._bindings.shard.name!r} -> {self._shard.name!r}, upper={self.upper})"

    def _step(self, wait_s: float) -> bool:
        if self._listen is None:
            self._fed.load()
            self._advance_bindings(self.upper)
            self._heads = self._bindings.upto(self.upper - 1, wait_s=wait_s)
            self._listen = self._bindings.listen(self.upper - 1)
        is_new = False
        for bound, upper in whole_events(self._listen, wait_s):
            if upper.element is None:
                raise Conflict(f"shard {self._bindings.shard.name!r} of bindings is closed: nothing more is bound")
            self._write(moves_of(bound), upper.element)
            self._advance_bindings(upper.element)
            is_new = True
        return is_new

    def _advance_bindings(self, upper: int) -> None:
        """Advance the bindings, which have reached `upper`, to a free time of the shard."""
        if upper < self._fed.upper and self._bindings.refresh() < self._fed.upper:
            self._bindings.advance(self._fed.upper)

    def _write(self, moves: Moves, upper: int) -> None:
        """Write the records of these bindings in batches, up to `upper`."""
        for end in ends_of_batches(moves, self._heads, POSITIONS_MAX, upper):
            self._fed.refresh()  # if a rival was faster, the source need not be read
            self._append(moves, end)
            self._update_heads(moves)

    def _update_heads(self, moves: Moves) -> None:
        """Advance the head of each partition to its last position that the shard contains."""
        for partition, (positions, times) in moves.items():
            if count := int(np.searchsorted(times, self.upper)):
                self._heads[partition] = int(positions[count - 1])

    def _append(self, moves: Moves, end: int) -> None:
        def rows() -> PinnedRows | None:
            self._update_heads(moves)
            within = {partition: _within(move, self.upper, end) for partition, move in moves.items()}
            batch = {partition: move for partition, move in within.items() if len(move[0])}
            number, known = self._current_columns()
            return PinnedRows(self._records(batch, known), number, known) if batch else None

        for tries_left in range(SCHEMAS_TRIED_MAX, 0, -1):
            try:
                self._fed.append(self._writer, end, rows)
                return
            except SchemaMismatch:  # constraints became stricter: check the records by them
                if tries_left == 1:
                    raise
                self._own.refresh_schema()

    def _current_columns(self) -> tuple[int, ShardSchema]:
        """The newest known columns. Raises InvalidUsage if a name in the records now belongs to another column."""
        number, known = max(map(known_schema, (self._shard, self._own)), key=itemgetter(0))
        if number != self._columns[0]:
            taken = reused_name(self._shard, self._columns[0], known)
            if taken is not None:
                raise InvalidUsage(
                    f"column {taken[0]!r} of shard {self._shard.name!r} {taken[1]}, and another column has its name: "
                    "use the current names in the records of the source, then create another ingester"
                )
            self._columns = number, known
        return self._columns

    def _records(self, batch: Moves, known: ShardSchema) -> Iterator[pa.Table]:
        for partition, (bound, times) in batch.items():
            after, last = self._heads.get(partition, BEFORE_ALL), int(bound[-1])
            if last <= after:  # a whole mint repeats the head
                continue
            for records in self._source.read(partition, after, last):
                timed = self._add_times(records, partition, (after, last), bound, times)
                yield timed if POSITION in known.arrow.names else timed.drop_columns([POSITION])

    def _add_times(
        self, records: pa.Table, partition: str, between: tuple[int, int], bound: Numbers, times: Numbers
    ) -> pa.Table:
        """The records with their times. Raises InvalidUsage (one has a position outside of the requested range)."""
        if POSITION not in records.schema.names:
            raise InvalidUsage(f"records of partition {shown(partition)} have no column {POSITION!r}")
        if ROW_TIME in records.schema.names:
            raise InvalidUsage(f"records of partition {shown(partition)} have a column {ROW_TIME!r}: rename it")
        positions = checked_column(records.column(POSITION))
        if len(positions) and not between[0] < positions.min() <= positions.max() <= between[1]:
            raise InvalidUsage(
                f"the source returned records of partition {shown(partition)} with positions in [{positions.min()}, "
                f"{positions.max()}], but those after {between[0]} up to {between[1]} were requested"
            )
        timed = records.append_column(ROW_TIME, pa.array(times_by(bound, times, positions), pa.int64()))
        return self._fed.place(timed)


def moves_of(bound: pa.Table) -> Moves:
    """Rows of bindings by partition. The loop is over partitions, not over bindings."""
    ordered = bound.sort_by([(TIME, "ascending"), (POSITION, "ascending")])
    moves: Moves = {}
    for name in pc.unique(ordered.column(PARTITION)):
        rows = ordered.filter(pc.equal(ordered.column(PARTITION), name))
        moves[name.as_py()] = rows.column(POSITION).to_numpy(), rows.column(TIME).to_numpy()
    return moves


def ends_of_batches(moves: Moves, heads: Mapping[str, int], positions_max: int, upper: int) -> list[int]:
    """The exclusive end times of batches of at most `positions_max` positions, or of one time. The last is `upper`.

    A batch ends where a binding does, so that no time is in two batches.
    """
    if not moves:
        return [upper]
    steps = [np.diff(positions, prepend=heads.get(name, BEFORE_ALL)) for name, (positions, _) in moves.items()]
    times, indices = np.unique(np.concatenate([times for _, times in moves.values()]), return_inverse=True)
    counts = np.bincount(indices, np.concatenate(steps).astype(np.float64))  # rounding is harmless
    totals = np.cumsum(counts)
    ends, start = [], 0
    while start < len(times):
        before = totals[start - 1] if start else 0.0
        start = max(start + 1, int(np.searchsorted(totals, before + positions_max, side="right")))
        ends.append(int(times[start - 1]) + 1)
    ends[-1] = upper
    return ends


def _within(move: tuple[Numbers, Numbers], lower: int, upper: int) -> tuple[Numbers, Numbers]:
    positions, times = move
    start, end = np.searchsorted(times, [lower, upper])
    return positions[start:end], times[start:end]


Watermarks = Callable[[], Mapping[str, int]]


class Minter:
    """Follows the high watermarks of a source: binds new positions to a time, at most once per interval.

    Any number of minters may follow one source, in any number of processes. Each position is bound once.
    """

    def __init__(
        self, bindings: Bindings, watermarks: Watermarks, *, positions_max: int | None = None, advances: bool = False
    ) -> None:
        """No I/O before the first `tick`.

        Args:
            watermarks: returns the last readable position of each partition; partitions without records may be omitted.
            positions_max: a binding advances each partition by at most so many positions: a long backlog becomes
                several times, each of which is ingested as one batch. None: no limit.
            advances: advance time without new positions, too, by one commit per tick, for readers that wait for a time.
        Raises: InvalidUsage (`positions_max` is no positive integer).
        """
        checked("bindings", bindings, Bindings)
        if positions_max is not None:
            check_int("positions_max", positions_max, 1, NUMBER_MAX, " or None")
        checked("advances", advances, bool)
        self._bindings = bindings
        self._watermarks = watermarks
        self._positions_max = positions_max
        self._advances = advances
        self.last_error: PersistError | None = None  # of the last failed tick of `run`

    def tick(self) -> list[Binding]:
        """Bind new positions; returns the bindings in order. Empty if a rival has bound everything.

        Raises: InvalidUsage (the watermarks are no positions), as `Bindings.get_binding`, and the errors of the
            watermarks. A retry is safe.
        """
        watermarks = self._watermarks()
        positions = checked_positions(watermarks) if watermarks else {}
        minted = []
        while step := self._next_positions(positions):
            minted.append(self._bindings.get_binding(step))
        if not minted and self._advances:
            self._bindings.advance()
        return minted

    def run(self, until: Callable[[], bool], clock: WallClock, interval_s: float = 1.0) -> None:
        """Tick once per interval until `until` returns True. Unavailable and Overloaded are retried at the next tick.

        Raises: InvalidUsage (`interval_s` is no positive number), and the other errors of `tick`.
        """
        checked("interval_s", interval_s, int, float)
        if not 0 < interval_s <= NUMBER_MAX:
            raise InvalidUsage(f"interval_s is {shown(interval_s)}; it must be a positive number of seconds")
        while not until():
            started_s = clock.monotonic()
            try:
                self.tick()
            except (Unavailable, Overloaded) as error:
                self.last_error = error
            clock.sleep(max(0.0, interval_s - (clock.monotonic() - started_s)))

    def _next_positions(self, watermarks: dict[str, int]) -> dict[str, int]:
        """The positions of the next binding; empty if all are bound."""
        heads = self._bindings.heads
        new = {partition: at for partition, at in watermarks.items() if at > heads.get(partition, BEFORE_ALL)}
        if self._positions_max is None:
            return new
        most = self._positions_max
        return {partition: min(at, heads.get(partition, BEFORE_ALL) + most) for partition, at in new.items()}
