"""Parts as a reader sees them: footer by one range read, row groups by range reads, every byte verified."""

from __future__ import annotations

import io
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from blob.errors import BlobNotFound
from persist.core.batch import Part
from persist.core.blob_keys import is_of_maintenance
from persist.core.errors import Corruption, InvalidUsage
from persist.parts.codec import (
    DATA_ERRORS,
    ColumnChunk,
    Footer,
    decode_batches,
    decode_footer,
    decode_inline,
    decode_row_groups,
    part_label,
    schema_of,
)
from persist.parts.key_encoding import KeyRange
from persist.parts.memory_size import fixed_bytes
from persist.parts.parquet_guard import (
    Decoded,
    Fixed,
    FooterProbe,
    check_sizes,
    chunk_start,
    decoded_bytes_max,
    fixed_lists,
    levels_of,
)
from persist.parts.prefetch import map_in_order
from persist.parts.row_stats import KnownRows, decode_twins
from persist.parts.schema_evolution import Migration
from persist.parts.shard_schema import TIME, ShardSchema
from persist.parts.sort_words import Mask

# A file of which only some bytes are here.


class SparseFile(io.RawIOBase):
    """A file of `size` bytes of which only some segments are here; reading elsewhere is an error."""

    def __init__(self, segments: Sequence[tuple[int, bytes]], size: int) -> None:
        self._segments = segments
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> memoryview:
        """Arrow takes what is here as it is: nothing is copied."""
        for start, data in self._segments:
            if start <= self._position and self._position + size <= start + len(data):
                piece = memoryview(data)[self._position - start : self._position - start + size]
                self._position += len(piece)
                return piece
        raise OSError("these bytes were not fetched")


# Parts as a reader sees them: footer by one range read, row groups by range reads, every byte verified.


WHOLE_BYTES_MAX = 1024 * 1024  # a part up to this size is fetched by one read
TOLD_TIMES, TOLD_BYTES = 4, 4 * 1024 * 1024  # of what an index tells that rows take: by that reads are planned
LARGE_BYTES = 32 * 1024 * 1024  # of rows, and of what is there meanwhile, beyond which they are decoded alone
GAP_BYTES_MAX = 256 * 1024  # a hole between wanted bytes up to this size is fetched along
FOOTERS_MAX = 1024  # footers kept by one `PartFiles`
FOOTER_READERS = 8  # footers that are read at the same time where many parts are opened one after the other


# Whether a row group may have rows that are wanted, by Parquet's statistics of its flat columns.
RowGroupFilter = Callable[[dict[str, Any]], bool]


class BlobReads(Protocol):
    """What reading parts needs of a blob store."""

    def get_range(self, key: str, start: int, length: int) -> bytes: ...

    def stat(self, key: str) -> Any: ...


@dataclass(frozen=True, eq=False)
class DecodeLimit:
    """What row groups that are read together may take: their rows, and what is there only while they are decoded.

    Those that take more than LARGE_BYTES are decoded one after the other, in `turn`.
    """

    kept_max: int
    passing_max: int
    told_times: int = 40  # so much as the index tells; lists of lists of flags count for more than they take
    in_batches: bool = False  # whether what may be large is read some rows at a time
    turn: AbstractContextManager[object] = field(default_factory=threading.Lock)

    def in_pieces(self) -> DecodeLimit:
        """The same for who reads for many callers at once."""
        return replace(self, told_times=TOLD_TIMES, in_batches=True)


class PartFiles:
    """Opens parts; keeps at most `FOOTERS_MAX` footers. Not thread-safe: one per thread.

    Errors of the blob store pass through (BlobNotFound when the part is gone); bytes that do not match their
    checksums raise Corruption. With a `bound` what would take more raises InvalidUsage before it is decoded: for who
    reads files that others made. `are_foreign`: no commit has looked at them yet (`persist.parts.parquet_guard`).
    `current`: the schema as whose rows parts are read; None: each is read by its own.
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
        self._blob = blob
        self.keeps = keeps
        self.bound = bound
        self._are_foreign = are_foreign
        self.schemas = schemas
        self._footers: dict[str, Footer] = {}
        self._whole: tuple[str, bytes] = ("", b"")  # the small part that was opened last, which is opened again soon

    def doubts(self, part: Part) -> bool:
        """Whether nobody has decoded all rows of the part yet: a commit has done so with a small one."""
        return self._are_foreign or part.size > WHOLE_BYTES_MAX

    def is_small(self, part: Part) -> bool:
        """Whether the part is fetched by one read."""
        return part.size <= WHOLE_BYTES_MAX

    def migration(self, part: Part) -> Migration:
        """How the rows of the part are read. Raises Corruption: nobody knows the schema of the part."""
        found = self._migrations.get(part.schema_id)
        if found is None:
            own = schema_of(part, self.schemas)
            found = self._migrations[part.schema_id] = Migration(own, self._current or own)
        return found

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
        """Each part opened, in order, their footers read on several threads; None: it is damaged, or missing."""

        def read(part: Part) -> Footer | None:
            try:
                return self._footers.get(part.id) or self._read(part)[0]
            except (Corruption, BlobNotFound):
                return None

        large = sum(not self.is_small(part) for part in parts)  # small ones are fetched by one read anyway
        readers = max(1, min(FOOTER_READERS, large))
        for part, footer in zip(parts, map_in_order(read, parts, readers), strict=True):
            if footer is None:
                yield None
                continue
            self._keep(part, footer)
            yield PartFile(self, part, footer, None)

    def _read(self, part: Part) -> tuple[Footer, bytes | None]:
        """The verified footer of a part, and all its bytes where it is small."""
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

    @property
    def blob(self) -> BlobReads:
        return self._blob

    def inline(self, part: Part) -> pa.Table:
        return decode_inline(part, self.schemas)

    def rows_from(self, part: Part, time: int) -> int:
        """How many rows of the part have this time, or a later one, as they were written."""
        if part.is_inline:
            return _later(self.inline(part), time)
        file = self.open(part)
        return sum(_later(file.read((group,), (TIME,)), time) for group in range(len(file.groups)))

    def fetch(self, part: Part, start: int, length: int) -> bytes:
        """Exactly the bytes `[start, start + length)` of a part's blob."""
        key = part.key or ""
        try:
            data = self._blob.get_range(key, start, length)
        except BlobNotFound:
            stat = self._blob.stat(key)
            if stat is None or stat.size == part.size:
                raise
            raise Corruption(
                f"blob {key} has {stat.size} bytes, not the {part.size} of part {part.id}", part=str(part.id)
            ) from None
        if len(data) != length:
            raise Corruption(f"blob {key} gave {len(data)} bytes instead of {length}", part=str(part.id))
        return data


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
        """Rows of the row groups, in the part's own schema, only those of `columns` that it has."""
        names = self._names(columns)
        if not names:
            # No column is wanted of this part, but its row count is.
            return pa.table({"": pa.nulls(sum(self.groups[group].rows for group in groups))})
        with self._decoding(groups, names) as table:
            return table

    def reading(self, groups: Sequence[int], columns: Sequence[str]) -> AbstractContextManager[pa.Table]:
        """The same of some columns, for a `with` in which large rows are used in turn."""
        return self._decoding(groups, self._names(columns))

    @contextmanager
    def _decoding(self, groups: Sequence[int], names: Sequence[str]) -> Iterator[pa.Table]:
        source, decoded = self._source(groups, names)
        with self._turn_of(decoded):
            table = decode_row_groups(self.part, self._footer, groups, names, source)
            if len(table) != sum(self.groups[group].rows for group in groups):
                raise Corruption(f"{part_label(self.part)} lacks rows", part=str(self.part.id))
            yield table

    @cached_property
    def _fixed(self) -> Sequence[tuple[Fixed, ...]]:
        """The lists of a fixed size around each leaf."""
        return fixed_lists(self.schema.updates_schema)

    def known(self, group: int) -> KnownRows | None:
        """What the index tells of the rows of a row group, where it can be believed.

        Maintenance tells it; the commit lets no writer do so. A time that a commit chose makes it untrue, and so does
        a column that was dropped.
        """
        found = self.groups[group].known
        if (
            found is None
            or self.migration.coarsens
            or self.part.time is not None
            or not is_of_maintenance(self.part.key or "")
        ):
            return None
        return found

    def tells_twins(self, group: int) -> bool:
        """Whether `firsts` is told of a row group of which something is known."""
        return self.groups[group].twins is not None

    def firsts(self, groups: Sequence[int]) -> Mask:
        """Which rows of row groups that tell their twins, or have none, do not share key and value with the row before.

        Raises Corruption.
        """
        chunks = [chunk for group in groups if (chunk := self.groups[group].twins) is not None]
        found = {}
        for start, data in self._verified(sorted(chunks, key=lambda chunk: chunk.start)):
            for chunk in chunks:
                if start <= chunk.start < start + len(data):
                    found[chunk.start] = bytes(data[chunk.start - start : chunk.start - start + chunk.size])
        masks = []
        for group in groups:
            rows, chunk = self.groups[group].rows, self.groups[group].twins
            try:
                masks.append(decode_twins(b"" if chunk is None else found[chunk.start], rows))
            except (ValueError, IndexError, KeyError) as error:
                raise Corruption(
                    f"{part_label(self.part)} cannot be decoded: {error}", part=str(self.part.id)
                ) from error
        return np.concatenate(masks)

    def wanted(self, key_range: KeyRange) -> Iterator[int]:
        """The row groups that may have rows of the range which the reader keeps."""
        keeps = self._files.keeps
        for number, group in enumerate(self.groups):
            if key_range.overlaps(group.key_lower, group.key_upper) and (
                keeps is None or keeps(self._statistics(number))
            ):
                yield number

    def _statistics(self, number: int) -> dict[str, Any]:
        """Parquet's statistics of flat columns that the file has, by the names that these have for the reader."""
        group, found = self._footer.metadata.row_group(number), {}
        for name, source in self.migration.sources.items():
            positions = self._footer.leaves.get(source, ())
            if len(positions) == 1 and (statistics := group.column(positions[0]).statistics) is not None:
                found[name] = statistics
        return found

    @property
    def migration(self) -> Migration:
        """How its rows are read."""
        return self._files.migration(self.part)

    @property
    def metadata(self) -> Any:
        """What the Parquet footer says."""
        return self._footer.metadata

    @property
    def is_whole(self) -> bool:
        """Whether all its bytes are here already."""
        return self._whole is not None

    def source(self, groups: Sequence[int], columns: Sequence[str]) -> Any:
        """The verified bytes of columns of row groups, for `batches`: fetch them here, decode them there."""
        return self._source(groups, self._names(columns))[0]

    def batches(
        self, groups: Sequence[int], columns: Sequence[str], rows: int, source: Any = None
    ) -> Iterator[pa.Table]:
        """Rows of row groups as `read` gives them, at most `rows` at a time, from `source` where it is here already."""
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
        """The verified bytes of columns of row groups, and the most that they take once they are decoded."""
        if self._whole is not None:
            return pa.BufferReader(self._whole), self._check_decoded(groups, names, [(0, self._whole)])
        chunks = sorted(self._chunks(groups, names), key=lambda chunk: chunk.start)
        segments = list(self._verified(chunks))
        decoded = self._check_decoded(groups, names, segments)
        return pa.PythonFile(SparseFile(segments, self.part.size), mode="r"), decoded

    def _turn_of(self, decoded: Decoded) -> AbstractContextManager[object]:
        bound = self._files.bound
        return nullcontext() if bound is None or sum(decoded) <= LARGE_BYTES else bound.turn

    def check_described(self, group: int, columns: Sequence[str]) -> None:
        """Raise Corruption where Parquet refuses what the footer says of columns of a row group. Nothing is fetched."""
        try:
            described = FooterProbe(self._footer.metadata, self.part.size)
            for name in self._names(columns):
                for position in self._footer.leaves[name]:
                    described.check(group, position)
        except DATA_ERRORS as error:
            text = f"{part_label(self.part)} cannot be decoded: {error}"
            raise Corruption(text, part=str(self.part.id)) from error

    def encoded_bytes(self, groups: Sequence[int], columns: Sequence[str]) -> list[int]:
        """How many bytes of the file these columns take, for each of the row groups."""
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
        if bound is None or not self._files.doubts(self.part):
            return Decoded(0, 0)
        said = bound.told_times * sum(self.groups[group].nbytes for group in groups) + TOLD_BYTES
        kept, passing, kept_max = 0, 0, min(bound.kept_max, said)
        for group in groups:
            rows = self.groups[group].rows
            for name in names:
                # A list of a fixed size takes its room also where it is null.
                least, found = rows * fixed_bytes(self.schema.updates_schema.field(name).type), 0
                for position in self._footer.leaves[name]:
                    decoded = self._decoded(
                        group, position, segments, Decoded(kept_max - kept - found, bound.passing_max)
                    )
                    found, passing = found + decoded.kept, max(passing, decoded.passing)
                kept += max(found, least)
                if kept > kept_max or passing > bound.passing_max:
                    raise InvalidUsage(
                        f"row groups of {part_label(self.part)} may take more than {kept_max} bytes decoded, or "
                        f"{bound.passing_max} while they are decoded, the limit of one read here: write smaller row "
                        "groups or values, or read with a client that accesses the stores directly"
                    )
        return Decoded(kept, passing)

    def _decoded(self, group: int, position: int, segments: Sequence[tuple[int, bytes]], most: Decoded) -> Decoded:
        """What one column chunk takes. Raises Corruption, also where the footer means other bytes than the index."""
        chunk, metadata = self.groups[group].chunks[position], self._footer.metadata
        told = metadata.row_group(group).column(position)
        try:
            if (chunk_start(told), told.total_compressed_size) != (chunk.start, chunk.size):
                raise ValueError("its footer and its index name other bytes for a column")
            data, rows, column = _bytes_of(chunk, segments), self.groups[group].rows, metadata.schema.column(position)
            found = decoded_bytes_max(data, told, column, rows, most)
            lists = self._fixed[position]
            if lists and found.kept <= most.kept and found.passing <= most.passing:
                with self._turn_of(found):
                    check_sizes(*levels_of(data, told, column), lists)
            return found
        except ValueError as error:
            raise Corruption(f"{part_label(self.part)} cannot be decoded: {error}", part=str(self.part.id)) from error

    def _verified(self, chunks: Sequence[ColumnChunk]) -> Iterator[tuple[int, bytes]]:
        """The bytes that hold these chunks, which are in order, and where they begin. Raises Corruption."""
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


def _bytes_of(chunk: ColumnChunk, segments: Sequence[tuple[int, bytes]]) -> memoryview:
    """The bytes of a chunk, which lies in one of the segments: of one that ends too early as many as there are."""
    for start, data in segments:
        if start <= chunk.start < start + len(data):
            return memoryview(data)[chunk.start - start : chunk.start - start + chunk.size]
    return memoryview(b"")


def _later(rows: pa.Table, time: int) -> int:
    return int(pc.sum(pc.greater_equal(rows.column(TIME), time)).as_py() or 0)


def _spans(chunks: Sequence[ColumnChunk]) -> Iterator[list[ColumnChunk]]:
    """Neighbouring chunks together, so that each span costs one read."""
    span: list[ColumnChunk] = []
    for chunk in chunks:
        if span and chunk.start - (span[-1].start + span[-1].size) > GAP_BYTES_MAX:
            yield span
            span = []
        span.append(chunk)
    if span:
        yield span
