"""Splits, disjoint key ranges of about the same size that cover every key; and cuts, which divide runs by rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from blob.errors import BlobNotFound
from persist.core.batch import Part, Run
from persist.core.errors import Corruption, InvalidUsage
from persist.parts.codec import SAMPLES, RowGroup
from persist.parts.key_encoding import ALL_KEYS, BOUND_BYTES_MAX, KeyRange, SortedKeys, decode_key, lower_bound
from persist.parts.reader import PartReader
from persist.parts.shard_schema import ShardSchema

SPLITS_MAX = 100_000
PIECES_PER_SPLIT = 4  # the footers of parts larger than this fraction of a split are read
FOOTERS_PER_PLAN_MAX = 256  # footers that one plan reads
SLACK_SHARE = 8  # a boundary moves by at most this fraction of a split, so that no row group is on both sides
FOOTERS_PER_CUT_MAX = 1024  # footers that one `find_cut` reads; other parts count as a whole
OPENED_AT_ONCE = 8  # footers that are read concurrently
SHORTENED_BYTES = BOUND_BYTES_MAX - 40  # a sample of fewer bytes is a whole key: less room was left for no column
WEIGHTS_MAX = 2**62  # of the rows of a table together

Ints = npt.NDArray[np.int64]


def plan_splits(
    runs: Sequence[Run], num_splits: int, schema: ShardSchema, reader: PartReader, wanted: KeyRange = ALL_KEYS
) -> list[KeyRange]:
    """Exactly `num_splits` ranges in key order, the first from -inf, the last to +inf; some may be empty.

    They are balanced by the encoded bytes of the keys `wanted`, as far as footers locate them. The footers of parts
    that are large or overlap others are read through `reader`, for the keys within them. Every boundary is a key of
    `schema`, or its first columns, for `decode_key`.
    """
    if not 1 <= num_splits <= SPLITS_MAX:
        raise InvalidUsage(f"num_splits is between 1 and {SPLITS_MAX}, not {num_splits}")
    if num_splits == 1:
        return [KeyRange(None, None)]
    with suppress(BlobNotFound, Corruption):  # reported when that range is read; the others are readable
        runs = reader.expanded(runs, wanted)
    parts = sorted((part for run in runs for part in run.parts if part.rows), key=lambda part: part.key_lower)
    parts = [part for part in parts if wanted.overlaps(part.key_lower, part.key_upper)]
    coarse = _coarse(parts, num_splits)
    opened = [part for part in parts if part.id in coarse]
    row_groups = dict(zip((part.id for part in opened), reader.row_groups_of(opened), strict=True))
    pieces: list[tuple[bytes, float]] = []
    spans: list[tuple[bytes, bytes | None]] = []  # that are fetched as a whole
    for part in parts:
        groups = row_groups.get(part.id)
        if groups is None:  # or the part is damaged or missing, which is reported when that range is read
            pieces.extend(_estimate(part, schema))
            if not part.is_inline:
                spans.append((part.key_lower, part.key_upper))
            continue
        for group in groups:
            size = sum(chunk.size for chunk in group.chunks) / len(group.samples)
            pieces.extend((sample, size) for sample in group.samples)
            spans.append((group.key_lower, group.key_upper))
    lower = wanted.lower or b""
    within = [piece for piece in pieces if lower <= piece[0] and (wanted.upper is None or piece[0] < wanted.upper)]
    boundaries = _boundaries(sorted(within or pieces), num_splits, _gaps(spans))
    return [KeyRange(lower, upper) for lower, upper in pairwise([None, *boundaries, None])]


def plan_within(
    runs: Sequence[Run], num_splits: int, schema: ShardSchema, reader: PartReader, wanted: KeyRange
) -> list[KeyRange]:
    """As `plan_splits`, for the keys `wanted` only: at most `num_splits` ranges, at least one (maybe empty)."""
    ranges = (split.meet(wanted) for split in plan_splits(runs, num_splits, schema, reader, wanted))
    return [split for split in ranges if not split.is_empty] or [wanted]


def overlapping_runs(runs: Iterable[Run], key_range: KeyRange) -> tuple[Run, ...]:
    """The parts that may have keys of the range, so that a split names only parts that it reads."""
    kept = (tuple(part for part in run.parts if key_range.overlaps(part.key_lower, part.key_upper)) for run in runs)
    return tuple(Run(parts) for parts in kept if parts)


def _coarse(parts: list[Part], num_splits: int) -> set[str]:
    """Ids of the blobs whose bounds are too coarse: the largest that overlap others or exceed a fraction of a split."""
    share = sum(part.size for part in parts) / (num_splits * PIECES_PER_SPLIT)
    coarse: dict[str, Part] = {}
    end: Part | None = None  # the part so far with the greatest upper bound
    for part in parts:
        if part.size > share:
            coarse[part.id] = part
        if end is not None and (end.key_upper is None or part.key_lower <= end.key_upper):
            coarse[part.id] = part
            coarse[end.id] = end
        if end is None or (end.key_upper is not None and (part.key_upper is None or part.key_upper > end.key_upper)):
            end = part
    blobs = sorted((part for part in coarse.values() if not part.is_inline), key=lambda part: -part.size)
    return {part.id for part in blobs[:FOOTERS_PER_PLAN_MAX]}


def _estimate(part: Part, schema: ShardSchema) -> list[tuple[bytes, float]]:
    """Half of the part's bytes at either bound, as an estimate."""
    upper = part.key_lower
    if part.key_upper is not None:
        with suppress(Corruption):  # it is not a key
            decode_key(part.key_upper, schema)
            upper = part.key_upper
    return [(part.key_lower, part.size / 2), (upper, part.size / 2)]


def _gaps(spans: list[tuple[bytes, bytes | None]]) -> list[bytes]:
    """The starts of spans that no earlier span overlaps, ascending: at such a boundary nothing is fetched twice."""
    gaps: list[bytes] = []
    end: bytes | None = b""
    for lower, upper in sorted(spans, key=lambda span: span[0]):
        if end is None:
            break
        if lower > end:
            gaps.append(lower)
        end = None if upper is None else max(end, upper)
    return gaps


def _boundaries(pieces: list[tuple[bytes, float]], num_splits: int, gaps: list[bytes]) -> list[bytes]:
    """`num_splits - 1` ascending keys; each is the key of a piece, or a gap if one is near enough."""
    if not pieces:
        return [b""] * (num_splits - 1)
    keys = [key for key, _ in pieces]
    before = list(accumulate((size for _, size in pieces), initial=0.0))
    bytes_before = [before[bisect_left(keys, gap)] for gap in gaps]
    share = before[-1] / num_splits
    boundaries: list[bytes] = []
    piece = 0
    for number in range(1, num_splits):
        target = share * number
        # A boundary is the key before which the bytes are closest to its share.
        while piece < len(pieces) - 1 and before[piece] + pieces[piece][1] / 2 < target:
            piece += 1
        gap = _nearest(bytes_before, target)
        is_near = gap is not None and abs(bytes_before[gap] - target) <= share / SLACK_SHARE
        boundary = gaps[gap] if gap is not None and is_near else keys[piece]
        boundaries.append(max([boundary, *boundaries[-1:]]))
    return boundaries


def _nearest(ascending: list[float], target: float) -> int | None:
    """The index of the value that is closest to the target; None if there are no values."""
    above = bisect_left(ascending, target)
    around = range(max(0, above - 1), min(len(ascending), above + 1))
    return min(around, key=lambda place: abs(ascending[place] - target), default=None)


# Cuts are keys before which runs have at most so many rows. `find_cut` reads no rows. It adds up pieces: rows between
# two keys that the index of a part records. It counts rows as they are stored, of every time, and rows at a boundary on
# both sides, so it never undercounts. If that is too coarse, `count_cuts` computes the cuts from rows that were read.


class Weight(NamedTuple):
    """Stored rows and their encoded bytes."""

    rows: int
    size: float

    def plus(self, other: Weight) -> Weight:
        return Weight(self.rows + other.rows, self.size + other.size)


NOTHING = Weight(0, 0.0)


@dataclass(frozen=True)
class Limit:
    """At most so many rows or encoded bytes; one of them is given."""

    rows: int | None = None
    size: int | None = None

    def allows(self, weight: Weight) -> bool:
        return (self.rows is None or weight.rows <= self.rows) and (self.size is None or weight.size <= self.size)


@dataclass(frozen=True)
class CutPoint:
    """The cut for a limit: all keys before `key` (None: all keys) weigh at most `within`.

    `is_stuck`: no key was found before which there are rows and which is known to be within the limit. `key` is then
    one before which there may be more than the limit allows; None: the end. `left` is the weight at or after the key;
    if stuck, of everything.
    """

    key: bytes | None
    within: Weight
    left: Weight
    is_stuck: bool = False


class _Piece(NamedTuple):
    """Rows whose keys are in `[key, last]` (None: there is no end); or a part that was not opened yet.

    `unsure` is by how much the piece may exceed its weight, because earlier pieces may have less.
    """

    key: bytes
    number: int
    weight: Weight
    part: Part | None
    last: bytes | None
    unsure: Weight = NOTHING


def find_cut(runs: Iterable[Run], reader: PartReader, within: KeyRange, limit: Limit) -> CutPoint:
    """The cut for the limit from the beginning of a key range. `runs` are without bundles.

    It reads the footers of parts that begin before the cut, and a few more. A damaged or missing part counts as a
    whole; it is reported when it is read.
    """
    pieces = _Pieces(runs, reader, within)
    start = within.lower or b""
    used, at, at_key = NOTHING, start, NOTHING  # `at_key` is the weight of all pieces at the key `at`
    taken: list[_Piece] = []
    while (piece := pieces.next()) is not None:
        taken.append(piece)
        if piece.key != at:
            used, at, at_key = used.plus(at_key), piece.key, NOTHING
        at_key = at_key.plus(piece.weight)
        if limit.allows(used.plus(at_key)):
            continue
        if at > start and used.rows:
            # Also rows of earlier pieces, which may be at the key or after it.
            return CutPoint(at, used, _sum_of(taken, at).plus(pieces.left()))
        return _find_stuck(pieces, at, used.plus(at_key), limit)
    return CutPoint(None, used.plus(at_key), NOTHING)


def _find_stuck(pieces: _Pieces, at: bytes, seen: Weight, limit: Limit) -> CutPoint:
    """The range whose rows must be counted: up to a key before which there may be twice the limit."""
    left = seen.plus(pieces.left())
    twice = Limit(None if limit.rows is None else 2 * limit.rows, None if limit.size is None else 2 * limit.size)
    while (piece := pieces.next()) is not None:
        if piece.key > at and not twice.allows(seen):
            return CutPoint(piece.key, NOTHING, left, is_stuck=True)
        seen = seen.plus(piece.weight)
    return CutPoint(None, NOTHING, left, is_stuck=True)


def _sum_of(pieces: Iterable[_Piece], start: bytes) -> Weight:
    """The most that rows of these pieces weigh whose keys are at or after `start`."""
    weights = [piece.weight.plus(piece.unsure) for piece in pieces if piece.last is None or piece.last >= start]
    return Weight(sum(weight.rows for weight in weights), sum(weight.size for weight in weights))


class _Pieces:
    """The pieces of all parts in key order. A part is opened when it is reached."""

    def __init__(self, runs: Iterable[Run], reader: PartReader, within: KeyRange) -> None:
        self._reader = reader
        self._within = within
        self._opened = 0
        self._groups: dict[str, Sequence[RowGroup] | None] = {}
        parts = [
            part for run in runs for part in run.parts if part.rows and within.overlaps(part.key_lower, part.key_upper)
        ]
        self._waiting = sorted((part for part in parts if not part.is_inline), key=lambda part: part.key_lower)
        self._heap = [
            _Piece(
                self._from(part.key_lower),
                number,
                Weight(part.rows, part.size),
                None if part.is_inline else part,
                part.key_upper,
            )
            for number, part in enumerate(parts)
        ]
        self._number = len(parts)
        heapify(self._heap)

    def next(self) -> _Piece | None:
        while self._heap:
            piece = heappop(self._heap)
            if piece.part is None:
                return piece
            for inner in self._split(piece.part, piece.weight):
                heappush(self._heap, inner)
        return None

    def left(self) -> Weight:
        """The weight of the pieces that are left, including rows outside of the range of parts that are not opened."""
        return _sum_of(self._heap, b"")

    def _from(self, key: bytes) -> bytes:
        """The least key of the range at or after this key."""
        return key if self._within.lower is None else max(key, self._within.lower)

    def _split(self, part: Part, weight: Weight) -> Iterator[_Piece]:
        groups = self._open(part)
        if groups is None:
            groups = ()
            yield self._piece(part.key_lower, weight, part.key_upper)
        # The size of a part includes its tail, which is distributed over its rows.
        times = weight.size / max(1, sum(chunk.size for group in groups for chunk in group.chunks))
        for group in groups:
            if not self._within.overlaps(group.key_lower, group.key_upper):
                continue
            row_bytes = times * sum(chunk.size for chunk in group.chunks) / max(1, group.rows)
            pieces = [
                (key, Weight(rows, rows * row_bytes))
                for key, rows in split_row_group(group, self._within.lower)
                if self._within.upper is None or key < self._within.upper
            ]
            # The number of rows before the first sample is not known: those counted there may be after the last.
            is_whole = len(pieces) > 1 and pieces[0][0] == group.key_lower
            for (key, weight), (following, _) in pairwise(pieces):
                yield self._piece(key, weight, following)
            for key, weight in pieces[-1:]:
                yield self._piece(key, weight, group.key_upper, pieces[0][1] if is_whole else NOTHING)

    def _piece(self, key: bytes, weight: Weight, last: bytes | None, unsure: Weight = NOTHING) -> _Piece:
        self._number += 1
        return _Piece(self._from(key), self._number, weight, None, last, unsure)

    def _open(self, part: Part) -> Sequence[RowGroup] | None:
        """The row groups of a part; None if it is not opened."""
        if part.id not in self._groups:
            room = min(OPENED_AT_ONCE, FOOTERS_PER_CUT_MAX - self._opened)
            opened = self._waiting[:room]
            if part not in opened:
                opened = [part, *opened[: room - 1]] if room > 0 else []
            self._opened += len(opened)
            self._groups.update(zip((part.id for part in opened), self._reader.row_groups_of(opened), strict=True))
            self._waiting = [waiting for waiting in self._waiting if waiting.id not in self._groups]
        return self._groups.get(part.id)


def split_row_group(group: RowGroup, start: bytes | None) -> Iterator[tuple[bytes, int]]:
    """Pieces of a row group: a key, and the most rows between it and the next one.

    Rows before `start` are left out, as far as the index can locate them. The first sample is one of the first `step`
    rows (the index does not record which), and each other one is `step` rows after its predecessor.
    """
    if start is not None and group.key_upper is not None and group.key_upper < start:
        return
    count, step = len(group.samples), max(1, group.rows // SAMPLES)
    is_regular = count > 0 and (count - 1) * step < group.rows <= (count + 1) * step
    if not is_regular:
        yield group.key_lower, group.rows
        return
    keys = (group.key_lower, *group.samples)
    # The rows before the first sample and after the last one are, together, those that the others leave.
    edge = min(step, group.rows - (count - 1) * step)
    begin = 0
    if start is not None:
        begin = sum(1 for key in group.samples if key < start and len(key) < SHORTENED_BYTES)
    counts = [edge, *[step] * (count - 1), edge][begin:]
    if begin == 0:
        counts[-1] = group.rows - sum(counts[:-1])
    yield from zip(keys[begin:], counts, strict=True)


def count_cuts(
    tables: Iterator[pa.Table], schema: ShardSchema, limit: int, weights: str | None = None
) -> Iterator[list[bytes]]:
    """The cuts of rows in key order, with at most `limit` rows between them, table by table.

    Keys that `lower_bound` shortens to the same bytes count as one key. The rows of one key are never cut, so they may
    exceed the limit. `weights` names a column with the count of each row (negative: 0), if any.
    """
    counter = _Counter(schema, limit)
    for table in tables:
        if len(table):
            weight = np.ones(len(table), np.int64) if weights is None else table.column(weights).to_numpy()
            cuts, is_known = counter.take(SortedKeys(table, schema.key), weight)
            yield cuts
            if not is_known:
                return


class _Counter:
    """Counts the rows since the last cut, and remembers their first key."""

    def __init__(self, schema: ShardSchema, limit: int) -> None:
        self._schema = schema
        self._limit = limit
        self._used = 0
        self._first: bytes | None = None
        self._is_over = False  # the rows of the first key exceed the limit: the next key is a cut

    def take(self, keys: SortedKeys, weights: Ints) -> tuple[list[bytes], bool]:
        """The cuts within a table; False: the last cut is a key of the table before, so later cuts are not known."""
        sums = np.cumsum(np.clip(weights, 0, min(self._limit + 1, WEIGHTS_MAX // len(keys))))
        cuts: list[bytes] = []
        start = 0
        while start < len(keys):
            if self._is_over:
                start = bisect_left(range(len(keys)), True, start, key=lambda row: self._at(keys, row) != self._first)
                if start == len(keys):
                    break
                cuts.append(self._at(keys, start))
                self._begin(cuts[-1])
            if self._first is None:
                self._begin(self._at(keys, start))
            before = int(sums[start - 1]) if start else 0
            place = int(np.searchsorted(sums, before + self._limit - self._used, side="right"))
            if place >= len(keys):
                self._used += int(sums[-1]) - before
                break
            cut = self._at(keys, place)
            if cut == self._first:
                self._is_over, start = True, place
                continue
            cuts.append(cut)
            start = keys.bisect(cut, start)
            if start == 0:  # rows of this key may be in the table before
                return cuts, False
            self._begin(cut)
        return cuts, True

    def _begin(self, key: bytes) -> None:
        self._first, self._used, self._is_over = key, 0, False

    def _at(self, keys: SortedKeys, row: int) -> bytes:
        return lower_bound(keys[row], self._schema)
