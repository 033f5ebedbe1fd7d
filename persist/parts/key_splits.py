"""Key ranges that are disjoint, cover every key and hold about equally many rows, and row cuts of runs."""

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
from persist.parts.key_encoding import ALL_KEYS, BOUND_BYTES_MAX, KeyRange, SortedKeys, is_key, lower_bound
from persist.parts.reader import PartReader
from persist.parts.shard_schema import ShardSchema

# Splits: key ranges that are disjoint, cover every key, and hold about the same number of bytes.


SPLITS_MAX = 100_000
PIECES_PER_SPLIT = 4  # parts larger than this share of a split are looked into
FOOTERS_PER_PLAN_MAX = 256  # parts that one plan looks into
SLACK_SHARE = 8  # a boundary moves by at most this share of a split, to where no row group lies on both sides


def plan_splits(
    runs: Sequence[Run], num_splits: int, schema: ShardSchema, reader: PartReader | None = None
) -> list[KeyRange]:
    """Exactly `num_splits` ranges in key order, the first from -inf, the last to +inf; some may be empty.

    Balanced by encoded bytes. Parts that are large or overlap others are looked into: their footers, read
    through `reader`, name keys within them (None: the bounds of parts alone decide, which tells little about
    parts that overlap, and about bundles). Every boundary is a key of `schema`, or its first columns, for `decode_key`.
    """
    return _plan(runs, num_splits, schema, reader, ALL_KEYS)


def plan_within(
    runs: Sequence[Run], num_splits: int, schema: ShardSchema, reader: PartReader, wanted: KeyRange
) -> list[KeyRange]:
    """As `plan_splits`, of the keys `wanted` only: at most so many ranges, and at least one, which may be empty."""
    ranges = (one.meet(wanted) for one in _plan(runs, num_splits, schema, reader, wanted))
    return [one for one in ranges if not one.is_empty] or [wanted]


def _plan(
    runs: Sequence[Run], num_splits: int, schema: ShardSchema, reader: PartReader | None, wanted: KeyRange
) -> list[KeyRange]:
    """As `plan_splits`, balanced by the bytes of the keys `wanted`, as far as footers tell where these lie."""
    if not 1 <= num_splits <= SPLITS_MAX:
        raise InvalidUsage(f"num_splits is between 1 and {SPLITS_MAX}, not {num_splits}")
    if num_splits == 1:
        return [KeyRange(None, None)]
    if reader is not None:
        with suppress(BlobNotFound, Corruption):  # told to who reads that range: the others can be read
            runs = reader.expanded(runs, wanted)
    parts = sorted((part for run in runs for part in run.parts if part.rows), key=lambda part: part.key_lower)
    parts = [part for part in parts if wanted.overlaps(part.key_lower, part.key_upper)]
    found: dict[str, Sequence[RowGroup] | None] = {}
    if reader is not None:
        within = _coarse(parts, num_splits)
        looked = [part for part in parts if part.id in within]
        found = dict(zip((part.id for part in looked), reader.row_groups_of(looked), strict=True))
    pieces: list[tuple[bytes, float]] = []
    spans: list[tuple[bytes, bytes | None]] = []  # of what is fetched as a whole
    for part in parts:
        groups = found.get(part.id)
        if groups is None:  # also of what is damaged or missing: told to who reads that range
            pieces.extend(_ends(part, schema))
            if not part.is_inline:
                spans.append((part.key_lower, part.key_upper))
            continue
        for group in groups:
            size = sum(chunk.size for chunk in group.chunks) / len(group.samples)
            pieces.extend((sample, size) for sample in group.samples)
            spans.append((group.key_lower, group.key_upper))
    boundaries = _boundaries(sorted(_of(pieces, wanted)), num_splits, _gaps(spans))
    return [KeyRange(lower, upper) for lower, upper in pairwise([None, *boundaries, None])]


def _of(pieces: list[tuple[bytes, float]], wanted: KeyRange) -> list[tuple[bytes, float]]:
    """Those that lie in the range; all where none does."""
    lower = wanted.lower or b""
    found = [one for one in pieces if lower <= one[0] and (wanted.upper is None or one[0] < wanted.upper)]
    return found or pieces


def overlapping_runs(runs: Iterable[Run], key_range: KeyRange) -> tuple[Run, ...]:
    """The parts that may have keys of the range, so that a split carries no more than it reads."""
    kept = []
    for run in runs:
        parts = tuple(part for part in run.parts if key_range.overlaps(part.key_lower, part.key_upper))
        if parts:
            kept.append(Run(parts))
    return tuple(kept)


def _coarse(parts: list[Part], num_splits: int) -> set[str]:
    """Ids of the blobs whose bounds say too little: the largest that overlap others or exceed a share of a split."""
    share = sum(part.size for part in parts) / (num_splits * PIECES_PER_SPLIT)
    coarse: dict[str, Part] = {}
    end: Part | None = None  # the part seen so far that reaches furthest
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


def _ends(part: Part, schema: ShardSchema) -> list[tuple[bytes, float]]:
    """Half of the part's bytes at either bound, for want of knowing better."""
    upper = part.key_lower
    if part.key_upper is not None and is_key(part.key_upper, schema):
        upper = part.key_upper
    return [(part.key_lower, part.size / 2), (upper, part.size / 2)]


def _gaps(spans: list[tuple[bytes, bytes | None]]) -> list[bytes]:
    """Where a span begins that none before it reaches, ascending: a boundary there has nothing fetched twice."""
    found: list[bytes] = []
    end: bytes | None = b""
    for lower, upper in sorted(spans, key=lambda span: span[0]):
        if end is None:
            break
        if lower > end:
            found.append(lower)
        end = None if upper is None else max(end, upper)
    return found


def _boundaries(pieces: list[tuple[bytes, float]], num_splits: int, gaps: list[bytes]) -> list[bytes]:
    """`num_splits - 1` ascending keys; each is the key of a piece, or a gap where one is near enough."""
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
        # A boundary goes where the bytes before it come closest to its share.
        while piece < len(pieces) - 1 and before[piece] + pieces[piece][1] / 2 < target:
            piece += 1
        gap = _nearest(bytes_before, target)
        is_near = gap is not None and abs(bytes_before[gap] - target) <= share / SLACK_SHARE
        boundary = gaps[gap] if gap is not None and is_near else keys[piece]
        boundaries.append(max([boundary, *boundaries[-1:]]))
    return boundaries


def _nearest(ascending: list[float], target: float) -> int | None:
    """The place of the value that is closest to the target; None: there is no value."""
    above = bisect_left(ascending, target)
    around = range(max(0, above - 1), min(len(ascending), above + 1))
    return min(around, key=lambda place: abs(ascending[place] - target), default=None)


# Cuts: keys before which runs have at most so many rows, told by indexes alone or counted.
#
# `find_cut` reads no rows. It adds up pieces: rows between two keys that the index of a part records. It counts rows as
# they are stored, of every time, and rows at a boundary on both sides, so it never undercounts. If that is too coarse,
# `count_cuts` computes the cuts from rows that were read.


Ints = npt.NDArray[np.int64]
FOOTERS_PER_REACH_MAX = 1024  # parts that one `find_cut` looks into; what is beyond counts as a whole
OPENED_AT_ONCE = 8  # parts that are looked into at the same time
SHORTENED_BYTES = BOUND_BYTES_MAX - 40  # a sample of fewer bytes is a whole key: less room was left for no column
WEIGHTS_MAX = 2**62  # that the rows of a table have together


class Weight(NamedTuple):
    """Rows as they are stored, and their encoded bytes."""

    rows: int
    size: float

    def plus(self, other: Weight) -> Weight:
        return Weight(self.rows + other.rows, self.size + other.size)


NOTHING = Weight(0, 0.0)


@dataclass(frozen=True)
class Limit:
    """At most so many rows, or encoded bytes; one of them."""

    rows: int | None = None
    size: int | None = None

    def allows(self, weight: Weight) -> bool:
        return (self.rows is None or weight.rows <= self.rows) and (self.size is None or weight.size <= self.size)


@dataclass(frozen=True)
class CutPoint:
    """How far a limit reaches. `key` None: to the end; else all keys before it, which hold `within` at most.

    What is stuck has nothing that is known to be within: a key before which there are rows was not found. `key` then
    is one before which there are more than the limit may allow, at least some; None: they reach to the end.
    `left` is the weight of what comes at or after the key; of what is stuck, of everything.
    """

    key: bytes | None
    within: Weight
    left: Weight
    is_stuck: bool = False


class _Piece(NamedTuple):
    """Rows whose keys are at or after `key`, in this order among others; or a part that was not looked into yet.

    `unsure` is what the piece may hold beyond its weight, as pieces before it may hold so much less.
    """

    key: bytes
    number: int
    weight: Weight
    part: Part | None
    unsure: Weight = NOTHING


def find_cut(runs: Iterable[Run], reader: PartReader, within: KeyRange, limit: Limit) -> CutPoint:
    """How far the limit reaches from the beginning of a key range. `runs` are without bundles.

    It looks into parts that begin before the cut, and a few more: into their footers. What is damaged or missing counts
    as a whole, and is told to who reads it.
    """
    found = _Pieces(runs, reader, within)
    start = within.lower or b""
    used, at, together = NOTHING, start, NOTHING  # `together` is the weight of all pieces at the key `at`
    unsure = NOTHING  # of these
    while (piece := found.next()) is not None:
        if piece.key != at:
            used, at, together, unsure = used.plus(together), piece.key, NOTHING, NOTHING
        together, unsure = together.plus(piece.weight), unsure.plus(piece.unsure)
        if limit.allows(used.plus(together)):
            continue
        if at > start and used.rows:
            return CutPoint(at, used, together.plus(unsure).plus(found.left()))
        return _stuck(found, at, used.plus(together), limit)
    return CutPoint(None, used.plus(together), NOTHING)


def _stuck(found: _Pieces, at: bytes, seen: Weight, limit: Limit) -> CutPoint:
    """Where rows have to be counted: up to a key before which there may be at least twice as many as the limit."""
    left = seen.plus(found.left())
    twice = Limit(None if limit.rows is None else 2 * limit.rows, None if limit.size is None else 2 * limit.size)
    while (piece := found.next()) is not None:
        if piece.key > at and not twice.allows(seen):
            return CutPoint(piece.key, NOTHING, left, is_stuck=True)
        seen = seen.plus(piece.weight)
    return CutPoint(None, NOTHING, left, is_stuck=True)


class _Pieces:
    """The pieces of all parts in key order. A part is looked into when its turn comes."""

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
            _Piece(self._from(part.key_lower), number, Weight(part.rows, part.size), None if part.is_inline else part)
            for number, part in enumerate(parts)
        ]
        self._number = len(parts)
        heapify(self._heap)

    def next(self) -> _Piece | None:
        while self._heap:
            piece = heappop(self._heap)
            if piece.part is None:
                return piece
            for one in self._inside(piece.part, piece.weight):
                heappush(self._heap, one)
        return None

    def left(self) -> Weight:
        """What has not come yet; of parts that were not looked into all rows, also those outside of the range."""
        weights = [one.weight.plus(one.unsure) for one in self._heap]
        return Weight(sum(weight.rows for weight in weights), sum(weight.size for weight in weights))

    def _from(self, key: bytes) -> bytes:
        """Where rows of the range can begin that are at or after this key."""
        return key if self._within.lower is None else max(key, self._within.lower)

    def _inside(self, part: Part, weight: Weight) -> Iterator[_Piece]:
        groups = self._looked_into(part)
        if groups is None:
            groups = ()
            yield self._piece(part.key_lower, weight)
        # The bytes of a part are those of its tail too, which all of its rows share.
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
            # How many rows come before the first sample is not known: those counted there may come after the last.
            is_whole = len(pieces) > 1 and pieces[0][0] == group.key_lower
            for key, weight in pieces[:-1]:
                yield self._piece(key, weight)
            for key, weight in pieces[-1:]:
                yield self._piece(key, weight, pieces[0][1] if is_whole else NOTHING)

    def _piece(self, key: bytes, weight: Weight, unsure: Weight = NOTHING) -> _Piece:
        self._number += 1
        return _Piece(self._from(key), self._number, weight, None, unsure)

    def _looked_into(self, part: Part) -> Sequence[RowGroup] | None:
        """The row groups of a part; None where it is not looked into."""
        if str(part.id) not in self._groups:
            room = min(OPENED_AT_ONCE, FOOTERS_PER_REACH_MAX - self._opened)
            some = [one for one in self._waiting if str(one.id) not in self._groups][:room]
            if part not in some:
                some = [part, *some[: room - 1]] if room > 0 else []
            self._opened += len(some)
            for one, groups in zip(some, self._reader.row_groups_of(some), strict=True):
                self._groups[str(one.id)] = groups
            self._waiting = [one for one in self._waiting if str(one.id) not in self._groups]
        return self._groups.get(str(part.id))


def split_row_group(group: RowGroup, start: bytes | None) -> Iterator[tuple[bytes, int]]:
    """A row group as pieces: a key, and how many rows at most come from it on up to the next one.

    Rows before `start` are left out, as far as the index tells which they are.

    The first sample lies within the first `step` rows, and each other
    one `step` rows after the one before; which of them the first is, the index does not say.
    """
    if start is not None and group.key_upper is not None and group.key_upper < start:
        return
    count, step = len(group.samples), max(1, group.rows // SAMPLES)
    is_regular = count > 0 and (count - 1) * step < group.rows <= (count + 1) * step
    if not is_regular:
        yield group.key_lower, group.rows
        return
    keys = (group.key_lower, *group.samples)
    # Rows before the first sample and after the last one are together what the others leave.
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
    """The cuts of rows that come in key order, of at most `limit` rows each, table by table.

    Keys count as one where `lower_bound` shortens them to the same bytes, and what is one key is never cut: that alone
    may exceed the limit. `weights` names the column, if any, that tells how often each row counts; below 0 is 0.
    """
    state = _Counting(schema, limit)
    for table in tables:
        if len(table):
            weight = np.ones(len(table), np.int64) if weights is None else table.column(weights).to_numpy()
            cuts, goes_on = state.take(SortedKeys(table, schema.key), weight)
            yield cuts
            if not goes_on:
                return


class _Counting:
    """Where `count_cuts` is: what the rows since the last cut weigh, and the key that they began with."""

    def __init__(self, schema: ShardSchema, limit: int) -> None:
        self._schema = schema
        self._limit = limit
        self._used = 0
        self._first: bytes | None = None
        self._passing = False  # the rows of the first key alone exceed the limit: the next key is a cut

    def take(self, keys: SortedKeys, weights: Ints) -> tuple[list[bytes], bool]:
        """The cuts within a table; False: the last cut is a key of the table before, so nothing more is known."""
        sums = np.cumsum(np.clip(weights, 0, min(self._limit + 1, WEIGHTS_MAX // len(keys))))
        cuts: list[bytes] = []
        start = 0
        while start < len(keys):
            if self._passing:
                start = self._beyond(keys, start)
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
                self._passing, start = True, place
                continue
            cuts.append(cut)
            start = keys.bisect(cut, start)
            if start == 0:  # rows of this key may have come with the table before
                return cuts, False
            self._begin(cut)
        return cuts, True

    def _begin(self, key: bytes) -> None:
        self._first, self._used, self._passing = key, 0, False

    def _at(self, keys: SortedKeys, row: int) -> bytes:
        return lower_bound(keys[row], self._schema)

    def _beyond(self, keys: SortedKeys, start: int) -> int:
        """The first row from `start` on whose key does not count as the first one."""
        low, high = start, len(keys)
        while low < high:
            middle = (low + high) // 2
            if self._at(keys, middle) == self._first:
                low = middle + 1
            else:
                high = middle
        return low
