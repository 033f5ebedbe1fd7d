"""Parts as a reader sees them: footer by one range read, row groups by range reads, every byte verified."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from blob.errors import BlobNotFound
from persist.core.batch import Part
from persist.core.errors import Corruption
from persist.core.keys import is_of_maintenance
from persist.parts.codec import (
    Chunk,
    Footer,
    decode_batches,
    decode_footer,
    decode_inline,
    decode_row_groups,
    named,
    schema_of,
)
from persist.parts.columns import Mask
from persist.parts.keycodec import KeyRange
from persist.parts.known import Known, firsts_of
from persist.parts.schema import TIME, ShardSchema

WHOLE_BYTES_MAX = 1024 * 1024  # a part up to this size is fetched by one read
GAP_BYTES_MAX = 256 * 1024  # a hole between wanted bytes up to this size is fetched along
FOOTERS_MAX = 1024  # footers kept by one `Files`


# Whether a row group may have rows that are wanted, by Parquet's statistics of its flat columns.
Keeps = Callable[[dict[str, Any]], bool]


class BlobReads(Protocol):
    """What reading parts needs of a blob store."""

    def get_range(self, key: str, start: int, length: int) -> bytes: ...

    def stat(self, key: str) -> Any: ...


class Files:
    """Opens parts; keeps at most `FOOTERS_MAX` footers. Not thread-safe: one per thread.

    Errors of the blob store pass through (BlobNotFound when the part is gone); bytes that do not match their
    checksums raise Corruption.
    """

    def __init__(self, blob: BlobReads, schemas: Mapping[int, ShardSchema], keeps: Keeps | None = None) -> None:
        self._blob = blob
        self.keeps = keeps
        self.schemas = schemas
        self._footers: dict[str, Footer] = {}
        self._whole: tuple[str, bytes] = ("", b"")  # the small part that was opened last, which is opened again soon

    def is_small(self, part: Part) -> bool:
        """Whether the part is fetched by one read."""
        return part.size <= WHOLE_BYTES_MAX

    def open(self, part: Part) -> PartFile:
        whole = self._whole[1] if self._whole[0] == part.id else None
        footer = self._footers.get(part.id)
        if footer is None:
            if self.is_small(part):
                whole = self.fetch(part, 0, part.size)
                if zlib.crc32(whole) != part.checksum:
                    raise Corruption(f"{named(part)} does not match its checksum", part=str(part.id))
                tail = whole[part.size - part.footer_size :]
                self._whole = (part.id, whole)
            else:
                tail = self.fetch(part, part.size - part.footer_size, part.footer_size)
            footer = decode_footer(part, tail)
            if len(self._footers) >= FOOTERS_MAX:
                self._footers.pop(next(iter(self._footers)))
            self._footers[part.id] = footer
        return PartFile(self, part, footer, whole)

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

    def __init__(self, files: Files, part: Part, footer: Footer, whole: bytes | None) -> None:
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
        source = self._source(groups, names)
        table = decode_row_groups(self.part, self._footer, groups, names, source)
        if len(table) != sum(self.groups[group].rows for group in groups):
            raise Corruption(f"{named(self.part)} lacks rows", part=str(self.part.id))
        return table

    def known(self, group: int) -> Known | None:
        """What the index tells of the rows of a row group, where it can be believed.

        Maintenance tells it; the commit lets no writer do so. A time that a commit chose makes it untrue.
        """
        found = self.groups[group].known
        if found is None or self.part.time is not None or not is_of_maintenance(self.part.key or ""):
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
                masks.append(firsts_of(b"" if chunk is None else found[chunk.start], rows))
            except (ValueError, IndexError, KeyError) as error:
                raise Corruption(f"{named(self.part)} cannot be decoded: {error}", part=str(self.part.id)) from error
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
        group = self._footer.metadata.row_group(number)
        columns = (group.column(position) for position in range(group.num_columns))
        return {column.path_in_schema: column.statistics for column in columns if column.statistics is not None}

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
        return self._source(groups, self._names(columns))

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
            source = self._source(groups, names)
        for batch in decode_batches(self.part, self._footer, groups, names, source, rows):
            seen += batch.num_rows
            yield pa.Table.from_batches([batch])
        if seen != total:
            raise Corruption(f"{named(self.part)} lacks rows", part=str(self.part.id))

    def _names(self, columns: Sequence[str]) -> list[str]:
        wanted = set(columns)
        return [name for name in self._footer.leaves if name in wanted]

    def _source(self, groups: Sequence[int], names: Sequence[str]) -> Any:
        if self._whole is not None:
            return pa.BufferReader(self._whole)
        positions = [position for name in names for position in self._footer.leaves[name]]
        chunks = sorted(
            (self.groups[group].chunks[position] for group in groups for position in positions),
            key=lambda chunk: chunk.start,
        )
        return pa.PythonFile(_Sparse(list(self._verified(chunks)), self.part.size), mode="r")

    def _verified(self, chunks: Sequence[Chunk]) -> Iterator[tuple[int, bytes]]:
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
                        f"bytes {chunk.start} to {chunk.start + chunk.size} of {named(self.part)} do not match "
                        "their checksum",
                        part=str(self.part.id),
                    )
            yield start, data


def _later(rows: pa.Table, time: int) -> int:
    return int(pc.sum(pc.greater_equal(rows.column(TIME), time)).as_py() or 0)


def _spans(chunks: Sequence[Chunk]) -> Iterator[list[Chunk]]:
    """Neighbouring chunks together, so that each span costs one read."""
    span: list[Chunk] = []
    for chunk in chunks:
        if span and chunk.start - (span[-1].start + span[-1].size) > GAP_BYTES_MAX:
            yield span
            span = []
        span.append(chunk)
    if span:
        yield span


class _Sparse(io.RawIOBase):
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

    def read(self, size: int = -1) -> bytes:
        for start, data in self._segments:
            if start <= self._position and self._position + size <= start + len(data):
                piece = data[self._position - start : self._position - start + size]
                self._position += len(piece)
                return piece
        raise OSError(f"bytes {self._position} to {self._position + size} were not fetched")
