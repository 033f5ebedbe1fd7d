"""Offsets of streams, and how far a micro-batch reaches: at most so many rows or bytes.

An offset is `{"v": 1, "frontier": [7], "shard": "s…"}` (everything before time 7 is delivered), or, for a stream that
begins with the contents of the shard, `{"v": 1, "snapshot": 4, "shard": "s…"}` (nothing is delivered: the contents as
of 4 come first, then changes). Where one of these is too large for a micro-batch, the offset tells how far its keys
are: `{"v": 2, "snapshot": 4, "key": "…", "shard": "s…"}` (of the contents as of 4 the keys before this one are
delivered), or `{"v": 2, "frontier": [7], "key": "…", "shard": "s…"}` (everything before time 7, and of time 7 the keys
before this one). The key is in the encoding of `persist.parts.key_encoding`, in base64. Builds that do not know it
refuse the version. The shard's id tells the lives of a name apart: a checkpoint of a dropped shard is refused. Earlier
checkpoints have none, and are good for whichever shard has the name.
"""

from __future__ import annotations

import binascii
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist.client.contents_diff import retractions, within
from persist.client.snapshot import ReadLease, kept, part_reader
from persist.client.transport import OneShard
from persist.core.batch import HollowBatch, Part, Run
from persist.core.errors import InvalidUsage
from persist.core.frontier import Antichain, frontier
from persist.core.ids import ShardId
from persist.core.shard_view import ShardView
from persist.core.truncation import RowDrop
from persist.parts import DIFF, TIME, KeyRange, PartReader, ShardSchema
from persist.parts.key_splits import NOTHING, Limit, Weight, count_cuts, find_cut
from persist.spark import executors, planning
from persist.spark.change_feed import Interval, overlapping_batches, select_runs
from persist.spark.options import ReadOptions, Target

WHOLE_VERSION = 1  # of offsets between times: what older builds know is written as they know it
CUT_VERSION = 2  # of offsets between keys
Offset = dict[str, Any]


@dataclass(frozen=True)
class Position:
    """Where a stream is: everything before `upper` is delivered, and of its time the keys before `key` (None: none).

    With `is_snapshot` the time is that of the contents with which the stream begins, of which the same is true.
    `shard` None: of whichever shard has the name.
    """

    upper: Antichain
    is_snapshot: bool = False
    key: bytes | None = None
    shard: ShardId | None = None

    @classmethod
    def of(cls, offset: Offset) -> Position:
        """Raises InvalidUsage where it is not an offset that this persist knows."""
        version, given = offset.get("v"), offset.get("key")
        is_known = version == (WHOLE_VERSION if given is None else CUT_VERSION)
        if not is_known or ("snapshot" in offset) == ("frontier" in offset):
            raise _unknown(offset)
        is_snapshot = "snapshot" in offset
        upper = frontier(offset["snapshot"]) if is_snapshot else Antichain.from_json(offset["frontier"])
        key = None if given is None else _key(offset, given)
        if upper.element is None and (is_snapshot or key is not None):
            raise _unknown(offset)
        return cls(upper, is_snapshot, key, offset.get("shard"))

    @property
    def offset(self) -> Offset:
        found: Offset = {"v": WHOLE_VERSION if self.key is None else CUT_VERSION}
        if self.is_snapshot:
            found["snapshot"] = self.upper.element
        else:
            found["frontier"] = self.upper.to_json()
        if self.key is not None:
            found["key"] = b64encode(self.key).decode()
        return found if self.shard is None else {**found, "shard": self.shard}

    @property
    def held(self) -> Antichain:
        """The since that a stream here still needs; `[]`, which is none, at the end of a closed shard."""
        element = self.upper.element
        if self.is_snapshot or element is None:
            return self.upper
        return Antichain(max(element - 1, 0))

    def is_before(self, other: Position) -> bool:
        """Whether a stream comes to the other position later than to this one."""
        return self._order < other._order

    @property
    def _order(self) -> tuple[bool, int, bool, bytes]:
        """The contents as of a time come after the time, and before the next one."""
        element = self.upper.element
        at = 0 if element is None else element - (not self.is_snapshot)
        return element is None, at, not self.is_snapshot, self.key or b""

    def with_upper(self, upper: Antichain) -> Position:
        """Everything before `upper` is delivered."""
        return Position(upper, shard=self.shard)

    def with_key(self, time: int, key: bytes) -> Position:
        """Of this time, or of the contents with which the stream begins, the keys before this one are delivered."""
        return Position(Antichain(time), self.is_snapshot, key, self.shard)


def _key(offset: Offset, given: object) -> bytes:
    try:
        if isinstance(given, str) and (key := b64decode(given, validate=True)):
            return key
    except (binascii.Error, ValueError):
        pass
    raise _unknown(offset)


def _unknown(offset: Offset) -> InvalidUsage:
    return InvalidUsage(
        f"the stream's offset {offset!r:.300} is not one that this persist writes; use a new checkpoint, or the newer "
        "persist that wrote it"
    )


def offset_at(upper: Antichain, shard: ShardId) -> Offset:
    return Position(upper, shard=shard).offset


def snapshot_offset(as_of: int, shard: ShardId) -> Offset:
    return Position(Antichain(as_of), True, shard=shard).offset


def between(start: Position, end: Position) -> list[Interval]:
    """What a stream delivers from one position to another, in time order: at most three intervals, none of them empty.

    The same whenever it is asked: it knows nothing of the shard. Raises InvalidUsage where no stream comes from the one
    to the other.
    """
    time = start.upper.element
    if time is None or not start.is_before(end):
        return []
    if start.upper == end.upper and start.is_snapshot == end.is_snapshot:
        return [Interval(time, Antichain(time + 1), start.is_snapshot, KeyRange(start.key, end.key))]
    if end.is_snapshot:
        raise _unknown(end.offset)
    if start.is_snapshot and start.key is None:
        return [Interval(time, end.upper, True), *_last(end)]
    found = []
    if start.key is not None:
        found.append(Interval(time, Antichain(time + 1), start.is_snapshot, KeyRange(start.key, None)))
        time += 1
    if Antichain(time) < end.upper:
        found.append(Interval(time, end.upper, False))
    return [*found, *_last(end)]


def _last(end: Position) -> list[Interval]:
    """The keys of the last time that are delivered."""
    time = end.upper.element
    if end.key is None or time is None:
        return []
    return [Interval(time, Antichain(time + 1), False, KeyRange(None, end.key))]


# How far a micro-batch reaches.
#
# Whole times are taken while they fit. Where the next one does not fit alone, its keys are cut. What is counted are
# rows as they are stored, before they are added up, so a micro-batch may turn out smaller than its bound. Where a
# stream shows a row as often as it is there, it counts as often. One key at one time is never cut: that alone may
# exceed the bound.


Ints = npt.NDArray[np.int64]
COUNTED_ROWS = 16_384  # that are decoded at a time where rows have to be counted
EVERYTHING = Limit()


@dataclass(frozen=True)
class Admitted:
    """Where a micro-batch ends, and what comes after it up to the upper of the shard, at most."""

    end: Position
    behind: Weight


@dataclass(frozen=True)
class _Slab:
    """One time of the shard, or its contents as of a time, from a key on: what is cut by keys."""

    interval: Interval
    start: Position
    wanted: KeyRange
    schema: ShardSchema
    reader: PartReader
    runs: tuple[Run, ...]
    dropped: tuple[tuple[RowDrop, tuple[Run, ...]], ...]

    @property
    def every(self) -> tuple[Run, ...]:
        return (*self.runs, *(run for _, some in self.dropped for run in some))

    @property
    def end(self) -> Position:
        return self.start.with_upper(self.interval.upper)


class Admission:
    """Remembers what it has looked into last, so that a large batch or time is looked into once."""

    def __init__(self, target: Target, options: ReadOptions) -> None:
        self._target = target
        self._options = options
        self._expands = not options.changes  # rows are shown as often as they are there
        self._looked: tuple[tuple[str, ...], int, Ints, Ints] | None = None
        self._ahead: dict[tuple[int, bool, int, bytes | None], bytes] = {}

    def next(self, view: ShardView, lease: ReadLease, start: Position, upper: Antichain, limit: Limit) -> Admitted:
        """The next micro-batch from `start` on, which ends at `upper` at the latest; at `start` where nothing came.

        With a limit a drop is a micro-batch of its own. Raises what `leased_blobs` and asking for a view may.
        """
        end, left = self._next(view, lease, start, upper, limit)
        if end.key is None or left is None:
            return Admitted(end, self.behind(view, end))
        time = end.upper.element or 0
        return Admitted(end, left.plus(_sum(map(self._weight, (b for b in view.batches if _begins_after(b, time))))))

    def behind(self, view: ShardView, at: Position) -> Weight:
        """What was written and comes at or after a position, at most."""
        time = at.upper.element
        if time is None:
            return NOTHING
        batches = overlapping_batches(view.batches, Interval(time, view.upper, at.is_snapshot))
        return _sum(self._weight_from(batch, 0 if at.is_snapshot else time) for batch in batches)

    def _next(
        self, view: ShardView, lease: ReadLease, start: Position, upper: Antichain, limit: Limit
    ) -> tuple[Position, Weight | None]:
        """Where it ends, and the weight of what is left of the time there, if it ends between two keys."""
        time = start.upper.element
        if time is None or not start.upper < upper:
            return start, None
        interval = Interval(time, upper, start.is_snapshot)
        drops = interval.drops(view)
        if limit == EVERYTHING:
            is_there = start.key is not None or drops or overlapping_batches(view.batches, interval)
            return (start.with_upper(upper) if is_there else start), None
        if start.key is not None:
            return self._cut(view, lease, start, limit)
        before = replace(interval, upper=Antichain(drops[0].at)) if drops else interval
        found = self._whole(view, before, limit) if Antichain(time) < before.upper else None
        if isinstance(found, Antichain):
            return start.with_upper(found), None
        if found is not None:
            at = start if start.is_snapshot and found == time else start.with_upper(Antichain(found))
            return self._cut(view, lease, at, limit)
        return self._cut(view, lease, start.with_upper(before.upper), limit) if drops else (start, None)

    # --- whole times

    def _whole(self, view: ShardView, interval: Interval, limit: Limit) -> Antichain | int | None:
        """The end of those times that fit. An int: this time comes first, and does not. None: nothing was written.

        Batches are taken whole while they fit; the first that does not is cut between two of its times.
        """
        batches = overlapping_batches(view.batches, interval)
        used, end = NOTHING, None
        if interval.snapshot:
            contents = [batch for batch in batches if not _begins_after(batch, interval.lower)]
            used, batches = _sum(map(self._weight, contents)), batches[len(contents) :]
            if not limit.allows(used):
                return interval.lower
            if contents:
                end = max(contents[-1].desc.upper, Antichain(interval.lower + 1))
        for batch in batches:
            weight = self._weight(batch)
            if not limit.allows(used.plus(weight)):
                return self._between_times(view, batch, interval, used, limit, end)
            used, end = used.plus(weight), batch.desc.upper
        return None if end is None else min(end, interval.upper)

    def _between_times(
        self, view: ShardView, batch: HollowBatch, interval: Interval, used: Weight, limit: Limit, end: Antichain | None
    ) -> Antichain | int | None:
        """As `_whole`, with this batch, of which not all fits; without it the end would be `end`."""
        times, counts = self._times(view, batch, interval.lower)
        is_within = times >= interval.lower
        if interval.upper.element is not None:
            is_within &= times < interval.upper.element
        times, counts = times[is_within], counts[is_within]
        if not len(times):
            return min(batch.desc.upper, interval.upper)
        left = self._rows_of(batch, limit, used)
        fitting = int(np.searchsorted(np.cumsum(counts), left, side="right"))
        if fitting == len(times):
            return min(batch.desc.upper, interval.upper)
        if fitting:
            return Antichain(int(times[fitting - 1]) + 1)
        return min(end, interval.upper) if end is not None else int(times[0])

    def _rows_of(self, batch: HollowBatch, limit: Limit, used: Weight) -> int:
        """How many rows of the batch the limit allows besides what is used."""
        if limit.rows is not None:
            return limit.rows - used.rows
        assert limit.size is not None
        weight = self._weight(batch)
        return int((limit.size - used.size) * weight.rows / max(1.0, weight.size))

    def _times(self, view: ShardView, batch: HollowBatch, first: int) -> tuple[Ints, Ints]:
        """The distinct times from `first` on of a batch's rows, ascending, and how many rows each has, at most."""
        ids = _ids(batch)
        if self._looked is None or self._looked[0] != ids or self._looked[1] > first:
            found: list[tuple[Ints, Ints]] = []
            mixed = []
            for part in batch.parts():
                if part.time_min == part.time_max:
                    found.append((np.array([part.time_min]), np.array([self._rows(part)])))
                else:
                    mixed.append(part)
            found += self._read_times(view, batch, mixed, first)
            times = np.concatenate([some for some, _ in found]) if found else np.zeros(0, np.int64)
            counts = np.concatenate([some for _, some in found]) if found else np.zeros(0, np.int64)
            distinct, places = np.unique(times, return_inverse=True)
            sums = np.zeros(len(distinct), np.int64)
            np.add.at(sums, places, counts)
            self._looked = (ids, first, distinct, sums)
        return self._looked[2], self._looked[3]

    def _read_times(
        self, view: ShardView, batch: HollowBatch, parts: list[Part], first: int
    ) -> Iterator[tuple[Ints, Ints]]:
        """The times of parts that have several: their rows have to be read for that, but no column of the user's."""
        transport = executors.transport(self._target.connection)
        _, reader = part_reader(transport, view, self._target.connection.handles.read)
        for table in reader.read_updates(parts, Antichain(first), batch.desc.upper, columns=()):
            times, places = np.unique(table.column(TIME).to_numpy(), return_inverse=True)
            weights = table.column(DIFF).to_numpy() if self._expands else np.ones(len(table), np.int64)
            sums = np.zeros(len(times), np.int64)
            np.add.at(sums, places, np.maximum(weights, 0))
            yield times, sums

    # --- the keys of one time

    def _cut(self, view: ShardView, lease: ReadLease, start: Position, limit: Limit) -> tuple[Position, Weight | None]:
        """How far the keys of the time of `start` fit, from its key on; and what is left of the time then."""
        slab = self._slab(view, lease, start)
        parts = [part for run in slab.every for part in run.parts]
        if slab.wanted.is_empty or not parts:
            return slab.end, None
        weight = _sum(Weight(part.rows, part.size) for part in parts)
        within = slab.wanted
        if not self._has_to_count(slab):
            found = find_cut(slab.every, slab.reader, within, limit)
            if not found.is_stuck:
                return self._at(slab, found.key), found.left
            weight, within = found.left, KeyRange(within.lower, found.key)
        rows_max = limit.rows
        if rows_max is None:
            assert limit.size is not None
            rows_max = max(1, int(limit.size * weight.rows / max(1.0, weight.size)))
        return self._at(slab, self._counted(slab, lease, within, rows_max)), weight

    def _slab(self, view: ShardView, lease: ReadLease, start: Position) -> _Slab:
        time = start.upper.element
        assert time is not None
        transport, settings = executors.transport(self._target.connection), self._target.connection.handles.read
        schema, reader = part_reader(transport, view, settings)
        keys = KeyRange(start.key, None)
        wanted = planning.selected(schema, self._options, schema.key).key_range.meet(keys)
        interval = Interval(time, Antichain(time + 1), start.is_snapshot, keys)
        runs, dropped = select_runs(OneShard(transport, view.shard_id), reader, view, interval, wanted, lease)
        first = 0 if start.is_snapshot else time
        return _Slab(interval, start, wanted, schema, reader, within(runs, first - 1, time), tuple(dropped))

    def _has_to_count(self, slab: _Slab) -> bool:
        """Whether indexes tell too little: rows may be shown more than once, or most of them are of other times."""
        parts = [part for run in slab.runs for part in run.parts]
        is_many = self._expands and any(part.diff_max > 1 for part in parts)
        return is_many or (not slab.interval.snapshot and any(part.time_min < part.time_max for part in parts))

    def _at(self, slab: _Slab, key: bytes | None) -> Position:
        """Before this key of the time, or after all of them (None)."""
        if key is None or (slab.wanted.upper is not None and key >= slab.wanted.upper):
            return slab.end
        return slab.start.with_key(slab.interval.lower, key)

    def _counted(self, slab: _Slab, lease: ReadLease, within: KeyRange, rows_max: int) -> bytes | None:
        """The key before which there are at most so many rows, or one key alone; the end of `within` where all fit.

        Rows are read for it until it is found, only the key of them.
        """
        place = (slab.interval.lower, slab.interval.snapshot, rows_max)
        if (known := self._ahead.get((*place, within.lower))) is not None:
            return known
        streams = list(self._streams(slab, lease, within))
        share = max(1, rows_max // len(streams))  # rows that went and rows that came are shown side by side
        weights = DIFF if self._expands else None
        found = [
            next((cuts for cuts in count_cuts(tables, slab.schema, share, weights) if cuts), []) for tables in streams
        ]
        self._ahead = {}
        if len(streams) == 1:
            lowers = [within.lower, *found[0]]
            self._ahead = {(*place, lower): upper for lower, upper in zip(lowers, found[0], strict=False)}
        cut = min((cuts[0] for cuts in found if cuts), default=within.upper)
        return cut if within.lower is None or cut is None or cut > within.lower else None

    def _streams(self, slab: _Slab, lease: ReadLease, within: KeyRange) -> Iterator[Iterator[pa.Table]]:
        """The keys of the rows of a time in order, as often as each is shown, in `__diff`."""
        reader, key, time = slab.reader, slab.schema.key, slab.interval.lower
        if slab.runs and slab.interval.snapshot:
            tables = reader.read_range(slab.runs, as_of=time, key_range=within, columns=key, batch_rows=COUNTED_ROWS)
            yield with_renewal(tables, lease)
        elif slab.runs:
            parts = [part for run in slab.runs for part in run.parts]
            lower, upper = Antichain(time), slab.interval.upper
            yield with_renewal(reader.read_updates(parts, lower, upper, key_range=within, columns=key), lease)
        for drop, runs in slab.dropped:
            if runs:
                yield with_renewal(retractions(reader, runs, drop, within, key), lease)

    # --- weights

    def _weight(self, batch: HollowBatch) -> Weight:
        return Weight(sum(map(self._rows, batch.parts())), batch.size)

    def _weight_from(self, batch: HollowBatch, time: int) -> Weight:
        """The weight of what a batch has from a time on, as far as that is known."""
        weight = self._weight(batch)
        if self._looked is None or self._looked[0] != _ids(batch) or self._looked[1] > time:
            return weight
        rows = int(self._looked[3][self._looked[2] >= time].sum())
        return Weight(rows, weight.size * rows / max(1, weight.rows))

    def _rows(self, part: Part) -> int:
        """How many rows a stream shows of a part, at most."""
        if not self._expands or part.diff_max <= 1:
            return part.rows
        return part.rows * part.diff_max if part.diff_sum is None or part.diff_min < 0 else part.diff_sum


def _begins_after(batch: HollowBatch, time: int) -> bool:
    return not batch.desc.lower.less_equal(time)


def _ids(batch: HollowBatch) -> tuple[str, ...]:
    return tuple(str(part.id) for part in batch.parts())


def _sum(weights: Iterable[Weight]) -> Weight:
    return reduce(Weight.plus, weights, NOTHING)
