"""Planning a read: what can be read straight, and what must be merged with one another.

Keys are cut into stretches, by the bounds of parts and of their row groups. A stretch that one row group has for itself
is read straight where no two of its rows become one: they differ in key and value, or the read leaves their times
apart. So is one whose part names the rows that share key and value. Everything else is merged. Rows that are in memory
anyway (inline parts, small blobs) are cut at the bounds of the row groups, so that they make no more to be merged than
the row groups that they lie in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import TypeAlias

import pyarrow as pa

from persist.core.batch import Part, Run
from persist.core.ids import PartId
from persist.parts.bundles import expanded
from persist.parts.consolidate import Times
from persist.parts.files import Files, PartFile
from persist.parts.keycodec import ALL_KEYS, KeyRange, SortedKeys

SPLIT_PARTS_MAX = 256  # parts of one stretch that are looked into; so many footers are read before its first row
PIECES_MAX = 4096  # pieces that are merged together where they need not be


@dataclass(frozen=True, slots=True)
class Item:
    """A part, and the number of its run."""

    run: int
    part: Part


@dataclass(frozen=True, slots=True)
class Piece:
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

    pieces: Sequence[Piece]
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


class Loose:
    """Consolidated rows in memory, in order, which are taken piece by piece."""

    def __init__(self, rows: pa.Table, key: tuple[str, ...]) -> None:
        self._rows = rows
        self._keys = SortedKeys(rows, key)
        self._start = 0

    @property
    def lower(self) -> bytes | None:
        """The key of the first row that is left; None where none is."""
        return self._keys[self._start] if self._start < len(self._rows) else None

    def take(self, before: bytes | None) -> Piece:
        """The rows of the first key that is left, and all others whose key is below `before` (None: all)."""
        start, lower = self._start, self._keys[self._start]
        end = len(self._rows)
        if before is not None:
            end = self._keys.bisect(max(before, lower + b"\x00"), start)
        self._start = end
        return Piece(None, lower, self._keys[end - 1], (-1, start), rows=self._rows.slice(start, end - start))


_Waiting: TypeAlias = tuple[bytes, bool, tuple[int, int], Piece | Item | Loose]


def is_plain(part: Part, times: Times, files: Files) -> bool:
    """Whether the rows of a part come out as they are, whatever its index tells."""
    if part.is_inline or not part.sorted or times.merges(part.time_min, part.time_max):
        return False
    if files.migration(part).coarsens:
        return False
    return part.time is None or files.open(part).has_one_time


def overlapping(runs: Iterable[Run], times: Times, key_range: KeyRange, files: Files) -> Iterator[list[Item]]:
    """The parts that the read needs, in key order, those that overlap together. Reads the bundles it needs."""

    def wants(part: Part) -> bool:
        return (
            part.rows > 0
            and key_range.overlaps(part.key_lower, part.key_upper)
            and not times.hides(part.time_min, part.time_max)
            and not (part.clip is not None and part.time_max < part.clip)
        )

    plain = expanded(runs, files.blob, wants)
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
    items: Sequence[Item], loose: Loose | None, times: Times, key_range: KeyRange, files: Files
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


def classify(runs: Iterable[Run], as_of: int, files: Files) -> tuple[list[Part], list[Part]]:
    """The parts whose rows come out as they are, and those of which some have to be added up."""
    times = Times.snapshot(as_of)
    straight: list[Part] = []
    others: list[Part] = []
    for items in overlapping(runs, times, ALL_KEYS, files):
        merged: dict[PartId, Part] = {}
        for stretch in stretches(items, None, times, ALL_KEYS, files):
            if not stretch.is_straight or stretch.folds:
                merged.update((piece.item.part.id, piece.item.part) for piece in stretch.pieces if piece.item)
        others.extend(merged.values())
        straight.extend(item.part for item in items if item.part.id not in merged)
    return straight, others


def _is_straight(pieces: Sequence[Piece], times: Times, files: Files) -> bool:
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


def _connected(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces that overlap, directly or by others, together. They come by their lower bounds, touching ones last."""
    together: list[Piece] = []
    end: bytes | None = b""
    last: list[Piece] = []  # those that reach to the end
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


def _only_touches(piece: Piece, end: bytes | None, last: Sequence[Piece]) -> bool:
    """Whether it shares but a key with what is before it, and that with the row group before it alone."""
    if not piece.touches or piece.lower != end or len(last) != 1:
        return False
    number, group = piece.place
    return last[0].item is piece.item and last[0].place == (number, group - 1)


class _Pieces:
    """The pieces of parts that overlap, and of rows in memory. Parts are opened when their turn comes."""

    def __init__(
        self, items: Sequence[Item], loose: Loose | None, times: Times, key_range: KeyRange, files: Files
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

    def in_order(self) -> Iterator[Piece]:
        """By their lower bounds; of equal ones those that only touch come last."""
        while self._heap:
            _, _, place, found = heappop(self._heap)
            if isinstance(found, Piece):
                yield found
            elif isinstance(found, Loose):
                yield found.take(self._heap[0][0] if self._heap else None)
                self._wait_for(found)
            elif self._is_split(found.part):
                self._opened += 1
                for piece in self._row_groups(found, place[0]):
                    heappush(self._heap, (piece.lower, piece.touches, piece.place, piece))
            else:
                yield Piece(found, found.part.key_lower, found.part.key_upper, place)

    def _wait_for(self, loose: Loose) -> None:
        lower = loose.lower
        if lower is not None:
            heappush(self._heap, (lower, False, (-1, 0), loose))

    def _is_split(self, part: Part) -> bool:
        if part.is_inline or self._opened == SPLIT_PARTS_MAX:
            return False
        if self._is_single:  # else a part that needs no merge need not be opened yet
            return not is_plain(part, self._times, self._files)
        return not self._files.is_small(part)

    def _row_groups(self, item: Item, number: int) -> Iterator[Piece]:
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
            yield Piece(
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


def is_settled(pieces: Sequence[Piece]) -> bool:
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
