"""Reading parts: the footer by one range read, row groups by range reads, every byte verified."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from blob.errors import BlobNotFound
from persist.core.batch import Part
from persist.core.blob_keys import is_of_maintenance
from persist.core.errors import Corruption, InvalidUsage
from persist.parts.codec import (
    ColumnChunk,
    Footer,
    decode_batches,
    decode_footer,
    decode_inline,
    decode_row_groups,
    decoding,
    part_label,
    schema_of,
)
from persist.parts.key_encoding import KeyRange
from persist.parts.parquet_guard import (
    Decoded,
    FixedList,
    FooterProbe,
    SparseFile,
    chunk_bytes_max,
    chunk_start,
    columns_bytes_max,
    fixed_lists,
)
from persist.parts.prefetch import map_in_order
from persist.parts.row_stats import KnownRows, decode_twins
from persist.parts.schema_evolution import Migration
from persist.parts.shard_schema import TIME, ShardSchema
from persist.parts.value_order import Mask

WHOLE_BYTES_MAX = 1024 * 1024  # a part up to this size is fetched by one read
INDEX_FACTOR, INDEX_BYTES = 4, 4 * 1024 * 1024  # by how much rows may exceed the size in the index, for planning
LARGE_BYTES = 32 * 1024 * 1024  # of rows and temporary memory, beyond which row groups are decoded one at a time
GAP_BYTES_MAX = 256 * 1024  # a gap between required bytes up to this size is fetched as well
FOOTERS_MAX = 1024  # footers cached by one `PartFiles`
FOOTER_READERS = 8  # footers that are read concurrently if many parts are opened in sequence


# Whether a row group may have matching rows, by Parquet's statistics of its flat columns.
RowGroupFilter = Callable[[dict[str, Any]], bool]


class BlobReads(Protocol):
    """The methods of a blob store that reading parts needs."""

    def get_range(self, key: str, start: int, length: int) -> bytes: ...

    def stat(self, key: str) -> Any: ...


@dataclass(frozen=True, eq=False)
class DecodeLimit:
    """Memory limits of row groups that are read together: of their rows, and of the memory while they are decoded.

    Row groups that take more than LARGE_BYTES are decoded one at a time, in `turn`.
    """

    kept_max: int
    passing_max: int
    index_factor: int = 40  # rows may take so many times their size in the index; nested booleans are overestimated
    in_batches: bool = False  # whether large row groups are read in batches of rows
    turn: AbstractContextManager[object] = field(default_factory=threading.Lock)

    def in_pieces(self) -> DecodeLimit:
        """The limits for a process that reads for many callers at once."""
        return replace(self, index_factor=INDEX_FACTOR, in_batches=True)


class PartFiles:
    """Opens parts; caches at most `FOOTERS_MAX` footers. Not thread-safe: one per thread.

    Errors of the blob store pass through (BlobNotFound if the part was deleted); bytes that do not match their
    checksums raise Corruption. With a `bound`, row groups of untrusted files that exceed it raise InvalidUsage before
    they are decoded. `are_foreign`: no commit has validated the parts yet (`persist.parts.parquet_guard`). `current`:
    the schema to which rows are converted; None: rows keep the schema of their part.
    """

    def __init__(
        self,
        blob: BlobReads,
        schemas: Mapping[int, ShardSchema],
        keeps: RowGroupFilter | None = None,
        bound: DecodeLimit | None = None,
        *,
        are_foreign: bool = False,
        current: ShardSchema | None = None,
    ) -> None:
        self._current = current
        self._migrations: dict[int, Migration] = {}
        self.blob = blob
        self.keeps = keeps
        self.bound = bound
        self._are_foreign = are_foreign
        self.schemas = schemas
        self._footers: dict[str, Footer] = {}
        self._whole: tuple[str, bytes] = ("", b"")  # the small part that was opened last, and is opened again soon

    def is_unverified(self, part: Part) -> bool:
        """Whether no one has decoded all rows of the part yet: a commit decodes small parts completely."""
        return self._are_foreign or part.size > WHOLE_BYTES_MAX

    def is_small(self, part: Part) -> bool:
        """Whether the part is fetched by one read."""
        return part.size <= WHOLE_BYTES_MAX

    def migration(self, part: Part) -> Migration:
        """How the rows of the part are converted. Raises Corruption if its schema is unknown."""
        migration = self._migrations.get(part.schema_id)
        if migration is None:
            own = schema_of(part, self.schemas)
            migration = self._migrations[part.schema_id] = Migration(own, self._current or own)
        return migration

    def open(self, part: Part) -> PartFile:
        whole = self._whole[1] if self._whole[0] == part.id else None
        footer = self._footers.get(part.id)
        if footer is None:
            footer, whole = self._read(part)
            if whole is not None:
                self._whole = (part.id, whole)
            self._keep(part, footer)
        return PartFile(self, part, footer, whole)

    def open_ahead(self, parts: Sequence[Part]) -> Iterator[PartFile | None]:
        """Open the parts in order, reading their footers on several threads; None: it is damaged or missing."""

        def read(part: Part) -> Footer | None:
            try:
                return self._footers.get(part.id) or self._read(part)[0]
            except (Corruption, BlobNotFound):
                return None

        large = sum(not self.is_small(part) for part in parts)
        readers = max(1, min(FOOTER_READERS, large))
        for part, footer in zip(parts, map_in_order(read, parts, readers), strict=True):
            if footer is None:
                yield None
                continue
            self._keep(part, footer)
            yield PartFile(self, part, footer, None)

    def _read(self, part: Part) -> tuple[Footer, bytes | None]:
        """The verified footer of a part, and all its bytes if it is small."""
        if not self.is_small(part):
            tail = self.fetch(part, part.size - part.footer_size, part.footer_size)
            return decode_footer(part, tail, is_foreign=self._are_foreign), None
        whole = self.fetch(part, 0, part.size)
        if zlib.crc32(whole) != part.checksum:
            raise Corruption(f"{part_label(part)} does not match its checksum", part=str(part.id))
        return decode_footer(part, whole[part.size - part.footer_size :], is_foreign=self._are_foreign), whole

    def _keep(self, part: Part, footer: Footer) -> None:
        if part.id not in self._footers and len(self._footers) >= FOOTERS_MAX:
            self._footers.pop(next(iter(self._footers)))
        self._footers[part.id] = footer

    def inline(self, part: Part) -> pa.Table:
        return decode_inline(part, self.schemas)

    def rows_from(self, part: Part, time: int) -> int:
        """The number of rows of the part whose time, as it was written, is at or after this one."""
        if part.is_inline:
            return _count_from(self.inline(part), time)
        file = self.open(part)
        return sum(_count_from(file.read((group,), (TIME,)), time) for group in range(len(file.groups)))

    def fetch(self, part: Part, start: int, length: int) -> bytes:
        """Exactly the bytes `[start, start + length)` of a part's blob."""
        return fetch(self.blob, part, part.size, start, length)


class PartFile:
    """One Parquet part, open for reading columns of row groups."""

    def __init__(self, files: PartFiles, part: Part, footer: Footer, whole: bytes | None) -> None:
        self.part = part
        self.groups = footer.row_groups
        self.has_one_time = footer.has_one_time
        self._files = files
        self._footer = footer
        self._whole = whole
        self.schema = schema_of(part, files.schemas)

    def read(self, groups: Sequence[int], columns: Sequence[str]) -> pa.Table:
        """Rows of the row groups in the part's own schema, with those of `columns` that it has."""
        names = self._names(columns)
        if not names:
            # Only the row count of this part is needed.
            return pa.table({"": pa.nulls(sum(self.groups[group].rows for group in groups))})
        with self._decode(groups, names) as table:
            return table

    def reading(self, groups: Sequence[int], columns: Sequence[str]) -> AbstractContextManager[pa.Table]:
        """As `read`, for a `with` block that holds the turn of large row groups."""
        return self._decode(groups, self._names(columns))

    @contextmanager
    def _decode(self, groups: Sequence[int], names: Sequence[str]) -> Iterator[pa.Table]:
        source, decoded = self._source(groups, names)
        with self._turn_of(decoded):
            table = decode_row_groups(self.part, self._footer, groups, names, source)
            if len(table) != sum(self.groups[group].rows for group in groups):
                raise Corruption(f"{part_label(self.part)} lacks rows", part=str(self.part.id))
            yield table

    @cached_property
    def _fixed_lists(self) -> Sequence[tuple[FixedList, ...]]:
        """The fixed-size lists around each leaf."""
        return fixed_lists(self.schema.updates_schema)

    def known(self, group: int) -> KnownRows | None:
        """The statistics in the index about a row group, if they are valid for this read.

        Only maintenance records them; the commit rejects them from writers. They become invalid if a commit assigns a
        time or a column is dropped.
        """
        known = self.groups[group].known
        if known is None or self.migration.coarsens or self.part.time is not None:
            return None
        return known if is_of_maintenance(self.part.key or "") else None

    def firsts(self, groups: Sequence[int]) -> Mask:
        """Which rows are not twins, of row groups that list their twins or have none. Raises Corruption."""
        chunks = [chunk for group in groups if (chunk := self.groups[group].twins) is not None]
        segments = list(self._fetch_verified(sorted(chunks, key=lambda chunk: chunk.start)))
        masks = []
        for group in groups:
            rows, chunk = self.groups[group].rows, self.groups[group].twins
            with decoding(self.part):
                masks.append(decode_twins(b"" if chunk is None else _bytes_of(chunk, segments), rows))
        return np.concatenate(masks)

    def wanted(self, key_range: KeyRange) -> Iterator[int]:
        """The row groups that may have matching rows of the range."""
        keeps = self._files.keeps
        for number, group in enumerate(self.groups):
            if key_range.overlaps(group.key_lower, group.key_upper) and (
                keeps is None or keeps(self._statistics(number))
            ):
                yield number

    def _statistics(self, number: int) -> dict[str, Any]:
        """Parquet's statistics of the file's flat columns, by the reader's names."""
        group, statistics = self._footer.metadata.row_group(number), {}
        for name, source in self.migration.sources.items():
            positions = self._footer.leaves.get(source, ())
            if len(positions) == 1 and (of_column := group.column(positions[0]).statistics) is not None:
                statistics[name] = of_column
        return statistics

    @property
    def migration(self) -> Migration:
        """How its rows are converted."""
        return self._files.migration(self.part)

    @property
    def metadata(self) -> Any:
        """The Parquet footer."""
        return self._footer.metadata

    @property
    def is_whole(self) -> bool:
        """Whether all its bytes are fetched already."""
        return self._whole is not None

    def source(self, groups: Sequence[int], columns: Sequence[str]) -> Any:
        """Fetch and verify the bytes of columns of row groups, for `batches`."""
        return self._source(groups, self._names(columns))[0]

    def batches(
        self, groups: Sequence[int], columns: Sequence[str], rows: int, source: Any = None
    ) -> Iterator[pa.Table]:
        """As `read`, at most `rows` rows at a time, from `source` if it was fetched already."""
        names = self._names(columns)
        total = sum(self.groups[group].rows for group in groups)
        if not names:
            for start in range(0, total, rows):
                yield pa.table({"": pa.nulls(min(rows, total - start))})
            return
        seen = 0
        if source is None:
            source, _ = self._source(groups, names)
        for batch in decode_batches(self.part, self._footer, groups, names, source, rows):
            seen += batch.num_rows
            yield pa.Table.from_batches([batch])
        if seen != total:
            raise Corruption(f"{part_label(self.part)} lacks rows", part=str(self.part.id))

    def _names(self, columns: Sequence[str]) -> list[str]:
        wanted = set(columns)
        return [name for name in self._footer.leaves if name in wanted]

    def _source(self, groups: Sequence[int], names: Sequence[str]) -> tuple[Any, Decoded]:
        """The verified bytes of columns of row groups, and the most memory that they take when they are decoded."""
        if self._whole is not None:
            return pa.BufferReader(self._whole), self._check_decoded(groups, names, [(0, self._whole)])
        chunks = sorted(self._chunks(groups, names), key=lambda chunk: chunk.start)
        segments = list(self._fetch_verified(chunks))
        decoded = self._check_decoded(groups, names, segments)
        return pa.PythonFile(SparseFile(segments, self.part.size), mode="r"), decoded

    def _turn_of(self, decoded: Decoded) -> AbstractContextManager[object]:
        bound = self._files.bound
        return nullcontext() if bound is None or sum(decoded) <= LARGE_BYTES else bound.turn

    def check_metadata(self, group: int, columns: Sequence[str]) -> None:
        """Raise Corruption if Parquet refuses the metadata of columns of a row group. Nothing is fetched."""
        with decoding(self.part):
            probe = FooterProbe(self._footer.metadata, self.part.size)
            for name in self._names(columns):
                for position in self._footer.leaves[name]:
                    probe.check(group, position)

    def encoded_bytes(self, groups: Sequence[int], columns: Sequence[str]) -> list[int]:
        """The encoded size of these columns in each of the row groups."""
        names = self._names(columns)
        return [sum(chunk.size for chunk in self._chunks((group,), names)) for group in groups]

    def _chunks(self, groups: Sequence[int], names: Sequence[str]) -> list[ColumnChunk]:
        positions = [position for name in names for position in self._footer.leaves[name]]
        return [self.groups[group].chunks[position] for group in groups for position in positions]

    def _check_decoded(
        self, groups: Sequence[int], names: Sequence[str], segments: Sequence[tuple[int, bytes]]
    ) -> Decoded:
        """The most bytes that these columns of these row groups may take. Raises InvalidUsage beyond the bound."""
        bound = self._files.bound
        if bound is None or not self._files.is_unverified(self.part):
            return Decoded(0, 0)
        planned = bound.index_factor * sum(self.groups[group].nbytes for group in groups) + INDEX_BYTES
        most, total = Decoded(min(bound.kept_max, planned), bound.passing_max), Decoded(0, 0)
        columns = [(self.schema.updates_schema.field(name), self._footer.leaves[name]) for name in names]
        for group in groups:
            left = Decoded(most.kept - total.kept, most.passing)
            of_chunk = partial(self._bound_chunk, group, segments)
            decoded = columns_bytes_max(columns, self.groups[group].rows, left, of_chunk)
            total = Decoded(total.kept + decoded.kept, max(total.passing, decoded.passing))
            if not total.is_within(most):
                raise InvalidUsage(
                    f"row groups of {part_label(self.part)} may take more than {most.kept} bytes decoded, or "
                    f"{most.passing} while they are decoded, the limit of one read here: write smaller row groups or "
                    "values, or read with a client that accesses the stores directly"
                )
        return total

    def _bound_chunk(self, group: int, segments: Sequence[tuple[int, bytes]], position: int, most: Decoded) -> Decoded:
        """The most bytes that one column chunk takes. Raises Corruption, also if footer and index contradict."""
        chunk, metadata = self.groups[group].chunks[position], self._footer.metadata
        in_footer = metadata.row_group(group).column(position)
        with decoding(self.part):
            if (chunk_start(in_footer), in_footer.total_compressed_size) != (chunk.start, chunk.size):
                raise ValueError("its footer and its index have different locations of a column")
            data, rows, column = _bytes_of(chunk, segments), self.groups[group].rows, metadata.schema.column(position)
            lists = self._fixed_lists[position]
            return chunk_bytes_max(data, in_footer, column, rows, most, lists, turn=self._turn_of)

    def _fetch_verified(self, chunks: Sequence[ColumnChunk]) -> Iterator[tuple[int, bytes]]:
        """The verified bytes of these chunks, which are in order, and where they begin. Raises Corruption."""
        for span in _spans(chunks):
            start = span[0].start
            length = span[-1].start + span[-1].size - start
            if self._whole is None:
                data = self._files.fetch(self.part, start, length)
            else:
                data = self._whole[start : start + length]
            view = memoryview(data)
            for chunk in span:
                if zlib.crc32(view[chunk.start - start : chunk.start - start + chunk.size]) != chunk.checksum:
                    raise Corruption(
                        f"bytes {chunk.start} to {chunk.start + chunk.size} of {part_label(self.part)} do not match "
                        "their checksum",
                        part=str(self.part.id),
                    )
            yield start, data


def fetch(blob: BlobReads, part: Part, size: int, start: int, length: int) -> bytes:
    """Exactly the bytes `[start, start + length)` of a part's blob, which has `size` bytes. Raises Corruption.

    Errors of the blob store pass through; BlobNotFound: it was deleted.
    """
    key = part.key or ""
    try:
        data = blob.get_range(key, start, length)
    except BlobNotFound:
        stat = blob.stat(key)
        if stat is None or stat.size == size:
            raise
        raise Corruption(
            f"blob {key} has {stat.size} bytes, not the {size} of part {part.id}", part=str(part.id)
        ) from None
    if len(data) != length:
        raise Corruption(f"blob {key} returned {len(data)} bytes instead of {length}", part=str(part.id))
    return data


def _bytes_of(chunk: ColumnChunk, segments: Sequence[tuple[int, bytes]]) -> memoryview:
    """The bytes of a chunk in one of the segments; fewer if the segment ends before the chunk."""
    for start, data in segments:
        if start <= chunk.start < start + len(data):
            return memoryview(data)[chunk.start - start : chunk.start - start + chunk.size]
    return memoryview(b"")


def _count_from(rows: pa.Table, time: int) -> int:
    return int(pc.sum(pc.greater_equal(rows.column(TIME), time)).as_py() or 0)


def _spans(chunks: Sequence[ColumnChunk]) -> Iterator[list[ColumnChunk]]:
    """Group neighbouring chunks, so that each span takes one read."""
    span: list[ColumnChunk] = []
    for chunk in chunks:
        if span and chunk.start - (span[-1].start + span[-1].size) > GAP_BYTES_MAX:
            yield span
            span = []
        span.append(chunk)
    if span:
        yield span
