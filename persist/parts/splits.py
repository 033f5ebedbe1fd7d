"""Splits: key ranges that are disjoint, cover every key, and hold about the same number of bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise

from blob.errors import BlobNotFound
from persist.core.batch import Part, Run
from persist.core.errors import Corruption, InvalidUsage
from persist.parts.codec import RowGroup
from persist.parts.keycodec import ALL_KEYS, KeyRange, is_key
from persist.parts.reader import PartReader
from persist.parts.schema import ShardSchema

SPLITS_MAX = 100_000
PIECES_PER_SPLIT = 4  # parts larger than this share of a split are looked into
FOOTERS_READ_MAX = 256  # parts that one plan looks into
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


def overlapping(runs: Iterable[Run], key_range: KeyRange) -> tuple[Run, ...]:
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
    return {part.id for part in blobs[:FOOTERS_READ_MAX]}


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
