"""The difference between two times of a shard or between two shards; drops count as retractions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TypeVar

import pyarrow as pa

from persist.client.arguments import checked_time, html_table
from persist.client.read_leases import Hold, ReadSettings
from persist.client.row_reader import Rows, Split, part_reader
from persist.client.shared_lease_reads import hold_shared
from persist.client.snapshot import Held, SnapshotSplit, check_lease, hold_time, leased_blobs, wait_for_upper
from persist.client.timestamps import BEFORE_ALL, NothingWritten, as_of_at, latest, resolve_time, to_datetime
from persist.client.transport import OneShard, Transport
from persist.core.batch import Run
from persist.core.errors import InvalidUsage, NotReadable, TokenReused, UnknownShard, UpgradeNeeded
from persist.core.frontier import Antichain
from persist.core.shard_view import ShardView, ViewRequest
from persist.core.truncations_and_drops import DROPS_MAX, RowDrop, clipped, contents, floor_at, runs_until, taken_away
from persist.parts import ALL_KEYS, KeyRange, PartReader, ShardSchema, at_time, negated, plan_splits, valid_schemas
from persist.parts.schema_evolution import current_for_names

T = TypeVar("T")
Columns = Sequence[str] | None  # None: all
DROPS_FOR_OTHERS = 16  # drops of a shard that overwrites leave for truncations


def load_full_view(transport: Transport, name: str, view: ShardView) -> ShardView:
    """The shard as of this view or later with all of its batches: a drop removes rows from before any interval.

    Raises what a view request may.
    """
    return transport.view(name, ViewRequest(min_seqno=view.seqno, seen=view.seen))


def runs_of(view: ShardView) -> tuple[Run, ...]:
    """All runs of a view."""
    return tuple(run for batch in view.batches for run in batch.runs)


def runs_in_interval(runs: Iterable[Run], low: int, high: int) -> tuple[Run, ...]:
    """The runs with only those parts that may have updates at times in `(low, high]`."""
    parts = (tuple(part for part in run.parts if part.time_max > low and part.time_min <= high) for run in runs)
    return tuple(Run(kept_parts) for kept_parts in parts if kept_parts)


def retractions(
    reader: PartReader, runs: Sequence[Run], drop: RowDrop, key_range: KeyRange = ALL_KEYS, columns: Columns = None
) -> Iterator[pa.Table]:
    """The rows of `runs` that the drop removed, with negative `__diff`, at its time. `runs` come from `taken_away`.

    Tables are as those of `PartReader.read_updates`, in key order. Raises what reading does.
    """
    parts = [part for run in runs for part in run.parts]
    before = Antichain(drop.cut)
    rows = reader.read_updates(parts, Antichain(0), before, since=drop.cut - 1, key_range=key_range, columns=columns)
    return (at_time(negated(table), drop.at) for table in rows)


def changes_at(
    reader: PartReader,
    runs: Sequence[Run],
    written: Sequence[Run],
    drop: RowDrop,
    key_range: KeyRange = ALL_KEYS,
    columns: Columns = None,
) -> Iterator[pa.Table]:
    """All changes at the time of a drop: the `retractions` of `runs`, and the updates then, which are in `written`.

    Rows that were removed and added cancel out. Tables are as those of `retractions`. Raises what reading does.
    """
    if not written:
        yield from retractions(reader, runs, drop, key_range, columns)
        return
    removed = reader.read_range(runs, as_of=drop.cut - 1, key_range=key_range)
    added = reader.read_changes(written, drop.at - 1, drop.at, key_range=key_range)
    for table in reader.difference(removed, added, columns):
        yield at_time(table, drop.at)


def drop_retractions(reader: PartReader, view: ShardView, drops: Sequence[RowDrop]) -> Iterator[pa.Table]:
    """The retractions of several drops of a view that has all batches, one drop after the other."""
    runs = runs_of(view)
    for drop in drops:
        yield from retractions(reader, taken_away(runs, view.drops, drop), drop)


def may_replace_all(view: ShardView) -> bool:
    """Whether an overwrite may try a drop: the shard has rows, and enough drops are left for truncations."""
    return view.upper.element not in (None, 0) and len(view.drops) < DROPS_MAX - DROPS_FOR_OTHERS


def try_drop(commit: Callable[[], T]) -> T | None:
    """The result of the commit of a drop, or its error; None: the shard allows none, and nothing was changed."""
    try:
        return commit()
    except (UnknownShard, TokenReused):  # not caused by the drop
        raise
    except (InvalidUsage, NotReadable, UpgradeNeeded):
        return None


Point = int | datetime | None  # a time, a wall clock, or the latest complete time
READS_AT_ONCE = 3  # reads that share the memory of a split: two sides, and their comparison


@dataclass(frozen=True)
class ChangesSplit(SnapshotSplit):
    """One key range of the changes of a shard from `start` to `as_of`. Pickle it, or read it here.

    `gone` are the runs whose updates before the time `gone_before` count at the earlier time and not at the later one:
    drops removed them in between.
    """

    start: int = 0
    gone: tuple[Run, ...] = ()
    gone_before: int = 0

    def _pieces(self, reader: PartReader, batch_rows: int | None) -> Iterator[pa.Table]:
        low, high = sorted((self.start, self.as_of))
        if self.gone:
            removed = reader.read_range(self.gone, as_of=self.gone_before - 1, key_range=self.key_range)
            written = reader.read_changes(self.runs, low, high, key_range=self.key_range)
            pieces = reader.difference(removed, written, self.columns)
        else:
            pieces = reader.read_changes(self.runs, low, high, key_range=self.key_range, columns=self.columns)
        return pieces if self.start <= self.as_of else map(negated, pieces)


@dataclass(frozen=True)
class PairSplit:
    """One key range of two shards: how often `later` has each row more than `earlier`. Pickle it, or read it here."""

    earlier: SnapshotSplit
    later: SnapshotSplit
    columns: tuple[str, ...] | None = None

    def read(self, transport: Transport) -> Iterator[pa.Table]:
        """The rows, consolidated and in key order: the columns and `__diff`. Raises what reading a snapshot may."""
        _, reader = part_reader(transport, self.later, self.later.settings)
        return reader.difference(self.earlier.read(transport), self.later.read(transport), self.columns)


@dataclass
class Changes(Rows):
    """What was added and removed between two times, held by leases until it is closed (or they lapse).

    Rows have `__diff`: their multiplicity at `end` minus that at `start`, so it is negative for removed rows. Rows of
    equal multiplicity are left out. `other` is the shard whose contents at `end` are compared, if that is another one.
    `start_timestamp` and `end_timestamp` are the wall clocks that named the times, rounded down to the shard's grid;
    None if times were given. `Shard.changes` returns one. Reading it to its end closes it. Reading may raise Expired
    (a lease lapsed), Unavailable (retrying is safe) and Corruption (a part is damaged or missing).
    """

    shard: str
    start: int
    end: int
    schema: ShardSchema
    splits: tuple[Split, ...]
    _transport: Transport
    _lease: Hold
    _closed: bool = field(default=False)
    other: str | None = None
    start_timestamp: datetime | None = None
    end_timestamp: datetime | None = None

    def __repr__(self) -> str:
        other = "" if self.other is None else f", other={self.other!r}"
        state = ", closed" if self._closed else ""
        return f"Changes({self.shard!r}, {self.start}, {self.end}{other}, splits={len(self.splits)}{state})"

    def _repr_html_(self) -> str:
        fields = [(field.name, field.type) for field in self.empty().schema]
        to = f"{self.end}" if self.other is None else f"{self.other} as of {self.end}"
        return html_table(f"Changes of {self.shard} from {self.start} to {to}", [*fields, ("splits", len(self.splits))])

    def to_arrow(self) -> pa.Table:
        """All rows as one table, with `__diff`. Raises what reading may."""
        return self._all()


@dataclass(frozen=True)
class NamedTime:
    """A time that a caller named, by its number or by a wall clock; None is the latest one."""

    time: int | None
    timestamp: datetime | None = None

    @classmethod
    def of(
        cls, what: str, point: Point, transport: Transport, name: str, limits: tuple[float, float], least: int = 0
    ) -> NamedTime:
        """`limits`: how long to wait for a wall clock in the future, and for an answer, in seconds.

        `least` is the earliest time allowed. Raises InvalidUsage unless it is a time, and what `resolved` and
        `as_of_at` raise.
        """
        if isinstance(point, datetime):
            resolution = resolve_time(transport, name, point, *limits)
            return cls(as_of_at(name, resolution), to_datetime(resolution.at_ms))
        checked_time(what, point, least)
        return cls(point)


@dataclass(frozen=True)
class DiffRequest:
    """How to read changes: the number of splits, the columns (None: all), and how long to wait for the times.

    `num_splits` may be a function of the encoded bytes. `known` is the id of the schema that names the columns (None:
    the current one). `shares`: by a lease that the reads of the process share.
    """

    num_splits: int | Callable[[int], int] = 1
    columns: tuple[str, ...] | None = None
    wait_s: float = 60.0
    purpose: str = "changes"
    known: int | None = None
    shares: bool = False

    def check_names(self, view: ShardView) -> None:
        """Raise InvalidUsage if the name of a selected column means another column by now."""
        current_for_names(valid_schemas(view.schemas), self.known, self.columns)


@dataclass(frozen=True)
class HeldInterval:
    """Two complete times of a shard, and the hold on them and all times between."""

    held: Held
    start: int
    end: int

    def splits(self, num_splits: int | Callable[[int], int], columns: Sequence[str] | None) -> tuple[ChangesSplit, ...]:
        """The changes in splits. Raises InvalidUsage, Expired."""
        held, view = self.held, self.held.view
        schema, reader = part_reader(held.transport, view, held.settings)
        low, high = sorted((self.start, self.end))
        runs = runs_in_interval(contents(runs_of(view), view.drops, high), low, high)
        gone, gone_before = self._gone(low, high), 0
        if gone:
            gone_before = min(low + 1, floor_at(view.drops, high))
            held = replace(held, settings=held.settings.shared_by(READS_AT_ONCE))
        ranges = _ranges(held, (*runs, *gone), num_splits, schema, reader)
        chosen, base = schema.columns(columns), replace(held, as_of=self.end)
        whole = (base.split(key_range, runs, chosen) for key_range in ranges)
        return tuple(ChangesSplit(**vars(one), start=self.start, gone=gone, gone_before=gone_before) for one in whole)

    def _gone(self, low: int, high: int) -> tuple[Run, ...]:
        """The runs of the contents as of the earlier time that drops between the two times removed."""
        drops = self.held.view.drops
        earlier, later = floor_at(drops, low), floor_at(drops, high)
        return runs_until(clipped(runs_of(self.held.view), earlier), min(low + 1, later)) if earlier < later else ()


@contextmanager
def hold_interval(
    transport: Transport, name: str, start: int, end: int | None, request: DiffRequest, settings: ReadSettings
) -> Iterator[HeldInterval]:
    """Hold the earlier of two times (`end` None: the latest complete one) and wait for the later one.

    The lease outlives the block, unless the block raises. Raises NotReadable, Unavailable.
    """
    low = start if end is None else min(start, end)
    hold = hold_shared if request.shares else hold_time
    with hold(transport, name, low, request.purpose, request.wait_s, settings) as held:
        end = _latest(held.view) if end is None else end
        high = max(start, end)
        if held.view.upper.less_equal(high):
            held = replace(held, view=wait_for_upper(transport, name, high, held.lease, request.wait_s))
            check_lease(held.view, low, held.lease)
        if held.lease.is_point and not held.view.since.less_equal(high):
            raise NotReadable(
                f"shard {name!r} is readable from {held.view.since} on: only [{low}] is kept before it, not [{high}]",
                as_of=[high],
                since=held.view.since.to_json(),
            )
        yield HeldInterval(held, start, end)


def _latest(view: ShardView) -> int:
    """The latest complete time; BEFORE_ALL if nothing was written. Raises NotReadable."""
    try:
        return latest(view)
    except NothingWritten:
        return BEFORE_ALL


def changes_of(
    transport: Transport, name: str, start: NamedTime, end: NamedTime, request: DiffRequest, settings: ReadSettings
) -> Changes:
    """The changes of one shard. Raises what `Shard.changes` says."""
    assert start.time is not None
    request = replace(request, shares=request.num_splits == 1)  # several splits are meant for other processes
    with hold_interval(transport, name, start.time, end.time, request, settings) as interval:
        request.check_names(interval.held.view)
        splits = interval.splits(request.num_splits, request.columns)
        schema, hold = part_reader(transport, interval.held.view, settings)[0], Hold(interval.held.lease)
        splits = tuple(replace(split, _hold=hold) for split in splits)
        return Changes(name, interval.start, interval.end, schema, splits, transport, hold)


Side = tuple[OneShard, str, NamedTime]  # a shard by its name, as of a time


def changes_between(start: Side, end: Side, request: DiffRequest, settings: ReadSettings) -> Changes:
    """The changes from one shard as of a time to another one as of its time. Raises what `Shard.changes` says."""
    shared = settings.shared_by(READS_AT_ONCE)
    with ExitStack() as stack:
        earlier, later = (
            stack.enter_context(hold_time(transport, name, at.time, request.purpose, request.wait_s, shared))
            for transport, name, at in (start, end)
        )
        schema, reader = part_reader(earlier.transport, earlier.view, shared)
        later_schema, later_reader = part_reader(later.transport, later.view, shared)
        request.check_names(earlier.view)
        if (schema.arrow, schema.key) != (later_schema.arrow, later_schema.key):
            raise InvalidUsage(
                f"shards {start[1]!r} and {end[1]!r} have different columns or keys: {_schema_text(schema)}, and "
                f"{_schema_text(later_schema)}; only shards of equal columns are compared"
            )
        larger, reader = max((earlier, reader), (later, later_reader), key=lambda side: _bytes(side[0].runs))
        ranges = _ranges(larger, larger.runs, request.num_splits, schema, reader)
        columns, chosen = schema.columns(None), schema.columns(request.columns)
        hold = Hold(earlier.lease, later.lease)

        def split(side: Held, key_range: KeyRange) -> SnapshotSplit:
            return replace(side.split(key_range, side.runs, columns), _hold=hold)

        splits = tuple(PairSplit(split(earlier, at), split(later, at), chosen) for at in ranges)
        return Changes(start[1], earlier.as_of, later.as_of, schema, splits, start[0].inner, hold, other=end[1])


def _ranges(
    held: Held, runs: tuple[Run, ...], num_splits: int | Callable[[int], int], schema: ShardSchema, reader: PartReader
) -> list[KeyRange]:
    count = num_splits if isinstance(num_splits, int) else num_splits(_bytes(runs))
    with leased_blobs(held.lease):
        ranges = plan_splits(runs, count, schema, reader)
    held.lease.keep()  # a part may be missing because the hold lapsed
    return ranges


def _bytes(runs: tuple[Run, ...]) -> int:
    return sum(part.size for run in runs for part in run.parts)


def _schema_text(schema: ShardSchema) -> str:
    columns = ", ".join(f"{field.name} {field.type}{'' if field.nullable else ' not null'}" for field in schema.arrow)
    return f"{columns} (key {', '.join(schema.key)})"
