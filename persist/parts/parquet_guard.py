"""Bounds of untrusted Parquet files, computed from footers and page headers before anything is decoded."""

from __future__ import annotations

import io
import struct
from base64 import b64decode
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from persist.parts.ipc_guard import check_schema
from persist.parts.memory_size import fixed_bytes

# Numbers in the heads and bodies of Parquet's pages: Thrift's compact protocol, and packed ones.
#
# The format is https://github.com/apache/parquet-format: `parquet.thrift` in Thrift's compact protocol, `Encodings.md`.
# What Arrow might read in another way than we do is refused.


EXACT_VALUES = 256 * 1024  # of a page, of which lengths or places are worked out one by one
BLOCK_VALUES = 64 * 1024  # of a block of packed numbers
WIDTH_MAX = 32  # bits of a packed number
# Types of Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 12
Numbers = npt.NDArray[np.int64]


def _bits(data: memoryview, bits: Numbers, width: int | Numbers) -> Numbers:
    """The numbers of `width` bits, up to 32, which begin at some bits of the data."""
    padded = np.frombuffer(bytes(data) + bytes(8), np.uint8)
    words = np.ndarray((len(padded) - 7,), "<u8", padded, strides=(1,))
    found = words[bits >> 3].astype(np.int64) >> (bits & 7)  # the sign fills up bits beyond those that are wanted
    return np.asarray(found & ((np.int64(1) << width) - 1), np.int64)


class Reader:
    """Reads numbers from a place on. Raises IndexError or ValueError at the end of the data."""

    DEPTH_MAX = 8  # of structs in structs

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self.at = at

    def varint(self) -> int:
        found = 0
        for shift in range(0, 70, 7):
            byte = self._data[self.at]
            self.at += 1
            found |= (byte & 0x7F) << shift
            if byte < 0x80:
                return int(found)
        raise ValueError("a number has more than ten bytes")

    @property
    def left(self) -> int:
        """How many bytes are left."""
        return len(self._data) - self.at

    def byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def bytes(self, count: int) -> memoryview:
        start = self.at
        self._skip(count)
        return self._data[start : start + count]

    def signed(self, bits: int) -> int:
        found = self.varint()
        if found >> bits:
            raise ValueError(f"a number has more than {bits} bits")
        return (found >> 1) ^ -(found & 1)

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """The numbers, flags and structs of a struct of Thrift by the numbers of its fields; None for all else.

        Of a field that comes twice Arrow might take the other one.
        """
        if depth > self.DEPTH_MAX:
            raise ValueError("the head of a page is nested too deep")
        found: dict[int, Any] = {}
        name = 0
        while head := self._data[self.at]:
            self.at += 1
            name = name + (head >> 4) if head >> 4 else self.signed(16)
            if name <= 0 or name >> 15 or name in found:
                raise ValueError(f"the head of a page has a field {name} that is out of place")
            found[name] = self._value(head & 15, depth)
        self.at += 1
        return found

    def _value(self, kind: int, depth: int) -> Any:
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind == _I32:
            return self.signed(32)
        if kind in (_I16, _I64):
            self.signed(64)
        elif kind in (_BYTE, _DOUBLE, _BINARY):
            self._skip(self.varint() if kind == _BINARY else 1 if kind == _BYTE else 8)
        else:
            raise ValueError(f"the head of a page has a field of type {kind}, which the format does not have there")
        return None

    def _skip(self, count: int) -> None:
        if count > self.left:
            raise ValueError("there are fewer bytes than are told")
        self.at += count

    def packed_head(self, most: int) -> tuple[int, int, int, int]:
        """That of numbers in the encoding DELTA_BINARY_PACKED: values of a block, its parts, all values, the first."""
        block, parts, total = self.varint(), self.varint(), self.varint()
        if not 0 < block <= BLOCK_VALUES or block % 128 or not parts or block % (32 * parts):
            raise ValueError(f"numbers are packed in blocks of {block} with {parts} parts")
        if total > min(most, EXACT_VALUES):
            raise ValueError(f"{total} numbers are packed where there may be {min(most, EXACT_VALUES)}")
        return block, parts, total, self.signed(32)

    def packed(self, most: int) -> Numbers:
        """Numbers in the encoding DELTA_BINARY_PACKED, of which there may be `most`; Arrow takes 32 bits of each."""
        block, parts, total, first = self.packed_head(most)
        each, left, origin = block // parts, total - 1, self.at
        least: list[int] = []
        begins: list[int] = []
        widths = bytearray()
        while left > 0:
            least.append(self.signed(32))
            used = bytes(self._data[self.at : self.at + -(-min(left, block) // each)])  # the last parts may be missing
            self._skip(parts)
            begins.append(8 * (self.at - origin))
            widths += used
            self._skip(sum(used) * each // 8)
            left -= block
        wide = np.frombuffer(widths, np.uint8).astype(np.int64)
        if int(wide.max(initial=0)) > WIDTH_MAX:
            raise ValueError("numbers are packed in more than 32 bits")
        blocks, before = np.arange(len(wide)) // parts, (np.cumsum(wide) - wide) * each
        starts = np.array(begins, np.int64)[blocks] + before - before[blocks * parts]
        places = starts[:, None] + np.arange(each) * wide[:, None]
        deltas = _bits(self._data[origin : self.at], places, wide[:, None]) + np.array(least, np.int64)[blocks, None]
        found = first + np.concatenate([[0], np.cumsum(deltas.reshape(-1)[: max(0, total - 1)])])
        return found[:total].astype(np.int32).astype(np.int64)

    def runs(self, most: int, width: int) -> Numbers:
        """Up to `most` numbers of `width` bits in the hybrid of runs and packed bits."""
        if width > WIDTH_MAX:
            raise ValueError("numbers are packed in more than 32 bits")
        starts: list[int] = []
        steps: list[int] = []
        counts: list[int] = []
        left = most
        while left > 0 and self.at < len(self._data):
            head = self.varint()
            is_packed, count = head & 1, (head >> 1) * (8 if head & 1 else 1)
            if not count:
                raise ValueError("a run has no values")
            starts.append(8 * self.at)
            steps.append(width if is_packed else 0)
            counts.append(min(left, count))
            bits = min(left + 7, count) * width if is_packed else width  # the last packed bits may be missing
            self._skip(min((bits + 7) // 8, len(self._data) - self.at))
            left -= count
        each = np.array(counts, np.int64)
        inside = np.arange(int(each.sum())) - np.repeat(np.cumsum(each) - each, each)
        places = np.repeat(np.array(starts, np.int64), each) + inside * np.repeat(np.array(steps, np.int64), each)
        return _bits(self._data[: self.at], places, width)


# Whether the lists of a fixed size in a Parquet column have that size.
#
# Arrow makes them of the levels of the leaves, and where these tell of a null list that has values it ends the process.


SCHEMAS_MAX = 256  # of which it is remembered which lists they have
Levels = npt.NDArray[np.uint8]


class Fixed(NamedTuple):
    """A list of a fixed size around a leaf: its repetition level, and the definition level from which it has values."""

    repetition: int
    defined: int
    size: int


def leaves(schema: pa.Schema) -> list[range]:
    """Positions of the column chunks of every top-level column."""
    ends = list(accumulate((_leaf_count(field.type) for field in schema), initial=0))
    return [range(start, end) for start, end in pairwise(ends)]


def _leaf_count(kind: Any) -> int:
    if pa.types.is_map(kind):
        return _leaf_count(kind.key_type) + _leaf_count(kind.item_type)
    if pa.types.is_nested(kind):
        return sum(_leaf_count(kind.field(index).type) for index in range(kind.num_fields))
    return 1


@lru_cache(SCHEMAS_MAX)
def fixed_lists(schema: pa.Schema) -> list[tuple[Fixed, ...]]:
    """Those around each leaf of the columns, in the order of the leaves."""
    return [found for field in schema for found in _leaves(field, 0, 0, ())]


def _leaves(field: pa.Field, defined: int, repetition: int, around: tuple[Fixed, ...]) -> Iterator[tuple[Fixed, ...]]:
    kind, types = field.type, pa.types
    defined += field.nullable
    if not types.is_nested(kind):
        yield around
        return
    if types.is_struct(kind):
        for child in kind:
            yield from _leaves(child, defined, repetition, around)
        return
    defined, repetition = defined + 1, repetition + 1
    if types.is_fixed_size_list(kind):
        around = (*around, Fixed(repetition, defined, kind.list_size))
    children = (kind.key_field, kind.item_field) if types.is_map(kind) else (kind.value_field,)
    for child in children:
        yield from _leaves(child, defined, repetition, around)


def check_sizes(repetitions: Levels, definitions: Levels, lists: Sequence[Fixed]) -> None:
    """Raise ValueError unless each list has its size, or no value where it is null, by all levels of a leaf."""
    if len(repetitions) != len(definitions) or (len(repetitions) and repetitions[0]):
        raise ValueError("a column begins within a list")
    for one in lists:
        chosen = repetitions <= one.repetition
        starts = np.flatnonzero(repetitions[chosen] < one.repetition)
        counts = np.diff(np.append(starts, np.count_nonzero(chosen)))
        first = definitions[chosen][starts]
        if not (counts == np.where(first >= one.defined, one.size, 1)).all() or (first == one.defined - 1).any():
            raise ValueError(f"a list has not the size {one.size}")
        if (definitions[repetitions == one.repetition] < one.defined).any():
            raise ValueError("a list goes on with what is no value of it")


def unpacked(data: memoryview, count: int, width: int) -> Levels:
    """`count` levels of `width` bits in the hybrid of runs and packed bits. Raises ValueError: there are fewer."""
    if not width:
        return np.zeros(count, np.uint8)
    reader, left, found = Reader(data, 0), count, []
    while left > 0:
        head = reader.varint()
        if head & 1:
            taken = reader.bytes(min((head >> 1) * width, reader.left))
            bits = np.unpackbits(np.frombuffer(taken, np.uint8), bitorder="little")
            whole = bits[: len(bits) // width * width].reshape(-1, width)[:left]
            run = (whole @ (1 << np.arange(width, dtype=np.uint8))).astype(np.uint8)
        else:
            run = np.full(min(head >> 1, left), reader.byte(), np.uint8)
        if not len(run):
            raise ValueError("there are fewer levels than values")
        found.append(run)
        left -= len(run)
    return joined(found)


def joined(levels: Sequence[Levels]) -> Levels:
    """Those of several pages, or runs, one after the other."""
    return np.concatenate([np.zeros(0, np.uint8), *levels])


# The most that a column chunk of Parquet may take once it is decoded, worked out before anything is.
#
# A few bytes can stand for many: a page by compression, values by a dictionary or by prefixes that they share, nulls
# and short lists by their levels. The heads of the pages tell how many values there are and how long the pages become.
# More is looked at only where an encoding of texts hides how many bytes they have, and a page is unpacked only after
# all pages together say that they stay within the bound. What Arrow might read in another way than we do is refused.
#
# The format is https://github.com/apache/parquet-format: `parquet.thrift` in Thrift's compact protocol, `Encodings.md`.


PAGE_BYTES = 4096  # that a page counts for beside what it holds, so that there are not millions of them
# A file of many pages, or of large ones that hold little, takes time. So what a chunk counts for is at least:
PAGE_KEPT_BYTES, UNPACKED_SHARE = 512, 8  # of each page, and a part of what it becomes
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


def decoded_bytes_max(
    data: bytes | memoryview, chunk: Any, column: Any, rows: int, most: Decoded, *, is_exact: bool = False
) -> Decoded:
    """The most bytes that a column chunk takes: one beyond that of `most` once it is known to be beyond it.

    `data` are its bytes from its first page on, `chunk` is its `ColumnChunkMetaData`, of which `num_values` and
    `compression` are asked, and `column` its `ParquetColumnSchema`. What is unpacked meanwhile takes at most that at
    once. `is_exact`: texts that are named by their places are counted one by one, also where a rough bound is within
    `most`. Raises ValueError where the pages cannot be read, or are not as writers make them.
    """
    try:
        return _bounded(memoryview(data).cast("B"), chunk, column, rows, most, is_exact)
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


def _bounded(data: memoryview, chunk: Any, column: Any, rows: int, most: Decoded, is_exact: bool) -> Decoded:
    """As `decoded_bytes_max`."""
    kind: str = column.physical_type  # by which Arrow decodes, whatever the chunk says
    count: int = chunk.num_values
    stored, kept_bits, passing_each = _value_sizes(kind, column)
    if count < 0 or stored < 0:
        raise ValueError(f"column {column.path} has {count} values of {stored} bytes")
    lists = column.max_repetition_level  # the outermost ones begin as often as rows do
    kept = kept_bits * count // 8 + 1 + (_OFFSET_BYTES * (rows + count * (lists - 1)) if lists else 0)
    passing, largest, least, values = passing_each * count, 0, 0, 0  # there is room for all that the footer says
    dictionary: _Page | None = None
    named: list[_Page] = []
    shared: list[_Page] = []
    for page in _pages(data):
        passing, largest = passing + PAGE_BYTES, max(largest, 2 * page.taken)
        least += PAGE_KEPT_BYTES + page.taken // UNPACKED_SHARE
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
        if max(kept, least) > most.kept or passing + largest > most.passing:
            return Decoded(max(kept, least), passing + largest)
    if named and dictionary is None:
        raise ValueError("there is no dictionary")
    for page in shared:
        prefixes = _of_prefixes(page, chunk.compression, column)
        kept, passing = kept + prefixes, passing + prefixes
        if kept > most.kept or passing + largest > most.passing:
            return Decoded(kept, passing + largest)
    if named and dictionary is not None and kind == "BYTE_ARRAY":
        kept += _of_dictionary(dictionary, named, chunk.compression, column, 0 if is_exact else most.kept - kept)
    kept = max(kept, least)
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
    largest = max(dictionary.values, *(page.values for page in pages))
    if found <= needed or largest > EXACT_VALUES or compression not in ("UNCOMPRESSED", *_CODECS):
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


# Whether the footer of a Parquet file is one that Arrow bears to be asked about.
#
# What Arrow thinks of a column of a footer is only partly an error of Python: some footers end the process, and from a
# statistic that is too short it reads beyond the end. So what is asked of a footer that somebody else may have made is
# compared with its schema before. The format is `parquet.thrift` in Thrift's compact protocol.


ITEMS_MAX = 500_000  # fields and items of lists of a footer, besides its row groups: more than 2,000 columns take
ITEMS_LEAST, ITEMS_OF_CHUNK = 1_000, 200  # of a row group, and more for each of its column chunks
CHUNKS_MAX = 128 * 1024  # column chunks of a file
FOOTER_BYTES_MAX = 2 * 1024 * 1024  # of a file without our index: it is read by Python, a microsecond a byte
_ROW_GROUPS, _COLUMNS, _META = 4, 1, 3
_ENCRYPTED = (8, 9)  # fields of a column chunk
_COLUMN_TYPE, _STATISTICS, _SIZES = 1, 12, 16
_BOUNDS = (1, 2, 5, 6)  # fields of statistics that hold a value
_REPETITIONS, _DEFINITIONS = 2, 3  # fields of the statistics of sizes
_TYPES = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
_TYPE_LENGTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_NOT_HERE = "these bytes are not read"
_MAGIC, _TAIL_BYTES = b"PAR1", 8  # at the end of a file, after the length of the footer
_CHUNK_BYTES = 1024  # of what Arrow keeps of a column chunk
_UNREADABLE_FOOTER = (IndexError, OverflowError, KeyError, TypeError, AttributeError, struct.error)


def check_footer(footer: bytes | memoryview, chunks: Sequence[int] | None, schema: Any = None) -> int:
    """Raise ValueError where Arrow must not be asked about the footer, or about a column. Returns its column chunks.

    `chunks` are the column chunks of each row group, as the index of a part has them: another count of either is
    refused, since three bytes of a footer may become a kilobyte in memory. None: the file has no index, and at most
    CHUNKS_MAX. Without `schema`, the file's `ParquetSchema`, only that is checked: before Arrow reads the footer.
    Memory: what one row group tells.
    """
    try:
        count = total = 0
        for count, group in enumerate(_Footer(memoryview(footer), 0).groups(chunks), 1):
            columns = group[_COLUMNS]
            total += len(columns)
            told = len(columns) if chunks is None else chunks[count - 1]
            if len(columns) != (told if schema is None else len(schema.names)) or total > CHUNKS_MAX:
                raise ValueError("a row group of the footer has other columns than the file")
            for position, chunk in enumerate(columns if schema is not None else ()):
                _check_column(chunk, schema.column(position))
        if chunks is not None and count != len(chunks):
            raise ValueError("the footer has fewer row groups than the index")
        return total
    except _UNREADABLE_FOOTER as error:
        raise ValueError(f"the footer cannot be read: {error}") from error


def check_metadata(footer: bytes | memoryview, chunks: Sequence[int] | None, metadata: Any) -> None:
    """Raise an error where Arrow must not be asked about a column of the footer, or about the schema that it names."""
    check_footer(footer, chunks, metadata.schema)
    if (arrow := (metadata.metadata or {}).get(b"ARROW:schema")) is not None:
        check_schema(b64decode(arrow))


class _Nothing(io.RawIOBase):
    """A file of `size` bytes of which none is here."""

    def __init__(self, size: int) -> None:
        self._size = size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return offset + (self._size if whence == io.SEEK_END else 0)

    def tell(self) -> int:
        return self._size

    def read(self, size: int = -1) -> bytes:
        raise OSError(_NOT_HERE)


class FooterProbe:
    """What a footer says of the column chunks of a file of `size` bytes, of which none is here."""

    def __init__(self, metadata: Any, size: int) -> None:
        self._reader = pq.ParquetFile(_Nothing(size), metadata=metadata, pre_buffer=False).reader

    def check(self, group: int, position: int) -> None:
        """Raise an error of Arrow where it refuses what the footer says of a column chunk.

        Nothing is read, but only a read reports it: asked for the metadata of such a column pyarrow ends the process.
        """
        try:
            self._reader.read_row_groups([group], column_indices=[position], use_threads=False)
        except OSError as error:
            if _NOT_HERE not in str(error):
                raise


def chunk_start(chunk: Any) -> int:
    """Where the first page of a column chunk is, by its `ColumnChunkMetaData`. An offset of 0 is none."""
    offsets = [chunk.data_page_offset, chunk.dictionary_page_offset if chunk.has_dictionary_page else None]
    return int(min((offset for offset in offsets if offset), default=0))


def read_unknown_footer(data: bytes, spend: Callable[[int], object]) -> Any:
    """The `FileMetaData` of a file that anybody may have made and that has no index of ours.

    `spend` counts what Arrow takes for it, before Arrow does. Raises ValueError, ArrowException, OSError.
    """
    end = len(data) - _TAIL_BYTES
    start = end - int.from_bytes(data[end : end + 4], "little") if end > 0 else -1
    if start < 0 or data[end + 4 :] != _MAGIC:
        raise ValueError("it is no Parquet file, or was cut: there is no footer at its end")
    if end - start > FOOTER_BYTES_MAX:
        raise ValueError(f"its footer takes more than {FOOTER_BYTES_MAX} bytes; write larger row groups")
    footer = memoryview(data)[start:end]
    spend(check_footer(footer, None) * _CHUNK_BYTES)
    metadata = pq.read_metadata(pa.BufferReader(data))
    check_metadata(footer, None, metadata)
    return metadata


def row_group_bytes_max(
    data: bytes, metadata: Any, described: FooterProbe, group: int, schema: Any, most: Decoded
) -> Decoded:
    """The most bytes that a row group of a whole file takes: beyond `most` once it is known to be beyond it.

    `schema` is that of Arrow. Raises ValueError, ArrowException.
    """
    body = memoryview(data)[: len(data) - metadata.serialized_size - _TAIL_BYTES]
    rows, kept, passing, lists = metadata.row_group(group).num_rows, 0, 0, fixed_lists(schema)
    for field, positions in zip(schema, leaves(schema), strict=True):
        taken = 0
        for position in positions:
            described.check(group, position)
            chunk, column = metadata.row_group(group).column(position), metadata.schema.column(position)
            start, size = chunk_start(chunk), chunk.total_compressed_size
            if not 0 <= start <= start + size <= len(body):
                raise ValueError(f"column {column.path} is not within the file")
            pages = body[start : start + size]
            left = Decoded(most.kept - kept - taken, most.passing)
            decoded = decoded_bytes_max(pages, chunk, column, rows, left, is_exact=True)
            taken, passing = taken + decoded.kept, max(passing, decoded.passing)
            if kept + taken > most.kept or passing > most.passing:
                return Decoded(kept + taken, passing)
            if lists[position]:
                check_sizes(*levels_of(pages, chunk, column), lists[position])
        kept += max(
            taken, rows * fixed_bytes(field.type)
        )  # a list of a fixed size takes its room also where it is null
    return Decoded(kept, passing)


def _check_column(chunk: dict[int, Any], column: Any) -> None:
    meta = chunk[_META]
    if any(field in chunk for field in _ENCRYPTED) or _TYPES[meta[_COLUMN_TYPE]] != column.physical_type:
        raise ValueError(f"the footer tells of another column than {column.path}")
    kind = column.physical_type
    length = column.length if kind == "FIXED_LEN_BYTE_ARRAY" else _TYPE_LENGTHS.get(kind)
    statistics = meta.get(_STATISTICS, {})
    if length is not None and any(len(statistics[field]) != length for field in _BOUNDS if field in statistics):
        raise ValueError(f"the footer has a bound of column {column.path} that is no {kind}")
    sizes = meta.get(_SIZES, {})
    for field, level in ((_REPETITIONS, column.max_repetition_level), (_DEFINITIONS, column.max_definition_level)):
        if len(sizes.get(field, ())) not in (0, level + 1):
            raise ValueError(f"the footer counts other levels than column {column.path} has")


class _Footer(Reader):
    """Reads lists, numbers of 64 bits and bytes, too."""

    DEPTH_MAX = 16
    _LISTS = (9, 10)
    _BYTES, _WIDE = 8, (4, 6)
    _left_items = ITEMS_MAX  # that may be read until more are granted

    def groups(self, chunks: Sequence[int] | None) -> Iterator[dict[int, Any]]:
        """What is told of each row group, one after the other; all else is passed over."""
        seen: set[int] = set()
        name = 0
        while head := self._data[self.at]:
            self.at += 1
            name = name + (head >> 4) if head >> 4 else self.signed(16)
            if name in seen:
                raise ValueError("the footer has a field twice")
            seen.add(name)
            self._left_items = ITEMS_MAX
            if name != _ROW_GROUPS:
                self._value(head & 15, 0)
                continue
            kind, count = self._list()
            if count > (CHUNKS_MAX if chunks is None else len(chunks)):
                raise ValueError("the footer has more row groups than the index")
            for number in range(count):
                self._left_items = ITEMS_MAX if chunks is None else ITEMS_LEAST + ITEMS_OF_CHUNK * chunks[number]
                yield self._item(kind, 1)

    def struct(self, depth: int = 0) -> dict[int, Any]:
        found = super().struct(depth)
        self._spend(1 + len(found))
        return found

    def _spend(self, items: int) -> None:
        self._left_items -= items
        if self._left_items < 0:
            raise ValueError("the footer tells more than there is to be told")

    def _list(self) -> tuple[int, int]:
        """The type of a list's items, and how many there are."""
        head = self.byte()
        count = head >> 4 if head >> 4 < 15 else self.varint()
        if count > self.left:
            raise ValueError("a list has more items than bytes")
        self._spend(count)
        return head & 15, count

    def _value(self, kind: int, depth: int) -> Any:
        if depth > self.DEPTH_MAX:
            raise ValueError("the footer is nested too deep")
        if kind in self._LISTS:
            inner, count = self._list()
            return [self._item(inner, depth + 1) for _ in range(count)]
        if kind == self._BYTES:
            return self.bytes(self.varint())
        return self.signed(64) if kind in self._WIDE else super()._value(kind, depth)

    def _item(self, kind: int, depth: int) -> Any:
        """One of a list, where a flag takes a byte of its own."""
        return self.byte() if kind in (1, 2) else self._value(kind, depth)
