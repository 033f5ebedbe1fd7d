"""The plan of a read: which row groups pass through and which must be merged; runs in bundles.

Bounds of parts and of their row groups divide the key space into stretches. A stretch that belongs to one row group
passes through if its rows are consolidated in this read: they differ in key and value, or the read keeps their times
distinct. So does a stretch whose part lists its twins. All other stretches are merged. Rows that are in memory anyway
(inline parts, small blobs) are cut at the bounds of row groups, so that only the row groups around them are merged.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from persist.core.batch import Part, Run
from persist.core.blob_keys import belongs_to, shard_of
from persist.core.bundles import Listed, bundle_of, unpacked
from persist.core.errors import Corruption
from persist.core.ids import PartId
from persist.core.record import replace
from persist.core.truncations_and_drops import clipped
from persist.formats.state_frames import decode_listing
from persist.parts.codec import at_part_time
from persist.parts.consolidate import Times, fold_twins
from persist.parts.key_encoding import ALL_KEYS, KeyRange, SortedKeys, clip_rows
from persist.parts.part_files import BlobReads, PartFile, PartFiles, fetch
from persist.parts.prefetch import map_in_order
from persist.parts.schema_evolution import Migration
from persist.parts.shard_schema import DIFF, TIME, ShardSchema
from persist.parts.value_order import Mask

READERS = 8  # bundles that are read concurrently
SERIAL_BYTES_MAX = 256 * 1024  # of bundles that are read without threads
SPLIT_PARTS_MAX = 256  # parts of one stretch whose footers are read, before its first row
PIECES_MAX = 4096  # pieces that are merged together without need
FETCH_BYTES = 8 * 1024 * 1024  # about so many encoded bytes per request, if row groups allow it
FETCH_BYTES_MIN = 2 * 1024 * 1024  # below which a request is too expensive for a remote store
FETCHERS = 2  # pieces of a part that are prefetched while the caller decodes them batch by batch

DecodePiece: TypeAlias = Callable[[], pa.Table]  # decodes some row groups


def read_bundle(part: Part, blob: BlobReads) -> Listed:
    """The parts in a bundle. Raises Corruption if it is damaged or differs from the State.

    Errors of the blob store pass through; BlobNotFound: it was deleted.
    """
    key, bundle = part.key or "", part.bundle
    assert bundle is not None
    data = fetch(blob, part, bundle.size, 0, bundle.size)
    if zlib.crc32(data) != part.checksum:
        raise Corruption(f"bundle {key} does not match its checksum", part=str(part.id))
    listed = decode_bundle(data, key)
    expected = bundle_of(part.id, key, listed, bundle.size, part.checksum)
    if expected != (part if part.clip is None else replace(part, clip=None, diff_sum=expected.diff_sum)):
        raise Corruption(f"bundle {key} lists other parts than the State of its shard", part=str(part.id))
    return listed


def decode_bundle(data: bytes, key: str) -> Listed:
    """The parts in the bytes of the bundle `key`: blobs of its own shard. Raises Corruption."""
    try:
        listed = decode_listing(data).runs
    except Corruption as error:
        raise Corruption(f"bundle {key}: {error.message}") from error
    parts = [part for run in listed for part in run.parts]
    if not parts or any(part.key is None or not belongs_to(part.key, shard_of(key)) for part in parts):
        raise Corruption(f"bundle {key} lists no parts, or parts of another shard")
    return listed


def expand_bundles(
    runs: Iterable[Run], blob: BlobReads, wants: Callable[[Part], bool] = lambda part: True
) -> list[Run]:
    """The runs with the contents of bundles in their place; bundles that are not wanted are left out.

    The clip of a bundle applies to its contents. At most `READERS` bundles are read concurrently. Raises as
    `read_bundle`.
    """
    kept = [Run(tuple(p for p in run.parts if p.bundle is None or wants(p))) for run in runs]
    bundles = [part for run in kept for part in run.parts if part.bundle is not None]
    if not bundles:
        return kept
    size = sum(part.bundle.size for part in bundles if part.bundle is not None)
    readers = 1 if size <= SERIAL_BYTES_MAX else min(READERS, len(bundles))
    contents = map_in_order(lambda part: read_bundle(part, blob), bundles, readers)
    listed = {part.id: clipped(content, part.clip or 0) for part, content in zip(bundles, contents, strict=True)}
    expanded = (inner for run in kept if run.parts for inner in unpacked(run, lambda part: listed[part.id]))
    return [run for run in expanded if run.parts]


@dataclass(frozen=True, slots=True)
class Item:
    """A part and the number of its run."""

    run: int
    part: Part


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """A unit of reading: a row group of a part, a whole part (`group` None), or `rows` (`item` None).

    `place` orders all pieces: pieces of one run are in the order of their rows. `consolidated`: the rows of the row
    group are consolidated in this read. `folds`: they are not, but the part lists its twins. `apart`: no row is summed
    with one of the row group before. `touches`: it begins with the last key of the row group before, but is apart from
    it.
    """

    item: Item | None
    lower: bytes
    upper: bytes | None
    place: tuple[int, int]
    group: int | None = None
    consolidated: bool = False
    folds: bool = False
    apart: bool = False
    touches: bool = False
    rows: pa.Table | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """Pieces that pass through, all row groups of one part; or pieces that are merged."""

    pieces: Sequence[ReadPiece]
    passes_through: bool

    @property
    def part(self) -> Part | None:
        """The part that passes through."""
        item = self.pieces[0].item
        return item.part if self.passes_through and item is not None else None

    @property
    def folds(self) -> bool:
        """Whether some rows are twins that must be summed."""
        return any(piece.folds for piece in self.pieces)

    @property
    def groups(self) -> list[int] | None:
        """Its row groups; None: all that the read needs."""
        return [piece.group for piece in self.pieces if piece.group is not None] or None


class MemoryRows:
    """Consolidated, sorted rows in memory, which are taken in pieces."""

    def __init__(self, rows: pa.Table, key: tuple[str, ...]) -> None:
        self._rows = rows
        self._keys = SortedKeys(rows, key)
        self._start = 0

    @property
    def lower(self) -> bytes | None:
        """The key of the first row that is left, if any."""
        return self._keys[self._start] if self._start < len(self._rows) else None

    def take(self, before: bytes | None) -> ReadPiece:
        """The rows of the first key that is left, and all others with a key below `before` (None: all)."""
        start, lower = self._start, self._keys[self._start]
        end = len(self._rows)
        if before is not None:
            end = self._keys.bisect(max(before, lower + b"\x00"), start)
        self._start = end
        return ReadPiece(None, lower, self._keys[end - 1], (-1, start), rows=self._rows.slice(start, end - start))


_Waiting: TypeAlias = tuple[bytes, bool, tuple[int, int], ReadPiece | Item | MemoryRows]


def is_plain(part: Part, times: Times, files: PartFiles) -> bool:
    """Whether the rows of a part are consolidated in this read, without a look at its row groups."""
    if part.is_inline or not part.sorted or times.merges(part.time_min, part.time_max):
        return False
    if files.migration(part).coarsens:
        return False
    return part.time is None or files.open(part).has_one_time


def overlapping_items(runs: Iterable[Run], times: Times, key_range: KeyRange, files: PartFiles) -> Iterator[list[Item]]:
    """The parts that the read needs, in key order, grouped by overlap. Reads the bundles that it needs."""

    def wants(part: Part) -> bool:
        return (
            part.rows > 0
            and key_range.overlaps(part.key_lower, part.key_upper)
            and not times.excludes(part.time_min, part.time_max)
            and not (part.clip is not None and part.time_max < part.clip)
        )

    expanded = expand_bundles(runs, files.blob, wants)
    items = [Item(number, part) for number, run in enumerate(expanded) for part in run.parts if wants(part)]
    items.sort(key=lambda item: item.part.key_lower)
    group: list[Item] = []
    end: bytes | None = b""
    for item in items:
        if group and end is not None and item.part.key_lower > end:
            yield group
            group, end = [], b""
        group.append(item)
        upper = item.part.key_upper
        end = None if end is None or upper is None else max(end, upper)
    if group:
        yield group


def stretches(
    items: Sequence[Item], loose: MemoryRows | None, times: Times, key_range: KeyRange, files: PartFiles
) -> Iterator[Stretch]:
    """The parts `items` and the rows in memory, in stretches in key order.

    Consecutive stretches of a kind are joined, up to `PIECES_MAX` pieces if they are merged.
    """
    last: Stretch | None = None
    for pieces in _connect(_Pieces(items, loose, times, key_range, files).in_order()):
        stretch = Stretch(pieces, _passes_through(pieces, times, files))
        if last is not None and _can_join(last, stretch):
            last = Stretch([*last.pieces, *stretch.pieces], last.passes_through)
            continue
        if last is not None:
            yield last
        last = stretch
    if last is not None:
        yield last


def classify(runs: Iterable[Run], as_of: int, files: PartFiles) -> tuple[list[Part], list[Part]]:
    """The parts whose rows pass through, and those with rows that must be summed."""
    times = Times.snapshot(as_of)
    passing: list[Part] = []
    others: list[Part] = []
    for items in overlapping_items(runs, times, ALL_KEYS, files):
        merged: dict[PartId, Part] = {}
        for stretch in stretches(items, None, times, ALL_KEYS, files):
            if not stretch.passes_through or stretch.folds:
                merged.update((piece.item.part.id, piece.item.part) for piece in stretch.pieces if piece.item)
        others.extend(merged.values())
        passing.extend(item.part for item in items if item.part.id not in merged)
    return passing, others


def _passes_through(pieces: Sequence[ReadPiece], times: Times, files: PartFiles) -> bool:
    first = pieces[0]
    if len(pieces) > 1 or first.item is None:
        return False
    return is_plain(first.item.part, times, files) if first.group is None else first.consolidated or first.folds


def _can_join(last: Stretch, following: Stretch) -> bool:
    if last.passes_through != following.passes_through:
        return False
    if not last.passes_through:
        return len(last.pieces) + len(following.pieces) <= PIECES_MAX
    return last.part is following.part and following.pieces[0].group is not None


def _connect(pieces: Iterable[ReadPiece]) -> Iterator[list[ReadPiece]]:
    """Group pieces that overlap directly or transitively. They come by their lower bounds, touching ones last."""
    group: list[ReadPiece] = []
    end: bytes | None = b""
    last: list[ReadPiece] = []  # the pieces that extend to the end
    for piece in pieces:
        is_beyond = end is not None and piece.lower > end
        if group and (is_beyond or _only_touches(piece, end, last)):
            yield group
            group, end, last = [], b"", []
        group.append(piece)
        if piece.upper == end:
            last.append(piece)
        elif end is not None and (piece.upper is None or piece.upper > end):
            end, last = piece.upper, [piece]
    if group:
        yield group


def _only_touches(piece: ReadPiece, end: bytes | None, last: Sequence[ReadPiece]) -> bool:
    """Whether the only key that it shares with earlier pieces is the last one of the row group before it."""
    if not piece.touches or piece.lower != end or len(last) != 1:
        return False
    number, group = piece.place
    return last[0].item is piece.item and last[0].place == (number, group - 1)


class _Pieces:
    """The pieces of overlapping parts and of rows in memory. Parts are opened when they are reached."""

    def __init__(
        self, items: Sequence[Item], loose: MemoryRows | None, times: Times, key_range: KeyRange, files: PartFiles
    ) -> None:
        self._times = times
        self._range = key_range
        self._files = files
        self._is_single = len(items) == 1
        self._opened = 0
        self._heap: list[_Waiting] = [
            (item.part.key_lower, False, (number, 0), item) for number, item in enumerate(items)
        ]
        heapify(self._heap)
        if loose is not None:
            self._wait_for(loose)

    def in_order(self) -> Iterator[ReadPiece]:
        """By their lower bounds; among equal ones those that only touch come last."""
        while self._heap:
            _, _, place, source = heappop(self._heap)
            if isinstance(source, ReadPiece):
                yield source
            elif isinstance(source, MemoryRows):
                yield source.take(self._heap[0][0] if self._heap else None)
                self._wait_for(source)
            elif self._is_split(source.part):
                self._opened += 1
                for piece in self._row_groups(source, place[0]):
                    heappush(self._heap, (piece.lower, piece.touches, piece.place, piece))
            else:
                yield ReadPiece(source, source.part.key_lower, source.part.key_upper, place)

    def _wait_for(self, loose: MemoryRows) -> None:
        lower = loose.lower
        if lower is not None:
            heappush(self._heap, (lower, False, (-1, 0), loose))

    def _is_split(self, part: Part) -> bool:
        if part.is_inline or self._opened == SPLIT_PARTS_MAX:
            return False
        if self._is_single:  # else a part that is not merged need not be opened yet
            return not is_plain(part, self._times, self._files)
        return not self._files.is_small(part)

    def _row_groups(self, item: Item, number: int) -> Iterator[ReadPiece]:
        part, file = item.part, self._files.open(item.part)
        plain = is_plain(part, self._times, self._files)
        previous: int | None = None  # the last row group that is read
        for group in file.wanted(self._range):
            known, bounds = file.known(group), file.groups[group]
            if known is not None and (
                self._times.excludes(known.time_min, known.time_max)
                or (part.clip is not None and known.time_max < part.clip)
            ):
                continue
            merges = known is None or (bool(known.pairs) and self._times.merges(known.time_min, known.time_max))
            apart = plain or group == 0 or (known is not None and not known.joins)
            yield ReadPiece(
                item=item,
                lower=bounds.key_lower,
                upper=bounds.key_upper,
                place=(number, group),
                group=group,
                consolidated=plain or not merges,
                folds=not plain and merges and known is not None and bounds.twins is not None,
                apart=apart,
                # Only after a piece that ends with its key: else it must precede pieces that touch others.
                touches=apart and previous == group - 1 and bounds.key_lower == file.groups[group - 1].key_upper,
            )
            previous = group


def are_consolidated(pieces: Sequence[ReadPiece]) -> bool:
    """Whether the row groups, of one run and in order, are consolidated and apart from one another."""
    if not all(piece.group is not None and piece.consolidated and piece.apart for piece in pieces):
        return False
    edges = [(last, first) for last, first in pairwise(pieces) if last.item is not first.item]
    return all(last.upper is not None and last.upper < first.lower for last, first in edges)


def bounds_of(file: PartFile, groups: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The bounds of the times and diffs of row groups, as far as they are known; else those of the part."""
    rows = [known for group in groups if (known := file.known(group)) is not None]
    part = file.part
    if not rows or len(rows) < len(groups):
        return (part.time_min, part.time_max), (part.diff_min, part.diff_max)
    return (
        (min(known.time_min for known in rows), max(known.time_max for known in rows)),
        (min(known.diff_min for known in rows), max(known.diff_max for known in rows)),
    )


def as_committed(migration: Migration, table: pa.Table, part: Part) -> pa.Table:
    """Whole rows of a part, converted to the read's schema, at the times with which they were committed."""
    table = at_part_time(migration.rows(table), part)
    return table if part.clip is None else table.filter(pc.greater_equal(table.column(TIME), part.clip))


class PassThrough:
    """Row groups that need no merge, of which only the required columns are read.

    Row groups that are decoded together are a piece. Pieces are independent, so the reader decodes several at a time.
    """

    def __init__(
        self,
        file: PartFile,
        stretch: Stretch,
        schema: ShardSchema,
        times: Times,
        key_range: KeyRange,
        names: Sequence[str],
    ) -> None:
        part = file.part
        self._file = file
        groups = stretch.groups
        self._groups = list(file.wanted(key_range)) if groups is None else groups
        self._folds = stretch.folds
        self._schema = schema
        self._times = times
        self._range = key_range
        self._names = list(names)
        span, diffs = bounds_of(file, self._groups)
        self._filters = not times.keeps_all(*span) or part.clip is not None
        time, diff = _constants(span, diffs, times)
        self._constants: dict[str, int] = {}
        if time is not None and not self._filters:
            self._constants[TIME] = time
        if diff is not None and not self._folds:
            self._constants[DIFF] = diff
        self._needs_time = self._filters or (self._folds and TIME not in self._constants)
        self._migration = file.migration
        self._schemas = {edge: pa.schema(self._fields(edge)) for edge in (False, True)}

    def pieces(self, limit: int, readers: int) -> Iterator[DecodePiece]:
        """Functions that decode the rows, in tables of about `limit` bytes and at least one row group; some are empty.

        They may be called on any of `readers` threads.
        """

        def read(groups: list[int], edge: bool) -> pa.Table:
            table = self._file.read(groups, self._columns(edge))
            return self._finish(table, edge, self._file.firsts(groups) if self._folds else None)

        for groups, edge in self._batches(limit, readers):
            yield partial(read, groups, edge)

    def batches(self, limit: int, rows: int) -> Iterator[pa.Table]:
        """The rows in tables of at most `rows` rows, decoded on the caller's thread, with their bytes prefetched."""

        def fetch(piece: tuple[list[int], bool]) -> tuple[list[int], bool, Any]:
            groups, edge = piece
            return groups, edge, self._file.source(groups, self._columns(edge))

        if self._folds:  # twins may be in two batches
            for piece in self.pieces(limit, 1):
                table = piece()
                yield from (table.slice(start, rows) for start in range(0, len(table), rows))
            return
        fetchers = 1 if self._file.is_whole else FETCHERS
        pieces = self._batches(max(1, limit // FETCHERS), FETCHERS)
        for groups, edge, source in map_in_order(fetch, pieces, fetchers):
            for batch in self._file.batches(groups, self._columns(edge), rows, source):
                table = self._finish(batch, edge)
                if len(table):
                    yield table

    def _batches(self, limit: int, readers: int) -> Iterator[tuple[list[int], bool]]:
        """Row groups to read together, and whether they extend beyond the key range.

        They take about `limit` bytes of memory. A large part is divided so that all `readers` get a share of it.
        """
        file, sizes = self._file, self._file.encoded_bytes(self._groups, self._columns(False))
        left = sum(sizes)
        fetched_max = max(FETCH_BYTES_MIN, min(FETCH_BYTES, left // readers))
        taken: list[int] = []
        memory, fetched = 0, 0
        for number, size in zip(self._groups, sizes, strict=True):
            group = file.groups[number]
            edge = not self._range.covers(group.key_lower, group.key_upper)
            is_enough = fetched + size // 2 > fetched_max and left >= FETCH_BYTES_MIN // 2
            left -= size
            if taken and (edge or memory + group.nbytes > limit or is_enough):
                yield taken, False
                taken, memory, fetched = [], 0, 0
            if edge:
                yield [number], True
                continue
            taken.append(number)
            memory += group.nbytes
            fetched += size
        if taken:
            yield taken, False

    def _fields(self, edge: bool) -> list[pa.Field]:
        """The requested columns, and those by which rows are filtered."""
        wanted = {*self._names, *(self._schema.key if edge else ()), *([TIME] if self._needs_time else ())}
        return [field for field in self._schema.updates_schema if field.name in wanted]

    def _columns(self, edge: bool) -> list[str]:
        return self._migration.names(field.name for field in self._fields(edge) if field.name not in self._constants)

    def _finish(self, table: pa.Table, edge: bool, firsts: Mask | None = None) -> pa.Table:
        """The requested rows, at the times of the read and within the key range."""
        clip = self._file.part.clip
        columns = [
            pa.repeat(pa.scalar(self._constants[field.name], pa.int64()), len(table))
            if field.name in self._constants
            else self._migration.column(table, field)
            for field in self._schemas[edge]
        ]
        table = pa.Table.from_arrays(columns, schema=self._schemas[edge])
        if firsts is not None:
            table = fold_twins(table, firsts, self._times, clip)
        else:
            if clip is not None:
                table = table.filter(pc.greater_equal(table.column(TIME), clip))
            if TIME in table.column_names and TIME not in self._constants:
                table = self._times.apply(table)
        if edge:
            table = clip_rows(table, SortedKeys(table, self._schema.key), self._range)
        return table if table.column_names == self._names else table.select(self._names)


def _constants(span: tuple[int, int], diffs: tuple[int, int], times: Times) -> tuple[int | None, int | None]:
    """The time that every row gets and the diff of every row, if there is only one."""
    low, high = (times.advanced(time) for time in span)
    return (low if low == high else None), (diffs[0] if diffs[0] == diffs[1] else None)
