"""Whether the footer of a Parquet file is one that Arrow bears to be asked about.

What Arrow thinks of a column of a footer is only partly an error of Python: some footers end the process, and from a
statistic that is too short it reads beyond the end. So what is asked of a footer that somebody else may have made is
compared with its schema before. The format is `parquet.thrift` in Thrift's compact protocol.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any

from persist.parts.page_numbers import Reader

ITEMS_MAX = 500_000  # fields and items of lists of a footer, besides its row groups: more than 2,000 columns take
ITEMS_LEAST, ITEMS_OF_CHUNK = 1_000, 200  # of a row group, and more for each of its column chunks
_ROW_GROUPS, _COLUMNS, _META = 4, 1, 3
_ENCRYPTED = (8, 9)  # fields of a column chunk
_TYPE, _STATISTICS, _SIZES = 1, 12, 16
_BOUNDS = (1, 2, 5, 6)  # fields of statistics that hold a value
_REPETITIONS, _DEFINITIONS = 2, 3  # fields of the statistics of sizes
_TYPES = ("BOOLEAN", "INT32", "INT64", "INT96", "FLOAT", "DOUBLE", "BYTE_ARRAY", "FIXED_LEN_BYTE_ARRAY")
_LENGTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 12, "FLOAT": 4, "DOUBLE": 8}
_UNREADABLE = (IndexError, OverflowError, KeyError, TypeError, AttributeError, struct.error)


def check_footer(footer: bytes, chunks: Sequence[int], schema: Any = None) -> None:
    """Raise ValueError where Arrow must not be asked about the footer, or about a column.

    `chunks` are the column chunks of each row group, as our index tells them: another count of either is refused, since
    three bytes of a footer may become a kilobyte in memory. Without `schema`, the file's `ParquetSchema`, only that is
    looked at: before Arrow reads the footer. Memory: what one row group tells.
    """
    try:
        found = 0
        for found, group in enumerate(_Footer(memoryview(footer), 0).groups(chunks), 1):
            columns = group[_COLUMNS]
            if len(columns) != (chunks[found - 1] if schema is None else len(schema.names)):
                raise ValueError("a row group of the footer has other columns than the file")
            for position, chunk in enumerate(columns if schema is not None else ()):
                _check_column(chunk, schema.column(position))
        if found != len(chunks):
            raise ValueError("the footer has fewer row groups than the index")
    except _UNREADABLE as error:
        raise ValueError(f"the footer cannot be read: {error}") from error


def _check_column(chunk: dict[int, Any], column: Any) -> None:
    meta = chunk[_META]
    if any(field in chunk for field in _ENCRYPTED) or _TYPES[meta[_TYPE]] != column.physical_type:
        raise ValueError(f"the footer tells of another column than {column.path}")
    kind = column.physical_type
    length = column.length if kind == "FIXED_LEN_BYTE_ARRAY" else _LENGTHS.get(kind)
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

    def groups(self, chunks: Sequence[int]) -> Iterator[dict[int, Any]]:
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
            if count > len(chunks):
                raise ValueError("the footer has more row groups than the index")
            for number in range(count):
                self._left_items = ITEMS_LEAST + ITEMS_OF_CHUNK * chunks[number]
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
