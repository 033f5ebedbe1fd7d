"""The most that a column chunk of Parquet may take once it is decoded, worked out before anything is.

A few bytes can stand for many: a page by compression, values by a dictionary or by prefixes that they share, nulls and
short lists by their levels. The heads of the pages tell how many values there are and how long the pages become. More
is looked at only where an encoding of texts hides how many bytes they have, and a page is unpacked only after all pages
together say that they stay within the bound. What Arrow might read in another way than we do is refused.

The format is https://github.com/apache/parquet-format: `parquet.thrift` in Thrift's compact protocol, `Encodings.md`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from persist.parts.levels import Levels, joined, unpacked
from persist.parts.page_numbers import EXACT_VALUES, Numbers, Reader

PAGE_BYTES = 4096  # that a page counts for beside what it holds, so that there are not millions of them
_OFFSET_BYTES, _LEVEL_BYTES, _DECIMAL_BYTES = 8, 2, 32
_UNPACKED_LENGTHS_BYTES = 8  # of a text whose length is packed, and that of what it shares
_NAMED_BYTES = {"BYTE_ARRAY": 20, "FIXED_LEN_BYTE_ARRAY": 8}  # beside a copy of a value in a dictionary: its place
# Bytes of a value in a page, the bits that Arrow holds of it, and the bytes of its copy while it is decoded.
_WIDTHS = {
    "BOOLEAN": (0, 1, 1), "INT32": (4, 64, 4), "INT64": (8, 64, 8), "INT96": (12, 64, 12), "FLOAT": (4, 32, 4),
    "DOUBLE": (8, 64, 8),
}  # fmt: skip
_NARROW = {"INT_8": 8, "UINT_8": 8, "INT_16": 16, "UINT_16": 16, "INT_32": 32, "UINT_32": 32}
_LENGTH = struct.Struct("<I")  # before a text in a dictionary, and before levels in a page
_LENGTH_BYTES = _LENGTH.size
_CODECS = {"ZSTD": "zstd", "SNAPPY": "snappy", "GZIP": "gzip", "BROTLI": "brotli", "LZ4": "lz4_raw"}
# The numbers of parquet.thrift: kinds of pages, encodings, fields of heads.
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3
_PLAIN, _PLAIN_DICTIONARY, _RLE, _LENGTHS, _PREFIXES, _RLE_DICTIONARY = 0, 2, 3, 6, 7, 8
_OF_TEXTS = (_PLAIN, _PLAIN_DICTIONARY, _LENGTHS, _PREFIXES, _RLE_DICTIONARY)
_TYPE, _UNPACKED, _PACKED = 1, 2, 3
_HEADS = {_DATA: 5, _DICTIONARY: 7, _DATA_2: 8}
_COUNT, _ENCODING, _ENCODING_2 = 1, 2, 4
_DEFINITION_ENCODING, _REPETITION_ENCODING = 3, 4
_DEFINITION_BYTES, _REPETITION_BYTES, _IS_PACKED = 5, 6, 7
_UNREADABLE = (IndexError, OverflowError, OSError, struct.error, pa.ArrowException)


class Decoded(NamedTuple):
    """The most bytes that values take, and those that are there only while they are decoded."""

    kept: int
    passing: int


def decoded_bytes_max(data: bytes | memoryview, chunk: Any, column: Any, rows: int, most: Decoded) -> Decoded:
    """The most bytes that a column chunk takes: one beyond that of `most` once it is known to be beyond it.

    `data` are its bytes from its first page on, `chunk` is its `ColumnChunkMetaData`, of which `num_values` and
    `compression` are asked, and `column` its `ParquetColumnSchema`. What is unpacked meanwhile takes at most that at
    once. Raises ValueError where the pages cannot be read, or are not as writers make them.
    """
    try:
        return _bounded(memoryview(data).cast("B"), chunk, column, rows, most)
    except _UNREADABLE as error:
        raise ValueError(f"the pages of column {column.path} cannot be read: {error}") from error


class _Page(NamedTuple):
    """A page: how many values it has and their encoding, its bytes as they are and how many they become."""

    kind: int
    head: dict[int, Any]
    encoding: int
    values: int
    packed: memoryview
    size: int

    @property
    def taken(self) -> int:
        """Arrow takes the bytes as they are where nothing is packed, whatever the head says."""
        return max(self.size, len(self.packed))


def _bounded(data: memoryview, chunk: Any, column: Any, rows: int, most: Decoded) -> Decoded:
    """As `decoded_bytes_max`."""
    kind: str = column.physical_type  # by which Arrow decodes, whatever the chunk says
    count: int = chunk.num_values
    stored, kept_bits, passing_each = _value_sizes(kind, column)
    if count < 0 or stored < 0:
        raise ValueError(f"column {column.path} has {count} values of {stored} bytes")
    lists = column.max_repetition_level  # the outermost ones begin as often as rows do
    kept = kept_bits * count // 8 + 1 + (_OFFSET_BYTES * (rows + count * (lists - 1)) if lists else 0)
    passing, largest, values = passing_each * count, 0, 0  # there is room for all that the footer says
    dictionary: _Page | None = None
    named: list[_Page] = []
    shared: list[_Page] = []
    for page in _pages(data):
        passing, largest = passing + PAGE_BYTES, max(largest, 2 * page.taken)
        if page.kind == _DICTIONARY:
            if dictionary is not None or values or page.values * stored > page.taken:
                raise ValueError("a dictionary is not where it belongs, or has fewer values than it says")
            dictionary, passing = page, passing + page.taken + page.values * _NAMED_BYTES.get(kind, 0)
        else:
            values += page.values
            if values > count:
                raise ValueError(f"the pages have more values than {count}")
            if page.encoding in (_PLAIN_DICTIONARY, _RLE_DICTIONARY):
                named.append(page)
            elif kind == "BYTE_ARRAY":
                kept += page.taken  # the texts are copied out of the page
            if page.encoding in (_LENGTHS, _PREFIXES):
                passing += page.values * _UNPACKED_LENGTHS_BYTES
                shared.append(page)
            elif kind == "BYTE_ARRAY" and page.encoding not in _OF_TEXTS:
                raise ValueError(f"texts have the encoding {page.encoding}")
        if kept > most.kept or passing + largest > most.passing:
            return Decoded(kept, passing + largest)
    if named and dictionary is None:
        raise ValueError("there is no dictionary")
    for page in shared:
        prefixes = _of_prefixes(page, chunk.compression, column)
        kept, passing = kept + prefixes, passing + prefixes
        if kept > most.kept or passing + largest > most.passing:
            return Decoded(kept, passing + largest)
    if named and dictionary is not None and kind == "BYTE_ARRAY":
        kept += _of_dictionary(dictionary, named, chunk.compression, column, most.kept - kept)
    return Decoded(kept, passing + largest + (kept // 2 if kind == "BYTE_ARRAY" else 0))  # buffers of texts grow


def _value_sizes(kind: str, column: Any) -> tuple[int, int, int]:
    """The bytes of a value in a page, at least; the bits of one in Arrow, but for a text its own and where lists begin;
    and the bytes of one while it is decoded: as it is stored, in a copy, with its levels.
    """
    depth, lists = column.max_definition_level, column.max_repetition_level
    if kind == "BYTE_ARRAY":
        stored, width, copied = _LENGTH_BYTES, 8 * _OFFSET_BYTES, 0
    elif kind == "FIXED_LEN_BYTE_ARRAY":
        stored, width, copied = column.length, 8 * column.length, column.length
    elif kind in _WIDTHS:
        stored, width, copied = _WIDTHS[kind]
    else:
        raise ValueError(f"values are of the type {kind}")
    if "DECIMAL" in (column.logical_type.type, column.converted_type):
        width = max(width, 8 * _DECIMAL_BYTES)
    width = _NARROW.get(column.converted_type, width)
    levels = _LEVEL_BYTES * ((depth > 0) + (lists > 0))
    return stored, width + 1 + depth, copied + levels


def _pages(data: memoryview) -> Iterator[_Page]:
    """The pages of a chunk, one after the other."""
    at = 0
    while at < len(data):
        reader = Reader(data, at)
        fields = reader.struct()
        at = reader.at
        kind, size, packed = (_number(fields, name) for name in (_TYPE, _UNPACKED, _PACKED))
        head = fields.get(_HEADS.get(kind, 0))
        if not isinstance(head, dict):
            raise ValueError(f"a page is of kind {kind}, or has no head of its kind")
        if packed > len(data) - at:
            raise ValueError("a page ends beyond its column")
        encoding = _number(head, _ENCODING_2 if kind == _DATA_2 else _ENCODING)
        yield _Page(kind, head, encoding, _number(head, _COUNT), data[at : at + packed], size)
        at += packed


def _number(fields: dict[int, Any], name: int) -> int:
    found = fields.get(name)
    if type(found) is not int or found < 0:
        raise ValueError(f"the head of a page has {found} as field {name}")
    return found


def _unpacked(packed: memoryview, size: int, compression: str) -> memoryview:
    """The bytes of a page. Raises an error where they are others than its head says."""
    if compression == "UNCOMPRESSED" or not size:
        return packed
    if compression not in _CODECS:
        raise ValueError(f"a page is packed by {compression}")
    found = pa.Codec(_CODECS[compression]).decompress(pa.py_buffer(packed), size)
    return memoryview(found).cast("B")  # Arrow's own bytes have signs


def levels_of(data: bytes | memoryview, chunk: Any, column: Any) -> tuple[Levels, Levels]:
    """The repetition and the definition levels of a column chunk that is within its bounds. Raises ValueError."""
    found: tuple[list[Levels], list[Levels]] = ([], [])
    depths = column.max_repetition_level, column.max_definition_level
    try:
        for page in _pages(memoryview(data).cast("B")):
            if page.kind != _DICTIONARY:
                packed = _levels_and_values(page, chunk.compression, column)
                for place, depth in enumerate(depths):
                    found[place].append(unpacked(packed[place], page.values, depth.bit_length()))
    except _UNREADABLE as error:
        raise ValueError(f"the levels of column {column.path} cannot be read: {error}") from error
    return joined(found[0]), joined(found[1])


def _levels_and_values(page: _Page, compression: str, column: Any) -> tuple[memoryview, memoryview, memoryview]:
    """The repetition and the definition levels of a data page, and its values."""
    if page.kind == _DATA_2:
        start, length = _number(page.head, _REPETITION_BYTES), _number(page.head, _DEFINITION_BYTES)
        is_packed, end = page.head.get(_IS_PACKED), start + length
        if type(is_packed) is not bool or end > min(page.size, len(page.packed)):
            raise ValueError("a page has more levels than bytes, or does not tell whether it is packed")
        packed = page.packed[end:]
        values = _unpacked(packed, page.size - end, compression) if is_packed else packed
        return page.packed[:start], page.packed[start:end], values
    data = _unpacked(page.packed, page.size, compression)
    found = []
    for level, encoding in (
        (column.max_repetition_level, _REPETITION_ENCODING),
        (column.max_definition_level, _DEFINITION_ENCODING),
    ):
        if level and page.head.get(encoding) != _RLE:
            raise ValueError("levels are not run-length encoded")
        end = _LENGTH_BYTES + int(_LENGTH.unpack_from(data)[0]) if level else 0
        found.append(data[_LENGTH_BYTES:end])
        data = data[end:]
    return found[0], found[1], data


def _of_prefixes(page: _Page, compression: str, column: Any) -> int:
    """The bytes of all prefixes that texts share with the ones before them, in the copies that are made of them.

    Arrow unpacks as many lengths as these say to be, not as the head of the page says: so both are compared.
    """
    reader = Reader(_levels_and_values(page, compression, column)[2], 0)
    if page.encoding == _LENGTHS:
        reader.packed_head(page.values)
        return 0
    prefixes = reader.packed(page.values)
    reader.packed_head(page.values)
    if len(prefixes) and int(prefixes.min()) < 0:
        raise ValueError("a text shares less than nothing")
    return 2 * int(prefixes.sum())


def _of_dictionary(dictionary: _Page, pages: Sequence[_Page], compression: str, column: Any, needed: int) -> int:
    """The bytes of all texts that are named by their places in a dictionary; or a bound, where it is within `needed`.

    First by the bytes of the whole dictionary, then by its longest text, then place by place.
    """
    count = sum(page.values for page in pages)
    found = count * dictionary.taken
    if found <= needed or max(count, dictionary.values) > EXACT_VALUES or compression not in ("UNCOMPRESSED", *_CODECS):
        return found
    lengths = _lengths(_unpacked(dictionary.packed, dictionary.size, compression), dictionary.values)
    found = count * int(lengths.max(initial=0))
    return found if found <= needed else sum(_of_places(page, lengths, compression, column) for page in pages)


def _lengths(data: memoryview, count: int) -> Numbers:
    """Those of the texts of a dictionary."""
    found, at = [], 0
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH_BYTES + length
        if at > len(data):
            raise ValueError("a dictionary ends in a text")
        found.append(length)
    return np.array(found, np.int64)


def _of_places(page: _Page, lengths: Numbers, compression: str, column: Any) -> int:
    """The bytes of the texts of a page that is known to have no more than `EXACT_VALUES`."""
    _, levels, values = _levels_and_values(page, compression, column)
    count, depth = page.values, column.max_definition_level
    if depth:
        count = int(np.count_nonzero(Reader(levels, 0).runs(count, depth.bit_length()) == depth))
    if not count:
        return 0
    places = Reader(values, 1).runs(count, values[0])
    return int(lengths[places].sum())
