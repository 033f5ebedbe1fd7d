"""The plan of a read: which row groups pass through, which must be merged, and runs behind manifests."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from blob.errors import BlobNotFound
from persist.core.batch import Part, Run
from persist.core.blob_keys import belongs_to, shard_of
from persist.core.errors import Corruption
from persist.core.ids import PartId
from persist.core.manifests import Listed, bundle_of, unpacked
from persist.core.record import replace
from persist.core.truncation import clipped
from persist.formats.state_frames import decode_listing
from persist.parts.consolidate import Times, fold_twins
from persist.parts.key_encoding import ALL_KEYS, KeyRange, SortedKeys, clip_rows
from persist.parts.part_files import BlobReads, PartFile, PartFiles
from persist.parts.prefetch import map_in_order
from persist.parts.schema_evolution import Migration
from persist.parts.shard_schema import DIFF, TIME, ShardSchema
from persist.parts.sort_words import Mask

# Reading bundles: runs as the State names them -> runs of the parts that hold the rows.


READERS = 8  # bundles that are read at the same time
IN_TURN_BYTES_MAX = 256 * 1024  # bundles of so few bytes together are read one after the other, without threads


def read_bundle(part: Part, blob: BlobReads) -> Listed:
    """What a bundle lists. Corruption: it is damaged, or lists something else than the State says.

    Errors of the blob store pass through; BlobNotFound: it is gone.
    """
    key, bundle = part.key or "", part.bundle
    assert bundle is not None
    try:
        data = blob.get_range(key, 0, bundle.size)
    except BlobNotFound:
        stat = blob.stat(key)
        if stat is None or stat.size == bundle.size:
            raise
        raise Corruption(f"bundle {key} has {stat.size} bytes, not {bundle.size}", part=str(part.id)) from None
    if len(data) != bundle.size or zlib.crc32(data) != part.checksum:
        raise Corruption(f"bundle {key} does not match its checksum", part=str(part.id))
    listed = decode_bundle(data, key)
    told = bundle_of(part.id, key, listed, bundle.size, part.checksum)
    if told != (part if part.clip is None else replace(part, clip=None, diff_sum=told.diff_sum)):
        raise Corruption(f"bundle {key} lists other parts than its shard says", part=str(part.id))
    return listed


def decode_bundle(data: bytes, key: str) -> Listed:
    """What the bytes of the bundle `key` list: parts of its own shard, in blobs. Corruption: they are damaged."""
    try:
        listed = decode_listing(data).runs
    except Corruption as error:
        raise Corruption(f"bundle {key}: {error.message}") from error
    parts = [part for run in listed for part in run.parts]
    if not parts or any(part.key is None or not belongs_to(part.key, shard_of(key)) for part in parts):
        raise Corruption(f"bundle {key} lists no parts, or parts that are not of its shard")
    return listed


def expand_bundles(
    runs: Iterable[Run], blob: BlobReads, wants: Callable[[Part], bool] = lambda part: True
) -> list[Run]:
    """The runs with what their bundles list in the place of these; bundles that are not wanted are left out.

    What a bundle hides by its clip is hidden in what it lists.

    At most `READERS` bundles are read at the same time, by threads. Raises what `read_bundle` does.
    """
    kept = [Run(tuple(p for p in run.parts if p.bundle is None or wants(p))) for run in runs]
    wanted = [part for run in kept for part in run.parts if part.bundle is not None]
    if not wanted:
        return kept
    size = sum(part.bundle.size for part in wanted if part.bundle is not None)
    readers = 1 if size <= IN_TURN_BYTES_MAX else min(READERS, len(wanted))
    found = map_in_order(lambda part: read_bundle(part, blob), wanted, readers)
    shown = (clipped(listed, part.clip or 0) for part, listed in zip(wanted, found, strict=True))
    listed = dict(zip((part.id for part in wanted), shown, strict=True))
    inner = (one for run in kept if run.parts for one in unpacked(run, lambda part: listed[part.id]))
    return [run for run in inner if run.parts]


# Planning a read: what can be read straight, and what must be merged with one another.
#
# Keys are cut into stretches, by the bounds of parts and of their row groups. A stretch that one row group has for
# itself is read straight where no two of its rows become one: they differ in key and value, or the read leaves their
# times apart. So is one whose part names the rows that share key and value. Everything else is merged. Rows that are in
# memory anyway (inline parts, small blobs) are cut at the bounds of the row groups, so that they make no more to be
# merged than the row groups that they lie in.


SPLIT_PARTS_MAX = 256  # parts of one stretch that are looked into; so many footers are read before its first row
PIECES_MAX = 4096  # pieces that are merged together where they need not be


@dataclass(frozen=True, slots=True)
class Item:
    """A part, and the number of its run."""

    run: int
    part: Part


@dataclass(frozen=True, slots=True)
class ReadPiece:
    """What a read takes at once: a row group of a part, a whole part (`group` None), or `rows` (`item` None).

    `place` is the piece's place among all of them: pieces of one run are in the order of their rows. `settled`: no two
    rows of the row group become one in this read. `folds`: some do, and the part names them. `apart`: none becomes one
    with the row group before. `touches`: it begins with the key that the row group before ends with, and is apart from
    it all the same.
    """

    item: Item | None
    lower: bytes
    upper: bytes | None
    place: tuple[int, int]
    group: int | None = None
    settled: bool = False
    folds: bool = False
    apart: bool = False
    touches: bool = False
    rows: pa.Table | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """Pieces that are read straight, row groups of one part; or pieces that are merged."""

    pieces: Sequence[ReadPiece]
    is_straight: bool

    @property
    def part(self) -> Part | None:
        """The part that is read straight."""
        item = self.pieces[0].item
        return item.part if self.is_straight and item is not None else None

    @property
    def folds(self) -> bool:
        """Whether rows of it become one, which the part names."""
        return any(piece.folds for piece in self.pieces)

    @property
    def groups(self) -> list[int] | None:
        """Its row groups; None for those that the read wants, whichever they are."""
        found = [piece.group for piece in self.pieces if piece.group is not None]
        return found or None


class MemoryRows:
    """Consolidated rows in memory, in order, which are taken piece by piece."""

    def __init__(self, rows: pa.Table, key: tuple[str, ...]) -> None:
        self._rows = rows
        self._keys = SortedKeys(rows, key)
        self._start = 0

    @property
    def lower(self) -> bytes | None:
        """The key of the first row that is left; None where none is."""
        return self._keys[self._start] if self._start < len(self._rows) else None

    def take(self, before: bytes | None) -> ReadPiece:
        """The rows of the first key that is left, and all others whose key is below `before` (None: all)."""
        start, lower = self._start, self._keys[self._start]
        end = len(self._rows)
        if before is not None:
            end = self._keys.bisect(max(before, lower + b"\x00"), start)
        self._start = end
        return ReadPiece(None, lower, self._keys[end - 1], (-1, start), rows=self._rows.slice(start, end - start))


_Waiting: TypeAlias = tuple[bytes, bool, tuple[int, int], ReadPiece | Item | MemoryRows]


def is_plain(part: Part, times: Times, files: PartFiles) -> bool:
    """Whether the rows of a part come out as they are, whatever its index tells."""
    if part.is_inline or not part.sorted or times.merges(part.time_min, part.time_max):
        return False
    if files.migration(part).coarsens:
        return False
    return part.time is None or files.open(part).has_one_time


def overlapping_items(runs: Iterable[Run], times: Times, key_range: KeyRange, files: PartFiles) -> Iterator[list[Item]]:
    """The parts that the read needs, in key order, those that overlap together. Reads the bundles it needs."""

    def wants(part: Part) -> bool:
        return (
            part.rows > 0
            and key_range.overlaps(part.key_lower, part.key_upper)
            and not times.hides(part.time_min, part.time_max)
            and not (part.clip is not None and part.time_max < part.clip)
        )

    plain = expand_bundles(runs, files.blob, wants)
    items = [Item(number, part) for number, run in enumerate(plain) for part in run.parts if wants(part)]
    items.sort(key=lambda item: item.part.key_lower)
    together: list[Item] = []
    end: bytes | None = b""
    for item in items:
        if together and end is not None and item.part.key_lower > end:
            yield together
            together, end = [], b""
        together.append(item)
        upper = item.part.key_upper
        end = None if end is None or upper is None else max(end, upper)
    if together:
        yield together


def stretches(
    items: Sequence[Item], loose: MemoryRows | None, times: Times, key_range: KeyRange, files: PartFiles
) -> Iterator[Stretch]:
    """The parts `items` and the rows in memory, in stretches in key order.

    Neighbouring stretches of a kind are given as one, up to `PIECES_MAX` pieces where they are merged.
    """
    held: Stretch | None = None
    for pieces in _connected(_Pieces(items, loose, times, key_range, files).in_order()):
        fresh = Stretch(pieces, _is_straight(pieces, times, files))
        if held is not None and _belong_together(held, fresh):
            held = Stretch([*held.pieces, *fresh.pieces], held.is_straight)
            continue
        if held is not None:
            yield held
        held = fresh
    if held is not None:
        yield held


def classify(runs: Iterable[Run], as_of: int, files: PartFiles) -> tuple[list[Part], list[Part]]:
    """The parts whose rows come out as they are, and those of which some have to be added up."""
    times = Times.snapshot(as_of)
    straight: list[Part] = []
    others: list[Part] = []
    for items in overlapping_items(runs, times, ALL_KEYS, files):
        merged: dict[PartId, Part] = {}
        for stretch in stretches(items, None, times, ALL_KEYS, files):
            if not stretch.is_straight or stretch.folds:
                merged.update((piece.item.part.id, piece.item.part) for piece in stretch.pieces if piece.item)
        others.extend(merged.values())
        straight.extend(item.part for item in items if item.part.id not in merged)
    return straight, others


def _is_straight(pieces: Sequence[ReadPiece], times: Times, files: PartFiles) -> bool:
    first = pieces[0]
    if len(pieces) > 1 or first.item is None:
        return False
    return is_plain(first.item.part, times, files) if first.group is None else first.settled or first.folds


def _belong_together(held: Stretch, fresh: Stretch) -> bool:
    if held.is_straight != fresh.is_straight:
        return False
    if not held.is_straight:
        return len(held.pieces) + len(fresh.pieces) <= PIECES_MAX
    return held.part is fresh.part and fresh.pieces[0].group is not None


def _connected(pieces: Iterable[ReadPiece]) -> Iterator[list[ReadPiece]]:
    """Pieces that overlap, directly or by others, together. They come by their lower bounds, touching ones last."""
    together: list[ReadPiece] = []
    end: bytes | None = b""
    last: list[ReadPiece] = []  # those that reach to the end
    for piece in pieces:
        is_beyond = end is not None and piece.lower > end
        if together and (is_beyond or _only_touches(piece, end, last)):
            yield together
            together, end, last = [], b"", []
        together.append(piece)
        if piece.upper == end:
            last.append(piece)
        elif end is not None and (piece.upper is None or piece.upper > end):
            end, last = piece.upper, [piece]
    if together:
        yield together


def _only_touches(piece: ReadPiece, end: bytes | None, last: Sequence[ReadPiece]) -> bool:
    """Whether it shares but a key with what is before it, and that with the row group before it alone."""
    if not piece.touches or piece.lower != end or len(last) != 1:
        return False
    number, group = piece.place
    return last[0].item is piece.item and last[0].place == (number, group - 1)


class _Pieces:
    """The pieces of parts that overlap, and of rows in memory. Parts are opened when their turn comes."""

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
        """By their lower bounds; of equal ones those that only touch come last."""
        while self._heap:
            _, _, place, found = heappop(self._heap)
            if isinstance(found, ReadPiece):
                yield found
            elif isinstance(found, MemoryRows):
                yield found.take(self._heap[0][0] if self._heap else None)
                self._wait_for(found)
            elif self._is_split(found.part):
                self._opened += 1
                for piece in self._row_groups(found, place[0]):
                    heappush(self._heap, (piece.lower, piece.touches, piece.place, piece))
            else:
                yield ReadPiece(found, found.part.key_lower, found.part.key_upper, place)

    def _wait_for(self, loose: MemoryRows) -> None:
        lower = loose.lower
        if lower is not None:
            heappush(self._heap, (lower, False, (-1, 0), loose))

    def _is_split(self, part: Part) -> bool:
        if part.is_inline or self._opened == SPLIT_PARTS_MAX:
            return False
        if self._is_single:  # else a part that needs no merge need not be opened yet
            return not is_plain(part, self._times, self._files)
        return not self._files.is_small(part)

    def _row_groups(self, item: Item, number: int) -> Iterator[ReadPiece]:
        part, file = item.part, self._files.open(item.part)
        plain = is_plain(part, self._times, self._files)
        before: int | None = None  # the last row group that is read
        for group in file.wanted(self._range):
            known, bounds = file.known(group), file.groups[group]
            if known is not None and (
                self._times.hides(known.time_min, known.time_max)
                or (part.clip is not None and known.time_max < part.clip)
            ):
                continue
            merges = known is None or (known.pairs and self._times.merges(known.time_min, known.time_max))
            apart = plain or group == 0 or (known is not None and not known.joins)
            yield ReadPiece(
                item=item,
                lower=bounds.key_lower,
                upper=bounds.key_upper,
                place=(number, group),
                group=group,
                settled=plain or not merges,
                folds=not plain and merges and known is not None and file.tells_twins(group),
                apart=apart,
                # Only after a piece that ends with its key: else it has to come before those that touch others.
                touches=apart and before == group - 1 and bounds.key_lower == file.groups[group - 1].key_upper,
            )
            before = group


def are_consolidated(pieces: Sequence[ReadPiece]) -> bool:
    """Whether the row groups, of one run and in their order, are settled and apart from one another."""
    if not all(piece.group is not None and piece.settled and piece.apart for piece in pieces):
        return False
    edges = [(last, first) for last, first in pairwise(pieces) if last.item is not first.item]
    return all(last.upper is not None and last.upper < first.lower for last, first in edges)


def bounds_of(file: PartFile, groups: Sequence[int]) -> tuple[tuple[int, int], tuple[int, int]]:
    """The least and the greatest time and diff of row groups, as far as it is known."""
    found = [known for group in groups if (known := file.known(group)) is not None]
    part = file.part
    if not found or len(found) < len(groups):
        return (part.time_min, part.time_max), (part.diff_min, part.diff_max)
    return (
        (min(known.time_min for known in found), max(known.time_max for known in found)),
        (min(known.diff_min for known in found), max(known.diff_max for known in found)),
    )


# Row groups that are read straight: nothing overlaps them, and they need no consolidation.
#
# Only the columns asked for are read. What is decoded together is one piece; pieces do not depend on one another, so
# that the reader makes several at the same time.


FETCH_BYTES = 8 * 1024 * 1024  # about so many encoded bytes by one request, if row groups allow it
FETCH_BYTES_MIN = 2 * 1024 * 1024  # below which a request is not worth its way to a far store
FETCHERS = 2  # pieces of a part that are fetched ahead where the caller decodes them batch by batch

DecodePiece: TypeAlias = Callable[[], pa.Table]  # makes the rows of some row groups


class Filled:
    """Tables with columns whose values are all the same, which are slices of the longest one of each yet."""

    def __init__(self) -> None:
        self._longest: dict[str, tuple[int, pa.Array]] = {}

    def completed(self, table: pa.Table, target: pa.Schema, same: Mapping[str, int], migration: Migration) -> pa.Table:
        """The columns of `target`: those that are the `same` in all rows, and the others as they are read."""
        arrays = [
            self._of(field.name, same[field.name], len(table)) if field.name in same else migration.column(table, field)
            for field in target
        ]
        return pa.Table.from_arrays(arrays, schema=target)

    def _of(self, name: str, value: int, rows: int) -> pa.Array:
        held, filled = self._longest.get(name, (value, None))
        if filled is None or held != value or len(filled) < rows:
            filled = pa.repeat(pa.scalar(value, pa.int64()), rows)
            self._longest[name] = (value, filled)
        return filled.slice(0, rows)


class PassThrough:
    """Row groups that nothing overlaps and that need no consolidation: only the columns asked for are read."""

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
        self._filled = Filled()

    def pieces(self, limit: int, readers: int) -> Iterator[DecodePiece]:
        """What makes the rows, in tables of about `limit` bytes, at least one row group; some may be without rows.

        They may be called on any threads, of which there are `readers`.
        """

        def read(groups: list[int], edge: bool) -> pa.Table:
            table = self._file.read(groups, self._columns(edge))
            return self._finished(table, edge, self._file.firsts(groups) if self._folds else None)

        for groups, edge in self._together(limit, readers):
            yield partial(read, groups, edge)

    def batches(self, limit: int, rows: int) -> Iterator[pa.Table]:
        """The rows in tables of at most `rows` rows, decoded by the caller, their encoded bytes fetched ahead."""

        def fetch(piece: tuple[list[int], bool]) -> tuple[list[int], bool, Any]:
            groups, edge = piece
            return groups, edge, self._file.source(groups, self._columns(edge))

        if self._folds:  # rows that become one may lie in two batches
            for piece in self.pieces(limit, 1):
                table = piece()
                yield from (table.slice(start, rows) for start in range(0, len(table), rows))
            return
        fetchers = 1 if self._file.is_whole else FETCHERS
        pieces = self._together(max(1, limit // FETCHERS), FETCHERS)
        for groups, edge, source in map_in_order(fetch, pieces, fetchers):
            for batch in self._file.batches(groups, self._columns(edge), rows, source):
                table = self._finished(batch, edge)
                if len(table):
                    yield table

    def _together(self, limit: int, readers: int) -> Iterator[tuple[list[int], bool]]:
        """As `_batches`, for so many readers of which each holds a piece of about `limit` bytes."""
        sizes = self._file.encoded_bytes(self._groups, self._columns(False))
        return _batches(self._file, self._groups, self._range, limit, sizes, readers)

    def _fields(self, edge: bool) -> list[pa.Field]:
        """What is needed of every row: the columns asked for, and those by which rows are left out."""
        wanted = {*self._names, *(self._schema.key if edge else ()), *([TIME] if self._needs_time else ())}
        return [field for field in self._schema.updates_schema if field.name in wanted]

    def _columns(self, edge: bool) -> list[str]:
        return self._migration.names(field.name for field in self._fields(edge) if field.name not in self._constants)

    def _finished(self, table: pa.Table, edge: bool, firsts: Mask | None = None) -> pa.Table:
        """The rows that are wanted of what was read: at the times of the read, within the key range."""
        clip = self._file.part.clip
        table = self._filled.completed(table, self._schemas[edge], self._constants, self._migration)
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
    """The time that every row gets and the diff that every row has, where there is only one."""
    low, high = (times.moved(time) for time in span)
    return (low if low == high else None), (diffs[0] if diffs[0] == diffs[1] else None)


def _batches(
    file: PartFile, groups: Sequence[int], key_range: KeyRange, limit: int, sizes: Sequence[int], readers: int
) -> Iterator[tuple[list[int], bool]]:
    """Row groups to read together, and whether they stick out of the key range.

    They take at most about `limit` bytes of memory. `sizes` are their encoded bytes: a part that is worth it is cut so
    that all `readers` have some.
    """
    left = sum(sizes)
    fetched_max = max(FETCH_BYTES_MIN, min(FETCH_BYTES, left // readers))
    taken: list[int] = []
    memory, fetched = 0, 0
    for number, size in zip(groups, sizes, strict=True):
        group = file.groups[number]
        edge = not key_range.covers(group.key_lower, group.key_upper)
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
