"""Offsets of streams, and admission control: the end of a micro-batch under a limit of rows or bytes.

An offset is `{"v": 1, "frontier": [7], "shard": "s…"}` (everything before time 7 is delivered) or, for a stream that
starts with the contents of the shard, `{"v": 1, "snapshot": 4, "shard": "s…"}` (nothing is delivered: the contents as
of 4 come first, then changes). If one of these is too large for a micro-batch, the offset also has a key:
`{"v": 2, "snapshot": 4, "key": "…", "shard": "s…"}` (of the contents as of 4, the keys before this one are delivered),
or `{"v": 2, "frontier": [7], "key": "…", "shard": "s…"}` (everything before time 7 and, of time 7, the keys before this
one). The key is base64 of the encoding of `persist.parts.key_encoding`. Older versions reject offsets with a key by
their version. The shard id distinguishes incarnations of a name: a checkpoint of a dropped shard is rejected. Older
checkpoints have no id and are valid for any shard of the name.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from persist.client.contents_diff import retractions, runs_in_interval
from persist.client.snapshot import ReadLease, part_reader, with_renewal
from persist.client.transport import OneShard
from persist.core.batch import HollowBatch, Part, Run
from persist.core.errors import InvalidUsage
from persist.core.frontier import Antichain, frontier
from persist.core.ids import ShardId
from persist.core.shard_view import ShardView
from persist.core.truncations_and_drops import RowDrop
from persist.parts import DIFF, TIME, KeyRange, PartReader, ShardSchema
from persist.parts.key_splits import NOTHING, Limit, Weight, count_cuts, find_cut
from persist.spark import executors
from persist.spark.change_feed import Interval, overlapping_batches, select_runs
from persist.spark.options import ReadOptions, Target

WHOLE_VERSION = 1  # of offsets between times, which older versions can read
CUT_VERSION = 2  # of offsets between keys
Offset = dict[str, Any]


@dataclass(frozen=True)
class Position:
    """The position of a stream: everything before `upper` is delivered and, of that time, the keys before `key`.

    With `is_snapshot`, the time is that of the initial snapshot, and the keys are those of its contents. `key` None: no
    key is delivered. `shard` None: any shard of the name.
    """

    upper: Antichain
    is_snapshot: bool = False
    key: bytes | None = None
    shard: ShardId | None = None

    @classmethod
    def of(cls, offset: Offset) -> Position:
        """Raises InvalidUsage if this version of persist does not know the offset."""
        version, encoded = offset.get("v"), offset.get("key")
        is_known = version == (WHOLE_VERSION if encoded is None else CUT_VERSION)
        if not is_known or ("snapshot" in offset) == ("frontier" in offset):
            raise _unknown_offset(offset)
        is_snapshot = "snapshot" in offset
        upper = frontier(offset["snapshot"]) if is_snapshot else Antichain.from_json(offset["frontier"])
        try:
            key = None if encoded is None else b64decode(encoded, validate=True)
        except (TypeError, ValueError):
            raise _unknown_offset(offset) from None
        if key == b"" or (upper.element is None and (is_snapshot or key is not None)):
            raise _unknown_offset(offset)
        return cls(upper, is_snapshot, key, offset.get("shard"))

    @property
    def offset(self) -> Offset:
        offset: Offset = {"v": WHOLE_VERSION if self.key is None else CUT_VERSION}
        if self.is_snapshot:
            offset["snapshot"] = self.upper.element
        else:
            offset["frontier"] = self.upper.to_json()
        if self.key is not None:
            offset["key"] = b64encode(self.key).decode()
        return offset if self.shard is None else {**offset, "shard": self.shard}

    @property
    def held(self) -> Antichain:
        """The since that a stream at this position needs; `[]` (none) at the end of a closed shard."""
        element = self.upper.element
        if self.is_snapshot or element is None:
            return self.upper
        return Antichain(max(element - 1, 0))

    def is_before(self, other: Position) -> bool:
        return self._order < other._order

    @property
    def _order(self) -> tuple[bool, int, bool, bytes]:
        """The sort key: the snapshot as of a time comes after the time and before the next one."""
        element = self.upper.element
        at = 0 if element is None else element - (not self.is_snapshot)
        return element is None, at, not self.is_snapshot, self.key or b""

    def with_upper(self, upper: Antichain) -> Position:
        """The position at which everything before `upper` is delivered."""
        return Position(upper, shard=self.shard)

    def with_key(self, time: int, key: bytes) -> Position:
        """The position at which the keys of this time, or of the initial snapshot, before this key are delivered."""
        return Position(Antichain(time), self.is_snapshot, key, self.shard)


def _unknown_offset(offset: Offset) -> InvalidUsage:
    return InvalidUsage(
        f"this version of persist does not know the offset {offset!r:.300}; use a new checkpoint, or the newer "
        "version that wrote it"
    )


def between(start: Position, end: Position) -> list[Interval]:
    """The intervals that a stream delivers between two positions, in time order: at most three, none of them empty.

    Deterministic, because it does not depend on the shard. Raises InvalidUsage if no stream leads from `start` to
    `end`.
    """
    time, last = start.upper.element, end.upper.element
    if time is None or not start.is_before(end):
        return []
    if start.upper == end.upper and start.is_snapshot == end.is_snapshot:
        return [Interval(time, Antichain(time + 1), start.is_snapshot, KeyRange(start.key, end.key))]
    if end.is_snapshot:
        raise _unknown_offset(end.offset)
    intervals = []
    if start.is_snapshot and start.key is None:
        intervals.append(Interval(time, end.upper, True))
    else:
        if start.key is not None:
            intervals.append(Interval(time, Antichain(time + 1), start.is_snapshot, KeyRange(start.key, None)))
            time += 1
        if Antichain(time) < end.upper:
            intervals.append(Interval(time, end.upper, False))
    if end.key is not None and last is not None:  # the delivered keys of the last time
        intervals.append(Interval(last, Antichain(last + 1), False, KeyRange(None, end.key)))
    return intervals


# Admission control.
#
# A micro-batch takes whole times while they fit. If the next time does not fit alone, it is cut between two keys. Rows
# are counted as stored, before consolidation, so a micro-batch may be smaller than its limit. If the stream repeats
# rows by their multiplicities, each repetition counts. A key at one time is never cut and may exceed the limit.

Ints = npt.NDArray[np.int64]
COUNTED_ROWS = 16_384  # decoded at once when rows have to be counted
EVERYTHING = Limit()


@dataclass(frozen=True)
class _Slab:
    """One time of the shard, or its contents as of a time, from a key on, which is cut between keys."""

    interval: Interval
    start: Position
    wanted: KeyRange
    schema: ShardSchema
    reader: PartReader
    runs: tuple[Run, ...]
    dropped: tuple[tuple[RowDrop, tuple[Run, ...]], ...]

    @property
    def all_runs(self) -> tuple[Run, ...]:
        return (*self.runs, *(run for _, removed in self.dropped for run in removed))

    @property
    def end(self) -> Position:
        return self.start.with_upper(self.interval.upper)


class Admission:
    """Computes the ends of micro-batches. Caches the last batch and time that it has examined."""

    def __init__(self, target: Target, options: ReadOptions) -> None:
        self._target = target
        self._options = options
        self._expands = not options.changes  # rows are repeated by their multiplicities
        self._counted_times: tuple[tuple[str, ...], int, Ints, Ints] | None = None
        self._next_cuts: dict[tuple[int, bool, int, bytes | None], bytes] = {}

    def next(
        self, view: ShardView, lease: ReadLease, start: Position, upper: Antichain, limit: Limit
    ) -> tuple[Position, Weight]:
        """The end of the next micro-batch from `start` on, and an upper bound of the backlog after it.

        It ends at `upper` at the latest; at `start` if there is no data.
        With a limit, a drop is a micro-batch of its own. Raises what `leased_blobs` and requesting a view may.
        """
        end, left = self._next(view, lease, start, upper, limit)
        if end.key is None or left is None:
            return end, self.behind(view, end)
        time = end.upper.element or 0
        return end, left.plus(_sum(map(self._weight, (b for b in view.batches if _begins_after(b, time)))))

    def behind(self, view: ShardView, at: Position) -> Weight:
        """An upper bound of what was written at or after a position."""
        time = at.upper.element
        if time is None:
            return NOTHING
        batches = overlapping_batches(view.batches, Interval(time, view.upper, at.is_snapshot))
        return _sum(self._weight_from(batch, 0 if at.is_snapshot else time) for batch in batches)

    def _next(
        self, view: ShardView, lease: ReadLease, start: Position, upper: Antichain, limit: Limit
    ) -> tuple[Position, Weight | None]:
        """The end, and the weight of the rest of the time if it is between two keys."""
        time = start.upper.element
        if time is None or not start.upper < upper:
            return start, None
        interval = Interval(time, upper, start.is_snapshot)
        drops = interval.drops(view)
        if limit == EVERYTHING:
            has_data = start.key is not None or drops or overlapping_batches(view.batches, interval)
            return (start.with_upper(upper) if has_data else start), None
        if start.key is not None:
            return self._cut(view, lease, start, limit)
        before = replace(interval, upper=Antichain(drops[0].at)) if drops else interval
        end = self._whole_times(view, before, limit) if Antichain(time) < before.upper else None
        if isinstance(end, Antichain):
            return start.with_upper(end), None
        if end is not None:
            at = start if start.is_snapshot and end == time else start.with_upper(Antichain(end))
            return self._cut(view, lease, at, limit)
        return self._cut(view, lease, start.with_upper(before.upper), limit) if drops else (start, None)

    # --- whole times

    def _whole_times(self, view: ShardView, interval: Interval, limit: Limit) -> Antichain | int | None:
        """The end of the times that fit. An int: the first time, which does not fit alone. None: nothing was written.

        Whole batches are taken while they fit; the first one that does not is cut between two of its times.
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
        """As `_whole_times`, for the first batch that does not fit; `end` is the end without it."""
        times, counts = self._times(view, batch, interval.lower)
        is_within = times >= interval.lower
        if interval.upper.element is not None:
            is_within &= times < interval.upper.element
        times, counts = times[is_within], counts[is_within]
        if not len(times):
            return min(batch.desc.upper, interval.upper)
        if limit.rows is not None:
            left = limit.rows - used.rows
        else:
            assert limit.size is not None
            weight = self._weight(batch)
            left = int((limit.size - used.size) * weight.rows / max(1.0, weight.size))
        fitting = int(np.searchsorted(np.cumsum(counts), left, side="right"))
        if fitting == len(times):
            return min(batch.desc.upper, interval.upper)
        if fitting:
            return Antichain(int(times[fitting - 1]) + 1)
        return min(end, interval.upper) if end is not None else int(times[0])

    def _times(self, view: ShardView, batch: HollowBatch, first: int) -> tuple[Ints, Ints]:
        """The distinct times of a batch from `first` on, ascending, and an upper bound of the rows of each."""
        ids = _ids(batch)
        if self._counted_times is None or self._counted_times[0] != ids or self._counted_times[1] > first:
            mixed = [part for part in batch.parts() if part.time_min < part.time_max]
            rows = [(part.time_min, self._rows_max(part)) for part in batch.parts() if part.time_min == part.time_max]
            counted = [
                _sum_by_time(np.array(rows, np.int64).reshape(-1, 2).T),
                *self._read_times(view, batch, mixed, first),
            ]
            self._counted_times = (ids, first, *_sum_by_time(np.concatenate(counted, axis=1)))
        return self._counted_times[2], self._counted_times[3]

    def _read_times(self, view: ShardView, batch: HollowBatch, parts: list[Part], first: int) -> Iterator[Ints]:
        """The times of parts that have several, and their row counts, as `_sum_by_time`. Reads no user columns."""
        transport = executors.transport(self._target.connection)
        _, reader = part_reader(transport, view, self._target.connection.handles.read)
        for table in reader.read_updates(parts, Antichain(first), batch.desc.upper, columns=()):
            weights = table.column(DIFF).to_numpy() if self._expands else np.ones(len(table), np.int64)
            yield _sum_by_time(np.stack([table.column(TIME).to_numpy(), np.maximum(weights, 0)]))

    # --- the keys of one time

    def _cut(self, view: ShardView, lease: ReadLease, start: Position, limit: Limit) -> tuple[Position, Weight | None]:
        """The position up to which the keys of the time of `start` fit, and the weight of the rest of that time."""
        slab = self._slab(view, lease, start)
        parts = [part for run in slab.all_runs for part in run.parts]
        if slab.wanted.is_empty or not parts:
            return slab.end, None
        weight = _sum(Weight(part.rows, part.size) for part in parts)
        within = slab.wanted
        # Indexes do not suffice if rows may repeat, or most rows of a part may have other times.
        inserted = [part for run in slab.runs for part in run.parts]
        has_to_count = self._expands and any(part.diff_max > 1 for part in inserted)
        if not slab.interval.snapshot:
            has_to_count = has_to_count or any(part.time_min < part.time_max for part in inserted)
        if not has_to_count:
            cut = find_cut(slab.all_runs, slab.reader, within, limit)
            if not cut.is_stuck:
                return self._position_before(slab, cut.key), cut.left
            weight, within = cut.left, KeyRange(within.lower, cut.key)
        rows_max = limit.rows
        if rows_max is None:
            assert limit.size is not None
            rows_max = max(1, int(limit.size * weight.rows / max(1.0, weight.size)))
        return self._position_before(slab, self._count_cut(slab, lease, within, rows_max)), weight

    def _slab(self, view: ShardView, lease: ReadLease, start: Position) -> _Slab:
        time = start.upper.element
        assert time is not None
        transport, settings = executors.transport(self._target.connection), self._target.connection.handles.read
        schema, reader = part_reader(transport, view, settings)
        keys = KeyRange(start.key, None)
        wanted = replace(self._options.selection, columns=schema.key).on(schema).key_range.meet(keys)
        interval = Interval(time, Antichain(time + 1), start.is_snapshot, keys)
        runs, dropped = select_runs(OneShard(transport, view.shard_id), reader, view, interval, wanted, lease)
        first = 0 if start.is_snapshot else time
        return _Slab(interval, start, wanted, schema, reader, runs_in_interval(runs, first - 1, time), tuple(dropped))

    def _position_before(self, slab: _Slab, key: bytes | None) -> Position:
        """The position before this key of the time, or after all keys (None)."""
        if key is None or (slab.wanted.upper is not None and key >= slab.wanted.upper):
            return slab.end
        return slab.start.with_key(slab.interval.lower, key)

    def _count_cut(self, slab: _Slab, lease: ReadLease, within: KeyRange, rows_max: int) -> bytes | None:
        """The key before which there are at most `rows_max` rows, or a single key; the end of `within` if all fit.

        Reads the key columns until it is found.
        """
        place = (slab.interval.lower, slab.interval.snapshot, rows_max)
        if (known := self._next_cuts.get((*place, within.lower))) is not None:
            return known
        streams = list(self._key_streams(slab, lease, within))
        share = max(1, rows_max // len(streams))  # deletions and insertions share the limit
        weights = DIFF if self._expands else None
        cuts_of_streams = [
            next((cuts for cuts in count_cuts(tables, slab.schema, share, weights) if cuts), []) for tables in streams
        ]
        self._next_cuts = {}
        if len(streams) == 1:
            [cuts] = cuts_of_streams
            lowers = [within.lower, *cuts]
            self._next_cuts = {(*place, lower): upper for lower, upper in zip(lowers, cuts, strict=False)}
        cut = min((cuts[0] for cuts in cuts_of_streams if cuts), default=within.upper)
        return cut if within.lower is None or cut is None or cut > within.lower else None

    def _key_streams(self, slab: _Slab, lease: ReadLease, within: KeyRange) -> Iterator[Iterator[pa.Table]]:
        """The keys of the rows of a time in order, with their multiplicities in `__diff`."""
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
        return Weight(sum(map(self._rows_max, batch.parts())), batch.size)

    def _weight_from(self, batch: HollowBatch, time: int) -> Weight:
        """The weight of a batch from a time on, as far as that is known."""
        weight = self._weight(batch)
        if self._counted_times is None or self._counted_times[0] != _ids(batch) or self._counted_times[1] > time:
            return weight
        rows = int(self._counted_times[3][self._counted_times[2] >= time].sum())
        return Weight(rows, weight.size * rows / max(1, weight.rows))

    def _rows_max(self, part: Part) -> int:
        """An upper bound of the rows that a stream delivers of a part."""
        if not self._expands or part.diff_max <= 1:
            return part.rows
        return part.rows * part.diff_max if part.diff_sum is None or part.diff_min < 0 else part.diff_sum


def _sum_by_time(counts: Ints) -> Ints:
    """The distinct times, ascending, and the sum of the counts of each: two rows, as in `counts`."""
    times, places = np.unique(counts[0], return_inverse=True)
    sums = np.zeros(len(times), np.int64)
    np.add.at(sums, places, counts[1])
    return np.stack([times, sums])


def _begins_after(batch: HollowBatch, time: int) -> bool:
    return not batch.desc.lower.less_equal(time)


def _ids(batch: HollowBatch) -> tuple[str, ...]:
    return tuple(str(part.id) for part in batch.parts())


def _sum(weights: Iterable[Weight]) -> Weight:
    return reduce(Weight.plus, weights, NOTHING)
