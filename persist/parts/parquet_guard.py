"""Limits on untrusted Parquet files, computed from footers and page headers before anything is decoded.

A few bytes can expand to many: a page by compression, values by a dictionary or by shared prefixes, nulls and short
lists by their levels. Page headers record how many values there are and how large the pages become. Page contents are
examined only if an encoding of texts hides their size, and a page is decompressed only after all pages together are
known to stay within the limit.

Some invalid footers abort the process inside Arrow, and for a statistic that is too short Arrow reads out of bounds. So
an untrusted footer is compared with its schema before Arrow is asked about it. Whatever Arrow might interpret
differently from this module is refused.

The format is https://github.com/apache/parquet-format: `parquet.thrift` in Thrift's compact protocol, `Encodings.md`.
"""

from __future__ import annotations

import io
import struct
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from persist.parts.ipc_guard import check_schema
from persist.parts.memory_size import fixed_bytes

EXACT_VALUES = 256 * 1024  # of a page whose lengths or indexes are computed one by one
BLOCK_VALUES = 64 * 1024  # of a block of bit-packed numbers
WIDTH_MAX = 32  # bits of a bit-packed number
SCHEMAS_MAX = 256  # whose fixed-size lists are cached
PAGE_BYTES = 4096  # that a page counts for beside its contents, so that there are not millions of pages
# Many pages, or large pages with few values, take time. So a chunk counts for at least:
PAGE_KEPT_BYTES, UNPACKED_SHARE = 512, 8  # per page, and a fraction of its decompressed size
ITEMS_MAX = 500_000  # fields and list items of a footer, besides its row groups: more than 2,000 columns take
ITEMS_LEAST, ITEMS_OF_CHUNK = 1_000, 200  # of a row group, and in addition for each of its column chunks
CHUNKS_MAX = 128 * 1024  # column chunks of a file
FOOTER_BYTES_MAX = 2 * 1024 * 1024  # of a file without our index: Python reads it, a microsecond per byte

# Types of Thrift's compact protocol.
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LISTS, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, (9, 10), 12

_OFFSET_BYTES, _LEVEL_BYTES, _DECIMAL_BYTES = 8, 2, 32
_UNPACKED_LENGTHS_BYTES = 8  # of the packed length of a text, and that of its shared prefix
_NAMED_BYTES = {"BYTE_ARRAY": 20, "FIXED_LEN_BYTE_ARRAY": 8}  # of a dictionary value, besides its copy
# Bytes of a value in a page, its bits in Arrow, and the bytes of its copy while it is decoded.
_WIDTHS = {
    "BOOLEAN": (0, 1, 1), "INT32": (4, 64, 4), "INT64": (8, 64, 8), "INT96": (12, 64, 12), "FLOAT": (4, 32, 4),
    "DOUBLE": (8, 64, 8),
}  # fmt: skip
_NARROW = {"INT_8": 8, "UINT_8": 8, "INT_16": 16, "UINT_16": 16, "INT_32": 32, "UINT_32": 32}
_LENGTH = struct.Struct("<I")  # before a text in a dictionary, and before levels in a page
_LENGTH_BYTES = _LENGTH.size
_CODECS = {"ZSTD": "zstd", "SNAPPY": "snappy", "GZIP": "gzip", "BROTLI": "brotli", "LZ4": "lz4_raw"}
_UNREADABLE = (IndexError, OverflowError, OSError, struct.error, pa.ArrowException)

# Numbers in parquet.thrift: page types, encodings, fields of page headers.
_DATA, _DICTIONARY, _DATA_2 = 0, 2, 3
_PLAIN, _PLAIN_DICTIONARY, _RLE, _LENGTHS, _PREFIXES, _RLE_DICTIONARY = 0, 2, 3, 6, 7, 8
_OF_TEXTS = (_PLAIN, _PLAIN_DICTIONARY, _LENGTHS, _PREFIXES, _RLE_DICTIONARY)
_TYPE, _UNPACKED, _PACKED = 1, 2, 3
_HEADS = {_DATA: 5, _DICTIONARY: 7, _DATA_2: 8}
_COUNT, _ENCODING, _ENCODING_2 = 1, 2, 4
_DEFINITION_ENCODING, _REPETITION_ENCODING = 3, 4
_DEFINITION_BYTES, _REPETITION_BYTES, _IS_PACKED = 5, 6, 7

# Numbers in parquet.thrift: fields of the footer, physical types.
_ROW_GROUPS, _COLUMNS, _META = 4, 1, 3
_ENCRYPTED = (8, 9)  # of a column chunk
_COLUMN_TYPE, _COLUMN_CODEC, _STATISTICS, _SIZES = 1, 4, 12, 16
_CODEC_NUMBERS = range(8)
_BOUNDS = (1, 2, 5, 6)  # of statistics, that hold a value
_REPETITIONS, _DEFINITIONS = 2, 3  # of size statistics
_TYPES = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
_TYPE_LENGTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_NOT_FETCHED = "these bytes were not fetched"
_MAGIC, _TAIL_BYTES = b"PAR1", 8  # at the end of a file, after the length of the footer
_CHUNK_BYTES = 1024  # of Arrow's metadata of a column chunk
_UNREADABLE_FOOTER = (IndexError, OverflowError, KeyError, TypeError, AttributeError, struct.error)

Numbers = npt.NDArray[np.int64]
Levels = npt.NDArray[np.uint8]


class Decoded(NamedTuple):
    """The most bytes that values take, and those that are needed only while they are decoded."""

    kept: int
    passing: int

    def is_within(self, most: Decoded) -> bool:
        return self.kept <= most.kept and self.passing <= most.passing


class _Reader:
    """Reads numbers of a page. Raises IndexError or ValueError at the end of the data."""

    DEPTH_MAX = 8  # of structs in structs

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self._data = data
        self.at = at

    @property
    def left(self) -> int:
        """The number of bytes that are left."""
        return len(self._data) - self.at

    def byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def bytes(self, count: int) -> memoryview:
        if count > self.left:
            raise ValueError("the data is shorter than it declares")
        self.at += count
        return self._data[self.at - count : self.at]

    def varint(self) -> int:
        number = 0
        for shift in range(0, 70, 7):
            byte = self.byte()
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                return int(number)
        raise ValueError("a number has more than ten bytes")

    def signed(self, bits: int) -> int:
        number = self.varint()
        if number >> bits:
            raise ValueError(f"a number has more than {bits} bits")
        return (number >> 1) ^ -(number & 1)

    def fields(self) -> Iterator[tuple[int, int]]:
        """The numbers and types of a struct's fields; the caller reads each value.

        A repeated field is refused: Arrow might use the other value.
        """
        seen: set[int] = set()
        name = 0
        while head := self.byte():
            name = name + (head >> 4) if head >> 4 else self.signed(16)
            if name <= 0 or name >> 15 or name in seen:
                raise ValueError(f"a struct has a misplaced field {name}")
            seen.add(name)
            yield name, head & 15

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """The values of a Thrift struct by the numbers of its fields; see `_value`."""
        if depth > self.DEPTH_MAX:
            raise ValueError("a struct is nested too deep")
        return {name: self._value(kind, depth) for name, kind in self.fields()}

    def _value(self, kind: int, depth: int) -> Any:
        """A 32-bit number, flag or struct; None for other values of page headers."""
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_TRUE, _FALSE):
            return kind == _TRUE
        if kind == _I32:
            return self.signed(32)
        if kind in (_I16, _I64):
            self.signed(64)
        elif kind in (_BYTE, _DOUBLE, _BINARY):
            self.bytes(self.varint() if kind == _BINARY else 1 if kind == _BYTE else 8)
        else:
            raise ValueError(f"a struct has a field of the unexpected type {kind}")
        return None

    def packed_head(self, most: int) -> tuple[int, int, int, int]:
        """The head of DELTA_BINARY_PACKED numbers: values per block, parts per block, all values, the first value."""
        block, parts, total = self.varint(), self.varint(), self.varint()
        if not 0 < block <= BLOCK_VALUES or block % 128 or not parts or block % (32 * parts):
            raise ValueError(f"numbers are packed in blocks of {block} with {parts} parts")
        if total > min(most, EXACT_VALUES):
            raise ValueError(f"{total} numbers are packed; at most {min(most, EXACT_VALUES)} are allowed")
        return block, parts, total, self.signed(32)

    def packed(self, most: int) -> Numbers:
        """At most `most` numbers in the encoding DELTA_BINARY_PACKED, truncated to 32 bits like in Arrow."""
        block, parts, total, first = self.packed_head(most)
        each, left, origin = block // parts, total - 1, self.at
        least: list[int] = []
        begins: list[int] = []
        widths = bytearray()
        while left > 0:
            least.append(self.signed(32))
            used = bytes(self.bytes(parts)[: -(-min(left, block) // each)])  # the data of the last parts may be absent
            begins.append(8 * (self.at - origin))
            widths += used
            self.bytes(sum(used) * each // 8)
            left -= block
        wide = np.frombuffer(widths, np.uint8).astype(np.int64)
        if int(wide.max(initial=0)) > WIDTH_MAX:
            raise ValueError("numbers are packed in more than 32 bits")
        blocks, before = np.arange(len(wide)) // parts, (np.cumsum(wide) - wide) * each
        starts = np.array(begins, np.int64)[blocks] + before - before[blocks * parts]
        places = starts[:, None] + np.arange(each) * wide[:, None]
        deltas = _bits(self._data[origin : self.at], places, wide[:, None]) + np.array(least, np.int64)[blocks, None]
        numbers = first + np.concatenate([[0], np.cumsum(deltas.reshape(-1)[: max(0, total - 1)])])
        return numbers[:total].astype(np.int32).astype(np.int64)

    def runs(self, count: int, width: int) -> Iterator[tuple[int, memoryview, bool]]:
        """The runs of `count` numbers in the hybrid of run-length encoding and bit-packing.

        For each the count of its numbers, their bytes, and whether they are bit-packed; else one number is repeated.
        """
        left = count
        while left > 0:
            head = self.varint()
            is_packed, run = bool(head & 1), min(left, (head >> 1) * (8 if head & 1 else 1))
            if not run:
                raise ValueError("a run has no values")
            # The rest of the last group of bit-packed numbers may be absent.
            yield run, self.bytes((run * width if is_packed else width) + 7 >> 3), is_packed
            left -= run

    def indexes(self, count: int, width: int) -> Numbers:
        """`count` numbers of `width` bits in the hybrid encoding."""
        if width > WIDTH_MAX:
            raise ValueError("numbers are packed in more than 32 bits")
        runs = [(run, 8 * (self.at - len(data)), is_packed) for run, data, is_packed in self.runs(count, width)]
        each, starts, are_packed = np.array(runs, np.int64).reshape(-1, 3).T
        inside = np.arange(count) - np.repeat(np.cumsum(each) - each, each)
        return _bits(
            self._data[: self.at], np.repeat(starts, each) + inside * np.repeat(are_packed * width, each), width
        )

    def levels(self, count: int, width: int) -> Levels:
        """As `indexes`, for levels of at most 8 bits, in as many bytes."""
        levels = [np.zeros(0 if width else count, np.uint8)]
        for run, data, is_packed in self.runs(count if width else 0, width):
            if is_packed:
                bits = np.unpackbits(np.frombuffer(data, np.uint8), count=run * width, bitorder="little")
                levels.append((bits.reshape(-1, width) @ (1 << np.arange(width, dtype=np.uint8))).astype(np.uint8))
            else:
                levels.append(np.full(run, data[0], np.uint8))
        return np.concatenate(levels)


def _bits(data: memoryview, bits: Numbers, width: int | Numbers) -> Numbers:
    """The numbers of `width` bits, up to 32, that begin at these bits of the data."""
    padded = np.frombuffer(bytes(data) + bytes(8), np.uint8)
    words = np.ndarray((len(padded) - 7,), "<u8", padded, strides=(1,))
    shifted = words[bits >> 3].astype(np.int64) >> (bits & 7)  # the sign fills only bits above those that are used
    return np.asarray(shifted & ((np.int64(1) << width) - 1), np.int64)


# --- fixed-size lists


class FixedList(NamedTuple):
    """A fixed-size list around a leaf: its repetition level, and the definition level from which it has values."""

    repetition: int
    defined: int
    size: int


def leaves(schema: pa.Schema) -> list[range]:
    """The positions of the column chunks of every top-level column."""
    ends = list(accumulate((len(list(_leaves(field, 0, 0, ()))) for field in schema), initial=0))
    return [range(start, end) for start, end in pairwise(ends)]


@lru_cache(SCHEMAS_MAX)
def fixed_lists(schema: pa.Schema) -> list[tuple[FixedList, ...]]:
    """The fixed-size lists around each leaf of the columns, in the order of the leaves."""
    return [lists for field in schema for lists in _leaves(field, 0, 0, ())]


def _leaves(
    field: pa.Field, defined: int, repetition: int, around: tuple[FixedList, ...]
) -> Iterator[tuple[FixedList, ...]]:
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
        around = (*around, FixedList(repetition, defined, kind.list_size))
    children = (kind.key_field, kind.item_field) if types.is_map(kind) else (kind.value_field,)
    for child in children:
        yield from _leaves(child, defined, repetition, around)


def check_list_sizes(repetitions: Levels, definitions: Levels, lists: Sequence[FixedList]) -> None:
    """Raise ValueError unless each list has its size, or no value if it is null, by all levels of a leaf.

    Arrow builds fixed-size lists from these levels, and aborts the process if a null list has values.
    """
    if len(repetitions) != len(definitions) or (len(repetitions) and repetitions[0]):
        raise ValueError("a column begins within a list")
    for fixed in lists:
        chosen = repetitions <= fixed.repetition
        starts = np.flatnonzero(repetitions[chosen] < fixed.repetition)
        counts = np.diff(np.append(starts, np.count_nonzero(chosen)))
        first = definitions[chosen][starts]
        if not (counts == np.where(first >= fixed.defined, fixed.size, 1)).all() or (first == fixed.defined - 1).any():
            raise ValueError(f"a list does not have {fixed.size} values")
        if (definitions[repetitions == fixed.repetition] < fixed.defined).any():
            raise ValueError("a list continues with an undefined value")


# --- the decoded size of column chunks


def chunk_bytes_max(  # noqa: PLR0913 - what is checked, and how, each by its name
    data: bytes | memoryview,
    chunk: Any,
    column: Any,
    rows: int,
    most: Decoded,
    lists: Sequence[FixedList] = (),
    *,
    is_exact: bool = False,
    turn: Callable[[Decoded], AbstractContextManager[object]] = lambda decoded: nullcontext(),
) -> Decoded:
    """The most bytes that a column chunk takes: more than `most` as soon as it is known to exceed it.

    `data` are its bytes from its first page on, `chunk` is its `ColumnChunkMetaData` (only `num_values` and
    `compression` are used) and `column` its `ParquetColumnSchema`. At most this many bytes are decompressed at a time.
    `is_exact`: count texts in a dictionary one by one even if a rough bound is within `most`. If the chunk is within
    `most`, the sizes of its fixed-size `lists` are checked, in `turn`. Raises ValueError if the pages are invalid or
    not as writers produce them.
    """
    pages = memoryview(data).cast("B")
    try:
        decoded = _bound_chunk(pages, chunk, column, rows, most, is_exact)
        if lists and decoded.is_within(most):
            with turn(decoded):
                check_list_sizes(*_levels(pages, chunk, column), lists)
        return decoded
    except _UNREADABLE as error:
        raise ValueError(f"the pages of column {column.path} cannot be read: {error}") from error


def columns_bytes_max(
    columns: Iterable[tuple[pa.Field, Iterable[int]]],
    rows: int,
    most: Decoded,
    chunk_bytes: Callable[[int, Decoded], Decoded],
) -> Decoded:
    """The most bytes that columns of a row group take: more than `most` as soon as they are known to exceed it.

    The columns come with the positions of their chunks; `chunk_bytes` bounds the chunk at a position.
    """
    kept = passing = 0
    for field, positions in columns:
        taken = 0
        for position in positions:
            decoded = chunk_bytes(position, Decoded(most.kept - kept - taken, most.passing))
            taken, passing = taken + decoded.kept, max(passing, decoded.passing)
            if not Decoded(kept + taken, passing).is_within(most):
                return Decoded(kept + taken, passing)
        kept += max(taken, rows * fixed_bytes(field.type))  # a fixed-size list takes its space also if it is null
    return Decoded(kept, passing)


class _Page(NamedTuple):
    """A page: its header, the number of its values, their encoding, its bytes and their decompressed size."""

    kind: int
    head: dict[int, Any]
    encoding: int
    values: int
    packed: memoryview
    size: int

    @property
    def taken(self) -> int:
        """The decompressed size; Arrow uses uncompressed bytes as they are, whatever size the header declares."""
        return max(self.size, len(self.packed))


def _bound_chunk(data: memoryview, chunk: Any, column: Any, rows: int, most: Decoded, is_exact: bool) -> Decoded:
    """As `chunk_bytes_max`, without its lists."""
    kind: str = column.physical_type  # with which Arrow decodes, whatever the chunk declares
    count: int = chunk.num_values
    stored, kept_bits, passing_each = _value_sizes(kind, column)
    if count < 0 or stored < 0:
        raise ValueError(f"column {column.path} has {count} values of {stored} bytes")
    lists = column.max_repetition_level  # there are as many outermost lists as rows
    kept = kept_bits * count // 8 + 1 + (_OFFSET_BYTES * (rows + count * (lists - 1)) if lists else 0)
    passing, largest, least, values = passing_each * count, 0, 0, 0  # Arrow allocates what the footer declares
    dictionary: _Page | None = None
    named: list[_Page] = []
    shared: list[_Page] = []
    for page in _pages(data):
        passing, largest = passing + PAGE_BYTES, max(largest, 2 * page.taken)
        least += PAGE_KEPT_BYTES + page.taken // UNPACKED_SHARE
        if page.kind == _DICTIONARY:
            if dictionary is not None or values or page.values * stored > page.taken:
                raise ValueError("a dictionary is misplaced, or has fewer values than it declares")
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
        if not (bound := Decoded(max(kept, least), passing + largest)).is_within(most):
            return bound
    if named and dictionary is None:
        raise ValueError("there is no dictionary")
    for page in shared:
        prefixes = _prefix_bytes(page, chunk.compression, column)
        kept, passing = kept + prefixes, passing + prefixes
        if not (bound := Decoded(kept, passing + largest)).is_within(most):
            return bound
    if named and dictionary is not None and kind == "BYTE_ARRAY":
        kept += _dictionary_bytes(dictionary, named, chunk.compression, column, 0 if is_exact else most.kept - kept)
    kept = max(kept, least)
    return Decoded(kept, passing + largest + (kept // 2 if kind == "BYTE_ARRAY" else 0))  # buffers of texts grow


def _value_sizes(kind: str, column: Any) -> tuple[int, int, int]:
    """The least bytes of a value in a page; its bits in Arrow, without the contents of texts and the offsets of lists;
    and its bytes while it is decoded: a copy, and its levels.
    """
    depth, lists = column.max_definition_level, column.max_repetition_level
    if kind == "BYTE_ARRAY":
        stored, width, copied = _LENGTH_BYTES, 8 * _OFFSET_BYTES, 0
    elif kind == "FIXED_LEN_BYTE_ARRAY":
        stored, width, copied = column.length, 8 * column.length, column.length
    elif kind in _WIDTHS:
        stored, width, copied = _WIDTHS[kind]
    else:
        raise ValueError(f"values have the unknown type {kind}")
    if "DECIMAL" in (column.logical_type.type, column.converted_type):
        width = max(width, 8 * _DECIMAL_BYTES)
    width = _NARROW.get(column.converted_type, width)
    levels = _LEVEL_BYTES * ((depth > 0) + (lists > 0))
    return stored, width + 1 + depth, copied + levels


def _pages(data: memoryview) -> Iterator[_Page]:
    """The pages of a chunk, in order."""
    reader = _Reader(data)
    while reader.left:
        fields = reader.struct()
        kind, size, packed = (_number(fields, name) for name in (_TYPE, _UNPACKED, _PACKED))
        head = fields.get(_HEADS.get(kind, 0))
        if not isinstance(head, dict):
            raise ValueError(f"a page is of kind {kind}, or has no header of its kind")
        encoding = _number(head, _ENCODING_2 if kind == _DATA_2 else _ENCODING)
        yield _Page(kind, head, encoding, _number(head, _COUNT), reader.bytes(packed), size)


def _number(fields: dict[int, Any], name: int) -> int:
    number = fields.get(name)
    if type(number) is not int or number < 0:
        raise ValueError(f"a page header has {number} as field {name}")
    return number


def _decompress(packed: memoryview, size: int, compression: str) -> memoryview:
    """Decompress a page. Raises an error if its size differs from its header."""
    if compression == "UNCOMPRESSED" or not size:
        return packed
    if compression not in _CODECS:
        raise ValueError(f"a page has the unknown compression {compression}")
    data = pa.Codec(_CODECS[compression]).decompress(pa.py_buffer(packed), size)
    return memoryview(data).cast("B")  # Arrow's own bytes are signed


def _levels(data: memoryview, chunk: Any, column: Any) -> tuple[Levels, Levels]:
    """The repetition and definition levels of a column chunk that is within its bounds."""
    repetitions, definitions = [np.zeros(0, np.uint8)], [np.zeros(0, np.uint8)]
    for page in _pages(data):
        if page.kind != _DICTIONARY:
            first, second, _ = _levels_and_values(page, chunk.compression, column)
            repetitions.append(_Reader(first).levels(page.values, column.max_repetition_level.bit_length()))
            definitions.append(_Reader(second).levels(page.values, column.max_definition_level.bit_length()))
    return np.concatenate(repetitions), np.concatenate(definitions)


def _levels_and_values(page: _Page, compression: str, column: Any) -> tuple[memoryview, memoryview, memoryview]:
    """The repetition levels, the definition levels and the values of a data page."""
    if page.kind == _DATA_2:
        start, length = _number(page.head, _REPETITION_BYTES), _number(page.head, _DEFINITION_BYTES)
        is_packed, end = page.head.get(_IS_PACKED), start + length
        if type(is_packed) is not bool or end > min(page.size, len(page.packed)):
            raise ValueError("a page has more levels than bytes, or does not record whether it is compressed")
        packed = page.packed[end:]
        values = _decompress(packed, page.size - end, compression) if is_packed else packed
        return page.packed[:start], page.packed[start:end], values
    data = _decompress(page.packed, page.size, compression)
    levels = []
    for level, encoding in (
        (column.max_repetition_level, _REPETITION_ENCODING),
        (column.max_definition_level, _DEFINITION_ENCODING),
    ):
        if level and page.head.get(encoding) != _RLE:
            raise ValueError("levels are not run-length encoded")
        end = _LENGTH_BYTES + int(_LENGTH.unpack_from(data)[0]) if level else 0
        levels.append(data[_LENGTH_BYTES:end])
        data = data[end:]
    return levels[0], levels[1], data


def _prefix_bytes(page: _Page, compression: str, column: Any) -> int:
    """The bytes of the prefixes that texts share with their predecessors, including the copies made of them.

    Arrow unpacks as many lengths as these declare, not as the page header declares: so both are compared.
    """
    reader = _Reader(_levels_and_values(page, compression, column)[2])
    if page.encoding == _LENGTHS:
        reader.packed_head(page.values)
        return 0
    prefixes = reader.packed(page.values)
    reader.packed_head(page.values)
    if len(prefixes) and int(prefixes.min()) < 0:
        raise ValueError("a text has a negative shared prefix")
    return 2 * int(prefixes.sum())


def _dictionary_bytes(dictionary: _Page, pages: Sequence[_Page], compression: str, column: Any, needed: int) -> int:
    """The bytes of all texts that are stored as indexes of a dictionary; or a bound, if that is within `needed`.

    The bounds are the bytes of the whole dictionary, then its longest text, then the texts one by one.
    """
    count = sum(page.values for page in pages)
    bound = count * dictionary.taken
    largest = max(dictionary.values, *(page.values for page in pages))
    if bound <= needed or largest > EXACT_VALUES or compression not in ("UNCOMPRESSED", *_CODECS):
        return bound
    lengths = _text_lengths(_decompress(dictionary.packed, dictionary.size, compression), dictionary.values)
    bound = count * int(lengths.max(initial=0))
    return bound if bound <= needed else sum(_text_bytes(page, lengths, compression, column) for page in pages)


def _text_lengths(data: memoryview, count: int) -> Numbers:
    """The lengths of the texts of a dictionary."""
    lengths, at = [], 0
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH_BYTES + length
        if at > len(data):
            raise ValueError("a dictionary ends within a text")
        lengths.append(length)
    return np.array(lengths, np.int64)


def _text_bytes(page: _Page, lengths: Numbers, compression: str, column: Any) -> int:
    """The bytes of the texts of a page, which has at most `EXACT_VALUES` indexes."""
    _, levels, values = _levels_and_values(page, compression, column)
    count, depth = page.values, column.max_definition_level
    if depth:
        count = int(np.count_nonzero(_Reader(levels).indexes(count, depth.bit_length()) == depth))
    return int(lengths[_Reader(values, 1).indexes(count, values[0])].sum()) if count else 0


# --- footers


def check_footer(footer: bytes | memoryview, chunks: Sequence[int] | None, schema: Any = None) -> int:
    """Raise ValueError if Arrow must not be asked about the footer or a column. Returns the number of column chunks.

    `chunks` are the column chunks of each row group by the index of a part. Any other count is refused, since three
    bytes of a footer may become a kilobyte in memory. None: the file has no index, and at most CHUNKS_MAX. Without
    `schema`, the file's `ParquetSchema`, only the counts are checked: before Arrow reads the footer. Memory: the
    metadata of one row group.
    """
    try:
        count = total = 0
        for count, group in enumerate(_Footer(memoryview(footer)).groups(chunks), 1):
            columns = group[_COLUMNS]
            total += len(columns)
            expected = len(columns) if chunks is None else chunks[count - 1]
            if len(columns) != (expected if schema is None else len(schema.names)) or total > CHUNKS_MAX:
                raise ValueError("a row group of the footer has other columns than the file")
            for position, chunk in enumerate(columns if schema is not None else ()):
                _check_column(chunk, schema.column(position))
        if chunks is not None and count != len(chunks):
            raise ValueError("the footer has fewer row groups than the index")
        return total
    except _UNREADABLE_FOOTER as error:
        raise ValueError(f"the footer cannot be read: {error}") from error


def check_metadata(footer: bytes | memoryview, chunks: Sequence[int] | None, metadata: Any) -> None:
    """Raise an error if Arrow must not be asked about a column of the footer, or about the Arrow schema in it."""
    check_footer(footer, chunks, metadata.schema)
    if (arrow := (metadata.metadata or {}).get(b"ARROW:schema")) is not None:
        check_schema(b64decode(arrow))


class SparseFile(io.RawIOBase):
    """A file of `size` bytes of which only some segments are available; reading elsewhere is an error."""

    def __init__(self, segments: Sequence[tuple[int, bytes]], size: int) -> None:
        self._segments = segments
        self._size = size
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int = -1) -> memoryview:
        """A view of the bytes, which Arrow does not copy."""
        for start, data in self._segments:
            if start <= self._position and self._position + size <= start + len(data):
                piece = memoryview(data)[self._position - start : self._position - start + size]
                self._position += len(piece)
                return piece
        raise OSError(_NOT_FETCHED)


class FooterProbe:
    """Checks what the footer of a file of `size` bytes says about column chunks, without reading the file."""

    def __init__(self, metadata: Any, size: int) -> None:
        self._reader = pq.ParquetFile(SparseFile((), size), metadata=metadata, pre_buffer=False).reader

    def check(self, group: int, position: int) -> None:
        """Raise an error of Arrow if it refuses the metadata of a column chunk.

        Only a read reports it: asked for the metadata of such a column pyarrow aborts the process.
        """
        try:
            self._reader.read_row_groups([group], column_indices=[position], use_threads=False)
        except OSError as error:
            if _NOT_FETCHED not in str(error):
                raise


def chunk_start(chunk: Any) -> int:
    """The offset of the first page of a column chunk, by its `ColumnChunkMetaData`. An offset of 0 means none."""
    offsets = [chunk.data_page_offset, chunk.dictionary_page_offset if chunk.has_dictionary_page else None]
    return int(min((offset for offset in offsets if offset), default=0))


def read_unknown_footer(data: bytes, spend: Callable[[int], object]) -> Any:
    """The `FileMetaData` of an untrusted file without our index.

    `spend` counts Arrow's memory before Arrow allocates it. Raises ValueError, ArrowException, OSError.
    """
    end = len(data) - _TAIL_BYTES
    start = end - int.from_bytes(data[end : end + 4], "little") if end > 0 else -1
    if start < 0 or data[end + 4 :] != _MAGIC:
        raise ValueError("it is not a Parquet file, or was cut off: it does not end with a footer")
    if end - start > FOOTER_BYTES_MAX:
        raise ValueError(f"its footer takes more than {FOOTER_BYTES_MAX} bytes; write larger row groups")
    footer = memoryview(data)[start:end]
    spend(check_footer(footer, None) * _CHUNK_BYTES)
    metadata = pq.read_metadata(pa.BufferReader(data))
    check_metadata(footer, None, metadata)
    return metadata


def row_group_bytes_max(
    data: bytes, metadata: Any, probe: FooterProbe, group: int, schema: pa.Schema, most: Decoded
) -> Decoded:
    """The most bytes that a row group of a whole file takes: more than `most` as soon as it is known to exceed it.

    Raises ValueError, ArrowException.
    """
    body = memoryview(data)[: len(data) - metadata.serialized_size - _TAIL_BYTES]
    rows, lists = metadata.row_group(group).num_rows, fixed_lists(schema)

    def chunk_bytes(position: int, left: Decoded) -> Decoded:
        probe.check(group, position)
        chunk, column = metadata.row_group(group).column(position), metadata.schema.column(position)
        start, size = chunk_start(chunk), chunk.total_compressed_size
        if not 0 <= start <= start + size <= len(body):
            raise ValueError(f"column {column.path} is not within the file")
        pages = body[start : start + size]
        return chunk_bytes_max(pages, chunk, column, rows, left, lists[position], is_exact=True)

    return columns_bytes_max(zip(schema, leaves(schema), strict=True), rows, most, chunk_bytes)


def _check_column(chunk: dict[int, Any], column: Any) -> None:
    meta = chunk[_META]
    if any(field in chunk for field in _ENCRYPTED) or _TYPES[meta[_COLUMN_TYPE]] != column.physical_type:
        raise ValueError(f"the footer describes another column than {column.path}")
    if meta[_COLUMN_CODEC] not in _CODEC_NUMBERS:  # asked for the name of another one pyarrow aborts the process
        raise ValueError(f"column {column.path} has the unknown compression {meta[_COLUMN_CODEC]}")
    kind = column.physical_type
    length = column.length if kind == "FIXED_LEN_BYTE_ARRAY" else _TYPE_LENGTHS.get(kind)
    statistics = meta.get(_STATISTICS, {})
    if length is not None and any(len(statistics[field]) != length for field in _BOUNDS if field in statistics):
        raise ValueError(f"the footer has a bound of column {column.path} that is not of type {kind}")
    sizes = meta.get(_SIZES, {})
    for field, level in ((_REPETITIONS, column.max_repetition_level), (_DEFINITIONS, column.max_definition_level)):
        if len(sizes.get(field, ())) not in (0, level + 1):
            raise ValueError(f"the footer counts other levels than column {column.path} has")


class _Footer(_Reader):
    """Reads a footer, which also has lists, numbers of 64 bits and bytes."""

    DEPTH_MAX = 16
    _left_items = ITEMS_MAX  # that may be read

    def groups(self, chunks: Sequence[int] | None) -> Iterator[dict[int, Any]]:
        """The metadata of each row group, in order; all other fields are skipped."""
        for name, kind in self.fields():
            self._left_items = ITEMS_MAX
            if name != _ROW_GROUPS:
                self._value(kind, 0)
                continue
            inner, count = self._list()
            if count > (CHUNKS_MAX if chunks is None else len(chunks)):
                raise ValueError("the footer has more row groups than the index")
            for number in range(count):
                self._left_items = ITEMS_MAX if chunks is None else ITEMS_LEAST + ITEMS_OF_CHUNK * chunks[number]
                yield self._item(inner, 1)

    def struct(self, depth: int = 0) -> dict[int, Any]:
        fields = super().struct(depth)
        self._spend(1 + len(fields))
        return fields

    def _spend(self, items: int) -> None:
        self._left_items -= items
        if self._left_items < 0:
            raise ValueError("the footer has too many fields and list items")

    def _list(self) -> tuple[int, int]:
        """The type and the number of a list's items."""
        head = self.byte()
        count = head >> 4 if head >> 4 < 15 else self.varint()
        if count > self.left:
            raise ValueError("a list has more items than bytes")
        self._spend(count)
        return head & 15, count

    def _value(self, kind: int, depth: int) -> Any:
        if depth > self.DEPTH_MAX:
            raise ValueError("the footer is nested too deep")
        if kind in _LISTS:
            inner, count = self._list()
            return [self._item(inner, depth + 1) for _ in range(count)]
        if kind == _BINARY:
            return self.bytes(self.varint())
        return self.signed(64) if kind in (_I16, _I64) else super()._value(kind, depth)

    def _item(self, kind: int, depth: int) -> Any:
        """An item of a list, in which a flag takes a byte."""
        return self.byte() if kind in (_TRUE, _FALSE) else self._value(kind, depth)
